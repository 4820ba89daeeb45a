//! Whom the report is about: this shell, a running process, or a program.

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use object::read::elf::{FileHeader, ProgramHeader};
use xpu_timer_proto::env::Source;

use super::cli::Wanted;

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
    /// Its environment when it was started.
    pub environ: Vec<u8>,
}

/// A program that is not run.
pub struct Program {
    /// Its file; of a script that of its interpreter.
    pub file: PathBuf,
    /// As it was named.
    pub command: String,
    /// Why the dynamic loader does not load the hook into it.
    pub obstacle: Option<String>,
    /// The program's dynamic loader; `None` for a statically linked one.
    pub loader: Option<PathBuf>,
}

impl Target {
    /// Finds the target.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn open(wanted: Wanted) -> Result<Self> {
        match wanted {
            Wanted::Here => Ok(Target::Here),
            Wanted::Process(pid) => process(pid).map(Target::Process),
            Wanted::Program(words) => program(&words).map(Target::Program),
        }
    }

    /// Its settings.
    pub fn source(&self) -> Source {
        match self {
            Target::Process(process) => {
                let environ = process.environ.clone();
                Source::with_ini(move |name| value(&environ, name))
            }
            _ => Source::process(),
        }
    }
}

/// A variable of a process's environment block.
pub fn value(environ: &[u8], name: &str) -> Option<String> {
    let entry = |entry: &[u8]| Some(entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?.to_vec());
    environ.split(|byte| *byte == 0).find_map(entry).map(|value| String::from_utf8_lossy(&value).into_owned())
}

fn process(pid: i32) -> Result<Process> {
    let folder = PathBuf::from(format!("/proc/{pid}"));
    if !folder.exists() {
        bail!("there is no process {pid}");
    }
    let read = |name: &str| {
        fs::read(folder.join(name))
            .with_context(|| format!("process {pid}: its {name} cannot be read, which only its user and root may"))
    };
    // What has ended, and what is a part of the kernel, has neither arguments nor memory.
    match state(&folder) {
        Some('Z' | 'X') => bail!("process {pid} has ended; its parent has not taken notice yet"),
        Some(_) if fs::read_link(folder.join("exe")).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) => {
            bail!("process {pid} is a part of the kernel")
        }
        _ => {}
    }
    let command: Vec<u8> = read("cmdline")?
        .strip_suffix(b"\0")
        .unwrap_or_default()
        .iter()
        .map(|byte| if *byte == 0 { b' ' } else { *byte })
        .collect();
    let mut mapped: Vec<PathBuf> = read("maps")?
        .split(|byte| *byte == b'\n')
        .filter_map(|line| {
            let place = line.iter().position(|byte| *byte == b'/')?;
            Some(PathBuf::from(OsStr::from_bytes(&line[place..])))
        })
        .collect();
    mapped.sort();
    mapped.dedup();
    let environ = read("environ")?;
    Ok(Process { pid, command: String::from_utf8_lossy(&command).into_owned(), mapped, environ })
}

/// The letter behind the name in `/proc/PID/stat`.
fn state(folder: &Path) -> Option<char> {
    let stat = fs::read_to_string(folder.join("stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

fn program(words: &[OsString]) -> Result<Program> {
    let mut file = find(&words[0])?;
    let mut script = false;
    // An interpreter may be a script itself, as those of pyenv are; the kernel allows four of them behind each other.
    for _ in 0..5 {
        let Some(interpreter) = interpreter_of_script(&file)? else { break };
        file = find(&interpreter)?;
        script = true;
    }
    let bytes = fs::read(&file).with_context(|| format!("{}", file.display()))?;
    let Ok(header) = object::elf::FileHeader64::<object::Endianness>::parse(&*bytes) else {
        bail!("{} is neither a 64-bit ELF program nor a script", file.display());
    };
    let endian = header.endian().with_context(|| format!("{}", file.display()))?;
    let headers = header.program_headers(endian, &*bytes).with_context(|| format!("{}", file.display()))?;
    let loader = headers.iter().find_map(|header| header.interpreter(endian, &*bytes).ok().flatten());
    let loader = loader.map(|path| PathBuf::from(OsStr::from_bytes(path)));
    let mode = fs::metadata(&file).map(|metadata| metadata.mode()).unwrap_or_default();
    let obstacle = if loader.is_none() {
        Some("it is statically linked: the dynamic loader, which would load the hook, has no part in it".to_string())
    } else if mode & 0o6000 != 0 {
        Some("it is set-user-id or set-group-id: the dynamic loader ignores LD_PRELOAD for it".to_string())
    } else if loader.as_deref().is_some_and(|loader| loader.to_string_lossy().contains("musl")) {
        Some("it runs on musl, and the hook is made for glibc".to_string())
    } else {
        None
    };
    let mut command = words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    if script {
        command = format!("{command} (a script for {})", file.display());
    }
    Ok(Program { file, command, obstacle, loader })
}

/// A program as a shell finds it.
fn find(name: &OsStr) -> Result<PathBuf> {
    let is_program =
        |path: &Path| fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.mode() & 0o111 != 0);
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        if !path.exists() {
            bail!("{} is not there", path.display());
        }
        if !is_program(&path) {
            bail!("{} is not an executable file", path.display());
        }
        return Ok(path);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join(name)).find(|place| is_program(place));
    found.with_context(|| format!("{} is not on the PATH", name.display()))
}

/// The first word behind `#!`, or the word behind it when that is `env`.
fn interpreter_of_script(file: &Path) -> Result<Option<OsString>> {
    use std::io::Read;
    let mut head = Vec::new();
    let open = fs::File::open(file).with_context(|| format!("{}", file.display()))?;
    open.take(256).read_to_end(&mut head).with_context(|| format!("{}", file.display()))?;
    let Some(line) = head.strip_prefix(b"#!").and_then(|rest| rest.split(|byte| *byte == b'\n').next()) else {
        return Ok(None);
    };
    let mut words = line.split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
    let first = words.next().with_context(|| format!("{} names no interpreter", file.display()))?;
    let word = match words.find(|word| !word.starts_with(b"-")) {
        Some(program) if first.ends_with(b"/env") => program,
        _ => first,
    };
    Ok(Some(OsStr::from_bytes(word).to_owned()))
}
