//! How much work an operation does: bytes on the bus and floating-point operations; and the names
//! of types, operations and algorithms. Metrics and traces share them.
//!
//! Bus bandwidth uses the factors of nccl-tests, so that the value for a collective does not depend
//! on the number of ranks.

use xpu_timer_proto::{
    hook::MatmulDebugData,
    v1::{DataType, Matmul, Op, Operation},
};

/// Floating-point operations of a product: one multiplication and one addition per term; for
/// complex numbers, four of each. A grouped product has those of its members.
#[must_use]
pub fn flops(shape: &Matmul, dtype: DataType) -> f64 {
    let of_term = if matches!(dtype, DataType::Complex64 | DataType::Complex128) { 8.0 } else { 2.0 };
    // A product without a batch count is a batch of one.
    let terms =
        |batch: u32, m: u32, n: u32, k: u32| f64::from(batch.max(1)) * f64::from(m) * f64::from(n) * f64::from(k);
    let of_members = shape.members.iter().map(|of| terms(of.batch, of.m, of.n, of.k));
    of_term * of_members.fold(terms(shape.batch, shape.m, shape.n, shape.k), |sum, of| sum + of)
}

/// The transpositions of A and B, such as `NT`. `C` is a conjugate transposition.
#[must_use]
pub fn transposes(shape: &Matmul) -> String {
    let letter = |transposed: u32| ["N", "T", "C"].get(transposed as usize).copied().unwrap_or("?");
    [letter(shape.trans_a), letter(shape.trans_b)].concat()
}

/// The leading dimensions of A, B and C. `None` if they are unknown.
#[must_use]
pub fn leading_dimensions(shape: &Matmul) -> Option<[u64; 3]> {
    Some([shape.lda, shape.ldb, shape.ldc]).filter(|lds| *lds != [0; 3])
}

/// The strides of A, B and C. `None` if they are unknown, or if there are none.
#[must_use]
pub fn strides(shape: &Matmul) -> Option<[u64; 3]> {
    Some([shape.stride_a, shape.stride_b, shape.stride_c]).filter(|strides| *strides != [0; 3])
}

/// A matrix product in the original tool's format, with this name of its type.
#[must_use]
pub fn matmul_debug(operation: &Operation, shape: &Matmul, dtype: &str) -> MatmulDebugData {
    let list = |numbers: Option<[u64; 3]>| numbers.into_iter().flatten().map(|number| number as i64).collect();
    MatmulDebugData {
        shapes: vec![shape.batch.max(1), shape.m, shape.n, shape.k],
        dtype: dtype.into(),
        trans: transposes(shape),
        lds: list(leading_dimensions(shape)),
        strides: list(strides(shape)),
        algo: shape.algorithm.unwrap_or_default(),
        api: operation.function.clone(),
    }
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

/// Size of an element in bytes.
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

/// The name of an element type in metrics and traces, such as `bf16`.
#[must_use]
pub fn dtype_name(dtype: DataType) -> &'static str {
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
    // Indexes into `MODIFIERS` plus one; 0 for none.
    more: [u8; 3],
}

const ALGORITHMS: [&str; 5] = ["RING", "TREE", "COLLNET", "NVLS", "PAT"];
const MODIFIERS: [&str; 6] = ["TREE", "DIRECT", "CHAIN", "LL", "LL128", "SIMPLE"];

impl Algorithm {
    /// `RING_LL`.
    #[must_use]
    pub fn name(self) -> String {
        let more = self.more.iter().filter_map(|word| MODIFIERS.get(usize::from(*word).checked_sub(1)?));
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
        let Some(place) = place(&MODIFIERS, word) else { break };
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
    use super::*;

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
    fn a_product_has_one_multiplication_and_one_addition_per_term() {
        let shape = Matmul { batch: 0, m: 4096, n: 4096, k: 4096, ..Default::default() };
        assert_eq!(flops(&shape, DataType::Bfloat16), 137_438_953_472.0);
        assert_eq!(flops(&shape, DataType::Complex64), 4.0 * 137_438_953_472.0);
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
