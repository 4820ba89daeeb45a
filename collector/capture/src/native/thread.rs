//! The native stack of one thread: read while it sleeps, sampled by the kernel while it runs, or,
//! only on request, copied during a short stop.

use std::time::Duration;

use gimli::UnwindContext;
use xpu_timer_proto::server::CaptureMethod;

use crate::{
    error::Error,
    kernel::{
        permission,
        procfs::{self, Schedule, Status, Syscall, state_text},
    },
};

use super::{
    address_space::AddressSpace,
    frame::RawFrame,
    perf::Sample,
    registers::Registers,
    stack_copy::{Room, copy},
    stack_memory::Memory,
    unwind::{End, unwind},
};

/// How often to read a thread that runs in between.
const LOOKS: usize = 3;
/// System calls whose name already explains the wait, so the kernel stack adds nothing.
const PLAIN_WAITS: [i64; 14] = [
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
    pub syscall: Option<i64>,
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
pub(crate) enum Look {
    /// The stack is complete, or as complete as possible.
    Done,
    /// The thread runs.
    Runs,
    /// The thread slept, but ran in between.
    Moved,
}

/// Why a read failed.
enum Missed {
    Runs,
    Moved,
    Failed(Error),
}

impl From<Error> for Missed {
    fn from(error: Error) -> Self {
        Missed::Failed(error)
    }
}

impl Thread {
    /// Reads the state of a thread from `/proc`, without its stack.
    pub fn describe(pid: i32, tid: i32) -> Result<Self, Error> {
        let mut thread = Thread { tid, status: procfs::status(pid, tid)?, ..Thread::default() };
        thread.method = CaptureMethod::KernelOnly;
        thread.cpu_time_ns = Schedule::of(pid, tid).cpu_ns;
        thread.look_into_kernel(pid);
        Ok(thread)
    }

    /// Reads where in the kernel the thread is.
    fn look_into_kernel(&mut self, pid: i32) {
        self.wchan = procfs::wchan(pid, self.tid);
        let is_plain = self.syscall.is_some_and(|number| PLAIN_WAITS.contains(&number));
        if self.status.letter() != b'S' || !is_plain {
            self.kernel_stack = procfs::kernel_stack(pid, self.tid);
        }
    }

    /// Reads the state of a thread, and its stack if it sleeps. `None` if it has ended.
    pub fn look(
        pid: i32,
        tid: i32,
        space: &AddressSpace<'_>,
        context: &mut UnwindContext<usize>,
    ) -> Option<(Self, Look)> {
        let mut thread = Thread { tid, method: CaptureMethod::KernelOnly, ..Thread::default() };
        let mut look = thread.look_once(pid, space, context);
        for _ in 1..LOOKS {
            if !matches!(look, Ok(Look::Moved)) {
                break;
            }
            look = thread.catch(pid, space, context, &mut || {});
        }
        let look = match look {
            Ok(look) => look,
            Err(error) if error.is_gone() => return None,
            Err(error) => {
                thread.incomplete = if error.is_denied() {
                    permission::denied(pid, thread.status.uid).to_string()
                } else {
                    error.to_string()
                };
                Look::Done
            }
        };
        thread.look_into_kernel(pid);
        Some((thread, look))
    }

    /// Reads the stack of a thread that sleeps for long: memory is copied on demand during the
    /// unwinding.
    fn look_once(
        &mut self,
        pid: i32,
        space: &AddressSpace<'_>,
        context: &mut UnwindContext<usize>,
    ) -> Result<Look, Error> {
        let tid = self.tid;
        let schedule = Schedule::of(pid, tid);
        self.cpu_time_ns = schedule.cpu_ns;
        self.status = procfs::status(pid, tid)?;
        if self.has_ended() {
            return Ok(Look::Done);
        }
        let Some(Sleeper { frames, end, syscall, stack_length }) = asleep(pid, tid, space, context)? else {
            return Ok(Look::Runs);
        };
        self.stack_length = stack_length;
        if !slept(pid, tid, &schedule, &self.status) {
            return Ok(Look::Moved);
        }
        self.found_asleep(frames, end, syscall);
        Ok(Look::Done)
    }

    /// Reads the stack of a thread that may sleep for a short time only: memory is copied at once
    /// and unwound afterwards. Runs `also` while the thread sleeps, and again if the copy was too
    /// small; the last time counts.
    pub fn catch(
        &mut self,
        pid: i32,
        space: &AddressSpace<'_>,
        context: &mut UnwindContext<usize>,
        also: &mut dyn FnMut(),
    ) -> Result<Look, Error> {
        let tid = self.tid;
        let mut seen = None;
        let taken = copy(self.stack_length, space, context, |limit, wanted| {
            let room = Room::new(limit, wanted);
            let schedule = Schedule::of(pid, tid);
            let status = procfs::status(pid, tid)?;
            let syscall = procfs::syscall(pid, tid)?;
            let Syscall::Blocked { number, .. } = syscall else { return Err(Missed::Runs) };
            let registers = Registers::from_syscall(&syscall).ok_or(Missed::Runs)?;
            let regions = room.fill(tid, registers.sp(), space, wanted)?;
            also();
            if !slept(pid, tid, &schedule, &status) {
                return Err(Missed::Moved);
            }
            seen = Some((schedule.cpu_ns, status, number));
            Ok((registers, regions))
        });
        match (taken, seen) {
            (Ok((frames, end)), Some((cpu_ns, status, number))) => {
                self.cpu_time_ns = cpu_ns;
                self.status = status;
                self.found_asleep(frames, end, number);
                Ok(Look::Done)
            }
            (Err(Missed::Failed(error)), _) => {
                // The memory of an ended thread is gone, and its last state shows that it has
                // ended.
                self.status = procfs::status(pid, tid)?;
                if self.has_ended() { Ok(Look::Done) } else { Err(error) }
            }
            (Err(Missed::Runs), _) => Ok(Look::Runs),
            (Err(Missed::Moved), _) | (Ok(_), None) => Ok(Look::Moved),
        }
    }

    fn has_ended(&mut self) -> bool {
        let ended = matches!(self.status.letter(), b'Z' | b'X');
        if ended {
            self.incomplete = format!("the thread has ended: {}", self.status.state);
        }
        ended
    }

    fn found_asleep(&mut self, frames: Vec<RawFrame>, end: End, syscall: i64) {
        self.frames = frames;
        self.syscall = Some(syscall);
        self.method = CaptureMethod::ZeroStop;
        self.incomplete = end.describe();
    }

    /// Stores a sample that the kernel took while the thread ran.
    pub fn sampled(&mut self, pid: i32, sample: Sample, space: &AddressSpace<'_>, context: &mut UnwindContext<usize>) {
        let (start, length) = (sample.stack.start, sample.stack.bytes.len());
        let stack = space.mapping(start);
        let memory = Memory::of_copies(vec![sample.stack]);
        let (frames, end) = unwind(sample.registers, &memory, space, context);
        self.frames = frames;
        self.method = CaptureMethod::PerfSample;
        self.incomplete = match end {
            End::Memory(address) if stack.is_some_and(|stack| start < address && address < stack.end) => {
                format!("the stack is deeper than the {length} bytes that a sample holds")
            }
            end => end.describe(),
        };
        // For a running thread, the kernel does not report which system call it is in.
        self.syscall = if sample.in_kernel { None } else { Some(-1) };
        self.cpu_time_ns = Schedule::of(pid, self.tid).cpu_ns;
        if let Ok(status) = procfs::status(pid, self.tid) {
            self.status = status;
        }
        self.status.state = state_text('R');
        self.wchan.clear();
        self.kernel_stack.clear();
    }

    /// Adds a reason why the stack is incomplete.
    pub fn note(&mut self, reason: &str) {
        if !self.incomplete.is_empty() {
            self.incomplete.push_str("; ");
        }
        self.incomplete.push_str(reason);
    }
}

/// The stack of a sleeping thread.
struct Sleeper {
    frames: Vec<RawFrame>,
    end: End,
    /// Number of the system call.
    syscall: i64,
    /// Length of the stack in bytes.
    stack_length: usize,
}

/// Unwinds a sleeping thread; memory is copied on demand. `None` if it does not sleep.
fn asleep(
    pid: i32,
    tid: i32,
    space: &AddressSpace<'_>,
    context: &mut UnwindContext<usize>,
) -> Result<Option<Sleeper>, Error> {
    let syscall = procfs::syscall(pid, tid)?;
    let Syscall::Blocked { number, .. } = syscall else { return Ok(None) };
    let Some(registers) = Registers::from_syscall(&syscall) else { return Ok(None) };
    let memory = Memory::of_sleeper(tid, space);
    memory.fetch_stack(registers.sp())?;
    let (frames, end) = unwind(registers, &memory, space, context);
    Ok(Some(Sleeper { frames, end, syscall: number, stack_length: memory.stack_length() }))
}

/// Whether a thread has not run since its schedule was read. The kernel counts a run before it
/// starts, so an unchanged count is proof. Without that count, the context switches in the status
/// are used. They are counted when a thread leaves a CPU, so the state must be checked too.
fn slept(pid: i32, tid: i32, schedule: &Schedule, before: &Status) -> bool {
    schedule.is_unchanged().unwrap_or_else(|| {
        procfs::status(pid, tid)
            .is_ok_and(|after| after.switches == before.switches && before.letter() != b'R' && after.letter() != b'R')
    })
}
