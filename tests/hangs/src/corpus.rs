//! All scenarios and their true causes.
//!
//! A cause is accepted if a person who knows how the hang was made would call it correct. If two
//! causes fit, the first one is the preferred one.

mod collectives;
mod hosts;
mod independent_programs;

use anyhow::{Result, ensure};

use crate::{
    program::Program,
    scenario::{Scenario, hybrid, job},
    written,
};

/// The scenarios whose name contains `filter`, including those of the programs that write the truth
/// themselves.
///
/// # Errors
/// When there is none, or a program cannot list its scenarios.
pub fn runnable(filter: Option<&str>) -> Result<Vec<Scenario>> {
    chosen([all(), written::scenarios()?].concat(), filter)
}

/// The scenarios with a known truth whose name contains `filter`.
///
/// # Errors
/// When there is none.
pub fn matching(filter: Option<&str>) -> Result<Vec<Scenario>> {
    chosen(all(), filter)
}

fn chosen(all: Vec<Scenario>, filter: Option<&str>) -> Result<Vec<Scenario>> {
    let chosen: Vec<Scenario> =
        all.into_iter().filter(|scenario| filter.is_none_or(|filter| scenario.name.contains(filter))).collect();
    ensure!(!chosen.is_empty(), "no scenario is called {:?}", filter.unwrap_or_default());
    Ok(chosen)
}

fn all() -> Vec<Scenario> {
    [
        collectives::scenarios(),
        hosts::scenarios(),
        independent_programs::scenarios(),
        hosts::without_device(),
        hosts::machine(),
        collectives::mistakes(),
        hosts::endings(),
        independent_programs::threads(),
        hosts::elastic(),
        stragglers(),
        well(),
        independent_programs::blind(),
    ]
    .concat()
}

/// Jobs that do not hang: slow, uneven or idle ones that are well. The timeout of every job here is
/// five seconds, and ten when nothing is launched.
fn well() -> Vec<Scenario> {
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
    let plain = |name: &str, world: u32, arguments: &[&str]| job(name, Program::Script("plain.py"), world, arguments);
    let sharded =
        |name: &str, world: u32, arguments: &[&str]| job(name, Program::Script("sharded.py"), world, arguments);
    let elastic =
        |name: &str, ranks: u32, arguments: &[&str]| job(name, Program::Elastic("elastic.py"), ranks, arguments);
    scenarios.extend([
        plain("well-plain", 4, &["--epochs=12"]),
        plain("well-plain-late", 4, &["--epochs=8", "--start-seconds=3"]),
        plain("well-plain-validates", 3, &["--epochs=3", "--validate-seconds=3"]),
        job("well-pipeline", Program::Script("pipeline.py"), 8, &["--stages=4", "--replicas=2", "--steps=60"]),
        job("well-experts", Program::Script("experts.py"), 8, &["--steps=60"]),
        job("well-native", Program::Native("native.cpp"), 4, &["none", "0", "300", "2"]),
        job("well-gloo", Program::Torch("ddp_gloo.py"), 3, &["--steps=60"]),
        job("well-heat", Program::Mpi("heat.c"), 4, &["none", "0", "300"]),
        job("well-farm", Program::Mpi4py("farm.py"), 3, &["--rounds=200"]),
        sharded("well-sharded", 4, &["--epochs=8"]),
        sharded("well-sharded-imports", 4, &["--epochs=6", "--import-seconds=2"]),
        sharded("well-sharded-saves", 4, &["--epochs=4", "--save-seconds=2"]),
        sharded("well-sharded-exports", 4, &["--epochs=3", "--report-seconds=8"]),
        sharded("well-sharded-paused", 4, &["--epochs=6", "--pause-seconds=9"]),
        sharded("well-sharded-terminated", 4, &["--epochs=100", "--terminate-in=3", "--report-seconds=12"]),
        sharded("well-sharded-near", 4, &["--epochs=2", "--think-ms=3000"]),
        job("well-replay", Program::Native("replay.cpp"), 4, &["none", "0", "300"]),
        job("well-endings", Program::Script("endings.py"), 4, &["--steps=200"]),
        job("well-ring", Program::Mpi("ring.c"), 4, &["none", "0", "300"]),
        job("well-sort", Program::Mpi("sort.c"), 4, &["none", "0", "200"]),
        elastic("well-elastic", 2, &["--steps=120"]),
        elastic("well-elastic-restarts", 3, &["--steps=60", "--plan=fail@1:0,kill@2:1"]),
        // Longer than the timeout, so there is an incident, which says what goes on and is resolved
        // by itself.
        plain("slow-validates", 4, &["--epochs=2", "--validate-seconds=9"])
            .passes(&["long_step", "missing_rank"], &[0]),
        plain("slow-saves", 4, &["--epochs=2", "--save-seconds=9"]).passes(&["long_step"], &[0]),
        plain("slow-compiles", 4, &["--epochs=3", "--compile-seconds=9"]).passes(&["compile"], &[1]),
        plain("slow-starts", 4, &["--epochs=6", "--start-seconds=10"])
            .passes(&["comm_init", "missing_rank", "long_step"], &[3])
            .standing_still(),
        hybrid("slow-evaluates", 1, 1, 4)
            .option("--steps=6")
            .option("--evaluate-seconds=8")
            .passes(&["missing_rank", "long_step"], &[0]),
        sharded("slow-sharded-saves", 4, &["--epochs=2", "--save-seconds=9"])
            // Both samples may show the same line of its loop.
            .passes(&["long_step", "missing_rank"], &[0]),
        sharded("slow-sharded-imports", 2, &["--epochs=3", "--import-seconds=9"])
            .passes(&["comm_init", "missing_rank", "long_step"], &[1])
            .standing_still(),
    ]);
    scenarios
}

/// Jobs that do not hang, and the ranks that slow them down: exactly these are named, and nobody
/// in an even run.
fn stragglers() -> Vec<Scenario> {
    let sharded =
        |name: &str, world: u32, arguments: &[&str]| job(name, Program::Script("sharded.py"), world, arguments);
    vec![
        hybrid("straggler-two-of-8", 1, 1, 8).device("slow:rank=1,ms=4;slow:rank=6,ms=6").slowed_by(&[1, 6]),
        hybrid("straggler-3d", 2, 2, 2).device("slow:rank=5,ms=8").slowed_by(&[5]),
        job("straggler-pipeline", Program::Script("pipeline.py"), 8, &["--stages=2", "--replicas=4"])
            .device("slow:rank=5,ms=10")
            .slowed_by(&[5]),
        sharded("straggler-host", 8, &["--node=4", "--lazy=40@3"]).slowed_by(&[3]),
        sharded("straggler-two-hosts", 8, &["--node=4", "--lazy=40@0", "--lazy=30@6"]).slowed_by(&[0, 6]),
        sharded("straggler-none", 8, &["--node=4", "--think-ms=40"]).slowed_by(&[]),
        sharded("straggler-jitter", 8, &["--node=2", "--think-ms=40", "--jitter=0.6"]).slowed_by(&[]),
    ]
}
