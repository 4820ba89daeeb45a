//! The functions of CUDA, and of AMD and MetaX, that launch kernels and graphs, change graphs or
//! destroy contexts.
//!
//! Each launch counts exactly once, whichever layers see it. The driver layer counts, because every
//! launch passes it and it knows the kernel. The runtime layer counts launches that the driver
//! layer did not see. A launch inside a collective is part of that collective, and only its stream
//! is recorded.

use std::ffi::{c_int, c_uint, c_void};

use xpu_timer_proto::{
    ring::{detail, header},
    v1::{Op, OpKind},
};

use crate::{
    backends::{
        bracket::{self, OpenOperation},
        cuda::{
            attention,
            graphs::{self, GraphChange, capture_ending},
        },
    },
    interpose::hooked::{AfterCall, Site, hooked},
    runtime::{
        abi::{
            DRIVER_NOT_FOUND, Data, Dim3, DriverLaunchConfig, GraphExec, Kernel, RUNTIME_NOT_FOUND,
            RuntimeLaunchConfig, STREAM_PER_THREAD, SUCCESS, Stream,
        },
        contexts::{self, WatcherOutside},
        os::{
            clock,
            thread_state::{self, IN_BLAS, IN_COLLECTIVES, IN_DRIVER, IN_HOOK, IN_RUNTIME, ThreadState},
        },
        recorder::{
            NewOperation, Recorder,
            names::{ATTENTION, AttentionKernel},
        },
    },
};

/// The stream for an argument of a `_ptsz` function.
fn ptsz(stream: Stream) -> usize {
    if stream.is_null() { STREAM_PER_THREAD } else { stream as usize }
}

/// The stream of a launch configuration of the driver.
fn driver_stream(config: *const DriverLaunchConfig) -> Stream {
    // SAFETY: null, or the head of the caller's configuration, which is valid during the call.
    unsafe { config.as_ref() }.map_or(std::ptr::null_mut(), |config| config.stream)
}

