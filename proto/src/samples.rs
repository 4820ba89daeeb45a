//! Files of stack samples: the stacks of the threads of one process over time.
//! `xpu_timer/v1/timeline.proto` describes the message.

use std::io;

use crate::{
    lenient,
    v1::{SampledThread, StackSamples},
};

/// Version of the format.
pub const FORMAT: u32 = 1;
/// Extension of the files.
pub const EXTENSION: &str = "samples";
/// A larger file is not read.
pub const MOST_BYTES: u64 = 1 << 30;

/// Name of the file of one rank.
#[must_use]
pub fn file_name(rank: u32, world_size: u32) -> String {
    name_of_rank(rank, world_size, EXTENSION)
}

/// Name of a file of one rank.
pub(crate) fn name_of_rank(rank: u32, world_size: u32, extension: &str) -> String {
    format!("{rank:05}-{world_size:05}.{extension}")
}

/// A run of samples with the same stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// Time of its first sample, CLOCK_MONOTONIC.
    pub first_ns: u64,
    /// Time of its last sample.
    pub last_ns: u64,
    /// Number of samples.
    pub samples: u32,
    /// Index into `StackSamples::stacks`.
    pub stack: u32,
}

/// Decodes a file.
///
/// # Errors
/// It is not such a file, it is of a newer format, or its indices point nowhere.
pub fn decode(bytes: &[u8]) -> io::Result<StackSamples> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let samples: StackSamples = lenient::decode(bytes).map_err(|error| invalid(error.to_string()))?;
    if samples.format != FORMAT {
        return Err(invalid(format!(
            "the samples have format {}, and this program reads format {FORMAT}: update xpu_timer",
            samples.format
        )));
    }
    let (stacks, frames) = (samples.stacks.len(), samples.frames.len());
    let points = |index: &u32, count: usize| (*index as usize) < count;
    let are_frames = samples.stacks.iter().flat_map(|stack| &stack.frames).all(|frame| points(frame, frames));
    let are_columns = samples.threads.iter().all(|thread| {
        let rows = thread.first.len();
        let is_column = [thread.last.len(), thread.samples.len(), thread.stack.len()].iter().all(|len| *len == rows);
        is_column && thread.stack.iter().all(|stack| points(stack, stacks))
    });
    if are_frames && are_columns { Ok(samples) } else { Err(invalid("the samples contradict themselves".into())) }
}

/// The slices of a thread, oldest first.
pub fn slices(thread: &SampledThread) -> impl Iterator<Item = Slice> + '_ {
    let mut first_ns = 0_u64;
    let rest = thread.last.iter().zip(&thread.samples).zip(&thread.stack);
    thread.first.iter().zip(rest).map(move |(since, ((length, samples), stack))| {
        first_ns = first_ns.saturating_add(*since);
        Slice { first_ns, last_ns: first_ns.saturating_add(*length), samples: *samples, stack: *stack }
    })
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::v1::SampledStack;

    fn samples() -> StackSamples {
        StackSamples {
            format: FORMAT,
            threads: vec![SampledThread {
                first: vec![100, 20],
                last: vec![10, 0],
                samples: vec![3, 1],
                stack: vec![0, 1],
                ..SampledThread::default()
            }],
            stacks: vec![SampledStack { frames: vec![0] }, SampledStack::default()],
            frames: vec![Default::default()],
            ..StackSamples::default()
        }
    }

    #[test]
    fn slices_have_absolute_times() {
        let read = decode(&samples().encode_to_vec()).unwrap();
        let slices: Vec<Slice> = slices(&read.threads[0]).collect();
        assert_eq!(slices[0], Slice { first_ns: 100, last_ns: 110, samples: 3, stack: 0 });
        assert_eq!(slices[1], Slice { first_ns: 120, last_ns: 120, samples: 1, stack: 1 });
        assert_eq!(file_name(3, 8), "00003-00008.samples");
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let broken = |change: fn(&mut StackSamples)| {
            let mut samples = samples();
            change(&mut samples);
            decode(&samples.encode_to_vec()).unwrap_err().to_string()
        };
        assert!(broken(|samples| samples.format = 9).contains("update xpu_timer"));
        assert!(broken(|samples| samples.stacks[0].frames = vec![1]).contains("contradict"));
        assert!(broken(|samples| samples.threads[0].stack = vec![0, 2]).contains("contradict"));
        assert!(broken(|samples| samples.threads[0].last = vec![1]).contains("contradict"));
        assert!(decode(b"\xff\xff").is_err());
    }
}
