//! All ranks have entered a collective: they differ, one of them skipped it, or nothing moves. Also
//! communicators that are being created.

use super::expect;
use crate::{
    Cause, Confidence,
    testing::{Job, SECOND, Stack},
};
use xpu_timer_proto::{
    server::{Awaited, AwaitedKind, Holder},
    v1::{CommunicatorState, DataType, Op, OpKind, OpStatus, Operation, Presence, TriggerKind},
};

fn all_enter(world: u32, odd: u32, op: Op, change: impl Fn(&mut Operation)) -> Job {
    let mut job = Job::with_world(world, 30);
    for rank in 0..world {
        if rank == odd {
            job.enter_with(0x77, rank, op, &change);
        } else {
            job.enter(0x77, rank, Op::AllReduce);
        }
    }
    job
}

#[test]
fn all_ranks_agree_and_no_data_moves() {
    let verdict = all_enter(4, 9, Op::AllReduce, |_| ()).judge();
    expect(&verdict, Cause::NetworkStall, &[], Confidence::High);
    assert_eq!(verdict.victims, [0, 1, 2, 3]);
    assert!(verdict.sentence.contains("all_reduce 31 of communicator 0x77 (4 ranks)"), "{}", verdict.sentence);
    assert!(verdict.sentence.contains("check the network"), "{}", verdict.sentence);
    // One record has lost operations, so its rank may run something else.
    let mut job = all_enter(4, 9, Op::AllReduce, |_| ());
    job.flight(2).health.as_mut().expect("it is known").dropped = 1;
    let verdict = job.judge();
    expect(&verdict, Cause::NetworkStall, &[], Confidence::Medium);
    assert!(!verdict.sentence.contains("network"), "{}", verdict.sentence);
    assert!(verdict.ruled_out.iter().all(|ruled_out| ruled_out.cause != Cause::MissingRank));
}

#[test]
fn a_lost_member_is_suspected_before_the_network() {
    let mut job = all_enter(4, 9, Op::AllReduce, |_| ());
    job.lost(3);
    expect(&job.judge(), Cause::MissingRank, &[3], Confidence::Medium);
}

#[test]
fn another_operation() {
    for odd in [0, 2] {
        let verdict = all_enter(4, odd, Op::AllGather, |_| ()).judge();
        expect(&verdict, Cause::OpMismatch, &[odd], Confidence::High);
        let has_entered = verdict.ruled_out.iter().any(|found| found.cause == Cause::MissingRank);
        assert!(!has_entered, "rank {odd} is in another operation: {:?}", verdict.ruled_out);
        assert!(
            verdict.sentence.contains("all_gather") && verdict.sentence.contains("all_reduce"),
            "{}",
            verdict.sentence
        );
    }
}

#[test]
fn another_root() {
    let mut job = Job::with_world(4, 30);
    for rank in 0..4 {
        job.enter_with(0x77, rank, Op::Broadcast, |operation| operation.peer = i32::from(rank == 1));
    }
    let verdict = job.judge();
    expect(&verdict, Cause::OpMismatch, &[1], Confidence::High);
    assert!(verdict.sentence.contains("root 1"), "{}", verdict.sentence);
}

#[test]
fn another_size_and_another_type() {
    let size = all_enter(4, 2, Op::AllReduce, |operation| operation.count = 4096).judge();
    expect(&size, Cause::SizeMismatch, &[2], Confidence::High);
    assert!(size.sentence.contains("4096") && size.sentence.contains("1024"), "{}", size.sentence);
    let dtype = all_enter(4, 1, Op::AllReduce, |operation| operation.dtype = DataType::Bfloat16.into()).judge();
    expect(&dtype, Cause::DtypeMismatch, &[1], Confidence::High);
}

#[test]
fn sizes_of_all_to_all_may_differ() {
    let mut job = Job::with_world(4, 30);
    for rank in 0..4 {
        job.enter_with(0x77, rank, Op::AllToAll, |operation| operation.count = 10 + u64::from(rank));
    }
    expect(&job.judge(), Cause::NetworkStall, &[], Confidence::Medium);
}

