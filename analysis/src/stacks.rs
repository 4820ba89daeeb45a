//! What a rank does and where, by the names on its stacks, its process state, and what moved
//! between its two samples. `proto/server.proto` defines the names of frames. This module never
//! compares one rank with another.

mod classify;
mod compiler;
mod gil;
mod helpers;
mod host;
mod location;
mod movement;
mod names;
mod patterns;
mod read;
mod sample;
mod training;
mod witness;

pub(crate) use compiler::compiler_child;
pub(crate) use gil::{GilHolder, gil_holder};
pub(crate) use helpers::{StuckHelper, stuck_helper};
pub(crate) use host::{DSleep, Host, Movement, ObservedActivity};
pub(crate) use names::base_name;
pub use patterns::FREEZER_WCHAN;
pub(crate) use read::read;
pub(crate) use training::training_thread;
pub(crate) use witness::{is_file_lock, is_network, is_shared_lock, is_signal_wait, is_sleep, is_store_connect};
