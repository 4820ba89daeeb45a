//! Hangs with a reason in one process, in its requests to the machine, or in a fault of the
//! machine; ranks that fail by an exception or a signal and do not continue; ranks that an elastic
//! agent starts again.

use crate::{
    program::{Need, Program},
    scenario::{Scenario, hybrid, job},
};

const IO: &[&str] = &["storage_io"];
const LOADER: &[&str] = &["data_loader"];
const LOADER_IO: &[&str] = &["data_loader", "storage_io"];
const DEAD: &[&str] = &["process_dead"];
const STOPPED: &[&str] = &["process_stopped"];
const GIL: &[&str] = &["gil_deadlock"];
const LOCK: &[&str] = &["host_lock"];
/// It is somewhere else in the program: only its absence can be reported.
const ELSEWHERE: &[&str] = &["missing_rank", "long_step"];
const ELSEWHERE_LOCK: &[&str] = &["host_lock", "missing_rank"];
const INIT: &[&str] = &["comm_init", "storage_io", "missing_rank"];

pub fn scenarios() -> Vec<Scenario> {
    vec![
        // A loader or a checkpoint in input and output.
        hybrid("load-fifo-dp2", 1, 1, 2).fault("fifo@1:load").is(LOADER_IO, &[1]),
        hybrid("load-fifo-rank0", 1, 1, 4).fault("fifo@0:load").is(LOADER_IO, &[0]),
        hybrid("load-fifo-3d", 2, 2, 2).fault("fifo@6:load").is(LOADER_IO, &[6]),
        hybrid("load-fifo-two", 1, 1, 8).fault("fifo@2+5:load").is(LOADER_IO, &[2, 5]),
        hybrid("load-fifo-64", 2, 4, 8).fault("fifo@37:load").is(LOADER_IO, &[37]),
        hybrid("load-socket", 1, 1, 4).fault("socket_read@3:load").is(LOADER_IO, &[3]),
        hybrid("load-queue", 1, 1, 4).fault("empty_queue@2:load").is(LOADER, &[2]),
        hybrid("load-worker-killed", 1, 1, 4).fault("worker_killed@1:load").is(LOADER, &[1]),
        hybrid("load-worker-fifo", 2, 1, 2).fault("worker_fifo@2:load").is(LOADER_IO, &[2]),
        hybrid("load-worker-sleeps", 1, 1, 4).fault("worker_sleeps@0:load").is(LOADER, &[0]),
        hybrid("load-worker-lock", 1, 1, 4).fault("worker_lock@3:load").is(LOADER, &[3]),
        hybrid("checkpoint-pipe", 1, 1, 4).fault("pipe_write@0:checkpoint").is(IO, &[0]),
        hybrid("checkpoint-fifo-3d", 2, 2, 2).fault("fifo@3:checkpoint").is(IO, &[3]),
        hybrid("checkpoint-upload", 1, 2, 2)
            .fault("upload@0:checkpoint")
            .is(&["storage_io", "missing_rank", "host_lock"], &[0]),
        hybrid("checkpoint-file-lock", 1, 1, 4).fault("file_lock@2:checkpoint").is(&["storage_io", "host_lock"], &[2]),
        hybrid("stdout-full", 1, 1, 4).fault("stdout_full@1:optimizer").is(IO, &[1]),
        hybrid("pipe-read-pp4", 1, 4, 1).fault("pipe_read@2:backward").is(IO, &[2]),
        hybrid("uninterruptible", 1, 1, 4).fault("uninterruptible@2:checkpoint").is(&["d_state"], &[2]),
        // Locks.
        hybrid("gil-main", 1, 1, 4).fault("gil_main@2:forward").is(GIL, &[2]),
        hybrid("gil-thread", 2, 1, 2).fault("gil_thread@3:backward").is(GIL, &[3]),
        hybrid("gil-rank0", 1, 2, 2).fault("gil_thread@0:optimizer").is(GIL, &[0]),
        hybrid("lock-order", 1, 1, 4).fault("lock_order@1:forward").is(LOCK, &[1]),
        hybrid("lock-order-pp", 1, 4, 1).fault("lock_order@0:forward").is(LOCK, &[0]),
        hybrid("lock-native", 2, 2, 1).fault("native_lock@3:optimizer").is(LOCK, &[3]),
        hybrid("event", 1, 1, 4).fault("event@2:evaluate").is(ELSEWHERE_LOCK, &[2]),
        hybrid("join", 1, 1, 4).fault("join@1:evaluate").is(ELSEWHERE_LOCK, &[1]),
        // Ended or stopped.
        hybrid("killed-rank0", 1, 1, 4).fault("killed@0").is(DEAD, &[0]),
        hybrid("killed-3d", 2, 2, 2).fault("killed@5:backward").is(DEAD, &[5]),
        hybrid("killed-two", 1, 1, 8).fault("killed@1+6").is(DEAD, &[1, 6]),
        hybrid("killed-64", 4, 4, 4).fault("killed@50").is(DEAD, &[50]),
        hybrid("segfault", 1, 2, 2).fault("segfault@3").is(DEAD, &[3]),
        hybrid("left-early", 1, 1, 4).fault("leave@2:load").is(DEAD, &[2]),
        hybrid("left-at-once", 1, 1, 4).fault("leave_at_once@1:optimizer").is(DEAD, &[1]),
        hybrid("stopped-dp2", 1, 1, 2).fault("stopped@0").is(STOPPED, &[0]),
        hybrid("stopped-3d", 2, 2, 2).fault("stopped@7:forward").is(STOPPED, &[7]),
        hybrid("stopped-two", 1, 1, 8).fault("stopped@3+4").is(STOPPED, &[3, 4]),
        hybrid("teardown", 1, 1, 4).fault("error@2:forward").is(&["teardown", "process_dead"], &[2]),
        hybrid("teardown-3d", 2, 2, 2).fault("error@4:backward").is(&["teardown", "process_dead"], &[4]),
        // Busy with something else.
        hybrid("busy", 1, 1, 4).fault("busy@3:evaluate").is(ELSEWHERE, &[3]),
        hybrid("busy-3d", 2, 2, 2).fault("busy@1:forward").is(ELSEWHERE, &[1]),
        hybrid("sleep", 1, 1, 4).fault("sleep@0:evaluate").is(&["missing_rank"], &[0]),
        hybrid("garbage", 1, 1, 4).fault("collect@2:optimizer").is(&["python_gc", "missing_rank", "long_step"], &[2]),
        hybrid("compile", 1, 1, 4).fault("compile_kernels@1:forward").is(&["compile", "missing_rank"], &[1]),
        // Before and after training.
        hybrid("start-fifo", 1, 1, 4).fault("fifo@2:start").is(INIT, &[2]),
        hybrid("start-killed", 1, 1, 4).fault("killed@3:start").is(&["process_dead", "comm_init"], &[3]),
        hybrid("start-sleep-3d", 2, 2, 2).fault("sleep@5:start").is(&["comm_init", "missing_rank"], &[5]),
        hybrid("end-fifo", 1, 1, 4)
            .option("--steps=40")
            .fault("fifo@1:end")
            .reported_if_idle()
            .is(&["storage_io", "teardown"], &[1]),
    ]
}