#[test]
fn the_rank_of_a_pair_that_breaks_its_pattern_is_named() {
    // Both ranks alternate all_reduce and all_gather; rank 1 runs all_reduce out of turn.
    for odd in [0, 1] {
        let mut job = Job::new(2);
        job.comm(0x77, &[0, 1]);
        for step in 0..30 {
            for rank in 0..2 {
                job.complete(0x77, rank, |operation| {
                    operation.op = if step % 2 == 0 { Op::AllReduce } else { Op::AllGather }.into()
                });
            }
        }
        for rank in 0..2 {
            job.enter(0x77, rank, if rank == odd { Op::AllGather } else { Op::AllReduce });
        }
        expect(&job.judge(), Cause::OpMismatch, &[odd], Confidence::Medium);
    }
}

#[test]
fn both_ranks_of_a_pair_without_a_pattern_are_named() {
    let mut job = Job::with_world(2, 0);
    job.enter(0x77, 0, Op::AllGather);
    job.enter(0x77, 1, Op::AllReduce);
    expect(&job.judge(), Cause::OpMismatch, &[0, 1], Confidence::Low);
}

/// Rank `odd` completed all_reduce 31 at once; the others are inside it.
fn skip(odd: u32, device_ns: u64) -> Job {
    skips(&[odd], device_ns)
}

/// Like [`skip`], with several such ranks.
fn skips(odd: &[u32], device_ns: u64) -> Job {
    let mut job = Job::with_world(4, 30);
    for rank in 0..4 {
        if odd.contains(&rank) {
            job.complete(0x77, rank, |operation| {
                operation.device_ns = device_ns;
                operation.entered_ns += 100 * SECOND;
                operation.completed_ns = operation.entered_ns + 3_000_000;
            });
        } else {
            job.enter(0x77, rank, Op::AllReduce);
        }
    }
    job
}

#[test]
fn a_skipped_collective_is_missing_although_it_was_launched() {
    for odd in [0, 2] {
        let verdict = skip(odd, 900).judge();
        expect(&verdict, Cause::MissingRank, &[odd], Confidence::High);
        assert!(verdict.sentence.contains("skipped all_reduce 31"), "{}", verdict.sentence);
    }
    // Without proof by the clock, the network may have stopped in the middle.
    expect(&skip(2, 40_000).judge(), Cause::MissingRank, &[2], Confidence::Medium);
}

#[test]
fn a_skip_is_found_when_the_rank_waits_in_the_next_collective() {
    let mut job = skip(2, 900);
    job.enter(0x77, 2, Op::AllReduce);
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::High);
    assert_eq!(verdict.victims, [0, 1, 3]);
}

#[test]
fn a_rank_that_skipped_and_ended_skipped() {
    let mut job = skip(2, 900);
    job.rank(2).presence = Presence::Left.into();
    job.rank(2).dump = None;
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::High);
    assert!(verdict.sentence.contains("; it has exited since then"), "{}", verdict.sentence);
    let mut job = skips(&[1, 2], 900);
    for rank in [1, 2] {
        job.rank(rank).presence = Presence::Left.into();
        job.rank(rank).dump = None;
    }
    let expected = "their calls returned while ranks 0, 3 are still inside, so ranks 1-2 have run one collective fewer; they have exited since then";
    let verdict = job.judge();
    assert!(verdict.sentence.contains(expected), "{}", verdict.sentence);
    // Without proof, a rank that ended in order also skipped, and a killed rank is dead.
    let mut job = skip(2, 40_000);
    job.rank(2).presence = Presence::Left.into();
    expect(&job.judge(), Cause::MissingRank, &[2], Confidence::Medium);
    let mut job = skip(2, 40_000);
    job.dies(2, "killed by SIGKILL");
    expect(&job.judge(), Cause::ProcessDead, &[2], Confidence::Medium);
}

#[test]
fn the_clock_of_the_node_proves_a_skip() {
    let mut job = skip(2, 40_000);
    let completed_ns = job.flight(2).operations.last().unwrap().completed_ns;
    job.flight(0).operations.last_mut().unwrap().entered_ns = completed_ns + 1;
    expect(&job.judge(), Cause::MissingRank, &[2], Confidence::High);
    // Clocks of two nodes cannot be compared.
    job.rank(0).node = "node-1".into();
    expect(&job.judge(), Cause::MissingRank, &[2], Confidence::Medium);
}

#[test]
fn a_broadcast_that_its_root_has_completed_is_not_a_skip() {
    let mut job = Job::with_world(4, 30);
    job.complete(0x77, 0, |operation| (operation.op, operation.peer) = (Op::Broadcast.into(), 0));
    for rank in 1..4 {
        job.enter_with(0x77, rank, Op::Broadcast, |operation| operation.peer = 0);
    }
    expect(&job.judge(), Cause::NetworkStall, &[], Confidence::Medium);
}

