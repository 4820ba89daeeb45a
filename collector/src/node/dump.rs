//! The work of one incident on a thread of its own: two samples, the rings, the verdict, the
//! folder, the viewer. Every step has a deadline. A failed step becomes an entry in the result.

use std::{
    collections::BTreeMap,
    sync::{Condvar, Mutex},
    time::{Duration, Instant},
};

use tracing::{error, info, warn};
use xpu_timer_analysis::{Status, names_absent};
use xpu_timer_proto::v1::{Evidence, RankEvidence};

use crate::{
    incident::judging,
    node::{
        captures::Captures,
        evidence::{RankCapture, elsewhere, has_stacks},
        folder_writer::{self, Findings, WriteResult},
        plan::{Outcome, Plan, add_launched, add_unregistered, world},
    },
    os::clock::{self, Now, nanoseconds},
};

/// Ends the waits of running dumps when the collector stops.
#[derive(Debug, Default)]
pub struct Hurry {
    set: Mutex<bool>,
    changed: Condvar,
}

impl Hurry {
    /// Ends all current and future waits.
    pub fn set(&self) {
        *self.set.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn wait_until(&self, deadline: Instant) {
        let set = self.set.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        // Whether the wait ended by timeout or by `set` makes no difference.
        drop(self.changed.wait_timeout_while(set, left, |set| !*set));
    }
}

/// The deadline for one sample of all ranks of the node.
const CAPTURE_DEADLINE: Duration = Duration::from_millis(1200);
/// The first sample finds all caches cold (a libtorch has half a gigabyte), so it may use the time
/// up to the second one.
const LONGEST_CAPTURE: Duration = Duration::from_secs(5);
/// The time from the trigger to the finished folder, beyond the sample interval.
const BUDGET: Duration = Duration::from_millis(2700);

/// Dumps, judges and writes one incident. Returns an outcome even when a step fails.
pub fn run(plan: Plan, captures: &Captures, hurry: &Hurry) -> Outcome {
    let head = head(&plan);
    let timeline_path = plan.timeline_path.clone();
    judging::catch_panic(|| work(plan, captures, hurry)).unwrap_or_else(|why| {
        error!("incident {}: its dump failed: {why}", head.incident);
        let verdict = judging::unknown(&head, format!("The job could not be looked at: the dump failed ({why})."));
        let sampled_ns = Now::get().mono_ns;
        Outcome { incident: head.incident, path: None, verdict, written: false, timeline_path, sampled_ns, part: None }
    })
}

fn work(mut plan: Plan, captures: &Captures, hurry: &Hurry) -> Outcome {
    let begun = Instant::now();
    let sampled_ns = Now::get().mono_ns;
    add_unregistered(&mut plan);
    add_launched(&mut plan.subjects, std::mem::take(&mut plan.unregistered), &plan.node);
    let mut taken: BTreeMap<u32, RankCapture> = BTreeMap::new();
    let first_deadline = plan.sample_interval.clamp(CAPTURE_DEADLINE, LONGEST_CAPTURE);
    sample(&mut plan, captures, 0, first_deadline, &mut taken);
    info!("incident {}: the first sample took {:.0?}", plan.incident, begun.elapsed());
    hurry.wait_until(begun + plan.sample_interval);
    let second = Instant::now();
    sample(&mut plan, captures, 1, CAPTURE_DEADLINE, &mut taken);
    info!("incident {}: the second sample took {:.0?}", plan.incident, second.elapsed());

    let evidence = evidence(&plan, taken);
    let mut verdict = judging::judge(&evidence);
    verdict.timing.status = Status::Open;
    verdict.timing.opened_at = Some(clock::rfc3339(plan.opened.unix_ns));
    verdict.timing.judged_at = Some(clock::rfc3339(Now::get().unix_ns));
    let deadline = begun + plan.sample_interval + BUDGET;
    let (incident, timeline_path) = (plan.incident.clone(), plan.timeline_path.clone());
    let WriteResult { path, written, part, verdict } =
        folder_writer::write(Findings { plan, evidence }, verdict, deadline);
    Outcome { incident, path, verdict, written, timeline_path, sampled_ns, part }
}

/// Takes one sample of all ranks. For ranks whose process has ended only the ring remains.
fn sample(
    plan: &mut Plan,
    captures: &Captures,
    which: usize,
    deadline: Duration,
    taken: &mut BTreeMap<u32, RankCapture>,
) {
    for subject in &mut plan.subjects {
        subject.refresh();
    }
    let pids: BTreeMap<i32, u32> =
        plan.subjects.iter().filter_map(|subject| Some((subject.pid()?, subject.rank))).collect();
    let asked: Vec<i32> = pids.keys().copied().collect();
    let result = captures.capture(&asked, deadline);
    for subject in &plan.subjects {
        let taken = taken.entry(subject.rank).or_default();
        // The flight record is read with the second sample.
        if which == 1 {
            subject.read_ring(taken);
        }
    }
    match result {
        Ok(processes) => {
            for process in processes {
                let Some(taken) = pids.get(&process.pid).and_then(|rank| taken.get_mut(rank)) else { continue };
                if has_stacks(&process.sample) {
                    taken.samples[which] = Some(process);
                } else {
                    taken.errors.extend(process.sample.errors);
                }
            }
        }
        Err(error) => {
            warn!("incident {}: sample {} of pids {asked:?} failed: {error}", plan.incident, which + 1);
            for rank in pids.values() {
                taken.entry(*rank).or_default().errors.push(format!("sample {}: {error}", which + 1));
            }
        }
    }
    // A process that ended meanwhile is dead, not just unreadable.
    for subject in &mut plan.subjects {
        subject.refresh();
    }
}

fn evidence(plan: &Plan, mut taken: BTreeMap<u32, RankCapture>) -> Evidence {
    let (world_size, here) = world(&plan.subjects);
    let mut ranks: BTreeMap<u32, RankEvidence> = BTreeMap::new();
    if let Some(here) = here.filter(|_| names_absent(world_size, plan.subjects.len())) {
        ranks.extend((0..world_size).filter(|rank| !here.contains(rank)).map(|rank| (rank, elsewhere(rank))));
    }
    for subject in &plan.subjects {
        ranks.insert(subject.rank, subject.evidence(taken.remove(&subject.rank).unwrap_or_default()));
    }
    Evidence { world_size, ranks: ranks.into_values().collect(), ..head(plan) }
}

/// The evidence without any findings.
fn head(plan: &Plan) -> Evidence {
    Evidence {
        incident: plan.incident.clone(),
        job: plan.key.name.clone(),
        world_size: 0,
        attempt: plan.attempt,
        trigger: Some(plan.trigger.clone()),
        ranks: Vec::new(),
        hang_timeout_ns: nanoseconds(plan.hang_timeout),
        sample_interval_ns: nanoseconds(plan.sample_interval),
    }
}
