//! `xpu_timer_launch`: the environment of the command, the collector that it finds or starts, and
//! variables that name something other than a file: it prints one line, and no process waits for
//! it.

use std::{
    ffi::OsStr,
    fs::{self, File},
    os::unix::{
        fs::{PermissionsExt, symlink},
        net::UnixListener,
        process::ExitStatusExt,
    },
    path::PathBuf,
    process::Command,
    time::Instant,
};

use nix::sys::signal::Signal;
use tempfile::TempDir;
use xpu_timer_proto::socket;
use xpu_timer_tests::{
    FakeCollector, Job, LAUNCHED_BY, Output, PATIENCE, Process, ReadMode, artifacts, compile_c, copy_program,
    processes_with, skip,
};

use crate::{collector::Tmpfs, namespaces::start_on_fuse};

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
        FakeCollector::listen(&self.path("socket"), ReadMode::Reads)
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
            .env("XPU_TIMER_TIMELINE_PATH", self.path("timeline"))
            .env("XPU_TIMER_DAEMON_PATH", "/nowhere/xpu_timer_collector")
            .env(LAUNCHED_BY, self.dir.path());
        command
    }

    /// Runs `launch` with a script in place of the collector's binary; whether that was started.
    fn started(&self, launch: &mut Command) -> (Output, bool) {
        let mark = self.path("started");
        let _ = fs::remove_file(&mark);
        let script = self.script(&format!("echo > {}; exit 1", mark.display()));
        let output = Process::spawn(launch.env("XPU_TIMER_DAEMON_PATH", script)).wait(PATIENCE);
        // The launcher starts a collector before it becomes the command. So the script still runs,
        // or it has left its mark.
        let runs = !processes_with(LAUNCHED_BY, &self.dir.path().display().to_string()).is_empty();
        (output, runs || mark.exists())
    }

    /// The names in its folder.
    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Process::spawn(&mut self.launch(arguments)).wait(PATIENCE)
    }
}

/// Another program with the environment of a command.
fn with_environment_of(command: &Command, program: impl AsRef<OsStr>) -> Command {
    let mut other = Command::new(program);
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => other.env(name, value),
            None => other.env_remove(name),
        };
    }
    other
}

#[test]
fn the_exit_code_is_that_of_the_command() {
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
fn the_launcher_becomes_the_command_and_changes_two_variables() {
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
        let mut command = with_environment_of(&place.launch(&[]), "bash");
        let output = Process::spawn(command.args(["-c", &text])).wait(PATIENCE);
        let mask = output.stdout.split_whitespace().last().expect("a mask").to_string();
        u64::from_str_radix(&mask, 16).unwrap() & (1 << (Signal::SIGPIPE as u64 - 1)) != 0
    };
    assert!(!ignored("trap - PIPE;"), "Rust's runtime ignores SIGPIPE, the command must not");
    assert!(ignored("trap '' PIPE;"), "a signal that the caller ignores stays ignored");
}

#[test]
fn standard_streams_that_are_closed_stay_closed() {
    let place = Place::new();
    let _collector = place.collector();
    let seen = place.path("seen");
    let shows =
        format!("exec 9>{}; for fd in 0 1 2; do test -e /proc/self/fd/$fd || printf $fd >&9; done", seen.display());
    let launch = artifacts().bin("xpu_timer_launch");
    for (closes, closed) in [("<&-", "0"), (">&-", "1"), ("2>&-", "2"), ("<&- >&- 2>&-", "012")] {
        let mut bash = with_environment_of(&place.launch(&[]), "bash");
        let line = format!("exec {} bash -c '{shows}' {closes}", launch.display());
        assert_eq!(Process::spawn(bash.args(["-c", &line])).wait(PATIENCE).code(), 0, "{closes}");
        assert_eq!(fs::read_to_string(&seen).unwrap(), closed, "{closes}");
    }
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
    // Prints its arguments, its parent, its session and its descriptors; then it stays, without
    // answering.
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
    let given = format!("node --supervise --linger 77 --log {}", place.path("xpu_timer_collector.log").display());
    assert_eq!(lines[0], given);
    let words: Vec<&str> = lines[1].split(' ').collect();
    assert_ne!(words[1], words[3], "no session leader, so it can get no terminal: {log}");
    // Standard input and output, and what the shell itself opened to read its script.
    let descriptors: Vec<&str> = lines[2].split_whitespace().collect();
    assert!(["0", "1", "2"].iter().all(|standard| descriptors.contains(standard)) && descriptors.len() <= 4, "{log}");
    assert_eq!(lines[3], "/");
    assert_eq!(lines[4], "preload");
    assert_eq!(lines[5], "/usr/dumps", "a relative path means the folder of the launcher");
}

