//! The command `xpu_timer_dump`: every option, and what it says and answers when something is
//! wrong.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use nix::sys::signal::Signal;
use serde_json::Value;
use xpu_timer_proto::{Message, server::Stacktrace};
use xpu_timer_tests::{Output, PATIENCE, Process, artifacts, compile_c, copy_program, lacks, python, skip, wait_until};

use crate::collector::Tmpfs;

/// Two threads with the same stack, and a child.
const PROGRAM: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <signal.h>
#include <unistd.h>
static __attribute__((noinline)) int wait_here(void) { return pause() + 1; }
static void *thread(void *unused) { return (void *)(long)(wait_here() + (unused != 0)); }
int main(void) {
    pthread_t threads[2];
    if (fork() == 0) { prctl(PR_SET_PDEATHSIG, SIGKILL); return wait_here(); }
    for (int i = 0; i < 2; i++) { pthread_create(&threads[i], 0, thread, 0); pthread_setname_np(threads[i], i ? "two" : "one"); }
    puts("ready"); fflush(stdout);
    return wait_here() + 1;
}
"#;

struct Target {
    folder: tempfile::TempDir,
    process: Process,
}

impl Target {
    fn start(environment: &[(&str, String)]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let program = compile_c(folder.path(), "program", PROGRAM, &["-O1", "-g", "-pthread"]);
        let mut process = Process::spawn(Command::new(program).envs(environment.iter().map(|(k, v)| (*k, v.clone()))));
        process.wait_for("ready", PATIENCE);
        let target = Target { folder, process };
        // The program says that it is ready before its last call, and so do its threads.
        wait_until(PATIENCE, "all of it sleeps", || {
            target.dump(&["--children"]).stdout.matches("wait_here").count() >= 3
        });
        target
    }

    fn pid(&self) -> String {
        self.process.pid().to_string()
    }

