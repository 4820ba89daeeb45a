//! Reads a library's soname and the names of its exported functions. It reads only the needed parts
//! of the file, because libraries of a gigabyte are common here.

use std::{collections::BTreeSet, fs::File, path::Path};

use anyhow::{Context, Result};
use object::{
    Endianness, Object, ObjectSymbol, ReadCache, SymbolKind,
    elf::{DT_SONAME, FileHeader64},
    read::elf::{Dyn, FileHeader},
};
use xpu_timer_proto::file;

/// Names of the functions in a library's dynamic symbol table.
///
/// # Errors
/// It cannot be read or is not an ELF file.
pub fn exported(library: &Path) -> Result<BTreeSet<String>> {
    let bytes = open(library)?;
    let file = object::File::parse(&bytes).with_context(|| format!("{} is no ELF library", library.display()))?;
    let symbols = file.dynamic_symbols().filter(|symbol| symbol.is_definition() && symbol.kind() == SymbolKind::Text);
    Ok(symbols.filter_map(|symbol| Some(symbol.name().ok()?.to_string())).collect())
}

/// The name by which other objects refer to a library. `None` if it has none, or is not an ELF
/// library.
pub fn soname(library: &Path) -> Option<String> {
    let bytes = open(library).ok()?;
    let header = FileHeader64::<Endianness>::parse(&bytes).ok()?;
    let endian = header.endian().ok()?;
    let sections = header.sections(endian, &bytes).ok()?;
    let (entries, link) = sections.dynamic(endian, &bytes).ok()??;
    let strings = sections.strings(endian, &bytes, link).ok()?;
    let name = entries.iter().find(|entry| entry.tag(endian) == DT_SONAME)?.string(endian, strings).ok()?;
    Some(String::from_utf8_lossy(name).into_owned())
}

fn open(library: &Path) -> Result<ReadCache<File>> {
    Ok(ReadCache::new(file::open(library).with_context(|| format!("{}", library.display()))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_library_has_its_soname_and_functions() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps.lines().filter_map(|line| Some(&line[line.find('/')?..])).find(|path| path.contains("libc.so"));
        let libc = Path::new(libc.expect("this test is linked to it"));
        assert_eq!(soname(libc).as_deref(), Some("libc.so.6"));
        assert!(exported(libc).unwrap().contains("fopen"));
        assert_eq!(soname(Path::new("/proc/self/maps")), None);
        for (wrong, why) in
            [("/nowhere.so", "/nowhere.so"), ("/proc", "not a regular file"), ("/proc/self/maps", "is no ELF library")]
        {
            let error = format!("{:#}", exported(Path::new(wrong)).unwrap_err());
            assert!(error.contains(why), "{error}");
        }
    }
}
