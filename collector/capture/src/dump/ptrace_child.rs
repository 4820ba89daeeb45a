//! The process that stops threads, for `--force-ptrace`: a child of the command, which does all its work.
//!
//! Whatever happens to the command or to the child, no thread of the target stays stopped. The kernel releases what a process
//! traced when that process dies. The child dies with the command. It is in a session of its own, so that no key and no hangup
//! of a terminal stops it. And when it is frozen while it holds a thread, a timer kills it (`ptrace.rs`).

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

use crate::native::ptrace;

/// Goes on as the child, where this returns `None`. The command waits for it and ends as it does.
#[allow(unsafe_code)]
pub(super) fn run() -> Result<Option<ExitCode>> {
    let command = getpid();
    // SAFETY: the command has started no thread yet, so the child has all that its parent had.
    match unsafe { fork() }.context("no process can be started that stops threads")? {
        ForkResult::Child => {
            prctl::set_pdeathsig(Signal::SIGKILL).context("prctl")?;
            if getppid() != command {
                bail!("the command has ended");
            }
            setsid().context("setsid")?;
            ptrace::die_rather_than_hold();
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
