//! This node as a member of a cluster: the stream to the cluster collector, what the node delivers
//! on request, and what it remembers of its cluster.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use tokio::{runtime::Handle, sync::mpsc};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::Channel,
};
use tracing::{info, warn};
use xpu_timer_proto::timeline;
use xpu_timer_proto::v1::{
    Delivery, DumpFile, DumpRequest, FetchFiles, FileKind, NodeDump, NodeMessage, RankEntry,
    cluster_client::ClusterClient, cluster_message, delivery, node_message::Message,
};

use crate::{
    error::chain,
    http::SmallFrames,
    incident::{
        folder::rank_of_file,
        part::{CHUNK_BYTES, PartLocation, pieces},
    },
    job::JobKey,
    os::{clock::Now, process},
};

/// Number of pieces of a delivery that may wait; each may have half a megabyte.
const PIECES: usize = 2;

/// An event of the stream.
#[derive(Debug)]
pub(super) enum UplinkEvent {
    /// A stream is being opened; its first message must be the hello.
    Opened(Box<Link>),
    /// A message of the cluster.
    Message(Box<cluster_message::Message>),
    /// The stream ended, or could not be opened; the text gives the reason.
    Lost(String),
}

/// The sender of one stream and of its deliveries.
#[derive(Debug, Clone)]
pub(super) struct Link {
    pub(super) messages: mpsc::Sender<NodeMessage>,
    pub(super) client: Client,
    pub(super) runtime: Handle,
}

/// The channel for the pieces of one delivery. It is bounded, so that a slow cluster slows the
/// delivery down.
pub(super) type DeliverySender = mpsc::Sender<Delivery>;
pub(super) type Client = ClusterClient<InterceptedService<SmallFrames<Channel>, AuthInterceptor>>;

impl Link {
    /// Sends a control message. Returns false when the stream has ended or is stuck, which ends it.
    #[must_use]
    pub(super) fn send(&self, message: Message) -> bool {
        self.messages.try_send(NodeMessage { message: Some(message) }).is_ok()
    }

    /// Begins a delivery that the cluster requested with this key. It ends when the sender is
    /// dropped.
    #[must_use]
    pub(super) fn start_delivery(&self, key: String) -> DeliverySender {
        let (sender, pieces) = mpsc::channel(PIECES);
        let mut client = self.client.clone();
        let first = Delivery { message: Some(delivery::Message::Key(key)) };
        self.runtime.spawn(async move {
            let pieces = tokio_stream::once(first).chain(ReceiverStream::new(pieces));
            if let Err(status) = client.bring(pieces).await {
                warn!("the cluster collector refuses the delivery that it requested: {}", status_text(&status));
            }
        });
        sender
    }
}

/// Authenticates each call.
#[derive(Debug, Clone)]
pub(super) struct AuthInterceptor(pub(super) Option<MetadataValue<Ascii>>);

impl Interceptor for AuthInterceptor {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.0 {
            request.metadata_mut().insert("authorization", token.clone());
        }
        Ok(request)
    }
}

/// The status of a call as one line.
pub(crate) fn status_text(status: &Status) -> String {
    format!("{}: {}", status.code().description(), status.message())
}

/// Sends a part. Blocks while the cluster is slow, and returns when the stream ends.
pub(super) fn send_part(incident: &str, part: &PartLocation, sender: &DeliverySender) {
    let part = part.read().unwrap_or_else(|error| {
        let problem = chain(&error);
        warn!("incident {incident}: {problem}");
        NodeDump { incident: incident.into(), errors: vec![problem], ..Default::default() }
    });
    info!("incident {incident}: sending the delivery of this node to the cluster collector");
    for piece in pieces(part) {
        if sender.blocking_send(Delivery { message: Some(delivery::Message::Dump(piece)) }).is_err() {
            return;
        }
    }
}