#[test]
fn most_have_completed_and_the_rest_stalls() {
    let mut job = Job::with_world(4, 30);
    for rank in 0..3 {
        job.complete(0x77, rank, |operation| operation.device_ns = 50_000);
    }
    job.enter(0x77, 3, Op::AllReduce);
    expect(&job.judge(), Cause::NetworkStall, &[], Confidence::Medium);
}

#[test]
fn a_rank_that_has_not_joined_a_new_communicator() {
    let mut job = Job::new(4);
    for rank in [0, 1, 3] {
        job.creates(0x99, 4, rank, rank as i32);
    }
    job.set_stack(2, Stack::pause());
    let verdict = job.judge();
    expect(&verdict, Cause::CommInit, &[2], Confidence::High);
    assert_eq!(verdict.victims, [0, 1, 3]);
    job.rank(2).presence = Presence::Unregistered.into();
    job.rank(2).flight = None;
    expect(&job.judge(), Cause::CommInit, &[2], Confidence::High);
    job.set_stack(2, Stack::loader());
    expect(&job.judge(), Cause::DataLoader, &[2], Confidence::Medium);
    job.lost(2);
    expect(&job.judge(), Cause::CommInit, &[2], Confidence::Medium);
}

#[test]
fn a_creation_that_returned_on_one_rank_only() {
    let mut job = Job::new(4);
    for rank in [0, 1, 3] {
        job.creates(0x99, 4, rank, rank as i32);
    }
    job.comm(0x99, &[2]);
    (job.flight(2).communicators[0].rank, job.flight(2).communicators[0].size) = (2, 4);
    job.set_stack(2, Stack::sleep());
    expect(&job.judge(), Cause::CommInit, &[2], Confidence::Medium);
}

#[test]
fn a_rank_that_uses_a_communicator_that_the_others_are_still_creating() {
    let mut job = Job::new(4);
    for rank in [0, 1, 3] {
        job.creates(0x99, 4, rank, rank as i32);
    }
    job.comm(0x99, &[2]);
    (job.flight(2).communicators[0].rank, job.flight(2).communicators[0].size) = (2, 4);
    job.enter(0x99, 2, Op::AllReduce);
    let verdict = job.judge();
    expect(&verdict, Cause::CommInit, &[2], Confidence::High);
    assert!(verdict.sentence.contains("did not take part in the creation"), "{}", verdict.sentence);
    assert_eq!(verdict.victims, [0, 1, 3]);
}

#[test]
fn all_are_in_the_creation_and_it_does_not_end() {
    let mut job = Job::new(4);
    for rank in 0..4 {
        job.creates(0x99, 4, rank, rank as i32);
    }
    let verdict = job.judge();
    expect(&verdict, Cause::CommInit, &[], Confidence::Medium);
    assert_eq!(verdict.victims, [0, 1, 2, 3]);
}

#[test]
fn aborted_communicators_do_not_wait() {
    let mut job = all_enter(4, 9, Op::AllReduce, |_| ());
    for rank in 0..4 {
        job.flight(rank).communicators[0].state = CommunicatorState::Aborted.into();
    }
    assert_eq!(job.judge().culprits, [0; 0]);
    assert_ne!(job.judge().cause, Cause::NetworkStall);
}

#[test]
fn one_rank_has_the_unique_id_of_another_attempt() {
    let mut job = Job::new(4);
    for rank in [0, 2, 3] {
        job.creates(0x2b46, 4, rank, rank as i32);
    }
    job.creates(0x18fd, 4, 1, 1);
    let verdict = job.judge();
    expect(&verdict, Cause::CommInit, &[1], Confidence::Medium);
    assert!(verdict.sentence.contains("rank 1 is in the creation of communicator 0x18fd"), "{}", verdict.sentence);
}

#[test]
fn a_communicator_that_one_rank_creates_with_another_size() {
    let mut job = Job::new(4);
    for rank in 0..4 {
        job.creates(0x99, if rank == 1 { 5 } else { 4 }, rank, rank as i32);
    }
    let verdict = job.judge();
    expect(&verdict, Cause::CommInit, &[1], Confidence::High);
    assert!(verdict.sentence.contains("with 5 ranks, and ranks 0, 2-3 create it with 4"), "{}", verdict.sentence);
    // Most ranks leave a split out.
    let mut job = Job::new(4);
    for rank in 0..4 {
        job.creates(0x99, if rank == 0 { 4 } else { 3 }, rank, rank as i32);
    }
    let verdict = job.judge();
    expect(&verdict, Cause::CommInit, &[1, 2, 3], Confidence::Medium);
}

