//! Turns the timelines of the ranks of a job into traces for Perfetto and for the tools of
//! PyTorch's profiles, aligns the clocks of the nodes, and compares jobs.
//!
//! [`job::Job`] streams the files, so its memory does not depend on their length. Only [`cli`]
//! opens files; everything else reads and writes what it is given. The crate reads no clock.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod chrome;
pub mod cli;
pub mod clocks;
pub mod collectives;
pub mod comparison;
pub mod input;
pub mod job;
pub mod operations;
pub mod original;
pub mod perfetto;
pub mod picture;
pub mod profile;
