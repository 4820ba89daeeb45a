//! HTTP of the cluster collector on its gRPC port: status, metrics, and incidents with their files.

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use tokio::sync::mpsc;
use tonic::Status;

use crate::{
    cluster::hub::Command,
    http::{
        access::Token,
        is_local, is_same_origin,
        questions::{Question, QuestionSender},
        refusal, routes,
        server::Caller,
        timeline,
    },
};

/// The state of the pages.
#[derive(Debug, Clone)]
pub(crate) struct Pages {
    /// Channel to the hub.
    pub commands: mpsc::UnboundedSender<Command>,
    /// The token that a request must carry.
    pub token: Token,
    /// Without TLS, only requests that name this machine as their host are answered: a web page
    /// from elsewhere must not reach it.
    pub local_only: bool,
}

impl QuestionSender for Pages {
    fn ask(&self, question: Question) {
        // Fails only if the hub has ended; the request then gets no answer.
        let _ = self.commands.send(Command::Question(question));
    }
}

/// All pages, and the gRPC service behind the same access check.
pub(crate) fn router(pages: Pages, grpc: Router) -> Router {
    routes::control()
        .merge(timeline::routes())
        .merge(routes::health())
        .merge(routes::metrics())
        .with_state(pages.clone())
        .merge(grpc)
        .layer(middleware::from_fn_with_state(pages, authorize))
}

async fn authorize(State(pages): State<Pages>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let caller = request.extensions().get::<Caller>().cloned();
    let grpc = headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    if pages.token.is_set() {
        if !pages.token.is_shown(headers) {
            if let Some(caller) = caller.filter(|_| headers.contains_key(header::AUTHORIZATION)) {
                caller.failed().await;
            }
            if grpc {
                return Status::unauthenticated("the token is wrong or missing").into_http();
            }
            let ask = [(header::WWW_AUTHENTICATE, "Basic realm=\"xpu_timer: the token is the password\"")];
            return (StatusCode::UNAUTHORIZED, ask, "the token is wrong or missing\n").into_response();
        }
        if let Some(caller) = caller {
            caller.is_trusted();
        }
    } else if !caller.as_ref().is_some_and(Caller::is_owner) {
        // Without a token it listens on loopback only, where the kernel reports the user of a
        // connection.
        let why = refusal(caller.and_then(|caller| caller.uid));
        if grpc {
            return Status::permission_denied(why.trim_end()).into_http();
        }
        return (StatusCode::FORBIDDEN, why).into_response();
    }
    // This includes requests that look like gRPC: a web page may send any header to the host that
    // it was loaded from, or believes it was.
    let named = named_host(&request);
    let why = if pages.local_only && !is_local(&named) {
        "only requests to localhost are answered\n"
    } else if !is_same_origin(&named) {
        "requests from pages of another origin are refused\n"
    } else {
        return next.run(request).await;
    };
    if grpc {
        return Status::permission_denied(why.trim_end()).into_http();
    }
    (StatusCode::FORBIDDEN, why).into_response()
}

/// The headers including the host of the request: HTTP/2 has it in the target, HTTP/1 in a header.
fn named_host(request: &Request) -> HeaderMap {
    let mut headers: HeaderMap = request.headers().clone();
    if let Some(value) = request.uri().authority().and_then(|authority| authority.as_str().parse().ok()) {
        headers.insert(header::HOST, value);
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_other_origins_are_refused() {
        let same = |origin: Option<&str>| {
            let host = [(header::HOST, "head:18890")];
            let pairs = host.into_iter().chain(origin.map(|origin| (header::ORIGIN, origin)));
            is_same_origin(&pairs.map(|(name, value)| (name, value.parse().unwrap())).collect())
        };
        assert!(same(None) && same(Some("https://head:18890")));
        assert!(!same(Some("https://head:1")) && !same(Some("https://evil.example")) && !same(Some("null")));
    }
}
