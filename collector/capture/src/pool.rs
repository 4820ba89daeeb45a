//! Threads for work that the kernel may block. A thread that does not answer in time is abandoned.
//!
//! Some files of `/proc` wait for a lock of the process that they describe, and a page of a mapped
//! file may be on a file system that hangs. No timeout helps there. An abandoned thread ends when
//! the kernel lets it.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc},
    time::{Duration, Instant},
};

/// A thread that has spent this long on one job no longer counts as busy, so that stuck threads do
/// not delay other jobs.
const STUCK_AFTER: Duration = Duration::from_millis(500);

/// How jobs are distributed over threads.
pub(crate) struct PoolConfig {
    /// Name of the threads.
    pub name: &'static str,
    /// Number of threads that work at the same time.
    pub parallel: usize,
    /// Number of jobs that one thread does before it ends.
    pub jobs_per_thread: usize,
}

type Queue<J> = Arc<Mutex<VecDeque<(usize, J)>>>;

enum Message<A> {
    /// The thread with this index has started another job.
    Started(usize),
    Ended(usize),
    Done(usize, A),
}

/// Runs the jobs and passes each result to `answer`, with the index of its job, as it arrives. The
/// call returns by the deadline. Jobs that are not done by then have no result.
///
/// # Errors
/// No thread could be started.
pub(crate) fn run<J: Send + 'static, A: Send + 'static>(
    jobs: Vec<J>,
    config: &PoolConfig,
    deadline: Instant,
    work: impl Fn(J) -> A + Clone + Send + 'static,
    mut answer: impl FnMut(usize, A),
) -> std::io::Result<()> {
    let mut left = jobs.len();
    let queue: Queue<J> = Arc::new(Mutex::new(jobs.into_iter().enumerate().collect()));
    let (sender, receiver) = mpsc::channel();
    // For each thread, when it started its current job; `None` once the thread has ended.
    let mut threads: Vec<Option<Instant>> = Vec::new();
    while left > 0 {
        let busy = threads.iter().flatten().filter(|since| since.elapsed() < STUCK_AFTER).count();
        let waiting = lock(&queue).len();
        for _ in 0..waiting.div_ceil(config.jobs_per_thread).min(config.parallel.saturating_sub(busy)) {
            let (number, queue, sender, work) = (threads.len(), Arc::clone(&queue), sender.clone(), work.clone());
            let jobs = config.jobs_per_thread;
            let started = std::thread::Builder::new().name(config.name.into()).spawn(move || {
                for done in 0..jobs {
                    let Some((index, job)) = lock(&queue).pop_front() else { break };
                    // After the deadline nobody receives the messages.
                    if done > 0 {
                        let _ = sender.send(Message::Started(number));
                    }
                    let _ = sender.send(Message::Done(index, work(job)));
                }
                let _ = sender.send(Message::Ended(number));
            });
            match started {
                Ok(_) => threads.push(Some(Instant::now())),
                // The running threads do the remaining jobs.
                Err(_) if busy > 0 || threads.iter().any(Option::is_some) => break,
                Err(error) => return Err(error),
            }
        }
        let now = Instant::now();
        if now >= deadline {
            break;
        }
        let patience = (deadline - now).min(STUCK_AFTER);
        match receiver.recv_timeout(patience) {
            Ok(Message::Started(number)) => threads[number] = Some(Instant::now()),
            Ok(Message::Ended(number)) => threads[number] = None,
            Ok(Message::Done(index, found)) => {
                left -= 1;
                answer(index, found);
            }
            Err(_) => {}
        }
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A sensible number of threads for work that computes.
pub(crate) fn cpus() -> usize {
    // The standard library reads the limits of control groups, file by file.
    static CPUS: OnceLock<usize> = OnceLock::new();
    *CPUS.get_or_init(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: PoolConfig = PoolConfig { name: "test", parallel: 2, jobs_per_thread: usize::MAX };

    #[test]
    fn every_job_is_answered_once() {
        for jobs_per_thread in [1, 3, usize::MAX] {
            let mut answers = vec![0; 100];
            let config = PoolConfig { jobs_per_thread, ..CONFIG };
            let deadline = Instant::now() + Duration::from_secs(60);
            run(
                (0..100).collect(),
                &config,
                deadline,
                |job: usize| job * 2,
                |index, answer| {
                    assert_eq!(answer, index * 2);
                    answers[index] += 1;
                },
            )
            .unwrap();
            assert!(answers.iter().all(|count| *count == 1));
        }
    }

    #[test]
    fn stuck_jobs_do_not_delay_others() {
        let (release, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let mut answered = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(5);
        // More jobs are stuck than there are threads.
        run(
            (0..10).collect(),
            &CONFIG,
            deadline,
            move |job: usize| {
                if job < 3 {
                    let _ = lock(&wait).recv();
                }
            },
            |index, ()| answered.push(index),
        )
        .unwrap();
        answered.sort_unstable();
        assert_eq!(answered, (3..10).collect::<Vec<_>>());
        assert!(Instant::now() >= deadline, "it waits for the stuck ones till the end");
        drop(release);
    }
}
