//! One operation, as the host passes it to a kernel, and its arithmetic on elements in memory.

use half::{bf16, f16};
use sim_abi::{
    ffi::{read, write},
    nccl::{AVG, DataType, MAX, MIN, NcclError, PROD, SUM},
};

/// The kind of operation.
#[repr(u64)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    Send,
    Recv,
}

const OPS: [Op; 7] = [Op::AllReduce, Op::Reduce, Op::Broadcast, Op::AllGather, Op::ReduceScatter, Op::Send, Op::Recv];

/// The reduction of elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Combine {
    Sum,
    Prod,
    Max,
    Min,
    Avg,
    /// A sum of the elements multiplied with this rank's factor.
    PreMulSum(f64),
}

impl Combine {
    /// The predefined operation of NCCL's number.
    pub(crate) fn new(number: u32) -> Result<Self, NcclError> {
        Ok(match number {
            SUM => Combine::Sum,
            PROD => Combine::Prod,
            MAX => Combine::Max,
            MIN => Combine::Min,
            AVG => Combine::Avg,
            _ => return Err(NcclError::INVALID_ARGUMENT),
        })
    }

    fn number(self) -> u32 {
        match self {
            Combine::Sum => 0,
            Combine::Prod => 1,
            Combine::Max => 2,
            Combine::Min => 3,
            Combine::Avg => 4,
            Combine::PreMulSum(_) => 5,
        }
    }

    /// Its name in the names of NCCL's kernels.
    fn kernel_name(self, dtype: DataType) -> &'static str {
        let float = matches!(dtype, DataType::F16 | DataType::F32 | DataType::F64 | DataType::Bf16);
        match self {
            Combine::Sum => "Sum",
            Combine::Prod => "Prod",
            Combine::Max | Combine::Min => "MinMax",
            Combine::Avg if !float => "SumPostDiv",
            Combine::Avg | Combine::PreMulSum(_) => "PreMulSum",
        }
    }
}

/// One operation of a kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Task {
    pub(crate) op: Op,
    pub(crate) dtype: DataType,
    pub(crate) combine: Combine,
    /// Elements: of the send buffer for AllGather, of the receive buffer for ReduceScatter.
    pub(crate) count: usize,
    /// The root, or the peer of a send or a receive.
    pub(crate) rank: usize,
    pub(crate) send: usize,
    pub(crate) recv: usize,
    /// The number of elements announced to its peers. It differs from `count` only with the fault
    /// `size`.
    pub(crate) announced: usize,
}

impl Task {
    /// Words of its encoded form.
    pub(crate) const WORDS: usize = 9;

    /// Encodes it for the argument buffer.
    pub(crate) fn encode(&self) -> [u64; Self::WORDS] {
        let factor = if let Combine::PreMulSum(factor) = self.combine { factor } else { 0.0 };
        [
            self.op as u64,
            self.dtype as u64,
            self.combine.number().into(),
            factor.to_bits(),
            self.count as u64,
            self.rank as u64,
            self.send as u64,
            self.recv as u64,
            self.announced as u64,
        ]
    }

    /// The task of an argument buffer that `encode` wrote.
    pub(crate) fn decode(words: &[u64]) -> Option<Self> {
        let [op, dtype, combine, factor, count, rank, send, recv, announced] = *words else { return None };
        let combine = match combine {
            5 => Combine::PreMulSum(f64::from_bits(factor)),
            number => Combine::new(number as u32).ok()?,
        };
        Some(Task {
            op: *OPS.get(op as usize)?,
            dtype: DataType::new(dtype as u32)?,
            combine,
            count: count as usize,
            rank: rank as usize,
            send: send as usize,
            recv: recv as usize,
            announced: announced as usize,
        })
    }

