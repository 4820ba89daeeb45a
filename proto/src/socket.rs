//! The path of the node collector's Unix socket, and the size of its packets.
//!
//! Launcher, hook and collector must find the same path without communication. The launcher decides
//! and passes the path to its command in `XPU_TIMER_SOCKET`. Programs without a launcher search the
//! same folders in the same order.

use std::{
    fs, io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use crate::{
    env::{Origin, Source},
    procfs::{self, Mount},
};

/// Settings that a collector applies to all of its ranks. A job with other values gets its own
/// collector. Settings that differ between ranks, such as timeouts, are sent when a rank registers.
const OWN_COLLECTOR_SETTINGS: [&str; 7] = [
    "XPU_TIMER_COLLECTOR",
    "XPU_TIMER_COLLECTOR_TOKEN_FILE",
    "XPU_TIMER_COLLECTOR_CA_FILE",
    "XPU_TIMER_WEBHOOK",
    "XPU_TIMER_KEEP_INCIDENTS",
    "XPU_TIMER_KEEP_DAYS",
    "XPU_TIMER_FILE_MODE",
];

/// Settings that a collector applies to all of its ranks, but that do not justify another
/// collector: they affect its metrics, its log and its exit. A job with other values is warned that
/// they have no effect.
const SHARED_SETTINGS: [&str; 14] = [
    "XPU_TIMER_PROMETHEUS_UPDATE_INTERVAL",
    "XPU_TIMER_LOCAL_UPDATE_INTERVAL",
    "XPU_TIMER_MM_BVAR_WINDOW_SIZE",
    "XPU_TIMER_COLL_BVAR_WINDOW_SIZE",
    "XPU_TIMER_DEREGISTER_TIME",
    "XPU_TIMER_BUCKETING_METRICS",
    "XPU_TIMER_MM_BUCKETING_COUNT",
    "XPU_TIMER_COMM_BUCKETING_COUNT",
    "XPU_TIMER_DEVICE_NAME",
    "XPU_TIMER_LOG",
    "XPU_TIMER_LOGGING_APPEND",
    "XPU_TIMER_LOGGING_MAX_MB",
    "XPU_TIMER_LOGGING_FILES",
    "XPU_TIMER_LINGER",
];

/// Maximum size of a packet, in bytes. The largest message is a Hello with a command of 4,096
/// bytes.
pub const MAX_PACKET_BYTES: usize = 16 * 1024;

/// Maximum length of a socket path, in bytes: `sun_path` without its final zero.
pub const MAX_PATH_BYTES: usize = 107;

/// The location at which a process finds its collector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketLocation {
    /// The socket.
    pub socket: PathBuf,
    /// The user's own folder, for other files that nobody else may write.
    pub directory: PathBuf,
    /// Why it differs from the settings: a sentence.
    pub problem: Option<String>,
}

/// The folder of a user's sockets: `<temporary directory>/xpu_timer-<uid>`. It must belong to that
/// user, and nobody else may write to it.
#[must_use]
pub fn directory(temporary: &Path, uid: u32) -> PathBuf {
    temporary.join(format!("xpu_timer-{uid}"))
}

/// The socket of a process with these settings: `XPU_TIMER_SOCKET`, else that of its control port
/// in the first usable folder below `TMPDIR`, `/tmp`, `/run/user/UID`, `/dev/shm`. If
/// `XPU_TIMER_SOCKET` is set, no folder is accessed, because a network file system may not answer.
#[must_use]
pub fn of(source: &Source, uid: u32) -> PathBuf {
    let given = source.path("XPU_TIMER_SOCKET").filter(|socket| fits(socket));
    given.unwrap_or_else(|| place(source, uid, &NO_CHECKS).socket)
}

/// Accepts every folder.
pub const NO_CHECKS: SocketChecks<'static> = SocketChecks { answers: &|_| None, refuses: &|_| None };

/// Whether a path is short enough for a socket.
fn fits(socket: &Path) -> bool {
    socket.as_os_str().len() <= MAX_PATH_BYTES
}

/// The checks of [`place`] for a folder, which may not exist yet. Each returns a reason against the
/// folder.
pub struct SocketChecks<'a> {
    /// Called first, before any other access to the folder: why its file system does not answer.
    pub answers: &'a dyn Fn(&Path) -> Option<String>,
    /// Why no file can be created in it.
    pub refuses: &'a dyn Fn(&Path) -> Option<String>,
}

