//! TODO

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
