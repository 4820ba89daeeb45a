//! The program of a command: its file, its dynamic loader, and why the loader does not load the
//! hook. The program is inspected, never run.

use std::{
    ffi::{OsStr, OsString},
    fmt,
    fs::{self, File},
    io::Read,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use object::{
    Endianness, FileKind, ReadCache,
    elf::{EM_X86_64, FileHeader32, FileHeader64},
    read::elf::{FileHeader, ProgramHeader},
};
use xpu_timer_proto::file::open as open_regular;

/// The program of a command.
pub(crate) struct Image {
    /// Its file; for a script, that of its interpreter.
    pub file: PathBuf,
    /// Whether the file is a script's interpreter.
    pub script: bool,
    /// Its dynamic loader; `None` if it is statically linked.
    pub loader: Option<PathBuf>,
    /// Why the hook is not loaded into it.
    pub obstacle: Option<Obstacle>,
}

/// Why the dynamic loader does not load the hook into a program.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// It has no dynamic loader.
    Static,
    /// Its loader ignores the LD_PRELOAD of the user who starts it.
    Privileged,
    /// It uses another C library.
    Musl,
    /// It has another address size.
    Bits32,
    /// It is for another processor; the kernel may have an emulator.
    Machine,
    /// Its loader is not the system's; the text is its error about the hook.
    Loader(String),
}

impl Obstacle {
    /// Whether LD_PRELOAD with the hook prints an error or prevents the start. Otherwise it still
    /// serves the programs that this program starts.
    pub(crate) fn forbids_preload(&self) -> bool {
        !matches!(self, Obstacle::Static | Obstacle::Privileged)
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Obstacle::Static => "it is statically linked, so the dynamic loader cannot load the hook",
            Obstacle::Privileged => "it is set-user-id or set-group-id: the dynamic loader ignores LD_PRELOAD for it",
            Obstacle::Musl => "it uses musl, but the hook needs glibc",
            Obstacle::Bits32 => "it is a 32-bit program, but the hook is a 64-bit library",
            Obstacle::Machine => "it is not built for x86-64",
            Obstacle::Loader(message) => return write!(f, "its dynamic loader rejects the hook: {message}"),
        })
    }
}

/// Maximum number of interpreters that the kernel follows, and of nested commands such as `env`.
const LONGEST_CHAIN: usize = 5;

impl Image {
    /// The program that finally runs, after `env` and the `#!` lines of scripts.
    ///
    /// # Errors
    /// It does not exist, cannot be read, or is neither a program nor a script.
    pub(crate) fn of(command: &[OsString]) -> Result<Self> {
        let mut path = std::env::var_os("PATH").unwrap_or_default();
        let mut file = find(&command[0], &path)?;
        let mut arguments = command.to_vec();
        let mut script = false;
        for _ in 0..2 * LONGEST_CHAIN {
            if let Some(next) = behind_env(&arguments, &mut path) {
                file = find(&next[0], &path)?;
                arguments = next;
            } else if let Some(mut interpreter) = interpreter_of_script(&file)? {
                file = find(&interpreter[0], &path)?;
                interpreter.push(arguments[0].clone());
                arguments = interpreter;
                script = true;
            } else {
                break;
            }
        }
        let (loader, made_for) = read(&file)?;
        let obstacle = made_for.or_else(|| own_obstacle(&file, loader.as_deref()));
        Ok(Image { file, script, loader, obstacle })
    }

    /// Why this program's loader rejects the hook. Only a loader that differs from the launcher's
    /// is asked.
    pub(crate) fn refusal_of(&self, hook: &Path) -> Option<Obstacle> {
        let loader = self.loader.as_ref()?;
        let ours = std::env::current_exe().ok().and_then(|exe| read(&exe).ok()?.0);
        if ours.is_some_and(|ours| same_file(&ours, loader)) {
            return None;
        }
        let output = Command::new(loader).arg("--list").arg(&self.file).env("LD_PRELOAD", hook).output().ok()?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        let line = stderr.lines().find(|line| line.contains(&*hook.to_string_lossy()))?;
        Some(Obstacle::Loader(line.trim().to_string()))
    }
}

fn same_file(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino())).ok();
    id(one).is_some_and(|one| Some(one) == id(other))
}

/// The loader of an ELF file, and the obstacle that its header shows.
fn read(file: &Path) -> Result<(Option<PathBuf>, Option<Obstacle>)> {
    let named = || file.display().to_string();
    let data = ReadCache::new(open_regular(file).with_context(named)?);
    match FileKind::parse(&data) {
        Ok(FileKind::Elf64) => header::<FileHeader64<Endianness>>(&data).with_context(named),
        Ok(FileKind::Elf32) => {
            Ok((header::<FileHeader32<Endianness>>(&data).with_context(named)?.0, Some(Obstacle::Bits32)))
        }
        _ => bail!("{} is neither an ELF program nor a script", file.display()),
    }
}

