//! The driver: its types and codes, how the runtime, NCCL and cuBLAS find it, and how the latter
//! two launch their kernels.
//!
//! It is found as by the real libraries: dlopen of `libcuda.so.1`, dlsym of `cuGetProcAddress_v2`
//! on that handle, and all other functions from `cuGetProcAddress_v2`.

#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    sync::{Mutex, OnceLock, PoisonError},
};

use crate::ffi::{In, NullPointer, Out, Text};

/// CUdevice.
pub type Device = i32;
/// CUcontext.
pub type ContextHandle = usize;
/// CUstream; 0 is the NULL stream.
pub type StreamHandle = usize;
/// CUevent.
pub type EventHandle = usize;
/// CUmodule.
pub type ModuleHandle = usize;
/// CUfunction.
pub type FunctionHandle = usize;
/// CUgraph.
pub type GraphHandle = usize;
/// CUgraphExec.
pub type ExecHandle = usize;
/// CUdeviceptr.
pub type DevicePointer = usize;

/// The legacy default stream by its own handle.
pub const STREAM_LEGACY: StreamHandle = 1;
/// The default stream of the calling thread.
pub const STREAM_PER_THREAD: StreamHandle = 2;
/// The version that the simulated driver and runtime 13 report.
pub const CUDA_VERSION: i32 = 13020;

/// CUlaunchConfig.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LaunchConfig {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory.
    pub shared_bytes: u32,
    /// The stream.
    pub stream: StreamHandle,
    /// CUlaunchAttribute array, not interpreted.
    pub attributes: usize,
    /// Its length.
    pub attribute_count: u32,
}

/// First bytes of an image whose kernels are text: lines `kernel NAME MICROSECONDS`.
pub const TEXT_IMAGE: &[u8] = b"//xpu_sim\n";
/// First bytes of a [`HostImage`].
pub const HOST_IMAGE: [u8; 16] = *b"xpu_sim host fn\0";

/// A private image: launching a kernel of any name runs `run` on the stream with the copied `extra`
/// buffer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct HostImage {
    /// [`HOST_IMAGE`].
    pub magic: [u8; 16],
    /// Gets the address and the length of the arguments.
    pub run: extern "C" fn(usize, usize),
}

/// CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END.
pub const LAUNCH_BUFFER_POINTER: usize = 1;
/// See [`LAUNCH_BUFFER_POINTER`].
pub const LAUNCH_BUFFER_SIZE: usize = 2;
/// See [`LAUNCH_BUFFER_POINTER`].
pub const LAUNCH_END: usize = 0;

/// The argument buffer of `extra`, copied.
#[must_use]
pub fn launch_buffer(extra: In<usize>) -> Option<Box<[u8]>> {
    let (mut at, mut address, mut size) = (0, 0, 0);
    loop {
        let value = extra.at(at + 1);
        match extra.at(at).ok()? {
            LAUNCH_END => break,
            LAUNCH_BUFFER_POINTER => address = value.ok()?,
            LAUNCH_BUFFER_SIZE => size = In::<usize>::from_address(value.ok()?).get().ok()?,
            _ => return None,
        }
        at += 2;
    }
    Some(crate::ffi::bytes(address, size))
}

/// A CUresult other than CUDA_SUCCESS. The runtime's codes are the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CuError(pub i32);

impl From<NullPointer> for CuError {
    fn from(_: NullPointer) -> Self {
        CuError::INVALID_VALUE
    }
}

/// The code of a result.
#[must_use]
pub fn code(result: Result<(), CuError>) -> i32 {
    result.map_or_else(|error| error.0, |()| 0)
}

/// The result of a code.
pub fn check(code: i32) -> Result<(), CuError> {
    if code == 0 { Ok(()) } else { Err(CuError(code)) }
}

