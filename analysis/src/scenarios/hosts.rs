//! The host of a rank is the reason: it is dead, stopped, in its loader, in I/O, in a lock, or just
//! elsewhere.

use super::expect;
use crate::{
    Cause, Confidence, Verdict,
    testing::{Job, SECOND, Stack, native_thread, python_thread},
};
use xpu_timer_proto::{
    server::{Awaited, AwaitedKind, Holder, ProcessSample},
    v1::{Op, OpKind, Operation, Presence, TriggerKind},
};

/// Four ranks. Three of them wait in all_reduce 31.
pub(super) fn behind(culprit: u32, stack: Stack) -> Job {
    let mut job = Job::with_world(4, 30);
    for rank in (0..4).filter(|rank| *rank != culprit) {
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.set_stack(culprit, stack);
    job
}

fn sentence(verdict: &Verdict) -> &str {
    &verdict.sentence
}

/// A sample that came too late, on a busy machine: the state of the process without stacks.
fn too_late(sample: &mut ProcessSample) {
    let (state, captured_unix_ns) = (sample.process_state.clone(), sample.captured_unix_ns);
    let errors = vec!["no answer within 3.6 s: the machine is busy".into()];
    *sample = ProcessSample { process_state: state, captured_unix_ns, errors, ..Default::default() };
}

#[test]
fn a_late_sample_does_not_prove_that_a_rank_stood_still() {
    for (which, stack) in [Stack::loader(), Stack::checkpoint(), Stack::lock(), Stack::pause()].into_iter().enumerate()
    {
        for late in [&[0][..], &[1], &[0, 1]] {
            let mut job = behind(2, stack.clone());
            let dump = job.rank(2).dump.as_mut().expect("a dump");
            if late.contains(&0) {
                too_late(dump.first_sample.as_mut().expect("two samples"));
            }
            if late.contains(&1) {
                dump.stacktrace.clear();
                dump.py_stacktrace.clear();
                too_late(dump.last_sample.as_mut().expect("two samples"));
            }
            let verdict = job.judge();
            let what = format!(
                "{which}, late {late:?}: {} with {:?}: {}",
                verdict.cause, verdict.confidence, verdict.sentence
            );
            for line in verdict.evidence.iter().filter(|line| line.text.starts_with("rank 2")) {
                assert!(!line.text.contains("in both samples") && !line.text.contains("between the samples"), "{what}");
            }
            assert!(verdict.confidence != Confidence::High, "{what}");
            if late.len() == 2 {
                // The flight records still show for whom the others wait. Nothing shows what that
                // rank does.
                assert!(matches!(verdict.cause, Cause::MissingRank | Cause::Unknown), "{what}");
            }
        }
    }
}

/// All stacks are there except those of one rank, which is where the others are. A missing stack
/// accuses nobody.
#[test]
fn a_missing_dump_alone_does_not_make_a_culprit() {
    let mut job = Job::with_world(4, 30);
    for rank in 0..4 {
        job.enter(0x77, rank, Op::AllReduce);
    }
    let before = job.clone().judge();
    let rank = job.rank(2);
    rank.dump = None;
    rank.errors = vec!["no answer within 3.6 s: the machine is busy".into()];
    let verdict = job.judge();
    assert_eq!(verdict.culprits, before.culprits, "{}", verdict.sentence);
    assert!(!verdict.culprits.contains(&2), "{}", verdict.sentence);
}

#[test]
fn a_rank_in_its_loader_is_named_with_its_place_and_its_waiters() {
    let verdict = behind(2, Stack::loader()).judge();
    expect(&verdict, Cause::DataLoader, &[2], Confidence::Medium);
    assert_eq!(verdict.victims, [0, 1, 3]);
    assert_eq!(
        sentence(&verdict),
        "Rank 2 waits for its data loader at train.py:66 in DataLoader.__next__ (C function futex_wait); \
         ranks 0-1, 3 wait for it in all_reduce 31 of communicator 0x77 (4 ranks)."
    );
    let text = verdict.to_text();
    assert!(text.contains("/job/train.py:66"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    for cause in [Cause::ProcessDead, Cause::ProcessStopped, Cause::NetworkStall, Cause::OpMismatch, Cause::LongStep] {
        assert!(verdict.ruled_out.iter().any(|ruled_out| ruled_out.cause == cause), "{cause} in {text}");
    }
}

#[test]
fn rank_0_can_be_the_culprit() {
    expect(&behind(0, Stack::loader()).judge(), Cause::DataLoader, &[0], Confidence::Medium);
    expect(&behind(0, Stack::pause()).judge(), Cause::MissingRank, &[0], Confidence::High);
}

#[test]
fn a_reader_thread_in_a_read_is_named() {
    let mut job = behind(2, Stack::loader());
    let frames =
        [("read_shard", "/job/train.py:46".to_owned()), ("run", "/usr/lib/python3.11/threading.py:1045".to_owned())];
    job.thread(
        2,
        native_thread(5002, &["__libc_read", "os_read"], "S (sleeping)", "pipe_read", Some(0), 9),
        Some(python_thread(5002, "shard-reader-0", &frames)),
    );
    let verdict = job.judge();
    expect(&verdict, Cause::DataLoader, &[2], Confidence::High);
    assert!(
        sentence(&verdict).contains("whose thread shard-reader-0 is inside read at read_shard (train.py:46)"),
        "{}",
        sentence(&verdict)
    );
}

#[test]
fn a_dead_worker_process_is_named() {
    let mut job = behind(1, Stack::loader());
    job.child(1, "python train.py", "Z (zombie)");
    let verdict = job.judge();
    expect(&verdict, Cause::DataLoader, &[1], Confidence::High);
    assert!(sentence(&verdict).contains("child process 4242 (python train.py) is dead"), "{}", sentence(&verdict));
}

#[test]
fn a_stuck_write_is_storage_and_a_progressing_write_is_a_long_step() {
    expect(&behind(3, Stack::checkpoint()).judge(), Cause::StorageIo, &[3], Confidence::High);
    let slow = behind(3, Stack::checkpoint().moving_bytes(500 << 20)).judge();
    expect(&slow, Cause::LongStep, &[3], Confidence::Medium);
}

#[test]
fn io_of_other_threads_is_not_progress_of_the_main_thread() {
    let stuck = behind(3, Stack::checkpoint().bytes_beside(500 << 20)).judge();
    expect(&stuck, Cause::StorageIo, &[3], Confidence::High);
    assert_eq!(behind(3, Stack::sleep().bytes_beside(500 << 20)).judge().cause, Cause::MissingRank);
    // It may wait for that thread, or be about to leave the call.
    expect(&behind(3, Stack::lock().bytes_beside(500 << 20)).judge(), Cause::LongStep, &[3], Confidence::Medium);
    let runs = Stack::checkpoint().bytes_beside(500 << 20).state("R (running)", "");
    expect(&behind(3, runs).judge(), Cause::LongStep, &[3], Confidence::Medium);
}

#[test]
fn a_kernel_function_alone_identifies_storage_but_not_a_socket() {
    let read = |wchan| Stack::new(&[("load", "/job/train.py:9")], &["??"]).state("S (sleeping)", wchan);
    expect(&behind(1, read("request_wait_answer")).judge(), Cause::StorageIo, &[1], Confidence::High);
    expect(&behind(1, read("sk_wait_data")).judge(), Cause::MissingRank, &[1], Confidence::High);
}

#[test]
fn any_dead_rank_that_is_behind_is_dead() {
    for culprit in 0..4 {
        let mut job = behind(culprit, Stack::loader());
        job.dies(culprit, "killed by SIGKILL");
        let verdict = job.judge();
        expect(&verdict, Cause::ProcessDead, &[culprit], Confidence::High);
        assert!(sentence(&verdict).contains("killed by SIGKILL"), "{}", sentence(&verdict));
    }
}

#[test]
fn a_rank_killed_inside_the_collective_is_dead() {
    let mut job = Job::with_world(4, 30);
    for rank in 0..4 {
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.dies(1, "killed by SIGKILL");
    expect(&job.judge(), Cause::ProcessDead, &[1], Confidence::High);
}

#[test]
fn ranks_that_the_agent_ended_are_not_to_blame() {
    let mut job = behind(2, Stack::loader());
    job.dies(2, "exit code 1");
    job.dies(3, "killed by SIGTERM");
    expect(&job.judge(), Cause::ProcessDead, &[2], Confidence::High);
}

#[test]
fn a_death_is_reported_before_any_rank_waits() {
    let mut job = Job::with_world(4, 30);
    job.trigger(TriggerKind::Death);
    job.dies(2, "killed by SIGSEGV");
    expect(&job.judge(), Cause::ProcessDead, &[2], Confidence::High);
}

#[test]
fn a_rank_that_left_while_others_wait_for_it_is_named() {
    let mut job = behind(2, Stack::loader());
    job.rank(2).presence = Presence::Left.into();
    job.rank(2).dump = None;
    let verdict = job.judge();
    expect(&verdict, Cause::ProcessDead, &[2], Confidence::High);
    assert!(sentence(&verdict).contains("has exited"), "{}", sentence(&verdict));
}

#[test]
fn a_rank_that_left_right_after_its_launch_may_have_skipped() {
    let mut job = behind(2, Stack::loader());
    job.queue(0x77, 2, Op::AllReduce);
    job.rank(2).presence = Presence::Left.into();
    job.rank(2).dump = None;
    let verdict = job.judge();
    expect(&verdict, Cause::ProcessDead, &[2], Confidence::Medium);
    assert!(verdict.to_text().contains("may have skipped"), "{}", verdict.to_text());
}

#[test]
fn a_stopped_rank_is_stopped_wherever_it_stands() {
    for stack in [Stack::loader(), Stack::device_wait(), Stack::sleep()] {
        let job = behind(2, stack.state("T (stopped)", ""));
        expect(&job.judge(), Cause::ProcessStopped, &[2], Confidence::High);
    }
    let traced = behind(2, Stack::sleep().state("t (tracing stop)", "")).judge();
    expect(&traced, Cause::ProcessStopped, &[2], Confidence::High);
    assert!(sentence(&traced).contains("debugger"), "{}", sentence(&traced));
}

#[test]
fn a_rank_stopped_inside_the_collective_is_stopped() {
    let mut job = Job::with_world(4, 30);
    for rank in 0..4 {
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.set_stack(3, Stack::device_wait().state("T (stopped)", ""));
    expect(&job.judge(), Cause::ProcessStopped, &[3], Confidence::High);
}

#[test]
fn uninterruptible_sleep_counts_when_it_lasts() {
    let job = behind(2, Stack::checkpoint().state("D (disk sleep)", "nfs_wait_bit"));
    let verdict = job.judge();
    expect(&verdict, Cause::DState, &[2], Confidence::High);
    assert!(sentence(&verdict).contains("nfs_wait_bit"), "{}", sentence(&verdict));

    // In D in both samples, but it ran in between: slow storage, not a permanent sleep.
    let mut job = behind(2, Stack::checkpoint().state("D (disk sleep)", "folio_wait_bit").moving_bytes(1 << 30));
    job.rank(2).dump.as_mut().unwrap().stacktrace[0].context_switches += 7;
    expect(&job.judge(), Cause::LongStep, &[2], Confidence::Medium);
}

#[test]
fn a_wait_for_a_lock_has_medium_confidence() {
    expect(&behind(2, Stack::lock()).judge(), Cause::HostLock, &[2], Confidence::Medium);
}

#[test]
fn compiling_and_collecting_garbage_are_not_hangs() {
    let inductor = Stack::new(
        &[("compile_fx", "/v/site-packages/torch/_inductor/compile_fx.py:9"), ("main", "/job/train.py:5")],
        &["?"],
    );
    expect(&behind(1, inductor.clone().busy(4 * SECOND)).judge(), Cause::Compile, &[1], Confidence::Medium);
    let mut job = behind(1, Stack::new(&[("build", "/job/train.py:5")], &["wait4"]));
    job.child(1, "/usr/local/cuda/bin/nvcc -c x.cu", "S (sleeping)");
    expect(&job.judge(), Cause::Compile, &[1], Confidence::Medium);
    let gc = Stack::new(&[("step", "/job/train.py:5")], &["visit_decref", "subtract_refs", "gc_collect_main"])
        .busy(5 * SECOND);
    expect(&behind(1, gc).judge(), Cause::PythonGc, &[1], Confidence::Medium);
    // In a stripped interpreter, only a flag in memory shows the collection.
    let mut job = behind(1, Stack::new(&[("step", "/job/train.py:5")], &["?"]).busy(5 * SECOND));
    let dump = job.rank(1).dump.as_mut().expect("the rank has a dump");
    dump.py_stacktrace[0].collects_garbage = true;
    expect(&job.judge(), Cause::PythonGc, &[1], Confidence::Medium);
}

#[test]
fn a_compiled_model_that_runs_is_not_compiling() {
    let running = Stack::new(
        &[("__call__", "/v/site-packages/torch/_inductor/output_code.py:9"), ("hook", "/job/train.py:5")],
        &["clock_nanosleep"],
    );
    expect(&behind(1, running).judge(), Cause::MissingRank, &[1], Confidence::Medium);
}

#[test]
fn teardown_after_an_exception() {
    let stack = Stack::new(
        &[
            ("destroy_process_group", "/v/site-packages/torch/distributed/distributed_c10d.py:9"),
            ("main", "/job/train.py:9"),
        ],
        &["sem_wait", "ncclCommDestroy"],
    );
    assert_eq!(behind(1, stack).judge().cause, Cause::Teardown);
}

#[test]
fn an_evaluation_that_goes_on_is_a_long_step_and_an_endless_loop_is_not() {
    let evaluating = Stack::new(&[("evaluate", "/job/eval.py:70")], &["matmul"])
        .busy(5 * SECOND)
        .was_at("evaluate", "/job/eval.py:12");
    expect(&behind(0, evaluating).judge(), Cause::LongStep, &[0], Confidence::Medium);
    let looping = Stack::new(&[("spin", "/job/eval.py:70")], &["_PyEval_EvalFrameDefault"]).busy(5 * SECOND);
    let verdict = behind(0, looping).judge();
    expect(&verdict, Cause::MissingRank, &[0], Confidence::Medium);
    assert!(sentence(&verdict).contains("busy on a CPU"), "{}", sentence(&verdict));
}

#[test]
fn an_activity_that_may_end_by_itself_is_never_certain() {
    let medium = |stack: Stack, cause: Cause| expect(&behind(2, stack).judge(), cause, &[2], Confidence::Medium);
    medium(Stack::sleep(), Cause::MissingRank);
    medium(Stack::loader(), Cause::DataLoader);
    // On a busy machine, a computing rank gets little processor time.
    let computes = || Stack::new(&[("evaluate", "/job/train.py:99")], &["rangeiter_next"]);
    medium(computes().busy(SECOND / 10).state("R (running)", ""), Cause::MissingRank);
    medium(computes().with(|stack| stack.switches = 40), Cause::MissingRank);
    medium(Stack::checkpoint().with(|stack| stack.switches = 3), Cause::StorageIo);
    expect(&behind(2, Stack::pause()).judge(), Cause::MissingRank, &[2], Confidence::High);
    // Other threads do not matter to a main thread that waits for a signal.
    let others = Stack::pause().busy(5 * SECOND).state("S (sleeping)", "");
    expect(&behind(2, others).judge(), Cause::MissingRank, &[2], Confidence::High);
    let mut job = behind(2, Stack::pause());
    job.child(2, "python evaluate.py", "R (running)");
    let samples = &mut job.rank(2).dump.as_mut().expect("a dump").children[0].samples;
    for (index, sample) in samples.iter_mut().enumerate() {
        (sample.captured_unix_ns, sample.cpu_time_ns) = (SECOND + 5 * SECOND * index as u64, 4 * SECOND * index as u64);
    }
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::Medium);
    assert!(sentence(&verdict).contains("is busy on a CPU"), "{}", sentence(&verdict));
}

#[test]
fn two_culprits_are_both_named() {
    let mut job = Job::with_world(8, 30);
    for rank in [0, 1, 3, 4, 6, 7] {
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.set_stack(2, Stack::loader());
    job.set_stack(5, Stack::loader());
    let verdict = job.judge();
    expect(&verdict, Cause::DataLoader, &[2, 5], Confidence::Medium);
    assert!(sentence(&verdict).starts_with("Ranks 2, 5 wait for their data loader"), "{}", sentence(&verdict));

    job.set_stack(5, Stack::checkpoint());
    let verdict = job.judge();
    expect(&verdict, Cause::DataLoader, &[2, 5], Confidence::Medium);
    assert!(sentence(&verdict).contains("also rank 5 is stuck in write"), "{}", sentence(&verdict));
}

#[test]
fn a_progressing_rank_is_not_to_blame_while_another_stands_still() {
    let mut job = Job::with_world(4, 30);
    job.enter(0x77, 0, Op::AllReduce);
    job.enter(0x77, 1, Op::AllReduce);
    job.set_stack(2, Stack::loader());
    job.set_stack(3, Stack::checkpoint().moving_bytes(1 << 30));
    expect(&job.judge(), Cause::DataLoader, &[2], Confidence::Medium);
}

#[test]
fn without_a_dump_the_culprit_is_known_and_the_confidence_is_lower() {
    let mut job = behind(2, Stack::loader());
    job.no_dump(2);
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::Medium);
    assert!(verdict.to_text().contains("permission denied"), "{}", verdict.to_text());
}

#[test]
fn an_unknown_rank_is_suspected() {
    let mut job = behind(2, Stack::loader());
    job.lost(2);
    expect(&job.judge(), Cause::MissingRank, &[2], Confidence::Medium);
}

#[test]
fn a_lost_rank_is_not_suspected_while_another_is_behind() {
    let mut job = Job::with_world(8, 30);
    for rank in [0, 1, 3, 4, 5, 6] {
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.set_stack(2, Stack::loader());
    job.lost(7);
    expect(&job.judge(), Cause::DataLoader, &[2], Confidence::Medium);
}

#[test]
fn an_unregistered_rank_is_behind() {
    let mut job = behind(2, Stack::pause());
    job.rank(2).presence = Presence::Unregistered.into();
    job.rank(2).flight = None;
    expect(&job.judge(), Cause::MissingRank, &[2], Confidence::High);
}

#[test]
fn a_job_without_recorded_collectives_is_judged_by_its_stacks() {
    let gloo = || {
        Stack::new(
            &[("all_reduce", "/v/site-packages/torch/distributed/distributed_c10d.py:9"), ("main", "/job/train.py:9")],
            &["epoll_wait", "gloo::transport::tcp::Pair::recv"],
        )
    };
    let mut job = Job::new(4);
    job.trigger(TriggerKind::Idle);
    for rank in 0..4 {
        job.set_stack(rank, gloo());
    }
    expect(&job.judge(), Cause::Unknown, &[], Confidence::Low);
    job.set_stack(1, Stack::loader());
    let verdict = job.judge();
    expect(&verdict, Cause::DataLoader, &[1], Confidence::Medium);
    assert_eq!(verdict.victims, [0, 2, 3]);
    job.set_stack(1, Stack::sleep());
    expect(&job.judge(), Cause::MissingRank, &[1], Confidence::Low);
}

#[test]
fn the_one_rank_that_continues_after_all_others_finished_is_named() {
    let mut job = Job::with_world(4, 30);
    job.enter(0x77, 1, Op::AllReduce);
    for rank in [0, 2, 3] {
        job.rank(rank).presence = Presence::Left.into();
        job.rank(rank).exit = "exit code 0".into();
    }
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[1], Confidence::Medium);
    assert!(sentence(&verdict).contains("called one collective too many"), "{}", sentence(&verdict));
    // The others are still shutting down, all at one place.
    let mut shutting_down = Job::with_world(4, 30);
    shutting_down.enter(0x77, 1, Op::AllReduce);
    let barrier =
        [("barrier", "/v/site-packages/torch/distributed/distributed_c10d.py:9"), ("main", "/job/train.py:9")];
    shutting_down.set_stack(1, Stack::new(&barrier, &["epoll_wait"]));
    for rank in [0, 2, 3] {
        shutting_down.set_stack(rank, Stack::new(&[], &["sem_wait", "Py_FinalizeEx", "main"]));
    }
    let verdict = shutting_down.judge();
    expect(&verdict, Cause::MissingRank, &[1], Confidence::Medium);
    assert!(sentence(&verdict).contains("called one collective too many"), "{}", sentence(&verdict));
    // An error is different, and so is a rank that left before the others.
    job.rank(2).exit = "exit code 1".into();
    assert_eq!(job.judge().cause, Cause::ProcessDead);
    let mut job = behind(2, Stack::sleep());
    job.rank(2).presence = Presence::Left.into();
    expect(&job.judge(), Cause::ProcessDead, &[2], Confidence::High);
}

#[test]
fn ranks_of_other_nodes_are_not_accused() {
    use xpu_timer_proto::v1::RankEvidence;
    let mut job = Job::with_world(8, 30);
    for rank in 0..8 {
        job.enter(0x77, rank, Op::AllReduce);
    }
    for rank in 4..8 {
        *job.rank(rank) = RankEvidence { rank, errors: vec!["runs on another node".into()], ..Default::default() };
    }
    let verdict = job.judge();
    expect(&verdict, Cause::Unknown, &[], Confidence::Low);
    assert!(sentence(&verdict).contains("the reason lies with ranks 4-7"), "{}", sentence(&verdict));
    // A visible culprit is named nevertheless.
    job.flight(2).operations.pop();
    job.flight(2).communicators[0].launched = 30;
    job.flight(2).communicators[0].started = 30;
    job.set_stack(2, Stack::loader());
    expect(&job.judge(), Cause::DataLoader, &[2], Confidence::Medium);
}

#[test]
fn several_lost_ranks_have_low_confidence() {
    let mut job = Job::with_world(8, 30);
    for rank in 0..8 {
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.lost(3);
    job.lost(6);
    expect(&job.judge(), Cause::MissingRank, &[3, 6], Confidence::Low);
}

#[test]
fn a_finalizer_that_blocks_is_not_a_collection() {
    let native = ["pause", "slot_tp_finalize", "gc_collect_main", "gc_collect"];
    let stack = Stack::new(&[("__del__", "/job/train.py:12"), ("main", "/job/train.py:9")], &native);
    let verdict = behind(1, stack.clone()).judge();
    expect(&verdict, Cause::MissingRank, &[1], Confidence::High);
    assert!(sentence(&verdict).contains("train.py:12 in __del__"), "{}", sentence(&verdict));
    expect(&behind(1, stack.busy(4 * SECOND)).judge(), Cause::PythonGc, &[1], Confidence::Medium);
}

#[test]
fn a_paused_container_is_stopped_although_its_state_does_not_say_so() {
    for (state, wchan) in [
        ("D (disk sleep)", "__refrigerator"),
        ("S (sleeping)", "do_freezer_trap"),
        ("D (disk sleep)", "hrtimer_nanosleep"),
        ("D (disk sleep)", "futex_do_wait"),
    ] {
        let verdict = behind(1, Stack::sleep().state(state, wchan)).judge();
        expect(&verdict, Cause::ProcessStopped, &[1], Confidence::High);
        assert!(sentence(&verdict).contains("is frozen with its control group"), "{}", sentence(&verdict));
    }
}

#[test]
fn a_lock_on_a_file_is_not_sure_to_be_this_rank_s_fault() {
    let stack = Stack::new(&[("index", "/job/train.py:12")], &["__GI___flock", "fcntl_flock"]);
    let verdict = behind(1, stack).judge();
    expect(&verdict, Cause::StorageIo, &[1], Confidence::Medium);
    assert!(sentence(&verdict).contains("waits for a file lock that"), "{}", sentence(&verdict));
}

#[test]
fn a_thread_that_is_stuck_is_named_beside_the_lock_that_the_main_thread_waits_for() {
    let mut job = behind(1, Stack::lock());
    job.thread(
        1,
        native_thread(5002, &["__GI___libc_write", "os_write"], "S (sleeping)", "pipe_write", Some(1), 9),
        Some(python_thread(5002, "saver", &[("save", "/job/train.py:46".to_owned())])),
    );
    let verdict = job.judge();
    expect(&verdict, Cause::HostLock, &[1], Confidence::Medium);
    assert!(sentence(&verdict).contains("while its thread saver is inside write"), "{}", sentence(&verdict));
}

#[test]
fn main_threads_that_wait_for_training_threads_are_ignored() {
    let joins = || Stack::new(&[], &["__futex_abstimed_wait_common64", "wait_for_thread_shutdown", "Py_FinalizeEx"]);
    let mut job = behind(3, joins());
    expect(&job.judge(), Cause::Teardown, &[3], Confidence::High);
    (0..3).for_each(|rank| job.set_stack(rank, joins()));
    let verdict = job.judge();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::MissingRank, &[3][..]), "{}", verdict.to_text());
}

#[test]
fn pending_operations_of_a_dead_rank_are_not_waits() {
    let mut job = Job::with_world(4, 30);
    for rank in [0, 2, 3] {
        job.done(0x77, rank, 1);
        job.enter(0x77, rank, Op::AllReduce);
    }
    // Its watcher ended with it, so its last collective still counts as pending.
    job.queue(0x77, 1, Op::AllReduce);
    job.rank(1).presence = Presence::Left.into();
    job.rank(1).exit = "exit code 1".into();
    let verdict = job.judge();
    expect(&verdict, Cause::ProcessDead, &[1], Confidence::High);
    assert!(sentence(&verdict).contains("ranks 0, 2-3 wait for it in all_reduce 32"), "{}", sentence(&verdict));
}

#[test]
fn a_rank_that_ended_with_an_error_before_there_was_a_communicator_is_dead() {
    let mut job = Job::new(4);
    (1..4).for_each(|rank| job.set_stack(rank, Stack::init()));
    job.rank(0).dump = None;
    job.rank(0).presence = Presence::Left.into();
    job.trigger(TriggerKind::Idle);
    // It is not known how it ended, and the others wait for it nevertheless.
    assert_ne!(job.judge().cause, Cause::NotAHang);
    job.rank(0).exit = "exit code 1".into();
    let verdict = job.judge();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::ProcessDead, &[0][..]), "{}", verdict.to_text());
    assert!(sentence(&verdict).contains("exit code 1"), "{}", sentence(&verdict));
}

#[test]
fn one_of_two_that_left_is_not_sure_to_have_left_too_early() {
    let left = |world: u32, gone: &[u32]| {
        let mut job = Job::with_world(world, 30);
        for rank in (0..world).filter(|rank| !gone.contains(rank)) {
            job.enter(0x77, rank, Op::AllReduce);
        }
        for rank in gone {
            job.rank(*rank).presence = Presence::Left.into();
            job.rank(*rank).exit = "exit code 0".into();
        }
        job.judge()
    };
    expect(&left(2, &[1]), Cause::ProcessDead, &[1], Confidence::Medium);
    expect(&left(4, &[1, 2]), Cause::ProcessDead, &[1, 2], Confidence::Medium);
    expect(&left(4, &[1]), Cause::ProcessDead, &[1], Confidence::High);
}

#[test]
fn a_rank_that_waits_for_the_store_waits_for_another_rank() {
    let store = Stack::new(&[("main", "/job/train.py:30")], &["poll", "c10d::TCPStore::wait"]);
    let mut job = behind(2, Stack::checkpoint());
    job.flight(3).operations.pop();
    let counters = &mut job.flight(3).communicators[0];
    (counters.launched, counters.started) = (30, 30);
    job.set_stack(3, store.clone());
    expect(&job.judge(), Cause::StorageIo, &[2], Confidence::High);
    // If no other rank is behind, this one is named.
    expect(&behind(3, store).judge(), Cause::MissingRank, &[3], Confidence::High);
}

#[test]
fn a_stop_of_the_capture_is_not_a_debugger() {
    let traced = |first: &str, ran: u64| {
        let mut job = behind(2, Stack::sleep().state("t (tracing stop)", ""));
        let dump = job.rank(2).dump.as_mut().expect("the rank has a dump");
        let sample = dump.first_sample.as_mut().expect("two samples");
        sample.process_state = first.to_owned();
        sample.stacktrace[0].context_switches -= ran;
        job.judge().cause
    };
    assert_eq!(traced("t (tracing stop)", 0), Cause::ProcessStopped);
    assert_eq!(traced("S (sleeping)", 0), Cause::MissingRank);
    assert_eq!(traced("t (tracing stop)", 1), Cause::MissingRank);
}

/// A job in which rank 1 is in this call, which waits for an object.
fn awaits(native: &'static str, kind: AwaitedKind, name: &str, holders: &[(i32, &str, bool)]) -> Verdict {
    let mut job = Job::with_world(4, 9);
    for rank in [0, 2, 3] {
        job.enter(0x77, rank, Op::AllReduce);
    }
    for rank in 0..4 {
        job.flight(rank).rank.as_mut().expect("it is known").pid = 1000 + rank as i32;
    }
    job.set_stack(1, Stack::new(&[("save", "/job/train.py:7")], &[native]));
    let holder = |(pid, name, child): &(i32, &str, bool)| Holder {
        pid: *pid,
        name: (*name).into(),
        child: *child,
        ..Holder::default()
    };
    let holders = holders.iter().map(holder).collect();
    let thread = &mut job.rank(1).dump.as_mut().expect("a dump").stacktrace[0];
    thread.awaited = Some(Awaited { kind: kind.into(), name: name.into(), holders, ..Default::default() });
    job.judge()
}

#[test]
fn the_sentence_names_the_peer_of_a_blocked_system_call() {
    let verdict = awaits("flock", AwaitedKind::Lock, "/data/cache.lock", &[(77, "python3", false)]);
    expect(&verdict, Cause::StorageIo, &[1], Confidence::Medium);
    let expected = "waits for the lock on cache.lock, held by process 77 (python3), in flock";
    assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
    let verdict = awaits("read", AwaitedKind::File, "/dev/pts/0", &[]);
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::MissingRank, &[1][..]), "{}", verdict.to_text());
    assert!(sentence(&verdict).contains("waits for its terminal /dev/pts/0"), "{}", sentence(&verdict));
    let verdict = awaits("read", AwaitedKind::File, "/data/shard", &[]);
    expect(&verdict, Cause::StorageIo, &[1], Confidence::High);
    assert!(verdict.sentence.contains("is stuck in read of shard"), "{}", verdict.sentence);
    let verdict = awaits("recv", AwaitedKind::Socket, "10.0.0.5:29500", &[]);
    expect(&verdict, Cause::MissingRank, &[1], Confidence::Medium);
    assert!(verdict.sentence.contains("and waits for 10.0.0.5:29500"), "{}", verdict.sentence);
}

