//! Sends and receives: alone, in cycles, or launched as one group as in a ring or in an all-to-all;
//! and what the past of their ranks shows.

use super::expect;
use crate::{
    Cause, Confidence,
    testing::{Job, Stack, native_thread, python_thread},
};
use xpu_timer_proto::v1::{DataType, Failure, FailureKind, Op, OpKind, OpStatus, Operation, Presence};

/// Transfers that completed long ago.
fn past(job: &mut Job, rank: u32, op: Op, peer: i32, count: u64) {
    let operation = Job::operation(0x77, 1, op);
    job.push(rank, Operation { peer, count, started_ns: 1, status: OpStatus::Completed.into(), ..operation });
}

/// Ranks that wait for their devices and share 0x77.
fn together(world: u32) -> Job {
    let mut job = Job::new(world);
    job.comm(0x77, &(0..world).collect::<Vec<_>>());
    job
}

#[test]
fn a_cycle_of_transfers_has_high_confidence_unless_a_transfer_worked_before() {
    let mut job = together(2);
    job.transfer(0x77, 0, Op::Send, 1);
    job.transfer(0x77, 1, Op::Send, 0);
    expect(&job.judge(), Cause::P2pCycle, &[0, 1], Confidence::High);
    let mut job = together(2);
    past(&mut job, 0, Op::Send, 1, 1024);
    job.transfer(0x77, 0, Op::Send, 1);
    job.transfer(0x77, 1, Op::Send, 0);
    expect(&job.judge(), Cause::P2pCycle, &[0, 1], Confidence::Medium);
}

#[test]
fn the_one_rank_outside_a_cycle_of_transfers_is_named() {
    let mut job = together(4);
    job.transfer(0x77, 0, Op::Recv, 1);
    job.transfer(0x77, 1, Op::Recv, 2);
    job.transfer(0x77, 3, Op::Recv, 2);
    job.enter(0x77, 2, Op::AllReduce);
    let verdict = job.judge();
    expect(&verdict, Cause::P2pUnmatched, &[2], Confidence::Medium);
    assert_eq!(verdict.victims, [0, 1, 3]);
}

#[test]
fn a_peer_that_polls_for_something_has_not_come_to_its_transfer() {
    let retries = Stack::sleep().with(|stack| stack.switches = 7);
    for (stack, cause) in [(retries, Cause::MissingRank), (Stack::sleep(), Cause::P2pUnmatched)] {
        let mut job = together(3);
        job.transfer(0x77, 0, Op::Send, 1);
        job.set_stack(1, stack);
        job.transfer(0x77, 2, Op::Recv, 1);
        let verdict = job.judge();
        assert_eq!((verdict.cause, &verdict.culprits[..]), (cause, &[1][..]), "{}", verdict.to_text());
        assert!(verdict.sentence.starts_with("Rank 1 does not"), "{}", verdict.sentence);
    }
}

