//! The evidence that a job hangs, and idle jobs: notebooks, parameter servers, programs that sleep
//! until they are needed. `XPU_TIMER_HANG_KILL` ends ranks only on such evidence.

use super::{
    expect,
    processes::{awaits, chained, culprits, reader_thread},
};
use crate::{
    Cause, Confidence, HangEvidence, Verdict,
    testing::{Job, NOW, SECOND, Stack, native_thread, python_thread},
};
use xpu_timer_proto::{
    server::{Awaited, AwaitedKind, Holder},
    v1::{Op, OpKind, Operation, TriggerKind},
};

/// A job without a pending operation in which nothing was launched for a long time.
fn quiet(stack: impl Fn(u32) -> Stack) -> Job {
    let mut job = Job::with_world(4, 30);
    job.trigger(TriggerKind::Idle);
    (0..4).for_each(|rank| job.set_stack(rank, stack(rank)));
    job
}

/// Rank 2 has not entered the all_reduce in which the others wait for longer than the timeout.
fn waits_for(stack: Stack) -> Job {
    let mut job = Job::with_world(4, 30);
    for rank in [0, 1, 3] {
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.set_stack(2, stack);
    job
}

fn hang(job: &Job) -> HangEvidence {
    job.judge().hang
}

#[test]
fn a_job_that_reads_or_computes_is_not_a_hang() {
    let reads = || Stack::checkpoint().moving_bytes(1 << 30);
    assert_eq!(hang(&quiet(|_| reads())), HangEvidence::None, "all ranks read their shards");
    expect(&quiet(|_| reads()).judge(), Cause::NotAHang, &[], Confidence::Medium);
    assert_eq!(hang(&quiet(|rank| if rank == 0 { reads() } else { Stack::sleep() })), HangEvidence::None);
    let evaluates = || Stack::sleep().busy(5 * SECOND).was_at("evaluate", "/job/train.py:98");
    assert_eq!(hang(&quiet(|_| evaluates())), HangEvidence::None, "all ranks evaluate on their processors");
    assert_eq!(hang(&quiet(|_| Stack::device_wait())), HangEvidence::None, "a loop of memset and synchronize");
}

#[test]
fn a_job_that_waits_for_work_is_not_a_hang() {
    for stack in [Stack::sleep, Stack::pause, Stack::lock, Stack::loader] {
        assert_eq!(hang(&quiet(|_| stack())), HangEvidence::None);
    }
}

#[test]
fn ranks_that_wait_for_a_progressing_rank_do_not_hang() {
    let loads = Stack::checkpoint().moving_bytes(1 << 30);
    assert_eq!(hang(&waits_for(loads)), HangEvidence::None);
    let evaluates = Stack::sleep().busy(5 * SECOND).was_at("evaluate", "/job/train.py:98");
    assert_eq!(hang(&waits_for(evaluates)), HangEvidence::None);
}

#[test]
fn an_operation_that_is_pending_past_the_timeout_is_a_hang() {
    let job = waits_for(Stack::sleep());
    assert_eq!(hang(&job), HangEvidence::PendingOperation);
    assert_eq!(job.judge().hanging_ranks(), [0, 1, 2, 3]);
    let mut asked_early = waits_for(Stack::sleep());
    asked_early.trigger(TriggerKind::Manual);
    asked_early.evidence.hang_timeout_ns = 600 * SECOND;
    assert_eq!(hang(&asked_early), HangEvidence::None, "somebody asked for a dump of a job that works");
}

#[test]
fn a_manual_dump_of_ranks_that_wait_for_a_stopped_one_does_not_prove_a_hang() {
    let waiting = |trigger| {
        let mut job = waits_for(Stack::sleep().state("T (stopped)", ""));
        job.trigger(trigger);
        job.evidence.hang_timeout_ns = 600 * SECOND;
        hang(&job)
    };
    assert_eq!(waiting(TriggerKind::Idle), HangEvidence::WaitChain);
    assert_eq!(waiting(TriggerKind::Manual), HangEvidence::None);
}

#[test]
fn a_key_that_a_server_waits_for_is_not_a_hang() {
    let mut job = quiet(|_| Stack::sleep());
    for rank in 0..4 {
        let operation = Job::operation(0, 0, Op::CommInit);
        let function = "c10d::TCPStore::get".into();
        job.push(rank, Operation { kind: OpKind::HostCall.into(), returned_ns: 0, dtype: 0, function, ..operation });
    }
    let verdict = job.judge();
    assert_eq!((verdict.cause, verdict.hang), (Cause::Unknown, HangEvidence::None), "{}", verdict.sentence);
}

#[test]
fn a_chain_that_ends_in_a_dead_rank_is_a_hang() {
    let mut job = waits_for(Stack::sleep());
    job.dies(2, "killed by SIGKILL");
    job.evidence.hang_timeout_ns = 600 * SECOND;
    job.trigger(TriggerKind::Death);
    assert_eq!(hang(&job), HangEvidence::WaitChain);
    assert_eq!(job.judge().culprits, [2]);
}

/// Waits in a pool of worker processes for their results.
fn pool() -> Stack {
    Stack::new(
        &[
            ("wait", "/usr/lib/python3.11/threading.py:320"),
            ("get", "/usr/lib/python3.11/multiprocessing/pool.py:767"),
            ("map", "/usr/lib/python3.11/multiprocessing/pool.py:367"),
            ("tokenize", "/job/data.py:40"),
            ("main", "/job/train.py:133"),
        ],
        &["__futex_abstimed_wait_common64", "PyThread_acquire_lock_timed"],
    )
}

/// A worker process of rank 2 with this processor time and these bytes in the five seconds between
/// the samples.
fn worker(job: &mut Job, cpu_ns: u64, bytes: u64) {
    job.child(2, "python3 train.py", if cpu_ns > 0 { "R (running)" } else { "S (sleeping)" });
    let dump = job.rank(2).dump.as_mut().expect("a dump");
    let samples = &mut dump.children.last_mut().expect("a child").samples;
    (samples[0].captured_unix_ns, samples[0].cpu_time_ns, samples[0].io_bytes) = (100 * SECOND, SECOND, 1000);
    (samples[1].captured_unix_ns, samples[1].cpu_time_ns) = (105 * SECOND, SECOND + cpu_ns);
    samples[1].io_bytes = 1000 + bytes;
}

#[test]
fn ranks_that_wait_for_one_whose_workers_go_on_do_not_hang() {
    let with = |stack: Stack, cpu_ns: u64, bytes: u64| {
        let mut job = waits_for(stack);
        worker(&mut job, cpu_ns, bytes);
        job.judge()
    };
    assert_eq!(with(pool(), 5 * SECOND, 40).hang, HangEvidence::None, "tokenization hands over little");
    assert_eq!(with(pool(), 0, 1 << 20).hang, HangEvidence::None, "a copy needs no processor");
    let loops = with(pool(), 5 * SECOND, 0);
    assert_eq!((loops.hang, loops.helpers_busy), (HangEvidence::PendingOperation, true), "it may be an endless loop");
    let idle = with(pool(), 0, 40);
    assert_eq!((idle.hang, idle.helpers_busy), (HangEvidence::PendingOperation, false));
    // It stays in one function: after two timeouts it may be an endless loop.
    let moves = |function: &'static str, hang_timeout_ns: u64| {
        let mut job = waits_for(pool());
        worker(&mut job, 5 * SECOND, 0);
        let dump = job.rank(2).dump.as_mut().expect("a dump");
        let samples = &mut dump.children.last_mut().expect("a child").samples;
        for (sample, function, line) in [(0, "augment", 12), (1, function, 13)] {
            let frames =
                [("get", "/usr/lib/python3.11/os.py:9".to_owned()), (function, format!("/job/data.py:{line}"))];
            samples[sample].py_stacktrace = vec![python_thread(4300, "MainThread", &frames)];
        }
        job.evidence.hang_timeout_ns = hang_timeout_ns;
        job.judge()
    };
    assert_eq!(moves("augment", 40 * SECOND).hang, HangEvidence::None);
    let loops = moves("augment", 20 * SECOND);
    assert_eq!((loops.hang, loops.helpers_busy), (HangEvidence::PendingOperation, true));
    assert_eq!(moves("tokenize", 20 * SECOND).hang, HangEvidence::None);
    // A child process does not matter to a rank that waits for a lock of its own.
    let beside = with(Stack::lock(), 5 * SECOND, 1 << 20);
    assert_eq!((beside.hang, beside.helpers_busy), (HangEvidence::PendingOperation, false));
}

