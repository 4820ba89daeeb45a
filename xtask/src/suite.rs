//! Runs all tests, and a few that failed again, alone.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::thread::available_parallelism;

use anyhow::{Context, Result, bail};

use crate::shell::words;

/// More failures than this are no accident of a busy machine: none of them is run again …
const ACCIDENTS: usize = 4;

/// … and fewer are so often. One that is broken fails each time.
const AGAIN: usize = 2;

/// Tests at once for each core: most of them wait for a timeout most of the time.
const TESTS_A_CORE: usize = 2;

/// What libtest printed, as far as it says which tests failed.
#[derive(Debug, Default, PartialEq, Eq)]
struct Log {
    failed: Vec<String>,
    /// Executables that began to run tests
    begun: usize,
    /// Executables that came to their closing line: one that crashed does not
    ended: usize,
}

impl Log {
    fn read(&mut self, line: &str) {
        let result = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED"));
        if let Some(name) = result {
            self.failed.push(name.to_owned());
        } else if line.starts_with("test result: ") {
            self.ended += 1;
        } else if line.strip_prefix("running ").is_some_and(|rest| rest.ends_with(" tests") || rest == "1 test") {
            self.begun += 1;
        }
    }

    /// Whether the failures can be told from a test executable that crashed or was not built, and are few.
    fn may_be_accidents(&self) -> bool {
        (1..=ACCIDENTS).contains(&self.failed.len()) && self.begun == self.ended
    }
}

/// Runs `cargo test` with `harness` options for libtest. Many tests start dozens of processes and share two cores, so a few that
/// fail are run again, one at a time: one that fails again and again is a failure, one that passes is named at the end. What reads the
/// output counts a test as failed by its last line, so that of a run that another one follows says so in other words.
///
/// # Errors
/// A test that failed each time, more than [`ACCIDENTS`] that failed, an executable that crashed or could not be built.
pub fn run(test: impl Fn() -> Command, harness: Option<&str>) -> Result<()> {
    let mut command = test();
    let at_once = TESTS_A_CORE * available_parallelism().map_or(1, usize::from);
    command.arg("--").arg(format!("--test-threads={at_once}")).args(harness);
    let (success, mut log) = follow(&mut command)?;
    if success {
        return Ok(());
    }
    let line = words(&command);
    let mut late = Vec::new();
    for _ in 0..AGAIN {
        if !log.may_be_accidents() {
            break;
        }
        eprintln!("again, alone: {}", log.failed.join(" "));
        let mut again = test();
        again.args(["--", "--exact", "--test-threads=1"]).args(&log.failed);
        let (success, next) = follow(&mut again)?;
        late.extend(log.failed.into_iter().filter(|name| !next.failed.contains(name)));
        if success {
            eprintln!("passed only when run again, alone: {}", late.join(" "));
            return Ok(());
        }
        log = next;
    }
    log.failed.iter().for_each(|name| println!("test {name} ... FAILED"));
    bail!("{line}: {} tests failed: {}", log.failed.len(), log.failed.join(" "))
}

/// Runs a command, passes on what it prints, and reads it.
fn follow(command: &mut Command) -> Result<(bool, Log)> {
    let line = words(command);
    eprintln!("$ {line}");
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| line.clone())?;
    let mut log = Log::default();
    for text in BufReader::new(child.stdout.take().expect("piped")).split(b'\n') {
        let text = String::from_utf8_lossy(&text?).into_owned();
        log.read(&text);
        println!("{}", in_passing(&text));
    }
    Ok((child.wait()?.success(), log))
}

/// A line about a failure that is not the last word.
fn in_passing(line: &str) -> String {
    match line.strip_prefix("test result: FAILED. ") {
        Some(counts) => format!("so far: {counts}"),
        None => line.replace(" ... FAILED", " ... failed this time"),
    }
}

#[cfg(test)]
mod tests {
    use super::Log;

    fn read(text: &str) -> Log {
        let mut log = Log::default();
        text.lines().for_each(|line| log.read(line));
        log
    }

    #[test]
    fn a_failure_is_run_again_and_a_crash_is_not() {
        let closing = "test result: FAILED. 1 passed; 1 failed; 0 ignored\n";
        let one = "\nrunning 2 tests\ntest a::b ... ok\ntest a::c ... FAILED\n\nfailures:\n    a::c\n";
        let ended = read(&[one, closing].concat());
        assert_eq!(ended, Log { failed: vec!["a::c".to_owned()], begun: 1, ended: 1 });
        assert!(ended.may_be_accidents());
        assert!(!read(one).may_be_accidents(), "it crashed");
        assert!(!read("").may_be_accidents(), "it was not built");
        let many = "test a ... FAILED\n".repeat(super::ACCIDENTS + 1);
        assert!(!read(&["running 5 tests\n", &many, closing].concat()).may_be_accidents());
        let said: Vec<String> = [one, closing].concat().lines().map(super::in_passing).collect();
        assert!(
            said.iter().all(|line| !line.contains("FAILED")) && said.contains(&"test a::c ... failed this time".into())
        );
    }
}
