//! Layer D: matrix products of cuBLAS and of the libraries with the same API. The driver layer
//! counts their kernels; here, one operation with the product's shape represents all kernels of a
//! call. If it is timed, two events bracket the call. The stream and the shape come from the
//! library of the product.

use std::{
    ffi::{CStr, c_int, c_void},
    sync::atomic::{AtomicU64, Ordering},
};

use xpu_timer_proto::{
    ring::detail,
    v1::{DataType, Op, OpKind},
};

use crate::{
    backends::bracket::{self, OpenOperation},
    interpose::hooked::{Site, hooked},
    runtime::{
        abi::{BLAS_NOT_INITIALIZED, Data, SUCCESS, Stream},
        linker::function::Function,
        os::{
            clock,
            thread_state::{IN_BLAS, IN_HOOK},
        },
        recorder::{MatmulShape, NewOperation, Recorder},
    },
};

/// Constant data that is only passed on.
type Const = *const c_void;

hooked! {
    library Blas, mark IN_BLAS, bypass IN_BLAS | IN_HOOK, missing BLAS_NOT_INITIALIZED;

    cublasGemmEx | hipblasGemmEx | hipblasGemmEx_v2 | mcblasGemmEx(handle: Data, ta: c_int, tb: c_int, m: c_int,
        n: c_int, k: c_int, alpha: Const, a: Const, a_type: c_int, lda: c_int, b: Const, b_type: c_int, ldb: c_int,
        beta: Const, c: Data, c_type: c_int, ldc: c_int, compute: c_int, algorithm: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, 1, ta, tb)
            .lds(lda, ldb, ldc).algorithm(algorithm));
    cublasGemmEx_64(handle: Data, ta: c_int, tb: c_int, m: i64, n: i64, k: i64, alpha: Const, a: Const, a_type: c_int,
        lda: i64, b: Const, b_type: c_int, ldb: i64, beta: Const, c: Data, c_type: c_int, ldc: i64, compute: c_int,
        algorithm: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, 1, ta, tb)
            .lds(lda, ldb, ldc).algorithm(algorithm));
    cublasGemmStridedBatchedEx | hipblasGemmStridedBatchedEx | hipblasGemmStridedBatchedEx_v2
        | mcblasGemmStridedBatchedEx(handle: Data, ta: c_int, tb: c_int, m: c_int, n: c_int, k: c_int, alpha: Const, a: Const,
        a_type: c_int, lda: c_int, a_stride: i64,
        b: Const, b_type: c_int, ldb: c_int, b_stride: i64, beta: Const, c: Data, c_type: c_int, ldc: c_int,
        c_stride: i64, batch: c_int, compute: c_int, algorithm: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, batch, ta, tb)
            .lds(lda, ldb, ldc).strides(a_stride, b_stride, c_stride).algorithm(algorithm));
    cublasGemmStridedBatchedEx_64(handle: Data, ta: c_int, tb: c_int, m: i64, n: i64, k: i64, alpha: Const, a: Const,
        a_type: c_int, lda: i64, a_stride: i64, b: Const, b_type: c_int, ldb: i64, b_stride: i64, beta: Const, c: Data,
        c_type: c_int, ldc: i64, c_stride: i64, batch: i64, compute: c_int, algorithm: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, batch, ta, tb)
            .lds(lda, ldb, ldc).strides(a_stride, b_stride, c_stride).algorithm(algorithm));
    cublasGemmBatchedEx | hipblasGemmBatchedEx | hipblasGemmBatchedEx_v2 | mcblasGemmBatchedEx(handle: Data,
        ta: c_int, tb: c_int, m: c_int, n: c_int, k: c_int, alpha: Const, a: Const, a_type: c_int, lda: c_int, b: Const, b_type: c_int,
        ldb: c_int,
        beta: Const, c: Data, c_type: c_int, ldc: c_int, batch: c_int, compute: c_int, algorithm: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, batch, ta, tb)
            .lds(lda, ldb, ldc).algorithm(algorithm));
    cublasGemmBatchedEx_64(handle: Data, ta: c_int, tb: c_int, m: i64, n: i64, k: i64, alpha: Const, a: Const,
        a_type: c_int, lda: i64, b: Const, b_type: c_int, ldb: i64, beta: Const, c: Data, c_type: c_int, ldc: i64,
        batch: i64, compute: c_int, algorithm: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, batch, ta, tb)
            .lds(lda, ldb, ldc).algorithm(algorithm));
    cublasSgemmEx | cublasCgemmEx | cublasCgemm3mEx | mcblasSgemmEx(handle: Data, ta: c_int, tb: c_int, m: c_int, n: c_int, k: c_int,
        alpha: Const,
        a: Const, a_type: c_int, lda: c_int, b: Const, b_type: c_int, ldb: c_int, beta: Const, c: Data, c_type: c_int,
        ldc: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, 1, ta, tb)
            .lds(lda, ldb, ldc));
    cublasSgemmEx_64 | cublasCgemmEx_64 | cublasCgemm3mEx_64(handle: Data, ta: c_int, tb: c_int, m: i64, n: i64, k: i64, alpha: Const,
        a: Const, a_type: c_int,
        lda: i64, b: Const, b_type: c_int, ldb: i64, beta: Const, c: Data, c_type: c_int, ldc: i64)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Type(a_type), Shape::of(m, n, k, 1, ta, tb)
            .lds(lda, ldb, ldc));

    cublasSgemm_v2 | cublasDgemm_v2 | cublasCgemm_v2 | cublasZgemm_v2 | cublasCgemm3m | cublasZgemm3m | hipblasSgemm | hipblasDgemm
        | hipblasCgemm | hipblasZgemm | mcblasSgemm | mcblasDgemm | mcblasCgemm | mcblasZgemm(handle: Data, ta: c_int,
        tb: c_int, m: c_int, n: c_int, k: c_int, alpha: Const, a: Const, lda: c_int, b: Const, ldb: c_int, beta: Const,
        c: Data, ldc: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, 1, ta, tb)
            .lds(lda, ldb, ldc));
    cublasSgemm_v2_64 | cublasDgemm_v2_64 | cublasCgemm_v2_64 | cublasZgemm_v2_64 | cublasCgemm3m_64 | cublasZgemm3m_64(handle: Data,
        ta: c_int, tb: c_int, m: i64, n: i64, k: i64, alpha: Const,
        a: Const, lda: i64, b: Const, ldb: i64, beta: Const, c: Data, ldc: i64)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, 1, ta, tb)
            .lds(lda, ldb, ldc));
    cublasHgemm | hipblasHgemm | mcblasHgemm(handle: Data, ta: c_int, tb: c_int, m: c_int, n: c_int, k: c_int,
        alpha: Const, a: Const, lda: c_int, b: Const, ldb: c_int, beta: Const, c: Data, ldc: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, 1, ta, tb)
            .lds(lda, ldb, ldc));
    cublasSgemmStridedBatched | cublasDgemmStridedBatched | cublasHgemmStridedBatched | cublasCgemmStridedBatched
        | cublasZgemmStridedBatched | cublasCgemm3mStridedBatched | hipblasCgemmStridedBatched | hipblasZgemmStridedBatched
        | mcblasCgemmStridedBatched | mcblasZgemmStridedBatched | hipblasSgemmStridedBatched
        | hipblasDgemmStridedBatched | hipblasHgemmStridedBatched | mcblasSgemmStridedBatched
        | mcblasDgemmStridedBatched | mcblasHgemmStridedBatched(handle: Data, ta: c_int, tb: c_int, m: c_int, n: c_int,
        k: c_int, alpha: Const, a: Const, lda: c_int, a_stride: i64, b: Const, ldb: c_int, b_stride: i64, beta: Const,
        c: Data, ldc: c_int, c_stride: i64, batch: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, batch, ta, tb)
            .lds(lda, ldb, ldc).strides(a_stride, b_stride, c_stride));
    cublasSgemmStridedBatched_64 | cublasDgemmStridedBatched_64 | cublasHgemmStridedBatched_64 | cublasCgemmStridedBatched_64
        | cublasZgemmStridedBatched_64 | cublasCgemm3mStridedBatched_64(handle: Data, ta: c_int,
        tb: c_int, m: i64, n: i64, k: i64, alpha: Const, a: Const, lda: i64, a_stride: i64, b: Const, ldb: i64,
        b_stride: i64, beta: Const, c: Data, ldc: i64, c_stride: i64, batch: i64)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, batch, ta, tb)
            .lds(lda, ldb, ldc).strides(a_stride, b_stride, c_stride));
    cublasSgemmBatched | cublasDgemmBatched | cublasHgemmBatched | cublasCgemmBatched | cublasZgemmBatched | cublasCgemm3mBatched
        | hipblasCgemmBatched | hipblasZgemmBatched | mcblasCgemmBatched | mcblasZgemmBatched | hipblasSgemmBatched | hipblasDgemmBatched
        | hipblasHgemmBatched | mcblasSgemmBatched | mcblasDgemmBatched | mcblasHgemmBatched(handle: Data, ta: c_int,
        tb: c_int, m: c_int, n: c_int, k: c_int, alpha: Const, a: Const, lda: c_int, b: Const, ldb: c_int, beta: Const,
        c: Data, ldc: c_int, batch: c_int)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, batch, ta, tb)
            .lds(lda, ldb, ldc));

    cublasHgemm_64(handle: Data, ta: c_int, tb: c_int, m: i64, n: i64, k: i64, alpha: Const, a: Const, lda: i64, b: Const,
        ldb: i64, beta: Const, c: Data, ldc: i64)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, 1, ta, tb)
            .lds(lda, ldb, ldc));
    cublasSgemmBatched_64 | cublasDgemmBatched_64 | cublasHgemmBatched_64 | cublasCgemmBatched_64 | cublasZgemmBatched_64
        | cublasCgemm3mBatched_64(handle: Data, ta: c_int, tb: c_int, m: i64,
        n: i64, k: i64, alpha: Const, a: Const, lda: i64, b: Const, ldb: i64, beta: Const, c: Data, ldc: i64,
        batch: i64)
        => |recorder, site| by_handle(recorder, site, handle, Elements::Letter, Shape::of(m, n, k, batch, ta, tb)
            .lds(lda, ldb, ldc));

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
        => |recorder, site| by_layout(recorder, site, what, [a_layout, b_layout, d_layout], algorithm, stream);
}

