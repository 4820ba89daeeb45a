//! Measures our processes and folders, and checks whether they grow.

use std::{fmt, fs, path::Path, time::Duration};

use xpu_timer_proto::procfs;
use xpu_timer_tests::{Job, has_variable};

/// One measurement.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    at: Duration,
    /// In the order of [`MEASURES`].
    values: [u64; 5],
}

/// Name, relative growth limit, and additional absolute growth limit.
const MEASURES: [(&str, f64, u64); 5] = [
    ("resident KiB", 0.10, 4096),
    (DESCRIPTORS, 0.0, 24),
    ("threads", 0.0, 8),
    ("processes", 0.0, 1),
    ("files", 0.10, 40),
];

const DESCRIPTORS: &str = "descriptors";

/// The relative limit of the descriptors in a flood. They vary with the number of short processes
/// that live at one time, by a tenth; a leak of one descriptor per process would be a thousand
/// times that much.
const DESCRIPTORS_IN_A_FLOOD: f64 = 0.25;

impl Sample {
    /// `None` while no collector runs.
    pub fn take(job: &Job, at: Duration) -> Option<Sample> {
        let pids: Vec<i32> = job.processes().into_iter().filter(|pid| is_ours(*pid)).collect();
        if pids.is_empty() {
            return None;
        }
        let count =
            |pid: i32, what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, Iterator::count) as u64;
        let sum = |measure: &dyn Fn(i32) -> u64| pids.iter().map(|pid| measure(*pid)).sum::<u64>();
        let values = [
            sum(&resident_kib),
            sum(&|pid| count(pid, "fd")),
            sum(&|pid| count(pid, "task")),
            pids.len() as u64,
            files(&job.dir.join("timeline")) + files(&job.dir.join("log")),
        ];
        Some(Sample { at, values })
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>8.0?}", self.at)?;
        for (value, (name, ..)) in self.values.iter().zip(MEASURES) {
            write!(f, "  {value:>7} {name}")?;
        }
        Ok(())
    }
}

/// Whether it is a collector or a supervisor. The processes of viewers and captures are
/// short-lived.
fn is_ours(pid: i32) -> bool {
    let command = procfs::cmdline(pid).unwrap_or_default();
    command.split(|byte| *byte == 0).next().is_some_and(|program| program.ends_with(b"xpu_timer_collector"))
}

/// The processes of a job, by name.
pub fn of_job(job: &Job, name: &str) -> Vec<i32> {
    let is_its = |pid: &i32| !is_ours(*pid) && has_variable(*pid, "XPU_TIMER_JOB", name);
    job.processes().into_iter().filter(is_its).collect()
}

fn resident_kib(pid: i32) -> u64 {
    let status = procfs::status_text(pid).unwrap_or_default();
    let resident = procfs::field(&status, "VmRSS:").unwrap_or_default();
    resident.trim_end_matches(" kB").parse().unwrap_or(0)
}

fn files(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| 1 + if entry.file_type().is_ok_and(|kind| kind.is_dir()) { files(&entry.path()) } else { 0 })
        .sum()
}

/// Compares the medians of the second and the last quarter. Returns whether nothing has grown
/// beyond its limit.
pub fn compare(samples: &[Sample], flood: bool) -> bool {
    let quarter = samples.len() / 4;
    if quarter == 0 {
        println!("too few samples to compare");
        return false;
    }
    let mut flat = true;
    for (index, (name, part, more)) in MEASURES.into_iter().enumerate() {
        let part = if flood && name == DESCRIPTORS { DESCRIPTORS_IN_A_FLOOD } else { part };
        let median = |samples: &[Sample]| {
            let mut values: Vec<u64> = samples.iter().map(|sample| sample.values[index]).collect();
            values.sort_unstable();
            values[values.len() / 2]
        };
        let (before, after) = (median(&samples[quarter..2 * quarter]), median(&samples[3 * quarter..]));
        let limit = before + (before as f64 * part) as u64 + more;
        let verdict = if after <= limit { "flat" } else { "GROWS" };
        println!("{name:>14}: {before} in the second quarter, {after} in the last (at most {limit}): {verdict}");
        flat &= after <= limit;
    }
    flat
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(resident: impl Fn(u64) -> u64) -> Vec<Sample> {
        let sample = |second| Sample { at: Duration::from_secs(second), values: [resident(second), 40, 12, 2, 100] };
        (0..100).map(sample).collect()
    }

    #[test]
    fn a_leak_is_seen_and_noise_is_not() {
        assert!(compare(&samples(|second| 30_000 + second % 7 * 500), false));
        assert!(!compare(&samples(|second| 30_000 + second * 300), false));
        assert!(!compare(&samples(|_| 30_000)[..3], false));
    }

    #[test]
    fn the_descriptors_of_a_flood_vary() {
        let descriptors = |second| [30_000, 400 + second, 12, 2, 100];
        let samples: Vec<Sample> =
            (0..100).map(|second| Sample { at: Duration::from_secs(second), values: descriptors(second) }).collect();
        assert!(compare(&samples, true) && !compare(&samples, false));
    }
}
