//! The causes of a hang. Each cause has its own file, whose module documentation states the rule in
//! prose.
//!
//! To add a cause, write a file with a `RULE` and add: a line in [`RULES`], a variant of `Cause`, a
//! row in `docs/verdict.md`, scenarios in which it is the cause, and scenarios in which another
//! cause looks like it. A rule explains a suspect or leaves it to the next rule. The first rule
//! that explains a suspect wins, so the order of the list is part of the rules.

mod case;
mod collective;
mod comm_init;
mod compile;
mod d_state;
mod data_loader;
mod death;
mod dtype_mismatch;
mod extra_collective;
mod gil_deadlock;
mod holds_resource;
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
mod pattern_break;
mod process_dead;
mod process_stopped;
mod python_gc;
mod rule;
mod size_mismatch;
mod storage_io;
mod teardown;
mod wait_cycle;
mod wording;

pub(crate) use case::Case;
pub(crate) use death::{ended_by_agent, ended_by_signal};
pub(crate) use missing_rank::alone_in;
pub(crate) use rule::{Finding, Rule, Statement};
pub(crate) use wording::{Number, line};

/// All rules. A reason why a rank cannot run comes before what the rank was doing, and a specific
/// cause before a general one.
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
    holds_resource::LOCK,
    holds_resource::PEER,
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
