//! The programs that the corpus hangs, and how each kind is started. They have nothing in common but the libraries that they call.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use xpu_timer_tests::{Job, artifacts, compile_c, python, tree};

/// The Python that Debian's PyTorch and mpi4py are made for.
const DEBIAN_PYTHON: &str = "/usr/bin/python3";

/// What the ranks of a job run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// A script on the simulated device; its ranks are started as torchrun does it.
    Script(&'static str),
    /// The C++ program on the simulated device; a shell starts its ranks.
    Native,
    /// A script with Debian's PyTorch on gloo.
    Torch(&'static str),
    /// The C program under Open MPI.
    Mpi,
    /// A script with Debian's mpi4py under Open MPI.
    Mpi4py(&'static str),
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Program::Script(name) | Program::Torch(name) | Program::Mpi4py(name) => name,
            Program::Native => "native.cpp",
            Program::Mpi => "heat.c",
        })
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

/// What has to be compiled, once for all scenarios.
pub struct Compiled {
    /// A library that `faults.py` calls.
    pub vfork: PathBuf,
    native: PathBuf,
    heat: PathBuf,
}

impl Compiled {
    /// Compiles those of which `programs` has need into `folder`.
    pub fn of(programs: &[Program], folder: &Path) -> Result<Self> {
        let source = |name: &str| tree().join("tests/hangs/programs").join(name);
        let compiled = Compiled {
            vfork: compile_c(folder, "block_in_vfork.so", VFORK, &["-shared", "-fPIC"]),
            native: folder.join("native"),
            heat: folder.join("heat"),
        };
        let libraries = ["libcudart.so.13", "libnccl.so.2"].map(|name| artifacts().sim().join(name));
        let mut compilers = Vec::new();
        if programs.contains(&Program::Native) {
            let mut gcc = Command::new("g++");
            gcc.args(["-std=c++17", "-g", "-O1", "-pthread", "-Wl,--allow-shlib-undefined", "-o"]);
            gcc.arg(&compiled.native).arg(source("native.cpp")).args(libraries);
            compilers.push(gcc);
        }
        if programs.contains(&Program::Mpi) {
            let mut mpicc = Command::new("mpicc.openmpi");
            mpicc.args(["-g", "-O1", "-o"]).arg(&compiled.heat).arg(source("heat.c"));
            compilers.push(mpicc);
        }
        for mut compiler in compilers {
            let output = compiler.output().with_context(|| format!("{compiler:?}"))?;
            ensure!(output.status.success(), "{compiler:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(compiled)
    }
}

impl Program {
    /// The command that starts all ranks of a job, without the program's own arguments.
    pub fn command(self, job: &Job, world: u32, compiled: &Compiled) -> Command {
        let script = |name: &str| tree().join("tests/hangs/programs").join(name);
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
            Program::Script(name) => ranks_of(&python(), name),
            Program::Torch(name) => ranks_of(Path::new(DEBIAN_PYTHON), name),
            Program::Native => {
                let mut command = job.launch("sh");
                command.env("WORLD_SIZE", count).args(["-c", EACH_RANK, "sh"]).arg(&compiled.native);
                command
            }
            Program::Mpi => {
                let mut command = mpirun();
                command.arg(&compiled.heat);
                command
            }
            Program::Mpi4py(name) => {
                let mut command = mpirun();
                command.arg(DEBIAN_PYTHON).arg(script(name));
                command
            }
        }
    }

    /// Whether its ranks wait by polling, so that few of them fill a small machine.
    pub fn polls(self) -> bool {
        matches!(self, Program::Mpi | Program::Mpi4py(_))
    }
}

/// Whether the freezer of control groups can be used here.
pub fn can_freeze() -> bool {
    fs::metadata("/sys/fs/cgroup/freezer/tasks").is_ok_and(|tasks| !tasks.permissions().readonly())
}
