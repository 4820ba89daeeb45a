//! A loaded object as the dynamic linker sees it: its symbols, and which of them it binds to
//! itself.
//!
//! The linker may hold its lock while this runs, so nothing here calls the linker.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::runtime::os::sections::in_linker;

/// Size of a page, the unit of memory protection.
pub(crate) const PAGE: usize = 4096;

/// The linker's public `r_debug`.
#[repr(C)]
pub(crate) struct Debug {
    version: c_int,
    first: *const LinkMap,
    /// The function that the linker calls for debuggers.
    pub call: usize,
    pub state: c_int,
    linker_base: usize,
}

unsafe extern "C" {
    pub(crate) static _r_debug: Debug;
}

/// The first object of the linker's list, which is the program.
pub(crate) fn first() -> *const LinkMap {
    // SAFETY: the linker's own structure, which always exists. Another thread may be appending to
    // the list.
    unsafe { (&raw const _r_debug.first).read_volatile() }
}

/// The linker's list, in the order in which the objects were loaded.
///
/// # Safety
/// No object is unloaded as long as the caller holds it.
pub(crate) unsafe fn maps() -> impl Iterator<Item = *const LinkMap> {
    let or_end = |map: *const LinkMap| Some(map).filter(|map| !map.is_null());
    // SAFETY: by the contract of this function, `map` is in the list.
    std::iter::successors(or_end(first()), move |map| or_end(unsafe { (**map).next }))
}

/// The objects of [`maps`] that have symbols.
///
/// # Safety
/// As for [`maps`].
pub(crate) unsafe fn objects() -> impl Iterator<Item = Object> {
    // SAFETY: the contract is that of this function.
    unsafe { maps().filter_map(|map| Object::of(map)) }
}

/// Head of the linker's public `link_map`.
#[repr(C)]
pub(crate) struct LinkMap {
    /// Load address: added to all addresses in the object.
    pub base: usize,
    name: *const c_char,
    dynamic: *const Entry,
    /// The next object, null for the last.
    pub next: *const LinkMap,
}

/// An entry of the dynamic section.
#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    tag: i64,
    value: usize,
}

const DT_NULL: i64 = 0;
const DT_NEEDED: i64 = 1;
const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_STRSZ: i64 = 10;
const DT_SONAME: i64 = 14;
const DT_SYMBOLIC: i64 = 16;
const DT_TEXTREL: i64 = 22;
const DT_FLAGS: i64 = 30;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

/// Entries that are addresses of tables which may follow the symbols: relocations, hash tables,
/// versions, strings.
const TABLES: [i64; 8] = [DT_HASH, DT_STRTAB, DT_RELA, 23, DT_GNU_HASH, 0x6fff_fff0, 0x6fff_fffe, 0x6fff_fffc];

/// Upper limit for the symbols of a program that exports nothing.
const MAX_SYMBOL_BYTES: usize = 1 << 20;

const DF_SYMBOLIC: usize = 2;
const DF_TEXTREL: usize = 4;

/// Relocations that store a symbol's address when the object is bound: in the global offset table,
/// and in data. The procedure linkage table is bound at the first call.
const R_X86_64_64: u64 = 1;

const R_X86_64_GLOB_DAT: u64 = 6;

/// A function symbol of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Symbol {
    /// Address of its code.
    pub address: usize,
    /// Bytes of code, 0 if unknown.
    pub size: usize,
}

/// A loaded object.
pub(crate) struct Object {
    /// Load address: added to all addresses in it.
    pub base: usize,
    name: *const c_char,
    dynamic: *const Entry,
    symbols: *const libc::Elf64_Sym,
    strings: *const c_char,
    string_bytes: usize,
    hash: *const u32,
    /// The older hash table. Few objects have only this one.
    old_hash: *const u32,
    relocations: *const libc::Elf64_Rela,
    relocation_bytes: usize,
    /// The first table after the symbols.
    next_table: usize,
    soname: Option<usize>,
    /// It binds references to its own symbols, past everything preloaded.
    pub is_symbolic: bool,
    /// The linker modifies its code after mapping it.
    pub moves_code: bool,
}

