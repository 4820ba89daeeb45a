//! Stopping a thread for as long as it takes to copy its registers and its stack, and never longer.
//!
//! SEIZE and INTERRUPT send no signal, but a stop may cut short a system call of the thread, so threads are stopped only when
//! that is asked for. A stopped thread is released by `Drop`. The calls of one [`Stop`] must come from one OS thread; the
//! kernel releases what that thread still holds when it ends. So it does when this process is killed, but not when it is
//! frozen: a process that may be killed has itself killed then, see [`die_rather_than_hold`].

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use nix::unistd::Pid;

use crate::{
    error::Error,
    kernel::{permission, procfs},
};

use super::registers::Registers;

/// How long an answer from another CPU takes at most, mostly.
const SPIN: Duration = Duration::from_micros(20);
/// After that, how long the CPU is left to whoever has to answer. When it is taken back too soon again and again, nobody gets on.
const PAUSE: Duration = Duration::from_micros(30);
/// Who has not answered for so long may never do so, and is looked at.
const LONG: Duration = Duration::from_millis(1);

/// How long a thread that was never asked to stop is waited for so that it can be released.
const LAST_WAIT: Duration = Duration::from_millis(2);

/// For how long a thread is held at most by a process that may be killed. It is longer than the patience with which a thread is
/// waited for.
const LONGEST_HOLD: Duration = Duration::from_millis(400);

static EXPENDABLE: AtomicBool = AtomicBool::new(false);

/// From now on this process is killed by the kernel when it holds a thread for longer than [`LONGEST_HOLD`], whatever keeps it
/// from letting go: a SIGSTOP, a debugger, a freezer, a busy machine.
pub(crate) fn die_rather_than_hold() {
    EXPENDABLE.store(true, Ordering::Relaxed);
}

/// A timer that kills this process unless it is dropped in time. SIGKILL also ends processes that are stopped or frozen.
///
/// The kernel's own calls: glibc 2.34 has given its functions a version that older systems do not have.
struct Watchdog(libc::c_int);

