//! Variants of evidence: ranks with other numbers, and one or two things that are missing or wrong.
//! No variant may turn into an accusation of the wrong process with high confidence.

use std::fmt;

use xpu_timer_analysis::{Confidence, Verdict, judge};
use xpu_timer_proto::v1::{Evidence, RankEvidence};
use xpu_timer_tests::in_parallel;

/// Evidence of a hang whose truth is known. Its dumps are condensed to the facts that the judge
/// reads.
#[derive(Debug, Clone)]
pub struct KnownHang {
    /// Name of the scenario.
    pub name: String,
    /// The input of the judge.
    pub evidence: Evidence,
    /// The culprits.
    pub blame: Blame,
}

/// The culprits of a hang.
#[derive(Debug, Clone)]
pub enum Blame {
    /// These ranks.
    Ranks(Vec<u32>),
    /// The processes with these pids.
    Pids(Vec<u32>),
}

impl Blame {
    /// Whom a verdict names, in ascending order. `order` has the new number of each rank.
    fn named(&self, verdict: &Verdict, order: &[u32]) -> Vec<u32> {
        let original = |rank: &u32| order.iter().position(|new| new == rank).and_then(|old| u32::try_from(old).ok());
        let mut named: Vec<u32> = match self {
            Blame::Ranks(_) => verdict.culprits.iter().filter_map(original).collect(),
            Blame::Pids(_) => {
                verdict.culprit_processes.iter().filter_map(|process| u32::try_from(process.pid).ok()).collect()
            }
        };
        named.sort_unstable();
        named
    }

    fn right(&self) -> &[u32] {
        match self {
            Blame::Ranks(right) | Blame::Pids(right) => right,
        }
    }
}

/// Pseudorandom numbers, equal in every run.
pub struct Numbers(pub u64);

impl Numbers {
    /// A number below `limit`, which is positive.
    pub fn below(&mut self, limit: usize) -> usize {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % limit as u64) as usize
    }

    /// Whether something of probability 1 to `limit` happens.
    fn one_in(&mut self, limit: usize) -> bool {
        self.below(limit) == 0
    }

    /// The numbers below `length` in another order.
    pub fn permutation(&mut self, length: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..length as u32).collect();
        for index in (1..length).rev() {
            order.swap(index, self.below(index + 1));
        }
        order
    }

    fn rank<'e>(&mut self, evidence: &'e mut Evidence) -> Option<&'e mut RankEvidence> {
        let count = evidence.ranks.len();
        (count > 0).then(|| &mut evidence.ranks[self.below(count)])
    }
}

/// Gives the ranks the numbers of `order`, and lets them arrive in another order.
pub fn renumber(evidence: &mut Evidence, order: &[u32], numbers: &mut Numbers) {
    for rank in &mut evidence.ranks {
        rank.rank = order[rank.rank as usize];
        if let Some(info) = rank.flight.as_mut().and_then(|flight| flight.rank.as_mut()) {
            info.rank = rank.rank as i32;
        }
    }
    if let Some(trigger) = evidence.trigger.as_mut().filter(|trigger| trigger.rank >= 0) {
        trigger.rank = order[trigger.rank as usize] as i32;
    }
    let arrival = numbers.permutation(evidence.ranks.len());
    evidence.ranks = arrival.iter().map(|index| evidence.ranks[*index as usize].clone()).collect();
}

/// One way in which evidence is incomplete or wrong.
pub struct Damage {
    /// The missing or wrong part.
    pub name: &'static str,
    /// Does it.
    pub apply: fn(&mut Evidence, &mut Numbers),
}

const fn damage(name: &'static str, apply: fn(&mut Evidence, &mut Numbers)) -> Damage {
    Damage { name, apply }
}

