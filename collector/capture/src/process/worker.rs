//! One short-lived OS thread for each captured process.
//!
//! Some files of `/proc` wait for a lock of the process that they describe, and no timeout helps
//! there. So every process has a thread of its own. A thread that the kernel blocks beyond the
//! deadline is abandoned: it ends when the kernel lets it. Its end also releases every thread that
//! it still traces.
//!
//! A thread may also be late because the machine is busy. This does not depend on the captured
//! process, so the thread gets more time.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, OnceLock, mpsc},
    time::{Duration, Instant},
};

use xpu_timer_proto::procfs::{self, Schedstat, state_text};

use crate::{native::ptrace, objects::Images, pool};

use super::{
    Job, RawProcess,
    capture::{capture, unix_ns},
    extension,
};

/// Maximum number of threads that work at the same time. Each holds copies of its process's memory.
const MAX_THREADS: usize = 16;
/// Threads that work at the same time for each CPU: one may wait for the kernel while another
/// computes.
const THREADS_PER_CPU: usize = 2;
/// A thread that has not answered for this long no longer counts as busy, so that stuck threads do
/// not delay other processes.
const STUCK_AFTER: Duration = Duration::from_millis(500);

/// Time between two checks of late threads.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// A thread that works on a job.
struct Worker {
    index: usize,
    since: Instant,
    /// Its thread id, once it has started to run.
    tid: Arc<OnceLock<i32>>,
}

/// The scheduler's state of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SchedulerState {
    state: char,
    schedstat: Schedstat,
}

impl Worker {
    /// Reads the state. `None` if the thread has not started or has ended.
    fn scheduler_state(&self) -> Option<SchedulerState> {
        let tid = *self.tid.get()?;
        let pid = std::process::id() as i32;
        let state = procfs::thread_stat(pid, tid)?.state;
        Some(SchedulerState { state, schedstat: procfs::schedstat(pid, tid).unwrap_or_default() })
    }

    /// Why the thread has not answered, as text for the report of its process.
    fn explain_delay(&self) -> String {
        let schedstat = self.scheduler_state().map(|state| state.schedstat).unwrap_or_default();
        format!(
            "no answer within {:.1} s: the machine is busy (the capture ran for {} ms and waited {} ms for a processor)",
            self.since.elapsed().as_secs_f64(),
            schedstat.cpu_ns / 1_000_000,
            schedstat.waited_ns / 1_000_000
        )
    }
}

/// Whether the kernel blocks a thread: it neither ran nor is runnable. A thread that has not
/// started waits for a CPU.
fn is_blocked_by_kernel(before: Option<&SchedulerState>, after: Option<&SchedulerState>) -> bool {
    after.is_some_and(|after| after.state != 'R' && before == Some(after))
}