impl Watchdog {
    /// `None` in a process that may not be killed. An error means that no thread may be stopped.
    #[allow(unsafe_code)]
    fn new() -> io::Result<Option<Self>> {
        if !EXPENDABLE.load(Ordering::Relaxed) {
            return Ok(None);
        }
        // SAFETY: sigevent is plain data for which zeroes are valid.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_SIGNAL;
        event.sigev_signo = libc::SIGKILL;
        let mut timer: libc::c_int = 0;
        // SAFETY: `event` is valid for reading and has the kernel's layout, and `timer`, an int to the kernel, is valid for writing.
        let result =
            unsafe { libc::syscall(libc::SYS_timer_create, libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
        if result == 0 { Ok(Some(Watchdog(timer))) } else { Err(io::Error::last_os_error()) }
    }

    #[allow(unsafe_code)]
    fn start(&self) -> io::Result<()> {
        let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let after = libc::timespec { tv_sec: 0, tv_nsec: LONGEST_HOLD.as_nanos() as i64 };
        let once = libc::itimerspec { it_interval: never, it_value: after };
        // SAFETY: the timer exists until this is dropped, and `once` is valid for reading.
        let result = unsafe {
            libc::syscall(libc::SYS_timer_settime, self.0, 0, &raw const once, std::ptr::null_mut::<libc::itimerspec>())
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Watchdog {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: the timer was created with this and is used by nobody else.
        unsafe { libc::syscall(libc::SYS_timer_delete, self.0) };
    }
}

/// A thread that is stopped, until this is dropped.
pub(crate) struct Stop {
    tid: i32,
    /// Dropped after the thread has been released.
    watchdog: Option<Watchdog>,
    /// When it was asked to stop.
    since: Option<Instant>,
    stopped: bool,
    /// The signal that it was about to be told of; it gets it when it goes on.
    signal: i32,
}

impl Stop {
    /// Stops one thread. A thread that sleeps uninterruptibly would never answer, so the caller must not ask for one.
    pub fn new(pid: i32, tid: i32, deadline: Instant, _hurry: &Hurry) -> Result<Self, Error> {
        let mut stop = Self::seize(pid, tid)?;
        stop.request(pid)?;
        stop.wait(pid, deadline)?;
        Ok(stop)
    }

    /// Makes ready for stopping one thread, which runs on.
    pub fn seize(pid: i32, tid: i32) -> Result<Self, Error> {
        let watchdog = Watchdog::new().map_err(|source| Error::Ptrace { tid, source })?;
        nix::sys::ptrace::seize(Pid::from_raw(tid), nix::sys::ptrace::Options::empty())
            .map_err(|errno| explain(pid, tid, errno.into()))?;
        Ok(Stop { tid, watchdog, since: None, stopped: false, signal: 0 })
    }

    /// Asks the thread to stop, without waiting until it has.
    pub fn request(&mut self, pid: i32) -> Result<(), Error> {
        if let Some(watchdog) = &self.watchdog {
            watchdog.start().map_err(|source| Error::Ptrace { tid: self.tid, source })?;
        }
        self.since = Some(Instant::now());
        nix::sys::ptrace::interrupt(Pid::from_raw(self.tid)).map_err(|errno| explain(pid, self.tid, errno.into()))
    }

    /// Whether the thread has stopped by now.
    pub fn has_stopped(&mut self) -> Result<bool, Error> {
        if !self.stopped {
            let found =
                wait_stopped(libc::P_PID, self.tid).map_err(|source| Error::Ptrace { tid: self.tid, source })?;
            found.iter().for_each(|stopped| self.take(stopped));
        }
        Ok(self.stopped)
    }

    fn take(&mut self, stopped: &Stopped) {
        self.stopped = true;
        self.signal = stopped.signal;
    }

    /// Waits until the thread has stopped.
    pub fn wait(&mut self, pid: i32, deadline: Instant) -> Result<(), Error> {
        let asked = Instant::now();
        while !self.has_stopped()? {
            if Instant::now() >= deadline {
                return Err(Error::NoStop { tid: self.tid, waited_us: asked.elapsed().as_micros() as u64 });
            }
            // A thread on another CPU answers within microseconds. One on this CPU needs this CPU, and nobody else gets it
            // from a thread in a hurry that does not sleep.
            let waited = asked.elapsed();
            if waited < SPIN {
                std::hint::spin_loop();
                continue;
            }
            if waited >= LONG {
                match procfs::status(pid, self.tid).map_or(b'X', |status| status.letter()) {
                    b'Z' | b'X' => return Err(Error::Gone(self.tid)),
                    b'D' => return Err(Error::NoStop { tid: self.tid, waited_us: waited.as_micros() as u64 }),
                    _ => {}
                }
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    pub fn registers(&self) -> Result<Registers, Error> {
        let registers = nix::sys::ptrace::getregs(Pid::from_raw(self.tid))
            .map_err(|errno| Error::Ptrace { tid: self.tid, source: errno.into() })?;
        Ok(Registers::from_ptrace(&registers))
    }

    /// Lets the thread go on, and says for how long it was stopped at most.
    pub fn release(self) -> Duration {
        let since = self.since;
        drop(self);
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        // After a request the watchdog runs. Before it, the thread is about to be asked just to be released.
        if self.since.is_none()
            && let Some(watchdog) = &self.watchdog
        {
            // Without it, the thread is released by the end of this one.
            let _ = watchdog.start();
        }
        // Only a stopped thread can be detached from. One that has not answered yet is released by the end of this thread.
        if self.since.is_none() && nix::sys::ptrace::interrupt(Pid::from_raw(self.tid)).is_ok() {
            let asked = Instant::now();
            while matches!(self.has_stopped(), Ok(false)) && asked.elapsed() < LAST_WAIT {
                std::thread::yield_now();
            }
        }
        let _ = self.has_stopped();
        detach(self.tid, self.signal);
    }
}

fn explain(pid: i32, tid: i32, source: io::Error) -> Error {
    if source.raw_os_error() == Some(libc::EPERM)
        && let Ok(status) = procfs::status(pid, tid)
    {
        if status.tracer != 0 {
            // The kernel names the thread that traces, and a person wants to know the program.
            let tracer = procfs::pid_of_thread(status.tracer).unwrap_or(status.tracer);
            let name = procfs::stat(tracer).map(|stat| stat.name).unwrap_or_default();
            return Error::Traced { tid, tracer, name };
        }
        if matches!(status.letter(), b'Z' | b'X') {
            return Error::Gone(tid);
        }
        return permission::denied(pid, status.uid);
    }
    Error::Ptrace { tid, source }
}

/// While it lives, this OS thread goes before all others: whoever takes the CPU from it while it holds a thread makes that one
/// stand still too. So nothing may be done meanwhile that could take long, and waiting is sleeping.
pub(crate) struct Hurry {
    before: Option<Priority>,
}

/// What is changed for a while.
enum Priority {
    Policy(i32, libc::sched_param),
    Niceness(i32),
}

impl Hurry {
    /// Without the privilege for it all stays as it is.
    #[allow(unsafe_code)]
    pub fn new() -> Self {
        let first = libc::sched_param { sched_priority: 1 };
        let mut usual = libc::sched_param { sched_priority: 0 };
        // SAFETY: the parameters are valid for reading and writing; 0 stands for the calling thread, also below.
        unsafe {
            let policy = libc::sched_getscheduler(0);
            if libc::sched_getparam(0, &raw mut usual) == 0
                && libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const first) == 0
            {
                return Hurry { before: Some(Priority::Policy(policy, usual)) };
            }
        }
        // Control groups may forbid the above to everybody.
        // SAFETY: these take and return numbers.
        let (niceness, changed) = unsafe {
            let niceness = libc::getpriority(libc::PRIO_PROCESS, 0);
            (niceness, libc::setpriority(libc::PRIO_PROCESS, 0, -20) == 0)
        };
        Hurry { before: changed.then_some(Priority::Niceness(niceness)) }
    }
}

impl Drop for Hurry {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // Going back is always allowed.
        match &self.before {
            // SAFETY: as above.
            Some(Priority::Policy(policy, usual)) => unsafe {
                libc::sched_setscheduler(0, *policy, usual);
            },
            // SAFETY: as above.
            Some(Priority::Niceness(niceness)) => unsafe {
                libc::setpriority(libc::PRIO_PROCESS, 0, *niceness);
            },
            None => {}
        }
    }
}

/// Waits for threads that were asked to stop, and hands each over as soon as it has, with its place in the list. Those that have
/// ended are taken from the list too; what is left has not stopped by the deadline.
pub(crate) fn each_stopped(
    stops: &mut [Option<Stop>],
    deadline: Instant,
    _hurry: &Hurry,
    mut each: impl FnMut(usize, Stop),
) {
    let mut last = Instant::now();
    while stops.iter().any(Option::is_some) && Instant::now() < deadline {
        // One question for all of them, instead of one for each.
        match wait_stopped(libc::P_ALL, 0) {
            Ok(Some(stopped)) => {
                let is_it = |stop: &Option<Stop>| stop.as_ref().is_some_and(|stop| stop.tid == stopped.tid);
                if let Some(place) = stops.iter().position(is_it)
                    && let Some(mut stop) = stops[place].take()
                {
                    stop.take(&stopped);
                    each(place, stop);
                }
                last = Instant::now();
            }
            Ok(None) if last.elapsed() < LONG => std::thread::sleep(PAUSE),
            // The end of a thread is not told, so it is asked for.
            _ => {
                for (place, slot) in stops.iter_mut().enumerate() {
                    let answer = slot.as_mut().map_or(Ok(false), Stop::has_stopped);
                    if !matches!(answer, Ok(false))
                        && let Some(stop) = slot.take()
                        && answer.is_ok()
                    {
                        each(place, stop);
                    }
                }
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// Makes this OS thread's sleeps end when they are to, and not the usual 50 us later.
pub(crate) fn sleep_exactly() {
    // It is only about time, so it may fail.
    let _ = nix::sys::prctl::set_timerslack(1);
}

/// A thread that has stopped.
struct Stopped {
    tid: i32,
    /// The signal it is to get afterwards, or 0.
    signal: i32,
}

/// A thread that has stopped, of all that this OS thread traces or of one. Never waits, and never takes the exit status of a
/// process away from its parent, which may be this one.
#[allow(unsafe_code)]
fn wait_stopped(kind: libc::idtype_t, tid: i32) -> io::Result<Option<Stopped>> {
    // SAFETY: siginfo_t is plain data for which zeroes are valid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WSTOPPED | libc::WNOHANG | libc::__WALL | libc::__WNOTHREAD;
    // SAFETY: `info` is valid for writing, and the flags are those of waitid.
    let result = unsafe { libc::waitid(kind, tid as libc::id_t, &mut info, flags) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: waitid has filled in the fields of a child event, or left the zeroes.
    let (tid, status) = unsafe { (info.si_pid(), info.si_status()) };
    if tid == 0 {
        return Ok(None);
    }
    // An event (the interrupt, a group stop) has its number above the signal and delivers nothing.
    let event = status >> 8;
    Ok(Some(Stopped { tid, signal: if event == 0 { status & 0xff } else { 0 } }))
}

#[allow(unsafe_code)]
fn detach(tid: i32, signal: i32) {
    // SAFETY: PTRACE_DETACH takes a thread id and a signal number and touches no memory of this process.
    let result = unsafe { libc::ptrace(libc::PTRACE_DETACH, tid, 0usize, signal as usize) };
    if result != 0 {
        tracing::debug!("thread {tid} was not released: {}", io::Error::last_os_error());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(unsafe_code)]
    fn a_hurry_ends() {
        // SAFETY: it takes and returns a number.
        let policy = || unsafe { libc::sched_getscheduler(0) };
        let before = policy();
        let hurry = Hurry::new();
        if nix::unistd::geteuid().is_root() {
            assert!(hurry.before.is_some(), "root may");
        }
        drop(hurry);
        assert_eq!(policy(), before);
    }
}
