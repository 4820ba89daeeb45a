//! Bounds for text that people choose: it has to fit into a message, and two different texts stay different.

/// Longest name of a job, a node or an address, in bytes.
pub const MOST_NAME_BYTES: usize = 256;
/// Longest command line, in bytes.
pub const MOST_COMMAND_BYTES: usize = 4096;
/// Longest path, in bytes: the kernel takes no longer one.
pub const MOST_PATH_BYTES: usize = 4095;

/// The text, cut at a character boundary to at most `most` bytes. The cut ends with `…` and a hash of the whole text, so that two
/// texts that differ only behind the cut stay different. `most` must leave room for that: 11 bytes.
#[must_use]
pub fn shortened(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.into();
    }
    // FNV-1a: the hook, the launcher and the collector must agree on it.
    let hash = text.bytes().fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let mark = format!("…{hash:08x}");
    format!("{}{mark}", &text[..text.floor_char_boundary(most.saturating_sub(mark.len()))])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_at_a_character_and_stays_different_from_others() {
        assert_eq!(shortened("train", 32), "train");
        assert_eq!(shortened(&"x".repeat(32), 32).len(), 32);
        let long = |end: &str| shortened(&format!("{}{end}", "ü".repeat(100_000)), 256);
        let (one, other) = (long("a"), long("b"));
        assert!(one.len() <= 256 && one.len() > 250 && one.starts_with("üüü") && one.contains('…'), "{one}");
        assert_ne!(one, other);
        assert_eq!(one, long("a"));
    }
}
