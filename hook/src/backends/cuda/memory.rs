//! Copies and allocations of the runtime API, which are counted but never bracketed. Memsets,
//! synchronizations and the driver's copies only show activity.
//!
//! The coverage table contains the number of calls. Here, directions and bytes are counted in
//! addition.

use std::ffi::{c_int, c_uint, c_void};

use crate::{
    interpose::hooked::{AfterCall, hooked},
    runtime::{
        abi::{Data, RUNTIME_NOT_FOUND, SUCCESS, Stream},
        os::thread_state::{IN_COLLECTIVES, IN_HOOK, IN_RUNTIME},
        recorder::Recorder,
    },
};

/// Where an allocation's address is written.
type Out = *mut *mut c_void;

/// A copy, which counts if it succeeds.
struct Copy {
    kind: c_int,
    bytes: usize,
}

impl AfterCall for Copy {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if result == SUCCESS {
            // A negative number is not a direction.
            recorder.copied(usize::try_from(self.kind).unwrap_or(usize::MAX), self.bytes as u64);
        }
    }
}

impl AfterCall for Option<Copy> {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if let Some(copy) = self {
            copy.after(recorder, result);
        }
    }
}

/// A 2D or 3D copy, by its extent in bytes and rows.
fn copy_of(kind: c_int, sizes: [usize; 3]) -> Copy {
    Copy { kind, bytes: sizes.into_iter().fold(1, usize::saturating_mul) }
}

/// Direction of a copy between devices.
const BETWEEN_DEVICES: c_int = 3;

/// One end of a 3D copy: an address, or an array whose element size is not known here.
#[repr(C)]
pub struct End {
    array: *const c_void,
    position: [usize; 3],
    address: *const c_void,
    pitch: usize,
    size: [usize; 2],
}

/// `cudaMemcpy3DParms` and the equal structures of the other vendors.
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

/// Called before a copy that a structure describes.
fn by_layers(what: *const Layers) -> Option<Copy> {
    // SAFETY: null, or the caller's structure, which is valid during the call.
    unsafe { what.as_ref() }.map(|what| layers(what.kind, [&what.from, &what.to], what.extent))
}

/// The same for a copy between devices.
fn by_peer_layers(what: *const PeerLayers) -> Option<Copy> {
    // SAFETY: as above.
    unsafe { what.as_ref() }.map(|what| layers(BETWEEN_DEVICES, [&what.from, &what.to], what.extent))
}

/// An allocation, which counts if it succeeds.
struct Allocation(usize);

impl AfterCall for Allocation {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if result == SUCCESS {
            recorder.allocated(self.0 as u64);
        }
    }
}

/// A call whose success shows activity on the device.
struct Active;

