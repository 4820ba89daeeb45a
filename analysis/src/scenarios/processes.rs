//! Other processes hold a rank up: its workers, its children, processes that share a lock with it,
//! and ranks that have a file lock, a pipe or a socket for which it waits. Also ranks whose
//! training thread is not the main thread, or in which a thread holds the GIL.

use super::{expect, hosts::behind};
use crate::{
    Cause, Confidence, HangEvidence, Verdict, VerdictKind,
    testing::{Job, SECOND, Stack, native_thread, python_thread},
    verdict::Activity,
};
use xpu_timer_proto::{
    LISTENS,
    server::{
        Awaited, AwaitedKind, Holder, ProcessSample, PstackStacktrace, PySpyStacktrace, PySuspended, PySuspendedKind,
        Stacktrace, TcpConnection,
    },
    v1::{Op, OpKind, TriggerKind},
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
    let holder =
        |(pid, child): &(i32, bool)| Holder { pid: *pid, name: "python3".into(), child: *child, ..Holder::default() };
    let thread = &mut job.rank(rank).dump.as_mut().expect("a dump").stacktrace[0];
    let holders = holders.iter().map(holder).collect();
    thread.awaited = Some(Awaited { kind: AwaitedKind::Pipe.into(), holders, ..Default::default() });
}

#[test]
fn a_queue_whose_worker_is_dead_is_a_loader_whatever_the_program_calls_it() {
    let mut job = behind(2, receives());
    job.child(2, "python train.py", "Z (zombie)");
    let verdict = job.judge();
    expect(&verdict, Cause::DataLoader, &[2], Confidence::High);
    let expected = "waits for its data loader at train.py:66 in step (C function read), whose child process 4242 (python train.py) is dead";
    assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
    // A parent has already collected its exit status.
    let mut job = behind(2, receives());
    reads_pipe_of(&mut job, 2, &[(1002, false)]);
    let verdict = job.judge();
    expect(&verdict, Cause::DataLoader, &[2], Confidence::High);
    assert!(verdict.sentence.contains(", through a pipe whose other end only it has open"), "{}", verdict.sentence);
    // A living worker may be at work.
    let mut job = behind(2, receives());
    reads_pipe_of(&mut job, 2, &[(4242, true)]);
    assert_eq!(job.judge().cause, Cause::MissingRank);
}

#[test]
fn a_call_of_an_object_in_a_manager_is_not_a_loader_but_its_queue_is() {
    let judged = |method: &'static str| {
        let frames = [
            ("Connection._recv", "/usr/lib/python3.11/multiprocessing/connection.py:378"),
            ("Connection.recv", "/usr/lib/python3.11/multiprocessing/connection.py:249"),
            ("BaseProxy._callmethod", "/usr/lib/python3.11/multiprocessing/managers.py:822"),
            (method, "<string>:2"),
            ("ask_next_shard", "/job/train.py:66"),
        ];
        behind(2, Stack::new(&frames, &["read", "os_read"]).with(|stack| stack.syscall = Some(0))).judge().cause
    };
    assert_eq!(judged("next_shard"), Cause::MissingRank);
    assert_eq!(judged("get"), Cause::DataLoader);
}

#[test]
fn a_queue_that_another_process_fills_through_a_thread_is_not_a_loader() {
    let judged = |child: bool| {
        let frames = [("Queue.get", "/usr/lib/python3.11/queue.py:171"), ("next_batch", "/job/serve.py:204")];
        let mut job = behind(2, Stack::new(&frames, &["sem_wait", "PyThread_acquire_lock_timed"]));
        let mut input = native_thread(5002, &["read"], "S (sleeping)", "", Some(0), 9);
        let holders = vec![Holder { pid: 1050, name: "engine".into(), child, ..Holder::default() }];
        input.awaited = Some(Awaited { kind: AwaitedKind::Pipe.into(), holders, ..Default::default() });
        let python = python_thread(5002, "input", &[("read_ahead", "/job/serve.py:197".to_owned())]);
        job.thread(2, input, Some(python));
        job.judge().cause
    };
    assert_eq!(judged(true), Cause::DataLoader, "a worker of its own");
    assert_eq!(judged(false), Cause::HostLock);
}

#[test]
fn a_dead_worker_is_named_before_an_idle_worker() {
    let mut job = behind(2, receives());
    job.child(2, "python train.py", "S (sleeping)");
    let orders = receives();
    for sample in &mut job.rank(2).dump.as_mut().expect("a dump").children[0].samples {
        let mut other = Job::new(1);
        other.set_stack(0, orders.clone());
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
fn a_pipe_whose_writer_is_dead_is_not_storage() {
    let reads = || Stack::new(&[("ask", "/job/train.py:9")], &["read"]).with(|stack| stack.syscall = Some(0));
    let mut job = behind(1, reads());
    reads_pipe_of(&mut job, 1, &[(1001, false)]);
    expect(&job.judge(), Cause::StorageIo, &[1], Confidence::High);
    job.child(1, "tokenizer --serve", "Z (zombie)");
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[1], Confidence::High);
    let expected =
        "waits for a pipe whose other end only it has open, and its child process 4242 (tokenizer --serve) is dead";
    assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
}

#[test]
fn a_kind_of_verdict_that_was_wrong_or_is_new_has_no_high_confidence() {
    let calibrated = |job: &Job| {
        let verdict = job.judge();
        assert_eq!(verdict.strength, Some(Confidence::High), "{}", verdict.to_text());
        assert!(verdict.probability.is_some_and(|share| (share >= 0.99) == (verdict.confidence == Confidence::High)));
        (verdict.kind, verdict.confidence)
    };
    let mut pipe = behind(2, receives());
    reads_pipe_of(&mut pipe, 2, &[(1002, false)]);
    let engine = behind_engine(Stack::sleep().state("T (stopped)", ""));
    assert_eq!(calibrated(&behind(2, Stack::checkpoint())), (Some(VerdictKind::ByItself), Confidence::High));
    assert_eq!(calibrated(&pipe), (Some(VerdictKind::OpenWait), Confidence::Medium));
    assert_eq!(calibrated(&engine), (Some(VerdictKind::BehindProcess), Confidence::Medium));
    let text = pipe.judge().to_text();
    assert!(text.contains("\nreliability: about "), "{text}");
}

#[test]
fn an_event_loop_that_only_its_process_can_wake_waits_for_no_other_process() {
    let kind = |job: &Job| job.judge().kind;
    let mut job = behind(2, Stack::new(&[("fetch", "/job/train.py:31"), ("main", "/job/train.py:3")], &["epoll_wait"]));
    reads_pipe_of(&mut job, 2, &[(1002, false)]);
    assert_eq!(kind(&job), Some(VerdictKind::OpenWait), "the writer may have ended");
    let tasks = [task("Task-1", "", &[("fetch", "/job/train.py:31")])];
    runs_tasks(job.rank(2).dump.as_mut().expect("a dump"), &tasks);
    let verdict = job.judge();
    assert_eq!(verdict.kind, Some(VerdictKind::ByItself), "{}", verdict.to_text());
    expect(&verdict, Cause::MissingRank, &[2], verdict.confidence);
    // A connection is watched, too.
    reads_pipe_of(&mut job, 2, &[(1002, false), (77, false)]);
    assert_eq!(kind(&job), Some(VerdictKind::OpenWait));
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
    let expected = "waits for its standard input, whose other end process 77 (python3) has open";
    assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
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
    job.set_stack(0, Stack::new(&asks, &["poll"]));
    job.child(0, "score --all", "S (sleeping)");
    job.rank(0).dump.as_mut().expect("a dump").children[0].parent_pid = 1000;
    let verdict = job.judge();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::P2pUnmatched, &[0][..]), "{}", verdict.to_text());
    let expected = "has not sent to rank 1; it is at train.py:9 in evaluate (C function poll), and its child process 4242 (score --all) has not ended";
    assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
}

#[test]
fn a_rank_in_a_shared_lock_waits_for_another_rank() {
    let verdict = behind(1, shared_lock()).judge();
    expect(&verdict, Cause::HostLock, &[1], Confidence::Medium);
    assert!(verdict.sentence.contains("waits for a lock that several processes share"), "{}", verdict.sentence);
    // Rank 2 is also expected at the barrier.
    let mut job = Job::with_world(4, 30);
    job.enter(0x77, 0, Op::AllReduce);
    job.enter(0x77, 3, Op::AllReduce);
    job.set_stack(1, shared_lock());
    job.set_stack(2, Stack::pause());
    expect(&job.judge(), Cause::MissingRank, &[2], Confidence::Medium);
    // Its own worker holds it up.
    job.child(1, "python train.py", "T (stopped)");
    expect(&job.judge(), Cause::HostLock, &[1, 2], Confidence::Medium);
}

#[test]
fn ranks_in_a_shared_barrier_wait_in_a_job_without_collectives() {
    let mut job = Job::with_world(4, 30);
    job.trigger(TriggerKind::Idle);
    (0..4).for_each(|rank| job.set_stack(rank, shared_lock()));
    assert_eq!(job.judge().culprits, [] as [u32; 0]);
    job.set_stack(1, Stack::sleep());
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[1], Confidence::Low);
    assert_eq!(verdict.victims, [0, 2, 3]);
}

/// Eight ranks. `ranks` have not entered the collective that the others wait in.
fn outside(ranks: &[u32]) -> Job {
    let mut job = Job::with_world(8, 9);
    for rank in 0..8 {
        job.flight(rank).rank.as_mut().expect("it is known").pid = 1000 + rank as i32;
    }
    for rank in (0..8).filter(|rank| !ranks.contains(rank)) {
        job.enter(0x77, rank, Op::AllReduce);
    }
    job
}

/// The rank is in this call, which waits for a resource of these processes.
pub(super) fn awaits(job: &mut Job, rank: u32, native: &'static str, kind: AwaitedKind, holders: &[i32]) {
    job.set_stack(rank, Stack::new(&[("fetch_index", "/job/train.py:7")], &[native]));
    let holder = |pid: &i32| Holder { pid: *pid, name: "python3".into(), child: false, ..Holder::default() };
    let thread = &mut job.rank(rank).dump.as_mut().expect("a dump").stacktrace[0];
    thread.awaited = Some(Awaited {
        kind: kind.into(),
        name: if kind == AwaitedKind::Pipe { String::new() } else { "/data/index.lock".into() },
        holders: holders.iter().map(holder).collect(),
        ..Default::default()
    });
}

#[test]
fn the_holder_of_an_awaited_resource_is_followed() {
    for (native, kind) in [("flock", AwaitedKind::Lock), ("recv", AwaitedKind::Socket), ("read", AwaitedKind::Pipe)] {
        let mut job = outside(&[2, 5]);
        awaits(&mut job, 5, native, kind, &[1002]);
        job.set_stack(2, Stack::checkpoint());
        let verdict = job.judge();
        expect(&verdict, Cause::StorageIo, &[2], Confidence::High);
        assert!(verdict.victims.contains(&5), "{}", verdict.to_text());
        assert!(verdict.sentence.contains("rank 5 waits for"), "{}", verdict.sentence);
        // A chain of two resource waits.
        let mut job = outside(&[2, 5, 6]);
        awaits(&mut job, 5, native, kind, &[1002]);
        awaits(&mut job, 6, native, kind, &[1005]);
        job.set_stack(2, Stack::loader());
        expect(&job.judge(), Cause::DataLoader, &[2], Confidence::Medium);
    }
}

#[test]
fn a_holder_in_a_collective_with_the_waiter_is_named() {
    let mut job = outside(&[5]);
    awaits(&mut job, 5, "flock", AwaitedKind::Lock, &[1000]);
    let verdict = job.judge();
    expect(&verdict, Cause::StorageIo, &[0], Confidence::Medium);
    let expected = "Rank 0 holds up rank 5, which waits for the lock on index.lock, held by rank 0 (process 1000) at train.py:7 \
                in fetch_index (C function flock); rank 0 is itself in all_reduce 10";
    assert!(verdict.sentence.starts_with(expected), "{}", verdict.sentence);
    let mut job = outside(&[3, 5]);
    awaits(&mut job, 5, "recv", AwaitedKind::Socket, &[1000]);
    awaits(&mut job, 3, "recv", AwaitedKind::Socket, &[1000]);
    expect(&job.judge(), Cause::MissingRank, &[0], Confidence::Medium);
}

