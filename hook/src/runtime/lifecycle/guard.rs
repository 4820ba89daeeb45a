//! Stops panics of the hook's own code.

use std::panic::{AssertUnwindSafe, catch_unwind};

use xpu_timer_proto::ring::header;

use crate::runtime::recorder;

/// Runs a part of the hook. A panic ends the part and is counted.
#[inline]
pub fn guarded<R>(part: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(part)).map_err(panicked).ok()
}

#[cold]
fn panicked(payload: Box<dyn std::any::Any + Send>) {
    // Dropping the payload may panic again.
    std::mem::forget(payload);
    if let Some(recorder) = recorder::running() {
        recorder.count(header::PANICS);
    }
}
