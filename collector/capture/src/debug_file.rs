//! Symbols and line tables that are not in the object itself: in a separate file, found by build id or by the object's
//! `.gnu_debuglink`, or packed into its `.gnu_debugdata`.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use object::{Object, ObjectSection, read::elf::ElfFile64};

use crate::{
    image::{Bytes, Elf, Image},
    target_files,
};

/// Packed symbols never come near this; a section that claims more is not unpacked further.
const MAX_UNPACKED: u64 = 256 << 20;

/// The separate debug file of an object. The places of the target's own root come before ours, and a file that belongs to
/// another build is not taken.
pub(crate) fn debug_file(image: &Image) -> Option<Bytes> {
    let link = image.elf().and_then(|elf| {
        let (name, checksum) = elf.gnu_debuglink().ok().flatten()?;
        Some((std::str::from_utf8(name).ok()?.to_string(), checksum))
    });
    let by_id = image.build_id.as_deref().and_then(path_by_build_id);
    let by_link = link.iter().flat_map(|(name, _)| paths_by_link(&image.path, name));
    let paths: Vec<PathBuf> = by_id.into_iter().chain(by_link).collect();
    let checksum = link.as_ref().map(|(_, checksum)| *checksum);
    for root in [image.root.as_path(), Path::new("/")] {
        for path in &paths {
            let Some(bytes) = target_files::open_within(root, path).and_then(|file| Bytes::of_file(&file).ok()) else {
                continue;
            };
            if belongs(&bytes, image.build_id.as_deref(), checksum) {
                return Some(bytes);
            }
            tracing::debug!("{} is not of the same build as {}", path.display(), image.path);
        }
    }
    None
}

/// What dwz has moved from several debug files into one that they share, as Debian's and Fedora's packages have it.
pub(crate) fn supplementary(image: &Image, elf: &Elf<'_>) -> Option<Bytes> {
    let (path, build_id) = elf.gnu_debugaltlink().ok().flatten()?;
    let path = Path::new(std::str::from_utf8(path).ok()?);
    // A relative path begins at the debug file, which may have been reached by a link; the build id finds it as well.
    let paths = path.is_absolute().then(|| path.to_path_buf()).into_iter().chain(path_by_build_id(build_id));
    for path in paths {
        let roots = [image.root.as_path(), Path::new("/")].into_iter();
        let mut files = roots.filter_map(|root| target_files::open_within(root, &path));
        let found =
            files.find_map(|file| Bytes::of_file(&file).ok().filter(|bytes| belongs(bytes, Some(build_id), None)));
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
    // A link is a bare file name; anything else would lead out of these folders.
    if name.is_empty() || name.contains('/') || name == ".." {
        return Vec::new();
    }
    let object = Path::new(object.strip_suffix(" (deleted)").unwrap_or(object));
    let Some(folder) = object.parent().filter(|folder| folder.is_absolute()) else { return Vec::new() };
    let global = Path::new("/usr/lib/debug").join(folder.strip_prefix("/").unwrap_or(folder));
    let paths = [folder.join(name), folder.join(".debug").join(name), global.join(name)];
    // An object may name itself when its debug file has the same name and lies elsewhere.
    paths.into_iter().filter(|path| path != object).collect()
}

/// Whether a debug file was made with an object. The build ids decide; the checksum of the whole file, which may be of
/// gigabytes, is only for objects without one.
fn belongs(bytes: &Bytes, build_id: Option<&[u8]>, checksum: Option<u32>) -> bool {
    let Ok(elf) = ElfFile64::<object::LittleEndian>::parse(&**bytes) else { return false };
    match (build_id, elf.build_id().ok().flatten()) {
        (Some(wanted), Some(found)) => wanted == found,
        _ => checksum == Some(crc32fast::hash(bytes)),
    }
}

/// The symbols that Fedora and its kin pack into the stripped object: an ELF file within it, with a `.symtab` and no more.
pub(crate) fn mini_debug_info(elf: &Elf<'_>) -> Option<Bytes> {
    let packed = elf.section_by_name(".gnu_debugdata")?.uncompressed_data().ok()?;
    let mut unpacked = Vec::new();
    let reader = lzma_rust2::XzReader::new(&packed[..], true);
    match reader.take(MAX_UNPACKED).read_to_end(&mut unpacked) {
        Ok(_) => Some(Bytes::Memory(unpacked)),
        Err(error) => {
            tracing::debug!(".gnu_debugdata cannot be unpacked: {error}");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_a_debug_file() {
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
