//! Takes in the dumps of all ranks, one after the other, and puts the report together. Nothing of a dump is kept but
//! numbers of what was seen before.

use super::communicators::Communicators;
use super::data::{Child, Condition, Conditions, Group, Moved, Rank, Report, Sample, TextId, Thread, Trees};
use super::mixed::mix;
use super::numbers::{Layer, Table, Texts};
use crate::dump::{Dump, Frame};
use crate::merge::{Merged, Mode};
use std::collections::{BTreeMap, HashMap};
use xpu_timer_analysis::Verdict;
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::server::{CaptureMethod, ProcessSample, PstackStacktrace, PySpyStacktrace, Stacktrace};

/// Puts a [`Report`] together.
#[derive(Debug)]
pub struct Builder {
    texts: Texts,
    native: Layer,
    python: Layer,
    mixed: Layer,
    /// At least one native thread was found to be a Python thread.
    matched: bool,
    /// Until `finish`, the numbers in here are those of stacks, not of nodes.
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
        texts.number(String::new());
        Builder {
            texts: Texts(texts),
            native: Layer::default(),
            python: Layer::default(),
            mixed: Layer::default(),
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

/// What one look at one process gives.
struct Seen {
    sample: Sample,
    /// By thread id: what it was, and how often it had run.
    threads: HashMap<u32, (Thread, u64)>,
    /// The main thread's.
    main: Option<Thread>,
}

/// One thread in both languages; at least one of the two is there.
#[derive(Clone, Copy)]
struct Pair<'a> {
    native: Option<&'a PstackStacktrace>,
    python: Option<&'a PySpyStacktrace>,
}

impl Pair<'_> {
    fn tid(&self) -> u32 {
        self.native.map(|thread| thread.pid).or(self.python.map(|thread| thread.os_thread_id)).unwrap_or(0)
    }
}

impl Builder {
    /// Adds the file of one rank, which `dump` was decoded from.
    pub fn add_file(&mut self, rank: u32, file: &[u8], dump: &Dump<'_>) {
        match <Stacktrace as xpu_timer_proto::Message>::decode(file) {
            Ok(message) => self.add(rank, &message),
            // A thread name that is cut within a character is no text, and a strict decoder refuses the file for it.
            Err(_) => self.add(rank, &message_of(dump)),
        }
    }

    /// Adds the dump of one rank. Of several dumps of one rank, all count in the trees and the first one is shown.
    pub fn add(&mut self, rank: u32, dump: &Stacktrace) {
        let first = dump.first_sample.as_ref().map(|first| self.process(first, dump.pid, None));
        let seen = self.sample(
            (&dump.stacktrace, &dump.py_stacktrace, &dump.process_state),
            dump.pid,
            Some(rank),
            first.as_ref(),
        );
        let times = dump.first_sample.as_ref().zip(dump.last_sample.as_ref());
        let moved = times.zip(first.as_ref()).map(|((a, b), first)| movement(a, b, first, &seen));
        if let Some((a, b)) = times {
            self.between_ns = self.between_ns.max(b.captured_unix_ns.saturating_sub(a.captured_unix_ns));
        }
        let samples = [&dump.first_sample, &dump.last_sample].into_iter().flatten();
        for sample in samples.clone() {
            self.captured_ns = self.captured_ns.max(sample.captured_unix_ns);
        }
        if let Some(flight) = &dump.flight_record {
            self.communicators.add(rank, flight);
        }
        let complaints = [&dump.pstack_stderr, &dump.pyspy_stderr];
        let errors = complaints.into_iter().chain(samples.flat_map(|sample| &sample.errors));
        let mut errors: Vec<TextId> = errors
            .map(|text| text.trim())
            .filter(|text| !text.is_empty())
            .map(|text| self.texts.number(text))
            .collect();
        errors.sort_unstable();
        errors.dedup();
        let children = dump.children.iter().map(|child| {
            let mut looks: Vec<Seen> = Vec::new();
            for sample in &child.samples {
                let look = self.process(sample, child.pid, looks.last());
                looks.push(look);
            }
            let moved = match (&child.samples[..], &looks[..]) {
                ([a, .., b], [before, .., after]) => Some(movement(a, b, before, after)),
                _ => None,
            };
            Child {
                pid: child.pid,
                parent: child.parent_pid,
                command: self.texts.number(&child.command),
                samples: looks.iter().map(|look| look.sample).collect(),
                moved,
            }
        });
        let children = children.collect();
        let entry = Rank {
            rank,
            pid: dump.pid,
            node: self.texts.number(&dump.node),
            command: self.texts.number(&dump.command),
            errors,
            first: first.map(|first| first.sample),
            last: seen.sample,
            moved,
            children,
        };
        self.ranks.entry(rank).or_insert(entry);
    }

