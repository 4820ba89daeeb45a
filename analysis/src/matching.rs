//! Collective matching: for every communicator, the sequence number and the operation of each rank.
//!
//! Ranks are compared within one communicator only. A communicator has the same identity on all its
//! ranks. Members without a flight record are inferred if that needs no guess about the layout of
//! the job. Otherwise they are only counted.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use xpu_timer_proto::v1::{Communicator, CommunicatorState, FlightRecord, Op, Operation, Presence};

use crate::world::{RankView, World, is_collective, is_init};

/// One rank in one communicator.
#[derive(Debug)]
pub(crate) struct Member<'a> {
    /// Index of the rank.
    pub rank_index: usize,
    /// Its rank in the communicator; -1 if unknown.
    pub comm_rank: i32,
    /// The number of ranks that this member passed to the creation; 0 if unknown.
    pub claimed_size: u32,
    /// State as this member sees it.
    pub state: CommunicatorState,
    /// Collectives launched on the host.
    pub launched: u64,
    /// Collectives started on the device.
    pub started: u64,
    /// Collectives completed on the device.
    pub completed: u64,
    /// Its oldest collective here that has not completed.
    pub oldest: Option<&'a Operation>,
    /// Sequence number that it waits at: that of `oldest`, or by the counters if the operation
    /// itself was dropped.
    pub waiting_seq: Option<u64>,
    /// It is inside the call that creates the communicator.
    pub initializing: bool,
    /// Its counters contradict each other or its operations, so one of them is wrong.
    pub contradicts: bool,
}

/// The kernel of a collective without a host call.
#[derive(Debug)]
pub(crate) struct KernelGroup {
    /// Its name.
    pub name: String,
    /// The name is known to be that of a kernel that communicates, and all members have launched
    /// it before.
    pub certain: bool,
    /// The ranks that may launch it together, as indices. A kernel that waits for one peer only has
    /// fewer members: the ranks that are stuck in it.
    pub peers: Vec<usize>,
}

/// One communicator, or a group of ranks whose kernels communicate by themselves.
#[derive(Debug)]
pub(crate) struct Comm<'a> {
    /// Identity.
    pub id: u64,
    /// Number of its ranks. At least the number of its known members.
    pub size: u32,
    /// Members with a flight record that contains this communicator, ascending by rank index.
    pub members: Vec<Member<'a>>,
    /// Members without such a record, as rank indices, if they could be inferred.
    pub silent: Vec<usize>,
    /// Number of members that could not be inferred.
    pub unnamed: u32,
    /// The kernel of such a group, whose sequence numbers are numbers of launches.
    pub kernel: Option<KernelGroup>,
    /// The known members: rank in the communicator and rank index, ascending.
    pub by_comm_rank: Vec<(i32, usize)>,
}

impl Comm<'_> {
    /// Whether an operation is pending on it.
    pub(crate) fn busy(&self) -> bool {
        self.members.iter().any(|member| member.waiting_seq.is_some() || member.initializing)
    }

    /// The index of the member with this rank in the communicator.
    pub(crate) fn rank_index_of(&self, comm_rank: i32) -> Option<usize> {
        let index = self.by_comm_rank.binary_search_by_key(&comm_rank, |(comm_rank, _)| *comm_rank).ok()?;
        Some(self.by_comm_rank[index].1)
    }

    /// The member with this rank index.
    pub(crate) fn member(&self, rank_index: usize) -> Option<&Member<'_>> {
        self.members
            .binary_search_by_key(&rank_index, |member| member.rank_index)
            .ok()
            .map(|index| &self.members[index])
    }
}

/// All communicators of a job, ascending by identity.
pub(crate) fn communicators<'a>(world: &World<'a>) -> Vec<Comm<'a>> {
    let mut comms: BTreeMap<u64, Comm<'a>> = BTreeMap::new();
    for rank_index in 0..world.views.len() {
        add_members(&mut comms, world, rank_index);
    }
    let mut comms: Vec<Comm> = comms.into_values().collect();
    for comm in &mut comms {
        // A rank is a member of several communicators, so a large job has many members.
        comm.members.shrink_to_fit();
        comm.size = size_by_majority(&comm.members).max(u32::try_from(comm.members.len()).unwrap_or(u32::MAX));
        comm.by_comm_rank = comm.members.iter().map(|member| (member.comm_rank, member.rank_index)).collect();
        comm.by_comm_rank.sort_unstable();
        // If two members claim the same rank, the first counts.
        comm.by_comm_rank.dedup_by_key(|(comm_rank, _)| *comm_rank);
        if comm.busy() {
            infer_silent(comm, world);
        }
    }
    comms
}

