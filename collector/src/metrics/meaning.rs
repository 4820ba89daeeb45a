//! Converts operations to the units of the metrics: bits on the bus, floating-point operations, and
//! the labels of their series. Pure.
//!
//! Bus bandwidth uses the factors of nccl-tests, so that the value for a collective does not depend
//! on the number of ranks. Levels and label values are those of the original tool, because its
//! dashboards must continue to work.

use xpu_timer_proto::v1::{Communicator, DataType, Matmul, Op, OpKind, OpStatus, Operation};

use crate::metrics::settings::MetricsSettings;

/// The kind of measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// Bits and Gbps on the bus.
    Collective,
    /// Floating-point operations and TFLOPS.
    Matmul,
}

/// The series of an operation within its rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// What is measured.
    pub family: Family,
    dtype: &'static str,
    operation: &'static str,
    // `None` if levels are off.
    level: Option<u32>,
    // Only for collectives.
    transfer: Option<Transfer>,
}

/// The part of the key that only collectives have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Transfer {
    algorithm: Option<Algorithm>,
    spans_nodes: bool,
    is_small: bool,
}

impl Key {
    /// Labels in addition to those of the rank, in output order.
    #[must_use]
    pub fn labels(&self) -> Vec<(&'static str, String)> {
        let mut labels = vec![("dtype", self.dtype.to_string()), ("operation", self.operation.to_string())];
        labels.extend(self.level.map(|level| ("level", level.to_string())));
        if let Some(Transfer { algorithm, spans_nodes, is_small }) = &self.transfer {
            labels.push(("algorithm", algorithm.map_or("UNKNOWN".into(), |algorithm| algorithm.name())));
            labels.push(("transport", if *spans_nodes { "InterNode" } else { "IntraNode" }.to_string()));
            labels.push(("small", u8::from(*is_small).to_string()));
        }
        labels
    }

    /// A key with only the name of an operation.
    #[cfg(test)]
    pub(crate) fn for_test(operation: &'static str) -> Key {
        Key { family: Family::Collective, dtype: "", operation, level: None, transfer: None }
    }
}

/// Duration and amount of work of one operation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measurement {
    /// When it completed, CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// Device time in microseconds.
    pub us: f64,
    /// Bits on the bus, or floating-point operations.
    pub amount: f64,
}

impl Family {
    /// Performance in Gbps or TFLOPS.
    #[must_use]
    pub fn performance(self, amount: f64, us: f64) -> f64 {
        let per_us = match self {
            Family::Collective => 1e3,
            Family::Matmul => 1e6,
        };
        if us > 0.0 { amount / us / per_us } else { 0.0 }
    }
}

/// Network bandwidth that the levels of collectives refer to.
const NETWORK_GBPS: f64 = 400.0;
/// A collective up to this size counts as small.
const SMALL_BITS: f64 = 8192.0;

/// Series and amount of a completed collective, or of all operations that one launch of NCCL
/// executes together: the operations of a group on one stream, which share their time.
/// `spans_nodes` is whether the communicator has ranks on other nodes. `None` if nothing is
/// transferred or there is no timing.
#[must_use]
pub fn collective(
    together: &[(&Operation, &Communicator)],
    spans_nodes: bool,
    settings: &MetricsSettings,
) -> Option<(Key, Measurement)> {
    let (first, _) = together.first()?;
    let timed = first.kind() == OpKind::Collective && first.status() == OpStatus::Completed && first.device_ns > 0;
    let moving = || together.iter().filter(|(_, communicator)| timed && communicator.size > 1);
    moving().next()?;
    let bytes_of = |wanted: &dyn Fn(Op) -> bool| -> f64 {
        let of_kind = moving().filter(|(operation, _)| wanted(operation.op()));
        of_kind
            .filter_map(|(operation, communicator)| {
                bus_bytes(operation.op(), operation.count, operation.dtype(), communicator.size)
            })
            .sum()
    };
    // Both directions of a link are used at once, and nccl-tests counts one of them.
    let exchanged = bytes_of(&|op| op == Op::Send).max(bytes_of(&|op| op == Op::Recv));
    let bits = (exchanged + bytes_of(&|op| !matches!(op, Op::Send | Op::Recv))) * 8.0;
    let done = Measurement { at_ns: first.completed_ns, us: first.device_ns as f64 / 1e3, amount: bits };
    (bits > 0.0).then(|| (collective_key(first, spans_nodes, &done, settings), done))
}

