//! The text that the program wrote last to its standard error, in the ring: a rank that fails
//! usually says why, and then ends before anybody could read its memory. Also its uncaught
//! exceptions, where the hook listens to them. Nothing here makes a system call, takes a lock or
//! allocates.

use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, Ordering};

use xpu_timer_proto::ring::{offset, stderr};

use crate::runtime::os::{clock, process::PROCESS};

/// The words of the ring. Unlike [`PROCESS`], a forked child keeps them: it writes to the ring of
/// its parent until it has its own.
static RING_WORDS: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());

/// Keeps the text in this ring from now on. `words` are never unmapped.
pub(crate) fn keep_in(words: *mut AtomicU64) {
    RING_WORDS.store(words, Ordering::Release);
}

/// Whether texts are kept.
pub(crate) fn is_kept() -> bool {
    !RING_WORDS.load(Ordering::Acquire).is_null()
}

/// Keeps the end of a text that the program has written.
pub(crate) fn note(text: &[u8]) {
    let words = RING_WORDS.load(Ordering::Acquire);
    if words.is_null() {
        return;
    }
    add(words, if is_child() { stderr::CHILDREN } else { stderr::OWN }, text);
}

/// Keeps an exception that nobody caught. Those of forked children are not kept.
pub(crate) fn note_uncaught(text: &[u8]) {
    let words = RING_WORDS.load(Ordering::Acquire);
    if !words.is_null() && !is_child() {
        add(words, stderr::UNCAUGHT, text);
    }
}

/// Whether this is a forked child without a ring of its own.
fn is_child() -> bool {
    PROCESS.ring_words.load(Ordering::Relaxed).is_null()
}

/// Adds the end of a text to an entry of the ring with these words.
fn add(words: *mut AtomicU64, entry: usize, text: &[u8]) {
    // SAFETY: the ring has `offset::END` bytes and is never unmapped, and the entry lies in it.
    let words = unsafe { words.add(offset::STDERR / 8 + entry * stderr::WORDS) };
    // SAFETY: text and header lie in the entry. Only this function writes the text, byte by byte.
    let (header, kept) = unsafe {
        let text = words.add(stderr::TEXT).cast::<AtomicU8>();
        (std::slice::from_raw_parts(words, stderr::TEXT), std::slice::from_raw_parts(text, stderr::TEXT_BYTES))
    };
    let first = header[stderr::BYTES].fetch_add(text.len() as u64, Ordering::Relaxed);
    let skipped = text.len().saturating_sub(stderr::TEXT_BYTES);
    for (index, byte) in text.iter().enumerate().skip(skipped) {
        kept[(first as usize).wrapping_add(index) % stderr::TEXT_BYTES].store(*byte, Ordering::Relaxed);
    }
    header[stderr::LAST_NS].store(clock::coarse_now_ns(), Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::recorder::Recorder;

    #[test]
    fn the_last_text_is_kept_and_that_of_children_is_apart() {
        let recorder = Recorder::for_test();
        let read = |entry: usize| {
            let read_at = |at: u64, buffer: &mut [u8]| {
                for (index, chunk) in buffer.chunks_exact_mut(8).enumerate() {
                    // SAFETY: the reader stays inside the ring.
                    let word = unsafe { &*recorder.ring.words().add(at as usize / 8 + index) };
                    chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
                }
                Ok(())
            };
            xpu_timer_proto::ring::read_last_text(read_at, entry).unwrap().map(|last| last.text)
        };
        keep_in(recorder.ring.words());
        // The tests of other modules may have started a recorder in this process.
        let entry = if PROCESS.ring_words.load(Ordering::Relaxed).is_null() { stderr::CHILDREN } else { stderr::OWN };
        note(b"first line\n");
        note(b"ValueError: bad\n");
        assert_eq!(read(entry).unwrap(), b"first line\nValueError: bad\n");
        assert_eq!(read(1 - entry), None);
        let long: Vec<u8> = (0..3 * stderr::TEXT_BYTES + 77).map(|index| b'a' + (index % 23) as u8).collect();
        note(&long[..stderr::TEXT_BYTES / 2]);
        note(&long[stderr::TEXT_BYTES / 2..]);
        assert_eq!(read(entry).unwrap(), long[long.len() - stderr::TEXT_BYTES..]);
        RING_WORDS.store(std::ptr::null_mut(), Ordering::Release);
    }
}
