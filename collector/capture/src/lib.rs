//! Native and Python stacks of other processes, without stopping them and without sending them anything: no system call of
//! theirs returns anything else for it.
//!
//! The ways to a thread's stack, in this order:
//! 1. A thread that sleeps is read as it sleeps: stack pointer and program counter from `/proc`, its stack with
//!    `process_vm_readv`, and unchanged scheduling counts as the proof that it did not run meanwhile.
//! 2. A thread that runs is sampled by the kernel's timer interrupt: `perf_event_open` on its task clock, with its registers and
//!    up to 65,528 bytes of its stack, inside system calls too where that is permitted. Meanwhile it is looked at as in 1
//!    again and again, should it fall asleep. Its Python stack is read before and after the sample, and what both looks
//!    have in common is shown.
//! 3. Where the kernel forbids samples, where a thread is busy inside a system call that may not be sampled, or where it gets no
//!    CPU, it is shown as running, with its Python stack as far as two looks agree, and with the reason.
//!
//! Only [`Options::force_ptrace`], which people have to ask for, stops threads, for as long as it takes to copy registers and
//! stack. That may end system calls of the target early, with EINTR or a short count. Unwinding and symbolizing happen on
//! the copies.
#![deny(unsafe_code)]

mod capturer;
mod counter;
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
mod options;
mod pool;
mod process;
mod python;
mod stacks;
mod symbols;

pub use capturer::Capturer;
pub use counter::{Counter, Counts};
pub use error::Error;
pub use kernel::{children::children, sock_diag};
pub use options::Options;
pub use stacks::{Function, Place, ProcessCapture, Stacks};

const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<Capturer>();
};