/// When not all products are timed, one is timed after each such interval. That is enough for a
/// rate, has no noticeable cost, and names a product that never ends.
const SAMPLE_NS: u64 = 20_000_000;

/// Time of the last timed product.
static SAMPLED_NS: AtomicU64 = AtomicU64::new(0);

/// Maximum number of groups of a call that are read.
const MAX_GROUPS: usize = 4096;

/// Where the element type comes from.
pub(crate) enum Elements {
    /// The number of A's type; see [`dtype_of`].
    Type(i32),
    /// The letter before `gemm` in the function's name.
    Letter,
}

/// Sizes and algorithm of a product, as the caller passed them.
#[derive(Default)]
pub(crate) struct Shape {
    /// m, n, k and batch.
    dimensions: [i64; 4],
    transposes: [i32; 2],
    lds: [i64; 3],
    strides: [i64; 3],
    algorithm: Option<i32>,
}

impl Shape {
    /// The shape of a grouped call, with `counts` products in each group: one product as large as
    /// all together. `None` when the groups differ in more than one dimension.
    pub(crate) fn of_groups<T: Copy + Into<i64>>(
        sizes: [*const T; 3],
        (counts, groups): (*const T, T),
        transposes: [*const i32; 2],
    ) -> Option<Self> {
        let groups = usize::try_from(groups.into()).ok().filter(|groups| (1..=MAX_GROUPS).contains(groups))?;
        let is_there = !counts.is_null() && sizes.iter().all(|array| !array.is_null());
        if !is_there || transposes.iter().any(|array| array.is_null()) {
            return None;
        }
        // SAFETY: the caller's arrays of that many numbers, which are valid during the call.
        let at = |array: *const T, group: usize| -> i64 { unsafe { *array.add(group) }.into() };
        let differs = |size: &usize| (1..groups).any(|group| at(sizes[*size], group) != at(sizes[*size], 0));
        let mut differing = (0..sizes.len()).filter(differs);
        let (differing, others) = (differing.next(), differing.next());
        let total = |size: usize| {
            let of_group = |group| at(counts, group).saturating_mul(differing.map_or(1, |_| at(sizes[size], group)));
            (0..groups).map(of_group).fold(0, i64::saturating_add)
        };
        let [m, n, k] = [0, 1, 2].map(|size| if differing == Some(size) { total(size) } else { at(sizes[size], 0) });
        let batch = if differing.is_some() { 1 } else { total(0) };
        // SAFETY: the caller's arrays have at least one element, because there is a group.
        let transposes = transposes.map(|array| unsafe { *array });
        others.is_none().then_some(Shape { dimensions: [m, n, k, batch], transposes, ..Shape::default() })
    }

