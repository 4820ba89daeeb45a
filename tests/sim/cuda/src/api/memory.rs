//! Memory: allocation, copies, fills, and the attributes of addresses.

use std::sync::Arc;

use sim_abi::{
    cuda::{ContextHandle, CuError, DevicePointer, StreamHandle},
    ffi::{self, Out},
};

use super::driver_api;
use crate::{
    capture,
    context::Context,
    memory::{self, Kind},
    queue::Work,
    stream::Stream,
};

/// The legacy and the per-thread default stream, for the synchronous functions and their `_ptds`
/// forms.
const LEGACY: StreamHandle = 0;
const OWN: StreamHandle = sim_abi::cuda::STREAM_PER_THREAD;

driver_api! { call:
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        free.set_if_wanted(memory::free_bytes(Context::current()?.device));
        total.set_if_wanted(memory::TOTAL_BYTES);
        Ok(())
    }

    since 3020 fn cuMemAlloc_v2(address: Out<DevicePointer>, bytes: usize) {
        allocate(address, bytes, Kind::Device)
    }

    fn cuMemAllocManaged(address: Out<DevicePointer>, bytes: usize, _flags: u32) {
        allocate(address, bytes, Kind::Managed)
    }

    fn cuMemAllocPitch_v2(address: Out<DevicePointer>, pitch: Out<usize>, width: usize, height: usize, _element: u32) {
        let row = width.next_multiple_of(512);
        pitch.set(row)?;
        allocate(address, row * height, Kind::Device)
    }

    since 3020 fn cuMemFree_v2(address: DevicePointer) {
        if address == 0 {
            return Ok(());
        }
        capture::check_permitted()?;
        // As in the real driver, memory is not freed under running kernels: this waits for the
        // device.
        Context::current()?.synchronize();
        memory::free(address)
    }

    fn cuMemAllocHost_v2(address: Out<DevicePointer>, bytes: usize) {
        allocate(address, bytes, Kind::Host)
    }

    fn cuMemHostAlloc(address: Out<DevicePointer>, bytes: usize, _flags: u32) {
        allocate(address, bytes, Kind::Host)
    }

    fn cuMemFreeHost(address: DevicePointer) {
        capture::check_permitted()?;
        Context::current()?.synchronize();
        memory::free(address)
    }

    fn cuMemHostRegister_v2(address: DevicePointer, bytes: usize, _flags: u32) {
        memory::register(address, bytes, Context::current()?.device)
    }

    fn cuMemHostUnregister(address: DevicePointer) {
        memory::unregister(address)
    }

    fn cuMemHostGetDevicePointer_v2(device: Out<DevicePointer>, host: DevicePointer, _flags: u32) {
        memory::find(host).ok_or(CuError::INVALID_VALUE)?;
        Ok(device.set(host)?)
    }

    since 11020 ptsz cuMemAllocAsync_ptsz(stream) fn cuMemAllocAsync(
        address: Out<DevicePointer>, bytes: usize, stream: StreamHandle
    ) {
        let stream = Stream::find(stream)?;
        Ok(address.set(memory::allocate(bytes, Kind::Device, stream.context.device)?)?)
    }

    since 11020 ptsz cuMemFreeAsync_ptsz(stream) fn cuMemFreeAsync(address: DevicePointer, stream: StreamHandle) {
        memory::find(address).ok_or(CuError::INVALID_VALUE)?;
        Stream::find(stream)?.submit(Work::Free(address))
    }

    fn cuMemGetAddressRange_v2(base: Out<DevicePointer>, bytes: Out<usize>, address: DevicePointer) {
        let block = memory::find(address).ok_or(CuError::NOT_FOUND)?;
        base.set_if_wanted(block.address);
        bytes.set_if_wanted(block.size);
        Ok(())
    }

    fn cuPointerGetAttribute(data: Out<u64>, attribute: i32, address: DevicePointer) {
        let block = memory::find(address).ok_or(CuError::INVALID_VALUE)?;
        match attribute {
            // Memory type: host 1, device 2.
            2 => Ok(to_int(data).set(if matches!(block.kind, Kind::Device | Kind::Managed) { 2 } else { 1 })?),
            // Device pointer, host pointer.
            3 | 4 => Ok(data.set(address as u64)?),
            // Is managed.
            8 => Ok(to_int(data).set(i32::from(block.kind == Kind::Managed))?),
            // Device ordinal.
            9 => Ok(to_int(data).set(block.device)?),
            // Range start and size.
            11 => Ok(data.set(block.address as u64)?),
            12 => Ok(data.set(block.size as u64)?),
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    fn cuMemcpy(to: DevicePointer, from: DevicePointer, bytes: usize) { copy_now(to, from, bytes, LEGACY) }
    fn cuMemcpy_ptds(to: DevicePointer, from: DevicePointer, bytes: usize) { copy_now(to, from, bytes, OWN) }
    fn cuMemcpyHtoD_v2(to: DevicePointer, from: DevicePointer, bytes: usize) { copy_now(to, from, bytes, LEGACY) }
    fn cuMemcpyHtoD_v2_ptds(to: DevicePointer, from: DevicePointer, bytes: usize) { copy_now(to, from, bytes, OWN) }
    fn cuMemcpyDtoH_v2(to: DevicePointer, from: DevicePointer, bytes: usize) { copy_now(to, from, bytes, LEGACY) }
    fn cuMemcpyDtoH_v2_ptds(to: DevicePointer, from: DevicePointer, bytes: usize) { copy_now(to, from, bytes, OWN) }
    fn cuMemcpyDtoD_v2(to: DevicePointer, from: DevicePointer, bytes: usize) { copy_now(to, from, bytes, LEGACY) }
    fn cuMemcpyDtoD_v2_ptds(to: DevicePointer, from: DevicePointer, bytes: usize) { copy_now(to, from, bytes, OWN) }

    ptsz cuMemcpyAsync_ptsz(stream) fn cuMemcpyAsync(
        to: DevicePointer, from: DevicePointer, bytes: usize, stream: StreamHandle
    ) { copy_async(to, from, bytes, stream) }
    ptsz cuMemcpyHtoDAsync_v2_ptsz(stream) fn cuMemcpyHtoDAsync_v2(
        to: DevicePointer, from: DevicePointer, bytes: usize, stream: StreamHandle
    ) { copy_async(to, from, bytes, stream) }
    ptsz cuMemcpyDtoHAsync_v2_ptsz(stream) fn cuMemcpyDtoHAsync_v2(
        to: DevicePointer, from: DevicePointer, bytes: usize, stream: StreamHandle
    ) { copy_async(to, from, bytes, stream) }
    ptsz cuMemcpyDtoDAsync_v2_ptsz(stream) fn cuMemcpyDtoDAsync_v2(
        to: DevicePointer, from: DevicePointer, bytes: usize, stream: StreamHandle
    ) { copy_async(to, from, bytes, stream) }
    ptsz cuMemcpyPeerAsync_ptsz(stream) fn cuMemcpyPeerAsync(
        to: DevicePointer, _to_context: ContextHandle, from: DevicePointer, _from_context: ContextHandle,
        bytes: usize, stream: StreamHandle
    ) { copy_async(to, from, bytes, stream) }

    fn cuMemsetD8_v2(to: DevicePointer, value: u8, count: usize) { run_now(fill(to, value.into(), 1, count), LEGACY) }
    fn cuMemsetD8_v2_ptds(to: DevicePointer, value: u8, count: usize) { run_now(fill(to, value.into(), 1, count), OWN) }
    fn cuMemsetD16_v2(to: DevicePointer, value: u16, count: usize) { run_now(fill(to, value.into(), 2, count), LEGACY) }
    fn cuMemsetD16_v2_ptds(to: DevicePointer, value: u16, count: usize) { run_now(fill(to, value.into(), 2, count), OWN) }
    fn cuMemsetD32_v2(to: DevicePointer, value: u32, count: usize) { run_now(fill(to, value, 4, count), LEGACY) }
    fn cuMemsetD32_v2_ptds(to: DevicePointer, value: u32, count: usize) { run_now(fill(to, value, 4, count), OWN) }

    ptsz cuMemsetD8Async_ptsz(stream) fn cuMemsetD8Async(
        to: DevicePointer, value: u8, count: usize, stream: StreamHandle
    ) { Stream::find(stream)?.submit(fill(to, value.into(), 1, count)) }
    ptsz cuMemsetD16Async_ptsz(stream) fn cuMemsetD16Async(
        to: DevicePointer, value: u16, count: usize, stream: StreamHandle
    ) { Stream::find(stream)?.submit(fill(to, value.into(), 2, count)) }
    ptsz cuMemsetD32Async_ptsz(stream) fn cuMemsetD32Async(
        to: DevicePointer, value: u32, count: usize, stream: StreamHandle
    ) { Stream::find(stream)?.submit(fill(to, value, 4, count)) }
}

fn allocate(address: Out<DevicePointer>, bytes: usize, kind: Kind) -> Result<(), CuError> {
    let device = Context::current()?.device;
    capture::check_permitted()?;
    Ok(address.set(memory::allocate(bytes, kind, device)?)?)
}

fn fill(to: DevicePointer, value: u32, width: usize, count: usize) -> Work {
    Work::Fill { to, value, width, count }
}

/// The pointer as one to an `int`, the type of most attributes.
fn to_int(data: Out<u64>) -> Out<i32> {
    data.cast()
}

/// cuMemcpyAsync. Like the real driver, this reads pageable host memory before it returns, and
/// writes to it before it returns.
fn copy_async(to: usize, from: usize, count: usize, stream: StreamHandle) -> Result<(), CuError> {
    let stream = Stream::find(stream)?;
    if count == 0 {
        return Ok(());
    }
    if to == 0 || from == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    if memory::find(from).is_none() {
        let bytes: Arc<[u8]> = ffi::bytes(from, count).into();
        stream.submit(Work::Write { to, bytes })?;
    } else {
        stream.submit(Work::Copy { to, from, count })?;
    }
    if memory::find(to).is_none() && stream.capture().is_none() {
        stream.queue.wait(stream.queue.last());
    }
    Ok(())
}

/// Puts work into a default stream and waits for it.
fn run_now(work: Work, stream: StreamHandle) -> Result<(), CuError> {
    let stream = Stream::find(stream)?;
    if stream.is_legacy() {
        stream.check_legacy_permitted()?;
    }
    capture::check_permitted()?;
    stream.submit(work)?;
    stream.queue.wait(stream.queue.last());
    Ok(())
}

/// cuMemcpy and its variants.
fn copy_now(to: usize, from: usize, count: usize, stream: StreamHandle) -> Result<(), CuError> {
    if count == 0 {
        return Ok(());
    }
    if to == 0 || from == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    run_now(Work::Copy { to, from, count }, stream)
}
