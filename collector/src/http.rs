//! The control and metrics endpoints of a node, on loopback only. The control port answers its
//! owner, root, and requests with the token; the metrics are open to all users of this machine.
//! Only requests that name this machine as their host and come from no other origin are answered,
//! so web pages from elsewhere reach neither endpoint.

pub mod access;
pub(crate) mod peer;
pub(crate) mod questions;
pub(crate) mod routes;
pub(crate) mod server;
pub(crate) mod timeline;
pub(crate) mod watch;

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::{Bytes, HttpBody},
    extract::{Request, State},
    http::{self, HeaderMap, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use hyper::body::{Frame, SizeHint};
use nix::unistd::getuid;
use tokio::{net::TcpListener, sync::Mutex};
use tonic::{Status, body::Body, codegen::Service};

use crate::http::{
    access::Token,
    peer::Owners,
    questions::QuestionSender,
    server::{Caller, Server},
};

/// An endpoint of the node collector is missing.
#[derive(Debug, thiserror::Error)]
#[error("there is no {what} endpoint: {problem}")]
pub struct NoEndpoint {
    /// `control` or `metrics`.
    pub what: &'static str,
    /// The problem with its port.
    pub problem: PortError,
}

/// A port that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on port {port} ({reason}{}); choose another port with {variable}", by_user(*.owner))]
pub struct PortError {
    /// The port.
    pub port: u16,
    /// The other user whose process has it.
    pub owner: Option<u32>,
    /// The variable that sets it.
    pub variable: &'static str,
    /// The answer of the kernel.
    pub reason: io::Error,
}

fn by_user(owner: Option<u32>) -> String {
    owner.map(|uid| format!(", by a process of user {uid}")).unwrap_or_default()
}

/// Listens on a loopback port.
///
/// # Errors
/// The port cannot be used.
pub async fn listen(port: u16, what: &'static str, variable: &'static str) -> Result<TcpListener, NoEndpoint> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    TcpListener::bind(address).await.map_err(|reason| {
        let owner = Owners::of_listener(address).filter(|uid| *uid != getuid().as_raw());
        NoEndpoint { what, problem: PortError { port, owner, variable, reason } }
    })
}

/// Largest data frame that a node sends, without its head. The receiver's buffer of a connection
/// has eight kilobytes at first. A larger frame would let it grow for as long as the connection
/// lasts.
const FRAME_BYTES: usize = 8 * 1024 - 9;

/// A channel whose requests have data frames of at most [`FRAME_BYTES`].
#[derive(Debug, Clone)]
pub struct SmallFrames<S>(pub S);

impl<S: Service<http::Request<Body>>> Service<http::Request<Body>> for SmallFrames<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> S::Future {
        self.0.call(request.map(|body| Body::new(SmallFrameBody { body, rest: Bytes::new() })))
    }
}

struct SmallFrameBody {
    body: Body,
    // The rest of a frame that was too large.
    rest: Bytes,
}

impl HttpBody for SmallFrameBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(context)).map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => self.rest = data,
                Some(Ok(Err(trailers))) => return Poll::Ready(Some(Ok(trailers))),
                Some(Err(status)) => return Poll::Ready(Some(Err(status))),
                None => return Poll::Ready(None),
            }
        }
        let length = self.rest.len().min(FRAME_BYTES);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, hint) = (self.rest.len() as u64, self.body.size_hint());
        let mut size = SizeHint::new();
        size.set_lower(hint.lower() + rest);
        hint.upper().into_iter().for_each(|upper| size.set_upper(upper + rest));
        size
    }
}

/// Serves the control endpoint until the process ends.
pub async fn serve_control(server: Server, listener: TcpListener, answers: impl QuestionSender, token: Token) {
    server.run(listener, control(routes::control().merge(timeline::routes()).with_state(answers), token)).await;
}

/// Serves the metrics endpoint until the process ends.
pub async fn serve_metrics(server: Server, listener: TcpListener, answers: impl QuestionSender) {
    let cache = Arc::new(Mutex::new(None));
    let router = routes::metrics()
        .layer(middleware::from_fn_with_state(cache, share_pages_among_other_users))
        .layer(middleware::from_fn(local_only))
        .with_state(answers);
    server.run(listener, router).await;
}

/// Pages for the owner only, and `/health`, which is open to all.
fn control(pages: Router, token: Token) -> Router {
    pages
        .layer(middleware::from_fn_with_state(token, owner_only))
        .merge(routes::health())
        .layer(middleware::from_fn(local_only))
}

async fn local_only(request: Request, next: Next) -> Response {
    if is_local(request.headers()) {
        return next.run(request).await;
    }
    (StatusCode::FORBIDDEN, "only requests to localhost are answered\n").into_response()
}

