//! Stack samples of all ranks as profiles: folded stacks with their number of samples, groups of
//! ranks that spend their time differently, and the file format of speedscope.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
};

use serde_json::{Value, json};
use xpu_timer_analysis::{folded::push_name, rank_set::RankSet};
use xpu_timer_proto::{
    printable, samples,
    server::PySpyFrame,
    v1::{SampledThread, StackSamples},
};

/// Stands for the stack of a thread that runs no Python code.
const NO_FRAMES: &str = "no Python code";
/// Stands for the name of a thread without one.
const NO_NAME: &str = "a thread without a name";
/// Ranks belong to different groups if a function has a share of their time that differs by more
/// than this.
const MOST_DIFFERENCE: f64 = 0.1;
/// A smaller difference may be chance: this many standard deviations.
const CHANCE: f64 = 4.0;
/// Functions of a group that are listed.
const LISTED: usize = 5;

/// The samples of one process.
#[derive(Debug)]
pub struct RankSamples {
    /// The number in the name of its file: the rank, or its place among processes without ranks.
    pub rank: u32,
    /// The samples.
    pub samples: StackSamples,
}

/// Stacks with their number of samples, root first.
pub type Weights = BTreeMap<Vec<String>, u64>;

/// Ranks that spend their time alike.
#[derive(Debug)]
pub struct Group {
    /// The ranks.
    pub ranks: RankSet,
    /// Their functions with the largest share of the time of the main threads by themselves: the
    /// share, and `function@file`.
    pub top: Vec<(f64, String)>,
}

impl RankSamples {
    /// The threads that a comparison of ranks is about: the main ones, or all if there are none.
    fn main_threads(&self) -> impl Iterator<Item = &SampledThread> {
        let has_main = self.samples.threads.iter().any(|thread| thread.main);
        self.samples.threads.iter().filter(move |thread| thread.main || !has_main)
    }

    /// Number of samples of all threads.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.samples.threads.iter().map(samples_of).sum()
    }

    /// Adds the stacks of all threads. The root of a stack is its thread if there are several.
    pub fn add_weights(&self, weights: &mut Weights) {
        let names: Vec<String> = self.samples.frames.iter().map(name_of).collect();
        let is_alone = self.samples.threads.len() == 1;
        for thread in &self.samples.threads {
            let name = if thread.name.is_empty() { NO_NAME } else { thread.name.as_str() };
            let root = (!is_alone).then(|| clean(name));
            for slice in samples::slices(thread) {
                let frames = &self.samples.stacks[slice.stack as usize].frames;
                let stack = root.iter().cloned().chain(frames.iter().rev().map(|frame| names[*frame as usize].clone()));
                let stack = stack.chain(frames.is_empty().then(|| NO_FRAMES.to_string()));
                *weights.entry(stack.collect()).or_default() += u64::from(slice.samples);
            }
        }
    }

    /// The shares of functions: of the time in which they are on the stack, and of the time in
    /// which they are its innermost frame.
    fn shares(&self) -> (HashMap<String, f64>, HashMap<String, f64>) {
        let functions: Vec<String> = self.samples.frames.iter().map(function).collect();
        let (mut on_stack, mut innermost): (HashMap<&str, u64>, HashMap<&str, u64>) = Default::default();
        let mut total = 0;
        for slice in self.main_threads().flat_map(samples::slices) {
            let count = u64::from(slice.samples);
            total += count;
            let frames = self.samples.stacks[slice.stack as usize].frames.iter();
            let names: Vec<&str> = frames.map(|frame| functions[*frame as usize].as_str()).collect();
            *innermost.entry(names.first().copied().unwrap_or(NO_FRAMES)).or_default() += count;
            for name in names.iter().copied().collect::<BTreeSet<_>>() {
                *on_stack.entry(name).or_default() += count;
            }
        }
        let shares = |counts: HashMap<&str, u64>| {
            counts.into_iter().map(|(name, count)| (name.to_string(), count as f64 / total.max(1) as f64)).collect()
        };
        (shares(on_stack), shares(innermost))
    }
}

fn samples_of(thread: &SampledThread) -> u64 {
    thread.samples.iter().map(|count| u64::from(*count)).sum()
}

fn name_of(frame: &PySpyFrame) -> String {
    let mut name = String::new();
    push_name(&mut name, &frame.func_name, &frame.file_name);
    name
}

/// The name of a frame without its line.
fn function(frame: &PySpyFrame) -> String {
    let mut name = String::new();
    push_name(&mut name, &frame.func_name, line_of(&frame.file_name).0);
    name
}

/// `path:line` as path and line.
fn line_of(place: &str) -> (&str, Option<u32>) {
    match place.rsplit_once(':') {
        Some((path, line)) => (path, line.parse().ok()),
        None => (place, None),
    }
}

