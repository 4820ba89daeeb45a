//! Threads, locks and exceptions of C++: the thread that stands is not the one that calls the
//! communication library. And Python programs in which the main thread tells nothing.

use crate::{
    program::Program,
    scenario::{Scenario, job},
};

const LOCK: &[&str] = &["host_lock", "missing_rank"];
const MISSING: &[&str] = &["missing_rank"];
const BUSY: &[&str] = &["missing_rank", "long_step"];
const GONE: &[&str] = &["process_dead"];
const IDLE: &[&str] = &["unknown", "not_a_hang"];
const READS: &[&str] = &["missing_rank", "storage_io"];

pub fn scenarios() -> Vec<Scenario> {
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
        // Nothing is stuck, and nothing says so.
        beside("idle_sleep", 4, None).is(IDLE, &[]),
        beside("idle_server", 4, None).is(IDLE, &[]),
        beside("idle_prompt", 3, None).is(IDLE, &[]),
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
