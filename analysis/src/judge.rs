//! From evidence to a verdict: matches the collectives, builds the wait-for graph, lets the rules
//! explain the suspects, and combines the findings into one sentence.

use std::collections::{BTreeMap, BTreeSet};

use xpu_timer_proto::v1::{Evidence, OpKind, Presence, TriggerKind};

use crate::{
    alias,
    causes::{Case, Finding, Number, RULES, Rule, Statement, alone_in, ended_by_agent, ended_by_signal, line},
    graph::Suspect,
    hang, report,
    text::{capital, ranks, shape},
    verdict::{Activity, Cause, Confidence, EvidenceLine, FORMAT, RuledOut, Timing, Verdict},
    world::{RankView, is_collective},
};

/// Number of suspects that the sentence spells out. The others are counted.
const MAX_SPELLED: usize = 3;
/// Maximum number of facts. The facts about the first culprits come first.
const MAX_EVIDENCE: usize = 40;

/// Judges one incident: who stopped the job, where, and why.
///
/// Pure and deterministic: the same evidence gives the same verdict, byte for byte.
/// [`Verdict::timing`] keeps its default, because only the collector knows it.
#[must_use]
pub fn judge(evidence: &Evidence) -> Verdict {
    let evidence = alias::resolved(evidence);
    let mut case = Case::of(&evidence);
    let outcome = if all_launched_recently(&case) {
        not_a_hang("every operation that is pending was launched a moment ago".to_owned(), Confidence::Medium)
    } else {
        if case.graph.events.is_empty() {
            let mut suspects: Vec<Suspect> = suspects_without_events(&mut case)
                .into_iter()
                .map(|suspect| follow_to_holder(&case, suspect))
                .collect();
            suspects.dedup();
            case.graph.suspects = suspects;
        }
        conclude(&case)
    };
    write_verdict(&case, outcome)
}

/// The conclusion, before it becomes a [`Verdict`].
struct Outcome {
    cause: Cause,
    culprits: Vec<usize>,
    confidence: Confidence,
    sentence: String,
    evidence: Vec<EvidenceLine>,
    main: Option<Suspect>,
}

fn not_a_hang(why: String, confidence: Confidence) -> Outcome {
    Outcome {
        cause: Cause::NotAHang,
        culprits: Vec::new(),
        confidence,
        sentence: format!("No hang is visible: {why}."),
        evidence: Vec::new(),
        main: None,
    }
}

/// Every pending operation is younger than the time between the samples, so none was pending all
/// that time.
fn all_launched_recently(case: &Case<'_>) -> bool {
    let evidence = case.evidence;
    let limit =
        [evidence.sample_interval_ns, evidence.hang_timeout_ns / 2].into_iter().filter(|limit| *limit > 0).min();
    let oldest = case.world.views.iter().map(|view| view.oldest_pending_ns()).max().unwrap_or(0);
    let kind = evidence.trigger.as_ref().map_or(TriggerKind::Unspecified, |trigger| trigger.kind());
    matches!(kind, TriggerKind::Manual | TriggerKind::Operation)
        && !case.graph.events.is_empty()
        && limit.is_some_and(|limit| oldest < limit)
        && !case.world.views.iter().any(|view| view.halted() || view.unseen() || polls_collective(view))
}

/// Whether a rank polls for the end of a collective. Then its newest poll does not show the age of
/// the collective.
fn polls_collective(view: &RankView<'_>) -> bool {
    let mut communicators = view.flight.into_iter().flat_map(|flight| &flight.communicators);
    communicators.any(|communicator| view.polled_collective(communicator).is_some())
}

/// Replaces a suspect by the rank that holds the resource it waits for.
fn follow_to_holder(case: &Case<'_>, suspect: Suspect) -> Suspect {
    let Suspect::Host { mut rank_index, events, guess } = suspect else { return suspect };
    let holder = |rank_index: usize| case.graph.resource_waits.iter().find(|wait| wait.waiter == rank_index);
    // The loop is bounded, because ranks that wait for each other in a cycle have no end.
    for _ in 0..case.graph.resource_waits.len() {
        rank_index = holder(rank_index).map_or(rank_index, |wait| wait.holder);
    }
    Suspect::Host { rank_index, events, guess }
}

