//! The subject of the report: this shell, a running process, or a program, and its libraries. These
//! are the libraries that a process has mapped, or those that the dynamic loader lists for a
//! program, with their sonames and functions. Only the needed parts of a file are read, because
//! libraries of a gigabyte are common here.
//!
//! [`Compared`] compares a library with the hook: its hooked functions, and those that are not
//! hooked although their names suggest that they matter. This is for users with a newer library
//! than the hook knows. A name alone proves little, so the second list contains candidates.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs::{self, File},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use object::{
    Endianness, Object, ObjectSymbol, ReadCache, SymbolKind,
    elf::{DT_SONAME, FileHeader64},
    read::elf::{Dyn, FileHeader},
};
use serde_json::{Value, json};
use xpu_timer_proto::{env::Source, file, printable::line, procfs, secrets};

use crate::{
    cli::ReportSubject,
    config::Config,
    container::{self, RemoteCommand},
    image::{Image, Obstacle},
    preload,
};

/// A library of the target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Library {
    /// Its soname, or the name of its file.
    pub name: String,
    /// The path by which this process can open its file.
    pub file: PathBuf,
}

/// The shared objects that a process has mapped. Their files are opened through its own root, which
/// may be a container's.
pub(super) fn of_process(process: &Process) -> Vec<Library> {
    let library = |path: &PathBuf| {
        let path = path.to_string_lossy();
        let path = path.strip_suffix(" (deleted)").unwrap_or(&path);
        let name = path.rsplit('/').next()?.to_string();
        let file = PathBuf::from(format!("/proc/{}/root{path}", process.pid));
        // A library that was opened through a link is mapped under another file name.
        name.contains(".so").then(|| Library { name: soname(&file).unwrap_or(name), file })
    };
    process.mapped.iter().filter_map(library).collect()
}

/// The libraries that the loader would load for a program, according to the loader, and those that
/// it does not find.
///
/// # Errors
/// The loader does not list them.
pub(super) fn of_program(program: &Program) -> Result<(Vec<Library>, Vec<String>)> {
    let image = &program.image;
    // A loader for another C library or processor has another list, if it can run at all.
    let foreign = image.obstacle.as_ref().is_some_and(Obstacle::forbids_preload);
    let Some(loader) = image.loader.as_ref().filter(|_| !foreign) else { return Ok((Vec::new(), Vec::new())) };
    let output = Command::new(loader)
        .arg("--list")
        .arg(&image.file)
        .env_remove("LD_PRELOAD")
        .output()
        .with_context(|| format!("{}", loader.display()))?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("{} --list {}: {}", loader.display(), image.file.display(), error.trim());
    }
    Ok(parse_loader_list(&String::from_utf8_lossy(&output.stdout)))
}

/// Parses lines such as `libc.so.6 => /lib/libc.so.6 (0x…)`, `/lib/ld.so (0x…)` and `libx.so => not
/// found`.
fn parse_loader_list(list: &str) -> (Vec<Library>, Vec<String>) {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for line in list.lines().map(str::trim) {
        let (name, place) = line.split_once(" => ").unwrap_or((line, line));
        if place == "not found" {
            missing.push(name.to_string());
            continue;
        }
        let file = place.rsplit_once(" (").map_or(place, |(file, _)| file);
        if file.starts_with('/') {
            let last = |path: &str| Path::new(path).file_name().map(|name| name.to_string_lossy().into_owned());
            found.push(Library {
                name: last(name.rsplit_once(" (").map_or(name, |(name, _)| name)).unwrap_or_default(),
                file: file.into(),
            });
        }
    }
    (found, missing)
}

/// Names of the functions in a library's dynamic symbol table.
///
/// # Errors
/// It cannot be read or is not an ELF file.
pub(super) fn exported_functions(library: &Path) -> Result<BTreeSet<String>> {
    let bytes = open_library(library)?;
    let file = object::File::parse(&bytes).with_context(|| format!("{} is not an ELF library", library.display()))?;
    let symbols = file.dynamic_symbols().filter(|symbol| symbol.is_definition() && symbol.kind() == SymbolKind::Text);
    Ok(symbols.filter_map(|symbol| Some(symbol.name().ok()?.to_string())).collect())
}

