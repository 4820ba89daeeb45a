//! The hook's state of the calling thread: which hooked calls it is executing, and its NCCL group.
//!
//! The state is a few words of thread-local memory without a destructor, so it exists from the
//! first to the last instruction of a thread. It is small, because it takes part of the stack that
//! the host sized for its threads.
//!
//! `thread_local!` would use `__tls_get_addr`, which is slower, and which crashes in a preloaded
//! sanitizer that is not set up yet. A preloaded library is loaded before the memory of the first
//! thread is laid out, so its data has a fixed distance from the thread pointer (the initial-exec
//! model). Rust cannot request this model, but assembly can.

use std::{cell::Cell, ffi::c_int};

/// Executing a function of a collective library.
pub(crate) const IN_COLLECTIVES: u8 = 1;

/// Executing a function of the runtime API.
pub(crate) const IN_RUNTIME: u8 = 2;

/// Executing a function of the driver API.
pub(crate) const IN_DRIVER: u8 = 4;

/// Executing a matrix product.
pub(crate) const IN_BLAS: u8 = 16;

/// Executing the hook's own code. Calls from it are not recorded.
pub(crate) const IN_HOOK: u8 = 8;

/// State of one thread.
pub(crate) struct ThreadState {
    /// The `IN_*` bits.
    pub inside: Cell<u8>,
    /// The driver layer has seen a launch since the runtime call began.
    pub seen_by_driver: Cell<bool>,
    /// Depth of ncclGroupStart.
    pub group_depth: Cell<u32>,
    /// Number of the open group.
    pub group: Cell<u64>,
    /// First and last slot of the open group, plus one. 0 for none.
    pub group_first: Cell<u32>,
    /// As above.
    pub group_last: Cell<u32>,
    /// Row and slot by which the next wrapper is entered; see `Function::set_entry_slot`.
    pub entry: Cell<usize>,
    /// Index of the thread's lane plus one; see `recorder::lanes`.
    pub lane: Cell<u32>,
    /// First slot of the call that the thread is executing, plus one. 0 for none.
    pub open: Cell<u32>,
    /// Number of launches, for the overhead measurement.
    pub launches: Cell<u32>,
    /// Number of collective calls, for the overhead measurement.
    pub collectives: Cell<u32>,
    /// This thread is the watcher.
    pub is_watcher: Cell<bool>,
    /// The last dlopen used `RTLD_DEEPBIND`.
    pub asked_for_deepbind: Cell<bool>,
    /// Tickets that the thread holds in reserve: the next one, the end, and the time when they were
    /// taken; see `recorder::operations`.
    pub next_ticket: Cell<u64>,
    /// As above.
    pub end_of_tickets: Cell<u64>,
    /// As above.
    pub tickets_ns: Cell<u64>,
    /// How many tickets the thread took last.
    pub tickets: Cell<u32>,
    /// Another thread took tickets since this thread took its last ones.
    pub is_not_alone: Cell<bool>,
    /// Group numbers that the thread holds in reserve: the first one, and how many.
    pub next_group: Cell<u64>,
    /// As above.
    pub groups_left: Cell<u32>,
    /// Cache of indices in the communicator table.
    pub comms: [Cell<u16>; COMMS],
    /// The last clock reading, and the counter at that time; see `clock`.
    pub clock_ns: Cell<u64>,
    /// As above.
    pub clock_counter: Cell<u64>,
    pub tid: Cell<u32>,
    /// Number of open calls of traced Python functions; see `tracing::callbacks`. It may be larger
    /// than the number of places in `open_calls`.
    pub open_call_count: Cell<u32>,
    /// The outermost ones of them, oldest first.
    pub open_calls: [Cell<OpenCall>; OPEN_CALLS],
    errno: Cell<Option<&'static Cell<c_int>>>,
}

/// Size of [`ThreadState::comms`].
pub(crate) const COMMS: usize = 16;

/// Size of [`ThreadState::open_calls`].
pub(crate) const OPEN_CALLS: usize = 8;

/// A call of a traced Python function that has not ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenCall {
    /// Address of its code object.
    pub code: usize,
    /// When it began, CLOCK_MONOTONIC.
    pub began_ns: u64,
}

// A new thread's state is all zero.
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
pub(crate) fn current() -> &'static ThreadState {
    let state: *const ThreadState;
    // SAFETY: reads the thread pointer and an entry of the offset table, which never change in a
    // running thread.
    unsafe {
        core::arch::asm!(
            "mov {state}, qword ptr fs:[0]",
            "add {state}, qword ptr [rip + xpu_timer_thread_state@GOTTPOFF]",
            state = out(reg) state,
            options(pure, nomem, nostack),
        );
    }
    // SAFETY: the memory has this size and alignment, and all zero is a valid value. Thread-local
    // memory without a destructor lives as long as its thread. The reference cannot leave the
    // thread, because cells are not `Sync`.
    unsafe { &*state }
}

/// Calls a closure with the calling thread's state.
#[inline]
pub(crate) fn with<R>(use_it: impl FnOnce(&ThreadState) -> R) -> R {
    use_it(current())
}

impl ThreadState {
    /// The thread's errno. Its location is cached.
    #[inline(always)]
    pub(crate) fn errno(&self) -> &'static Cell<c_int> {
        match self.errno.get() {
            Some(errno) => errno,
            None => {
                let errno = errno();
                self.errno.set(Some(errno));
                errno
            }
        }
    }

    /// Resets what belongs to the parent process. Called on the only thread of a forked child.
    pub(crate) fn after_fork(&self) {
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

/// Runs the hook's own code. Hooked functions that it calls go straight to their originals.
pub(crate) fn in_hook<R>(code: impl FnOnce() -> R) -> R {
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

/// The calling thread's errno. The hook restores it before the host reads it.
#[inline]
pub(crate) fn errno() -> &'static Cell<c_int> {
    // SAFETY: the location is valid while the thread lives, and only this thread uses it. The
    // reference does not leave the calling function, so it does not outlive the thread.
    unsafe { Cell::from_mut(&mut *libc::__errno_location()) }
}
