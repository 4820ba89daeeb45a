//! The processes of this node to which a launcher gave a rank.

use std::fs;

use crate::kernel::procfs;

/// A process with a `RANK` in its environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RankedProcess {
    pub pid: i32,
    pub rank: u32,
    /// `WORLD_SIZE`, or 0.
    pub world_size: u32,
}

/// All processes with a rank, ascending by rank. If children inherited the rank, only the topmost
/// process counts.
pub(super) fn ranked() -> Vec<RankedProcess> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let all: Vec<RankedProcess> = pids.filter_map(rank_of).collect();
    let inherited = |process: &RankedProcess| {
        let parent = procfs::stat(process.pid).map_or(0, |stat| stat.parent);
        all.iter().any(|other| other.pid == parent && other.rank == process.rank)
    };
    let mut eldest: Vec<RankedProcess> = all.iter().copied().filter(|process| !inherited(process)).collect();
    eldest.sort_by_key(|process| (process.rank, process.pid));
    eldest
}

/// The rank of one process.
pub(super) fn rank_of(pid: i32) -> Option<RankedProcess> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let value = |name: &str| {
        let mut variables = environment.split(|byte| *byte == 0);
        let value = variables.find_map(|variable| variable.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
        std::str::from_utf8(value).ok()?.parse::<u32>().ok()
    };
    Some(RankedProcess { pid, rank: value("RANK")?, world_size: value("WORLD_SIZE").unwrap_or(0) })
}
