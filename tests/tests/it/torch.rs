//! Real PyTorch, the CUDA build of PyPI, with its own ProcessGroupNCCL on the simulated device:
//! in a job that hangs in NCCL, the culprit is named long before torch's own watchdog speaks.
//! `cargo xtask test --torch` runs these alone.
//!
//! In healthy training, every launch, collective and matrix product is seen once; the simulated
//! device says what there was: it prints a line for every call. Every metric of a running job has
//! its labels, its level, and its value against known values of the job: sizes of collectives,
//! shapes of products, and what the ranks say that they have counted.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde_json::json;
use xpu_timer_proto::v1::{DataType, FlightRecord, Matmul, Op, OpKind, OpStatus, Operation};
use xpu_timer_tests::{
    FakeCollector, Incident, Job, PATIENCE, Process, PypiTorch, ReadMode, artifacts, skip, tree, wait_until,
};

use crate::{
    metrics::{Sample, page, samples},
    timeline::{fetch, read},
    traces::{HTA, PERFETTO, check_breakdown, generate, read_with},
};

const RANKS: u32 = 4;

/// A job of PyPI's torch. There is one at a time: four ranks keep a small machine busy for many
/// seconds.
struct Torch {
    torch: PypiTorch,
    job: Job,
    _turn: MutexGuard<'static, ()>,
}

/// PyPI's torch, for whose turn it is; nothing when it cannot be set up.
pub fn pypi() -> Option<(PypiTorch, MutexGuard<'static, ()>)> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match PypiTorch::set_up() {
        Ok(torch) => Some((torch, turn)),
        Err(error) => {
            skip(&format!("{error:#}"));
            None
        }
    }
}

impl Torch {
    /// A job whose ranks hang soon and find each other at a port of their own.
    fn new() -> Option<Self> {
        let (torch, turn) = pypi()?;
        let libraries = torch.library_path().expect("the libraries of stubs").into_string().unwrap();
        let job = Job::new();
        let port = job.spare_port();
        let job = job
            .with("LD_LIBRARY_PATH", &libraries)
            .with("MASTER_ADDR", "127.0.0.1")
            .with("MASTER_PORT", &port.to_string())
            .with("OMP_NUM_THREADS", "1")
            // The ranks meet before their first collective, and then run in step, but two cores are
            // few for them.
            .with("XPU_TIMER_HANG_TIMEOUT", "8")
            .with("XPU_TIMER_SAMPLE_INTERVAL", "1")
            .with("XPU_TIMER_LINGER", "120");
        Some(Torch { torch, job, _turn: turn })
    }

    /// Adds the words that start the ranks of an example to a command of this Python.
    fn words(command: &mut Command, ranks: u32, script: &str, arguments: &[&str]) {
        let examples = tree().join("tests/examples");
        command.arg(examples.join("run_ranks.py")).arg(format!("--nproc={ranks}"));
        command.arg(examples.join(script)).args(arguments);
    }

    /// The ranks under the launcher.
    fn launch(&self, script: &str, arguments: &[&str]) -> Process {
        let mut command = self.job.launch(self.torch.python());
        Self::words(&mut command, RANKS, script, arguments);
        Process::spawn(&mut command)
    }
}

fn text(incident: &Incident) -> String {
    fs::read_to_string(incident.path.join("verdict.txt")).expect("every incident has a verdict.txt")
}

/// How long four ranks on a busy machine may take from their start to a verdict.
const LONG: std::time::Duration = PATIENCE.saturating_mul(4);

/// Runs the example with a fault on rank 2 and checks the verdict; what each of `parts` says must
/// be in its sentence.
#[track_caller]
fn expect(fault: &[&str], cause: &str, parts: &[&str]) {
    let Some(torch) = Torch::new() else { return };
    let _ranks = torch.launch("torch_cuda.py", &[&["--fault"], fault].concat());
    check(&torch.job.wait_incident(1, LONG), cause, parts);
}

