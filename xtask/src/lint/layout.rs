//! Checks of the layout of source files: module style, comments, functions and imports.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use serde_json::Value;

use super::{imports, wrap};
use crate::functions::functions;
use crate::{shell, source};

/// Lines that the body of a function may have. Test code is exempt.
const MAX_BODY_LINES: usize = 80;

/// Kinds of Cargo targets whose files are checked for import circles.
const CRATE_KINDS: &[&str] = &["lib", "rlib", "cdylib", "proc-macro", "bin"];

/// Checks the folders, which are relative to `root`; `.` is all of it.
pub(crate) fn check(root: &Path, folders: &[impl AsRef<Path>]) -> Result<()> {
    let mut problems = Vec::new();
    for folder in folders {
        ensure!(root.join(folder).exists(), "there is no {}", folder.as_ref().display());
    }
    for path in source::files(root, wrap::COMMENTED)? {
        let shown = path.strip_prefix(root).unwrap_or(&path);
        if is_below(shown, folders) && !source::is_generated(shown) {
            check_file(shown, &source::read(&path)?, &mut problems)?;
        }
    }
    for file in crate_roots(&shell::metadata(&["--no-deps"])?) {
        if is_below(file.strip_prefix(root).unwrap_or(&file), folders) {
            problems.extend(imports::circles(&imports::imports(&file)?, root));
        }
    }
    ensure!(problems.is_empty(), "{} problems of layout:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

fn is_below(path: &Path, folders: &[impl AsRef<Path>]) -> bool {
    let is_root = |folder: &Path| folder == Path::new(".");
    folders.iter().any(|folder| is_root(folder.as_ref()) || path.starts_with(folder))
}

/// Checks one file, whose path is relative to the root of the repository.
fn check_file(path: &Path, text: &str, problems: &mut Vec<String>) -> Result<()> {
    let shown = path.display();
    if path.file_name().is_some_and(|name| name == "mod.rs") {
        problems.push(format!("{shown}: a module x is in x.rs, not in x/mod.rs"));
    }
    for line in wrap::long_comments(path, text) {
        problems.push(format!("{shown}:{line}: comment beyond {} columns", wrap::COLUMNS));
    }
    if path.extension().is_some_and(|extension| extension == "rs") && !source::is_test_file(path) {
        for function in functions(&syn::parse_file(text)?) {
            if !function.is_test && function.body_lines > MAX_BODY_LINES {
                let (line, name, lines) = (function.line, &function.name, function.body_lines);
                problems.push(format!("{shown}:{line}: {name} has {lines} lines, more than {MAX_BODY_LINES}"));
            }
        }
    }
    Ok(())
}

/// The root files of all libraries and programs of the workspace.
fn crate_roots(metadata: &Value) -> Vec<PathBuf> {
    let targets =
        metadata["packages"].as_array().into_iter().flatten().flat_map(|package| package["targets"].as_array());
    let has_crate_kind = |target: &&Value| {
        target["kind"].as_array().into_iter().flatten().any(|kind| CRATE_KINDS.iter().any(|wanted| kind == wanted))
    };
    targets
        .flatten()
        .filter(has_crate_kind)
        .filter_map(|target| target["src_path"].as_str().map(PathBuf::from))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{check_file, crate_roots, is_below};

    fn problems(path: &str, text: &str) -> Vec<String> {
        let mut problems = Vec::new();
        check_file(Path::new(path), text, &mut problems).expect("valid Rust");
        problems
    }

    #[test]
    fn one_module_style() {
        assert_eq!(problems("a/src/b/mod.rs", ""), ["a/src/b/mod.rs: a module x is in x.rs, not in x/mod.rs"]);
        assert_eq!(problems("a/src/b.rs", ""), [] as [&str; 0]);
    }

    #[test]
    fn comments_wrap() {
        let text = format!("\n// {}\n", "x".repeat(98));
        assert_eq!(problems("a.rs", &text), ["a.rs:2: comment beyond 100 columns"]);
    }

    #[test]
    fn functions_are_short_outside_of_tests() {
        let function = |lines: usize| format!("fn long() {{\n{}}}\n", "1;\n".repeat(lines));
        assert_eq!(problems("a.rs", &function(80)), [] as [&str; 0]);
        assert_eq!(problems("a.rs", &function(81)), ["a.rs:1: long has 81 lines, more than 80"]);
        assert_eq!(problems("a.rs", &format!("#[cfg(test)]\nmod tests {{ {} }}", function(81))), [] as [&str; 0]);
        assert_eq!(problems("tests/tests/it/a.rs", &function(81)), [] as [&str; 0]);
        assert_eq!(problems("a.rs", &format!("const A: &[u8] = &[\n{}];", "1,\n".repeat(81))), [] as [&str; 0]);
    }

    #[test]
    fn folders_are_whole_names() {
        assert!(is_below(Path::new("hook/src/a.rs"), &["viewer", "hook"]));
        assert!(!is_below(Path::new("hooks/src/a.rs"), &["viewer", "hook"]));
        assert!(is_below(Path::new("hook/src/a.rs"), &["."]), "the whole tree");
    }

    #[test]
    fn libraries_and_programs_are_crates() {
        let target = |kind: &str, path: &str| serde_json::json!({"kind": [kind], "src_path": path});
        let targets = [target("lib", "/a/lib.rs"), target("test", "/a/it.rs"), target("bin", "/a/main.rs")];
        let metadata = serde_json::json!({"packages": [{"targets": targets}]});
        assert_eq!(crate_roots(&metadata), ["/a/lib.rs", "/a/main.rs"].map(PathBuf::from));
    }
}
