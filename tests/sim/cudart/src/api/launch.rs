//! Registration of kernels and their launch.
//!
//! Programs register kernels for their host functions (`__cudaRegisterFatBinary` and others, which
//! nvcc's code in every program calls). They are loaded into each context at first use. As in the
//! real runtime, a kernel is that of a library (CUkernel), which has no name as a function.

use std::{
    collections::HashMap,
    ffi::{CString, c_char},
    hint::black_box,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sim_abi::{
    cuda::{ContextHandle, CuError, FunctionHandle, LaunchConfig, ModuleHandle, StreamHandle, check},
    ffi::{In, Out, Text},
};

use super::runtime_api;
use crate::{
    driver::{self, Driver},
    state::{self, Configuration, Dim3},
};

runtime_api! { with_context:
    ptsz cudaLaunchKernel_ptsz fn cudaLaunchKernel(
        d; function: usize, grid: Dim3, block: Dim3, params: usize, shared_bytes: usize, stream: StreamHandle
    ) {
        launch(d, kernel_of(d, function)?, Configuration { grid, block, shared_bytes, stream }, params)
    }

    ptsz __cudaLaunchKernel_ptsz fn __cudaLaunchKernel(
        d; kernel: usize, grid: Dim3, block: Dim3, params: usize, shared_bytes: usize, stream: StreamHandle
    ) {
        launch(d, kernel_of(d, kernel)?, Configuration { grid, block, shared_bytes, stream }, params)
    }

    ptsz cudaLaunchCooperativeKernel_ptsz fn cudaLaunchCooperativeKernel(
        d; function: usize, grid: Dim3, block: Dim3, params: usize, shared_bytes: usize, stream: StreamHandle
    ) {
        let function = kernel_of(d, function)?;
        let shared = u32::try_from(shared_bytes).map_err(|_| CuError::INVALID_VALUE)?;
        check((d.launch_cooperative)(
            function, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, stream, params,
        ))
    }

    ptsz cudaLaunchKernelExC_ptsz fn cudaLaunchKernelExC(
        d; config: In<RuntimeConfig>, function: usize, params: usize
    ) {
        let (function, config) = (kernel_of(d, function)?, config.get()?);
        let config = LaunchConfig {
            grid: [config.grid.x, config.grid.y, config.grid.z],
            block: [config.block.x, config.block.y, config.block.z],
            shared_bytes: u32::try_from(config.shared_bytes).map_err(|_| CuError::INVALID_VALUE)?,
            stream: config.stream,
            attributes: config.attributes,
            attribute_count: config.attribute_count,
        };
        check((d.launch_ex)(In::from(&config), function, params, 0))
    }

    ptsz cudaLaunchHostFunc_ptsz fn cudaLaunchHostFunc(d; stream: StreamHandle, function: usize, data: usize) {
        check((d.launch_host)(stream, function, data))
    }

    fn cudaGetFuncBySymbol(d; function: Out<FunctionHandle>, symbol: usize) {
        check((d.kernel_function)(function, kernel_of(d, symbol)?))
    }

    fn cudaFuncGetName(d; name: Out<*const c_char>, function: usize) {
        check((d.kernel_name)(name, kernel_of(d, function)?))
    }

    fn cudaFuncGetAttributes(d; attributes: Out<FunctionAttributes>, function: usize) {
        let function = kernel_of(d, function)?;
        let attribute = |number| {
            let mut value = 0;
            check((d.function_attribute)(Out::to(&mut value), number, function)).map(|()| value)
        };
        let bytes = |number| attribute(number).map(|value| value as usize);
        Ok(attributes.set(FunctionAttributes {
            shared_bytes: bytes(1)?,
            constant_bytes: bytes(2)?,
            local_bytes: bytes(3)?,
            max_threads: attribute(0)?,
            registers: attribute(4)?,
            ptx_version: attribute(5)?,
            binary_version: attribute(6)?,
            cache_mode: attribute(7)?,
            max_dynamic_shared_bytes: attribute(8)?,
            others: [0; 24],
        })?)
    }

    fn cudaFuncSetAttribute(d; function: usize, _attribute: i32, _value: i32) {
        kernel_of(d, function).map(drop)
    }

    fn cudaFuncSetCacheConfig(d; function: usize, _config: i32) {
        kernel_of(d, function).map(drop)
    }

    fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        d; count: Out<i32>, function: usize, block_size: i32, shared_bytes: usize
    ) {
        check((d.occupancy)(count, kernel_of(d, function)?, block_size, shared_bytes))
    }

    fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        d; count: Out<i32>, function: usize, block_size: i32, shared_bytes: usize, _flags: u32
    ) {
        check((d.occupancy)(count, kernel_of(d, function)?, block_size, shared_bytes))
    }
}

