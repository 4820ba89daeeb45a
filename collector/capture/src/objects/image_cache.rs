//! The objects that processes of this node have mapped: each is opened and parsed once, however many ranks map it.
//!
//! An object is known by device, inode, size and time of its file, or by what its memory holds when the file cannot be had.

use std::{
    collections::HashMap,
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

use crate::{error::Error, kernel::procfs::Mapping, memory::remote};

use super::{
    bytes::Bytes,
    image::Image,
    perf_map::PerfMap,
    rebuilt::Headers,
    target_files::{self, FileSystems, Source},
};

/// Images kept from one capture to the next.
const KEPT: usize = 1024;
/// Bytes kept of objects that are copies and not mapped files.
const KEPT_BYTES: usize = 64 << 20;
/// Unwind rows kept of all images together, of some 200 bytes each.
const KEPT_ROWS: usize = 1 << 16;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Key {
    File { device: u64, inode: u64, size: u64, modified_ns: i128 },
    Memory { hash: u64, size: usize },
}

impl Key {
    fn of_file(metadata: &Metadata) -> Self {
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
    /// What a process tells of the code that it made at run time; `None` when its `/tmp` does not answer.
    pub fn perf_map(&self, pid: i32) -> Option<PerfMap> {
        self.file_systems.ask((0, 0), Source::Temporary(pid), move || PerfMap::of(pid))
    }

    /// The object behind a mapping of a process; `first` finds the mapping of the object's first byte. Nothing is opened with a
    /// lock held, because a process in trouble can make that wait.
    pub fn get(
        &self,
        pid: i32,
        tid: i32,
        mapping: &Mapping,
        first: impl FnOnce() -> Option<Rc<Mapping>>,
    ) -> Option<Arc<Image>> {
        if mapping.path == "[vdso]" {
            let bytes = remote::read_exact(tid, mapping.start, (mapping.end - mapping.start) as usize).ok()?;
            let key = Key::Memory { hash: hash(&bytes), size: bytes.len() };
            return self.known_or(key, || Some(Image::parse(Bytes::Memory(bytes), "[vdso]", PathBuf::from("/"))));
        }
        if !mapping.path.starts_with('/') {
            return None;
        }
        let remote = self.file_systems.is_remote(pid, mapping.device);
        let wanted = mapping.clone();
        let found = self.ask(remote, mapping.device, Source::File, move || find(pid, &wanted));
        let (same, others) = match found {
            Some(Found::Same(file, key)) => (Some((file, key)), Vec::new()),
            Some(Found::Perhaps(files)) => (None, files),
            None => (None, Vec::new()),
        };
        let path = mapping.path.clone();
        let root = PathBuf::from(format!("/proc/{pid}/root"));
        let from_file = same.and_then(|(file, key)| {
            let (path, root) = (path.clone(), root.clone());
            self.known_or(key, || {
                self.ask(remote, mapping.device, Source::File, move || Image::of_file(&file, &path, root, remote))
            })
        });
        from_file.or_else(|| {
            let start = first()?.start;
            let headers = self.ask(remote, mapping.device, Source::Memory, move || Headers::read(tid, start))??;
            let key = hash(&(&headers.bytes, &path, mapping.device, mapping.inode));
            let key = Key::Memory { hash: key, size: headers.bytes.len() };
            self.known_or(key, || {
                let made = self.ask(remote, mapping.device, Source::Memory, move || headers.object());
                let made = Image::parse(Bytes::Memory(made?), &path, root.clone());
                // A file with the same build id has more than what is in memory.
                let id = made.as_ref().ok().and_then(|made| made.build_id.clone());
                let file = id.and_then(|id| {
                    let search = move || {
                        let files =
                            others.iter().filter_map(|file| Image::of_file(file, &path, root.clone(), remote).ok());
                        files.into_iter().find(|image| image.build_id.as_ref() == Some(&id))
                    };
                    self.ask(remote, mapping.device, Source::File, search)?
                });
                Some(file.map_or(made, Ok))
            })
        })
    }

    /// Does what may wait for a file system; `None` when that has not answered in time.
    fn ask<T: Send + 'static>(
        &self,
        remote: bool,
        device: (u32, u32),
        source: Source,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        if remote { self.file_systems.ask(device, source, work) } else { Some(work()) }
    }

    /// The image of that key; else what `parse` makes of it, which is remembered unless it is `None`.
    fn known_or(&self, key: Key, parse: impl FnOnce() -> Option<Result<Image, Error>>) -> Option<Arc<Image>> {
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        let is_stale = |image: &Option<Arc<Image>>| image.as_ref().is_some_and(|image| image.is_stale());
        let known = self.lock().get(&key).cloned();
        let image = match known {
            Some(image) if !is_stale(&image) => image,
            _ => {
                let image = parse()?.inspect_err(|error| tracing::debug!("{error}")).ok().map(Arc::new);
                // Two ranks may have parsed it at the same time; all keep the one that came first.
                let mut known = self.lock();
                known.retain(|other, image| *other != key || !is_stale(image));
                known.entry(key).or_insert(image).clone()
            }
        }?;
        image.used.store(now, Ordering::Relaxed);
        Some(image)
    }

    /// Forgets what has not been used for longest.
    pub fn trim(&self) {
        let mut known = self.lock();
        let sum = |of: fn(&Image) -> usize| known.values().flatten().map(|image| of(image)).sum::<usize>();
        if sum(Image::row_count) > KEPT_ROWS {
            // They are quickly found again.
            known.values().flatten().for_each(|image| image.forget_rows());
        }
        if known.len() <= KEPT && sum(Image::copied_bytes) <= KEPT_BYTES {
            return;
        }
        let mut used: Vec<u64> = known.values().flatten().map(|image| image.used.load(Ordering::Relaxed)).collect();
        used.sort_unstable();
        let limit = used.get(used.len() / 2).copied().unwrap_or(0);
        known.retain(|_, image| image.as_ref().is_some_and(|image| image.used.load(Ordering::Relaxed) >= limit));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Option<Arc<Image>>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The file behind a mapping, as far as it can be told.
enum Found {
    /// It is this one.
    Same(File, Key),
    /// Files at the same path, here or there, with another inode: layered file systems are not of one mind about inodes, and
    /// what was installed anew may be the same build.
    Perhaps(Vec<File>),
}

/// Opens exactly the file that is mapped, also when its path now names another one, or lies in another mount namespace.
fn find(pid: i32, mapping: &Mapping) -> Found {
    let exact = File::open(format!("/proc/{pid}/map_files/{:x}-{:x}", mapping.start, mapping.end));
    if let Some((file, metadata)) = exact.ok().and_then(with_metadata) {
        return Found::Same(file, Key::of_file(&metadata));
    }
    // Without the privilege for that, the path is all there is, and the inode says whether it is still the same file. The
    // inode of a deleted file may have been given to another one.
    let (path, deleted) = match mapping.path.strip_suffix(" (deleted)") {
        Some(path) => (path, true),
        None => (mapping.path.as_str(), false),
    };
    let mut others = Vec::new();
    for root in [Path::new(&format!("/proc/{pid}/root")), Path::new("/")] {
        let opened = target_files::open_within(root, Path::new(path)).and_then(with_metadata);
        let Some((file, metadata)) = opened else { continue };
        if !deleted && metadata.ino() == mapping.inode {
            return Found::Same(file, Key::of_file(&metadata));
        }
        others.push(file);
    }
    Found::Perhaps(others)
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
