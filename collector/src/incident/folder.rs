//! The incident folder on disk. Files are written under temporary names and then renamed. A full or
//! read-only disk is reported and tolerated.

use std::{
    fs,
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, symlink},
    path::{Path, PathBuf},
    sync::OnceLock,
};

use tracing::warn;
use xpu_timer_proto::{procfs, samples, timeline};

use crate::{
    error::{Error, chain},
    os::{
        process,
        safe_path::{create_directories, private_directory},
    },
};

/// A folder that was made, with the reason if it is not in its intended place, or the reason why
/// none could be made.
pub type MadeFolder = Result<(Folder, Option<Error>), Error>;

/// One incident folder that this collector made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Folder {
    /// `incident-…`.
    pub path: PathBuf,
}

/// Reserved space while the dumps are written, so that the verdict still fits if they fill the
/// disk.
pub(crate) const RESERVE: &str = ".reserve";
const RESERVE_BYTES: usize = 256 * 1024;
/// Names the node that owns a folder.
const OWNER: &str = ".owner";
/// Maximum number of nodes with one name that share a file system.
const SAME_NAME: u32 = 64;

impl Folder {
    /// Makes `incident-ID` in `root`, or in `fallback` if `root` is not writable. The returned
    /// error is the reason for the fallback.
    ///
    /// # Errors
    /// If neither is writable.
    pub fn create(root: &Path, fallback: &Path, id: &str) -> MadeFolder {
        match Self::create_only(root, id) {
            Ok(folder) => Ok((folder, None)),
            Err(error) => Ok((Self::create_in_fallback(fallback, id, None)?, Some(error))),
        }
    }

    /// As [`Folder::create`], without a fallback.
    ///
    /// # Errors
    /// If it is not writable.
    pub fn create_only(root: &Path, id: &str) -> Result<Folder, Error> {
        create_directories(root)?;
        Self::create_named(root, id, None)
    }

    /// As [`Folder::create`], for a folder that belongs to `owner`. Two nodes of one name may share
    /// a file system: if the name is taken by another owner, this one gets a number.
    ///
    /// # Errors
    /// As [`Folder::create`].
    pub fn create_own(root: &Path, fallback: &Path, id: &str, owner: &str) -> MadeFolder {
        match create_directories(root).and_then(|()| Self::create_named(root, id, Some(owner))) {
            Ok(folder) => Ok((folder, None)),
            Err(error) => Ok((Self::create_in_fallback(fallback, id, Some(owner))?, Some(error))),
        }
    }

