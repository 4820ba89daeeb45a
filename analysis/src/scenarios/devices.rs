//! The device of a rank is the reason, or the watcher that reports on it is stale.

use super::expect;
use crate::{
    Cause, Confidence, HangEvidence,
    testing::{Job, SECOND, Stack},
};
use xpu_timer_proto::v1::{Op, OpKind, OpStatus, Operation, TriggerKind};

fn queued(culprit: u32) -> Job {
    let mut job = Job::with_world(4, 30);
    for rank in 0..4 {
        if rank == culprit {
            job.queue(0x77, rank, Op::AllReduce);
        } else {
            job.enter(0x77, rank, Op::AllReduce);
        }
    }
    job
}

#[test]
fn a_collective_that_is_launched_and_does_not_begin_is_blocked_by_something_else() {
    let mut job = queued(2);
    job.last_kernel(2, "backward_layer_3");
    let verdict = job.judge();
    expect(&verdict, Cause::KernelHang, &[2], Confidence::High);
    assert!(verdict.sentence.contains("backward_layer_3"), "{}", verdict.sentence);
    assert_eq!(verdict.victims, [0, 1, 3]);

    let mut job = queued(0);
    job.kernel(0, "stuck_kernel");
    let verdict = job.judge();
    expect(&verdict, Cause::KernelHang, &[0], Confidence::High);
    assert!(verdict.sentence.contains("stuck_kernel does not complete"), "{}", verdict.sentence);
}

#[test]
fn a_host_that_waits_for_its_device_without_a_collective_has_a_stuck_kernel() {
    let mut job = Job::with_world(4, 30);
    for rank in [0, 1, 3] {
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.last_kernel(2, "adamw_step");
    let verdict = job.judge();
    expect(&verdict, Cause::KernelHang, &[2], Confidence::High);
    assert!(verdict.sentence.contains("adamw_step"), "{}", verdict.sentence);
}

#[test]
fn several_collectives_in_flight_do_not_confuse() {
    let mut job = queued(2);
    for rank in 0..4 {
        for _ in 0..5 {
            job.queue(0x77, rank, Op::AllReduce);
        }
    }
    expect(&job.judge(), Cause::KernelHang, &[2], Confidence::High);
}

#[test]
fn the_record_of_a_stuck_watcher_is_not_trusted() {
    let mut job = queued(2);
    let flight = job.flight(2);
    flight.health.as_mut().unwrap().heartbeat_ns = flight.read_ns - 30 * SECOND;
    expect(&job.judge(), Cause::KernelHang, &[2], Confidence::Low);
}

#[test]
fn a_record_that_lost_operations_is_not_trusted_fully() {
    let mut job = queued(2);
    job.flight(0).health.as_mut().unwrap().dropped = 3;
    expect(&job.judge(), Cause::KernelHang, &[2], Confidence::Medium);
}

#[test]
fn a_job_of_one_rank() {
    let mut job = Job::with_world(1, 3);
    job.queue(0x77, 0, Op::AllReduce);
    job.kernel(0, "stuck_kernel");
    assert_eq!((job.judge().cause, job.judge().culprits), (Cause::KernelHang, vec![0]));
    let mut job = Job::new(1);
    job.kernel(0, "stuck_kernel");
    expect(&job.judge(), Cause::KernelHang, &[0], Confidence::Medium);
}

/// While every copy is recorded, a hang has pending copies.
#[test]
fn copies_that_wait_behind_a_collective_do_not_hide_the_missing_rank() {
    let mut job = Job::with_world(4, 30);
    for rank in [0, 1, 3] {
        job.enter(0x77, rank, Op::AllReduce);
        job.queued_copy(rank);
    }
    job.set_stack(2, Stack::loader());
    let verdict = job.judge();
    assert_eq!(verdict.culprits, [2], "{}", verdict.sentence);
    assert_ne!(verdict.cause, Cause::KernelHang, "{}", verdict.sentence);
}

#[test]
fn a_copy_behind_a_kernel_that_was_not_recorded_shows_the_stuck_device() {
    let mut job = Job::new(1);
    job.queued_copy(0);
    let verdict = job.judge();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::KernelHang, &[0][..]), "{}", verdict.sentence);
    assert!(verdict.sentence.contains("cudaMemcpyAsync of 1048576 bytes"), "{}", verdict.sentence);
}