    fn dump(&self, arguments: &[&str]) -> Output {
        dump(&[&["--pid", &self.pid()], arguments].concat())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(artifacts().bin("xpu_timer_dump"));
    command.args(["--timeout", "60"]).args(arguments).env_remove("NO_COLOR").env_remove("RUST_LOG");
    command
}

fn dump(arguments: &[&str]) -> Output {
    Process::spawn(&mut command(arguments)).wait(PATIENCE)
}

fn json(output: &Output) -> Value {
    assert_eq!(output.code(), 0, "{}", output.stderr);
    serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", output.stdout))
}

#[test]
fn the_text_has_every_thread_once() {
    let target = Target::start(&[]);
    let output = target.dump(&[]);
    assert_eq!((output.code(), output.stderr.as_str()), (0, ""));
    let text = &output.stdout;
    assert!(text.starts_with(&format!("Process {}: {}", target.pid(), target.path("program").display())), "{text}");
    assert!(text.contains("S (sleeping), 3 threads, captured in "), "{text}");
    assert!(text.contains("2 threads with the same stack"), "{text}");
    for name in ["\"one\" S (sleeping)", "\"two\" S (sleeping)", "\"program\" S (sleeping)"] {
        assert_eq!(text.matches(name).count(), 1, "{name}: {text}");
    }
    assert!(text.contains("    wait_here /") && text.contains("program.c:7\n"), "{text}");
    assert_eq!(text.matches("    wait_here").count(), 2, "one block for the main thread, one for both others: {text}");
    assert!(!text.contains('\x1b') && !text.contains("child of"), "{text}");
    assert_eq!(target.dump(&["--merged"]).stdout.matches("wait_here").count(), 2, "this is the default");
    let native = target.dump(&["--native"]);
    assert_eq!((native.code(), native.stdout.matches("    wait_here").count()), (0, 2), "{}", native.stdout);
    let python = target.dump(&["--python"]);
    assert!(python.stdout.contains("no Python runs in this process"), "{}", python.stdout);
    assert!(!python.stdout.contains("wait_here"), "{}", python.stdout);
}

#[test]
fn children_come_below_their_parents() {
    let target = Target::start(&[]);
    let text = target.dump(&["--children"]).stdout;
    assert_eq!(text.matches("Process ").count(), 2, "{text}");
    assert!(text.contains(&format!(", child of {}, 1 thread, ", target.pid())), "{text}");
    let with = json(&target.dump(&["--children", "--json"]));
    assert_eq!(with.as_array().map(Vec::len), Some(1), "{with:#}");
    assert_eq!(with[0]["children"][0]["parent_pid"], target.process.pid());
    let frames = with[0]["children"][0]["stacktrace"][0]["frames"].as_array().expect("frames");
    assert!(frames.iter().any(|frame| frame["func_name"] == "wait_here"), "{with:#}");
    let without = json(&target.dump(&["--json"]));
    assert_eq!(without[0]["children"].as_array().map(Vec::len), Some(0));
}

#[test]
fn json_and_text_have_equal_content() {
    let target = Target::start(&[]);
    let all = json(&target.dump(&["--json"]));
    let threads = all[0]["stacktrace"].as_array().expect("threads");
    assert_eq!(threads.len(), 3);
    for thread in threads {
        for field in ["tid", "thread_name", "state", "wchan", "capture", "context_switches", "frames", "incomplete"] {
            assert!(thread.get(field).is_some(), "{field}: {thread:#}");
        }
        assert_eq!(thread["capture"], "zero_stop");
        let frames = thread["frames"].as_array().expect("frames");
        let own = frames.iter().find(|frame| frame["func_name"] == "wait_here").expect("the function");
        assert!(own["file_name"].as_str().is_some_and(|place| place.ends_with("program.c:7")), "{own:#}");
        assert!(own["pc"].as_u64() > own["module_address"].as_u64(), "{own:#}");
    }
    assert!(json(&target.dump(&["--json", "--native"]))[0].get("py_stacktrace").is_none());
    assert!(json(&target.dump(&["--json", "--python"]))[0].get("stacktrace").is_none());
    // Several processes, one list; one given twice is one.
    let two = json(&target.dump(&["--json", "--pid", &std::process::id().to_string(), "--pid", &target.pid()]));
    let pids: Vec<_> = two.as_array().expect("a list").iter().map(|process| process["pid"].as_i64()).collect();
    assert_eq!(pids, [Some(i64::from(target.process.pid())), Some(i64::from(std::process::id()))]);
}

/// Ranks that no other test or job on this machine has.
fn unique_rank(offset: u32) -> u32 {
    2_000_000 + (std::process::id() % 100_000) * 10 + offset
}

#[test]
fn ranks_are_found_and_dumped_into_files_named_by_rank() {
    let world = unique_rank(9);
    let rank = |rank: u32| Target::start(&[("RANK", rank.to_string()), ("WORLD_SIZE", world.to_string())]);
    let (one, two) = (unique_rank(1), unique_rank(2));
    let targets = [rank(one), rank(two)];
    let found = dump(&["--rank", &two.to_string(), "--rank", &one.to_string()]);
    assert_eq!(found.code(), 0, "{}", found.stderr);
    let first = found.stdout.find(&format!("Process {}: ", targets[1].pid())).expect("in the order of the options");
    assert!(found.stdout[first..].contains(&format!("\nProcess {}: ", targets[0].pid())), "{}", found.stdout);
    // The children have inherited the ranks, and are not ranks of their own.
    assert_eq!(found.stdout.matches("Process ").count(), 2, "{}", found.stdout);
    let all = dump(&["--all"]).stdout;
    assert!(targets.iter().all(|target| all.contains(&format!("Process {}: ", target.pid()))), "{all}");

    let folder = targets[0].path("new/files");
    let place = folder.display().to_string();
    let written = dump(&["--rank", &one.to_string(), "--rank", &two.to_string(), "--output", &place, "--children"]);
    assert_eq!(written.code(), 0, "{}", written.stderr);
    let names = [one, two].map(|rank| format!("{rank:05}-{world:05}.stacktrace"));
    let lines: Vec<&str> = written.stdout.lines().collect();
    assert_eq!(lines, [format!("{place}/{}", names[0]), format!("{place}/{}", names[1])]);
    for (name, target) in names.iter().zip(&targets) {
        let message = Stacktrace::decode(&fs::read(folder.join(name)).expect("the file")[..]).expect("a message");
        assert_eq!((message.pid, message.stacktrace.len()), (target.process.pid(), 3));
        assert_eq!(message.children.len(), 1);
        let waits = message.stacktrace.iter().map(|thread| thread.timed);
        assert!(waits.eq([Some(false); 3]), "the files have what the calls wait for: {message:?}");
    }
    assert_eq!(fs::read_dir(&folder).expect("the folder").count(), 2, "nothing else is left there");

    // Two jobs on one node may have equal ranks: each rank still has its file.
    let again = rank(one);
    let both = targets[0].dump(&["--pid", &again.pid(), "--output", &targets[0].path("both").display().to_string()]);
    assert_eq!(both.stdout.lines().count(), 2, "{}{}", both.stdout, both.stderr);
    assert_eq!(fs::read_dir(targets[0].path("both")).expect("the folder").count(), 2);
}

#[test]
fn wrong_command_lines_end_with_2() {
    for (arguments, words) in [
        (&["--native"][..], "--pid <PID>|--rank <RANK>|--all"),
        (&["--pid", "0"], "0 is not in 1.."),
        (&["--pid=-5"], "-5 is not in 1.."),
        (&["--pid", "python"], "invalid digit"),
        (&["--rank", "x"], "invalid digit"),
        (&["--pid", "1", "--native", "--python"], "cannot be used with"),
        (&["--pid", "1", "--json", "--output", "/tmp"], "cannot be used with"),
        (&["--pid", "1", "--lines", "nan"], "not a number of seconds"),
        (&["--pid", "1", "--lines=-1"], "not a number of seconds"),
        (&["--pid", "1", "--no-such-option"], "--no-such-option"),
    ] {
        let output = dump(arguments);
        assert_eq!(output.code(), 2, "{arguments:?}: {}", output.stderr);
        assert!(output.stderr.contains(words) && output.stdout.is_empty(), "{arguments:?}: {}", output.stderr);
    }
    let help = dump(&["--help"]);
    assert_eq!(help.code(), 0);
    for option in ["--pid", "--rank", "--all", "--native", "--python", "--merged", "--children", "--json", "--output"] {
        assert!(help.stdout.contains(option), "{option}: {}", help.stdout);
    }
}

#[test]
fn failures_end_with_1_and_a_reason() {
    let target = Target::start(&[]);
    let file = target.path("file");
    fs::write(&file, "").expect("own folder");
    let below = file.join("below").display().to_string();
    let taken = target.path("taken");
    fs::create_dir_all(taken.join("00000-00001.stacktrace/x")).expect("own folder");
    let taken = taken.display().to_string();
    for (arguments, words) in [
        (&["--output", &below][..], format!("cannot create the folder {below}: Not a directory")),
        (&["--output", &taken], format!("cannot write {taken}/00000-00001.stacktrace: ")),
        (&["--output", "/proc"], "cannot write /proc/00000-00001.stacktrace: ".into()),
        (&["--rank", "4294967295"], "no process on this node has RANK=4294967295 in its environment".into()),
    ] {
        let output = target.dump(arguments);
        assert_eq!(output.code(), 1, "{arguments:?}: {}", output.stderr);
        let line = output.stderr.strip_prefix("xpu_timer_dump: ").unwrap_or_else(|| panic!("{:?}", output.stderr));
        assert!(line.starts_with(&words) && line.lines().count() == 1, "{arguments:?}: {}", output.stderr);
    }
    assert_eq!(fs::read_dir(&taken).expect("own folder").count(), 1, "no temporary file is left");
    // One of two processes is missing: the other is shown, and the exit code reports the failure.
    let output = target.dump(&["--pid", &i32::MAX.to_string()]);
    assert_eq!(output.code(), 1);
    assert!(output.stdout.contains("wait_here"), "{}", output.stdout);
    assert!(output.stdout.contains(&format!("process {} is gone", i32::MAX)), "{}", output.stdout);
}

#[test]
fn a_closed_pipe_is_success_and_a_full_disk_is_a_failure() {
    let target = Target::start(&[]);
    let dump = artifacts().bin("xpu_timer_dump");
    let shell = |script: &str| {
        let mut bash = Command::new("bash");
        Process::spawn(bash.args(["-c", script, "bash"]).arg(&dump).arg(target.pid())).wait(PATIENCE)
    };
    for format in ["", "--json"] {
        // The pipe is closed before a byte is written.
        let closed = shell(&format!("{{ sleep 0.2; \"$1\" --pid \"$2\" {format}; echo $? >&2; }} | exec true"));
        assert_eq!(closed.stderr, "0\n", "{format}");
        let full = shell(&format!("\"$1\" --pid \"$2\" {format} > /dev/full"));
        assert_eq!(full.code(), 1, "{format}");
        assert_eq!(full.stderr, "xpu_timer_dump: No space left on device (os error 28)\n", "{format}");
    }
}

/// The output of the command on a terminal.
fn on_terminal(arguments: &str, colour: Option<&str>) -> String {
    let line = format!("{} {arguments}", artifacts().bin("xpu_timer_dump").display());
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]).env("TERM", "xterm").env_remove("NO_COLOR");
    if let Some(value) = colour {
        script.env("NO_COLOR", value);
    }
    let output = Process::spawn(&mut script).wait(PATIENCE);
    assert_eq!(output.code(), 0, "{}{}", output.stdout, output.stderr);
    output.stdout
}