impl AfterCall for Active {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if result == SUCCESS {
            recorder.active();
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
    cudaMemcpy | cudaMemcpy_ptds | mcMemcpy | hipMemcpy | hipMemcpy_spt(to: Data, from: Data, bytes: usize, kind: c_int)
        => |_, _| Copy { kind, bytes };
    cudaMemcpyPeer | mcMemcpyPeer | hipMemcpyPeer(to: Data, to_device: c_int, from: Data, from_device: c_int, bytes: usize)
        => |_, _| Copy { kind: BETWEEN_DEVICES, bytes };
    cudaMemcpy2D | cudaMemcpy2D_ptds | mcMemcpy2D | hipMemcpy2D | hipMemcpy2D_spt(to: Data, to_pitch: usize, from: Data,
        from_pitch: usize, width: usize, height: usize, kind: c_int) => |_, _| copy_of(kind, [width, height, 1]);
    cudaMemcpy3D | cudaMemcpy3D_ptds | mcMemcpy3D | hipMemcpy3D | hipMemcpy3D_spt(what: *const Layers) => |_, _| by_layers(what);
    cudaMemcpyToSymbol | cudaMemcpyToSymbol_ptds | mcMemcpyToSymbol | hipMemcpyToSymbol | hipMemcpyToSymbol_spt(symbol: Data,
        from: Data, bytes: usize, offset: usize, kind: c_int) => |_, _| Copy { kind, bytes };
    cudaMemcpyToSymbolAsync | cudaMemcpyToSymbolAsync_ptsz | mcMemcpyToSymbolAsync | hipMemcpyToSymbolAsync
        | hipMemcpyToSymbolAsync_spt(symbol: Data, from: Data, bytes: usize, offset: usize, kind: c_int, stream: Stream)
        => |_, _| Copy { kind, bytes };
    cudaMemcpyFromSymbol | cudaMemcpyFromSymbol_ptds | mcMemcpyFromSymbol | hipMemcpyFromSymbol | hipMemcpyFromSymbol_spt(to: Data,
        symbol: Data, bytes: usize, offset: usize, kind: c_int) => |_, _| Copy { kind, bytes };
    cudaMemcpyFromSymbolAsync | cudaMemcpyFromSymbolAsync_ptsz | mcMemcpyFromSymbolAsync | hipMemcpyFromSymbolAsync
        | hipMemcpyFromSymbolAsync_spt(to: Data, symbol: Data, bytes: usize, offset: usize, kind: c_int, stream: Stream)
        => |_, _| Copy { kind, bytes };
    hipMemcpyHtoD | hipMemcpyDtoH | hipMemcpyDtoD(to: Data, from: Data, bytes: usize) => |_, _| Active;
    hipMemcpyHtoDAsync | hipMemcpyDtoHAsync | hipMemcpyDtoDAsync(to: Data, from: Data, bytes: usize, stream: Stream)
        => |_, _| Active;
    cudaMemset | cudaMemset_ptds | mcMemset | hipMemset | hipMemset_spt(to: Data, value: c_int, bytes: usize) => |_, _| Active;
    cudaMemsetAsync | cudaMemsetAsync_ptsz | mcMemsetAsync | hipMemsetAsync | hipMemsetAsync_spt(to: Data, value: c_int,
        bytes: usize, stream: Stream) => |_, _| Active;
    cudaMemset2D | cudaMemset2D_ptds | mcMemset2D | hipMemset2D | hipMemset2D_spt(to: Data, pitch: usize, value: c_int,
        width: usize, height: usize) => |_, _| Active;
    cudaMemset2DAsync | cudaMemset2DAsync_ptsz | mcMemset2DAsync | hipMemset2DAsync | hipMemset2DAsync_spt(to: Data, pitch: usize,
        value: c_int, width: usize, height: usize, stream: Stream) => |_, _| Active;
    hipMemsetD8 | hipMemsetD16 | hipMemsetD32(to: Data, value: c_uint, count: usize) => |_, _| Active;
    hipMemsetD8Async | hipMemsetD16Async | hipMemsetD32Async(to: Data, value: c_uint, count: usize, stream: Stream)
        => |_, _| Active;
    cudaDeviceSynchronize | mcDeviceSynchronize | hipDeviceSynchronize() => |_, _| Active;
    cudaStreamSynchronize | cudaStreamSynchronize_ptsz | mcStreamSynchronize | hipStreamSynchronize
        | hipStreamSynchronize_spt(stream: Stream) => |_, _| Active;
    cudaEventSynchronize | mcEventSynchronize | hipEventSynchronize(event: Data) => |_, _| Active;
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

/// The driver API. cuGetProcAddress is asked for the names without a version.
pub mod driver {
    use super::{Active, Data, Stream, c_uint, hooked};
    use crate::{
        runtime::abi::DRIVER_NOT_FOUND,
        runtime::os::thread_state::{IN_COLLECTIVES, IN_DRIVER, IN_HOOK, IN_RUNTIME},
    };

