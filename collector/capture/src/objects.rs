//! The ELF objects that processes of this node map: programs, libraries, and their debug files.
//! Each object is opened and parsed once, however many ranks map it.
//!
//! The key of an object is the device, inode, size and time of its file, or a hash of its memory if
//! the file is not available.

pub(crate) mod bytes;
pub(crate) mod debug_file;
pub(crate) mod image;
mod mapped_file;
pub(crate) mod perf_map;
mod rebuilt;
pub(crate) mod target_files;
mod versions;

use std::{
    collections::{HashMap, HashSet},
    fs::{File, Metadata},
    hash::{DefaultHasher, Hash, Hasher},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    rc::Rc,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use xpu_timer_proto::{procfs::Mapping, server::Library};

use crate::{error::Error, memory};

use bytes::Bytes;
use image::Image;
use perf_map::PerfMap;
use rebuilt::Headers;
use target_files::{FileSystems, Source};

/// Maximum number of images that stay cached between captures.
const MAX_IMAGES: usize = 1024;
/// Maximum number of cached bytes of objects that are copies instead of mapped files.
const MAX_COPIED_BYTES: usize = 64 << 20;
/// Maximum number of cached unwind rows of all images together, of some 200 bytes each.
const MAX_CACHED_ROWS: usize = 1 << 16;
/// In place of the device of a file system that is not known.
const UNKNOWN_DEVICE: (u32, u32) = (0, 0);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Key {
    File { device: u64, inode: u64, size: u64, modified_ns: i128 },
    Memory { hash: u64, size: usize },
}

impl Key {
    fn from_file(metadata: &Metadata) -> Self {
        Key::File {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified_ns: i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec()),
        }
    }
}

/// All images known on this node.
#[derive(Default)]
pub(crate) struct Images {
    known: Mutex<HashMap<Key, Option<Arc<Image>>>>,
    clock: AtomicU64,
    file_systems: Arc<FileSystems>,
}

impl Images {
    /// The names of the code that a process generated at run time. `None` if its `/tmp` does not
    /// answer.
    pub(crate) fn perf_map(&self, pid: i32) -> Option<PerfMap> {
        self.file_systems.run_with_timeout(UNKNOWN_DEVICE, Source::Temporary(pid), move || PerfMap::of(pid))
    }

    /// The object behind a mapping of a process. `first` finds the mapping of the object's first
    /// byte. Nothing is opened while a lock is held, because a broken file system can block the
    /// open.
    pub(crate) fn get(
        &self,
        pid: i32,
        tid: i32,
        mapping: &Mapping,
        first: impl FnOnce() -> Option<Rc<Mapping>>,
    ) -> Option<Arc<Image>> {
        if mapping.path == "[vdso]" {
            let bytes = memory::read_exact(tid, mapping.start, (mapping.end - mapping.start) as usize).ok()?;
            let key = Key::Memory { hash: hash(&bytes), size: bytes.len() };
            return self.get_or_parse(key, || Some(Image::parse(Bytes::Memory(bytes), "[vdso]", PathBuf::from("/"))));
        }
        if !mapping.path.starts_with('/') {
            return None;
        }
        let remote = self.file_systems.is_remote(pid, mapping.device);
        let mapping_copy = mapping.clone();
        let found = self.run_with_timeout(remote, mapping.device, Source::File, move || find_file(pid, &mapping_copy));
        let (exact, candidates) = match found {
            Some(FileMatch::Exact(file, key)) => (Some((file, key)), Vec::new()),
            Some(FileMatch::Candidates(files)) => (None, files),
            None => (None, Vec::new()),
        };
        let file_exists = exact.is_some();
        let path = mapping.path.clone();
        let root = PathBuf::from(format!("/proc/{pid}/root"));
        let from_file = exact.and_then(|(file, key)| {
            let (path, root) = (path.clone(), root.clone());
            self.get_or_parse(key, || {
                self.run_with_timeout(remote, mapping.device, Source::File, move || {
                    Image::from_file(&file, &path, root, remote)
                })
            })
        });
        from_file.or_else(|| {
            let start = first()?.start;
            let headers =
                self.run_with_timeout(remote, mapping.device, Source::Memory, move || Headers::read(tid, start))??;
            let key = hash(&(&headers.bytes, &path, mapping.device, mapping.inode));
            let key = Key::Memory { hash: key, size: headers.bytes.len() };
            self.get_or_parse(key, || {
                let rebuilt = self.run_with_timeout(remote, mapping.device, Source::Memory, move || headers.rebuild());
                let rebuilt = Image::parse(Bytes::Memory(rebuilt?), &path, root.clone());
                let rebuilt = rebuilt.map(|mut image| {
                    image.has_unreadable_file = file_exists;
                    image
                });
                // A file with the same build id has more than the memory has.
                let id = rebuilt.as_ref().ok().and_then(|rebuilt| rebuilt.build_id.clone());
                let file = id.and_then(|id| {
                    let search = move || {
                        let files = candidates
                            .iter()
                            .filter_map(|file| Image::from_file(file, &path, root.clone(), remote).ok());
                        files.into_iter().find(|image| image.build_id.as_ref() == Some(&id))
                    };
                    self.run_with_timeout(remote, mapping.device, Source::File, search)?
                });
                Some(file.map_or(rebuilt, Ok))
            })
        })
    }

