//! Calls that are not those of the others: sharded training on the simulated device, a parallel
//! sort and a ring on MPI.

use crate::{
    program::Program,
    scenario::{Scenario, job},
};

/// What it does instead has another name, another size, or comes at another time; all of it is
/// true.
const DIFFERS: &[&str] = &["op_mismatch", "size_mismatch", "missing_rank"];
/// It is a step ahead of the others in every communicator, and has not entered what they are in.
const AHEAD: &[&str] = &["missing_rank", "order_mismatch", "op_mismatch"];
const GONE: &[&str] = &["process_dead", "teardown"];

pub fn scenarios() -> Vec<Scenario> {
    let sharded = |bug: &str, world: u32, rank: u32| {
        let argument = format!("--bug={bug}@{rank}");
        job(&format!("sharded-{}", bug.replace('_', "-")), Program::Script("sharded.py"), world, &[&argument])
    };
    let sort = |mistake: &str, world: u32, rank: u32| {
        let rank = rank.to_string();
        job(&format!("sort-{}", mistake.replace('_', "-")), Program::Mpi("sort.c"), world, &[mistake, &rank])
    };
    let ring = |mistake: &str, world: u32, rank: u32| {
        let rank = rank.to_string();
        job(&format!("ring-{}", mistake.replace('_', "-")), Program::Mpi("ring.c"), world, &[mistake, &rank])
    };
    vec![
        sharded("empty_batch", 8, 2).option("--node=4").is(AHEAD, &[2]),
        sharded("one_batch_less", 4, 1).is(AHEAD, &[1]),
        ring("no_start", 4, 2).is(&["p2p_unmatched", "missing_rank"], &[2]),
        ring("no_start_recv", 4, 0).is(&["p2p_unmatched", "missing_rank"], &[0]),
        ring("no_wait", 4, 1).is(&["missing_rank"], &[1]),
        sharded("swapped", 8, 5).option("--node=4").is(&["op_mismatch"], &[5]),
        sharded("groups_swapped", 4, 2).is(&["comm_init", "order_mismatch"], &[2]),
        sharded("only_if_first", 4, 1).is(DIFFERS, &[1]),
        sharded("root", 4, 3).is(&["op_mismatch"], &[3]),
        sharded("half_precision", 8, 7).option("--node=4").is(&["dtype_mismatch"], &[7]),
        sharded("longer_shard", 8, 0).option("--node=4").is(&["size_mismatch"], &[0]),
        sharded("swallowed", 8, 4).option("--node=4").is(&["op_mismatch"], &[4]),
        sharded("extra_gather", 8, 3).option("--node=4").is(DIFFERS, &[3]),
        sharded("never_waited", 6, 4).is(DIFFERS, &[4]),
        sharded("ends", 4, 0).is(GONE, &[0]),
        sharded("ends_at_once", 6, 5).is(GONE, &[5]),
        sort("other_root", 4, 2).is(&["op_mismatch", "missing_rank"], &[2]),
        sort("swapped", 4, 1).is(&["op_mismatch"], &[1]),
        sort("extra_recv", 4, 3).is(&["p2p_unmatched", "missing_rank"], &[3]),
        sort("any_recv", 3, 0).is(&["p2p_unmatched", "missing_rank"], &[0]),
        sort("other_tag", 4, 2).is(&["p2p_unmatched"], &[2]),
        sort("polls", 4, 1).is(&["missing_rank", "p2p_unmatched", "long_step"], &[1]),
        sort("extra_barrier", 4, 0).is(DIFFERS, &[0]),
        sort("other_group", 4, 2).is(&["missing_rank", "order_mismatch"], &[2]),
        sort("dup_alone", 4, 1).is(&["comm_init", "op_mismatch", "missing_rank"], &[1]),
        sort("never_waits", 4, 2).is(&["op_mismatch", "missing_rank"], &[2]),
        sort("skips_round", 3, 1).option("60").is(&["teardown", "missing_rank", "process_dead"], &[1]),
    ]
}