/// All of them. The first two do not change the evidence for a culprit.
pub const DAMAGES: &[Damage] = &[
    damage("no Python stack of any rank", |evidence, _| {
        let hosts = evidence.ranks.iter_mut().filter_map(|rank| rank.host.as_mut());
        hosts.for_each(|host| (host.python, host.python_function) = (None, None));
    }),
    damage("each rank on a node with a clock of its own", other_clocks),
    damage("no second sample of any rank", |evidence, _| evidence.ranks.iter_mut().for_each(one_sample)),
    damage("only the newest operations", |evidence, _| {
        for flight in evidence.ranks.iter_mut().filter_map(|rank| rank.flight.as_mut()) {
            let old = flight.operations.len().saturating_sub(6);
            flight.operations.drain(..old);
            flight.health.get_or_insert_default().dropped += old as u64;
        }
    }),
    damage("no stack of any rank", |evidence, _| evidence.ranks.iter_mut().for_each(|rank| rank.host = None)),
    damage("no record of any rank", |evidence, _| evidence.ranks.iter_mut().for_each(|rank| rank.flight = None)),
    damage("no process besides the ranks", |evidence, _| evidence.processes.clear()),
    damage("some records missing", |evidence, numbers| {
        evidence.ranks.iter_mut().filter(|_| numbers.one_in(4)).for_each(|rank| rank.flight = None);
    }),
    damage("some stacks missing", |evidence, numbers| {
        evidence.ranks.iter_mut().filter(|_| numbers.one_in(4)).for_each(|rank| rank.host = None);
    }),
    damage("some ranks unknown", |evidence, numbers| {
        let lost = numbers.below(evidence.ranks.len().max(1));
        let mut index = 0;
        evidence.ranks.retain(|_| {
            index += 1;
            index - 1 != lost && !numbers.one_in(8)
        });
    }),
    damage("a second sample missing", |evidence, numbers| {
        numbers.rank(evidence).into_iter().for_each(one_sample);
    }),
    damage("a rank read late", |evidence, numbers| {
        let late_ns = (1 + numbers.below(60)) as u64 * 1_000_000_000;
        let flight = numbers.rank(evidence).and_then(|rank| rank.flight.as_mut());
        flight.into_iter().for_each(|flight| flight.read_ns += late_ns);
    }),
    damage("a second sample taken late", |evidence, numbers| {
        // The longer a thread is watched, the more it runs, and the less it uses on average.
        let share = 1.0 / (1 + numbers.below(8)) as f64;
        let host = numbers.rank(evidence).and_then(|rank| rank.host.as_mut());
        if let Some(moved) = host.and_then(|host| host.moved.as_mut()) {
            moved.cpu_share *= share;
            moved.main_ran = true;
        }
    }),
    damage("a counter that lies", lying_counter),
    damage("a process missing", |evidence, numbers| {
        if !evidence.processes.is_empty() {
            evidence.processes.remove(numbers.below(evidence.processes.len()));
        }
    }),
    damage("two ranks with each other's node", |evidence, numbers| {
        let count = evidence.ranks.len().max(1);
        let (one, other) = (numbers.below(count), numbers.below(count));
        let node = |rank: &RankEvidence, number: usize| format!("{}-{}", rank.node, number % 2);
        // Half of the ranks are on either of two nodes.
        (0..evidence.ranks.len()).for_each(|index| set_node(&mut evidence.ranks[index], |rank| node(rank, index)));
        if one < evidence.ranks.len() && other < evidence.ranks.len() {
            let (of_one, of_other) = (evidence.ranks[one].node.clone(), evidence.ranks[other].node.clone());
            set_node(&mut evidence.ranks[one], |_| of_other.clone());
            set_node(&mut evidence.ranks[other], |_| of_one.clone());
        }
    }),
];

fn set_node(rank: &mut RankEvidence, node: impl Fn(&RankEvidence) -> String) {
    rank.node = node(rank);
    if let Some(info) = rank.flight.as_mut().and_then(|flight| flight.rank.as_mut()) {
        info.node.clone_from(&rank.node);
    }
}

/// The changes between the samples are unknown.
fn one_sample(rank: &mut RankEvidence) {
    if let Some(host) = &mut rank.host {
        (host.moved, host.d_sleep, host.gil_holder, host.same_in_both) = (None, None, None, true);
    }
}

/// Every rank is on a different machine, whose clock differs by hours.
fn other_clocks(evidence: &mut Evidence, numbers: &mut Numbers) {
    for rank in &mut evidence.ranks {
        set_node(rank, |rank| format!("node-{}", rank.rank));
        let skew = numbers.below(10_000) as u64 * 1_000_000_000;
        let Some(flight) = &mut rank.flight else { continue };
        flight.read_ns += skew;
        if let Some(health) = flight.health.as_mut().filter(|health| health.heartbeat_ns > 0) {
            health.heartbeat_ns += skew;
        }
        for operation in &mut flight.operations {
            let times = [
                &mut operation.entered_ns,
                &mut operation.returned_ns,
                &mut operation.started_ns,
                &mut operation.completed_ns,
            ];
            times.into_iter().filter(|time| **time > 0).for_each(|time| *time += skew);
        }
    }
}

/// One counter of one communicator of one rank is too low or too high.
fn lying_counter(evidence: &mut Evidence, numbers: &mut Numbers) {
    let Some(flight) = numbers.rank(evidence).and_then(|rank| rank.flight.as_mut()) else { return };
    let count = flight.communicators.len();
    if count == 0 {
        return;
    }
    let communicator = &mut flight.communicators[numbers.below(count)];
    let counter = match numbers.below(3) {
        0 => &mut communicator.launched,
        1 => &mut communicator.started,
        _ => &mut communicator.completed,
    };
    let by = 1 + numbers.below(3) as u64;
    *counter = match numbers.below(8) {
        0 => 0,
        1 => counter.saturating_mul(2) + 1,
        odd if odd % 2 == 1 => counter.saturating_sub(by),
        _ => counter.saturating_add(by),
    };
}

