//! Devices and their memory, and what works without a driver: errors and versions.

use std::ffi::c_int;

use sim_abi::{
    cuda::{CuError, Device, DevicePointer, StreamHandle, check, error_text, runtime_name},
    ffi::{Out, Text, write},
};

use super::runtime_api;
use crate::{driver::Driver, state};

runtime_api! { without_context:
    fn cudaDriverGetVersion(d; version: Out<i32>) {
        check((d.driver_version)(version))
    }

    fn cudaGetDriverEntryPoint(d; name: Text, function: Out<usize>, flags: u64, status: Out<i32>) {
        driver_function(d, name, function, super::version(), flags, status)
    }

    ptsz cudaGetDriverEntryPointByVersion_ptsz fn cudaGetDriverEntryPointByVersion(
        d; name: Text, function: Out<usize>, version: i32, flags: u64, status: Out<i32>
    ) {
        driver_function(d, name, function, version, flags, status)
    }

    fn cudaProfilerStart(d;) {
        Ok(())
    }

    fn cudaProfilerStop(d;) {
        Ok(())
    }

    fn cudaGetDeviceCount(d; count: Out<i32>) {
        check((d.device_count)(count))
    }

    fn cudaGetDevice(d; device: Out<i32>) {
        Ok(device.set(state::device()?)?)
    }

    fn cudaSetDevice(d; device: i32) {
        state::set_device(device)
    }

    fn cudaInitDevice(d; device: i32, _device_flags: u32, _flags: u32) {
        let mut context = 0;
        check((d.primary_retain)(Out::to(&mut context), device))
    }

    fn cudaDeviceGetAttribute(d; value: Out<i32>, attribute: i32, device: i32) {
        check((d.device_attribute)(value, attribute, device))
    }

    fn cudaDeviceGetPCIBusId(d; text: Out<u8>, length: i32, device: i32) {
        check((d.device_pci_bus_id)(text, length, device))
    }

    fn cudaDeviceCanAccessPeer(d; can: Out<i32>, device: i32, peer: i32) {
        check((d.device_can_access_peer)(can, device, peer))
    }

    fn cudaDeviceReset(d;) {
        check((d.primary_reset)(state::device()?))
    }

    fn cudaSetDeviceFlags(d; flags: u32) {
        check((d.primary_set_flags)(state::device()?, flags))
    }

    fn cudaGetDeviceFlags(d; flags: Out<u32>) {
        let mut active = 0;
        check((d.primary_state)(state::device()?, flags, Out::to(&mut active)))
    }

    fn cudaGetDeviceProperties(d; properties: Out<u8>, device: i32) {
        fill_properties(d, properties.address(), device)
    }

    fn cudaGetDeviceProperties_v2(d; properties: Out<u8>, device: i32) {
        fill_properties(d, properties.address(), device)
    }
}

runtime_api! { with_context:
    fn cudaDeviceSynchronize(d;) {
        let mut context = 0;
        check((d.context_current)(Out::to(&mut context)))?;
        check((d.context_synchronize)(context))
    }

    fn cudaDeviceGetStreamPriorityRange(d; least: Out<i32>, greatest: Out<i32>) {
        check((d.priority_range)(least, greatest))
    }

    fn cudaDeviceEnablePeerAccess(d; _peer: i32, _flags: u32) {
        Ok(())
    }

    fn cudaDeviceDisablePeerAccess(d; _peer: i32) {
        Ok(())
    }
}

/// A function that the driver does not have is a result, not an error.
fn driver_function(
    d: &Driver,
    name: Text,
    function: Out<usize>,
    version: i32,
    flags: u64,
    status: Out<i32>,
) -> Result<(), CuError> {
    let mut found = 0;
    check((d.get_proc_address)(name, function, version, flags, Out::to(&mut found)))?;
    status.set_if_wanted(found);
    Ok(())
}