/// The suspects of a job in which no rank is known to wait in a collective: a rank that stands
/// still by itself, or that differs from ranks whose stacks show that they wait.
fn suspects_without_events(case: &mut Case<'_>) -> Vec<Suspect> {
    let views = &case.world.views;
    let alone = |rank_index: usize| Suspect::Host { rank_index, events: Vec::new(), guess: false };
    let all = || 0..views.len();
    let kind = case.evidence.trigger.as_ref().map_or(TriggerKind::Unspecified, |trigger| trigger.kind());

    // A rank that left in order is no suspect while nobody waits for it.
    let halted: Vec<usize> =
        all().filter(|rank_index| views[*rank_index].halted() && !ended_in_order(case, *rank_index)).collect();
    let waits = |rank_index: usize| {
        matches!(views[rank_index].host.observed.activity, Activity::DeviceWait | Activity::CommInit)
    };
    let (waiting, others): (Vec<usize>, Vec<usize>) = all()
        .filter(|rank_index| views[*rank_index].host.stack && !views[*rank_index].halted())
        .partition(|rank_index| waits(*rank_index));
    if !halted.is_empty() {
        case.stack_waiters = waiting;
        return halted.into_iter().map(alone).collect();
    }
    let pending =
        |rank_index: usize, kind: OpKind| views[rank_index].pending().any(|operation| operation.kind() == kind);
    let graphs: Vec<usize> = all().filter(|rank_index| pending(*rank_index, OpKind::GraphLaunch)).collect();
    let outside: Vec<usize> =
        others.iter().copied().filter(|rank_index| !pending(*rank_index, OpKind::GraphLaunch)).collect();
    if !graphs.is_empty() && !outside.is_empty() && outside.len() < graphs.len() {
        case.stack_waiters = graphs;
        return outside.into_iter().map(alone).collect();
    }
    let kernels: Vec<usize> = all()
        .filter(|rank_index| pending(*rank_index, OpKind::Kernel) || pending(*rank_index, OpKind::GraphLaunch))
        .collect();
    if !kernels.is_empty() && kind != TriggerKind::Manual {
        case.stack_waiters = waiting;
        return kernels.into_iter().map(|rank_index| Suspect::Device { rank_index, events: Vec::new() }).collect();
    }
    // A rank in a lock shared between processes waits for a rank that is not in it, if there is
    // one.
    let (waiting, others) = match others.iter().all(|rank_index| case.in_shared_lock(*rank_index)) {
        true => (waiting, others),
        false => {
            let (locked, others): (Vec<usize>, Vec<usize>) =
                others.into_iter().partition(|rank_index| case.in_shared_lock(*rank_index));
            let mut waiting = [waiting, locked].concat();
            waiting.sort_unstable();
            (waiting, others)
        }
    };
    if !waiting.is_empty() && !others.is_empty() && kind != TriggerKind::Manual {
        // In any healthy job, some ranks wait for the device in an ordinary step and others are
        // elsewhere. So only ranks that stand still count.
        let frozen: Vec<usize> = others.iter().copied().filter(|rank_index| views[*rank_index].host.frozen()).collect();
        case.stack_waiters = waiting;
        return if frozen.is_empty() { others } else { frozen }.into_iter().map(alone).collect();
    }
    let specific = |rank_index: &usize| {
        !matches!(views[*rank_index].host.observed.activity, Activity::Unknown | Activity::Running | Activity::Sleep)
            && !waits(*rank_index)
            && views[*rank_index].host.frozen()
    };
    let stuck: Vec<usize> = others.into_iter().filter(specific).collect();
    if kind == TriggerKind::Manual {
        return Vec::new();
    }
    // Idle ranks do not hold up others.
    let is_idle = is_idle(case);
    if stuck.is_empty()
        && !is_idle
        && let Some((most, few)) = split_by_place(case)
    {
        case.stack_waiters = most;
        return few.into_iter().map(alone).collect();
    }
    if stuck.len() == views.len() {
        case.stack_waiters.clone_from(&stuck);
    }
    stuck.into_iter().map(alone).collect()
}

/// Whether a rank left in order, with or without a `Goodbye`. A rank that ended with an error of
/// its own did not.
fn ended_in_order(case: &Case<'_>, rank_index: usize) -> bool {
    let view = case.view(rank_index);
    match view.presence {
        Presence::Left => !view.exit().failed(),
        Presence::Dead => view.exit().succeeded(),
        _ => false,
    }
}

