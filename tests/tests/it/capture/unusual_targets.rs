//! Captures unusual targets: unexpected names and builds, and a capture whose system calls are
//! forbidden.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use xpu_timer_proto::server::CaptureMethod;
use xpu_timer_tests::{Process, artifacts, compile_c, copy_program, python, skip};

use super::{
    builds::{check, compile},
    capture_until, describe, names, optimized, start,
};

/// Runs what follows with system calls that fail: number and errno in turn, up to `--`.
const WITHOUT: &str = r#"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(int count, char **words) {
  struct sock_filter code[64] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
  unsigned short length = 1;
  int at = 1;
  for (; at + 1 < count && strcmp(words[at], "--"); at += 2) {
    code[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, atoi(words[at]), 0, 1);
    code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | atoi(words[at + 1]));
  }
  code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  struct sock_fprog program = {length, code};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program)) {
    perror("seccomp");
    return 99;
  }
  execv(words[at + 1], words + at + 1);
  perror(words[at + 1]);
  return 98;
}
"#;

/// `xpu_timer_dump` of a process, in a world in which these system calls fail.
fn dump_without(folder: &Path, calls: &[(i64, i32)], pid: i32, arguments: &[&str]) -> Output {
    let mut command = Command::new(compile_c(folder, "without", WITHOUT, &["-O1"]));
    command.args(calls.iter().flat_map(|(call, errno)| [call.to_string(), errno.to_string()]));
    command.arg("--").arg(artifacts().bin("xpu_timer_dump")).args(["--pid", &pid.to_string()]).args(arguments);
    command.output().expect("own program")
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

const SLEEPING_PYTHON: &str = "\
import threading, time
def innermost(): print('ready', flush=True); time.sleep(10000)
def outermost(): innermost()
outermost()
";

/// Seccomp filters of containers forbid `process_vm_readv` more often than `/proc/PID/mem`, and
/// either errno is theirs.
#[test]
fn memory_is_read_from_a_file_where_the_call_is_forbidden() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut process = Process::spawn(Command::new(python()).args(["-c", SLEEPING_PYTHON]));
    process.wait_for("ready", xpu_timer_tests::PATIENCE);
    capture_until(process.pid(), "it sleeps", |sample| sample.process_state.starts_with('S'));
    for errno in [libc::EPERM, libc::ENOSYS] {
        for arguments in [&[][..], &["--force-ptrace"]] {
            let output = dump_without(folder.path(), &[(libc::SYS_process_vm_readv, errno)], process.pid(), arguments);
            let text = text(&output);
            assert!(output.status.success(), "{errno} {arguments:?}: {text}");
            let places = ["clock_nanosleep", "> innermost", "> outermost", "> <module>", "_start"].map(|wanted| {
                text.find(wanted).unwrap_or_else(|| panic!("{errno} {arguments:?}: no {wanted}: {text}"))
            });
            assert!(places.is_sorted() && !text.contains("incomplete"), "{errno} {arguments:?}: {text}");
        }
    }
}

const SPINNING_PYTHON: &str = "\
def innermost():
    print('ready', flush=True)
    while True: pass
def outermost(): innermost()
outermost()
";

/// Threads that sleep need no samples. For a running thread, the dump reports once what is missing,
/// and shows the Python stack.
#[test]
fn without_samples_threads_that_sleep_are_whole() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for errno in [libc::EPERM, libc::EACCES, libc::ENOSYS] {
        let forbidden = [(libc::SYS_perf_event_open, errno), (libc::SYS_ptrace, libc::EPERM)];
        let sleeping = start(&optimized(), &["threads", "4"]);
        capture_until(sleeping.pid(), "they sleep", |sample| {
            sample.stacktrace.len() == 5
                && sample.stacktrace.iter().all(|thread| thread.capture() == CaptureMethod::ZeroStop)
        });
        let output = dump_without(folder.path(), &forbidden, sleeping.pid(), &[]);
        assert!(output.status.success() && !text(&output).contains("incomplete"), "{}", text(&output));
        assert!(text(&output).contains("4 threads with the same stack"), "{}", text(&output));
        let reason =
            if errno == libc::ENOSYS { "lacks the call" } else { "allow perf_event_open, or grant CAP_PERFMON" };
        let running = start(&optimized(), &["spin_threads", "4"]);
        let output = dump_without(folder.path(), &forbidden, running.pid(), &[]);
        let shown = text(&output);
        assert_eq!(
            shown.matches("incomplete: the thread runs, and the kernel does not permit sampling it").count(),
            4,
            "{shown}"
        );
        assert_eq!(shown.matches(reason).count(), 1, "{shown}");
        let mut running = Process::spawn(Command::new(python()).args(["-c", SPINNING_PYTHON]));
        running.wait_for("ready", xpu_timer_tests::PATIENCE);
        let output = dump_without(folder.path(), &forbidden, running.pid(), &[]);
        let shown = text(&output);
        assert!(output.status.success() && shown.contains("R (running)"), "{shown}");
        let places = ["> innermost", "> outermost", "> <module>"].map(|wanted| shown.find(wanted));
        assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{shown}");
    }
}

