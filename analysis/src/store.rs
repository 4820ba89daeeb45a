//! The keys that ranks wait for in PyTorch's store, by their flight records.

use std::collections::{BTreeMap, BTreeSet};

use xpu_timer_proto::v1::{OpKind, Operation};

use crate::{case::Case, verdict::Activity, world::RankView};

/// Maximum number of keys that are compared.
const MOST_KEYS: usize = 256;

/// Words after which a number in a key is a rank.
const RANK_WORDS: [&str; 6] = ["rank", "worker", "from", "peer", "member", "process"];

/// Ranks that wait for the same keys.
pub(crate) struct KeyWait<'a> {
    /// Their rank indices, ascending.
    pub waiters: Vec<usize>,
    /// The call of one of them.
    pub operation: &'a Operation,
}

/// A key that no rank has set, as far as the records show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MissingKey {
    pub key: String,
    /// The index of the rank that the key names.
    pub owner: Option<usize>,
}

/// Ranks that wait for a key with another number than most.
pub(crate) struct OtherNumber {
    pub few: Vec<usize>,
    pub most: Vec<usize>,
}

/// The call in which a rank waits for keys.
pub(crate) fn key_wait<'a>(view: &RankView<'a>) -> Option<&'a Operation> {
    let waits = |operation: &&Operation| operation.kind() == OpKind::HostCall && !operation.store_keys.is_empty();
    view.pending().filter(|_| !view.dead()).find(waits)
}

impl<'a> Case<'a> {
    /// All waits for keys, by their keys.
    pub(crate) fn key_waits(&self) -> Vec<KeyWait<'a>> {
        let mut waits: BTreeMap<&[String], KeyWait<'a>> = BTreeMap::new();
        for (rank_index, view) in self.world.views.iter().enumerate() {
            if let Some(operation) = key_wait(view) {
                let new = || KeyWait { waiters: Vec::new(), operation };
                waits.entry(&operation.store_keys).or_insert_with(new).waiters.push(rank_index);
            }
        }
        waits.into_values().collect()
    }

    /// The keys that these ranks wait for, without those that name a rank that waits itself: it has
    /// set its own key before. All keys if nothing else remains.
    pub(crate) fn missing_keys(&self, of: &[usize]) -> Vec<MissingKey> {
        let mut waits = self.key_waits();
        let waiters: BTreeSet<usize> = waits.iter().flat_map(|wait| wait.waiters.iter().copied()).collect();
        waits.retain(|wait| wait.waiters.iter().any(|waiter| of.contains(waiter)));
        let keys: BTreeSet<&str> = waits
            .iter()
            .flat_map(|wait| wait.operation.store_keys.iter().map(String::as_str))
            .take(MOST_KEYS)
            .collect();
        let index_of = |rank: u64| self.world.views.iter().position(|view| u64::from(view.rank) == rank);
        let missing =
            |key: &&str| MissingKey { key: (*key).to_owned(), owner: named_rank(key, &keys).and_then(index_of) };
        let all: Vec<MissingKey> = keys.iter().map(missing).collect();
        let is_open = |missing: &&MissingKey| missing.owner.is_none_or(|owner| !waiters.contains(&owner));
        let open: Vec<MissingKey> = all.iter().filter(is_open).cloned().collect();
        if open.is_empty() { all } else { open }
    }

    /// The ranks that have to set the keys for which these ranks wait, if all keys name a rank.
    pub(crate) fn key_owners(&self, of: &[usize]) -> Vec<usize> {
        let owners: Option<BTreeSet<usize>> = self.missing_keys(of).iter().map(|missing| missing.owner).collect();
        owners.unwrap_or_default().into_iter().collect()
    }

    /// The few ranks that wait for a key that differs from the key of most ranks in one number,
    /// such as the count of a barrier.
    pub(crate) fn other_number(&self) -> Option<OtherNumber> {
        let waits = self.key_waits();
        let all: usize = waits.iter().map(|wait| wait.waiters.len()).sum();
        let (most, others): (Vec<&KeyWait>, Vec<&KeyWait>) =
            waits.iter().partition(|wait| 2 * wait.waiters.len() > all);
        let [most] = most[..] else { return None };
        let differs = |wait: &&KeyWait<'_>| {
            let [one] = &wait.operation.store_keys[..] else { return false };
            let [other] = &most.operation.store_keys[..] else { return false };
            differing_number(one, other).is_some()
        };
        if others.is_empty() || !others.iter().all(differs) {
            return None;
        }
        let mut few: Vec<usize> = others.iter().flat_map(|wait| wait.waiters.iter().copied()).collect();
        few.sort_unstable();
        Some(OtherNumber { few, most: most.waiters.clone() })
    }

    /// Whether a rank waits in the store for something other than the creation of a communicator:
    /// it has communicators, and no Python frame creates one.
    pub(crate) fn uses_store(&self, rank_index: usize) -> bool {
        let view = self.view(rank_index);
        self.does(rank_index, Activity::CommInit)
            && view.host.observed.witness.contains("Store::")
            && view.flight.is_some_and(|flight| !flight.communicators.is_empty())
    }
}

