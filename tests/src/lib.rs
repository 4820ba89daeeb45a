//! Harness of the integration tests and of `cargo xtask demo`: built artifacts, jobs in their own
//! folders, child processes that are killed on drop, and waits with a deadline.
#![deny(unsafe_code)]

mod archive;
mod artifacts;
mod commands;
mod distribution;
mod fake_collector;
mod forky;
mod glibc;
mod job;
mod mpi;
mod needs;
mod process;
mod set_up;
mod tools;
mod torch;

pub use archive::{read_archive, write_archive};
pub use artifacts::{Artifacts, INSTALLED, PACKAGES, artifacts};
pub use distribution::{copy_stripped, write_wheel};
pub use fake_collector::{FakeCollector, RECONNECT, ReadMode};
pub use forky::{apt_get, forky, forky_headers, forky_with_torch, only_child, run_in_forky};
pub use glibc::old_enough;
pub use job::{Incident, Job, LAUNCHED_BY};
pub use mpi::PypiMpi;
pub use needs::{DEBIAN_PYTHON, NEEDS, Need, lacks, missing};
pub use process::{Output, Process};
pub use tools::{
    PATIENCE, compile_c, http, in_parallel, processes_with, python, python_version, skip, tree, wait_until,
};
pub use torch::PypiTorch;
