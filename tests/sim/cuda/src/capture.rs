//! Stream capture: the calls that it permits, and the list of captured work. Graphs, and the user
//! objects that they keep alive.
//!
//! A graph is stored as the order in which its work was captured. That is one of the orders that
//! its dependencies allow, and a launch uses it. The dependencies only decide whether a forked
//! stream was joined again.

use std::{
    cell::Cell,
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, ThreadId},
};

use sim_abi::{
    cuda::{CuError, ExecHandle, GraphHandle},
    ffi::Handles,
};

use crate::queue::Work;

/// CUstreamCaptureMode, of a capture and of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl Mode {
    /// The mode of the driver's number.
    pub fn new(number: u32) -> Result<Self, CuError> {
        [Mode::Global, Mode::ThreadLocal, Mode::Relaxed].get(number as usize).copied().ok_or(CuError::INVALID_VALUE)
    }
}

static ACTIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());
/// The length of `ACTIVE`, which can be read without its lock.
static ACTIVE_COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static THREAD_MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// cuThreadExchangeStreamCaptureMode.
pub fn exchange_thread_mode(mode: Mode) -> Mode {
    THREAD_MODE.replace(mode)
}

/// Rejects calls that could disturb a capture: a query, a wait, an allocation. The captures that
/// forbid them become invalid.
pub fn check_permitted() -> Result<(), CuError> {
    if ACTIVE_COUNT.load(Ordering::Acquire) == 0 || THREAD_MODE.get() == Mode::Relaxed {
        return Ok(());
    }
    let (thread, thread_mode) = (thread::current().id(), THREAD_MODE.get());
    let forbids = |capture: &&Arc<Capture>| match capture.mode {
        Mode::Relaxed => false,
        Mode::ThreadLocal => capture.thread == thread,
        Mode::Global => capture.thread == thread || thread_mode == Mode::Global,
    };
    let forbidding: Vec<_> = active().iter().filter(forbids).cloned().collect();
    forbidding.iter().for_each(|capture| capture.invalidate());
    if forbidding.is_empty() { Ok(()) } else { Err(CuError::CAPTURE_UNSUPPORTED) }
}

/// A stream as captures see it.
pub struct Participant {
    /// The id of the stream's queue.
    id: u64,
    /// Whether it is the legacy default stream, which cannot be captured.
    legacy: bool,
    capture: Mutex<Option<Arc<Capture>>>,
}

impl Participant {
    /// A stream outside of any capture.
    pub fn new(id: u64, legacy: bool) -> Arc<Self> {
        Arc::new(Participant { id, legacy, capture: Mutex::default() })
    }

    /// The capture that it takes part in.
    pub fn capture(&self) -> Option<Arc<Capture>> {
        self.capture.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Enters or leaves a capture.
    fn set_capture(&self, capture: Option<Arc<Capture>>) {
        *self.capture.lock().unwrap_or_else(PoisonError::into_inner) = capture;
    }
}

/// A running capture.
pub struct Capture {
    pub id: u64,
    /// The resulting graph. It has its handle from the beginning, and its work at the end of the
    /// capture.
    graph: Arc<Graph>,
    mode: Mode,
    thread: ThreadId,
    /// The queue's id of the stream in which it began.
    origin: u64,
    state: Mutex<State>,
}

struct State {
    valid: bool,
    ended: bool,
    /// Each with the nodes that precede it.
    nodes: Vec<(Work, Vec<usize>)>,
    /// By the queue's id: the stream, and the nodes that precede its next one.
    streams: HashMap<u64, (Weak<Participant>, Vec<usize>)>,
}

impl Capture {
    /// cuStreamBeginCapture.
    pub fn begin(stream: &Arc<Participant>, mode: Mode) -> Result<(), CuError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if stream.legacy {
            return Err(CuError::CAPTURE_UNSUPPORTED);
        }
        if stream.capture().is_some() {
            return Err(CuError::ILLEGAL_STATE);
        }
        let origin = stream.id;
        let graph = Arc::new(Graph::default());
        GRAPHS.insert(Arc::clone(&graph));
        let capture = Arc::new(Capture {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            graph,
            mode,
            thread: thread::current().id(),
            origin,
            state: Mutex::new(State {
                valid: true,
                ended: false,
                nodes: Vec::new(),
                streams: HashMap::from([(origin, (Arc::downgrade(stream), Vec::new()))]),
            }),
        });
        stream.set_capture(Some(Arc::clone(&capture)));
        let mut active = active();
        active.push(capture);
        ACTIVE_COUNT.store(active.len(), Ordering::Release);
        Ok(())
    }

