//! What the hook knows of the calling thread: which hooked calls it is inside of, and its NCCL group.
//!
//! A few words of thread-local memory without destructor: it is there from the first to the last instruction of a thread,
//! and small, because it is part of the stack that the host sized for its threads. `thread_local!` would reach it through
//! `__tls_get_addr`, which a preloaded sanitizer replaces and which crashes as long as the sanitizer is not set up; and it is
//! the dearer way. A preloaded library is there when the first thread's memory is laid out, so its place is at a fixed distance
//! from the thread pointer (the initial-exec model), which the compiler cannot be asked for and the assembler can.

use std::{cell::Cell, ffi::c_int};

use crate::runtime::os::errno;

/// Inside a collective library's function.
pub const IN_COLLECTIVES: u8 = 1;

/// Inside a function of the runtime API.
pub const IN_RUNTIME: u8 = 2;

/// Inside a function of the driver API.
pub const IN_DRIVER: u8 = 4;

/// Inside a function that multiplies matrices.
pub const IN_BLAS: u8 = 16;

/// Inside the hook's own code; nothing that it calls is recorded.
pub const IN_HOOK: u8 = 8;

/// State of one thread.
pub struct ThreadState {
    /// The `IN_*` bits.
    pub inside: Cell<u8>,
    /// The driver has seen a launch since the runtime call began.
    pub seen_by_driver: Cell<bool>,
    /// Depth of ncclGroupStart.
    pub group_depth: Cell<u32>,
    /// Number of the open group.
    pub group: Cell<u64>,
    /// First and last slot of the open group's operations, plus one; 0 for none.
    pub group_first: Cell<u32>,
    /// As above.
    pub group_last: Cell<u32>,
    /// The row and the slot by which the next wrapper on this thread is entered; see [`crate::runtime::linker::function::Function`].
    pub entry: Cell<usize>,
    /// Index of the thread's lane plus one; see [`crate::runtime::recorder::lanes`].
    pub lane: Cell<u32>,
    /// Slot, plus one, of the first operation whose call the thread is inside of; 0 for none.
    pub open: Cell<u32>,
    /// Launches so far, for [`crate::runtime::overhead`].
    pub launches: Cell<u32>,
    /// Calls of the collective library so far, for the same.
    pub collectives: Cell<u32>,
    /// This is the watcher.
    pub is_watcher: Cell<bool>,
    /// The last dlopen asked for `RTLD_DEEPBIND`.
    pub asked_for_deepbind: Cell<bool>,
    /// Tickets that the thread has taken and not used: from, to, and when they were taken; see [`crate::runtime::recorder`].
    pub next_ticket: Cell<u64>,
    /// As above.
    pub end_of_tickets: Cell<u64>,
    /// As above.
    pub tickets_ns: Cell<u64>,
    /// How many it took the last time.
    pub tickets: Cell<u32>,
    /// Another thread took tickets between the last two times that this one did.
    pub is_not_alone: Cell<bool>,
    /// Numbers of groups that the thread has taken and not used: the first, and how many.
    pub next_group: Cell<u64>,
    /// As above.
    pub groups_left: Cell<u32>,
    /// Where communicators were found last; see [`crate::runtime::recorder::communicators`].
    pub comms: [Cell<u16>; COMMS],
    /// The clock when it was read last, and the processor's counter then; see [`crate::runtime::os::tsc_clock`].
    pub clock_ns: Cell<u64>,
    /// As above.
    pub clock_counter: Cell<u64>,
    pub tid: Cell<u32>,
    errno: Cell<Option<&'static Cell<c_int>>>,
}

/// Places in [`ThreadState::comms`].
pub const COMMS: usize = 16;

// All zero: a state that a thread may begin with.
core::arch::global_asm!(
    ".pushsection .tbss.xpu_timer_thread_state,\"awT\",@nobits",
    ".globl xpu_timer_thread_state",
    ".hidden xpu_timer_thread_state",
    ".type xpu_timer_thread_state,@object",
    ".size xpu_timer_thread_state,{bytes}",
    ".p2align 6",
    "xpu_timer_thread_state:",
    ".zero {bytes}",
    ".popsection",
    bytes = const size_of::<ThreadState>(),
);

const _: () = assert!(align_of::<ThreadState>() <= 64);

/// The calling thread's state.
#[inline(always)]
pub fn current() -> &'static ThreadState {
    let state: *const ThreadState;
    // SAFETY: reads the thread pointer and the distance in the table of offsets; neither ever changes in a running thread.
    unsafe {
        core::arch::asm!(
            "mov {state}, qword ptr fs:[0]",
            "add {state}, qword ptr [rip + xpu_timer_thread_state@GOTTPOFF]",
            state = out(reg) state,
            options(pure, nomem, nostack),
        );
    }
    // SAFETY: memory of that size and alignment, in which all zero is a valid value; thread-local memory without a destructor lives
    // as long as its thread, and the reference cannot leave the thread, because cells cannot be shared.
    unsafe { &*state }
}

/// The same for a closure.
#[inline]
pub fn with<R>(use_it: impl FnOnce(&ThreadState) -> R) -> R {
    use_it(current())
}

impl ThreadState {
    /// The thread's errno, whose place is asked for once.
    #[inline(always)]
    pub fn errno(&self) -> &'static Cell<c_int> {
        match self.errno.get() {
            Some(errno) => errno,
            None => {
                let errno = errno::errno();
                self.errno.set(Some(errno));
                errno
            }
        }
    }

    /// Forgets what belongs to the parent process, in the only thread that a forked child has.
    pub fn after_fork(&self) {
        self.tid.set(0);
        self.lane.set(0);
        self.open.set(0);
        self.group.set(0);
        self.group_first.set(0);
        self.group_last.set(0);
        self.next_ticket.set(0);
        self.end_of_tickets.set(0);
        self.groups_left.set(0);
    }
}

/// Runs the hook's own code: whatever hooked function it reaches goes straight through.
pub fn in_hook<R>(code: impl FnOnce() -> R) -> R {
    struct Restore(u8);
    impl Drop for Restore {
        fn drop(&mut self) {
            with(|state| state.inside.set(self.0));
        }
    }
    let before = with(|state| state.inside.replace(state.inside.get() | IN_HOOK));
    let _restore = Restore(before);
    code()
}
