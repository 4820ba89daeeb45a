//! Weighs the findings of the rules against each other.
//!
//! Two ordered tables: [`ARBITRATIONS`] drops findings that others overrule, and [`LIMITS`] lowers
//! the confidence of what remains.

use std::collections::BTreeSet;

use xpu_timer_proto::v1::Presence;

use super::outcome::waiting;
use crate::{
    causes::{Case, Finding, RULES, alone_in, ended_by_agent, ended_by_signal},
    graph::Suspect,
    verdict::{Activity, Cause, Confidence},
};

/// A suspect, and what the first rule that explains it found.
pub(super) struct Ruling<'s> {
    /// Index of the rule in [`RULES`].
    pub rule: usize,
    pub suspect: &'s Suspect,
    pub finding: Finding,
}

impl Ruling<'_> {
    pub fn cause(&self) -> Cause {
        RULES[self.rule].cause
    }

    /// Whether the finding has culprits and all of them have a property.
    fn all_culprits(&self, property: impl Fn(usize) -> bool) -> bool {
        !self.finding.culprits.is_empty() && self.finding.culprits.iter().all(|index| property(*index))
    }

    /// Whether the finding has culprits and not all of them have a property.
    fn other_culprits(&self, property: impl Fn(usize) -> bool) -> bool {
        self.finding.culprits.iter().any(|index| !property(*index))
    }
}

/// One rule of the first table.
struct Arbitration {
    /// Name of the rule.
    #[cfg_attr(not(test), expect(dead_code, reason = "for readers and tests"))]
    name: &'static str,
    /// Why the rule holds.
    #[cfg_attr(not(test), expect(dead_code, reason = "for readers and tests"))]
    reason: &'static str,
    /// The dropped findings may be right after all, so the confidence becomes at most medium.
    leaves_doubt: bool,
    /// Drops the findings that others overrule.
    apply: fn(&Case<'_>, &mut Vec<Ruling<'_>>),
}

const ARBITRATIONS: &[Arbitration] = &[
    Arbitration {
        name: "shared_lock",
        reason: "A rank in a lock shared between processes may wait for another rank.",
        leaves_doubt: true,
        apply: shared_lock,
    },
    Arbitration {
        name: "mpi_window",
        reason: "A rank that waits for members of an MPI window, even by polling, is not to blame while one of them is \
                 elsewhere.",
        leaves_doubt: true,
        apply: mpi_window,
    },
    Arbitration {
        name: "polling",
        reason: "A rank that polls may wait for another rank.",
        leaves_doubt: true,
        apply: polling,
    },
    Arbitration {
        name: "progress",
        reason: "A rank that makes progress is not to blame while another one stands still, and the network is not to blame \
                 while a rank is.",
        leaves_doubt: false,
        apply: progress,
    },
    Arbitration {
        name: "ended_by_agent",
        reason: "An agent ends the other ranks of a job that has lost one.",
        leaves_doubt: false,
        apply: ended_by_the_agent,
    },
    Arbitration {
        name: "killed",
        reason: "A rank that was killed did not react to another death; a rank that ended with an error may have.",
        leaves_doubt: true,
        apply: killed,
    },
];

/// One rule of the second table.
struct Limit {
    /// Name of the rule.
    #[cfg_attr(not(test), expect(dead_code, reason = "for readers and tests"))]
    name: &'static str,
    /// Why the rule holds.
    #[cfg_attr(not(test), expect(dead_code, reason = "for readers and tests"))]
    reason: &'static str,
    /// The highest confidence while the rule applies.
    confidence: Confidence,
    /// Whether the rule applies.
    applies: fn(&Arbitrated<'_, '_>) -> bool,
}

const LIMITS: &[Limit] = &[
    Limit {
        name: "several_causes",
        reason: "Different rules explain different suspects.",
        confidence: Confidence::Medium,
        applies: several_causes,
    },
    Limit {
        name: "many_together",
        reason: "Many ranks together at another place, while few wait, may wait for something that the few have not done.",
        confidence: Confidence::Medium,
        applies: many_together,
    },
    Limit {
        name: "missing_at_several_places",
        reason: "Ranks that are missing at different places may wait for each other in an unknown way.",
        confidence: Confidence::Medium,
        applies: missing_at_several_places,
    },
    Limit {
        name: "assumed_wait",
        reason: "A rank without a stack, for which others wait, is only assumed to wait itself.",
        confidence: Confidence::Medium,
        applies: assumed_wait,
    },
    Limit {
        // Scenario: `hosts::a_killed_rank_is_blamed_before_one_that_ended_with_an_error`.
        name: "overruled",
        reason: "A finding that was overruled may be right after all.",
        confidence: Confidence::Medium,
        applies: |arbitrated| arbitrated.doubt,
    },
    Limit {
        name: "several_guesses",
        reason: "Any one of several unknown ranks may be the culprit.",
        confidence: Confidence::Low,
        applies: several_guesses,
    },
];

