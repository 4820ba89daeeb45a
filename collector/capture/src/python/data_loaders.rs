//! Counts the batches that PyTorch's data loaders have yielded. The counts are numbers in the
//! memory of the process, so reading them runs nothing in it and stops nothing.
//!
//! No list of the iterators of data loaders exists. A search starts from the frames of all threads:
//! from their variables, through suspended generators, and a few steps through objects,
//! dictionaries and lists. The program runs during the search, so a step counts only if it leads to
//! a living object of a class with a name.

use std::collections::{HashMap, HashSet};

use crate::{
    cpython::layout::Layout,
    memory::snapshot::{ReadError, Snapshot},
};

use super::{
    builtins::{attribute_values, attributes, number, pairs_of_small},
    frames,
    threads::Interpreter,
};

/// End of the class name of a base of PyTorch's iterators and of those derived from them elsewhere.
const ITERATOR: &[u8] = b"BaseDataLoaderIter";
/// The attribute with the number of batches, and the one with a random number that distinguishes
/// iterators at the same address.
const YIELDED: &str = "_num_yielded";
const SEED: &str = "_base_seed";
/// Maximum number of objects in one search, and of steps from a frame.
const MOST_OBJECTS: usize = 4000;
const STEPS: usize = 6;
/// Maximum number of variables of one frame to follow.
const VARIABLES: u64 = 192;
/// Number of words after the header of a wrapper that may refer to another iterator. Some of them
/// are numbers.
const WRAPPER_WORDS: u64 = 3;
/// A list or dictionary with more entries is a model or a data set and is not followed. It is also
/// the maximum number of attributes of an object to follow.
const MOST_HELD: u64 = 96;
/// Maximum number of cached classes, of classes in a chain of bases, and of bytes of a name.
const MOST_CLASSES: usize = 1 << 14;
const MOST_BASES: usize = 16;
const NAME: usize = 48;
/// Lower addresses are numbers and marks instead of objects.
const LOWEST: u64 = 1 << 16;

/// The iterators of a process's data loaders that were found, and the number of their batches.
#[derive(Debug, Default)]
pub(super) struct Loaders {
    /// Last count of each iterator, by its address.
    known: HashMap<u64, Count>,
    /// Whether an iterator was ever found.
    found: bool,
    yielded: u64,
    classes: Classes,
}

/// The fields of an iterator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Count {
    yielded: u64,
    seed: Option<u64>,
}

/// Kinds of classes by their addresses.
type Classes = HashMap<u64, Kind>;

/// How to follow an object of a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Iterator,
    Generator,
    List,
    Tuple,
    Dict,
    /// An iterator written in C that contains other iterators.
    Wrapper,
    /// An object whose attributes may lead to an iterator.
    Object,
    Other,
}

impl Loaders {
    /// The number of batches of all iterators that were found. `None` if there was none.
    pub fn yielded(&self) -> Option<u64> {
        self.found.then_some(self.yielded)
    }

    /// Reads the known iterators. Forgets those that were freed or have become something else.
    pub fn look(&mut self, tid: i32, layout: &Layout) {
        let memory = &mut Snapshot::new(tid);
        let (classes, yielded) = (&mut self.classes, &mut self.yielded);
        self.known.retain(|address, last| {
            let count = (kind(memory, layout, classes, *address) == Some(Kind::Iterator))
                .then(|| count(memory, layout, *address))
                .flatten();
            let Some(count) = count else { return false };
            // For the next epoch, an iterator starts again at 0. A new iterator may have the
            // address of an old one.
            let before = if count.seed == last.seed { last.yielded } else { 0 };
            *yielded += count.yielded.checked_sub(before).unwrap_or(count.yielded);
            *last = count;
            true
        });
    }

    /// Searches for unknown iterators.
    pub fn search(&mut self, tid: i32, layout: &Layout, interpreters: &[Interpreter]) {
        let memory = &mut Snapshot::new(tid);
        let threads = interpreters.iter().flat_map(|interpreter| &interpreter.threads);
        frames::fetch(memory, layout, threads.clone());
        let mut level: Vec<u64> = Vec::new();
        for thread in threads {
            let chain = frames::chain(memory, layout, thread);
            for frame in chain.frames.iter().rev() {
                variables(memory, layout, frame.address, &mut level);
            }
        }
        let mut seen: HashSet<u64> = HashSet::new();
        for _ in 0..STEPS {
            level.retain(|object| seen.len() < MOST_OBJECTS && *object >= LOWEST && seen.insert(*object));
            memory.fetch(level.iter().map(|object| (*object, layout.object_size)));
            let mut next = Vec::new();
            for object in level {
                match kind(memory, layout, &mut self.classes, object) {
                    Some(Kind::Iterator) if !self.known.contains_key(&object) => {
                        if let Some(count) = count(memory, layout, object) {
                            self.known.insert(object, count);
                            self.yielded += count.yielded;
                            self.found = true;
                        }
                    }
                    Some(kind) => held(memory, layout, kind, object, &mut next),
                    None => {}
                }
            }
            level = next;
        }
    }
}

