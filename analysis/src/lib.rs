//! Pure logic of xpu_timer: rank sets, prefix trees, labels, collective matching, verdicts.
//!
//! The same input gives the same output, byte for byte: no I/O, no clock, no threads.
#![forbid(unsafe_code)]

pub mod folded;
pub mod prefix_tree;
pub mod rank_set;
