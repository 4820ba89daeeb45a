//! The memory that the unwinding of one thread reads: either existing copies, or copies that are
//! made on demand.

use std::cell::{Cell, RefCell};

use crate::{error::Error, memory::region::Region};

use super::address_space::AddressSpace;

/// Bytes of the first copy at an address. A copy that is too short is doubled.
const PIECE: usize = 16 << 10;
/// Maximum number of bytes to copy for one thread.
const LIMIT: usize = 64 << 20;

/// The memory that the unwinding of one thread reads: its stack, and whatever else it needs.
pub(crate) struct Memory<'a> {
    regions: RefCell<Vec<Region>>,
    /// Where to copy more from. `None` for a thread that did not run only while the existing copies
    /// were taken.
    more: Option<(i32, &'a AddressSpace<'a>)>,
    /// End of the highest number that was read from the stack.
    highest: Cell<u64>,
}

impl<'a> Memory<'a> {
    /// The memory of a sleeping thread, copied on demand.
    pub fn of_sleeper(tid: i32, space: &'a AddressSpace<'a>) -> Self {
        Memory { regions: RefCell::default(), more: Some((tid, space)), highest: Cell::new(0) }
    }

    /// Only these copies.
    pub fn of_copies(regions: Vec<Region>) -> Self {
        Memory { regions: RefCell::new(regions), more: None, highest: Cell::new(0) }
    }

    /// Reads an unsigned number of `size` bytes, at most 8.
    pub fn number(&self, address: u64, size: usize) -> Option<u64> {
        let known = self.copied(address, size);
        known.or_else(|| self.fetch(address).and_then(|()| self.copied(address, size)))
    }

    fn copied(&self, address: u64, size: usize) -> Option<u64> {
        let regions = self.regions.borrow();
        let (index, bytes) =
            regions.iter().enumerate().find_map(|(index, region)| Some((index, region.get(address, size)?)))?;
        if index == 0 {
            self.highest.set(self.highest.get().max(address.saturating_add(size as u64)));
        }
        let mut number = [0; 8];
        number.get_mut(..size)?.copy_from_slice(bytes);
        Some(u64::from_le_bytes(number))
    }

    fn fetch(&self, address: u64) -> Option<()> {
        let (tid, space) = self.more?;
        let mapping = space.mapping(address).filter(|mapping| mapping.readable)?;
        let mut regions = self.regions.borrow_mut();
        if regions.iter().map(|region| region.bytes.len()).sum::<usize>() >= LIMIT {
            return None;
        }
        // Usually the next bytes of the stack are needed.
        let near = |region: &&mut Region| {
            region.start <= address && address < region.end() + region.bytes.len() as u64 && region.end() < mapping.end
        };
        if let Some(region) = regions.iter_mut().find(near) {
            let end = region.end();
            let length =
                usize::try_from(mapping.end - end).unwrap_or(LIMIT).min(region.bytes.len().max(PIECE)).min(LIMIT);
            region.bytes.extend_from_slice(&Region::read_into(tid, end, vec![0; length]).ok()?.bytes);
        } else {
            let start = (address & !0xfff).max(mapping.start);
            let length = usize::try_from(mapping.end - start).unwrap_or(PIECE).min(PIECE);
            regions.push(Region::read_into(tid, start, vec![0; length]).ok()?);
        }
        Some(())
    }

    /// Number of bytes from the start of the stack to the end of the highest number that was read.
    pub fn stack_length(&self) -> usize {
        let regions = self.regions.borrow();
        let length = |stack: &Region| usize::try_from(self.highest.get().saturating_sub(stack.start)).unwrap_or(0);
        regions.first().map_or(0, |stack| length(stack).min(stack.bytes.len()))
    }

    /// Copies the stack of a thread from `sp` upwards, as many bytes as most stacks have.
    pub fn fetch_stack(&self, sp: u64) -> Result<(), Error> {
        let Some((tid, space)) = self.more else { return Ok(()) };
        let mapping = space.mapping(sp);
        self.regions.borrow_mut().push(Region::read_stack(tid, sp, mapping.as_deref(), vec![0; PIECE])?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{memory::region::RED_ZONE, objects::image_cache::Images};

    #[test]
    fn memory_of_a_sleeper_is_copied_when_it_is_looked_at() {
        let numbers: Vec<u64> = (0..1 << 16).collect();
        let pid = std::process::id() as i32;
        let images = Images::default();
        let space = AddressSpace::open(&images, pid, pid).unwrap();
        let memory = Memory::of_sleeper(pid, &space);
        memory.fetch_stack(numbers.as_ptr() as u64).unwrap();
        assert_eq!(memory.number(&raw const numbers[100] as u64, 8), Some(100));
        let length = memory.stack_length();
        assert!((808..=808 + RED_ZONE as usize).contains(&length), "up to the end of that number: {length}");
        for number in [0, 1, 3000, 60_000, 65_535, 5] {
            assert_eq!(memory.number(&raw const numbers[number] as u64, 8), Some(number as u64));
        }
        assert_eq!(memory.number(8, 8), None);
    }

    #[test]
    fn numbers_lie_within_one_region() {
        let memory = Memory::of_copies(vec![Region { start: 100, bytes: vec![1, 0, 0, 0, 0, 0, 0, 0, 2] }]);
        assert_eq!(memory.number(100, 8), Some(1));
        assert_eq!(memory.number(108, 1), Some(2));
        assert_eq!(memory.number(104, 8), None);
        assert_eq!(memory.number(99, 1), None);
        assert_eq!(memory.number(u64::MAX, 8), None);
    }
}
