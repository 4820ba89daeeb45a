//! The training thread is not the main thread.

use super::{expect, hosts::behind};
use crate::{
    Cause, Confidence,
    testing::{Job, SECOND, Stack},
};
use xpu_timer_proto::v1::{Op, OpKind};

/// The training thread.
const TRAINER: u32 = 7002;

/// Four ranks that each train in a thread. The third is behind; these are the stacks of its main
/// thread and its training thread.
fn behind_in_thread(main: Stack, trains: Stack) -> Job {
    let mut job = behind(2, main);
    launched_by(&mut job, TRAINER);
    stands_in_thread(&mut job, trains);
    job
}

/// The second rank launched everything on this thread.
fn launched_by(job: &mut Job, tid: u32) {
    let flight = job.flight(2);
    flight.rank.as_mut().expect("it is known").pid = 1002;
    flight.operations.iter_mut().for_each(|operation| operation.tid = tid);
}

fn stands_in_thread(job: &mut Job, stack: Stack) {
    let mut other = Job::new(3);
    other.stands(2, stack);
    let dump = other.rank(2).dump.take().expect("a dump");
    let first = dump.first_sample.expect("two samples");
    let own = job.rank(2).dump.as_mut().expect("a dump");
    let own_first = own.first_sample.as_mut().expect("two samples");
    for (threads, python, to, to_python) in [
        (first.stacktrace, first.py_stacktrace, &mut own_first.stacktrace, &mut own_first.py_stacktrace),
        (dump.stacktrace, dump.py_stacktrace, &mut own.stacktrace, &mut own.py_stacktrace),
    ] {
        to.extend(threads.into_iter().map(|mut thread| {
            thread.pid = TRAINER;
            thread
        }));
        to_python.extend(python.into_iter().map(|mut thread| {
            (thread.os_thread_id, thread.thread_name) = (TRAINER, "trainer".into());
            thread
        }));
    }
}

fn joins() -> Stack {
    let frames = [
        ("Thread._wait_for_tstate_lock", "/usr/lib/python3.11/threading.py:1132"),
        ("Thread.join", "/usr/lib/python3.11/threading.py:1112"),
        ("main", "/job/run.py:5"),
    ];
    Stack::new(&frames, &["__futex_abstimed_wait_common64", "sem_wait", "PyThread_acquire_lock_timed"])
}

#[test]
fn the_thread_that_trains_is_judged_where_the_main_one_only_waits_for_it() {
    let signal = || Stack::new(&[("main", "/job/run.py:5")], &["sigwait"]);
    let sleeps = || Stack::new(&[("main", "/job/run.py:5")], &["clock_nanosleep"]).with(|stack| stack.switches = 9);
    let ends = || Stack::new(&[], &["__futex_abstimed_wait_common64", "wait_for_thread_shutdown", "Py_FinalizeEx"]);
    for main in [joins, signal, sleeps, ends] {
        let verdict = behind_in_thread(main(), Stack::checkpoint()).judge();
        expect(&verdict, Cause::StorageIo, &[2], Confidence::High);
        assert!(verdict.sentence.contains("train.py:77 in save_checkpoint"), "{}", verdict.sentence);
        let verdict = behind_in_thread(main(), Stack::pause()).judge();
        expect(&verdict, Cause::MissingRank, &[2], Confidence::High);
        let verdict = behind_in_thread(main(), Stack::lock()).judge();
        expect(&verdict, Cause::HostLock, &[2], Confidence::Medium);
        assert!(verdict.sentence.contains("train.py:55 in update"), "{}", verdict.sentence);
    }
    // The main thread has created the communicator.
    let mut job = behind_in_thread(joins(), Stack::checkpoint());
    let made = &mut job.flight(2).operations[29];
    (made.tid, made.kind) = (1002, OpKind::HostCall.into());
    expect(&job.judge(), Cause::StorageIo, &[2], Confidence::High);
    let in_d = behind_in_thread(joins(), Stack::checkpoint().state("D (disk sleep)", "nfs_wait_bit"));
    expect(&in_d.judge(), Cause::DState, &[2], Confidence::High);
}

#[test]
fn a_thread_that_trains_and_waits_for_its_device_is_no_suspect() {
    let mut job = Job::with_world(3, 30);
    (0..2).for_each(|rank| job.enter(0x77, rank, Op::AllReduce));
    job.comm(0x88, &[1, 2]);
    job.enter(0x88, 2, Op::AllReduce);
    job.stands(1, Stack::device_wait());
    job.stands(2, joins());
    stands_in_thread(&mut job, Stack::device_wait());
    launched_by(&mut job, TRAINER);
    let verdict = job.judge();
    assert!(matches!(verdict.cause, Cause::OrderMismatch), "{}", verdict.to_text());
}

#[test]
fn a_main_thread_that_does_something_itself_is_judged() {
    // The main thread gives the tasks, and the other thread waits for them.
    let verdict = behind_in_thread(Stack::sleep(), Stack::loader()).judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::Medium);
    assert!(verdict.sentence.contains("train.py:99 in evaluate"), "{}", verdict.sentence);
    // Each of the two may wait for the other.
    let verdict = behind_in_thread(Stack::lock(), Stack::lock()).judge();
    expect(&verdict, Cause::HostLock, &[2], Confidence::Medium);
    // The main thread launches as well.
    let mut job = behind_in_thread(joins(), Stack::checkpoint());
    job.flight(2).operations.last_mut().expect("operations").tid = 1002;
    assert_ne!(job.judge().cause, Cause::StorageIo);
    // A thread of a library, such as that of automatic differentiation.
    let mut job = behind_in_thread(joins(), Stack::checkpoint());
    let dump = job.rank(2).dump.as_mut().expect("a dump");
    dump.py_stacktrace.retain(|thread| thread.os_thread_id != TRAINER);
    assert_ne!(job.judge().cause, Cause::StorageIo);
    // Ids of another pid namespace.
    let mut job = behind_in_thread(joins(), Stack::checkpoint());
    job.flight(2).rank.as_mut().expect("it is known").pid = 12;
    assert_ne!(job.judge().cause, Cause::StorageIo);
}

#[test]
fn movement_is_that_of_the_training_thread() {
    let trains = Stack::sleep().busy(5 * SECOND).was_at("evaluate", "/job/eval.py:12");
    let verdict = behind_in_thread(joins(), trains).judge();
    expect(&verdict, Cause::LongStep, &[2], Confidence::Medium);
}
