//! Scans loaded objects, and replaces the functions that need an inline hook: those that no symbol
//! reaches, because the object binds them to itself or contains them statically.

use std::{
    collections::{HashMap, HashSet},
    ffi::{CStr, OsStr},
    fs::File,
    io,
    os::unix::{ffi::OsStrExt, fs::FileExt},
    path::Path,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use xpu_timer_proto::family::{FAMILIES, Library};

use crate::{
    interpose::inline::{
        engine::{self, ENGINE, Engine, Refusal},
        symbol_binding,
    },
    runtime::linker::{
        elf::{self, LinkMap, Object, Symbol, own_base},
        function::{Function, is_wrapper},
    },
};

/// The objects that were scanned, in the order of the linker's list, and the functions that were
/// replaced in them.
static STATE: Mutex<ScanState> = Mutex::new(ScanState { objects: Vec::new(), hooks: Vec::new() });

struct ScanState {
    objects: Vec<LoadedObject>,
    hooks: Vec<Hook>,
}

/// An object: its link map and its load address.
type LoadedObject = (usize, usize);

/// A function that was replaced.
struct Hook {
    object: LoadedObject,
    function: &'static Function,
    slot: usize,
}

/// Scans the objects that are new in the linker's list. Called while the list cannot change.
pub(crate) fn scan_new_objects() {
    let Ok(mut known) = STATE.try_lock() else { return };
    let known = &mut *known;
    let mut count = 0;
    // SAFETY: the list does not change now.
    for (at, map) in unsafe { elf::maps() }.enumerate() {
        count = at + 1;
        // SAFETY: an object of the list, which does not change now.
        let place = unsafe { place_of(map) };
        if known.objects.get(at) != Some(&place) {
            known.forget_gone();
            if known.objects.get(at) != Some(&place) {
                known.objects.insert(at, place);
                scan_object(known, place, map, at == 0);
                // SAFETY: `map` is in the list, and the linker has not bound the object yet.
                unsafe { symbol_binding::bind_deepbind_imports(map) };
                // SAFETY: `map` is in the list, and none of its code runs yet, or the process is
                // starting.
                unsafe { symbol_binding::unbind_weak_references(map) };
            }
        }
    }
    if known.objects.len() > count {
        known.forget_gone();
    }
}

/// # Safety
/// `map` is in the linker's list.
unsafe fn place_of(map: *const LinkMap) -> LoadedObject {
    // SAFETY: by the contract of this function.
    (map as usize, unsafe { (*map).base })
}

impl ScanState {
    /// Removes unloaded objects, and frees the slots of their functions.
    fn forget_gone(&mut self) {
        // SAFETY: the list does not change now.
        let present: Vec<LoadedObject> = unsafe { elf::maps().map(|map| place_of(map)) }.collect();
        self.objects.retain(|place| present.contains(place));
        self.hooks.retain(|hook| {
            let stays = present.contains(&hook.object);
            if !stays {
                hook.function.free_slot(hook.slot);
            }
            stays
        });
    }
}

fn scan_object(known: &mut ScanState, place: LoadedObject, map: *const LinkMap, is_program: bool) {
    // SAFETY: an object of the list, which does not change now.
    let Some(object) = (unsafe { Object::of(map) }) else { return };
    if object.base == own_base() || object.moves_code {
        return;
    }
    let role = Role::of(&object, is_program);
    let mut unexported = StaticSymbols::of(&object, is_program, &role);
    if unexported.is_none() && !role.is_program && !role.is_symbolic {
        return;
    }
    for function in crate::runtime::linker::function::functions() {
        let symbol = match (object.exported(function.name), &mut unexported) {
            (Some(symbol), _) if role.hides_exported(function.library) => symbol,
            (None, Some(symbols)) => match symbols.find(function) {
                Some(symbol) => symbol,
                None => continue,
            },
            _ => continue,
        };
        match replace(&object, function, symbol) {
            Ok(slot) => known.hooks.push(Hook { object: place, function, slot }),
            Err(_) => function.mark_hidden_copy(),
        }
    }
}

/// Replaces a function, and returns the slot of its original.
fn replace(object: &Object, function: &'static Function, symbol: Symbol) -> Result<usize, Refusal> {
    if !object.holds_code(symbol.address) || !object.holds_code(symbol.address + symbol.size.max(1) - 1) {
        return Err(Refusal::Start);
    }
    if is_wrapper(symbol.address as *mut _) {
        return Err(Refusal::Start);
    }
    // SAFETY: code of a loaded object, as checked above.
    let code = unsafe { std::slice::from_raw_parts(symbol.address as *const u8, symbol.size) };
    // The mark for indirect branches stays, which does nothing else. A uprobe on it may come and
    // go.
    let kept = if code.starts_with(&engine::ENDBR64) { engine::ENDBR64.len() } else { 0 };
    let (code, entry) = (&code[kept..], symbol.address + kept);
    engine::check(code, entry as u64)?;
    let (slot, wrapper) = function.spare_slot().ok_or(Refusal::Engine)?;
    let mut publish = |original: *const ()| function.fill_slot(slot, original.cast_mut().cast());
    // SAFETY: the object has just been mapped, or the process has one thread. The code was checked,
    // and the wrapper belongs to a function of this name.
    let replaced = unsafe { ENGINE.replace(entry, wrapper, &mut publish) };
    match replaced {
        Ok(()) => Ok(slot),
        Err(refusal) => {
            function.free_slot(slot);
            Err(refusal)
        }
    }
}

/// The functions that are replaced (`XPU_TIMER_INLINE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Level {
    /// Nothing.
    Off = 1,
    /// Functions that cannot be reached otherwise.
    Auto = 2,
    /// Also functions of the driver and the runtime where these libraries bind to themselves. An
    /// internal launch of the driver belongs to a launch that the hook sees anyway, so this is for
    /// investigations.
    All = 3,
}