#[track_caller]
fn check(incident: &Incident, cause: &str, parts: &[&str]) {
    let text = text(incident);
    assert_eq!(incident.verdict["cause"], cause, "{text}");
    assert_eq!(incident.verdict["culprits"], json!([2]), "{text}");
    assert_eq!(incident.verdict["confidence"], "high", "{text}");
    let sentence = incident.verdict["sentence"].as_str().expect("a sentence");
    for part in parts {
        assert!(sentence.contains(part), "{part} in: {sentence}");
    }
}

#[test]
fn a_rank_misses_a_step_of_ddp() {
    let parts = ["has not entered all_reduce", "in wait_for_shard", "ranks 0-1, 3 wait"];
    expect(&["ddp", "--parts", "ddp"], "missing_rank", &parts);
}

#[test]
fn a_rank_misses_a_step_of_fsdp() {
    let parts = ["has not entered all_gather", "in wait_for_shard", "ranks 0-1, 3 wait"];
    expect(&["fsdp2", "--parts", "fsdp2"], "missing_rank", &parts);
}

#[test]
fn a_rank_is_missing_from_its_tensor_parallel_group() {
    // Rank 3 waits for it in their row; ranks 0 and 1 wait in the columns, the one for it and the
    // other for rank 3.
    expect(
        &["tensor_parallel"],
        "missing_rank",
        &["Rank 2 has not entered all_reduce", "in wait_for_shard", "(2 ranks)"],
    );
}

#[test]
fn a_rank_misses_a_step_of_fsdp_over_tensor_parallelism() {
    // Rank 3 waits for it in their row, ranks 0 and 1 in the columns and in their own row.
    let parts = ["Rank 2 has not entered all_", "in wait_for_shard", "(2 ranks)"];
    expect(&["sharded", "--parts", "sharded"], "missing_rank", &parts);
}

#[test]
fn a_rank_misses_an_object_collective_on_gloo_beside_nccl() {
    let parts = ["Rank 2 has not entered all_gather", "in wait_for_shard", "ranks 0-1, 3 wait for it"];
    expect(&["objects", "--parts", "objects"], "missing_rank", &parts);
}

#[test]
fn a_stage_of_a_pipeline_stops() {
    expect(&["pipeline"], "p2p_unmatched", &["Rank 2 does not receive from rank 1", "in wait_for_shard"]);
}

#[test]
fn a_rank_skips_a_collective_and_continues() {
    expect(&["skip"], "op_mismatch", &["rank 2 runs all_gather", "while ranks 0-1, 3 run all_reduce"]);
}

#[test]
fn a_rank_skips_a_bucket() {
    expect(&["shapes"], "size_mismatch", &["rank 2 runs all_reduce of 64 elements", "run all_reduce of 32 elements"]);
}

#[test]
fn a_rank_raises() {
    let how = "Rank 2 has exited (exit code 1: ValueError: the loss is not a number at torch_cuda.py:71 in train)";
    expect(&["exception", "--parts", "ddp"], "process_dead", &[how, "ranks 0-1, 3 wait"]);
}

#[test]
fn the_verdict_is_there_before_torch_ends_the_job_itself() {
    const WATCHDOG: &str = "timeout watchdog detected operation timeout";
    let Some(torch) = Torch::new() else { return };
    let arguments = ["--parts", "ddp", "--fault", "ddp", "--timeout", "40"];
    let ranks = torch.launch("torch_cuda.py", &arguments);
    check(&torch.job.wait_incident(1, LONG), "missing_rank", &["has not entered all_reduce", "in wait_for_shard"]);
    assert!(!ranks.stderr().contains(WATCHDOG), "{}", ranks.stderr());
    // xpu_timer does not change what torch does; the missing rank has nothing to time out.
    wait_until(LONG, "the watchdogs of three ranks", || ranks.stderr().matches(WATCHDOG).count() >= 3);
}

