//! A matrix product in the argument buffer of a kernel, and its computation. Column-major, as in
//! BLAS. And the frame of the exported functions of cuBLAS and cuBLASLt.

#![deny(unsafe_code)]

use std::hint::black_box;

use half::{bf16, f16};
use sim_abi::{
    cuda::{CuError, HostKernels, StreamHandle},
    ffi::{read, write},
    trace,
};

/// Defines exported functions whose bodies are `Result<(), Status>`.
macro_rules! blas_api {
    ($(fn $name:ident ($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments)]
        pub extern "C" fn $name($($argument: $type),*) -> i32 {
            $crate::product::call(stringify!($name), || $body)
        }
    )*};
}
pub(crate) use blas_api;

/// The frame of an exported function.
#[inline]
pub fn call(name: &str, body: impl FnOnce() -> Result<(), Status>) -> i32 {
    let code = body().map_or_else(|status| status.0, |()| 0);
    trace::returned(name, code);
    // Keeps the caller's frame on the stack: a tail call would hide the function in which a thread
    // blocks.
    black_box(code)
}

/// cublasStatus_t other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status(pub i32);

impl Status {
    /// CUBLAS_STATUS_INVALID_VALUE.
    pub const INVALID_VALUE: Status = Status(7);
    /// CUBLAS_STATUS_EXECUTION_FAILED.
    pub const EXECUTION_FAILED: Status = Status(13);
    /// CUBLAS_STATUS_NOT_SUPPORTED.
    pub const NOT_SUPPORTED: Status = Status(15);
}

impl From<CuError> for Status {
    fn from(_: CuError) -> Self {
        Status::EXECUTION_FAILED
    }
}

impl From<sim_abi::ffi::NullPointer> for Status {
    fn from(_: sim_abi::ffi::NullPointer) -> Self {
        Status::INVALID_VALUE
    }
}

/// The supported real types of cudaDataType.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    F32 = 0,
    F64 = 1,
    F16 = 2,
    I8 = 3,
    I32 = 10,
    Bf16 = 14,
}

impl Type {
    const ALL: [Type; 6] = [Type::F32, Type::F64, Type::F16, Type::I8, Type::I32, Type::Bf16];

    /// The type of cudaDataType's number.
    pub fn new(number: i32) -> Result<Self, Status> {
        Self::ALL.into_iter().find(|known| *known as i32 == number).ok_or(Status::NOT_SUPPORTED)
    }

    fn letter(self) -> &'static str {
        match self {
            Type::F32 => "f32",
            Type::F64 => "f64",
            Type::F16 => "f16",
            Type::I8 => "s8",
            Type::I32 => "s32",
            Type::Bf16 => "bf16",
        }
    }

    /// Bytes of an element.
    pub fn width(self) -> usize {
        match self {
            Type::I8 => 1,
            Type::F16 | Type::Bf16 => 2,
            Type::F32 | Type::I32 => 4,
            Type::F64 => 8,
        }
    }

    /// An element of an array at an address.
    pub fn load(self, address: usize, index: usize) -> f64 {
        match self {
            Type::F32 => f64::from(read::<f32>(address, index)),
            Type::F64 => read(address, index),
            Type::F16 => read::<f16>(address, index).to_f64(),
            Type::I8 => f64::from(read::<i8>(address, index)),
            Type::I32 => f64::from(read::<i32>(address, index)),
            Type::Bf16 => read::<bf16>(address, index).to_f64(),
        }
    }

    fn store(self, address: usize, index: usize, value: f64) {
        match self {
            Type::F32 => write(address, index, value as f32),
            Type::F64 => write(address, index, value),
            Type::F16 => write(address, index, f16::from_f64(value)),
            Type::I8 => write(address, index, value as i8),
            Type::I32 => write(address, index, value as i32),
            Type::Bf16 => write(address, index, bf16::from_f64(value)),
        }
    }
}

/// A matrix, or a batch of them.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    pub kind: Type,
    pub address: usize,
    /// Elements from one column to the next.
    pub leading: usize,
    /// Elements from one matrix to the next.
    pub stride: usize,
}

/// D = alpha op(A) op(B) + beta C, and cuBLASLt's operations on the result.
#[derive(Debug, Clone, Copy)]
pub struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub batch: usize,
    pub trans_a: bool,
    pub trans_b: bool,
    pub alpha: f64,
    pub beta: f64,
    pub a: Matrix,
    pub b: Matrix,
    pub c: Matrix,
    pub d: Matrix,
    /// The addresses are those of arrays of addresses.
    pub by_pointers: bool,
    /// Address of a vector of m elements of D's type, which is added to every column; 0 for none.
    pub bias: usize,
    /// Negative results become 0.
    pub relu: bool,
}

/// A product with more multiplications only launches a kernel, which does not change D.
const MOST_MULTIPLICATIONS: usize = 1 << 18;

static KERNELS: HostKernels = HostKernels::new(run);

/// Number of words of a product in an argument buffer.
const WORDS: usize = 28;

impl Product {
    /// Launches its kernel.
    pub fn launch(&self, stream: StreamHandle) -> Result<(), Status> {
        if self.m == 0 || self.n == 0 || self.batch == 0 {
            return Ok(());
        }
        let transposed = |is: bool| if is { "t" } else { "n" };
        let name = format!(
            "sim_gemm_{}{}_{}_{}{}",
            self.a.kind.letter(),
            self.b.kind.letter(),
            self.d.kind.letter(),
            transposed(self.trans_a),
            transposed(self.trans_b)
        );
        Ok(KERNELS.launch(&name, stream, &self.encode())?)
    }

