//! Opens files that a target sees without trusting the target: links do not lead into our file
//! system, only regular files are opened, and a file system that does not answer costs a limited
//! time.

use std::{
    collections::{HashMap, HashSet},
    fs::{File, OpenOptions},
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::Path,
    sync::{Arc, Mutex, PoisonError, mpsc},
    time::Duration,
};

use xpu_timer_proto::procfs;

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, openat2},
};

/// Time limit for one request to a file system. A working network file system answers within
/// milliseconds.
const TIMEOUT: Duration = Duration::from_millis(500);
/// File systems without a disk of their own that still never wait for another machine or program.
const LOCAL_TYPES: [&str; 8] = ["tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "overlay", "btrfs", "zfs", "bcachefs"];

/// The source of a file's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// The file system.
    File,
    /// The memory of a process that has mapped the file. A page that is not in memory yet is read
    /// from the file system.
    Memory,
    /// The file system at `/tmp` of the process with this pid, because its device is not known.
    Temporary(i32),
    /// The file systems with the libraries and packages of the process with this pid.
    Packages(i32),
}

type Device = (u32, u32);

/// The file systems that may not answer, and those that do not answer now. A hung network file
/// system is often the reason for a hang, so a capture must not wait for it too.
#[derive(Default)]
pub(crate) struct FileSystems {
    /// Whether requests to the file system need a timeout.
    remote: Mutex<HashMap<Device, bool>>,
    /// The file systems with a request that is still waiting.
    unresponsive: Mutex<HashSet<(Device, Source)>>,
}

impl FileSystems {
    /// Whether requests to the file system of a device may wait for something outside this
    /// machine's kernel.
    pub(crate) fn is_remote(&self, pid: i32, device: Device) -> bool {
        if device.0 != 0 {
            return false;
        }
        let known = self.remote.lock().unwrap_or_else(PoisonError::into_inner).get(&device).copied();
        known.unwrap_or_else(|| {
            let kind = procfs::file_system_type(pid, device);
            // A device that is in no list of mounts is internal to the kernel, such as that of
            // memfd_create, or of an unknown kind.
            let remote = kind.is_none_or(|kind| !LOCAL_TYPES.contains(&kind.as_str()));
            self.remote.lock().unwrap_or_else(PoisonError::into_inner).insert(device, remote);
            remote
        })
    }

    /// Does work that may wait for a remote file system, on a thread that is abandoned after a
    /// timeout. Returns `None` after the timeout, and immediately while an earlier request still
    /// waits.
    pub(crate) fn run_with_timeout<T: Send + 'static>(
        self: &Arc<Self>,
        device: Device,
        source: Source,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let place = (device, source);
        if self.unresponsive().contains(&place) {
            return None;
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let systems = Arc::clone(self);
        let worker = move || {
            let result = work();
            // Holding the lock ensures that a caller that gives up sees either the answer or its
            // absence.
            let mut unresponsive = systems.unresponsive();
            unresponsive.remove(&place);
            // Nobody receives an answer that is too late.
            let _ = sender.try_send(result);
        };
        std::thread::Builder::new().name("xpu_files".into()).spawn(worker).ok()?;
        receiver.recv_timeout(TIMEOUT).ok().or_else(|| {
            let mut unresponsive = self.unresponsive();
            let answer = receiver.try_recv();
            if matches!(answer, Err(mpsc::TryRecvError::Empty)) {
                unresponsive.insert(place);
                tracing::warn!("file system {}:{} does not answer ({source:?})", device.0, device.1);
            }
            answer.ok()
        })
    }

    fn unresponsive(&self) -> std::sync::MutexGuard<'_, HashSet<(Device, Source)>> {
        self.unresponsive.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens a regular file by its path within a root folder, which may be another process's
/// `/proc/PID/root`.
pub(crate) fn open_within(root: &Path, path: &Path) -> Option<File> {
    // Without O_NONBLOCK, opening a FIFO would wait for its other end.
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC | OFlag::O_NOCTTY;
    let inside = path.strip_prefix("/").unwrap_or(path);
    let folder =
        OpenOptions::new().read(true).custom_flags((OFlag::O_PATH | OFlag::O_DIRECTORY).bits()).open(root).ok()?;
    let how = OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let file = match openat2(folder.as_fd(), inside, how) {
        Ok(descriptor) => File::from(descriptor),
        // Linux before 5.6, and containers whose seccomp filter is that old.
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
        assert_eq!(read("/folder"), None, "a folder is not a file");
        assert_eq!(read("/nothing"), None);
    }

    #[test]
    fn an_unresponsive_file_system_is_queried_once() {
        let systems = Arc::new(FileSystems::default());
        let device = (0, 7);
        assert_eq!(systems.run_with_timeout(device, Source::File, || 1), Some(1));
        let (release, wait) = mpsc::channel::<()>();
        assert_eq!(systems.run_with_timeout(device, Source::File, move || wait.recv().is_ok()), None);
        assert_eq!(
            systems.run_with_timeout(device, Source::File, || panic!("the file system is not queried again")),
            None::<()>
        );
        assert_eq!(systems.run_with_timeout(device, Source::Memory, || 2), Some(2), "the two sources are independent");
        assert_eq!(systems.run_with_timeout((0, 8), Source::File, || 3), Some(3), "the other file system answers");
        release.send(()).unwrap();
        // The file system is queried again as soon as it has answered.
        let start = std::time::Instant::now();
        while systems.run_with_timeout(device, Source::File, || 4) != Some(4) {
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
        let mounts = procfs::mounts(pid).unwrap();
        if let Some(tmpfs) = procfs::parse_mounts(&mounts).find(|mount| mount.file_system_type == "tmpfs") {
            assert!(!systems.is_remote(pid, tmpfs.device));
        }
    }

    #[test]
    fn opening_a_fifo_does_not_block() {
        let root = tempfile::tempdir().unwrap();
        nix::unistd::mkfifo(&root.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(open_within(root.path(), Path::new("/pipe")).is_none());
    }
}