#[test]
fn torchrun_restarts_a_job_on_the_device_that_hung_and_was_ended() {
    let Some(mut torch) = Torch::new() else { return };
    // Ranks of a second attempt find NCCL's id of the first one in the store of the agent, and wait
    // forever, unless each attempt has a store of its own.
    torch.job = torch.job.with("XPU_TIMER_HANG_KILL", "1").with("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1");
    let mut command = torch.job.launch(torch.torch.python());
    command.args(["-m", "torch.distributed.run", "--nproc-per-node=4", "--max-restarts=1", "--local-addr=127.0.0.1"]);
    command
        .args(["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"])
        .arg(tree().join("tests/examples/torch_cuda.py"));
    let agent = Process::spawn(command.args(["--parts", "ddp", "--fault", "once"]));
    let incident = torch.job.wait_incident(1, LONG);
    check(&incident, "missing_rank", &["has not entered all_reduce", "in wait_for_shard"]);
    assert_eq!(incident.verdict["attempt"], 0, "{}", text(&incident));
    let output = agent.wait(LONG);
    assert_eq!(output.code(), 0, "{}{}", output.stdout, output.stderr);
    for rank in 0..RANKS {
        assert!(output.stdout.contains(&format!("rank {rank} done")), "{}{}", output.stdout, output.stderr);
    }
    wait_until(PATIENCE, "the incident is closed", || torch.job.incidents()[0].verdict["status"] != "open");
    assert_eq!(torch.job.incidents().len(), 1, "{}", torch.job.logs());
}

/// Steps of each part of the example.
const STEPS: u64 = 10;
/// NCCL's functions that move data, and those that make and unmake communicators.
const OPERATIONS: [&str; 13] = [
    "ncclAllReduce",
    "ncclReduce",
    "ncclBroadcast",
    "ncclBcast",
    "ncclAllGather",
    "ncclReduceScatter",
    "ncclAlltoAll",
    "ncclSend",
    "ncclRecv",
    "ncclCommInitRankConfig",
    "ncclCommSplit",
    "ncclCommDestroy",
    "ncclCommAbort",
];

/// The calls of one process: its record, and how often each function returned success or each
/// kernel ran, by the device's own count.
struct ProcessRecord {
    record: FlightRecord,
    calls: BTreeMap<String, u64>,
}

impl ProcessRecord {
    fn calls(&self, name: &str) -> u64 {
        self.calls.get(name).copied().unwrap_or(0)
    }

    fn sum(&self, pick: impl Fn(&str) -> bool) -> u64 {
        self.calls.iter().filter(|(name, _)| pick(name)).map(|(_, count)| count).sum()
    }

    fn seen(&self, name: &str) -> u64 {
        self.record.coverage.iter().filter(|function| function.name == name).map(|function| function.calls).sum()
    }

    fn operations(&self, op: Op) -> Vec<&Operation> {
        self.record.operations.iter().filter(|operation| operation.op() == op).collect()
    }

    /// Checks every healthy process. `captured` is the number of NCCL's kernels inside captured
    /// graphs.
    fn check(&self, captured: u64) {
        let health = self.record.health.as_ref().expect("health");
        assert_eq!((health.dropped, health.panics, health.overflows), (0, 0, 0), "{:?}", self.record);
        let launched = self.sum(|name| name.starts_with("cuLaunch") && name.contains("Kernel"));
        let of_nccl = captured + self.sum(|name| name.starts_with("kernel ") && name.contains("ncclDevKernel"));
        assert!(launched > 0, "{:?}", self.calls);
        assert_eq!(self.record.kernels_launched, launched - of_nccl, "{:?}", self.calls);
        assert_eq!(self.record.graphs_launched, self.calls("cuGraphLaunch"));
        // The hook calls NCCL by its second names, and NCCL broadcasts in place by its other
        // broadcast.
        let in_place = self.seen("ncclBcast");
        for name in OPERATIONS {
            let executed = self.calls(name) + self.calls(&format!("p{name}"));
            assert_eq!(self.seen(name), if name == "ncclBroadcast" { executed - in_place } else { executed }, "{name}");
        }
        for name in ["cublasGemmEx", "cublasSgemm_v2", "cublasLtMatmul"] {
            assert_eq!(self.seen(name), self.calls(name), "{name}");
        }
        let ended = |operation: &&Operation| operation.status() == OpStatus::Completed;
        let pending: Vec<_> = self.record.operations.iter().filter(|operation| !ended(operation)).collect();
        assert!(pending.is_empty(), "{pending:?}");
    }
}

