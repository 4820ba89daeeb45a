//! Finds the driver for the runtime and NCCL, as the real ones do: dlopen of `libcuda.so.1`, dlsym
//! of `cuGetProcAddress_v2` on that handle, and all other functions from `cuGetProcAddress_v2`.

#![allow(unsafe_code)]

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    sync::OnceLock,
};

use crate::cuda::{CUDA_VERSION, CuError};

type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM.
pub const PER_THREAD: u64 = 2;

fn get_proc_address() -> Option<GetProcAddress> {
    static FUNCTION: OnceLock<Option<GetProcAddress>> = OnceLock::new();
    *FUNCTION.get_or_init(|| {
        // SAFETY: the names are C strings, the library is never unloaded, and the function has this
        // type in its ABI.
        unsafe {
            let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            if library.is_null() {
                return None;
            }
            let function = libc::dlsym(library, c"cuGetProcAddress_v2".as_ptr());
            (!function.is_null()).then(|| std::mem::transmute::<*mut c_void, GetProcAddress>(function))
        }
    })
}

/// The address of a driver function, by its base name; `flags` 0 or [`PER_THREAD`].
pub fn address(name: &CStr, flags: u64) -> Result<usize, CuError> {
    let function = get_proc_address().ok_or(CuError::NO_DEVICE)?;
    let (mut address, mut status) = (std::ptr::null_mut(), 0);
    // SAFETY: all pointers are to living values, and the function is the driver's.
    let code = unsafe { function(name.as_ptr(), &raw mut address, CUDA_VERSION, flags, &raw mut status) };
    if code != 0 || address.is_null() { Err(CuError::NOT_FOUND) } else { Ok(address as usize) }
}

/// Declares a table of driver functions, which is `load`ed at once: `table! { Name: fn field =
/// c"cuName"(types); … }`.
#[macro_export]
macro_rules! driver_table {
    ($(#[$meta:meta])* $table:ident { $($field:ident = $name:literal ($($argument:ty),*);)* }) => {
        $(#[$meta])*
        pub(crate) struct $table {
            $(pub(crate) $field: extern "C" fn($($argument),*) -> i32,)*
        }

        impl $table {
            /// Gets every function of the table from the driver.
            #[allow(unsafe_code)]
            pub(crate) fn load(flags: u64) -> Result<Self, $crate::cuda::CuError> {
                Ok($table { $($field: {
                    let address = $crate::driver::address($name, flags)?;
                    // SAFETY: the driver returned the function of this name, whose ABI has these
                    // argument types.
                    unsafe { std::mem::transmute::<usize, extern "C" fn($($argument),*) -> i32>(address) }
                },)* })
            }
        }
    };
}