#[test]
fn a_resource_with_several_holders_is_not_followed() {
    let mut job = outside(&[5]);
    awaits(&mut job, 5, "read", AwaitedKind::Pipe, &[1000, 4242]);
    assert_eq!(job.judge().culprits, [5]);
    let mut job = outside(&[5]);
    awaits(&mut job, 5, "read", AwaitedKind::Pipe, &[1005]);
    assert_eq!(job.judge().culprits, [5]);
}

#[test]
fn ranks_without_records_are_followed_as_well() {
    let mut job = Job::new(4);
    job.trigger(TriggerKind::Idle);
    for rank in 0..4 {
        job.flight(rank).rank.as_mut().expect("it is known").pid = 1000 + rank as i32;
    }
    job.set_stack(3, Stack::checkpoint());
    awaits(&mut job, 1, "flock", AwaitedKind::Lock, &[1003]);
    let verdict = job.judge();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::StorageIo, &[3][..]), "{}", verdict.to_text());
}

/// Rank 2 of four reads from a socket of an engine, process 1050.
fn behind_engine(engine: Stack) -> Job {
    let mut job = behind(2, Stack::sleep());
    awaits(&mut job, 2, "recv", AwaitedKind::Socket, &[1050]);
    job.process(50, "/opt/venv/bin/python3 /srv/engine.py", engine);
    job
}

/// The process waits for another one.
pub(super) fn chained(job: &mut Job, index: usize, kind: AwaitedKind, name: &str, holders: &[i32]) {
    let dump = job.evidence.processes[index].dump.as_mut().expect("a dump");
    let holders = holders.iter().map(|pid| Holder { pid: *pid, ..Default::default() }).collect();
    dump.stacktrace[0].awaited = Some(Awaited { kind: kind.into(), name: name.into(), holders, ..Default::default() });
}

pub(super) fn culprits(verdict: &Verdict) -> Vec<(Option<u32>, i32)> {
    verdict.culprit_processes.iter().map(|process| (process.rank, process.pid)).collect()
}

#[test]
fn a_process_that_is_not_a_rank_is_the_culprit_if_a_rank_waits_for_it() {
    for (engine, cause, confidence, expected) in [
        (Stack::sleep().state("T (stopped)", ""), Cause::ProcessStopped, Confidence::High, "is stopped"),
        (Stack::lock(), Cause::HostLock, Confidence::Medium, "waits for a lock"),
        (Stack::checkpoint(), Cause::StorageIo, Confidence::Medium, "is stuck in I/O"),
        (Stack::sleep(), Cause::MissingRank, Confidence::Medium, "does not answer"),
    ] {
        let verdict = behind_engine(engine).judge();
        let text = verdict.to_text();
        assert_eq!((verdict.cause, verdict.strength), (cause, Some(confidence)), "{text}");
        assert_eq!((culprits(&verdict), &verdict.victims[..]), (vec![(None, 1050)], &[0, 1, 2, 3][..]), "{text}");
        let begin = format!("Process 1050 (python3 engine.py), which is not a rank, {expected}");
        assert!(verdict.sentence.starts_with(&begin), "{}", verdict.sentence);
        assert!(verdict.sentence.contains("; rank 2 waits for it at train.py:7"), "{}", verdict.sentence);
        assert!(verdict.sentence.contains("; ranks 0-1, 3 wait for rank 2 in all_reduce"), "{}", verdict.sentence);
        assert!(text.contains("culprits:    process 1050 (python3 engine.py)\n"), "{text}");
        assert_eq!(verdict.hang, HangEvidence::PendingOperation, "{text}");
    }
}

#[test]
fn a_process_that_only_made_a_pair_of_sockets_for_others_is_not_the_culprit() {
    let judged = |maker_has_both_ends: bool| {
        let mut job = behind_engine(Stack::sleep());
        job.flight(0).rank.as_mut().expect("it is known").pid = 1000;
        let thread = &mut job.rank(2).dump.as_mut().expect("a dump").stacktrace[0];
        let holders = &mut thread.awaited.as_mut().expect("it waits").holders;
        holders[0].both_ends = maker_has_both_ends;
        holders.push(Holder { pid: 1000, ..Holder::default() });
        culprits(&job.judge())
    };
    assert_eq!(judged(true), [(Some(2), 1002)], "only rank 0 can answer, and it is in the collective");
    assert_eq!(judged(false), [(None, 1050)]);
}

#[test]
fn a_busy_process_does_not_prove_a_hang() {
    let busy = behind_engine(Stack::sleep().busy(5 * SECOND)).judge();
    assert_eq!((culprits(&busy), busy.helpers_busy), (vec![(None, 1050)], true), "{}", busy.to_text());
    assert!(!behind_engine(Stack::sleep()).judge().helpers_busy);
    let moves = behind_engine(Stack::sleep().moving_bytes(1 << 30)).judge();
    assert_eq!((moves.cause, moves.hang), (Cause::LongStep, HangEvidence::None), "{}", moves.to_text());
}

#[test]
fn a_chain_of_processes_is_followed_to_its_end() {
    let mut job = behind_engine(Stack::sleep());
    chained(&mut job, 0, AwaitedKind::Socket, "", &[1051]);
    job.process(51, "store", Stack::sleep().state("T (stopped)", ""));
    let verdict = job.judge();
    assert_eq!((verdict.cause, culprits(&verdict)), (Cause::ProcessStopped, vec![(None, 1051)]));
    let expected = "rank 2 waits for it through process 1050 (python3 engine.py) at train.py:7";
    assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
    // They descend from the rank, and the sentence names the end once.
    job.evidence.processes[0].dump.as_mut().expect("a dump").parent_pid = 1002;
    job.evidence.processes[1].dump.as_mut().expect("a dump").parent_pid = 1050;
    let verdict = job.judge();
    assert_eq!(culprits(&verdict), [(Some(2), 1051)], "{}", verdict.to_text());
    assert_eq!(verdict.sentence.matches("is stopped").count(), 1, "{}", verdict.sentence);
    // It leads to a rank.
    let led = |enters: bool| {
        let mut job = Job::with_world(4, 30);
        for rank in if enters { vec![0, 1, 3] } else { vec![0, 1] } {
            job.enter(0x77, rank, Op::AllReduce);
        }
        awaits(&mut job, 2, "recv", AwaitedKind::Socket, &[1050]);
        job.process(50, "engine", Stack::sleep());
        chained(&mut job, 0, AwaitedKind::Pipe, "", &[1003]);
        if !enters {
            job.set_stack(3, Stack::checkpoint());
        }
        job.judge().culprits
    };
    assert_eq!(led(false), [3]);
    // The engine waits for the answer of a rank that waits for rank 2 itself.
    assert_eq!(led(true), [2]);
}

#[test]
fn a_chain_without_a_certain_end_accuses_no_other_process() {
    // The engine waits for a client, so it may have sent nothing because it got no request.
    let mut job = behind_engine(Stack::sleep());
    chained(&mut job, 0, AwaitedKind::Socket, "anybody who connects to 127.0.0.1:8000", &[]);
    assert_eq!(culprits(&job.judge()), [(Some(2), 1002)]);
    // Nothing is known of the process behind it.
    let mut job = behind_engine(Stack::sleep());
    chained(&mut job, 0, AwaitedKind::Pipe, "", &[1099]);
    assert_eq!(culprits(&job.judge()), [(Some(2), 1002)]);
}

#[test]
fn a_server_of_datagrams_that_waits_for_the_next_one_has_not_answered() {
    let judged = |name: &str, events: bool| {
        let mut job = if events { behind(2, Stack::sleep()) } else { Job::with_world(4, 30) };
        if !events {
            job.trigger(TriggerKind::Idle);
            (0..4).for_each(|rank| job.set_stack(rank, Stack::sleep()));
        }
        awaits(&mut job, 2, "recv", AwaitedKind::Socket, &[1050]);
        let thread = &mut job.rank(2).dump.as_mut().expect("a dump").stacktrace[0];
        thread.awaited.as_mut().expect("it waits").name = name.into();
        job.process(50, "rewards", Stack::new(&[("serve", "/job/rewards.py:7")], &["recvfrom"]));
        chained(&mut job, 0, AwaitedKind::Socket, "anybody who connects to rewards.sock", &[]);
        job.judge()
    };
    let verdict = judged("a reply from rewards.sock", true);
    assert_eq!((verdict.cause, culprits(&verdict)), (Cause::MissingRank, vec![(None, 1050)]), "{}", verdict.to_text());
    // A worker of an engine has a connection to it as well, and waits for its next task.
    assert_eq!(culprits(&judged("rewards.sock", true)), [(Some(2), 1002)]);
    let idle = judged("a reply from rewards.sock", false);
    assert_eq!((culprits(&idle), idle.hang), (vec![], HangEvidence::None), "{}", idle.to_text());
}

#[test]
fn a_rank_and_a_process_that_wait_for_each_other_are_both_culprits() {
    let mut job = behind_engine(Stack::sleep());
    chained(&mut job, 0, AwaitedKind::Pipe, "", &[1002]);
    let verdict = job.judge();
    assert_eq!(culprits(&verdict), [(Some(2), 1002), (None, 1050)], "{}", verdict.to_text());
    assert_eq!(verdict.confidence, Confidence::Medium);
    let expected = "Rank 2 at train.py:7 in fetch_index (C function recv) and process 1050 (python3 engine.py)";
    assert!(verdict.sentence.starts_with(expected), "{}", verdict.sentence);
    assert!(verdict.sentence.contains(" wait for each other; "), "{}", verdict.sentence);
    // A rank that waits for the end of a child must not expect it while the child needs the rank.
    let mut job = behind(2, Stack::sleep());
    awaits(&mut job, 2, "wait4", AwaitedKind::Child, &[1050]);
    job.process(50, "writer", Stack::new(&[("report", "/job/report.py:7")], &["write"]));
    chained(&mut job, 0, AwaitedKind::Pipe, "", &[1002]);
    // The dump of the rank has its children, and this one is blocked in a write.
    let writer = job.evidence.processes[0].dump.clone().expect("a dump");
    let sample = ProcessSample {
        process_state: "S (sleeping)".into(),
        stacktrace: writer.stacktrace,
        py_stacktrace: writer.py_stacktrace,
        ..Default::default()
    };
    job.child(2, "writer", "");
    let children = &mut job.rank(2).dump.as_mut().expect("a dump").children;
    (children[0].pid, children[0].samples) = (1050, vec![sample.clone(), sample]);
    let verdict = job.judge();
    assert_eq!(culprits(&verdict), [(Some(2), 1002)], "{}", verdict.to_text());
    assert_eq!(verdict.cause, Cause::MissingRank, "{}", verdict.to_text());
    assert!(verdict.sentence.contains("waits for the end of process 1050 (writer), which waits for it"), "{verdict:?}");
}

/// The main thread of a process waits for another thread of the process, which waits for others.
pub(super) fn reader_thread(job: &mut Job, index: usize, kind: AwaitedKind, name: &str, holders: &[i32]) {
    let dump = job.evidence.processes[index].dump.as_mut().expect("a dump");
    let mut reader = dump.stacktrace[0].clone();
    let holders = holders.iter().map(|pid| Holder { pid: *pid, ..Default::default() }).collect();
    reader.pid += 500;
    reader.timed = Some(false);
    reader.awaited = Some(Awaited { kind: kind.into(), name: name.into(), holders, ..Default::default() });
    dump.stacktrace[0].timed = Some(false);
    let mut python = dump.py_stacktrace[0].clone();
    python.os_thread_id = reader.pid;
    python.thread_name = "reader".into();
    dump.py_stacktrace.push(python);
    for sample in [&mut dump.first_sample, &mut dump.last_sample].into_iter().flatten() {
        if !sample.stacktrace.is_empty() {
            sample.stacktrace.push(reader.clone());
        }
    }
    dump.stacktrace.push(reader);
}

