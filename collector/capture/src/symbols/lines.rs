//! Source lines and inlined functions, found by addr2line in the DWARF of an object or of its
//! separate debug file. Builds with `-gsplit-dwarf` have it in a `.dwo` file for each unit, or in
//! one `.dwp` package beside the object.
//!
//! addr2line sees only the units that contain wanted addresses ([`Units`]). The lookup may need
//! more: entries of other units, or files of split builds. Then the lookup is repeated with these
//! added.

use std::{
    cell::RefCell,
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use addr2line::{Context, LookupContinuation, LookupResult, SplitDwarfLoad};
use gimli::{Dwarf, DwarfPackageSections, DwarfSections, DwoId, EndianSlice, LittleEndian, Section, SectionId};
use object::{Object, ObjectSection, read::elf::ElfFile64};

use super::{
    names,
    units::{self, Units},
};
use crate::objects::{
    bytes::{Budget, Bytes, Elf, SectionBytes, Slice},
    debug_file,
    image::Image,
    target_files,
};

/// Minimum decompression speed, in bytes per second.
const INFLATED_PER_SECOND: u64 = 200 << 20;
/// Maximum number of bytes to decompress for one object and its supplementary file, however much
/// time is left.
const MAX_DECOMPRESSED: u64 = 1 << 30;
/// Maximum number of lookups, each with more units. Link-time optimization creates units that refer
/// to many others.
const MAX_ROUNDS: usize = 32;
/// A larger supplementary file is not used, because all of its units would be read.
const MAX_SUPPLEMENTARY: usize = 16 << 20;
/// The sections with lines and function names.
const SECTIONS: [SectionId; 10] = [
    SectionId::DebugAbbrev,
    SectionId::DebugAddr,
    SectionId::DebugAranges,
    SectionId::DebugInfo,
    SectionId::DebugLine,
    SectionId::DebugLineStr,
    SectionId::DebugRanges,
    SectionId::DebugRngLists,
    SectionId::DebugStr,
    SectionId::DebugStrOffsets,
];

/// One function at an address, and its line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Source {
    pub function: Option<String>,
    /// `path:line`.
    pub line: Option<String>,
}

/// Result of the search for lines in one object.
pub(super) enum Lookup {
    /// The object has no lines.
    Absent,
    /// The functions at each address that was looked up in time.
    Found(Vec<(u64, Vec<Source>)>),
}

/// Finds the lines of the sorted addresses until the deadline.
pub(super) fn find<'a>(
    image: &'a Image,
    debug: impl FnOnce() -> Option<&'a Bytes>,
    addresses: &[u64],
    deadline: Instant,
) -> Lookup {
    let own = image.elf().filter(has_lines);
    let elf = own.or_else(|| ElfFile64::<object::LittleEndian>::parse(&**debug()?).ok().filter(has_lines));
    let Some(elf) = elf else { return Lookup::Absent };
    if time_to_inflate(&elf) > deadline.saturating_duration_since(Instant::now()) {
        return Lookup::Found(Vec::new());
    }
    let budget = Budget::new(MAX_DECOMPRESSED);
    let sections = sections(&elf, &budget);
    let supplementary = debug_file::supplementary(&image.root, &elf).and_then(|bytes| {
        let elf = ElfFile64::<object::LittleEndian>::parse(&*bytes).ok()?;
        let sections = self::sections(&elf, &budget);
        let dwarf = borrow(&sections, &bytes);
        let is_bounded = dwarf.debug_info.reader().len() <= MAX_SUPPLEMENTARY && all_can_be_opened(&dwarf);
        drop(dwarf);
        is_bounded.then_some((bytes, sections))
    });
    let mut search = Search {
        sections: &sections,
        file: elf.data(),
        supplementary: supplementary.as_ref().map(|(bytes, sections)| (&**bytes, sections)),
        split: SplitFiles::new(image, deadline),
        deadline,
        found: Vec::with_capacity(addresses.len()),
    };
    search.run(addresses);
    Lookup::Found(search.found)
}

