//! Running other programs, loudly.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

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

/// Makes sure that a program of a Debian package is there: installs the package when we may, else says how.
pub fn need(program: &str, package: &str) -> Result<()> {
    need_all(&[(program, package)])
}

/// The same for several, in one go and one line.
pub fn need_all(tools: &[(&str, &str)]) -> Result<()> {
    need_unless(|(program, _)| which(program), tools)
}

/// The same for a module of the PATH's python3.
pub fn need_module(module: &str, package: &str) -> Result<()> {
    let imports = |(module, _): &(&str, &str)| {
        let import = format!("import {module}");
        let status = Command::new("python3").args(["-c", &import]).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    need_unless(imports, &[(module, package)])
}

/// Of pairs of what is needed and its package.
fn need_unless(is_there: impl Fn(&(&str, &str)) -> bool, tools: &[(&str, &str)]) -> Result<()> {
    let missing = || tools.iter().filter(|tool| !is_there(tool)).copied().unzip::<_, _, Vec<_>, Vec<_>>();
    let (_, packages) = missing();
    if packages.is_empty() {
        return Ok(());
    }
    let apt = |arguments: &[&str]| Command::new("apt-get").args(arguments).stdout(Stdio::null()).status();
    if nix::unistd::geteuid().is_root() && which("apt-get") {
        eprintln!("installing {}", packages.join(" "));
        let _ = apt(&["update", "-qq"]);
        let _ = apt(&[&["install", "-y", "-qq", "--no-install-recommends"], &packages[..]].concat());
    }
    let (missing, packages) = missing();
    ensure!(
        missing.is_empty(),
        "missing: {}; install with: apt-get install {}",
        missing.join(", "),
        packages.join(" ")
    );
    Ok(())
}

fn which(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

/// The command as one would type it.
pub fn words(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
