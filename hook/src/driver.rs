//! Layer B: the driver API, for callers through the PLT, through dlsym and through cuGetProcAddress.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::{
    abi::{DRIVER_NOT_FOUND, Data, DriverLaunchConfig, GraphExec, Kernel, STREAM_PER_THREAD, Stream},
    graphs::{Change, ending},
    hooked::hooked,
    launch::{What, by_driver},
    lookup,
    thread_state::{IN_DRIVER, IN_HOOK},
};

/// What NULL means to a `_ptsz` function.
pub fn ptsz(stream: Stream) -> usize {
    if stream.is_null() { STREAM_PER_THREAD } else { stream as usize }
}

/// Stream of a launch configuration.
pub fn stream_of(config: *const DriverLaunchConfig) -> Stream {
    // SAFETY: null, or the caller's configuration, whose head this is; it stays valid for the call.
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

    // What a graph holds. Of an instantiation only the first two arguments matter, which all its forms have in common; asked for
    // by a name that stands for another form, the others pass through untouched.
    cuStreamEndCapture(stream: Stream, graph: *mut Data) => |_, _| ending(stream as usize, graph as usize);
    cuStreamEndCapture_ptsz(stream: Stream, graph: *mut Data) => |_, _| ending(ptsz(stream), graph as usize);
    cuGraphInstantiate | cuGraphInstantiate_v2 | cuGraphInstantiateWithFlags | cuGraphInstantiateWithParams
        | cuGraphInstantiateWithParams_ptsz(exec: *mut GraphExec, graph: Data, third: Data, fourth: Data, fifth: usize)
        => |_, _| Change::Instantiated { graph: graph as usize, exec: exec as usize };
    cuGraphExecUpdate | cuGraphExecUpdate_v2(exec: GraphExec, graph: Data, third: Data, fourth: Data)
        => |_, _| Change::Updated { exec: exec as usize, graph: graph as usize };
    cuGraphClone(to: *mut Data, from: Data) => |_, _| Change::Cloned { from: from as usize, to: to as usize };
    cuGraphAddChildGraphNode(node: *mut Data, graph: Data, after: Data, count: usize, child: Data)
        => |_, _| Change::Added { child: child as usize, graph: graph as usize };
    cuGraphDestroy(graph: Data) => |_, _| Change::GraphGone(graph as usize);
    cuGraphExecDestroy(exec: GraphExec) => |_, _| Change::ExecGone(exec as usize);
}

/// The two forms of cuGetProcAddress; the look-ups, which start nothing and record nothing.
pub mod get_proc_address {
    use super::*;
    use xpu_timer_proto::family::Library;

    use crate::{
        hooked::around_lookup,
        original::{Function, SLOTS, Wrapper},
    };

    type GetV1 = unsafe extern "C-unwind" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int;
    type GetV2 = unsafe extern "C-unwind" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

    /// The form of CUDA 11.3.
    pub static V1: Function = Function::new(c"cuGetProcAddress", Library::Driver, WRAPPERS_V1);
    /// The form of CUDA 12.
    pub static V2: Function = Function::new(c"cuGetProcAddress_v2", Library::Driver, WRAPPERS_V2);

    const WRAPPERS_V1: [Wrapper; SLOTS] = [
        Wrapper(cuGetProcAddress as *const ()),
        Wrapper(v1::<1> as *const ()),
        Wrapper(v1::<2> as *const ()),
        Wrapper(v1::<3> as *const ()),
    ];
    const WRAPPERS_V2: [Wrapper; SLOTS] = [
        Wrapper(cuGetProcAddress_v2 as *const ()),
        Wrapper(v2::<1> as *const ()),
        Wrapper(v2::<2> as *const ()),
        Wrapper(v2::<3> as *const ()),
    ];

    unsafe extern "C-unwind" fn v1<const SLOT: usize>(
        symbol: *const c_char,
        out: *mut *mut c_void,
        version: c_int,
        flags: u64,
    ) -> c_int {
        let real = V1.real(SLOT);
        if real.is_null() {
            return DRIVER_NOT_FOUND;
        }
        // SAFETY: the original of this row has this type.
        let real = unsafe { std::mem::transmute::<*mut c_void, GetV1>(real) };
        around_lookup(
            &V1,
            // SAFETY: the call succeeded, so both pointers were valid.
            || unsafe { lookup::wrap_result(symbol, out, version, flags) },
            // SAFETY: the caller's own arguments.
            || unsafe { real(symbol, out, version, flags) },
        )
    }

    unsafe extern "C-unwind" fn v2<const SLOT: usize>(
        symbol: *const c_char,
        out: *mut *mut c_void,
        version: c_int,
        flags: u64,
        status: *mut c_int,
    ) -> c_int {
        let real = V2.real(SLOT);
        if real.is_null() {
            return DRIVER_NOT_FOUND;
        }
        // SAFETY: the original of this row has this type.
        let real = unsafe { std::mem::transmute::<*mut c_void, GetV2>(real) };
        around_lookup(
            &V2,
            // SAFETY: the call succeeded, so both pointers were valid.
            || unsafe { lookup::wrap_result(symbol, out, version, flags) },
            // SAFETY: the caller's own arguments.
            || unsafe { real(symbol, out, version, flags, status) },
        )
    }

    /// Exported.
    #[allow(non_snake_case)]
    #[cfg_attr(not(test), unsafe(no_mangle))]
    pub unsafe extern "C-unwind" fn cuGetProcAddress(
        symbol: *const c_char,
        out: *mut *mut c_void,
        version: c_int,
        flags: u64,
    ) -> c_int {
        // SAFETY: the caller's own arguments.
        unsafe { v1::<0>(symbol, out, version, flags) }
    }

    /// Exported.
    #[allow(non_snake_case)]
    #[cfg_attr(not(test), unsafe(no_mangle))]
    pub unsafe extern "C-unwind" fn cuGetProcAddress_v2(
        symbol: *const c_char,
        out: *mut *mut c_void,
        version: c_int,
        flags: u64,
        status: *mut c_int,
    ) -> c_int {
        // SAFETY: the caller's own arguments.
        unsafe { v2::<0>(symbol, out, version, flags, status) }
    }

    /// The rows of the look-ups.
    pub static FUNCTIONS: &[&Function] = &[&V1, &V2];
}
