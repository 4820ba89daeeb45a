//! The CPython in an object: the address of its runtime structure, the code of its evaluation loop,
//! and the layout of its version.

use std::{
    ops::Range,
    path::Path,
    sync::{Arc, OnceLock, PoisonError, RwLock},
};

use object::{
    LittleEndian, Object, ObjectSection,
    elf::{SHN_UNDEF, Sym64},
    read::elf::{ElfFile64, FileHeader, SectionHeader, Sym, SymbolTable},
};

use crate::{
    memory::{self, Snapshot},
    objects::bytes::exported_symbol,
};

use super::{InterpreterError, Layout, OFFSETS, layouts::LAYOUTS};

/// The function that runs Python code. Compilers split it into parts, such as
/// `_PyEval_EvalFrameDefault.cold`.
const EVAL_LOOP: &str = "_PyEval_EvalFrameDefault";
/// Name for a part of that function whose own name was stripped.
const UNNAMED_PART: &str = "_PyEval_EvalFrameDefault.cold";
const RUNTIME_SYMBOL: &[u8] = b"_PyRuntime";
/// A constant from 3.11 on.
const VERSION_SYMBOL: &[u8] = b"Py_Version";
/// Bytes of a section to search for the version.
const MAX_SEARCHED_BYTES: usize = 4 << 20;
/// Bytes at the start of the loop. A thread that executes one of them is about to publish a new
/// frame.
const PUBLISHING_BYTES: u64 = 0x200;

/// The interpreter in an object.
pub(crate) struct Runtime {
    /// Address of `_PyRuntime` in the file.
    pub address: u64,
    /// The layout of its version, once a process has revealed the version.
    layout: OnceLock<Arc<Layout>>,
    /// Its major, minor and micro version, if the object has a constant with it (from 3.11 on).
    pub version: Option<[u8; 3]>,
    /// Code of the interpreter's loop, as addresses in the file.
    eval_loop: Vec<Range<u64>>,
    /// A part of the loop without a name, once stacks have revealed it.
    unnamed_part: RwLock<Option<Range<u64>>>,
}

impl Runtime {
    /// Finds the interpreter of an object. `None` if it has none.
    pub(crate) fn find(elf: &ElfFile64<'_, LittleEndian>, path: &str) -> Option<Self> {
        let mut runtime = exported_symbol(elf, RUNTIME_SYMBOL);
        let mut eval_loop = Vec::new();
        // A program that an interpreter is linked into need not export anything.
        if runtime.is_some() || file_name(path).starts_with("python") || !is_shared(elf) {
            scan_symbols(elf, elf.elf_symbol_table(), &mut runtime, &mut eval_loop);
        }
        if runtime.is_none() {
            // From 3.11 on, the structure has a section of its own, so that tools find it in
            // stripped programs.
            runtime = elf.section_by_name(".PyRuntime").map(|section| section.address());
        }
        let address = runtime?;
        scan_symbols(elf, elf.elf_dynamic_symbol_table(), &mut runtime, &mut eval_loop);
        eval_loop.sort_by_key(|range| range.start);
        eval_loop.dedup();
        let version = exported_symbol(elf, VERSION_SYMBOL).and_then(|address| constant_version(elf, address));
        Some(Runtime { address, layout: OnceLock::new(), version, eval_loop, unnamed_part: RwLock::default() })
    }

