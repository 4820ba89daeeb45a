//! How the launcher starts processes: the detached collector, and the command that replaces the
//! launcher.
//!
//! The collector runs in its own session, without our descriptors, and outside of the command's
//! process tree. An intermediate process starts it and ends at once. The launcher has one thread,
//! so forking is safe.
//!
//! Before `main`, Rust's runtime ignores SIGPIPE and opens /dev/null for closed standard streams.
//! The command must see neither, so both are restored for it.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use nix::{
    fcntl::OFlag,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::wait::waitpid,
    unistd::{ForkResult, fork, pipe2, setsid},
};

/// A detached program.
pub(crate) struct Detached {
    /// `None` if the kernel has no pidfd (before 5.3): then its end is not detected.
    process: Option<OwnedFd>,
}

impl Detached {
    /// Whether it has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.poll(Duration::ZERO)
    }

    /// Sleeps, or returns early when it ends.
    pub(crate) fn wait(&mut self, pause: Duration, ended: bool) {
        if ended || self.process.is_none() {
            std::thread::sleep(pause);
        } else {
            self.poll(pause);
        }
    }

    fn poll(&self, pause: Duration) -> bool {
        let Some(process) = &self.process else { return false };
        let mut waiting = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(pause).unwrap_or(PollTimeout::ZERO);
        poll(&mut waiting, timeout).is_ok_and(|ready| ready > 0)
    }
}

/// Starts `program` in the root folder, with these changes of the environment and its output in
/// `log`.
///
/// # Errors
/// It cannot be executed.
pub(crate) fn spawn_detached(
    program: &Path,
    arguments: &[&str],
    changes: &[(&str, OsString)],
    log: File,
) -> io::Result<Detached> {
    let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
    let output = log.try_clone()?;
    // SAFETY: this process has one thread.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(read);
            let answer = spawn_intermediate(program, arguments, changes, log, output, write.as_raw_fd());
            let _ = File::from(write).write_all(&answer);
            // SAFETY: ends the intermediate process without running the parent's exit handlers.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            drop(write);
            let mut answer = Vec::new();
            File::from(read).read_to_end(&mut answer)?;
            // This fails only if another thread has reaped the child, which is fine.
            let _ = waitpid(child, None);
            let answer: [u8; 4] = answer.try_into().map_err(|_| io::Error::other("no answer from the fork"))?;
            match i32::from_ne_bytes(answer) {
                pid if pid > 0 => Ok(Detached { process: open_pidfd(pid) }),
                error => Err(io::Error::from_raw_os_error(-error)),
            }
        }
    }
}

/// Starts the program in a new session. Returns its pid, or the negated error.
fn spawn_intermediate(
    program: &Path,
    arguments: &[&str],
    changes: &[(&str, OsString)],
    log: File,
    output: File,
    keep: i32,
) -> [u8; 4] {
    // The child of a session leader cannot acquire a terminal.
    let _ = setsid();
    close_on_exec(keep);
    let mut command = Command::new(program);
    command.args(arguments).current_dir("/").process_group(0);
    command.stdin(Stdio::null()).stdout(log).stderr(output);
    // The user's preloaded libraries are for the command, and the hook is not for the collector.
    command.env_remove("LD_PRELOAD");
    command.envs(changes.iter().map(|(name, value)| (name, value)));
    match command.spawn() {
        Ok(child) => (child.id() as i32).to_ne_bytes(),
        Err(error) => (-error.raw_os_error().unwrap_or(libc::ENOENT)).to_ne_bytes(),
    }
}

/// Marks every inherited descriptor as close-on-exec, so that the collector keeps no pipe or file
/// of the user open.
fn close_on_exec(keep: i32) {
    for fd in descriptors().into_iter().filter(|fd| *fd > 2 && *fd != keep) {
        // SAFETY: sets a flag of a descriptor; a closed descriptor returns an error.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// The descriptors of this process; none if /proc is missing.
pub(crate) fn descriptors() -> Vec<i32> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn open_pidfd(pid: i32) -> Option<OwnedFd> {
    // SAFETY: a system call with two integers. The pid belongs to another process only if the
    // program has ended and 2^22 others have started within a millisecond.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    // SAFETY: the descriptor was just opened and has no other owner.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Whether the launcher was started with SIGPIPE ignored.
static SIGPIPE_IGNORED: AtomicBool = AtomicBool::new(false);
/// Whether each standard stream was closed, by descriptor.
static CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];

/// Records SIGPIPE and the standard streams before the runtime changes them.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = {
    extern "C" fn look() {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: only reads the action, into valid zeroed memory.
        let action = unsafe {
            libc::sigaction(libc::SIGPIPE, std::ptr::null(), action.as_mut_ptr());
            action.assume_init()
        };
        SIGPIPE_IGNORED.store(action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
        for (fd, closed) in (0..).zip(&CLOSED) {
            // SAFETY: only reads the flags of a descriptor, which may be closed.
            closed.store(unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1, Ordering::Relaxed);
        }
    }
    look
};

/// Restores the inherited action of SIGPIPE. Standard streams that were closed are closed again
/// when another program is executed.
pub(crate) fn restore_inherited() {
    let action = if SIGPIPE_IGNORED.load(Ordering::Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: the action is one of the two that a process can inherit.
    unsafe { libc::signal(libc::SIGPIPE, action) };
    for (fd, _) in (0..).zip(&CLOSED).filter(|(_, closed)| closed.load(Ordering::Relaxed)) {
        // SAFETY: sets a flag of a descriptor that the runtime opened.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}
