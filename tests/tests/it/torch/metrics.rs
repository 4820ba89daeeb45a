//! Every metric on a running job of four ranks, with its labels and its level, and its value
//! against known values of the job: sizes of collectives, shapes of products, and what the ranks
//! say that they have counted.

use std::collections::{BTreeMap, BTreeSet};

use xpu_timer_tests::{PATIENCE, wait_until};

use super::{RANKS, Torch};
use crate::metrics::{Sample, page, samples};

const COMMON: [&str; 5] = ["ip", "job_name", "local_rank", "pod_name", "rank"];
/// What each rank moves with each operation of double precision, as nccl-tests counts it for four
/// ranks: 262,144 bytes in all.
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
    collectives(&text);
    products(&text);
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

fn collectives(text: &str) {
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

fn products(text: &str) {
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
