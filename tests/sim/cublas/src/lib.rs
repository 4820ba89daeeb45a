//! `libcublas.so.13` and `libcublas.so.12` of the simulated device: matrix products, computed on
//! the stream's thread.
//!
//! Like the real library, it gets the driver through `cuGetProcAddress_v2`, and each call launches
//! one kernel. It supports the precisions that training uses and rejects others. The exported
//! functions are here: handles, and the matrix products in the forms with 32-bit and with 64-bit
//! sizes.

#![allow(unsafe_code, non_snake_case)]
#![allow(missing_docs, reason = "NVIDIA documents the exported functions")]

mod product;

use std::sync::{
    Arc,
    atomic::{AtomicI32, AtomicUsize, Ordering},
};

use sim_abi::{
    ffi::{Handles, Out, Text},
    is_cuda_12,
};

use crate::product::{Matrix, Product, Status, Type, blas_api};

/// A cublasHandle_t.
#[derive(Default)]
struct Handle {
    stream: AtomicUsize,
    math_mode: AtomicI32,
    pointer_mode: AtomicI32,
}

static HANDLES: Handles<Handle> = Handles::new();

/// CUBLAS_STATUS_NOT_INITIALIZED, also for an invalid handle.
const NOT_INITIALIZED: Status = Status(1);

/// The type of alpha and beta, from cublasComputeType_t, or from cudaDataType in older calls.
fn of_scale(compute: i32) -> Type {
    match compute {
        64 | 65 => Type::F16,
        1 | 70 | 71 => Type::F64,
        10 | 72 | 73 => Type::I32,
        _ => Type::F32,
    }
}

fn find(handle: usize) -> Result<Arc<Handle>, Status> {
    HANDLES.get(handle).ok_or(NOT_INITIALIZED)
}

/// The common arguments of all forms of a product, in their order.
struct Form<S> {
    transposes: [i32; 2],
    sizes: [S; 3],
    scales: [usize; 2],
    scale: Type,
    /// Address, type, leading dimension and stride of A, B and C.
    matrices: [(usize, Type, S, i64); 3],
    batch: S,
    by_pointers: bool,
}

fn multiply<S: TryInto<usize>>(handle: usize, form: Form<S>) -> Result<(), Status> {
    let handle = find(handle)?;
    let size = |size: S| size.try_into().map_err(|_| Status::INVALID_VALUE);
    let [m, n, k] = form.sizes.map(size);
    let matrix = |(address, kind, leading, stride): (usize, Type, S, i64)| {
        let stride = usize::try_from(stride).map_err(|_| Status::INVALID_VALUE)?;
        Ok::<_, Status>(Matrix { kind, address, leading: size(leading)?, stride })
    };
    let [a, b, c] = form.matrices.map(matrix);
    let [alpha, beta] = form.scales;
    if alpha == 0 || beta == 0 || !form.transposes.iter().all(|kind| (0..3).contains(kind)) {
        return Err(Status::INVALID_VALUE);
    }
    let product = Product {
        m: m?,
        n: n?,
        k: k?,
        batch: size(form.batch)?,
        trans_a: form.transposes[0] != 0,
        trans_b: form.transposes[1] != 0,
        alpha: form.scale.load(alpha, 0),
        beta: form.scale.load(beta, 0),
        a: a?,
        b: b?,
        c: c?,
        d: c?,
        by_pointers: form.by_pointers,
        bias: 0,
        relu: false,
    };
    product.launch(handle.stream.load(Ordering::Relaxed))
}

