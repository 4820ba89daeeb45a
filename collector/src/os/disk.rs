//! Disk work of the event loop, in both roles. A file system that does not answer (NFS, FUSE)
//! blocks a thread here; the loop keeps serving every rank.

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

/// One thread for each root of incident folders, up to [`MAX_THREADS`].
pub struct Disk {
    roots: BTreeMap<PathBuf, Thread>,
    // Shared by the roots without a thread of their own. There can be as many roots as processes.
    shared: Option<Thread>,
    done: Arc<dyn Fn() + Send + Sync>,
}

#[derive(Debug)]
struct Thread {
    sender: mpsc::Sender<Work>,
    under_way: Arc<AtomicUsize>,
}

impl Thread {
    fn is_busy(&self) -> bool {
        self.under_way.load(Ordering::Acquire) > 0
    }
}

/// At this number, roots with an idle thread lose it. If all threads are busy, a new root uses the
/// shared thread.
const MAX_THREADS: usize = 16;
/// The loop waits this long for work that a healthy disk finishes in a moment.
const RUN_TIMEOUT: Duration = Duration::from_secs(1);

impl Disk {
    /// Starts no thread yet. `done` is called each time a piece of work is done.
    #[must_use]
    pub fn new(done: impl Fn() + Send + Sync + 'static) -> Self {
        Disk { roots: BTreeMap::new(), shared: None, done: Arc::new(done) }
    }

    /// Whether any work is unfinished.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.roots.values().chain(&self.shared).any(Thread::is_busy)
    }

    /// Runs work in or below a folder, after the work that was submitted for it before. If that
    /// takes long, the work finishes in the background.
    pub fn submit(&mut self, root: &Path, work: impl FnOnce() + Send + 'static) {
        let _ = self.run(root, work, drop);
    }

    /// Runs work in or below a folder and returns its result. If it takes long, returns `None` and
    /// passes the result to `late`. Does not wait for a root that is still busy with earlier work.
    pub fn run<T: Send + 'static>(
        &mut self,
        root: &Path,
        work: impl FnOnce() -> T + Send + 'static,
        late: impl FnOnce(T) + Send + 'static,
    ) -> Option<T> {
        let done = Arc::clone(&self.done);
        let Some(thread) = self.thread(root) else { return Some(work()) };
        let wait = if thread.is_busy() { Duration::ZERO } else { RUN_TIMEOUT };
        let (reply, answer) = mpsc::sync_channel(0);
        let under_way = Arc::clone(&thread.under_way);
        under_way.fetch_add(1, Ordering::AcqRel);
        let work = move || {
            let result = work();
            // Decremented before the result is sent, so that the next caller finds the thread free.
            under_way.fetch_sub(1, Ordering::AcqRel);
            if let Err(mpsc::SendError(result)) = reply.send(result) {
                late(result);
            }
            done();
        };
        // The thread runs as long as there is a sender.
        let _ = thread.sender.send(Box::new(work));
        let result = answer.recv_timeout(wait).ok();
        if result.is_none() {
            warn!("{} does not answer", root.display());
        }
        result
    }

    fn thread(&mut self, root: &Path) -> Option<&Thread> {
        if !self.roots.contains_key(root) {
            if self.roots.len() >= MAX_THREADS {
                // A thread ends when its sender is dropped.
                self.roots.retain(|_, thread| thread.is_busy());
            }
            let is_full = self.roots.len() >= MAX_THREADS;
            if !(is_full && self.shared.is_some()) {
                let (sender, work) = mpsc::channel::<Work>();
                let turn = move || work.into_iter().for_each(|work| work());
                let thread = Thread { sender, under_way: Arc::default() };
                match thread::Builder::new().name("disk".into()).spawn(turn) {
                    Ok(_) if is_full => self.shared = Some(thread),
                    Ok(_) => _ = self.roots.insert(root.into(), thread),
                    Err(error) => warn!("cannot start a thread for {}: {error}", root.display()),
                }
            }
        }
        self.roots.get(root).or(self.shared.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stuck_folder_blocks_no_other_and_its_late_result_arrives() {
        let mut disk = Disk::new(|| {});
        let (answer, stuck) = mpsc::channel();
        let (late, heard) = mpsc::channel();
        let slow = Path::new("/slow");
        let found = disk.run(slow, move || stuck.recv().unwrap(), move |found: u8| late.send(found).unwrap());
        assert!(found.is_none() && disk.is_busy());
        assert_eq!(disk.run(Path::new("/quick"), || 2, drop), Some(2));
        let (done, order) = mpsc::channel();
        disk.submit(slow, move || done.send(()).unwrap());
        assert!(order.try_recv().is_err(), "one after the other");
        let (done, written) = mpsc::channel();
        disk.submit(Path::new("/quick"), move || done.send(()).unwrap());
        assert!(written.try_recv().is_ok(), "a healthy one is waited for");
        answer.send(1).unwrap();
        assert_eq!(heard.recv(), Ok(1));
        order.recv().unwrap();
    }

    #[test]
    fn the_number_of_threads_is_bounded() {
        let mut disk = Disk::new(|| {});
        for number in 0..1000 {
            assert_eq!(disk.run(Path::new(&format!("/{number}")), move || number, drop), Some(number));
            assert!(disk.roots.len() <= MAX_THREADS);
        }
        // Make all threads busy.
        let mut holds = Vec::new();
        disk.roots.clear();
        for number in 0..MAX_THREADS {
            let (hold, held) = mpsc::channel::<()>();
            holds.push(hold);
            let thread = disk.thread(Path::new(&format!("/{number}"))).unwrap();
            let under_way = Arc::clone(&thread.under_way);
            under_way.fetch_add(1, Ordering::AcqRel);
            thread
                .sender
                .send(Box::new(move || {
                    let _ = held.recv();
                    under_way.fetch_sub(1, Ordering::AcqRel);
                }))
                .unwrap();
        }
        assert_eq!(disk.run(Path::new("/other"), || 1, drop), Some(1));
        assert_eq!(disk.run(Path::new("/one_more"), || 2, drop), Some(2));
        assert_eq!((disk.roots.len(), disk.shared.is_some()), (MAX_THREADS, true));
        drop(holds);
    }
}