fn header<H: FileHeader<Endian = Endianness>>(data: &ReadCache<File>) -> Result<(Option<PathBuf>, Option<Obstacle>)> {
    let header = H::parse(data)?;
    let endian = header.endian()?;
    let mut loaders = header
        .program_headers(endian, data)?
        .iter()
        .filter_map(|header| header.interpreter(endian, data).ok().flatten());
    let loader = loaders.next().map(|path| PathBuf::from(OsStr::from_bytes(path)));
    let other = header.e_machine(endian) != EM_X86_64;
    Ok((loader, other.then_some(Obstacle::Machine)))
}

fn own_obstacle(file: &Path, loader: Option<&Path>) -> Option<Obstacle> {
    match loader {
        None => Some(Obstacle::Static),
        Some(_) if gains_rights(file) => Some(Obstacle::Privileged),
        Some(loader) if loader.to_string_lossy().contains("ld-musl") => Some(Obstacle::Musl),
        Some(_) => None,
    }
}

/// Whether running the file changes the user or group.
fn gains_rights(file: &Path) -> bool {
    let Ok(metadata) = fs::metadata(file) else { return false };
    let (user, group) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    (metadata.mode() & 0o4000 != 0 && metadata.uid() != user)
        || (metadata.mode() & 0o2000 != 0 && metadata.gid() != group)
}

/// Finds a program as a shell does.
fn find(name: &OsStr, path: &OsStr) -> Result<PathBuf> {
    let is_program =
        |path: &Path| fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.mode() & 0o111 != 0);
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        if !path.exists() {
            bail!("{} does not exist", path.display());
        }
        if !is_program(&path) {
            bail!("{} is not an executable file", path.display());
        }
        return Ok(path);
    }
    let found = std::env::split_paths(path).map(|folder| folder.join(name)).find(|place| is_program(place));
    found.with_context(|| format!("{} is not on the PATH", name.display()))
}

/// The command after `env` with its options and variables, and the PATH in which it is searched.
/// `None` for another command, and for an `env` without a command.
pub(crate) fn behind_env(arguments: &[OsString], path: &mut OsString) -> Option<Vec<OsString>> {
    let name = Path::new(arguments.first()?).file_name()?;
    if name != "env" {
        return None;
    }
    let mut rest: Vec<OsString> = arguments[1..].to_vec();
    loop {
        let argument = rest.first()?.clone();
        let bytes = argument.as_bytes();
        let split =
            |text: &[u8]| text.split(u8::is_ascii_whitespace).filter(|part| !part.is_empty()).map(owned).collect();
        let text_to_split = bytes.strip_prefix(b"--split-string=").or_else(|| bytes.strip_prefix(b"-S"));
        if let Some(text) = text_to_split {
            let mut taken = 1;
            let mut inner: Vec<OsString> = split(text);
            if text.is_empty() {
                inner = split(rest.get(1)?.as_bytes());
                taken = 2;
            }
            rest.splice(..taken, inner);
        } else if [&b"-u"[..], b"-C", b"--unset", b"--chdir", b"--argv0", b"-a"].contains(&bytes) {
            rest.drain(..rest.len().min(2));
        } else if bytes.starts_with(b"-") {
            rest.remove(0);
        } else if bytes.contains(&b'=') {
            if let Some(value) = bytes.strip_prefix(b"PATH=") {
                *path = owned(value);
            }
            rest.remove(0);
        } else {
            return Some(rest);
        }
    }
}

fn owned(bytes: &[u8]) -> OsString {
    OsStr::from_bytes(bytes).to_owned()
}

