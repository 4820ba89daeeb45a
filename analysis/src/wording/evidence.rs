//! The lines of evidence of a verdict, and the reasons why a cause is ruled out.

use std::collections::HashSet;

use xpu_timer_proto::v1::{Op, OpKind, Operation, Presence};

use super::{
    Number, Ranks, about, awaited_keys, collectives, creations, cycles, detail, hosts, line, processes, transfers,
};
use crate::{
    case::Case,
    explanation::Explanation,
    finding::{EvidenceGap, Exclusion, Fact, Finding, JobFact, RankFact},
    graph::Event,
    store::key_wait,
    text::{communicator, op_name, shape},
    verdict::EvidenceLine,
};

/// Most lines for the facts of the findings.
const MOST_LINES: usize = 40;

/// The lines for the facts of the findings, then those for the facts of the incident, in the order
/// of the facts. An equal line appears once.
pub(crate) fn lines(case: &Case<'_>, findings: &[Finding], of_job: &[JobFact]) -> Vec<EvidenceLine> {
    let mut shown = HashSet::new();
    let mut is_new = |line: &EvidenceLine| shown.insert(line.text.clone());
    let all = findings.iter().flat_map(|finding| finding.evidence.iter().flat_map(|fact| of_fact(case, finding, fact)));
    let mut lines: Vec<EvidenceLine> = all.filter(&mut is_new).take(MOST_LINES).collect();
    lines.extend(of_job.iter().map(|fact| job_line(case, fact)).filter(is_new));
    lines
}

fn of_fact(case: &Case<'_>, finding: &Finding, fact: &Fact) -> Vec<EvidenceLine> {
    match fact {
        Fact::Explained => explained(case, &finding.explanation),
        Fact::Inside(event) => vec![Ranks::of(case, case.graph.waiters_of(*event)).line(case.waiters_in(*event))],
        Fact::Counters { rank_index, event } => Vec::from_iter(counters(case, *rank_index, *event)),
        Fact::Position(rank_index) => position(case, *rank_index),
        Fact::Rank(rank_index, fact) => Vec::from_iter(of_rank(case, *rank_index, fact)),
        Fact::Collective(fact) => vec![collectives::fact_line(case, fact)],
    }
}

/// What an explanation says, in detail.
fn explained(case: &Case<'_>, explanation: &Explanation) -> Vec<EvidenceLine> {
    match explanation {
        Explanation::Host { rank_index, state } => Vec::from_iter(hosts::state_line(case, *rank_index, state)),
        Explanation::GoneAfter { gone, .. } => {
            gone.iter().map(|rank_index| hosts::ended_line(case, *rank_index)).collect()
        }
        Explanation::HoldsUp { .. } | Explanation::HoldEachOther(_) => Vec::new(),
        Explanation::Process(fault) => vec![processes::state_line(case, fault)],
        Explanation::ShutDownInstead { differ, .. } => collectives::differ_lines(case, differ),
        Explanation::ShutDownInCycle { others, .. } => {
            others.iter().map(|event| line(case.waiters_in(*event), Vec::new())).collect()
        }
        Explanation::Collective(fault) => collectives::lines(case, fault),
        Explanation::Creation(fault) => creations::lines(case, fault),
        Explanation::Cycle(fault) => Vec::from_iter(cycles::fault_line(case, fault)),
        Explanation::Transfer(fault) => transfers::lines(case, fault),
    }
}

fn of_rank(case: &Case<'_>, rank_index: usize, fact: &RankFact) -> Option<EvidenceLine> {
    let view = case.view(rank_index);
    let witness = case.witness(rank_index);
    let inside = || about(case, rank_index, &format!("is inside {witness}"));
    Some(match fact {
        RankFact::Witness => inside(),
        RankFact::WitnessUnlessShown if is_shown(case, rank_index) => return None,
        RankFact::WitnessUnlessShown => inside(),
        // Another line has the keys that ranks wait for.
        RankFact::Awaited if key_wait(view).is_some() => return None,
        RankFact::StuckHelper => detail(case, rank_index, &case.helper_text(rank_index)?),
        RankFact::Awaited => line(
            format!("a system call of rank {} waits for {}", view.rank, case.awaited_text(rank_index)?),
            vec![view.rank],
        ),
        RankFact::Polls => {
            about(case, rank_index, "polls and sleeps between the polls, so it may wait for another rank")
        }
        RankFact::EndedAfterLaunch => about(
            case,
            rank_index,
            "had launched that collective and exited normally before it was seen to complete, so it may have skipped it",
        ),
        RankFact::AbortedByGloo => line(
            format!("gloo aborted rank {} in it, as it does when more bytes arrive than fit", view.rank),
            vec![view.rank],
        ),
        RankFact::NotStarted { op, seq } => {
            let name = op_name(*op);
            about(case, rank_index, &format!("has launched {name} {seq}, and its device has not started it"))
        }
        RankFact::WaitsForDevice => {
            let text = format!("waits for its device in {witness}, and none of its collectives is pending");
            about(case, rank_index, &text)
        }
        RankFact::StaleWatcher => {
            let text = "its watcher thread has not run for a while, so its flight record may be out of date";
            detail(case, rank_index, text)
        }
        RankFact::HostMakesProgress => {
            detail(case, rank_index, "its host thread makes progress, so its device may only be slow")
        }
        RankFact::NotInCreation(event) => {
            line(format!("{}; rank {} is not", case.waiters_in(*event), view.rank), vec![view.rank])
        }
        RankFact::LeftPattern(deviation) => cycles::left_pattern_line(case, rank_index, deviation),
    })
}