/// A pending SIGKILL makes the same wait uninterruptible.
const NOT_EVEN_KILLED: &[&str] = &["d_state", "storage_io"];
const COMPILE: &[&str] = &["compile"];
const MISSING: &[&str] = &["missing_rank"];

/// The faults of `machine.py`: the function, where it begins, world, rank, and the right causes.
const TROUBLES: &[(&str, &str, u32, u32, &[&str])] = &[
    ("fuse_read", "load", 4, 1, LOADER_IO),
    ("fuse_stat", "load", 4, 0, LOADER_IO),
    ("fuse_list", "layer", 6, 5, IO),
    ("fuse_write", "save", 4, 3, IO),
    ("fuse_close", "save", 8, 0, IO),
    ("fuse_sync", "save", 4, 2, IO),
    ("fuse_mapped", "layer", 4, 2, &["storage_io", "d_state", "missing_rank"]),
    ("fuse_import", "layer", 4, 1, IO),
    ("fuse_killed", "load", 4, 3, NOT_EVEN_KILLED),
    ("fuse_worker", "load", 4, 2, LOADER_IO),
    ("frozen_with_group", "layer", 8, 6, STOPPED),
    ("in_gdb", "layer", 4, 0, STOPPED),
    ("in_tracer", "load", 6, 2, STOPPED),
    ("in_strace", "load", 4, 3, IO),
    ("builds_extension", "layer", 4, 2, COMPILE),
    ("builds_with_shell", "layer", 4, 0, COMPILE),
    ("builds_in_pool", "layer", 6, 4, &["compile", "host_lock", "missing_rank"]),
    ("long_import", "layer", 4, 3, ELSEWHERE),
    ("import_twice", "layer", 4, 1, ELSEWHERE_LOCK),
    ("full_queue", "save", 4, 2, ELSEWHERE_LOCK),
    ("child_that_does_not_read", "load", 4, 1, &["storage_io", "missing_rank"]),
    ("name_server", "load", 4, 0, MISSING),
    ("handshake", "save", 4, 3, &["missing_rank", "storage_io"]),
];

/// Faults of a rank's machine: file systems that stop answering, freezers, debuggers, compilers,
/// long imports.
pub fn machine() -> Vec<Scenario> {
    TROUBLES
        .iter()
        .map(|(trouble, place, world, rank, causes)| {
            let bug = format!("--bug={trouble}@{rank}");
            let name = format!("sharded-{}", trouble.replace('_', "-"));
            let scenario = job(&name, Program::Script("sharded.py"), *world, &[&bug, &format!("--at={place}")]);
            Scenario { need: need(trouble), ..scenario.is(causes, &[*rank]) }
        })
        .collect()
}

/// The feature that the machine must support for a trouble of `sharded.py`.
fn need(trouble: &str) -> Option<Need> {
    match trouble {
        "frozen_with_group" => Some(Need::Groups),
        "in_gdb" => Some(Need::Tool("gdb")),
        "in_strace" => Some(Need::Tool("strace")),
        _ => trouble.starts_with("fuse_").then_some(Need::Fuse),
    }
}

/// Jobs without a device: PyTorch on gloo, and MPI in C and in Python.
pub fn without_device() -> Vec<Scenario> {
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
        torch("starved_executor", 3, 2).is(ELSEWHERE_LOCK, &[2]),
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

const LEAVING: &[&str] = &["teardown", "process_dead", "host_lock"];
/// The handler of the exception blocks in a write to a pipe that nobody reads.
const OUTPUT: &[&str] = &["storage_io", "teardown"];
/// The thread that is waited for is gone.
const NO_THREAD: &[&str] = &["host_lock", "data_loader", "missing_rank"];

/// Ranks that go wrong by an exception or a signal.
pub fn endings() -> Vec<Scenario> {
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
        ending("killed_by_alarm", 4, 2).is(DEAD, &[2]),
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
