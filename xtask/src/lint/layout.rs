//! Checks of the layout of source files: module style, functions, imports, and the width of
//! comments and of Markdown.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use serde_json::Value;

use super::imports;
use crate::{
    shell,
    source::{self, functions},
};

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
    for path in source::files(root, COMMENTED)? {
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
    for line in long_comments(path, text) {
        problems.push(format!("{shown}:{line}: comment beyond {} columns", COLUMNS));
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

/// Columns at which Markdown and comments wrap. Code wraps later, see `rustfmt.toml`.
pub(crate) const COLUMNS: usize = 100;

/// Extensions of the files whose comments [`long_comments`] reads.
pub(crate) const COMMENTED: &[&str] =
    &["rs", "proto", "c", "h", "cpp", "cu", "js", "css", "py", "sh", "toml", "yaml", "yml"];

/// Numbers of the lines of a Markdown text that do not wrap. Tables, code blocks and links are
/// exempt.
pub(crate) fn long_markdown(text: &str) -> Vec<usize> {
    let mut is_code = false;
    let mut long = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let start = line.trim_start();
        if start.starts_with("```") {
            is_code = !is_code;
        }
        let is_exempt = is_code || start.starts_with(['|', '[']) || line.contains("](") || line.contains("://");
        if !is_exempt && is_long(line) {
            long.push(number);
        }
    }
    long
}

/// Numbers of the lines of a source file whose comment does not wrap. A comment after code on its
/// line is exempt, as code is. The extension of `path` selects the language.
pub(crate) fn long_comments(path: &Path, text: &str) -> Vec<usize> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("rs" | "proto") => long_slash_comments(text),
        Some("c" | "h" | "cpp" | "cu" | "js" | "css") => long_c_comments(text),
        Some("py") => long_python_comments(text),
        Some("sh" | "toml" | "yaml" | "yml") => long_hash_comments(text),
        _ => Vec::new(),
    }
}

/// Comments that begin with `//`, `///` or `//!`. Code blocks in them are exempt.
fn long_slash_comments(text: &str) -> Vec<usize> {
    let mut is_code = false;
    let mut long = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            is_code = false;
            continue;
        };
        let comment = comment.trim_start_matches(['/', '!']).trim_start();
        if comment.starts_with("```") {
            is_code = !is_code;
        }
        if !is_code && is_long(line) && !is_exempt(comment) {
            long.push(number);
        }
    }
    long
}

/// Comments that begin with `//`, and those between `/*` and `*/`, which begin on a line of their
/// own.
fn long_c_comments(text: &str) -> Vec<usize> {
    let mut is_inside = false;
    let mut long = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let start = line.trim_start();
        is_inside |= start.starts_with("/*");
        // A line of a macro ends in a backslash at a column of its own.
        let is_comment = (is_inside || start.starts_with("//")) && !line.ends_with('\\');
        if is_comment && is_long(line) && !is_exempt(start) {
            long.push(number);
        }
        is_inside &= !line.contains("*/");
    }
    long
}

fn long_hash_comments(text: &str) -> Vec<usize> {
    let is_long_comment = |line: &str| {
        line.trim_start().strip_prefix('#').is_some_and(|comment| is_long(line) && !is_exempt(comment.trim_start()))
    };
    (1..).zip(text.lines()).filter(|(_, line)| is_long_comment(line)).map(|(number, _)| number).collect()
}

/// Comments and docstrings. A docstring begins its line; other strings in three quotes do not.
fn long_python_comments(text: &str) -> Vec<usize> {
    const QUOTES: &str = "\"\"\"";
    let mut long = Vec::new();
    let (mut in_string, mut in_docstring) = (false, false);
    for (number, line) in (1..).zip(text.lines()) {
        let start = line.trim_start();
        let is_docstring = in_docstring || (!in_string && start.trim_start_matches(['r', 'f']).starts_with(QUOTES));
        let is_comment = !in_string && start.starts_with('#');
        if (is_docstring || is_comment) && is_long(line) && !is_exempt(start) {
            long.push(number);
        }
        if !is_comment && line.matches(QUOTES).count() % 2 == 1 {
            in_docstring = is_docstring && !in_string;
            in_string = !in_string;
        }
    }
    long
}

fn is_long(line: &str) -> bool {
    line.chars().count() > COLUMNS
}

/// A table row, or a line with a URL.
fn is_exempt(comment: &str) -> bool {
    comment.starts_with('|') || comment.contains("://")
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{check_file, crate_roots, is_below, long_comments, long_markdown};

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

    #[test]
    fn tables_code_and_links_may_be_long() {
        let long = "x".repeat(101);
        let text = format!("{long}\n| {long} |\n```\n{long}\n```\n[a](b) {long}\n{}\n{long}\n", "ö".repeat(100));
        assert_eq!(long_markdown(&text), [1, 8]);
    }

    #[test]
    fn comments_of_c_wrap() {
        let long = "x".repeat(101);
        let text = format!("/* {long}\n   {long} */\nint a; // {long}\n// {long}\n{long}\n  /* {long} */ \\\n");
        assert_eq!(long_comments(Path::new("a.c"), &text), [1, 2, 4]);
    }

    #[test]
    fn rust_comments_wrap() {
        let long = "x".repeat(100);
        let text = format!(
            "//! {long}\n    /// {long}\n// {long}\nlet a = 1; // {long}\n// | {long}\n/// https://{long}\n\
         /// ```\n/// {long}\n/// ```\n/// {long}\n// {}\n",
            "ö".repeat(97)
        );
        assert_eq!(long_comments(Path::new("a.rs"), &text), [1, 2, 3, 10]);
        assert_eq!(long_comments(Path::new("a.proto"), &text), [1, 2, 3, 10]);
    }

    #[test]
    fn python_comments_and_docstrings_wrap() {
        let long = "x".repeat(100);
        let text = format!(
            "\"\"\"{long}\n{long}x\n\"\"\"\n# {long}\na = \"\"\"\n{long}\n# {long}\n\"\"\"\nb = \"{long}\"\n\
         def f():\n    \"\"\"{long}\"\"\"\n    {long}\n# http://{long}\n"
        );
        assert_eq!(long_comments(Path::new("a.py"), &text), [1, 2, 4, 11]);
    }

    #[test]
    fn shell_comments_wrap() {
        let long = "x".repeat(100);
        assert_eq!(long_comments(Path::new("a.sh"), &format!("# {long}\necho {long}\n# short\n")), [1]);
        assert_eq!(long_comments(Path::new("a.txt"), &format!("# {long}\n")), [] as [usize; 0]);
    }
}
