//! Tries the system calls that hook and collector need in a child process: a seccomp filter may
//! refuse them, or kill the caller.
//!
//! Without this check, a filter that kills the caller would end the training process at the hook's
//! first call.

use std::{
    fs::File,
    io::{self, Write},
    os::raw::c_long,
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::OFlag,
    sys::{
        signal::{Signal, kill},
        wait::waitpid,
    },
    unistd::{ForkResult, fork, pipe2},
};

use xpu_timer_proto::procfs;

use crate::bounded_io;

/// Timeout for the child. It blocks longer only if the supervisor of a filter does not answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Used in place of an error number: the call was started.
const BEGUN: u8 = u8::MAX;

/// A system call, its arguments, and whether the hook depends on it.
struct Call {
    name: &'static str,
    number: c_long,
    arguments: [c_long; 4],
    /// A call that is not vital may be refused, because the code that needs it reports that itself.
    /// It must not kill the caller.
    vital: bool,
}

const fn call(name: &'static str, number: c_long, arguments: [c_long; 4], vital: bool) -> Call {
    Call { name, number, arguments, vital }
}

const NO_FILE: c_long = -1;

/// The calls to try. They affect only the child: they name no descriptor and no process, or only
/// query.
fn calls() -> [Call; 18] {
    let own = c_long::from(std::process::id() as i32);
    let kind = c_long::from(libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC);
    let name = c"xpu_timer_probe".as_ptr() as c_long;
    [
        // The first call, so that no core dump is written when a later call kills the child.
        call("prctl", libc::SYS_prctl, [c_long::from(libc::PR_SET_DUMPABLE), 0, 0, 0], false),
        call("socket", libc::SYS_socket, [c_long::from(libc::AF_UNIX), kind, 0, 0], true),
        call("connect", libc::SYS_connect, [NO_FILE, 0, 0, 0], true),
        call("getsockopt", libc::SYS_getsockopt, [NO_FILE, 0, 0, 0], true),
        call("recvfrom", libc::SYS_recvfrom, [NO_FILE, 0, 0, 0], true),
        call("sendto", libc::SYS_sendto, [NO_FILE, 0, 0, 0], true),
        call("sendmsg", libc::SYS_sendmsg, [NO_FILE, 0, 0, 0], true),
        call("poll", libc::SYS_poll, [0, 0, 0, 0], true),
        call("memfd_create", libc::SYS_memfd_create, [name, c_long::from(libc::MFD_CLOEXEC), 0, 0], true),
        call("fallocate", libc::SYS_fallocate, [NO_FILE, 0, 0, 1], true),
        call("tgkill", libc::SYS_tgkill, [own, own, 0, 0], true),
        call("prctl", libc::SYS_prctl, [c_long::from(libc::PR_SET_PTRACER), 0, 0, 0], false),
        // The C library uses it to start a program or a thread, and has a fallback if it is only
        // refused.
        call("clone3", libc::SYS_clone3, [0, 0, 0, 0], false),
        // Calls of the collector, which gets the same filter.
        call("bind", libc::SYS_bind, [NO_FILE, 0, 0, 0], false),
        call("listen", libc::SYS_listen, [NO_FILE, 0, 0, 0], false),
        call("pidfd_open", libc::SYS_pidfd_open, [own, 0, 0, 0], false),
        call("process_vm_readv", libc::SYS_process_vm_readv, [own, 0, 0, 0], false),
        call("ptrace", libc::SYS_ptrace, [c_long::from(libc::PTRACE_DETACH), own, 0, 0], false),
    ]
}

/// The first forbidden system call and how it is forbidden; `None` if there is none or if that is
/// unknown.
pub(crate) fn forbidden() -> Option<String> {
    // Nearly free if there is no filter.
    let status = procfs::status_text("self").unwrap_or_default();
    if procfs::field(&status, "Seccomp:") == Some("0") {
        return None;
    }
    let calls = calls();
    let (answers, ended) = try_all(&calls).ok()?;
    let remedy = "which xpu_timer needs; use a profile that allows it (docker run --security-opt seccomp=FILE, Kubernetes seccompProfile)";
    let pairs = || answers.chunks_exact(2).map(|pair| (&calls[usize::from(pair[0])], pair[1]));
    let refused =
        |answer: u8| [Errno::EPERM, Errno::EACCES, Errno::ENOSYS].contains(&Errno::from_raw(i32::from(answer)));
    if ended && let Some((call, BEGUN)) = pairs().next_back() {
        return Some(format!("the seccomp filter here kills a process that calls {}, {remedy}", call.name));
    }
    let (call, answer) = pairs().find(|(call, answer)| call.vital && *answer != BEGUN && refused(*answer))?;
    let error = Errno::from_raw(i32::from(answer)).desc();
    Some(format!("the seccomp filter here refuses {} ({error}), {remedy}", call.name))
}

/// Pairs of a call's index and [`BEGUN`] or its error number, and whether the child ended before
/// the last call.
fn try_all(calls: &[Call]) -> io::Result<(Vec<u8>, bool)> {
    let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
    // SAFETY: this process has one thread.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(read);
            in_child(calls, File::from(write));
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            drop(write);
            let (answers, in_time) = bounded_io::read_to_end_within(File::from(read), PATIENCE);
            if !in_time {
                let _ = kill(child, Signal::SIGKILL);
            }
            // This fails only if another thread has reaped the child, which is fine.
            let _ = waitpid(child, None);
            let complete = 4 * calls.len();
            Ok((answers.clone(), answers.len() < complete))
        }
    }
}

fn in_child(calls: &[Call], mut report: File) {
    for (index, call) in (0u8..).zip(calls) {
        let [a, b, c, d] = call.arguments;
        if report.write_all(&[index, BEGUN]).is_err() {
            return;
        }
        // SAFETY: the arguments contain no pointer but a C string, and no file; see `calls`.
        let result = unsafe { libc::syscall(call.number, a, b, c, d, 0, 0) };
        let error = if result < 0 { Errno::last_raw() as u8 } else { 0 };
        if report.write_all(&[index, error]).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_probed_call_begins_and_returns() {
        let (answers, ended) = try_all(&calls()).unwrap();
        assert!(!ended, "{answers:?}");
        for (index, pair) in answers.chunks_exact(4).enumerate() {
            assert_eq!((usize::from(pair[0]), pair[1], pair[2]), (index, BEGUN, pair[0]), "{answers:?}");
        }
    }

    #[test]
    fn the_fatal_call_is_the_last_one_that_began() {
        let own = [call("getppid", libc::SYS_getppid, [0; 4], true), call("exit", libc::SYS_exit_group, [0; 4], true)];
        assert_eq!(try_all(&own).unwrap(), (vec![0, BEGUN, 0, 0, 1, BEGUN], true));
    }
}