fn collective_key(operation: &Operation, spans_nodes: bool, done: &Measurement, settings: &MetricsSettings) -> Key {
    let level = settings.levels.map(|(levels, _)| {
        let gbps = Family::Collective.performance(done.amount, done.us);
        collective_level(gbps, levels)
    });
    let transfer = Transfer {
        algorithm: algorithm(&operation.function, operation.op()),
        spans_nodes,
        is_small: done.amount <= SMALL_BITS,
    };
    Key {
        family: Family::Collective,
        dtype: dtype_name(operation.dtype()),
        operation: operation_name(operation.op()),
        level,
        transfer: Some(transfer),
    }
}

/// Series and amount of a completed matrix product or flash attention.
#[must_use]
pub fn matmul(operation: &Operation, settings: &MetricsSettings) -> Option<(Key, Measurement)> {
    let shape = operation.matmul.as_ref()?;
    if operation.status() != OpStatus::Completed || operation.device_ns == 0 {
        return None;
    }
    let done = Measurement {
        at_ns: operation.completed_ns,
        us: operation.device_ns as f64 / 1e3,
        amount: match operation.op() {
            Op::Attention => attention_flops(shape),
            _ => flops(shape, operation.dtype()),
        },
    };
    let dtype = dtype_name(operation.dtype());
    // The original tool's name.
    let name = if operation.op() == Op::Attention { "FA" } else { "Matmul" };
    let level = settings.levels.map(|(_, levels)| {
        let tflops = Family::Matmul.performance(done.amount, done.us);
        matmul_level(tflops, peak_tflops(&settings.device, dtype), levels)
    });
    Some((Key { family: Family::Matmul, dtype, operation: name, level, transfer: None }, done))
}

/// Floating-point operations of a product: one multiplication and one addition per term; for
/// complex numbers, four of each.
#[must_use]
pub fn flops(shape: &Matmul, dtype: DataType) -> f64 {
    let of_term = if matches!(dtype, DataType::Complex64 | DataType::Complex128) { 8.0 } else { 2.0 };
    // A product without a batch count is a batch of one.
    of_term * f64::from(shape.batch.max(1)) * f64::from(shape.m) * f64::from(shape.n) * f64::from(shape.k)
}

/// Floating-point operations of a flash attention, as the original tool counts them: 4 b s s h
/// forward and 8 b s s h backward, whatever the mask.
#[must_use]
pub fn attention_flops(shape: &Matmul) -> f64 {
    let of_term = if shape.trans_a == 1 { 8.0 } else { 4.0 };
    of_term * f64::from(shape.batch) * f64::from(shape.m) * f64::from(shape.n) * f64::from(shape.k)
}

/// Bytes that count for the bus bandwidth of a collective, computed from the count that each rank
/// passed.
#[must_use]
pub fn bus_bytes(op: Op, count: u64, dtype: DataType, ranks: u32) -> Option<f64> {
    let bytes = count as f64 * f64::from(width(dtype)?);
    Some(bytes * sizes(op, ranks)? * bus_factor(op, ranks)?)
}

/// The size of a collective as defined by nccl-tests, in multiples of the count of one rank's call.
fn sizes(op: Op, ranks: u32) -> Option<f64> {
    match op {
        Op::AllReduce | Op::Reduce | Op::Broadcast | Op::Send | Op::Recv => Some(1.0),
        // The caller passes the count that one rank sends, or the count that one rank receives.
        Op::AllGather | Op::ReduceScatter | Op::AllToAll | Op::Gather | Op::Scatter => Some(f64::from(ranks)),
        _ => None,
    }
}

