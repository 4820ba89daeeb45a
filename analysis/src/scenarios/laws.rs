//! Laws for every verdict: it does not depend on rank numbers or on the order of arrival, no input
//! causes a panic, and the work is linear.

use std::time::Duration;

use proptest::{collection::vec, prelude::*};
use xpu_timer_proto::{
    Message,
    server::{Awaited, AwaitedKind, Holder},
    v1::{Communicator, CommunicatorState, Evidence, Op, OpKind, Operation, RankEvidence},
};

use crate::{
    Cause, Confidence, Verdict, judge,
    testing::{Job, Stack},
};

fn stacks() -> Vec<Stack> {
    vec![
        Stack::loader(),
        Stack::checkpoint(),
        Stack::sleep(),
        Stack::lock(),
        Stack::device_wait(),
        Stack::checkpoint().moving_bytes(1 << 30),
        Stack::sleep().state("T (stopped)", ""),
    ]
}

/// Jobs of eight ranks with a world communicator and two halves, in which some ranks are elsewhere.
fn any_job() -> impl Strategy<Value = Job> {
    (vec(0..7u8, 8), vec(0..7usize, 8)).prop_map(|(states, stack_kinds)| {
        let mut job = Job::with_world(8, 6);
        job.comm(0x1, &[0, 1, 2, 3]);
        job.comm(0x2, &[4, 5, 6, 7]);
        for rank in 0..8u32 {
            let half = if rank < 4 { 0x1 } else { 0x2 };
            match states[rank as usize] {
                0 => job.set_stack(rank, stacks()[stack_kinds[rank as usize]].clone()),
                1 => job.enter(half, rank, Op::AllReduce),
                2 => job.queue(half, rank, Op::AllReduce),
                3 => job.complete(0x77, rank, |_| ()),
                4 => job.transfer(half, rank, Op::Recv, ((rank + 1) % 4) as i32),
                _ => job.enter(0x77, rank, Op::AllReduce),
            }
        }
        job
    })
}

fn core(verdict: &Verdict) -> (Cause, Vec<u32>, Vec<u32>, Confidence) {
    (verdict.cause, verdict.culprits.clone(), verdict.victims.clone(), verdict.confidence)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn renumbering_the_ranks_renumbers_the_verdict(job in any_job(), order in Just((0..8u32).collect::<Vec<_>>()).prop_shuffle()) {
        let (cause, culprits, victims, confidence) = core(&job.judge());
        let renumber = |ranks: Vec<u32>| {
            let mut ranks: Vec<u32> = ranks.into_iter().map(|rank| order[rank as usize]).collect();
            ranks.sort_unstable();
            ranks
        };
        let expected = (cause, renumber(culprits), renumber(victims), confidence);
        let renumbered = job.renumbered(&order).judge();
        prop_assert_eq!(core(&renumbered), expected, "{}\n{}", job.judge().to_text(), renumbered.to_text());
    }

    #[test]
    fn the_order_of_arrival_does_not_matter(job in any_job(), order in Just((0..8usize).collect::<Vec<_>>()).prop_shuffle()) {
        let mut shuffled = job.clone();
        shuffled.evidence.ranks = order.iter().map(|index| job.evidence.ranks[*index].clone()).collect();
        prop_assert_eq!(shuffled.judge(), job.judge());
    }

    #[test]
    fn culprits_and_victims_are_ranks_in_order_and_apart(job in any_job()) {
        let verdict = job.judge();
        for ranks in [&verdict.culprits, &verdict.victims] {
            prop_assert!(ranks.windows(2).all(|pair| pair[0] < pair[1]) && ranks.iter().all(|rank| *rank < 8));
        }
        prop_assert!(verdict.victims.iter().all(|rank| !verdict.culprits.contains(rank)));
        prop_assert!(verdict.sentence.ends_with('.'));
        prop_assert!(verdict.to_text().lines().all(|line| line.chars().count() <= 100));
    }

    #[test]
    fn absurd_evidence_does_no_harm(ranks in vec(absurd_rank(), 0..6), world_size in any::<u32>(), limits in any::<(u64, u64)>()) {
        let evidence = Evidence { world_size, ranks, hang_timeout_ns: limits.0, sample_interval_ns: limits.1, ..Default::default() };
        let verdict = judge(&evidence);
        prop_assert_eq!(&judge(&evidence), &verdict);
        prop_assert!(!verdict.to_text().is_empty());
        let json = serde_json::to_string(&verdict).unwrap();
        prop_assert_eq!(serde_json::from_str::<Verdict>(&json).unwrap(), verdict);
    }

    #[test]
    fn damaged_evidence_does_no_harm(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut job = Job::with_world(3, 2);
        job.enter(0x77, 0, Op::AllReduce);
        job.set_stack(1, Stack::loader());
        let mut bytes = job.evidence.encode_to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(evidence) = Evidence::decode(&bytes[..]) {
            let _ = judge(&evidence).to_text();
        }
    }
}

