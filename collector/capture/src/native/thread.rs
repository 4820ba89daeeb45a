//! The native stack of one thread: read while it sleeps, sampled by the kernel while it runs, or,
//! only on request, copied during a short stop.

use std::time::Duration;

use gimli::UnwindContext;
use xpu_timer_proto::{
    procfs::{self, Schedule, Status, Syscall, state_text},
    server::CaptureMethod,
};

use crate::{
    error::Error,
    kernel::awaited::{Call, Sleeper},
    memory::Region,
};

use super::{
    RawFrame, Registers,
    address_space::AddressSpace,
    perf::Sample,
    unwind::{End, Memory, unwind},
};

/// How often to read a thread that runs in between.
const MAX_READS: usize = 3;
/// System calls whose name already explains the wait, so the kernel stack adds nothing.
const SELF_EXPLANATORY_WAITS: [i64; 14] = [
    libc::SYS_futex,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_select,
    libc::SYS_pselect6,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_pause,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_sigsuspend,
    libc::SYS_wait4,
    libc::SYS_waitid,
];

/// The captured state of one thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct Thread {
    pub tid: i32,
    pub status: Status,
    pub wchan: String,
    pub kernel_stack: Vec<String>,
    pub cpu_time_ns: u64,
    /// How often it was put on a CPU until it began the sleep in which it was read. 0 if it was not
    /// read in its sleep, or the kernel does not count this.
    runs: u64,
    pub syscall: Option<i64>,
    /// The call with its arguments, while the thread sleeps in it.
    call: Option<Call>,
    pub method: CaptureMethod,
    pub frames: Vec<RawFrame>,
    /// Length of its stack in bytes; 0 if unknown.
    pub(super) stack_length: usize,
    /// Why `frames` is incomplete; empty for a complete stack.
    pub incomplete: String,
    /// How long it was stopped: the longest time if it was stopped more than once.
    pub stopped: Duration,
}

/// Result of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadResult {
    /// The stack is complete, or as complete as possible.
    Done,
    /// The thread runs.
    Running,
    /// The thread slept, but ran in between.
    RanBetween,
}

/// Why a read failed.
enum ReadFailure {
    Running,
    RanBetween,
    Failed(Error),
}

impl<E: Into<Error>> From<E> for ReadFailure {
    fn from(error: E) -> Self {
        ReadFailure::Failed(error.into())
    }
}

impl Thread {
    /// Reads the state of a thread from `/proc`, without its stack.
    pub(crate) fn describe(pid: i32, tid: i32) -> Result<Self, Error> {
        let mut thread = Thread { tid, status: procfs::status(pid, tid)?, ..Thread::default() };
        thread.method = CaptureMethod::KernelOnly;
        thread.cpu_time_ns = Schedule::of(pid, tid).cpu_ns;
        thread.read_kernel_state(pid);
        Ok(thread)
    }

