//! Archives of many small files: the corpora of the fuzzer and the recorded evidence of the hangs.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufReader, Read, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use zip::{CompressionMethod, DateTime, ZipArchive, ZipWriter, write::SimpleFileOptions};

use crate::tools::tree;

/// Reads the files of an archive, by name.
///
/// # Errors
/// When the archive cannot be read.
pub fn read_archive(path: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let read = || -> Result<_> {
        let mut archive = ZipArchive::new(BufReader::new(File::open(path)?))?;
        let mut files = BTreeMap::new();
        for index in 0..archive.len() {
            let mut file = archive.by_index(index)?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            let name = file.name()?.into_owned();
            files.insert(name, bytes);
        }
        Ok(files)
    };
    read().with_context(|| path.display().to_string())
}

/// Writes an archive. Equal files make equal archives.
///
/// # Errors
/// When the archive cannot be written.
pub fn write_archive(path: &Path, files: &BTreeMap<String, Vec<u8>>) -> Result<()> {
    let write = || -> Result<()> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let temporary = path.with_extension("new");
        let mut archive = ZipWriter::new(File::create(&temporary)?);
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Deflated)
            .compression_level(Some(9))
            .last_modified_time(DateTime::default());
        for (name, bytes) in files {
            archive.start_file(name.as_str(), options)?;
            archive.write_all(bytes)?;
        }
        archive.finish()?;
        Ok(fs::rename(&temporary, path)?)
    };
    write().with_context(|| path.display().to_string())
}

/// The archive with the kept inputs of all fuzz targets, in a folder each.
fn fuzz_corpora() -> PathBuf {
    tree().join("tests/fuzz/corpora.zip")
}

/// The kept inputs of a fuzz target, by name. A new target has none.
///
/// # Errors
/// When the archive cannot be read.
pub fn fuzz_corpus(target: &str) -> Result<BTreeMap<String, Vec<u8>>> {
    let of_target = |(name, bytes): (String, _)| Some((name.strip_prefix(target)?.strip_prefix('/')?.into(), bytes));
    Ok(read_archive(&fuzz_corpora())?.into_iter().filter_map(of_target).collect())
}

/// Replaces the kept inputs of a fuzz target.
///
/// # Errors
/// When the archive cannot be read or written.
pub fn keep_fuzz_corpus(target: &str, inputs: BTreeMap<String, Vec<u8>>) -> Result<()> {
    let path = fuzz_corpora();
    let folder = format!("{target}/");
    let mut files = read_archive(&path)?;
    files.retain(|name, _| !name.starts_with(&folder));
    files.extend(inputs.into_iter().map(|(name, bytes)| (folder.clone() + &name, bytes)));
    write_archive(&path, &files)
}

/// The dumps of the real hang in `tests/fixtures/rank6.zip`, by name.
///
/// # Errors
/// When the archive cannot be read.
pub fn rank6_dumps() -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = read_archive(&tree().join("tests/fixtures/rank6.zip"))?;
    files.retain(|name, _| name.ends_with(".stacktrace"));
    Ok(files)
}

/// Writes files into a folder that exists, in their order.
///
/// # Errors
/// When a file cannot be written.
pub fn write_files<'f>(folder: &Path, files: impl IntoIterator<Item = (&'f String, &'f Vec<u8>)>) -> Result<()> {
    for (name, bytes) in files {
        let path = folder.join(name);
        fs::write(&path, bytes).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_holds_its_files_and_equal_files_make_equal_archives() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let files = BTreeMap::from([("one".into(), b"1".to_vec()), ("two".into(), vec![0; 100_000])]);
        let paths = ["a.zip", "b.zip"].map(|name| folder.path().join(name));
        for path in &paths {
            write_archive(path, &files).expect("the archive is written");
        }
        assert_eq!(read_archive(&paths[0]).expect("the archive is read"), files);
        let [one, other] = paths.map(|path| fs::read(path).expect("the archive is there"));
        assert!(one == other && one.len() < 1000, "{} bytes", one.len());
        fs::write(folder.path().join("c.zip"), &one[..50]).expect("a cut archive");
        let error = read_archive(&folder.path().join("c.zip")).expect_err("a truncated archive cannot be read");
        assert!(format!("{error:#}").contains("c.zip"), "{error:#}");
    }
}