async fn owner_only(State(token): State<Token>, request: Request, next: Next) -> Response {
    let caller = request.extensions().get::<Caller>().cloned();
    if caller.as_ref().is_some_and(Caller::is_owner) {
        return next.run(request).await;
    }
    if token.is_shown(request.headers()) {
        if let Some(caller) = &caller {
            caller.is_trusted();
        }
        return next.run(request).await;
    }
    if let Some(caller) = caller.as_ref().filter(|_| request.headers().contains_key(header::AUTHORIZATION)) {
        caller.failed().await;
    }
    (StatusCode::FORBIDDEN, refusal(caller.and_then(|caller| caller.uid))).into_response()
}

/// Explains why a port of another user does not answer, and what to do.
#[must_use]
pub fn refusal(uid: Option<u32>) -> String {
    let owner = getuid().as_raw();
    let who = match uid {
        Some(uid) => format!("this request comes from user {uid}"),
        None => "the user behind this request is unknown".into(),
    };
    format!(
        "this collector answers its owner (user {owner}) and root only, and {who}; ask as that user, or send the token of the \
         collector's XPU_TIMER_COLLECTOR_TOKEN_FILE: curl -H \"Authorization: Bearer $(cat FILE)\" …\n"
    )
}

/// The last page that was served to users other than the owner.
type Cache = Arc<Mutex<Option<(Instant, Bytes)>>>;
/// Maximum age of a page for users other than the owner. It bounds the load on the event loop,
/// however many requests there are.
const PAGE_AGE: Duration = Duration::from_secs(1);
const PAGE_KIND: [(header::HeaderName, &str); 1] = [(header::CONTENT_TYPE, routes::PROMETHEUS)];

async fn share_pages_among_other_users(State(cache): State<Cache>, request: Request, next: Next) -> Response {
    if request.extensions().get::<Caller>().is_some_and(Caller::is_owner) {
        return next.run(request).await;
    }
    let mut cached = cache.lock().await;
    if let Some((_, page)) = cached.as_ref().filter(|(made, _)| made.elapsed() < PAGE_AGE) {
        return (PAGE_KIND, page.clone()).into_response();
    }
    let answer = next.run(request).await;
    if answer.status() != StatusCode::OK {
        return answer;
    }
    match axum::body::to_bytes(answer.into_body(), usize::MAX).await {
        Ok(page) => {
            *cached = Some((Instant::now(), page.clone()));
            (PAGE_KIND, page).into_response()
        }
        Err(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

/// Whether a request names this machine and comes neither from a web page of another machine nor
/// from one of another program on this machine.
#[must_use]
pub fn is_local(headers: &HeaderMap) -> bool {
    text(headers, header::HOST).is_some_and(is_loopback) && is_same_origin(headers)
}

/// Whether a requesting web page, if there is one, was loaded from here. A browser adds the user's
/// password to requests of other pages too, and other users of this machine may serve such pages.
#[must_use]
pub fn is_same_origin(headers: &HeaderMap) -> bool {
    let host = text(headers, header::HOST);
    text(headers, header::ORIGIN).is_none_or(|origin| authority(origin).is_some_and(|from| host == Some(from)))
}

fn text(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    headers.get(name).map(|value| value.to_str().unwrap_or("?"))
}

/// Host and port of an origin.
#[must_use]
pub fn authority(origin: &str) -> Option<&str> {
    origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"))
}

/// `localhost` or a loopback address, with or without a port.
fn is_loopback(authority: &str) -> bool {
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port),
        _ => (authority, "0"),
    };
    port.bytes().all(|byte| byte.is_ascii_digit()) && access::is_loopback(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_has_small_frames() {
        let sent: Vec<usize> = vec![1, FRAME_BYTES, 3 * FRAME_BYTES + 5];
        let frames = sent.iter().map(|length| Ok::<_, Status>(Bytes::from(vec![7; *length])));
        let body = axum::body::Body::from_stream(tokio_stream::iter(frames.collect::<Vec<_>>()));
        let mut small = SmallFrameBody { body: Body::new(body), rest: Bytes::new() };
        let mut received = Vec::new();
        while let Some(frame) = std::future::poll_fn(|context| Pin::new(&mut small).poll_frame(context)).await {
            received.push(frame.unwrap().into_data().unwrap().len());
        }
        assert_eq!(received, [1, FRAME_BYTES, FRAME_BYTES, FRAME_BYTES, FRAME_BYTES, 5]);
    }

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
        assert!(local(&[(header::HOST, "127.0.0.1:1"), (header::ORIGIN, "http://127.0.0.1:1")]));
        for origin in ["http://localhost:2", "http://127.0.0.1:1"] {
            assert!(
                !local(&[(header::HOST, "localhost:1"), (header::ORIGIN, origin)]),
                "another program's page: {origin}"
            );
        }
        assert!(!local(&[]));
        assert!(!local(&[(header::HOST, "evil.example:1")]));
        assert!(!local(&[(header::HOST, "localhost:1"), (header::ORIGIN, "http://evil.example")]));
        assert!(!local(&[(header::HOST, "localhost:1"), (header::ORIGIN, "null")]));
    }
}
