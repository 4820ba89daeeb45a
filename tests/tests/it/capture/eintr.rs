//! Calls that a stop would end with EINTR, which many programs do not expect. A capture must not
//! interrupt them.

use std::collections::HashMap;

use nix::sys::signal::Signal;
use xpu_timer_capture::{Capturer, Options};
use xpu_timer_proto::server::{CaptureMethod, ProcessSample};
use xpu_timer_tests::{PATIENCE, Process, compile_c, wait_until};

use super::{capture_until, capture_with, describe, has_run, start};

const CALLS: [&str; 9] =
    ["epoll_wait", "recv", "accept", "semop", "sigtimedwait", "nanosleep", "poll", "select", "futex"];
/// The kernel restarts the others by itself.
const INTERRUPTED_BY_A_STOP: [&str; 5] = ["epoll_wait", "recv", "accept", "semop", "sigtimedwait"];

/// Every thread in its call, down to the first function of the thread.
fn is_complete(sample: &ProcessSample) -> bool {
    CALLS.iter().all(|call| {
        let thread = sample.stacktrace.iter().find(|thread| thread.thread_name == **call);
        thread.is_some_and(|thread| {
            let last = thread.frames.last().map(|frame| frame.func_name.trim_start_matches('_').to_string());
            has_run(thread, &[&format!("in_{call}"), "run"])
                && thread.incomplete.is_empty()
                && last.is_some_and(|last| last.starts_with("clone"))
        })
    })
}

/// How often each call has ended with EINTR, as the program counts it.
fn counts(process: &mut Process, round: usize) -> HashMap<String, u32> {
    let counts = counted(process, round).into_iter();
    counts.map(|(call, count)| (call, count.parse().expect("a number"))).collect()
}

/// The program's counters, by the names of its calls.
fn counted(process: &mut Process, round: usize) -> HashMap<String, String> {
    process.signal(Signal::SIGUSR1);
    let head = format!("round {round}:");
    let find = |stdout: &str| -> Option<String> {
        let line = stdout.lines().find_map(|line| line.strip_prefix(&head))?;
        line.strip_suffix(" end").map(str::to_string)
    };
    wait_until(PATIENCE, "the program counts", || find(&process.stdout()).is_some());
    let line = find(&process.stdout()).expect("just seen");
    let counts = line.split_whitespace().filter_map(|word| word.split_once('='));
    counts.map(|(call, count)| (call.to_string(), count.to_string())).collect()
}

#[test]
fn no_call_is_interrupted() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let arguments = ["-O2", "-pthread", "-fomit-frame-pointer", "-fno-optimize-sibling-calls"];
    let program = compile_c(folder.path(), "program", PROGRAM, &arguments);
    let mut process = start(&program, &[]);
    let pid = process.pid();
    // The first captures may find threads that have not reached their calls yet.
    capture_until(pid, "all threads wait", is_complete);
    let before = counts(&mut process, 1);
    assert_eq!(before.len(), CALLS.len());
    let mut capturer = Capturer::new();
    for _ in 0..50 {
        let captured = capturer.capture(&[pid], &Options { deadline: PATIENCE, ..Options::default() }).remove(0);
        assert!(is_complete(&captured.sample), "{}", describe(&captured.sample));
        for thread in captured.sample.stacktrace.iter().filter(|thread| CALLS.contains(&&*thread.thread_name)) {
            assert_eq!(thread.capture(), CaptureMethod::ZeroStop, "{}", describe(&captured.sample));
        }
    }
    assert_eq!(counts(&mut process, 2), before, "50 captures were noticed");
    // The control: what is counted does happen when threads are stopped.
    let forced = capture_with(pid, &Options { deadline: PATIENCE, force_ptrace: true, ..Options::default() });
    assert!(is_complete(&forced.sample), "{}", describe(&forced.sample));
    let mut round = 2;
    wait_until(PATIENCE, "a stop shows as EINTR", || {
        round += 1;
        let now = counts(&mut process, round);
        INTERRUPTED_BY_A_STOP.iter().all(|call| now[*call] > before[*call])
    });
    // It takes its semaphore along.
    process.signal(Signal::SIGTERM);
    assert!(process.wait(PATIENCE).status.success());
}

/// For each call: how often it returned an unexpected result, and how often it returned.
fn odd(process: &mut Process, round: usize) -> HashMap<String, (u64, u64)> {
    let counts = counted(process, round);
    let number = |text: &str| text.parse().expect("a number");
    let counts = counts.into_iter().map(|(call, text)| {
        let (odd, turns) = text.split_once('/').expect("two numbers");
        (call, (number(odd), number(turns)))
    });
    counts.collect()
}

