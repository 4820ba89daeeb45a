//! The driver's functions that NCCL uses, and the launch of its kernels.

use std::{
    ffi::CString,
    sync::{Mutex, OnceLock, PoisonError},
};

use sim_abi::{
    cuda::{
        ContextHandle, CuError, Device, DevicePointer, EventHandle, FunctionHandle, HOST_IMAGE, HostImage,
        LAUNCH_BUFFER_POINTER, LAUNCH_BUFFER_SIZE, LAUNCH_END, LaunchConfig, ModuleHandle, StreamHandle, check,
    },
    driver_table,
    ffi::{In, Out, Text},
    nccl::NcclError,
};

use crate::kernel;

driver_table! {
    /// Addresses of driver functions.
    Driver {
        init = c"cuInit" (u32);
        context_current = c"cuCtxGetCurrent" (Out<ContextHandle>);
        context_set_current = c"cuCtxSetCurrent" (ContextHandle);
        context_device = c"cuCtxGetDevice" (Out<Device>);
        device_count = c"cuDeviceGetCount" (Out<i32>);
        primary_retain = c"cuDevicePrimaryCtxRetain" (Out<ContextHandle>, Device);
        module_load = c"cuModuleLoadData" (Out<ModuleHandle>, In<HostImage>);
        module_function = c"cuModuleGetFunction" (Out<FunctionHandle>, ModuleHandle, Text);
        launch_ex = c"cuLaunchKernelEx" (In<LaunchConfig>, FunctionHandle, usize, In<usize>);
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

/// Any error of the driver, as NCCL reports it.
pub(crate) fn cuda(code: i32) -> Result<(), NcclError> {
    if code == 0 { Ok(()) } else { Err(NcclError::UNHANDLED_CUDA) }
}

/// The calling thread's context, made on device 0 when it has none, as NCCL's runtime would.
pub(crate) fn current_context(driver: &Driver) -> Result<ContextHandle, NcclError> {
    let mut context = 0;
    cuda((driver.context_current)(Out::to(&mut context)))?;
    if context == 0 {
        cuda((driver.primary_retain)(Out::to(&mut context), 0))?;
        cuda((driver.context_set_current)(context))?;
    }
    Ok(context)
}

/// Launches the kernel `name` with an argument buffer and no parameters.
pub(crate) fn launch(
    driver: &Driver,
    context: ContextHandle,
    name: &str,
    stream: StreamHandle,
    arguments: &[u64],
) -> Result<(), NcclError> {
    let function = function(driver, context, name)?;
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
    cuda((driver.launch_ex)(In::from(&config), function, 0, In::from_slice(&extra)))
}

/// The function of a kernel in a context; there are few of either.
fn function(driver: &Driver, context: ContextHandle, name: &str) -> Result<FunctionHandle, NcclError> {
    static MODULES: Mutex<Vec<(ContextHandle, ModuleHandle)>> = Mutex::new(Vec::new());
    let mut modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    let module = match modules.iter().find(|(known, _)| *known == context) {
        Some((_, module)) => *module,
        None => {
            let (mut module, image) = (0, HostImage { magic: HOST_IMAGE, run: kernel::run });
            cuda((driver.module_load)(Out::to(&mut module), In::from(&image)))?;
            modules.push((context, module));
            module
        }
    };
    drop(modules);
    let (mut function, name) = (0, CString::new(name).map_err(|_| NcclError::INTERNAL)?);
    cuda((driver.module_function)(Out::to(&mut function), module, Text::borrowed(&name)))?;
    Ok(function)
}
