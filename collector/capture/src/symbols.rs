//! Names and source lines of native frames. No thread is stopped any more when this runs.
//!
//! Names come first, for all frames: one pass over the symbol tables of each object finds all
//! addresses in it. Source lines and inlined functions come second, as far as the time permits.
//! Both are cached for the next capture. Objects are processed in parallel, and an object whose
//! file system hangs loses only its own names.

mod lines;
mod names;
mod units;

pub use names::demangle;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use crate::{
    objects::{bytes::Bytes, image::Image},
    pool::{self, PoolConfig},
    process::{RawCodeLocation, RawProcess},
    stacks::{CodeLocation, Function, Stacks},
};

use lines::{Lookup, Source};

/// Maximum number of objects to process at the same time.
const MAX_PARALLEL: usize = 8;
/// Maximum number of addresses in the cache, of all objects together: about 16 MB.
const MAX_CACHED_ADDRESSES: usize = 1 << 16;
/// Maximum number of objects remembered as changed. Images of changed files are not used again, so
/// forgetting one only loses a message.
const MAX_CHANGED: usize = 1024;
/// Objects that were not used in this number of captures are evicted first.
const RECENT_CAPTURES: u64 = 16;
/// Extra time after the deadline for lines, for objects that are being processed at the deadline.
const LINES_GRACE: Duration = Duration::from_millis(100);

/// Cache of names and lines.
#[derive(Default)]
pub(crate) struct Symbolizer {
    objects: HashMap<u64, CachedObject>,
    /// Objects whose files were modified during the search for names.
    changed: HashSet<u64>,
    /// Objects whose names the last capture did not find before its deadline.
    late: HashSet<u64>,
    captures: u64,
}

/// Cached names and lines of one object.
#[derive(Default)]
struct CachedObject {
    names: HashMap<u64, Option<Arc<str>>>,
    sources: HashMap<u64, Arc<[Function]>>,
    /// Whether the object has no line tables.
    without_lines: bool,
    used: u64,
}

/// An object, and its addresses that are not in the cache.
struct Object {
    image: Arc<Image>,
    /// Opened at most once, for names and lines.
    debug: OnceLock<Option<Bytes>>,
    names: Vec<u64>,
    lines: Vec<u64>,
}

impl Object {
    fn debug(&self) -> Option<&Bytes> {
        self.debug.get_or_init(|| self.image.debug_file()).as_ref()
    }

    fn has_changed(&self) -> bool {
        let debug = self.debug.get().and_then(Option::as_ref);
        self.image.has_changed() || debug.is_some_and(Bytes::has_missing_pages)
    }
}

impl Symbolizer {
    /// Finds the names of all frames of all processes, and the source lines of as many as possible.
    pub(crate) fn prepare(&mut self, processes: &[RawProcess], lines_budget: Duration, deadline: Instant) {
        self.captures += 1;
        let objects = self.missing(processes);
        self.find_names(&objects, deadline);
        if !lines_budget.is_zero() {
            let mut objects: Vec<_> = objects.iter().filter(|object| !object.lines.is_empty()).cloned().collect();
            // Start with the object that has the most addresses: if the time is short, it explains
            // the most.
            objects.sort_by_key(|object| (std::cmp::Reverse(object.lines.len()), object.image.id));
            self.find_lines(objects, deadline.min(Instant::now() + lines_budget));
        }
        self.forget_changed(&objects);
    }

    /// Drops the names of modified files. They stay unknown until the next capture opens the file
    /// again.
    fn forget_changed(&mut self, objects: &[Arc<Object>]) {
        for object in objects.iter().filter(|object| object.has_changed()) {
            let known = self.objects.entry(object.image.id).or_default();
            *known = CachedObject { without_lines: true, used: known.used, ..CachedObject::default() };
            known.names.extend(object.names.iter().map(|address| (*address, None)));
            self.changed.insert(object.image.id);
        }
    }

