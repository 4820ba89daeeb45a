//! How long a rank has been in one function, from the sampled stacks of its main thread.

use xpu_timer_proto::{
    samples::{self, Slice},
    v1::{Evidence, HostStay, StackSamples},
};

use crate::verdict::EvidenceLine;

/// A shorter stay is not worth a line.
const SHORTEST_NS: u64 = 5_000_000_000;
/// Two functions of a stack are in it for equally long if the shorter time is at least this share
/// of the longer one, in percent.
const SHARE: u64 = 90;
/// Samples further apart than this many periods say nothing about the time between them.
const MOST_PERIODS_APART: u64 = 3;
/// Lines of a verdict.
const MOST_LINES: usize = 8;

/// The function in which the main thread has been for a while: the outermost one that it entered
/// within the samples, or the user's innermost function among those that have been in the stack for
/// equally long. `None` if there are no samples, or no Python code runs.
#[must_use]
pub fn stay(samples: &StackSamples) -> Option<HostStay> {
    let thread = samples.threads.iter().find(|thread| thread.main)?;
    let slices: Vec<Slice> = samples::slices(thread).collect();
    let last = slices.last()?;
    let frames = |slice: &Slice| samples.stacks[slice.stack as usize].frames.iter().rev();
    let functions = |slice: &Slice| {
        let key = |frame: &u32| {
            let frame = &samples.frames[*frame as usize];
            (frame.func_name.as_str(), frame.path())
        };
        frames(slice).map(key).collect::<Vec<_>>()
    };
    let now = functions(last);
    // When each function of the current stack was entered.
    let mut entered_ns = vec![0; now.len()];
    let (mut kept, mut first_ns) = (now.len(), last.first_ns);
    for slice in slices.iter().rev().skip(1) {
        if first_ns.saturating_sub(slice.last_ns) > samples.period_ns.saturating_mul(MOST_PERIODS_APART) {
            break;
        }
        let common = functions(slice).iter().zip(&now[..kept]).take_while(|(one, other)| one == other).count();
        entered_ns[common..kept].fill(first_ns);
        (kept, first_ns) = (common, slice.first_ns);
    }
    entered_ns[..kept].fill(first_ns);
    let outermost = kept.min(now.len().checked_sub(1)?);
    let for_ns = |depth: usize| last.last_ns.saturating_sub(entered_ns[depth]);
    let is_equal = |one_ns: u64, other_ns: u64| one_ns.min(other_ns) >= one_ns.max(other_ns) / 100 * SHARE;
    let mut deepest_first = (0..now.len()).rev().filter(|depth| is_equal(for_ns(*depth), for_ns(outermost)));
    // The user's own code says more than a library that it calls.
    let depth = deepest_first.find(|depth| !is_library(now[*depth].1)).unwrap_or(outermost);
    let frame = frames(last).nth(depth)?;
    let place = samples.frames[*frame as usize].file_name.clone();
    Some(HostStay { function: now[depth].0.to_string(), place, for_ns: for_ns(depth), at_least: depth < kept })
}

/// Whether a file belongs to the interpreter or to an installed package.
fn is_library(path: &str) -> bool {
    path.contains("/lib/python") || path.starts_with("<frozen")
}

/// The lines about ranks that have been in one function for long.
pub(crate) fn lines(evidence: &Evidence, ranks: &[u32]) -> Vec<EvidenceLine> {
    let of_ranks = evidence.ranks.iter().filter(|rank| ranks.contains(&rank.rank));
    let line = |(rank, stay): (u32, &HostStay)| {
        let place = stay.place.rsplit_once('/').map_or(stay.place.as_str(), |(_, file)| file);
        let least = if stay.at_least { "at least " } else { "" };
        let (function, seconds) = (&stay.function, stay.for_ns as f64 / 1e9);
        let text = format!("rank {rank} has been in {function} ({place}) for {least}{seconds:.0} s");
        EvidenceLine { text, ranks: vec![rank] }
    };
    let stays = of_ranks.filter_map(|rank| Some((rank.rank, rank.stay.as_ref()?)));
    stays.filter(|(_, stay)| stay.for_ns >= SHORTEST_NS).take(MOST_LINES).map(line).collect()
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::{
        server::PySpyFrame,
        v1::{RankEvidence, SampledStack, SampledThread},
    };

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// A main thread with these stacks, root first, each for its number of seconds at two samples a
    /// second.
    fn samples(stacks: &[(&[&str], u64)]) -> StackSamples {
        let mut samples = StackSamples { period_ns: SECOND / 2, ..StackSamples::default() };
        let mut thread = SampledThread { main: true, ..SampledThread::default() };
        let mut before = 0;
        for (stack, seconds) in stacks {
            let mut frames = Vec::new();
            for name in stack.iter().rev() {
                frames.push(samples.frames.len() as u32);
                let path = if name.starts_with("lib_") { "/opt/lib/python3.11/queue.py" } else { "/home/you/train.py" };
                let file_name = format!("{path}:{}", samples.frames.len());
                samples.frames.push(PySpyFrame { func_name: (*name).into(), file_name, module: String::new() });
            }
            thread.stack.push(samples.stacks.len() as u32);
            samples.stacks.push(SampledStack { frames });
            thread.first.push(before);
            thread.last.push(seconds * SECOND - SECOND / 2);
            thread.samples.push(*seconds as u32 * 2);
            before = seconds * SECOND;
        }
        samples.threads.push(thread);
        samples
    }

    fn shown(stacks: &[(&[&str], u64)]) -> String {
        let stay = stay(&samples(stacks));
        let ranks = vec![RankEvidence { rank: 5, stay, ..RankEvidence::default() }];
        let lines = lines(&Evidence { ranks, ..Evidence::default() }, &[5]);
        lines.into_iter().map(|line| line.text).collect()
    }

    #[test]
    fn the_function_that_was_entered_last_is_named() {
        let text = shown(&[
            (&["main", "step"], 60),
            (&["main", "evaluate", "read"], 20),
            (&["main", "evaluate", "score"], 15),
            (&["main", "evaluate", "read"], 5),
        ]);
        assert_eq!(text, "rank 5 has been in evaluate (train.py:9) for 40 s");
    }

    #[test]
    fn a_call_that_takes_all_the_time_is_named_in_place_of_its_caller() {
        let text =
            shown(&[(&["main", "load"], 10), (&["main", "step", "forward"], 1), (&["main", "step", "wait"], 30)]);
        assert_eq!(text, "rank 5 has been in wait (train.py:5) for 30 s");
        let text = shown(&[(&["main", "load"], 10), (&["main", "step", "lib_wait"], 30)]);
        assert_eq!(text, "rank 5 has been in step (train.py:3) for 30 s", "a library is not named");
    }

    #[test]
    fn what_lasts_for_all_samples_has_lasted_for_at_least_that_long() {
        assert_eq!(shown(&[(&["main", "wait"], 100)]), "rank 5 has been in wait (train.py:0) for at least 100 s");
        let text = shown(&[(&["main", "step", "lib_wait"], 100)]);
        assert_eq!(text, "rank 5 has been in step (train.py:1) for at least 100 s", "a library is not named");
        assert_eq!(shown(&[(&["main", "step"], 100), (&["main", "save"], 3)]), "", "it is short");
        assert_eq!(shown(&[(&[], 100)]), "", "no Python code");
        assert_eq!(stay(&StackSamples::default()), None);
    }
}
