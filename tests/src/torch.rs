//! PyPI's PyTorch, the CUDA build, in a virtual environment under `target/torch-venv`: 5.4 GB, so only `cargo xtask test --torch`
//! sets it up.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};

/// Newer ones work as well until a test shows that they do not; the version is fixed so that a failure is ours.
const VERSION: &str = "torch==2.15.0";

/// The Python of the environment, which is set up when it is not there.
///
/// # Errors
/// When there is no python3 with venv, or PyPI cannot be reached.
pub fn torch_venv() -> Result<PathBuf> {
    let folder = crate::tree().join("target/torch-venv");
    let python = folder.join("bin/python3");
    let run = |command: &mut Command| -> Result<()> {
        let status = command.status().with_context(|| format!("{command:?}"))?;
        ensure!(status.success(), "{command:?}: {status}");
        Ok(())
    };
    if !python.exists() {
        run(Command::new(crate::python()).args(["-m", "venv"]).arg(&folder))?;
    }
    // Looking the module up is much faster than importing it.
    let find = ["-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"];
    if !Command::new(&python).args(find).status().is_ok_and(|status| status.success()) {
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--no-input", VERSION, "numpy"]))?;
    }
    Ok(python)
}
