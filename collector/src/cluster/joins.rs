//! Decides which jobs of the nodes are one job of the cluster. Each node separates its own jobs.
//! Two nodes may use one name for two jobs, or two names for one job. Pure.
//!
//! Jobs of two nodes are one if their ranks share a communicator. Otherwise they are one if they
//! have equal keys, unless both have communicators and the same ranks: these are two jobs that gave
//! the nodes nothing to distinguish them by.

use std::collections::{BTreeMap, BTreeSet};

use crate::job::{JobKey, NodeId};

/// A job on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unit {
    /// The node.
    pub node: NodeId,
    /// The node's key of the job.
    pub job: JobKey,
    /// The cluster's current key of the job.
    pub current: JobKey,
    /// Communicators of its ranks with a globally unique identity.
    pub communicators: BTreeSet<u64>,
    /// Its living ranks.
    pub ranks: BTreeSet<u32>,
}

#[derive(Debug, Default)]
struct Group {
    units: BTreeSet<usize>,
    communicators: BTreeSet<u64>,
    ranks: BTreeSet<u32>,
}

impl Group {
    fn take(&mut self, other: Group) {
        self.units.extend(other.units);
        self.communicators.extend(other.communicators);
        self.ranks.extend(other.ranks);
    }

    fn contradicts(&self, other: &Group) -> bool {
        let both_have_communicators = !self.communicators.is_empty() && !other.communicators.is_empty();
        both_have_communicators && !self.ranks.is_disjoint(&other.ranks)
    }
}

/// Assigns the cluster's keys to the jobs of one name, one key per unit. `is_of_node` returns
/// whether a key is meaningful only on its own machine.
#[must_use]
pub(crate) fn keys(units: &[Unit], is_of_node: impl Fn(&JobKey) -> bool) -> Vec<JobKey> {
    let mut groups: Vec<Group> = Vec::new();
    let mut at: BTreeMap<u64, usize> = BTreeMap::new();
    for (index, unit) in units.iter().enumerate() {
        let mut group = Group {
            units: BTreeSet::from([index]),
            communicators: unit.communicators.clone(),
            ranks: unit.ranks.clone(),
        };
        let known: BTreeSet<usize> = unit.communicators.iter().filter_map(|id| at.get(id).copied()).collect();
        known.iter().for_each(|other| group.take(std::mem::take(&mut groups[*other])));
        let place = known.first().copied().unwrap_or(groups.len());
        group.communicators.iter().for_each(|id| _ = at.insert(*id, place));
        match groups.get_mut(place) {
            Some(empty) => *empty = group,
            None => groups.push(group),
        }
    }
    groups.retain(|group| !group.units.is_empty());
    groups.sort_by_key(|group| group.units.first().copied());

    let mut joined: Vec<Group> = Vec::new();
    for group in groups {
        let of = |group: &Group| -> BTreeSet<&JobKey> {
            group.units.iter().map(|unit| &units[*unit].job).filter(|key| !is_of_node(key)).collect()
        };
        let fits = |other: &&mut Group| !of(other).is_disjoint(&of(&group)) && !other.contradicts(&group);
        match joined.iter_mut().find(fits) {
            Some(other) => other.take(group),
            None => joined.push(group),
        }
    }

    let mut keys: Vec<JobKey> = units.iter().map(|unit| unit.current.clone()).collect();
    let mut taken: BTreeSet<JobKey> = BTreeSet::new();
    for group in &joined {
        let theirs = || group.units.iter().map(|unit| &units[*unit]);
        let mut wanted = theirs().map(|unit| &unit.current).chain(theirs().map(|unit| &unit.job));
        let key = wanted.find(|key| !taken.contains(*key)).cloned().or_else(|| {
            let first = theirs().next()?;
            let instance = format!("{} communicator {:x}", first.job.instance, group.communicators.first()?);
            Some(JobKey { name: first.job.name.clone(), instance: instance.trim_start().into() })
        });
        let Some(key) = key else { continue };
        group.units.iter().for_each(|unit| keys[*unit].clone_from(&key));
        taken.insert(key);
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(instance: &str) -> JobKey {
        JobKey { name: "j".into(), instance: instance.into() }
    }

    fn unit(node: NodeId, instance: &str, communicators: &[u64], ranks: &[u32]) -> Unit {
        let (job, current) = (key(instance), key(instance));
        let [communicators, ranks] = [communicators.to_vec(), ranks.iter().map(|rank| u64::from(*rank)).collect()];
        let ranks = ranks.into_iter().map(|rank| rank as u32).collect();
        Unit { node, job, current, communicators: communicators.into_iter().collect(), ranks }
    }

    fn found(units: &[Unit]) -> Vec<String> {
        keys(units, |key| key.instance.starts_with("pid")).into_iter().map(|key| key.instance).collect()
    }

    #[test]
    fn one_job_is_joined_with_or_without_communicators() {
        assert_eq!(found(&[unit(1, "", &[], &[0]), unit(2, "", &[], &[1])]), ["", ""]);
        assert_eq!(found(&[unit(1, "", &[7], &[0]), unit(2, "", &[8], &[1])]), ["", ""]);
        // A node that claims ranks of another node and reports no communicators is still refused.
        assert_eq!(found(&[unit(1, "", &[7], &[0, 1]), unit(2, "", &[], &[1])]), ["", ""]);
        assert_eq!(found(&[unit(1, "h:1", &[], &[0]), unit(2, "h:2", &[], &[1])]), ["h:1", "h:2"]);
        assert_eq!(found(&[unit(1, "h:1", &[7], &[0]), unit(2, "", &[7], &[1])]), ["h:1", "h:1"]);
    }

    #[test]
    fn ranks_of_two_jobs_of_one_name_join_by_communicator() {
        let units = [
            unit(1, "", &[7], &[0, 1]),
            unit(1, "pid 9 on a", &[8], &[0, 1]),
            unit(2, "", &[8], &[2, 3]),
            unit(2, "pid 4 on b", &[7], &[2, 3]),
        ];
        assert_eq!(found(&units), ["", "pid 9 on a", "pid 9 on a", ""]);
        // They stay separate when one of them ends.
        let mut left = units[1..3].to_vec();
        left.iter_mut().for_each(|unit| unit.current = key("pid 9 on a"));
        assert_eq!(found(&left), ["pid 9 on a", "pid 9 on a"]);
    }

    #[test]
    fn communicators_separate_jobs_of_one_name_on_different_nodes() {
        let units =
            [unit(1, "", &[7], &[0]), unit(2, "", &[7], &[1]), unit(3, "", &[8], &[0]), unit(4, "", &[8], &[1])];
        assert_eq!(found(&units), ["", "", "communicator 8", "communicator 8"]);
        // One job that first has smaller communicators, which join nothing.
        let mut chain = units.to_vec();
        chain.push(unit(5, "", &[7, 9], &[2]));
        chain.push(unit(6, "", &[9], &[3]));
        assert_eq!(found(&chain)[4..], ["", ""]);
    }
}
