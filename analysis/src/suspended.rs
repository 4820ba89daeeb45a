//! Tasks of asyncio and greenlets that wait: facts about a process, and lines of evidence about the
//! culprits.

use xpu_timer_proto::{
    server::{PySpyFrame, PySpyStacktrace, PySuspended, PySuspendedKind, Stacktrace},
    v1::{Evidence, HostSuspended, RankEvidence},
};

use crate::{stacks::own_place, verdict::EvidenceLine};

/// Maximum number of tasks and greenlets of one process.
const MAX_OF_PROCESS: usize = 4;
/// Lines of a verdict.
const MOST_LINES: usize = 8;
/// What the capture says of a task that waits for no other task.
const FUTURE: &str = "a future";
/// Functions that wait for a timer, with parts of the paths of their files.
const TIMERS: [(&str, &str); 2] = [("sleep", "/asyncio/tasks.py"), ("sleep", "/gevent/hub.py")];

/// The tasks that await a future, and the greenlets, that wait at one place in both samples.
pub(crate) fn facts(dump: &Stacktrace) -> Vec<HostSuspended> {
    let first = dump.first_sample.as_ref().map(|sample| of_threads(&sample.py_stacktrace));
    let mut found: Vec<HostSuspended> = Vec::new();
    for suspended in of_threads(&dump.py_stacktrace) {
        let stays = first.as_ref().is_none_or(|first| first.contains(&suspended));
        // Equal workers of one pool are one line.
        let is_known = found.iter().any(|known| (known.kind, &known.place) == (suspended.kind, &suspended.place));
        if stays && !is_known && found.len() < MAX_OF_PROCESS {
            found.push(suspended);
        }
    }
    found
}

fn of_threads(threads: &[PySpyStacktrace]) -> Vec<HostSuspended> {
    threads.iter().flat_map(|thread| &thread.suspended).filter_map(fact).collect()
}

fn fact(suspended: &PySuspended) -> Option<HostSuspended> {
    let is_timer = |frame: &PySpyFrame| {
        let is = |(name, file): &(&str, &str)| frame.func_name == *name && frame.file_name.contains(file);
        TIMERS.iter().any(is)
    };
    let innermost = suspended.frames.first()?;
    let waits_for_task = suspended.kind() == PySuspendedKind::Task && suspended.awaits != FUTURE;
    if waits_for_task || is_timer(innermost) {
        return None;
    }
    let place = own_place(&suspended.frames)?;
    Some(HostSuspended { kind: suspended.kind, name: suspended.name.clone(), place })
}

/// The facts about a rank, from its dump or from the facts in its place.
fn of_rank(rank: &RankEvidence) -> Vec<HostSuspended> {
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
        let what = match suspended.kind() {
            PySuspendedKind::Greenlet => format!("greenlet '{}' of rank {rank} waits", suspended.name),
            _ => format!("task '{}' of rank {rank} awaits a future", suspended.name),
        };
        EvidenceLine { text: format!("{what} at {}", suspended.place), ranks: vec![rank] }
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
        // A node condenses the dump to facts.
        let mut condensed = evidence.clone();
        condensed.ranks[0] = crate::condense(&evidence.ranks[0], 1);
        assert_eq!(super::lines(&condensed, &[1]), lines);
    }
}
