//! Runs commands with a deadline, and reduces their failures to one line.

use std::{
    io,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

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
