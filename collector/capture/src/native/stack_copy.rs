//! Copies of a stack that are taken while its thread does not run, and unwound afterwards.

use gimli::UnwindContext;

use crate::{error::Error, memory::region::Region};

use super::{
    address_space::AddressSpace,
    frame::RawFrame,
    registers::Registers,
    stack_memory::Memory,
    unwind::{End, unwind},
};

/// Bytes of a stack to copy first. Most stacks use a few KB.
const FIRST_COPY: usize = 16 << 10;
/// Bytes by which a stack may have grown since its length was measured.
const GROWTH_ALLOWANCE: usize = 512;
/// Factor by which the next copy is larger if one was too small.
const GROWTH_FACTOR: usize = 8;
/// Maximum number of bytes to copy of a stack.
const MAX_COPY: usize = 64 << 20;
/// Bytes to copy at an address outside the stack.
const RANGE_BYTES: usize = 64 << 10;
/// Maximum number of repetitions with a larger copy.
const MAX_REPETITIONS: usize = 6;
/// Number of bytes to copy of a stack whose length was `length` when it was last unwound; 0 if
/// unknown.
pub(super) fn initial_copy_length(length: usize) -> usize {
    // The stack may have grown a little since.
    if length == 0 { FIRST_COPY } else { length + length / 8 + GROWTH_ALLOWANCE }
}

/// Copies while a thread does not run and unwinds the copy. As long as the copy lacks memory that
/// the unwinding needs, a larger copy is taken. `length` is the expected length of the stack.
pub(super) fn copy_and_unwind<E>(
    length: usize,
    space: &AddressSpace<'_>,
    context: &mut UnwindContext<usize>,
    mut copied: impl FnMut(usize, &[u64]) -> Result<(Registers, Vec<Region>), E>,
) -> Result<(Vec<RawFrame>, End), E> {
    let mut limit = initial_copy_length(length);
    let mut wanted = Vec::new();
    let mut attempt = 0;
    loop {
        let (registers, regions) = copied(limit, &wanted)?;
        let memory = Memory::from_copies(regions);
        let (frames, end) = unwind(registers, &memory, space, context);
        attempt += 1;
        if let End::Memory(address) = end
            && attempt <= MAX_REPETITIONS
            && let Some(mapping) = space.mapping(address)
            && mapping.readable
        {
            if mapping.start <= registers.sp() && registers.sp() < mapping.end && limit < MAX_COPY {
                limit = MAX_COPY.min(limit * GROWTH_FACTOR);
                continue;
            }
            if !wanted.contains(&address) {
                wanted.push(address);
                continue;
            }
        }
        return Ok((frames, end));
    }
}

/// Buffers for copies. They are allocated before a stop, so that copying is all that is left to do
/// during the stop.
#[derive(Default)]
pub(super) struct CopyBuffers {
    stack: Vec<u8>,
    pieces: Vec<Vec<u8>>,
    regions: Vec<Region>,
}

impl CopyBuffers {
    pub fn new(limit: usize, wanted: &[u64]) -> Self {
        // The first write to fresh memory costs a page fault, which would otherwise happen during
        // the stop.
        CopyBuffers {
            stack: vec![1; limit],
            pieces: wanted.iter().map(|_| vec![1; RANGE_BYTES]).collect(),
            regions: Vec::with_capacity(1 + wanted.len()),
        }
    }

    /// Copies the stack from `sp` upwards, and a range at each wanted address.
    pub fn fill(self, tid: i32, sp: u64, space: &AddressSpace<'_>, wanted: &[u64]) -> Result<Vec<Region>, Error> {
        let mut regions = self.regions;
        regions.push(Region::read_stack(tid, sp, space.known_mapping(sp).as_deref(), self.stack)?);
        for (address, buffer) in wanted.iter().zip(self.pieces) {
            regions.push(Region::read_into(tid, address & !0xfff, buffer)?);
        }
        Ok(regions)
    }
}
