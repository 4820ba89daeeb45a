//! Work that the kernel may hold: on threads of its own, which are left behind when they do not answer in time.
//!
//! Some files of `/proc` wait for a lock of the process they describe, and a page of a mapped file may lie on a file system
//! that hangs. No timeout reaches there. A thread that is left behind ends when the kernel lets it.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc},
    time::{Duration, Instant},
};

/// A thread that has been at one job for this long no longer counts as at work, so that stuck ones do not keep others waiting.
const SLOW: Duration = Duration::from_millis(500);

/// How the work is shared out.
pub(crate) struct Crew {
    /// Name of the threads.
    pub name: &'static str,
    /// Threads at work at the same time.
    pub parallel: usize,
    /// Jobs that one thread does, one after the other, before it ends.
    pub jobs_per_thread: usize,
}

type Queue<J> = Arc<Mutex<VecDeque<(usize, J)>>>;

enum News<A> {
    /// A thread, by its number, has begun another job or has no more to do.
    Begun(usize),
    Ended(usize),
    Answer(usize, A),
}

/// Does the jobs and hands over each answer, with the place of its job in the list, as it comes. It returns by the deadline;
/// jobs without an answer by then get none. An error means that no thread could be started.
pub(crate) fn run<J: Send + 'static, A: Send + 'static>(
    jobs: Vec<J>,
    crew: &Crew,
    deadline: Instant,
    work: impl Fn(J) -> A + Clone + Send + 'static,
    mut answer: impl FnMut(usize, A),
) -> std::io::Result<()> {
    let mut left = jobs.len();
    let queue: Queue<J> = Arc::new(Mutex::new(jobs.into_iter().enumerate().collect()));
    let (sender, receiver) = mpsc::channel();
    // For each thread, since when it has been at its job; `None` once it has ended.
    let mut threads: Vec<Option<Instant>> = Vec::new();
    while left > 0 {
        let busy = threads.iter().flatten().filter(|since| since.elapsed() < SLOW).count();
        let waiting = lock(&queue).len();
        for _ in 0..waiting.div_ceil(crew.jobs_per_thread).min(crew.parallel.saturating_sub(busy)) {
            let (number, queue, sender, work) = (threads.len(), Arc::clone(&queue), sender.clone(), work.clone());
            let jobs = crew.jobs_per_thread;
            let started = std::thread::Builder::new().name(crew.name.into()).spawn(move || {
                for done in 0..jobs {
                    let Some((index, job)) = lock(&queue).pop_front() else { break };
                    // Nobody listens after the deadline.
                    if done > 0 {
                        let _ = sender.send(News::Begun(number));
                    }
                    let _ = sender.send(News::Answer(index, work(job)));
                }
                let _ = sender.send(News::Ended(number));
            });
            match started {
                Ok(_) => threads.push(Some(Instant::now())),
                // Those that run do the rest.
                Err(_) if busy > 0 || threads.iter().any(Option::is_some) => break,
                Err(error) => return Err(error),
            }
        }
        let now = Instant::now();
        if now >= deadline {
            break;
        }
        let patience = (deadline - now).min(SLOW);
        match receiver.recv_timeout(patience) {
            Ok(News::Begun(number)) => threads[number] = Some(Instant::now()),
            Ok(News::Ended(number)) => threads[number] = None,
            Ok(News::Answer(index, found)) => {
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

/// Threads that it is worth to have at work for something that computes.
pub(crate) fn cpus() -> usize {
    // It reads the limits of control groups, file by file.
    static CPUS: OnceLock<usize> = OnceLock::new();
    *CPUS.get_or_init(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREW: Crew = Crew { name: "test", parallel: 2, jobs_per_thread: usize::MAX };

    #[test]
    fn every_job_is_answered_once() {
        for jobs_per_thread in [1, 3, usize::MAX] {
            let mut answers = vec![0; 100];
            let crew = Crew { jobs_per_thread, ..CREW };
            let deadline = Instant::now() + Duration::from_secs(60);
            run(
                (0..100).collect(),
                &crew,
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
    fn stuck_jobs_do_not_keep_the_others_waiting() {
        let (release, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let mut answered = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(5);
        // More jobs are stuck than threads work at a time.
        run(
            (0..10).collect(),
            &CREW,
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
