//! Hangs in collectives and point-to-point transfers, and on the device.

use crate::scenario::{Scenario, hybrid};

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
        // Something else than the others.
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
