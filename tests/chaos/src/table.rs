//! The table of all faults, from `faults/`.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use xpu_timer_tests::{python, tree};

/// A fault and its promise.
#[derive(Debug, Clone, Deserialize)]
pub struct Fault {
    /// Unique; words joined by `-`.
    pub name: String,
    /// The file in `faults/` that contains it.
    pub area: String,
    /// What goes wrong.
    pub fault: String,
    /// What must hold.
    pub promise: String,
    /// It uses random moments, so a long run repeats it.
    pub chance: bool,
}

/// The program that lists the faults and runs them.
pub(crate) fn program() -> PathBuf {
    tree().join("tests/chaos/faults")
}

/// All faults, ordered by area.
///
/// # Errors
/// python3 cannot list them.
pub fn faults() -> Result<Vec<Fault>> {
    let mut command = Command::new(python());
    command.arg("-B").arg(program()).arg("--list");
    let output = command.output().context("python3 cannot be run")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("the list of faults")
}
