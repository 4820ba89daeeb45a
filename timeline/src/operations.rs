//! The meaning of an operation for people: its class, its name and how much it moves or computes;
//! and how the time of a rank is divided among the classes, as HolisticTraceAnalysis defines it.

use serde::Serialize;
use xpu_timer_analysis::throughput::{attention_flops, bus_bytes, dtype_name, flops, operation_name, width};
use xpu_timer_proto::v1::{CopyDirection, DataType, Op, OpKind, Operation, TimelineHead};

use crate::{clocks::ClockMap, job::Group};

/// The class of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// A kernel that computes.
    Compute,
    /// A collective or a message.
    Communication,
    /// A copy or a memset.
    Memory,
    /// A function of the host.
    Host,
}

impl Class {
    /// All classes.
    pub const ALL: [Class; 4] = [Class::Compute, Class::Communication, Class::Memory, Class::Host];

    /// Its name in traces and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Class::Compute => "compute",
            Class::Communication => "communication",
            Class::Memory => "memory",
            Class::Host => "host",
        }
    }
}

/// The meaning of all operations of one shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Meaning {
    /// Its class.
    pub class: Class,
    /// A name that people can read, with type and size.
    pub name: String,
    /// Bytes that the caller passed or copies; 0 if unknown.
    pub bytes: u64,
    /// Bytes on the bus, as nccl-tests counts them.
    pub bus_bytes: Option<f64>,
    /// Floating-point operations.
    pub flops: Option<f64>,
}

impl Meaning {
    /// The meaning of a shape, on this communicator.
    #[must_use]
    pub fn of(shape: &Operation, group: Option<&Group>) -> Meaning {
        let class = match shape.kind() {
            OpKind::Collective => Class::Communication,
            OpKind::HostCall => Class::Host,
            _ if shape.op() == Op::Copy => Class::Memory,
            _ => Class::Compute,
        };
        let is_collective = class == Class::Communication;
        let bytes = match class {
            Class::Communication => shape.count.saturating_mul(width(shape.dtype()).unwrap_or(0).into()),
            Class::Memory => shape.count,
            Class::Compute | Class::Host => 0,
        };
        let size = group.map_or(0, |group| group.size);
        let flops = shape.matmul.as_ref().map(|matmul| match shape.op() {
            Op::Attention => attention_flops(matmul),
            _ => flops(matmul, shape.dtype()),
        });
        Meaning {
            class,
            name: name(shape, bytes),
            bytes,
            bus_bytes: bus_bytes(shape.op(), shape.count, shape.dtype(), size).filter(|_| is_collective && size > 1),
            flops,
        }
    }
}

fn name(shape: &Operation, bytes: u64) -> String {
    let or_function = |name: &str| if shape.function.is_empty() { name.to_string() } else { shape.function.clone() };
    match (shape.kind(), shape.op(), &shape.matmul) {
        (OpKind::Collective, Op::Send | Op::Recv, _) => {
            format!("{}{}", if shape.op() == Op::Send { "Send" } else { "Recv" }, size_of(shape, bytes))
        }
        (OpKind::Collective, Op::Barrier, _) => "Barrier".into(),
        (OpKind::Collective, Op::Unspecified, _) => or_function("collective"),
        (OpKind::Collective, op, _) => format!("{}{}", operation_name(op), size_of(shape, bytes)),
        (OpKind::HostCall, _, _) => or_function("host call"),
        (_, Op::Matmul, Some(of)) if !of.members.is_empty() => {
            format!("matmul, {} grouped{}", of.members.len(), dtype_of(shape))
        }
        (_, Op::Matmul, Some(of)) => {
            let batch = if of.batch > 1 { format!("{} x ", of.batch) } else { String::new() };
            format!("matmul {batch}{}x{}x{}{}", of.m, of.n, of.k, dtype_of(shape))
        }
        (_, Op::Attention, Some(of)) => {
            let pass = if of.trans_a == 1 { "attention backward" } else { "attention" };
            format!("{pass} {} x {}x{}x{}{}", of.batch, of.m, of.n, of.k, dtype_of(shape))
        }
        (_, Op::Copy, _) => match shape.direction() {
            CopyDirection::Fill => format!("memset {}", human(bytes)),
            direction => format!("memcpy {}{}", direction_name(direction), human(bytes)),
        },
        (_, Op::Graph, _) => or_function("graph"),
        _ => or_function("kernel"),
    }
}

