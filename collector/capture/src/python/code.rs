//! Code objects: the names, files and lines of frames.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use xpu_timer_proto::server::PySpyFrame;

use crate::{
    cpython::Layout,
    memory::{ReadError, Snapshot},
};

use super::{
    builtins::{Characters, characters, string},
    frames::InterpreterFrame,
};

/// Maximum number of bytes of a line table, more than any real function has.
const MAX_LINE_TABLE_BYTES: u64 = 1 << 22;
/// Maximum number of copies of the instructions of a code object: one for each thread.
const MAX_COPIES: u64 = 1 << 16;
const CODE: &str = "a code object";
const COPIES: &str = "the copies of the instructions of a code object";
/// The name and the file of the code with which 3.12 and 3.13 clean up after `__init__`. It has no
/// lines.
const CLEANUP_NAME: &str = "__init__";

/// The fields of one code object that frames need.
pub(super) struct Code {
    name: String,
    file: String,
    first_line: i32,
    lines: Vec<u8>,
    instructions: Instructions,
}

/// Where the instructions of a code object are.
enum Instructions {
    /// Up to 3.10, frames have the index of their instruction instead of its address.
    Indexed,
    /// In the code object, from this address on.
    Inside(u64),
    /// In copies, from these addresses on, and their length in bytes. Each thread of a
    /// free-threaded build executes a copy of its own, which it makes when it needs one.
    Copied(Vec<u64>, u64),
}

impl Instructions {
    fn read(memory: &mut Snapshot, layout: &Layout, code: u64) -> Result<Self, ReadError> {
        let Some(inside) = layout.code_bytes else { return Ok(Instructions::Indexed) };
        let Some(copies) = layout.code_copies else { return Ok(Instructions::Inside(code.wrapping_add(inside))) };
        // The number of instructions is where other objects have the number of their items.
        let count = memory.read_u64(CODE, code.wrapping_add(layout.bytes_length))?;
        let array = memory.read_u64(CODE, code.wrapping_add(copies))?;
        let copies = memory.read_u64(COPIES, array)?;
        if copies > MAX_COPIES {
            return Err(ReadError { what: COPIES, address: array });
        }
        let mut starts = Vec::with_capacity(copies as usize);
        for index in 1..=copies {
            starts.push(memory.read_u64(COPIES, array.wrapping_add(index * 8))?);
        }
        // A thread that has not executed the code has no copy.
        starts.retain(|start| *start != 0);
        Ok(Instructions::Copied(starts, count.wrapping_mul(INSTRUCTION_BYTES)))
    }
}

/// Bytes of an instruction, from 3.6 on.
const INSTRUCTION_BYTES: u64 = 2;

/// The code objects read so far. An entry is correct for a thread that did not run during the read:
/// its frames keep their code alive, and the fields read here never change.
#[derive(Default)]
pub(super) struct CodeCache {
    known: HashMap<u64, Result<Arc<Code>, ReadError>>,
    /// The frames of code objects, by their instructions. Deep stacks repeat a few of them.
    frames: HashMap<(u64, u64), Option<PySpyFrame>>,
    /// Types with the name `code`. There is only one, but its address is not known in advance.
    types: HashSet<u64>,
}

impl CodeCache {
    /// The code object at an address.
    pub(super) fn get(&mut self, memory: &mut Snapshot, layout: &Layout, address: u64) -> Result<Arc<Code>, ReadError> {
        if let Some(known) = self.known.get(&address) {
            return known.clone();
        }
        let code = self.read(memory, layout, address).map(Arc::new);
        self.known.insert(address, code.clone());
        code
    }

    /// The frame at an instruction of a code object. `None` for code that is in no file.
    pub(super) fn frame(
        &mut self,
        memory: &mut Snapshot,
        layout: &Layout,
        (code, instruction): (u64, u64),
    ) -> Result<Option<PySpyFrame>, ReadError> {
        if let Some(known) = self.frames.get(&(code, instruction)) {
            return Ok(known.clone());
        }
        let found = self.get(memory, layout, code)?;
        if !found.locates(layout, instruction) {
            return Err(ReadError { what: COPIES, address: code });
        }
        let frame = found.frame(layout, instruction);
        self.frames.insert((code, instruction), frame.clone());
        Ok(frame)
    }

