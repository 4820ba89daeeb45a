//! Declarations of the public ABI that the hook sees: handles, and the head of the few structures
//! that it reads.

use std::ffi::{c_int, c_uint, c_void};

/// A driver or runtime stream.
pub(crate) type Stream = *mut c_void;

/// A kernel: `CUfunction`, or the address of the host stub in the runtime API.
pub(crate) type Kernel = *mut c_void;

/// An instantiated graph.
pub(crate) type GraphExec = *mut c_void;

/// A driver context.
pub(crate) type Context = *mut c_void;

/// A driver event.
pub(crate) type Event = *mut c_void;

/// A communicator.
pub(crate) type Comm = *mut c_void;

/// Data that is only passed on.
pub(crate) type Data = *mut c_void;

/// `ncclUniqueId`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId(pub [u8; 128]);

/// `dim3`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Dim3 {
    x: c_uint,
    y: c_uint,
    z: c_uint,
}

impl Dim3 {
    /// The dimensions.
    pub(crate) fn sizes(self) -> [c_uint; 3] {
        [self.x, self.y, self.z]
    }
}

/// Head of `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct DriverLaunchConfig {
    /// Grid.
    pub grid: [c_uint; 3],
    /// Block.
    pub block: [c_uint; 3],
    shared_bytes: c_uint,
    /// Stream of the launch.
    pub stream: Stream,
}

/// Head of `cudaLaunchConfig_t`.
#[repr(C)]
pub(crate) struct RuntimeLaunchConfig {
    /// Grid.
    pub grid: Dim3,
    /// Block.
    pub block: Dim3,
    shared_bytes: usize,
    /// Stream of the launch.
    pub stream: Stream,
}

/// `ncclSuccess`, `CUDA_SUCCESS`, `cudaSuccess`.
pub(crate) const SUCCESS: c_int = 0;

/// `ncclInProgress`: a nonblocking communicator has not finished the call.
pub(crate) const NCCL_IN_PROGRESS: c_int = 7;

/// `ncclInvalidUsage`, returned by a call that has no original.
pub(crate) const NCCL_INVALID_USAGE: c_int = 5;

/// `CUBLAS_STATUS_NOT_INITIALIZED`, also in hipBLAS and mcBLAS.
pub(crate) const BLAS_NOT_INITIALIZED: c_int = 1;

/// `CUDA_ERROR_NOT_FOUND`.
pub(crate) const DRIVER_NOT_FOUND: c_int = 500;

/// `cudaErrorSymbolNotFound`.
pub(crate) const RUNTIME_NOT_FOUND: c_int = 500;

/// `CUDA_ERROR_NOT_READY`, the only code that means pending.
pub(crate) const NOT_READY: c_int = 600;

/// `CUDA_ERROR_CONTEXT_IS_DESTROYED`.
pub(crate) const CONTEXT_IS_DESTROYED: c_int = 709;

/// `CU_STREAM_PER_THREAD`, the meaning of NULL for the `_ptsz` form of a function.
pub(crate) const STREAM_PER_THREAD: usize = 2;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(crate) const CAPTURE_MODE_RELAXED: c_int = 2;

/// Color of a rank that gets no communicator from a split.
pub(crate) const NCCL_SPLIT_NOCOLOR: c_int = -1;

/// An argument of unknown type, as wide as a register.
pub(crate) type Word = usize;