    fn missing(&mut self, processes: &[RawProcess]) -> Vec<Arc<Object>> {
        let mut seen: HashMap<u64, (&Arc<Image>, BTreeSet<u64>)> = HashMap::new();
        for place in processes.iter().flat_map(|process| &process.places) {
            if let Some(image) = &place.image {
                seen.entry(image.id).or_insert_with(|| (image, BTreeSet::new())).1.insert(place.address());
            }
        }
        let mut objects = Vec::new();
        for (id, (image, addresses)) in seen {
            let known = self.objects.entry(id).or_default();
            known.used = self.captures;
            let unknown = |is_known: &dyn Fn(&u64) -> bool| -> Vec<u64> {
                addresses.iter().copied().filter(|address| !is_known(address)).collect()
            };
            let names = unknown(&|address| known.names.contains_key(address));
            let lines = unknown(&|address| known.without_lines || known.sources.contains_key(address));
            if !names.is_empty() || !lines.is_empty() {
                objects.push(Arc::new(Object { image: Arc::clone(image), debug: OnceLock::new(), names, lines }));
            }
        }
        objects
    }

    fn find_names(&mut self, objects: &[Arc<Object>], deadline: Instant) {
        let jobs: Vec<Arc<Object>> = objects.iter().filter(|object| !object.names.is_empty()).cloned().collect();
        let (known, late) = (&mut self.objects, &mut self.late);
        *late = jobs.iter().map(|object| object.image.id).collect();
        let started = pool::run(
            jobs.clone(),
            &pool_config(),
            deadline,
            |object| {
                // A parser may panic if the file changes while it is read.
                let names = || names::find(&object.image, object.debug(), &object.names);
                catch_unwind(AssertUnwindSafe(names)).unwrap_or_else(|_| vec![None; object.names.len()])
            },
            |index, found| {
                let object = &jobs[index];
                let known = known.entry(object.image.id).or_default();
                known.names.extend(object.names.iter().copied().zip(found));
                late.remove(&object.image.id);
            },
        );
        if let Err(error) = started {
            tracing::warn!("cannot start a thread that looks up names: {error}");
        }
    }

    fn find_lines(&mut self, objects: Vec<Arc<Object>>, lines_deadline: Instant) {
        let jobs = objects.clone();
        let known = &mut self.objects;
        let started = pool::run(
            objects,
            &pool_config(),
            lines_deadline + LINES_GRACE,
            move |object| {
                let lines = || lines::find(&object.image, || object.debug(), &object.lines, lines_deadline);
                catch_unwind(AssertUnwindSafe(lines)).unwrap_or(Lookup::Absent)
            },
            |index, found| {
                let known = known.entry(jobs[index].image.id).or_default();
                match found {
                    Lookup::Absent => known.without_lines = true,
                    Lookup::Found(found) => {
                        known.sources.extend(found.into_iter().map(|(address, found)| (address, functions(found))));
                    }
                }
            },
        );
        if let Err(error) = started {
            tracing::warn!("cannot start a thread that looks up lines: {error}");
        }
    }

    /// Symbolizes the places of one process.
    pub(crate) fn symbolize(&self, process: RawProcess) -> Stacks {
        let RawProcess { pid, parent_pid, command, mut sample, python_entries, places, frames } = process;
        sample.errors.extend(self.missing_name_errors(&places));
        let mut modules = HashMap::new();
        let places = places.iter().map(|place| self.place(place, &mut modules)).collect();
        Stacks { pid, parent_pid, command, sample, python_entries, places, frames, children: Vec::new() }
    }

    /// Messages about objects whose functions have no names because their files changed or could
    /// not be read.
    fn missing_name_errors(&self, places: &[RawCodeLocation]) -> BTreeSet<String> {
        let unreadable = |path: &str| format!("{path} could not be read, so its functions have no names");
        let of = |place: &RawCodeLocation| match &place.image {
            Some(image) if self.changed.contains(&image.id) => {
                Some(format!("{} changed while it was read, so its functions have no names", image.path))
            }
            Some(_) if self.name_of(place).is_some() => None,
            Some(image) if self.late.contains(&image.id) => {
                Some(format!("{} was not searched in time, so its functions have no names", image.path))
            }
            Some(image) => image.has_unreadable_file.then(|| unreadable(&image.path)),
            None => place.path.starts_with('/').then(|| unreadable(&place.path)),
        };
        places.iter().filter_map(of).collect()
    }