#[test]
fn colours_are_for_terminals() {
    if let Some(reason) = lacks("bsdutils") {
        return skip(&reason);
    }
    let target = Target::start(&[]);
    let arguments = format!("--timeout 60 --pid {}", target.pid());
    let text = on_terminal(&arguments, None);
    assert!(text.contains("\x1b[1mProcess ") && text.contains("wait_here"), "{text:?}");
    let plain = on_terminal(&arguments, Some("1"));
    assert!(!plain.contains('\x1b') && plain.contains("wait_here"), "{plain:?}");
    // A person gets JSON that can be read, a program one that is short.
    assert!(on_terminal(&format!("{arguments} --json"), None).contains("\n  \"pid\":"));
    assert!(target.dump(&["--json"]).stdout.starts_with("[{\"pid\":"));
}

/// Forks at once, and ends after a while.
const FORKS: &str = "\
import os, sys, time
print('ready', flush=True)
time.sleep(6)
child = os.fork()
if child == 0:
    time.sleep(100)
print('child', child, flush=True)
time.sleep(4)
os.kill(child, 9)
";
/// Executes another program after a while.
const EXECUTES: &str = "\
import os, sys, time
print('ready', flush=True)
time.sleep(6)
os.execv(sys.executable, [sys.executable, '-c', 'def after(): time.sleep(100)\\nimport time\\nafter()'])
";
const STAYS: &str = "import time\nprint('ready', flush=True)\ndef stays(): time.sleep(100)\nstays()\n";

