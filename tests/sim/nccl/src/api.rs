//! The exported functions. Each exists as `ncclX` and as `pncclX`, two separate functions with
//! equal behaviour.

#![allow(unsafe_code, non_snake_case)]

use std::{
    cell::Cell,
    hint::black_box,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use sim_abi::{
    cuda::StreamHandle,
    fault::{self, Kind},
    ffi::{In, Out, Text},
    nccl::{CommHandle, Config, DataType, NCCL_VERSION, NcclError, UniqueId},
    trace,
};

use crate::{
    communicator::Communicator,
    driver::{cuda, driver},
    group,
    task::{self, Combine, Op, Task},
};

thread_local! {
    static LAST_ERROR: Cell<i32> = const { Cell::new(0) };
}

/// The frame of an exported function.
#[inline]
fn call(name: &str, body: impl FnOnce() -> Result<(), NcclError>) -> i32 {
    let code = match body() {
        Ok(()) => 0,
        Err(error) => {
            group::note_error(error);
            LAST_ERROR.set(error.0);
            error.0
        }
    };
    trace::returned(name, code);
    // Keeps the caller's frame on the stack: a tail call would hide the function in which a thread
    // blocks.
    black_box(code)
}

/// Calls an exported function through its dynamic symbol, as the real library does, so that an
/// interposed function sees the call. The address must be hidden from the compiler, which knows the
/// function's body.
macro_rules! through_symbol {
    ($function:ident as $type:ty) => {
        black_box($function as $type)
    };
}

/// The two names have separate bodies, so that the compiler cannot merge them or turn one into a
/// jump to the other: a hook of `ncclX` that calls `pncclX` would call itself.
macro_rules! nccl_api {
    ($($(#[$meta:meta])* fn $name:ident / $profiled:ident ($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub extern "C" fn $name($($argument: $type),*) -> i32 {
            call(stringify!($name), || $body)
        }

        $(#[$meta])*
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub extern "C" fn $profiled($($argument: $type),*) -> i32 {
            call(stringify!($profiled), || $body)
        }
    )*};
}

nccl_api! {
    fn ncclGetVersion / pncclGetVersion(version: Out<i32>) {
        Ok(version.set(NCCL_VERSION)?)
    }

    fn ncclGetUniqueId / pncclGetUniqueId(id: Out<UniqueId>) {
        Ok(id.set(group::unique_id()?)?)
    }

    fn ncclCommInitRank / pncclCommInitRank(communicator: Out<CommHandle>, ranks: i32, id: UniqueId, rank: i32) {
        group::init_rank(communicator, ranks, id, rank, In::null())
    }

    fn ncclCommInitRankConfig / pncclCommInitRankConfig(
        communicator: Out<CommHandle>, ranks: i32, id: UniqueId, rank: i32, config: In<Config>
    ) {
        group::init_rank(communicator, ranks, id, rank, config)
    }

    fn ncclCommInitRankScalable / pncclCommInitRankScalable(
        communicator: Out<CommHandle>, ranks: i32, rank: i32, id_count: i32, ids: In<UniqueId>, config: In<Config>
    ) {
        if id_count < 1 {
            return Err(NcclError::INVALID_ARGUMENT);
        }
        // Several ids only distribute the rendezvous. All ranks have all of them, and the first is
        // enough.
        group::init_rank(communicator, ranks, ids.get()?, rank, config)
    }

    fn ncclCommInitAll / pncclCommInitAll(communicators: Out<CommHandle>, count: i32, devices: In<i32>) {
        init_all(communicators, count, devices)
    }

    fn ncclCommSplit / pncclCommSplit(
        communicator: CommHandle, color: i32, key: i32, child: Out<CommHandle>, config: In<Config>
    ) {
        group::split(communicator, color, key, child, config)
    }

    fn ncclCommShrink / pncclCommShrink(
        communicator: CommHandle, excluded: In<i32>, count: i32, child: Out<CommHandle>, config: In<Config>, flags: i32
    ) {
        const ABORT: i32 = 1;
        group::shrink(communicator, excluded, count, child, config, flags & ABORT != 0)
    }

    fn ncclCommGetUniqueId / pncclCommGetUniqueId(communicator: CommHandle, id: Out<UniqueId>) {
        Ok(id.set(group::grow_id(communicator)?)?)
    }

    fn ncclCommGrow / pncclCommGrow(
        communicator: CommHandle, ranks: i32, id: In<UniqueId>, rank: i32, grown: Out<CommHandle>, config: In<Config>
    ) {
        group::grow(communicator, ranks, id, rank, grown, config)
    }

    fn ncclCommFinalize / pncclCommFinalize(communicator: CommHandle) {
        let communicator = Communicator::find_ready(communicator)?;
        if communicator.blocking {
            communicator.drain();
            return Ok(());
        }
        communicator.set_result(Err(NcclError::IN_PROGRESS));
        let run = move || {
            communicator.drain();
            communicator.set_result(Ok(()));
        };
        thread::Builder::new().name("sim-nccl-final".into()).spawn(run).map_err(|_| NcclError::SYSTEM)?;
        Err(NcclError::IN_PROGRESS)
    }

    fn ncclCommDestroy / pncclCommDestroy(communicator: CommHandle) {
        if communicator == 0 {
            return Ok(());
        }
        let communicator = Communicator::find(communicator)?;
        communicator.drain();
        communicator.forget();
        Ok(())
    }

    fn ncclCommAbort / pncclCommAbort(communicator: CommHandle) {
        if communicator == 0 {
            return Ok(());
        }
        let communicator = Communicator::find(communicator)?;
        communicator.abort();
        communicator.forget();
        Ok(())
    }

    fn ncclCommRevoke / pncclCommRevoke(communicator: CommHandle, _flags: i32) {
        // Running work ends, and no new work can begin. The communicator itself stays for destroy
        // and shrink.
        Communicator::find(communicator)?.abort();
        Ok(())
    }

    fn ncclCommGetAsyncError / pncclCommGetAsyncError(communicator: CommHandle, result: Out<i32>) {
        let communicator = Communicator::find(communicator)?;
        let fault = || fault::faults(false).value(Kind::AsyncError).map_or(0, |code| code as i32);
        Ok(result.set(communicator.result().map_or_else(|error| error.0, |()| fault()))?)
    }

    fn ncclCommCount / pncclCommCount(communicator: CommHandle, count: Out<i32>) {
        Ok(count.set(place(communicator)?.1 as i32)?)
    }

    fn ncclCommUserRank / pncclCommUserRank(communicator: CommHandle, rank: Out<i32>) {
        Ok(rank.set(place(communicator)?.0 as i32)?)
    }

    fn ncclCommCuDevice / pncclCommCuDevice(communicator: CommHandle, device: Out<i32>) {
        Ok(device.set(Communicator::find_ready(communicator)?.device)?)
    }

    fn ncclGroupStart / pncclGroupStart() {
        group::start();
        Ok(())
    }

    fn ncclGroupEnd / pncclGroupEnd() {
        group::end()
    }

    fn ncclAllReduce / pncclAllReduce(
        send: usize, recv: usize, count: usize, dtype: u32, op: u32, communicator: CommHandle, stream: StreamHandle
    ) {
        enqueue(Call { op: Op::AllReduce, send, recv, count, dtype, combine: Some(op), rank: 0, communicator, stream })
    }

    fn ncclReduce / pncclReduce(
        send: usize, recv: usize, count: usize, dtype: u32, op: u32, root: i32, communicator: CommHandle,
        stream: StreamHandle
    ) {
        enqueue(Call { op: Op::Reduce, send, recv, count, dtype, combine: Some(op), rank: root, communicator, stream })
    }

    fn ncclBroadcast / pncclBroadcast(
        send: usize, recv: usize, count: usize, dtype: u32, root: i32, communicator: CommHandle, stream: StreamHandle
    ) {
        enqueue(Call { op: Op::Broadcast, send, recv, count, dtype, combine: None, rank: root, communicator, stream })
    }

    fn ncclBcast / pncclBcast(
        buffer: usize, count: usize, dtype: u32, root: i32, communicator: CommHandle, stream: StreamHandle
    ) {
        type Broadcast = extern "C" fn(usize, usize, usize, u32, i32, CommHandle, StreamHandle) -> i32;
        let broadcast = through_symbol!(ncclBroadcast as Broadcast);
        check(broadcast(buffer, buffer, count, dtype, root, communicator, stream))
    }

    fn ncclAllGather / pncclAllGather(
        send: usize, recv: usize, count: usize, dtype: u32, communicator: CommHandle, stream: StreamHandle
    ) {
        enqueue(Call { op: Op::AllGather, send, recv, count, dtype, combine: None, rank: 0, communicator, stream })
    }

    fn ncclReduceScatter / pncclReduceScatter(
        send: usize, recv: usize, count: usize, dtype: u32, op: u32, communicator: CommHandle, stream: StreamHandle
    ) {
        let op = Some(op);
        enqueue(Call { op: Op::ReduceScatter, send, recv, count, dtype, combine: op, rank: 0, communicator, stream })
    }

    fn ncclSend / pncclSend(
        buffer: usize, count: usize, dtype: u32, peer: i32, communicator: CommHandle, stream: StreamHandle
    ) {
        let (send, recv) = (buffer, 0);
        grouped(|| {
            enqueue(Call { op: Op::Send, send, recv, count, dtype, combine: None, rank: peer, communicator, stream })
        })
    }

    fn ncclRecv / pncclRecv(
        buffer: usize, count: usize, dtype: u32, peer: i32, communicator: CommHandle, stream: StreamHandle
    ) {
        let (send, recv) = (0, buffer);
        grouped(|| {
            enqueue(Call { op: Op::Recv, send, recv, count, dtype, combine: None, rank: peer, communicator, stream })
        })
    }

    fn ncclAlltoAll / pncclAlltoAll(
        send: usize, recv: usize, count: usize, dtype: u32, communicator: CommHandle, stream: StreamHandle
    ) {
        let ranks = place(communicator)?.1;
        let all: Vec<_> = (0..ranks).flat_map(|peer| [(Op::Send, peer, peer), (Op::Recv, peer, peer)]).collect();
        exchange(send, recv, count, dtype, communicator, stream, &all)
    }

    fn ncclGather / pncclGather(
        send: usize, recv: usize, count: usize, dtype: u32, root: i32, communicator: CommHandle, stream: StreamHandle
    ) {
        let (rank, ranks) = place(communicator)?;
        let root = usize::try_from(root).map_err(|_| NcclError::INVALID_ARGUMENT)?;
        let mut all = vec![(Op::Send, root, 0)];
        if rank == root {
            all.extend((0..ranks).map(|peer| (Op::Recv, peer, peer)));
        }
        exchange(send, recv, count, dtype, communicator, stream, &all)
    }

    fn ncclScatter / pncclScatter(
        send: usize, recv: usize, count: usize, dtype: u32, root: i32, communicator: CommHandle, stream: StreamHandle
    ) {
        let (rank, ranks) = place(communicator)?;
        let root = usize::try_from(root).map_err(|_| NcclError::INVALID_ARGUMENT)?;
        let mut all = vec![(Op::Recv, root, 0)];
        if rank == root {
            all.extend((0..ranks).map(|peer| (Op::Send, peer, peer)));
        }
        exchange(send, recv, count, dtype, communicator, stream, &all)
    }

    // A configuration only tunes performance.
    fn ncclAllReduceConfig / pncclAllReduceConfig(
        send: usize, recv: usize, count: usize, dtype: u32, op: u32, communicator: CommHandle, stream: StreamHandle,
        _config: usize
    ) {
        check(pncclAllReduce(send, recv, count, dtype, op, communicator, stream))
    }

    fn ncclBroadcastConfig / pncclBroadcastConfig(
        send: usize, recv: usize, count: usize, dtype: u32, root: i32, communicator: CommHandle, stream: StreamHandle,
        _config: usize
    ) {
        check(pncclBroadcast(send, recv, count, dtype, root, communicator, stream))
    }

    fn ncclReduceConfig / pncclReduceConfig(
        send: usize, recv: usize, count: usize, dtype: u32, op: u32, root: i32, communicator: CommHandle, stream: StreamHandle,
        _config: usize
    ) {
        check(pncclReduce(send, recv, count, dtype, op, root, communicator, stream))
    }

    fn ncclAllGatherConfig / pncclAllGatherConfig(
        send: usize, recv: usize, count: usize, dtype: u32, communicator: CommHandle, stream: StreamHandle,
        _config: usize
    ) {
        check(pncclAllGather(send, recv, count, dtype, communicator, stream))
    }

    fn ncclReduceScatterConfig / pncclReduceScatterConfig(
        send: usize, recv: usize, count: usize, dtype: u32, op: u32, communicator: CommHandle, stream: StreamHandle,
        _config: usize
    ) {
        check(pncclReduceScatter(send, recv, count, dtype, op, communicator, stream))
    }

    fn ncclAlltoAllConfig / pncclAlltoAllConfig(
        send: usize, recv: usize, count: usize, dtype: u32, communicator: CommHandle, stream: StreamHandle,
        _config: usize
    ) {
        check(pncclAlltoAll(send, recv, count, dtype, communicator, stream))
    }

    fn ncclGatherConfig / pncclGatherConfig(
        send: usize, recv: usize, count: usize, dtype: u32, root: i32, communicator: CommHandle, stream: StreamHandle,
        _config: usize
    ) {
        check(pncclGather(send, recv, count, dtype, root, communicator, stream))
    }

    fn ncclScatterConfig / pncclScatterConfig(
        send: usize, recv: usize, count: usize, dtype: u32, root: i32, communicator: CommHandle, stream: StreamHandle,
        _config: usize
    ) {
        check(pncclScatter(send, recv, count, dtype, root, communicator, stream))
    }

    // A signal is an empty message to its waiter.
    fn ncclSignal / pncclSignal(
        peer: i32, _signal: i32, _context: i32, _flags: u32, communicator: CommHandle, stream: StreamHandle
    ) {
        signals(Op::Send, &[(1, peer)], communicator, stream)
    }

    fn ncclWaitSignal / pncclWaitSignal(
        count: i32, awaited: In<[i32; 4]>, communicator: CommHandle, stream: StreamHandle
    ) {
        let count = usize::try_from(count).map_err(|_| NcclError::INVALID_ARGUMENT)?;
        let awaited: Result<Vec<_>, NcclError> = (0..count).map(|index| Ok(awaited.at(index)?)).collect();
        let awaited: Vec<_> = awaited?.into_iter().map(|[times, peer, ..]| (times, peer)).collect();
        signals(Op::Recv, &awaited, communicator, stream)
    }

    fn ncclCommWindowRegister / pncclCommWindowRegister(
        communicator: CommHandle, buffer: usize, _bytes: usize, window: Out<usize>, _flags: i32
    ) {
        Communicator::find_ready(communicator)?;
        Ok(window.set(buffer)?)
    }

    fn ncclCommWindowDeregister / pncclCommWindowDeregister(communicator: CommHandle, _window: usize) {
        Communicator::find_ready(communicator).map(drop)
    }

    fn ncclGroupSimulateEnd / pncclGroupSimulateEnd(_info: usize) {
        group::forget()
    }

    fn ncclRedOpCreatePreMulSum / pncclRedOpCreatePreMulSum(
        op: Out<u32>, scalar: usize, dtype: u32, _residence: i32, communicator: CommHandle
    ) {
        Communicator::find_ready(communicator)?;
        let factor = scalar_at(scalar, DataType::new(dtype).ok_or(NcclError::INVALID_ARGUMENT)?)?;
        let mut factors = FACTORS.lock().unwrap_or_else(PoisonError::into_inner);
        factors.push(Some(factor));
        Ok(op.set(FIRST_OWN_OP + factors.len() as u32 - 1)?)
    }

    fn ncclRedOpDestroy / pncclRedOpDestroy(op: u32, _communicator: CommHandle) {
        let mut factors = FACTORS.lock().unwrap_or_else(PoisonError::into_inner);
        let place = op.checked_sub(FIRST_OWN_OP).and_then(|index| factors.get_mut(index as usize));
        place.and_then(Option::take).map(drop).ok_or(NcclError::INVALID_ARGUMENT)
    }

    fn ncclMemAlloc / pncclMemAlloc(address: Out<usize>, bytes: usize) {
        cuda((driver()?.memory_allocate)(address, bytes))
    }

    fn ncclMemFree / pncclMemFree(address: usize) {
        cuda((driver()?.memory_free)(address))
    }

    fn ncclCommRegister / pncclCommRegister(communicator: CommHandle, buffer: usize, _bytes: usize, handle: Out<usize>) {
        Communicator::find_ready(communicator)?;
        Ok(handle.set(buffer)?)
    }

    fn ncclCommDeregister / pncclCommDeregister(communicator: CommHandle, _handle: usize) {
        Communicator::find_ready(communicator).map(drop)
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: i32) -> Text {
    error_string(code)
}

#[unsafe(no_mangle)]
pub extern "C" fn pncclGetErrorString(code: i32) -> Text {
    black_box(error_string(code))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_communicator: CommHandle) -> Text {
    last_error()
}

#[unsafe(no_mangle)]
pub extern "C" fn pncclGetLastError(_communicator: CommHandle) -> Text {
    black_box(last_error())
}

fn error_string(code: i32) -> Text {
    Text::of(match code {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    })
}

fn last_error() -> Text {
    match LAST_ERROR.get() {
        0 => Text::of(c""),
        code => error_string(code),
    }
}

/// The factors of user-defined operations, and the number of the first.
static FACTORS: Mutex<Vec<Option<f64>>> = Mutex::new(Vec::new());
const FIRST_OWN_OP: u32 = 5;

fn scalar_at(address: usize, dtype: DataType) -> Result<f64, NcclError> {
    use sim_abi::ffi::read;
    if address == 0 {
        return Err(NcclError::INVALID_ARGUMENT);
    }
    Ok(match dtype {
        DataType::I8 => read::<i8>(address, 0).into(),
        DataType::U8 => read::<u8>(address, 0).into(),
        DataType::I32 => read::<i32>(address, 0).into(),
        DataType::U32 => read::<u32>(address, 0).into(),
        DataType::I64 => read::<i64>(address, 0) as f64,
        DataType::U64 => read::<u64>(address, 0) as f64,
        DataType::F16 => read::<half::f16>(address, 0).into(),
        DataType::Bf16 => read::<half::bf16>(address, 0).into(),
        DataType::F32 => read::<f32>(address, 0).into(),
        DataType::F64 => read::<f64>(address, 0),
        DataType::F8E4M3 | DataType::F8E5M2 => return Err(NcclError::INVALID_ARGUMENT),
    })
}

fn combine_of(number: u32) -> Result<Combine, NcclError> {
    let Some(own) = number.checked_sub(FIRST_OWN_OP) else { return Combine::new(number) };
    let factors = FACTORS.lock().unwrap_or_else(PoisonError::into_inner);
    let factor = factors.get(own as usize).copied().flatten().ok_or(NcclError::INVALID_ARGUMENT)?;
    Ok(Combine::PreMulSum(factor))
}

/// The caller's rank in a communicator, and its size.
fn place(communicator: CommHandle) -> Result<(usize, usize), NcclError> {
    Communicator::find_ready(communicator)?.place.get().copied().ok_or(NcclError::INVALID_ARGUMENT)
}

fn check(code: i32) -> Result<(), NcclError> {
    if code == 0 { Ok(()) } else { Err(NcclError(code)) }
}

/// Runs `body` in a group that starts and ends through the dynamic symbols, as in the real
/// ncclSend.
fn grouped(body: impl FnOnce() -> Result<(), NcclError>) -> Result<(), NcclError> {
    check(through_symbol!(ncclGroupStart as extern "C" fn() -> i32)())?;
    let result = body();
    if let Err(error) = result {
        group::note_error(error);
    }
    result.and(check(through_symbol!(ncclGroupEnd as extern "C" fn() -> i32)()))
}

fn init_all(communicators: Out<CommHandle>, count: i32, devices: In<i32>) -> Result<(), NcclError> {
    let (driver, mut available) = (driver()?, 0);
    cuda((driver.device_count)(Out::to(&mut available)))?;
    let count = usize::try_from(count).map_err(|_| NcclError::INVALID_ARGUMENT)?;
    let device = |index: usize| if devices.is_null() { Ok(index as i32) } else { devices.at(index) };
    let listed = (0..count).map(device).collect::<Result<Vec<_>, _>>()?;
    if listed.is_empty() || listed.iter().any(|device| !(0..available).contains(device)) {
        return Err(NcclError::INVALID_ARGUMENT);
    }
    let (mut id, mut before) = (UniqueId { internal: [0; 128] }, 0);
    check(through_symbol!(ncclGetUniqueId as extern "C" fn(Out<UniqueId>) -> i32)(Out::to(&mut id)))?;
    cuda((driver.context_current)(Out::to(&mut before)))?;
    let result = grouped(|| {
        for (rank, device) in listed.iter().enumerate() {
            let mut context = 0;
            cuda((driver.primary_retain)(Out::to(&mut context), *device))?;
            cuda((driver.context_set_current)(context))?;
            group::init_rank(communicators.offset(rank), count as i32, id, rank as i32, In::null())?;
        }
        Ok(())
    });
    cuda((driver.context_set_current)(before))?;
    result
}

/// The arguments of a call.
struct Call {
    op: Op,
    send: usize,
    recv: usize,
    count: usize,
    dtype: u32,
    combine: Option<u32>,
    rank: i32,
    communicator: CommHandle,
    stream: StreamHandle,
}

/// Checks a call, applies its fault, and adds it to the group.
fn enqueue(call: Call) -> Result<(), NcclError> {
    let fault = Fault::of_next_call();
    let (communicator, task) = call.check()?;
    submit(fault, communicator, call.stream, task)
}

/// The sends and receives of one call: the operation, the peer, and the element of the buffer in
/// units of `count`.
fn exchange(
    send: usize,
    recv: usize,
    count: usize,
    dtype: u32,
    communicator: CommHandle,
    stream: StreamHandle,
    all: &[(Op, usize, usize)],
) -> Result<(), NcclError> {
    let fault = Fault::of_next_call();
    let width = DataType::new(dtype).ok_or(NcclError::INVALID_ARGUMENT)?.width();
    group::start();
    let result = all.iter().try_for_each(|&(op, peer, place)| {
        let offset = place * count * width;
        let (send, recv) = if op == Op::Send { (send + offset, 0) } else { (0, recv + offset) };
        let call = Call { op, send, recv, count, dtype, combine: None, rank: peer as i32, communicator, stream };
        let (communicator, task) = call.check()?;
        submit(fault, communicator, stream, task)
    });
    if let Err(error) = result {
        group::note_error(error);
    }
    result.and(group::end())
}

/// Sends or receives signals: their number, and the peer.
fn signals(op: Op, all: &[(i32, i32)], communicator: CommHandle, stream: StreamHandle) -> Result<(), NcclError> {
    let fault = Fault::of_next_call();
    group::start();
    let peers = all.iter().flat_map(|&(times, peer)| (0..times.max(0)).map(move |_| peer));
    let result = peers.into_iter().try_for_each(|peer| {
        let call = Call { op, send: 0, recv: 0, count: 0, dtype: 0, combine: None, rank: peer, communicator, stream };
        let (communicator, task) = call.check()?;
        submit(fault, communicator, stream, task)
    });
    if let Err(error) = result {
        group::note_error(error);
    }
    result.and(group::end())
}

impl Call {
    fn check(&self) -> Result<(Arc<Communicator>, Task), NcclError> {
        let communicator = Communicator::find_ready(self.communicator)?;
        let (_, ranks) = *communicator.place.get().ok_or(NcclError::INVALID_ARGUMENT)?;
        let dtype = DataType::new(self.dtype).ok_or(NcclError::INVALID_ARGUMENT)?;
        let combine = self.combine.map_or(Ok(Combine::Sum), combine_of)?;
        let rank = usize::try_from(self.rank).map_err(|_| NcclError::INVALID_ARGUMENT)?;
        if rank >= ranks || (self.combine.is_some() && !task::can_reduce(dtype)) {
            return Err(NcclError::INVALID_ARGUMENT);
        }
        let (send, recv, count) = (self.send, self.recv, self.count);
        Ok((communicator, Task { op: self.op, dtype, combine, count, rank, send, recv, announced: count }))
    }
}

fn submit(
    fault: Option<Fault>,
    communicator: Arc<Communicator>,
    stream: StreamHandle,
    mut task: Task,
) -> Result<(), NcclError> {
    match fault {
        Some(Fault::Skip) => return Ok(()),
        Some(Fault::Size) => task.announced += 1,
        // The changed operation never finds a peer, so its buffers need only be readable.
        Some(Fault::Op) if task.op == Op::Broadcast => task = Task { op: Op::AllReduce, send: task.recv, ..task },
        Some(Fault::Op) => {
            let buffer = if task.send == 0 { task.recv } else { task.send };
            task = Task { op: Op::Broadcast, send: buffer, recv: buffer, rank: 0, ..task };
        }
        None => {}
    }
    // An empty operation does nothing, except between two ranks, which still wait for each other.
    if task.count == 0 && !task.is_point_to_point() {
        return Ok(());
    }
    group::add(communicator, stream, task)
}

/// The fault of one call.
#[derive(Clone, Copy)]
enum Fault {
    Skip,
    Op,
    Size,
}

impl Fault {
    /// Counts a call. `kill` ends the process here.
    fn of_next_call() -> Option<Self> {
        static CALLS: AtomicU64 = AtomicU64::new(0);
        let (number, faults) = (CALLS.fetch_add(1, Ordering::Relaxed) + 1, fault::faults(false));
        if faults.at(Kind::Kill, number) {
            // SAFETY: a signal to this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        [(Kind::Skip, Fault::Skip), (Kind::Op, Fault::Op), (Kind::Size, Fault::Size)]
            .into_iter()
            .find(|(kind, _)| faults.at(*kind, number))
            .map(|(_, fault)| fault)
    }
}
