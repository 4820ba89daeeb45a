//! The memory that the Python stack of one thread consists of, copied at one moment.

use std::collections::BTreeSet;

use crate::memory::snapshot::Snapshot;

use super::{
    code::{self, Codes},
    frames::{self, Chain, RawFrame},
    reader::{Python, PythonThread},
    stack::Stack,
};

/// Frames that are followed during a stop; deeper chains are followed afterwards, when everything they need was copied.
const SHALLOW: usize = 300;
/// Pages that are fetched one by one during a stop, at most.
const FETCHES: usize = 48;
/// Memory of one thread, copied during a stop.
pub(crate) struct StoppedCopy<'a> {
    python: &'a Python,
    thread: &'a PythonThread,
    shallow: bool,
    memory: Snapshot,
    taken: bool,
    chains: Option<Vec<Chain>>,
}

impl<'a> StoppedCopy<'a> {
    /// Makes ready for copying, during a stop, what the stack of a thread consists of.
    pub fn prepare(python: &'a Python, thread: &'a PythonThread, missing: &[u64]) -> Self {
        let layout = &python.place.layout;
        // As long as it runs, it mostly goes through the same memory.
        let mut memory = Snapshot::new(python.live);
        frames::fetch(&mut memory, layout, thread.states());
        let chains = python.chains(&mut memory, thread);
        let all: Vec<RawFrame> = chains.iter().flat_map(|chain| &chain.frames).copied().collect();
        code::fetch(&mut memory, layout, &all);
        python.spell(&mut memory, &mut Codes::default(), thread, &chains);
        let mut pages: BTreeSet<u64> = memory.pages().into_iter().collect();
        pages.extend(missing);
        let memory = Snapshot::with_buffer(python.live, pages.into_iter().collect(), FETCHES);
        StoppedCopy { python, thread, shallow: all.len() <= SHALLOW, memory, taken: false, chains: None }
    }

    /// To be called while the thread is stopped, again when it is stopped again.
    pub fn take(&mut self) {
        self.memory.fill();
        self.taken = true;
        self.chains = None;
        if self.shallow {
            // Pages that it had not touched before are found out by following the pointers.
            let chains = self.python.chains(&mut self.memory, self.thread);
            for chain in &chains {
                code::fetch(&mut self.memory, &self.python.place.layout, &chain.frames);
            }
            self.chains = Some(chains);
        }
    }

    /// The stack, once the thread runs again, and the pages that were lacking; `None` when it was not stopped.
    pub fn finish(mut self) -> Option<(Stack, Vec<u64>)> {
        if !self.taken {
            return None;
        }
        self.memory.freeze();
        let chains = match self.chains.take() {
            Some(chains) => chains,
            None => self.python.chains(&mut self.memory, self.thread),
        };
        let stack = self.python.spell(&mut self.memory, &mut Codes::default(), self.thread, &chains);
        Some((stack, self.memory.missing().to_vec()))
    }
}

/// Reads the stack of a thread that may run meanwhile, as nearly at one moment as that can be. `missing` are pages that an
/// earlier look lacked; it is set to what this one lacked.
pub(crate) fn glance(python: &Python, thread: &PythonThread, missing: &mut Vec<u64>) -> Stack {
    let mut copy = StoppedCopy::prepare(python, thread, missing);
    copy.take();
    let Some((stack, lacking)) = copy.finish() else { return Stack::default() };
    *missing = lacking;
    stack
}