#[test]
fn the_other_threads_of_a_process_show_whom_it_waits_for() {
    let behind_reader = |state: &'static str| {
        let mut job = behind_engine(Stack::lock());
        job.process(51, "environment", Stack::sleep().state(state, ""));
        reader_thread(&mut job, 0, AwaitedKind::Socket, "", &[1051]);
        job.judge()
    };
    let verdict = behind_reader("T (stopped)");
    assert_eq!(
        (verdict.cause, culprits(&verdict)),
        (Cause::ProcessStopped, vec![(None, 1051)]),
        "{}",
        verdict.to_text()
    );
    // Several threads wait for processes; only one of these is stuck.
    let mut job = behind_engine(Stack::lock());
    job.process(51, "actor 0", Stack::sleep());
    job.process(52, "actor 1", Stack::lock());
    chained(&mut job, 1, AwaitedKind::Socket, "", &[1050]);
    reader_thread(&mut job, 0, AwaitedKind::Socket, "", &[1051]);
    reader_thread(&mut job, 0, AwaitedKind::Socket, "", &[1052]);
    let verdict = job.judge();
    assert_eq!((verdict.cause, culprits(&verdict)), (Cause::HostLock, vec![(None, 1052)]), "{}", verdict.to_text());
    // All of them wait for the process.
    chained(&mut job, 2, AwaitedKind::Socket, "", &[1050]);
    let verdict = job.judge();
    assert_eq!((verdict.cause, culprits(&verdict)), (Cause::HostLock, vec![(None, 1050)]), "{}", verdict.to_text());
}

#[test]
fn a_thread_of_a_library_sends_nothing_to_python_code_of_its_process() {
    // The main thread of rank 2 reads from a socket of its own process. A thread has a connection
    // to a process that is in a lock.
    let judged = |native: &'static str, runs_python: bool| {
        let mut job = behind(2, Stack::new(&[("fetch", "/job/train.py:31"), ("step", "/job/train.py:3")], &[native]));
        job.process(50, "driver", Stack::lock());
        let dump = job.rank(2).dump.as_mut().expect("a dump");
        let mut thread = native_thread(1502, &["epoll_wait"], "S (sleeping)", "", Some(232), 9);
        let awaits = |pid: i32| {
            let holders = vec![Holder { pid, ..Default::default() }];
            Some(Awaited { kind: AwaitedKind::Socket.into(), holders, ..Default::default() })
        };
        (thread.awaited, thread.timed) = (awaits(1050), Some(false));
        dump.stacktrace[0].awaited = awaits(1002);
        dump.py_stacktrace
            .extend(runs_python.then(|| python_thread(1502, "reader", &[("read", "/job/train.py:9".into())])));
        for sample in [&mut dump.first_sample, &mut dump.last_sample].into_iter().flatten() {
            if !sample.stacktrace.is_empty() {
                sample.stacktrace.push(thread.clone());
            }
        }
        dump.stacktrace.push(thread);
        culprits(&job.judge())
    };
    assert_eq!(judged("recv", false), [(Some(2), 1002)]);
    assert_eq!(judged("recv", true), [(None, 1050)]);
    assert_eq!(judged("epoll_wait", false), [(None, 1050)], "it may wake the event loop");
}

#[test]
fn a_client_with_a_request_to_a_server_does_not_hold_up_its_other_clients() {
    let behind_server = |client: Stack, waits: bool| {
        let mut job = behind_engine(Stack::sleep());
        chained(&mut job, 0, AwaitedKind::Several, &format!("{LISTENS} to /run/server"), &[1051]);
        job.process(51, "driver", client);
        if waits {
            reader_thread(&mut job, 1, AwaitedKind::Socket, "", &[1050]);
        }
        culprits(&job.judge())
    };
    assert_eq!(behind_server(Stack::lock(), false), [(None, 1051)]);
    assert_ne!(behind_server(Stack::lock(), true), [(None, 1051)]);
}

#[test]
fn a_silent_job_hangs_only_if_nobody_outside_can_wake_the_process_it_waits_for() {
    let silent = |change: &dyn Fn(&mut Job)| {
        let mut job = Job::with_world(2, 30);
        job.trigger(TriggerKind::Idle);
        for rank in 0..2 {
            awaits(&mut job, rank, "recv", AwaitedKind::Socket, &[1050]);
        }
        job.process(50, "engine", Stack::lock());
        change(&mut job);
        job.judge()
    };
    let hangs = silent(&|job| reader_thread(job, 0, AwaitedKind::Socket, "", &[1000, 1001]));
    assert_eq!((hangs.cause, culprits(&hangs)), (Cause::HostLock, vec![(None, 1050)]), "{}", hangs.to_text());
    assert_eq!((hangs.hang, hangs.confidence), (HangEvidence::WaitChain, Confidence::Medium));
    let is_idle = |verdict: &Verdict| culprits(verdict).is_empty() && verdict.hang == HangEvidence::None;
    // A thread of the engine waits for a client, for a process outside, or for some time.
    for (name, holders) in [("anybody who connects to 127.0.0.1:8000", &[][..]), ("", &[1099])] {
        let idle = silent(&|job| reader_thread(job, 0, AwaitedKind::Socket, name, holders));
        assert!(is_idle(&idle), "{}", idle.to_text());
    }
    let timed = silent(&|job| {
        reader_thread(job, 0, AwaitedKind::Socket, "", &[1000]);
        job.evidence.processes[0].dump.as_mut().expect("a dump").stacktrace[1].timed = Some(true);
    });
    assert!(is_idle(&timed), "{}", timed.to_text());
    // Its HTTP thread polled in the first sample, and waits for a new thread in the last one.
    for (runs, is_awake) in [(9, true), (0, false)] {
        let verdict = silent(&|job| {
            reader_thread(job, 0, AwaitedKind::Socket, "", &[1000, 1001]);
            let dump = job.evidence.processes[0].dump.as_mut().expect("a dump");
            let before = &mut dump.first_sample.as_mut().expect("two samples").stacktrace[1];
            (before.syscall, before.context_switches) = (Some(7), 20);
            let after = &mut dump.stacktrace[1];
            (after.syscall, after.context_switches) = (Some(202), 20 + runs);
        });
        assert_eq!(is_idle(&verdict), is_awake, "{}", verdict.to_text());
    }
}

#[test]
fn of_several_possible_processes_a_stopped_one_is_the_culprit_and_the_confidence_is_medium() {
    let mut job = behind(2, Stack::sleep());
    awaits(&mut job, 2, "recv", AwaitedKind::Pipe, &[1050, 1051]);
    job.process(50, "engine", Stack::sleep());
    job.process(51, "writer", Stack::sleep().state("T (stopped)", ""));
    let verdict = job.judge();
    assert_eq!((culprits(&verdict), verdict.confidence), (vec![(None, 1051)], Confidence::Medium));
    // One that waits for the same object cannot be it.
    let mut job = behind(2, Stack::sleep());
    awaits(&mut job, 2, "recv", AwaitedKind::Pipe, &[1050, 1051]);
    job.rank(2).dump.as_mut().expect("a dump").stacktrace[0].awaited.as_mut().expect("it waits").object =
        "pipe:[7]".into();
    job.process(50, "reader", Stack::sleep());
    chained(&mut job, 0, AwaitedKind::Pipe, "", &[1051]);
    let reader = job.evidence.processes[0].dump.as_mut().expect("a dump");
    reader.stacktrace[0].awaited.as_mut().expect("it waits").object = "pipe:[7]".into();
    job.process(51, "writer", Stack::lock());
    assert_eq!(culprits(&job.judge()), [(None, 1051)]);
}

/// A process was killed that had memory in common with these.
fn killed_sharer(job: &mut Job, pids: &[i32]) {
    job.process(60, "feeder", Stack::sleep());
    let process = job.evidence.processes.last_mut().expect("it was just added");
    process.shared_memory_with = pids.to_vec();
    let dump = Stacktrace { pid: 1060, rank: -1, process_state: "X (killed by SIGKILL)".into(), ..Default::default() };
    process.dump = Some(Stacktrace { command: "feeder".into(), ..dump });
}

#[test]
fn a_killed_process_is_the_culprit_if_a_rank_polls_the_memory_that_they_shared() {
    let judged = |stack: Stack, pids: &[i32]| {
        let mut job = behind(2, stack);
        job.flight(2).rank.as_mut().expect("it is known").pid = 1002;
        killed_sharer(&mut job, pids);
        job.judge()
    };
    let verdict = judged(Stack::sleep(), &[1002]);
    let text = verdict.to_text();
    assert_eq!((verdict.cause, culprits(&verdict)), (Cause::ProcessDead, vec![(None, 1060)]), "{text}");
    assert_eq!(verdict.strength, Some(Confidence::Medium), "{text}");
    assert!(verdict.sentence.contains("is dead (killed by SIGKILL); rank 2 waits for it"), "{}", verdict.sentence);
    let mut job = behind(2, Stack::sleep());
    job.flight(2).rank.as_mut().expect("it is known").pid = 1002;
    killed_sharer(&mut job, &[1002]);
    // It looks at the memory at this moment.
    let thread = &mut job.rank(2).dump.as_mut().expect("a dump").stacktrace[0];
    *thread = native_thread(1002, &["_PyEval_EvalFrameDefault"], "R (running)", "", None, 900);
    let verdict = job.judge();
    assert_eq!(culprits(&verdict), [(None, 1060)], "{}", verdict.to_text());
    assert_eq!(culprits(&judged(Stack::sleep(), &[1001])), [(Some(2), 1002)], "another rank shared its memory");
    assert_eq!(culprits(&judged(Stack::checkpoint(), &[1002])), [(Some(2), 1002)], "the rank is busy elsewhere");
}

#[test]
fn a_worker_between_two_tasks_and_a_service_between_two_requests_are_no_end_of_a_chain() {
    const LOKY: &str = "/v/site-packages/joblib/externals/loky/process_executor.py:430";
    const QUEUE: (&str, &str) = ("Queue.get", "/usr/lib/python3.11/multiprocessing/queues.py:102");
    let (worker, in_loop) = ("python3 -m joblib.externals.loky.backend.popen_loky_posix", ("_process_worker", LOKY));
    let waits = Stack::new(&[QUEUE, in_loop], &["__futex_abstimed_wait_common64", "sem_clockwait"]);
    let works = Stack::new(&[("tokenize", "/job/tokens.py:7"), in_loop], &["futex_wait", "pthread_mutex_lock"]);
    // A thread of a rank that waits for a lock of its own manages the pool.
    let judged = |stack: &Stack| {
        let mut job = behind(2, Stack::lock());
        job.flight(2).rank.as_mut().expect("it is known").pid = 1002;
        let mut manager = native_thread(5002, &["poll"], "S (sleeping)", "", None, 9);
        let holders = vec![Holder { pid: 1050, child: true, ..Holder::default() }];
        manager.awaited = Some(Awaited { kind: AwaitedKind::Pipe.into(), holders, ..Default::default() });
        job.thread(2, manager, None);
        job.process(50, worker, stack.clone());
        culprits(&job.judge())
    };
    assert_eq!(judged(&waits), [(Some(2), 1002)]);
    assert_eq!(judged(&waits.clone().state("T (stopped)", "")), [(None, 1050)]);
    assert_eq!(judged(&works), [(None, 1050)]);
    let served = |command: &str, stack: &Stack, kind: AwaitedKind| {
        let mut job = behind_engine(stack.clone());
        job.evidence.processes[0].dump.as_mut().expect("a dump").command = command.into();
        chained(&mut job, 0, kind, "", &[]);
        culprits(&job.judge())
    };
    let tracker = "python3 -c from multiprocessing.resource_tracker import main;main(7)";
    let reads = Stack::new(&[("main", "/usr/lib/python3.11/multiprocessing/resource_tracker.py:239")], &["read"]);
    let agent = "/v/site-packages/torch/distributed/elastic/agent/server/api.py:929";
    let sleeps = Stack::new(&[("SimpleElasticAgent._invoke_run", agent)], &["clock_nanosleep"]);
    let raylet = Stack::new(&[], &["epoll_wait"]);
    for (command, stack, kind) in [
        (tracker, &reads, AwaitedKind::Pipe),
        ("/opt/venv/bin/python3 /opt/venv/bin/torchrun train.py", &sleeps, AwaitedKind::Unspecified),
        ("/v/ray/core/src/ray/raylet/raylet --socket=x", &raylet, AwaitedKind::Several),
    ] {
        assert_eq!(served(command, stack, kind), [(Some(2), 1002)], "{command}");
        assert_eq!(served(command, &stack.clone().state("T (stopped)", ""), kind), [(None, 1050)], "{command}");
        assert_eq!(served("python3 engine.py", &Stack::lock(), kind), [(None, 1050)]);
    }
    assert_eq!(served(tracker, &reads, AwaitedKind::File), [(None, 1050)], "a file does not answer");
}