    /// From arguments of either width.
    pub(crate) fn of<T: Into<i64>, B: Into<i64>>(m: T, n: T, k: T, batch: B, trans_a: i32, trans_b: i32) -> Self {
        let dimensions = [m.into(), n.into(), k.into(), batch.into()];
        Shape { dimensions, transposes: [trans_a, trans_b], ..Shape::default() }
    }

    /// With the leading dimensions of A, B and C.
    pub(crate) fn lds<T: Into<i64>>(self, a: T, b: T, c: T) -> Self {
        Shape { lds: [a.into(), b.into(), c.into()], ..self }
    }

    /// With the strides of A, B and C.
    pub(crate) fn strides(self, a: i64, b: i64, c: i64) -> Self {
        Shape { strides: [a, b, c], ..self }
    }

    /// With the number of the algorithm.
    pub(crate) fn algorithm(self, number: i32) -> Self {
        Shape { algorithm: Some(number), ..self }
    }

    fn cut(&self) -> MatmulShape {
        let cut = |size: i64| u32::try_from(size).unwrap_or(if size < 0 { 0 } else { u32::MAX });
        let [m, n, k, batch] = self.dimensions.map(cut);
        let [trans_a, trans_b] = self.transposes.map(transpose);
        let (lds, strides) = (self.lds.map(cut), self.strides.map(cut));
        MatmulShape { m, n, k, batch, trans_a, trans_b, lds, strides, algorithm: self.algorithm }
    }
}