/// The successful calls and the kernels that the simulated device prints, each with its process.
fn device_lines(stderr: &str) -> impl Iterator<Item = (i32, &str)> {
    stderr.lines().filter_map(|line| {
        // sim[PID/THREAD] FUNCTION = CODE, or what a stream does.
        let (place, words) = line.strip_prefix("sim[")?.split_once("] ")?;
        let pid = place.split('/').next()?.parse().ok()?;
        Some((pid, words.strip_suffix(" = 0").unwrap_or(words)))
    })
}

/// Runs ranks of the example to their end, with the hook and a collector that only listens; nothing
/// when torch is not there.
fn run(ranks: u32, environment: &[(&str, &str)], arguments: &[&str]) -> Option<Vec<ProcessRecord>> {
    let torch = Torch::new()?;
    let socket = torch.job.dir.join("socket");
    let collector = FakeCollector::listen(&socket, ReadMode::Reads);
    let mut command = torch.job.command(torch.torch.python());
    Torch::words(&mut command, ranks, "torch_cuda.py", arguments);
    command.env("LD_PRELOAD", artifacts().hook()).env("XPU_TIMER_SOCKET", &socket).env("XPU_SIM_DEBUG", "1");
    command.env("XPU_TIMER_HANG_TIMEOUT", "300");
    command.env("TORCHINDUCTOR_CACHE_DIR", torch.job.dir.join("inductor"));
    command.env("TRITON_CACHE_DIR", torch.job.dir.join("triton")).envs(environment.iter().copied());
    let output = Process::spawn(&mut command).wait(PATIENCE * 6);
    let own: Vec<&str> = output.stderr.lines().filter(|line| !line.starts_with("sim")).collect();
    assert_eq!(output.code(), 0, "{}\n{}", output.stdout, own.join("\n"));
    let ranks = ranks as usize;
    wait_until(PATIENCE, "every rank's goodbye", || collector.goodbyes().len() == ranks);
    assert_eq!((collector.hellos().len(), collector.hangs().len()), (ranks, 0));

    let mut calls: BTreeMap<i32, BTreeMap<String, u64>> = BTreeMap::new();
    for (pid, name) in device_lines(&output.stderr) {
        *calls.entry(pid).or_default().entry(name.into()).or_default() += 1;
    }
    let mut record_of =
        |pid: i32| ProcessRecord { record: collector.ring(pid), calls: calls.remove(&pid).unwrap_or_default() };
    let mut processes: Vec<ProcessRecord> = collector.goodbyes().into_iter().map(&mut record_of).collect();
    processes.sort_by_key(|process| process.record.communicators.first().map(|world| world.rank));
    Some(processes)
}

#[test]
fn every_kind_of_training_and_communication_is_seen_once() {
    let parts = ["ddp", "autocast", "fsdp1", "fsdp2", "graph", "collectives", "point_to_point", "groups"];
    let Some(ranks) = run(RANKS, &[], &[&["--parts"], &parts[..]].concat()) else { return };
    for (rank, process) in ranks.iter().enumerate() {
        process.check(1);
        // Two buckets a step, but one in the first, under autocast too; one captured and the one
        // before it; one of the job's own; a barrier is an all_reduce, also the last; one in each
        // of three groups.
        let all_reduces = 2 * (2 * STEPS - 1) + 2 + 2 * STEPS + 1 + 3 * STEPS;
        assert_eq!(process.seen("ncclAllReduce"), all_reduces);
        // One for a flat parameter, two for layers, and one of the job's own.
        assert_eq!(process.seen("ncclReduceScatter"), (1 + 2 + 1) * STEPS);
        assert_eq!((process.seen("ncclReduce"), process.seen("ncclAlltoAll")), (STEPS, STEPS));
        let others = process.seen("ncclAllGather") + process.seen("ncclBroadcast") + process.seen("ncclBcast");
        let collectives = all_reduces + (4 + 2) * STEPS + others;
        let world = &process.record.communicators[0];
        // Every launch of the graph is one more all_reduce, the capture is none.
        let on_world = collectives - 3 * STEPS - 1 + STEPS;
        assert_eq!((world.size, world.rank as usize, world.launched, world.completed), (4, rank, on_world, on_world));
        // A ring and pairs; torch gathers and scatters with sends and receives, and its roots have
        // one with each other rank.
        let rooted = [4, 4, 2, 2][rank];
        assert_eq!(world.point_to_point, (2 + 1 + rooted) * STEPS);
        for group in &process.record.communicators[1..] {
            assert_eq!((group.size, group.parent, group.launched, group.completed), (2, world.id, STEPS, STEPS));
        }
        assert_eq!(process.record.communicators.len(), 4);
        assert_eq!(process.record.graphs_launched, STEPS);
    }
}

