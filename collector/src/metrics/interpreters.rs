//! Reads the counters of the ranks' Python interpreters on a thread of its own. The kernel may
//! block a reader of another process's memory, and the collector must not block.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::Duration,
};

use tracing::warn;
use xpu_timer_capture::{Counter, Counts};

use crate::job::key::RankId;

/// Time limit of one read.
const DEADLINE: Duration = Duration::from_secs(2);

/// A request to the thread.
struct Question {
    ranks: Vec<(RankId, i32)>,
    search: bool,
}

type Latest = Arc<Mutex<BTreeMap<RankId, Counts>>>;

/// The channel to the thread. The first request starts the thread; it ends when this is dropped.
#[derive(Default)]
pub struct Interpreters {
    questions: Option<mpsc::SyncSender<Question>>,
    latest: Latest,
    failed: bool,
}

impl Interpreters {
    /// The counts in the process of a rank; `None` if it does not run CPython or cannot be read.
    pub fn of(&self, rank: RankId) -> Option<Counts> {
        lock(&self.latest).get(&rank).copied()
    }

    /// Requests a read of these processes unless the thread is still busy, and forgets all others.
    pub fn look(&mut self, ranks: Vec<(RankId, i32)>, search: bool) {
        if self.failed || (ranks.is_empty() && self.questions.is_none()) {
            return;
        }
        let questions = self.questions.get_or_insert_with(|| {
            let (sender, questions) = mpsc::sync_channel(1);
            let latest = Arc::clone(&self.latest);
            let started = thread::Builder::new().name("counting".into()).spawn(move || run(&questions, &latest));
            if let Err(error) = started {
                warn!("collections of garbage and data loaders are not counted, there is no thread: {error}");
                self.failed = true;
            }
            sender
        });
        // A request that is not accepted is repeated at the next turn.
        let _ = questions.try_send(Question { ranks, search });
    }
}

fn run(questions: &mpsc::Receiver<Question>, latest: &Latest) {
    let mut counter = Counter::default();
    while let Ok(Question { ranks, search }) = questions.recv() {
        let pids: Vec<i32> = ranks.iter().map(|(_, pid)| *pid).collect();
        let counts = counter.read(&pids, search, DEADLINE);
        let known = ranks.iter().zip(counts).filter_map(|((rank, _), counts)| Some((*rank, counts?)));
        *lock(latest) = known.collect();
    }
}

fn lock(latest: &Latest) -> MutexGuard<'_, BTreeMap<RankId, Counts>> {
    latest.lock().unwrap_or_else(PoisonError::into_inner)
}
