//! The shared memory of the ring: words in a memfd, laid out by `xpu_timer_proto::ring`.

use std::{
    io,
    sync::atomic::{AtomicU64, Ordering},
};

use xpu_timer_proto::ring::{MAGIC, VERSION, coverage, header, name, offset, op};

use crate::runtime::os::descriptor::{self, Descriptor};

/// The words of the ring. They are mapped for the rest of the process's life, because another
/// thread may be writing at any time, and a forked child may still hold a reference.
pub struct Ring {
    words: &'static [AtomicU64],
    /// The descriptor that the collector receives.
    pub descriptor: &'static Descriptor,
}

/// Bytes of text in a coverage entry.
pub const COVERAGE_NAME_BYTES: usize = (coverage::WORDS - coverage::NAME) * 8;

/// Bytes of text in a name entry.
pub const NAME_BYTES: usize = (name::WORDS - name::TEXT) * 8;

impl Ring {
    /// Creates a ring in shared memory, and stores its descriptor in `descriptor`.
    ///
    /// # Errors
    /// When the system has no descriptor or no memory for it.
    pub fn create(descriptor: &'static Descriptor) -> io::Result<Self> {
        let (fd, memory) = descriptor::shared_memory(offset::END)?;
        descriptor.set(fd)?;
        // SAFETY: the mapping is END bytes, page-aligned, zero, and never unmapped; AtomicU64 has
        // the layout of u64.
        let words = unsafe { std::slice::from_raw_parts(memory.cast::<AtomicU64>(), offset::END / 8) };
        let ring = Ring { words, descriptor };
        ring.header(header::VERSION).store(u64::from(VERSION), Ordering::Relaxed);
        ring.header(header::MAGIC).store(MAGIC, Ordering::Release);
        Ok(ring)
    }

    /// Address of the first word.
    pub fn words(&self) -> *mut AtomicU64 {
        self.words.as_ptr().cast_mut()
    }

    /// A word of the header.
    #[inline]
    pub fn header(&self, index: usize) -> &'static AtomicU64 {
        &self.words[index]
    }

    /// Entry `index` of the table at `offset`.
    #[inline]
    pub fn entry(&self, offset: usize, index: usize, words: usize) -> &'static [AtomicU64] {
        let first = offset / 8 + index * words;
        &self.words[first..first + words]
    }

    /// The words of an operation slot.
    #[inline]
    pub fn op(&self, slot: usize) -> &'static [AtomicU64; op::WORDS] {
        self.entry(offset::OPS, slot, op::WORDS).try_into().expect("an entry has WORDS words")
    }
}

/// Stores text as words, truncated or padded with zeros.
pub fn store_text(words: &[AtomicU64], text: &[u8]) {
    let chunks = text.chunks(8).map(|chunk| {
        let mut bytes = [0; 8];
        bytes[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(bytes)
    });
    for (word, value) in words.iter().zip(chunks.chain(std::iter::repeat(0))) {
        word.store(value, Ordering::Relaxed);
    }
}
