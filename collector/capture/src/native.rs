//! The native stack of one thread: as it sleeps, from a sample that the kernel took while it ran, or, only when that is asked for,
//! with a short stop.

use std::time::{Duration, Instant};

use gimli::UnwindContext;
use xpu_timer_proto::server::CaptureMethod;

use crate::{
    Error,
    address_space::AddressSpace,
    memory::{Memory, Region},
    perf::Sample,
    procfs::{self, Schedule, Status, Syscall},
    ptrace::{self, Hurry, Stop},
    registers::Registers,
    unwind::{End, RawFrame, unwind},
};

/// Bytes of a stack that are copied at first during a stop. Most stacks use a few KB.
const FIRST_COPY: usize = 16 << 10;
/// Bytes by which a stack may have grown since it was looked at.
const GROWTH: usize = 512;
/// How many times as much is copied when that was not enough.
const WIDER: usize = 8;
/// Bytes of a stack that are copied at most.
const LONGEST_COPY: usize = 64 << 20;
/// Bytes copied around an address that lies elsewhere.
const PIECE: usize = 64 << 10;
/// How long one thread may take to come to a stop.
const STOP_PATIENCE: Duration = Duration::from_millis(250);
/// How often a copy is widened.
const WIDENINGS: usize = 6;
/// How often a thread that turns out to have moved is looked at again.
const LOOKS: usize = 3;
/// System calls that wait for what their names say: the kernel's stack tells nothing more of them.
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

/// System calls that a stop cuts short once a part is done: they return less than they were asked for, and programs that never meet a
/// signal do not expect that.
const CUT_SHORT: [i64; 12] = [
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

/// One thread as it was found.
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
    /// Bytes of its stack that this took; 0 when it is not known.
    stack_length: usize,
    /// Why `frames` is not whole.
    pub incomplete: String,
    /// For how long it was stopped, the longest time when it was more than once.
    pub stopped: Duration,
}

/// What came of a look at a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// Its stack is whole, or as whole as it gets.
    Done,
    /// It runs.
    Runs,
    /// It slept, but not all the time.
    Moved,
}