// Layer B: the driver API, for callers through the PLT, dlsym and cuGetProcAddress.
hooked! {
    library Driver, mark IN_DRIVER, bypass IN_DRIVER | IN_HOOK, missing DRIVER_NOT_FOUND;

    cuLaunchKernel(function: Kernel, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint, stream: Stream, parameters: Data, extra: Data)
        => |recorder, site| with_config(recorder, [gx, gy, gz], [bx, by, bz],
            kernel_launched(recorder, site.inside, function, parameters, stream as usize));
    cuLaunchKernel_ptsz(function: Kernel, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint, stream: Stream, parameters: Data, extra: Data)
        => |recorder, site| with_config(recorder, [gx, gy, gz], [bx, by, bz],
            kernel_launched(recorder, site.inside, function, parameters, ptsz(stream)));
    cuLaunchKernelEx(config: *const DriverLaunchConfig, function: Kernel, parameters: Data, extra: Data)
        => |recorder, site| with_driver_config(recorder, config,
            kernel_launched(recorder, site.inside, function, parameters, driver_stream(config) as usize));
    cuLaunchKernelEx_ptsz(config: *const DriverLaunchConfig, function: Kernel, parameters: Data, extra: Data)
        => |recorder, site| with_driver_config(recorder, config,
            kernel_launched(recorder, site.inside, function, parameters, ptsz(driver_stream(config))));
    cuLaunchCooperativeKernel(function: Kernel, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: Stream, parameters: Data)
        => |recorder, site| with_config(recorder, [gx, gy, gz], [bx, by, bz],
            kernel_launched(recorder, site.inside, function, parameters, stream as usize));
    cuLaunchCooperativeKernel_ptsz(function: Kernel, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: Stream, parameters: Data)
        => |recorder, site| with_config(recorder, [gx, gy, gz], [bx, by, bz],
            kernel_launched(recorder, site.inside, function, parameters, ptsz(stream)));
    cuGraphLaunch(graph: GraphExec, stream: Stream)
        => |recorder, site| graph_launched(recorder, site.inside, graph as usize, stream as usize);
    cuGraphLaunch_ptsz(graph: GraphExec, stream: Stream)
        => |recorder, site| graph_launched(recorder, site.inside, graph as usize, ptsz(stream));

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

/// The host stub of a kernel.
type Stub = *const c_void;

/// The stream of a launch configuration of the runtime.
fn runtime_stream(config: *const RuntimeLaunchConfig) -> Stream {
    // SAFETY: null, or the head of the caller's configuration, which is valid during the call.
    unsafe { config.as_ref() }.map_or(std::ptr::null_mut(), |config| config.stream)
}

// Layer C: the runtime API, for launches whose driver call cannot be seen.
hooked! {
    library Runtime, mark IN_RUNTIME, bypass IN_RUNTIME | IN_COLLECTIVES | IN_HOOK, missing RUNTIME_NOT_FOUND;

    cudaLaunchKernel(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |_, _| by_runtime(Launch::Kernel(stub as usize), stream as usize);
    cudaLaunchKernel_ptsz(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |_, _| by_runtime(Launch::Kernel(stub as usize), ptsz(stream));
    __cudaLaunchKernel(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |_, _| by_runtime(Launch::Kernel(stub as usize), stream as usize);
    __cudaLaunchKernel_ptsz(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |_, _| by_runtime(Launch::Kernel(stub as usize), ptsz(stream));
    cudaLaunchCooperativeKernel(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |_, _| by_runtime(Launch::Kernel(stub as usize), stream as usize);
    cudaLaunchCooperativeKernel_ptsz(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize,
        stream: Stream)
        => |_, _| by_runtime(Launch::Kernel(stub as usize), ptsz(stream));
    cudaLaunchKernelExC(config: *const RuntimeLaunchConfig, stub: Stub, arguments: Data)
        => |_, _| by_runtime(Launch::Kernel(stub as usize), runtime_stream(config) as usize);
    cudaLaunchKernelExC_ptsz(config: *const RuntimeLaunchConfig, stub: Stub, arguments: Data)
        => |_, _| by_runtime(Launch::Kernel(stub as usize), ptsz(runtime_stream(config)));
    cudaGraphLaunch(graph: GraphExec, stream: Stream)
        => |_, _| by_runtime(Launch::Graph(graph as usize), stream as usize);
    cudaGraphLaunch_ptsz(graph: GraphExec, stream: Stream)
        => |_, _| by_runtime(Launch::Graph(graph as usize), ptsz(stream));
}

/// A kernel with an unknown stream. It gets no events, which on another stream would wait for other
/// work.
fn count_only(recorder: &'static Recorder, inside: u8) {
    if inside & IN_COLLECTIVES == 0 {
        recorder.launched(thread_state::current(), header::KERNELS, clock::coarse_now_ns());
    }
}

// Launches of AMD and MetaX, whose runtime is the lowest layer. They count like the driver's
// launches of NVIDIA.
hooked! {
    library Runtime, mark IN_DRIVER, bypass IN_DRIVER | IN_HOOK, missing RUNTIME_NOT_FOUND;

    hipLaunchKernel | mcLaunchKernel(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |recorder, site| with_config(recorder, grid.sizes(), block.sizes(),
            by_driver(recorder, site.inside, Launch::Kernel(stub as usize), stream as usize));
    hipLaunchKernel_spt(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |recorder, site| with_config(recorder, grid.sizes(), block.sizes(),
            by_driver(recorder, site.inside, Launch::Kernel(stub as usize), ptsz(stream)));
    hipLaunchCooperativeKernel | mcLaunchCooperativeKernel(stub: Stub, grid: Dim3, block: Dim3, arguments: Data,
        shared: usize, stream: Stream)
        => |recorder, site| with_config(recorder, grid.sizes(), block.sizes(),
            by_driver(recorder, site.inside, Launch::Kernel(stub as usize), stream as usize));
    hipLaunchCooperativeKernel_spt(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream)
        => |recorder, site| with_config(recorder, grid.sizes(), block.sizes(),
            by_driver(recorder, site.inside, Launch::Kernel(stub as usize), ptsz(stream)));
    hipExtLaunchKernel(stub: Stub, grid: Dim3, block: Dim3, arguments: Data, shared: usize, stream: Stream, before: Data,
        after: Data, flags: c_int)
        => |recorder, site| with_config(recorder, grid.sizes(), block.sizes(),
            by_driver(recorder, site.inside, Launch::Kernel(stub as usize), stream as usize));
    hipLaunchKernelExC | mcLaunchKernelExC(config: *const RuntimeLaunchConfig, stub: Stub, arguments: Data)
        => |recorder, site| with_runtime_config(recorder, config,
            by_driver(recorder, site.inside, Launch::Kernel(stub as usize), runtime_stream(config) as usize));
    hipModuleLaunchKernel | mcModuleLaunchKernel(function: Kernel, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint,
        by: c_uint, bz: c_uint, shared: c_uint, stream: Stream, parameters: Data, extra: Data)
        => |recorder, site| with_config(recorder, [gx, gy, gz], [bx, by, bz],
            by_driver(recorder, site.inside, Launch::Kernel(function as usize), stream as usize));
    // Its configuration has the layout of CUDA's.
    hipDrvLaunchKernelEx(config: *const DriverLaunchConfig, function: Kernel, parameters: Data, extra: Data)
        => |recorder, site| with_driver_config(recorder, config,
            by_driver(recorder, site.inside, Launch::Kernel(function as usize), driver_stream(config) as usize));
    // The layout of its configuration is unknown, so the stream is not read.
    mcModuleLaunchKernelEx(config: Data, function: Kernel, parameters: Data, extra: Data)
        => |recorder, site| count_only(recorder, site.inside);
    hipModuleLaunchCooperativeKernel(function: Kernel, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: Stream, parameters: Data)
        => |recorder, site| with_config(recorder, [gx, gy, gz], [bx, by, bz],
            by_driver(recorder, site.inside, Launch::Kernel(function as usize), stream as usize));
    // Its grid is in threads.
    hipExtModuleLaunchKernel(function: Kernel, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        shared: usize, stream: Stream, parameters: Data, extra: Data, before: Data, after: Data, flags: c_uint)
        => |recorder, site| with_config(recorder, [gx / bx.max(1), gy / by.max(1), gz / bz.max(1)], [bx, by, bz],
            by_driver(recorder, site.inside, Launch::Kernel(function as usize), stream as usize));
    hipGraphLaunch | mcGraphLaunch(graph: GraphExec, stream: Stream)
        => |recorder, site| graph_launched(recorder, site.inside, graph as usize, stream as usize);
    hipGraphLaunch_spt(graph: GraphExec, stream: Stream)
        => |recorder, site| graph_launched(recorder, site.inside, graph as usize, ptsz(stream));

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

/// The object that a call launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Launch {
    /// A kernel, by its handle.
    Kernel(usize),
    /// An instantiated graph.
    Graph(usize),
}

/// The operation that a launch begins, before its launch configuration is known.
#[derive(Clone, Copy)]
enum Launched {
    /// Nothing, like most launches.
    Counted,
    /// An operation.
    Operation(OpenOperation),
    /// A part of the collectives that the thread is launching on a stream.
    InCollective(usize),
}

impl From<Option<OpenOperation>> for Launched {
    #[inline(always)]
    fn from(open: Option<OpenOperation>) -> Self {
        open.map_or(Launched::Counted, Launched::Operation)
    }
}

impl Launched {
    #[inline(always)]
    fn operation(self) -> Option<OpenOperation> {
        if let Launched::Operation(open) = self { Some(open) } else { None }
    }
}

/// The launch of a kernel whose arguments are known.
#[inline]
fn kernel_launched(
    recorder: &'static Recorder,
    inside: u8,
    function: Kernel,
    parameters: Data,
    stream: usize,
) -> Launched {
    match ATTENTION.find(function as u64) {
        Some(kernel) => attention_launched(recorder, inside, (function, kernel), parameters, stream),
        None => by_driver(recorder, inside, Launch::Kernel(function as usize), stream),
    }
}

#[inline(never)]
fn attention_launched(
    recorder: &'static Recorder,
    inside: u8,
    (function, kernel): (Kernel, AttentionKernel),
    parameters: Data,
    stream: usize,
) -> Launched {
    let counted = || by_driver(recorder, inside, Launch::Kernel(function as usize), stream);
    let (false, Some(what)) = (inside & IN_COLLECTIVES != 0, attention::timed(recorder, kernel, parameters)) else {
        return counted();
    };
    let (thread, now) = (thread_state::current(), clock::coarse_now_ns());
    thread.seen_by_driver.set(true);
    recorder.on_stream(thread, stream, function as u64, now);
    recorder.launched(thread, header::KERNELS, now);
    bracket::open_unless_captured(recorder, &NewOperation { stream, function: function as u64, ..what }).into()
}

/// Adds its launch configuration to a kernel that gets events, or to the collective that it belongs
/// to. Most launches are neither.
#[inline(always)]
fn with_config(
    recorder: &'static Recorder,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    launched: Launched,
) -> Option<OpenOperation> {
    match launched {
        Launched::Counted => {}
        Launched::Operation(OpenOperation(index)) => recorder.set_launch_config(index, grid, block),
        Launched::InCollective(stream) => bracket::note_channels(recorder, stream, grid, block),
    }
    launched.operation()
}

#[inline(always)]
fn with_driver_config(
    recorder: &'static Recorder,
    config: *const DriverLaunchConfig,
    launched: Launched,
) -> Option<OpenOperation> {
    if let Launched::Counted = launched {
        return None;
    }
    // SAFETY: null, or the head of the caller's configuration, which is valid during the call.
    let config = unsafe { config.as_ref() };
    config.map_or(launched.operation(), |config| with_config(recorder, config.grid, config.block, launched))
}

#[inline(always)]
fn with_runtime_config(
    recorder: &'static Recorder,
    config: *const RuntimeLaunchConfig,
    launched: Launched,
) -> Option<OpenOperation> {
    if let Launched::Counted = launched {
        return None;
    }
    // SAFETY: null, or the head of the caller's configuration, which is valid during the call.
    let config = unsafe { config.as_ref() };
    let with =
        |config: &RuntimeLaunchConfig| with_config(recorder, config.grid.sizes(), config.block.sizes(), launched);
    config.map_or(launched.operation(), with)
}

/// A launch on the driver layer. One function for all wrappers with everything inlined into it,
/// because there are dozens of wrappers.
#[inline(never)]
fn by_driver(recorder: &'static Recorder, inside: u8, launch: Launch, stream: usize) -> Launched {
    let thread = thread_state::current();
    thread.seen_by_driver.set(true);
    if inside & IN_COLLECTIVES != 0 {
        recorder.on_stream(thread, stream, kernel(launch), clock::coarse_now_ns());
        bracket::note_kernel(recorder, stream, kernel(launch));
        return Launched::InCollective(stream);
    }
    count(recorder, thread, inside, launch, stream).into()
}

/// The launch of a graph, which has no launch configuration.
#[inline]
fn graph_launched(recorder: &'static Recorder, inside: u8, graph: usize, stream: usize) -> Option<OpenOperation> {
    by_driver(recorder, inside, Launch::Graph(graph), stream).operation()
}

/// A launch on the runtime layer.
#[inline]
fn by_runtime(launch: Launch, stream: usize) -> ByRuntime {
    thread_state::with(|thread| thread.seen_by_driver.set(false));
    ByRuntime { launch, stream }
}

/// A runtime launch. The driver layer may have seen it or not.
pub(crate) struct ByRuntime {
    launch: Launch,
    stream: usize,
}

impl AfterCall for ByRuntime {
    #[inline]
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if result == 0 && !thread_state::with(|thread| thread.seen_by_driver.get()) {
            // The host stub is not a driver function and has no name to request, so its handle is
            // not recorded.
            let now = clock::coarse_now_ns();
            let thread = thread_state::current();
            let counter = if matches!(self.launch, Launch::Kernel(_)) { header::KERNELS } else { header::GRAPHS };
            recorder.launched(thread, counter, now);
            recorder.on_stream(thread, self.stream, 0, now);
        }
    }
}

fn kernel(launch: Launch) -> u64 {
    match launch {
        Launch::Kernel(function) => function as u64,
        Launch::Graph(_) => 0,
    }
}

#[inline(always)]
fn count(
    recorder: &'static Recorder,
    thread: &ThreadState,
    inside: u8,
    launch: Launch,
    stream: usize,
) -> Option<OpenOperation> {
    let now = clock::coarse_now_ns();
    let communicates = recorder.on_stream(thread, stream, kernel(launch), now);
    match launch {
        Launch::Kernel(function) => {
            recorder.launched(thread, header::KERNELS, now);
            let bracketed = &recorder.bracketed;
            let is_wanted = bracketed.is_wanted(detail::KERNELS, || now);
            // A kernel that communicates is a collective without a host call.
            if !is_wanted && (!communicates || bracketed.is_off()) {
                return None;
            }
            // The kernels of a matrix product are timed together, as the product.
            if inside & IN_BLAS != 0 && (!is_wanted || bracketed.is_wanted(detail::MATMULS, || now)) {
                return None;
            }
            let what =
                NewOperation { stream, function: function as u64, ..NewOperation::new(OpKind::Kernel, Op::Kernel) };
            bracket::open_unless_captured(recorder, &what)
        }
        Launch::Graph(exec) => {
            recorder.launched(thread, header::GRAPHS, now);
            graphs::launch(recorder, exec, stream)
        }
    }
}

// The functions that destroy contexts: see `runtime::contexts`.

hooked! {
    library Driver, mark IN_DRIVER, bypass IN_HOOK, missing DRIVER_NOT_FOUND;

    cuCtxDestroy | cuCtxDestroy_v2(context: Data) => |recorder, _| Destruction::of(recorder, Ended::Context(context as usize));
    cuDevicePrimaryCtxReset | cuDevicePrimaryCtxReset_v2(device: c_int) => |recorder, _| Destruction::of(recorder, Ended::All);
    cuDevicePrimaryCtxRelease | cuDevicePrimaryCtxRelease_v2(device: c_int)
        => |recorder, site| Destruction::of(recorder, Ended::IfInactive { device, state: state_of(&site) });
}

hooked! {
    library Runtime, mark IN_RUNTIME, bypass IN_HOOK, missing RUNTIME_NOT_FOUND;

    hipCtxDestroy(context: Data) => |recorder, _| Destruction::of(recorder, Ended::All);
    hipDeviceReset | mcDeviceReset() => |recorder, _| Destruction::of(recorder, Ended::All);
}

/// `cuDevicePrimaryCtxGetState(device, flags*, active*)`.
type GetState = unsafe extern "C" fn(c_int, *mut c_uint, *mut c_int) -> c_int;

fn state_of(site: &Site) -> Option<GetState> {
    let address = site.companion(0, &[c"cuDevicePrimaryCtxGetState"])?;
    // SAFETY: the driver's function of this name has this type in its public ABI.
    Some(unsafe { std::mem::transmute::<*mut c_void, GetState>(address) })
}

/// The contexts that a successful call has ended.
enum Ended {
    /// The one at this address.
    Context(usize),
    /// The contexts of a device. The hook does not know them, so all contexts get a new generation.
    All,
    /// The contexts of a device, if that was the last reference to its primary context.
    IfInactive { device: c_int, state: Option<GetState> },
}

/// A call that may destroy contexts.
struct Destruction {
    ended: Ended,
    _outside: WatcherOutside,
}

impl Destruction {
    fn of(recorder: &'static Recorder, ended: Ended) -> Self {
        Destruction { ended, _outside: WatcherOutside::wait(recorder) }
    }
}

impl AfterCall for Destruction {
    fn after(self, _: &'static Recorder, result: c_int) {
        match self.ended {
            _ if result != SUCCESS => {}
            Ended::Context(address) => contexts::end(address),
            Ended::All => contexts::end_all(),
            Ended::IfInactive { device, state } => {
                let (mut flags, mut active) = (0, 0);
                // SAFETY: the places are those of this function.
                let known =
                    state.is_some_and(|state| unsafe { state(device, &raw mut flags, &raw mut active) } == SUCCESS);
                if !known || active == 0 {
                    contexts::end_all();
                }
            }
        }
    }
}