    /// The thread, to find what it waits for.
    pub(crate) fn sleeper(&self) -> Sleeper<'_> {
        Sleeper { tid: self.tid, name: &self.status.name, wchan: &self.wchan, call: self.call }
    }

    /// Reads where in the kernel the thread is.
    fn read_kernel_state(&mut self, pid: i32) {
        self.wchan = procfs::wchan(pid, self.tid);
        let is_plain = self.syscall.is_some_and(|number| SELF_EXPLANATORY_WAITS.contains(&number));
        if self.status.letter() != b'S' || !is_plain {
            self.kernel_stack = procfs::kernel_stack(pid, self.tid);
        }
    }

    /// Reads the state of a thread, and its stack if it sleeps. `None` if it has ended.
    pub(crate) fn read(
        pid: i32,
        tid: i32,
        space: &AddressSpace<'_>,
        context: &mut UnwindContext<usize>,
    ) -> Option<(Self, ReadResult)> {
        let mut thread = Thread { tid, method: CaptureMethod::KernelOnly, ..Thread::default() };
        let mut read = thread.read_long_sleep(pid, space, context);
        for _ in 1..MAX_READS {
            if !matches!(read, Ok(ReadResult::RanBetween)) {
                break;
            }
            read = thread.read_short_sleep(pid, space, context, &mut || {});
        }
        let read = match read {
            Ok(read) => read,
            Err(error) if error.is_gone() => return None,
            Err(error) => {
                thread.incomplete = if error.is_denied() {
                    Error::denied(pid, thread.status.uid).to_string()
                } else {
                    error.to_string()
                };
                ReadResult::Done
            }
        };
        thread.read_kernel_state(pid);
        Some((thread, read))
    }

    /// Reads the stack of a thread that sleeps for long: memory is copied on demand during the
    /// unwinding.
    fn read_long_sleep(
        &mut self,
        pid: i32,
        space: &AddressSpace<'_>,
        context: &mut UnwindContext<usize>,
    ) -> Result<ReadResult, Error> {
        let tid = self.tid;
        let schedule = Schedule::of(pid, tid);
        self.cpu_time_ns = schedule.cpu_ns;
        self.status = procfs::status(pid, tid)?;
        if self.has_ended() {
            return Ok(ReadResult::Done);
        }
        let Some(SleepingStack { frames, end, syscall, stack_length }) = unwind_sleeping(pid, tid, space, context)?
        else {
            return Ok(ReadResult::Running);
        };
        self.stack_length = stack_length;
        if !has_slept(pid, tid, &schedule, &self.status) {
            return Ok(ReadResult::RanBetween);
        }
        self.store_sleeping(frames, end, &syscall, schedule.runs);
        Ok(ReadResult::Done)
    }

    /// Whether the thread has slept since its stack was read.
    ///
    /// # Errors
    /// The thread has ended.
    pub(crate) fn still_sleeps(&self, pid: i32) -> Result<bool, procfs::Error> {
        // Reading its status takes the kernel three times as long.
        if self.runs > 0
            && let Some(now) = procfs::schedstat(pid, self.tid)
        {
            return Ok(now.runs == self.runs);
        }
        Ok(slept(&self.status, &procfs::status(pid, self.tid)?))
    }

    /// Reads the stack of a thread that may sleep for a short time only: memory is copied at once
    /// and unwound afterwards. Runs `action` while the thread sleeps, and again if the copy was too
    /// small; the last time counts.
    pub(crate) fn read_short_sleep(
        &mut self,
        pid: i32,
        space: &AddressSpace<'_>,
        context: &mut UnwindContext<usize>,
        action: &mut dyn FnMut(),
    ) -> Result<ReadResult, Error> {
        let tid = self.tid;
        let mut seen = None;
        let taken = copy_and_unwind(self.stack_length, space, context, |limit, wanted| {
            let buffers = CopyBuffers::new(limit, wanted);
            let schedule = Schedule::of(pid, tid);
            let status = procfs::status(pid, tid)?;
            let syscall = procfs::syscall(pid, tid)?;
            let registers = Registers::from_syscall(&syscall).ok_or(ReadFailure::Running)?;
            let regions = buffers.fill(tid, registers.sp(), space, wanted)?;
            action();
            if !has_slept(pid, tid, &schedule, &status) {
                return Err(ReadFailure::RanBetween);
            }
            seen = Some((schedule, status, syscall));
            Ok((registers, regions))
        });
        match (taken, seen) {
            (Ok((frames, end)), Some((schedule, status, syscall))) => {
                self.cpu_time_ns = schedule.cpu_ns;
                self.status = status;
                self.store_sleeping(frames, end, &syscall, schedule.runs);
                Ok(ReadResult::Done)
            }
            (Err(ReadFailure::Failed(error)), _) => {
                // The memory of an ended thread is gone, and its last state shows that it has
                // ended.
                self.status = procfs::status(pid, tid)?;
                if self.has_ended() { Ok(ReadResult::Done) } else { Err(error) }
            }
            (Err(ReadFailure::Running), _) => Ok(ReadResult::Running),
            (Err(ReadFailure::RanBetween), _) | (Ok(_), None) => Ok(ReadResult::RanBetween),
        }
    }

    fn has_ended(&mut self) -> bool {
        let ended = matches!(self.status.letter(), b'Z' | b'X');
        if ended {
            self.incomplete = format!("the thread has ended: {}", self.status.state);
        }
        ended
    }

    fn store_sleeping(&mut self, frames: Vec<RawFrame>, end: End, syscall: &Syscall, runs: u64) {
        self.frames = frames;
        self.runs = runs;
        self.syscall = match *syscall {
            Syscall::Blocked { number, .. } => Some(number),
            Syscall::Running => None,
        };
        self.call = Call::of(syscall);
        self.method = CaptureMethod::ZeroStop;
        self.incomplete = end.describe();
    }

    /// Stores a sample that the kernel took while the thread ran.
    pub(crate) fn store_sample(
        &mut self,
        pid: i32,
        sample: Sample,
        space: &AddressSpace<'_>,
        context: &mut UnwindContext<usize>,
    ) {
        let (start, length) = (sample.stack.start, sample.stack.bytes.len());
        let stack = space.mapping(start);
        let memory = Memory::from_copies(vec![sample.stack]);
        let (frames, end) = unwind(sample.registers, &memory, space, context);
        self.frames = frames;
        self.method = CaptureMethod::PerfSample;
        self.incomplete = match end {
            End::Memory(address) if stack.is_some_and(|stack| start < address && address < stack.end) => {
                format!("the stack is larger than the {length} bytes of a sample")
            }
            end => end.describe(),
        };
        // For a running thread, the kernel does not report which system call it is in.
        self.syscall = if sample.in_kernel { None } else { Some(-1) };
        self.call = None;
        self.cpu_time_ns = Schedule::of(pid, self.tid).cpu_ns;
        if let Ok(status) = procfs::status(pid, self.tid) {
            self.status = status;
        }
        self.status.state = state_text('R');
        self.wchan.clear();
        self.kernel_stack.clear();
    }

    /// Adds a reason why the stack is incomplete.
    pub(crate) fn add_reason(&mut self, reason: &str) {
        if !self.incomplete.is_empty() {
            self.incomplete.push_str("; ");
        }
        self.incomplete.push_str(reason);
    }
}

