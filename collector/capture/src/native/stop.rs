//! Stops threads, one by one or all at once, and takes their stacks.

use std::time::{Duration, Instant};

use gimli::UnwindContext;
use xpu_timer_proto::{
    procfs::{self, Syscall},
    server::CaptureMethod,
};

use crate::{error::Error, memory::Region};

use super::{
    RawFrame, Registers,
    address_space::AddressSpace,
    ptrace::{self, RaisedPriority, Stop},
    thread::{CopyBuffers, Thread, copy_and_unwind, initial_copy_length},
    unwind::{End, Memory, unwind},
};

/// Time limit for one thread to stop.
const STOP_TIMEOUT: Duration = Duration::from_millis(250);
/// System calls that a stop cuts short after a part is done. They return less than requested, which
/// programs without signal handlers do not expect.
const INTERRUPTED_CALLS: [i64; 12] = [
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_vmsplice,
    libc::SYS_copy_file_range,
];

impl Thread {
    /// Stops the thread, takes its stack and runs `action` during the stop. If the copy is too
    /// small, the thread is stopped again; the last time counts. On failure, the previous state
    /// remains, with the reason.
    pub(crate) fn stop(
        &mut self,
        pid: i32,
        space: &AddressSpace<'_>,
        context: &mut UnwindContext<usize>,
        deadline: Instant,
        action: &mut dyn FnMut(),
    ) -> Result<(), Error> {
        if !self.may_be_stopped(pid)? {
            return Ok(());
        }
        let tid = self.tid;
        let mut longest = Duration::ZERO;
        let taken = copy_and_unwind(self.stack_length, space, context, |limit, wanted| {
            let buffers = CopyBuffers::new(limit, wanted);
            let priority = RaisedPriority::new();
            // A new time limit each time, because opening files in between may have taken long.
            let stop = Stop::new(pid, tid, deadline.min(Instant::now() + STOP_TIMEOUT), &priority)?;
            let registers = stop.registers()?;
            let regions = buffers.fill(tid, registers.sp(), space, wanted);
            action();
            longest = longest.max(stop.release());
            Ok((registers, regions?))
        });
        self.stopped = self.stopped.max(longest);
        self.take(pid, taken)
    }

    /// Whether the thread may be stopped. A thread in uninterruptible sleep would not respond, and
    /// a thread in a send would notice. It may have entered such a state since it was read. An
    /// error means that it has ended.
    fn may_be_stopped(&mut self, pid: i32) -> Result<bool, Error> {
        let status = procfs::status(pid, self.tid)?;
        let reason = match status.letter() {
            b'D' => "the thread sleeps uninterruptibly and cannot be stopped",
            b'S' if is_in_interrupted_call(pid, self.tid) => {
                "the thread waits in a system call that a stop would cut short"
            }
            _ => return Ok(true),
        };
        self.status = status;
        self.add_reason(reason);
        Ok(false)
    }

    /// Stores the result of a stop. An error means that the thread has ended.
    fn take(&mut self, pid: i32, taken: Result<(Vec<RawFrame>, End), Error>) -> Result<(), Error> {
        match taken {
            Ok((frames, end)) => {
                self.frames = frames;
                self.method = CaptureMethod::Ptrace;
                self.incomplete = end.describe();
                let switches = procfs::status(pid, self.tid).map(|status| status.switches);
                self.status.switches = switches.unwrap_or(self.status.switches);
                Ok(())
            }
            Err(error) if error.is_gone() => Err(error),
            Err(error) => {
                self.add_reason(&error.to_string());
                Ok(())
            }
        }
    }
}

/// Whether a thread waits in one of [`INTERRUPTED_CALLS`].
fn is_in_interrupted_call(pid: i32, tid: i32) -> bool {
    let blocked = procfs::syscall(pid, tid);
    matches!(blocked, Ok(Syscall::Blocked { number, .. }) if INTERRUPTED_CALLS.contains(&number))
}

/// Stops all these threads at once and takes their stacks. This takes less time in total than one
/// after the other, but holds each thread longer. Returns the threads that have ended.
pub(crate) fn stop_all(
    pid: i32,
    threads: Vec<&mut Thread>,
    space: &AddressSpace<'_>,
    context: &mut UnwindContext<usize>,
    deadline: Instant,
) -> Vec<i32> {
    struct StoppingThread<'a> {
        thread: &'a mut Thread,
        buffers: CopyBuffers,
        copied: Option<Result<(Registers, Vec<Region>), Error>>,
        stop: Option<Stop>,
    }
    let patience = deadline.min(Instant::now() + STOP_TIMEOUT);
    let mut gone = Vec::new();
    let mut all = Vec::with_capacity(threads.len());
    let mut stops = Vec::with_capacity(threads.len());
    for thread in threads {
        let seized = match thread.may_be_stopped(pid) {
            Ok(true) => Stop::seize(pid, thread.tid),
            Ok(false) => continue,
            Err(error) => Err(error),
        };
        match seized {
            Ok(stop) => {
                let buffers = CopyBuffers::new(initial_copy_length(thread.stack_length), &[]);
                all.push(StoppingThread { thread, buffers, copied: None, stop: None });
                stops.push(Some(stop));
            }
            Err(error) => {
                let tid = thread.tid;
                gone.extend(thread.take(pid, Err(error)).is_err().then_some(tid));
            }
        }
    }
    // No thread is stopped yet, and all buffers are allocated.
    let priority = RaisedPriority::new();
    for (stopping, slot) in all.iter_mut().zip(&mut stops) {
        if let Some(Err(error)) = slot.as_mut().map(|stop| stop.request(pid)) {
            *slot = None;
            stopping.copied = Some(Err(error));
        }
    }
    ptrace::each_stopped(&mut stops, patience, &priority, |place, stop| {
        let stopping = &mut all[place];
        let buffers = std::mem::take(&mut stopping.buffers);
        let copied = stop
            .registers()
            .and_then(|registers| Ok((registers, buffers.fill(stopping.thread.tid, registers.sp(), space, &[])?)));
        stopping.copied = Some(copied);
        stopping.stop = Some(stop);
    });
    // Not one by one in the loop above: threads that continue would take the CPU from those that
    // must still stop.
    for stopping in &mut all {
        stopping.thread.stopped = stopping.stop.take().map_or(Duration::ZERO, Stop::release);
    }
    drop(priority);
    for (StoppingThread { thread, copied, .. }, stop) in all.into_iter().zip(stops) {
        let tid = thread.tid;
        let taken = copied.unwrap_or_else(|| {
            let waited_us = STOP_TIMEOUT.as_micros() as u64;
            Err(if stop.is_some() { Error::NoStop { tid, waited_us } } else { Error::Gone(tid) })
        });
        let unwound =
            taken.map(|(registers, regions)| unwind(registers, &Memory::from_copies(regions), space, context));
        let ended = match unwound {
            // The unwinding needs more than was copied.
            Ok((_, End::Memory(_))) => thread.stop(pid, space, context, deadline, &mut || {}),
            unwound => thread.take(pid, unwound),
        };
        gone.extend(ended.is_err().then_some(tid));
    }
    gone
}
