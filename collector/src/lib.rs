//! The node collector: ranks register here, hangs become incidents, incidents become folders with a verdict.
//!
//! [`node::run`] is the program. The state lives in [`core`] and is owned by one thread; what takes long (a dump, an HTTP request)
//! runs beside it and talks to it by messages.
#![deny(unsafe_code)]

pub mod captures;
pub mod cli;
pub mod clock;
pub mod cluster;
pub mod config;
pub mod connections;
pub mod core;
pub mod delivery;
pub mod disk;
pub mod dump;
pub mod error;
pub mod evidence;
pub mod folder;
pub mod http;
pub mod inbox;
pub mod incident;
pub mod incidents;
pub mod jobs;
pub mod json;
pub mod judging;
pub mod launched;
pub mod logging;
pub mod member;
mod memory;
pub mod metrics;
pub mod monitor;
pub mod node;
pub mod pace;
pub mod pages;
mod pidfd;
pub mod process;
pub mod records;
pub mod registry;
pub mod retention;
pub mod ring_file;
pub mod routes;
pub mod safe_path;
pub mod slow;
pub mod socket;
pub mod status;
pub mod subjects;
pub mod supervisor;
pub mod throttle;
pub mod token;
pub mod uplink;
pub mod viewer;
mod web_client;
pub mod webhook;
pub mod writing;

pub use error::Error;
