//! Folders under `target/` with external dependencies of tests. Each is set up once per tree by the
//! first process that needs it, and appears complete or not at all. Also runs commands with a
//! deadline, and reduces their failures to one line.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};

use crate::tools::tree;

/// Setup takes about 30 s. A slow mirror may take much longer, but a dead one must not block
/// forever.
const SETUP_DEADLINE: Duration = Duration::from_secs(900);

/// `target/NAME`. If it does not exist, `fill` fills a folder beside it, which is then renamed. A
/// lock file prevents two processes from doing this at once.
pub(crate) fn set_up(name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let target = tree().join("target");
    let root = target.join(name);
    if root.exists() {
        return Ok(root);
    }
    fs::create_dir_all(root.parent().unwrap_or(&target))?;
    let _lock = lock(&target.join(format!("{name}.lock")))?;
    if root.exists() {
        return Ok(root);
    }
    let temporary = target.join(format!("{name}.new"));
    remove(&temporary)?;
    fs::create_dir(&temporary).with_context(|| format!("{}", temporary.display()))?;
    eprintln!("setting up {}", root.display());
    if let Err(error) = fill(&temporary) {
        // The failure is more important than an error of this removal; the next run removes the
        // rest.
        let _ = remove(&temporary);
        return Err(error.context(format!("{} cannot be set up", root.display())));
    }
    fs::rename(&temporary, &root)?;
    Ok(root)
}

/// Removes a folder, which may be missing.
pub(crate) fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{}", folder.display()))
        }
        _ => Ok(()),
    }
}

fn lock(path: &Path) -> Result<Flock<fs::File>> {
    let start = Instant::now();
    let mut file = fs::File::create(path).with_context(|| format!("{}", path.display()))?;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((back, nix::errno::Errno::EWOULDBLOCK)) => file = back,
            Err((_, error)) => return Err(error).with_context(|| format!("{}", path.display())),
        }
        ensure!(start.elapsed() < SETUP_DEADLINE, "{} has been locked for {SETUP_DEADLINE:?}", path.display());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs a setup command.
pub(crate) fn finish(command: &mut Command, what: &str) -> Result<()> {
    finish_within(command, what, SETUP_DEADLINE)
}

/// Runs a command to its end, with a deadline. A failure is one line, with the most informative
/// line of the output.
pub(crate) fn finish_within(command: &mut Command, what: &str, deadline: Duration) -> Result<()> {
    let mut log = tempfile::tempfile()?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
    let mut child = command.spawn().with_context(|| format!("{what} cannot be started"))?;
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if start.elapsed() > deadline {
            child.kill()?;
            child.wait()?;
            bail!("{what} did not end within {deadline:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    if !status.success() {
        let mut text = Vec::new();
        io::Seek::rewind(&mut log)?;
        io::Read::read_to_end(&mut log, &mut text)?;
        bail!("{what}: {status}: {}", last_line(&text));
    }
    Ok(())
}

/// The most informative line: the first that contains "error", else the last.
pub(crate) fn last_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines()
        .find(|line| line.to_lowercase().contains("error"))
        .or_else(|| lines().next_back())
        .unwrap_or_default()
        .into()
}
