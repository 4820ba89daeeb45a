//! The limits of the hook in its host. It must not wake often, lose the last operations, report for
//! another process, disturb thread cancellation and dlerror, or make a call that a program's own
//! filter of system calls forbids.

use std::{
    fs,
    os::unix::{fs::FileExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::Command,
};

use xpu_timer_proto::{
    ring::{self, filtered, header},
    v1::{FlightRecord, Op, OpStatus, Operation},
};
use xpu_timer_tests::{
    FakeCollector, Job, Output, PATIENCE, Process, ReadMode, artifacts, compile_c, idle_library, tree, wait_until,
};

use crate::guest::{hooked_program, idle_device, idle_libraries};

const SOURCE: &str = include_str!("safety.c");

/// A program under the hook that the collector has heard of.
struct Guest {
    job: Job,
    collector: FakeCollector,
    process: Process,
}

impl Guest {
    fn start(case: &str) -> Self {
        Self::start_after(case, |_| {})
    }

    /// `change` may put other libraries into the job's folder, which is given to it.
    fn start_after(case: &str, change: impl FnOnce(&Path)) -> Self {
        Self::start_with(case, |folder, _| change(folder))
    }

    /// `change` may change the program's environment, too.
    fn start_with(case: &str, change: impl FnOnce(&Path, &mut Command)) -> Self {
        let job = Job::new();
        let collector = FakeCollector::listen(&job.dir.join("fake.sock"), ReadMode::Reads);
        let folder = job.dir.clone();
        let process = idle_device(&job, "safety", SOURCE, |command| {
            change(&folder, command);
            command.arg(case).arg(&folder);
        });
        let guest = Guest { job, collector, process };
        guest.wait("begun");
        assert_eq!(guest.collector.wait_hello(), guest.process.pid());
        guest
    }

    fn wait(&self, name: &str) {
        wait_until(PATIENCE, name, || self.job.dir.join(name).exists());
    }

    fn say(&self, name: &str) {
        fs::write(self.job.dir.join(name), "").unwrap();
    }

    /// Lets it run to its end; its exit status, its record, and whether it has said goodbye.
    fn end(self) -> (i32, FlightRecord, bool) {
        self.say("go");
        let pid = self.process.pid();
        let output = self.process.wait(PATIENCE);
        assert_eq!(output.stderr, "");
        wait_until(PATIENCE, "the end of the connection", || {
            self.collector.ended().contains(&pid) || self.collector.goodbyes().contains(&pid)
        });
        let record = self.collector.ring(pid);
        assert_eq!(record.health.as_ref().unwrap().panics, 0);
        (output.code(), record, self.collector.goodbyes().contains(&pid))
    }
}

/// Times that a thread of a process went to sleep.
fn sleeps(pid: i32, name: &str) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let texts = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
    let status = texts.into_iter().find(|text| text.lines().next().is_some_and(|line| line.ends_with(name)));
    let status = status.expect("the thread");
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
    line.trim().parse().unwrap()
}

#[test]
fn a_write_of_an_invalid_address_has_its_own_result() {
    let (code, _, said_goodbye) = Guest::start("writes nowhere").end();
    assert_eq!((code, said_goodbye), (0, true));
}

#[test]
fn the_watcher_of_a_busy_rank_wakes_ten_times_a_second() {
    const TURNS: u64 = 30;
    let guest = Guest::start("steady");
    let pid = guest.process.pid();
    let (begun, before) = (std::time::Instant::now(), sleeps(pid, "xpu_timer_watch"));
    let turns = || sleeps(pid, "xpu_timer_watch") - before;
    guest.say("go");
    wait_until(PATIENCE, "the watcher turns", || turns() >= TURNS);
    // A busy machine makes the turns fewer, never more.
    let (turns, seconds) = (turns(), begun.elapsed().as_secs_f64());
    assert!(turns as f64 <= 10.0 * seconds + 10.0, "{turns} turns in {seconds} s");
    guest.say("enough");
    guest.end();
}

#[test]
fn a_burst_wakes_the_watcher_before_the_ring_is_full() {
    // Without the early wakeup, every try loses most of its operations; a machine that has
    // something else to do may lose a few of one.
    let tries: Vec<u64> = (0..3)
        .map(|_| Guest::start("bursts").end().1)
        .inspect(|record| assert_eq!(record.collectives_launched, 40_004))
        .map(|record| record.health.unwrap().dropped)
        .take_while(|dropped| *dropped > 0)
        .collect();
    assert!(tries.len() < 3, "{tries:?}");
}

