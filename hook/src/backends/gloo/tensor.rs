//! Element count and type of a tensor, through PyTorch's stable C interface (from 2.1 on). Older
//! versions do not provide them.

use std::ffi::{CStr, c_int};

use xpu_timer_proto::v1::DataType;

use crate::runtime::{abi::Word, linker::function::Function};

/// How an argument contains the tensor that determines the size of an operation.
#[derive(Debug, Clone, Copy)]
pub enum Tensors {
    /// It does not, or it differs between ranks.
    None,
    /// `at::Tensor&`.
    One(Word),
    /// `std::vector<at::Tensor>&`; the first tensor counts.
    Many(Word),
}

/// `c10::ScalarType` by number.
const TYPES: [(c_int, DataType); 13] = [
    (0, DataType::Uint8),
    (1, DataType::Int8),
    (3, DataType::Int32),
    (4, DataType::Int64),
    (5, DataType::Float16),
    (6, DataType::Float32),
    (7, DataType::Float64),
    (9, DataType::Complex64),
    (10, DataType::Complex128),
    (11, DataType::Uint8),
    (15, DataType::Bfloat16),
    (23, DataType::Float8E5m2),
    (24, DataType::Float8E4m3),
];

fn ask<T>(beside: &Function, name: &'static CStr, number: usize, tensor: Word) -> Option<T>
where
    T: Default,
{
    let getter = beside.companion(0, number, &[name])?;
    // SAFETY: aoti_torch_get_numel and aoti_torch_get_dtype have this type, with a 64-bit and a
    // 32-bit `T`. They catch exceptions.
    let getter =
        unsafe { std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn(Word, *mut T) -> c_int>(getter) };
    let mut answer = T::default();
    // SAFETY: the caller's tensor, which lives during the call, and a place for the result.
    (unsafe { getter(tensor, &mut answer) } == 0).then_some(answer)
}

/// Element count and type, zero and unspecified if unknown. The interface is looked up in the
/// library of the original of `beside`.
pub fn shape(beside: &Function, tensors: Tensors) -> (u64, DataType) {
    let tensor = match tensors {
        Tensors::None => 0,
        Tensors::One(tensor) => tensor,
        // SAFETY: the caller's vector, which begins with the addresses of its first element and of
        // its end.
        Tensors::Many(vector) if vector != 0 => unsafe {
            let [first, end] = *(vector as *const [Word; 2]);
            if first < end { first } else { 0 }
        },
        Tensors::Many(_) => 0,
    };
    // SAFETY: a tensor consists of a pointer to its implementation. Without an implementation there
    // is nothing to query.
    if tensor == 0 || unsafe { *(tensor as *const Word) } == 0 {
        return Default::default();
    }
    let count: Option<i64> = ask(beside, c"aoti_torch_get_numel", 0, tensor);
    let dtype: Option<c_int> = ask(beside, c"aoti_torch_get_dtype", 1, tensor);
    let dtype =
        TYPES.iter().find(|(number, _)| Some(*number) == dtype).map_or(DataType::Unspecified, |(_, dtype)| *dtype);
    (count.unwrap_or(0).max(0) as u64, dtype)
}
