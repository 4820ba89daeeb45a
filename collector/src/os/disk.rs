//! Disk work of the event loops of both roles. A file system that does not answer (NFS, FUSE)
//! blocks a thread here; the loop keeps serving every rank.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use tokio::sync::oneshot;
use tracing::warn;

type Work = Box<dyn FnOnce() + Send>;

/// One thread for each root of incident folders, up to [`MAX_THREADS`].
pub(crate) struct Disk {
    roots: BTreeMap<PathBuf, Thread>,
    // Shared by the roots without a thread of their own. There can be as many roots as processes.
    shared: Option<Thread>,
    done: Arc<dyn Fn() + Send + Sync>,
}

#[derive(Debug)]
struct Thread {
    sender: mpsc::Sender<Work>,
    load: Arc<Mutex<Load>>,
    // Whether it was reported as stuck; reported once until it works again.
    is_reported: bool,
}

/// The unfinished work of a thread.
#[derive(Debug, Default)]
struct Load {
    works: usize,
    // When the current work began, or the first of them was submitted.
    since: Option<Instant>,
}

impl Load {
    fn add(&mut self) {
        self.works += 1;
        self.since.get_or_insert_with(Instant::now);
    }

    fn finish(&mut self) {
        self.works -= 1;
        self.since = (self.works > 0).then(Instant::now);
    }
}

impl Thread {
    fn load<T>(&self, read: impl FnOnce(&Load) -> T) -> T {
        read(&self.load.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn is_busy(&self) -> bool {
        self.load(|load| load.works > 0)
    }
}

/// At this number, roots with an idle thread lose it. If all threads are busy, a new root uses the
/// shared thread.
const MAX_THREADS: usize = 16;
/// Work that takes longer is reported. A healthy disk finishes it in a moment.
const STUCK: Duration = Duration::from_secs(1);

impl Disk {
    /// Starts no thread yet. `done` is called each time a piece of work is done.
    #[must_use]
    pub(crate) fn new(done: impl Fn() + Send + Sync + 'static) -> Self {
        Disk { roots: BTreeMap::new(), shared: None, done: Arc::new(done) }
    }

    /// Whether any work is unfinished.
    #[must_use]
    pub(crate) fn is_busy(&self) -> bool {
        self.roots.values().chain(&self.shared).any(Thread::is_busy)
    }

    /// Runs work in or below a folder in the background, after the work that was submitted for it
    /// before. If no thread can be started, runs it here.
    pub(crate) fn submit(&mut self, root: &Path, work: impl FnOnce() + Send + 'static) {
        let done = Arc::clone(&self.done);
        self.run(root, work, move || done());
    }

    /// Runs work on an incident folder, after the work that was submitted before for its root.
    pub(crate) fn submit_for(&mut self, folder: PathBuf, work: impl FnOnce(&Path) + Send + 'static) {
        let root = folder.parent().unwrap_or(&folder).to_path_buf();
        self.submit(&root, move || work(&folder));
    }

    /// Sends a reply about an incident after the work on its folder so far, so that the folder
    /// shows what the reply says. The receiver may be gone.
    pub(crate) fn reply<T: Send + 'static>(&mut self, folder: Option<&Path>, reply: oneshot::Sender<T>, answer: T) {
        let send = move || drop(reply.send(answer));
        match folder {
            Some(folder) => self.submit_for(folder.into(), move |_| send()),
            None => send(),
        }
    }

    /// Runs work, and `then` when the work no longer counts as unfinished.
    fn run(&mut self, root: &Path, work: impl FnOnce() + Send + 'static, then: impl FnOnce() + Send + 'static) {
        let Some(thread) = self.thread(root) else {
            work();
            return then();
        };
        let load = Arc::clone(&thread.load);
        load.lock().unwrap_or_else(PoisonError::into_inner).add();
        let work = move || {
            work();
            load.lock().unwrap_or_else(PoisonError::into_inner).finish();
            then();
        };
        // The thread runs as long as there is a sender.
        let _ = thread.sender.send(Box::new(work));
    }

    /// Waits until the work that was submitted so far is done, for [`STUCK`] at most. For the time
    /// before and after the event loop runs.
    pub(crate) fn wait(&mut self, root: &Path) {
        let (done, wait) = mpsc::channel();
        let then = move || {
            // Nobody waits any more after the timeout.
            let _ = done.send(());
        };
        self.run(root, || {}, then);
        if wait.recv_timeout(STUCK) == Err(RecvTimeoutError::Timeout) {
            self.report_stuck();
        }
    }

    /// Logs roots that do not answer, each once until it answers again.
    pub(crate) fn report_stuck(&mut self) {
        let shared = self.shared.iter_mut().map(|thread| ("a folder of incidents".to_string(), thread));
        let threads = self.roots.iter_mut().map(|(root, thread)| (root.display().to_string(), thread)).chain(shared);
        for (name, thread) in threads {
            let is_stuck = thread.load(|load| load.since.is_some_and(|since| since.elapsed() >= STUCK));
            if is_stuck && !thread.is_reported {
                warn!("{name} does not answer");
            }
            thread.is_reported = is_stuck;
        }
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
                let thread = Thread { sender, load: Arc::default(), is_reported: false };
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
    fn a_stuck_folder_blocks_nobody_and_finishes_late() {
        let mut disk = Disk::new(|| {});
        let (answer, stuck) = mpsc::channel();
        let (done, order) = mpsc::channel();
        let (slow, quick) = (Path::new("/slow"), Path::new("/quick"));
        disk.submit(slow, move || stuck.recv().unwrap());
        let then = done.clone();
        disk.submit(slow, move || then.send("slow").unwrap());
        disk.submit(quick, move || done.send("quick").unwrap());
        disk.wait(quick);
        assert_eq!(order.try_recv(), Ok("quick"), "it was waited for");
        assert!(order.try_recv().is_err() && disk.is_busy(), "one after the other");
        disk.wait(slow);
        assert!(disk.roots[slow].is_reported && !disk.roots[quick].is_reported);
        answer.send(()).unwrap();
        assert_eq!(order.recv(), Ok("slow"));
        disk.wait(slow);
        disk.report_stuck();
        assert!(!disk.is_busy() && !disk.roots[slow].is_reported);
    }

    #[test]
    fn the_number_of_threads_is_bounded() {
        let mut disk = Disk::new(|| {});
        let (done, results) = mpsc::channel();
        let run = |disk: &mut Disk, number: usize| {
            let done = done.clone();
            let root = PathBuf::from(format!("/{number}"));
            disk.submit(&root, move || done.send(number).unwrap());
            disk.wait(&root);
            assert_eq!(results.try_recv(), Ok(number));
        };
        for number in 0..1000 {
            run(&mut disk, number);
            assert!(disk.roots.len() <= MAX_THREADS);
        }
        // Make all threads busy.
        disk.roots.clear();
        let holds: Vec<mpsc::Sender<()>> = (0..MAX_THREADS)
            .map(|number| {
                let (hold, held) = mpsc::channel();
                disk.submit(Path::new(&format!("/busy/{number}")), move || _ = held.recv());
                hold
            })
            .collect();
        run(&mut disk, 1001);
        run(&mut disk, 1002);
        assert_eq!((disk.roots.len(), disk.shared.is_some()), (MAX_THREADS, true));
        drop(holds);
    }
}