/// A job of one rank that has used its device some time ago, and now waits for it.
fn alone_in_device_wait(launched_ago: u64) -> Job {
    let mut job = Job::new(1);
    job.trigger(TriggerKind::Idle);
    job.last_kernel(0, "wait_for_flag");
    job.flight(0).last_launch_ns = job.flight(0).read_ns - launched_ago;
    job
}

#[test]
fn a_job_of_one_rank_waits_for_a_kernel_that_was_not_recorded() {
    let verdict = alone_in_device_wait(60 * SECOND).judge();
    expect(&verdict, Cause::KernelHang, &[0], Confidence::Medium);
    assert!(verdict.sentence.contains("the last launched kernel is wait_for_flag"), "{}", verdict.sentence);
    // The device may also be behind its host, so nothing acts on this verdict.
    assert_eq!(verdict.hang, HangEvidence::None);
}

#[test]
fn a_job_of_one_rank_whose_watcher_waits_for_the_driver_too() {
    // A copy to the host, and the release of memory, hold a lock of the driver while they wait.
    let mut job = alone_in_device_wait(60 * SECOND);
    job.trigger(TriggerKind::Heartbeat);
    let flight = job.flight(0);
    flight.health.as_mut().unwrap().heartbeat_ns = flight.read_ns - 30 * SECOND;
    expect(&job.judge(), Cause::KernelHang, &[0], Confidence::Low);

    // The watcher has not seen that a graph completed, which was launched before the kernel. The
    // recorded time of the kernel is that of the coarse clock, and so may be before the graph's.
    let flight = job.flight(0);
    let recorded_ns = flight.streams[0].last_launch_ns;
    let graph = Operation {
        ticket: 1,
        kind: OpKind::GraphLaunch.into(),
        op: Op::Graph.into(),
        stream: 0x10,
        ..Default::default()
    };
    flight.operations.push(graph);
    for entered_ns in [recorded_ns - SECOND, recorded_ns + SECOND / 200] {
        job.flight(0).operations.last_mut().unwrap().entered_ns = entered_ns;
        let verdict = job.judge();
        expect(&verdict, Cause::KernelHang, &[0], Confidence::Low);
        assert!(verdict.sentence.contains("the last launched kernel is wait_for_flag"), "{}", verdict.sentence);
    }
    job.flight(0).operations.last_mut().unwrap().entered_ns = recorded_ns + SECOND;
    let verdict = job.judge();
    assert!(verdict.sentence.contains("graph_launch does not complete"), "{}", verdict.sentence);
}

#[test]
fn a_job_of_one_rank_that_uses_its_device_is_not_suspected() {
    assert_ne!(alone_in_device_wait(SECOND).judge().cause, Cause::KernelHang, "it used its device a second ago");
    let mut job = alone_in_device_wait(60 * SECOND);
    job.set_stack(0, Stack::device_wait().was_at("forward", "/job/train.py:80"));
    assert_ne!(job.judge().cause, Cause::KernelHang, "it reached another line");
}

#[test]
fn ranks_that_wait_for_their_devices_in_a_busy_loop_make_no_progress() {
    let mut job = Job::new(4);
    job.trigger(TriggerKind::Idle);
    expect(&job.judge(), Cause::Unknown, &[], Confidence::Low);
}

#[test]
fn one_rank_has_not_launched_its_graph() {
    use crate::testing::Stack;
    let mut job = Job::new(4);
    for rank in [0, 1, 3] {
        job.push(
            rank,
            Operation { kind: OpKind::GraphLaunch.into(), started_ns: 5, ..Job::operation(0, 0, Op::Graph) },
        );
    }
    job.set_stack(2, Stack::loader());
    expect(&job.judge(), Cause::DataLoader, &[2], Confidence::Medium);
}

