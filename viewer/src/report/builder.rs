//! Builds the report from the dumps of all ranks, one by one. It keeps no dump, only the numbers of
//! what it has seen.

use super::communicators::Communicators;
use super::data::{
    self, Child, Condition, Conditions, Group, MainRanks, Progress, Rank, Report, Sample, Suspended, Table, TextId,
    Texts, Thread, Trees, draw,
};
use super::mixed::mix;
use crate::absent_ranks::{Absence, AbsentRanks};
use crate::dump::{self, Dump, Threads};
use crate::merge::{Interned, Merged, Merger, Mode, StackEnd, StackId, Stacks};
use hashbrown::HashMap;
use std::collections::BTreeMap;
use xpu_timer_analysis::Verdict;
use xpu_timer_analysis::prefix_tree::{NodeId, PrefixTree};
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_analysis::suspended::Waiting;
use xpu_timer_proto::lenient;
use xpu_timer_proto::server::CaptureMethod;
use xpu_timer_proto::v1::FlightRecord;

/// Builds a [`Report`].
#[derive(Debug)]
pub struct Builder {
    texts: Texts,
    /// Mixed stacks. The merger has the native and Python stacks.
    mixed: Stacks,
    /// Mixed stack of each pair of native and Python stack.
    mixed_of: HashMap<(Option<u32>, Option<u32>), Option<StackId>>,
    main_native: MainRanks,
    main_python: MainRanks,
    main_mixed: MainRanks,
    main_suspended: MainRanks,
    /// Whether at least one native thread is also a Python thread.
    matched: bool,
    /// Until `finish`, the numbers in this table are those of stacks, not of nodes.
    threads: Table<Thread>,
    lists: Table<Vec<i64>>,
    ranks: BTreeMap<u32, Rank>,
    communicators: Communicators,
    captured_ns: u64,
    between_ns: u64,
}

impl Default for Builder {
    fn default() -> Self {
        let mut texts = Table::new();
        texts.number("");
        Builder {
            texts: Texts(texts),
            mixed: Stacks::default(),
            mixed_of: HashMap::new(),
            main_native: MainRanks::new(),
            main_python: MainRanks::new(),
            main_mixed: MainRanks::new(),
            main_suspended: MainRanks::new(),
            matched: false,
            threads: Table::new(),
            lists: Table::new(),
            ranks: BTreeMap::new(),
            communicators: Communicators::default(),
            captured_ns: 0,
            between_ns: 0,
        }
    }
}

/// The context of a report, besides the dumps.
#[derive(Debug, Default)]
pub struct ReportContext<'a> {
    /// Name of the folder.
    pub folder: &'a str,
    /// Number of ranks in the job.
    pub world: u32,
    /// The verdict, if the folder has one.
    pub verdict: Option<&'a Verdict>,
    /// Ranks that have no dump or whose process has ended.
    pub absent: &'a [AbsentRanks],
    /// Notes about the folder, one sentence each.
    pub notes: Vec<String>,
}

/// A numbered sample of a process.
struct NumberedSample {
    sample: Sample,
    /// By thread id: the thread and its context switches. Filled only if another sample is compared
    /// with this one.
    threads: HashMap<u32, (Thread, u64)>,
    /// The main thread.
    main: Option<Thread>,
}

/// A sample to be numbered.
struct SampleInput<'a> {
    threads: &'a Threads<'a>,
    /// The numbers of its stacks.
    stacks: &'a Interned,
    state: &'a [u8],
    /// The rank for which its stacks count in the trees, if any.
    rank: Option<u32>,
    /// Whether another sample of the process is compared with this one.
    compared: bool,
}

/// Indexes of one thread in the lists of native and Python threads; at least one is set.
#[derive(Clone, Copy)]
struct ThreadIndexes {
    native: Option<usize>,
    python: Option<usize>,
}

