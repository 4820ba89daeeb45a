//! The table of all faults, from `faults/`, and `docs/faults.md`, which is generated from it.

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

/// The page `docs/faults.md`.
#[must_use]
pub fn page(faults: &[Fault]) -> String {
    let row = |fault: &Fault| format!("| {} | {} | `{}` |\n", cell(&fault.fault), cell(&fault.promise), fault.name);
    include_str!("../page.md").replace("{table}\n", &(faults.iter().map(row).collect::<String>() + "\n"))
}

/// A text as a table cell.
pub(crate) fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs};

    use super::*;

    #[test]
    fn the_page_is_made_from_the_table() {
        let path = tree().join("docs/faults.md");
        let page = page(&faults().unwrap());
        if std::env::var_os("BLESS").is_some() {
            fs::write(&path, &page).unwrap();
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(found == page, "docs/faults.md is out of date: cargo xtask bless writes it");
    }

    #[test]
    fn every_fault_has_a_name_of_its_own_and_a_promise() {
        let faults = faults().unwrap();
        let names: BTreeSet<&str> = faults.iter().map(|fault| fault.name.as_str()).collect();
        assert!(names.len() == faults.len() && faults.len() > 106, "{}", faults.len());
        assert!(faults.iter().all(|fault| !fault.fault.is_empty() && !fault.promise.is_empty()));
    }
}
