//! Simulated nodes of eight ranks each, and their messages to the cluster collector, over one
//! connection each.

use std::{
    fs,
    iter::once,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use tokio::sync::mpsc;
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{
    Request, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};
use xpu_timer_analysis::{rank_set::RankSet, stragglers::KEPT_BLOCKS};
use xpu_timer_collector::{
    http::SmallFrames,
    incident::part::{Part, pieces},
};
use xpu_timer_proto::{
    Message as _, PROTOCOL_VERSION,
    codec::small_messages,
    server::{ProcessSample, PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace, Stacktrace},
    timeline::file_name,
    v1::{
        Alarm, Captured, Communicator, CommunicatorPace, CommunicatorState, DataType, Delivery, DumpFile, FileKind,
        FlightRecord, JobId, NodeDump, NodeHello, NodeMessage, NodeRanks, Op, OpKind, OpStatus, Operation, PaceBlock,
        Presence, RankEntry, RankEvidence, RankInfo, RankPace, StackTree, TimelineFile, Trigger, TriggerKind,
        cluster_client::ClusterClient, cluster_message::Message as Asked, delivery::Message as Brought,
        node_message::Message,
    },
};
use xpu_timer_tests::Timelines;

/// Ranks of a node.
pub const RANKS: u32 = 8;
const PIPELINE: u32 = 10;
const SECOND: u64 = 1_000_000_000;
const NOW: u64 = 1_000 * SECOND;
/// Largest group whose timelines are fetched.
const GROUP: u32 = 64;
/// Window of a timeline.
pub const TIMELINE_SECONDS: u32 = 60;
/// Operations of a rank in it.
pub const OPERATIONS: u32 = 60_000;
/// Size of a chunk that a node sends.
const CHUNK_BYTES: usize = 512 * 1024;
/// Timeout of all steps.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// The state that the simulated nodes share with the measurement.
pub struct Shared {
    template: Template,
    /// What each node delivers. Real nodes make this at the same time, each on its own processors,
    /// so it is made before the measurement.
    parts: Vec<Vec<NodeDump>>,
    /// Number of nodes.
    pub nodes: u32,
    /// Start of the measurement.
    pub begun: Instant,
    /// Nodes that were welcomed.
    pub joined: AtomicU32,
    /// Nodes that have delivered their part.
    pub delivered: AtomicU32,
    /// Bytes of these parts.
    pub bytes: AtomicU64,
    /// Start of the last delivery, in nanoseconds since `begun`.
    pub last_start_ns: AtomicU64,
}

impl Shared {
    /// The initial state for this many nodes.
    pub fn new(nodes: u32) -> Result<Self> {
        let template = Template::new(nodes)?;
        Ok(Shared {
            parts: (0..nodes).map(|node| pieces(template.part(nodes, node))).collect(),
            template,
            nodes,
            begun: Instant::now(),
            joined: AtomicU32::new(0),
            delivered: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            last_start_ns: AtomicU64::new(0),
        })
    }
}

/// The alarm of the first node when one of its ranks hangs.
pub fn alarm(incident: &str) -> NodeMessage {
    let alarm = Alarm {
        incident: incident.into(),
        job: Some(job()),
        trigger: Some(Trigger { kind: TriggerKind::Operation.into(), rank: 0, ..Default::default() }),
        hangs: true,
        ..Default::default()
    };
    NodeMessage { message: Some(Message::Alarm(alarm)) }
}

fn job() -> JobId {
    JobId { name: "bench".into(), instance: "host:29500".into() }
}

/// The rank that stopped.
pub fn culprit(nodes: u32) -> u32 {
    nodes * RANKS / 2 + 3
}

/// The ranks whose timelines are fetched: the culprit and others of its data-parallel group, each
/// on another node.
pub fn culprit_group(nodes: u32) -> RankSet {
    (0..GROUP).map(|index| (culprit(nodes) + index * RANKS * PIPELINE) % (nodes * RANKS)).collect()
}

/// The straggler for which the others waited before the hang.
pub const SLOW: u32 = 5;

/// Number of blocks in one message of a node.
const BLOCKS: u32 = 4;

/// The collective timings of a node's ranks in some blocks: all equal, except for the straggler,
/// which arrived last in the collectives of the world.
fn paces(nodes: u32, node: u32, first: u32) -> Vec<RankPace> {
    let ranks = (node * RANKS..(node + 1) * RANKS).map(|rank| {
        let communicators = groups(nodes, rank).into_iter().map(|(id, size, _)| {
            let inside_us = if id == 1 && rank != SLOW { 3_000_000 } else { 20_000 };
            let block = |index| PaceBlock { level: 6, index, inside_us, span_us: 10_000_000 };
            let blocks = (first..first + BLOCKS).map(block).collect();
            CommunicatorPace { id, size, point_to_point: false, blocks }
        });
        RankPace { job: Some(job()), attempt: 0, rank, communicators: communicators.collect() }
    });
    ranks.collect()
}

/// A simulated node: responds to requests.
pub async fn play(
    shared: Arc<Shared>,
    node: u32,
    port: u16,
    sender: mpsc::Sender<NodeMessage>,
    receiver: mpsc::Receiver<NodeMessage>,
) -> Result<()> {
    let channel = Endpoint::from_shared(format!("http://127.0.0.1:{port}"))?;
    let channel = loop {
        match channel.connect().await {
            Ok(channel) => break channel,
            Err(error) => {
                ensure!(shared.begun.elapsed() < PATIENCE, "{error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    let say = |message| sender.send(NodeMessage { message: Some(message) });
    say(Message::Hello(hello(&shared, node))).await?;
    let mut client = ClusterClient::with_interceptor(SmallFrames(channel), authorize as Authorize);
    let mut asked = client.join(ReceiverStream::new(receiver)).await?.into_inner();
    while let Some(message) = asked.next().await {
        match message?.message {
            Some(Asked::Welcome(_)) => {
                shared.joined.fetch_add(1, Ordering::Relaxed);
                // A real node completes one block of each communicator every ten seconds, and sends
                // it then.
                for first in (0..KEPT_BLOCKS as u32).step_by(BLOCKS as usize) {
                    for message in small_messages(paces(shared.nodes, node, first)) {
                        say(Message::Paces(message)).await?;
                    }
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
            Some(Asked::Dump(request)) => {
                say(Message::Captured(Captured { incident: request.incident, round: request.round })).await?;
            }
            Some(Asked::Deliver(wanted)) => {
                let at = u64::try_from(shared.begun.elapsed().as_nanos())?;
                shared.last_start_ns.fetch_max(at, Ordering::Relaxed);
                let mut pieces = shared.parts[node as usize].clone();
                pieces.iter_mut().for_each(|piece| piece.incident.clone_from(&wanted.incident));
                let bytes: usize = pieces.iter().map(NodeDump::encoded_len).sum();
                shared.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                bring(&mut client, wanted.key, pieces.into_iter().map(Brought::Dump)).await?;
                shared.delivered.fetch_add(1, Ordering::Relaxed);
            }
            Some(Asked::Timeline(request)) => {
                let wanted = |rank: &u32| request.ranks.iter().any(|run| (run.first..=run.last).contains(rank));
                let ranks = (node * RANKS..(node + 1) * RANKS).filter(wanted);
                let files: Vec<TimelineFile> = ranks.flat_map(|rank| shared.template.timeline(&shared, rank)).collect();
                let files = files.into_iter().chain([TimelineFile::default()]);
                bring(&mut client, request.key, files.map(Brought::Timeline)).await?;
            }
            Some(Asked::Fetch(fetch)) => {
                let (incident, kind) = (&fetch.incident, fetch.kind());
                let file = |rank| {
                    let name = format!("{rank:05}-{:05}.stacktrace", shared.nodes * RANKS);
                    let data = shared.template.file.clone();
                    let stacks = DumpFile { incident: incident.clone(), name, data, last: true };
                    let stacks = once(stacks).filter(|_| kind != FileKind::Timeline);
                    let timeline = shared.template.timeline(&shared, rank).into_iter();
                    let timeline = timeline.filter(|_| kind != FileKind::Stacktrace);
                    let piece = |TimelineFile { name, data, last, .. }: TimelineFile| DumpFile {
                        incident: incident.clone(),
                        name,
                        data,
                        last,
                    };
                    stacks.chain(timeline.map(piece))
                };
                let mut files: Vec<DumpFile> =
                    fetch.ranks.iter().flat_map(|run| run.first..=run.last).flat_map(file).collect();
                files.push(DumpFile { incident: incident.clone(), ..Default::default() });
                bring(&mut client, fetch.key, files.into_iter().map(Brought::File)).await?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// The token of the cluster collector. Without one, few connections are accepted.
pub const TOKEN: &str = "bench";

type Authorize = fn(Request<()>) -> Result<Request<()>, Status>;

fn authorize(mut request: Request<()>) -> Result<Request<()>, Status> {
    let value = format!("Bearer {TOKEN}").parse().map_err(|_| Status::internal("the token is not a valid header"))?;
    request.metadata_mut().insert("authorization", value);
    Ok(request)
}

/// Delivers what the cluster requested with this key.
async fn bring(
    client: &mut ClusterClient<InterceptedService<SmallFrames<Channel>, Authorize>>,
    key: String,
    pieces: impl Iterator<Item = Brought> + Send + 'static,
) -> Result<()> {
    let pieces = once(Brought::Key(key)).chain(pieces).map(|piece| Delivery { message: Some(piece) });
    client.bring(tokio_stream::iter(pieces)).await?;
    Ok(())
}

fn hello(shared: &Shared, node: u32) -> NodeHello {
    let ranks = (node * RANKS..(node + 1) * RANKS).map(|rank| RankEntry {
        job: Some(job()),
        info: Some(RankInfo {
            rank: rank as i32,
            world_size: shared.nodes * RANKS,
            local_rank: (rank % RANKS) as i32,
            local_world_size: RANKS,
            node: format!("node-{node:05}"),
            ..Default::default()
        }),
        presence: Presence::Present.into(),
        hang_timeout_ms: 300_000,
        sample_interval_ms: 5_000,
        idle_timeout_ms: 600_000,
        ..Default::default()
    });
    NodeHello {
        protocol: PROTOCOL_VERSION,
        node: format!("node-{node:05}"),
        identity: format!("bench-identity-{node:05}"),
        ranks: Some(NodeRanks { ranks: ranks.collect() }),
        incidents: Vec::new(),
    }
}

/// The delivery of one node, created once by the node collector's own code. Other nodes differ in
/// their ranks, their communicators, and in the culprit.
struct Template {
    native: StackTree,
    python: StackTree,
    ranks: Vec<RankEvidence>,
    loader: RankEvidence,
    /// A `.stacktrace` file.
    file: Vec<u8>,
    /// An `.ops` file.
    timeline: Vec<u8>,
}

impl Template {
    fn new(nodes: u32) -> Result<Self> {
        // As in the cluster's request.
        let operations = (1_000_000 / (nodes * RANKS)).clamp(10, 1024) as usize;
        let mut part = Part::default();
        for rank in 0..RANKS {
            part.add(
                &stacks(rank, "synchronize", "/job/cuda.py:188", "cudaStreamSynchronize"),
                &evidence(rank, operations),
                operations,
            );
        }
        let mut alone = Part::default();
        let mut blamed = evidence(0, operations);
        blamed.dump = Some(stacks(0, "DataLoader.__next__", "/job/train.py:66", "read").into());
        alone.add(&stacks(0, "DataLoader.__next__", "/job/train.py:66", "read"), &blamed, operations);
        let loader = RankEvidence::decode(&alone.finish("", Vec::new()).ranks[0][..])?;
        let file = stacks(0, "synchronize", "/job/cuda.py:188", "cudaStreamSynchronize").encode_to_vec();
        let part = part.finish("", Vec::new());
        let ranks = part.ranks.iter().map(|rank| RankEvidence::decode(&rank[..])).collect::<Result<_, _>>()?;
        let (native, python) = (StackTree::decode(&part.native[..])?, StackTree::decode(&part.python[..])?);
        Ok(Template { native, python, ranks, loader, file, timeline: timeline()? })
    }

    /// The timeline of a rank in chunks, as a node sends it.
    fn timeline(&self, shared: &Shared, rank: u32) -> Vec<TimelineFile> {
        let name = file_name(rank, shared.nodes * RANKS);
        let chunk = |data: &[u8]| TimelineFile { name: name.clone(), data: data.into(), ..Default::default() };
        let mut chunks: Vec<TimelineFile> = self.timeline.chunks(CHUNK_BYTES).map(chunk).collect();
        if let Some(last) = chunks.last_mut() {
            (last.last, last.operations) = (true, OPERATIONS.into());
        }
        chunks
    }

    fn part(&self, nodes: u32, node: u32) -> NodeDump {
        let first = node * RANKS;
        let mut part = NodeDump { last: true, ..Default::default() };
        let culprit = culprit(nodes);
        part.ranks = (self.ranks.iter().zip(first..))
            .map(|(entry, rank)| {
                let mut entry = if rank == culprit { self.loader.clone() } else { entry.clone() };
                entry.rank = rank;
                entry.node = format!("node-{node:05}");
                let flight = entry.flight.as_mut().expect("each entry has a flight record");
                number(flight, nodes, rank, culprit);
                entry.encode_to_vec()
            })
            .collect();
        [part.native, part.python] = [&self.native, &self.python].map(|tree| {
            let mut tree = tree.clone();
            for run in tree.nodes.iter_mut().flat_map(|node| &mut node.ranks) {
                run.first += first;
                run.last += first;
            }
            tree.encode_to_vec()
        });
        part
    }
}

/// Identity, size and own rank of the communicators of a rank: the world, its tensor-parallel group
/// (the node), its pipeline, its data-parallel group.
fn groups(nodes: u32, rank: u32) -> [(u64, u32, u32); 4] {
    let (node, local) = (rank / RANKS, rank % RANKS);
    let (stage, replica) = (node % PIPELINE, node / PIPELINE);
    [
        (1, nodes * RANKS, rank),
        (1_000_000 + u64::from(node), RANKS, local),
        (2_000_000 + u64::from(replica * RANKS + local), PIPELINE, stage),
        (3_000_000 + u64::from(stage * RANKS + local), nodes.div_ceil(PIPELINE), replica),
    ]
}

/// Writes the communicators of a rank into its flight record.
fn number(flight: &mut FlightRecord, nodes: u32, rank: u32, culprit: u32) {
    let groups = groups(nodes, rank);
    let same_group = rank / RANKS == culprit / RANKS;
    for (communicator, (id, size, place)) in flight.communicators.iter_mut().zip(groups) {
        (communicator.id, communicator.size, communicator.rank) = (id, size, place as i32);
    }
    for (index, operation) in flight.operations.iter_mut().enumerate() {
        operation.communicator = groups[index % 4].0;
    }
    // The peers of the culprit wait for it in their tensor-parallel group; all others wait for them
    // in the world.
    let waits_in = if same_group { 1 } else { 0 };
    if let Some(pending) = flight.operations.last_mut() {
        pending.communicator = groups[waits_in].0;
    }
    if rank == culprit {
        flight.operations.pop();
    } else {
        flight.communicators[waits_in].launched += 1;
        flight.communicators[waits_in].started += 1;
    }
}

/// An `.ops` file of [`OPERATIONS`].
fn timeline() -> Result<Vec<u8>> {
    let folder = tempfile::tempdir()?;
    let (ranks, operations) = (1, OPERATIONS);
    let period_ns = SECOND / u64::from(OPERATIONS / TIMELINE_SECONDS);
    Timelines { ranks, ranks_per_node: 1, operations, period_ns, ..Timelines::default() }.write(folder.path())?;
    Ok(fs::read(folder.path().join(file_name(0, ranks)))?)
}

fn evidence(rank: u32, operations: usize) -> RankEvidence {
    let communicator = Communicator {
        state: CommunicatorState::Ready.into(),
        launched: 999,
        started: 999,
        completed: 999,
        ..Default::default()
    };
    let operation = |index: usize, status: OpStatus| Operation {
        ticket: index as u64,
        kind: OpKind::Collective.into(),
        op: Op::AllReduce.into(),
        seq: if status == OpStatus::Pending { 1000 } else { 999 - (operations - index) as u64 / 4 },
        count: 1 << 24,
        dtype: DataType::Bfloat16.into(),
        peer: -1,
        stream: 7,
        tid: 4000 + rank,
        entered_ns: NOW - 400 * SECOND,
        returned_ns: NOW - 400 * SECOND + 9000,
        started_ns: NOW - 400 * SECOND + 20_000,
        completed_ns: if status == OpStatus::Pending { 0 } else { NOW - 399 * SECOND },
        status: status.into(),
        device_ns: 900_000,
        ..Default::default()
    };
    let mut recorded: Vec<Operation> = (0..operations).map(|index| operation(index, OpStatus::Completed)).collect();
    recorded.push(operation(operations, OpStatus::Pending));
    RankEvidence {
        rank,
        presence: Presence::Present.into(),
        dump: Some(stacks(rank, "synchronize", "/job/cuda.py:188", "cudaStreamSynchronize").into()),
        flight: Some(FlightRecord {
            rank: Some(Box::new(RankInfo {
                rank: rank as i32,
                command: "python train.py".into(),
                ..Default::default()
            })),
            communicators: vec![communicator; 4],
            operations: recorded,
            kernels_launched: 1_000_000,
            collectives_launched: 4_000,
            read_ns: NOW,
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// 40 native threads and 12 Python threads, like a rank of a PyTorch job.
fn stacks(rank: u32, function: &str, file: &str, blocked_in: &str) -> Stacktrace {
    let native = |thread: u32| {
        let leaf = if thread == 0 { blocked_in.to_string() } else { format!("worker_wait_{}", thread % 7) };
        let frames = (0..18).map(|depth| PstackFrame {
            func_name: if depth == 0 { leaf.clone() } else { format!("at::native::frame_{depth}_of_{}", thread % 11) },
            file_name: format!("/usr/lib/python3/dist-packages/torch/lib/libtorch_cpu.so:{depth}"),
            ..Default::default()
        });
        PstackStacktrace {
            pid: 4000 + thread,
            frames: frames.collect(),
            state: "S (sleeping)".into(),
            ..Default::default()
        }
    };
    let python = |thread: u32| {
        let main = [
            (function, file),
            ("train_step", "/job/train.py:90"),
            ("main", "/job/train.py:140"),
            ("<module>", "/job/train.py:160"),
        ];
        let other = format!("/usr/lib/python3.11/threading.py:{}", 300 + thread);
        let frames: Vec<PySpyFrame> = if thread == 0 {
            main.iter()
                .map(|(f, file)| PySpyFrame { func_name: (*f).into(), file_name: (*file).into(), ..Default::default() })
                .collect()
        } else {
            let frame =
                |name: &str| PySpyFrame { func_name: name.into(), file_name: other.clone(), ..Default::default() };
            ["wait", "get", "run", "_bootstrap"].map(frame).to_vec()
        };
        let name = if thread == 0 { "MainThread".into() } else { format!("worker-{thread}") };
        PySpyStacktrace { pid: 4000, os_thread_id: 4000 + thread, thread_name: name, frames, ..Default::default() }
    };
    let threads: Vec<PstackStacktrace> = (0..40).map(native).collect();
    let python: Vec<PySpyStacktrace> = (0..12).map(python).collect();
    let sample = |captured_unix_ns| ProcessSample {
        stacktrace: threads.clone(),
        py_stacktrace: python.clone(),
        process_state: "S (sleeping)".into(),
        captured_unix_ns,
        ..Default::default()
    };
    let (first, last) = (sample(NOW), sample(NOW + 5 * SECOND));
    Stacktrace {
        stacktrace: threads,
        py_stacktrace: python,
        pid: 4000,
        rank: rank as i32,
        process_state: "S (sleeping)".into(),
        first_sample: Some(first),
        last_sample: Some(ProcessSample { stacktrace: Vec::new(), py_stacktrace: Vec::new(), ..last }),
        ..Default::default()
    }
}
