//! The samples of one process: for each thread, runs of samples with the same stack.

use std::collections::{BTreeMap, HashMap, VecDeque};

use xpu_timer_proto::{
    server::PySpyFrame,
    v1::{self, StackSamples},
};

/// Samples further apart than this many periods belong to different slices, even if they are equal.
const MOST_PERIODS_APART: u64 = 3;
/// With more stacks or threads than this, those that no slice refers to are forgotten.
const MOST_STACKS: usize = 4096;
const MOST_THREADS: usize = 1024;

/// A thread of the process: its id, and what distinguishes it from a later one with this id.
pub(super) type ThreadKey = (i32, u64);

/// The samples of one process.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    frames: Vec<PySpyFrame>,
    frame_numbers: HashMap<(String, String), u32>,
    stacks: Vec<Vec<u32>>,
    stack_numbers: HashMap<Vec<u32>, u32>,
    threads: BTreeMap<ThreadKey, RecordedThread>,
    /// As in [`StackSamples`].
    pub cut: u64,
    pub discarded: u64,
    pub missed: u64,
    pub notes: Vec<String>,
    /// When the first and the last sample were taken.
    pub from_ns: u64,
    pub until_ns: u64,
}

#[derive(Debug, Default)]
struct RecordedThread {
    name: String,
    is_main: bool,
    slices: VecDeque<Slice>,
}

/// A run of samples with the same stack.
#[derive(Debug, Clone, Copy)]
struct Slice {
    first_ns: u64,
    last_ns: u64,
    samples: u32,
    stack: u32,
}

impl Recorded {
    /// The number of a frame.
    pub(super) fn frame(&mut self, frame: PySpyFrame) -> u32 {
        let next = self.frames.len() as u32;
        let frames = &mut self.frames;
        *self.frame_numbers.entry((frame.func_name.clone(), frame.file_name.clone())).or_insert_with(|| {
            frames.push(frame);
            next
        })
    }

    /// The number of a stack, innermost frame first.
    pub(super) fn stack(&mut self, frames: &[u32]) -> u32 {
        if let Some(number) = self.stack_numbers.get(frames) {
            return *number;
        }
        let number = self.stacks.len() as u32;
        self.stacks.push(frames.to_vec());
        self.stack_numbers.insert(frames.to_vec(), number);
        number
    }

    /// Adds a sample.
    pub(super) fn add(&mut self, key: ThreadKey, about: (&str, bool), stack: u32, now_ns: u64, period_ns: u64) {
        let thread = self.threads.entry(key).or_default();
        if thread.name.is_empty() {
            thread.name = about.0.to_string();
        }
        thread.is_main = about.1;
        let apart_ns = MOST_PERIODS_APART.saturating_mul(period_ns);
        match thread.slices.back_mut() {
            Some(last) if last.stack == stack && now_ns.saturating_sub(last.last_ns) <= apart_ns => {
                last.last_ns = now_ns;
                last.samples = last.samples.saturating_add(1);
            }
            _ => thread.slices.push_back(Slice { first_ns: now_ns, last_ns: now_ns, samples: 1, stack }),
        }
    }

    /// Adds a note, unless there are many.
    pub(super) fn note(&mut self, text: String) {
        const MOST_NOTES: usize = 20;
        if self.notes.len() < MOST_NOTES && !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }

    /// Forgets slices that ended before a time, except for the newest `least` of each thread, and
    /// what only the forgotten ones refer to. Returns whether the numbers of frames and stacks are
    /// no longer valid.
    ///
    /// A thread that hangs is in one slice, and what it did before the hang is needed even if that
    /// was long ago.
    pub(super) fn forget_before(&mut self, ns: u64, least: usize) -> bool {
        // Most of so many threads have ended.
        let least = if self.threads.len() > MOST_THREADS { 0 } else { least };
        for thread in self.threads.values_mut() {
            while thread.slices.len() > least && thread.slices.front().is_some_and(|slice| slice.last_ns < ns) {
                thread.slices.pop_front();
            }
        }
        let kept_from_ns = self.threads.values().filter_map(|thread| thread.slices.front()).map(|slice| slice.first_ns);
        self.from_ns = kept_from_ns.min().unwrap_or(ns).min(ns).max(self.from_ns);
        if self.stacks.len() <= MOST_STACKS && self.threads.len() <= MOST_THREADS {
            return false;
        }
        self.threads.retain(|_, thread| !thread.slices.is_empty());
        let message = self.message(0, 0);
        self.frames = message.frames;
        self.frame_numbers = (0..)
            .zip(&self.frames)
            .map(|(number, frame)| ((frame.func_name.clone(), frame.file_name.clone()), number))
            .collect();
        self.stacks = message.stacks.into_iter().map(|stack| stack.frames).collect();
        self.stack_numbers = (0..).zip(&self.stacks).map(|(number, stack)| (stack.clone(), number)).collect();
        for (thread, new) in self.threads.values_mut().zip(message.threads) {
            thread.slices.iter_mut().zip(new.stack).for_each(|(slice, stack)| slice.stack = stack);
        }
        true
    }

