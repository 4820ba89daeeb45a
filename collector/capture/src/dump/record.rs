//! `xpu_timer_dump record`: samples the stacks of processes for a while, and lets the viewer draw
//! them.

use std::{
    env, fs,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::SignalFd,
    },
};
use xpu_timer_proto::{
    Message,
    printable::{self, MOST_COMMAND_BYTES},
    procfs, samples, secrets,
    v1::{RankInfo, StackSamples},
};

use crate::sampling::{ProcessRecording, RecordOptions, StackRecorder, Threads, clock_reading};

use super::selection::{Files, Processes, rank_of, seconds};

const VIEWER: &str = "xpu_timer_stacktrace_viewer";
/// Default name of the output folder.
const FOLDER: &str = "record";
/// How often to look whether all processes have ended.
const LOOK: Duration = Duration::from_millis(100);
/// How long the kernel may take to answer for a process at the end.
const PATIENCE: Duration = Duration::from_secs(2);
/// Largest rate: the time between two samples must be longer than a sample takes.
const MAX_RATE: f64 = 1000.0;

/// Samples the stacks of processes for a while: where do they spend their time?
///
/// It stops no process. It writes a `.samples` file for each process, and the viewer makes of them:
/// all.folded and all.svg (all processes merged), group-N.folded and group-N.svg if groups of ranks
/// differ, and speedscope.json (<https://speedscope.app>).
/// Ctrl-C ends the recording early. Exit status: 0 if every process was recorded and all files were
/// written, 1 if not, 2 for a wrong command line.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    which: Processes,
    /// How long to record
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    seconds: Duration,
    /// Samples a second, at most 1000
    #[arg(long, value_name = "HZ", default_value = "50", value_parser = rate)]
    rate: f64,
    /// Which threads to sample
    #[arg(long, value_name = "WHICH", default_value = "all")]
    threads: WhichThreads,
    /// Sample C frames as well, of all threads. It takes some milliseconds for each sample of a
    /// process, so use a low rate for many processes
    #[arg(long)]
    native: bool,
    /// Folder to write to; it must have no samples yet [default: record, record-2, …]
    #[arg(long, short, value_name = "DIR")]
    output: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum WhichThreads {
    /// The main thread of the interpreter
    Main,
    /// All threads of the interpreter
    All,
}

fn rate(text: &str) -> Result<f64, String> {
    let rate: f64 = text.parse().map_err(|_| "not a number of samples a second".to_string())?;
    if rate > 0.0 && rate <= MAX_RATE { Ok(rate) } else { Err(format!("not between 0 and {MAX_RATE}")) }
}

