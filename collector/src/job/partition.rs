//! Splits the processes with one job name into jobs. Pure: the caller passes in everything that is
//! known of them.
//!
//! A communicator with a unique identity joins its ranks whatever else they claim. So does one
//! whose identity is a name, if two of its ranks claim one number and have different places in it:
//! in two jobs that use one name, they would have the same place. Otherwise, processes are joined
//! unless something contradicts it: two living processes with one rank, worlds of two sizes,
//! or two rendezvous. Where a contradiction leaves a choice, closer relatives stay together: the
//! ranks below one launcher. A process below a rank that claims the number of that rank has
//! inherited it and is a helper.

use std::collections::{BTreeMap, BTreeSet};

/// A process, identified by pid and start time.
pub(crate) type ProcessId = (i32, u64);

/// A process and the known facts about its membership in a job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Member {
    /// `None` if it is not visible in this PID namespace.
    pub process: Option<ProcessId>,
    /// Its ancestors when it was first seen, nearest first, followed by the launched command that
    /// it inherited.
    pub ancestors: Vec<ProcessId>,
    /// The rank that it claims.
    pub rank: i32,
    /// The world size that it claims; 0 if unknown.
    pub world_size: u32,
    /// Restart number of its agent.
    pub attempt: u32,
    /// Its rendezvous, or another identifier of the job from its scheduler, in the environment that
    /// it was started with. Empty if there is none.
    pub instance: String,
    /// As `instance`, but from its environment when it registered, which a launcher may have
    /// completed. Empty if there is none.
    pub own_instance: String,
    /// CLOCK_MONOTONIC at which it was started.
    pub started_ns: u64,
    /// CLOCK_MONOTONIC at which it registered; `u64::MAX` until then.
    pub registered_ns: u64,
    /// CLOCK_MONOTONIC at which it certainly lived: when it registered, else when it was started.
    pub alive_ns: u64,
    /// CLOCK_MONOTONIC at which it ended; `u64::MAX` while it lives.
    pub ended_ns: u64,
    /// Its communicators of several ranks.
    pub communicators: Vec<CommunicatorRank>,
}

/// The rank of a process in a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CommunicatorRank {
    /// Identity of the communicator.
    pub id: u64,
    /// Number of its ranks.
    pub size: u32,
    /// The rank of the process in it.
    pub rank: i32,
    /// Whether no other job has a communicator with this identity.
    pub unique: bool,
}

/// The job that a member belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Assignment {
    /// Members of one job have the same number: the index of its first member.
    pub group: usize,
    /// Whether it is a helper that inherited the number of a rank.
    pub helper: bool,
    /// Its rank and the world size according to a communicator that spans the job. Set where the
    /// claims contradict each other.
    pub corrected_rank: Option<(i32, u32)>,
}

/// The end of a process is noticed within this time.
const NOTICED_NS: u64 = 1_000_000_000;

/// Start times are known to this precision: the kernel reports them in clock ticks.
const START_TIME_ERROR_NS: u64 = 10_000_000;

impl Member {
    fn descends_from(&self, other: &Member) -> bool {
        other.process.is_some_and(|process| self.ancestors.contains(&process))
    }

    fn overlaps(&self, other: &Member) -> bool {
        !self.ended_before(other) && !other.ended_before(self)
    }

    /// Whether it ended before another process was started. The end may have been noticed late, but
    /// a process that certainly lived after the start of the other one did not end before it.
    #[must_use]
    pub(crate) fn ended_before(&self, other: &Member) -> bool {
        self.ended_ns <= other.started_ns.saturating_add(NOTICED_NS)
            && self.ended_ns <= other.registered_ns
            && self.alive_ns <= other.started_ns.saturating_add(START_TIME_ERROR_NS)
    }

    /// Whether they use two rendezvous. The start environment counts: a program may change its own
    /// environment, and one process may have registered before the change and another one after it.
    fn uses_other_rendezvous(&self, other: &Member) -> bool {
        // A rank that starts the others may have changed what it was started with.
        let own = self.rendezvous();
        let is_family = self.descends_from(other) || other.descends_from(self);
        if is_family && !own.is_empty() && own == other.rendezvous() {
            return false;
        }
        if !self.instance.is_empty() && !other.instance.is_empty() {
            return self.instance != other.instance;
        }
        let (one, other) = (self.rendezvous(), other.rendezvous());
        !one.is_empty() && !other.is_empty() && one != other
    }

