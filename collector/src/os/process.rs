//! Processes in /proc: identity (pid and start time), environment, end, and a handle that cannot
//! hit another process.

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::Signal,
};
use xpu_timer_analysis::FREEZER_WCHAN;
use xpu_timer_proto::{
    env::Source,
    printable::{MOST_COMMAND_BYTES, shortened},
    procfs::{self, Stat, TICK_NS},
    secrets, socket,
    v1::RankInfo,
};

use crate::{
    job::partition::{Member, ProcessId},
    os::{clock, descriptors},
};

/// Nanoseconds since the start of a process with this start time (see [`Stat`]).
#[must_use]
pub(crate) fn age_ns(start: u64) -> u64 {
    clock::since_boot_ns().saturating_sub(start.saturating_mul(TICK_NS))
}

/// CLOCK_MONOTONIC at which a process with this start time (see [`Stat`]) was started.
#[must_use]
pub(crate) fn started_ns(start: u64, now_ns: u64) -> u64 {
    now_ns.saturating_sub(age_ns(start))
}

/// The living ancestors of a process, nearest first. A process whose parents have ended (a daemon)
/// has lost its ancestors. The environment still names the launched command, because the launcher
/// put it there; it is the last entry.
fn ancestors(pid: i32, source: &Source) -> Vec<ProcessId> {
    let parent = |stat: &Stat| {
        let pid = Some(stat.parent).filter(|pid| *pid > 1)?;
        Some((pid, procfs::stat(pid).ok()?))
    };
    let chain = std::iter::successors(procfs::stat(pid).ok().as_ref().and_then(parent), |(_, stat)| parent(stat));
    let mut all: Vec<ProcessId> = chain.take(MAX_ANCESTORS).map(|(pid, stat)| (pid, stat.start_time)).collect();
    all.extend(launched_command(pid, source).filter(|launched| !all.contains(launched)));
    all
}

/// The launched command above a process, by the environment of the process; `None` if the process
/// is that command.
fn launched_command(pid: i32, source: &Source) -> Option<ProcessId> {
    let id = source.text("XPU_TIMER_LAUNCH_ID")?;
    let (launched, start) = id.split_once(':')?;
    let launched = (launched.parse().ok()?, start.parse().ok()?);
    (launched.0 != pid).then_some(launched)
}

/// Whether a process with this pid and start time runs.
#[must_use]
pub(crate) fn is_alive((pid, start): ProcessId) -> bool {
    procfs::stat(pid).is_ok_and(|stat| stat.start_time == start && !stat.is_dead())
}

/// The Python of a process. A virtual environment is found by the path of the link to its program,
/// which only the command line has.
fn python(pid: i32, source: &Source) -> Option<PathBuf> {
    let program = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    program.file_name()?.to_str().filter(|name| name.starts_with("python"))?;
    let cmdline = procfs::cmdline(pid).ok()?;
    let name = PathBuf::from(String::from_utf8_lossy(cmdline.split(|byte| *byte == 0).next()?).into_owned());
    let candidates: Vec<PathBuf> = if name.components().count() > 1 {
        vec![fs::read_link(format!("/proc/{pid}/cwd")).ok()?.join(&name)]
    } else {
        source.text("PATH").unwrap_or_default().split(':').map(|folder| Path::new(folder).join(&name)).collect()
    };
    let is_program = |path: &PathBuf| fs::canonicalize(path).is_ok_and(|path| path == program);
    Some(candidates.into_iter().find(is_program).unwrap_or(program))
}

const MAX_ANCESTORS: usize = 32;

/// argv without its secrets, joined by spaces, at most [`MOST_COMMAND_BYTES`].
#[must_use]
pub(crate) fn command(pid: i32) -> String {
    let bytes = procfs::program_cmdline(pid).unwrap_or_default();
    shortened(&secrets::cmdline(&bytes), MOST_COMMAND_BYTES)
}