/// What follows `#!`: the interpreter and at most one argument, as the kernel splits them.
fn interpreter_of_script(file: &Path) -> Result<Option<Vec<OsString>>> {
    let mut head = Vec::new();
    let open = open_regular(file).with_context(|| format!("{}", file.display()))?;
    open.take(256).read_to_end(&mut head).with_context(|| format!("{}", file.display()))?;
    let Some(line) = head.strip_prefix(b"#!").and_then(|rest| rest.split(|byte| *byte == b'\n').next()) else {
        // `execvp` runs a file that the kernel cannot execute with a shell.
        return Ok((!head.contains(&0)).then(|| vec!["/bin/sh".into()]));
    };
    let line = line.trim_ascii();
    let end = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
    let (first, argument) = line.split_at(end);
    if first.is_empty() {
        bail!("{} names no interpreter", file.display());
    }
    Ok(Some([first, argument.trim_ascii()].into_iter().filter(|part| !part.is_empty()).map(owned).collect()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn arguments(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    fn executable(path: &Path, bytes: &[u8]) -> Vec<OsString> {
        fs::write(path, bytes).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        vec![path.as_os_str().to_owned()]
    }

    /// The header of a program and, if it names one, of its interpreter; this is enough for
    /// inspection.
    fn elf(bits: u8, machine: u8, interpreter: &str) -> Vec<u8> {
        let (header, entry) = if bits == 64 { (64u8, 56u8) } else { (52, 32) };
        let count = u8::from(!interpreter.is_empty());
        let mut bytes = vec![0x7f, b'E', b'L', b'F', bits / 32, 1, 1];
        bytes.resize(usize::from(header + entry), 0);
        (bytes[16], bytes[18], bytes[20]) = (2, machine, 1);
        // Offset of the program headers, size of the header, size and number of the program
        // headers.
        let (offset, sizes) = if bits == 64 { (32, 52) } else { (28, 40) };
        (bytes[offset], bytes[sizes], bytes[sizes + 2], bytes[sizes + 4]) = (header, header, entry, count);
        // PT_INTERP: offset and length.
        let at = usize::from(header);
        let (place, length) = if bits == 64 { (at + 8, at + 32) } else { (at + 4, at + 16) };
        (bytes[at], bytes[place], bytes[length]) = (3, header + entry, interpreter.len() as u8 + 1);
        bytes.extend(interpreter.bytes().chain([0]));
        bytes
    }

    #[test]
    fn the_architecture_of_a_program_is_recognized() {
        let folder = tempfile::tempdir().unwrap();
        let of = |bytes: &[u8]| Image::of(&executable(&folder.path().join("program"), bytes)).unwrap().obstacle;
        const GLIBC: &str = "/lib64/ld-linux-x86-64.so.2";
        const X86_64: u8 = 62;
        assert_eq!(of(&elf(64, X86_64, GLIBC)), None);
        assert_eq!(of(&elf(64, X86_64, "/lib/ld-musl-x86_64.so.1")), Some(Obstacle::Musl));
        assert_eq!(of(&elf(64, X86_64, "")), Some(Obstacle::Static));
        assert_eq!(of(&elf(64, 183, "/lib/ld-linux-aarch64.so.1")), Some(Obstacle::Machine));
        assert_eq!(of(&elf(32, 3, "/lib/ld-linux.so.2")), Some(Obstacle::Bits32));
        assert_eq!(of(&elf(32, 3, "")), Some(Obstacle::Bits32));
    }

    #[test]
    fn scripts_and_env_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        executable(&at("musl"), &elf(64, 62, "/lib/ld-musl-x86_64.so.1"));
        let inner = executable(&at("inner"), format!("#! {}  -u\nx", at("musl").display()).as_bytes());
        let outer = executable(&at("outer"), format!("#!{}\n", at("inner").display()).as_bytes());
        for command in [&inner, &outer] {
            let image = Image::of(command).unwrap();
            assert_eq!((image.file, image.script, image.obstacle), (at("musl"), true, Some(Obstacle::Musl)));
        }
        let path = format!("PATH={}:/usr/bin", folder.path().display());
        let found = |text: &str| Image::of(&arguments(text)).map(|image| image.file).map_err(|error| error.to_string());
        assert_eq!(found(&format!("env -i -u HOME {path} A=b musl --x=y")), Ok(at("musl")));
        assert_eq!(found(&format!("/usr/bin/env {path} env outer")), Ok(at("musl")));
        let split = executable(&at("split"), format!("#!/usr/bin/env -S {path} inner -x\n").as_bytes());
        assert_eq!(Image::of(&split).unwrap().file, at("musl"));
        assert!(found("env no_such_program").unwrap_err().contains("is not on the PATH"));
        assert!(found("env").unwrap().ends_with("env"));
        let text = Image::of(&executable(&at("text"), b"echo\n")).unwrap();
        assert_eq!((text.file, text.script), ("/bin/sh".into(), true));
        assert!(Image::of(&executable(&at("bytes"), b"\x01\0\x02")).is_err());
        // The scripts are each other's interpreter, and the search still ends.
        executable(&at("a"), format!("#!{}\n", at("b").display()).as_bytes());
        let endless = executable(&at("b"), format!("#!{}\n", at("a").display()).as_bytes());
        assert!(Image::of(&endless).is_err());
    }

    #[test]
    fn a_program_with_its_own_loader_is_checked_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let loader = folder.path().join("ld.so");
        // A hook that the shell, which replaces the loader here, accepts.
        let mapped = xpu_timer_proto::procfs::mapped_files(std::process::id() as i32).unwrap();
        let hook =
            mapped.iter().find(|path| path.to_string_lossy().contains("libc.so")).expect("this test is linked to it");
        let program = executable(&folder.path().join("program"), &elf(64, 62, &loader.display().to_string()));
        let image = Image::of(&program).unwrap();
        executable(&loader, b"#!/bin/sh\necho \"ERROR: ld.so: $LD_PRELOAD: GLIBC_2.28 not found\" >&2\n");
        let message = image.refusal_of(hook).expect("it refuses").to_string();
        assert!(message.contains("GLIBC_2.28 not found"), "{message}");
        executable(&loader, b"#!/bin/sh\necho \"$LD_PRELOAD (0x7f00)\"\n");
        assert_eq!(image.refusal_of(hook), None);
    }

    #[test]
    fn this_program_has_no_obstacle_and_its_own_loader() {
        let image = Image::of(&[std::env::current_exe().unwrap().into_os_string()]).unwrap();
        assert_eq!(image.obstacle, None);
        assert_eq!(image.refusal_of(Path::new("/nowhere.so")), None);
    }
}
