//! The memory that the unwinding of one thread reads: either existing copies, or copies that are
//! made on demand.

use std::cell::{Cell, RefCell};

use crate::{error::Error, memory::region::Region};

use super::address_space::AddressSpace;

/// Bytes of the first copy at an address. A copy that is too short is doubled.
const RANGE_BYTES: usize = 16 << 10;
/// Maximum number of bytes to copy for one thread.
const MAX_BYTES: usize = 64 << 20;

/// The memory that the unwinding of one thread reads: its stack, and whatever else it needs.
pub(crate) struct Memory<'a> {
    regions: RefCell<Vec<Region>>,
    /// Where to copy more from. `None` for a thread that did not run only while the existing copies
    /// were taken.
    source: Option<(i32, &'a AddressSpace<'a>)>,
    /// End of the highest number that was read from the stack.
    highest_read: Cell<u64>,
}

impl<'a> Memory<'a> {
    /// The memory of a sleeping thread, copied on demand.
    pub fn on_demand(tid: i32, space: &'a AddressSpace<'a>) -> Self {
        Memory { regions: RefCell::default(), source: Some((tid, space)), highest_read: Cell::new(0) }
    }

    /// Only these copies.
    pub fn from_copies(regions: Vec<Region>) -> Self {
        Memory { regions: RefCell::new(regions), source: None, highest_read: Cell::new(0) }
    }

    /// Reads an unsigned number of `size` bytes, at most 8.
    pub fn read_number(&self, address: u64, size: usize) -> Option<u64> {
        let known = self.copied(address, size);
        known.or_else(|| self.fetch(address).and_then(|()| self.copied(address, size)))
    }

    fn copied(&self, address: u64, size: usize) -> Option<u64> {
        let regions = self.regions.borrow();
        let (index, bytes) =
            regions.iter().enumerate().find_map(|(index, region)| Some((index, region.get(address, size)?)))?;
        if index == 0 {
            self.highest_read.set(self.highest_read.get().max(address.saturating_add(size as u64)));
        }
        let mut number = [0; 8];
        number.get_mut(..size)?.copy_from_slice(bytes);
        Some(u64::from_le_bytes(number))
    }

    fn fetch(&self, address: u64) -> Option<()> {
        let (tid, space) = self.source?;
        let mapping = space.mapping(address).filter(|mapping| mapping.readable)?;
        let mut regions = self.regions.borrow_mut();
        if regions.iter().map(|region| region.bytes.len()).sum::<usize>() >= MAX_BYTES {
            return None;
        }
        // Usually the next bytes of the stack are needed.
        let near = |region: &&mut Region| {
            region.start <= address && address < region.end() + region.bytes.len() as u64 && region.end() < mapping.end
        };
        if let Some(region) = regions.iter_mut().find(near) {
            let end = region.end();
            let length = usize::try_from(mapping.end - end)
                .unwrap_or(MAX_BYTES)
                .min(region.bytes.len().max(RANGE_BYTES))
                .min(MAX_BYTES);
            region.bytes.extend_from_slice(&Region::read_into(tid, end, vec![0; length]).ok()?.bytes);
        } else {
            let start = (address & !0xfff).max(mapping.start);
            let length = usize::try_from(mapping.end - start).unwrap_or(RANGE_BYTES).min(RANGE_BYTES);
            regions.push(Region::read_into(tid, start, vec![0; length]).ok()?);
        }
        Some(())
    }

    /// Number of bytes from the start of the stack to the end of the highest number that was read.
    pub fn stack_length(&self) -> usize {
        let regions = self.regions.borrow();
        let length = |stack: &Region| usize::try_from(self.highest_read.get().saturating_sub(stack.start)).unwrap_or(0);
        regions.first().map_or(0, |stack| length(stack).min(stack.bytes.len()))
    }

    /// Copies the stack of a thread from `sp` upwards, as many bytes as most stacks have.
    pub fn fetch_stack(&self, sp: u64) -> Result<(), Error> {
        let Some((tid, space)) = self.source else { return Ok(()) };
        let mapping = space.mapping(sp);
        self.regions.borrow_mut().push(Region::read_stack(tid, sp, mapping.as_deref(), vec![0; RANGE_BYTES])?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{memory::region::RED_ZONE, objects::image_cache::Images};

    #[test]
    fn memory_of_a_sleeping_thread_is_copied_on_demand() {
        let numbers: Vec<u64> = (0..1 << 16).collect();
        let pid = std::process::id() as i32;
        let images = Images::default();
        let space = AddressSpace::open(&images, pid, pid).unwrap();
        let memory = Memory::on_demand(pid, &space);
        memory.fetch_stack(numbers.as_ptr() as u64).unwrap();
        assert_eq!(memory.read_number(&raw const numbers[100] as u64, 8), Some(100));
        let length = memory.stack_length();
        assert!((808..=808 + RED_ZONE as usize).contains(&length), "up to the end of that number: {length}");
        for number in [0, 1, 3000, 60_000, 65_535, 5] {
            assert_eq!(memory.read_number(&raw const numbers[number] as u64, 8), Some(number as u64));
        }
        assert_eq!(memory.read_number(8, 8), None);
    }

    #[test]
    fn a_number_is_read_from_one_region_only() {
        let memory = Memory::from_copies(vec![Region { start: 100, bytes: vec![1, 0, 0, 0, 0, 0, 0, 0, 2] }]);
        assert_eq!(memory.read_number(100, 8), Some(1));
        assert_eq!(memory.read_number(108, 1), Some(2));
        assert_eq!(memory.read_number(104, 8), None);
        assert_eq!(memory.read_number(99, 1), None);
        assert_eq!(memory.read_number(u64::MAX, 8), None);
    }
}
