//! Source lines and inlined functions, from the DWARF of an object or of its separate debug file.

use std::{
    fmt,
    ops::{Deref, Range},
    sync::Arc,
    time::{Duration, Instant},
};

use gimli::{EndianReader, RunTimeEndian};
use object::{Object, ObjectSection, read::elf::ElfFile64};

use super::{debug_file::debug_file, names};
use crate::image::{Bytes, Image};

/// One function at an address, and the line it is at.
#[derive(Debug, Clone, Default)]
pub(super) struct Source {
    pub function: Option<String>,
    /// `path:line`.
    pub line: Option<String>,
}

/// The line tables of one object, read when they are first asked for.
#[derive(Default)]
pub(super) enum Lines {
    #[default]
    Unread,
    Absent,
    Read(Box<addr2line::Context<Reader>>),
}

impl Lines {
    /// The functions at an address, those inlined first; empty when there are none, `None` when it cannot be told.
    pub fn find(&mut self, image: &Arc<Image>, address: u64, deadline: Instant) -> Option<Vec<Source>> {
        if matches!(self, Lines::Unread) {
            *self = match read(image, deadline.saturating_duration_since(Instant::now())) {
                Reading::Read(context) => Lines::Read(context),
                Reading::Absent => Lines::Absent,
                // The next capture may have more time.
                Reading::TooLong => return None,
            };
        }
        let Lines::Read(context) = self else { return None };
        let mut frames = context.find_frames(address).skip_all_loads().ok()?;
        let mut sources = Vec::new();
        while let Ok(Some(frame)) = frames.next() {
            let function = frame.function.as_ref().and_then(|function| function.raw_name().ok());
            let line = frame.location.and_then(|location| Some(format!("{}:{}", location.file?, location.line?)));
            sources.push(Source { function: function.map(|name| names::demangle(name.as_bytes())), line });
        }
        Some(sources)
    }
}

/// Bytes that are inflated in a second, at least.
const INFLATED_PER_SECOND: u64 = 200 << 20;

/// What came of reading the tables of an object.
enum Reading {
    Read(Box<addr2line::Context<Reader>>),
    Absent,
    /// They are compressed, and so large that there is no time for it.
    TooLong,
}

fn read(image: &Arc<Image>, left: Duration) -> Reading {
    let own = image.elf().map_or(Reading::Absent, |elf| context(&elf, &Owner::Image(Arc::clone(image)), left));
    if !matches!(own, Reading::Absent) {
        return own;
    }
    let Some(bytes) = debug_file(image).map(Arc::new) else { return Reading::Absent };
    match ElfFile64::<object::LittleEndian>::parse(&**bytes) {
        Ok(elf) => context(&elf, &Owner::Bytes(Arc::clone(&bytes)), left),
        Err(_) => Reading::Absent,
    }
}

fn context(elf: &crate::image::Elf<'_>, owner: &Owner, left: Duration) -> Reading {
    if elf.section_by_name(".debug_info").is_none_or(|section| section.size() == 0) {
        return Reading::Absent;
    }
    let inflated: u64 = elf
        .sections()
        .filter(|section| section.name_bytes().is_ok_and(|name| name.starts_with(b".debug_")))
        .filter_map(|section| section.compressed_file_range().ok())
        .filter(|place| place.format != object::CompressionFormat::None)
        .map(|place| place.uncompressed_size)
        .sum();
    if Duration::from_micros(inflated.saturating_mul(1_000_000) / INFLATED_PER_SECOND) > left {
        return Reading::TooLong;
    }
    load(elf, owner).map_or(Reading::Absent, |context| Reading::Read(Box::new(context)))
}

fn load(elf: &crate::image::Elf<'_>, owner: &Owner) -> Option<addr2line::Context<Reader>> {
    let load = |id: gimli::SectionId| -> Result<Reader, gimli::Error> {
        let section = elf.section_by_name(id.name());
        let piece = section.and_then(|section| piece(&section, owner)).unwrap_or_default();
        Ok(EndianReader::new(piece, RunTimeEndian::Little))
    };
    let dwarf = gimli::Dwarf::load(load).ok()?;
    addr2line::Context::from_dwarf(dwarf).ok()
}

/// The bytes of a section: where they lie in the object, or unpacked when they are compressed.
fn piece<'a>(section: &impl ObjectSection<'a>, owner: &Owner) -> Option<Piece> {
    let place = section.compressed_file_range().ok()?;
    if place.format == object::CompressionFormat::None {
        let start = usize::try_from(place.offset).ok()?;
        let end = start.checked_add(usize::try_from(place.compressed_size).ok()?)?;
        return (end <= owner.len()).then(|| Piece { owner: owner.clone(), range: start..end });
    }
    let bytes = section.uncompressed_data().ok()?.into_owned();
    let range = 0..bytes.len();
    Some(Piece { owner: Owner::Bytes(Arc::new(Bytes::Memory(bytes))), range })
}

/// What keeps the bytes of a section alive.
#[derive(Clone)]
pub(super) enum Owner {
    Image(Arc<Image>),
    Bytes(Arc<Bytes>),
}

impl Deref for Owner {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Owner::Image(image) => &image.bytes,
            Owner::Bytes(bytes) => bytes,
        }
    }
}

/// A part of an owner's bytes.
#[derive(Clone)]
pub(super) struct Piece {
    owner: Owner,
    range: Range<usize>,
}

impl Default for Piece {
    fn default() -> Self {
        Piece { owner: Owner::Bytes(Arc::new(Bytes::Memory(Vec::new()))), range: 0..0 }
    }
}

impl fmt::Debug for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Piece({:?})", self.range)
    }
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.owner[self.range.clone()]
    }
}

// SAFETY: the bytes lie behind an Arc and are never written again, so they stay where they are when a piece moves.
#[allow(unsafe_code)]
unsafe impl gimli::StableDeref for Piece {}
// SAFETY: a clone holds the same Arc, so it refers to the same bytes.
#[allow(unsafe_code)]
unsafe impl gimli::CloneStableDeref for Piece {}

type Reader = EndianReader<RunTimeEndian, Piece>;
