//! The bytes of an ELF object and of its sections, which may be compressed.

use std::{
    cell::Cell,
    fs::File,
    ops::{Deref, Range},
};

use gimli::{EndianSlice, LittleEndian};
use object::{Object, ObjectSection, read::elf::ElfFile64};

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
    pub fn of_file(file: &File) -> std::io::Result<Self> {
        MappedFile::new(file).map(Bytes::File)
    }

    /// Whether a page of the file was gone when it was looked at.
    pub fn is_harmed(&self) -> bool {
        matches!(self, Bytes::File(map) if map.is_harmed())
    }
}

/// The bytes of a section that only debuggers need, which may be compressed.
pub(crate) enum SectionBytes {
    /// Where they lie in the file.
    Within(Range<usize>),
    Unpacked(Vec<u8>),
}

/// Bytes that may yet be unpacked for one purpose. What a header declares is compared with it before anything is unpacked, and no more than
/// what was declared is ever taken.
pub(crate) struct Budget(Cell<u64>);

impl Budget {
    pub fn new(bytes: u64) -> Self {
        Budget(Cell::new(bytes))
    }

    fn take(&self, bytes: u64) -> Option<()> {
        self.0.set(self.0.get().checked_sub(bytes)?);
        Some(())
    }
}

impl SectionBytes {
    /// `None` when there is no such section, when it would be greater than what is left of the budget once it is unpacked, and when it is
    /// shorter than its header declares.
    pub fn of(elf: &Elf<'_>, name: &str, budget: &Budget) -> Option<Self> {
        let section = elf.section_by_name(name).filter(|section| section.size() > 0)?;
        let place = section.compressed_file_range().ok()?;
        if place.format == object::CompressionFormat::None {
            let start = usize::try_from(place.offset).ok()?;
            let end = start.checked_add(usize::try_from(place.compressed_size).ok()?)?;
            return (end <= elf.data().len()).then_some(SectionBytes::Within(start..end));
        }
        budget.take(place.uncompressed_size)?;
        Some(SectionBytes::Unpacked(section.uncompressed_data().ok()?.into_owned()))
    }

    /// `file` is what the section was found in.
    pub fn in_file<'a>(&'a self, file: &'a [u8]) -> &'a [u8] {
        match self {
            SectionBytes::Within(range) => &file[range.clone()],
            SectionBytes::Unpacked(bytes) => bytes,
        }
    }
}

impl Default for SectionBytes {
    fn default() -> Self {
        SectionBytes::Within(0..0)
    }
}