/// Sends the wanted files in pieces: first the `.stacktrace` files, then the timelines, which are
/// written after them.
pub(super) fn send_files(fetch: &FetchFiles, folder: &Path, sender: &DeliverySender) {
    let incident = &fetch.incident;
    let send = |file: DumpFile| sender.blocking_send(Delivery { message: Some(delivery::Message::File(file)) }).is_ok();
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let is_timeline = |name: &str| timeline::rank_of_file(Path::new(name)).is_some();
    names.sort_by_key(|name| (is_timeline(name), name.clone()));
    info!("incident {incident}: sending files to the cluster collector");
    let is_of_kind = |name: &str| match fetch.kind() {
        FileKind::Unspecified => true,
        FileKind::Stacktrace => !is_timeline(name),
        FileKind::Timeline => is_timeline(name),
    };
    for name in names.into_iter().filter(|name| is_of_kind(name)) {
        let is_wanted = |rank| fetch.ranks.iter().any(|run| (run.first..=run.last).contains(&rank));
        if rank_of_file(&name).is_some_and(is_wanted) && !send_file(incident, &folder.join(&name), &name, &send) {
            return;
        }
    }
    // This fails when the stream has ended; then nobody waits for it either.
    send(DumpFile { incident: incident.into(), ..Default::default() });
}

fn send_file(incident: &str, path: &Path, name: &str, send: &impl Fn(DumpFile) -> bool) -> bool {
    let Ok(mut file) = File::open(path) else { return true };
    loop {
        let mut data = Vec::with_capacity(CHUNK_BYTES);
        match file.by_ref().take(CHUNK_BYTES as u64).read_to_end(&mut data) {
            Err(error) => {
                warn!("{}: {error}", path.display());
                return true;
            }
            Ok(_) => {
                let last = data.len() < CHUNK_BYTES;
                if !send(DumpFile { incident: incident.into(), name: name.into(), data, last }) {
                    return false;
                }
                if last {
                    return true;
                }
            }
        }
    }
}

/// A search for parts of an earlier node collector on disk.
#[derive(Debug)]
pub(super) struct PartSearch {
    /// Distinguishes it from earlier searches.
    pub(super) number: u64,
    /// Roots without a result.
    pub(super) pending: BTreeSet<PathBuf>,
    /// When it is given up.
    pub(super) until_ns: u64,
    /// Messages of the cluster that wait for its end.
    pub(super) messages: VecDeque<cluster_message::Message>,
}

/// The state that the node keeps about its cluster.
#[derive(Debug)]
pub(super) struct Member {
    /// Why there is no stream; empty before the first one and while there is one.
    pub problem: String,
    /// Whether the cluster has welcomed this node.
    pub welcomed: bool,
    pub(super) identity: String,
    pub(super) link: Option<Link>,
    // Incidents that the cluster was notified of and has not requested, with the time at which the
    // node dumps alone.
    pub(super) announced: BTreeMap<String, u64>,
    // Requests that wait for ranks to reconnect.
    pub(super) deferred: Vec<DumpRequest>,
    // Parts of job-wide incidents.
    pub(super) parts: BTreeMap<String, Arc<PartLocation>>,
    pub(super) rounds: BTreeMap<String, u32>,
    // Requests for timelines that are still being written.
    pub(super) waiting_fetches: Vec<FetchFiles>,
    // The current search for parts on disk, and the number of searches so far.
    pub(super) search: Option<PartSearch>,
    pub(super) searches: u64,
    // Whether this node's ranks hang in an incident, as last reported to the cluster.
    pub(super) reported_hangs: BTreeMap<String, bool>,
    // The last reported entries without their ages, which always change.
    pub(super) reported_ranks: Vec<RankEntry>,
    // Jobs that the cluster does not consider idle, and until when that holds.
    pub(super) declined: BTreeMap<JobKey, u64>,
    pub(super) last_launch: BTreeMap<JobKey, u64>,
    pub(super) heartbeat_ns: u64,
    // Incidents that the cluster requested, and until when the node waits for its verdict. After
    // that the node's own verdict counts.
    pub(super) awaiting_verdict: BTreeMap<String, u64>,
    // When the stream was lost, until the cluster's earlier messages are dropped.
    pub(super) lost_ns: Option<u64>,
}

