//! Groups: calls between ncclGroupStart and ncclGroupEnd begin together at the outermost end.
//!
//! A call outside of a group is a separate group.

use std::{cell::RefCell, mem::ManuallyDrop, sync::Arc, thread};

use sim_abi::{
    cuda::StreamHandle,
    ffi::Out,
    nccl::{CommHandle, NcclError},
};

use crate::{communicator::Communicator, task::Task};

/// A host job that meets other ranks and creates a communicator.
pub(crate) struct Job {
    pub(crate) communicator: Arc<Communicator>,
    /// The parent communicator, which is in progress until the end of the job.
    pub(crate) parent: Option<Arc<Communicator>>,
    /// The caller's pointer for the handle.
    pub(crate) handle: Out<CommHandle>,
    pub(crate) run: Box<dyn FnOnce() -> Result<(), NcclError> + Send>,
}

/// The tasks of one communicator for one stream.
type Batch = (Arc<Communicator>, StreamHandle, Vec<Task>);

#[derive(Default)]
struct Group {
    depth: u32,
    error: Option<NcclError>,
    jobs: Vec<Job>,
    batches: Vec<Batch>,
}

thread_local! {
    /// Never dropped: libraries make calls from their destructors, after the thread-local values of
    /// a thread have been dropped.
    static GROUP: RefCell<ManuallyDrop<Group>> = RefCell::default();
}

/// ncclGroupStart.
pub(crate) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// ncclGroupEnd.
pub(crate) fn end() -> Result<(), NcclError> {
    let ended = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Err(NcclError::INVALID_USAGE),
        1 => Ok(Some(std::mem::take(&mut **group))),
        _ => {
            group.depth -= 1;
            Ok(None)
        }
    })?;
    let Some(group) = ended else { return Ok(()) };
    if let Some(error) = group.error {
        group.jobs.iter().for_each(give_up);
        return Err(error);
    }
    let jobs = run_jobs(group.jobs);
    if jobs.is_err_and(|error| error != NcclError::IN_PROGRESS) {
        return jobs;
    }
    launch(group.batches).and(jobs)
}

/// ncclGroupSimulateEnd: ends the group without starting its calls.
pub(crate) fn forget() -> Result<(), NcclError> {
    GROUP.with_borrow_mut(|group| match group.depth {
        0 => Err(NcclError::INVALID_USAGE),
        1 => {
            std::mem::take(&mut **group).jobs.iter().for_each(give_up);
            Ok(())
        }
        _ => {
            group.depth -= 1;
            Ok(())
        }
    })
}

/// Records that a call inside a group failed: the group will not begin.
pub(crate) fn note_error(error: NcclError) {
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 && error != NcclError::IN_PROGRESS {
            group.error.get_or_insert(error);
        }
    });
}

/// Adds a task to the group, or runs it as a separate group.
pub(crate) fn add(communicator: Arc<Communicator>, stream: StreamHandle, task: Task) -> Result<(), NcclError> {
    let alone = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Some(vec![(communicator, stream, vec![task])]);
        }
        let same = |batch: &&mut Batch| Arc::ptr_eq(&batch.0, &communicator) && batch.1 == stream;
        match group.batches.iter_mut().find(same) {
            Some((.., tasks)) => tasks.push(task),
            None => group.batches.push((communicator, stream, vec![task])),
        }
        None
    });
    alone.map_or(Ok(()), launch)
}

/// Adds a job to the group, or runs it as a separate group.
pub(crate) fn submit(job: Job) -> Result<(), NcclError> {
    let alone = GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.jobs.push(job);
            return None;
        }
        Some(job)
    });
    match alone {
        // It runs on the caller's thread, which is then visibly blocked.
        Some(job) if job.communicator.blocking => finish(job.communicator, job.handle, (job.run)()),
        Some(job) => run_jobs(vec![job]),
        None => Ok(()),
    }
}

fn run_jobs(jobs: Vec<Job>) -> Result<(), NcclError> {
    let mut result = Ok(());
    let mut waiting = Vec::new();
    for Job { communicator, parent, handle, run } in jobs {
        let (blocking, worker) = (communicator.blocking, Arc::clone(&communicator));
        if !blocking {
            // The caller polls the parent, and gets the child when it exists. Without a parent, the
            // caller polls the communicator itself, and needs its handle at once.
            let _ = handle.set(if parent.is_some() { 0 } else { communicator.handle() });
            parent.iter().for_each(|parent| parent.set_result(Err(NcclError::IN_PROGRESS)));
        }
        let spawned = thread::Builder::new().name("sim-nccl-init".into()).spawn(move || {
            let result = run();
            match parent {
                _ if blocking => {}
                Some(parent) => {
                    let _ = finish(worker, handle, result);
                    parent.set_result(result);
                }
                None => worker.set_result(result),
            }
            result
        });
        match spawned {
            Ok(thread) if blocking => waiting.push((communicator, handle, thread)),
            Ok(_) => result = result.and(Err(NcclError::IN_PROGRESS)),
            Err(_) => result = finish(communicator, handle, Err(NcclError::SYSTEM)),
        }
    }
    for (communicator, handle, thread) in waiting {
        let ended = thread.join().unwrap_or(Err(NcclError::INTERNAL));
        result = finish(communicator, handle, ended).and(result);
    }
    result
}

/// Returns a blocking communicator to the caller, or destroys it.
fn finish(
    communicator: Arc<Communicator>,
    handle: Out<CommHandle>,
    result: Result<(), NcclError>,
) -> Result<(), NcclError> {
    communicator.set_result(result);
    if result.is_err() {
        communicator.forget();
    }
    // A rank without a color takes part in a split but gets no communicator.
    let known = Communicator::find(communicator.handle()).is_ok();
    let _ = handle.set(if known { communicator.handle() } else { 0 });
    result
}

fn give_up(job: &Job) {
    job.communicator.forget();
    let _ = job.handle.set(0);
}

/// One kernel for each batch. A nonblocking communicator launches in the background.
fn launch(batches: Vec<Batch>) -> Result<(), NcclError> {
    let (blocking, background): (Vec<_>, Vec<_>) =
        batches.into_iter().partition(|(communicator, ..)| communicator.blocking);
    for (communicator, stream, tasks) in blocking {
        communicator.launch(stream, &tasks)?;
    }
    if background.is_empty() {
        return Ok(());
    }
    background.iter().for_each(|(communicator, ..)| communicator.set_result(Err(NcclError::IN_PROGRESS)));
    let run = move || {
        for (communicator, stream, tasks) in background {
            communicator.set_result(communicator.launch(stream, &tasks));
        }
    };
    thread::Builder::new().name("sim-nccl-group".into()).spawn(run).map_err(|_| NcclError::SYSTEM)?;
    Err(NcclError::IN_PROGRESS)
}