impl Builder {
    /// Adds the dump of one rank, which `merger` added last. If a rank has several dumps, all count
    /// in the trees and the first one is shown.
    pub fn add(&mut self, rank: u32, dump: &Dump<'_>, merger: &mut Merger) {
        // A sample that cannot be decoded is ignored. The last sample does not contain its threads.
        let first = dump.first_sample.and_then(|first| dump::Sample::decode(first).ok());
        let last = dump.last_sample.and_then(|last| dump::Sample::decode(last).ok());
        let before = first.as_ref().map(|first| self.number_unranked(first, dump.pid, None, merger));
        let input = SampleInput {
            threads: &dump.threads,
            stacks: merger.last(),
            state: dump.process_state.as_bytes(),
            rank: Some(rank),
            compared: before.is_some(),
        };
        let numbered = self.number_sample(&input, before.as_ref());
        let times = first.as_ref().zip(last.as_ref());
        let moved = times.zip(before.as_ref()).map(|((a, b), before)| progress(a, b, before, &numbered));
        if let Some((a, b)) = times {
            self.between_ns = self.between_ns.max(b.captured_unix_ns.saturating_sub(a.captured_unix_ns));
        }
        let samples = [&first, &last].into_iter().flatten();
        for sample in samples.clone() {
            self.captured_ns = self.captured_ns.max(sample.captured_unix_ns);
        }
        if let Some(flight) = dump.flight_record.and_then(|flight| lenient::decode::<FlightRecord>(flight).ok()) {
            self.communicators.add(rank, &flight);
        }
        let capture_errors = [&dump.pstack_stderr, &dump.pyspy_stderr].map(|text| text.as_bytes());
        let errors = capture_errors.into_iter().chain(samples.flat_map(|sample| sample.errors.iter().copied()));
        let mut errors: Vec<TextId> =
            errors.map(<[u8]>::trim_ascii).filter(|text| !text.is_empty()).map(|text| self.texts.bytes(text)).collect();
        errors.sort_unstable();
        errors.dedup();
        let children = dump.children.iter().filter_map(|child| dump::Child::decode(child).ok());
        let children = children.map(|child| self.child(&child, merger)).collect();
        let entry = Rank {
            rank,
            pid: dump.pid,
            node: self.texts.bytes(dump.node),
            command: self.texts.command(dump.command),
            errors,
            first: before.map(|before| before.sample),
            last: numbered.sample,
            moved,
            children,
        };
        self.ranks.entry(rank).or_insert(entry);
    }

