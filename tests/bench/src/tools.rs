//! The tools with which the capture is compared: found, installed, or reported as missing in one
//! line.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use xpu_timer_tests::{apt_get, tree};

/// The paths of the tools.
pub struct Tools {
    pub gdb: PathBuf,
    pub eu_stack: PathBuf,
    pub py_spy: PathBuf,
    pub pystack: PathBuf,
    /// The python3 of the machine's Debian, with its torch.
    pub torch_python: PathBuf,
    /// `xpu_timer_dump` of this build.
    pub dump: PathBuf,
}

impl Tools {
    /// Finds all tools, and installs missing ones if permitted.
    pub fn set_up() -> Result<Self> {
        let torch_python = PathBuf::from("/usr/bin/python3");
        let gdb = debian("gdb", "gdb")?;
        let eu_stack = debian("eu-stack", "elfutils")?;
        if !has_torch(&torch_python) {
            apt_get(&["update", "-qq"])?;
            apt_get(&["install", "-y", "-qq", "--no-install-recommends", "python3-torch"])?;
            ensure!(
                has_torch(&torch_python),
                "python3-torch is missing; install it with: apt-get install python3-torch"
            );
        }
        let venv = venv(&tree().join("target/bench-venv"))?;
        let exe = std::env::current_exe()?;
        let dump = exe.with_file_name("xpu_timer_dump");
        ensure!(
            dump.exists(),
            "{} is missing: build it with cargo build --release -p xpu_timer_capture",
            dump.display()
        );
        Ok(Tools { gdb, eu_stack, py_spy: venv.join("py-spy"), pystack: venv.join("pystack"), torch_python, dump })
    }

    /// One line with the versions, without which a comparison is worthless.
    pub fn versions(&self) -> String {
        let tools = [&self.gdb, &self.eu_stack, &self.py_spy, &self.pystack];
        let first_line = |tool: &&PathBuf| -> Option<String> {
            let output = Command::new(tool).arg("--version").output().ok()?;
            Some(String::from_utf8_lossy(&output.stdout).lines().next()?.to_string())
        };
        tools.iter().filter_map(first_line).collect::<Vec<_>>().join("; ")
    }
}

fn debian(program: &str, package: &str) -> Result<PathBuf> {
    let path = Path::new("/usr/bin").join(program);
    if !path.exists() {
        apt_get(&["update", "-qq"])?;
        apt_get(&["install", "-y", "-qq", "--no-install-recommends", package])?;
    }
    if !path.exists() {
        bail!("{program} is missing; install it with: apt-get install {package}");
    }
    Ok(path)
}

fn has_torch(python: &Path) -> bool {
    // Finding the module is much faster than importing it.
    let find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)";
    Command::new(python).args(["-c", find]).status().is_ok_and(|status| status.success())
}

fn venv(folder: &Path) -> Result<PathBuf> {
    let bin = folder.join("bin");
    if !bin.join("py-spy").exists() || !bin.join("pystack").exists() {
        run(Command::new(xpu_timer_tests::python()).args(["-m", "venv"]).arg(folder))?;
        run(Command::new(bin.join("pip")).args(["install", "--quiet", "py-spy", "pystack"]))?;
    }
    Ok(bin)
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}", words.trim_end().lines().next_back().unwrap_or_default());
    Ok(())
}
