//! Checks how much memory addr2line and gimli would use for a DWARF unit before they read it.
//!
//! A unit of some kilobytes can expand to any amount of memory: each of its functions may refer to
//! one long list of ranges, and each of its files to one long folder. A line program has a row for
//! each of its bytes, and nested entries are read recursively. A unit that exceeds these bounds is
//! hidden, so its addresses have names but no lines.

use std::{collections::HashMap, time::Instant};

use gimli::{AttributeValue, Dwarf, RangeListsOffset, Reader, Section, Unit, UnitHeader};

use crate::objects::bytes::Slice;

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
