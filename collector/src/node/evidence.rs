//! Turns captures, rings and the registry into the input of the judge and of the files: one
//! `Stacktrace` and one `RankEvidence` for each rank.

use std::{collections::BTreeMap, sync::Arc};

use xpu_timer_capture::ProcessCapture;
use xpu_timer_proto::{
    procfs,
    server::{ChildProcess, ProcessSample, Stacktrace},
    v1::{FlightRecord, Presence, ProcessEvidence, RankEvidence, RankInfo},
};

use crate::{
    job::partition::ProcessId,
    node::failures::{self, SharedFault},
    os::{
        process::{self, Handle},
        ring_file::RingFile,
    },
};

/// A rank of the job at the time of the trigger.
#[derive(Debug, Clone)]
pub(super) struct Subject {
    /// Rank in the job.
    pub rank: u32,
    /// State of its process.
    pub presence: Presence,
    /// Identity that the rank reports.
    pub info: RankInfo,
    /// The process; `None` when it does not exist or is not visible.
    pub process: Option<Arc<Handle>>,
    /// Its ring, which outlives it.
    pub ring: Option<Arc<RingFile>>,
    /// How it ended, when known.
    pub exit: Option<String>,
    /// Name of the node.
    pub node: String,
    /// Whether its process still exists a while after its goodbye.
    pub lingers: bool,
    /// Whether it has sent a hello.
    pub registered: bool,
    /// The fatal signal that it has received.
    pub fault: SharedFault,
}

/// The capture of one rank.
#[derive(Debug, Default)]
pub(super) struct RankCapture {
    /// First and second sample, each with the child processes.
    pub samples: [Option<ProcessCapture>; 2],
    /// Flight record, read after the second sample.
    pub flight: Option<FlightRecord>,
    /// The parts that could not be captured, and why.
    pub errors: Vec<String>,
}

impl Subject {
    /// The process to capture, if it still runs.
    #[must_use]
    pub(super) fn pid(&self) -> Option<i32> {
        self.process.as_ref().filter(|process| !process.is_dead()).map(|process| process.pid)
    }

    /// The process that started this one, if it has ended.
    #[must_use]
    pub(super) fn ended_parent(&self) -> Option<i32> {
        let parent = *self.process.as_ref()?.ancestors.first()?;
        (!process::is_alive(parent)).then_some(parent.0)
    }

    /// The launched command above this process, if it has ended. `is_known` returns whether this
    /// collector knows that for a command. A command of another PID namespace only seems to have
    /// ended.
    #[must_use]
    pub(super) fn ended_command(&self, is_known: impl Fn(ProcessId) -> bool) -> Option<ProcessId> {
        let process = self.process.as_ref()?;
        let has_ended =
            |command: &ProcessId| !process::is_alive(*command) && (process.launched_ran || is_known(*command));
        process.launched.filter(has_ended)
    }

    /// Checks again whether the process runs: it may have ended since the trigger.
    pub(super) fn refresh(&mut self) {
        let Some(process) = self.process.as_ref().filter(|process| process.is_dead()) else { return };
        let how = process.exit();
        if self.registered {
            self.exit = how.or(self.exit.take());
        } else if how.is_some() || self.exit.is_none() {
            self.exit = Some(before_its_first_device_call(how));
        }
        if matches!(self.presence, Presence::Present | Presence::Unregistered) {
            self.presence = Presence::Dead;
        }
    }

    /// Reads the flight record into `taken`.
    pub(super) fn read_ring(&self, taken: &mut RankCapture) {
        let Some(ring) = &self.ring else {
            if self.registered {
                taken.errors.push("no flight record: its hook sent no ring".into());
            }
            return;
        };
        match ring.read(self.info.clone()) {
            Ok(flight) => taken.flight = Some(flight),
            Err(error) => taken.errors.push(format!("no flight record: {error}")),
        }
    }

    /// The `.stacktrace` message, and the evidence with a separate dump and flight record.
    #[must_use]
    pub(super) fn evidence(&self, taken: RankCapture) -> RankEvidence {
        let RankCapture { samples, mut errors, flight, .. } = taken;
        let [first, last] = samples;
        if self.presence == Presence::Dead {
            let how = self.exit.as_deref().map(|exit| format!(": {exit}")).unwrap_or_default();
            errors.push(format!("the process is gone{how}"));
        } else if self.process.is_none() && self.presence != Presence::Left {
            errors.push("its process cannot be seen from the collector's PID namespace".into());
        }
        if self.lingers {
            errors.push("it sent Goodbye, but its process does not end".into());
        }
        let dump = (first.is_some() || last.is_some()).then(|| Stacktrace {
            pid: self.process.as_ref().map_or(0, |process| process.pid),
            rank: self.rank as i32,
            ended_parent_pid: self.ended_parent().unwrap_or(0),
            ..join_samples([first, last], &self.node, &mut errors)
        });
        let (ring, process, exit) = (self.ring.as_deref(), self.process.as_deref(), self.exit.as_deref());
        let mut failures = failures::of_process(ring, process, exit.unwrap_or_default(), &self.fault);
        failures.extend(dump.iter().flat_map(|dump| failures::handled(&dump.py_stacktrace)));
        RankEvidence {
            rank: self.rank,
            presence: self.presence.into(),
            dump: dump.map(Box::new),
            flight,
            node: self.node.clone(),
            errors,
            exit: self.exit.clone().unwrap_or_default(),
            host: None,
            stay: None,
            failures,
        }
    }
}