/// Whether the line about the position of a rank shows the frame that classifies its main thread.
fn is_shown(case: &Case<'_>, rank_index: usize) -> bool {
    let host = &case.view(rank_index).host;
    let frame = host.location.python_function.as_deref().zip(host.location.python.as_deref());
    frame.is_some_and(|(function, place)| {
        let file = place.rsplit_once('/').map_or(place, |(_, file)| file);
        host.observed.witness == format!("{function} ({file})")
    })
}

/// The place of a rank and its progress between the samples.
fn position(case: &Case<'_>, rank_index: usize) -> Vec<EvidenceLine> {
    let view = case.view(rank_index);
    let mut lines = Vec::new();
    let host = &view.host;
    if let Some(python) = &host.location.python {
        let function = host.location.python_function.as_deref().unwrap_or("?");
        let samples = match (host.moved, host.same_in_both) {
            (None, _) => " (one sample)",
            (Some(moved), _) if moved.own_frame => " in the last sample, and in another frame in the first",
            (Some(_), true) => " in both samples",
            (Some(_), false) => "",
        };
        lines.push(about(case, rank_index, &format!("is in {function} at {python}{samples}")));
    }
    lines.extend(of_rank(case, rank_index, &RankFact::Awaited));
    if let Some(native) = &host.location.native {
        lines.push(about(case, rank_index, &format!("is in C function {native}")));
    }
    if let Some(moved) = host.moved {
        let share = moved.cpu_share * 100.0;
        let bytes = moved.io_bytes;
        let text = format!("used {share:.0} % of a core and read or wrote {bytes} bytes between the samples");
        lines.push(about(case, rank_index, &text));
    }
    lines.extend(named_call(case, rank_index));
    if !host.stack {
        let why = view.evidence.map(|evidence| evidence.errors.join("; ")).filter(|why| !why.is_empty());
        let why = why.map_or(String::new(), |why| format!(": {why}"));
        let what = match view.presence {
            Presence::Missing => "data from",
            _ => "stack of",
        };
        lines.push(line(format!("there is no {what} rank {}{why}", view.rank), vec![view.rank]));
    }
    lines
}

/// The call of a library, known by its name only, in which a thread of a rank is.
fn named_call(case: &Case<'_>, rank_index: usize) -> Option<EvidenceLine> {
    let view = case.view(rank_index);
    let is_named = |operation: &&Operation| {
        operation.kind() == OpKind::HostCall
            && operation.op() == Op::Unspecified
            && operation.store_keys.is_empty()
            && !operation.function.is_empty()
    };
    let call = view.pending().filter(|_| !view.dead()).find(is_named)?;
    let seconds = view.flight?.read_ns.saturating_sub(call.entered_ns) / 1_000_000_000;
    Some(about(case, rank_index, &format!("has been in a call of {} for {seconds} s", call.function)))
}

/// The counters of a rank beside those of the ranks inside a collective. `None` for other events.
fn counters(case: &Case<'_>, rank_index: usize, event: Event) -> Option<EvidenceLine> {
    let Event::Collective { comm, seq } = event else { return None };
    if case.comms[comm].kernel.is_some() {
        return collectives::kernel_launches_line(case, rank_index, event);
    }
    let rank = case.view(rank_index).rank;
    let id = communicator(case.comms[comm].id);
    let inside = Ranks::of(case, case.graph.waiters_of(event));
    let others = match inside.0.len() {
        0 => String::new(),
        _ => format!("; {} {} in collective {seq}", inside.text(), inside.number().is()),
    };
    let text = match case.comms[comm].member(rank_index) {
        Some(member) => format!(
            "rank {rank} launched {}, started {} and completed {} collectives on communicator {id}{others}",
            member.launched, member.started, member.completed
        ),
        None => format!("rank {rank} recorded no collective on communicator {id}{others}"),
    };
    Some(line(text, vec![rank]))
}

