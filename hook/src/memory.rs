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

impl After for Option<Copy> {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if let Some(copy) = self {
            copy.after(recorder, result);
        }
    }
}

/// A copy of rows, or of layers of rows, by its sizes in bytes and numbers.
fn copy_of(kind: c_int, sizes: [usize; 3]) -> Copy {
    Copy { kind, bytes: sizes.into_iter().fold(1, usize::saturating_mul) }
}

/// Direction of a copy between devices.
const BETWEEN_DEVICES: c_int = 3;

/// An end of a copy of layers: an array, whose elements have a size that nobody says here, or an address.
#[repr(C)]
pub struct End {
    array: *const c_void,
    position: [usize; 3],
    address: *const c_void,
    pitch: usize,
    size: [usize; 2],
}

/// `cudaMemcpy3DParms`, and that of the others.
#[repr(C)]
pub struct Layers {
    from: End,
    to: End,
    extent: [usize; 3],
    kind: c_int,
}

/// `cudaMemcpy3DPeerParms`.
#[repr(C)]
pub struct PeerLayers {
    from: End,
    from_device: c_int,
    to: End,
    to_device: c_int,
    extent: [usize; 3],
}

fn layers(kind: c_int, ends: [&End; 2], extent: [usize; 3]) -> Copy {
    let is_in_bytes = ends.iter().all(|end| end.array.is_null());
    if is_in_bytes { copy_of(kind, extent) } else { Copy { kind, bytes: 0 } }
}

/// Before a copy that a structure describes.
fn by_layers(what: *const Layers) -> Option<Copy> {
    // SAFETY: null, or the caller's structure, which is valid for the call.
    unsafe { what.as_ref() }.map(|what| layers(what.kind, [&what.from, &what.to], what.extent))
}

/// The same between devices.
fn by_peer_layers(what: *const PeerLayers) -> Option<Copy> {
    // SAFETY: as above.
    unsafe { what.as_ref() }.map(|what| layers(BETWEEN_DEVICES, [&what.from, &what.to], what.extent))
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
    cudaMemcpyPeerAsync | cudaMemcpyPeerAsync_ptsz | mcMemcpyPeerAsync | hipMemcpyPeerAsync(to: Data, to_device: c_int, from: Data,
        from_device: c_int, bytes: usize, stream: Stream) => |_, _| Copy { kind: BETWEEN_DEVICES, bytes };
    cudaMemcpy2DAsync | cudaMemcpy2DAsync_ptsz | mcMemcpy2DAsync | hipMemcpy2DAsync | hipMemcpy2DAsync_spt(to: Data, to_pitch: usize,
        from: Data, from_pitch: usize, width: usize, height: usize, kind: c_int, stream: Stream)
        => |_, _| copy_of(kind, [width, height, 1]);
    cudaMemcpy3DAsync | cudaMemcpy3DAsync_ptsz | mcMemcpy3DAsync | hipMemcpy3DAsync | hipMemcpy3DAsync_spt(what: *const Layers,
        stream: Stream) => |_, _| by_layers(what);
    cudaMemcpy3DPeerAsync | cudaMemcpy3DPeerAsync_ptsz(what: *const PeerLayers, stream: Stream) => |_, _| by_peer_layers(what);
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
