//! The collector: ranks register here, hangs become incidents, and incidents become folders with a
//! verdict.
//!
//! [`node`] is the collector of one node, [`cluster`] that of a cluster. Neither uses the other.
//! Both use the modules below them: [`incident`], [`http`], [`metrics`], [`timeline`],
//! [`client`], [`job`] and [`os`].
#![deny(unsafe_code)]
#![warn(unreachable_pub)]

pub mod cli;
pub mod client;
pub mod cluster;
pub mod config;
mod error;
pub mod http;
pub mod incident;
mod job;
mod json;
mod logging;
mod metrics;
pub mod node;
pub mod os;
mod timeline;

pub use error::Error;
