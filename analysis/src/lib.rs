//! Pure logic of xpu_timer: rank sets, prefix trees, labels, collective matching, verdicts.
//!
//! The same input gives the same output, byte for byte: no I/O, no clock, no threads.
#![forbid(unsafe_code)]

pub mod folded;
mod judge;
pub mod prefix_tree;
pub mod rank_set;
mod text;
pub mod verdict;

pub use judge::judge;
pub use verdict::{Cause, Confidence, Status, Timing, Verdict};
