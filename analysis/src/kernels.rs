//! Collectives without a host call: kernels that exchange flags with the devices of other ranks.
//!
//! Nothing numbers such a collective, but all ranks of a group launch the kernel equally often. So
//! the number of launches takes the place of the sequence number, and each group of ranks that
//! launch one kernel becomes a [`Comm`]. No record names the group. It is a communicator with a
//! rank that is stuck in the kernel, or else the job.

use std::collections::{BTreeMap, BTreeSet};

use xpu_timer_proto::v1::{CommunicatorState, KernelLaunches, OpKind, Operation};

use crate::{
    facts::compared_kernels,
    matching::{Comm, KernelGroup, Member, infer_silent},
    verdict::Activity,
    world::{RankView, World},
};

/// How often one rank has launched one kernel.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    launches: u64,
    communicates: bool,
}

/// The stream on which a rank launches a kernel. `None` if there are several.
pub(crate) fn stream_of(view: &RankView<'_>, name: &str) -> Option<u64> {
    let all = view.flight.into_iter().flat_map(|flight| &flight.kernels);
    let mut streams = all.filter(|kernel| kernel.name == name).map(|kernel| kernel.stream);
    streams.next().filter(|_| streams.next().is_none())
}

/// Whether a kernel communicates by itself, by the record of a rank.
pub(crate) fn communicates(view: &RankView<'_>, name: &str) -> bool {
    let mut all = view.flight.into_iter().flat_map(|flight| &flight.kernels);
    all.any(|kernel| kernel.communicates && kernel.name == name)
}

fn counts<'a>(view: &RankView<'a>) -> BTreeMap<&'a str, Count> {
    let mut counts: BTreeMap<&str, Count> = BTreeMap::new();
    let kernels: Vec<&KernelLaunches> = view.flight.map(compared_kernels).unwrap_or_default();
    for kernel in kernels {
        let count = counts.entry(&kernel.name).or_default();
        count.launches = count.launches.saturating_add(kernel.launches);
        count.communicates |= kernel.communicates;
    }
    counts
}

/// Whether the record of a rank has the count of every kernel that communicates.
fn is_complete(view: &RankView<'_>) -> bool {
    let uncounted = |health: &xpu_timer_proto::v1::HookHealth| health.uncounted_launches;
    view.flight.is_some_and(|flight| flight.health.as_ref().map_or(0, uncounted) == 0)
}

/// Adds the collectives without a host call in which ranks are stuck to the communicators of a job,
/// which stay in ascending order.
pub(crate) fn add_collectives<'a>(world: &World<'a>, comms: &mut Vec<Comm<'a>>) {
    let counts: Vec<_> = world.views.iter().map(counts).collect();
    let of_name = |name: &str| counts.iter().map(|of| of.get(name).copied().unwrap_or_default()).collect();
    let kernels = names(world, &counts).into_iter().map(|name| OneKernel { world, name, counts: of_name(name) });
    let graphs = graphs(world, &counts).map(|counts| OneKernel { world, name: GRAPHS, counts });
    let found: Vec<Comm> = kernels.chain(graphs).flat_map(|one| one.groups(comms)).collect();
    comms.extend(found);
    comms.sort_by_key(|comm| comm.id);
}

/// The name for all graphs of a rank, which may contain kernels that communicate.
const GRAPHS: &str = "CUDA graphs";

/// The numbers of launched graphs, if several ranks are stuck in graphs without a collective of a
/// library, and kernels that communicate are known.
fn graphs(world: &World<'_>, counts: &[BTreeMap<&str, Count>]) -> Option<Vec<Count>> {
    let is_stuck = |view: &&RankView<'_>| {
        let of_library = |operation: &Operation| operation.kind() == OpKind::Collective;
        pending(view, GRAPHS).next().is_some_and(|graph| graph.started_ns != 0) && !view.pending().any(of_library)
    };
    let communicates = counts.iter().flat_map(BTreeMap::values).any(|count| count.communicates);
    let launches = |view: &RankView<'_>| Count {
        launches: view.flight.map_or(0, |flight| flight.graphs_launched),
        communicates: false,
    };
    (communicates && world.views.iter().filter(is_stuck).count() > 1)
        .then(|| world.views.iter().map(launches).collect())
}

/// Pending launches of a kernel or of graphs, oldest first.
fn pending<'a>(view: &RankView<'a>, name: &str) -> impl Iterator<Item = &'a Operation> {
    view.pending().filter(move |operation| match operation.kind() {
        OpKind::Kernel => operation.function == name,
        OpKind::GraphLaunch => name == GRAPHS,
        _ => false,
    })
}

/// A rank waits for its device by its stack, and no operation is pending.
fn waits_unrecorded(view: &RankView<'_>) -> bool {
    view.host.observed.activity == Activity::DeviceWait && view.pending().next().is_none() && !view.halted()
}

