//! The parts of a verdict that need no judgement: the state of ranks, communicators and hooks.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use xpu_timer_proto::{
    server::Library,
    v1::{DataType, Evidence, Op, Operation, Presence, TriggerKind},
};

use crate::{
    case::Case,
    facts,
    finding::Conclusion,
    graph::Event,
    known_defects::{Also, DEFECTS, Defect},
    matching::{Comm, Member},
    stacks::StuckHelper,
    text::{communicator, operation_state},
    verdict::{
        Activity, CommunicatorGroup, CommunicatorReport, CulpritProcess, HookReport, KnownDefect, Location,
        OperationState, RankGroup, TriggerReport,
    },
    world::{ProcessView, RankView, World, is_collective, is_p2p},
};

/// The trigger of the incident.
pub(crate) fn trigger(evidence: &Evidence) -> TriggerReport {
    let Some(trigger) = &evidence.trigger else {
        return TriggerReport { kind: "unspecified".to_owned(), rank: None, operation: None };
    };
    let kind = match trigger.kind() {
        TriggerKind::Unspecified => "unspecified",
        TriggerKind::Operation => "operation",
        TriggerKind::Idle => "idle",
        TriggerKind::Heartbeat => "heartbeat",
        TriggerKind::Death => "death",
        TriggerKind::Manual => "manual",
    };
    TriggerReport {
        kind: kind.to_owned(),
        rank: u32::try_from(trigger.rank).ok(),
        operation: trigger.operation.as_ref().map(operation_state),
    }
}

/// The process of a rank, if it is known.
pub(crate) fn process(view: &RankView<'_>) -> Option<CulpritProcess> {
    Some(CulpritProcess {
        rank: Some(view.rank),
        pid: view.pid()?,
        node: view.node().unwrap_or_default().to_owned(),
        command: view.host.command.clone(),
    })
}

/// A process that is not a rank itself. `rank` is the rank that it belongs to, if any.
pub(crate) fn other_process(process: &ProcessView, rank: Option<u32>) -> CulpritProcess {
    let (pid, command) = (process.host.pid, process.host.command.clone());
    CulpritProcess { rank, pid, node: process.node.clone(), command }
}

/// A child process of a rank.
pub(crate) fn child_process(view: &RankView<'_>, child: StuckHelper) -> CulpritProcess {
    let node = view.node().unwrap_or_default().to_owned();
    CulpritProcess { rank: Some(view.rank), pid: child.pid, node, command: child.command }
}

/// The name of a presence, such as `present`.
pub(crate) fn presence_name(presence: Presence) -> &'static str {
    match presence {
        Presence::Present => "present",
        Presence::Dead => "dead",
        Presence::Left => "left",
        Presence::Unregistered => "unregistered",
        Presence::Missing => "missing",
        Presence::Unspecified => "not seen",
    }
}

/// Groups the ranks of a communicator by equal state, those that are behind first. Each member
/// comes as its rank, its numbers of completed, started and launched collectives, and the operation
/// that it waits in.
pub fn communicator_groups(
    members: impl Iterator<Item = (u32, [u64; 3], Option<OperationState>)>,
) -> Vec<CommunicatorGroup> {
    let mut groups: BTreeMap<([u64; 3], Option<OperationState>), Vec<u32>> = BTreeMap::new();
    for (rank, counts, waits_in) in members {
        groups.entry((counts, waits_in)).or_default().push(rank);
    }
    groups
        .into_iter()
        .map(|(([completed, started, launched], waits_in), ranks)| CommunicatorGroup {
            ranks,
            launched,
            started,
            completed,
            waits_in,
        })
        .collect()
}

