//! Kernels that programs register for their host functions (`__cudaRegisterFatBinary` and others,
//! which nvcc's code in every program calls), and their loading into each context at first use. As
//! in the real runtime, a kernel is that of a library (CUkernel), which has no name as a function.

use std::{
    collections::HashMap,
    ffi::CString,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sim_abi::{
    cuda::{ContextHandle, CuError, FunctionHandle, ModuleHandle, check},
    ffi::{In, Out, Text},
};

use crate::driver::Driver;

/// The wrapper that a program registers: magic, version, the image, unused.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Wrapper {
    magic: u32,
    version: u32,
    image: usize,
    unused: usize,
}

const WRAPPER_MAGIC: u32 = 0x466243b1;

#[derive(Default)]
struct Registry {
    /// By handle: the image's address.
    binaries: HashMap<usize, usize>,
    next_binary: usize,
    /// By host function: the binary and the kernel's name.
    kernels: HashMap<usize, (usize, Arc<CString>)>,
    modules: HashMap<(ContextHandle, usize), ModuleHandle>,
    functions: HashMap<(ContextHandle, usize), FunctionHandle>,
}

static REGISTRY: Mutex<Option<Registry>> = Mutex::new(None);

struct Guard(MutexGuard<'static, Option<Registry>>);

impl Guard {
    fn registry(&mut self) -> &mut Registry {
        self.0.get_or_insert_default()
    }
}

fn lock() -> Guard {
    Guard(REGISTRY.lock().unwrap_or_else(PoisonError::into_inner))
}

/// __cudaRegisterFatBinary: a handle for the binary.
pub(crate) fn register_binary(wrapper: In<Wrapper>) -> usize {
    let image = wrapper.get().ok().filter(|wrapper| wrapper.magic == WRAPPER_MAGIC).map_or(0, |wrapper| wrapper.image);
    let mut guard = lock();
    let registry = guard.registry();
    registry.next_binary += 1;
    // Callers only pass it back, so it need not be an address. It is aligned like one in case
    // somebody checks.
    let handle = registry.next_binary * 16;
    registry.binaries.insert(handle, image);
    handle
}

/// __cudaUnregisterFatBinary.
pub(crate) fn unregister_binary(handle: usize) {
    let mut guard = lock();
    let registry = guard.registry();
    registry.binaries.remove(&handle);
    let gone: Vec<_> =
        registry.kernels.iter().filter(|(_, (binary, _))| *binary == handle).map(|(host, _)| *host).collect();
    for host in gone {
        registry.kernels.remove(&host);
        registry.functions.retain(|(_, function), _| *function != host);
    }
}

/// __cudaRegisterFunction.
pub(crate) fn register_function(binary: usize, host: usize, name: Text) {
    if let Some(name) = name.get().ok().and_then(|name| CString::new(name).ok()) {
        lock().registry().kernels.insert(host, (binary, Arc::new(name)));
    }
}

/// The kernel of a host function in the current context.
pub(crate) fn function(driver: &Driver, host: usize) -> Result<FunctionHandle, CuError> {
    let mut context = 0;
    check((driver.context_current)(Out::to(&mut context)))?;
    let mut guard = lock();
    let registry = guard.registry();
    if let Some(function) = registry.functions.get(&(context, host)) {
        return Ok(*function);
    }
    let (binary, name) = registry.kernels.get(&host).cloned().ok_or(CuError::INVALID_DEVICE_FUNCTION)?;
    let image = registry.binaries.get(&binary).copied().filter(|image| *image != 0).ok_or(CuError::INVALID_IMAGE)?;
    let module = match registry.modules.get(&(context, binary)) {
        Some(module) => *module,
        None => {
            let mut module = 0;
            let image = In::from_address(image);
            check((driver.library_load)(Out::to(&mut module), image, 0, 0, 0, 0, 0, 0))?;
            registry.modules.insert((context, binary), module);
            module
        }
    };
    let mut function = 0;
    check((driver.library_kernel)(Out::to(&mut function), module, Text::borrowed(&name)))
        .map_err(|_| CuError::INVALID_DEVICE_FUNCTION)?;
    registry.functions.insert((context, host), function);
    Ok(function)
}
