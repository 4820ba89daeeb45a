//! Folders that no other user can have prepared. In a temporary directory that all users share, a
//! link or a folder may be a trap.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use nix::unistd::getuid;

use crate::error::Error;

/// Makes a folder of mode 0700, or checks that no other user can write to the existing one. Read
/// access is the choice of the owner: the socket answers only to processes of this user.
///
/// # Errors
/// If it is a link, belongs to another user, or is writable for others.
pub(crate) fn private_directory(path: &Path) -> Result<(), Error> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(Error::path("create", path)(error)),
    }
    let refuse = |problem: String| Err(Error::Folder { path: path.into(), problem });
    let status = fs::symlink_metadata(path).map_err(Error::path("inspect", path))?;
    if !status.is_dir() {
        return refuse("is not a folder, or is a link to one; remove it".into());
    }
    if status.uid() != getuid().as_raw() {
        return refuse(format!("belongs to user {}, not to the current user", status.uid()));
    }
    if status.mode() & 0o022 != 0 {
        let mode = status.permissions().mode() & 0o7777;
        return refuse(format!("has mode {mode:o}, so others can write to it; run chmod go-w on it"));
    }
    Ok(())
}

/// Makes a folder and its parents. Refuses every link on the way that was made by a user other than
/// this one or root. Also refuses folders of other users inside a world-writable folder: their
/// owner could replace what is written there. Existing folders stay as they are.
///
/// # Errors
/// If there is such a link or folder, or the folder cannot be made.
pub(crate) fn create_directories(path: &Path) -> Result<(), Error> {
    let own = getuid().as_raw();
    let mut prefix = PathBuf::new();
    let mut is_shared = false;
    for part in path.components() {
        prefix.push(part);
        if fs::symlink_metadata(&prefix).is_err() {
            match fs::create_dir(&prefix) {
                // Another process made it first; the check below finds out whose it is.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                result => result.map_err(Error::path("create", &prefix))?,
            }
        }
        let status = fs::symlink_metadata(&prefix).map_err(Error::path("inspect", &prefix))?;
        if ![0, own].contains(&status.uid()) && (is_shared || status.is_symlink()) {
            let problem = match status.is_symlink() {
                true => format!("is a symbolic link of user {}, which is not followed", status.uid()),
                false => format!("belongs to user {}, in a world-writable folder", status.uid()),
            };
            return Err(Error::Folder { path: prefix, problem });
        }
        is_shared = fs::metadata(&prefix).is_ok_and(|status| status.mode() & 0o002 != 0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_private_folder_is_made_once_and_checked_again() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("private");
        private_directory(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        private_directory(&path).unwrap();
        for (mode, harmless) in [(0o755, true), (0o750, true), (0o775, false), (0o702, false), (0o1777, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            match private_directory(&path) {
                Ok(()) => assert!(harmless, "{mode:o}"),
                Err(error) => assert!(!harmless && error.to_string().contains(&format!("mode {mode:o}")), "{error}"),
            }
        }
    }

    #[test]
    fn links_and_files_are_not_private_folders() {
        let temporary = tempfile::tempdir().unwrap();
        let (target, link, file) = ("target", "link", "file").into_paths(temporary.path());
        private_directory(&target).unwrap();
        symlink(&target, &link).unwrap();
        assert!(private_directory(&link).unwrap_err().to_string().contains("not a folder"));
        fs::write(&file, "").unwrap();
        assert!(private_directory(&file).unwrap_err().to_string().contains("not a folder"));
    }

    #[test]
    fn links_of_others_are_not_followed() {
        let temporary = tempfile::tempdir().unwrap();
        let (target, link, _) = ("target", "link", "").into_paths(temporary.path());
        fs::create_dir(&target).unwrap();
        symlink(&target, &link).unwrap();
        create_directories(&link.join("own/below")).unwrap();
        assert!(target.join("own/below").is_dir());
        if !getuid().is_root() {
            eprintln!("SKIPPED the link of another user: only root can make one");
            return;
        }
        std::os::unix::fs::lchown(&link, Some(12345), None).unwrap();
        let error = create_directories(&link.join("theirs")).unwrap_err().to_string();
        assert!(error.contains("user 12345"), "{error}");
        assert!(!target.join("theirs").exists());
    }

    trait IntoPaths {
        fn into_paths(self, base: &Path) -> (PathBuf, PathBuf, PathBuf);
    }
    impl IntoPaths for (&str, &str, &str) {
        fn into_paths(self, base: &Path) -> (PathBuf, PathBuf, PathBuf) {
            (base.join(self.0), base.join(self.1), base.join(self.2))
        }
    }
}
