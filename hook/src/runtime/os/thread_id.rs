//! Ids of threads.

use crate::runtime::os::{errno::errno, seccomp, thread_state::ThreadState};

impl ThreadState {
    /// The thread's id, asked for once; 0 of a thread that may not ask.
    pub fn tid(&self) -> u32 {
        if self.tid.get() == 0 && seccomp::may_call() {
            self.tid.set(gettid());
        }
        self.tid.get()
    }
}

/// The kernel's id of the calling thread.
pub fn gettid() -> u32 {
    // SAFETY: gettid takes nothing and cannot fail.
    unsafe { libc::gettid() as u32 }
}

/// Whether this process has a thread of that id. True when nobody can tell.
pub fn is_thread(tid: u32) -> bool {
    if !seccomp::may_call() {
        return true;
    }
    // SAFETY: signal 0 is only checked and never sent; both numbers are plain.
    let answer = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, 0) };
    answer == 0 || errno().get() != libc::ESRCH
}
