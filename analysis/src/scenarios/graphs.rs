//! Chains over several communicators: tensor, pipeline and data parallel groups, sends and
//! receives, and cycles.

use super::expect;
use crate::{
    Cause, Confidence,
    testing::{Job, Stack},
};
use xpu_timer_proto::v1::{Op, Operation};

const PIPELINE: u64 = 0x300;

/// Eight ranks: tensor groups of two (0x100 + i), data groups of two (0x200 + i), pipeline groups
/// of two (0x300 + i). Rank = 4 * stage + 2 * replica + shard.
fn three_dimensions() -> Job {
    let mut job = Job::new(8);
    for index in 0..4u32 {
        let (stage, replica) = (index / 2, index % 2);
        let first = 4 * stage + 2 * replica;
        job.comm(0x100 + u64::from(index), &[first, first + 1]);
        let (stage, shard) = (index / 2, index % 2);
        job.comm(0x200 + u64::from(index), &[4 * stage + shard, 4 * stage + 2 + shard]);
        let (replica, shard) = (index / 2, index % 2);
        job.comm(PIPELINE + u64::from(index), &[2 * replica + shard, 4 + 2 * replica + shard]);
    }
    for rank in 0..8 {
        let comms: Vec<u64> =
            job.flight(rank).communicators.iter().map(|comm| comm.id).filter(|id| *id < PIPELINE).collect();
        for id in comms {
            job.done(id, rank, 10);
        }
    }
    job
}

fn tensor(rank: u32) -> u64 {
    0x100 + u64::from(rank / 2)
}

fn data(rank: u32) -> u64 {
    0x200 + u64::from(2 * (rank / 4) + rank % 2)
}

fn pipeline(rank: u32) -> u64 {
    PIPELINE + u64::from(rank % 4)
}

#[test]
fn the_culprit_is_three_groups_away_from_most_victims() {
    for (culprit, stack, cause, confidence) in [
        (1, Stack::loader(), Cause::DataLoader, Confidence::Medium),
        (1, Stack::checkpoint(), Cause::StorageIo, Confidence::High),
        (1, Stack::pause(), Cause::MissingRank, Confidence::High),
    ] {
        let mut job = three_dimensions();
        // Rank 1 is stuck. Rank 0 waits for it in their tensor group. The second stage of this
        // replica waits for both.
        job.enter(tensor(0), 0, Op::AllReduce);
        for rank in [4, 5] {
            job.transfer(pipeline(rank), rank, Op::Recv, 0);
        }
        // The other replica has completed its step and waits for the gradients of this one.
        for rank in [2, 3, 6, 7] {
            job.enter(data(rank), rank, Op::AllReduce);
        }
        job.set_stack(culprit, stack);
        let verdict = job.judge();
        expect(&verdict, cause, &[culprit], confidence);
        assert_eq!(verdict.victims, [0, 2, 3, 4, 5, 6, 7], "{}", verdict.to_text());
    }
}

#[test]
fn a_chain_ends_at_a_stuck_kernel() {
    let mut job = three_dimensions();
    job.queue(tensor(0), 1, Op::AllReduce);
    job.enter(tensor(0), 0, Op::AllReduce);
    for rank in [2, 3] {
        job.enter(data(rank), rank, Op::AllReduce);
    }
    expect(&job.judge(), Cause::KernelHang, &[1], Confidence::High);
}

#[test]
fn a_chain_ends_at_a_stall_of_one_group() {
    let mut job = three_dimensions();
    job.enter(tensor(0), 0, Op::AllReduce);
    job.enter(tensor(0), 1, Op::AllReduce);
    for rank in [2, 3] {
        job.enter(data(rank), rank, Op::AllReduce);
    }
    let verdict = job.judge();
    expect(&verdict, Cause::NetworkStall, &[], Confidence::High);
    assert!(verdict.sentence.contains("0x100"), "{}", verdict.sentence);
}

