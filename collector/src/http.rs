//! The control and metrics endpoints, on loopback only. A page that a browser loaded from elsewhere must not reach them, so only
//! requests that name this machine as their host, and come from no other origin, are answered.

use std::net::Ipv4Addr;

use axum::{
    extract::Request,
    http::{HeaderMap, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use tokio::net::TcpListener;

use crate::{inbox::Inbox, routes};

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
    let router = routes::control().layer(middleware::from_fn(local_only)).with_state(inbox);
    // It only ends with its listener, that is with the process.
    let _ = axum::serve(listener, router).await;
}

/// Serves the metrics endpoint until the process ends.
pub async fn serve_metrics(listener: TcpListener, inbox: Inbox) {
    let router = routes::metrics().layer(middleware::from_fn(local_only)).with_state(inbox);
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
