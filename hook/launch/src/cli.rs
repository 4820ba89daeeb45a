//! The command line. The launcher's options end at the first argument that is not an option: the
//! rest is the user's command.

use std::ffi::OsString;

use xpu_timer_proto::env::{VARIABLES, Variable};

/// One line of usage.
pub const USAGE: &str = "usage: xpu_timer_launch [--help | --version] [--] command [argument ...]";

/// A parsed command line.
#[derive(Debug, PartialEq, Eq)]
pub enum Request {
    /// `--help`.
    Help,
    /// `--version`.
    Version,
    /// Runs a command; not empty.
    Run(Vec<OsString>),
    /// Wrong usage, and why.
    Wrong(String),
}

/// Parses the arguments after the program's name.
pub fn parse(mut arguments: Vec<OsString>) -> Request {
    let first = arguments.first().map(|first| first.to_string_lossy().into_owned());
    match first.as_deref() {
        None => Request::Wrong("no command".into()),
        Some("--help" | "-h") => Request::Help,
        Some("--version" | "-V") => Request::Version,
        Some("--") => {
            arguments.remove(0);
            if arguments.is_empty() { Request::Wrong("no command".into()) } else { Request::Run(arguments) }
        }
        Some(option) if option.starts_with('-') => Request::Wrong(format!("unknown option {option}")),
        Some("") => Request::Wrong("the command is empty".into()),
        Some(_) => Request::Run(arguments),
    }
}

/// The text of `--help`.
pub fn help() -> String {
    let mut text = format!(
        "\
Runs a command, such as `python train.py` or `torchrun …`, so that a hang of its GPU ranks is found and explained.

{USAGE}

Starts the node collector (xpu_timer_collector node) if none answers for this user and port, puts libxpu_timer_hook.so in front of
LD_PRELOAD, and becomes the command: exit code, signals, input and output are its own. If the collector cannot be started, the
command runs without it, and one line on stderr says why.

When a hang is found, a folder with the verdict and the stacks of all ranks appears below XPU_TIMER_TIMELINE_PATH.

Environment (name, default, meaning):
"
    );
    let (own, of_people): (Vec<&Variable>, Vec<&Variable>) =
        VARIABLES.iter().partition(|variable| variable.is_set_by_launcher);
    for variable in of_people {
        let default = if variable.default.is_empty() { "-" } else { variable.default };
        text.push_str(&format!("  {:<26} {default:<15} {}\n", variable.name, variable.meaning));
    }
    let own: Vec<&str> = own.iter().map(|variable| variable.name).collect();
    text.push_str(&format!(
        "Set by xpu_timer_launch itself: {}

Exit codes of its own: 2 wrong usage, 126 the command cannot be executed, 127 the command is not found.
",
        own.join(", ")
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(words: &[&str]) -> Request {
        parse(words.iter().map(OsString::from).collect())
    }

    fn run(words: &[&str]) -> Request {
        Request::Run(words.iter().map(OsString::from).collect())
    }

    #[test]
    fn options_end_where_the_command_begins() {
        assert_eq!(request(&["python", "--help"]), run(&["python", "--help"]));
        assert_eq!(request(&["--", "--help"]), run(&["--help"]));
        assert_eq!(request(&["--", "--", "x"]), run(&["--", "x"]));
        assert_eq!(request(&["--help", "python"]), Request::Help);
        assert_eq!(request(&["-V"]), Request::Version);
    }

    #[test]
    fn what_cannot_be_run_is_wrong() {
        for words in [&[][..], &["--"], &["--verbose", "x"], &[""]] {
            assert!(matches!(request(words), Request::Wrong(_)), "{words:?}");
        }
    }

    #[test]
    fn help_shows_every_variable_with_its_default_and_fits_a_tall_screen() {
        let help = help();
        for variable in VARIABLES {
            assert!(help.contains(variable.name) && help.contains(variable.default), "{}", variable.name);
        }
        assert!(help.contains("itself: XPU_TIMER_CONFIG_READ, XPU_TIMER_SOCKET"), "{help}");
        assert!(help.lines().count() <= 60, "{}", help.lines().count());
    }
}