/// The name by which other objects refer to a library. `None` if it has none, or is not an ELF
/// library.
pub(super) fn soname(library: &Path) -> Option<String> {
    let bytes = open_library(library).ok()?;
    let header = FileHeader64::<Endianness>::parse(&bytes).ok()?;
    let endian = header.endian().ok()?;
    let sections = header.sections(endian, &bytes).ok()?;
    let (entries, link) = sections.dynamic(endian, &bytes).ok()??;
    let strings = sections.strings(endian, &bytes, link).ok()?;
    let name = entries.iter().find(|entry| entry.tag(endian) == DT_SONAME)?.string(endian, strings).ok()?;
    Some(String::from_utf8_lossy(name).into_owned())
}

fn open_library(library: &Path) -> Result<ReadCache<File>> {
    Ok(ReadCache::new(file::open(library).with_context(|| format!("{}", library.display()))?))
}

/// Prefixes of the names of libraries that the hook knows.
const LIBRARIES: [&str; 13] =
    ["nccl", "mccl", "Hccl", "cncl", "cu", "__cuda", "hip", "mc", "MPI_", "MPIX_", "musa", "mu", "msccl"];
/// Parts of names of functions that launch, communicate or multiply. Lower case, as the names are
/// compared.
const MATTERS: [&str; 21] = [
    "launch",
    "allreduce",
    "allgather",
    "reducescatter",
    "reduce_scatter",
    "broadcast",
    "bcast",
    "alltoall",
    "send",
    "recv",
    "gather",
    "scatter",
    "barrier",
    "signal",
    "comminit",
    "commsplit",
    "commgrow",
    "commshrink",
    "groupend",
    "gemm",
    "matmul",
];
/// Parts of names of functions that only query, configure or report.
const HARMLESS: [&str; 9] =
    ["get", "set", "attribute", "heuristic", "algo", "destroy", "hostfunc", "requirement", "node"];

/// The result.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Compared {
    file: PathBuf,
    hooked: Vec<String>,
    not_hooked: Vec<String>,
}

impl Compared {
    /// Compares the functions that a library exports with those of the hook that the launcher would
    /// use.
    ///
    /// # Errors
    /// One of them cannot be read.
    pub(super) fn with_hook(file: &Path) -> Result<Self> {
        let hook = exported_functions(&preload::find(&Config::read())?)?;
        if !file.exists() {
            bail!(
                "there is no file {}: --library takes the path of a library and searches no other folder",
                file.display()
            );
        }
        let own = exported_functions(file)?;
        let hooked = own.intersection(&hook).cloned().collect();
        // Functions have second names for profilers, which are aliases.
        let second = |name: &str| {
            ["p", "P"].iter().any(|prefix| name.strip_prefix(prefix).is_some_and(|name| own.contains(name)))
        };
        let not_hooked =
            own.difference(&hook).filter(|name| may_be_missing_hook(name) && !second(name)).cloned().collect();
        Ok(Compared { file: file.to_path_buf(), hooked, not_hooked })
    }

    /// As JSON.
    pub(super) fn json(&self) -> Value {
        json!({ "library": self.file, "hooked": self.hooked, "not_hooked": self.not_hooked })
    }

    /// As text.
    pub(super) fn text(&self) -> String {
        let mut text = format!("{}: {} functions are hooked\n", line(&self.file.to_string_lossy()), self.hooked.len());
        let mut list = |title: &str, names: &[String]| {
            text.push_str(&format!("\n{title}\n"));
            for name in names {
                text.push_str(&format!("  {}\n", line(name)));
            }
            if names.is_empty() {
                text.push_str("  none\n");
            }
        };
        list("Hooked", &self.hooked);
        list("Not hooked, but named like a launch, a collective or a matrix product", &self.not_hooked);
        text
    }
}

