//! `libcuda.so.1` of the simulated device: the driver API on host memory and worker threads.
//!
//! The exported functions are in `api`, one file per area. They use the safe modules beside it. The
//! library implements only the documented API, and contains nothing specific to NCCL or xpu_timer.

#![deny(unsafe_code)]

mod capture;
mod context;
mod memory;
mod module;
mod process;
mod queue;
mod stream;

/// The exported functions, one file per area, the macro that defines them, and the table from which
/// `cuGetProcAddress` answers.
#[allow(unsafe_code, non_snake_case)]
mod api {
    mod device;
    mod launch;
    mod lookup;
    mod memory;
    mod stream;

    /// One exported symbol.
    pub struct Entry {
        /// Its name with suffixes: `_v2`, `_ptsz`, `_ptds`.
        pub symbol: &'static str,
        pub address: *const (),
        /// The CUDA version that introduced it, if a caller may ask for an older one.
        pub since: i32,
    }

    /// Defines exported functions whose bodies are `Result<(), CuError>`, and their table.
    ///
    /// `ptsz name_ptsz(stream)` also defines the variant for which a NULL `stream` means the
    /// thread's own default stream. It is a separate function, as in the real library. `since
    /// 11060` is the CUDA version of the function.
    macro_rules! driver_api {
        ($call:ident: $(
            $(#[$meta:meta])* $(since $since:literal)? $(ptsz $ptsz:ident($stream:ident))? fn $name:ident $arguments:tt $body:block
        )*) => {
            $(
                driver_api!(@define $call, $(#[$meta])* $name $arguments, {}, $body);
                $(driver_api!(@define $call, $ptsz $arguments, { let $stream = crate::stream::per_thread($stream); }, $body);)?
            )*

            /// The exports of this module.
            pub const ENTRIES: &[crate::api::Entry] = &[$(
                crate::api::Entry { symbol: stringify!($name), address: $name as *const (), since: 0 $(+ $since)? },
                $(crate::api::Entry { symbol: stringify!($ptsz), address: $ptsz as *const (), since: 7000 },)?
            )*];
        };
        (@define $call:ident, $(#[$meta:meta])* $name:ident ($($argument:ident: $type:ty),* $(,)?), { $($before:tt)* }, $body:block) => {
            $(#[$meta])*
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($argument: $type),*) -> i32 {
                $($before)*
                crate::process::$call(stringify!($name), || $body)
            }
        };
    }
    pub(crate) use driver_api;
}
