//! DWARF compilation units: those that contain the wanted addresses, within bounds.
//!
//! The search builds a `.debug_info` in which only the wanted units are visible. addr2line reads
//! the start of every visible unit, which takes tens of milliseconds for a large library.
//!
//! The checks find out how much memory addr2line and gimli would use for a unit before they read
//! it. A unit of some kilobytes can expand to any amount of memory: each of its functions may refer
//! to one long list of ranges, and each of its files to one long folder. A line program has a row
//! for each of its bytes, and nested entries are read recursively. A unit that exceeds these bounds
//! is hidden, so its addresses have names but no lines.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    io,
    ops::Range,
    time::Instant,
};

use gimli::{AttributeValue, DebugInfoOffset, Dwarf, RangeListsOffset, Reader, Section, Unit, UnitHeader};
use memmap2::{Mmap, MmapOptions};

use crate::objects::bytes::Slice;

/// Bytes of the header of a type unit in the 64-bit format of DWARF 5. A shorter gap is not hidden.
const TYPE_UNIT_HEADER_BYTES: usize = 40;
/// Bytes of the length field of such a header, which the length does not include.
const TYPE_UNIT_LENGTH_BYTES: usize = 12;

/// The visible units, by their start.
pub(super) struct Units<'a> {
    dwarf: &'a Dwarf<Slice<'a>>,
    shown: BTreeMap<usize, Range<usize>>,
    /// The ranges of all units. Finding them takes a while, so this happens only on demand.
    all: Option<Vec<Range<usize>>>,
}

impl<'a> Units<'a> {
    /// Creates a set without visible units.
    pub(super) fn new(dwarf: &'a Dwarf<Slice<'a>>) -> Self {
        Units { dwarf, shown: BTreeMap::new(), all: None }
    }

    /// Makes the units visible that contain the sorted addresses. Returns the start of the unit of
    /// each address, if there is one and it was found before the deadline.
    pub(super) fn show_containing_units(&mut self, addresses: &[u64], deadline: Instant) -> Vec<Option<usize>> {
        let mut unit_starts = vec![None; addresses.len()];
        let listed = self.find_in_aranges(addresses, &mut unit_starts);
        // Some compilers write no index. Then read the ranges of each unit.
        let mut headers = self.dwarf.units();
        while unit_starts.contains(&None)
            && let Ok(Some(header)) = headers.next()
        {
            let Some(offset) = header.debug_info_offset().filter(|offset| !listed.contains(offset)) else { continue };
            if Instant::now() >= deadline {
                break;
            }
            let Some(unit) = open(self.dwarf, header) else { continue };
            let Ok(mut ranges) = self.dwarf.unit_ranges(&unit) else { continue };
            while let Ok(Some(range)) = ranges.next() {
                for at in indices_within(addresses, range) {
                    unit_starts[at].get_or_insert(offset.0);
                }
            }
        }
        let wanted: BTreeSet<usize> = unit_starts.iter().flatten().copied().collect();
        for holder in wanted {
            self.show(holder, deadline);
        }
        unit_starts
    }

    /// Looks the addresses up in `.debug_aranges`. Returns all units in it.
    fn find_in_aranges(&self, addresses: &[u64], unit_starts: &mut [Option<usize>]) -> HashSet<DebugInfoOffset> {
        let mut listed = HashSet::new();
        let mut headers = self.dwarf.debug_aranges.headers();
        while let Ok(Some(header)) = headers.next() {
            let offset = header.debug_info_offset();
            listed.insert(offset);
            let mut entries = header.entries();
            while let Ok(Some(entry)) = entries.next() {
                for at in indices_within(addresses, entry.range()) {
                    unit_starts[at].get_or_insert(offset.0);
                }
            }
        }
        listed
    }

    fn show(&mut self, start: usize, deadline: Instant) -> bool {
        let Ok(header) = self.dwarf.unit_header(DebugInfoOffset(start)) else { return false };
        let end = start.saturating_add(header.length_including_self()).min(self.dwarf.debug_info.reader().len());
        is_bounded(self.dwarf, header, deadline) && self.shown.insert(start, start..end).is_none()
    }

    /// Makes the unit visible that contains an entry of `.debug_info`. Returns false if it already
    /// was.
    pub(super) fn show_entry(&mut self, entry: usize, deadline: Instant) -> bool {
        let dwarf = self.dwarf;
        let all = self.all.get_or_insert_with(|| {
            let mut all = Vec::new();
            let mut headers = dwarf.units();
            while let Ok(Some(header)) = headers.next() {
                let start = header.debug_info_offset().map_or(0, |offset| offset.0);
                all.push(start..start + header.length_including_self());
            }
            all
        });
        let after = all.partition_point(|unit| unit.start <= entry);
        let Some(unit) = after.checked_sub(1).map(|before| all[before].clone()) else { return false };
        unit.contains(&entry) && !self.shown.contains_key(&unit.start) && self.show(unit.start, deadline)
    }