/// Why nothing came of a look.
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
    /// Reads what `/proc` says of a thread.
    pub fn describe(pid: i32, tid: i32) -> Result<Self, Error> {
        let mut thread = Thread { tid, status: procfs::status(pid, tid)?, ..Thread::default() };
        thread.method = CaptureMethod::KernelOnly;
        thread.cpu_time_ns = Schedule::of(pid, tid).cpu_ns;
        thread.look_into_kernel(pid);
        Ok(thread)
    }

    /// Where in the kernel the thread is.
    fn look_into_kernel(&mut self, pid: i32) {
        self.wchan = procfs::wchan(pid, self.tid);
        let is_plain = self.syscall.is_some_and(|number| PLAIN_WAITS.contains(&number));
        if self.status.letter() != b'S' || !is_plain {
            self.kernel_stack = procfs::kernel_stack(pid, self.tid);
        }
    }

    /// Describes a thread, and takes its stack when it sleeps. `None` when it has ended.
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
            Err(error) if procfs::is_gone(&error) => return None,
            Err(error) => {
                thread.incomplete = if procfs::is_denied(&error) {
                    Error::Permission { pid, uid: thread.status.uid }.to_string()
                } else {
                    error.to_string()
                };
                Look::Done
            }
        };
        thread.look_into_kernel(pid);
        Some((thread, look))
    }

    /// Takes the stack of a thread that sleeps for long: its memory is copied as the unwinding comes to it.
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

    /// Takes the stack of a thread that may sleep for a short time only: its memory is copied at once and unwound afterwards. Does
    /// something else while it sleeps, again when too little was copied; the last time counts.
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
                // The memory of a thread that has ended is gone, and its last state tells why.
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

    /// Takes what the kernel sampled while the thread ran.
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
        // Which call it is in, the kernel does not say of a thread that runs.
        self.syscall = if sample.in_kernel { None } else { Some(-1) };
        self.cpu_time_ns = Schedule::of(pid, self.tid).cpu_ns;
        if let Ok(status) = procfs::status(pid, self.tid) {
            self.status = status;
        }
        self.status.state = crate::process::state_text('R');
        self.wchan.clear();
        self.kernel_stack.clear();
    }

    /// Stops the thread and takes its stack, and does something else while it is stopped. When it has to be stopped again
    /// because too little was copied, the last time counts. On failure what was known before stays, with the reason.
    pub fn stop(
        &mut self,
        pid: i32,
        space: &AddressSpace<'_>,
        context: &mut UnwindContext<usize>,
        deadline: Instant,
        also: &mut dyn FnMut(),
    ) -> Result<(), Error> {
        if !self.may_be_stopped(pid)? {
            return Ok(());
        }
        let tid = self.tid;
        let mut longest = Duration::ZERO;
        let taken = copy(self.stack_length, space, context, |limit, wanted| {
            let room = Room::new(limit, wanted);
            let hurry = Hurry::new();
            // Anew each time: in between, files may have been opened that took long.
            let stop = Stop::new(pid, tid, deadline.min(Instant::now() + STOP_PATIENCE), &hurry)?;
            let registers = stop.registers()?;
            let regions = room.fill(tid, registers.sp(), space, wanted);
            also();
            longest = longest.max(stop.release());
            Ok((registers, regions?))
        });
        self.stopped = self.stopped.max(longest);
        self.take(pid, taken)
    }

    /// Whether a thread may be asked to stop: one that sleeps uninterruptibly would not answer, and one that sends would notice. It
    /// may have fallen into such a sleep since it was looked at. An error means that it has ended.
    fn may_be_stopped(&mut self, pid: i32) -> Result<bool, Error> {
        let status = procfs::status(pid, self.tid)?;
        let reason = match status.letter() {
            b'D' => "the thread sleeps uninterruptibly and cannot be stopped",
            b'S' if sends(pid, self.tid) => "the thread waits in a system call that a stop would cut short",
            _ => return Ok(true),
        };
        self.status = status;
        self.note(reason);
        Ok(false)
    }

    /// Takes what came of a stop. An error means that the thread has ended.
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
            Err(error) if procfs::is_gone(&error) => Err(error),
            Err(error) => {
                self.note(&error.to_string());
                Ok(())
            }
        }
    }

    /// Adds to the reasons why the stack is not whole.
    pub fn note(&mut self, reason: &str) {
        if !self.incomplete.is_empty() {
            self.incomplete.push_str("; ");
        }
        self.incomplete.push_str(reason);
    }
}

/// Whether a thread waits in one of [`CUT_SHORT`].
fn sends(pid: i32, tid: i32) -> bool {
    let blocked = procfs::syscall(pid, tid);
    matches!(blocked, Ok(Syscall::Blocked { number, .. }) if CUT_SHORT.contains(&number))
}

/// Stops all these threads at once and takes their stacks, which is over sooner than with one after the other but holds each of
/// them longer. Says which have ended.
pub(crate) fn stop_together(
    pid: i32,
    threads: Vec<&mut Thread>,
    space: &AddressSpace<'_>,
    context: &mut UnwindContext<usize>,
    deadline: Instant,
) -> Vec<i32> {
    struct Held<'a> {
        thread: &'a mut Thread,
        room: Room,
        copied: Option<Result<(Registers, Vec<Region>), Error>>,
        stop: Option<Stop>,
    }
    let patience = deadline.min(Instant::now() + STOP_PATIENCE);
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
                let room = Room::new(room_for(thread.stack_length), &[]);
                all.push(Held { thread, room, copied: None, stop: None });
                stops.push(Some(stop));
            }
            Err(error) => {
                let tid = thread.tid;
                gone.extend(thread.take(pid, Err(error)).is_err().then_some(tid));
            }
        }
    }
    // Nothing has been stopped so far, and all the room that is needed has been made.
    let hurry = Hurry::new();
    for (held, slot) in all.iter_mut().zip(&mut stops) {
        if let Some(Err(error)) = slot.as_mut().map(|stop| stop.request(pid)) {
            *slot = None;
            held.copied = Some(Err(error));
        }
    }
    ptrace::each_stopped(&mut stops, patience, &hurry, |place, stop| {
        let held = &mut all[place];
        let room = std::mem::take(&mut held.room);
        let copied = stop
            .registers()
            .and_then(|registers| Ok((registers, room.fill(held.thread.tid, registers.sp(), space, &[])?)));
        held.copied = Some(copied);
        held.stop = Some(stop);
    });
    // Not one by one above: those that go on would take the CPU from those that are still to stop.
    for held in &mut all {
        held.thread.stopped = held.stop.take().map_or(Duration::ZERO, Stop::release);
    }
    drop(hurry);
    for (Held { thread, copied, .. }, stop) in all.into_iter().zip(stops) {
        let tid = thread.tid;
        let taken = copied.unwrap_or_else(|| {
            let waited_us = STOP_PATIENCE.as_micros() as u64;
            Err(if stop.is_some() { Error::NoStop { tid, waited_us } } else { Error::Gone(tid) })
        });
        let unwound = taken.map(|(registers, regions)| unwind(registers, &Memory::of_copies(regions), space, context));
        let ended = match unwound {
            // More was needed than was copied.
            Ok((_, End::Memory(_))) => thread.stop(pid, space, context, deadline, &mut || {}),
            unwound => thread.take(pid, unwound),
        };
        gone.extend(ended.is_err().then_some(tid));
    }
    gone
}

