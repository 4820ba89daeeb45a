//! The suspects of a job in which no rank is known to wait in a collective: a rank that stands
//! still by itself, or that differs from ranks whose stacks show that they wait.
//!
//! An ordered table of rules: the first rule that applies names the suspects.

use std::collections::{BTreeMap, BTreeSet};

use xpu_timer_proto::v1::{OpKind, Operation, TriggerKind};

use super::outcome::{ended_in_order, is_idle, is_served, uses_device};
use crate::{
    case::{Case, Position},
    facts,
    finding::{TableRule, rules},
    graph::Suspect,
    kernels,
    store::OtherNumber,
    verdict::Activity,
};

/// Finds the suspects, if the rule applies.
type Find = fn(&Ranks<'_, '_>) -> Option<Suspects>;

/// The suspects that a rule found.
struct Suspects {
    suspects: Vec<Suspect>,
    /// Ranks that wait for the suspects, by their stacks.
    waiters: Vec<usize>,
}

/// The ranks of a job, as the rules sort them. All lists hold rank indices, ascending.
struct Ranks<'c, 'a> {
    case: &'c Case<'a>,
    /// The incident is a manual dump.
    manual: bool,
    /// No rank used its device for the idle timeout, or a watcher is blocked in the driver.
    quiet: bool,
    /// Ranks with a stack that wait for their device or in the creation of a communicator.
    waiting: Vec<usize>,
    /// The other ranks with a stack.
    others: Vec<usize>,
    /// `waiting`, and the ranks in a lock shared between processes. A rank in such a lock waits for
    /// a rank that is not in it, if there is one.
    waiting_or_locked: Vec<usize>,
    /// The other ranks with a stack.
    unlocked: Vec<usize>,
}

const SUSPICIONS: &[TableRule<Find>] = &[
    TableRule {
        name: "halted",
        reason: "A rank that cannot run is suspected first, unless it exited normally.",
        scenario: "hosts::a_death_is_reported_before_any_rank_waits",
        rule: halted,
    },
    TableRule {
        name: "stuck_process",
        reason: "A rank that waits for another process that cannot continue is suspected, whatever the other ranks do.",
        scenario: "processes::a_server_at_rest_is_idle_and_a_stopped_one_is_not",
        rule: stuck_process,
    },
    TableRule {
        name: "rank_cycle",
        reason: "Ranks that wait for messages of each other, and for nobody else, never continue.",
        scenario: "processes::ranks_of_a_silent_job_that_wait_for_each_other_hang",
        rule: rank_cycle,
    },
    TableRule {
        name: "gil_deadlock",
        reason: "A rank whose threads wait for the GIL while its holder is blocked is stuck, whatever its main thread does.",
        scenario: "processes::a_gil_deadlock_is_found_although_the_main_thread_seems_idle",
        rule: gil_deadlock,
    },
    TableRule {
        name: "outside_graph",
        reason: "A graph that most ranks have launched may contain collectives that the other ranks have not launched.",
        scenario: "devices::one_rank_has_not_launched_its_graph",
        rule: outside_graph,
    },
    TableRule {
        name: "pending_kernel",
        reason: "A kernel or graph that was pending when the incident opened may be stuck.",
        scenario: "devices::a_job_of_one_rank",
        rule: pending_kernel,
    },
    TableRule {
        name: "key_owner",
        reason: "Ranks wait for a key in the store, and the key names the rank that has to set it.",
        scenario: "collectives::a_key_in_the_store_may_name_its_rank",
        rule: key_owner,
    },
    TableRule {
        name: "other_number",
        reason: "If all ranks wait for keys that differ in a number, the few with another number are suspected.",
        scenario: "collectives::ranks_that_wait_for_another_number_of_a_barrier",
        rule: other_number,
    },
    TableRule {
        name: "not_waiting",
        reason: "Some ranks wait for the device in a healthy job too, so ranks that stand still are suspected first.",
        scenario: "hosts::a_job_without_recorded_collectives_is_judged_by_its_stacks",
        rule: not_waiting,
    },
    TableRule {
        name: "manual",
        reason: "A manual dump may show a healthy job, in which a rank that stands still is not suspected.",
        scenario: "hosts::a_manual_dump_does_not_accuse_an_idle_rank",
        rule: manual,
    },
    TableRule {
        name: "fewer_launches",
        reason: "If all ranks wait for their devices, the few that have launched a kernel less often are suspected.",
        scenario: "devices::all_ranks_wait_for_their_devices_and_one_has_launched_less",
        rule: fewer_launches,
    },
    TableRule {
        name: "device_wait",
        reason: "A job of one rank that has waited for its device for longer than the timeout waits for an operation \
                 that was not recorded.",
        scenario: "devices::a_job_of_one_rank_waits_for_a_kernel_that_was_not_recorded",
        rule: device_wait,
    },
    TableRule {
        name: "minority_place",
        reason: "If no rank is stuck in a known way, the few that stand still elsewhere than most ranks are suspected.",
        scenario: "hang::a_minority_at_another_place_is_named_in_a_job_that_stands_still",
        rule: minority_place,
    },
    TableRule {
        name: "stuck",
        reason: "A rank that is stuck in a known way is suspected even if no rank waits for it.",
        scenario: "hang::all_ranks_in_their_loaders",
        rule: stuck,
    },
];