#[test]
fn a_victim_with_a_queued_collective_is_not_a_culprit() {
    // Rank 0 has also launched its data collective, behind the tensor collective that waits for
    // rank 1.
    let mut job = three_dimensions();
    job.enter(tensor(0), 0, Op::AllReduce);
    job.queue(data(0), 0, Op::AllReduce);
    job.enter(data(0), 2, Op::AllReduce);
    job.set_stack(1, Stack::loader());
    expect(&job.judge(), Cause::DataLoader, &[1], Confidence::Medium);
}

#[test]
fn numbers_of_different_communicators_are_not_compared() {
    let mut job = Job::new(4);
    job.comm(0x1, &[0, 1]);
    job.comm(0x2, &[2, 3]);
    for rank in [0, 1] {
        job.done(0x1, rank, 500);
    }
    for rank in [2, 3] {
        job.done(0x2, rank, 3);
    }
    job.enter(0x2, 2, Op::AllReduce);
    job.set_stack(3, Stack::pause());
    expect(&job.judge(), Cause::MissingRank, &[3], Confidence::High);
}

#[test]
fn a_rank_with_an_unknown_stack_is_followed_to_the_one_it_waits_for() {
    // Rank 0 polls in its own code for a collective that rank 1 holds up. Its stack does not show
    // that it waits.
    let mut job = three_dimensions();
    job.enter(tensor(0), 0, Op::AllReduce);
    job.set_stack(0, Stack::new(&[("poll_work", "/job/train.py:7")], &["clock_nanosleep"]));
    job.enter(data(0), 2, Op::AllReduce);
    job.set_stack(1, Stack::checkpoint());
    expect(&job.judge(), Cause::StorageIo, &[1], Confidence::High);
}

#[test]
fn a_rank_that_sleeps_while_its_own_collective_waits_for_a_victim_is_the_culprit() {
    let mut job = Job::new(3);
    job.comm(0x1, &[0, 1, 2]);
    job.comm(0x2, &[1, 2]);
    // Rank 2 launched 0x2 asynchronously and then fell asleep. Rank 1 waits for it in 0x1 before it
    // gets to 0x2.
    job.enter(0x1, 0, Op::AllReduce);
    job.enter(0x1, 1, Op::AllReduce);
    job.enter(0x2, 2, Op::AllReduce);
    job.set_stack(2, Stack::sleep());
    let verdict = job.judge();
    assert_eq!((verdict.cause, verdict.culprits), (Cause::MissingRank, vec![2]));
}

#[test]
fn communicators_entered_in_opposite_orders() {
    let mut job = Job::new(4);
    job.comm(0x1, &[0, 1, 2, 3]);
    job.comm(0x2, &[0, 1, 2, 3]);
    for rank in [0, 1, 3] {
        job.enter(0x1, rank, Op::AllReduce);
    }
    job.enter(0x2, 2, Op::AllReduce);
    let verdict = job.judge();
    expect(&verdict, Cause::OrderMismatch, &[2], Confidence::Medium);
    assert!(verdict.sentence.contains("0x1") && verdict.sentence.contains("0x2"), "{}", verdict.sentence);
    assert!(verdict.sentence.contains("; rank 2 is at train.py:90 in train_step"), "{}", verdict.sentence);

    let mut job = Job::new(2);
    job.comm(0x1, &[0, 1]);
    job.comm(0x2, &[0, 1]);
    job.enter(0x1, 0, Op::AllReduce);
    job.enter(0x2, 1, Op::AllReduce);
    expect(&job.judge(), Cause::OrderMismatch, &[0, 1], Confidence::Low);
}

#[test]
fn opposite_orders_with_both_collectives_launched() {
    // As before, and each rank has launched the other collective behind the first in its stream.
    let mut job = Job::new(4);
    job.comm(0x1, &[0, 1, 2, 3]);
    job.comm(0x2, &[0, 1, 2, 3]);
    for rank in [0, 1, 2, 3] {
        let (first, second) = if rank == 2 { (0x2, 0x1) } else { (0x1, 0x2) };
        job.enter(first, rank, Op::AllReduce);
        job.queue(second, rank, Op::AllReduce);
    }
    expect(&job.judge(), Cause::OrderMismatch, &[2], Confidence::Medium);
}

