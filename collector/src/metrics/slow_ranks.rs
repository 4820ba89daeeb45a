//! Ranks that slow their job down without a hang: for the log, `/status`, `/slow_ranks` and the
//! metrics.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use tracing::{info, warn};
use xpu_timer_analysis::{
    communicator_name,
    stragglers::{Comparison, SlowRank},
};

use crate::{
    job::JobKey,
    os::clock::{self, Now},
};

/// The last comparison of each job.
#[derive(Debug, Default)]
pub struct SlowRanks {
    jobs: BTreeMap<JobKey, Compared>,
}

#[derive(Debug, Default)]
struct Compared {
    attempt: u32,
    waits: BTreeMap<u32, f64>,
    slow: Vec<Slow>,
}

/// A slow rank with its local details.
#[derive(Debug)]
struct Slow {
    found: SlowRank,
    node: String,
    since_unix_ns: u64,
}

impl SlowRanks {
    /// Stores a comparison and logs new slow ranks.
    pub fn note(
        &mut self,
        job: &JobKey,
        attempt: u32,
        comparison: Comparison,
        node_of: impl Fn(u32) -> String,
        now: Now,
    ) {
        let before = self.jobs.remove(job).filter(|before| before.attempt == attempt).unwrap_or_default();
        let since: BTreeMap<u32, u64> = before.slow.iter().map(|slow| (slow.found.rank, slow.since_unix_ns)).collect();
        let known = |found: SlowRank| Slow {
            node: node_of(found.rank),
            since_unix_ns: since.get(&found.rank).copied().unwrap_or(now.unix_ns),
            found,
        };
        let slow: Vec<Slow> = comparison.slow.into_iter().map(known).collect();
        for new in slow.iter().filter(|slow| !since.contains_key(&slow.found.rank)) {
            warn!("job {job}: rank {} on {} is slow: {}", new.found.rank, new.node, new.found);
        }
        let now_slow: BTreeSet<u32> = slow.iter().map(|slow| slow.found.rank).collect();
        for rank in since.keys().filter(|rank| !now_slow.contains(rank)) {
            info!("job {job}: rank {rank} is no longer slow");
        }
        self.jobs.insert(job.clone(), Compared { attempt, waits: comparison.waits, slow });
    }

    /// Keeps only jobs that are still running in that attempt.
    pub fn retain(&mut self, runs: impl Fn(&JobKey, u32) -> bool) {
        self.jobs.retain(|job, compared| runs(job, compared.attempt));
    }

    /// Fraction of time that a rank waits for others, if it could be compared.
    #[must_use]
    pub fn waits(&self, job: &JobKey, rank: u32) -> Option<f64> {
        self.jobs.get(job)?.waits.get(&rank).copied()
    }

    /// Whether a rank is slow, if it could be compared.
    #[must_use]
    pub fn is_slow(&self, job: &JobKey, rank: u32) -> Option<bool> {
        let compared = self.jobs.get(job).filter(|compared| compared.waits.contains_key(&rank))?;
        Some(compared.slow.iter().any(|slow| slow.found.rank == rank))
    }

    /// Job, rank and node of all slow ranks.
    pub fn iter(&self) -> impl Iterator<Item = (&JobKey, u32, &str)> {
        let of = |(job, compared)| {
            let compared: &Compared = compared;
            compared.slow.iter().map(move |slow| (job, slow.found.rank, slow.node.as_str()))
        };
        self.jobs.iter().flat_map(of)
    }

    /// A JSON list, the slowest rank of each job first.
    #[must_use]
    pub fn json(&self) -> Value {
        let of = |(job, compared): (&JobKey, &Compared)| -> Vec<Value> {
            let entry = |slow: &Slow| {
                json!({
                    "job": job.to_string(),
                    "attempt": compared.attempt,
                    "rank": slow.found.rank,
                    "node": slow.node,
                    "since": clock::rfc3339(slow.since_unix_ns),
                    "waits": rounded(slow.found.waits),
                    "others_wait": rounded(slow.found.others_wait),
                    "late": rounded(slow.found.late),
                    "communicator": communicator_name(slow.found.communicator),
                    "communicator_size": slow.found.size,
                    "peers": slow.found.peers,
                    "sentence": slow.found.to_string(),
                })
            };
            compared.slow.iter().map(entry).collect()
        };
        self.jobs.iter().flat_map(of).collect()
    }
}

/// Further digits are noise in a comparison.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comparison(slow: &[u32]) -> Comparison {
        let found = |rank: &u32| SlowRank {
            rank: *rank,
            waits: 0.01,
            others_wait: 0.333_333,
            communicator: 7,
            size: 4,
            late: 1.0,
            peers: vec![0],
        };
        Comparison { waits: (0..4).map(|rank| (rank, 0.3)).collect(), slow: slow.iter().map(found).collect() }
    }

    #[test]
    fn a_comparison_belongs_to_its_attempt() {
        let job = JobKey { name: "j".into(), instance: String::new() };
        let at = |seconds: u64| Now { mono_ns: 1, unix_ns: seconds * 1_000_000_000 };
        let mut slow = SlowRanks::default();
        slow.note(&job, 0, comparison(&[2]), |rank| format!("n{rank}"), at(10));
        slow.note(&job, 0, comparison(&[1, 2]), |rank| format!("n{rank}"), at(20));
        let json = slow.json();
        assert_eq!((&json[0]["rank"], &json[1]["rank"]), (&json!(1), &json!(2)));
        assert_eq!(
            (&json[0]["since"], &json[1]["since"]),
            (&json!("1970-01-01T00:00:20.000Z"), &json!("1970-01-01T00:00:10.000Z"))
        );
        assert_eq!((&json[0]["node"], &json[0]["others_wait"]), (&json!("n1"), &json!(0.3333)));
        assert_eq!(
            (slow.is_slow(&job, 2), slow.is_slow(&job, 0), slow.is_slow(&job, 9)),
            (Some(true), Some(false), None)
        );
        assert_eq!((slow.waits(&job, 3), slow.waits(&job, 4)), (Some(0.3), None));
        slow.note(&job, 1, comparison(&[2]), |_| String::new(), at(30));
        assert_eq!(slow.json()[0]["since"], "1970-01-01T00:00:30.000Z", "another attempt, another rank");
        slow.retain(|_, attempt| attempt == 0);
        assert_eq!(slow.json(), json!([]));
    }
}
