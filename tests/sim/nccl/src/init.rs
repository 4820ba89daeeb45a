//! Creates communicators: unique ids, initialization, split, shrink and grow.

use std::{
    fs::File,
    io::Read,
    sync::{Arc, atomic::Ordering},
};

use sim_abi::{
    fault::{self, Kind},
    ffi::{In, Out},
    nccl::{CONFIG_MAGIC, CommHandle, Config, NcclError, SPLIT_NO_COLOR, UniqueId},
    trace,
};

use crate::{
    arena::{self, Aborted, MAX_RANKS},
    communicator::Communicator,
    driver::{cuda, current_context, driver},
    group::{self, Job},
};

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
    group::submit(Job { communicator, parent: None, handle, run: Box::new(run) })
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
    group::submit(Job { communicator, parent: Some(meeting), handle, run: Box::new(run) })
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
    group::submit(Job { communicator, parent: Some(parent), handle, run: Box::new(run) })
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
