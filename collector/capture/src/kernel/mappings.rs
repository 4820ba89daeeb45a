//! The mappings of a process, queried one by one: a rank maps thousands of files, and its stacks
//! touch a few dozen. Kernels before 6.11 have no such query, so all mappings are listed there. The
//! mappings that processes share are listed once for each process of a capture.

use std::{
    cell::{OnceCell, RefCell},
    collections::HashMap,
    fs::File,
    io,
    os::fd::AsRawFd,
    path::PathBuf,
    rc::Rc,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Instant,
};

use xpu_timer_proto::procfs::{self, Mapping};

use crate::error::Error;

/// The writable mappings that processes share. The ranks of a node are of one family, and each of
/// them may poll the memory of any other.
#[derive(Default)]
pub(crate) struct SharedMemory {
    of_processes: Mutex<HashMap<i32, Arc<OnceLock<Vec<Mapping>>>>>,
}

impl SharedMemory {
    /// Calls `use_mappings` with the mappings of a process; there are none if they cannot be read.
    /// `None` if they have not been read before the deadline.
    pub(crate) fn of<T>(&self, pid: i32, deadline: Instant, use_mappings: impl FnOnce(&[Mapping]) -> T) -> Option<T> {
        let mut of_processes = self.of_processes.lock().unwrap_or_else(PoisonError::into_inner);
        let mappings = Arc::clone(of_processes.entry(pid).or_default());
        drop(of_processes);
        if mappings.get().is_none() && Instant::now() >= deadline {
            return None;
        }
        Some(use_mappings(mappings.get_or_init(|| procfs::shared_mappings(pid).unwrap_or_default())))
    }
}

/// `PROCMAP_QUERY` of linux/fs.h: `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::c_ulong = 0xc068_6611;
const VMA_READABLE: u64 = 0x01;
const VMA_EXECUTABLE: u64 = 0x04;
const COVERING_OR_NEXT_VMA: u64 = 0x10;
const FILE_BACKED_VMA: u64 = 0x20;
/// The longest path that the kernel prints, with its terminator.
const MAX_NAME_BYTES: usize = 4096;

/// `struct procmap_query`.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    vma_flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    major: u32,
    minor: u32,
    name_size: u32,
    build_id_size: u32,
    name_address: u64,
    build_id_address: u64,
}

/// The mappings of one process.
pub(crate) struct Mappings {
    pid: i32,
    tid: i32,
    maps: File,
    /// Mappings that were queried, ascending.
    queried: RefCell<Vec<Rc<Mapping>>>,
    /// All mappings, ascending, once they were listed.
    all: OnceCell<Vec<Rc<Mapping>>>,
}

/// Result of a query to the kernel.
enum QueryResult {
    Mapping(Mapping),
    /// There is no such mapping.
    None,
    /// The kernel has no such query.
    Unsupported,
}

impl Mappings {
    /// Opens the mappings of a process through one of its live threads.
    pub(crate) fn open(pid: i32, tid: i32) -> Result<Self, Error> {
        let path = PathBuf::from(format!("/proc/{pid}/task/{tid}/maps"));
        let maps = File::open(&path).map_err(|source| procfs::Error { path, source })?;
        Ok(Mappings { pid, tid, maps, queried: RefCell::default(), all: OnceCell::new() })
    }

    /// The mapping that contains an address.
    pub(crate) fn at(&self, address: u64) -> Option<Rc<Mapping>> {
        let known = self.known(address);
        if known.is_some() || self.all.get().is_some() {
            return known;
        }
        match self.query(address, 0) {
            QueryResult::Mapping(mapping) => {
                let mapping = Rc::new(mapping);
                let mut queried = self.queried.borrow_mut();
                let place = queried.partition_point(|other| other.start <= mapping.start);
                queried.insert(place, Rc::clone(&mapping));
                Some(mapping)
            }
            QueryResult::None => None,
            QueryResult::Unsupported => covering(self.all(), address).cloned(),
        }
    }

    /// The mapping that contains an address, if it is known without a query to the kernel.
    pub(crate) fn known(&self, address: u64) -> Option<Rc<Mapping>> {
        match self.all.get() {
            Some(all) => covering(all, address).cloned(),
            None => covering(&self.queried.borrow(), address).cloned(),
        }
    }

