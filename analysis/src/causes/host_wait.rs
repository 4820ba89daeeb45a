//! `gil_deadlock`, `data_loader`, `storage_io` and `host_lock`: others wait for a rank whose main
//! thread waits for a thread, a child process, a file or a lock; and the rank that holds a resource
//! which another rank waits for.

use xpu_timer_proto::server::AwaitedKind;

use crate::{
    case::Case,
    explanation::{Explanation, HostState},
    facts,
    finding::{Exclusion, Fact, Finding, RankFact, Rule, never_ruled_out},
    graph::{Event, Suspect},
    stacks::{is_file_lock, is_shared_lock},
    verdict::{Activity, Cause, Confidence},
};

/// `gil_deadlock`: others wait for a rank in which a thread holds the GIL and is blocked in native
/// code.
///
/// The same thread holds the GIL in both samples, it is at the same place, and it used no processor
/// in between. At least one other thread waits for the GIL in both samples. Only all of this
/// together counts: a single wait for the GIL is normal. If no thread waits for the GIL, the holder
/// must wait without a timeout, and neither for a device nor for storage, while other threads of
/// the program are in calls of their own: whatever the main thread waits for, it then needs the
/// GIL. The confidence is then medium if the main thread does not wait for its device. The sentence
/// includes what blocks the holder, such as a file or another lock. Without the GIL, that would not
/// harm the other threads.
pub(super) const GIL_DEADLOCK: Rule = Rule {
    cause: Cause::GilDeadlock,
    explain: gil_deadlock,
    rule_out: |case, culprits| no_culprit_does(case, culprits, Activity::Gil, Exclusion::NoGilWait),
};

/// `data_loader`: others wait for a rank whose main thread waits for its next batch.
///
/// In both samples, the main thread is in the `__next__` of a loader, or in the `get` of a queue
/// that a loader's frames surround. A reader thread or worker process that is dead, stopped or
/// stuck in I/O makes the cause certain; the sentence names it as the cause behind the cause. If
/// nothing in the loader is known to be stuck, the loader may only be slow, and the confidence is
/// medium.
///
/// A main thread that receives from a queue of Python's multiprocessing counts if a worker process
/// is stuck, whatever the program calls the queue. A main thread that receives from any pipe of
/// multiprocessing counts if a child process is dead or no other process has the other end open: no
/// more data can come.
pub(super) const DATA_LOADER: Rule = Rule {
    cause: Cause::DataLoader,
    explain: data_loader,
    rule_out: |case, culprits| no_culprit_does(case, culprits, Activity::DataLoader, Exclusion::NoLoaderWait),
};

/// `storage_io`: others wait for a rank whose main thread is inside a read, write or sync that does
/// not progress.
///
/// In both samples, the innermost native functions, the system call or the kernel function of the
/// main thread move bytes of a file or a pipe, and the number of bytes that the process has read
/// and written hardly changes. If it changes, the storage is slow and the rank is busy:
/// `long_step`. A lock on a file counts as storage, with medium confidence, because the holder of
/// the lock may be the culprit. These do not count as storage:
///
/// - A socket.
/// - A pipe whose other end a child process has, or had until it died.
/// - A terminal or the standard input, unless another rank waits for a message.
pub(super) const STORAGE_IO: Rule = Rule {
    cause: Cause::StorageIo,
    explain: storage_io,
    rule_out: |case, culprits| no_culprit_does(case, culprits, Activity::Io, Exclusion::NoIo),
};

/// `storage_io`: a rank holds a file lock that another rank waits for outside of all collectives.
/// Like [`PEER_HOLDER`].
pub(super) const LOCK_HOLDER: Rule = Rule {
    cause: Cause::StorageIo,
    explain: |case, suspect| holds_resource(case, suspect, true),
    rule_out: never_ruled_out,
};

/// `missing_rank`: a rank has the other end of a pipe or a socket that another rank waits for
/// outside of all collectives.
///
/// The main thread of a rank waits for a file lock, a pipe or a socket, and the process of exactly
/// one other rank has that lock or the other end. The wait-for graph continues at that rank. If
/// that rank is dead, stopped or stuck by itself, that is the cause. Otherwise this rule names it,
/// with medium confidence: it is somewhere else, or it is in a collective that waits for the rank
/// that it holds up (it kept a lock, or did not send what was due).
pub(super) const PEER_HOLDER: Rule = Rule {
    cause: Cause::MissingRank,
    explain: |case, suspect| holds_resource(case, suspect, false),
    rule_out: never_ruled_out,
};

/// `host_lock`: others wait for a rank whose main thread waits for a lock or a condition, of its
/// own process or shared with others.
///
/// In both samples, the innermost native functions of the main thread wait for a mutex, a
/// condition, a semaphore or another thread. It is not a data loader's queue, a wait for the device
/// or the GIL. The holder of the lock is not visible from outside, so the confidence is medium. The
/// sentence names a thread or child process that is stuck in I/O.
///
/// Processes share the locks, semaphores, conditions and barriers of Python's multiprocessing, and
/// these processes may be ranks. A rank in such a lock waits for one of them, so it is not a
/// culprit while another rank stands still elsewhere.
pub(super) const HOST_LOCK: Rule = Rule {
    cause: Cause::HostLock,
    explain: host_lock,
    rule_out: |case, culprits| no_culprit_does(case, culprits, Activity::Lock, Exclusion::NoLockWait),
};

