//! Limits for text that people choose: it must fit into a message, and different texts must stay
//! different.

/// Maximum length of the name of a job, a node or an address, in bytes.
pub const MOST_NAME_BYTES: usize = 256;
/// Maximum length of a command line, in bytes.
pub const MOST_COMMAND_BYTES: usize = 4096;
/// Maximum length of a path, in bytes: the limit of the kernel.
pub const MOST_PATH_BYTES: usize = 4095;

/// The text, cut at a character boundary to at most `most` bytes. The result ends with `…` and a
/// hash of the original text, so that two texts that differ only after the cut stay different.
/// `most` must be at least 11 bytes, the length of this ending.
#[must_use]
pub fn shortened(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.into();
    }
    // FNV-1a: hook, launcher and collector must agree on it.
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
