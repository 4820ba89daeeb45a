//! One compilation unit: the source lines of a few addresses, and the functions that were inlined there. Only what holds one
//! of the addresses is looked into: tables of the whole unit would take many times as long.

use std::collections::HashMap;

use gimli::{
    AttributeValue, DW_AT_MIPS_linkage_name, DW_AT_abstract_origin, DW_AT_linkage_name, DW_AT_name,
    DW_AT_specification, DW_TAG_inlined_subroutine, DW_TAG_subprogram, DebugInfoOffset, Dwarf, Range, Reader, Unit,
    UnitHeader, UnitOffset, UnitRef,
};

use super::names;
use crate::image::Slice;

/// How often one entry may refer to another for its name.
const REFERENCES: usize = 16;

/// One function at an address, and the line it is at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Source {
    pub function: Option<String>,
    /// `path:line`.
    pub line: Option<String>,
}

/// Place in a source file, by the unit's number of the file.
type Line = (u64, u64);

/// A call that was inlined at an address.
struct Inlined {
    entry: UnitOffset,
    call: Option<Line>,
}

/// The function that holds an address, and the calls inlined there, outermost first.
#[derive(Default)]
struct Chain {
    function: Option<UnitOffset>,
    inlined: Vec<Inlined>,
}

/// For each of the addresses, which are sorted, the functions there: those inlined first, leaf first.
pub(super) fn find<'a>(unit: UnitRef<'_, Slice<'a>>, addresses: &[u64], origins: &mut Origins<'a>) -> Vec<Vec<Source>> {
    let mut lines = vec![None; addresses.len()];
    let mut chains: Vec<Chain> = addresses.iter().map(|_| Chain::default()).collect();
    // Damaged tables give what was found before the damage.
    let _ = find_lines(unit, addresses, &mut lines);
    let _ = find_functions(unit, addresses, &mut chains);
    let mut paths: HashMap<u64, Option<String>> = HashMap::new();
    let mut place = |line: Line| {
        let path = paths.entry(line.0).or_insert_with(|| path(unit, line.0)).as_ref()?;
        Some(format!("{path}:{}", line.1))
    };
    let sources = chains.into_iter().zip(lines).map(|(chain, line)| {
        let mut line = line;
        let mut sources = Vec::with_capacity(chain.inlined.len() + 1);
        for inlined in chain.inlined.into_iter().rev() {
            sources.push(Source { function: origins.name(unit, inlined.entry), line: line.and_then(&mut place) });
            line = inlined.call;
        }
        if chain.function.is_some() || line.is_some() {
            let function = chain.function.and_then(|entry| origins.name(unit, entry));
            sources.push(Source { function, line: line.and_then(&mut place) });
        }
        sources
    });
    sources.collect()
}

/// One pass over the line program, without keeping its rows.
fn find_lines(unit: UnitRef<'_, Slice<'_>>, addresses: &[u64], found: &mut [Option<Line>]) -> gimli::Result<()> {
    let (Some(first), Some(last)) = (addresses.first(), addresses.last()) else { return Ok(()) };
    let Some(program) = unit.line_program.clone() else { return Ok(()) };
    let mut rows = program.rows();
    let mut previous: Option<(u64, Line)> = None;
    while let Some((_, row)) = rows.next_row()? {
        if let Some((start, line)) = previous
            && start <= *last
            && row.address() > *first
        {
            for index in within(addresses, Range { begin: start, end: row.address() }) {
                found[index].get_or_insert(line);
            }
        }
        let number = row.line().map_or(0, std::num::NonZero::get);
        previous = (!row.end_sequence()).then_some((row.address(), (row.file_index(), number)));
    }
    // Line 0 is how a compiler says that there is none.
    for line in found {
        *line = line.filter(|(_, number)| *number != 0);
    }
    Ok(())
}

/// The indices of the sorted addresses within a range.
pub(super) fn within(addresses: &[u64], range: Range) -> std::ops::Range<usize> {
    let from = addresses.partition_point(|address| *address < range.begin);
    let length = addresses[from..].iter().take_while(|address| **address < range.end).count();
    from..from + length
}

