//! One ELF object that processes have mapped, with its unwind tables.

use std::{
    collections::HashMap,
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use gimli::{
    BaseAddresses, CfaRule, DebugFrame, EhFrame, EhFrameHdr, LittleEndian, RegisterRule, UnwindContext, UnwindSection,
    UnwindTableRow,
};
use object::{
    Object, ObjectSection,
    elf::{PF_X, PT_LOAD},
    read::elf::{ElfFile64, ProgramHeader},
};

use xpu_timer_proto::procfs::Mapping;

use crate::{cpython::runtime::Runtime, error::Error};

use super::{
    bytes::{Budget, Bytes, Elf, SectionBytes, Slice},
    debug_file, target_files,
};

/// A larger table is not decompressed. Whole libraries have other unwind rules.
const MAX_DEBUG_FRAME_BYTES: u64 = 64 << 20;
/// Maximum number of cached rows of one object. Deep stacks and many ranks pass the same few
/// hundred addresses.
const MAX_CACHED_ROWS: usize = 8192;

#[derive(Debug, Clone, Copy)]
struct Load {
    offset: u64,
    size: u64,
    address: u64,
    executable: bool,
}

#[derive(Debug, Clone, Default)]
struct Section {
    range: Range<usize>,
    address: u64,
}

/// `.debug_frame`, and the separate debug file if the section is there.
struct DebugFrames {
    file: Option<Bytes>,
    section: SectionBytes,
}

/// One ELF object with its unwind tables.
pub(crate) struct Image {
    /// Identifies the object within this process.
    pub id: u64,
    /// Path of the object as the target sees it.
    pub path: String,
    /// Root folder of a process that sees the object under this path. Files that belong to the
    /// object are searched there.
    pub root: PathBuf,
    pub bytes: Bytes,
    pub build_id: Option<Vec<u8>>,
    loads: Vec<Load>,
    eh_frame: Option<Section>,
    eh_frame_hdr: Option<Section>,
    debug_frame: OnceLock<Option<DebugFrames>>,
    /// Whether its file system may not answer.
    remote: bool,
    text: u64,
    got: u64,
    /// Time of the last use, by the clock of [`super::Images`].
    pub last_used: AtomicU64,
    rows: RwLock<HashMap<u64, Option<Arc<UnwindRow>>>>,
    /// Whether its file is known to have changed.
    stale: AtomicBool,
    /// Whether it was rebuilt from memory although its file exists: the file could not be read, or
    /// is not a complete object.
    pub has_unreadable_file: bool,
    /// The interpreter in the object, if any, once it was searched for.
    python: OnceLock<Option<Arc<Runtime>>>,
    /// The version of the library in the object, if known, once it was searched for.
    pub version: OnceLock<Option<String>>,
}

/// The rules that recover the caller's registers at one address.
pub(crate) struct UnwindRow {
    pub cfa: CfaRule<usize>,
    /// By DWARF register number.
    pub registers: Vec<(usize, RegisterRule<usize>)>,
    /// Whether the frame is that of a signal handler.
    pub signal: bool,
    pub section: RuleSection,
}

impl UnwindRow {
    fn new(row: &UnwindTableRow<usize>, signal: bool, section: RuleSection) -> Self {
        let registers = row.registers().map(|(register, rule)| (usize::from(register.0), rule.clone())).collect();
        UnwindRow { cfa: row.cfa().clone(), registers, signal, section }
    }
}

impl Image {
    pub(crate) fn from_file(file: &File, path: &str, root: PathBuf, remote: bool) -> Result<Self, Error> {
        let failed = |error: std::io::Error| Error::Image { path: path.into(), reason: error.to_string() };
        let mut image = Self::parse(Bytes::from_file(file).map_err(failed)?, path, root)?;
        image.remote = remote;
        if remote {
            // Load the pages now, where a timeout applies and where an error is reported as an
            // error.
            image.populate().map_err(failed)?;
        }
        Ok(image)
    }

    /// Whether the file was modified since it was opened. Then the bytes read so far may be a
    /// mixture of two versions.
    pub(crate) fn has_changed(&self) -> bool {
        let Bytes::File(map) = &self.bytes else { return false };
        let path = self.path.strip_suffix(" (deleted)").unwrap_or(&self.path);
        // Do not query a file system that may not answer.
        let file = if self.remote { None } else { target_files::open_within(&self.root, Path::new(path)) };
        let now = file.and_then(|file| file.metadata().ok());
        let changed = now.map_or(map.has_missing_pages(), |now| map.has_changed(&now));
        self.stale.fetch_or(changed, Ordering::Relaxed);
        changed
    }

    /// Whether its file system may not answer.
    pub(crate) fn is_remote(&self) -> bool {
        self.remote
    }

    /// Whether the image is known to differ from its file.
    pub(crate) fn is_stale(&self) -> bool {
        self.bytes.has_missing_pages() || self.stale.load(Ordering::Relaxed)
    }

    /// Reads the tables that names and unwinding need.
    fn populate(&self) -> std::io::Result<()> {
        let Bytes::File(map) = &self.bytes else { return Ok(()) };
        let Some(elf) = self.elf() else { return Ok(()) };
        for name in [".symtab", ".strtab", ".dynsym", ".dynstr", ".gnu_debugdata", ".eh_frame", ".eh_frame_hdr"] {
            let range = elf.section_by_name(name).and_then(|section| section.file_range());
            let Some((start, size)) = range.filter(|(start, size)| start.saturating_add(*size) <= map.len() as u64)
            else {
                continue;
            };
            map.populate(start as usize, size as usize)?;
        }
        Ok(())
    }

    pub(crate) fn parse(bytes: Bytes, path: &str, root: PathBuf) -> Result<Self, Error> {
        let failed = |reason: String| Error::Image { path: path.into(), reason };
        let elf = Elf::parse(&*bytes).map_err(|error| failed(error.to_string()))?;
        let endian = elf.endian();
        let loads = elf.elf_program_headers().iter().filter(|header| header.p_type(endian) == PT_LOAD);
        let loads = loads
            .map(|header| Load {
                offset: header.p_offset(endian),
                size: header.p_filesz(endian),
                address: header.p_vaddr(endian),
                executable: header.p_flags(endian).0 & PF_X.0 != 0,
            })
            .collect();
        let section = |name: &str| {
            let section = elf.section_by_name(name)?;
            let (offset, size) = section.file_range()?;
            let range = usize::try_from(offset).ok()?..usize::try_from(offset.checked_add(size)?).ok()?;
            // Compilers never compress these sections.
            let plain = section.compressed_file_range().ok()?.format == object::CompressionFormat::None;
            (range.end <= bytes.len() && plain).then_some(Section { range, address: section.address() })
        };
        let address = |name: &str| elf.section_by_name(name).map_or(0, |section| section.address());
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Ok(Image {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            path: path.to_string(),
            root,
            build_id: elf.build_id().ok().flatten().map(<[u8]>::to_vec),
            loads,
            eh_frame: section(".eh_frame"),
            eh_frame_hdr: section(".eh_frame_hdr"),
            debug_frame: OnceLock::new(),
            remote: false,
            text: address(".text"),
            got: address(".got"),
            last_used: AtomicU64::new(0),
            rows: RwLock::default(),
            stale: AtomicBool::new(false),
            has_unreadable_file: false,
            python: OnceLock::new(),
            version: OnceLock::new(),
            bytes,
        })
    }

    /// Difference between an address in the process and the address in the file, for one mapping of
    /// the object. Segments need not start at a page, and two segments may share one. So the
    /// segment whose first page is the mapping's first page decides.
    pub(crate) fn bias(&self, mapping: &Mapping) -> Option<u64> {
        let first_page = |load: &&Load| load.offset & !0xfff == mapping.offset;
        let within = |load: &&Load| {
            load.offset & !0xfff <= mapping.offset && mapping.offset < load.offset.saturating_add(load.size)
        };
        let usable = || self.loads.iter().filter(|load| load.executable == mapping.executable);
        let load = usable().find(first_page).or_else(|| usable().find(within));
        let load = load.or_else(|| self.loads.iter().find(within))?;
        Some(mapping.start.wrapping_sub(mapping.offset).wrapping_add(load.offset).wrapping_sub(load.address))
    }

    fn slice(&self, section: &Section) -> &[u8] {
        &self.bytes[section.range.clone()]
    }

    /// `.debug_frame`: rules that only debuggers need, for code without other rules. It is loaded
    /// when such code is first seen.
    fn debug_frame(&self) -> Option<&[u8]> {
        let of = |elf: &Elf<'_>| SectionBytes::of(elf, ".debug_frame", &Budget::new(MAX_DEBUG_FRAME_BYTES));
        let frames = self.debug_frame.get_or_init(|| {
            if let Some(section) = self.elf().as_ref().and_then(of) {
                return Some(DebugFrames { file: None, section });
            }
            // The folders that may contain a debug file are on the object's file system.
            let file = if self.remote { None } else { self.debug_file() }?;
            let section = ElfFile64::<object::LittleEndian>::parse(&*file).ok().as_ref().and_then(of)?;
            Some(DebugFrames { file: Some(file), section })
        });
        let DebugFrames { file, section } = frames.as_ref()?;
        Some(section.in_file(file.as_ref().unwrap_or(&self.bytes)))
    }

    /// The unwind rules at `address`. `None` if no table covers it.
    pub(crate) fn row(&self, address: u64, context: &mut UnwindContext<usize>) -> Option<Arc<UnwindRow>> {
        if let Some(known) = self.rows.read().unwrap_or_else(PoisonError::into_inner).get(&address) {
            return known.clone();
        }
        let found = self.find_row(address, context).map(Arc::new);
        if self.bytes.has_missing_pages() {
            // Rows decoded from zeros are meaningless.
            return None;
        }
        let mut rows = self.rows.write().unwrap_or_else(PoisonError::into_inner);
        if rows.len() >= MAX_CACHED_ROWS {
            rows.clear();
        }
        rows.insert(address, found.clone());
        found
    }

    /// Range of the function that contains an address, from the unwind tables. Compilers may split
    /// one function of the source into several such ranges.
    pub(crate) fn function(&self, address: u64) -> Option<Range<u64>> {
        let bases = self.bases();
        let eh_frame = EhFrame::new(self.slice(self.eh_frame.as_ref()?), LittleEndian);
        let fde = match self.eh_frame_table(&bases, &eh_frame, address) {
            Some(found) => found,
            None => eh_frame.fde_for_address(&bases, address, EhFrame::cie_from_offset),
        };
        let fde = fde.ok().filter(|fde| fde.contains(address))?;
        Some(fde.initial_address()..fde.end_address())
    }

    /// Range of the function that contains an address, from the symbol tables.
    pub(crate) fn symbol(&self, address: u64) -> Option<Range<u64>> {
        use object::{Object, ObjectSymbol};
        let elf = self.elf()?;
        let mut symbols = elf.dynamic_symbols().chain(elf.symbols()).filter(ObjectSymbol::is_definition);
        symbols.find_map(|symbol| {
            let range = symbol.address()..symbol.address().checked_add(symbol.size())?;
            range.contains(&address).then_some(range)
        })
    }

    /// Number of cached rows.
    pub(crate) fn row_count(&self) -> usize {
        self.rows.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Clears the cache of rows.
    pub(crate) fn forget_rows(&self) {
        *self.rows.write().unwrap_or_else(PoisonError::into_inner) = HashMap::new();
    }

    /// Bytes of the object's own copy. The pages of a mapped file belong to the system's cache.
    pub(crate) fn copied_bytes(&self) -> usize {
        match &self.bytes {
            Bytes::File(_) => 0,
            Bytes::Memory(bytes) => bytes.len(),
        }
    }

    fn find_row(&self, address: u64, context: &mut UnwindContext<usize>) -> Option<UnwindRow> {
        let bases = self.bases();
        if let Some(section) = &self.eh_frame {
            let eh_frame = EhFrame::new(self.slice(section), LittleEndian);
            let fde = match self.eh_frame_table(&bases, &eh_frame, address) {
                Some(found) => found,
                None => eh_frame.fde_for_address(&bases, address, EhFrame::cie_from_offset),
            };
            if let Ok(fde) = fde {
                let signal = fde.is_signal_trampoline();
                let row = fde.unwind_info_for_address(&eh_frame, &bases, context, address).ok()?;
                return Some(UnwindRow::new(row, signal, RuleSection::EhFrame));
            }
        }
        let debug_frame = DebugFrame::new(self.debug_frame()?, LittleEndian);
        let fde = debug_frame.fde_for_address(&bases, address, DebugFrame::cie_from_offset).ok()?;
        let signal = fde.is_signal_trampoline();
        let row = fde.unwind_info_for_address(&debug_frame, &bases, context, address).ok()?;
        Some(UnwindRow::new(row, signal, RuleSection::DebugFrame))
    }

    fn eh_frame_table<'a>(
        &'a self,
        bases: &BaseAddresses,
        eh_frame: &EhFrame<Slice<'a>>,
        address: u64,
    ) -> Option<gimli::Result<gimli::FrameDescriptionEntry<Slice<'a>>>> {
        let bytes = self.slice(self.eh_frame_hdr.as_ref()?);
        let header = EhFrameHdr::new(bytes, LittleEndian).parse(bases, 8).ok()?;
        let table = header.table()?;
        // gimli multiplies the number of rows without a check. The header of a damaged file may
        // claim any number of them.
        if table.iter(bases).size_hint().1? > bytes.len() {
            return None;
        }
        let entry = table.lookup(address, bases).ok()?;
        // gimli subtracts these two without a check. The table of a damaged file may point before
        // its section.
        if entry.direct().ok()? < header.eh_frame_ptr().direct().ok()? {
            return None;
        }
        let fde = table
            .pointer_to_offset(entry)
            .and_then(|offset| eh_frame.fde_from_offset(bases, offset, EhFrame::cie_from_offset));
        Some(fde.and_then(
            |fde| {
                if fde.contains(address) { Ok(fde) } else { Err(gimli::Error::NoUnwindInfoForAddress) }
            },
        ))
    }

    fn bases(&self) -> BaseAddresses {
        let address = |section: &Option<Section>| section.as_ref().map_or(0, |section| section.address);
        BaseAddresses::default()
            .set_eh_frame(address(&self.eh_frame))
            .set_eh_frame_hdr(address(&self.eh_frame_hdr))
            .set_text(self.text)
            .set_got(self.got)
    }

    /// The bytes of an expression in a rule.
    pub(crate) fn expression(
        &self,
        expression: &gimli::UnwindExpression<usize>,
        section: RuleSection,
    ) -> Option<gimli::Expression<Slice<'_>>> {
        match section {
            RuleSection::EhFrame => {
                expression.get(&EhFrame::new(self.slice(self.eh_frame.as_ref()?), LittleEndian)).ok()
            }
            RuleSection::DebugFrame => expression.get(&DebugFrame::new(self.debug_frame()?, LittleEndian)).ok(),
        }
    }

    /// The separate debug file of the object. `None` if it has none.
    pub(crate) fn debug_file(&self) -> Option<Bytes> {
        debug_file::debug_file(self.elf().as_ref(), &self.path, self.build_id.as_deref(), &self.root)
    }

    /// The CPython in the object. `None` if it has none.
    pub(crate) fn python(&self) -> Option<Arc<Runtime>> {
        self.python.get_or_init(|| Runtime::find(&self.elf()?, &self.path).map(Arc::new)).clone()
    }

    /// The CPython in the object, if [`Image::python`] has found one.
    pub(crate) fn known_python(&self) -> Option<&Runtime> {
        self.python.get()?.as_deref()
    }

    /// Parses the headers. Each call parses anew, which takes a few microseconds and borrows
    /// nothing.
    pub(crate) fn elf(&self) -> Option<Elf<'_>> {
        ElfFile64::<object::LittleEndian>::parse(&*self.bytes).ok()
    }
}

/// The table that a row came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RuleSection {
    EhFrame,
    DebugFrame,
}
