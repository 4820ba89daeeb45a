//! The tracks of a rank that do not show operations. Its counters have one each. Its sampled stacks
//! are nested slices on a track for each thread: a function that is on the stack in consecutive
//! samples is one slice.

use xpu_timer_proto::{
    samples::{self, Slice},
    server::PySpyFrame,
    v1::{SampledThread, StackSamples},
};

use super::{NEEDS_STATE, RankTrace, bytes, event, intern, interned_data, nested, packet, text, uint};
use crate::operations::{BUSY, MEMORY, busy_percent, memory};

/// Deeper frames are not drawn.
const MOST_FRAMES: usize = 256;

/// Fields of `CounterDescriptor`, and its unit of bytes.
mod counter {
    pub(super) const UNIT: u32 = 3;
    pub(super) const UNIT_NAME: u32 = 6;
    pub(super) const BYTES: u64 = 3;
}

/// Writes the counters. `busy` is when anything ran on the device, in times of the trace.
pub fn write_counters(trace: &mut RankTrace<'_>, busy: &[(u64, u64)]) {
    let (head, map) = (&trace.rank.head, trace.map);
    let percent = |out: &mut Vec<u8>| bytes(out, counter::UNIT_NAME, b"%");
    write_counter(trace, BUSY, percent, busy_percent(head, map, busy).into_iter());
    write_counter(trace, MEMORY, |out| uint(out, counter::UNIT, counter::BYTES), memory(head, map));
}

/// A counter of the process: from when on it has a value, and the value. `unit` encodes its
/// `CounterDescriptor`.
fn write_counter(
    trace: &mut RankTrace<'_>,
    name: &str,
    unit: impl FnOnce(&mut Vec<u8>),
    values: impl Iterator<Item = (u64, u64)>,
) {
    let mut values = values.peekable();
    if values.peek().is_none() {
        return;
    }
    let uuid = new_track(trace, name, |out| nested(out, 8, unit));
    for (ns, value) in values {
        event(&mut trace.out, trace.sequence, ns, event::COUNTER, uuid, |out| uint(out, event::COUNTER_VALUE, value));
        trace.counts.counters += 1;
    }
}

/// Writes the tracks of the sampled stacks of all threads.
pub fn write_samples(trace: &mut RankTrace<'_>, samples: &StackSamples) {
    for thread in &samples.threads {
        write_thread(trace, samples, thread);
    }
}

fn write_thread(trace: &mut RankTrace<'_>, samples: &StackSamples, thread: &SampledThread) {
    let uuid = new_track(trace, &track_name(thread), |_| {});
    each_call(samples, thread, |call| match call {
        Call::Begins(frame, ns) => {
            let (out, names) = (&mut trace.out, &mut trace.names);
            let iid = intern(out, trace.sequence, interned_data::EVENT_NAMES, names, &name_of(frame));
            let at = trace.map.apply(ns);
            event(out, trace.sequence, at, event::BEGIN, uuid, |out| uint(out, event::NAME_IID, iid));
            trace.counts.slices += 1;
        }
        Call::Ends(ns) => event(&mut trace.out, trace.sequence, trace.map.apply(ns), event::END, uuid, |_| {}),
    });
}

/// Adds a track to the process of the rank. Returns its id. `describe` adds to its description.
fn new_track(trace: &mut RankTrace<'_>, name: &str, describe: impl FnOnce(&mut Vec<u8>)) -> u64 {
    let (parent, uuid) = (trace.tracks[0].uuid, trace.new_track());
    packet(&mut trace.out, trace.sequence, NEEDS_STATE, |out| {
        nested(out, packet::TRACK_DESCRIPTOR, |out| {
            uint(out, 1, uuid);
            bytes(out, 2, text(name).as_bytes());
            uint(out, 5, parent);
            describe(out);
        });
    });
    uuid
}

/// The name of the track of a thread.
#[must_use]
pub fn track_name(thread: &SampledThread) -> String {
    let name = if thread.name.is_empty() { thread.tid.to_string() } else { thread.name.clone() };
    format!("host: {name} (sampled)")
}

/// The begin of a call on a thread, or the end of the innermost one, in the time of the node.
#[derive(Debug, Clone, Copy)]
pub enum Call<'a> {
    /// A function begins.
    Begins(&'a PySpyFrame, u64),
    /// The innermost function ends.
    Ends(u64),
}

/// Visits the calls of a thread in their order.
pub fn each_call<'a>(samples: &'a StackSamples, thread: &SampledThread, mut visit: impl FnMut(Call<'a>)) {
    // The open functions, root first.
    let mut open: Vec<(&str, &str)> = Vec::new();
    let close = |visit: &mut dyn FnMut(Call<'a>), count: usize, ns: u64| {
        (0..count).for_each(|_| visit(Call::Ends(ns)));
    };
    let mut slices = samples::slices(thread).peekable();
    while let Some(slice) = slices.next() {
        let frames = &samples.stacks[slice.stack as usize].frames;
        let functions: Vec<&PySpyFrame> =
            frames.iter().rev().take(MOST_FRAMES).map(|frame| &samples.frames[*frame as usize]).collect();
        let kept = open.iter().zip(&functions).take_while(|(open, frame)| **open == key(frame)).count();
        close(&mut visit, open.len() - kept, slice.first_ns);
        open.truncate(kept);
        for frame in &functions[kept..] {
            visit(Call::Begins(frame, slice.first_ns));
            open.push(key(frame));
        }
        let end_ns = end_of(&slice, samples.period_ns);
        if slices.peek().is_none_or(|next| next.first_ns > end_ns) {
            close(&mut visit, open.len(), end_ns);
            open.clear();
        }
    }
}

/// When a slice ends: a sample represents its period, and the next one if that follows late,
/// because each is taken at a random moment of its period.
#[must_use]
pub fn end_of(slice: &Slice, period_ns: u64) -> u64 {
    slice.last_ns.saturating_add(period_ns.saturating_mul(2))
}

/// A function, whatever line of it runs.
fn key(frame: &PySpyFrame) -> (&str, &str) {
    (&frame.func_name, frame.path())
}

/// `function (file.py)`.
#[must_use]
pub fn name_of(frame: &PySpyFrame) -> String {
    let path = frame.path();
    let file = path.rsplit_once('/').map_or(path, |(_, file)| file);
    format!("{} ({file})", frame.func_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short() {
        let frame = |file: &str| PySpyFrame { func_name: "step".into(), file_name: file.into(), module: String::new() };
        assert_eq!(name_of(&frame("/home/you/train.py:12")), "step (train.py)");
        assert_eq!(name_of(&frame("libc.so.6")), "step (libc.so.6)");
    }
}
