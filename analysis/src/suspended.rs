//! Tasks of asyncio and trio, and greenlets, that wait: their descriptions, facts about a process,
//! and lines of evidence about the culprits.

use std::fmt;

use xpu_timer_proto::{
    FUTURE, WAKEUP,
    server::{PySpyFrame, PySpyStacktrace, PySuspended, PySuspendedKind, Stacktrace},
    v1::{Evidence, HostSuspended, RankEvidence},
};

use crate::{stacks::own_place, verdict::EvidenceLine};

/// Maximum number of places of one process.
const MAX_OF_PROCESS: usize = 4;
/// Lines of a verdict.
const MOST_LINES: usize = 8;
/// Functions that wait for a timer, with parts of the paths of their files.
const TIMERS: [(&str, &str); 4] = [
    ("sleep", "/asyncio/tasks.py"),
    ("sleep", "/gevent/hub.py"),
    ("sleep", "/eventlet/greenthread.py"),
    ("sleep_until", "/trio/_timeouts.py"),
];

/// The name of one or several: if they differ, their common beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Names {
    text: String,
    is_cut: bool,
}

impl Names {
    fn new(name: &str) -> Self {
        Names { text: name.to_owned(), is_cut: false }
    }

    fn add(&mut self, other: &Names) {
        if *self == *other {
            return;
        }
        let alike = self.text.chars().zip(other.text.chars()).take_while(|(one, other)| one == other);
        let bytes = alike.map(|(letter, _)| letter.len_utf8()).sum();
        // The first digits of a number say nothing.
        let kept = self.text[..bytes].trim_end_matches(|letter: char| letter.is_ascii_digit()).len();
        self.text.truncate(kept);
        self.is_cut = true;
    }
}

impl fmt::Display for Names {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}{}", self.text, if self.is_cut { "…" } else { "" })
    }
}

/// Tasks or greenlets that wait for the same kind of thing, for example for a future.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Tasks or greenlets.
    pub kind: PySuspendedKind,
    /// Their number.
    pub count: u64,
    names: Names,
    /// The text that the capture gives for the awaited object, up to the object's name.
    awaits: String,
    awaited: Option<Names>,
}

impl Waiting {
    /// One task or greenlet: its name, and what it awaits as the capture says it.
    #[must_use]
    pub fn new(kind: PySuspendedKind, name: &str, awaits: &str) -> Self {
        let (awaits, awaited) = match awaits.split_once('\'') {
            Some((what, name)) => (what, Some(Names::new(name.strip_suffix('\'').unwrap_or(name)))),
            None => (awaits, None),
        };
        Waiting { kind, count: 1, names: Names::new(name), awaits: awaits.to_owned(), awaited }
    }

    /// Whether the other ones can be added to these.
    #[must_use]
    pub fn is_like(&self, other: &Waiting) -> bool {
        (self.kind, &self.awaits, self.awaited.is_some()) == (other.kind, &other.awaits, other.awaited.is_some())
    }

    /// Adds others that are like these.
    pub fn add(&mut self, other: &Waiting) {
        self.count += other.count;
        self.names.add(&other.names);
        if let (Some(awaited), Some(other)) = (&mut self.awaited, &other.awaited) {
            awaited.add(other);
        }
    }

    /// The name, or the common beginning of the names and `…`.
    #[must_use]
    pub fn name(&self) -> String {
        self.names.to_string()
    }

    /// The object that they await; empty if unknown.
    #[must_use]
    pub fn awaits(&self) -> String {
        let awaited = self.awaited.as_ref().map(|name| format!("'{name}'")).unwrap_or_default();
        format!("{}{awaited}", self.awaits)
    }

    /// Whether they wait for other tasks.
    #[must_use]
    pub fn awaits_another(&self) -> bool {
        self.kind != PySuspendedKind::Greenlet && ![FUTURE, WAKEUP].contains(&&*self.awaits)
    }

    /// Describes them: `task 'upload' of rank 1 awaits a future`, or `3 greenlets 'Greenlet' of
    /// rank 1 wait`. `of` is `rank 1`, or empty.
    #[must_use]
    pub fn describe(&self, of: &str) -> String {
        let (noun, one) = (self.kind.noun(), self.count == 1);
        let who = if one { noun.to_owned() } else { format!("{} {noun}s", self.count) };
        let name = if self.names.text.is_empty() { String::new() } else { format!(" '{}'", self.names) };
        let of = if of.is_empty() { String::new() } else { format!(" of {of}") };
        let end = if one { "s" } else { "" };
        match self.awaits() {
            awaits if awaits.is_empty() => format!("{who}{name}{of} wait{end}"),
            awaits => format!("{who}{name}{of} await{end} {awaits}"),
        }
    }
}

