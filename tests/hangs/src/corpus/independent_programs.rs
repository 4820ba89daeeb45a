//! Programs that are unrelated to `hybrid.py`: a first script, a pipeline schedule, C++ without
//! Python, and jobs whose author had not seen the rules of the judge.

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
    ("manager", &["process_stopped", "missing_rank"]),
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
        plain("all-ask-a-server", 4, &["--trouble=silent_server@0+1+2+3"]).reported_if_idle().is(&["unknown"], &[]),
        hybrid("plain-all-read", 1, 1, 4)
            .fault("fifo@0+1+2+3:load")
            .reported_if_idle()
            .is(&["data_loader", "storage_io"], &[]),
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

const GONE: &[&str] = &["process_dead"];
const IDLE: &[&str] = &["unknown", "not_a_hang"];
const READS: &[&str] = &["missing_rank", "storage_io"];

/// Threads, locks and exceptions of C++: the stuck thread is not the one that calls the
/// communication library. Also Python programs whose main thread gives no information.
pub fn threads() -> Vec<Scenario> {
    let replay = |accident: &str, world: u32, rank: u32| {
        let arguments = [accident, &rank.to_string()];
        job(&format!("replay-{}", accident.replace('_', "-")), Program::Native("replay.cpp"), world, &arguments)
    };
    let beside = |name: &str, world: u32, rank: Option<u32>| {
        let rank = rank.map(|rank| rank.to_string());
        let arguments: Vec<&str> = std::iter::once(name).chain(rank.as_deref()).collect();
        job(&format!("beside-{}", name.replace('_', "-")), Program::Script("beside.py"), world, &arguments)
    };
    vec![
        beside("thread_joined", 4, Some(2)).is(&["storage_io"], &[2]),
        beside("thread_and_signal", 3, Some(1)).is(MISSING, &[1]),
        beside("thread_and_sleep", 4, Some(0)).is(&["host_lock"], &[0]),
        beside("two_orders", 4, Some(1)).is(&["order_mismatch"], &[1]),
        // No process is stuck, and no verdict says that one is.
        beside("idle_sleep", 4, None).reported_if_idle().is(IDLE, &[]),
        beside("idle_server", 4, None).reported_if_idle().is(IDLE, &[]),
        beside("idle_prompt", 3, None).reported_if_idle().is(IDLE, &[]),
        replay("lock_order", 4, 1).is(&["host_lock"], &[1]),
        replay("own_shared_lock", 4, 2).is(LOCK, &[2]),
        replay("rwlock", 3, 0).is(LOCK, &[0]),
        replay("spin_lock", 4, 3).is(&["missing_rank", "long_step", "host_lock"], &[3]),
        replay("missed_notify", 4, 0).is(LOCK, &[0]),
        replay("closed_gate", 2, 1).is(LOCK, &[1]),
        replay("call_once", 4, 2).is(LOCK, &[2]),
        replay("static_init", 3, 1).is(LOCK, &[1]),
        replay("polls", 4, 0).is(BUSY, &[0]),
        replay("timed_retries", 4, 3).is(LOCK, &[3]),
        replay("semaphore", 4, 1).is(LOCK, &[1]),
        replay("event_fd", 3, 2).is(READS, &[2]),
        replay("message_queue", 4, 0).is(MISSING, &[0]),
        replay("select", 4, 2).is(MISSING, &[2]),
        replay("actor_throws", 4, 1).is(GONE, &[1]),
        replay("learner_throws", 4, 3).is(GONE, &[3]),
        replay("unwinds_into_join", 4, 2).is(LOCK, &[2]),
        replay("terminate", 3, 0).is(GONE, &[0]),
        replay("alarm", 4, 2).is(GONE, &[2]),
        replay("recursive", 4, 1).is(BUSY, &[1]),
        replay("thread_of_queue", 4, 0).is(LOCK, &[0]),
    ]
}

/// Functions of `blind.py`: the job, its world, the culprits, and the right causes.
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

/// Functions of `blind_gloo.py`, with the columns of [`JOBS`].
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

/// Small jobs that were written, and the truth about them with them, before their author had seen
/// the rules of the judge.
pub fn blind() -> Vec<Scenario> {
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
