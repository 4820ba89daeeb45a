//! NCCL's kernels and their launch. They run on the stream's thread, one at a time for each
//! communicator.

use std::{
    collections::HashSet,
    sync::{
        PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use sim_abi::{
    cuda::{HostKernels, StreamHandle},
    fault::{self, Kind},
    ffi::{Out, copy, read},
    nccl::NcclError,
};

use crate::{
    arena::{Aborted, Arena},
    communicator::Communicator,
    driver::{Driver, cuda, driver},
    task::{self, Combine, Op, Task},
};

/// Number of words before the tasks in the argument buffer: the communicator's number, and whether
/// its launch was counted.
pub(crate) const HEAD_WORDS: usize = 2;

/// The entry point, called by the driver with the argument buffer of the launch.
pub(crate) extern "C" fn run(arguments: usize, bytes: usize) {
    let words: Vec<u64> = (0..bytes / size_of::<u64>()).map(|index| read(arguments, index)).collect();
    let Some((head, tasks)) = words.split_at_checked(HEAD_WORDS) else { return };
    // A communicator that was destroyed or aborted since the launch has no work left.
    let Some(communicator) = Communicator::numbered(head[0]) else { return };
    let tasks: Vec<Task> = tasks.chunks(Task::WORDS).filter_map(Task::decode).collect();
    // An abort ends the kernel, and the stream continues, as in the real library.
    let _ = perform(&communicator, &tasks);
    if head[1] != 0 {
        communicator.finished();
    }
}

fn perform(communicator: &Communicator, tasks: &[Task]) -> Result<(), Aborted> {
    let mut phase = communicator.phase();
    let Some(arena) = communicator.arena() else { return Err(communicator.wait_for_abort()) };
    let (peers, all): (Vec<&Task>, Vec<&Task>) = tasks.iter().partition(|task| task.is_point_to_point());
    for task in &all {
        stall(communicator, task)?;
        collective(communicator, arena, &mut phase, task)?;
    }
    for task in &peers {
        stall(communicator, task)?;
    }
    exchange(communicator, arena, &peers)
}

/// The fault `stall`: after this process has moved that many bytes, none of its transfers makes
/// progress.
fn stall(communicator: &Communicator, task: &Task) -> Result<(), Aborted> {
    static MOVED: AtomicU64 = AtomicU64::new(0);
    let moved = MOVED.fetch_add(task.bytes() as u64, Ordering::Relaxed) + task.bytes() as u64;
    match fault::faults(false).value(Kind::Stall) {
        Some(limit) if moved > limit => Err(communicator.wait_for_abort()),
        _ => Ok(()),
    }
}

/// Every rank shows a piece, all ranks meet, and every rank takes its data; then the next piece
/// follows.
fn collective(communicator: &Communicator, arena: &Arena, phase: &mut u32, task: &Task) -> Result<(), Aborted> {
    let (ranks, rank, total, width) = (arena.ranks, arena.rank, task.bytes(), task.dtype.width());
    // ReduceScatter shows a piece for every rank at once.
    let pieces = if task.op == Op::ReduceScatter { ranks } else { 1 };
    let piece = arena.stage_bytes / pieces / 8 * 8;
    for (index, from) in (0..total).step_by(piece).enumerate() {
        let bytes = piece.min(total - from);
        let count = bytes / width;
        *phase = phase.wrapping_add(1);
        let own = arena.stage(rank, *phase);
        match task.op {
            Op::Broadcast if rank != task.rank => {}
            Op::ReduceScatter => (0..ranks).for_each(|to| copy(own + to * piece, task.send + to * total + from, bytes)),
            _ => copy(own, task.send + from, bytes),
        }
        if let Combine::PreMulSum(factor) = task.combine {
            task::scale(task.dtype, factor, own, if pieces == 1 { count } else { pieces * piece / width });
        }
        let tag = task.shape().wrapping_add(0x9e37_79b9u32.wrapping_mul(index as u32));
        arena.meet(*phase, tag, communicator.aborted())?;
        let shown = |of: usize| arena.stage(of, *phase);
        let combine = |offset: usize| {
            let sources: Vec<_> = (0..ranks).map(|of| shown(of) + offset).collect();
            task::reduce(task.dtype, task.combine, &sources, task.recv + from, count);
        };
        match task.op {
            Op::AllReduce => combine(0),
            Op::Reduce if rank == task.rank => combine(0),
            Op::ReduceScatter => combine(rank * piece),
            Op::Broadcast => copy(task.recv + from, shown(task.rank), bytes),
            Op::AllGather => (0..ranks).for_each(|of| copy(task.recv + of * total + from, shown(of), bytes)),
            Op::Reduce | Op::Send | Op::Recv => {}
        }
    }
    Ok(())
}

/// A send or receive in progress.
struct Transfer<'a> {
    task: &'a Task,
    chunks: usize,
    /// Number of chunks that this side has completed.
    done: usize,
}

/// All sends and receives of a group progress concurrently, so their order does not matter between
/// different peers.
///
/// A send is complete when its receiver has taken it: nothing is buffered, and a send without a
/// receive hangs.
fn exchange(communicator: &Communicator, arena: &Arena, tasks: &[&Task]) -> Result<(), Aborted> {
    let chunks = |task: &Task| task.bytes().div_ceil(arena.chunk_bytes).max(1);
    let mut transfers: Vec<_> = tasks.iter().map(|task| Transfer { task, chunks: chunks(task), done: 0 }).collect();
    while !transfers.is_empty() {
        let seen = arena.doorbell();
        let (mut moved, mut busy) = (false, HashSet::new());
        transfers.retain_mut(|transfer| {
            // Transfers between the same two ranks in the same direction keep their order.
            if !busy.insert((transfer.task.op == Op::Send, transfer.task.rank)) {
                return true;
            }
            let (progress, finished) = transfer.advance(arena);
            moved |= progress;
            if finished {
                busy.remove(&(transfer.task.op == Op::Send, transfer.task.rank));
            }
            !finished
        });
        if !moved && !transfers.is_empty() {
            arena.sleep(seen, communicator.aborted())?;
        }
    }
    Ok(())
}

impl Transfer<'_> {
    /// Moves a chunk if it can. Returns whether anything changed, and whether it is finished.
    fn advance(&mut self, arena: &Arena) -> (bool, bool) {
        let (task, peer) = (self.task, self.task.rank);
        let offset = self.done * arena.chunk_bytes;
        let bytes = task.bytes().saturating_sub(offset).min(arena.chunk_bytes);
        // Both sides must have a message of the same size, and the same part of it.
        let tag = ((task.announced_bytes() as u64) << 20) ^ self.done as u64;
        if task.op == Op::Send {
            let (channel, data) = arena.channel(arena.rank, peer);
            if !channel.is_empty() {
                return (false, false);
            }
            if self.done == self.chunks {
                return (true, true);
            }
            copy(data, task.send + offset, bytes);
            channel.wrote(tag);
            self.done += 1;
        } else {
            let (channel, data) = arena.channel(peer, arena.rank);
            if channel.offered() != Some(tag) {
                return (false, false);
            }
            copy(task.recv + offset, data, bytes);
            channel.took();
            self.done += 1;
        }
        arena.ring(peer);
        (true, task.op == Op::Recv && self.done == self.chunks)
    }
}

