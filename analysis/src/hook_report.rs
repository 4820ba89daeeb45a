//! What the hooks report about themselves: their cost for the ranks, and their losses. The judge
//! does not use it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xpu_timer_proto::ring::lane::LONG_NS;

/// What the hooks of all ranks say of themselves.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HookReport {
    /// Ranks whose hook says something.
    pub ranks: u32,
    /// Own time in one launch, in nanoseconds, on average over the measured ones; absent when none
    /// was measured.
    pub launch_ns: Option<f64>,
    /// Own time in one call of the collective library.
    pub collective_ns: Option<f64>,
    /// Launches and calls that were measured.
    pub samples: u64,
    /// Measured calls of more than 20 us, which are in neither average: interruptions, and what is
    /// done once.
    pub long_samples: u64,
    /// Operations that found no free slot in their ring. Should be 0.
    pub dropped: u64,
    /// Panics caught in a hook. Should be 0.
    pub panics: u64,
    /// Entries that did not fit their table. Should be 0.
    pub overflows: u64,
}

impl HookReport {
    /// The report in one line. `None` if no hook reported anything.
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