#[test]
fn ranks_that_wait_for_one_whose_thread_goes_on_do_not_hang() {
    let with = |line: &str, cpu_ns: u64| {
        let mut job = waits_for(Stack::lock());
        let frames = [("evaluate", "/job/eval.py:9".to_owned())];
        job.thread(2, native_thread(4300, &["_PyEval_EvalFrameDefault"], "S (sleeping)", "", None, 50), None);
        let dump = job.rank(2).dump.as_mut().expect("a dump");
        dump.stacktrace.last_mut().expect("a thread").cpu_time_ns = cpu_ns;
        dump.py_stacktrace.push(python_thread(4300, "evaluator", &frames));
        let earlier = python_thread(4300, "evaluator", &[("evaluate", line.to_owned())]);
        dump.first_sample.as_mut().expect("two samples").py_stacktrace.push(earlier);
        job.judge()
    };
    assert_eq!(with("/job/eval.py:12", 5 * SECOND).hang, HangEvidence::None);
    let loops = with("/job/eval.py:9", 5 * SECOND);
    assert_eq!((loops.hang, loops.helpers_busy), (HangEvidence::PendingOperation, true));
    assert_eq!(
        with("/job/eval.py:12", SECOND / 10).hang,
        HangEvidence::PendingOperation,
        "a logger is not an evaluator"
    );
}