#[test]
fn a_read_of_a_child_process_is_not_storage() {
    let verdict = awaits("read", AwaitedKind::Pipe, "", &[(4242, "sh", true)]);
    expect(&verdict, Cause::MissingRank, &[1], Confidence::High);
    let expected = "a pipe whose other end its child process 4242 (sh) has open";
    assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
    let verdict = awaits("read", AwaitedKind::Pipe, "", &[(1001, "python3", false)]);
    expect(&verdict, Cause::StorageIo, &[1], Confidence::High);
    assert!(verdict.sentence.contains("a pipe whose other end only it has open"), "{}", verdict.sentence);
    let both = [(4242, "sh", false), (1003, "python3", false), (1001, "python3", false)];
    let expected = "a pipe whose other end process 4242 (sh) and rank 3 (process 1003) have open";
    let verdict = awaits("read", AwaitedKind::Pipe, "", &both);
    assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
    let verdict = awaits("flock", AwaitedKind::Lock, "/data/cache.lock", &[(1001, "python3", false)]);
    assert!(verdict.sentence.contains("the lock on cache.lock, which it holds itself"), "{}", verdict.sentence);
}

#[test]
fn a_process_that_has_said_goodbye_and_still_ends_is_in_its_teardown() {
    let mut job = Job::with_world(3, 9);
    for rank in [0, 1] {
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.set_stack(2, Stack::new(&[], &["pause", "__run_exit_handlers"]));
    job.rank(2).presence = Presence::Left.into();
    let verdict = job.judge();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::Teardown, &[2][..]), "{}", verdict.to_text());
}

