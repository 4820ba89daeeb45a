//! The families of devices: their libraries, and the names of their event functions.
//!
//! A new family is a new row here. Several families may export the same name (`nccl*` is NCCL and
//! RCCL, `mccl*` MetaX and Moore Threads), so the runtime that a process has loaded decides the
//! family, never the name of a function.

use std::ffi::CStr;

/// The library of a hooked function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// Collectives.
    Collectives,
    /// The layer that every launch goes through.
    Driver,
    /// The layer above the driver, against which applications are compiled.
    Runtime,
    /// Matrix products.
    Blas,
    /// MPI. Its collectives run on the host. It needs no device and belongs to no family.
    Mpi,
    /// gloo inside PyTorch. Like MPI, it belongs to no family.
    Gloo,
}

impl Library {
    /// The libraries of a device family.
    pub const ALL: [Library; 4] = [Library::Collectives, Library::Driver, Library::Runtime, Library::Blas];

    /// Its layer, an index into [`crate::ring::coverage::LAYERS`].
    #[must_use]
    pub const fn layer(self) -> u8 {
        match self {
            Library::Collectives => 1,
            Library::Driver => 2,
            Library::Runtime => 3,
            Library::Blas => 4,
            Library::Mpi | Library::Gloo => 5,
        }
    }

    /// Prefixes of the file names of libraries without a family: Open MPI and relatives of MPICH,
    /// MPI 5, MPICH in Debian, Cray MPI; PyTorch, which has a version in its name in Debian.
    #[must_use]
    pub const fn host_files(self) -> &'static [&'static str] {
        match self {
            Library::Mpi => &["libmpi.so", "libmpi_abi.so", "libmpich.so", "libmpi_cray.so"],
            Library::Gloo => &["libtorch_cpu.so"],
            _ => &[],
        }
    }
}

/// Names of the device functions that the hook calls. A family whose functions are not known for
/// certain has none, and its operations are not timed.
#[derive(Debug)]
pub struct DeviceNames {
    /// The library that contains them.
    pub library: Library,
    /// (event*, flags), or (event*): an unused second argument in a register does no harm.
    pub event_create: &'static CStr,
    /// (event, stream)
    pub event_record: &'static CStr,
    /// (event)
    pub event_query: &'static CStr,
    /// (milliseconds: f32*, start, end)
    pub event_elapsed: &'static CStr,
    /// (event)
    pub event_destroy: &'static CStr,
    /// (stream*, flags): 1 is a stream that the default stream does not wait for.
    pub stream_create: &'static CStr,
    /// (stream, status*)
    pub stream_is_capturing: &'static CStr,
    /// (mode*)
    pub exchange_capture_mode: &'static CStr,
    /// (stream, status*, id*, …null): the capture in which a stream takes part.
    pub capture_info: &'static CStr,
    /// The functions for contexts or devices.
    pub place: LaunchTarget,
    /// (name*, function), if known.
    pub function_name: Option<&'static CStr>,
    /// (name*, kernel), for the handles of kernels that belong to no context.
    pub kernel_name: Option<&'static CStr>,
}

/// The target of a thread's launches: a driver has contexts, a runtime has device numbers.
#[derive(Debug)]
pub enum LaunchTarget {
    /// Contexts.
    Context {
        /// (stream, context*)
        of_stream: &'static CStr,
        /// (stream, context*, green context*): for the stream of a green context, the primary
        /// context of its device, to which its events belong. If it is missing, `of_stream` is
        /// used.
        of_any_stream: &'static CStr,
        /// (context*)
        current: &'static CStr,
        /// (context)
        set: &'static CStr,
        /// (device*)
        device: &'static CStr,
    },
    /// Devices.
    Device {
        /// (stream, device*); if it is missing, the thread's device is used.
        of_stream: &'static CStr,
        /// (device*)
        current: &'static CStr,
        /// (device)
        set: &'static CStr,
    },
}

