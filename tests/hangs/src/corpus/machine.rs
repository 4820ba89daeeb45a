//! What the machine does to a rank: file systems that stop answering, freezers, debuggers,
//! compilers, long imports.

use crate::{
    program::{Need, Program},
    scenario::{Scenario, job},
};

const IO: &[&str] = &["storage_io"];
const LOADER_IO: &[&str] = &["data_loader", "storage_io"];
const STOPPED: &[&str] = &["process_stopped"];
/// A pending SIGKILL makes the same wait uninterruptible.
const NOT_EVEN_KILLED: &[&str] = &["d_state", "storage_io"];
const COMPILE: &[&str] = &["compile"];
const LOCK: &[&str] = &["host_lock", "missing_rank"];
const BUSY: &[&str] = &["missing_rank", "long_step"];
const MISSING: &[&str] = &["missing_rank"];

/// What a function of `machine.py` does to a rank: its name, where it begins, world, rank, and what
/// is right.
const TROUBLES: &[(&str, &str, u32, u32, &[&str])] = &[
    ("fuse_read", "load", 4, 1, LOADER_IO),
    ("fuse_stat", "load", 4, 0, LOADER_IO),
    ("fuse_list", "layer", 6, 5, IO),
    ("fuse_write", "save", 4, 3, IO),
    ("fuse_close", "save", 8, 0, IO),
    ("fuse_sync", "save", 4, 2, IO),
    ("fuse_mapped", "layer", 4, 2, &["storage_io", "d_state", "missing_rank"]),
    ("fuse_import", "layer", 4, 1, IO),
    ("fuse_killed", "load", 4, 3, NOT_EVEN_KILLED),
    ("fuse_worker", "load", 4, 2, LOADER_IO),
    ("frozen_with_group", "layer", 8, 6, STOPPED),
    ("in_gdb", "layer", 4, 0, STOPPED),
    ("in_tracer", "load", 6, 2, STOPPED),
    ("in_strace", "load", 4, 3, IO),
    ("builds_extension", "layer", 4, 2, COMPILE),
    ("builds_with_shell", "layer", 4, 0, COMPILE),
    ("builds_in_pool", "layer", 6, 4, &["compile", "host_lock", "missing_rank"]),
    ("long_import", "layer", 4, 3, BUSY),
    ("import_twice", "layer", 4, 1, LOCK),
    ("full_queue", "save", 4, 2, LOCK),
    ("child_that_does_not_read", "load", 4, 1, &["storage_io", "missing_rank"]),
    ("name_server", "load", 4, 0, MISSING),
    ("handshake", "save", 4, 3, &["missing_rank", "storage_io"]),
];

pub fn scenarios() -> Vec<Scenario> {
    TROUBLES
        .iter()
        .map(|(trouble, place, world, rank, causes)| {
            let bug = format!("--bug={trouble}@{rank}");
            let name = format!("sharded-{}", trouble.replace('_', "-"));
            let scenario = job(&name, Program::Script("sharded.py"), *world, &[&bug, &format!("--at={place}")]);
            Scenario { need: need(trouble), ..scenario.is(causes, &[*rank]) }
        })
        .collect()
}

fn need(trouble: &str) -> Option<Need> {
    match trouble {
        "frozen_with_group" => Some(Need::Groups),
        "in_gdb" => Some(Need::Tool("gdb")),
        "in_strace" => Some(Need::Tool("strace")),
        _ => trouble.starts_with("fuse_").then_some(Need::Fuse),
    }
}
