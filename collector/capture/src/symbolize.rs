//! Names and source lines of native frames. Nothing is stopped any more when this runs.
//!
//! Names come first and for all frames: one pass over the symbol tables of each object finds all addresses that were seen in
//! it. Source lines and inlined functions come second, as far as the time goes. Both are kept for the next capture.

mod debug_file;
mod lines;
mod names;

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Instant,
};

use xpu_timer_proto::server::PstackFrame;

use crate::{
    ProcessCapture,
    image::Image,
    process::{PlacedFrame, RawProcess},
};

use lines::{Lines, Source};

/// Addresses of one object whose names are kept.
const KEPT_NAMES: usize = 1 << 16;
/// Objects whose names are kept.
const KEPT_OBJECTS: usize = 1024;

/// Names and lines known so far.
#[derive(Default)]
pub(crate) struct Symbolizer {
    objects: HashMap<u64, Known>,
    captures: u64,
}

/// What is known of one object.
#[derive(Default)]
struct Known {
    names: HashMap<u64, Option<Arc<str>>>,
    sources: HashMap<u64, Arc<[Source]>>,
    lines: Lines,
    used: u64,
}

impl Symbolizer {
    /// Finds the names of all frames of all processes, and the source lines of as many of them as possible.
    pub fn prepare(&mut self, processes: &[RawProcess], lines_deadline: Instant) {
        self.captures += 1;
        let mut seen: HashMap<u64, (Arc<Image>, BTreeSet<u64>)> = HashMap::new();
        for frame in processes.iter().flat_map(|process| &process.frames).flatten() {
            if let Some(image) = &frame.image {
                let (_, addresses) = seen.entry(image.id).or_insert_with(|| (Arc::clone(image), BTreeSet::new()));
                addresses.insert(address(frame));
            }
        }
        let mut seen: Vec<_> = seen.into_values().collect();
        for (image, addresses) in &seen {
            let known = self.objects.entry(image.id).or_default();
            known.used = self.captures;
            if known.names.len() > KEPT_NAMES {
                known.names.clear();
                known.sources.clear();
            }
            let missing: Vec<u64> =
                addresses.iter().copied().filter(|address| !known.names.contains_key(address)).collect();
            let found = names::find(image, &missing);
            known.names.extend(missing.into_iter().zip(found));
        }
        // The object with the most frames first: when the time is short, it goes where it explains most.
        seen.sort_by_key(|(image, addresses)| (std::cmp::Reverse(addresses.len()), image.id));
        for (image, addresses) in &seen {
            let known = self.objects.entry(image.id).or_default();
            for address in addresses {
                if Instant::now() >= lines_deadline {
                    break;
                }
                if !known.sources.contains_key(address)
                    && let Some(found) = known.lines.find(image, *address, lines_deadline)
                {
                    known.sources.insert(*address, found.into());
                }
            }
        }
    }

    /// Gives the frames of one process what was found.
    pub fn finish(&self, process: RawProcess) -> ProcessCapture {
        let RawProcess { pid, parent_pid, command, mut sample, python_entries, frames } = process;
        for (thread, frames) in sample.stacktrace.iter_mut().zip(frames) {
            for frame in &frames {
                self.expand(frame, &mut thread.frames);
            }
        }
        ProcessCapture { pid, parent_pid, command, sample, python_entries, children: Vec::new() }
    }

    /// Adds the functions that one frame stands for: those that were inlined, leaf first, and the one they were inlined into.
    fn expand(&self, placed: &PlacedFrame, frames: &mut Vec<PstackFrame>) {
        let known = placed.image.as_ref().and_then(|image| self.objects.get(&image.id));
        let name = known.and_then(|known| known.names.get(&address(placed))?.as_deref());
        let sources = known.and_then(|known| known.sources.get(&address(placed))).map_or(&[][..], |sources| sources);
        let module = placed.image.as_ref().map_or(placed.path.as_str(), |image| image.path.as_str());
        let module = module.strip_suffix(" (deleted)").unwrap_or(module);
        let module_address = placed.image.as_ref().map_or(0, |_| placed.frame.pc.wrapping_sub(placed.bias));
        let (name, sources) =
            if placed.frame.signal { (Some("<signal handler called>"), &[][..]) } else { (name, sources) };
        let count = sources.len().max(1);
        for index in 0..count {
            let source = sources.get(index);
            let inlined = index + 1 < count;
            // The symbol table names the function whose code this is; only what was inlined into it has no symbol.
            let from_source = source.and_then(|source| source.function.as_deref());
            let func_name = if inlined { from_source } else { name.or(from_source) }.unwrap_or("??").to_string();
            let line = source.and_then(|source| source.line.as_deref());
            let file_name = line.unwrap_or(if module.is_empty() { "??" } else { module }).to_string();
            let number = frames.len();
            let place = match line {
                Some(line) => format!(" at {line}"),
                None if module.is_empty() => String::new(),
                None => format!(" from {module}"),
            };
            let origin = if inlined {
                format!("#{number:<3} {func_name} (){place}")
            } else {
                format!("#{number:<3} {:#018x} in {func_name} (){place}", placed.frame.pc)
            };
            frames.push(PstackFrame {
                func_name,
                file_name,
                origin,
                pc: placed.frame.pc,
                module: module.to_string(),
                module_address,
                inlined,
            });
        }
    }

    /// Forgets what has not been used for long.
    pub fn trim(&mut self) {
        // Line tables take the most memory by far, and are quickly read again.
        let captures = self.captures;
        for known in self.objects.values_mut().filter(|known| known.used + 16 < captures) {
            known.lines = Lines::default();
        }
        if self.objects.len() > KEPT_OBJECTS {
            self.objects.retain(|_, known| known.used + 16 >= captures);
        }
    }
}

/// The address that the object's own tables use.
fn address(frame: &PlacedFrame) -> u64 {
    frame.frame.lookup().wrapping_sub(frame.bias)
}
