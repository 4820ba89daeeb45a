//! The libraries whose calls are recorded. For each there are tables of hooked functions, and the
//! meaning of their calls.

#[allow(unsafe_code)]
pub(crate) mod blas;
pub(crate) mod bracket;

/// CUDA and the runtimes of AMD and MetaX: launches, graphs, copies and allocations.
pub(crate) mod cuda {
    #[allow(unsafe_code)]
    pub(crate) mod attention;
    #[allow(unsafe_code)]
    pub(crate) mod functions;
    #[allow(unsafe_code)]
    pub(crate) mod graphs;
    #[allow(unsafe_code)]
    pub(crate) mod memory;
    #[allow(unsafe_code)]
    pub(crate) mod proc_address;
}

#[allow(unsafe_code)]
pub(crate) mod gloo;
pub(crate) mod host_call;

/// MPI: Open MPI, MPICH, or a library with the standard ABI of MPI 5 (layer E).
///
/// Each function has two names. C programs and the Fortran interface of MPICH call `MPI_`; the
/// Fortran interface of Open MPI and profiling tools call `PMPI_`. A call inside a hooked call is
/// not recorded again.
///
/// Not hooked: `MPI_Put` and similar calls, whose completion is hooked; independent reads of a
/// file; and statically linked MPI. A large-count form (`_c`) shares the row of the other form if
/// none of its counts is read; otherwise it is in [`mpi::large_count`].
///
/// Arguments are untyped words: each is passed in an integer register or an eight-byte stack slot
/// and is passed on unchanged, so the types of the different ABIs do not matter.
pub(crate) mod mpi {
    #[allow(unsafe_code)]
    pub(crate) mod collectives;
    #[allow(unsafe_code)]
    pub(crate) mod communicator;
    #[allow(unsafe_code)]
    pub(crate) mod creation;
    #[allow(unsafe_code)]
    pub(crate) mod large_count;
    #[allow(unsafe_code)]
    pub(crate) mod library;
    #[allow(unsafe_code)]
    pub(crate) mod nonblocking;
    #[allow(unsafe_code)]
    pub(crate) mod one_sided;
    pub(crate) mod operations;
    pub(crate) mod polling;
    #[allow(unsafe_code)]
    pub(crate) mod request;
    #[allow(unsafe_code)]
    pub(crate) mod transfers;
}

/// NCCL and the other collective libraries of device vendors (layer A).
pub(crate) mod nccl {
    pub(crate) mod collective;
    #[allow(unsafe_code)]
    pub(crate) mod communicator;
    #[allow(unsafe_code)]
    pub(crate) mod creation;
    #[allow(unsafe_code)]
    pub(crate) mod functions;
    pub(crate) mod group;
}

pub(crate) mod request_table;
