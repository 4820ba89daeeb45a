//! The launcher in front of the user's command: it starts the node collector if none answers, adds
//! the hook to LD_PRELOAD, and becomes the command.
//!
//! An error never prevents the command from running: it is printed once on stderr, in one line, and
//! the command runs without the tool. Exit codes: the command's own; 127 if it is not found, 126 if
//! it cannot be executed, 2 for wrong usage.
#![deny(unsafe_code)]
#![warn(unreachable_pub)]

#[allow(unsafe_code)]
mod bounded_io;
mod cli;
mod collector;
mod config;
mod container;
mod image;
mod preload;
mod print_env;
#[allow(unsafe_code)]
mod probe;
#[allow(unsafe_code)]
mod process;

use std::{
    ffi::{CString, OsString},
    io::Write,
    os::unix::ffi::OsStrExt,
    process::ExitCode,
};

use nix::errno::Errno;
use xpu_timer_proto::{printable, procfs, ring};

use cli::{LaunchRequest as Request, NOT_EXECUTABLE, NOT_FOUND, WRONG_USAGE};
use config::Config;
use image::{Image, Obstacle};
pub use print_env::main as print_env;

/// Runs with the arguments after the program's name. Returns only if the command could not be
/// executed, or if there was none.
#[must_use]
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    match cli::parse_launch(arguments) {
        Request::Help => print(&cli::launch_help()),
        Request::Version => print(&format!("xpu_timer_launch {}\n", env!("CARGO_PKG_VERSION"))),
        Request::Wrong(why) => {
            say(&why);
            let _ = std::io::stderr().write_all(format!("{}\n", cli::LAUNCH_USAGE).as_bytes());
            ExitCode::from(WRONG_USAGE)
        }
        Request::Run(command) => run(&command),
    }
}

fn run(command: &[OsString]) -> ExitCode {
    let config = Config::read();
    config.remarks.iter().for_each(|remark| say(remark));
    let changes = if config.disabled {
        Vec::new()
    } else if let Some(why) = impossible(command) {
        say(&format!("running without the hook: {why}"));
        // A launcher above this one may have added the hook.
        preload::without_hook(std::env::var_os("LD_PRELOAD")).map(|value| ("LD_PRELOAD", value)).into_iter().collect()
    } else {
        prepare(command, &config)
    };
    ExitCode::from(become_command(command, &changes))
}

/// Why the hook would be useless or harmful for the command.
fn impossible(command: &[OsString]) -> Option<String> {
    let elsewhere = container::elsewhere(command).filter(|elsewhere| elsewhere.in_container);
    if let Some(elsewhere) = elsewhere {
        return Some(elsewhere.advice);
    }
    // A missing command is reported when it is executed.
    let image = Image::of(command).ok();
    let obstacle = image.as_ref().and_then(|image| Some((image, image.obstacle.as_ref()?)));
    match obstacle {
        Some((image, obstacle)) if obstacle.forbids_preload() => Some(format!("{}: {obstacle}", image.file.display())),
        _ => probe::forbidden(),
    }
}

