//! Function names from symbol tables. One pass over all symbols finds all sorted addresses, and
//! only the names that are found are demangled.

use std::{fmt, sync::Arc};

use object::{
    SymbolIndex,
    elf::{SHN_UNDEF, STB_GLOBAL, STB_WEAK, STT_FUNC, STT_GNU_IFUNC, STT_NOTYPE, Sym64},
    read::elf::{ElfFile64, FileHeader, Sym, SymbolTable},
};

use crate::objects::{
    bytes::{Bytes, Elf},
    debug_file::mini_debug_info,
    image::Image,
};

/// The best symbol for one address so far.
#[derive(Clone, Copy, Default)]
struct BestSymbol<'a> {
    rank: Rank,
    name: &'a [u8],
}

/// Order of the symbols that contain one address; the greatest is used.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    /// A symbol whose size includes the address, before one without a size that only starts below
    /// it.
    sized: bool,
    /// The closest start.
    start: u64,
    function: bool,
    exported: bool,
    /// `poll` before `__poll`: the public name, which often is the weak symbol.
    underscores: std::cmp::Reverse<usize>,
    global: bool,
}

impl Rank {
    fn without_name(&self) -> (bool, u64, bool, bool) {
        (self.sized, self.start, self.function, self.exported)
    }
}

/// Names of the functions that contain the sorted addresses.
pub(super) fn find(image: &Image, debug: Option<&Bytes>, addresses: &[u64]) -> Vec<Option<Arc<str>>> {
    let mut hits = vec![BestSymbol::default(); addresses.len()];
    if addresses.is_empty() {
        return Vec::new();
    }
    let debug = debug.and_then(|bytes| ElfFile64::<object::LittleEndian>::parse(&**bytes).ok());
    let elf = image.elf();
    // Symbols that are compressed inside a stripped object are used only if there are no better
    // ones.
    let has_symbols = |elf: &Elf<'_>| !elf.elf_symbol_table().is_empty();
    let compressed =
        if debug.iter().chain(&elf).any(has_symbols) { None } else { elf.as_ref().and_then(mini_debug_info) };
    let compressed = compressed.as_ref().and_then(|bytes| ElfFile64::<object::LittleEndian>::parse(&**bytes).ok());
    for elf in debug.iter().chain(&compressed) {
        scan(elf.endian(), elf.elf_symbol_table(), addresses, &mut hits);
    }
    if let Some(elf) = &elf {
        scan(elf.endian(), elf.elf_symbol_table(), addresses, &mut hits);
        scan(elf.endian(), elf.elf_dynamic_symbol_table(), addresses, &mut hits);
    }
    hits.iter().map(|hit| (!hit.name.is_empty()).then(|| demangle(hit.name).into())).collect()
}

fn scan<'a, Header>(
    endian: object::LittleEndian,
    table: &SymbolTable<'a, Header>,
    addresses: &[u64],
    hits: &mut [BestSymbol<'a>],
) where
    Header: FileHeader<Endian = object::LittleEndian, Sym = Sym64<object::LittleEndian>>,
{
    let (Some(first), Some(last)) = (addresses.first(), addresses.last()) else { return };
    for (index, symbol) in table.iter().enumerate() {
        let start = symbol.st_value(endian);
        let kind = symbol.st_type();
        if start > *last || start == 0 || !matches!(kind, STT_FUNC | STT_GNU_IFUNC | STT_NOTYPE) {
            continue;
        }
        if symbol.st_shndx(endian) == SHN_UNDEF {
            continue;
        }
        let size = symbol.st_size(endian);
        // A symbol without a size extends to the next symbol. The rank decides.
        let end = if size == 0 { u64::MAX } else { start.saturating_add(size) };
        if end <= *first {
            continue;
        }
        let from = addresses.partition_point(|address| *address < start);
        for (address, hit) in addresses[from..].iter().zip(&mut hits[from..]) {
            if *address >= end {
                break;
            }
            let mut rank = Rank {
                sized: size != 0,
                start,
                function: kind != STT_NOTYPE,
                exported: matches!(symbol.st_bind(), STB_GLOBAL | STB_WEAK),
                underscores: std::cmp::Reverse(0),
                global: symbol.st_bind() == STB_GLOBAL,
            };
            // Most symbols lose here, before their names are read.
            if !hit.name.is_empty() && rank.without_name() < hit.rank.without_name() {
                continue;
            }
            let name = table.symbol_name(endian, symbol).unwrap_or_default();
            // Some linkers append the version of a symbol to its name.
            let name = name.split(|byte| *byte == b'@').next().unwrap_or_default();
            if name.is_empty() || name.starts_with(b"$") || table.shndx(endian, SymbolIndex(index)) == Some(0) {
                continue;
            }
            rank.underscores = std::cmp::Reverse(name.iter().take_while(|byte| **byte == b'_').count());
            if hit.name.is_empty() || rank > hit.rank {
                *hit = BestSymbol { rank, name };
            }
        }
    }
}