#[test]
fn a_rank_that_left_out_a_collective_is_awaited_in_its_communicator() {
    let mut job = Job::new(4);
    job.comm(0x10, &[0, 1]);
    job.comm(0x11, &[2, 3]);
    job.comm(0x20, &[0, 2]);
    job.comm(0x21, &[1, 3]);
    job.comm(0x77, &[0, 1, 2, 3]);
    for _ in 0..9 {
        for rank in 0..4 {
            job.done(0x10 + u64::from(rank / 2), rank, 1);
            job.done(0x20 + u64::from(rank % 2), rank, 1);
        }
    }
    // Rank 3 leaves out its all_reduce with rank 2. It and rank 1 enter the last one of the job.
    (0..2).for_each(|rank| job.done(0x10, rank, 1));
    for rank in [1, 3] {
        job.done(0x21, rank, 1);
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.enter(0x20, 0, Op::AllReduce);
    job.enter(0x11, 2, Op::AllReduce);
    let verdict = job.judge();
    assert_eq!(verdict.culprits, [3], "{}", verdict.to_text());
    assert!(verdict.confidence < Confidence::High, "{}", verdict.to_text());
}

#[test]
fn a_rank_that_receives_once_more_made_a_transfer_without_its_counterpart() {
    let mut job = together(2);
    for _ in 0..9 {
        past(&mut job, 0, Op::Send, 1, 1024);
        past(&mut job, 1, Op::Recv, 0, 1024);
        (0..2).for_each(|rank| job.done(0x77, rank, 1));
    }
    past(&mut job, 0, Op::Send, 1, 1024);
    past(&mut job, 1, Op::Recv, 0, 1024);
    job.enter(0x77, 0, Op::AllReduce);
    job.transfer(0x77, 1, Op::Recv, 0);
    let verdict = job.judge();
    expect(&verdict, Cause::P2pUnmatched, &[1], Confidence::Medium);
    assert!(verdict.sentence.starts_with("Rank 1 called the recv from rank 0 once more, in place of"), "{verdict:?}");
}

#[test]
fn a_rank_in_a_collective_with_a_precedent_is_a_victim() {
    let mut job = Job::new(8);
    job.comm(0x77, &(0..8).collect::<Vec<_>>());
    for pair in 0..4 {
        job.comm(0x10 + u64::from(pair), &[pair, pair + 4]);
        [pair, pair + 4].iter().for_each(|rank| job.done(0x10 + u64::from(pair), *rank, 9));
    }
    // Rank 6 has left out one all_reduce with rank 2, so rank 2 is alone in the last one.
    (0..8).filter(|rank| rank % 4 != 2).for_each(|rank| job.done(0x10 + u64::from(rank % 4), rank, 1));
    (0..8).filter(|rank| *rank != 2).for_each(|rank| job.enter(0x77, rank, Op::AllReduce));
    job.enter(0x12, 2, Op::AllReduce);
    let verdict = job.judge();
    expect(&verdict, Cause::OrderMismatch, &[6], Confidence::Medium);
    assert!(verdict.sentence.starts_with("Rank 6 left out all_reduce 10 of"), "{}", verdict.sentence);
}

#[test]
fn a_rank_that_receives_from_itself_is_named() {
    let mut job = together(4);
    [0, 1, 3].iter().for_each(|rank| job.enter(0x77, *rank, Op::AllReduce));
    job.transfer(0x77, 2, Op::Recv, 2);
    let verdict = job.judge();
    expect(&verdict, Cause::P2pUnmatched, &[2], Confidence::Medium);
    assert!(verdict.sentence.contains("rank 2 is in a recv from rank 2"), "{}", verdict.sentence);
}

#[test]
fn the_rank_with_the_new_size_is_named() {
    let sizes = |old: [u64; 2], new: [u64; 2]| {
        let mut job = together(3);
        for _ in 0..3 {
            past(&mut job, 0, Op::Send, 1, old[0]);
            past(&mut job, 1, Op::Recv, 0, old[1]);
        }
        job.transfer(0x77, 0, Op::Send, 1);
        job.transfer(0x77, 1, Op::Recv, 0);
        for (rank, count) in [(0, new[0]), (1, new[1])] {
            job.flight(rank).operations.last_mut().expect("it was pushed").count = count;
        }
        job.judge()
    };
    expect(&sizes([64, 64], [32, 64]), Cause::SizeMismatch, &[0], Confidence::Medium);
    expect(&sizes([64, 64], [64, 128]), Cause::SizeMismatch, &[1], Confidence::Medium);
    expect(&sizes([64, 64], [32, 128]), Cause::SizeMismatch, &[0, 1], Confidence::Medium);
}

#[test]
fn a_receive_from_any_rank_waits_for_those_that_may_still_send() {
    // The master receives results from any rank. Rank 2 computes none.
    let mut job = together(4);
    job.transfer(0x77, 0, Op::Recv, -1);
    for rank in [1, 3] {
        job.transfer(0x77, rank, Op::Recv, 0);
    }
    job.set_stack(2, Stack::sleep());
    let verdict = job.judge();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::P2pUnmatched, &[2][..]), "{}", verdict.to_text());
    // All others wait for the rank that receives what nobody sends.
    let mut job = together(3);
    job.transfer(0x77, 1, Op::Recv, -1);
    for rank in [0, 2] {
        job.enter(0x77, rank, Op::AllReduce);
    }
    let verdict = job.judge();
    expect(&verdict, Cause::P2pUnmatched, &[1], Confidence::Medium);
    assert!(verdict.sentence.contains("a recv from any rank"), "{}", verdict.sentence);
}

#[test]
fn a_rank_that_finalizes_while_others_go_on_gave_up() {
    let mut job = together(3);
    job.comm(0x88, &[0, 1, 2]);
    job.enter(0x88, 0, Op::AllReduce);
    job.enter(0x88, 1, Op::AllReduce);
    job.enter_with(0x77, 2, Op::Barrier, |operation| {
        operation.function = "MPI_Finalize".into();
        operation.kind = OpKind::Collective.into();
    });
    let verdict = job.judge();
    expect(&verdict, Cause::Teardown, &[2], Confidence::Medium);
    assert!(verdict.sentence.contains("while others continue: ranks 0-1 are in all_reduce 1"), "{}", verdict.sentence);
}

