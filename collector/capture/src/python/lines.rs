//! Source lines of instructions, from the three formats of tables that CPython has used since 3.8.

/// The line of the instruction at `offset` bytes, in a code object that starts at `first_line`.
pub(super) fn line(minor: u8, table: &[u8], first_line: i32, offset: i64) -> i32 {
    match minor {
        ..=9 => pairs(table, first_line, offset, false),
        10 => pairs(table, first_line, offset, true),
        11.. => locations(table, first_line, offset),
    }
}

/// Parses pairs of increments, of the offset in bytes and of the line. Up to 3.9, the line changes
/// before the bytes; in 3.10, the line is that of the bytes, and -128 marks code without a line.
fn pairs(table: &[u8], first_line: i32, offset: i64, lines_first: bool) -> i32 {
    let mut line = first_line;
    let mut end = 0;
    for pair in table.chunks_exact(2) {
        let (bytes, lines) = (i64::from(pair[0]), i32::from(pair[1].cast_signed()));
        if !lines_first {
            end += bytes;
            if end > offset {
                break;
            }
            line = line.wrapping_add(lines);
            continue;
        }
        if lines == -128 {
            end += bytes;
            continue;
        }
        line = line.wrapping_add(lines);
        end += bytes;
        if end > offset {
            break;
        }
    }
    line
}

/// Parses entries whose first byte is `1cccclll`: the kind of the entry, and the number of code
/// units that it covers. The fields of the kind follow.
fn locations(table: &[u8], first_line: i32, offset: i64) -> i32 {
    const NONE: u8 = 15;
    const LONG: u8 = 14;
    const NO_COLUMNS: u8 = 13;
    const ONE_LINE: std::ops::RangeInclusive<u8> = 10..=12;
    let mut line = first_line;
    let mut end = 0;
    let mut bytes = table.iter().copied();
    while let Some(head) = bytes.next() {
        end += (i64::from(head & 7) + 1) * 2;
        let kind = head >> 3 & 15;
        let lines = match kind {
            NONE => 0,
            LONG => {
                let lines = signed(&mut bytes);
                for _ in ["end line", "column", "end column"] {
                    unsigned(&mut bytes);
                }
                lines
            }
            NO_COLUMNS => signed(&mut bytes),
            kind if ONE_LINE.contains(&kind) => {
                bytes.nth(1);
                i32::from(kind - ONE_LINE.start())
            }
            _ => {
                bytes.next();
                0
            }
        };
        line = line.wrapping_add(lines);
        if end > offset {
            break;
        }
    }
    line
}

/// Parses a varint: six bits in each byte, lowest first. The seventh bit is set if more bytes
/// follow.
fn unsigned(bytes: &mut impl Iterator<Item = u8>) -> u32 {
    let mut number = 0u32;
    let mut shift = 0;
    for byte in bytes {
        number |= u32::from(byte & 63).checked_shl(shift).unwrap_or(0);
        shift += 6;
        if byte & 64 == 0 {
            break;
        }
    }
    number
}

/// Parses a signed varint, whose lowest bit is the sign.
fn signed(bytes: &mut impl Iterator<Item = u8>) -> i32 {
    let number = unsigned(bytes);
    let magnitude = (number >> 1).cast_signed();
    if number & 1 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_3_8() {
        // compile("a = 1\nb = 2\n\n\nc = 3", "", "exec").co_lnotab
        let table = [4, 1, 4, 3];
        let lines: Vec<i32> = [0, 2, 4, 6, 8, 10].map(|offset| line(8, &table, 1, offset)).to_vec();
        assert_eq!(lines, [1, 1, 2, 2, 5, 5]);
        assert_eq!(line(9, &[2, 0xff], 10, 4), 9, "backwards");
        assert_eq!(line(9, &table, 1, -1), 1, "not begun");
    }

    #[test]
    fn tables_of_3_10() {
        // The same source with compile(...).co_linetable
        let table = [4, 0, 4, 1, 8, 3];
        let lines: Vec<i32> = [0, 2, 4, 6, 8, 10].map(|offset| line(10, &table, 1, offset)).to_vec();
        assert_eq!(lines, [1, 1, 2, 2, 5, 5]);
        assert_eq!(line(10, &[2, 1, 2, 0x80, 2, 1], 1, 4), 3, "bytes without a line are counted");
    }

    #[test]
    fn any_bytes_give_some_line() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u8
        };
        for _ in 0..5000 {
            let table: Vec<u8> = (0..random() % 40).map(|_| random()).collect();
            for minor in [8, 10, 11] {
                for offset in [-2, 0, i64::from(random()), i64::MAX] {
                    line(minor, &table, i32::MAX, offset);
                }
            }
        }
    }

    #[test]
    fn locations_of_3_11() {
        // A long entry of 2 bytes without a line change; one line further without columns for 4
        // bytes; a short entry of 2 bytes; two lines further with columns; one line back.
        let table = [0xf0, 0, 1, 0, 0, 0xe9, 2, 0x80, 0, 0xe0, 0, 0, 0xe8, 3];
        let lines: Vec<i32> = [-2, 0, 2, 4, 6, 8, 10].map(|offset| line(11, &table, 7, offset)).to_vec();
        assert_eq!(lines, [7, 7, 8, 8, 8, 10, 9]);
        assert_eq!(line(11, &[0xf0, 0x7f], 7, 0), 7 - 31, "a table that ends too early");
    }
}
