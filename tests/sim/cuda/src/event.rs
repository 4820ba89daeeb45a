//! Events: the latest record counts.

use std::sync::{Arc, LazyLock};

use sim_abi::{cuda::CuError, handles::Handles};

use crate::{
    capture::{self, Capture},
    context::Context,
    process,
    queue::Work,
    record::{LatestRecord, Marker, Record},
    stream::Stream,
};

/// CU_EVENT_DISABLE_TIMING.
const DISABLE_TIMING: u32 = 2;

/// Whether the use of an event whose context was destroyed ends the process, as it may with the
/// real driver: `XPU_SIM_DEAD_EVENTS_ABORT=1`.
static DEAD_EVENTS_ABORT: LazyLock<bool> = LazyLock::new(|| process::setting("XPU_SIM_DEAD_EVENTS_ABORT", 0) != 0);

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

    /// Milliseconds from this event to another.
    pub fn elapsed_ms(&self, end: &Event) -> Result<f32, CuError> {
        let times = [self, end].map(|event| match &*event.latest.lock() {
            Record::InStream(marker) if event.timing => marker.time().ok_or(CuError::NOT_READY),
            Record::Captured(..) => Err(CuError::CAPTURED_EVENT),
            _ => Err(CuError::INVALID_HANDLE),
        });
        let [start, end] = [times[0]?, times[1]?];
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        Ok(end.checked_duration_since(start).map_or_else(|| -ms(start.duration_since(end)), ms) as f32)
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
