//! Finds the hook, checks that the dynamic loader accepts it, and puts it in front of LD_PRELOAD.

use std::{
    ffi::{OsStr, OsString},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, symlink},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{bounded_io, config::Config, image::Image};

const FILE: &str = "libxpu_timer_hook.so";

/// The value of LD_PRELOAD for the command.
///
/// # Errors
/// The hook does not exist, cannot be loaded, or has a path that LD_PRELOAD cannot contain.
pub(crate) fn for_command(config: &Config, command: &[OsString], before: Option<OsString>) -> Result<OsString> {
    let found = find(config)?;
    let hook = nameable(&found, config)?;
    let value = in_front(&hook, before);
    loads(&hook)?;
    let image = Image::of(command).ok();
    match image.as_ref().and_then(|image| image.refusal_of(&hook)) {
        Some(refusal) => bail!("{}: {refusal}", command[0].display()),
        None => Ok(value),
    }
}

/// LD_PRELOAD without our hook; `None` if it does not contain it.
pub(crate) fn without_hook(before: Option<OsString>) -> Option<OsString> {
    let before = before?;
    let all: Vec<&[u8]> = before.as_bytes().split(is_separator).filter(|name| !name.is_empty()).collect();
    let is_hook = |name: &[u8]| Path::new(OsStr::from_bytes(name)).file_name().is_some_and(|name| name == FILE);
    let kept: Vec<&[u8]> = all.iter().copied().filter(|name| !is_hook(name)).collect();
    (kept.len() < all.len()).then(|| OsStr::from_bytes(&kept.join(&b':')).to_owned())
}

fn is_separator(byte: &u8) -> bool {
    *byte == b':' || byte.is_ascii_whitespace()
}

/// A path of the hook that LD_PRELOAD can contain: its own, else that of a link beside the socket,
/// where no other user can create one.
fn nameable(hook: &Path, config: &Config) -> Result<PathBuf> {
    let has_separator = |path: &Path| path.as_os_str().as_bytes().iter().any(is_separator);
    if !has_separator(hook) {
        return Ok(hook.to_path_buf());
    }
    let link = || -> io::Result<PathBuf> {
        let folder =
            config.socket.parent().filter(|folder| !has_separator(folder)).ok_or(io::ErrorKind::InvalidFilename)?;
        let status = fs::metadata(folder)?;
        if status.uid() != nix::unistd::geteuid().as_raw() || status.mode() & 0o022 != 0 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        // Links to different hooks have different names. An existing link is not changed, because
        // processes are started with it.
        let mut hash = DefaultHasher::new();
        hook.hash(&mut hash);
        let link = folder.join(format!("hook-{:016x}.so", hash.finish()));
        match symlink(hook, &link) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(link),
        }
    };
    link().with_context(|| {
        let socket = config.socket.display();
        format!(
            "LD_PRELOAD cannot name {}, which has a colon or a space, and no link can be created beside {socket}",
            hook.display()
        )
    })
}

fn in_front(hook: &Path, before: Option<OsString>) -> OsString {
    let hook = hook.as_os_str();
    let before = before.unwrap_or_default();
    let others = before.as_bytes().split(is_separator).filter(|other| !other.is_empty() && *other != hook.as_bytes());
    let mut value = hook.to_os_string();
    for other in others {
        value.push(":");
        value.push(OsStr::from_bytes(other));
    }
    value
}

/// Tests the hook with this program. A hook for another machine or C library, or a partial copy,
/// would print a line in every process of the job, or prevent its start.
fn loads(hook: &Path) -> Result<()> {
    let mut tried = Command::new("/proc/self/exe");
    tried.arg("--version").stdin(Stdio::null()).stdout(Stdio::null());
    let asks_loader = |name: &OsStr| name.as_bytes().starts_with(b"LD_") && name != "LD_LIBRARY_PATH";
    for (name, _) in std::env::vars_os().filter(|(name, _)| asks_loader(name)) {
        tried.env_remove(name);
    }
    // If no process can be created, the command will fail as well and report it.
    let Ok(output) = tried.env("LD_PRELOAD", hook).output() else { return Ok(()) };
    let stderr = String::from_utf8_lossy(&output.stderr);
    let complaint = stderr.lines().find(|line| line.contains(&*hook.to_string_lossy()));
    match complaint {
        Some(line) => bail!("{line}"),
        None if output.status.success() => Ok(()),
        None => bail!("{} cannot be loaded: {}", hook.display(), output.status),
    }
}