    fn rendezvous(&self) -> &str {
        if self.own_instance.is_empty() { &self.instance } else { &self.own_instance }
    }

    /// Whether the claims of two processes exclude that they belong to one job.
    fn contradicts(&self, other: &Member) -> bool {
        if self.uses_other_rendezvous(other) {
            return true;
        }
        if !self.overlaps(other) {
            return false;
        }
        if self.descends_from(other) || other.descends_from(self) {
            return self.is_rank_beside(other);
        }
        if self.attempt != other.attempt {
            // An agent that starts another attempt has given up the previous one. Agents count
            // their attempts independently.
            return self.rank == other.rank && self.ancestors.first() != other.ancestors.first();
        }
        self.claims_rank_of(other) || (self.is_alive_with(other) && self.has_other_world_size(other))
    }

    /// Whether a process and a descendant that inherited its number are both ranks, in groups that
    /// share no communicator: the ranks of a job may start those of another one.
    fn is_rank_beside(&self, other: &Member) -> bool {
        let groups = |member: &Member| -> BTreeSet<u64> {
            member.communicators.iter().filter(|one| one.size > 1).map(|one| one.id).collect()
        };
        let (own, others) = (groups(self), groups(other));
        !own.is_empty() && !others.is_empty() && own.is_disjoint(&others) && self.claims_rank_of(other)
    }

    /// Whether two processes claim one rank at the same time. A rank of a world that has grown or
    /// shrunk may end late.
    fn claims_rank_of(&self, other: &Member) -> bool {
        let at_once = self.overlaps(other) && (self.is_alive_with(other) || !self.has_other_world_size(other));
        self.rank == other.rank && self.attempt == other.attempt && at_once
    }

    /// Whether both processes are alive.
    fn is_alive_with(&self, other: &Member) -> bool {
        self.ended_ns == u64::MAX && other.ended_ns == u64::MAX
    }

    fn has_other_world_size(&self, other: &Member) -> bool {
        self.world_size > 0 && other.world_size > 0 && self.world_size != other.world_size
    }

    /// How closely two processes are related: the start time of their closest common ancestor.
    fn closeness(&self, other: &Member) -> u64 {
        let common = self.ancestors.iter().filter(|ancestor| other.ancestors.contains(ancestor));
        common.map(|(_, start)| *start).max().unwrap_or(0)
    }

    fn world_communicator(&self) -> Option<u64> {
        let of_world = |one: &&CommunicatorRank| one.unique && self.world_size > 1 && one.size == self.world_size;
        self.communicators.iter().find(of_world).map(|one| one.id)
    }
}

/// Groups of members that are joined step by step.
struct Groups<'m> {
    members: &'m [Member],
    // The claims, corrected by the ranks that communicators report.
    claims: Vec<Member>,
    corrected_ranks: Vec<Option<(i32, u32)>>,
    group_of: Vec<usize>,
    groups: BTreeMap<usize, Vec<usize>>,
}

impl<'m> Groups<'m> {
    fn new(members: &'m [Member], mains: &[usize]) -> Self {
        Groups {
            members,
            claims: members.to_vec(),
            corrected_ranks: vec![None; members.len()],
            group_of: (0..members.len()).collect(),
            groups: mains.iter().map(|index| (*index, vec![*index])).collect(),
        }
    }

    fn join(&mut self, one: usize, other: usize) {
        let (one, other) = (self.group_of[one], self.group_of[other]);
        if one == other {
            return;
        }
        let (first, second) = (one.min(other), one.max(other));
        let moved = self.groups.remove(&second).unwrap_or_default();
        moved.iter().for_each(|index| self.group_of[*index] = first);
        self.groups.entry(first).or_default().extend(moved);
    }

    fn pairs(&self, one: usize, other: usize, test: impl Fn(&Member, &Member) -> bool) -> bool {
        let of = |index: usize| self.groups.get(&self.group_of[index]).map(Vec::as_slice).unwrap_or_default();
        of(one).iter().any(|one| of(other).iter().any(|other| test(&self.claims[*one], &self.claims[*other])))
    }