/// Every communicator with a pending operation: the communicator of `first`, then the others by
/// identity.
pub(crate) fn communicators(case: &Case<'_>, first: Option<Event>) -> Vec<CommunicatorReport> {
    let first = first.map(|event| match event {
        Event::Collective { comm, .. }
        | Event::PointToPoint { comm, .. }
        | Event::Init { comm }
        | Event::Split { comm } => comm,
    });
    // The oldest pending operation of each rank on each communicator.
    let mut pending: HashMap<(usize, u64), &Operation> = HashMap::new();
    for (rank_index, view) in case.world.views.iter().enumerate() {
        for operation in view.pending().filter(|operation| operation.communicator != 0) {
            pending.entry((rank_index, operation.communicator)).or_insert(operation);
        }
    }
    let mut reports: Vec<(bool, CommunicatorReport)> = case
        .comms
        .iter()
        .enumerate()
        .filter(|(_, comm)| {
            comm.busy() || comm.members.iter().any(|member| pending.contains_key(&(member.rank_index, comm.id)))
        })
        .map(|(index, comm)| {
            let members = comm.members.iter().map(|member| {
                let operation = member.oldest.or_else(|| pending.get(&(member.rank_index, comm.id)).copied());
                let counts = [member.completed, member.started, member.launched];
                let mut waits_in = operation.map(operation_state);
                if let (Some(_), Some(state), Some(launch)) = (&comm.kernel, &mut waits_in, member.waiting_seq) {
                    state.seq = launch;
                }
                (case.view(member.rank_index).rank, counts, waits_in)
            });
            let groups = communicator_groups(members);
            let report = CommunicatorReport {
                id: comm.kernel.as_ref().map_or_else(|| communicator(comm.id), |kernel| kernel.name.clone()),
                size: comm.size,
                groups,
                silent: case.world.ranks(comm.silent.iter().copied()),
                unnamed: comm.unnamed,
            };
            (first != Some(index), report)
        })
        .collect();
    reports.sort_by_key(|(later, _)| *later);
    reports.into_iter().map(|(_, report)| report).collect()
}

/// Adds up the self-measurements in the ranks' flight records.
pub(crate) fn hook(world: &World<'_>) -> HookReport {
    let mut report = HookReport::default();
    let (mut launches, mut collectives) = ((0, 0), (0, 0));
    for health in world.views.iter().filter_map(|view| view.flight?.health.as_ref()) {
        report.ranks += 1;
        launches = (launches.0 + health.launch_samples, launches.1 + health.launch_cost_ns);
        collectives = (collectives.0 + health.collective_samples, collectives.1 + health.collective_cost_ns);
        report.long_samples += health.long_samples;
        report.dropped += health.dropped;
        report.panics += health.panics;
        report.overflows += health.overflows;
    }
    let mean = |(samples, ns): (u64, u64)| (samples > 0).then(|| (ns as f64 / samples as f64 * 10.0).round() / 10.0);
    report.launch_ns = mean(launches);
    report.collective_ns = mean(collectives);
    report.samples = launches.0 + collectives.0;
    report
}

/// The known defects whose signature the ranks have, in a version that is affected or unknown. An
/// unknown version counts only if the stacks have the signature.
pub(crate) fn known_defects(case: &Case<'_>, conclusion: &Conclusion) -> Vec<KnownDefect> {
    // The signatures on the stacks of a rank, and the versions of its libraries.
    type Seen<'a> = (Cow<'a, [String]>, Cow<'a, [Library]>);
    let seen: Vec<Seen<'_>> = case
        .world
        .views
        .iter()
        .map(|view| view.evidence.map(|evidence| (facts::defect_signs(evidence), facts::libraries(evidence))))
        .map(Option::unwrap_or_default)
        .collect();
    let found = |defect: &Defect| {
        let ranks: Vec<usize> = (0..seen.len())
            .filter(|index| !defect.is_specific() || seen[*index].0.iter().any(|sign| sign == defect.name))
            .collect();
        let ranks = with_records(case, conclusion, ranks, defect.also);
        let version = |index: &usize| {
            let library = seen[*index].1.iter().find(|library| library.name == defect.library);
            library.map(|library| library.version.as_str()).filter(|version| !version.is_empty())
        };
        let (with_version, without): (Vec<usize>, Vec<usize>) =
            ranks.into_iter().partition(|index| version(index).is_some());
        let is_affected = |index: &usize| version(index).is_some_and(|found| defect.affects(found));
        let affected: Vec<usize> = with_version.iter().copied().filter(is_affected).collect();
        let version = affected.first().and_then(version);
        let ranks = if with_version.is_empty() { without } else { affected };
        let counts = !ranks.is_empty() && (version.is_some() || defect.is_specific());
        counts.then(|| KnownDefect {
            name: defect.name.to_owned(),
            library: defect.library.to_owned(),
            version: version.map(str::to_owned),
            text: defect.sentence(version),
            url: defect.url.to_owned(),
            ranks: case.world.ranks(ranks),
        })
    };
    DEFECTS.iter().filter_map(found).collect()
}

