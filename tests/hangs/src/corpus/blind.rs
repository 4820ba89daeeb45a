//! Small jobs that were written, and the truth about them with them, before their author had seen
//! the rules of the judge.

use crate::{
    program::Program,
    scenario::{Scenario, job},
};

/// Functions of `blind.py`: the job, its world, who brings the trouble, and the causes that are
/// right for it.
const JOBS: &[(&str, u32, &[u32], &[&str])] = &[
    ("decoder_keeps_interpreter", 4, &[2], &["gil_deadlock"]),
    ("another_program", 4, &[1], &["missing_rank", "process_dead"]),
    ("main_thread_ends", 4, &[0], &["process_dead"]),
    ("module_in_import", 4, &[3], &["host_lock", "missing_rank"]),
    ("streams_cross", 4, &[1], &["order_mismatch"]),
    ("short_graph", 4, &[2], &["missing_rank", "process_dead"]),
    ("half_leaves", 8, &[3], &["missing_rank"]),
    ("wrong_group", 8, &[5], &["missing_rank", "order_mismatch"]),
    ("exchange_with_hole", 4, &[2], &["p2p_unmatched"]),
    ("unsent_update", 5, &[3], &["p2p_unmatched"]),
    ("first_of_all", 4, &[1], &["size_mismatch"]),
    ("dies_between_groups", 8, &[1], &["process_dead", "comm_init"]),
    ("kernel_and_sleep", 6, &[1, 4], &["missing_rank", "kernel_hang"]),
];

/// The same of `blind_gloo.py`.
const ON_GLOO: &[(&str, u32, &[u32], &[&str])] = &[
    ("group_without_one", 4, &[1], &["comm_init"]),
    ("pair_for_half", 4, &[2], &["missing_rank", "order_mismatch"]),
    ("objects", 4, &[1], &["op_mismatch"]),
    ("lost_of_batch", 4, &[2], &["p2p_unmatched", "missing_rank"]),
    ("from_anybody", 4, &[0], &["p2p_unmatched"]),
    ("collects_garbage", 3, &[1], &["python_gc"]),
    ("keeps_interpreter", 4, &[3], &["gil_deadlock"]),
    ("other_port", 4, &[2], &["comm_init"]),
];

pub fn scenarios() -> Vec<Scenario> {
    let of =
        |prefix: &str, program: Program, (name, world, culprits, causes): &(&str, u32, &[u32], &'static [&str])| {
            let ranks: Vec<String> = culprits.iter().map(u32::to_string).collect();
            job(&format!("{prefix}-{}", name.replace('_', "-")), program, *world, &[name, &ranks.join("+")])
                .is(causes, culprits)
        };
    let device = JOBS.iter().map(|job| of("blind", Program::Script("blind.py"), job));
    let gloo = ON_GLOO.iter().map(|job| of("blind-gloo", Program::Torch("blind_gloo.py"), job));
    device.chain(gloo).collect()
}