/// cublasOperation_t. hipBLAS counts from 111.
fn transpose(operation: i32) -> u32 {
    const FIRST_OF_HIP: i32 = 111;
    u32::try_from(if operation >= FIRST_OF_HIP { operation - FIRST_OF_HIP } else { operation }).unwrap_or(0)
}

/// Called before a product whose stream is that of the handle. If the library cannot return the
/// stream, the shape is recorded without a duration.
#[inline(always)]
pub(crate) fn by_handle(
    recorder: &'static Recorder,
    site: Site,
    handle: Data,
    elements: Elements,
    shape: Shape,
) -> Option<OpenOperation> {
    by_groups(recorder, site, handle, elements, || Some(shape))
}

/// Like [`by_handle`], for several products in one call. The shape is computed only if it is
/// recorded. Inlined, so that a product that is not recorded costs only the question.
#[inline(always)]
pub(crate) fn by_groups(
    recorder: &'static Recorder,
    site: Site,
    handle: Data,
    elements: Elements,
    shape: impl FnOnce() -> Option<Shape>,
) -> Option<OpenOperation> {
    if is_timed(recorder) { timed(recorder, site, handle, elements, shape()) } else { None }
}

#[inline(never)]
fn timed(
    recorder: &'static Recorder,
    site: Site,
    handle: Data,
    elements: Elements,
    shape: Option<Shape>,
) -> Option<OpenOperation> {
    let stream = stream_of(site, handle);
    let dtype = match elements {
        Elements::Type(number) => dtype_of(number),
        Elements::Letter => dtype_of_name(site.function),
    };
    open(recorder, site.function, stream.map(|stream| stream as usize), dtype, shape.map(|shape| shape.cut()))
}

/// Called before a product whose shape is in descriptors. If the library cannot return their
/// content, the duration is recorded without a shape.
#[inline]
pub(crate) fn by_layout(
    recorder: &'static Recorder,
    site: Site,
    what: Data,
    layouts: [Data; 3],
    algorithm: Const,
    stream: Stream,
) -> Option<OpenOperation> {
    if !is_timed(recorder) {
        return None;
    }
    let known = LayoutFunctions::beside(site).map(|ask| described(&ask, what, layouts));
    let (shape, dtype) = known.unwrap_or((None, DataType::Unspecified));
    let shape = shape.map(|shape| MatmulShape { algorithm: algorithm_of(site, algorithm), ..shape });
    open(recorder, site.function, Some(stream as usize), dtype, shape)
}