    /// Builds the section, with only these units visible.
    pub(super) fn section(&self) -> io::Result<Mmap> {
        let section = self.dwarf.debug_info.reader().slice();
        let length = self.shown.last_key_value().map_or(0, |(_, unit)| unit.end);
        // Most pages of the copy are never touched and cost no memory.
        let mut copy = MmapOptions::new().len(length.max(1)).no_reserve_swap().map_anon()?;
        let mut end = 0;
        for unit in self.shown.values() {
            let gap = end..unit.start.max(end);
            if gap.len() < TYPE_UNIT_HEADER_BYTES {
                copy[gap.clone()].copy_from_slice(&section[gap]);
            } else {
                hide(&mut copy[gap]);
            }
            copy[unit.clone()].copy_from_slice(&section[unit.clone()]);
            end = unit.end;
        }
        copy.make_read_only()
    }
}

/// Turns a range of the section into one type unit, which addr2line skips. Everything after it
/// keeps its offset, so references to it stay valid.
fn hide(gap: &mut [u8]) {
    let length = (gap.len() - TYPE_UNIT_LENGTH_BYTES) as u64;
    gap[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    gap[4..12].copy_from_slice(&length.to_le_bytes());
    gap[12..14].copy_from_slice(&5u16.to_le_bytes());
    gap[14] = gimli::DW_UT_type.0;
    gap[15] = 8;
}

/// The indices of the sorted addresses within a range.
fn indices_within(addresses: &[u64], range: gimli::Range) -> Range<usize> {
    let from = addresses.partition_point(|address| *address < range.begin);
    let length = addresses[from..].iter().take_while(|address| **address < range.end).count();
    from..from + length
}

/// Maximum bytes of the abbreviation table of one unit. Each byte costs twenty bytes of memory.
const MAX_ABBREVIATIONS: usize = 1 << 20;
/// Maximum bytes of one line program. A row takes 24 bytes of memory.
const MAX_LINES: usize = 16 << 20;
/// Maximum bytes of the line program's header, which lists files. A file takes at least one byte
/// here and 150 bytes of memory.
const MAX_FILES: usize = 2 << 20;
/// Maximum bytes of the paths of all files of a unit.
const MAX_PATHS: usize = 32 << 20;
/// Maximum nesting of entries. Compilers produce some dozens of levels.
const MAX_DEPTH: isize = 256;
/// Maximum number of ranges of all functions of a unit. A list counts each time that a function
/// refers to it.
const MAX_RANGES: usize = 2 << 20;
/// Number of entries between two reads of the clock.
const ENTRIES_PER_CLOCK_READ: usize = 4096;

/// Opens a unit with gimli if the parts that gimli reads immediately are within bounds.
pub(super) fn open<'a>(dwarf: &Dwarf<Slice<'a>>, header: UnitHeader<Slice<'a>>) -> Option<Unit<Slice<'a>>> {
    let abbreviations = *dwarf.debug_abbrev.reader();
    if !has_short_abbreviations(abbreviations, header.debug_abbrev_offset().0) {
        return None;
    }
    let abbreviations = dwarf.abbreviations(&header).ok()?;
    let mut entries = header.entries_raw(&abbreviations, None).ok()?;
    let root = entries.read_abbreviation().ok()??;
    for attribute in root.attributes() {
        if let AttributeValue::DebugLineRef(offset) = entries.read_attribute(*attribute).ok()?.value()
            && !has_short_lines(*dwarf.debug_line.reader(), offset.0)
        {
            return None;
        }
    }
    let unit = Unit::new_with_abbreviations(dwarf, header, abbreviations).ok()?;
    has_short_paths(dwarf, &unit).then_some(unit)
}

/// Whether all of a unit is known to be within bounds before the deadline.
pub(super) fn is_bounded<'a>(dwarf: &Dwarf<Slice<'a>>, header: UnitHeader<Slice<'a>>, deadline: Instant) -> bool {
    open(dwarf, header).is_some_and(|unit| entries_are_bounded(dwarf, &unit, deadline) == Some(true))
}

/// Whether an abbreviation table ends within its maximum size.
fn has_short_abbreviations(mut table: Slice<'_>, offset: usize) -> bool {
    let mut skim = || -> gimli::Result<bool> {
        table.skip(offset)?;
        table.truncate(table.len().min(MAX_ABBREVIATIONS))?;
        while table.read_uleb128()? != 0 {
            table.read_uleb128()?;
            table.read_u8()?;
            loop {
                let (name, form) = (table.read_uleb128()?, table.read_uleb128()?);
                if form == u64::from(gimli::DW_FORM_implicit_const.0) {
                    table.read_sleb128()?;
                }
                if (name, form) == (0, 0) {
                    break;
                }
            }
        }
        Ok(true)
    };
    skim().unwrap_or(false)
}

