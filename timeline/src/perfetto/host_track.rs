//! The sampled stacks of a rank as nested slices, on a track for each thread. A function that is on
//! the stack in consecutive samples is one slice.

use xpu_timer_proto::{
    samples::{self, Slice},
    server::PySpyFrame,
    v1::{SampledThread, StackSamples},
};

use super::{NEEDS_STATE, RankTrace, bytes, event, intern, interned_data, nested, packet, text, uint};

/// Deeper frames are not drawn.
const MOST_FRAMES: usize = 256;

/// Writes the tracks of all threads.
pub fn write(trace: &mut RankTrace<'_>, samples: &StackSamples) {
    for thread in &samples.threads {
        write_thread(trace, samples, thread);
    }
}

fn write_thread(trace: &mut RankTrace<'_>, samples: &StackSamples, thread: &SampledThread) {
    let (parent, uuid) = (trace.tracks[0].uuid, trace.new_track());
    let name = if thread.name.is_empty() { thread.tid.to_string() } else { thread.name.clone() };
    packet(&mut trace.out, trace.sequence, NEEDS_STATE, |out| {
        nested(out, packet::TRACK_DESCRIPTOR, |out| {
            uint(out, 1, uuid);
            bytes(out, 2, text(&format!("host: {name} (sampled)")).as_bytes());
            uint(out, 5, parent);
        });
    });
    // The open functions, root first.
    let mut open: Vec<(&str, &str)> = Vec::new();
    let mut slices = samples::slices(thread).peekable();
    while let Some(slice) = slices.next() {
        let frames = &samples.stacks[slice.stack as usize].frames;
        let functions: Vec<&PySpyFrame> =
            frames.iter().rev().take(MOST_FRAMES).map(|frame| &samples.frames[*frame as usize]).collect();
        let kept = open.iter().zip(&functions).take_while(|(open, frame)| **open == key(frame)).count();
        close(trace, uuid, open.len() - kept, slice.first_ns);
        open.truncate(kept);
        for frame in &functions[kept..] {
            let iid =
                intern(&mut trace.out, trace.sequence, interned_data::EVENT_NAMES, &mut trace.names, &name_of(frame));
            let at = trace.map.apply(slice.first_ns);
            event(&mut trace.out, trace.sequence, at, event::BEGIN, uuid, |out| uint(out, event::NAME_IID, iid));
            trace.counts.slices += 1;
            open.push(key(frame));
        }
        let end_ns = end_of(&slice, samples.period_ns);
        if slices.peek().is_none_or(|next| next.first_ns > end_ns) {
            close(trace, uuid, open.len(), end_ns);
            open.clear();
        }
    }
}

/// When a slice ends: a sample stands for its period, and for the next one if that follows late,
/// because each is taken at a random moment of its period.
#[must_use]
pub fn end_of(slice: &Slice, period_ns: u64) -> u64 {
    slice.last_ns.saturating_add(period_ns.saturating_mul(2))
}

fn close(trace: &mut RankTrace<'_>, uuid: u64, count: usize, ns: u64) {
    let at = trace.map.apply(ns);
    for _ in 0..count {
        event(&mut trace.out, trace.sequence, at, event::END, uuid, |_| {});
    }
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
