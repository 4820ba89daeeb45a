//! Folders under `target/` with external dependencies of tests. Each is set up once per tree by the
//! first process that needs it, and appears complete or not at all.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::fcntl::{Flock, FlockArg};

use crate::commands::finish_within;
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
        ensure!(start.elapsed() < SETUP_DEADLINE, "{} is held for {SETUP_DEADLINE:?} already", path.display());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs a setup command.
pub(crate) fn finish(command: &mut Command, what: &str) -> Result<()> {
    finish_within(command, what, SETUP_DEADLINE)
}
