//! Where the hook is, and LD_PRELOAD with it in front.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::PathBuf,
};

use anyhow::{Result, bail};

use crate::config::Config;

const FILE: &str = "libxpu_timer_hook.so";

/// The value of LD_PRELOAD for the command.
///
/// # Errors
/// When the hook is not there, or lies where LD_PRELOAD cannot name it.
pub fn in_front(config: &Config, before: Option<OsString>) -> Result<OsString> {
    let hook = find(config)?.into_os_string();
    if hook.as_bytes().iter().any(|byte| *byte == b':' || byte.is_ascii_whitespace()) {
        bail!("LD_PRELOAD cannot name {}: it has a colon or a space", hook.display());
    }
    let is_separator = |byte: &u8| *byte == b':' || byte.is_ascii_whitespace();
    let before = before.unwrap_or_default();
    let others = before.as_bytes().split(is_separator).filter(|other| !other.is_empty() && *other != hook.as_bytes());
    let mut value = hook.clone();
    for other in others {
        value.push(":");
        value.push(OsStr::from_bytes(other));
    }
    Ok(value)
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
        let value = |before: &str| in_front(&config, Some(before.into())).unwrap().into_string().unwrap();
        assert_eq!(in_front(&config, None).unwrap(), hook.as_os_str());
        assert_eq!(value("/a.so"), format!("{text}:/a.so"));
        assert_eq!(value(&format!("/a.so:{text} /b.so")), format!("{text}:/a.so:/b.so"));
    }

    #[test]
    fn a_hook_that_cannot_be_preloaded_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let error = in_front(&config(None, folder.path().into()), None).unwrap_err();
        assert!(error.to_string().contains("XPU_TIMER_HOOK_PATH"), "{error}");
        let error = in_front(&config(Some("/nowhere.so".into()), folder.path().into()), None).unwrap_err();
        assert!(error.to_string().contains("/nowhere.so"), "{error}");
        let spaced = folder.path().join("with space");
        std::fs::create_dir(&spaced).unwrap();
        std::fs::write(spaced.join(FILE), "").unwrap();
        let error = in_front(&config(None, spaced), None).unwrap_err();
        assert!(error.to_string().contains("space"), "{error}");
    }
}