fn no_culprit_does(case: &Case<'_>, culprits: &[usize], activity: Activity, exclusion: Exclusion) -> Option<Exclusion> {
    let does_not = |rank_index: &usize| case.view(*rank_index).host.stack && !case.does(*rank_index, activity);
    (!culprits.is_empty() && culprits.iter().all(does_not)).then_some(exclusion)
}

fn gil_deadlock(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.suspect_rank(suspect)?;
    let event = case.main_event(suspect);
    let holder = facts::gil_holder(case.view(rank_index).evidence?)?;
    if !holder.has_waiters() && (event.is_none() || case.does(rank_index, Activity::DeviceWait)) {
        return None;
    }
    let most = if holder.has_waiters() { Confidence::High } else { Confidence::Medium };
    let mut evidence = vec![Fact::Explained];
    evidence.extend(event.map(|event| Fact::Counters { rank_index, event }));
    evidence.push(Fact::Position(rank_index));
    let explanation = Explanation::Host { rank_index, state: HostState::DeadlockedOnGil(holder) };
    let confidence = case.host_confidence(suspect).min(most);
    Some(Finding { culprits: vec![rank_index], explanation, confidence, evidence })
}

fn data_loader(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.host_rank(suspect).filter(|rank_index| case.does(*rank_index, Activity::DataLoader))?;
    let mut evidence = vec![RankFact::WitnessUnlessShown.of(rank_index)];
    evidence.push(RankFact::StuckHelper.of(rank_index));
    evidence.extend(case.main_event(suspect).map(|event| Fact::Counters { rank_index, event }));
    evidence.push(Fact::Position(rank_index));
    let explanation = Explanation::Host { rank_index, state: HostState::WaitsForLoader };
    Some(Finding { culprits: vec![rank_index], explanation, confidence: case.host_confidence(suspect), evidence })
}

fn storage_io(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    // A rank that reads from a pipe of its child waits for the child. A rank that reads from a
    // terminal waits for a person; if others wait for it in a collective, that is `missing_rank`.
    let asks = |rank_index: usize| {
        case.at_terminal(rank_index) && matches!(case.main_event(suspect), None | Some(Event::Collective { .. }))
    };
    let beside = |rank_index: usize| case.waits_for_child_by_pipe(rank_index) || asks(rank_index);
    let rank_index =
        case.host_rank(suspect).filter(|rank_index| case.does(*rank_index, Activity::Io) && !beside(*rank_index))?;
    let host = &case.view(rank_index).host;
    if host.moved.is_some_and(|moved| moved.io || moved.own_frame) {
        return None;
    }
    let file_lock = is_file_lock(&host.observed.witness);
    let mut evidence = vec![RankFact::Witness.of(rank_index)];
    evidence.extend(case.main_event(suspect).map(|event| Fact::Counters { rank_index, event }));
    evidence.push(Fact::Position(rank_index));
    let most = if file_lock { Confidence::Medium } else { Confidence::High };
    Some(Finding {
        culprits: vec![rank_index],
        explanation: Explanation::Host { rank_index, state: HostState::StuckInIo { file_lock } },
        confidence: case.host_confidence(suspect).min(most),
        evidence,
    })
}

fn host_lock(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.host_rank(suspect).filter(|rank_index| case.does(*rank_index, Activity::Lock))?;
    let host = &case.view(rank_index).host;
    if !host.same_in_both || !host.frozen() {
        return None;
    }
    let mut evidence = vec![RankFact::WitnessUnlessShown.of(rank_index)];
    evidence.push(RankFact::StuckHelper.of(rank_index));
    evidence.extend(case.main_event(suspect).map(|event| Fact::Counters { rank_index, event }));
    evidence.push(Fact::Position(rank_index));
    let state = HostState::WaitsForLock { shared: is_shared_lock(&host.observed.witness) };
    Some(Finding {
        culprits: vec![rank_index],
        explanation: Explanation::Host { rank_index, state },
        confidence: case.host_confidence(suspect).min(Confidence::Medium),
        evidence,
    })
}

/// The suspect has a resource that another rank waits for: a file lock, or something else.
fn holds_resource(case: &Case<'_>, suspect: &Suspect, lock: bool) -> Option<Finding> {
    let holder = case.host_rank(suspect)?;
    let waiter = case.graph.resource_waits.iter().find(|wait| wait.holder == holder)?.waiter;
    let awaited = case.awaited(waiter)?;
    if (awaited.kind() == AwaitedKind::Lock) != lock || has_not_entered(case, holder, case.main_event(suspect)) {
        return None;
    }
    let evidence = [RankFact::Awaited.of(waiter), Fact::Position(holder), Fact::Position(waiter)];
    let inside = case.graph.events.iter().find(|event| case.graph.waiters_of(**event).contains(&holder));
    Some(Finding {
        culprits: vec![holder],
        explanation: Explanation::HoldsUp { holder, waiter, inside: inside.copied() },
        confidence: case.host_confidence(suspect).min(Confidence::Medium),
        evidence: evidence.to_vec(),
    })
}

/// Whether the rank has not entered the collective either. That fact says more than the resource.
fn has_not_entered(case: &Case<'_>, rank_index: usize, event: Option<Event>) -> bool {
    let Some(Event::Collective { comm, seq }) = event else { return false };
    match case.comms[comm].member(rank_index) {
        Some(member) => member.launched < seq,
        None => case.comms[comm].silent.contains(&rank_index),
    }
}
