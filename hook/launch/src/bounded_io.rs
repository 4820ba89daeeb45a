//! Accesses paths named by the user in another process, which can be abandoned: a file system may
//! never answer, and then neither a timeout nor a signal ends the call.
//!
//! A thread cannot do this. The launcher becomes the command by `exec`, which waits for all other
//! threads of the process. The other process is a grandchild, so the command does not have it as a
//! child, and it holds no descriptor of the job.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsFd, AsRawFd},
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::OFlag,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{Signal, kill},
        wait::waitpid,
    },
    unistd::{ForkResult, Pid, fork, pipe2},
};
use xpu_timer_proto::file;

/// [`file::read`], within [`file::PATIENCE`].
///
/// # Errors
/// The errors of [`file::read`], or that the file system does not answer.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    in_child(|| file::read(path))
}

/// Checks that the file system of `path`, or of its first existing parent, answers.
///
/// # Errors
/// The file system does not answer.
pub(crate) fn answers(path: &Path) -> io::Result<()> {
    in_child(|| {
        // The file's beginning is read too, because the kernel may have cached the metadata.
        if let Ok(mut file) = file::open(path) {
            let _ = file.read(&mut [0]);
        } else if let Some(there) = path.ancestors().find(|path| path.symlink_metadata().is_ok()) {
            let _ = nix::sys::statvfs::statvfs(there);
        }
        Ok(Vec::new())
    })
    .map(|_| ())
}

/// Checks that `path` is a regular file and that its file system answers.
///
/// # Errors
/// What it is otherwise.
pub(crate) fn is_file(path: &Path) -> io::Result<()> {
    in_child(|| file::open(path)?.read(&mut [0]).map(|_| Vec::new())).map(|_| ())
}

/// Runs some work in another process. That process sends its id, then an error's number and text,
/// or 0 and the result.
fn in_child(work: impl FnOnce() -> io::Result<Vec<u8>>) -> io::Result<Vec<u8>> {
    let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
    // SAFETY: this process has one thread.
    match unsafe { fork() }? {
        ForkResult::Child => {
            // SAFETY: this process has one thread. The intermediate process ends at once, so that
            // the command has no unknown child.
            if let Ok(ForkResult::Child) = unsafe { fork() } {
                drop(read);
                in_grandchild(work, File::from(write));
            }
            // SAFETY: ends the process without running the launcher's exit handlers.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            drop(write);
            // This fails only if another thread has reaped the child, which is fine.
            let _ = waitpid(child, None);
            answer(File::from(read))
        }
    }
}

fn in_grandchild(work: impl FnOnce() -> io::Result<Vec<u8>>, mut report: File) {
    close_all_but(report.as_raw_fd());
    let own = std::process::id() as i32;
    if report.write_all(&own.to_ne_bytes()).is_err() {
        return;
    }
    let (code, bytes) = match work() {
        Ok(bytes) => (0, bytes),
        Err(error) => (error.raw_os_error().unwrap_or(-1), error.to_string().into_bytes()),
    };
    // The reader is gone after the deadline.
    let _ = report.write_all(&code.to_ne_bytes()).and_then(|()| report.write_all(&bytes));
}

/// Closes all descriptors but one: a hanging process must not keep a pipe open that others read to
/// its end.
fn close_all_but(keep: i32) {
    let keep = keep as libc::c_uint;
    // SAFETY: closes descriptors of this process, which uses none of them. Kernels before 5.9 do
    // not have the call.
    let closed = unsafe {
        (keep == 0 || libc::syscall(libc::SYS_close_range, 0, keep - 1, 0) == 0)
            && libc::syscall(libc::SYS_close_range, keep + 1, libc::c_uint::MAX, 0) == 0
    };
    if !closed {
        for fd in crate::process::descriptors().into_iter().filter(|fd| *fd as libc::c_uint != keep) {
            // SAFETY: closes a descriptor that this process does not use.
            unsafe { libc::close(fd) };
        }
    }
}

/// Reads a pipe until it is closed, and returns whether that was in time.
pub(crate) fn read_to_end_within(mut pipe: File, patience: Duration) -> (Vec<u8>, bool) {
    let until = Instant::now() + patience;
    let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        let left = PollTimeout::try_from(until.saturating_duration_since(Instant::now())).unwrap_or(PollTimeout::ZERO);
        let mut waiting = [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)];
        match poll(&mut waiting, left) {
            Err(Errno::EINTR) => {}
            Ok(1..) => match pipe.read(&mut piece) {
                Ok(count @ 1..) => bytes.extend_from_slice(&piece[..count]),
                _ => return (bytes, true),
            },
            _ => return (bytes, false),
        }
    }
}

fn answer(pipe: File) -> io::Result<Vec<u8>> {
    let (bytes, in_time) = read_to_end_within(pipe, file::PATIENCE);
    if !in_time {
        if let Some((pid, _)) = number(&bytes) {
            // It ends when the kernel lets it.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        return Err(file::unanswered());
    }
    let lost = || io::Error::other("the process that reads it was ended");
    let (_, rest) = number(&bytes).ok_or_else(lost)?;
    match number(rest).ok_or_else(lost)? {
        (0, bytes) => Ok(bytes.to_vec()),
        (-1, text) => Err(io::Error::other(String::from_utf8_lossy(text).into_owned())),
        (code, _) => Err(io::Error::from_raw_os_error(code)),
    }
}

fn number(bytes: &[u8]) -> Option<(i32, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((i32::from_ne_bytes(*number), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_and_an_error_keeps_its_message() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![b'x'; 100_000]).unwrap();
        assert_eq!(read(&path).unwrap().len(), 100_000);
        assert!(is_file(&path).is_ok() && answers(&path.join("a/b")).is_ok() && answers(folder.path()).is_ok());
        assert_eq!(is_file(folder.path()).unwrap_err().to_string(), "not a regular file");
        assert_eq!(read(&folder.path().join("none")).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    }

    #[test]
    fn blocked_work_is_abandoned_and_its_process_ended() {
        let begun = Instant::now();
        let error = in_child(|| {
            std::thread::sleep(Duration::from_secs(600));
            Ok(Vec::new())
        });
        assert_eq!(error.unwrap_err().to_string(), file::unanswered().to_string());
        assert!(begun.elapsed() < 10 * file::PATIENCE, "{:?}", begun.elapsed());
    }
}
