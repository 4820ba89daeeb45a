//! The object that a thread waits for without a descriptor: in `futex`, a mutex with its owner, or
//! a lock, semaphore or condition in memory that processes share; semaphores and message queues of
//! System V, for which the kernel names the process that used each last; and memory that it may
//! poll.

use std::{collections::BTreeSet, fs, time::Instant};

use xpu_timer_proto::{
    procfs::{self, Mapping, SharedObject},
    server::{Awaited, AwaitedKind, Holder},
};

use super::search::{MAX_HOLDERS, Search};
use crate::memory;

const PRIVATE: u64 = 128;
/// The bits of the operation without its flags.
const COMMAND: u64 = 127;
const WAIT: u64 = 0;
const LOCK_PI: u64 = 6;
const WAIT_BITSET: u64 = 9;
const LOCK_PI2: u64 = 13;
/// The bits of a robust or priority-inheriting lock that hold the thread id of its owner.
const TID_MASK: u32 = 0x3fff_ffff;
const WAITERS: u32 = 0x8000_0000;
/// The state of glibc's lock that is taken and has waiters.
const CONTENDED: u32 = 2;
/// Maximum number of processes whose mappings are read.
const MAX_PROCESSES: usize = 64;

pub(super) fn futex(search: &Search<'_>, address: u64, operation: u64) -> Option<Awaited> {
    let command = operation & COMMAND;
    if ![WAIT, LOCK_PI, WAIT_BITSET, LOCK_PI2].contains(&command) {
        return None;
    }
    // Futexes of containers use the thread ids of their namespace.
    let owner = owner(search.pid, address, command).filter(|_| in_own_namespace(search.pid));
    if operation & PRIVATE != 0 {
        return of_process(search.pid, owner?);
    }
    let object = shared_object(search.pid, address)?;
    let name = object.path.trim_end_matches(" (deleted)").to_owned();
    let kind = AwaitedKind::SharedMemory.into();
    let id = format!("{:x}:{:x}:{}+{:x}", object.device.0, object.device.1, object.inode, object.offset);
    let holders = match owner.and_then(procfs::pid_of_thread) {
        Some(owner) => search.holders([owner]),
        None => search.holders(sharers(search, &object)),
    };
    Some(Awaited { kind, name, holders, object: id })
}

/// A lock of the process's own threads. The holder is the thread, or nobody if the thread does not
/// exist here: a forked process inherits locks that threads of its parent hold.
fn of_process(pid: i32, owner: i32) -> Option<Awaited> {
    let kind = AwaitedKind::Mutex.into();
    let is_own = procfs::thread_stat(pid, owner).is_some();
    let name = procfs::thread_stat(pid, owner).map(|stat| stat.name).unwrap_or_default();
    let holders =
        if is_own { vec![Holder { pid, name: name.clone(), child: false, ..Holder::default() }] } else { Vec::new() };
    Some(Awaited { kind, name, holders, object: owner.to_string() })
}

/// The thread that owns the lock at an address, if the lock is a mutex of glibc: its state, a
/// count, the owner, and the number of users. The state of a robust or priority-inheriting mutex is
/// the owner. Other locks may look like that, so the reader must know that the thread is in a
/// function for mutexes.
fn owner(pid: i32, address: u64, command: u64) -> Option<i32> {
    let bytes = memory::read_exact(pid, address, 16).ok()?;
    let word = |at: usize| bytes[at..at + 4].try_into().map(u32::from_ne_bytes).unwrap_or(0);
    let state = word(0);
    let tid = match state {
        _ if [LOCK_PI, LOCK_PI2].contains(&command) || state & WAITERS != 0 => state & TID_MASK,
        // Users of the mutex: its owner.
        CONTENDED if word(12) == 1 => word(8),
        _ => 0,
    };
    i32::try_from(tid).ok().filter(|tid| *tid > 0)
}

fn in_own_namespace(pid: i32) -> bool {
    let status = procfs::status_text(pid).unwrap_or_default();
    procfs::field(&status, "NSpid:").is_none_or(|pids| !pids.contains('\t'))
}

/// The mapping at an address, with the offset of the address within its file.
fn shared_object(pid: i32, address: u64) -> Option<Mapping> {
    let mapping = procfs::maps(pid, pid).ok()?.into_iter().find(|one| (one.start..one.end).contains(&address))?;
    let offset = mapping.offset + (address - mapping.start);
    (mapping.inode != 0).then_some(Mapping { offset, ..mapping })
}

/// The relatives of the process that have mapped the same object.
fn sharers(search: &Search<'_>, object: &Mapping) -> Vec<i32> {
    let relatives = search.family().take(MAX_PROCESSES);
    let is_same = |one: &Mapping| (one.device, one.inode) == (object.device, object.inode);
    let has_it = |pid: &i32| {
        Instant::now() < search.deadline && procfs::maps(*pid, *pid).is_ok_and(|maps| maps.iter().any(is_same))
    };
    relatives.filter(has_it).collect()
}

/// Beginnings of the names of memory that nobody polls while it waits for another process outside
/// of a collective: of semaphores, tensors and object stores, of device drivers, of libraries of
/// collectives, and of the hook.
const NOT_POLLED: [&str; 22] = [
    "sem.",
    "torch_",
    "plasma",
    "cuda.shm.",
    "nccl-",
    "rccl-",
    "xpu-sim-nccl-",
    "nvshmem",
    "ucx_shm",
    "vader_segment",
    "sm_segment",
    "smdataseg",
    "smlockseg",
    "initial-pmix",
    "dstore_",
    "pmix",
    "psm2_",
    "mpich_shar_tmp",
    "Intel_MPI",
    "shm-impi",
    "ompi",
    "memfd:xpu_timer",
];

