//! The control and metrics endpoints, on loopback only. A page that a browser loaded from elsewhere must not reach them, so only
//! requests that name this machine as their host, and come from no other origin, are answered.

use std::{net::Ipv4Addr, time::Duration};

use axum::{
    Json, Router,
    extract::{Path, Query, Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::Deserialize;
use serde_json::json;
use tokio::{net::TcpListener, sync::oneshot, time::timeout};

use crate::{
    inbox::{Command, Inbox, Refusal},
    pages,
};

/// The loop answers within milliseconds; this is for a node without any free processor.
pub const ANSWER: Duration = Duration::from_secs(10);
/// A dump takes its sample interval, which the user chooses, and some seconds.
pub const DUMP: Duration = Duration::from_secs(3600);

/// Listens on a loopback port.
///
/// # Errors
/// A sentence that names the port and the variable that decides it.
pub async fn listen(port: u16, what: &str, variable: &str) -> Result<TcpListener, String> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await;
    listener.map_err(|error| {
        format!(
            "there is no {what} endpoint: port {port} cannot be listened on ({error}); {variable} chooses another one"
        )
    })
}

/// Serves the control endpoint until the process ends.
pub async fn serve_control(listener: TcpListener, inbox: Inbox) {
    let router = Router::new()
        .route("/health", get(|| async { "ok\n" }))
        .route("/status", get(status))
        .route("/dump", post(dump))
        .route("/incidents", get(incidents))
        .route("/incidents/{id}", get(incident))
        .route("/incidents/{id}/files", get(files))
        .route("/incidents/{id}/{file}", get(file))
        .layer(middleware::from_fn(local_only))
        .with_state(inbox);
    // It only ends with its listener, that is with the process.
    let _ = axum::serve(listener, router).await;
}

/// Serves the metrics endpoint until the process ends.
pub async fn serve_metrics(listener: TcpListener, inbox: Inbox) {
    let router = Router::new().route("/metrics", get(metrics)).layer(middleware::from_fn(local_only)).with_state(inbox);
    // As above.
    let _ = axum::serve(listener, router).await;
}

async fn local_only(request: Request, next: Next) -> Response {
    if is_local(request.headers()) {
        return next.run(request).await;
    }
    (StatusCode::FORBIDDEN, "only requests to localhost are answered\n").into_response()
}

/// Whether a request names this machine and comes from no page of another one.
#[must_use]
pub fn is_local(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let host = text(header::HOST).is_some_and(is_loopback);
    let origin = text(header::ORIGIN).is_none_or(|origin| {
        origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://")).is_some_and(is_loopback)
    });
    host && origin
}

/// `localhost`, `127.0.0.1` or `[::1]`, with or without a port.
fn is_loopback(authority: &str) -> bool {
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port),
        _ => (authority, "0"),
    };
    port.bytes().all(|byte| byte.is_ascii_digit())
        && (host.eq_ignore_ascii_case("localhost") || host == "127.0.0.1" || host == "[::1]")
}

async fn ask<T>(inbox: &Inbox, patience: Duration, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
    let (reply, answer) = oneshot::channel();
    inbox.post(command(reply));
    timeout(patience, answer).await.ok()?.ok()
}

/// The loop does not answer.
#[must_use]
pub fn no_answer() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "error": "the collector does not answer" }))).into_response()
}

async fn status(State(inbox): State<Inbox>) -> Response {
    ask(&inbox, ANSWER, Command::Status).await.map_or_else(no_answer, |status| Json(status).into_response())
}

async fn metrics(State(inbox): State<Inbox>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    ask(&inbox, ANSWER, Command::Metrics).await.map_or_else(no_answer, |text| (kind, text).into_response())
}

#[derive(Deserialize)]
struct DumpQuery {
    job: Option<String>,
}

async fn dump(State(inbox): State<Inbox>, Query(query): Query<DumpQuery>) -> Response {
    let answer = ask(&inbox, DUMP, |reply| Command::Dump { job: query.job, reply }).await;
    match answer {
        Some(Ok(answer)) => Json(answer).into_response(),
        Some(Err(refused)) => refusal(refused),
        None => no_answer(),
    }
}

/// Why a dump by hand was not made.
#[must_use]
pub fn refusal(refused: Refusal) -> Response {
    let (code, text) = match refused {
        Refusal::NoJob(text) => (StatusCode::NOT_FOUND, text),
        Refusal::WhichJob(text) => (StatusCode::BAD_REQUEST, text),
    };
    (code, Json(json!({ "error": text }))).into_response()
}

/// Folders of the incidents; `None` when the loop does not answer.
async fn roots(inbox: &Inbox) -> Option<pages::Roots> {
    ask(inbox, ANSWER, Command::Folders).await
}

async fn incidents(State(inbox): State<Inbox>) -> Response {
    let Some(roots) = roots(&inbox).await else { return no_answer() };
    pages::list(roots).await
}

async fn incident(State(inbox): State<Inbox>, Path(id): Path<String>) -> Response {
    let Some(roots) = roots(&inbox).await else { return no_answer() };
    pages::verdict(roots, id).await
}

async fn files(State(inbox): State<Inbox>, Path(id): Path<String>) -> Response {
    let Some(roots) = roots(&inbox).await else { return no_answer() };
    pages::files(roots, id).await
}

async fn file(State(inbox): State<Inbox>, Path((id, name)): Path<(String, String)>) -> Response {
    let Some(roots) = roots(&inbox).await else { return no_answer() };
    pages::file(roots, id, name).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_loopback() {
        for host in ["localhost", "localhost:18888", "127.0.0.1:1", "[::1]", "[::1]:80", "LOCALHOST:1"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:18888", "127.0.0.1.evil:1", "", "localhost:1@evil", "::1"]
        {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn pages_from_elsewhere_are_refused() {
        let local = |pairs: &[(header::HeaderName, &str)]| {
            let headers = pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
            is_local(&headers)
        };
        assert!(local(&[(header::HOST, "localhost:1")]));
        assert!(local(&[(header::HOST, "localhost:1"), (header::ORIGIN, "http://127.0.0.1:1")]));
        assert!(!local(&[]));
        assert!(!local(&[(header::HOST, "evil.example:1")]));
        assert!(!local(&[(header::HOST, "localhost:1"), (header::ORIGIN, "http://evil.example")]));
        assert!(!local(&[(header::HOST, "localhost:1"), (header::ORIGIN, "null")]));
    }
}