#[test]
fn ranks_that_wait_for_a_rank_receiving_from_a_socket_do_not_hang() {
    let with = |switches: u64| {
        let receives = Stack::new(&[("download", "/job/data.py:7"), ("main", "/job/train.py:133")], &["recv"]);
        let mut job = waits_for(receives.with(|stack| (stack.syscall, stack.switches) = (Some(45), switches)));
        let dump = job.rank(2).dump.as_mut().expect("a dump");
        let socket = Awaited { kind: AwaitedKind::Socket.into(), name: "10.0.0.1:443".into(), ..Default::default() };
        dump.stacktrace[0].awaited = Some(socket.clone());
        dump.first_sample.as_mut().expect("two samples").stacktrace[0].awaited = Some(socket);
        hang(&job)
    };
    assert_eq!(with(12), HangEvidence::None, "each piece wakes the thread");
    assert_eq!(with(0), HangEvidence::PendingOperation, "nothing comes");
}

#[test]
fn ranks_that_wait_for_a_rank_receiving_with_a_timeout_do_not_hang() {
    let with = |bytes: u64| {
        let receives = Stack::new(&[("download", "/job/data.py:7"), ("main", "/job/train.py:133")], &["poll"]);
        hang(&waits_for(receives.with(|stack| stack.switches = 12).receives(bytes)))
    };
    assert_eq!(with(5 * 20_000), HangEvidence::None, "20 kB a second");
    assert_eq!(with(5 * 1_000), HangEvidence::PendingOperation, "keep-alives");
}

#[test]
fn ranks_that_wait_for_a_rank_using_its_device_do_not_hang() {
    let mut job = waits_for(Stack::sleep());
    let read_ns = job.flight(2).read_ns;
    job.flight(2).last_launch_ns = read_ns - 29 * SECOND;
    assert_eq!(hang(&job), HangEvidence::None, "it trains with others, or copies");
    job.flight(2).last_launch_ns = read_ns - 31 * SECOND;
    assert_eq!(hang(&job), HangEvidence::PendingOperation, "it has stood still for the timeout");
    job.flight(0).last_launch_ns = read_ns;
    assert_eq!(hang(&job), HangEvidence::PendingOperation, "a victim may be at work elsewhere");
}

#[test]
fn ranks_that_wait_for_one_whose_library_goes_on_do_not_hang() {
    let judged = |line: &str, cpu_ns: u64, change: &dyn Fn(&mut Job)| {
        let frames = |line: &str| {
            let library = format!("/usr/lib/python3.11/site-packages/trainer/loop.py:{line}");
            vec![("evaluate", library), ("main", "/job/train.py:133".to_owned())]
        };
        let state = if cpu_ns > 0 { "R (running)" } else { "S (sleeping)" };
        let mut job = waits_for(Stack::sleep().busy(cpu_ns).state(state, ""));
        let dump = job.rank(2).dump.as_mut().expect("a dump");
        dump.py_stacktrace = vec![python_thread(1002, "MainThread", &frames("7"))];
        dump.first_sample.as_mut().expect("two samples").py_stacktrace =
            vec![python_thread(1002, "MainThread", &frames(line))];
        change(&mut job);
        job.judge()
    };
    let with = |line: &str, cpu_ns: u64| judged(line, cpu_ns, &|_| ()).hang;
    assert_eq!(with("9", 5 * SECOND), HangEvidence::None);
    // Another culprit is certain to stand still.
    let beside = judged("9", 5 * SECOND, &|job| {
        let flight = job.flight(3);
        flight.operations.pop();
        let counters = &mut flight.communicators[0];
        (counters.launched, counters.started) = (30, 30);
        job.set_stack(3, Stack::checkpoint());
    });
    assert_eq!((beside.culprits, beside.hang), (vec![2, 3], HangEvidence::PendingOperation));
    assert_eq!(with("7", 5 * SECOND), HangEvidence::PendingOperation, "it may be an endless loop");
    assert_eq!(with("9", 0), HangEvidence::PendingOperation, "it polls");
}

fn serves() -> Stack {
    Stack::new(
        &[("BaseSelector.select", "/usr/lib/python3.11/selectors.py:468"), ("serve", "/job/ps.py:9")],
        &["epoll_wait"],
    )
}

#[test]
fn ranks_that_all_sleep_may_be_idle() {
    let verdict = quiet(|_| Stack::sleep()).judge();
    expect(&verdict, Cause::Unknown, &[], Confidence::Low);
    let expected = "No operation is pending on any device, and all 4 ranks are at train.py:99 in evaluate";
    assert!(verdict.sentence.starts_with(expected), "{}", verdict.sentence);
}

