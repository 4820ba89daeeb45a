//! The store in which PyTorch's ranks find each other. A rank that never arrives blocks the others
//! here, before there is any group.
//!
//! Many processes that are not ranks use stores, such as the agent of torchrun, so only calls of
//! ranks count. Other threads may legitimately wait in a store for as long as the job runs, so
//! `wait` counts on the main thread only.

use crate::{
    backends::host_call::Running,
    runtime::{
        os::{leaked_once::LeakedOnce, sys, thread_state},
        recorder::{Recorder, host_operations::named_host_call},
    },
};

/// Whether torchrun's variables make this process one of several ranks. Determined at the first
/// call.
pub fn is_rank() -> bool {
    static IS_RANK: LeakedOnce<bool> = LeakedOnce::new();
    *IS_RANK.get_or_init(|| {
        let number = |name| String::from_utf8(sys::variable(name)?).ok()?.trim().parse::<u32>().ok();
        number(c"RANK").is_some() && number(c"WORLD_SIZE").is_some_and(|size| size > 1)
    })
}

/// Whether this is the main thread of such a process.
pub fn is_main_thread_of_rank() -> bool {
    thread_state::with(|thread| thread.tid()) == std::process::id() && is_rank()
}

/// Called before a call that returns when other ranks have arrived.
pub fn waiting(recorder: &'static Recorder, name: &'static str) -> Running {
    Running::new(recorder)
        .with(&named_host_call(recorder, name))
        .with_startup_grace(recorder, recorder.comms.used() == 0)
}