    /// The libraries among these objects, and among the packages of these Python files, whose
    /// versions known defects depend on. Nothing is read from the process itself.
    pub(crate) fn libraries<'a>(
        &self,
        pid: i32,
        objects: impl Iterator<Item = &'a Arc<Image>>,
        python_files: impl IntoIterator<Item = &'a str>,
    ) -> Vec<Library> {
        let mut seen = HashSet::new();
        let wanted = |image: &&Arc<Image>| seen.insert(image.id) && versions::is_wanted(image);
        let objects: Vec<Arc<Image>> = objects.filter(wanted).map(Arc::clone).collect();
        let torch = objects.iter().find_map(|image| versions::torch_file(&image.path));
        let torch = torch.or_else(|| python_files.into_iter().find_map(versions::torch_file));
        let remote = torch.is_some() || objects.iter().any(|image| image.is_remote());
        let work = move || versions::find(pid, &objects, torch.as_deref());
        self.run_with_timeout(remote, UNKNOWN_DEVICE, Source::Packages(pid), work).unwrap_or_default()
    }

    /// Does work that may wait for a file system. `None` if the file system does not answer in
    /// time.
    fn run_with_timeout<T: Send + 'static>(
        &self,
        remote: bool,
        device: (u32, u32),
        source: Source,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        if remote { self.file_systems.run_with_timeout(device, source, work) } else { Some(work()) }
    }

    /// The cached image of a key, or the result of `parse`. The result is cached unless it is
    /// `None`.
    fn get_or_parse(&self, key: Key, parse: impl FnOnce() -> Option<Result<Image, Error>>) -> Option<Arc<Image>> {
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        let is_stale = |image: &Option<Arc<Image>>| image.as_ref().is_some_and(|image| image.is_stale());
        let known = self.lock().get(&key).cloned();
        let image = match known {
            Some(image) if !is_stale(&image) => image,
            _ => {
                let image = parse()?.inspect_err(|error| tracing::debug!("{error}")).ok().map(Arc::new);
                // Two ranks may have parsed the image at the same time. All use the one that came
                // first.
                let mut known = self.lock();
                known.retain(|other, image| *other != key || !is_stale(image));
                known.entry(key).or_insert(image).clone()
            }
        }?;
        image.last_used.store(now, Ordering::Relaxed);
        Some(image)
    }

    /// Drops the images that were not used for the longest time.
    pub(crate) fn trim(&self) {
        let mut known = self.lock();
        let sum = |of: fn(&Image) -> usize| known.values().flatten().map(|image| of(image)).sum::<usize>();
        if sum(Image::row_count) > MAX_CACHED_ROWS {
            // Rows are quickly decoded again.
            known.values().flatten().for_each(|image| image.forget_rows());
        }
        if known.len() <= MAX_IMAGES && sum(Image::copied_bytes) <= MAX_COPIED_BYTES {
            return;
        }
        let mut last_used: Vec<u64> =
            known.values().flatten().map(|image| image.last_used.load(Ordering::Relaxed)).collect();
        last_used.sort_unstable();
        let limit = last_used.get(last_used.len() / 2).copied().unwrap_or(0);
        known.retain(|_, image| image.as_ref().is_some_and(|image| image.last_used.load(Ordering::Relaxed) >= limit));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Option<Arc<Image>>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The file behind a mapping, as far as it can be identified.
enum FileMatch {
    /// This is the mapped file.
    Exact(File, Key),
    /// Files at the same path, in the target's root or ours, with another inode. Layered file
    /// systems report different inodes for one file, and a reinstalled file may be the same build.
    Candidates(Vec<File>),
}

/// Opens exactly the file that is mapped, even if its path now names another file or is in another
/// mount namespace.
fn find_file(pid: i32, mapping: &Mapping) -> FileMatch {
    let exact = File::open(format!("/proc/{pid}/map_files/{:x}-{:x}", mapping.start, mapping.end));
    if let Some((file, metadata)) = exact.ok().and_then(with_metadata) {
        return FileMatch::Exact(file, Key::from_file(&metadata));
    }
    // Without the privilege for `map_files`, only the path is left. The inode shows whether it is
    // still the same file. The inode of a deleted file may have been reused.
    let (path, deleted) = match mapping.path.strip_suffix(" (deleted)") {
        Some(path) => (path, true),
        None => (mapping.path.as_str(), false),
    };
    let mut candidates = Vec::new();
    for root in [Path::new(&format!("/proc/{pid}/root")), Path::new("/")] {
        let opened = target_files::open_within(root, Path::new(path)).and_then(with_metadata);
        let Some((file, metadata)) = opened else { continue };
        if !deleted && metadata.ino() == mapping.inode {
            return FileMatch::Exact(file, Key::from_file(&metadata));
        }
        candidates.push(file);
    }
    FileMatch::Candidates(candidates)
}

fn with_metadata(file: File) -> Option<(File, Metadata)> {
    let metadata = file.metadata().ok()?;
    Some((file, metadata))
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