#[test]
fn a_server_does_not_block_sleeping_ranks() {
    let verdict = quiet(|rank| if rank == 0 { serves() } else { Stack::sleep() }).judge();
    expect(&verdict, Cause::Unknown, &[], Confidence::Low);
    assert!(verdict.sentence.contains("every rank sleeps, or waits for a message"), "{}", verdict.sentence);
}

#[test]
fn a_wait_for_keyboard_input_is_not_storage() {
    let prompt = || Stack::new(&[("main", "/job/notebook.py:3")], &["__GI___libc_read"]);
    let mut job = quiet(|rank| if rank == 0 { prompt() } else { Stack::sleep() });
    job.rank(0).dump.as_mut().expect("a dump").stacktrace[0].awaited =
        Some(Awaited { kind: AwaitedKind::File.into(), name: "/dev/pts/0".into(), ..Default::default() });
    expect(&job.judge(), Cause::Unknown, &[], Confidence::Low);
}

#[test]
fn a_rank_that_stands_still_elsewhere_is_named_in_an_idle_job() {
    let verdict = quiet(|rank| if rank == 2 { Stack::checkpoint() } else { Stack::sleep() }).judge();
    expect(&verdict, Cause::StorageIo, &[2], Confidence::Medium);
}

#[test]
fn all_ranks_in_their_loaders() {
    let mut job = Job::new(4);
    job.trigger(TriggerKind::Idle);
    for rank in 0..4 {
        job.set_stack(rank, Stack::loader());
    }
    let verdict = job.judge();
    expect(&verdict, Cause::DataLoader, &[], Confidence::Medium);
    assert_eq!(verdict.victims, [0, 1, 2, 3]);
    assert!(verdict.sentence.contains("no rank is the culprit"), "{}", verdict.sentence);
    job.set_stack(1, Stack::sleep());
    expect(&job.judge(), Cause::DataLoader, &[0, 2, 3], Confidence::Medium);
}

#[test]
fn ranks_that_are_all_stuck_but_not_alike_are_culprits() {
    let verdict = quiet(|rank| if rank < 2 { Stack::loader() } else { Stack::checkpoint() }).judge();
    assert_eq!(verdict.culprits, [0, 1, 2, 3], "{}", verdict.sentence);
    let ends = || {
        let library = "/v/site-packages/torch/distributed/distributed_c10d.py:9";
        let python = [("destroy_process_group", library), ("main", "/job/train.py:9")];
        Stack::new(&python, &["sem_wait", "ncclCommDestroy"])
    };
    let verdict = quiet(|_| ends()).judge();
    assert_eq!((verdict.cause, verdict.culprits), (Cause::Teardown, vec![0, 1, 2, 3]), "{}", verdict.sentence);
}

#[test]
fn a_job_whose_ranks_end_in_order_is_not_a_hang() {
    let mut job = quiet(|_| Stack::sleep());
    job.trigger(TriggerKind::Death);
    job.dies(0, "exit code 0");
    expect(&job.judge(), Cause::NotAHang, &[], Confidence::Medium);
}

#[test]
fn all_ranks_ask_a_server_that_does_not_answer() {
    let mut job = Job::new(4);
    job.trigger(TriggerKind::Idle);
    for rank in 0..4 {
        job.set_stack(
            rank,
            Stack::new(&[("read", "/usr/lib/python3.11/socket.py:7"), ("fetch", "/job/train.py:64")], &["recv"]),
        );
    }
    let verdict = job.judge();
    expect(&verdict, Cause::Unknown, &[], Confidence::Low);
    assert!(verdict.sentence.contains("all 4 ranks are at train.py:64 in fetch"), "{}", verdict.sentence);
}

#[test]
fn a_minority_at_another_place_is_named_in_a_job_that_stands_still() {
    let at = |file: &str| Stack::new(&[("step", file), ("main", "/job/train.py:133")], &["ioctl"]);
    let verdict = quiet(|rank| at(if rank == 2 { "/job/load.py:7" } else { "/job/train.py:50" })).judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::Low);
    assert!(verdict.sentence.contains("while ranks 0-1, 3 are at train.py:50"), "{}", verdict.sentence);
}

/// A silent job of one rank, which reads from a pipe of process 1050.
fn reads_of(process: Stack, is_own: bool) -> Job {
    let mut job = Job::with_world(1, 30);
    job.trigger(TriggerKind::Idle);
    awaits(&mut job, 0, "read", AwaitedKind::Pipe, &[1050]);
    let thread = &mut job.rank(0).dump.as_mut().expect("a dump").stacktrace[0];
    thread.timed = Some(false);
    thread.awaited.as_mut().expect("a pipe").holders[0].child = is_own;
    job.process(50, "engine", process).stacktrace[0].timed = Some(false);
    job
}

fn named(job: &Job) -> (Cause, HangEvidence, Vec<i32>) {
    let verdict = job.judge();
    (verdict.cause, verdict.hang, culprits(&verdict).into_iter().map(|(_, pid)| pid).collect())
}

