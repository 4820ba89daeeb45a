//! The parts of a verdict that need no judgement: the state of ranks, communicators and hooks.

use std::collections::{BTreeMap, HashMap};

use xpu_timer_proto::v1::{Evidence, Operation, Presence, TriggerKind};

use crate::{
    case::Case,
    graph::Event,
    stacks::StuckHelper,
    text::{communicator, operation_state},
    verdict::{
        Activity, CommunicatorGroup, CommunicatorReport, CulpritProcess, HookReport, Location, OperationState,
        RankGroup, TriggerReport,
    },
    world::{ProcessView, RankView, World},
};

/// What opened the incident.
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

/// A process that is no rank itself. `rank` is the rank that it belongs to, if any.
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

/// The state of every rank, the smallest group first.
pub(crate) fn ranks(world: &World<'_>) -> Vec<RankGroup> {
    type Key = (&'static str, String, Activity, Option<bool>, Location, Vec<String>);
    let mut groups: BTreeMap<Key, Vec<u32>> = BTreeMap::new();
    for view in &world.views {
        let key = (
            presence_name(view.presence),
            view.host.state.clone(),
            view.host.observed.activity,
            view.host.moved.map(|moved| moved.is_progress()),
            view.host.location.clone(),
            view.evidence.map(|evidence| evidence.errors.clone()).unwrap_or_default(),
        );
        groups.entry(key).or_default().push(view.rank);
    }
    let mut groups: Vec<RankGroup> = groups
        .into_iter()
        .map(|((presence, process_state, activity, moved, location, errors), ranks)| RankGroup {
            ranks,
            presence: presence.to_owned(),
            process_state,
            activity,
            moved,
            location,
            errors,
        })
        .collect();
    groups.sort_by(|one, other| one.ranks.len().cmp(&other.ranks.len()).then_with(|| one.ranks.cmp(&other.ranks)));
    groups
}