    /// Bytes of `count` elements.
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.dtype.width()
    }

    /// Number of bytes announced to its peers.
    pub(crate) fn announced_bytes(&self) -> usize {
        self.announced * self.dtype.width()
    }

    /// Whether it concerns one peer only.
    pub(crate) fn is_point_to_point(&self) -> bool {
        matches!(self.op, Op::Send | Op::Recv)
    }

    /// A hash of everything that the ranks must agree on: ranks that disagree do not meet.
    pub(crate) fn shape(&self) -> u32 {
        let combine = if self.reduces() { self.combine.number() } else { 0 };
        let root = if matches!(self.op, Op::Reduce | Op::Broadcast) { self.rank } else { 0 };
        let words = [self.op as u64, self.dtype as u64, combine.into(), self.announced as u64, root as u64];
        // FNV-1a; never 0, the value of a rank that has not arrived.
        let hash = words
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        hash.max(1)
    }

    /// The mangled name of the kernel that NCCL would launch for it.
    pub(crate) fn kernel_name(&self) -> String {
        let (combine, dtype) = (self.combine.kernel_name(self.dtype), self.dtype.kernel_name());
        let name = match self.op {
            Op::AllReduce => format!("ncclDevKernel_AllReduce_{combine}_{dtype}_RING_LL"),
            Op::Reduce => format!("ncclDevKernel_Reduce_{combine}_{dtype}_RING_LL"),
            Op::ReduceScatter => format!("ncclDevKernel_ReduceScatter_{combine}_{dtype}_RING_LL"),
            Op::Broadcast => "ncclDevKernel_Broadcast_RING_LL".into(),
            Op::AllGather => "ncclDevKernel_AllGather_RING_LL".into(),
            Op::Send | Op::Recv => "ncclDevKernel_SendRecv".into(),
        };
        format!("_Z{}{name}24ncclDevKernelArgsStorageILm4096EE", name.len())
    }

    fn reduces(&self) -> bool {
        matches!(self.op, Op::AllReduce | Op::Reduce | Op::ReduceScatter)
    }
}

/// An element type; computations use `Wide`.
trait Element: Copy {
    type Wide: Copy;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn combine(combine: Combine, a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn divide(wide: Self::Wide, by: usize) -> Self::Wide;
    fn scale(self, factor: f64) -> Self;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Element for $type {
            type Wide = $type;
            fn widen(self) -> Self { self }
            fn narrow(wide: Self) -> Self { wide }
            fn combine(combine: Combine, a: Self, b: Self) -> Self {
                match combine {
                    Combine::Prod => a.wrapping_mul(b),
                    Combine::Max => a.max(b),
                    Combine::Min => a.min(b),
                    Combine::Sum | Combine::Avg | Combine::PreMulSum(_) => a.wrapping_add(b),
                }
            }
            fn divide(wide: Self, by: usize) -> Self { wide / by as $type }
            fn scale(self, factor: f64) -> Self { self.wrapping_mul(factor as $type) }
        }
    )*};
}

macro_rules! floats {
    ($($type:ty, $wide:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Element for $type {
            type Wide = $wide;
            fn widen(self) -> $wide { $widen(self) }
            fn narrow(wide: $wide) -> Self { $narrow(wide) }
            fn combine(combine: Combine, a: $wide, b: $wide) -> $wide {
                match combine {
                    Combine::Prod => a * b,
                    Combine::Max => a.max(b),
                    Combine::Min => a.min(b),
                    Combine::Sum | Combine::Avg | Combine::PreMulSum(_) => a + b,
                }
            }
            fn divide(wide: $wide, by: usize) -> $wide { wide / by as $wide }
            fn scale(self, factor: f64) -> Self { Self::narrow(self.widen() * factor as $wide) }
        }
    )*};
}

integers!(i8, u8, i32, u32, i64, u64);
floats! {
    f16, f32, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::to_f32, bf16::from_f32;
    f32, f32, std::convert::identity, std::convert::identity;
    f64, f64, std::convert::identity, std::convert::identity;
}

macro_rules! by_type {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        match $dtype {
            DataType::I8 => $function::<i8>($($argument),*),
            DataType::U8 => $function::<u8>($($argument),*),
            DataType::I32 => $function::<i32>($($argument),*),
            DataType::U32 => $function::<u32>($($argument),*),
            DataType::I64 => $function::<i64>($($argument),*),
            DataType::U64 => $function::<u64>($($argument),*),
            DataType::F16 => $function::<f16>($($argument),*),
            DataType::F32 => $function::<f32>($($argument),*),
            DataType::F64 => $function::<f64>($($argument),*),
            DataType::Bf16 => $function::<bf16>($($argument),*),
            DataType::F8E4M3 | DataType::F8E5M2 => unreachable!("refused where the operation is called"),
        }
    };
}

