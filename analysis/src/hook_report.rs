//! What the hook says of itself: what it cost the ranks, and what it lost. Not used for the verdict.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xpu_timer_proto::ring::lane::LONG_NS;

use crate::world::World;

/// What the hooks of all ranks say of themselves.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HookReport {
    /// Ranks whose hook says something.
    pub ranks: u32,
    /// Own time in one launch, in nanoseconds, on average over the measured ones; absent when none was measured.
    pub launch_ns: Option<f64>,
    /// Own time in one call of the collective library.
    pub collective_ns: Option<f64>,
    /// Launches and calls that were measured.
    pub samples: u64,
    /// Measured calls of more than 20 us, which are in neither average: interruptions, and what is done once.
    pub long_samples: u64,
    /// Operations that found no free slot in their ring. Should be 0.
    pub dropped: u64,
    /// Panics caught in a hook. Should be 0.
    pub panics: u64,
    /// Entries that did not fit their table. Should be 0.
    pub overflows: u64,
}

/// Adds up what the ranks' flight records say.
pub fn of(world: &World<'_>) -> HookReport {
    let mut report = HookReport::default();
    let (mut launches, mut collectives) = ((0, 0), (0, 0));
    for health in world.views.iter().filter_map(|view| view.flight?.health.as_ref()) {
        report.ranks += 1;
        launches = (launches.0 + health.launch_samples, launches.1 + health.launch_cost_ns);
        collectives = (collectives.0 + health.collective_samples, collectives.1 + health.collective_cost_ns);
        report.long_samples += health.long_samples;
        report.dropped += health.dropped;
        report.panics += health.panics;
        report.overflows += health.overflows;
    }
    let mean = |(samples, ns): (u64, u64)| (samples > 0).then(|| (ns as f64 / samples as f64 * 10.0).round() / 10.0);
    report.launch_ns = mean(launches);
    report.collective_ns = mean(collectives);
    report.samples = launches.0 + collectives.0;
    report
}

impl HookReport {
    /// In one line; nothing when no rank says anything.
    #[must_use]
    pub fn line(&self) -> Option<String> {
        if self.ranks == 0 {
            return None;
        }
        let mut parts = Vec::new();
        parts.extend(self.launch_ns.map(|ns| format!("{ns:.0} ns a launch")));
        parts.extend(self.collective_ns.map(|ns| format!("{ns:.0} ns a collective")));
        if self.long_samples > self.samples {
            let (long, all) = (self.long_samples, self.long_samples + self.samples);
            parts.push(format!("more than {} us in {long} of {all} calls", LONG_NS / 1000));
        } else if parts.is_empty() {
            parts.push("its cost was not measured, there were too few calls".to_owned());
        }
        let lost =
            [(self.dropped, "operations dropped"), (self.panics, "panics"), (self.overflows, "table entries lost")];
        let lost: Vec<String> =
            lost.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
        parts.push(if lost.is_empty() { "nothing dropped".to_owned() } else { lost.join(", ") });
        Some(parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_tells_cost_and_losses() {
        assert_eq!(HookReport::default().line(), None);
        let quiet = HookReport { ranks: 4, ..Default::default() };
        assert_eq!(quiet.line().unwrap(), "its cost was not measured, there were too few calls, nothing dropped");
        let slow = HookReport { long_samples: 7, ..quiet.clone() };
        assert_eq!(slow.line().unwrap(), "more than 20 us in 7 of 7 calls, nothing dropped");
        let report = HookReport { launch_ns: Some(18.4), collective_ns: Some(120.0), dropped: 3, panics: 1, ..quiet };
        assert_eq!(report.line().unwrap(), "18 ns a launch, 120 ns a collective, 3 operations dropped, 1 panics");
    }
}