/// The line about a fact of the incident or its evidence as a whole.
fn job_line(case: &Case<'_>, fact: &JobFact) -> EvidenceLine {
    match fact {
        JobFact::Gap(gap, rank_indices) => gap_line(case, *gap, rank_indices),
        JobFact::SignalledFirst { rank, operation } => signalled_first(*rank, operation),
        JobFact::AsyncError { communicator: id, error, reported_to } => {
            let text = format!(
                "{} {} of communicator {}",
                reported(&Ranks::of(case, reported_to)),
                error_name(*error),
                communicator(*id)
            );
            Ranks::of(case, reported_to).line(text)
        }
        JobFact::Fails { rank_indices, failure } => {
            let who = Ranks::of(case, rank_indices);
            let text = hosts::failure_text(&who, failure);
            who.line(text)
        }
        JobFact::WaitsForKeys { waiters, call } => waits_for_keys(case, waiters, call),
        JobFact::YoungerThanTimeout { oldest_ns, timeout_ns } => line(
            format!(
                "the oldest operation has been pending for {} s, less than the hang timeout of {} s",
                oldest_ns / 1_000_000_000,
                timeout_ns / 1_000_000_000
            ),
            Vec::new(),
        ),
    }
}

fn gap_line(case: &Case<'_>, gap: EvidenceGap, rank_indices: &[usize]) -> EvidenceLine {
    let who = Ranks::of(case, rank_indices);
    let (ranks, number) = (who.text(), who.number());
    let text = match gap {
        EvidenceGap::Unseen => format!("there is no data from {ranks}"),
        EvidenceGap::NoStack => format!("there is no stack of {ranks}"),
        EvidenceGap::NoFlightRecord => format!("there is no flight record of {ranks}"),
        EvidenceGap::LostOperations => {
            format!("{} of {ranks} lost operations", number.word("the flight record", "the flight records"))
        }
        EvidenceGap::StuckWatcher => {
            let watchers = number.word("the watcher thread", "the watcher threads");
            format!("{watchers} of {ranks} {} stuck inside a driver call", number.is())
        }
    };
    who.line(text)
}

/// `NCCL reported to ranks 0-1`.
fn reported(ranks: &Ranks) -> String {
    format!("NCCL reported to {} the asynchronous error", ranks.text())
}

/// The name of an `ncclResult_t`, with its number.
fn error_name(error: u32) -> String {
    const NAMES: [&str; 7] = [
        "success",
        "unhandled CUDA error",
        "system error",
        "internal error",
        "invalid argument",
        "invalid usage",
        "remote error",
    ];
    match NAMES.get(error as usize) {
        Some(name) => format!("{error} ({name})"),
        None => error.to_string(),
    }
}

/// The keys that ranks wait for in a store.
fn waits_for_keys(case: &Case<'_>, waiters: &[usize], call: &Operation) -> EvidenceLine {
    let who = Ranks::of(case, waiters);
    let text = format!("{} {} for {} in {}", who.text(), who.number().waits(), awaited_keys(call), call.function);
    who.line(text)
}

/// The operation that opened the incident.
fn signalled_first(rank: u32, operation: &Operation) -> EvidenceLine {
    let of_comm = match operation.communicator {
        0 => String::new(),
        id => format!(", number {} of communicator {}", operation.seq, communicator(id)),
    };
    line(format!("rank {rank} reported the first timeout: {}{of_comm}", shape(operation)), vec![rank])
}

/// The reason why the evidence excludes a cause.
pub(crate) fn reason(case: &Case<'_>, exclusion: Exclusion, culprits: &[usize]) -> String {
    let who = || Ranks::of(case, culprits);
    let main_thread_does_not = |what: &str| {
        let number = Number::of(who().0.len());
        let threads = number.word("the main thread", "the main threads");
        format!("{threads} of {} {} not {what}", who().text(), number.does())
    };
    match exclusion {
        Exclusion::OperationsAgree => {
            "all ranks that wait in one collective of a communicator run the same operation".to_owned()
        }
        Exclusion::AllAlive => match case.world.views.len() {
            1 => "the process of the only rank is alive".to_owned(),
            ranks => format!("the processes of all {ranks} ranks are alive"),
        },
        Exclusion::NoProcessStopped => "no process is stopped or frozen".to_owned(),
        Exclusion::NoUninterruptibleSleep => {
            format!("no thread of {} sleeps uninterruptibly (state D) in both samples", who().text())
        }
        Exclusion::NoGilWait => main_thread_does_not("wait for the GIL"),
        Exclusion::NoLoaderWait => main_thread_does_not("wait for a data loader"),
        Exclusion::NoIo => main_thread_does_not("read, write or sync"),
        Exclusion::NoLockWait => main_thread_does_not("wait for a lock"),
        Exclusion::NoProgress => format!(
            "between the two samples, {} reached no other line, used little CPU time and moved few bytes",
            who().text()
        ),
        Exclusion::AllEntered(event) => format!("all ranks have entered {}", case.describe(event)),
        Exclusion::NoDeviceBlocked => {
            "no kernel or other device work keeps a launched collective from starting".to_owned()
        }
        Exclusion::IsBehind(rank_index) => {
            format!("rank {} has not started the operation that the others wait in", case.view(rank_index).rank)
        }
    }
}