/// Like [`of`], with the reason if it is not the first choice.
#[must_use]
pub fn place(source: &Source, uid: u32, look: &SocketChecks<'_>) -> SocketLocation {
    place_among(source, uid, look, &mounts())
}

/// The mount table of this process. Reading it does not access the file systems.
fn mounts() -> String {
    procfs::mounts("self").unwrap_or_default()
}

/// Whether a path is on a network file system. The file system is not accessed.
#[must_use]
pub fn is_remote(path: &Path) -> bool {
    remote(path, &mounts()).is_some()
}

fn place_among(source: &Source, uid: u32, look: &SocketChecks<'_>, mounts: &str) -> SocketLocation {
    let file = format!("{}.sock", source.control_port());
    let temporary = temporary(source);
    let places = [temporary.clone(), "/tmp".into(), format!("/run/user/{uid}").into(), "/dev/shm".into()];
    let directories = || places.iter().map(|place| directory(place, uid));
    let given = source.path("XPU_TIMER_SOCKET");
    let short = given.as_ref().filter(|socket| fits(socket));
    // The launcher's decision also applies to the folder, so nothing is checked again.
    if let Some(socket) = short
        && let Some(directory) = directories().find(|directory| socket.parent() == Some(directory))
        && remote(&directory, mounts).is_none()
    {
        return SocketLocation { socket: socket.clone(), directory, problem: None };
    }
    let wanted = directory(&temporary, uid);
    let unreachable = |path: &Path| unreachable(path, look, mounts);
    let problem_of = |directory: &Path| {
        let unusable = || unreachable(directory).or_else(|| unusable(directory, uid, look.refuses));
        unsuitable(directory, &directory.join(&file)).or_else(unusable)
    };
    let mut problem = problem_of(&wanted);
    let usable = problem.as_ref().and_then(|_| directories().skip(1).find(|one| problem_of(one).is_none()));
    // If no folder is usable, the program that tries to use one reports why. A folder that does not
    // answer is never used.
    let last = || if unreachable(&wanted).is_some() { directory(Path::new("/tmp"), uid) } else { wanted.clone() };
    let directory = usable.unwrap_or_else(|| if problem.is_some() { last() } else { wanted.clone() });
    let own = directory.join(&file);
    if let Some(why) = &mut problem {
        *why = format!("{} cannot be used ({why}): the node collector's socket is {}", wanted.display(), own.display());
    }
    let Some(socket) = given else { return SocketLocation { socket: own, directory, problem } };
    let refused = if fits(&socket) {
        unreachable(&socket).map(|why| format!("cannot be used ({why})"))
    } else {
        Some(format!("is longer than {MAX_PATH_BYTES} bytes, the limit for a socket's path"))
    };
    let Some(why) = refused else { return SocketLocation { socket, directory, problem: None } };
    let problem = format!("XPU_TIMER_SOCKET={} {why}: {} is used instead", socket.display(), own.display());
    SocketLocation { socket: own, directory, problem: Some(problem) }
}

/// Why the path of a folder, or of the socket in it, can never be used.
fn unsuitable(directory: &Path, socket: &Path) -> Option<String> {
    if !directory.is_absolute() {
        return Some("it is relative, so it is a different folder for each process".into());
    }
    (!fits(socket)).then(|| format!("a socket's path may have at most {MAX_PATH_BYTES} bytes"))
}

/// Why accessing a path might block forever.
fn unreachable(path: &Path, look: &SocketChecks<'_>, mounts: &str) -> Option<String> {
    let on_network = remote(path, mounts).map(|kind| format!("it is on a network file system, {kind}"));
    on_network.or_else(|| (look.answers)(path))
}

/// Why a folder whose file system answers cannot contain the socket. This only checks: the
/// collector creates the folder.
fn unusable(directory: &Path, uid: u32, refuses: &dyn Fn(&Path) -> Option<String>) -> Option<String> {
    match fs::symlink_metadata(directory) {
        Ok(status) if !status.is_dir() => Some("it is not a folder".into()),
        Ok(status) if status.uid() != uid => Some(format!("it belongs to user {}", status.uid())),
        Ok(status) if status.mode() & 0o022 != 0 => Some("others can write to it".into()),
        Ok(_) => refuses(directory),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let parent = directory.parent()?;
            match fs::metadata(parent) {
                Ok(status) if status.is_dir() => refuses(directory),
                Ok(_) => Some(format!("{} is not a folder", parent.display())),
                Err(error) => Some(error.to_string()),
            }
        }
        Err(error) => Some(error.to_string()),
    }
}

