//! The few system facilities that the hook uses, in the form that a guest in a foreign process needs: no failure ends
//! anything, descriptors stay out of the host's way, and a descriptor that the host closed behind our back is noticed.

use std::{
    cell::Cell,
    ffi::{CStr, c_int, c_void},
    io,
    sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering},
};

use crate::{filters, original::look_up};

/// Descriptors of the hook start here, where no program expects its own.
const FIRST_DESCRIPTOR: c_int = 200;

/// CLOCK_MONOTONIC in nanoseconds.
#[inline]
pub fn now_ns() -> u64 {
    clock_ns(if filters::may_read_clock() { libc::CLOCK_MONOTONIC } else { libc::CLOCK_MONOTONIC_COARSE })
}

/// The same clock as of the last timer tick, a few milliseconds old and several times cheaper to read.
#[inline]
pub fn coarse_now_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC_COARSE)
}

/// The processor's counter, which goes on at an even pace that nobody says; several times cheaper than a clock.
#[inline]
pub fn counter() -> u64 {
    // SAFETY: every x86-64 processor has it, and Linux lets programs read it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// What the C library takes from the stack of each new thread: the thread-local variables of the program and its libraries, which may be
/// megabytes, and some kilobytes for itself.
pub fn thread_local_bytes() -> usize {
    type MinStack = unsafe extern "C" fn(*const libc::pthread_attr_t) -> usize;
    let function = look_up(libc::RTLD_DEFAULT, c"__pthread_get_minstack");
    if function.is_null() {
        return 0;
    }
    // SAFETY: an all-zero value is written by `pthread_attr_init` before it is read.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        if libc::pthread_attr_init(&mut attributes) != 0 {
            return 0;
        }
        // SAFETY: glibc's function of this name, which std calls in the same way.
        let bytes = std::mem::transmute::<*mut c_void, MinStack>(function)(&attributes);
        libc::pthread_attr_destroy(&mut attributes);
        bytes
    }
}

/// Whether reading it ends the calling thread's process, because the program that has executed this one wanted that.
pub fn forbids_counter() -> bool {
    const GET_TSC: c_int = 25;
    const TSC_SIGSEGV: c_int = 2;
    let mut mode: c_int = 0;
    // SAFETY: a valid place.
    let known = unsafe { libc::prctl(GET_TSC, &raw mut mode) } == 0;
    known && mode == TSC_SIGSEGV
}

/// Nanoseconds that the calling thread has been on a processor. A system call, unlike the others: where that is not allowed, a thread counts
/// as one that computes all the time.
pub fn thread_cpu_ns() -> u64 {
    if filters::may_call() { clock_ns(libc::CLOCK_THREAD_CPUTIME_ID) } else { coarse_now_ns() }
}

/// Lets another thread run, if this one may say so.
pub fn relax() {
    if filters::may_call() { std::thread::yield_now() } else { std::hint::spin_loop() }
}

#[inline]
fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec; both clocks exist since Linux 2.6.32.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Asks the processor for the cache line of a word that is written soon. A word of the ring was last written by the watcher, often
/// on another core.
#[inline(always)]
pub fn prefetch<T>(word: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint without effect but on the cache; a processor that does not know it takes it for no operation. The compiler's
    // own function emits the instruction for words that are only read, because the first processors of this kind lacked this one.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) std::ptr::from_ref(word), options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = word;
}

/// The calling thread's errno, to be put back before the host looks at it.
#[inline]
pub fn errno() -> &'static Cell<c_int> {
    // SAFETY: the location is valid for as long as the thread lives and only this thread touches it; the reference does not
    // leave the calling function, so it does not outlive the thread.
    unsafe { Cell::from_mut(&mut *libc::__errno_location()) }
}

/// Drops what the dynamic linker would tell the host of a look-up of the hook's that found nothing.
pub fn forget_linker_error() {
    // SAFETY: it has no arguments; the answer is the linker's and is not used.
    unsafe { libc::dlerror() };
}

/// A value that is made once and kept for ever. Threads that need it at the same time make it each, and one is kept: nobody waits for
/// another thread, which a forked child may not have.
pub struct Made<T: 'static>(AtomicPtr<T>);

impl<T: Sync> Made<T> {
    /// Not made yet.
    pub const fn new() -> Self {
        Made(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// The value, if it is made.
    #[inline]
    pub fn get(&self) -> Option<&'static T> {
        // SAFETY: null, or a value that is never freed.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// The value, made if need be.
    #[inline]
    pub fn get_or_make(&self, make: impl FnOnce() -> T) -> &'static T {
        self.get().unwrap_or_else(|| self.keep(make()))
    }

    #[cold]
    fn keep(&self, made: T) -> &'static T {
        let made = Box::into_raw(Box::new(made));
        match self.0.compare_exchange(std::ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: just made, and never freed.
            Ok(_) => unsafe { &*made },
            Err(first) => {
                // SAFETY: nobody else has seen it; the other one is never freed.
                unsafe {
                    drop(Box::from_raw(made));
                    &*first
                }
            }
        }
    }
}