#[test]
fn only_the_past_tells_a_swap_of_two_collectives_from_a_skip() {
    let job = |rank_1_queues: bool, steps: usize| {
        let mut job = Job::new(3);
        for id in [0x1, 0x2] {
            job.comm(id, &[0, 1, 2]);
        }
        for _ in 0..steps {
            (0..3).for_each(|rank| [0x1, 0x2].into_iter().for_each(|id| job.done(id, rank, 1)));
        }
        [0, 2].into_iter().for_each(|rank| job.enter(0x1, rank, Op::AllReduce));
        job.enter(0x2, 1, Op::AllReduce);
        if rank_1_queues {
            job.queue(0x1, 1, Op::AllReduce);
        }
        job.judge()
    };
    let verdict = job(true, 6);
    expect(&verdict, Cause::OrderMismatch, &[1], Confidence::Medium);
    assert!(verdict.sentence.contains("always called them in the other order"), "{}", verdict.sentence);
    // The rank is still in the first of the two.
    let verdict = job(false, 6);
    expect(&verdict, Cause::MissingRank, &[1], Confidence::Medium);
    assert!(verdict.sentence.contains(", or swapped the two, and now"), "{}", verdict.sentence);
    let verdict = job(false, 0);
    expect(&verdict, Cause::OrderMismatch, &[1], Confidence::Medium);
    assert!(verdict.sentence.contains("in another order than the others, or left one out"), "{}", verdict.sentence);
}

#[test]
fn a_receive_without_its_send() {
    let mut job = Job::new(4);
    job.comm(PIPELINE, &[0, 1, 2, 3]);
    job.transfer(PIPELINE, 1, Op::Recv, 0);
    job.set_stack(0, Stack::pause());
    let verdict = job.judge();
    expect(&verdict, Cause::P2pUnmatched, &[0], Confidence::High);
    assert!(verdict.sentence.contains("has not sent to rank 1"), "{}", verdict.sentence);
    job.set_stack(0, Stack::loader());
    expect(&job.judge(), Cause::DataLoader, &[0], Confidence::Medium);
    job.dies(0, "exit code 1");
    expect(&job.judge(), Cause::ProcessDead, &[0], Confidence::High);
}

#[test]
fn a_receive_whose_sender_waits_in_a_collective_for_it() {
    let judge = |steps| {
        let mut job = Job::with_world(4, steps);
        job.transfer(0x77, 1, Op::Recv, 0);
        for rank in [0, 2, 3] {
            job.enter(0x77, rank, Op::AllReduce);
        }
        job.judge()
    };
    expect(&judge(2), Cause::P2pUnmatched, &[0], Confidence::Medium);
    // With a past to compare, the rank is named that has never received before.
    expect(&judge(5), Cause::P2pUnmatched, &[1], Confidence::Medium);
    // The collective is new as well.
    let mut job = Job::with_world(4, 5);
    job.transfer(0x77, 1, Op::Recv, 0);
    for rank in [0, 2, 3] {
        job.enter(0x77, rank, Op::Gather);
    }
    expect(&job.judge(), Cause::P2pUnmatched, &[1], Confidence::Medium);
}

#[test]
fn two_ranks_that_both_send_first() {
    let mut job = Job::new(4);
    job.comm(PIPELINE, &[0, 1, 2, 3]);
    job.transfer(PIPELINE, 1, Op::Send, 2);
    job.transfer(PIPELINE, 2, Op::Send, 1);
    let verdict = job.judge();
    expect(&verdict, Cause::P2pCycle, &[1, 2], Confidence::High);
    assert!(verdict.sentence.contains("; ranks 1-2 are at train.py:90 in train_step"), "{}", verdict.sentence);
    // With the receives launched behind the sends, it is the same cycle.
    for (rank, peer) in [(1, 2), (2, 1)] {
        job.push(rank, Operation { peer, ..Job::operation(PIPELINE, 2, Op::Recv) });
    }
    expect(&job.judge(), Cause::P2pCycle, &[1, 2], Confidence::High);
}

#[test]
fn a_matched_pair_that_does_not_move() {
    let mut job = Job::new(2);
    job.comm(PIPELINE, &[0, 1]);
    job.transfer(PIPELINE, 0, Op::Send, 1);
    job.transfer(PIPELINE, 1, Op::Recv, 0);
    expect(&job.judge(), Cause::NetworkStall, &[], Confidence::Medium);
    job.flight(1).operations[0].count = 7;
    expect(&job.judge(), Cause::SizeMismatch, &[0, 1], Confidence::Medium);
}