#[test]
fn a_rank_that_is_behind_explains_the_graphs_of_the_others() {
    let with = |launched: [u64; 4], started: [bool; 4], kernel: Option<u32>| {
        let mut job = Job::new(4);
        if let Some(rank) = kernel {
            job.kernel(rank, "stuck_kernel");
        }
        for (rank, (launched, started)) in (0..).zip(launched.into_iter().zip(started)) {
            job.flight(rank).graphs_launched = launched;
            let (kind, started_ns) = (OpKind::GraphLaunch.into(), u64::from(started));
            job.push(rank, Operation { kind, started_ns, ..Job::operation(0, 0, Op::Graph) });
        }
        job.judge()
    };
    let verdict = with([9; 4], [true, true, false, true], Some(2));
    expect(&verdict, Cause::KernelHang, &[2], Confidence::Medium);
    assert_eq!(verdict.victims, [0, 1, 3]);
    assert!(verdict.sentence.contains("stuck_kernel does not complete"), "{}", verdict.sentence);
    assert_eq!(with([9; 4], [true, true, false, true], None).culprits, [2], "its device is blocked");
    assert_eq!(with([9, 9, 8, 9], [true; 4], None).culprits, [2], "the others are in the next graph");
    assert_eq!(with([9; 4], [true; 4], None).culprits, [0, 1, 2, 3]);
    assert_eq!(with([9, 8, 7, 9], [true; 4], None).culprits, [0, 1, 2, 3], "the numbers differ everywhere");
}

#[test]
fn a_dump_on_demand_of_a_healthy_job_is_not_a_hang() {
    let mut job = Job::with_world(4, 30);
    job.trigger(TriggerKind::Manual);
    assert_eq!(job.judge().cause, Cause::NotAHang);
    for rank in 0..4 {
        job.enter_with(0x77, rank, Op::AllReduce, |operation| operation.entered_ns += 59 * SECOND + SECOND / 2);
    }
    expect(&job.judge(), Cause::NotAHang, &[], Confidence::Medium);
}

#[test]
fn a_dump_on_demand_of_a_job_without_a_pending_operation_is_not_a_hang() {
    let mut job = Job::with_world(4, 30);
    job.trigger(TriggerKind::Manual);
    (0..4).for_each(|rank| job.set_stack(rank, Stack::sleep()));
    let verdict = job.judge();
    expect(&verdict, Cause::NotAHang, &[], Confidence::Low);
    assert!(verdict.sentence.contains("no operation is pending on any rank"), "{}", verdict.sentence);
}

#[test]
fn a_rank_that_cannot_run_or_is_unknown_counts_although_the_operations_are_young() {
    let judged = |change: &dyn Fn(&mut Job)| {
        let mut job = Job::with_world(4, 30);
        job.trigger(TriggerKind::Manual);
        for rank in [0, 1, 3] {
            job.enter_with(0x77, rank, Op::AllReduce, |operation| operation.entered_ns += 59 * SECOND + SECOND / 2);
        }
        change(&mut job);
        let verdict = job.judge();
        (verdict.cause, verdict.culprits)
    };
    assert_eq!(judged(&|_| ()), (Cause::NotAHang, vec![]));
    let stopped = judged(&|job| job.set_stack(2, Stack::sleep().state("T (stopped)", "")));
    assert_eq!(stopped, (Cause::ProcessStopped, vec![2]));
    assert_eq!(judged(&|job| job.lost(2)), (Cause::MissingRank, vec![2]));
}

#[test]
fn a_dump_on_demand_of_a_young_hang_is_a_hang() {
    let mut job = queued(2);
    job.evidence.hang_timeout_ns = 600 * SECOND;
    job.trigger(TriggerKind::Manual);
    expect(&job.judge(), Cause::KernelHang, &[2], Confidence::Medium);
}

#[test]
fn a_device_that_is_behind_and_goes_on_is_slow() {
    let slow = |completed_ago: u64| {
        let mut job = Job::with_world(4, 30);
        for rank in [0, 1, 3] {
            job.enter(0x77, rank, Op::AllReduce);
        }
        job.queue(0x77, 2, Op::AllReduce);
        let read_ns = job.flight(2).read_ns;
        let done = job.flight(2).operations.iter_mut().rev().nth(1).expect("it has completed some");
        (done.stream, done.completed_ns) = (0x10, read_ns - completed_ago);
        job.judge()
    };
    expect(&slow(SECOND), Cause::LongStep, &[2], Confidence::Medium);
    expect(&slow(20 * SECOND), Cause::KernelHang, &[2], Confidence::High);
}

