//! Every launch, collective and matrix product of healthy training is seen once. The simulated
//! device says what there was: it prints a line for every call.

use std::collections::BTreeMap;

use xpu_timer_proto::v1::{DataType, FlightRecord, Matmul, Op, OpStatus, Operation};
use xpu_timer_tests::{FakeCollector, PATIENCE, Process, ReadMode, artifacts, wait_until};

use super::{RANKS, Torch};

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

/// What one process did: its record, and how often each function returned success or each kernel
/// ran, by the device's own words.
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

    /// What holds of every healthy process, with so many kernels of NCCL inside graphs that were
    /// captured.
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
    for line in output.stderr.lines() {
        // sim[PID/THREAD] FUNCTION = CODE, or what a stream does.
        let Some((place, words)) = line.strip_prefix("sim[").and_then(|line| line.split_once("] ")) else { continue };
        let Some(pid) = place.split('/').next().and_then(|pid| pid.parse().ok()) else { continue };
        let name = words.strip_suffix(" = 0").unwrap_or(words);
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
        // Of one flat parameter, and of two layers; one of the job's own.
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
        let Matmul { batch, m, n, k, trans_a, trans_b } = operation.matmul.expect("a shape");
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