#[test]
fn operations_completed_at_exit_are_in_the_record() {
    for (case, code, goodbye) in [
        ("exit", 0, true),
        ("_exit", 0, true),
        ("_exit 3", 3, false),
        ("quick_exit", 0, true),
        ("quick_exit 3", 3, false),
    ] {
        // The host waits for the watcher's final turn for a limited time, which may be too short on
        // a busy machine.
        let is_complete = (0..5).any(|_| {
            let (ended, record, said_goodbye) = Guest::start(case).end();
            assert_eq!((ended, said_goodbye), (code, goodbye), "{case}");
            assert_eq!(record.collectives_launched, 4, "{case}");
            record.operations.iter().all(|operation| operation.status() == OpStatus::Completed)
        });
        assert!(is_complete, "{case}");
    }
}

#[test]
fn a_rank_that_is_still_in_an_exit_handler_has_not_left() {
    let guest = Guest::start("late");
    guest.say("go");
    guest.wait("late");
    // A Goodbye would have arrived before.
    guest.collector.hear_all();
    assert!(guest.collector.goodbyes().is_empty() && guest.collector.ended().is_empty());
    guest.say("leave");
    let (code, _, said_goodbye) = guest.end();
    assert_eq!((code, said_goodbye), (0, true));
}

#[test]
fn a_child_of_a_raw_fork_does_not_touch_its_parent() {
    let guest = Guest::start("bare fork");
    guest.say("go");
    guest.wait("forked");
    assert!(guest.collector.goodbyes().is_empty() && guest.collector.ended().is_empty(), "the parent lives");
    let record = guest.collector.ring(guest.process.pid());
    assert_eq!(
        (record.kernels_launched, record.collectives_launched),
        (0, 1),
        "launches of the child do not count for its parent"
    );
    guest.say("leave");
    let collector_heard = |guest: &Guest| guest.collector.hellos().len();
    assert_eq!(collector_heard(&guest), 1, "and it is not a rank");
    let (code, record, said_goodbye) = guest.end();
    assert_eq!((code, record.collectives_launched, said_goodbye), (0, 4, true));
}

/// The child's first call of a function searches for it, while the linker's lock is held by a
/// thread that the child does not have.
#[test]
fn a_child_of_a_raw_fork_does_not_wait_for_the_linker() {
    let library = |folder: &Path| {
        let source = format!(
            r#"
            #include <fcntl.h>
            #include <unistd.h>
            int cublasSgemm_v2(void) {{ return 7; }}
            __attribute__((constructor)) static void construct(void) {{
                close(open("{folder}/in constructor", O_CREAT | O_WRONLY, 0600));
                while (access("{folder}/forked", F_OK) != 0) usleep(1000);
            }}"#,
            folder = folder.display()
        );
        compile_c(folder, "libcublas.so.12", &source, &["-fPIC", "-shared", "-Wl,-soname,libcublas.so.12"]);
    };
    let (code, record, said_goodbye) = Guest::start_after("fork in a constructor", library).end();
    assert_eq!((code, record.collectives_launched, said_goodbye), (0, 4, true));
}

#[test]
fn threads_are_cancelled_in_host_code_only() {
    let stubs = fs::read_to_string(tree().join("tests/bench/targets/hook_stubs.c")).unwrap();
    // A driver in which a thread can be cancelled at every driver call of a collective.
    let driver = |folder: &Path| {
        let flags = ["-O2", "-fPIC", "-fexceptions", "-shared", "-DDRIVER", "-DCANCELLATION_POINTS"];
        compile_c(folder, "libcuda.so.1", &stubs, &[&flags[..], &["-Wl,-soname,libcuda.so.1"]].concat());
    };
    let guest = Guest::start_after("cancelled", driver);
    let is_open = |operation: &Operation| operation.status() == OpStatus::Pending;
    // Until the watcher has had its turn on a busy machine.
    wait_until(PATIENCE, "no operation is left open", || {
        !guest.collector.ring(guest.process.pid()).operations.iter().any(is_open)
    });
    let (code, record, said_goodbye) = guest.end();
    assert_eq!((code, said_goodbye), (0, true));
    assert!(!record.operations.iter().any(is_open), "no operation is left open");
}

