//! A copy of the memory that the Python stack of one thread consists of, taken at one moment.

use std::collections::BTreeSet;

use crate::memory::snapshot::Snapshot;

use super::{
    code::{self, CodeCache},
    frames::{self, Chain, InterpreterFrame},
    reader::{PythonReader, PythonThread},
    stack::Stack,
};

/// Maximum number of frames of a chain to follow during a stop. A deeper chain is followed
/// afterwards in the copied memory.
const MAX_FRAMES_DURING_STOP: usize = 300;
/// Maximum number of pages to fetch one by one during a stop.
const MAX_FETCHES: usize = 48;
/// The memory of one thread's stack, copied during a stop.
pub(crate) struct StoppedCopy<'a> {
    python: &'a PythonReader,
    thread: &'a PythonThread,
    follow_during_stop: bool,
    memory: Snapshot,
    taken: bool,
    chains: Option<Vec<Chain>>,
}

impl<'a> StoppedCopy<'a> {
    /// Reads the current stack of a thread to learn which pages to copy during the stop. `missing`
    /// are pages that an earlier copy lacked.
    pub fn prepare(python: &'a PythonReader, thread: &'a PythonThread, missing: &[u64]) -> Self {
        let layout = &python.location.layout;
        // A running thread mostly keeps using the same memory.
        let mut memory = Snapshot::new(python.live_tid);
        frames::fetch(&mut memory, layout, thread.states());
        let chains = python.chains(&mut memory, thread);
        let all: Vec<InterpreterFrame> = chains.iter().flat_map(|chain| &chain.frames).copied().collect();
        code::fetch(&mut memory, layout, &all);
        python.build_stack(&mut memory, &mut CodeCache::default(), thread, &chains);
        let mut pages: BTreeSet<u64> = memory.pages().into_iter().collect();
        pages.extend(missing);
        let memory = Snapshot::with_buffer(python.live_tid, pages.into_iter().collect(), MAX_FETCHES);
        StoppedCopy {
            python,
            thread,
            follow_during_stop: all.len() <= MAX_FRAMES_DURING_STOP,
            memory,
            taken: false,
            chains: None,
        }
    }

    /// Copies the pages. Call this while the thread is stopped, and again whenever it is stopped
    /// again.
    pub fn take(&mut self) {
        self.memory.fill();
        self.taken = true;
        self.chains = None;
        if self.follow_during_stop {
            // Following the pointers fetches pages that the stack did not use before.
            let chains = self.python.chains(&mut self.memory, self.thread);
            for chain in &chains {
                code::fetch(&mut self.memory, &self.python.location.layout, &chain.frames);
            }
            self.chains = Some(chains);
        }
    }

    /// The stack, and the pages that the copy lacked. Call this when the thread runs again. `None`
    /// if it was never stopped.
    pub fn finish(mut self) -> Option<(Stack, Vec<u64>)> {
        if !self.taken {
            return None;
        }
        self.memory.freeze();
        let chains = match self.chains.take() {
            Some(chains) => chains,
            None => self.python.chains(&mut self.memory, self.thread),
        };
        let stack = self.python.build_stack(&mut self.memory, &mut CodeCache::default(), self.thread, &chains);
        Some((stack, self.memory.missing().to_vec()))
    }
}

/// Reads the stack of a thread that may run during the read, in as short a time as possible.
/// `missing` are pages that an earlier read lacked; it is set to those that this one lacks.
pub(crate) fn read_running(python: &PythonReader, thread: &PythonThread, missing: &mut Vec<u64>) -> Stack {
    let mut copy = StoppedCopy::prepare(python, thread, missing);
    copy.take();
    let Some((stack, missing_pages)) = copy.finish() else { return Stack::default() };
    *missing = missing_pages;
    stack
}
