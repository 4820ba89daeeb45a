//! The source files of this repository, and how to read them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use syn::{Attribute, Meta};

/// A file with Rust code that `cargo xtask bless` generates.
const GENERATED: &str = "proto/src/generated";

/// All files below a folder whose name has one of these extensions, sorted, without hidden folders
/// and build output.
pub(crate) fn files(folder: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    collect_files(folder, extensions, &mut found)?;
    found.sort();
    Ok(found)
}

fn collect_files(folder: &Path, extensions: &[&str], found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        let is_skipped = name == "target" || name.as_encoded_bytes().starts_with(b".");
        if entry.file_type()?.is_dir() {
            if !is_skipped {
                collect_files(&path, extensions, found)?;
            }
        } else if path.extension().is_some_and(|extension| extensions.iter().any(|wanted| extension == *wanted)) {
            found.push(path);
        }
    }
    Ok(())
}

/// Whether `cargo xtask bless` writes this file. `path` is relative to the root of the repository.
pub(crate) fn is_generated(path: &Path) -> bool {
    path.starts_with(GENERATED)
}

/// Whether a file contains only tests, by its name or its folder.
pub(crate) fn is_test_file(path: &Path) -> bool {
    let is_named_so = path.file_stem().and_then(|stem| stem.to_str()).is_some_and(is_test_name);
    is_named_so || path.components().any(|part| part.as_os_str() == "it")
}

/// Whether a module contains only tests, by its name.
pub(crate) fn is_test_name(stem: &str) -> bool {
    stem == "tests" || stem.ends_with("_tests")
}

pub(crate) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| path.display().to_string())
}

pub(crate) fn parse(path: &Path) -> Result<syn::File> {
    syn::parse_file(&read(path)?).with_context(|| path.display().to_string())
}

/// Whether an item is compiled for tests only: `#[test]`, or a `#[cfg(…)]` that requires `test`.
pub(crate) fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.segments.last().is_some_and(|segment| segment.ident == "test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string().replace(' ', "");
            condition == "test"
                || condition.strip_prefix("all(").is_some_and(|rest| rest.split([',', ')']).any(|part| part == "test"))
        }
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{is_generated, is_test, is_test_file};

    fn is_test_item(item: &str) -> bool {
        let file = syn::parse_file(item).expect("valid Rust");
        match &file.items[0] {
            syn::Item::Fn(function) => is_test(&function.attrs),
            _ => unreachable!("the test only has functions"),
        }
    }

    #[test]
    fn test_items_have_a_test_attribute() {
        for item in ["#[test] fn a() {}", "#[tokio::test] fn a() {}", "#[cfg(test)] fn a() {}"] {
            assert!(is_test_item(item), "{item}");
        }
        assert!(is_test_item("#[cfg(all(test, unix))] fn a() {}"));
        for item in ["fn a() {}", "#[cfg(not(test))] fn a() {}", "#[cfg(unix)] fn test() {}"] {
            assert!(!is_test_item(item), "{item}");
        }
    }

    #[test]
    fn files_are_classified_by_path() {
        for path in ["a/tests.rs", "a/lane_tests.rs", "tests/tests/it/hook.rs"] {
            assert!(is_test_file(Path::new(path)), "{path}");
        }
        assert!(!is_test_file(Path::new("tests/src/job.rs")));
        assert!(is_generated(Path::new("proto/src/generated/shapes.rs")));
        assert!(!is_generated(Path::new("proto/src/ring.rs")));
    }
}