/// Whether the parts of all units that are read immediately are within bounds. Nothing else is read
/// of a supplementary file.
fn all_can_be_opened(dwarf: &Dwarf<Slice<'_>>) -> bool {
    let mut headers = dwarf.units();
    while let Ok(Some(header)) = headers.next() {
        if units::open(dwarf, header).is_none() {
            return false;
        }
    }
    true
}

fn has_lines(elf: &Elf<'_>) -> bool {
    elf.section_by_name(".debug_info").is_some_and(|section| section.size() != 0)
}

fn time_to_inflate(elf: &Elf<'_>) -> Duration {
    let places = SECTIONS.iter().filter_map(|id| elf.section_by_name(id.name())?.compressed_file_range().ok());
    let compressed = places.filter(|place| place.format != object::CompressionFormat::None);
    let inflated = compressed.fold(0u64, |sum, place| sum.saturating_add(place.uncompressed_size));
    Duration::from_micros(inflated.saturating_mul(1_000_000) / INFLATED_PER_SECOND)
}

fn sections(elf: &Elf<'_>, budget: &Budget) -> DwarfSections<SectionBytes> {
    let section = |id: SectionId| {
        let wanted = SECTIONS.contains(&id).then(|| SectionBytes::of(elf, id.name(), budget));
        Ok::<_, std::convert::Infallible>(wanted.flatten().unwrap_or_default())
    };
    let Ok(sections) = DwarfSections::load(section);
    sections
}

fn borrow<'a>(sections: &'a DwarfSections<SectionBytes>, file: &'a [u8]) -> Dwarf<Slice<'a>> {
    sections.borrow(|section| EndianSlice::new(section.in_file(file), LittleEndian))
}

/// The search in one object.
struct Search<'a> {
    sections: &'a DwarfSections<SectionBytes>,
    file: &'a [u8],
    /// The supplementary file, which has what dwz has moved out of several debug files.
    supplementary: Option<(&'a [u8], &'a DwarfSections<SectionBytes>)>,
    split: SplitFiles<'a>,
    deadline: Instant,
    found: Vec<(u64, Vec<Source>)>,
}

/// The unit that the lookup of an address lacks.
enum Missing {
    /// The unit that contains this entry.
    Unit(usize),
    /// A unit in another file.
    File(ExternalUnit),
    /// Nothing, because the tables are damaged.
    Nothing,
}

impl Search<'_> {
    fn run(&mut self, addresses: &[u64]) {
        let whole = borrow(self.sections, self.file);
        let mut units = Units::new(&whole);
        let unit_starts = units.show_containing_units(addresses, self.deadline);
        let in_time = Instant::now() < self.deadline;
        let mut weights: HashMap<usize, usize> = HashMap::new();
        for unit_start in unit_starts.iter().flatten() {
            *weights.entry(*unit_start).or_default() += 1;
        }
        // Start with the unit that has the most addresses, in case the time is short.
        let mut remaining: Vec<(std::cmp::Reverse<usize>, usize, u64)> = Vec::with_capacity(addresses.len());
        for (address, unit_start) in addresses.iter().zip(unit_starts) {
            match unit_start {
                Some(unit_start) => remaining.push((std::cmp::Reverse(weights[&unit_start]), unit_start, *address)),
                // An address without a unit has no line.
                None if in_time => self.found.push((*address, Vec::new())),
                None => {}
            }
        }
        remaining.sort_unstable();
        let mut remaining: Vec<u64> = remaining.into_iter().map(|(_, _, address)| address).collect();
        for round in 1.. {
            if remaining.is_empty() || Instant::now() >= self.deadline {
                return;
            }
            let Ok(section) = units.section() else { return };
            let missing = self.look_up(&section, &mut remaining, round == MAX_ROUNDS);
            for missing in missing {
                match missing {
                    Missing::Unit(entry) => drop(units.show_entry(entry, self.deadline)),
                    Missing::File(unit) => self.split.find(&unit),
                    Missing::Nothing => {}
                }
            }
        }
    }

    /// Looks up all addresses in `remaining`, and returns what is lacking. `remaining` keeps the
    /// addresses that lack something. In the last round, they get a result without it.
    fn look_up(&mut self, section: &[u8], remaining: &mut Vec<u64>, last: bool) -> Vec<Missing> {
        let mut dwarf = borrow(self.sections, self.file);
        dwarf.debug_info = gimli::DebugInfo::new(section, LittleEndian);
        // With an empty index, addr2line takes the ranges from the units themselves.
        dwarf.debug_aranges = gimli::DebugAranges::new(&[], LittleEndian);
        if let Some((file, sections)) = self.supplementary {
            dwarf.set_sup(borrow(sections, file));
        }
        let mut all_missing = Vec::new();
        let context = Context::from_dwarf(dwarf);
        remaining.retain(|address| {
            if Instant::now() >= self.deadline {
                return true;
            }
            let sources = match &context {
                Ok(context) => match functions(context, *address, &self.split) {
                    Err(missing) if last || matches!(missing, Missing::Nothing) => line_only(context, *address),
                    Err(missing) => {
                        all_missing.push(missing);
                        return true;
                    }
                    Ok(sources) => sources,
                },
                Err(_) => Vec::new(),
            };
            self.found.push((*address, sources));
            false
        });
        all_missing
    }
}

