//! Why a slow rank is slow: which part of its time is longer than that of its peers.
//!
//! All ranks of a job take equally long for a step, because they wait for each other. So the time
//! between two collectives of a communicator is divided into parts on each rank, by its own clock
//! alone, and the parts are compared as shares of that time. Where several things run on a device
//! at once, the time counts for the first of them in the order of [`Part`]. The time in which peers
//! wait for the slow rank counts for none: it is what the slow rank costs.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
};

use serde::Serialize;
use xpu_timer_proto::{
    timeline::Times,
    v1::{Communicator, Op, OpKind, OpStatus, Operation},
};

use crate::text;

/// A part is longer if its share exceeds that of the peers by this much.
const LEAST: f64 = 0.02;
/// Parts that are named.
const MOST_NAMED: usize = 3;
/// Operations of a rank, at most; further ones are not compared.
const MOST_OPERATIONS: usize = 1_000_000;

/// A part of the time of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Matrix products and attention.
    Matmuls,
    /// Other kernels, and graphs.
    Kernels,
    /// Memory copies.
    Copies,
    /// Communication that moves data: all members have started it.
    Transfer,
    /// Communication that another rank has not entered yet.
    Waiting,
    /// Nothing runs on the device.
    HostGap,
}

impl Part {
    const ALL: [Part; 6] = [Part::Matmuls, Part::Kernels, Part::Copies, Part::Transfer, Part::Waiting, Part::HostGap];
}

/// One operation on the device.
#[derive(Debug, Clone, Copy)]
struct Interval {
    from_ns: u64,
    until_ns: u64,
    kind: Kind,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    /// It belongs to this part.
    Is(Part),
    /// Communication, by index of its shape, and its sequence number.
    Communication(u32, u64),
}

/// The fields of communication that its duration depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    communicator: u64,
    op: i32,
    count: u64,
    dtype: i32,
    peer: i32,
}

impl Shape {
    fn is_message(&self) -> bool {
        matches!(Op::try_from(self.op), Ok(Op::Send | Op::Recv))
    }
}

/// The operations of one rank.
#[derive(Debug, Default)]
pub struct RankOperations {
    rank: u32,
    /// Its rank in each communicator.
    communicators: HashMap<u64, i32>,
    intervals: Vec<Interval>,
    shapes: Vec<Shape>,
    shape_numbers: HashMap<Shape, u32>,
    has_kernels: bool,
}

impl RankOperations {
    /// A rank of the job without operations.
    #[must_use]
    pub fn new(rank: u32, communicators: &[Communicator]) -> Self {
        let communicators = communicators.iter().map(|communicator| (communicator.id, communicator.rank)).collect();
        RankOperations { rank, communicators, ..RankOperations::default() }
    }

    /// Adds an operation: its description and its times.
    pub fn add(&mut self, shape: &Operation, times: &Times) {
        let is_completed = times.status == OpStatus::Completed as i32 && times.completed_ns != 0;
        if !is_completed || self.intervals.len() >= MOST_OPERATIONS {
            return;
        }
        let kind = match (shape.kind(), shape.op()) {
            (OpKind::Collective, _) if shape.communicator != 0 => Kind::Communication(self.number(shape), times.seq),
            (OpKind::HostCall | OpKind::Collective, _) => return,
            (_, Op::Matmul | Op::Attention) => Kind::Is(Part::Matmuls),
            (_, Op::Copy) => Kind::Is(Part::Copies),
            _ => Kind::Is(Part::Kernels),
        };
        self.has_kernels |= shape.op() == Op::Kernel && shape.launch.is_some();
        let from_ns = if times.started_ns == 0 { times.entered_ns } else { times.started_ns };
        self.intervals.push(Interval { from_ns, until_ns: times.completed_ns.max(from_ns), kind });
    }

    fn number(&mut self, operation: &Operation) -> u32 {
        let Operation { communicator, op, count, dtype, peer, .. } = *operation;
        let shape = Shape { communicator, op, count, dtype, peer };
        let next = self.shapes.len() as u32;
        let number = *self.shape_numbers.entry(shape).or_insert(next);
        if number == next {
            self.shapes.push(shape);
        }
        number
    }

