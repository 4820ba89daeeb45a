//! The command lines of both programs, and their exit codes. Options end at the first argument that
//! is not an option: the rest is the user's command, or the program with its arguments.

use std::{
    ffi::{OsStr, OsString},
    iter,
    path::PathBuf,
};

use lexopt::{
    Arg::{Long, Short, Value},
    Parser,
};
use xpu_timer_proto::{
    env::{VARIABLES, Variable},
    printable,
};

/// Exit code for wrong usage.
pub(crate) const WRONG_USAGE: u8 = 2;
/// A shell's exit code for a command that exists but cannot be executed.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// A shell's exit code for a command that does not exist.
pub(crate) const NOT_FOUND: u8 = 127;

/// One line of usage of `xpu_timer_launch`.
pub(crate) const LAUNCH_USAGE: &str = "usage: xpu_timer_launch [--help | --version] [--] command [argument ...]";

/// A parsed command line of `xpu_timer_launch`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LaunchRequest {
    /// `--help`.
    Help,
    /// `--version`.
    Version,
    /// Runs a command; not empty.
    Run(Vec<OsString>),
    /// Wrong usage, and why.
    Wrong(String),
}

/// Parses the arguments of `xpu_timer_launch`.
pub(crate) fn parse_launch(arguments: Vec<OsString>) -> LaunchRequest {
    launch_request(arguments).unwrap_or_else(|error| LaunchRequest::Wrong(error.to_string()))
}

fn launch_request(arguments: Vec<OsString>) -> Result<LaunchRequest, lexopt::Error> {
    let mut parser = Parser::from_args(arguments);
    match parser.next()? {
        None => Err("no command is given".into()),
        Some(Long("help") | Short('h')) => Ok(LaunchRequest::Help),
        Some(Long("version") | Short('V')) => Ok(LaunchRequest::Version),
        Some(Value(command)) if command.is_empty() => Err("the command is empty".into()),
        Some(Value(command)) => Ok(LaunchRequest::Run(iter::once(command).chain(parser.raw_args()?).collect())),
        Some(option) => Err(option.unexpected()),
    }
}

/// Columns at which help texts wrap.
const COLUMNS: usize = 100;
/// Column of the meaning of a variable.
const MEANING: usize = 41;

/// Stands for a space at which a line does not break.
const UNBROKEN: char = '\u{1}';

/// The text of `xpu_timer_launch --help`.
pub(crate) fn launch_help() -> String {
    let mut text = format!(
        "\
Runs a command, such as `python train.py` or `torchrun …`, and explains each hang of its GPU ranks.

{LAUNCH_USAGE}

Starts the node collector (xpu_timer_collector node) if none answers for this user and port, puts
libxpu_timer_hook.so first in LD_PRELOAD, and becomes the command, with its exit code, signals,
input and output. If the collector cannot be started, the command runs without it, and one line on
stderr says why.

For each hang, the collector writes the verdict and the stacks of all ranks into a folder below
XPU_TIMER_TIMELINE_PATH.

Environment:
"
    );
    let (own, of_people): (Vec<&Variable>, Vec<&Variable>) =
        VARIABLES.iter().partition(|variable| variable.is_set_by_launcher);
    for Variable { name, default, meaning, .. } in of_people {
        let default = if default.is_empty() { String::new() } else { format!(" [default:{UNBROKEN}{default}]") };
        let meaning = printable::wrapped(&format!("{meaning}{default}"), COLUMNS - MEANING).replace(UNBROKEN, " ");
        let margin = format!("\n{:MEANING$}", "");
        text.push_str(&format!("  {name:<width$}{}\n", meaning.replace('\n', &margin), width = MEANING - 2));
    }
    let own: Vec<&str> = own.iter().map(|variable| variable.name).collect();
    let own = format!("Set by xpu_timer_launch itself: {}", own.join(", "));
    let exit_codes = "Exit code of the command, or 2 for wrong usage, 126 if the command cannot be executed, 127 if \
                      it is not found.";
    text.push_str(&format!("\n{}\n\n{}\n", printable::wrapped(&own, COLUMNS), printable::wrapped(exit_codes, COLUMNS)));
    text
}

