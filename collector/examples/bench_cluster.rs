//! Measures the cluster role: `cargo xtask bench cluster`.
//!
//! Simulated nodes of 8 ranks each join one real cluster collector over loopback gRPC, a connection each. One rank hangs; every node
//! is asked and delivers its trees and flight records. What is measured is the collector process. First with few nodes, then with
//! many: the time may grow with the nodes and no faster.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use tokio::sync::mpsc;
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::transport::Endpoint;
use xpu_timer_analysis::Verdict;
use xpu_timer_collector::delivery::{Part, pieces};
use xpu_timer_proto::{
    Message as _, PROTOCOL_VERSION,
    server::{ProcessSample, PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace, Stacktrace},
    v1::{
        Alarm, Captured, Communicator, CommunicatorState, DataType, DumpFile, FlightRecord, JobId, NodeDump, NodeHello,
        NodeMessage, NodeRanks, Op, OpKind, OpStatus, Operation, Presence, RankEntry, RankEvidence, RankInfo, Trigger,
        TriggerKind, cluster_client::ClusterClient, cluster_message::Message as Asked, node_message::Message,
    },
};

/// Benchmark of the cluster role.
#[derive(Parser)]
struct Options {
    /// Nodes of the small run
    #[arg(long, default_value_t = 1_000)]
    few: u32,
    /// Nodes of the large run
    #[arg(long, default_value_t = 12_500)]
    many: u32,
    /// The collector [default: beside this program's folder]
    #[arg(long)]
    collector: Option<PathBuf>,
}

const RANKS: u32 = 8;
const PIPELINE: u32 = 10;
const SECOND: u64 = 1_000_000_000;
const NOW: u64 = 1_000 * SECOND;
const REPORT_LIMIT: Duration = Duration::from_secs(15);
const MEMORY_LIMIT_MB: u64 = 2_000;
const PATIENCE: Duration = Duration::from_secs(300);

fn main() -> Result<()> {
    let options = Options::parse();
    let own = std::env::current_exe()?;
    let beside = own.parent().and_then(Path::parent).context("a profile folder")?.join("xpu_timer_collector");
    let collector = options.collector.clone().unwrap_or(beside);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let small = runtime.block_on(run(&collector, options.few))?;
    let large = runtime.block_on(run(&collector, options.many))?;
    // What every run takes whatever its size is no growth.
    let growth = large.total.as_secs_f64() / small.total.as_secs_f64();
    let nodes = f64::from(options.many) / f64::from(options.few);
    let held = [
        (
            format!(
                "report after the last delivery's start: {:.1} s, limit {} s",
                large.report.as_secs_f64(),
                REPORT_LIMIT.as_secs()
            ),
            large.report <= REPORT_LIMIT,
        ),
        (format!("peak memory: {} MB, limit {MEMORY_LIMIT_MB} MB", large.peak_mb), large.peak_mb < MEMORY_LIMIT_MB),
        (format!("{nodes:.1} times the nodes take {growth:.1} times as long"), growth <= nodes),
    ];
    for (what, holds) in &held {
        println!("{what}: {}", if *holds { "met" } else { "NOT met" });
    }
    ensure!(held.iter().all(|(_, holds)| *holds), "a limit does not hold");
    Ok(())
}

struct Measured {
    /// From the alarm to the finished report.
    total: Duration,
    /// From the start of the last delivery.
    report: Duration,
    peak_mb: u64,
}

/// The collector under test; ended on drop.
struct Collector(Child);

impl Collector {
    fn peak_mb(&self) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id()))?;
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).context("VmHWM")?;
        let kib: u64 = line.split_whitespace().nth(1).context("a number")?.parse()?;
        Ok(kib * 1024 / 1_000_000)
    }

    fn cpu_s(&self) -> Result<f64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.id()))?;
        let fields: Vec<&str> = stat.rsplit_once(')').context("stat")?.1.split_whitespace().collect();
        let ticks: u64 = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
        Ok(ticks as f64 / 100.0)
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        // Both fail only when it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the simulated nodes tell the measurement.
struct Shared {
    template: Template,
    nodes: u32,
    begun: Instant,
    joined: AtomicU32,
    delivered: AtomicU32,
    bytes: AtomicU64,
    last_start_ns: AtomicU64,
}

