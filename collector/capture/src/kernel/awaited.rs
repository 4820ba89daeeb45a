//! Finds what the system call of a blocked thread waits for: a file, the other end of a pipe or a
//! socket, the holder of a lock, a child. It reads only the kernel's tables and the memory of the
//! process. It never touches a file itself, because the file may be on a file system that does not
//! answer.

mod descriptor;
mod locks;
mod search;
mod sockets;

use std::{
    collections::{BTreeSet, HashMap},
    time::{Duration, Instant},
};

use xpu_timer_proto::{
    LISTENS, WATCHER_THREAD,
    procfs::{self, Syscall},
    server::{Awaited, AwaitedKind, Holder},
};

use super::{
    Tables,
    open_files::{self, Descriptor},
};
use crate::memory;
use search::{MAX_HOLDERS, Operation, Search, absolute};

/// Time limit of the search. The stacks of the process are already captured and must not be late
/// because of it.
const TIMEOUT: Duration = Duration::from_millis(100);
/// Maximum number of descriptors that one call waits for.
const MAX_POLLED: usize = 64;

/// Maximum number of threads of one process, besides the main thread, that are examined.
const MAX_THREADS: usize = 64;

/// A system call and its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    pub number: i64,
    pub arguments: [u64; 6],
}

impl Call {
    /// The system call in which a thread sleeps. `None` if it does not sleep in one.
    pub(crate) fn of(syscall: &Syscall) -> Option<Self> {
        match *syscall {
            Syscall::Blocked { number, arguments: Some(arguments), .. } => Some(Call { number, arguments }),
            _ => None,
        }
    }
}

/// A thread whose wait is examined.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sleeper<'a> {
    pub tid: i32,
    pub name: &'a str,
    /// The kernel function that it sleeps in; may be empty.
    pub wchan: &'a str,
    /// The call in which it slept when its stack was read.
    pub call: Option<Call>,
}

impl Sleeper<'_> {
    /// Whether the thread sleeps for a time, or runs. Such a thread may poll memory.
    fn may_poll(&self) -> bool {
        self.call.is_none_or(|call| [libc::SYS_nanosleep, libc::SYS_clock_nanosleep].contains(&call.number))
    }
}

/// The wait of one thread.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    /// The object that it waits for, if known. The holders and the peer are missing if they are not
    /// found in time.
    pub awaited: Option<Awaited>,
    /// The call ends after a timeout. `None` if the thread was not examined.
    pub timed: Option<bool>,
    /// The processes that share memory with the process, if this is a main thread that may poll it.
    pub sharers: Vec<Holder>,
}

/// The waits of the threads of a process, by thread id. The owner of a lock is searched for only if
/// the main thread wants it.
pub(crate) fn of_process(pid: i32, threads: &[Sleeper<'_>], tables: &Tables, deadline: Instant) -> HashMap<i32, Waits> {
    let of = |thread: &Sleeper<'_>, deadline: Instant, what: Wanted| {
        Some((thread.tid, of_thread(pid, thread, tables, deadline, what)?))
    };
    let (main, others): (Vec<&Sleeper<'_>>, Vec<&Sleeper<'_>>) = threads.iter().partition(|thread| thread.tid == pid);
    let mut found: HashMap<i32, Waits> = main.iter().filter_map(|main| of(main, deadline, Wanted::All)).collect();
    for main in main.into_iter().filter(|main| main.may_poll()) {
        let search = Search::new(pid, main.wchan, tables, deadline.min(Instant::now() + TIMEOUT));
        found.entry(main.tid).or_default().sharers = locks::sharers_of_memory(&search);
    }
    let others: Vec<&Sleeper<'_>> =
        others.into_iter().filter(|thread| thread.name != WATCHER_THREAD).take(MAX_THREADS).collect();
    // The table of open files has a time limit of its own.
    if others.iter().filter_map(|thread| thread.call).any(|call| waits_for_descriptor(call.number, &call.arguments)) {
        tables.open_files.read(deadline);
    }
    // All others together have as much time as the main thread.
    let deadline = deadline.min(Instant::now() + TIMEOUT);
    found.extend(others.into_iter().filter_map(|thread| of(thread, deadline, Wanted::NoLocks)));
    found
}