/// The kernels in which ranks may be stuck. A kernel that is not known to communicate counts only
/// if all ranks launch it and several are stuck in it: otherwise it is a kernel that hangs.
fn names<'a>(world: &World<'a>, counts: &[BTreeMap<&'a str, Count>]) -> Vec<&'a str> {
    let mut stuck: BTreeMap<&str, usize> = BTreeMap::new();
    for view in &world.views {
        let started = |operation: &&Operation| operation.kind() == OpKind::Kernel && operation.started_ns != 0;
        let names: BTreeSet<&str> =
            view.pending().filter(started).map(|operation| operation.function.as_str()).collect();
        names.into_iter().filter(|name| !name.is_empty()).for_each(|name| *stuck.entry(name).or_default() += 1);
    }
    let communicates = |name: &str| counts.iter().any(|of| of.get(name).is_some_and(|count| count.communicates));
    let is_recorded = |rank_index: usize, name: &str| {
        world.views[rank_index].flight.is_none() || counts[rank_index].contains_key(name)
    };
    stuck.retain(|name, ranks| {
        communicates(name) || *ranks > 1 && (0..counts.len()).all(|rank_index| is_recorded(rank_index, name))
    });
    let mut names: Vec<&str> = stuck.into_keys().collect();
    if names.is_empty() && world.views.iter().any(waits_unrecorded) {
        // Without events, only the stacks show that ranks are stuck.
        let known = counts.iter().flatten().filter(|(_, count)| count.communicates).map(|(name, _)| *name);
        names = known.collect::<BTreeSet<_>>().into_iter().collect();
    }
    names
}

struct OneKernel<'w, 'a> {
    world: &'w World<'a>,
    name: &'a str,
    /// By rank index.
    counts: Vec<Count>,
}

impl<'a> OneKernel<'_, 'a> {
    /// A rank as a member of the group.
    fn member(&self, rank_index: usize, comm_rank: i32) -> Option<Member<'a>> {
        let view = &self.world.views[rank_index];
        let mut launches = pending(view, self.name);
        let oldest = launches.next();
        let started = oldest.is_some_and(|operation| operation.started_ns != 0);
        let waiting = u64::from(oldest.is_some()) + launches.count() as u64;
        let Count { launches, .. } = self.counts[rank_index];
        view.flight?;
        let launched = launches.max(waiting);
        let completed = launched - waiting;
        Some(Member {
            contradicts: false,
            rank_index,
            comm_rank,
            claimed_size: 0,
            state: CommunicatorState::Ready,
            launched,
            started: completed + u64::from(started),
            completed,
            oldest,
            waiting_seq: oldest.map(|_| completed + 1),
            initializing: false,
        })
    }

    fn group(&self, size: u32, ranks: impl Iterator<Item = (usize, i32)>) -> Comm<'a> {
        let members: Vec<Member> =
            ranks.filter_map(|(rank_index, comm_rank)| self.member(rank_index, comm_rank)).collect();
        let by_comm_rank = members.iter().map(|member| (member.comm_rank, member.rank_index)).collect();
        let certain = members.iter().all(|member| member.launched > 0 && self.counts[member.rank_index].communicates);
        let peers = members.iter().map(|member| member.rank_index).collect();
        let mut comm = Comm {
            id: identity(self.name, &members),
            size: size.max(u32::try_from(members.len()).unwrap_or(u32::MAX)),
            members,
            silent: Vec::new(),
            unnamed: 0,
            kernel: Some(KernelGroup { name: self.name.to_owned(), certain, peers }),
            by_comm_rank,
        };
        comm.by_comm_rank.sort_unstable();
        infer_silent(&mut comm, self.world);
        comm
    }

    /// The smallest groups in which a rank is behind. For ranks that are stuck in none of them, the
    /// smallest group in which no rank is behind.
    fn groups(&self, comms: &[Comm<'a>]) -> Vec<Comm<'a>> {
        let of_comm = |comm: &Comm<'a>| {
            let ranks = comm.members.iter().map(|member| (member.rank_index, member.comm_rank));
            self.group(comm.size, ranks)
        };
        let job = |index: usize| (index, i32::try_from(index).unwrap_or(-1));
        let ranks = self.world.views.len();
        let of_job = self.group(u32::try_from(ranks).unwrap_or(u32::MAX), (0..ranks).map(job));
        let mut candidates: Vec<Comm> = comms.iter().filter(|comm| comm.size > 1).map(of_comm).collect();
        candidates.push(of_job);
        candidates.sort_by_key(|group| group.size);
        candidates.retain_mut(|group| group.size > 1 && self.is_stuck(group));
        let (behind, level): (Vec<Comm>, Vec<Comm>) = candidates.into_iter().partition(is_behind);
        let mut found: Vec<Comm> = Vec::new();
        for group in behind {
            if !found.iter().any(|smaller| contains(&group, smaller)) {
                found.push(group);
            }
        }
        for group in level {
            let stuck = |member: &&Member<'_>| member.waiting_seq.is_some();
            let covered = |member: &Member<'_>| found.iter().any(|other| other.member(member.rank_index).is_some());
            if !group.members.iter().filter(stuck).all(covered) {
                found.push(group);
            }
        }
        found
    }

    /// Whether members are stuck in the kernel and no member is past it. Without recorded launches,
    /// the ranks that wait for their devices are stuck, if another rank has launched less.
    fn is_stuck(&self, group: &mut Comm<'a>) -> bool {
        if let Some(first) = group.members.iter().filter_map(|member| member.waiting_seq).min() {
            if waits_for_one(self.name) {
                group.members.retain(|member| member.waiting_seq.is_some());
                group.silent.clear();
                return true;
            }
            return group.members.iter().all(|member| member.completed < first);
        }
        let waits = |member: &Member<'a>| waits_unrecorded(&self.world.views[member.rank_index]);
        let Some(first) = group.members.iter().filter(|member| waits(member)).map(|member| member.launched).min()
        else {
            return false;
        };
        for member in group.members.iter_mut().filter(|member| waits(member)) {
            (member.started, member.completed) = (member.launched, first.saturating_sub(1));
            member.waiting_seq = Some(first);
        }
        first > 0 && group.members.iter().any(|member| member.launched < first)
    }
}

