//! Thread ids.

use crate::runtime::os::{errno::errno, seccomp, thread_state::ThreadState};

impl ThreadState {
    /// The thread's id, cached. 0 if the thread may not make the system call.
    pub fn tid(&self) -> u32 {
        if self.tid.get() == 0 && seccomp::may_call() {
            self.tid.set(gettid());
        }
        self.tid.get()
    }
}

/// The id of the calling thread.
pub fn gettid() -> u32 {
    // SAFETY: gettid takes nothing and cannot fail.
    unsafe { libc::gettid() as u32 }
}

/// Whether this process has a thread with this id. True when that cannot be determined.
pub fn is_thread(tid: u32) -> bool {
    if !seccomp::may_call() {
        return true;
    }
    // SAFETY: signal 0 is checked and never sent; the arguments are integers.
    let answer = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, 0) };
    answer == 0 || errno().get() != libc::ESRCH
}