/// The objects to search for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    All,
    /// Not the owners of locks of threads: a process has many threads that wait for each other.
    NoLocks,
}

/// The wait of a thread that sleeps in a system call. `None` if it does not.
fn of_thread(pid: i32, thread: &Sleeper<'_>, tables: &Tables, deadline: Instant, wanted: Wanted) -> Option<Waits> {
    let Call { number, arguments } = thread.call?;
    if waits_for_descriptor(number, &arguments) {
        tables.open_files.read(deadline);
    }
    let deadline = deadline.min(Instant::now() + TIMEOUT);
    let search = Search::new(pid, thread.wchan, tables, deadline);
    let is_left_out = wanted == Wanted::NoLocks && number == libc::SYS_futex;
    let awaited = if is_left_out { None } else { awaited(&search, number, &arguments) };
    Some(Waits { awaited, timed: Some(has_timeout(number, &arguments)), sharers: Vec::new() })
}

/// Whether a system call waits for descriptors, so that a search needs the table of open files.
fn waits_for_descriptor(number: i64, arguments: &[u64; 6]) -> bool {
    const SEVERAL: [i64; 8] = [
        libc::SYS_connect,
        libc::SYS_poll,
        libc::SYS_ppoll,
        libc::SYS_select,
        libc::SYS_pselect6,
        libc::SYS_epoll_wait,
        libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2,
    ];
    SEVERAL.contains(&number) || operation_of(number, arguments).is_some()
}

/// Whether a system call ends after a timeout. A socket may have a timeout of its own, which does
/// not count.
fn has_timeout(number: i64, arguments: &[u64; 6]) -> bool {
    match number {
        // A negative number of milliseconds means no timeout.
        libc::SYS_poll => arguments[2] as i32 >= 0,
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => arguments[3] as i32 >= 0,
        libc::SYS_futex | libc::SYS_epoll_pwait2 | libc::SYS_semtimedop => arguments[3] != 0,
        libc::SYS_ppoll | libc::SYS_rt_sigtimedwait => arguments[2] != 0,
        libc::SYS_select | libc::SYS_pselect6 | libc::SYS_mq_timedreceive | libc::SYS_mq_timedsend => arguments[4] != 0,
        // The kernel restarts a call with a timeout this way after a stop.
        libc::SYS_nanosleep | libc::SYS_clock_nanosleep | libc::SYS_restart_syscall => true,
        _ => false,
    }
}

/// The object that a system call waits for.
fn awaited(search: &Search<'_>, number: i64, arguments: &[u64; 6]) -> Option<Awaited> {
    let pid = search.pid;
    match number {
        libc::SYS_open => opened(pid, libc::AT_FDCWD, arguments[0]),
        libc::SYS_openat => opened(pid, arguments[0] as i32, arguments[1]),
        libc::SYS_connect => sockets::connection(search, arguments[1], arguments[2]),
        libc::SYS_sendto if arguments[4] != 0 => sockets::connection(search, arguments[4], arguments[5]),
        libc::SYS_futex => locks::futex(search, arguments[0], arguments[1]),
        libc::SYS_wait4 | libc::SYS_waitid => child(search, number, arguments[0], arguments[1]),
        libc::SYS_semop | libc::SYS_semtimedop => locks::semaphore(search, arguments[0], arguments[1]),
        libc::SYS_msgrcv => locks::message_queue(search, arguments[0], true),
        libc::SYS_msgsnd => locks::message_queue(search, arguments[0], false),
        libc::SYS_poll | libc::SYS_ppoll => several(search, polled(pid, arguments[0], arguments[1])),
        libc::SYS_select | libc::SYS_pselect6 => several(search, selected(pid, arguments)),
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => {
            several(search, watched(pid, arguments[0]))
        }
        _ => {
            let operation = operation_of(number, arguments)?;
            let descriptor = Descriptor { pid, number: i32::try_from(arguments[0]).ok()? };
            descriptor::awaited(search, descriptor, operation)
        }
    }
}

