//! `/timeline` of both roles: the recorded operations of the ranks, sent to the requester (GET) or
//! written into a folder of this machine (POST). And the original tool's request for a timeline.

use std::{convert::Infallible, path::PathBuf, thread, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Query, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    sync::{Semaphore, oneshot},
    time::timeout,
};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use xpu_timer_proto::Message as _;

use crate::{
    error::chain,
    http::{
        questions::{Question, QuestionSender, Refusal, TimelineFiles, WantedTimeline},
        routes::{ask, no_answer, refusal},
    },
    json::Json,
    timeline::{
        folder::{self, Written},
        kernel_trace::Request,
    },
};

/// Window of a request that names none.
const WINDOW_SECONDS: f64 = 60.0;
/// Time beyond the recording within which the first chunk arrives.
const ANSWER: Duration = Duration::from_secs(30);
/// Time within which a folder is written. A disk that takes longer does not answer.
const WRITE: Duration = Duration::from_secs(120);
/// Folders that are written at a time. A thread that writes to a disk that does not answer keeps
/// its place.
static WRITERS: Semaphore = Semaphore::const_new(4);

/// The pages.
pub fn routes<A: QuestionSender>() -> Router<A> {
    Router::new()
        .route("/timeline", get(send::<A>).post(write::<A>))
        .route("/HostingService/DumpKernelTrace", get(kernel_trace::<A>).post(kernel_trace::<A>))
}

#[derive(Deserialize)]
struct TimelineQuery {
    job: Option<String>,
    rank: Option<String>,
    seconds: Option<f64>,
    kernels: Option<String>,
}

impl TimelineQuery {
    fn wanted(self) -> Result<WantedTimeline, Refusal> {
        let seconds = self.seconds.unwrap_or(WINDOW_SECONDS);
        let window = Duration::try_from_secs_f64(seconds)
            .map_err(|_| Refusal::Unusable(format!("{seconds} is not a number of seconds")))?;
        let detail = match self.kernels.as_deref() {
            None | Some("recorded") => false,
            Some("all") => true,
            Some(other) => {
                return Err(Refusal::Unusable(format!("kernels={other:?} is neither \"all\" nor \"recorded\"")));
            }
        };
        let ranks = self.rank.map(|ranks| ranks.parse()).transpose().map_err(Refusal::Unusable)?;
        Ok(WantedTimeline { job: self.job, ranks, window, detail })
    }
}

/// The files, and the time for which every kernel is recorded before they arrive.
async fn files<A: QuestionSender>(answers: &A, query: TimelineQuery) -> Result<(TimelineFiles, Duration), Response> {
    let wanted = query.wanted().map_err(refusal)?;
    let recording = if wanted.detail { wanted.window } else { Duration::ZERO };
    match ask(answers, ANSWER + recording, |reply| Question::Timeline { wanted, reply }).await {
        Some(Ok(files)) => Ok((files, recording)),
        Some(Err(refused)) => Err(refusal(refused)),
        None => Err(no_answer()),
    }
}

/// Sends the files as a sequence of `TimelineFile`, each preceded by its length as a varint.
async fn send<A: QuestionSender>(State(answers): State<A>, Query(query): Query<TimelineQuery>) -> Response {
    let files = match files(&answers, query).await {
        Ok((files, _)) => files,
        Err(response) => return response,
    };
    let chunks =
        ReceiverStream::new(files.chunks).map(|chunk| Ok::<_, Infallible>(chunk.encode_length_delimited_to_vec()));
    ([(header::CONTENT_TYPE, "application/octet-stream")], Body::from_stream(chunks)).into_response()
}

async fn write<A: QuestionSender>(State(answers): State<A>, Query(query): Query<TimelineQuery>) -> Response {
    let Ok(writer) = WRITERS.try_acquire() else {
        return error(StatusCode::SERVICE_UNAVAILABLE, "other timelines are being written; retry later");
    };
    let (TimelineFiles { root, mut chunks }, recording) = match files(&answers, query).await {
        Ok(files) => files,
        Err(response) => return response,
    };
    let (done, written) = oneshot::channel();
    let below = root.clone();
    let work = move || {
        let _writer = writer;
        let written = folder::write(&below, std::iter::from_fn(|| chunks.blocking_recv()));
        // The requester may be gone.
        drop(done.send(written));
    };
    if let Err(problem) = thread::Builder::new().name("timeline".into()).spawn(work) {
        return error(StatusCode::SERVICE_UNAVAILABLE, &format!("no thread can be started: {problem}"));
    }
    match timeout(WRITE + recording, written).await {
        Ok(Ok(Ok(written))) => Json(summary(&written)).into_response(),
        Ok(Ok(Err(problem))) => error(StatusCode::INSUFFICIENT_STORAGE, &chain(&problem)),
        _ => error(StatusCode::SERVICE_UNAVAILABLE, &format!("{} does not answer", root.display())),
    }
}

fn summary(written: &Written) -> Value {
    let Written { path, ranks, operations, lost, problems } = written;
    let mut summary = json!({ "path": path, "ranks": ranks, "operations": operations, "lost": lost });
    if !problems.is_empty() {
        summary["problems"] = json!(problems);
    }
    summary
}

fn error(code: StatusCode, text: &str) -> Response {
    (code, Json(json!({ "error": text }))).into_response()
}

/// The original tool's request. Its client sends GET with a body.
#[derive(Deserialize, Default)]
#[serde(default)]
struct KernelTraceBody {
    dump_path: PathBuf,
    dump_count: usize,
    // Seconds since the epoch.
    dump_time: i64,
    dump_kernel_type: u32,
    reset: bool,
    oss_args: Option<Value>,
}

async fn kernel_trace<A: QuestionSender>(State(answers): State<A>, body: Bytes) -> Response {
    let node = std::env::var("POD_NAME").unwrap_or_default();
    let refuse = |code: StatusCode, text: String| (code, Json(json!({ "node": node, "msg": text }))).into_response();
    let body: KernelTraceBody = match serde_json::from_slice(&body) {
        Ok(body) => body,
        Err(error) => return refuse(StatusCode::BAD_REQUEST, format!("the request cannot be read: {error}")),
    };
    if body.oss_args.is_some_and(|arguments| !arguments.is_null()) {
        let text = "oss_args is not supported: xpu_timer uploads nothing; omit it, and copy the files from dump_path";
        return refuse(StatusCode::BAD_REQUEST, text.into());
    }
    let request = Request {
        path: body.dump_path,
        count: body.dump_count,
        kinds: body.dump_kernel_type,
        since_unix_ns: u64::try_from(body.dump_time).unwrap_or(0).saturating_mul(1_000_000_000),
        reset: body.reset,
    };
    match ask(&answers, ANSWER, |reply| Question::KernelTrace { request, reply }).await {
        Some(Ok(message)) => Json(json!({ "node": node, "msg": message })).into_response(),
        Some(Err(Refusal::Unusable(text))) => refuse(StatusCode::BAD_REQUEST, text),
        Some(Err(refused)) => refusal(refused),
        None => no_answer(),
    }
}
