//! Running other programs, loudly.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Cargo itself, in the root of the tree.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(xpu_timer_tests::tree());
    command
}

/// Runs a command after printing it; a failure is an error that names it.
pub fn run(command: &mut Command) -> Result<()> {
    let line = words(command);
    eprintln!("$ {line}");
    let status = command.status().with_context(|| line.clone())?;
    ensure!(status.success(), "{line}: {status}");
    Ok(())
}

/// What `cargo metadata` prints about the workspace.
pub fn metadata(arguments: &[&str]) -> Result<Value> {
    let output = cargo(&["metadata", "--format-version", "1"]).args(arguments).output().context("cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("cargo metadata")
}

/// Makes sure that these Debian packages work here, all that the tests use when none is named: installs those that do not when
/// we may, else says how.
pub fn need(packages: &[&str]) -> Result<()> {
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

/// The command as one would type it.
pub fn words(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