#[test]
fn a_silent_rank_that_waits_for_a_process_of_its_own_hangs_if_that_can_never_answer() {
    for is_own in [true, false] {
        let stopped = reads_of(Stack::sleep().state("T (stopped)", ""), is_own);
        assert_eq!(named(&stopped), (Cause::ProcessStopped, HangEvidence::WaitChain, vec![1050]));
        let locked = reads_of(Stack::lock(), is_own);
        assert_eq!(named(&locked), (Cause::HostLock, HangEvidence::WaitChain, vec![1050]));
        assert_eq!(hang(&reads_of(Stack::sleep(), is_own)), HangEvidence::None);
        let frames = ["__futex_abstimed_wait_common64", "PyThread_acquire_lock_timed", "wait_for_thread_shutdown"];
        let ends = reads_of(Stack::new(&[("_shutdown", "/usr/lib/python3.11/threading.py:1590")], &frames), is_own);
        assert_eq!(named(&ends), (Cause::HostLock, HangEvidence::WaitChain, vec![1050]));
        // Its thread waits for somebody who was not found in time: perhaps for clients.
        let mut serves = reads_of(Stack::lock(), is_own);
        reader_thread(&mut serves, 0, AwaitedKind::Socket, "", &[]);
        assert_eq!(hang(&serves), HangEvidence::None);
    }
}

#[test]
fn the_threads_of_zeromq_serve_nobody_while_no_thread_waits_for_a_message() {
    let mut serves = reads_of(Stack::lock(), false);
    reader_thread(&mut serves, 0, AwaitedKind::Several, "anybody who connects to batches", &[1000]);
    assert_eq!(hang(&serves), HangEvidence::None);
    let dump = serves.evidence.processes[0].dump.as_mut().expect("a dump");
    dump.stacktrace.last_mut().expect("the reader").thread_name = "ZMQbg/IO/0".into();
    assert_eq!(named(&serves), (Cause::HostLock, HangEvidence::WaitChain, vec![1050]));
    // Another thread receives.
    let mut receiver = native_thread(77, &["poll", "zmq_msg_recv"], "S (sleeping)", "", Some(7), 9);
    receiver.frames[1].module = "/opt/venv/lib/python3.11/site-packages/pyzmq.libs/libzmq-9a1b.so.5.2.5".into();
    let dump = serves.evidence.processes[0].dump.as_mut().expect("a dump");
    dump.stacktrace.push(receiver);
    assert_eq!(hang(&serves), HangEvidence::None);
}

#[test]
fn two_processes_that_both_send_are_not_at_rest() {
    let is_idle = |native: &str, is_parent: bool| native == "recv" && is_parent;
    for (native, is_parent) in [("recv", true), ("recv", false), ("write", true)] {
        let mut job = reads_of(Stack::new(&[("talk", "/job/engine.py:5")], &[native]), false);
        awaits(&mut job, 0, native, AwaitedKind::Socket, &[1050]);
        let dump = job.rank(0).dump.as_mut().expect("a dump");
        dump.stacktrace[0].timed = Some(false);
        // A front end that has started the rank may wait for a person.
        dump.parent_pid = if is_parent { 1050 } else { 1 };
        chained(&mut job, 0, AwaitedKind::Socket, "", &[1000]);
        let (_, found, culprits) = named(&job);
        let expected = if is_idle(native, is_parent) { (HangEvidence::None, 0) } else { (HangEvidence::WaitChain, 2) };
        assert_eq!((found, culprits.len()), expected, "{native}, parent: {is_parent}");
    }
}

