//! `/timeline` of both roles: the recorded operations of the ranks, sent to the requester (GET) or
//! written into a folder of this machine (POST). `/record` does the same with stacks that are
//! recorded then. And the original tool's request for a timeline.

use std::{convert::Infallible, path::PathBuf, thread, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Query, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::{
    sync::{Semaphore, oneshot},
    time::timeout,
};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_capture::sampling::Threads;
use xpu_timer_proto::Message as _;

use crate::{
    error::chain,
    http::{
        questions::{
            Question, QuestionSender, Refusal, SHORTEST_PERIOD, TimelineFiles, WantedRecording, WantedTimeline,
        },
        routes::{ask, no_answer, refusal},
    },
    incident::viewer,
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
/// Time within which the viewer draws a recording.
const DRAW: Duration = Duration::from_secs(60);
/// A recording that says nothing else: its length, and its samples a second.
const RECORD_SECONDS: f64 = 30.0;
const RECORD_RATE: f64 = 50.0;
/// Folders that are written at a time. A thread that writes to a disk that does not answer keeps
/// its place.
static WRITERS: Semaphore = Semaphore::const_new(4);

/// The pages.
pub(crate) fn routes<A: QuestionSender>() -> Router<A> {
    Router::new()
        .route("/timeline", get(send::<A, TimelineQuery>).post(write::<A, TimelineQuery>))
        .route("/record", get(send::<A, RecordQuery>).post(write::<A, RecordQuery>))
        .route("/HostingService/DumpKernelTrace", get(kernel_trace::<A>).post(kernel_trace::<A>))
}

/// The query of a page.
trait Wish: DeserializeOwned + Send + 'static {
    fn wanted(self) -> Result<WantedTimeline, Refusal>;
}

fn window(seconds: f64) -> Result<Duration, Refusal> {
    Duration::try_from_secs_f64(seconds).map_err(|_| Refusal::Unusable(format!("{seconds} is not a number of seconds")))
}

fn ranks(ranks: Option<String>) -> Result<Option<RankSet>, Refusal> {
    let parsed = ranks.map(|ranks| ranks.parse::<RankSet>()).transpose();
    parsed.map_err(|error| Refusal::Unusable(error.to_string()))
}

#[derive(Deserialize)]
struct RecordQuery {
    job: Option<String>,
    rank: Option<String>,
    seconds: Option<f64>,
    rate: Option<f64>,
    threads: Option<String>,
    native: Option<String>,
}

impl Wish for RecordQuery {
    fn wanted(self) -> Result<WantedTimeline, Refusal> {
        let rate = self.rate.unwrap_or(RECORD_RATE);
        let period = Duration::try_from_secs_f64(rate.recip()).ok().filter(|period| *period >= SHORTEST_PERIOD);
        let period = period.ok_or_else(|| {
            Refusal::Unusable(format!("rate={rate} is not a number of samples a second, at most 1000"))
        })?;
        let threads = match self.threads.as_deref() {
            None | Some("all") => Threads::All,
            Some("main") => Threads::Main,
            Some(other) => return Err(Refusal::Unusable(format!("threads={other:?} is neither \"all\" nor \"main\""))),
        };
        let native = match self.native.as_deref() {
            None | Some("0") => false,
            Some("1") => true,
            Some(other) => return Err(Refusal::Unusable(format!("native={other:?} is neither \"1\" nor \"0\""))),
        };
        Ok(WantedTimeline {
            job: self.job,
            ranks: ranks(self.rank)?,
            window: window(self.seconds.unwrap_or(RECORD_SECONDS))?,
            detail: false,
            recording: Some(WantedRecording { period, threads, native }),
        })
    }
}

#[derive(Deserialize)]
struct TimelineQuery {
    job: Option<String>,
    rank: Option<String>,
    seconds: Option<f64>,
    kernels: Option<String>,
}

impl Wish for TimelineQuery {
    fn wanted(self) -> Result<WantedTimeline, Refusal> {
        let window = window(self.seconds.unwrap_or(WINDOW_SECONDS))?;
        let detail = match self.kernels.as_deref() {
            None | Some("recorded") => false,
            Some("all") => true,
            Some(other) => {
                return Err(Refusal::Unusable(format!("kernels={other:?} is neither \"all\" nor \"recorded\"")));
            }
        };
        Ok(WantedTimeline { job: self.job, ranks: ranks(self.rank)?, window, detail, recording: None })
    }
}

/// The files, and the time for which something is recorded before they arrive.
async fn files<A: QuestionSender>(answers: &A, wanted: WantedTimeline) -> Result<(TimelineFiles, Duration), Response> {
    let recording = if wanted.records() { wanted.window } else { Duration::ZERO };
    match ask(answers, ANSWER + recording, |reply| Question::Timeline { wanted, reply }).await {
        Some(Ok(files)) => Ok((files, recording)),
        Some(Err(refused)) => Err(refusal(refused)),
        None => Err(no_answer()),
    }
}

/// Sends the files as a sequence of `TimelineFile`, each preceded by its length as a varint.
async fn send<A: QuestionSender, W: Wish>(State(answers): State<A>, Query(wish): Query<W>) -> Response {
    let wanted = match wish.wanted() {
        Ok(wanted) => wanted,
        Err(refused) => return refusal(refused),
    };
    let files = match files(&answers, wanted).await {
        Ok((files, _)) => files,
        Err(response) => return response,
    };
    let chunks =
        ReceiverStream::new(files.chunks).map(|chunk| Ok::<_, Infallible>(chunk.encode_length_delimited_to_vec()));
    ([(header::CONTENT_TYPE, "application/octet-stream")], Body::from_stream(chunks)).into_response()
}

async fn write<A: QuestionSender, W: Wish>(State(answers): State<A>, Query(wish): Query<W>) -> Response {
    let wanted = match wish.wanted() {
        Ok(wanted) => wanted,
        Err(refused) => return refusal(refused),
    };
    let draws = wanted.recording.is_some();
    let Ok(writer) = WRITERS.try_acquire() else {
        return error(StatusCode::SERVICE_UNAVAILABLE, "other timelines are being written; retry later");
    };
    let (TimelineFiles { root, mut chunks }, recording) = match files(&answers, wanted).await {
        Ok(files) => files,
        Err(response) => return response,
    };
    let (done, written) = oneshot::channel();
    let below = root.clone();
    let work = move || {
        let _writer = writer;
        let mut written = folder::write(&below, std::iter::from_fn(|| chunks.blocking_recv()));
        if let (true, Ok(written)) = (draws, &mut written) {
            // The samples are there, so a missing picture is not a failure.
            written.problems.extend(viewer::run(&written.path, true, DRAW).err().map(|error| chain(&error)));
        }
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
