//! The capture of one process.

mod capture;
pub(crate) mod job;
pub(crate) mod places;
pub(crate) mod raw;
mod running;
pub(crate) mod worker;
