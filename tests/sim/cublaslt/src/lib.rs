//! `libcublasLt.so.13` and `libcublasLt.so.12` of the simulated device: matrix products with shapes
//! in descriptors.
//!
//! The exported functions are here. Descriptors are tables of attributes; only the product
//! interprets them.

#![allow(unsafe_code, non_snake_case)]
#![allow(missing_docs, reason = "NVIDIA documents the exported functions")]

#[path = "../../cublas/src/product.rs"]
mod product;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sim_abi::{
    cuda::StreamHandle,
    ffi::{Handles, In, Out, bytes, copy},
    is_cuda_12,
};

use crate::product::{Matrix, Product, Status, Type, blas_api};

/// A descriptor of any kind: its attributes by number, each as 8 bytes.
#[derive(Default)]
struct Descriptor(Mutex<BTreeMap<i32, u64>>);

static DESCRIPTORS: Handles<Descriptor> = Handles::new();

/// Attributes of a layout.
const TYPE: i32 = 0;
const ROWS: i32 = 2;
const COLUMNS: i32 = 3;
const LEADING: i32 = 4;
const BATCH: i32 = 5;
const STRIDE: i32 = 6;
/// Attributes of a product.
const SCALE_TYPE: i32 = 1;
const TRANS_A: i32 = 3;
const TRANS_B: i32 = 4;
const EPILOGUE: i32 = 7;
const BIAS: i32 = 8;
/// Bits of an epilogue.
const RELU: u64 = 2;
const WITH_BIAS: u64 = 4;

/// The number of the only algorithm.
const ALGORITHM: u8 = 21;
/// Size of a heuristic result, in bytes.
const RESULT_BYTES: usize = 88;

impl Descriptor {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<i32, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, attribute: i32) -> u64 {
        self.lock().get(&attribute).copied().unwrap_or(0)
    }
}

fn find(descriptor: usize) -> Result<Arc<Descriptor>, Status> {
    DESCRIPTORS.get(descriptor).ok_or(Status::INVALID_VALUE)
}

fn create(place: Out<usize>, attributes: &[(i32, u64)]) -> Result<(), Status> {
    let descriptor = Descriptor(Mutex::new(attributes.iter().copied().collect()));
    Ok(place.set(DESCRIPTORS.insert(Arc::new(descriptor)))?)
}

fn destroy(descriptor: usize) -> Result<(), Status> {
    DESCRIPTORS.remove(descriptor).map(drop).ok_or(Status::INVALID_VALUE)
}

fn set(descriptor: usize, attribute: i32, value: usize, size: usize) -> Result<(), Status> {
    let descriptor = find(descriptor)?;
    if value == 0 || size == 0 || size > 8 {
        return Err(Status::INVALID_VALUE);
    }
    let mut word = [0; 8];
    word[..size].copy_from_slice(&bytes(value, size));
    descriptor.lock().insert(attribute, u64::from_le_bytes(word));
    Ok(())
}

/// Bytes of an attribute.
fn width(of_layout: bool, attribute: i32) -> usize {
    match attribute {
        ROWS | COLUMNS | LEADING | STRIDE if of_layout => 8,
        BIAS if !of_layout => 8,
        _ => 4,
    }
}

fn get(
    descriptor: usize,
    size: usize,
    value: usize,
    attribute: i32,
    room: usize,
    written: Out<usize>,
) -> Result<(), Status> {
    let word = find(descriptor)?.get(attribute);
    written.set_if_wanted(size);
    if value == 0 || room < size {
        return Err(Status::INVALID_VALUE);
    }
    copy(value, (&raw const word) as usize, size);
    Ok(())
}

