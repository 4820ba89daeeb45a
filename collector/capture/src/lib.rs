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
#![warn(unreachable_pub)]

mod cpython;
pub mod dump;
mod error;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod kernel;
mod memory;
mod native;
mod objects;
mod pool;
mod process;
mod python;
pub mod sampling;
mod stacks;
mod symbols;

use std::{collections::HashSet, sync::Arc, time::Instant};

use xpu_timer_proto::procfs;

use kernel::Tables;
use objects::Images;
use process::{Job, worker};
use symbols::Symbolizer;

pub use error::Error;
pub use kernel::{sock_diag, tcp_sockets::connected_to_other_machines};
pub use process::Options;
pub use python::counting::{Counter, Counts, NamedStack};
pub use stacks::{CodeLocation, Frame, Function, Mismatch, ProcessCapture, Stacks, check_match, merge};
pub use symbols::demangle;

/// Captures the processes of one node. It keeps what is expensive to find (unwind rows, names,
/// source lines, the addresses of interpreters within their objects) from one capture to the next.
pub struct Capturer {
    images: Arc<Images>,
    symbolizer: Symbolizer,
}

impl Default for Capturer {
    fn default() -> Self {
        Self::new()
    }
}

impl Capturer {
    /// Creates a capturer with empty caches.
    #[must_use]
    pub fn new() -> Self {
        Capturer::with_images(Arc::default())
    }

    /// Creates a capturer that shares the known facts about objects.
    pub(crate) fn with_images(images: Arc<Images>) -> Self {
        Capturer { images, symbolizer: Symbolizer::default() }
    }

    /// Captures each pid and returns one entry for each, in the given order. For a process that
    /// cannot be captured, the `errors` of its sample hold the reason. The call returns by the
    /// deadline even when the kernel does not answer for a process. It waits longer, up to
    /// [`Options::longest`], for processes that are late because the machine is busy.
    pub fn capture(&mut self, pids: &[i32], options: &Options) -> Vec<ProcessCapture> {
        let mut captured = Vec::with_capacity(pids.len());
        self.capture_each(pids, options, |process| captured.push(process.into()));
        captured
    }

    /// Takes the native stack of a thread that waits in a signal handler, from its registers at the
    /// signal in the kernel's order for samples. `tid` is its id in the PID namespace of the
    /// process. `release` is called once the stack is unwound; the thread need not wait longer. Of
    /// a process that aborts, the second part is the reason: the text of a failed assertion or of
    /// a corrupted heap, or the C++ exception that nobody has caught.
    pub fn capture_fault(
        &mut self,
        pid: i32,
        tid: i32,
        signal: i32,
        registers: &[u64; 17],
        release: impl FnOnce(),
    ) -> (ProcessCapture, Option<String>) {
        let (raw_process, reason) = process::fault::capture(pid, tid, signal, registers, &self.images, release);
        let options = Options::default();
        let deadline = Instant::now() + options.deadline;
        self.symbolizer.prepare(std::slice::from_ref(&raw_process), options.lines_budget, deadline);
        (self.symbolizer.symbolize(raw_process).into(), reason)
    }

    /// Like [`Capturer::capture`], but passes one entry after the other to `each`, and keeps what
    /// many frames have in common only once.
    pub fn capture_each(&mut self, pids: &[i32], options: &Options, mut each: impl FnMut(Stacks)) {
        let deadline = Instant::now() + options.deadline;
        let requested: HashSet<i32> = pids.iter().copied().collect();
        let mut jobs: Vec<Job> = Vec::new();
        let tables: Arc<Tables> = Arc::default();
        let mut descendants = Vec::new();
        for pid in pids {
            let descendant_count = if options.children { procfs::descendants(*pid, &requested) } else { Vec::new() };
            descendants.push(descendant_count.len());
            for pid in std::iter::once(*pid).chain(descendant_count) {
                jobs.push(Job { pid, options: options.clone(), deadline, tables: Arc::clone(&tables) });
            }
        }
        // Otherwise the captures themselves keep all processors busy.
        if options.causes && jobs.len() < pool::cpus() {
            tables.read_ahead(deadline);
        }
        let raw_processes = worker::run(jobs, &self.images, deadline, options.deadline);
        // Stacks that arrived late are of no use without names.
        let deadline = deadline.max(Instant::now() + options.deadline / 4);
        self.symbolizer.prepare(&raw_processes, options.lines_budget, deadline);
        let mut raw_processes = raw_processes.into_iter();
        for descendant_count in descendants {
            let mut process = self.symbolizer.symbolize(raw_processes.next().expect("one answer for each job"));
            process.children =
                raw_processes.by_ref().take(descendant_count).map(|child| self.symbolizer.symbolize(child)).collect();
            each(process);
        }
        self.symbolizer.trim();
        self.images.trim();
    }
}

const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<Capturer>();
};