/// One line of usage of `xpu_timer_print_env`.
pub(crate) const PRINT_ENV_USAGE: &str =
    "usage: xpu_timer_print_env [--json] [--pid N | --library FILE | [--] program [argument ...]] | --help | --version";

/// The text of `xpu_timer_print_env --help`.
pub(crate) const PRINT_ENV_HELP: &str = "\
Shows the settings in force, where the parts of xpu_timer are, and which functions are hooked.

usage: xpu_timer_print_env [--json] [--pid N | --library FILE | [--] program [argument ...]]

  (nothing)        the settings of this shell
  --pid N          the settings of a running process, whether the hook is in it, and the hooked
                   functions of its libraries
  program …        the settings of a program, and the hooked functions of it and of the libraries
                   that the dynamic loader would load; does not run it
  --library FILE   the hooked functions of a library, and functions that are not hooked but look
                   like launches, collectives or matrix products
  --json           prints the report as JSON

Exit codes: 0 without a problem; 1 for an invalid value, a missing part, or a process or program
that cannot be hooked; 2 for wrong usage.
";

/// A parsed command line of `xpu_timer_print_env`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PrintEnvRequest {
    /// `--help`.
    Help,
    /// `--version`.
    Version,
    /// Show a report.
    Show {
        /// As JSON.
        json: bool,
        /// The subject of the report.
        target: ReportSubject,
    },
    /// Compare a library with the hook.
    Library {
        /// As JSON.
        json: bool,
        /// Its file.
        file: PathBuf,
    },
    /// Wrong usage, and why.
    Wrong(String),
}

/// The subject of a report.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReportSubject {
    /// This shell's settings.
    Here,
    /// A process.
    Process(i32),
    /// A program with its arguments; not empty.
    Program(Vec<OsString>),
}

/// Parses the arguments of `xpu_timer_print_env`.
pub(crate) fn parse_print_env(arguments: Vec<OsString>) -> PrintEnvRequest {
    print_env_request(arguments).unwrap_or_else(|error| PrintEnvRequest::Wrong(error.to_string()))
}

fn print_env_request(arguments: Vec<OsString>) -> Result<PrintEnvRequest, lexopt::Error> {
    let (mut json, mut pid, mut library, mut program) = (false, None, None, Vec::new());
    let mut parser = Parser::from_args(arguments);
    loop {
        let is_end_of_options =
            parser.try_raw_args().is_some_and(|rest| rest.peek().is_some_and(|argument| argument == "--"));
        match parser.next()? {
            Some(Long("help") | Short('h')) => return Ok(PrintEnvRequest::Help),
            Some(Long("version") | Short('V')) => return Ok(PrintEnvRequest::Version),
            Some(Long("json")) => json = true,
            Some(Long("pid") | Short('p')) => pid = Some(parse_pid(&parser.value()?)?),
            Some(Long("library")) => library = Some(PathBuf::from(parser.value()?)),
            Some(Value(name)) if name.is_empty() => return Err("the program is empty".into()),
            Some(Value(name)) => program = iter::once(name).chain(parser.raw_args()?).collect(),
            Some(option) => return Err(option.unexpected()),
            None if is_end_of_options => return Err("no program is given after --".into()),
            None => break,
        }
    }
    match (pid, library, program.is_empty()) {
        (_, Some(file), _) if file.as_os_str().is_empty() => Err("--library needs a file".into()),
        (None, Some(file), true) => Ok(PrintEnvRequest::Library { json, file }),
        (_, Some(_), _) => Err("--library cannot be combined with --pid or a program".into()),
        (Some(_), None, false) => Err("--pid cannot be combined with a program".into()),
        (Some(pid), None, true) => Ok(PrintEnvRequest::Show { json, target: ReportSubject::Process(pid) }),
        (None, None, false) => Ok(PrintEnvRequest::Show { json, target: ReportSubject::Program(program) }),
        (None, None, true) => Ok(PrintEnvRequest::Show { json, target: ReportSubject::Here }),
    }
}