/// What a look at a sleeping thread gives.
struct Sleeper {
    frames: Vec<RawFrame>,
    end: End,
    /// Number of the system call.
    syscall: i64,
    /// Bytes of stack that this took.
    stack_length: usize,
}

/// Unwinds a thread as it sleeps, on memory that is copied as the unwinding comes to it. `None` when it does not sleep.
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

/// Whether a thread has not run since its schedule was read. Being put on a CPU is counted before it happens, so an unchanged
/// count proves it. The switches in the status are counted when a thread leaves a CPU, and need the state besides.
fn slept(pid: i32, tid: i32, schedule: &Schedule, before: &Status) -> bool {
    schedule.is_unchanged().unwrap_or_else(|| {
        procfs::status(pid, tid)
            .is_ok_and(|after| after.switches == before.switches && before.letter() != b'R' && after.letter() != b'R')
    })
}

/// Bytes to copy of a stack that took `length` when it was last unwound; 0 when that is not known.
fn room_for(length: usize) -> usize {
    // It may have grown a little since.
    if length == 0 { FIRST_COPY } else { length + length / 8 + GROWTH }
}

/// Copies while a thread stands still and unwinds, and copies again more widely while that is what the unwinding lacks. `length`
/// is what the stack is expected to take.
fn copy<E>(
    length: usize,
    space: &AddressSpace<'_>,
    context: &mut UnwindContext<usize>,
    mut copied: impl FnMut(usize, &[u64]) -> Result<(Registers, Vec<Region>), E>,
) -> Result<(Vec<RawFrame>, End), E> {
    let mut limit = room_for(length);
    let mut wanted = Vec::new();
    let mut attempt = 0;
    loop {
        let (registers, regions) = copied(limit, &wanted)?;
        let memory = Memory::of_copies(regions);
        let (frames, end) = unwind(registers, &memory, space, context);
        attempt += 1;
        if let End::Memory(address) = end
            && attempt <= WIDENINGS
            && let Some(mapping) = space.mapping(address)
            && mapping.readable
        {
            if mapping.start <= registers.sp() && registers.sp() < mapping.end && limit < LONGEST_COPY {
                limit = LONGEST_COPY.min(limit * WIDER);
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

/// Room for copies, made before a stop so that during it there is nothing to do but to copy.
#[derive(Default)]
struct Room {
    stack: Vec<u8>,
    pieces: Vec<Vec<u8>>,
    regions: Vec<Region>,
}

impl Room {
    fn new(limit: usize, wanted: &[u64]) -> Self {
        // Fresh memory costs a fault a page when it is first written, which would be during the stop.
        Room {
            stack: vec![1; limit],
            pieces: wanted.iter().map(|_| vec![1; PIECE]).collect(),
            regions: Vec::with_capacity(1 + wanted.len()),
        }
    }

    /// Copies the stack from `sp` upwards, and a piece from each wanted address on.
    fn fill(self, tid: i32, sp: u64, space: &AddressSpace<'_>, wanted: &[u64]) -> Result<Vec<Region>, Error> {
        let mut regions = self.regions;
        regions.push(Region::read_stack(tid, sp, space.known_mapping(sp).as_deref(), self.stack)?);
        for (address, room) in wanted.iter().zip(self.pieces) {
            regions.push(Region::read_into(tid, address & !0xfff, room)?);
        }
        Ok(regions)
    }
}
