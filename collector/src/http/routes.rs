//! The HTTP routes and pages of both roles. Authentication happens before them. The event loop of
//! the role answers questions about the present; the pages about incidents read the disk.

use std::{
    fs::File,
    io::{self, Read},
    path::PathBuf,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Path, Query, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    sync::{Semaphore, SemaphorePermit, mpsc, oneshot},
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    http::questions::{Question, QuestionSender, Refusal},
    incident::{
        mild,
        records::{self, WithoutFolder},
    },
    json::Json,
};

/// Timeout of an answer. The loop usually takes milliseconds; this allows for a node without any
/// idle processor.
const ANSWER: Duration = Duration::from_secs(10);
/// Timeout of a dump, which takes its sample interval, chosen by the user, and some seconds.
const DUMP: Duration = Duration::from_secs(3600);

/// The media type of `/metrics`.
pub(crate) const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Answers whether the collector serves requests.
pub(crate) fn health<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new().route("/health", get(|| async { "ok\n" }))
}

/// Status, dumps by hand, and incidents with their files.
pub(crate) fn control<A: QuestionSender>() -> Router<A> {
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
pub(crate) fn metrics<A: QuestionSender>() -> Router<A> {
    Router::new().route("/metrics", get(metrics_page::<A>))
}

pub(super) async fn ask<A: QuestionSender, T>(
    answers: &A,
    patience: Duration,
    question: impl FnOnce(oneshot::Sender<T>) -> Question,
) -> Option<T> {
    let (reply, answer) = oneshot::channel();
    answers.ask(question(reply));
    timeout(patience, answer).await.ok()?.ok()
}

pub(super) fn no_answer() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "error": "the collector does not answer" }))).into_response()
}

async fn status<A: QuestionSender>(State(answers): State<A>) -> Response {
    let status = ask(&answers, ANSWER, Question::Status).await;
    status.map_or_else(no_answer, |status| Json(status).into_response())
}

async fn slow_ranks<A: QuestionSender>(State(answers): State<A>) -> Response {
    let slow = ask(&answers, ANSWER, Question::SlowRanks).await;
    slow.map_or_else(no_answer, |slow| Json(slow).into_response())
}

async fn metrics_page<A: QuestionSender>(State(answers): State<A>) -> Response {
    let kind = [(header::CONTENT_TYPE, PROMETHEUS)];
    ask(&answers, ANSWER, Question::Metrics).await.map_or_else(no_answer, |text| (kind, text).into_response())
}

#[derive(Deserialize)]
struct DumpQuery {
    job: Option<String>,
}

async fn dump<A: QuestionSender>(State(answers): State<A>, Query(query): Query<DumpQuery>) -> Response {
    match ask(&answers, DUMP, |reply| Question::Dump { job: query.job, reply }).await {
        Some(Ok(answer)) => Json(answer).into_response(),
        Some(Err(refused)) => refusal(refused),
        None => no_answer(),
    }
}

/// The response to a refused request.
pub(super) fn refusal(refused: Refusal) -> Response {
    let (code, text) = match refused {
        Refusal::Unusable(text) => (StatusCode::BAD_REQUEST, text),
        Refusal::NoJob(text) => (StatusCode::NOT_FOUND, text),
        Refusal::WhichJob(text) => (StatusCode::BAD_REQUEST, text),
        Refusal::TooMany { seconds } => {
            let text = format!("too many dumps on demand of this job; retry in {seconds} s");
            let error = Json(json!({ "error": text }));
            return (StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, seconds.to_string())], error)
                .into_response();
        }
    };
    (code, Json(json!({ "error": text }))).into_response()
}

/// The roots of incident folders, those of mild captures if wanted, and the incidents without a
/// folder; `None` if the loop does not answer.
async fn known(answers: &impl QuestionSender, with_mild: bool) -> Option<(Roots, Vec<WithoutFolder>)> {
    let mut roots = ask(answers, ANSWER, Question::Folders).await?;
    if with_mild {
        roots.extend(roots.iter().map(|root| mild::root_of(root)).collect::<Vec<_>>());
    }
    Some((roots, ask(answers, ANSWER, Question::WithoutFolder).await?))
}

#[derive(Deserialize)]
struct ListQuery {
    /// Whether to list the mild captures as well.
    #[serde(default)]
    all: bool,
}

async fn incidents<A: QuestionSender>(State(answers): State<A>, Query(query): Query<ListQuery>) -> Response {
    let Some((roots, others)) = known(&answers, query.all).await else { return no_answer() };
    incident_list(roots, others).await
}

async fn incident<A: QuestionSender>(State(answers): State<A>, Path(id): Path<String>) -> Response {
    let Some((roots, others)) = known(&answers, true).await else { return no_answer() };
    verdict_page(roots, others, id).await
}

async fn files<A: QuestionSender>(State(answers): State<A>, Path(id): Path<String>) -> Response {
    let Some((roots, others)) = known(&answers, true).await else { return no_answer() };
    file_list(roots, others, id).await
}

async fn file<A: QuestionSender>(State(answers): State<A>, Path((id, name)): Path<(String, String)>) -> Response {
    let Some((roots, others)) = known(&answers, true).await else { return no_answer() };
    file_page(roots, others, id, name).await
}

/// Roots of incident folders.
type Roots = Vec<PathBuf>;

