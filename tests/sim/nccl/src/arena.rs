//! The shared memory in which the ranks of a communicator meet, and sleeping waits on it.
//!
//! It is a file in /dev/shm, named after the unique id, and removed once all ranks have it. Every
//! rank that waits for others holds a shared lock on it, so a file without a lock is left by a job
//! that died, and can be removed.

#![allow(unsafe_code)]

use std::{
    fs::{self, File, OpenOptions},
    os::{
        fd::AsRawFd,
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst},
};

use sim_abi::{nccl::NcclError, trace};

const FOLDER: &str = "/dev/shm";
const PREFIX: &str = "xpu-sim-nccl-";
/// With more ranks, the slots would be too small for an element of each rank.
pub(crate) const MAX_RANKS: usize = 512;

#[repr(C, align(64))]
struct Header {
    /// Written by the first rank.
    ranks: AtomicU32,
    joined: AtomicU32,
    /// Changes when a meeting is complete.
    epoch: AtomicU32,
}

/// The state that a rank shows to the others.
#[repr(C, align(64))]
struct Slot {
    taken: AtomicU32,
    /// Changes when a channel of this rank changes.
    doorbell: AtomicU32,
    /// The phase of its kernels (upper half) and its tag in this phase (lower half).
    device: AtomicU64,
    /// The phase of its host calls, and two words for each, selected by the phase's lowest bit.
    host: AtomicU64,
    data: [[AtomicU64; 2]; 2],
}

/// One direction between two ranks, one chunk at a time.
#[repr(C, align(64))]
pub(crate) struct Channel {
    written: AtomicU64,
    read: AtomicU64,
    tag: AtomicU64,
}

/// The shared memory of a communicator.
pub(crate) struct Arena {
    path: PathBuf,
    base: usize,
    bytes: usize,
    /// Open and locked until all ranks are in.
    file: std::sync::Mutex<Option<File>>,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// Maximum number of bytes that a rank shows in one phase.
    pub(crate) stage_bytes: usize,
    /// Bytes of a chunk in a channel.
    pub(crate) chunk_bytes: usize,
}

/// The communicator was aborted.
#[derive(Debug)]
pub(crate) struct Aborted;

