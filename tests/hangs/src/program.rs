//! The programs of the corpus, and how each kind is started. They are unrelated except for the
//! libraries that they use.

use std::{
    collections::BTreeSet,
    env, fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use xpu_timer_tests::{DEBIAN_PYTHON, Job, artifacts, compile_c, python, tree};

/// The program of a job's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Program {
    /// A script on the simulated device, whose ranks start as under torchrun.
    Script(&'static str),
    /// A C++ program on the simulated device, whose ranks are started by a shell.
    Native(&'static str),
    /// A script with Debian's PyTorch on gloo.
    Torch(&'static str),
    /// A script with Debian's PyTorch that starts torchrun, which starts the ranks.
    Elastic(&'static str),
    /// A script on the simulated device that starts all its processes itself.
    Spawning(&'static str),
    /// A script with Debian's PyTorch that starts all its processes itself.
    SpawningTorch(&'static str),
    /// A C program under Open MPI.
    Mpi(&'static str),
    /// A script with Debian's mpi4py under Open MPI.
    Mpi4py(&'static str),
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.source())
    }
}

const VFORK: &str = r"
#include <unistd.h>

void block_in_vfork(void)
{
    if (vfork() == 0)
        for (;;)
            pause();
}
";

/// Starts the ranks of a program and waits for all of them.
const EACH_RANK: &str = r#"for rank in $(seq 0 $((WORLD_SIZE - 1))); do RANK=$rank LOCAL_RANK=$rank "$@" & done; wait"#;

/// The compiled programs, built once for all scenarios.
pub struct Compiled {
    /// A library that `faults.py` calls.
    pub vfork: PathBuf,
    folder: PathBuf,
}

impl Compiled {
    /// Compiles the programs that need it into `folder`.
    pub fn of(programs: &[Program], folder: &Path) -> Result<Self> {
        let vfork = compile_c(folder, "block_in_vfork.so", VFORK, &["-shared", "-fPIC"]);
        let compiled = Compiled { vfork, folder: folder.to_owned() };
        let libraries = ["libcudart.so.13", "libnccl.so.2"].map(|name| artifacts().sim().join(name));
        let mut compilers = Vec::new();
        for program in programs.iter().collect::<BTreeSet<_>>() {
            let mut compiler = match program {
                Program::Native(_) => {
                    let mut gcc = Command::new("g++");
                    gcc.args(["-std=c++17", "-g", "-O1", "-pthread", "-Wl,--allow-shlib-undefined"]);
                    gcc
                }
                Program::Mpi(_) => {
                    let mut mpicc = Command::new("mpicc.openmpi");
                    mpicc.args(["-g", "-O1"]);
                    mpicc
                }
                _ => continue,
            };
            compiler.arg("-o").arg(compiled.binary(program.source())).arg(script(program.source()));
            if matches!(program, Program::Native(_)) {
                compiler.args(&libraries);
            }
            compilers.push(compiler);
        }
        for mut compiler in compilers {
            let output = compiler.output().with_context(|| format!("{compiler:?}"))?;
            ensure!(output.status.success(), "{compiler:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(compiled)
    }

    /// The executable of a source file.
    fn binary(&self, source: &str) -> PathBuf {
        self.folder.join(Path::new(source).file_stem().unwrap_or_default())
    }
}

/// The path of a program of the corpus.
fn script(name: &str) -> PathBuf {
    tree().join("tests/hangs/programs").join(name)
}

impl Program {
    /// The name of its source file.
    fn source(self) -> &'static str {
        match self {
            Program::Script(name)
            | Program::Torch(name)
            | Program::Elastic(name)
            | Program::Spawning(name)
            | Program::SpawningTorch(name)
            | Program::Mpi4py(name)
            | Program::Native(name)
            | Program::Mpi(name) => name,
        }
    }

    /// Its path.
    pub fn path(self) -> PathBuf {
        script(self.source())
    }

    /// The interpreter of a script.
    pub fn python(self) -> PathBuf {
        match self {
            Program::Script(_) | Program::Spawning(_) => python(),
            _ => DEBIAN_PYTHON.into(),
        }
    }

    /// The command that starts all ranks of a job, without the program's own arguments.
    pub fn command(self, job: &Job, world: u32, compiled: &Compiled) -> Command {
        let count = world.to_string();
        let ranks_of = |python: &Path, name: &str| {
            let mut command = job.launch(python);
            command.arg(tree().join("tests/examples/run_ranks.py")).arg(format!("--nproc={world}")).arg(script(name));
            command
        };
        let mpirun = || {
            let mut command = job.launch("mpirun.openmpi");
            command.args(["--oversubscribe", "-n", &count]);
            command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
            command
        };
        match self {
            Program::Script(name) | Program::Torch(name) => ranks_of(&self.python(), name),
            Program::Spawning(name) | Program::SpawningTorch(name) => {
                let mut command = job.launch(self.python());
                command.arg(script(name));
                command
            }
            Program::Elastic(name) => {
                let mut command = job.launch(DEBIAN_PYTHON);
                command.arg(script(name)).arg(format!("--ranks={world}"));
                command
            }
            Program::Native(name) => {
                let mut command = job.launch("sh");
                command.env("WORLD_SIZE", count).args(["-c", EACH_RANK, "sh"]).arg(compiled.binary(name));
                command
            }
            Program::Mpi(name) => {
                let mut command = mpirun();
                command.arg(compiled.binary(name));
                command
            }
            Program::Mpi4py(name) => {
                let mut command = mpirun();
                command.arg(DEBIAN_PYTHON).arg(script(name));
                command
            }
        }
    }

    /// Whether its ranks busy-wait, so that few of them occupy a small machine.
    pub fn polls(self) -> bool {
        matches!(self, Program::Mpi(_) | Program::Mpi4py(_))
    }
}

/// A feature that a scenario needs from the machine, besides the needs of all scenarios.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// The freezer of control groups, version 1.
    Freezer,
    /// Control groups, version 2.
    Groups,
    /// Its own mounts, served by a program.
    Fuse,
    /// A program that is on the PATH.
    Tool(&'static str),
}

impl Need {
    /// Why it is not available here, if so.
    pub fn missing(self) -> Option<String> {
        let writable = |path: &Path| fs::OpenOptions::new().write(true).open(path).is_ok();
        match self {
            Need::Freezer => (!writable(Path::new("/sys/fs/cgroup/freezer/tasks")))
                .then(|| "there is no writable freezer of control groups".into()),
            Need::Groups => {
                let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
                let mut roots = mounts.lines().filter_map(|line| {
                    let mut words = line.split(' ').skip(1);
                    Some((words.next()?, words.next()?)).filter(|(_, kind)| *kind == "cgroup2")
                });
                let usable = roots.any(|(root, _)| writable(&Path::new(root).join("cgroup.procs")));
                (!usable).then(|| "there is no writable cgroup v2".into())
            }
            Need::Fuse => {
                let open = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
                let mounts =
                    || Command::new("unshare").args(["--mount", "true"]).output().map(|it| it.status.success());
                match open {
                    Err(error) => Some(format!("/dev/fuse: {error}")),
                    Ok(_) if !matches!(mounts(), Ok(true)) => Some("a process cannot have its own mounts".into()),
                    Ok(_) => None,
                }
            }
            Need::Tool(name) => {
                let path = env::var_os("PATH").unwrap_or_default();
                let found = env::split_paths(&path).any(|folder| folder.join(name).exists());
                (!found).then(|| format!("no {name}"))
            }
        }
    }
}

/// The last lines of an output.
pub fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(3)..].join(" | ")
}
