//! HTTP of the cluster collector, on the port of its gRPC: status, metrics, incidents with their files.

use axum::{
    Json, Router,
    extract::{Path, Query, Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::Deserialize;
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use tonic::Status;

use super::{hub::Command, service::Token};
use crate::{
    http::{ANSWER, DUMP, is_local, no_answer, refusal},
    pages,
};

/// What the pages need.
#[derive(Debug, Clone)]
pub struct Pages {
    /// To the hub.
    pub commands: mpsc::UnboundedSender<Command>,
    /// Folders of the incident folders.
    pub roots: pages::Roots,
    /// What a request must carry.
    pub token: Token,
    /// Without TLS only requests that name this machine are answered: a page from elsewhere must not reach it.
    pub local_only: bool,
}

/// All pages, in front of the gRPC service, which is behind the same door.
pub fn router(pages: Pages, grpc: Router) -> Router {
    Router::new()
        .route("/health", get(|| async { "ok\n" }))
        .route("/status", get(status))
        .route("/metrics", get(metrics))
        .route("/dump", post(dump))
        .route("/incidents", get(incidents))
        .route("/incidents/{id}", get(incident))
        .route("/incidents/{id}/files", get(files))
        .route("/incidents/{id}/{file}", get(file))
        .with_state(pages.clone())
        .merge(grpc)
        .layer(middleware::from_fn_with_state(pages, door))
}

async fn door(State(pages): State<Pages>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let authorization = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let grpc = headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    if !pages.token.admits(authorization) {
        if grpc {
            return Status::unauthenticated("the token is wrong or missing").into_http();
        }
        let ask = [(header::WWW_AUTHENTICATE, "Basic realm=\"xpu_timer: the token is the password\"")];
        return (StatusCode::UNAUTHORIZED, ask, "the token is wrong or missing\n").into_response();
    }
    if pages.local_only && !grpc && !names_this_machine(&request) {
        return (StatusCode::FORBIDDEN, "only requests to localhost are answered\n").into_response();
    }
    next.run(request).await
}

/// HTTP/2 names the host in its target, HTTP/1 in a header.
fn names_this_machine(request: &Request) -> bool {
    let mut headers: HeaderMap = request.headers().clone();
    if let Some(value) = request.uri().authority().and_then(|authority| authority.as_str().parse().ok()) {
        headers.insert(header::HOST, value);
    }
    is_local(&headers)
}

async fn ask<T>(pages: &Pages, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
    let (reply, answer) = oneshot::channel();
    pages.commands.send(command(reply)).ok()?;
    timeout(ANSWER, answer).await.ok()?.ok()
}

async fn status(State(pages): State<Pages>) -> Response {
    ask(&pages, Command::Status).await.map_or_else(no_answer, |status| Json(status).into_response())
}

async fn metrics(State(pages): State<Pages>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    ask(&pages, Command::Metrics).await.map_or_else(no_answer, |text| (kind, text).into_response())
}

#[derive(Deserialize)]
struct DumpQuery {
    job: Option<String>,
}

async fn dump(State(pages): State<Pages>, Query(query): Query<DumpQuery>) -> Response {
    let (reply, answer) = oneshot::channel();
    if pages.commands.send(Command::Dump(query.job, reply)).is_err() {
        return no_answer();
    }
    match timeout(DUMP, answer).await {
        Ok(Ok(Ok(answer))) => Json(answer).into_response(),
        Ok(Ok(Err(refused))) => refusal(refused),
        _ => no_answer(),
    }
}

async fn incidents(State(pages): State<Pages>) -> Response {
    pages::list(pages.roots).await
}

async fn incident(State(pages): State<Pages>, Path(id): Path<String>) -> Response {
    pages::verdict(pages.roots, id).await
}

async fn files(State(pages): State<Pages>, Path(id): Path<String>) -> Response {
    pages::files(pages.roots, id).await
}

async fn file(State(pages): State<Pages>, Path((id, name)): Path<(String, String)>) -> Response {
    pages::file(pages.roots, id, name).await
}