    /// Joins the members of communicators, which are keyed by size and identity. If two of the
    /// connected processes claim one rank, a communicator that contains all of them determines the
    /// ranks. Without one they are separate groups, such as a trainer and a server that share a
    /// communicator: the smaller communicators join their members, and contradicting ones do not.
    fn join_by(&mut self, communicators: &BTreeMap<(u32, u64), Vec<usize>>) {
        let mut connected: Vec<BTreeSet<usize>> = Vec::new();
        for inside in communicators.values() {
            let (touched, apart): (Vec<_>, Vec<_>) =
                connected.into_iter().partition(|set| inside.iter().any(|index| set.contains(index)));
            let mut set: BTreeSet<usize> = touched.into_iter().flatten().collect();
            set.extend(inside);
            connected = apart;
            connected.push(set);
        }
        for set in connected {
            let clash = set
                .iter()
                .any(|one| set.range(one + 1..).any(|other| self.claims[*one].claims_rank_of(&self.claims[*other])));
            let ranks_in =
                |id: u64| set.iter().map(|index| self.rank_in(*index, id)).collect::<Option<BTreeSet<i32>>>();
            let is_world = |id: u64| ranks_in(id).is_some_and(|ranks| ranks.len() == set.len() && !ranks.contains(&-1));
            if !clash {
                self.join_all(set.iter().copied());
            } else if let Some((size, id)) = communicators.keys().rev().find(|(_, id)| is_world(*id)).copied() {
                for index in &set {
                    let Some(rank) = self.rank_in(*index, id) else { continue };
                    self.corrected_ranks[*index] = Some((rank, size));
                    (self.claims[*index].rank, self.claims[*index].world_size) = (rank, size);
                }
                self.join_all(set.iter().copied());
            } else {
                for inside in communicators.values().filter(|inside| inside.iter().any(|index| set.contains(index))) {
                    for pair in inside.windows(2) {
                        if !self.pairs(pair[0], pair[1], Member::claims_rank_of) {
                            self.join(pair[0], pair[1]);
                        }
                    }
                }
            }
        }
    }

    fn rank_in(&self, index: usize, communicator: u64) -> Option<i32> {
        let mut communicators = self.members[index].communicators.iter();
        communicators.find(|one| one.id == communicator).map(|one| one.rank)
    }

    /// Whether these processes share a communicator although its identity is only a name. Each has
    /// another place in it, and two claim one rank. Replicas of torchft do so: each is launched on
    /// its own, with a rank 0.
    fn is_shared(&self, (size, id): (u32, u64), inside: &[usize]) -> bool {
        let places: BTreeSet<Option<i32>> = inside.iter().map(|index| self.rank_in(*index, id)).collect();
        let clash = |one: &usize, other: &usize| self.claims[*one].claims_rank_of(&self.claims[*other]);
        let mut pairs =
            inside.iter().enumerate().flat_map(|(at, one)| inside[..at].iter().map(move |other| (one, other)));
        places.len() == inside.len() && inside.len() <= size as usize && pairs.any(|(one, other)| clash(one, other))
    }

    fn join_all(&mut self, indices: impl Iterator<Item = usize>) {
        let mut first = None;
        for index in indices {
            self.join(*first.get_or_insert(index), index);
        }
    }

    /// Joins everything that does not contradict, closest relatives first.
    fn join_relatives(&mut self, mains: &[usize]) {
        let mut edges = Vec::new();
        for (number, one) in mains.iter().enumerate() {
            for other in &mains[..number] {
                let (first, second) = (&self.claims[*one], &self.claims[*other]);
                let worlds = (first.world_communicator(), second.world_communicator());
                let apart = matches!(worlds, (Some(one), Some(other)) if one != other);
                let same_instance = !first.rendezvous().is_empty() && first.rendezvous() == second.rendezvous();
                let far = u64::MAX - first.closeness(second);
                edges.push((!same_instance, far, apart, first.started_ns.abs_diff(second.started_ns), *one, *other));
            }
        }
        edges.sort_unstable();
        for (.., one, other) in edges {
            if self.group_of[one] != self.group_of[other] && !self.pairs(one, other, Member::contradicts) {
                self.join(one, other);
            }
        }
    }
}

