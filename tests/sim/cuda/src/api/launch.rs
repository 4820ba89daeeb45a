//! Modules, libraries, functions and launches.

use std::{ffi::CStr, sync::Arc};

use sim_abi::{
    cuda::{CuError, FunctionHandle, LaunchConfig, ModuleHandle, StreamHandle, launch_buffer},
    ffi::{In, Out, Text},
};

use super::driver_api;
use crate::{
    context::Context,
    module::{FUNCTIONS, Function, Module},
    queue::Work,
    stream::{self, Stream},
};

driver_api! { call:
    fn cuModuleLoad(module: Out<ModuleHandle>, path: Text) {
        Context::current()?;
        let mut image = std::fs::read(path.get()?).map_err(|_| CuError::FILE_NOT_FOUND)?;
        // A text ends with NUL, and `begins_with` needs no more of an image.
        image.push(0);
        Ok(module.set(Module::load(In::from_slice(&image))?)?)
    }

    fn cuModuleLoadData(module: Out<ModuleHandle>, image: In<u8>) {
        Context::current()?;
        Ok(module.set(Module::load(image)?)?)
    }

    fn cuModuleLoadDataEx(module: Out<ModuleHandle>, image: In<u8>, _count: u32, _options: usize, _values: usize) {
        Context::current()?;
        Ok(module.set(Module::load(image)?)?)
    }

    fn cuModuleLoadFatBinary(module: Out<ModuleHandle>, image: In<u8>) {
        Context::current()?;
        Ok(module.set(Module::load(image)?)?)
    }

    fn cuModuleUnload(module: ModuleHandle) {
        Module::unload(module)
    }

    fn cuModuleGetFunction(function: Out<FunctionHandle>, module: ModuleHandle, name: Text) {
        Ok(function.set(Module::function(module, &name.get()?)?)?)
    }

    since 12000 fn cuLibraryLoadData(
        library: Out<ModuleHandle>,
        image: In<u8>,
        _jit_options: usize,
        _jit_values: usize,
        _jit_count: u32,
        _options: usize,
        _values: usize,
        _count: u32
    ) {
        Ok(library.set(Module::load(image)?)?)
    }

    since 12000 fn cuLibraryUnload(library: ModuleHandle) {
        Module::unload(library)
    }

    since 12000 fn cuLibraryGetKernel(kernel: Out<FunctionHandle>, library: ModuleHandle, name: Text) {
        Ok(kernel.set(Module::function(library, &name.get()?)? + OF_LIBRARY)?)
    }

    since 12000 fn cuLibraryGetModule(module: Out<ModuleHandle>, library: ModuleHandle) {
        Ok(module.set(library)?)
    }

    since 12000 fn cuKernelGetFunction(function: Out<FunctionHandle>, kernel: FunctionHandle) {
        let found = kernel.wrapping_sub(OF_LIBRARY);
        FUNCTIONS.get(found).ok_or(CuError::INVALID_HANDLE)?;
        Ok(function.set(found)?)
    }

    since 12030 fn cuKernelGetName(name: Out<*const CStrByte>, kernel: FunctionHandle) {
        Ok(name.set(name_of(kernel.wrapping_sub(OF_LIBRARY))?)?)
    }

    since 12030 fn cuFuncGetName(name: Out<*const CStrByte>, function: FunctionHandle) {
        Ok(name.set(name_of(function)?)?)
    }

    fn cuFuncGetModule(module: Out<ModuleHandle>, function: FunctionHandle) {
        Ok(module.set(find(function)?.module)?)
    }

    fn cuFuncGetAttribute(value: Out<i32>, attribute: i32, function: FunctionHandle) {
        find(function)?;
        // Threads of a block, registers, PTX and binary version; the others are 0.
        Ok(value.set(match attribute { 0 => 1024, 4 => 32, 5 | 6 => 90, _ => 0 })?)
    }

    fn cuFuncSetAttribute(function: FunctionHandle, _attribute: i32, _value: i32) {
        find(function).map(drop)
    }

    fn cuFuncSetCacheConfig(function: FunctionHandle, _config: i32) {
        find(function).map(drop)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        count: Out<i32>, function: FunctionHandle, block_size: i32, _shared_bytes: usize
    ) {
        find(function)?;
        Ok(count.set((2048 / block_size.max(1)).min(32))?)
    }

    since 4000 ptsz cuLaunchKernel_ptsz(stream) fn cuLaunchKernel(
        function: FunctionHandle,
        grid_x: u32, grid_y: u32, grid_z: u32,
        block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32,
        stream: StreamHandle,
        _params: usize,
        extra: In<usize>
    ) {
        let config = LaunchConfig {
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared_bytes,
            stream,
            attributes: 0,
            attribute_count: 0,
        };
        launch(function, &config, extra)
    }

    since 9000 ptsz cuLaunchCooperativeKernel_ptsz(stream) fn cuLaunchCooperativeKernel(
        function: FunctionHandle,
        grid_x: u32, grid_y: u32, grid_z: u32,
        block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32,
        stream: StreamHandle,
        _params: usize
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let config = LaunchConfig { grid, block, shared_bytes, stream, attributes: 0, attribute_count: 0 };
        launch(function, &config, In::null())
    }

    since 11060 fn cuLaunchKernelEx(config: In<LaunchConfig>, function: FunctionHandle, _params: usize, extra: In<usize>) {
        launch(function, &config.get()?, extra)
    }

    since 11060 fn cuLaunchKernelEx_ptsz(config: In<LaunchConfig>, function: FunctionHandle, _params: usize, extra: In<usize>) {
        let config = config.get()?;
        launch(function, &LaunchConfig { stream: stream::per_thread(config.stream), ..config }, extra)
    }
}

/// A byte of a C string that is owned by the function that it names.
type CStrByte = std::ffi::c_char;

/// A kernel of a library (CUkernel) has the handle of its function plus this. A launch and the
/// attributes accept both handles, as the real driver does; each name has its own function.
const OF_LIBRARY: FunctionHandle = 1;

/// The function of either handle.
fn find(handle: FunctionHandle) -> Result<Arc<Function>, CuError> {
    let of_library = || FUNCTIONS.get(handle.wrapping_sub(OF_LIBRARY));
    FUNCTIONS.get(handle).or_else(of_library).ok_or(CuError::INVALID_HANDLE)
}

/// The name lives as long as the function, which its module keeps.
fn name_of(function: FunctionHandle) -> Result<*const CStrByte, CuError> {
    let function = FUNCTIONS.get(function).ok_or(CuError::INVALID_HANDLE)?;
    Ok(CStr::as_ptr(&function.name))
}

/// Launches a kernel. `params` is ignored: only host kernels have parameters, from `extra`.
fn launch(function: FunctionHandle, config: &LaunchConfig, extra: In<usize>) -> Result<(), CuError> {
    let function = find(function)?;
    if config.grid.contains(&0)
        || config.block.contains(&0)
        || config.block.iter().map(|n| u64::from(*n)).product::<u64>() > 1024
    {
        return Err(CuError::INVALID_VALUE);
    }
    let arguments = match extra.is_null() {
        true => None,
        false => Some(launch_buffer(extra).ok_or(CuError::INVALID_VALUE)?.into()),
    };
    let stream = Stream::find(config.stream)?;
    function.load();
    stream.submit(Work::Kernel { function, arguments, fault: None })
}