impl Object {
    /// The object of a link map. `None` for an object without symbols.
    ///
    /// # Safety
    /// `map` is in the linker's list and stays there while the object is used.
    pub(crate) unsafe fn of(map: *const LinkMap) -> Option<Self> {
        // SAFETY: by the contract of this function, `map` stays in the linker's list.
        let map = unsafe { &*map };
        let mut object = Object {
            base: map.base,
            name: map.name,
            dynamic: map.dynamic,
            symbols: std::ptr::null(),
            strings: std::ptr::null(),
            string_bytes: 0,
            hash: std::ptr::null(),
            old_hash: std::ptr::null(),
            relocations: std::ptr::null(),
            relocation_bytes: 0,
            next_table: 0,
            soname: None,
            is_symbolic: false,
            moves_code: false,
        };
        // The linker adds the base to the addresses in a writable section only.
        let address = |value: usize| if value < map.base { value + map.base } else { value };
        for (tag, value) in entries(map.dynamic) {
            match tag {
                DT_STRTAB => object.strings = address(value) as *const c_char,
                DT_SYMTAB => object.symbols = address(value) as *const libc::Elf64_Sym,
                DT_GNU_HASH => object.hash = address(value) as *const u32,
                DT_HASH => object.old_hash = address(value) as *const u32,
                DT_RELA => object.relocations = address(value) as *const libc::Elf64_Rela,
                DT_RELASZ => object.relocation_bytes = value,
                DT_STRSZ => object.string_bytes = value,
                DT_SONAME => object.soname = Some(value),
                DT_SYMBOLIC => object.is_symbolic = true,
                DT_TEXTREL => object.moves_code = true,
                DT_FLAGS => {
                    object.is_symbolic |= value & DF_SYMBOLIC != 0;
                    object.moves_code |= value & DF_TEXTREL != 0;
                }
                _ => {}
            }
        }
        let tables = entries(map.dynamic).filter(|(tag, _)| TABLES.contains(tag)).map(|(_, value)| address(value));
        object.next_table = tables.filter(|table| *table > object.symbols as usize).min().unwrap_or(0);
        (!object.symbols.is_null() && !object.strings.is_null()).then_some(object)
    }

    /// The path that it was loaded from, empty for the program itself.
    pub(crate) fn path(&self) -> &CStr {
        if self.name.is_null() {
            return c"";
        }
        // SAFETY: the linker's own string.
        unsafe { CStr::from_ptr(self.name) }
    }

    /// Its soname, or the file name of its path.
    pub(crate) fn soname(&self) -> &[u8] {
        match self.soname {
            // SAFETY: an offset into the object's own strings.
            Some(offset) => unsafe { CStr::from_ptr(self.strings.add(offset)) }.to_bytes(),
            None => self.path().to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default(),
        }
    }

    /// Sonames of the objects that it depends on.
    pub(crate) fn needed(&self) -> impl Iterator<Item = &CStr> {
        // SAFETY: an offset into the object's strings.
        let name = |offset| unsafe { CStr::from_ptr(self.strings.add(offset)) };
        entries(self.dynamic).filter(|(tag, _)| *tag == DT_NEEDED).map(move |(_, offset)| name(offset))
    }

    /// The function that it exports under `name`.
    pub(crate) fn exported(&self, name: &CStr) -> Option<Symbol> {
        self.function(self.symbol(name)?)
    }

    /// The variable that it exports under `name`.
    pub(crate) fn variable(&self, name: &CStr) -> Option<Symbol> {
        const VARIABLE: u8 = 1;
        self.defined(self.symbol(name)?, VARIABLE)
    }