/// The findings that remain, the first rule's first.
pub(super) struct Arbitrated<'c, 's> {
    case: &'c Case<'c>,
    pub findings: Vec<Ruling<'s>>,
    /// All culprits, as rank indices, ascending.
    pub culprits: Vec<usize>,
    /// A rule that leaves doubt has dropped a finding.
    doubt: bool,
}

/// Lets the rules explain the suspects of a case, and drops the findings that others overrule.
pub(super) fn arbitrate<'c>(case: &'c Case<'c>) -> Arbitrated<'c, 'c> {
    // A rank of another node is not accused for being there.
    let is_elsewhere = |suspect: &&Suspect| {
        matches!(suspect, Suspect::Host { rank_index, guess: true, .. }
            if case.view(*rank_index).presence == Presence::Unspecified)
    };
    let explain = |suspect: &'c Suspect| {
        let found = RULES.iter().enumerate().find_map(|(index, rule)| Some((index, (rule.explain)(case, suspect)?)));
        found.map(|(rule, finding)| Ruling { rule, suspect, finding })
    };
    let suspects = case.graph.suspects.iter().filter(|suspect| !is_elsewhere(suspect));
    let mut findings: Vec<Ruling<'c>> = suspects.filter_map(explain).collect();
    let mut doubt = false;
    for arbitration in ARBITRATIONS {
        let before = findings.len();
        (arbitration.apply)(case, &mut findings);
        doubt |= arbitration.leaves_doubt && findings.len() < before;
    }
    findings.sort_by_key(|ruling| ruling.rule);
    if let Some(finding) = few_inside_instead(case, &findings) {
        findings.truncate(1);
        findings[0].finding = finding;
    }
    let culprits: BTreeSet<usize> =
        findings.iter().flat_map(|ruling| ruling.finding.culprits.iter().copied()).collect();
    Arbitrated { case, findings, culprits: culprits.into_iter().collect(), doubt }
}

impl<'s> Arbitrated<'_, 's> {
    /// The findings of the first rule.
    pub fn primary(&self) -> impl Iterator<Item = &Ruling<'s>> {
        self.findings.iter().take_while(|ruling| ruling.rule == self.findings[0].rule)
    }

    /// The lowest confidence of the first rule's findings, lowered by [`LIMITS`].
    pub fn confidence(&self) -> Confidence {
        let own = self.primary().map(|ruling| ruling.finding.confidence).min().unwrap_or(Confidence::Low);
        let limits = LIMITS.iter().filter(|limit| (limit.applies)(self));
        limits.map(|limit| limit.confidence).fold(own, Confidence::min)
    }
}

/// Scenario: `processes::a_rank_in_a_shared_lock_waits_for_another_rank`.
fn shared_lock(case: &Case<'_>, findings: &mut Vec<Ruling<'_>>) {
    let is_locked = |index: usize| case.in_shared_lock(index);
    if findings.iter().any(|ruling| ruling.other_culprits(is_locked)) {
        findings.retain(|ruling| !ruling.all_culprits(is_locked));
    }
}

/// Scenario: `hosts::a_rank_in_an_mpi_window_is_not_to_blame_for_a_sleeping_member`.
fn mpi_window(case: &Case<'_>, findings: &mut Vec<Ruling<'_>>) {
    let accused: BTreeSet<usize> = findings.iter().flat_map(|ruling| ruling.finding.culprits.iter().copied()).collect();
    let in_window = case.ranks_waiting_in_windows(&accused);
    findings.retain(|ruling| {
        let is_weak = matches!(ruling.cause(), Cause::MissingRank | Cause::LongStep);
        !is_weak || !ruling.all_culprits(|index| in_window.contains(&index))
    });
}

/// Scenario: `hosts::a_polling_rank_is_not_named_beside_one_that_stands_still`.
fn polling(case: &Case<'_>, findings: &mut Vec<Ruling<'_>>) {
    let polls = |index: usize| case.polls(index) || case.does(index, Activity::DeviceWait);
    if findings.iter().any(|ruling| ruling.other_culprits(polls)) {
        findings.retain(|ruling| {
            !matches!(ruling.cause(), Cause::MissingRank | Cause::CommInit) || !ruling.all_culprits(polls)
        });
    }
}