    /// The name of a place by the symbols of its object.
    fn name_of(&self, place: &RawCodeLocation) -> Option<Arc<str>> {
        self.objects.get(&place.image.as_ref()?.id)?.names.get(&place.address())?.clone()
    }

    fn place<'a>(&self, raw: &'a RawCodeLocation, modules: &mut HashMap<&'a str, Arc<str>>) -> CodeLocation {
        let known = raw.image.as_ref().and_then(|image| self.objects.get(&image.id));
        let name = self.name_of(raw).or_else(|| raw.name.clone());
        let python = || raw.image.as_ref()?.known_python()?.name(raw.address());
        let name = name.or_else(|| python().map(Into::into));
        let sources = known.and_then(|known| known.sources.get(&raw.address())).map_or(&[][..], |sources| sources);
        let (name, sources) =
            if raw.frame.signal { (Some("<signal handler called>".into()), &[][..]) } else { (name, sources) };
        let module = raw.image.as_ref().map_or(raw.path.as_str(), |image| image.path.as_str());
        let module = module.strip_suffix(" (deleted)").unwrap_or(module);
        let mut functions = sources.to_vec();
        match (functions.last_mut(), name) {
            // The symbol table names the function that contains the code. Functions inlined into it
            // have no symbol.
            (Some(outermost), Some(name)) => outermost.name = name,
            (Some(_), None) => {}
            (None, name) => functions.push(Function { name: name.unwrap_or_else(|| "??".into()), line: None }),
        }
        CodeLocation {
            pc: raw.frame.pc,
            module: Arc::clone(modules.entry(module).or_insert_with(|| module.into())),
            module_address: raw.image.as_ref().map_or(0, |_| raw.frame.pc.wrapping_sub(raw.bias)),
            functions,
        }
    }

    /// Evicts objects that were not used for a long time.
    pub(crate) fn trim(&mut self) {
        if self.changed.len() > MAX_CHANGED {
            self.changed.clear();
        }
        let kept =
            |objects: &HashMap<u64, CachedObject>| -> usize { objects.values().map(|known| known.names.len()).sum() };
        if kept(&self.objects) <= MAX_CACHED_ADDRESSES {
            return;
        }
        let captures = self.captures;
        self.objects.retain(|_, known| known.used + RECENT_CAPTURES >= captures);
        if kept(&self.objects) > MAX_CACHED_ADDRESSES {
            self.objects.retain(|_, known| known.used == captures);
        }
        if kept(&self.objects) > MAX_CACHED_ADDRESSES {
            self.objects.clear();
        }
    }
}

/// Names of the functions of one object, without a cache.
#[cfg(feature = "fuzz")]
pub(crate) fn names_of(image: &Image, addresses: &[u64]) -> Vec<Option<Arc<str>>> {
    names::find(image, None, addresses)
}

/// The number of functions at each address of one object, without a cache.
#[cfg(feature = "fuzz")]
pub(crate) fn lines_of(image: &Image, addresses: &[u64], deadline: Instant) -> Vec<(u64, usize)> {
    match lines::find(image, || None, addresses, deadline) {
        Lookup::Absent => Vec::new(),
        Lookup::Found(found) => found.into_iter().map(|(address, functions)| (address, functions.len())).collect(),
    }
}

fn pool_config() -> PoolConfig {
    PoolConfig { name: "xpu_symbols", parallel: pool::cpus().min(MAX_PARALLEL), jobs_per_thread: usize::MAX }
}

fn functions(sources: Vec<Source>) -> Arc<[Function]> {
    let function = |source: Source| Function {
        name: source.function.map_or_else(|| "??".into(), Into::into),
        line: source.line.map(Into::into),
    };
    sources.into_iter().map(function).collect()
}
