//! The separate debug file of an object: symbols and line tables that distributions keep out of the object itself.

use std::{fs::File, path::PathBuf};

use crate::image::{Bytes, Image, map_file};

/// Debian and others keep symbols and line tables in files of their own, named by build id.
pub(super) fn debug_file(image: &Image) -> Option<Bytes> {
    let id: String = image.build_id.as_ref()?.iter().map(|byte| format!("{byte:02x}")).collect();
    let (first, rest) = id.split_at_checked(2)?;
    let inside = format!("usr/lib/debug/.build-id/{first}/{rest}.debug");
    [image.root.join(&inside), PathBuf::from("/").join(&inside)]
        .iter()
        .find_map(|path| map_file(&File::open(path).ok()?).ok())
}