#[test]
fn a_device_whose_host_goes_on_may_only_be_slow() {
    let mut job = queued(2);
    job.set_stack(2, Stack::device_wait().was_at("forward", "/job/train.py:80"));
    expect(&job.judge(), Cause::KernelHang, &[2], Confidence::Low);
}

#[test]
fn a_group_that_is_not_closed_is_not_a_stuck_device() {
    let mut job = Job::with_world(4, 10);
    for rank in [0, 1, 3] {
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.queue(0x77, 2, Op::AllReduce);
    job.flight(2).operations.last_mut().expect("it was pushed").group = 1;
    job.set_stack(2, Stack::sleep());
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::Medium);
    assert!(verdict.sentence.contains("in a group that it has not closed"), "{}", verdict.sentence);
    // A rank that waits for the device has closed its group.
    job.set_stack(2, Stack::device_wait());
    assert_eq!(job.judge().cause, Cause::KernelHang);
}

#[test]
fn a_polling_rank_counts_as_waiting() {
    let mut job = Job::with_world(4, 40);
    for rank in 1..4 {
        job.enter_with(0x77, rank, Op::Barrier, |operation| operation.status = OpStatus::Completed.into());
        let asked = job.flight(rank).operations.last().expect("it was pushed").clone();
        job.push(rank, asked);
    }
    job.set_stack(0, Stack::checkpoint());
    expect(&job.judge(), Cause::StorageIo, &[0], Confidence::High);
}

#[test]
fn a_rank_whose_record_ends_early_is_behind() {
    let mut job = Job::with_world(4, 12);
    job.enter(0x77, 0, Op::AllReduce);
    job.flight(0).health.as_mut().expect("a health record").heartbeat_ns = 900 * SECOND;
    job.set_stack(0, Stack::new(&[], &["nanosleep"]));
    for rank in 1..4 {
        job.done(0x77, rank, 1);
    }
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[0], Confidence::Medium);
    assert!(verdict.sentence.contains("recorded nothing after entering all_reduce 13"), "{}", verdict.sentence);
}

#[test]
fn a_host_that_is_busy_inside_nccl_does_not_wait_for_its_device() {
    let mut job = Job::with_world(4, 30);
    for rank in [0, 1, 3] {
        job.enter(0x77, rank, Op::AllReduce);
    }
    let native = ["ncclLocalOpAppend", "ncclProxySaveOp", "ncclLaunchKernelAfter_NoCuda", "ncclAllReduce"];
    job.set_stack(2, Stack::new(&[("step", "/job/train.py:88")], &native).busy(5 * SECOND));
    job.queue(0x77, 2, Op::AllReduce);
    job.flight(2).operations.last_mut().expect("it was just added").returned_ns = 0;
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::Medium);
    for part in ["Rank 2 has called all_reduce 31", "the call has not returned", "ncclLocalOpAppend", "busy on a CPU"] {
        assert!(verdict.sentence.contains(part), "{part} in {}", verdict.sentence);
    }
    // The call has returned, and the device does not start the collective.
    job.flight(2).operations.last_mut().expect("it was just added").returned_ns = 1;
    assert_eq!(job.judge().cause, Cause::KernelHang, "{}", job.judge().to_text());
}

const REDUCE: &str = "cross_device_reduce_1stage";
const WAIT: &str = "c10d::symmetric_memory::wait_signal_kernel";
const PUT: &str = "c10d::symmetric_memory::put_signal_kernel";

/// Ranks that have launched [`REDUCE`] `launches` times. Those of `stuck` are in the last launch.
fn reduces(launches: [u64; 4], stuck: &[u32]) -> Job {
    let mut job = Job::new(4);
    for (rank, launches) in (0..).zip(launches) {
        job.launches(rank, REDUCE, launches);
        job.launches(rank, "forward_layer", launches * 3);
    }
    for rank in stuck {
        job.kernel(*rank, REDUCE);
    }
    job
}

