//! Files that a target sees, opened without trusting it: its links do not lead into our file system, and what is no regular
//! file is not waited for.

use std::{
    fs::{File, OpenOptions},
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::Path,
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, openat2},
};

/// Opens a regular file by its path within a root folder, which may be another process's `/proc/PID/root`.
pub(crate) fn open_within(root: &Path, path: &Path) -> Option<File> {
    // Opening a pipe would wait for its other end.
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC | OFlag::O_NOCTTY;
    let inside = path.strip_prefix("/").unwrap_or(path);
    let folder =
        OpenOptions::new().read(true).custom_flags((OFlag::O_PATH | OFlag::O_DIRECTORY).bits()).open(root).ok()?;
    let how = OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let file = match openat2(folder.as_fd(), inside, how) {
        Ok(descriptor) => File::from(descriptor),
        // Linux before 5.6, and containers whose seccomp filter is as old.
        Err(Errno::ENOSYS | Errno::EPERM) => {
            OpenOptions::new().read(true).custom_flags(flags.bits()).open(root.join(inside)).ok()?
        }
        Err(_) => return None,
    };
    file.metadata().ok()?.is_file().then_some(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_stay_within_the_root() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("inside"), "inside").unwrap();
        std::fs::create_dir(root.path().join("folder")).unwrap();
        symlink("/inside", root.path().join("folder/absolute")).unwrap();
        symlink("../../../../inside", root.path().join("folder/upwards")).unwrap();
        symlink("/etc/hostname", root.path().join("folder/outside")).unwrap();
        let read =
            |path: &str| open_within(root.path(), Path::new(path)).map(|file| std::io::read_to_string(file).unwrap());
        assert_eq!(read("/inside").as_deref(), Some("inside"));
        assert_eq!(read("/folder/absolute").as_deref(), Some("inside"));
        assert_eq!(read("/folder/upwards").as_deref(), Some("inside"));
        assert_eq!(read("/folder/outside"), None);
        assert_eq!(read("/folder"), None, "a folder is no file");
        assert_eq!(read("/nothing"), None);
    }

    #[test]
    fn a_pipe_is_not_waited_for() {
        let root = tempfile::tempdir().unwrap();
        nix::unistd::mkfifo(&root.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(open_within(root.path(), Path::new("/pipe")).is_none());
    }
}
