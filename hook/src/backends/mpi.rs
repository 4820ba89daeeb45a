//! MPI: Open MPI, MPICH, or a library with the standard ABI of MPI 5 (layer E).
//!
//! Each function has two names. C programs and the Fortran interface of MPICH call `MPI_`; the
//! Fortran interface of Open MPI and profiling tools call `PMPI_`. A call inside a hooked call is
//! not recorded again.
//!
//! Not hooked: `MPI_Put` and similar calls, whose completion is hooked; independent reads of a
//! file; and statically linked MPI. A large-count form (`_c`) shares the row of the other form if
//! none of its counts is read; otherwise it is in [`large_count`].
//!
//! Arguments are untyped words: each is passed in an integer register or an eight-byte stack slot
//! and is passed on unchanged, so the types of the different ABIs do not matter.

#[allow(unsafe_code)]
pub(crate) mod collectives;
#[allow(unsafe_code)]
pub(crate) mod communicator;
#[allow(unsafe_code)]
pub(crate) mod creation;
#[allow(unsafe_code)]
pub(crate) mod duplicates;
#[allow(unsafe_code)]
pub(crate) mod large_count;
#[allow(unsafe_code)]
pub(crate) mod library;
pub(crate) mod nonblocking;
#[allow(unsafe_code)]
pub(crate) mod one_sided;
pub(crate) mod operations;
#[allow(unsafe_code)]
pub(crate) mod other_calls;
#[allow(unsafe_code)]
pub(crate) mod pending_duplicates;
#[allow(unsafe_code)]
pub(crate) mod persistent;
pub(crate) mod polling;
#[allow(unsafe_code)]
pub(crate) mod request;
#[allow(unsafe_code)]
pub(crate) mod testing;
#[allow(unsafe_code)]
pub(crate) mod transfers;