/// Starts `true` under the launcher and a collector of the job's own, and returns the one line that
/// the launcher says.
fn one_line(job: &Job) -> String {
    let output = Process::spawn(&mut job.launch("true")).wait(PATIENCE);
    assert_eq!((output.code(), output.stdout.as_str()), (0, ""), "{output:?}");
    assert_eq!(output.stderr.lines().count(), 1, "{output:?}\n{}", job.logs());
    output.stderr
}

#[test]
fn the_launcher_prints_the_problems_of_the_collector() {
    let job = Job::new();
    let _taken = std::net::TcpListener::bind(("127.0.0.1", job.port)).unwrap();
    let line = one_line(&job);
    let words = format!("cannot listen on port {}", job.port);
    assert!(line.contains(&words) && line.contains("XPU_TIMER_BASEPORT"), "{line}");
    assert!(!line.contains("ERROR"), "{line}");
    // It listens on another pair.
    assert!(line.contains(&format!("the control port is {}", job.port + 10)), "{line}");
    let (code, _) = xpu_timer_tests::http("GET", job.port + 10, "/health").expect("it answers there");
    assert_eq!(code, 200);

    let file = job.dir.join("file");
    fs::write(&file, "").unwrap();
    let job = Job::new().with("XPU_TIMER_TIMELINE_PATH", &file.join("timeline").display().to_string());
    let line = one_line(&job);
    assert!(line.contains("XPU_TIMER_TIMELINE_PATH") && line.contains("Not a directory"), "{line}");
    assert!(line.contains(&format!("xpu_timer-{}/timeline", nix::unistd::geteuid())), "{line}");

    let job = Job::new();
    if let Some(disk) = Tmpfs::new(job.dir.join("disk"), 8) {
        let _ = fs::write(disk.0.join("fills"), vec![1; 1 << 20]);
        let job = Job::new().with("XPU_TIMER_TIMELINE_PATH", &disk.0.display().to_string());
        let line = one_line(&job);
        assert!(line.contains("No space left on device") && line.contains("/timeline"), "{line}");
    }
}

#[test]
fn a_socket_that_its_collector_left_behind_is_no_obstacle() {
    let job = Job::new();
    let socket = job.dir.join("left.sock");
    let job = job.with("XPU_TIMER_SOCKET", &socket.display().to_string());
    drop(FakeCollector::listen(&socket, ReadMode::Reads));
    assert!(socket.exists());
    let output = Process::spawn(job.launch("sh").args(["-c", "kill -0 $XPU_TIMER_COLLECTOR_PID"])).wait(PATIENCE);
    assert_eq!((output.code(), output.stderr.as_str()), (0, ""), "{output:?}");
}

