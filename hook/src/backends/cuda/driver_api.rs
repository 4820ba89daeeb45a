//! Layer B: the driver API, for callers through the PLT, dlsym and cuGetProcAddress.

use std::ffi::c_uint;

use crate::{
    backends::cuda::{
        graphs::{GraphChange, capture_ending},
        launch::{What, by_driver},
    },
    interpose::hooked::hooked,
    runtime::{
        abi::{DRIVER_NOT_FOUND, Data, DriverLaunchConfig, GraphExec, Kernel, STREAM_PER_THREAD, Stream},
        os::thread_state::{IN_DRIVER, IN_HOOK},
    },
};

/// The stream for an argument of a `_ptsz` function.
pub fn ptsz(stream: Stream) -> usize {
    if stream.is_null() { STREAM_PER_THREAD } else { stream as usize }
}

/// The stream of a launch configuration.
pub fn stream_of(config: *const DriverLaunchConfig) -> Stream {
    // SAFETY: null, or the head of the caller's configuration, which is valid during the call.
    unsafe { config.as_ref() }.map_or(std::ptr::null_mut(), |config| config.stream)
}

hooked! {
    library Driver, mark IN_DRIVER, bypass IN_DRIVER | IN_HOOK, missing DRIVER_NOT_FOUND;

    cuLaunchKernel(function: Kernel, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint, stream: Stream, parameters: Data, extra: Data)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(function as usize), stream as usize);
    cuLaunchKernel_ptsz(function: Kernel, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint, stream: Stream, parameters: Data, extra: Data)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(function as usize), ptsz(stream));
    cuLaunchKernelEx(config: *const DriverLaunchConfig, function: Kernel, parameters: Data, extra: Data)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(function as usize), stream_of(config) as usize);
    cuLaunchKernelEx_ptsz(config: *const DriverLaunchConfig, function: Kernel, parameters: Data, extra: Data)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(function as usize), ptsz(stream_of(config)));
    cuLaunchCooperativeKernel(function: Kernel, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: Stream, parameters: Data)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(function as usize), stream as usize);
    cuLaunchCooperativeKernel_ptsz(function: Kernel, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: Stream, parameters: Data)
        => |recorder, site| by_driver(recorder, site.inside, What::Kernel(function as usize), ptsz(stream));
    cuGraphLaunch(graph: GraphExec, stream: Stream)
        => |recorder, site| by_driver(recorder, site.inside, What::Graph(graph as usize), stream as usize);
    cuGraphLaunch_ptsz(graph: GraphExec, stream: Stream)
        => |recorder, site| by_driver(recorder, site.inside, What::Graph(graph as usize), ptsz(stream));

    // Changes of graphs. Only the first two arguments of an instantiation matter, and all its forms
    // share them. If a name was looked up for another form, the other arguments pass through
    // unchanged.
    cuStreamEndCapture(stream: Stream, graph: *mut Data) => |_, _| capture_ending(stream as usize, graph as usize);
    cuStreamEndCapture_ptsz(stream: Stream, graph: *mut Data) => |_, _| capture_ending(ptsz(stream), graph as usize);
    cuGraphInstantiate | cuGraphInstantiate_v2 | cuGraphInstantiateWithFlags | cuGraphInstantiateWithParams
        | cuGraphInstantiateWithParams_ptsz(exec: *mut GraphExec, graph: Data, third: Data, fourth: Data, fifth: usize)
        => |_, _| GraphChange::Instantiated { graph: graph as usize, exec: exec as usize };
    cuGraphExecUpdate | cuGraphExecUpdate_v2(exec: GraphExec, graph: Data, third: Data, fourth: Data)
        => |_, _| GraphChange::Updated { exec: exec as usize, graph: graph as usize };
    cuGraphClone(to: *mut Data, from: Data) => |_, _| GraphChange::Cloned { from: from as usize, to: to as usize };
    cuGraphAddChildGraphNode(node: *mut Data, graph: Data, after: Data, count: usize, child: Data)
        => |_, _| GraphChange::Added { child: child as usize, graph: graph as usize };
    cuGraphDestroy(graph: Data) => |_, _| GraphChange::GraphGone(graph as usize);
    cuGraphExecDestroy(exec: GraphExec) => |_, _| GraphChange::ExecGone(exec as usize);
}
