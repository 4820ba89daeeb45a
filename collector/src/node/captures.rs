//! Runs captures on a thread of their own and limits the wait: an incident never waits for a
//! capture that does not end.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use xpu_timer_capture::{Capturer, Options, ProcessCapture};

use crate::error::Error;

/// Captures processes: a [`Capturer`], or a stand-in in tests.
pub(super) trait Capture: Send {
    /// Returns one entry for each pid.
    fn capture(&mut self, pids: &[i32], options: &Options) -> Vec<ProcessCapture>;
}

impl Capture for Capturer {
    fn capture(&mut self, pids: &[i32], options: &Options) -> Vec<ProcessCapture> {
        Capturer::capture(self, pids, options)
    }
}

enum Answer {
    Begun,
    Done(Vec<ProcessCapture>),
}

struct Request {
    pids: Vec<i32>,
    options: Options,
    answer: mpsc::Sender<Answer>,
    // The requester has stopped waiting.
    cancelled: Arc<AtomicBool>,
}

/// Makes the capturer of a new worker.
type CapturerFactory = Box<dyn Fn() -> Box<dyn Capture> + Send + Sync>;

/// The capture worker of a node. All incidents share it, because what it learns about libraries
/// serves all ranks.
pub(super) struct Captures {
    worker: Mutex<Option<Worker>>,
    given_up: Arc<AtomicU32>,
    make: CapturerFactory,
}

/// A thread that captures one request after the other.
struct Worker {
    requests: mpsc::Sender<Request>,
    life: Arc<Mutex<WorkerState>>,
}

/// The state of a worker's thread.
#[derive(Default)]
struct WorkerState {
    // The deadline of the current capture.
    due: Option<Instant>,
    given_up: bool,
    ended: bool,
}

/// Counts an abandoned worker for as long as its thread exists.
struct Thread {
    life: Arc<Mutex<WorkerState>>,
    given_up: Arc<AtomicU32>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        let mut life = lock(&self.life);
        life.ended = true;
        if life.given_up {
            self.given_up.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// How long to wait for the captures of other incidents.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(20);
/// Extra time beyond the deadline that the capturer itself keeps.
const GRACE: Duration = Duration::from_millis(300);
/// How often to check whether the worker still works.
const LOOK: Duration = Duration::from_millis(200);
/// Workers that have not come back. While there are more than this many, nothing is captured:
/// threads are not free either.
const MAX_GIVEN_UP: u32 = 8;

/// The processes to capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// The given ones.
    Alone,
    /// Also their descendants.
    WithChildren,
}

impl Default for Captures {
    fn default() -> Self {
        Self::new(Box::new(|| Box::new(Capturer::new())))
    }
}

impl Captures {
    /// Uses any kind of capturer.
    #[must_use]
    pub(super) fn new(make: CapturerFactory) -> Self {
        Captures { worker: Mutex::default(), given_up: Arc::default(), make }
    }

    /// The number of captures that have not ended although their time is up; should be 0.
    #[must_use]
    pub(super) fn given_up(&self) -> u32 {
        self.given_up.load(Ordering::Acquire)
    }