/// Calls that wait, wake and are entered again at any moment of a capture, while others compete for
/// the processors: `cargo xtask bench eintr` does the same 10,000 times.
#[test]
fn a_capture_changes_the_result_of_no_call() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = compile_c(folder.path(), "program", include_str!("calls.c"), &["-O1", "-pthread"]);
    let mut process = start(&program, &["2"]);
    let pid = process.pid();
    let mut capturer = Capturer::new();
    let options = Options { deadline: PATIENCE, ..Options::default() };
    let before = odd(&mut process, 1);
    assert!(before.len() > 25, "{before:?}");
    let start = std::time::Instant::now();
    let (mut captures, mut sampled, mut asleep) = (0, 0, 0);
    while captures < 300 && (captures < 5 || start.elapsed() < std::time::Duration::from_secs(4)) {
        let captured = capturer.capture(&[pid], &options).remove(0);
        assert_eq!(captured.sample.longest_stop_ns, 0);
        captures += 1;
        for thread in &captured.sample.stacktrace {
            sampled += usize::from(thread.capture() == CaptureMethod::PerfSample);
            asleep += usize::from(thread.capture() == CaptureMethod::ZeroStop);
        }
    }
    eprintln!("{captures} captures: {asleep} stacks of threads that slept, {sampled} of threads that ran");
    assert!(sampled >= captures && asleep > captures * 20, "{captures} {sampled} {asleep}");
    let after = odd(&mut process, 2);
    for (call, (odd, turns)) in &after {
        assert_eq!(*odd, 0, "{call} returned something odd in {captures} captures: {after:?}");
        let forever = ["pause", "sigsuspend"].contains(&&**call);
        assert!(forever || *turns > before[call].1, "{call} was entered again: {after:?}");
    }
    // The control: what is counted does happen when threads are stopped.
    let forced = Options { force_ptrace: true, ..options };
    let mut round = 2;
    wait_until(PATIENCE, "a stop shows", || {
        capturer.capture(&[pid], &forced);
        round += 1;
        odd(&mut process, round).values().any(|(odd, _)| *odd > 0)
    });
    process.signal(Signal::SIGTERM);
    assert!(process.wait(PATIENCE).status.success());
}

/// A thread that writes more than a pipe holds, below a frame that only its own register finds. On
/// SIGUSR1 the pipe is read to the end.
const SENDS: &str = r#"
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define LENGTH (1 << 20)

static int ends[2];
static ssize_t written;

__attribute__((noinline, noclone, optimize("no-omit-frame-pointer"))) static ssize_t in_write(size_t length) {
  char *bytes = __builtin_alloca(length);
  for (size_t at = 0; at < length; at++) bytes[at] = (char)at;
  ssize_t count = write(ends[1], bytes, length);
  return bytes[length / 2] == (char)(length / 2) ? count : -1;
}

static void *run(void *unused) {
  pthread_setname_np(pthread_self(), "writer");
  written = in_write(LENGTH);
  close(ends[1]);
  return unused;
}

int main(void) {
  static char read_back[LENGTH];
  pthread_t writer;
  sigset_t set;
  int number;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &set, NULL);
  if (pipe(ends) || pthread_create(&writer, NULL, run, NULL)) abort();
  puts("ready");
  fflush(stdout);
  sigwait(&set, &number);
  while (read(ends[0], read_back, sizeof read_back) > 0) continue;
  pthread_join(writer, NULL);
  printf("wrote %zd of %d\n", written, LENGTH);
  return 0;
}
"#;

#[test]
fn no_write_is_cut_short() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = compile_c(folder.path(), "program", SENDS, &["-O2", "-pthread"]);
    let process = start(&program, &[]);
    let options = Options { deadline: PATIENCE, force_ptrace: true, ..Options::default() };
    let writer = |sample: &ProcessSample| {
        sample
            .stacktrace
            .iter()
            .find(|thread| thread.thread_name == "writer" && thread.syscall == Some(libc::SYS_write))
            .cloned()
    };
    // A stop of a thread that runs may come after it has entered the write.
    let without_stop = Options { force_ptrace: false, ..options.clone() };
    wait_until(PATIENCE, "the writer waits", || writer(&capture_with(process.pid(), &without_stop).sample).is_some());
    for _ in 0..10 {
        let captured = capture_with(process.pid(), &options);
        let writer = writer(&captured.sample).unwrap_or_else(|| panic!("{}", describe(&captured.sample)));
        assert_eq!(writer.capture(), CaptureMethod::ZeroStop, "{}", describe(&captured.sample));
    }
    process.signal(Signal::SIGUSR1);
    let output = process.wait(PATIENCE);
    assert!(output.stdout.ends_with("wrote 1048576 of 1048576\n"), "{}", output.stdout);
}