/// Polls memory: it sleeps for a short time, again and again.
fn polls() -> Stack {
    Stack::sleep().with(|stack| stack.switches = 900)
}

/// These processes share memory with the process of this dump.
fn shares_memory(dump: &mut Stacktrace, pids: &[i32]) {
    dump.stacktrace[0].sharers = pids.iter().map(|pid| Holder { pid: *pid, ..Default::default() }).collect();
}

/// A process that is not a rank reads from a file.
fn reads_file(job: &mut Job, number: u32, command: &str, stack: Stack) {
    let index = job.evidence.processes.len();
    job.process(number, command, stack);
    chained(job, index, AwaitedKind::File, "/data/index", &[]);
}

/// Rank 2 is in `stack`, shares memory with `pids`, and the others wait for it in a collective, or
/// for nothing if the job is silent.
fn behind_memory(silent: bool, stack: Stack, pids: &[i32]) -> Job {
    let mut job = if silent { Job::with_world(4, 30) } else { behind(2, Stack::sleep()) };
    if silent {
        job.trigger(TriggerKind::Idle);
        (0..4).for_each(|rank| job.set_stack(rank, polls()));
    }
    for rank in 0..4 {
        job.flight(rank).rank.as_mut().expect("it is known").pid = 1000 + rank as i32;
    }
    job.set_stack(2, stack);
    shares_memory(job.rank(2).dump.as_mut().expect("a dump"), pids);
    job
}

#[test]
fn a_stuck_process_is_the_culprit_if_a_rank_polls_the_memory_that_they_share() {
    let judged = |stack: Stack, engine: Stack| {
        let mut job = behind_memory(false, stack, &[1050]);
        reads_file(&mut job, 50, "engine", engine);
        job.judge()
    };
    let verdict = judged(polls(), Stack::checkpoint());
    let text = verdict.to_text();
    assert_eq!((verdict.cause, culprits(&verdict)), (Cause::StorageIo, vec![(None, 1050)]), "{text}");
    assert_eq!(verdict.strength, Some(Confidence::Medium), "{text}");
    assert!(verdict.victims.contains(&2), "{text}");
    let expected = "; rank 2 waits for a change in the memory that they share at train.py:99 in evaluate";
    assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
    // It lets other threads run, or is in a known function, however seldom it wakes up.
    let yields = |native: &[&'static str]| Stack::new(&[("poll", "/job/train.py:9")], native).busy(5 * SECOND);
    let ring = ("MessageQueue.acquire_read", "/v/site-packages/vllm/distributed/shm_broadcast.py:500");
    let in_ring = Stack::new(&[ring, ("serve", "/job/worker.py:9")], &["clock_nanosleep", "time_sleep"]);
    let other_line = yields(&["take_gil", "os_sched_yield"]).was_at("poll", "/job/train.py:8");
    for stack in [yields(&["sched_yield"]), other_line, in_ring] {
        assert_eq!(culprits(&judged(stack, Stack::checkpoint())), [(None, 1050)]);
    }
    for (stack, engine, why) in [
        (Stack::sleep(), Stack::checkpoint(), "it sleeps for long"),
        (polls().with(|stack| stack.switches = 5), Stack::checkpoint(), "it tries again after a failure"),
        (polls().was_at("load", "/job/train.py:7"), Stack::checkpoint(), "it works"),
        (Stack::new(&[("main", "/job/train.py:3")], &[]).busy(5 * SECOND), Stack::checkpoint(), "it computes"),
        (polls(), Stack::sleep(), "nothing shows that the other one is stuck"),
        (polls(), Stack::checkpoint().moving_bytes(1 << 30), "the other one works"),
    ] {
        assert_eq!(culprits(&judged(stack, engine)), [(Some(2), 1002)], "{why}");
    }
}

#[test]
fn a_process_that_may_be_at_rest_holds_up_nobody_who_polls_its_memory() {
    let judged = |change: &dyn Fn(&mut Job)| {
        let mut job = behind_memory(false, polls(), &[1050]);
        job.process(50, "logger", Stack::lock());
        change(&mut job);
        culprits(&job.judge())
    };
    assert_eq!(judged(&|_| ()), [(None, 1050)]);
    let rests: [&dyn Fn(&mut Job); 4] = [
        &|job| chained(job, 0, AwaitedKind::SharedMemory, "", &[1002]),
        // The other end of its pipe was not found in time.
        &|job| {
            job.evidence.processes.clear();
            job.process(50, "logger", Stack::new(&[("main", "/job/log.py:3")], &["read"]));
            chained(job, 0, AwaitedKind::Pipe, "", &[]);
        },
        &|job| reader_thread(job, 0, AwaitedKind::Pipe, "", &[1002]),
        // It polls too.
        &|job| {
            let dump = job.evidence.processes.pop().and_then(|process| process.dump).expect("a dump");
            shares_memory(job.process(50, &dump.command, polls()), &[1002]);
        },
    ];
    for change in rests {
        assert_eq!(judged(change), [(Some(2), 1002)]);
    }
}

#[test]
fn of_the_processes_behind_polled_memory_the_only_stuck_one_is_the_culprit() {
    // Rank 2 and a scheduler poll; so does the scheduler the memory that it shares with a writer.
    let chain = |writer: Stack, other: Stack| {
        let mut job = behind_memory(false, polls(), &[1050]);
        shares_memory(job.process(50, "scheduler", polls()), &[1002, 1051, 1052]);
        reads_file(&mut job, 51, "writer", writer);
        job.process(52, "other", other);
        job.judge()
    };
    let verdict = chain(Stack::checkpoint(), Stack::sleep());
    assert_eq!(culprits(&verdict), [(None, 1051)], "{}", verdict.to_text());
    assert!(verdict.sentence.contains("waits for it through process 1050 (scheduler)"), "{}", verdict.sentence);
    assert_eq!(culprits(&chain(Stack::checkpoint(), Stack::lock())), [(Some(2), 1002)], "one of two");
    let stopped = Stack::sleep().state("T (stopped)", "");
    assert_eq!(culprits(&chain(stopped, Stack::lock())), [(None, 1051)]);
    // A rank may have the other end, unless it waits in an operation.
    let mut job = outside(&[2, 5]);
    job.set_stack(2, polls());
    shares_memory(job.rank(2).dump.as_mut().expect("a dump"), &[1000, 1005]);
    awaits(&mut job, 5, "read", AwaitedKind::File, &[]);
    let verdict = job.judge();
    expect(&verdict, Cause::StorageIo, &[5], Confidence::High);
    assert!(verdict.victims.contains(&2), "{}", verdict.to_text());
}

#[test]
fn in_a_silent_job_a_stuck_process_behind_polled_memory_proves_a_hang_only_in_a_ring_or_if_it_is_stopped() {
    let ring = ("acquire_read", "/v/site-packages/vllm/distributed/shm_broadcast.py:500");
    let in_ring = Stack::new(&[ring, ("serve", "/job/worker.py:9")], &["clock_nanosleep", "time_sleep"]);
    let judged = |stack: &Stack, engine: Stack| {
        let mut job = behind_memory(true, stack.clone(), &[1050]);
        reads_file(&mut job, 50, "engine", engine);
        let verdict = job.judge();
        (culprits(&verdict), verdict.hang != HangEvidence::None)
    };
    let stopped = || Stack::checkpoint().state("T (stopped)", "");
    assert_eq!(judged(&polls(), Stack::checkpoint()), (vec![], false));
    assert_eq!(judged(&polls(), stopped()), (vec![(None, 1050)], true));
    assert_eq!(judged(&in_ring, Stack::checkpoint()), (vec![(None, 1050)], true));
    assert_eq!(judged(&in_ring, Stack::sleep()), (vec![], false));
}

#[test]
fn a_killed_process_is_the_culprit_if_it_may_have_a_lock_that_it_shared() {
    let judged = |pids: &[i32]| {
        let mut job = behind(2, shared_lock());
        job.flight(2).rank.as_mut().expect("it is known").pid = 1002;
        let thread = &mut job.rank(2).dump.as_mut().expect("a dump").stacktrace[0];
        let holders =
            [1050, 1051].map(|pid| Holder { pid, name: "python3".into(), child: false, ..Holder::default() }).to_vec();
        thread.awaited = Some(Awaited { kind: AwaitedKind::SharedMemory.into(), holders, ..Default::default() });
        job.process(50, "main", Stack::sleep());
        // Another one waits for the same memory.
        job.process(51, "actor", shared_lock());
        chained(&mut job, 1, AwaitedKind::SharedMemory, "", &[1002, 1050]);
        killed_sharer(&mut job, pids);
        job.judge()
    };
    let verdict = judged(&[1002, 1050, 1051]);
    let text = verdict.to_text();
    assert_eq!((verdict.cause, culprits(&verdict)), (Cause::ProcessDead, vec![(None, 1060)]), "{text}");
    let expected = "is dead (killed by SIGKILL); rank 2 waits for a lock in the memory that they shared at";
    assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
    assert_ne!(judged(&[]).cause, Cause::ProcessDead, "it shared nothing");
}

#[test]
fn a_launcher_that_waits_for_its_ranks_holds_no_lock_that_they_share() {
    let judged = |call: &'static str, kind: AwaitedKind, killed: bool| {
        let mut job = behind(2, shared_lock());
        job.flight(2).rank.as_mut().expect("it is known").pid = 1002;
        for rank in 0..4 {
            job.rank(rank).dump.as_mut().expect("a dump").parent_pid = 1050;
        }
        let thread = &mut job.rank(2).dump.as_mut().expect("a dump").stacktrace[0];
        let holders = vec![Holder { pid: 1050, ..Holder::default() }];
        thread.awaited = Some(Awaited { kind: AwaitedKind::SharedMemory.into(), holders, ..Default::default() });
        job.process(50, "launch.py", Stack::new(&[("join", "/job/launch.py:36")], &[call]));
        chained(&mut job, 0, kind, "", &[1000, 1001, 1002, 1003]);
        let dump = job.evidence.processes[0].dump.as_mut().expect("a dump");
        dump.stacktrace[0].awaited.iter_mut().flat_map(|one| &mut one.holders).for_each(|one| one.child = true);
        if killed {
            killed_sharer(&mut job, &[1002, 1050]);
        }
        job.judge()
    };
    for (call, kind) in [("poll", AwaitedKind::Several), ("wait4", AwaitedKind::Child)] {
        let verdict = judged(call, kind, false);
        assert_eq!(culprits(&verdict), [(Some(2), 1002)], "{}", verdict.to_text());
        let verdict = judged(call, kind, true);
        assert_eq!((verdict.cause, culprits(&verdict)), (Cause::ProcessDead, vec![(None, 1060)]));
    }
    // One that does something else may hold the lock.
    assert_eq!(culprits(&judged("read", AwaitedKind::File, false)), [(None, 1050)]);
}

#[test]
fn the_locks_of_a_manager_are_held_by_its_clients() {
    let judged = |clients: &[i32], state: &'static str| {
        let mut job = behind(2, Stack::sleep());
        awaits(&mut job, 2, "read", AwaitedKind::Socket, &[1050]);
        let frames = [
            ("Condition.wait", "/usr/lib/python3.11/threading.py:324"),
            ("Server.serve_forever", "/usr/lib/python3.11/multiprocessing/managers.py:176"),
        ];
        job.process(50, "manager", Stack::new(&frames, &["sem_wait", "PyThread_acquire_lock_timed"]));
        reader_thread(&mut job, 0, AwaitedKind::Socket, "anybody who connects to /tmp/listener", &[]);
        for client in clients {
            reader_thread(&mut job, 0, AwaitedKind::Socket, "", &[*client]);
        }
        // It waits for a job of a feeder.
        let evict =
            [("Queue.get", "/usr/lib/python3.11/multiprocessing/queues.py:103"), ("evict", "/job/janitor.py:13")];
        job.process(51, "janitor", Stack::new(&evict, &["read"]));
        chained(&mut job, 1, AwaitedKind::Pipe, "", &[1052]);
        job.process(52, "feeder", Stack::sleep().state(state, ""));
        job.process(53, "viewer", Stack::sleep());
        let verdict = job.judge();
        let through_manager = "through process 1050 (manager), which keeps locks and queues for both, at train.py:7";
        let is_client = culprits(&verdict) == [(None, 1051)];
        assert_eq!(verdict.sentence.contains(through_manager), is_client, "{}", verdict.sentence);
        culprits(&verdict)
    };
    // Rank 0 is a client too, and waits in the collective.
    assert_eq!(judged(&[1051, 1000], "S (sleeping)"), [(None, 1051)]);
    assert_eq!(judged(&[1051], "T (stopped)"), [(None, 1052)]);
    assert_eq!(judged(&[1051, 1053], "T (stopped)"), [(None, 1052)], "a stuck one is suspected first");
    assert_eq!(judged(&[1051, 1053], "S (sleeping)"), [(Some(2), 1002)], "either may hold the lock");
    assert_eq!(judged(&[], "S (sleeping)"), [(Some(2), 1002)], "none is known");
}