/// Splits the processes of one name into jobs. The result has one assignment for each member, in
/// their order.
#[must_use]
pub(crate) fn partition(members: &[Member]) -> Vec<Assignment> {
    let host = |helper: &Member| {
        let is_host = |other: &Member| {
            helper.descends_from(other)
                && (helper.rank, helper.attempt) == (other.rank, other.attempt)
                && !helper.uses_other_rendezvous(other)
        };
        // A process that shares communicators with others is a rank, even if it inherited a number.
        if helper.communicators.iter().any(|communicator| communicator.unique && communicator.size > 1) {
            None
        } else {
            members.iter().position(is_host)
        }
    };
    let hosts: Vec<Option<usize>> = members.iter().map(host).collect();
    let mains: Vec<usize> = (0..members.len()).filter(|index| hosts[*index].is_none()).collect();
    let mut groups = Groups::new(members, &mains);
    if is_one_job(members, &mains) {
        groups.join_all(mains.iter().copied());
    } else {
        let mut communicators: BTreeMap<(u32, u64), Vec<usize>> = BTreeMap::new();
        let mut named: BTreeMap<(u32, u64), Vec<usize>> = BTreeMap::new();
        for index in &mains {
            for one in &members[*index].communicators {
                let by_key = if one.unique { &mut communicators } else { &mut named };
                by_key.entry((one.size, one.id)).or_default().push(*index);
            }
        }
        communicators.retain(|_, inside| inside.len() > 1);
        named.retain(|key, inside| groups.is_shared(*key, inside));
        communicators.append(&mut named);
        groups.join_by(&communicators);
        groups.join_relatives(&mains);
    }
    let assignment = |index: usize| {
        // A helper may have helpers.
        let mut main = index;
        for _ in 0..members.len() {
            let Some(host) = hosts[main] else { break };
            main = host;
        }
        Assignment {
            group: groups.group_of[main],
            helper: main != index,
            corrected_rank: groups.corrected_ranks[index],
        }
    };
    (0..members.len()).map(assignment).collect()
}

