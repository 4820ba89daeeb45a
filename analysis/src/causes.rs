//! The causes of a hang. Each file has the rules of one matter. The documentation of a rule states
//! it in prose.
//!
//! To add a cause, write a [`Rule`] and add: a line in [`RULES`], a variant of `Cause`, a variant
//! of `Explanation` and its sentence in `wording`, a row in `docs/verdict.md`, scenarios in which
//! it is the cause, and scenarios in which another cause looks like it. A rule explains a suspect
//! or leaves it to the next rule. The first rule that explains a suspect wins, so the order of the
//! list is part of the rules. The rules make no text, so no file here imports `wording`.

mod behind_process;
mod collective;
mod comm_init;
mod halted;
mod host_wait;
mod kernel_hang;
mod mismatch;
mod missing_rank;
mod network_stall;
mod p2p;
mod progress;
mod teardown;
mod wait_cycle;

use crate::finding::Rule;

pub(crate) use halted::{ended_by_agent, ended_by_signal};
pub(crate) use missing_rank::alone_in;

/// All rules. A reason why a rank cannot run comes before what the rank was doing, and a specific
/// cause before a general one.
pub(crate) const RULES: &[Rule] = &[
    mismatch::OPERATION,
    mismatch::KERNEL,
    mismatch::TYPE,
    mismatch::SIZE,
    missing_rank::EXTRA_COLLECTIVE,
    halted::DEAD,
    halted::STOPPED,
    halted::D_STATE,
    behind_process::RANK_CYCLE,
    behind_process::DEAD,
    behind_process::STOPPED,
    behind_process::D_STATE,
    behind_process::GIL_DEADLOCK,
    behind_process::STORAGE_IO,
    behind_process::LONG_STEP,
    behind_process::HOST_LOCK,
    behind_process::ELSEWHERE,
    host_wait::GIL_DEADLOCK,
    host_wait::DATA_LOADER,
    progress::COMPILE,
    progress::PYTHON_GC,
    host_wait::STORAGE_IO,
    teardown::RULE,
    progress::LONG_STEP,
    host_wait::LOCK_HOLDER,
    host_wait::PEER_HOLDER,
    host_wait::HOST_LOCK,
    comm_init::STORE_KEY,
    comm_init::RULE,
    p2p::UNMATCHED,
    missing_rank::FEWER_LAUNCHES,
    missing_rank::ABSENT,
    kernel_hang::RULE,
    p2p::CYCLE,
    missing_rank::OUT_OF_STEP,
    wait_cycle::ORDER_MISMATCH,
    network_stall::RULE,
];
