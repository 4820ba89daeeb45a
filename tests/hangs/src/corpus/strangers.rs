//! Programs that are unrelated to `hybrid.py`: a first script, a pipeline schedule, C++ without
//! Python.

use crate::{
    program::{Need, Program},
    scenario::{Scenario, hybrid, job},
};

const PLAIN: Program = Program::Script("plain.py");
const PIPELINE: Program = Program::Script("pipeline.py");
const DEAD: &[&str] = &["process_dead", "teardown"];
const LOCK: &[&str] = &["host_lock", "missing_rank"];
const IO: &[&str] = &["storage_io"];
/// It is at a place that no cause covers: the verdict can only report that it is missing, and
/// where.
const MISSING: &[&str] = &["missing_rank"];
const BUSY: &[&str] = &["missing_rank", "long_step"];

/// The troubles that `troubles.py` can cause in a program, and their accepted causes.
const TROUBLES: &[(&str, &[&str])] = &[
    ("asks_a_person", IO_OR_MISSING),
    ("breakpoint_left", IO_OR_MISSING),
    ("waits_for_signal", MISSING),
    ("sleeps_on", MISSING),
    ("polls_for_file", BUSY),
    ("silent_server", MISSING),
    ("full_server", MISSING),
    ("no_message", MISSING),
    ("child_with_full_pipe", MISSING),
    ("endless_child", MISSING),
    ("shell_command", MISSING),
    ("queue_of_dead_thread", &["host_lock", "missing_rank", "data_loader"]),
    ("pool_of_killed_worker", LOCK),
    ("starved_executor", LOCK),
    ("forked_with_lock", LOCK),
    ("log_lock", &["host_lock", "storage_io"]),
    ("async_save", &["host_lock", "storage_io"]),
    ("region_lock", &["storage_io", "host_lock"]),
    ("database_lock", &["missing_rank", "host_lock", "storage_io"]),
    ("barrier_of_threads", LOCK),
    ("semaphore", LOCK),
    ("manager", MISSING),
    ("event_loop", MISSING),
    ("backtracking", BUSY),
    ("loop_in_c", BUSY),
    ("loop_over_lines", BUSY),
    ("spins_on_flag", BUSY),
    ("recursion", BUSY),
    ("finalizer", MISSING),
    // On a busy machine its time is up only after the timeout.
    ("out_of_time", &["process_dead", "missing_rank"]),
    ("out_of_memory", DEAD),
    ("aborts", DEAD),
    ("frozen", &["process_stopped", "d_state"]),
    ("queue_of_killed_worker", &["data_loader"]),
    ("pipe_of_dead_child", MISSING),
    ("barrier_of_processes", LOCK),
];
const IO_OR_MISSING: &[&str] = &["storage_io", "missing_rank"];

