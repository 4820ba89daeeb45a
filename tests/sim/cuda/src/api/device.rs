//! Initialization, errors, devices and contexts. The share of the device that a green context has
//! has no effect here.

use std::sync::{Arc, PoisonError, atomic::Ordering};

use sim_abi::{
    cuda::{CUDA_VERSION, ContextHandle, CuError, Device, StreamHandle, driver_name, error_text},
    ffi::{Handles, Out, Text},
};

use super::driver_api;
use crate::{
    capture,
    context::{self, Context},
    memory, process,
    stream::{self, NON_BLOCKING, Stream},
};

pub use any_time::ENTRIES as ANY_TIME;

/// Functions that work before `cuInit`.
mod any_time {
    use super::*;

    driver_api! { call_any_time:
        fn cuInit(flags: u32) {
            if flags != 0 {
                return Err(CuError::INVALID_VALUE);
            }
            process::initialize()
        }

        fn cuDriverGetVersion(version: Out<i32>) {
            Ok(version.set(CUDA_VERSION)?)
        }

        fn cuGetErrorName(error: i32, text: Out<Text>) {
            text.set(driver_name(error).unwrap_or(Text::null()))?;
            driver_name(error).map(drop).ok_or(CuError::INVALID_VALUE)
        }

        fn cuGetErrorString(error: i32, text: Out<Text>) {
            text.set(error_text(error).unwrap_or(Text::null()))?;
            error_text(error).map(drop).ok_or(CuError::INVALID_VALUE)
        }
    }
}

/// CUdevice_attribute numbers and their values on an H100-like device; all other attributes are 0.
const ATTRIBUTES: &[(i32, i32)] = &[
    (1, 1024), // threads of a block
    (2, 1024), // block x, y, z
    (3, 1024),
    (4, 64),
    (5, i32::MAX), // grid x, y, z
    (6, 65535),
    (7, 65535),
    (8, 49152),       // shared memory of a block
    (9, 65536),       // constant memory
    (10, 32),         // warp
    (11, i32::MAX),   // pitch
    (12, 65536),      // registers of a block
    (13, 1_980_000),  // clock, kHz
    (14, 512),        // texture alignment
    (15, 1),          // overlap
    (16, 132),        // multiprocessors
    (19, 1),          // can map host memory
    (31, 1),          // concurrent kernels
    (36, 2_619_000),  // memory clock, kHz
    (37, 5120),       // memory bus
    (38, 52_428_800), // L2
    (39, 2048),       // threads of a multiprocessor
    (40, 3),          // copy engines
    (41, 1),          // unified addressing
    (75, 9),          // compute capability
    (76, 0),
    (78, 1),       // stream priorities
    (81, 233_472), // shared memory of a multiprocessor
    (82, 65536),   // registers of a multiprocessor
    (83, 1),       // managed memory
    (95, 1),       // cooperative launch
    (97, 232_448), // shared memory of a block, opted in
    (106, 32),     // blocks of a multiprocessor
    (115, 1),      // memory pools
];

/// CU_DEVICE_ATTRIBUTE_PCI_BUS_ID.
const PCI_BUS_ID: i32 = 33;

