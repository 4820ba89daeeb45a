//! The bytes of an ELF object and of its sections, which may be compressed.

use std::{
    cell::Cell,
    fs::File,
    ops::{Deref, Range},
};

use gimli::{EndianSlice, LittleEndian};
use object::{
    Object, ObjectSection,
    elf::SHN_UNDEF,
    read::elf::{ElfFile64, Sym as _},
};

use super::mapped_file::MappedFile;

pub(crate) type Slice<'a> = EndianSlice<'a, LittleEndian>;
pub(crate) type Elf<'a> = ElfFile64<'a, object::LittleEndian>;

/// The bytes of an object.
pub(crate) enum Bytes {
    File(MappedFile),
    Memory(Vec<u8>),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::File(map) => map,
            Bytes::Memory(bytes) => bytes,
        }
    }
}

impl Bytes {
    /// Maps a whole file.
    pub(crate) fn from_file(file: &File) -> std::io::Result<Self> {
        MappedFile::new(file).map(Bytes::File)
    }

    /// Whether a page of the file was missing when it was read.
    pub(crate) fn has_missing_pages(&self) -> bool {
        matches!(self, Bytes::File(map) if map.has_missing_pages())
    }
}

/// The address of an exported symbol, found through the hash table that the loader uses.
pub(crate) fn exported_symbol(elf: &Elf<'_>, name: &[u8]) -> Option<u64> {
    let (endian, data) = (elf.endian(), elf.data());
    let symbols = elf.elf_dynamic_symbol_table();
    if let Ok(Some((table, _))) = elf.elf_section_table().gnu_hash(endian, data) {
        let hash = object::elf::gnu_hash(name);
        let versions = Default::default();
        let (_, symbol) = table.find(endian, name, hash, None, symbols, &versions)?;
        return (symbol.st_shndx(endian) != SHN_UNDEF).then(|| symbol.st_value(endian));
    }
    let found = symbols.iter().find(|symbol| {
        symbol.st_shndx(endian) != SHN_UNDEF && symbols.symbol_name(endian, symbol).is_ok_and(|found| found == name)
    });
    found.map(|symbol| symbol.st_value(endian))
}

/// The bytes of a debug section, which may be compressed.
pub(crate) enum SectionBytes {
    /// The range of the section in the file.
    InFile(Range<usize>),
    Decompressed(Vec<u8>),
}

/// Number of bytes that may still be decompressed for one purpose. The size that a header declares
/// is compared with it before anything is decompressed, and the result is never longer than
/// declared.
pub(crate) struct Budget(Cell<u64>);

impl Budget {
    pub(crate) fn new(bytes: u64) -> Self {
        Budget(Cell::new(bytes))
    }

    fn take(&self, bytes: u64) -> Option<()> {
        self.0.set(self.0.get().checked_sub(bytes)?);
        Some(())
    }
}

impl SectionBytes {
    /// The bytes of a section. `None` if there is no such section, if its decompressed size exceeds
    /// the rest of the budget, or if it is shorter than its header declares.
    pub(crate) fn of(elf: &Elf<'_>, name: &str, budget: &Budget) -> Option<Self> {
        let section = elf.section_by_name(name).filter(|section| section.size() > 0)?;
        let place = section.compressed_file_range().ok()?;
        if place.format == object::CompressionFormat::None {
            let start = usize::try_from(place.offset).ok()?;
            let end = start.checked_add(usize::try_from(place.compressed_size).ok()?)?;
            return (end <= elf.data().len()).then_some(SectionBytes::InFile(start..end));
        }
        budget.take(place.uncompressed_size)?;
        Some(SectionBytes::Decompressed(section.uncompressed_data().ok()?.into_owned()))
    }

    /// The bytes of the section. `file` is the file that the section was found in.
    pub(crate) fn in_file<'a>(&'a self, file: &'a [u8]) -> &'a [u8] {
        match self {
            SectionBytes::InFile(range) => &file[range.clone()],
            SectionBytes::Decompressed(bytes) => bytes,
        }
    }
}

impl Default for SectionBytes {
    fn default() -> Self {
        SectionBytes::InFile(0..0)
    }
}
