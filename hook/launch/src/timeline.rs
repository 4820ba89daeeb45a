//! Checks whether incidents can be written to their folder. Users who look for incidents after a
//! hang should know their location before.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::bounded_io;

use nix::{
    errno::Errno,
    sys::statvfs::statvfs,
    unistd::{AccessFlags, access, geteuid},
};
use xpu_timer_proto::text::{MOST_NAME_BYTES, MOST_PATH_BYTES, shortened};

/// The problem with the folder of `XPU_TIMER_TIMELINE_PATH`, and that the fallback is used.
pub fn remark([wanted, fallback]: &[PathBuf; 2]) -> Option<String> {
    let error = match bounded_io::answers(wanted) {
        Ok(()) => problem(wanted)?.desc().to_string(),
        Err(error) => error.to_string(),
    };
    let (wanted, fallback) = (shortened(&wanted.to_string_lossy(), MOST_NAME_BYTES), fallback.display());
    Some(format!("XPU_TIMER_TIMELINE_PATH={wanted} cannot be written ({error}); incidents will be in {fallback}"))
}

/// Only checks: the folder is created with the first incident.
fn problem(folder: &Path) -> Option<Errno> {
    if folder.as_os_str().len() > MOST_PATH_BYTES {
        return Some(Errno::ENAMETOOLONG);
    }
    // The first existing path among the folder and its parents. A file may be in the way.
    let look = |path: &&Path| match fs::symlink_metadata(path) {
        // A path that is too long does not exist and cannot be created.
        Err(error) if error.raw_os_error() == Some(Errno::ENAMETOOLONG as i32) => true,
        looked => looked.is_ok(),
    };
    let there = folder.ancestors().find(look)?;
    if fs::symlink_metadata(there).is_err() {
        return Some(Errno::ENAMETOOLONG);
    }
    if !fs::metadata(there).is_ok_and(|metadata| metadata.is_dir()) {
        return Some(Errno::ENOTDIR);
    }
    if there.ancestors().any(is_trap) {
        return Some(Errno::EPERM);
    }
    if let Err(error) = access(there, AccessFlags::W_OK | AccessFlags::X_OK) {
        return Some(error);
    }
    // Some file systems do not report their blocks.
    let space = statvfs(there).ok()?;
    let is_full = space.blocks() > 0 && space.blocks_available() == 0;
    (is_full || space.files() > 0 && space.files_available() == 0).then_some(Errno::ENOSPC)
}

/// Whether another user created this link, or this folder in a folder that everybody may write to.
/// Its owner could replace the files in it, so the collector does not use it.
fn is_trap(path: &Path) -> bool {
    let Ok(status) = fs::symlink_metadata(path) else { return false };
    let is_shared = |parent: &Path| fs::metadata(parent).is_ok_and(|status| status.mode() & 0o002 != 0);
    ![0, geteuid().as_raw()].contains(&status.uid()) && (status.is_symlink() || path.parent().is_some_and(is_shared))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};

    use super::*;

    #[test]
    fn a_folder_that_another_user_has_prepared_is_not_used() {
        if !geteuid().is_root() {
            eprintln!("SKIPPED only root can play another user");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (shared, link) = (folder.path().join("shared"), folder.path().join("link"));
        let theirs = shared.join("theirs");
        fs::create_dir_all(theirs.join("below")).unwrap();
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o1777)).unwrap();
        symlink(&shared, &link).unwrap();
        let of = |path: &Path| remark(&[path.into(), "/other/timeline".into()]).unwrap_or_default();
        assert_eq!((of(&theirs.join("below/timeline")), of(&link.join("timeline"))), Default::default());
        chown(&theirs, Some(12345), None).unwrap();
        lchown(&link, Some(12345), None).unwrap();
        for path in [theirs.clone(), theirs.join("timeline"), theirs.join("below/timeline"), link.join("timeline")] {
            assert!(of(&path).contains("(Operation not permitted)"), "{}: {}", path.display(), of(&path));
        }
        // Another user's folder that not everybody may write to was created by somebody with the
        // right to do so.
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(of(&theirs), "");
    }

    #[test]
    fn a_folder_to_be_made_is_fine_and_one_below_a_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let of = |path: PathBuf| remark(&[path, "/other/timeline".into()]);
        assert_eq!((of(folder.path().into()), of(folder.path().join("a/b"))), (None, None));
        let said = of(file.join("timeline")).unwrap();
        assert!(said.contains("(Not a directory)") && said.ends_with("incidents will be in /other/timeline"), "{said}");
        let long = of(folder.path().join("x".repeat(300)).join("timeline")).unwrap();
        assert!(long.contains("(File name too long)"), "{long}");
    }
}
