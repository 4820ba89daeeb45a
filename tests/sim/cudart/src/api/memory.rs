//! Memory.

use sim_abi::{
    cuda::{CuError, Device, DevicePointer, StreamHandle, check},
    ffi::{Out, write},
};

use super::runtime_api;
use crate::driver::Driver;

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
