//! Groups, and the creation of communicators in them: unique ids, initialization, split, shrink and
//! grow. Calls between ncclGroupStart and ncclGroupEnd begin together at the outermost end.
//!
//! A call outside of a group is a separate group.

use std::{
    cell::RefCell,
    fs::File,
    io::Read,
    mem::ManuallyDrop,
    sync::{Arc, atomic::Ordering},
    thread,
};

use sim_abi::{
    cuda::StreamHandle,
    fault::{self, Kind},
    ffi::{In, Out},
    nccl::{CONFIG_MAGIC, CommHandle, Config, NcclError, SPLIT_NO_COLOR, UniqueId},
    trace,
};

use crate::{
    arena::{self, Aborted, MAX_RANKS},
    communicator::Communicator,
    driver::{cuda, current_context, driver},
    task::Task,
};

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

/// First bytes of every unique id. An invalid id is rejected, so that no rank waits for it.
const ID_MAGIC: &[u8; 16] = b"xpu_sim nccl id\0";

/// ncclGetUniqueId.
pub(crate) fn unique_id() -> Result<UniqueId, NcclError> {
    arena::sweep();
    let mut internal = [0; 128];
    internal[..16].copy_from_slice(ID_MAGIC);
    File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut internal[16..32])).map_err(|error| {
        trace::note(format_args!("/dev/urandom: {error}"));
        NcclError::SYSTEM
    })?;
    Ok(UniqueId { internal })
}

/// ncclCommInitRank and its variants.
pub(crate) fn init_rank(
    handle: Out<CommHandle>,
    ranks: i32,
    id: UniqueId,
    rank: i32,
    config: In<Config>,
) -> Result<(), NcclError> {
    let (rank, ranks) = place(rank, ranks)?;
    if handle.is_null() || !id.internal.starts_with(ID_MAGIC) {
        return Err(NcclError::INVALID_ARGUMENT);
    }
    let name = id.internal[16..32].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let communicator = create(blocking(config, true)?)?;
    let _ = communicator.place.set((rank, ranks));
    let skipped = fault::faults(false).value(Kind::InitSkip).is_some();
    let connecting = Arc::clone(&communicator);
    let run = move || if skipped { Ok(()) } else { connecting.connect(&name, rank, ranks) };
    submit(Job { communicator, parent: None, handle, run: Box::new(run) })
}

/// ncclCommSplit: all ranks of the parent meet, then the ranks of each color.
pub(crate) fn split(
    parent: CommHandle,
    color: i32,
    key: i32,
    handle: Out<CommHandle>,
    config: In<Config>,
) -> Result<(), NcclError> {
    let parent = Communicator::find_ready(parent)?;
    if handle.is_null() || color < SPLIT_NO_COLOR {
        return Err(NcclError::INVALID_ARGUMENT);
    }
    let communicator = create(blocking(config, parent.blocking)?)?;
    let count = parent.children.fetch_add(1, Ordering::Relaxed) + 1;
    let (child, meeting) = (Arc::clone(&communicator), Arc::clone(&parent));
    let run = move || {
        let Some(arena) = parent.arena() else { return Err(aborted(parent.wait_for_abort())) };
        let (own_color, own_key) = (color as u32 as u64, key as u32 as u64);
        let all = arena.exchange(count, [own_color, own_key], parent.aborted()).map_err(aborted)?;
        if color == SPLIT_NO_COLOR {
            child.forget();
            return Ok(());
        }
        let mut members: Vec<_> = (0..arena.ranks).filter(|rank| all[*rank][0] == own_color).collect();
        members.sort_by_key(|rank| (all[*rank][1] as u32 as i32, *rank));
        let rank = members.iter().position(|rank| *rank == arena.rank).ok_or(NcclError::INTERNAL)?;
        child.connect(&child_name(&parent, count, own_color), rank, members.len())
    };
    submit(Job { communicator, parent: Some(meeting), handle, run: Box::new(run) })
}

