//! What shows that a job hangs: `XPU_TIMER_HANG_KILL` ends ranks on nothing else.

use crate::{
    HangEvidence,
    testing::{Job, SECOND, Stack},
};
use xpu_timer_proto::v1::{Op, TriggerKind};

/// A job without a pending operation in which nothing was launched for a long time.
fn quiet(stands: impl Fn(u32) -> Stack) -> Job {
    let mut job = Job::with_world(4, 30);
    job.trigger(TriggerKind::Idle);
    (0..4).for_each(|rank| job.stands(rank, stands(rank)));
    job
}

/// Rank 2 has not entered the all_reduce in which the others wait for longer than the timeout.
fn waits_for(stands: Stack) -> Job {
    let mut job = Job::with_world(4, 30);
    for rank in [0, 1, 3] {
        job.enter(0x77, rank, Op::AllReduce);
    }
    job.stands(2, stands);
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
    for stand in [Stack::sleep, Stack::pause, Stack::lock, Stack::loader] {
        assert_eq!(hang(&quiet(|_| stand())), HangEvidence::None);
    }
}

#[test]
fn ranks_that_wait_for_one_that_goes_on_do_not_hang() {
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
fn a_chain_that_ends_in_a_dead_rank_is_a_hang() {
    let mut job = waits_for(Stack::sleep());
    job.dies(2, "killed by SIGKILL");
    job.evidence.hang_timeout_ns = 600 * SECOND;
    job.trigger(TriggerKind::Death);
    assert_eq!(hang(&job), HangEvidence::WaitChain);
    assert_eq!(job.judge().culprits, [2]);
}
