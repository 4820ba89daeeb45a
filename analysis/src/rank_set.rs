//! Sets of ranks as ascending runs.
//!
//! The ranks of a job mostly agree, so a set has few runs, whatever the size of the job. Ranks
//! mostly arrive in ascending order, so adding one is an append. A bitmap would need the world size
//! in memory for every tree node.

use std::{fmt, str::FromStr};

use xpu_timer_proto::v1::RankRun;

/// One run of consecutive ranks, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Run {
    /// Lowest rank of the run.
    pub first: u32,
    /// Highest rank of the run.
    pub last: u32,
}

/// A set of ranks. Its runs are ascending, with a gap of at least one rank between two of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RankSet {
    runs: Vec<Run>,
}

impl RankSet {
    /// The empty set.
    pub const fn new() -> Self {
        RankSet { runs: Vec::new() }
    }

    /// All ranks of a job: `0..world`.
    pub fn world(world: u32) -> Self {
        let mut set = RankSet::new();
        if world > 0 {
            set.insert_run(0, world - 1);
        }
        set
    }

    /// Adds one rank and returns whether it is new. Takes constant time if no rank of the set is
    /// higher.
    pub fn insert(&mut self, rank: u32) -> bool {
        match self.runs.last() {
            Some(run) if rank <= run.last => {
                let new = !self.contains(rank);
                if new {
                    self.insert_run_within(rank, rank);
                }
                new
            }
            _ => {
                self.insert_run(rank, rank);
                true
            }
        }
    }

    /// Adds the ranks `first..=last`. Takes constant time if no rank of the set is higher than
    /// `first`.
    ///
    /// An empty run (`first > last`) adds nothing.
    pub fn insert_run(&mut self, first: u32, last: u32) {
        if first > last {
            return;
        }
        match self.runs.last_mut() {
            Some(run) if first >= run.first => {
                // `run.last` may be `u32::MAX`, so the sum must not wrap.
                if first <= run.last.saturating_add(1) {
                    run.last = run.last.max(last);
                } else {
                    self.runs.push(Run { first, last });
                }
            }
            None => self.runs.push(Run { first, last }),
            Some(_) => self.insert_run_within(first, last),
        }
    }

    /// Inserts a run that begins before the last run of the set.
    fn insert_run_within(&mut self, first: u32, last: u32) {
        // Runs in `from..to` touch the new one and become part of it.
        let from = self.runs.partition_point(|run| run.last.saturating_add(1) < first);
        let to = from + self.runs[from..].partition_point(|run| run.first <= last.saturating_add(1));
        let merged = self.runs[from..to].iter().fold(Run { first, last }, |all, run| Run {
            first: all.first.min(run.first),
            last: all.last.max(run.last),
        });
        self.runs.splice(from..to, [merged]);
    }

