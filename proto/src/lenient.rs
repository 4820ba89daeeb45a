//! Decodes messages from files and other programs without trusting their texts.
//!
//! Protobuf strings must be UTF-8, and `prost` rejects a message with an invalid one. However, the
//! kernel cuts thread names after 15 bytes, paths may contain any bytes, and the original tool
//! writes both unchanged. An invalid name must not discard the rank: [`decode`] replaces the
//! invalid bytes by U+FFFD. All code that reads an external message uses it.

use std::borrow::Cow;

use prost::{
    DecodeError, Message,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};

/// The type of a field that may contain text.
#[derive(Debug)]
pub enum Field {
    /// A string, or several.
    Text,
    /// A message, or several.
    Message(&'static Shape),
}

/// The fields of a message that are texts or contain messages, by number.
pub type Shape = [(u32, Field)];

/// A message with a known shape. `cargo xtask bless` generates the implementations.
pub trait Shaped: Message + Default {
    /// Its shape.
    const SHAPE: &'static Shape;
}

/// The maximum nesting that `prost` accepts.
const MAX_DEPTH: usize = 100;
/// Wire types of protobuf.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const BYTES: u64 = 2;
const FIXED32: u64 = 5;

/// Decodes a message as `prost` does, but replaces invalid UTF-8 in its texts.
///
/// # Errors
/// The errors of [`Message::decode`].
pub fn decode<M: Shaped>(bytes: &[u8]) -> Result<M, DecodeError> {
    M::decode(bytes).or_else(|error| match repaired(bytes, M::SHAPE, MAX_DEPTH) {
        Cow::Owned(repaired) => M::decode(&repaired[..]),
        Cow::Borrowed(_) => Err(error),
    })
}

/// Calls `part` with the number and the bytes of each text and each message in a message, in their
/// order. A long list can thus be read without memory for all of it.
///
/// # Errors
/// The errors of [`Message::decode`], and the first error of `part`.
pub fn each_part<'a, E: From<DecodeError>>(
    message: &'a [u8],
    mut part: impl FnMut(u32, &'a [u8]) -> Result<(), E>,
) -> Result<(), E> {
    each_field(message, |number, _, value| value.map_or(Ok(()), |value| part(number, value)))
}

/// Calls `field` with the number of each field of a message, its whole encoding, and the bytes of a
/// text or a message.
///
/// # Errors
/// The errors of [`each_part`].
pub fn each_field<'a, E: From<DecodeError>>(
    mut message: &'a [u8],
    mut field: impl FnMut(u32, &'a [u8], Option<&'a [u8]>) -> Result<(), E>,
) -> Result<(), E> {
    while !message.is_empty() {
        let begin = message;
        let (number, wire_type) = decode_key(&mut message)?;
        let rest = message;
        skip_field(wire_type, number, &mut message, DecodeContext::default())?;
        let mut value = &rest[..rest.len() - message.len()];
        let has_length = wire_type == WireType::LengthDelimited;
        if has_length {
            // The rest of the field is as long as this.
            decode_varint(&mut value)?;
        }
        field(number, &begin[..begin.len() - message.len()], has_length.then_some(value))?;
    }
    Ok(())
}

/// The message with valid texts. Parts that cannot be parsed are unchanged, so that `prost` reports
/// them.
fn repaired<'a>(message: &'a [u8], shape: &Shape, depth: usize) -> Cow<'a, [u8]> {
    let mut out = Vec::new();
    // `out` contains everything before this position.
    let mut copied = 0;
    let mut rest = message;
    while let Some((key, value)) = varint(rest) {
        rest = match key & 7 {
            VARINT => match varint(value) {
                Some((_, rest)) => rest,
                None => break,
            },
            FIXED64 | FIXED32 => match value.get(if key & 7 == FIXED64 { 8 } else { 4 }..) {
                Some(rest) => rest,
                None => break,
            },
            BYTES => {
                // Position of the length, which changes with the value.
                let at = message.len() - value.len();
                let Some((length, value)) = varint(value) else { break };
                let Some((value, rest)) = usize::try_from(length).ok().and_then(|at| value.split_at_checked(at)) else {
                    break;
                };
                let changed = match shape.iter().find(|(number, _)| u64::from(*number) == key >> 3) {
                    Some((_, Field::Text)) => text(value),
                    Some((_, Field::Message(inner))) if depth > 0 => repaired(value, inner, depth - 1),
                    _ => Cow::Borrowed(value),
                };
                if let Cow::Owned(changed) = changed {
                    out.extend_from_slice(&message[copied..at]);
                    prost::encode_length_delimiter(changed.len(), &mut out).expect("a vector grows");
                    out.extend_from_slice(&changed);
                    copied = message.len() - rest.len();
                }
                rest
            }
            // Groups have no value of their own; our messages have none.
            _ => value,
        };
    }
    if copied == 0 {
        return Cow::Borrowed(message);
    }
    out.extend_from_slice(&message[copied..]);
    Cow::Owned(out)
}

fn text(bytes: &[u8]) -> Cow<'_, [u8]> {
    match String::from_utf8_lossy(bytes) {
        Cow::Borrowed(_) => Cow::Borrowed(bytes),
        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
    }
}

