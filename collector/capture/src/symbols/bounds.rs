//! What addr2line and gimli would make of a unit of DWARF, before they make it.
//!
//! A unit of some kilobytes can stand for any amount of memory: each of its functions may refer to one long list of ranges, each of
//! its files to one long folder. A line program has a row for each of its bytes, and nested entries are followed by
//! recursion. A unit beyond these bounds is not shown, so its addresses have names and no lines.

use std::{collections::HashMap, time::Instant};

use gimli::{AttributeValue, Dwarf, RangeListsOffset, Reader, Section, Unit, UnitHeader};

use crate::objects::bytes::Slice;

/// Bytes of the table of abbreviations of one unit; each of them costs twenty of memory.
const MAX_ABBREVIATIONS: usize = 1 << 20;
/// Bytes of one line program; a row takes 24 bytes of memory.
const MAX_LINES: usize = 16 << 20;
/// Bytes of its header, which lists files; a file takes 150 bytes of memory, and at least one here.
const MAX_FILES: usize = 2 << 20;
/// Bytes of the paths of all its files.
const MAX_PATHS: usize = 32 << 20;
/// Levels of entries within each other. Compilers come to some dozens.
const MAX_DEPTH: isize = 256;
/// Ranges of all functions of a unit, each time that one refers to them.
const MAX_RANGES: usize = 2 << 20;
/// The clock is read after so many entries.
const ENTRIES_A_LOOK: usize = 4096;

/// A unit as gimli opens it, when what it reads at once has its bounds.
pub(super) fn open<'a>(dwarf: &Dwarf<Slice<'a>>, header: UnitHeader<Slice<'a>>) -> Option<Unit<Slice<'a>>> {
    let abbreviations = *dwarf.debug_abbrev.reader();
    if !is_short(abbreviations, header.debug_abbrev_offset().0) {
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

/// Whether all of a unit has its bounds, as far as that is known by the deadline.
pub(super) fn hold<'a>(dwarf: &Dwarf<Slice<'a>>, header: UnitHeader<Slice<'a>>, deadline: Instant) -> bool {
    open(dwarf, header).is_some_and(|unit| entries_hold(dwarf, &unit, deadline) == Some(true))
}

/// Whether a table of abbreviations ends in time.
fn is_short(mut table: Slice<'_>, offset: usize) -> bool {
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

/// Whether a line program and its header are no longer than they may be. One that is not there is short.
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

/// `None` when the tables are damaged; what is in them then does not matter, because nobody gets further.
fn entries_hold<'a>(dwarf: &Dwarf<Slice<'a>>, unit: &Unit<Slice<'a>>, deadline: Instant) -> Option<bool> {
    let mut entries = unit.entries_raw(None).ok()?;
    let mut left = MAX_RANGES;
    let mut known: HashMap<RangeListsOffset, usize> = HashMap::new();
    let mut passed = 0usize;
    while !entries.is_empty() {
        passed += 1;
        if entries.next_depth() > MAX_DEPTH || passed.is_multiple_of(ENTRIES_A_LOOK) && Instant::now() >= deadline {
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

/// How long a list is, up to one more than `most`.
fn ranges<'a>(dwarf: &Dwarf<Slice<'a>>, unit: &Unit<Slice<'a>>, offset: RangeListsOffset, most: usize) -> usize {
    let Ok(mut ranges) = dwarf.raw_ranges(unit, offset) else { return 0 };
    let mut count = 0;
    while count <= most && matches!(ranges.next(), Ok(Some(_))) {
        count += 1;
    }
    count
}