async fn run(collector: &Path, nodes: u32) -> Result<Measured> {
    let folder = tempfile::tempdir()?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut command = Command::new(collector);
    command.args(["cluster", "--listen", &format!("127.0.0.1:{port}")]);
    command.env("XPU_TIMER_TIMELINE_PATH", folder.path()).env("XPU_TIMER_LOG", "error").env("TMPDIR", folder.path());
    let child = Collector(command.stdin(Stdio::null()).stderr(Stdio::inherit()).spawn().context("the collector")?);

    let shared = Arc::new(Shared {
        template: Template::new(nodes),
        nodes,
        begun: Instant::now(),
        joined: AtomicU32::new(0),
        delivered: AtomicU32::new(0),
        bytes: AtomicU64::new(0),
        last_start_ns: AtomicU64::new(0),
    });
    let mut alarm = None;
    for node in 0..nodes {
        let (sender, receiver) = mpsc::channel(64);
        if node == 0 {
            alarm = Some(sender.clone());
        }
        tokio::spawn(play(Arc::clone(&shared), node, port, sender, receiver));
        // No faster than they join: the backlog of a listening socket is no part of this.
        while node - shared.joined.load(Ordering::Relaxed).min(node) > 200 {
            ensure!(shared.begun.elapsed() < PATIENCE, "the nodes do not join");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    while shared.joined.load(Ordering::Relaxed) < nodes {
        ensure!(shared.begun.elapsed() < PATIENCE, "only {} nodes joined", shared.joined.load(Ordering::Relaxed));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (joining, joined_mb) = (shared.begun.elapsed(), child.peak_mb()?);

    let cpu = child.cpu_s()?;
    let start = Instant::now();
    let incident = "20261121T030000Z-00000001";
    let message = Message::Alarm(Alarm {
        incident: incident.into(),
        job: Some(job()),
        trigger: Some(Trigger { kind: TriggerKind::Operation.into(), rank: 0, ..Default::default() }),
        hangs: true,
        ..Default::default()
    });
    alarm.context("a node")?.send(NodeMessage { message: Some(message) }).await.ok().context("node 0 is gone")?;
    let latest = folder.path().join("latest");
    while !latest.exists() {
        ensure!(start.elapsed() < PATIENCE, "no report; {} nodes delivered", shared.delivered.load(Ordering::Relaxed));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let total = start.elapsed();
    let last_start = Duration::from_nanos(shared.last_start_ns.load(Ordering::Relaxed));
    let report = shared.begun.elapsed().saturating_sub(last_start);
    let peak_mb = child.peak_mb()?;

    let verdict: Verdict = serde_json::from_slice(&fs::read(latest.join("verdict.json"))?)?;
    let culprit = culprit(nodes);
    ensure!(verdict.culprits == [culprit], "rank {culprit} is to blame: {}", verdict.sentence);
    ensure!(verdict.world_size == nodes * RANKS && verdict.timing.errors.is_empty(), "{:?}", verdict.timing.errors);
    let folded = fs::read_to_string(latest.join("py_stack"))?;
    let world = nodes * RANKS;
    ensure!(folded.contains(&format!("@0-{}|", world - 1)), "a frame that all ranks share");
    println!(
        "{nodes} nodes, {world} ranks: joined in {:.1} s ({joined_mb} MB); {:.0} KB a node; from the alarm to the report {:.1} s, \
         {:.1} s after the last delivery's start; {:.1} s of processors, peak {peak_mb} MB",
        joining.as_secs_f64(),
        shared.bytes.load(Ordering::Relaxed) as f64 / f64::from(nodes) / 1e3,
        total.as_secs_f64(),
        report.as_secs_f64(),
        child.cpu_s()? - cpu,
    );
    println!("  {}", verdict.sentence);
    Ok(Measured { total, report, peak_mb })
}

fn job() -> JobId {
    JobId { name: "bench".into(), instance: "host:29500".into() }
}

fn culprit(nodes: u32) -> u32 {
    nodes * RANKS / 2 + 3
}

/// One simulated node: answers what it is asked.
async fn play(
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
    let mut asked = ClusterClient::new(channel).join(ReceiverStream::new(receiver)).await?.into_inner();
    while let Some(message) = asked.next().await {
        match message?.message {
            Some(Asked::Welcome(_)) => _ = shared.joined.fetch_add(1, Ordering::Relaxed),
            Some(Asked::Dump(request)) => say(Message::Captured(Captured { incident: request.incident })).await?,
            Some(Asked::Deliver(wanted)) => {
                let at = u64::try_from(shared.begun.elapsed().as_nanos())?;
                shared.last_start_ns.fetch_max(at, Ordering::Relaxed);
                for piece in pieces(shared.template.part(shared.nodes, node, &wanted.incident)) {
                    shared.bytes.fetch_add(piece.encoded_len() as u64, Ordering::Relaxed);
                    say(Message::Dump(piece)).await?;
                }
                shared.delivered.fetch_add(1, Ordering::Relaxed);
            }
            Some(Asked::Fetch(fetch)) => {
                for rank in fetch.ranks.iter().flat_map(|run| run.first..=run.last) {
                    let name = format!("{rank:05}-{:05}.stacktrace", shared.nodes * RANKS);
                    let data = shared.template.file.clone();
                    let file = DumpFile { incident: fetch.incident.clone(), name, data, last: true };
                    say(Message::File(file)).await?;
                }
                say(Message::File(DumpFile { incident: fetch.incident, ..Default::default() })).await?;
            }
            _ => {}
        }
    }
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
    });
    NodeHello {
        protocol: PROTOCOL_VERSION,
        node: format!("node-{node:05}"),
        identity: format!("bench-identity-{node:05}"),
        ranks: Some(NodeRanks { ranks: ranks.collect() }),
        incidents: Vec::new(),
    }
}

/// What one node delivers, made once by the node collector's own code; the others differ in their ranks, their communicators, and in
/// who is to blame.
struct Template {
    victims: NodeDump,
    loader: RankEvidence,
    /// A `.stacktrace` file.
    file: Vec<u8>,
}

impl Template {
    fn new(nodes: u32) -> Self {
        // As the cluster asks for it.
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
        blamed.dump = Some(stacks(0, "DataLoader.__next__", "/job/train.py:66", "read"));
        alone.add(&stacks(0, "DataLoader.__next__", "/job/train.py:66", "read"), &blamed, operations);
        let loader = alone.finish("", Vec::new()).ranks.swap_remove(0);
        let file = stacks(0, "synchronize", "/job/cuda.py:188", "cudaStreamSynchronize").encode_to_vec();
        Template { victims: part.finish("", Vec::new()), loader, file }
    }

    fn part(&self, nodes: u32, node: u32, incident: &str) -> NodeDump {
        let first = node * RANKS;
        let mut part = NodeDump { incident: incident.into(), ..self.victims.clone() };
        let trees = [&mut part.native, &mut part.python];
        for run in trees.into_iter().flatten().flat_map(|tree| &mut tree.nodes).flat_map(|node| &mut node.ranks) {
            run.first += first;
            run.last += first;
        }
        let culprit = culprit(nodes);
        for local in 0..RANKS {
            let rank = first + local;
            let entry = &mut part.ranks[local as usize];
            if rank == culprit {
                *entry = self.loader.clone();
            }
            entry.rank = rank;
            entry.node = format!("node-{node:05}");
            let flight = entry.flight.as_mut().expect("made with one");
            number(flight, nodes, rank, culprit);
        }
        part
    }
}

/// Identities and places of the communicators of a rank: the world, its tensor-parallel group (the node), its pipeline, its
/// data-parallel group.
fn number(flight: &mut FlightRecord, nodes: u32, rank: u32, culprit: u32) {
    let (node, local) = (rank / RANKS, rank % RANKS);
    let (stage, replica) = (node % PIPELINE, node / PIPELINE);
    let groups: [(u64, u32, u32); 4] = [
        (1, nodes * RANKS, rank),
        (1_000_000 + u64::from(node), RANKS, local),
        (2_000_000 + u64::from(replica * RANKS + local), PIPELINE, stage),
        (3_000_000 + u64::from(stage * RANKS + local), nodes.div_ceil(PIPELINE), replica),
    ];
    let same_group = node == culprit / RANKS;
    for (communicator, (id, size, place)) in flight.communicators.iter_mut().zip(groups) {
        (communicator.id, communicator.size, communicator.rank) = (id, size, place as i32);
    }
    for (index, operation) in flight.operations.iter_mut().enumerate() {
        operation.communicator = groups[index % 4].0;
    }
    // The peers of the culprit wait for it in their tensor-parallel group, everybody else waits for them in the world.
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
        dump: Some(stacks(rank, "synchronize", "/job/cuda.py:188", "cudaStreamSynchronize")),
        flight: Some(FlightRecord {
            rank: Some(RankInfo { rank: rank as i32, command: "python train.py".into(), ..Default::default() }),
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

/// 40 native threads and 12 Python threads, as a rank of a PyTorch job has them.
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