#[test]
fn a_polling_rank_is_not_named_beside_one_that_stands_still() {
    let polling = Stack::sleep().with(|stack| stack.switches = 50);
    let mut job = behind(2, polling.clone());
    expect(&job.judge(), Cause::MissingRank, &[2], Confidence::Medium);
    for (stack, cause) in [(Stack::checkpoint(), Cause::StorageIo), (Stack::loader(), Cause::DataLoader)] {
        let mut job = Job::with_world(4, 30);
        job.enter(0x77, 0, Op::AllReduce);
        job.enter(0x77, 1, Op::AllReduce);
        job.set_stack(2, polling.clone());
        job.set_stack(3, stack);
        expect(&job.judge(), cause, &[3], Confidence::Medium);
    }
    job.dies(3, "exit code 9");
    let counters = &mut job.flight(3).communicators[0];
    (counters.launched, counters.started) = (30, 30);
    job.flight(3).operations.pop();
    expect(&job.judge(), Cause::ProcessDead, &[3], Confidence::Medium);
}

#[test]
fn a_killed_rank_is_blamed_before_one_that_ended_with_an_error() {
    let mut job = Job::with_world(4, 30);
    job.enter(0x77, 0, Op::AllReduce);
    job.enter(0x77, 1, Op::AllReduce);
    job.dies(2, "exit code 1");
    job.dies(3, "killed by SIGKILL");
    expect(&job.judge(), Cause::ProcessDead, &[3], Confidence::Medium);
}

