//! What the ranks' interpreters count, read by a thread of its own: the kernel may make a reader of another process's memory wait,
//! and the collector waits for nothing.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::Duration,
};

use tracing::warn;
use xpu_timer_capture::{Counter, Counts};

use crate::job::key::RankId;

/// How long one look may take.
const DEADLINE: Duration = Duration::from_secs(2);

/// What is asked of the thread.
struct Question {
    ranks: Vec<(RankId, i32)>,
    search: bool,
}

type Latest = Arc<Mutex<BTreeMap<RankId, Counts>>>;

/// The way to the thread, which is started by the first question and ends when this is dropped.
#[derive(Default)]
pub struct Interpreters {
    questions: Option<mpsc::SyncSender<Question>>,
    latest: Latest,
    failed: bool,
}

impl Interpreters {
    /// What has been counted in the process of a rank; `None` where no CPython runs, or it cannot be read.
    pub fn of(&self, rank: RankId) -> Option<Counts> {
        lock(&self.latest).get(&rank).copied()
    }

    /// Has these processes looked at, unless the thread is still busy; what is known of others is forgotten.
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
        // A question that is not taken is asked again at the next turn.
        let _ = questions.try_send(Question { ranks, search });
    }
}

fn run(questions: &mpsc::Receiver<Question>, latest: &Latest) {
    let mut counter = Counter::default();
    while let Ok(Question { ranks, search }) = questions.recv() {
        let pids: Vec<i32> = ranks.iter().map(|(_, pid)| *pid).collect();
        let counts = counter.look(&pids, search, DEADLINE);
        let known = ranks.iter().zip(counts).filter_map(|((rank, _), counts)| Some((*rank, counts?)));
        *lock(latest) = known.collect();
    }
}

fn lock(latest: &Latest) -> MutexGuard<'_, BTreeMap<RankId, Counts>> {
    latest.lock().unwrap_or_else(PoisonError::into_inner)
}
