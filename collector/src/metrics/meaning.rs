//! Converts operations to the units of the metrics: bits on the bus, floating-point operations, and
//! the labels of their series. Pure.
//!
//! Levels and label values are those of the original tool, because its dashboards must continue to
//! work.

use xpu_timer_analysis::throughput::{
    Algorithm, algorithm, attention_flops, bus_bytes, dtype_name, flops, operation_name,
};
use xpu_timer_proto::{
    timeline::is_same_text,
    v1::{Communicator, Op, OpKind, OpStatus, Operation},
};

use crate::metrics::MetricsSettings;

/// The kind of measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Family {
    /// Bits and Gbps on the bus.
    Collective,
    /// Floating-point operations and TFLOPS.
    Matmul,
}

/// The series of an operation within its rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    /// The kind of operation.
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
    pub(crate) fn labels(&self) -> Vec<(&'static str, String)> {
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
pub(crate) struct Measurement {
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
    pub(crate) fn performance(self, amount: f64, us: f64) -> f64 {
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

/// Remembers what was computed for a collective, because a training loop repeats its collectives.
#[derive(Debug)]
pub(crate) struct Transfers {
    // By a hash of operation and size. Of two collectives with one hash, the newer stays.
    known: Vec<Known>,
}

/// What follows from the operation, size and kernel of a collective.
#[derive(Debug, Clone, Default)]
struct Known {
    // Operation, element type, count, and number of ranks; `None` in an unused entry.
    what: Option<(i32, i32, u64, u32)>,
    kernel: String,
    // Bytes on the bus.
    bytes: f64,
    dtype: &'static str,
    operation: &'static str,
    algorithm: Option<Algorithm>,
}

/// Number of collectives in [`Transfers`].
const KNOWN_TRANSFERS: usize = 64;

impl Default for Transfers {
    fn default() -> Self {
        Transfers { known: vec![Known::default(); KNOWN_TRANSFERS] }
    }
}

impl Transfers {
    fn of(&mut self, operation: &Operation, ranks: u32) -> &Known {
        let what = (operation.op, operation.dtype, operation.count, ranks);
        let mixed = (operation.count ^ (operation.op as u64) << 56 ^ u64::from(ranks) << 32)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let known = &mut self.known[(mixed >> 32) as usize % KNOWN_TRANSFERS];
        if known.what != Some(what) || !is_same_text(&known.kernel, &operation.function) {
            let (op, dtype) = (operation.op(), operation.dtype());
            *known = Known {
                what: Some(what),
                kernel: operation.function.clone(),
                bytes: bus_bytes(op, operation.count, dtype, ranks).unwrap_or(0.0),
                dtype: dtype_name(dtype),
                operation: operation_name(op),
                algorithm: algorithm(&operation.function, op),
            };
        }
        known
    }
}

/// Series and amount of a completed collective, or of all operations that one launch of NCCL
/// executes together: the operations of a group on one stream, which share their time.
/// `spans_nodes` is whether the communicator has ranks on other nodes. `transfers` remembers
/// collectives from one call to the next. `None` if nothing is transferred or there is no timing.
#[must_use]
pub(crate) fn collective(
    together: &[(&Operation, &Communicator)],
    spans_nodes: bool,
    settings: &MetricsSettings,
    transfers: &mut Transfers,
) -> Option<(Key, Measurement)> {
    let (first, of_first) = together.first()?;
    let timed = first.kind() == OpKind::Collective && first.status() == OpStatus::Completed && first.device_ns > 0;
    let (mut sent, mut received, mut others) = (0.0, 0.0, 0.0);
    for (operation, communicator) in together.iter().filter(|(_, communicator)| timed && communicator.size > 1) {
        let of_kind = match operation.op() {
            Op::Send => &mut sent,
            Op::Recv => &mut received,
            _ => &mut others,
        };
        *of_kind += transfers.of(operation, communicator.size).bytes;
    }
    // Both directions of a link are used at once, and nccl-tests counts one of them.
    let bits = (f64::max(sent, received) + others) * 8.0;
    let done = Measurement { at_ns: first.completed_ns, us: first.device_ns as f64 / 1e3, amount: bits };
    (bits > 0.0).then(|| (collective_key(transfers.of(first, of_first.size), spans_nodes, &done, settings), done))
}

fn collective_key(known: &Known, spans_nodes: bool, done: &Measurement, settings: &MetricsSettings) -> Key {
    let level = settings.levels.map(|(levels, _)| {
        let gbps = Family::Collective.performance(done.amount, done.us);
        collective_level(gbps, levels)
    });
    let transfer = Transfer { algorithm: known.algorithm, spans_nodes, is_small: done.amount <= SMALL_BITS };
    Key { family: Family::Collective, dtype: known.dtype, operation: known.operation, level, transfer: Some(transfer) }
}

/// Series and amount of a completed matrix product or flash attention.
#[must_use]
pub(crate) fn matmul(operation: &Operation, settings: &MetricsSettings) -> Option<(Key, Measurement)> {
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

#[cfg(test)]
mod tests {
    use xpu_timer_proto::{
        env::Source,
        v1::{DataType, Matmul},
    };

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

    /// Without a memory of earlier collectives.
    fn collective(
        together: &[(&Operation, &Communicator)],
        spans_nodes: bool,
        settings: &MetricsSettings,
    ) -> Option<(Key, Measurement)> {
        super::collective(together, spans_nodes, settings, &mut Transfers::default())
    }

    #[test]
    fn what_is_known_about_one_collective_is_not_used_for_another() {
        let mut transfers = Transfers::default();
        let names = ["", "ncclDevKernel_AllReduce_Sum_f16_RING_LL", "ncclDevKernel_AllReduce_Sum_f16_TREE_LL"];
        let types = [DataType::Float16, DataType::Float32];
        // More than it remembers.
        for round in 0..3 {
            for number in 0..10 * KNOWN_TRANSFERS as u64 {
                let operation = Operation {
                    op: [Op::AllReduce, Op::AllGather][number as usize % 2].into(),
                    dtype: types[(number / 2) as usize % 2].into(),
                    function: names[(number / 4 + round) as usize % 3].into(),
                    ..all_reduce(number / 12, 10)
                };
                let communicator = communicator(2 + number as u32 % 3);
                let together = [(&operation, &communicator)];
                let known = super::collective(&together, false, &settings(), &mut transfers);
                assert_eq!(known, collective(&together, false, &settings()));
            }
        }
    }

    fn labels(key: &Key) -> String {
        key.labels().iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(",")
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
        let operation = Operation {
            kind: OpKind::Kernel.into(),
            op: Op::Matmul.into(),
            dtype: DataType::Bfloat16.into(),
            status: OpStatus::Completed.into(),
            device_ns: 687_195,
            matmul: Some(shape.into()),
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
            let matmul = Some(Matmul { trans_a, ..shape.clone() });
            Operation { op: Op::Attention.into(), matmul: matmul.map(Box::new), ..operation.clone() }
        };
        let (key, forward) = matmul(&attention(0), &settings()).unwrap();
        assert_eq!(labels(&key), "dtype=bf16,operation=FA,level=2");
        assert_eq!(forward.amount, 4.0 * 2.0 * 2048.0 * 2048.0 * 1024.0);
        assert_eq!(matmul(&attention(1), &settings()).unwrap().1.amount, 2.0 * forward.amount);
    }
}