/// Products with types as arguments, for one width of sizes.
macro_rules! typed_products {
    ($size:ty: $gemm_ex:ident, $strided:ident, $batched:ident, $sgemm_ex:ident) => {
        blas_api! {
            fn $gemm_ex(
                handle: usize, ta: i32, tb: i32, m: $size, n: $size, k: $size, alpha: usize, a: usize, a_type: i32, lda: $size,
                b: usize, b_type: i32, ldb: $size, beta: usize, c: usize, c_type: i32, ldc: $size, compute: i32, _algo: i32
            ) {
                let [at, bt, ct] = [Type::new(a_type)?, Type::new(b_type)?, Type::new(c_type)?];
                multiply(handle, Form {
                    transposes: [ta, tb], sizes: [m, n, k], scales: [alpha, beta], scale: of_scale(compute),
                    matrices: [(a, at, lda, 0), (b, bt, ldb, 0), (c, ct, ldc, 0)], batch: 1, by_pointers: false,
                })
            }

            fn $strided(
                handle: usize, ta: i32, tb: i32, m: $size, n: $size, k: $size, alpha: usize, a: usize, a_type: i32, lda: $size,
                a_stride: i64, b: usize, b_type: i32, ldb: $size, b_stride: i64, beta: usize, c: usize, c_type: i32,
                ldc: $size, c_stride: i64, batch: $size, compute: i32, _algo: i32
            ) {
                let [at, bt, ct] = [Type::new(a_type)?, Type::new(b_type)?, Type::new(c_type)?];
                multiply(handle, Form {
                    transposes: [ta, tb], sizes: [m, n, k], scales: [alpha, beta], scale: of_scale(compute),
                    matrices: [(a, at, lda, a_stride), (b, bt, ldb, b_stride), (c, ct, ldc, c_stride)], batch,
                    by_pointers: false,
                })
            }

            fn $batched(
                handle: usize, ta: i32, tb: i32, m: $size, n: $size, k: $size, alpha: usize, a: usize, a_type: i32, lda: $size,
                b: usize, b_type: i32, ldb: $size, beta: usize, c: usize, c_type: i32, ldc: $size, batch: $size,
                compute: i32, _algo: i32
            ) {
                let [at, bt, ct] = [Type::new(a_type)?, Type::new(b_type)?, Type::new(c_type)?];
                multiply(handle, Form {
                    transposes: [ta, tb], sizes: [m, n, k], scales: [alpha, beta], scale: of_scale(compute),
                    matrices: [(a, at, lda, 0), (b, bt, ldb, 0), (c, ct, ldc, 0)], batch, by_pointers: true,
                })
            }

            fn $sgemm_ex(
                handle: usize, ta: i32, tb: i32, m: $size, n: $size, k: $size, alpha: usize, a: usize, a_type: i32, lda: $size,
                b: usize, b_type: i32, ldb: $size, beta: usize, c: usize, c_type: i32, ldc: $size
            ) {
                let [at, bt, ct] = [Type::new(a_type)?, Type::new(b_type)?, Type::new(c_type)?];
                multiply(handle, Form {
                    transposes: [ta, tb], sizes: [m, n, k], scales: [alpha, beta], scale: Type::F32,
                    matrices: [(a, at, lda, 0), (b, bt, ldb, 0), (c, ct, ldc, 0)], batch: 1, by_pointers: false,
                })
            }
        }
    };
}
typed_products! { i32: cublasGemmEx, cublasGemmStridedBatchedEx, cublasGemmBatchedEx, cublasSgemmEx }
typed_products! { i64: cublasGemmEx_64, cublasGemmStridedBatchedEx_64, cublasGemmBatchedEx_64, cublasSgemmEx_64 }

