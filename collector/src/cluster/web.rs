//! HTTP of the cluster collector, on the port of its gRPC: status, metrics, incidents with their files.

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use tokio::sync::mpsc;
use tonic::Status;

use super::{hub::Command, service::Token};
use crate::{
    http::is_local,
    inbox::Question,
    routes::{self, Answers},
};

/// What the pages need.
#[derive(Debug, Clone)]
pub struct Pages {
    /// To the hub.
    pub commands: mpsc::UnboundedSender<Command>,
    /// What a request must carry.
    pub token: Token,
    /// Without TLS only requests that name this machine are answered: a page from elsewhere must not reach it.
    pub local_only: bool,
}

impl Answers for Pages {
    fn ask(&self, question: Question) {
        // Nobody answers when the hub has ended.
        let _ = self.commands.send(Command::Question(question));
    }
}

/// All pages, in front of the gRPC service, which is behind the same door.
pub fn router(pages: Pages, grpc: Router) -> Router {
    routes::control()
        .merge(routes::metrics())
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
