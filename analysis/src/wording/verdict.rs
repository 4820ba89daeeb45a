//! The sentence of a verdict: from its findings, or without any.

use std::collections::HashSet;

use super::{Number, Ranks, Statement, collectives, creations, cycles, hosts, processes, transfers};
use crate::{
    case::Case,
    explanation::Explanation,
    finding::{Conclusion, Finding, HealthyReason, KnownFacts},
    graph::{ProcessWait, Suspect},
    text::capital,
};

/// Number of suspects that the sentence spells out. The others are counted.
const MAX_SPELLED: usize = 3;

/// The sentence that says what the judge concludes. `main` is the suspect whose waiters it names,
/// and `culprits` are those of the verdict.
pub(crate) fn sentence(case: &Case<'_>, conclusion: &Conclusion, main: Option<&Suspect>, culprits: &[usize]) -> String {
    match conclusion {
        Conclusion::Explained { findings, primary } => {
            let (primary, others) = findings.split_at(*primary);
            let mut text = explained(case, primary, others, main, culprits);
            for rank_index in conclusion.ranks_that_wait().difference(&conclusion.ranks_in_cycles()).take(MAX_SPELLED) {
                text.push_str(&processes::behind_clause(case, *rank_index, &text));
            }
            capital(&text) + "."
        }
        Conclusion::AllStuckAlike(findings) => no_rank_differs(&capital(&explained(case, findings, &[], None, &[]))),
        Conclusion::NoHang(why) => no_hang(case, why),
        Conclusion::MayBeIdle { together } => may_be_idle(case, *together),
        Conclusion::Unexplained(known) => unexplained(case, known),
    }
}

/// The text of an explanation.
fn statement(case: &Case<'_>, explanation: &Explanation) -> Statement {
    match explanation {
        Explanation::Host { rank_index, state } => hosts::statement(case, *rank_index, state),
        Explanation::GoneAfter { gone, event } => hosts::gone_after(case, gone, *event),
        Explanation::HoldsUp { holder, waiter, inside } => hosts::holds_up(case, *holder, *waiter, *inside),
        Explanation::ShutDownInstead { culprits, differ } => hosts::shut_down_instead(case, culprits, differ),
        Explanation::ShutDownInCycle { culprits, others } => hosts::shut_down_in_cycle(case, culprits, others),
        Explanation::HoldEachOther(cycle) => hosts::hold_each_other(case, cycle),
        Explanation::Process(fault) => processes::statement(case, fault),
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

/// The clauses of findings, one for all findings with equal statements.
fn predicates(case: &Case<'_>, findings: &[Finding]) -> Vec<String> {
    let mut spelled_out: Vec<(Statement, Vec<usize>)> = Vec::new();
    for finding in findings {
        let statement = statement(case, &finding.explanation);
        match spelled_out.iter().position(|(known, _)| *known == statement) {
            Some(index) => spelled_out[index].1.extend(&finding.culprits),
            None if spelled_out.len() < MAX_SPELLED => spelled_out.push((statement, finding.culprits.clone())),
            None => {}
        }
    }
    let mut parts: Vec<String> =
        spelled_out.iter().map(|(statement, culprits)| spelled(case, statement, culprits)).collect();
    let counted: usize = spelled_out.iter().map(|(_, culprits)| culprits.len()).sum();
    let all: usize = findings.iter().map(|finding| finding.culprits.len()).sum();
    if counted < all {
        parts.push(match all - counted {
            1 => "1 more rank is a culprit too".to_owned(),
            more => format!("{more} more ranks are culprits too"),
        });
    }
    parts
}

/// The different sentences of findings, joined. All ranks that wait for one process have one
/// sentence.
fn sentences(case: &Case<'_>, findings: &[Finding]) -> String {
    let mut sentences: Vec<String> = Vec::new();
    let mut processes = HashSet::new();
    let is_new = |finding: &&Finding| match &finding.explanation {
        Explanation::Process(fault) => processes.insert(fault.end),
        _ => true,
    };
    for finding in findings.iter().filter(is_new) {
        let sentence = spelled(case, &statement(case, &finding.explanation), &finding.culprits);
        if !sentences.contains(&sentence) && sentences.len() < MAX_SPELLED {
            sentences.push(sentence);
        }
    }
    sentences.join("; also ")
}

/// The clauses of findings: those of the first rule, the ranks that wait for `main` among
/// its suspects, and the clauses of the other rules. `culprits` are those of all findings.
fn explained(
    case: &Case<'_>,
    primary: &[Finding],
    others: &[Finding],
    main: Option<&Suspect>,
    culprits: &[usize],
) -> String {
    let first = statement(case, &primary[0].explanation);
    let is_sentence = matches!(first, Statement::Sentence(_));
    let mut text = if is_sentence { sentences(case, primary) } else { predicates(case, primary).join("; ") };
    if let Some(main) = main.filter(|_| !is_sentence) {
        let waits = case.waiters_clause(main, culprits, &text);
        text.push_str(&waits);
    }
    for finding in others.iter().take(MAX_SPELLED) {
        text.push_str("; also ");
        text.push_str(&spelled(case, &statement(case, &finding.explanation), &finding.culprits));
    }
    text
}

/// The sentence about ranks that are stuck in one way, extended: they are all ranks of the job.
fn no_rank_differs(sentence: &str) -> String {
    format!("{sentence}; all ranks of the job are in this state, so no rank is the culprit: check what they wait for.")
}

fn no_hang(case: &Case<'_>, why: &HealthyReason) -> String {
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
fn may_be_idle(case: &Case<'_>, together: bool) -> String {
    let server_of = |rank_index| {
        let at_rest = case.graph.server_at_rest(rank_index);
        at_rest.or_else(|| case.graph.process_wait(rank_index).map(ProcessWait::end))
    };
    let servers: Vec<Option<usize>> = (0..case.world.views.len()).map(server_of).collect();
    let server = servers.first().copied().flatten().filter(|only| servers.iter().all(|server| *server == Some(*only)));
    let waits = server.map_or(String::new(), |server| {
        let they = if servers.len() == 1 { "it waits" } else { "they wait" };
        format!("; {they} for {}", processes::at_rest(case, server))
    });
    let state = if together {
        format!("all {} ranks are{}", case.world.views.len(), case.place(0))
    } else {
        "every rank sleeps, or waits for a message, user input or a signal".to_owned()
    };
    format!("No operation is pending on any device, and {state}{waits}; the job may be idle.")
}

fn unexplained(case: &Case<'_>, known: &KnownFacts) -> String {
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