    fn child(&mut self, child: &dump::Child<'_>, merger: &mut Merger) -> Child {
        let mut numbered_samples: Vec<(&dump::Sample<'_>, NumberedSample)> = Vec::new();
        for sample in &child.samples {
            let numbered =
                self.number_unranked(sample, child.pid, numbered_samples.last().map(|(_, numbered)| numbered), merger);
            numbered_samples.push((sample, numbered));
        }
        let moved = match &numbered_samples[..] {
            [(a, before), .., (b, after)] => Some(progress(a, b, before, after)),
            _ => None,
        };
        Child {
            pid: child.pid,
            parent: child.parent,
            command: self.texts.command(child.command),
            samples: numbered_samples.iter().map(|(_, numbered)| numbered.sample).collect(),
            moved,
        }
    }

    /// Numbers a sample without counting it for a rank.
    fn number_unranked(
        &mut self,
        sample: &dump::Sample<'_>,
        pid: i32,
        before: Option<&NumberedSample>,
        merger: &mut Merger,
    ) -> NumberedSample {
        let stacks = merger.intern(&sample.threads, pid);
        let (threads, state) = (&sample.threads, sample.process_state);
        self.number_sample(&SampleInput { threads, stacks: &stacks, state, rank: None, compared: true }, before)
    }

    /// Numbers everything in one sample.
    fn number_sample(&mut self, input: &SampleInput<'_>, before: Option<&NumberedSample>) -> NumberedSample {
        let Threads { native, python, .. } = input.threads;
        let pairs = pair(native, python);
        let main = input.stacks.main.and_then(|(mode, place)| {
            pairs.iter().position(|pair| Some(place) == if mode == Mode::Native { pair.native } else { pair.python })
        });
        let tid_of = |pair: &ThreadIndexes| {
            pair.native.map_or_else(|| pair.python.map_or(0, |i| python[i].tid), |i| native[i].tid)
        };
        let (mut numbers, mut tids) = (Vec::with_capacity(pairs.len()), Vec::with_capacity(pairs.len()));
        let first_tid = pairs.first().map_or(0, tid_of);
        let mut last_tid = i64::from(first_tid);
        let (mut threads, mut main_kind) = (HashMap::new(), None);
        for (place, pair) in pairs.iter().enumerate() {
            let is_main = main == Some(place);
            let mut thread = self.thread(input, *pair, is_main);
            let tid = tid_of(pair);
            let switches = pair.native.map_or(0, |i| native[i].context_switches);
            let earlier = before.and_then(|before| before.threads.get(&tid));
            thread.ran = earlier.is_some_and(|(_, earlier)| *earlier != switches);
            numbers.push(i64::from(self.threads.number(&thread)));
            tids.push(i64::from(tid) - last_tid);
            last_tid = i64::from(tid);
            if is_main {
                main_kind = Some(thread.clone());
            }
            if input.compared {
                threads.insert(tid, (thread, switches));
            }
        }
        let sample = Sample {
            state: self.texts.bytes(input.state),
            threads: self.lists.number(&numbers),
            tid: first_tid,
            tids: self.lists.number(&tids),
            main: main.map(|place| u32::try_from(place).unwrap_or(u32::MAX)),
        };
        NumberedSample { sample, threads, main: main_kind }
    }

    fn thread(&mut self, input: &SampleInput<'_>, pair: ThreadIndexes, main: bool) -> Thread {
        let number = |id: &StackId| id.index() as u32;
        let native = pair.native.map(|i| (&input.threads.native[i], input.stacks.native[i].as_ref().map(number)));
        let python = pair.python.map(|i| (&input.threads.python[i], input.stacks.python[i].as_ref().map(number)));
        let stacks = (native.and_then(|(_, stack)| stack), python.and_then(|(_, stack)| stack));
        self.matched |= [native, python].iter().flatten().filter(|(thread, _)| !thread.frames.is_empty()).count() == 2;
        let mixed = match self.mixed_of.get(&stacks) {
            Some(&mixed) => mixed,
            None => {
                let frames = |thread: Option<&dump::Thread<'_>>| match thread {
                    Some(thread) => input.threads.frames[thread.frames.clone()].to_vec(),
                    None => Vec::new(),
                };
                let (native, python) =
                    (frames(native.map(|(thread, _)| thread)), frames(python.map(|(thread, _)| thread)));
                let mixed = self.mixed.intern(&mix(&native, &python));
                self.mixed_of.insert(stacks, mixed);
                mixed
            }
        };
        if let Some(rank) = input.rank {
            mixed.inspect(|&mixed| self.mixed.add(mixed, rank));
            if main {
                let of = [
                    (&mut self.main_native, stacks.0),
                    (&mut self.main_python, stacks.1),
                    (&mut self.main_mixed, mixed.as_ref().map(number)),
                ];
                for (main_of, stack) in of {
                    stack.inspect(|&stack| {
                        main_of.entry(stack).or_default().insert(rank);
                    });
                }
            }
        }
        let mut thread =
            Thread { native: stacks.0, python: stacks.1, mixed: mixed.as_ref().map(number), ..Thread::default() };
        if let Some((python, _)) = python {
            thread.name = self.texts.bytes(python.name);
            thread.gil = python.owns_gil;
            thread.suspended = self.suspended(input, python, main);
        }
        if let Some((native, _)) = native {
            if thread.name == 0 {
                thread.name = self.texts.bytes(native.name);
            }
            thread.state = self.texts.bytes(native.state);
            thread.wchan = self.texts.bytes(native.wchan);
            thread.kernel = self.texts.bytes(&native.kernel_stack.join(&b'\n'));
            thread.incomplete = self.texts.bytes(native.incomplete);
            thread.capture = self.texts.number(match CaptureMethod::try_from(native.capture) {
                Ok(CaptureMethod::Unspecified) | Err(_) => "",
                Ok(CaptureMethod::ZeroStop) => "without stopping it",
                Ok(CaptureMethod::Ptrace) => "while it was stopped for some microseconds",
                Ok(CaptureMethod::KernelOnly) => "with its kernel stack only",
                Ok(CaptureMethod::PerfSample) => "as a sample while it was running",
            });
        }
        thread
    }

    /// The tasks and greenlets of a Python thread that wait.
    fn suspended(&mut self, input: &SampleInput<'_>, python: &dump::Thread<'_>, main: bool) -> Vec<Suspended> {
        let waiting = input.stacks.waiting(input.threads, python).into_iter();
        let number = |(stack, waiting, _): (StackId, Waiting, usize)| {
            let stack = stack.index() as u32;
            if let Some(rank) = input.rank.filter(|_| main) {
                self.main_suspended.entry(stack).or_default().insert(rank);
            }
            Suspended { description: self.texts.number(&waiting.describe("")), stack: Some(stack) }
        };
        waiting.map(number).collect()
    }