/// A family of devices.
#[derive(Debug)]
pub struct Family {
    /// Its display name.
    pub name: &'static str,
    /// Whether the rows were tested with libraries of these names. Otherwise they follow the
    /// vendor's documentation.
    pub verified: bool,
    /// Sonames of the runtime, which decides the family, newest first.
    pub runtime: &'static [&'static CStr],
    /// Sonames of the driver; empty if the runtime is the lowest layer.
    pub driver: &'static [&'static CStr],
    /// As above.
    pub collectives: &'static [&'static CStr],
    /// As above.
    pub blas: &'static [&'static CStr],
    /// Prefix of the original of an interposed collective in its library.
    pub original_prefix: &'static CStr,
    /// The functions of the device.
    pub device: Option<DeviceNames>,
}

impl Family {
    /// The sonames of one of its libraries.
    #[must_use]
    pub fn sonames(&self, library: Library) -> &'static [&'static CStr] {
        match library {
            Library::Collectives => self.collectives,
            Library::Driver => self.driver,
            Library::Runtime => self.runtime,
            Library::Blas => self.blas,
            Library::Mpi | Library::Gloo => &[],
        }
    }

    /// Whether a process with these loaded libraries belongs to the family. NVIDIA's driver alone
    /// is enough, because Triton and Numba need no runtime.
    pub fn is_loaded(&self, mut is_loaded: impl FnMut(&CStr) -> bool) -> bool {
        self.runtime.iter().chain(self.driver).any(|soname| is_loaded(soname))
    }
}