fn dtype_of(shape: &Operation) -> String {
    if shape.dtype() == DataType::Unspecified { String::new() } else { format!(" {}", dtype_name(shape.dtype())) }
}

fn size_of(shape: &Operation, bytes: u64) -> String {
    if bytes == 0 { dtype_of(shape) } else { format!("{} {}", dtype_of(shape), human(bytes)) }
}

fn direction_name(direction: CopyDirection) -> &'static str {
    match direction {
        CopyDirection::HostToHost => "HtoH ",
        CopyDirection::HostToDevice => "HtoD ",
        CopyDirection::DeviceToHost => "DtoH ",
        CopyDirection::DeviceToDevice => "DtoD ",
        CopyDirection::Fill | CopyDirection::Unspecified => "",
    }
}

/// A number of bytes with its unit: `64 MiB`, `1.5 KiB`.
#[must_use]
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    let digits = usize::from(value.fract() != 0.0);
    format!("{value:.digits$} {unit}")
}

/// A union of intervals.
#[derive(Debug, Default, Clone)]
struct Union {
    intervals: Vec<(u64, u64)>,
    is_sorted_apart: bool,
}

impl Union {
    fn add(&mut self, from: u64, until: u64) {
        match self.intervals.last_mut() {
            Some(last) if from >= last.0 && from <= last.1 => last.1 = last.1.max(until),
            last => {
                self.is_sorted_apart |= last.is_some_and(|last| from < last.0);
                self.intervals.push((from, until));
            }
        }
    }

    /// Ascending and disjoint.
    fn finish(mut self) -> Vec<(u64, u64)> {
        if !self.is_sorted_apart {
            return self.intervals;
        }
        // The intervals are a few ascending runs, which the stable sort merges.
        self.intervals.sort();
        let mut merged = Union::default();
        self.intervals.into_iter().for_each(|(from, until)| merged.add(from, until));
        merged.intervals
    }
}

fn length(intervals: &[(u64, u64)]) -> u64 {
    intervals.iter().map(|(from, until)| until - from).sum()
}

/// Length of the intersection of two unions.
fn shared(a: &[(u64, u64)], b: &[(u64, u64)]) -> u64 {
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    let mut shared = 0;
    while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
        shared += x.1.min(y.1).saturating_sub(x.0.max(y.0));
        if x.1 < y.1 { _ = a.next() } else { _ = b.next() }
    }
    shared
}

/// When the device of a rank was busy, by class.
#[derive(Debug, Default, Clone)]
pub struct Busy {
    compute: Union,
    communication: Union,
    memory: Union,
}

impl Busy {
    /// Adds an operation of the device.
    pub fn add(&mut self, class: Class, from_ns: u64, until_ns: u64) {
        match class {
            Class::Compute => self.compute.add(from_ns, until_ns),
            Class::Communication => self.communication.add(from_ns, until_ns),
            Class::Memory => self.memory.add(from_ns, until_ns),
            Class::Host => {}
        }
    }

