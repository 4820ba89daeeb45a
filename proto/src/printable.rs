//! The only filter between untrusted text and people.
//!
//! Programs that run here, and authors of dumps, choose the names of jobs, threads, files,
//! functions and nodes. Unfiltered, such a name could control a terminal, forge a log line, or
//! reverse the text after it. All terminals, logs, text files and pages get text through this
//! module, and only this module decides which characters are safe.

use std::{
    borrow::Cow,
    io::{self, Write},
};

/// Replaces unsafe characters. It is visible, so that two different names never look alike because
/// of it.
pub const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// Whether a character is invisible or affects the text around it: control characters (C0, DEL,
/// C1), direction marks, zero-width and other ignorable characters, tags, byte order marks, line
/// and paragraph separators, and noncharacters, which XML forbids.
#[must_use]
pub fn is_unsafe(character: char) -> bool {
    if (' '..='~').contains(&character) {
        return false;
    }
    character.is_control()
        || matches!(
            character,
            '\u{ad}'
                | '\u{34f}'
                | '\u{61c}'
                | '\u{115f}'..='\u{1160}'
                | '\u{17b4}'..='\u{17b5}'
                | '\u{180b}'..='\u{180f}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{3164}'
                | '\u{fdd0}'..='\u{fdef}'
                | '\u{fe00}'..='\u{fe0f}'
                | '\u{feff}'
                | '\u{ffa0}'
                | '\u{fff0}'..='\u{fffb}'
                | '\u{1bca0}'..='\u{1bca3}'
                | '\u{1d173}'..='\u{1d17a}'
                | '\u{e0000}'..='\u{e0fff}'
        )
        || u32::from(character) & 0xfffe == 0xfffe
}

/// The text with its first letter in upper case.
#[must_use]
pub fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// The replacement of a character: a space for line breaks and tabs, [`REPLACEMENT`] for all other
/// unsafe characters.
#[must_use]
pub fn shown(character: char) -> char {
    match character {
        '\t'..='\r' | '\u{85}' | '\u{2028}' | '\u{2029}' => ' ',
        other if is_unsafe(other) => REPLACEMENT,
        other => other,
    }
}

/// A value for use within a line: without line breaks.
#[must_use]
pub fn line(text: &str) -> Cow<'_, str> {
    filtered(text, shown)
}

/// A text of several lines. Its line breaks stay, so values in it must go through [`line()`] first.
#[must_use]
pub fn text(text: &str) -> Cow<'_, str> {
    filtered(text, |character| if character == '\n' { '\n' } else { shown(character) })
}

/// Whether no character needs a look at it, which is true of nearly all text. The loop has no exit,
/// so that the compiler checks many bytes at once.
fn is_printable_ascii(text: &[u8]) -> bool {
    text.iter().fold(true, |printable, byte| printable & (b' '..=b'~').contains(byte))
}

fn filtered(text: &str, shown: impl Fn(char) -> char) -> Cow<'_, str> {
    if is_printable_ascii(text.as_bytes()) || text.chars().all(|letter| shown(letter) == letter) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.chars().map(shown).collect())
}

/// JSON that is safe on a terminal and has the same meaning: unsafe characters in its strings
/// become escapes. Outside of strings, the only such characters are the line breaks and tabs of the
/// layout, which stay.
#[must_use]
pub fn json(json: &str) -> Cow<'_, str> {
    let escaped = |letter: char| is_unsafe(letter) && !matches!(letter, '\n' | '\r' | '\t');
    if is_printable_ascii(json.as_bytes()) || !json.chars().any(escaped) {
        return Cow::Borrowed(json);
    }
    let mut text = String::with_capacity(json.len() + 64);
    for letter in json.chars() {
        if escaped(letter) {
            for unit in letter.encode_utf16(&mut [0; 2]) {
                text.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            text.push(letter);
        }
    }
    Cow::Owned(text)
}

/// A writer that filters JSON like [`json`]. A buffer belongs in front of it: a serializer makes
/// millions of writes of a few bytes.
#[derive(Debug)]
pub struct Json<W> {
    out: W,
    /// The start of a character whose end is in the next write.
    start: Vec<u8>,
}

impl<W: Write> Json<W> {
    /// Filters what is written to `out`.
    pub fn new(out: W) -> Self {
        Json { out, start: Vec::new() }
    }

    fn filter(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(json(&String::from_utf8_lossy(bytes)).as_bytes())
    }
}