impl Arena {
    /// Opens or creates the arena of this name, and takes the slot of `rank`.
    pub(crate) fn open(name: &str, rank: usize, ranks: usize) -> Result<Self, NcclError> {
        let stage_bytes = ((1 << 20) / ranks / 2).clamp(8 << 10, 128 << 10);
        let chunk_bytes = ((1 << 20) / (ranks * ranks)).clamp(4 << 10, 64 << 10).next_multiple_of(64);
        let bytes = size_of::<Header>()
            + ranks * size_of::<Slot>()
            + ranks * ranks * (size_of::<Channel>() + chunk_bytes)
            + ranks * 2 * stage_bytes;
        let path = Path::new(FOLDER).join(format!("{PREFIX}{name}"));
        let file = open_locked(&path).map_err(|error| system("opening", &path, &error))?;
        file.set_len(bytes as u64).map_err(|error| system("sizing", &path, &error))?;
        // SAFETY: a new mapping of an open file of this size, which no rank shrinks: every rank
        // computes the same size.
        let base = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(system("mapping", &path, &std::io::Error::last_os_error()));
        }
        let file = std::sync::Mutex::new(Some(file));
        let arena = Arena { path, base: base as usize, bytes, file, rank, ranks, stage_bytes, chunk_bytes };
        let expected = u32::try_from(ranks).map_err(|_| NcclError::INVALID_ARGUMENT)?;
        let size = arena.header().ranks.compare_exchange(0, expected, SeqCst, SeqCst);
        if size.is_err_and(|size| size != expected) || arena.slot(rank).taken.swap(1, SeqCst) != 0 {
            trace::note(format_args!("rank {rank} of {ranks} does not fit into {}", arena.path.display()));
            // The file belongs to the ranks with matching sizes.
            arena.lock_file().take();
            return Err(NcclError::INVALID_USAGE);
        }
        Ok(arena)
    }

    /// Waits until all ranks are in. The last rank removes the file.
    pub(crate) fn join(&self, aborted: &AtomicBool) -> Result<(), Aborted> {
        let header = self.header();
        if header.joined.fetch_add(1, SeqCst) as usize + 1 == self.ranks {
            let _ = fs::remove_file(&self.path);
            self.wake_all();
        }
        self.wait(&header.epoch, aborted, || header.joined.load(SeqCst) as usize == self.ranks)?;
        self.lock_file().take();
        Ok(())
    }

    /// Meets all ranks in their kernels' phase `phase` if all have the same `tag`; waits forever
    /// otherwise.
    ///
    /// A rank in the next phase has completed this meeting already.
    pub(crate) fn meet(&self, phase: u32, tag: u32, aborted: &AtomicBool) -> Result<(), Aborted> {
        let met = || {
            (0..self.ranks).all(|rank| {
                let shown = self.slot(rank).device.load(SeqCst);
                let (their_phase, their_tag) = ((shown >> 32) as u32, shown as u32);
                their_phase == phase.wrapping_add(1) || (their_phase == phase && their_tag == tag)
            })
        };
        self.slot(self.rank).device.store((u64::from(phase) << 32) | u64::from(tag), SeqCst);
        if met() {
            // The last rank wakes the others, which saw that a rank was missing.
            self.wake_all();
        }
        self.wait(&self.header().epoch, aborted, met)
    }

    /// Exchanges two words with all ranks, from the host. `phase` counts these calls from 1.
    pub(crate) fn exchange(&self, phase: u64, words: [u64; 2], aborted: &AtomicBool) -> Result<Vec<[u64; 2]>, Aborted> {
        let side = (phase & 1) as usize;
        let own = self.slot(self.rank);
        own.data[side].iter().zip(words).for_each(|(place, word)| place.store(word, SeqCst));
        own.host.store(phase, SeqCst);
        let met = || (0..self.ranks).all(|rank| self.slot(rank).host.load(SeqCst) >= phase);
        if met() {
            self.wake_all();
        }
        self.wait(&self.header().epoch, aborted, met)?;
        let read = |rank| {
            let [first, second] = &self.slot(rank).data[side];
            [first.load(SeqCst), second.load(SeqCst)]
        };
        Ok((0..self.ranks).map(read).collect())
    }

    /// The address at which `rank` shows its bytes of a phase. Two buffers alternate, so that a
    /// slow reader loses nothing.
    pub(crate) fn stage(&self, rank: usize, phase: u32) -> usize {
        let stages = self.base + self.bytes - self.ranks * 2 * self.stage_bytes;
        stages + (rank * 2 + (phase & 1) as usize) * self.stage_bytes
    }

    /// The channel from one rank to another, and its bytes.
    pub(crate) fn channel(&self, from: usize, to: usize) -> (&Channel, usize) {
        let index = from * self.ranks + to;
        let channels = self.base + size_of::<Header>() + self.ranks * size_of::<Slot>();
        let data = channels + self.ranks * self.ranks * size_of::<Channel>();
        // SAFETY: the index is within the mapping, which lives as long as self; all-zero bytes are
        // a valid Channel.
        let channel = unsafe { &*((channels + index * size_of::<Channel>()) as *const Channel) };
        (channel, data + index * self.chunk_bytes)
    }

    /// The value for [`Arena::sleep`].
    pub(crate) fn doorbell(&self) -> u32 {
        self.slot(self.rank).doorbell.load(SeqCst)
    }

    /// Wakes a rank that sleeps for one of its channels.
    pub(crate) fn ring(&self, rank: usize) {
        let doorbell = &self.slot(rank).doorbell;
        doorbell.fetch_add(1, SeqCst);
        futex_wake(doorbell);
    }

    /// Sleeps until this rank's doorbell differs from `seen`.
    pub(crate) fn sleep(&self, seen: u32, aborted: &AtomicBool) -> Result<(), Aborted> {
        let doorbell = &self.slot(self.rank).doorbell;
        self.wait(doorbell, aborted, || doorbell.load(SeqCst) != seen)
    }

    /// Wakes all waiters in all processes, so that they check again.
    pub(crate) fn wake_all(&self) {
        self.header().epoch.fetch_add(1, SeqCst);
        futex_wake(&self.header().epoch);
    }

    fn wait(&self, word: &AtomicU32, aborted: &AtomicBool, done: impl Fn() -> bool) -> Result<(), Aborted> {
        loop {
            let seen = word.load(SeqCst);
            if done() {
                return Ok(());
            }
            if aborted.load(SeqCst) {
                return Err(Aborted);
            }
            futex_wait(word, seen);
        }
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping begins with it and lives as long as self; all-zero bytes are a valid
        // Header.
        unsafe { &*(self.base as *const Header) }
    }

    fn slot(&self, rank: usize) -> &Slot {
        assert!(rank < self.ranks, "ranks are checked when they come from a caller");
        // SAFETY: the index is within the mapping, which lives as long as self; all-zero bytes are
        // a valid Slot.
        unsafe { &*((self.base + size_of::<Header>() + rank * size_of::<Slot>()) as *const Slot) }
    }

    fn lock_file(&self) -> std::sync::MutexGuard<'_, Option<File>> {
        self.file.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.lock_file().is_some() {
            // It was aborted before all ranks were in, so no other rank removes the file.
            let _ = fs::remove_file(&self.path);
        }
        // SAFETY: this is the mapping from `open`, and nothing borrows from it any more.
        unsafe { libc::munmap(self.base as *mut libc::c_void, self.bytes) };
    }
}

