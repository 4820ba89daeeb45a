//! Packs and reads the words of the ring.

use std::io;

#[cfg(doc)]
use super::layout::{comm, op};
use crate::v1::{DataType, Op, OpKind};

/// Packs [`op::WHAT`].
#[must_use]
pub fn pack_what(kind: OpKind, op: Op, dtype: DataType, reduce_op: u8, tid: u32) -> u64 {
    kind as u64 | (op as u64) << 8 | (dtype as u64) << 16 | u64::from(reduce_op) << 24 | u64::from(tid) << 32
}

/// Packs two halves into a word, as in [`comm::SIZE_RANK`], [`comm::STATE_DEVICE`] and
/// [`op::STATUS`].
#[must_use]
pub fn pack_halves(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// The published entries of one table. The table is read twice, and an entry whose first word
/// changed in between is omitted.
pub(super) fn entries<const WORDS: usize>(
    read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>,
    start: usize,
    slots: usize,
) -> io::Result<Vec<[u64; WORDS]>> {
    let table = read_words(read_at, start, slots * WORDS)?;
    let again = read_words(read_at, start, slots * WORDS)?;
    Ok(table
        .chunks_exact(WORDS)
        .zip(again.chunks_exact(WORDS))
        .filter(|(entry, again)| entry[0] != 0 && entry[0] == again[0])
        .map(|(entry, _)| entry.try_into().expect("chunks have WORDS words"))
        .collect())
}

pub(super) fn read_words(
    read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>,
    start: usize,
    words: usize,
) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; words * 8];
    read_at(start as u64, &mut bytes)?;
    Ok(bytes.chunks_exact(8).map(|chunk| u64::from_le_bytes(chunk.try_into().expect("chunks have 8 bytes"))).collect())
}

pub(super) fn text(words: &[u64]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

pub(super) fn low(word: u64) -> u32 {
    word as u32
}

pub(super) fn high(word: u64) -> u32 {
    (word >> 32) as u32
}