/// A rank is in a split of the world communicator, or has completed it.
fn splits(job: &mut Job, rank: u32, child: u64, status: OpStatus) {
    job.creates(child, 0, rank, -1);
    let flight = job.flight(rank);
    flight.communicators.last_mut().expect("it was pushed").parent = 0x77;
    let operation = flight.operations.last_mut().expect("it was pushed");
    operation.function = "ncclCommSplit".into();
    operation.op = Op::CommSplit.into();
    operation.status = status.into();
}

#[test]
fn a_rank_that_does_not_split_holds_up_all_children() {
    let judge = |change: &dyn Fn(&mut Job)| {
        let mut job = Job::with_world(4, 3);
        for rank in [0, 2, 3] {
            splits(&mut job, rank, 0x90 + u64::from(rank % 2), OpStatus::Pending);
        }
        job.set_stack(1, Stack::sleep());
        change(&mut job);
        job.judge()
    };
    expect(&judge(&|_| {}), Cause::CommInit, &[1], Confidence::Medium);
    // It waits in the parent for the ranks that wait for it.
    let elsewhere = judge(&|job| {
        job.enter(0x77, 1, Op::AllReduce);
        job.set_stack(1, Stack::device_wait());
    });
    assert_eq!((elsewhere.cause, &elsewhere.culprits[..]), (Cause::CommInit, &[1][..]), "{}", elsewhere.to_text());
    // Its record no longer contains all of its splits.
    let short = judge(&|job| drop(job.flight(1).operations.remove(0)));
    assert!(short.cause != Cause::CommInit || short.culprits != [1], "{}", short.to_text());
    // It is inside a split of the same communicator and has made fewer before.
    let inside = judge(&|job| {
        splits(job, 1, 0x95, OpStatus::Pending);
        for rank in [0, 2, 3] {
            splits(job, rank, 0x80, OpStatus::Completed);
        }
    });
    assert!(inside.culprits != [1] || inside.confidence != Confidence::High, "{}", inside.to_text());
}

#[test]
fn some_ranks_create_a_communicator_while_the_others_are_in_a_collective() {
    let judge = |creating: &[u32]| {
        let mut job = Job::with_world(4, 3);
        for rank in 0..4 {
            if creating.contains(&rank) {
                job.creates(0x99, 4, rank, rank as i32);
            } else {
                job.enter(0x77, rank, Op::AllReduce);
            }
        }
        job.judge()
    };
    expect(&judge(&[0, 2, 3]), Cause::CommInit, &[1], Confidence::Medium);
    expect(&judge(&[2]), Cause::CommInit, &[2], Confidence::Medium);
}

#[test]
fn a_rank_with_another_reduction_is_named_unless_it_worked_before() {
    let job = all_enter(4, 3, Op::AllReduce, |operation| operation.reduce_op = 2);
    let verdict = job.judge();
    expect(&verdict, Cause::OpMismatch, &[3], Confidence::Medium);
    assert!(verdict.sentence.contains("rank 3 runs all_reduce (max)"), "{}", verdict.sentence);
    // An earlier collective completed with the same difference.
    let mut job = all_enter(4, 3, Op::AllReduce, |operation| operation.reduce_op = 2);
    let completed = job.flight(3).operations.iter_mut().rev().nth(1).expect("the one before");
    completed.reduce_op = 2;
    let verdict = job.judge();
    assert_ne!(verdict.cause, Cause::OpMismatch, "{}", verdict.to_text());
}

#[test]
fn a_difference_that_completed_before_is_not_a_mismatch() {
    let array = |operation: &mut Operation| (operation.count, operation.dtype) = (4096, 0);
    for cause in [Cause::DtypeMismatch, Cause::SizeMismatch] {
        let mut job = all_enter(4, 1, Op::AllReduce, |operation| {
            array(operation);
            if cause == Cause::SizeMismatch {
                operation.dtype = Job::operation(0, 0, Op::AllReduce).dtype;
            }
        });
        expect(&job.judge(), cause, &[1], Confidence::High);
        let last = job.flight(1).operations.last().expect("the one that hangs").clone();
        let completed = job.flight(1).operations.iter_mut().rev().nth(1).expect("the one before");
        (completed.count, completed.dtype) = (last.count, last.dtype);
        assert_ne!(job.judge().cause, cause);
    }
}