macro_rules! errors {
    ($($code:literal $name:ident $driver:literal $runtime:literal $text:literal;)*) => {
        impl CuError {
            $(#[doc = $text] pub const $name: CuError = CuError($code);)*
        }

        /// The driver's name, the runtime's name and the text of every code.
        const NAMES: &[(i32, Text, Text, Text)] = &[
            (0, Text::of(c"CUDA_SUCCESS"), Text::of(c"cudaSuccess"), Text::of(c"no error")),
            $(($code, Text::of($driver), Text::of($runtime), Text::of(errors!(@c $text)))),*
        ];
    };
    (@c $text:literal) => {
        match CStr::from_bytes_with_nul(concat!($text, "\0").as_bytes()) {
            Ok(text) => text,
            Err(_) => panic!("a text with NUL inside"),
        }
    };
}

errors! {
    1 INVALID_VALUE c"CUDA_ERROR_INVALID_VALUE" c"cudaErrorInvalidValue" "invalid argument";
    2 OUT_OF_MEMORY c"CUDA_ERROR_OUT_OF_MEMORY" c"cudaErrorMemoryAllocation" "out of memory";
    3 NOT_INITIALIZED c"CUDA_ERROR_NOT_INITIALIZED" c"cudaErrorInitializationError" "initialization error";
    4 DEINITIALIZED c"CUDA_ERROR_DEINITIALIZED" c"cudaErrorCudartUnloading" "driver shutting down";
    98 INVALID_DEVICE_FUNCTION c"CUDA_ERROR_INVALID_DEVICE_FUNCTION" c"cudaErrorInvalidDeviceFunction" "invalid device function";
    100 NO_DEVICE c"CUDA_ERROR_NO_DEVICE" c"cudaErrorNoDevice" "no CUDA-capable device is detected";
    101 INVALID_DEVICE c"CUDA_ERROR_INVALID_DEVICE" c"cudaErrorInvalidDevice" "invalid device ordinal";
    200 INVALID_IMAGE c"CUDA_ERROR_INVALID_IMAGE" c"cudaErrorInvalidKernelImage" "device kernel image is invalid";
    201 INVALID_CONTEXT c"CUDA_ERROR_INVALID_CONTEXT" c"cudaErrorDeviceUninitialized" "invalid device context";
    301 FILE_NOT_FOUND c"CUDA_ERROR_FILE_NOT_FOUND" c"cudaErrorFileNotFound" "file not found";
    400 INVALID_HANDLE c"CUDA_ERROR_INVALID_HANDLE" c"cudaErrorInvalidResourceHandle" "invalid resource handle";
    401 ILLEGAL_STATE c"CUDA_ERROR_ILLEGAL_STATE" c"cudaErrorIllegalState" "the operation cannot be performed in the present state";
    500 NOT_FOUND c"CUDA_ERROR_NOT_FOUND" c"cudaErrorSymbolNotFound" "named symbol not found";
    600 NOT_READY c"CUDA_ERROR_NOT_READY" c"cudaErrorNotReady" "device not ready";
    709 CONTEXT_IS_DESTROYED c"CUDA_ERROR_CONTEXT_IS_DESTROYED" c"cudaErrorContextIsDestroyed" "context is destroyed";
    700 ILLEGAL_ADDRESS c"CUDA_ERROR_ILLEGAL_ADDRESS" c"cudaErrorIllegalAddress" "an illegal memory access was encountered";
    704 PEER_ACCESS_ALREADY_ENABLED c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED" c"cudaErrorPeerAccessAlreadyEnabled" "peer access is already enabled";
    705 PEER_ACCESS_NOT_ENABLED c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED" c"cudaErrorPeerAccessNotEnabled" "peer access has not been enabled";
    712 ALREADY_REGISTERED c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" c"cudaErrorHostMemoryAlreadyRegistered" "part or all of the requested memory range is already mapped";
    713 NOT_REGISTERED c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED" c"cudaErrorHostMemoryNotRegistered" "pointer does not correspond to a registered memory region";
    801 NOT_SUPPORTED c"CUDA_ERROR_NOT_SUPPORTED" c"cudaErrorNotSupported" "operation not supported";
    900 CAPTURE_UNSUPPORTED c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" c"cudaErrorStreamCaptureUnsupported" "operation not permitted when stream is capturing";
    901 CAPTURE_INVALIDATED c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED" c"cudaErrorStreamCaptureInvalidated" "operation failed due to a previous error during capture";
    902 CAPTURE_MERGE c"CUDA_ERROR_STREAM_CAPTURE_MERGE" c"cudaErrorStreamCaptureMerge" "operation would result in a merge of separate capture sequences";
    903 CAPTURE_UNMATCHED c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED" c"cudaErrorStreamCaptureUnmatched" "capture was not ended in the same stream as it began";
    904 CAPTURE_UNJOINED c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED" c"cudaErrorStreamCaptureUnjoined" "capturing stream has unjoined work";
    905 CAPTURE_ISOLATION c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION" c"cudaErrorStreamCaptureIsolation" "dependency created on uncaptured work in another stream";
    906 CAPTURE_IMPLICIT c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT" c"cudaErrorStreamCaptureImplicit" "operation would make the legacy stream depend on a capturing blocking stream";
    907 CAPTURED_EVENT c"CUDA_ERROR_CAPTURED_EVENT" c"cudaErrorCapturedEvent" "operation not permitted on an event last recorded in a capturing stream";
    908 CAPTURE_WRONG_THREAD c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD" c"cudaErrorStreamCaptureWrongThread" "attempt to terminate a thread-local capture sequence from another thread";
    999 UNKNOWN c"CUDA_ERROR_UNKNOWN" c"cudaErrorUnknown" "unknown error";
}

/// The driver's name of a code.
#[must_use]
pub fn driver_name(code: i32) -> Option<Text> {
    NAMES.iter().find(|(known, ..)| *known == code).map(|row| row.1)
}

/// The runtime's name of a code.
#[must_use]
pub fn runtime_name(code: i32) -> Option<Text> {
    NAMES.iter().find(|(known, ..)| *known == code).map(|row| row.2)
}

/// The text of a code.
#[must_use]
pub fn error_text(code: i32) -> Option<Text> {
    NAMES.iter().find(|(known, ..)| *known == code).map(|row| row.3)
}

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
                    let address = $crate::cuda::address($name, flags)?;
                    // SAFETY: the driver returned the function of this name, whose ABI has these
                    // argument types.
                    unsafe { std::mem::transmute::<usize, extern "C" fn($($argument),*) -> i32>(address) }
                },)* })
            }
        }
    };
}