/// The hook's file.
///
/// # Errors
/// It does not exist.
pub(crate) fn find(config: &Config) -> Result<PathBuf> {
    if let Some(hook) = &config.hook {
        // The loader resolves a relative path in each process anew, after a change of folder too.
        match bounded_io::is_file(hook).and_then(|()| std::path::absolute(hook)) {
            Ok(hook) => return Ok(hook),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                bail!("XPU_TIMER_HOOK_PATH={}: {error}", hook.display())
            }
            Err(_) => bail!("XPU_TIMER_HOOK_PATH={} is not a file", hook.display()),
        }
    }
    let Some(beside) = &config.beside else {
        bail!("cannot find the folder of this executable, which should contain {FILE}; set XPU_TIMER_HOOK_PATH")
    };
    let places = [beside.join(FILE), beside.join("../lib").join(FILE)];
    match places.iter().find(|place| place.is_file()) {
        Some(place) => Ok(place.clone()),
        None => bail!("{FILE} is neither in {} nor in its ../lib; set XPU_TIMER_HOOK_PATH", beside.display()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn config(hook: Option<PathBuf>, beside: PathBuf) -> Config {
        Config { hook, beside: Some(beside), ..Config::read() }
    }

    #[test]
    fn the_hook_is_preloaded_first_and_once() {
        let folder = tempfile::tempdir().unwrap();
        let hook = folder.path().join(FILE);
        fs::write(&hook, "").unwrap();
        let config = config(None, folder.path().into());
        let text = hook.display().to_string();
        let found = find(&config).unwrap();
        let value = |before: &str| in_front(&found, Some(before.into())).into_string().unwrap();
        assert_eq!(in_front(&found, None), hook.as_os_str());
        assert_eq!(value("/a.so"), format!("{text}:/a.so"));
        assert_eq!(value(&format!("/a.so:{text} /b.so")), format!("{text}:/a.so:/b.so"));
    }

    #[test]
    fn an_inherited_hook_is_taken_out() {
        let without = |before: &str| without_hook(Some(before.into()));
        assert_eq!(without("/x/libxpu_timer_hook.so:/a.so /b.so"), Some("/a.so:/b.so".into()));
        assert_eq!((without("/a.so"), without_hook(None)), (None, None));
    }

    #[test]
    fn a_hook_that_cannot_be_preloaded_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let error = for_command(&config(None, folder.path().into()), &[], None).unwrap_err();
        assert!(error.to_string().contains("XPU_TIMER_HOOK_PATH"), "{error}");
        let error = for_command(&config(Some("/nowhere.so".into()), folder.path().into()), &[], None).unwrap_err();
        assert!(error.to_string().contains("/nowhere.so"), "{error}");
    }

    #[test]
    fn a_hook_whose_path_has_a_space_gets_a_link_in_a_folder_of_this_user() {
        let folder = tempfile::tempdir().unwrap();
        let hook = folder.path().join("with space").join(FILE);
        let config = |socket: PathBuf| Config { socket, ..Config::read() };
        let link = nameable(&hook, &config(folder.path().join("socket"))).unwrap();
        assert_eq!((link.parent(), fs::read_link(&link).unwrap()), (Some(folder.path()), hook.clone()));
        assert_eq!(nameable(&hook, &config(folder.path().join("socket"))).unwrap(), link, "the same link again");
        let other =
            nameable(&folder.path().join("an other").join(FILE), &config(folder.path().join("socket"))).unwrap();
        assert_ne!(other, link);

        let everybodys = folder.path().join("tmp");
        fs::create_dir(&everybodys).unwrap();
        fs::set_permissions(&everybodys, fs::Permissions::from_mode(0o1777)).unwrap();
        for socket in [everybodys.join("socket"), hook.with_file_name("socket")] {
            let error = nameable(&hook, &config(socket)).unwrap_err();
            assert!(error.to_string().contains("a colon or a space"), "{error}");
        }
    }
}