/// Whether a kernel waits for one peer, which launches another kernel.
fn waits_for_one(name: &str) -> bool {
    name.contains("signal")
}

/// Whether a rank of the group has not launched or not started what others are stuck in.
fn is_behind(group: &Comm<'_>) -> bool {
    let Some(first) = group.members.iter().filter_map(|member| member.waiting_seq).min() else { return false };
    !group.silent.is_empty() || group.members.iter().any(|member| member.started < first)
}

/// Whether the group has all members of a smaller one.
fn contains(group: &Comm<'_>, smaller: &Comm<'_>) -> bool {
    smaller.members.iter().all(|member| group.member(member.rank_index).is_some())
}

/// An identity that depends on the name and the members: FNV-1a.
fn identity(name: &str, members: &[Member<'_>]) -> u64 {
    let ranks = members.iter().flat_map(|member| member.rank_index.to_le_bytes());
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    name.bytes().chain(ranks).fold(0xcbf2_9ce4_8422_2325, hash).max(1)
}

/// A kernel that few ranks of a group have launched less often than the others.
#[derive(Debug, Clone)]
pub(crate) struct FewerLaunches {
    /// Its name.
    pub name: String,
    /// These ranks, as indices, and their numbers of launches.
    pub fewer: Vec<(usize, u64)>,
    /// The number of launches of each of the others.
    pub most: u64,
    /// The others, as rank indices.
    pub others: Vec<usize>,
    /// Whether it is known to communicate.
    pub communicates: bool,
}

/// The kernel that few of these ranks have launched less often than all the others, who have
/// launched it equally often. Kernels that communicate come first. `None` if kernels accuse
/// different ranks.
pub(crate) fn fewer_launches(world: &World<'_>, ranks: &[usize]) -> Option<FewerLaunches> {
    let counts: Vec<(usize, BTreeMap<&str, Count>)> =
        ranks.iter().map(|index| (*index, counts(&world.views[*index]))).collect();
    let names: BTreeSet<&str> = counts.iter().flat_map(|(_, of)| of.keys().copied()).collect();
    let mut all: Vec<FewerLaunches> = names.into_iter().filter_map(|name| compare(world, name, &counts)).collect();
    if all.iter().any(|one| one.communicates) {
        all.retain(|one| one.communicates);
    }
    let culprits = |one: &FewerLaunches| one.fewer.iter().map(|(index, _)| *index).collect::<Vec<_>>();
    let first = culprits(all.first()?);
    all.iter().all(|one| culprits(one) == first).then(|| all.swap_remove(0))
}

fn compare(world: &World<'_>, name: &str, counts: &[(usize, BTreeMap<&str, Count>)]) -> Option<FewerLaunches> {
    let communicates = counts.iter().any(|(_, of)| of.get(name).is_some_and(|count| count.communicates));
    let launches = |(index, of): &(usize, BTreeMap<&str, Count>)| match of.get(name) {
        Some(count) => Some((*index, count.launches)),
        None => (communicates && is_complete(&world.views[*index])).then_some((*index, 0)),
    };
    let launches: Vec<(usize, u64)> = counts.iter().map(launches).collect::<Option<_>>()?;
    let most = launches.iter().map(|(_, launches)| *launches).max()?;
    let (others, fewer): (Vec<_>, Vec<_>) = launches.into_iter().partition(|(_, launches)| *launches == most);
    let others: Vec<usize> = others.into_iter().map(|(index, _)| index).collect();
    (!fewer.is_empty() && fewer.len() < others.len()).then(|| FewerLaunches {
        name: name.to_owned(),
        fewer,
        most,
        others,
        communicates,
    })
}