#[test]
fn lost_members_of_a_strided_group_are_found() {
    // One data group consists of ranks 0, 4, 8 and 12. Rank 8 is lost, and all others of its group
    // wait.
    let mut job = Job::new(16);
    for group in 0..4u32 {
        let ranks: Vec<u32> = (0..4).map(|index| group + 4 * index).collect();
        job.comm(u64::from(group) + 1, &ranks);
    }
    for rank in [0, 4, 12] {
        job.enter(1, rank, Op::AllReduce);
    }
    job.lost(8);
    job.lost(9);
    expect(&job.judge(), Cause::MissingRank, &[8], Confidence::Medium);
}

/// Two nodes of two ranks: a group for each node, a group for each local rank, and the world. One
/// rank has left out a step in each group, so it is in the all_reduce of the world at the end of
/// the epoch while the others are in the step before.
#[test]
fn a_rank_that_left_out_a_step_is_out_of_step_in_every_communicator() {
    for culprit in 0..4 {
        let mut job = Job::new(4);
        job.comm(0x1, &[0, 1, 2, 3]);
        for (id, ranks) in [(0x10, [0, 1]), (0x11, [2, 3]), (0x20, [0, 2]), (0x21, [1, 3])] {
            job.comm(id, &ranks);
            ranks.into_iter().for_each(|rank| job.done(id, rank, 8));
        }
        for rank in 0..4 {
            job.done(0x1, rank, 2);
        }
        let (mate, node) = (culprit ^ 1, 0x10 + u64::from(culprit / 2));
        let others = [culprit ^ 2, culprit ^ 3];
        job.enter(0x1, culprit, Op::AllReduce);
        job.enter(node, mate, Op::AllGather);
        for other in others {
            job.done(0x10 + u64::from(other / 2), other, 1);
        }
        job.enter(0x20 + u64::from(culprit % 2), others[0], Op::AllReduce);
        job.enter(0x20 + u64::from(mate % 2), others[1], Op::AllReduce);
        let verdict = job.judge();
        expect(&verdict, Cause::MissingRank, &[culprit], Confidence::Medium);
        assert!(verdict.sentence.contains("is out of step: it is in all_reduce 3"), "{}", verdict.sentence);
    }
}

#[test]
fn two_ranks_out_of_step_with_each_other_are_both_named() {
    let mut job = Job::new(2);
    for id in [0x1, 0x2] {
        job.comm(id, &[0, 1]);
    }
    job.enter(0x1, 0, Op::AllReduce);
    job.enter(0x2, 1, Op::AllReduce);
    expect(&job.judge(), Cause::OrderMismatch, &[0, 1], Confidence::Low);
}

#[test]
fn a_collective_of_the_host_for_which_its_rank_does_not_wait() {
    let mut job = Job::with_world(4, 9);
    for rank in 0..4 {
        job.flight(rank).operations.iter_mut().for_each(|operation| operation.stream = 0);
    }
    for rank in [0, 1, 3] {
        job.enter_with(0x77, rank, Op::AllReduce, |operation| operation.stream = 0);
    }
    let communicator = &mut job.flight(2).communicators[0];
    communicator.launched += 1;
    job.set_stack(2, Stack::pause());
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::High);
    assert!(verdict.sentence.contains("has launched all_reduce 10"), "{}", verdict.sentence);
}

#[test]
fn a_collective_of_the_host_that_only_its_rank_does_not_wait_for() {
    let mut job = Job::with_world(4, 9);
    for rank in 0..4 {
        job.flight(rank).operations.iter_mut().for_each(|operation| operation.stream = 0);
        job.enter_with(0x77, rank, Op::AllReduce, |operation| operation.stream = 0);
    }
    job.flight(2).operations.pop();
    job.set_stack(2, Stack::pause());
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::Medium);
    assert!(verdict.sentence.contains("does not wait for it, unlike ranks 0-1, 3; it is at"), "{}", verdict.sentence);
}
