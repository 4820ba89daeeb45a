//! Stops panics of the hook's own code, and causes them for tests.
//! `XPU_TIMER_TEST_PANIC=ncclAllReduce:3` panics at the third call of that function, `*:1` at the
//! first call of each. Without the variable this costs one load of a flag per call.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, atomic::Ordering},
};

use xpu_timer_proto::ring::header;

use crate::runtime::{
    lifecycle::config::{self, Environment},
    linker::function::Function,
    recorder::{self, Recorder},
};

/// Runs a part of the hook. A panic ends the part and is counted.
#[inline]
pub(crate) fn guarded<R>(part: impl FnOnce() -> R) -> Option<R> {
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

static WANTED: Mutex<Option<(String, u64)>> = Mutex::new(None);

/// Reads the variable at the start.
pub(crate) fn configure(recorder: &Recorder, environment: &Environment) {
    let wanted = config::value(environment, "XPU_TIMER_TEST_PANIC").and_then(parse);
    recorder.injects_panics.store(wanted.is_some(), Ordering::Relaxed);
    if let Ok(mut place) = WANTED.try_lock() {
        *place = wanted;
    }
}

fn parse(text: &str) -> Option<(String, u64)> {
    let (name, call) = text.split_once(':')?;
    Some((name.to_string(), call.parse().ok()?))
}

/// Panics if the variable names this call.
#[cold]
pub(crate) fn maybe_panic(function: &'static Function) {
    let Some(recorder) = recorder::running() else { return };
    let index = function.coverage.load(Ordering::Relaxed) as usize;
    let calls = recorder.calls(index);
    let hit = WANTED.try_lock().is_ok_and(|wanted| {
        wanted.as_ref().is_some_and(|(name, call)| (name == "*" || name == function.text()) && *call == calls)
    });
    assert!(!hit, "a test asked for this panic");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_names_a_function_and_a_call() {
        assert_eq!(parse("ncclAllReduce:3"), Some(("ncclAllReduce".into(), 3)));
        assert_eq!(parse("ncclAllReduce"), None);
        assert_eq!(parse("x:y"), None);
    }
}
