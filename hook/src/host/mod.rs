//! Layer E: collectives that the host itself runs, MPI and gloo. They need no device; a call that does not return is the hang.
//!
//! [`open`] keeps the operations that a host thread is inside of; what a library's calls mean is in the modules beside it.

pub mod mpi;
pub mod open;

use crate::original::Function;

/// The tables of hooked functions.
pub const TABLES: [&[&Function]; 2] = [mpi::FUNCTIONS, mpi::large::FUNCTIONS];
