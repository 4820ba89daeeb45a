//! `libcudart.so.13` and `libcudart.so.12` of the simulated device: the runtime API, implemented
//! with the driver.
//!
//! Like the real runtime, it is not linked with the driver. It loads `libcuda.so.1` at the first
//! call, and gets all functions, in legacy and per-thread form, from `cuGetProcAddress_v2`. It
//! contains no state of the device.

#![deny(unsafe_code)]

mod driver;
mod state;

/// The exported functions.
#[allow(unsafe_code, non_snake_case)]
mod api {
    mod device;
    mod launch;
    mod stream;

    /// Defines exported functions whose bodies are `Result<(), CuError>`.
    ///
    /// The first argument, before the `;`, is the driver: the one with the legacy default stream in
    /// `fn name`, and the one with a default stream per thread in the variant that `ptsz name_ptsz`
    /// adds. The first word of the macro is the precondition: `with_context` or `without_context`.
    macro_rules! runtime_api {
        ($ready:ident: $(
            $(ptsz $ptsz:ident)? fn $name:ident ($driver:ident; $($argument:ident: $type:ty),* $(,)?) $body:block
        )*) => {
            $(runtime_api!(@define $ready legacy [$name $($ptsz)?] $driver ($($argument: $type),*) $body);)*
        };
        (@define $ready:ident $table:ident [$name:ident $($ptsz:ident)?] $driver:ident $arguments:tt $body:block) => {
            runtime_api!(@export $ready legacy $name $driver $arguments $body);
            $(runtime_api!(@export $ready per_thread $ptsz $driver $arguments $body);)?
        };
        (@export $ready:ident $table:ident $name:ident $driver:ident ($($argument:ident: $type:ty),*) $body:block) => {
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($argument: $type),*) -> i32 {
                crate::state::call(stringify!($name), || {
                    #[allow(unused_variables)]
                    let $driver = crate::api::$ready(crate::driver::$table()?)?;
                    $body
                })
            }
        };
    }
    pub(crate) use runtime_api;

    use sim_abi::{
        cuda::{CUDA_VERSION, CuError},
        is_cuda_12,
    };

    use crate::{driver::Driver, state};

    fn version() -> i32 {
        if is_cuda_12("libcudart.so.13") { 12090 } else { CUDA_VERSION }
    }

    fn with_context(driver: &'static Driver) -> Result<&'static Driver, CuError> {
        state::with_context(driver)
    }

    fn without_context(driver: &'static Driver) -> Result<&'static Driver, CuError> {
        Ok(driver)
    }
}
