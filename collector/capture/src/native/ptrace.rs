//! Stops a thread for exactly as long as it takes to copy its registers and its stack.
//!
//! SEIZE and INTERRUPT send no signal, but a stop may cut short a system call of the thread, so
//! threads are stopped only on request. `Drop` releases a stopped thread. All calls of one [`Stop`]
//! must come from one OS thread. The kernel releases the stopped threads when that OS thread ends,
//! also if this process is killed, but not while this process is frozen. For that case, an
//! expendable process has itself killed (`hold_watchdog.rs`).

use std::{
    io,
    time::{Duration, Instant},
};

use nix::unistd::Pid;

use crate::{
    error::Error,
    kernel::{permission, procfs},
};

use super::{hold_watchdog::Watchdog, priority::RaisedPriority, registers::Registers};

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
    watchdog: Option<Watchdog>,
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
    pub fn new(pid: i32, tid: i32, deadline: Instant, _priority: &RaisedPriority) -> Result<Self, Error> {
        let mut stop = Self::seize(pid, tid)?;
        stop.request(pid)?;
        stop.wait(pid, deadline)?;
        Ok(stop)
    }

    /// Prepares to stop one thread, which continues to run.
    pub fn seize(pid: i32, tid: i32) -> Result<Self, Error> {
        let watchdog = Watchdog::new().map_err(|source| Error::Ptrace { tid, source })?;
        nix::sys::ptrace::seize(Pid::from_raw(tid), nix::sys::ptrace::Options::empty())
            .map_err(|errno| ptrace_error(pid, tid, errno.into()))?;
        Ok(Stop { tid, watchdog, since: None, stopped: false, signal: 0 })
    }

    /// Requests the stop without waiting for it.
    pub fn request(&mut self, pid: i32) -> Result<(), Error> {
        if let Some(watchdog) = &self.watchdog {
            watchdog.start().map_err(|source| Error::Ptrace { tid: self.tid, source })?;
        }
        self.since = Some(Instant::now());
        nix::sys::ptrace::interrupt(Pid::from_raw(self.tid)).map_err(|errno| ptrace_error(pid, self.tid, errno.into()))
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

    fn take(&mut self, stopped: &StoppedThread) {
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

    pub fn registers(&self) -> Result<Registers, Error> {
        let registers = nix::sys::ptrace::getregs(Pid::from_raw(self.tid))
            .map_err(|errno| Error::Ptrace { tid: self.tid, source: errno.into() })?;
        Ok(Registers::from_ptrace(&registers))
    }

    /// Lets the thread continue, and returns an upper bound of the time for which it was stopped.
    pub fn release(self) -> Duration {
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
        return permission::denied(pid, status.uid);
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