/// The tasks that await a future or a wakeup, and the greenlets, that wait at one place in both
/// samples.
pub(crate) fn facts(dump: &Stacktrace) -> Vec<HostSuspended> {
    let first = dump.first_sample.as_ref().map(|sample| of_threads(&sample.py_stacktrace));
    let mut found: Vec<(Waiting, String)> = Vec::new();
    for suspended in of_threads(&dump.py_stacktrace) {
        if first.as_ref().is_some_and(|first| !first.contains(&suspended)) {
            continue;
        }
        // Equal workers of one pool are one line.
        if let Some(known) = found.iter_mut().find(|known| known.0.is_like(&suspended.0) && known.1 == suspended.1) {
            known.0.add(&suspended.0);
        } else if found.len() < MAX_OF_PROCESS {
            found.push(suspended);
        }
    }
    let message = |(waiting, place): (Waiting, String)| HostSuspended {
        kind: waiting.kind.into(),
        name: waiting.name(),
        place,
        count: if waiting.count == 1 { 0 } else { waiting.count.try_into().unwrap_or(u32::MAX) },
        awaits: Some(waiting.awaits()).filter(|awaits| awaits != FUTURE).unwrap_or_default(),
    };
    found.into_iter().map(message).collect()
}

fn of_threads(threads: &[PySpyStacktrace]) -> Vec<(Waiting, String)> {
    threads.iter().flat_map(|thread| &thread.suspended).filter_map(fact).collect()
}

/// A task or greenlet with its place, if it waits neither for a timer nor for another task.
fn fact(suspended: &PySuspended) -> Option<(Waiting, String)> {
    let is_timer = |frame: &PySpyFrame| {
        let is = |(name, file): &(&str, &str)| frame.func_name == *name && frame.file_name.contains(file);
        TIMERS.iter().any(is)
    };
    let waiting = Waiting::new(suspended.kind(), &suspended.name, &suspended.awaits);
    // trio has tasks of its own.
    let is_of_trio = suspended.frames.iter().all(|frame| frame.file_name.contains("/trio/_core/"));
    if waiting.awaits_another() || is_of_trio || suspended.frames.iter().any(is_timer) {
        return None;
    }
    Some((waiting, own_place(&suspended.frames)?))
}

/// The facts about a rank, from its dump or from the facts in its place.
pub(crate) fn of_rank(rank: &RankEvidence) -> Vec<HostSuspended> {
    match (&rank.dump, &rank.host) {
        (Some(dump), _) => facts(dump),
        (None, Some(host)) => host.suspended.clone(),
        (None, None) => Vec::new(),
    }
}