    /// Reads the code object at an address, even if it was read before.
    pub(super) fn read(&mut self, memory: &mut Snapshot, layout: &Layout, address: u64) -> Result<Code, ReadError> {
        let class = memory.read_u64(CODE, address.wrapping_add(layout.object_type))?;
        if !self.types.contains(&class) {
            // The name of a type is a C string. It is the first field after the object's header and
            // size.
            let name = memory.read_u64(CODE, class.wrapping_add(layout.object_size + 8))?;
            if memory.bytes(CODE, name, 5)? != b"code\0" {
                return Err(ReadError { what: CODE, address });
            }
            self.types.insert(class);
        }
        let mut field = |offset: u64| memory.read_u64(CODE, address.wrapping_add(offset));
        let (name, file, table) = (field(layout.code_name)?, field(layout.code_filename)?, field(layout.code_lines)?);
        let first_line = memory.read_u32(CODE, address.wrapping_add(layout.code_first_line))?.cast_signed();
        let length = memory.read_u64(CODE, table.wrapping_add(layout.bytes_length))?.min(MAX_LINE_TABLE_BYTES);
        Ok(Code {
            name: string(memory, layout, name)?,
            file: string(memory, layout, file)?,
            first_line,
            lines: memory.bytes("a line table", table.wrapping_add(layout.bytes_data), length as usize)?,
            instructions: Instructions::read(memory, layout, address)?,
        })
    }
}

/// The fields of a code object that name it, as a range of its memory: offset and length. While
/// they are unchanged, it is the same code object: memory of a freed one may hold another one
/// later.
pub(super) fn identity(layout: &Layout) -> (u64, usize) {
    let fields = [layout.code_name, layout.code_filename, layout.code_first_line, layout.code_lines];
    let first = fields.into_iter().min().unwrap_or(0);
    (first, (fields.into_iter().max().unwrap_or(0) + 8 - first) as usize)
}

/// Copies everything that the code objects of these frames need, with few system calls.
pub(super) fn fetch(memory: &mut Snapshot, layout: &Layout, frames: &[InterpreterFrame]) {
    let codes: HashSet<u64> = frames.iter().map(|frame| frame.code).collect();
    memory.fetch(codes.iter().map(|code| (*code, layout.code_bytes.unwrap_or(layout.code_lines) + 8)));
    let mut heads = Vec::with_capacity(codes.len() * 3);
    for code in &codes {
        for field in [layout.code_name, layout.code_filename, layout.code_lines] {
            heads.extend(memory.read_u64(CODE, code.wrapping_add(field)).map(|object| (object, field)));
        }
    }
    let head = layout.unicode_compact_data;
    memory.fetch(heads.iter().map(|(object, _)| (*object, head)));
    let mut bodies = Vec::with_capacity(heads.len());
    for (object, field) in heads {
        if field == layout.code_lines {
            let length = memory.read_u64(CODE, object.wrapping_add(layout.bytes_length));
            bodies.extend(
                length.map(|length| (object.wrapping_add(layout.bytes_data), length.min(MAX_LINE_TABLE_BYTES))),
            );
        } else {
            let found = characters(memory, layout, object);
            bodies.extend(found.map(|found: Characters| (found.address, found.length * found.width)));
        }
    }
    memory.fetch(bodies.into_iter());
}

impl Code {
    /// The path of its file.
    pub(super) fn file(&self) -> &str {
        &self.file
    }

    /// The offset in bytes of the last instruction of a frame. `None` if it is in no copy that is
    /// known.
    fn offset(&self, layout: &Layout, instruction: u64) -> Option<i64> {
        Some(match &self.instructions {
            // 3.10 counts in units of two bytes.
            Instructions::Indexed => i64::from(instruction as i32) * if layout.minor >= 10 { 2 } else { 1 },
            Instructions::Inside(start) => instruction.wrapping_sub(*start).cast_signed(),
            Instructions::Copied(starts, length) => {
                let mut offsets = starts.iter().map(|start| instruction.wrapping_sub(*start));
                offsets.find(|offset| offset < length)?.cast_signed()
            }
        })
    }

    /// Whether the line of a frame with this last instruction is known.
    pub(super) fn locates(&self, layout: &Layout, instruction: u64) -> bool {
        self.offset(layout, instruction).is_some()
    }

    /// The frame that runs this code. `None` for code that is in no file. The line is 0 if the
    /// instruction is in no copy that is known.
    pub(super) fn frame(&self, layout: &Layout, instruction: u64) -> Option<PySpyFrame> {
        let offset = self.offset(layout, instruction);
        let line = offset.map_or(0, |offset| line(layout.minor, &self.lines, self.first_line, offset));
        if self.name == CLEANUP_NAME && self.file == CLEANUP_NAME && line == 0 {
            return None;
        }
        Some(PySpyFrame {
            func_name: self.name.clone(),
            file_name: format!("{}:{line}", self.file),
            module: String::new(),
        })
    }
}

/// The line of the instruction at `offset` bytes, in a code object that starts at `first_line`.
/// CPython has used three formats of tables since 3.8.
fn line(minor: u8, table: &[u8], first_line: i32, offset: i64) -> i32 {
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
