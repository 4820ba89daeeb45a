//! Files that are read through a mapping, and that may change meanwhile.
//!
//! Whoever truncates a file takes its pages away below every mapping of it: `cp` over a library that is in use does so, and so does a network
//! file system that has lost the file (`ESTALE`). Reading such a page raises SIGBUS, which would end the collector. Here it costs what the
//! page held: a handler puts a page of zeros in its place, and the map remembers it ([`MappedFile::has_changed`]).
//!
//! Mapping is kept because only few pages of a library of some hundred megabytes are ever looked at, and which ones is known to the parsers
//! of `object` and `gimli` alone. Processes that are not ours get no handler: hook and launcher read files with `pread`.
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

/// Maps at the same time, at most; more than all images that are kept, their debug files and those at work.
const SLOTS: usize = 4096;
/// In a slot whose end is not written yet. No map begins in the first page.
const RESERVED: usize = 1;

/// One map, for the handler. `start` is 0 when the slot is free.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    harmed: AtomicBool,
}

static MAPS: [Slot; SLOTS] =
    [const { Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0), harmed: AtomicBool::new(false) } }; SLOTS];
/// Slots from here on have never been used.
static USED: AtomicUsize = AtomicUsize::new(0);
static PAGE: AtomicUsize = AtomicUsize::new(4096);

/// A file that is mapped for reading.
pub(crate) struct MappedFile {
    map: Mmap,
    slot: &'static Slot,
    version: Version,
}

/// Which file it is, and what changes when it is written to. A descriptor of each file would be too many to keep.
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
    pub fn new(file: &File) -> io::Result<Self> {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(install);
        let version = Version::of(&file.metadata()?);
        let slot = reserve().ok_or_else(|| io::Error::other("too many files are mapped"))?;
        // SAFETY: the map is private and only read. The file may be written to or cut short meanwhile: a page that is gone becomes one of
        // zeros, by the handler, and whatever is read then goes to parsers of bytes that nobody vouches for.
        let map = match unsafe { Mmap::map(file) } {
            Ok(map) => map,
            Err(error) => {
                slot.start.store(0, Ordering::Release);
                return Err(error);
            }
        };
        let start = map.as_ptr() as usize;
        let page = PAGE.load(Ordering::Relaxed);
        slot.harmed.store(false, Ordering::Relaxed);
        slot.end.store(start + map.len().next_multiple_of(page), Ordering::Relaxed);
        slot.start.store(start, Ordering::Release);
        Ok(MappedFile { map, slot, version })
    }

    /// Whether a page was gone when it was looked at.
    pub fn is_harmed(&self) -> bool {
        self.slot.harmed.load(Ordering::Acquire)
    }

    /// Whether what was read may be of no one file: it was written to since it was mapped, or a page of it was gone. `now` is of the file
    /// that has its path today; another file there, as a package manager leaves it, is no change of this one.
    pub fn has_changed(&self, now: &Metadata) -> bool {
        let now = Version::of(now);
        self.is_harmed() || (now.file == self.version.file && now.content != self.version.content)
    }

    /// Has the pages of a range read now, where an error is an error.
    pub fn populate(&self, start: usize, size: usize) -> io::Result<()> {
        match self.map.advise_range(memmap2::Advice::PopulateRead, start, size) {
            // Linux before 5.14 cannot do it, and then the pages come when they are used.
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
        // The map itself goes after this, and nobody reads it any more.
        self.slot.start.store(0, Ordering::Release);
    }
}

fn reserve() -> Option<&'static Slot> {
    let free = |slot: &Slot| slot.start.compare_exchange(0, RESERVED, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let index = MAPS.iter().position(free)?;
    USED.fetch_max(index + 1, Ordering::Release);
    Some(&MAPS[index])
}

/// What was done at a SIGBUS before: the runtime's handler, as a rule. It is written once, before the handler can run.
struct Before(std::cell::UnsafeCell<libc::sigaction>);

// SAFETY: it is written once, within `HANDLER`, before any map is there, and only read afterwards.
unsafe impl Sync for Before {}

// SAFETY: zeros are a valid `sigaction`: the default action, no flags, an empty set.
static BEFORE: Before = Before(std::cell::UnsafeCell::new(unsafe { std::mem::zeroed() }));

