//! The libraries whose calls are recorded. For each there are tables of hooked functions, and the
//! meaning of their calls.

#[allow(unsafe_code)]
pub(crate) mod blas;
pub(crate) mod bracket;
pub(crate) mod cuda;
#[allow(unsafe_code)]
pub(crate) mod gloo;
pub(crate) mod host_call;
pub(crate) mod mpi;
pub(crate) mod nccl;
pub(crate) mod request_table;