/// The file that a call opens whose path is at `address`: a named pipe without its other end, or a
/// file on a file system that does not answer. A relative path begins at the folder `from`.
fn opened(pid: i32, from: i32, address: u64) -> Option<Awaited> {
    const PAGE: u64 = 4096;
    let in_page = PAGE - address % PAGE;
    let mut bytes = memory::read_exact(pid, address, in_page as usize).ok()?;
    if !bytes.contains(&0) {
        bytes.extend(memory::read_exact(pid, address + in_page, PAGE as usize).ok()?);
    }
    let path = bytes.split(|byte| *byte == 0).next()?;
    let name = String::from_utf8_lossy(path).into_owned();
    let name = (!name.is_empty()).then(|| absolute(pid, from, name))?;
    Some(Awaited { kind: AwaitedKind::File.into(), name, ..Awaited::default() })
}

fn operation_of(number: i64, arguments: &[u64; 6]) -> Option<Operation> {
    match number {
        libc::SYS_recvfrom if arguments[4] == 0 => Some(Operation::Receive),
        libc::SYS_read
        | libc::SYS_readv
        | libc::SYS_pread64
        | libc::SYS_recvfrom
        | libc::SYS_recvmsg
        | libc::SYS_mq_timedreceive => Some(Operation::Read),
        libc::SYS_write
        | libc::SYS_writev
        | libc::SYS_pwrite64
        | libc::SYS_sendto
        | libc::SYS_sendmsg
        | libc::SYS_mq_timedsend => Some(Operation::Write),
        libc::SYS_fsync | libc::SYS_fdatasync => Some(Operation::Write),
        libc::SYS_accept | libc::SYS_accept4 => Some(Operation::Accept),
        libc::SYS_flock => Some(Operation::Lock),
        libc::SYS_fcntl => {
            let command = i32::try_from(arguments[1]).unwrap_or(0);
            matches!(command, libc::F_SETLKW | libc::F_OFD_SETLKW).then_some(Operation::Lock)
        }
        _ => None,
    }
}

/// The descriptors and operations of a `pollfd` array.
fn polled(pid: i32, address: u64, count: u64) -> Vec<(i32, Operation)> {
    let count = usize::try_from(count).unwrap_or(0).min(MAX_POLLED);
    let bytes = memory::read_exact(pid, address, count * size_of::<libc::pollfd>()).unwrap_or_default();
    let entry = |entry: &[u8]| {
        let number = i32::from_ne_bytes(entry[..4].try_into().ok()?);
        let events = i16::from_ne_bytes(entry[4..6].try_into().ok()?);
        let operation = if events & libc::POLLIN != 0 { Operation::Read } else { Operation::Write };
        (number >= 0 && events & (libc::POLLIN | libc::POLLOUT) != 0).then_some((number, operation))
    };
    bytes.chunks_exact(size_of::<libc::pollfd>()).filter_map(entry).collect()
}

/// The descriptors and operations of the sets that `select` reads.
fn selected(pid: i32, arguments: &[u64; 6]) -> Vec<(i32, Operation)> {
    let highest = usize::try_from(arguments[0]).unwrap_or(0).min(libc::FD_SETSIZE);
    let set = |address: u64, operation| {
        let bytes = if address == 0 { Vec::new() } else { memory::read_exact(pid, address, 128).unwrap_or_default() };
        let is_in = move |number: &usize| bytes.get(number / 8).is_some_and(|byte| byte >> (number % 8) & 1 != 0);
        (0..highest).filter(is_in).map(move |number| (number as i32, operation)).take(MAX_POLLED)
    };
    set(arguments[1], Operation::Read).chain(set(arguments[2], Operation::Write)).collect()
}

