//! Symbols and line tables outside the object: in a separate file, found by build id or by the
//! object's `.gnu_debuglink`, or compressed in its `.gnu_debugdata`.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use object::{Object, read::elf::ElfFile64};

use super::{
    bytes::{Budget, Bytes, Elf, SectionBytes},
    target_files,
};

/// Compressed symbols never come near this size. A section that exceeds it is not used.
const MAX_DECOMPRESSED: u64 = 64 << 20;
/// Memory limit of the decompressor; `xz -9` needs 64 MiB.
const MAX_DICTIONARY_KIB: u32 = 128 << 10;
/// The checksum of a larger file is not computed. A sparse file may have terabytes without any data
/// on the disk.
const MAX_CHECKSUMMED: usize = 4 << 30;

/// Finds the separate debug file of an object. Paths in the target's own root are searched before
/// ours. A file that belongs to another build is rejected.
pub(crate) fn debug_file(elf: Option<&Elf<'_>>, object: &str, build_id: Option<&[u8]>, root: &Path) -> Option<Bytes> {
    let link = elf.and_then(|elf| {
        let (name, checksum) = elf.gnu_debuglink().ok().flatten()?;
        Some((std::str::from_utf8(name).ok()?.to_string(), checksum))
    });
    let by_id = build_id.and_then(path_by_build_id);
    let by_link = link.iter().flat_map(|(name, _)| paths_by_link(object, name));
    let paths: Vec<PathBuf> = by_id.into_iter().chain(by_link).collect();
    let checksum = link.as_ref().map(|(_, checksum)| *checksum);
    for root in [root, Path::new("/")] {
        for path in &paths {
            let Some(bytes) = target_files::open_within(root, path).and_then(|file| Bytes::from_file(&file).ok())
            else {
                continue;
            };
            if is_same_build(&bytes, build_id, checksum) {
                return Some(bytes);
            }
            tracing::debug!("{} is not of the same build as {}", path.display(), object);
        }
    }
    None
}

/// Finds the supplementary file: dwz moves what several debug files have in common into it, for
/// example in the packages of Debian and Fedora.
pub(crate) fn supplementary(root: &Path, elf: &Elf<'_>) -> Option<Bytes> {
    let (path, build_id) = elf.gnu_debugaltlink().ok().flatten()?;
    let path = Path::new(std::str::from_utf8(path).ok()?);
    // A relative path starts at the debug file, which may have been reached through a link. The
    // build id finds the supplementary file too.
    let paths = path.is_absolute().then(|| path.to_path_buf()).into_iter().chain(path_by_build_id(build_id));
    for path in paths {
        let roots = [root, Path::new("/")].into_iter();
        let mut files = roots.filter_map(|root| target_files::open_within(root, &path));
        let found = files
            .find_map(|file| Bytes::from_file(&file).ok().filter(|bytes| is_same_build(bytes, Some(build_id), None)));
        if found.is_some() {
            return found;
        }
    }
    None
}

/// `/usr/lib/debug/.build-id/ab/cdef….debug`
fn path_by_build_id(build_id: &[u8]) -> Option<PathBuf> {
    let id: String = build_id.iter().map(|byte| format!("{byte:02x}")).collect();
    let (first, rest) = id.split_at_checked(2).filter(|(_, rest)| !rest.is_empty())?;
    Some(PathBuf::from(format!("/usr/lib/debug/.build-id/{first}/{rest}.debug")))
}

/// The three places that gdb documents for the file that a link names.
fn paths_by_link(object: &str, name: &str) -> Vec<PathBuf> {
    // A link is a bare file name. Anything else would lead out of these folders.
    if name.is_empty() || name.contains('/') || name == ".." {
        return Vec::new();
    }
    let object = Path::new(object.strip_suffix(" (deleted)").unwrap_or(object));
    let Some(folder) = object.parent().filter(|folder| folder.is_absolute()) else { return Vec::new() };
    let global = Path::new("/usr/lib/debug").join(folder.strip_prefix("/").unwrap_or(folder));
    let paths = [folder.join(name), folder.join(".debug").join(name), global.join(name)];
    // An object may name itself if its debug file has the same name in another folder.
    paths.into_iter().filter(|path| path != object).collect()
}