#[test]
fn a_matrix_product_under_autocast_has_its_type_and_shape() {
    let steps = 3;
    let arguments = ["--steps", "3", "--parts", "autocast"];
    let Some(ranks) = run(1, &[("XPU_TIMER_BRACKET", "matmuls")], &arguments) else { return };
    let [process] = &ranks[..] else { panic!("one rank") };
    process.check(0);
    let mut products: BTreeMap<(&str, [u32; 6]), u64> = BTreeMap::new();
    for operation in process.operations(Op::Matmul) {
        assert_eq!(operation.dtype(), DataType::Bfloat16, "{operation:?}");
        let Matmul { batch, m, n, k, trans_a, trans_b, .. } = **operation.matmul.as_ref().expect("a shape");
        *products.entry((&operation.function, [batch, m, n, k, trans_a, trans_b])).or_default() += 1;
    }
    // In the order of columns, 32 examples of 64 features: forward with the bias added by cuBLASLt,
    // backward for the weights of both layers and the input of the second.
    let expected = [
        (("cublasGemmEx", [1, 64, 8192, 32, 0, 1]), steps),
        (("cublasGemmEx", [1, 8192, 32, 64, 0, 0]), steps),
        (("cublasGemmEx", [1, 8192, 64, 32, 0, 1]), steps),
        (("cublasLtMatmul", [1, 64, 32, 8192, 1, 0]), steps),
        (("cublasLtMatmul", [1, 8192, 32, 64, 1, 0]), steps),
    ];
    assert_eq!(products, BTreeMap::from(expected));
}

#[test]
fn compiled_functions_and_kernels_of_triton_are_seen_once() {
    let Some(ranks) = run(1, &[], &["--parts", "compiled"]) else { return };
    let [process] = &ranks[..] else { panic!("one rank") };
    process.check(0);
    // Inductor launches by the one function, Triton by the other, NCCL too.
    assert_eq!((process.seen("cuLaunchKernel"), process.seen("cuLaunchKernelEx")), (STEPS, STEPS + 1));
    assert_eq!(process.calls("kernel double"), STEPS);
    let fused = process.sum(|name| name.starts_with("kernel triton_") && name.contains("gelu"));
    assert_eq!((fused, process.record.kernels_launched), (STEPS, 2 * STEPS));
}

const COMMON: [&str; 5] = ["ip", "job_name", "local_rank", "pod_name", "rank"];
/// The bytes that each rank moves with each operation of double precision, as nccl-tests counts
/// them for four ranks: 262,144 bytes in all.
const BUS_BYTES: [(&str, f64); 7] = [
    ("AllReduce", 262_144.0 * 1.5),
    ("Broadcast", 262_144.0),
    ("Reduce", 262_144.0),
    ("AllGather", 262_144.0 * 0.75),
    ("ReduceScatter", 262_144.0 * 0.75),
    ("AllToAll", 262_144.0 * 0.75),
    ("SendRecv", 262_144.0),
];
/// Each of the five products of a step, in whatever order its sides are: a multiplication and an
/// addition a term.
const FLOP: f64 = 2.0 * 64.0 * 8192.0 * 32.0;