/// How a rank ended that never registered.
#[must_use]
pub(super) fn before_its_first_device_call(how: Option<String>) -> String {
    const WHEN: &str = "before its first device call";
    how.map_or_else(|| WHEN.into(), |how| format!("{how}, {WHEN}"))
}

/// The file of a rank: the full dump if there is one, else the state, the reasons, the flight
/// record, and the stacks at its fatal signal.
#[must_use]
pub(super) fn file_of(subject: &Subject, evidence: &RankEvidence) -> Stacktrace {
    let mut file = evidence.dump.as_deref().cloned().unwrap_or_else(|| {
        let state = if evidence.presence() == Presence::Dead { "X (dead)" } else { "unknown" };
        Stacktrace { process_state: state.into(), ..Default::default() }
    });
    file.pid = subject.process.as_ref().map_or(subject.info.pid, |process| process.pid);
    file.rank = subject.rank as i32;
    if file.stacktrace.is_empty() {
        let (native, python) = failures::fault_stacks(&subject.fault);
        file.stacktrace.extend(native);
        file.py_stacktrace.extend(python);
    }
    file.pstack_stderr = evidence.errors.join("\n");
    file.flight_record = evidence.flight.clone();
    file.node = subject.node.clone();
    if file.command.is_empty() {
        file.command = subject.info.command.clone();
    }
    file
}

/// The evidence of a process that is not a rank, from its two samples.
#[must_use]
pub(super) fn of_process(samples: [Option<ProcessCapture>; 2], node: &str) -> ProcessEvidence {
    let dump = join_samples(samples, node, &mut Vec::new());
    ProcessEvidence { node: node.into(), dump: Some(dump), ..Default::default() }
}

/// The evidence of a process that is not a rank and has ended. The command line may be empty.
#[must_use]
pub(super) fn of_ended_process(pid: i32, command: &str, exit: &str, node: &str) -> ProcessEvidence {
    let process_state = if exit.is_empty() { procfs::state_text('X') } else { format!("X ({exit})") };
    let command = command.to_owned();
    let dump = Stacktrace { pid, rank: -1, process_state, command, ..Default::default() };
    ProcessEvidence { node: node.into(), dump: Some(dump), ..Default::default() }
}

/// Joins both samples of a process. Fields 1, 2 and 11 show the last available sample, so that the
/// original viewer can read the file.
pub(super) fn join_samples(
    [first, last]: [Option<ProcessCapture>; 2],
    node: &str,
    errors: &mut Vec<String>,
) -> Stacktrace {
    let newest = [&last, &first].into_iter().flatten().next();
    let (pid, parent_pid) = newest.map_or((0, 0), |capture| (capture.pid, capture.parent_pid));
    let command = [&last, &first].into_iter().flatten().next().map(|capture| capture.command.clone());
    let mut children: BTreeMap<i32, ChildProcess> = BTreeMap::new();
    let mut samples = [first, last].map(|capture| {
        let mut capture = capture?;
        flatten(std::mem::take(&mut capture.children), &mut children);
        for error in &capture.sample.errors {
            if !errors.contains(error) {
                errors.push(error.clone());
            }
        }
        Some(capture.sample)
    });
    let last = samples[1].take();
    if last.is_none() {
        errors.push("there is no second sample".into());
    } else if samples[0].is_none() {
        errors.push("there is no first sample".into());
    }
    // Without a second sample, the first one is shown, and also stored in full as the first.
    let mut shown = last.or_else(|| samples[0].clone()).unwrap_or_default();
    Stacktrace {
        stacktrace: std::mem::take(&mut shown.stacktrace),
        py_stacktrace: std::mem::take(&mut shown.py_stacktrace),
        pid,
        rank: -1,
        process_state: shown.process_state.clone(),
        first_sample: samples[0].take(),
        last_sample: Some(shown),
        children: children.into_values().collect(),
        node: node.into(),
        command: command.unwrap_or_default(),
        parent_pid,
        ..Default::default()
    }
}

