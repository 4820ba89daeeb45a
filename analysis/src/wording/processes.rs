//! A process that is not a rank holds up ranks.

use xpu_timer_proto::server::AwaitedKind;

use super::{Number, Ranks, Statement, hosts, phrases};
use crate::{
    case::{Behind, Case, Position},
    explanation::ProcessFault,
    graph::{Mutual, MutualFault},
    stacks::{self, NO_OTHER_THREAD, Polling, ProcessState},
    text,
    verdict::EvidenceLine,
};

fn name(case: &Case<'_>, process: usize) -> String {
    let host = &case.world.processes[process].host;
    text::process_name(host.pid, &host.command)
}

/// A server for which ranks wait, with its place, as an object: `process 7 (python3 ps.py), which
/// is at …`.
pub(super) fn at_rest(case: &Case<'_>, server: usize) -> String {
    let process = &case.world.processes[server];
    let other = process.other_thread.as_deref().filter(|other| *other != NO_OTHER_THREAD);
    let place = phrases::place(Position::of(&process.host.location));
    let beside = other.map_or(String::new(), |other| hosts::beside_lock(other, Number::One));
    let is = if place.is_empty() { String::new() } else { format!(", which is{place}{beside}") };
    name(case, server) + &is
}

/// The state of a process as a predicate: `is stopped by a signal`.
fn predicate(case: &Case<'_>, process: usize, state: &ProcessState) -> String {
    let host = &case.world.processes[process].host;
    let place = phrases::place(Position::of(&host.location));
    match state {
        // `X (killed by SIGKILL)`, if it is known how it ended.
        ProcessState::Ended => match host.state.strip_prefix("X (").and_then(|state| state.strip_suffix(')')) {
            Some(exit) if exit != "dead" => format!("is dead ({exit})"),
            _ => "is dead".to_owned(),
        },
        ProcessState::Stopped => format!("is stopped (state {}){place}", host.state),
        ProcessState::SleepsUninterruptibly { wchan } => {
            format!("sleeps uninterruptibly{}{place}", hosts::kernel_function(wchan))
        }
        ProcessState::DeadlockedOnGil(holder) => format!("is {}", hosts::gil_held(holder)),
        ProcessState::LostRequest { place } => {
            format!("never ends a request: its thread at {place} waits for an object to which no other thread refers")
        }
        ProcessState::MakesProgress => format!("is busy and makes progress{place}"),
        ProcessState::WaitsForLock => {
            let lock = case.lock_text(process);
            let is_own = lock.is_none() || host.awaited.as_ref().is_some_and(|one| one.kind() == AwaitedKind::Mutex);
            let other = case.world.processes[process].other_thread.as_deref().filter(|_| is_own);
            let beside = other.map_or(String::new(), |other| hosts::beside_lock(other, Number::One));
            format!("waits for {}{place}{beside}", lock.as_deref().unwrap_or("a lock"))
        }
        ProcessState::StuckInIo => match host.awaited.as_ref().filter(|awaited| !awaited.name.is_empty()) {
            Some(awaited) => format!("is stuck in I/O on {}{place}", stacks::base_name(&awaited.name)),
            None => format!("is stuck in I/O{place}"),
        },
        ProcessState::Elsewhere if host.waits_for_itself() => format!("waits for an answer from itself{place}"),
        ProcessState::Elsewhere => format!("does not answer; it is{place}"),
    }
}

/// The clause about the process of its own that is behind a rank, if the sentence so far does not
/// say where it is: `; process 4242 is at train.py:7 in load`. Empty if there is none.
pub(super) fn behind_clause(case: &Case<'_>, rank_index: usize, sentence: &str) -> String {
    let Behind::Process(wait) = case.behind(rank_index) else { return String::new() };
    let process = wait.end();
    let host = &case.world.processes[process].host;
    let position = Position::of(&host.location);
    let pid = format!("process {}", host.pid);
    let is_named = [pid.clone(), text::capital(&pid)].iter().any(|pid| sentence.contains(&format!("{pid} ")));
    let is_implied = match (&wait.state, position.python) {
        (ProcessState::Ended, _) => sentence.contains("is dead"),
        (_, Some((line, _))) => is_named && sentence.contains(line),
        (_, None) => position.is_unknown(),
    };
    if is_implied {
        return String::new();
    }
    let state = match &wait.state {
        ProcessState::Elsewhere => format!("is{}", phrases::place(position)),
        state => predicate(case, process, state),
    };
    if is_named {
        format!("; {pid} {state}")
    } else {
        format!("; the wait ends at {}, which {state}", name(case, process))
    }
}