/// `/incidents`: incidents on disk and others, sorted by name.
async fn incident_list(roots: Roots, others: Vec<WithoutFolder>) -> Response {
    let mut all: Vec<Value> = on_blocking_thread(move || records::list(&roots)).await.unwrap_or_default();
    // An incident that is not on disk yet is newer.
    all.retain(|one| !one["incident"].as_str().is_some_and(|id| others.iter().any(|other| other.is(id))));
    all.extend(others.into_iter().map(|other| other.line));
    all.sort_by(|one, other| one["incident"].as_str().cmp(&other["incident"].as_str()));
    Json(all).into_response()
}

/// `/incidents/ID`: its `verdict.json`.
async fn verdict_page(roots: Roots, others: Vec<WithoutFolder>, id: String) -> Response {
    let name = "verdict.json";
    let found =
        on_blocking_thread(move || records::verdict_json(&roots, &id).or_else(|| file_of(&others, &id, name))).await;
    match found.flatten() {
        Some(json) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        None => not_found("no such incident"),
    }
}

/// `/incidents/ID/files`: names and sizes.
async fn file_list(roots: Roots, others: Vec<WithoutFolder>, id: String) -> Response {
    let others = move |id: &str| {
        let files = others.iter().find(|other| other.is(id))?.files();
        Some(files.iter().map(|(name, bytes)| json!({ "name": name, "bytes": bytes.len() })).collect::<Vec<Value>>())
    };
    let found = move || {
        let mut all = records::files(&roots, &id);
        for other in others(&id).into_iter().flatten() {
            let all = all.get_or_insert_default();
            if all.iter().all(|file| file["name"] != other["name"]) {
                all.push(other);
            }
        }
        all
    };
    match on_blocking_thread(found).await.flatten() {
        Some(files) => Json(files).into_response(),
        None => not_found("no such incident"),
    }
}

/// `/incidents/ID/NAME`: one file, for example `report.html`.
async fn file_page(roots: Roots, others: Vec<WithoutFolder>, id: String, name: String) -> Response {
    let kind = match name.rsplit_once('.').map(|(_, end)| end) {
        Some("html") => "text/html; charset=utf-8",
        Some("json") => "application/json",
        Some("svg") => "image/svg+xml",
        Some("stacktrace" | "ops" | "bin") => "application/octet-stream",
        _ => "text/plain; charset=utf-8",
    };
    let Ok(Ok(reader)) = timeout(QUEUE, READERS.acquire()).await else {
        let busy = "too many files are being read";
        return (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "error": busy }))).into_response();
    };
    let found = on_blocking_thread(move || {
        if let Some((file, length)) = records::file(&roots, &id, &name) {
            return Ok(Content::File(file, length));
        }
        let found = file_of(&others, &id, &name).map(Content::Bytes);
        found.ok_or_else(|| records::files(&roots, &id).is_some() || others.iter().any(|other| other.is(&id)))
    });
    match found.await {
        Some(Ok(Content::Bytes(bytes))) => ([(header::CONTENT_TYPE, kind)], bytes).into_response(),
        Some(Ok(Content::File(file, length))) => {
            let head = [(header::CONTENT_TYPE, kind.to_string()), (header::CONTENT_LENGTH, length.to_string())];
            (head, stream(file, length, reader)).into_response()
        }
        Some(Err(true)) => not_found("no such file"),
        _ => not_found("no such incident"),
    }
}

/// The content of a file, or a file to read it from.
enum Content {
    Bytes(Vec<u8>),
    File(File, u64),
}

/// Files that are read at a time; each has a descriptor.
static READERS: Semaphore = Semaphore::const_new(64);
/// How long a request waits for its turn.
const QUEUE: Duration = Duration::from_secs(10);
/// Memory used for a file while it is sent.
const PIECE_BYTES: u64 = 64 * 1024;

/// Reads a file as fast as the peer receives it. If the peer receives nothing for long, the
/// connection ends and the reading with it.
fn stream(mut file: File, length: u64, reader: SemaphorePermit<'static>) -> Body {
    let (sender, pieces) = mpsc::channel::<io::Result<Vec<u8>>>(1);
    tokio::spawn(async move {
        let _reader = reader;
        let mut left = length;
        while left > 0 {
            let bytes = left.min(PIECE_BYTES);
            let read = on_blocking_thread(move || {
                let mut piece = vec![0; bytes as usize];
                file.read_exact(&mut piece).map(|()| (file, piece))
            });
            let read = read.await.unwrap_or_else(|| Err(io::Error::other("the reader ended")));
            let (same, piece) = match read {
                Ok(read) => read,
                // The peer notices that the file is incomplete.
                Err(error) => return drop(sender.send(Err(error)).await),
            };
            (file, left) = (same, left - bytes);
            if sender.send(Ok(piece)).await.is_err() {
                return;
            }
        }
    });
    Body::from_stream(ReceiverStream::new(pieces))
}

/// A file of an incident without a folder.
fn file_of(others: &[WithoutFolder], id: &str, name: &str) -> Option<Vec<u8>> {
    let files = others.iter().find(|other| other.is(id))?.files();
    files.into_iter().find(|(other, _)| *other == name).map(|(_, bytes)| bytes)
}

/// Runs work on a blocking thread: disks may be slow.
async fn on_blocking_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    tokio::task::spawn_blocking(work).await.ok()
}

fn not_found(what: &str) -> Response {
    (StatusCode::NOT_FOUND, Json(json!({ "error": what }))).into_response()
}
