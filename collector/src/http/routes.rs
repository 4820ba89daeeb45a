//! The HTTP routes of both roles. Authentication happens before them; the event loop of the role
//! provides the content.

use std::time::Duration;

use axum::{
    Router,
    extract::{Path, Query, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::Deserialize;
use serde_json::json;
use tokio::{sync::oneshot, time::timeout};

use crate::{
    http::{
        pages,
        questions::{Answers, Question, Refusal},
    },
    incident::records::WithoutFolder,
    json::Json,
};

/// Timeout of an answer. The loop usually takes milliseconds; this allows for a node without any
/// idle processor.
const ANSWER: Duration = Duration::from_secs(10);
/// Timeout of a dump, which takes its sample interval, chosen by the user, and some seconds.
const DUMP: Duration = Duration::from_secs(3600);

/// The media type of `/metrics`.
pub const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Answers whether the collector serves requests.
pub fn health<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new().route("/health", get(|| async { "ok\n" }))
}

/// Status, dumps by hand, and incidents with their files.
pub fn control<A: Answers>() -> Router<A> {
    Router::new()
        .route("/status", get(status::<A>))
        .route("/dump", post(dump::<A>))
        .route("/slow_ranks", get(slow_ranks::<A>))
        .route("/incidents", get(incidents::<A>))
        .route("/incidents/{id}", get(incident::<A>))
        .route("/incidents/{id}/files", get(files::<A>))
        .route("/incidents/{id}/{file}", get(file::<A>))
}

/// The Prometheus text.
pub fn metrics<A: Answers>() -> Router<A> {
    Router::new().route("/metrics", get(metrics_page::<A>))
}

async fn ask<A: Answers, T>(
    answers: &A,
    patience: Duration,
    question: impl FnOnce(oneshot::Sender<T>) -> Question,
) -> Option<T> {
    let (reply, answer) = oneshot::channel();
    answers.ask(question(reply));
    timeout(patience, answer).await.ok()?.ok()
}

fn no_answer() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "error": "the collector does not answer" }))).into_response()
}

async fn status<A: Answers>(State(answers): State<A>) -> Response {
    let status = ask(&answers, ANSWER, Question::Status).await;
    status.map_or_else(no_answer, |status| Json(status).into_response())
}

async fn slow_ranks<A: Answers>(State(answers): State<A>) -> Response {
    let slow = ask(&answers, ANSWER, Question::SlowRanks).await;
    slow.map_or_else(no_answer, |slow| Json(slow).into_response())
}

async fn metrics_page<A: Answers>(State(answers): State<A>) -> Response {
    let kind = [(header::CONTENT_TYPE, PROMETHEUS)];
    ask(&answers, ANSWER, Question::Metrics).await.map_or_else(no_answer, |text| (kind, text).into_response())
}

#[derive(Deserialize)]
struct DumpQuery {
    job: Option<String>,
}

async fn dump<A: Answers>(State(answers): State<A>, Query(query): Query<DumpQuery>) -> Response {
    match ask(&answers, DUMP, |reply| Question::Dump { job: query.job, reply }).await {
        Some(Ok(answer)) => Json(answer).into_response(),
        Some(Err(refused)) => refusal(refused),
        None => no_answer(),
    }
}

/// The response to a refused dump by hand.
fn refusal(refused: Refusal) -> Response {
    let (code, text) = match refused {
        Refusal::NoJob(text) => (StatusCode::NOT_FOUND, text),
        Refusal::WhichJob(text) => (StatusCode::BAD_REQUEST, text),
        Refusal::TooMany { seconds } => {
            let text = format!("too many dumps by hand of this job; the next one can be asked for in {seconds} s");
            let error = Json(json!({ "error": text }));
            return (StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, seconds.to_string())], error)
                .into_response();
        }
    };
    (code, Json(json!({ "error": text }))).into_response()
}

/// The roots of incident folders, and the incidents without a folder; `None` if the loop does not
/// answer.
async fn known(answers: &impl Answers) -> Option<(pages::Roots, Vec<WithoutFolder>)> {
    let roots = ask(answers, ANSWER, Question::Folders).await?;
    Some((roots, ask(answers, ANSWER, Question::WithoutFolder).await?))
}

async fn incidents<A: Answers>(State(answers): State<A>) -> Response {
    let Some((roots, others)) = known(&answers).await else { return no_answer() };
    pages::list(roots, others).await
}

async fn incident<A: Answers>(State(answers): State<A>, Path(id): Path<String>) -> Response {
    let Some((roots, others)) = known(&answers).await else { return no_answer() };
    pages::verdict(roots, others, id).await
}

async fn files<A: Answers>(State(answers): State<A>, Path(id): Path<String>) -> Response {
    let Some((roots, others)) = known(&answers).await else { return no_answer() };
    pages::files(roots, others, id).await
}

async fn file<A: Answers>(State(answers): State<A>, Path((id, name)): Path<(String, String)>) -> Response {
    let Some((roots, others)) = known(&answers).await else { return no_answer() };
    pages::file(roots, others, id, name).await
}