    fn symbol(&self, name: &CStr) -> Option<&libc::Elf64_Sym> {
        if self.hash.is_null() {
            return self.symbol_by_old_hash(name);
        }
        let hash = gnu_hash(name.to_bytes());
        // SAFETY: the table of DT_GNU_HASH: four words, the filter, the buckets, the chains; all
        // indices come from it.
        unsafe {
            let (buckets, first) = (*self.hash, *self.hash.add(1));
            let (filter_words, shift) = (*self.hash.add(2), *self.hash.add(3));
            if buckets == 0 || filter_words == 0 {
                return None;
            }
            let filter = self.hash.add(4).cast::<u64>();
            let word = filter.add((hash / 64 % filter_words) as usize).read_unaligned();
            if word >> (hash % 64) & word >> ((hash >> (shift % 32)) % 64) & 1 == 0 {
                return None;
            }
            let bucket = filter.add(filter_words as usize).cast::<u32>();
            let chain = bucket.add(buckets as usize);
            let mut index = *bucket.add((hash % buckets) as usize);
            while index >= first {
                let found = *chain.add((index - first) as usize);
                let symbol = &*self.symbols.add(index as usize);
                if found | 1 == hash | 1 && CStr::from_ptr(self.strings.add(symbol.st_name as usize)) == name {
                    return Some(symbol);
                }
                if found & 1 == 1 {
                    return None;
                }
                index += 1;
            }
        }
        None
    }

    /// The same lookup in the older table, which contains the number of symbols.
    fn symbol_by_old_hash(&self, name: &CStr) -> Option<&libc::Elf64_Sym> {
        // SAFETY: null, or the table of DT_HASH: how many buckets, how many symbols.
        let count = unsafe { self.old_hash.as_ref().map_or(0, |_| *self.old_hash.add(1)) };
        (1..count as usize).find_map(|index| {
            // SAFETY: a symbol of the table, and its name.
            let (symbol, own) = unsafe {
                let symbol = &*self.symbols.add(index);
                (symbol, CStr::from_ptr(self.strings.add(symbol.st_name as usize)))
            };
            const LOCAL: u8 = 0;
            (symbol.st_info >> 4 != LOCAL && own == name).then_some(symbol)
        })
    }

    /// Where the object stores the address of this imported symbol when it is bound. A call through
    /// the procedure linkage table has no such place.
    pub(crate) fn places_of(&self, symbol: *const libc::Elf64_Sym) -> impl Iterator<Item = *const u64> {
        // SAFETY: a symbol of the table.
        let index = unsafe { symbol.offset_from(self.symbols) } as u64;
        let all = (0..self.relocation_bytes / size_of::<libc::Elf64_Rela>()).map(|number| {
            // SAFETY: the table of DT_RELA.
            unsafe { &*self.relocations.add(number) }
        });
        let own = all.filter(move |relocation| {
            let kind = relocation.r_info & 0xffff_ffff;
            relocation.r_info >> 32 == index && matches!(kind, R_X86_64_64 | R_X86_64_GLOB_DAT)
        });
        own.map(|relocation| self.base.wrapping_add(relocation.r_offset as usize) as *const u64)
    }

    /// The symbol as a function that this object defines.
    pub(crate) fn function(&self, symbol: &libc::Elf64_Sym) -> Option<Symbol> {
        const FUNCTION: u8 = 2;
        self.defined(symbol, FUNCTION)
    }

    /// The symbol if it has this type and this object defines it.
    fn defined(&self, symbol: &libc::Elf64_Sym, wanted: u8) -> Option<Symbol> {
        let is_here = symbol.st_info & 0xf == wanted && symbol.st_shndx != 0 && symbol.st_value != 0;
        let address = self.base.wrapping_add(symbol.st_value as usize);
        is_here.then_some(Symbol { address, size: symbol.st_size as usize })
    }

    /// The symbols that it imports from other objects.
    pub(crate) fn imported(&self) -> impl Iterator<Item = (&CStr, *const libc::Elf64_Sym)> {
        (1..self.imports_end()).filter_map(|index| {
            // SAFETY: an index of the table.
            let symbol = unsafe { self.symbols.add(index) };
            // SAFETY: a symbol of the table, which stays mapped with its object.
            let (section, name) = unsafe { ((*symbol).st_shndx, (*symbol).st_name as usize) };
            if section != 0 || name >= self.string_bytes {
                return None;
            }
            // SAFETY: an offset into the object's strings, which are terminated.
            Some((unsafe { CStr::from_ptr(self.strings.add(name)) }, symbol))
        })
    }

