//! The hash function of the open-addressing tables.

/// Knuth's multiplicative hash: 2^64 divided by the golden ratio. It spreads neighbouring keys such
/// as handles.
const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

/// Where the search for a key begins in a table of `PLACES` entries, a power of two. The highest
/// bits of the product depend on every bit of the key.
#[inline(always)]
pub fn home_slot<const PLACES: usize>(key: u64) -> usize {
    const { assert!(PLACES.is_power_of_two() && PLACES > 1) };
    (key.wrapping_mul(FACTOR) >> (64 - PLACES.trailing_zeros())) as usize % PLACES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_handles_spread_over_the_whole_table() {
        let used: std::collections::BTreeSet<usize> = (1..=1024).map(|handle| home_slot::<256>(handle * 64)).collect();
        assert!(used.len() > 240, "{}", used.len());
        assert_ne!(home_slot::<4096>(7), home_slot::<4096>(7 | 1 << 63), "also the highest bit counts");
    }
}