/// The parts of a key: the text before each number, and the number. The last text has none.
fn parts(key: &str) -> Vec<(&str, Option<u64>)> {
    let mut parts = Vec::new();
    let mut rest = key;
    while let Some(start) = rest.find(|letter: char| letter.is_ascii_digit()) {
        let digits = rest[start..].find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len() - start);
        parts.push((&rest[..start], rest[start..start + digits].parse().ok()));
        rest = &rest[start + digits..];
    }
    parts.push((rest, None));
    parts
}

/// The place of the only number in which two keys differ, among their parts.
fn differing_number(one: &str, other: &str) -> Option<usize> {
    let (one, other) = (parts(one), parts(other));
    if one.len() != other.len() || one.iter().zip(&other).any(|(one, other)| one.0 != other.0) {
        return None;
    }
    let mut differing = (0..one.len()).filter(|place| one[*place].1 != other[*place].1);
    differing.next().filter(|_| differing.next().is_none())
}

/// The rank that a key names: the number after a word for a rank, or the only number in which it
/// differs from other keys of the same wait.
fn named_rank(key: &str, all: &BTreeSet<&str>) -> Option<u64> {
    let own = parts(key);
    let after_word = |(text, _): &&(&str, Option<u64>)| {
        let text = text.trim_end_matches(|letter: char| !letter.is_alphanumeric()).to_ascii_lowercase();
        RANK_WORDS.iter().any(|word| text.ends_with(word))
    };
    if let Some((_, number)) = own.iter().find(after_word) {
        return *number;
    }
    let mut places = all.iter().filter_map(|other| differing_number(key, other));
    let place = places.next()?;
    if places.all(|other| other == place) { own[place].1 } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_a_rank_by_a_word_or_beside_its_siblings() {
        let named = |key: &str, others: &[&str]| named_rank(key, &others.iter().copied().chain([key]).collect());
        for key in ["from 2", "default_pg/0//rank_2", "ready/Rank2", "worker:2/up", "rank/2"] {
            assert_eq!(named(key, &[]), Some(2), "{key}");
        }
        assert_eq!(named("done.1", &["done.0", "done.2"]), Some(1));
        assert_eq!(named("step/7/done.1", &["step/7/done.0"]), Some(1));
        // A counter, or two numbers that differ.
        for (key, others) in [
            ("barrier/17", &[][..]),
            ("store_based_barrier_key:0:last_worker", &[]),
            ("a/1/2", &["a/1/3", "a/2/2"]),
            ("a/1", &["b/2"]),
            ("shards", &["dataset"]),
        ] {
            assert_eq!(named(key, others), None, "{key}");
        }
    }
}
