//! All integration tests in one binary: one module an area.
#![allow(clippy::unwrap_used, reason = "all of this is test code, its helper functions too")]

mod capture;
mod cluster;
mod collector;
mod coverage;
mod dump;
mod end_to_end;
mod failures;
mod gloo;
mod guest;
mod hook;
mod installed;
mod jobs;
mod launch;
mod lives;
mod metrics;
mod mpi;
mod namespaces;
mod print_env;
mod ptracer;
mod report;
mod silent;
mod sim;
mod strangers;
mod text_of_others;
mod timeline;
mod torch;
mod traces;
mod tracing;
mod viewer;
mod walk;