/// The ranks that wait for a process, as indices.
fn waiters(case: &Case<'_>, end: usize) -> Vec<usize> {
    case.graph.process_waits.iter().filter(|wait| wait.end() == end).map(|wait| wait.waiter).collect()
}

/// The sentence about a process and the ranks that wait for it.
pub(super) fn statement(case: &Case<'_>, fault: &ProcessFault) -> Statement {
    let ProcessFault { rank_index, before, end, state, mutual, is_to_come, event } = fault;
    if *is_to_come {
        return to_come(case, fault);
    }
    let of_rank = case.graph.process_wait(*rank_index).filter(|wait| wait.is_own);
    let what = match of_rank {
        Some(_) => format!("of rank {}", case.view(*rank_index).rank),
        None => "which is not a rank".to_owned(),
    };
    let waiters = waiters(case, *end);
    let who = Ranks::of(case, &waiters);
    let place = case.place(*rank_index);
    let mut sentence = match mutual {
        Some(mutual) => mutual_wait(case, fault, mutual),
        None => {
            let through = before.last().map_or(String::new(), |last| {
                let serves = case.world.processes[*last].host.only_serves() && state_of(case, *last).is_stuck();
                let serves = if serves { ", which keeps locks and queues for both," } else { "" };
                format!(" through {}{serves}", name(case, *last))
            });
            let state = predicate(case, *end, state);
            let it = match () {
                () if shares_lock(case, fault) => "a lock in the memory that they shared",
                () if polls_memory(case, fault) => "a change in the memory that they share",
                () => "it",
            };
            let waiting = format!("{} {} for {it}{through}{place}", who.text(), who.number().waits());
            format!("{}, {what}, {state}; {waiting}", text::capital(&name(case, *end)))
        }
    };
    if let Some(event) = event {
        let inside = case.graph.waiters_of(*event).iter().copied();
        let others: Vec<usize> = inside.filter(|index| !waiters.contains(index)).collect();
        let others = Ranks::of(case, &others);
        let verb = others.number().waits();
        sentence.push_str(&format!("; {} {verb} for {} in {}", others.text(), who.text(), case.describe(*event)));
    }
    Statement::Sentence(sentence)
}

fn state_of(case: &Case<'_>, process: usize) -> ProcessState {
    let process = &case.world.processes[process];
    ProcessState::of(&process.host, process.gil_holder.as_ref())
}

/// Whether a rank waits for a lock in the memory that it had in common with an ended process.
fn shares_lock(case: &Case<'_>, fault: &ProcessFault) -> bool {
    let shared = &case.world.processes[fault.end].shared_memory_with;
    let in_memory = case.awaited(fault.rank_index).is_some_and(|one| one.kind() == AwaitedKind::SharedMemory);
    in_memory && case.view(fault.rank_index).pid().is_some_and(|pid| shared.contains(&pid))
}

/// Whether a rank polls the memory that it has in common with the process at the end.
fn polls_memory(case: &Case<'_>, fault: &ProcessFault) -> bool {
    let host = &case.view(fault.rank_index).host;
    let end = case.world.processes[fault.end].host.pid;
    let shares = |polling: &Polling| polling.sharers.iter().any(|holder| holder.pid == end);
    host.awaited.is_none() && host.polling.as_ref().is_some_and(shares)
}

/// The sentence about a process that should become a missing rank, or start it.
fn to_come(case: &Case<'_>, fault: &ProcessFault) -> Statement {
    let process = text::capital(&name(case, fault.end));
    let state = predicate(case, fault.end, &fault.state);
    let rank = case.view(fault.rank_index).rank;
    let mut sentence =
        format!("{process}, which belongs to the job and is not yet a rank, {state}; rank {rank} is missing");
    if let Some(event) = fault.event {
        let inside = Ranks::of(case, case.graph.waiters_of(event));
        let verb = inside.number().waits();
        sentence.push_str(&format!(", and {} {verb} for it in {}", inside.text(), case.describe(event)));
    }
    Statement::Sentence(sentence)
}