/// Finds the suspects, and sets the ranks of `case` that wait for them.
pub(super) fn suspects(case: &mut Case<'_>) -> Vec<Suspect> {
    let found = {
        let ranks = Ranks::of(case);
        rules(SUSPICIONS).find_map(|find| find(&ranks))
    };
    let Some(Suspects { suspects, waiters }) = found else { return Vec::new() };
    case.stack_waiters = waiters;
    let mut suspects: Vec<Suspect> = suspects.into_iter().map(|suspect| follow_to_holder(case, suspect)).collect();
    suspects.dedup();
    suspects
}

impl<'c, 'a> Ranks<'c, 'a> {
    fn of(case: &'c Case<'a>) -> Self {
        let kind = case.trigger_kind();
        let known = |index: &usize| case.view(*index).host.stack && !case.view(*index).halted();
        let (waiting, others): (Vec<usize>, Vec<usize>) =
            (0..case.world.views.len()).filter(known).partition(|index| waits(case, *index));
        let is_locked = |index: &usize| case.in_shared_lock(*index);
        let (waiting_or_locked, unlocked) = if others.iter().all(is_locked) {
            (waiting.clone(), others.clone())
        } else {
            let (locked, unlocked): (Vec<usize>, Vec<usize>) = others.iter().copied().partition(is_locked);
            let mut waiting = [waiting.clone(), locked].concat();
            waiting.sort_unstable();
            (waiting, unlocked)
        };
        let manual = kind == TriggerKind::Manual;
        let quiet = matches!(kind, TriggerKind::Idle | TriggerKind::Heartbeat);
        Ranks { case, manual, quiet, waiting, others, waiting_or_locked, unlocked }
    }

    fn all(&self) -> std::ops::Range<usize> {
        0..self.case.world.views.len()
    }

    fn has_pending(&self, index: usize, kind: OpKind) -> bool {
        self.case.view(index).pending().any(|operation| operation.kind() == kind)
    }

    /// Ranks that are stuck in a known way.
    fn stuck(&self) -> Vec<usize> {
        let specific = |index: &usize| {
            let host = &self.case.view(*index).host;
            !matches!(host.observed.activity, Activity::Unknown | Activity::Running | Activity::Sleep)
                && !waits(self.case, *index)
                && host.frozen()
                && !is_served(self.case, *index)
        };
        self.unlocked.iter().copied().filter(specific).collect()
    }
}

/// Whether a rank waits for its device or in the creation of a communicator, by its stack.
fn waits(case: &Case<'_>, index: usize) -> bool {
    matches!(case.view(index).host.observed.activity, Activity::DeviceWait | Activity::CommInit)
}

/// Suspects the hosts of these ranks.
fn hosts(ranks: Vec<usize>, waiters: Vec<usize>) -> Suspects {
    let host = |rank_index| Suspect::Host { rank_index, events: Vec::new(), guess: false };
    Suspects { suspects: ranks.into_iter().map(host).collect(), waiters }
}

fn halted(ranks: &Ranks<'_, '_>) -> Option<Suspects> {
    let is_halted = |index: &usize| ranks.case.view(*index).halted() && !ended_in_order(ranks.case, *index);
    let halted: Vec<usize> = ranks.all().filter(is_halted).collect();
    (!halted.is_empty()).then(|| hosts(halted, ranks.waiting.clone()))
}

fn stuck_process(ranks: &Ranks<'_, '_>) -> Option<Suspects> {
    let waits = &ranks.case.graph.process_waits;
    let stuck: Vec<usize> = waits.iter().filter(|wait| wait.proves_hang()).map(|wait| wait.waiter).collect();
    (!stuck.is_empty()).then(|| hosts(stuck, ranks.waiting.clone()))
}

