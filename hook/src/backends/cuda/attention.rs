//! Flash attention: its kernels are known by their names, and the sizes are in their argument.
//!
//! The argument of the kernels of FlashAttention 2, also of those inside PyTorch, is a structure
//! that begins with three pointers, nine strides, and the numbers of heads. All its sizes are
//! checked against each other, so a structure of another version is not recognized. A batch of
//! sequences of different lengths has no common size and is not measured.

use xpu_timer_proto::v1::{DataType, Op, OpKind};

use crate::{
    backends::blas,
    runtime::{
        abi::Data,
        recorder::{MatmulShape, NewOperation, Recorder, names::AttentionKernel},
    },
};

/// Offsets in bytes of the members, for strides of 64 bits.
const HEADS: usize = 96;
const HEADS_OF_KEYS: usize = 100;
const HEADS_RATIO: usize = 104;
const BATCH: usize = 176;
const QUERIES: usize = 180;
const KEYS: usize = 184;
const HEAD_SIZE: usize = 192;
const ROUNDED_QUERIES: usize = 196;
const ROUNDED_KEYS: usize = 200;
const ROUNDED_HEAD_SIZE: usize = 204;
const OFFSETS_OF_QUERIES: usize = 224;

/// The operation of a kernel that is launched with these arguments. `None` if it is not timed, or
/// if its sizes are unknown.
pub(crate) fn timed(recorder: &Recorder, kernel: AttentionKernel, parameters: Data) -> Option<NewOperation> {
    // SAFETY: the caller's array of pointers to arguments, if there is one. These kernels have one
    // argument.
    let argument = unsafe { parameters.cast::<*const u8>().as_ref() }.copied().unwrap_or(std::ptr::null());
    let shape = shape(argument, kernel).filter(|_| blas::is_timed(recorder))?;
    let dtype = if kernel.is_bfloat16 { DataType::Bfloat16 } else { DataType::Float16 };
    Some(NewOperation { dtype, matmul: Some(shape), ..NewOperation::new(OpKind::Kernel, Op::Attention) })
}

/// The sizes in the argument. `None` if they do not fit together.
fn shape(argument: *const u8, kernel: AttentionKernel) -> Option<MatmulShape> {
    if argument.is_null() {
        return None;
    }
    // SAFETY: the argument of the caller's launch, which is a structure of several hundred bytes in
    // all versions.
    let number = |offset: usize| unsafe { argument.add(offset).cast::<i32>().read_unaligned() };
    // SAFETY: an offset inside the same structure of the launch.
    let offsets_of_queries = unsafe { argument.add(OFFSETS_OF_QUERIES).cast::<usize>().read_unaligned() };
    let rounded = |size: i32, to: i32| size.checked_add(to - 1).map(|size| size / to * to);
    let [heads, keys_heads, ratio] = [HEADS, HEADS_OF_KEYS, HEADS_RATIO].map(number);
    let [batch, queries, keys, size] = [BATCH, QUERIES, KEYS, HEAD_SIZE].map(number);
    let positive = [heads, keys_heads, ratio, batch, queries, keys, size].iter().all(|number| *number > 0);
    let fits = positive
        && keys_heads.checked_mul(ratio) == Some(heads)
        && rounded(queries, 128) == Some(number(ROUNDED_QUERIES))
        && rounded(keys, 128) == Some(number(ROUNDED_KEYS))
        && [32, 64].iter().any(|to| rounded(size, *to) == Some(number(ROUNDED_HEAD_SIZE)))
        && offsets_of_queries == 0;
    fits.then_some(MatmulShape {
        batch: (batch as u32).saturating_mul(heads as u32),
        m: queries as u32,
        n: keys as u32,
        k: size as u32,
        trans_a: u32::from(kernel.is_backward),
        ..MatmulShape::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The argument of a kernel with these values at these offsets.
    fn read(changes: &[(usize, i32)], is_backward: bool) -> Option<(u32, u32, u32, u32, u32)> {
        let mut words = [0u64; 80];
        let bytes = words.as_mut_ptr().cast::<u8>();
        let common = [
            (HEADS, 16),
            (HEADS_OF_KEYS, 4),
            (HEADS_RATIO, 4),
            (BATCH, 2),
            (QUERIES, 1000),
            (KEYS, 2048),
            (HEAD_SIZE, 80),
            (ROUNDED_QUERIES, 1024),
            (ROUNDED_KEYS, 2048),
            (ROUNDED_HEAD_SIZE, 96),
        ];
        for (offset, value) in common.iter().chain(changes) {
            // SAFETY: all offsets are inside the array.
            unsafe { bytes.add(*offset).cast::<i32>().write_unaligned(*value) };
        }
        let kernel = AttentionKernel { is_backward, is_bfloat16: true };
        shape(bytes, kernel).map(|shape| (shape.batch, shape.m, shape.n, shape.k, shape.trans_a))
    }

    #[test]
    fn the_sizes_of_an_attention_are_read_only_if_they_fit() {
        assert_eq!(read(&[], false), Some((32, 1000, 2048, 80, 0)));
        assert_eq!(read(&[(ROUNDED_HEAD_SIZE, 128)], true), Some((32, 1000, 2048, 80, 1)));
        for change in [
            (HEADS, 15),
            (HEADS_RATIO, 0),
            (BATCH, -1),
            (QUERIES, i32::MAX),
            (ROUNDED_QUERIES, 1000),
            (ROUNDED_KEYS, 2176),
            (ROUNDED_HEAD_SIZE, 80),
            // The sequences have different lengths.
            (OFFSETS_OF_QUERIES, 0x1000),
        ] {
            assert_eq!(read(&[change], false), None, "{change:?}");
        }
        assert!(shape(std::ptr::null(), AttentionKernel { is_backward: false, is_bfloat16: false }).is_none());
    }
}