#[test]
fn dlerror_returns_errors_of_the_host_only() {
    assert_eq!(Guest::start("linker errors").end().0, 0);
}

/// The watcher looks for libraries at once, and 0.1 and 1 s later. Nothing of the hook calls
/// `getenv`.
#[test]
fn a_thread_may_move_the_environment_at_any_time() {
    let (code, record, _) = Guest::start("environment").end();
    assert_eq!((code, record.collectives_launched), (0, 4));
}

/// No launcher has checked these variables before the program started.
#[test]
fn a_bad_path_in_a_variable_neither_stops_a_program_nor_prints() {
    for name in ["XPU_TIMER_CONFIG", "XPU_TIMER_NCCL_LIB_PATH", "XPU_TIMER_LOGGING_DIR"] {
        let guest = Guest::start_with("exit", |folder, command| {
            let fifo = folder.join("fifo");
            assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
            command.env(name, fifo);
        });
        let (code, record, said_goodbye) = guest.end();
        assert_eq!((code, record.collectives_launched, said_goodbye), (0, 4, true), "{name}");
    }
}

/// A program with a large symbol table, which prints how many bytes it has read so far, and what
/// else it is made of.
fn bytes_read_by_a_large_program(more: &str, hooked: bool) -> u64 {
    let source = format!(
        r#"
        #include <dlfcn.h>
        #include <stdio.h>
        __asm__(".altmacro\n.macro one n\n.set a_function_of_a_large_program_\\n, 1\n.endm\n"
                ".set i, 0\n.rept 50000\none %i\n.set i, i + 1\n.endr\n.noaltmacro");
        {more}
        int main(int count, char **arguments) {{
            if (count > 9) dlopen(arguments[1], RTLD_NOW);
            char line[64];
            FILE *file = fopen("/proc/self/io", "r");
            fgets(line, sizeof line, file);
            fputs(line, stdout);
        }}"#
    );
    let job = Job::new();
    let mut command = job.command(compile_c(&job.dir, "large", &source, &["-w", "-ldl"]));
    if hooked {
        command.env("LD_PRELOAD", artifacts().hook());
    }
    let output = Process::spawn(&mut command).wait(PATIENCE);
    assert_eq!((output.code(), output.stderr.as_str()), (0, ""));
    output.stdout.trim().strip_prefix("rchar: ").unwrap().parse().unwrap()
}

