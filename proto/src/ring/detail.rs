//! Detail on demand: the collector asks the hook to record every kernel, copy or matrix product as
//! an operation with events, for a limited time.
//!
//! The collector writes [`word`] into [`super::header::DETAIL`]. The hook's watcher takes it over
//! within a third of a second. Detail ends at its time, also if the collector has ended meanwhile.

use super::layout::header;

/// Kernels, with their launch configuration.
pub const KERNELS: u8 = 1;
/// Memory copies and memsets.
pub const COPIES: u8 = 2;
/// Matrix products and attentions with a known shape.
pub const MATMULS: u8 = 4;
/// All kinds.
pub const ALL: u8 = KERNELS | COPIES | MATMULS;

/// The bits of the word that contain the kinds. The other bits are those of the time.
const KINDS: u64 = 0xff;

/// Index of the header's word that [`word`] is written to.
pub const HEADER: usize = header::DETAIL;

/// The word that asks for detail of some kinds until a time: CLOCK_MONOTONIC nanoseconds, with a
/// resolution of 256. A word of 0 ends it.
#[must_use]
pub fn word(until_ns: u64, kinds: u8) -> u64 {
    until_ns & !KINDS | u64::from(kinds & ALL)
}

/// Whether a word asks for detail of a kind at this time.
#[inline]
#[must_use]
pub fn is_wanted(word: u64, kind: u8, now_ns: u64) -> bool {
    word & u64::from(kind) != 0 && now_ns < word & !KINDS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detail_is_wanted_of_its_kinds_until_its_time() {
        let until_ns = 5_000_000_000;
        let word = word(until_ns, KERNELS | MATMULS);
        assert!(is_wanted(word, KERNELS, until_ns - 256) && is_wanted(word, MATMULS, 0));
        assert!(!is_wanted(word, COPIES, 0) && !is_wanted(word, KERNELS, until_ns));
        assert!([KERNELS, COPIES, MATMULS].iter().all(|kind| !is_wanted(0, *kind, 0)));
        assert!(is_wanted(super::word(u64::MAX, 0xff), COPIES, u64::MAX / 2));
    }
}