/// Reads a number, and returns the rest.
fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0u64;
    for (index, byte) in bytes.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return Some((value, &bytes[index + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        server::{ChildProcess, ProcessSample, PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace, Stacktrace},
        v1::{FlightRecord, Operation},
    };

    /// A text that can be found in the bytes.
    const MARK: &str = "name-XX-name";

    fn everywhere() -> Stacktrace {
        let frame =
            PstackFrame { func_name: MARK.into(), file_name: MARK.into(), module: MARK.into(), ..Default::default() };
        let native = PstackStacktrace {
            thread_name: MARK.into(),
            frames: vec![frame.clone(), frame],
            kernel_stack: vec![MARK.into(), "poll".into()],
            ..Default::default()
        };
        let python = PySpyStacktrace {
            thread_name: MARK.into(),
            frames: vec![PySpyFrame { func_name: MARK.into(), file_name: MARK.into(), module: MARK.into() }],
            ..Default::default()
        };
        let sample = ProcessSample {
            stacktrace: vec![native.clone()],
            py_stacktrace: vec![python.clone()],
            errors: vec![MARK.into()],
            ..Default::default()
        };
        Stacktrace {
            stacktrace: vec![native],
            py_stacktrace: vec![python],
            process_state: MARK.into(),
            pstack_stderr: MARK.into(),
            pid: -7,
            rank: 3,
            children: vec![ChildProcess { command: MARK.into(), samples: vec![sample.clone()], ..Default::default() }],
            first_sample: Some(sample.clone()),
            last_sample: Some(sample),
            flight_record: Some(FlightRecord {
                operations: vec![Operation { function: MARK.into(), seq: 9, ..Default::default() }],
                ..Default::default()
            }),
            node: MARK.into(),
            command: MARK.into(),
            ..Default::default()
        }
    }

    #[test]
    fn invalid_utf8_changes_only_its_own_field() {
        let message = everywhere();
        let bytes = message.encode_to_vec();
        let places: Vec<usize> =
            (0..bytes.len()).filter(|at| bytes[*at..].starts_with(MARK.as_bytes())).map(|at| at + 5).collect();
        assert!(places.len() > 25, "{}", places.len());
        for at in &places {
            let mut bytes = bytes.clone();
            bytes[*at..*at + 2].copy_from_slice(b"\xff\xe6");
            assert!(Stacktrace::decode(&bytes[..]).is_err());
            let decoded: Stacktrace = decode(&bytes).unwrap();
            // Nothing else changes: with the original name, the message is equal.
            let mut text = format!("{decoded:?}");
            assert_eq!(text.matches("name-\u{fffd}\u{fffd}-name").count(), 1);
            text = text.replace("name-\u{fffd}\u{fffd}-name", MARK);
            assert_eq!(text, format!("{message:?}"));
        }
        let mut all = bytes.clone();
        places.iter().for_each(|at| all[*at] = 0xff);
        let decoded: Stacktrace = decode(&all).unwrap();
        assert_eq!(decoded.pid, -7);
        assert_eq!(format!("{decoded:?}").matches('\u{fffd}').count(), places.len());
        assert_eq!(decode::<Stacktrace>(&bytes).unwrap(), message);
    }

    #[test]
    fn parts_are_those_of_the_message() {
        let message = everywhere();
        let bytes = message.encode_to_vec();
        let mut parts = Vec::new();
        let add = |number, bytes: &[u8]| -> Result<(), DecodeError> {
            parts.push((number, bytes.to_vec()));
            Ok(())
        };
        each_part(&bytes, add).unwrap();
        let of = |wanted| parts.iter().filter(move |(number, _)| *number == wanted).map(|(_, bytes)| &bytes[..]);
        let native: Vec<_> = of(1).map(|part| PstackStacktrace::decode(part).unwrap()).collect();
        assert_eq!(native, message.stacktrace);
        assert_eq!(of(11).collect::<Vec<_>>(), [MARK.as_bytes()]);
        for cut in 0..bytes.len() {
            let whole = Stacktrace::decode(&bytes[..cut]).is_ok();
            let read = each_part(&bytes[..cut], |_, _| Ok::<(), DecodeError>(()));
            assert!(read.is_ok() || !whole, "cut at {cut}");
        }
    }

    #[test]
    fn padded_lengths_are_read_and_truncated_messages_fail() {
        // Field 11, process_state, with a length of three bytes.
        let long = [0x5a, 0x82, 0x80, 0x00, b'a', 0xff, 0x18, 5];
        let decoded: Stacktrace = decode(&long).unwrap();
        assert_eq!((decoded.process_state.as_str(), decoded.pid), ("a\u{fffd}", 5));
        let bytes = everywhere().encode_to_vec();
        for cut in 0..bytes.len() {
            let mut bytes = bytes[..cut].to_vec();
            let whole = Stacktrace::decode(&bytes[..]).is_ok();
            if let Some(byte) = bytes.iter_mut().rev().find(|byte| **byte == b'X') {
                *byte = 0xff;
            }
            assert_eq!(decode::<Stacktrace>(&bytes).is_ok(), whole, "cut at {cut}");
        }
    }
}