/// File systems whose files are on another machine or in another process. The kernel does not
/// release a thread that waits for a folder of one that is gone, not even on SIGKILL if another
/// thread waits there too. A rank that connects to its collector there could not end.
const REMOTE: [&str; 16] = [
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse",
    "fuseblk",
    "gfs2",
    "glusterfs",
    "gpfs",
    "lustre",
    "ncpfs",
    "nfs",
    "nfs4",
    "ocfs2",
    "smb3",
    "wekafs",
];
/// Exceptions: these are the root of a container or virtual machine, which depends on them anyway.
const LOCAL: [&str; 2] = ["fuse.fuse-overlayfs", "fuse.lxcfs"];

/// The type of the path's file system if it is one of [`REMOTE`], from the mount table alone: the
/// file system is not accessed.
fn remote<'a>(path: &Path, mounts: &'a str) -> Option<&'a str> {
    // If two mounts have the same mount point, the later one is visible.
    let depth = |mount: Mount<'a>| {
        let point = mount.point();
        path.starts_with(&point).then(|| (point.components().count(), mount.file_system_type))
    };
    let (_, kind) = procfs::parse_mounts(mounts).filter_map(depth).max_by_key(|(depth, _)| *depth)?;
    let is_remote =
        REMOTE.iter().any(|name| kind == *name || kind.strip_prefix(name).is_some_and(|rest| rest.starts_with('.')));
    (is_remote && !LOCAL.contains(&kind)).then_some(kind)
}

/// A setting that a collector applies to all of its ranks, without its value, which may be a
/// secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprint {
    /// The variable.
    pub name: &'static str,
    /// Hash of its value.
    pub hash: u64,
    /// Whether it was set. A setting that was not set may have any value.
    pub given: bool,
    /// Whether another value requires another collector.
    pub parts: bool,
}

/// The settings of a collector that is started with these settings.
#[must_use]
pub fn fingerprints(source: &Source) -> Vec<Fingerprint> {
    let settings = source
        .settings()
        .into_iter()
        .filter(|setting| OWN_COLLECTOR_SETTINGS.contains(&setting.name) || SHARED_SETTINGS.contains(&setting.name));
    settings
        .map(|setting| Fingerprint {
            name: setting.name,
            // Relative paths start at the folder of the process that set them.
            hash: match source.path(setting.name).filter(|_| setting.name.ends_with("_FILE")) {
                Some(path) => hash(std::path::absolute(&path).unwrap_or(path).as_os_str().as_bytes()),
                None => hash(setting.value.as_bytes()),
            },
            given: setting.origin != Origin::Default,
            parts: OWN_COLLECTOR_SETTINGS.contains(&setting.name),
        })
        .collect()
}

/// The file beside the socket in which its collector stores its [`fingerprints`], one per line:
/// name and hash.
#[must_use]
pub fn settings_file(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".settings");
    name.into()
}

/// The set variables for which the collector of a socket has another value, according to its file:
/// those that require another collector.
#[must_use]
pub fn unlike(wanted: &[Fingerprint], file: &str) -> Vec<&'static str> {
    differing(wanted, file).filter(|one| one.parts).map(|one| one.name).collect()
}

/// Like [`unlike`], but those for which the collector keeps its value.
#[must_use]
pub fn overruled(wanted: &[Fingerprint], file: &str) -> Vec<&'static str> {
    differing(wanted, file).filter(|one| !one.parts).map(|one| one.name).collect()
}

fn differing<'a>(wanted: &'a [Fingerprint], file: &'a str) -> impl Iterator<Item = &'a Fingerprint> {
    let of = move |name: &str| file.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let differs =
        move |one: &&Fingerprint| one.given && of(one.name).is_some_and(|hash| hash != format!("{:016x}", one.hash));
    wanted.iter().filter(differs)
}

