//! Rebuilds an ELF object from the memory of a process that has it mapped, for objects whose file
//! is not available.
//!
//! A loaded object still has what the loader and the unwinder need: program headers, build id,
//! dynamic symbols, unwind tables. The result is a small ELF file of these, so that no other code
//! has to know its origin.

use gimli::{BaseAddresses, EhFrameHdr, Pointer};
use object::{
    LittleEndian,
    elf::{
        DT_GNU_HASH, DT_HASH, DT_STRSZ, DT_STRTAB, DT_SYMTAB, Dyn64, FileHeader64, PT_DYNAMIC, PT_GNU_EH_FRAME,
        PT_LOAD, PT_NOTE, ProgramHeader64, SHT_DYNSYM, SHT_NOTE, SHT_PROGBITS, SHT_STRTAB,
    },
    pod,
    read::elf::{FileHeader, ProgramHeader},
};

use crate::memory;

/// More than the tables of the largest known libraries. A larger size is taken for garbage.
const MAX_TABLE: u64 = 256 << 20;
/// Bytes that contain the program headers. In every object that a linker made, they follow the ELF
/// header.
const MAX_HEADER_BYTES: usize = 4096;
/// Only a handful of symbols have equal hashes. Memory that is not a hash table could form a very
/// long chain.
const MAX_CHAIN: u64 = 1 << 16;
const FILE_HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
const SECTION_HEADER_BYTES: usize = 64;
const SYMBOL_BYTES: u64 = 24;

const LE: LittleEndian = LittleEndian;

/// The ELF header and the program headers of a loaded object.
pub(crate) struct Headers {
    tid: i32,
    /// Address in the process less address in the file.
    bias: u64,
    /// Addresses of the object, as addresses in the file.
    extent: std::ops::Range<u64>,
    program_headers: Vec<ProgramHeader64<LittleEndian>>,
    /// The bytes of the ELF header and the program headers.
    pub bytes: Vec<u8>,
}

/// A section of the rebuilt file.
struct Section {
    name: &'static [u8],
    kind: u32,
    /// Index of the section that this one refers to.
    link: u32,
    entry_size: u64,
    address: u64,
    bytes: Vec<u8>,
}

impl Headers {
    /// Reads the headers of the object whose first byte is mapped at `start`.
    pub(super) fn read(tid: i32, start: u64) -> Option<Self> {
        let mut bytes = vec![0; MAX_HEADER_BYTES];
        let read = memory::read(tid, start, &mut bytes).ok()?;
        bytes.truncate(read);
        let header = FileHeader64::<LittleEndian>::parse(&*bytes).ok()?;
        let program_headers = header.program_headers(LE, &*bytes).ok()?.to_vec();
        // The parser has checked that they are within the bytes.
        let end = header.e_phoff(LE) as usize + program_headers.len() * PROGRAM_HEADER_BYTES;
        bytes.truncate(end);
        let loads = || program_headers.iter().filter(|program| program.p_type(LE) == PT_LOAD);
        let first = loads().find(|load| load.p_offset(LE) == 0)?;
        let end = loads().map(|load| load.p_vaddr(LE).saturating_add(load.p_memsz(LE))).max()?;
        let extent = first.p_vaddr(LE)..end;
        Some(Headers { tid, bias: start.wrapping_sub(first.p_vaddr(LE)), extent, program_headers, bytes })
    }

    /// Builds an ELF file with the tables that are in memory.
    pub(super) fn rebuild(&self) -> Vec<u8> {
        let mut sections = vec![Section::new(b"", 0, 0, Vec::new())];
        for note in self.program_headers_of(PT_NOTE) {
            let bytes = self.copy(note.p_vaddr(LE), note.p_memsz(LE));
            sections.extend(bytes.map(|bytes| Section::new(b".note", SHT_NOTE.0, note.p_vaddr(LE), bytes)));
        }
        sections.extend(self.unwind_tables().into_iter().flatten());
        if let Some((symbols, strings)) = self.dynamic_symbols() {
            let link = sections.len() as u32 + 1;
            sections.push(Section { link, entry_size: SYMBOL_BYTES, ..symbols });
            sections.push(strings);
        }
        self.assemble(sections)
    }

    fn program_headers_of(
        &self,
        kind: object::elf::ProgramType,
    ) -> impl Iterator<Item = &ProgramHeader64<LittleEndian>> {
        self.program_headers.iter().filter(move |program| program.p_type(LE) == kind)
    }

    /// Copies bytes at an address of the file.
    fn copy(&self, address: u64, size: u64) -> Option<Vec<u8>> {
        if size > MAX_TABLE || !self.extent.contains(&address) || address.checked_add(size)? > self.extent.end {
            return None;
        }
        memory::read_exact(self.tid, address.wrapping_add(self.bias), usize::try_from(size).ok()?).ok()
    }