impl Default for Member {
    fn default() -> Self {
        Member {
            problem: String::new(),
            welcomed: false,
            identity: process::random_id(),
            link: None,
            announced: BTreeMap::new(),
            deferred: Vec::new(),
            parts: BTreeMap::new(),
            rounds: BTreeMap::new(),
            waiting_fetches: Vec::new(),
            search: None,
            searches: 0,
            reported_hangs: BTreeMap::new(),
            reported_ranks: Vec::new(),
            declined: BTreeMap::new(),
            last_launch: BTreeMap::new(),
            heartbeat_ns: 0,
            awaiting_verdict: BTreeMap::new(),
            lost_ns: None,
        }
    }
}

impl Member {
    /// Notes the last launch of a job.
    pub(super) fn launched(&mut self, job: &JobKey, last_ns: u64) {
        self.last_launch.insert(job.clone(), last_ns);
    }

    /// Whether the job is idle on this node only, according to the cluster.
    #[must_use]
    pub(super) fn is_declined(&self, job: &JobKey, now: Now) -> bool {
        self.declined.get(job).is_some_and(|until| *until > now.mono_ns)
    }

    /// Whether the cluster decides the verdict of an incident.
    #[must_use]
    pub(super) fn awaits_verdict(&self, id: &str) -> bool {
        self.awaiting_verdict.contains_key(id)
    }

    /// Sends if there is a stream. A stream that accepts no more is closed.
    pub(super) fn send(&mut self, message: Message) -> bool {
        let sent = self.link.as_ref().is_some_and(|link| link.send(message));
        if !sent && self.link.take().is_some() {
            self.welcomed = false;
        }
        sent
    }

    /// Starts the delivery that the cluster requested with this key, on a thread that may block.
    pub(super) fn start_delivery(&self, key: String, work: impl FnOnce(DeliverySender) + Send + 'static) {
        let Some(link) = self.link.clone() else { return };
        if let Err(error) = thread::Builder::new().name("delivery".into()).spawn(move || work(link.start_delivery(key)))
        {
            warn!("cannot start a thread for a delivery: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::v1::RankRun;

    use super::*;

    #[test]
    fn the_files_that_are_written_after_the_verdict_are_fetched_as_timelines() {
        let folder = tempfile::tempdir().unwrap();
        let of_rank = |rank: u32| ["ops", "samples", "stacktrace"].map(|kind| format!("{rank:05}-00002.{kind}"));
        for name in [of_rank(0), of_rank(1), ["evidence.bin", "verdict.txt", "report.html"].map(String::from)].concat()
        {
            std::fs::write(folder.path().join(name), "x").unwrap();
        }
        let names = |kind: FileKind| {
            let ranks = vec![RankRun { first: 1, last: 1 }];
            let fetch = FetchFiles { ranks, kind: kind.into(), ..FetchFiles::default() };
            let (sender, mut pieces) = mpsc::channel(16);
            send_files(&fetch, folder.path(), &sender);
            drop(sender);
            let piece = || match pieces.blocking_recv()?.message? {
                delivery::Message::File(file) => Some(file.name),
                other => panic!("a file: {other:?}"),
            };
            std::iter::from_fn(piece).collect::<Vec<_>>()
        };
        let [operations, samples, stacks] = of_rank(1);
        assert_eq!(names(FileKind::Stacktrace), [stacks.as_str(), ""]);
        assert_eq!(names(FileKind::Timeline), [operations.as_str(), &samples, ""]);
        assert_eq!(names(FileKind::Unspecified), [stacks.as_str(), &operations, &samples, ""]);
    }
}
