//! Captures a process whose threads start and end all the time, and checks which stacks are
//! correct.
//!
//! Every thread calls through a chain of functions that depends on its id and a number, the
//! generation. It writes both into a table in a shared file before it enters the chain. A stack is
//! correct if it is a state of a generation that the thread had between a reading of the table
//! before the capture and one after it.

use std::{
    collections::{BTreeMap, HashSet},
    fs::File,
    os::unix::fs::FileExt,
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result};
use xpu_timer_capture::{Capturer, Options};
use xpu_timer_tests::{Process, compile_c, tree};

use crate::targets::tids;

const ENTRIES: usize = 65536;
const FUNCTIONS: u32 = 8;
/// Flag in a generation: the thread is about to end.
const ENDING: u32 = 0x8000_0000;

/// The language of the target.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Language {
    C,
    Python,
}

/// The results of all captures.
#[derive(Debug, Default)]
pub struct Outcome {
    pub captures: usize,
    /// Threads that existed before and after a capture, which it must therefore contain.
    pub expected: usize,
    /// Complete stacks that are correct.
    pub right: usize,
    pub wrong: usize,
    pub first_wrong: Option<String>,
    /// Stacks marked as incomplete, by reason, and missing ones.
    pub incomplete: BTreeMap<String, usize>,
}

/// The table of a target at one time.
struct Table(Vec<u8>);

impl Table {
    fn read(file: &File) -> Result<Self> {
        let mut bytes = vec![0; ENTRIES * 8];
        file.read_exact_at(&mut bytes, 0)?;
        Ok(Table(bytes))
    }

    /// The generation of a thread, with [`ENDING`], if it is in the table.
    fn generation(&self, tid: u32) -> Option<u32> {
        let at = tid as usize % ENTRIES * 8;
        let entry = u64::from_ne_bytes(self.0[at..at + 8].try_into().ok()?);
        (entry >> 32 == u64::from(tid)).then_some(entry as u32)
    }
}

fn mix(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x045d_9f3b);
    x = (x ^ (x >> 16)).wrapping_mul(0x045d_9f3b);
    x ^ (x >> 16)
}

/// The chain of functions of one generation, by their numbers, root first.
fn chain(tid: u32, generation: u32) -> Vec<u32> {
    let seed = mix(tid ^ generation.wrapping_mul(0x9e37_79b1));
    let depth = 8 + mix(seed.wrapping_add(1000)) % 16;
    (0..depth).map(|level| mix(seed.wrapping_add(level)) % FUNCTIONS).collect()
}

/// Whether the names of a complete stack, root first, are a state of a thread in one of the given
/// generations. `inside`: the thread was in `churn_thread` all the time.
fn is_right(names: &[&str], tid: u32, generations: std::ops::RangeInclusive<u32>, inside: bool) -> bool {
    let Some(thread) = names.iter().position(|name| *name == "churn_thread") else {
        // The thread has not entered the chain yet, or has left it.
        return !inside && !names.iter().any(|name| name.starts_with("churn_"));
    };
    let below = &names[thread + 1..];
    let number = |name: &&str| name.strip_prefix("churn_f").and_then(|number| number.parse::<u32>().ok());
    let entered: Vec<u32> = below.iter().map_while(number).collect();
    let rest = match &below[entered.len()..] {
        // Each link computes the number of the next one, in a function that is inlined.
        ["mix"] => &[],
        rest => rest,
    };
    if entered.is_empty() {
        return !rest.iter().any(|name| name.starts_with("churn_"));
    }
    // The first call of each link is the next link, the first call of the last link is the leaf,
    // and only the leaf calls others.
    let leaf_only = rest.first().is_none_or(|name| *name == "churn_leaf")
        && !rest.iter().skip(1).any(|name| name.starts_with("churn_"));
    leaf_only
        && generations.into_iter().any(|generation| {
            let chain = chain(tid, generation);
            chain.starts_with(&entered) && (rest.is_empty() || entered.len() == chain.len())
        })
}

