//! The driver functions that the runtime uses.

use std::{ffi::c_char, sync::OnceLock};

use sim_abi::{
    cuda::{
        ContextHandle, CuError, Device, DevicePointer, EventHandle, ExecHandle, FunctionHandle, GraphHandle,
        LaunchConfig, ModuleHandle, PER_THREAD, StreamHandle,
    },
    driver_table,
    ffi::{In, Out, Text},
};

driver_table! {
    /// Addresses of driver functions, obtained with one value of `flags`.
    Driver {
        init = c"cuInit" (u32);
        get_proc_address = c"cuGetProcAddress" (Text, Out<usize>, i32, u64, Out<i32>);
        driver_version = c"cuDriverGetVersion" (Out<i32>);
        device_count = c"cuDeviceGetCount" (Out<i32>);
        device_name = c"cuDeviceGetName" (Out<u8>, i32, Device);
        device_uuid = c"cuDeviceGetUuid" (Out<[u8; 16]>, Device);
        device_total_memory = c"cuDeviceTotalMem" (Out<usize>, Device);
        device_attribute = c"cuDeviceGetAttribute" (Out<i32>, i32, Device);
        device_pci_bus_id = c"cuDeviceGetPCIBusId" (Out<u8>, i32, Device);
        device_can_access_peer = c"cuDeviceCanAccessPeer" (Out<i32>, Device, Device);
        primary_retain = c"cuDevicePrimaryCtxRetain" (Out<ContextHandle>, Device);
        primary_reset = c"cuDevicePrimaryCtxReset" (Device);
        primary_state = c"cuDevicePrimaryCtxGetState" (Device, Out<u32>, Out<i32>);
        primary_set_flags = c"cuDevicePrimaryCtxSetFlags" (Device, u32);
        context_current = c"cuCtxGetCurrent" (Out<ContextHandle>);
        context_set_current = c"cuCtxSetCurrent" (ContextHandle);
        context_device = c"cuCtxGetDevice" (Out<Device>);
        context_synchronize = c"cuCtxSynchronize" (ContextHandle);
        priority_range = c"cuCtxGetStreamPriorityRange" (Out<i32>, Out<i32>);
        library_load = c"cuLibraryLoadData" (Out<ModuleHandle>, In<u8>, usize, usize, u32, usize, usize, u32);
        library_kernel = c"cuLibraryGetKernel" (Out<FunctionHandle>, ModuleHandle, Text);
        library_unload = c"cuLibraryUnload" (ModuleHandle);
        kernel_function = c"cuKernelGetFunction" (Out<FunctionHandle>, FunctionHandle);
        kernel_name = c"cuKernelGetName" (Out<*const c_char>, FunctionHandle);
        function_attribute = c"cuFuncGetAttribute" (Out<i32>, i32, FunctionHandle);
        occupancy = c"cuOccupancyMaxActiveBlocksPerMultiprocessor" (Out<i32>, FunctionHandle, i32, usize);
        launch = c"cuLaunchKernel" (FunctionHandle, u32, u32, u32, u32, u32, u32, u32, StreamHandle, usize, usize);
        launch_ex = c"cuLaunchKernelEx" (In<LaunchConfig>, FunctionHandle, usize, usize);
        launch_cooperative = c"cuLaunchCooperativeKernel"
            (FunctionHandle, u32, u32, u32, u32, u32, u32, u32, StreamHandle, usize);
        launch_host = c"cuLaunchHostFunc" (StreamHandle, usize, usize);
        stream_add_callback = c"cuStreamAddCallback" (StreamHandle, usize, usize, u32);
        stream_create = c"cuStreamCreateWithPriority" (Out<StreamHandle>, u32, i32);
        stream_destroy = c"cuStreamDestroy" (StreamHandle);
        stream_query = c"cuStreamQuery" (StreamHandle);
        stream_synchronize = c"cuStreamSynchronize" (StreamHandle);
        stream_wait_event = c"cuStreamWaitEvent" (StreamHandle, EventHandle, u32);
        stream_flags = c"cuStreamGetFlags" (StreamHandle, Out<u32>);
        stream_priority = c"cuStreamGetPriority" (StreamHandle, Out<i32>);
        stream_id = c"cuStreamGetId" (StreamHandle, Out<u64>);
        stream_device = c"cuStreamGetDevice" (StreamHandle, Out<i32>);
        capture_begin = c"cuStreamBeginCapture" (StreamHandle, u32);
        capture_end = c"cuStreamEndCapture" (StreamHandle, Out<GraphHandle>);
        is_capturing = c"cuStreamIsCapturing" (StreamHandle, Out<i32>);
        capture_info = c"cuStreamGetCaptureInfo"
            (StreamHandle, Out<i32>, Out<u64>, Out<GraphHandle>, Out<usize>, Out<usize>, Out<usize>);
        exchange_capture_mode = c"cuThreadExchangeStreamCaptureMode" (Out<u32>);
        graph_create = c"cuGraphCreate" (Out<GraphHandle>, u32);
        graph_destroy = c"cuGraphDestroy" (GraphHandle);
        graph_nodes = c"cuGraphGetNodes" (GraphHandle, Out<usize>, Out<usize>);
        graph_instantiate = c"cuGraphInstantiateWithFlags" (Out<ExecHandle>, GraphHandle, u64);
        graph_upload = c"cuGraphUpload" (ExecHandle, StreamHandle);
        graph_launch = c"cuGraphLaunch" (ExecHandle, StreamHandle);
        graph_exec_destroy = c"cuGraphExecDestroy" (ExecHandle);
        object_create = c"cuUserObjectCreate" (Out<usize>, usize, usize, u32, u32);
        object_retain = c"cuUserObjectRetain" (usize, u32);
        object_release = c"cuUserObjectRelease" (usize, u32);
        graph_retain_object = c"cuGraphRetainUserObject" (GraphHandle, usize, u32, u32);
        graph_release_object = c"cuGraphReleaseUserObject" (GraphHandle, usize, u32);
        event_create = c"cuEventCreate" (Out<EventHandle>, u32);
        event_destroy = c"cuEventDestroy" (EventHandle);
        event_record = c"cuEventRecord" (EventHandle, StreamHandle);
        event_record_flags = c"cuEventRecordWithFlags" (EventHandle, StreamHandle, u32);
        event_query = c"cuEventQuery" (EventHandle);
        event_synchronize = c"cuEventSynchronize" (EventHandle);
        event_elapsed = c"cuEventElapsedTime" (Out<f32>, EventHandle, EventHandle);
        memory_info = c"cuMemGetInfo" (Out<usize>, Out<usize>);
        memory_allocate = c"cuMemAlloc" (Out<DevicePointer>, usize);
        memory_allocate_managed = c"cuMemAllocManaged" (Out<DevicePointer>, usize, u32);
        memory_allocate_pitch = c"cuMemAllocPitch" (Out<DevicePointer>, Out<usize>, usize, usize, u32);
        memory_free = c"cuMemFree" (DevicePointer);
        memory_allocate_async = c"cuMemAllocAsync" (Out<DevicePointer>, usize, StreamHandle);
        memory_free_async = c"cuMemFreeAsync" (DevicePointer, StreamHandle);
        host_allocate = c"cuMemHostAlloc" (Out<DevicePointer>, usize, u32);
        host_free = c"cuMemFreeHost" (DevicePointer);
        host_register = c"cuMemHostRegister" (DevicePointer, usize, u32);
        host_unregister = c"cuMemHostUnregister" (DevicePointer);
        pointer_attribute = c"cuPointerGetAttribute" (Out<u64>, i32, DevicePointer);
        copy = c"cuMemcpy" (DevicePointer, DevicePointer, usize);
        copy_async = c"cuMemcpyAsync" (DevicePointer, DevicePointer, usize, StreamHandle);
        set = c"cuMemsetD8" (DevicePointer, u8, usize);
        set_async = c"cuMemsetD8Async" (DevicePointer, u8, usize, StreamHandle);
    }
}

/// The driver with a legacy default stream (flags 0).
pub(crate) fn legacy() -> Result<&'static Driver, CuError> {
    static TABLE: OnceLock<Result<Driver, CuError>> = OnceLock::new();
    TABLE.get_or_init(|| load(0)).as_ref().map_err(|error| *error)
}

/// The driver with a default stream per thread (flags 2).
pub(crate) fn per_thread() -> Result<&'static Driver, CuError> {
    static TABLE: OnceLock<Result<Driver, CuError>> = OnceLock::new();
    TABLE.get_or_init(|| load(PER_THREAD)).as_ref().map_err(|error| *error)
}

fn load(flags: u64) -> Result<Driver, CuError> {
    let driver = Driver::load(flags)?;
    sim_abi::cuda::check((driver.init)(0))?;
    Ok(driver)
}