/// Whether a line program and its header are within bounds. A missing one is.
fn has_short_lines(mut lines: Slice<'_>, offset: usize) -> bool {
    let mut read = || -> gimli::Result<bool> {
        lines.skip(offset)?;
        let (length, format) = lines.read_initial_length()?;
        if length > MAX_LINES {
            return Ok(false);
        }
        if lines.read_u16()? >= 5 {
            lines.skip(2)?;
        }
        Ok(lines.read_length(format)? <= MAX_FILES)
    };
    read().unwrap_or(true)
}

fn has_short_paths<'a>(dwarf: &Dwarf<Slice<'a>>, unit: &Unit<Slice<'a>>) -> bool {
    let Some(program) = &unit.line_program else { return true };
    let length = |text| dwarf.attr_string(unit, text).map_or(0, |text| text.len());
    let own = unit.comp_dir.map_or(0, |folder| folder.len());
    let mut left = MAX_PATHS;
    let header = program.header();
    header.file_names().iter().all(|file| {
        let folder = file.directory(header).map_or(0, length);
        let path = own.saturating_add(folder).saturating_add(length(file.path_name()));
        left.checked_sub(path).map(|rest| left = rest).is_some()
    })
}

/// `None` if the tables are damaged. Then their contents do not matter, because no reader gets
/// beyond the damage.
fn entries_are_bounded<'a>(dwarf: &Dwarf<Slice<'a>>, unit: &Unit<Slice<'a>>, deadline: Instant) -> Option<bool> {
    let mut entries = unit.entries_raw(None).ok()?;
    let mut left = MAX_RANGES;
    let mut known: HashMap<RangeListsOffset, usize> = HashMap::new();
    let mut passed = 0usize;
    while !entries.is_empty() {
        passed += 1;
        if entries.next_depth() > MAX_DEPTH
            || passed.is_multiple_of(ENTRIES_PER_CLOCK_READ) && Instant::now() >= deadline
        {
            return Some(false);
        }
        let Some(abbreviation) = entries.read_abbreviation().ok()? else { continue };
        let is_function = matches!(abbreviation.tag(), gimli::DW_TAG_subprogram | gimli::DW_TAG_inlined_subroutine);
        let attributes = abbreviation.attributes();
        if !is_function || !attributes.iter().any(|attribute| attribute.name() == gimli::DW_AT_ranges) {
            entries.skip_attributes(attributes).ok()?;
            continue;
        }
        for attribute in attributes {
            let attribute = entries.read_attribute(*attribute).ok()?;
            if attribute.name() != gimli::DW_AT_ranges {
                continue;
            }
            let Ok(Some(offset)) = dwarf.attr_ranges_offset(unit, attribute.value()) else { continue };
            let count = *known.entry(offset).or_insert_with(|| ranges(dwarf, unit, offset, MAX_RANGES));
            match left.checked_sub(count) {
                Some(rest) => left = rest,
                None => return Some(false),
            }
        }
    }
    Some(true)
}

/// The length of a list of ranges, counted up to `limit` + 1.
fn ranges<'a>(dwarf: &Dwarf<Slice<'a>>, unit: &Unit<Slice<'a>>, offset: RangeListsOffset, limit: usize) -> usize {
    let Ok(mut ranges) = dwarf.raw_ranges(unit, offset) else { return 0 };
    let mut count = 0;
    while count <= limit && matches!(ranges.next(), Ok(Some(_))) {
        count += 1;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_range_is_one_type_unit() {
        for length in [TYPE_UNIT_HEADER_BYTES, 1000, 70_000] {
            let mut section = vec![0; length];
            hide(&mut section);
            let section = gimli::DebugInfo::new(&section, gimli::LittleEndian);
            let mut units = section.units();
            let header = units.next().unwrap().unwrap();
            assert!(matches!(header.type_(), gimli::UnitType::Type { .. }));
            assert_eq!(header.length_including_self(), length);
            assert!(units.next().unwrap().is_none());
        }
    }

    #[test]
    fn indices_of_addresses_within_a_range() {
        let range = |begin, end| gimli::Range { begin, end };
        assert_eq!(indices_within(&[1, 5, 9], range(5, 9)), 1..2);
        assert_eq!(indices_within(&[1, 5, 9], range(0, 10)), 0..3);
        assert_eq!(indices_within(&[1, 5, 9], range(6, 9)), 2..2);
    }
}