    /// cuStreamEndCapture: the graph's handle.
    pub fn end(stream: &Arc<Participant>) -> Result<GraphHandle, CuError> {
        let capture = stream.capture().ok_or(CuError::ILLEGAL_STATE)?;
        if stream.id != capture.origin {
            capture.invalidate();
            return Err(CuError::CAPTURE_UNMATCHED);
        }
        if capture.mode != Mode::Relaxed && capture.thread != thread::current().id() {
            return Err(CuError::CAPTURE_WRONG_THREAD);
        }
        capture.finish();
        let captured = capture.take_nodes();
        let graph = capture.graph();
        if captured.is_err() {
            GRAPHS.remove(graph);
        }
        *capture.graph.nodes() = captured?;
        Ok(graph)
    }

    /// The handle of the graph that is being captured.
    pub fn graph(&self) -> GraphHandle {
        Arc::as_ptr(&self.graph) as GraphHandle
    }

    /// The recorded work in its order, when the origin ends the capture.
    fn take_nodes(&self) -> Result<Vec<Work>, CuError> {
        let mut state = self.lock();
        if !state.valid {
            return Err(CuError::CAPTURE_INVALIDATED);
        }
        if !state.all_joined(self.origin) {
            return Err(CuError::CAPTURE_UNJOINED);
        }
        Ok(std::mem::take(&mut state.nodes).into_iter().map(|(work, _)| work).collect())
    }

    /// Removes all streams from the capture.
    pub fn finish(self: &Arc<Self>) {
        let mut active = active();
        active.retain(|other| !Arc::ptr_eq(self, other));
        ACTIVE_COUNT.store(active.len(), Ordering::Release);
        drop(active);
        let mut state = self.lock();
        state.ended = true;
        let streams: Vec<_> = state.streams.values().filter_map(|(stream, _)| stream.upgrade()).collect();
        drop(state);
        streams.iter().for_each(|stream| stream.set_capture(None));
    }

    /// A forbidden call was made: the capture yields no graph.
    pub fn invalidate(&self) {
        self.lock().valid = false;
    }

    /// Whether it can still yield a graph.
    pub fn is_valid(&self) -> bool {
        self.lock().valid
    }

    /// Appends work of a stream that takes part.
    pub fn add(&self, stream: &Participant, work: Work) -> Result<(), CuError> {
        let mut state = self.lock();
        if !state.valid {
            return Err(CuError::CAPTURE_INVALIDATED);
        }
        let node = state.nodes.len();
        let (_, last) = state.streams.get_mut(&stream.id).ok_or(CuError::ILLEGAL_STATE)?;
        let after = std::mem::replace(last, vec![node]);
        state.nodes.push((work, after));
        Ok(())
    }

    /// The nodes that precede the stream's next one.
    pub fn last(&self, stream: &Participant) -> Result<Vec<usize>, CuError> {
        let state = self.lock();
        if !state.valid {
            return Err(CuError::CAPTURE_INVALIDATED);
        }
        state.streams.get(&stream.id).map(|(_, last)| last.clone()).ok_or(CuError::ILLEGAL_STATE)
    }

    /// Invalidates the capture with this id, if it has not ended.
    pub fn invalidate_active(id: u64) {
        if let Some(capture) = Self::find_active(id) {
            capture.invalidate();
        }
    }

    fn find_active(id: u64) -> Option<Arc<Self>> {
        active().iter().find(|capture| capture.id == id).cloned()
    }