#[test]
fn an_assumed_wait_lowers_the_confidence() {
    let mut job = Job::with_world(4, 30);
    job.comm(0x88, &[1, 2]);
    for rank in [0, 3] {
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.enter(0x88, 1, Op::AllReduce);
    job.set_stack(2, Stack::checkpoint());
    expect(&job.judge(), Cause::StorageIo, &[2], Confidence::High);
    job.no_dump(1);
    expect(&job.judge(), Cause::StorageIo, &[2], Confidence::Medium);
}

#[test]
fn words_agree_with_the_number_of_ranks() {
    let mut job = Job::with_world(4, 30);
    (0..2).for_each(|rank| job.enter(0x77, rank, Op::AllReduce));
    (2..4).for_each(|rank| job.no_dump(rank));
    let expected = "Ranks 2-3 have not entered all_reduce 31 of communicator 0x77 (4 ranks); their place is unknown;";
    assert!(job.judge().sentence.starts_with(expected), "{}", job.judge().sentence);

    for rank in 2..4 {
        job.set_stack(rank, Stack::device_wait());
        job.kernel(rank, "attention");
        let read_ns = job.flight(rank).read_ns;
        job.flight(rank).operations.last_mut().expect("a kernel").started_ns = read_ns - SECOND;
        job.queue(0x77, rank, Op::AllReduce);
    }
    let expected =
        "Ranks 2-3 have slow devices, which make progress, so this is probably not a hang; they are at train.py:90";
    assert!(job.judge().sentence.starts_with(expected), "{}", job.judge().sentence);
}

#[test]
fn a_polling_rank_caught_in_a_poll_is_not_busy() {
    // In the first sample it was at another line of the same function and polled for a file.
    let looks = Stack::sleep().was_at("evaluate", "/job/train.py:98").with(|stack| stack.switches += 100);
    let verdict = behind(2, looks.clone()).judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::Medium);
    // In another function, or with processor time of its own, it makes progress.
    let elsewhere = Stack::sleep().was_at("load", "/job/train.py:98");
    expect(&behind(2, elsewhere).judge(), Cause::LongStep, &[2], Confidence::Medium);
    let computes = looks.busy(SECOND);
    expect(&behind(2, computes).judge(), Cause::LongStep, &[2], Confidence::Medium);
}

