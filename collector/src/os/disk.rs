//! What the loop of a collector has to read and write, of either role. A file system that does not answer (NFS, FUSE) holds up a thread here and not the loop,
//! which still sees every rank.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use tracing::warn;

type Work = Box<dyn FnOnce() + Send>;

/// One thread for each folder of incident folders, up to [`MAX_THREADS`].
pub struct Disk {
    roots: BTreeMap<PathBuf, Thread>,
    // For the folders that have none, of which there may be as many as there are processes.
    others: Option<Thread>,
    done: Arc<dyn Fn() + Send + Sync>,
}

#[derive(Debug)]
struct Thread {
    give: mpsc::Sender<Work>,
    under_way: Arc<AtomicUsize>,
}

impl Thread {
    fn is_busy(&self) -> bool {
        self.under_way.load(Ordering::Acquire) > 0
    }
}

/// Beyond this, folders whose thread is idle lose it, and what has none when all are busy shares one.
const MAX_THREADS: usize = 16;
/// The loop waits for so long for what a healthy disk does in a moment.
const SOON: Duration = Duration::from_secs(1);

impl Disk {
    /// Without a thread yet. `done` is called whenever something is done.
    #[must_use]
    pub fn new(done: impl Fn() + Send + Sync + 'static) -> Self {
        Disk { roots: BTreeMap::new(), others: None, done: Arc::new(done) }
    }

    /// Whether something is not done yet.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.roots.values().chain(&self.others).any(Thread::is_busy)
    }

    /// Does something in or below a folder, after what was given for that before; when that takes long, later.
    pub fn give(&mut self, root: &Path, work: impl FnOnce() + Send + 'static) {
        let _ = self.ask(root, work, drop);
    }

    /// What some work in or below a folder finds; `None` when that takes long. It is given to `late` then. A folder that is still busy
    /// with what was given before is not waited for.
    pub fn ask<T: Send + 'static>(
        &mut self,
        root: &Path,
        work: impl FnOnce() -> T + Send + 'static,
        late: impl FnOnce(T) + Send + 'static,
    ) -> Option<T> {
        let done = Arc::clone(&self.done);
        let Some(thread) = self.thread(root) else { return Some(work()) };
        let wait = if thread.is_busy() { Duration::ZERO } else { SOON };
        let (found, take) = mpsc::sync_channel(0);
        let under_way = Arc::clone(&thread.under_way);
        under_way.fetch_add(1, Ordering::AcqRel);
        let work = move || {
            let result = work();
            // Before it is told: whoever asks next finds the thread free.
            under_way.fetch_sub(1, Ordering::AcqRel);
            if let Err(mpsc::SendError(result)) = found.send(result) {
                late(result);
            }
            done();
        };
        // It does not end while there is a sender.
        let _ = thread.give.send(Box::new(work));
        let found = take.recv_timeout(wait).ok();
        if found.is_none() {
            warn!("{} does not answer", root.display());
        }
        found
    }

    fn thread(&mut self, root: &Path) -> Option<&Thread> {
        if !self.roots.contains_key(root) {
            if self.roots.len() >= MAX_THREADS {
                // A thread ends with its sender.
                self.roots.retain(|_, thread| thread.is_busy());
            }
            let is_full = self.roots.len() >= MAX_THREADS;
            if !(is_full && self.others.is_some()) {
                let (give, take) = mpsc::channel::<Work>();
                let turn = move || take.into_iter().for_each(|work| work());
                let thread = Thread { give, under_way: Arc::default() };
                match thread::Builder::new().name("disk".into()).spawn(turn) {
                    Ok(_) if is_full => self.others = Some(thread),
                    Ok(_) => _ = self.roots.insert(root.into(), thread),
                    Err(error) => warn!("no thread for {}: {error}", root.display()),
                }
            }
        }
        self.roots.get(root).or(self.others.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_does_not_answer_holds_up_no_other_and_what_it_says_late_is_heard() {
        let mut disk = Disk::new(|| {});
        let (answer, stuck) = mpsc::channel();
        let (late, heard) = mpsc::channel();
        let slow = Path::new("/slow");
        let found = disk.ask(slow, move || stuck.recv().unwrap(), move |found: u8| late.send(found).unwrap());
        assert!(found.is_none() && disk.is_busy());
        assert_eq!(disk.ask(Path::new("/quick"), || 2, drop), Some(2));
        let (done, order) = mpsc::channel();
        disk.give(slow, move || done.send(()).unwrap());
        assert!(order.try_recv().is_err(), "one after the other");
        let (done, written) = mpsc::channel();
        disk.give(Path::new("/quick"), move || done.send(()).unwrap());
        assert!(written.try_recv().is_ok(), "a healthy one is waited for");
        answer.send(1).unwrap();
        assert_eq!(heard.recv(), Ok(1));
        order.recv().unwrap();
    }

    #[test]
    fn any_number_of_folders_has_a_few_threads() {
        let mut disk = Disk::new(|| {});
        for number in 0..1000 {
            assert_eq!(disk.ask(Path::new(&format!("/{number}")), move || number, drop), Some(number));
            assert!(disk.roots.len() <= MAX_THREADS);
        }
        // All of them are busy.
        let mut holds = Vec::new();
        disk.roots.clear();
        for number in 0..MAX_THREADS {
            let (hold, held) = mpsc::channel::<()>();
            holds.push(hold);
            let thread = disk.thread(Path::new(&format!("/{number}"))).unwrap();
            let under_way = Arc::clone(&thread.under_way);
            under_way.fetch_add(1, Ordering::AcqRel);
            thread
                .give
                .send(Box::new(move || {
                    let _ = held.recv();
                    under_way.fetch_sub(1, Ordering::AcqRel);
                }))
                .unwrap();
        }
        assert_eq!(disk.ask(Path::new("/other"), || 1, drop), Some(1));
        assert_eq!(disk.ask(Path::new("/one_more"), || 2, drop), Some(2));
        assert_eq!((disk.roots.len(), disk.others.is_some()), (MAX_THREADS, true));
        drop(holds);
    }
}
