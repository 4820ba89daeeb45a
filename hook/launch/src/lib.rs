//! The word in front of the user's command: starts the node collector when none answers, puts the hook in front of LD_PRELOAD, and
//! becomes the command.
//!
//! Nothing that goes wrong on the way keeps the command from running: it is said once on stderr, in one line, and the command runs
//! without the tool. Exit codes: the command's own; 127 when it is not found, 126 when it cannot be executed, 2 for wrong usage.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod apart;
mod cli;
mod collector;
mod config;
mod container;
#[allow(unsafe_code)]
mod detach;
mod image;
mod preload;
mod print_env;
#[allow(unsafe_code)]
mod probe;
#[allow(unsafe_code)]
mod signals;
mod timeline;

use std::{
    ffi::{CString, OsString},
    io::Write,
    os::unix::ffi::OsStrExt,
    process::ExitCode,
};

use nix::errno::Errno;
use xpu_timer_proto::{printable, ring};

use cli::Request;
use config::Config;
use image::{Image, Obstacle};
pub use print_env::main as print_env;

/// Exit code for wrong usage.
const USAGE: u8 = 2;
/// Exit code of a shell for a command that is there but cannot be executed.
const NOT_EXECUTABLE: u8 = 126;
/// Exit code of a shell for a command that is not there.
const NOT_FOUND: u8 = 127;

/// Runs with the arguments behind the program's name. Returns only when the command could not be executed, or was none.
#[must_use]
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    match cli::parse(arguments) {
        Request::Help => print(&cli::help()),
        Request::Version => print(&format!("xpu_timer_launch {}\n", env!("CARGO_PKG_VERSION"))),
        Request::Wrong(why) => {
            say(&why);
            let _ = std::io::stderr().write_all(format!("{}\n", cli::USAGE).as_bytes());
            ExitCode::from(USAGE)
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
        // A launcher above this one may have put it there.
        preload::without_hook(std::env::var_os("LD_PRELOAD")).map(|value| ("LD_PRELOAD", value)).into_iter().collect()
    } else {
        prepare(command, &config)
    };
    ExitCode::from(become_command(command, &changes))
}

/// Why the hook would be of no use to the command, or do it harm.
fn impossible(command: &[OsString]) -> Option<String> {
    let elsewhere = container::elsewhere(command).filter(|elsewhere| elsewhere.in_container);
    if let Some(elsewhere) = elsewhere {
        return Some(elsewhere.advice);
    }
    // A command that is not there is said when it cannot be executed.
    let image = Image::of(command).ok();
    let obstacle = image.as_ref().and_then(|image| Some((image, image.obstacle.as_ref()?)));
    match obstacle {
        Some((image, obstacle)) if obstacle.forbids_preload() => Some(format!("{}: {obstacle}", image.file.display())),
        _ => probe::forbidden(),
    }
}

/// Collector and hook for a command that can have them: what changes in its environment.
fn prepare(command: &[OsString], config: &Config) -> Vec<(&'static str, OsString)> {
    config.moved.iter().for_each(|moved| say(moved));
    let (mut config, mut is_apart) = (config.clone(), false);
    let (changes, ensured) = loop {
        let unlike = collector::unlike(&config);
        if !unlike.is_empty() && !is_apart {
            is_apart = true;
            match collector::apart(&config) {
                Ok(own) => config = own,
                Err(why) => say(&format!("the node collector has another {}: {why}", unlike.join(", "))),
            }
        }
        let mut changes = config.changed.clone();
        changes.push(("XPU_TIMER_SOCKET", config.socket.clone().into_os_string()));
        changes.push(("XPU_TIMER_LAUNCH_ID", launch_id().into()));
        let ensured = collector::ensure(&config, &changes);
        // Another launcher may have been faster, with other settings.
        if is_apart || ensured.is_err() || collector::unlike(&config).is_empty() {
            break (changes, ensured);
        }
    };
    let (config, mut changes) = (&config, changes);
    match ensured {
        Ok(found) => {
            // So that also those processes can let it look into them that never connect.
            changes.push(("XPU_TIMER_COLLECTOR_PID", found.pid.to_string().into()));
            let remarks = [found.remark, collector::overruled(config), timeline::remark(&config.timeline)];
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

/// How many seccomp filters the command starts under, and on which boot of which machine. A process of the command with more filters has
/// put them on itself, or was put under them by its parent, and the hook keeps out of it.
fn filters() -> String {
    let status = std::fs::read("/proc/self/status").unwrap_or_default();
    let boot = std::fs::read_to_string(ring::BOOT_ID).unwrap_or_default();
    format!("{}:{}", ring::filters(&status), boot.trim())
}

/// The process that becomes the command, by pid and start time. What the command starts inherits it, and so belongs to it also when the
/// processes in between have ended.
fn launch_id() -> String {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name stands in parentheses and may hold any character; the start time is field 22.
    let start = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(19)).unwrap_or("0");
    format!("{}:{start}", std::process::id())
}

/// What is to be known of a command that gets the hook, and yet not in its own process or not on its own node.
fn remark(command: &[OsString]) -> Option<String> {
    if let Some(elsewhere) = container::elsewhere(command) {
        return Some(elsewhere.advice);
    }
    let image = Image::of(command).ok()?;
    let obstacle = image.obstacle?;
    let advice = match obstacle {
        Obstacle::Privileged => "write xpu_timer_launch behind it",
        _ => "only programs that it starts get the hook",
    };
    Some(format!("{}: {obstacle}; {advice}", image.file.display()))
}

/// Replaces this process. The exit code for when that fails.
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
        // Neither an argument nor the environment of a process can hold a NUL, so neither did.
        return NOT_EXECUTABLE;
    };
    signals::as_inherited();
    let Err(error) = nix::unistd::execvpe(&arguments[0], &arguments, &environment);
    say(&format!("{}: {}", command[0].display(), error.desc()));
    if error == Errno::ENOENT || error == Errno::ENOTDIR { NOT_FOUND } else { NOT_EXECUTABLE }
}

/// The product, on stdout; a reader that went away is content.
fn print(text: &str) -> ExitCode {
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

/// One line on stderr, in one write, so that the lines of several ranks do not mix. Nobody can be told when stderr is closed.
fn say(text: &str) {
    let _ = std::io::stderr().write_all(format!("xpu_timer_launch: {}\n", printable::line(text)).as_bytes());
}