fn script(text: &str) -> Process {
    let mut process = Process::spawn(Command::new(python()).args(["-c", text]));
    process.wait_for("ready", PATIENCE);
    process
}

fn record(processes: &[&Process], arguments: &[&str], output: &Path) -> Output {
    let mut command = Command::new(artifacts().bin("xpu_timer_dump"));
    command.arg("record").args(arguments).arg("--output").arg(output);
    for process in processes {
        command.arg("--pid").arg(process.pid().to_string());
    }
    Process::spawn(&mut command).wait(PATIENCE)
}

#[test]
fn a_process_that_ends_forks_or_executes_is_reported_and_the_others_are_recorded() {
    let [forks, executes, stays] = [FORKS, EXECUTES, STAYS].map(script);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let output = folder.path().join("record");
    let recorded = record(&[&forks, &executes, &stays], &["--seconds", "10", "--rate", "50"], &output);
    assert_eq!(recorded.code(), 0, "{}", recorded.stderr);
    let stdout = forks.stdout();
    let child = stdout.lines().find_map(|line| line.strip_prefix("child ")).expect("its child");
    for note in [
        format!("process {} has started {child}, which is not recorded", forks.pid()),
        format!("process {} has ended", forks.pid()),
        format!("process {} has executed another program", executes.pid()),
    ] {
        assert!(recorded.stderr.contains(&note), "{note}: {}", recorded.stderr);
    }
    assert!(!recorded.stderr.contains(&stays.pid().to_string()), "{}", recorded.stderr);
    let folded = fs::read_to_string(output.join("all.folded")).expect("the folded stacks");
    let count = |function: &str| -> u64 {
        let lines = folded.lines().filter(|line| line.contains(function));
        lines.map(|line| line.rsplit_once(' ').expect("a count").1.parse::<u64>().expect("a number")).sum()
    };
    assert!(count("stays@") > 200 && count("after@") > 100, "{folded}");
    // The samples of an earlier recording are not mixed with those of a new one.
    let again = record(&[&stays], &["--seconds", "0.1"], &output);
    assert!(again.code() == 1 && again.stderr.contains("another recording"), "{}", again.stderr);
}

