//! Stopping a thread for as long as it takes to copy its registers and its stack, and never longer.
//!
//! SEIZE and INTERRUPT send no signal. A stopped thread is released by `Drop`. The calls of one [`Stop`] must come from one
//! OS thread; the kernel releases what that thread still holds when it ends.

use std::{
    cell::Cell,
    io,
    time::{Duration, Instant},
};

use nix::unistd::Pid;

use crate::{Error, procfs, registers::Registers};

/// How long an answer from another CPU takes at most, mostly.
const SPIN: Duration = Duration::from_micros(20);

/// How long a thread that was never asked to stop is waited for so that it can be released.
const LAST_WAIT: Duration = Duration::from_millis(2);

/// A thread that is stopped, until this is dropped.
pub(crate) struct Stop {
    tid: i32,
    /// When it was asked to stop.
    since: Option<Instant>,
    stopped: bool,
    /// The signal that it was about to be told of; it gets it when it goes on.
    signal: i32,
}

impl Stop {
    /// Stops one thread. A thread that sleeps uninterruptibly would never answer, so the caller must not ask for one.
    pub fn new(pid: i32, tid: i32, deadline: Instant) -> Result<Self, Error> {
        let mut stop = Self::seize(pid, tid)?;
        stop.request(pid)?;
        stop.wait(pid, deadline)?;
        Ok(stop)
    }

    /// Makes ready for stopping one thread, which runs on.
    pub fn seize(pid: i32, tid: i32) -> Result<Self, Error> {
        hurry();
        nix::sys::ptrace::seize(Pid::from_raw(tid), nix::sys::ptrace::Options::empty())
            .map_err(|errno| explain(pid, tid, errno.into()))?;
        Ok(Stop { tid, since: None, stopped: false, signal: 0 })
    }

    /// Asks the thread to stop, without waiting until it has.
    pub fn request(&mut self, pid: i32) -> Result<(), Error> {
        self.since = Some(Instant::now());
        nix::sys::ptrace::interrupt(Pid::from_raw(self.tid)).map_err(|errno| explain(pid, self.tid, errno.into()))
    }

    /// Whether the thread has stopped by now.
    pub fn has_stopped(&mut self) -> Result<bool, Error> {
        if !self.stopped {
            let found = wait_stopped(self.tid).map_err(|source| Error::Ptrace { tid: self.tid, source })?;
            self.stopped = found.is_some();
            self.signal = found.unwrap_or(0);
        }
        Ok(self.stopped)
    }

    /// Waits until the thread has stopped.
    pub fn wait(&mut self, pid: i32, deadline: Instant) -> Result<(), Error> {
        let asked = Instant::now();
        while !self.has_stopped()? {
            if Instant::now() >= deadline {
                return Err(Error::NoStop { tid: self.tid, waited_us: asked.elapsed().as_micros() as u64 });
            }
            // A thread on another CPU answers within microseconds, and one on this CPU needs this CPU: sleeping would add
            // to the time for which it then stands still.
            let waited = asked.elapsed();
            if waited < SPIN {
                std::hint::spin_loop();
                continue;
            }
            if waited < Duration::from_millis(1) {
                std::thread::yield_now();
                continue;
            }
            match procfs::status(pid, self.tid).map_or(b'X', |status| status.letter()) {
                b'Z' | b'X' => return Err(Error::Gone(self.tid)),
                b'D' => {
                    let waited_us = asked.elapsed().as_micros() as u64;
                    return Err(Error::NoStop { tid: self.tid, waited_us });
                }
                _ => std::thread::sleep(Duration::from_micros(20)),
            }
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
            let tracer = procfs::process_of(status.tracer).unwrap_or(status.tracer);
            let name = procfs::stat(tracer).map(|stat| stat.name).unwrap_or_default();
            return Error::Traced { tid, tracer, name };
        }
        if matches!(status.letter(), b'Z' | b'X') {
            return Error::Gone(tid);
        }
        return Error::Permission { pid, uid: status.uid };
    }
    Error::Ptrace { tid, source }
}

/// Puts this OS thread before others: whoever takes the CPU from it while it holds a thread makes that one stand still too. It
/// lasts until this thread ends, which is soon.
#[allow(unsafe_code)]
fn hurry() {
    thread_local! {
        static DONE: Cell<bool> = const { Cell::new(false) };
    }
    if !DONE.replace(true) {
        // Without the privilege for it, it fails and all stays as it is.
        // SAFETY: setpriority takes three numbers; 0 stands for the calling thread.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) };
    }
}

/// Makes this OS thread's sleeps end when they are to, and not the usual 50 us later.
pub(crate) fn sleep_exactly() {
    // It is only about time, so it may fail.
    let _ = nix::sys::prctl::set_timerslack(1);
}

/// `Some` when the thread has stopped, with the signal it is to get afterwards, or 0. Never waits, and never takes the exit
/// status of a process away from its parent, which may be this one.
#[allow(unsafe_code)]
fn wait_stopped(tid: i32) -> io::Result<Option<i32>> {
    // SAFETY: siginfo_t is plain data for which zeroes are valid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WSTOPPED | libc::WNOHANG | libc::__WALL;
    // SAFETY: `info` is valid for writing, and the flags are those of waitid.
    let result = unsafe { libc::waitid(libc::P_PID, tid as libc::id_t, &mut info, flags) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: waitid has filled in the fields of a child event, or left the zeroes.
    let (reported, status) = unsafe { (info.si_pid(), info.si_status()) };
    if reported == 0 {
        return Ok(None);
    }
    // An event (the interrupt, a group stop) has its number above the signal and delivers nothing.
    let event = status >> 8;
    Ok(Some(if event == 0 { status & 0xff } else { 0 }))
}

#[allow(unsafe_code)]
fn detach(tid: i32, signal: i32) {
    // SAFETY: PTRACE_DETACH takes a thread id and a signal number and touches no memory of this process.
    let result = unsafe { libc::ptrace(libc::PTRACE_DETACH, tid, 0usize, signal as usize) };
    if result != 0 {
        tracing::debug!("thread {tid} was not released: {}", io::Error::last_os_error());
    }
}