/// The usual case, which has a fast check: nothing contradicts.
fn is_one_job(members: &[Member], mains: &[usize]) -> bool {
    let all = || mains.iter().map(|index| &members[*index]);
    let ranks: BTreeSet<i32> = all().map(|member| member.rank).collect();
    let instances: BTreeSet<&str> = all().map(Member::rendezvous).filter(|text| !text.is_empty()).collect();
    let sizes: BTreeSet<u32> = all().map(|member| member.world_size).filter(|size| *size > 0).collect();
    ranks.len() == mains.len() && instances.len() <= 1 && sizes.len() <= 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// A rank of a world of two with this pid below these ancestors (pid and start time are equal).
    fn member(pid: i32, rank: i32, ancestors: &[i32]) -> Member {
        Member {
            process: Some((pid, pid as u64)),
            ancestors: ancestors.iter().map(|pid| (*pid, *pid as u64)).collect(),
            rank,
            world_size: 2,
            started_ns: pid as u64 * SECOND,
            alive_ns: pid as u64 * SECOND,
            registered_ns: u64::MAX,
            ended_ns: u64::MAX,
            ..Member::default()
        }
    }

    fn inside(member: Member, communicators: &[(u64, u32, i32)]) -> Member {
        let rank_in =
            |(id, size, rank): &(u64, u32, i32)| CommunicatorRank { id: *id, size: *size, rank: *rank, unique: true };
        Member { communicators: communicators.iter().map(rank_in).collect(), ..member }
    }

    /// As [`inside`], but the identities are names.
    fn inside_named(member: Member, communicators: &[(u64, u32, i32)]) -> Member {
        let mut member = inside(member, communicators);
        member.communicators.iter_mut().for_each(|one| one.unique = false);
        member
    }

    fn at(member: Member, instance: &str) -> Member {
        Member { instance: instance.into(), ..member }
    }

    fn groups(members: &[Member]) -> Vec<usize> {
        partition(members).iter().map(|assignment| assignment.group).collect()
    }

    /// Every order of the members must give the same jobs.
    fn check(members: &[Member], wanted: &[usize]) {
        assert_eq!(groups(members), wanted);
        let count = members.len();
        for shift in 0..count {
            for backwards in [false, true] {
                let place = |index: usize| (if backwards { count - 1 - index } else { index } + shift) % count;
                let order: Vec<usize> = (0..count).map(place).collect();
                let turned: Vec<Member> = order.iter().map(|index| members[*index].clone()).collect();
                let found = groups(&turned);
                for one in 0..count {
                    for other in 0..count {
                        let same = wanted[order[one]] == wanted[order[other]];
                        assert_eq!(found[one] == found[other], same, "{order:?}: {found:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn ranks_that_do_not_contradict_are_one_job() {
        check(&[member(10, 0, &[5, 2]), member(11, 1, &[5, 2])], &[0, 0]);
        check(&[member(10, 0, &[]), member(11, 1, &[])], &[0, 0]);
        // A rank that its launcher started directly learns the rendezvous from its environment only
        // later.
        check(&[member(10, 0, &[2]), at(member(11, 1, &[10, 2]), "h:1")], &[0, 0]);
    }

    #[test]
    fn launchers_separate_two_jobs_of_one_name() {
        let jobs = [member(10, 0, &[5, 2]), member(11, 1, &[5, 2]), member(20, 0, &[6, 2]), member(21, 1, &[6, 2])];
        check(&jobs, &[0, 0, 2, 2]);
        // One rank of each job is missing.
        check(&[jobs[0].clone(), jobs[2].clone(), jobs[3].clone()], &[0, 1, 1]);
        check(&[jobs[1].clone(), jobs[2].clone(), jobs[3].clone()], &[0, 1, 1]);
    }

    #[test]
    fn communicators_separate_two_jobs_of_one_launcher() {
        let jobs = [
            inside(member(10, 0, &[2]), &[(77, 2, 0)]),
            inside(member(11, 0, &[2]), &[(88, 2, 0)]),
            inside(member(12, 1, &[2]), &[(88, 2, 1)]),
            inside(member(13, 1, &[2]), &[(77, 2, 1)]),
        ];
        check(&jobs, &[0, 1, 1, 0]);
        // One rank has not made its communicator yet.
        let late = Member { communicators: Vec::new(), ..jobs[3].clone() };
        check(&[jobs[0].clone(), jobs[1].clone(), jobs[2].clone(), late], &[0, 1, 1, 0]);
    }

    #[test]
    fn replicas_that_are_jobs_of_their_own_are_joined_by_a_name() {
        // Each replica has its own launcher, store and rank 0 of a world of one.
        let replica = |pid: i32, place: i32| {
            let member = Member { world_size: 1, ..at(member(pid, 0, &[pid - 5, 2]), &format!("h:{pid}")) };
            inside_named(member, &[(77, 3, place)])
        };
        let replicas = [replica(10, 0), replica(11, 1), replica(12, 2)];
        check(&replicas, &[0, 0, 0]);
        let corrected: Vec<_> = partition(&replicas).iter().map(|one| one.corrected_rank).collect();
        assert_eq!(corrected, [Some((0, 3)), Some((1, 3)), Some((2, 3))]);
    }

    #[test]
    fn two_jobs_whose_groups_have_one_name_stay_two() {
        let rank = |pid: i32, number: i32, port: i32| {
            inside_named(at(member(pid, number, &[2]), &format!("h:{port}")), &[(77, 2, number)])
        };
        let jobs = [rank(10, 0, 1), rank(11, 1, 1), rank(20, 0, 2), rank(21, 1, 2)];
        check(&jobs, &[0, 0, 2, 2]);
        check(&[jobs[0].clone(), jobs[2].clone()], &[0, 1]);
        check(&[jobs[0].clone(), jobs[3].clone()], &[0, 1]);
    }

    #[test]
    fn two_rendezvous_are_two_jobs_unless_a_communicator_joins_them() {
        let (one, other) = (at(member(10, 0, &[2]), "h:1"), at(member(11, 1, &[2]), "h:2"));
        check(&[one.clone(), other.clone()], &[0, 1]);
        check(&[inside(one, &[(7, 2, 0)]), inside(other, &[(7, 2, 1)])], &[0, 0]);
    }

    #[test]
    fn a_rendezvous_set_at_run_time_joins_and_separates_jobs() {
        let set = |member: Member, own: &str| Member { own_instance: own.into(), ..member };
        // The children of a launcher that is rank 0 inherit what it set in its own environment.
        check(&[set(member(10, 0, &[2]), "h:1"), set(at(member(11, 1, &[10, 2]), "h:1"), "h:1")], &[0, 0]);
        // Two jobs whose ranks were spawned by one program.
        let spawned = |pid: i32, rank: i32, own: &str| set(member(pid, rank, &[5]), own);
        check(
            &[spawned(10, 0, "h:1"), spawned(11, 0, "h:2"), spawned(12, 1, "h:2"), spawned(13, 1, "h:1")],
            &[0, 1, 1, 0],
        );
        // A program of one job sets it after some of its ranks have registered.
        check(&[at(member(10, 0, &[5]), "prterun-1"), set(at(member(11, 1, &[5]), "prterun-1"), "h:1")], &[0, 0]);
    }

    #[test]
    fn two_world_sizes_are_two_jobs() {
        let larger = Member { world_size: 4, ..member(12, 2, &[6, 2]) };
        check(&[member(10, 0, &[5, 2]), member(11, 1, &[5, 2]), larger], &[0, 0, 2]);
    }

    #[test]
    fn a_restarted_rank_belongs_to_the_same_job() {
        let gone = Member { ended_ns: 15 * SECOND, ..member(10, 0, &[5, 2]) };
        check(&[gone.clone(), member(11, 1, &[5, 2]), member(20, 0, &[5, 2])], &[0, 0, 0]);
        // It was alive when the other one was started.
        check(&[gone, member(11, 1, &[5, 2]), member(12, 0, &[6, 2])], &[0, 0, 2]);
    }

    #[test]
    fn another_attempt_of_the_same_agent_is_the_same_job() {
        let again = |pid: i32, agent: i32| Member { attempt: 1, ..member(pid, 0, &[agent, 2]) };
        check(&[member(10, 0, &[5, 2]), again(20, 5)], &[0, 0]);
        check(&[member(10, 0, &[5, 2]), again(20, 6)], &[0, 1]);
    }

    #[test]
    fn a_process_with_an_inherited_rank_is_a_helper_unless_it_has_communicators() {
        let rank = member(10, 0, &[5]);
        let helpers = [member(11, 0, &[10, 5]), member(12, 0, &[10, 5]), member(13, 0, &[12, 10, 5])];
        let all = [&[rank.clone()][..], &helpers].concat();
        check(&all, &[0, 0, 0, 0]);
        assert_eq!(
            partition(&all).iter().map(|assignment| assignment.helper).collect::<Vec<_>>(),
            [false, true, true, true]
        );
        // Ranks that another rank has started itself, as Lightning does, with the number that they
        // inherited.
        let ranks = [inside(rank, &[(7, 2, 0)]), inside(member(11, 0, &[10, 5]), &[(7, 2, 1)])];
        check(&ranks, &[0, 0]);
        let assignments = partition(&ranks);
        assert_eq!(
            assignments.iter().map(|assignment| assignment.corrected_rank).collect::<Vec<_>>(),
            [Some((0, 2)), Some((1, 2))]
        );
        assert!(assignments.iter().all(|assignment| !assignment.helper));
    }

    #[test]
    fn a_communicator_of_all_renumbers_ranks_and_a_smaller_one_joins_no_duplicates() {
        // All were started with the same number and got their own rank as an argument.
        let spawned_with_argument = |pid: i32, rank: i32| inside(member(pid, 0, &[2]), &[(9, 3, rank)]);
        let assignments =
            partition(&[spawned_with_argument(10, 2), spawned_with_argument(11, 0), spawned_with_argument(12, 1)]);
        assert!(assignments.iter().all(|assignment| assignment.group == 0));
        assert_eq!(
            assignments.iter().filter_map(|assignment| assignment.corrected_rank).collect::<Vec<_>>(),
            [(2, 3), (0, 3), (1, 3)]
        );
        // A trainer sends its weights to the ranks of a server, which also count from 0.
        let trainer = [inside(member(10, 0, &[5]), &[(1, 2, 0), (3, 3, 0)]), inside(member(11, 1, &[5]), &[(1, 2, 1)])];
        let server = [
            inside(member(20, 0, &[6]), &[(2, 2, 0), (3, 3, 1)]),
            inside(member(21, 1, &[6]), &[(2, 2, 1), (3, 3, 2)]),
        ];
        let all = [trainer, server].concat();
        let found = groups(&all);
        assert_eq!(found, [0, 0, 2, 2]);
    }

    #[test]
    fn groups_that_number_their_ranks_alike_are_one_job_once_they_share_a_communicator() {
        // Pairs for tensor parallelism come first. Each process knows only its number in its pair.
        let pair = |pid: i32, id: u64, rank: i32| inside(member(pid, rank, &[5]), &[(id, 2, rank)]);
        let pairs = [pair(10, 7, 0), pair(11, 7, 1), pair(12, 8, 0), pair(13, 8, 1)];
        check(&pairs, &[0, 0, 2, 2]);
        // The world comes last.
        let places = [(7, 0), (7, 1), (8, 0), (8, 1)].into_iter().zip(0..);
        let with_world = |((id, rank), in_world): ((u64, i32), i32)| {
            inside(member(10 + in_world, rank, &[5]), &[(99, 4, in_world), (id, 2, rank)])
        };
        let whole: Vec<Member> = places.map(with_world).collect();
        check(&whole, &[0, 0, 0, 0]);
        let ranks: Vec<_> = partition(&whole).iter().map(|assignment| assignment.corrected_rank).collect();
        assert_eq!(ranks, [Some((0, 4)), Some((1, 4)), Some((2, 4)), Some((3, 4))]);
    }

    #[test]
    fn ranks_of_an_agent_and_workers_without_a_rank_are_two_jobs() {
        let trained = [at(member(10, 0, &[5, 2]), "h:1"), at(member(11, 1, &[5, 2]), "h:1")];
        // The workers know their numbers from their communicator.
        let workers = [inside(member(20, 0, &[6, 2]), &[(7, 2, 0)]), inside(member(21, 1, &[6, 2]), &[(7, 2, 1)])];
        check(&[trained.clone(), workers.clone()].concat(), &[0, 0, 2, 2]);
        // The second worker has the number of a rank that has not registered.
        check(&[trained[0].clone(), workers[0].clone(), workers[1].clone()], &[0, 1, 1]);
        // The first rank of the agent is there, and the second worker registers before the first.
        check(&[trained[0].clone(), workers[1].clone(), workers[0].clone()], &[0, 1, 1]);
    }

    #[test]
    fn ranks_that_the_ranks_of_another_job_started_never_take_their_place() {
        // Each rank starts a process for evaluations, and these have a communicator of their own.
        let ranks = [inside(member(10, 0, &[5]), &[(7, 2, 0)]), inside(member(11, 1, &[5]), &[(7, 2, 1)])];
        let started = |pid: i32, rank: i32, parent: i32| member(pid, rank, &[parent, 5]);
        let helpers = [started(20, 0, 10), started(21, 1, 11)];
        let all = [&ranks[..], &helpers].concat();
        check(&all, &[0, 0, 0, 0]);
        assert!(partition(&all)[2..].iter().all(|assignment| assignment.helper), "until they have one");
        let evaluate = [inside(helpers[0].clone(), &[(8, 2, 0)]), inside(helpers[1].clone(), &[(8, 2, 1)])];
        check(&[&ranks[..], &evaluate].concat(), &[0, 0, 2, 2]);
    }

    #[test]
    fn trials_of_a_sweep_are_jobs_of_their_own() {
        // One program starts the trials, and each trial spawns its ranks.
        let trial = |pid: i32, rank: i32, trial: i32| member(pid, rank, &[trial, 5, 2]);
        let trials = [trial(10, 0, 6), trial(11, 1, 6), trial(12, 0, 7), trial(13, 1, 7), trial(14, 0, 8)];
        check(&trials, &[0, 0, 2, 2, 4]);
        // They have one parent, and only the communicators tell them apart.
        let spawned = |pid: i32, rank: i32, id: u64| inside(member(pid, rank, &[5, 2]), &[(id, 2, rank)]);
        check(&[spawned(10, 0, 7), spawned(11, 0, 8), spawned(12, 1, 7), spawned(13, 1, 8)], &[0, 1, 0, 1]);
    }

    #[test]
    fn a_rank_0_that_sets_its_rendezvous_at_run_time_and_its_children_are_one_job() {
        // The environment at the start of rank 0 names another rendezvous, from an earlier job of
        // its shell; its children inherit the new one.
        let rank_0 = Member { own_instance: "h:2".into(), ..at(member(10, 0, &[2]), "h:1") };
        let child = Member { own_instance: "h:2".into(), ..at(member(11, 1, &[10, 2]), "h:2") };
        check(&[rank_0.clone(), child.clone()], &[0, 0]);
        check(&[rank_0, child, at(member(20, 0, &[3]), "h:9")], &[0, 0, 2]);
    }
}