impl Channel {
    /// Whether the sender may write a chunk, that is, whether all sent chunks were read.
    pub(crate) fn is_empty(&self) -> bool {
        self.written.load(SeqCst) == self.read.load(SeqCst)
    }

    /// Marks a chunk as written.
    pub(crate) fn wrote(&self, tag: u64) {
        self.tag.store(tag, SeqCst);
        self.written.fetch_add(1, SeqCst);
    }

    /// The tag of the unread chunk.
    pub(crate) fn offered(&self) -> Option<u64> {
        (!self.is_empty()).then(|| self.tag.load(SeqCst))
    }

    /// Marks the chunk as read.
    pub(crate) fn took(&self) {
        self.read.fetch_add(1, SeqCst);
    }
}

/// Removes the files of jobs that died before all their ranks were in.
pub(crate) fn sweep() {
    for entry in fs::read_dir(FOLDER).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(PREFIX)
            && let Ok(file) = File::open(entry.path())
            && lock(&file, libc::LOCK_EX | libc::LOCK_NB).is_ok()
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Opens and locks the file. If it was removed in between, creates it again.
fn open_locked(path: &Path) -> std::io::Result<File> {
    loop {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        lock(&file, libc::LOCK_SH)?;
        if fs::metadata(path).is_ok_and(|there| there.ino() == file.metadata().map_or(0, |opened| opened.ino())) {
            return Ok(file);
        }
    }
}

fn lock(file: &File, how: i32) -> std::io::Result<()> {
    // SAFETY: a system call on an open descriptor.
    match unsafe { libc::flock(file.as_raw_fd(), how) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn system(what: &str, path: &Path, error: &std::io::Error) -> NcclError {
    trace::note(format_args!("{what} {}: {error}", path.display()));
    NcclError::SYSTEM
}

/// Sleeps while the word is `seen`. The futex is shared between processes, hence not private.
fn futex_wait(word: &AtomicU32, seen: u32) {
    // SAFETY: the word is in a living mapping; there is no timeout.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, std::ptr::null::<libc::timespec>())
    };
}

fn futex_wake(word: &AtomicU32) {
    // SAFETY: the word is in a living mapping.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}
