//! A matrix product: its shape, and two events around the call if it is timed.

use std::sync::atomic::{AtomicU64, Ordering};

use xpu_timer_proto::v1::{DataType, Op, OpKind};

use crate::{
    backends::{
        blas::layout::{self, LayoutFunctions},
        bracket::{self, OpenOperation},
    },
    interpose::hooked::Site,
    runtime::{
        abi::{Data, Stream},
        lifecycle::config::Bracket,
        linker::function::Function,
        os::clock,
        recorder::{MatmulShape, NewOperation, Recorder},
    },
};

/// When not all products are timed, one is timed after each such interval. That is enough for a
/// rate, has no noticeable cost, and names a product that never ends.
const SAMPLE_NS: u64 = 20_000_000;

/// Time of the last timed product.
static SAMPLED_NS: AtomicU64 = AtomicU64::new(0);

/// Maximum number of groups of a call that are read.
const MAX_GROUPS: usize = 4096;

/// Where the element type comes from.
pub enum Elements {
    /// The number of A's type; see [`dtype_of`].
    Type(i32),
    /// The letter before `gemm` in the function's name.
    Letter,
}

/// m, n, k, batch and transposes, as the caller passed them.
pub struct Shape {
    dimensions: [i64; 4],
    transposes: [i32; 2],
}

impl Shape {
    /// The shape of a grouped call, with `counts` products in each group: one product as large as
    /// all together. `None` when the groups differ in more than one dimension.
    pub fn of_groups<T: Copy + Into<i64>>(
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
        // SAFETY: as above.
        let transposes = transposes.map(|array| unsafe { *array });
        others.is_none().then_some(Shape { dimensions: [m, n, k, batch], transposes })
    }

    /// From arguments of either width.
    pub fn of<T: Into<i64>, B: Into<i64>>(m: T, n: T, k: T, batch: B, trans_a: i32, trans_b: i32) -> Self {
        Shape { dimensions: [m.into(), n.into(), k.into(), batch.into()], transposes: [trans_a, trans_b] }
    }

    fn cut(&self) -> MatmulShape {
        let [m, n, k, batch] =
            self.dimensions.map(|size| u32::try_from(size).unwrap_or(if size < 0 { 0 } else { u32::MAX }));
        let [trans_a, trans_b] = self.transposes.map(transpose);
        MatmulShape { m, n, k, batch, trans_a, trans_b }
    }
}

/// cublasOperation_t. hipBLAS counts from 111.
fn transpose(operation: i32) -> u32 {
    const FIRST_OF_HIP: i32 = 111;
    u32::try_from(if operation >= FIRST_OF_HIP { operation - FIRST_OF_HIP } else { operation }).unwrap_or(0)
}

/// Called before a product whose stream is that of the handle. If the library cannot return the
/// stream, the shape is recorded without a duration.
#[inline]
pub fn by_handle(
    recorder: &'static Recorder,
    site: Site,
    handle: Data,
    elements: Elements,
    shape: Shape,
) -> Option<OpenOperation> {
    by_groups(recorder, site, handle, elements, || Some(shape))
}

/// Like [`by_handle`], for several products in one call. The shape is computed only if it is
/// recorded.
#[inline]
pub fn by_groups(
    recorder: &'static Recorder,
    site: Site,
    handle: Data,
    elements: Elements,
    shape: impl FnOnce() -> Option<Shape>,
) -> Option<OpenOperation> {
    if !is_timed(recorder) {
        return None;
    }
    let stream = layout::stream_of(site, handle);
    let dtype = match elements {
        Elements::Type(number) => dtype_of(number),
        Elements::Letter => dtype_of_name(site.function),
    };
    open(recorder, site.function, stream.map(|stream| stream as usize), dtype, shape().map(|shape| shape.cut()))
}

/// Called before a product whose shape is in descriptors. If the library cannot return their
/// content, the duration is recorded without a shape.
#[inline]
pub fn by_layout(
    recorder: &'static Recorder,
    site: Site,
    what: Data,
    [a, d]: [Data; 2],
    stream: Stream,
) -> Option<OpenOperation> {
    if !is_timed(recorder) {
        return None;
    }
    let known = LayoutFunctions::beside(site).map(|ask| described(&ask, what, [a, d]));
    let (shape, dtype) = known.unwrap_or((None, DataType::Unspecified));
    open(recorder, site.function, Some(stream as usize), dtype, shape)
}

/// The shape and element type in a product's descriptors.
fn described(ask: &LayoutFunctions, what: Data, [a, d]: [Data; 2]) -> (Option<MatmulShape>, DataType) {
    let of = ask.attributes;
    let shape = || {
        let trans_a = transpose(ask.of_product(what, of.trans_a)?);
        let trans_b = transpose(ask.of_product(what, of.trans_b)?);
        let [m, n] = [of.rows, of.columns].map(|attribute| ask.size(d, attribute));
        let k = ask.size(a, if trans_a == 0 { of.columns } else { of.rows });
        let batch = ask.number(d, of.batch).and_then(|batch| u32::try_from(batch).ok()).unwrap_or(1);
        let cut = |size: Option<u64>| size.map(|size| u32::try_from(size).unwrap_or(u32::MAX));
        Some(MatmulShape { m: cut(m)?, n: cut(n)?, k: cut(k)?, batch, trans_a, trans_b })
    };
    (shape(), ask.number(a, of.kind).map_or(DataType::Unspecified, dtype_of))
}

/// Whether this product gets events.
#[inline]
fn is_timed(recorder: &Recorder) -> bool {
    let mode = recorder.bracket.load(Ordering::Relaxed);
    if mode == Bracket::All as u32 || mode == Bracket::Matmuls as u32 {
        return true;
    }
    let (now, last) = (clock::coarse_now_ns(), SAMPLED_NS.load(Ordering::Relaxed));
    mode != Bracket::None as u32
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
    if bracket::is_captured(stream) {
        return None;
    }
    bracket::open(recorder, &NewOperation { stream, ..what })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::blas::{
        cublasDgemm_v2_64, cublasHgemmStridedBatched, cublasSgemm_v2, cublasZgemm3m, mcblasSgemm,
    };

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
        assert_eq!([6, 169, 255].map(dtype_of), [DataType::Unspecified; 3], "complex halves and none");
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
        let shape = Shape::of(i64::MAX, 2, -1, 1i64, 112, 1).cut();
        assert_eq!((shape.m, shape.n, shape.k, shape.batch), (u32::MAX, 2, 0, 1));
        assert_eq!((shape.trans_a, shape.trans_b), (1, 1));
    }
}
