//! Copies and allocations of the runtime API: counted, never bracketed.
//!
//! How often a function was called is in the coverage table; what is counted here besides are the directions and the bytes.

use std::ffi::{c_int, c_uint, c_void};

use crate::{
    abi::{Data, RUNTIME_NOT_FOUND, SUCCESS, Stream},
    hooked::{After, hooked},
    recorder::Recorder,
    thread_state::{IN_COLLECTIVES, IN_HOOK, IN_RUNTIME},
};

/// Where an allocation's address goes.
type Out = *mut *mut c_void;

/// A copy that may succeed.
struct Copy {
    kind: c_int,
    bytes: usize,
}

impl After for Copy {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if result == SUCCESS {
            // A negative number is no direction.
            recorder.copied(usize::try_from(self.kind).unwrap_or(usize::MAX), self.bytes as u64);
        }
    }
}

/// An allocation that may succeed.
struct Allocation(usize);

impl After for Allocation {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if result == SUCCESS {
            recorder.allocated(self.0 as u64);
        }
    }
}

hooked! {
    library Runtime, mark IN_RUNTIME, bypass IN_RUNTIME | IN_COLLECTIVES | IN_HOOK, missing RUNTIME_NOT_FOUND;

    cudaMemcpyAsync | cudaMemcpyAsync_ptsz | mcMemcpyAsync | hipMemcpyAsync
        | hipMemcpyAsync_spt | hipMemcpyWithStream(to: Data, from: Data, bytes: usize, kind: c_int,
        stream: Stream) => |_, _| Copy { kind, bytes };
    cudaMalloc | mcMalloc | hipMalloc(out: Out, bytes: usize) => |_, _| Allocation(bytes);
    cudaMallocHost | mcMallocHost(out: Out, bytes: usize) => |_, _| Allocation(bytes);
    cudaHostAlloc | mcHostAlloc | hipHostMalloc(out: Out, bytes: usize, flags: c_uint) => |_, _| Allocation(bytes);
    cudaMallocAsync | cudaMallocAsync_ptsz | mcMallocAsync | hipMallocAsync(out: Out, bytes: usize, stream: Stream)
        => |_, _| Allocation(bytes);
    cudaMallocFromPoolAsync | cudaMallocFromPoolAsync_ptsz | hipMallocFromPoolAsync(out: Out, bytes: usize, pool: Data,
        stream: Stream) => |_, _| Allocation(bytes);
    cudaFree | mcFree | hipFree(address: Data) => |_, _| ();
    cudaFreeAsync | cudaFreeAsync_ptsz | mcFreeAsync | hipFreeAsync(address: Data, stream: Stream) => |_, _| ();
}
