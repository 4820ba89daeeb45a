//! Every CPython that can be read: those of pyenv or the PATH, and the two of the second Debian.
//! The offsets of their structures are those of their headers.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use tempfile::TempDir;
use xpu_timer_proto::{
    procfs,
    server::{PySpyFrame, PySpyStacktrace},
};
use xpu_timer_tests::{
    PATIENCE, Process, compile_c, forky, forky_headers, only_child, python_version, run_in_forky, skip, tree,
};

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
    /// Runs a script until it prints `ready`.
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
    let status = procfs::status_text(tid).unwrap_or_default();
    let ids = procfs::field(&status, "NSpid:");
    ids.and_then(|ids| ids.split_whitespace().next_back()?.parse().ok()).unwrap_or(tid)
}

/// The beginning of the table of offsets.
const HEAD: &str = "\
//! Printed by `layouts.c` for each CPython; `cargo xtask bless` rewrites it.

use super::{DebugOffsets, Layout};

";

/// Folders with the headers of a version.
fn headers(version: &str) -> Result<Vec<PathBuf>, String> {
    let name = format!("python{version}");
    if FORKY.contains(&version) {
        let root = forky_headers().map_err(|error| format!("headers of CPython {version}: {error:#}"))?;
        let include = root.join("usr/include");
        return Ok(vec![include.join(&name), include.clone(), include.join("x86_64-linux-gnu")]);
    }
    let python = python_version(version).ok_or_else(|| format!("CPython {version} is not installed"))?;
    let mut ask = Command::new(python);
    ask.args(["-c", "import sysconfig; print(sysconfig.get_path('include'))"]);
    let folder = PathBuf::from(Process::spawn(&mut ask).wait(PATIENCE).stdout.trim());
    if folder.join("internal/pycore_pystate.h").exists() {
        Ok(vec![folder])
    } else {
        Err(format!("CPython {version} has no headers in {}", folder.display()))
    }
}

/// One element of the table.
fn printed(source: &str, version: &str) -> Result<String, String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut flags = vec!["-w".to_string()];
    for path in headers(version)? {
        flags.push(format!("-I{}", path.display()));
        flags.push(format!("-I{}", path.join("internal").display()));
    }
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let program = compile_c(folder.path(), "layouts", source, &flags);
    let output = Process::spawn(&mut Command::new(program)).wait(PATIENCE);
    let lines: String = output.stdout.lines().map(|line| format!("    {line}\n")).collect();
    Ok(format!("    Layout {{\n{lines}    }},\n"))
}

/// `cargo xtask bless` (BLESS=1) rewrites the table.
#[test]
fn layouts_are_those_of_the_headers() {
    let folder = tree().join("collector/capture/src/cpython");
    let source = fs::read_to_string(folder.join("layouts.c")).expect("the program that prints them");
    let table = folder.join("layouts.rs");
    let old = fs::read_to_string(&table).expect("the table");
    let versions: Vec<&str> = HOST.into_iter().chain(FORKY).collect();
    let mut new = format!("{HEAD}pub(super) static LAYOUTS: [Layout; {}] = [\n", versions.len());
    let mut blocks = old.split_inclusive("\n    },\n").map(|block| &block[block.find("    Layout {").unwrap_or(0)..]);
    for version in versions {
        let known = blocks.next().unwrap_or_default();
        match printed(&source, version) {
            Ok(block) => new += &block,
            Err(reason) => {
                skip(&reason);
                new += known;
            }
        }
    }
    new += "];\n";
    if std::env::var_os("BLESS").is_some() {
        fs::write(&table, new).expect("the table can be written");
    } else {
        assert!(old == new, "{} is stale: run `cargo xtask bless`", table.display());
    }
}