/// A handle to a process. It never refers to another process that got the same pid.
#[derive(Debug)]
pub struct Handle {
    /// Its pid in the collector's namespace.
    pub pid: i32,
    /// Start time, as in [`Stat`].
    pub start: u64,
    /// Distinguishes jobs of one name; known only for processes that connected.
    pub instance: String,
    /// Its rank, if its environment names one; known only for processes that connected.
    pub rank: Option<RankInfo>,
    /// Its ancestors when it connected; see [`ancestors`].
    pub ancestors: Vec<ProcessId>,
    /// The launched command above it; known only for processes that connected.
    pub launched: Option<ProcessId>,
    /// Whether that command ran when this process connected, in the collector's namespace.
    pub launched_ran: bool,
    /// Where it writes its exception for torchelastic, by its environment; known only for processes
    /// that connected.
    pub error_file: Option<PathBuf>,
    /// The Python that it runs, by the path that finds its packages; known only for processes that
    /// connected.
    pub python: Option<PathBuf>,
    fd: OwnedFd,
}

impl Handle {
    /// Opens a process that has connected. The data that it reads disappears when the process ends,
    /// so this happens before `Welcome` is sent: a process that sends `Hello` was alive then.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn of_peer(pid: i32) -> io::Result<Handle> {
        let source = Source::of_environ(&procfs::environ(pid).unwrap_or_default());
        let rank = Some(source.rank_info()).filter(|info| info.rank >= 0);
        let ancestors = ancestors(pid, &source);
        let launched = launched_command(pid, &source);
        let launched_ran = launched.is_some_and(is_alive);
        let instance = instance_in(pid, &source);
        let error_file = source.path("TORCHELASTIC_ERROR_FILE");
        let python = python(pid, &source);
        Ok(Handle { instance, rank, ancestors, launched, launched_ran, error_file, python, ..Handle::open(pid)? })
    }

    /// # Errors
    /// If there is no such process.
    pub fn open(pid: i32) -> io::Result<Handle> {
        let fd = descriptors::open_process(pid)?;
        let start = procfs::stat(pid).ok().ok_or(io::ErrorKind::NotFound)?.start_time;
        let (instance, ancestors) = (String::new(), Vec::new());
        let (rank, launched, error_file, python) = (None, None, None, None);
        let launched_ran = false;
        let handle = Handle { pid, start, instance, rank, ancestors, launched, launched_ran, error_file, python, fd };
        // The start time belongs to this process only if the process still existed after the read.
        if handle.is_dead() && procfs::stat(pid).ok().is_none_or(|stat| stat.start_time != start) {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(handle)
    }

    /// For poll: becomes readable when the process ends.
    #[must_use]
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Whether the process has ended. A zombie counts as ended.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        let mut fds = [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..))
    }

    /// The stat line of the process, if its pid still refers to it.
    #[must_use]
    pub fn stat(&self) -> Option<Stat> {
        procfs::stat(self.pid).ok().filter(|stat| stat.start_time == self.start)
    }

    /// Whether the freezer of its control group has stopped it, as in a paused container.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        let place = procfs::wchan(self.pid, self.pid);
        FREEZER_WCHAN.contains(&place.as_str())
    }

    /// How it ended: `exit code 1`, `killed by SIGKILL`. `None` while it runs or if the kernel does
    /// not report it.
    #[must_use]
    pub fn exit(&self) -> Option<String> {
        if !self.is_dead() {
            return None;
        }
        let zombie = self.stat().filter(Stat::is_dead).map(|stat| stat.wait_status);
        descriptors::reaped_status(&self.fd).or(zombie).map(describe)
    }

    /// Why a killed process still exists: its state and, if readable, the kernel function in which
    /// its main thread waits.
    #[must_use]
    pub fn where_the_kernel_is(&self) -> String {
        let state = self.stat().map_or('?', |stat| stat.state);
        let function = procfs::wchan(self.pid, self.pid);
        let function = if function.is_empty() { "an unknown function" } else { &function };
        format!("the kernel holds it in {function} (state {state})")
    }

    /// Sends a signal to this process only.
    ///
    /// # Errors
    /// If the process has ended or belongs to another user.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        descriptors::send_signal(&self.fd, signal)
    }
}

/// Describes a wait status in words.
pub(crate) fn describe(status: i32) -> String {
    let number = status & 0x7f;
    if number == 0 {
        return format!("exit code {}", (status >> 8) & 0xff);
    }
    let name = Signal::try_from(number).map_or_else(|_| format!("signal {number}"), |s| s.as_str().into());
    let core = if status & 0x80 == 0 { "" } else { " (core dumped)" };
    format!("killed by {name}{core}")
}

