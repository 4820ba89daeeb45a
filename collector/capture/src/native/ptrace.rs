//! Stops a thread for exactly as long as it takes to copy its registers and its stack.
//!
//! SEIZE and INTERRUPT send no signal, but a stop may cut short a system call of the thread, so
//! threads are stopped only on request. `Drop` releases a stopped thread. All calls of one [`Stop`]
//! must come from one OS thread. The kernel releases the stopped threads when that OS thread ends,
//! also if this process is killed, but not while this process is frozen. For that case, an
//! expendable process has itself killed ([`HoldWatchdog`]).

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use nix::unistd::Pid;

use xpu_timer_proto::procfs;

use crate::error::Error;

use super::Registers;

/// Usual maximum time until a thread on another CPU has stopped.
const SPIN_TIME: Duration = Duration::from_micros(20);
/// How long to leave the CPU to the threads that must stop after that. If it is taken back too soon
/// again and again, no thread makes progress.
const SLEEP_TIME: Duration = Duration::from_micros(30);
/// A thread that has not stopped after this time may never stop, so its state is checked.
const CHECK_AFTER: Duration = Duration::from_millis(1);

/// How long to wait for a thread to stop that was seized but not stopped, so that it can be
/// released.
const RELEASE_WAIT: Duration = Duration::from_millis(2);

/// A thread that stays stopped until this is dropped.
pub(crate) struct Stop {
    tid: i32,
    /// Dropped after the thread has been released.
    watchdog: Option<HoldWatchdog>,
    /// When the stop was requested.
    since: Option<Instant>,
    stopped: bool,
    /// The signal that was about to be delivered to the thread. The thread gets it when it
    /// continues.
    signal: i32,
}

impl Stop {
    /// Stops one thread. The caller must not stop a thread in uninterruptible sleep, which would
    /// never respond.
    pub(crate) fn new(pid: i32, tid: i32, deadline: Instant, _priority: &RaisedPriority) -> Result<Self, Error> {
        let mut stop = Self::seize(pid, tid)?;
        stop.request(pid)?;
        stop.wait(pid, deadline)?;
        Ok(stop)
    }

    /// Prepares to stop one thread, which continues to run.
    pub(crate) fn seize(pid: i32, tid: i32) -> Result<Self, Error> {
        let watchdog = HoldWatchdog::new().map_err(|source| Error::Ptrace { tid, source })?;
        nix::sys::ptrace::seize(Pid::from_raw(tid), nix::sys::ptrace::Options::empty())
            .map_err(|errno| ptrace_error(pid, tid, errno.into()))?;
        Ok(Stop { tid, watchdog, since: None, stopped: false, signal: 0 })
    }

    /// Requests the stop without waiting for it.
    pub(crate) fn request(&mut self, pid: i32) -> Result<(), Error> {
        if let Some(watchdog) = &self.watchdog {
            watchdog.start().map_err(|source| Error::Ptrace { tid: self.tid, source })?;
        }
        self.since = Some(Instant::now());
        nix::sys::ptrace::interrupt(Pid::from_raw(self.tid)).map_err(|errno| ptrace_error(pid, self.tid, errno.into()))
    }

    /// Whether the thread has stopped by now.
    pub(crate) fn has_stopped(&mut self) -> Result<bool, Error> {
        if !self.stopped {
            let found =
                wait_stopped(libc::P_PID, self.tid).map_err(|source| Error::Ptrace { tid: self.tid, source })?;
            found.iter().for_each(|stopped| self.take(stopped));
        }
        Ok(self.stopped)
    }

    fn take(&mut self, stopped: &StoppedThread) {
        self.stopped = true;
        self.signal = stopped.signal;
    }

    /// Waits until the thread has stopped.
    pub(crate) fn wait(&mut self, pid: i32, deadline: Instant) -> Result<(), Error> {
        let asked = Instant::now();
        while !self.has_stopped()? {
            if Instant::now() >= deadline {
                return Err(Error::NoStop { tid: self.tid, waited_us: asked.elapsed().as_micros() as u64 });
            }
            // A thread on another CPU stops within microseconds. A thread on this CPU needs this
            // CPU, which a thread with raised priority yields only by sleeping.
            let waited = asked.elapsed();
            if waited < SPIN_TIME {
                std::hint::spin_loop();
                continue;
            }
            if waited >= CHECK_AFTER {
                match procfs::status(pid, self.tid).map_or(b'X', |status| status.letter()) {
                    b'Z' | b'X' => return Err(Error::Gone(self.tid)),
                    b'D' => return Err(Error::NoStop { tid: self.tid, waited_us: waited.as_micros() as u64 }),
                    _ => {}
                }
            }
            std::thread::sleep(SLEEP_TIME);
        }
        Ok(())
    }

