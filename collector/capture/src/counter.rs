//! Counts of the interpreters of living processes, read repeatedly for metrics: garbage collections
//! and batches of data loaders. Reading costs the processes nothing. A process whose memory the
//! kernel locks is skipped until it answers.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use crate::{
    kernel::procfs,
    native::address_space::AddressSpace,
    objects::image_cache::Images,
    pool::{self, PoolConfig},
    python::{counting::CountReader, reader::PythonReader},
};

const POOL: PoolConfig = PoolConfig { name: "xpu_count", parallel: 1, jobs_per_thread: usize::MAX };
/// Delay before the next search after a search found no interpreter. Most such processes never
/// start one.
const SEARCH_DELAY: Duration = Duration::from_secs(5);
const MAX_SEARCH_DELAY: Duration = Duration::from_secs(60);

/// What the interpreters of one process have counted since they started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Garbage collections of all generations.
    pub collections: u64,
    /// Batches that PyTorch's data loaders have yielded; `None` until a data loader is found. An
    /// iterator is found only if it lives during a search. Batches that it yields between the last
    /// read and its end are not counted.
    pub batches: Option<u64>,
}

/// Reads the counts of processes again and again.
#[derive(Default)]
pub struct Counter {
    images: Arc<Images>,
    processes: HashMap<i32, Arc<Mutex<Process>>>,
}

/// State of one process.
#[derive(Default)]
struct Process {
    /// Start time of the process. It distinguishes the process from a later one with the same pid.
    started: u64,
    python: Option<CountReader>,
    /// When to search for an interpreter again, and the delay that led to this time.
    next_search: Option<(Instant, Duration)>,
}

impl Counter {
    /// Reads the counts of each of these processes. The result is `None` for a process that runs no
    /// readable CPython or does not answer by the deadline. `search` also looks for new iterators
    /// of data loaders, which takes some milliseconds. Processes that are not in the list are
    /// forgotten.
    pub fn read(&mut self, pids: &[i32], search: bool, deadline: Duration) -> Vec<Option<Counts>> {
        self.processes.retain(|pid, _| pids.contains(pid));
        let jobs: Vec<(i32, Arc<Mutex<Process>>)> =
            pids.iter().map(|pid| (*pid, Arc::clone(self.processes.entry(*pid).or_default()))).collect();
        let mut counts_of = vec![None; pids.len()];
        let images = Arc::clone(&self.images);
        // A locked process is one for which an earlier read still waits for the kernel.
        let work =
            move |(pid, process): (i32, Arc<Mutex<Process>>)| process.try_lock().ok()?.read(pid, &images, search);
        let started_workers =
            pool::run(jobs, &POOL, Instant::now() + deadline, work, |index, counts| counts_of[index] = counts);
        if let Err(error) = started_workers {
            tracing::debug!("no thread to count with: {error}");
        }
        counts_of
    }
}

impl Process {
    fn read(&mut self, pid: i32, images: &Images, search: bool) -> Option<Counts> {
        let started = procfs::stat(pid).ok()?.start_time;
        if self.started != started {
            *self = Process { started, ..Process::default() };
        }
        if self.python.is_none() {
            let now = Instant::now();
            if self.next_search.is_some_and(|(next_search, _)| now < next_search) {
                return None;
            }
            let delay = self.next_search.map_or(SEARCH_DELAY, |(_, before)| (before * 2).min(MAX_SEARCH_DELAY));
            self.next_search = Some((now + delay, delay));
            let space = AddressSpace::open(images, pid, pid).ok()?;
            self.python = PythonReader::find(pid, &space, std::iter::empty()).ok()?.map(CountReader::new);
        }
        let counts = self.python.as_mut()?.read(search);
        if counts.is_none() {
            // The interpreter is starting or ending, or the process has executed another program.
            self.python = None;
        }
        counts.map(|(collections, batches)| Counts { collections, batches })
    }
}