/// A process of this user that has the environment of a rank and was started under our launcher.
#[derive(Debug, Clone)]
pub(crate) struct RankProcess {
    /// Pid.
    pub pid: i32,
    /// Parent.
    pub parent: i32,
    /// Start time.
    pub start: u64,
    /// Its identity in its job.
    pub info: RankInfo,
    /// Distinguishes jobs of one name; see [`Handle::instance`].
    pub instance: String,
    /// See [`ancestors`].
    pub ancestors: Vec<ProcessId>,
    /// Socket of the collector that it would connect to.
    pub socket: PathBuf,
}

impl RankProcess {
    /// The properties that assign it to a job.
    #[must_use]
    pub(crate) fn member(&self, now_ns: u64) -> Member {
        Member {
            process: Some((self.pid, self.start)),
            ancestors: self.ancestors.clone(),
            rank: self.info.rank,
            world_size: self.info.world_size,
            attempt: self.info.attempt,
            instance: self.instance.clone(),
            started_ns: started_ns(self.start, now_ns),
            registered_ns: u64::MAX,
            ended_ns: u64::MAX,
            ..Member::default()
        }
    }
}

/// All processes of `uid` that have a rank in their environment and our hook in `LD_PRELOAD` or
/// mapped.
#[must_use]
pub(crate) fn scan(uid: u32) -> Vec<RankProcess> {
    pids(uid).filter_map(|pid| found(pid, uid)).collect()
}

/// The processes of `uid` that launchers exec'd: they have the hook and this socket in their
/// environment, and their parent does not.
#[must_use]
pub(crate) fn commands(uid: u32, socket: &Path) -> Vec<i32> {
    let launched = |pid: i32| {
        let environ = procfs::environ(pid).ok().filter(|environ| !environ.is_empty())?;
        let source = Source::of_environ(&environ);
        let has_socket = source.text("XPU_TIMER_SOCKET").is_some_and(|path| Path::new(&path) == socket)
            && source.text("LD_PRELOAD").is_some_and(|list| list.contains(HOOK));
        Some((pid, procfs::stat(pid).ok().filter(|stat| has_socket && !stat.is_dead())?.parent))
    };
    let all: BTreeMap<i32, i32> = pids(uid).filter_map(launched).collect();
    all.iter().filter(|(_, parent)| !all.contains_key(parent)).map(|(pid, _)| *pid).collect()
}

fn pids(uid: u32) -> impl Iterator<Item = i32> {
    procfs::pids().filter(move |pid| procfs::owner(*pid) == Some(uid))
}

/// Reads one process; `None` if it does not qualify.
#[must_use]
pub(crate) fn found(pid: i32, uid: u32) -> Option<RankProcess> {
    let environ = procfs::environ(pid).ok().filter(|environ| !environ.is_empty())?;
    let source = Source::of_environ(&environ);
    let mut info = source.rank_info();
    if info.rank < 0 || !(source.text("LD_PRELOAD").is_some_and(|list| list.contains(HOOK)) || maps_hook(pid)) {
        return None;
    }
    let stat = procfs::stat(pid).ok().filter(|stat| !stat.is_dead())?;
    info.pid = pid;
    info.command = command(pid);
    let socket = socket::of(&source, uid);
    let (instance, ancestors) = (instance_in(pid, &source), ancestors(pid, &source));
    Some(RankProcess { pid, parent: stat.parent, start: stat.start_time, info, instance, ancestors, socket })
}

const HOOK: &str = "xpu_timer_hook";

fn maps_hook(pid: i32) -> bool {
    procfs::mapped_files(pid).is_ok_and(|files| files.iter().any(|file| file.to_string_lossy().contains(HOOK)))
}

/// [`Source::instance`] of a running process. MPICH's launcher does not name its job in the
/// environment; see [`hydra`].
fn instance_in(pid: i32, source: &Source) -> String {
    let own = source.instance();
    let is_missing = own.is_empty() && source.text("PMI_RANK").is_some();
    if is_missing { hydra(pid).unwrap_or(own) } else { own }
}