fn clean(text: &str) -> String {
    text.chars().map(|c| if c == ';' { ',' } else { printable::shown(c) }).collect()
}

/// The stacks of some ranks together.
#[must_use]
pub fn weights<'a>(ranks: impl Iterator<Item = &'a RankSamples>) -> Weights {
    let mut weights = Weights::new();
    ranks.for_each(|rank| rank.add_weights(&mut weights));
    weights
}

/// The folded text: one line for each stack, its names from the root joined by `;`, and its number
/// of samples. Stacks with a common beginning follow each other.
#[must_use]
pub fn folded(weights: &Weights) -> String {
    weights.iter().map(|(stack, count)| format!("{} {count}\n", stack.join(";"))).collect()
}

/// The ranks in groups, largest first. A rank joins the first group whose lowest rank spends its
/// time like it.
#[must_use]
pub fn groups(ranks: &[RankSamples]) -> Vec<Group> {
    let mut groups: Vec<(Vec<&RankSamples>, HashMap<String, f64>, u64)> = Vec::new();
    for rank in ranks {
        let (shares, _) = rank.shares();
        let count: u64 = rank.main_threads().map(samples_of).sum();
        let is_like = |(_, of_group, their_count): &(Vec<_>, HashMap<String, f64>, u64)| {
            let fewest = count.min(*their_count).max(1) as f64;
            let most = MOST_DIFFERENCE.max(CHANCE * (0.5 / fewest).sqrt());
            let share = |of: &HashMap<String, f64>, name: &String| of.get(name).copied().unwrap_or(0.0);
            let names = shares.keys().chain(of_group.keys());
            names.into_iter().all(|name| (share(&shares, name) - share(of_group, name)).abs() <= most)
        };
        match groups.iter_mut().find(|group| is_like(group)) {
            Some((members, ..)) => members.push(rank),
            None => groups.push((vec![rank], shares, count)),
        }
    }
    groups.sort_by_key(|(members, ..)| std::cmp::Reverse(members.len()));
    groups.into_iter().map(|(members, ..)| group(&members)).collect()
}

fn group(members: &[&RankSamples]) -> Group {
    let mut mean: HashMap<String, f64> = HashMap::new();
    for member in members {
        for (name, share) in member.shares().1 {
            *mean.entry(name).or_default() += share / members.len() as f64;
        }
    }
    let mut top: Vec<(f64, String)> = mean.into_iter().map(|(name, share)| (share, name)).collect();
    top.sort_by(|one, other| other.0.total_cmp(&one.0).then_with(|| one.1.cmp(&other.1)));
    top.truncate(LISTED);
    Group { ranks: members.iter().map(|member| member.rank).collect(), top }
}