/// Captures each process and returns the results in the same order. If the machine is busy, late
/// threads get more time, up to the [`extension`] of `time_limit` beyond the deadline.
pub(crate) fn run(jobs: Vec<Job>, images: &Arc<Images>, deadline: Instant, time_limit: Duration) -> Vec<RawProcess> {
    let last = deadline + extension(time_limit);
    let mut limit = deadline;
    // The states of the late threads at the last check.
    let mut last_states: Vec<(usize, Option<SchedulerState>)> = Vec::new();
    let pids: Vec<i32> = jobs.iter().map(|job| job.pid).collect();
    let mut answers: Vec<Option<RawProcess>> = pids.iter().map(|_| None).collect();
    let mut waiting: VecDeque<(usize, Job)> = jobs.into_iter().enumerate().collect();
    let mut started: Vec<Worker> = Vec::new();
    let (sender, receiver) = mpsc::channel();
    let parallel = (pool::cpus() * THREADS_PER_CPU).min(MAX_THREADS);
    loop {
        started.retain(|worker| answers[worker.index].is_none());
        let busy = started.iter().filter(|worker| worker.since.elapsed() < STUCK_AFTER).count();
        for _ in busy..parallel {
            let Some((index, mut job)) = waiting.pop_front() else { break };
            let pid = job.pid;
            job.deadline = job.deadline.max(limit);
            match spawn(index, job, images, &sender) {
                Ok(worker) => started.push(worker),
                Err(error) => {
                    answers[index] = Some(unanswered(pid, &format!("cannot start a thread to capture it: {error}")))
                }
            }
        }
        let now = Instant::now();
        if answers.iter().all(Option::is_some) || now >= last {
            break;
        }
        if now >= limit {
            let seen: Vec<(usize, Option<SchedulerState>)> =
                started.iter().map(|worker| (worker.index, worker.scheduler_state())).collect();
            let before = |index: usize| last_states.iter().find(|(other, _)| *other == index);
            // A thread without an earlier check is checked once more.
            let blocked = |(index, scheduler_state): &(usize, Option<SchedulerState>)| {
                before(*index)
                    .is_some_and(|(_, before)| is_blocked_by_kernel(before.as_ref(), scheduler_state.as_ref()))
            };
            if seen.iter().all(blocked) && waiting.is_empty() {
                break;
            }
            last_states = seen;
            limit = (now + CHECK_INTERVAL).min(last);
        }
        let time_limit = limit.saturating_duration_since(now);
        let time_limit = if waiting.is_empty() { time_limit } else { time_limit.min(STUCK_AFTER) };
        if let Ok((index, answer)) = receiver.recv_timeout(time_limit) {
            let index: usize = index;
            answers[index] = Some(answer);
        }
    }
    let late = |index: usize, pid: i32| {
        let worker = started.iter().find(|worker| worker.index == index);
        let before = last_states
            .iter()
            .find(|(other, _)| *other == index)
            .and_then(|(_, scheduler_state)| scheduler_state.as_ref());
        match worker {
            Some(worker) if is_blocked_by_kernel(before, worker.scheduler_state().as_ref()) => {
                unanswered(pid, "no answer by the deadline: the kernel holds a lock of this process")
            }
            Some(worker) => unanswered(pid, &worker.explain_delay()),
            None => unanswered(
                pid,
                "not captured: the machine is busy, and the captures of other processes took all the time",
            ),
        }
    };
    let answers = answers.into_iter().zip(pids).enumerate();
    answers.map(|(index, (answer, pid))| answer.unwrap_or_else(|| late(index, pid))).collect()
}

fn spawn(
    index: usize,
    job: Job,
    images: &Arc<Images>,
    sender: &mpsc::Sender<(usize, RawProcess)>,
) -> std::io::Result<Worker> {
    let sender = sender.clone();
    let images = Arc::clone(images);
    let tid = Arc::new(OnceLock::new());
    let own_tid = Arc::clone(&tid);
    let work = move || {
        let _ = own_tid.set(nix::unistd::gettid().as_raw());
        ptrace::use_precise_sleep();
        let pid = job.pid;
        let answer = catch_unwind(AssertUnwindSafe(|| capture(job, &images)));
        let answer =
            answer.unwrap_or_else(|_| unanswered(pid, "the capture failed with a defect of its own; see the log"));
        // After the deadline nobody receives the answer.
        let _ = sender.send((index, answer));
    };
    std::thread::Builder::new().name("xpu_capture".into()).spawn(work)?;
    Ok(Worker { index, since: Instant::now(), tid })
}

/// The result for a process if only its state is known.
fn unanswered(pid: i32, reason: &str) -> RawProcess {
    let mut process = RawProcess { pid, ..RawProcess::default() };
    // Reading this file takes no lock of the process.
    match procfs::stat(pid) {
        Ok(stat) => {
            process.parent_pid = stat.parent;
            process.command = format!("[{}]", stat.name);
            process.sample.process_state = state_text(stat.state);
            process.sample.cpu_time_ns = procfs::ticks_to_ns(stat.cpu_ticks);
        }
        Err(_) => process.sample.process_state = state_text('X'),
    }
    process.sample.errors.push(reason.to_string());
    process.sample.captured_unix_ns = unix_ns();
    process
}

