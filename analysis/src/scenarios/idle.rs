//! Idle jobs: notebooks, parameter servers, programs that sleep until they are needed.

use super::expect;
use crate::{
    Cause, Confidence,
    testing::{Job, Stack},
};
use xpu_timer_proto::{
    server::{Awaited, AwaitedKind},
    v1::TriggerKind,
};

/// A job in which nothing was launched for a long time.
fn idle(stands: impl Fn(u32) -> Stack) -> Job {
    let mut job = Job::with_world(4, 30);
    job.trigger(TriggerKind::Idle);
    (0..4).for_each(|rank| job.stands(rank, stands(rank)));
    job
}

fn serves() -> Stack {
    Stack::new(
        &[("BaseSelector.select", "/usr/lib/python3.11/selectors.py:468"), ("serve", "/job/ps.py:9")],
        &["epoll_wait"],
    )
}

#[test]
fn ranks_that_all_sleep_may_be_idle() {
    let verdict = idle(|_| Stack::sleep()).judge();
    expect(&verdict, Cause::Unknown, &[], Confidence::Low);
    let told =
        "No operation is pending, so nothing is stuck on any device: all 4 ranks stand at train.py:99 in evaluate";
    assert!(verdict.sentence.starts_with(told), "{}", verdict.sentence);
}

#[test]
fn a_server_is_not_in_the_way_of_those_that_sleep() {
    let verdict = idle(|rank| if rank == 0 { serves() } else { Stack::sleep() }).judge();
    expect(&verdict, Cause::Unknown, &[], Confidence::Low);
    assert!(verdict.sentence.contains("every rank sleeps, or waits for a message"), "{}", verdict.sentence);
}

#[test]
fn a_wait_for_keyboard_input_is_not_storage() {
    let prompt = || Stack::new(&[("main", "/job/notebook.py:3")], &["__GI___libc_read"]);
    let mut job = idle(|rank| if rank == 0 { prompt() } else { Stack::sleep() });
    job.rank(0).dump.as_mut().expect("a dump").stacktrace[0].awaited =
        Some(Awaited { kind: AwaitedKind::File.into(), name: "/dev/pts/0".into(), holders: Vec::new() });
    expect(&job.judge(), Cause::Unknown, &[], Confidence::Low);
}

#[test]
fn a_rank_that_stands_still_elsewhere_is_named_in_an_idle_job() {
    let verdict = idle(|rank| if rank == 2 { Stack::checkpoint() } else { Stack::sleep() }).judge();
    expect(&verdict, Cause::StorageIo, &[2], Confidence::Medium);
}