    fn process(&mut self, sample: &ProcessSample, pid: i32, before: Option<&Seen>) -> Seen {
        self.sample((&sample.stacktrace, &sample.py_stacktrace, &sample.process_state), pid, None, before)
    }

    /// Numbers everything in one sample. Its stacks count for `rank`, if any, in the trees.
    fn sample(
        &mut self,
        (native, python, state): (&[PstackStacktrace], &[PySpyStacktrace], &str),
        pid: i32,
        rank: Option<u32>,
        before: Option<&Seen>,
    ) -> Seen {
        let pairs = pair(native, python);
        let main = main_thread(&pairs, pid);
        let (mut numbers, mut tids) = (Vec::with_capacity(pairs.len()), Vec::with_capacity(pairs.len()));
        let first_tid = pairs.first().map_or(0, Pair::tid);
        let mut last_tid = i64::from(first_tid);
        let (mut threads, mut main_kind) = (HashMap::with_capacity(pairs.len()), None);
        for (place, pair) in pairs.iter().enumerate() {
            let mut thread = self.thread(pair, rank, main == Some(place));
            let switches = pair.native.map_or(0, |thread| thread.context_switches);
            let earlier = before.and_then(|before| before.threads.get(&pair.tid()));
            thread.ran = earlier.is_some_and(|(_, earlier)| *earlier != switches);
            numbers.push(i64::from(self.threads.number(thread.clone())));
            tids.push(i64::from(pair.tid()) - last_tid);
            last_tid = i64::from(pair.tid());
            if main == Some(place) {
                main_kind = Some(thread.clone());
            }
            threads.insert(pair.tid(), (thread, switches));
        }
        let sample = Sample {
            state: self.texts.number(state),
            threads: self.lists.number(numbers),
            tid: first_tid,
            tids: self.lists.number(tids),
            main: main.map(|place| u32::try_from(place).unwrap_or(u32::MAX)),
        };
        Seen { sample, threads, main: main_kind }
    }

