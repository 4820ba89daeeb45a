//! Faults and attacks as real processes, and the promise that must hold under each: `cargo xtask
//! chaos`.
//!
//! `faults/` contains the faults, in Python: one function each, with its promise. This crate gives
//! each fault its own [`Job`] (folder, ports, environment), runs it with a deadline, ends
//! everything that it started, and prints the table. `docs/faults.md` is generated from the same
//! table.
//!
//! [`Job`]: xpu_timer_tests::Job
#![forbid(unsafe_code)]

mod run;
mod table;

pub use run::{Options, run};
pub use table::{Fault, faults, page};
