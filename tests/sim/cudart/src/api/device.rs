//! Devices.

use std::ffi::c_int;

use sim_abi::{
    cuda::{CuError, Device, check},
    ffi::{Out, write},
};

use super::runtime_api;
use crate::{driver::Driver, state};

runtime_api! { without_context:
    fn cudaDriverGetVersion(d; version: Out<i32>) {
        check((d.driver_version)(version))
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
        check((d.context_synchronize)())
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

/// Fills the members of cudaDeviceProp at whose place versions 12 and 13 agree; the caller's others stay as they are.
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
    // Offset, CUdevice_attribute, whether the member is a size_t.
    for (offset, number, wide) in [
        (296, 8, true),   // sharedMemPerBlock
        (304, 12, false), // regsPerBlock
        (308, 10, false), // warpSize
        (312, 11, true),  // memPitch
        (320, 1, false),  // maxThreadsPerBlock
        (324, 2, false),  // maxThreadsDim
        (328, 3, false),
        (332, 4, false),
        (336, 5, false), // maxGridSize
        (340, 6, false),
        (344, 7, false),
        (352, 9, true),   // totalConstMem
        (360, 75, false), // major
        (364, 76, false), // minor
        (368, 14, true),  // textureAlignment
    ] {
        match wide {
            true => write(at + offset, 0, attribute(number)? as usize),
            false => write::<c_int>(at + offset, 0, attribute(number)?),
        }
    }
    // Version 12 has deviceOverlap in front of multiProcessorCount.
    let multiprocessors = if super::VERSION < 13000 { 388 } else { 384 };
    write::<c_int>(at + multiprocessors, 0, attribute(16)?);
    Ok(())
}
