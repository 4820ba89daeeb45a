//! The families of devices: the libraries of each, and what its event functions are called.
//!
//! A further family is a row here. One exported name may serve several (`nccl*` is NCCL and RCCL, `mccl*` MetaX and Moore
//! Threads), which is why the family is decided by the runtime that a process has loaded and never by a function's name.

use std::ffi::CStr;

/// The libraries that a hooked function can come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// Collectives.
    Collectives,
    /// The layer that every launch passes.
    Driver,
    /// The layer above it, which application code is compiled against.
    Runtime,
    /// Matrix products.
    Blas,
    /// MPI, whose collectives the host runs. It needs no device and belongs to no family.
    Mpi,
    /// gloo inside PyTorch, as above.
    Gloo,
}

impl Library {
    /// All of them.
    pub const ALL: [Library; 4] = [Library::Collectives, Library::Driver, Library::Runtime, Library::Blas];

    /// Its layer, an index of [`crate::ring::coverage::LAYERS`].
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

    /// How the file name of a library begins that belongs to no family: Open MPI and MPICH's relatives, MPI 5's, MPICH as Debian has it,
    /// Cray's; PyTorch, which Debian has by version.
    #[must_use]
    pub const fn host_files(self) -> &'static [&'static str] {
        match self {
            Library::Mpi => &["libmpi.so", "libmpi_abi.so", "libmpich.so", "libmpi_cray.so"],
            Library::Gloo => &["libtorch_cpu.so"],
            _ => &[],
        }
    }
}

/// Names of the functions that the hook calls itself. A family whose functions are not known for certain has none, and then
/// nothing of it is timed.
#[derive(Debug)]
pub struct DeviceNames {
    /// The library that has them.
    pub library: Library,
    /// (event*, flags), or (event*): a second argument in a register that nobody looks at does no harm.
    pub event_create: &'static CStr,
    /// (event, stream)
    pub event_record: &'static CStr,
    /// (event)
    pub event_query: &'static CStr,
    /// (milliseconds: f32*, start, end)
    pub event_elapsed: &'static CStr,
    /// (event)
    pub event_destroy: &'static CStr,
    /// (stream, status*)
    pub stream_is_capturing: &'static CStr,
    /// (mode*)
    pub exchange_capture_mode: &'static CStr,
    /// (stream, status*, id*, …null): which capture a stream takes part in.
    pub capture_info: &'static CStr,
    /// What a thread is bound to.
    pub place: Place,
    /// (name*, function), where it is known.
    pub function_name: Option<&'static CStr>,
}

/// Where a thread's launches go: the driver has contexts, a runtime has the numbers of devices.
#[derive(Debug)]
pub enum Place {
    /// Contexts.
    Context {
        /// (stream, context*)
        of_stream: &'static CStr,
        /// (stream, context*, green context*): of a green context's stream the primary context of its device, which its events are of.
        /// Where it is missing, the one above is taken.
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
        /// (stream, device*); where it is missing, the thread's device is taken.
        of_stream: &'static CStr,
        /// (device*)
        current: &'static CStr,
        /// (device)
        set: &'static CStr,
    },
}

/// One family.
#[derive(Debug)]
pub struct Family {
    /// Its name for people.
    pub name: &'static str,
    /// Whether its rows have been run against libraries of these names; else they are what its documents say.
    pub verified: bool,
    /// Sonames of the library that decides, newest first.
    pub runtime: &'static [&'static CStr],
    /// As above; empty where the runtime is the lowest layer.
    pub driver: &'static [&'static CStr],
    /// As above.
    pub collectives: &'static [&'static CStr],
    /// As above.
    pub blas: &'static [&'static CStr],
    /// What the original of an interposed collective is called in its library: a prefix in front of the name.
    pub original_prefix: &'static CStr,
    /// The functions of the device.
    pub device: Option<DeviceNames>,
}

impl Family {
    /// Sonames of one of its libraries.
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

    /// Whether a process that has loaded `is_loaded` libraries is of this family. NVIDIA's driver alone counts too: Triton
    /// and Numba need no runtime.
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
            stream_is_capturing: c"cuStreamIsCapturing",
            exchange_capture_mode: c"cuThreadExchangeStreamCaptureMode",
            capture_info: c"cuStreamGetCaptureInfo_v2",
            place: Place::Context {
                of_stream: c"cuStreamGetCtx",
                of_any_stream: c"cuStreamGetCtx_v2",
                current: c"cuCtxGetCurrent",
                set: c"cuCtxSetCurrent",
                device: c"cuCtxGetDevice",
            },
            function_name: Some(c"cuFuncGetName"),
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
            stream_is_capturing: c"hipStreamIsCapturing",
            exchange_capture_mode: c"hipThreadExchangeStreamCaptureMode",
            capture_info: c"hipStreamGetCaptureInfo_v2",
            place: Place::Device { of_stream: c"hipStreamGetDevice", current: c"hipGetDevice", set: c"hipSetDevice" },
            // hipKernelNameRef has another signature.
            function_name: None,
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
            stream_is_capturing: c"mcStreamIsCapturing",
            exchange_capture_mode: c"mcThreadExchangeStreamCaptureMode",
            capture_info: c"mcStreamGetCaptureInfo_v2",
            place: Place::Device { of_stream: c"mcStreamGetDevice", current: c"mcGetDevice", set: c"mcSetDevice" },
            function_name: None,
        }),
    },
    // Only what is certain of the next three, by public headers and programs: which library decides, and which holds the
    // collectives. The mccl* rows are NCCL's by documentation, those of the others are their own.
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
