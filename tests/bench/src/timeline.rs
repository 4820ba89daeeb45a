//! Benchmark of the traces: synthetic timelines become one trace, in a time that is compared with
//! copying that trace, and in bounded memory. Both are written to the disk.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow};
use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::stat::Mode,
    unistd::mkfifo,
};
use xpu_timer_tests::{Artifacts, Timelines, tree};

use crate::{
    report::{Report, median, ms, ratio, time},
    stops::{peak_helper, peak_in},
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
    /// Folder for the files, of up to 5 GB; default: /tmp
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Path of another xpu_timer_gen_trace_timeline to measure
    #[arg(long)]
    program: Option<PathBuf>,
    /// Write the table into docs/benchmarks.md
    #[arg(long)]
    write: bool,
}

/// Limit for the time of the trace, in multiples of the time of its copy.
const MOST_COPIES: f64 = 3.0;
const MOST_MEMORY: u64 = 256 << 20;
/// The trace of 1,024 ranks has 17 GB. It and its copy overwrite themselves after this number of
/// bytes.
const MOST_ON_DISK: usize = 2 << 30;
/// They wait for the disk after each such number of bytes, as any file does that is larger than the
/// memory.
const SYNC_BYTES: usize = 256 << 20;

/// Bytes that are read at once.
const READ_BYTES: usize = 1 << 20;

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
        ranks_per_node: 8,
        operations: options.operations,
        slow_rank: Some(5),
        clock_step: (1_000_000_000, 0.1),
        ..Timelines::default()
    };
    timelines.write(&ops)?;
    let mut command = Command::new(&program);
    command.arg("--path").arg(&ops).arg("--output").arg(output.join("job"));
    let (mut traced, mut copied, mut bytes, mut memory) = (Vec::new(), Vec::new(), 0, 0);
    for _ in 0..options.repetitions {
        let (took, made) = time(|| generate(&command, &output));
        traced.push(took);
        let (size, peak) = made?;
        (bytes, memory) = (size, peak.max(memory));
        let (took, result) = time(|| copy(&output.join("written"), size, &output.join("copy")));
        result.context("the trace cannot be copied")?;
        copied.push(took);
    }
    let (traced, copied): (Duration, Duration) = (median(traced), median(copied));

    let mut report = Report::of_this_machine()?;
    report.section(&format!("Trace of {} ranks with {} operations each", options.ranks, options.operations));
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

/// Makes the trace, which passes through a pipe to the file `written`. Returns its size, and the
/// peak memory of the command.
fn generate(command: &Command, output: &Path) -> Result<(u64, u64)> {
    // The command writes its files under temporary names first.
    let pipe = output.join("trace_job.bin.tmp");
    mkfifo(&pipe, Mode::S_IRUSR | Mode::S_IWUSR)?;
    // Until the command has ended there is a writer, so that neither side waits for the other.
    let keeper = File::options().read(true).write(true).open(&pipe)?;
    let mut from = File::open(&pipe)?;
    // As much as a read takes: the pipe stands for a file, which makes no side wait for the other.
    fcntl(&from, FcntlArg::F_SETPIPE_SZ(READ_BYTES as i32))?;
    let helper = peak_helper(command)?.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let waiter = thread::spawn(move || {
        let ended = helper.wait_with_output();
        drop(keeper);
        ended
    });
    let bytes = write_through(&output.join("written"), |buffer| from.read(buffer))?;
    let ended = waiter.join().map_err(|_| anyhow!("the thread that waits has panicked"))??;
    let memory = peak_in(&ended).with_context(|| format!("{command:?}"))?;
    fs::remove_file(output.join("trace_job.bin"))?;
    Ok((bytes, memory))
}

/// Copies this number of bytes of a file, which is read again from its start if it is shorter.
fn copy(from: &Path, bytes: u64, to: &Path) -> io::Result<()> {
    let (mut from, mut left) = (File::open(from)?, bytes);
    write_through(to, |buffer| {
        let wanted = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let mut read = from.read(&mut buffer[..wanted])?;
        if read == 0 && left > 0 {
            from.rewind()?;
            read = from.read(&mut buffer[..wanted])?;
        }
        left -= read as u64;
        Ok(read)
    })?;
    Ok(())
}

/// Writes what `read` returns to a file and to its disk. Returns the number of bytes.
fn write_through(to: &Path, mut read: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<u64> {
    let (mut to, mut buffer) = (File::create(to)?, vec![0; READ_BYTES]);
    let (mut bytes, mut in_file, mut unsynced) = (0, 0, 0);
    loop {
        let length = read(&mut buffer)?;
        if length == 0 {
            to.sync_data()?;
            return Ok(bytes);
        }
        if in_file + length > MOST_ON_DISK {
            to.rewind()?;
            in_file = 0;
        }
        to.write_all(&buffer[..length])?;
        (bytes, in_file, unsynced) = (bytes + length as u64, in_file + length, unsynced + length);
        if unsynced >= SYNC_BYTES {
            to.sync_data()?;
            unsynced = 0;
        }
    }
}
