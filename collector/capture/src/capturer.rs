//! The captures of one node, with the caches that they share.

use std::{collections::HashSet, sync::Arc, time::Instant};

use crate::{
    kernel::children,
    objects::image_cache::Images,
    options::Options,
    process::{job::Job, worker},
    stacks::{ProcessCapture, Stacks},
    symbols::symbolizer::Symbolizer,
};

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
