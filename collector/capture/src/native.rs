//! Native stacks: sleeping threads are read, running threads are sampled, and only `--force-ptrace`
//! stops threads.

pub(crate) mod address_space;
mod epilogue;
pub(crate) mod frame;
pub(crate) mod perf;
mod prologue;
pub(crate) mod ptrace;
pub(crate) mod stop;
pub(crate) mod thread;
mod unwind;
