//! Copies, memsets and allocations. The copies and allocations of the runtime API are counted.
//! Memsets, synchronizations and the driver's copies only show activity. While the collector asks
//! for it, each copy and memset is an operation with events, too.
//!
//! The coverage table contains the number of calls. Here, directions and bytes are counted in
//! addition.

use std::ffi::{c_int, c_uint, c_void};

use xpu_timer_proto::{ring::detail, v1::CopyDirection};

use crate::{
    backends::bracket::{self, OpenOperation},
    interpose::hooked::{AfterCall, Site, hooked},
    runtime::{
        abi::{Data, RUNTIME_NOT_FOUND, STREAM_PER_THREAD, SUCCESS, Stream},
        os::{
            clock,
            thread_state::{IN_BLAS, IN_COLLECTIVES, IN_HOOK, IN_RUNTIME},
        },
        recorder::{NewOperation, Recorder, lanes::ALLOCATIONS},
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

/// A copy that is counted, and the operation that it may be.
type Counted<T> = (Option<OpenOperation>, T);

/// A call whose success only shows activity, and the operation that it may be.
type Shown = (Option<OpenOperation>, Active);

/// Direction and bytes of a copy, by the direction of the runtime API.
fn transfer(copy: &Copy) -> (CopyDirection, usize) {
    let direction = match copy.kind {
        0 => CopyDirection::HostToHost,
        1 => CopyDirection::HostToDevice,
        2 => CopyDirection::DeviceToHost,
        3 => CopyDirection::DeviceToDevice,
        _ => CopyDirection::Unspecified,
    };
    (direction, copy.bytes)
}

/// A copy of the runtime API.
#[inline(always)]
fn copied(recorder: &'static Recorder, site: Site, stream: Stream, copy: Copy) -> Counted<Copy> {
    (open(recorder, site, stream, || transfer(&copy)), copy)
}

/// A copy of the runtime API. `copy` is `None` if the caller does not describe it.
#[inline(always)]
fn copied_if_known(
    recorder: &'static Recorder,
    site: Site,
    stream: Stream,
    copy: Option<Copy>,
) -> Counted<Option<Copy>> {
    (open(recorder, site, stream, || copy.as_ref().map_or((CopyDirection::Unspecified, 0), transfer)), copy)
}

/// A copy whose direction is in its name.
#[inline(always)]
fn moved(recorder: &'static Recorder, site: Site, stream: Stream, bytes: usize) -> Shown {
    (open(recorder, site, stream, || (direction_in(site.function.text()), bytes)), Active)
}

/// A memset of this many elements, whose size is in its name.
#[inline(always)]
fn filled(recorder: &'static Recorder, site: Site, stream: Stream, count: usize) -> Shown {
    let bytes = || count.saturating_mul(element_bytes_in(site.function.text()));
    (open(recorder, site, stream, || (CopyDirection::Fill, bytes())), Active)
}

fn direction_in(name: &str) -> CopyDirection {
    let directions = [
        ("HtoD", CopyDirection::HostToDevice),
        ("DtoH", CopyDirection::DeviceToHost),
        ("DtoD", CopyDirection::DeviceToDevice),
        ("Peer", CopyDirection::DeviceToDevice),
    ];
    let known = directions.iter().find(|(part, _)| name.contains(part));
    known.map_or(CopyDirection::Unspecified, |(_, direction)| *direction)
}

fn element_bytes_in(name: &str) -> usize {
    [("D16", 2), ("D32", 4)].iter().find(|(part, _)| name.contains(part)).map_or(1, |(_, bytes)| *bytes)
}

/// Begins the operation of a copy or memset while the collector asks for them.
#[inline(always)]
fn open(
    recorder: &'static Recorder,
    site: Site,
    stream: Stream,
    what: impl FnOnce() -> (CopyDirection, usize),
) -> Option<OpenOperation> {
    if !recorder.bracketed.is_wanted(detail::COPIES, clock::coarse_now_ns) {
        return None;
    }
    begin(recorder, site, stream as usize, what())
}

/// The copies inside a matrix product are part of it.
#[inline(never)]
fn begin(
    recorder: &'static Recorder,
    site: Site,
    stream: usize,
    (direction, bytes): (CopyDirection, usize),
) -> Option<OpenOperation> {
    if site.inside & (IN_BLAS | IN_COLLECTIVES) != 0 {
        return None;
    }
    let name = site.function.text();
    let is_per_thread = stream == 0 && ["_ptsz", "_ptds", "_spt"].iter().any(|end| name.ends_with(end));
    let stream = if is_per_thread { STREAM_PER_THREAD } else { stream };
    let function = recorder.name_key(name);
    bracket::open_unless_captured(
        recorder,
        &NewOperation { stream, function, ..NewOperation::copy(direction, bytes as u64) },
    )
}

/// The stream of a call without a stream.
const DEFAULT: Stream = std::ptr::null_mut();

/// A 2D or 3D copy, by its extent in bytes and rows.
fn copy_of(kind: c_int, sizes: [usize; 3]) -> Copy {
    Copy { kind, bytes: sizes.into_iter().fold(1, usize::saturating_mul) }
}

/// Direction of a copy between devices.
const BETWEEN_DEVICES: c_int = 3;

/// One end of a 3D copy: an address, or an array whose element size is not known here.
#[repr(C)]
pub(crate) struct End {
    array: *const c_void,
    position: [usize; 3],
    address: *const c_void,
    pitch: usize,
    size: [usize; 2],
}

/// `cudaMemcpy3DParms` and the equal structures of the other vendors.
#[repr(C)]
pub(crate) struct Layers {
    from: End,
    to: End,
    extent: [usize; 3],
    kind: c_int,
}

/// `cudaMemcpy3DPeerParms`.
#[repr(C)]
pub(crate) struct PeerLayers {
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

/// Called before a copy between devices that a structure describes.
fn by_peer_layers(what: *const PeerLayers) -> Option<Copy> {
    // SAFETY: null, or the caller's structure, which is valid during the call.
    unsafe { what.as_ref() }.map(|what| layers(BETWEEN_DEVICES, [&what.from, &what.to], what.extent))
}

/// One end of a 2D copy of the driver: `CUDA_MEMCPY2D_v2` has two.
#[repr(C)]
pub(crate) struct RowsEnd {
    position: [usize; 2],
    memory_type: c_uint,
    host: *const c_void,
    device: usize,
    array: *const c_void,
    pitch: usize,
}

/// `CUDA_MEMCPY2D_v2`.
#[repr(C)]
pub(crate) struct Rows {
    from: RowsEnd,
    to: RowsEnd,
    /// Bytes of a row, and rows.
    extent: [usize; 2],
}

/// One end of a 3D copy of the driver: `CUDA_MEMCPY3D_v2` has two.
#[repr(C)]
pub(crate) struct VolumeEnd {
    position: [usize; 3],
    level: usize,
    memory_type: c_uint,
    host: *const c_void,
    device: usize,
    array: *const c_void,
    reserved: *const c_void,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D_v2`.
#[repr(C)]
pub(crate) struct Volume {
    from: VolumeEnd,
    to: VolumeEnd,
    /// Bytes of a row, rows, and layers.
    extent: [usize; 3],
}

// Sizes in cuda.h.
const _: () = assert!(size_of::<Rows>() == 128 && size_of::<Volume>() == 200);

fn by_rows(what: *const Rows) -> (CopyDirection, usize) {
    // SAFETY: null, or the caller's structure, which is valid during the call.
    let what = unsafe { what.as_ref() };
    what.map_or((CopyDirection::Unspecified, 0), |what| {
        let [width, height] = what.extent;
        (between(what.from.memory_type, what.to.memory_type), width.saturating_mul(height))
    })
}

fn by_volume(what: *const Volume) -> (CopyDirection, usize) {
    // SAFETY: null, or the caller's structure, which is valid during the call.
    let what = unsafe { what.as_ref() };
    what.map_or((CopyDirection::Unspecified, 0), |what| {
        let bytes = what.extent.into_iter().fold(1, usize::saturating_mul);
        (between(what.from.memory_type, what.to.memory_type), bytes)
    })
}

/// The direction between two kinds of memory (CUmemorytype). It is unknown for unified memory,
/// which may be anywhere.
fn between(from: c_uint, to: c_uint) -> CopyDirection {
    const HOST: c_uint = 1;
    const DEVICE: c_uint = 2;
    const ARRAY: c_uint = 3;
    match (from, to) {
        (HOST, HOST) => CopyDirection::HostToHost,
        (HOST, DEVICE | ARRAY) => CopyDirection::HostToDevice,
        (DEVICE | ARRAY, HOST) => CopyDirection::DeviceToHost,
        (DEVICE | ARRAY, DEVICE | ARRAY) => CopyDirection::DeviceToDevice,
        _ => CopyDirection::Unspecified,
    }
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

/// An allocation of device memory, whose address or handle is written to `out`.
struct DeviceAllocation {
    out: Out,
    bytes: usize,
}

impl AfterCall for DeviceAllocation {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        Allocation(self.bytes).after(recorder, result);
        if result == SUCCESS && !self.out.is_null() {
            // SAFETY: the place that the call has written.
            let address = unsafe { self.out.read_unaligned() };
            recorder.device_allocated(address as u64, self.bytes as u64);
        }
    }
}

/// A call that frees device memory. Its entry is taken out before, because another thread may get
/// the address as soon as it is free.
struct Free {
    address: Data,
    bytes: u64,
}

fn free(address: Data) -> Option<Free> {
    let bytes = ALLOCATIONS.take(address as u64)?;
    Some(Free { address, bytes })
}

impl AfterCall for Option<Free> {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if let Some(Free { address, bytes }) = self {
            recorder.device_freed(bytes);
            if result != SUCCESS {
                recorder.device_allocated(address as u64, bytes);
            }
        }
    }

    #[inline]
    fn has_work(&self) -> bool {
        self.is_some()
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
        stream: Stream)
        => |recorder, site| copied(recorder, site, stream, Copy { kind, bytes });
    cudaMemcpyPeerAsync | cudaMemcpyPeerAsync_ptsz | mcMemcpyPeerAsync | hipMemcpyPeerAsync(to: Data, to_device: c_int, from: Data,
        from_device: c_int, bytes: usize, stream: Stream)
        => |recorder, site| copied(recorder, site, stream, Copy { kind: BETWEEN_DEVICES, bytes });
    cudaMemcpy2DAsync | cudaMemcpy2DAsync_ptsz | mcMemcpy2DAsync | hipMemcpy2DAsync | hipMemcpy2DAsync_spt(to: Data, to_pitch: usize,
        from: Data, from_pitch: usize, width: usize, height: usize, kind: c_int, stream: Stream)
        => |recorder, site| copied(recorder, site, stream, copy_of(kind, [width, height, 1]));
    cudaMemcpy3DAsync | cudaMemcpy3DAsync_ptsz | mcMemcpy3DAsync | hipMemcpy3DAsync | hipMemcpy3DAsync_spt(what: *const Layers,
        stream: Stream)
        => |recorder, site| copied_if_known(recorder, site, stream, by_layers(what));
    cudaMemcpy3DPeerAsync | cudaMemcpy3DPeerAsync_ptsz(what: *const PeerLayers, stream: Stream)
        => |recorder, site| copied_if_known(recorder, site, stream, by_peer_layers(what));
    cudaMemcpy | cudaMemcpy_ptds | mcMemcpy | hipMemcpy | hipMemcpy_spt(to: Data, from: Data, bytes: usize, kind: c_int)
        => |recorder, site| copied(recorder, site, DEFAULT, Copy { kind, bytes });
    cudaMemcpyPeer | mcMemcpyPeer | hipMemcpyPeer(to: Data, to_device: c_int, from: Data, from_device: c_int, bytes: usize)
        => |recorder, site| copied(recorder, site, DEFAULT, Copy { kind: BETWEEN_DEVICES, bytes });
    cudaMemcpy2D | cudaMemcpy2D_ptds | mcMemcpy2D | hipMemcpy2D | hipMemcpy2D_spt(to: Data, to_pitch: usize, from: Data,
        from_pitch: usize, width: usize, height: usize, kind: c_int)
        => |recorder, site| copied(recorder, site, DEFAULT, copy_of(kind, [width, height, 1]));
    cudaMemcpy3D | cudaMemcpy3D_ptds | mcMemcpy3D | hipMemcpy3D | hipMemcpy3D_spt(what: *const Layers)
        => |recorder, site| copied_if_known(recorder, site, DEFAULT, by_layers(what));
    cudaMemcpyToSymbol | cudaMemcpyToSymbol_ptds | mcMemcpyToSymbol | hipMemcpyToSymbol | hipMemcpyToSymbol_spt(symbol: Data,
        from: Data, bytes: usize, offset: usize, kind: c_int)
        => |recorder, site| copied(recorder, site, DEFAULT, Copy { kind, bytes });
    cudaMemcpyToSymbolAsync | cudaMemcpyToSymbolAsync_ptsz | mcMemcpyToSymbolAsync | hipMemcpyToSymbolAsync
        | hipMemcpyToSymbolAsync_spt(symbol: Data, from: Data, bytes: usize, offset: usize, kind: c_int, stream: Stream)
        => |recorder, site| copied(recorder, site, stream, Copy { kind, bytes });
    cudaMemcpyFromSymbol | cudaMemcpyFromSymbol_ptds | mcMemcpyFromSymbol | hipMemcpyFromSymbol | hipMemcpyFromSymbol_spt(to: Data,
        symbol: Data, bytes: usize, offset: usize, kind: c_int)
        => |recorder, site| copied(recorder, site, DEFAULT, Copy { kind, bytes });
    cudaMemcpyFromSymbolAsync | cudaMemcpyFromSymbolAsync_ptsz | mcMemcpyFromSymbolAsync | hipMemcpyFromSymbolAsync
        | hipMemcpyFromSymbolAsync_spt(to: Data, symbol: Data, bytes: usize, offset: usize, kind: c_int, stream: Stream)
        => |recorder, site| copied(recorder, site, stream, Copy { kind, bytes });
    hipMemcpyHtoD | hipMemcpyDtoH | hipMemcpyDtoD(to: Data, from: Data, bytes: usize)
        => |recorder, site| moved(recorder, site, DEFAULT, bytes);
    hipMemcpyHtoDAsync | hipMemcpyDtoHAsync | hipMemcpyDtoDAsync(to: Data, from: Data, bytes: usize, stream: Stream)
        => |recorder, site| moved(recorder, site, stream, bytes);
    cudaMemset | cudaMemset_ptds | mcMemset | hipMemset | hipMemset_spt(to: Data, value: c_int, bytes: usize)
        => |recorder, site| filled(recorder, site, DEFAULT, bytes);
    cudaMemsetAsync | cudaMemsetAsync_ptsz | mcMemsetAsync | hipMemsetAsync | hipMemsetAsync_spt(to: Data, value: c_int,
        bytes: usize, stream: Stream)
        => |recorder, site| filled(recorder, site, stream, bytes);
    cudaMemset2D | cudaMemset2D_ptds | mcMemset2D | hipMemset2D | hipMemset2D_spt(to: Data, pitch: usize, value: c_int,
        width: usize, height: usize)
        => |recorder, site| filled(recorder, site, DEFAULT, width.saturating_mul(height));
    cudaMemset2DAsync | cudaMemset2DAsync_ptsz | mcMemset2DAsync | hipMemset2DAsync | hipMemset2DAsync_spt(to: Data, pitch: usize,
        value: c_int, width: usize, height: usize, stream: Stream)
        => |recorder, site| filled(recorder, site, stream, width.saturating_mul(height));
    hipMemsetD8 | hipMemsetD16 | hipMemsetD32(to: Data, value: c_uint, count: usize)
        => |recorder, site| filled(recorder, site, DEFAULT, count);
    hipMemsetD8Async | hipMemsetD16Async | hipMemsetD32Async(to: Data, value: c_uint, count: usize, stream: Stream)
        => |recorder, site| filled(recorder, site, stream, count);
    cudaDeviceSynchronize | mcDeviceSynchronize | hipDeviceSynchronize() => |_, _| Active;
    cudaStreamSynchronize | cudaStreamSynchronize_ptsz | mcStreamSynchronize | hipStreamSynchronize
        | hipStreamSynchronize_spt(stream: Stream) => |_, _| Active;
    cudaEventSynchronize | mcEventSynchronize | hipEventSynchronize(event: Data) => |_, _| Active;
    cudaMalloc | mcMalloc | hipMalloc(out: Out, bytes: usize) => |_, _| DeviceAllocation { out, bytes };
    cudaMallocHost | mcMallocHost(out: Out, bytes: usize) => |_, _| Allocation(bytes);
    cudaHostAlloc | mcHostAlloc | hipHostMalloc(out: Out, bytes: usize, flags: c_uint) => |_, _| Allocation(bytes);
    cudaMallocAsync | cudaMallocAsync_ptsz | mcMallocAsync | hipMallocAsync(out: Out, bytes: usize, stream: Stream)
        => |_, _| DeviceAllocation { out, bytes };
    cudaMallocFromPoolAsync | cudaMallocFromPoolAsync_ptsz | hipMallocFromPoolAsync(out: Out, bytes: usize, pool: Data,
        stream: Stream) => |_, _| DeviceAllocation { out, bytes };
    cudaFree | mcFree | hipFree(address: Data) => |_, _| free(address);
    cudaFreeAsync | cudaFreeAsync_ptsz | mcFreeAsync | hipFreeAsync(address: Data, stream: Stream)
        => |_, _| free(address);
}

/// The driver API. cuGetProcAddress is asked for the names without a version.
pub(crate) mod driver {
    use super::{
        Active, DEFAULT, Data, DeviceAllocation, Out, Rows, Stream, Volume, by_rows, by_volume, c_uint, filled, free,
        hooked, moved, open,
    };
    use crate::{
        runtime::abi::DRIVER_NOT_FOUND,
        runtime::os::thread_state::{IN_COLLECTIVES, IN_DRIVER, IN_HOOK, IN_RUNTIME},
    };

    hooked! {
        library Driver, mark IN_DRIVER, bypass IN_DRIVER | IN_RUNTIME | IN_COLLECTIVES | IN_HOOK, missing DRIVER_NOT_FOUND;

        cuMemcpy | cuMemcpy_ptds | cuMemcpyHtoD | cuMemcpyHtoD_v2 | cuMemcpyHtoD_v2_ptds | cuMemcpyDtoH | cuMemcpyDtoH_v2
            | cuMemcpyDtoH_v2_ptds | cuMemcpyDtoD | cuMemcpyDtoD_v2 | cuMemcpyDtoD_v2_ptds(to: Data, from: Data, bytes: usize)
            => |recorder, site| moved(recorder, site, DEFAULT, bytes);
        cuMemcpyAsync | cuMemcpyAsync_ptsz | cuMemcpyHtoDAsync | cuMemcpyHtoDAsync_v2 | cuMemcpyHtoDAsync_v2_ptsz
            | cuMemcpyDtoHAsync | cuMemcpyDtoHAsync_v2 | cuMemcpyDtoHAsync_v2_ptsz | cuMemcpyDtoDAsync
            | cuMemcpyDtoDAsync_v2 | cuMemcpyDtoDAsync_v2_ptsz(to: Data, from: Data, bytes: usize, stream: Stream)
            => |recorder, site| moved(recorder, site, stream, bytes);
        cuMemcpyPeer | cuMemcpyPeer_ptds(to: Data, to_context: Data, from: Data, from_context: Data, bytes: usize)
            => |recorder, site| moved(recorder, site, DEFAULT, bytes);
        cuMemcpyPeerAsync | cuMemcpyPeerAsync_ptsz(to: Data, to_context: Data, from: Data, from_context: Data, bytes: usize,
            stream: Stream)
            => |recorder, site| moved(recorder, site, stream, bytes);
        cuMemcpy2D_v2 | cuMemcpy2D_v2_ptds | cuMemcpy2DUnaligned_v2 | cuMemcpy2DUnaligned_v2_ptds(what: *const Rows)
            => |recorder, site| (open(recorder, site, DEFAULT, || by_rows(what)), Active);
        cuMemcpy2DAsync_v2 | cuMemcpy2DAsync_v2_ptsz(what: *const Rows, stream: Stream)
            => |recorder, site| (open(recorder, site, stream, || by_rows(what)), Active);
        cuMemcpy3D_v2 | cuMemcpy3D_v2_ptds(what: *const Volume)
            => |recorder, site| (open(recorder, site, DEFAULT, || by_volume(what)), Active);
        cuMemcpy3DAsync_v2 | cuMemcpy3DAsync_v2_ptsz(what: *const Volume, stream: Stream)
            => |recorder, site| (open(recorder, site, stream, || by_volume(what)), Active);
        // The functions of CUDA 3.1 and older, whose structures differ.
        cuMemcpy2D | cuMemcpy2DUnaligned | cuMemcpy3D(what: Data) => |recorder, site| moved(recorder, site, DEFAULT, 0);
        cuMemcpy2DAsync | cuMemcpy3DAsync(what: Data, stream: Stream)
            => |recorder, site| moved(recorder, site, stream, 0);
        cuMemsetD8 | cuMemsetD8_v2 | cuMemsetD8_v2_ptds | cuMemsetD16 | cuMemsetD16_v2 | cuMemsetD16_v2_ptds | cuMemsetD32
            | cuMemsetD32_v2 | cuMemsetD32_v2_ptds(to: Data, value: c_uint, count: usize)
            => |recorder, site| filled(recorder, site, DEFAULT, count);
        cuMemsetD8Async | cuMemsetD8Async_ptsz | cuMemsetD16Async | cuMemsetD16Async_ptsz | cuMemsetD32Async
            | cuMemsetD32Async_ptsz(to: Data, value: c_uint, count: usize, stream: Stream)
            => |recorder, site| filled(recorder, site, stream, count);
        cuMemsetD2D8 | cuMemsetD2D8_v2 | cuMemsetD2D8_v2_ptds | cuMemsetD2D16 | cuMemsetD2D16_v2 | cuMemsetD2D16_v2_ptds
            | cuMemsetD2D32 | cuMemsetD2D32_v2 | cuMemsetD2D32_v2_ptds(to: Data, pitch: usize, value: c_uint, width: usize,
            height: usize)
            => |recorder, site| filled(recorder, site, DEFAULT, width.saturating_mul(height));
        cuMemsetD2D8Async | cuMemsetD2D8Async_ptsz | cuMemsetD2D16Async | cuMemsetD2D16Async_ptsz | cuMemsetD2D32Async
            | cuMemsetD2D32Async_ptsz(to: Data, pitch: usize, value: c_uint, width: usize, height: usize, stream: Stream)
            => |recorder, site| filled(recorder, site, stream, width.saturating_mul(height));
        // Under the names without `_v2`, the arguments of the first two have other types.
        cuMemAlloc_v2(out: Out, bytes: usize) => |_, _| DeviceAllocation { out, bytes };
        cuMemFree_v2(address: Data) => |_, _| free(address);
        cuMemAllocAsync | cuMemAllocAsync_ptsz(out: Out, bytes: usize, stream: Stream)
            => |_, _| DeviceAllocation { out, bytes };
        cuMemCreate(out: Out, bytes: usize, properties: Data, flags: u64) => |_, _| DeviceAllocation { out, bytes };
        cuMemFreeAsync | cuMemFreeAsync_ptsz(address: Data, stream: Stream) => |_, _| free(address);
        cuMemRelease(handle: Data) => |_, _| free(handle);
        cuStreamSynchronize | cuStreamSynchronize_ptsz(stream: Stream) => |_, _| Active;
        cuCtxSynchronize() => |_, _| Active;
        cuCtxSynchronize_v2(context: Data) => |_, _| Active;
        cuEventSynchronize(event: Data) => |_, _| Active;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words of a structure of cuda.h, with these at their places.
    fn words<const COUNT: usize>(words: &[(usize, usize)]) -> [usize; COUNT] {
        let mut all = [usize::MAX; COUNT];
        words.iter().for_each(|(index, word)| all[*index] = *word);
        all
    }

    #[test]
    fn the_direction_of_a_copy_of_the_driver_is_between_its_kinds_of_memory() {
        use CopyDirection::{DeviceToDevice, DeviceToHost, HostToDevice, HostToHost, Unspecified};
        // By cuda.h: host, device, array, unified.
        let directions = [
            (1, 1, HostToHost),
            (1, 2, HostToDevice),
            (3, 1, DeviceToHost),
            (2, 3, DeviceToDevice),
            (4, 2, Unspecified),
            (2, 0, Unspecified),
        ];
        for (from, to, direction) in directions {
            // srcMemoryType, dstMemoryType, WidthInBytes and Height. The padding has any value.
            let padding = 0xffff_ffff << 32;
            let rows: [usize; 16] = words(&[(2, padding | from), (9, padding | to), (14, 48), (15, 10)]);
            assert_eq!(by_rows(rows.as_ptr().cast()), (direction, 480));
            // srcMemoryType, dstMemoryType, WidthInBytes, Height and Depth.
            let volume: [usize; 25] = words(&[(4, padding | from), (15, padding | to), (22, 48), (23, 10), (24, 7)]);
            assert_eq!(by_volume(volume.as_ptr().cast()), (direction, 3360));
        }
        assert_eq!(by_rows(std::ptr::null()), (Unspecified, 0));
        assert_eq!(by_volume(std::ptr::null()), (Unspecified, 0));
    }
}