#[test]
fn an_unusable_temporary_folder_is_replaced_and_reported() {
    let place = tempfile::tempdir().unwrap();
    let own = |name: &str| place.path().join(name);
    fs::write(own("file"), "").unwrap();
    let long = own(&"x".repeat(100));
    fs::create_dir(&long).unwrap();
    // Everybody may put things into the folder of this user's sockets.
    let squatted = own("squatted");
    let folder = socket::directory(&squatted, nix::unistd::geteuid().as_raw());
    fs::create_dir_all(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
    let cases = [
        (own("missing"), "No such file"),
        (own("file"), "Not a directory"),
        (long.clone(), "107 bytes"),
        (squatted, "others can write"),
        ("relative".into(), "it is relative"),
        ("/proc/self".into(), "cannot be used"),
    ];
    for (temporary, why) in cases {
        let job = Job::new().with("TMPDIR", &temporary.display().to_string());
        let script = "kill -0 $XPU_TIMER_COLLECTOR_PID && test -S $XPU_TIMER_SOCKET && echo $XPU_TIMER_SOCKET";
        let output = Process::spawn(job.launch("sh").args(["-c", script])).wait(PATIENCE);
        assert_eq!(output.code(), 0, "{}: {output:?}", temporary.display());
        let socket = output.stdout.trim();
        assert!(output.stderr.lines().count() == 1 && output.stderr.contains(why), "{output:?}");
        assert!(output.stderr.contains(socket), "{output:?}");
    }
    let job = Job::new();
    let named = long.join("s.sock").display().to_string();
    let job = job.with("XPU_TIMER_SOCKET", &named);
    let output = Process::spawn(job.launch("sh").args(["-c", "test -S $XPU_TIMER_SOCKET"])).wait(PATIENCE);
    assert_eq!(output.code(), 0, "{output:?}");
    assert!(output.stderr.contains("XPU_TIMER_SOCKET") && output.stderr.contains("107 bytes"), "{output:?}");
}

/// A user id that no other test uses.
const OTHER_USER: u32 = 54321;

#[test]
fn two_users_of_a_node_have_a_collector_each() {
    if !nix::unistd::geteuid().is_root() {
        return skip("only root can start programs as another user");
    }
    // The folder that all users of a node share, and the programs where all can read them.
    let shared = TempDir::new().unwrap();
    fs::set_permissions(shared.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let installed = shared.path().join("installed");
    fs::create_dir(&installed).unwrap();
    for name in ["xpu_timer_launch", "xpu_timer_collector", "libxpu_timer_hook.so"] {
        let (from, to) = (artifacts().bin(name), installed.join(name));
        fs::hard_link(&from, &to).unwrap_or_else(|_| copy_program(&from, &to));
    }
    let temporary = shared.path().display().to_string();
    let first = Job::new();
    let job = |job: Job| job.with("TMPDIR", &temporary).with("XPU_TIMER_LOGGING_DIR", &temporary);
    let second = job(Job::new().with("XPU_TIMER_BASEPORT", &first.port.to_string()));
    let first = job(first);
    let shows = "stat -c %u /proc/$XPU_TIMER_COLLECTOR_PID; echo $XPU_TIMER_SOCKET";
    let run = |job: &Job, user: u32| {
        let mut command = job.command("setpriv");
        command.arg(format!("--reuid={user}")).arg("--clear-groups").arg(installed.join("xpu_timer_launch"));
        command.current_dir("/").args(["sh", "-c", shows]);
        Process::spawn(&mut command).wait(PATIENCE)
    };
    let expected = |job: &Job, user: u32| {
        format!("{user}\n{temporary}/xpu_timer-{user}/{}.sock\n", if user == 0 { job.port } else { first.port })
    };
    let output = run(&first, 0);
    assert_eq!((output.code(), output.stdout, output.stderr.as_str()), (0, expected(&first, 0), ""));
    let output = run(&second, OTHER_USER);
    assert_eq!((output.code(), output.stdout.clone()), (0, expected(&second, OTHER_USER)), "{output:?}");
    // The port is the first one's, and so are its folder for incidents and its log.
    let stderr = &output.stderr;
    assert!(stderr.contains(&format!("cannot listen on port {}", first.port)), "{stderr}");
    assert!(stderr.contains("XPU_TIMER_TIMELINE_PATH") && stderr.contains("Permission denied"), "{stderr}");
    assert_eq!(stderr.lines().count(), 2, "{stderr}");
    let log = shared.path().join(format!("xpu_timer-{OTHER_USER}/xpu_timer_collector.log"));
    assert!(fs::read_to_string(&log).unwrap().contains("listening on"), "{}", log.display());
    // Once more: it is there now.
    let again = run(&second, OTHER_USER);
    assert_eq!(again.stdout, output.stdout);
}

/// Prints its preloaded libraries, and ends with 3.
const SHOWS_PRELOAD: &str = "#include <stdio.h>\n#include <stdlib.h>\n\
     int main(void) { const char *value = getenv(\"LD_PRELOAD\"); printf(\"[%s]\\n\", value ? value : \"\"); return 3; }";

/// The launcher prints one line that contains all of these words, and the command runs as without
/// the launcher.
fn runs_without_the_hook(output: &Output, words: &[&str]) {
    assert_eq!((output.code(), output.stdout.as_str()), (3, "[]\n"), "{output:?}");
    let line = output.stderr.strip_prefix("xpu_timer_launch: running without the hook: ").unwrap_or_default();
    assert_eq!(line.lines().count(), 1, "{output:?}");
    assert!(words.iter().all(|word| line.contains(word)), "{words:?}: {output:?}");
}

#[test]
fn a_program_that_cannot_load_the_hook_runs_without_it() {
    let place = Place::new();
    let loader = place.path("ld-musl-x86_64.so.1");
    symlink("/lib64/ld-linux-x86-64.so.2", &loader).unwrap();
    let linked = format!("-Wl,--dynamic-linker={}", loader.display());
    let musl = compile_c(place.dir.path(), "musl", SHOWS_PRELOAD, &[&linked]).display().to_string();
    let (output, started) = place.started(&mut place.launch(&[&musl]));
    runs_without_the_hook(&output, &[&musl, "musl"]);
    assert!(!started, "a collector without ranks");
    runs_without_the_hook(&place.run(&["env", "A=b", &musl]), &[&musl, "musl"]);
    let script = place.script("").with_file_name("script");
    fs::write(&script, format!("#!/usr/bin/env -S A=b {musl}\n")).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let script = script.display().to_string();
    runs_without_the_hook(&place.run(&[&script]), &[&musl, "musl"]);
    // A launcher above has put the hook there; others stay.
    let hook = artifacts().hook();
    let output = Process::spawn(place.launch(&[&musl]).env("LD_PRELOAD", &hook)).wait(PATIENCE);
    runs_without_the_hook(&output, &[&musl]);

    // Needs no 32-bit library: it only ends. A kernel may have no 32-bit programs.
    let ends = "void _start(void) { __asm__(\"mov $1, %eax; mov $3, %ebx; int $0x80\"); }";
    let narrow = compile_c(place.dir.path(), "narrow", ends, &["-m32", "-nostdlib", "-static", "-fno-pic", "-no-pie"]);
    let narrow = narrow.display().to_string();
    let output = place.run(&[&narrow]);
    assert!([3, 126].contains(&output.code()), "{output:?}");
    let line = output.stderr.lines().next().unwrap_or_default();
    assert!(line.contains("running without the hook") && line.contains("32-bit"), "{output:?}");
}

#[test]
fn a_static_program_passes_the_hook_on() {
    let place = Place::new();
    let _collector = place.collector();
    let program = compile_c(place.dir.path(), "alone", SHOWS_PRELOAD, &["-static"]).display().to_string();
    let output = place.run(&[&program]);
    assert_eq!((output.code(), output.stdout), (3, format!("[{}]\n", artifacts().hook().display())));
    assert!(output.stderr.contains("statically linked") && output.stderr.lines().count() == 1, "{}", output.stderr);
}

#[test]
fn with_a_container_runtime_the_launcher_says_where_it_belongs() {
    let place = Place::new();
    for name in ["docker", "srun"] {
        let program = place.path(name);
        fs::write(&program, "#!/bin/sh\necho \"[$LD_PRELOAD]\"\nexit 3\n").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", place.dir.path().display(), std::env::var("PATH").unwrap());
    let run = |arguments: &[&str]| Process::spawn(place.launch(arguments).env("PATH", &path)).wait(PATIENCE);
    let mut docker = place.launch(&["docker", "run", "--gpus=all", "image", "python", "train.py"]);
    let (output, started) = place.started(docker.env("PATH", &path));
    runs_without_the_hook(&output, &["docker run", "in a container", "xpu_timer_launch python"]);
    assert!(!started, "a collector that the ranks in the container cannot reach");
    // Its ranks on this node are served as ever.
    let _collector = place.collector();
    let output = run(&["srun", "-N1", "python", "train.py"]);
    assert!(output.stdout.contains("libxpu_timer_hook.so"), "{output:?}");
    assert!(output.stderr.contains("srun … xpu_timer_launch") && output.stderr.lines().count() == 1, "{output:?}");
    let output = run(&["docker", "ps"]);
    assert_eq!((output.code(), output.stderr.as_str()), (3, ""));
}

/// Runs a command under a seccomp filter for one system call. Its arguments are `kill`, `trap` or
/// `errno`, the number of the call, and the command.
const FILTER: &str = r#"
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    unsigned action = SECCOMP_RET_ERRNO | EPERM;
    if (!strcmp(argv[1], "kill"))
        action = SECCOMP_RET_KILL_PROCESS;
    if (!strcmp(argv[1], "trap"))
        action = SECCOMP_RET_TRAP;
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)atoi(argv[2]), 0, 1),
        BPF_STMT(BPF_RET | BPF_K, action),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof(filter) / sizeof(*filter), filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program))
        return 3;
    execv(argv[3], argv + 3);
    return 4;
}
"#;