/// The stack of a sleeping thread.
struct SleepingStack {
    frames: Vec<RawFrame>,
    end: End,
    /// The system call in which it sleeps.
    syscall: Syscall,
    /// Length of the stack in bytes.
    stack_length: usize,
}

/// Unwinds a sleeping thread; memory is copied on demand. `None` if it does not sleep.
fn unwind_sleeping(
    pid: i32,
    tid: i32,
    space: &AddressSpace<'_>,
    context: &mut UnwindContext<usize>,
) -> Result<Option<SleepingStack>, Error> {
    let syscall = procfs::syscall(pid, tid)?;
    let Some(registers) = Registers::from_syscall(&syscall) else { return Ok(None) };
    let memory = Memory::on_demand(tid, space);
    memory.fetch_stack(registers.sp())?;
    let (frames, end) = unwind(registers, &memory, space, context);
    Ok(Some(SleepingStack { frames, end, syscall, stack_length: memory.stack_length() }))
}

/// Whether a thread has not run since its schedule was read. The kernel counts a run before it
/// starts, so an unchanged count is proof. Without that count, the context switches in the status
/// are used.
fn has_slept(pid: i32, tid: i32, schedule: &Schedule, before: &Status) -> bool {
    schedule.is_unchanged().unwrap_or_else(|| procfs::status(pid, tid).is_ok_and(|after| slept(before, &after)))
}

/// Whether a thread has slept between two reads of its status. A thread that was woken and still
/// runs was not switched away from yet, so an equal count alone proves nothing.
fn slept(before: &Status, after: &Status) -> bool {
    before.switches == after.switches && before.letter() != b'R' && after.letter() != b'R'
}

/// Bytes of a stack to copy first. Most stacks use a few KB.
const FIRST_COPY: usize = 16 << 10;
/// Bytes by which a stack may have grown since its length was measured.
const GROWTH_ALLOWANCE: usize = 512;
/// Factor by which the next copy is larger if one was too small.
const GROWTH_FACTOR: usize = 8;
/// Maximum number of bytes to copy of a stack.
const MAX_COPY: usize = 64 << 20;
/// Bytes to copy at an address outside the stack.
const RANGE_BYTES: usize = 64 << 10;
/// Maximum number of repetitions with a larger copy.
const MAX_REPETITIONS: usize = 6;
/// Number of bytes to copy of a stack whose length was `length` when it was last unwound; 0 if
/// unknown.
pub(super) fn initial_copy_length(length: usize) -> usize {
    // The stack may have grown a little since.
    if length == 0 { FIRST_COPY } else { length + length / 8 + GROWTH_ALLOWANCE }
}