    /// Adds all ranks of another set.
    pub fn union_with(&mut self, other: &RankSet) {
        let appends = match (self.runs.last(), other.runs.first()) {
            (Some(last), Some(first)) => first.first >= last.first,
            _ => true,
        };
        // A few runs are inserted one by one. Many are merged in one pass over both sets.
        let few = other.runs.len() * 16 <= self.runs.len();
        if appends || few || other.runs.len() == 1 {
            for run in &other.runs {
                self.insert_run(run.first, run.last);
            }
            return;
        }
        let old = std::mem::take(&mut self.runs);
        self.runs.reserve(old.len().max(other.runs.len()));
        let (mut left, mut right) = (old.iter().peekable(), other.runs.iter().peekable());
        while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
            let next = if a.first <= b.first { left.next() } else { right.next() };
            if let Some(run) = next {
                self.insert_run(run.first, run.last);
            }
        }
        for run in left.chain(right) {
            self.insert_run(run.first, run.last);
        }
    }

    /// The ranks of `0..world` that are not in the set.
    pub fn complement(&self, world: u32) -> RankSet {
        let mut runs = Vec::with_capacity(self.runs.len() + 1);
        let mut next = 0;
        for run in &self.runs {
            if next >= world {
                break;
            }
            if run.first > next {
                runs.push(Run { first: next, last: (run.first - 1).min(world - 1) });
            }
            next = run.last.saturating_add(1);
        }
        if next < world {
            runs.push(Run { first: next, last: world - 1 });
        }
        RankSet { runs }
    }

    /// True if the rank is in the set.
    pub fn contains(&self, rank: u32) -> bool {
        let at = self.runs.partition_point(|run| run.last < rank);
        self.runs.get(at).is_some_and(|run| run.first <= rank)
    }

    /// True if every rank of this set is in the other one.
    pub fn is_subset(&self, other: &RankSet) -> bool {
        self.runs.iter().all(|run| {
            let at = other.runs.partition_point(|o| o.last < run.first);
            other.runs.get(at).is_some_and(|o| o.first <= run.first && run.last <= o.last)
        })
    }

    /// The ranks that are in both sets.
    pub fn intersection(&self, other: &RankSet) -> RankSet {
        let mut runs = Vec::new();
        let (mut left, mut right) = (self.runs.iter().peekable(), other.runs.iter().peekable());
        while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
            let (first, last) = (a.first.max(b.first), a.last.min(b.last));
            if first <= last {
                runs.push(Run { first, last });
            }
            _ = if a.last < b.last { left.next() } else { right.next() };
        }
        RankSet { runs }
    }

    /// Number of ranks.
    pub fn len(&self) -> u64 {
        self.runs.iter().map(|run| u64::from(run.last - run.first) + 1).sum()
    }

    /// True if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The lowest rank.
    pub fn first(&self) -> Option<u32> {
        self.runs.first().map(|run| run.first)
    }

    /// The highest rank.
    pub fn last(&self) -> Option<u32> {
        self.runs.last().map(|run| run.last)
    }

    /// The runs, ascending.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The runs as they are sent, ascending.
    pub fn to_message(&self) -> Vec<RankRun> {
        self.runs.iter().map(|run| RankRun { first: run.first, last: run.last }).collect()
    }

    /// The ranks, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs.iter().flat_map(|run| run.first..=run.last)
    }
}

impl FromIterator<u32> for RankSet {
    fn from_iter<I: IntoIterator<Item = u32>>(ranks: I) -> Self {
        let mut set = RankSet::new();
        set.extend(ranks);
        set
    }
}

impl Extend<u32> for RankSet {
    fn extend<I: IntoIterator<Item = u32>>(&mut self, ranks: I) {
        for rank in ranks {
            self.insert(rank);
        }
    }
}

/// The format of labels: runs as `a-b`, single ranks as `a`, joined by `/`. The empty set gives an
/// empty string.
impl fmt::Display for RankSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, run) in self.runs.iter().enumerate() {
            if i > 0 {
                f.write_str("/")?;
            }
            write!(f, "{}", run.first)?;
            if run.last > run.first {
                write!(f, "-{}", run.last)?;
            }
        }
        Ok(())
    }
}

/// Why a text names no ranks. Each variant has the part that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParseRankSetError {
    /// It is neither a number nor two numbers.
    NotARange(String),
    /// Its second number is lower than its first one.
    Reversed(String),
}

impl fmt::Display for ParseRankSetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ParseRankSetError::NotARange(run) => write!(f, "{run:?} is neither a rank nor a range"),
            ParseRankSetError::Reversed(run) => write!(f, "{run:?} ends before it begins"),
        }
    }
}

impl std::error::Error for ParseRankSetError {}

/// Ranks as people write them (`6`, `0-3,7`) or as labels show them (`0-3/7`).
impl FromStr for RankSet {
    type Err = ParseRankSetError;

