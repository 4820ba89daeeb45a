//! Weighs the findings of the rules against each other.
//!
//! Three ordered tables: [`ARBITRATIONS`] drops or replaces findings that others overrule,
//! [`LIMITS`] lowers the confidence of what remains, and [`DIFFERENCES`] says why a rank is the
//! culprit although all ranks are stuck.

use std::collections::BTreeSet;

use xpu_timer_proto::v1::Presence;

use super::outcome::waiting;
use crate::{
    case::{Case, Position},
    causes::{RULES, alone_in, ended_by_agent, ended_by_signal},
    finding::{Finding, TableRule, rules},
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
    pub(super) fn cause(&self) -> Cause {
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

/// The action of a rule of the first table.
struct Arbitration {
    /// The dropped findings may be right after all, so the confidence becomes at most medium.
    leaves_doubt: bool,
    /// Drops or replaces the findings that others overrule.
    apply: fn(&Case<'_>, &mut Vec<Ruling<'_>>),
}

const ARBITRATIONS: &[TableRule<Arbitration>] = &[
    TableRule {
        name: "other_node",
        reason: "A rank on another node, about which nothing is known, is not the culprit.",
        scenario: "hosts::ranks_of_other_nodes_are_not_accused",
        rule: Arbitration { leaves_doubt: false, apply: other_node },
    },
    TableRule {
        name: "shared_lock",
        reason: "A rank that waits for a lock shared between processes may wait for another rank.",
        scenario: "processes::a_rank_in_a_shared_lock_waits_for_another_rank",
        rule: Arbitration { leaves_doubt: true, apply: shared_lock },
    },
    TableRule {
        name: "mpi_window",
        reason: "A rank that waits or polls in an MPI window is not the culprit while another member is outside it.",
        scenario: "hosts::a_rank_in_an_mpi_window_is_not_to_blame_for_a_sleeping_member",
        rule: Arbitration { leaves_doubt: true, apply: mpi_window },
    },
    TableRule {
        name: "polling",
        reason: "A rank that polls often, or together with others, may wait for another rank that is known to be stuck.",
        scenario: "hosts::a_polling_rank_is_not_named_beside_one_that_stands_still",
        rule: Arbitration { leaves_doubt: true, apply: polling },
    },
    TableRule {
        name: "progress",
        reason: "A rank that stands still is suspected before a rank that makes progress, and any rank before the network.",
        scenario: "hosts::a_progressing_rank_is_not_to_blame_while_another_stands_still",
        rule: Arbitration { leaves_doubt: false, apply: progress },
    },
    TableRule {
        name: "ended_by_agent",
        reason: "When one rank of a job dies, its agent ends the other ranks.",
        scenario: "hosts::ranks_that_the_agent_ended_are_not_to_blame",
        rule: Arbitration { leaves_doubt: false, apply: ended_by_the_agent },
    },
    TableRule {
        name: "mismatch",
        reason: "When gloo aborts a rank because a message does not fit, the other ranks notice, and may end as well.",
        scenario: "collectives::a_rank_that_gloo_aborted_is_not_to_blame_for_the_size_of_another",
        rule: Arbitration { leaves_doubt: false, apply: mismatch },
    },
    TableRule {
        name: "killed",
        reason: "A rank that ended with an error may have reacted to the death of a rank that was killed.",
        scenario: "hosts::a_killed_rank_is_blamed_before_one_that_ended_with_an_error",
        rule: Arbitration { leaves_doubt: true, apply: killed },
    },
    TableRule {
        name: "few_inside",
        reason: "The few ranks in a collective may have called it too early if all other members are at one place.",
        scenario: "collectives::a_few_ranks_in_a_collective_while_most_wait_elsewhere",
        rule: Arbitration { leaves_doubt: false, apply: few_inside },
    },
];

/// The action of a rule of the second table.
struct Limit {
    /// The highest confidence while the rule applies.
    confidence: Confidence,
    /// Whether the rule applies.
    applies: fn(&Arbitrated<'_, '_>) -> bool,
}

const LIMITS: &[TableRule<Limit>] = &[
    TableRule {
        name: "several_causes",
        reason: "If different rules explain different suspects, only one of the causes may be the first one.",
        scenario: "hosts::different_causes_lower_the_confidence",
        rule: Limit { confidence: Confidence::Medium, applies: several_causes },
    },
    TableRule {
        name: "many_together",
        reason: "Many absent ranks at one place may wait for something that the few waiting ranks have not done.",
        scenario: "transfers::a_majority_may_wait_for_the_few_that_wait_for_it",
        rule: Limit { confidence: Confidence::Medium, applies: many_together },
    },
    TableRule {
        name: "missing_at_several_places",
        reason: "Absent ranks at different places may wait for each other in a way that no record shows.",
        scenario: "collectives::ranks_that_are_missing_at_several_places_may_wait_for_each_other",
        rule: Limit { confidence: Confidence::Medium, applies: missing_at_several_places },
    },
    TableRule {
        name: "assumed_wait",
        reason: "A rank without a stack was only assumed to wait itself, so it may be the culprit.",
        scenario: "hosts::an_assumed_wait_lowers_the_confidence",
        rule: Limit { confidence: Confidence::Medium, applies: assumed_wait },
    },
    TableRule {
        name: "overruled",
        reason: "A finding that was overruled may be right after all.",
        scenario: "hosts::a_killed_rank_is_blamed_before_one_that_ended_with_an_error",
        rule: Limit { confidence: Confidence::Medium, applies: |arbitrated| arbitrated.doubt },
    },
    TableRule {
        name: "several_guesses",
        reason: "Each of several ranks without data may be the culprit.",
        scenario: "hosts::several_lost_ranks_have_low_confidence",
        rule: Limit { confidence: Confidence::Low, applies: several_guesses },
    },
];

/// Whether a rule of the third table applies.
type Difference = fn(&Arbitrated<'_, '_>) -> bool;

/// Why the findings have culprits. If no rule applies, no rank waits for another, and all ranks of
/// the job are stuck in one way: they wait for something outside the job.
const DIFFERENCES: &[TableRule<Difference>] = &[
    TableRule {
        name: "alone",
        reason: "The only rank of a job differs from no other, and is the one to look at.",
        scenario: "hosts::a_manual_dump_does_not_accuse_an_idle_rank",
        rule: |arbitrated| arbitrated.case.world.views.len() <= 1,
    },
    TableRule {
        name: "not_stuck",
        reason: "If some ranks are not stuck, or are in an operation, those that are stuck differ from them.",
        scenario: "hang::all_ranks_in_their_loaders",
        rule: |arbitrated| {
            let all = arbitrated.case.world.views.len();
            arbitrated.findings.len() != all || arbitrated.case.stack_waiters.len() != all
        },
    },
    TableRule {
        name: "other_rule",
        reason: "Ranks that are stuck in different ways do not wait for one thing.",
        scenario: "hang::ranks_that_are_all_stuck_but_not_alike_are_culprits",
        rule: |arbitrated| arbitrated.primary().count() != arbitrated.findings.len(),
    },
    TableRule {
        name: "inside",
        reason: "Only a loader, a disk, the kernel or a lock may keep all ranks waiting for something outside the job.",
        scenario: "hang::ranks_that_are_all_stuck_but_not_alike_are_culprits",
        rule: |arbitrated| {
            let cause = arbitrated.findings[0].cause();
            !matches!(cause, Cause::DataLoader | Cause::StorageIo | Cause::DState | Cause::HostLock)
        },
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
    let explain = |suspect: &'c Suspect| {
        let found = RULES.iter().enumerate().find_map(|(index, rule)| Some((index, (rule.explain)(case, suspect)?)));
        found.map(|(rule, finding)| Ruling { rule, suspect, finding })
    };
    let mut findings: Vec<Ruling<'c>> = case.graph.suspects.iter().filter_map(explain).collect();
    let mut doubt = false;
    for arbitration in rules(ARBITRATIONS) {
        let before = findings.len();
        (arbitration.apply)(case, &mut findings);
        doubt |= arbitration.leaves_doubt && findings.len() < before;
    }
    findings.sort_by_key(|ruling| ruling.rule);
    let culprits: BTreeSet<usize> =
        findings.iter().flat_map(|ruling| ruling.finding.culprits.iter().copied()).collect();
    Arbitrated { case, findings, culprits: culprits.into_iter().collect(), doubt }
}

impl<'s> Arbitrated<'_, 's> {
    /// The findings of the first rule.
    pub(super) fn primary(&self) -> impl Iterator<Item = &Ruling<'s>> {
        self.findings.iter().take_while(|ruling| ruling.rule == self.findings[0].rule)
    }

    /// The lowest confidence of the first rule's findings, lowered by [`LIMITS`].
    pub(super) fn confidence(&self) -> Confidence {
        let own = self.primary().map(|ruling| ruling.finding.confidence).min().unwrap_or(Confidence::Low);
        let limits = rules(LIMITS).filter(|limit| (limit.applies)(self));
        limits.map(|limit| limit.confidence).fold(own, Confidence::min)
    }

    /// Whether no rank is the culprit because all of them are stuck in one way.
    pub(super) fn all_stuck_alike(&self) -> bool {
        !rules(DIFFERENCES).any(|differs| differs(self))
    }
}

