//! Finds the dumps of a folder: the files, their ranks, and the latest of several incidents. Reads
//! the merged stacks of all ranks, if the folder has them. Writes files atomically.

use std::fs::{self, Permissions};
use std::io::{self, BufWriter, Read as _, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use xpu_timer_analysis::prefix_tree::PrefixTree;
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::lenient;
use xpu_timer_proto::printable::line;
use xpu_timer_proto::v1::{StackTree, StackTrees};

/// A `.stacktrace` file with a valid name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DumpFile {
    /// Rank, from the name.
    pub rank: u32,
    /// World size, from the name.
    pub world: u32,
    /// Its path.
    pub path: PathBuf,
}

/// The dumps in a folder.
#[derive(Debug, Default)]
pub struct Folder {
    /// The dumps, by rank.
    pub files: Vec<DumpFile>,
    /// Files that end in `.stacktrace` but whose name is not RANK-WORLD.
    pub misnamed: Vec<PathBuf>,
    /// The largest world size of any name.
    pub world: u32,
}

/// Parses rank and world size from a file name: `digits-digits.stacktrace`.
pub fn parse_name(name: &str) -> Option<(u32, u32)> {
    let (rank, world) = name.strip_suffix(".stacktrace")?.split_once('-')?;
    // `parse` alone accepts a leading plus sign.
    let number = |digits: &str| digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?;
    Some((number(rank)?, number(world)?))
}

impl Folder {
    /// Lists a folder.
    pub fn scan(path: &Path) -> io::Result<Folder> {
        let mut folder = Folder::default();
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            let name = entry.file_name();
            if !name.as_encoded_bytes().ends_with(b".stacktrace") {
                continue;
            }
            match name.to_str().and_then(parse_name) {
                Some((rank, world)) => {
                    folder.files.push(DumpFile { rank, world, path: path.join(&name) });
                }
                None => folder.misnamed.push(path.join(&name)),
            }
        }
        // The order of directory entries depends on the file system; the output must not.
        folder.files.sort_unstable();
        folder.misnamed.sort_unstable();
        folder.world = folder.files.iter().map(|file| file.world).max().unwrap_or(0);
        Ok(folder)
    }

    /// Warnings about the names, one sentence each.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let mixed: Vec<_> = self.files.iter().filter(|file| file.world != self.world).collect();
        if !mixed.is_empty() {
            let world = self.world;
            warnings.push(format!(
                "the dumps have different world sizes; labels use the largest, {world}: {}",
                names(&mixed)
            ));
        }
        let beyond: Vec<_> = self.files.iter().filter(|file| file.rank >= file.world).collect();
        if !beyond.is_empty() {
            warnings.push(format!("a rank that is not below its world size: {}", names(&beyond)));
        }
        // The files are sorted by rank.
        let same = self.files.chunk_by(|a, b| a.rank == b.rank).filter(|files| files.len() > 1);
        let same: Vec<_> = same.flatten().collect();
        if !same.is_empty() {
            warnings.push(format!("several files of one rank, which are merged: {}", names(&same)));
        }
        warnings
    }
}

/// Number of files that one warning names.
const NAMES_SHOWN: usize = 8;

fn names(files: &[&DumpFile]) -> String {
    let mut shown = files.iter().take(NAMES_SHOWN).map(|file| name_of(&file.path)).collect::<Vec<_>>().join(", ");
    if files.len() > NAMES_SHOWN {
        shown.push_str(&format!(" and {} more", files.len() - NAMES_SHOWN));
    }
    shown
}

/// Larger files are not read into memory; real dumps are far smaller.
const MAX_BYTES: u64 = 1 << 30;

/// Reads a regular file into a buffer, which is cleared first.
pub fn read_into(path: &Path, bytes: &mut Vec<u8>) -> io::Result<()> {
    bytes.clear();
    // Opening a pipe blocks until it has a writer.
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    if metadata.len() > MAX_BYTES {
        return Err(io::Error::other("it is larger than 1 GiB"));
    }
    // The file may grow while it is read.
    fs::File::open(path)?.take(MAX_BYTES).read_to_end(bytes).map(drop)
}

