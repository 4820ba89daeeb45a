//! Properties of the parsers of objects and perf maps that must hold for any bytes. Each function
//! panics when a property does not hold. `tests/fuzz` drives them.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use gimli::UnwindContext;

use crate::{
    objects::{bytes::Bytes, image::Image, perf_map::PerfMap},
    symbols,
};

/// Long enough for a small object. The search for lines stops after this time.
const LINES: Duration = Duration::from_secs(1);
/// Number of addresses to look up.
const ADDRESSES: usize = 64;

/// An object that a process has mapped: its unwind rules, its names and its lines, compressed or
/// not.
pub fn object(bytes: &[u8]) {
    // That root contains no file of this machine.
    let parse = || Image::parse(Bytes::Memory(bytes.to_vec()), "/fuzz/object", PathBuf::from("/proc/self/fdinfo"));
    let Ok(image) = parse() else { return };
    let addresses = addresses(&image);
    let mut context = UnwindContext::new();
    for address in &addresses {
        let row = image.row(*address, &mut context);
        let again = image.row(*address, &mut context);
        assert_eq!(row.is_some(), again.is_some(), "what is kept is what was found");
        if let Some(function) = image.function(*address) {
            assert!(function.contains(address), "{address:#x} is not in {function:x?}");
        }
    }
    let names = symbols::names_of(&image, &addresses);
    assert_eq!(names.len(), addresses.len());
    for (address, _) in symbols::lines_of(&image, &addresses, Instant::now() + LINES) {
        assert!(addresses.binary_search(&address).is_ok(), "nobody asked for {address:#x}");
    }
}

/// Sorted addresses: the starts of the image's symbols, and addresses near them.
fn addresses(image: &Image) -> Vec<u64> {
    use object::{Object as _, ObjectSymbol as _};
    let mut addresses = vec![0, 1, 0x1000, u64::MAX];
    if let Some(elf) = image.elf() {
        let symbols = elf.symbols().chain(elf.dynamic_symbols()).map(|symbol| symbol.address()).take(ADDRESSES / 4);
        let starts: Vec<u64> = symbols.chain([elf.entry()]).collect();
        addresses.extend(starts.iter().flat_map(|start| [*start, start.wrapping_add(4), start.wrapping_sub(1)]));
    }
    addresses.sort_unstable();
    addresses.dedup();
    addresses
}

/// A perf map: a line is a function or nothing, and a name never extends beyond its line.
pub fn perf_map(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes).into_owned();
    let map = PerfMap::parse(text.clone());
    for (start, name) in map.functions() {
        assert!(!name.is_empty() && !name.contains('\n'), "{name:?}");
        assert!(text.lines().any(|line| line.ends_with(name)), "no line contains {name:?}");
        // A later line may cover this address.
        let _ = map.find(start);
    }
    assert_eq!(map.find(u64::MAX), None, "no range holds the last address");
}
