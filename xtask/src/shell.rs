//! Runs other programs and prints their command lines.

use std::{
    env,
    ffi::OsString,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Cargo, in the root of the repository.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    in_root(Command::new(program()), arguments)
}

/// Cargo at a low priority. Not at the lowest: ranks of MPI that poll would leave it nothing.
pub(crate) fn cargo_at_low_priority(arguments: &[&str]) -> Command {
    let mut nice = Command::new("nice");
    nice.args(["-n", "10"]).arg(program());
    in_root(nice, arguments)
}

fn program() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

fn in_root(mut command: Command, arguments: &[&str]) -> Command {
    command.args(arguments).current_dir(xpu_timer_tests::tree());
    command
}

/// Prints and runs a command. A failure is an error that names it.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = command_line(command);
    eprintln!("$ {line}");
    let status = command.status().with_context(|| line.clone())?;
    ensure!(status.success(), "{line}: {status}");
    Ok(())
}

/// The output of `cargo metadata`.
pub(crate) fn metadata(arguments: &[&str]) -> Result<Value> {
    let output = cargo(&["metadata", "--format-version", "1"]).args(arguments).output().context("cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("cargo metadata")
}

/// Makes sure that these Debian packages work, or all that the tests use if none is named. Installs
/// missing ones if permitted; otherwise the error names them.
pub(crate) fn need(packages: &[&str]) -> Result<()> {
    let lacking =
        |missing: &[(&'static str, anyhow::Error)]| missing.iter().map(|(package, _)| *package).collect::<Vec<_>>();
    let missing = xpu_timer_tests::missing(packages);
    if missing.is_empty() {
        return Ok(());
    }
    let to_install = lacking(&missing);
    let apt = |arguments: &[&str]| Command::new("apt-get").args(arguments).stdout(Stdio::null()).status();
    if nix::unistd::geteuid().is_root() && apt(&["--version"]).is_ok() {
        eprintln!("installing {}", to_install.join(" "));
        let _ = apt(&["update", "-qq"]);
        let _ = apt(&[&["install", "-y", "-qq", "--no-install-recommends"], &to_install[..]].concat());
    }
    let missing = xpu_timer_tests::missing(&to_install);
    let reasons: Vec<String> = missing.iter().map(|(_, error)| format!("{error:#}")).collect();
    ensure!(
        missing.is_empty(),
        "missing or incomplete: {}; install with: apt-get install {}",
        reasons.join("; "),
        lacking(&missing).join(" ")
    );
    Ok(())
}

/// Makes sure that a build and a run of the tests have room on the disk of `target`. On a full disk
/// hundreds of tests fail, and none of them says why.
pub(crate) fn need_disk() -> Result<()> {
    let target = xpu_timer_tests::tree().join("target");
    let needed_gb = if target.join("debug/deps").exists() { 2 } else { 10 };
    std::fs::create_dir_all(&target)?;
    let free_gb = free_disk_mb()? >> 10;
    let target = target.display();
    ensure!(free_gb >= needed_gb, "{target} needs {needed_gb} GiB of free disk space, and {free_gb} GiB are free");
    Ok(())
}

/// The free disk space for what is built, in MiB.
pub(crate) fn free_disk_mb() -> Result<u64> {
    let disk = nix::sys::statvfs::statvfs(&xpu_timer_tests::tree().join("target"))?;
    Ok((disk.blocks_available() * disk.fragment_size()) >> 20)
}

/// The command line as text.
pub(crate) fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