/// The functions at an address, inlined functions first.
fn functions<'a>(
    context: &'a Context<Slice<'a>>,
    address: u64,
    split: &'a SplitFiles<'_>,
) -> Result<Vec<Source>, Missing> {
    let missing = |error| match error {
        gimli::Error::NoEntryAtGivenOffset(entry) => Missing::Unit(entry as usize),
        _ => Missing::Nothing,
    };
    let mut result = context.find_frames(address);
    let mut frames = loop {
        match result {
            LookupResult::Output(frames) => break frames.map_err(missing)?,
            LookupResult::Load { load, continuation } => match split.get(&load) {
                Some(dwarf) => result = continuation.resume(dwarf),
                None => return Err(Missing::File(ExternalUnit::of(&load))),
            },
        }
    };
    let mut sources = Vec::new();
    while let Some(frame) = frames.next().map_err(missing)? {
        let name = frame.function.map(|function| names::demangle(function.name.slice()));
        sources.push(Source { function: name, line: frame.location.and_then(line) });
    }
    Ok(sources)
}

fn line_only(context: &Context<Slice<'_>>, address: u64) -> Vec<Source> {
    let location = context.find_location(address).ok().flatten();
    location.map(|location| Source { function: None, line: line(location) }).into_iter().collect()
}

/// `path:line`. Compilers use line 0 for code without a line.
fn line(location: addr2line::Location<'_>) -> Option<String> {
    Some(format!("{}:{}", location.file?, location.line.filter(|line| *line != 0)?))
}

/// Maximum number of bytes to decompress for all files of one object.
const MAX_SPLIT_DECOMPRESSED: u64 = 256 << 20;

/// A unit in another file.
struct ExternalUnit {
    id: DwoId,
    /// Its path at compile time.
    path: PathBuf,
}

impl ExternalUnit {
    pub(crate) fn of(load: &SplitDwarfLoad<Slice<'_>>) -> Self {
        let text = |part: Option<Slice<'_>>| part.map_or_else(String::new, |part| part.to_string_lossy().into_owned());
        ExternalUnit { id: load.dwo_id, path: Path::new(&text(load.comp_dir)).join(text(load.path)) }
    }
}

/// The files of one object that were searched for.
struct SplitFiles<'a> {
    image: &'a Image,
    budget: Budget,
    package: Option<(Bytes, DwarfPackageSections<SectionBytes>)>,
    units: HashMap<DwoId, Option<(Bytes, DwarfSections<SectionBytes>)>>,
    /// Whether each unit is within bounds.
    bounded: RefCell<HashMap<DwoId, bool>>,
    deadline: Instant,
}