    /// Upper bound of the imported symbols, which precede those in the hash table. A hash table
    /// without symbols has no such index; then the bound is the start of the next table.
    fn imports_end(&self) -> usize {
        if self.hash.is_null() {
            // SAFETY: null, or the table of DT_HASH, which counts all symbols.
            return unsafe { self.old_hash.as_ref().map_or(0, |_| *self.old_hash.add(1) as usize) };
        }
        // SAFETY: the table, as in `exported`.
        unsafe {
            let (buckets, first, filter_words) = (*self.hash, *self.hash.add(1), *self.hash.add(2));
            let bucket = self.hash.add(4 + 2 * filter_words as usize);
            if (0..buckets as usize).any(|index| *bucket.add(index) != 0) {
                return first as usize;
            }
        }
        let bytes = self.next_table.wrapping_sub(self.symbols as usize);
        if bytes < MAX_SYMBOL_BYTES { bytes / size_of::<libc::Elf64_Sym>() } else { 0 }
    }

    /// Whether `address` is code of this object.
    pub(crate) fn holds_code(&self, address: usize) -> bool {
        self.access_of(address).is_some_and(|access| access & libc::PROT_EXEC != 0)
    }

    /// The access rights of `address` in this object. `None` if it is outside of it.
    pub(crate) fn access_of(&self, address: usize) -> Option<c_int> {
        let flags = self.segment(|segment| {
            let start = self.base.wrapping_add(segment.p_vaddr as usize);
            segment.p_type == libc::PT_LOAD && address.wrapping_sub(start) < segment.p_filesz as usize
        })?;
        let access = [(libc::PF_R, libc::PROT_READ), (libc::PF_W, libc::PROT_WRITE), (libc::PF_X, libc::PROT_EXEC)];
        Some(access.iter().filter(|(flag, _)| flags & flag != 0).fold(0, |all, (_, access)| all | access))
    }

    /// Whether the linker makes `address` read-only once the object is bound. This applies to full
    /// pages only.
    pub(crate) fn is_sealed(&self, address: usize) -> bool {
        let sealed = self.segment(|segment| {
            let start = self.base.wrapping_add(segment.p_vaddr as usize);
            let end = start.wrapping_add(segment.p_memsz as usize) / PAGE * PAGE;
            segment.p_type == libc::PT_GNU_RELRO && (start..end).contains(&address)
        });
        sealed.is_some()
    }

    /// Flags of the first segment that matches.
    fn segment(&self, wanted: impl Fn(&libc::Elf64_Phdr) -> bool) -> Option<u32> {
        struct Question<'a> {
            base: usize,
            wanted: &'a dyn Fn(&libc::Elf64_Phdr) -> bool,
            flags: Option<u32>,
        }
        unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _: usize, question: *mut c_void) -> c_int {
            // SAFETY: the linker's structure and array, and the question that was passed below.
            let (info, question) = unsafe { (&*info, &mut *question.cast::<Question<'_>>()) };
            if info.dlpi_addr as usize != question.base {
                return 0;
            }
            // SAFETY: the linker's array of program headers and its length.
            let segments = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
            question.flags = segments.iter().find(|segment| (question.wanted)(segment)).map(|segment| segment.p_flags);
            1
        }
        let mut question = Question { base: self.base, wanted: &wanted, flags: None };
        // SAFETY: the callback receives the type that it expects, and does not keep the pointer.
        in_linker(|| unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut question).cast()) });
        question.flags
    }
}

/// Entries of a dynamic section up to DT_NULL.
fn entries(mut entry: *const Entry) -> impl Iterator<Item = (i64, usize)> {
    std::iter::from_fn(move || {
        // SAFETY: null, or an entry of the linker's table.
        let Entry { tag, value } = *unsafe { entry.as_ref() }?;
        // SAFETY: the last entry is not passed.
        entry = unsafe { entry.add(1) };
        (tag != DT_NULL).then_some((tag, value))
    })
}

