//! The kinds of work in a stream, records of events among them, the bounded queue of work, and the
//! thread that runs it in order.
//!
//! The thread starts with the first work and ends when the queue is closed and empty. All waits
//! sleep.

#![allow(unsafe_code)]

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    sync::{
        Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use sim_abi::{
    cuda::CuError,
    fault::{self, Kind},
    ffi, trace,
};

use crate::{
    memory,
    module::{Behaviour, Function},
    process,
};

static DEPTH: LazyLock<u64> = LazyLock::new(|| process::setting("XPU_SIM_QUEUE_DEPTH", 1024) as u64);
/// Whether all streams of a context share one hardware queue: `CUDA_DEVICE_MAX_CONNECTIONS=1`. The
/// variable has no other effect here.
static HAS_ONE_CONNECTION: LazyLock<bool> = LazyLock::new(|| process::setting("CUDA_DEVICE_MAX_CONNECTIONS", 0) == 1);
/// The shared hardware queue of each context, by the context's id.
static CONNECTIONS: Mutex<BTreeMap<u64, Arc<Connection>>> = Mutex::new(BTreeMap::new());
/// All queues, except those that were dropped.
static ALL: Mutex<Vec<Weak<Queue>>> = Mutex::new(Vec::new());

/// Pause between two looks of a kernel that busy-waits, because a device burns no host CPU.
const POLL: Duration = Duration::from_millis(1);

/// A hardware queue that several streams share. Work leaves it in the order of its submission, when
/// it begins. So work that waits for its own stream holds up what was submitted to other streams
/// after it.
#[derive(Default)]
struct Connection {
    state: Mutex<ConnectionState>,
    progress: Condvar,
}

#[derive(Default)]
struct ConnectionState {
    submitted: u64,
    begun: u64,
    cancelled: bool,
}

impl Connection {
    /// The connection of a context, if its streams share one.
    fn of(context: u64) -> Option<Arc<Self>> {
        let mut all = CONNECTIONS.lock().unwrap_or_else(PoisonError::into_inner);
        HAS_ONE_CONNECTION.then(|| Arc::clone(all.entry(context).or_default()))
    }

    /// Takes the next place. Blocks while the queue is full.
    fn submit(&self) -> u64 {
        let mut state = self.lock();
        while state.submitted - state.begun >= *DEPTH && !state.cancelled {
            state = self.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.submitted += 1;
        state.submitted
    }

    /// Waits until the work at this place is the next one, and lets it begin.
    fn begin(&self, place: u64) {
        let mut state = self.lock();
        while state.begun + 1 < place && !state.cancelled {
            state = self.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.begun = state.begun.max(place);
        self.progress.notify_all();
    }

    fn is_empty(&self) -> bool {
        let state = self.lock();
        state.begun == state.submitted
    }

    fn cancel(&self) {
        self.lock().cancelled = true;
        self.progress.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A bounded queue with its worker thread.
pub struct Queue {
    /// The N of `sim-stream-N`.
    pub id: u64,
    /// The id of the context that it belongs to.
    context: u64,
    connection: Option<Arc<Connection>>,
    /// Held while work for the connection is submitted.
    submission: Mutex<()>,
    state: Mutex<State>,
    /// The worker waits here for work, and inside kernels.
    work: Condvar,
    /// Other threads wait here for progress.
    progress: Condvar,
}

#[derive(Default)]
struct State {
    /// The work, and its place in the connection, if there is one.
    items: VecDeque<(Work, Option<u64>)>,
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
    /// An empty queue without a thread, for a stream of the context with this id.
    pub fn new(context: u64) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let queue = Arc::new(Queue {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            context,
            connection: Connection::of(context),
            submission: Mutex::default(),
            state: Mutex::default(),
            work: Condvar::new(),
            progress: Condvar::new(),
        });
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|queue| queue.strong_count() > 0);
        all.push(Arc::downgrade(&queue));
        queue
    }

    /// Appends work and returns its position. Blocks while the queue is full, as a device does. An
    /// event in an idle queue completes at once, because it needs no host thread on a device
    /// either.
    pub fn push(self: &Arc<Self>, work: Work) -> Result<u64, CuError> {
        let Some(connection) = &self.connection else { return self.append(work, None) };
        // The places of a stream's work are in the order of the work.
        let _in_order = self.submission.lock().unwrap_or_else(PoisonError::into_inner);
        let completes_at_once = matches!(work, Work::Record(_)) && connection.is_empty() && self.pending().is_none();
        let place = (!completes_at_once).then(|| connection.submit());
        self.append(work, place)
    }

    fn append(self: &Arc<Self>, work: Work, place: Option<u64>) -> Result<u64, CuError> {
        let mut state = self.lock();
        if let Work::Record(marker) = &work
            && place.is_none()
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
        state.items.push_back((work, place));
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

    /// Runs a kernel that busy-waits for a condition. Ends early when the context is destroyed.
    pub fn poll(&self, is_met: impl Fn() -> bool) {
        while !is_met() && !self.lock().cancelled {
            self.sleep(Some(POLL));
        }
    }

    /// Closes the queue: queued work is still done.
    pub fn close(&self) {
        // A forked child may close the queues of its parent, so this does not lock [`ALL`].
        self.lock().closed = true;
        self.work.notify_all();
    }

    /// Cancels the queue when the context is destroyed: all waits end.
    pub fn cancel(&self) {
        self.lock().cancelled = true;
        self.work.notify_all();
        self.progress.notify_all();
        // With one queue, all others of the context are cancelled, too.
        if let Some(connection) = &self.connection {
            connection.cancel();
        }
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
            if let Some((work, place)) = state.items.pop_front() {
                drop(state);
                if let (Some(connection), Some(place)) = (&self.connection, place) {
                    connection.begin(place);
                }
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

/// The open queues of the context with this id, or of all contexts.
pub fn open_queues(context: Option<u64>) -> Vec<Arc<Queue>> {
    let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let wanted = |queue: &Arc<Queue>| context.is_none_or(|context| queue.context == context) && !queue.lock().closed;
    all.iter().filter_map(Weak::upgrade).filter(wanted).collect()
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

/// A host function with its user data (an address of the caller).
#[derive(Clone, Copy)]
pub enum HostCall {
    /// cuLaunchHostFunc.
    Plain(extern "C" fn(usize), usize),
    /// cuStreamAddCallback, with the stream's handle.
    Callback(extern "C" fn(usize, i32, usize), usize, usize),
}

/// A piece of work, as it was submitted or captured.
#[derive(Clone)]
pub enum Work {
    /// A kernel and its copied arguments.
    Kernel { function: Arc<Function>, arguments: Option<Arc<[u8]>>, fault: Option<Kind> },
    /// A host call.
    Host(HostCall),
    /// A copy within this process's memory.
    Copy { to: usize, from: usize, count: usize },
    /// A copy from bytes that were staged at submission.
    Write { to: usize, bytes: Arc<[u8]> },
    /// Fills `count` elements of `width` bytes.
    Fill { to: usize, value: u32, width: usize, count: usize },
    /// cuMemFreeAsync.
    Free(usize),
    /// An event's record.
    Record(Arc<Marker>),
    /// A record of an event inside a graph: every launch makes a new record.
    RecordAtLaunch(Arc<LatestRecord>),
    /// A wait for another stream's record.
    Await(Arc<Marker>),
    /// A wait for all work that another stream has so far.
    AwaitQueue(Arc<Queue>, u64),
    /// A launched graph.
    Graph(Arc<[Work]>),
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Work::Kernel { function, .. } => write!(f, "kernel {}", function.name.to_string_lossy()),
            Work::Graph(nodes) => write!(f, "graph of {} nodes", nodes.len()),
            Work::Copy { count, .. } => write!(f, "copy of {count} bytes"),
            _ => write!(f, "work"),
        }
    }
}

impl Work {
    /// This work for a launch now: kernels are counted, and the events of a graph get a new record.
    pub fn launched(&self) -> Work {
        match self {
            Work::Kernel { function, arguments, .. } => {
                Work::Kernel { function: function.clone(), arguments: arguments.clone(), fault: counted(function) }
            }
            Work::RecordAtLaunch(latest) => Work::Record(latest.renew()),
            Work::Graph(nodes) => Work::Graph(nodes.iter().map(Work::launched).collect()),
            other => other.clone(),
        }
    }

    /// Runs it on the worker of `queue`.
    pub fn run(self, queue: &Queue) {
        match self {
            Work::RecordAtLaunch(_) => {}
            Work::Kernel { function, arguments, fault } => match function.behaviour {
                Behaviour::Host(run) => {
                    let arguments = arguments.as_deref().unwrap_or_default();
                    run(arguments.as_ptr() as usize, arguments.len());
                }
                Behaviour::Lasts(_) if fault == Some(Kind::StuckKernel) => queue.sleep(None),
                Behaviour::Lasts(_) if fault == Some(Kind::Lost) => lose(),
                Behaviour::Meets(..) if fault == Some(Kind::StuckKernel) => queue.sleep(None),
                Behaviour::Meets(..) if fault == Some(Kind::Lost) => lose(),
                Behaviour::Lasts(time) => queue.sleep(Some(time + slower())),
                Behaviour::Meets(time, flags) => {
                    queue.sleep(Some(time + slower()));
                    let number = flags.set();
                    queue.poll(|| flags.all_set(number));
                }
            },
            Work::Host(HostCall::Plain(function, data)) => function(data),
            Work::Host(HostCall::Callback(function, stream, data)) => function(stream, 0, data),
            Work::Copy { to, from, count } => ffi::copy(to, from, count),
            Work::Write { to, bytes } => ffi::copy(to, bytes.as_ptr() as usize, bytes.len()),
            Work::Fill { to, value, width, count } => ffi::fill(to, value, width, count),
            Work::Free(address) => drop(memory::free(address)),
            Work::Record(marker) => marker.complete(),
            Work::Await(marker) => marker.wait(),
            Work::AwaitQueue(other, position) => other.wait(position),
            Work::Graph(nodes) => nodes.iter().for_each(|node| node.clone().run(queue)),
        }
    }
}

/// Counts a launch, and returns its fault, if any. NCCL's kernels do not count.
fn counted(function: &Function) -> Option<Kind> {
    static LAUNCHES: AtomicU64 = AtomicU64::new(0);
    if matches!(function.behaviour, Behaviour::Host(_)) {
        return None;
    }
    let number = LAUNCHES.fetch_add(1, Ordering::Relaxed) + 1;
    [Kind::StuckKernel, Kind::Lost].into_iter().find(|kind| fault::faults(false).at(*kind, number))
}

fn slower() -> Duration {
    Duration::from_millis(fault::faults(false).value(Kind::Slow).unwrap_or(0))
}

/// A kernel made an illegal access: the process makes no progress, and every call returns the
/// error.
fn lose() {
    process::set_lost();
    open_queues(None).iter().for_each(|queue| queue.cancel());
}

/// A record of an event in a stream.
#[derive(Default)]
pub struct Marker {
    time: Mutex<Option<Instant>>,
    done: Condvar,
}

impl Marker {
    /// Marks the record as completed.
    pub fn complete(&self) {
        *self.time.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.done.notify_all();
    }

    /// The time of completion, if completed.
    pub fn time(&self) -> Option<Instant> {
        *self.time.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it is completed.
    pub fn wait(&self) {
        let mut time = self.time.lock().unwrap_or_else(PoisonError::into_inner);
        while time.is_none() {
            time = self.done.wait(time).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A record of an event.
pub enum Record {
    Never,
    InStream(Arc<Marker>),
    /// Recorded while its stream was capturing: the id of the capture, and the nodes that the
    /// record follows.
    Captured(u64, Vec<usize>),
}

/// The latest record of an event.
pub struct LatestRecord(Mutex<Record>);

impl LatestRecord {
    /// The record of an event that was never recorded.
    pub fn never() -> Arc<Self> {
        Arc::new(LatestRecord(Mutex::new(Record::Never)))
    }

    /// A record that the caller puts into a stream.
    pub fn renew(&self) -> Arc<Marker> {
        let marker = Arc::<Marker>::default();
        *self.lock() = Record::InStream(Arc::clone(&marker));
        marker
    }

    /// The record, for a look or a change.
    pub fn lock(&self) -> MutexGuard<'_, Record> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