    /// The layout of the version that a process runs. `tid` is a thread of the process; `bias` is
    /// the object's address in the process less its address in the file.
    pub(crate) fn layout<'a>(
        &self,
        tid: i32,
        elf: impl FnOnce() -> Option<ElfFile64<'a, LittleEndian>>,
        path: &str,
        bias: u64,
    ) -> Result<Arc<Layout>, InterpreterError> {
        if let Some(layout) = self.layout.get() {
            return Ok(Arc::clone(layout));
        }
        let runtime = self.address.wrapping_add(bias);
        let mut memory = Snapshot::new(tid);
        let minor = match debug_offsets_version(&mut memory, runtime) {
            Some(minor) => Some(minor),
            None => elf().and_then(|elf| minor_version(tid, &elf, path, bias)),
        };
        let layout = Arc::new(layout_of(minor.ok_or(InterpreterError::UnknownVersion)?, &mut memory, runtime)?);
        Ok(Arc::clone(self.layout.get_or_init(|| layout)))
    }

    /// Whether an address in the file belongs to the interpreter's loop.
    pub(crate) fn is_eval_loop(&self, address: u64) -> bool {
        self.eval_loop.iter().any(|range| range.contains(&address)) || self.is_unnamed_part(address)
    }

    fn is_unnamed_part(&self, address: u64) -> bool {
        self.unnamed_part
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .is_some_and(|part| part.contains(&address))
    }

    /// The name of a function that has no name in any symbol table.
    pub(crate) fn name(&self, address: u64) -> Option<&'static str> {
        self.is_unnamed_part(address).then_some(UNNAMED_PART)
    }

    /// Whether the code of the loop is known.
    pub(crate) fn has_eval_loop(&self) -> bool {
        !self.eval_loop.is_empty()
    }

    /// Whether a part of the loop was found through stacks.
    pub(crate) fn has_unnamed_part(&self) -> bool {
        self.unnamed_part.read().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Adds a function to the loop.
    pub(crate) fn set_unnamed_part(&self, part: Range<u64>) {
        *self.unnamed_part.write().unwrap_or_else(PoisonError::into_inner) = Some(part);
    }

    /// Whether the code at an address in the file publishes a frame. There, the state of the thread
    /// is about to change in more than one step.
    pub(crate) fn is_publishing_frame(&self, address: u64) -> bool {
        self.eval_loop.iter().any(|range| range.contains(&address) && address - range.start < PUBLISHING_BYTES)
    }
}

pub(crate) fn file_name(path: &str) -> &str {
    Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

fn is_shared(elf: &ElfFile64<'_, LittleEndian>) -> bool {
    // A library has a name that others link against. A program has none, even a
    // position-independent one.
    let table = elf.elf_dynamic_table();
    table.is_ok_and(|table| table.iter().any(|entry| entry.tag == object::elf::DT_SONAME))
}

fn scan_symbols<'a, Header>(
    elf: &ElfFile64<'_, LittleEndian>,
    table: &SymbolTable<'a, Header>,
    runtime: &mut Option<u64>,
    eval_loop: &mut Vec<Range<u64>>,
) where
    Header: FileHeader<Endian = LittleEndian, Sym = Sym64<LittleEndian>>,
{
    let endian = elf.endian();
    for symbol in table.iter() {
        let (start, size) = (symbol.st_value(endian), symbol.st_size(endian));
        if symbol.st_shndx(endian) == SHN_UNDEF || start == 0 {
            continue;
        }
        let name = table.symbol_name(endian, symbol).unwrap_or_default();
        if name == RUNTIME_SYMBOL {
            runtime.get_or_insert(start);
        } else if size > 0 && name.starts_with(EVAL_LOOP.as_bytes()) {
            eval_loop.push(start..start.saturating_add(size));
        }
    }
}

/// The version in a constant at this address in the file: `0x030b07f0` is 3.11.7.
fn constant_version(elf: &ElfFile64<'_, LittleEndian>, address: u64) -> Option<[u8; 3]> {
    let bytes = elf.sections().find_map(|section| section.data_range(address, 4).ok().flatten())?;
    let [_, micro, minor, major] = <[u8; 4]>::try_from(bytes).ok()?;
    (major == 3).then_some([major, minor, micro])
}

/// The minor version of a CPython up to 3.12.
fn minor_version(tid: i32, elf: &ElfFile64<'_, LittleEndian>, path: &str, bias: u64) -> Option<u8> {
    if let Some(address) = exported_symbol(elf, VERSION_SYMBOL) {
        let mut bytes = [0; 4];
        if matches!(memory::read(tid, address.wrapping_add(bias), &mut bytes), Ok(4)) && bytes[3] == 3 {
            return Some(bytes[2]);
        }
    }
    let name = file_name(path);
    let named = name.strip_prefix("libpython3.").or_else(|| name.strip_prefix("python3."));
    if let Some(minor) = named.and_then(leading_number) {
        return Some(minor);
    }
    // The interpreter builds sys.version in a variable of the program.
    elf.sections().filter(|section| section.kind() == object::SectionKind::UninitializedData).find_map(|section| {
        let size = section.elf_section_header().sh_size(elf.endian());
        let mut bytes = vec![0; usize::try_from(size).unwrap_or(MAX_SEARCHED_BYTES).min(MAX_SEARCHED_BYTES)];
        let read = memory::read(tid, section.address().wrapping_add(bias), &mut bytes).ok()?;
        parse_version(bytes.get(..read)?)
    })
}

