//! The processes below the launched commands that have writable memory in common with others. When
//! one of them is killed or fails, a lock in that memory stays locked, and a counter in it is never
//! written again. Afterwards, only this module knows that the process existed.

use std::collections::{BTreeMap, BTreeSet};

use xpu_timer_analysis::Exit;
use xpu_timer_proto::{
    procfs::{self, SharedObject},
    v1::ProcessEvidence,
};

use crate::{
    job::partition::ProcessId,
    node::evidence::of_ended_process,
    os::process::{self, Handle},
};

/// Beyond this number, the oldest ended processes are forgotten.
const MAX_ENDED: usize = 64;
/// Beyond this number, no further process is watched.
const MAX_WATCHED: usize = 512;
/// The mappings of a process are read again after this part of the time for which it is known,
/// if it has mapped memory since, and when that time has doubled. A process may map memory late,
/// after its imports, and be killed soon after that.
const PAUSE_PART: u64 = 4;
/// A job may go on this long on what the process had left in queues.
const BEFORE_NS: u64 = 30_000_000_000;
/// A process that ended this long after the job stood still is not the reason.
const AFTER_NS: u64 = 5_000_000_000;

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Sharers {
    running: BTreeMap<ProcessId, Running>,
    // Oldest first.
    ended: Vec<EndedSharer>,
}

#[derive(Debug)]
struct Running {
    /// Opened when it has memory in common with others.
    process: Option<Handle>,
    command: String,
    objects: BTreeSet<SharedObject>,
    first_ns: u64,
    /// When its mappings were read, and the size of its address space then.
    read: Option<(u64, Option<u64>)>,
}

/// A process that was killed or failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EndedSharer {
    /// Its pid.
    pub pid: i32,
    /// Its command line.
    pub command: String,
    /// How it ended: `killed by SIGKILL`.
    pub exit: String,
    /// CLOCK_MONOTONIC at which its end was noticed.
    pub ended_ns: u64,
    objects: BTreeSet<SharedObject>,
}

impl Sharers {
    /// Looks at processes below the launched commands, and notes which have ended since.
    pub(super) fn note(&mut self, seen: &BTreeSet<ProcessId>, now_ns: u64) {
        for id in seen {
            if self.running.len() < MAX_WATCHED || self.running.contains_key(id) {
                self.running.entry(*id).or_insert_with(|| Running::new(now_ns)).look(*id, now_ns);
            }
        }
        let is_over = |id: &ProcessId, one: &Running| match &one.process {
            Some(process) => process.is_dead(),
            None => !seen.contains(id),
        };
        let (over, running) = std::mem::take(&mut self.running).into_iter().partition(|(id, one)| is_over(id, one));
        self.running = running;
        let over: BTreeMap<ProcessId, Running> = over;
        self.ended.extend(over.into_iter().filter_map(|((pid, _), one)| one.ended(pid, now_ns)));
        self.ended.drain(..self.ended.len().saturating_sub(MAX_ENDED));
    }

    /// Those that ended about when a job launched something last.
    #[must_use]
    pub(super) fn ended_about(&self, last_launch_ns: u64) -> Vec<EndedSharer> {
        let is_near = |one: &&EndedSharer| {
            one.ended_ns + BEFORE_NS >= last_launch_ns && one.ended_ns <= last_launch_ns + AFTER_NS
        };
        self.ended.iter().filter(is_near).cloned().collect()
    }
}

impl Running {
    fn new(now_ns: u64) -> Self {
        Running { process: None, command: String::new(), objects: BTreeSet::new(), first_ns: now_ns, read: None }
    }

    fn look(&mut self, (pid, start): ProcessId, now_ns: u64) {
        // Whether this part of the time until the last reading has passed since.
        let has_passed = |part: u64| self.read.is_none_or(|(ns, _)| now_ns - ns >= (ns - self.first_ns) / part);
        if !has_passed(PAUSE_PART) {
            return;
        }
        let pages = procfs::mapped_pages(pid);
        let is_same = pages.is_some() && self.read.is_some_and(|(_, read)| read == pages);
        // Memory of equal size may have been replaced.
        if is_same && !has_passed(1) {
            return;
        }
        self.read = Some((now_ns, pages));
        let Ok(objects) = procfs::shared_objects(pid) else { return };
        if objects.is_empty() && self.process.is_none() {
            return;
        }
        if self.process.is_none() {
            self.process = Handle::open(pid).ok().filter(|process| process.start == start);
        }
        // A program may have replaced the one that was started.
        (self.command, self.objects) = (process::command(pid), objects);
    }