pub(crate) static LEVEL: AtomicU32 = AtomicU32::new(Level::Off as u32);

/// The role of a loaded object for the inline hooks.
pub(crate) struct Role {
    pub is_program: bool,
    pub is_symbolic: bool,
    /// It is a library of a device family.
    is_family: bool,
}

impl Role {
    pub(crate) fn of(object: &Object, is_program: bool) -> Self {
        let soname = object.soname();
        let is_one_of = |sonames: &[&CStr]| sonames.iter().any(|name| name.to_bytes() == soname);
        let is_family =
            FAMILIES.iter().any(|family| Library::ALL.iter().any(|library| is_one_of(family.sonames(*library))));
        Role { is_program, is_symbolic: object.is_symbolic, is_family }
    }

    /// Whether calls of an exported function of this library can bypass every preloaded symbol.
    pub(crate) fn hides_exported(&self, library: Library) -> bool {
        match library {
            // The program is searched before preloaded libraries.
            Library::Collectives | Library::Blas => self.is_program || self.is_symbolic,
            Library::Driver | Library::Runtime => {
                self.is_symbolic && self.is_family && LEVEL.load(Ordering::Relaxed) == Level::All as u32
            }
            _ => false,
        }
    }

    /// Whether the object may contain copies of functions that it does not export.
    pub(crate) fn may_hide_copies(&self) -> bool {
        !self.is_family
    }
}

/// Files with more bytes of symbols and names are not read.
const MAX_BYTES: u64 = 64 << 20;

/// Reading more than this would delay the start of a process too much. It is done only for an
/// object with device code, which every collective or BLAS library contains.
const MAX_BYTES_OF_ANY: u64 = 256 << 10;

/// Maximum size of the section names.
const MAX_BYTES_OF_SECTIONS: u64 = 64 << 10;

/// Names of the functions that a static library may contain.
fn statically_linked_names() -> &'static HashSet<&'static [u8]> {
    static NAMES: OnceLock<HashSet<&'static [u8]>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let linked = |function: &&Function| matches!(function.library, Library::Collectives | Library::Blas);
        crate::runtime::linker::function::functions().filter(linked).map(|function| function.name.to_bytes()).collect()
    })
}

/// Functions of a library that is linked statically into an object. Their names are only in the
/// symbol table of the object's file, if that was not stripped.
pub(crate) struct StaticSymbols(HashMap<&'static [u8], Symbol>);

impl StaticSymbols {
    /// `None` when the object cannot contain any: a statically linked library loads the driver
    /// itself, so its object imports dlopen.
    pub(crate) fn of(object: &Object, is_program: bool, role: &Role) -> Option<Self> {
        if !role.may_hide_copies() || !object.imported().any(|(name, _)| name == c"dlopen") {
            return None;
        }
        let path = if is_program { OsStr::new("/proc/self/exe") } else { OsStr::from_bytes(object.path().to_bytes()) };
        let found = read_symbol_table(Path::new(path), object).ok()?;
        (!found.is_empty()).then_some(StaticSymbols(found))
    }

    /// The function with this name.
    pub(crate) fn find(&self, function: &Function) -> Option<Symbol> {
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
fn read_symbol_table(path: &Path, object: &Object) -> io::Result<HashMap<&'static [u8], Symbol>> {
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
        let Some(name) = statically_linked_names().get(name) else { continue };
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
