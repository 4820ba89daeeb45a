//! A test job with its own folder, port and environment. Its processes end with it.

use std::{
    env, fs,
    net::{Ipv4Addr, TcpListener},
    ops::Range,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    path::{Path, PathBuf},
    process::Command,
    sync::{
        OnceLock,
        atomic::{AtomicU16, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use nix::{sys::signal::Signal, unistd::Pid};
use serde_json::Value;
use signal_hook::iterator::Signals;
use xpu_timer_proto::{procfs, timeline::PENDING};

use crate::artifacts::artifacts;
use crate::process::Process;
use crate::tools::{http, processes_with, python, tree};

/// Variable in the environment of everything that a job starts. With it the job finds its processes
/// again, including the collector.
pub const LAUNCHED_BY: &str = "XPU_TIMER_LAUNCHED_BY";

/// The settings, folder and processes of one job.
pub struct Job {
    /// Base folder, which contains `timeline`, `log` and `rendezvous`.
    pub dir: PathBuf,
    /// Control port of the job's collector; metrics are on the next one.
    pub port: u16,
    variables: Vec<(String, String)>,
    namespace: Option<String>,
    marker: String,
    // No other job has these ports as long as it exists.
    _claim: UnixListener,
    // The folder of the sockets, because their paths must be short.
    _sockets: tempfile::TempDir,
    _temporary: Option<tempfile::TempDir>,
}

/// A finished incident folder.
#[derive(Debug, Clone)]
pub struct Incident {
    /// The folder.
    pub path: PathBuf,
    /// Its `verdict.json`.
    pub verdict: Value,
}

impl Incident {
    /// Asserts that the verdict came within the interval between the two samples plus 3 s after the
    /// timeout. It may take longer if other processes keep the processors busy.
    ///
    /// # Panics
    /// The verdict came later, or contains no time.
    #[track_caller]
    pub fn assert_in_time(&self, interval: Duration) {
        /// Share of time for which some process has waited for a processor, in percent.
        const BUSY: f64 = 50.0;
        const TIMES_BUSY: f64 = 4.0;
        let took = self.verdict["seconds_from_timeout"].as_f64().expect("seconds_from_timeout");
        let times = if cpu_pressure().is_none_or(|percent| percent < BUSY) { 1.0 } else { TIMES_BUSY };
        let limit = interval.as_secs_f64() + 3.0 * times;
        assert!(took < limit, "the verdict came {took} s after the timeout, not within {limit} s");
    }
}

/// For how much of the last minute some process waited for a processor, in percent.
fn cpu_pressure() -> Option<f64> {
    let pressure = fs::read_to_string("/proc/pressure/cpu").ok()?;
    pressure.split_once("avg60=")?.1.split(' ').next()?.parse().ok()
}

impl Job {
    /// A job in a temporary folder, which is removed with it.
    ///
    /// # Panics
    /// The folder cannot be created.
    #[must_use]
    pub fn new() -> Self {
        let temporary = tempfile::tempdir().expect("a temporary folder");
        let mut job = Self::at(temporary.path());
        job._temporary = Some(temporary);
        job
    }

    /// A job in a folder that is kept.
    ///
    /// # Panics
    /// The folder cannot be written.
    #[must_use]
    pub fn at(dir: &Path) -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let marker = format!("{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let (port, claim) = free_ports();
        for name in ["timeline", "log", "rendezvous"] {
            fs::create_dir_all(dir.join(name)).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        }
        let sockets = tempfile::tempdir().expect("a temporary folder");
        let folder = |name: &str| dir.join(name).display().to_string();
        let library_path = artifacts().sim().display().to_string();
        let variables = [
            ("TMPDIR", sockets.path().display().to_string()),
            ("XPU_TIMER_TIMELINE_PATH", folder("timeline")),
            ("XPU_TIMER_LOGGING_DIR", folder("log")),
            ("XPU_EXAMPLE_RENDEZVOUS", folder("rendezvous")),
            ("XPU_TIMER_BASEPORT", port.to_string()),
            ("XPU_TIMER_HANG_TIMEOUT", "5".into()),
            ("XPU_TIMER_SAMPLE_INTERVAL", "2".into()),
            ("XPU_TIMER_LINGER", "20".into()),
            ("LD_LIBRARY_PATH", library_path),
            ("PYTHONDONTWRITEBYTECODE", "1".into()),
            (LAUNCHED_BY, marker.clone()),
        ];
        let variables = variables.map(|(name, value)| (name.to_string(), value)).to_vec();
        Job {
            dir: dir.to_path_buf(),
            port,
            variables,
            namespace: None,
            marker,
            _claim: claim,
            _sockets: sockets,
            _temporary: None,
        }
    }

    /// A port of its own for another server, such as the rendezvous of its ranks. A port that the
    /// kernel chooses could be chosen again for another test before that server binds it.
    #[must_use]
    pub fn spare_port(&self) -> u16 {
        self.port + PORTS_OF_A_JOB - 1
    }

    /// Sets a variable for everything started from now on.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.variables.retain(|(old, _)| old != name);
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Starts everything from now on in a network namespace of `ip netns`.
    #[must_use]
    pub fn within(mut self, namespace: &str) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// A command in the job's environment. It inherits no variable of the tool or of a scheduler
    /// from the caller.
    #[must_use]
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = match &self.namespace {
            // It executes the program, so pid and signals are those of the program.
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(program);
                command
            }
            None => Command::new(program),
        };
        for (name, _) in env::vars_os() {
            let text = name.to_string_lossy();
            let ours = ["XPU_TIMER_", "XPU_SIM_"].iter().any(|prefix| text.starts_with(prefix));
            if ours || ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LD_PRELOAD"].contains(&&*text) {
                command.env_remove(&name);
            }
        }
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// A command under `xpu_timer_launch`.
    #[must_use]
    pub fn launch(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.command(artifacts().bin("xpu_timer_launch"));
        command.arg(program);
        command
    }

    /// Starts `ranks` processes of the example training program under `xpu_timer_launch`.
    pub fn train(&self, ranks: u32, arguments: &[&str]) -> Process {
        let examples = tree().join("tests/examples");
        let mut command = self.launch(python());
        command.arg(examples.join("run_ranks.py")).arg(format!("--nproc={ranks}")).arg(examples.join("train.py"));
        Process::spawn(command.args(arguments))
    }

    /// Incident folders that contain a `verdict.json`, oldest first, without promoted captures.
    #[must_use]
    pub fn incidents(&self) -> Vec<Incident> {
        let mut incidents = folders_with_verdicts(&self.dir.join("timeline"));
        incidents.retain(|incident| incident.verdict["status"] != "mild");
        incidents
    }

    /// Mild captures that became incidents, oldest first.
    #[must_use]
    pub fn promoted_captures(&self) -> Vec<Incident> {
        let mut incidents = folders_with_verdicts(&self.dir.join("timeline"));
        incidents.retain(|incident| incident.verdict["status"] == "mild");
        incidents
    }

    /// Mild captures that are not incidents, oldest first.
    #[must_use]
    pub fn mild_captures(&self) -> Vec<Incident> {
        folders_with_verdicts(&self.dir.join("timeline/mild"))
    }

    /// The incidents that are finished, oldest first. The collector sets `latest` when a folder is
    /// finished; one that is older than `latest`, and a dump by hand, which does not replace a hang
    /// there, has a report by then.
    #[must_use]
    pub fn finished_incidents(&self) -> Vec<Incident> {
        let mut incidents = self.incidents();
        let latest = fs::canonicalize(self.dir.join("timeline/latest")).ok();
        let place = incidents.iter().position(|incident| fs::canonicalize(&incident.path).ok() == latest);
        let Some(place) = place.filter(|_| latest.is_some()) else { return Vec::new() };
        let is_finished = |at: usize, incident: &Incident| {
            let may_be_drawn = at < place || incident.verdict["trigger"]["kind"] == "manual";
            let is_drawn = at == place || may_be_drawn && incident.path.join("report.html").exists();
            is_drawn && !incident.path.join(PENDING).exists()
        };
        let mut at = 0..;
        incidents.retain(|incident| at.next().is_some_and(|at| is_finished(at, incident)));
        incidents
    }

    /// Waits until the `count`-th incident is finished.
    ///
    /// # Panics
    /// That does not happen within `deadline`.
    #[must_use]
    pub fn wait_incident(&self, count: usize, deadline: Duration) -> Incident {
        let start = Instant::now();
        loop {
            let incidents = self.finished_incidents();
            if let Some(incident) = incidents.get(count - 1) {
                return incident.clone();
            }
            assert!(
                start.elapsed() < deadline,
                "incident {count} not within {deadline:?}; there are {}; logs:\n{}",
                incidents.len(),
                self.logs()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// All log files, for the message of a failed test.
    #[must_use]
    pub fn logs(&self) -> String {
        let entries = fs::read_dir(self.dir.join("log")).into_iter().flatten().flatten();
        entries
            .map(|entry| {
                let text = fs::read(entry.path()).unwrap_or_default();
                format!("--- {}\n{}\n", entry.path().display(), String::from_utf8_lossy(&text))
            })
            .collect()
    }

    /// The collector's `/status`.
    ///
    /// # Errors
    /// It does not answer.
    pub fn status(&self) -> Result<Value, String> {
        let (_, body) = http("GET", self.port, "/status")?;
        serde_json::from_str(&body).map_err(|error| format!("/status: {error}: {body}"))
    }

    /// Processes that carry this job's marker.
    #[must_use]
    pub fn processes(&self) -> Vec<i32> {
        processes_with(LAUNCHED_BY, &self.marker)
    }

    /// Ends every process of this job and waits until none is left.
    pub fn end(&self) {
        end_all(|| self.processes());
    }
}

/// Ends the processes of all jobs of this process, and then this process, on SIGINT, SIGTERM or
/// SIGHUP. It blocks no signal: the programs of the jobs would inherit that.
///
/// # Panics
/// The signals cannot be handled.
pub fn end_jobs_on_signal() {
    let signals = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].map(|signal| signal as i32);
    let mut signals = Signals::new(signals).expect("signals can be handled");
    std::thread::spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        let marker = format!("{LAUNCHED_BY}={}-", std::process::id());
        let is_ours = |pid: &i32| {
            let environ = procfs::environ(*pid).unwrap_or_default();
            environ.split(|byte| *byte == 0).any(|entry| entry.starts_with(marker.as_bytes()))
        };
        end_all(|| procfs::pids().filter(is_ours).collect());
        std::process::exit(128 + signal);
    });
}

/// Ends the processes that `find` finds, until it finds none.
fn end_all(find: impl Fn() -> Vec<i32>) {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(10) {
        let left = find();
        if left.is_empty() {
            return;
        }
        for pid in left {
            let _ = nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The folders of incidents in `root` that contain a `verdict.json`, oldest first.
fn folders_with_verdicts(root: &Path) -> Vec<Incident> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("incident-"))
        .map(|entry| entry.path())
        .collect();
    folders.sort();
    folders
        .into_iter()
        .filter_map(|path| {
            let verdict = serde_json::from_slice(&fs::read(path.join("verdict.json")).ok()?).ok()?;
            Some(Incident { path, verdict })
        })
        .collect()
}

impl Default for Job {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.end();
    }
}

/// Ports that the kernel does not assign to outgoing connections (`ip_local_port_range` begins at
/// 32768). A collector binds its ports some time after they are chosen, and a connection of another
/// test could have taken a port of that range.
const PORTS: Range<u16> = 15_000..32_000;
/// Distance between the ports of two jobs: a collector whose ports are taken tries some more.
const PORTS_OF_A_JOB: u16 = 32;

/// Two adjacent free ports, and the claim to them: an abstract socket with a name that no two
/// processes can have at once. A collector binds its ports some time after they are chosen, and
/// another test process could choose them meanwhile.
fn free_ports() -> (u16, UnixListener) {
    static NEXT: OnceLock<AtomicU16> = OnceLock::new();
    let jobs = PORTS.len() as u16 / PORTS_OF_A_JOB;
    let next = NEXT.get_or_init(|| AtomicU16::new((std::process::id().wrapping_mul(0x9e37) % u32::from(jobs)) as u16));
    let is_free = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    let claim = |port: u16| {
        let name = SocketAddr::from_abstract_name(format!("xpu_timer_test_port_{port}")).expect("a short name");
        let claim = UnixListener::bind_addr(&name).ok()?;
        (is_free(port) && is_free(port + 1)).then_some((port, claim))
    };
    let mut candidates = (0..jobs).map(|_| PORTS.start + next.fetch_add(1, Ordering::Relaxed) % jobs * PORTS_OF_A_JOB);
    candidates.find_map(claim).expect("two neighbouring free ports")
}

#[cfg(test)]
mod tests {
    use super::{PORTS, PORTS_OF_A_JOB, SocketAddr, SocketAddrExt as _, UnixListener, free_ports};

    #[test]
    fn ports_are_claimed_from_other_processes_until_the_job_ends() {
        let (port, claim) = free_ports();
        assert!(PORTS.contains(&port) && (port - PORTS.start).is_multiple_of(PORTS_OF_A_JOB));
        let name = SocketAddr::from_abstract_name(format!("xpu_timer_test_port_{port}")).unwrap();
        assert!(UnixListener::bind_addr(&name).is_err());
        drop(claim);
        assert!(UnixListener::bind_addr(&name).is_ok());
    }
}
