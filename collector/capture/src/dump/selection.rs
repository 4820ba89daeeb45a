//! The processes that a command line selects, their ranks, and the files that are named after them.

use std::{
    collections::HashSet,
    fs,
    io::Write,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail};
use xpu_timer_proto::procfs;

/// The processes that a command is about.
#[derive(Debug, Clone, Default, clap::Args)]
#[group(required = true, multiple = true)]
pub(super) struct Processes {
    /// A process; may be repeated
    #[arg(long, short, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pid: Vec<i32>,
    /// The process whose environment has this RANK; may be repeated
    #[arg(long, value_name = "RANK")]
    rank: Vec<u32>,
    /// Every process on this node that has a RANK
    #[arg(long)]
    all: bool,
}

impl Processes {
    /// The processes that the command line selects, each once.
    pub(super) fn pids(&self) -> Result<Vec<i32>> {
        let mut pids = self.pid.clone();
        let ranked = if self.all || !self.rank.is_empty() { ranked() } else { Vec::new() };
        for rank in &self.rank {
            let found = ranked.iter().filter(|process| process.rank == *rank).map(|process| process.pid);
            let before = pids.len();
            pids.extend(found);
            if pids.len() == before {
                bail!("no process on this node has RANK={rank} in its environment");
            }
        }
        if self.all {
            pids.extend(ranked.iter().map(|process| process.pid));
        }
        let mut seen = HashSet::new();
        pids.retain(|pid| seen.insert(*pid));
        if pids.is_empty() {
            bail!("no process on this node has a RANK in its environment");
        }
        Ok(pids)
    }
}

/// Parses a number of seconds.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_string())?;
    Duration::try_from_secs_f64(seconds).map_err(|_| "not a number of seconds".to_string())
}

/// The output folder, and the numbers of the files.
pub(super) struct Files {
    folder: PathBuf,
    ranks: Vec<u32>,
    world: u32,
}

impl Files {
    /// One file for each process, numbered by rank. If a process has no rank, or two have the same
    /// rank (of two jobs), the files are numbered by their position in the list.
    pub(super) fn new(folder: &Path, pids: &[i32]) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot create the folder {}", folder.display()))?;
        let ranks: Vec<Option<RankedProcess>> = pids.iter().map(|pid| rank_of(*pid)).collect();
        let largest = ranks
            .iter()
            .flatten()
            .map(|ranked| ranked.world_size.max(ranked.rank.saturating_add(1)))
            .max()
            .unwrap_or(0);
        let all: Option<Vec<u32>> = ranks.iter().map(|ranked| ranked.as_ref().map(|ranked| ranked.rank)).collect();
        let distinct = |ranks: &Vec<u32>| ranks.iter().collect::<HashSet<_>>().len() == ranks.len();
        let ranks = all.filter(distinct).unwrap_or_else(|| (0..pids.len() as u32).collect());
        Ok(Files { folder: folder.into(), ranks, world: largest.max(pids.len() as u32) })
    }

    /// Writes the file of the process at this position in the list.
    pub(super) fn write(&self, index: usize, extension: &str, encode: impl FnOnce(u32) -> Vec<u8>) -> Result<PathBuf> {
        let rank = self.ranks[index];
        let path = self.folder.join(format!("{rank:05}-{:05}.{extension}", self.world));
        let unique = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let temporary = self.folder.join(format!(".{rank:05}.{}.{unique}", std::process::id()));
        // Everybody may be allowed to write to the folder, so an existing file or link of this name
        // is neither followed nor used.
        let file = fs::File::create_new(&temporary);
        let written = file.and_then(|mut file| file.write_all(&encode(rank)));
        if let Err(error) = written.and_then(|()| fs::rename(&temporary, &path)) {
            // The file may not even exist.
            let _ = fs::remove_file(&temporary);
            return Err(error).with_context(|| format!("cannot write {}", path.display()));
        }
        Ok(path)
    }
}

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
fn ranked() -> Vec<RankedProcess> {
    let all: Vec<RankedProcess> = procfs::pids().filter_map(rank_of).collect();
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
    let environment = procfs::environ(pid).ok()?;
    let value = |name: &str| std::str::from_utf8(procfs::variable(&environment, name)?).ok()?.parse::<u32>().ok();
    Some(RankedProcess { pid, rank: value("RANK")?, world_size: value("WORLD_SIZE").unwrap_or(0) })
}
