//! Identities of communicators that are equal on all ranks.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::runtime::os::{clock, process};

/// A 64-bit hash that is the same on every machine and never 0: FNV-1a with the finalizer of
/// MurmurHash3, because the high bits of FNV are weak for short input.
pub fn hash(parts: &[&[u8]]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in parts.iter().flat_map(|part| part.iter()) {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
        hash = (hash ^ (hash >> 33)).wrapping_mul(factor);
    }
    (hash ^ (hash >> 33)).max(1)
}

/// An identity that no other process has.
pub fn local_id() -> u64 {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    hash(&[b"local", &clock::now_ns().to_le_bytes(), &process::recorder_pid().to_le_bytes(), &count.to_le_bytes()])
}