/// ncclCommShrink: the remaining ranks meet without the excluded ones, which do not call it.
pub(crate) fn shrink(
    parent: CommHandle,
    excluded: In<i32>,
    excluded_count: i32,
    handle: Out<CommHandle>,
    config: In<Config>,
    abort: bool,
) -> Result<(), NcclError> {
    let parent = Communicator::find_ready(parent)?;
    let (rank, ranks) = *parent.place.get().ok_or(NcclError::INVALID_ARGUMENT)?;
    let count = usize::try_from(excluded_count).map_err(|_| NcclError::INVALID_ARGUMENT)?;
    let excluded = (0..count).map(|index| excluded.at(index)).collect::<Result<Vec<_>, _>>()?;
    let stays = |rank: &usize| !excluded.contains(&(*rank as i32));
    if handle.is_null() || !stays(&rank) {
        return Err(NcclError::INVALID_ARGUMENT);
    }
    if abort {
        parent.abort();
    }
    let communicator = create(blocking(config, parent.blocking)?)?;
    let members: Vec<_> = (0..ranks).filter(stays).collect();
    let count = parent.children.fetch_add(1, Ordering::Relaxed) + 1;
    let child = Arc::clone(&communicator);
    let name = child_name(&parent, count, u64::MAX);
    let run = move || {
        let rank = members.iter().position(|member| *member == rank).ok_or(NcclError::INTERNAL)?;
        child.connect(&name, rank, members.len())
    };
    submit(Job { communicator, parent: Some(parent), handle, run: Box::new(run) })
}

/// ncclCommGetUniqueId: the id of the communicator's next ncclCommGrow. Each of its ranks computes
/// it.
pub(crate) fn grow_id(parent: CommHandle) -> Result<UniqueId, NcclError> {
    let parent = Communicator::find_ready(parent)?;
    Ok(id_of_child(&parent, parent.children.load(Ordering::Relaxed) + 1))
}

fn id_of_child(parent: &Communicator, count: u64) -> UniqueId {
    let name = child_name(parent, count, u64::MAX - 1);
    let mut internal = [0; 128];
    internal[..16].copy_from_slice(ID_MAGIC);
    for (place, start) in internal[16..32].chunks_exact_mut(8).zip([0xcbf2_9ce4_8422_2325u64, 0x9ae1_6a3b_2f90_404f]) {
        let hash = name.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        place.copy_from_slice(&hash.to_le_bytes());
    }
    UniqueId { internal }
}

/// ncclCommGrow: the ranks of a communicator keep their numbers, and new ranks join with the id,
/// without a communicator.
pub(crate) fn grow(
    parent: CommHandle,
    ranks: i32,
    id: In<UniqueId>,
    rank: i32,
    handle: Out<CommHandle>,
    config: In<Config>,
) -> Result<(), NcclError> {
    if parent == 0 {
        return init_rank(handle, ranks, id.get()?, rank, config);
    }
    let parent = Communicator::find_ready(parent)?;
    let (rank, before) = *parent.place.get().ok_or(NcclError::INVALID_ARGUMENT)?;
    if usize::try_from(ranks).map_or(true, |ranks| ranks <= before) {
        return Err(NcclError::INVALID_ARGUMENT);
    }
    let count = parent.children.fetch_add(1, Ordering::Relaxed) + 1;
    init_rank(handle, ranks, id_of_child(&parent, count), rank as i32, config)
}

fn aborted(_: Aborted) -> NcclError {
    NcclError::REMOTE
}

fn place(rank: i32, ranks: i32) -> Result<(usize, usize), NcclError> {
    let ranks = usize::try_from(ranks).map_err(|_| NcclError::INVALID_ARGUMENT)?;
    match usize::try_from(rank) {
        Ok(rank) if rank < ranks && ranks <= MAX_RANKS => Ok((rank, ranks)),
        _ => Err(NcclError::INVALID_ARGUMENT),
    }
}

fn create(blocking: bool) -> Result<Arc<Communicator>, NcclError> {
    let (driver, mut device) = (driver()?, 0);
    let context = current_context(driver)?;
    cuda((driver.context_device)(Out::to(&mut device)))?;
    Ok(Communicator::create(device, context, blocking))
}

/// Whether a configuration requests a blocking communicator; `default` if it does not set this.
fn blocking(config: In<Config>, default: bool) -> Result<bool, NcclError> {
    if config.is_null() {
        return Ok(default);
    }
    // The caller's structure may end with the first member that we know.
    if sim_abi::ffi::read::<u32>(config.address(), 2) != CONFIG_MAGIC {
        return Err(NcclError::INVALID_ARGUMENT);
    }
    match sim_abi::ffi::read::<i32>(config.address(), 4) {
        0 => Ok(false),
        1 => Ok(true),
        i32::MIN => Ok(default),
        _ => Err(NcclError::INVALID_ARGUMENT),
    }
}

/// A name that is equal on all ranks of a child, and differs from those of other communicators.
fn child_name(parent: &Communicator, count: u64, color: u64) -> String {
    format!("{}-{count:x}.{color:x}", parent.name.get().map_or("", String::as_str))
}