/// Runs the command.
///
/// # Errors
/// No process was found, or a file cannot be written.
pub(super) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let pids = arguments.which.pids()?;
    let folder = output_folder(arguments.output.as_deref())?;
    let files = Files::new(&folder, &pids)?;
    let options = RecordOptions {
        period: Duration::from_secs_f64(arguments.rate.recip()),
        threads: if arguments.threads == WhichThreads::Main { Threads::Main } else { Threads::All },
        native: arguments.native,
        children: true,
        window: Duration::MAX,
    };
    // Blocked before the threads start, so that only `wait` receives them.
    let stops: SigSet = [Signal::SIGINT, Signal::SIGTERM].into_iter().collect();
    stops.thread_block().context("cannot receive signals")?;
    let signals = SignalFd::new(&stops).context("cannot receive signals")?;
    // Commands and ranks of processes that end meanwhile are known.
    let about: Vec<RankInfo> = pids.iter().map(|pid| info(*pid)).collect();
    let begin = clock_reading();
    let recorder = StackRecorder::default();
    let started: std::io::Result<Vec<_>> = pids.iter().map(|pid| recorder.start(*pid, options)).collect();
    let mut recordings = started.context("cannot start a thread")?;
    wait(arguments.seconds, &recordings, &signals);
    recordings.iter_mut().for_each(ProcessRecording::request_stop);
    let mut failed = false;
    for (index, (recording, rank)) in recordings.iter_mut().zip(about).enumerate() {
        let answered = recording.stop(PATIENCE);
        let mut samples = recording.samples(0);
        let pid = pids[index];
        if !answered {
            samples.notes.push(format!("process {pid}: the kernel did not answer, so its recording ended early"));
        }
        samples.native = arguments.native;
        let is_empty = samples.threads.iter().all(|thread| thread.first.is_empty());
        if is_empty && samples.notes.is_empty() {
            samples.notes.push(format!("process {pid}: no sample was taken"));
        }
        failed |= is_empty;
        report(&samples);
        let clock = vec![begin, clock_reading()];
        files.write(index, samples::EXTENSION, |_| {
            StackSamples { rank: Some(rank), clock, ..samples }.encode_to_vec()
        })?;
    }
    // The viewer would inherit the mask, and no key would end it.
    stops.thread_unblock().context("cannot receive signals")?;
    let drawn = draw(&folder)?;
    Ok(if failed || !drawn { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The folder to write to. It has no samples of an earlier recording, which the viewer would merge.
fn output_folder(wanted: Option<&Path>) -> Result<PathBuf> {
    let has_samples = |folder: &Path| {
        let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        names.into_iter().any(|path| path.extension().is_some_and(|extension| extension == samples::EXTENSION))
    };
    match wanted {
        Some(folder) if has_samples(folder) => {
            bail!("{} has the samples of another recording; name another folder with --output", folder.display())
        }
        Some(folder) => Ok(folder.into()),
        None => {
            let names = (2_u32..).map(|number| PathBuf::from(format!("{FOLDER}-{number}")));
            let mut names = std::iter::once(PathBuf::from(FOLDER)).chain(names);
            names.find(|name| !name.exists()).context("no name for a folder is left")
        }
    }
}

fn info(pid: i32) -> RankInfo {
    let ranked = rank_of(pid);
    let mut command = secrets::cmdline(&procfs::cmdline(pid).unwrap_or_default()).trim().to_string();
    command.truncate(command.floor_char_boundary(MOST_COMMAND_BYTES));
    RankInfo {
        rank: ranked.and_then(|ranked| i32::try_from(ranked.rank).ok()).unwrap_or(-1),
        world_size: ranked.map_or(0, |ranked| ranked.world_size),
        node: fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_string(),
        pid,
        command,
        ..RankInfo::default()
    }
}

/// Waits until the time is over, all processes have ended, or the user has seen enough.
fn wait(time: Duration, recordings: &[ProcessRecording], signals: &SignalFd) {
    let end = Instant::now().checked_add(time);
    while !recordings.iter().all(ProcessRecording::has_ended) {
        let left = end.map_or(LOOK, |end| end.saturating_duration_since(Instant::now()).min(LOOK));
        if left.is_zero() {
            return;
        }
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        if poll(&mut [PollFd::new(signals.as_fd(), PollFlags::POLLIN)], timeout).is_ok_and(|ready| ready > 0) {
            // Read, so that it is not delivered later. There is nothing to do if that fails.
            let _ = signals.read_signal();
            return;
        }
    }
}

/// Tells what is missing.
fn report(samples: &StackSamples) {
    for note in &samples.notes {
        eprintln!("xpu_timer_dump: {}", printable::line(note));
    }
}

/// Runs the viewer on the folder. Returns whether it has written all files.
fn draw(folder: &Path) -> Result<bool> {
    let beside = env::current_exe().ok().and_then(|own| Some(own.parent()?.join(VIEWER)));
    let program = beside.filter(|path| path.exists()).unwrap_or_else(|| VIEWER.into());
    let shown = folder.display();
    let mut command = Command::new(&program);
    // The viewer must not be hooked itself.
    command.arg("--path").arg(folder).env_remove("LD_PRELOAD");
    let status = command.status().with_context(|| {
        format!("the samples are in {shown}, but {VIEWER}, which draws them, cannot be started: run it with --path")
    })?;
    Ok(status.success())
}
