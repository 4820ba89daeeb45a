//! The command `xpu_timer_dump`: prints or writes the stacks of running processes as text, JSON or
//! `.stacktrace` files. It needs no collector.
//!
//! Its subcommand `record` takes the stacks again and again.
//!
//! The files have the format that the viewer reads. Their numbers are the ranks that launchers gave
//! to the processes.

mod json;
mod record;
mod selection;
mod text;

use std::{
    env,
    fs::File,
    io::{self, IsTerminal, Write},
    iter,
    mem::ManuallyDrop,
    os::fd::AsFd,
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use nix::{
    sys::{
        prctl,
        signal::Signal,
        wait::{WaitStatus, waitpid},
    },
    unistd::{ForkResult, fork, getpid, getppid, setsid},
};
use tracing_subscriber::{
    filter::{LevelFilter, Targets},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};
use xpu_timer_proto::{
    Message,
    printable::{self, Lines},
    server::{ChildProcess, Stacktrace},
};

use crate::{
    Capturer,
    native::ptrace,
    process::Options,
    stacks::{FrameExpander, ProcessCapture, Stacks, View},
};

use selection::{Files, Processes, seconds};

/// Prints the stacks of all threads of running processes: Python frames among C frames, with lines.
///
/// It stops no thread: it reads a sleeping thread in place, and the kernel samples a running one.
/// Exit status: 0 if every process was captured, 1 if one could not be captured or the output could
/// not be written, 2 for a wrong command line.
#[derive(Debug, Clone, Parser)]
#[command(name = "xpu_timer_dump", version)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    which: Processes,
    /// Print native stacks only
    #[arg(long, group = "what")]
    pub native: bool,
    /// Print Python stacks only
    #[arg(long, group = "what")]
    pub python: bool,
    /// Print Python frames at their places in the native stack (the default)
    #[arg(long, group = "what")]
    pub merged: bool,
    /// Also dump all descendants
    #[arg(long)]
    pub children: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Write a `.stacktrace` file for each process into this folder instead of printing
    #[arg(long, short, value_name = "DIR", conflicts_with = "json")]
    pub output: Option<PathBuf>,
    /// Time limit for the whole dump; on a busy machine it may take up to three times as long
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub timeout: Duration,
    /// Time limit for the source lines of C frames; it does not limit their names. Compressed line
    /// tables that would take longer to unpack are skipped
    #[arg(long, value_name = "SECONDS", default_value = "0.02", value_parser = seconds)]
    pub lines: Duration,
    /// Stop each thread while its stack is copied. This may cut short system calls of the process:
    /// they return EINTR, or send only a part of the data. No other option stops a thread
    #[arg(long)]
    pub force_ptrace: bool,
}

#[derive(Debug, Clone, Subcommand)]
enum Command {
    Record(record::Arguments),
}

