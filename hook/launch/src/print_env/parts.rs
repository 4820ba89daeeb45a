//! Where the parts of xpu_timer are, by the rules by which they find each other.

use std::path::{Path, PathBuf};

use crate::{collector, config::Config, preload};

/// A part and its place, or why it has none.
#[derive(Debug)]
pub struct Part {
    /// What it is.
    pub name: &'static str,
    /// Where it is.
    pub place: Result<PathBuf, String>,
}

/// The parts that a job needs. The collector looks for the viewer beside itself.
pub fn all(config: &Config) -> Vec<Part> {
    let hook = preload::find(config).map_err(|error| format!("{error:#}"));
    let daemon = collector::find(config).map_err(|error| format!("{error:#}")).and_then(there);
    let beside = |program: &Path| program.with_file_name("xpu_timer_stacktrace_viewer");
    let viewer = match &daemon {
        Ok(daemon) => there(beside(daemon)),
        Err(_) => Err("it is looked for beside the collector, which is not there".into()),
    };
    vec![
        Part { name: "hook", place: hook },
        Part { name: "collector", place: daemon },
        Part { name: "viewer", place: viewer },
    ]
}

fn there(path: PathBuf) -> Result<PathBuf, String> {
    if path.is_file() { Ok(path) } else { Err(format!("{} is not there", path.display())) }
}
