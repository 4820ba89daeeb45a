//! `.stacktrace` files in the format that the viewer reads, numbered by the ranks that launchers
//! gave to the processes.

use std::{
    collections::HashSet,
    fs,
    io::Write,
    iter,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use xpu_timer_proto::{
    Message, procfs,
    server::{ChildProcess, Stacktrace},
};

use crate::stacks::{FrameExpander, ProcessCapture, Stacks};

/// The output folder, and the numbers of the files.
pub(super) struct Files {
    folder: PathBuf,
    ranks: Vec<u32>,
    world: u32,
}

impl Files {
    /// One file for each process, numbered by rank. If a process has no rank, or two have the same
    /// rank (of two jobs), the files are numbered by their position in the list.
    pub fn new(folder: &Path, pids: &[i32]) -> Result<Self> {
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
    pub fn write(&self, index: usize, process: Stacks) -> Result<PathBuf> {
        let rank = self.ranks[index];
        let path = self.folder.join(format!("{rank:05}-{:05}.stacktrace", self.world));
        let unique = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let temporary = self.folder.join(format!(".{rank:05}.{}.{unique}", std::process::id()));
        // Everybody may be allowed to write to the folder, so an existing file or link of this name
        // is neither followed nor used.
        let file = fs::File::create_new(&temporary);
        let written = file.and_then(|mut file| file.write_all(&encode(process, rank)));
        if let Err(error) = written.and_then(|()| fs::rename(&temporary, &path)) {
            // The file may not even exist.
            let _ = fs::remove_file(&temporary);
            return Err(error).with_context(|| format!("cannot write {}", path.display()));
        }
        Ok(path)
    }
}

/// Encodes the [`Stacktrace`] of a process. Expanded frames need much more memory than
/// captured ones, so the threads are expanded and encoded one by one: messages that follow each
/// other are one message to a decoder.
fn encode(process: Stacks, rank: u32) -> Vec<u8> {
    let Stacks { pid, command, mut sample, places, frames, children, .. } = process;
    let mut bytes = Vec::new();
    let mut expander = FrameExpander::new(&places);
    let frames = frames.into_iter().chain(iter::repeat_with(Vec::new));
    for (mut thread, indices) in std::mem::take(&mut sample.stacktrace).into_iter().zip(frames) {
        expander.expand(&indices, &mut thread.frames);
        let part = Stacktrace { stacktrace: vec![thread], ..Stacktrace::default() };
        append(&part, &mut bytes);
        part.stacktrace.into_iter().for_each(|thread| expander.recycle(thread.frames));
    }
    let child = |child: Stacks| {
        let ProcessCapture { pid, parent_pid, command, sample, .. } = child.into();
        ChildProcess { pid, parent_pid, command, samples: vec![sample] }
    };
    let rest = Stacktrace {
        pid,
        rank: rank as i32,
        process_state: sample.process_state.clone(),
        command,
        children: children.into_iter().map(child).collect(),
        py_stacktrace: std::mem::take(&mut sample.py_stacktrace),
        last_sample: Some(sample),
        ..Stacktrace::default()
    };
    append(&rest, &mut bytes);
    bytes
}

fn append(message: &Stacktrace, bytes: &mut Vec<u8>) {
    message.encode(bytes).expect("a vector grows");
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
pub(super) fn ranked() -> Vec<RankedProcess> {
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