fn gnu_hash(name: &[u8]) -> u32 {
    name.iter().fold(5381u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)))
}

/// Whether `address` is code of the program, and not of a library.
pub(crate) fn is_in_program(address: usize) -> bool {
    // SAFETY: the first object of the linker's list, which is never unloaded.
    unsafe { Object::of(first()) }.is_some_and(|program| program.holds_code(address))
}

/// Load address of the hook's own object.
pub(crate) fn own_base() -> usize {
    unsafe extern "C" {
        static __ehdr_start: u8;
    }
    // Only its address is used. The static linker defines this symbol in every object.
    &raw const __ehdr_start as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The C library's object.
    fn libc_object() -> Object {
        // SAFETY: nothing is unloaded meanwhile.
        let mut objects = unsafe { objects() };
        objects.find(|object| object.soname() == b"libc.so.6").expect("the C library")
    }

    #[test]
    fn exported_functions_are_where_the_linker_says() {
        let object = libc_object();
        for name in [c"malloc", c"qsort", c"pthread_create"] {
            let found = object.exported(name).unwrap_or_else(|| panic!("{name:?}"));
            assert_eq!(
                found.address,
                crate::runtime::linker::dynamic::look_up(libc::RTLD_DEFAULT, name) as usize,
                "{name:?}"
            );
            assert!(object.holds_code(found.address) && found.size > 0);
        }
        assert_eq!(object.exported(c"xpu_timer_no_such_function"), None);
        assert_eq!(object.exported(c"environ"), None, "data is not a function");
        assert!(!object.holds_code(std::ptr::from_ref(&object) as usize));
        assert!(!object.is_symbolic);
    }

    #[test]
    fn both_hash_tables_contain_the_same_functions() {
        let mut object = libc_object();
        let found = object.exported(c"qsort").unwrap();
        if object.old_hash.is_null() {
            // The C library has no older table. A table that only contains the number of symbols is
            // sufficient.
            let end = object.next_table.wrapping_sub(object.symbols as usize) / size_of::<libc::Elf64_Sym>();
            object.old_hash = Box::leak(Box::new([1, end as u32])).as_ptr();
        }
        object.hash = std::ptr::null();
        assert_eq!(object.exported(c"qsort"), Some(found));
        assert_eq!(object.exported(c"xpu_timer_no_such_function"), None);
        assert!(object.imported().any(|(name, _)| name == c"__tls_get_addr"));
        object.old_hash = std::ptr::null();
        assert_eq!(object.exported(c"qsort"), None);
    }

    #[test]
    fn relocated_places_of_a_bound_object_are_sealed() {
        let object = libc_object();
        let places: Vec<_> = object.imported().flat_map(|(_, symbol)| object.places_of(symbol)).collect();
        // SAFETY: the places of relocations.
        assert!(places.iter().all(|place| unsafe { place.read_unaligned() } != 0));
        // Its global offset table is sealed. Data that the library writes is not.
        let (sealed, open): (Vec<_>, Vec<_>) = places.iter().partition(|place| object.is_sealed(**place as usize));
        let is_written =
            |place: &&*const u64| object.access_of(**place as usize) == Some(libc::PROT_READ | libc::PROT_WRITE);
        assert!(!sealed.is_empty() && open.iter().all(is_written));
        let code = object.exported(c"qsort").unwrap().address;
        assert!(!object.is_sealed(code) && !object.is_sealed(0));
    }

    #[test]
    fn imports_are_the_undefined_symbols() {
        let names: Vec<String> =
            libc_object().imported().map(|(name, _)| name.to_string_lossy().into_owned()).collect();
        assert!(names.iter().any(|name| name == "__tls_get_addr"), "{names:?}");
        assert!(!names.iter().any(|name| name == "malloc"));
    }

    #[test]
    fn functions_and_variables_are_distinguished() {
        let libc = libc_object();
        assert!(libc.variable(c"stdout").is_some() && libc.exported(c"stdout").is_none());
        assert!(libc.variable(c"qsort").is_none() && libc.exported(c"qsort").is_some());
    }
}