/// The number of an algorithm that the program chose.
fn algorithm_of(site: Site, algorithm: Const) -> Option<i32> {
    /// `CUBLASLT_ALGO_CONFIG_ID`. MACA is assumed to use the same number.
    const ID: c_int = 0;
    const CONFIG: &[&CStr] = &[c"cublasLtMatmulAlgoConfigGetAttribute", c"mcblasLtMatmulAlgoConfigGetAttribute"];
    let get = site.companion(2, CONFIG)?;
    // SAFETY: the functions of these names have this type.
    let get = unsafe { std::mem::transmute::<*mut c_void, GetAttribute>(get) };
    let mut number = 0i32;
    ask(get, algorithm.cast_mut(), ID, &mut number).then_some(number)
}

/// The shape and element type in a product's descriptors, those of A, B and D.
fn described(ask: &LayoutFunctions, what: Data, [a, b, d]: [Data; 3]) -> (Option<MatmulShape>, DataType) {
    let of = ask.attributes;
    let shape = || {
        let trans_a = transpose(ask.of_product(what, of.trans_a)?);
        let trans_b = transpose(ask.of_product(what, of.trans_b)?);
        let [m, n] = [of.rows, of.columns].map(|attribute| ask.size(d, attribute));
        let k = ask.size(a, if trans_a == 0 { of.columns } else { of.rows });
        let batch = ask.number(d, of.batch).and_then(|batch| u32::try_from(batch).ok()).unwrap_or(1);
        let cut = |size: Option<u64>| size.map(|size| u32::try_from(size).unwrap_or(u32::MAX));
        let of_all = |attribute| [a, b, d].map(|layout| cut(ask.size(layout, attribute)).unwrap_or(0));
        let (lds, strides) = (of_all(of.leading), of_all(of.stride));
        Some(MatmulShape { m: cut(m)?, n: cut(n)?, k: cut(k)?, batch, trans_a, trans_b, lds, strides, algorithm: None })
    };
    (shape(), ask.number(a, of.kind).map_or(DataType::Unspecified, dtype_of))
}

/// Whether this product gets events.
#[inline]
pub(crate) fn is_timed(recorder: &Recorder) -> bool {
    let (now, last) = (clock::coarse_now_ns(), SAMPLED_NS.load(Ordering::Relaxed));
    if recorder.bracketed.is_wanted(detail::MATMULS, || now) {
        return true;
    }
    !recorder.bracketed.is_off()
        && now.saturating_sub(last) >= SAMPLE_NS
        && SAMPLED_NS.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

fn open(
    recorder: &'static Recorder,
    function: &'static Function,
    stream: Option<usize>,
    dtype: DataType,
    matmul: Option<MatmulShape>,
) -> Option<OpenOperation> {
    let function = recorder.name_key(function.text());
    let what = NewOperation { dtype, function, matmul, ..NewOperation::new(OpKind::Kernel, Op::Matmul) };
    let Some(stream) = stream else { return bracket::open_without_events(recorder, &what) };
    bracket::open_unless_captured(recorder, &NewOperation { stream, ..what })
}

/// The element type of a cudaDataType, or of hipBLAS's own numbers (from 150), which hipBLAS 3.0
/// removed. Types that collectives do not have are unspecified.
fn dtype_of(number: i32) -> DataType {
    match number {
        0 => DataType::Float32,
        1 => DataType::Float64,
        2 => DataType::Float16,
        3 => DataType::Int8,
        4 => DataType::Complex64,
        5 => DataType::Complex128,
        8 => DataType::Uint8,
        10 => DataType::Int32,
        12 => DataType::Uint32,
        14 => DataType::Bfloat16,
        24 => DataType::Int64,
        26 => DataType::Uint64,
        28 => DataType::Float8E4m3,
        29 => DataType::Float8E5m2,
        150 => DataType::Float16,
        151 => DataType::Float32,
        152 => DataType::Float64,
        154 => DataType::Complex64,
        155 => DataType::Complex128,
        160 => DataType::Int8,
        161 => DataType::Uint8,
        162 => DataType::Int32,
        163 => DataType::Uint32,
        168 => DataType::Bfloat16,
        _ => DataType::Unspecified,
    }
}

/// For example, `cublasSgemm_v2` multiplies single precision numbers.
fn dtype_of_name(function: &Function) -> DataType {
    let name = function.text();
    match name.find("gemm").and_then(|at| name.as_bytes().get(at.checked_sub(1)?)) {
        Some(b'S') => DataType::Float32,
        Some(b'D') => DataType::Float64,
        Some(b'H') => DataType::Float16,
        Some(b'C') => DataType::Complex64,
        Some(b'Z') => DataType::Complex128,
        _ => DataType::Unspecified,
    }
}

/// A family's numbers of the attributes of layouts and products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Attributes {
    /// Layout: the element type.
    pub kind: c_int,
    /// Layout: the number of rows.
    pub rows: c_int,
    /// Layout: the number of columns.
    pub columns: c_int,
    /// Layout: the leading dimension.
    pub leading: c_int,
    /// Layout: the batch count.
    pub batch: c_int,
    /// Layout: the elements from one matrix of the batch to the next.
    pub stride: c_int,
    /// Product: whether A is transposed.
    pub trans_a: c_int,
    /// Product: whether B is transposed.
    pub trans_b: c_int,
}

