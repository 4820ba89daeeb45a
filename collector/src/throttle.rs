//! Limits the incidents of one job: one that flaps around its timeout would be dumped all day and fill the disk. Pure.

use std::collections::BTreeMap;

/// So many incidents of a job may be opened one after the other …
const BURST: u64 = 4;
/// … and then one in so long.
const REFILL_NS: u64 = 900 * 1_000_000_000;

/// For each job the time at which its whole burst is free again (the generic cell rate algorithm).
#[derive(Debug)]
pub struct Throttle<Job> {
    free_at: BTreeMap<Job, u64>,
}

impl<Job> Default for Throttle<Job> {
    fn default() -> Self {
        Throttle { free_at: BTreeMap::new() }
    }
}

impl<Job: Ord + Clone> Throttle<Job> {
    /// Whether a job may have an incident now.
    #[must_use]
    pub fn would_allow(&self, job: &Job, now_ns: u64) -> bool {
        self.free_at.get(job).is_none_or(|free_at| *free_at <= now_ns + (BURST - 1) * REFILL_NS)
    }

    /// As [`Throttle::would_allow`], and counts the incident if so.
    pub fn allows(&mut self, job: &Job, now_ns: u64) -> bool {
        if !self.would_allow(job, now_ns) {
            return false;
        }
        self.free_at.retain(|_, free_at| *free_at > now_ns);
        let free_at = self.free_at.entry(job.clone()).or_insert(now_ns);
        *free_at = now_ns.max(*free_at) + REFILL_NS;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_one_at_a_time() {
        let mut throttle = Throttle::default();
        let allowed =
            |throttle: &mut Throttle<u8>, job, now_ns| (0..10).filter(|_| throttle.allows(&job, now_ns)).count();
        assert_eq!(allowed(&mut throttle, 1, 5), BURST as usize);
        assert_eq!(allowed(&mut throttle, 2, 5), BURST as usize, "another job has its own");
        assert_eq!(allowed(&mut throttle, 1, REFILL_NS), 0);
        assert_eq!(allowed(&mut throttle, 1, REFILL_NS + 5), 1);
        assert_eq!(allowed(&mut throttle, 1, 3 * REFILL_NS + 5), 2);
        assert_eq!(allowed(&mut throttle, 1, 100 * REFILL_NS), BURST as usize);
        assert_eq!(throttle.free_at.len(), 1, "jobs that are long gone are forgotten");
    }
}