    /// `stream` waits for an event captured by the capture with this id, and takes part in it from
    /// now on.
    pub fn join(id: u64, stream: &Arc<Participant>, after: &[usize]) -> Result<(), CuError> {
        if let Some(other) = stream.capture().filter(|other| other.id != id) {
            other.invalidate();
            Self::invalidate_active(id);
            return Err(CuError::CAPTURE_MERGE);
        }
        if stream.legacy {
            Self::invalidate_active(id);
            return Err(CuError::CAPTURE_IMPLICIT);
        }
        let capture = Self::find_active(id).ok_or(CuError::CAPTURED_EVENT)?;
        let mut state = capture.lock();
        if state.ended {
            return Err(CuError::CAPTURED_EVENT);
        }
        if !state.valid {
            return Err(CuError::CAPTURE_INVALIDATED);
        }
        let (_, last) = state.streams.entry(stream.id).or_insert_with(|| (Arc::downgrade(stream), Vec::new()));
        last.extend(after);
        drop(state);
        stream.set_capture(Some(capture));
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whether all captured work precedes the next work of `origin`.
    fn all_joined(&self, origin: u64) -> bool {
        let mut before = BTreeSet::new();
        let mut next: Vec<usize> = self.streams.get(&origin).map(|(_, last)| last.clone()).unwrap_or_default();
        while let Some(node) = next.pop() {
            if before.insert(node) {
                next.extend(&self.nodes[node].1);
            }
        }
        self.streams.values().all(|(_, last)| last.iter().all(|node| before.contains(node)))
    }
}

fn active() -> MutexGuard<'static, Vec<Arc<Capture>>> {
    ACTIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All live graphs.
pub static GRAPHS: Handles<Graph> = Handles::new();
/// All live instantiated graphs.
pub static EXECS: Handles<Exec> = Handles::new();
/// All live user objects.
pub static OBJECTS: Handles<UserObject> = Handles::new();

/// The work of a graph, in a valid order.
#[derive(Default)]
pub struct Graph {
    nodes: Mutex<Vec<Work>>,
    retained: Mutex<Vec<Retained>>,
}

/// An instantiated graph.
pub struct Exec {
    /// The work of a launch.
    pub nodes: Arc<[Work]>,
    _retained: Vec<Retained>,
}

impl Graph {
    /// The graph of a handle.
    pub fn find(handle: GraphHandle) -> Result<Arc<Self>, CuError> {
        GRAPHS.get(handle).ok_or(CuError::INVALID_VALUE)
    }

    /// Its work.
    pub fn nodes(&self) -> MutexGuard<'_, Vec<Work>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// cuGraphClone.
    pub fn duplicate(&self) -> Self {
        Graph { nodes: Mutex::new(self.nodes().clone()), retained: Mutex::new(self.retained().clone()) }
    }

    /// cuGraphInstantiate.
    pub fn instantiate(&self) -> ExecHandle {
        EXECS.insert(Arc::new(Exec { nodes: self.nodes().clone().into(), _retained: self.retained().clone() }))
    }

    /// cuGraphRetainUserObject: takes over `count` references that were counted already.
    pub fn retain(&self, object: &Arc<UserObject>, count: u32) {
        self.retained().push(Retained { object: Arc::clone(object), count });
    }

    /// cuGraphReleaseUserObject.
    pub fn release(&self, object: &Arc<UserObject>) -> Result<(), CuError> {
        let mut retained = self.retained();
        let place = retained.iter().position(|kept| Arc::ptr_eq(&kept.object, object)).ok_or(CuError::INVALID_VALUE)?;
        let kept = retained.swap_remove(place);
        drop(retained);
        drop(kept);
        Ok(())
    }

    fn retained(&self) -> MutexGuard<'_, Vec<Retained>> {
        self.retained.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A host object that lives as long as it is referenced.
pub struct UserObject {
    destroy: extern "C" fn(usize),
    data: usize,
    references: AtomicU32,
}

impl UserObject {
    /// cuUserObjectCreate.
    pub fn create(data: usize, destroy: extern "C" fn(usize), references: u32) -> usize {
        OBJECTS.insert(Arc::new(UserObject { destroy, data, references: AtomicU32::new(references) }))
    }

    /// The object of a handle.
    pub fn find(handle: usize) -> Result<Arc<Self>, CuError> {
        OBJECTS.get(handle).ok_or(CuError::INVALID_VALUE)
    }

    /// cuUserObjectRetain.
    pub fn retain(&self, count: u32) {
        self.references.fetch_add(count, Ordering::Relaxed);
    }

    /// cuUserObjectRelease: the last one destroys it.
    pub fn release(self: &Arc<Self>, count: u32) -> Result<(), CuError> {
        let less = |references: u32| references.checked_sub(count);
        let before = self.references.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        if before.map_err(|_| CuError::INVALID_VALUE)? == count {
            OBJECTS.remove(Arc::as_ptr(self) as usize);
            (self.destroy)(self.data);
        }
        Ok(())
    }
}

/// References of a graph, which it releases at its end.
struct Retained {
    object: Arc<UserObject>,
    count: u32,
}

impl Clone for Retained {
    fn clone(&self) -> Self {
        self.object.retain(self.count);
        Retained { object: Arc::clone(&self.object), count: self.count }
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        // The object has at least as many references as are counted here.
        let _ = self.object.release(self.count);
    }
}
