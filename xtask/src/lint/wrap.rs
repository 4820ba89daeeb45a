//! Markdown and comments wrap at 100 columns.

use std::path::Path;

/// Columns at which Markdown and comments wrap. Code wraps later, see `rustfmt.toml`.
pub(crate) const COLUMNS: usize = 100;

/// Extensions of the files whose comments [`long_comments`] reads.
pub(crate) const COMMENTED: &[&str] = &["rs", "proto", "py", "sh"];

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
        Some("py") => long_python_comments(text),
        Some("sh") => long_hash_comments(text),
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
    use std::path::Path;

    use super::{long_comments, long_markdown};

    #[test]
    fn tables_code_and_links_may_be_long() {
        let long = "x".repeat(101);
        let text = format!("{long}\n| {long} |\n```\n{long}\n```\n[a](b) {long}\n{}\n{long}\n", "ö".repeat(100));
        assert_eq!(long_markdown(&text), [1, 8]);
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
        assert_eq!(long_comments(Path::new("a.c"), &format!("// {long}\n")), [] as [usize; 0]);
    }
}
