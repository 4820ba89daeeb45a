//! Streams and events. Streams are in-order queues; the legacy default stream adds an order between
//! them. The latest record of an event counts.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak},
    time::Instant,
};

use sim_abi::{
    cuda::{CuError, STREAM_LEGACY, STREAM_PER_THREAD, StreamHandle},
    ffi::Handles,
};

use crate::{
    capture::{self, Capture, Participant},
    context::Context,
    process,
    queue::{LatestRecord, Marker, Queue, Record, Work},
};

/// CU_STREAM_NON_BLOCKING: no implicit order with the legacy stream.
pub const NON_BLOCKING: u32 = 1;

/// All live created streams.
pub static STREAMS: Handles<Stream> = Handles::new();

/// The legacy default stream of each context, by the context's id, created at its first use.
static LEGACY: Mutex<BTreeMap<u64, Arc<Stream>>> = Mutex::new(BTreeMap::new());
/// The streams of each context that are ordered with its legacy stream, by the context's id.
static BLOCKING: Mutex<BTreeMap<u64, Vec<Weak<Stream>>>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// The per-thread default stream of each context, by the context's id.
    static PER_THREAD: RefCell<HashMap<u64, Arc<Stream>>> = RefCell::default();
}

/// A stream.
pub struct Stream {
    pub context: Arc<Context>,
    pub queue: Arc<Queue>,
    pub flags: u32,
    pub priority: i32,
    legacy: bool,
    pub participant: Arc<Participant>,
    /// For each other queue, by its id, the position for which this stream has been made to wait.
    awaited: Mutex<HashMap<u64, u64>>,
}

impl Stream {
    /// A stream, which is registered if it is a blocking one.
    fn new(context: &Arc<Context>, flags: u32, priority: i32, legacy: bool) -> Arc<Self> {
        let queue = Queue::new(context.id);
        let stream = Arc::new(Stream {
            context: Arc::clone(context),
            participant: Participant::new(queue.id, legacy),
            queue,
            flags,
            priority: priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY),
            legacy,
            awaited: Mutex::default(),
        });
        if stream.is_blocking() {
            let mut blocking = lock(&BLOCKING);
            blocking.retain(|_, streams| {
                streams.retain(|stream| stream.strong_count() > 0);
                !streams.is_empty()
            });
            blocking.entry(context.id).or_default().push(Arc::downgrade(&stream));
        }
        stream
    }

    /// cuStreamCreate.
    pub fn create(context: &Arc<Context>, flags: u32, priority: i32) -> StreamHandle {
        STREAMS.insert(Self::new(context, flags, priority, false))
    }

    /// The stream of a handle; the default ones are those of the current context.
    pub fn find(handle: StreamHandle) -> Result<Arc<Self>, CuError> {
        match handle {
            0 | STREAM_LEGACY => {
                let context = Context::current()?;
                let mut legacy = lock(&LEGACY);
                if !legacy.contains_key(&context.id) {
                    legacy.retain(|_, stream| stream.context.is_alive());
                }
                Ok(legacy.entry(context.id).or_insert_with(|| Self::new(&context, 0, 0, true)).clone())
            }
            STREAM_PER_THREAD => {
                let context = Context::current()?;
                // The stream ends with its thread.
                let own = PER_THREAD.try_with(|streams| {
                    let mut streams = streams.borrow_mut();
                    streams.entry(context.id).or_insert_with(|| Self::new(&context, 0, 0, false)).clone()
                });
                own.map_err(|_| CuError::DEINITIALIZED)
            }
            handle => STREAMS.get(handle).ok_or(CuError::INVALID_HANDLE),
        }
    }

    /// cuStreamDestroy: submitted work is still done.
    pub fn destroy(handle: StreamHandle) -> Result<(), CuError> {
        STREAMS.remove(handle).map(drop).ok_or(CuError::INVALID_HANDLE)
    }

    /// The capture that it takes part in.
    pub fn capture(&self) -> Option<Arc<Capture>> {
        self.participant.capture()
    }

    /// Whether it and the legacy stream wait for each other.
    pub fn is_blocking(&self) -> bool {
        !self.legacy && self.flags & NON_BLOCKING == 0
    }

    /// Whether it is the legacy default stream.
    pub fn is_legacy(&self) -> bool {
        self.legacy
    }

    /// Hands work to the stream, or to its capture.
    pub fn submit(self: &Arc<Self>, work: Work) -> Result<(), CuError> {
        if let Some(capture) = self.capture() {
            return capture.add(&self.participant, work);
        }
        self.order_with_legacy()?;
        self.queue.push(work.launched()).map(drop)
    }

    /// Waits until everything submitted so far is done.
    pub fn synchronize(self: &Arc<Self>) -> Result<(), CuError> {
        self.check_not_capturing()?;
        if self.legacy {
            self.order_with_legacy()?;
        }
        self.queue.wait(self.queue.last());
        Ok(())
    }

    /// `Ok` when everything submitted so far is done.
    pub fn query(self: &Arc<Self>) -> Result<(), CuError> {
        self.check_not_capturing()?;
        let others = if self.legacy { blocking_streams(&self.context) } else { Vec::new() };
        let busy = std::iter::once(self).chain(&others).any(|stream| stream.queue.pending().is_some());
        if busy { Err(CuError::NOT_READY) } else { Ok(()) }
    }

    fn check_not_capturing(&self) -> Result<(), CuError> {
        if let Some(capture) = self.capture() {
            capture.invalidate();
            return Err(CuError::CAPTURE_UNSUPPORTED);
        }
        if self.legacy {
            self.check_legacy_permitted()?;
        }
        capture::check_permitted()
    }

    /// The legacy stream must not wait for a stream that is capturing, because no work is
    /// submitted.
    pub fn check_legacy_permitted(&self) -> Result<(), CuError> {
        let capturing: Vec<_> = blocking_streams(&self.context).iter().filter_map(|stream| stream.capture()).collect();
        capturing.iter().for_each(|capture| capture.invalidate());
        if capturing.is_empty() { Ok(()) } else { Err(CuError::CAPTURE_IMPLICIT) }
    }

    /// Orders work: the legacy stream's work comes after all earlier work of the blocking streams,
    /// and theirs after its.
    fn order_with_legacy(self: &Arc<Self>) -> Result<(), CuError> {
        if self.legacy {
            self.check_legacy_permitted()?;
            for other in blocking_streams(&self.context) {
                self.await_queue(&other.queue)?;
            }
        } else if self.is_blocking()
            && let Some(legacy) = existing_legacy(&self.context)
        {
            self.await_queue(&legacy.queue)?;
        }
        Ok(())
    }

    fn await_queue(&self, other: &Arc<Queue>) -> Result<(), CuError> {
        let Some(position) = other.pending() else { return Ok(()) };
        let known = self.awaited.lock().unwrap_or_else(PoisonError::into_inner).insert(other.id, position);
        if known != Some(position) {
            self.queue.push(Work::AwaitQueue(Arc::clone(other), position))?;
        }
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.queue.close();
    }
}