/// Copies while a thread does not run and unwinds the copy. As long as the copy lacks memory that
/// the unwinding needs, a larger copy is taken. `length` is the expected length of the stack.
pub(super) fn copy_and_unwind<E>(
    length: usize,
    space: &AddressSpace<'_>,
    context: &mut UnwindContext<usize>,
    mut copied: impl FnMut(usize, &[u64]) -> Result<(Registers, Vec<Region>), E>,
) -> Result<(Vec<RawFrame>, End), E> {
    let mut limit = initial_copy_length(length);
    let mut wanted = Vec::new();
    let mut attempt = 0;
    loop {
        let (registers, regions) = copied(limit, &wanted)?;
        let memory = Memory::from_copies(regions);
        let (frames, end) = unwind(registers, &memory, space, context);
        attempt += 1;
        if let End::Memory(address) = end
            && attempt <= MAX_REPETITIONS
            && let Some(mapping) = space.mapping(address)
            && mapping.readable
        {
            if mapping.start <= registers.sp() && registers.sp() < mapping.end && limit < MAX_COPY {
                limit = MAX_COPY.min(limit * GROWTH_FACTOR);
                continue;
            }
            if !wanted.contains(&address) {
                wanted.push(address);
                continue;
            }
        }
        return Ok((frames, end));
    }
}

/// Buffers for copies. They are allocated before a stop, so that copying is all that is left to do
/// during the stop.
#[derive(Default)]
pub(super) struct CopyBuffers {
    stack: Vec<u8>,
    pieces: Vec<Vec<u8>>,
    regions: Vec<Region>,
}

impl CopyBuffers {
    pub(super) fn new(limit: usize, wanted: &[u64]) -> Self {
        // The first write to fresh memory costs a page fault, which would otherwise happen during
        // the stop.
        CopyBuffers {
            stack: vec![1; limit],
            pieces: wanted.iter().map(|_| vec![1; RANGE_BYTES]).collect(),
            regions: Vec::with_capacity(1 + wanted.len()),
        }
    }

    /// Copies the stack from `sp` upwards, and a range at each wanted address.
    pub(super) fn fill(
        self,
        tid: i32,
        sp: u64,
        space: &AddressSpace<'_>,
        wanted: &[u64],
    ) -> Result<Vec<Region>, Error> {
        let mut regions = self.regions;
        regions.push(Region::read_stack(tid, sp, space.known_mapping(sp).as_deref(), self.stack)?);
        for (address, buffer) in wanted.iter().zip(self.pieces) {
            regions.push(Region::read_into(tid, address & !0xfff, buffer)?);
        }
        Ok(regions)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use crate::objects::Images;

    use super::*;

    #[test]
    fn a_thread_that_ran_or_ended_does_not_sleep_on() {
        let (wake, sleep) = mpsc::channel::<()>();
        let (sender, receiver) = mpsc::channel();
        let sleeper = std::thread::spawn(move || {
            sender.send(nix::unistd::gettid().as_raw()).unwrap();
            while sleep.recv().is_ok() {
                sender.send(0).unwrap();
            }
        });
        let (pid, tid) = (std::process::id() as i32, receiver.recv().unwrap());
        let images = Images::default();
        let space = AddressSpace::open(&images, pid, pid).unwrap();
        let read = || loop {
            match Thread::read(pid, tid, &space, &mut UnwindContext::new()).unwrap() {
                (thread, ReadResult::Done) => break thread,
                _ => std::thread::yield_now(),
            }
        };
        let mut thread = read();
        assert!(thread.still_sleeps(pid).unwrap());
        wake.send(()).unwrap();
        receiver.recv().unwrap();
        assert!(!thread.still_sleeps(pid).unwrap(), "it has run, whatever it does now");
        // A kernel that does not count how often a thread ran counts its context switches.
        thread = read();
        thread.runs = 0;
        assert!(thread.still_sleeps(pid).unwrap());
        drop(wake);
        sleeper.join().unwrap();
        // The kernel removes the thread a little later.
        while thread.still_sleeps(pid).is_ok() {
            std::thread::yield_now();
        }
        assert!(thread.still_sleeps(pid).is_err_and(|error| error.is_gone()));
        thread.runs = 1;
        assert!(thread.still_sleeps(pid).is_err_and(|error| error.is_gone()));
    }
}