/// Maximum number of bytes of a name, mangled or not. A mangled name of some hundred bytes may
/// expand without limit, because it refers to parts of itself.
const MAX_NAME: usize = 64 << 10;

/// Receives a name piece by piece, and keeps at most [`MAX_NAME`] bytes.
#[derive(Default)]
struct BoundedName {
    name: String,
    is_cut: bool,
}

impl cpp_demangle::DemangleWrite for BoundedName {
    fn write_string(&mut self, text: &str) -> fmt::Result {
        let room = MAX_NAME.saturating_sub(self.name.len());
        if text.len() > room {
            self.name.push_str(&text[..text.floor_char_boundary(room)]);
            self.name.push('…');
            self.is_cut = true;
            return Err(fmt::Error);
        }
        self.name.push_str(text);
        Ok(())
    }
}

/// Demangles C++ and Rust names, without parameters. Other names are unchanged. The result has at
/// most 64 KiB and a mark that it is cut.
pub fn demangle(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(&name[..name.len().min(MAX_NAME)]);
    // Rust's legacy mangling looks like C++ with a hash at the end, so it is tried first.
    if let Ok(rust) = rustc_demangle::try_demangle(&text) {
        let name = format!("{rust:#}");
        return hooked(&name).map_or(name.clone(), str::to_owned);
    }
    if text.starts_with("_Z")
        && let Ok(symbol) = cpp_demangle::Symbol::new(text.as_bytes())
    {
        let options = cpp_demangle::DemangleOptions::new().no_params().no_return_type();
        let mut name = BoundedName::default();
        if symbol.structured_demangle(&mut name, &options).is_ok() || name.is_cut {
            return name.name;
        }
    }
    text.into_owned()
}

/// The name of the function that our hook intercepts, if `name` is the body of that function's row
/// in the hook. The exported symbol jumps to this body and leaves no frame. The function of the
/// library behind it may leave none either: `MPI_Finalize` of Open MPI does not.
fn hooked(name: &str) -> Option<&str> {
    name.strip_prefix("xpu_timer_hook::")?.strip_suffix("::wrapper")?.rsplit("::").next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_of_a_hook_has_the_name_of_the_function_that_it_intercepts() {
        let body = b"_ZN14xpu_timer_hook4host3mpi12MPI_Finalize7wrapper17h0123456789abcdefE";
        assert_eq!(demangle(body), "MPI_Finalize");
        assert_eq!(demangle(b"_ZN5other12MPI_Finalize7wrapper17h0123456789abcdefE"), "other::MPI_Finalize::wrapper");
    }

    #[test]
    fn demangles_mangled_names_only() {
        assert_eq!(demangle(b"poll"), "poll");
        assert_eq!(demangle(b"_ZN3foo3barEiPKc"), "foo::bar");
        assert_eq!(demangle(b"_ZN4core3fmt5Write9write_fmt17h0123456789abcdefE"), "core::fmt::Write::write_fmt");
        assert_eq!(demangle(b"_RNvC6_123foo3bar"), "123foo::bar");
        assert_eq!(demangle(b"_Znot_mangled"), "_Znot_mangled");
    }

    #[test]
    fn exponentially_growing_name_is_cut() {
        // f<a<int, int>, a<T1, T1>, a<T2, T2>, …>
        let digit = |number: usize| char::from_digit(number as u32, 36).unwrap().to_ascii_uppercase();
        let parts =
            |count: usize| -> String { (1..=count).map(|part| format!("S0_IS{0}_S{0}_E", digit(part))).collect() };
        let mangled = |count| format!("_Z1fI1aIiiE{}Evv", parts(count));
        assert_eq!(demangle(mangled(1).as_bytes()), "f<a<int, int>, a<a<int, int>, a<int, int> > >");
        let name = demangle(mangled(30).as_bytes());
        assert!(name.starts_with("f<a<int, int>, ") && name.ends_with('…'), "{} bytes", name.len());
        assert!(name.len() <= MAX_NAME + '…'.len_utf8());
        assert_eq!(demangle(&vec![b'x'; 10 << 20]).len(), MAX_NAME);
    }

    #[test]
    fn public_name_of_a_function_wins() {
        let rank = |sized, start, exported, underscores, global| Rank {
            sized,
            start,
            function: true,
            exported,
            underscores: std::cmp::Reverse(underscores),
            global,
        };
        assert!(rank(true, 10, false, 0, false) > rank(false, 20, true, 0, true), "a size beats a close start");
        assert!(rank(true, 20, false, 0, false) > rank(true, 10, true, 0, true), "the closest start");
        assert!(rank(true, 10, true, 0, false) > rank(true, 10, true, 2, true), "poll, and not __poll");
        assert!(rank(true, 10, true, 2, false) > rank(true, 10, false, 0, false), "what is exported, and not an alias");
    }
}