    /// Its communication: shape, sequence number, and how long it took.
    fn communication(&self) -> impl Iterator<Item = (Shape, u64, &Interval)> {
        self.intervals.iter().filter_map(|interval| match interval.kind {
            Kind::Communication(shape, seq) => Some((self.shapes[shape as usize], seq, interval)),
            Kind::Is(_) => None,
        })
    }

    /// When the collectives of a communicator ended, by sequence number.
    fn ends(&self, communicator: u64) -> BTreeMap<u64, u64> {
        let of = self.communication().filter(|(shape, ..)| shape.communicator == communicator && !shape.is_message());
        of.map(|(_, seq, interval)| (seq, interval.until_ns)).collect()
    }
}

/// Whom a rank waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Awaited {
    /// Rank in the job, if it is known.
    pub rank: Option<u32>,
    /// Rank in the communicator, -1 if it is not known.
    pub member: i32,
    /// The communicator: `0x` and hexadecimal digits.
    pub communicator: String,
}

/// A part that takes a larger share of the time than on the peers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Longer {
    /// The part.
    pub part: Part,
    /// Its share of the time of the slow rank.
    pub share: f64,
    /// The median of its share on the peers.
    pub others_share: f64,
    /// For [`Part::Waiting`]: whom the rank waits for most.
    pub awaited: Option<Awaited>,
    /// For [`Part::HostGap`]: whether all kernels were recorded. If not, the gap contains them.
    pub has_kernels: bool,
}

impl fmt::Display for Longer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| (share * 100.0).round();
        let name = match self.part {
            Part::Matmuls => "matrix products".to_owned(),
            Part::Kernels => "kernels other than matrix products".to_owned(),
            Part::Copies => "memory copies".to_owned(),
            Part::Transfer => "transfer of data between ranks".to_owned(),
            Part::Waiting => match &self.awaited {
                Some(Awaited { rank: Some(rank), communicator, .. }) => {
                    format!("waiting for rank {rank} on communicator {communicator}")
                }
                Some(Awaited { member, communicator, .. }) if *member >= 0 => {
                    format!("waiting for member {member} of communicator {communicator}")
                }
                Some(Awaited { communicator, .. }) => format!("waiting on communicator {communicator}"),
                None => "waiting".to_owned(),
            },
            Part::HostGap if self.has_kernels => "gaps in which the device is idle and the host works".to_owned(),
            Part::HostGap => "time on the host, or in kernels that are not recorded".to_owned(),
        };
        write!(f, "{name}: {} % of its time, {} % on its peers", percent(self.share), percent(self.others_share))
    }
}

/// The parts that take a larger share of the time of a rank than of its peers, the largest
/// difference first. The time is that between the first and the last collective of `communicator`
/// that all of them have. `None` if they have fewer than two in common.
#[must_use]
pub fn longer(slow: &RankOperations, peers: &[&RankOperations], communicator: u64) -> Option<Vec<Longer>> {
    let own = slow.ends(communicator);
    let (mut all, mut ends) = (vec![slow], Vec::new());
    for peer in peers {
        let of_peer = peer.ends(communicator);
        if of_peer.keys().filter(|seq| own.contains_key(seq)).take(2).count() == 2 {
            all.push(peer);
            ends.push(of_peer);
        }
    }
    ends.insert(0, own);
    let common = |seq: &&u64| ends.iter().all(|ends| ends.contains_key(*seq));
    let (first, last) = (ends[0].keys().find(common)?, ends[0].keys().rev().find(common)?);
    if first == last || all.len() == 1 {
        return None;
    }
    let quickest = Quickest::of(&all);
    let divide = |(rank, ends): (&&RankOperations, &BTreeMap<u64, u64>)| {
        divide(rank, (ends[first], ends[last]), slow.rank, &quickest)
    };
    let divided: Vec<Divided> = all.iter().zip(&ends).map(divide).collect();
    let has_kernels = all.iter().any(|rank| rank.has_kernels);
    let longer = Part::ALL.iter().filter_map(|part| {
        let share = |divided: &Divided| divided.share[*part as usize];
        let mut others: Vec<f64> = divided[1..].iter().map(share).collect();
        others.sort_unstable_by(f64::total_cmp);
        let (share, others_share) = (share(&divided[0]), others[(others.len() - 1) / 2]);
        let awaited = divided[0].awaited.clone().filter(|_| *part == Part::Waiting);
        (share - others_share >= LEAST).then_some(Longer { part: *part, share, others_share, awaited, has_kernels })
    });
    let mut longer: Vec<Longer> = longer.collect();
    longer.sort_by(|a, b| (b.share - b.others_share).total_cmp(&(a.share - a.others_share)));
    longer.truncate(MOST_NAMED);
    Some(longer)
}