/// Starts the target and captures it `captures` times.
pub fn run(language: Language, captures: usize) -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("table");
    let file = File::options().create_new(true).read(true).write(true).open(&path)?;
    file.set_len(ENTRIES as u64 * 8)?;
    let targets = tree().join("tests/bench/targets");
    let mut command = match language {
        Language::C => {
            let source = std::fs::read_to_string(targets.join("churn.c"))?;
            // Each call keeps its own frame.
            let flags = ["-O1", "-g", "-pthread", "-fno-optimize-sibling-calls"];
            Command::new(compile_c(folder.path(), "churn", &source, &flags))
        }
        Language::Python => {
            let mut command = Command::new(xpu_timer_tests::python());
            command.arg(targets.join("churn.py"));
            command
        }
    };
    let mut target = Process::spawn(command.arg(&path));
    target.wait_for("ready", Duration::from_secs(60));
    let pid = target.pid();
    let mut capturer = Capturer::new();
    let options = Options { lines_budget: Duration::ZERO, ..Options::default() };
    let mut result = Outcome::default();
    for _ in 0..captures {
        let before = Table::read(&file)?;
        let tids_before: HashSet<i32> = tids(pid).into_iter().collect();
        let captured = capturer.capture(&[pid], &options).pop().context("no answer")?;
        let tids_after: HashSet<i32> = tids(pid).into_iter().collect();
        let after = Table::read(&file)?;
        let stacks = match language {
            Language::C => native_stacks(&captured.sample),
            Language::Python => python_stacks(&captured.sample),
        };
        result.captures += 1;
        for (tid, stack) in &stacks {
            let lived: Vec<u32> = match tid {
                // The capture does not know the thread, so the stack must be correct for one of
                // them.
                0 => tids_before.union(&tids_after).map(|tid| *tid as u32).collect(),
                tid => vec![*tid],
            };
            result.check(&lived, stack.as_ref(), &before, &after);
        }
        for tid in tids_before.intersection(&tids_after).map(|tid| *tid as u32) {
            // In Python, a thread is known to the interpreter from before its first generation
            // until after its last.
            if known_inside(tid, &before, &after) {
                result.expected += 1;
                if !stacks.iter().any(|(seen, _)| *seen == tid) {
                    let reason = captured.sample.errors.first().map_or("missing without a reason", String::as_str);
                    *result.incomplete.entry(without_numbers(reason)).or_default() += 1;
                }
            }
        }
    }
    if let Some(status) = target.try_wait() {
        anyhow::bail!("the target ended during the captures: {status}: {}", target.stderr());
    }
    Ok(result)
}

/// Thread id, and the names of a complete stack, root first, or why it is incomplete.
type Stack = (u32, std::result::Result<Vec<String>, String>);

fn native_stacks(sample: &xpu_timer_proto::server::ProcessSample) -> Vec<Stack> {
    let threads = sample.stacktrace.iter().map(|thread| {
        let names = thread.frames.iter().rev().filter(|frame| !frame.inlined).map(|frame| frame.func_name.clone());
        let whole = thread.incomplete.is_empty() && !thread.frames.is_empty();
        (thread.pid, if whole { Ok(names.collect()) } else { Err(thread.incomplete.clone()) })
    });
    threads.collect()
}

fn python_stacks(sample: &xpu_timer_proto::server::ProcessSample) -> Vec<Stack> {
    let threads = sample.py_stacktrace.iter().map(|thread| {
        let names = thread.frames.iter().rev().map(|frame| frame.func_name.clone());
        let right = thread.incomplete.is_empty();
        (thread.os_thread_id, if right { Ok(names.collect()) } else { Err(thread.incomplete.clone()) })
    });
    threads.collect()
}

fn known_inside(tid: u32, before: &Table, after: &Table) -> bool {
    before.generation(tid).is_some() && after.generation(tid).is_some_and(|generation| generation & ENDING == 0)
}