    /// How the time is divided, and when anything ran: ascending and disjoint.
    #[must_use]
    pub fn finish(self) -> (Breakdown, Vec<(u64, u64)>) {
        let (compute, communication) = (self.compute.finish(), self.communication.finish());
        let mut all = Union { is_sorted_apart: true, ..Union::default() };
        all.intervals = [&compute[..], &communication, &self.memory.finish()].concat();
        let all = all.finish();
        let us = |ns: u64| ns as f64 / 1e3;
        let kernel_ns = match (all.first(), all.last()) {
            (Some(first), Some(last)) => last.1 - first.0,
            _ => 0,
        };
        let (busy_ns, compute_ns, communication_ns) = (length(&all), length(&compute), length(&communication));
        let overlap_ns = shared(&compute, &communication);
        let breakdown = Breakdown {
            kernel_time_us: us(kernel_ns),
            idle_time_us: us(kernel_ns - busy_ns),
            compute_time_us: us(compute_ns),
            non_compute_time_us: us(busy_ns - compute_ns),
            communication_time_us: us(communication_ns),
            overlap_percent: if communication_ns == 0 {
                0.0
            } else {
                100.0 * overlap_ns as f64 / communication_ns as f64
            },
        };
        (breakdown, all)
    }
}

/// Ascending, disjoint intervals, and one more from a moment on: it never ends, but is known until
/// another moment only.
#[must_use]
pub fn with_endless(intervals: &[(u64, u64)], from_ns: u64, until_ns: u64) -> Vec<(u64, u64)> {
    let until_ns = intervals.last().map_or(until_ns, |(_, last)| until_ns.max(*last)).max(from_ns);
    let before =
        intervals.iter().filter(|(from, _)| *from < from_ns).map(|(from, until)| (*from, (*until).min(from_ns)));
    before.chain([(from_ns, until_ns)]).collect()
}

/// The share of each step of time that ascending, disjoint intervals cover: from when on it has a
/// value, and the value in percent. The steps begin at multiples of `step_ns`. The last value is 0.
#[must_use]
pub fn covered(intervals: &[(u64, u64)], step_ns: u64) -> Vec<(u64, u64)> {
    let mut values: Vec<(u64, u64)> = Vec::new();
    let mut push = |step: u64, busy: u64| {
        let percent = (u128::from(busy) * 100 + u128::from(step_ns) / 2) / u128::from(step_ns);
        if values.last().is_none_or(|(_, last)| u128::from(*last) != percent) {
            values.push((step.saturating_mul(step_ns), percent as u64));
        }
    };
    // The last step that something ran in, and for how long.
    let mut open: Option<(u64, u64)> = None;
    for (from, until) in intervals.iter().filter(|(from, until)| from < until) {
        let (first, last) = (from / step_ns, (until - 1) / step_ns);
        if let Some((step, busy)) = open.filter(|(step, _)| *step != first) {
            push(step, busy);
            if step + 1 < first {
                push(step + 1, 0);
            }
        }
        let before = open.map_or(0, |(step, busy)| if step == first { busy } else { 0 });
        open = Some(if first == last {
            (first, before + until - from)
        } else {
            push(first, before + step_ns - from % step_ns);
            // A long interval has one value for all the steps that it covers.
            if first + 1 < last {
                push(first + 1, step_ns);
            }
            (last, until - last * step_ns)
        });
    }
    if let Some((step, busy)) = open {
        push(step, busy);
        push(step + 1, 0);
    }
    values
}

/// Names of the counters of a rank.
pub const BUSY: &str = "GPU busy";
/// See [`BUSY`].
pub const MEMORY: &str = "allocated memory";
/// Time between two values of the counter of the busy device.
const COUNTER_STEP_NS: u64 = 100_000_000;

/// How busy the device of a rank was, in percent. `busy` is when an operation ran that has
/// completed. A pending one that has started keeps the device busy. All times are of the trace.
#[must_use]
pub fn busy_percent(head: &TimelineHead, map: ClockMap, busy: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let is_device = |operation: &&Operation| operation.started_ns != 0 && operation.kind() != OpKind::HostCall;
    let started = head.pending.iter().filter(is_device).map(|one| map.apply(one.started_ns)).min();
    let hung = started.map(|from| with_endless(busy, from, map.apply(head.until_ns)));
    covered(hung.as_deref().unwrap_or(busy), COUNTER_STEP_NS)
}