/// Whether the library can combine elements of this type.
pub(crate) fn can_reduce(dtype: DataType) -> bool {
    !matches!(dtype, DataType::F8E4M3 | DataType::F8E5M2)
}

/// Combines the arrays at `sources`, `count` elements each, into the one at `to`.
pub(crate) fn reduce(dtype: DataType, combine: Combine, sources: &[usize], to: usize, count: usize) {
    by_type!(dtype, reduce_as(combine, sources, to, count));
}

/// Multiplies the elements at `at`, in place.
pub(crate) fn scale(dtype: DataType, factor: f64, at: usize, count: usize) {
    by_type!(dtype, scale_as(factor, at, count));
}

fn reduce_as<T: Element>(combine: Combine, sources: &[usize], to: usize, count: usize) {
    let [first, others @ ..] = sources else { return };
    for index in 0..count {
        let first = read::<T>(*first, index).widen();
        let sum = others.iter().fold(first, |sum, source| T::combine(combine, sum, read::<T>(*source, index).widen()));
        let sum = if combine == Combine::Avg { T::divide(sum, sources.len()) } else { sum };
        write(to, index, T::narrow(sum));
    }
}

fn scale_as<T: Element>(factor: f64, at: usize, count: usize) {
    for index in 0..count {
        write(at, index, read::<T>(at, index).scale(factor));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(op: Op, count: usize) -> Task {
        Task { op, dtype: DataType::F32, combine: Combine::Sum, count, rank: 0, send: 8, recv: 16, announced: count }
    }

    #[test]
    fn encoding_keeps_everything() {
        let task = Task { combine: Combine::PreMulSum(0.5), rank: 3, ..task(Op::Reduce, 7) };
        assert_eq!(format!("{:?}", Task::decode(&task.encode()).unwrap()), format!("{task:?}"));
    }

    #[test]
    fn shapes_differ_by_what_ranks_must_agree_on() {
        let base = task(Op::AllReduce, 7);
        assert_eq!(base.shape(), Task { rank: 5, send: 1, ..base }.shape());
        for other in [
            task(Op::AllGather, 7),
            task(Op::AllReduce, 8),
            Task { announced: 8, ..base },
            Task { dtype: DataType::F16, ..base },
            Task { combine: Combine::Max, ..base },
        ] {
            assert_ne!(base.shape(), other.shape());
        }
    }

    #[test]
    fn kernel_names_are_those_of_nccl() {
        let name = task(Op::AllReduce, 1).kernel_name();
        assert_eq!(name, "_Z39ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE");
    }

    fn combined<T: Copy + Default>(dtype: DataType, how: Combine, sources: &[[T; 2]]) -> [T; 2] {
        let mut to = [T::default(); 2];
        let addresses: Vec<_> = sources.iter().map(|source| source.as_ptr() as usize).collect();
        reduce(dtype, how, &addresses, to.as_mut_ptr() as usize, 2);
        to
    }

    #[test]
    fn every_operation_on_whole_and_broken_numbers() {
        let (floats, integers) = ([[1.0f32, 5.0], [3.0, -2.0]], [[1i32, 5], [3, -2]]);
        for (how, expected) in [
            (Combine::Sum, [4, 3]),
            (Combine::Prod, [3, -10]),
            (Combine::Max, [3, 5]),
            (Combine::Min, [1, -2]),
            (Combine::Avg, [2, 1]),
        ] {
            assert_eq!(combined(DataType::I32, how, &integers), expected);
            let expected = if how == Combine::Avg { [2.0, 1.5] } else { expected.map(|value| value as f32) };
            assert_eq!(combined(DataType::F32, how, &floats), expected);
        }
    }

    #[test]
    fn half_precision_is_computed_in_single() {
        // 2048 + 1 + 1 would stay 2048 if every step were rounded to half precision.
        let values = [[2048.0, 0.5], [1.0, 0.25], [1.0, 0.25]].map(|pair| pair.map(f16::from_f32));
        assert_eq!(combined(DataType::F16, Combine::Sum, &values).map(f16::to_f32), [2050.0, 1.0]);
        let values = [[1.5, 2.0], [2.5, -1.0]].map(|pair| pair.map(bf16::from_f32));
        assert_eq!(combined(DataType::Bf16, Combine::Prod, &values).map(bf16::to_f32), [3.75, -2.0]);
    }
}
