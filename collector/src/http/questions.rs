//! The questions that HTTP pages send to the event loop of either role.

use std::{path::PathBuf, time::Duration};

use serde_json::Value;
use tokio::sync::{mpsc, oneshot};
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_capture::sampling::Threads;
use xpu_timer_proto::v1::{StackRecording, TimelineFile};

use crate::{incident::records::WithoutFolder, job::JobKey, timeline::kernel_trace::Request};

/// A handle to an event loop that answers questions.
pub trait QuestionSender: Clone + Send + Sync + 'static {
    /// Sends a question. If it is not answered, its reply channel is dropped.
    fn ask(&self, question: Question);
}

/// Reply channel of a dump by hand: the finished dump, or the reason for its refusal.
pub(crate) type DumpReply = oneshot::Sender<Result<Value, Refusal>>;

/// The questions to a collector of either role.
#[derive(Debug)]
pub enum Question {
    /// `/status`.
    Status(oneshot::Sender<Value>),
    /// `/metrics`.
    Metrics(oneshot::Sender<String>),
    /// `POST /dump`.
    Dump {
        /// Name of the job; `None` if there is only one.
        job: Option<String>,
        /// Receives the answer.
        reply: DumpReply,
    },
    /// Folders that may hold incidents.
    Folders(oneshot::Sender<Vec<PathBuf>>),
    /// Incidents without a folder, because none could be made.
    WithoutFolder(oneshot::Sender<Vec<WithoutFolder>>),
    /// `/slow_ranks`.
    SlowRanks(oneshot::Sender<Value>),
    /// `/timeline`.
    Timeline {
        /// The wanted operations.
        wanted: WantedTimeline,
        /// Receives the answer.
        reply: TimelineReply,
    },
    /// `/HostingService/DumpKernelTrace`.
    KernelTrace {
        /// The operations to record, and the folder for them.
        request: Request,
        /// Receives the original tool's message, or why the request is refused.
        reply: oneshot::Sender<Result<&'static str, Refusal>>,
    },
}

/// The wanted part of the timeline of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedTimeline {
    /// Name of the job; `None` if there is only one.
    pub job: Option<String>,
    /// Some ranks; `None` for all.
    pub ranks: Option<RankSet>,
    /// The window.
    pub window: Duration,
    /// Record every kernel for as long as the window, and answer then.
    pub detail: bool,
    /// Record stacks for as long as the window, and answer with them.
    pub recording: Option<WantedRecording>,
}

impl WantedTimeline {
    /// Whether something is recorded before the answer.
    #[must_use]
    pub fn records(&self) -> bool {
        self.detail || self.recording.is_some()
    }
}

/// The shortest time between two samples: 1,000 a second.
pub(crate) const SHORTEST_PERIOD: Duration = Duration::from_millis(1);

/// How stacks are recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WantedRecording {
    /// Time between two samples.
    pub period: Duration,
    /// The threads to record.
    pub threads: Threads,
    /// C frames as well.
    pub native: bool,
}

impl WantedRecording {
    /// As a message to a node.
    #[must_use]
    pub fn to_message(self) -> StackRecording {
        StackRecording {
            period_us: u64::try_from(self.period.as_micros()).unwrap_or(u64::MAX),
            main_only: self.threads == Threads::Main,
            native: self.native,
        }
    }

    /// From a message of the cluster collector. A node does not sample faster than it allows others
    /// to ask for.
    #[must_use]
    pub fn from_message(message: &StackRecording) -> Self {
        let period = Duration::from_micros(message.period_us).max(SHORTEST_PERIOD);
        let threads = if message.main_only { Threads::Main } else { Threads::All };
        WantedRecording { period, threads, native: message.native }
    }
}

/// Reply channel of a timeline.
pub(crate) type TimelineReply = oneshot::Sender<Result<TimelineFiles, Refusal>>;

/// The files of a timeline, in chunks.
#[derive(Debug)]
pub struct TimelineFiles {
    /// The folder that they belong into on this machine.
    pub root: PathBuf,
    /// The chunks. The files of several ranks may be interleaved.
    pub chunks: mpsc::Receiver<TimelineFile>,
}

/// Why a dump by hand was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such job; the text lists the existing ones.
    NoJob(String),
    /// There are several jobs, and the request names none.
    WhichJob(String),
    /// The request cannot be served; the text gives the reason.
    Unusable(String),
    /// There were too many recently.
    TooMany {
        /// Another request is accepted after this number of seconds.
        seconds: u64,
    },
}

impl Refusal {
    /// The refusal with the time until another request is accepted.
    #[must_use]
    pub fn too_many(wait_ns: u64) -> Self {
        Refusal::TooMany { seconds: wait_ns.div_ceil(1_000_000_000).max(1) }
    }
}

/// The job for a dump by hand: the living one with this name, or the only living one.
///
/// # Errors
/// If none or several match; the refusal lists the living jobs.
pub(crate) fn wanted_job(alive: &[JobKey], name: Option<&str>) -> Result<JobKey, Refusal> {
    let names = || alive.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let matching: Vec<&JobKey> =
        alive.iter().filter(|job| name.is_none_or(|name| job.name == name || job.to_string() == name)).collect();
    match matching.as_slice() {
        [job] => Ok((*job).clone()),
        [] if alive.is_empty() => Err(Refusal::NoJob("no rank is registered".into())),
        [] => Err(Refusal::NoJob(format!("no such job; the jobs are: {}", names()))),
        _ => Err(Refusal::WhichJob(format!("there are several jobs; name one with ?job=: {}", names()))),
    }
}