#[test]
fn a_rank_in_an_mpi_window_is_not_to_blame_for_a_sleeping_member() {
    let mut job = Job::with_world(4, 30);
    job.enter(0x77, 0, Op::AllReduce);
    job.comm(0x99, &[0, 1, 2, 3]);
    for (rank, function) in [(1, "MPI_Win_start"), (3, "MPI_Win_test")] {
        let call = Job::operation(0x99, 1, Op::Unspecified);
        job.push(rank, Operation { kind: OpKind::HostCall.into(), function: function.into(), ..call });
    }
    // No record shows that rank 2, which sleeps, waits. Rank 3 polls often.
    job.set_stack(1, Stack::sleep());
    job.set_stack(2, Stack::sleep());
    job.set_stack(3, Stack::sleep().busy(SECOND));
    expect(&job.judge(), Cause::MissingRank, &[2], Confidence::Medium);
    // Nobody waits for rank 2 in a window without it.
    job.comm(0x98, &[1]);
    job.flight(1).operations.last_mut().expect("it was pushed").communicator = 0x98;
    expect(&job.judge(), Cause::MissingRank, &[1, 2], Confidence::Medium);
}

#[test]
fn a_manual_dump_does_not_accuse_an_idle_rank() {
    let mut job = Job::new(1);
    job.set_stack(0, Stack::checkpoint());
    job.trigger(TriggerKind::Idle);
    assert_eq!(job.judge().culprits, [0]);
    job.trigger(TriggerKind::Manual);
    assert_eq!(job.judge().culprits, [] as [u32; 0]);
}

#[test]
fn different_causes_lower_the_confidence() {
    let mut job = Job::with_world(4, 30);
    for rank in 0..2 {
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.set_stack(3, Stack::sleep().state("T (stopped)", ""));
    job.set_stack(2, Stack::sleep().state("T (stopped)", ""));
    expect(&job.judge(), Cause::ProcessStopped, &[2, 3], Confidence::High);
    job.set_stack(2, Stack::checkpoint());
    expect(&job.judge(), Cause::ProcessStopped, &[2, 3], Confidence::Medium);
}
