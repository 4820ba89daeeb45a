//! System calls, files and thread ids, in a form that is safe inside a foreign process: no failure
//! ends the process.

use std::{
    ffi::{CStr, c_int, c_void},
    io,
};

use crate::runtime::os::{
    descriptor::close,
    seccomp,
    thread_state::{ThreadState, errno},
};

/// Lets another thread run, if this one may make the system call.
pub(crate) fn relax() {
    if seccomp::may_call() { std::thread::yield_now() } else { std::hint::spin_loop() }
}

/// Reads the beginning of a file into `buffer` and returns its length. 0 if the file cannot be
/// read.
pub(crate) fn read_file(path: &CStr, buffer: &mut [u8]) -> usize {
    // SAFETY: a C string.
    let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if fd < 0 {
        return 0;
    }
    // SAFETY: a valid buffer.
    let length = unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) };
    close(fd);
    usize::try_from(length).unwrap_or(0)
}

/// The exit status of the process's first thread, if that has ended and the calling thread is the
/// only one left.
pub(crate) fn first_threads_status_when_alone() -> Option<c_int> {
    /// Links of a directory without subdirectories. `/proc/PID/task` has one more for each thread.
    const LINKS: u64 = 2;
    // SAFETY: an all-zero stat is a valid value of that plain structure.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a C string and a valid place.
    let known = unsafe { libc::stat(c"/proc/self/task".as_ptr(), &mut stat) } == 0;
    // A first thread that has ended is listed until all threads have ended.
    if !known || stat.st_nlink != LINKS + 2 {
        return None;
    }
    let mut text = [0; 1024];
    let length = read_file(c"/proc/self/stat", &mut text);
    status_of_zombie(&text[..length])
}

/// The exit status in the `/proc/PID/stat` of a zombie.
fn status_of_zombie(stat: &[u8]) -> Option<c_int> {
    // The name in parentheses may contain any character. The last of the 52 fields is the status as
    // wait(2) returns it.
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let fields = std::str::from_utf8(&stat[name_end + 1..]).ok()?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    let waited: c_int = fields.last()?.parse().ok()?;
    (state == "Z").then_some((waited >> 8) & 0xff)
}

/// Ends the calling thread with a status, unless that is 0. When the first thread ended by the bare
/// system call, the process's exit status is that of its last thread (since Linux 5.18). So the
/// hook's thread must end with the program's status.
pub(crate) fn end_thread_unless_success(status: c_int) {
    if status != 0 {
        // SAFETY: no other thread is left that could notice what this one does not clean up.
        unsafe { libc::syscall(libc::SYS_exit, status) };
    }
}

/// Whether a path names a regular file.
pub(crate) fn is_regular(path: &CStr) -> bool {
    // SAFETY: an all-zero stat is a valid value of that plain structure.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a C string and a valid place.
    let known = unsafe { libc::stat(path.as_ptr(), &mut stat) } == 0;
    known && stat.st_mode & libc::S_IFMT == libc::S_IFREG
}

/// Reads a word of this process's memory that may be unmapped.
///
/// # Errors
/// The errors of [`read_memory`].
pub(crate) fn word_at(address: usize) -> io::Result<usize> {
    let mut word = [0; size_of::<usize>()];
    read_memory(address, &mut word).map(|()| usize::from_ne_bytes(word))
}

/// Reads memory of this process that may be unmapped.
///
/// # Errors
/// `EFAULT` when it is unmapped, also in part. Another error when the system or a filter forbids
/// this kind of read.
pub(crate) fn read_memory(address: usize, bytes: &mut [u8]) -> io::Result<()> {
    if !seccomp::may_call() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let here = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let there = libc::iovec { iov_base: address as *mut c_void, iov_len: bytes.len() };
    // SAFETY: `here` is a valid place; the kernel checks `there`.
    match unsafe { libc::process_vm_readv(libc::getpid(), &here, 1, &there, 1, 0) } {
        read if read == bytes.len() as isize => Ok(()),
        read if read >= 0 => Err(io::Error::from_raw_os_error(libc::EFAULT)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the process has exactly one thread. False when that cannot be determined.
pub(crate) fn is_alone() -> bool {
    // SAFETY: an all-zero stat is a valid value of that plain structure.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a C string and a valid place.
    let known = unsafe { libc::stat(c"/proc/self/task".as_ptr(), &mut stat) } == 0;
    // A directory has a link to itself, one from its parent, and one from each subdirectory.
    known && stat.st_nlink == 3
}

impl ThreadState {
    /// The thread's id, cached. 0 if the thread may not make the system call.
    pub(crate) fn tid(&self) -> u32 {
        if self.tid.get() == 0 && seccomp::may_call() {
            self.tid.set(gettid());
        }
        self.tid.get()
    }
}

/// The id of the calling thread.
pub(crate) fn gettid() -> u32 {
    // SAFETY: gettid takes nothing and cannot fail.
    unsafe { libc::gettid() as u32 }
}

/// Whether this process has a thread with this id. True when that cannot be determined.
pub(crate) fn is_thread(tid: u32) -> bool {
    if !seccomp::may_call() {
        return true;
    }
    // SAFETY: signal 0 is checked and never sent; the arguments are integers.
    let answer = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, 0) };
    answer == 0 || errno().get() != libc::ESRCH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zombie_has_its_exit_status() {
        let stat =
            |state: &str, status: &str| format!("77 (a) Z b) {state} 1 77 0 -1 4228 {}{status}\n", "0 ".repeat(43));
        assert_eq!(status_of_zombie(stat("Z", "1280").as_bytes()), Some(5));
        assert_eq!(status_of_zombie(stat("Z", "0").as_bytes()), Some(0));
        assert_eq!(status_of_zombie(stat("S", "0").as_bytes()), None);
        assert_eq!(status_of_zombie(b"77 (cut"), None);
    }

    #[test]
    fn an_unmapped_word_is_an_error() {
        let word = 7usize;
        assert_eq!(word_at(std::ptr::from_ref(&word) as usize).unwrap(), 7);
        for gone in [8, usize::MAX - 7] {
            assert_eq!(word_at(gone).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        }
    }
}