/// Whether the name suggests a function that launches, communicates or multiplies.
fn may_be_missing_hook(name: &str) -> bool {
    let lower = name.to_lowercase();
    LIBRARIES.iter().any(|prefix| name.starts_with(prefix))
        && MATTERS.iter().any(|part| lower.contains(part))
        && !HARMLESS.iter().any(|part| lower.contains(part))
}

/// An opened target.
pub(super) enum Target {
    /// This shell.
    Here,
    /// A running process.
    Process(Process),
    /// A program.
    Program(Program),
}

/// A running process.
pub(super) struct Process {
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
pub(super) struct Program {
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
    pub(super) fn open(wanted: ReportSubject) -> Result<Self> {
        match wanted {
            ReportSubject::Here => Ok(Target::Here),
            ReportSubject::Process(pid) => process(pid).map(Target::Process),
            ReportSubject::Program(command) => program(&command).map(Target::Program),
        }
    }

    /// Its settings.
    pub(super) fn source(&self) -> Source {
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
    pub(super) fn as_seen_by<T>(&self, path: &Path, use_it: impl FnOnce(&Path) -> T) -> T {
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
pub(super) fn value(environ: &[u8], name: &str) -> Option<String> {
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

fn program(command: &[OsString]) -> Result<Program> {
    let image = Image::of(command)?;
    let arguments: Vec<_> = command.iter().map(|argument| argument.to_string_lossy()).collect();
    let mut shown = secrets::command(arguments.iter().map(|argument| &**argument));
    if image.script {
        shown = format!("{shown} (a script for {})", image.file.display());
    }
    Ok(Program { image, elsewhere: container::elsewhere(command), command: shown })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_the_loader_is_parsed() {
        let list = "\tlinux-vdso.so.1 (0x00007ffe)\n\tlibcudart.so.13 => /opt/cuda lib/libcudart.so.13 (0x00007f)\n\t\
        libnccl.so.2 => not found\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f11)\n";
        let (found, missing) = parse_loader_list(list);
        let pair = |library: &Library| (library.name.clone(), library.file.display().to_string());
        assert_eq!(
            found.iter().map(pair).collect::<Vec<_>>(),
            [
                ("libcudart.so.13".into(), "/opt/cuda lib/libcudart.so.13".into()),
                ("ld-linux-x86-64.so.2".into(), "/lib64/ld-linux-x86-64.so.2".to_string()),
            ]
        );
        assert_eq!(missing, ["libnccl.so.2"]);
    }

    #[test]
    fn the_c_library_has_its_soname_and_functions() {
        let mapped = procfs::mapped_files(std::process::id() as i32).unwrap();
        let libc =
            mapped.iter().find(|path| path.to_string_lossy().contains("libc.so")).expect("this test is linked to it");
        assert_eq!(soname(libc).as_deref(), Some("libc.so.6"));
        assert!(exported_functions(libc).unwrap().contains("fopen"));
        assert_eq!(soname(Path::new("/proc/self/maps")), None);
        for (wrong, why) in [
            ("/nowhere.so", "/nowhere.so"),
            ("/proc", "not a regular file"),
            ("/proc/self/maps", "is not an ELF library"),
        ] {
            let error = format!("{:#}", exported_functions(Path::new(wrong)).unwrap_err());
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_name_says_whether_a_function_matters() {
        for name in
            ["ncclAllReduceLater", "cuLaunchKernelEx2", "cublasCgemm_v2", "hipGraphLaunchLater", "MPI_Isendrecv"]
        {
            assert!(may_be_missing_hook(name), "{name}");
        }
        for name in ["ncclCommCount", "cudaLaunchHostFunc", "cublasLtMatmulAlgoGetHeuristic", "sendto", "cuMemcpyAsync"]
        {
            assert!(!may_be_missing_hook(name), "{name}");
        }
    }
}