/// Host and port on which the MPICH launcher listens. Each proxy has them among its arguments, so
/// they are equal for all ranks of a job on all nodes. A proxy is the parent of the rank, or the
/// parent of the process that started the rank.
fn hydra(pid: i32) -> Option<String> {
    const GENERATIONS: usize = 6;
    let ancestors =
        std::iter::successors(Some(pid), |pid| procfs::stat(*pid).ok().map(|stat| stat.parent).filter(|pid| *pid > 1));
    let listens = |pid: i32| {
        let words = procfs::cmdline(pid).ok()?;
        let mut words = words.split(|byte| *byte == 0).skip_while(|word| *word != b"--control-port").skip(1);
        words.next().map(|place| String::from_utf8_lossy(place).into_owned())
    };
    ancestors.skip(1).take(GENERATIONS).find_map(listens)
}

/// Name of this machine.
#[must_use]
pub(crate) fn host_name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").map(|name| name.trim().to_string()).unwrap_or_default()
}

/// Identity of the place of a collector: machine, container and socket. A collector that is
/// restarted there has the same value.
pub(crate) fn home(socket: &Path) -> String {
    let namespace = fs::read_link("/proc/self/ns/pid").map(|link| link.display().to_string()).unwrap_or_default();
    format!("{} {namespace} {}", procfs::boot_id(), socket.display())
}

/// An unguessable value that is unique to this process.
#[must_use]
pub(crate) fn random_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/uuid").map(|id| id.trim().to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_end_of_a_process_is_reported() {
        let wait = |child: &mut std::process::Child| {
            let handle = Handle::open(child.id() as i32).unwrap();
            child.kill().unwrap();
            // First a zombie, which has not been waited for. Then reaped: only the pidfd reports
            // its end.
            while !handle.is_dead() {
                std::thread::yield_now();
            }
            let zombie = handle.exit();
            child.wait().unwrap();
            (zombie, handle.exit(), handle.stat())
        };
        let (zombie, reaped, stat) = wait(&mut Command::new("sleep").arg("60").spawn().unwrap());
        assert_eq!(zombie.as_deref(), Some("killed by SIGKILL"));
        // Kernels before 6.15 do not report the end of a reaped process.
        assert!(reaped.is_none() || reaped.as_deref() == Some("killed by SIGKILL"), "{reaped:?}");
        assert_eq!(stat, None);
    }

    #[test]
    fn wait_statuses_are_described_in_words() {
        assert_eq!(describe(0), "exit code 0");
        assert_eq!(describe(3 << 8), "exit code 3");
        assert_eq!(describe(11 | 0x80), "killed by SIGSEGV (core dumped)");
        assert_eq!(describe(40), "killed by signal 40");
    }

    #[test]
    fn the_launched_command_is_found_after_its_descendants_ended() {
        let mut child = Command::new("sleep").arg("60").env("XPU_TIMER_LAUNCH_ID", "123456789:77").spawn().unwrap();
        let own = std::process::id() as i32;
        // The parent continues slightly before the kernel shows the environment of the child.
        let environment = format!("/proc/{}/environ", child.id());
        let begun = std::time::Instant::now();
        while fs::read(&environment).unwrap().is_empty() && begun.elapsed().as_secs() < 60 {
            std::thread::yield_now();
        }
        let handle = Handle::of_peer(child.id() as i32).unwrap();
        assert_eq!(handle.ancestors.first(), Some(&(own, procfs::stat(own).ok().unwrap().start_time)));
        assert_eq!(handle.ancestors.last(), Some(&(123_456_789, 77)));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn jobs_of_mpich_are_separated_by_the_port_of_their_launcher() {
        // A proxy, a shell, and in it the rank, which reports when it is ready.
        let script = "sh -c 'echo $$; read _; :'; :";
        let mut proxy = Command::new("sh");
        proxy.args(["-c", script, "hydra_pmi_proxy", "--control-port", "node:35363", "--rmk", "user"]);
        let mut proxy = proxy.env("PMI_RANK", "1").env_remove("MASTER_PORT").env_remove("PMIX_NAMESPACE");
        proxy = proxy.env_remove("SLURM_STEP_ID").stdin(std::process::Stdio::piped());
        let mut child = proxy.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
        let rank = Handle::of_peer(line.trim().parse().unwrap()).unwrap();
        assert_eq!((rank.instance.as_str(), rank.rank.map(|info| info.rank)), ("node:35363", Some(1)));
        assert_eq!(hydra(std::process::id() as i32), None);
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}