#[test]
fn a_process_that_stands_in_storage_is_not_at_rest() {
    let stands = |native: &'static str, syscall: i64, kind: AwaitedKind, name: &str| {
        let stack = Stack::new(&[("load", "/job/engine.py:5")], &[native]).with(|stack| stack.syscall = Some(syscall));
        let mut job = reads_of(stack, false);
        chained(&mut job, 0, kind, name, &[]);
        named(&job)
    };
    let hangs = (Cause::StorageIo, HangEvidence::WaitChain, vec![1050]);
    assert_eq!(stands("read", 0, AwaitedKind::File, "/mnt/adapter"), hangs);
    assert_eq!(stands("write", 1, AwaitedKind::Pipe, "/mnt/adapter"), hangs);
    // It waits for a person, or for somebody who opens the FIFO.
    assert_eq!(stands("read", 0, AwaitedKind::File, "/dev/pts/0").1, HangEvidence::None);
    assert_eq!(stands("read", 0, AwaitedKind::File, "/dev/stdin").1, HangEvidence::None);
    assert_eq!(stands("openat64", 257, AwaitedKind::File, "/run/commands").1, HangEvidence::None);
    // So does a rank of its own, for whomever it works.
    let alone = |kind: AwaitedKind, native: &'static str, name: &str| {
        let mut job = Job::with_world(1, 30);
        job.trigger(TriggerKind::Idle);
        job.set_stack(0, Stack::new(&[("load", "/job/a.py:5")], &[native]).with(|stack| stack.syscall = Some(0)));
        let awaited = Awaited { kind: kind.into(), name: name.into(), ..Default::default() };
        job.rank(0).dump.as_mut().expect("a dump").stacktrace[0].awaited = Some(awaited);
        job.judge().hang
    };
    assert_eq!(alone(AwaitedKind::File, "read", "/mnt/adapter"), HangEvidence::WaitChain);
    assert_eq!(alone(AwaitedKind::Pipe, "write", "/mnt/adapter"), HangEvidence::WaitChain);
    assert_eq!(alone(AwaitedKind::File, "read", "/dev/stdin"), HangEvidence::None);
    // It may read its requests.
    assert_eq!(alone(AwaitedKind::Pipe, "read", "/run/requests"), HangEvidence::None);
    // A thread of a server waits there, and the main thread waits for the end of the server.
    let mut served = reads_of(Stack::lock(), false);
    reader_thread(&mut served, 0, AwaitedKind::Pipe, "/mnt/index", &[1050]);
    served.evidence.processes[0].dump.as_mut().expect("a dump").stacktrace[0].timed = Some(true);
    assert_eq!(named(&served), hangs);
    reader_thread(&mut served, 0, AwaitedKind::Socket, "anybody who connects to 127.0.0.1:80", &[]);
    assert_eq!(named(&served), hangs);
}

#[test]
fn a_silent_rank_hangs_if_only_its_own_threads_could_wake_it() {
    let locked = |change: &dyn Fn(&mut Job)| {
        let mut job = Job::with_world(1, 30);
        job.trigger(TriggerKind::Idle);
        job.set_stack(0, Stack::lock());
        job.rank(0).dump.as_mut().expect("a dump").stacktrace[0].timed = Some(false);
        change(&mut job);
        job.judge().hang
    };
    let beside = |native: &'static str, syscall: i64, awaited: Option<Awaited>| {
        move |job: &mut Job| {
            let mut thread = native_thread(1001, &[native], "S (sleeping)", "", Some(syscall), 5);
            (thread.awaited, thread.timed) = (awaited.clone(), Some(false));
            let python = python_thread(1001, "beside", &[("work", "/job/train.py:9".to_owned())]);
            job.thread(0, thread, Some(python));
        }
    };
    assert_eq!(locked(&|_| ()), HangEvidence::WaitChain);
    assert_eq!(locked(&beside("pthread_cond_wait", 202, None)), HangEvidence::WaitChain);
    let client = Awaited { kind: AwaitedKind::Socket.into(), name: "10.0.0.9:80".into(), ..Default::default() };
    assert_eq!(locked(&beside("recv", 45, Some(client.clone()))), HangEvidence::None);
    let is_timed = |job: &mut Job| job.rank(0).dump.as_mut().expect("a dump").stacktrace[0].timed = Some(true);
    assert_eq!(locked(&is_timed), HangEvidence::None);
    // A thread hands over bytes that nobody takes. One that reads may wait for a command.
    let with_heart = |native: &'static str, syscall: i64| {
        locked(&|job: &mut Job| {
            beside(native, syscall, None)(job);
            is_timed(job);
        })
    };
    assert_eq!(with_heart("write", 1), HangEvidence::WaitChain);
    assert_eq!(with_heart("read", 0), HangEvidence::None);
}

#[test]
fn a_child_that_stands_still_is_due_if_a_process_waits_for_its_end() {
    let waits = || Stack::new(&[("grade", "/job/engine.py:5")], &["wait4"]);
    let judged = |child: Stack, parent: i32| {
        let mut job = reads_of(waits(), false);
        chained(&mut job, 0, AwaitedKind::Child, "", &[1051]);
        job.process(51, "solution", child);
        job.rank(0).dump.as_mut().expect("a dump").parent_pid = parent;
        named(&job)
    };
    let polls = || Stack::sleep().with(|stack| stack.switches = 25);
    assert_eq!(judged(polls(), 1), (Cause::MissingRank, HangEvidence::WaitChain, vec![1051]));
    assert_eq!(judged(polls().was_at("compile", "/job/solution.py:7"), 1).1, HangEvidence::None, "it makes progress");
    // A launcher waits for the end of the job's processes all the time.
    assert_eq!(judged(polls(), 1050).1, HangEvidence::None);
    // Nobody waits for the end of an evaluator that polls for a checkpoint.
    assert_eq!(hang(&reads_of(polls(), false)), HangEvidence::None);
}

