//! Files that are read through a mapping and may change at the same time.
//!
//! Truncating a file removes its pages from every mapping of it. `cp` over a library in use
//! truncates it, and a network file system that has lost the file (`ESTALE`) has the same effect.
//! Reading such a page raises SIGBUS, which would end the collector. Instead, a handler replaces
//! the page with zeros and marks the mapping ([`MappedFile::has_changed`]), so only the contents of
//! the page are lost.
//!
//! Mapping is worth this, because only a few pages of a library of some hundred megabytes are ever
//! read, and only the parsers of `object` and `gimli` know which ones. Other processes get no such
//! handler: hook and launcher read files with `pread`.
#![allow(unsafe_code)]

use std::{
    fs::{File, Metadata},
    io,
    ops::Deref,
    os::unix::fs::MetadataExt,
    ptr,
    sync::{
        Once,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use memmap2::Mmap;

/// Maximum number of mappings at the same time: more than all cached images, their debug files, and
/// the images in use.
const MAX_MAPPINGS: usize = 4096;
/// Start of a slot whose end is not written yet. No mapping begins in the first page.
const RESERVED: usize = 1;

/// One mapping, for the handler. `start` is 0 if the slot is free.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    damaged: AtomicBool,
}

static SLOTS: [Slot; MAX_MAPPINGS] =
    [const { Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0), damaged: AtomicBool::new(false) } };
        MAX_MAPPINGS];
/// Slots from this index on were never used.
static USED_SLOTS: AtomicUsize = AtomicUsize::new(0);
static PAGE: AtomicUsize = AtomicUsize::new(4096);

/// A file that is mapped for reading.
pub(crate) struct MappedFile {
    map: Mmap,
    slot: &'static Slot,
    version: Version,
}

/// Identifies a file and its contents. Keeping a descriptor of each file open would need too many
/// descriptors.
#[derive(Clone, Copy)]
struct Version {
    file: (u64, u64),
    content: (u64, i64, i64),
}

impl Version {
    fn of(metadata: &Metadata) -> Self {
        let content = (metadata.size(), metadata.mtime(), metadata.mtime_nsec());
        Version { file: (metadata.dev(), metadata.ino()), content }
    }
}

impl MappedFile {
    /// Maps a whole file.
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(install_handler);
        let version = Version::of(&file.metadata()?);
        let slot = reserve_slot().ok_or_else(|| io::Error::other("too many files are mapped"))?;
        // SAFETY: the mapping is private and only read. If the file is modified or truncated, the
        // handler replaces missing pages with zeros, and every reader is a parser that accepts
        // arbitrary bytes.
        let map = match unsafe { Mmap::map(file) } {
            Ok(map) => map,
            Err(error) => {
                slot.start.store(0, Ordering::Release);
                return Err(error);
            }
        };
        let start = map.as_ptr() as usize;
        let page = PAGE.load(Ordering::Relaxed);
        slot.damaged.store(false, Ordering::Relaxed);
        slot.end.store(start + map.len().next_multiple_of(page), Ordering::Relaxed);
        slot.start.store(start, Ordering::Release);
        Ok(MappedFile { map, slot, version })
    }

    /// Whether a page was missing when it was read.
    pub(crate) fn has_missing_pages(&self) -> bool {
        self.slot.damaged.load(Ordering::Acquire)
    }

    /// Whether the bytes read so far may be a mixture: the file was modified since it was mapped,
    /// or a page of it was missing. `now` describes the file that has its path today. If that is
    /// another file, as a package manager leaves it, the mapped file has not changed.
    pub(crate) fn has_changed(&self, now: &Metadata) -> bool {
        let now = Version::of(now);
        self.has_missing_pages() || (now.file == self.version.file && now.content != self.version.content)
    }

    /// Reads the pages of a range now, where a failure is reported as an error.
    pub(crate) fn populate(&self, start: usize, size: usize) -> io::Result<()> {
        match self.map.advise_range(memmap2::Advice::PopulateRead, start, size) {
            // Linux before 5.14 has no such request. Then the pages are read on first use.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            result => result,
        }
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // The mapping itself is removed after this, and nobody reads it any more.
        self.slot.start.store(0, Ordering::Release);
    }
}

fn reserve_slot() -> Option<&'static Slot> {
    let free = |slot: &Slot| slot.start.compare_exchange(0, RESERVED, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let index = SLOTS.iter().position(free)?;
    USED_SLOTS.fetch_max(index + 1, Ordering::Release);
    Some(&SLOTS[index])
}

/// The previous action for SIGBUS, usually the handler of Rust's runtime. It is written once,
/// before the handler can run.
struct PreviousAction(std::cell::UnsafeCell<libc::sigaction>);

// SAFETY: the value is written once, inside `HANDLER.call_once`, before any mapping exists, and
// only read afterwards.
unsafe impl Sync for PreviousAction {}

// SAFETY: zeros are a valid `sigaction`: the default action, no flags, an empty set.
static PREVIOUS_ACTION: PreviousAction = PreviousAction(std::cell::UnsafeCell::new(unsafe { std::mem::zeroed() }));

fn install_handler() {
    // SAFETY: both structures are valid. The handler has the signature that `SA_SIGINFO` requires
    // and calls only async-signal-safe functions.
    unsafe {
        PAGE.store(usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).unwrap_or(4096), Ordering::Relaxed);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle_bus_error as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &action, PREVIOUS_ACTION.0.get());
    }
}

