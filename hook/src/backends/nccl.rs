//! NCCL and the other collective libraries of device vendors (layer A).

#[allow(unsafe_code)]
pub(crate) mod async_error;
pub(crate) mod collective;
#[allow(unsafe_code)]
pub(crate) mod communicator;
#[allow(unsafe_code)]
pub(crate) mod creation;
#[allow(unsafe_code)]
pub(crate) mod functions;
pub(crate) mod group;
pub(crate) mod group_queue;
#[allow(unsafe_code)]
pub(crate) mod hccl_cncl;
#[allow(unsafe_code)]
pub(crate) mod library_calls;
#[allow(unsafe_code)]
pub(crate) mod newer_functions;
pub(crate) mod teardown;