/// Writes the samples of all threads in the format of <https://www.speedscope.app>, with a profile
/// for each thread.
///
/// # Errors
/// The errors of `out`.
pub fn write_speedscope(ranks: &[RankSamples], name: &str, mut out: impl io::Write) -> io::Result<()> {
    let mut numbers: HashMap<(&str, &str), usize> = HashMap::new();
    let mut frames: Vec<Value> = Vec::new();
    let mut of_rank: Vec<Vec<usize>> = Vec::new();
    for rank in ranks {
        let of_frames = rank.samples.frames.iter().map(|frame| {
            *numbers.entry((&frame.func_name, &frame.file_name)).or_insert_with(|| {
                let (file, line) = line_of(&frame.file_name);
                let mut value = json!({ "name": frame.func_name, "file": file });
                if let Some(line) = line {
                    value["line"] = json!(line);
                }
                frames.push(value);
                frames.len() - 1
            })
        });
        of_rank.push(of_frames.collect());
    }
    write!(out, "{{\"$schema\":\"https://www.speedscope.app/file-format-schema.json\",\"shared\":")?;
    serde_json::to_writer(&mut out, &json!({ "frames": frames }))?;
    let exporter = format!("xpu_timer {}", env!("CARGO_PKG_VERSION"));
    write!(out, ",\"name\":{},\"exporter\":{},\"profiles\":[", json!(name), json!(exporter))?;
    let mut separator = "";
    for (rank, numbers) in ranks.iter().zip(&of_rank) {
        let period = rank.samples.period_ns as f64 / 1e9;
        let is_rank = rank.samples.rank.as_ref().is_some_and(|info| info.rank >= 0);
        let pid = rank.samples.rank.as_ref().map_or(0, |info| info.pid);
        let process = if is_rank { format!("rank {}", rank.rank) } else { format!("process {pid}") };
        for thread in &rank.samples.threads {
            let (mut stacks, mut weights, mut total) = (Vec::new(), Vec::new(), 0.0);
            for slice in samples::slices(thread) {
                let frames = &rank.samples.stacks[slice.stack as usize].frames;
                let weight = f64::from(slice.samples) * period;
                total += weight;
                stacks.push(frames.iter().rev().map(|frame| numbers[*frame as usize]).collect::<Vec<_>>());
                weights.push(weight);
            }
            let name = if thread.name.is_empty() { format!("thread {}", thread.tid) } else { thread.name.clone() };
            let profile = json!({
                "type": "sampled", "name": format!("{process} {name}"), "unit": "seconds",
                "startValue": 0, "endValue": total, "samples": stacks, "weights": weights,
            });
            out.write_all(std::mem::replace(&mut separator, ",").as_bytes())?;
            serde_json::to_writer(&mut out, &profile)?;
        }
    }
    out.write_all(b"]}\n")
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::v1::{RankInfo, SampledStack};

    use super::*;

    /// A rank whose main thread spends the given number of samples in each function, below `main`.
    fn rank(rank: u32, functions: &[(&str, u32)]) -> RankSamples {
        let frame = |name: &str, line: u32| PySpyFrame {
            func_name: name.into(),
            file_name: format!("/home/you/train.py:{line}"),
            module: String::new(),
        };
        let frames = std::iter::once(frame("main", 9)).chain(functions.iter().map(|(name, _)| frame(name, 3)));
        let count = functions.len();
        let samples = StackSamples {
            rank: Some(RankInfo { rank: rank as i32, pid: 77, ..RankInfo::default() }),
            period_ns: 20_000_000,
            threads: vec![SampledThread {
                tid: 77,
                name: "MainThread".into(),
                main: true,
                first: vec![20_000_000; count],
                last: vec![0; count],
                samples: functions.iter().map(|(_, count)| *count).collect(),
                stack: (0..count as u32).collect(),
            }],
            stacks: (1..=count as u32).map(|index| SampledStack { frames: vec![index, 0] }).collect(),
            frames: frames.collect(),
            ..StackSamples::default()
        };
        RankSamples { rank, samples }
    }

    #[test]
    fn folded_stacks_have_their_samples() {
        let ranks = [rank(0, &[("step", 30), ("load;er", 10)]), rank(1, &[("step", 20)])];
        let text = folded(&weights(ranks.iter()));
        let line =
            |function: &str, count: u32| format!("main@/home/you/train.py:9;{function}@/home/you/train.py:3 {count}\n");
        assert_eq!(text, line("load,er", 10) + &line("step", 50));
        assert_eq!(ranks[0].count(), 40);
    }

    #[test]
    fn threads_are_roots_if_there_are_several_and_an_empty_stack_has_a_name() {
        let mut one = rank(0, &[("step", 30)]);
        one.samples.stacks.push(SampledStack::default());
        let other = SampledThread { first: vec![5], last: vec![0], samples: vec![4], stack: vec![1], ..<_>::default() };
        one.samples.threads.push(other);
        let text = folded(&weights([one].iter()));
        assert_eq!(
            text,
            "MainThread;main@/home/you/train.py:9;step@/home/you/train.py:3 30\n\
             a thread without a name;no Python code 4\n"
        );
    }

    #[test]
    fn ranks_that_differ_are_another_group() {
        let mut ranks: Vec<RankSamples> = (0..8).map(|one| rank(one, &[("step", 800 + one), ("load", 200)])).collect();
        ranks[5] = rank(5, &[("evaluate", 700), ("step", 300)]);
        let groups = groups(&ranks);
        let shown: Vec<String> = groups.iter().map(|group| group.ranks.to_string()).collect();
        assert_eq!(shown, ["0-4/6-7", "5"]);
        assert_eq!(groups[1].top[0], (0.7, "evaluate@/home/you/train.py".into()));
    }

    #[test]
    fn few_samples_prove_no_difference() {
        let ranks = [rank(0, &[("step", 12), ("load", 8)]), rank(1, &[("step", 8), ("load", 12)])];
        assert_eq!(groups(&ranks).len(), 1);
    }

    #[test]
    fn speedscope_has_a_profile_for_each_thread() {
        let ranks = [rank(0, &[("step", 30), ("load", 10)]), rank(1, &[("step", 20)])];
        let mut out = Vec::new();
        write_speedscope(&ranks, "record", &mut out).unwrap();
        let file: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(file["shared"]["frames"].as_array().unwrap().len(), 3);
        assert_eq!(file["shared"]["frames"][1], json!({ "name": "step", "file": "/home/you/train.py", "line": 3 }));
        let profile = &file["profiles"][0];
        assert_eq!((&profile["name"], &profile["type"]), (&json!("rank 0 MainThread"), &json!("sampled")));
        assert_eq!((&profile["samples"], &profile["weights"]), (&json!([[0, 1], [0, 2]]), &json!([0.6, 0.2])));
        assert_eq!(file["profiles"][1]["endValue"], json!(0.4));
    }
}
