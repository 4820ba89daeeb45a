//! Pure logic of xpu_timer: rank sets, prefix trees, labels, collective matching, verdicts.
//!
//! The same input gives the same output, byte for byte. The crate does no I/O, reads no clock and
//! starts no threads.
#![forbid(unsafe_code)]

mod alias;
pub mod calibration;
mod case;
mod causes;
mod explanation;
mod facts;
mod finding;
pub mod folded;
mod graph;
pub mod groups;
mod history;
mod judge;
mod kernels;
mod known_defects;
pub mod main_thread;
mod matching;
pub mod prefix_tree;
pub mod rank_set;
mod report;
#[cfg(test)]
mod scenarios;
mod stacks;
mod store;
pub mod stragglers;
#[cfg(test)]
mod testing;
mod text;
pub mod throughput;
pub mod verdict;
mod wording;
mod world;

pub use facts::{condense, condense_process};
pub use judge::judge;
pub use report::communicator_groups;
pub use stacks::FREEZER_WCHAN;
pub use text::{communicator as communicator_name, operation_state, shape as operation_shape};
pub use verdict::{Activity, Cause, Confidence, HangEvidence, RankGroup, Status, Timing, Verdict, VerdictKind};
pub use world::{Exit, names_absent};
