//! The processes that have a pipe, a socket, an event or a file open. The table is read once for
//! all processes of a capture.

use std::{
    collections::HashMap,
    fs, io,
    sync::OnceLock,
    time::{Duration, Instant},
};

use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{OFlag, readlinkat},
    sys::stat::Mode,
};
use xpu_timer_proto::procfs::{self, MAX_FILES};

/// Time limit to read the descriptors of all processes: a busy node has a hundred thousand.
const TIMEOUT: Duration = Duration::from_millis(250);

/// An open descriptor of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub pid: i32,
    pub number: i32,
}

/// The open descriptors of all processes whose descriptors may be read.
#[derive(Default)]
pub(crate) struct OpenFiles {
    table: OnceLock<Table>,
}

#[derive(Default)]
struct Table {
    /// By the text of the link in `/proc/PID/fd`.
    by_link: HashMap<Box<str>, Vec<Descriptor>>,
    /// All descriptors of all processes could be read.
    complete: bool,
}

impl OpenFiles {
    /// Reads the table if that has not been done. All searches of a capture share it, so its time
    /// counts for none of them.
    pub(crate) fn read(&self, deadline: Instant) {
        self.table.get_or_init(|| Table::read(deadline.min(Instant::now() + TIMEOUT)));
    }

    #[cfg(test)]
    pub(crate) fn is_read(&self) -> bool {
        self.table.get().is_some()
    }

    /// The descriptors with this link, ascending by pid, and whether there can be no others.
    pub(crate) fn of(&self, link: &str, deadline: Instant) -> (&[Descriptor], bool) {
        self.read(deadline);
        let table = self.table.get();
        let found = table.and_then(|table| table.by_link.get(link)).map_or(&[][..], Vec::as_slice);
        (found, table.is_some_and(|table| table.complete))
    }
}

impl Table {
    fn read(deadline: Instant) -> Self {
        let mut table = Table { complete: true, ..Table::default() };
        let kernel_threads = kernel_threads();
        let has_none = |pid: &i32| match &kernel_threads {
            Some(threads) => threads.binary_search(pid).is_ok(),
            None => has_no_program(*pid),
        };
        let mut pids: Vec<i32> = procfs::pids().collect();
        pids.sort_unstable();
        for pid in pids {
            if Instant::now() >= deadline {
                table.complete = false;
                break;
            }
            table.complete &= has_none(&pid)
                || each_link(pid, |number, link| {
                    table.by_link.entry(link.into_boxed_str()).or_default().push(Descriptor { pid, number });
                });
        }
        table
    }
}

/// Most processes of a large machine are threads of the kernel. They have no descriptors; a look
/// into the folder of one takes six system calls. All of them, ascending, are children of one
/// thread, which is not visible in a PID namespace of its own. `None` if the kernel lists no
/// children.
fn kernel_threads() -> Option<Vec<i32>> {
    const PARENT: i32 = 2;
    if has_no_program(PARENT) { procfs::children(PARENT, 1) } else { Some(Vec::new()) }
}

/// Whether a process is a thread of the kernel, or has ended.
fn has_no_program(pid: i32) -> bool {
    fs::read_link(format!("/proc/{pid}/exe")).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Passes the number and the link of each descriptor of a process to `each`. Returns whether all
/// could be read.
pub(super) fn each_link(pid: i32, mut each: impl FnMut(i32, String)) -> bool {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut folder = match Dir::open(format!("/proc/{pid}/fd").as_str(), flags, Mode::empty()) {
        Ok(folder) => folder,
        Err(error) => return error == Errno::ENOENT,
    };
    let names: Vec<_> = folder.iter().flatten().map(|entry| entry.file_name().to_owned()).collect();
    for (count, name) in names.iter().enumerate() {
        let Some(number) = name.to_str().ok().and_then(|name| name.parse().ok()) else { continue };
        if count == MAX_FILES {
            return false;
        }
        // The kernel holds the names that the link is made of, so reading it involves no file
        // system. Relative to the folder, it does not look the process up again.
        match readlinkat(&folder, name.as_c_str()) {
            Ok(link) => each(number, link.to_string_lossy().into_owned()),
            // Its other links may not be read either.
            Err(Errno::EACCES) => break,
            Err(_) => {}
        }
    }
    true
}

/// The text of a descriptor's link, such as `pipe:[4242]` or a path.
pub(crate) fn link_of(Descriptor { pid, number }: Descriptor) -> Option<String> {
    Some(fs::read_link(format!("/proc/{pid}/fd/{number}")).ok()?.to_string_lossy().into_owned())
}

/// The contents of `/proc/PID/fdinfo/N`; empty if there are none.
pub(crate) fn info(Descriptor { pid, number }: Descriptor) -> String {
    fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default()
}

/// How a descriptor was opened, as in `fcntl.h`.
pub(crate) fn access_mode(descriptor: Descriptor) -> Option<i32> {
    let flags = i32::from_str_radix(procfs::field(&info(descriptor), "flags:")?, 8).ok()?;
    Some(flags & libc::O_ACCMODE)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn threads_of_the_kernel_are_not_programs() {
        let threads = kernel_threads().unwrap_or_default();
        assert!(threads.iter().all(|pid| has_no_program(*pid)));
        let listed = procfs::pids().filter(|pid| threads.contains(pid)).count();
        assert!(listed > 0 || threads.is_empty(), "none of them has a folder");
        assert!(!has_no_program(std::process::id() as i32));
    }

    #[test]
    fn each_descriptor_has_its_link() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let own = std::process::id() as i32;
        let descriptor = Descriptor { pid: own, number: file.as_file().as_raw_fd() };
        let mut link = String::new();
        assert!(each_link(own, |number, found| if number == descriptor.number {
            link = found;
        }));
        assert_eq!(Some(&link), link_of(descriptor).as_ref());
        let files = OpenFiles::default();
        assert!(files.of(&link, Instant::now() + Duration::from_secs(60)).0.contains(&descriptor));
        assert!(each_link(i32::MAX, |_, _| panic!("there is no such process")));
    }
}
