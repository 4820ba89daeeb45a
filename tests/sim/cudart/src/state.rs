//! The state of a thread: its device, its last error, its pushed launch configurations.

use std::{
    cell::{Cell, RefCell},
    hint::black_box,
    mem::ManuallyDrop,
};

use sim_abi::{
    cuda::{ContextHandle, CuError, Device, StreamHandle, check, code},
    ffi::Out,
    trace,
};

use crate::driver::{self, Driver};

thread_local! {
    /// Any code except success: "not ready" is stored like an error.
    static LAST_ERROR: Cell<i32> = const { Cell::new(0) };
    static DEVICE: Cell<Device> = const { Cell::new(0) };
    /// Never dropped: libraries make calls from their destructors, after the thread-local values of
    /// a thread have been dropped.
    static CONFIGURATIONS: RefCell<ManuallyDrop<Vec<Configuration>>> =
        const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// The arguments of `<<<…>>>`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Configuration {
    pub(crate) grid: Dim3,
    pub(crate) block: Dim3,
    pub(crate) shared_bytes: usize,
    pub(crate) stream: StreamHandle,
}

/// dim3.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Dim3 {
    pub(crate) x: u32,
    pub(crate) y: u32,
    pub(crate) z: u32,
}

/// The frame of an exported function: stores the error and traces.
#[inline]
pub(crate) fn call(name: &str, body: impl FnOnce() -> Result<(), CuError>) -> i32 {
    let code = code(body());
    if code != 0 {
        LAST_ERROR.set(code);
    }
    trace::returned(name, code);
    // Keeps the caller's frame on the stack: a tail call would hide the function in which a thread
    // blocks.
    black_box(code)
}

/// cudaPeekAtLastError, and with `take` cudaGetLastError.
pub(crate) fn last_error(take: bool) -> i32 {
    if take { LAST_ERROR.replace(0) } else { LAST_ERROR.get() }
}

/// The thread's device: that of its context, else the one that it set.
pub(crate) fn device() -> Result<Device, CuError> {
    let driver = driver::legacy()?;
    let mut device = 0;
    match (driver.context_device)(Out::to(&mut device)) {
        0 => Ok(device),
        _ => Ok(DEVICE.get()),
    }
}

/// cudaSetDevice: since CUDA 12 it also creates the primary context and makes it current.
pub(crate) fn set_device(device: Device) -> Result<(), CuError> {
    let driver = driver::legacy()?;
    let mut count = 0;
    check((driver.device_count)(Out::to(&mut count)))?;
    if !(0..count).contains(&device) {
        return Err(CuError::INVALID_DEVICE);
    }
    DEVICE.set(device);
    make_primary_current(driver, device)
}

/// Calls that need a context create it: this gives a new thread the context of device 0.
pub(crate) fn with_context(driver: &'static Driver) -> Result<&'static Driver, CuError> {
    let mut context: ContextHandle = 0;
    check((driver.context_current)(Out::to(&mut context)))?;
    if context == 0 {
        make_primary_current(driver, DEVICE.get())?;
    }
    Ok(driver)
}

fn make_primary_current(driver: &Driver, device: Device) -> Result<(), CuError> {
    let mut context = 0;
    // The runtime retains a primary context once and keeps it; the driver returns the same one in
    // either case.
    check((driver.primary_retain)(Out::to(&mut context), device))?;
    check((driver.context_set_current)(context))
}

/// __cudaPushCallConfiguration.
pub(crate) fn push_configuration(configuration: Configuration) {
    CONFIGURATIONS.with_borrow_mut(|stack| stack.push(configuration));
}

/// __cudaPopCallConfiguration.
pub(crate) fn pop_configuration() -> Result<Configuration, CuError> {
    CONFIGURATIONS.with_borrow_mut(|stack| stack.pop()).ok_or(CuError::INVALID_VALUE)
}