/// The device memory of a rank in bytes, in times of the trace.
pub fn memory(head: &TimelineHead, map: ClockMap) -> impl Iterator<Item = (u64, u64)> + '_ {
    head.memory.iter().map(move |reading| (map.apply(reading.monotonic_ns), reading.allocated_bytes))
}

/// How the time of the device of one rank is divided. The first four are those of
/// HolisticTraceAnalysis's temporal breakdown, and the last is its overlap.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Default)]
pub struct Breakdown {
    /// From the first start to the last end.
    pub kernel_time_us: f64,
    /// Nothing runs.
    pub idle_time_us: f64,
    /// A compute kernel runs.
    pub compute_time_us: f64,
    /// Only communication or memory operations run.
    pub non_compute_time_us: f64,
    /// Communication runs.
    pub communication_time_us: f64,
    /// How much of the communication runs beside computation.
    pub overlap_percent: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_divided_as_hta_divides_it() {
        let mut busy = Busy::default();
        busy.add(Class::Compute, 0, 10_000);
        busy.add(Class::Communication, 5_000, 20_000);
        busy.add(Class::Memory, 30_000, 31_000);
        // Another stream, read later.
        busy.add(Class::Compute, 2_000, 12_000);
        busy.add(Class::Compute, 38_000, 40_000);
        busy.add(Class::Compute, 36_000, 37_000);
        let (breakdown, all) = busy.finish();
        assert_eq!(breakdown.kernel_time_us, 40.0);
        assert_eq!(breakdown.idle_time_us, 40.0 - 20.0 - 1.0 - 3.0);
        assert_eq!((breakdown.compute_time_us, breakdown.non_compute_time_us), (15.0, 9.0));
        assert_eq!((breakdown.communication_time_us, breakdown.overlap_percent.round()), (15.0, 47.0));
        assert_eq!(Busy::default().finish(), (Breakdown::default(), Vec::new()));
        assert_eq!(all, [(0, 20_000), (30_000, 31_000), (36_000, 37_000), (38_000, 40_000)]);
        let shares = [(0, 100), (16_000, 50), (24_000, 13), (32_000, 38), (40_000, 0)];
        assert_eq!(covered(&all, 8_000), shares);
        let end = u64::MAX - 5;
        assert_eq!(covered(&[(4, 6), (90, end)], 8)[..4], [(0, 25), (8, 0), (88, 75), (96, 100)]);
        assert_eq!(covered(&[], 8_000), []);
        let hung = with_endless(&all, 36_500, 60_000);
        assert_eq!(hung, [(0, 20_000), (30_000, 31_000), (36_000, 36_500), (36_500, 60_000)]);
        assert_eq!(covered(&hung, 10_000)[2..], [(30_000, 50), (40_000, 100), (60_000, 0)]);
    }

    #[test]
    fn names_show_type_and_size() {
        use xpu_timer_proto::v1::Matmul;
        let collective = Operation {
            kind: OpKind::Collective.into(),
            op: Op::AllReduce.into(),
            dtype: DataType::Bfloat16.into(),
            count: 3 << 19,
            ..Default::default()
        };
        assert_eq!(Meaning::of(&collective, None).name, "AllReduce bf16 3 MiB");
        let product = Operation {
            kind: OpKind::Kernel.into(),
            op: Op::Matmul.into(),
            dtype: DataType::Float16.into(),
            matmul: Some(Matmul { batch: 8, m: 4096, n: 1024, k: 512, ..Default::default() }.into()),
            ..Default::default()
        };
        let meaning = Meaning::of(&product, None);
        assert_eq!((meaning.name.as_str(), meaning.class), ("matmul 8 x 4096x1024x512 fp16", Class::Compute));
        let copy = Operation {
            kind: OpKind::Kernel.into(),
            op: Op::Copy.into(),
            direction: CopyDirection::HostToDevice.into(),
            count: 1536,
            ..Default::default()
        };
        assert_eq!(Meaning::of(&copy, None).name, "memcpy HtoD 1.5 KiB");
    }
}
