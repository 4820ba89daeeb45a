//! Native stacks: sleeping threads are read, running threads are sampled, and only `--force-ptrace`
//! stops threads.

pub(crate) mod address_space;
mod epilogue;
pub(crate) mod frame;
pub(crate) mod hold_watchdog;
pub(crate) mod perf;
pub(crate) mod priority;
mod prologue;
mod ptrace;
mod registers;
mod stack_copy;
mod stack_memory;
pub(crate) mod stop;
pub(crate) mod thread;
mod unwind;