/// Selects the ranks whose records show the condition that a defect has besides its signature on
/// the stacks.
fn with_records(case: &Case<'_>, conclusion: &Conclusion, mut ranks: Vec<usize>, also: Also) -> Vec<usize> {
    // The ranks in stalled collectives with this operation on such a communicator.
    let inside = |wanted: &dyn Fn(&Operation) -> bool, of_comm: &dyn Fn(&Comm<'_>) -> bool| {
        let stalled = conclusion.stalled().into_iter().filter(|event| match *event {
            Event::Collective { comm, .. } => of_comm(&case.comms[comm]) && case.operation(*event).is_some_and(wanted),
            _ => false,
        });
        stalled.flat_map(|event| case.graph.waiters_of(event).to_vec()).collect::<BTreeSet<usize>>()
    };
    let of_record: BTreeSet<usize> = match also {
        Also::Nothing => return ranks,
        Also::NoRankCompiles => {
            let compiles = !ranks.is_empty() && (0..case.world.views.len()).any(|other| case.compiles(other));
            return if compiles { Vec::new() } else { ranks };
        }
        Also::CallHasNotReturned => {
            // With more operations pending, the launch may only wait for room in a queue.
            let is_inside = |operation: &Operation| is_collective(operation) && operation.returned_ns == 0;
            ranks.retain(|index| {
                let mut pending = case.view(*index).pending();
                pending.next().is_some_and(is_inside) && pending.next().is_none()
            });
            return ranks;
        }
        Also::FirstCollectiveStalls => {
            let on_one_node = |comm: &Comm<'_>| {
                let node = |member: &Member<'_>| case.view(member.rank_index).node();
                comm.size > 1
                    && comm.members.iter().all(|member| member.completed == 0 && node(member) == node(&comm.members[0]))
            };
            inside(&|operation| operation.seq == 1, &on_one_node)
        }
        Also::Bfloat16Stalls => {
            let is_reduction = |operation: &Operation| {
                matches!(operation.op(), Op::AllReduce | Op::Reduce | Op::ReduceScatter)
                    && operation.dtype() == DataType::Bfloat16
            };
            inside(&is_reduction, &|_| true)
        }
        Also::UnequalTransfersStall => {
            let of_event = |event: Event| match event {
                Event::PointToPoint { rank_index, .. } => Some(rank_index),
                _ => None,
            };
            let stalled: BTreeSet<usize> = conclusion.stalled().into_iter().filter_map(of_event).collect();
            stalled.into_iter().filter(|index| has_unequal_group(case.view(*index))).collect()
        }
    };
    ranks.retain(|index| of_record.contains(index));
    ranks
}

/// Whether a rank has a group of pending sends or receives of different sizes.
fn has_unequal_group(view: &RankView<'_>) -> bool {
    let mut sizes: BTreeMap<(u64, i32), BTreeSet<u64>> = BTreeMap::new();
    for operation in view.pending().filter(|operation| is_p2p(operation) && operation.group != 0) {
        sizes.entry((operation.group, operation.op)).or_default().insert(operation.count);
    }
    sizes.values().any(|sizes| sizes.len() > 1)
}

/// The state of every rank, the smallest group first.
pub(crate) fn ranks(world: &World<'_>) -> Vec<RankGroup> {
    type Key<'a> = (&'static str, &'a str, Activity, Option<bool>, &'a Location, &'a [String]);
    let mut groups: BTreeMap<Key<'_>, Vec<u32>> = BTreeMap::new();
    for view in &world.views {
        let key = (
            presence_name(view.presence),
            view.host.state.as_str(),
            view.host.observed.activity,
            view.host.moved.map(|moved| moved.is_progress()),
            &view.host.location,
            view.evidence.map(|evidence| evidence.errors.as_slice()).unwrap_or_default(),
        );
        groups.entry(key).or_default().push(view.rank);
    }
    let mut groups: Vec<RankGroup> = groups
        .into_iter()
        .map(|((presence, process_state, activity, moved, location, errors), ranks)| RankGroup {
            ranks,
            presence: presence.to_owned(),
            process_state: process_state.to_owned(),
            activity,
            moved,
            location: location.clone(),
            errors: errors.to_vec(),
        })
        .collect();
    groups.sort_by(|one, other| one.ranks.len().cmp(&other.ranks.len()).then_with(|| one.ranks.cmp(&other.ranks)));
    groups
}
