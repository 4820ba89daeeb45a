//! Ranks that wait for a resource of another rank: a file lock, a pipe, a socket.

use super::expect;
use crate::{
    Cause, Confidence,
    testing::{Job, Stack},
};
use xpu_timer_proto::{
    server::{Awaited, AwaitedKind, Holder},
    v1::{Op, TriggerKind},
};

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
fn awaits(job: &mut Job, rank: u32, native: &'static str, kind: AwaitedKind, holders: &[i32]) {
    job.stands(rank, Stack::new(&[("fetch_index", "/job/train.py:7")], &[native]));
    let holder = |pid: &i32| Holder { pid: *pid, name: "python3".into(), child: false };
    let thread = &mut job.rank(rank).dump.as_mut().expect("a dump").stacktrace[0];
    thread.awaited = Some(Awaited {
        kind: kind.into(),
        name: if kind == AwaitedKind::Pipe { String::new() } else { "/data/index.lock".into() },
        holders: holders.iter().map(holder).collect(),
    });
}

#[test]
fn the_holder_of_what_others_wait_for_is_followed() {
    for (native, kind) in [("flock", AwaitedKind::Lock), ("recv", AwaitedKind::Socket), ("read", AwaitedKind::Pipe)] {
        let mut job = outside(&[2, 5]);
        awaits(&mut job, 5, native, kind, &[1002]);
        job.stands(2, Stack::checkpoint());
        let verdict = job.judge();
        expect(&verdict, Cause::StorageIo, &[2], Confidence::High);
        assert!(verdict.victims.contains(&5), "{}", verdict.to_text());
        assert!(verdict.sentence.contains("rank 5 waits for"), "{}", verdict.sentence);
        // A chain of two resource waits.
        let mut job = outside(&[2, 5, 6]);
        awaits(&mut job, 5, native, kind, &[1002]);
        awaits(&mut job, 6, native, kind, &[1005]);
        job.stands(2, Stack::loader());
        expect(&job.judge(), Cause::DataLoader, &[2], Confidence::Medium);
    }
}

#[test]
fn a_holder_in_a_collective_with_the_waiter_is_named() {
    let mut job = outside(&[5]);
    awaits(&mut job, 5, "flock", AwaitedKind::Lock, &[1000]);
    let verdict = job.judge();
    expect(&verdict, Cause::StorageIo, &[0], Confidence::Medium);
    let told = "Rank 0 holds up rank 5, which waits for the lock on index.lock, held by rank 0 (process 1000) at train.py:7 \
                in fetch_index (C function flock); rank 0 is itself in all_reduce 10";
    assert!(verdict.sentence.starts_with(told), "{}", verdict.sentence);
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
    job.stands(3, Stack::checkpoint());
    awaits(&mut job, 1, "flock", AwaitedKind::Lock, &[1003]);
    let verdict = job.judge();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (Cause::StorageIo, &[3][..]), "{}", verdict.to_text());
}
