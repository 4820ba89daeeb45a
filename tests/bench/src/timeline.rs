//! Benchmark of the traces: synthetic timelines become one trace, in a time that is compared with
//! copying that trace, and in bounded memory.

use std::{
    fs::{self, File},
    io::{Read, Seek, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use xpu_timer_tests::{Artifacts, Timelines, tree};

use crate::{
    report::{Report, median, ms, ratio, time},
    stops::peak_memory,
};

/// Options of the benchmark.
#[derive(clap::Args)]
pub struct Options {
    /// Number of ranks; eight share a node
    #[arg(long, default_value = "1024")]
    ranks: u32,
    /// Operations of each rank, one in each millisecond
    #[arg(long, default_value = "60000")]
    operations: u32,
    /// Repetitions
    #[arg(long, default_value = "3")]
    repetitions: usize,
    /// Folder for the files; the default takes some gigabytes in /tmp
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Path of another xpu_timer_gen_trace_timeline to measure
    #[arg(long)]
    program: Option<PathBuf>,
    /// Write the table into docs/benchmarks.md
    #[arg(long)]
    write: bool,
}

/// The trace takes at most so many times as long as its copy.
const MOST_COPIES: f64 = 3.0;
const MOST_MEMORY: u64 = 256 << 20;
/// The trace of 1,024 ranks has 17 GB. Overwriting is not slower than writing, so this is no
/// advantage for the trace.
const MOST_COPY_BYTES: usize = 2 << 30;

/// Runs the benchmark. Returns whether all limits hold.
pub fn run(options: &Options) -> Result<bool> {
    let artifacts = Artifacts::beside_this_executable()?;
    let program = options.program.clone().unwrap_or_else(|| artifacts.bin("xpu_timer_gen_trace_timeline"));
    let folder = match &options.folder {
        Some(folder) => tempfile::tempdir_in(folder)?,
        None => tempfile::tempdir()?,
    };
    let (ops, output) = (folder.path().join("ops"), folder.path().join("out"));
    fs::create_dir(&ops)?;
    fs::create_dir(&output)?;
    let timelines = Timelines {
        ranks: options.ranks,
        of_node: 8,
        operations: options.operations,
        slow_rank: Some(5),
        clock_step: (1_000_000_000, 0.1),
        ..Timelines::default()
    };
    timelines.write(&ops)?;
    let mut generate = Command::new(&program);
    generate.arg("--path").arg(&ops).arg("--output").arg(output.join("job")).stdout(Stdio::null());
    let trace = output.join("trace_job.bin");
    let (mut traced, mut copied) = (Vec::new(), Vec::new());
    for _ in 0..options.repetitions {
        let (took, status) = time(|| generate.status());
        ensure!(status?.success(), "{generate:?} failed");
        traced.push(took);
        let (took, result) = time(|| copy(&trace, &output.join("copy")));
        result.with_context(|| format!("{} cannot be copied", trace.display()))?;
        copied.push(took);
        fs::remove_file(output.join("copy"))?;
    }
    let (traced, copied): (Duration, Duration) = (median(traced), median(copied));
    let bytes = fs::metadata(&trace)?.len();
    fs::remove_file(&trace)?;
    let memory = peak_memory(&generate)?;

    let mut report = Report::new();
    report.section(&format!("Trace of {} ranks with {} operations each", options.ranks, options.operations));
    report.note("load average of the machine", fs::read_to_string("/proc/loadavg")?.trim());
    report.note("size of the trace", format!("{:.2} GB", bytes as f64 / 1e9));
    report.note("time to copy it", ms(copied));
    report.note("time to make it", ms(traced));
    let times = ratio(traced, copied);
    report.check("time to make it, as multiple of the copy", format!("{times:.2}"), "at most 3", times <= MOST_COPIES);
    let megabytes = format!("{} MB", memory >> 20);
    report.check("peak memory", megabytes, "below 256 MB", memory < MOST_MEMORY);
    if options.write {
        report.write(&tree().join("docs/benchmarks.md"), "## Traces")?;
    }
    Ok(report.all_hold())
}

/// Copies through memory: a file system that shares the blocks would copy nothing. The copy
/// overwrites itself after [`MOST_COPY_BYTES`], so that it needs little of the disk.
fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    let (mut from, mut to) = (File::open(from)?, File::create(to)?);
    let (mut buffer, mut written) = (vec![0; 1 << 20], 0);
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            return Ok(());
        }
        if written + read > MOST_COPY_BYTES {
            to.rewind()?;
            written = 0;
        }
        to.write_all(&buffer[..read])?;
        written += read;
    }
}