    /// `.eh_frame_hdr`, and `.eh_frame` up to the last entry of its table.
    fn unwind_tables(&self) -> Option<[Section; 2]> {
        let program = self.program_headers_of(PT_GNU_EH_FRAME).next()?;
        let (address, size) = (program.p_vaddr(LE), program.p_memsz(LE));
        let header = self.copy(address, size)?;
        let bases = BaseAddresses::default().set_eh_frame_hdr(address);
        let parsed = EhFrameHdr::new(&header, gimli::LittleEndian).parse(&bases, 8).ok()?;
        let direct = |pointer| if let Pointer::Direct(address) = pointer { Some(address) } else { None };
        let start = direct(parsed.eh_frame_ptr())?;
        let table = parsed.table()?;
        let mut rows = table.iter(&bases);
        let mut last = start;
        while let Ok(Some((_, entry))) = rows.next() {
            last = last.max(direct(entry)?);
        }
        // The rest of the last entry, and the zero that ends the section.
        let length = u32::from_le_bytes(self.copy(last, 4)?.try_into().ok()?);
        let size = last.checked_sub(start)?.checked_add(4 + u64::from(length))?;
        let mut frames = self.copy(start, size)?;
        frames.extend([0; 4]);
        Some([
            Section::new(b".eh_frame_hdr", SHT_PROGBITS.0, address, header),
            Section::new(b".eh_frame", SHT_PROGBITS.0, start, frames),
        ])
    }

    /// `.dynsym` and `.dynstr`.
    fn dynamic_symbols(&self) -> Option<(Section, Section)> {
        let program = self.program_headers_of(PT_DYNAMIC).next()?;
        let bytes = self.copy(program.p_vaddr(LE), program.p_memsz(LE))?;
        let (entries, _) = pod::slice_from_bytes::<Dyn64<LittleEndian>>(&bytes, bytes.len() / 16).ok()?;
        let value = |tag: object::elf::DynamicTag| {
            entries.iter().find(|entry| entry.d_tag.get(LE) == tag).map(|entry| entry.d_val.get(LE))
        };
        // glibc relocates these addresses when it loads the object; musl does not.
        let address = |tag| {
            let value = value(tag)?;
            let moved = value.wrapping_sub(self.bias);
            Some(if self.extent.contains(&moved) { moved } else { value })
        };
        let (symbols, strings) = (address(DT_SYMTAB)?, address(DT_STRTAB)?);
        let count = match (address(DT_HASH), address(DT_GNU_HASH)) {
            (Some(hash), _) => u64::from(self.read_u32(hash.wrapping_add(4))?),
            (None, Some(hash)) => self.count_gnu_hash_symbols(hash)?,
            (None, None) => return None,
        };
        let symbols =
            Section::new(b".dynsym", SHT_DYNSYM.0, symbols, self.copy(symbols, count.checked_mul(SYMBOL_BYTES)?)?);
        let strings = Section::new(b".dynstr", SHT_STRTAB.0, strings, self.copy(strings, value(DT_STRSZ)?)?);
        Some((symbols, strings))
    }

    /// The number of symbols is only in the hash table: one more than the last symbol of the last
    /// chain.
    fn count_gnu_hash_symbols(&self, hash: u64) -> Option<u64> {
        let [buckets, first, bloom_words] = [0, 4, 8].map(|offset| self.read_u32(hash.wrapping_add(offset)));
        let (buckets, first, bloom_words) = (u64::from(buckets?), u64::from(first?), u64::from(bloom_words?));
        let table = hash.wrapping_add(16 + bloom_words * 8);
        let chains = table.wrapping_add(buckets * 4);
        let starts = self.copy(table, buckets * 4)?;
        let starts = starts.chunks_exact(4).map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap_or_default()));
        let mut symbol = u64::from(starts.max()?);
        if symbol < first {
            return Some(first);
        }
        let longest = symbol + MAX_CHAIN;
        while self.read_u32(chains.wrapping_add((symbol - first) * 4))? & 1 == 0 {
            symbol += 1;
            if symbol == longest {
                return None;
            }
        }
        Some(symbol + 1)
    }

    fn read_u32(&self, address: u64) -> Option<u32> {
        Some(u32::from_le_bytes(self.copy(address, 4)?.try_into().ok()?))
    }

    /// Writes headers, contents, names and section headers, in this order.
    fn assemble(&self, mut sections: Vec<Section>) -> Vec<u8> {
        let names_index = sections.len();
        let mut names = Vec::new();
        let mut name_offsets = Vec::new();
        sections.push(Section::new(b".shstrtab", SHT_STRTAB.0, 0, Vec::new()));
        for section in &sections {
            name_offsets.push(names.len() as u32);
            names.extend(section.name);
            names.push(0);
        }
        sections[names_index].bytes = names;
        let mut file = self.bytes.clone();
        let mut headers = Vec::with_capacity(sections.len() * SECTION_HEADER_BYTES);
        for (section, name) in sections.iter().zip(name_offsets) {
            file.resize(file.len().next_multiple_of(8), 0);
            headers.extend(name.to_le_bytes());
            headers.extend(section.kind.to_le_bytes());
            // The flags, which nobody reads; the address; the offset; the size.
            for value in [0, section.address, file.len() as u64, section.bytes.len() as u64] {
                headers.extend(value.to_le_bytes());
            }
            headers.extend(section.link.to_le_bytes());
            headers.extend(0u32.to_le_bytes());
            for value in [8, section.entry_size] {
                headers.extend(value.to_le_bytes());
            }
            file.extend(&section.bytes);
        }
        file.resize(file.len().next_multiple_of(8), 0);
        // e_shoff; then e_shentsize, e_shnum and e_shstrndx.
        let section_headers_offset = file.len() as u64;
        file[40..48].copy_from_slice(&section_headers_offset.to_le_bytes());
        for (index, value) in [SECTION_HEADER_BYTES, sections.len(), names_index].into_iter().enumerate() {
            let at = FILE_HEADER_BYTES - 6 + 2 * index;
            file[at..at + 2].copy_from_slice(&(value as u16).to_le_bytes());
        }
        file.extend(headers);
        file
    }
}