fn rank_cycle(ranks: &Ranks<'_, '_>) -> Option<Suspects> {
    let first: Vec<usize> = ranks.case.graph.rank_cycles.iter().filter_map(|cycle| cycle.first().copied()).collect();
    (!first.is_empty()).then(|| hosts(first, ranks.waiting.clone()))
}

fn gil_deadlock(ranks: &Ranks<'_, '_>) -> Option<Suspects> {
    let is_deadlocked = |index: &usize| {
        let holder = ranks.case.view(*index).evidence.and_then(facts::gil_holder);
        holder.is_some_and(|holder| holder.has_waiters())
    };
    let deadlocked: Vec<usize> = ranks.all().filter(is_deadlocked).collect();
    (!deadlocked.is_empty()).then(|| hosts(deadlocked, ranks.waiting.clone()))
}

fn outside_graph(ranks: &Ranks<'_, '_>) -> Option<Suspects> {
    let in_graph = |index: &usize| ranks.has_pending(*index, OpKind::GraphLaunch);
    let inside: Vec<usize> = ranks.all().filter(in_graph).collect();
    let outside: Vec<usize> = ranks.others.iter().copied().filter(|index| !in_graph(index)).collect();
    (!outside.is_empty() && outside.len() < inside.len()).then(|| hosts(outside, inside))
}

fn pending_kernel(ranks: &Ranks<'_, '_>) -> Option<Suspects> {
    let has_kernel =
        |index: &usize| ranks.has_pending(*index, OpKind::Kernel) || ranks.has_pending(*index, OpKind::GraphLaunch);
    let all: Vec<usize> = ranks.all().filter(has_kernel).collect();
    if all.is_empty() || ranks.manual {
        return None;
    }
    let behind = behind_in_graphs(ranks.case, &all);
    let others = all.iter().filter(|index| !behind.contains(index));
    let waiters: BTreeSet<usize> =
        others.chain(&ranks.waiting).copied().filter(|index| !behind.contains(index)).collect();
    let device = |rank_index| Suspect::Device { rank_index, events: Vec::new() };
    Some(Suspects { suspects: behind.into_iter().map(device).collect(), waiters: waiters.into_iter().collect() })
}

/// The ranks with a pending kernel or graph for which the others may wait inside their graphs: the
/// few that have completed one graph less often than all others, else those whose devices have not
/// started the graph that the others are in. All of them if there are none.
fn behind_in_graphs(case: &Case<'_>, ranks: &[usize]) -> Vec<usize> {
    let is_graph = |operation: &&Operation| operation.kind() == OpKind::GraphLaunch;
    let completed = |index: usize| {
        let launched = case.view(index).flight.map_or(0, |flight| flight.graphs_launched);
        launched.saturating_sub(case.view(index).pending().filter(is_graph).count() as u64)
    };
    let is_inside = |index: usize| {
        let mut pending = case.view(index).pending();
        let oldest = pending.find(|operation| matches!(operation.kind(), OpKind::Kernel | OpKind::GraphLaunch));
        oldest.as_ref().is_some_and(is_graph) && oldest.is_some_and(|operation| operation.started_ns != 0)
    };
    let most = ranks.iter().map(|index| completed(*index)).max().unwrap_or(0);
    let (level, fewer): (Vec<usize>, Vec<usize>) = ranks.iter().partition(|index| completed(**index) == most);
    if !fewer.is_empty() {
        let is_behind = fewer.len() < level.len() && level.iter().all(|index| is_inside(*index));
        return if is_behind { fewer } else { ranks.to_vec() };
    }
    let (inside, before): (Vec<usize>, Vec<usize>) = ranks.iter().partition(|index| is_inside(**index));
    if inside.is_empty() || before.is_empty() { ranks.to_vec() } else { before }
}

fn key_owner(ranks: &Ranks<'_, '_>) -> Option<Suspects> {
    let case = ranks.case;
    if ranks.waiting.is_empty() || ranks.manual || !ranks.waiting.iter().all(|index| case.uses_store(*index)) {
        return None;
    }
    let owners = case.key_owners(&ranks.waiting);
    (!owners.is_empty() && owners.iter().all(|owner| ranks.others.contains(owner)))
        .then(|| hosts(owners, ranks.waiting.clone()))
}

fn other_number(ranks: &Ranks<'_, '_>) -> Option<Suspects> {
    let case = ranks.case;
    if !ranks.others.is_empty() || ranks.manual || !ranks.waiting.iter().all(|index| case.uses_store(*index)) {
        return None;
    }
    let OtherNumber { few, most } = case.other_number()?;
    (few.len() + most.len() == ranks.waiting.len()).then(|| hosts(few, most))
}

