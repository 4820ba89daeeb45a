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
    /// What follows after `rank 2`, and what follows after `ranks 2, 5`; who waits where is added.
    Rank {
        /// Of one rank.
        one: String,
        /// Of several of which the same is to be said.
        many: String,
    },
    /// The whole sentence.
    Whole(String),
}

impl Says {
    /// What is said of a rank, in words that agree with the number of ranks.
    pub fn rank(text: impl Fn(Number) -> String) -> Self {
        Says::Rank { one: text(Number::One), many: text(Number::Many) }
    }
}

/// Whether one rank is spoken of or several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Number {
    One,
    Many,
}

impl Number {
    /// That of so many ranks.
    pub fn of(count: usize) -> Self {
        if count == 1 { Number::One } else { Number::Many }
    }

    /// The word for one or that for several.
    pub fn word(self, one: &'static str, many: &'static str) -> &'static str {
        match self {
            Number::One => one,
            Number::Many => many,
        }
    }

    pub fn is(self) -> &'static str {
        self.word("is", "are")
    }

    pub fn has(self) -> &'static str {
        self.word("has", "have")
    }

    pub fn its(self) -> &'static str {
        self.word("its", "their")
    }

    /// What waits, as a verb.
    pub fn waits(self) -> &'static str {
        self.word("waits", "wait")
    }
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
