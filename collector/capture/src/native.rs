//! The native stack of one thread: as it sleeps when that is possible, else with a short stop.

use std::time::{Duration, Instant};

use gimli::UnwindContext;
use xpu_timer_proto::server::CaptureMethod;

use crate::{
    Error,
    address_space::AddressSpace,
    memory::{Region, Regions},
    procfs::{self, Status, Syscall},
    ptrace::Stop,
    registers::Registers,
    unwind::{End, RawFrame, unwind},
};

/// Bytes of a stack that are copied at first, and when that was not enough. Most stacks use a few KB, and a thread may stand
/// still while they are copied.
const COPIES: [usize; 3] = [64 << 10, 1 << 20, 64 << 20];
/// Bytes copied around an address that lies elsewhere.
const PIECE: usize = 256 << 10;
/// Below the stack pointer a function may use this much without moving it.
const RED_ZONE: u64 = 128;
/// How long one thread may take to come to a stop.
const STOP_PATIENCE: Duration = Duration::from_millis(250);
/// How often a copy is widened.
const WIDENINGS: usize = 5;

/// One thread as it was found.
#[derive(Debug, Clone, Default)]
pub(crate) struct Thread {
    pub tid: i32,
    pub status: Status,
    pub wchan: String,
    pub kernel_stack: Vec<String>,
    pub cpu_time_ns: u64,
    pub syscall: Option<i64>,
    pub running: bool,
    pub method: CaptureMethod,
    pub frames: Vec<RawFrame>,
    /// Why `frames` is not whole.
    pub incomplete: String,
    /// For how long it was stopped.
    pub stopped: Duration,
}

/// What came of a look at a thread that was not stopped.
pub(crate) enum Look {
    /// Its stack is whole, or as whole as it gets.
    Done,
    /// It needs a stop.
    Stop,
    /// It has ended meanwhile.
    Gone,
}

impl Thread {
    /// Reads what `/proc` says of a thread.
    pub fn describe(pid: i32, tid: i32) -> Result<Self, Error> {
        let status = procfs::status(pid, tid)?;
        Ok(Thread {
            tid,
            status,
            wchan: procfs::wchan(pid, tid),
            kernel_stack: procfs::kernel_stack(pid, tid),
            cpu_time_ns: procfs::thread_cpu_ns(pid, tid),
            method: CaptureMethod::KernelOnly,
            ..Thread::default()
        })
    }