/// Products with the type in their names.
macro_rules! plain_products {
    ($($size:ty, $kind:ident: $gemm:ident, $strided:ident, $batched:ident;)*) => {$(
        blas_api! {
            fn $gemm(
                handle: usize, ta: i32, tb: i32, m: $size, n: $size, k: $size, alpha: usize, a: usize, lda: $size, b: usize,
                ldb: $size, beta: usize, c: usize, ldc: $size
            ) {
                let kind = Type::$kind;
                multiply(handle, Form {
                    transposes: [ta, tb], sizes: [m, n, k], scales: [alpha, beta], scale: kind,
                    matrices: [(a, kind, lda, 0), (b, kind, ldb, 0), (c, kind, ldc, 0)], batch: 1, by_pointers: false,
                })
            }

            fn $strided(
                handle: usize, ta: i32, tb: i32, m: $size, n: $size, k: $size, alpha: usize, a: usize, lda: $size,
                a_stride: i64, b: usize, ldb: $size, b_stride: i64, beta: usize, c: usize, ldc: $size, c_stride: i64,
                batch: $size
            ) {
                let kind = Type::$kind;
                multiply(handle, Form {
                    transposes: [ta, tb], sizes: [m, n, k], scales: [alpha, beta], scale: kind,
                    matrices: [(a, kind, lda, a_stride), (b, kind, ldb, b_stride), (c, kind, ldc, c_stride)], batch,
                    by_pointers: false,
                })
            }

            fn $batched(
                handle: usize, ta: i32, tb: i32, m: $size, n: $size, k: $size, alpha: usize, a: usize, lda: $size, b: usize,
                ldb: $size, beta: usize, c: usize, ldc: $size, batch: $size
            ) {
                let kind = Type::$kind;
                multiply(handle, Form {
                    transposes: [ta, tb], sizes: [m, n, k], scales: [alpha, beta], scale: kind,
                    matrices: [(a, kind, lda, 0), (b, kind, ldb, 0), (c, kind, ldc, 0)], batch, by_pointers: true,
                })
            }
        }
    )*};
}
plain_products! {
    i32, F32: cublasSgemm_v2, cublasSgemmStridedBatched, cublasSgemmBatched;
    i32, F64: cublasDgemm_v2, cublasDgemmStridedBatched, cublasDgemmBatched;
    i32, F16: cublasHgemm, cublasHgemmStridedBatched, cublasHgemmBatched;
    i64, F32: cublasSgemm_v2_64, cublasSgemmStridedBatched_64, cublasSgemmBatched_64;
    i64, F64: cublasDgemm_v2_64, cublasDgemmStridedBatched_64, cublasDgemmBatched_64;
    i64, F16: cublasHgemm_64, cublasHgemmStridedBatched_64, cublasHgemmBatched_64;
}

blas_api! {
    fn cublasCreate_v2(handle: Out<usize>) {
        Ok(handle.set(HANDLES.insert(Arc::default()))?)
    }

    fn cublasDestroy_v2(handle: usize) {
        HANDLES.remove(handle).map(drop).ok_or(NOT_INITIALIZED)
    }

    fn cublasSetStream_v2(handle: usize, stream: usize) {
        find(handle)?.stream.store(stream, Ordering::Relaxed);
        Ok(())
    }

    fn cublasGetStream_v2(handle: usize, stream: Out<usize>) {
        Ok(stream.set(find(handle)?.stream.load(Ordering::Relaxed))?)
    }

    fn cublasSetMathMode(handle: usize, mode: i32) {
        find(handle)?.math_mode.store(mode, Ordering::Relaxed);
        Ok(())
    }

    fn cublasGetMathMode(handle: usize, mode: Out<i32>) {
        Ok(mode.set(find(handle)?.math_mode.load(Ordering::Relaxed))?)
    }

    fn cublasSetPointerMode_v2(handle: usize, mode: i32) {
        find(handle)?.pointer_mode.store(mode, Ordering::Relaxed);
        Ok(())
    }

    fn cublasGetPointerMode_v2(handle: usize, mode: Out<i32>) {
        Ok(mode.set(find(handle)?.pointer_mode.load(Ordering::Relaxed))?)
    }

    fn cublasSetWorkspace_v2(handle: usize, _workspace: usize, _bytes: usize) {
        find(handle).map(drop)
    }

    fn cublasGetVersion_v2(_handle: usize, version: Out<i32>) {
        Ok(version.set(if is_cuda_12("libcublas.so.13") { 120_900 } else { 130_200 })?)
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasGetStatusString(status: i32) -> Text {
    Text::of(match status {
        0 => c"the operation completed successfully",
        1 => c"the library was not initialized",
        7 => c"an unsupported value or parameter was passed to the function",
        13 => c"the function failed to launch on the GPU",
        15 => c"the functionality requested is not supported",
        _ => c"unknown status",
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasGetStatusName(status: i32) -> Text {
    Text::of(match status {
        0 => c"CUBLAS_STATUS_SUCCESS",
        1 => c"CUBLAS_STATUS_NOT_INITIALIZED",
        7 => c"CUBLAS_STATUS_INVALID_VALUE",
        13 => c"CUBLAS_STATUS_EXECUTION_FAILED",
        15 => c"CUBLAS_STATUS_NOT_SUPPORTED",
        _ => c"unknown status",
    })
}
