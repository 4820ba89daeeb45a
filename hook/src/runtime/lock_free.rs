//! Lock-free data structures. `tests/models` compiles these files with the atomics of loom.

#[allow(unsafe_code)]
pub(crate) mod atomic;
pub(crate) mod counter;
#[allow(unsafe_code)]
pub(crate) mod cpu;
pub(crate) mod event_pools;
pub(crate) mod handoff;
pub(crate) mod hash_slot;
#[allow(unsafe_code)]
pub(crate) mod queue;
pub(crate) mod slot;
