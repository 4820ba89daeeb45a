//! The commands that talk to a collector, and the notifications that a collector sends.

pub(crate) mod incidents;
pub(crate) mod web_client;
pub(crate) mod webhook;
