//! Compares the ranks of this node with each other, and reports to the cluster collector for the
//! comparison of all ranks.

use std::collections::BTreeSet;

use xpu_timer_analysis::stragglers;
use xpu_timer_proto::v1::{Paces, RankPace};

use crate::{
    job::key::{JobKey, job_id},
    node::state::{NodeState, living_ranks},
    os::clock::Now,
};

/// Time between two comparisons.
const COMPARE_NS: u64 = 5_000_000_000;

impl NodeState {
    /// Runs once a second.
    pub(super) fn compare(&mut self, now: Now) {
        if now.mono_ns < self.compared_ns + COMPARE_NS {
            return;
        }
        self.compared_ns = now.mono_ns;
        let jobs: BTreeSet<(JobKey, u32)> =
            living_ranks(&self.registry).map(|rank| (rank.job.clone(), rank.info.attempt)).collect();
        self.slow.retain(|job, attempt| jobs.contains(&(job.clone(), attempt)));
        for (job, attempt) in &jobs {
            let ranks = living_ranks(&self.registry).filter(|rank| rank.job == *job && rank.info.attempt == *attempt);
            let paces = ranks.filter_map(|rank| {
                let number = u32::try_from(rank.info.rank).ok()?;
                Some((number, &self.sampler.of(rank.id)?.recorder.pace))
            });
            let comparison = stragglers::compare(paces);
            self.slow.note(job, *attempt, comparison, |_| self.node.clone(), now);
        }
    }

    /// The progress of the ranks' collectives since the last call; `None` when there was none.
    pub(crate) fn paces(&mut self) -> Option<Paces> {
        let mut ranks = Vec::new();
        for rank in living_ranks(&self.registry) {
            let Ok(number) = u32::try_from(rank.info.rank) else { continue };
            let communicators = self.sampler.news_of(rank.id);
            if !communicators.is_empty() {
                let (job, attempt) = (Some(job_id(&rank.job)), rank.info.attempt);
                ranks.push(RankPace { job, attempt, rank: number, communicators });
            }
        }
        (!ranks.is_empty()).then_some(Paces { ranks })
    }
}
