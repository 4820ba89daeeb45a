//! Finds the compilation units that contain the wanted addresses, and builds a `.debug_info` in
//! which only these are visible. addr2line reads the start of every visible unit, which takes tens
//! of milliseconds for a large library.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    io,
    ops::Range,
    time::Instant,
};

use gimli::{DebugInfoOffset, Dwarf, Section};
use memmap2::{Mmap, MmapOptions};

use crate::objects::bytes::Slice;

use super::bounds;

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
    pub fn new(dwarf: &'a Dwarf<Slice<'a>>) -> Self {
        Units { dwarf, shown: BTreeMap::new(), all: None }
    }

    /// Makes the units visible that contain the sorted addresses. Returns the start of the unit of
    /// each address, if there is one and it was found before the deadline.
    pub fn show_containing_units(&mut self, addresses: &[u64], deadline: Instant) -> Vec<Option<usize>> {
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
            let Some(unit) = bounds::open(self.dwarf, header) else { continue };
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
        bounds::is_bounded(self.dwarf, header, deadline) && self.shown.insert(start, start..end).is_none()
    }

    /// Makes the unit visible that contains an entry of `.debug_info`. Returns false if it already
    /// was.
    pub fn show_entry(&mut self, entry: usize, deadline: Instant) -> bool {
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
    pub fn section(&self) -> io::Result<Mmap> {
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