#[test]
fn a_nonblocking_form_does_not_match_a_blocking_one() {
    let nonblocking = |function: &'static str| move |operation: &mut Operation| operation.function = function.into();
    let verdict = all_enter(4, 0, Op::AllReduce, nonblocking("MPI_Iallreduce")).judge();
    expect(&verdict, Cause::OpMismatch, &[0], Confidence::High);
    assert!(verdict.sentence.contains("rank 0 runs MPI_Iallreduce"), "{}", verdict.sentence);
    let verdict = all_enter(4, 0, Op::Barrier, nonblocking("MPI_Ibarrier")).judge();
    expect(&verdict, Cause::OpMismatch, &[0], Confidence::High);
    // A library that matched them before.
    let mut job = all_enter(4, 0, Op::AllReduce, nonblocking("MPI_Iallreduce"));
    job.flight(0).operations.iter_mut().for_each(|operation| operation.function = "MPI_Iallreduce".into());
    assert_ne!(job.judge().cause, Cause::OpMismatch);
}

#[test]
fn a_rank_that_finalizes_where_others_reduce_gave_up() {
    let end = |operation: &mut Operation| {
        operation.op = Op::Barrier.into();
        operation.function = "MPI_Finalize".into();
    };
    let verdict = all_enter(4, 2, Op::AllReduce, end).judge();
    expect(&verdict, Cause::Teardown, &[2], Confidence::High);
    assert!(verdict.sentence.starts_with("Rank 2 is shutting down while others continue"), "{}", verdict.sentence);
}

