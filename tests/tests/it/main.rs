//! All integration tests in one binary: one module an area.
#![allow(clippy::unwrap_used, reason = "all of this is test code, its helper functions too")]

mod capture;
mod cluster;
mod cluster_docs;
mod collector;
mod collector_lifetime;
mod coverage;
mod dump;
mod end_to_end;
mod failures;
mod gloo;
mod guest;
mod hook;
mod hostile_text;
mod installed;
mod isolation;
mod jobs;
mod launch;
mod metrics;
mod mpi;
mod namespaces;
mod print_env;
mod ptracer;
mod report;
mod silent;
mod sim;
mod timeline;
mod torch;
mod traces;
mod tracing;
mod viewer;