#[test]
fn every_metric_of_a_running_job_has_its_labels_its_level_and_the_right_value() {
    let Some(mut torch) = Torch::new() else { return };
    torch.job = torch
        .job
        .with("XPU_TIMER_HANG_TIMEOUT", "600")
        .with("XPU_TIMER_IDLE_TIMEOUT", "0")
        .with("XPU_TIMER_BRACKET", "all")
        .with("XPU_TIMER_PROMETHEUS_UPDATE_INTERVAL", "1")
        .with("XPU_TIMER_COLL_BVAR_WINDOW_SIZE", "30")
        .with("XPU_TIMER_MM_BVAR_WINDOW_SIZE", "30")
        // The levels of the simulated device's speed: one for each Gbps, as the original tool cuts
        // off what is behind the point.
        .with("XPU_TIMER_COMM_BUCKETING_COUNT", "400")
        .with("XPU_TIMER_DEVICE_NAME", "V100")
        .with("XPU_TIMER_JOB", "measured")
        .with("POD_NAME", "pod-3")
        .with("POD_IP", "10.0.0.3");
    let mut ranks = torch.launch("torch_cuda.py", &["--parts", "measured", "--steps", "40"]);
    for rank in 0..RANKS {
        ranks.wait_for(&format!("rank {rank} counted"), PATIENCE * 4);
    }
    let printed = parse_counts(&ranks.stdout());
    // Each of them is on the page as soon as what was launched last has been looked at.
    let mut text = String::new();
    wait_until(PATIENCE, "what every rank has launched and counted", || {
        text = page(&torch.job);
        samples(&text, "XPU_TIMER_COLL_KERNEL_BANDWIDTH").len() >= BUS_BYTES.len() * RANKS as usize
            && samples(&text, "XPU_TIMER_MM_KERNEL_FLOPS").len() >= RANKS as usize
            && samples(&text, "XPU_TIMER_COMMON_WORK_QUEUE_SIZE").iter().all(|sample| sample.value == 0.0)
            && counted(&text) == printed
    });
    common(&text);
    check_collectives(&text);
    check_products(&text);
    memory(&text);
}

/// Samples of one name, which each rank must have at least one of, with these labels and no others.
#[track_caller]
fn of_every_rank(text: &str, name: &str, more: &[&str]) -> Vec<Sample> {
    let found = samples(text, name);
    let expected: BTreeSet<&str> = COMMON.iter().chain(more).copied().collect();
    for sample in &found {
        assert_eq!(sample.labels.keys().map(String::as_str).collect::<BTreeSet<_>>(), expected, "{name} {sample:?}");
        assert_eq!(sample.label("rank"), sample.label("local_rank"));
        let labels = ["ip", "job_name", "pod_name"].map(|label| sample.label(label));
        assert_eq!(labels, ["10.0.0.3", "measured", "pod-3"], "{name} {sample:?}");
    }
    let ranks: BTreeSet<&str> = found.iter().map(|sample| sample.label("rank")).collect();
    assert_eq!(ranks, BTreeSet::from(["0", "1", "2", "3"]), "{name}: {text}");
    found
}

/// Collections of garbage and batches by rank.
type Counted = BTreeMap<String, (f64, f64)>;

/// The output of the ranks: `rank 2 counted 31 40`.
fn parse_counts(output: &str) -> Counted {
    let counts = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let ["rank", rank, "counted", collections, batches] = words[..] else { return None };
        Some((rank.to_string(), (collections.parse().ok()?, batches.parse().ok()?)))
    };
    let counted: Counted = output.lines().filter_map(counts).collect();
    assert!(
        counted.len() == RANKS as usize && counted.values().all(|counts| counts.0 > 1.0 && counts.1 == 40.0),
        "{output}"
    );
    counted
}

/// As the page has it.
fn counted(text: &str) -> Counted {
    let of = |name: &str| samples(text, &format!("XPU_TIMER_COMMON_{name}_COUNT"));
    let batches = of("DATA_LOADER");
    let pair = |collections: &Sample| {
        let batches = batches.iter().find(|batches| batches.labels == collections.labels)?;
        Some((collections.label("rank").to_string(), (collections.value, batches.value)))
    };
    of("GC").iter().filter_map(pair).collect()
}

fn common(text: &str) {
    for (name, least, most) in [
        ("HANG", 0.0, 0.0),
        ("START_DUMP", 0.0, 0.0),
        ("END_DUMP", 0.0, 0.0),
        ("POOL_QUEUE_SIZE", 1.0, 65536.0),
        ("WORK_QUEUE_SIZE", 0.0, 0.0),
        ("GC_COUNT", 1.0, 1e6),
        ("DATA_LOADER_COUNT", 40.0, 40.0),
    ] {
        let found = of_every_rank(text, &format!("XPU_TIMER_COMMON_{name}"), &[]);
        assert_eq!(found.len(), RANKS as usize, "{name}: {found:?}");
        for sample in found {
            assert!((least..=most).contains(&sample.value), "{name}: {sample:?}");
        }
    }
}

