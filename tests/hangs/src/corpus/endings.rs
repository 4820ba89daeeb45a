//! Ranks that go wrong by an exception or a signal, and what they do instead of going on; ranks
//! that an elastic agent starts again.

use crate::{
    program::Program,
    scenario::{Scenario, job},
};

const GONE: &[&str] = &["process_dead"];
const LEAVING: &[&str] = &["teardown", "process_dead", "host_lock"];
/// The handler of the exception blocks in a write to a pipe that nobody reads.
const OUTPUT: &[&str] = &["storage_io", "teardown"];
const MISSING: &[&str] = &["missing_rank"];
/// The thread that is waited for is gone.
const NO_THREAD: &[&str] = &["host_lock", "data_loader", "missing_rank"];

pub fn scenarios() -> Vec<Scenario> {
    let ending = |name: &str, world: u32, rank: u32| {
        let argument = format!("--end={name}@{rank}");
        job(&format!("ending-{}", name.replace('_', "-")), Program::Script("endings.py"), world, &[&argument])
    };
    vec![
        ending("in_except", 4, 2).is(MISSING, &[2]),
        ending("in_finally", 4, 0).is(OUTPUT, &[0]),
        ending("in_destructor", 3, 1).is(LEAVING, &[1]),
        ending("in_exit_handler", 4, 3).is(LEAVING, &[3]),
        ending("exit_and_thread", 4, 1).is(LEAVING, &[1]),
        ending("exit_and_pool", 4, 2).is(LEAVING, &[2]),
        ending("exit_and_child", 3, 0).is(LEAVING, &[0]),
        ending("post_mortem", 4, 3).is(&["storage_io", "missing_rank"], &[3]),
        ending("tries_again", 4, 0).is(MISSING, &[0]),
        ending("thread_failed", 4, 1).is(NO_THREAD, &[1]),
        ending("thread_left", 3, 2).is(NO_THREAD, &[2]),
        ending("killed_by_alarm", 4, 2).is(GONE, &[2]),
        ending("interrupted", 4, 1).is(OUTPUT, &[1]),
        ending("raises", 4, 0).is(LEAVING, &[0]),
        ending("aborts_group", 4, 3).is(&["missing_rank", "teardown"], &[3]),
        ending("skips_to_end", 4, 2).is(&["op_mismatch", "missing_rank"], &[2]),
    ]
}

/// Jobs whose ranks an elastic agent starts again: the hang comes in a later attempt, and in the
/// first one.
pub fn elastic() -> Vec<Scenario> {
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
