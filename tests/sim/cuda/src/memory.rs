//! Device memory, which is host memory, and the attributes of addresses.

#![allow(unsafe_code)]

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use sim_abi::cuda::{CuError, Device, DevicePointer};

/// Memory of each device.
pub const TOTAL_BYTES: usize = 80 << 30;
const ALIGNMENT: usize = 512;

/// The kind of memory at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Device,
    Managed,
    /// Page-locked by allocation.
    Host,
    /// Page-locked by cuMemHostRegister: the caller owns the memory.
    Registered,
}

/// A range of memory.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    pub address: DevicePointer,
    pub size: usize,
    pub kind: Kind,
    pub device: Device,
}

static BLOCKS: Mutex<BTreeMap<DevicePointer, Block>> = Mutex::new(BTreeMap::new());

fn blocks() -> MutexGuard<'static, BTreeMap<DevicePointer, Block>> {
    BLOCKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Allocates.
pub fn allocate(size: usize, kind: Kind, device: Device) -> Result<DevicePointer, CuError> {
    if size == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    if kind == Kind::Device && size > free_bytes(device) {
        return Err(CuError::OUT_OF_MEMORY);
    }
    let mut pointer = std::ptr::null_mut();
    // SAFETY: pointer is written when the call succeeds; the alignment is a power of two.
    if unsafe { libc::posix_memalign(&raw mut pointer, ALIGNMENT, size) } != 0 {
        return Err(CuError::OUT_OF_MEMORY);
    }
    let address = pointer as usize;
    blocks().insert(address, Block { address, size, kind, device });
    Ok(address)
}

/// cuMemHostRegister.
pub fn register(address: usize, size: usize, device: Device) -> Result<(), CuError> {
    if address == 0 || size == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    if find(address).is_some() {
        return Err(CuError::ALREADY_REGISTERED);
    }
    blocks().insert(address, Block { address, size, kind: Kind::Registered, device });
    Ok(())
}

/// cuMemHostUnregister.
pub fn unregister(address: usize) -> Result<(), CuError> {
    let mut blocks = blocks();
    match blocks.get(&address) {
        Some(block) if block.kind == Kind::Registered => {
            blocks.remove(&address);
            Ok(())
        }
        _ => Err(CuError::NOT_REGISTERED),
    }
}

/// Frees what `allocate` returned.
pub fn free(address: DevicePointer) -> Result<(), CuError> {
    let mut blocks = blocks();
    match blocks.get(&address) {
        Some(block) if block.kind != Kind::Registered => {
            blocks.remove(&address);
            // SAFETY: according to the table, it came from posix_memalign and has not been freed.
            unsafe { libc::free(address as *mut libc::c_void) };
            Ok(())
        }
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// The block that contains an address.
pub fn find(address: usize) -> Option<Block> {
    let (_, block) = blocks().range(..=address).next_back().map(|(address, block)| (*address, *block))?;
    (address < block.address + block.size).then_some(block)
}

/// Free bytes of a device.
pub fn free_bytes(device: Device) -> usize {
    let of_device = |block: &&Block| block.kind == Kind::Device && block.device == device;
    TOTAL_BYTES.saturating_sub(blocks().values().filter(of_device).map(|block| block.size).sum())
}