/// The kernel's id of the calling thread.
pub fn gettid() -> u32 {
    // SAFETY: gettid takes nothing and cannot fail.
    unsafe { libc::gettid() as u32 }
}

/// Whether this process has a thread of that id. True when nobody can tell.
pub fn is_thread(tid: u32) -> bool {
    if !filters::may_call() {
        return true;
    }
    // SAFETY: signal 0 is only checked and never sent; both numbers are plain.
    let answer = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, 0) };
    answer == 0 || errno().get() != libc::ESRCH
}

/// A variable of the environment, copied before anything else can change it.
pub fn variable(name: &CStr) -> Option<Vec<u8>> {
    // SAFETY: a C string.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    // SAFETY: getenv's string is terminated.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) }.to_bytes().to_vec())
}

/// The beginning of a file; its bytes in `buffer`. Nothing of one that cannot be read.
pub fn read_file(path: &CStr, buffer: &mut [u8]) -> usize {
    // SAFETY: a C string.
    let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if fd < 0 {
        return 0;
    }
    // SAFETY: a valid buffer.
    let length = unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) };
    close(fd);
    usize::try_from(length).unwrap_or(0)
}

/// The exit status of a process's first thread when that has ended and the calling thread is the only one that is left.
pub fn first_threads_status_when_alone() -> Option<c_int> {
    /// Links of a folder without another one in it; `/proc/PID/task` has one more for each thread.
    const LINKS: u64 = 2;
    // SAFETY: an all-zero stat is a valid value of that plain structure.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a C string and a valid place.
    let known = unsafe { libc::stat(c"/proc/self/task".as_ptr(), &mut stat) } == 0;
    // A first thread that has ended stays one of them until all have.
    if !known || stat.st_nlink != LINKS + 2 {
        return None;
    }
    let mut text = [0; 1024];
    let length = read_file(c"/proc/self/stat", &mut text);
    status_of_zombie(&text[..length])
}

/// The exit status of a zombie by its `/proc/PID/stat`.
fn status_of_zombie(stat: &[u8]) -> Option<c_int> {
    // The name stands in parentheses and may hold any character. The last of 52 fields is the status as wait(2) gives it.
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let fields = std::str::from_utf8(&stat[name_end + 1..]).ok()?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    let waited: c_int = fields.last()?.parse().ok()?;
    (state == "Z").then_some((waited >> 8) & 0xff)
}

/// Ends the calling thread with a status, unless that is 0. The status of a process whose first thread has ended by the bare system
/// call is that of its last thread (since Linux 5.18), so the hook's has to end with that of the program's.
pub fn end_thread_unless_success(status: c_int) {
    if status != 0 {
        // SAFETY: no other thread is left that could see what this one leaves behind.
        unsafe { libc::syscall(libc::SYS_exit, status) };
    }
}

/// Whether a path is that of a regular file.
pub fn is_regular(path: &CStr) -> bool {
    // SAFETY: an all-zero stat is a valid value of that plain structure.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a C string and a valid place.
    let known = unsafe { libc::stat(path.as_ptr(), &mut stat) } == 0;
    known && stat.st_mode & libc::S_IFMT == libc::S_IFREG
}

/// A word of this process's memory that may not be there any more.
///
/// # Errors
/// `EFAULT` when it is not there; another error when the system, or a filter, does not let it be read in this way.
pub fn word_at(address: usize) -> io::Result<usize> {
    if !filters::may_call() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut word = 0usize;
    let here = libc::iovec { iov_base: (&raw mut word).cast(), iov_len: size_of::<usize>() };
    let there = libc::iovec { iov_base: address as *mut c_void, iov_len: size_of::<usize>() };
    // SAFETY: `here` is a valid place; the kernel looks whether `there` is one.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &here, 1, &there, 1, 0) };
    if read == size_of::<usize>() as isize { Ok(word) } else { Err(io::Error::last_os_error()) }
}

/// Whether the process has one thread only. False when nobody can tell.
pub fn is_alone() -> bool {
    // SAFETY: an all-zero stat is a valid value of that plain structure.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a C string and a valid place.
    let known = unsafe { libc::stat(c"/proc/self/task".as_ptr(), &mut stat) } == 0;
    // A folder has a link for itself, one from above, and one from each folder in it.
    known && stat.st_nlink == 3
}