/// Bus bandwidth divided by size over time, as defined by nccl-tests.
#[must_use]
pub fn bus_factor(op: Op, ranks: u32) -> Option<f64> {
    let ranks = f64::from(ranks.max(1));
    match op {
        Op::AllReduce => Some(2.0 * (ranks - 1.0) / ranks),
        Op::AllGather | Op::ReduceScatter | Op::AllToAll | Op::Gather | Op::Scatter => Some((ranks - 1.0) / ranks),
        Op::Reduce | Op::Broadcast | Op::Send | Op::Recv => Some(1.0),
        _ => None,
    }
}

/// The original tool numbers its levels from 1, and gives everything above the highest level the
/// second highest number.
fn collective_level(gbps: f64, levels: u32) -> u32 {
    let level = (gbps.floor() * f64::from(levels) / NETWORK_GBPS) as u32;
    if level > levels { levels } else { level + 1 }
}

fn matmul_level(tflops: f64, peak: f64, levels: u32) -> u32 {
    ((tflops.floor() * f64::from(levels) / peak) as u32).min(levels) + 1
}

/// Peak performance of a device in TFLOPS from the data sheets of the vendor: dense, with tensor
/// cores where the type supports them. As in the original tool, an unknown device counts as an
/// A100, and an unknown type as half precision.
fn peak_tflops(device: &str, dtype: &str) -> f64 {
    // Half precision, fp32, fp64, fp8.
    let (half, single, double, quarter) = match device {
        "P100" => (19.05, 9.526, 4.763, None),
        "V100" => (125.0, 15.7, 7.8, None),
        "H100" | "H800" => (989.0, 67.0, 67.0, Some(1979.0)),
        _ => (311.84, 19.49, 9.746, None),
    };
    match dtype {
        "fp16" | "bf16" => half,
        "fp32" | "complex64" => single,
        "fp64" | "complex128" => double,
        "fp8_e4m3" | "fp8_e5m2" => quarter.unwrap_or(312.0),
        _ => 312.0,
    }
}

/// Size of an element in bytes; `None` if unknown.
#[must_use]
pub fn width(dtype: DataType) -> Option<u32> {
    match dtype {
        DataType::Int8 | DataType::Uint8 | DataType::Float8E4m3 | DataType::Float8E5m2 => Some(1),
        DataType::Float16 | DataType::Bfloat16 => Some(2),
        DataType::Int32 | DataType::Uint32 | DataType::Float32 => Some(4),
        DataType::Int64 | DataType::Uint64 | DataType::Float64 | DataType::Complex64 => Some(8),
        DataType::Complex128 => Some(16),
        DataType::Unspecified => None,
    }
}

fn dtype_name(dtype: DataType) -> &'static str {
    match dtype {
        DataType::Int8 => "int8",
        DataType::Uint8 => "uint8",
        DataType::Int32 => "int32",
        DataType::Uint32 => "uint32",
        DataType::Int64 => "int64",
        DataType::Uint64 => "uint64",
        DataType::Float16 => "fp16",
        DataType::Float32 => "fp32",
        DataType::Float64 => "fp64",
        DataType::Bfloat16 => "bf16",
        DataType::Float8E4m3 => "fp8_e4m3",
        DataType::Float8E5m2 => "fp8_e5m2",
        DataType::Complex64 => "complex64",
        DataType::Complex128 => "complex128",
        DataType::Unspecified => "UNKNOWN",
    }
}

/// NCCL's name for the kernel of an operation, without its prefix.
#[must_use]
pub fn operation_name(op: Op) -> &'static str {
    match op {
        Op::AllReduce => "AllReduce",
        Op::Reduce => "Reduce",
        Op::Broadcast => "Broadcast",
        Op::AllGather => "AllGather",
        Op::ReduceScatter => "ReduceScatter",
        Op::AllToAll => "AllToAll",
        Op::Gather => "Gather",
        Op::Scatter => "Scatter",
        Op::Send | Op::Recv => "SendRecv",
        _ => "UNKNOWN",
    }
}

/// The algorithm and protocol of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Algorithm {
    // Index into `ALGORITHMS`.
    first: u8,
    // Indexes into `MORE_WORDS` plus one; 0 for none.
    more: [u8; 3],
}

