//! Layer C: the runtime API, for launches whose driver call cannot be seen.

use std::ffi::c_void;

use crate::{
    backends::cuda::{
        driver_api::ptsz,
        launch::{What, by_runtime},
    },
    interpose::hooked::hooked,
    runtime::{
        abi::{Data, Dim3, GraphExec, RUNTIME_NOT_FOUND, RuntimeLaunchConfig, Stream},
        os::thread_state::{IN_COLLECTIVES, IN_HOOK, IN_RUNTIME},
    },
};

/// The host stub of a kernel.
type Stub = *const c_void;

/// The stream of a launch configuration.
pub fn stream_of(config: *const RuntimeLaunchConfig) -> Stream {
    // SAFETY: null, or the head of the caller's configuration, which is valid during the call.
    unsafe { config.as_ref() }.map_or(std::ptr::null_mut(), |config| config.stream)
}

hooked! {
    library Runtime, mark IN_RUNTIME, bypass IN_RUNTIME | IN_COLLECTIVES | IN_HOOK, missing RUNTIME_NOT_FOUND;

    cudaLaunchKernel(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |_, _| by_runtime(What::Kernel(stub as usize), stream as usize);
    cudaLaunchKernel_ptsz(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |_, _| by_runtime(What::Kernel(stub as usize), ptsz(stream));
    __cudaLaunchKernel(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |_, _| by_runtime(What::Kernel(stub as usize), stream as usize);
    __cudaLaunchKernel_ptsz(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |_, _| by_runtime(What::Kernel(stub as usize), ptsz(stream));
    cudaLaunchCooperativeKernel(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |_, _| by_runtime(What::Kernel(stub as usize), stream as usize);
    cudaLaunchCooperativeKernel_ptsz(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize,
        stream: Stream)
        => |_, _| by_runtime(What::Kernel(stub as usize), ptsz(stream));
    cudaLaunchKernelExC(config: *const RuntimeLaunchConfig, stub: Stub, arguments: Data)
        => |_, _| by_runtime(What::Kernel(stub as usize), stream_of(config) as usize);
    cudaLaunchKernelExC_ptsz(config: *const RuntimeLaunchConfig, stub: Stub, arguments: Data)
        => |_, _| by_runtime(What::Kernel(stub as usize), ptsz(stream_of(config)));
    cudaGraphLaunch(graph: GraphExec, stream: Stream)
        => |_, _| by_runtime(What::Graph(graph as usize), stream as usize);
    cudaGraphLaunch_ptsz(graph: GraphExec, stream: Stream)
        => |_, _| by_runtime(What::Graph(graph as usize), ptsz(stream));
}
