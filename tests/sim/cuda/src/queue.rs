//! A bounded queue of work and the thread that runs it in order.
//!
//! The thread starts with the first work and ends when the queue is closed and empty. All waits
//! sleep.

#![allow(unsafe_code)]

use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use sim_abi::{cuda::CuError, trace};

use crate::{process, work::Work};

static DEPTH: LazyLock<u64> = LazyLock::new(|| process::setting("XPU_SIM_QUEUE_DEPTH", 1024) as u64);

/// A bounded queue with its worker thread.
pub struct Queue {
    /// The N of `sim-stream-N`.
    pub id: u64,
    state: Mutex<State>,
    /// The worker waits here for work, and inside kernels.
    work: Condvar,
    /// Other threads wait here for progress.
    progress: Condvar,
}

#[derive(Default)]
struct State {
    items: VecDeque<Work>,
    submitted: u64,
    completed: u64,
    /// Number of threads in `progress`. If it is 0, the worker saves a system call.
    waiters: u32,
    worker: bool,
    worker_waits: bool,
    closed: bool,
    /// The context was destroyed: kernels end.
    cancelled: bool,
}

impl Queue {
    /// An empty queue without a thread.
    pub fn new() -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Arc::new(Queue {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            state: Mutex::default(),
            work: Condvar::new(),
            progress: Condvar::new(),
        })
    }

    /// Appends work and returns its position. Blocks while the queue is full, as a device does. An
    /// event in an idle queue completes at once, because it needs no host thread on a device
    /// either.
    pub fn push(self: &Arc<Self>, work: Work) -> Result<u64, CuError> {
        let mut state = self.lock();
        if let Work::Record(marker) = &work
            && state.submitted == state.completed
            && !state.cancelled
        {
            trace::note(format_args!("{work:?}"));
            state.submitted += 1;
            state.completed += 1;
            marker.complete();
            return Ok(state.submitted);
        }
        while state.submitted - state.completed >= *DEPTH && !state.cancelled {
            state = self.wait_for_progress(state);
        }
        if state.cancelled {
            return Err(CuError::CONTEXT_IS_DESTROYED);
        }
        if !state.worker {
            self.start()?;
            state.worker = true;
        }
        state.items.push_back(work);
        state.submitted += 1;
        if state.worker_waits {
            state.worker_waits = false;
            self.work.notify_all();
        }
        Ok(state.submitted)
    }

    /// The position of the last work, if it is not done.
    pub fn pending(&self) -> Option<u64> {
        let state = self.lock();
        (state.completed < state.submitted).then_some(state.submitted)
    }

    /// The position of the last work.
    pub fn last(&self) -> u64 {
        self.lock().submitted
    }

    /// Waits until the work at `position` is done.
    pub fn wait(&self, position: u64) {
        let mut state = self.lock();
        while state.completed < position && !state.cancelled {
            state = self.wait_for_progress(state);
        }
    }

    /// Runs a kernel: sleeps for `time`, or forever. Ends early when the context is destroyed.
    pub fn sleep(&self, time: Option<Duration>) {
        if time == Some(Duration::ZERO) {
            return;
        }
        let end = time.map(|time| Instant::now() + time);
        let mut state = self.lock();
        while !state.cancelled {
            state = match end.map(|end| end.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return,
                Some(left) => self.work.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.work.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Closes the queue: queued work is still done.
    pub fn close(&self) {
        self.lock().closed = true;
        self.work.notify_all();
    }

    /// Cancels the queue when the context is destroyed: all waits end.
    pub fn cancel(&self) {
        self.lock().cancelled = true;
        self.work.notify_all();
        self.progress.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for_progress<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.waiters += 1;
        state = self.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.waiters -= 1;
        state
    }

    /// Starts the worker with all signals blocked: the host's handlers are for the host's threads.
    fn start(self: &Arc<Self>) -> Result<(), CuError> {
        let queue = Arc::clone(self);
        let builder = thread::Builder::new().name(format!("sim-stream-{}", self.id)).stack_size(512 << 10);
        with_signals_blocked(|| builder.spawn(move || queue.run())).map_err(|_| CuError::OUT_OF_MEMORY)?;
        Ok(())
    }

    fn run(&self) {
        // SAFETY: the arguments are integers. Without this, kernels of some microseconds would last
        // 50 longer.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000) };
        let mut state = self.lock();
        loop {
            if let Some(work) = state.items.pop_front() {
                drop(state);
                trace::note(format_args!("{work:?}"));
                let record = match work {
                    Work::Record(marker) => Some(marker),
                    other => {
                        other.run(self);
                        None
                    }
                };
                state = self.lock();
                state.completed += 1;
                // The lock is held, so that no thread sees the event complete and its stream still
                // busy, or the reverse.
                if let Some(marker) = record {
                    marker.complete();
                }
                if state.waiters > 0 {
                    self.progress.notify_all();
                }
            } else if state.closed || state.cancelled {
                return;
            } else {
                state.worker_waits = true;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

fn with_signals_blocked<T>(body: impl FnOnce() -> T) -> T {
    // SAFETY: both sets are initialized by the first two calls before they are read.
    unsafe {
        let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let result = body();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut());
        result
    }
}
