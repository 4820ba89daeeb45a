//! How py-spy reads the memory of another process, in place of the crate of the same name: whole pages, each of them once.
//!
//! py-spy follows one pointer at a time, some fifteen system calls for each Python frame. While [`through`] runs, the reads of
//! the calling thread are served from [`Pages`]. Pages that a first walk has touched can be fetched at once before a second
//! one, so that a process need be stopped only for as long as the fetching takes.
#![forbid(unsafe_code)]

use std::{
    cell::RefCell,
    collections::HashMap,
    fs::File,
    io::{self, IoSliceMut},
    os::unix::fs::FileExt,
    process::Child,
};

use nix::{
    errno::Errno,
    sys::uio::{RemoteIoVec, process_vm_readv},
};

const PAGE: usize = 4096;
/// Reads longer than this are scans of whole sections, which are not worth keeping.
const LONGEST_KEPT: usize = 64 << 10;
/// Pages fetched by one system call; the kernel takes at most 1,024 pieces.
const BATCH: usize = 512;
/// Pages kept at most: 64 MB.
const MOST_PAGES: usize = 16 << 10;
/// Reads that [`Pages::lenient`] answers with zeroes; whoever makes more of them follows nonsense and has to be told.
const MOST_FAILURES: usize = 1024;

/// A process id.
pub type Pid = nix::libc::pid_t;

/// Something that memory can be copied from.
pub trait CopyAddress {
    /// Fills `buf` with what lies at `addr`.
    ///
    /// # Errors
    /// When not all of it can be read.
    fn copy_address(&self, addr: usize, buf: &mut [u8]) -> io::Result<()>;
}

/// Copies `length` bytes.
///
/// # Errors
/// When not all of it can be read.
pub fn copy_address<T: CopyAddress>(addr: usize, length: usize, source: &T) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    source.copy_address(addr, &mut bytes)?;
    Ok(bytes)
}

/// A process whose memory is read.
#[derive(Debug, Clone)]
pub struct ProcessHandle(Pid);

impl TryFrom<Pid> for ProcessHandle {
    type Error = io::Error;

    fn try_from(pid: Pid) -> io::Result<Self> {
        Ok(ProcessHandle(pid))
    }
}

impl TryFrom<&Child> for ProcessHandle {
    type Error = io::Error;

    fn try_from(child: &Child) -> io::Result<Self> {
        Self::try_from(child.id() as Pid)
    }
}

impl CopyAddress for ProcessHandle {
    fn copy_address(&self, addr: usize, buf: &mut [u8]) -> io::Result<()> {
        if buf.len() <= LONGEST_KEPT {
            let served = PAGES.with_borrow_mut(|pages| match pages {
                Some(pages) if pages.pid == self.0 => pages.copy(addr, buf),
                _ => false,
            });
            if served {
                return Ok(());
            }
        }
        read_exact(self.0, addr, buf)
    }
}

/// Pages of one process, copied.
#[derive(Debug)]
pub struct Pages {
    pid: Pid,
    pages: HashMap<usize, Box<[u8]>>,
    misses: usize,
    lenient: bool,
    failures: usize,
}

thread_local! {
    static PAGES: RefCell<Option<Pages>> = const { RefCell::new(None) };
}

/// Serves this thread's reads from `pages` while `work` runs.
pub fn through<T>(pages: Pages, work: impl FnOnce() -> T) -> (T, Pages) {
    struct Restore(Option<Pages>);
    impl Drop for Restore {
        fn drop(&mut self) {
            PAGES.set(self.0.take());
        }
    }
    let pid = pages.pid;
    let restore = Restore(PAGES.replace(Some(pages)));
    let result = work();
    let pages = PAGES.take().unwrap_or_else(|| Pages::new(pid));
    drop(restore);
    (result, pages)
}

impl Pages {
    /// None yet.
    #[must_use]
    pub fn new(pid: Pid) -> Self {
        Pages { pid, pages: HashMap::new(), misses: 0, lenient: false, failures: 0 }
    }

    /// None yet, and what cannot be read reads as zeroes. Structures that are torn because a thread runs then end early,
    /// instead of costing those of all threads that do not.
    #[must_use]
    pub fn lenient(pid: Pid) -> Self {
        Pages { lenient: true, ..Pages::new(pid) }
    }

    /// Reads that were answered with zeroes.
    #[must_use]
    pub fn failures(&self) -> usize {
        self.failures
    }

    /// Addresses of all pages, ascending.
    #[must_use]
    pub fn addresses(&self) -> Vec<usize> {
        let mut addresses: Vec<usize> = self.pages.keys().copied().collect();
        addresses.sort_unstable();
        addresses
    }

    /// Reads that had to go to the process.
    #[must_use]
    pub fn misses(&self) -> usize {
        self.misses
    }

    /// False when the pages cannot serve the read.
    fn copy(&mut self, address: usize, buffer: &mut [u8]) -> bool {
        if self.copy_known(address, buffer) {
            return true;
        }
        self.failures += 1;
        let lenient = self.lenient && self.failures <= MOST_FAILURES;
        if lenient {
            buffer.fill(0);
        }
        lenient
    }

