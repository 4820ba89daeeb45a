//! Jobs whose ranks an elastic agent starts again: the hang comes in a later attempt, and in the
//! first one.

use crate::{
    program::Program,
    scenario::{Scenario, job},
};

pub fn scenarios() -> Vec<Scenario> {
    let elastic = |name: &str, ranks: u32, plan: &str| {
        job(&format!("elastic-{name}"), Program::Elastic("elastic.py"), ranks, &[&format!("--plan={plan}")])
    };
    vec![
        elastic("sleeps-after-restart", 3, "fail@1:0,sleeps_on@2:1").is(&["missing_rank"], &[2]),
        elastic("lock-after-kill", 3, "kill@0:0,starved_executor@1:1").is(&["host_lock", "missing_rank"], &[1]),
        elastic("third-attempt", 2, "fail@1:0,kill@0:1,no_message@1:2").is(&["missing_rank"], &[1]),
        elastic("first-attempt", 3, "child_with_full_pipe@0:0").is(&["missing_rank"], &[0]),
    ]
}