    /// `None` if it ended as it should, or if nothing is known about its end.
    fn ended(self, pid: i32, ended_ns: u64) -> Option<EndedSharer> {
        let text = self.process?.exit()?;
        let exit = Exit::of(&text);
        let is_failure = exit != Exit::Unknown && !exit.succeeded() && !exit.was_requested();
        let Running { command, objects, .. } = self;
        is_failure.then_some(EndedSharer { pid, command, exit: text, ended_ns, objects })
    }
}

/// The evidence about ended processes, of those that had memory in common with some of `pids`.
#[must_use]
pub(super) fn evidence(ended: &[EndedSharer], pids: &BTreeSet<i32>, node: &str) -> Vec<ProcessEvidence> {
    if ended.is_empty() {
        return Vec::new();
    }
    let living: Vec<(i32, BTreeSet<SharedObject>)> =
        pids.iter().filter_map(|pid| Some((*pid, procfs::shared_objects(*pid).ok()?))).collect();
    let of_one = |one: &EndedSharer| {
        let is_common = |(_, objects): &&(i32, BTreeSet<SharedObject>)| !objects.is_disjoint(&one.objects);
        let shared_memory_with: Vec<i32> = living.iter().filter(is_common).map(|(pid, _)| *pid).collect();
        let evidence = of_ended_process(one.pid, &one.command, &one.exit, node);
        (!shared_memory_with.is_empty()).then_some(ProcessEvidence { shared_memory_with, ..evidence })
    };
    ended.iter().filter(|one| !pids.contains(&one.pid)).filter_map(of_one).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        process::Stdio,
        time::Instant,
    };

    use super::*;

    /// Starts a process that shares a page of `path` when it has read a line, until its input ends.
    fn start(path: &std::path::Path) -> std::process::Child {
        let script = "import mmap, sys\nsys.stdin.readline()\nf = open(sys.argv[1], 'r+b')\n\
                      m = mmap.mmap(f.fileno(), 4096)\nprint('x')\nsys.stdout.flush()\nsys.stdin.read()\n\
                      sys.exit(int(sys.argv[2]))";
        let mut command = std::process::Command::new("python3");
        command.args(["-c", script]).arg(path).arg("0").stdin(Stdio::piped()).stdout(Stdio::piped());
        command.spawn().expect("python3 runs")
    }

    /// The process shares its page now.
    fn share(child: &mut std::process::Child) {
        child.stdin.as_mut().expect("piped").write_all(b"\n").expect("it reads");
        child.stdout.as_mut().expect("piped").read_exact(&mut [0]).expect("it has mapped the file");
    }

    fn id(child: &std::process::Child) -> ProcessId {
        let pid = child.id().cast_signed();
        (pid, procfs::stat(pid).expect("it runs").start_time)
    }

    #[test]
    fn a_killed_process_is_known_with_those_that_shared_its_memory() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ring");
        std::fs::write(&path, [0; 4096]).expect("a file");
        let mut children = [start(&path), start(&path), start(&path)];
        let ids = [id(&children[0]), id(&children[1]), id(&children[2])];
        let all = BTreeSet::from(ids);
        let mut sharers = Sharers::default();
        let looks = |sharers: &mut Sharers, seconds: std::ops::Range<u64>| {
            seconds.for_each(|second| sharers.note(&all, second * 1_000_000_000));
        };
        looks(&mut sharers, 0..8);
        // They have imported their modules for seven seconds. One is killed six seconds later.
        children.iter_mut().for_each(share);
        looks(&mut sharers, 8..14);
        assert_eq!(sharers.ended_about(1), []);
        // One is killed, one ends as it should.
        children[0].kill().and_then(|()| children[0].wait().map(drop)).expect("it ends");
        drop(children[1].stdin.take());
        children[1].wait().expect("it ends");
        let begun = Instant::now();
        while sharers.running.len() > 1 {
            assert!(begun.elapsed().as_secs() < 20, "{sharers:?}");
            sharers.note(&BTreeSet::from([ids[2]]), BEFORE_NS);
        }
        let ended = sharers.ended_about(BEFORE_NS);
        let found = evidence(&ended, &BTreeSet::from([ids[2].0, std::process::id().cast_signed()]), "n");
        children[2].kill().and_then(|()| children[2].wait().map(drop)).expect("it ends");
        // Kernels before 6.15 do not report the end of a process that was already waited for.
        if ended.is_empty() {
            return;
        }
        assert_eq!(ended.iter().map(|one| one.pid).collect::<Vec<_>>(), [ids[0].0]);
        assert_eq!((found.len(), &found[0].shared_memory_with[..]), (1, &[ids[2].0][..]));
        let dump = found[0].dump.as_ref().expect("a dump");
        assert!(dump.command.contains("python3"), "{found:?}");
        assert_eq!(dump.process_state, "X (killed by SIGKILL)");
        assert_eq!(sharers.ended_about(3 * BEFORE_NS), [], "the job went on for long");
        assert_eq!(sharers.ended_about(0), [], "the job stood still before");
    }
}
