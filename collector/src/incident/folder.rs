//! The incident folder on disk: new files under temporary names, then renamed; a full or read-only disk is reported and survived.

use std::{
    fs,
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, symlink},
    path::{Path, PathBuf},
    sync::OnceLock,
};

use crate::{
    error::Error,
    os::{
        process::{self, Stat},
        safe_path::{create_directories, private_directory},
    },
};

/// One incident folder that this collector made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Folder {
    /// `incident-…`.
    pub path: PathBuf,
}

/// Set aside while the dumps are written, so that the verdict still fits when they fill the disk.
pub(crate) const RESERVE: &str = ".reserve";
const RESERVE_BYTES: usize = 256 * 1024;
/// Says which node a folder is of.
const OWNER: &str = ".owner";
/// Nodes of one name that may share a file system.
const SAME_NAME: u32 = 64;

impl Folder {
    /// Makes `incident-ID` in `root`, or in `fallback` when that cannot be written; then the error says why.
    ///
    /// # Errors
    /// When neither can be written.
    pub fn create(root: &Path, fallback: &Path, id: &str) -> Result<(Folder, Option<Error>), Error> {
        match create_directories(root).and_then(|()| Self::create_named(root, id, None)) {
            Ok(folder) => Ok((folder, None)),
            Err(error) => Ok((Self::create_in_fallback(fallback, id, None)?, Some(error))),
        }
    }

    /// As [`Folder::create`], for a folder that is this owner's. Two nodes of one name may share a file system: where another one's
    /// folder is, this one's name gets a number.
    ///
    /// # Errors
    /// As [`Folder::create`].
    pub fn create_own(root: &Path, fallback: &Path, id: &str, owner: &str) -> Result<(Folder, Option<Error>), Error> {
        match create_directories(root).and_then(|()| Self::create_named(root, id, Some(owner))) {
            Ok(folder) => Ok((folder, None)),
            Err(error) => Ok((Self::create_in_fallback(fallback, id, Some(owner))?, Some(error))),
        }
    }

    /// Makes `incident-ID` in a folder that a person has named. What is there already has to be this user's alone: the folder above may
    /// be one that everybody may write to, where others plant folders and links.
    ///
    /// # Errors
    /// When it cannot be made, or others may have prepared it.
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

    /// As [`Folder::create`], or as [`Folder::create_own`] with an owner, where the wanted folder is known to be of no use.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn create_in_fallback(fallback: &Path, id: &str, owner: Option<&str>) -> Result<Folder, Error> {
        // Both are in the temporary directory, where everybody may put things.
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
            // Making it decides whose it is: another node may be about to do the same.
            match Self::create_in(root, &name, |path| is_of(path, owner), Some(owner)) {
                Err(error) if error.is_taken() => taken = Some(error),
                made => return made,
            }
        }
        Err(taken.expect("there is at least one name"))
    }

    /// Removes a folder that nobody waits for any more, unless an earlier look at the incident has left its verdict in it.
    pub fn give_up(&self) {
        if !self.path.join("verdict.json").exists() {
            // A collector that is started later finishes what is left.
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
            // A collector that was restarted in the middle of this incident goes on in its folder.
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
            // No room for anything: another place is needed. What was here before stays.
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
    /// When it cannot be written whole; then nothing of it is left, and an older file of that name stays.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        self.write_with(name, |file| file.write_all(bytes))
    }

    /// Writes a file piece by piece.
    ///
    /// # Errors
    /// As [`Folder::write`].
    pub fn write_with(&self, name: &str, pieces: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Error> {
        let temporary = format!(".{name}.new");
        // What a killed collector may have left.
        let _ = fs::remove_file(self.path.join(&temporary));
        self.write_new(&temporary, pieces)?;
        let to = self.path.join(name);
        fs::rename(self.path.join(&temporary), &to).map_err(Error::path("write", to))
    }

    /// Gives back the room that was set aside.
    pub fn release_reserve(&self) {
        // It is gone when this is done twice.
        let _ = fs::remove_file(self.path.join(RESERVE));
    }

    /// Makes `latest` beside the folder point to it, in one step.
    ///
    /// # Errors
    /// When the link cannot be made, for example because `latest` is a folder.
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

/// Machine, PID namespace and process: who has a folder in work.
pub(crate) fn own_stamp() -> &'static str {
    static STAMP: OnceLock<String> = OnceLock::new();
    STAMP.get_or_init(|| {
        let pid = std::process::id();
        let start = Stat::of(pid as i32).map_or(0, |stat| stat.start);
        format!("{} {pid}:{start}", process::home(Path::new("")))
    })
}

/// The names that a folder of this node may have.
pub fn own_names(id: &str) -> impl Iterator<Item = String> {
    let id = id.to_string();
    (1..=SAME_NAME).map(move |number| if number == 1 { id.clone() } else { format!("{id}-{number}") })
}

/// Whether a folder is one that [`Folder::create_own`] made for this owner.
#[must_use]
pub fn is_of(path: &Path, owner: &str) -> bool {
    is_own_folder(path) && fs::read(path.join(OWNER)).is_ok_and(|other| other == owner.as_bytes())
}

/// A folder of this user, not a link to one.
pub fn is_own_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|status| status.is_dir() && status.uid() == rustix::process::getuid().as_raw())
}

