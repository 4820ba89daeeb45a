//! Finds functions of a library that is linked statically into an object. Their names are only in
//! the symbol table of the object's file, if that was not stripped.

use std::{
    collections::{HashMap, HashSet},
    ffi::OsStr,
    fs::File,
    io,
    os::unix::{ffi::OsStrExt, fs::FileExt},
    path::Path,
    sync::OnceLock,
};

use xpu_timer_proto::family::Library;

use crate::{
    interpose::inline::role::Role,
    runtime::linker::{
        elf::{Object, Symbol},
        function::Function,
    },
};

/// Files with more bytes of symbols and names are not read.
const MAX_BYTES: u64 = 64 << 20;

/// Reading more than this would delay the start of a process too much. It is done only for an
/// object with device code, which every collective or BLAS library contains.
const MAX_BYTES_OF_ANY: u64 = 256 << 10;

/// Maximum size of the section names.
const MAX_BYTES_OF_SECTIONS: u64 = 64 << 10;

/// Names of the wanted functions.
fn wanted() -> &'static HashSet<&'static [u8]> {
    static WANTED: OnceLock<HashSet<&'static [u8]>> = OnceLock::new();
    WANTED.get_or_init(|| {
        let linked = |function: &&Function| matches!(function.library, Library::Collectives | Library::Blas);
        crate::runtime::linker::function_table::functions()
            .filter(linked)
            .map(|function| function.name.to_bytes())
            .collect()
    })
}

/// The wanted functions in an object's symbol table.
pub struct Symbols(HashMap<&'static [u8], Symbol>);

impl Symbols {
    /// `None` when the object cannot contain any: a statically linked library loads the driver
    /// itself, so its object imports dlopen.
    pub fn of(object: &Object, is_program: bool, role: &Role) -> Option<Self> {
        if !role.may_hide_copies() || !object.imported().any(|(name, _)| name == c"dlopen") {
            return None;
        }
        let path = if is_program { OsStr::new("/proc/self/exe") } else { OsStr::from_bytes(object.path().to_bytes()) };
        let found = read(Path::new(path), object).ok()?;
        (!found.is_empty()).then_some(Symbols(found))
    }

    /// The function with this name.
    pub fn find(&self, function: &Function) -> Option<Symbol> {
        self.0.get(function.name.to_bytes()).copied()
    }
}

/// The used fields of an ELF section header.
struct Section {
    name: u32,
    kind: u32,
    link: u32,
    offset: u64,
    size: u64,
}

const SYMBOL_TABLE: u32 = 2;
const SYMBOL_BYTES: usize = size_of::<libc::Elf64_Sym>();

/// Reads with pread instead of mapping the file: a mapped file that is truncated would raise SIGBUS
/// in the host.
fn read(path: &Path, object: &Object) -> io::Result<HashMap<&'static [u8], Symbol>> {
    let file = File::open(path)?;
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0)?;
    let (at, each, count) = (word(&header, 0x28), u64::from(half(&header, 0x3a)), u64::from(half(&header, 0x3c)));
    let mut found = HashMap::new();
    if header[..5] != *b"\x7fELF\x02" || each != 64 || count == 0 {
        return Ok(found);
    }
    let mut headers = vec![0; (each * count) as usize];
    file.read_exact_at(&mut headers, at)?;
    let sections: Vec<Section> = headers
        .chunks_exact(64)
        .map(|header| Section {
            name: word(header, 0) as u32,
            kind: word(header, 4) as u32,
            link: word(header, 0x28) as u32,
            offset: word(header, 0x18),
            size: word(header, 0x20),
        })
        .collect();
    let Some(table) = sections.iter().find(|section| section.kind == SYMBOL_TABLE) else { return Ok(found) };
    let Some(names) = sections.get(table.link as usize) else { return Ok(found) };
    let contents = |section: &Section| {
        let mut bytes = vec![0; section.size as usize];
        file.read_exact_at(&mut bytes, section.offset).map(|()| bytes)
    };
    let holds_device_code = || {
        let names = sections.get(usize::from(half(&header, 0x3e))).filter(|names| names.size < MAX_BYTES_OF_SECTIONS);
        let names = names.and_then(|names| contents(names).ok()).unwrap_or_default();
        sections.iter().any(|section| is_of_device(names.get(section.name as usize..).unwrap_or_default()))
    };
    let bytes = table.size.saturating_add(names.size);
    if bytes > MAX_BYTES || bytes > MAX_BYTES_OF_ANY && !holds_device_code() {
        return Ok(found);
    }
    let (symbols, names) = (contents(table)?, contents(names)?);
    for symbol in symbols.chunks_exact(SYMBOL_BYTES) {
        let name = names.get(word(symbol, 0) as u32 as usize..).unwrap_or_default();
        // Most names are excluded by their first letters.
        let may_be =
            [&b"nccl"[..], b"mccl", b"cublas", b"hipblas", b"mcblas"].iter().any(|start| name.starts_with(start));
        if !may_be {
            continue;
        }
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let Some(name) = wanted().get(name) else { continue };
        let symbol = libc::Elf64_Sym {
            st_name: 0,
            st_info: symbol[4],
            st_other: symbol[5],
            st_shndx: half(symbol, 6),
            st_value: word(symbol, 8),
            st_size: word(symbol, 16),
        };
        if let Some(symbol) = object.function(&symbol) {
            found.insert(*name, symbol);
        }
    }
    Ok(found)
}

/// Whether a section contains device code, by the name at the start of `names`: `.nv_fatbin`,
/// `.hip_fatbin`.
fn is_of_device(names: &[u8]) -> bool {
    let name = names.split(|byte| *byte == 0).next().unwrap_or_default();
    name.to_ascii_lowercase().windows(6).any(|part| part == b"fatbin")
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |chunk| u64::from_le_bytes(*chunk))
}

fn half(bytes: &[u8], at: usize) -> u16 {
    bytes[at..].first_chunk().map_or(0, |chunk| u16::from_le_bytes(*chunk))
}
