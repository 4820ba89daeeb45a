//! Events: the latest record counts.

use std::{
    sync::{Arc, LazyLock},
    time::Instant,
};

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

/// The device's clock: `XPU_SIM_CLOCK=PPM,OFFSET_S` makes it faster than the host's by so many
/// millionths, and ahead of it.
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
    /// What it shows at a time of the host.
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