    pub(crate) fn registers(&self) -> Result<Registers, Error> {
        let registers = nix::sys::ptrace::getregs(Pid::from_raw(self.tid))
            .map_err(|errno| Error::Ptrace { tid: self.tid, source: errno.into() })?;
        Ok(Registers::from_ptrace(&registers))
    }

    /// Lets the thread continue, and returns an upper bound of the time for which it was stopped.
    pub(crate) fn release(self) -> Duration {
        let since = self.since;
        drop(self);
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        // After a request, the watchdog is already running. Without a request, the thread is
        // stopped now only so that it can be released.
        if self.since.is_none()
            && let Some(watchdog) = &self.watchdog
        {
            // If this fails, the end of this OS thread still releases the thread.
            let _ = watchdog.start();
        }
        // Only a stopped thread can be detached. The end of this OS thread releases a thread that
        // has not stopped yet.
        if self.since.is_none() && nix::sys::ptrace::interrupt(Pid::from_raw(self.tid)).is_ok() {
            let asked = Instant::now();
            while matches!(self.has_stopped(), Ok(false)) && asked.elapsed() < RELEASE_WAIT {
                std::thread::yield_now();
            }
        }
        let _ = self.has_stopped();
        detach(self.tid, self.signal);
    }
}

fn ptrace_error(pid: i32, tid: i32, source: io::Error) -> Error {
    if source.raw_os_error() == Some(libc::EPERM)
        && let Ok(status) = procfs::status(pid, tid)
    {
        if status.tracer != 0 {
            // The kernel names the tracing thread, but a person wants the name of the program.
            let tracer = procfs::pid_of_thread(status.tracer).unwrap_or(status.tracer);
            let name = procfs::stat(tracer).map(|stat| stat.name).unwrap_or_default();
            return Error::Traced { tid, tracer, name };
        }
        if matches!(status.letter(), b'Z' | b'X') {
            return Error::Gone(tid);
        }
        return Error::denied(pid, status.uid);
    }
    Error::Ptrace { tid, source }
}

/// Waits for threads whose stop was requested, and passes each to `each` with its index as soon as
/// it has stopped. Stopped and ended threads are taken out of the list. The rest has not stopped by
/// the deadline.
pub(crate) fn each_stopped(
    stops: &mut [Option<Stop>],
    deadline: Instant,
    _priority: &RaisedPriority,
    mut each: impl FnMut(usize, Stop),
) {
    let mut last = Instant::now();
    while stops.iter().any(Option::is_some) && Instant::now() < deadline {
        // One system call for all threads, instead of one for each.
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
            Ok(None) if last.elapsed() < CHECK_AFTER => std::thread::sleep(SLEEP_TIME),
            // The kernel does not report the end of a thread here, so check each thread.
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
                std::thread::sleep(SLEEP_TIME);
            }
        }
    }
}

/// A thread that has stopped.
struct StoppedThread {
    tid: i32,
    /// The signal to deliver afterwards, or 0.
    signal: i32,
}