    /// Makes `incident-ID` in a folder that a user has chosen. An existing folder must be writable
    /// by this user only: the parent may be world-writable, and others could plant folders and
    /// links.
    ///
    /// # Errors
    /// If it cannot be made, or others may have prepared it.
    pub fn create_copy(to: &Path, id: &str) -> Result<Folder, Error> {
        create_directories(to)?;
        let path = to.join(format!("incident-{id}"));
        match fs::create_dir(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(Error::path("create", &path)(error));
            }
            _ => private_directory(&path)?,
        }
        Ok(Folder { path })
    }

    /// As [`Folder::create`], or as [`Folder::create_own`] with an owner, if the preferred root is
    /// known to be unusable.
    ///
    /// # Errors
    /// If it is not writable.
    pub fn create_in_fallback(fallback: &Path, id: &str, owner: Option<&str>) -> Result<Folder, Error> {
        // Both are in the temporary directory, which is world-writable.
        if let Some(parent) = fallback.parent() {
            private_directory(parent)?;
        }
        private_directory(fallback)?;
        Self::create_named(fallback, id, owner)
    }

    fn create_named(root: &Path, id: &str, owner: Option<&str>) -> Result<Folder, Error> {
        let Some(owner) = owner else { return Self::create_in(root, id, is_own_folder, None) };
        let mut taken = None;
        for name in own_names(id) {
            // Creating it decides the ownership: another node may try at the same moment.
            match Self::create_in(root, &name, |path| is_owned_by(path, owner), Some(owner)) {
                Err(error) if error.is_already_exists() => taken = Some(error),
                made => return made,
            }
        }
        Err(taken.expect("there is at least one name"))
    }

    /// Removes a folder that is no longer needed, unless an earlier dump of the incident has left
    /// its verdict in it.
    pub fn give_up(&self) {
        if !self.path.join("verdict.json").exists() {
            // A later collector finishes the removal.
            let _ = fs::remove_dir_all(&self.path);
        }
    }

    fn create_in(
        root: &Path,
        id: &str,
        may_go_on: impl Fn(&Path) -> bool,
        owner: Option<&str>,
    ) -> Result<Folder, Error> {
        let path = root.join(format!("incident-{id}"));
        let made = match fs::create_dir(&path) {
            Ok(()) => true,
            // A collector that restarted during this incident continues in its folder.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && may_go_on(&path) => false,
            Err(error) => return Err(Error::path("create", &path)(error)),
        };
        let folder = Folder { path };
        folder.release_reserve();
        let owned = owner.map_or(Ok(()), |owner| folder.write(OWNER, owner.as_bytes()));
        let reserve = |file: &mut dyn Write| {
            file.write_all(format!("{}\n", own_stamp()).as_bytes())?;
            file.write_all(&vec![0; RESERVE_BYTES])
        };
        let reserved = owned.and_then(|()| folder.write_new(RESERVE, reserve));
        if let Err(error) = reserved {
            // No space for anything, so another root is needed. Existing files stay.
            if made {
                let _ = fs::remove_dir_all(&folder.path);
            }
            return Err(error);
        }
        Ok(folder)
    }

    /// Writes a file.
    ///
    /// # Errors
    /// If it cannot be written completely. Then no part of it remains, and an older file of that
    /// name stays.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        self.write_with(name, |file| file.write_all(bytes))
    }

    /// Writes a file piece by piece.
    ///
    /// # Errors
    /// As [`Folder::write`].
    pub fn write_with(&self, name: &str, pieces: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Error> {
        let temporary = format!(".{name}.new");
        // A killed collector may have left it.
        let _ = fs::remove_file(self.path.join(&temporary));
        self.write_new(&temporary, pieces)?;
        let to = self.path.join(name);
        fs::rename(self.path.join(&temporary), &to).map_err(Error::path("write", to))
    }

    /// Says in the folder that the timelines of its ranks are still coming. Logs an error: the
    /// timelines come anyway.
    pub fn announce_timelines(&self) {
        let text = format!(
            "The timelines of the ranks (*.{}, *.{}) are still coming. When they are here, report.html is drawn again, \
             and this file is removed.\n{}\n",
            timeline::EXTENSION,
            samples::EXTENSION,
            own_stamp()
        );
        if let Err(error) = self.write(timeline::PENDING, text.as_bytes()) {
            warn!("{}", chain(&error));
        }
    }

    /// No more timelines are coming.
    pub fn timelines_came(&self) {
        // It may be missing because the disk was full.
        let _ = fs::remove_file(self.path.join(timeline::PENDING));
    }

    /// Frees the reserved space.
    pub fn release_reserve(&self) {
        // A second call finds no file.
        let _ = fs::remove_file(self.path.join(RESERVE));
    }

    /// Makes `latest` beside the folder point to it, atomically.
    ///
    /// # Errors
    /// If the link cannot be made, for example because `latest` is a folder.
    pub fn link_latest(&self) -> Result<(), Error> {
        let (Some(root), Some(name)) = (self.path.parent(), self.path.file_name()) else { return Ok(()) };
        let latest = root.join("latest");
        let temporary = root.join(format!(".latest-{}", name.to_string_lossy()));
        let _ = fs::remove_file(&temporary);
        let made = symlink(name, &temporary).and_then(|()| fs::rename(&temporary, &latest));
        made.map_err(|error| {
            let _ = fs::remove_file(&temporary);
            Error::path("link", latest)(error)
        })
    }

    fn write_new(&self, name: &str, pieces: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Error> {
        let path = self.path.join(name);
        let written = || -> io::Result<()> {
            let mut options = fs::OpenOptions::new();
            let file = options.write(true).create_new(true).custom_flags(libc::O_NOFOLLOW).open(&path)?;
            let mut buffered = io::BufWriter::new(file);
            pieces(&mut buffered)?;
            let file = buffered.into_inner().map_err(io::IntoInnerError::into_error)?;
            // A network file system may report a full disk only here.
            Ok(nix::unistd::close(file)?)
        };
        written().map_err(|error| {
            let _ = fs::remove_file(&path);
            Error::path("write", &path)(error)
        })
    }
}

/// Machine, PID namespace and process of a collector that is writing a folder.
pub(crate) fn own_stamp() -> &'static str {
    static STAMP: OnceLock<String> = OnceLock::new();
    STAMP.get_or_init(|| {
        let pid = std::process::id();
        let start = procfs::stat(pid).map_or(0, |stat| stat.start_time);
        format!("{} {pid}:{start}", process::home(Path::new("")))
    })
}