/// The streams of a context that are ordered with its legacy stream.
pub fn blocking_streams(context: &Context) -> Vec<Arc<Stream>> {
    lock(&BLOCKING).get(&context.id).into_iter().flatten().filter_map(Weak::upgrade).collect()
}

/// The legacy default stream of a context, if it was ever used.
fn existing_legacy(context: &Context) -> Option<Arc<Stream>> {
    lock(&LEGACY).get(&context.id).cloned()
}

fn lock<T>(registry: &Mutex<T>) -> MutexGuard<'_, T> {
    registry.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The range that cuCtxGetStreamPriorityRange returns.
pub const LEAST_PRIORITY: i32 = 0;
/// See [`LEAST_PRIORITY`].
pub const GREATEST_PRIORITY: i32 = -5;

/// The stream that a NULL stream means in a `_ptsz` function.
pub fn per_thread(handle: StreamHandle) -> StreamHandle {
    if handle == 0 { STREAM_PER_THREAD } else { handle }
}

/// CU_EVENT_DISABLE_TIMING.
const DISABLE_TIMING: u32 = 2;

/// Whether the use of an event whose context was destroyed ends the process, as it may with the
/// real driver: `XPU_SIM_DEAD_EVENTS_ABORT=1`.
static DEAD_EVENTS_ABORT: LazyLock<bool> = LazyLock::new(|| process::setting("XPU_SIM_DEAD_EVENTS_ABORT", 0) != 0);

/// The device's clock: `XPU_SIM_CLOCK=PPM,OFFSET_S` makes it PPM millionths faster than the host's,
/// and OFFSET_S seconds ahead of it.
static CLOCK: LazyLock<DeviceClock> = LazyLock::new(|| {
    let text = std::env::var("XPU_SIM_CLOCK").unwrap_or_default();
    let mut numbers = text.split(',').map(|number| number.trim().parse::<f64>().unwrap_or(0.0));
    let (ppm, offset_s) = (numbers.next().unwrap_or(0.0), numbers.next().unwrap_or(0.0));
    DeviceClock { since: Instant::now(), rate: 1.0 + ppm * 1e-6, offset_s }
});

struct DeviceClock {
    since: Instant,
    rate: f64,
    offset_s: f64,
}

