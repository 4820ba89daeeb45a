//! DWARF in separate files, from builds with `-gsplit-dwarf`: a `.dwo` file for each unit, or one
//! `.dwp` package beside the object.

use std::{
    cell::RefCell,
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use addr2line::SplitDwarfLoad;
use gimli::{Dwarf, DwarfPackageSections, DwarfSections, DwoId, EndianSlice, LittleEndian, SectionId};
use object::read::elf::ElfFile64;

use crate::objects::{
    bytes::{Budget, Bytes, Elf, SectionBytes, Slice},
    image::Image,
    target_files,
};

use super::units;

/// Maximum number of bytes to decompress for all files of one object.
const MAX_DECOMPRESSED: u64 = 256 << 20;

/// A unit in another file.
pub(super) struct ExternalUnit {
    id: DwoId,
    /// Its path at compile time.
    path: PathBuf,
}

impl ExternalUnit {
    pub fn of(load: &SplitDwarfLoad<Slice<'_>>) -> Self {
        let text = |part: Option<Slice<'_>>| part.map_or_else(String::new, |part| part.to_string_lossy().into_owned());
        ExternalUnit { id: load.dwo_id, path: Path::new(&text(load.comp_dir)).join(text(load.path)) }
    }
}

/// The files of one object that were searched for.
pub(super) struct SplitFiles<'a> {
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
    pub fn new(image: &'a Image, deadline: Instant) -> Self {
        let (units, bounded) = (HashMap::new(), RefCell::default());
        SplitFiles { image, budget: Budget::new(MAX_DECOMPRESSED), package: None, units, bounded, deadline }
    }

    /// Searches for the file of a unit.
    pub fn find(&mut self, unit: &ExternalUnit) {
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
    pub fn get<'b>(&'b self, load: &SplitDwarfLoad<Slice<'b>>) -> Option<Option<Arc<Dwarf<Slice<'b>>>>> {
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
