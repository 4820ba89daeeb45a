//! Arithmetic on elements in memory.

use half::{bf16, f16};
use sim_abi::{
    ffi::{read, write},
    nccl::DataType,
};

use crate::task::Combine;

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
pub(crate) fn supports(dtype: DataType) -> bool {
    !matches!(dtype, DataType::F8E4M3 | DataType::F8E5M2)
}

/// Combines the arrays at `sources`, `count` elements each, into the one at `to`.
pub(crate) fn combine(dtype: DataType, combine: Combine, sources: &[usize], to: usize, count: usize) {
    by_type!(dtype, combine_as(combine, sources, to, count));
}

/// Multiplies the elements at `at`, in place.
pub(crate) fn scale(dtype: DataType, factor: f64, at: usize, count: usize) {
    by_type!(dtype, scale_as(factor, at, count));
}

fn combine_as<T: Element>(combine: Combine, sources: &[usize], to: usize, count: usize) {
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

    fn combined<T: Copy + Default>(dtype: DataType, how: Combine, sources: &[[T; 2]]) -> [T; 2] {
        let mut to = [T::default(); 2];
        let addresses: Vec<_> = sources.iter().map(|source| source.as_ptr() as usize).collect();
        combine(dtype, how, &addresses, to.as_mut_ptr() as usize, 2);
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