    /// The first executable mapping of a file that contains `address` or lies above it.
    pub(crate) fn next_executable(&self, address: u64) -> Option<Rc<Mapping>> {
        match self.query(address, COVERING_OR_NEXT_VMA | FILE_BACKED_VMA | VMA_EXECUTABLE) {
            QueryResult::Mapping(mapping) => Some(Rc::new(mapping)),
            QueryResult::None => None,
            QueryResult::Unsupported => {
                let is_next =
                    |mapping: &&Rc<Mapping>| mapping.end > address && mapping.executable && mapping.inode != 0;
                self.all().iter().find(is_next).cloned()
            }
        }
    }

    /// The executable mappings of files, ascending.
    pub(crate) fn executables(&self) -> Vec<Rc<Mapping>> {
        let first = self.next_executable(0);
        // The loop must end even if a process maps and unmaps all the time.
        std::iter::successors(first, |last| self.next_executable(last.end).filter(|next| next.end > last.end)).collect()
    }

    /// All mappings, ascending. This is slow: it takes milliseconds for a process that has loaded
    /// many libraries.
    pub(crate) fn all(&self) -> &[Rc<Mapping>] {
        self.all.get_or_init(|| {
            let mut all = procfs::maps(self.pid, self.tid).unwrap_or_default();
            all.sort_by_key(|mapping| mapping.start);
            all.into_iter().map(Rc::new).collect()
        })
    }

    #[allow(unsafe_code)]
    fn query(&self, address: u64, flags: u64) -> QueryResult {
        if self.all.get().is_some() {
            return QueryResult::Unsupported;
        }
        let mut name = [0u8; MAX_NAME_BYTES];
        let mut query = Query {
            size: size_of::<Query>() as u64,
            flags,
            address,
            name_size: MAX_NAME_BYTES as u32,
            name_address: name.as_mut_ptr() as u64,
            ..Query::default()
        };
        // SAFETY: the kernel reads and writes `query`, whose size is in its first field, and writes
        // at most `name_size` bytes to `name`. Both live until the call returns. A file that does
        // not support the request fails with ENOTTY.
        let result = unsafe { libc::ioctl(self.maps.as_raw_fd(), PROCMAP_QUERY as _, &raw mut query) };
        if result != 0 {
            let error = io::Error::last_os_error();
            // ENOENT: nothing is mapped there. ESRCH: the process no longer has an address space.
            return match error.raw_os_error() {
                Some(libc::ENOENT | libc::ESRCH) => QueryResult::None,
                _ => QueryResult::Unsupported,
            };
        }
        // The size includes the terminator, and is 0 without a name.
        let name = &name[..(query.name_size as usize).saturating_sub(1).min(MAX_NAME_BYTES)];
        QueryResult::Mapping(Mapping {
            start: query.start,
            end: query.end,
            offset: query.offset,
            executable: query.vma_flags & VMA_EXECUTABLE != 0,
            readable: query.vma_flags & VMA_READABLE != 0,
            device: (query.major, query.minor),
            inode: query.inode,
            path: String::from_utf8_lossy(name).into_owned(),
        })
    }
}

fn covering(mappings: &[Rc<Mapping>], address: u64) -> Option<&Rc<Mapping>> {
    let after = mappings.partition_point(|mapping| mapping.start <= address);
    mappings.get(after.checked_sub(1)?).filter(|mapping| address < mapping.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_agree_with_the_list() {
        let pid = std::process::id() as i32;
        let (one_by_one, listed) = (Mappings::open(pid, pid).unwrap(), Mappings::open(pid, pid).unwrap());
        listed.all();
        let local = 0;
        for address in [queries_agree_with_the_list as *const () as u64, &raw const local as u64] {
            let (queried, listed) = (one_by_one.at(address).unwrap(), listed.at(address).unwrap());
            assert!(queried.start <= address && address < queried.end);
            assert_eq!((&queried.path, queried.offset, queried.inode), (&listed.path, listed.offset, listed.inode));
            assert_eq!(
                (queried.executable, queried.readable, queried.device),
                (listed.executable, listed.readable, listed.device)
            );
        }
        assert!(one_by_one.at(8).is_none() && listed.at(8).is_none());
        let paths = |mappings: &Mappings| {
            mappings.executables().iter().map(|executables| executables.path.clone()).collect::<Vec<_>>()
        };
        assert_eq!(paths(&one_by_one), paths(&listed));
        assert!(paths(&listed).iter().any(|path| path.contains("libc")));
    }
}