#[test]
fn a_few_ranks_in_a_collective_while_most_wait_elsewhere() {
    let judge = |outside: &[u32], elsewhere: &[u32]| {
        let mut job = Job::with_world(5, 6);
        for rank in 0..5 {
            match (outside.contains(&rank), elsewhere.contains(&rank)) {
                (true, _) => job.set_stack(rank, Stack::pause()),
                (_, true) => job.set_stack(rank, Stack::new(&[("f", "/job/other.py:1")], &["clock_nanosleep"])),
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
fn ranks_that_are_missing_at_several_places_may_wait_for_each_other() {
    let judge = |second: Stack| {
        let mut job = Job::with_world(8, 6);
        (2..8).for_each(|rank| job.enter(0x77, rank, Op::AllReduce));
        job.set_stack(0, Stack::pause());
        job.set_stack(1, second);
        job.judge()
    };
    expect(&judge(Stack::pause()), Cause::MissingRank, &[0, 1], Confidence::High);
    let elsewhere = Stack::new(&[("wait_for_peer", "/job/other.py:1")], &["pause"]);
    expect(&judge(elsewhere), Cause::MissingRank, &[0, 1], Confidence::Medium);
}

#[test]
fn an_absent_rank_is_found_behind_a_creation_with_unknown_members() {
    // Tensor groups of three and pairs over them. Rank 4 leaves out its group of three, so rank 5
    // never reaches the pair of rank 2.
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
        job.set_stack(rank, Stack::new(&group, &["clock_nanosleep"]));
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
        job.set_stack(0, keeps());
        for rank in 1..world {
            if !outsiders.contains(&rank) {
                job.creates(0x25, world, rank, rank as i32);
            }
            job.set_stack(rank, at(&["recv", "c10d::TCPStore::doWait", "c10d::TCPStore::get"]));
        }
        for &rank in outsiders {
            job.set_stack(rank, outside());
        }
        job
    };
    let verdict = creating(4, &[2]).judge();
    expect(&verdict, Cause::CommInit, &[2], Confidence::Medium);
    assert!(verdict.sentence.contains("cannot connect to the store that ranks 0-1, 3 use"), "{}", verdict.sentence);
    assert_eq!(verdict.victims, [0, 1, 3]);
    // Most ranks cannot connect, so the store is not where it should be.
    expect(&creating(8, &[2, 3, 4, 5, 6, 7]).judge(), Cause::CommInit, &[0, 1], Confidence::Low);
    expect(&creating(4, &[2, 3]).judge(), Cause::CommInit, &[2, 3], Confidence::Low);
    // A wait for an answer of the store is not a failing connection.
    let mut job = creating(4, &[]);
    job.set_stack(2, at(&["recv", "c10d::TCPStore::TCPStore"]));
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

#[test]
fn a_key_in_the_store_may_name_its_rank() {
    let waits = |keys: &[&str], waiters: &[u32]| {
        let mut job = Job::with_world(4, 9);
        for rank in 0..4 {
            job.set_stack(rank, Stack::sleep());
        }
        for rank in waiters {
            job.awaits_keys(*rank, keys);
        }
        job.judge()
    };
    // Ranks 1 and 2 are at one place, and the key names one of them.
    let verdict = waits(&["results/rank_2"], &[0, 3]);
    expect(&verdict, Cause::MissingRank, &[2], Confidence::Medium);
    assert_eq!(verdict.victims, [0, 3]);
    let expected = "Rank 2 has not set the key \"results/rank_2\" that the others wait for in the store";
    assert!(verdict.sentence.starts_with(expected), "{}", verdict.sentence);
    let line = "ranks 0, 3 wait for the key \"results/rank_2\" in c10d::TCPStore::wait";
    assert!(verdict.evidence.iter().any(|evidence| evidence.text == line), "{}", verdict.to_text());
    // Every rank sets a key of its own and waits for all of them.
    let verdict = waits(&["done.0", "done.1", "done.2", "done.3"], &[0, 1, 3]);
    expect(&verdict, Cause::MissingRank, &[2], Confidence::Medium);
    assert!(verdict.sentence.contains("has not set the key \"done.2\""), "{}", verdict.sentence);
    // A key that names no rank. The number of a step is not a rank.
    let verdict = waits(&["step/1"], &[0, 2, 3]);
    expect(&verdict, Cause::MissingRank, &[1], Confidence::Medium);
    assert_eq!(waits(&["step/1"], &[0, 3]).culprits, [1, 2]);
}

#[test]
fn a_rank_that_reads_its_shards_is_not_to_blame_for_a_key_alone() {
    // The cause of the missing key is what the rank does.
    let mut job = Job::with_world(4, 9);
    [0, 1, 3].into_iter().for_each(|rank| job.awaits_keys(rank, &["done"]));
    job.set_stack(2, Stack::checkpoint());
    let verdict = job.judge();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::StorageIo, &[2][..]), "{}", verdict.to_text());
    assert!(verdict.sentence.contains("wait in c10d::TCPStore::wait for the key \"done\""), "{}", verdict.sentence);
}

#[test]
fn ranks_that_wait_for_another_number_of_a_barrier() {
    let mut job = Job::with_world(4, 9);
    for rank in 0..4 {
        job.awaits_keys(rank, &[if rank == 2 { "barrier/17" } else { "barrier/18" }]);
    }
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[2], Confidence::Medium);
    assert_eq!(verdict.victims, [0, 1, 3]);
    let expected = "Rank 2 has not set the key \"barrier/18\" that the others wait for in the store";
    assert!(verdict.sentence.starts_with(expected), "{}", verdict.sentence);
    assert!(verdict.sentence.contains("and waits for the key \"barrier/17\" in the store"), "{}", verdict.sentence);
    let line = "rank 2 waits for the key \"barrier/17\" in c10d::TCPStore::wait";
    assert!(verdict.evidence.iter().any(|evidence| evidence.text == line), "{}", verdict.to_text());
}

#[test]
fn few_in_a_collective_while_most_wait_for_a_key() {
    let mut job = Job::with_world(4, 9);
    job.enter(0x77, 3, Op::AllReduce);
    (0..3).for_each(|rank| job.awaits_keys(rank, &["shards"]));
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[3], Confidence::Medium);
    let expected =
        "Rank 3 has not set the key \"shards\" that ranks 0-2 wait for in the store, and waits in all_reduce 10";
    assert!(verdict.sentence.starts_with(expected), "{}", verdict.sentence);
    assert!(!verdict.to_text().contains("creation of a communicator"), "{}", verdict.to_text());
}

