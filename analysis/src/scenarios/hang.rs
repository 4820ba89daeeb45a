//! The evidence that a job hangs, and idle jobs: notebooks, parameter servers, programs that sleep
//! until they are needed. `XPU_TIMER_HANG_KILL` ends ranks only on such evidence.

use super::expect;
use crate::{
    Cause, Confidence, HangEvidence,
    testing::{Job, SECOND, Stack, native_thread, python_thread},
};
use xpu_timer_proto::{
    server::{Awaited, AwaitedKind},
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
fn a_job_that_reads_or_computes_is_no_hang() {
    let reads = || Stack::checkpoint().moving_bytes(1 << 30);
    assert_eq!(hang(&quiet(|_| reads())), HangEvidence::None, "all ranks read their shards");
    assert_eq!(hang(&quiet(|rank| if rank == 0 { reads() } else { Stack::sleep() })), HangEvidence::None);
    let evaluates = || Stack::sleep().busy(5 * SECOND).was_at("evaluate", "/job/train.py:98");
    assert_eq!(hang(&quiet(|_| evaluates())), HangEvidence::None, "all ranks evaluate on their processors");
    assert_eq!(hang(&quiet(|_| Stack::device_wait())), HangEvidence::None, "a loop of memset and synchronize");
}

#[test]
fn a_job_that_waits_for_work_is_no_hang() {
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
fn a_key_that_a_server_waits_for_is_no_hang() {
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
    assert_eq!(with("/job/eval.py:12", SECOND / 10).hang, HangEvidence::PendingOperation, "a logger is no evaluator");
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
    let told = "No operation is pending on any device, and all 4 ranks are at train.py:99 in evaluate";
    assert!(verdict.sentence.starts_with(told), "{}", verdict.sentence);
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