driver_api! { call:
    fn cuDeviceGetCount(count: Out<i32>) {
        Ok(count.set(context::device_count())?)
    }

    fn cuDeviceGet(device: Out<Device>, ordinal: i32) {
        Ok(device.set(context::device(ordinal)?)?)
    }

    fn cuDeviceGetName(name: Out<u8>, length: i32, device: Device) {
        context::device(device)?;
        let text = b"Simulated device\0";
        for (index, byte) in text.iter().take(usize::try_from(length).unwrap_or(0)).enumerate() {
            name.at(index, *byte)?;
        }
        Ok(())
    }

    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: Device) {
        Ok(uuid.set(uuid_of(context::device(device)?))?)
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: Device) {
        Ok(uuid.set(uuid_of(context::device(device)?))?)
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: Device) {
        context::device(device)?;
        Ok(bytes.set(memory::TOTAL_BYTES)?)
    }

    fn cuDeviceGetAttribute(value: Out<i32>, attribute: i32, device: Device) {
        context::device(device)?;
        let known = ATTRIBUTES.iter().find(|(number, _)| *number == attribute).map_or(0, |(_, value)| *value);
        Ok(value.set(if attribute == PCI_BUS_ID { device + 1 } else { known })?)
    }

    fn cuDeviceGetPCIBusId(text: Out<u8>, length: i32, device: Device) {
        let id = format!("0000:{:02x}:00.0\0", context::device(device)? + 1);
        if usize::try_from(length).unwrap_or(0) < id.len() {
            return Err(CuError::INVALID_VALUE);
        }
        id.bytes().enumerate().try_for_each(|(index, byte)| text.at(index, byte))?;
        Ok(())
    }

    fn cuDeviceCanAccessPeer(can: Out<i32>, device: Device, peer: Device) {
        Ok(can.set(i32::from(context::device(device)? != context::device(peer)?))?)
    }

    fn cuDevicePrimaryCtxRetain(context: Out<ContextHandle>, device: Device) {
        Ok(context.set(Context::retain_primary(context::device(device)?).handle())?)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: Device) {
        Context::release_primary(context::device(device)?, false)
    }

    fn cuDevicePrimaryCtxReset_v2(device: Device) {
        Context::release_primary(context::device(device)?, true)
    }

    fn cuDevicePrimaryCtxGetState(device: Device, flags: Out<u32>, active: Out<i32>) {
        let (set, exists) = Context::primary_state(context::device(device)?);
        flags.set(set)?;
        Ok(active.set(i32::from(exists))?)
    }

    fn cuDevicePrimaryCtxSetFlags_v2(device: Device, flags: u32) {
        let context = Context::retain_primary(context::device(device)?);
        context.flags.store(flags, Ordering::Relaxed);
        Context::release_primary(device, false)
    }

    fn cuCtxCreate_v2(handle: Out<ContextHandle>, flags: u32, device: Device) {
        let context = Context::create(context::device(device)?, flags);
        handle.set(context.handle())?;
        context::push(context)
    }

    fn cuCtxDestroy_v2(handle: ContextHandle) {
        let context = Context::find(handle)?;
        context.destroy();
        // It is removed only from the top of this thread's stack. Elsewhere it stays, and using it
        // is an error.
        if let Ok(top) = context::pop() && top.handle() != handle {
            context::push(top)?;
        }
        Ok(())
    }

    fn cuCtxGetCurrent(handle: Out<ContextHandle>) {
        Ok(handle.set(Context::current().map_or(0, |context| context.handle()))?)
    }

    fn cuCtxSetCurrent(handle: ContextHandle) {
        context::set_current(match handle {
            0 => None,
            handle => Some(Context::find(handle)?),
        })
    }

    fn cuCtxPushCurrent_v2(handle: ContextHandle) {
        context::push(Context::find(handle)?)
    }

    fn cuCtxPopCurrent_v2(handle: Out<ContextHandle>) {
        let context = context::pop()?;
        handle.set_if_wanted(context.handle());
        Ok(())
    }

    fn cuCtxGetDevice(device: Out<Device>) {
        Ok(device.set(Context::current()?.device)?)
    }

    fn cuCtxGetFlags(flags: Out<u32>) {
        Ok(flags.set(Context::current()?.flags.load(Ordering::Relaxed))?)
    }

    since 12000 fn cuCtxGetId(handle: ContextHandle, id: Out<u64>) {
        let context = if handle == 0 { Context::current()? } else { Context::find(handle)? };
        Ok(id.set(context.id)?)
    }

    fn cuCtxGetApiVersion(_context: ContextHandle, version: Out<u32>) {
        Ok(version.set(3020)?)
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        least.set_if_wanted(stream::LEAST_PRIORITY);
        greatest.set_if_wanted(stream::GREATEST_PRIORITY);
        Ok(())
    }

    fn cuCtxGetLimit(value: Out<usize>, limit: u32) {
        let context = Context::current()?;
        let limits = context.limits.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(value.set(*limits.get(&limit).ok_or(CuError::NOT_SUPPORTED)?)?)
    }

    fn cuCtxSetLimit(limit: u32, value: usize) {
        Context::current()?.limits.lock().unwrap_or_else(PoisonError::into_inner).insert(limit, value);
        Ok(())
    }

    fn cuCtxSynchronize() {
        let context = Context::current()?;
        capture::check_permitted()?;
        context.synchronize();
        Ok(())
    }

    // Null is the current context.
    since 13000 fn cuCtxSynchronize_v2(context: ContextHandle) {
        let context = if context == 0 { Context::current()? } else { Context::find(context)? };
        capture::check_permitted()?;
        context.synchronize();
        Ok(())
    }

    fn cuCtxEnablePeerAccess(peer: ContextHandle, _flags: u32) {
        Context::find(peer).map(drop)
    }

    fn cuCtxDisablePeerAccess(peer: ContextHandle) {
        Context::find(peer).map(drop)
    }

    since 12040 fn cuGreenCtxCreate(green: Out<usize>, _resources: usize, number: Device, _flags: u32) {
        Ok(green.set(GREEN.insert(Arc::new(Green(Context::create_green(context::device(number)?)))))?)
    }

    since 12040 fn cuGreenCtxDestroy(green: usize) {
        let context = Arc::clone(&find_green(green)?.0);
        GREEN.remove(green);
        context.destroy();
        Context::release_primary(context.device, false)
    }

    since 12040 fn cuCtxFromGreenCtx(context: Out<ContextHandle>, green: usize) {
        Ok(context.set(find_green(green)?.0.handle())?)
    }

    since 12050 fn cuGreenCtxStreamCreate(stream: Out<StreamHandle>, green: usize, flags: u32, priority: i32) {
        if flags & NON_BLOCKING == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(stream.set(Stream::create(&find_green(green)?.0, flags, priority))?)
    }
}

/// A green context. Its handle is not the handle of a context.
struct Green(Arc<Context>);

static GREEN: Handles<Green> = Handles::new();

/// The handle of the green context with this context, 0 for none.
pub fn green_handle_of(context: &Arc<Context>) -> usize {
    let all = GREEN.all();
    all.iter().find(|green| Arc::ptr_eq(&green.0, context)).map_or(0, |green| Arc::as_ptr(green) as usize)
}

fn find_green(green: usize) -> Result<Arc<Green>, CuError> {
    GREEN.get(green).ok_or(CuError::INVALID_CONTEXT)
}

fn uuid_of(device: Device) -> [u8; 16] {
    let mut uuid = *b"simulated-dev-00";
    uuid[15] = device as u8;
    uuid
}
