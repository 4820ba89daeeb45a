//! Measures how long an operation has been pending while the process ran. While the process is
//! stopped or its machine is suspended, nothing can complete, so that time does not count.

/// A turn that takes this much longer than expected was interrupted: the process did not run.
const STOPPED_NS: u64 = 500_000_000;

/// Number of stops that are kept. Older ones count as running time.
const STOPS: usize = 16;

/// Records when the process did not run.
#[derive(Debug, Default)]
pub struct RunningTime {
    // Time of the last mark.
    marked_ns: u64,
    // Begin and end of each stop, oldest first.
    stops: Vec<(u64, u64)>,
    // The newest stop during a driver call.
    in_driver: Option<(u64, u64)>,
}

impl RunningTime {
    /// The watcher has slept for `asked_ns` since the last mark, or has done work that takes no
    /// time.
    pub fn mark(&mut self, now_ns: u64, asked_ns: u64) {
        let Some(stop) = self.stop(now_ns, asked_ns) else { return };
        if self.stops.len() == STOPS {
            self.stops.remove(0);
        }
        self.stops.push(stop);
    }

    /// The watcher has called the driver since the last mark, which may have blocked. Only the
    /// newest such stop counts, so that a driver that is always slow does not hide a hang.
    pub fn mark_driver(&mut self, now_ns: u64) {
        self.in_driver = self.stop(now_ns, 0).or(self.in_driver);
    }

    fn stop(&mut self, now_ns: u64, asked_ns: u64) -> Option<(u64, u64)> {
        let before_ns = std::mem::replace(&mut self.marked_ns, now_ns);
        let meant_ns = before_ns.saturating_add(asked_ns);
        (before_ns > 0 && now_ns > meant_ns.saturating_add(STOPPED_NS)).then_some((meant_ns, now_ns))
    }

    /// Running time between two moments.
    pub fn between(&self, from_ns: u64, to_ns: u64) -> u64 {
        let overlap = |(begin, end): &(u64, u64)| (*end).min(to_ns).saturating_sub((*begin).max(from_ns));
        let stopped: u64 = self.stops.iter().chain(&self.in_driver).map(overlap).sum();
        to_ns.saturating_sub(from_ns).saturating_sub(stopped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn only_running_time_counts() {
        let mut clock = RunningTime::default();
        clock.mark(10 * SECOND, 0);
        clock.mark(10 * SECOND + SECOND / 4, SECOND / 10);
        assert_eq!(clock.between(0, 20 * SECOND), 20 * SECOND, "a late turn is no stop, and neither is the start");
        clock.mark(20 * SECOND, 10 * SECOND);
        clock.mark(50 * SECOND, SECOND);
        assert_eq!(clock.between(10 * SECOND, 60 * SECOND), 50 * SECOND - 29 * SECOND);
        assert_eq!(clock.between(30 * SECOND, 60 * SECOND), 10 * SECOND, "begun in the middle of it");
        assert_eq!(clock.between(55 * SECOND, 60 * SECOND), 5 * SECOND);
        assert_eq!(clock.between(60 * SECOND, 55 * SECOND), 0);
    }

    #[test]
    fn a_slow_driver_does_not_stop_the_running_time() {
        let mut clock = RunningTime::default();
        for turn in 1..=100 {
            clock.mark_driver(turn * SECOND);
        }
        assert_eq!(clock.between(0, 100 * SECOND), 99 * SECOND);
    }

    #[test]
    fn only_the_newest_stops_are_remembered() {
        let mut clock = RunningTime::default();
        for stop in 1..100 {
            clock.mark(10 * stop * SECOND, 10 * SECOND);
            clock.mark((10 * stop + 9) * SECOND, 0);
        }
        assert_eq!(clock.stops.len(), STOPS);
        assert_eq!(clock.between(990 * SECOND, 1000 * SECOND), SECOND);
    }
}
