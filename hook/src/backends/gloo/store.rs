//! The store in which the ranks of PyTorch find each other: a rank that never comes leaves the others in it, before there is any group.
//!
//! A store is used by many processes that are no rank of anything, such as the agent of torchrun, so only a rank's waiting counts; and
//! other threads may rightly wait in one for as long as the job runs, so only the main thread's `wait` does.

use crate::{
    backends::host_call::Running,
    runtime::{
        os::{leaked_once::LeakedOnce, sys, thread_state},
        recorder::{Recorder, host_operations::named_host_call},
    },
};

/// Whether this process is one of several ranks, by the variables of torchrun, as of the first time that it is asked.
pub fn of_a_rank() -> bool {
    static IS_RANK: LeakedOnce<bool> = LeakedOnce::new();
    *IS_RANK.get_or_init(|| {
        let number = |name| String::from_utf8(sys::variable(name)?).ok()?.trim().parse::<u32>().ok();
        number(c"RANK").is_some() && number(c"WORLD_SIZE").is_some_and(|size| size > 1)
    })
}

/// The same for its main thread.
pub fn of_main_thread() -> bool {
    thread_state::with(|thread| thread.tid()) == std::process::id() && of_a_rank()
}

/// Before a call that returns when others have come.
pub fn waiting(recorder: &'static Recorder, name: &'static str) -> Running {
    Running::new(recorder)
        .with(&named_host_call(recorder, name))
        .with_startup_grace(recorder, recorder.comms.used() == 0)
}
