//! Hangs in collectives and point-to-point transfers, and on the device.

use crate::{
    program::Program,
    scenario::{Scenario, hybrid, job},
};

/// At the end of the job the rank that left one out may have ended already.
const MISSING: &[&str] = &["missing_rank", "process_dead"];
const KERNEL: &[&str] = &["kernel_hang"];
const STALL: &[&str] = &["network_stall"];

pub fn scenarios() -> Vec<Scenario> {
    vec![
        // Left out: the hang comes where the counts differ at last.
        hybrid("skip-dp", 1, 1, 4).option("--steps=60").fault("skip@1:dp").is(MISSING, &[1]),
        hybrid("skip-tp-3d", 2, 2, 2)
            .option("--steps=60")
            .fault("skip@6:tp")
            .is(&["missing_rank", "op_mismatch"], &[6]),
        hybrid("skip-rank0", 1, 1, 4).option("--steps=60").fault("skip@0:dp").is(MISSING, &[0]),
        hybrid("skip-norm", 1, 2, 2)
            .option("--steps=60")
            .option("--norm")
            .fault("skip@3:world")
            .is(&["missing_rank", "op_mismatch"], &[3]),
        hybrid("skip-two", 1, 1, 8).option("--steps=60").fault("skip@2+7:dp").is(MISSING, &[2, 7]),
        // A different operation from that of the others.
        hybrid("op-dp", 1, 1, 4).fault("op@2:dp").is(&["op_mismatch"], &[2]),
        hybrid("op-tp", 4, 1, 2).fault("op@5:tp").is(&["op_mismatch"], &[5]),
        hybrid("op-rank0", 1, 1, 4).fault("op@0:dp").is(&["op_mismatch"], &[0]),
        hybrid("size-dp", 1, 1, 4).fault("size@3:dp").is(&["size_mismatch"], &[3]),
        hybrid("size-tp-3d", 4, 2, 1).fault("size@6:tp").is(&["size_mismatch"], &[6]),
        hybrid("dtype-dp", 1, 1, 4).fault("dtype@1:dp").is(&["dtype_mismatch"], &[1]),
        hybrid("order-two-groups", 1, 2, 4).option("--norm").fault("order@5:dp").is(&["order_mismatch"], &[5]),
        // Point to point.
        hybrid("unsent-pp2", 1, 2, 1).fault("unsent@0:pp").is(&["p2p_unmatched"], &[0]),
        hybrid("unsent-pp4-dp2", 1, 4, 2).fault("unsent@5:pp").is(&["p2p_unmatched"], &[5]),
        hybrid("cycle-from-the-start", 1, 2, 1).fault("cycle@0+1:pp:0").is(&["p2p_cycle"], &[0, 1]),
        hybrid("cycle-of-a-sudden", 1, 2, 1).fault("cycle@0:pp").is(&["p2p_cycle", "p2p_unmatched"], &[0]),
        // The device.
        hybrid("kernel-dp", 1, 1, 4).device("stuck_kernel:rank=2,n=60").is(KERNEL, &[2]),
        hybrid("kernel-rank0", 1, 1, 2).device("stuck_kernel:rank=0,n=80").is(KERNEL, &[0]),
        hybrid("kernel-3d", 2, 2, 2).device("stuck_kernel:rank=7,n=60").is(KERNEL, &[7]),
        hybrid("kernel-chain-16", 2, 4, 2).device("stuck_kernel:rank=9,n=60").is(KERNEL, &[9]),
        hybrid("stall-dp", 1, 1, 4).device("stall:bytes=20000").is(STALL, &[]),
        hybrid("stall-dp8", 1, 1, 8).device("stall:bytes=40000").is(STALL, &[]),
        hybrid("init-skip", 1, 1, 4).device("init_skip:rank=2").is(&["comm_init"], &[2]),
        hybrid("init-skip-rank1", 2, 1, 2).device("init_skip:rank=1").is(&["comm_init"], &[1]),
        hybrid("kill-in-collective", 1, 1, 4).device("kill:rank=1,n=20").is(&["process_dead"], &[1]),
        // Far from most victims.
        hybrid("chain-pp8", 1, 8, 1).fault("fifo@0:load").is(&["data_loader", "storage_io"], &[0]),
        hybrid("chain-3d-last-stage", 2, 4, 2).fault("pipe_read@15:forward").is(&["storage_io"], &[15]),
        hybrid("chain-3d-middle", 2, 4, 2).fault("event@5:backward").is(&["host_lock", "missing_rank"], &[5]),
        hybrid("chain-tp8", 8, 1, 2).fault("pipe_read@11:forward").is(&["storage_io"], &[11]),
        hybrid("chain-32", 2, 4, 4).fault("stopped@21:backward").is(&["process_stopped"], &[21]),
    ]
}

/// The rank launches another operation, another size, or launches later: each of these causes is
/// right.
const DIFFERS: &[&str] = &["op_mismatch", "size_mismatch", "missing_rank"];
/// It is a step ahead of the others in every communicator, and has not entered their collective.
const AHEAD: &[&str] = &["missing_rank", "order_mismatch", "op_mismatch"];
const GONE: &[&str] = &["process_dead", "teardown"];

/// Calls that are not those of the others: sharded training on the simulated device, a parallel
/// sort and a ring on MPI.
pub fn mistakes() -> Vec<Scenario> {
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