impl<W: Write> Write for Json<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.start.is_empty() && is_printable_ascii(bytes) {
            self.out.write_all(bytes)?;
            return Ok(bytes.len());
        }
        let mut text = std::mem::take(&mut self.start);
        text.extend_from_slice(bytes);
        if let Err(error) = std::str::from_utf8(&text)
            && error.error_len().is_none()
        {
            self.start = text.split_off(error.valid_up_to());
        }
        self.filter(&text)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let start = std::mem::take(&mut self.start);
        self.filter(&start)?;
        self.out.flush()
    }
}

/// A writer for logs in which each write is one line. The filter comes after the formatter, so no
/// call site can forget it.
#[derive(Debug)]
pub struct Lines<W>(pub W);

impl<W: Write> Write for Lines<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let record = String::from_utf8_lossy(bytes);
        let (record, end) = record.strip_suffix('\n').map_or((&*record, ""), |record| (record, "\n"));
        self.0.write_all(format!("{}{end}", line(record)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

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

/// Wraps a text at spaces to a width in characters. A word that is too long stands alone.
#[must_use]
pub fn wrapped(text: &str, width: usize) -> String {
    let (mut lines, mut used) = (String::new(), 0);
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if used > 0 {
            let fits = used + 1 + length <= width;
            lines.push(if fits { ' ' } else { '\n' });
            used = if fits { used + 1 } else { 0 };
        }
        lines.push_str(word);
        used += length;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One character of each kind: a terminal sequence, C1, DEL, directions, zero width, a tag, a
    /// byte order mark, separators.
    const HOSTILE: &str =
        "a\u{1b}[31m\u{9b}2J\u{7f}\u{202e}\u{2066}\u{200e}\u{61c}\u{200b}\u{feff}\u{e0041}\u{ad}\u{3164}\u{0}z";

    #[test]
    fn control_characters_are_replaced() {
        let seen = line(HOSTILE);
        assert!(!seen.chars().any(is_unsafe), "{seen:?}");
        assert_eq!(seen.chars().count(), HOSTILE.chars().count(), "each becomes one visible character");
        assert!(seen.starts_with("a\u{fffd}[31m") && seen.ends_with('z'), "{seen:?}");
        assert_eq!(line("a\nb\r\tc\u{2028}d\u{85}e"), "a b  c d e");
        assert_eq!(text("a\nb\rc\u{1b}"), "a\nb c\u{fffd}");
        assert!(('\u{0}'..=char::MAX).filter(|letter| is_unsafe(*letter)).all(|letter| !is_unsafe(shown(letter))));
    }

    #[test]
    fn printable_text_is_unchanged() {
        for plain in ["", "train-7b", "обучение", "学習", "a:b/c\\d\"e", "naïve ½ …", "🙂"] {
            assert!(matches!(line(plain), Cow::Borrowed(same) if same == plain), "{plain}");
        }
    }

    #[test]
    fn json_is_escaped_across_write_boundaries() {
        let safe = json("{\n  \"a\": \"x\u{202e}\u{7f}\u{e0041}y\"\n}");
        assert_eq!(safe, "{\n  \"a\": \"x\\u202e\\u007f\\udb40\\udc41y\"\n}");
        let text = "\"ü\u{202e}\"\n".as_bytes();
        for at in 0..text.len() {
            let mut written = Json::new(Vec::new());
            written.write_all(&text[..at]).unwrap();
            written.write_all(&text[at..]).unwrap();
            assert_eq!(written.out, "\"ü\\u202e\"\n".as_bytes(), "two writes, divided at {at}");
        }
        let mut incomplete = Json::new(Vec::new());
        incomplete.write_all(b"a\xe2\x80").unwrap();
        incomplete.flush().unwrap();
        assert_eq!(incomplete.out, "a\u{fffd}".as_bytes());
        assert!(matches!(json("{\n\t\"a\": \"ü\"}\r\n"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_log_record_is_one_line() {
        let mut log = Lines(Vec::new());
        log.write_all(b"job \"a\n2026-01-01 ERROR forged\x1b[2J\" \xff\n").unwrap();
        log.write_all(b"two\n").unwrap();
        let log = String::from_utf8(log.0).unwrap();
        assert_eq!(log, "job \"a 2026-01-01 ERROR forged\u{fffd}[2J\" \u{fffd}\ntwo\n");
    }

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

    #[test]
    fn texts_wrap_at_spaces() {
        assert_eq!(wrapped("ab  cd ef", 5), "ab cd\nef");
        assert_eq!(wrapped("aaaa b cc", 3), "aaaa\nb\ncc");
    }
}