/// The descriptors and operations that an epoll descriptor watches.
fn watched(pid: i32, epoll: u64) -> Vec<(i32, Operation)> {
    let Ok(number) = i32::try_from(epoll) else { return Vec::new() };
    let info = open_files::info(Descriptor { pid, number });
    let target = |line: &str| {
        let mut fields = line.strip_prefix("tfd:")?.split_whitespace();
        let number = fields.next()?.parse().ok()?;
        let events = u32::from_str_radix(fields.nth(1)?, 16).ok()?;
        let reads = events & libc::EPOLLIN as u32 != 0;
        let writes = events & libc::EPOLLOUT as u32 != 0;
        (reads || writes).then_some((number, if reads { Operation::Read } else { Operation::Write }))
    };
    info.lines().filter_map(target).take(MAX_POLLED).collect()
}

/// A call that waits for any of these descriptors. Those whose other end only the process itself
/// has, such as the pipe that wakes an event loop, are left out, unless there is no other.
fn several(search: &Search<'_>, descriptors: Vec<(i32, Operation)>) -> Option<Awaited> {
    let found: Vec<Awaited> = descriptors
        .into_iter()
        .filter_map(|(number, operation)| {
            descriptor::awaited(search, Descriptor { pid: search.pid, number }, operation)
        })
        .collect();
    let is_own = |one: &Awaited| !one.holders.is_empty() && one.holders.iter().all(|holder| holder.pid == search.pid);
    let (own, mut others): (Vec<Awaited>, Vec<Awaited>) = found.into_iter().partition(is_own);
    if others.len() <= 1 {
        return others.pop().or_else(|| own.into_iter().next());
    }
    // A server waits for clients, whatever else it waits for.
    let name = others.iter().map(|one| &one.name).find(|name| name.starts_with(LISTENS)).cloned();
    let mut seen = BTreeSet::new();
    let holders = others.into_iter().flat_map(|one| one.holders).filter(|holder| seen.insert(holder.pid));
    let holders = holders.take(MAX_HOLDERS).collect();
    Some(Awaited { kind: AwaitedKind::Several.into(), name: name.unwrap_or_default(), holders, ..Awaited::default() })
}