/// Average, shortest, longest and 99th percentile of each series in microseconds, with what it
/// achieved.
fn kernels(text: &str, prefix: &str, performance: &str, labels: &[&str]) -> Vec<(Sample, f64)> {
    let of = |part: &str| of_every_rank(text, &format!("{prefix}_{part}"), labels);
    let [average, max, p99, min, performance] =
        ["AVG_LATENCY", "MAX_LATENCY", "P99_LATENCY", "MIN_LATENCY", performance].map(of);
    let same = |samples: &[Sample], labels: &BTreeMap<String, String>| {
        let found: Vec<f64> = samples.iter().filter(|one| one.labels == *labels).map(|one| one.value).collect();
        assert_eq!(found.len(), 1, "{labels:?}: {text}");
        found[0]
    };
    for one in &average {
        let [max, p99, min] = [&max, &p99, &min].map(|samples| same(samples, &one.labels));
        assert!(
            0.0 < min && min <= one.value && one.value <= max && min <= p99 && p99 <= max,
            "{one:?} {min} {p99} {max}"
        );
    }
    performance.into_iter().map(|one| (one.clone(), same(&average, &one.labels))).collect()
}

/// The metrics of collectives have their labels, and agree with the average durations.
fn check_collectives(text: &str) {
    let labels = ["algorithm", "dtype", "level", "operation", "small", "transport"];
    let all = kernels(text, "XPU_TIMER_COLL_KERNEL", "BANDWIDTH", &labels);
    for (sample, _) in &all {
        let level = sample.value.floor() as u64 + 1;
        assert_eq!(sample.label("level"), level.to_string(), "{sample:?}");
        assert_eq!(sample.label("transport"), "IntraNode", "{sample:?}");
    }
    for (operation, bytes) in BUS_BYTES {
        let double =
            |(sample, _): &&(Sample, f64)| sample.label("operation") == operation && sample.label("dtype") == "fp64";
        let own: Vec<_> = all.iter().filter(double).collect();
        assert!(own.len() >= RANKS as usize, "{operation}: {text}");
        for (sample, average_us) in own {
            let gbps = bytes * 8.0 / average_us / 1e3;
            assert!((sample.value / gbps - 1.0).abs() < 0.01, "{sample:?}, not {gbps}");
            assert_eq!(sample.label("small"), "0", "{sample:?}");
            if operation == "AllReduce" {
                assert_eq!(sample.label("algorithm"), "RING_LL", "{sample:?}");
            }
        }
    }
    // The buckets of DDP are of single precision.
    assert!(all.iter().any(|(sample, _)| sample.label("operation") == "AllReduce" && sample.label("dtype") == "fp32"));
}

/// The metrics of matrix products have their labels, and agree with the average durations.
fn check_products(text: &str) {
    for (sample, average_us) in kernels(text, "XPU_TIMER_MM_KERNEL", "FLOPS", &["dtype", "level", "operation"]) {
        assert_eq!((sample.label("operation"), sample.label("dtype")), ("Matmul", "bf16"), "{sample:?}");
        let tflops = FLOP / average_us / 1e6;
        assert!(
            (sample.value / tflops - 1.0).abs() < 0.01 || (sample.value - tflops).abs() < 2e-6,
            "{sample:?} {tflops}"
        );
        // A tenth of what a V100 can do in half precision for each level.
        let level = (sample.value.floor() / 12.5) as u64 + 1;
        assert_eq!(sample.label("level"), level.to_string(), "{sample:?}");
    }
}

fn memory(text: &str) {
    let all = samples(text, "XPU_TIMER_MEMORY_COUNTER");
    for rank in ["0", "1", "2", "3"] {
        let of = |operation: &str, kind: &str| {
            let is = |sample: &&Sample| {
                sample.label("rank") == rank && sample.label("operation") == operation && sample.label("kind") == kind
            };
            all.iter().find(is).map_or(0.0, |sample| sample.value)
        };
        // A batch a step, and what the collectives move.
        assert!(of("cudaMemcpyAsync", "H2D") >= 40.0, "{text}");
        assert!(of("cudaMalloc", "") >= 1.0, "{text}");
    }
}

