//! What a rank does and where, by the names on its stacks, its process state, and what moved
//! between its two samples. `proto/server.proto` defines the names of frames. This module never
//! compares one rank with another.

mod classify;
mod helpers;
mod host;
mod location;
mod names;
mod patterns;
mod read;
mod sample;
mod training;

pub(crate) use classify::{
    is_file_lock, is_message_wait, is_mutex, is_network, is_shared_lock, is_signal_wait, is_sleep, is_store_connect,
};
pub(crate) use helpers::{GilHolder, StuckHelper, compiler_child, gil_holder, stuck_helper};
pub(crate) use host::{DSleep, Host, Movement, ObservedActivity};
pub(crate) use names::{base_name, shortened};
pub use patterns::FREEZER_WCHAN;
pub(crate) use read::read;
pub(crate) use training::training_thread;