#[test]
fn tags_that_do_not_match() {
    let tagged = |old: Option<i32>, sent: &[i32], received: i32| {
        let mut job = together(3);
        past(&mut job, 0, Op::Send, 1, 8);
        past(&mut job, 1, Op::Recv, 0, 8);
        job.flight(0).operations[0].tag = old;
        job.flight(1).operations[0].tag = old;
        for tag in sent {
            job.transfer(0x77, 0, Op::Send, 1);
            job.flight(0).operations.last_mut().expect("it was pushed").tag = Some(*tag);
        }
        job.transfer(0x77, 1, Op::Recv, 0);
        job.flight(1).operations.last_mut().expect("it was pushed").tag = Some(received);
        job.enter(0x77, 2, Op::AllReduce);
        job.judge()
    };
    let verdict = tagged(None, &[7], 8);
    expect(&verdict, Cause::P2pUnmatched, &[0, 1], Confidence::Medium);
    assert!(verdict.sentence.contains("with tag 8: the tags do not match"), "{}", verdict.sentence);
    expect(&tagged(Some(7), &[7], 8), Cause::P2pUnmatched, &[1], Confidence::Medium);
    expect(&tagged(Some(8), &[7], 8), Cause::P2pUnmatched, &[0], Confidence::Medium);
    // One of several tags matches, or any tag does: the data does not move.
    assert_eq!(tagged(None, &[7, 8], 8).cause, Cause::NetworkStall);
    assert_eq!(tagged(None, &[7], -1).cause, Cause::NetworkStall);
}

#[test]
fn ends_of_a_pair_that_differ_in_their_type_or_their_size() {
    let pair = |change: fn(&mut Operation)| {
        let mut job = Job::with_world(4, 10);
        job.transfer(0x77, 1, Op::Send, 2);
        job.transfer(0x77, 2, Op::Recv, 1);
        change(job.flight(1).operations.last_mut().expect("the send"));
        for rank in [0, 3] {
            job.enter(0x77, rank, Op::AllReduce);
        }
        job.judge()
    };
    let verdict = pair(|send| send.dtype = DataType::Float16.into());
    expect(&verdict, Cause::DtypeMismatch, &[1, 2], Confidence::Medium);
    assert!(verdict.sentence.contains("the types differ"), "{}", verdict.sentence);
    expect(&pair(|send| send.count = 7), Cause::SizeMismatch, &[1, 2], Confidence::Medium);
}

#[test]
fn a_send_left_out_of_a_group_shows_in_the_number_of_transfers() {
    let mut job = Job::with_world(4, 10);
    for rank in 0..4 {
        // Rank 3 is still in the group before, for the send that rank 2 left out.
        let group = if rank == 3 { 9 } else { 10 };
        for peer in 0..4 {
            for op in [Op::Send, Op::Recv] {
                job.transfer(0x77, rank, op, peer);
                job.flight(rank).operations.last_mut().expect("it was pushed").group = group;
            }
        }
        let made = [80, 80, 79, 72][rank as usize];
        job.flight(rank).communicators[0].point_to_point = made;
    }
    let verdict = job.judge();
    expect(&verdict, Cause::P2pUnmatched, &[2], Confidence::Medium);
    assert!(
        verdict.sentence.contains("in 10 groups, rank 2 made 79, and ranks 0-1 made 80 each"),
        "{}",
        verdict.sentence
    );
}

/// One group of transfers that has started.
fn group(job: &mut Job, rank: u32, number: u64, transfers: &[(Op, i32)]) {
    for (op, peer) in transfers {
        job.transfer(0x77, rank, *op, *peer);
        job.flight(rank).operations.last_mut().expect("it was pushed").group = number;
    }
}

/// A hop of a ring in one group: a send to the next rank and a receive from the previous one.
fn hop(rank: i32, world: i32) -> [(Op, i32); 2] {
    [(Op::Send, (rank + 1) % world), (Op::Recv, (rank + world - 1) % world)]
}

#[test]
fn a_ring_in_which_one_rank_sends_to_the_wrong_one() {
    let mut job = together(4);
    for rank in [0, 1, 3] {
        group(&mut job, rank, 9, &hop(rank as i32, 4));
    }
    group(&mut job, 2, 9, &[(Op::Send, 0), (Op::Recv, 1)]);
    let verdict = job.judge();
    expect(&verdict, Cause::P2pUnmatched, &[2], Confidence::Medium);
    assert!(verdict.sentence.contains("rank 3 is in a recv from rank 2"), "{}", verdict.sentence);
}

#[test]
fn a_ring_that_is_complete_and_does_not_move() {
    let mut job = together(4);
    for rank in 0..4 {
        group(&mut job, rank, 9, &hop(rank as i32, 4));
    }
    expect(&job.judge(), Cause::NetworkStall, &[], Confidence::Medium);
}