#[test]
fn a_rank_whose_standard_input_a_program_writes_waits_for_what_that_program_waits_for() {
    let judged = |engine: Stack, kind: AwaitedKind| {
        let mut job = reads_of(engine, false);
        awaits(&mut job, 0, "read", AwaitedKind::File, &[1050]);
        job.rank(0).dump.as_mut().expect("a dump").stacktrace[0].awaited.as_mut().expect("a file").name =
            "/dev/stdin".into();
        chained(&mut job, 0, kind, "", &[1051]);
        job.process(51, "tests", Stack::sleep());
        named(&job)
    };
    let waits = |native: &'static str| Stack::new(&[("grade", "/job/engine.py:5")], &[native]);
    let due = (Cause::MissingRank, HangEvidence::WaitChain, vec![1051]);
    assert_eq!(judged(waits("wait4"), AwaitedKind::Child), due);
    assert_eq!(judged(waits("recv"), AwaitedKind::Socket).1, HangEvidence::None);
}

#[test]
fn a_worker_that_stands_still_is_due_if_the_program_waits_for_the_result_of_its_task() {
    let judged = |frame: (&'static str, &str)| {
        let native = ["sem_wait", "PyThread_acquire_lock_timed"];
        let mut job = reads_of(Stack::new(&[frame, ("main", "/job/run.py:5")], &native), false);
        reader_thread(&mut job, 0, AwaitedKind::Several, "", &[1000, 1051]);
        let prompt = Stack::new(&[("debug", "/job/score.py:7")], &["read"]).with(|stack| stack.syscall = Some(0));
        job.process(51, "worker", prompt);
        chained(&mut job, 1, AwaitedKind::File, "/dev/pts/3", &[]);
        named(&job)
    };
    let (_, hang, culprits) = judged(("Future.result", "/usr/lib/python3.11/concurrent/futures/_base.py:451"));
    assert_eq!((hang, culprits), (HangEvidence::WaitChain, vec![1051]));
    assert_eq!(judged(("Event.wait", "/usr/lib/python3.11/threading.py:622")).1, HangEvidence::None);
}

#[test]
fn a_process_that_stands_still_is_due_if_only_it_can_hold_a_lock_that_another_one_wants() {
    const SHARED: &str = "/usr/lib/python3.11/multiprocessing/synchronize.py:95";
    let lock = |function: &'static str| Stack::new(&[(function, SHARED), ("store", "/job/actor.py:5")], &["sem_wait"]);
    let judged = |wants: Stack, third: AwaitedKind| {
        let mut job = Job::with_world(1, 30);
        job.trigger(TriggerKind::Idle);
        awaits(&mut job, 0, "sem_wait", AwaitedKind::Semaphore, &[1050, 1051, 1052]);
        job.process(50, "actor", wants);
        chained(&mut job, 0, AwaitedKind::Semaphore, "", &[1000, 1051, 1052]);
        job.process(51, "actor", Stack::new(&[("main", "/job/actor.py:9")], &["wait4"]));
        chained(&mut job, 1, third, "", &[1052]);
        job.process(52, "actor", Stack::sleep());
        named(&job)
    };
    let held = (Cause::MissingRank, HangEvidence::WaitChain, vec![1052]);
    assert_eq!(judged(lock("SemLock.__enter__"), AwaitedKind::Semaphore), held);
    // A counter of messages is not held, and the lock of a queue may be held by the one that reads.
    assert_eq!(judged(lock("Condition.wait"), AwaitedKind::Semaphore).1, HangEvidence::None);
    assert_eq!(judged(lock("SemLock.__enter__"), AwaitedKind::Pipe).1, HangEvidence::None);
}

#[test]
fn a_process_in_only_one_of_the_samples_does_not_prove_a_hang() {
    let judged = |change: &dyn Fn(&mut Job)| {
        let mut job = waits_for(Stack::sleep());
        awaits(&mut job, 2, "recv", AwaitedKind::Socket, &[1050]);
        job.process(50, "saver", Stack::sleep());
        change(&mut job);
        named(&job)
    };
    let of_process = |job: &mut Job| job.evidence.processes[0].dump.as_mut().expect("a dump").first_sample = None;
    assert_eq!(judged(&|_| ()), (Cause::MissingRank, HangEvidence::PendingOperation, vec![1050]));
    assert_eq!(judged(&of_process), (Cause::MissingRank, HangEvidence::None, vec![1050]));
}

#[test]
fn a_rank_alone_in_uninterruptible_sleep_hangs() {
    let mut job = Job::with_world(1, 30);
    job.trigger(TriggerKind::Idle);
    job.set_stack(0, Stack::checkpoint().state("D (disk sleep)", "nfs_wait_bit"));
    let verdict = job.judge();
    assert_eq!((verdict.cause, verdict.hang), (Cause::DState, HangEvidence::WaitChain), "{}", verdict.sentence);
}