#[test]
fn a_process_that_keeps_a_lock_from_the_rank_for_which_it_waits_is_the_culprit() {
    // Rank 2 waits for the lock of an agent, which waits for a front end, which waits for a rank
    // that waits for rank 2 in a collective.
    let judged = |kind: AwaitedKind, call: &'static str, enters: bool| {
        let mut job = behind(2, Stack::sleep());
        awaits(&mut job, 2, call, kind, &[1050]);
        let thread = &mut job.rank(2).dump.as_mut().expect("a dump").stacktrace[0];
        thread.awaited.as_mut().expect("it waits").name = "/job/gpu.lease".into();
        job.process(50, "python3 /job/lease.py agent", Stack::new(&[("renew", "/job/lease.py:19")], &["recv"]));
        chained(&mut job, 0, AwaitedKind::Socket, "", &[1051]);
        job.process(51, "python3 /job/lease.py", Stack::new(&[("collect", "/job/lease.py:39")], &["read"]));
        chained(&mut job, 1, AwaitedKind::Pipe, "", &[1000]);
        if !enters {
            // Rank 0 waits in a collective; rank 2 is not a member of it.
            job.comm(0x88, &[0, 1]);
            let operations = &mut job.flight(0).operations;
            operations.last_mut().expect("it is in a collective").communicator = 0x88;
        }
        job.judge()
    };
    let verdict = judged(AwaitedKind::Lock, "flock", true);
    assert_eq!((verdict.cause, culprits(&verdict)), (Cause::MissingRank, vec![(None, 1050)]), "{}", verdict.to_text());
    assert_eq!((&verdict.victims[..], verdict.confidence), (&[0, 1, 2, 3][..], Confidence::Medium));
    let expected = "Process 1050 (python3 lease.py agent) holds the lock on gpu.lease and waits at lease.py:19 in renew \
                (C function recv) for process 1051 (python3 lease.py), which waits for rank 0; rank 2 waits for the \
                lock at train.py:7";
    assert!(verdict.sentence.starts_with(expected), "{}", verdict.sentence);
    assert_eq!(culprits(&judged(AwaitedKind::Socket, "recv", true)), [(Some(2), 1002)], "it keeps no lock");
    let other = judged(AwaitedKind::Lock, "flock", false);
    assert!(!culprits(&other).contains(&(None, 1050)), "{}", other.to_text());
}

#[test]
fn a_server_at_rest_is_idle_and_a_stopped_one_is_not() {
    let served = |engine: Stack| {
        let mut job = Job::with_world(2, 30);
        job.trigger(TriggerKind::Idle);
        for rank in 0..2 {
            awaits(&mut job, rank, "recv", AwaitedKind::Socket, &[1050]);
        }
        job.process(50, "engine", engine);
        job.judge()
    };
    for engine in [Stack::lock(), Stack::sleep()] {
        let verdict = served(engine);
        assert_eq!((verdict.cause, culprits(&verdict)), (Cause::Unknown, vec![]), "{}", verdict.to_text());
        assert!(
            verdict.sentence.contains("; they wait for process 1050 (engine), which is at "),
            "{}",
            verdict.sentence
        );
        assert!(verdict.sentence.ends_with("; the job may be idle."), "{}", verdict.sentence);
    }
    let verdict = served(Stack::lock().state("T (stopped)", ""));
    assert_eq!(
        (verdict.cause, culprits(&verdict)),
        (Cause::ProcessStopped, vec![(None, 1050)]),
        "{}",
        verdict.to_text()
    );
    assert_eq!(verdict.hang, HangEvidence::WaitChain);
}

#[test]
fn ranks_that_wait_for_their_ended_parent_are_not_to_blame() {
    let orphaned = |holders: &[i32]| {
        let mut job = behind(2, Stack::sleep());
        awaits(&mut job, 2, "recv", AwaitedKind::Socket, holders);
        job.rank(2).dump.as_mut().expect("a dump").stacktrace[0].awaited.as_mut().expect("it waits").name.clear();
        for rank in 0..4 {
            job.rank(rank).dump.as_mut().expect("a dump").ended_parent_pid = 1050;
        }
        let dump = job.process(50, "", Stack::sleep());
        *dump = Stacktrace { pid: 1050, process_state: "X (dead)".into(), ..Default::default() };
        job.judge()
    };
    // Rank 3 has inherited the other end.
    for holders in [&[][..], &[1002], &[1003]] {
        let verdict = orphaned(holders);
        assert_eq!(
            (verdict.cause, culprits(&verdict)),
            (Cause::ProcessDead, vec![(None, 1050)]),
            "{}",
            verdict.to_text()
        );
        assert!(verdict.sentence.starts_with("Process 1050, which is not a rank, is dead; rank 2 waits for it"));
    }
}

#[test]
fn a_chain_continues_over_a_tcp_connection_to_another_node() {
    let connection = |local: &str, remote: &str| TcpConnection { local: local.into(), remote: remote.into() };
    let connected = |dump: &mut Stacktrace, connections: &[TcpConnection]| {
        dump.last_sample.as_mut().expect("a sample").tcp_connections = connections.to_vec();
    };
    let job_with = |of_server: &[TcpConnection]| {
        let mut job = behind(2, Stack::sleep());
        awaits(&mut job, 2, "recv", AwaitedKind::Socket, &[]);
        let dump = job.rank(2).dump.as_mut().expect("a dump");
        dump.stacktrace[0].awaited.as_mut().expect("it waits").name = "10.0.0.2:7000".into();
        connected(dump, &[connection("10.0.0.1:4000", "10.0.0.2:7000"), connection("10.0.0.1:4001", "10.0.0.3:7000")]);
        let server = job.process(50, "python3 server.py", Stack::sleep().state("T (stopped)", ""));
        connected(server, of_server);
        job.evidence.processes[0].node = "node-b".into();
        job
    };
    let verdict = job_with(&[connection("10.0.0.2:7000", "10.0.0.1:4000")]).judge();
    let text = verdict.to_text();
    assert_eq!((verdict.cause, culprits(&verdict)), (Cause::ProcessStopped, vec![(None, 1050)]), "{text}");
    assert_eq!((&*verdict.culprit_processes[0].node, &*verdict.victims), ("node-b", &[0, 1, 2, 3][..]), "{text}");
    // The ports of both sides count.
    let verdict = job_with(&[connection("10.0.0.2:7000", "10.0.0.1:4009")]).judge();
    assert_eq!(culprits(&verdict), [(Some(2), 1002)], "{}", verdict.to_text());
}

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
    other.set_stack(2, stack);
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
    let counters = &mut job.flight(2).communicators[0];
    (counters.launched, counters.started, counters.completed) = (29, 29, 29);
    expect(&job.judge(), Cause::StorageIo, &[2], Confidence::High);
    let in_d = behind_in_thread(joins(), Stack::checkpoint().state("D (disk sleep)", "nfs_wait_bit"));
    expect(&in_d.judge(), Cause::DState, &[2], Confidence::High);
}

#[test]
fn a_thread_that_trains_and_waits_for_its_device_is_not_a_suspect() {
    let mut job = Job::with_world(3, 30);
    (0..2).for_each(|rank| job.enter(0x77, rank, Op::AllReduce));
    job.comm(0x88, &[1, 2]);
    job.enter(0x88, 2, Op::AllReduce);
    job.set_stack(1, Stack::device_wait());
    job.set_stack(2, joins());
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

/// A rank whose main thread waits for the GIL, which a native thread holds.
fn gil(holder_runs: bool) -> Job {
    let mut job = behind(
        2,
        Stack::new(&[("step", "/job/train.py:20")], &["pthread_cond_timedwait", "take_gil", "PyEval_RestoreThread"]),
    );
    let mut python = python_thread(5002, "plugin", &[("callback", "/job/plugin.py:5".to_owned())]);
    python.owns_gil = true;
    let native = native_thread(5002, &["pthread_mutex_lock", "plugin_wait"], "S (sleeping)", "", None, 9);
    job.thread(2, native, Some(python));
    if holder_runs {
        job.rank(2).dump.as_mut().unwrap().stacktrace[1].cpu_time_ns = SECOND / 10;
    }
    job
}

#[test]
fn a_blocked_gil_holder_is_a_deadlock_and_a_running_one_is_not() {
    let verdict = gil(false).judge();
    expect(&verdict, Cause::GilDeadlock, &[2], Confidence::High);
    assert!(verdict.sentence.contains("thread plugin holds it"), "{}", verdict.sentence);
    assert_eq!(gil(true).judge().cause, Cause::MissingRank);
}

#[test]
fn a_gil_deadlock_is_found_although_the_main_thread_seems_idle() {
    let mut job = Job::with_world(1, 30);
    job.trigger(TriggerKind::Idle);
    job.set_stack(0, Stack::new(&[("serve", "/job/serve.py:9")], &["accept"]));
    let waits = native_thread(5002, &["pthread_cond_timedwait", "take_gil"], "S (sleeping)", "", None, 9);
    job.thread(0, waits, Some(python_thread(5002, "worker", &[("work", "/job/serve.py:20".to_owned())])));
    assert_eq!(job.judge().hang, HangEvidence::None, "a server that waits for a client");
    let dump = job.rank(0).dump.as_mut().expect("a dump");
    dump.py_stacktrace[0].owns_gil = true;
    dump.first_sample.as_mut().expect("two samples").py_stacktrace[0].owns_gil = true;
    let verdict = job.judge();
    expect(&verdict, Cause::GilDeadlock, &[0], Confidence::Medium);
    assert_eq!(verdict.hang, HangEvidence::WaitChain);
}

#[test]
fn a_blocked_gil_holder_counts_without_waiters_if_others_wait_for_its_rank() {
    let judged = |main: Stack| {
        let mut job = gil(false);
        let thread = job.rank(2).dump.as_ref().expect("a dump").clone();
        job.set_stack(2, main);
        let holder = PstackStacktrace { timed: Some(false), ..thread.stacktrace[1].clone() };
        job.thread(2, holder, Some(thread.py_stacktrace[1].clone()));
        job
    };
    let accepts = || Stack::new(&[("serve", "/job/serve.py:9")], &["accept"]);
    let verdict = judged(accepts()).judge();
    expect(&verdict, Cause::GilDeadlock, &[2], Confidence::Medium);
    assert!(verdict.sentence.contains("and no other thread can run Python code"), "{}", verdict.sentence);
    // It may be a long call, and nobody waits for the rank.
    let mut alone = Job::with_world(1, 30);
    alone.trigger(TriggerKind::Idle);
    alone.set_stack(0, accepts());
    let dump = judged(accepts()).rank(2).dump.clone().expect("a dump");
    alone.thread(0, dump.stacktrace[1].clone(), Some(dump.py_stacktrace[1].clone()));
    assert_ne!(alone.judge().cause, Cause::GilDeadlock, "{}", alone.judge().to_text());
}

#[test]
fn a_call_of_an_object_in_a_manager_process_is_not_a_loader() {
    let calls = |method: &'static str| {
        let frames = [
            ("_recv", "/usr/lib/python3.11/multiprocessing/connection.py:383"),
            ("recv", "/usr/lib/python3.11/multiprocessing/connection.py:250"),
            ("_callmethod", "/usr/lib/python3.11/multiprocessing/managers.py:822"),
            (method, "<string>:2"),
            ("next_shard", "/job/train.py:66"),
        ];
        behind(2, Stack::new(&frames, &["read", "os_read_impl"])).judge()
    };
    assert_eq!(calls("schedule").cause, Cause::MissingRank);
    assert_eq!(calls("get").cause, Cause::DataLoader, "a queue in a manager process");
}