#[test]
fn an_exchange_of_all_with_all_that_lacks_one_receive() {
    let mut job = together(4);
    for rank in 0..4 {
        let all = (0..4).flat_map(|peer| [(Op::Send, peer), (Op::Recv, peer)]);
        let made: Vec<(Op, i32)> = all.filter(|transfer| (rank, *transfer) != (2, (Op::Recv, 3))).collect();
        group(&mut job, rank, 5, &made);
    }
    expect(&job.judge(), Cause::P2pUnmatched, &[2], Confidence::Medium);
}

#[test]
fn the_rank_with_fewer_transfers_is_named_if_two_have_left() {
    let mut job = together(4);
    group(&mut job, 0, 9, &hop(0, 4));
    for (rank, transfers) in [(0, 8), (1, 8), (2, 8), (3, 6)] {
        job.flight(rank).communicators[0].point_to_point = transfers;
        if rank > 0 {
            job.rank(rank).presence = Presence::Left.into();
            job.rank(rank).exit = "exit code 0".into();
        }
    }
    let verdict = job.judge();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::ProcessDead, &[3][..]), "{}", verdict.to_text());
}

#[test]
fn a_cycle_behind_a_stuck_kernel_is_a_kernel_hang_if_transfers_worked_before() {
    // Rank 0 has launched its send behind a kernel that does not complete, and has started to
    // receive on another stream.
    let judge = |worked: bool| {
        let mut job = together(2);
        if worked {
            for (rank, op, peer) in [(0, Op::Send, 1), (0, Op::Recv, 1), (1, Op::Recv, 0)] {
                let operation = Operation { peer, started_ns: 1, ..Job::operation(0x77, 1, op) };
                job.push(rank, Operation { status: OpStatus::Completed.into(), ..operation });
            }
        }
        job.push(0, Operation { peer: 1, stream: 0x20, ..Job::operation(0x77, 1, Op::Send) });
        job.transfer(0x77, 0, Op::Recv, 1);
        job.transfer(0x77, 1, Op::Recv, 0);
        job.judge()
    };
    expect(&judge(true), Cause::KernelHang, &[0], Confidence::Medium);
    assert_eq!(judge(false).cause, Cause::P2pCycle);
}

#[test]
fn a_majority_may_wait_for_the_few_that_wait_for_it() {
    let judge = |away: std::ops::Range<u32>| {
        let mut job = together(4);
        for rank in away.clone() {
            job.transfer(0x77, 0, Op::Recv, rank as i32);
            job.set_stack(rank, Stack::pause());
        }
        job.judge()
    };
    expect(&judge(3..4), Cause::P2pUnmatched, &[3], Confidence::High);
    expect(&judge(1..4), Cause::P2pUnmatched, &[1, 2, 3], Confidence::Medium);
}

#[test]
fn a_queue_that_a_receiving_thread_fills_leads_to_the_sender() {
    // Ranks 0 and 1 are in a collective of all. The main threads of ranks 2 and 3 wait for a queue
    // that a thread fills with what it receives; that of rank 2 has ended, so it sends nothing.
    let threading = ("Condition.wait", "/usr/lib/python3.11/threading.py:320");
    let queue = ("Queue.get", "/usr/lib/python3.11/queue.py:171");
    let stack = || {
        let native = ["__futex_abstimed_wait_common64", "sem_wait", "PyThread_acquire_lock_timed"];
        Stack::new(&[threading, queue, ("next_activation", "/job/stage.py:21")], &native)
    };
    let mut job = Job::new(4);
    job.comm(0x77, &[0, 1, 2, 3]);
    job.comm(0x88, &[0, 1, 2, 3]);
    for rank in 0..4 {
        job.done(0x77, rank, 50);
    }
    for rank in 0..2 {
        job.enter(0x77, rank, Op::AllReduce);
    }
    for rank in 2..4 {
        job.set_stack(rank, stack());
    }
    job.transfer(0x88, 3, Op::Recv, 2);
    let receives = [("receiver", "/job/stage.py:16".to_owned())];
    let native = native_thread(5003, &["epoll_wait", "c10d::Work::wait"], "S (sleeping)", "", None, 9);
    job.thread(3, native, Some(python_thread(5003, "receiver", &receives)));
    let failure = Failure {
        kind: FailureKind::Exception.into(),
        r#type: "RuntimeError".into(),
        message: "the shape is invalid".into(),
        place: "stage.py:16 in receiver".into(),
        thread: "thread receiver".into(),
        ..Default::default()
    };
    job.rank(2).failures.push(failure);
    let verdict = job.judge();
    assert_eq!(verdict.culprits, [2], "{}", verdict.to_text());
    let ended = "its thread receiver has ended: RuntimeError: the shape is invalid at stage.py:16 in receiver";
    assert!(verdict.sentence.contains(ended), "{}", verdict.sentence);
    assert_eq!(verdict.victims, [0, 1, 3], "{}", verdict.to_text());
}