prop_compose! {
    fn absurd_operation()(
        numbers in any::<(u64, u64, u64, u64)>(), kinds in (0..6i32, 0..45i32, -2..20i32, 0..5i32),
        communicator in 0..3u64, seq in prop_oneof![0..4u64, Just(u64::MAX)], peer in any::<i32>(), started in 0..2u64,
    ) -> Operation {
        Operation {
            ticket: numbers.0, count: numbers.1, stream: numbers.2, entered_ns: numbers.3, kind: kinds.0, op: kinds.1,
            dtype: kinds.2, status: kinds.3, communicator, seq, peer: peer % 3, started_ns: started, ..Default::default()
        }
    }
}

prop_compose! {
    fn absurd_communicator()(
        id in 0..3u64, size in prop_oneof![0..4u32, any::<u32>()], rank in prop_oneof![-1..4i32, any::<i32>()],
        counters in (any::<u64>(), 0..4u64, 0..4u64), state in -1..7i32,
    ) -> Communicator {
        let (launched, started, completed) = counters;
        Communicator { id, size, rank, launched, started, completed, state, ..Default::default() }
    }
}

prop_compose! {
    fn absurd_rank()(
        rank in prop_oneof![0..4u32, any::<u32>()], presence in -1..7i32, stack in prop::option::of(0..7usize),
        operations in vec(absurd_operation(), 0..6), communicators in vec(absurd_communicator(), 0..4), flight in any::<bool>(),
    ) -> RankEvidence {
        let mut job = Job::new(1);
        if let Some(stack) = stack {
            job.set_stack(0, stacks()[stack].clone());
        }
        let mut entry = job.rank(0).clone();
        entry.rank = rank;
        entry.presence = presence;
        match flight {
            true => {
                let record = entry.flight.as_mut().unwrap();
                record.operations = operations;
                record.communicators = communicators;
            }
            false => entry.flight = None,
        }
        if stack.is_none() {
            entry.dump = None;
        }
        entry
    }
}

#[test]
fn empty_evidence_is_unknown() {
    let verdict = judge(&Evidence::default());
    super::expect(&verdict, Cause::Unknown, &[], Confidence::Low);
    let verdict = judge(&Evidence { world_size: 4, ..Default::default() });
    super::expect(&verdict, Cause::Unknown, &[], Confidence::Low);
    assert_eq!(verdict.ranks.len(), 1);
    assert_eq!(verdict.ranks[0].ranks, [0, 1, 2, 3]);
}

#[test]
fn with_one_dump_in_eight_missing_there_is_no_confident_mistake() {
    for lost in 0..8 {
        for culprit in 0..8 {
            let mut job = Job::with_world(8, 6);
            for rank in (0..8).filter(|rank| *rank != culprit) {
                job.enter(0x77, rank, Op::AllReduce);
            }
            job.set_stack(culprit, Stack::loader());
            job.lost(lost);
            let verdict = job.judge();
            let right = verdict.culprits == [culprit];
            assert!(right && (lost == culprit || verdict.cause == Cause::DataLoader), "{}", verdict.to_text());
            assert!(verdict.confidence < Confidence::High, "{}", verdict.to_text());
        }
    }
}

/// Processor time of this thread. It grows only while the thread runs, so a busy machine does not
/// change it.
fn worked() -> Duration {
    nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID.now().unwrap().into()
}

/// Judges a job of 1,024 ranks and one of 16 times as many, and returns the verdict on the latter.
/// Quadratic work would take 256 times as long.
fn in_linear_time(job: impl Fn(u32) -> Job) -> Verdict {
    const FEW: u32 = 1024;
    let timed = |job: Job| {
        let start = worked();
        let verdict = job.judge();
        (verdict, worked() - start)
    };
    let few = [(); 2].map(|()| timed(job(FEW)).1).into_iter().min().unwrap();
    let (verdict, many) = timed(job(16 * FEW));
    println!("{FEW} ranks judged in {few:?}, {} in {many:?}", 16 * FEW);
    assert!(many < few * 80, "{few:?} and {many:?}");
    verdict
}

#[test]
fn a_big_job_is_judged_in_linear_time() {
    let verdict = in_linear_time(tensor_and_data_groups);
    super::expect(&verdict, Cause::DataLoader, &[42], Confidence::Medium);
    assert_eq!(verdict.victims.len(), 16_383);
}

