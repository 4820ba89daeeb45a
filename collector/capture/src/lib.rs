//! Native and Python stacks of other processes. A capture does not stop a process and sends it
//! nothing, so none of its system calls returns a different result because of the capture.
//!
//! The stack of a thread is taken in one of these ways, in this order:
//! 1. A sleeping thread is read while it sleeps: the stack pointer and the program counter come
//!    from `/proc`, and the stack is copied with `process_vm_readv`. Unchanged scheduling counts
//!    prove that the thread did not run in the meantime.
//! 2. The kernel's timer interrupt samples a running thread: `perf_event_open` on its task clock
//!    copies its registers and up to 65,528 bytes of its stack, inside system calls too where that
//!    is permitted. Until the sample arrives, the thread is polled in case it falls asleep and can
//!    be read as in 1. Its Python stack is read before and after the sample, and the frames that
//!    both reads agree on are reported.
//! 3. If the kernel forbids sampling, if a thread is busy inside a system call that may not be
//!    sampled, or if it gets no CPU, the thread is reported as running. The report has the Python
//!    frames that two reads agree on, and the reason.
//!
//! Only [`Options::force_ptrace`], which the user must request, stops threads, for as long as it
//! takes to copy registers and stack. A stop may end a system call of the target early, with EINTR
//! or a short count. Unwinding and symbolizing work on the copies.
#![deny(unsafe_code)]

mod capturer;
mod cpython;
pub mod dump;
mod error;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod kernel;
mod memory;
pub mod merge;
mod native;
mod objects;
mod pool;
mod process;
mod python;
mod stacks;
mod symbols;

pub use capturer::Capturer;
pub use error::Error;
pub use kernel::sock_diag;
pub use process::Options;
pub use python::counting::{Counter, Counts};
pub use stacks::{CodeLocation, Function, ProcessCapture, Stacks};
pub use symbols::demangle;

const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<Capturer>();
};