impl Section {
    fn new(name: &'static [u8], kind: u32, address: u64, bytes: Vec<u8>) -> Self {
        Section { name, kind, link: 0, entry_size: 0, address, bytes }
    }
}

#[cfg(test)]
mod tests {
    use object::{Object, ObjectSection, ObjectSymbol, read::elf::ElfFile64};

    use xpu_timer_proto::procfs;

    use super::*;

    /// The objects of this process, rebuilt from memory, have the tables of their files.
    #[test]
    fn rebuilt_objects_match_their_files() {
        let pid = std::process::id() as i32;
        let mappings = procfs::maps(pid, pid).unwrap();
        let firsts = mappings.iter().filter(|mapping| mapping.offset == 0 && mapping.path.starts_with('/'));
        let mut compared = 0;
        for first in firsts {
            let Some(headers) = Headers::read(pid, first.start) else { continue };
            let file = std::fs::read(&first.path).unwrap();
            // Other tests map whole files, which does not load them as objects.
            if (first.end - first.start) as usize >= file.len() {
                continue;
            }
            let file = ElfFile64::<LittleEndian>::parse(&*file).unwrap();
            let rebuilt = headers.rebuild();
            let rebuilt = ElfFile64::<LittleEndian>::parse(&*rebuilt).unwrap();
            assert_eq!(rebuilt.build_id().unwrap(), file.build_id().unwrap(), "{}", first.path);
            for name in [".eh_frame_hdr", ".dynstr"] {
                let bytes = |elf: &ElfFile64<'_, LittleEndian>| {
                    let section = elf.section_by_name(name).unwrap_or_else(|| panic!("{name} of {}", first.path));
                    (section.address(), section.data().unwrap().to_vec())
                };
                assert!(bytes(&rebuilt) == bytes(&file), "{name} of {}", first.path);
            }
            let unwind =
                |elf: &ElfFile64<'_, LittleEndian>| elf.section_by_name(".eh_frame").unwrap().data().unwrap().to_vec();
            let (rebuilt_unwind, file_unwind) = (unwind(&rebuilt), unwind(&file));
            assert!(file_unwind.starts_with(&rebuilt_unwind[..rebuilt_unwind.len() - 4]), "{}", first.path);
            let defined = |elf: &ElfFile64<'_, LittleEndian>| {
                let symbols = elf.dynamic_symbols().filter(|symbol| symbol.address() != 0);
                symbols.map(|symbol| (symbol.address(), symbol.name().unwrap().to_string())).collect::<Vec<_>>()
            };
            assert_eq!(defined(&rebuilt), defined(&file), "{}", first.path);
            compared += 1;
        }
        assert!(compared >= 3, "this program, libc and the loader");
    }

    #[test]
    fn rejects_memory_that_is_not_an_object() {
        let pid = std::process::id() as i32;
        let text = vec![b'x'; 8192];
        assert!(Headers::read(pid, text.as_ptr() as u64).is_none());
        assert!(Headers::read(pid, 8).is_none());
        // An ELF header whose program headers are elsewhere.
        let mut header = std::fs::read("/proc/self/exe").unwrap()[..FILE_HEADER_BYTES].to_vec();
        header[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
        header.resize(8192, 0);
        assert!(Headers::read(pid, header.as_ptr() as u64).is_none());
    }
}