/// All families, most likely first.
pub static FAMILIES: [Family; 6] = [
    Family {
        name: "NVIDIA CUDA",
        verified: true,
        runtime: &[c"libcudart.so.13", c"libcudart.so.12", c"libcudart.so.11.0"],
        driver: &[c"libcuda.so.1"],
        collectives: &[c"libnccl.so.2"],
        blas: &[
            c"libcublas.so.13",
            c"libcublasLt.so.13",
            c"libcublas.so.12",
            c"libcublasLt.so.12",
            c"libcublas.so.11",
            c"libcublasLt.so.11",
        ],
        original_prefix: c"p",
        device: Some(DeviceNames {
            library: Library::Driver,
            event_create: c"cuEventCreate",
            event_record: c"cuEventRecord",
            event_query: c"cuEventQuery",
            event_elapsed: c"cuEventElapsedTime",
            event_destroy: c"cuEventDestroy_v2",
            stream_create: c"cuStreamCreate",
            stream_is_capturing: c"cuStreamIsCapturing",
            exchange_capture_mode: c"cuThreadExchangeStreamCaptureMode",
            capture_info: c"cuStreamGetCaptureInfo_v2",
            place: LaunchTarget::Context {
                of_stream: c"cuStreamGetCtx",
                of_any_stream: c"cuStreamGetCtx_v2",
                current: c"cuCtxGetCurrent",
                set: c"cuCtxSetCurrent",
                device: c"cuCtxGetDevice",
            },
            function_name: Some(c"cuFuncGetName"),
            kernel_name: Some(c"cuKernelGetName"),
        }),
    },
    Family {
        name: "AMD ROCm",
        verified: true,
        runtime: &[c"libamdhip64.so.7", c"libamdhip64.so.6", c"libamdhip64.so.5", c"libamdhip64.so"],
        driver: &[],
        collectives: &[c"librccl.so.1", c"librccl.so"],
        blas: &[
            c"libhipblas.so.3",
            c"libhipblas.so.2",
            c"libhipblas.so",
            c"libhipblaslt.so.1",
            c"libhipblaslt.so.0",
            c"libhipblaslt.so",
        ],
        original_prefix: c"p",
        device: Some(DeviceNames {
            library: Library::Runtime,
            event_create: c"hipEventCreateWithFlags",
            event_record: c"hipEventRecord",
            event_query: c"hipEventQuery",
            event_elapsed: c"hipEventElapsedTime",
            event_destroy: c"hipEventDestroy",
            stream_create: c"hipStreamCreateWithFlags",
            stream_is_capturing: c"hipStreamIsCapturing",
            exchange_capture_mode: c"hipThreadExchangeStreamCaptureMode",
            capture_info: c"hipStreamGetCaptureInfo_v2",
            place: LaunchTarget::Device {
                of_stream: c"hipStreamGetDevice",
                current: c"hipGetDevice",
                set: c"hipSetDevice",
            },
            // hipKernelNameRef has another signature.
            function_name: None,
            kernel_name: None,
        }),
    },
    Family {
        name: "MetaX MACA",
        verified: true,
        runtime: &[c"libmcruntime.so"],
        driver: &[],
        collectives: &[c"libmccl.so"],
        blas: &[c"libmcblas.so", c"libmcblasLt.so"],
        original_prefix: c"p",
        device: Some(DeviceNames {
            library: Library::Runtime,
            event_create: c"mcEventCreate",
            event_record: c"mcEventRecord",
            event_query: c"mcEventQuery",
            event_elapsed: c"mcEventElapsedTime",
            event_destroy: c"mcEventDestroy",
            stream_create: c"mcStreamCreateWithFlags",
            stream_is_capturing: c"mcStreamIsCapturing",
            exchange_capture_mode: c"mcThreadExchangeStreamCaptureMode",
            capture_info: c"mcStreamGetCaptureInfo_v2",
            place: LaunchTarget::Device {
                of_stream: c"mcStreamGetDevice",
                current: c"mcGetDevice",
                set: c"mcSetDevice",
            },
            function_name: None,
            kernel_name: None,
        }),
    },
    // The next three rows contain only what public headers and programs prove: the library that
    // decides, and the library of the collectives. The mccl* rows follow NCCL according to the
    // documentation; the others have functions of their own.
    Family {
        name: "Moore Threads MUSA",
        verified: false,
        runtime: &[c"libmusart.so.5", c"libmusart.so.4", c"libmusart.so.1", c"libmusart.so"],
        driver: &[c"libmusa.so.5", c"libmusa.so.4", c"libmusa.so.1", c"libmusa.so"],
        collectives: &[c"libmccl.so.2", c"libmccl.so"],
        blas: &[c"libmublas.so"],
        original_prefix: c"p",
        device: None,
    },
    Family {
        name: "Huawei Ascend",
        verified: false,
        runtime: &[c"libascendcl.so"],
        driver: &[],
        collectives: &[c"libhccl.so"],
        blas: &[],
        original_prefix: c"",
        device: None,
    },
    Family {
        name: "Cambricon",
        verified: false,
        runtime: &[c"libcnrt.so"],
        driver: &[],
        collectives: &[c"libcncl.so"],
        blas: &[],
        original_prefix: c"",
        device: None,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    fn of(loaded: &[&CStr]) -> Option<&'static str> {
        FAMILIES.iter().find(|family| family.is_loaded(|soname| loaded.contains(&soname))).map(|family| family.name)
    }

    #[test]
    fn the_runtime_decides_and_a_collective_library_never_does() {
        assert_eq!(of(&[c"libcuda.so.1", c"libnccl.so.2"]), Some("NVIDIA CUDA"));
        assert_eq!(of(&[c"libmcruntime.so", c"libmccl.so"]), Some("MetaX MACA"));
        assert_eq!(of(&[c"libmusart.so", c"libmccl.so"]), Some("Moore Threads MUSA"));
        assert_eq!(of(&[c"libmusart.so.5", c"libmccl.so.2"]), Some("Moore Threads MUSA"));
        assert_eq!(of(&[c"libascendcl.so", c"libhccl.so"]), Some("Huawei Ascend"));
        assert_eq!(of(&[c"libcnrt.so", c"libcncl.so"]), Some("Cambricon"));
        assert_eq!(of(&[c"libamdhip64.so.6", c"librccl.so.1"]), Some("AMD ROCm"));
        assert_eq!(of(&[c"libmccl.so"]), None);
        assert_eq!(of(&[c"libnccl.so.2"]), None);
    }

    #[test]
    fn no_runtime_belongs_to_two_families() {
        let runtimes: Vec<&CStr> = FAMILIES.iter().flat_map(|family| family.runtime).copied().collect();
        let mut unique = runtimes.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), runtimes.len());
    }
}