/// A descriptor that is ours until somebody else closes it: hosts do close every descriptor they do not know, and the
/// number then belongs to one of their files.
#[derive(Debug)]
pub struct Descriptor {
    fd: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

impl Descriptor {
    /// No descriptor.
    pub const fn none() -> Self {
        Descriptor { fd: AtomicI32::new(-1), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
    }

    /// Takes over `fd`, under a high number when there is one.
    ///
    /// # Errors
    /// When it is not a descriptor; it is closed then.
    pub fn set(&self, fd: c_int) -> io::Result<()> {
        // SAFETY: the caller just opened `fd`; a failure leaves it as it is.
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

    /// The number, if it still is what it was.
    pub fn get(&self) -> Option<c_int> {
        let fd = self.fd.load(Ordering::Acquire);
        if fd < 0 {
            return None;
        }
        let known = (self.device.load(Ordering::Relaxed), self.inode.load(Ordering::Relaxed));
        (identity(fd).ok() == Some(known)).then_some(fd)
    }

    /// Closes it, unless it is somebody else's by now. Async-signal-safe, so a forked child can call it.
    pub fn close(&self) {
        if let Some(fd) = self.get() {
            close(fd);
        }
        self.fd.store(-1, Ordering::Release);
    }
}

fn identity(fd: c_int) -> io::Result<(u64, u64)> {
    // SAFETY: an all-zero stat is a valid value of that plain structure.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is valid for writing; a bad descriptor gives EBADF.
    match unsafe { libc::fstat(fd, &mut stat) } {
        0 => Ok((stat.st_dev, stat.st_ino)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Closes a descriptor that this module's caller opened.
pub fn close(fd: c_int) {
    // SAFETY: the callers pass descriptors that they own.
    unsafe { libc::close(fd) };
}

/// The limit of the size of a file, which holds for shared memory as well.
fn largest_file() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is valid for writing; on a failure it stays infinite.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    limit.rlim_cur
}

/// Whether the process may still map so many bytes. An allocation that fails ends the process, so who is going to allocate asks first.
pub fn may_map(bytes: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice, which nothing refers to and which is taken away again.
    unsafe {
        let memory = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0);
        memory != libc::MAP_FAILED && libc::munmap(memory, bytes) == 0
    }
}

/// A shared memory file of `bytes` zero bytes, all of it allocated, and its mapping.
///
/// # Errors
/// What the system answered; nothing is left open then.
pub fn shared_memory(bytes: usize) -> io::Result<(c_int, *mut c_void)> {
    if bytes as u64 > largest_file() {
        // Trying would raise SIGXFSZ, which ends the host.
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    // SAFETY: the name is a C string; the flags are valid.
    let fd = unsafe { libc::memfd_create(c"xpu_timer_ring".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // Allocated now: a page that cannot be had later would be a SIGBUS in the host.
    // SAFETY: `fd` is ours.
    let allocated = match unsafe { libc::fallocate(fd, 0, 0, bytes as libc::off_t) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // Whoever has the descriptor, the collector too, could take the pages away below the host. Where sealing is refused it goes without.
    // SAFETY: `fd` is ours.
    unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL) };
    let mapped = allocated.and_then(|()| {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // The pages are there; now also their place in the page table, or each is a fault in some launch.
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
    fn a_zombie_has_the_status_that_it_ended_with() {
        let stat =
            |state: &str, status: &str| format!("77 (a) Z b) {state} 1 77 0 -1 4228 {}{status}\n", "0 ".repeat(43));
        assert_eq!(status_of_zombie(stat("Z", "1280").as_bytes()), Some(5));
        assert_eq!(status_of_zombie(stat("Z", "0").as_bytes()), Some(0));
        assert_eq!(status_of_zombie(stat("S", "0").as_bytes()), None);
        assert_eq!(status_of_zombie(b"77 (cut"), None);
    }

    #[test]
    fn nobody_takes_the_pages_of_a_ring_away() {
        let (fd, memory) = shared_memory(8192).unwrap();
        for size in [0, 4096, 1 << 20] {
            // SAFETY: the descriptor is ours.
            assert_eq!(unsafe { libc::ftruncate(fd, size) }, -1, "{size}");
        }
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: as above, and the mapping is 8192 bytes long. A hole reads as zeros and faults in again.
        unsafe {
            libc::fallocate(fd, hole, 0, 8192);
            memory.cast::<u8>().add(8191).write(7);
            libc::munmap(memory, 8192);
        }
        close(fd);
    }

    #[test]
    fn a_descriptor_closed_behind_our_back_is_not_ours_any_more() {
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

    #[test]
    fn a_value_is_made_once_and_nobody_waits_for_who_makes_it() {
        static MADE: Made<u32> = Made::new();
        assert_eq!(MADE.get(), None);
        // As a thread that never comes back from making it.
        let first = MADE.get_or_make(|| {
            assert_eq!(MADE.get_or_make(|| 1), &1);
            2
        });
        assert_eq!((first, MADE.get()), (&1, Some(&1)));
    }

    #[test]
    fn a_word_that_is_gone_is_an_error_and_no_fault() {
        let word = 7usize;
        assert_eq!(word_at(std::ptr::from_ref(&word) as usize).unwrap(), 7);
        for gone in [8, usize::MAX - 7] {
            assert_eq!(word_at(gone).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        }
    }

    #[test]
    fn the_coarse_clock_is_the_same_clock() {
        let (coarse, fine) = (coarse_now_ns(), now_ns());
        assert!(fine >= coarse && fine - coarse < 1_000_000_000, "{coarse} {fine}");
    }
}