/// The attributes of cuBLASLt. MACA is assumed to use the same numbers; its header was not
/// available.
const CUBLAS_LT: Attributes =
    Attributes { kind: 0, rows: 2, columns: 3, leading: 4, batch: 5, stride: 6, trans_a: 3, trans_b: 4 };

/// The attributes of hipBLASLt in ROCm 6 and 7.
const HIPBLAS_LT: Attributes =
    Attributes { kind: 2, rows: 4, columns: 5, leading: 6, batch: 0, stride: 1, trans_a: 0, trans_b: 1 };

impl Attributes {
    /// The numbers of a product's family, determined by the function's name.
    fn of(function: &str) -> Self {
        if function.starts_with("hip") { HIPBLAS_LT } else { CUBLAS_LT }
    }
}

/// The stream of a handle, `None` if unknown.
#[inline]
pub(crate) fn stream_of(site: Site, handle: Data) -> Option<Stream> {
    type Get = unsafe extern "C" fn(Data, *mut Stream) -> c_int;
    const NAMES: &[&CStr] = &[c"cublasGetStream_v2", c"hipblasGetStream", c"mcblasGetStream"];
    let get = site.companion(0, NAMES)?;
    let mut stream: Stream = std::ptr::null_mut();
    // SAFETY: the function of this name in the original's library, and the handle that the host
    // passes to the original.
    let code = unsafe { std::mem::transmute::<*mut c_void, Get>(get)(handle, &mut stream) };
    (code == SUCCESS).then_some(stream)
}

/// Arguments: descriptor, attribute, buffer, size of the buffer, number of bytes written.
type GetAttribute = unsafe extern "C" fn(Data, c_int, *mut c_void, usize, *mut usize) -> c_int;

/// The functions that return the attributes of layouts and products.
pub(crate) struct LayoutFunctions {
    layout: GetAttribute,
    product: GetAttribute,
    /// The numbers to use with them.
    pub attributes: Attributes,
}

impl LayoutFunctions {
    /// The functions in the library of an original.
    pub(crate) fn beside(site: Site) -> Option<Self> {
        const LAYOUT: &[&CStr] = &[
            c"cublasLtMatrixLayoutGetAttribute",
            c"hipblasLtMatrixLayoutGetAttribute",
            c"mcblasLtMatrixLayoutGetAttribute",
        ];
        const PRODUCT: &[&CStr] =
            &[c"cublasLtMatmulDescGetAttribute", c"hipblasLtMatmulDescGetAttribute", c"mcblasLtMatmulDescGetAttribute"];
        let [layout, product] = [site.companion(0, LAYOUT)?, site.companion(1, PRODUCT)?].map(|function| {
            // SAFETY: the functions of these names have this type.
            unsafe { std::mem::transmute::<*mut c_void, GetAttribute>(function) }
        });
        Some(LayoutFunctions { layout, product, attributes: Attributes::of(site.function.text()) })
    }

    /// A 64-bit attribute of a layout.
    pub(crate) fn size(&self, layout: Data, attribute: c_int) -> Option<u64> {
        let mut size = 0u64;
        ask(self.layout, layout, attribute, &mut size).then_some(size)
    }

    /// A 32-bit attribute of a layout.
    pub(crate) fn number(&self, layout: Data, attribute: c_int) -> Option<i32> {
        let mut number = 0i32;
        ask(self.layout, layout, attribute, &mut number).then_some(number)
    }