pub fn scenarios() -> Vec<Scenario> {
    let mut scenarios = troubles();
    let plain = |name: &str, world: u32, arguments: &[&str]| job(&format!("plain-{name}"), PLAIN, world, arguments);
    let pipeline = |name: &str, stages: u32, replicas: u32, spoil: &[&str]| {
        let options = [format!("--stages={stages}"), format!("--replicas={replicas}")];
        let arguments: Vec<&str> = options.iter().map(String::as_str).chain(spoil.iter().copied()).collect();
        job(&format!("pipeline-{name}"), PIPELINE, stages * replicas, &arguments)
    };
    let experts = |spoil: &str, world: u32, rank: u32| {
        let argument = format!("--spoil={spoil}@{rank}");
        job(&format!("experts-{}", spoil.replace('_', "-")), Program::Script("experts.py"), world, &[&argument])
    };
    let native = |fault: &str, world: u32, rank: u32| {
        let rank = rank.to_string();
        job(&format!("native-{}", fault.replace('_', "-")), Program::Native("native.cpp"), world, &[fault, &rank])
    };
    scenarios.extend([
        plain("fewer-batches", 4, &["--trouble=fewer_batches@2"])
            .is(&["op_mismatch", "size_mismatch", "missing_rank"], &[2]),
        plain("raises", 4, &["--trouble=raises@1"]).is(&["op_mismatch", "size_mismatch", "missing_rank"], &[1]),
        plain("other-dtype", 4, &["--trouble=other_dtype@0"]).is(&["dtype_mismatch"], &[0]),
        plain("other-root", 4, &["--trouble=other_root@3"]).is(&["op_mismatch"], &[3]),
        plain("no-loss", 4, &["--trouble=no_loss@2"]).is(&["op_mismatch", "missing_rank"], &[2]),
        plain("extra-barrier", 4, &["--trouble=extra_barrier@0"]).is(&["op_mismatch", "missing_rank"], &[0]),
        plain("one-more-epoch", 4, &["--epochs=3", "--trouble=one_more_epoch@2"]).is(&["missing_rank"], &[2]),
        plain("wants-lock", 4, &["--trouble=keeps_lock@0", "--trouble=wants_lock@3"])
            .is(&["storage_io", "host_lock"], &[0]),
        // No rank differs: all wait for something outside of the job.
        plain("all-ask-a-server", 4, &["--trouble=silent_server@0+1+2+3"]).is(&["unknown"], &[]),
        hybrid("plain-all-read", 1, 1, 4).fault("fifo@0+1+2+3:load").is(&["data_loader", "storage_io"], &[]),
        plain("two-reasons", 8, &["--trouble=silent_server@1", "--trouble=starved_executor@6"])
            .is(&["host_lock", "missing_rank"], &[1, 6]),
        pipeline("blocking-sends", 4, 1, &["--blocking-sends"]).is(&["p2p_cycle"], &[2, 3]),
        pipeline("lost-send", 4, 1, &["--spoil=lost_send@2"]).is(&["p2p_unmatched"], &[2]),
        pipeline("extra-recv", 4, 2, &["--spoil=extra_recv@5"]).is(&["p2p_unmatched", "p2p_cycle"], &[5]),
        pipeline("wrong-peer", 4, 1, &["--spoil=wrong_peer@1"]).is(&["p2p_unmatched", "p2p_cycle"], &[1]),
        pipeline("small", 3, 1, &["--spoil=small@1"]).is(&["size_mismatch"], &[1]),
        pipeline("one-less", 4, 2, &["--spoil=one_less@6"])
            .is(&["p2p_unmatched", "missing_rank", "order_mismatch"], &[6]),
        pipeline("stuck", 4, 2, &["--spoil=stuck@3"]).is(MISSING, &[3]),
        pipeline("no-clip", 2, 4, &["--spoil=no_clip@4"]).is(MISSING, &[4]),
        pipeline("clip-first", 2, 4, &["--spoil=clip_first@3"]).is(&["order_mismatch", "missing_rank"], &[3]),
        experts("no_recv", 8, 6).is(&["p2p_unmatched"], &[6]),
        experts("more_tokens", 8, 3).is(&["size_mismatch"], &[3]),
        experts("wrong_neighbour", 4, 2).is(&["p2p_unmatched"], &[2]),
        experts("drops", 8, 5).option("--steps=40").is(&["p2p_unmatched", "process_dead", "missing_rank"], &[5]),
        experts("largest", 8, 1).option("--block=2").is(&["op_mismatch"], &[1]),
        experts("slow_expert", 8, 4).is(&["kernel_hang"], &[4]),
        experts("other_size", 4, 2).is(&["comm_init"], &[2]),
        experts("no_split", 4, 1).is(&["comm_init"], &[1]),
        experts("no_id", 4, 0).is(&["comm_init"], &[0]),
        native("mutex", 4, 1).is(&["host_lock"], &[1]),
        native("cond", 4, 2).is(LOCK, &[2]),
        native("read", 2, 1).is(IO, &[1]),
        native("fifo", 4, 0).is(IO, &[0]),
        native("spin", 4, 3).is(BUSY, &[3]),
        native("yield", 3, 1).is(BUSY, &[1]),
        native("sleep", 4, 2).is(MISSING, &[2]),
        native("join", 4, 0).is(LOCK, &[0]),
        native("future", 4, 1).is(LOCK, &[1]),
        native("waitpid", 2, 0).is(MISSING, &[0]),
        native("accept", 4, 3).is(MISSING, &[3]),
        native("poll", 4, 2).is(MISSING, &[2]),
        native("loader", 4, 1).is(&["data_loader", "host_lock"], &[1]),
        native("loader_died", 4, 2).is(&["data_loader", "host_lock"], &[2]),
        native("throws", 4, 1).is(DEAD, &[1]),
        native("segv", 4, 0).is(DEAD, &[0]),
        native("exits", 4, 3).is(DEAD, &[3]),
        native("stop", 4, 2).is(&["process_stopped"], &[2]),
        // The sums are wrong from there on, and the last one is missing.
        native("no_reduce", 4, 2).option("150").option("2").is(&["missing_rank", "process_dead", "teardown"], &[2]),
    ]);
    scenarios
}

/// A scenario for each of [`TROUBLES`].
fn troubles() -> Vec<Scenario> {
    let mut scenarios = Vec::new();
    for (index, (trouble, causes)) in TROUBLES.iter().enumerate() {
        // Rank and world size vary.
        let world = [2, 3, 4][index % 3];
        let rank = (index as u32 * 7 + 1) % world;
        let argument = format!("--trouble={trouble}@{rank}");
        let name = format!("plain-{}", trouble.replace('_', "-"));
        let need = (*trouble == "frozen").then_some(Need::Freezer);
        scenarios.push(Scenario { need, ..job(&name, PLAIN, world, &[&argument]).is(causes, &[rank]) });
    }
    scenarios
}
