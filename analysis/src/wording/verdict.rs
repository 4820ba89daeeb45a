//! The sentence of a verdict: from its findings, or without any. Also the lines about what is
//! missing in the evidence.

use xpu_timer_proto::v1::Operation;

use super::{Number, Ranks, Statement, collectives, creations, cycles, hosts, line, transfers};
use crate::{
    case::Case,
    explanation::Explanation,
    graph::{Event, Suspect},
    text::{capital, communicator, shape},
    verdict::EvidenceLine,
};

/// Number of suspects that the sentence spells out. The others are counted.
const MAX_SPELLED: usize = 3;

/// An explanation and the ranks that it is about.
#[derive(Clone, Copy)]
pub(crate) struct Clause<'a> {
    pub explanation: &'a Explanation,
    pub culprits: &'a [usize],
}

/// The text of an explanation.
fn statement(case: &Case<'_>, explanation: &Explanation) -> Statement {
    match explanation {
        Explanation::Host { rank_index, state } => hosts::statement(case, *rank_index, state),
        Explanation::GoneAfter { gone, event } => hosts::gone_after(case, gone, *event),
        Explanation::HoldsUp { holder, waiter, inside } => hosts::holds_up(case, *holder, *waiter, *inside),
        Explanation::ShutDownInstead { culprits, differ } => hosts::shut_down_instead(case, culprits, differ),
        Explanation::ShutDownInCycle { culprits, others } => hosts::shut_down_in_cycle(case, culprits, others),
        Explanation::Collective(fault) => collectives::statement(case, fault),
        Explanation::Creation(fault) => creations::statement(case, fault),
        Explanation::Cycle(fault) => cycles::statement(case, fault),
        Explanation::Transfer(fault) => transfers::statement(case, fault),
    }
}

fn spelled(case: &Case<'_>, statement: &Statement, culprits: &[usize]) -> String {
    let who = Ranks::of(case, culprits);
    match (statement, who.number()) {
        (Statement::OfRanks { one, .. }, Number::One) => format!("{} {one}", who.text()),
        (Statement::OfRanks { many, .. }, Number::Many) => format!("{} {many}", who.text()),
        (Statement::Sentence(sentence), _) => sentence.trim_end_matches('.').to_owned(),
    }
}

/// The clauses of equal statements, each about all of their ranks.
fn predicates(case: &Case<'_>, clauses: &[Clause<'_>]) -> Vec<String> {
    let mut spelled_out: Vec<(Statement, Vec<usize>)> = Vec::new();
    for clause in clauses {
        let statement = statement(case, clause.explanation);
        match spelled_out.iter().position(|(known, _)| *known == statement) {
            Some(index) => spelled_out[index].1.extend(clause.culprits),
            None if spelled_out.len() < MAX_SPELLED => spelled_out.push((statement, clause.culprits.to_vec())),
            None => {}
        }
    }
    let mut parts: Vec<String> =
        spelled_out.iter().map(|(statement, culprits)| spelled(case, statement, culprits)).collect();
    let counted: usize = spelled_out.iter().map(|(_, culprits)| culprits.len()).sum();
    let all: usize = clauses.iter().map(|clause| clause.culprits.len()).sum();
    if counted < all {
        parts.push(match all - counted {
            1 => "1 more rank is a culprit too".to_owned(),
            more => format!("{more} more ranks are culprits too"),
        });
    }
    parts
}

