//! What the loop of a node has to read and write. A file system that does not answer (NFS, FUSE) holds up a thread here and not the loop,
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

use crate::inbox::Inbox;

type Work = Box<dyn FnOnce() + Send>;

/// One thread for each folder of incident folders.
#[derive(Debug)]
pub struct Disk {
    roots: BTreeMap<PathBuf, mpsc::Sender<Work>>,
    under_way: Arc<AtomicUsize>,
    inbox: Inbox,
}

/// The loop waits for so long for what a healthy disk has in a moment.
const SOON: Duration = Duration::from_secs(1);

impl Disk {
    /// Without a thread yet.
    #[must_use]
    pub fn new(inbox: Inbox) -> Self {
        Disk { roots: BTreeMap::new(), under_way: Arc::default(), inbox }
    }

    /// Whether something is not done yet.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.under_way.load(Ordering::Acquire) > 0
    }

    /// Does something in or below a folder, after what was given for that before, and wakes the loop when it is done.
    pub fn give(&mut self, root: &Path, work: impl FnOnce() + Send + 'static) {
        let (under_way, inbox) = (Arc::clone(&self.under_way), self.inbox.clone());
        under_way.fetch_add(1, Ordering::AcqRel);
        let work = move || {
            work();
            under_way.fetch_sub(1, Ordering::AcqRel);
            inbox.wake();
        };
        let thread = self.roots.get(root).cloned().or_else(|| self.start(root));
        match thread {
            // It does not end while there is a sender.
            Some(thread) => drop(thread.send(Box::new(work))),
            None => work(),
        }
    }

    /// What some work in or below a folder finds; `None` when that takes long. It is given to `late` then.
    pub fn ask<T: Send + 'static>(
        &mut self,
        root: &Path,
        work: impl FnOnce() -> T + Send + 'static,
        late: impl FnOnce(T) + Send + 'static,
    ) -> Option<T> {
        let (give, take) = mpsc::sync_channel(0);
        let begin = move || {
            if let Err(mpsc::SendError(found)) = give.send(work()) {
                late(found);
            }
        };
        // Without a thread nobody would be there to take it.
        if !self.roots.contains_key(root) && self.start(root).is_none() {
            return None;
        }
        self.give(root, begin);
        let found = take.recv_timeout(SOON).ok();
        if found.is_none() {
            warn!("{} does not answer", root.display());
        }
        found
    }

    fn start(&mut self, root: &Path) -> Option<mpsc::Sender<Work>> {
        let (give, take) = mpsc::channel::<Work>();
        let turn = move || take.into_iter().for_each(|work| work());
        if let Err(error) = thread::Builder::new().name("disk".into()).spawn(turn) {
            warn!("no thread for {}: {error}", root.display());
            return None;
        }
        self.roots.insert(root.into(), give.clone());
        Some(give)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_does_not_answer_holds_up_no_other_and_what_it_says_late_is_heard() {
        let mut disk = Disk::new(Inbox::new().unwrap().0);
        let (answer, stuck) = mpsc::channel();
        let (late, heard) = mpsc::channel();
        let slow = Path::new("/slow");
        let found = disk.ask(slow, move || stuck.recv().unwrap(), move |found: u8| late.send(found).unwrap());
        assert!(found.is_none() && disk.is_busy());
        assert_eq!(disk.ask(Path::new("/quick"), || 2, drop), Some(2));
        let (done, order) = mpsc::channel();
        disk.give(slow, move || done.send(()).unwrap());
        assert!(order.try_recv().is_err(), "one after the other");
        answer.send(1).unwrap();
        assert_eq!(heard.recv(), Ok(1));
        order.recv().unwrap();
    }
}