fn parse_pid(text: &OsStr) -> Result<i32, String> {
    let number = text.to_str().and_then(|text| text.parse().ok()).filter(|pid| *pid > 0);
    number.ok_or_else(|| format!("{} is not a pid", text.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch_of(arguments: &[&str]) -> LaunchRequest {
        parse_launch(arguments.iter().map(OsString::from).collect())
    }

    fn launch_run(arguments: &[&str]) -> LaunchRequest {
        LaunchRequest::Run(arguments.iter().map(OsString::from).collect())
    }

    #[test]
    fn options_end_where_the_command_begins() {
        assert_eq!(launch_of(&["python", "--help"]), launch_run(&["python", "--help"]));
        assert_eq!(launch_of(&["--", "--help"]), launch_run(&["--help"]));
        assert_eq!(launch_of(&["--", "--", "x"]), launch_run(&["--", "x"]));
        assert_eq!(launch_of(&["--help", "python"]), LaunchRequest::Help);
        assert_eq!(launch_of(&["-V"]), LaunchRequest::Version);
    }

    #[test]
    fn invalid_commands_are_usage_errors() {
        for arguments in [&[][..], &["--"], &["--verbose", "x"], &[""]] {
            assert!(matches!(launch_of(arguments), LaunchRequest::Wrong(_)), "{arguments:?}");
        }
    }

    #[test]
    fn help_shows_every_variable_with_its_default_and_wraps() {
        let help = launch_help();
        for variable in VARIABLES {
            assert!(help.contains(variable.name) && help.contains(variable.default), "{}", variable.name);
        }
        assert!(help.contains("itself: XPU_TIMER_CONFIG_READ, XPU_TIMER_SOCKET"), "{help}");
        let is_wide = |line: &&str| line.chars().count() > COLUMNS;
        let wide: Vec<&str> = help.lines().chain(PRINT_ENV_HELP.lines()).filter(is_wide).collect();
        assert!(wide.is_empty(), "{wide:#?}");
    }

    fn print_env_request_of(arguments: &[&str]) -> PrintEnvRequest {
        parse_print_env(arguments.iter().map(OsString::from).collect())
    }

    #[test]
    fn targets_and_options() {
        let show = |json, target| PrintEnvRequest::Show { json, target };
        let program = |arguments: &[&str]| ReportSubject::Program(arguments.iter().map(OsString::from).collect());
        assert_eq!(print_env_request_of(&[]), show(false, ReportSubject::Here));
        assert_eq!(print_env_request_of(&["--json", "--pid", "7"]), show(true, ReportSubject::Process(7)));
        assert_eq!(print_env_request_of(&["--pid=7", "--json"]), show(true, ReportSubject::Process(7)));
        assert_eq!(
            print_env_request_of(&["python", "--json", "--pid"]),
            show(false, program(&["python", "--json", "--pid"]))
        );
        assert_eq!(print_env_request_of(&["--json", "--", "--odd"]), show(true, program(&["--odd"])));
        let library = |json, file: &str| PrintEnvRequest::Library { json, file: file.into() };
        assert_eq!(print_env_request_of(&["--library", "libnccl.so.2", "--json"]), library(true, "libnccl.so.2"));
        assert_eq!(print_env_request_of(&["--library=a b"]), library(false, "a b"));
        assert_eq!(
            (print_env_request_of(&["-h"]), print_env_request_of(&["--version", "x"])),
            (PrintEnvRequest::Help, PrintEnvRequest::Version)
        );
    }

    #[test]
    fn contradictory_arguments_are_usage_errors() {
        for arguments in [
            &["--pid"][..],
            &["--pid", "x"],
            &["--pid=0"],
            &["--pid", "-3"],
            &["--pid", "7", "python"],
            &["--frob"],
            &["--"],
            &[""],
            &["--pid", "99999999999"],
            &["--library"],
            &["--library", "a", "--pid", "7"],
            &["--library", "a", "python"],
        ] {
            assert!(matches!(print_env_request_of(arguments), PrintEnvRequest::Wrong(_)), "{arguments:?}");
        }
    }
}