#[test]
fn a_rank_alone_that_waits_for_its_device_does_not_prove_a_hang() {
    let mut job = Job::with_world(1, 30);
    job.trigger(TriggerKind::Idle);
    job.set_stack(0, Stack::device_wait().busy(0).state("S (sleeping)", "").with(|stack| stack.switches = 0));
    job.last_kernel(0, "mlp");
    job.flight(0).last_launch_ns = SECOND;
    assert_eq!(named(&job), (Cause::KernelHang, HangEvidence::None, vec![1000]));
}

#[test]
fn a_worker_that_died_with_a_lock_or_is_locked_in_holds_up_its_rank() {
    // One worker waits for the lock of the other one.
    let receives = Stack::new(&[("Queue.get", "/usr/lib/python3.11/multiprocessing/queues.py:103")], &["read"]);
    let mut job = waits_for(receives.with(|stack| stack.syscall = Some(0)));
    let thread = &mut job.rank(2).dump.as_mut().expect("a dump").stacktrace[0];
    let holders = vec![Holder { pid: 1050, name: "python3".into(), child: true, ..Default::default() }];
    thread.awaited = Some(Awaited { kind: AwaitedKind::Pipe.into(), holders, ..Default::default() });
    job.process(50, "worker", Stack::lock());
    assert_eq!(named(&job).2, [1050]);
    job.child(2, "worker", "Z (zombie)");
    assert_eq!((job.judge().cause, named(&job).2), (Cause::DataLoader, vec![4242]));
    // A rank polls for the answer of its child, which waits for itself.
    let mut job = waits_for(Stack::sleep().with(|stack| stack.switches = 400));
    job.child(2, "featurizer", "S (sleeping)");
    assert_eq!(named(&job).2, [1002]);
    let mut of_child = Job::new(1);
    of_child.set_stack(0, Stack::lock());
    let dump = of_child.rank(0).dump.take().expect("a dump");
    for sample in &mut job.rank(2).dump.as_mut().expect("a dump").children[0].samples {
        (sample.stacktrace, sample.py_stacktrace) = (dump.stacktrace.clone(), dump.py_stacktrace.clone());
        sample.stacktrace[0].timed = Some(false);
    }
    assert_eq!(named(&job).2, [4242]);
}

#[test]
fn a_collective_that_a_peer_has_just_completed_is_not_overdue() {
    // All ranks have entered operation 31. Only the record of rank 3 does not show its end yet.
    let since_completed = |age_ns: u64, op: Op| {
        let mut job = Job::with_world(4, 30);
        for rank in 0..3 {
            job.complete(0x77, rank, |operation| {
                operation.completed_ns = NOW - age_ns;
                operation.op = op.into();
            });
        }
        job.enter(0x77, 3, op);
        (0..4).for_each(|rank| job.set_stack(rank, Stack::sleep()));
        hang(&job)
    };
    assert_eq!(since_completed(SECOND / 10, Op::AllReduce), HangEvidence::None);
    assert_eq!(since_completed(40 * SECOND, Op::AllReduce), HangEvidence::PendingOperation, "the transfer is stuck");
    assert_eq!(since_completed(SECOND / 10, Op::Broadcast), HangEvidence::PendingOperation, "a root completes early");
}

/// The verdict on an idle server with two workers, each of which waits for its next batch at one
/// end of a socket. The other end of rank 0 was found in these samples.
fn idle_workers(found: [bool; 2]) -> Verdict {
    let mut job = Job::with_world(2, 30);
    job.trigger(TriggerKind::Idle);
    let frames = [
        ("Connection._recv", "/usr/lib/python3.11/multiprocessing/connection.py:395"),
        ("wait_for_batch", "/job/serve.py:242"),
    ];
    for rank in 0..2 {
        job.set_stack(rank, Stack::new(&frames, &["read", "os_read_impl"]));
        let dump = job.rank(rank).dump.as_mut().expect("a dump");
        let first = &mut dump.first_sample.as_mut().expect("two samples").stacktrace[0];
        for (thread, found) in [first, &mut dump.stacktrace[0]].into_iter().zip(found) {
            let engine = Holder { pid: 1050, name: "engine".into(), ..Default::default() };
            let holders = if found || rank == 1 { vec![engine] } else { Vec::new() };
            thread.awaited = Some(Awaited { kind: AwaitedKind::Socket.into(), holders, ..Default::default() });
        }
    }
    job.process(50, "engine", Stack::lock());
    job.judge()
}

#[test]
fn the_other_end_of_a_socket_is_known_if_one_sample_shows_it() {
    let known = idle_workers([true, true]);
    assert_eq!((known.hang, &known.culprits[..]), (HangEvidence::None, &[][..]), "{}", known.to_text());
    for found in [[true, false], [false, true]] {
        assert_eq!(idle_workers(found).to_text(), known.to_text(), "{found:?}");
    }
}

#[test]
fn a_batch_from_an_unknown_process_does_not_prove_a_hang() {
    let verdict = idle_workers([false, false]);
    assert_eq!(verdict.hang, HangEvidence::None, "{}", verdict.to_text());
}
