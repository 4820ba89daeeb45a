//! Launches of AMD and MetaX, whose runtime is the lowest layer. They count like the driver's
//! launches of NVIDIA.

use std::ffi::{c_int, c_uint, c_void};

use xpu_timer_proto::ring::header;

use crate::{
    backends::cuda::{
        driver_api::{self, ptsz},
        graphs::{GraphChange, capture_ending},
        launch::{What, by_driver},
        runtime_api::stream_of,
    },
    interpose::hooked::hooked,
    runtime::{
        abi::{Data, Dim3, DriverLaunchConfig, GraphExec, Kernel, RUNTIME_NOT_FOUND, RuntimeLaunchConfig, Stream},
        os::{
            clock,
            thread_state::{self, IN_COLLECTIVES, IN_DRIVER, IN_HOOK},
        },
        recorder::Recorder,
    },
};

/// The host stub of a kernel.
type Stub = *const c_void;

/// A kernel with an unknown stream. It gets no events, which on another stream would wait for other
/// work.
fn count_only(recorder: &'static Recorder, inside: u8) {
    if inside & IN_COLLECTIVES == 0 {
        recorder.launched(thread_state::current(), header::KERNELS, clock::coarse_now_ns());
    }
}

hooked! {
    library Runtime, mark IN_DRIVER, bypass IN_DRIVER | IN_HOOK, missing RUNTIME_NOT_FOUND;

    hipLaunchKernel | mcLaunchKernel(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(stub as usize), stream as usize);
    hipLaunchKernel_spt(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(stub as usize), ptsz(stream));
    hipLaunchCooperativeKernel | mcLaunchCooperativeKernel(stub: Stub, grid: Dim3, block: Dim3, arguments: Data,
        shared: usize, stream: Stream)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(stub as usize), stream as usize);
    hipLaunchCooperativeKernel_spt(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(stub as usize), ptsz(stream));
    hipExtLaunchKernel(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream, before: Data,
        after: Data, flags: c_int)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(stub as usize), stream as usize);
    hipLaunchKernelExC | mcLaunchKernelExC(config: *const RuntimeLaunchConfig, stub: Stub, arguments: Data)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(stub as usize), stream_of(config) as usize);
    hipModuleLaunchKernel | mcModuleLaunchKernel(function: Kernel, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint,
        by: c_uint, bz: c_uint, shared: c_uint, stream: Stream, parameters: Data, extra: Data)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(function as usize), stream as usize);
    // Its configuration has the layout of CUDA's.
    hipDrvLaunchKernelEx(config: *const DriverLaunchConfig, function: Kernel, parameters: Data, extra: Data)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(function as usize), driver_api::stream_of(config) as usize);
    // The layout of its configuration is unknown, so the stream is not read.
    mcModuleLaunchKernelEx(config: Data, function: Kernel, parameters: Data, extra: Data)
        => |recorder, site| count_only(recorder, site.inside);
    hipModuleLaunchCooperativeKernel(function: Kernel, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: Stream, parameters: Data)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(function as usize), stream as usize);
    hipExtModuleLaunchKernel(function: Kernel, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        shared: usize, stream: Stream, parameters: Data, extra: Data, before: Data, after: Data, flags: c_uint)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(function as usize), stream as usize);
    hipGraphLaunch | mcGraphLaunch(graph: GraphExec, stream: Stream)
        => |recorder, site| by_driver(recorder, site.inside, What::Graph(graph as usize), stream as usize);
    hipGraphLaunch_spt(graph: GraphExec, stream: Stream)
        => |recorder, site| by_driver(recorder, site.inside, What::Graph(graph as usize), ptsz(stream));

    hipStreamEndCapture | mcStreamEndCapture(stream: Stream, graph: *mut Data)
        => |_, _| capture_ending(stream as usize, graph as usize);
    hipStreamEndCapture_spt(stream: Stream, graph: *mut Data) => |_, _| capture_ending(ptsz(stream), graph as usize);
    hipGraphInstantiate | hipGraphInstantiateWithFlags | hipGraphInstantiateWithParams | mcGraphInstantiate
        | mcGraphInstantiateWithFlags(exec: *mut GraphExec, graph: Data, third: Data, fourth: Data, fifth: usize)
        => |_, _| GraphChange::Instantiated { graph: graph as usize, exec: exec as usize };
    hipGraphExecUpdate | mcGraphExecUpdate(exec: GraphExec, graph: Data, third: Data, fourth: Data)
        => |_, _| GraphChange::Updated { exec: exec as usize, graph: graph as usize };
    hipGraphClone | mcGraphClone(to: *mut Data, from: Data)
        => |_, _| GraphChange::Cloned { from: from as usize, to: to as usize };
    hipGraphAddChildGraphNode | mcGraphAddChildGraphNode(node: *mut Data, graph: Data, after: Data, count: usize, child: Data)
        => |_, _| GraphChange::Added { child: child as usize, graph: graph as usize };
    hipGraphDestroy | mcGraphDestroy(graph: Data) => |_, _| GraphChange::GraphGone(graph as usize);
    hipGraphExecDestroy | mcGraphExecDestroy(exec: GraphExec) => |_, _| GraphChange::ExecGone(exec as usize);
}