const ALGORITHMS: [&str; 5] = ["RING", "TREE", "COLLNET", "NVLS", "PAT"];
const MORE_WORDS: [&str; 6] = ["TREE", "DIRECT", "CHAIN", "LL", "LL128", "SIMPLE"];

impl Algorithm {
    /// `RING_LL`.
    #[must_use]
    pub fn name(self) -> String {
        let more = self.more.iter().filter_map(|word| MORE_WORDS.get(usize::from(*word).checked_sub(1)?));
        std::iter::once(&ALGORITHMS[usize::from(self.first)]).chain(more).copied().collect::<Vec<_>>().join("_")
    }
}

/// Extracts `RING_LL` from `ncclDevKernel_AllReduce_Sum_f16_RING_LL(…)`, from its mangled name, and
/// from the older `ncclKernel_AllReduce_RING_LL_Sum_half`. `None` if the kernel belongs to another
/// operation, or its name does not contain this part.
#[must_use]
pub fn algorithm(kernel: &str, op: Op) -> Option<Algorithm> {
    let place = |words: &[&str], word: &str| words.iter().position(|known| *known == word).map(|place| place as u8);
    let mut words = plain_name(kernel).split('_').skip_while(|word| *word != operation_name(op)).skip(1);
    let first = words.find_map(|word| place(&ALGORITHMS, word))?;
    let mut more = [0; 3];
    for (slot, word) in more.iter_mut().zip(words) {
        let Some(place) = place(&MORE_WORDS, word) else { break };
        *slot = place + 1;
    }
    Some(Algorithm { first, more })
}