/// The shortest time that communication took: without waiting, it takes about that long.
struct Quickest<'a> {
    /// Time and member of each collective.
    collectives: HashMap<(u64, u64), (u64, &'a RankOperations)>,
    /// Time of each shape, for messages and for collectives with only one known member.
    shapes: HashMap<Shape, u64>,
    /// Ranks by communicator and rank in it.
    members: HashMap<(u64, i32), u32>,
}

impl<'a> Quickest<'a> {
    fn of(ranks: &[&'a RankOperations]) -> Self {
        let (mut collectives, mut shapes) = (HashMap::new(), HashMap::new());
        let mut members = HashMap::new();
        for rank in ranks {
            let known = rank.communicators.iter().filter(|(_, own)| **own >= 0);
            members.extend(known.map(|(id, own)| ((*id, *own), rank.rank)));
            for (shape, seq, interval) in rank.communication() {
                let ns = interval.until_ns - interval.from_ns;
                let of_shape = shapes.entry(shape).or_insert(ns);
                *of_shape = ns.min(*of_shape);
                if !shape.is_message() {
                    let of_collective = collectives.entry((shape.communicator, seq)).or_insert((ns, *rank));
                    if ns < of_collective.0 {
                        *of_collective = (ns, *rank);
                    }
                }
            }
        }
        Quickest { collectives, shapes, members }
    }

    /// How long an operation of a rank waited, and for whom.
    fn waited(&self, rank: &RankOperations, shape: &Shape, seq: u64, ns: u64) -> (u64, Option<u32>) {
        let of_shape = self.shapes.get(shape).copied().unwrap_or(ns);
        match self.collectives.get(&(shape.communicator, seq)).filter(|_| !shape.is_message()) {
            Some((quickest, last)) if last.rank != rank.rank => (ns - quickest, Some(last.rank)),
            // It was the last of the members that are known, but others may have been later.
            _ => (ns - of_shape.min(ns), self.members.get(&(shape.communicator, shape.peer)).copied()),
        }
    }
}

/// The time of a rank.
struct Divided {
    /// By [`Part`].
    share: [f64; Part::ALL.len()],
    /// Whom it waits for most.
    awaited: Option<Awaited>,
}

/// Divides the time of a rank between two moments.
fn divide(rank: &RankOperations, (from_ns, until_ns): (u64, u64), slow: u32, quickest: &Quickest<'_>) -> Divided {
    let mut of_parts: [Vec<(u64, u64)>; Part::ALL.len()] = Default::default();
    let mut for_slow = Vec::new();
    let mut waits: BTreeMap<(u64, i32, Option<u32>), u64> = BTreeMap::new();
    for interval in &rank.intervals {
        let (from, until) = (interval.from_ns.max(from_ns), interval.until_ns.min(until_ns));
        if from >= until {
            continue;
        }
        match interval.kind {
            Kind::Is(part) => of_parts[part as usize].push((from, until)),
            Kind::Communication(shape, seq) => {
                let shape = &rank.shapes[shape as usize];
                let (waited, whom) = quickest.waited(rank, shape, seq, interval.until_ns - interval.from_ns);
                let split = (interval.from_ns + waited).clamp(from, until);
                of_parts[Part::Transfer as usize].push((split, until));
                if whom == Some(slow) {
                    for_slow.push((from, split));
                } else {
                    of_parts[Part::Waiting as usize].push((from, split));
                    *waits.entry((shape.communicator, shape.peer, whom)).or_default() += split - from;
                }
            }
        }
    }
    let span = until_ns.saturating_sub(from_ns).max(1) as f64;
    let mut share = [0.0; Part::ALL.len()];
    let (mut covered, mut before) = (Vec::new(), 0);
    for part in Part::ALL {
        covered.append(&mut of_parts[part as usize]);
        let mut length = unite(&mut covered);
        if part == Part::HostGap {
            covered.append(&mut for_slow);
            before = unite(&mut covered);
            length = until_ns.saturating_sub(from_ns).max(before);
        }
        share[part as usize] = (length - before) as f64 / span;
        before = length;
    }
    let most = waits.into_iter().max_by_key(|(_, ns)| *ns).filter(|(_, ns)| *ns > 0);
    let awaited = most.map(|((communicator, member, rank), _)| Awaited {
        rank,
        member,
        communicator: text::communicator(communicator),
    });
    Divided { share, awaited }
}

/// Makes intervals ascending and disjoint, and returns their length.
fn unite(intervals: &mut Vec<(u64, u64)>) -> u64 {
    intervals.sort_unstable();
    intervals.dedup_by(|next, before| {
        let joins = next.0 <= before.1;
        if joins {
            before.1 = before.1.max(next.1);
        }
        joins
    });
    intervals.iter().map(|(from, until)| until - from).sum()
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::timeline;

    use super::*;

    const MS: u64 = 1_000_000;
    const WORLD: u64 = 0x77;
    const PAIR: u64 = 0x99;

    /// What a rank does in a step, in milliseconds.
    #[derive(Clone, Copy)]
    struct Step {
        matmuls: u64,
        kernels: u64,
        copies: u64,
        /// A message from its partner. Each eighth one is there already, and takes 2 ms.
        message: u64,
        host: u64,
        /// An all-reduce in a communicator of its own node.
        transfer: u64,
    }

    const USUAL: Step = Step { matmuls: 20, kernels: 10, copies: 5, message: 2, host: 10, transfer: 3 };

    impl Step {
        fn length(self) -> u64 {
            self.matmuls + self.kernels + self.copies + self.message + self.host + self.transfer
        }
    }

    /// Adds an operation that begins at `now_ns` and takes `ms`, and returns its end.
    fn add(rank: &mut RankOperations, op: Op, communicator: u64, seq: u64, (now_ns, ms): (u64, u64)) -> u64 {
        let (started_ns, completed_ns) = (now_ns, now_ns + ms * MS);
        let shape = Operation {
            kind: if communicator == 0 { OpKind::Kernel } else { OpKind::Collective }.into(),
            op: op.into(),
            communicator,
            peer: if op == Op::Recv { (rank.rank as i32 + 1) % 2 } else { -1 },
            // For a collective, it has the channels.
            launch: matches!(op, Op::Kernel | Op::AllReduce).then(Default::default),
            started_ns,
            completed_ns,
            seq,
            status: OpStatus::Completed.into(),
            ..Default::default()
        };
        let mut block = timeline::BlockBuilder::default();
        block.push(&shape);
        let block = block.finish();
        timeline::times(&block).unwrap().for_each(|times| rank.add(&block.shapes[0], &times));
        completed_ns
    }

    /// The operations of eight ranks, whose clocks differ. All wait for the slowest in the
    /// all-reduce at the end of a step, which takes 2 ms.
    fn run(of: impl Fn(u32) -> Step) -> Vec<RankOperations> {
        let slowest = (0..8).map(|rank| of(rank).length()).max().unwrap_or(0);
        let ranks = (0..8).map(|rank| {
            let communicator = |id: u64, rank: u32| Communicator { id, rank: rank as i32, ..Default::default() };
            let (pair, node) = (PAIR + u64::from(rank / 2), 0x1000 + u64::from(rank));
            let communicators = [communicator(WORLD, rank), communicator(pair, rank % 2)];
            let mut operations = RankOperations::new(rank, &communicators);
            let mut now = u64::from(rank) * 77_000_000_000 + 1;
            for seq in 1..=40 {
                let step = if seq % 8 == 1 { Step { message: 2, ..of(rank) } } else { of(rank) };
                let end = now + slowest * MS;
                for (op, communicator, ms) in [
                    (Op::Matmul, 0, step.matmuls),
                    (Op::Kernel, 0, step.kernels),
                    (Op::Copy, 0, step.copies),
                    (Op::Recv, pair, step.message),
                    (Op::AllReduce, node, step.transfer),
                ] {
                    now = add(&mut operations, op, communicator, seq, (now, ms));
                }
                now += step.host * MS;
                now = add(&mut operations, Op::AllReduce, WORLD, seq, (now, (end - now) / MS + 2));
            }
            operations
        });
        ranks.collect()
    }

    /// What is longer on rank 5 if its steps are as given.
    fn found(step: Step) -> Vec<Longer> {
        let mut ranks = run(|rank| if rank == 5 { step } else { USUAL });
        let slow = ranks.remove(5);
        longer(&slow, &ranks.iter().collect::<Vec<_>>(), WORLD).unwrap()
    }

    #[test]
    fn only_kernels_themselves_show_that_kernels_are_recorded() {
        let mut rank = RankOperations::new(0, &[]);
        let end = add(&mut rank, Op::AllReduce, WORLD, 1, (1, 2));
        assert!(!rank.has_kernels);
        add(&mut rank, Op::Kernel, 0, 0, (end, 1));
        assert!(rank.has_kernels);
    }

    #[test]
    fn each_part_in_turn_is_named() {
        let cases = [
            (Step { matmuls: 50, ..USUAL }, Part::Matmuls),
            (Step { kernels: 40, ..USUAL }, Part::Kernels),
            (Step { copies: 35, ..USUAL }, Part::Copies),
            (Step { transfer: 33, ..USUAL }, Part::Transfer),
            (Step { message: 32, ..USUAL }, Part::Waiting),
            (Step { host: 40, ..USUAL }, Part::HostGap),
        ];
        for (step, part) in cases {
            let found = found(step);
            assert_eq!(found.iter().map(|longer| longer.part).collect::<Vec<_>>(), [part], "{found:?}");
            assert!((0.2..0.5).contains(&(found[0].share - found[0].others_share)), "{found:?}");
        }
        assert_eq!(found(USUAL), []);
    }

    #[test]
    fn the_text_names_the_shares_and_whom_the_rank_waits_for() {
        let waits = found(Step { message: 32, ..USUAL });
        // Rank 5 is member 1 of its pair, and waits for member 0, which is rank 4.
        let awaited = waits[0].awaited.clone().unwrap();
        assert_eq!((awaited.rank, awaited.member), (Some(4), 0));
        let text = waits[0].to_string();
        assert!(text.starts_with("waiting for rank 4 on communicator 0x9b: 3"), "{text}");
        let text = found(Step { matmuls: 50, ..USUAL })[0].to_string();
        assert_eq!(text, "matrix products: 61 % of its time, 24 % on its peers");
        let gap = found(Step { host: 40, ..USUAL });
        assert!(gap[0].to_string().starts_with("gaps in which the device is idle and the host works: "), "{gap:?}");
    }

    #[test]
    fn several_parts_are_ordered_and_ranks_without_common_collectives_are_not_compared() {
        let both = found(Step { matmuls: 30, host: 40, ..USUAL });
        assert_eq!(both.iter().map(|longer| longer.part).collect::<Vec<_>>(), [Part::HostGap, Part::Matmuls]);
        let mut ranks = run(|_| USUAL);
        let slow = ranks.remove(5);
        assert_eq!(longer(&slow, &ranks.iter().collect::<Vec<_>>(), 0x5), None);
        assert_eq!(longer(&slow, &[], WORLD), None);
        let silent = RankOperations::new(9, &[]);
        assert_eq!(longer(&slow, &[&ranks[0], &silent], WORLD), Some(Vec::new()), "a peer without operations");
    }

    #[test]
    fn overlapping_intervals_are_counted_once() {
        let mut intervals = vec![(10, 20), (0, 5), (15, 30), (5, 6), (40, 41)];
        assert_eq!(unite(&mut intervals), 6 + 20 + 1);
        assert_eq!(intervals, [(0, 6), (10, 30), (40, 41)]);
    }
}