#[test]
fn the_place_of_a_child_that_holds_up_its_rank_is_named() {
    let mut job = behind(2, Stack::new(&[("read_tokens", "/job/train.py:66")], &["read"]));
    reads_pipe_of(&mut job, 2, &[(1050, true)]);
    job.process(50, "python3 tokenize.py", Stack::new(&[("back_off", "/job/tokens.py:18")], &["clock_nanosleep"]));
    let verdict = job.judge();
    assert_eq!(culprits(&verdict), [(Some(2), 1050)], "{}", verdict.to_text());
    let expected = "; process 1050 is at tokens.py:18 in back_off (C function clock_nanosleep).";
    assert!(verdict.sentence.ends_with(expected), "{}", verdict.sentence);
    // The place is in the sentence already.
    let mut loads = behind(2, Stack::loader());
    reads_pipe_of(&mut loads, 2, &[(4242, true)]);
    loads.child(2, "python train.py", "S (sleeping)");
    let dump = loads.rank(2).dump.as_mut().expect("a dump");
    let frames = [
        ("back_off", "/job/tokens.py:18".to_owned()),
        ("run", "/usr/lib/python3.11/multiprocessing/process.py:108".to_owned()),
    ];
    for sample in &mut dump.children[0].samples {
        sample.py_stacktrace = vec![python_thread(4242, "MainThread", &frames)];
    }
    let back_off = Stack::new(&[("back_off", "/job/tokens.py:18")], &["clock_nanosleep"]);
    loads.process(3242, "python train.py", back_off);
    assert_eq!(loads.judge().sentence.matches("tokens.py:18").count(), 1, "{}", loads.judge().sentence);
    // It waits for a process that the sentence has not named.
    chained(&mut job, 0, AwaitedKind::Child, "", &[1051]);
    job.process(51, "python3 fetch.py", Stack::lock()).parent_pid = 1050;
    let verdict = job.judge();
    let expected = "; the wait ends at process 1051 (python3 fetch.py), which waits for a lock at";
    assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
    assert!(verdict.sentence.ends_with(", and it has no other Python thread."), "{}", verdict.sentence);
}

#[test]
fn ranks_that_wait_for_each_other_are_described_once() {
    let mut job = outside(&[1, 2]);
    for (rank, other) in [(1, 1002), (2, 1001)] {
        awaits(&mut job, rank, "flock", AwaitedKind::Lock, &[other]);
    }
    let verdict = job.judge();
    assert_eq!(verdict.culprits, [1, 2], "{}", verdict.to_text());
    assert_eq!(verdict.sentence.matches("rank 1 (process 1001)").count(), 1, "{}", verdict.sentence);
    assert!(!verdict.sentence.contains("C function flock"), "it is named: {}", verdict.sentence);
}

#[test]
fn a_gil_deadlock_needs_no_thread_that_waits_for_the_gil_if_its_holder_waits_without_an_end() {
    let judged = |timed: Option<bool>, holder: &'static str, others: bool| {
        let mut job = behind(2, Stack::new(&[("serve", "/job/serve.py:9")], &["accept"]));
        let mut python = python_thread(5002, "plugin", &[("flush", "/job/plugin.py:5".to_owned())]);
        python.owns_gil = true;
        let mut native = native_thread(5002, &[holder, "plugin_flush"], "S (sleeping)", "", None, 9);
        native.timed = timed;
        job.thread(2, native, Some(python));
        if !others {
            let dump = job.rank(2).dump.as_mut().expect("a dump");
            let first = dump.first_sample.as_mut().expect("two samples");
            for threads in [&mut dump.py_stacktrace, &mut first.py_stacktrace] {
                threads.retain(|thread| thread.owns_gil);
            }
        }
        job.judge()
    };
    let verdict = judged(Some(false), "pause", true);
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::GilDeadlock, &[2][..]), "{}", verdict.to_text());
    let expected = "thread plugin holds it and is blocked in pause at flush (plugin.py:5), and no other thread can run Python code";
    assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
    assert_ne!(judged(Some(true), "pause", true).cause, Cause::GilDeadlock, "it ends by itself");
    assert_ne!(judged(None, "pause", true).cause, Cause::GilDeadlock, "it may end by itself");
    assert_ne!(judged(Some(false), "cuStreamSynchronize", true).cause, Cause::GilDeadlock, "the device answers late");
    assert_ne!(judged(Some(false), "fsync", true).cause, Cause::GilDeadlock, "the storage answers late");
    assert_ne!(judged(Some(false), "pause", false).cause, Cause::GilDeadlock, "nobody needs the GIL");
}

#[test]
fn a_stripped_interpreter_waits_for_the_global_lock_below_its_public_functions() {
    let waits = |insides: &str, caller: &str| {
        let mut job = gil(false);
        let dump = job.rank(2).dump.as_mut().expect("the rank has a dump");
        let first = dump.first_sample.as_mut().expect("two samples");
        for thread in [&mut first.stacktrace[0], &mut dump.stacktrace[0]] {
            let modules = ["/lib/x86_64-linux-gnu/libc.so.6", insides, "/usr/bin/python3.11"];
            for (frame, module) in thread.frames.iter_mut().zip(modules) {
                frame.module = module.to_owned();
            }
            thread.frames[1].func_name = "??".to_owned();
            thread.frames[2].func_name = caller.to_owned();
        }
        job.judge().sentence.contains("another thread waits for it")
    };
    assert!(waits("/usr/bin/python3.11", "PyEval_RestoreThread"));
    assert!(waits("/usr/bin/python3.11", "_PyEval_EvalFrameDefault"));
    assert!(!waits("/usr/bin/python3.11", "PyThread_acquire_lock_timed"));
    assert!(!waits("/v/lib/plugin.so", "_PyEval_EvalFrameDefault"));
}

#[test]
fn a_process_that_is_to_become_the_missing_rank_is_the_culprit() {
    let judged = |change: &dyn Fn(&mut Job)| {
        let mut job = Job::new(3);
        for rank in 0..2 {
            job.creates(0x77, 3, rank, rank as i32);
            job.set_stack(rank, Stack::init());
            job.rank(rank).dump.as_mut().expect("a dump").parent_pid = 1040;
        }
        job.lost(2);
        job.process(40, "zygote", Stack::sleep()).parent_pid = 1;
        change(&mut job);
        job.judge()
    };
    let stopped = judged(&|job| {
        job.evidence.processes.clear();
        job.process(40, "zygote", Stack::sleep().state("T (stopped)", "")).parent_pid = 1;
    });
    assert_eq!(
        (stopped.cause, culprits(&stopped)),
        (Cause::ProcessStopped, vec![(None, 1040)]),
        "{}",
        stopped.to_text()
    );
    let expected = "Process 1040 (zygote), which belongs to the job and is not yet a rank, is stopped";
    assert!(stopped.sentence.starts_with(expected), "{}", stopped.sentence);
    // A worker that has not registered yet, beside a monitor.
    let locked = judged(&|job| {
        job.process(51, "worker 2", Stack::lock()).parent_pid = 1040;
        job.process(52, "monitor", Stack::sleep()).parent_pid = 1040;
    });
    assert_eq!((locked.cause, culprits(&locked)), (Cause::HostLock, vec![(None, 1051)]), "{}", locked.to_text());
    assert_eq!((&*stopped.culprits, &*locked.culprits), (&[0u32; 0][..], &[2][..]), "the parent could become any rank");
    let line = "process 1051 (worker 2), which belongs to the job, waits for a lock";
    assert!(locked.to_text().contains(line), "{}", locked.to_text());
    // A helper that waits for its tasks.
    let helper = judged(&|job| {
        job.process(51, "tracker", Stack::checkpoint()).parent_pid = 1040;
        chained(job, 1, AwaitedKind::Pipe, "", &[1000]);
    });
    assert_eq!(helper.cause, Cause::CommInit, "{}", helper.to_text());
    assert!(!culprits(&helper).contains(&(None, 1051)), "{}", helper.to_text());
}

#[test]
fn a_rank_that_waits_for_the_store_does_not_wait_for_the_rank_that_runs_it() {
    let mut job = behind(2, Stack::init());
    awaits(&mut job, 2, "c10d::TCPStore::doWait", AwaitedKind::Socket, &[1000]);
    let verdict = job.judge();
    assert_eq!(verdict.culprits, [2], "{}", verdict.to_text());
}

#[test]
fn a_rank_of_another_job_in_an_operation_is_not_the_end_of_a_chain() {
    let verdict = behind_engine(Stack::device_wait()).judge();
    assert_eq!(culprits(&verdict), [(Some(2), 1002)], "{}", verdict.to_text());
}

#[test]
fn a_worker_that_computes_clears_its_rank_for_two_timeouts() {
    let judged = |hang_timeout_ns: u64| {
        let mut job = behind(2, Stack::loader());
        job.evidence.hang_timeout_ns = hang_timeout_ns;
        job.child(2, "python3 train.py", "R (running)");
        let dump = job.rank(2).dump.as_mut().expect("a dump");
        let holders = vec![Holder { pid: 4242, child: true, ..Default::default() }];
        dump.stacktrace[0].awaited = Some(Awaited { kind: AwaitedKind::Pipe.into(), holders, ..Default::default() });
        let last = &mut dump.children[0].samples[1];
        (last.captured_unix_ns, last.cpu_time_ns) = (2 * SECOND, 2 * SECOND);
        let verdict = job.judge();
        assert_eq!(
            (verdict.cause, verdict.confidence),
            (Cause::DataLoader, Confidence::Medium),
            "{}",
            verdict.to_text()
        );
        verdict.hang
    };
    assert_eq!(judged(40 * SECOND), HangEvidence::None);
    assert_eq!(judged(20 * SECOND), HangEvidence::PendingOperation);
}

#[test]
fn ranks_of_a_silent_job_that_wait_for_each_other_hang() {
    let judged = |timed: bool, ranks: u32| {
        let mut job = Job::with_world(ranks, 30);
        job.trigger(TriggerKind::Idle);
        for rank in 0..ranks {
            awaits(&mut job, rank, "recv", AwaitedKind::Socket, &[if rank == 1 { 1000 } else { 1001 }]);
            job.rank(rank).dump.as_mut().expect("a dump").stacktrace[0].timed = Some(timed);
        }
        job.judge()
    };
    for (ranks, victims) in [(2, &[][..]), (3, &[2][..])] {
        let hangs = judged(false, ranks);
        assert_eq!((&hangs.culprits[..], &hangs.victims[..]), (&[0, 1][..], victims), "{}", hangs.to_text());
        assert_eq!((hangs.hang, hangs.confidence), (HangEvidence::WaitChain, Confidence::Medium));
        assert!(hangs.sentence.starts_with("Ranks 0-1 wait for each other: rank 0 is at"), "{}", hangs.sentence);
    }
    assert_eq!(judged(true, 3).hang, HangEvidence::None);
    // Ranks, and a process whose messages they wait for. With one rank, it may be the front end of
    // a notebook if it has started the rank or polls.
    let (idle, hangs) = (HangEvidence::None, HangEvidence::WaitChain);
    for (ranks, is_parent, call, hang) in
        [(1, true, "recv", idle), (1, false, "poll", idle), (1, false, "recv", hangs), (2, true, "recv", hangs)]
    {
        let mut job = Job::with_world(ranks, 30);
        job.trigger(TriggerKind::Idle);
        for rank in 0..ranks {
            awaits(&mut job, rank, "recv", AwaitedKind::Socket, &[1050]);
            let dump = job.rank(rank).dump.as_mut().expect("a dump");
            dump.stacktrace[0].timed = Some(false);
            dump.parent_pid = if is_parent { 1050 } else { 1 };
        }
        job.process(50, "engine", Stack::new(&[("ask", "/job/client.py:7")], &[call])).stacktrace[0].timed =
            Some(false);
        chained(&mut job, 0, AwaitedKind::Socket, "", &[1000]);
        let verdict = job.judge();
        assert_eq!(verdict.hang, hang, "{}", verdict.to_text());
        let named = culprits(&verdict);
        assert_eq!(named, if hang == idle { vec![] } else { vec![(Some(0), 1000), (None, 1050)] });
    }
}

