//! Limits the incidents of one job. Otherwise, a job that flaps around its timeout would be dumped
//! all day and fill the disk. Pure.

use std::collections::BTreeMap;

/// A burst, followed by one incident per interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Number of incidents that may follow each other directly.
    pub burst: u64,
    /// Interval of further incidents in nanoseconds.
    pub refill_ns: u64,
}

/// Rate of incidents of a hanging job.
pub const HANGS: Rate = Rate { burst: 4, refill_ns: 900 * 1_000_000_000 };
/// Rate of dumps of a job by hand.
pub const BY_HAND: Rate = Rate { burst: 10, refill_ns: 30 * 1_000_000_000 };

/// The time at which the full burst of each job is available again (the generic cell rate
/// algorithm).
#[derive(Debug)]
pub struct Throttle<Job> {
    rate: Rate,
    free_at: BTreeMap<Job, u64>,
}

impl<Job: Ord + Clone> Default for Throttle<Job> {
    fn default() -> Self {
        Self::new(HANGS)
    }
}

impl<Job: Ord + Clone> Throttle<Job> {
    /// Starts with a full burst.
    #[must_use]
    pub fn new(rate: Rate) -> Self {
        Throttle { rate, free_at: BTreeMap::new() }
    }

    /// Whether a job may have an incident now.
    #[must_use]
    pub fn would_allow(&self, job: &Job, now_ns: u64) -> bool {
        self.wait_ns(job, now_ns) == 0
    }

    /// Nanoseconds until a job may have its next incident.
    #[must_use]
    pub fn wait_ns(&self, job: &Job, now_ns: u64) -> u64 {
        let allowed_ns = now_ns + (self.rate.burst - 1) * self.rate.refill_ns;
        self.free_at.get(job).map_or(0, |free_at| free_at.saturating_sub(allowed_ns))
    }

    /// As [`Throttle::would_allow`], and counts the incident if it is allowed.
    pub fn allows(&mut self, job: &Job, now_ns: u64) -> bool {
        if !self.would_allow(job, now_ns) {
            return false;
        }
        self.free_at.retain(|_, free_at| *free_at > now_ns);
        let free_at = self.free_at.entry(job.clone()).or_insert(now_ns);
        *free_at = now_ns.max(*free_at) + self.rate.refill_ns;
        true
    }

    /// Takes back one call of [`Throttle::allows`] that returned true.
    pub fn refund(&mut self, job: &Job) {
        if let Some(free_at) = self.free_at.get_mut(job) {
            *free_at = free_at.saturating_sub(self.rate.refill_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_one_at_a_time() {
        let mut throttle = Throttle::new(HANGS);
        let allowed =
            |throttle: &mut Throttle<u8>, job, now_ns| (0..10).filter(|_| throttle.allows(&job, now_ns)).count();
        assert_eq!(allowed(&mut throttle, 1, 5), HANGS.burst as usize);
        assert_eq!(allowed(&mut throttle, 2, 5), HANGS.burst as usize, "another job has its own");
        assert_eq!(allowed(&mut throttle, 1, HANGS.refill_ns), 0);
        assert_eq!(allowed(&mut throttle, 1, HANGS.refill_ns + 5), 1);
        assert_eq!(allowed(&mut throttle, 1, 3 * HANGS.refill_ns + 5), 2);
        assert_eq!(allowed(&mut throttle, 1, 100 * HANGS.refill_ns), HANGS.burst as usize);
        assert_eq!(throttle.wait_ns(&1, 100 * HANGS.refill_ns), HANGS.refill_ns, "until the next one");
        throttle.refund(&1);
        assert_eq!(allowed(&mut throttle, 1, 100 * HANGS.refill_ns), 1);
        assert_eq!(throttle.free_at.len(), 1, "jobs that are long gone are forgotten");
    }
}