    /// Builds the report. This adds stacks of earlier samples and child processes to the trees of
    /// `merged`, without ranks, so write all other output first.
    pub fn finish(self, about: &ReportContext<'_>, merged: &mut Merged) -> Report {
        let verdict = about.verdict;
        let Builder { mut texts, mixed, matched, mut threads, lists, ranks, .. } = self;
        let mut sets = Table::new();
        let used = |stack: fn(&Thread) -> Option<u32>| threads.items.iter().filter_map(stack);
        let native = complete(&mut merged.native, &merged.native_ends, used(|thread| thread.native));
        let python = complete(&mut merged.python, &merged.python_ends, used(|thread| thread.python));
        let of_suspended = threads.items.iter().flat_map(|thread| &thread.suspended);
        let used = of_suspended.filter_map(|suspended| suspended.stack);
        let suspended = complete(&mut merged.suspended, &merged.suspended_ends, used);
        let (mixed_tree, mixed) = if matched { mixed } else { Stacks::default() }.into_tree_and_ends();
        let mixed: Vec<_> = mixed.into_iter().map(Some).collect();
        let (native, native_ends) = draw(&merged.native, &native, &self.main_native, &mut texts, &mut sets);
        let (python, python_ends) = draw(&merged.python, &python, &self.main_python, &mut texts, &mut sets);
        let (mixed, mixed_ends) = draw(&mixed_tree, &mixed, &self.main_mixed, &mut texts, &mut sets);
        let (suspended, suspended_ends) =
            draw(&merged.suspended, &suspended, &self.main_suspended, &mut texts, &mut sets);
        for thread in &mut threads.items {
            let place = |stack: Option<u32>, ends: &[Option<u32>]| ends.get(stack? as usize).copied().flatten();
            thread.native = place(thread.native, &native_ends);
            thread.python = place(thread.python, &python_ends);
            thread.mixed = place(thread.mixed, &mixed_ends);
            thread.suspended.iter_mut().for_each(|of| of.stack = place(of.stack, &suspended_ends));
        }
        let groups = merged.groups.iter().map(|group| Group {
            ranks: sets.number(&group.ranks.to_string()),
            mode: group.place.as_ref().map(|place| match place.mode {
                Mode::Python => "python",
                Mode::Native => "native",
            }),
            deepest: group.place.as_ref().map(|place| texts.number(&place.deepest)),
            own: group.place.as_ref().and_then(|place| place.own.as_ref()).map(|own| texts.number(own)),
        });
        let groups = groups.collect();
        let states: Vec<(u32, &str)> =
            ranks.values().map(|rank| (rank.rank, texts.0.items[rank.last.state as usize].as_str())).collect();
        let conditions = conditions(about.world, &states, about.absent);
        let conditions = conditions
            .into_iter()
            .map(|(condition, ranks)| Conditions { condition, ranks: sets.number(&ranks.to_string()) })
            .collect();
        let absent = about.absent.iter().filter(|absent| !(absent.node.is_empty() && absent.why.is_empty()));
        let absent = absent.map(|absent| data::AbsentRanks {
            ranks: sets.number(&absent.ranks.to_string()),
            node: texts.number(&absent.node),
            why: texts.number(&absent.why),
        });
        let absent = absent.collect();
        let mut communicators = verdict.map(|verdict| verdict.communicators.clone()).unwrap_or_default();
        communicators.extend(self.communicators.finish(&communicators));
        let ms = |ns: u64| (ns > 0).then_some(ns / 1_000_000);
        Report {
            folder: about.folder.to_owned(),
            world: about.world,
            verdict: verdict.cloned(),
            notes: about.notes.clone(),
            captured_ms: ms(self.captured_ns),
            between_ms: ms(self.between_ns),
            texts: texts.0.items,
            sets: sets.items,
            trees: Trees { python, native, mixed, suspended },
            groups,
            conditions,
            absent,
            communicators,
            threads: threads.items,
            lists: lists.items,
            ranks: ranks.into_values().collect(),
            lanes: None,
        }
    }
}

/// Adds the stacks that threads have but no rank has to the tree. Returns the end of each stack
/// that a thread has. The process states are not threads.
fn complete(tree: &mut PrefixTree, ends: &[StackEnd], used: impl Iterator<Item = u32>) -> Vec<Option<NodeId>> {
    let mut nodes: Vec<Option<NodeId>> = vec![None; ends.len()];
    for stack in used.map(|stack| stack as usize) {
        if nodes[stack].is_none() {
            nodes[stack] = match &ends[stack] {
                StackEnd::Drawn(node) => Some(*node),
                StackEnd::Undrawn(names) => tree.insert_set(names, &RankSet::new()),
            };
        }
    }
    nodes
}

