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

mod address_space;
mod awaited;
mod children;
mod counting;
mod debug_file;
pub mod dump;
mod epilogue;
mod error;
mod from_memory;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod image;
mod images;
mod mapped_file;
mod mappings;
mod memory;
pub mod merge;
mod native;
mod perf;
mod perf_map;
mod permission;
mod places;
mod pool;
mod process;
mod procfs;
mod prologue;
mod ptrace;
mod python;
mod registers;
mod running;
pub mod sock_diag;
mod sockets;
mod stacks;
mod symbolize;
mod target_files;
mod unwind;
mod worker;

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use xpu_timer_proto::server::ProcessSample;

pub use children::children;
pub use counting::{Counter, Counts};
pub use error::Error;
pub use stacks::{Function, Place, Stacks};

use crate::{images::Images, symbolize::Symbolizer, worker::Job};

/// What to capture, and how long it may take.
#[derive(Debug, Clone)]
pub struct Options {
    /// For the whole capture, all processes together. On a busy machine it may take longer, up to [`Options::longest`].
    pub deadline: Duration,
    /// Also capture all descendants of the given processes.
    pub children: bool,
    /// Take native stacks.
    pub native: bool,
    /// Take Python stacks.
    pub python: bool,
    /// How long the search for source lines may take in all. Names are always looked up.
    pub lines_budget: Duration,
    /// Stop every thread while its stack is copied. This may cut short system calls of the target.
    pub force_ptrace: bool,
}

impl Options {
    /// The time after which there is an answer, however busy the machine is, as long as it answers at all.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.deadline + worker::extension(self.deadline) + self.deadline / 4
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            deadline: Duration::from_secs(5),
            children: false,
            native: true,
            python: true,
            lines_budget: Duration::from_secs(1),
            force_ptrace: false,
        }
    }
}

/// The stacks of one process, or the reason why there are none.
#[derive(Debug, Clone, Default)]
pub struct ProcessCapture {
    /// Process id.
    pub pid: i32,
    /// Process id of its parent; 0 when unknown.
    pub parent_pid: i32,
    /// argv joined by spaces, else the name that the kernel knows, in brackets.
    pub command: String,
    /// The stacks, the state, and what could not be had.
    pub sample: ProcessSample,
    /// For each thread in `sample.py_stacktrace` and each of its frames: whether C code entered the interpreter with it. It
    /// is what [`merge`] needs to put Python frames in their places in the native stack.
    pub python_entries: Vec<Vec<bool>>,
    /// All descendants, flattened, parents before their children. Empty unless asked for.
    pub children: Vec<ProcessCapture>,
}

/// Captures the processes of one node. It keeps what is expensive to find out - unwind tables, names, source lines,
/// where interpreters lie within their objects - from one capture to the next.
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
    /// A capturer with empty caches.
    #[must_use]
    pub fn new() -> Self {
        Capturer { images: Arc::default(), symbolizer: Symbolizer::default() }
    }

    /// One entry for each pid, in the order given. A process that cannot be captured is an entry whose sample says why in
    /// `errors`. It returns by the deadline even when the kernel does not answer for one of them. Processes that are late because the
    /// machine is busy are waited for a while longer.
    pub fn capture(&mut self, pids: &[i32], options: &Options) -> Vec<ProcessCapture> {
        let mut captured = Vec::with_capacity(pids.len());
        self.capture_each(pids, options, |process| captured.push(process.into()));
        captured
    }

    /// Like [`Capturer::capture`], with one entry after the other handed to `each`, and with what many frames have in common
    /// told once.
    pub fn capture_each(&mut self, pids: &[i32], options: &Options, mut each: impl FnMut(Stacks)) {
        let deadline = Instant::now() + options.deadline;
        let asked: HashSet<i32> = pids.iter().copied().collect();
        let mut jobs: Vec<Job> = Vec::new();
        let connections = Arc::default();
        let mut descendants = Vec::new();
        for pid in pids {
            let below = if options.children { children::descendants(*pid, &asked) } else { Vec::new() };
            descendants.push(below.len());
            for pid in std::iter::once(*pid).chain(below) {
                jobs.push(Job { pid, options: options.clone(), deadline, connections: Arc::clone(&connections) });
            }
        }
        let raw = worker::run(jobs, &self.images, deadline, options.deadline);
        // Stacks that came late are nothing without names.
        let deadline = deadline.max(Instant::now() + options.deadline / 4);
        self.symbolizer.prepare(&raw, options.lines_budget, deadline);
        let mut raw = raw.into_iter();
        for below in descendants {
            let mut process = self.symbolizer.finish(raw.next().expect("one answer for each job"));
            process.children = raw.by_ref().take(below).map(|child| self.symbolizer.finish(child)).collect();
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
