//! Where the hook is, whether the dynamic loader takes it, and LD_PRELOAD with it in front.

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

use crate::{apart, config::Config, image::Image};

const FILE: &str = "libxpu_timer_hook.so";

/// The value of LD_PRELOAD for the command.
///
/// # Errors
/// When the hook is not there, cannot be loaded, or lies where LD_PRELOAD cannot name it.
pub fn for_command(config: &Config, command: &[OsString], before: Option<OsString>) -> Result<OsString> {
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

/// LD_PRELOAD without any hook of ours; `None` when it has none.
pub fn without_hook(before: Option<OsString>) -> Option<OsString> {
    let before = before?;
    let all: Vec<&[u8]> = before.as_bytes().split(is_separator).filter(|name| !name.is_empty()).collect();
    let is_hook = |name: &[u8]| Path::new(OsStr::from_bytes(name)).file_name().is_some_and(|name| name == FILE);
    let kept: Vec<&[u8]> = all.iter().copied().filter(|name| !is_hook(name)).collect();
    (kept.len() < all.len()).then(|| OsStr::from_bytes(&kept.join(&b':')).to_owned())
}

fn is_separator(byte: &u8) -> bool {
    *byte == b':' || byte.is_ascii_whitespace()
}

/// The hook by a name that LD_PRELOAD can hold: its own, else that of a link beside the socket, where no other user can put one.
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
        // Links for different hooks have different names, and one that is there is not touched: processes start by it.
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
            "LD_PRELOAD cannot name {}: it has a colon or a space, and no link can be made beside {socket}",
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

/// Tries the hook on this program. One that was built for another machine or C library, or is half copied, would put a line into the
/// output of every process of the job, or end it at its start.
fn loads(hook: &Path) -> Result<()> {
    let mut tried = Command::new("/proc/self/exe");
    tried.arg("--version").stdin(Stdio::null()).stdout(Stdio::null());
    let asks_loader = |name: &OsStr| name.as_bytes().starts_with(b"LD_") && name != "LD_LIBRARY_PATH";
    for (name, _) in std::env::vars_os().filter(|(name, _)| asks_loader(name)) {
        tried.env_remove(name);
    }
    // When no process can be made, the command will say so itself.
    let Ok(output) = tried.env("LD_PRELOAD", hook).output() else { return Ok(()) };
    let said = String::from_utf8_lossy(&output.stderr);
    let complaint = said.lines().find(|line| line.contains(&*hook.to_string_lossy()));
    match complaint {
        Some(line) => bail!("{line}"),
        None if output.status.success() => Ok(()),
        None => bail!("{} cannot be loaded: {}", hook.display(), output.status),
    }
}

/// The hook's file.
///
/// # Errors
/// When it is not there.
pub fn find(config: &Config) -> Result<PathBuf> {
    if let Some(hook) = &config.hook {
        // The loader resolves a relative name in each process anew, wherever that has gone.
        match apart::is_file(hook).and_then(|()| std::path::absolute(hook)) {
            Ok(hook) => return Ok(hook),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                bail!("XPU_TIMER_HOOK_PATH={}: {error}", hook.display())
            }
            Err(_) => bail!("XPU_TIMER_HOOK_PATH={} is not a file", hook.display()),
        }
    }
    let Some(beside) = &config.beside else { bail!("this executable has no folder to look for {FILE} in") };
    let places = [beside.join(FILE), beside.join("../lib").join(FILE)];
    match places.iter().find(|place| place.is_file()) {
        Some(place) => Ok(place.clone()),
        None => bail!("{FILE} is neither in {} nor in ../lib of it; set XPU_TIMER_HOOK_PATH", beside.display()),
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
    fn the_hook_is_first_and_once() {
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
    fn a_hook_that_cannot_be_preloaded_is_said() {
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
