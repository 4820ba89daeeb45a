//! Compares the ranks of each job on a thread of its own. A comparison of a large job takes a
//! second, and the hub never blocks.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use tracing::warn;
use xpu_timer_analysis::stragglers::{self, Comparison, Pace};
use xpu_timer_proto::v1::RankPace;

use crate::{job::JobKey, os::clock::nanoseconds};

/// Messages to the thread.
#[derive(Debug)]
pub enum ComparisonInput {
    /// New blocks of the ranks of a job.
    Paces(JobKey, Vec<RankPace>),
    /// The running jobs; all others are forgotten.
    Running(BTreeSet<JobKey>),
}

impl ComparisonInput {
    /// Number of ranks with new blocks.
    fn ranks(&self) -> usize {
        match self {
            ComparisonInput::Paces(_, ranks) => ranks.len(),
            ComparisonInput::Running(_) => 0,
        }
    }
}

/// The channel to the thread, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct ComparisonThread {
    inputs: Option<mpsc::Sender<ComparisonInput>>,
    // Number of ranks in the queued messages.
    queued: Arc<AtomicUsize>,
    // Whether the thread was too slow; logged once.
    fell_behind: bool,
}

/// Time between two comparisons.
const COMPARE_INTERVAL: Duration = Duration::from_secs(5);
/// Ranks whose new blocks may queue during a comparison. Later ones are dropped, and fewer blocks
/// are compared. A node sends any number of ranks in one message.
const MAX_QUEUED_RANKS: usize = 200_000;
/// Communicators kept per rank; if there are more, the most recently used ones.
const MAX_COMMUNICATORS: usize = 64;

/// The data of one job.
#[derive(Debug, Default)]
struct Job {
    attempt: u32,
    ranks: BTreeMap<u32, Pace>,
    // Whether data has arrived since the last comparison.
    is_changed: bool,
}

impl ComparisonThread {
    /// Starts the thread, which passes each comparison of a job in an attempt to `report`. If that
    /// fails, nothing is compared.
    #[must_use]
    pub(crate) fn start(report: impl Fn(JobKey, u32, Comparison) + Send + 'static) -> Self {
        let (sender, received) = mpsc::channel();
        let queued = Arc::new(AtomicUsize::new(0));
        let taken = Arc::clone(&queued);
        let work = move || run(&received, &taken, &report);
        let inputs = match thread::Builder::new().name("comparing".into()).spawn(work) {
            Ok(_) => Some(sender),
            Err(error) => {
                warn!("slow ranks will not be found, because no thread can be started: {error}");
                None
            }
        };
        ComparisonThread { inputs, queued, fell_behind: false }
    }

    /// Sends a message to the thread.
    pub(crate) fn send(&mut self, input: ComparisonInput) {
        let Some(inputs) = &self.inputs else { return };
        let ranks = input.ranks();
        if ranks > 0 && self.queued.load(Ordering::Relaxed) + ranks > MAX_QUEUED_RANKS {
            if !std::mem::replace(&mut self.fell_behind, true) {
                warn!("the comparison of ranks falls behind; slow ranks may be found late");
            }
            return;
        }
        self.queued.fetch_add(ranks, Ordering::Relaxed);
        // The thread ends only after this.
        let _ = inputs.send(input);
    }
}

fn run(received: &mpsc::Receiver<ComparisonInput>, queued: &AtomicUsize, report: &impl Fn(JobKey, u32, Comparison)) {
    let begun = Instant::now();
    let mut jobs: BTreeMap<JobKey, Job> = BTreeMap::new();
    let mut next = begun + COMPARE_INTERVAL;
    loop {
        let now_ns = nanoseconds(begun.elapsed());
        let input = received.recv_timeout(next.saturating_duration_since(Instant::now()));
        queued.fetch_sub(input.as_ref().map_or(0, ComparisonInput::ranks), Ordering::Relaxed);
        match input {
            Ok(ComparisonInput::Paces(key, ranks)) => {
                let job = jobs.entry(key).or_default();
                ranks.into_iter().for_each(|rank| job.add(rank, now_ns));
            }
            Ok(ComparisonInput::Running(running)) => jobs.retain(|job, _| running.contains(job)),
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                for (key, job) in jobs.iter_mut().filter(|(_, job)| job.is_changed) {
                    job.is_changed = false;
                    job.ranks.values_mut().for_each(|pace| pace.forget(now_ns));
                    let comparison = stragglers::compare(job.ranks.iter().map(|(rank, pace)| (*rank, pace)));
                    report(key.clone(), job.attempt, comparison);
                }
                next = Instant::now() + COMPARE_INTERVAL;
            }
        }
    }
}

impl Job {
    fn add(&mut self, rank: RankPace, now_ns: u64) {
        if rank.attempt < self.attempt {
            return;
        }
        if rank.attempt > self.attempt {
            *self = Job { attempt: rank.attempt, ..Job::default() };
        }
        self.is_changed = true;
        let pace = self.ranks.entry(rank.rank).or_default();
        for communicator in rank.communicators {
            let series = pace.series(communicator.id, communicator.point_to_point);
            series.size = communicator.size;
            for block in communicator.blocks {
                series.push(block, now_ns);
            }
            pace.keep(MAX_COMMUNICATORS);
        }
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::v1::{CommunicatorPace, PaceBlock};

    use super::*;

    fn pace(attempt: u32, rank: u32, id: u64) -> RankPace {
        let blocks = vec![PaceBlock { index: 1, ..Default::default() }];
        let communicators = vec![CommunicatorPace { id, size: 8, blocks, ..Default::default() }];
        RankPace { attempt, rank, communicators, ..Default::default() }
    }

    #[test]
    fn a_new_attempt_replaces_the_previous_one_and_memory_is_bounded() {
        let mut job = Job::default();
        job.add(pace(0, 1, 7), 1);
        job.add(pace(1, 2, 7), 2);
        job.add(pace(0, 1, 7), 3);
        assert_eq!((job.attempt, job.ranks.keys().copied().collect::<Vec<_>>()), (1, vec![2]));
        for id in 0..2 * MAX_COMMUNICATORS as u64 {
            job.add(pace(1, 2, id), 10 + id);
        }
        let known: Vec<u64> = job.ranks[&2].iter().map(|(id, _, _)| id).collect();
        let newest = MAX_COMMUNICATORS as u64..2 * MAX_COMMUNICATORS as u64;
        assert_eq!(known, newest.collect::<Vec<_>>());
    }

    #[test]
    fn the_ranks_of_a_large_job_are_kept_during_a_comparison_whatever_the_size_of_messages() {
        for ranks in [1, 8, MAX_QUEUED_RANKS] {
            let (sender, received) = mpsc::channel();
            let mut thread = ComparisonThread { inputs: Some(sender), queued: Arc::default(), fell_behind: false };
            let message = || ComparisonInput::Paces(JobKey::of_process("job", "", 1), vec![RankPace::default(); ranks]);
            (0..MAX_QUEUED_RANKS / ranks).for_each(|_| thread.send(message()));
            assert!(!thread.fell_behind);
            thread.send(message());
            thread.send(ComparisonInput::Running(BTreeSet::new()));
            let kept = received.try_iter().count();
            assert_eq!((kept, thread.fell_behind), (MAX_QUEUED_RANKS / ranks + 1, true));
        }
    }
}
