//! `.stacktrace` files, as the viewer reads them.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use xpu_timer_proto::{
    Message,
    server::{ChildProcess, ProcessSample, Stacktrace},
};

use super::find;
use crate::ProcessCapture;

/// Writes one file for each process. A process without a rank is numbered by its place in the list.
pub(super) fn write(folder: &Path, captured: &[ProcessCapture]) -> Result<Vec<PathBuf>> {
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let ranks: Vec<Option<find::Ranked>> = captured.iter().map(|process| find::rank_of(process.pid)).collect();
    let largest = ranks.iter().flatten().map(|ranked| ranked.world_size.max(ranked.rank + 1)).max().unwrap_or(0);
    let world = largest.max(captured.len() as u32);
    let mut written = Vec::new();
    for (index, process) in captured.iter().enumerate() {
        let rank = if ranks.iter().all(Option::is_some) { ranks[index].map(|ranked| ranked.rank) } else { None };
        let rank = rank.unwrap_or(index as u32);
        let path = folder.join(format!("{rank:05}-{world:05}.stacktrace"));
        let unique = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let temporary = folder.join(format!(".{rank:05}.{}.{unique}", std::process::id()));
        fs::write(&temporary, message(process, rank).encode_to_vec())
            .with_context(|| temporary.display().to_string())?;
        fs::rename(&temporary, &path).with_context(|| path.display().to_string())?;
        written.push(path);
    }
    Ok(written)
}

fn message(process: &ProcessCapture, rank: u32) -> Stacktrace {
    let sample = process.sample.clone();
    let child = |child: &ProcessCapture| ChildProcess {
        pid: child.pid,
        parent_pid: child.parent_pid,
        command: child.command.clone(),
        samples: vec![child.sample.clone()],
    };
    Stacktrace {
        pid: process.pid,
        rank: rank as i32,
        process_state: sample.process_state.clone(),
        command: process.command.clone(),
        children: process.children.iter().map(child).collect(),
        stacktrace: sample.stacktrace,
        py_stacktrace: sample.py_stacktrace,
        last_sample: Some(ProcessSample {
            stacktrace: Vec::new(),
            py_stacktrace: Vec::new(),
            ..process.sample.clone()
        }),
        ..Stacktrace::default()
    }
}
