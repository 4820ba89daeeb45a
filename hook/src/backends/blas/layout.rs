//! Queries the library of a product for its stream and descriptors.

use std::ffi::{CStr, c_int, c_void};

use crate::{
    interpose::hooked::Site,
    runtime::abi::{Data, SUCCESS, Stream},
};

/// A family's numbers of the attributes of layouts and products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attributes {
    /// Layout: the element type.
    pub kind: c_int,
    /// Layout: the number of rows.
    pub rows: c_int,
    /// Layout: the number of columns.
    pub columns: c_int,
    /// Layout: the batch count.
    pub batch: c_int,
    /// Product: whether A is transposed.
    pub trans_a: c_int,
    /// Product: whether B is transposed.
    pub trans_b: c_int,
}

/// Those of cuBLASLt. MACA is assumed to use the same numbers; its header was not available.
const CUBLAS_LT: Attributes = Attributes { kind: 0, rows: 2, columns: 3, batch: 5, trans_a: 3, trans_b: 4 };

/// Those of hipBLASLt in ROCm 6 and 7.
const HIPBLAS_LT: Attributes = Attributes { kind: 2, rows: 4, columns: 5, batch: 0, trans_a: 0, trans_b: 1 };

impl Attributes {
    /// The numbers of a product's family, determined by the function's name.
    fn of(function: &str) -> Self {
        if function.starts_with("hip") { HIPBLAS_LT } else { CUBLAS_LT }
    }
}

/// The stream of a handle, `None` if unknown.
#[inline]
pub fn stream_of(site: Site, handle: Data) -> Option<Stream> {
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
pub struct LayoutFunctions {
    layout: GetAttribute,
    product: GetAttribute,
    /// The numbers to use with them.
    pub attributes: Attributes,
}

impl LayoutFunctions {
    /// The functions in the library of an original.
    pub fn beside(site: Site) -> Option<Self> {
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
    // SAFETY: the descriptor that the host passes to the product, and a buffer of the given size.
    let code = unsafe { get(descriptor, attribute, std::ptr::from_mut(place).cast(), bytes, &mut written) };
    code == SUCCESS && written == bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_family_has_its_attribute_numbers() {
        let numbers = |function| {
            let of = Attributes::of(function);
            ([of.kind, of.rows, of.columns, of.batch], [of.trans_a, of.trans_b])
        };
        assert_eq!(numbers("cublasLtMatmul"), ([0, 2, 3, 5], [3, 4]));
        assert_eq!(numbers("hipblasLtMatmul"), ([2, 4, 5, 0], [0, 1]));
        assert_eq!(numbers("mcblasLtMatmul"), numbers("cublasLtMatmul"));
    }
}
