//! Permission to read a process where Yama restricts it. No kernel here needs it, so a library
//! records the calls of prctl: every process of the job must name the collector.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use xpu_timer_tests::{Job, PATIENCE, Process, artifacts, compile_c, python, tree, wait_until};

/// Records which process allows which tracer, and passes the call on.
const RECORDER: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
int prctl(int option, ...) {
    va_list list;
    unsigned long words[4];
    va_start(list, option);
    for (int i = 0; i < 4; i++) words[i] = va_arg(list, unsigned long);
    va_end(list);
    if (option == PR_SET_PTRACER) {
        char line[64];
        int length = snprintf(line, sizeof line, "%d %lu\n", getpid(), words[0]);
        int log = open(getenv("PRCTL_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        if (write(log, line, length) != length) abort();
        close(log);
    }
    return syscall(SYS_prctl, option, words[0], words[1], words[2], words[3]);
}
"#;

/// Processes started in every way. None makes a device call. Each prints its pid and stays.
const FAMILY: &str = "\
import multiprocessing, os, subprocess, sys, time
def child():
    print('child', os.getpid(), flush=True)
    time.sleep(100000)
if __name__ == '__main__':
    print('child', os.getpid(), os.environ.get('XPU_TIMER_COLLECTOR_PID'), flush=True)
    for method in ['fork', 'spawn', 'forkserver']:
        multiprocessing.get_context(method).Process(target=child, daemon=True).start()
    subprocess.Popen([sys.executable, '-c', 'import os,time; print(\"child\", os.getpid(), flush=True); '
                      'os.fork() or print(\"child\", os.getpid(), flush=True); time.sleep(100000)'])
    time.sleep(100000)
";

struct Recorder {
    folder: tempfile::TempDir,
    library: PathBuf,
}

impl Recorder {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let library = compile_c(folder.path(), "librecorder.so", RECORDER, &["-shared", "-fPIC", "-O1"]);
        Recorder { folder, library }
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// `(who, whom)` so far.
    fn calls(&self) -> Vec<(i32, i32)> {
        let text = fs::read_to_string(self.log()).unwrap_or_default();
        text.lines()
            .filter_map(|line| {
                let (who, whom) = line.split_once(' ')?;
                Some((who.parse().ok()?, whom.parse().ok()?))
            })
            .collect()
    }

    fn record(&self, command: &mut Command) {
        command.env("LD_PRELOAD", &self.library).env("PRCTL_LOG", self.log());
    }
}

fn name_of(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_string()
}

fn family(folder: &Path) -> PathBuf {
    let script = folder.join("family.py");
    fs::write(&script, FAMILY).expect("own folder");
    script
}

/// The pids of a family of six.
fn pids(process: &Process) -> Vec<i32> {
    wait_until(PATIENCE, "the family is complete", || process.stdout().matches("child ").count() == 6);
    let stdout = process.stdout();
    stdout.lines().filter_map(|line| line.split(' ').nth(1)?.parse().ok()).collect()
}

#[test]
fn every_process_of_a_job_allows_its_collector_to_trace() {
    let (job, recorder) = (Job::new(), Recorder::new());
    let mut command = job.launch(python());
    recorder.record(command.arg(family(recorder.folder.path())));
    let process = Process::spawn(&mut command);
    let pids = pids(&process);
    let stdout = process.stdout();
    let collector = stdout.lines().next().and_then(|line| line.split(' ').nth(2)?.parse().ok()).expect("a pid");
    assert!("xpu_timer_collector".starts_with(&name_of(collector)), "{:?}", name_of(collector));
    let calls = recorder.calls();
    for pid in pids {
        assert!(calls.contains(&(pid, collector)), "{pid} is closed to {collector}: {calls:?}");
    }
    assert!(calls.iter().all(|(_, whom)| *whom == collector), "and nobody else: {calls:?}");
}

#[test]
fn a_rank_names_the_collector_that_it_talks_to() {
    let (job, recorder) = (Job::new(), Recorder::new());
    // As if the variable came from another node: here it is the pid of some other process.
    let mut stranger = Process::spawn(Command::new("sh").args(["-c", "echo ready; exec sleep 1000"]));
    stranger.wait_for("ready", PATIENCE);
    let mut command = job.launch("sh");
    let script = "export XPU_TIMER_COLLECTOR_PID=$1; shift; exec \"$@\"";
    command.args(["-c", script, "sh", &stranger.pid().to_string()]).arg(python());
    let examples = tree().join("tests/examples");
    command.arg(examples.join("run_ranks.py")).arg("--nproc=1").arg(examples.join("train.py")).arg("--steps=3");
    recorder.record(&mut command);
    let output = Process::spawn(&mut command).wait(PATIENCE);
    assert_eq!(output.code(), 0, "{}{}", output.stdout, output.stderr);
    let calls = recorder.calls();
    let last_of = |wanted: i32| calls.iter().rev().find(|(who, _)| *who == wanted).map(|(_, whom)| *whom);
    let ranks: Vec<i32> = calls.iter().filter(|(_, whom)| *whom == stranger.pid()).map(|(who, _)| *who).collect();
    assert!(!ranks.is_empty(), "{calls:?}");
    let corrected = ranks.iter().filter(|rank| last_of(**rank).is_some_and(|last| last != stranger.pid())).count();
    assert_eq!(corrected, 1, "the one process with device calls has heard from its collector: {calls:?}");
}

#[test]
fn no_tracer_is_named_without_a_launcher_or_when_disabled() {
    let recorder = Recorder::new();
    for (name, value) in [("XPU_TIMER_BASEPORT", ""), ("XPU_TIMER_COLLECTOR_PID", "soon"), ("XPU_TIMER_DISABLE", "1")] {
        let mut command = Command::new(python());
        recorder.record(command.args(["-c", "import os; os.fork() and os.wait()"]));
        command.env("LD_PRELOAD", format!("{}:{}", artifacts().hook().display(), recorder.library.display()));
        if name == "XPU_TIMER_DISABLE" {
            command.env("XPU_TIMER_COLLECTOR_PID", std::process::id().to_string());
        } else {
            command.env_remove("XPU_TIMER_COLLECTOR_PID");
        }
        let output = Process::spawn(command.env(name, value)).wait(PATIENCE);
        assert_eq!((output.code(), output.stderr.as_str()), (0, ""), "{name}");
        assert_eq!(recorder.calls(), [], "{name}={value}");
    }
}

#[test]
fn a_tracer_that_the_host_named_is_kept() {
    let (job, recorder) = (Job::new(), Recorder::new());
    // As the transports of MPI do it, before the first call that the hook sees.
    let program = "import ctypes, os; ctypes.CDLL(None).prctl(0x59616d61, 12345, 0, 0, 0); print('named', os.getpid(), flush=True); \
                   nccl = ctypes.CDLL('libnccl.so.2'); nccl.ncclGroupStart(); nccl.ncclGroupEnd(); import time; time.sleep(100000)";
    let mut command = job.launch(python());
    recorder.record(command.args(["-c", program]));
    let mut process = Process::spawn(&mut command);
    process.wait_for("named", PATIENCE);
    let pid = process.pid();
    wait_until(PATIENCE, "the collector knows it", || {
        let status = job.status().ok();
        status.is_some_and(|status| status["ranks"].as_array().is_some_and(|ranks| !ranks.is_empty()))
    });
    let whom: Vec<i32> = recorder.calls().into_iter().filter(|(who, _)| *who == pid).map(|(_, whom)| whom).collect();
    assert_eq!(whom.last(), Some(&12345), "{whom:?}");
    assert!(whom.len() <= 2, "the collector was named when the library was loaded, and not again: {whom:?}");
}
