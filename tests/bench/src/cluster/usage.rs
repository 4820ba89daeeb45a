//! The resources that a process uses.

use std::{fs, time::Duration};

use anyhow::{Context, Result};
use nix::{time::ClockId, unistd::Pid};

/// Peak of the resident memory of a process.
pub(super) fn peak_bytes(pid: i32) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).context("VmHWM")?;
    let kib: f64 = line.split_whitespace().nth(1).context("a number")?.parse()?;
    Ok(kib * 1024.0)
}

/// Processor time that a process has used so far.
pub(super) fn processor_time(pid: i32) -> Result<Duration> {
    Ok(ClockId::pid_cpu_clock_id(Pid::from_raw(pid))?.now()?.into())
}
