//! The causes of a hang, each in a file of its own whose module documentation states its rule as prose.
//!
//! To add one: a file with a `RULE`, a line in [`RULES`], a variant of [`Cause`], a row in `docs/verdict.md`, and scenarios in
//! which it is the cause and in which it is what another cause could be mistaken for. A rule explains a suspect or leaves it
//! to the next; the first that explains it wins, so the order of the list is part of the rules.

mod case;
mod circle;
mod collective;
mod comm_init;
mod compile;
mod d_state;
mod data_loader;
mod dtype_mismatch;
mod extra_collective;
mod gil_deadlock;
mod held;
mod host_lock;
mod kernel_hang;
mod long_step;
mod missing_rank;
mod network_stall;
mod op_mismatch;
mod order_mismatch;
mod out_of_step;
mod p2p_cycle;
mod p2p_unmatched;
mod process_dead;
mod process_stopped;
mod python_gc;
mod size_mismatch;
mod storage_io;
mod teardown;

pub(crate) use case::{Case, line};
pub(crate) use missing_rank::alone_in;
pub(crate) use process_dead::{ended_by_agent, ended_by_signal};

use crate::{
    graph::Suspect,
    verdict::{Cause, Confidence, EvidenceLine},
};

/// One cause and how it is recognized.
pub(crate) struct Rule {
    /// What it explains.
    pub cause: Cause,
    /// Explains a suspect, or leaves it to the next rule.
    pub explain: fn(&Case<'_>, &Suspect) -> Option<Finding>,
    /// Why it is not this cause, when the evidence excludes it and somebody could think that it is.
    pub rule_out: fn(&Case<'_>, &[usize]) -> Option<String>,
}

/// What a rule says of a suspect.
#[derive(Debug, Clone)]
pub(crate) struct Finding {
    /// The suspect's ranks, as views.
    pub culprits: Vec<usize>,
    /// The sentence, or its part about one rank.
    pub says: Says,
    /// How far it can be trusted.
    pub confidence: Confidence,
    /// The facts.
    pub evidence: Vec<EvidenceLine>,
}

/// How a finding becomes a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Says {
    /// What follows after `rank 2`; who waits where is added.
    Rank(String),
    /// The whole sentence.
    Whole(String),
}

/// All rules. What makes a rank unable to run comes before what it was doing, the specific before the general.
pub(crate) const RULES: &[Rule] = &[
    op_mismatch::RULE,
    dtype_mismatch::RULE,
    size_mismatch::RULE,
    extra_collective::RULE,
    process_dead::RULE,
    process_stopped::RULE,
    d_state::RULE,
    gil_deadlock::RULE,
    data_loader::RULE,
    compile::RULE,
    python_gc::RULE,
    storage_io::RULE,
    teardown::RULE,
    long_step::RULE,
    held::LOCK,
    held::PEER,
    host_lock::RULE,
    comm_init::RULE,
    p2p_unmatched::RULE,
    missing_rank::RULE,
    kernel_hang::RULE,
    p2p_cycle::RULE,
    out_of_step::RULE,
    order_mismatch::RULE,
    network_stall::RULE,
];

/// For rules that nobody mistakes for another.
fn never_mistaken(_: &Case<'_>, _: &[usize]) -> Option<String> {
    None
}