    fn copy_known(&mut self, address: usize, buffer: &mut [u8]) -> bool {
        let mut done = 0;
        while done < buffer.len() {
            let Some(at) = address.checked_add(done) else { return false };
            let (start, offset) = (at & !(PAGE - 1), at & (PAGE - 1));
            let length = (PAGE - offset).min(buffer.len() - done);
            if !self.pages.contains_key(&start) {
                self.misses += 1;
                if self.pages.len() >= MOST_PAGES {
                    return false;
                }
                let mut page = vec![0; PAGE].into_boxed_slice();
                if read_exact(self.pid, start, &mut page).is_err() {
                    return false;
                }
                self.pages.insert(start, page);
            }
            let Some(page) = self.pages.get(&start) else { return false };
            buffer[done..done + length].copy_from_slice(&page[offset..offset + length]);
            done += length;
        }
        true
    }
}

/// Room for pages that are known to be wanted, made before a stop so that during it there is nothing to do but to copy.
#[derive(Debug)]
pub struct Room {
    pid: Pid,
    addresses: Vec<usize>,
    bytes: Vec<u8>,
    whole: Vec<bool>,
}

impl Room {
    /// For the pages at these addresses.
    #[must_use]
    pub fn new(pid: Pid, addresses: Vec<usize>) -> Self {
        let mut bytes = vec![0; addresses.len() * PAGE];
        // Fresh memory costs a fault a page when it is first written, which would be during the stop.
        for page in bytes.chunks_mut(PAGE) {
            page[0] = std::hint::black_box(1);
        }
        let whole = vec![false; addresses.len()];
        Room { pid, addresses, bytes, whole }
    }

    /// Copies the pages, with as few system calls as possible. Those that cannot be read are left out.
    pub fn fill(&mut self) {
        let target = nix::unistd::Pid::from_raw(self.pid);
        let mut done = 0;
        while done < self.addresses.len() {
            let batch = &self.addresses[done..self.addresses.len().min(done + BATCH)];
            let remote: Vec<RemoteIoVec> = batch.iter().map(|base| RemoteIoVec { base: *base, len: PAGE }).collect();
            let local = &mut self.bytes[done * PAGE..(done + batch.len()) * PAGE];
            let read = process_vm_readv(target, &mut [IoSliceMut::new(local)], &remote).unwrap_or(0);
            let whole = read / PAGE;
            self.whole[done..done + whole].fill(true);
            // The call ends at the first page that cannot be read.
            done += if whole == batch.len() { whole } else { whole + 1 };
        }
    }

    /// What was copied, to be read through, leniently.
    #[must_use]
    pub fn into_pages(self) -> Pages {
        let mut pages = Pages::lenient(self.pid);
        for ((address, page), whole) in self.addresses.into_iter().zip(self.bytes.chunks(PAGE)).zip(self.whole) {
            if whole {
                pages.pages.insert(address, page.into());
            }
        }
        pages
    }
}

fn read_exact(pid: Pid, address: usize, buffer: &mut [u8]) -> io::Result<()> {
    let wanted = buffer.len();
    let remote = [RemoteIoVec { base: address, len: wanted }];
    match process_vm_readv(nix::unistd::Pid::from_raw(pid), &mut [IoSliceMut::new(buffer)], &remote) {
        Ok(read) if read == wanted => Ok(()),
        Ok(read) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{read} of {wanted} bytes"))),
        // Seccomp filters of containers forbid the call more often than the file.
        Err(Errno::ENOSYS | Errno::EPERM) => {
            File::open(format!("/proc/{pid}/mem"))?.read_exact_at(buffer, address as u64)
        }
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fetch(pid: Pid, addresses: &[usize]) -> Pages {
        let mut room = Room::new(pid, addresses.to_vec());
        room.fill();
        room.into_pages()
    }

    fn own() -> (Pid, ProcessHandle) {
        let pid = std::process::id() as Pid;
        (pid, ProcessHandle::try_from(pid).unwrap())
    }

    #[test]
    fn pages_keep_what_was_read() {
        let (pid, handle) = own();
        let text: Vec<u8> = (0..20_000).map(|index| index as u8).collect();
        let address = text.as_ptr() as usize;
        let ((), pages) = through(Pages::new(pid), || {
            assert_eq!(copy_address(address, text.len(), &handle).unwrap(), text);
            assert_eq!(copy_address(address + 5000, 10, &handle).unwrap(), text[5000..5010]);
        });
        assert!(pages.misses() >= 5 && pages.misses() <= 6, "one for each page: {}", pages.misses());
        let fetched = fetch(pid, &pages.addresses());
        assert_eq!(fetched.addresses(), pages.addresses());
        let ((), fetched) = through(fetched, || {
            assert_eq!(copy_address(address, text.len(), &handle).unwrap(), text);
        });
        assert_eq!(fetched.misses(), 0);
    }

    #[test]
    fn pages_that_cannot_be_read_are_left_out() {
        let (pid, handle) = own();
        let text = vec![1u8; 3 * PAGE];
        let page = (text.as_ptr() as usize + PAGE - 1) & !(PAGE - 1);
        let fetched = fetch(pid, &[0, page, PAGE, page + PAGE]);
        assert_eq!(fetched.addresses(), [page, page + PAGE]);
        let (result, _) = through(Pages::new(pid), || copy_address(16, 8, &handle));
        assert!(result.is_err());
        assert!(fetch(pid, &[]).addresses().is_empty());
    }

    #[test]
    fn lenient_pages_read_zeroes_and_count_them() {
        let (pid, handle) = own();
        let (read, pages) = through(Pages::lenient(pid), || copy_address(16, 8, &handle).unwrap());
        assert_eq!((read, pages.failures()), (vec![0; 8], 1));
        let endless = || (0..=MOST_FAILURES).all(|_| copy_address(16, 8, &handle).is_ok());
        assert!(!through(Pages::lenient(pid), endless).0, "nonsense is not followed for ever");
    }
}
