//! The subject of the report: this shell, a running process, or a program.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use xpu_timer_proto::{env::Source, file, procfs, secrets};

use crate::{
    cli::ReportSubject,
    container::{self, RemoteCommand},
    image::Image,
};

/// An opened target.
pub enum Target {
    /// This shell.
    Here,
    /// A running process.
    Process(Process),
    /// A program.
    Program(Program),
}

/// A running process.
pub struct Process {
    /// Its id.
    pub pid: i32,
    /// Its arguments, joined.
    pub command: String,
    /// Paths of the files that it has mapped.
    pub mapped: Vec<PathBuf>,
    /// Its environment at its start.
    pub environ: Vec<u8>,
}

/// A program, which is not run.
pub struct Program {
    /// Its executable file.
    pub image: Image,
    /// Where it would run its ranks, if not here.
    pub elsewhere: Option<RemoteCommand>,
    /// The command as the user typed it.
    pub command: String,
}

impl Target {
    /// Opens the target.
    ///
    /// # Errors
    /// It does not exist or cannot be read.
    pub fn open(wanted: ReportSubject) -> Result<Self> {
        match wanted {
            ReportSubject::Here => Ok(Target::Here),
            ReportSubject::Process(pid) => process(pid).map(Target::Process),
            ReportSubject::Program(words) => program(&words).map(Target::Program),
        }
    }

    /// Its settings.
    pub fn source(&self) -> Source {
        match self {
            Target::Process(process) => {
                let (environ, pid) = (process.environ.clone(), process.pid);
                Source::with_ini(
                    move |name| value(&environ, name),
                    move |path| file::read_within(&place_in(pid, Path::new(path))),
                )
            }
            _ => Source::process(),
        }
    }

    /// Uses a path of the target's settings. A path of a process is resolved as the process sees
    /// it.
    pub fn as_seen_by<T>(&self, path: &Path, use_it: impl FnOnce(&Path) -> T) -> T {
        let Target::Process(process) = self else { return use_it(path) };
        let place = place_in(process.pid, path);
        // The path goes through a descriptor, because a socket's path must be short.
        match File::options().read(true).custom_flags(libc::O_PATH).open(&place) {
            Ok(file) => use_it(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd()))),
            Err(_) => use_it(&place),
        }
    }
}

/// The path at which this process finds `path` of another process, which may have another root and
/// working folder.
fn place_in(pid: i32, path: &Path) -> PathBuf {
    let process = PathBuf::from(format!("/proc/{pid}"));
    match path.strip_prefix("/") {
        Ok(path) => process.join("root").join(path),
        Err(_) => process.join("cwd").join(path),
    }
}

/// The value of a variable in the environment block of a process.
pub fn value(environ: &[u8], name: &str) -> Option<String> {
    procfs::variable(environ, name).map(|value| String::from_utf8_lossy(value).into_owned())
}

fn process(pid: i32) -> Result<Process> {
    let folder = PathBuf::from(format!("/proc/{pid}"));
    if !folder.exists() {
        bail!("there is no process {pid}");
    }
    // An ended process, and a kernel thread, has neither arguments nor memory.
    match procfs::stat(pid).map(|stat| stat.state) {
        Ok('Z' | 'X') => bail!("process {pid} has ended; its parent has not waited for it yet"),
        Ok(_) if fs::read_link(folder.join("exe")).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) => {
            bail!("process {pid} is a kernel thread")
        }
        _ => {}
    }
    let command = secrets::cmdline(&readable(pid, "cmdline", procfs::cmdline(pid))?);
    let mapped = readable(pid, "maps", procfs::mapped_files(pid))?;
    let environ = readable(pid, "environ", procfs::environ(pid))?;
    Ok(Process { pid, command, mapped, environ })
}

/// Adds to an error what the user can do about it.
fn readable<T>(pid: i32, name: &str, read: Result<T, procfs::Error>) -> Result<T> {
    read.map_err(|error| error.source).with_context(|| {
        format!("process {pid}: cannot read its {name}: run this as its user, or as root with CAP_SYS_PTRACE")
    })
}

fn program(words: &[OsString]) -> Result<Program> {
    let image = Image::of(words)?;
    let arguments: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    let mut command = secrets::command(arguments.iter().map(|argument| &**argument));
    if image.script {
        command = format!("{command} (a script for {})", image.file.display());
    }
    Ok(Program { image, elsewhere: container::elsewhere(words), command })
}