/// Splits the ranks into those at the place of more than half of all ranks, and the others. `None`
/// unless all ranks stand still.
fn split_by_place(case: &Case<'_>) -> Option<(Vec<usize>, Vec<usize>)> {
    let all = 0..case.world.views.len();
    let known = |rank_index: usize| case.view(rank_index).host.stack && case.view(rank_index).host.frozen();
    if !all.clone().all(known) {
        return None;
    }
    let mut places: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    all.for_each(|rank_index| places.entry(case.place(rank_index)).or_default().push(rank_index));
    let most = places.into_values().find(|views| 2 * views.len() > case.world.views.len())?;
    let few: Vec<usize> = (0..case.world.views.len()).filter(|rank_index| !most.contains(rank_index)).collect();
    (!few.is_empty()).then_some((most, few))
}

/// Lets the rules explain the suspects, and weighs the findings.
fn conclude(case: &Case<'_>) -> Outcome {
    let mut findings: Vec<(usize, &Suspect, Finding)> = Vec::new();
    let unseen = |suspect: &Suspect| matches!(suspect, Suspect::Host { rank_index, guess: true, .. } if case.view(*rank_index).presence == Presence::Unspecified);
    let guesses =
        case.graph.suspects.iter().filter(|suspect| matches!(suspect, Suspect::Host { guess: true, .. })).count();
    // A rank of another node is not accused for being there.
    for suspect in case.graph.suspects.iter().filter(|suspect| !unseen(suspect)) {
        let found = RULES.iter().enumerate().find_map(|(index, rule)| Some((index, (rule.explain)(case, suspect)?)));
        if let Some((rule, finding)) = found {
            findings.push((rule, suspect, finding));
        }
    }
    let cause = |rule: usize| RULES[rule].cause;
    // A rank in a lock shared between processes may wait for another rank.
    let locked = |finding: &Finding| finding.culprits.iter().all(|rank_index| case.in_shared_lock(*rank_index));
    let all = findings.len();
    if findings.iter().any(|(_, _, finding)| !finding.culprits.is_empty() && !locked(finding)) {
        findings.retain(|(_, _, finding)| finding.culprits.is_empty() || !locked(finding));
    }
    // A rank that waits for members of an MPI window, even by polling, is not to blame while one of
    // them is elsewhere.
    let accused: BTreeSet<usize> =
        findings.iter().flat_map(|(_, _, finding)| finding.culprits.iter().copied()).collect();
    let in_window = case.ranks_waiting_in_windows(&accused);
    findings.retain(|(rule, _, finding)| {
        let elsewhere = matches!(cause(*rule), Cause::MissingRank | Cause::LongStep);
        !elsewhere
            || finding.culprits.is_empty()
            || !finding.culprits.iter().all(|rank_index| in_window.contains(rank_index))
    });
    // A rank that polls may wait for another rank.
    let waits = |rank_index: &usize| case.polls(*rank_index) || case.does(*rank_index, Activity::DeviceWait);
    let polls = |finding: &Finding| finding.culprits.iter().all(waits);
    let others = findings.iter().any(|(_, _, finding)| !finding.culprits.is_empty() && !polls(finding));
    if others {
        findings.retain(|(rule, _, finding)| {
            !matches!(cause(*rule), Cause::MissingRank | Cause::CommInit)
                || !polls(finding)
                || finding.culprits.is_empty()
        });
    }
    let mut certain = findings.len() == all;
    // A rank that makes progress is not to blame while another one stands still, and the network is
    // not to blame while a rank is.
    let mild = |rule: usize| matches!(cause(rule), Cause::LongStep | Cause::Compile | Cause::PythonGc);
    if findings.iter().any(|(rule, _, finding)| !mild(*rule) && !finding.culprits.is_empty()) {
        findings.retain(|(rule, _, finding)| !mild(*rule) && !finding.culprits.is_empty());
    } else if findings.iter().any(|(_, _, finding)| !finding.culprits.is_empty()) {
        findings.retain(|(_, _, finding)| !finding.culprits.is_empty());
    }
    let dead = |rule: usize| cause(rule) == Cause::ProcessDead;
    let by_agent = |finding: &Finding| finding.culprits.iter().all(|rank_index| ended_by_agent(case, *rank_index));
    if findings.iter().any(|(rule, _, finding)| dead(*rule) && !by_agent(finding)) {
        findings.retain(|(rule, _, finding)| !dead(*rule) || !by_agent(finding));
    }
    // A rank that was killed did not react to another death. A rank that ended with an error may
    // have.
    let killed = |finding: &Finding| finding.culprits.iter().all(|rank_index| ended_by_signal(case, *rank_index));
    if findings.iter().any(|(rule, _, finding)| dead(*rule) && killed(finding)) {
        let before = findings.len();
        findings.retain(|(rule, _, finding)| !dead(*rule) || killed(finding));
        certain &= findings.len() == before;
    }
    findings.sort_by_key(|(rule, ..)| *rule);
    if let Some(finding) = few_inside_instead(case, &findings) {
        findings = vec![(findings[0].0, findings[0].1, finding)];
    }
    let Some((primary, ..)) = findings.first() else { return unexplained(case) };
    let primary = *primary;

    let culprits: BTreeSet<usize> =
        findings.iter().flat_map(|(_, _, finding)| finding.culprits.iter().copied()).collect();
    let culprits: Vec<usize> = culprits.into_iter().collect();
    let first: Vec<&(usize, &Suspect, Finding)> = findings.iter().filter(|(rule, ..)| *rule == primary).collect();
    let mut confidence = first.iter().map(|(_, _, finding)| finding.confidence).min().unwrap_or(Confidence::Low);
    if first.len() < findings.len() {
        confidence = confidence.min(Confidence::Medium);
    }
    // Many ranks together at another place, while few wait, may wait for something that the few
    // have not done.
    let elsewhere = matches!(cause(primary), Cause::MissingRank | Cause::P2pUnmatched);
    let together =
        culprits.len() > 1 && culprits.iter().all(|rank_index| case.place(*rank_index) == case.place(culprits[0]));
    if elsewhere
        && together
        && culprits.len() > waiting(case).iter().filter(|rank_index| !culprits.contains(rank_index)).count()
    {
        confidence = confidence.min(Confidence::Medium);
    }
    // Ranks that are missing at different places may wait for each other in an unknown way.
    let missing = first.iter().flat_map(|(_, _, finding)| &finding.culprits).map(|rank_index| case.place(*rank_index));
    let apart = cause(primary) == Cause::MissingRank && missing.collect::<BTreeSet<_>>().len() > 1;
    let assumed = case.graph.assumed.iter().any(|rank_index| !culprits.contains(rank_index));
    if apart || assumed || !certain {
        confidence = confidence.min(Confidence::Medium);
    }
    // Any one of several unknown ranks may be the culprit.
    if guesses > 1 {
        confidence = Confidence::Low;
    }
    if all_stuck_alike(case, &findings) {
        return no_rank_differs(case, &findings, primary, confidence);
    }
    let weight = |suspect: &Suspect| case.main_event(suspect).map_or(0, |event| case.graph.waiters_of(event).len());
    let main = first
        .iter()
        .map(|(_, suspect, _)| *suspect)
        .reduce(|best, next| if weight(next) > weight(best) { next } else { best });

    let mut evidence = Vec::new();
    for (_, _, finding) in &findings {
        if evidence.len() < MAX_EVIDENCE {
            evidence.extend(finding.evidence.iter().cloned());
        }
    }
    Outcome {
        cause: cause(primary),
        confidence,
        sentence: sentence(case, &findings, primary, main, &culprits),
        evidence,
        main: main.cloned(),
        culprits,
    }
}