/// Waits in each call on a thread of its own, and counts those that end with EINTR.
const PROGRAM: &str = r#"
/* Threads that wait in calls which a stop would end with EINTR. Each counts how often that
   happened; SIGUSR1 has the counts printed. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ipc.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NOINLINE __attribute__((noinline, noclone))
#define COUNT(call) while ((call) < 0 && errno == EINTR) __atomic_fetch_add(interrupted, 1, __ATOMIC_SEQ_CST)

static int semaphores;

NOINLINE static int in_epoll_wait(int *interrupted) {
  int epoll = epoll_create1(0);
  struct epoll_event event;
  COUNT(epoll_wait(epoll, &event, 1, 100000000));
  return errno;
}
NOINLINE static int in_recv(int *interrupted) {
  int pair[2];
  struct timeval timeout = {.tv_sec = 100000};
  char byte;
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) abort();
  setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  COUNT(recv(pair[0], &byte, 1, 0));
  return errno;
}
NOINLINE static int in_accept(int *interrupted) {
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  struct timeval timeout = {.tv_sec = 100000};
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  if (bind(listener, (void *)&address, sizeof address) || listen(listener, 1)) abort();
  COUNT(accept(listener, NULL, NULL));
  return errno;
}
NOINLINE static int in_semop(int *interrupted) {
  struct sembuf take = {.sem_op = -1};
  COUNT(semop(semaphores, &take, 1));
  return errno;
}
NOINLINE static int in_sigtimedwait(int *interrupted) {
  struct timespec timeout = {.tv_sec = 100000};
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR2);
  COUNT(sigtimedwait(&set, NULL, &timeout));
  return errno;
}
NOINLINE static int in_nanosleep(int *interrupted) {
  struct timespec timeout = {.tv_sec = 100000};
  COUNT(nanosleep(&timeout, NULL));
  return errno;
}
NOINLINE static int in_poll(int *interrupted) {
  struct pollfd none = {.fd = -1};
  COUNT(poll(&none, 1, 100000000));
  return errno;
}
NOINLINE static int in_select(int *interrupted) {
  struct timeval timeout = {.tv_sec = 100000};
  COUNT(select(0, NULL, NULL, NULL, &timeout));
  return errno;
}
NOINLINE static int in_futex(int *interrupted) {
  static int word;
  struct timespec timeout = {.tv_sec = 100000};
  COUNT(syscall(SYS_futex, &word, FUTEX_WAIT, 0, &timeout, NULL, 0));
  return errno;
}

static struct {
  const char *name;
  int (*function)(int *);
  int interrupted;
} calls[] = {
    {"epoll_wait", in_epoll_wait}, {"recv", in_recv},         {"accept", in_accept},
    {"semop", in_semop},           {"sigtimedwait", in_sigtimedwait},
    {"nanosleep", in_nanosleep},   {"poll", in_poll},         {"select", in_select},
    {"futex", in_futex},
};
enum { CALLS = sizeof calls / sizeof *calls };

/* Set before the semaphore goes, whose waiter would otherwise end the program first. */
static atomic_int ending;

static void *run(void *index) {
  long call = (long)index;
  prctl(PR_SET_NAME, calls[call].name);
  int error = calls[call].function(&calls[call].interrupted);
  while (ending) pause();
  fprintf(stderr, "%s ended with %s\n", calls[call].name, strerror(error));
  exit(1);
}

int main(void) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  semaphores = semget(IPC_PRIVATE, 1, 0600);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  sigaddset(&set, SIGUSR2);
  sigaddset(&set, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &set, NULL);
  for (long call = 0; call < CALLS; call++) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, (void *)call)) abort();
  }
  printf("ready\n");
  fflush(stdout);
  sigdelset(&set, SIGUSR2);
  for (int round = 1;; round++) {
    int signal = 0;
    sigwait(&set, &signal);
    if (signal == SIGTERM) {
      ending = 1;
      semctl(semaphores, 0, IPC_RMID);
      _exit(0);
    }
    printf("round %d:", round);
    for (int call = 0; call < CALLS; call++)
      printf(" %s=%d", calls[call].name, __atomic_load_n(&calls[call].interrupted, __ATOMIC_SEQ_CST));
    printf(" end\n");
    fflush(stdout);
  }
}
"#;