#[test]
fn a_rank_in_a_lock_that_it_shares_with_others_stays_beside_another_culprit() {
    let mut job = outside(&[1, 2]);
    job.set_stack(2, Stack::pause());
    let shares_with = |job: &mut Job, pid: i32| {
        job.set_stack(1, shared_lock());
        let dump = job.rank(1).dump.as_mut().expect("a dump");
        let holders = vec![Holder { pid, name: "python3".into(), child: false, ..Holder::default() }];
        let kind = AwaitedKind::SharedMemory.into();
        dump.stacktrace[0].awaited = Some(Awaited { kind, holders, ..Default::default() });
        job.judge().culprits
    };
    assert_eq!(shares_with(&mut job, 777), [1, 2], "with another process");
    assert_eq!(shares_with(&mut job, 1002), [2], "with the other culprit");
}

#[test]
fn a_polling_rank_with_equal_evidence_stays_beside_another_culprit() {
    let mut job = Job::with_world(4, 30);
    job.enter(0x77, 0, Op::AllReduce);
    job.enter(0x77, 1, Op::AllReduce);
    job.set_stack(2, Stack::sleep().with(|stack| stack.switches = 50));
    job.set_stack(3, Stack::new(&[("wait_for_file", "/job/data.py:7")], &["clock_nanosleep", "time_sleep"]));
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[2, 3], Confidence::Medium);
    assert!(verdict.sentence.contains("train.py:99") && verdict.sentence.contains("data.py:7"), "{}", verdict.sentence);
}

#[test]
fn a_rank_that_alone_retries_seldom_stays_beside_a_stuck_rank_and_a_dead_one() {
    let retries = Stack::sleep().with(|stack| stack.switches = 7);
    let mut job = Job::with_world(5, 30);
    job.enter(0x77, 0, Op::AllReduce);
    job.enter(0x77, 1, Op::AllReduce);
    job.enter(0x77, 4, Op::AllReduce);
    job.set_stack(2, retries.clone());
    job.set_stack(3, Stack::lock());
    expect(&job.judge(), Cause::HostLock, &[2, 3], Confidence::Medium);
    let mut dead = job.clone();
    dead.dies(3, "killed by SIGKILL");
    expect(&dead.judge(), Cause::ProcessDead, &[2, 3], Confidence::Medium);
    // Two ranks that poll may wait for the same thing.
    let mut two = Job::with_world(5, 30);
    two.enter(0x77, 0, Op::AllReduce);
    two.enter(0x77, 1, Op::AllReduce);
    two.set_stack(2, retries.clone());
    two.set_stack(4, retries);
    two.set_stack(3, Stack::lock());
    expect(&two.judge(), Cause::HostLock, &[3], Confidence::Medium);
}

#[test]
fn a_compiler_that_stands_still_is_a_hang() {
    let builds = Stack::new(&[("build", "/job/train.py:5")], &["wait4"]);
    let with_compiler = |cpu_ns: u64| {
        let mut job = behind(1, builds.clone());
        job.child(1, "/usr/local/cuda/bin/nvcc -c x.cu", "S (sleeping)");
        let samples = &mut job.rank(1).dump.as_mut().expect("a dump").children[0].samples;
        (samples[0].captured_unix_ns, samples[1].captured_unix_ns) = (100 * SECOND, 105 * SECOND);
        samples[1].cpu_time_ns = cpu_ns;
        job.judge()
    };
    expect(&with_compiler(4 * SECOND), Cause::Compile, &[1], Confidence::Medium);
    let verdict = with_compiler(0);
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::MissingRank, &[1][..]), "{}", verdict.sentence);
    let inductor = Stack::new(
        &[("compile_fx", "/v/site-packages/torch/_inductor/compile_fx.py:9"), ("main", "/job/train.py:5")],
        &["pthread_mutex_lock", "llvm::PassManager::run"],
    );
    let verdict = behind(1, inductor.clone()).judge();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::MissingRank, &[1][..]), "{}", verdict.sentence);
    // It may wait for the build of another rank, which goes on.
    let mut job = Job::with_world(4, 30);
    job.enter(0x77, 0, Op::AllReduce);
    job.enter(0x77, 3, Op::AllReduce);
    job.set_stack(1, inductor.clone());
    job.set_stack(2, inductor.busy(4 * SECOND));
    expect(&job.judge(), Cause::Compile, &[1, 2], Confidence::Medium);
}

#[test]
fn a_lock_is_named_with_its_holder_or_what_other_threads_do() {
    let mut job = behind(2, Stack::new(&[("update", "/job/train.py:55")], &["pthread_mutex_lock"]));
    let verdict = job.judge();
    expect(&verdict, Cause::HostLock, &[2], Confidence::Medium);
    assert!(verdict.sentence.contains("a lock or a thread of its own process"), "{}", verdict.sentence);
    let frames = [("upload", "/job/s3.py:30".to_owned()), ("run", "/usr/lib/python3.11/threading.py:1045".to_owned())];
    // A thread that waits for room in a queue holds up others.
    let mut full = job.clone();
    let puts = [
        ("Condition.wait", "/usr/lib/python3.11/threading.py:320".to_owned()),
        ("Queue.put", "/usr/lib/python3.11/queue.py:140".to_owned()),
        ("report", "/job/stats.py:22".to_owned()),
    ];
    let native = native_thread(5004, &["futex_wait", "sem_wait"], "S (sleeping)", "", None, 9);
    full.thread(2, native, Some(python_thread(5004, "reporter", &puts)));
    let other = "while its thread reporter waits for a lock at report (stats.py:22)";
    assert!(full.judge().sentence.contains(other), "{}", full.judge().sentence);
    let nested =
        [("tokenize", "/job/tokens.py:7".to_owned()), ("run", "/usr/lib/python3.11/threading.py:1045".to_owned())];
    let native = native_thread(5003, &["futex_wait", "pthread_mutex_lock"], "S (sleeping)", "", None, 9);
    job.thread(2, native, Some(python_thread(5003, "executor_0", &nested)));
    let other = "while its thread executor_0 waits for a lock at tokenize (tokens.py:7)";
    assert!(job.judge().sentence.contains(other), "{}", job.judge().sentence);
    // A thread that runs no code of the program waits for the network all the time.
    let mut served = job.clone();
    let serves = [("_serve", "/opt/venv/lib/python3.11/site-packages/grpc/_server.py:1314".to_owned())];
    let native = native_thread(5001, &["epoll_wait"], "S (sleeping)", "", None, 9);
    served.thread(2, native, Some(python_thread(5001, "Thread-1 (_serve)", &serves)));
    assert!(served.judge().sentence.contains(other), "{}", served.judge().sentence);
    let native = native_thread(5002, &["recv", "sock_recv"], "S (sleeping)", "", None, 9);
    job.thread(2, native, Some(python_thread(5002, "uploader", &frames)));
    let verdict = job.judge();
    let other = "while its thread uploader waits for the network at upload (s3.py:30)";
    assert!(verdict.sentence.contains(other), "{}", verdict.sentence);
    // A loop that only asyncio runs is where its tasks wait.
    let mut looping = job.clone();
    let dump = looping.rank(2).dump.as_mut().expect("a dump");
    let library = "/usr/lib/python3.11/asyncio/base_events.py:607".to_owned();
    let uploader = dump.py_stacktrace.last_mut().expect("a thread");
    uploader.frames = python_thread(5002, "", &[("BaseEventLoop.run_forever", library)]).frames;
    uploader.suspended = vec![task("Task-1", "", &[("receive", "/job/labels.py:9"), ("main", "/job/labels.py:11")])];
    let other = "while its thread uploader waits in an event loop at receive (labels.py:9)";
    assert!(looping.judge().sentence.contains(other), "{}", looping.judge().sentence);
    let dump = job.rank(2).dump.as_mut().expect("a dump");
    let (kind, name, object) = (AwaitedKind::Mutex.into(), "uploader".into(), "5003".into());
    let holders = vec![Holder { pid: dump.pid, name: "python".into(), child: false, ..Holder::default() }];
    dump.stacktrace[0].awaited = Some(Awaited { kind, name, object, holders });
    let verdict = job.judge();
    assert!(verdict.sentence.contains("waits for a lock that its thread uploader holds"), "{}", verdict.sentence);
    assert!(verdict.sentence.contains("waits for a lock at tokenize (tokens.py:7)"), "{}", verdict.sentence);
    assert!(!verdict.sentence.contains("own process"), "{}", verdict.sentence);
}

#[test]
fn nothing_is_ruled_out_without_evidence() {
    let ruled_out = |verdict: &Verdict| verdict.ruled_out.iter().map(|found| found.cause).collect::<Vec<_>>();
    let job = behind(2, Stack::pause());
    let all = ruled_out(&job.judge());
    for cause in [Cause::ProcessStopped, Cause::DState, Cause::DataLoader, Cause::StorageIo, Cause::HostLock] {
        assert!(all.contains(&cause), "{cause} in {all:?}");
    }
    // Another rank may be stopped.
    let mut other = job.clone();
    other.no_dump(1);
    let found = ruled_out(&other.judge());
    assert!(!found.contains(&Cause::ProcessStopped) && found.contains(&Cause::DState), "{found:?}");
    // One of two culprits has no stack.
    let mut two = Job::with_world(4, 30);
    two.enter(0x77, 0, Op::AllReduce);
    two.enter(0x77, 1, Op::AllReduce);
    two.set_stack(2, Stack::pause());
    two.no_dump(3);
    let found = ruled_out(&two.judge());
    for cause in [Cause::DState, Cause::DataLoader, Cause::StorageIo, Cause::HostLock, Cause::GilDeadlock] {
        assert!(!found.contains(&cause), "{cause} in {found:?}");
    }
    // A device may be blocked on a rank without a record.
    let mut unrecorded = job;
    unrecorded.rank(1).flight = None;
    assert!(!ruled_out(&unrecorded.judge()).contains(&Cause::KernelHang));
}