    /// Takes the stack of a sleeping thread without stopping it.
    pub fn look(&mut self, pid: i32, space: &AddressSpace<'_>, context: &mut UnwindContext<usize>) -> Look {
        if matches!(self.status.letter(), b'Z' | b'X') {
            self.incomplete = format!("the thread has ended: {}", self.status.state);
            return Look::Done;
        }
        let tid = self.tid;
        let mut before = self.status.switches;
        let mut last_status = None;
        let taken = take(space, context, |limit, wanted| {
            if let Some(status) = last_status.take() {
                let status: Status = status;
                before = status.switches;
            }
            let syscall = procfs::syscall(pid, tid)?;
            let Some(registers) = Registers::from_syscall(&syscall) else { return Ok(None) };
            let regions = copy(tid, registers.sp(), space, limit, wanted)?;
            let after = procfs::status(pid, tid)?;
            // A thread that was woken and runs has not been switched away from yet, so the count alone is no proof.
            let unmoved = after.switches == before && after.letter() != b'R';
            let number = match syscall {
                Syscall::Blocked { number, .. } => number,
                Syscall::Running => -1,
            };
            last_status = Some(after);
            Ok(unmoved.then_some((registers, regions, number)))
        });
        match taken {
            Ok(Some((frames, end, number))) => {
                self.frames = frames;
                self.syscall = Some(number);
                self.method = CaptureMethod::ZeroStop;
                self.incomplete = end.describe();
                if let Some(status) = last_status {
                    self.status = status;
                }
                // The thread may have been on its way to sleep when it was described.
                if self.wchan.is_empty() {
                    self.wchan = procfs::wchan(pid, tid);
                }
                // Registers that only a stop can tell; everything else would be no better with one.
                if matches!(end, End::Register(_)) { Look::Stop } else { Look::Done }
            }
            Ok(None) => {
                self.running = true;
                Look::Stop
            }
            Err(error) if procfs::is_gone(&error) => Look::Gone,
            Err(error) => {
                self.incomplete = if procfs::is_denied(&error) {
                    Error::Permission { pid, uid: self.status.uid }.to_string()
                } else {
                    error.to_string()
                };
                Look::Done
            }
        }
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
        // It may have fallen into an uninterruptible sleep since it was looked at.
        let status = procfs::status(pid, self.tid)?;
        if status.letter() == b'D' {
            self.status = status;
            self.note("the thread sleeps uninterruptibly and cannot be stopped");
            return Ok(());
        }
        let deadline = deadline.min(Instant::now() + STOP_PATIENCE);
        let tid = self.tid;
        let mut longest = Duration::ZERO;
        let taken = take(space, context, |limit, wanted| {
            let stop = Stop::new(pid, tid, deadline)?;
            let registers = stop.registers()?;
            let regions = copy(tid, registers.sp(), space, limit, wanted);
            also();
            longest = longest.max(stop.release());
            Ok(Some((registers, regions?, 0)))
        });
        self.stopped = longest;
        match taken {
            Ok(Some((frames, end, _))) => {
                self.frames = frames;
                self.method = CaptureMethod::Ptrace;
                self.incomplete = end.describe();
                self.status.switches = procfs::status(pid, tid).map_or(self.status.switches, |status| status.switches);
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(error) if procfs::is_gone(&error) => Err(error),
            Err(error) => {
                self.note(&error.to_string());
                Ok(())
            }
        }
    }

    fn note(&mut self, reason: &str) {
        if !self.incomplete.is_empty() {
            self.incomplete.push_str("; ");
        }
        self.incomplete.push_str(reason);
    }
}

type Copied = (Registers, Regions, i64);

/// Copies and unwinds, and copies again more widely while that is what the unwinding lacks.
fn take(
    space: &AddressSpace<'_>,
    context: &mut UnwindContext<usize>,
    mut copied: impl FnMut(usize, &[u64]) -> Result<Option<Copied>, Error>,
) -> Result<Option<(Vec<RawFrame>, End, i64)>, Error> {
    let [mut limit, wider @ ..] = COPIES;
    let mut wider = wider.into_iter();
    let mut wanted = Vec::new();
    let mut attempt = 0;
    loop {
        let Some((registers, regions, number)) = copied(limit, &wanted)? else { return Ok(None) };
        let (frames, end) = unwind(registers, &regions, space, context);
        attempt += 1;
        if let End::Memory(address) = end
            && attempt <= WIDENINGS
            && let Some(mapping) = space.mapping(address)
            && mapping.readable
        {
            if mapping.start <= registers.sp()
                && registers.sp() < mapping.end
                && let Some(next) = wider.next()
            {
                limit = next;
                continue;
            }
            if !wanted.contains(&address) {
                wanted.push(address);
                continue;
            }
        }
        return Ok(Some((frames, end, number)));
    }
}

/// The stack from `sp` upwards, and a piece around each wanted address.
fn copy(tid: i32, sp: u64, space: &AddressSpace<'_>, limit: usize, wanted: &[u64]) -> Result<Regions, Error> {
    let mut regions = Vec::with_capacity(1 + wanted.len());
    let stack = std::iter::once((sp, sp.saturating_sub(RED_ZONE), limit));
    for (address, start, limit) in stack.chain(wanted.iter().map(|address| (*address, *address & !0xfff, PIECE))) {
        // The main thread's stack may have grown since the mappings were read; then the read ends where it has to.
        let (start, end) = match space.mapping(address) {
            Some(mapping) => (start.max(mapping.start), mapping.end),
            None => (start, u64::MAX),
        };
        let length = usize::try_from(end - start).unwrap_or(limit).min(limit);
        regions.push(Region::read(tid, start, length)?);
    }
    Ok(Regions(regions))
}