/// Members of cudaDeviceProp: the offset in versions 13 and 12, the CUdevice_attribute, the size.
const MEMBERS: [(usize, usize, i32, usize); 30] = [
    (296, 296, 8, 8),  // sharedMemPerBlock
    (304, 304, 12, 4), // regsPerBlock
    (308, 308, 10, 4), // warpSize
    (312, 312, 11, 8), // memPitch
    (320, 320, 1, 4),  // maxThreadsPerBlock
    (324, 324, 2, 4),  // maxThreadsDim
    (328, 328, 3, 4),
    (332, 332, 4, 4),
    (336, 336, 5, 4), // maxGridSize
    (340, 340, 6, 4),
    (344, 344, 7, 4),
    (352, 352, 9, 8),   // totalConstMem
    (360, 360, 75, 4),  // major
    (364, 364, 76, 4),  // minor
    (368, 368, 14, 8),  // textureAlignment
    (384, 388, 16, 4),  // multiProcessorCount
    (392, 400, 19, 4),  // canMapHostMemory
    (560, 576, 31, 4),  // concurrentKernels
    (584, 600, 40, 4),  // asyncEngineCount
    (588, 604, 41, 4),  // unifiedAddressing
    (592, 612, 37, 4),  // memoryBusWidth
    (596, 616, 38, 4),  // l2CacheSize
    (604, 624, 39, 4),  // maxThreadsPerMultiProcessor
    (608, 628, 78, 4),  // streamPrioritiesSupported
    (624, 640, 81, 8),  // sharedMemPerMultiprocessor
    (632, 648, 82, 4),  // regsPerMultiprocessor
    (636, 652, 83, 4),  // managedMemory
    (668, 688, 95, 4),  // cooperativeLaunch
    (672, 696, 97, 8),  // sharedMemPerBlockOptin
    (688, 712, 106, 4), // maxBlocksPerMultiProcessor
];

