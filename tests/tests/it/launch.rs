//! `xpu_timer_launch`: what the command gets, and the collector that it finds or starts.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::ExitStatusExt},
    path::PathBuf,
    process::Command,
    time::Instant,
};

use nix::sys::signal::Signal;
use tempfile::TempDir;
use xpu_timer_tests::{Ears, FakeCollector, Output, PATIENCE, Process, artifacts};

/// A folder, and `xpu_timer_launch` in an environment that belongs to it.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Self {
        Place { dir: TempDir::new().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn collector(&self) -> FakeCollector {
        FakeCollector::listen(&self.path("socket"), Ears::Open)
    }

    /// A script in place of the collector's binary.
    fn script(&self, text: &str) -> PathBuf {
        let path = self.path("collector.sh");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn launch(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(artifacts().bin("xpu_timer_launch"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("XPU_TIMER_") || name == "LD_PRELOAD" {
                command.env_remove(&name);
            }
        }
        command
            .args(arguments)
            .env("XPU_TIMER_SOCKET", self.path("socket"))
            .env("XPU_TIMER_LOGGING_DIR", self.dir.path())
            .env("XPU_TIMER_DAEMON_PATH", "/nowhere/xpu_timer_collector");
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Process::spawn(&mut self.launch(arguments)).wait(PATIENCE)
    }
}

#[test]
fn exit_codes_are_the_commands_own() {
    let place = Place::new();
    let _collector = place.collector();
    let output = place.run(&["sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!((output.code(), output.stdout.as_str(), output.stderr.as_str()), (7, "out\n", "err\n"));
    let output = place.run(&["--", "sh", "-c", "kill -TERM $$"]);
    assert_eq!(output.status.signal(), Some(Signal::SIGTERM as i32));
    let output = place.run(&["no_such_command_anywhere"]);
    assert_eq!(output.code(), 127);
    assert_eq!(output.stderr, "xpu_timer_launch: no_such_command_anywhere: No such file or directory\n");
    let output = place.run(&["/etc/passwd"]);
    assert_eq!((output.code(), output.stderr.lines().count()), (126, 1), "{output:?}");
}

#[test]
fn it_becomes_the_command_and_changes_two_variables() {
    let place = Place::new();
    let _collector = place.collector();
    let mut command = place.launch(&["sh", "-c", "echo $$; env"]);
    let process = Process::spawn(command.env("LD_PRELOAD", "/other.so").env("KEPT", "a b"));
    let pid = process.pid();
    let output = process.wait(PATIENCE);
    let mut lines = output.stdout.lines();
    assert_eq!(lines.next(), Some(pid.to_string().as_str()));
    let lines: Vec<&str> = lines.collect();
    assert!(lines.contains(&format!("LD_PRELOAD={}:/other.so", artifacts().hook().display()).as_str()), "{lines:?}");
    assert!(lines.contains(&format!("XPU_TIMER_SOCKET={}", place.path("socket").display()).as_str()), "{lines:?}");
    assert!(lines.contains(&"KEPT=a b"));
}

#[test]
fn signals_arrive_with_their_default_or_inherited_action() {
    let place = Place::new();
    let _collector = place.collector();
    let ignored = |shell: &str| {
        let launch = artifacts().bin("xpu_timer_launch");
        let text = format!("{shell} exec {} grep SigIgn /proc/self/status", launch.display());
        let mut command = place.launch(&[]);
        let environment: Vec<_> = command.get_envs().map(|(k, v)| (k.to_owned(), v.map(ToOwned::to_owned))).collect();
        command = Command::new("bash");
        for (name, value) in environment {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let output = Process::spawn(command.args(["-c", &text])).wait(PATIENCE);
        let mask = output.stdout.split_whitespace().last().expect("a mask").to_string();
        u64::from_str_radix(&mask, 16).unwrap() & (1 << (Signal::SIGPIPE as u64 - 1)) != 0
    };
    assert!(!ignored("trap - PIPE;"), "Rust's runtime ignores SIGPIPE, the command must not");
    assert!(ignored("trap '' PIPE;"), "what the caller ignores stays ignored");
}

#[test]
fn usage_help_and_version() {
    let place = Place::new();
    let output = place.run(&[]);
    assert_eq!(output.code(), 2);
    assert!(output.stderr.contains("usage: xpu_timer_launch") && output.stdout.is_empty(), "{output:?}");
    let output = place.run(&["--wrong", "true"]);
    assert_eq!(output.code(), 2);
    let output = place.run(&["--help"]);
    assert_eq!((output.code(), output.stderr.as_str()), (0, ""));
    assert!(output.stdout.contains("XPU_TIMER_HANG_TIMEOUT") && output.stdout.contains("300"));
    let output = place.run(&["--version"]);
    assert_eq!((output.code(), output.stdout.starts_with("xpu_timer_launch ")), (0, true));
}

#[test]
fn without_a_collector_the_command_runs_and_one_line_says_why() {
    let place = Place::new();
    let output = place.run(&["sh", "-c", "exit 3"]);
    assert_eq!((output.code(), output.stderr.lines().count()), (3, 1), "{output:?}");
    assert!(output.stderr.contains("/nowhere/xpu_timer_collector"), "{output:?}");

    // One that ends at once is noticed at once.
    let script = place.script("echo cannot work; exit 1");
    let begun = Instant::now();
    let output = Process::spawn(place.launch(&["true"]).env("XPU_TIMER_DAEMON_PATH", &script)).wait(PATIENCE);
    assert_eq!((output.code(), output.stderr.lines().count()), (0, 1), "{output:?}");
    let log = place.path("xpu_timer_collector.log");
    assert!(output.stderr.contains("ended at once"), "{output:?}");
    assert!(output.stderr.contains(log.to_str().unwrap()), "{output:?}");
    assert_eq!(fs::read_to_string(log).unwrap(), "cannot work\n");
    assert!(begun.elapsed() < PATIENCE / 10, "{:?}", begun.elapsed());
}

#[test]
fn a_collector_is_started_detached() {
    let place = Place::new();
    // What it is given, its parent, its session, its descriptors; then it lives on, without answering.
    let script = place.script(
        "echo \"$@\"; echo session $(cut -d' ' -f6 /proc/$$/stat) of $$; ls /proc/$$/fd | tr '\\n' ' '; echo; \
         pwd; echo preload $LD_PRELOAD; echo $XPU_TIMER_TIMELINE_PATH; echo $$ > pid.tmp; exit 0",
    );
    let mut command = place.launch(&["sh", "-c", "ps -o pid= --ppid $$ | wc -l"]);
    command.env("XPU_TIMER_DAEMON_PATH", &script).env("XPU_TIMER_LINGER", "77");
    command.env("XPU_TIMER_TIMELINE_PATH", "dumps").current_dir("/usr");
    let output = Process::spawn(&mut command).wait(PATIENCE);
    assert_eq!(output.code(), 0);
    let log = fs::read_to_string(place.path("xpu_timer_collector.log")).unwrap();
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(lines[0], "node --linger 77");
    let words: Vec<&str> = lines[1].split(' ').collect();
    assert_ne!(words[1], words[3], "no session leader, so it can get no terminal: {log}");
    // Standard input and output, and what the shell itself opened to read its script.
    let descriptors: Vec<&str> = lines[2].split_whitespace().collect();
    assert!(["0", "1", "2"].iter().all(|standard| descriptors.contains(standard)) && descriptors.len() <= 4, "{log}");
    assert_eq!(lines[3], "/");
    assert_eq!(lines[4], "preload");
    assert_eq!(lines[5], "/usr/dumps", "a relative path means the folder of the launcher");
}

#[test]
fn switched_off_nothing_is_started_or_changed() {
    let place = Place::new();
    let output =
        Process::spawn(place.launch(&["sh", "-c", "echo [$LD_PRELOAD]"]).env("XPU_TIMER_DISABLE", "1")).wait(PATIENCE);
    assert_eq!((output.stdout.as_str(), output.stderr.as_str()), ("[]\n", ""));
}

#[test]
fn who_a_rank_is_by_every_launcher() {
    // What each of them really sets, and rank, world size, local rank, ranks of the node and job by it.
    let launchers: [(&str, &str, [i64; 4], &str); 6] = [
        (
            "torchrun inside a pod of a PyTorchJob",
            "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=run7 PET_NODE_RANK=1 PET_NNODES=2",
            [5, 8, 1, 4],
            "run7",
        ),
        (
            "a PyTorchJob or a Volcano job with the pytorch plugin, without torchrun",
            "RANK=1 WORLD_SIZE=2 VC_TASK_INDEX=0",
            [1, 2, -1, 0],
            "",
        ),
        (
            "mpirun of Open MPI, also in an MPIJob",
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=3",
            [3, 4, 1, 2],
            "",
        ),
        (
            "mpirun of MPICH and Intel MPI",
            "PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2",
            [2, 4, 0, 2],
            "",
        ),
        ("srun", "SLURM_PROCID=6 SLURM_NTASKS=8 SLURM_LOCALID=2 SLURM_JOB_ID=4711", [6, 8, 2, 0], "4711"),
        ("nobody", "HOSTNAME=worker-3 VC_TASK_INDEX=3 JOB_COMPLETION_INDEX=3", [-1, 0, -1, 0], ""),
    ];
    for (launcher, variables, expected, job) in launchers {
        let environ = variables.replace(' ', "\0");
        let info = xpu_timer_proto::env::Source::of_environ(environ.as_bytes()).rank_info();
        let found = [info.rank.into(), info.world_size.into(), info.local_rank.into(), info.local_world_size.into()];
        assert_eq!((found, info.job.as_str()), (expected, job), "{launcher}");
    }
}
