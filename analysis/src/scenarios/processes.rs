//! Other processes hold a rank up: its workers, its children, and processes that share a lock with
//! it.

use super::{expect, hosts::behind};
use crate::{
    Cause, Confidence,
    testing::{Job, Stack},
};
use xpu_timer_proto::{
    server::{Awaited, AwaitedKind, Holder},
    v1::{Op, TriggerKind},
};

/// Receives from a queue of worker processes, in functions whose names do not mention data.
fn receives() -> Stack {
    let frames = [
        ("Connection._recv", "/usr/lib/python3.11/multiprocessing/connection.py:378"),
        ("Connection.recv_bytes", "/usr/lib/python3.11/multiprocessing/connection.py:216"),
        ("Queue.get", "/usr/lib/python3.11/multiprocessing/queues.py:103"),
        ("step", "/job/train.py:66"),
    ];
    Stack::new(&frames, &["read", "os_read"]).with(|stack| stack.syscall = Some(0))
}

/// Waits for a barrier or semaphore of Python's multiprocessing.
fn shared_lock() -> Stack {
    let frames = [
        ("Condition.wait", "/usr/lib/python3.11/multiprocessing/synchronize.py:261"),
        ("Barrier.wait", "/usr/lib/python3.11/threading.py:684"),
        ("step", "/job/train.py:12"),
    ];
    Stack::new(&frames, &["__futex_abstimed_wait_common64", "sem_wait"])
}

/// The rank reads from a pipe whose other end only these processes have.
fn reads_pipe_of(job: &mut Job, rank: u32, holders: &[(i32, bool)]) {
    job.flight(rank).rank.as_mut().expect("it is known").pid = 1000 + rank as i32;
    let holder = |(pid, child): &(i32, bool)| Holder { pid: *pid, name: "python3".into(), child: *child };
    let thread = &mut job.rank(rank).dump.as_mut().expect("a dump").stacktrace[0];
    let holders = holders.iter().map(holder).collect();
    thread.awaited = Some(Awaited { kind: AwaitedKind::Pipe.into(), name: String::new(), holders });
}

#[test]
fn a_queue_whose_worker_is_dead_is_a_loader_whatever_the_program_calls_it() {
    let mut job = behind(2, receives());
    job.child(2, "python train.py", "Z (zombie)");
    let verdict = job.judge();
    expect(&verdict, Cause::DataLoader, &[2], Confidence::High);
    let told = "waits for its data loader at train.py:66 in step (C function read), whose child process 4242 (python train.py) is dead";
    assert!(verdict.sentence.contains(told), "{}", verdict.sentence);
    // A parent has already collected its exit status.
    let mut job = behind(2, receives());
    reads_pipe_of(&mut job, 2, &[(1002, false)]);
    let verdict = job.judge();
    expect(&verdict, Cause::DataLoader, &[2], Confidence::High);
    assert!(verdict.sentence.contains(", by a pipe whose other end only it has open"), "{}", verdict.sentence);
    // A living worker may be at work.
    let mut job = behind(2, receives());
    reads_pipe_of(&mut job, 2, &[(4242, true)]);
    assert_eq!(job.judge().cause, Cause::MissingRank);
}

#[test]
fn a_dead_worker_is_named_before_an_idle_worker() {
    let mut job = behind(2, receives());
    job.child(2, "python train.py", "S (sleeping)");
    let orders = receives();
    for sample in &mut job.rank(2).dump.as_mut().expect("a dump").children[0].samples {
        let mut other = Job::new(1);
        other.stands(0, orders.clone());
        let dump = other.rank(0).dump.take().expect("a dump");
        (sample.stacktrace, sample.py_stacktrace) = (dump.stacktrace, dump.py_stacktrace);
    }
    let verdict = job.judge();
    assert_eq!(verdict.cause, Cause::MissingRank, "{}", verdict.to_text());
    assert!(!verdict.sentence.contains("4242"), "{}", verdict.sentence);
    job.child(2, "python decoder.py", "Z (zombie)");
    let verdict = job.judge();
    expect(&verdict, Cause::DataLoader, &[2], Confidence::High);
    assert!(verdict.sentence.contains("(python decoder.py) is dead"), "{}", verdict.sentence);
}