/// Parses the minor version of `3.9.18 (main, Oct  1 2023, 12:00:00) \n[GCC 12.2.0]`.
fn parse_version(bytes: &[u8]) -> Option<u8> {
    const LONGEST: usize = 256;
    let starts = bytes.windows(2).enumerate().filter(|(_, two)| *two == b"3.").map(|(at, _)| at);
    starts.filter(|at| *at == 0 || bytes[at - 1] == 0).find_map(|at| {
        let text = bytes[at + 2..].split(|byte| *byte == 0).next()?;
        let text = std::str::from_utf8(&text[..text.len().min(LONGEST)]).ok()?;
        let minor = leading_number(text)?;
        let patch = text.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix('.')?;
        (patch.starts_with(|c: char| c.is_ascii_digit()) && text.contains(" (") && text.contains('[')).then_some(minor)
    })
}

fn leading_number(text: &str) -> Option<u8> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

/// First bytes of `_PyRuntime` from 3.13 on, and the offsets of the version after them and of
/// whether the build is a free-threaded one.
const COOKIE: u64 = u64::from_le_bytes(*b"xdebugpy");
const VERSION_OFFSET: u64 = 8;
const FREE_THREADED_OFFSET: u64 = 16;
/// A larger offset shows that the table is a different one than expected.
const MAX_OFFSET: u64 = 1 << 22;

/// The minor version of an interpreter that has a table of offsets.
fn debug_offsets_version(memory: &mut Snapshot, runtime: u64) -> Option<u8> {
    if memory.read_u64(OFFSETS, runtime).ok()? != COOKIE {
        return None;
    }
    let version = memory.read_u64(OFFSETS, runtime.wrapping_add(VERSION_OFFSET)).ok()?;
    (version >> 24 == 3).then_some((version >> 16) as u8)
}

/// The layout of one minor version, for the interpreter whose `_PyRuntime` is at `runtime`.
fn layout_of(minor: u8, memory: &mut Snapshot, runtime: u64) -> Result<Layout, InterpreterError> {
    let has_debug_offsets = debug_offsets_version(memory, runtime) == Some(minor);
    let flag = runtime.wrapping_add(FREE_THREADED_OFFSET);
    let free_threaded = has_debug_offsets && memory.read_u64(OFFSETS, flag)? != 0;
    let name = format!("{}CPython 3.{minor}", if free_threaded { "free-threaded " } else { "" });
    let builds = || LAYOUTS.iter().filter(|layout| layout.free_threaded == free_threaded);
    let Some(layout) = builds().find(|layout| layout.minor == minor) else {
        let minors = || builds().map(|layout| layout.minor);
        let (oldest, newest) = (minors().min().unwrap_or(0), minors().max().unwrap_or(0));
        return Err(InterpreterError::Unsupported { name, oldest, newest });
    };
    let Some(debug_offsets) = &layout.debug_offsets else { return Ok(layout.clone()) };
    if !has_debug_offsets {
        return Err(InterpreterError::NoDebugOffsets(name));
    }
    let layout = layout.with_debug_offsets(debug_offsets, memory, runtime)?;
    let plausible = layout.offsets().into_iter().all(|offset| offset < MAX_OFFSET);
    if plausible { Ok(layout) } else { Err(InterpreterError::UnknownDebugOffsets(name)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_versions() {
        let text = b"\x00\x003.9.18 (main, Oct  1 2023, 12:00:00) \n[GCC 12.2.0]\0more";
        assert_eq!(parse_version(text), Some(9));
        assert_eq!(parse_version(b"\x003.10.0rc1+ (tags/v3.10, x) \n[Clang 14]\0"), Some(10));
        assert_eq!(parse_version(b"\x003.14159 and (so) [on]\0"), None, "no patch level");
        assert_eq!(parse_version(b"a3.9.1 (x) [GCC]\0"), None, "within another text");
        assert_eq!(leading_number("9.so.1.0"), Some(9));
        assert_eq!(leading_number("x"), None);
    }
}