/// An ordinary user may sample their own processes, but not the kernel: a thread that never leaves
/// the kernel has this reason.
#[test]
fn a_user_samples_his_own_processes() {
    use std::os::unix::{fs::PermissionsExt, process::CommandExt};
    if !nix::unistd::geteuid().is_root() {
        return skip("only root can become somebody else");
    }
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap_or_default();
    if paranoid.trim() != "2" {
        return skip("it is about /proc/sys/kernel/perf_event_paranoid 2");
    }
    let folder = tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o755)).tempdir();
    let folder = folder.expect("a temporary folder");
    let dump = folder.path().join("xpu_timer_dump");
    copy_program(&artifacts().bin("xpu_timer_dump"), &dump);
    const BUSY: &str = "#include <fcntl.h>\n#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n
        __attribute__((noinline)) static void in_zero(int zero, char *room) { for (;;) if (read(zero, room, 1 << 28) < 0) abort(); }
        int main(void) { puts(\"ready\"); fflush(stdout); in_zero(open(\"/dev/zero\", O_RDONLY), malloc(1 << 28)); return 0; }";
    let busy = compile_c(folder.path(), "busy", BUSY, &["-O1"]);
    let spin = folder.path().join("spin");
    copy_program(&optimized(), &spin);
    let nobody = |program: &Path, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).uid(65534).gid(65534);
        command
    };
    let shown = |process: &Process| {
        let output = nobody(&dump, &["--pid", &process.pid().to_string()]).output().expect("own program");
        text(&output)
    };
    let mut spinning = Process::spawn(&mut nobody(&spin, &["spin"]));
    spinning.wait_for("ready", xpu_timer_tests::PATIENCE);
    xpu_timer_tests::wait_until(xpu_timer_tests::PATIENCE, "it spins", || {
        let text = shown(&spinning);
        text.contains("sampled while running, without a stop")
            && text.contains("in_spin")
            && !text.contains("incomplete")
    });
    let mut busy = Process::spawn(&mut nobody(&busy, &[]));
    busy.wait_for("ready", xpu_timer_tests::PATIENCE);
    xpu_timer_tests::wait_until(xpu_timer_tests::PATIENCE, "it says where it is", || {
        shown(&busy).contains("incomplete: the thread is busy inside a system call")
    });
    // With the privilege it is sampled there too.
    capture_until(busy.pid(), "inside a system call", |sample| {
        let main = &sample.stacktrace[0];
        main.capture() == CaptureMethod::PerfSample && names(main).contains(&"in_zero") && main.incomplete.is_empty()
    });
}

/// If the kernel reports the position of a thread and its memory cannot be read, there is one
/// frame, and the reason why there are no more.
#[test]
fn without_any_way_to_the_memory_it_says_so() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let process = start(&optimized(), &["poll"]);
    // `/proc/PID/mem` is hidden by a copy of the dump's own `/proc` without it.
    let script = format!(
        "mount --bind /dev/null /proc/{0}/mem && mount --bind /dev/null /proc/{0}/task/{0}/mem && exec \"$@\"",
        process.pid()
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-ec", &script, "sh"]);
    command.arg(compile_c(folder.path(), "without", WITHOUT, &["-O1"]));
    command.args([libc::SYS_process_vm_readv.to_string(), libc::EPERM.to_string(), "--".into()]);
    command.arg(artifacts().bin("xpu_timer_dump")).args(["--pid", &process.pid().to_string()]);
    let output = command.output().expect("unshare runs");
    let text = text(&output);
    if text.contains("unshare: ") || text.contains("mount: ") {
        return skip("namespaces cannot be made here: it takes root, or CAP_SYS_ADMIN, and unshare");
    }
    assert!(text.contains("    poll ") && text.contains("incomplete: memory at 0x"), "{text}");
    assert!(!text.contains("level_three"), "it was read anyway: {text}");
}

const ODD_NAMES: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>
static const char *names[] = {"a\nThread 1 \"b\"", "\x1b[31mred\x1b[0m", "\xff\xfe\x80", "tab\there", "\xe2\x80\xae" "gnal", "\"quoted\\", "", "\r\b\x7f", "\xc2\x9b" "31m"};
#define COUNT (int)(sizeof names / sizeof *names)
static void *run(void *number) { prctl(PR_SET_NAME, names[(long)number % COUNT]); for (;;) pause(); }
int main(void) {
  pthread_t thread;
  for (long i = 0; i < 32; i++) pthread_create(&thread, 0, run, (void *)i);
  puts("ready"); fflush(stdout);
  for (;;) pause();
}
"#;

