//! Records of an event: the marker that completes in a stream, and which record is the latest.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

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
    /// Of an event that was never recorded.
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