/// Most members of a communicator have not entered the collective that few wait in, and are
/// together at one place.
fn few_inside_instead(case: &Case<'_>, findings: &[(usize, &Suspect, Finding)]) -> Option<Finding> {
    let (rule, suspect, _) = findings.first()?;
    let event = case.main_event(suspect)?;
    let alike = |(other, suspect, finding): &(usize, &Suspect, Finding)| {
        other == rule && case.main_event(suspect) == Some(event) && finding.culprits.len() == 1
    };
    if RULES[*rule].cause != Cause::MissingRank || !findings.iter().all(alike) {
        return None;
    }
    let outside: Vec<usize> = findings.iter().map(|(_, _, finding)| finding.culprits[0]).collect();
    alone_in(case, event, &outside)
}

/// No rank waits for another, and all ranks of the job are stuck in the same way: they wait for
/// something outside the job.
fn all_stuck_alike(case: &Case<'_>, findings: &[(usize, &Suspect, Finding)]) -> bool {
    let outside = |rule: usize| {
        matches!(RULES[rule].cause, Cause::DataLoader | Cause::StorageIo | Cause::DState | Cause::HostLock)
    };
    let all = case.world.views.len();
    all > 1
        && case.graph.events.is_empty()
        && findings.len() == all
        && case.stack_waiters.len() == all
        && findings.iter().all(|(rule, ..)| *rule == findings[0].0 && outside(*rule))
}