/// A second interrupt is for the viewer, which draws what was recorded until the first one.
#[test]
fn an_interrupt_ends_a_recording_and_leaves_no_signal_blocked() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let dump = folder.path().join("xpu_timer_dump");
    copy_program(&artifacts().bin("xpu_timer_dump"), &dump);
    let viewer = folder.path().join("xpu_timer_stacktrace_viewer");
    // Some shells unblock all signals when they start.
    let program = format!("#!{}\nprint(open('/proc/self/status').read())\n", python().display());
    fs::write(&viewer, program).expect("own folder");
    fs::set_permissions(&viewer, fs::Permissions::from_mode(0o700)).expect("own folder");
    let stays = script(STAYS);
    let mut command = Command::new(dump);
    command.args(["record", "--seconds", "600", "--pid", &stays.pid().to_string(), "--output"]);
    let output = folder.path().join("record");
    let recording = Process::spawn(command.arg(&output));
    wait_until(PATIENCE, "it records", || {
        let tasks = fs::read_dir(format!("/proc/{}/task", recording.pid()));
        tasks.is_ok_and(|tasks| tasks.count() > 1)
    });
    recording.signal(Signal::SIGINT);
    let ended = recording.wait(PATIENCE);
    assert!(output.join("00000-00001.samples").exists(), "{}", ended.stderr);
    assert!(ended.stdout.contains("SigBlk:\t0000000000000000"), "{}", ended.stdout);
}

#[test]
fn a_recording_has_the_c_frames_that_are_wanted() {
    let stays = script(STAYS);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let output = folder.path().join("record");
    let recorded = record(&[&stays], &["--native", "--seconds", "1", "--rate", "10"], &output);
    assert_eq!(recorded.code(), 0, "{}", recorded.stderr);
    let folded = fs::read_to_string(output.join("all.folded")).expect("the folded stacks");
    let (_, called) = folded.split_once("stays@").expect("the Python frame");
    assert!(called.contains(";") && called.contains("nanosleep"), "C frames below it: {folded}");
}

#[test]
fn a_full_disk_is_named_with_the_file() {
    let stays = script(STAYS);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let Some(disk) = Tmpfs::new(folder.path().join("disk"), 16) else { return };
    fs::write(disk.0.join("fill"), [1; 1 << 20]).expect_err("it is full now");
    let recorded = record(&[&stays], &["--seconds", "0.3"], &disk.0);
    assert_eq!(recorded.code(), 1);
    let file = disk.0.join("00000-00001.samples").display().to_string();
    let reason = &recorded.stderr;
    assert!(reason.contains(&file) && reason.contains("No space left on device"), "{reason}");
}