/// Matches native and Python threads by the kernel's thread id, in the order of the native threads.
fn pair(native: &[dump::Thread<'_>], python: &[dump::Thread<'_>]) -> Vec<ThreadIndexes> {
    let mut by_tid: HashMap<u32, usize> = HashMap::with_capacity(python.len());
    for (i, thread) in python.iter().enumerate().filter(|(_, thread)| thread.tid != 0) {
        by_tid.entry(thread.tid).or_insert(i);
    }
    let mut alone = vec![true; python.len()];
    let mut pairs = Vec::with_capacity(native.len());
    for (i, thread) in native.iter().enumerate() {
        let matched = by_tid.remove(&thread.tid);
        matched.into_iter().for_each(|i| alone[i] = false);
        pairs.push(ThreadIndexes { native: Some(i), python: matched });
    }
    let rest = alone.iter().enumerate().filter(|(_, alone)| **alone);
    pairs.extend(rest.map(|(i, _)| ThreadIndexes { native: None, python: Some(i) }));
    pairs
}

/// The changes between two samples of a process.
fn progress(a: &dump::Sample<'_>, b: &dump::Sample<'_>, before: &NumberedSample, after: &NumberedSample) -> Progress {
    let stack = |thread: &Thread| (thread.native, thread.python);
    let mut stacks = before.threads.keys().filter(|tid| !after.threads.contains_key(*tid)).count();
    let mut ran = 0;
    for (tid, (thread, _)) in &after.threads {
        let same = before.threads.get(tid).is_some_and(|(earlier, _)| stack(earlier) == stack(thread));
        stacks += usize::from(!same);
        ran += usize::from(thread.ran);
    }
    let grown = |before: u64, after: u64| if before == 0 { 0 } else { after.saturating_sub(before) };
    let io_bytes = grown(a.io_bytes, b.io_bytes).saturating_add(grown(a.tcp_bytes, b.tcp_bytes));
    Progress {
        cpu_ms: b.cpu_time_ns.saturating_sub(a.cpu_time_ns) / 1_000_000,
        io_bytes,
        main: matches!((&before.main, &after.main), (Some(before), Some(after)) if stack(before) != stack(after)),
        stacks: u32::try_from(stacks).unwrap_or(u32::MAX),
        ran: u32::try_from(ran).unwrap_or(u32::MAX),
    }
}