fn no_rank_differs(
    case: &Case<'_>,
    findings: &[(usize, &Suspect, Finding)],
    primary: usize,
    confidence: Confidence,
) -> Outcome {
    let all: Vec<usize> = (0..case.world.views.len()).collect();
    let said = sentence(case, findings, primary, None, &all);
    let evidence = findings.iter().take(4).flat_map(|(_, _, finding)| finding.evidence.iter().cloned());
    Outcome {
        cause: RULES[primary].cause,
        culprits: Vec::new(),
        confidence,
        sentence: format!(
            "{}; these are all ranks of the job, so none is to blame: look at what they wait for.",
            said.trim_end_matches('.')
        ),
        evidence: evidence.collect(),
        main: None,
    }
}

fn sentence(
    case: &Case<'_>,
    findings: &[(usize, &Suspect, Finding)],
    primary: usize,
    main: Option<&Suspect>,
    culprits: &[usize],
) -> String {
    let mut parts: Vec<String> = Vec::new();
    let of_ranks = |statement: &Statement, views: &[usize]| {
        let who = case.world.ranks(views.iter().copied());
        match (statement, Number::of(who.len())) {
            (Statement::OfRanks { one, .. }, Number::One) => format!("{} {one}", ranks(&who)),
            (Statement::OfRanks { many, .. }, Number::Many) => format!("{} {many}", ranks(&who)),
            (Statement::Sentence(sentence), _) => sentence.trim_end_matches('.').to_owned(),
        }
    };
    let spelled = |finding: &Finding| of_ranks(&finding.statement, &finding.culprits);
    let first: Vec<&Finding> =
        findings.iter().filter(|(rule, ..)| *rule == primary).map(|(_, _, finding)| finding).collect();
    let whole = matches!(first[0].statement, Statement::Sentence(_));
    if whole {
        parts.push(spelled(first[0]));
    } else {
        // Ranks with the same statement share one clause.
        let mut said: Vec<(&Statement, Vec<usize>)> = Vec::new();
        for finding in &first {
            match said.iter().position(|(statement, _)| **statement == finding.statement) {
                Some(index) => said[index].1.extend(&finding.culprits),
                None if said.len() < MAX_SPELLED => said.push((&finding.statement, finding.culprits.clone())),
                None => {}
            }
        }
        let counted: usize = said.iter().map(|(_, views)| views.len()).sum();
        for (statement, views) in &said {
            parts.push(of_ranks(statement, views));
        }
        let all: usize = first.iter().map(|finding| finding.culprits.len()).sum();
        if counted < all {
            parts.push(format!("and so do {} more ranks", all - counted));
        }
    }
    let mut text = parts.join("; ");
    if let Some(main) = main.filter(|_| !whole) {
        let waits = case.waiters_clause(main, culprits, &text);
        text.push_str(&waits);
    }
    for (_, _, finding) in findings.iter().filter(|(rule, ..)| *rule != primary).take(MAX_SPELLED) {
        text.push_str("; also ");
        text.push_str(&spelled(finding));
    }
    text.push('.');
    capital(&text)
}

