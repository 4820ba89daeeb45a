//! Every CPython that can be read: those of pyenv or the PATH, and the two of the second Debian.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use tempfile::TempDir;
use xpu_timer_proto::server::{PySpyFrame, PySpyStacktrace};
use xpu_timer_tests::{PATIENCE, Process, forky, only_child, python_version, run_in_forky, skip};

/// Versions that are installed on this machine.
pub const HOST: [&str; 6] = ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13"];
/// Versions that the second Debian has.
pub const FORKY: [&str; 2] = ["3.14", "3.15"];

/// One CPython.
pub struct Python {
    pub minor: u8,
    program: PathBuf,
    /// The root folder that it lives in, if that is not this one.
    root: Option<PathBuf>,
}

/// A script that runs and has said that it is ready.
pub struct Script {
    pub process: Process,
    /// The interpreter's, as this machine sees it.
    pub pid: i32,
    /// Path of the script, as the interpreter sees it.
    pub path: String,
    _folder: TempDir,
}

/// All versions that are there; the others are skipped out loud.
pub fn all() -> Vec<Python> {
    let minor = |version: &str| version.trim_start_matches("3.").parse().expect("a minor version");
    let mut found = Vec::new();
    for version in HOST {
        match python_version(version) {
            Some(program) => found.push(Python { minor: minor(version), program, root: None }),
            None => skip(&format!("CPython {version} is not installed")),
        }
    }
    match forky() {
        Ok(root) => found.extend(FORKY.map(|version| Python {
            minor: minor(version),
            program: format!("python{version}").into(),
            root: Some(root.clone()),
        })),
        Err(error) => skip(&format!("CPython {}: {error:#}", FORKY.join(" and "))),
    }
    found
}

impl Python {
    /// Runs a script until it says `ready`.
    pub fn start(&self, text: &str, arguments: &[&str]) -> Script {
        let folder = match &self.root {
            Some(root) => tempfile::tempdir_in(root.join("tmp")),
            None => tempfile::tempdir(),
        };
        let folder = folder.expect("a temporary folder");
        let file = folder.path().join("script.py");
        fs::write(&file, text).expect("the script can be written");
        let (path, mut command) = match &self.root {
            Some(root) => {
                let inside = Path::new("/").join(file.strip_prefix(root).expect("the folder lies in the root"));
                (inside, run_in_forky(root, &self.program))
            }
            None => (file, Command::new(&self.program)),
        };
        let mut process = Process::spawn(command.arg(&path).args(arguments));
        process.wait_for("ready", PATIENCE);
        let pid = match self.root {
            Some(_) => only_child(process.pid()).expect("the interpreter runs"),
            None => process.pid(),
        };
        Script { process, pid, path: path.display().to_string(), _folder: folder }
    }
}

impl Script {
    /// `name:line` of the frames that are in the script.
    pub fn own(&self, trace: &PySpyStacktrace) -> Vec<String> {
        trace.frames.iter().filter_map(|frame| self.own_frame(frame)).collect()
    }

    fn own_frame(&self, frame: &PySpyFrame) -> Option<String> {
        let line = frame.file_name.strip_prefix(&self.path)?;
        Some(format!("{}{line}", frame.func_name.rsplit('.').next().unwrap_or_default()))
    }
}

/// The id that a thread has in its own namespace of process ids.
pub fn own_tid(tid: u32) -> u32 {
    let status = fs::read_to_string(format!("/proc/{tid}/status")).unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    ids.and_then(|ids| ids.split_whitespace().next_back()?.parse().ok()).unwrap_or(tid)
}