#[test]
fn a_large_program_is_searched_for_libraries_only_if_it_holds_code_for_a_device() {
    const SYMBOLS: u64 = 50_000 * 24;
    let read = |more: &str| bytes_read_by_a_large_program(more, true) - bytes_read_by_a_large_program(more, false);
    let (without, with) = (read(""), read(r#"__attribute__((section(".nv_fatbin"))) const char code[8] = "code";"#));
    assert!(without < SYMBOLS / 4, "{without}");
    assert!(with > SYMBOLS, "{with}: it is searched at all");
}

/// Trains with BYTES of thread-local variables, which the C library takes from the stack of each
/// thread. Its argument is a folder. It ends when that has a file `go`, with status 7 when each
/// thread got a stack beside them.
const THREAD_LOCAL: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct { char internal[128]; } Id;
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclCommInitRank(void **, int, Id, int);

static __thread volatile char variables[BYTES];

static int is_short;

/* In place of the C library's, for the hook too. */
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    size_t stack = 0;
    if (attributes == NULL || pthread_attr_getstacksize(attributes, &stack) != 0 || stack < BYTES + 128 * 1024) is_short = 1;
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(RTLD_NEXT, "pthread_create");
    return real(thread, attributes, run, argument);
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    char path[4096];
    snprintf(path, sizeof path, "%s/go", arguments[1]);
    Id id = {{0}};
    void *comm;
    if (ncclCommInitRank(&comm, 4, id, 0) != 0) abort();
    while (access(path, F_OK) != 0) {
        if (cuLaunchKernel((void *)0x500000, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != 0) abort();
        if (ncclAllReduce(comm, comm, 8, 7, 0, comm, (void *)0x100) != 0) abort();
        usleep(1000);
    }
    variables[BYTES - 1] = is_short ? 8 : 7;
    return variables[BYTES - 1];
}
"#;

/// The C library takes them from the stack of each thread, also from the watcher's.
#[test]
fn thread_local_variables_of_any_size_leave_the_watcher_its_stack() {
    for bytes in ["1000", "200000", "1048576", "8000000"] {
        let job = Job::new();
        let collector = FakeCollector::listen(&job.dir.join("fake.sock"), ReadMode::Reads);
        idle_libraries(&job);
        let (folder, size) = (format!("-L{}", job.dir.display()), format!("-DBYTES={bytes}"));
        let link = ["-O2", &size, &folder, "-l:libcuda.so.1", "-l:libnccl.so.2", "-Wl,-rpath,$ORIGIN", "-pthread"];
        let link = [&link[..], &["-rdynamic", "-ldl"]].concat();
        let process = hooked_program(&job, "thread_local", THREAD_LOCAL, &link, |command| {
            command.arg(&job.dir);
        });
        assert_eq!(collector.wait_hello(), process.pid());
        fs::write(job.dir.join("go"), "").unwrap();
        let output = process.wait(PATIENCE);
        assert_eq!((output.code(), output.stderr.as_str()), (7, ""), "{bytes} bytes");
    }
}

/// Its first thread trains and ends before the process does. With `exit`, it ends by pthread_exit,
/// while another thread trains. With `raw`, it ends by the bare system call, with status 5.
const LAST_THREAD: &str = r#"
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct { char internal[128]; } Id;
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclCommInitRank(void **, int, Id, int);

static void *comm;

static void *train(void *unused) {
    for (int index = 0; index < 300; index++) {
        if (cuLaunchKernel((void *)0x500000, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != 0) abort();
        if (ncclAllReduce(comm, comm, 8, 7, 0, comm, (void *)0x100) != 0) abort();
        usleep(1000);
    }
    return unused;
}

static void say(void) {
    if (write(1, "ended\n", 6) != 6) abort();
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    Id id = {{0}};
    if (ncclCommInitRank(&comm, 4, id, 0) != 0) abort();
    atexit(say);
    train(NULL);
    if (strcmp(arguments[1], "raw") == 0) syscall(SYS_exit, 5);
    pthread_t thread;
    if (pthread_create(&thread, NULL, train, NULL) != 0) abort();
    pthread_exit(NULL);
}
"#;

/// A program whose first thread has ended ends with its last thread, and the watcher is none of its
/// threads.
#[test]
fn the_watcher_does_not_outlive_the_programs_last_thread() {
    for (how, ended) in [("exit", (0, "ended\n")), ("raw", (5, ""))] {
        let job = Job::new();
        let collector = FakeCollector::listen(&job.dir.join("fake.sock"), ReadMode::Reads);
        let process = idle_device(&job, "last_thread", LAST_THREAD, |command| {
            command.arg(how);
        });
        assert_eq!(collector.wait_hello(), process.pid());
        let output = process.wait(PATIENCE);
        assert_eq!(((output.code(), output.stdout.as_str()), output.stderr.as_str()), (ended, ""), "{how}");
    }
}

/// A program that puts a filter of system calls on itself.
const FILTERS: &str = include_str!("filters.c");

/// Makes the libraries of `filters.c`, and returns the options of its linker.
fn libraries(job: &Job) -> Vec<String> {
    idle_libraries(job);
    idle_library(&job.dir, "libmpi.so.40", "-DMPI");
    let folder = format!("-L{}", job.dir.display());
    let link =
        ["-O2", &folder, "-l:libcuda.so.1", "-l:libnccl.so.2", "-l:libmpi.so.40", "-Wl,-rpath,$ORIGIN", "-pthread"];
    link.map(String::from).to_vec()
}

fn assert_continued(how: &str, action: &str, output: &Output) {
    let ended = (output.status.code(), output.status.signal());
    assert_eq!(
        (ended, output.stdout.as_str(), output.stderr.as_str()),
        ((Some(7), None), "went on\n", ""),
        "{how} {action}"
    );
}

/// `filters.c` under the hook.
fn shut_in(job: &Job, change: impl FnOnce(&mut Command)) -> Process {
    let link = libraries(job);
    let link: Vec<&str> = link.iter().map(String::as_str).collect();
    hooked_program(job, "filters", FILTERS, &link, change)
}

/// `filters.c` under the hook, and its collector.
fn start_filters(job: &Job, how: &str, action: &str) -> (FakeCollector, Process) {
    let collector = FakeCollector::listen(&job.dir.join("fake.sock"), ReadMode::Reads);
    let process = shut_in(job, |command| {
        command.arg(how).arg(action).arg(&job.dir);
    });
    (collector, process)
}

fn threads(pid: i32) -> usize {
    fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

/// All cases at once, because each takes some seconds of its own.
#[test]
fn a_program_that_installs_a_filter_continues() {
    let cases = ["prctl", "seccomp", "tsync", "handle"]
        .into_iter()
        .flat_map(|how| ["kill", "trap", "errno"].map(|action| (how, action)));
    let cases = cases.chain([("strict", "kill")]);
    let started: Vec<_> = cases
        .map(|(how, action)| {
            let job = Job::new();
            let (collector, process) = start_filters(&job, how, action);
            assert_eq!(collector.wait_hello(), process.pid());
            wait_until(PATIENCE, "its watcher", || threads(process.pid()) == 2);
            fs::write(job.dir.join("go"), "").unwrap();
            (how, action, job, collector, process)
        })
        .collect();
    for (how, action, _job, collector, process) in started {
        let pid = process.pid();
        if how == "tsync" {
            wait_until(PATIENCE, "its watcher is gone", || threads(pid) < 2);
        }
        assert_continued(how, action, &process.wait(PATIENCE));
        let record = collector.ring(pid);
        assert_eq!((record.kernels_launched, record.collectives_launched), (30_010, 30_010), "{how} {action}");
        assert_eq!(record.health.unwrap().panics, 0);
        let words = collector.header(pid);
        let seen = if how == "tsync" { filtered::PROGRAM | filtered::WATCHER } else { filtered::PROGRAM };
        // The strict mode leaves no way to end but the bare system call.
        let goodbye = u64::from(how != "strict");
        assert_eq!((words[header::FILTERS_SEEN], words[header::GOODBYE]), (u64::from(seen), goodbye), "{how} {action}");
    }
}

/// Under a filter that forbids `futex`, a thread must not wait for a lock. The first call of a
/// function of the program, after the filter, takes that of the linker.
#[test]
fn a_filter_waits_for_the_linkers_lock_which_the_watcher_holds() {
    let job = Job::new();
    fs::write(job.dir.join("go"), "").unwrap();
    let _collector = FakeCollector::listen(&job.dir.join("fake.sock"), ReadMode::Reads);
    let process = shut_in(&job, |command| {
        idle_library(&job.dir, "libnccl.so.2", "-DSLOW_COLLECTIVES");
        command.arg("locks").arg("trap").arg(&job.dir);
    });
    assert_continued("locks", "trap", &process.wait(PATIENCE));
}

#[test]
fn a_program_with_a_filter_before_its_first_launch_is_not_recorded() {
    for action in ["kill", "trap", "errno"] {
        let job = Job::new();
        let (collector, process) = start_filters(&job, "early", action);
        assert_continued("early", action, &process.wait(PATIENCE));
        assert_eq!(collector.hellos().len(), 0);
    }
}

/// The filters of a program are those of the one that it executes, which cannot ask what they
/// forbid.
#[test]
fn a_program_that_inherits_a_filter_at_exec_is_not_recorded() {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    for action in ["kill", "trap", "errno"] {
        let job = Job::new();
        let collector = FakeCollector::listen(&job.dir.join("fake.sock"), ReadMode::Reads);
        let process = shut_in(&job, |command| {
            let launched = format!("{}:{}", own_filters(), boot.trim());
            command.env("XPU_TIMER_FILTERS", launched).env("XPU_TIMER_COLLECTOR_PID", std::process::id().to_string());
            command.arg("exec").arg(action).arg(&job.dir);
        });
        assert_continued("exec", action, &process.wait(PATIENCE));
        assert_eq!(collector.hellos().len(), 0, "{action}");
    }
}

fn own_filters() -> u32 {
    ring::filters(&fs::read("/proc/self/status").unwrap())
}

#[test]
fn a_filter_that_the_system_refuses_changes_nothing() {
    let job = Job::new();
    let (collector, process) = start_filters(&job, "refused", "kill");
    let pid = collector.wait_hello();
    fs::write(job.dir.join("go"), "").unwrap();
    assert_continued("refused", "kill", &process.wait(PATIENCE));
    wait_until(PATIENCE, "it says goodbye", || collector.goodbyes().contains(&pid));
    let record = collector.ring(pid);
    // The message that it polls for never comes.
    let pending = record.operations.iter().filter(|one| one.completed_ns == 0 && one.op() != Op::Recv);
    let pending: Vec<_> = pending.collect();
    assert!(pending.is_empty(), "the watcher goes on: {pending:?}");
    assert_eq!(record.collectives_launched, 30_010);
    assert_eq!(collector.header(pid)[header::FILTERS_SEEN], 0);
}

/// The header of the ring of a process.
fn ring_header(pid: i32) -> [u64; header::WORDS] {
    let is_ring = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|file| file.to_string_lossy().starts_with("/memfd:xpu_timer_ring"))
    };
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let ring = descriptors.map(|entry| entry.path()).find(is_ring).expect("its ring");
    let ring = fs::File::open(ring).unwrap();
    ring::read_header(|at, buffer| ring.read_exact_at(buffer, at)).expect("a ring of this version")
}

/// Waits until a whole turn of the watcher lies after a moment at which the collector had looked at
/// the ring. In its steady state, a job then makes no system call for the hook but that in which
/// the watcher sleeps. A thread that launches in a burst makes one when it overtakes the watcher.
fn wait_for_steady_state(header: impl Fn() -> [u64; header::WORDS]) {
    wait_until(PATIENCE, "the collector has looked", || header()[header::COLLECTOR_NS] != 0);
    for _ in 0..2 {
        let before = header()[header::HEARTBEAT_NS];
        wait_until(PATIENCE, "the watcher begins a turn", || header()[header::HEARTBEAT_NS] != before);
    }
}

/// The collector that is played here keeps from the hook that there is a filter.
#[test]
fn a_job_in_its_steady_state_makes_no_call_that_a_filter_may_forbid() {
    let job = Job::new();
    let (collector, mut process) = start_filters(&job, "inline-tsync", "kill");
    let pid = collector.wait_hello();
    let look = || {
        let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap();
        collector.write_header(pid, header::COLLECTOR_NS, std::time::Duration::from(now).as_nanos() as u64);
    };
    look();
    wait_for_steady_state(|| {
        look();
        collector.header(pid)
    });
    fs::write(job.dir.join("go"), "").unwrap();
    let begun = std::time::Instant::now();
    wait_until(PATIENCE, "some seconds", || {
        look();
        assert_eq!(process.try_wait(), None, "a call has ended it");
        begun.elapsed().as_secs() >= 3
    });
    collector.write_header(pid, header::FILTERED, u64::from(filtered::PROGRAM | filtered::WATCHER));
    has_seen(&job);
    assert_continued("inline-tsync", "kill", &process.wait(PATIENCE));
}

/// From here on, a burst makes no system call either.
fn has_seen(job: &Job) {
    let seen = fs::OpenOptions::new().write(true).open(job.dir.join("seen")).unwrap();
    seen.write_all_at(b"1", 0).unwrap();
}

/// Only the collector detects a filter that is installed without the C library, within a second.
#[test]
fn the_collector_sees_a_filter_that_the_hook_cannot_see() {
    let stops = "its hook stops reporting, so only its peers show a hang of this rank";
    for (how, action, words) in [
        ("inline", "kill", "its threads make no system call for the hook"),
        ("inline-tsync", "kill", stops),
        // The filter ends the watcher before the collector looks.
        ("inline-tsync", "kill-thread", stops),
    ] {
        let job = Job::new();
        let link = libraries(&job);
        let link: Vec<&str> = link.iter().map(String::as_str).collect();
        let program = compile_c(&job.dir, "filters", FILTERS, &link);
        let mut command = job.launch(program);
        command.arg(how).arg(action).arg(&job.dir).env("RANK", "0").env("WORLD_SIZE", "1");
        let mut process = Process::spawn(command.env_remove("LD_LIBRARY_PATH"));
        let logged = |text: &str| wait_until(PATIENCE, text, || job.logs().contains(text));
        logged("registered");
        wait_for_steady_state(|| ring_header(process.pid()));
        fs::write(job.dir.join("go"), "").unwrap();
        wait_until(PATIENCE, words, || {
            assert_eq!(process.try_wait(), None, "{how} {action}: it ended\n{}", job.logs());
            job.logs().contains(words)
        });
        has_seen(&job);
        assert_continued(how, action, &process.wait(PATIENCE));
        logged("sent Goodbye");
        assert!(!job.logs().contains("ended without Goodbye") && job.incidents().is_empty(), "{}", job.logs());
    }
}
