//! Which thread of a process tells what its rank does: the main thread, or the one that trains while the main thread only waits for it.
//!
//! The flight record knows the thread that launched each operation. Another thread than the main one tells more when it launched
//! the newest operations and the main thread none of them, when it runs code of the program, and when the main thread waits for the end of a
//! thread, sleeps, or waits for a signal. A main thread that waits for a lock, a result or a message gives way only to a thread that is not
//! in a lock itself: two that wait for each other are better told by the main one. A thread that waits for its orders never counts.

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

/// So many of the newest operations are asked for their thread.
const NEWEST: usize = 32;

/// The thread that trains, by its id, when it is not the main one.
pub(crate) fn training_thread(dump: &Stacktrace, flight: Option<&FlightRecord>) -> Option<u32> {
    let flight = flight?;
    // Ids of another namespace name other threads here.
    let pid = flight.rank.as_ref()?.pid;
    if pid == 0 || pid != dump.pid {
        return None;
    }
    let (_, last) = samples(dump);
    let (native, python) = reporting_threads(last, dump.pid, None);
    let main = native.map(|thread| thread.pid).or_else(|| u32::try_from(pid).ok())?;
    // Communicators are often made before the thread is started.
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

/// Whether a thread runs what the program is about: frames of the user's own in Python; where there is no Python, any frames.
fn of_the_program((native, python): ThreadStacks<'_>, sample: Sample<'_>) -> bool {
    match python {
        Some(thread) => thread.frames.iter().any(|frame| !is_library(&frame.file_name)),
        None => sample.python.is_empty() && native.is_some_and(|thread| !thread.frames.is_empty()),
    }
}