/// The name of a kernel without its arguments. In a mangled name, the length precedes the name.
fn plain_name(symbol: &str) -> &str {
    let mangled = symbol.strip_prefix("_Z").and_then(|rest| {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let length: usize = rest[..digits].parse().ok()?;
        rest[digits..].get(..length)
    });
    mangled.or_else(|| symbol.split('(').next()).unwrap_or(symbol)
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::env::Source;

    use super::*;

    fn settings() -> MetricsSettings {
        MetricsSettings { device: "A100".into(), ..MetricsSettings::new(&Source::new(|_| None, "")) }
    }

    fn all_reduce(count: u64, us: u64) -> Operation {
        Operation {
            kind: OpKind::Collective.into(),
            op: Op::AllReduce.into(),
            dtype: DataType::Float16.into(),
            status: OpStatus::Completed.into(),
            count,
            device_ns: us * 1000,
            completed_ns: 7,
            function: "ncclDevKernel_AllReduce_Sum_f16_RING_LL".into(),
            ..Default::default()
        }
    }

    fn communicator(size: u32) -> Communicator {
        Communicator { size, ..Default::default() }
    }

    fn labels(key: &Key) -> String {
        key.labels().iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(",")
    }

    /// The factors documented by nccl-tests, and its examples of sizes.
    #[test]
    fn bus_bandwidth_has_the_factors_of_nccl_tests() {
        let factors = |ranks| {
            [
                Op::AllReduce,
                Op::AllGather,
                Op::ReduceScatter,
                Op::AllToAll,
                Op::Gather,
                Op::Scatter,
                Op::Reduce,
                Op::Broadcast,
                Op::Send,
            ]
            .map(|op| bus_factor(op, ranks).unwrap())
        };
        assert_eq!(factors(2), [1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0]);
        assert_eq!(factors(8), [1.75, 0.875, 0.875, 0.875, 0.875, 0.875, 1.0, 1.0, 1.0]);
        assert_eq!(factors(1), [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
        assert_eq!(bus_factor(Op::CommInit, 8), None);
        // An all-gather of 1 GiB on 8 ranks: each rank passes an eighth of it, and 7/8 of it pass
        // each bus.
        let eighth = (1u64 << 30) / 8 / 4;
        assert_eq!(bus_bytes(Op::AllGather, eighth, DataType::Float32, 8), Some(f64::from(1u32 << 30) * 7.0 / 8.0));
        assert_eq!(bus_bytes(Op::AllReduce, 1000, DataType::Bfloat16, 4), Some(3000.0));
        assert_eq!(bus_bytes(Op::AllToAll, 1000, DataType::Int64, 4), Some(24_000.0));
        assert_eq!(bus_bytes(Op::Send, 10, DataType::Uint8, 64), Some(10.0));
        // 1000 floats of one rank, or for one rank, among four: three of the four parts of 16,000
        // bytes pass the bus of the busiest rank.
        for op in [Op::AllGather, Op::ReduceScatter, Op::Gather, Op::Scatter, Op::AllToAll] {
            assert_eq!(bus_bytes(op, 1000, DataType::Float32, 4), Some(12_000.0), "{op:?}");
        }
        for op in [Op::Broadcast, Op::Reduce, Op::Recv] {
            assert_eq!(bus_bytes(op, 1000, DataType::Float32, 4), Some(4000.0), "{op:?}");
        }
        assert_eq!(bus_bytes(Op::AllReduce, 10, DataType::Unspecified, 2), None);
    }

    #[test]
    fn a_collective_has_the_labels_of_the_original_tool() {
        // 2 ranks, 1 MiB of half precision in 370 us: 22.7 Gbps, the second level of 20 up to 400.
        let pair = communicator(2);
        let alone = |operation: &Operation, spans_nodes, settings: &MetricsSettings| {
            collective(&[(operation, &pair)], spans_nodes, settings).unwrap()
        };
        let (key, done) = alone(&all_reduce(1 << 19, 370), false, &settings());
        assert_eq!(
            labels(&key),
            "dtype=fp16,operation=AllReduce,level=2,algorithm=RING_LL,transport=IntraNode,small=0"
        );
        assert_eq!((done.at_ns, done.us, done.amount), (7, 370.0, 8.0 * 1024.0 * 1024.0));
        let (key, _) = alone(&all_reduce(512, 1), true, &settings());
        assert_eq!(
            labels(&key),
            "dtype=fp16,operation=AllReduce,level=1,algorithm=RING_LL,transport=InterNode,small=1"
        );
        let bare = MetricsSettings { levels: None, ..settings() };
        let (key, _) = alone(&all_reduce(512, 1), false, &bare);
        assert!(!labels(&key).contains("level"));
    }

    #[test]
    fn untimed_and_empty_operations_have_no_series() {
        let has_series =
            |operation: Operation, size| collective(&[(&operation, &communicator(size))], false, &settings()).is_some();
        assert!(has_series(all_reduce(1, 1), 2));
        assert!(!has_series(all_reduce(1, 0), 2));
        assert!(!has_series(all_reduce(1, 1), 1));
        assert!(!has_series(Operation { status: OpStatus::Failed.into(), ..all_reduce(1, 1) }, 2));
        assert!(!has_series(Operation { kind: OpKind::HostCall.into(), ..all_reduce(1, 1) }, 2));
        assert!(!has_series(Operation { op: Op::CommSplit.into(), ..all_reduce(1, 1) }, 2));
    }

    #[test]
    fn grouped_operations_of_one_launch_count_once() {
        let (pair, alone) = (communicator(2), communicator(1));
        let op = |op: Op, count| Operation { op: op.into(), ..all_reduce(count, 10) };
        let (sends, receives) = (op(Op::Send, 1000), op(Op::Recv, 3000));
        let (key, done) =
            collective(&[(&sends, &pair), (&receives, &pair), (&sends, &alone)], false, &settings()).unwrap();
        assert_eq!((done.us, done.amount), (10.0, 3000.0 * 16.0));
        assert!(labels(&key).contains("operation=SendRecv,level=1,algorithm=UNKNOWN"), "{}", labels(&key));
        let sums = op(Op::AllReduce, 1000);
        assert_eq!(collective(&[(&sums, &pair), (&sums, &pair)], false, &settings()).unwrap().1.amount, 2000.0 * 16.0);
        assert_eq!(collective(&[], false, &settings()), None);
    }

    #[test]
    fn levels_are_those_of_the_original_tool() {
        let of_20 = |gbps| collective_level(gbps, 20);
        assert_eq!(
            [0.0, 19.9, 20.0, 45.9, 399.9, 400.0, 419.9, 420.0, 3000.0].map(of_20),
            [1, 1, 2, 3, 20, 21, 21, 20, 20]
        );
        let of_10 = |tflops| matmul_level(tflops, 311.84, 10);
        assert_eq!([0.0, 31.0, 32.0, 311.0, 312.0, 5000.0].map(of_10), [1, 1, 2, 10, 11, 11]);
    }

    #[test]
    fn a_matrix_product_has_a_count_and_a_level() {
        let shape = Matmul { batch: 0, m: 4096, n: 4096, k: 4096, ..Default::default() };
        assert_eq!(flops(&shape, DataType::Bfloat16), 137_438_953_472.0);
        assert_eq!(flops(&shape, DataType::Complex64), 4.0 * 137_438_953_472.0);
        let operation = Operation {
            kind: OpKind::Kernel.into(),
            op: Op::Matmul.into(),
            dtype: DataType::Bfloat16.into(),
            status: OpStatus::Completed.into(),
            device_ns: 687_195,
            matmul: Some(shape),
            ..Default::default()
        };
        let (key, done) = matmul(&operation, &settings()).unwrap();
        // 200 TFLOPS of 311.84.
        assert_eq!(labels(&key), "dtype=bf16,operation=Matmul,level=7");
        assert_eq!(Family::Matmul.performance(done.amount, done.us).round(), 200.0);
        assert_eq!(Family::Matmul.performance(1.0, 0.0), 0.0);
        let h100 = MetricsSettings { device: "H100".into(), ..settings() };
        assert_eq!(labels(&matmul(&operation, &h100).unwrap().0), "dtype=bf16,operation=Matmul,level=3");
        assert!(matmul(&Operation { matmul: None, ..operation.clone() }, &settings()).is_none());
        // A flash attention of 2 x 16 heads of 64 elements, 2048 queries and keys.
        let shape = Matmul { batch: 32, m: 2048, n: 2048, k: 64, ..Default::default() };
        let attention = |trans_a: u32| {
            let matmul = Some(Matmul { trans_a, ..shape });
            Operation { op: Op::Attention.into(), matmul, ..operation.clone() }
        };
        let (key, forward) = matmul(&attention(0), &settings()).unwrap();
        assert_eq!(labels(&key), "dtype=bf16,operation=FA,level=2");
        assert_eq!(forward.amount, 4.0 * 2.0 * 2048.0 * 2048.0 * 1024.0);
        assert_eq!(matmul(&attention(1), &settings()).unwrap().1.amount, 2.0 * forward.amount);
    }

    #[test]
    fn a_kernel_name_gives_the_algorithm_of_its_own_operation_only() {
        let of = |kernel: &str, op| algorithm(kernel, op).map(Algorithm::name).unwrap_or_default();
        assert_eq!(
            of("ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Op::AllReduce),
            "RING_LL"
        );
        assert_eq!(
            of("_Z39ncclDevKernel_AllReduce_Sum_f16_RING_LL24ncclDevKernelArgsStorageILm4096EE", Op::AllReduce),
            "RING_LL"
        );
        assert_eq!(of("ncclKernel_AllReduce_RING_LL_Sum_half(ncclDevComm*)", Op::AllReduce), "RING_LL");
        assert_eq!(of("ncclDevKernel_AllReduce_Sum_f32_NVLS_TREE_SIMPLE", Op::AllReduce), "NVLS_TREE_SIMPLE");
        assert_eq!(of("mcclDevKernel_AllGather_COLLNET_DIRECT_LL128", Op::AllGather), "COLLNET_DIRECT_LL128");
        assert_eq!(of("ncclDevKernel_AllReduce_Sum_f16_RING_LL", Op::AllGather), "");
        assert_eq!(of("ncclDevKernel_SendRecv", Op::Send), "");
        assert_eq!(of("", Op::AllReduce), "");
        assert_eq!(of("_Z99short_RING_LL", Op::AllReduce), "");
    }
}
