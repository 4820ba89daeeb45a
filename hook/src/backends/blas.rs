//! Layer D: matrix products of cuBLAS and of the libraries with the same API. The driver layer
//! counts their kernels; here, one operation with the product's shape represents all kernels of a
//! call.

#[allow(unsafe_code)]
pub(crate) mod layout;
#[allow(unsafe_code)]
pub(crate) mod product;

use std::ffi::c_int;

use crate::{
    backends::blas::product::{Elements, Shape, by_groups, by_handle, by_layout},
    interpose::hooked::hooked,
    runtime::{
        abi::{BLAS_NOT_INITIALIZED, Data, Stream},
        os::thread_state::{IN_BLAS, IN_HOOK},
    },
};

/// Constant data that is only passed on.
type Const = *const std::ffi::c_void;

hooked! {
    library Blas, mark IN_BLAS, bypass IN_BLAS | IN_HOOK, missing BLAS_NOT_INITIALIZED;

    cublasGemmEx | hipblasGemmEx | hipblasGemmEx_v2 | mcblasGemmEx(handle: Data, ta: c_int, tb: c_int, m: c_int,
        n: c_int, k: c_int, alpha: Const, a: Const, a_type: c_int, lda: c_int, b: Const, b_type: c_int, ldb: c_int,
        beta: Const, c: Data, c_type: c_int, ldc: c_int, compute: c_int, algorithm: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, 1, ta, tb));
    cublasGemmEx_64(handle: Data, ta: c_int, tb: c_int, m: i64, n: i64, k: i64, alpha: Const, a: Const, a_type: c_int,
        lda: i64, b: Const, b_type: c_int, ldb: i64, beta: Const, c: Data, c_type: c_int, ldc: i64, compute: c_int,
        algorithm: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, 1, ta, tb));
    cublasGemmStridedBatchedEx | hipblasGemmStridedBatchedEx | hipblasGemmStridedBatchedEx_v2
        | mcblasGemmStridedBatchedEx(handle: Data, ta: c_int, tb: c_int, m: c_int, n: c_int, k: c_int, alpha: Const, a: Const,
        a_type: c_int, lda: c_int, a_stride: i64,
        b: Const, b_type: c_int, ldb: c_int, b_stride: i64, beta: Const, c: Data, c_type: c_int, ldc: c_int,
        c_stride: i64, batch: c_int, compute: c_int, algorithm: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, batch, ta, tb));
    cublasGemmStridedBatchedEx_64(handle: Data, ta: c_int, tb: c_int, m: i64, n: i64, k: i64, alpha: Const, a: Const,
        a_type: c_int, lda: i64, a_stride: i64, b: Const, b_type: c_int, ldb: i64, b_stride: i64, beta: Const, c: Data,
        c_type: c_int, ldc: i64, c_stride: i64, batch: i64, compute: c_int, algorithm: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, batch, ta, tb));
    cublasGemmBatchedEx | hipblasGemmBatchedEx | hipblasGemmBatchedEx_v2 | mcblasGemmBatchedEx(handle: Data,
        ta: c_int, tb: c_int, m: c_int, n: c_int, k: c_int, alpha: Const, a: Const, a_type: c_int, lda: c_int, b: Const, b_type: c_int,
        ldb: c_int,
        beta: Const, c: Data, c_type: c_int, ldc: c_int, batch: c_int, compute: c_int, algorithm: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, batch, ta, tb));
    cublasGemmBatchedEx_64(handle: Data, ta: c_int, tb: c_int, m: i64, n: i64, k: i64, alpha: Const, a: Const,
        a_type: c_int, lda: i64, b: Const, b_type: c_int, ldb: i64, beta: Const, c: Data, c_type: c_int, ldc: i64,
        batch: i64, compute: c_int, algorithm: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, batch, ta, tb));
    cublasSgemmEx | cublasCgemmEx | cublasCgemm3mEx | mcblasSgemmEx(handle: Data, ta: c_int, tb: c_int, m: c_int, n: c_int, k: c_int,
        alpha: Const,
        a: Const, a_type: c_int, lda: c_int, b: Const, b_type: c_int, ldb: c_int, beta: Const, c: Data, c_type: c_int,
        ldc: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, 1, ta, tb));
    cublasSgemmEx_64 | cublasCgemmEx_64 | cublasCgemm3mEx_64(handle: Data, ta: c_int, tb: c_int, m: i64, n: i64, k: i64, alpha: Const,
        a: Const, a_type: c_int,
        lda: i64, b: Const, b_type: c_int, ldb: i64, beta: Const, c: Data, c_type: c_int, ldc: i64)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, 1, ta, tb));

    cublasSgemm_v2 | cublasDgemm_v2 | cublasCgemm_v2 | cublasZgemm_v2 | cublasCgemm3m | cublasZgemm3m | hipblasSgemm | hipblasDgemm
        | hipblasCgemm | hipblasZgemm | mcblasSgemm | mcblasDgemm | mcblasCgemm | mcblasZgemm(handle: Data, ta: c_int,
        tb: c_int, m: c_int, n: c_int, k: c_int, alpha: Const, a: Const, lda: c_int, b: Const, ldb: c_int, beta: Const,
        c: Data, ldc: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, 1, ta, tb));
    cublasSgemm_v2_64 | cublasDgemm_v2_64 | cublasCgemm_v2_64 | cublasZgemm_v2_64 | cublasCgemm3m_64 | cublasZgemm3m_64(handle: Data,
        ta: c_int, tb: c_int, m: i64, n: i64, k: i64, alpha: Const,
        a: Const, lda: i64, b: Const, ldb: i64, beta: Const, c: Data, ldc: i64)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, 1, ta, tb));
    cublasHgemm | hipblasHgemm | mcblasHgemm(handle: Data, ta: c_int, tb: c_int, m: c_int, n: c_int, k: c_int,
        alpha: Const, a: Const, lda: c_int, b: Const, ldb: c_int, beta: Const, c: Data, ldc: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, 1, ta, tb));
    cublasSgemmStridedBatched | cublasDgemmStridedBatched | cublasHgemmStridedBatched | cublasCgemmStridedBatched
        | cublasZgemmStridedBatched | cublasCgemm3mStridedBatched | hipblasCgemmStridedBatched | hipblasZgemmStridedBatched
        | mcblasCgemmStridedBatched | mcblasZgemmStridedBatched | hipblasSgemmStridedBatched
        | hipblasDgemmStridedBatched | hipblasHgemmStridedBatched | mcblasSgemmStridedBatched
        | mcblasDgemmStridedBatched | mcblasHgemmStridedBatched(handle: Data, ta: c_int, tb: c_int, m: c_int, n: c_int,
        k: c_int, alpha: Const, a: Const, lda: c_int, a_stride: i64, b: Const, ldb: c_int, b_stride: i64, beta: Const,
        c: Data, ldc: c_int, c_stride: i64, batch: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, batch, ta, tb));
    cublasSgemmStridedBatched_64 | cublasDgemmStridedBatched_64 | cublasHgemmStridedBatched_64 | cublasCgemmStridedBatched_64
        | cublasZgemmStridedBatched_64 | cublasCgemm3mStridedBatched_64(handle: Data, ta: c_int,
        tb: c_int, m: i64, n: i64, k: i64, alpha: Const, a: Const, lda: i64, a_stride: i64, b: Const, ldb: i64,
        b_stride: i64, beta: Const, c: Data, ldc: i64, c_stride: i64, batch: i64)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, batch, ta, tb));
    cublasSgemmBatched | cublasDgemmBatched | cublasHgemmBatched | cublasCgemmBatched | cublasZgemmBatched | cublasCgemm3mBatched
        | hipblasCgemmBatched | hipblasZgemmBatched | mcblasCgemmBatched | mcblasZgemmBatched | hipblasSgemmBatched | hipblasDgemmBatched
        | hipblasHgemmBatched | mcblasSgemmBatched | mcblasDgemmBatched | mcblasHgemmBatched(handle: Data, ta: c_int,
        tb: c_int, m: c_int, n: c_int, k: c_int, alpha: Const, a: Const, lda: c_int, b: Const, ldb: c_int, beta: Const,
        c: Data, ldc: c_int, batch: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, batch, ta, tb));

    cublasHgemm_64(handle: Data, ta: c_int, tb: c_int, m: i64, n: i64, k: i64, alpha: Const, a: Const, lda: i64, b: Const,
        ldb: i64, beta: Const, c: Data, ldc: i64)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, 1, ta, tb));
    cublasSgemmBatched_64 | cublasDgemmBatched_64 | cublasHgemmBatched_64 | cublasCgemmBatched_64 | cublasZgemmBatched_64
        | cublasCgemm3mBatched_64(handle: Data, ta: c_int, tb: c_int, m: i64,
        n: i64, k: i64, alpha: Const, a: Const, lda: i64, b: Const, ldb: i64, beta: Const, c: Data, ldc: i64,
        batch: i64)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, batch, ta, tb));

    cublasGemmGroupedBatchedEx(handle: Data, ta: *const c_int, tb: *const c_int, m: *const c_int, n: *const c_int, k: *const c_int,
        alpha: Const, a: Const, a_type: c_int, lda: Const, b: Const, b_type: c_int, ldb: Const, beta: Const, c: Const, c_type: c_int,
        ldc: Const, groups: c_int, counts: *const c_int, compute: c_int)
        => |recorder, site| by_groups(recorder, site, handle, Elements::Type(a_type), || Shape::of_groups([m, n, k], (counts, groups), [ta, tb]));
    cublasGemmGroupedBatchedEx_64(handle: Data, ta: *const c_int, tb: *const c_int, m: *const i64, n: *const i64, k: *const i64,
        alpha: Const, a: Const, a_type: c_int, lda: Const, b: Const, b_type: c_int, ldb: Const, beta: Const, c: Const, c_type: c_int,
        ldc: Const, groups: i64, counts: *const i64, compute: c_int)
        => |recorder, site| by_groups(recorder, site, handle, Elements::Type(a_type), || Shape::of_groups([m, n, k], (counts, groups), [ta, tb]));
    cublasSgemmGroupedBatched | cublasDgemmGroupedBatched(handle: Data, ta: *const c_int, tb: *const c_int, m: *const c_int,
        n: *const c_int, k: *const c_int, alpha: Const, a: Const, lda: Const, b: Const, ldb: Const, beta: Const, c: Const, ldc: Const,
        groups: c_int, counts: *const c_int)
        => |recorder, site| by_groups(recorder, site, handle, Elements::Letter, || Shape::of_groups([m, n, k], (counts, groups), [ta, tb]));
    cublasSgemmGroupedBatched_64 | cublasDgemmGroupedBatched_64(handle: Data, ta: *const c_int, tb: *const c_int, m: *const i64,
        n: *const i64, k: *const i64, alpha: Const, a: Const, lda: Const, b: Const, ldb: Const, beta: Const, c: Const, ldc: Const,
        groups: i64, counts: *const i64)
        => |recorder, site| by_groups(recorder, site, handle, Elements::Letter, || Shape::of_groups([m, n, k], (counts, groups), [ta, tb]));

    cublasLtMatmul | hipblasLtMatmul | mcblasLtMatmul(handle: Data, what: Data, alpha: Const, a: Const, a_layout: Data,
        b: Const, b_layout: Data, beta: Const, c: Const, c_layout: Data, d: Data, d_layout: Data, algorithm: Const,
        workspace: Data, workspace_bytes: usize, stream: Stream)
        => |recorder, site| by_layout(recorder, site, what, [a_layout, d_layout], stream);
}