/// Tensor groups of 8 and data groups over them. A rank with a high number is in its loader.
fn tensor_and_data_groups(world: u32) -> Job {
    let mut job = Job::new(world);
    let mut members: std::collections::BTreeMap<u64, Vec<u32>> = std::collections::BTreeMap::new();
    for rank in 0..world {
        members.entry(0x1_0000 + u64::from(rank / 8)).or_default().push(rank);
        members.entry(0x2_0000 + u64::from(rank % 8)).or_default().push(rank);
    }
    for entry in &mut job.evidence.ranks {
        let rank = entry.rank;
        let flight = entry.flight.as_mut().unwrap();
        for (id, waits) in
            [(0x1_0000 + u64::from(rank / 8), rank / 8 == 5), (0x2_0000 + u64::from(rank % 8), rank / 8 != 5)]
        {
            let ranks = &members[&id];
            let comm_rank = ranks.binary_search(&rank).unwrap() as i32;
            let waits = waits && rank != 42;
            flight.communicators.push(Communicator {
                id,
                size: ranks.len() as u32,
                rank: comm_rank,
                state: 2,
                launched: 7 + u64::from(waits),
                started: 7 + u64::from(waits),
                completed: 7,
                ..Default::default()
            });
            if waits {
                flight.operations.push(Operation { started_ns: 1, ..Job::operation(id, 8, Op::AllReduce) });
            }
        }
    }
    job.evidence.ranks[42] = {
        let mut small = Job::new(43);
        small.set_stack(42, Stack::loader());
        let flight = job.evidence.ranks[42].flight.take();
        RankEvidence { flight, ..small.evidence.ranks.swap_remove(42) }
    };
    job
}

#[test]
fn judging_takes_linear_time_with_half_of_the_ranks_missing_beside_a_stopped_parent() {
    let verdict = in_linear_time(|world| {
        let mut job = Job::new(world);
        job.evidence.ranks.truncate(world as usize / 2);
        for entry in &mut job.evidence.ranks {
            let (id, rank) = (0x77, entry.rank as i32);
            let flight = entry.flight.as_mut().unwrap();
            let state = CommunicatorState::Initializing.into();
            flight.communicators.push(Communicator { id, size: world, rank, state, ..Default::default() });
            let operation = Operation { kind: OpKind::HostCall.into(), ..Job::operation(id, 1, Op::CommInit) };
            flight.operations.push(operation);
            entry.dump.as_mut().unwrap().parent_pid = 1040;
        }
        job.process(40, "zygote", Stack::sleep().state("T (stopped)", ""));
        job
    });
    assert_eq!((verdict.cause, verdict.culprit_processes.len()), (Cause::ProcessStopped, 1), "{}", verdict.sentence);
}

#[test]
fn judging_takes_linear_time_with_half_of_the_ranks_in_cycles_with_processes() {
    let verdict = in_linear_time(|world| {
        let mut job = half_outside(world);
        let waits_for = |pid: i32| {
            let holders = vec![Holder { pid, ..Default::default() }];
            Some(Awaited { kind: AwaitedKind::Pipe.into(), holders, ..Default::default() })
        };
        for index in (1..job.evidence.ranks.len()).step_by(2) {
            let engine = job.process(50, "engine", Stack::sleep());
            engine.stacktrace[0].awaited = waits_for(1001);
            let node = format!("node-{index}");
            job.evidence.processes.last_mut().unwrap().node.clone_from(&node);
            let entry = &mut job.evidence.ranks[index];
            entry.node = node;
            entry.dump.as_mut().unwrap().stacktrace[0].awaited = waits_for(1050);
        }
        job
    });
    assert_eq!(verdict.culprit_processes.len(), 2 * 8192, "{}", verdict.sentence);
}

#[test]
fn judging_takes_linear_time_with_half_of_the_ranks_as_culprits() {
    let verdict = in_linear_time(half_outside);
    assert_eq!((verdict.cause, verdict.culprits.len(), verdict.victims.len()), (Cause::MissingRank, 8192, 8192));
    assert!(verdict.to_text().len() < 20_000, "{}", verdict.to_text().len());
}

/// Every second rank is in a collective, and the others sleep.
fn half_outside(world: u32) -> Job {
    let mut job = Job::with_world(4, 1);
    job.enter(0x77, 0, Op::AllReduce);
    job.set_stack(1, Stack::sleep());
    let (waits, late) = (job.evidence.ranks[0].clone(), job.evidence.ranks[1].clone());
    job.evidence.world_size = world;
    job.evidence.ranks = (0..world)
        .map(|rank| {
            let mut entry = if rank % 2 == 0 { waits.clone() } else { late.clone() };
            entry.rank = rank;
            let communicator = &mut entry.flight.as_mut().unwrap().communicators[0];
            (communicator.size, communicator.rank) = (world, rank as i32);
            entry
        })
        .collect();
    job
}
