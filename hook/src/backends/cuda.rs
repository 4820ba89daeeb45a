//! CUDA and the runtimes of AMD and MetaX: launches, graphs, copies and allocations.

#[allow(unsafe_code)]
pub(crate) mod driver_api;
#[allow(unsafe_code)]
pub(crate) mod graphs;
#[allow(unsafe_code)]
pub(crate) mod hip_maca;
pub(crate) mod launch;
#[allow(unsafe_code)]
pub(crate) mod memory;
#[allow(unsafe_code)]
pub(crate) mod proc_address;
#[allow(unsafe_code)]
pub(crate) mod runtime_api;