fn other_node(case: &Case<'_>, findings: &mut Vec<Ruling<'_>>) {
    let is_elsewhere = |suspect: &Suspect| {
        matches!(suspect, Suspect::Host { rank_index, guess: true, .. }
            if case.view(*rank_index).presence == Presence::Unspecified)
    };
    findings.retain(|ruling| ruling.finding.culprits.is_empty() || !is_elsewhere(ruling.suspect));
}

fn shared_lock(case: &Case<'_>, findings: &mut Vec<Ruling<'_>>) {
    let is_locked = |index: usize| case.in_shared_lock(index);
    let others: BTreeSet<(Option<&str>, i32)> = findings
        .iter()
        .flat_map(|ruling| ruling.finding.culprits.iter().copied())
        .filter(|index| !is_locked(*index))
        .map(|index| (case.view(index).node(), case.view(index).pid().unwrap_or(0)))
        .collect();
    findings.retain(|ruling| !ruling.all_culprits(|index| is_locked(index) && case.may_share_lock(index, &others)));
}

fn mpi_window(case: &Case<'_>, findings: &mut Vec<Ruling<'_>>) {
    let accused: BTreeSet<usize> = findings.iter().flat_map(|ruling| ruling.finding.culprits.iter().copied()).collect();
    let in_window = case.ranks_waiting_in_windows(&accused);
    findings.retain(|ruling| {
        let is_weak = matches!(ruling.cause(), Cause::MissingRank | Cause::LongStep);
        !is_weak || !ruling.all_culprits(|index| in_window.contains(&index))
    });
}