/// The size that most members pass. If there are several, the largest.
fn size_by_majority(members: &[Member<'_>]) -> u32 {
    let mut votes: BTreeMap<u32, usize> = BTreeMap::new();
    members
        .iter()
        .filter(|member| member.claimed_size > 0)
        .for_each(|member| *votes.entry(member.claimed_size).or_default() += 1);
    votes.into_iter().max_by_key(|(size, votes)| (*votes, *size)).map_or(0, |(size, _)| size)
}

/// The pending operations of one rank, by communicator.
#[derive(Default)]
struct PendingOperations<'a> {
    /// The oldest pending collective.
    oldest: HashMap<u64, &'a Operation>,
    /// The sequence number of the newest pending collective.
    newest: HashMap<u64, u64>,
    /// The call that creates the communicator.
    creating: HashMap<u64, &'a Operation>,
    /// The sequence number of the newest collective, pending or not.
    last: HashMap<u64, u64>,
}

impl<'a> PendingOperations<'a> {
    fn of(world: &World<'a>, rank_index: usize) -> Self {
        let mut found = PendingOperations::default();
        world.views[rank_index].any_operation(|operation| {
            if is_collective(operation) {
                let last = found.last.entry(operation.communicator).or_default();
                *last = operation.seq.max(*last);
            }
            false
        });
        for operation in world.views[rank_index].pending() {
            if is_collective(operation) {
                let first = found.oldest.entry(operation.communicator).or_insert(operation);
                if operation.seq < first.seq {
                    *first = operation;
                }
                let last = found.newest.entry(operation.communicator).or_default();
                *last = operation.seq.max(*last);
            } else if is_init(operation) && operation.op() == Op::CommInit && operation.communicator != 0 {
                found.creating.entry(operation.communicator).or_insert(operation);
            }
        }
        found
    }

    fn newest(&self, id: u64) -> u64 {
        self.newest.get(&id).copied().unwrap_or(0)
    }
}

/// Whether no rank can complete this operation before all others have entered it.
pub(crate) fn synchronizes(op: Op) -> bool {
    matches!(op, Op::AllReduce | Op::AllGather | Op::ReduceScatter | Op::AllToAll | Op::Barrier)
}

/// Adds a rank to all communicators that its record contains.
fn add_members<'a>(comms: &mut BTreeMap<u64, Comm<'a>>, world: &World<'a>, rank_index: usize) {
    let Some(flight) = world.views[rank_index].flight else { return };
    let mut pending = PendingOperations::of(world, rank_index);
    let mut add = |id: u64, member: Member<'a>| {
        let comm = comms.entry(id).or_insert_with(|| Comm {
            id,
            size: 0,
            members: Vec::new(),
            silent: Vec::new(),
            unnamed: 0,
            kernel: None,
            by_comm_rank: Vec::new(),
        });
        // If a rank reports a communicator twice, its first entry counts.
        if comm.members.last().is_none_or(|last| last.rank_index != rank_index) {
            comm.members.push(member);
        }
    };
    for communicator in flight.communicators.iter().filter(|communicator| communicator.id != 0) {
        add(communicator.id, recorded_member(world, rank_index, flight, communicator, &mut pending));
    }
    // Operations whose communicator did not fit the table, and communicators known only from their
    // creation.
    let collectives = pending.oldest.iter().map(|(id, operation)| (*id, (*operation, false)));
    let creations = pending.creating.iter().map(|(id, operation)| (*id, (*operation, true)));
    let unlisted: BTreeMap<u64, (&Operation, bool)> = collectives.chain(creations).collect();
    for (id, (operation, initializing)) in unlisted {
        let member = Member {
            rank_index,
            comm_rank: -1,
            claimed_size: 0,
            state: CommunicatorState::Unspecified,
            launched: pending.newest(id),
            started: if operation.started_ns == 0 { operation.seq.saturating_sub(1) } else { operation.seq },
            completed: operation.seq.saturating_sub(1),
            oldest: (!initializing).then_some(operation),
            waiting_seq: (!initializing).then_some(operation.seq),
            initializing,
            contradicts: false,
        };
        add(id, member);
    }
}

