//! Harness of the integration tests and of `cargo xtask demo`: built artifacts, jobs in their own
//! folders, child processes that are killed on drop, and waits with a deadline.
#![deny(unsafe_code)]

mod archive;
mod artifacts;
mod fake_collector;
mod forky;
mod job;
mod needs;
mod packages;
mod process;
mod pypi;
mod timelines;
mod tools;

pub use archive::{fuzz_corpus, keep_fuzz_corpus, rank6_dumps, read_archive, write_archive, write_files};
pub use artifacts::{Artifacts, INSTALLED, artifacts, copy_stripped, old_enough, write_wheel};
pub use fake_collector::{FakeCollector, RECONNECT, ReadMode};
pub use forky::{
    apt_get, forky, forky_headers, forky_packages, forky_python, forky_with_torch, free_threaded_python, only_child,
    run_in_forky,
};
pub use job::{Incident, Job, LAUNCHED_BY, end_jobs_on_signal};
pub use needs::{DEBIAN_PYTHON, NEEDS, Need, lacks, missing};
pub use packages::PACKAGES;
pub use process::{Output, Process, copy_program};
pub use pypi::{GEVENT, PypiFramework, PypiMpi, PypiTorch, TRIO, python_with};
pub use timelines::{Hang, Timelines};
pub use tools::{
    PATIENCE, compile_c, has_variable, http, idle_library, in_parallel, processes_with, python, python_version, skip,
    tree, wait_until,
};