fn polling(case: &Case<'_>, findings: &mut Vec<Ruling<'_>>) {
    // Several ranks that poll may wait for the same thing. One alone that sleeps for long between
    // its attempts does not look like one that waits for another rank.
    let accused = findings.iter().flat_map(|ruling| ruling.finding.culprits.iter().copied());
    let is_alone = accused.filter(|index| case.polls(*index)).count() == 1;
    let polls = |index: usize| {
        case.polls(index) && !(is_alone && case.retries(index)) || case.does(index, Activity::DeviceWait)
    };
    let is_weak = |ruling: &Ruling<'_>| matches!(ruling.cause(), Cause::MissingRank | Cause::CommInit);
    // A rank that is only absent too has equal evidence, so both stay, unless it is certain to be
    // stuck.
    let is_stronger = |ruling: &Ruling<'_>| {
        ruling.other_culprits(polls) && (!is_weak(ruling) || ruling.finding.confidence == Confidence::High)
    };
    if findings.iter().any(is_stronger) {
        findings.retain(|ruling| !is_weak(ruling) || !ruling.all_culprits(polls));
    }
}

fn progress(_: &Case<'_>, findings: &mut Vec<Ruling<'_>>) {
    let accuses = |ruling: &Ruling<'_>| !ruling.finding.culprits.is_empty();
    let progresses = |ruling: &Ruling<'_>| matches!(ruling.cause(), Cause::LongStep | Cause::Compile | Cause::PythonGc);
    if findings.iter().any(|ruling| accuses(ruling) && !progresses(ruling)) {
        findings.retain(|ruling| accuses(ruling) && !progresses(ruling));
    } else if findings.iter().any(accuses) {
        findings.retain(accuses);
    }
}