fn flatten(captures: Vec<ProcessCapture>, children: &mut BTreeMap<i32, ChildProcess>) {
    for mut capture in captures {
        let below = std::mem::take(&mut capture.children);
        let entry = children.entry(capture.pid).or_insert_with(|| ChildProcess {
            pid: capture.pid,
            parent_pid: capture.parent_pid,
            command: capture.command.clone(),
            samples: Vec::new(),
        });
        entry.samples.push(capture.sample);
        flatten(below, children);
    }
}

/// Whether a sample has content. An empty one carries the reasons in its errors.
#[must_use]
pub(super) fn has_stacks(sample: &ProcessSample) -> bool {
    !(sample.stacktrace.is_empty() && sample.py_stacktrace.is_empty() && sample.process_state.is_empty())
}

/// The evidence of a rank on another node. A node may hold only a part of the job: the ranks of
/// other nodes are not missing, only not visible from here.
#[must_use]
pub(super) fn elsewhere(rank: u32) -> RankEvidence {
    RankEvidence {
        rank,
        presence: Presence::Unspecified.into(),
        errors: vec!["it runs on another node, which this collector cannot inspect".into()],
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::server::PstackStacktrace;

    use super::*;

    fn capture(pid: i32, threads: usize, state: &str) -> ProcessCapture {
        let sample = ProcessSample {
            stacktrace: vec![PstackStacktrace::default(); threads],
            process_state: state.into(),
            ..Default::default()
        };
        ProcessCapture { pid, parent_pid: 1, command: format!("command {pid}"), sample, ..Default::default() }
    }

    fn subject(presence: Presence) -> Subject {
        let process = Some(Arc::new(Handle::open(std::process::id() as i32).unwrap()));
        let info = RankInfo { rank: 3, command: "train".into(), ..Default::default() };
        let (node, fault) = ("n1".to_string(), SharedFault::default());
        let (ring, exit, lingers, registered) = (None, None, false, true);
        Subject { rank: 3, presence, info, process, ring, exit, node, lingers, registered, fault }
    }

    #[test]
    fn the_last_sample_fills_the_fields_of_the_original_tool() {
        let mut first = capture(10, 1, "R (running)");
        first.children = vec![capture(11, 1, "S (sleeping)")];
        let mut last = capture(10, 2, "S (sleeping)");
        last.children = vec![capture(11, 3, "S (sleeping)"), capture(12, 1, "S (sleeping)")];
        let subject = subject(Presence::Present);
        let evidence = subject.evidence(RankCapture { samples: [Some(first), Some(last)], ..Default::default() });
        assert_eq!(evidence.errors, Vec::<String>::new());
        let file = file_of(&subject, &evidence);
        assert_eq!((file.stacktrace.len(), file.process_state.as_str(), file.rank), (2, "S (sleeping)", 3));
        let (first, last) = (file.first_sample.unwrap(), file.last_sample.unwrap());
        assert_eq!((first.stacktrace.len(), first.process_state.as_str()), (1, "R (running)"));
        assert_eq!(last.stacktrace.len(), 0, "they are fields 1 and 2");
        let children: Vec<(i32, usize)> = file.children.iter().map(|child| (child.pid, child.samples.len())).collect();
        assert_eq!(children, [(11, 2), (12, 1)]);
        assert_eq!((file.node.as_str(), file.command.as_str()), ("n1", "command 10"));
    }

    #[test]
    fn a_single_sample_has_a_remark() {
        let subject = subject(Presence::Present);
        let taken = RankCapture { samples: [Some(capture(10, 1, "R (running)")), None], ..Default::default() };
        let evidence = subject.evidence(taken);
        assert_eq!(evidence.errors, ["there is no second sample"]);
        let file = file_of(&subject, &evidence);
        assert_eq!((file.stacktrace.len(), file.first_sample.unwrap().stacktrace.len()), (1, 1));
        assert_eq!(file.pstack_stderr, "there is no second sample");
    }

    #[test]
    fn a_dead_rank_has_its_reason_and_no_dump() {
        let subject = Subject { exit: Some("killed by SIGKILL".into()), ..subject(Presence::Dead) };
        let flight = FlightRecord { kernels_launched: 5, ..Default::default() };
        let evidence = subject.evidence(RankCapture { flight: Some(flight), ..Default::default() });
        assert!(evidence.dump.is_none());
        assert_eq!((evidence.exit.as_str(), evidence.presence()), ("killed by SIGKILL", Presence::Dead));
        let file = file_of(&subject, &evidence);
        assert_eq!(file.process_state, "X (dead)");
        assert_eq!(file.pstack_stderr, "the process is gone: killed by SIGKILL");
        assert_eq!((file.command.as_str(), file.flight_record.unwrap().kernels_launched), ("train", 5));
    }
}