/// The members of a cycle, with their places: `Rank 1 at a.py:7 in send and process 4242 (serve)
/// at b.py:9 in reply wait for each other`.
fn mutual_wait(case: &Case<'_>, fault: &ProcessFault, mutual: &Mutual) -> String {
    let rank = case.view(fault.rank_index).rank;
    let rank_text = format!("rank {rank}{}", case.place(fault.rank_index));
    let process = |index: &usize| {
        let place = phrases::place(Position::of(&case.world.processes[*index].host.location));
        format!("{}{place}", name(case, *index))
    };
    let in_rank = mutual.rank.then_some(rank_text.clone());
    let members: Vec<String> = in_rank.into_iter().chain(mutual.processes.iter().map(process)).collect();
    if mutual.fault == MutualFault::LeavesUnread {
        return unread(case, fault, mutual, &members);
    }
    if let MutualFault::KeepsLock { through } = mutual.fault {
        return keeps_lock(case, fault, mutual, through);
    }
    if let [only] = &members[..] {
        let child = fault.before.first().filter(|_| mutual.rank).unwrap_or(&fault.end);
        return format!("{} waits for the end of {}, which waits for it", text::capital(only), name(case, *child));
    }
    let mut sentence = format!("{} wait for each other", text::capital(&members.join(" and ")));
    if !mutual.rank {
        sentence.push_str(&format!("; {rank_text} waits for them"));
    }
    sentence
}

/// The sentence about the member of a cycle that does not receive what another member sends:
/// `Rank 1 at a.py:7 in ask waits for process 4242 (simulate), which sends to it at b.py:9 in warn;
/// it does not receive that`.
fn unread(case: &Case<'_>, fault: &ProcessFault, mutual: &Mutual, blamed: &[String]) -> String {
    let all = fault.before.iter().chain([&fault.end]);
    let sender = all.copied().find(|index| !mutual.processes.contains(index));
    let sends = sender.map_or_else(String::new, |index| {
        let place = phrases::place(Position::of(&case.world.processes[index].host.location));
        format!(" waits for {}, which sends to it{place}; it does not receive that", name(case, index))
    });
    format!("{}{sends}", text::capital(&blamed.join(" and ")))
}

/// The sentence about a process that keeps a lock while it waits for the rank that wants the lock:
/// `Process 4242 (agent) holds the lock on gpu.lease and waits at b.py:9 in renew for process 4241
/// (front), which waits for rank 0; rank 1 waits for the lock at a.py:7 in take_lease`.
fn keeps_lock(case: &Case<'_>, fault: &ProcessFault, mutual: &Mutual, through: usize) -> String {
    let Some(holder) = mutual.processes.first() else { return String::new() };
    let all: Vec<usize> = fault.before.iter().chain([&fault.end]).copied().collect();
    let position = all.iter().position(|index| index == holder).unwrap_or(0);
    let waiter = position.checked_sub(1).map(|before| all[before]);
    let behind: Vec<String> = all[position + 1..].iter().map(|index| name(case, *index)).collect();
    let rank = |rank_index: usize| format!("rank {}", case.view(rank_index).rank);
    let chain = behind.into_iter().chain([rank(through)]).collect::<Vec<_>>().join(", which waits for ");
    let lock = case.kept_lock_text(waiter, fault.rank_index);
    let place = phrases::place(Position::of(&case.world.processes[*holder].host.location));
    let (wants, place_of_rank) = (rank(fault.rank_index), case.place(fault.rank_index));
    let wants = match waiter {
        Some(process) => format!("{wants} waits for {}{place_of_rank}, which waits for the lock", name(case, process)),
        None => format!("{wants} waits for the lock{place_of_rank}"),
    };
    format!("{} holds {lock} and waits{place} for {chain}; {wants}", text::capital(&name(case, *holder)))
}

/// The line of evidence about a process.
pub(super) fn state_line(case: &Case<'_>, fault: &ProcessFault) -> EvidenceLine {
    let waiters = Ranks::of(case, &waiters(case, fault.end));
    let state = predicate(case, fault.end, &fault.state);
    let whose = if fault.is_to_come {
        "which belongs to the job".to_owned()
    } else {
        format!("for which {} {}", waiters.text(), waiters.number().waits())
    };
    let keeps = fault.mutual.as_ref().filter(|mutual| matches!(mutual.fault, MutualFault::KeepsLock { .. }));
    if let Some(locker) = keeps.and_then(|mutual| mutual.processes.first()) {
        let place = |index: usize| phrases::place(Position::of(&case.world.processes[index].host.location));
        let behind = fault.before.iter().chain([&fault.end]).skip_while(|index| *index != locker).skip(1);
        let behind = behind.map(|index| format!(", {} is{}", name(case, *index), place(*index)));
        let behind: String = behind.collect();
        return waiters.line(format!("{} is{}{behind}", name(case, *locker), place(*locker)));
    }
    waiters.line(format!("{}, {whose}, {state}", name(case, fault.end)))
}