#[test]
fn a_rank_that_has_not_launched_the_kernel_in_which_the_others_are_stuck() {
    let mut job = reduces([42, 42, 41, 42], &[0, 1, 3]);
    job.set_stack(2, Stack::loader());
    let verdict = job.judge();
    expect(&verdict, Cause::DataLoader, &[2], Confidence::Medium);
    assert_eq!((verdict.victims.as_slice(), verdict.hang), (&[0, 1, 3][..], HangEvidence::PendingOperation));
    assert!(verdict.sentence.contains("in launch 42 of cross_device_reduce_1stage (4 ranks)"), "{}", verdict.sentence);
    assert_eq!((verdict.communicators[0].id.as_str(), verdict.communicators[0].groups[0].launched), (REDUCE, 41));

    job.set_stack(2, Stack::pause());
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::High);
    assert!(verdict.sentence.starts_with("Rank 2 has launched cross_device_reduce_1stage 41 times; it is at"));
    let counts = "rank 2 has launched cross_device_reduce_1stage 41 times on stream 0x7f12, ranks 0-1, 3 42 times";
    assert!(verdict.evidence.iter().any(|line| line.text == counts), "{:?}", verdict.evidence);
}

#[test]
fn a_rank_that_never_launched_the_kernel_may_not_belong_to_the_group() {
    let mut job = reduces([42, 42, 42, 42], &[0, 1, 3]);
    job.flight(2).kernels.retain(|kernel| kernel.name != REDUCE);
    job.set_stack(2, Stack::pause());
    expect(&job.judge(), Cause::MissingRank, &[2], Confidence::Medium);
}

#[test]
fn a_kernel_in_which_all_ranks_are_stuck_accuses_none() {
    let verdict = reduces([42; 4], &[0, 1, 2, 3]).judge();
    expect(&verdict, Cause::Unknown, &[], Confidence::Low);
    let what = "ranks 0-3 wait in launch 42 of cross_device_reduce_1stage (4 ranks)";
    assert!(verdict.sentence.contains(what), "{}", verdict.sentence);
    assert_eq!(verdict.victims, [0, 1, 2, 3]);
}

#[test]
fn a_kernel_before_the_one_that_communicates_hangs() {
    let mut job = reduces([42; 4], &[0, 1, 3]);
    job.kernel(2, REDUCE);
    job.flight(2).operations[0].started_ns = 0;
    job.last_kernel(2, REDUCE);
    let verdict = job.judge();
    expect(&verdict, Cause::KernelHang, &[2], Confidence::High);
    assert!(verdict.sentence.contains("an operation that is not a collective does not complete"));
    assert_eq!(verdict.victims, [0, 1, 3]);
}

#[test]
fn a_kernel_that_all_others_completed_hangs() {
    let mut job = reduces([42; 4], &[3]);
    let verdict = job.judge();
    assert_eq!((verdict.cause, verdict.culprits), (Cause::KernelHang, vec![3]));
    // So does a kernel that does not communicate, while the others wait in a collective.
    job = Job::with_world(4, 30);
    for rank in 0..4 {
        job.launches(rank, "gemm", 42);
        if rank != 1 {
            job.enter(0x77, rank, Op::AllReduce);
        }
    }
    job.kernel(1, "gemm");
    expect(&job.judge(), Cause::KernelHang, &[1], Confidence::High);
}

#[test]
fn a_kernel_left_out_on_another_stream_is_found_by_its_launches() {
    let mut job = reduces([42; 4], &[0, 2, 3]);
    for rank in 0..4 {
        job.launches(rank, WAIT, 42);
        job.launches(rank, PUT, if rank == 2 { 41 } else { 42 });
    }
    // The device of rank 1 waits for the signal, so the others wait for it.
    job.kernel(1, WAIT);
    job.kernel(1, REDUCE);
    job.flight(1).operations[1].started_ns = 0;
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::Medium);
    let beginning = format!("Rank 2 has launched {PUT} 41 times on stream 0x7f12, ranks 0-1, 3 42 times; it is at");
    assert!(verdict.sentence.starts_with(&beginning), "{}", verdict.sentence);
    assert_eq!(verdict.victims, [0, 1, 3]);
}

