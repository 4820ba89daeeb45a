//! Jobs that are slow, uneven or idle, but well. The timeout of every job here is five seconds, and ten when nothing is launched.

use crate::scenario::{Scenario, hybrid};

pub fn scenarios() -> Vec<Scenario> {
    let plain =
        [("dp2", 1, 1, 2), ("dp8", 1, 1, 8), ("tp4", 4, 1, 1), ("pp4", 1, 4, 1), ("3d8", 2, 2, 2), ("3d16", 2, 4, 2)];
    let mut scenarios: Vec<Scenario> =
        plain.iter().map(|(name, tp, pp, dp)| hybrid(&format!("well-{name}"), *tp, *pp, *dp).healthy(15)).collect();
    for (name, tp, pp, dp) in plain {
        scenarios.push(hybrid(&format!("well-uneven-{name}"), tp, pp, dp).option("--uneven").healthy(15));
    }
    scenarios.extend([
        hybrid("well-long-steps", 1, 1, 4).option("--step-ms=3000").healthy(20),
        hybrid("well-long-steps-3d", 2, 2, 2).option("--step-ms=1200").option("--uneven").healthy(20),
        hybrid("well-idle-between", 1, 1, 4).option("--long-every=40").option("--long-seconds=8").healthy(30),
        hybrid("well-idle-3d", 2, 2, 2).option("--long-every=30").option("--long-seconds=7").healthy(25),
        hybrid("well-evaluates", 1, 1, 4).option("--evaluate-seconds=2.5").healthy(20),
        hybrid("well-long-kernels", 1, 1, 4).option("--kernel-us=300000").healthy(15),
        hybrid("well-short", 1, 1, 4).option("--steps=20"),
        hybrid("well-very-short", 1, 1, 4).option("--steps=1"),
        hybrid("well-32", 2, 4, 4).healthy(15),
    ]);
    scenarios
}
