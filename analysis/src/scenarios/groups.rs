//! Sends and receives launched as one group, as in a ring or in an all-to-all, and devices that are
//! behind in one stream.

use super::expect;
use crate::{
    Cause, Confidence,
    testing::{Job, Stack},
};
use xpu_timer_proto::v1::{Op, Operation, Presence};

const RING: u64 = 0x77;

fn together(world: u32) -> Job {
    let mut job = Job::new(world);
    job.comm(RING, &(0..world).collect::<Vec<_>>());
    job
}

/// One group of transfers that has begun.
fn group(job: &mut Job, rank: u32, number: u64, transfers: &[(Op, i32)]) {
    for (op, peer) in transfers {
        job.transfer(RING, rank, *op, *peer);
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
    assert!(verdict.sentence.contains("rank 3 in a recv from rank 2"), "{}", verdict.sentence);
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
fn a_circle_that_is_closed_by_a_stream_which_nothing_recorded_blocks() {
    // Rank 0 has launched its send behind a kernel that does not end, and has begun to receive on
    // another stream.
    let judge = |worked: bool| {
        let mut job = together(2);
        if worked {
            for (rank, op, peer) in [(0, Op::Send, 1), (0, Op::Recv, 1), (1, Op::Recv, 0)] {
                let operation = Operation { peer, started_ns: 1, ..Job::operation(RING, 1, op) };
                job.push(rank, Operation { status: xpu_timer_proto::v1::OpStatus::Completed.into(), ..operation });
            }
        }
        job.push(0, Operation { peer: 1, stream: 0x20, ..Job::operation(RING, 1, Op::Send) });
        job.transfer(RING, 0, Op::Recv, 1);
        job.transfer(RING, 1, Op::Recv, 0);
        job.judge()
    };
    expect(&judge(true), Cause::KernelHang, &[0], Confidence::Medium);
    assert_eq!(judge(false).cause, Cause::P2pCycle);
}

#[test]
fn few_in_a_collective_while_most_stand_together_elsewhere() {
    let judge = |outside: &[u32], elsewhere: &[u32]| {
        let mut job = Job::with_world(5, 6);
        for rank in 0..5 {
            match (outside.contains(&rank), elsewhere.contains(&rank)) {
                (true, _) => job.stands(rank, Stack::pause()),
                (_, true) => job.stands(rank, Stack::new(&[("f", "/job/other.py:1")], &["clock_nanosleep"])),
                _ => job.enter(0x77, rank, Op::AllReduce),
            }
        }
        job.judge()
    };
    expect(&judge(&[0, 1, 2, 4], &[]), Cause::MissingRank, &[3], Confidence::Low);
    expect(&judge(&[0, 1], &[]), Cause::MissingRank, &[0, 1], Confidence::High);
    expect(&judge(&[0, 1], &[2]), Cause::MissingRank, &[0, 1, 2], Confidence::Medium);
}

#[test]
fn an_absent_rank_is_found_behind_a_creation_with_unknown_members() {
    // Tensor groups of three and pairs over them. Rank 4 leaves out its group of three, so rank 5
    // never comes to the pair of rank 2.
    let mut job = Job::new(6);
    job.comm(0x1, &[0, 1, 2, 3, 4, 5]);
    job.comm(0x2, &[0, 1, 2]);
    job.comm(0x14, &[1, 4]);
    for (id, size, rank, comm_rank) in [(0x25, 2, 2, 0), (0x03, 2, 0, 0), (0x345, 3, 3, 0), (0x345, 3, 5, 2)] {
        job.creates(id, size, rank, comm_rank);
    }
    job.enter(0x2, 1, Op::AllReduce);
    job.queue(0x1, 1, Op::AllReduce);
    job.enter(0x1, 4, Op::AllReduce);
    expect(&job.judge(), Cause::CommInit, &[4], Confidence::Medium);
}

#[test]
fn few_that_left_out_a_creation_in_which_all_others_are() {
    let group =
        [("new_group", "/v/site-packages/torch/distributed/distributed_c10d.py:9"), ("main", "/job/train.py:30")];
    let mut job = Job::with_world(4, 8);
    job.enter(0x77, 3, Op::AllReduce);
    for rank in 0..3 {
        job.stands(rank, Stack::new(&group, &["clock_nanosleep"]));
    }
    let verdict = job.judge();
    expect(&verdict, Cause::CommInit, &[3], Confidence::Medium);
    assert!(verdict.sentence.contains("that ranks 0-2 are in"), "{}", verdict.sentence);
}

#[test]
fn a_rank_that_looks_for_another_store_than_the_others() {
    let at = |native: &[&'static str]| {
        Stack::new(
            &[("init_process_group", "/v/torch/distributed/distributed_c10d.py:9"), ("main", "/job/train.py:30")],
            native,
        )
    };
    let outside = || at(&["clock_nanosleep", "??", "c10d::TCPStore::TCPStore"]);
    let keeps = || at(&["clock_nanosleep", "c10d::TCPStore::waitForWorkers", "c10d::TCPStore::TCPStore"]);
    let creating = |world: u32, outsiders: &[u32]| {
        let mut job = Job::new(world);
        job.stands(0, keeps());
        for rank in 1..world {
            if !outsiders.contains(&rank) {
                job.creates(0x25, world, rank, rank as i32);
            }
            job.stands(rank, at(&["recv", "c10d::TCPStore::doWait", "c10d::TCPStore::get"]));
        }
        for &rank in outsiders {
            job.stands(rank, outside());
        }
        job
    };
    let verdict = creating(4, &[2]).judge();
    expect(&verdict, Cause::CommInit, &[2], Confidence::Medium);
    assert!(
        verdict.sentence.starts_with("Rank 2 cannot connect to the store at which ranks 0-1, 3 are"),
        "{}",
        verdict.sentence
    );
    assert_eq!(verdict.victims, [0, 1, 3]);
    // Most ranks cannot connect, so the store is not where it should be.
    expect(&creating(8, &[2, 3, 4, 5, 6, 7]).judge(), Cause::CommInit, &[0, 1], Confidence::Low);
    expect(&creating(4, &[2, 3]).judge(), Cause::CommInit, &[2, 3], Confidence::Low);
    // A wait for an answer of the store is not a failing connection.
    let mut job = creating(4, &[]);
    job.stands(2, at(&["recv", "c10d::TCPStore::TCPStore"]));
    assert!(!job.judge().sentence.contains("cannot connect"));
    // The death of a rank comes first.
    let mut job = creating(4, &[2]);
    job.rank(1).presence = Presence::Dead.into();
    assert_ne!(job.judge().culprits, [2]);
}

#[test]
fn a_collective_that_other_ranks_completed_among_themselves_is_in_order() {
    // The halves are {0, 2} and {1, 3}. Rank 2 enters its pair {2, 3} instead.
    let mut job = Job::with_world(4, 28);
    for (id, ranks) in [(0x02, [0, 2]), (0x13, [1, 3]), (0x01, [0, 1]), (0x23, [2, 3])] {
        job.comm(id, &ranks);
    }
    for rank in [1, 3] {
        job.done(0x13, rank, 1);
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.enter(0x02, 0, Op::AllReduce);
    job.enter(0x23, 2, Op::AllReduce);
    let verdict = job.judge();
    assert_eq!(verdict.culprits, [2], "{}", verdict.to_text());
}
