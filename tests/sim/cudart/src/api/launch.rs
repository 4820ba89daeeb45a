//! Registration of kernels and their launch.

use std::{ffi::c_char, hint::black_box};

use sim_abi::{
    cuda::{CuError, FunctionHandle, LaunchConfig, StreamHandle, check},
    ffi::{In, Out, Text},
};

use super::runtime_api;
use crate::{
    driver::{self, Driver},
    fatbin,
    state::{self, Configuration, Dim3},
};

runtime_api! { with_context:
    ptsz cudaLaunchKernel_ptsz fn cudaLaunchKernel(
        d; function: usize, grid: Dim3, block: Dim3, params: usize, shared_bytes: usize, stream: StreamHandle
    ) {
        launch(d, fatbin::function(d, function)?, Configuration { grid, block, shared_bytes, stream }, params)
    }

    ptsz __cudaLaunchKernel_ptsz fn __cudaLaunchKernel(
        d; kernel: usize, grid: Dim3, block: Dim3, params: usize, shared_bytes: usize, stream: StreamHandle
    ) {
        launch(d, fatbin::function(d, kernel)?, Configuration { grid, block, shared_bytes, stream }, params)
    }

    ptsz cudaLaunchCooperativeKernel_ptsz fn cudaLaunchCooperativeKernel(
        d; function: usize, grid: Dim3, block: Dim3, params: usize, shared_bytes: usize, stream: StreamHandle
    ) {
        let function = fatbin::function(d, function)?;
        let shared = u32::try_from(shared_bytes).map_err(|_| CuError::INVALID_VALUE)?;
        check((d.launch_cooperative)(
            function, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, stream, params,
        ))
    }

    ptsz cudaLaunchKernelExC_ptsz fn cudaLaunchKernelExC(
        d; config: In<RuntimeConfig>, function: usize, params: usize
    ) {
        let (function, config) = (fatbin::function(d, function)?, config.get()?);
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
        check((d.kernel_function)(function, fatbin::function(d, symbol)?))
    }

    fn cudaFuncGetName(d; name: Out<*const c_char>, function: usize) {
        check((d.kernel_name)(name, fatbin::function(d, function)?))
    }

    fn cudaFuncGetAttributes(d; attributes: Out<FunctionAttributes>, function: usize) {
        let function = fatbin::function(d, function)?;
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
        fatbin::function(d, function).map(drop)
    }

    fn cudaFuncSetCacheConfig(d; function: usize, _config: i32) {
        fatbin::function(d, function).map(drop)
    }

    fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        d; count: Out<i32>, function: usize, block_size: i32, shared_bytes: usize
    ) {
        check((d.occupancy)(count, fatbin::function(d, function)?, block_size, shared_bytes))
    }

    fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        d; count: Out<i32>, function: usize, block_size: i32, shared_bytes: usize, _flags: u32
    ) {
        check((d.occupancy)(count, fatbin::function(d, function)?, block_size, shared_bytes))
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
pub extern "C" fn __cudaRegisterFatBinary(wrapper: In<fatbin::Wrapper>) -> usize {
    black_box(fatbin::register_binary(wrapper))
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinaryEnd(_binary: usize) {}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaUnregisterFatBinary(binary: usize) {
    fatbin::unregister_binary(binary);
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
    fatbin::register_function(binary, host, name);
}

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