    /// A 32-bit attribute of a product.
    pub(crate) fn of_product(&self, product: Data, attribute: c_int) -> Option<i32> {
        let mut number = 0i32;
        ask(self.product, product, attribute, &mut number).then_some(number)
    }
}

fn ask<T>(get: GetAttribute, descriptor: Data, attribute: c_int, place: &mut T) -> bool {
    if descriptor.is_null() {
        return false;
    }
    let (mut written, bytes) = (0, size_of::<T>());
    // SAFETY: the descriptor that the host passes to the product, and a buffer of the given size.
    let code = unsafe { get(descriptor, attribute, std::ptr::from_mut(place).cast(), bytes, &mut written) };
    code == SUCCESS && written == bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_letter_determines_the_type() {
        assert_eq!(dtype_of_name(&cublasSgemm_v2::FUNCTION), DataType::Float32);
        assert_eq!(dtype_of_name(&cublasDgemm_v2_64::FUNCTION), DataType::Float64);
        assert_eq!(dtype_of_name(&cublasHgemmStridedBatched::FUNCTION), DataType::Float16);
        assert_eq!(dtype_of_name(&mcblasSgemm::FUNCTION), DataType::Float32);
        assert_eq!(dtype_of_name(&cublasZgemm3m::FUNCTION), DataType::Complex128);
    }

    #[test]
    fn both_numberings_of_types_are_known() {
        let types = [DataType::Float16, DataType::Float32, DataType::Float64, DataType::Int8, DataType::Bfloat16];
        assert_eq!([2, 0, 1, 3, 14].map(dtype_of), types);
        assert_eq!([150, 151, 152, 160, 168].map(dtype_of), types);
        assert_eq!([4, 5, 154, 155].map(dtype_of), [DataType::Complex64, DataType::Complex128].repeat(2)[..]);
        assert_eq!([6, 169, 255].map(dtype_of), [DataType::Unspecified; 3], "complex half types and an unknown type");
    }

    #[test]
    fn grouped_products_have_one_total_shape() {
        let counts = [1i32, 2, 3];
        let of = |m: [i32; 3], n: [i32; 3], k: [i32; 3]| {
            let sizes = [&m, &n, &k].map(|size| size.as_ptr());
            let shape = Shape::of_groups(sizes, (counts.as_ptr(), 3), [&1, &0].map(std::ptr::from_ref))?;
            assert_eq!(shape.transposes, [1, 0]);
            Some(shape.dimensions)
        };
        assert_eq!(of([4; 3], [5; 3], [6; 3]), Some([4, 5, 6, 6]));
        assert_eq!(of([1, 10, 100], [5; 3], [6; 3]), Some([321, 5, 6, 1]));
        assert_eq!(of([4; 3], [5; 3], [7, 7, 8]), Some([4, 5, 45, 1]));
        assert_eq!(of([1, 10, 100], [5, 6, 5], [6; 3]), None);
        assert!(Shape::of_groups([std::ptr::null::<i64>(); 3], (std::ptr::null(), 3), [std::ptr::null(); 2]).is_none());
    }

    #[test]
    fn sizes_and_transposes_of_all_kinds_fit() {
        let shape = Shape::of(i64::MAX, 2, -1, 1i64, 112, 1).lds(1, 2, 3).strides(i64::MAX, 4, -1).cut();
        assert_eq!((shape.m, shape.n, shape.k, shape.batch), (u32::MAX, 2, 0, 1));
        assert_eq!((shape.lds, shape.strides, shape.algorithm), ([1, 2, 3], [u32::MAX, 4, 0], None));
        assert_eq!((shape.trans_a, shape.trans_b), (1, 1));
    }

    #[test]
    fn each_family_has_its_attribute_numbers() {
        let numbers = |function| {
            let of = Attributes::of(function);
            ([of.kind, of.rows, of.columns, of.leading, of.batch, of.stride], [of.trans_a, of.trans_b])
        };
        assert_eq!(numbers("cublasLtMatmul"), ([0, 2, 3, 4, 5, 6], [3, 4]));
        assert_eq!(numbers("hipblasLtMatmul"), ([2, 4, 5, 6, 0, 1], [0, 1]));
        assert_eq!(numbers("mcblasLtMatmul"), numbers("cublasLtMatmul"));
    }
}
