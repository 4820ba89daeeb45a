//! The external needs of tests: programs and libraries with their Debian packages, and folders
//! under `target/` that are set up once per tree.
//!
//! A check uses the tool as the tests do. The presence of one file of a package proves little:
//! Debian ships `mpicc.openmpi` in `openmpi-bin`, without the headers that it needs. A folder is
//! set up by the first process that needs it, and appears complete or not at all. Commands have a
//! deadline, and their failures are reduced to one line.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::fcntl::{Flock, FlockArg};

use crate::tools::tree;

/// The Python of Debian's Python modules.
pub const DEBIAN_PYTHON: &str = "/usr/bin/python3";

/// A check takes at most a second on a quiet machine, but importing PyTorch takes several.
const CHECK_DEADLINE: Duration = Duration::from_secs(120);

/// A package that the tests use, and its check.
#[derive(Debug, Clone, Copy)]
pub struct Need {
    /// The Debian package.
    pub package: &'static str,
    check: Check,
}

#[derive(Debug, Clone, Copy)]
enum Check {
    /// This command ends with status 0.
    Runs(&'static [&'static str]),
    /// Each of these programs compiles and links.
    Builds(&'static [Source]),
    /// A program starts without a linker error when this library is preloaded.
    Preloads(&'static str),
    /// The linker's cache contains a library with this name and a version.
    Links(&'static str),
}

/// A small program and its compiler.
#[derive(Debug, Clone, Copy)]
struct Source {
    compiler: &'static str,
    file: &'static str,
    text: &'static str,
    flags: &'static [&'static str],
}

const fn source(
    compiler: &'static str,
    file: &'static str,
    text: &'static str,
    flags: &'static [&'static str],
) -> Source {
    Source { compiler, file, text, flags }
}

const PLAIN_C: &str = "#include <stdio.h>\nint main(void) { return puts(\"\") < 0; }\n";
const PLAIN_CXX: &str = "#include <vector>\nint main() { return std::vector<int>(1)[0]; }\n";
const PLAIN_FORTRAN: &str = "program main\nprint *, 'x'\nend program\n";
const MPI_C: &str = "#include <mpi.h>\nint main(int n, char **v) { MPI_Init(&n, &v); return MPI_Finalize(); }\n";
const MPI_FORTRAN: &str = "program main\nuse mpi\ninteger e\ncall MPI_Init(e)\nend program\n";
const MPI_FORTRAN_2008: &str = "program main\nuse mpi_f08\ninteger e\ncall MPI_Init(e)\nend program\n";

const fn need(package: &'static str, check: Check) -> Need {
    Need { package, check }
}

/// Everything that the tests use.
pub const NEEDS: [Need; 25] = [
    need("gcc", Check::Runs(&["gcc", "--version"])),
    need(
        "libc6-dev",
        Check::Builds(&[
            source("gcc", "c.c", PLAIN_C, &["-lm", "-ldl", "-pthread"]),
            source("gcc", "static.c", PLAIN_C, &["-static"]),
        ]),
    ),
    need("g++", Check::Builds(&[source("g++", "cxx.cpp", PLAIN_CXX, &["-std=c++17", "-pthread"])])),
    need("gfortran", Check::Builds(&[source("gfortran", "plain.f90", PLAIN_FORTRAN, &[])])),
    need("clang", Check::Builds(&[source("clang", "clang.c", PLAIN_C, &[])])),
    // Bindings are generated with the library, not with the program.
    need("libclang-dev", Check::Links("libclang-")),
    need("binutils", Check::Runs(&["objcopy", "--version"])),
    need("xz-utils", Check::Runs(&["xz", "--version"])),
    need("bsdutils", Check::Runs(&["script", "--version"])),
    need("util-linux", Check::Runs(&["unshare", "--version"])),
    need("iproute2", Check::Runs(&["ip", "-V"])),
    need("sudo", Check::Runs(&["sudo", "-V"])),
    need("openssl", Check::Runs(&["openssl", "version"])),
    need("python3", Check::Runs(&["python3", "-c", "import ctypes, multiprocessing, ssl"])),
    // In Debian, the part of venv that installs pip is a separate package.
    need("python3-venv", Check::Runs(&["python3", "-c", "import ensurepip"])),
    need("gdb", Check::Runs(&["gdb", "--version"])),
    need("dwz", Check::Runs(&["dwz", "--version"])),
    need("openmpi-bin", Check::Runs(&["mpirun.openmpi", "--version"])),
    need(
        "libopenmpi-dev",
        Check::Builds(&[
            source("mpicc.openmpi", "open.c", MPI_C, &[]),
            source("mpif90.openmpi", "open.f90", MPI_FORTRAN, &[]),
            source("mpif90.openmpi", "open08.f90", MPI_FORTRAN_2008, &[]),
        ]),
    ),
    need("mpich", Check::Runs(&["mpirun.mpich", "--version"])),
    need(
        "libmpich-dev",
        Check::Builds(&[
            source("mpicc.mpich", "mpich.c", MPI_C, &[]),
            source("mpif90.mpich", "mpich.f90", MPI_FORTRAN, &[]),
            source("mpif90.mpich", "mpich08.f90", MPI_FORTRAN_2008, &[]),
        ]),
    ),
    need(
        "python3-mpi4py",
        Check::Runs(&[DEBIAN_PYTHON, "-c", "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"]),
    ),
    need("python3-torch", Check::Runs(&[DEBIAN_PYTHON, "-c", "import torch.distributed"])),
    need("libjemalloc2", Check::Preloads("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2")),
    need("libtcmalloc-minimal4", Check::Preloads("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")),
];