/// The lines about the tasks and greenlets of these ranks.
pub(crate) fn lines(evidence: &Evidence, ranks: &[u32]) -> Vec<EvidenceLine> {
    let of_ranks = evidence.ranks.iter().filter(|rank| ranks.contains(&rank.rank));
    let line = |rank: u32, suspended: HostSuspended| {
        let is_future = suspended.kind() != PySuspendedKind::Greenlet && suspended.awaits.is_empty();
        let awaits = if is_future { FUTURE } else { &suspended.awaits };
        let count = u64::from(suspended.count.max(1));
        let waiting = Waiting { count, ..Waiting::new(suspended.kind(), &suspended.name, awaits) };
        let text = format!("{} at {}", waiting.describe(&format!("rank {rank}")), suspended.place);
        EvidenceLine { text, ranks: vec![rank] }
    };
    let all = of_ranks.flat_map(|rank| of_rank(rank).into_iter().map(|suspended| line(rank.rank, suspended)));
    all.take(MOST_LINES).collect()
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::server::ProcessSample;

    use super::*;

    fn task(name: &str, awaits: &str, frames: &[(&str, &str)]) -> PySuspended {
        let frame = |(func_name, file_name): &(&str, &str)| PySpyFrame {
            func_name: (*func_name).into(),
            file_name: (*file_name).into(),
            module: String::new(),
        };
        PySuspended {
            kind: PySuspendedKind::Task.into(),
            name: name.into(),
            frames: frames.iter().map(frame).collect(),
            awaits: awaits.into(),
        }
    }

    fn threads(suspended: &[PySuspended]) -> Vec<PySpyStacktrace> {
        vec![PySpyStacktrace { suspended: suspended.to_vec(), ..Default::default() }]
    }

    #[test]
    fn tasks_of_a_culprit_that_await_a_future_are_named() {
        const LIBRARY: &str = "/usr/lib/python3.12/asyncio/";
        let get = format!("{LIBRARY}queues.py:158");
        let sleep = format!("{LIBRARY}tasks.py:665");
        let upload = task("upload", "a future", &[("get", &get), ("fetch", "/job/train.py:31")]);
        let all = [
            task("Task-1", "task 'upload'", &[("main", "/job/train.py:50")]),
            upload.clone(),
            task("Task-3", "a future", &[("get", &get), ("fetch", "/job/train.py:31")]),
            task("Task-4", "a future", &[("sleep", &sleep), ("beat", "/job/train.py:9")]),
            task("Task-5", "a future", &[("load", "/job/train.py:20")]),
        ];
        // Task-5 waited elsewhere in the first sample.
        let before = [upload, task("Task-5", "a future", &[("load", "/job/train.py:19")])];
        let first = ProcessSample { py_stacktrace: threads(&before), ..Default::default() };
        let dump = Stacktrace { py_stacktrace: threads(&all), first_sample: Some(first), ..Default::default() };
        let rank = RankEvidence { rank: 1, dump: Some(Box::new(dump.clone())), ..Default::default() };
        let evidence = Evidence { ranks: vec![rank], ..Default::default() };
        let lines = lines(&evidence, &[1]);
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0].text, "task 'upload' of rank 1 awaits a future at train.py:31 in fetch");
        assert!(super::lines(&evidence, &[0]).is_empty());
        // Tasks of trio that sleep get no line.
        let of_trio = |name: &str, leaf: (&str, &str)| task(name, "a wakeup", &[leaf, ("fetch", "/job/train.py:31")]);
        let wakeups = [
            of_trio("receive", ("receive", "/v/site-packages/trio/_channel.py:30")),
            of_trio("beat", ("sleep_until", "/v/site-packages/trio/_timeouts.py:90")),
            task("<init>", "a wakeup", &[("init", "/v/site-packages/trio/_core/_run.py:2154")]),
        ];
        let dump = Stacktrace { py_stacktrace: threads(&wakeups), ..Default::default() };
        let rank = RankEvidence { rank: 1, dump: Some(Box::new(dump)), ..Default::default() };
        for rank in [crate::condense(&rank, 1), rank] {
            let evidence = Evidence { ranks: vec![rank], ..Default::default() };
            let lines = super::lines(&evidence, &[1]);
            let texts: Vec<&str> = lines.iter().map(|line| line.text.as_str()).collect();
            assert_eq!(texts, ["task 'receive' of rank 1 awaits a wakeup at train.py:31 in fetch"]);
        }
        // A node condenses the dump to facts.
        let mut condensed = evidence.clone();
        condensed.ranks[0] = crate::condense(&evidence.ranks[0], 1);
        assert_eq!(super::lines(&condensed, &[1]), lines);
        // A pool of equal workers is one line.
        let worker = |number| task(&format!("Task-{number}"), "a future", &[("fetch", "/job/train.py:31")]);
        let mut pool: Vec<PySuspended> = (9..12).map(worker).collect();
        // Greenlets of eventlet that sleep get no line.
        let sleeps =
            task("GreenThread", "", &[("sleep", "/v/eventlet/greenthread.py:38"), ("beat", "/job/train.py:9")]);
        pool.push(PySuspended { kind: PySuspendedKind::Greenlet.into(), ..sleeps });
        let dump = Stacktrace { py_stacktrace: threads(&pool), ..Default::default() };
        let rank = RankEvidence { rank: 1, dump: Some(Box::new(dump)), ..Default::default() };
        for rank in [crate::condense(&rank, 1), rank] {
            let evidence = Evidence { ranks: vec![rank], ..Default::default() };
            let lines = super::lines(&evidence, &[1]);
            let texts: Vec<&str> = lines.iter().map(|line| line.text.as_str()).collect();
            assert_eq!(texts, ["3 tasks 'Task-…' of rank 1 await a future at train.py:31 in fetch"]);
        }
    }

    #[test]
    fn those_that_wait_are_named_by_what_they_have_in_common() {
        use PySuspendedKind::{Greenlet, Task};
        let described = |all: &[(PySuspendedKind, &str, &str)], of: &str| {
            let mut each = all.iter().map(|(kind, name, awaits)| Waiting::new(*kind, name, awaits));
            let mut waiting = each.next().unwrap();
            each.for_each(|other| {
                assert!(waiting.is_like(&other));
                waiting.add(&other);
            });
            waiting.describe(of)
        };
        let one = [(Task, "upload", "task 'fetch'")];
        assert_eq!(described(&one, "rank 1"), "task 'upload' of rank 1 awaits task 'fetch'");
        let three = [(Task, "Task-9", "task 'a-3'"), (Task, "Task-10", "task 'a-4'"), (Task, "Task-11", "task 'a-4'")];
        assert_eq!(described(&three, ""), "3 tasks 'Task-…' await task 'a-…'");
        assert_eq!(described(&[(Task, "é1", "a future"), (Task, "è1", "a future")], ""), "2 tasks await a future");
        assert_eq!(
            described(&[(Greenlet, "Pool", ""), (Greenlet, "Pool", "")], "ranks 0-1 (2)"),
            "2 greenlets 'Pool' of ranks 0-1 (2) wait"
        );
        assert!(!Waiting::new(Task, "a", "a future").is_like(&Waiting::new(Task, "a", "task 'b'")));
    }
}