/// A variant of a hang.
struct Variant {
    evidence: Evidence,
    order: Vec<u32>,
    damages: Vec<usize>,
}

impl Variant {
    /// The variant with this number. Every eighth has other rank numbers and nothing else.
    fn of(hang: &KnownHang, number: u64) -> Self {
        let mut numbers = Numbers(number.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let mut evidence = hang.evidence.clone();
        let order = numbers.permutation(evidence.world_size as usize);
        renumber(&mut evidence, &order, &mut numbers);
        let count = match numbers.below(8) {
            0 => 0,
            1 | 2 => 2,
            _ => 1,
        };
        let damages: Vec<usize> = (0..count).map(|_| numbers.below(DAMAGES.len())).collect();
        damages.iter().for_each(|index| (DAMAGES[*index].apply)(&mut evidence, &mut numbers));
        Variant { evidence, order, damages }
    }
}

/// What the judge made of many variants.
#[derive(Debug, Default)]
pub struct Judged {
    /// Number of variants.
    pub all: usize,
    /// Number of verdicts with high confidence.
    pub high: usize,
    /// Number of verdicts with exactly the right culprits.
    pub right: usize,
    /// By damage: variants with only this damage, and how many of them were judged right.
    by_damage: Vec<(usize, usize)>,
    /// What went wrong: the hang, the number of its variant, and the sentence.
    pub wrong: Vec<String>,
}

/// Judges `count` variants of these hangs.
#[must_use]
pub fn judge_many(hangs: &[KnownHang], count: usize, jobs: usize) -> Judged {
    let shares: Vec<(usize, &KnownHang)> = hangs.iter().enumerate().collect();
    let of_each = |(index, hang): &(usize, &KnownHang)| {
        let count = count / hangs.len() + usize::from(*index < count % hangs.len());
        judge_variants(hang, *index, count)
    };
    let mut judged = Judged { by_damage: vec![(0, 0); DAMAGES.len()], ..Judged::default() };
    for one in in_parallel(&shares, jobs, of_each) {
        judged.all += one.all;
        judged.high += one.high;
        judged.right += one.right;
        judged.wrong.extend(one.wrong);
        for (sum, (all, right)) in judged.by_damage.iter_mut().zip(one.by_damage) {
            *sum = (sum.0 + all, sum.1 + right);
        }
    }
    judged
}

fn judge_variants(hang: &KnownHang, index: usize, count: usize) -> Judged {
    let mut judged = Judged { all: count, by_damage: vec![(0, 0); DAMAGES.len()], ..Judged::default() };
    let plain = judge(&hang.evidence);
    let identity: Vec<u32> = (0..hang.evidence.world_size).collect();
    let plain_named = hang.blame.named(&plain, &identity);
    for number in 0..count {
        let variant = Variant::of(hang, (index as u64) << 32 | number as u64);
        let verdict = judge(&variant.evidence);
        let named = hang.blame.named(&verdict, &variant.order);
        let is_right = named == hang.blame.right();
        judged.right += usize::from(is_right);
        if let [only] = variant.damages[..] {
            judged.by_damage[only].0 += 1;
            judged.by_damage[only].1 += usize::from(is_right);
        }
        let names: Vec<&str> = variant.damages.iter().map(|damage| DAMAGES[*damage].name).collect();
        let mut complain = |what: &str| {
            let (name, sentence) = (&hang.name, &verdict.sentence);
            judged.wrong.push(format!("{name}, variant {number} ({}): {what}: {sentence}", names.join(", ")));
        };
        if verdict.confidence == Confidence::High {
            judged.high += 1;
            if named.iter().any(|one| !hang.blame.right().contains(one)) {
                complain("wrong with high confidence");
            }
        }
        let alike = (verdict.cause, verdict.confidence, verdict.kind) == (plain.cause, plain.confidence, plain.kind);
        if names.is_empty() && !(alike && named == plain_named) {
            complain("another verdict with other rank numbers");
        }
    }
    judged
}

impl fmt::Display for Judged {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (damage, (all, right)) in DAMAGES.iter().zip(&self.by_damage) {
            writeln!(formatter, "{right:7} of {all:6} right with {}", damage.name)?;
        }
        for wrong in self.wrong.iter().take(60) {
            writeln!(formatter, "WRONG {wrong}")?;
        }
        write!(
            formatter,
            "{} variants: culprits exactly right in {}, {} with high confidence, {} wrong",
            self.all,
            self.right,
            self.high,
            self.wrong.len()
        )
    }
}