    /// The samples taken at or after a time, as a message without what is known of the rank.
    pub(super) fn message(&self, from_ns: u64, period_ns: u64) -> StackSamples {
        let mut numbers: HashMap<u32, u32> = HashMap::new();
        let mut frame_numbers: HashMap<u32, u32> = HashMap::new();
        let mut message = StackSamples {
            format: xpu_timer_proto::samples::FORMAT,
            writer: env!("CARGO_PKG_VERSION").into(),
            from_ns: self.from_ns.max(from_ns),
            until_ns: self.until_ns,
            period_ns,
            cut: self.cut,
            discarded: self.discarded,
            missed: self.missed,
            notes: self.notes.clone(),
            ..StackSamples::default()
        };
        for ((tid, _), thread) in &self.threads {
            let mut columns = v1::SampledThread {
                tid: *tid,
                name: thread.name.clone(),
                main: thread.is_main,
                ..v1::SampledThread::default()
            };
            let mut before = 0;
            for slice in thread.slices.iter().filter(|slice| slice.last_ns >= from_ns) {
                let stack = *numbers.entry(slice.stack).or_insert_with(|| {
                    let frames = self.stacks[slice.stack as usize].iter().map(|frame| {
                        *frame_numbers.entry(*frame).or_insert_with(|| {
                            message.frames.push(self.frames[*frame as usize].clone());
                            message.frames.len() as u32 - 1
                        })
                    });
                    let frames = frames.collect();
                    message.stacks.push(v1::SampledStack { frames });
                    message.stacks.len() as u32 - 1
                });
                columns.first.push(slice.first_ns - before);
                columns.last.push(slice.last_ns - slice.first_ns);
                columns.samples.push(slice.samples);
                columns.stack.push(stack);
                before = slice.first_ns;
            }
            // With all slices, the threads are those of `self`.
            if from_ns == 0 || !columns.first.is_empty() {
                message.threads.push(columns);
            }
        }
        message
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: u64 = 10;

    fn frame(name: &str) -> PySpyFrame {
        PySpyFrame { func_name: name.into(), file_name: "a.py:1".into(), module: String::new() }
    }

    fn add(recorded: &mut Recorded, tid: i32, name: &str, now_ns: u64) {
        let number = recorded.frame(frame(name));
        let stack = recorded.stack(&[number]);
        recorded.add((tid, 0), ("T", true), stack, now_ns, PERIOD);
    }

    #[test]
    fn equal_neighbours_are_one_slice_and_a_gap_divides_them() {
        let mut recorded = Recorded::default();
        for (name, now) in [("a", 10), ("a", 20), ("b", 30), ("a", 40), ("a", 90)] {
            add(&mut recorded, 1, name, now);
        }
        let message = recorded.message(0, PERIOD);
        let thread = &message.threads[0];
        assert_eq!(thread.first, [10, 20, 10, 50]);
        assert_eq!(thread.last, [10, 0, 0, 0]);
        assert_eq!((&thread.samples[..], &thread.stack[..]), (&[2, 1, 1, 1][..], &[0, 1, 0, 0][..]));
        let late = recorded.message(35, PERIOD);
        assert_eq!((late.threads[0].first.clone(), late.frames), (vec![40, 50], vec![frame("a")]));
    }

    #[test]
    fn what_is_forgotten_takes_its_stacks_along() {
        let mut recorded = Recorded::default();
        let count = MOST_STACKS as u64 + 10;
        for now in 1..=count {
            add(&mut recorded, 1, &format!("f{now}"), now);
        }
        add(&mut recorded, 2, "old", 1);
        assert!(recorded.forget_before(count - 4, 0));
        assert_eq!((recorded.stacks.len(), recorded.frames.len(), recorded.threads.len()), (5, 5, 1));
        add(&mut recorded, 1, &format!("f{count}"), count + 1);
        let message = recorded.message(0, PERIOD);
        assert_eq!(message.threads[0].samples, [1, 1, 1, 1, 2]);
        assert_eq!(message.frames[4], frame(&format!("f{count}")));
        assert!(!recorded.forget_before(count + 5, 0));
        assert_eq!(recorded.message(1, PERIOD).threads, []);
    }

    #[test]
    fn what_a_thread_did_before_it_hung_is_kept() {
        let mut recorded = Recorded::default();
        for (name, now) in [("load", 10), ("step", 20), ("load", 30), ("step", 40)] {
            add(&mut recorded, 1, name, now);
        }
        for now in (50..5000).step_by(10) {
            add(&mut recorded, 1, "hung", now);
            assert!(!recorded.forget_before(now - 20.min(now), 3));
        }
        let message = recorded.message(0, PERIOD);
        assert_eq!((&message.threads[0].first[..], message.from_ns), (&[30, 10, 10][..], 30));
        assert_eq!(message.threads[0].samples, [1, 1, 495]);
    }
}
