//! Finds the parts of xpu_timer by the rules with which they find each other.

use std::path::{Path, PathBuf};

use crate::{collector, config::Config, preload};

/// A part and its path, or why it has none.
#[derive(Debug)]
pub struct Part {
    /// Its name.
    pub name: &'static str,
    /// Its path.
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