/// The possible names of a folder of this node.
pub fn own_names(id: &str) -> impl Iterator<Item = String> {
    let id = id.to_string();
    (1..=SAME_NAME).map(move |number| if number == 1 { id.clone() } else { format!("{id}-{number}") })
}

/// Whether [`Folder::create_own`] made the folder for this owner.
#[must_use]
pub fn is_owned_by(path: &Path, owner: &str) -> bool {
    is_own_folder(path) && fs::read(path.join(OWNER)).is_ok_and(|other| other == owner.as_bytes())
}

/// Whether this is a folder of this user and not a link to one.
pub fn is_own_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|status| status.is_dir() && status.uid() == nix::unistd::getuid().as_raw())
}

/// The part of a folder name after `incident-`.
#[must_use]
pub fn id(folder: &Path) -> String {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    name.strip_prefix("incident-").unwrap_or(&name).to_string()
}

/// The incident of a folder: `20261121T132019Z-0e0c1f66` for
/// `incident-20261121T132019Z-0e0c1f66-node-a`.
#[must_use]
pub fn incident_of(folder: &Path) -> String {
    id(folder).splitn(3, '-').take(2).collect::<Vec<_>>().join("-")
}

/// Incident folders in one folder, oldest first. In a world-writable folder, those of other users
/// are skipped: they could contain false reports about any job.
#[must_use]
pub fn folders(root: &Path) -> Vec<PathBuf> {
    let is_shared = fs::metadata(root).is_ok_and(|status| status.mode() & 0o002 != 0);
    let mut folders: Vec<PathBuf> = fs::read_dir(root)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("incident-"))
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .filter(|path| !is_shared || is_own_folder(path))
        .collect();
    folders.sort();
    folders
}

/// As [`folders`], limited to those that this user's collector may continue: it writes into them
/// and acts on their content.
#[must_use]
pub fn own_folders(root: &Path) -> Vec<PathBuf> {
    folders(root).into_iter().filter(|path| is_own_folder(path)).collect()
}

/// Name of the folder of an incident. The nodes of a job may share one file system, on which the
/// cluster collector writes the folder of the incident itself. Sanitizes both names, whatever
/// another machine calls itself or its incidents.
#[must_use]
pub fn folder_name(incident: &str, node: Option<&str>) -> String {
    let plain_char = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '_' };
    let plain = |name: &str| name.chars().map(plain_char).collect::<String>();
    match node {
        Some(node) => format!("{}-{}", plain(incident), plain(node)),
        None => plain(incident),
    }
}

/// The rank of `RRRRR-WWWWW.stacktrace`.
#[must_use]
pub fn rank_of(name: &str) -> Option<u32> {
    let (rank, world) = name.strip_suffix(".stacktrace")?.split_once('-')?;
    let digits = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits(rank) && digits(world)).then(|| rank.parse().ok())?
}