fn find_functions(unit: UnitRef<'_, Slice<'_>>, addresses: &[u64], chains: &mut [Chain]) -> gimli::Result<()> {
    let mut entries = unit.entries_raw(None)?;
    // Where `entries` was started anew, its depth counts from 0 again.
    let mut base = 0;
    let mut left = addresses.len();
    let mut deepest = 0;
    while !entries.is_empty() {
        let offset = entries.next_offset();
        let depth = base + entries.next_depth();
        if left == 0 && depth <= deepest {
            break;
        }
        let Some(abbreviation) = entries.read_abbreviation()? else { continue };
        let tag = abbreviation.tag();
        if tag != DW_TAG_subprogram && tag != DW_TAG_inlined_subroutine {
            entries.skip_attributes(abbreviation.attributes())?;
            continue;
        }
        let (mut low, mut high, mut size, mut ranges, mut sibling) = (None, None, None, None, None);
        let (mut file, mut line) = (None, None);
        for specification in abbreviation.attributes() {
            let attribute = entries.read_attribute(*specification)?;
            match (attribute.name(), attribute.value()) {
                (gimli::DW_AT_low_pc, value) => low = unit.attr_address(value)?,
                (gimli::DW_AT_high_pc, AttributeValue::Udata(value)) => size = Some(value),
                (gimli::DW_AT_high_pc, value) => high = unit.attr_address(value)?,
                (gimli::DW_AT_ranges, value) => ranges = unit.attr_ranges(value)?,
                (gimli::DW_AT_sibling, AttributeValue::UnitRef(value)) => sibling = Some(value),
                (gimli::DW_AT_call_file, AttributeValue::FileIndex(value)) => file = Some(value),
                (gimli::DW_AT_call_line, value) => line = value.udata_value(),
                _ => {}
            }
        }
        let mut holds = false;
        let mut hit = |range: Range| {
            for index in within(addresses, range) {
                holds = true;
                let chain = &mut chains[index];
                if tag == DW_TAG_subprogram {
                    left -= usize::from(chain.function.is_none());
                    deepest = depth;
                    *chain = Chain { function: Some(offset), inlined: Vec::new() };
                } else {
                    chain.inlined.push(Inlined { entry: offset, call: file.zip(line) });
                }
            }
        };
        if let Some(mut ranges) = ranges {
            while let Some(range) = ranges.next()? {
                hit(range);
            }
        } else if let Some(begin) = low
            && let Some(end) = size.and_then(|size| begin.checked_add(size)).or(high)
        {
            hit(Range { begin, end });
        }
        if holds || !abbreviation.has_children() {
            continue;
        }
        if let Some(sibling) = sibling.filter(|sibling| *sibling > offset) {
            entries = unit.entries_raw(Some(sibling))?;
            base = depth;
            continue;
        }
        while base + entries.next_depth() > depth && !entries.is_empty() {
            if let Some(abbreviation) = entries.read_abbreviation()? {
                entries.skip_attributes(abbreviation.attributes())?;
            }
        }
    }
    Ok(())
}

/// Path of a file of the unit, under the folder in which it was compiled.
fn path(unit: UnitRef<'_, Slice<'_>>, file: u64) -> Option<String> {
    let header = unit.line_program.as_ref()?.header();
    let file = header.file(file)?;
    let mut path = unit.comp_dir.map(|folder| folder.to_string_lossy().into_owned()).unwrap_or_default();
    let mut push = |part: Slice<'_>| {
        let part = part.to_string_lossy();
        if part.starts_with('/') {
            path.clear();
        } else if !path.is_empty() && !path.ends_with('/') {
            path.push('/');
        }
        path.push_str(&part);
    };
    // Folder 0 is the one that the path begins with.
    if file.directory_index() != 0
        && let Some(folder) = file.directory(header)
    {
        push(unit.attr_string(folder).ok()?);
    }
    push(unit.attr_string(file.path_name()).ok()?);
    Some(path)
}

/// Finds the names of functions, which may stand in other units than the functions: link-time optimization makes such.
pub(super) struct Origins<'a> {
    dwarf: &'a Dwarf<Slice<'a>>,
    headers: Option<Vec<UnitHeader<Slice<'a>>>>,
    units: HashMap<DebugInfoOffset, Option<Unit<Slice<'a>>>>,
}

impl<'a> Origins<'a> {
    pub fn new(dwarf: &'a Dwarf<Slice<'a>>) -> Self {
        Origins { dwarf, headers: None, units: HashMap::new() }
    }

    fn name(&mut self, unit: UnitRef<'_, Slice<'a>>, entry: UnitOffset) -> Option<String> {
        let mut found = look(unit, entry)?;
        for _ in 0..REFERENCES {
            let offset = match found {
                Look::Name(name) => return Some(names::demangle(&name)),
                Look::Other(offset) => offset,
            };
            let dwarf = self.dwarf;
            let (unit, entry) = self.unit(offset)?;
            found = look(unit.unit_ref(dwarf), entry)?;
        }
        None
    }

    fn unit(&mut self, offset: DebugInfoOffset) -> Option<(&Unit<Slice<'a>>, UnitOffset)> {
        let dwarf = self.dwarf;
        let headers = self.headers.get_or_insert_with(|| {
            let mut headers = Vec::new();
            let mut units = dwarf.units();
            while let Ok(Some(header)) = units.next() {
                headers.push(header);
            }
            headers
        });
        let after = headers.partition_point(|header| header.debug_info_offset().is_some_and(|start| start <= offset));
        let header = headers.get(after.checked_sub(1)?)?;
        let entry = offset.to_unit_offset(header)?;
        let unit = self.units.entry(header.debug_info_offset()?).or_insert_with(|| dwarf.unit(*header).ok());
        Some((unit.as_ref()?, entry))
    }
}

/// What an entry says of its name.
enum Look {
    Name(Vec<u8>),
    /// It is the name of an entry of the section.
    Other(DebugInfoOffset),
}

/// Follows references within the unit.
fn look(unit: UnitRef<'_, Slice<'_>>, entry: UnitOffset) -> Option<Look> {
    let mut entry = unit.entry(entry).ok()?;
    for _ in 0..REFERENCES {
        let own = [DW_AT_linkage_name, DW_AT_MIPS_linkage_name, DW_AT_name].into_iter();
        if let Some(value) = own.filter_map(|name| entry.attr_value(name)).next() {
            return Some(Look::Name(unit.attr_string(value).ok()?.to_slice().ok()?.into_owned()));
        }
        let other = entry.attr_value(DW_AT_abstract_origin).or_else(|| entry.attr_value(DW_AT_specification))?;
        match other {
            AttributeValue::UnitRef(offset) => entry = unit.entry(offset).ok()?,
            AttributeValue::DebugInfoRef(offset) => return Some(Look::Other(offset)),
            _ => return None,
        }
    }
    None
}