/// cudaLaunchConfig_t.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RuntimeConfig {
    grid: Dim3,
    block: Dim3,
    shared_bytes: usize,
    stream: StreamHandle,
    attributes: usize,
    attribute_count: u32,
}

/// cudaFuncAttributes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FunctionAttributes {
    shared_bytes: usize,
    constant_bytes: usize,
    local_bytes: usize,
    max_threads: i32,
    registers: i32,
    ptx_version: i32,
    binary_version: i32,
    cache_mode: i32,
    max_dynamic_shared_bytes: i32,
    others: [i32; 24],
}

fn launch(d: &Driver, function: FunctionHandle, launch: Configuration, params: usize) -> Result<(), CuError> {
    let Configuration { grid, block, shared_bytes, stream } = launch;
    let shared = u32::try_from(shared_bytes).map_err(|_| CuError::INVALID_VALUE)?;
    check((d.launch)(function, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, stream, params, 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaPushCallConfiguration(
    grid: Dim3,
    block: Dim3,
    shared_bytes: usize,
    stream: StreamHandle,
) -> i32 {
    state::push_configuration(Configuration { grid, block, shared_bytes, stream });
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaPopCallConfiguration(
    grid: Out<Dim3>,
    block: Out<Dim3>,
    shared_bytes: Out<usize>,
    stream: Out<StreamHandle>,
) -> i32 {
    state::call("__cudaPopCallConfiguration", || {
        let configuration = state::pop_configuration()?;
        grid.set(configuration.grid)?;
        block.set(configuration.block)?;
        shared_bytes.set(configuration.shared_bytes)?;
        Ok(stream.set(configuration.stream)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinary(wrapper: In<Wrapper>) -> usize {
    black_box(register_binary(wrapper))
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinaryEnd(_binary: usize) {}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaUnregisterFatBinary(binary: usize) {
    unregister_binary(binary);
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub extern "C" fn __cudaRegisterFunction(
    binary: usize,
    host: usize,
    _device: usize,
    name: Text,
    _threads: i32,
    _thread_index: usize,
    _block_index: usize,
    _block: usize,
    _grid: usize,
    _warp_size: usize,
) {
    register_function(binary, host, name);
}

/// Kernels are simulated by their duration, so none of them reads a variable of the device.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub extern "C" fn __cudaRegisterVar(
    _binary: usize,
    _host: usize,
    _device: usize,
    _name: Text,
    _external: i32,
    _bytes: usize,
    _constant: i32,
    _global: i32,
) {
}

/// 1: the module is initialized.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaInitModule(_binary: usize) -> u8 {
    1
}

/// nvcc 13 calls it before `__cudaLaunchKernel`: the kernel of a host function, which is the
/// function itself here.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaGetKernel(kernel: Out<usize>, host: usize) -> i32 {
    state::call("__cudaGetKernel", || {
        driver::legacy()?;
        Ok(kernel.set(host)?)
    })
}

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
fn register_binary(wrapper: In<Wrapper>) -> usize {
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
fn unregister_binary(handle: usize) {
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
fn register_function(binary: usize, host: usize, name: Text) {
    if let Some(name) = name.get().ok().and_then(|name| CString::new(name).ok()) {
        lock().registry().kernels.insert(host, (binary, Arc::new(name)));
    }
}

/// The kernel of a host function in the current context.
fn kernel_of(driver: &Driver, host: usize) -> Result<FunctionHandle, CuError> {
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
