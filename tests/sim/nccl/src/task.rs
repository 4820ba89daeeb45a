//! One operation, as the host passes it to a kernel.

use sim_abi::nccl::{AVG, DataType, MAX, MIN, NcclError, PROD, SUM};

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
}