/// Scenario: `hosts::a_progressing_rank_is_not_to_blame_while_another_stands_still`.
fn progress(_: &Case<'_>, findings: &mut Vec<Ruling<'_>>) {
    let accuses = |ruling: &Ruling<'_>| !ruling.finding.culprits.is_empty();
    let progresses = |ruling: &Ruling<'_>| matches!(ruling.cause(), Cause::LongStep | Cause::Compile | Cause::PythonGc);
    if findings.iter().any(|ruling| accuses(ruling) && !progresses(ruling)) {
        findings.retain(|ruling| accuses(ruling) && !progresses(ruling));
    } else if findings.iter().any(accuses) {
        findings.retain(accuses);
    }
}

/// Scenario: `hosts::ranks_that_the_agent_ended_are_not_to_blame`.
fn ended_by_the_agent(case: &Case<'_>, findings: &mut Vec<Ruling<'_>>) {
    keep_deaths(findings, |finding| !finding.culprits.iter().all(|index| ended_by_agent(case, *index)));
}

/// Scenario: `hosts::a_killed_rank_is_blamed_before_one_that_ended_with_an_error`.
fn killed(case: &Case<'_>, findings: &mut Vec<Ruling<'_>>) {
    keep_deaths(findings, |finding| finding.culprits.iter().all(|index| ended_by_signal(case, *index)));
}

/// Drops the deaths without a property, if a death has it.
fn keep_deaths(findings: &mut Vec<Ruling<'_>>, property: impl Fn(&Finding) -> bool) {
    let is_death = |ruling: &Ruling<'_>| ruling.cause() == Cause::ProcessDead;
    if findings.iter().any(|ruling| is_death(ruling) && property(&ruling.finding)) {
        findings.retain(|ruling| !is_death(ruling) || property(&ruling.finding));
    }
}

/// Most members of a communicator have not entered the collective that few wait in, and are
/// together at one place.
fn few_inside_instead(case: &Case<'_>, findings: &[Ruling<'_>]) -> Option<Finding> {
    let first = findings.first()?;
    let event = case.main_event(first.suspect)?;
    let alike = |ruling: &Ruling<'_>| {
        ruling.rule == first.rule
            && case.main_event(ruling.suspect) == Some(event)
            && ruling.finding.culprits.len() == 1
    };
    if first.cause() != Cause::MissingRank || !findings.iter().all(alike) {
        return None;
    }
    let outside: Vec<usize> = findings.iter().map(|ruling| ruling.finding.culprits[0]).collect();
    alone_in(case, event, &outside)
}

/// Scenario: `hosts::different_causes_lower_the_confidence`.
fn several_causes(arbitrated: &Arbitrated<'_, '_>) -> bool {
    arbitrated.primary().count() < arbitrated.findings.len()
}

fn many_together(arbitrated: &Arbitrated<'_, '_>) -> bool {
    let Arbitrated { case, findings, culprits, .. } = arbitrated;
    let is_absent = matches!(findings[0].cause(), Cause::MissingRank | Cause::P2pUnmatched);
    let together = culprits.len() > 1 && culprits.iter().all(|index| case.place(*index) == case.place(culprits[0]));
    is_absent && together && culprits.len() > waiting(case).iter().filter(|index| !culprits.contains(index)).count()
}

fn missing_at_several_places(arbitrated: &Arbitrated<'_, '_>) -> bool {
    let missing = arbitrated.primary().flat_map(|ruling| &ruling.finding.culprits);
    let places: BTreeSet<String> = missing.map(|index| arbitrated.case.place(*index)).collect();
    arbitrated.findings[0].cause() == Cause::MissingRank && places.len() > 1
}

/// Scenario: `hosts::an_assumed_wait_lowers_the_confidence`.
fn assumed_wait(arbitrated: &Arbitrated<'_, '_>) -> bool {
    arbitrated.case.graph.assumed.iter().any(|index| !arbitrated.culprits.contains(index))
}

/// Scenario: `hosts::several_lost_ranks_have_low_confidence`.
fn several_guesses(arbitrated: &Arbitrated<'_, '_>) -> bool {
    let is_guess = |suspect: &&Suspect| matches!(suspect, Suspect::Host { guess: true, .. });
    arbitrated.case.graph.suspects.iter().filter(is_guess).count() > 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_table(rules: &[(&str, &str)]) {
        let names: BTreeSet<&str> = rules.iter().map(|(name, _)| *name).collect();
        assert_eq!(names.len(), rules.len(), "{rules:?}");
        assert!(rules.iter().all(|(_, reason)| reason.ends_with('.')), "{rules:?}");
    }

    #[test]
    fn every_rule_has_a_name_of_its_own_and_a_reason() {
        let rules: Vec<_> = ARBITRATIONS.iter().map(|rule| (rule.name, rule.reason)).collect();
        assert_table(&rules);
        let rules: Vec<_> = LIMITS.iter().map(|rule| (rule.name, rule.reason)).collect();
        assert_table(&rules);
    }
}