    hooked! {
        library Driver, mark IN_DRIVER, bypass IN_DRIVER | IN_RUNTIME | IN_COLLECTIVES | IN_HOOK, missing DRIVER_NOT_FOUND;

        cuMemcpy | cuMemcpy_ptds | cuMemcpyHtoD | cuMemcpyHtoD_v2 | cuMemcpyHtoD_v2_ptds | cuMemcpyDtoH | cuMemcpyDtoH_v2
            | cuMemcpyDtoH_v2_ptds | cuMemcpyDtoD | cuMemcpyDtoD_v2 | cuMemcpyDtoD_v2_ptds(to: Data, from: Data, bytes: usize)
            => |_, _| Active;
        cuMemcpyAsync | cuMemcpyAsync_ptsz | cuMemcpyHtoDAsync | cuMemcpyHtoDAsync_v2 | cuMemcpyHtoDAsync_v2_ptsz
            | cuMemcpyDtoHAsync | cuMemcpyDtoHAsync_v2 | cuMemcpyDtoHAsync_v2_ptsz | cuMemcpyDtoDAsync
            | cuMemcpyDtoDAsync_v2 | cuMemcpyDtoDAsync_v2_ptsz(to: Data, from: Data, bytes: usize, stream: Stream)
            => |_, _| Active;
        cuMemcpyPeer | cuMemcpyPeer_ptds(to: Data, to_context: Data, from: Data, from_context: Data, bytes: usize)
            => |_, _| Active;
        cuMemcpyPeerAsync | cuMemcpyPeerAsync_ptsz(to: Data, to_context: Data, from: Data, from_context: Data, bytes: usize,
            stream: Stream) => |_, _| Active;
        cuMemcpy2D | cuMemcpy2D_v2 | cuMemcpy2D_v2_ptds | cuMemcpy2DUnaligned | cuMemcpy2DUnaligned_v2
            | cuMemcpy2DUnaligned_v2_ptds | cuMemcpy3D | cuMemcpy3D_v2 | cuMemcpy3D_v2_ptds(what: Data) => |_, _| Active;
        cuMemcpy2DAsync | cuMemcpy2DAsync_v2 | cuMemcpy2DAsync_v2_ptsz | cuMemcpy3DAsync | cuMemcpy3DAsync_v2
            | cuMemcpy3DAsync_v2_ptsz(what: Data, stream: Stream) => |_, _| Active;
        cuMemsetD8 | cuMemsetD8_v2 | cuMemsetD8_v2_ptds | cuMemsetD16 | cuMemsetD16_v2 | cuMemsetD16_v2_ptds | cuMemsetD32
            | cuMemsetD32_v2 | cuMemsetD32_v2_ptds(to: Data, value: c_uint, count: usize) => |_, _| Active;
        cuMemsetD8Async | cuMemsetD8Async_ptsz | cuMemsetD16Async | cuMemsetD16Async_ptsz | cuMemsetD32Async
            | cuMemsetD32Async_ptsz(to: Data, value: c_uint, count: usize, stream: Stream) => |_, _| Active;
        cuMemsetD2D8 | cuMemsetD2D8_v2 | cuMemsetD2D8_v2_ptds | cuMemsetD2D16 | cuMemsetD2D16_v2 | cuMemsetD2D16_v2_ptds
            | cuMemsetD2D32 | cuMemsetD2D32_v2 | cuMemsetD2D32_v2_ptds(to: Data, pitch: usize, value: c_uint, width: usize,
            height: usize) => |_, _| Active;
        cuMemsetD2D8Async | cuMemsetD2D8Async_ptsz | cuMemsetD2D16Async | cuMemsetD2D16Async_ptsz | cuMemsetD2D32Async
            | cuMemsetD2D32Async_ptsz(to: Data, pitch: usize, value: c_uint, width: usize, height: usize, stream: Stream)
            => |_, _| Active;
        cuStreamSynchronize | cuStreamSynchronize_ptsz(stream: Stream) => |_, _| Active;
        cuCtxSynchronize() => |_, _| Active;
        cuCtxSynchronize_v2(context: Data) => |_, _| Active;
        cuEventSynchronize(event: Data) => |_, _| Active;
    }
}
