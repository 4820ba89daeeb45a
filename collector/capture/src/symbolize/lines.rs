//! Source lines and inlined functions, from the DWARF of an object or of its separate debug file. The units that hold the
//! wanted addresses are found first, and nothing is read of the others.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
    time::{Duration, Instant},
};

use gimli::{DebugInfoOffset, Dwarf, DwarfSections, EndianSlice, LittleEndian, SectionId, Unit};
use object::{Object, ObjectSection, read::elf::ElfFile64};

use super::unit::{self, Origins, Source};
use crate::image::{Bytes, Elf, Image, Slice};

/// Bytes that are inflated in a second, at least.
const INFLATED_PER_SECOND: u64 = 200 << 20;
/// The sections that lines and names of functions are in.
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

/// What came of looking for lines in one object.
pub(super) enum Lookup {
    /// The object has none.
    Absent,
    /// For each address that was looked for in time.
    Found(Vec<(u64, Vec<Source>)>),
}

/// Looks for the lines of the addresses, which are sorted, until the deadline.
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
    let load = |id: SectionId| -> Result<Cow<'_, [u8]>, gimli::Error> {
        let section = SECTIONS.contains(&id).then(|| elf.section_by_name(id.name())).flatten();
        Ok(section.and_then(|section| section.uncompressed_data().ok()).unwrap_or_default())
    };
    let Ok(sections) = DwarfSections::load(load) else { return Lookup::Absent };
    let dwarf = sections.borrow(|bytes| EndianSlice::new(bytes, LittleEndian));
    Lookup::Found(find_in(&dwarf, addresses, deadline))
}

fn has_lines(elf: &Elf<'_>) -> bool {
    elf.section_by_name(".debug_info").is_some_and(|section| section.size() != 0)
}

fn time_to_inflate(elf: &Elf<'_>) -> Duration {
    let places = SECTIONS.iter().filter_map(|id| elf.section_by_name(id.name())?.compressed_file_range().ok());
    let packed = places.filter(|place| place.format != object::CompressionFormat::None);
    let inflated: u64 = packed.map(|place| place.uncompressed_size).sum();
    Duration::from_micros(inflated.saturating_mul(1_000_000) / INFLATED_PER_SECOND)
}

fn find_in<'a>(dwarf: &'a Dwarf<Slice<'a>>, addresses: &[u64], deadline: Instant) -> Vec<(u64, Vec<Source>)> {
    let mut found = Vec::with_capacity(addresses.len());
    let mut missing: Vec<bool> = vec![true; addresses.len()];
    let mut origins = Origins::new(dwarf);
    let mut add = |unit: &Unit<Slice<'a>>, indices: Vec<usize>| {
        let wanted: Vec<u64> = indices.iter().map(|index| addresses[*index]).collect();
        let sources = unit::find(unit.unit_ref(dwarf), &wanted, &mut origins);
        found.extend(wanted.into_iter().zip(sources));
    };
    let Index { units, listed } = index(dwarf, addresses, &mut missing);
    // The unit with the most addresses first, for when the time is short.
    let mut units: Vec<_> = units.into_iter().collect();
    units.sort_by_key(|(offset, indices)| (std::cmp::Reverse(indices.len()), *offset));
    for (offset, indices) in units {
        if Instant::now() >= deadline {
            return found;
        }
        if let Ok(unit) = dwarf.unit_header(offset).and_then(|header| dwarf.unit(header)) {
            add(&unit, indices);
        }
    }
    // Some compilers write no such index; then each unit tells what it holds.
    let mut headers = dwarf.units();
    while missing.contains(&true)
        && let Ok(Some(header)) = headers.next()
    {
        if header.debug_info_offset().is_none_or(|offset| listed.contains(&offset)) {
            continue;
        }
        if Instant::now() >= deadline {
            return found;
        }
        let Ok(unit) = dwarf.unit(header) else { continue };
        let Ok(mut ranges) = dwarf.unit_ranges(&unit) else { continue };
        let mut indices = Vec::new();
        while let Ok(Some(range)) = ranges.next() {
            indices.extend(unit::within(addresses, range).filter(|index| std::mem::take(&mut missing[*index])));
        }
        if !indices.is_empty() {
            indices.sort_unstable();
            add(&unit, indices);
        }
    }
    // An address without a line is known to have none.
    let missing = addresses.iter().zip(missing).filter(|(_, missing)| *missing);
    found.extend(missing.map(|(address, _)| (*address, Vec::new())));
    found
}

/// What `.debug_aranges` tells.
struct Index {
    /// The units that hold addresses, by the indices of these.
    units: BTreeMap<DebugInfoOffset, Vec<usize>>,
    /// All units that it knows.
    listed: HashSet<DebugInfoOffset>,
}

fn index(dwarf: &Dwarf<Slice<'_>>, addresses: &[u64], missing: &mut [bool]) -> Index {
    let mut index = Index { units: BTreeMap::new(), listed: HashSet::new() };
    let mut headers = dwarf.debug_aranges.headers();
    while let Ok(Some(header)) = headers.next() {
        let offset = header.debug_info_offset();
        index.listed.insert(offset);
        let mut entries = header.entries();
        while let Ok(Some(entry)) = entries.next() {
            for at in unit::within(addresses, entry.range()) {
                if std::mem::take(&mut missing[at]) {
                    index.units.entry(offset).or_default().push(at);
                }
            }
        }
    }
    for indices in index.units.values_mut() {
        indices.sort_unstable();
    }
    index
}
