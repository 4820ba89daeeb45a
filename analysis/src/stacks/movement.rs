//! What moved between the two samples of a process.

use xpu_timer_proto::server::{AwaitedKind, ProcessSample, PstackStacktrace, PySpyFrame, PySpyStacktrace, Stacktrace};

use super::{
    host::Movement,
    names::{file, is_library, own_frame},
    patterns,
    sample::ThreadStacks,
};

/// A process with less than this share of a processor computes nothing.
pub(super) const IDLE_SHARE: f64 = 0.05;
/// A lower rate, in bytes per second, is the noise of logs and of watchers' pipes, and not progress
/// of I/O.
pub(super) const MOVING_BYTES_PER_SECOND: f64 = 16_384.0;

pub(super) fn movement(
    dump: &Stacktrace,
    before: Option<ThreadStacks<'_>>,
    after: ThreadStacks<'_>,
) -> Option<Movement> {
    let first = dump.first_sample.as_ref()?;
    let last = dump.last_sample.as_ref()?;
    let before = before?;
    let between_ns = last.captured_unix_ns.saturating_sub(first.captured_unix_ns);
    if between_ns == 0 {
        return None;
    }
    let seconds = between_ns as f64 / 1e9;
    let io_bytes = bytes_between(first, last);
    Some(Movement {
        cpu_share: last.cpu_time_ns.saturating_sub(first.cpu_time_ns) as f64 / between_ns as f64,
        io_bytes,
        io: io_bytes as f64 / seconds >= MOVING_BYTES_PER_SECOND,
        // Frames that could not be read in one of the samples prove no move.
        own_frame: own_frames(before, after).is_some_and(|[before, after]| {
            (&before.func_name, &before.file_name) != (&after.func_name, &after.file_name)
        }),
        main_ran: before
            .0
            .zip(after.0)
            .is_some_and(|(before, after)| before.context_switches != after.context_switches),
        ..Movement::default()
    })
}

/// Bytes that a process read and wrote between two samples, including TCP connections. A counter
/// that could not be read counts as zero.
pub(super) fn bytes_between(first: &ProcessSample, last: &ProcessSample) -> u64 {
    let grown = |before: u64, after: u64| if before == 0 { 0 } else { after.saturating_sub(before) };
    grown(first.io_bytes, last.io_bytes).saturating_add(grown(first.tcp_bytes, last.tcp_bytes))
}

/// Whether the main thread is in a read or write of the same socket in both samples and woke up in
/// between: bytes came or went. The kernel does not count the bytes of `recv` and `send`.
pub(super) fn serves_socket((before, _): ThreadStacks<'_>, (after, _): ThreadStacks<'_>) -> bool {
    let socket = |thread: &PstackStacktrace| {
        let awaited = thread.awaited.as_ref().filter(|awaited| awaited.kind() == AwaitedKind::Socket)?;
        let moves = thread.syscall.is_some_and(|number| patterns::SOCKET_SYSCALLS.contains(&number));
        moves.then(|| (thread.syscall, awaited.name.clone()))
    };
    before.zip(after).is_some_and(|(before, after)| {
        before.context_switches != after.context_switches && socket(before).is_some() && socket(before) == socket(after)
    })
}

/// Whether the innermost Python frames of two samples are in libraries, and at different lines.
pub(super) fn within_library((_, before): ThreadStacks<'_>, (_, after): ThreadStacks<'_>) -> bool {
    let leaf = |python: Option<&PySpyStacktrace>| {
        let frame = python?.frames.first().filter(|frame| is_library(&frame.file_name))?;
        Some((frame.func_name.clone(), frame.file_name.clone()))
    };
    leaf(before).zip(leaf(after)).is_some_and(|(before, after)| before != after)
}

/// The innermost Python frames of the user's own code in two samples.
pub(super) fn own_frames<'a>(before: ThreadStacks<'a>, after: ThreadStacks<'a>) -> Option<[&'a PySpyFrame; 2]> {
    let own = |(_, python): ThreadStacks<'a>| own_frame(&python?.frames);
    Some([own(before)?, own(after)?])
}

/// Whether the user's own frames of two samples are in one function, at any lines.
pub(super) fn in_same_function(before: ThreadStacks<'_>, after: ThreadStacks<'_>) -> bool {
    own_frames(before, after).is_some_and(|[before, after]| {
        before.func_name == after.func_name && file(before).is_some() && file(before) == file(after)
    })
}