impl Need {
    /// Checks whether the tests can use it here.
    ///
    /// # Errors
    /// What does not work; one line.
    pub fn check(&self) -> Result<()> {
        match self.check {
            Check::Runs([program, arguments @ ..]) => run(Command::new(program).args(arguments)),
            Check::Runs([]) => Ok(()),
            Check::Builds(sources) => sources.iter().try_for_each(Source::build),
            Check::Preloads(library) => preload(library),
            Check::Links(name) => link(name),
        }
        .with_context(|| self.package)
    }
}

/// The packages of this list, or of all that the tests use if it is empty, that do not work here,
/// and why.
#[must_use]
pub fn missing(packages: &[&str]) -> Vec<(&'static str, anyhow::Error)> {
    let wanted = NEEDS.iter().filter(|need| packages.is_empty() || packages.contains(&need.package));
    std::thread::scope(|scope| {
        let checks: Vec<_> = wanted.map(|need| (need.package, scope.spawn(|| need.check()))).collect();
        let ended = checks.into_iter().map(|(package, check)| {
            let result = check.join().unwrap_or_else(|_| Err(anyhow!("{package}: the check panicked")));
            (package, result)
        });
        ended.filter_map(|(package, result)| Some((package, result.err()?))).collect()
    })
}

/// Why a test that uses this package cannot run here. The check runs once per process.
///
/// # Panics
/// The package is not in [`NEEDS`].
#[must_use]
pub fn lacks(package: &str) -> Option<String> {
    static FOUND: [OnceLock<Option<String>>; NEEDS.len()] = [const { OnceLock::new() }; NEEDS.len()];
    let index = NEEDS.iter().position(|need| need.package == package).expect("the package is in the table");
    let lacks = || {
        let error = NEEDS[index].check().err()?;
        Some(format!("{error:#}; cargo xtask test installs it as root"))
    };
    FOUND[index].get_or_init(lacks).clone()
}

impl Source {
    fn build(&self) -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join(self.file);
        fs::write(&path, self.text)?;
        run(Command::new(self.compiler).arg("-o").arg(folder.path().join("program")).arg(&path).args(self.flags))
    }
}

fn preload(library: &str) -> Result<()> {
    ensure!(Path::new(library).exists(), "no {library}");
    let output = Command::new("/bin/true").env("LD_PRELOAD", library).output()?;
    // The linker continues without a library that it cannot load, after a line on stderr.
    ensure!(output.status.success() && output.stderr.is_empty(), "{}", last_line(&output.stderr));
    Ok(())
}

fn link(name: &str) -> Result<()> {
    let output = Command::new("ldconfig").arg("-p").env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin").output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut versions = text.lines().filter_map(|line| line.trim().strip_prefix(name));
    let found = versions.any(|version| version.starts_with(|first: char| first.is_ascii_digit()));
    ensure!(found, "the linker knows no {name}VERSION.so");
    Ok(())
}

fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    finish_within(command, &program, CHECK_DEADLINE)
}

/// Setup takes about 30 s. A slow mirror may take much longer, but a dead one must not block
/// forever.
const SETUP_DEADLINE: Duration = Duration::from_secs(900);

/// `target/NAME`. If it does not exist, `fill` fills a folder beside it, which is then renamed. A
/// lock file prevents two processes from doing this at once.
pub(crate) fn set_up(name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let target = tree().join("target");
    let root = target.join(name);
    if root.exists() {
        return Ok(root);
    }
    fs::create_dir_all(root.parent().unwrap_or(&target))?;
    let _lock = lock(&target.join(format!("{name}.lock")))?;
    if root.exists() {
        return Ok(root);
    }
    let temporary = target.join(format!("{name}.new"));
    remove(&temporary)?;
    fs::create_dir(&temporary).with_context(|| format!("{}", temporary.display()))?;
    eprintln!("setting up {}", root.display());
    if let Err(error) = fill(&temporary) {
        // The failure is more important than an error of this removal; the next run removes the
        // rest.
        let _ = remove(&temporary);
        return Err(error.context(format!("{} cannot be set up", root.display())));
    }
    fs::rename(&temporary, &root)?;
    Ok(root)
}

/// Removes a folder, which may be missing.
pub(crate) fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{}", folder.display()))
        }
        _ => Ok(()),
    }
}

fn lock(path: &Path) -> Result<Flock<fs::File>> {
    let start = Instant::now();
    let mut file = fs::File::create(path).with_context(|| format!("{}", path.display()))?;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((back, nix::errno::Errno::EWOULDBLOCK)) => file = back,
            Err((_, error)) => return Err(error).with_context(|| format!("{}", path.display())),
        }
        ensure!(start.elapsed() < SETUP_DEADLINE, "{} has been locked for {SETUP_DEADLINE:?}", path.display());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs a setup command.
pub(crate) fn finish(command: &mut Command, what: &str) -> Result<()> {
    finish_within(command, what, SETUP_DEADLINE)
}

/// Runs a command to its end, with a deadline. A failure is one line, with the most informative
/// line of the output.
pub(crate) fn finish_within(command: &mut Command, what: &str, deadline: Duration) -> Result<()> {
    let mut log = tempfile::tempfile()?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
    let mut child = command.spawn().with_context(|| format!("{what} cannot be started"))?;
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if start.elapsed() > deadline {
            child.kill()?;
            child.wait()?;
            bail!("{what} did not end within {deadline:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    if !status.success() {
        let mut text = Vec::new();
        io::Seek::rewind(&mut log)?;
        io::Read::read_to_end(&mut log, &mut text)?;
        bail!("{what}: {status}: {}", last_line(&text));
    }
    Ok(())
}

/// The most informative line: the first that contains "error", else the last.
pub(crate) fn last_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines()
        .find(|line| line.to_lowercase().contains("error"))
        .or_else(|| lines().next_back())
        .unwrap_or_default()
        .into()
}
