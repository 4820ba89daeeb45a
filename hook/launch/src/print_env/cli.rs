//! The command line. Options end at the first argument that is not an option: the rest is the
//! program and its arguments.

use std::{ffi::OsString, path::PathBuf};

/// One line of usage.
pub const USAGE: &str =
    "usage: xpu_timer_print_env [--json] [--pid N | --library FILE | [--] program [argument ...]] | --help | --version";

/// The text of `--help`.
pub const HELP: &str = "\
Shows the settings that are in force, where the parts of xpu_timer are, and what would be hooked.

usage: xpu_timer_print_env [--json] [--pid N | --library FILE | [--] program [argument ...]]

  (nothing)        the settings of this shell
  --pid N          the settings of a running process, the hook in it, and which of its libraries' functions are hooked
  program …        the same for a program, by the libraries that the dynamic loader would load; it is not run
  --library FILE   which functions of a library are hooked, and which are not although their names say that they launch, communicate or multiply
  --json           the same as JSON

Exit codes: 0 all is well; 1 something is wrong: a value that cannot be used, a part that is missing, or a process or program
that cannot be hooked; 2 wrong usage.
";

/// A parsed command line.
#[derive(Debug, PartialEq, Eq)]
pub enum Request {
    /// `--help`.
    Help,
    /// `--version`.
    Version,
    /// Show a report.
    Show {
        /// As JSON.
        json: bool,
        /// The subject of the report.
        target: Wanted,
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
pub enum Wanted {
    /// This shell's settings.
    Here,
    /// A process.
    Process(i32),
    /// A program with its arguments; not empty.
    Program(Vec<OsString>),
}

/// Reads the arguments behind the program's name.
pub fn parse(arguments: Vec<OsString>) -> Request {
    let mut json = false;
    let mut target = Wanted::Here;
    let mut library = None;
    let mut rest = arguments.into_iter();
    while let Some(word) = rest.next() {
        match word.to_str() {
            Some("--help" | "-h") => return Request::Help,
            Some("--version" | "-V") => return Request::Version,
            Some("--json") => json = true,
            Some("--pid" | "-p") => match rest.next() {
                Some(number) => match pid(&number) {
                    Ok(pid) => target = Wanted::Process(pid),
                    Err(why) => return Request::Wrong(why),
                },
                None => return Request::Wrong("--pid needs the number of a process".into()),
            },
            Some(option) if option.starts_with("--pid=") => match pid(&option["--pid=".len()..].into()) {
                Ok(pid) => target = Wanted::Process(pid),
                Err(why) => return Request::Wrong(why),
            },
            Some("--library") => match rest.next().filter(|file| !file.is_empty()) {
                Some(file) => library = Some(PathBuf::from(file)),
                None => return Request::Wrong("--library needs a file".into()),
            },
            Some(option) if option.starts_with("--library=") => library = Some(option["--library=".len()..].into()),
            Some("--") => {
                let program: Vec<OsString> = rest.collect();
                return finish(json, target, library, program, true);
            }
            Some(option) if option.starts_with('-') => return Request::Wrong(format!("unknown option {option}")),
            _ => return finish(json, target, library, std::iter::once(word).chain(rest).collect(), false),
        }
    }
    finish(json, target, library, Vec::new(), false)
}

fn pid(text: &OsString) -> Result<i32, String> {
    let number = text.to_str().and_then(|text| text.parse().ok()).filter(|pid| *pid > 0);
    number.ok_or_else(|| format!("{} is not the number of a process", text.display()))
}

fn finish(json: bool, target: Wanted, library: Option<PathBuf>, program: Vec<OsString>, announced: bool) -> Request {
    match library {
        Some(file) if target == Wanted::Here && program.is_empty() && !announced => {
            return Request::Library { json, file };
        }
        Some(_) => return Request::Wrong("a library is compared by itself".into()),
        None => {}
    }
    match (target, program.is_empty()) {
        (Wanted::Process(_), false) => Request::Wrong("a process and a program cannot both be shown".into()),
        (Wanted::Here, false) if program[0].is_empty() => Request::Wrong("the program is empty".into()),
        (Wanted::Here, false) => Request::Show { json, target: Wanted::Program(program) },
        (Wanted::Here, true) if announced => Request::Wrong("no program".into()),
        (target, _) => Request::Show { json, target },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: &[&str]) -> Request {
        parse(words.iter().map(OsString::from).collect())
    }

    #[test]
    fn targets_and_options() {
        let show = |json, target| Request::Show { json, target };
        let program = |words: &[&str]| Wanted::Program(words.iter().map(OsString::from).collect());
        assert_eq!(of(&[]), show(false, Wanted::Here));
        assert_eq!(of(&["--json", "--pid", "7"]), show(true, Wanted::Process(7)));
        assert_eq!(of(&["--pid=7", "--json"]), show(true, Wanted::Process(7)));
        assert_eq!(of(&["python", "--json", "--pid"]), show(false, program(&["python", "--json", "--pid"])));
        assert_eq!(of(&["--json", "--", "--odd"]), show(true, program(&["--odd"])));
        let library = |json, file: &str| Request::Library { json, file: file.into() };
        assert_eq!(of(&["--library", "libnccl.so.2", "--json"]), library(true, "libnccl.so.2"));
        assert_eq!(of(&["--library=a b"]), library(false, "a b"));
        assert_eq!((of(&["-h"]), of(&["--version", "x"])), (Request::Help, Request::Version));
    }

    #[test]
    fn what_makes_no_sense_is_wrong() {
        for words in [
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
            assert!(matches!(of(words), Request::Wrong(_)), "{words:?}");
        }
    }
}