/// The outcome if no rule explains the incident: what is known.
fn unexplained(case: &Case<'_>) -> Outcome {
    let views = &case.world.views;
    let kind = case.evidence.trigger.as_ref().map_or(TriggerKind::Unspecified, |trigger| trigger.kind());
    let dumps = views.iter().filter(|view| view.host.stack).count();
    let moving = views.iter().filter(|view| view.host.moved.is_some_and(|moved| moved.is_progress())).count();
    let nothing_pending = case.graph.events.is_empty();
    if !views.is_empty()
        && nothing_pending
        && dumps == views.len()
        && (kind == TriggerKind::Manual || moving == views.len())
    {
        let why = if moving == views.len() {
            "no operation is pending, and every rank moves".to_owned()
        } else {
            "no operation is pending on any rank".to_owned()
        };
        let confidence = if moving == views.len() { Confidence::Medium } else { Confidence::Low };
        return not_a_hang(why, confidence);
    }
    let done: Vec<usize> = (0..views.len()).filter(|rank_index| ended_in_order(case, *rank_index)).collect();
    let comes = |view: &RankView<'_>| !view.halted() && view.host.observed.activity == Activity::CommInit;
    if !done.is_empty() && nothing_pending && !views.iter().any(|view| view.unseen() || comes(view)) {
        let left = ranks(&case.world.ranks(done));
        return not_a_hang(format!("no operation is pending, and {left} left in order"), Confidence::Medium);
    }
    if nothing_pending && is_idle(case) {
        let stand = match same_place(case) {
            Some(place) => format!("all {} ranks stand{place}", views.len()),
            None => "every rank sleeps, or waits for a message, a person or a signal".to_owned(),
        };
        return unknown(format!(
            "No operation is pending, so nothing is stuck on any device: {stand}; the job may just be idle."
        ));
    }
    let known = match (views.len(), nothing_pending) {
        (0, _) => "nothing is known of any rank".to_owned(),
        (_, true) if dumps == 0 => "there is no stack of any rank, and no record of a pending operation".to_owned(),
        (all, true) => match same_place(case) {
            Some(place) => format!("no operation is pending on any rank, and all {all} ranks stand{place}"),
            None => format!("no operation is pending on any rank, and {dumps} of {all} ranks have stacks"),
        },
        (_, false) => {
            let unseen = case.world.ranks((0..views.len()).filter(|rank_index| views[*rank_index].unseen()));
            let whom = match unseen.len() {
                0 => "no rank is seen to hold it up".to_owned(),
                _ => format!("the reason lies with {}, of which nothing is known here", ranks(&unseen)),
            };
            let busiest = case.graph.events.iter().copied().max_by_key(|event| case.graph.waiters_of(*event).len());
            let waits = busiest.map_or("operations are pending".to_owned(), |event| {
                let inside = case.world.ranks(case.graph.waiters_of(event).iter().copied());
                let verb = if inside.len() == 1 { "waits" } else { "wait" };
                format!("{} {verb} in {}", ranks(&inside), case.describe(event))
            });
            format!("{waits}, and {whom}")
        }
    };
    unknown(format!("It is not known why the job stopped: {known}."))
}

/// A job that has worked and whose ranks all do nothing now. A job that has not begun yet waits for
/// something.
fn is_idle(case: &Case<'_>) -> bool {
    let views = &case.world.views;
    let worked = views.iter().any(|view| view.operations().any(is_collective));
    worked && (0..views.len()).all(|rank_index| views[rank_index].host.stack && case.is_idle(rank_index))
}

fn unknown(sentence: String) -> Outcome {
    Outcome {
        cause: Cause::Unknown,
        culprits: Vec::new(),
        confidence: Confidence::Low,
        sentence,
        evidence: Vec::new(),
        main: None,
    }
}

/// The place of the ranks, if it is the same for all.
fn same_place(case: &Case<'_>) -> Option<String> {
    let first = case.place(0);
    let same = (1..case.world.views.len()).all(|rank_index| case.place(rank_index) == first);
    (same && !first.is_empty() && case.world.views.len() > 1).then_some(first)
}

fn write_verdict(case: &Case<'_>, outcome: Outcome) -> Verdict {
    let evidence = case.evidence;
    let culprits: BTreeSet<usize> = outcome.culprits.iter().copied().collect();
    let victims: BTreeSet<usize> = if outcome.cause == Cause::NotAHang { BTreeSet::new() } else { waiting(case) };
    let victims: Vec<usize> = victims.difference(&culprits).copied().collect();
    let mut lines = outcome.evidence;
    lines.truncate(MAX_EVIDENCE);
    lines.extend(evidence_gaps(case));
    let mut confidence = outcome.confidence;
    if let Some(cap) = younger_than_timeout(case) {
        lines.push(cap);
        confidence = confidence.min(Confidence::Medium);
    }
    let ruled_out = |rule: &Rule| {
        let reason = (rule.cause != outcome.cause).then(|| (rule.rule_out)(case, &outcome.culprits)).flatten()?;
        Some(RuledOut { cause: rule.cause, reason })
    };
    Verdict {
        format: FORMAT,
        incident: evidence.incident.clone(),
        job: evidence.job.clone(),
        world_size: case.world.size,
        attempt: evidence.attempt,
        trigger: report::trigger(evidence),
        sentence: outcome.sentence,
        cause: outcome.cause,
        confidence,
        culprits: case.world.ranks(outcome.culprits.iter().copied()),
        hang: hang::evidence(case, (outcome.cause, confidence), &outcome.culprits, victims.len()),
        helpers_busy: hang::helpers_busy(case, &outcome.culprits),
        victims: case.world.ranks(victims),
        evidence: lines,
        ruled_out: RULES.iter().filter_map(ruled_out).collect(),
        communicators: report::communicators(case, outcome.main.as_ref().and_then(|suspect| case.main_event(suspect))),
        ranks: report::ranks(&case.world),
        hook: report::hook(&case.world),
        timing: Timing::default(),
    }
}