#[cfg(test)]
mod tests {
    use crate::{kernel::Tables, process::Options};

    use super::*;

    #[test]
    fn runnable_or_unstarted_threads_are_not_blocked() {
        let scheduler_state =
            |state, runs| SchedulerState { state, schedstat: Schedstat { cpu_ns: 5, waited_ns: 6, runs } };
        let asleep = scheduler_state('D', 7);
        assert!(is_blocked_by_kernel(Some(&asleep), Some(&asleep)));
        assert!(!is_blocked_by_kernel(Some(&scheduler_state('D', 6)), Some(&asleep)), "it ran in between");
        assert!(
            !is_blocked_by_kernel(Some(&scheduler_state('R', 7)), Some(&scheduler_state('R', 7))),
            "it waits for a processor"
        );
        assert!(!is_blocked_by_kernel(None, Some(&asleep)), "only one look");
        assert!(!is_blocked_by_kernel(None, None), "it has not begun");
    }

    #[test]
    fn reads_the_scheduler_state_of_a_thread() {
        let worker = |tid: i32| Worker { index: 0, since: Instant::now(), tid: Arc::new(OnceLock::from(tid)) };
        assert_eq!(worker(nix::unistd::gettid().as_raw()).scheduler_state().unwrap().state, 'R');
        let (sender, receiver) = mpsc::channel();
        let (_keep, until) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            let _ = sender.send(nix::unistd::gettid().as_raw());
            let _ = until.recv();
        });
        let sleeper = worker(receiver.recv().unwrap());
        while sleeper.scheduler_state().unwrap().state != 'S' {
            std::thread::yield_now();
        }
        let scheduler_state = sleeper.scheduler_state();
        assert!(is_blocked_by_kernel(scheduler_state.as_ref(), sleeper.scheduler_state().as_ref()));
        assert!(sleeper.explain_delay().contains("the machine is busy"), "{}", sleeper.explain_delay());
    }

    #[test]
    fn causes_are_searched_for_only_on_request() {
        let pid = std::process::id() as i32;
        let deadline = Instant::now() + Duration::from_secs(60);
        let waits = |causes| {
            let options = Options { causes, ..Options::default() };
            let tables: Arc<Tables> = Arc::default();
            let job = Job { pid, options, deadline, tables: Arc::clone(&tables) };
            let process = run(vec![job], &Arc::default(), deadline, Duration::from_secs(60)).remove(0);
            assert!(!process.sample.stacktrace.is_empty(), "{:?}", process.sample.errors);
            let known = process.sample.stacktrace.iter().filter(|thread| thread.timed.is_some()).count();
            (known > 0, !process.sample.libraries.is_empty(), tables.open_files.is_read())
        };
        let (mut output, _input) = std::io::pipe().unwrap();
        std::thread::spawn(move || std::io::Read::read(&mut output, &mut [0]));
        assert_eq!(waits(false), (false, false, false));
        while waits(true) != (true, true, true) {
            assert!(Instant::now() < deadline, "a thread waits for a pipe, and the process has glibc");
        }
    }

    /// A deadline in the past has the effect of a machine on which the capture gets no CPU.
    #[test]
    fn late_threads_get_more_time_unless_blocked() {
        let pid = std::process::id() as i32;
        let images = Arc::<Images>::default();
        let options = Options { deadline: Duration::from_secs(5), ..Options::default() };
        let deadline = Instant::now();
        let jobs = (0..40).map(|_| Job { pid, options: options.clone(), deadline, tables: Arc::default() }).collect();
        let answers = run(jobs, &images, deadline, options.deadline);
        for answer in &answers {
            assert!(!answer.sample.stacktrace.is_empty(), "{:?}", answer.sample.errors);
        }
        // The extension is limited.
        let jobs = vec![Job { pid, options: options.clone(), deadline, tables: Arc::default() }];
        let answers = run(jobs, &images, deadline, Duration::ZERO);
        assert!(answers[0].sample.errors.iter().any(|error| error.contains("the machine is busy")));
    }
}