impl Communicator {
    /// Launches tasks as one kernel.
    pub(crate) fn launch(&self, stream: StreamHandle, tasks: &[Task]) -> Result<(), NcclError> {
        let Some(first) = tasks.first() else { return Ok(()) };
        let driver = driver()?;
        let mut before = 0;
        cuda((driver.context_current)(Out::to(&mut before)))?;
        if before != self.context {
            cuda((driver.context_set_current)(self.context))?;
        }
        let result = self.launch_here(driver, stream, first, tasks);
        if before != self.context {
            cuda((driver.context_set_current)(before))?;
        }
        result
    }

    fn launch_here(
        &self,
        driver: &Driver,
        stream: StreamHandle,
        first: &Task,
        tasks: &[Task],
    ) -> Result<(), NcclError> {
        let mut capturing = 0;
        cuda((driver.is_capturing)(stream, Out::to(&mut capturing)))?;
        let counted = capturing == 0;
        if counted {
            self.order_after_other_streams(driver, stream)?;
            self.status().running += 1;
        }
        let mut arguments = Vec::with_capacity(HEAD_WORDS + tasks.len() * Task::WORDS);
        arguments.extend([self.number, u64::from(counted)]);
        arguments.extend(tasks.iter().flat_map(Task::encode));
        let launched = launch_kernel(&first.kernel_name(), stream, &arguments);
        if launched.is_err() && counted {
            self.finished();
        }
        launched
    }

    /// Kernels of a communicator run in the order of their launches, on any stream.
    fn order_after_other_streams(&self, driver: &Driver, stream: StreamHandle) -> Result<(), NcclError> {
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let last = order.0.replace(stream);
        let Some(last) = last.filter(|last| *last != stream) else { return Ok(()) };
        let event = match order.1 {
            Some(event) => event,
            None => {
                let (mut event, disable_timing) = (0, 2);
                cuda((driver.event_create)(Out::to(&mut event), disable_timing))?;
                *order.1.insert(event)
            }
        };
        let mut capturing = 0;
        // A stream that was destroyed, or is capturing, imposes no order.
        if (driver.is_capturing)(last, Out::to(&mut capturing)) == 0
            && capturing == 0
            && (driver.event_record)(event, last) == 0
        {
            cuda((driver.stream_wait_event)(stream, event, 0))?;
        }
        Ok(())
    }
}

/// Launches the kernel `name` in the thread's context.
fn launch_kernel(name: &str, stream: StreamHandle, arguments: &[u64]) -> Result<(), NcclError> {
    static KERNELS: HostKernels = HostKernels::new(run);
    KERNELS.launch(name, stream, arguments).map_err(|_| NcclError::UNHANDLED_CUDA)
}