    fn from_str(text: &str) -> Result<Self, ParseRankSetError> {
        let mut ranks = RankSet::new();
        for run in text.split([',', '/']).map(str::trim) {
            let (first, last) = run.split_once('-').unwrap_or((run, run));
            let not_a_range = |_| ParseRankSetError::NotARange(run.into());
            let number = |text: &str| text.trim().parse::<u32>().map_err(not_a_range);
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(ParseRankSetError::Reversed(run.into()));
            }
            ranks.insert_run(first, last);
        }
        Ok(ranks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn set(ranks: &[u32]) -> RankSet {
        ranks.iter().copied().collect()
    }

    #[test]
    fn consecutive_ranks_are_shown_as_ranges() {
        assert_eq!(set(&[]).to_string(), "");
        assert_eq!(set(&[0, 1]).to_string(), "0-1");
        assert_eq!(set(&[5, 0, 2, 1]).to_string(), "0-2/5");
        assert_eq!(RankSet::world(8).to_string(), "0-7");
    }

    #[test]
    fn ranges_are_parsed() {
        let parsed = |text: &str| text.parse::<RankSet>();
        assert_eq!(parsed("6").unwrap().to_string(), "6");
        assert_eq!(parsed("7, 0-3").unwrap().to_string(), "0-3/7");
        assert_eq!(parsed("0-3/7").unwrap().to_string(), "0-3/7");
        for bad in ["", "x", "3-", "-3", "3-1", "1,,2", "4294967296"] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_highest_rank_does_not_wrap() {
        let mut ranks = set(&[u32::MAX]);
        ranks.insert(u32::MAX);
        ranks.insert(0);
        ranks.insert(u32::MAX - 1);
        assert_eq!(ranks.to_string(), "0/4294967294-4294967295");
        assert_eq!(ranks.complement(u32::MAX).to_string(), "1-4294967293");
        assert_eq!(RankSet::new().complement(0), RankSet::new());
    }

    #[test]
    fn an_empty_run_adds_nothing() {
        let mut ranks = set(&[3]);
        ranks.insert_run(2, 1);
        assert_eq!(ranks.to_string(), "3");
    }

    fn model() -> impl Strategy<Value = Vec<u32>> {
        // A narrow range makes runs touch. The few high ranks make gaps.
        prop::collection::vec(prop_oneof![4 => 0u32..40, 1 => 90u32..400], 0..60)
    }

    proptest! {
        #[test]
        fn behaves_like_a_set_of_numbers(a in model(), b in model(), world in 0u32..100) {
            let (ma, mb): (BTreeSet<u32>, BTreeSet<u32>) = (a.iter().copied().collect(), b.iter().copied().collect());
            let (sa, sb) = (set(&a), set(&b));
            prop_assert_eq!(sa.iter().collect::<Vec<_>>(), ma.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(sa.len(), ma.len() as u64);
            prop_assert!(sa.runs().windows(2).all(|w| w[0].last + 1 < w[1].first));
            let mut union = sa.clone();
            union.union_with(&sb);
            prop_assert_eq!(union.iter().collect::<BTreeSet<_>>(), ma.union(&mb).copied().collect::<BTreeSet<_>>());
            prop_assert!(union.runs().windows(2).all(|w| w[0].last + 1 < w[1].first));
            prop_assert!(sa.is_subset(&union) && sb.is_subset(&union));
            prop_assert_eq!(sa.is_subset(&sb), ma.is_subset(&mb));
            let both = sa.intersection(&sb);
            prop_assert_eq!(both.iter().collect::<Vec<_>>(), ma.intersection(&mb).copied().collect::<Vec<_>>());
            prop_assert!(both.runs().windows(2).all(|w| w[0].last + 1 < w[1].first));
            prop_assert_eq!(
                sa.complement(world).iter().collect::<Vec<_>>(),
                (0..world).filter(|r| !ma.contains(r)).collect::<Vec<_>>()
            );
            for rank in 0..45 {
                prop_assert_eq!(sa.contains(rank), ma.contains(&rank));
            }
        }
    }
}