/// The rank of a file that a node sends: `RRRRR-WWWWW.stacktrace`, its timeline, or its samples.
#[must_use]
pub fn rank_of_file(name: &str) -> Option<u32> {
    let of_timeline = |extension| name.strip_suffix(extension)?.strip_suffix('.');
    let stem = of_timeline(timeline::EXTENSION).or_else(|| of_timeline(samples::EXTENSION));
    stem.map_or_else(|| rank_of(name), |stem| rank_of(&format!("{stem}.stacktrace")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn files_are_written_atomically() {
        let temporary = tempfile::tempdir().unwrap();
        let root = temporary.path().join("a/b");
        let (folder, notice) = Folder::create(&root, &temporary.path().join("f"), "1").unwrap();
        assert!(notice.is_none());
        folder.write("verdict.json", b"one").unwrap();
        folder.write("verdict.json", b"two").unwrap();
        folder.release_reserve();
        let names: Vec<String> = fs::read_dir(&folder.path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(names, ["verdict.json"]);
        assert_eq!(fs::read(folder.path.join("verdict.json")).unwrap(), b"two");
        let error = folder.write("no/such", b"x").unwrap_err();
        assert!(!error.is_full() && error.to_string().contains("no/such"), "{error}");
    }

    #[test]
    fn a_node_does_not_write_into_the_folder_of_another_one_of_its_name() {
        let temporary = tempfile::tempdir().unwrap();
        let root = temporary.path();
        let make = |owner: &str| Folder::create_own(root, root, "1-node", owner).unwrap().0.path;
        let (first, second) = (make("a"), make("b"));
        assert!(first.ends_with("incident-1-node") && is_owned_by(&first, "a") && !is_owned_by(&first, "b"));
        assert!(second.ends_with("incident-1-node-2") && is_owned_by(&second, "b"));
        assert_eq!([make("a"), make("b")], [first.clone(), second], "a restarted collector continues in its folder");
        fs::remove_file(first.join(OWNER)).unwrap();
        assert!(make("a").ends_with("incident-1-node-3"), "a folder that does not say whose it is may be anybody's");
    }

    #[test]
    fn latest_is_updated_unless_it_is_a_folder() {
        let temporary = tempfile::tempdir().unwrap();
        let make = |id: &str| Folder::create(temporary.path(), temporary.path(), id).unwrap().0;
        let (one, two) = (make("1"), make("2"));
        let latest = temporary.path().join("latest");
        one.link_latest().unwrap();
        two.link_latest().unwrap();
        assert_eq!(fs::read_link(&latest).unwrap(), PathBuf::from("incident-2"));
        fs::remove_file(&latest).unwrap();
        fs::create_dir(&latest).unwrap();
        assert!(one.link_latest().is_err());
        assert!(latest.is_dir());
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 3, "no temporary link is left");
    }

    #[test]
    fn an_unwritable_root_is_replaced_and_the_reason_reported() {
        let temporary = tempfile::tempdir().unwrap();
        let file = temporary.path().join("file");
        fs::write(&file, "").unwrap();
        let fallback = temporary.path().join("own/timeline");
        let (folder, notice) = Folder::create(&file.join("below"), &fallback, "1").unwrap();
        assert_eq!(folder.path, fallback.join("incident-1"));
        assert!(notice.unwrap().to_string().contains("file/below"));
    }

    #[test]
    fn a_copy_refuses_folders_of_other_users() {
        let temporary = tempfile::tempdir().unwrap();
        let (shared, target) = (temporary.path().join("shared"), temporary.path().join("target"));
        fs::create_dir(&shared).unwrap();
        fs::create_dir(&target).unwrap();
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o1777)).unwrap();
        fs::write(target.join("precious"), "precious").unwrap();
        let copy = |id: &str| Folder::create_copy(&shared, id).map(|folder| folder.path);
        assert_eq!(copy("1").unwrap(), shared.join("incident-1"));
        let folder = Folder::create_copy(&shared, "1").unwrap();
        symlink(target.join("precious"), folder.path.join(".verdict.txt.new")).unwrap();
        folder.write("verdict.txt", b"fetched again").unwrap();
        assert_eq!(fs::read(target.join("precious")).unwrap(), b"precious", "a link there is not written through");
        symlink(&target, shared.join("incident-2")).unwrap();
        assert!(copy("2").unwrap_err().to_string().contains("not a folder"));
        fs::create_dir(shared.join("incident-3")).unwrap();
        fs::set_permissions(shared.join("incident-3"), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(copy("3").unwrap_err().to_string().contains("others can write"));
        if nix::unistd::getuid().is_root() {
            fs::create_dir(shared.join("incident-4")).unwrap();
            std::os::unix::fs::chown(shared.join("incident-4"), Some(12345), None).unwrap();
            assert!(copy("4").unwrap_err().to_string().contains("user 12345"));
        }
    }

    #[test]
    fn a_link_planted_in_the_temporary_directory_is_not_followed() {
        let temporary = tempfile::tempdir().unwrap();
        let target = temporary.path().join("target");
        fs::create_dir(&target).unwrap();
        let own = temporary.path().join("own");
        symlink(&target, &own).unwrap();
        let error = Folder::create(Path::new("/proc/nowhere"), &own.join("timeline"), "1").unwrap_err();
        assert!(error.to_string().contains("not a folder"), "{error}");
        assert_eq!(fs::read_dir(&target).unwrap().count(), 0);
    }

    #[test]
    fn ranks_are_parsed_from_dump_names() {
        assert_eq!(rank_of("00012-00064.stacktrace"), Some(12));
        assert_eq!(rank_of("100012-200000.stacktrace"), Some(100_012));
        for name in [
            "verdict.json",
            "1-2.stacktrace",
            "00001.stacktrace",
            "../00001-00002.stacktrace",
            "0000a-00002.stacktrace",
        ] {
            assert_eq!(rank_of(name), None, "{name}");
        }
    }
}
