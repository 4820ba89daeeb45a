//! The process that stops threads, for `--force-ptrace`: a child of the command that does all its
//! work.
//!
//! Whatever happens to the command or the child, no thread of the target stays stopped. When a
//! process dies, the kernel releases the threads that it traced. The child dies with the command.
//! It is in a session of its own, so that no key and no hangup of a terminal stops it. If it is
//! frozen while it holds a thread, a timer kills it (`native/hold_watchdog.rs`).

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use nix::{
    sys::{
        prctl,
        signal::Signal,
        wait::{WaitStatus, waitpid},
    },
    unistd::{ForkResult, fork, getpid, getppid, setsid},
};

use crate::native::hold_watchdog;

/// Returns `None` in the child, which continues. The command waits for the child and ends with its
/// exit code.
#[allow(unsafe_code)]
pub(super) fn run() -> Result<Option<ExitCode>> {
    let command = getpid();
    // SAFETY: the command has started no thread yet, so the child has a copy of all its state.
    match unsafe { fork() }.context("no process can be started that stops threads")? {
        ForkResult::Child => {
            prctl::set_pdeathsig(Signal::SIGKILL).context("prctl")?;
            if getppid() != command {
                bail!("the command has ended");
            }
            setsid().context("setsid")?;
            hold_watchdog::enable();
            Ok(None)
        }
        ForkResult::Parent { child } => {
            let code = match waitpid(child, None).context("waitpid")? {
                WaitStatus::Exited(_, code) => code,
                WaitStatus::Signaled(_, Signal::SIGKILL, _) => {
                    eprintln!("xpu_timer_dump: killed so that no thread stays stopped; the machine may be too busy");
                    1
                }
                status => bail!("the process that stops threads ended: {status:?}"),
            };
            Ok(Some(ExitCode::from(u8::try_from(code).unwrap_or(1))))
        }
    }
}