/// Fills the supported members; the other members keep the caller's values.
fn fill_properties(d: &Driver, at: usize, device: Device) -> Result<(), CuError> {
    if at == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let mut name = [0u8; 256];
    check((d.device_name)(Out::to(&mut name).cast(), 256, device))?;
    write(at, 0, name);
    let mut uuid = [0u8; 16];
    check((d.device_uuid)(Out::to(&mut uuid), device))?;
    write(at + 256, 0, uuid);
    let mut total = 0usize;
    check((d.device_total_memory)(Out::to(&mut total), device))?;
    write(at + 288, 0, total);
    let attribute = |number: i32| {
        let mut value = 0;
        check((d.device_attribute)(Out::to(&mut value), number, device)).map(|()| value)
    };
    for (offset, offset_in_12, number, bytes) in MEMBERS {
        let (at, value) = (at + if super::version() < 13000 { offset_in_12 } else { offset }, attribute(number)?);
        match bytes {
            8 => write(at, 0, value as usize),
            _ => write::<c_int>(at, 0, value),
        }
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> i32 {
    state::last_error(true)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> i32 {
    state::last_error(false)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(error: i32) -> Text {
    runtime_name(error).unwrap_or(Text::of(c"unrecognized error code"))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(error: i32) -> Text {
    error_text(error).unwrap_or(Text::of(c"unrecognized error code"))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaRuntimeGetVersion(version: Out<i32>) -> i32 {
    state::call("cudaRuntimeGetVersion", || Ok(version.set(super::version())?))
}

runtime_api! { with_context:
    fn cudaMalloc(d; address: Out<DevicePointer>, bytes: usize) {
        allocate(bytes, address, |address| (d.memory_allocate)(address, bytes))
    }

    fn cudaMallocManaged(d; address: Out<DevicePointer>, bytes: usize, flags: u32) {
        allocate(bytes, address, |address| (d.memory_allocate_managed)(address, bytes, flags))
    }

    fn cudaMallocPitch(d; address: Out<DevicePointer>, pitch: Out<usize>, width: usize, height: usize) {
        check((d.memory_allocate_pitch)(address, pitch, width, height, 4))
    }

    ptsz cudaMallocAsync_ptsz fn cudaMallocAsync(d; address: Out<DevicePointer>, bytes: usize, stream: StreamHandle) {
        allocate(bytes, address, |address| (d.memory_allocate_async)(address, bytes, stream))
    }

    fn cudaFree(d; address: DevicePointer) {
        check((d.memory_free)(address))
    }

    ptsz cudaFreeAsync_ptsz fn cudaFreeAsync(d; address: DevicePointer, stream: StreamHandle) {
        if address == 0 { Ok(()) } else { check((d.memory_free_async)(address, stream)) }
    }

    fn cudaMallocHost(d; address: Out<DevicePointer>, bytes: usize) {
        allocate(bytes, address, |address| (d.host_allocate)(address, bytes, 0))
    }

    fn cudaHostAlloc(d; address: Out<DevicePointer>, bytes: usize, flags: u32) {
        allocate(bytes, address, |address| (d.host_allocate)(address, bytes, flags))
    }

    fn cudaFreeHost(d; address: DevicePointer) {
        if address == 0 { Ok(()) } else { check((d.host_free)(address)) }
    }

    fn cudaHostRegister(d; address: DevicePointer, bytes: usize, flags: u32) {
        check((d.host_register)(address, bytes, flags))
    }

    fn cudaHostUnregister(d; address: DevicePointer) {
        check((d.host_unregister)(address))
    }

    fn cudaHostGetDevicePointer(d; device: Out<DevicePointer>, host: DevicePointer, _flags: u32) {
        Ok(device.set(host)?)
    }

    fn cudaMemGetInfo(d; free: Out<usize>, total: Out<usize>) {
        check((d.memory_info)(free, total))
    }

    fn cudaPointerGetAttributes(d; attributes: Out<PointerAttributes>, address: DevicePointer) {
        Ok(attributes.set(pointer_attributes(d, address))?)
    }

    ptsz cudaMemcpy_ptds fn cudaMemcpy(d; to: DevicePointer, from: DevicePointer, bytes: usize, _kind: i32) {
        check((d.copy)(to, from, bytes))
    }

    ptsz cudaMemcpyAsync_ptsz fn cudaMemcpyAsync(
        d; to: DevicePointer, from: DevicePointer, bytes: usize, _kind: i32, stream: StreamHandle
    ) {
        check((d.copy_async)(to, from, bytes, stream))
    }

    ptsz cudaMemcpy2DAsync_ptsz fn cudaMemcpy2DAsync(
        d; to: DevicePointer, to_pitch: usize, from: DevicePointer, from_pitch: usize, width: usize, height: usize,
        _kind: i32, stream: StreamHandle
    ) {
        (0..height).try_for_each(|row| check((d.copy_async)(to + row * to_pitch, from + row * from_pitch, width, stream)))
    }

    ptsz cudaMemcpyPeerAsync_ptsz fn cudaMemcpyPeerAsync(
        d; to: DevicePointer, _to_device: Device, from: DevicePointer, _from_device: Device, bytes: usize,
        stream: StreamHandle
    ) {
        check((d.copy_async)(to, from, bytes, stream))
    }

    ptsz cudaMemset_ptds fn cudaMemset(d; to: DevicePointer, value: i32, bytes: usize) {
        check((d.set)(to, value as u8, bytes))
    }

    ptsz cudaMemsetAsync_ptsz fn cudaMemsetAsync(
        d; to: DevicePointer, value: i32, bytes: usize, stream: StreamHandle
    ) {
        check((d.set_async)(to, value as u8, bytes, stream))
    }
}

/// cudaPointerAttributes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PointerAttributes {
    /// Unregistered 0, host 1, device 2, managed 3.
    kind: i32,
    device: i32,
    device_pointer: usize,
    host_pointer: usize,
}

fn pointer_attributes(d: &Driver, address: DevicePointer) -> PointerAttributes {
    let attribute = |number| {
        let mut value = 0u64;
        // The driver writes an int for most attributes; the rest of the value stays 0.
        (check((d.pointer_attribute)(Out::to(&mut value), number, address)).is_ok()).then_some(value as i32)
    };
    let (kind, managed, device) = (attribute(2), attribute(8), attribute(9));
    let kind = if managed == Some(1) { 3 } else { kind.unwrap_or(0) };
    let host_pointer = if kind == 2 { 0 } else { address };
    PointerAttributes {
        kind,
        device: device.unwrap_or(-2),
        device_pointer: if kind == 0 { 0 } else { address },
        host_pointer,
    }
}

/// Unlike in the driver, an allocation of 0 bytes succeeds.
fn allocate(
    bytes: usize,
    address: Out<DevicePointer>,
    allocate: impl FnOnce(Out<DevicePointer>) -> i32,
) -> Result<(), CuError> {
    match bytes {
        0 if address.is_null() => Err(CuError::INVALID_VALUE),
        0 => {
            write(address.address(), 0, 0usize);
            Ok(())
        }
        _ => check(allocate(address)),
    }
}