#[test]
fn a_rank_that_gloo_aborted_is_not_to_blame_for_the_size_of_another() {
    let aborts = |change: fn(&mut Operation)| {
        let mut job = Job::with_world(4, 9);
        job.trigger(TriggerKind::Death);
        for rank in 0..4 {
            job.flight(rank).operations.iter_mut().for_each(|operation| operation.stream = 0);
            job.enter_with(0x77, rank, Op::AllReduce, |operation| {
                operation.stream = 0;
                if rank == 2 {
                    change(operation);
                }
            });
        }
        job.dies(1, "killed by SIGABRT (core dumped)");
        job.dies(3, "exit code 1");
        job
    };
    let verdict = aborts(|operation| operation.count = 4096).judge();
    expect(&verdict, Cause::SizeMismatch, &[2], Confidence::Medium);
    let line = "gloo aborted rank 1 in it, as it does when more bytes arrive than fit";
    assert!(verdict.evidence.iter().any(|evidence| evidence.text == line), "{}", verdict.to_text());
    let verdict = aborts(|operation| operation.dtype = DataType::Float64.into()).judge();
    expect(&verdict, Cause::DtypeMismatch, &[2], Confidence::Medium);
    // All sizes agree, or a device ran the collective: another reason aborted the rank.
    let verdict = aborts(|_| ()).judge();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::ProcessDead, &[1][..]), "{}", verdict.to_text());
    let mut job = aborts(|operation| operation.count = 4096);
    job.flight(1).operations.iter_mut().for_each(|operation| operation.stream = 0x10);
    assert_eq!(job.judge().cause, Cause::ProcessDead);
}

#[test]
fn an_asynchronous_error_of_a_communicator_is_evidence() {
    let mut job = all_enter(4, 9, Op::AllReduce, |_| ());
    for rank in [1, 2] {
        job.flight(rank).communicators[0].async_error = 6;
    }
    let verdict = job.judge();
    expect(&verdict, Cause::NetworkStall, &[], Confidence::High);
    let line = "NCCL reported to ranks 1-2 the asynchronous error 6 (remote error) of communicator 0x77";
    assert!(verdict.evidence.iter().any(|evidence| evidence.text == line), "{}", verdict.to_text());
}

#[test]
fn a_registration_that_all_ranks_make_together_has_its_own_name() {
    let mut job = Job::with_world(4, 9);
    for rank in [0, 1, 3] {
        let operation = Job::operation(0x77, 1, Op::CommSplit);
        let function = "ncclCommWindowRegister".into();
        job.push(rank, Operation { kind: OpKind::HostCall.into(), returned_ns: 0, dtype: 0, function, ..operation });
        job.set_stack(rank, Stack::new(&[("register", "/job/train.py:20")], &["poll", "ncclCommWindowRegister"]));
    }
    job.set_stack(2, Stack::sleep());
    let verdict = job.judge();
    assert_eq!(verdict.culprits, [2], "{}", verdict.to_text());
    assert!(verdict.sentence.contains("ncclCommWindowRegister of communicator 0x77"), "{}", verdict.sentence);
    assert!(!verdict.sentence.contains("split"), "{}", verdict.sentence);
}

#[test]
fn a_rank_that_waits_for_a_key_does_not_wait_for_the_rank_that_has_the_store() {
    // Rank 0 has the store, and all ranks are connected to it.
    let store = |job: &mut Job, rank: u32| {
        let thread = &mut job.rank(rank).dump.as_mut().expect("a dump").stacktrace[0];
        let holders = vec![Holder { pid: 1000, name: "python3".into(), child: false, ..Holder::default() }];
        let name = "127.0.0.1:29500".into();
        thread.awaited = Some(Awaited { kind: AwaitedKind::Socket.into(), name, holders, ..Default::default() });
    };
    let mut job = Job::with_world(4, 9);
    for rank in 0..4 {
        job.flight(rank).rank.as_mut().expect("it is known").pid = 1000 + rank as i32;
        job.awaits_keys(rank, &[if rank == 2 { "barrier/17" } else { "barrier/18" }]);
        store(&mut job, rank);
    }
    expect(&job.judge(), Cause::MissingRank, &[2], Confidence::Medium);
    // The others wait for a collective, and nobody sets the key.
    let mut job = Job::with_world(3, 9);
    [0, 2].into_iter().for_each(|rank| job.enter(0x77, rank, Op::AllReduce));
    for rank in 0..3 {
        job.flight(rank).rank.as_mut().expect("it is known").pid = 1000 + rank as i32;
    }
    job.awaits_keys(1, &["dataset-raedy"]);
    store(&mut job, 1);
    let verdict = job.judge();
    expect(&verdict, Cause::MissingRank, &[1], Confidence::Medium);
    assert!(verdict.sentence.contains("waits for the key \"dataset-raedy\" in the store"), "{}", verdict.sentence);
}
