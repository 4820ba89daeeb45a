//! The programs and libraries that the tests run, and what users install of them. They are built
//! first unless that is done already.
//!
//! Users install the stripped files, or a Python wheel that holds them and no Python code, so that
//! `pip install` puts them into a virtual environment. See the binary distribution format of
//! packaging.python.org.

use std::{
    env,
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use anyhow::{Context, Result, ensure};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use memchr::memmem;
use sha2::{Digest, Sha256};
use zip::{CompressionMethod, DateTime, ZipWriter, write::SimpleFileOptions};

use crate::{packages::PACKAGES, tools::tree};

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
const SIM: [(&str, &str); 5] = [
    ("libsim_cuda.so", "libcuda.so.1"),
    ("libsim_cudart.so", "libcudart.so.13"),
    ("libsim_cublas.so", "libcublas.so.13"),
    ("libsim_cublaslt.so", "libcublasLt.so.13"),
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
        // This crate too: with it, all dependencies have the features with which xtask was built.
        for package in PACKAGES.into_iter().chain([env!("CARGO_PKG_NAME")]) {
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
                self.place(soname, |temporary| symlink(&target, temporary))?;
            }
            if let Some(library) = soname.strip_suffix(".13") {
                self.copy_for_cuda_12(built, soname, &format!("{library}.12"))?;
            }
        }
        Ok(())
    }

    /// Writes the library of CUDA 12: the same file with the name of CUDA 12 in place of its own,
    /// so that it has this soname and answers with this version.
    fn copy_for_cuda_12(&self, built: &str, soname: &str, older: &str) -> Result<()> {
        let built = self.dir.join(built);
        let modified = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified());
        let source = modified(&built).with_context(|| built.display().to_string())?;
        if modified(&self.sim().join(older)).is_ok_and(|copied| copied >= source) {
            return Ok(());
        }
        let mut bytes = fs::read(&built).with_context(|| built.display().to_string())?;
        let places: Vec<usize> = memmem::find_iter(&bytes, soname).collect();
        ensure!(!places.is_empty(), "{} does not contain its name {soname}", built.display());
        for place in places {
            bytes[place..place + older.len()].copy_from_slice(older.as_bytes());
        }
        self.place(older, |temporary| fs::write(temporary, bytes))
    }

    /// Makes a file of [`Artifacts::sim`] at once: other tests may be reading the previous one.
    fn place(&self, name: &str, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
        let path = self.sim().join(name);
        let temporary = self.sim().join(format!("{name}.{}", std::process::id()));
        make(&temporary).and_then(|()| fs::rename(&temporary, &path)).with_context(|| format!("{}", path.display()))
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

/// Any CPython 3 and no ABI: there is no Python code in it. glibc 2.28 is the oldest that the files
/// need.
const TAG: &str = "py3-none-manylinux_2_28_x86_64";
/// Installed files need this glibc, that of Red Hat 8; Ubuntu 20.04 has 2.31.
const OLDEST: (u32, u32) = (2, 28);
const NAME: &str = "xpu_timer";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Copies the installed files from one folder to another, without debug information. The names of
/// functions stay, so that a stack through the hook can be read; lines do not, which are most of
/// the bytes.
///
/// # Errors
/// When a file cannot be copied, or needs a newer glibc than [`old_enough`] allows.
pub fn copy_stripped(built: &Path, folder: &Path) -> Result<()> {
    for file in INSTALLED {
        let copy = folder.join(file);
        let status = Command::new("objcopy").arg("--strip-debug").arg(built.join(file)).arg(&copy).status();
        let status = status.context("objcopy cannot be run")?;
        ensure!(status.success(), "objcopy of {}: {status}", built.join(file).display());
        old_enough(&copy)?;
    }
    Ok(())
}

/// Checks that an installed file needs no newer glibc than old containers have.
///
/// # Errors
/// The functions that are too new, or why this is unknown.
pub fn old_enough(file: &Path) -> Result<()> {
    let objdump = Command::new("objdump").arg("-T").arg(file).output().context("objdump cannot be run")?;
    ensure!(objdump.status.success(), "{}", String::from_utf8_lossy(&objdump.stderr));
    let text = String::from_utf8_lossy(&objdump.stdout);
    let asked: Vec<(&str, (u32, u32))> = text.lines().filter_map(asked).collect();
    ensure!(!asked.is_empty(), "{} needs no function of glibc", file.display());
    let newer: Vec<_> = asked.into_iter().filter(|(_, version)| *version > OLDEST).collect();
    ensure!(newer.is_empty(), "{} needs {newer:?}, which is too new; see glibc_compat/build.rs", file.display());
    Ok(())
}

/// The glibc function in a line of `objdump -T`, and the version that introduced it.
fn asked(line: &str) -> Option<(&str, (u32, u32))> {
    let (before, after) = line.split_once("(GLIBC_")?;
    let (version, name) = after.split_once(')')?;
    let mut numbers = version.split('.').map(str::parse);
    let version = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    before.contains("*UND*").then_some((name.trim(), version))
}

/// Writes `xpu_timer-VERSION-….whl` into a folder, from the installed files in another one. Returns
/// its path.
///
/// # Errors
/// When one of the files cannot be read, or the wheel cannot be written.
pub fn write_wheel(installed: &Path, folder: &Path) -> Result<PathBuf> {
    let path = folder.join(format!("{NAME}-{VERSION}-{TAG}.whl"));
    let file = File::create(&path).with_context(|| path.display().to_string())?;
    let mut wheel = Wheel { zip: ZipWriter::new(file), record: String::new() };
    for name in INSTALLED {
        let from = installed.join(name);
        let bytes = fs::read(&from).with_context(|| from.display().to_string())?;
        // The launcher looks for the hook in `../lib`.
        let place = if name.ends_with(".so") { "data/lib" } else { "scripts" };
        wheel.add(&format!("{NAME}-{VERSION}.data/{place}/{name}"), &bytes, 0o755)?;
    }
    let info = format!("{NAME}-{VERSION}.dist-info");
    let license = tree().join("LICENSE");
    let license = fs::read(&license).with_context(|| license.display().to_string())?;
    wheel.add(&format!("{info}/licenses/LICENSE"), &license, 0o644)?;
    wheel.add(&format!("{info}/METADATA"), metadata()?.as_bytes(), 0o644)?;
    let about = format!("Wheel-Version: 1.0\nGenerator: cargo xtask dist\nRoot-Is-Purelib: false\nTag: {TAG}\n");
    wheel.add(&format!("{info}/WHEEL"), about.as_bytes(), 0o644)?;
    wheel.finish(&format!("{info}/RECORD")).with_context(|| path.display().to_string())?;
    Ok(path)
}

fn metadata() -> Result<String> {
    let readme = tree().join("README.md");
    let readme = fs::read_to_string(&readme).with_context(|| readme.display().to_string())?;
    Ok(format!(
        "Metadata-Version: 2.4\nName: {NAME}\nVersion: {VERSION}\nSummary: Finds the rank that hangs a distributed GPU job, and why\n\
         License-Expression: {}\nLicense-File: LICENSE\nRequires-Python: >=3\nDescription-Content-Type: text/markdown\n\n{readme}",
        env!("CARGO_PKG_LICENSE")
    ))
}

struct Wheel {
    zip: ZipWriter<File>,
    record: String,
}

impl Wheel {
    fn add(&mut self, name: &str, bytes: &[u8], mode: u32) -> Result<()> {
        // Equal files make equal wheels: no time of the build.
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Deflated)
            .last_modified_time(DateTime::default())
            .unix_permissions(mode);
        self.zip.start_file(name, options).with_context(|| name.to_owned())?;
        self.zip.write_all(bytes).with_context(|| name.to_owned())?;
        let hash = URL_SAFE_NO_PAD.encode(Sha256::digest(bytes));
        self.record.push_str(&format!("{name},sha256={hash},{}\n", bytes.len()));
        Ok(())
    }

    fn finish(mut self, name: &str) -> Result<()> {
        // The list itself has neither hash nor size.
        let record = format!("{}{name},,\n", self.record);
        self.add(name, record.as_bytes(), 0o644)?;
        self.zip.finish()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::asked;

    #[test]
    fn what_is_asked_for_and_what_is_offered() {
        let line = "0000000000000000  w   DF *UND*\t0000000000000000 (GLIBC_2.30) gettid";
        assert_eq!(asked(line), Some(("gettid", (2, 30))));
        assert_eq!(
            asked("0000000000000000      DF *UND*\t0000000000000000 (GLIBC_2.2.5) memcpy"),
            Some(("memcpy", (2, 2)))
        );
        assert_eq!(asked("0000000000001000 g    DF .text\t0000000000000010 (GLIBC_2.34) mine"), None);
        assert_eq!(asked("0000000000001000 g    DF .text\t0000000000000010  Base        ncclAllReduce"), None);
    }
}
