//! The two samples of a dump, and the stacks of the thread that represents a process.

use xpu_timer_proto::server::{ProcessSample, PstackStacktrace, PySpyStacktrace, Stacktrace};

use crate::main_thread::{self, Candidate};

/// The stacks of one moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample<'a> {
    /// Native threads.
    pub native: &'a [PstackStacktrace],
    /// Python threads.
    pub python: &'a [PySpyStacktrace],
    /// Process state, such as `S (sleeping)`.
    pub state: &'a str,
}

impl Sample<'_> {
    /// False if only the state of the process could be read.
    pub fn has_stacks(&self) -> bool {
        !(self.native.is_empty() && self.python.is_empty())
    }
}

/// Both samples of a dump: the first, if it was taken, and the last.
pub(crate) fn samples(dump: &Stacktrace) -> (Option<Sample<'_>>, Sample<'_>) {
    let last = Sample { native: &dump.stacktrace, python: &dump.py_stacktrace, state: &dump.process_state };
    (dump.first_sample.as_ref().map(of_process), last)
}

pub(crate) fn of_process(sample: &ProcessSample) -> Sample<'_> {
    Sample { native: &sample.stacktrace, python: &sample.py_stacktrace, state: &sample.process_state }
}

/// The native and the Python stack of one thread.
pub(super) type ThreadStacks<'a> = (Option<&'a PstackStacktrace>, Option<&'a PySpyStacktrace>);

/// The stacks of the thread that represents a process: the training thread, else the main thread.
pub(super) fn reporting_threads(sample: Sample<'_>, pid: i32, training: Option<u32>) -> ThreadStacks<'_> {
    if let Some(tid) = training {
        let native = sample.native.iter().find(|thread| thread.pid == tid);
        return (native, sample.python.iter().find(|thread| thread.os_thread_id == tid));
    }
    let native = main_thread::of(sample.native.iter().map(Candidate::from), pid);
    let python = main_thread::of(sample.python.iter().map(Candidate::from), pid);
    (native.map(|place| &sample.native[place]), python.map(|place| &sample.python[place]))
}