#[test]
fn a_pipe_whose_writer_is_dead_is_no_storage() {
    let reads = || Stack::new(&[("ask", "/job/train.py:9")], &["read"]).with(|stack| stack.syscall = Some(0));
    let mut job = behind(1, reads());
    reads_pipe_of(&mut job, 1, &[(1001, false)]);
    expect(&job.judge(), Cause::StorageIo, &[1], Confidence::High);
    job.child(1, "tokenizer --serve", "Z (zombie)");
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[1], Confidence::High);
    let told =
        "waits for a pipe whose other end only it has open, and its child process 4242 (tokenizer --serve) is dead";
    assert!(verdict.sentence.contains(told), "{}", verdict.sentence);
}

#[test]
fn a_wait_for_input_from_a_pipe_is_not_storage() {
    let asks = Stack::new(&[("main", "/job/train.py:3")], &["read", "_Py_read", "PyFile_GetLine"]);
    let mut job = behind(1, asks.with(|stack| stack.syscall = Some(0)));
    reads_pipe_of(&mut job, 1, &[]);
    expect(&job.judge(), Cause::MissingRank, &[1], Confidence::High);
    // Independent of the reader and of the writer.
    let mut job = behind(1, Stack::new(&[("main", "/job/train.py:3")], &["read"]));
    reads_pipe_of(&mut job, 1, &[(77, false)]);
    let thread = &mut job.rank(1).dump.as_mut().expect("a dump").stacktrace[0];
    let awaited = thread.awaited.as_mut().expect("a pipe");
    (awaited.kind, awaited.name) = (AwaitedKind::File.into(), "/dev/stdin".into());
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[1], Confidence::High);
    let told = "waits for its standard input, whose other end process 77 (python3) has open";
    assert!(verdict.sentence.contains(told), "{}", verdict.sentence);
}

#[test]
fn a_wait_for_an_event_is_not_storage() {
    let events = |native: &'static str, wchan| {
        Stack::new(&[("main", "/job/train.py:3")], &["read", native])
            .with(|stack| stack.syscall = Some(0))
            .state("S (sleeping)", wchan)
    };
    for stack in [events("eventfd_read", ""), events("os_read", "inotify_read")] {
        expect(&behind(1, stack).judge(), Cause::MissingRank, &[1], Confidence::High);
    }
}

#[test]
fn the_sentence_about_a_missing_send_names_the_awaited_child() {
    let mut job = Job::new(2);
    job.comm(0x77, &[0, 1]);
    job.transfer(0x77, 1, Op::Recv, 0);
    let asks = [
        ("Popen._communicate", "/usr/lib/python3.11/subprocess.py:2115"),
        ("Popen.communicate", "/usr/lib/python3.11/subprocess.py:1209"),
        ("evaluate", "/job/train.py:9"),
    ];
    job.stands(0, Stack::new(&asks, &["poll"]));
    job.child(0, "score --all", "S (sleeping)");
    job.rank(0).dump.as_mut().expect("a dump").children[0].parent_pid = 1000;
    let verdict = job.judge();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::P2pUnmatched, &[0][..]), "{}", verdict.to_text());
    let told = "has not sent to rank 1; it stands at train.py:9 in evaluate (C function poll), and its child process 4242 (score --all) has not ended";
    assert!(verdict.sentence.contains(told), "{}", verdict.sentence);
}

#[test]
fn a_rank_in_a_shared_lock_waits_for_another_rank() {
    let verdict = behind(1, shared_lock()).judge();
    expect(&verdict, Cause::HostLock, &[1], Confidence::Medium);
    assert!(verdict.sentence.contains("waits for a lock that processes share"), "{}", verdict.sentence);
    // Rank 2 is also expected at the barrier.
    let mut job = Job::with_world(4, 30);
    job.enter(0x77, 0, Op::AllReduce);
    job.enter(0x77, 3, Op::AllReduce);
    job.stands(1, shared_lock());
    job.stands(2, Stack::pause());
    expect(&job.judge(), Cause::MissingRank, &[2], Confidence::Medium);
    // Its own worker holds it up.
    job.child(1, "python train.py", "T (stopped)");
    expect(&job.judge(), Cause::HostLock, &[1, 2], Confidence::Medium);
}

#[test]
fn ranks_in_a_shared_barrier_wait_in_a_job_without_collectives() {
    let mut job = Job::with_world(4, 30);
    job.trigger(TriggerKind::Idle);
    (0..4).for_each(|rank| job.stands(rank, shared_lock()));
    assert_eq!(job.judge().culprits, [] as [u32; 0]);
    job.stands(1, Stack::sleep());
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[1], Confidence::Low);
    assert_eq!(verdict.victims, [0, 2, 3]);
}