/// A call that waits for the end of a child.
fn child(search: &Search<'_>, number: i64, first: u64, second: u64) -> Option<Awaited> {
    let wanted = match number {
        // 0 and negative numbers mean any child, or any of a process group.
        libc::SYS_wait4 => Some(first as i32).filter(|pid| *pid > 0),
        _ if first == libc::P_PID as u64 => Some(second as i32),
        _ if first == libc::P_PIDFD as u64 => {
            let info = open_files::info(Descriptor { pid: search.pid, number: second as i32 });
            procfs::field(&info, "Pid:").and_then(|pid| pid.parse().ok())
        }
        _ => None,
    };
    let children = wanted.map_or_else(|| procfs::children(search.pid, usize::MAX).unwrap_or_default(), |pid| vec![pid]);
    let holders = search.holders(children);
    Some(Awaited { kind: AwaitedKind::Child.into(), holders, ..Awaited::default() })
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{Read, Write},
        net::{TcpListener, TcpStream},
        os::{
            fd::{AsFd, OwnedFd},
            unix::net::{UnixDatagram, UnixStream},
        },
    };

    use xpu_timer_proto::REPLIES;

    use super::*;

    /// Runs something that blocks forever in a thread, and waits until the kernel reports what it
    /// waits for.
    fn awaited(block: impl FnOnce() + Send + 'static) -> Awaited {
        awaited_when(|_| true, block)
    }

    /// Whether a process alone holds the object. Children of other tests have the descriptors of
    /// this process for a moment, until they execute another program.
    fn is_held_by(pid: i32) -> impl Fn(&Awaited) -> bool {
        move |found| found.holders.iter().map(|holder| holder.pid).eq([pid])
    }

    fn own_pid() -> i32 {
        std::process::id().cast_signed()
    }

    /// Like [`awaited`], but waits until the result satisfies `accept`.
    fn awaited_when(accept: impl Fn(&Awaited) -> bool, block: impl FnOnce() + Send + 'static) -> Awaited {
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            sender.send(nix::unistd::gettid().as_raw()).expect("the test listens");
            block();
        });
        let tid = receiver.recv().expect("the thread has begun");
        let start = Instant::now();
        loop {
            let own = std::process::id().cast_signed();
            let wchan = procfs::wchan(own, tid);
            let call = procfs::syscall(own, tid).ok().as_ref().and_then(Call::of);
            let thread = Sleeper { tid, name: "", wchan: &wchan, call };
            let wait = |deadline| of_thread(own, &thread, &Tables::default(), deadline, Wanted::All)?.awaited;
            if let Some(late) = wait(start) {
                let needs_no_search =
                    [AwaitedKind::Lock, AwaitedKind::Child, AwaitedKind::Mutex].contains(&late.kind());
                assert!(late.holders.is_empty() || needs_no_search, "there was no time to look");
            }
            let found = wait(Instant::now() + Duration::from_secs(60));
            if let Some(awaited) = found.filter(&accept) {
                return awaited;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "the thread blocks in no known call");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts `sleep` with these options, and waits until the child has that name: `spawn` may
    /// return before the kernel has renamed it.
    fn sleeping(options: &mut std::process::Command) -> std::process::Child {
        let child = options.arg("1000").spawn().expect("sleep starts");
        let start = Instant::now();
        while procfs::name(child.id().cast_signed()) != "sleep" {
            assert!(start.elapsed() < Duration::from_secs(20), "the child has not executed sleep");
            std::thread::sleep(Duration::from_millis(1));
        }
        child
    }

    #[test]
    fn finds_the_child_at_the_other_end_of_a_pipe() {
        let mut child = sleeping(std::process::Command::new("sleep").stdout(std::process::Stdio::piped()));
        let mut output = child.stdout.take().expect("a pipe");
        let pid = child.id().cast_signed();
        let found = awaited_when(is_held_by(pid), move || drop(output.read(&mut [0])));
        child.kill().and_then(|()| child.wait()).expect("the child ends");
        assert_eq!(found.kind(), AwaitedKind::Pipe);
        let other: Vec<(i32, &str, bool)> =
            found.holders.iter().map(|holder| (holder.pid, &*holder.name, holder.child)).collect();
        assert_eq!(other, [(pid, "sleep", true)]);
    }

    #[test]
    fn process_alone_holds_both_ends_of_a_pipe() {
        let (mut output, input) = std::io::pipe().expect("a pipe");
        let found = awaited_when(is_held_by(own_pid()), move || drop(output.read(&mut [0])));
        drop(input);
        assert_eq!(found.kind(), AwaitedKind::Pipe);
    }

    #[test]
    fn finds_the_peer_of_a_socket() {
        let server = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = server.local_addr().expect("an address");
        let mut client = TcpStream::connect(address).expect("it connects");
        let (mut held, _) = server.accept().expect("it accepts");
        let found = awaited_when(|found| !found.name.is_empty(), move || drop(client.read(&mut [0])));
        held.write_all(b"!").expect("the thread may end");
        assert_eq!((found.kind(), &*found.name), (AwaitedKind::Socket, &*address.to_string()));
    }

    #[test]
    fn finds_the_holder_of_a_lock() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let path = file.path().to_owned();
        let held = fs::File::open(&path).expect("the file");
        held.lock().expect("nobody else has it");
        let wanted = path.clone();
        let lock = move || fs::File::open(wanted).expect("the file").lock().expect("the lock is free in the end");
        let found = awaited_when(is_held_by(own_pid()), lock);
        drop(held);
        assert_eq!((found.kind(), found.name), (AwaitedKind::Lock, path.display().to_string()));
    }

    #[test]
    fn finds_the_file_that_a_thread_opens() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("commands");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a named pipe");
        let opens = path.clone();
        let found = awaited(move || drop(fs::File::open(opens)));
        fs::OpenOptions::new().write(true).open(&path).expect("the thread reads");
        assert_eq!((found.kind(), found.name), (AwaitedKind::File, path.display().to_string()));
    }

    #[test]
    fn relative_path_of_an_open_begins_at_its_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("commands");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a named pipe");
        let opened = fs::File::open(folder.path()).expect("the folder");
        let read = nix::fcntl::OFlag::O_RDONLY;
        let found = awaited(move || drop(nix::fcntl::openat(opened, "commands", read, nix::sys::stat::Mode::empty())));
        fs::OpenOptions::new().write(true).open(&path).expect("the thread reads");
        assert_eq!((found.kind(), found.name), (AwaitedKind::File, path.display().to_string()));
        let own = std::env::current_dir().expect("a folder").join("commands").display().to_string();
        assert_eq!(absolute(own_pid(), libc::AT_FDCWD, "commands".to_owned()), own);
        assert_eq!(absolute(own_pid(), i32::MAX, "commands".to_owned()), "commands", "no such folder");
    }

    #[test]
    fn finds_the_child_that_a_thread_waits_for() {
        let mut child = sleeping(&mut std::process::Command::new("sleep"));
        let pid = child.id().cast_signed();
        let (sender, receiver) = std::sync::mpsc::channel();
        let found = awaited_when(
            |found| found.kind() == AwaitedKind::Child,
            move || {
                let ended = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(pid), None);
                drop(child.wait());
                let _ = sender.send(ended);
            },
        );
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).expect("it runs");
        receiver.recv().expect("the thread ends").expect("the child ended");
        let holders: Vec<(i32, &str, bool)> =
            found.holders.iter().map(|holder| (holder.pid, &*holder.name, holder.child)).collect();
        assert_eq!(holders, [(pid, "sleep", true)]);
    }

    /// A Unix socket whose other end only a child has.
    fn socket_of_child() -> (UnixStream, std::process::Child) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let stdin = std::process::Stdio::from(OwnedFd::from(theirs));
        (ours, sleeping(std::process::Command::new("sleep").stdin(stdin)))
    }

    #[test]
    fn finds_the_child_at_the_other_end_of_a_unix_socket() {
        let (mut ours, mut child) = socket_of_child();
        let pid = child.id().cast_signed();
        let found = awaited_when(is_held_by(pid), move || drop(ours.read(&mut [0])));
        child.kill().and_then(|()| child.wait()).expect("the child ends");
        assert_eq!(found.kind(), AwaitedKind::Socket);
        assert!(!found.holders[0].both_ends, "{found:?}");
    }

    #[test]
    fn a_process_with_both_ends_of_a_unix_socket_is_known() {
        let (mut ours, theirs) = UnixStream::pair().expect("a pair");
        let found = awaited_when(is_held_by(own_pid()), move || drop(ours.read(&mut [0])));
        drop(theirs);
        assert!(found.holders[0].both_ends, "{found:?}");
    }

    #[test]
    fn finds_who_has_not_accepted_a_connection_and_who_reads_no_datagrams() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("accepts.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
        let mut client = UnixStream::connect(&path).expect("it connects");
        let found = awaited_when(is_held_by(own_pid()), move || drop(client.read(&mut [0])));
        drop(listener);
        assert_eq!(found.kind(), AwaitedKind::Socket);
        let path = folder.path().join("receives.sock");
        let receiver = UnixDatagram::bind(&path).expect("a socket");
        let address = path.clone();
        let found = awaited_when(is_held_by(own_pid()), move || {
            let sender = UnixDatagram::unbound().expect("a socket");
            while sender.send_to(&[0; 64], &address).is_ok() {}
        });
        drop(receiver);
        assert_eq!(found.name, path.display().to_string());
    }

    /// The object that the main thread of a process waits for when it calls this method of a
    /// datagram socket with a path.
    fn awaited_in_datagrams(path: &std::path::Path, method: &str) -> Awaited {
        let script = format!(
            "import socket, sys\ns = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\ns.bind(sys.argv[1])\ns.{method}(1)"
        );
        let mut client = std::process::Command::new("python3");
        let mut client = client.args(["-c", &script]).arg(path).spawn().expect("python3 runs");
        let pid = client.id().cast_signed();
        let begun = Instant::now();
        let found = loop {
            let call = procfs::syscall(pid, pid).ok().as_ref().and_then(Call::of);
            let call = call.filter(|call| call.number == libc::SYS_recvfrom);
            let thread = Sleeper { tid: pid, name: "", wchan: "", call };
            let deadline = Instant::now() + Duration::from_secs(60);
            if let Some(waits) = of_thread(pid, &thread, &Tables::default(), deadline, Wanted::All) {
                break waits.awaited;
            }
            if begun.elapsed() > Duration::from_secs(20) {
                break None;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        client.kill().and_then(|()| client.wait()).expect("the client ends");
        found.expect("it receives from a socket")
    }

    #[test]
    fn finds_who_may_reply_to_an_unconnected_socket_of_datagrams() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let served = UnixDatagram::bind(path("server")).expect("a socket");
        let stdin = std::process::Stdio::from(OwnedFd::from(served));
        let mut server = sleeping(std::process::Command::new("sleep").stdin(stdin));
        let replies = awaited_in_datagrams(&path("client"), "recv");
        // A process that asks for the sender serves anybody.
        let serves = awaited_in_datagrams(&path("other"), "recvfrom");
        let pid = server.id().cast_signed();
        server.kill().and_then(|()| server.wait()).expect("the server ends");
        // Other tests may have such sockets as well.
        assert!(replies.name.starts_with(REPLIES), "{replies:?}");
        assert!(replies.holders.iter().any(|holder| holder.pid == pid), "{replies:?}");
        assert_eq!((serves.name, serves.holders), (format!("{LISTENS} to {}", path("other").display()), vec![]));
    }

    #[test]
    fn a_call_with_a_timeout_is_known() {
        let call = |place: usize, value: u64| {
            let mut arguments = [0; 6];
            arguments[place] = value;
            arguments
        };
        assert!(has_timeout(libc::SYS_poll, &call(2, 500)));
        assert!(!has_timeout(libc::SYS_poll, &call(2, u64::MAX)), "minus one milliseconds");
        assert!(has_timeout(libc::SYS_futex, &call(3, 0x7fff_0000)));
        assert!(!has_timeout(libc::SYS_futex, &call(3, 0)));
        assert!(has_timeout(libc::SYS_clock_nanosleep, &[0; 6]));
        assert!(!has_timeout(libc::SYS_recvfrom, &[0; 6]));
    }

    #[test]
    fn finds_the_process_behind_any_of_several_descriptors() {
        let (ours, mut child) = socket_of_child();
        let (wake, _waker) = std::io::pipe().expect("a pipe");
        let pid = child.id().cast_signed();
        let found = awaited_when(is_held_by(pid), move || {
            let flags = nix::poll::PollFlags::POLLIN;
            let mut all = [nix::poll::PollFd::new(wake.as_fd(), flags), nix::poll::PollFd::new(ours.as_fd(), flags)];
            let _ = nix::poll::poll(&mut all, nix::poll::PollTimeout::NONE);
        });
        child.kill().and_then(|()| child.wait()).expect("the child ends");
        assert_eq!(found.kind(), AwaitedKind::Socket, "only the thread itself has the other end of the pipe");
    }

    #[test]
    #[allow(unsafe_code)]
    fn finds_the_thread_that_owns_a_mutex() {
        struct Shared(Box<std::cell::UnsafeCell<libc::pthread_mutex_t>>);
        // SAFETY: a mutex is made to be used by several threads.
        unsafe impl Sync for Shared {}
        let mutex: &'static Shared =
            Box::leak(Box::new(Shared(Box::new(std::cell::UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER)))));
        // SAFETY: the mutex lives forever.
        assert_eq!(unsafe { libc::pthread_mutex_lock(mutex.0.get()) }, 0);
        let own = nix::unistd::gettid().as_raw();
        let found = awaited(move || {
            // SAFETY: the mutex lives forever, so a thread may wait for it.
            let _ = unsafe { libc::pthread_mutex_lock(mutex.0.get()) };
        });
        // SAFETY: this thread has locked it.
        unsafe { libc::pthread_mutex_unlock(mutex.0.get()) };
        assert_eq!((found.kind(), &*found.object), (AwaitedKind::Mutex, &*own.to_string()));
        assert_eq!(found.holders.len(), 1, "{found:?}");
    }
}
