//! The programs and libraries that the tests run. They are built first unless that is done already.

use std::{
    env, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use anyhow::{Context, Result, ensure};

use crate::tools::tree;

/// The packages whose programs and libraries the tests run.
pub const PACKAGES: [&str; 14] = [
    "xpu_timer_hook",
    "xpu_timer_launch",
    "xpu_timer_capture",
    "xpu_timer_collector",
    "xpu_timer_timeline",
    "xpu_timer_viewer",
    "sim_cuda",
    "sim_cudart",
    "sim_cudart12",
    "sim_cublas",
    "sim_cublas12",
    "sim_cublaslt",
    "sim_cublaslt12",
    "sim_nccl",
];

/// The installed files of a node, by name.
pub const INSTALLED: [&str; 9] = [
    "xpu_timer_launch",
    "xpu_timer_collector",
    "xpu_timer_dump_timeline",
    "xpu_timer_stacktrace_viewer",
    "xpu_timer_dump",
    "xpu_timer_gen_trace_timeline",
    "xpu_timer_diff",
    "xpu_timer_print_env",
    "libxpu_timer_hook.so",
];

/// Simulated libraries: their name in cargo, and their real soname.
const SIM: [(&str, &str); 8] = [
    ("libsim_cuda.so", "libcuda.so.1"),
    ("libsim_cudart.so", "libcudart.so.13"),
    ("libsim_cudart12.so", "libcudart.so.12"),
    ("libsim_cublas.so", "libcublas.so.13"),
    ("libsim_cublas12.so", "libcublas.so.12"),
    ("libsim_cublaslt.so", "libcublasLt.so.13"),
    ("libsim_cublaslt12.so", "libcublasLt.so.12"),
    ("libsim_nccl.so", "libnccl.so.2"),
];

/// A cargo profile folder that contains all built artifacts.
#[derive(Debug, Clone)]
pub struct Artifacts {
    dir: PathBuf,
}

/// The artifacts beside the running executable. Builds them once per process, unless
/// `XPU_TIMER_ARTIFACTS=ready` shows that `cargo xtask test` has built them.
///
/// # Panics
/// The build fails.
pub fn artifacts() -> &'static Artifacts {
    static ARTIFACTS: OnceLock<Artifacts> = OnceLock::new();
    ARTIFACTS.get_or_init(|| {
        let artifacts = Artifacts::beside_this_executable().expect("the test runs from a cargo target folder");
        if env::var_os("XPU_TIMER_ARTIFACTS").is_none_or(|value| value != "ready") {
            artifacts.build(true).expect("the packages under test build");
        }
        artifacts.link_sim().expect("links to the simulated libraries");
        artifacts
    })
}

impl Artifacts {
    /// The profile folder of the running test or xtask.
    ///
    /// # Errors
    /// The executable is not below such a folder.
    pub fn beside_this_executable() -> Result<Self> {
        let exe = env::current_exe()?;
        let parent = exe.parent().context("executable without a folder")?;
        let dir = if parent.ends_with("deps") { parent.parent().context("deps without a folder")? } else { parent };
        Ok(Artifacts { dir: dir.to_path_buf() })
    }

    /// Builds [`PACKAGES`] into this folder.
    ///
    /// # Errors
    /// Cargo cannot be run or fails.
    pub fn build(&self, quiet: bool) -> Result<()> {
        let target = self.dir.parent().context("profile folder without a parent")?;
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.arg("build").arg("--target-dir").arg(target).current_dir(tree());
        if quiet {
            cargo.arg("--quiet");
        }
        if self.dir.ends_with("release") {
            cargo.arg("--release");
        }
        for package in PACKAGES {
            cargo.args(["-p", package]);
        }
        let status = cargo.status().context("cargo cannot be run")?;
        ensure!(status.success(), "cargo build: {status}");
        Ok(())
    }

    /// Creates [`Artifacts::sim`].
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn link_sim(&self) -> Result<()> {
        fs::create_dir_all(self.sim())?;
        for (built, soname) in SIM {
            let link = self.sim().join(soname);
            let target = Path::new("..").join(built);
            if fs::read_link(&link).ok().as_deref() != Some(&target) {
                let temporary = self.sim().join(format!("{soname}.{}", std::process::id()));
                symlink(&target, &temporary)?;
                fs::rename(&temporary, &link).with_context(|| format!("{}", link.display()))?;
            }
        }
        Ok(())
    }

    /// Path of a program, for example `xpu_timer_launch`.
    #[must_use]
    pub fn bin(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Path of `libxpu_timer_hook.so`.
    #[must_use]
    pub fn hook(&self) -> PathBuf {
        self.dir.join("libxpu_timer_hook.so")
    }

    /// Folder with the simulated libraries under their real sonames, for `LD_LIBRARY_PATH`.
    #[must_use]
    pub fn sim(&self) -> PathBuf {
        self.dir.join("sim")
    }
}