/// The socket of another collector with other settings, beside that of the first one.
#[must_use]
pub fn beside(socket: &Path, wanted: &[Fingerprint]) -> PathBuf {
    let given: String = wanted
        .iter()
        .filter(|one| one.given && one.parts)
        .map(|one| format!("{} {:016x}\n", one.name, one.hash))
        .collect();
    let stem = socket.file_stem().unwrap_or_default().to_string_lossy();
    socket.with_file_name(format!("{stem}-{:08x}.sock", hash(given.as_bytes()) as u32))
}

/// FNV-1a: equal in every process and version.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// `TMPDIR`, or `/tmp`.
#[must_use]
pub fn temporary(source: &Source) -> PathBuf {
    source.path("TMPDIR").unwrap_or_else(|| "/tmp".into())
}

/// Socket of the node collector that listens on `control_port`.
#[must_use]
pub fn path(temporary: &Path, uid: u32, control_port: u16) -> PathBuf {
    directory(temporary, uid).join(format!("{control_port}.sock"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &'static [(&str, &str)]) -> Vec<Fingerprint> {
        let find = move |name: &str| pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_string());
        fingerprints(&Source::new(find, ""))
    }

    #[test]
    fn only_explicit_settings_are_compared() {
        let text = |all: &[Fingerprint]| -> String {
            all.iter().map(|one| format!("{} {:016x}\n", one.name, one.hash)).collect()
        };
        let (none, one) = (of(&[]), of(&[("XPU_TIMER_COLLECTOR", "http://a:1"), ("XPU_TIMER_KEEP_DAYS", "30")]));
        assert_eq!(none.len(), OWN_COLLECTOR_SETTINGS.len() + SHARED_SETTINGS.len());
        assert_eq!(unlike(&none, &text(&one)), [] as [&str; 0]);
        assert_eq!(unlike(&one, &text(&one)), [] as [&str; 0]);
        assert_eq!(unlike(&one, &text(&none)), ["XPU_TIMER_COLLECTOR"], "30 days are the default");
        assert_eq!(unlike(&one, ""), [] as [&str; 0]);
        let two = of(&[("XPU_TIMER_DEVICE_NAME", "H100"), ("XPU_TIMER_KEEP_DAYS", "3")]);
        assert_eq!(unlike(&two, &text(&none)), ["XPU_TIMER_KEEP_DAYS"]);
        assert_eq!(overruled(&two, &text(&none)), ["XPU_TIMER_DEVICE_NAME"], "no reason for another collector");
        assert_eq!(overruled(&none, &text(&two)), [] as [&str; 0], "what was not given may have any value");
        let first = Path::new("/t/18888.sock");
        assert_ne!(beside(first, &one), beside(first, &of(&[("XPU_TIMER_COLLECTOR", "http://b:1")])));
        assert!(beside(first, &one).to_string_lossy().starts_with("/t/18888-"));
    }

    #[test]
    fn an_explicit_socket_is_used_unless_its_path_is_too_long() {
        let of = |path: String| {
            let find = move |name: &str| (name == "XPU_TIMER_SOCKET").then(|| path.clone());
            super::of(&Source::new(find, ""), 4_000_000)
        };
        assert_eq!(of("/elsewhere/s".into()), Path::new("/elsewhere/s"));
        assert_eq!(of(format!("/{}", "x".repeat(MAX_PATH_BYTES))), Path::new("/tmp/xpu_timer-4000000/18888.sock"));
    }

    /// Only `answers` may access a socket or a temporary folder below `/dead`.
    #[test]
    fn an_unresponsive_folder_is_not_checked_further() {
        let place = |settings: &[(&'static str, &'static str)]| {
            let settings = settings.to_vec();
            let find = move |name: &str| settings.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_string());
            let answers = |path: &Path| path.starts_with("/dead").then(|| "it does not answer".to_string());
            let refuses = |path: &Path| {
                assert!(!path.starts_with("/dead"), "{}", path.display());
                None
            };
            place_among(&Source::new(find, ""), 4_000_000, &SocketChecks { answers: &answers, refuses: &refuses }, "")
        };
        let (temporary, socket) = (("TMPDIR", "/dead/tmp"), ("XPU_TIMER_SOCKET", "/dead/s"));
        let own = Path::new("/tmp/xpu_timer-4000000/18888.sock");
        for (settings, named) in [
            (&[temporary][..], "/dead/tmp/xpu_timer-4000000 cannot be used (it does not answer)"),
            (&[socket][..], "XPU_TIMER_SOCKET=/dead/s cannot be used (it does not answer)"),
        ] {
            let place = place(settings);
            assert_eq!(place.socket, own);
            assert!(place.problem.as_ref().is_some_and(|why| why.contains(named)), "{:?}", place.problem);
        }
        // The collector that the launcher starts gets the launcher's decision in addition to the
        // user's settings.
        let decided = place(&[temporary, ("XPU_TIMER_SOCKET", "/tmp/xpu_timer-4000000/18888-1.sock")]);
        assert_eq!((decided.socket.to_str(), decided.problem), (Some("/tmp/xpu_timer-4000000/18888-1.sock"), None));
        let elsewhere = place(&[temporary, ("XPU_TIMER_SOCKET", "/elsewhere/s")]);
        assert_eq!(
            (elsewhere.socket.to_str(), elsewhere.directory.as_path()),
            (Some("/elsewhere/s"), own.parent().unwrap())
        );
    }

    #[test]
    fn a_network_file_system_is_skipped_for_the_next_folder() {
        let mounts = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
            30 22 0:40 / /home/a\\040b rw - nfs4 server:/a rw\n\
            31 30 0:41 / /home/a\\040b/local rw - tmpfs none rw\n\
            32 22 0:42 / /over rw - overlay overlay rw\n\
            33 32 0:43 / /over rw - fuse.sshfs there rw\n\
            34 22 0:44 / /container rw - fuse.fuse-overlayfs there rw\n\
            35 22 0:45 / /fused rw - fusectl none rw\n";
        let kind = |path: &str| remote(Path::new(path), mounts);
        assert_eq!(kind("/home/a b/tmp"), Some("nfs4"));
        assert_eq!(kind("/over/xpu_timer-0"), Some("fuse.sshfs"), "the later of two mounts");
        for path in ["/tmp", "/home/a", "/home/a b/local/x", "/home/a bc", "/container/tmp", "/fused"] {
            assert_eq!(kind(path), None, "{path}");
        }
        let source = Source::new(|name| (name == "TMPDIR").then(|| "/over".to_string()), "");
        let answers = |folder: &Path| {
            assert!(!folder.starts_with("/over"), "asked");
            folder.starts_with("/tmp").then(|| "dead".to_string())
        };
        let place = place_among(&source, 4_000_000, &SocketChecks { answers: &answers, ..NO_CHECKS }, mounts);
        assert_eq!(place.socket, Path::new("/dev/shm/xpu_timer-4000000/18888.sock"));
        assert!(place.problem.is_some_and(|why| why.contains("/over/xpu_timer-4000000") && why.contains("fuse.sshfs")));
    }

    #[test]
    fn the_folder_that_the_launcher_chose_is_not_checked_again() {
        let find = |name: &str| match name {
            "TMPDIR" => Some("/dead".to_string()),
            "XPU_TIMER_SOCKET" => Some("/tmp/xpu_timer-4000000/1.sock".to_string()),
            _ => None,
        };
        let asked = |folder: &Path| -> Option<String> { panic!("{} is asked", folder.display()) };
        let look = SocketChecks { answers: &asked, refuses: &asked };
        let place = place(&Source::new(find, ""), 4_000_000, &look);
        assert_eq!(place.directory, Path::new("/tmp/xpu_timer-4000000"));
        assert_eq!((place.socket, place.problem), (place.directory.join("1.sock"), None));
    }

    #[test]
    fn folders_are_tried_in_order_and_the_reason_is_reported() {
        let source = Source::new(|name| (name == "TMPDIR").then(|| "/nowhere".to_string()), "");
        let refused = |folder: &Path| folder.starts_with("/tmp").then(|| "full".to_string());
        let place = place(&source, 4_000_000, &SocketChecks { refuses: &refused, ..NO_CHECKS });
        assert_eq!(place.socket, Path::new("/dev/shm/xpu_timer-4000000/18888.sock"));
        assert!(
            place.problem.is_some_and(|why| why.contains("/nowhere/xpu_timer-4000000") && why.contains("/dev/shm"))
        );
    }
}
