//! Settings of the launcher, from the environment and the INI file. Also checks whether incidents
//! can be written to their folder: users who look for incidents after a hang should know their
//! location before.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    sys::statvfs::statvfs,
    unistd::{AccessFlags, access, geteuid},
};
use xpu_timer_proto::{
    env::{HANDED_OVER, Origin, Setting, Source, own_variable},
    printable::{MOST_NAME_BYTES, MOST_PATH_BYTES, shortened},
    socket::{self, Fingerprint, SocketChecks},
};

use crate::bounded_io;

/// Variables that name a file or a folder.
const PATHS: [&str; 5] = [
    "XPU_TIMER_CONFIG",
    "XPU_TIMER_TIMELINE_PATH",
    "XPU_TIMER_LOGGING_DIR",
    "XPU_TIMER_COLLECTOR_TOKEN_FILE",
    "XPU_TIMER_COLLECTOR_CA_FILE",
];

/// Variables that the hook needs before it may read a file. The launcher copies them from the INI
/// file into the environment.
const NEEDED_AT_LOAD: [&str; 4] =
    ["XPU_TIMER_INLINE", "XPU_TIMER_NCCL_LIB_PATH", "XPU_TIMER_CUBLAS_LIB_PATH", "XPU_TIMER_CUBLASLT_LIB_PATH"];

/// The variables of these that name a library by its path.
const LIBRARIES: [&str; 3] = ["XPU_TIMER_NCCL_LIB_PATH", "XPU_TIMER_CUBLAS_LIB_PATH", "XPU_TIMER_CUBLASLT_LIB_PATH"];

/// Maximum size of the INI file's settings, in bytes: the system does not execute a program with a
/// variable of 128 KiB.
const MOST_HANDED_OVER: usize = 32 << 10;

/// Name of the collector's log.
pub(crate) const LOG_FILE: &str = "xpu_timer_collector.log";

/// The settings of the launcher.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// Run the command without the tool.
    pub disabled: bool,
    /// The node collector's socket.
    pub socket: PathBuf,
    /// The settings of the collector.
    pub wanted: Vec<Fingerprint>,
    /// Why the socket is not where the environment puts it; a sentence.
    pub moved: Option<String>,
    /// The collector binary, if the user set it.
    pub daemon: Option<PathBuf>,
    /// The hook, if the user set it.
    pub hook: Option<PathBuf>,
    /// Path of the collector's log.
    pub log: PathBuf,
    /// The folder of the incidents, and the fallback if it is not writable.
    pub timeline: [PathBuf; 2],
    /// Keep the log of the previous run.
    pub append: bool,
    /// Modes of created files and folders.
    pub modes: [u32; 2],
    /// Seconds after which an unused collector ends.
    pub linger: String,
    /// Folder of the launcher's own executable.
    pub beside: Option<PathBuf>,
    /// Other variables that change: relative paths become absolute, because the collector and the
    /// ranks run in other folders; and the variables of the INI file that the hook needs before it
    /// may read a file.
    pub changed: Vec<(&'static str, OsString)>,
    /// Files that the user named but that cannot be used; one line each.
    pub remarks: Vec<String>,
}

impl Config {
    /// Reads the environment of this process. The collector and the hook report invalid values in
    /// their logs.
    pub(crate) fn read() -> Self {
        // A value from a launcher above this one may be outdated.
        let environment = |name: &str| if name == HANDED_OVER { None } else { own_variable(name) };
        let source = Source::with_ini(environment, |path| bounded_io::read(Path::new(path)));
        let why = |result: io::Result<()>| result.err().map(|error| error.to_string());
        let answers = |folder: &Path| why(bounded_io::answers(folder));
        let refuses = |folder: &Path| why(check_writable(folder));
        let look = SocketChecks { answers: &answers, refuses: &refuses };
        let mut config = Self::with(&source, geteuid().as_raw(), &look);
        if !config.disabled {
            config.hand_over(&source);
            config.check_libraries(&source);
        }
        config
    }

    /// Copies the INI file into a variable, so that neither the collector nor a rank opens the
    /// file.
    fn hand_over(&mut self, source: &Source) {
        let Some(path) = source.path("XPU_TIMER_CONFIG") else { return };
        let path = absolute(path).to_string_lossy().into_owned();
        let text = source.hand_over(&path);
        let problem = source.problems().into_iter().find(|problem| problem.name == "XPU_TIMER_CONFIG");
        let problem = problem.map(|problem| problem.to_string()).or_else(|| {
            (text.len() > MOST_HANDED_OVER)
                .then(|| format!("XPU_TIMER_CONFIG={path:?} cannot be used: it has more than {MOST_HANDED_OVER} bytes"))
        });
        match problem {
            None => self.change(HANDED_OVER, text.into()),
            Some(problem) => {
                self.remarks.push(problem);
                self.changed.retain(|(name, _)| !NEEDED_AT_LOAD.contains(name));
                self.change("XPU_TIMER_CONFIG", OsString::new());
            }
        }
    }

    /// Checks the configured libraries: the hook opens them while a thread of the job calls one of
    /// their functions.
    fn check_libraries(&mut self, source: &Source) {
        for name in LIBRARIES {
            let Some(path) = source.path(name).filter(|path| path.to_string_lossy().contains('/')) else { continue };
            if let Err(error) = bounded_io::is_file(&path) {
                self.remarks.push(format!("{name}={path:?} cannot be used: {error}"));
                self.change(name, OsString::new());
            }
        }
    }