/// Removes ids and addresses from reasons, so that equal reasons can be summed.
fn without_numbers(text: &str) -> String {
    let words =
        text.split_whitespace().map(|word| if word.contains(|c: char| c.is_ascii_digit()) { "N" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

impl Outcome {
    /// Checks one stack, which belongs to one of the given threads.
    fn check(
        &mut self,
        tids: &[u32],
        stack: std::result::Result<&Vec<String>, &String>,
        before: &Table,
        after: &Table,
    ) {
        let names: Vec<&str> = match stack {
            Ok(names) => names.iter().map(String::as_str).collect(),
            Err(reason) => {
                if tids.iter().any(|tid| known_inside(*tid, before, after)) {
                    *self.incomplete.entry(without_numbers(reason)).or_default() += 1;
                }
                return;
            }
        };
        let generations = |tid: u32| {
            let first = before.generation(tid).map_or(1, |generation| generation & !ENDING);
            // A thread that is not in the table has not entered a chain.
            first..=after.generation(tid).map_or(0, |generation| generation & !ENDING)
        };
        if tids.iter().any(|tid| is_right(&names, *tid, generations(*tid), known_inside(*tid, before, after))) {
            self.right += 1;
        } else {
            self.wrong += 1;
            self.first_wrong.get_or_insert_with(|| {
                let chains = tids.iter().flat_map(|tid| generations(*tid).map(|generation| chain(*tid, generation)));
                format!("threads {tids:?}: {names:?}, possible: {:?}", chains.collect::<Vec<_>>())
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(numbers: &[u32], tail: &[&str]) -> Vec<String> {
        let links = numbers.iter().map(|number| format!("churn_f{number}"));
        let head = ["clone3".to_string(), "start_thread".into(), "churn_thread".into()];
        head.into_iter().chain(links).chain(tail.iter().map(ToString::to_string)).collect()
    }

    fn right(names: &[String], generations: std::ops::RangeInclusive<u32>) -> bool {
        is_right(&names.iter().map(String::as_str).collect::<Vec<_>>(), 77, generations, true)
    }

    #[test]
    fn states_of_one_generation_are_right() {
        let links = chain(77, 3);
        assert!(links.len() >= 8);
        assert!(right(&names(&links, &["churn_leaf", "nanosleep", "clock_nanosleep"]), 2..=3));
        assert!(right(&names(&links, &[]), 3..=3));
        assert!(right(&names(&links[..4], &[]), 3..=3), "on the way down or up");
        assert!(right(&names(&links[..4], &["mix"]), 3..=3), "about to call the next link");
        assert!(!right(&names(&links[..4], &["mix", "churn_f1"]), 3..=3), "only inlined");
        assert!(right(&names(&[], &["gettid"]), 3..=3), "between two generations");
    }

    #[test]
    fn everything_else_is_wrong() {
        let links = chain(77, 3);
        let leaf = ["churn_leaf", "nanosleep"];
        assert!(!right(&names(&links, &leaf), 4..=9), "another generation");
        assert!(!right(&names(&links[..links.len() - 1], &leaf), 3..=3), "a link is missing at the leaf");
        assert!(!right(&names(&links[1..], &leaf), 3..=3), "a link is missing at the root");
        let mut mixed = links.clone();
        let other = chain(77, 4);
        mixed[..4].copy_from_slice(&other[..4]);
        assert!(mixed != links && !right(&names(&mixed, &leaf), 3..=4), "the root of another generation");
        assert!(!right(&names(&links, &["nanosleep"]), 3..=3), "no leaf");
        let all = names(&links, &leaf);
        assert!(!right(&all[3..], 3..=3), "no churn_thread");
        assert!(!is_right(&["clone3"], 77, 3..=3, true), "inside, but not shown so");
        assert!(
            is_right(&["clone3", "start_thread"], 77, std::ops::RangeInclusive::new(1, 0), false),
            "not yet inside"
        );
    }
}
