//! What the hook knows of the calling thread: which hooked calls it is inside of, and its NCCL group.
//!
//! A few words of thread-local memory without destructor: it is there from the first to the last instruction of a thread,
//! and small, because it is part of the stack that the host sized for its threads.

use std::cell::Cell;

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
    /// Index of the thread's lane plus one; see [`crate::lanes`].
    pub lane: Cell<u32>,
    /// Slot, plus one, of the first operation whose call the thread is inside of; 0 for none.
    pub open: Cell<u32>,
    /// Launches until the next one whose cost is measured. The very first ones do more than the others.
    pub launches_to_sample: Cell<u32>,
    /// As above, of the collective library's functions.
    pub collectives_to_sample: Cell<u32>,
    /// Tickets that the thread has taken and not used: from, to, and when they were taken; see [`crate::recorder`].
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
    /// Where communicators were found last; see [`crate::comms`].
    pub comms: [Cell<u16>; COMMS],
    tid: Cell<u32>,
}

/// Places in [`ThreadState::comms`].
pub const COMMS: usize = 16;

thread_local! {
    static STATE: ThreadState = const {
        ThreadState {
            inside: Cell::new(0),
            seen_by_driver: Cell::new(false),
            group_depth: Cell::new(0),
            group: Cell::new(0),
            group_first: Cell::new(0),
            group_last: Cell::new(0),
            lane: Cell::new(0),
            open: Cell::new(0),
            launches_to_sample: Cell::new(16),
            collectives_to_sample: Cell::new(4),
            next_ticket: Cell::new(0),
            end_of_tickets: Cell::new(0),
            tickets_ns: Cell::new(0),
            tickets: Cell::new(0),
            is_not_alone: Cell::new(false),
            next_group: Cell::new(0),
            groups_left: Cell::new(0),
            comms: [const { Cell::new(0) }; COMMS],
            tid: Cell::new(0),
        }
    };
}

/// The calling thread's state. One address computation, where `with` around a large closure is a call with all its captures.
#[inline(always)]
pub fn current() -> &'static ThreadState {
    // SAFETY: thread-local memory without a destructor lives as long as its thread, and the reference cannot leave the thread,
    // because cells cannot be shared.
    unsafe { &*STATE.with(std::ptr::from_ref) }
}

/// The calling thread's state.
#[inline]
pub fn with<R>(use_it: impl FnOnce(&ThreadState) -> R) -> R {
    use_it(current())
}

impl ThreadState {
    /// The thread's id, asked for once.
    pub fn tid(&self) -> u32 {
        if self.tid.get() == 0 {
            self.tid.set(crate::sys::gettid());
        }
        self.tid.get()
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