/// Ranks inside an operation that needs others.
fn waiting(case: &Case<'_>) -> BTreeSet<usize> {
    let pends = |rank_index: usize| {
        case.view(rank_index)
            .pending()
            .any(|operation| matches!(operation.kind(), OpKind::Collective | OpKind::HostCall))
            || !case.graph.events.is_empty() && case.does(rank_index, Activity::DeviceWait)
    };
    let mut waiting: BTreeSet<usize> = (0..case.world.views.len()).filter(|rank_index| pends(*rank_index)).collect();
    waiting.extend(case.graph.waiters.iter().flatten());
    waiting.extend(&case.stack_waiters);
    waiting.extend(case.graph.resource_waits.iter().map(|wait| wait.waiter));
    waiting.retain(|rank_index| !case.view(*rank_index).dead());
    waiting
}

/// What is missing in the evidence, and what opened the incident.
fn evidence_gaps(case: &Case<'_>) -> Vec<EvidenceLine> {
    let of = |keep: &dyn Fn(usize) -> bool| {
        case.world.ranks((0..case.world.views.len()).filter(|rank_index| keep(*rank_index)))
    };
    let mut lines = Vec::new();
    let mut add = |text: &str, who: Vec<u32>| {
        if !who.is_empty() {
            lines.push(line(format!("{text} {}", ranks(&who)), who));
        }
    };
    add("nothing is known of", of(&|rank_index| case.view(rank_index).unseen()));
    let known = |rank_index: usize| !case.view(rank_index).unseen() && !case.view(rank_index).dead();
    add("there is no stack of", of(&|rank_index| known(rank_index) && !case.view(rank_index).host.stack));
    add("there is no flight record of", of(&|rank_index| known(rank_index) && case.view(rank_index).flight.is_none()));
    add("the flight record lost operations of", of(&|rank_index| case.view(rank_index).lossy()));
    let stuck = |rank_index: usize| {
        let health = case.view(rank_index).flight.and_then(|flight| flight.health.as_ref());
        health.is_some_and(|health| !health.watcher_inside.is_empty()) && case.view(rank_index).watcher_stale()
    };
    add("the watcher is stuck inside a driver call on", of(&stuck));
    if let Some(trigger) = &case.evidence.trigger
        && let (Some(operation), Ok(rank)) = (&trigger.operation, u32::try_from(trigger.rank))
    {
        let of_comm = match operation.communicator {
            0 => String::new(),
            id => format!(", number {} of communicator {}", operation.seq, crate::text::communicator(id)),
        };
        lines.push(line(format!("rank {rank} signalled first: {}{of_comm}", shape(operation)), vec![rank]));
    }
    lines
}

/// A manual dump came before the hang timeout, so pending operations may still complete.
fn younger_than_timeout(case: &Case<'_>) -> Option<EvidenceLine> {
    let manual = case.evidence.trigger.as_ref().is_some_and(|trigger| trigger.kind() == TriggerKind::Manual);
    let oldest = case.world.views.iter().map(|view| view.oldest_pending_ns()).max().unwrap_or(0);
    (manual && oldest > 0 && oldest < case.evidence.hang_timeout_ns).then(|| {
        let text = format!(
            "the oldest operation is pending for {} s, less than the hang timeout of {} s",
            oldest / 1_000_000_000,
            case.evidence.hang_timeout_ns / 1_000_000_000
        );
        line(text, Vec::new())
    })
}