#[test]
fn the_group_of_a_kernel_is_the_communicator_in_which_a_rank_is_behind() {
    // Two tensor groups and two pipeline stages. The second stage has launched less, because it
    // waits for the first one.
    let mut job = Job::new(4);
    for (id, ranks) in [(0x10, [0, 1]), (0x11, [2, 3]), (0x20, [0, 2]), (0x21, [1, 3])] {
        job.comm(id, &ranks);
    }
    for (rank, launches) in (0..).zip([42, 41, 37, 37]) {
        job.launches(rank, REDUCE, launches);
    }
    job.kernel(0, REDUCE);
    job.set_stack(1, Stack::pause());
    job.transfer(0x20, 2, Op::Recv, 0);
    job.transfer(0x21, 3, Op::Recv, 0);
    let verdict = job.judge();
    assert_eq!((verdict.cause, verdict.culprits.as_slice()), (Cause::MissingRank, &[1][..]), "{}", verdict.sentence);
    assert_eq!(verdict.victims, [0, 2, 3]);
}

#[test]
fn a_rank_that_died_in_the_kernel_of_the_others_is_dead() {
    for launched in [41, 42] {
        let mut job = reduces([42, 42, launched, 42], &[0, 1, 3]);
        if launched == 42 {
            job.kernel(2, REDUCE);
        }
        job.dies(2, "killed by SIGKILL");
        let verdict = job.judge();
        expect(&verdict, Cause::ProcessDead, &[2], Confidence::High);
        assert_eq!(verdict.victims, [0, 1, 3]);
    }
}

#[test]
fn a_rank_that_launches_another_kernel_than_the_others() {
    let mut job = reduces([42, 42, 41, 42], &[0, 1, 3]);
    let other = "cross_device_reduce_2stage";
    for rank in 0..4 {
        job.launches(rank, other, if rank == 2 { 8 } else { 7 });
    }
    job.kernel(2, other);
    let verdict = job.judge();
    assert_eq!((verdict.cause, verdict.culprits.as_slice()), (Cause::OpMismatch, &[2][..]), "{}", verdict.sentence);
    assert_eq!(verdict.victims, [0, 1, 3]);
}

#[test]
fn graphs_with_kernels_that_communicate_are_compared_by_their_launches() {
    let graphs = |launched: [u64; 4]| {
        let mut job = reduces([9; 4], &[]);
        for (rank, launched) in (0..).zip(launched) {
            job.flight(rank).graphs_launched = launched;
            if launched == 42 {
                let graph = Job::operation(0, 0, Op::Graph);
                let kind = OpKind::GraphLaunch.into();
                job.push(rank, Operation { kind, started_ns: 5, ..graph });
            }
        }
        job
    };
    let mut job = graphs([42, 41, 42, 42]);
    job.set_stack(1, Stack::pause());
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[1], Confidence::Medium);
    assert!(verdict.sentence.starts_with("Rank 1 has launched CUDA graphs 41 times; it is at"), "{}", verdict.sentence);
    let verdict = graphs([42; 4]).judge();
    expect(&verdict, Cause::Unknown, &[], Confidence::Low);
    assert!(verdict.sentence.contains("ranks 0-3 wait in launch 42 of CUDA graphs (4 ranks)"), "{}", verdict.sentence);
}

#[test]
fn all_ranks_wait_for_their_devices_and_one_has_launched_less() {
    let idle = |name: &str| {
        let mut job = Job::new(4);
        job.trigger(TriggerKind::Idle);
        for rank in 0..4 {
            job.last_kernel(rank, "forward_layer");
            job.launches(rank, "forward_layer", 90);
            job.launches(rank, name, if rank == 2 { 29 } else { 30 });
        }
        job
    };
    let verdict = idle("my_signal").judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::Low);
    assert!(verdict.sentence.contains("my_signal 29 times on stream 0x7f12, ranks 0-1, 3 30 times"));
    // Launches that differ everywhere show nothing.
    let mut job = idle("my_signal");
    job.flight(1).kernels[1].launches = 31;
    expect(&job.judge(), Cause::Unknown, &[], Confidence::Low);
}

#[test]
fn without_events_the_launches_of_a_known_kernel_show_who_is_behind() {
    let mut job = reduces([42, 42, 41, 42], &[]);
    job.trigger(TriggerKind::Idle);
    job.set_stack(2, Stack::pause());
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::High);
    assert_eq!(verdict.victims, [0, 1, 3]);
}