fn install() {
    // SAFETY: both structures are valid; the handler is one of `SA_SIGINFO` and calls only what is safe in a handler.
    unsafe {
        PAGE.store(usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).unwrap_or(4096), Ordering::Relaxed);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_bus_error as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &action, BEFORE.0.get());
    }
}

extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`; of a SIGBUS of the kernel's own (a positive code) it has the address.
    let address = unsafe { if (*info).si_code > 0 { (*info).si_addr() as usize } else { 0 } };
    let used = USED.load(Ordering::Acquire).min(SLOTS);
    let within = |slot: &&Slot| {
        let start = slot.start.load(Ordering::Acquire);
        start > RESERVED && (start..slot.end.load(Ordering::Relaxed)).contains(&address)
    };
    if let Some(slot) = MAPS[..used].iter().find(within) {
        let page = PAGE.load(Ordering::Relaxed);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: the page lies within a map of ours, which is there as long as its slot is taken, and is replaced with one that may be read as
        // the one before. `mmap` is a plain system call; errno is put back.
        unsafe {
            let errno = *libc::__errno_location();
            let zeros = libc::mmap((address & !(page - 1)) as *mut _, page, libc::PROT_READ, flags, -1, 0);
            *libc::__errno_location() = errno;
            if zeros != libc::MAP_FAILED {
                slot.harmed.store(true, Ordering::Release);
                return;
            }
        }
    }
    // Not ours: what was there before this has it. The fault comes again by itself when the handler returns; a signal that was sent does not.
    // SAFETY: `BEFORE` is not written any more; `sigaction` and `raise` are safe in a handler.
    unsafe {
        libc::sigaction(libc::SIGBUS, BEFORE.0.get(), ptr::null_mut());
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
    fn a_page_that_is_gone_reads_as_zeros_and_is_remembered() {
        let file = file_of_ones();
        let other = MappedFile::new(&file_of_ones()).unwrap();
        let map = MappedFile::new(&file).unwrap();
        assert!(!changed(&map, &file));
        file.set_len(5000).unwrap();
        assert!(changed(&map, &file), "before anything of it is looked at");
        let ones: usize = map.iter().map(|byte| usize::from(*byte)).sum();
        assert_eq!(ones, 5000);
        assert!(map.is_harmed());
        assert_eq!(other.iter().map(|byte| usize::from(*byte)).sum::<usize>(), BYTES);
        assert!(!other.is_harmed());
        // A file that is whole again does not make the map whole.
        file.set_len(BYTES as u64).unwrap();
        assert!(changed(&map, &file));
        drop(map);
        assert!(!changed(&MappedFile::new(&file).unwrap(), &file), "a slot is taken again as new");
    }

    #[test]
    fn a_file_that_is_written_in_place_has_changed() {
        let file = file_of_ones();
        let map = MappedFile::new(&file).unwrap();
        let before = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(&[2; 100], 0).unwrap();
        file.set_modified(before + std::time::Duration::from_nanos(1)).unwrap();
        assert!(changed(&map, &file) && !map.is_harmed());
        assert!(!changed(&map, &file_of_ones()), "another file");
    }

    #[test]
    fn many_threads_read_while_the_file_comes_and_goes() {
        let file = file_of_ones();
        let stop = AtomicBool::new(false);
        let harmed = AtomicUsize::new(0);
        let begun = std::time::Instant::now();
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
                        // On a busy machine the writer may stand still for all of the rounds.
                        let is_early = || harmed.load(Ordering::Relaxed) == 0 && begun.elapsed().as_secs() < 60;
                        while rounds < 200 || is_early() {
                            rounds += 1;
                            // An empty file cannot be mapped.
                            let Ok(map) = MappedFile::new(&file) else { continue };
                            assert!(map.iter().all(|byte| *byte <= 1));
                            harmed.fetch_add(usize::from(map.is_harmed()), Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            let ended: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
            stop.store(true, Ordering::Relaxed);
            assert!(ended.iter().all(Result::is_ok));
            assert!(harmed.load(Ordering::Relaxed) > 0);
        });
    }

    /// What is not in a map of ours is not hidden.
    #[test]
    fn another_bus_error_still_ends_the_process() {
        use std::os::unix::process::ExitStatusExt;
        const INNER: &str = "XPU_TEST_BUS_ERROR";
        if std::env::var_os(INNER).is_some() {
            let file = file_of_ones();
            let _guarded = MappedFile::new(&file).unwrap();
            // SAFETY: the map is only read, which is meant to fail.
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
