//! `libnccl.so.2` of the simulated device: collectives between processes over shared memory.
//!
//! Like the real library, it gets the driver through `cuGetProcAddress_v2` and launches every group
//! as a kernel with `cuLaunchKernelEx`; the argument buffer describes its tasks. The kernels run on
//! the stream's thread and meet their peers in a file in /dev/shm, by sequence number: when a rank
//! skips an operation, its next operation meets the one that the others are still in.

#![deny(unsafe_code)]

mod api;
mod arena;
mod communicator;
mod group;
mod kernel;
mod task;

/// The driver functions that NCCL uses.
mod driver {
    use std::sync::OnceLock;

    use sim_abi::{
        cuda::{ContextHandle, CuError, Device, DevicePointer, EventHandle, StreamHandle, check},
        driver_table,
        ffi::Out,
        nccl::NcclError,
    };

    driver_table! {
        /// Addresses of driver functions.
        Driver {
            init = c"cuInit" (u32);
            context_current = c"cuCtxGetCurrent" (Out<ContextHandle>);
            context_set_current = c"cuCtxSetCurrent" (ContextHandle);
            context_device = c"cuCtxGetDevice" (Out<Device>);
            device_count = c"cuDeviceGetCount" (Out<i32>);
            primary_retain = c"cuDevicePrimaryCtxRetain" (Out<ContextHandle>, Device);
            is_capturing = c"cuStreamIsCapturing" (StreamHandle, Out<i32>);
            event_create = c"cuEventCreate" (Out<EventHandle>, u32);
            event_destroy = c"cuEventDestroy" (EventHandle);
            event_record = c"cuEventRecord" (EventHandle, StreamHandle);
            stream_wait_event = c"cuStreamWaitEvent" (StreamHandle, EventHandle, u32);
            memory_allocate = c"cuMemAlloc" (Out<DevicePointer>, usize);
            memory_free = c"cuMemFree" (DevicePointer);
        }
    }

    /// The driver, loaded and initialized.
    pub(crate) fn driver() -> Result<&'static Driver, NcclError> {
        static TABLE: OnceLock<Result<Driver, CuError>> = OnceLock::new();
        let load = || {
            let driver = Driver::load(0)?;
            check((driver.init)(0))?;
            Ok(driver)
        };
        TABLE.get_or_init(load).as_ref().map_err(|_| NcclError::UNHANDLED_CUDA)
    }

    /// Converts an error of the driver to NCCL's error.
    pub(crate) fn cuda(code: i32) -> Result<(), NcclError> {
        if code == 0 { Ok(()) } else { Err(NcclError::UNHANDLED_CUDA) }
    }

    /// The calling thread's context. If it has none, that of device 0 is created, as NCCL's runtime
    /// does.
    pub(crate) fn current_context(driver: &Driver) -> Result<ContextHandle, NcclError> {
        let mut context = 0;
        cuda((driver.context_current)(Out::to(&mut context)))?;
        if context == 0 {
            cuda((driver.primary_retain)(Out::to(&mut context), 0))?;
            cuda((driver.context_set_current)(context))?;
        }
        Ok(context)
    }
}
