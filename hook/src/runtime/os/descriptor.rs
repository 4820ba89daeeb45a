//! The hook's descriptors and shared memory. Descriptors have high numbers that the host does not
//! expect, and a descriptor that the host has closed is noticed.

use std::{
    ffi::{c_int, c_void},
    io,
    sync::atomic::{AtomicI32, AtomicU64, Ordering},
};

/// Lowest number of the hook's descriptors. Programs do not expect their own descriptors here.
pub(crate) const FIRST_DESCRIPTOR: c_int = 200;

/// A descriptor of the hook. Some hosts close every descriptor that they did not open; the number
/// may then belong to a file of the host.
#[derive(Debug)]
pub(crate) struct Descriptor {
    fd: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

impl Descriptor {
    /// No descriptor.
    pub(crate) const fn none() -> Self {
        Descriptor { fd: AtomicI32::new(-1), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
    }

    /// Takes ownership of `fd`, under a high number if one is available.
    ///
    /// # Errors
    /// When `fd` is not a valid descriptor; it is closed then.
    pub(crate) fn set(&self, fd: c_int) -> io::Result<()> {
        // SAFETY: the caller has just opened `fd`; a failure does not change it.
        let high = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR) };
        let fd = if high >= 0 {
            close(fd);
            high
        } else {
            fd
        };
        let (device, inode) = match identity(fd) {
            Ok(identity) => identity,
            Err(error) => {
                close(fd);
                return Err(error);
            }
        };
        self.device.store(device, Ordering::Relaxed);
        self.inode.store(inode, Ordering::Relaxed);
        self.fd.store(fd, Ordering::Release);
        Ok(())
    }

    /// The number, if it still refers to the same file.
    pub(crate) fn get(&self) -> Option<c_int> {
        let fd = self.fd.load(Ordering::Acquire);
        if fd < 0 {
            return None;
        }
        let known = (self.device.load(Ordering::Relaxed), self.inode.load(Ordering::Relaxed));
        (identity(fd).ok() == Some(known)).then_some(fd)
    }

    /// Closes the descriptor, unless the number belongs to another file now. Async-signal-safe, so
    /// a forked child may call it.
    pub(crate) fn close(&self) {
        if let Some(fd) = self.get() {
            close(fd);
        }
        self.fd.store(-1, Ordering::Release);
    }
}

pub(crate) fn identity(fd: c_int) -> io::Result<(u64, u64)> {
    // SAFETY: an all-zero stat is a valid value of that plain structure.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is valid for writing; a bad descriptor gives EBADF.
    match unsafe { libc::fstat(fd, &mut stat) } {
        0 => Ok((stat.st_dev, stat.st_ino)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Closes a descriptor that the caller owns.
pub(crate) fn close(fd: c_int) {
    // SAFETY: the callers pass descriptors that they own.
    unsafe { libc::close(fd) };
}

/// The maximum size of a file, which also applies to shared memory.
fn largest_file() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is valid for writing; on a failure it stays infinite.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    limit.rlim_cur
}

/// Whether the process may map this many more bytes. Check it before an allocation, because an
/// allocation that fails ends the process.
pub(crate) fn may_map(bytes: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address that the kernel chooses. Nothing refers to it, and it is
    // removed.
    unsafe {
        let memory = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0);
        memory != libc::MAP_FAILED && libc::munmap(memory, bytes) == 0
    }
}

/// A fully allocated shared memory file of `bytes` zero bytes, and its mapping.
///
/// # Errors
/// The system's error. No descriptor stays open then.
pub(crate) fn shared_memory(bytes: usize) -> io::Result<(c_int, *mut c_void)> {
    if bytes as u64 > largest_file() {
        // The attempt would raise SIGXFSZ, which ends the host.
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    // SAFETY: the name is a C string; the flags are valid.
    let fd = unsafe { libc::memfd_create(c"xpu_timer_ring".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // Allocate now: a page that is not available later would raise SIGBUS in the host.
    // SAFETY: `fd` is owned by this function.
    let allocated = match unsafe { libc::fallocate(fd, 0, 0, bytes as libc::off_t) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // Everyone with the descriptor, including the collector, could truncate the file under the
    // host. Where sealing is refused, the hook continues without it.
    // SAFETY: `fd` is owned by this function.
    unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL) };
    let mapped = allocated.and_then(|()| {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // Populate the page table now. Otherwise each page is a fault in some launch.
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, fd, 0) };
        if memory == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(memory) }
    });
    match mapped {
        Ok(memory) => Ok((fd, memory)),
        Err(error) => {
            close(fd);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_of_a_ring_cannot_be_removed() {
        let (fd, memory) = shared_memory(8192).unwrap();
        for size in [0, 4096, 1 << 20] {
            // SAFETY: the descriptor is ours.
            assert_eq!(unsafe { libc::ftruncate(fd, size) }, -1, "{size}");
        }
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the descriptor is ours, and the mapping is 8192 bytes long. A hole reads as zeros
        // and faults in again.
        unsafe {
            libc::fallocate(fd, hole, 0, 8192);
            memory.cast::<u8>().add(8191).write(7);
            libc::munmap(memory, 8192);
        }
        close(fd);
    }

    #[test]
    fn a_descriptor_that_the_host_closed_is_not_used() {
        let (fd, _) = shared_memory(4096).unwrap();
        let ours = Descriptor::none();
        assert_eq!(ours.get(), None);
        ours.set(fd).unwrap();
        let number = ours.get().expect("just opened");
        assert!(number >= FIRST_DESCRIPTOR);
        // The host closes all that it does not know, and opens a file of its own.
        close(number);
        assert_eq!(ours.get(), None);
        let (other, _) = shared_memory(4096).unwrap();
        // SAFETY: `other` is open, and `number` was closed above.
        assert_eq!(unsafe { libc::dup2(other, number) }, number);
        assert_eq!(ours.get(), None);
        ours.close();
        assert!(identity(number).is_ok(), "the host's file stays open");
        close(number);
        close(other);
    }
}
