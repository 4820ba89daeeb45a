//! Copies of a stack that are taken while its thread stands still, and unwound afterwards.

use gimli::UnwindContext;

use crate::{error::Error, memory::region::Region};

use super::{
    address_space::AddressSpace,
    frame::RawFrame,
    registers::Registers,
    stack_memory::Memory,
    unwind::{End, unwind},
};

/// Bytes of a stack that are copied at first during a stop. Most stacks use a few KB.
const FIRST_COPY: usize = 16 << 10;
/// Bytes by which a stack may have grown since it was looked at.
const GROWTH: usize = 512;
/// How many times as much is copied when that was not enough.
const WIDER: usize = 8;
/// Bytes of a stack that are copied at most.
const LONGEST_COPY: usize = 64 << 20;
/// Bytes copied around an address that lies elsewhere.
const PIECE: usize = 64 << 10;
/// How often a copy is widened.
const WIDENINGS: usize = 6;
/// Bytes to copy of a stack that took `length` when it was last unwound; 0 when that is not known.
pub(super) fn room_for(length: usize) -> usize {
    // It may have grown a little since.
    if length == 0 { FIRST_COPY } else { length + length / 8 + GROWTH }
}

/// Copies while a thread stands still and unwinds, and copies again more widely while that is what the unwinding lacks. `length`
/// is what the stack is expected to take.
pub(super) fn copy<E>(
    length: usize,
    space: &AddressSpace<'_>,
    context: &mut UnwindContext<usize>,
    mut copied: impl FnMut(usize, &[u64]) -> Result<(Registers, Vec<Region>), E>,
) -> Result<(Vec<RawFrame>, End), E> {
    let mut limit = room_for(length);
    let mut wanted = Vec::new();
    let mut attempt = 0;
    loop {
        let (registers, regions) = copied(limit, &wanted)?;
        let memory = Memory::of_copies(regions);
        let (frames, end) = unwind(registers, &memory, space, context);
        attempt += 1;
        if let End::Memory(address) = end
            && attempt <= WIDENINGS
            && let Some(mapping) = space.mapping(address)
            && mapping.readable
        {
            if mapping.start <= registers.sp() && registers.sp() < mapping.end && limit < LONGEST_COPY {
                limit = LONGEST_COPY.min(limit * WIDER);
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

/// Room for copies, made before a stop so that during it there is nothing to do but to copy.
#[derive(Default)]
pub(super) struct Room {
    stack: Vec<u8>,
    pieces: Vec<Vec<u8>>,
    regions: Vec<Region>,
}

impl Room {
    pub fn new(limit: usize, wanted: &[u64]) -> Self {
        // Fresh memory costs a fault a page when it is first written, which would be during the stop.
        Room {
            stack: vec![1; limit],
            pieces: wanted.iter().map(|_| vec![1; PIECE]).collect(),
            regions: Vec::with_capacity(1 + wanted.len()),
        }
    }

    /// Copies the stack from `sp` upwards, and a piece from each wanted address on.
    pub fn fill(self, tid: i32, sp: u64, space: &AddressSpace<'_>, wanted: &[u64]) -> Result<Vec<Region>, Error> {
        let mut regions = self.regions;
        regions.push(Region::read_stack(tid, sp, space.known_mapping(sp).as_deref(), self.stack)?);
        for (address, room) in wanted.iter().zip(self.pieces) {
            regions.push(Region::read_into(tid, address & !0xfff, room)?);
        }
        Ok(regions)
    }
}