/// Whether a debug file belongs to an object. The build ids decide. The checksum, which covers the
/// whole file and possibly gigabytes, is used only for objects without a build id.
fn is_same_build(bytes: &Bytes, build_id: Option<&[u8]>, checksum: Option<u32>) -> bool {
    let Ok(elf) = ElfFile64::<object::LittleEndian>::parse(&**bytes) else { return false };
    match (build_id, elf.build_id().ok().flatten()) {
        (Some(wanted), Some(found)) => wanted == found,
        _ => bytes.len() <= MAX_CHECKSUMMED && checksum == Some(crc32fast::hash(bytes)),
    }
}

/// The symbols that Fedora and related distributions embed in a stripped object: a compressed ELF
/// file that has only a `.symtab`.
pub(crate) fn mini_debug_info(elf: &Elf<'_>) -> Option<Bytes> {
    let compressed = SectionBytes::of(elf, ".gnu_debugdata", &Budget::new(MAX_DECOMPRESSED))?;
    match decompress(compressed.in_file(elf.data())) {
        Ok(decompressed) => Some(Bytes::Memory(decompressed)),
        Err(error) => {
            tracing::debug!(".gnu_debugdata cannot be unpacked: {error}");
            None
        }
    }
}

/// Decompresses the output of `xz`. More than [`MAX_DECOMPRESSED`] bytes are an error, because half
/// a symbol table is of no use.
fn decompress(compressed: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut decompressed = Vec::new();
    lzma_rust2::XzReader::new_mem_limit(compressed, true, MAX_DICTIONARY_KIB)
        .take(MAX_DECOMPRESSED + 1)
        .read_to_end(&mut decompressed)?;
    if decompressed.len() as u64 > MAX_DECOMPRESSED {
        return Err(std::io::Error::other(format!("it holds more than {MAX_DECOMPRESSED} bytes")));
    }
    Ok(decompressed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF object with one section. `compressed` is the compression (`ELFCOMPRESS_ZLIB` 1,
    /// `ELFCOMPRESS_ZSTD` 2) and the size that the section's header declares.
    fn object_with(name: &str, compressed: Option<(u32, u64)>, bytes: &[u8]) -> Vec<u8> {
        let names = [b"\0", name.as_bytes(), b"\0"].concat();
        let mut content = Vec::new();
        if let Some((kind, declared)) = compressed {
            content.extend(kind.to_le_bytes());
            content.extend([0; 4]);
            content.extend(declared.to_le_bytes());
            content.extend(1u64.to_le_bytes());
        }
        content.extend_from_slice(bytes);
        let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let table = 64 + names.len() + content.len();
        file.extend([3, 0, 62, 0, 1, 0, 0, 0]);
        file.extend([0; 16]);
        file.extend((table as u64).to_le_bytes());
        file.extend([0, 0, 0, 0, 64, 0, 56, 0, 0, 0, 64, 0, 3, 0, 2, 0]);
        file.extend(&names);
        file.extend(&content);
        let mut section = |name: u32, kind: u32, flags: u64, offset: usize, size: usize| {
            file.extend(name.to_le_bytes());
            file.extend(kind.to_le_bytes());
            for word in [flags, 0, offset as u64, size as u64, 0, 1, 0] {
                file.extend(word.to_le_bytes());
            }
        };
        section(0, 0, 0, 0, 0);
        section(1, 1, if compressed.is_some() { 0x800 } else { 0 }, 64 + names.len(), content.len());
        section(0, 3, 0, 64, names.len());
        file
    }

    fn section(file: &[u8], name: &str, budget: u64) -> Option<Vec<u8>> {
        let elf = ElfFile64::<object::LittleEndian>::parse(file).expect("it is an object");
        SectionBytes::of(&elf, name, &Budget::new(budget)).map(|bytes| bytes.in_file(file).to_vec())
    }

    fn zlib(bytes: &[u8]) -> Vec<u8> {
        let mut compressed = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
        std::io::Write::write_all(&mut compressed, bytes).unwrap();
        compressed.finish().unwrap()
    }

    /// A zstandard frame without a declared size, made of blocks that repeat one byte.
    fn zstd(bytes: u64) -> Vec<u8> {
        let mut compressed = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x58];
        let blocks = bytes / (128 << 10);
        for block in 1..=blocks {
            let header = (128u32 << 10) << 3 | 1 << 1 | u32::from(block == blocks);
            compressed.extend_from_slice(&header.to_le_bytes()[..3]);
            compressed.push(7);
        }
        compressed
    }

    #[test]
    fn section_decompression_respects_budget_and_declared_size() {
        let name = ".debug_info";
        let (zeros, good) = (vec![0; 1 << 20], 1 << 20);
        let of = |kind: u32, declared: u64, compressed: &[u8], budget: u64| {
            section(&object_with(name, Some((kind, declared)), compressed), name, budget)
                .map(|bytes| bytes.len() as u64)
        };
        let (zlib, zstd) = (zlib(&zeros), zstd(good));
        assert!(zlib.len() < 2000 && zstd.len() < 200);
        for (kind, compressed) in [(1, &zlib), (2, &zstd)] {
            assert_eq!(of(kind, good, compressed, good), Some(good), "{kind}");
            assert_eq!(of(kind, good, compressed, good - 1), None, "{kind}: beyond the bound");
            assert!(
                of(kind, 100, compressed, u64::MAX).is_none_or(|bytes| bytes == 100),
                "{kind}: no more than was declared"
            );
            assert_eq!(of(kind, good + 1, compressed, u64::MAX), None, "{kind}: less comes out than was declared");
            assert_eq!(of(kind, u64::MAX, compressed, u64::MAX), None, "{kind}: no memory is had for such a word");
            assert_eq!(of(kind, u64::MAX, compressed, good), None, "{kind}");
        }
        assert_eq!(of(3, good, &zlib, good), None, "of an unknown kind");
        // All sections of a search share one budget.
        let file = object_with(name, Some((1, good)), &zlib);
        let elf = ElfFile64::<object::LittleEndian>::parse(&*file).unwrap();
        let budget = Budget::new(2 * good + 1);
        let decompressed = (0..3).filter(|_| SectionBytes::of(&elf, name, &budget).is_some()).count();
        assert_eq!(decompressed, 2);
        // An uncompressed section uses no budget.
        assert_eq!(section(&object_with(name, None, b"plain"), name, 0).as_deref(), Some(&b"plain"[..]));
    }

    #[test]
    fn xz_decompression_is_bounded() {
        let xz = |bytes: u64| {
            let options = lzma_rust2::XzOptions::with_preset(0);
            let mut writer = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
            std::io::copy(&mut std::io::repeat(0).take(bytes), &mut writer).unwrap();
            writer.finish().unwrap()
        };
        let (small, bomb) = (xz(1 << 20), xz(MAX_DECOMPRESSED + 1));
        assert!(bomb.len() < 100_000, "{}", bomb.len());
        assert_eq!(decompress(&small).unwrap().len(), 1 << 20);
        assert!(decompress(&bomb).unwrap_err().to_string().contains("more than"));
        assert!(decompress(&[small.as_slice(), &bomb].concat()).is_err(), "in several streams");
        // The section itself may be compressed. Then both limits apply.
        let name = ".gnu_debugdata";
        let symbols = |file: Vec<u8>| {
            let elf = ElfFile64::<object::LittleEndian>::parse(&*file).unwrap();
            mini_debug_info(&elf).map(|bytes| bytes.len())
        };
        assert_eq!(symbols(object_with(name, None, &small)), Some(1 << 20));
        let twice = zlib(&small);
        assert_eq!(symbols(object_with(name, Some((1, small.len() as u64)), &twice)), Some(1 << 20));
        assert_eq!(symbols(object_with(name, Some((1, u64::MAX)), &twice)), None);
        assert_eq!(symbols(object_with(name, Some((2, 1 << 40)), &zstd(1 << 20))), None);
    }

    #[test]
    fn paths_of_a_debug_file() {
        let by_id = path_by_build_id(&[0xab, 0xcd, 0x01]).unwrap();
        assert_eq!(by_id, Path::new("/usr/lib/debug/.build-id/ab/cd01.debug"));
        assert_eq!(path_by_build_id(&[0xab]), None);
        assert_eq!(path_by_build_id(&[]), None);
        let paths = ["/opt/a.debug", "/opt/.debug/a.debug", "/usr/lib/debug/opt/a.debug"].map(PathBuf::from);
        assert_eq!(paths_by_link("/opt/a", "a.debug"), paths);
        assert_eq!(paths_by_link("/opt/a (deleted)", "a.debug"), paths);
        assert_eq!(paths_by_link("/opt/a", "a").len(), 2, "the object itself is not its debug file");
        for name in ["", "..", "../a", "/etc/passwd"] {
            assert!(paths_by_link("/opt/a", name).is_empty(), "{name}");
        }
        assert!(paths_by_link("[vdso]", "a").is_empty());
    }
}
