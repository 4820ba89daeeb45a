//! Folders under `target/` that hold what tests need from outside: each is set up once per tree, by whoever comes first, and is
//! there as a whole or not at all.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};

use crate::needs::last_line;

/// Setting up takes about 30 s; a slow mirror may take much longer, a dead one must not take for ever.
const SETUP_DEADLINE: Duration = Duration::from_secs(900);

/// `target/NAME`, made when it is not there by filling a folder beside it and renaming that. A lock file keeps two processes from
/// doing it at once.
pub(crate) fn set_up(name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let target = crate::tree().join("target");
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
        // The message about the failure counts more than one about the rest of it on disk, which the next run removes.
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
        ensure!(start.elapsed() < SETUP_DEADLINE, "{} is held for {SETUP_DEADLINE:?} already", path.display());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs a command that sets something up.
pub(crate) fn finish(command: &mut Command, what: &str) -> Result<()> {
    finish_within(command, what, SETUP_DEADLINE)
}

/// Runs a command to its end, with a deadline; a failure is one line, with the one of what it printed that says most.
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