/// Reads a regular file.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    read_into(path, &mut bytes).map(|()| bytes)
}

/// The last component of a path, safe to print.
pub fn name_of(path: &Path) -> String {
    line(&path.file_name().unwrap_or(path.as_os_str()).to_string_lossy()).into_owned()
}

/// The `incident-…` folders in a folder, oldest first: their names begin with the time.
pub fn incidents(path: &Path) -> io::Result<Vec<PathBuf>> {
    let mut incidents = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(b"incident-") && entry.path().is_dir() {
            incidents.push(entry.path());
        }
    }
    incidents.sort_unstable();
    Ok(incidents)
}

/// The latest `incident-…` folder in a folder that contains no dumps itself, such as
/// `$XPU_TIMER_TIMELINE_PATH`.
///
/// The names begin with the time of the incident, so the last name is the latest incident. A folder
/// without dumps is skipped: the collector may still be writing it.
pub fn latest_incident(path: &Path) -> io::Result<Option<PathBuf>> {
    for incident in incidents(path)?.into_iter().rev() {
        if !Folder::scan(&incident)?.files.is_empty() {
            return Ok(Some(incident));
        }
    }
    Ok(None)
}

/// The stacks of all ranks of a large job as two trees, merged by the cluster collector. The folder
/// contains the dumps of only some of these ranks.
#[derive(Debug)]
pub struct MergedTrees {
    /// Native stacks.
    pub native: PrefixTree,
    /// Python stacks.
    pub python: PrefixTree,
    /// Number of ranks in the job.
    pub world: u32,
}

impl MergedTrees {
    /// Number of ranks that have a stack.
    #[must_use]
    pub fn ranks(&self) -> u64 {
        let roots = self.native.nodes().iter().filter(|node| node.parent.is_none());
        let mut ranks = RankSet::new();
        for root in roots {
            ranks.union_with(&root.ranks);
        }
        ranks.len()
    }
}

/// Reads `stacks.bin`, the trees of a folder. `None` if there are none or they are invalid; the
/// viewer then draws the dumps of the folder.
#[must_use]
pub fn merged_trees(folder: &Path) -> Option<MergedTrees> {
    let message = lenient::decode::<StackTrees>(&read(&folder.join("stacks.bin")).ok()?).ok()?;
    let tree = |message: Option<StackTree>| {
        let mut tree = PrefixTree::new();
        tree.merge_message(&message.unwrap_or_default()).ok().map(|()| tree)
    };
    Some(MergedTrees { native: tree(message.native)?, python: tree(message.python)?, world: message.world_size })
}