/// The sentence of a verdict: the clauses of the first rule, the ranks that wait for `main` among
/// its suspects, and the clauses of the other rules. `culprits` are those of all clauses.
pub(crate) fn explained(
    case: &Case<'_>,
    primary: &[Clause<'_>],
    others: &[Clause<'_>],
    main: Option<&Suspect>,
    culprits: &[usize],
) -> String {
    let first = statement(case, primary[0].explanation);
    let is_sentence = matches!(first, Statement::Sentence(_));
    let mut text =
        if is_sentence { spelled(case, &first, primary[0].culprits) } else { predicates(case, primary).join("; ") };
    if let Some(main) = main.filter(|_| !is_sentence) {
        let waits = case.waiters_clause(main, culprits, &text);
        text.push_str(&waits);
    }
    for clause in others.iter().take(MAX_SPELLED) {
        text.push_str("; also ");
        text.push_str(&spelled(case, &statement(case, clause.explanation), clause.culprits));
    }
    text.push('.');
    capital(&text)
}

/// The sentence about ranks that are stuck in one way, extended: they are all ranks of the job.
pub(crate) fn no_rank_differs(sentence: &str) -> String {
    format!(
        "{}; all ranks of the job are in this state, so no rank is the culprit: check what they wait for.",
        sentence.trim_end_matches('.')
    )
}

/// Why a job does not hang.
pub(crate) enum HealthyReason<'a> {
    AllLaunchedRecently,
    EveryRankMoves,
    NothingPending,
    /// These ranks have left in order.
    Left(&'a [usize]),
}

pub(crate) fn no_hang(case: &Case<'_>, why: &HealthyReason<'_>) -> String {
    let why = match why {
        HealthyReason::AllLaunchedRecently => "every pending operation was launched recently".to_owned(),
        HealthyReason::EveryRankMoves => "no operation is pending, and every rank makes progress".to_owned(),
        HealthyReason::NothingPending => "no operation is pending on any rank".to_owned(),
        HealthyReason::Left(ranks) => {
            format!("no operation is pending, and {} exited normally", Ranks::of(case, ranks).text())
        }
    };
    format!("No hang is visible: {why}.")
}

/// All ranks do nothing. `together` if they are at one place.
pub(crate) fn may_be_idle(case: &Case<'_>, together: bool) -> String {
    let state = if together {
        format!("all {} ranks are{}", case.world.views.len(), case.place(0))
    } else {
        "every rank sleeps, or waits for a message, user input or a signal".to_owned()
    };
    format!("No operation is pending on any device, and {state}; the job may be idle.")
}

/// What is known of a job whose stop no rule explains.
pub(crate) enum KnownFacts<'a> {
    NoRank,
    NoStack,
    /// Nothing is pending, and all ranks are at one place.
    Together,
    /// Nothing is pending, and this many ranks have stacks.
    Stacks(usize),
    /// Operations are pending.
    Pending {
        /// The event in which most ranks wait.
        busiest: Option<Event>,
        /// The ranks of which nothing is known.
        unseen: &'a [usize],
    },
}

pub(crate) fn unexplained(case: &Case<'_>, known: &KnownFacts<'_>) -> String {
    let all = case.world.views.len();
    let known = match known {
        KnownFacts::NoRank => "there is no data from any rank".to_owned(),
        KnownFacts::NoStack => "there is no stack of any rank, and no record of a pending operation".to_owned(),
        KnownFacts::Together => {
            format!("no operation is pending on any rank, and all {all} ranks are{}", case.place(0))
        }
        KnownFacts::Stacks(stacks) => {
            format!("no operation is pending on any rank, and {stacks} of {all} ranks have stacks")
        }
        KnownFacts::Pending { busiest, unseen } => {
            let whom = match unseen.len() {
                0 => "no rank is known to hold them up".to_owned(),
                _ => {
                    let unseen = Ranks::of(case, unseen);
                    format!("the reason lies with {}, from which there is no data", unseen.text())
                }
            };
            let waits = busiest.map_or("operations are pending".to_owned(), |event| {
                let inside = Ranks::of(case, case.graph.waiters_of(event));
                format!("{} {} in {}", inside.text(), inside.number().waits(), case.describe(event))
            });
            format!("{waits}, and {whom}")
        }
    };
    format!("The reason why the job stopped is unknown: {known}.")
}

/// What is missing in the evidence about some ranks.
#[derive(Clone, Copy)]
pub(crate) enum EvidenceGap {
    Unseen,
    NoStack,
    NoFlightRecord,
    LostOperations,
    StuckWatcher,
}

pub(crate) fn gap_line(case: &Case<'_>, gap: EvidenceGap, rank_indices: &[usize]) -> EvidenceLine {
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

/// The operation that opened the incident.
pub(crate) fn signalled_first_line(rank: u32, operation: &Operation) -> EvidenceLine {
    let of_comm = match operation.communicator {
        0 => String::new(),
        id => format!(", number {} of communicator {}", operation.seq, communicator(id)),
    };
    line(format!("rank {rank} reported the first timeout: {}{of_comm}", shape(operation)), vec![rank])
}

/// The age of the oldest pending operation is below the hang timeout.
pub(crate) fn younger_than_timeout_line(oldest_ns: u64, timeout_ns: u64) -> EvidenceLine {
    let text = format!(
        "the oldest operation has been pending for {} s, less than the hang timeout of {} s",
        oldest_ns / 1_000_000_000,
        timeout_ns / 1_000_000_000
    );
    line(text, Vec::new())
}