/// No name of a target or its threads controls the terminal or looks like a line of the dump.
#[test]
fn names_that_are_no_text() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = compile_c(folder.path(), "odd\u{1b}[2J\n\u{202e}name", ODD_NAMES, &["-O1", "-pthread"]);
    let process = start(&program, &["\u{1b}[31m", "new\nline"]);
    let captured = capture_until(process.pid(), "they have their names", |sample| {
        let named = sample.stacktrace.iter().filter(|thread| thread.thread_name.contains("gnal")).count();
        named == 4 && sample.stacktrace.iter().all(|thread| names(thread).contains(&"pause"))
    });
    assert_eq!(captured.sample.stacktrace.len(), 33, "{}", describe(&captured.sample));
    let dump = |arguments: &[&str]| {
        let mut command = Command::new(artifacts().bin("xpu_timer_dump"));
        command.args(["--pid", &process.pid().to_string()]).args(arguments).output().expect("it runs")
    };
    let output = dump(&[]);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let bad = |c: char| (c.is_control() && c != '\n') || ('\u{202a}'..='\u{202e}').contains(&c);
    assert!(!text.contains(bad), "{text:?}");
    assert!(text.lines().all(|line| !line.starts_with("Thread 1 ")), "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("Process ")).count(), 1, "{text}");
    let output = dump(&["--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(json[0]["stacktrace"].as_array().map(Vec::len), Some(33));
    assert!(!output.stdout.contains(&0x1b));
}

/// Programs without glibc, as musl and Go make them: no dynamic loader, no libc, static,
/// position-independent or not.
#[test]
fn programs_without_a_c_library() {
    let source = r#"
#define NOINLINE __attribute__((noinline, noclone))
static long call(long number, long a, long b, long c) {
  long answer;
  __asm__ volatile("syscall" : "=a"(answer) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
  return answer;
}
NOINLINE static long inner(long n) { call(1, 1, (long)"ready\n", 6); return call(34, 0, 0, 0) + n; }
NOINLINE static long outer(long n) { return inner(n) + 1; }
NOINLINE void begin(long *stack) { call(231, outer(*stack) & 1, 0, 0); __builtin_trap(); }
__asm__(".globl _start\n.type _start,@function\n_start:\n.cfi_startproc\n.cfi_undefined rip\nmov %rsp,%rdi\nand $-16,%rsp\n"
        "call begin\nhlt\n.cfi_endproc\n.size _start,.-_start\n");
"#;
    let folder = tempfile::tempdir().expect("a temporary folder");
    for arguments in ["-static", "-static-pie -fPIE", "-static -fno-asynchronous-unwind-tables -fno-omit-frame-pointer"]
    {
        let words: Vec<&str> = ["-O1", "-nostdlib", "-ffreestanding", "-fno-stack-protector"]
            .into_iter()
            .chain(arguments.split(' '))
            .collect();
        let program = compile(folder.path(), "gcc", "program.c", source, &words);
        check(&program, arguments, &["inner", "outer", "begin", "_start"]);
    }
}

/// Assembly without any tables that keeps frame pointers, as Go does: the chain of these leads
/// through it.
#[test]
fn assembly_without_tables_that_keeps_frame_pointers() {
    let assembly = "\
    .text\n.globl go_like\n.type go_like,@function\n\
go_like: push %rbp\nmov %rsp,%rbp\nsub $64,%rsp\ncall go_inner\nadd $64,%rsp\npop %rbp\nret\n.size go_like,.-go_like\n\
    .type go_inner,@function\n\
go_inner: push %rbp\nmov %rsp,%rbp\nsub $32,%rsp\nmov $34,%eax\nsyscall\nadd $32,%rsp\npop %rbp\nret\n.size go_inner,.-go_inner\n\
    .section .note.GNU-stack,\"\",@progbits\n";
    let folder = tempfile::tempdir().expect("a temporary folder");
    let assembly_file = folder.path().join("go.s");
    fs::write(&assembly_file, assembly).expect("own folder");
    let source = "#include <stdio.h>\nlong go_like(void);\n__attribute__((noinline)) long caller(void) { return go_like() + 1; }\n\
                  int main(void) { puts(\"ready\"); fflush(stdout); return caller(); }\n";
    let arguments = ["-O1", "-fno-omit-frame-pointer", assembly_file.to_str().expect("UTF-8")];
    let program = compile(folder.path(), "gcc", "program.c", source, &arguments);
    check(&program, "frame pointers", &["go_inner", "go_like", "caller", "main"]);
}
