//! The mappings of a process, asked for one by one: a rank maps thousands of them, and its stacks touch a few dozen. Kernels
//! before 6.11 cannot be asked so and are made to list them all.

use std::{
    cell::{OnceCell, RefCell},
    fs::File,
    io,
    os::fd::AsRawFd,
    path::PathBuf,
    rc::Rc,
};

use crate::error::Error;

use super::procfs::{self, Mapping};

/// `PROCMAP_QUERY` of linux/fs.h: `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::c_ulong = 0xc068_6611;
const VMA_READABLE: u64 = 0x01;
const VMA_EXECUTABLE: u64 = 0x04;
const COVERING_OR_NEXT_VMA: u64 = 0x10;
const FILE_BACKED_VMA: u64 = 0x20;
/// The longest path that the kernel prints, with its end.
const LONGEST_NAME: usize = 4096;

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
    /// Those that were asked for, ascending.
    asked: RefCell<Vec<Rc<Mapping>>>,
    /// All of them, ascending, once that was needed.
    all: OnceCell<Vec<Rc<Mapping>>>,
}

/// What the kernel says to a question.
enum Answer {
    Mapping(Mapping),
    /// There is no such mapping.
    None,
    /// It cannot be asked.
    Unknown,
}

impl Mappings {
    /// Of a process, by one of its live threads.
    pub fn open(pid: i32, tid: i32) -> Result<Self, Error> {
        let path = PathBuf::from(format!("/proc/{pid}/task/{tid}/maps"));
        let maps = File::open(&path).map_err(|source| Error::Procfs { path, source })?;
        Ok(Mappings { pid, tid, maps, asked: RefCell::default(), all: OnceCell::new() })
    }

    /// The mapping that holds an address.
    pub fn at(&self, address: u64) -> Option<Rc<Mapping>> {
        let known = self.known(address);
        if known.is_some() || self.all.get().is_some() {
            return known;
        }
        match self.ask(address, 0) {
            Answer::Mapping(mapping) => {
                let mapping = Rc::new(mapping);
                let mut asked = self.asked.borrow_mut();
                let place = asked.partition_point(|other| other.start <= mapping.start);
                asked.insert(place, Rc::clone(&mapping));
                Some(mapping)
            }
            Answer::None => None,
            Answer::Unknown => covering(self.all(), address).cloned(),
        }
    }

    /// The mapping that holds an address, as far as that can be told without asking the kernel.
    pub fn known(&self, address: u64) -> Option<Rc<Mapping>> {
        match self.all.get() {
            Some(all) => covering(all, address).cloned(),
            None => covering(&self.asked.borrow(), address).cloned(),
        }
    }

    /// The first mapping from an address on of code that lies in a file.
    pub fn next_code(&self, address: u64) -> Option<Rc<Mapping>> {
        match self.ask(address, COVERING_OR_NEXT_VMA | FILE_BACKED_VMA | VMA_EXECUTABLE) {
            Answer::Mapping(mapping) => Some(Rc::new(mapping)),
            Answer::None => None,
            Answer::Unknown => {
                let is_next =
                    |mapping: &&Rc<Mapping>| mapping.end > address && mapping.executable && mapping.inode != 0;
                self.all().iter().find(is_next).cloned()
            }
        }
    }

    /// The mappings of code that lies in files, ascending.
    pub fn code(&self) -> Vec<Rc<Mapping>> {
        let first = self.next_code(0);
        // A process that maps and unmaps all the time must not keep us here.
        std::iter::successors(first, |last| self.next_code(last.end).filter(|next| next.end > last.end)).collect()
    }

    /// All mappings, ascending. This is slow: milliseconds for a process that has loaded many libraries.
    pub fn all(&self) -> &[Rc<Mapping>] {
        self.all.get_or_init(|| {
            let mut all = procfs::maps(self.pid, self.tid).unwrap_or_default();
            all.sort_by_key(|mapping| mapping.start);
            all.into_iter().map(Rc::new).collect()
        })
    }

    #[allow(unsafe_code)]
    fn ask(&self, address: u64, flags: u64) -> Answer {
        if self.all.get().is_some() {
            return Answer::Unknown;
        }
        let mut name = [0u8; LONGEST_NAME];
        let mut query = Query {
            size: size_of::<Query>() as u64,
            flags,
            address,
            name_size: LONGEST_NAME as u32,
            name_address: name.as_mut_ptr() as u64,
            ..Query::default()
        };
        // SAFETY: the kernel reads and writes `query`, which has the size that it names, and writes at most `name_size` bytes
        // to `name`. A file that knows no such request fails with ENOTTY.
        let result = unsafe { libc::ioctl(self.maps.as_raw_fd(), PROCMAP_QUERY as _, &raw mut query) };
        if result != 0 {
            let error = io::Error::last_os_error();
            // ENOENT: nothing there. ESRCH: the process has no memory any more.
            return match error.raw_os_error() {
                Some(libc::ENOENT | libc::ESRCH) => Answer::None,
                _ => Answer::Unknown,
            };
        }
        // The size includes the end of the text, and is 0 without one.
        let name = &name[..(query.name_size as usize).saturating_sub(1).min(LONGEST_NAME)];
        Answer::Mapping(Mapping {
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
    fn one_by_one_or_all_at_once() {
        let pid = std::process::id() as i32;
        let (one_by_one, listed) = (Mappings::open(pid, pid).unwrap(), Mappings::open(pid, pid).unwrap());
        listed.all();
        let local = 0;
        for address in [one_by_one_or_all_at_once as *const () as u64, &raw const local as u64] {
            let (asked, listed) = (one_by_one.at(address).unwrap(), listed.at(address).unwrap());
            assert!(asked.start <= address && address < asked.end);
            assert_eq!((&asked.path, asked.offset, asked.inode), (&listed.path, listed.offset, listed.inode));
            assert_eq!(
                (asked.executable, asked.readable, asked.device),
                (listed.executable, listed.readable, listed.device)
            );
        }
        assert!(one_by_one.at(8).is_none() && listed.at(8).is_none());
        let paths = |mappings: &Mappings| mappings.code().iter().map(|code| code.path.clone()).collect::<Vec<_>>();
        assert_eq!(paths(&one_by_one), paths(&listed));
        assert!(paths(&listed).iter().any(|path| path.contains("libc")));
    }
}