    fn encode(&self) -> [u64; WORDS] {
        let matrix =
            |matrix: Matrix| [matrix.kind as u64, matrix.address as u64, matrix.leading as u64, matrix.stride as u64];
        let mut words = [0; WORDS];
        let head = [self.m, self.n, self.k, self.batch, self.bias].map(|size| size as u64);
        let flags = [self.trans_a, self.trans_b, self.by_pointers, self.relu].map(u64::from);
        let scales = [self.alpha, self.beta].map(f64::to_bits);
        let matrices = [self.a, self.b, self.c, self.d].map(matrix);
        let all = head.into_iter().chain(flags).chain(scales).chain(matrices.into_iter().flatten());
        words.iter_mut().zip(all).for_each(|(place, word)| *place = word);
        words
    }

    fn decode(words: &[u64]) -> Option<Self> {
        let matrix = |at: usize| {
            let [kind, address, leading, stride] = *words.get(at..at + 4)?.first_chunk()?;
            let kind = Type::new(kind as i32).ok()?;
            Some(Matrix { kind, address: address as usize, leading: leading as usize, stride: stride as usize })
        };
        let size = |at: usize| words.get(at).map(|word| *word as usize);
        let flag = |at: usize| words.get(at).map(|word| *word != 0);
        let scale = |at: usize| words.get(at).map(|word| f64::from_bits(*word));
        Some(Product {
            m: size(0)?,
            n: size(1)?,
            k: size(2)?,
            batch: size(3)?,
            bias: size(4)?,
            trans_a: flag(5)?,
            trans_b: flag(6)?,
            by_pointers: flag(7)?,
            relu: flag(8)?,
            alpha: scale(9)?,
            beta: scale(10)?,
            a: matrix(11)?,
            b: matrix(15)?,
            c: matrix(19)?,
            d: matrix(23)?,
        })
    }

    fn compute(&self) {
        if self.m.saturating_mul(self.n).saturating_mul(self.k).saturating_mul(self.batch) > MOST_MULTIPLICATIONS {
            return;
        }
        for number in 0..self.batch {
            let at = |matrix: Matrix| match self.by_pointers {
                true => read::<usize>(matrix.address, number),
                false => matrix.address + number * matrix.stride * matrix.kind.width(),
            };
            let [a, b, c, d] = [self.a, self.b, self.c, self.d].map(at);
            let place = |row: usize, column: usize, leading: usize| row + column * leading;
            for column in 0..self.n {
                for row in 0..self.m {
                    let sum: f64 = (0..self.k)
                        .map(|inner| {
                            let of_a = if self.trans_a { (inner, row) } else { (row, inner) };
                            let of_b = if self.trans_b { (column, inner) } else { (inner, column) };
                            self.a.kind.load(a, place(of_a.0, of_a.1, self.a.leading))
                                * self.b.kind.load(b, place(of_b.0, of_b.1, self.b.leading))
                        })
                        .sum();
                    let mut value = self.alpha * sum;
                    // With beta 0, C is not read; it may be uninitialized.
                    if self.beta != 0.0 {
                        value += self.beta * self.c.kind.load(c, place(row, column, self.c.leading));
                    }
                    if self.bias != 0 {
                        value += self.d.kind.load(self.bias, row);
                    }
                    let value = if self.relu { value.max(0.0) } else { value };
                    self.d.kind.store(d, place(row, column, self.d.leading), value);
                }
            }
        }
    }
}

extern "C" fn run(arguments: usize, bytes: usize) {
    let words: Vec<u64> = (0..bytes / size_of::<u64>()).map(|index| read(arguments, index)).collect();
    if let Some(product) = Product::decode(&words) {
        product.compute();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transposed_batch_in_half_precision_is_right() {
        // Two products of a transposed 2 x 3 with a 3 x 2 matrix, plus half of the previous result.
        let a: Vec<f16> = (0..12).map(|value| f16::from_f64(f64::from(value))).collect();
        let b: Vec<f16> = (0..12).map(|value| f16::from_f64(f64::from(value % 5))).collect();
        let mut d: Vec<f32> = vec![2.0; 8];
        let matrix = |kind, address, leading, stride| Matrix { kind, address, leading, stride };
        let out = matrix(Type::F32, d.as_mut_ptr() as usize, 2, 4);
        let product = Product {
            m: 2,
            n: 2,
            k: 3,
            batch: 2,
            trans_a: true,
            trans_b: false,
            alpha: 1.0,
            beta: 0.5,
            a: matrix(Type::F16, a.as_ptr() as usize, 3, 6),
            b: matrix(Type::F16, b.as_ptr() as usize, 3, 6),
            c: out,
            d: out,
            by_pointers: false,
            bias: 0,
            relu: false,
        };
        let decoded = Product::decode(&product.encode()).unwrap();
        assert_eq!(format!("{decoded:?}"), format!("{product:?}"));
        decoded.compute();
        assert_eq!(d, expected(&a, &b));
    }

    /// The expected sums, computed by index.
    fn expected(a: &[f16], b: &[f16]) -> Vec<f32> {
        let mut all = Vec::new();
        for batch in 0..2 {
            for column in 0..2 {
                for row in 0..2 {
                    let term = |k: usize| a[batch * 6 + row * 3 + k].to_f32() * b[batch * 6 + column * 3 + k].to_f32();
                    all.push((0..3).map(term).sum::<f32>() + 1.0);
                }
            }
        }
        all
    }
}