fn count(memory: &mut Snapshot, layout: &Layout, iterator: u64) -> Option<Count> {
    let [yielded, seed] = attributes(memory, layout, iterator, [YIELDED, SEED]).ok()?;
    let seed = seed.and_then(|seed| number(memory, layout, seed));
    Some(Count { yielded: number(memory, layout, yielded?)?, seed })
}

/// The objects that the variables of a frame refer to. From 3.14 on, the lowest bits of a reference
/// encode its ownership.
fn variables(memory: &mut Snapshot, layout: &Layout, frame: u64, found: &mut Vec<u64>) {
    let words = match layout.code_bytes {
        Some(_) => VARIABLES,
        // Up to 3.10 a frame is an object that has the number of its variables.
        None => memory.read_u64("a frame", frame.wrapping_add(layout.bytes_length)).unwrap_or(0).min(VARIABLES),
    };
    for index in 0..words {
        // The memory after the last frame may end before the maximum number of variables.
        let Ok(word) = memory.read_u64("a frame", frame.wrapping_add(layout.frame_locals + index * 8)) else { return };
        found.push(word & !7);
    }
}

/// The objects that an object refers to.
fn held(memory: &mut Snapshot, layout: &Layout, kind: Kind, object: u64, found: &mut Vec<u64>) {
    const LIST: &str = "a list";
    match kind {
        Kind::List | Kind::Tuple => {
            let first = match kind {
                Kind::List => memory.read_u64(LIST, object.wrapping_add(layout.list_items)).unwrap_or(0),
                _ => object.wrapping_add(layout.tuple_items),
            };
            let length = memory.read_u64(LIST, object.wrapping_add(layout.bytes_length)).unwrap_or(0);
            if length <= MOST_HELD {
                found.extend((0..length).map_while(|index| memory.read_u64(LIST, first.wrapping_add(index * 8)).ok()));
            }
        }
        Kind::Wrapper => {
            let words = (0..WRAPPER_WORDS).map(|index| object.wrapping_add(layout.object_size + index * 8));
            found.extend(words.filter_map(|address| memory.read_u64("an iterator", address).ok()));
        }
        Kind::Dict => {
            let pairs = pairs_of_small(memory, layout, object, MOST_HELD).unwrap_or_default();
            found.extend(pairs.into_iter().map(|(_, value)| value));
        }
        Kind::Object => {
            found.extend(attribute_values(memory, layout, object, MOST_HELD).unwrap_or_default());
        }
        Kind::Generator => {
            let frame = object.wrapping_add(layout.generator_frame);
            let frame = if layout.code_bytes.is_some() { Ok(frame) } else { memory.read_u64("a generator", frame) };
            if let Ok(frame) = frame {
                variables(memory, layout, frame, found);
            }
        }
        Kind::Iterator | Kind::Other => {}
    }
}

/// The kind of an object. `None` if there is no living object at the address.
fn kind(memory: &mut Snapshot, layout: &Layout, classes: &mut Classes, object: u64) -> Option<Kind> {
    // Python clears the reference count of an object that it frees, and little else.
    let alive = memory.read_u32("an object", object).ok()? != 0;
    let class = memory.read_u64("an object", object.wrapping_add(layout.object_type)).ok()?;
    if !alive || class < LOWEST || class % 8 != 0 {
        return None;
    }
    if let Some(kind) = classes.get(&class) {
        return Some(*kind);
    }
    let kind = kind_of_class(memory, layout, class).ok()?;
    if classes.len() >= MOST_CLASSES {
        classes.clear();
    }
    classes.insert(class, kind);
    Some(kind)
}

fn kind_of_class(memory: &mut Snapshot, layout: &Layout, class: u64) -> Result<Kind, ReadError> {
    const CLASS: &str = "a class";
    let mut found = Kind::Object;
    let mut one = class;
    for _ in 0..MOST_BASES {
        if one == 0 {
            return Ok(found);
        }
        let name = memory.read_u64(CLASS, one.wrapping_add(layout.type_name))?;
        let mut text = Vec::with_capacity(NAME);
        while text.len() < NAME {
            match memory.read_u8(CLASS, name.wrapping_add(text.len() as u64))? {
                0 => break,
                byte => text.push(byte),
            }
        }
        match &text[..] {
            name if name.ends_with(ITERATOR) => return Ok(Kind::Iterator),
            b"generator" => return Ok(Kind::Generator),
            b"list" => return Ok(Kind::List),
            b"tuple" => return Ok(Kind::Tuple),
            b"dict" => return Ok(Kind::Dict),
            b"enumerate" | b"zip" | b"map" | b"filter" | b"itertools.islice" | b"itertools.chain" => {
                return Ok(Kind::Wrapper);
            }
            // The parts of a model or a program refer to almost everything.
            b"Module" | b"TensorBase" | b"Tensor" | b"Optimizer" | b"Dataset" | b"module" | b"type" | b"function"
            | b"code" | b"method" => found = Kind::Other,
            _ => {}
        }
        one = memory.read_u64(CLASS, one.wrapping_add(layout.type_base))?;
    }
    Err(ReadError { what: "the bases of a class", address: class })
}
