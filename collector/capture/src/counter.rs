//! What the interpreters of living processes count, read again and again for metrics: collections of garbage and batches of data
//! loaders. It costs the processes nothing; a process whose memory the kernel locks is left out until it answers.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use crate::{
    kernel::procfs,
    native::address_space::AddressSpace,
    objects::image_cache::Images,
    pool::{self, Crew},
    python::{counting::Counting, reader::Python},
};

const CREW: Crew = Crew { name: "xpu_count", parallel: 1, jobs_per_thread: usize::MAX };
/// After a look that found no interpreter, the next one comes so much later: most such processes never start one.
const PATIENCE: Duration = Duration::from_secs(5);
const MOST_PATIENCE: Duration = Duration::from_secs(60);

/// What the interpreters of one process have counted since they began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Collections of garbage, of all generations.
    pub collections: u64,
    /// Batches that PyTorch's data loaders have yielded; `None` until one is found. An iterator is seen when it lives during a
    /// search, and what it yields between the last look and its end is not.
    pub batches: Option<u64>,
}

/// Follows processes.
#[derive(Default)]
pub struct Counter {
    images: Arc<Images>,
    processes: HashMap<i32, Arc<Mutex<Process>>>,
}

/// What is known of a process.
#[derive(Default)]
struct Process {
    /// By its start a process is told from another one with its number.
    started: u64,
    python: Option<Counting>,
    /// When to look for an interpreter again, and how much later than the last time that is.
    again: Option<(Instant, Duration)>,
}

impl Counter {
    /// What each of these processes has counted; `None` for those that run no CPython that can be read, or do not answer by the
    /// deadline. Iterators of data loaders are found by a `search`, which takes some milliseconds. Other processes are forgotten.
    pub fn look(&mut self, pids: &[i32], search: bool, deadline: Duration) -> Vec<Option<Counts>> {
        self.processes.retain(|pid, _| pids.contains(pid));
        let jobs: Vec<(i32, Arc<Mutex<Process>>)> =
            pids.iter().map(|pid| (*pid, Arc::clone(self.processes.entry(*pid).or_default()))).collect();
        let mut found = vec![None; pids.len()];
        let images = Arc::clone(&self.images);
        // A process that is locked is one where an earlier look still waits for the kernel.
        let work =
            move |(pid, process): (i32, Arc<Mutex<Process>>)| process.try_lock().ok()?.look(pid, &images, search);
        let told = pool::run(jobs, &CREW, Instant::now() + deadline, work, |index, counts| found[index] = counts);
        if let Err(error) = told {
            tracing::debug!("no thread to count with: {error}");
        }
        found
    }
}

impl Process {
    fn look(&mut self, pid: i32, images: &Images, search: bool) -> Option<Counts> {
        let started = procfs::stat(pid).ok()?.start_time;
        if self.started != started {
            *self = Process { started, ..Process::default() };
        }
        if self.python.is_none() {
            let now = Instant::now();
            if self.again.is_some_and(|(again, _)| now < again) {
                return None;
            }
            let patience = self.again.map_or(PATIENCE, |(_, before)| (before * 2).min(MOST_PATIENCE));
            self.again = Some((now + patience, patience));
            let space = AddressSpace::open(images, pid, pid).ok()?;
            self.python = Python::find(pid, &space, std::iter::empty()).ok()?.map(Counting::new);
        }
        let counted = self.python.as_mut()?.look(search);
        if counted.is_none() {
            // It is starting or ending, or another program has taken its place.
            self.python = None;
        }
        counted.map(|(collections, batches)| Counts { collections, batches })
    }
}
