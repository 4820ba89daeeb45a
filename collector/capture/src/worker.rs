//! One short-lived OS thread for each process that is captured.
//!
//! Some files of `/proc` wait for a lock of the process they describe, and no timeout reaches there. So every process has a
//! thread of its own, and one that does not answer by the deadline is left behind: it ends when the kernel lets it. The
//! end of the thread also frees whatever it may still trace.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use crate::{
    Options,
    images::Images,
    process::{self, RawProcess},
    procfs, ptrace,
};

/// Threads at work at the same time, at most. Each holds copies of its process's memory.
const PARALLEL: usize = 16;
/// Threads at work for each CPU: one may wait for the kernel while another computes.
const PER_CPU: usize = 2;
/// A thread that has not answered for this long no longer counts as at work, so that stuck ones do not keep others waiting.
const SLOW: Duration = Duration::from_millis(500);

pub(crate) struct Job {
    pub pid: i32,
    pub options: Options,
    pub deadline: Instant,
}

/// What is known of each process, in the same order.
pub(crate) fn run(jobs: Vec<Job>, images: &Arc<Images>, deadline: Instant) -> Vec<RawProcess> {
    let pids: Vec<i32> = jobs.iter().map(|job| job.pid).collect();
    let mut answers: Vec<Option<RawProcess>> = pids.iter().map(|_| None).collect();
    let mut waiting: VecDeque<(usize, Job)> = jobs.into_iter().enumerate().collect();
    let mut started: Vec<(usize, Instant)> = Vec::new();
    let (sender, receiver) = mpsc::channel();
    let parallel = std::thread::available_parallelism().map_or(PARALLEL, |cpus| (cpus.get() * PER_CPU).min(PARALLEL));
    loop {
        started.retain(|(index, _)| answers[*index].is_none());
        let busy = started.iter().filter(|(_, since)| since.elapsed() < SLOW).count();
        for _ in busy..parallel {
            let Some((index, job)) = waiting.pop_front() else { break };
            let pid = job.pid;
            match spawn(index, job, images, &sender) {
                Ok(()) => started.push((index, Instant::now())),
                Err(error) => answers[index] = Some(silent(pid, &format!("no thread to capture it with: {error}"))),
            }
        }
        let now = Instant::now();
        if answers.iter().all(Option::is_some) || now >= deadline {
            break;
        }
        let patience = deadline - now;
        let patience = if waiting.is_empty() { patience } else { patience.min(SLOW) };
        if let Ok((index, answer)) = receiver.recv_timeout(patience) {
            let index: usize = index;
            answers[index] = Some(answer);
        }
    }
    let late = |pid: i32| silent(pid, "no answer by the deadline: the kernel holds a lock of this process");
    answers.into_iter().zip(pids).map(|(answer, pid)| answer.unwrap_or_else(|| late(pid))).collect()
}

fn spawn(
    index: usize,
    job: Job,
    images: &Arc<Images>,
    sender: &mpsc::Sender<(usize, RawProcess)>,
) -> std::io::Result<()> {
    let sender = sender.clone();
    let images = Arc::clone(images);
    let work = move || {
        ptrace::sleep_exactly();
        let pid = job.pid;
        let answer = catch_unwind(AssertUnwindSafe(|| process::capture(job, &images)));
        let answer = answer.unwrap_or_else(|_| silent(pid, "a defect of the capture itself, see the log"));
        // Nobody listens after the deadline.
        let _ = sender.send((index, answer));
    };
    std::thread::Builder::new().name("xpu_capture".into()).spawn(work).map(drop)
}

/// The entry of a process that nothing but its state is known of.
fn silent(pid: i32, reason: &str) -> RawProcess {
    let mut process = RawProcess { pid, ..RawProcess::default() };
    // This file is made without any lock of the process.
    match procfs::stat(pid) {
        Ok(stat) => {
            process.parent_pid = stat.parent;
            process.command = format!("[{}]", stat.name);
            process.sample.process_state = process::state_text(stat.state);
            process.sample.cpu_time_ns = procfs::ticks_to_ns(stat.cpu_ticks);
        }
        Err(_) => process.sample.process_state = process::state_text('X'),
    }
    process.sample.errors.push(reason.to_string());
    process.sample.captured_unix_ns = process::unix_ns();
    process
}