extern "C" fn handle_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`. A SIGBUS that the kernel raised (a positive
    // code) has an address.
    let address = unsafe { if (*info).si_code > 0 { (*info).si_addr() as usize } else { 0 } };
    let used = USED_SLOTS.load(Ordering::Acquire).min(MAX_MAPPINGS);
    let contains_address = |slot: &&Slot| {
        let start = slot.start.load(Ordering::Acquire);
        start > RESERVED && (start..slot.end.load(Ordering::Relaxed)).contains(&address)
    };
    if let Some(slot) = SLOTS[..used].iter().find(contains_address) {
        let page = PAGE.load(Ordering::Relaxed);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: the page is within one of our mappings, which exists as long as its slot is
        // taken. The new page is readable like the old one. `mmap` is a plain system call, and
        // errno is restored.
        unsafe {
            let errno = *libc::__errno_location();
            let zeros = libc::mmap((address & !(page - 1)) as *mut _, page, libc::PROT_READ, flags, -1, 0);
            *libc::__errno_location() = errno;
            if zeros != libc::MAP_FAILED {
                slot.damaged.store(true, Ordering::Release);
                return;
            }
        }
    }
    // The address is not in one of our mappings, so restore the previous action. A fault happens
    // again when the handler returns; a signal that was sent must be raised again.
    // SAFETY: the previous action is not written any more; `sigaction` and `raise` are
    // async-signal-safe.
    unsafe {
        libc::sigaction(libc::SIGBUS, PREVIOUS_ACTION.0.get(), ptr::null_mut());
        if address == 0 {
            libc::raise(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::unix::fs::FileExt};

    use super::*;

    const BYTES: usize = 1 << 20;

    fn file_of_ones() -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; BYTES]).unwrap();
        file
    }

    fn changed(map: &MappedFile, file: &File) -> bool {
        map.has_changed(&file.metadata().unwrap())
    }

    #[test]
    fn missing_page_reads_as_zeros_and_marks_the_mapping() {
        let file = file_of_ones();
        let other = MappedFile::new(&file_of_ones()).unwrap();
        let map = MappedFile::new(&file).unwrap();
        assert!(!changed(&map, &file));
        file.set_len(5000).unwrap();
        assert!(changed(&map, &file), "before any part of it is read");
        let ones: usize = map.iter().map(|byte| usize::from(*byte)).sum();
        assert_eq!(ones, 5000);
        assert!(map.has_missing_pages());
        assert_eq!(other.iter().map(|byte| usize::from(*byte)).sum::<usize>(), BYTES);
        assert!(!other.has_missing_pages());
        // The mapping stays damaged although the file is complete again.
        file.set_len(BYTES as u64).unwrap();
        assert!(changed(&map, &file));
        drop(map);
        assert!(!changed(&MappedFile::new(&file).unwrap(), &file), "a slot is taken again as new");
    }

    #[test]
    fn file_written_in_place_has_changed() {
        let file = file_of_ones();
        let map = MappedFile::new(&file).unwrap();
        let before = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(&[2; 100], 0).unwrap();
        file.set_modified(before + std::time::Duration::from_nanos(1)).unwrap();
        assert!(changed(&map, &file) && !map.has_missing_pages());
        assert!(!changed(&map, &file_of_ones()), "another file");
    }

    #[test]
    fn threads_read_while_the_file_is_truncated_and_restored() {
        let file = file_of_ones();
        let stop = AtomicBool::new(false);
        let damaged = AtomicUsize::new(0);
        let started = std::time::Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    file.set_len(0).unwrap();
                    file.write_all_at(&vec![1; BYTES], 0).unwrap();
                }
            });
            let readers: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        let mut rounds = 0;
                        // On a busy machine, the writer may not run during all of the rounds.
                        let is_early = || damaged.load(Ordering::Relaxed) == 0 && started.elapsed().as_secs() < 60;
                        while rounds < 200 || is_early() {
                            rounds += 1;
                            // An empty file cannot be mapped.
                            let Ok(map) = MappedFile::new(&file) else { continue };
                            assert!(map.iter().all(|byte| *byte <= 1));
                            damaged.fetch_add(usize::from(map.has_missing_pages()), Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            let ended: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
            stop.store(true, Ordering::Relaxed);
            assert!(ended.iter().all(Result::is_ok));
            assert!(damaged.load(Ordering::Relaxed) > 0);
        });
    }

    /// A SIGBUS outside our mappings is not suppressed.
    #[test]
    fn another_bus_error_still_ends_the_process() {
        use std::os::unix::process::ExitStatusExt;
        const INNER: &str = "XPU_TEST_BUS_ERROR";
        if std::env::var_os(INNER).is_some() {
            let file = file_of_ones();
            let _guarded = MappedFile::new(&file).unwrap();
            // SAFETY: the mapping is only read. The read is meant to fail.
            let bare = unsafe { Mmap::map(&file) }.unwrap();
            file.set_len(0).unwrap();
            std::process::exit(i32::from(std::hint::black_box(bare[BYTES - 1])));
        }
        let name = "objects::mapped_file::tests::another_bus_error_still_ends_the_process";
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        let status = again.args(["--exact", name]).env(INNER, "1").output().unwrap().status;
        assert_eq!(status.signal(), Some(libc::SIGBUS));
    }
}
