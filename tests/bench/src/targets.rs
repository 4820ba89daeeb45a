//! The captured processes: hung torch jobs and artificial ranks. They end when their owner is
//! dropped.

use std::{
    fs::{self, File, OpenOptions},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use nix::{sys::stat::Mode, unistd::mkfifo};
use tempfile::TempDir;
use xpu_timer_proto::procfs::{self, Syscall};
use xpu_timer_tests::{Process, compile_c, only_child, run_in_forky, tree};

/// Importing torch in eight processes is slow on two busy cores.
const PATIENCE: Duration = Duration::from_secs(180);

/// Time without any change in a target at rest.
const REST: Duration = Duration::from_millis(800);

/// A running target.
pub struct Target {
    /// Its ranks.
    pub pids: Vec<i32>,
    // Dropped in this order: processes first.
    _processes: Vec<Process>,
    spinners: Vec<Spinner>,
    _folder: TempDir,
}

/// The interpreter of a target.
#[derive(Clone, Copy)]
pub enum Python<'a> {
    /// An interpreter of this machine.
    Host(&'a Path),
    /// A program inside a forky root.
    Forky { root: &'a Path, program: &'a str },
}

impl Python<'_> {
    /// A folder, and the path at which the interpreter sees it.
    fn folder(self) -> Result<(TempDir, PathBuf)> {
        let within = match self {
            Python::Host(_) => std::env::temp_dir(),
            Python::Forky { root, .. } => root.join("tmp"),
        };
        let folder = tempfile::Builder::new().prefix("xpu_timer_bench.").tempdir_in(&within)?;
        let seen = match self {
            Python::Host(_) => folder.path().to_path_buf(),
            Python::Forky { root, .. } => Path::new("/").join(folder.path().strip_prefix(root)?),
        };
        Ok((folder, seen))
    }

    fn command(self) -> Command {
        match self {
            Python::Host(python) => Command::new(python),
            Python::Forky { root, program } => run_in_forky(root, program),
        }
    }

    /// The pid of the interpreter. In the forky case, the started command is its parent.
    fn pid(self, started: &Process) -> Result<i32> {
        let pid = started.pid();
        match self {
            Python::Host(_) => Ok(pid),
            Python::Forky { .. } => only_child(pid),
        }
    }
}

impl Target {
    /// A torch gloo job whose rank 0 never enters the collective in which the others wait.
    pub fn torch(python: Python<'_>, world: usize) -> Result<Self> {
        let (folder, seen) = python.folder()?;
        fs::copy(tree().join("tests/bench/targets/hung_torch.py"), folder.path().join("hung_torch.py"))?;
        let start = |rank: usize| {
            let mut command = python.command();
            command.arg(seen.join("hung_torch.py")).args([rank.to_string(), world.to_string()]);
            Process::spawn(command.arg(seen.join("rendezvous")))
        };
        let processes: Vec<Process> = (0..world).map(start).collect();
        Self::ready(python, processes, Vec::new(), folder)
    }

    /// Artificial ranks with 100 threads each, 64 of them Python with deep stacks.
    pub fn artificial(python: Python<'_>, ranks: usize) -> Result<Self> {
        let (folder, seen) = python.folder()?;
        let targets = tree().join("tests/bench/targets");
        fs::copy(targets.join("rank.py"), folder.path().join("rank.py"))?;
        let source = fs::read_to_string(targets.join("rank.c"))?;
        compile_c(folder.path(), "librank.so", &source, &["-shared", "-fPIC", "-O2", "-g", "-pthread"]);
        let mut spinners = Vec::new();
        let mut processes = Vec::new();
        for rank in 0..ranks {
            let pipe = |kind: &str| format!("{kind}.{rank}");
            let [commands, answers] = ["commands", "answers"].map(|kind| folder.path().join(pipe(kind)));
            mkfifo(&commands, Mode::S_IRUSR | Mode::S_IWUSR)?;
            mkfifo(&answers, Mode::S_IRUSR | Mode::S_IWUSR)?;
            let mut command = python.command();
            command.arg(seen.join("rank.py")).arg(seen.join("librank.so"));
            processes.push(Process::spawn(command.arg(seen.join(pipe("commands"))).arg(seen.join(pipe("answers")))));
            spinners.push(Spinner::open(&commands, &answers)?);
        }
        Self::ready(python, processes, spinners, folder)
    }

    fn ready(python: Python<'_>, mut processes: Vec<Process>, spinners: Vec<Spinner>, folder: TempDir) -> Result<Self> {
        for process in &mut processes {
            process.wait_for("ready", PATIENCE);
        }
        let pids = processes.iter().map(|process| python.pid(process)).collect::<Result<Vec<_>>>()?;
        for pid in &pids {
            wait_at_rest(*pid)?;
        }
        Ok(Target { pids, _processes: processes, spinners, _folder: folder })
    }

    /// The spinning thread of the first rank; only artificial ranks have one.
    pub fn spinner(&mut self) -> Option<&mut Spinner> {
        self.spinners.first_mut()
    }

    /// Threads of all ranks.
    pub fn threads(&self) -> usize {
        self.pids.iter().map(|pid| tids(*pid).len()).sum()
    }
}

/// The thread ids of a process.
pub fn tids(pid: i32) -> Vec<i32> {
    procfs::threads(pid).unwrap_or_default()
}

/// Waits until a process is at rest: for a while, no thread started, ended or moved to another
/// system call. Some threads of a hung job still wake up from time to time, check a socket or a
/// clock, and continue to sleep.
fn wait_at_rest(pid: i32) -> Result<()> {
    let places = || -> Vec<(i32, Option<Syscall>)> {
        let place = |tid: i32| procfs::syscall(pid, tid).ok();
        tids(pid).into_iter().map(|tid| (tid, place(tid))).collect()
    };
    let start = Instant::now();
    let (mut last, mut since) = (places(), Instant::now());
    while since.elapsed() < REST {
        std::thread::sleep(Duration::from_millis(50));
        let now = places();
        ensure!(!now.is_empty(), "process {pid} is gone");
        ensure!(start.elapsed() < PATIENCE, "process {pid} is not idle within {PATIENCE:?}");
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(())
}

/// The thread of an artificial rank that reads the clock in a loop on request.
pub struct Spinner {
    commands: File,
    answers: BufReader<File>,
}

/// The measurements of the spinner in one window; times of CLOCK_MONOTONIC.
pub struct Window {
    pub start_ns: u64,
    pub end_ns: u64,
    /// The longest time between two readings of the clock.
    pub longest_gap_ns: u64,
    /// Thread id of the spinner.
    pub tid: i32,
}

impl Spinner {
    fn open(commands: &Path, answers: &Path) -> Result<Self> {
        // Opened for both directions, so that neither side waits for the other to come.
        let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path);
        Ok(Spinner { commands: open(commands)?, answers: BufReader::new(open(answers)?) })
    }

    /// Starts a window.
    pub fn start(&mut self, length: Duration) -> Result<()> {
        writeln!(self.commands, "{}", length.as_millis())?;
        Ok(())
    }

    /// Waits for the end of the window.
    pub fn finish(&mut self) -> Result<Window> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        let numbers: Vec<u64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let [start_ns, end_ns, longest_gap_ns, tid] = numbers[..] else { bail!("the spinner says {line:?}") };
        Ok(Window { start_ns, end_ns, longest_gap_ns, tid: tid as i32 })
    }
}
