//! The activity and the place of a rank, by the names on its stacks, its process state, and the
//! changes between its two samples. `proto/server.proto` defines the names of frames. This module
//! never compares one rank with another.

mod classify;
mod helpers;
mod host;
mod location;
mod names;
mod patterns;
mod process_state;
mod read;
mod services;

pub(crate) use classify::{
    is_busy_in_nccl, is_file_lock, is_in_gil_wait, is_message_wait, is_mutex, is_network, is_send, is_shared_lock,
    is_signal_wait, is_sleep, is_store_connect,
};
pub(crate) use helpers::{
    GilHolder, NO_OTHER_THREAD, StuckHelper, compiler_child, gil_holder, other_thread, stuck_helper,
};
pub(crate) use host::{
    DSleep, Host, Movement, ObservedActivity, Polling, STANDARD_INPUT, Sample, ThreadWait, is_terminal,
    of_process as sample_of, samples,
};
pub(crate) use names::{base_name, plain, shortened};
pub use names::{native_place, own_frame, own_place};
pub use patterns::FREEZER_WCHAN;
pub(crate) use process_state::ProcessState;
pub(crate) use read::{read, training_thread};