/// The member of a communicator that the table of its record lists. Takes the operations of that
/// communicator out of `pending`.
fn recorded_member<'a>(
    world: &World<'a>,
    rank_index: usize,
    flight: &FlightRecord,
    communicator: &Communicator,
    pending: &mut PendingOperations<'a>,
) -> Member<'a> {
    let id = communicator.id;
    pending.creating.remove(&id);
    let ended = matches!(communicator.state(), CommunicatorState::Finalized | CommunicatorState::Aborted);
    let polled = world.views[rank_index].polled_collective(communicator);
    let operation = polled.or(pending.oldest.remove(&id)).filter(|_| !ended);
    let by_counters = || {
        // The counters are a fallback only for a record that lost operations.
        let lost = flight.health.as_ref().is_some_and(|health| health.dropped > 0);
        (lost && !ended && communicator.launched > communicator.completed).then(|| communicator.completed + 1)
    };
    Member {
        rank_index,
        comm_rank: communicator.rank,
        claimed_size: communicator.size,
        state: communicator.state(),
        launched: communicator.launched.max(pending.newest(id)),
        started: match operation {
            Some(operation) if operation.started_ns != 0 => communicator.started.max(operation.seq),
            Some(operation) => communicator.started.min(operation.seq.saturating_sub(1)),
            None => communicator.started,
        },
        completed: match operation {
            Some(operation) => communicator.completed.min(operation.seq.saturating_sub(1)),
            None => communicator.completed,
        },
        oldest: operation,
        waiting_seq: operation.map(|operation| operation.seq).or_else(by_counters),
        initializing: communicator.state() == CommunicatorState::Initializing,
        contradicts: !ended
            && contradicts(&world.views[rank_index], communicator, operation, pending.last.get(&id).copied()),
    }
}

/// Whether the counters of a communicator contradict each other or the operations of its record:
/// the oldest one that has not completed, and the sequence number of the newest. A record that lost
/// operations proves nothing, and that of a host library lacks a collective for which its rank does
/// not wait yet.
fn contradicts(
    view: &RankView<'_>,
    communicator: &Communicator,
    oldest: Option<&Operation>,
    newest: Option<u64>,
) -> bool {
    let Communicator { launched, started, completed, .. } = *communicator;
    let (Some(newest), false) = (newest, view.lossy()) else { return completed > started || started > launched };
    let is_complete = view.has_device();
    let done = oldest.map_or(launched, |operation| operation.seq.saturating_sub(1));
    completed > started
        || started > launched
        || newest > launched
        || completed > done
        || is_complete && (newest < launched || completed < done)
}

/// Infers the members without a flight record in one of three ways, each exact: the communicator is
/// the whole job; its known members lie on a straight line of ranks; or exactly as many ranks as
/// are missing have no record at all.
pub(crate) fn infer_silent(comm: &mut Comm<'_>, world: &World<'_>) {
    let missing = (comm.size as usize).saturating_sub(comm.members.len());
    if missing == 0 {
        return;
    }
    let known: BTreeSet<usize> = comm.members.iter().map(|member| member.rank_index).collect();
    let found: Vec<usize> = if comm.size as usize == world.views.len() {
        (0..world.views.len()).filter(|rank_index| !known.contains(rank_index)).collect()
    } else {
        on_the_line(comm, world).unwrap_or_else(|| {
            let quiet: Vec<usize> =
                (0..world.views.len()).filter(|rank_index| world.views[*rank_index].flight.is_none()).collect();
            if quiet.len() == missing { quiet } else { Vec::new() }
        })
    };
    comm.unnamed = u32::try_from(missing - found.len().min(missing)).unwrap_or(u32::MAX);
    comm.silent = found;
}

fn on_the_line(comm: &Comm<'_>, world: &World<'_>) -> Option<Vec<usize>> {
    let points: Vec<(i64, i64)> = comm
        .members
        .iter()
        .filter(|member| member.comm_rank >= 0)
        .map(|member| (i64::from(member.comm_rank), i64::from(world.views[member.rank_index].rank)))
        .collect();
    let (first, last) = (points.iter().min()?, points.iter().max()?);
    let (run, rise) = (last.0 - first.0, last.1 - first.1);
    if run == 0 || rise % run != 0 || comm.size as usize > world.views.len() {
        return None;
    }
    let slope = rise / run;
    let at = |comm_rank: i64| first.1 + slope * (comm_rank - first.0);
    if slope == 0 || points.iter().any(|(comm_rank, rank)| at(*comm_rank) != *rank) {
        return None;
    }
    let taken: BTreeSet<i64> = points.iter().map(|point| point.0).collect();
    (0..i64::from(comm.size))
        .filter(|comm_rank| !taken.contains(comm_rank))
        .map(|comm_rank| {
            let rank = u32::try_from(at(comm_rank)).ok()?;
            let rank_index = world.views.binary_search_by_key(&rank, |view| view.rank).ok()?;
            // A rank whose record has other communicators, but not this one, has not joined it yet.
            // It is a member too.
            (comm.member(rank_index).is_none()).then_some(rank_index)
        })
        .collect()
}

/// Whether a member without a flight record is certainly not in the operation that its peers wait
/// in.
pub(crate) fn certainly_absent(world: &World<'_>, rank_index: usize) -> bool {
    let view = &world.views[rank_index];
    let complete_table = |flight: &FlightRecord| flight.health.as_ref().is_none_or(|health| health.overflows == 0);
    view.dead() || view.presence == Presence::Unregistered || view.flight.is_some_and(complete_table)
}
