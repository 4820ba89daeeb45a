//! Where the hook is, whether the dynamic loader takes it, and LD_PRELOAD with it in front.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Result, bail};

use crate::config::Config;

const FILE: &str = "libxpu_timer_hook.so";

/// The value of LD_PRELOAD for the command.
///
/// # Errors
/// When the hook is not there, cannot be loaded, or lies where LD_PRELOAD cannot name it.
pub fn for_command(config: &Config, before: Option<OsString>) -> Result<OsString> {
    let hook = find(config)?;
    let value = in_front(&hook, before)?;
    loads(&hook)?;
    Ok(value)
}

fn in_front(hook: &Path, before: Option<OsString>) -> Result<OsString> {
    let hook = hook.as_os_str();
    if hook.as_bytes().iter().any(|byte| *byte == b':' || byte.is_ascii_whitespace()) {
        bail!("LD_PRELOAD cannot name {}: it has a colon or a space", hook.display());
    }
    let is_separator = |byte: &u8| *byte == b':' || byte.is_ascii_whitespace();
    let before = before.unwrap_or_default();
    let others = before.as_bytes().split(is_separator).filter(|other| !other.is_empty() && *other != hook.as_bytes());
    let mut value = hook.to_os_string();
    for other in others {
        value.push(":");
        value.push(OsStr::from_bytes(other));
    }
    Ok(value)
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
        match std::path::absolute(hook) {
            Ok(hook) if hook.is_file() => return Ok(hook),
            _ => bail!("XPU_TIMER_HOOK_PATH={} is not a file", hook.display()),
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
    use super::*;

    fn config(hook: Option<PathBuf>, beside: PathBuf) -> Config {
        Config { hook, beside: Some(beside), ..Config::read() }
    }

    #[test]
    fn the_hook_is_first_and_once() {
        let folder = tempfile::tempdir().unwrap();
        let hook = folder.path().join(FILE);
        std::fs::write(&hook, "").unwrap();
        let config = config(None, folder.path().into());
        let text = hook.display().to_string();
        let found = find(&config).unwrap();
        let value = |before: &str| in_front(&found, Some(before.into())).unwrap().into_string().unwrap();
        assert_eq!(in_front(&found, None).unwrap(), hook.as_os_str());
        assert_eq!(value("/a.so"), format!("{text}:/a.so"));
        assert_eq!(value(&format!("/a.so:{text} /b.so")), format!("{text}:/a.so:/b.so"));
    }

    #[test]
    fn a_hook_that_cannot_be_preloaded_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let error = for_command(&config(None, folder.path().into()), None).unwrap_err();
        assert!(error.to_string().contains("XPU_TIMER_HOOK_PATH"), "{error}");
        let error = for_command(&config(Some("/nowhere.so".into()), folder.path().into()), None).unwrap_err();
        assert!(error.to_string().contains("/nowhere.so"), "{error}");
        let spaced = folder.path().join("with space");
        std::fs::create_dir(&spaced).unwrap();
        std::fs::write(spaced.join(FILE), "").unwrap();
        let error = for_command(&config(None, spaced), None).unwrap_err();
        assert!(error.to_string().contains("space"), "{error}");
    }
}