#[test]
fn a_seccomp_filter_that_ends_callers_does_not_end_the_command() {
    let place = Place::new();
    let _collector = place.collector();
    let filter = compile_c(place.dir.path(), "filter", FILTER, &[]);
    let under = |action: &str, call: libc::c_long, arguments: &[&str]| {
        let launch = place.launch(arguments);
        let mut command = with_environment_of(&launch, &filter);
        command.arg(action).arg(call.to_string()).arg(launch.get_program()).args(launch.get_args());
        Process::spawn(&mut command).wait(PATIENCE)
    };
    let shows = ["sh", "-c", "echo \"[$LD_PRELOAD]\"; exit 3"];
    for (action, call, name) in [
        ("kill", libc::SYS_memfd_create, "kills a process that calls memfd_create"),
        ("trap", libc::SYS_sendmsg, "kills a process that calls sendmsg"),
        ("kill", libc::SYS_socket, "kills a process that calls socket"),
        ("kill", libc::SYS_prctl, "kills a process that calls prctl"),
        ("kill", libc::SYS_process_vm_readv, "kills a process that calls process_vm_readv"),
        ("kill", libc::SYS_clone3, "kills a process that calls clone3"),
        ("errno", libc::SYS_memfd_create, "refuses memfd_create (Operation not permitted)"),
    ] {
        runs_without_the_hook(&under(action, call, &shows), &[name]);
    }
    // Only the collector needs this call, and reports it itself.
    let output = under("errno", libc::SYS_ptrace, &shows);
    assert!(output.stdout.contains("libxpu_timer_hook.so") && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn a_disabled_launcher_starts_and_changes_nothing() {
    let place = Place::new();
    let shows = ["sh", "-c", "echo [$LD_PRELOAD]"];
    let (output, started) = place.started(place.launch(&shows).env("XPU_TIMER_DISABLE", "1"));
    assert_eq!((output.stdout.as_str(), output.stderr.as_str()), ("[]\n", ""));
    assert!(!started, "a collector");
    assert_eq!(place.files(), ["collector.sh"], "nothing is written");
    // When enabled, this check finds one.
    let (_, started) = place.started(&mut place.launch(&shows));
    assert!(started && place.path("xpu_timer_collector.log").exists());
}

#[test]
fn rank_variables_of_every_launcher() {
    // The variables that each launcher really sets, and the expected rank, world size, local rank,
    // ranks of the node and job.
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

/// Special files that a variable may name by mistake and, if this machine can mount it, a file on a
/// file system that never answers.
struct Traps {
    paths: Vec<PathBuf>,
    _socket: UnixListener,
    _fuse: Option<Process>,
}

impl Traps {
    fn set(place: &Place) -> Self {
        let path = |name: &str| place.path(name);
        assert!(Command::new("mkfifo").arg(path("fifo")).status().unwrap().success());
        fs::create_dir(path("folder")).unwrap();
        File::create(path("large")).unwrap().set_len(1 << 40).unwrap();
        symlink("loop", path("loop")).unwrap();
        let socket = UnixListener::bind(path("listener")).unwrap();
        let mut paths: Vec<PathBuf> = ["fifo", "folder", "large", "loop", "listener", "none"].map(path).into();
        paths.extend(["/dev/zero".into(), "/dev/tty".into()]);
        let fuse = start_on_fuse(place.dir.path(), &[]);
        if let Some(fuse) = &fuse {
            let inside = place.path("mount/file");
            paths.push(PathBuf::from(format!("/proc/{}/root{}", fuse.pid(), inside.display())));
        }
        Traps { paths, _socket: socket, _fuse: fuse }
    }
}

#[test]
fn a_configuration_that_is_not_a_file_prints_one_line() {
    let place = Place::new();
    let _collector = place.collector();
    let traps = Traps::set(&place);
    for path in &traps.paths {
        let begun = Instant::now();
        let mut command = place.launch(&["sh", "-c", "echo \"[$XPU_TIMER_CONFIG$XPU_TIMER_CONFIG_READ]\"; exit 3"]);
        let output = Process::spawn(command.env("XPU_TIMER_CONFIG", path)).wait(PATIENCE);
        assert_eq!((output.code(), output.stdout.as_str()), (3, "[]\n"), "{output:?}");
        assert_eq!(output.stderr.lines().count(), 1, "{output:?}");
        assert!(output.stderr.contains(&format!("XPU_TIMER_CONFIG=\"{}", path.display())), "{output:?}");
        assert!(begun.elapsed() < PATIENCE / 2, "{path:?}: {:?}", begun.elapsed());
    }
    // More than the environment of a program may hold.
    let large = place.path("settings");
    fs::write(&large, format!("XPU_TIMER_JOB={}\n", "x".repeat(500_000))).unwrap();
    let mut command = place.launch(&["sh", "-c", "exit 3"]);
    let output = Process::spawn(command.env("XPU_TIMER_CONFIG", &large)).wait(PATIENCE);
    assert_eq!((output.code(), output.stderr.lines().count()), (3, 1), "{output:?}");
}

#[test]
fn a_configuration_is_read_once_and_handed_over() {
    let place = Place::new();
    let _collector = place.collector();
    let path = place.path("settings");
    fs::write(&path, "[any]\nxpu_timer_bracket = all\nXPU_TIMER_HANG_TIMEOUT=7\nOTHER=x\n").unwrap();
    let mut command = place.launch(&["sh", "-c", "echo \"$XPU_TIMER_CONFIG_READ\""]);
    let output = Process::spawn(command.env("XPU_TIMER_CONFIG", &path)).wait(PATIENCE);
    let wanted = format!("{}\nXPU_TIMER_HANG_TIMEOUT=7\nXPU_TIMER_BRACKET=all\n\n", path.display());
    assert_eq!((output.stdout, output.stderr), (wanted, String::new()));
}

#[test]
fn other_variables_that_do_not_name_a_file_print_one_line_each() {
    let place = Place::new();
    let traps = Traps::set(&place);
    let run = |name: &str, path: &PathBuf| {
        let begun = Instant::now();
        let mut command = place.launch(&["sh", "-c", "exit 3"]);
        let output = Process::spawn(command.env(name, path)).wait(PATIENCE);
        assert_eq!(output.code(), 3, "{output:?}");
        assert!(begun.elapsed() < PATIENCE / 2, "{name}={path:?}: {:?}", begun.elapsed());
        output.stderr
    };
    // Nobody answers at the socket, and the launcher searches for the program.
    for path in &traps.paths {
        let stderr = run("XPU_TIMER_DAEMON_PATH", path);
        assert!(
            stderr.starts_with("xpu_timer_launch: running without the node collector") && stderr.lines().count() == 1,
            "{stderr}"
        );
    }
    let _collector = place.collector();
    for path in &traps.paths {
        for (name, words) in [
            ("XPU_TIMER_HOOK_PATH", "running without the hook: XPU_TIMER_HOOK_PATH="),
            ("XPU_TIMER_NCCL_LIB_PATH", "XPU_TIMER_NCCL_LIB_PATH="),
        ] {
            let stderr = run(name, path);
            // The loader says what a large file is not.
            let named = stderr.contains(words) || path.ends_with("large");
            let taken = path.ends_with("large") && name == "XPU_TIMER_NCCL_LIB_PATH";
            assert!(named && stderr.lines().count() == usize::from(!taken), "{name}={path:?}: {stderr}");
        }
        if !["folder", "none"].iter().any(|name| path.ends_with(name)) {
            let stderr = run("XPU_TIMER_TIMELINE_PATH", path);
            assert!(stderr.contains("cannot be written") && stderr.lines().count() == 1, "{path:?}: {stderr}");
        }
    }
}

/// A program that reads a secret or a certificate names the file that is not one, and exits. It
/// also reports in time if the file system never answers. The kernel then decides how long the exit
/// takes, because it waits for the remaining thread.
#[test]
fn the_collector_and_its_clients_do_not_wait_for_special_files() {
    let place = Place::new();
    let traps = Traps::set(&place);
    let run = |arguments: &[&str], variables: &[(&str, &PathBuf)]| {
        let begun = Instant::now();
        let mut command = Command::new(artifacts().bin("xpu_timer_collector"));
        command.args(arguments).env("XPU_TIMER_COLLECTOR", "https://localhost:1").env("XPU_TIMER_LOG", "error");
        command.env("TMPDIR", place.dir.path()).envs(variables.iter().copied());
        let output = Process::spawn(&mut command).wait(PATIENCE);
        assert!(begun.elapsed() < PATIENCE / 2, "{variables:?}: {:?}", begun.elapsed());
        assert_eq!(output.code(), 1, "{output:?}");
        output.stderr
    };
    for path in traps.paths.iter().filter(|path| !path.starts_with("/proc")) {
        for (arguments, name) in [
            (&["incidents"][..], "XPU_TIMER_COLLECTOR_TOKEN_FILE"),
            (&["incidents"], "XPU_TIMER_COLLECTOR_CA_FILE"),
            (&["cluster", "--listen", "127.0.0.1:0"], "XPU_TIMER_COLLECTOR_TOKEN_FILE"),
        ] {
            let stderr = run(arguments, &[(name, path)]);
            assert!(stderr.contains(&*path.to_string_lossy()) && stderr.lines().count() == 1, "{name}: {stderr}");
        }
        let identity = [("XPU_TIMER_CLUSTER_CERT_FILE", path), ("XPU_TIMER_CLUSTER_KEY_FILE", path)];
        let stderr = run(&["cluster", "--listen", "127.0.0.1:0"], &identity);
        assert!(stderr.contains(&*path.to_string_lossy()), "{stderr}");
    }
}
