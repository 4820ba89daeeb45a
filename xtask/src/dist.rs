//! `cargo xtask dist`: packs the installed files of a node into an archive and a Python wheel.

use std::{fs, process::Command};

use anyhow::{Context, Result};
use xpu_timer_tests::{copy_stripped, tree, write_wheel};

use crate::shell::{self, cargo, need};

/// The packages of the installed files.
const PACKAGES: [&str; 6] = ["hook", "launch", "capture", "collector", "timeline", "viewer"];

pub(crate) fn run() -> Result<()> {
    need(&["binutils"])?;
    let packages = PACKAGES.iter().flat_map(|name| ["-p".to_string(), format!("xpu_timer_{name}")]);
    let target = tree().join("target");
    shell::run(cargo(&["build", "--release", "--target-dir"]).arg(&target).args(packages))?;

    let dist = target.join("dist");
    // `deploy/` expects this folder below `/opt`, where `tar -C /opt` unpacks it.
    let folder = dist.join("xpu_timer");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
    copy_stripped(&target.join("release"), &folder)?;
    let wheel = write_wheel(&folder, &dist)?;
    for file in ["README.md", "LICENSE"] {
        fs::copy(tree().join(file), folder.join(file)).with_context(|| format!("cannot copy {file}"))?;
    }
    let archive = dist.join(format!("xpu_timer-{}-x86_64-linux.tar.gz", env!("CARGO_PKG_VERSION")));
    let mut tar = Command::new("tar");
    tar.args(["--owner=0", "--group=0", "-C"]).arg(&dist).arg("-czf").arg(&archive).arg("xpu_timer");
    shell::run(&mut tar)?;
    println!("{}\n{}", archive.display(), wheel.display());
    Ok(())
}