    /// Captures processes, and their children too if `scope` says so. Returns shortly after the
    /// deadline at the latest, whatever the capturer does, and on a busy machine within
    /// [`Options::longest`]. It returns later only when captures of other incidents come first.
    ///
    /// # Errors
    /// When the capture did not end in time.
    pub(super) fn capture(&self, pids: &[i32], scope: Scope, deadline: Duration) -> Result<Vec<ProcessCapture>, Error> {
        if pids.is_empty() {
            return Ok(Vec::new());
        }
        let options = Options { deadline, children: scope == Scope::WithChildren, ..Default::default() };
        let longest = options.longest();
        let (answer, answers) = mpsc::channel();
        let cancelled = Arc::new(AtomicBool::new(false));
        let request = Request { pids: pids.to_vec(), options, answer, cancelled: Arc::clone(&cancelled) };
        let life = self.send(request)?;
        let begun = Instant::now();
        let waited = loop {
            match answers.recv_timeout(LOOK) {
                Ok(_) => break Ok(answers.recv_timeout(longest + GRACE)),
                Err(RecvTimeoutError::Disconnected) => break Err("the capture failed".into()),
                // The worker is busy with the capture of another incident, which may never end.
                Err(RecvTimeoutError::Timeout) if lock(&life).due.is_some_and(|due| due < Instant::now()) => {
                    self.give_up(&life);
                    break Err("the previous capture does not end".to_string());
                }
                Err(RecvTimeoutError::Timeout) if begun.elapsed() > QUEUE_TIMEOUT => {
                    break Err(format!("other captures have taken {QUEUE_TIMEOUT:?}"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        cancelled.store(true, Ordering::Release);
        match waited {
            Ok(Ok(Answer::Done(captures))) => Ok(captures),
            Ok(_) => {
                self.give_up(&life);
                Err(Error::Capture(format!("no answer within {:.1} s", longest.as_secs_f32())))
            }
            Err(why) => Err(Error::Capture(why)),
        }
    }

    fn send(&self, mut request: Request) -> Result<Arc<Mutex<WorkerState>>, Error> {
        let mut worker = lock(&self.worker);
        if let Some(running) = worker.as_ref() {
            match running.requests.send(request) {
                Ok(()) => return Ok(Arc::clone(&running.life)),
                // The worker panicked: the next one takes over the request.
                Err(mpsc::SendError(back)) => request = back,
            }
        }
        if self.given_up() >= MAX_GIVEN_UP {
            return Err(Error::Capture(format!("{MAX_GIVEN_UP} earlier captures have not ended")));
        }
        let (sender, requests) = mpsc::channel::<Request>();
        let life = Arc::<Mutex<WorkerState>>::default();
        let thread = Thread { life: Arc::clone(&life), given_up: Arc::clone(&self.given_up) };
        let mut capturer = (self.make)();
        let work = move || {
            for request in requests {
                if request.cancelled.load(Ordering::Acquire) {
                    continue;
                }
                lock(&thread.life).due = Some(Instant::now() + request.options.longest() + GRACE);
                // The receiver is gone when the capture came too late.
                let _ = request.answer.send(Answer::Begun);
                let _ = request.answer.send(Answer::Done(capturer.capture(&request.pids, &request.options)));
                lock(&thread.life).due = None;
            }
        };
        thread::Builder::new().name("capture".into()).spawn(work).map_err(Error::system("start the capture thread"))?;
        // The worker cannot have ended: its receiver waits for this request.
        let _ = sender.send(request);
        *worker = Some(Worker { requests: sender, life: Arc::clone(&life) });
        Ok(life)
    }

    /// Abandons a worker; the next capture gets a new one.
    fn give_up(&self, of: &Arc<Mutex<WorkerState>>) {
        let mut worker = lock(&self.worker);
        if worker.as_ref().is_some_and(|worker| Arc::ptr_eq(&worker.life, of)) {
            *worker = None;
        }
        let mut life = lock(of);
        if !life.given_up && !life.ended {
            life.given_up = true;
            self.given_up.fetch_add(1, Ordering::AcqRel);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake(mpsc::Receiver<()>);
    impl Capture for Fake {
        fn capture(&mut self, pids: &[i32], _: &Options) -> Vec<ProcessCapture> {
            assert!(!pids.contains(&666), "the capturer panics");
            if pids.contains(&13) {
                // Blocks until the test ends.
                let _ = self.0.recv();
            }
            pids.iter().map(|pid| ProcessCapture { pid: *pid, ..Default::default() }).collect()
        }
    }

    /// Dropping the senders releases the fake capturers.
    type Releases = Arc<Mutex<Vec<mpsc::Sender<()>>>>;

    fn captures() -> (Captures, Arc<AtomicU32>, Releases) {
        let (made, releases) = (Arc::new(AtomicU32::new(0)), Releases::default());
        let (count, list) = (Arc::clone(&made), Arc::clone(&releases));
        let make: CapturerFactory = Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
            let (hold, held) = mpsc::channel();
            lock(&list).push(hold);
            Box::new(Fake(held))
        });
        (Captures::new(make), made, releases)
    }

    const SHORT: Duration = Duration::from_millis(100);

    #[test]
    fn one_worker_serves_all() {
        let (captures, made, _holds) = captures();
        assert_eq!(captures.capture(&[], Scope::WithChildren, SHORT).unwrap().len(), 0);
        for _ in 0..3 {
            let pids: Vec<i32> = captures
                .capture(&[7, 8], Scope::WithChildren, SHORT)
                .unwrap()
                .iter()
                .map(|process| process.pid)
                .collect();
            assert_eq!(pids, [7, 8]);
        }
        assert_eq!(made.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn simultaneous_incidents_queue_without_abandoning_a_worker() {
        struct Slow;
        impl Capture for Slow {
            fn capture(&mut self, pids: &[i32], _: &Options) -> Vec<ProcessCapture> {
                thread::sleep(SHORT);
                pids.iter().map(|pid| ProcessCapture { pid: *pid, ..Default::default() }).collect()
            }
        }
        let captures = Captures::new(Box::new(|| Box::new(Slow)));
        let deadline = Duration::from_secs(30);
        thread::scope(|scope| {
            let all: Vec<_> =
                (0..6).map(|_| scope.spawn(|| captures.capture(&[7], Scope::WithChildren, deadline))).collect();
            assert!(all.into_iter().all(|one| one.join().unwrap().is_ok()));
        });
        assert_eq!(captures.given_up(), 0);
    }

    #[test]
    fn a_stuck_or_panicking_capture_costs_only_its_deadline() {
        let (captures, made, releases) = captures();
        let start = Instant::now();
        let error = captures.capture(&[13], Scope::WithChildren, SHORT).unwrap_err().to_string();
        assert!(error.contains("no answer within 0.3 s"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(30));
        assert!(captures.capture(&[666], Scope::WithChildren, SHORT).is_err());
        assert_eq!(captures.capture(&[7], Scope::WithChildren, SHORT).unwrap().len(), 1);
        assert_eq!(made.load(Ordering::Relaxed), 3);
        // The thread of the worker that panicked ends soon after its answer.
        while captures.given_up() > 1 {
            assert!(start.elapsed() < Duration::from_secs(30), "a worker that panicked has ended");
            thread::yield_now();
        }
        for _ in 1..MAX_GIVEN_UP {
            assert!(captures.capture(&[13], Scope::WithChildren, Duration::ZERO).is_err());
        }
        assert_eq!(captures.given_up(), MAX_GIVEN_UP);
        assert!(captures.capture(&[7], Scope::WithChildren, SHORT).unwrap_err().to_string().contains("have not ended"));
        // The captures end after all.
        lock(&releases).clear();
        while captures.given_up() > 0 {
            assert!(start.elapsed() < Duration::from_secs(30));
            thread::yield_now();
        }
        assert_eq!(captures.capture(&[7], Scope::WithChildren, SHORT).unwrap().len(), 1);
    }
}