/// A thread that has stopped: the given one, or any that this OS thread traces. This never waits,
/// and never takes the exit status of a process from its parent, which may be this process.
#[allow(unsafe_code)]
fn wait_stopped(kind: libc::idtype_t, tid: i32) -> io::Result<Option<StoppedThread>> {
    // SAFETY: siginfo_t is plain data, and zeros are valid for it.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WSTOPPED | libc::WNOHANG | libc::__WALL | libc::__WNOTHREAD;
    // SAFETY: `info` is valid for writing, and the flags are those of waitid.
    let result = unsafe { libc::waitid(kind, tid as libc::id_t, &mut info, flags) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: waitid has filled in the fields of a child event, or left the zeros.
    let (tid, status) = unsafe { (info.si_pid(), info.si_status()) };
    if tid == 0 {
        return Ok(None);
    }
    // An event (the interrupt, a group stop) has its number above the signal, and no signal is
    // delivered.
    let event = status >> 8;
    Ok(Some(StoppedThread { tid, signal: if event == 0 { status & 0xff } else { 0 } }))
}

#[allow(unsafe_code)]
fn detach(tid: i32, signal: i32) {
    // SAFETY: PTRACE_DETACH takes a thread id and a signal number and accesses no memory of this
    // process.
    let result = unsafe { libc::ptrace(libc::PTRACE_DETACH, tid, 0usize, signal as usize) };
    if result != 0 {
        tracing::debug!("thread {tid} was not released: {}", io::Error::last_os_error());
    }
}

/// Maximum time for which an expendable process holds a thread. It is longer than the time limit
/// for a thread to stop.
const MAX_HOLD: Duration = Duration::from_millis(400);

static EXPENDABLE: AtomicBool = AtomicBool::new(false);

/// From now on, the kernel kills this process if it holds a thread for longer than [`MAX_HOLD`],
/// whatever prevents the release: a SIGSTOP, a debugger, a freezer, a busy machine.
pub(crate) fn enable_hold_watchdog() {
    EXPENDABLE.store(true, Ordering::Relaxed);
}

/// A timer that kills this process unless it is dropped in time. SIGKILL also ends processes that
/// are stopped or frozen.
///
/// It uses system calls directly, because the functions of glibc 2.34 have a symbol version that
/// older systems lack.
struct HoldWatchdog(libc::c_int);

impl HoldWatchdog {
    /// `None` in a process that may not be killed. After an error, no thread may be stopped.
    #[allow(unsafe_code)]
    pub(crate) fn new() -> io::Result<Option<Self>> {
        if !EXPENDABLE.load(Ordering::Relaxed) {
            return Ok(None);
        }
        // SAFETY: sigevent is plain data, and zeros are valid for it.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_SIGNAL;
        event.sigev_signo = libc::SIGKILL;
        let mut timer: libc::c_int = 0;
        // SAFETY: `event` is valid for reading and has the kernel's layout. `timer`, an int for the
        // kernel, is valid for writing.
        let result =
            unsafe { libc::syscall(libc::SYS_timer_create, libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
        if result == 0 { Ok(Some(HoldWatchdog(timer))) } else { Err(io::Error::last_os_error()) }
    }

    #[allow(unsafe_code)]
    pub(crate) fn start(&self) -> io::Result<()> {
        let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let after = libc::timespec { tv_sec: 0, tv_nsec: MAX_HOLD.as_nanos() as i64 };
        let once = libc::itimerspec { it_interval: never, it_value: after };
        // SAFETY: the timer exists until `self` is dropped, and `once` is valid for reading.
        let result = unsafe {
            libc::syscall(libc::SYS_timer_settime, self.0, 0, &raw const once, std::ptr::null_mut::<libc::itimerspec>())
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for HoldWatchdog {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: `new` created the timer, and nobody else uses it.
        unsafe { libc::syscall(libc::SYS_timer_delete, self.0) };
    }
}

/// Raises the priority of this OS thread until dropped. If this thread loses the CPU while it holds
/// another thread, that thread stays stopped for longer. So nothing slow may happen under the
/// raised priority, and every wait must sleep.
pub(crate) struct RaisedPriority {
    before: Option<Priority>,
}

/// The original value of what was changed.
enum Priority {
    Policy(i32, libc::sched_param),
    Niceness(i32),
}

impl RaisedPriority {
    /// Without the privilege to change it, the priority stays as it is.
    #[allow(unsafe_code)]
    pub(crate) fn new() -> Self {
        let first = libc::sched_param { sched_priority: 1 };
        let mut usual = libc::sched_param { sched_priority: 0 };
        // SAFETY: the parameters are valid for reading and writing. 0 is the calling thread, also
        // below.
        unsafe {
            let policy = libc::sched_getscheduler(0);
            if libc::sched_getparam(0, &raw mut usual) == 0
                && libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const first) == 0
            {
                return RaisedPriority { before: Some(Priority::Policy(policy, usual)) };
            }
        }
        // A control group may forbid the policy to everybody.
        // SAFETY: these calls take and return numbers.
        let (niceness, changed) = unsafe {
            let niceness = libc::getpriority(libc::PRIO_PROCESS, 0);
            (niceness, libc::setpriority(libc::PRIO_PROCESS, 0, -20) == 0)
        };
        RaisedPriority { before: changed.then_some(Priority::Niceness(niceness)) }
    }
}

impl Drop for RaisedPriority {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // Restoring the priority is always permitted.
        match &self.before {
            // SAFETY: `usual` lives during the call, which changes only the policy of this thread.
            Some(Priority::Policy(policy, usual)) => unsafe {
                libc::sched_setscheduler(0, *policy, usual);
            },
            // SAFETY: the call takes numbers.
            Some(Priority::Niceness(niceness)) => unsafe {
                libc::setpriority(libc::PRIO_PROCESS, 0, *niceness);
            },
            None => {}
        }
    }
}

/// Makes sleeps of this OS thread end on time instead of the usual 50 us later.
pub(crate) fn use_precise_sleep() {
    // This only affects timing, so it may fail.
    let _ = nix::sys::prctl::set_timerslack(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(unsafe_code)]
    fn raised_priority_is_restored() {
        // SAFETY: the call takes and returns a number.
        let policy = || unsafe { libc::sched_getscheduler(0) };
        let before = policy();
        let priority = RaisedPriority::new();
        if nix::unistd::geteuid().is_root() {
            assert!(priority.before.is_some(), "root may");
        }
        drop(priority);
        assert_eq!(policy(), before);
    }
}