driver_table! {
    /// The driver functions for a launch.
    Launcher {
        init = c"cuInit" (u32);
        context_current = c"cuCtxGetCurrent" (Out<ContextHandle>);
        module_load = c"cuModuleLoadData" (Out<ModuleHandle>, In<HostImage>);
        module_function = c"cuModuleGetFunction" (Out<FunctionHandle>, ModuleHandle, Text);
        launch_ex = c"cuLaunchKernelEx" (In<LaunchConfig>, FunctionHandle, usize, In<usize>);
    }
}

fn launcher() -> Result<&'static Launcher, CuError> {
    static TABLE: OnceLock<Result<Launcher, CuError>> = OnceLock::new();
    let load = || {
        let launcher = Launcher::load(0)?;
        check((launcher.init)(0))?;
        Ok(launcher)
    };
    TABLE.get_or_init(load).as_ref().map_err(|error| *error)
}

/// The kernels of one library: functions of the host that the device runs on the stream's thread,
/// launched with `cuLaunchKernelEx`. All of them, of any name, run one function.
pub struct HostKernels {
    run: extern "C" fn(usize, usize),
    /// One module per context; there are few contexts.
    modules: Mutex<Vec<(ContextHandle, ModuleHandle)>>,
}

impl HostKernels {
    /// `run` gets the address and the length of the arguments.
    #[must_use]
    pub const fn new(run: extern "C" fn(usize, usize)) -> Self {
        HostKernels { run, modules: Mutex::new(Vec::new()) }
    }

    /// Launches the kernel `name` in the thread's context, with an argument buffer and no
    /// parameters.
    pub fn launch(&self, name: &str, stream: StreamHandle, arguments: &[u64]) -> Result<(), CuError> {
        let launcher = launcher()?;
        let mut context = 0;
        check((launcher.context_current)(Out::to(&mut context)))?;
        let (mut function, name) = (0, CString::new(name).map_err(|_| CuError::INVALID_VALUE)?);
        let module = self.module(launcher, context)?;
        check((launcher.module_function)(Out::to(&mut function), module, Text::borrowed(&name)))?;
        let bytes = size_of_val(arguments);
        let extra = [
            LAUNCH_BUFFER_POINTER,
            arguments.as_ptr() as usize,
            LAUNCH_BUFFER_SIZE,
            (&raw const bytes) as usize,
            LAUNCH_END,
        ];
        let config = LaunchConfig {
            grid: [2, 1, 1],
            block: [544, 1, 1],
            shared_bytes: 0,
            stream,
            attributes: 0,
            attribute_count: 0,
        };
        check((launcher.launch_ex)(In::from(&config), function, 0, In::from_slice(&extra)))
    }

    fn module(&self, launcher: &Launcher, context: ContextHandle) -> Result<ModuleHandle, CuError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, module)) = modules.iter().find(|(known, _)| *known == context) {
            return Ok(*module);
        }
        let (mut module, image) = (0, HostImage { magic: HOST_IMAGE, run: self.run });
        check((launcher.module_load)(Out::to(&mut module), In::from(&image)))?;
        modules.push((context, module));
        Ok(module)
    }
}