    fn thread(&mut self, pair: &Pair<'_>, rank: Option<u32>, main: bool) -> Thread {
        let native: Vec<Frame<'_>> = pair.native.map_or(Vec::new(), |thread| {
            thread.frames.iter().map(|f| Frame { func: f.func_name.as_bytes(), file: f.file_name.as_bytes() }).collect()
        });
        let python: Vec<Frame<'_>> = pair.python.map_or(Vec::new(), |thread| {
            thread.frames.iter().map(|f| Frame { func: f.func_name.as_bytes(), file: f.file_name.as_bytes() }).collect()
        });
        self.matched |= !native.is_empty() && !python.is_empty();
        let mut thread = Thread {
            native: self.native.add(&native, rank, main),
            python: self.python.add(&python, rank, main),
            mixed: self.mixed.add(&mix(&native, &python), rank, main),
            ..Thread::default()
        };
        if let Some(python) = pair.python {
            thread.name = self.texts.number(&python.thread_name);
            thread.gil = python.owns_gil;
        }
        if let Some(native) = pair.native {
            if thread.name == 0 {
                thread.name = self.texts.number(&native.thread_name);
            }
            thread.state = self.texts.number(&native.state);
            thread.wchan = self.texts.number(&native.wchan);
            thread.kernel = self.texts.number(&native.kernel_stack.join("\n"));
            thread.incomplete = self.texts.number(&native.incomplete);
            thread.capture = self.texts.number(match native.capture() {
                CaptureMethod::Unspecified => "",
                CaptureMethod::ZeroStop => "without stopping it",
                CaptureMethod::Ptrace => "while it was stopped for some microseconds",
                CaptureMethod::KernelOnly => "kernel only",
            });
        }
        thread
    }

    /// Puts everything together. `notes` is what a reader should know of the folder, one sentence each.
    pub fn finish(
        self,
        folder: &str,
        world: u32,
        merged: &Merged,
        verdict: Option<Verdict>,
        notes: Vec<String>,
    ) -> Report {
        let Builder { mut texts, native, python, mixed, matched, mut threads, lists, ranks, .. } = self;
        let mut sets = Table::new();
        let mixed = if matched { mixed } else { Layer::default() };
        let (native, native_ends) = native.finish(&mut texts, &mut sets);
        let (python, python_ends) = python.finish(&mut texts, &mut sets);
        let (mixed, mixed_ends) = mixed.finish(&mut texts, &mut sets);
        for thread in &mut threads.items {
            let place = |stack: Option<u32>, ends: &[u32]| ends.get(stack? as usize).copied();
            thread.native = place(thread.native, &native_ends);
            thread.python = place(thread.python, &python_ends);
            thread.mixed = place(thread.mixed, &mixed_ends);
        }
        let groups = merged.groups.iter().map(|group| Group {
            ranks: sets.number(group.ranks.to_string()),
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
        let conditions = conditions(world, &states, verdict.as_ref());
        let conditions = conditions
            .into_iter()
            .map(|(condition, ranks)| Conditions { condition, ranks: sets.number(ranks.to_string()) })
            .collect();
        let mut communicators = verdict.as_ref().map(|verdict| verdict.communicators.clone()).unwrap_or_default();
        communicators.extend(self.communicators.finish(&communicators));
        let ms = |ns: u64| (ns > 0).then_some(ns / 1_000_000);
        Report {
            folder: folder.to_owned(),
            world,
            verdict,
            notes,
            captured_ms: ms(self.captured_ns),
            between_ms: ms(self.between_ns),
            texts: texts.0.items,
            sets: sets.items,
            trees: Trees { python, native, mixed },
            groups,
            conditions,
            communicators,
            threads: threads.items,
            lists: lists.items,
            ranks: ranks.into_values().collect(),
        }
    }
}

/// Native and Python threads together, by the kernel's thread id, in the order of the native ones.
fn pair<'a>(native: &'a [PstackStacktrace], python: &'a [PySpyStacktrace]) -> Vec<Pair<'a>> {
    let mut by_tid: HashMap<u32, usize> = HashMap::with_capacity(python.len());
    for (i, thread) in python.iter().enumerate().filter(|(_, thread)| thread.os_thread_id != 0) {
        by_tid.entry(thread.os_thread_id).or_insert(i);
    }
    let mut alone = vec![true; python.len()];
    let mut pairs = Vec::with_capacity(native.len());
    for thread in native {
        let matched = by_tid.remove(&thread.pid);
        matched.into_iter().for_each(|i| alone[i] = false);
        pairs.push(Pair { native: Some(thread), python: matched.map(|i| &python[i]) });
    }
    let rest = python.iter().zip(alone).filter(|(_, alone)| *alone);
    pairs.extend(rest.map(|(thread, _)| Pair { native: None, python: Some(thread) }));
    pairs
}

/// The main thread, as `merge` chooses it: among the Python threads that have a stack, else among the native ones; by its
/// name, its id, the module at its root, else the first.
fn main_thread(pairs: &[Pair<'_>], pid: i32) -> Option<usize> {
    let pid = u32::try_from(pid).unwrap_or(0);
    let python = |is_main: &dyn Fn(&PySpyStacktrace) -> bool| {
        pairs.iter().position(|pair| pair.python.is_some_and(|thread| !thread.frames.is_empty() && is_main(thread)))
    };
    let native = |is_main: &dyn Fn(&PstackStacktrace) -> bool| {
        pairs.iter().position(|pair| pair.native.is_some_and(|thread| !thread.frames.is_empty() && is_main(thread)))
    };
    python(&|thread| thread.thread_name == "MainThread")
        .or_else(|| python(&|thread| pid != 0 && thread.os_thread_id == pid))
        .or_else(|| python(&|thread| thread.frames.last().is_some_and(|root| root.func_name == "<module>")))
        .or_else(|| python(&|_| true))
        .or_else(|| native(&|thread| pid != 0 && thread.pid == pid))
        .or_else(|| native(&|_| true))
}

/// What changed between two looks at one process.
fn movement(a: &ProcessSample, b: &ProcessSample, before: &Seen, after: &Seen) -> Moved {
    let stack = |thread: &Thread| (thread.native, thread.python);
    let mut stacks = before.threads.keys().filter(|tid| !after.threads.contains_key(tid)).count();
    let mut ran = 0;
    for (tid, (thread, _)) in &after.threads {
        let same = before.threads.get(tid).is_some_and(|(earlier, _)| stack(earlier) == stack(thread));
        stacks += usize::from(!same);
        ran += usize::from(thread.ran);
    }
    let io_bytes = if a.io_bytes == 0 || b.io_bytes == 0 { 0 } else { b.io_bytes.saturating_sub(a.io_bytes) };
    Moved {
        cpu_ms: b.cpu_time_ns.saturating_sub(a.cpu_time_ns) / 1_000_000,
        io_bytes,
        main: matches!((&before.main, &after.main), (Some(before), Some(after)) if stack(before) != stack(after)),
        stacks: u32::try_from(stacks).unwrap_or(u32::MAX),
        ran: u32::try_from(ran).unwrap_or(u32::MAX),
    }
}

/// The condition of every rank of the world, and of every rank beyond it that has a dump.
fn conditions(world: u32, states: &[(u32, &str)], verdict: Option<&Verdict>) -> Vec<(Condition, RankSet)> {
    let mut of: BTreeMap<Condition, RankSet> = BTreeMap::new();
    let mut known = RankSet::new();
    let mut put = |condition: Condition, rank: u32| {
        if known.insert(rank) {
            of.entry(condition).or_default().insert(rank);
        }
    };
    // What the collector saw of the process comes before the state that a dump was taken in: the process may be gone by now.
    for group in verdict.into_iter().flat_map(|verdict| &verdict.ranks) {
        let condition = match group.presence.as_str() {
            "dead" => Condition::Dead,
            "left" => Condition::Left,
            _ => continue,
        };
        group.ranks.iter().for_each(|&rank| put(condition, rank));
    }
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

/// The message that a dump would have been decoded from, as far as the viewer's own decoder reads it.
fn message_of(dump: &Dump<'_>) -> Stacktrace {
    use xpu_timer_proto::server::{PstackFrame, PySpyFrame};
    let name = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
    let native = dump.native.iter().map(|thread| PstackStacktrace {
        pid: thread.tid,
        thread_name: name(thread.name),
        frames: dump
            .frames_of(thread)
            .iter()
            .map(|frame| PstackFrame { func_name: name(frame.func), file_name: name(frame.file), ..Default::default() })
            .collect(),
        ..Default::default()
    });
    let python = dump.python.iter().map(|thread| PySpyStacktrace {
        os_thread_id: thread.tid,
        thread_name: name(thread.name),
        frames: dump
            .frames_of(thread)
            .iter()
            .map(|frame| PySpyFrame { func_name: name(frame.func), file_name: name(frame.file), ..Default::default() })
            .collect(),
        ..Default::default()
    });
    Stacktrace {
        stacktrace: native.collect(),
        py_stacktrace: python.collect(),
        pid: dump.pid,
        process_state: dump.process_state.to_owned(),
        pstack_stderr: dump.pstack_stderr.clone().into_owned(),
        pyspy_stderr: dump.pyspy_stderr.clone().into_owned(),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::merge::Merger;
    use crate::report::data::Tree;
    use xpu_timer_analysis::judge;
    use xpu_timer_proto::Message;
    use xpu_timer_proto::server::{PstackFrame, PySpyFrame};
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

    /// A rank with a main thread, a pool thread that stands still and a thread that goes on.
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
            merger.add(*rank, &decoded).unwrap();
            builder.add_file(*rank, &bytes, &decoded);
        }
        builder.finish("folder", world, &merger.finish(), verdict, Vec::new())
    }

    /// Every node as its path and its ranks.
    fn shown(report: &Report, tree: &Tree, sets: &[u32]) -> Vec<String> {
        let mut path: Vec<&str> = Vec::new();
        (0..tree.word.len())
            .map(|node| {
                path.truncate(tree.depth[node] as usize);
                path.push(report.texts[tree.word[node] as usize].split('@').next().unwrap());
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
    fn what_repeats_across_ranks_stands_once() {
        let same: Vec<_> = (0..50).map(|i| (i, rank(100 + 10 * i, "load", "tick run"))).collect();
        let report = report(&same, 50, None);
        assert_eq!(report.ranks.len(), 50);
        // One list of threads a sample, and one of the differences of their ids.
        assert_eq!(report.lists.len(), 3);
        assert_eq!(report.sets, ["0-49"].map(str::to_owned).into_iter().chain([String::new()]).collect::<Vec<_>>());
    }

    #[test]
    fn movement_is_told_by_thread() {
        let report = report(&[(0, rank(100, "load", "sleep run"))], 1, None);
        let rank = &report.ranks[0];
        assert_eq!(rank.moved, Some(Moved { cpu_ms: 400, io_bytes: 0, main: false, stacks: 1, ran: 1 }));
        assert_eq!(report.between_ms, Some(4000));
        assert_eq!((rank.last.main, rank.last.tid), (Some(0), 100));
        let threads = &report.lists[rank.last.threads as usize];
        let ran: Vec<bool> = threads.iter().map(|&thread| report.threads[thread as usize].ran).collect();
        assert_eq!(ran, [false, false, true]);
        // The first sample's stack has a place in the tree although no rank of the last one comes by.
        let first = report.lists[rank.first.unwrap().threads as usize][2];
        let node = report.threads[first as usize].python.unwrap() as usize;
        assert_eq!(report.texts[report.trees.python.word[node] as usize], "tick@t.py:1");
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
    fn a_thread_name_that_is_cut_within_a_character_costs_nothing() {
        // Field 1: a thread whose name ends within a character, with a frame `f`.
        let file = [0x0a, 9, 0x12, 2, b'a', 0xe6, 0x1a, 3, 0x0a, 1, b'f'];
        let dump = Dump::decode(&file).unwrap();
        assert!(<Stacktrace as Message>::decode(&file[..]).is_err());
        let (mut builder, mut merger) = (Builder::default(), Merger::default());
        merger.add(0, &dump).unwrap();
        builder.add_file(0, &file, &dump);
        let report = builder.finish("folder", 1, &merger.finish(), None, Vec::new());
        assert!(report.texts.contains(&"a\u{fffd}".to_owned()) && report.texts.contains(&"f@".to_owned()));
    }

    #[test]
    fn no_name_can_leave_the_data() {
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
