//! Jobs without a device: PyTorch on gloo, and MPI in C and in Python.

use crate::{
    program::Program,
    scenario::{Scenario, job},
};

const LOCK: &[&str] = &["host_lock", "missing_rank"];

const MISSING: &[&str] = &["missing_rank"];

pub fn scenarios() -> Vec<Scenario> {
    let torch = |wrong: &str, world: u32, rank: u32| {
        let argument = format!("--wrong={wrong}@{rank}");
        job(&format!("gloo-{}", wrong.replace('_', "-")), Program::Torch("ddp_gloo.py"), world, &[&argument])
    };
    let heat = |fault: &str, world: u32, rank: u32| {
        let rank = rank.to_string();
        job(&format!("heat-{}", fault.replace('_', "-")), Program::Mpi("heat.c"), world, &[fault, &rank])
    };
    let farm = |wrong: &str, world: u32, rank: u32| {
        let argument = format!("--wrong={wrong}@{rank}");
        job(&format!("farm-{}", wrong.replace('_', "-")), Program::Mpi4py("farm.py"), world, &[&argument])
    };
    vec![
        torch("loader", 4, 2).is(&["data_loader", "storage_io"], &[2]),
        torch("no_metric", 4, 3).is(&["op_mismatch", "missing_rank", "size_mismatch"], &[3]),
        torch("short_epoch", 4, 1).is(&["op_mismatch", "missing_rank", "size_mismatch"], &[1]),
        torch("child_with_full_pipe", 3, 0).is(MISSING, &[0]),
        torch("rank0_barrier", 3, 0).is(&["op_mismatch", "missing_rank", "size_mismatch"], &[0]),
        torch("other_dst", 4, 2).is(&["op_mismatch"], &[2]),
        torch("silent_server", 4, 2).is(MISSING, &[2]),
        torch("starved_executor", 3, 2).is(LOCK, &[2]),
        heat("mutex", 4, 1).is(&["host_lock"], &[1]),
        heat("read", 4, 2).is(&["storage_io"], &[2]),
        heat("spin", 3, 1).is(&["missing_rank", "long_step", "p2p_unmatched"], &[1]),
        heat("sleep", 4, 0).is(MISSING, &[0]),
        heat("pause", 4, 3).is(&["process_stopped"], &[3]),
        heat("no_residual", 4, 2).is(&["op_mismatch", "missing_rank"], &[2]),
        heat("late_halo", 4, 1).is(&["p2p_unmatched"], &[1]),
        // It waits in the second one at once, so nobody can know that it would have made the first
        // one later.
        heat("swap_groups", 4, 3).is(&["order_mismatch", "missing_rank"], &[3]),
        heat("probe", 4, 2).is(&["p2p_unmatched", "missing_rank"], &[2]),
        heat("own_message", 4, 1).is(&["p2p_unmatched"], &[1]),
        heat("ends", 4, 3).is(&["teardown"], &[3]),
        heat("no_split", 4, 2).is(&["comm_init"], &[2]),
        farm("no_answer", 4, 2).is(&["p2p_unmatched", "missing_rank"], &[2]),
        farm("no_sum", 4, 1).is(&["p2p_unmatched", "missing_rank"], &[1]),
        // Its interpreter ends in MPI_Finalize.
        farm("quits", 3, 2).is(&["teardown", "process_dead"], &[2]),
        farm("asks_a_person", 4, 0).is(&["storage_io", "missing_rank"], &[0]),
        farm("queue_of_dead_thread", 3, 1).is(&["host_lock", "missing_rank", "data_loader"], &[1]),
        farm("loop_in_c", 3, 2).is(&["missing_rank", "long_step"], &[2]),
    ]
}