impl DeviceClock {
    /// Its reading at a time of the host.
    fn seconds(&self, time: Instant) -> f64 {
        let after = time.saturating_duration_since(self.since).as_secs_f64();
        let before = self.since.saturating_duration_since(time).as_secs_f64();
        self.offset_s + (after - before) * self.rate
    }
}

/// All live events.
pub static EVENTS: Handles<Event> = Handles::new();

/// An event.
pub struct Event {
    context: Arc<Context>,
    timing: bool,
    latest: Arc<LatestRecord>,
}

impl Event {
    /// A new event of a context.
    pub fn create(context: &Arc<Context>, flags: u32) -> usize {
        EVENTS.insert(Arc::new(Event {
            context: Arc::clone(context.of_events()),
            timing: flags & DISABLE_TIMING == 0,
            latest: LatestRecord::never(),
        }))
    }

    /// The event of a handle.
    pub fn find(handle: usize) -> Result<Arc<Self>, CuError> {
        let event = EVENTS.get(handle).ok_or(CuError::INVALID_HANDLE)?;
        if *DEAD_EVENTS_ABORT && !event.context.is_alive() {
            eprintln!("an event of a destroyed context is used");
            std::process::abort();
        }
        Ok(event)
    }

    /// Records the event. With `external`, it becomes a node of its own if the stream is capturing.
    pub fn record(self: &Arc<Self>, stream: &Arc<Stream>, external: bool) -> Result<(), CuError> {
        if !Arc::ptr_eq(&self.context, stream.context.of_events()) {
            return Err(CuError::INVALID_HANDLE);
        }
        match stream.capture() {
            Some(capture) if external => {
                capture.add(&stream.participant, Work::RecordAtLaunch(Arc::clone(&self.latest)))
            }
            Some(capture) => {
                let after = capture.last(&stream.participant)?;
                *self.latest.lock() = Record::Captured(capture.id, after);
                Ok(())
            }
            None => {
                // The record must be in the stream before it is visible here: a full queue may
                // block forever, and until then a query answers for the previous record.
                let marker = Arc::<Marker>::default();
                stream.submit(Work::Record(Arc::clone(&marker)))?;
                *self.latest.lock() = Record::InStream(marker);
                Ok(())
            }
        }
    }

    /// Makes `stream` wait for the latest record.
    pub fn awaited_by(self: &Arc<Self>, stream: &Arc<Stream>) -> Result<(), CuError> {
        let marker = match &*self.latest.lock() {
            Record::Never => return Ok(()),
            Record::InStream(marker) => Arc::clone(marker),
            Record::Captured(capture, after) => return Capture::join(*capture, &stream.participant, after),
        };
        match stream.capture() {
            // The captured work would depend on work outside the graph.
            Some(capture) => {
                capture.invalidate();
                Err(CuError::CAPTURE_ISOLATION)
            }
            None if marker.time().is_some() => Ok(()),
            None => stream.submit(Work::Await(marker)),
        }
    }

    /// `Ok` when the latest record is complete, or there was none.
    pub fn query(&self) -> Result<(), CuError> {
        match self.outside_capture()? {
            Some(marker) if marker.time().is_none() => Err(CuError::NOT_READY),
            _ => Ok(()),
        }
    }

    /// Waits for the latest record.
    pub fn synchronize(&self) -> Result<(), CuError> {
        if let Some(marker) = self.outside_capture()? {
            marker.wait();
        }
        Ok(())
    }

    /// Milliseconds of the device's clock from this event to another one of its context.
    pub fn elapsed_ms(&self, end: &Event) -> Result<f32, CuError> {
        if !Arc::ptr_eq(&self.context, &end.context) {
            return Err(CuError::INVALID_HANDLE);
        }
        let times = [self, end].map(|event| match &*event.latest.lock() {
            Record::InStream(marker) if event.timing => marker.time().ok_or(CuError::NOT_READY),
            Record::Captured(..) => Err(CuError::CAPTURED_EVENT),
            _ => Err(CuError::INVALID_HANDLE),
        });
        let [start, end] = [times[0]?, times[1]?].map(|time| CLOCK.seconds(time));
        Ok(((end - start) * 1e3) as f32)
    }

    /// The latest record. This is not permitted for a captured event, nor while a capture forbids
    /// it.
    fn outside_capture(&self) -> Result<Option<Arc<Marker>>, CuError> {
        if !self.context.is_alive() {
            return Err(CuError::CONTEXT_IS_DESTROYED);
        }
        let marker = match &*self.latest.lock() {
            Record::Captured(capture, _) => {
                Capture::invalidate_active(*capture);
                return Err(CuError::CAPTURED_EVENT);
            }
            Record::InStream(marker) => Some(Arc::clone(marker)),
            Record::Never => None,
        };
        capture::check_permitted()?;
        Ok(marker)
    }
}
