//! Captures on a thread of their own, with a limit on waiting: an incident never waits for a capture that does not end.

use std::{
    sync::{Mutex, mpsc},
    thread,
    time::Duration,
};

use xpu_timer_capture::{Capturer, Options, ProcessCapture};

use crate::error::Error;

/// Something that captures processes; a [`Capturer`], or a stand-in in tests.
pub trait Capture: Send {
    /// One entry for each pid.
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
}

/// Makes the capturer of a new worker.
type Make = Box<dyn Fn() -> Box<dyn Capture> + Send + Sync>;

/// The capture worker of a node; shared by all incidents, because what it learns about libraries serves all ranks.
pub struct Captures {
    worker: Mutex<Option<mpsc::Sender<Request>>>,
    given_up: Mutex<u32>,
    make: Make,
}

/// Waiting for another incident's capture to end.
const TURN: Duration = Duration::from_secs(3);
/// Beyond the deadline that the capturer itself keeps.
const GRACE: Duration = Duration::from_millis(300);
/// Workers that never came back. More than this many and capturing is given up for good: threads are not free either.
const MAX_GIVEN_UP: u32 = 8;

impl Default for Captures {
    fn default() -> Self {
        Self::new(Box::new(|| Box::new(Capturer::new())))
    }
}

impl Captures {
    /// With any kind of capturer.
    #[must_use]
    pub fn new(make: Make) -> Self {
        Captures { worker: Mutex::default(), given_up: Mutex::default(), make }
    }

    /// Captures processes and their children. Returns within the deadline and a little more, whatever the capturer does.
    ///
    /// # Errors
    /// When the capture did not end in time.
    pub fn capture(&self, pids: &[i32], deadline: Duration) -> Result<Vec<ProcessCapture>, Error> {
        if pids.is_empty() {
            return Ok(Vec::new());
        }
        let options = Options { deadline, children: true, ..Default::default() };
        let (answer, answers) = mpsc::channel();
        self.send(Request { pids: pids.to_vec(), options, answer })?;
        let begun = answers.recv_timeout(TURN);
        let done = begun.is_ok().then(|| answers.recv_timeout(deadline + GRACE));
        if let Some(Ok(Answer::Done(captures))) = done {
            return Ok(captures);
        }
        self.give_up();
        let within = if begun.is_ok() { deadline } else { TURN };
        Err(Error::Capture(format!("no answer within {:.1} s", within.as_secs_f32())))
    }

    fn send(&self, mut request: Request) -> Result<(), Error> {
        let mut worker = lock(&self.worker);
        if let Some(sender) = worker.as_ref() {
            match sender.send(request) {
                Ok(()) => return Ok(()),
                // The worker panicked: the next one takes the request over.
                Err(mpsc::SendError(back)) => request = back,
            }
        }
        if *lock(&self.given_up) >= MAX_GIVEN_UP {
            return Err(Error::Capture(format!("given up after {MAX_GIVEN_UP} captures that did not end")));
        }
        let (sender, requests) = mpsc::channel::<Request>();
        let mut capturer = (self.make)();
        let work = move || {
            for request in requests {
                // Nobody listens to a capture that came too late.
                let _ = request.answer.send(Answer::Begun);
                let _ = request.answer.send(Answer::Done(capturer.capture(&request.pids, &request.options)));
            }
        };
        thread::Builder::new().name("capture".into()).spawn(work).map_err(Error::system("start the capture thread"))?;
        // It cannot have ended: its receiver waits for this request.
        let _ = sender.send(request);
        *worker = Some(sender);
        Ok(())
    }

    /// Leaves the worker to itself; the next capture gets a new one.
    fn give_up(&self) {
        *lock(&self.worker) = None;
        *lock(&self.given_up) += 1;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicU32, Ordering},
        },
        time::Instant,
    };

    use super::*;

    struct Fake(mpsc::Receiver<()>);
    impl Capture for Fake {
        fn capture(&mut self, pids: &[i32], _: &Options) -> Vec<ProcessCapture> {
            assert!(!pids.contains(&666), "the capturer panics");
            if pids.contains(&13) {
                // Until the test ends.
                let _ = self.0.recv();
            }
            pids.iter().map(|pid| ProcessCapture { pid: *pid, ..Default::default() }).collect()
        }
    }

    /// What holds the fakes back until it is dropped.
    type Holds = Arc<Mutex<Vec<mpsc::Sender<()>>>>;

    fn captures() -> (Captures, Arc<AtomicU32>, Holds) {
        let (made, holds) = (Arc::new(AtomicU32::new(0)), Holds::default());
        let (count, list) = (Arc::clone(&made), Arc::clone(&holds));
        let make: Make = Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
            let (hold, held) = mpsc::channel();
            lock(&list).push(hold);
            Box::new(Fake(held))
        });
        (Captures::new(make), made, holds)
    }

    const SHORT: Duration = Duration::from_millis(100);

    #[test]
    fn one_worker_serves_all() {
        let (captures, made, _holds) = captures();
        assert_eq!(captures.capture(&[], SHORT).unwrap().len(), 0);
        for _ in 0..3 {
            let pids: Vec<i32> = captures.capture(&[7, 8], SHORT).unwrap().iter().map(|process| process.pid).collect();
            assert_eq!(pids, [7, 8]);
        }
        assert_eq!(made.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_capture_that_never_ends_or_panics_costs_its_time_and_no_more() {
        let (captures, made, _holds) = captures();
        let start = Instant::now();
        let error = captures.capture(&[13], SHORT).unwrap_err().to_string();
        assert!(error.contains("no answer within 0.1 s"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(30));
        assert!(captures.capture(&[666], SHORT).is_err());
        assert_eq!(captures.capture(&[7], SHORT).unwrap().len(), 1);
        assert_eq!(made.load(Ordering::Relaxed), 3);
        for _ in 2..MAX_GIVEN_UP {
            assert!(captures.capture(&[13], Duration::ZERO).is_err());
        }
        assert!(captures.capture(&[7], SHORT).unwrap_err().to_string().contains("given up"));
    }
}