impl<'a> SplitFiles<'a> {
    /// Creates an empty set of files.
    pub(crate) fn new(image: &'a Image, deadline: Instant) -> Self {
        let (units, bounded) = (HashMap::new(), RefCell::default());
        SplitFiles { image, budget: Budget::new(MAX_SPLIT_DECOMPRESSED), package: None, units, bounded, deadline }
    }

    /// Searches for the file of a unit.
    pub(crate) fn find(&mut self, unit: &ExternalUnit) {
        if self.units.is_empty() {
            self.package = self.open(&PathBuf::from(format!("{}.dwp", self.image.path))).and_then(|bytes| {
                let elf = ElfFile64::parse(&*bytes).ok()?;
                let sections = DwarfPackageSections::load(|id| section(&elf, id, &self.budget)).ok()?;
                Some((bytes, sections))
            });
        }
        let own_folder = || Some(Path::new(&self.image.path).parent()?.join(unit.path.file_name()?));
        let file = |path: &Path| {
            let bytes = self.open(path)?;
            let elf = ElfFile64::parse(&*bytes).ok()?;
            let sections = DwarfSections::load(|id| section(&elf, id, &self.budget)).ok()?;
            is_unit_file(&bytes, &sections, unit.id).then_some((bytes, sections))
        };
        let found = file(&unit.path).or_else(|| file(&own_folder()?));
        self.units.insert(unit.id, found);
    }

    /// The DWARF of a unit. `None` if it was not searched for, and `Some(None)` if it was not
    /// found.
    pub(crate) fn get<'b>(&'b self, load: &SplitDwarfLoad<Slice<'b>>) -> Option<Option<Arc<Dwarf<Slice<'b>>>>> {
        let unit = self.units.get(&load.dwo_id)?;
        let compressed = || {
            let (bytes, sections) = self.package.as_ref()?;
            let empty = EndianSlice::new(&[], LittleEndian);
            let package = sections.borrow(|section| slice(section, bytes), empty).ok()?;
            package.find_cu(load.dwo_id, &load.parent).ok().flatten()
        };
        let single = || {
            let (bytes, sections) = unit.as_ref()?;
            let mut dwarf = sections.borrow(|section| slice(section, bytes));
            dwarf.make_dwo(&load.parent);
            Some(dwarf)
        };
        let found = single().or_else(compressed).filter(|dwarf| {
            *self.bounded.borrow_mut().entry(load.dwo_id).or_insert_with(|| all_are_bounded(dwarf, self.deadline))
        });
        Some(found.map(Arc::new))
    }

    fn open(&self, path: &Path) -> Option<Bytes> {
        let roots = [self.image.root.as_path(), Path::new("/")];
        let mut files = roots.into_iter().filter_map(|root| target_files::open_within(root, path));
        if path.is_absolute() { files.find_map(|file| Bytes::from_file(&file).ok()) } else { None }
    }
}

/// Whether all units of a file are within bounds. Most files have only one.
fn all_are_bounded(dwarf: &Dwarf<Slice<'_>>, deadline: Instant) -> bool {
    let mut headers = dwarf.units();
    while let Ok(Some(header)) = headers.next() {
        if !units::is_bounded(dwarf, header, deadline) {
            return false;
        }
    }
    true
}

/// Reads only sections whose names end in `.dwo`.
fn section(elf: &Elf<'_>, id: SectionId, budget: &Budget) -> gimli::Result<SectionBytes> {
    Ok(id.dwo_name().and_then(|name| SectionBytes::of(elf, name, budget)).unwrap_or_default())
}

fn slice<'b>(section: &'b SectionBytes, bytes: &'b Bytes) -> Slice<'b> {
    EndianSlice::new(section.in_file(bytes), LittleEndian)
}

/// Whether a file belongs to this build of the unit.
fn is_unit_file(bytes: &Bytes, sections: &DwarfSections<SectionBytes>, id: DwoId) -> bool {
    let dwarf = sections.borrow(|section| slice(section, bytes));
    let mut units = dwarf.units();
    let unit = units.next().ok().flatten().and_then(|header| units::open(&dwarf, header));
    unit.is_some_and(|unit| unit.dwo_id == Some(id))
}