#[test]
fn a_barrier_over_the_store_belongs_to_a_creation_only_if_a_creation_calls_it() {
    let file = "/v/site-packages/torch/distributed/distributed_c10d.py:9";
    let native: &[&'static str] = &["poll", "c10d::TCPStore::wait"];
    let barrier = |outer: &[(&'static str, &str)]| {
        let frames = [&[("_store_based_barrier", file)][..], outer, &[("main", "/job/train.py:5")]].concat();
        let verdict = behind(1, Stack::new(&frames, native)).judge();
        verdict.ranks.iter().find(|group| group.ranks == [1]).map(|group| group.activity)
    };
    assert_eq!(barrier(&[("init_process_group", file)]), Some(Activity::CommInit));
    let alone = Stack::new(&[("_store_based_barrier", file), ("main", "/job/train.py:5")], native);
    let job = behind(1, alone);
    assert!(!job.judge().sentence.contains("creation of a communicator"), "{}", job.judge().sentence);
}

/// A task of asyncio, innermost frame first. It awaits a future, unless `awaits` says more.
fn task(name: &str, awaits: &str, frames: &[(&'static str, &str)]) -> PySuspended {
    let frames: Vec<_> = frames.iter().map(|(function, file)| (*function, (*file).to_owned())).collect();
    PySuspended {
        kind: PySuspendedKind::Task.into(),
        name: name.into(),
        frames: python_thread(1, "", &frames).frames,
        awaits: if awaits.is_empty() { "a future".into() } else { awaits.into() },
    }
}

const LOCK: (&str, &str) = ("Lock.acquire", "/usr/lib/python3.11/asyncio/locks.py:114");
const ENTERS: (&str, &str) = ("_ContextManagerMixin.__aenter__", "/usr/lib/python3.11/asyncio/locks.py:15");
const SEMAPHORE: (&str, &str) = ("Semaphore.acquire", "/usr/lib/python3.11/asyncio/locks.py:387");
const EVENT: (&str, &str) = ("Event.wait", "/usr/lib/python3.11/asyncio/locks.py:213");
const GET: (&str, &str) = ("Queue.get", "/usr/lib/python3.11/asyncio/queues.py:158");
const JOIN: (&str, &str) = ("Queue.join", "/usr/lib/python3.11/asyncio/queues.py:215");
const READ: (&str, &str) = ("StreamReader.readline", "/usr/lib/python3.11/asyncio/streams.py:545");
const SERVES: (&str, &str) = ("Server.serve_forever", "/usr/lib/python3.11/asyncio/base_events.py:372");
const INSERT: (&str, &str) = ("insert", "/srv/gateway.py:31");

/// The main thread of a process runs an event loop with these tasks.
fn runs_tasks(dump: &mut Stacktrace, tasks: &[PySuspended]) {
    dump.py_stacktrace[0].suspended = tasks.to_vec();
    dump.first_sample.as_mut().expect("two samples").py_stacktrace[0].suspended = tasks.to_vec();
}

/// Rank 2, or all ranks of an idle job, wait for a server whose event loop has these tasks.
fn behind_event_loop(idle: bool, tasks: &[PySuspended], timed: bool) -> Verdict {
    let mut job = if idle { Job::with_world(4, 30) } else { behind(2, Stack::sleep()) };
    if idle {
        job.trigger(TriggerKind::Idle);
    }
    for rank in if idle { 0..4 } else { 2..3 } {
        awaits(&mut job, rank, "recv", AwaitedKind::Socket, &[1050]);
    }
    let poll = [("select", "/usr/lib/python3.11/selectors.py:468"), ("main", "/srv/gateway.py:90")];
    let dump = job.process(50, "python3 /srv/gateway.py", Stack::new(&poll, &["epoll_wait"]));
    dump.stacktrace[0].timed = Some(timed);
    runs_tasks(dump, tasks);
    chained(&mut job, 0, AwaitedKind::Several, "anybody who connects to 127.0.0.1:8000", &[]);
    job.judge()
}

#[test]
fn a_server_whose_tasks_wait_only_for_each_other_is_the_culprit() {
    let main = task("Task-1", "", &[SERVES, ("main", "/srv/gateway.py:90")]);
    let locked = task("Task-2", "", &[LOCK, ENTERS, INSERT]);
    let waits = task("Task-3", "task 'publish'", &[("reshard", "/srv/gateway.py:50")]);
    let publish = task("publish", "", &[EVENT, ("publish", "/srv/gateway.py:60")]);
    for idle in [false, true] {
        let verdict = behind_event_loop(idle, &[main.clone(), locked.clone(), waits.clone(), publish.clone()], false);
        assert_eq!((verdict.cause, culprits(&verdict)), (Cause::HostLock, vec![(None, 1050)]), "{}", verdict.to_text());
        let expected = "waits for a lock at gateway.py:31 in insert (C function epoll_wait), \
                    while its tasks of asyncio wait only for each other";
        assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
    }
    for stuck in [&[SEMAPHORE, INSERT][..], &[EVENT, JOIN, INSERT], &[JOIN, INSERT]] {
        let verdict = behind_event_loop(true, &[main.clone(), task("Task-2", "", stuck)], false);
        assert_eq!(culprits(&verdict), [(None, 1050)], "{stuck:?} {}", verdict.to_text());
    }
}

#[test]
fn a_server_with_a_task_that_something_outside_may_wake_proves_no_hang() {
    let main = task("Task-1", "", &[SERVES, ("main", "/srv/gateway.py:90")]);
    let locked = task("Task-2", "", &[LOCK, ENTERS, INSERT]);
    let semaphore = task("Task-2", "", &[SEMAPHORE, INSERT]);
    let mut next = task("Task-3", "", &[("fetch", "/srv/gateway.py:70")]);
    next.awaits = String::new();
    for tasks in [
        vec![],
        vec![main.clone()],
        vec![main.clone(), task("Task-3", "", &[GET, ("work", "/srv/gateway.py:70")])],
        // It waits for a client or for a thread, or runs next.
        vec![locked.clone(), task("Task-3", "", &[READ, ("serve", "/srv/gateway.py:20")])],
        vec![locked.clone(), task("Task-3", "", &[("fetch", "/srv/gateway.py:70")])],
        vec![locked.clone(), next],
        // A producer that waits until somebody takes what it has made, and a worker without orders.
        vec![semaphore, task("Task-3", "", &[GET, ("work", "/srv/gateway.py:70")])],
        // There may be others.
        vec![locked.clone(); 256],
    ] {
        let verdict = behind_event_loop(true, &tasks, false);
        assert_eq!((culprits(&verdict), verdict.hang), (vec![], HangEvidence::None), "{}", verdict.to_text());
    }
    // A timer may wake it.
    let timed = behind_event_loop(true, &[main, locked], true);
    assert_eq!((culprits(&timed), timed.hang), (vec![], HangEvidence::None), "{}", timed.to_text());
}

#[test]
fn a_server_that_waits_for_an_answer_from_itself_is_the_culprit() {
    let judged = |native: &'static str, holder: i32, timed: bool| {
        let mut job = Job::with_world(4, 30);
        job.trigger(TriggerKind::Idle);
        for rank in 0..4 {
            awaits(&mut job, rank, "recv", AwaitedKind::Socket, &[1050]);
        }
        let stack = Stack::new(&[("fetch", "/srv/metadata.py:12")], &[native]);
        job.process(50, "python3 /srv/metadata.py", stack).stacktrace[0].timed = Some(timed);
        chained(&mut job, 0, AwaitedKind::Socket, "127.0.0.1:8000", &[holder]);
        job.judge()
    };
    let verdict = judged("recv", 1050, false);
    assert_eq!((verdict.cause, culprits(&verdict)), (Cause::MissingRank, vec![(None, 1050)]), "{}", verdict.to_text());
    let expected = "waits for an answer from itself at metadata.py:12 in fetch (C function recv)";
    assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
    for (native, holder, timed) in [("recv", 1050, true), ("recv", 1099, false), ("epoll_wait", 1050, false)] {
        let verdict = judged(native, holder, timed);
        assert_eq!((culprits(&verdict), verdict.hang), (vec![], HangEvidence::None), "{}", verdict.to_text());
    }
}

#[test]
fn a_process_that_leaves_unread_what_another_one_sends_to_it_is_the_culprit() {
    let mut job = behind(2, Stack::sleep());
    awaits(&mut job, 2, "read", AwaitedKind::Pipe, &[1050]);
    let warns = Stack::new(&[("warn", "/srv/simulate.py:9")], &["write"]).with(|stack| stack.syscall = Some(1));
    job.process(50, "python3 /srv/simulate.py", warns).parent_pid = 1002;
    chained(&mut job, 0, AwaitedKind::Pipe, "", &[1002]);
    let verdict = job.judge();
    assert_eq!(
        (verdict.cause, culprits(&verdict)),
        (Cause::MissingRank, vec![(Some(2), 1002)]),
        "{}",
        verdict.to_text()
    );
    let expected = "Rank 2 at train.py:7 in fetch_index (C function read) waits for process 1050 (python3 simulate.py), \
                which sends to it at simulate.py:9 in warn (C function write); it does not receive that";
    assert!(verdict.sentence.starts_with(expected), "{}", verdict.sentence);
    // Both send.
    awaits(&mut job, 2, "write", AwaitedKind::Pipe, &[1050]);
    assert_eq!(culprits(&job.judge()), [(Some(2), 1002), (None, 1050)]);
}

#[test]
fn a_server_with_a_thread_for_each_client_is_behind_if_they_wait_for_different_locks_and_none_reads() {
    let judged = |file: &'static str, second: &'static str, reads: &[i32]| {
        let mut job = behind(2, Stack::sleep());
        awaits(&mut job, 2, "recv", AwaitedKind::Socket, &[1050]);
        let accept = Stack::new(&[("serve", "/srv/replay.py:90")], &["accept4"]);
        job.process(50, "python3 /srv/replay.py", accept);
        chained(&mut job, 0, AwaitedKind::Socket, "anybody who connects to replay.sock", &[]);
        let dump = job.evidence.processes[0].dump.as_mut().expect("a dump");
        let mut add = |tid: u32, native: &'static str, place: &str, holders: &[i32]| {
            let mut thread = native_thread(tid, &[native], "S (sleeping)", "", None, 9);
            let holder = |pid: &i32| Holder { pid: *pid, ..Default::default() };
            thread.awaited = (!holders.is_empty()).then(|| Awaited {
                kind: AwaitedKind::Socket.into(),
                name: "replay.sock".into(),
                holders: holders.iter().map(holder).collect(),
                ..Default::default()
            });
            let python = python_thread(tid, "serve", &[("wait", file.to_owned()), ("serve", place.to_owned())]);
            let first = dump.first_sample.as_mut().expect("two samples");
            first.stacktrace.push(thread.clone());
            first.py_stacktrace.push(python.clone());
            dump.stacktrace.push(thread);
            dump.py_stacktrace.push(python);
        };
        add(1051, "sem_wait", "/srv/replay.py:31", &[]);
        add(1052, "sem_wait", second, &[]);
        for (index, pid) in reads.iter().enumerate() {
            add(1060 + index as u32, "recv", "/srv/replay.py:60", &[*pid]);
        }
        culprits(&job.judge())
    };
    const CONDITION: &str = "/usr/lib/python3.11/threading.py:327";
    const OTHER: &str = "/srv/replay.py:44";
    assert_eq!(judged(CONDITION, OTHER, &[]), [(None, 1050)]);
    for (file, second, reads, why) in [
        (CONDITION, "/srv/replay.py:31", &[][..], "both wait for a key that another client sets"),
        (CONDITION, OTHER, &[1002], "it waits for the next request"),
        (CONDITION, OTHER, &[1003], "another client may set a key"),
        ("/usr/lib/python3.11/queue.py:171", OTHER, &[], "they wait for orders"),
    ] {
        assert_eq!(judged(file, second, reads), [(Some(2), 1002)], "{why}");
    }
}

#[test]
fn a_request_that_nobody_can_end_proves_a_hang_and_a_long_poll_does_not() {
    const SERVES_CLIENT: &str = "/usr/lib/python3.11/socketserver.py:691";
    let judged = |alone: [bool; 2], root: &'static str, listens: bool| {
        let mut job = Job::with_world(4, 30);
        job.trigger(TriggerKind::Idle);
        for rank in 0..4 {
            awaits(&mut job, rank, "recv", AwaitedKind::Socket, &[1050]);
        }
        // The main thread goes on.
        let probes = Stack::new(&[("probe_health", "/srv/front.py:90")], &["clock_nanosleep"]).busy(SECOND);
        job.process(50, "python3 /srv/front.py", probes.was_at("probe_health", "/srv/front.py:88"));
        if listens {
            chained(&mut job, 0, AwaitedKind::Socket, "anybody who connects to 127.0.0.1:8000", &[]);
        }
        let dump = job.evidence.processes[0].dump.as_mut().expect("a dump");
        let frames = [
            ("Event.wait", "/usr/lib/python3.11/threading.py:629".to_owned()),
            ("tokenize", "/srv/front.py:31".to_owned()),
            ("process_request_thread", root.to_owned()),
        ];
        let python = |awaits_alone| PySpyStacktrace { awaits_alone, ..python_thread(1051, "request", &frames) };
        let first = dump.first_sample.as_mut().expect("two samples");
        first.py_stacktrace.push(python(alone[0]));
        dump.py_stacktrace.push(python(alone[1]));
        job.judge()
    };
    for listens in [false, true] {
        let verdict = judged([true, true], SERVES_CLIENT, listens);
        let found = (verdict.cause, verdict.hang, culprits(&verdict));
        assert_eq!(found, (Cause::HostLock, HangEvidence::WaitChain, vec![(None, 1050)]), "{}", verdict.to_text());
        let expected = "its thread at front.py:31 in tokenize waits for an object to which no other thread refers";
        assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
        for (alone, root, why) in [
            ([false, false], SERVES_CLIENT, "another thread may set the event"),
            ([false, true], SERVES_CLIENT, "the thread has just begun to wait"),
            ([true, true], "/usr/lib/python3.11/threading.py:982", "a thread may be there to wait forever"),
        ] {
            let verdict = judged(alone, root, listens);
            assert_eq!(
                (culprits(&verdict), verdict.hang),
                (vec![], HangEvidence::None),
                "{why}: {}",
                verdict.to_text()
            );
        }
    }
}