/// Runs the command.
///
/// # Errors
/// No process was found, or the result cannot be written.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let logs: Targets = env::var("RUST_LOG").ok().and_then(|wanted| wanted.parse().ok()).unwrap_or_default();
    let all = tracing_subscriber::fmt().with_max_level(LevelFilter::TRACE).with_ansi(false);
    // This fails if a test has installed a subscriber already.
    let _ = all.with_writer(|| Lines(io::stderr())).finish().with(logs).try_init();
    if let Some(Command::Record(arguments)) = &arguments.command {
        return record::run(arguments);
    }
    if arguments.force_ptrace
        && let Some(code) = run_in_child()?
    {
        return Ok(code);
    }
    keep_freed_memory();
    let pids = arguments.which.pids()?;
    let view = match (arguments.native, arguments.python) {
        (true, _) => View::Native,
        (_, true) => View::Python,
        _ => View::Merged,
    };
    let options = Options {
        deadline: arguments.timeout,
        children: arguments.children,
        // The state of a thread and its name come with its native stack, so it is always captured.
        native: true,
        python: view != View::Native,
        // Only the files have this.
        causes: arguments.output.is_some(),
        lines_budget: if view == View::Python { Duration::ZERO } else { arguments.lines },
        force_ptrace: arguments.force_ptrace,
    };
    let mut failed = false;
    // Do not drop the caches and the results one by one while the user waits. The end of this
    // process frees them at once.
    let mut capturer = ManuallyDrop::new(Capturer::new());
    let mut capture = |each: &mut dyn FnMut(Stacks) -> Result<()>| {
        let mut result = Ok(());
        capturer.capture_each(&pids, &options, |process| {
            failed |= process.frames.iter().all(Vec::is_empty) && process.sample.py_stacktrace.is_empty();
            if result.is_ok() {
                result = each(process);
            }
        });
        result
    };
    let terminal = io::stdout().is_terminal();
    // The standard library's writer searches all that it writes for ends of lines.
    let stdout = File::from(io::stdout().as_fd().try_clone_to_owned().context("standard output")?);
    let mut out = io::BufWriter::with_capacity(1 << 16, stdout);
    let written = if let Some(folder) = &arguments.output {
        let files = Files::new(folder, &pids)?;
        let mut index = 0;
        capture(&mut |process| {
            let path = files.write(index, "stacktrace", |rank| encode(process, rank))?;
            writeln!(out, "{}", printable::line(&path.to_string_lossy()))?;
            index += 1;
            Ok(())
        })
    } else if arguments.json {
        let mut before = "[";
        capture(&mut |process| {
            out.write_all(std::mem::replace(&mut before, ",\n").as_bytes())?;
            Ok(json::write(&mut out, &ManuallyDrop::new(process), view, terminal)?)
        })
        .and_then(|()| Ok(out.write_all(b"]\n")?))
    } else {
        let colour = terminal && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let mut first = true;
        capture(&mut |process| {
            if !std::mem::take(&mut first) {
                writeln!(out)?;
            }
            Ok(text::print(&mut out, &ManuallyDrop::new(process.into()), view, colour)?)
        })
    };
    match written.and_then(|()| Ok(out.flush()?)) {
        // The reader of the pipe, such as `head`, has ended.
        Err(error) if is_broken_pipe(&error) => {}
        written => written?,
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Starts the process that stops threads, for `--force-ptrace`: a child of the command that does
/// all its work. Returns `None` in the child, which continues. The command waits for the child and
/// ends with its exit code.
///
/// Whatever happens to the command or the child, no thread of the target stays stopped. When a
/// process dies, the kernel releases the threads that it traced. The child dies with the command.
/// It is in a session of its own, so that no key and no hangup of a terminal stops it. If it is
/// frozen while it holds a thread, a timer kills it (`HoldWatchdog`).
#[allow(unsafe_code)]
fn run_in_child() -> Result<Option<ExitCode>> {
    let command = getpid();
    // SAFETY: the command has started no thread yet, so the child has a copy of all its state.
    match unsafe { fork() }.context("cannot fork the process that stops threads")? {
        ForkResult::Child => {
            prctl::set_pdeathsig(Signal::SIGKILL).context("prctl")?;
            if getppid() != command {
                bail!("the command has ended");
            }
            setsid().context("setsid")?;
            ptrace::enable_hold_watchdog();
            Ok(None)
        }
        ForkResult::Parent { child } => {
            let code = match waitpid(child, None).context("waitpid")? {
                WaitStatus::Exited(_, code) => code,
                WaitStatus::Signaled(_, Signal::SIGKILL, _) => {
                    eprintln!(
                        "xpu_timer_dump: its watchdog killed the capture so that no thread stays stopped; try again when the machine is less busy"
                    );
                    1
                }
                status => bail!("the process that stops threads failed: {status:?}"),
            };
            Ok(Some(ExitCode::from(u8::try_from(code).unwrap_or(1))))
        }
    }
}

/// Keeps freed memory for the next process, for the few milliseconds until this program ends. The
/// kernel would have to clear it each time it is returned and taken again.
#[allow(unsafe_code, reason = "mallopt is a function of C")]
fn keep_freed_memory() {
    // Old versions of glibc accept no larger threshold for mmap.
    const BYTES: i32 = 32 << 20;
    // SAFETY: mallopt only changes settings of the allocator.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, BYTES);
    }
}

/// Encodes the [`Stacktrace`] of a process. Expanded frames need much more memory than
/// captured ones, so the threads are expanded and encoded one by one: messages that follow each
/// other are one message to a decoder.
fn encode(process: Stacks, rank: u32) -> Vec<u8> {
    let Stacks { pid, command, mut sample, places, frames, children, .. } = process;
    let mut bytes = Vec::new();
    let mut expander = FrameExpander::new(&places);
    let frames = frames.into_iter().chain(iter::repeat_with(Vec::new));
    for (mut thread, indices) in std::mem::take(&mut sample.stacktrace).into_iter().zip(frames) {
        expander.expand(&indices, &mut thread.frames);
        let part = Stacktrace { stacktrace: vec![thread], ..Stacktrace::default() };
        append(&part, &mut bytes);
        part.stacktrace.into_iter().for_each(|thread| expander.recycle(thread.frames));
    }
    let child = |child: Stacks| {
        let ProcessCapture { pid, parent_pid, command, sample, .. } = child.into();
        ChildProcess { pid, parent_pid, command, samples: vec![sample] }
    };
    let rest = Stacktrace {
        pid,
        rank: rank as i32,
        process_state: sample.process_state.clone(),
        command,
        children: children.into_iter().map(child).collect(),
        py_stacktrace: std::mem::take(&mut sample.py_stacktrace),
        last_sample: Some(sample),
        ..Stacktrace::default()
    };
    append(&rest, &mut bytes);
    bytes
}

fn append(message: &Stacktrace, bytes: &mut Vec<u8>) {
    message.encode(bytes).expect("a vector grows");
}
