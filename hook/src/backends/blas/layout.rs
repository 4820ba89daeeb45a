//! Functions of the library whose product is called, asked for its stream and its descriptors.

use std::ffi::{CStr, c_int, c_void};

use crate::{
    interpose::hooked::Site,
    runtime::abi::{Data, SUCCESS, Stream},
};

/// How a family numbers the attributes of its layouts and products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attributes {
    /// Of a layout: the element type.
    pub kind: c_int,
    /// As above.
    pub rows: c_int,
    /// As above.
    pub columns: c_int,
    /// As above.
    pub batch: c_int,
    /// Of a product: whether A is transposed.
    pub trans_a: c_int,
    /// As above, B.
    pub trans_b: c_int,
}

/// Those of cuBLASLt. MACA's are taken to be the same; no header of it was at hand.
const CUBLAS_LT: Attributes = Attributes { kind: 0, rows: 2, columns: 3, batch: 5, trans_a: 3, trans_b: 4 };

/// Those of hipBLASLt in ROCm 6 and 7.
const HIPBLAS_LT: Attributes = Attributes { kind: 2, rows: 4, columns: 5, batch: 0, trans_a: 0, trans_b: 1 };

impl Attributes {
    /// Those of the family whose product this is, by its name.
    fn of(function: &str) -> Self {
        if function.starts_with("hip") { HIPBLAS_LT } else { CUBLAS_LT }
    }
}

/// The stream of a handle; `None` when nobody can tell.
#[inline]
pub fn stream_of(site: Site, handle: Data) -> Option<Stream> {
    type Get = unsafe extern "C" fn(Data, *mut Stream) -> c_int;
    const NAMES: &[&CStr] = &[c"cublasGetStream_v2", c"hipblasGetStream", c"mcblasGetStream"];
    let get = site.companion(0, NAMES)?;
    let mut stream: Stream = std::ptr::null_mut();
    // SAFETY: the function of this name beside the original, and the handle that the host passes to that.
    let code = unsafe { std::mem::transmute::<*mut c_void, Get>(get)(handle, &mut stream) };
    (code == SUCCESS).then_some(stream)
}

/// (descriptor, attribute, place, its bytes, bytes written*)
type GetAttribute = unsafe extern "C" fn(Data, c_int, *mut c_void, usize, *mut usize) -> c_int;

/// The functions that tell a layout's and a product's attributes.
pub struct LayoutFunctions {
    layout: GetAttribute,
    product: GetAttribute,
    /// What they are asked by.
    pub attributes: Attributes,
}

impl LayoutFunctions {
    /// Those beside an original.
    pub fn beside(site: Site) -> Option<Self> {
        const LAYOUT: &[&CStr] = &[
            c"cublasLtMatrixLayoutGetAttribute",
            c"hipblasLtMatrixLayoutGetAttribute",
            c"mcblasLtMatrixLayoutGetAttribute",
        ];
        const PRODUCT: &[&CStr] =
            &[c"cublasLtMatmulDescGetAttribute", c"hipblasLtMatmulDescGetAttribute", c"mcblasLtMatmulDescGetAttribute"];
        let [layout, product] = [site.companion(0, LAYOUT)?, site.companion(1, PRODUCT)?].map(|function| {
            // SAFETY: functions of these names have this type.
            unsafe { std::mem::transmute::<*mut c_void, GetAttribute>(function) }
        });
        Some(LayoutFunctions { layout, product, attributes: Attributes::of(site.function.text()) })
    }

    /// A 64-bit attribute of a layout.
    pub fn size(&self, layout: Data, attribute: c_int) -> Option<u64> {
        let mut size = 0u64;
        ask(self.layout, layout, attribute, &mut size).then_some(size)
    }

    /// A 32-bit attribute of a layout.
    pub fn number(&self, layout: Data, attribute: c_int) -> Option<i32> {
        let mut number = 0i32;
        ask(self.layout, layout, attribute, &mut number).then_some(number)
    }

    /// A 32-bit attribute of a product.
    pub fn of_product(&self, product: Data, attribute: c_int) -> Option<i32> {
        let mut number = 0i32;
        ask(self.product, product, attribute, &mut number).then_some(number)
    }
}

fn ask<T>(get: GetAttribute, descriptor: Data, attribute: c_int, place: &mut T) -> bool {
    if descriptor.is_null() {
        return false;
    }
    let (mut written, bytes) = (0, size_of::<T>());
    // SAFETY: the descriptor that the host is passing to the product, and a place of the size that is said.
    let code = unsafe { get(descriptor, attribute, std::ptr::from_mut(place).cast(), bytes, &mut written) };
    code == SUCCESS && written == bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_family_has_its_numbers() {
        let numbers = |function| {
            let of = Attributes::of(function);
            ([of.kind, of.rows, of.columns, of.batch], [of.trans_a, of.trans_b])
        };
        assert_eq!(numbers("cublasLtMatmul"), ([0, 2, 3, 5], [3, 4]));
        assert_eq!(numbers("hipblasLtMatmul"), ([2, 4, 5, 0], [0, 1]));
        assert_eq!(numbers("mcblasLtMatmul"), numbers("cublasLtMatmul"));
    }
}