/// What follows `incident-` in the name of a folder.
#[must_use]
pub fn id(folder: &Path) -> String {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    name.strip_prefix("incident-").unwrap_or(&name).to_string()
}

/// The incident that a folder is of: `20261121T132019Z-0e0c1f66` of `incident-20261121T132019Z-0e0c1f66-node-a`.
#[must_use]
pub fn incident_of(folder: &Path) -> String {
    id(folder).splitn(3, '-').take(2).collect::<Vec<_>>().join("-")
}

/// Incident folders in one folder, oldest first. Where everybody may write, those of other users are left out: they may say what they
/// like, of any job.
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

/// As [`folders`], those that this user's collector may go on with: it writes into them, and acts on what they say.
#[must_use]
pub fn own_folders(root: &Path) -> Vec<PathBuf> {
    folders(root).into_iter().filter(|path| is_own_folder(path)).collect()
}

/// Name of the folder of an incident. The nodes of a job may share one file system, on which the cluster collector writes the
/// incident's own folder. Neither name leads elsewhere, whatever another machine calls itself or its incidents.
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn files_are_whole_or_not_there() {
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
        assert!(first.ends_with("incident-1-node") && is_of(&first, "a") && !is_of(&first, "b"));
        assert!(second.ends_with("incident-1-node-2") && is_of(&second, "b"));
        assert_eq!([make("a"), make("b")], [first.clone(), second], "who was restarted goes on in its folder");
        fs::remove_file(first.join(OWNER)).unwrap();
        assert!(make("a").ends_with("incident-1-node-3"), "a folder that does not say whose it is may be anybody's");
    }

    #[test]
    fn latest_follows_and_a_folder_of_that_name_is_left_alone() {
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
    fn a_path_that_cannot_be_written_is_replaced_and_named() {
        let temporary = tempfile::tempdir().unwrap();
        let file = temporary.path().join("file");
        fs::write(&file, "").unwrap();
        let fallback = temporary.path().join("own/timeline");
        let (folder, notice) = Folder::create(&file.join("below"), &fallback, "1").unwrap();
        assert_eq!(folder.path, fallback.join("incident-1"));
        assert!(notice.unwrap().to_string().contains("file/below"));
    }

    #[test]
    fn a_copy_goes_into_no_folder_that_others_have_prepared() {
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
        assert!(copy("3").unwrap_err().to_string().contains("others may write"));
        if rustix::process::getuid().is_root() {
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
    fn names_of_dumps() {
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