fn not_waiting(ranks: &Ranks<'_, '_>) -> Option<Suspects> {
    if ranks.waiting_or_locked.is_empty() || ranks.unlocked.is_empty() || ranks.manual {
        return None;
    }
    let is_frozen = |index: &usize| ranks.case.view(*index).host.frozen();
    let frozen: Vec<usize> = ranks.unlocked.iter().copied().filter(is_frozen).collect();
    let suspects = if frozen.is_empty() { ranks.unlocked.clone() } else { frozen };
    Some(hosts(suspects, ranks.waiting_or_locked.clone()))
}

fn manual(ranks: &Ranks<'_, '_>) -> Option<Suspects> {
    ranks.manual.then(|| hosts(Vec::new(), Vec::new()))
}

fn fewer_launches(ranks: &Ranks<'_, '_>) -> Option<Suspects> {
    let (case, all) = (ranks.case, ranks.all().collect::<Vec<_>>());
    let stands = |index: &usize| {
        let moves = || case.view(*index).host.moved.is_none_or(|moved| moved.own_frame);
        case.does(*index, Activity::DeviceWait)
            && case.view(*index).has_device()
            && !moves()
            && !uses_device(case, *index)
    };
    let launches = (ranks.quiet && all.iter().all(stands)).then(|| kernels::fewer_launches(&case.world, &all))??;
    Some(hosts(launches.fewer.iter().map(|(index, _)| *index).collect(), launches.others))
}

fn device_wait(ranks: &Ranks<'_, '_>) -> Option<Suspects> {
    let case = ranks.case;
    let alone = case.world.views.len() == 1 && case.does(0, Activity::DeviceWait) && case.view(0).has_device();
    let moves = || case.view(0).host.moved.is_none_or(|moved| moved.own_frame);
    let stands = alone && ranks.quiet && !moves() && !uses_device(case, 0);
    stands.then(|| Suspects {
        suspects: vec![Suspect::Device { rank_index: 0, events: Vec::new() }],
        waiters: Vec::new(),
    })
}

fn minority_place(ranks: &Ranks<'_, '_>) -> Option<Suspects> {
    if !ranks.stuck().is_empty() || is_idle(ranks.case) {
        return None;
    }
    let (most, few) = split_by_place(ranks.case)?;
    Some(hosts(few, most))
}

fn stuck(ranks: &Ranks<'_, '_>) -> Option<Suspects> {
    let stuck = ranks.stuck();
    let waiters = if stuck.len() == ranks.all().len() { stuck.clone() } else { Vec::new() };
    Some(hosts(stuck, waiters))
}

/// Splits the ranks into those at the place of more than half of all ranks, and the others. `None`
/// unless all ranks stand still.
fn split_by_place(case: &Case<'_>) -> Option<(Vec<usize>, Vec<usize>)> {
    let all = 0..case.world.views.len();
    let known = |rank_index: usize| case.view(rank_index).host.stack && case.view(rank_index).host.frozen();
    if !all.clone().all(known) {
        return None;
    }
    let mut positions: BTreeMap<Position<'_>, Vec<usize>> = BTreeMap::new();
    all.for_each(|rank_index| positions.entry(case.position(rank_index)).or_default().push(rank_index));
    let most = positions.into_values().find(|ranks| 2 * ranks.len() > case.world.views.len())?;
    let few: Vec<usize> = (0..case.world.views.len()).filter(|rank_index| !most.contains(rank_index)).collect();
    (!few.is_empty()).then_some((most, few))
}

/// Replaces a suspect by the rank that holds the resource it waits for.
fn follow_to_holder(case: &Case<'_>, suspect: Suspect) -> Suspect {
    let Suspect::Host { mut rank_index, events, guess } = suspect else { return suspect };
    let holder = |rank_index: usize| case.graph.resource_waits.iter().find(|wait| wait.waiter == rank_index);
    // The loop is bounded, because ranks that wait for each other in a cycle have no end.
    for _ in 0..case.graph.resource_waits.len() {
        rank_index = holder(rank_index).map_or(rank_index, |wait| wait.holder);
    }
    Suspect::Host { rank_index, events, guess }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::assert_table;

    #[test]
    fn every_rule_has_a_name_of_its_own_a_reason_and_a_scenario() {
        assert_table(SUSPICIONS.iter().map(TableRule::texts));
    }
}
