//! Files that a target sees, opened without trusting it: its links do not lead into our file system, what is no regular file is
//! not waited for, and a file system that does not answer costs a limited time.

use std::{
    collections::{HashMap, HashSet},
    fs::{File, OpenOptions},
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::Path,
    sync::{Arc, Mutex, PoisonError, mpsc},
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, openat2},
};

use crate::kernel::procfs;

/// How long a file system may take for one object. A network file system that works answers within milliseconds.
const PATIENCE: Duration = Duration::from_millis(500);
/// File systems without a disk of their own that nevertheless never wait for another machine or program.
const LOCAL: [&str; 8] = ["tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "overlay", "btrfs", "zfs", "bcachefs"];

/// What is asked for a file's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// The file system.
    File,
    /// The memory of a process that has mapped it: a page that is not there yet is read from the file system.
    Memory,
    /// The file system that a process has at `/tmp`. Its device is not known, so the process is told by its id.
    Temporary(i32),
}

type Device = (u32, u32);

/// Which file systems may not answer, and which of them do not. A hung network file system is a frequent reason of a hang, so
/// a capture must not wait for the same one.
#[derive(Default)]
pub(crate) struct FileSystems {
    /// Whether it is one that is waited for with patience only.
    remote: Mutex<HashMap<Device, bool>>,
    /// Those that somebody still waits for.
    silent: Mutex<HashSet<(Device, Source)>>,
}

impl FileSystems {
    /// Whether the file system of a device may wait for something outside this machine's kernel.
    pub fn is_remote(&self, pid: i32, device: Device) -> bool {
        if device.0 != 0 {
            return false;
        }
        let known = self.remote.lock().unwrap_or_else(PoisonError::into_inner).get(&device).copied();
        known.unwrap_or_else(|| {
            let kind = procfs::file_system(pid, device);
            // What is in no list of mounts is the kernel's own, such as that of memfd_create, or of an unknown kind.
            let remote = kind.is_none_or(|kind| !LOCAL.contains(&kind.as_str()));
            self.remote.lock().unwrap_or_else(PoisonError::into_inner).insert(device, remote);
            remote
        })
    }

    /// Does what may wait for a remote file system, on a thread that is left behind when that takes too long. `None` then,
    /// and at once while it still waits.
    pub fn ask<T: Send + 'static>(
        self: &Arc<Self>,
        device: Device,
        source: Source,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let place = (device, source);
        if self.silent().contains(&place) {
            return None;
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let systems = Arc::clone(self);
        let worker = move || {
            let result = work();
            // Under the lock, so that who gives up sees either the answer or its absence.
            let mut silent = systems.silent();
            silent.remove(&place);
            // Nobody listens when it has come too late.
            let _ = sender.try_send(result);
        };
        std::thread::Builder::new().name("xpu_files".into()).spawn(worker).ok()?;
        receiver.recv_timeout(PATIENCE).ok().or_else(|| {
            let mut silent = self.silent();
            let answer = receiver.try_recv();
            if matches!(answer, Err(mpsc::TryRecvError::Empty)) {
                silent.insert(place);
                tracing::warn!("file system {}:{} does not answer ({source:?})", device.0, device.1);
            }
            answer.ok()
        })
    }

    fn silent(&self) -> std::sync::MutexGuard<'_, HashSet<(Device, Source)>> {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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
    fn a_file_system_that_does_not_answer_is_asked_once() {
        let systems = Arc::new(FileSystems::default());
        let device = (0, 7);
        assert_eq!(systems.ask(device, Source::File, || 1), Some(1));
        let (release, wait) = mpsc::channel::<()>();
        assert_eq!(systems.ask(device, Source::File, move || wait.recv().is_ok()), None);
        assert_eq!(systems.ask(device, Source::File, || panic!("it is not asked again")), None::<()>);
        assert_eq!(systems.ask(device, Source::Memory, || 2), Some(2), "that is another matter");
        assert_eq!(systems.ask((0, 8), Source::File, || 3), Some(3), "that one is well");
        release.send(()).unwrap();
        // As soon as it has answered it is asked again.
        let start = std::time::Instant::now();
        while systems.ask(device, Source::File, || 4) != Some(4) {
            assert!(start.elapsed() < Duration::from_secs(30));
            std::thread::yield_now();
        }
    }

    #[test]
    fn disks_and_memory_are_not_remote() {
        let pid = std::process::id() as i32;
        let systems = FileSystems::default();
        assert!(!systems.is_remote(pid, (254, 0)));
        assert!(systems.is_remote(pid, (0, 999_999)), "an unknown one may be");
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let tmpfs = mounts.lines().find(|line| line.contains(" - tmpfs "));
        if let Some((major, minor)) = tmpfs.and_then(|line| line.split(' ').nth(2)?.split_once(':')) {
            assert!(!systems.is_remote(pid, (major.parse().unwrap(), minor.parse().unwrap())));
        }
    }

    #[test]
    fn a_pipe_is_not_waited_for() {
        let root = tempfile::tempdir().unwrap();
        nix::unistd::mkfifo(&root.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(open_within(root.path(), Path::new("/pipe")).is_none());
    }
}