/// Writes a file under a temporary name and renames it, so that no reader sees a partial file.
/// Returns its path.
pub fn write_file(
    folder: &Path,
    name: &str,
    fill: impl FnOnce(&mut BufWriter<&mut fs::File>) -> io::Result<()>,
) -> io::Result<PathBuf> {
    let mut file = tempfile::Builder::new()
        .prefix(&format!(".{name}."))
        .suffix(".tmp")
        // The umask, which comes from XPU_TIMER_FILE_MODE, restricts this mode.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)?;
    let mut writer = BufWriter::with_capacity(1 << 16, file.as_file_mut());
    fill(&mut writer)?;
    writer.flush()?;
    drop(writer);
    let path = folder.join(name);
    file.persist(&path).map_err(|error| error.error)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use xpu_timer_proto::Message;

    #[test]
    fn names() {
        assert_eq!(parse_name("00006-00008.stacktrace"), Some((6, 8)));
        assert_eq!(parse_name("123456-200000.stacktrace"), Some((123_456, 200_000)));
        assert_eq!(parse_name("0-1.stacktrace"), Some((0, 1)));
        assert_eq!(parse_name("00000000000000000001-2.stacktrace"), Some((1, 2)));
        for bad in [
            "00006_00008.stacktrace",
            "-8.stacktrace",
            "6-.stacktrace",
            "6.stacktrace",
            "+6-8.stacktrace",
            "6-8-9.stacktrace",
            "a6-8.stacktrace",
            "6-8.stacktrace.tmp",
            "4294967296-8.stacktrace",
            "٣-8.stacktrace",
            ".stacktrace",
        ] {
            assert_eq!(parse_name(bad), None, "{bad}");
        }
    }

    #[test]
    fn too_large_and_irregular_files_are_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0-1.stacktrace");
        let file = fs::File::create(&path).unwrap();
        file.set_len(MAX_BYTES * 1024).unwrap();
        // The file is sparse, and reading a terabyte of zeros would take too long for a test.
        assert!(read(&path).unwrap_err().to_string().contains("1 GiB"));
        assert!(read(dir.path()).unwrap_err().to_string().contains("regular"));
        file.set_len(3).unwrap();
        assert_eq!(read(&path).unwrap(), [0; 3]);
    }

    fn folder(names: &[&str]) -> Folder {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            fs::write(dir.path().join(name), "").unwrap();
        }
        Folder::scan(dir.path()).unwrap()
    }

    #[test]
    fn warnings_name_unusual_folders() {
        assert_eq!(folder(&["0-2.stacktrace", "1-2.stacktrace", "readme"]).warnings(), Vec::<String>::new());
        let mixed = folder(&["0-2.stacktrace", "1-4.stacktrace", "9-4.stacktrace", "x.stacktrace"]);
        assert_eq!(mixed.world, 4);
        assert_eq!(name_of(&mixed.misnamed[0]), "x.stacktrace");
        let warnings = mixed.warnings();
        assert!(
            warnings[0].contains("different world sizes") && warnings[0].contains("0-2.stacktrace"),
            "{warnings:?}"
        );
        assert!(
            warnings[1].contains("not below its world size") && warnings[1].ends_with("9-4.stacktrace"),
            "{warnings:?}"
        );
        assert_eq!(warnings.len(), 2);
        let twice = folder(&["0-2.stacktrace", "00-2.stacktrace"]).warnings();
        assert!(twice[0].contains("several files of one rank"), "{twice:?}");
    }

    #[test]
    fn the_latest_incident_with_a_dump_is_chosen() {
        let dir = tempfile::tempdir().unwrap();
        for name in
            ["incident-20260101T000000Z-1", "incident-20261121T101500Z-3", "incident-20261121T101800Z-4", "other"]
        {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        assert_eq!(latest_incident(dir.path()).unwrap(), None);
        for name in ["incident-20260101T000000Z-1", "incident-20261121T101500Z-3", "other"] {
            fs::write(dir.path().join(name).join("0-1.stacktrace"), "").unwrap();
        }
        let latest = latest_incident(dir.path()).unwrap().unwrap();
        assert_eq!(name_of(&latest), "incident-20261121T101500Z-3");
    }

    #[test]
    fn trees_of_all_ranks_are_read_and_other_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        assert!(merged_trees(folder.path()).is_none());
        let mut tree = PrefixTree::new();
        for rank in [0, 1, 7] {
            tree.insert(["main@a:1", "wait@b:2"], rank);
        }
        let message = StackTrees { world_size: 9, native: Some(tree.to_message()), python: None };
        fs::write(folder.path().join("stacks.bin"), message.encode_to_vec()).unwrap();
        let trees = merged_trees(folder.path()).unwrap();
        assert_eq!((trees.world, trees.ranks(), trees.python.nodes().len()), (9, 3, 0));
        fs::write(folder.path().join("stacks.bin"), [0xff; 9]).unwrap();
        assert!(merged_trees(folder.path()).is_none());
    }

    #[test]
    fn a_failure_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        write_file(dir.path(), "x", |out| out.write_all(b"old")).unwrap();
        write_file(dir.path(), "x", |out| {
            out.write_all(b"half")?;
            Err(io::Error::other("disk full"))
        })
        .unwrap_err();
        assert_eq!(fs::read(dir.path().join("x")).unwrap(), b"old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        write_file(dir.path(), "x", |out| out.write_all(b"new")).unwrap();
        assert_eq!(fs::read(dir.path().join("x")).unwrap(), b"new");
        let mode = fs::metadata(dir.path().join("x")).unwrap().permissions().mode();
        assert_eq!(mode & 0o400, 0o400);
        assert_eq!(mode & 0o111, 0);
    }
}