/// Prepares collector and hook for a command. Returns the changes of its environment.
fn prepare(command: &[OsString], config: &Config) -> Vec<(&'static str, OsString)> {
    config.moved.iter().for_each(|moved| say(moved));
    let (mut config, mut has_own_collector) = (config.clone(), false);
    let (changes, ensured) = loop {
        let differing = collector::differing_settings(&config);
        if !differing.is_empty() && !has_own_collector {
            has_own_collector = true;
            match collector::with_own_collector(&config) {
                Ok(own) => config = own,
                Err(why) => say(&format!(
                    "the node collector has other values of {}, and this job cannot start its own collector: {why}",
                    differing.join(", ")
                )),
            }
        }
        let mut changes = config.changed.clone();
        changes.push(("XPU_TIMER_SOCKET", config.socket.clone().into_os_string()));
        changes.push(("XPU_TIMER_LAUNCH_ID", launch_id().into()));
        let ensured = collector::ensure(&config, &changes);
        // Another launcher, with other settings, may have been faster.
        if has_own_collector || ensured.is_err() || collector::differing_settings(&config).is_empty() {
            break (changes, ensured);
        }
    };
    let (config, mut changes) = (&config, changes);
    match ensured {
        Ok(found) => {
            // Processes that never connect can then permit the collector to inspect them, too.
            changes.push(("XPU_TIMER_COLLECTOR_PID", found.pid.to_string().into()));
            let remarks = [found.remark, collector::overruled(config), config::timeline_remark(&config.timeline)];
            remarks.into_iter().flatten().for_each(|remark| say(&remark));
        }
        Err(error) => say(&format!("running without the node collector: {error:#}")),
    }
    match preload::for_command(config, command, std::env::var_os("LD_PRELOAD")) {
        Ok(value) => {
            changes.push(("LD_PRELOAD", value));
            changes.push(("XPU_TIMER_FILTERS", filters().into()));
            if let Some(remark) = remark(command) {
                say(&remark);
            }
        }
        Err(error) => say(&format!("running without the hook: {error:#}")),
    }
    changes
}

/// The number of seccomp filters under which the command starts, and the boot of the machine. If a
/// process of the command has more filters, it or its parent installed them, and the hook is
/// inactive in it.
fn filters() -> String {
    let status = procfs::status_text("self").unwrap_or_default();
    format!("{}:{}", ring::filters(status.as_bytes()), procfs::boot_id())
}

/// The process that becomes the command: pid and start time. Processes of the command inherit it,
/// so they belong to the command even after the processes in between have ended.
fn launch_id() -> String {
    let start = procfs::stat("self").map_or(0, |stat| stat.start_time);
    format!("{}:{start}", std::process::id())
}

/// A remark about a command that gets the hook, but runs its ranks in other processes or on other
/// nodes.
fn remark(command: &[OsString]) -> Option<String> {
    if let Some(elsewhere) = container::elsewhere(command) {
        return Some(elsewhere.advice);
    }
    let image = Image::of(command).ok()?;
    let obstacle = image.obstacle?;
    let advice = match obstacle {
        Obstacle::Privileged => "put xpu_timer_launch behind it",
        _ => "only programs that it starts get the hook",
    };
    Some(format!("{}: {obstacle}; {advice}", image.file.display()))
}

/// Replaces this process. Returns the exit code if that fails.
fn become_command(command: &[OsString], changes: &[(&str, OsString)]) -> u8 {
    let text = |text: &OsString| CString::new(text.as_bytes());
    let kept = std::env::vars_os().filter(|(name, _)| changes.iter().all(|(changed, _)| *name != **changed));
    let changed = changes.iter().map(|(name, value)| (OsString::from(name), value.clone()));
    let environment: Result<Vec<CString>, _> = kept
        .chain(changed)
        .map(|(mut name, value)| {
            name.push("=");
            name.push(value);
            text(&name)
        })
        .collect();
    let arguments: Result<Vec<CString>, _> = command.iter().map(text).collect();
    let (Ok(environment), Ok(arguments)) = (environment, arguments) else {
        // Neither the arguments nor the environment of a process can contain a NUL, so this cannot
        // happen.
        return NOT_EXECUTABLE;
    };
    process::restore_inherited();
    let Err(error) = nix::unistd::execvpe(&arguments[0], &arguments, &environment);
    say(&format!("{}: {}", command[0].display(), error.desc()));
    if error == Errno::ENOENT || error == Errno::ENOTDIR { NOT_FOUND } else { NOT_EXECUTABLE }
}

/// Prints to stdout. A reader that is gone is not an error.
fn print(text: &str) -> ExitCode {
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

/// Prints one line to stderr in one write, so that the lines of several ranks do not mix. If stderr
/// is closed, the message is lost.
fn say(text: &str) {
    let _ = std::io::stderr().write_all(format!("xpu_timer_launch: {}\n", printable::line(text)).as_bytes());
}