fn ended_by_the_agent(case: &Case<'_>, findings: &mut Vec<Ruling<'_>>) {
    keep_deaths(findings, |finding| !finding.culprits.iter().all(|index| ended_by_agent(case, *index)));
}

fn mismatch(_: &Case<'_>, findings: &mut Vec<Ruling<'_>>) {
    let of_dead = |ruling: &Ruling<'_>| {
        matches!(ruling.cause(), Cause::SizeMismatch | Cause::DtypeMismatch)
            && matches!(ruling.suspect, Suspect::Host { .. })
    };
    if findings.iter().any(of_dead) {
        findings.retain(|ruling| ruling.cause() != Cause::ProcessDead);
    }
}

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

/// Replaces the findings about the absent ranks by one about the ranks inside.
fn few_inside(case: &Case<'_>, findings: &mut Vec<Ruling<'_>>) {
    let Some(first) = findings.first().filter(|first| first.cause() == Cause::MissingRank) else { return };
    let Some(event) = case.main_event(first.suspect) else { return };
    let alike = |ruling: &Ruling<'_>| {
        ruling.rule == first.rule
            && case.main_event(ruling.suspect) == Some(event)
            && ruling.finding.culprits.len() == 1
            // The culprit may also be inside: it has called a collective too many.
            && !case.graph.waiters_of(event).contains(&ruling.finding.culprits[0])
    };
    if !findings.iter().all(alike) {
        return;
    }
    let outside: Vec<usize> = findings.iter().map(|ruling| ruling.finding.culprits[0]).collect();
    if let Some(finding) = alone_in(case, event, &outside) {
        findings.truncate(1);
        findings[0].finding = finding;
    }
}

fn several_causes(arbitrated: &Arbitrated<'_, '_>) -> bool {
    arbitrated.primary().count() < arbitrated.findings.len()
}

fn many_together(arbitrated: &Arbitrated<'_, '_>) -> bool {
    let Arbitrated { case, findings, culprits, .. } = arbitrated;
    let is_absent = matches!(findings[0].cause(), Cause::MissingRank | Cause::P2pUnmatched);
    let together =
        culprits.len() > 1 && culprits.iter().all(|index| case.position(*index) == case.position(culprits[0]));
    is_absent && together && culprits.len() > waiting(case).iter().filter(|index| !culprits.contains(index)).count()
}

fn missing_at_several_places(arbitrated: &Arbitrated<'_, '_>) -> bool {
    let missing = arbitrated.primary().flat_map(|ruling| &ruling.finding.culprits);
    let positions: BTreeSet<Position<'_>> = missing.map(|index| arbitrated.case.position(*index)).collect();
    arbitrated.findings[0].cause() == Cause::MissingRank && positions.len() > 1
}

fn assumed_wait(arbitrated: &Arbitrated<'_, '_>) -> bool {
    arbitrated.case.graph.assumed.iter().any(|index| !arbitrated.culprits.contains(index))
}

fn several_guesses(arbitrated: &Arbitrated<'_, '_>) -> bool {
    let is_guess = |suspect: &&Suspect| matches!(suspect, Suspect::Host { guess: true, .. });
    arbitrated.case.graph.suspects.iter().filter(is_guess).count() > 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::assert_table;

    #[test]
    fn every_rule_has_a_name_of_its_own_a_reason_and_a_scenario() {
        assert_table(ARBITRATIONS.iter().map(TableRule::texts));
        assert_table(LIMITS.iter().map(TableRule::texts));
        assert_table(DIFFERENCES.iter().map(TableRule::texts));
    }
}