    fn change(&mut self, name: &'static str, value: OsString) {
        self.changed.retain(|(changed, _)| *changed != name);
        self.changed.push((name, value));
    }

    /// The settings of a process of the user `uid`.
    pub(crate) fn of(source: &Source, uid: u32) -> Self {
        let answers = |folder: &Path| bounded_io::answers(folder).err().map(|error| error.to_string());
        let refuses = |folder: &Path| {
            let there = if folder.exists() { folder } else { folder.parent()? };
            access(there, AccessFlags::W_OK | AccessFlags::X_OK).err().map(|error| error.to_string())
        };
        Self::with(source, uid, &SocketChecks { answers: &answers, refuses: &refuses })
    }

    fn with(source: &Source, uid: u32, look: &SocketChecks<'_>) -> Self {
        let place = socket::place(source, uid, look);
        Config {
            disabled: source.flag("XPU_TIMER_DISABLE"),
            socket: absolute(place.socket),
            wanted: socket::fingerprints(source),
            moved: place.problem,
            daemon: source.path("XPU_TIMER_DAEMON_PATH"),
            hook: source.path("XPU_TIMER_HOOK_PATH"),
            log: absolute(source.path("XPU_TIMER_LOGGING_DIR").unwrap_or_else(|| "/tmp".into())).join(LOG_FILE),
            timeline: [
                absolute(source.path("XPU_TIMER_TIMELINE_PATH").unwrap_or_default()),
                place.directory.join("timeline"),
            ],
            append: source.flag("XPU_TIMER_LOGGING_APPEND"),
            modes: [source.file_mode(), source.folder_mode()],
            linger: source.number::<u64>("XPU_TIMER_LINGER").unwrap_or(600).to_string(),
            beside: std::env::current_exe().ok().and_then(|exe| exe.parent().map(PathBuf::from)),
            changed: made_absolute(source).chain(needed_at_load(source)).collect(),
            remarks: Vec::new(),
        }
    }
}

/// Creates the folder of the socket and a file in it. The disk may be full, read-only, or of a type
/// without folders.
fn check_writable(folder: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let file = folder.join(format!(".launch-{}", std::process::id()));
    fs::OpenOptions::new().write(true).create_new(true).open(&file)?;
    fs::remove_file(file)
}

fn made_absolute(source: &Source) -> impl Iterator<Item = (&'static str, OsString)> {
    PATHS
        .into_iter()
        .filter_map(|name| Some((name, source.path(name).filter(|path| path.is_relative())?)))
        .map(|(name, path)| (name, absolute(path).into_os_string()))
}

fn needed_at_load(source: &Source) -> impl Iterator<Item = (&'static str, OsString)> {
    // Invalid values stay in the file, for the logs to report.
    let of_file = |setting: &Setting| {
        setting.origin == Origin::Ini && setting.problem.is_none() && NEEDED_AT_LOAD.contains(&setting.name)
    };
    source.settings().into_iter().filter(of_file).map(|setting| (setting.name, setting.value.into()))
}

/// Relative to the launcher's folder; unchanged if that no longer exists.
fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

/// The problem with the folder of `XPU_TIMER_TIMELINE_PATH`, and that the fallback is used.
pub(crate) fn timeline_remark([wanted, fallback]: &[PathBuf; 2]) -> Option<String> {
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
    fn relative_paths_mean_the_folder_of_the_launcher_and_the_hook_gets_what_it_needs_at_load() {
        let ini = "XPU_TIMER_COLLECTOR_TOKEN_FILE=keys/token\nXPU_TIMER_INLINE=off\nXPU_TIMER_BRACKET=all\n";
        let environment = |name: &str| match name {
            "XPU_TIMER_TIMELINE_PATH" => Some("dumps".into()),
            "XPU_TIMER_LOGGING_DIR" => Some("/var/log".into()),
            _ => None,
        };
        let config = Config::with(&Source::new(environment, ini), 0, &socket::NO_CHECKS);
        let here = std::env::current_dir().unwrap();
        let wanted = [
            ("XPU_TIMER_TIMELINE_PATH", here.join("dumps").into_os_string()),
            ("XPU_TIMER_COLLECTOR_TOKEN_FILE", here.join("keys/token").into_os_string()),
            ("XPU_TIMER_INLINE", "off".into()),
        ];
        assert_eq!(config.changed, wanted);
    }

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
        let of = |path: &Path| timeline_remark(&[path.into(), "/other/timeline".into()]).unwrap_or_default();
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
        let of = |path: PathBuf| timeline_remark(&[path, "/other/timeline".into()]);
        assert_eq!((of(folder.path().into()), of(folder.path().join("a/b"))), (None, None));
        let problem = of(file.join("timeline")).unwrap();
        assert!(
            problem.contains("(Not a directory)") && problem.ends_with("incidents will be in /other/timeline"),
            "{problem}"
        );
        let long = of(folder.path().join("x".repeat(300)).join("timeline")).unwrap();
        assert!(long.contains("(File name too long)"), "{long}");
    }
}