/// Real training as Perfetto and HTA read it: the trace has what the device says that it ran.
#[test]
fn the_timeline_of_training_has_what_the_device_ran() {
    let Some(mut torch) = Torch::new() else { return };
    torch.job = torch
        .job
        .with("XPU_TIMER_HANG_TIMEOUT", "600")
        .with("XPU_TIMER_IDLE_TIMEOUT", "0")
        .with("XPU_TIMER_BRACKET", "all")
        .with("XPU_SIM_DEBUG", "1");
    let mut ranks = torch.launch("torch_cuda.py", &["--parts", "measured", "--steps", "20"]);
    for rank in 0..RANKS {
        ranks.wait_for(&format!("rank {rank} counted"), PATIENCE * 4);
    }
    let stderr = ranks.stderr();
    let ran = |pick: &dyn Fn(&str) -> bool| device_lines(&stderr).filter(|(_, name)| pick(name)).count() as u64;
    let called = |name: &str| ran(&|line| line == name || line.strip_prefix('p') == Some(name));
    let collectives = ["AllReduce", "AllGather", "AlltoAll", "Broadcast", "Reduce", "ReduceScatter", "Send", "Recv"];
    let collectives = collectives.map(|name| (name, called(&format!("nccl{name}"))));
    let products = called("cublasGemmEx") + called("cublasLtMatmul");
    let kernels = ran(&|line| line.starts_with("kernel ") && line.contains("2at6native"));
    let all = collectives.iter().map(|(_, count)| count).sum::<u64>() + products + kernels;
    assert!(products == 20 * 20 && kernels > 20 * 20 && collectives.iter().all(|(_, count)| *count >= 80), "{stderr}");

    // The watcher and the collector look at the last ones in their next turns.
    let count = |dump: &Path| -> u64 {
        let operations = (0..RANKS).map(|rank| read(&dump.join(format!("{rank:05}-{RANKS:05}.ops"))).1);
        operations.flatten().filter(|operation| operation.kind() != OpKind::HostCall).count() as u64
    };
    let mut dump = PathBuf::new();
    wait_until(PATIENCE, "all operations are in the timeline", || {
        dump = fetch(&torch.job, &["--seconds", "600"], &torch.job.dir.join("dump")).lines().next().unwrap().into();
        count(&dump) >= all
    });
    let (out, text) = generate(&dump, &["--chrome"]);
    assert!(text.contains("4 ranks on 1 node, "), "{text}");
    let Some(found) = read_with(PERFETTO, "perfetto", &out.path().join("trace_job.bin")) else { return };
    assert_eq!((&found["unfinished"], &found["unknown_tracks"]), (&0.into(), &0.into()));
    let slices = |prefix: &str| -> u64 {
        let names = found["names"].as_object().expect("names").iter().filter(|(name, _)| name.starts_with(prefix));
        names.filter_map(|(_, count)| count.as_u64()).sum()
    };
    // The launch and the kernel have one name.
    for (name, count) in collectives {
        let name = if name == "AlltoAll" { "AllToAll" } else { name };
        assert_eq!(slices(&format!("{name} ")), 2 * count, "{name}");
    }
    assert_eq!((slices("matmul "), slices("at::native::")), (2 * products, 2 * kernels));
    // Flows: from each launch to its kernel, between the ranks of a collective, and from each send
    // to its receive.
    let (messages, together) = (collectives[6].1, collectives[..6].iter().map(|(_, count)| count).sum::<u64>());
    let flows = [all, messages, together / u64::from(RANKS)];
    assert_eq!(["1", "2", "4"].map(|ranks| found["flows_by_ranks"][ranks].as_u64().unwrap_or(0)), flows);
    let Some(found) = read_with(HTA, "hta", &out.path().join("chrome_job")) else { return };
    // HTA cuts off what is behind the point of the microseconds of each kernel.
    check_breakdown(&found, out.path(), (all / u64::from(RANKS)) as f64);
}