/// The condition of every rank of the world, and of every rank beyond the world that has a dump.
fn conditions(world: u32, states: &[(u32, &str)], absent: &[AbsentRanks]) -> Vec<(Condition, RankSet)> {
    let mut of: BTreeMap<Condition, RankSet> = BTreeMap::new();
    let mut known = RankSet::new();
    // The collector's observation overrides the process state in the dump: the process may have
    // ended since.
    for (absence, condition) in [(Absence::Dead, Condition::Dead), (Absence::Left, Condition::Left)] {
        for absent in absent.iter().filter(|absent| absent.absence == absence) {
            of.entry(condition).or_default().union_with(&absent.ranks);
            known.union_with(&absent.ranks);
        }
    }
    let mut put = |condition: Condition, rank: u32| {
        if known.insert(rank) {
            of.entry(condition).or_default().insert(rank);
        }
    };
    for &(rank, state) in states {
        let condition = match state.bytes().next() {
            Some(b'T' | b't') => Condition::Stopped,
            Some(b'D') => Condition::DState,
            Some(b'Z' | b'X' | b'x') => Condition::Dead,
            _ => Condition::Alive,
        };
        put(condition, rank);
    }
    let missing = known.complement(world);
    if !missing.is_empty() {
        of.insert(Condition::NoDump, missing);
    }
    of.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::absent_ranks::absent_ranks;
    use crate::merge::Merger;
    use crate::report::data::Tree;
    use xpu_timer_analysis::judge;
    use xpu_timer_proto::Message;
    use xpu_timer_proto::server::{
        ProcessSample, PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace, Stacktrace,
    };
    use xpu_timer_proto::v1::{Evidence, Presence, RankEvidence};

    fn native(tid: u32, switches: u64, leaf_first: &str) -> PstackStacktrace {
        let frame = |func: &str| PstackFrame { func_name: func.into(), file_name: "so".into(), ..Default::default() };
        PstackStacktrace {
            pid: tid,
            context_switches: switches,
            frames: leaf_first.split(' ').map(frame).collect(),
            ..Default::default()
        }
    }

    fn python(tid: u32, name: &str, leaf_first: &str) -> PySpyStacktrace {
        let frame =
            |func: &str| PySpyFrame { func_name: func.into(), file_name: "t.py:1".into(), ..Default::default() };
        PySpyStacktrace {
            os_thread_id: tid,
            thread_name: name.into(),
            frames: leaf_first.split(' ').map(frame).collect(),
            ..Default::default()
        }
    }

    /// A rank with a main thread, an idle pool thread and a running thread.
    fn rank(pid: u32, leaf: &str, beat: &str) -> Stacktrace {
        let main = format!("{leaf} <module>");
        let sample = |switches, beat: &str, ns| ProcessSample {
            stacktrace: vec![
                native(pid, 5, "poll _PyEval_EvalFrameDefault main"),
                native(pid + 1, 5, "futex clone"),
                native(pid + 2, switches, "poll clone"),
            ],
            py_stacktrace: vec![python(pid + 2, "beat", beat), python(pid, "MainThread", &main)],
            process_state: "S (sleeping)".into(),
            captured_unix_ns: ns,
            cpu_time_ns: ns / 10,
            ..Default::default()
        };
        let last = sample(9, beat, 5_000_000_000);
        Stacktrace {
            stacktrace: last.stacktrace.clone(),
            py_stacktrace: last.py_stacktrace.clone(),
            pid: pid as i32,
            process_state: last.process_state.clone(),
            first_sample: Some(sample(8, "tick run", 1_000_000_000)),
            last_sample: Some(last),
            node: "n0".into(),
            ..Default::default()
        }
    }

    fn report(dumps: &[(u32, Stacktrace)], world: u32, verdict: Option<Verdict>) -> Report {
        let (mut builder, mut merger) = (Builder::default(), Merger::default());
        for (rank, dump) in dumps {
            let bytes = dump.encode_to_vec();
            let decoded = Dump::decode(&bytes).unwrap();
            merger.add(*rank, &decoded);
            builder.add(*rank, &decoded, &mut merger);
        }
        let mut merged = merger.finish();
        let folder = tempfile::tempdir().unwrap();
        let (absent, _) = absent_ranks(folder.path(), verdict.as_ref(), &merged.ranks, world);
        let about = ReportContext { world, verdict: verdict.as_ref(), absent: &absent, ..ReportContext::default() };
        builder.finish(&about, &mut merged)
    }

    /// Every node as its path and ranks.
    fn shown(report: &Report, tree: &Tree, sets: &[u32]) -> Vec<String> {
        let mut path: Vec<&str> = Vec::new();
        (0..tree.name.len())
            .map(|node| {
                path.truncate(tree.depth[node] as usize);
                path.push(report.texts[tree.name[node] as usize].split('@').next().unwrap());
                format!("{}@{}", path.join(";"), report.sets[sets[node] as usize])
            })
            .collect()
    }

    #[test]
    fn trees_hold_the_last_sample_and_know_the_main_threads() {
        let report = report(&[(0, rank(100, "load", "tick run")), (1, rank(200, "step", "sleep run"))], 2, None);
        let python = &report.trees.python;
        let all = ["<module>@0-1", "<module>;load@0", "<module>;step@1", "run@0-1", "run;sleep@1", "run;tick@0"];
        assert_eq!(shown(&report, python, &python.ranks), all);
        let main = ["<module>@0-1", "<module>;load@0", "<module>;step@1", "run@", "run;sleep@", "run;tick@"];
        assert_eq!(shown(&report, python, &python.main), main);
        let mixed = shown(&report, &report.trees.mixed, &report.trees.mixed.ranks);
        assert!(mixed.contains(&"main;<module>;load;poll@0".to_owned()), "{mixed:?}");
        let groups: Vec<_> = report.groups.iter().map(|group| report.sets[group.ranks as usize].as_str()).collect();
        assert_eq!(groups, ["0", "1"]);
    }

    #[test]
    fn repeated_data_of_ranks_is_stored_once() {
        let same: Vec<_> = (0..50).map(|i| (i, rank(100 + 10 * i, "load", "tick run"))).collect();
        let report = report(&same, 50, None);
        assert_eq!(report.ranks.len(), 50);
        // One list of threads for each sample, and one list of the differences of their ids.
        assert_eq!(report.lists.len(), 3);
        assert_eq!(report.sets, ["0-49"].map(str::to_owned).into_iter().chain([String::new()]).collect::<Vec<_>>());
    }

    #[test]
    fn progress_is_reported_per_thread() {
        let report = report(&[(0, rank(100, "load", "sleep run"))], 1, None);
        let rank = &report.ranks[0];
        assert_eq!(rank.moved, Some(Progress { cpu_ms: 400, io_bytes: 0, main: false, stacks: 1, ran: 1 }));
        assert_eq!(report.between_ms, Some(4000));
        assert_eq!((rank.last.main, rank.last.tid), (Some(0), 100));
        let threads = &report.lists[rank.last.threads as usize];
        let ran: Vec<bool> = threads.iter().map(|&thread| report.threads[thread as usize].ran).collect();
        assert_eq!(ran, [false, false, true]);
        // The first sample's stack is in the tree although no rank has it in the last sample.
        let first = report.lists[rank.first.unwrap().threads as usize][2];
        let node = report.threads[first as usize].python.unwrap() as usize;
        assert_eq!(report.texts[report.trees.python.name[node] as usize], "tick@t.py:1");
        assert_eq!(report.sets[report.trees.python.ranks[node] as usize], "");
    }

    #[test]
    fn every_rank_has_one_condition() {
        let state = |state: &str| Stacktrace { process_state: state.into(), ..Default::default() };
        let dumps = [
            (0, state("S (sleeping)")),
            (1, state("T (stopped)")),
            (2, state("D (disk sleep)")),
            (3, state("Z (zombie)")),
        ];
        let gone = |rank, presence: Presence| RankEvidence { rank, presence: presence.into(), ..Default::default() };
        let ranks = vec![gone(0, Presence::Dead), gone(4, Presence::Left), gone(5, Presence::Missing)];
        let verdict = judge(&Evidence { world_size: 7, ranks, ..Default::default() });
        let report = report(&dumps, 7, Some(verdict));
        let of: Vec<_> =
            report.conditions.iter().map(|c| (c.condition, report.sets[c.ranks as usize].as_str())).collect();
        use Condition::{DState, Dead, Left, NoDump, Stopped};
        assert_eq!(of, [(Stopped, "1"), (DState, "2"), (Dead, "0/3"), (Left, "4"), (NoDump, "5-6")]);
    }

    #[test]
    fn a_thread_name_cut_within_a_character_keeps_all_data() {
        // Field 1: a thread whose name ends within a character, with a frame `f`.
        let file = [0x0a, 9, 0x12, 2, b'a', 0xe6, 0x1a, 3, 0x0a, 1, b'f'];
        let dump = Dump::decode(&file).unwrap();
        assert!(<Stacktrace as Message>::decode(&file[..]).is_err());
        let (mut builder, mut merger) = (Builder::default(), Merger::default());
        merger.add(0, &dump);
        builder.add(0, &dump, &mut merger);
        let report = builder.finish(&ReportContext { world: 1, ..ReportContext::default() }, &mut merger.finish());
        assert!(report.texts.contains(&"a\u{fffd}".to_owned()) && report.texts.contains(&"f@".to_owned()));
    }

    #[test]
    fn names_cannot_escape_the_embedded_data() {
        let mut dump = rank(1, "</script><!--", "x run");
        dump.node = "</SCRIPT ><img src=x>".into();
        let page = super::super::render(&report(&[(0, dump)], 1, None)).unwrap();
        let data = page.split_once("id=\"data\">").unwrap().1.split_once("</script>").unwrap().0;
        assert!(!data.contains('<'));
        let value: serde_json::Value = serde_json::from_str(data).unwrap();
        let texts = value["texts"].as_array().unwrap();
        assert!(texts.contains(&"</SCRIPT ><img src=x>".into()) && texts.contains(&"</script><!--@t.py:1".into()));
        for mark in ["/*style*/", "/*data*/", "/*script*/"] {
            assert!(!page.contains(mark));
        }
        for word in ["http:", "https:", "src=", "@import", "url("] {
            assert!(!page.replace(data, "").contains(word), "the page fetches nothing: {word}");
        }
    }
}