/// The processes of its family with which a process has memory in common that it may poll. None if
/// there are more than a result has room for: such memory says nothing about a single process.
pub(super) fn sharers_of_memory(search: &Search<'_>) -> Vec<Holder> {
    let objects = |pid: i32| search.tables.shared_memory.of(pid, search.deadline, polled_objects).unwrap_or_default();
    let own = objects(search.pid);
    if own.is_empty() {
        return Vec::new();
    }
    let is_sharer = |pid: &i32| !own.is_disjoint(&objects(*pid));
    let sharers: Vec<i32> = search.family().take(MAX_PROCESSES).filter(is_sharer).collect();
    if sharers.len() > MAX_HOLDERS { Vec::new() } else { search.holders(sharers) }
}

/// The objects of these mappings that a process may poll.
fn polled_objects(mappings: &[Mapping]) -> BTreeSet<SharedObject> {
    let name = |mapping: &Mapping| mapping.path.rsplit('/').next().unwrap_or_default().to_owned();
    let is_polled = |mapping: &&Mapping| !NOT_POLLED.iter().any(|start| name(mapping).starts_with(start));
    mappings.iter().filter(is_polled).map(Mapping::object).collect()
}

/// The object that `semop` waits for. The process that changed the semaphore last has taken it.
#[allow(unsafe_code)]
pub(super) fn semaphore(search: &Search<'_>, set: u64, operations: u64) -> Option<Awaited> {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/ipc")).ok();
    if namespace("self")? != namespace(&search.pid.to_string())? {
        return None;
    }
    // `struct sembuf` begins with the number of the semaphore.
    let number = u16::from_ne_bytes(memory::read_exact(search.pid, operations, 2).ok()?.try_into().ok()?);
    // SAFETY: GETPID takes no fourth argument, and reads only kernel memory.
    let last = unsafe { libc::semctl(set as i32, i32::from(number), libc::GETPID) };
    let holders = search.holders((last > 0 && last != search.pid).then_some(last));
    let object = format!("semaphore {number} of set {set}");
    Some(Awaited { kind: AwaitedKind::Semaphore.into(), name: String::new(), holders, object })
}

/// The object that `msgrcv` or `msgsnd` waits for. Its holder is the process that sent to the queue
/// last, or the one that received from it last.
pub(super) fn message_queue(search: &Search<'_>, id: u64, receives: bool) -> Option<Awaited> {
    // key msqid perms cbytes qnum lspid lrpid …
    let table = fs::read_to_string("/proc/sysvipc/msg").ok()?;
    let wanted = (id as i32).to_string();
    let line = table.lines().find(|line| line.split_whitespace().nth(1) == Some(&*wanted))?;
    let last: i32 = line.split_whitespace().nth(if receives { 5 } else { 6 })?.parse().ok()?;
    let holders = search.holders((last > 0 && last != search.pid).then_some(last));
    let object = format!("message queue {wanted}");
    Some(Awaited { kind: AwaitedKind::MessageQueue.into(), name: String::new(), holders, object })
}

#[cfg(test)]
mod tests {
    use std::{num::NonZeroUsize, time::Duration};

    use nix::{
        sys::{
            memfd::{MFdFlags, memfd_create},
            mman::{MapFlags, ProtFlags, mmap, munmap},
            signal::{Signal, kill},
            wait::waitpid,
        },
        unistd::{ForkResult, fork, ftruncate},
    };

    use super::*;
    use crate::kernel::Tables;

    #[test]
    fn memory_of_libraries_and_semaphores_is_not_polled() {
        let mapping = |inode: u64, path: &str| Mapping {
            start: 0,
            end: 4096,
            offset: 0,
            executable: false,
            readable: true,
            device: (0, 1),
            inode,
            path: path.into(),
        };
        let mappings = [mapping(1, "/dev/shm/ring"), mapping(2, "/dev/shm/sem.mp-1"), mapping(3, "/dev/shm/torch_4_5")];
        let polled = polled_objects(&mappings);
        assert_eq!(polled, BTreeSet::from([mappings[0].object()]));
    }

    #[test]
    #[allow(unsafe_code)]
    fn finds_who_shares_memory_and_reads_each_process_once() {
        let file = memfd_create(c"ring", MFdFlags::empty()).unwrap();
        ftruncate(&file, 4096).unwrap();
        let size = NonZeroUsize::new(4096).unwrap();
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, which nobody else uses.
        let ring = unsafe { mmap(None, size, access, MapFlags::MAP_SHARED, &file, 0) }.unwrap();
        // SAFETY: the child calls only `pause`.
        let child = match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => child,
            ForkResult::Child => loop {
                // SAFETY: `pause` has no arguments.
                unsafe { libc::pause() };
            },
        };
        let (own, tables) = (std::process::id().cast_signed(), Tables::default());
        let sharers = |deadline: Instant| {
            let found = sharers_of_memory(&Search::new(child.as_raw(), "", &tables, deadline));
            found.iter().any(|holder| holder.pid == own)
        };
        let start = Instant::now();
        assert!(!sharers(start), "there was no time to look");
        assert!(sharers(start + Duration::from_secs(60)));
        // SAFETY: the mapping of this test, which is not used any more.
        unsafe { munmap(ring, size.get()) }.unwrap();
        assert!(sharers(start), "what is known needs no time, and is not read again");
        kill(child, Signal::SIGKILL).and_then(|()| waitpid(child, None)).unwrap();
    }
}
