//! Which thread represents a process: the main thread, or the training thread while the main thread
//! only waits for it.
//!
//! The flight record has the thread that launched each operation. Another thread than the main one
//! represents the process under these conditions: it launched the newest operations and the main
//! thread none of them; it runs code of the program; and the main thread waits for the end of a
//! thread, sleeps, or waits for a signal. If the main thread waits for a lock, a result or a
//! message, the other thread must not be in a lock itself: of two threads that wait for each other,
//! the main one says more. A thread that waits for its tasks never counts.

use xpu_timer_proto::{
    server::Stacktrace,
    v1::{FlightRecord, OpKind, Operation},
};

use super::{
    classify::{classify, in_queue, joins_thread, waits_for_network, waits_for_signal},
    names::is_library,
    sample::{Sample, ThreadStacks, reporting_threads, samples},
};
use crate::verdict::Activity;

/// Number of newest operations whose threads are considered.
const NEWEST: usize = 32;

/// The id of the training thread, if it is not the main thread.
pub(crate) fn training_thread(dump: &Stacktrace, flight: Option<&FlightRecord>) -> Option<u32> {
    let flight = flight?;
    // The ids of another pid namespace belong to other threads here.
    let pid = flight.rank.as_ref()?.pid;
    if pid == 0 || pid != dump.pid {
        return None;
    }
    let (_, last) = samples(dump);
    let (native, python) = reporting_threads(last, dump.pid, None);
    let main = native.map(|thread| thread.pid).or_else(|| u32::try_from(pid).ok())?;
    // Communicators are often created before the thread is started.
    let launched = |operation: &&Operation| operation.kind() != OpKind::HostCall;
    let newest = || flight.operations.iter().rev().filter(launched).take(NEWEST).map(|operation| operation.tid);
    let tid = newest().next().filter(|tid| *tid != 0)?;
    if newest().any(|launched_by| launched_by == main) {
        return None;
    }
    let candidate = reporting_threads(last, dump.pid, Some(tid));
    let doing = |(native, python): ThreadStacks<'_>| classify(native, python).activity;
    if !of_the_program(candidate, last) || candidate.1.is_some_and(|thread| in_queue(&thread.frames)) {
        return None;
    }
    let activity = doing((native, python));
    if joins_thread(native, python) || activity == Activity::Sleep || waits_for_signal(native) {
        return Some(tid);
    }
    let waits = activity == Activity::Lock || native.is_some_and(waits_for_network);
    (waits && doing(candidate) != Activity::Lock).then_some(tid)
}

/// Whether a thread runs code of the program: frames of the user's own in Python; any frames in a
/// process without Python.
fn of_the_program((native, python): ThreadStacks<'_>, sample: Sample<'_>) -> bool {
    match python {
        Some(thread) => thread.frames.iter().any(|frame| !is_library(&frame.file_name)),
        None => sample.python.is_empty() && native.is_some_and(|thread| !thread.frames.is_empty()),
    }
}