blas_api! {
    fn cublasLtCreate(handle: Out<usize>) {
        create(handle, &[])
    }

    fn cublasLtDestroy(handle: usize) {
        destroy(handle)
    }

    fn cublasLtMatmulDescCreate(descriptor: Out<usize>, compute: i32, scale: i32) {
        create(descriptor, &[(0, compute as u64), (SCALE_TYPE, scale as u64)])
    }

    fn cublasLtMatmulDescDestroy(descriptor: usize) {
        destroy(descriptor)
    }

    fn cublasLtMatmulDescSetAttribute(descriptor: usize, attribute: i32, value: usize, size: usize) {
        set(descriptor, attribute, value, size)
    }

    fn cublasLtMatmulDescGetAttribute(descriptor: usize, attribute: i32, value: usize, size: usize, written: Out<usize>) {
        get(descriptor, width(false, attribute), value, attribute, size, written)
    }

    fn cublasLtMatrixLayoutCreate(layout: Out<usize>, kind: i32, rows: u64, columns: u64, leading: i64) {
        create(layout, &[(TYPE, kind as u64), (ROWS, rows), (COLUMNS, columns), (LEADING, leading as u64), (BATCH, 1)])
    }

    fn cublasLtMatrixLayoutDestroy(layout: usize) {
        destroy(layout)
    }

    fn cublasLtMatrixLayoutSetAttribute(layout: usize, attribute: i32, value: usize, size: usize) {
        set(layout, attribute, value, size)
    }

    fn cublasLtMatrixLayoutGetAttribute(layout: usize, attribute: i32, value: usize, size: usize, written: Out<usize>) {
        get(layout, width(true, attribute), value, attribute, size, written)
    }

    fn cublasLtMatmulPreferenceCreate(preference: Out<usize>) {
        create(preference, &[])
    }

    fn cublasLtMatmulPreferenceDestroy(preference: usize) {
        destroy(preference)
    }

    fn cublasLtMatmulPreferenceSetAttribute(preference: usize, attribute: i32, value: usize, size: usize) {
        set(preference, attribute, value, size)
    }

    fn cublasLtMatmulAlgoGetHeuristic(
        _handle: usize, product: usize, _a: usize, _b: usize, _c: usize, _d: usize, _preference: usize, wanted: i32,
        results: Out<[u8; RESULT_BYTES]>, count: Out<i32>
    ) {
        find(product)?;
        if wanted < 1 {
            return Err(Status::INVALID_VALUE);
        }
        // One algorithm, whose first byte is its number. It needs no workspace, and its state is
        // success.
        let mut result = [0; RESULT_BYTES];
        result[0] = ALGORITHM;
        results.set(result)?;
        Ok(count.set(1)?)
    }

    fn cublasLtMatmulAlgoConfigGetAttribute(
        algorithm: In<u8>, attribute: i32, value: usize, size: usize, written: Out<usize>
    ) {
        let number = u64::from(algorithm.get()?);
        written.set_if_wanted(4);
        if attribute != 0 || value == 0 || size < 4 {
            return Err(Status::INVALID_VALUE);
        }
        copy(value, (&raw const number) as usize, 4);
        Ok(())
    }

    fn cublasLtMatmul(
        _handle: usize, product: usize, alpha: usize, a: usize, a_layout: usize, b: usize, b_layout: usize, beta: usize,
        c: usize, c_layout: usize, d: usize, d_layout: usize, _algorithm: In<u8>, _workspace: usize, _bytes: usize,
        stream: StreamHandle
    ) {
        multiply(product, [alpha, beta], [(a, a_layout), (b, b_layout), (c, c_layout), (d, d_layout)], stream)
    }
}

fn multiply(
    product: usize,
    [alpha, beta]: [usize; 2],
    matrices: [(usize, usize); 4],
    stream: StreamHandle,
) -> Result<(), Status> {
    let product = find(product)?;
    let matrix = |(address, layout): (usize, usize)| {
        let layout = find(layout)?;
        let kind = Type::new(layout.get(TYPE) as i32)?;
        let (leading, stride) = (layout.get(LEADING) as usize, layout.get(STRIDE) as usize);
        Ok::<_, Status>((Matrix { kind, address, leading, stride }, layout))
    };
    let [a, b, c, d] = matrices.map(matrix);
    let ((a, of_a), (b, _), (c, _), (d, of_d)) = (a?, b?, c?, d?);
    let trans_a = product.get(TRANS_A) != 0;
    let (epilogue, scale) = (product.get(EPILOGUE), Type::new(product.get(SCALE_TYPE) as i32)?);
    if alpha == 0 || beta == 0 {
        return Err(Status::INVALID_VALUE);
    }
    if epilogue & !(1 | RELU | WITH_BIAS) != 0 {
        return Err(Status::NOT_SUPPORTED);
    }
    let product = Product {
        m: of_d.get(ROWS) as usize,
        n: of_d.get(COLUMNS) as usize,
        k: of_a.get(if trans_a { ROWS } else { COLUMNS }) as usize,
        batch: of_d.get(BATCH) as usize,
        trans_a,
        trans_b: product.get(TRANS_B) != 0,
        alpha: scale.load(alpha, 0),
        beta: scale.load(beta, 0),
        a,
        b,
        c,
        d,
        by_pointers: false,
        bias: if epilogue & WITH_BIAS != 0 { product.get(BIAS) as usize } else { 0 },
        relu: epilogue & RELU != 0,
    };
    product.launch(stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    if is_cuda_12("libcublasLt.so.13") { 120_900 } else { 130_200 }
}
