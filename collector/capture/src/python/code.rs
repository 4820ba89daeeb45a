//! Code objects: the names, files and lines of frames.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use xpu_timer_proto::server::PySpyFrame;

use crate::{
    cpython::layout::Layout,
    memory::snapshot::{ReadError, Snapshot},
};

use super::{
    builtins::{Characters, characters, string},
    frames::InterpreterFrame,
    lines,
};

/// Maximum number of bytes of a line table, more than any real function has.
const MAX_LINE_TABLE_BYTES: u64 = 1 << 22;
const CODE: &str = "a code object";
/// The name and the file of the code with which 3.12 and 3.13 clean up after `__init__`. It has no
/// lines.
const CLEANUP_NAME: &str = "__init__";

/// The fields of one code object that frames need.
pub(super) struct Code {
    name: String,
    file: String,
    first_line: i32,
    lines: Vec<u8>,
}

/// The code objects read so far. An entry is correct for a thread that did not run during the read:
/// its frames keep their code alive, and the fields read here never change.
#[derive(Default)]
pub(super) struct CodeCache {
    known: HashMap<u64, Result<Arc<Code>, ReadError>>,
    /// Types with the name `code`. There is only one, but its address is not known in advance.
    types: HashSet<u64>,
}

impl CodeCache {
    /// The code object at an address.
    pub fn get(&mut self, memory: &mut Snapshot, layout: &Layout, address: u64) -> Result<Arc<Code>, ReadError> {
        if let Some(known) = self.known.get(&address) {
            return known.clone();
        }
        let code = self.read(memory, layout, address).map(Arc::new);
        self.known.insert(address, code.clone());
        code
    }

    fn read(&mut self, memory: &mut Snapshot, layout: &Layout, address: u64) -> Result<Code, ReadError> {
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
        })
    }
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
    /// The frame that runs this code. `None` for code that is in no file.
    pub fn frame(&self, layout: &Layout, address: u64, instruction: u64) -> Option<PySpyFrame> {
        let offset = match layout.code_bytes {
            Some(bytes) => instruction.wrapping_sub(address.wrapping_add(bytes)).cast_signed(),
            // The index of the last instruction, which 3.10 counts in units of two bytes.
            None => i64::from(instruction as i32) * if layout.minor >= 10 { 2 } else { 1 },
        };
        let line = lines::line(layout.minor, &self.lines, self.first_line, offset);
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
