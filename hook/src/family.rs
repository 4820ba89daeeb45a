//! The families of devices: which libraries hold the originals, and what their event functions are called.
//!
//! A further family is a row here. Exported names are rows of the `hooked!` tables; one exported name may serve several
//! families (`nccl*` is NCCL and RCCL), which is why the family is decided by the loaded runtime and not by a name.

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
}

/// Names of the driver functions that the hook calls itself.
#[derive(Debug)]
pub struct DeviceNames {
    /// (event*, flags)
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
    /// (stream, context*)
    pub stream_context: &'static CStr,
    /// (context*)
    pub get_current: &'static CStr,
    /// (context)
    pub set_current: &'static CStr,
    /// (device*)
    pub get_device: &'static CStr,
    /// (mode*)
    pub exchange_capture_mode: &'static CStr,
    /// (name*, function); not there before CUDA 12.3.
    pub function_name: &'static CStr,
}

/// One family.
#[derive(Debug)]
pub struct Family {
    /// Sonames by library, newest first.
    pub collectives: &'static [&'static CStr],
    /// As above.
    pub driver: &'static [&'static CStr],
    /// As above.
    pub runtime: &'static [&'static CStr],
    /// What the original of an interposed collective is called in its library: a prefix in front of the name.
    pub original_prefix: &'static CStr,
    /// The functions of the device.
    pub device: DeviceNames,
}

/// All families, most likely first.
pub static FAMILIES: [Family; 1] = [NVIDIA];

const NVIDIA: Family = Family {
    collectives: &[c"libnccl.so.2"],
    driver: &[c"libcuda.so.1"],
    runtime: &[c"libcudart.so.13", c"libcudart.so.12", c"libcudart.so.11.0"],
    original_prefix: c"p",
    device: DeviceNames {
        event_create: c"cuEventCreate",
        event_record: c"cuEventRecord",
        event_query: c"cuEventQuery",
        event_elapsed: c"cuEventElapsedTime",
        event_destroy: c"cuEventDestroy_v2",
        stream_is_capturing: c"cuStreamIsCapturing",
        stream_context: c"cuStreamGetCtx",
        get_current: c"cuCtxGetCurrent",
        set_current: c"cuCtxSetCurrent",
        get_device: c"cuCtxGetDevice",
        exchange_capture_mode: c"cuThreadExchangeStreamCaptureMode",
        function_name: c"cuFuncGetName",
    },
};

impl Family {
    /// Sonames of one of its libraries.
    #[must_use]
    pub fn sonames(&self, library: Library) -> &'static [&'static CStr] {
        match library {
            Library::Collectives => self.collectives,
            Library::Driver => self.driver,
            Library::Runtime => self.runtime,
        }
    }
}
