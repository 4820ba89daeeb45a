//! Compares the ranks of each job on a thread of its own. A comparison of a large job takes a
//! second, and the hub never blocks.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use tracing::warn;
use xpu_timer_analysis::stragglers::{self, Pace};
use xpu_timer_proto::v1::RankPace;

use crate::{cluster::command::Command, job::key::JobKey};

/// Messages to the thread.
#[derive(Debug)]
pub enum News {
    /// New blocks of the ranks of a job.
    Paces(JobKey, Vec<RankPace>),
    /// The running jobs; all others are forgotten.
    Running(BTreeSet<JobKey>),
}

/// The channel to the thread, which ends when this is dropped.
#[derive(Debug)]
pub struct Comparing {
    thread: Option<mpsc::SyncSender<News>>,
    // Whether the thread was too slow; logged once.
    fell_behind: bool,
}

/// Time between two comparisons.
const EVERY: Duration = Duration::from_secs(5);
/// Messages that may queue during a comparison. Later ones are dropped, and fewer blocks are
/// compared.
const NEWS: usize = 20_000;
/// Communicators kept per rank; if there are more, the most recently used ones.
const MAX_COMMUNICATORS: usize = 64;

/// The data of one job.
#[derive(Debug, Default)]
struct Job {
    attempt: u32,
    ranks: BTreeMap<u32, Pace>,
    // Whether data has arrived since the last comparison.
    news: bool,
}

impl Comparing {
    /// Starts the thread. If that fails, nothing is compared.
    #[must_use]
    pub fn start(commands: tokio::sync::mpsc::UnboundedSender<Command>) -> Self {
        let (sender, told) = mpsc::sync_channel(NEWS);
        let work = move || run(&told, &commands);
        let thread = match thread::Builder::new().name("comparing".into()).spawn(work) {
            Ok(_) => Some(sender),
            Err(error) => {
                warn!("slow ranks will not be found, there is no thread: {error}");
                None
            }
        };
        Comparing { thread, fell_behind: false }
    }

    /// Sends a message to the thread.
    pub fn tell(&mut self, told: News) {
        // The thread lives as long as this, so sending fails only if it is too slow.
        let lost = self.thread.as_ref().is_some_and(|thread| thread.try_send(told).is_err());
        if lost && !std::mem::replace(&mut self.fell_behind, true) {
            warn!("the comparison of ranks falls behind; slow ranks may be found late");
        }
    }
}

fn run(told: &mpsc::Receiver<News>, commands: &tokio::sync::mpsc::UnboundedSender<Command>) {
    let begun = Instant::now();
    let mut jobs: BTreeMap<JobKey, Job> = BTreeMap::new();
    let mut next = begun + EVERY;
    loop {
        let now_ns = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        match told.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(News::Paces(key, ranks)) => {
                let job = jobs.entry(key).or_default();
                ranks.into_iter().for_each(|rank| job.add(rank, now_ns));
            }
            Ok(News::Running(running)) => jobs.retain(|job, _| running.contains(job)),
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                for (key, job) in jobs.iter_mut().filter(|(_, job)| job.news) {
                    job.news = false;
                    job.ranks.values_mut().for_each(|pace| pace.forget(now_ns));
                    let comparison = stragglers::compare(job.ranks.iter().map(|(rank, pace)| (*rank, pace)));
                    // Fails only if the hub has ended before this thread.
                    let _ = commands.send(Command::Compared(key.clone(), job.attempt, comparison));
                }
                next = Instant::now() + EVERY;
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
        self.news = true;
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
}
