//! The folder of a timeline on disk: `timeline-<UTC>-<id>` with one `.ops` file for each rank, and
//! a `.samples` file if its stacks were sampled. It gets its name when all files are written, so a
//! reader never sees a part of it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use xpu_timer_proto::{samples, timeline, v1::TimelineFile};

use crate::{
    error::Error,
    os::{
        clock::{self, Now},
        safe_path::create_directories,
    },
};

/// Prefix of the folders.
pub(crate) const PREFIX: &str = "timeline-";
/// Prefix of the name while files are written.
pub(crate) const UNFINISHED: &str = ".new-timeline-";

/// The result of writing.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Written {
    /// The folder.
    pub path: PathBuf,
    /// Number of files.
    pub ranks: u64,
    /// Number of operations in them.
    pub operations: u64,
    /// Operations that are missing. Should be 0.
    pub lost: u64,
    /// The parts that could not be written, and why.
    pub problems: Vec<String>,
}

/// Writes the files that arrive in chunks into a new folder of `root`.
///
/// # Errors
/// If the folder or a file cannot be written. Then nothing remains.
pub(crate) fn write(root: &Path, chunks: impl Iterator<Item = TimelineFile>) -> Result<Written, Error> {
    create_directories(root)?;
    let now = Now::get();
    let name = format!("{}-{:08x}", clock::compact(now.unix_ns), now.unix_ns % 1_000_000_000);
    let (path, unfinished) = (root.join(format!("{PREFIX}{name}")), root.join(format!("{UNFINISHED}{name}")));
    fs::create_dir(&unfinished).map_err(Error::path("create", &unfinished))?;
    let written = fill(&unfinished, chunks)
        .and_then(|written| fs::rename(&unfinished, &path).map(|()| written).map_err(Error::path("create", &path)));
    if written.is_err() {
        // The retention removes what is left.
        let _ = fs::remove_dir_all(&unfinished);
    }
    written.map(|written| Written { path, ..written })
}

fn fill(folder: &Path, chunks: impl Iterator<Item = TimelineFile>) -> Result<Written, Error> {
    let mut written = Written::default();
    let mut open: BTreeMap<String, File> = BTreeMap::new();
    let (mut is_complete, mut ranks) = (false, BTreeSet::new());
    for chunk in chunks {
        if !chunk.problem.is_empty() {
            written.problems.push(chunk.problem.clone());
        }
        if chunk.name.is_empty() {
            is_complete |= chunk.problem.is_empty();
            continue;
        }
        if !is_file_name(&chunk.name) {
            written.problems.push(format!("{:?} is not the name of a timeline", chunk.name));
            continue;
        }
        let path = folder.join(&chunk.name);
        let file = match open.remove(&chunk.name) {
            Some(file) => Ok(file),
            None => File::options().write(true).create_new(true).custom_flags(libc::O_NOFOLLOW).open(&path),
        };
        let append = |mut file: File| file.write_all(&chunk.data).map(|()| file);
        let file = file.and_then(append).map_err(Error::path("write", &path))?;
        if !chunk.last {
            open.insert(chunk.name, file);
            continue;
        }
        // A network file system may report a full disk only here.
        nix::unistd::close(file).map_err(|error| Error::path("write", &path)(io::Error::from(error)))?;
        // A rank may have operations and samples.
        let is_first = ranks.insert(timeline::rank_of_file(&path));
        written.ranks += u64::from(is_first);
        written.operations += chunk.operations;
        written.lost += chunk.lost;
    }
    for name in open.into_keys() {
        let _ = fs::remove_file(folder.join(&name));
        written.problems.push(format!("{name} was cut off"));
    }
    if !is_complete {
        written.problems.push("the timeline was cut off: ranks may be missing".into());
    }
    Ok(written)
}

/// Whether this is the name of a file that we would choose ourselves.
fn is_file_name(name: &str) -> bool {
    timeline::rank_of_file(Path::new(name)).is_some_and(|(rank, world)| {
        timeline::file_name(rank, world) == name || samples::file_name(rank, world) == name
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(name: &str, data: &[u8], last: bool) -> TimelineFile {
        let operations = if last { 5 } else { 0 };
        TimelineFile { name: name.into(), data: data.into(), last, operations, ..Default::default() }
    }

    #[test]
    fn interleaved_chunks_become_files() {
        let root = tempfile::tempdir().unwrap();
        let chunks = [
            chunk("00000-00002.ops", b"a", false),
            chunk("00001-00002.ops", b"c", true),
            chunk("00000-00002.ops", b"b", true),
            TimelineFile { operations: 0, ..chunk("00000-00002.samples", b"s", true) },
            TimelineFile::default(),
        ];
        let written = write(root.path(), chunks.into_iter()).unwrap();
        assert_eq!((written.ranks, written.operations, written.problems), (2, 10, vec![]));
        assert_eq!(fs::read(written.path.join("00000-00002.ops")).unwrap(), b"ab");
        assert_eq!(fs::read(written.path.join("00000-00002.samples")).unwrap(), b"s");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn what_is_cut_off_or_has_a_strange_name_is_reported() {
        let root = tempfile::tempdir().unwrap();
        let chunks = [
            chunk("00000-00002.ops", b"a", false),
            chunk("../00001-00002.ops", b"x", true),
            chunk("/tmp/00001-00002.ops", b"x", true),
            chunk("1-2.ops", b"x", true),
            TimelineFile { problem: "node b is gone".into(), ..Default::default() },
        ];
        let written = write(root.path(), chunks.into_iter()).unwrap();
        assert_eq!((written.ranks, written.problems.len()), (0, 6), "{:?}", written.problems);
        assert_eq!(fs::read_dir(&written.path).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_an_error_and_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let same = chunk("00000-00002.ops", b"a", true);
        let error = write(root.path(), [same.clone(), same].into_iter()).unwrap_err();
        assert!(error.to_string().contains("00000-00002.ops"), "{error}");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
