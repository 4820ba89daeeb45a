//! Runs the viewer on a finished folder. The viewer is a separate program, so that the collector
//! does not depend on it.

use std::{
    env,
    ffi::OsString,
    io::{self, Read},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use tracing::{info, warn};

const NAME: &str = "xpu_timer_stacktrace_viewer";
/// A viewer that misses the deadline of the incident may continue in the background for this long.
const HARD_DEADLINE: Duration = Duration::from_secs(60);
const MAX_STDERR_BYTES: u64 = 64 * 1024;

/// Why an incident has no pictures.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ViewerError {
    /// The viewer was not found, or cannot be executed.
    #[error("the viewer {} cannot be started", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// It continues, and its pictures appear later.
    #[error("the viewer needs more than {:.1} s and is still running", patience.as_secs_f32())]
    Late {
        /// How long it was waited for.
        patience: Duration,
    },
    /// It ended without success.
    #[error("the viewer failed ({status}): {stderr}")]
    Failed {
        /// How it ended.
        status: ExitStatus,
        /// Its error output.
        stderr: String,
    },
}

/// Runs the viewer on `folder` and waits at most `patience` for it. `timelines_came` is false as
/// long as the folder announces timelines; the report then says so.
///
/// # Errors
/// There are no pictures now.
pub(crate) fn run(folder: &Path, timelines_came: bool, patience: Duration) -> Result<(), ViewerError> {
    let beside = env::current_exe().ok().and_then(|own| Some(own.parent()?.join(NAME)));
    let program = beside.filter(|path| path.exists()).unwrap_or_else(|| NAME.into());
    run_program(&program, folder, timelines_came, patience)
}

fn run_program(program: &Path, folder: &Path, timelines_came: bool, patience: Duration) -> Result<(), ViewerError> {
    let start = Instant::now();
    let mut command = Command::new(program);
    command.arg("--path").arg(folder).args(timelines_came.then_some("--timelines-came"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    // The viewer must not be hooked itself if the collector was started under the hook.
    command.env_remove(OsString::from("LD_PRELOAD"));
    let mut child = command.spawn().map_err(|source| ViewerError::Start { program: program.into(), source })?;
    // Read on another thread, so that a viewer with much output does not block.
    let stderr = child.stderr.take().map(|stderr| {
        thread::spawn(move || {
            let mut text = Vec::new();
            // An unreadable part is only missing in a message.
            let _ = stderr.take(MAX_STDERR_BYTES).read_to_end(&mut text);
            String::from_utf8_lossy(&text).trim().to_string()
        })
    });
    let Some(status) = wait(&mut child, start + patience) else {
        let folder = folder.display().to_string();
        thread::spawn(move || match wait(&mut child, start + HARD_DEADLINE) {
            Some(status) => info!("{folder}: the viewer was done after {:.1?}: {status}", start.elapsed()),
            None => {
                // Both fail only if it has just ended.
                let _ = child.kill();
                let _ = child.wait();
                warn!("{folder}: the viewer was killed after {HARD_DEADLINE:?}");
            }
        });
        return Err(ViewerError::Late { patience });
    };
    if status.success() {
        return Ok(());
    }
    let stderr = stderr.and_then(|stderr| stderr.join().ok()).unwrap_or_default();
    Err(ViewerError::Failed { status, stderr })
}

fn wait(child: &mut Child, deadline: Instant) -> Option<ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    fn script(folder: &Path, text: &str) -> PathBuf {
        let path = folder.join("viewer");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn success_failure_and_absence() {
        let folder = tempfile::tempdir().unwrap();
        let long = Duration::from_secs(60);
        let good = script(folder.path(), "test \"$1\" = --path && touch \"$2/drawn\"");
        run_program(&good, folder.path(), true, long).unwrap();
        assert!(folder.path().join("drawn").exists());
        let bad = script(folder.path(), "echo no colours >&2; exit 3");
        let error = run_program(&bad, folder.path(), true, long).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("no colours"), "{error}");
        let error = run_program(&folder.path().join("none"), folder.path(), true, long).unwrap_err().to_string();
        assert!(error.contains("cannot be started"), "{error}");
    }

    #[test]
    fn a_slow_viewer_continues_in_the_background() {
        let folder = tempfile::tempdir().unwrap();
        let slow = script(folder.path(), "while [ ! -e \"$2/go\" ]; do sleep 0.01; done; touch \"$2/drawn\"");
        let error = run_program(&slow, folder.path(), true, Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("is still running"), "{error}");
        fs::write(folder.path().join("go"), "").unwrap();
        let start = Instant::now();
        while !folder.path().join("drawn").exists() {
            assert!(start.elapsed() < Duration::from_secs(60));
            thread::sleep(Duration::from_millis(5));
        }
    }
}
