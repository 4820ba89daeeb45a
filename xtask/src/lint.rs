//! `cargo xtask lint`: what CI checks besides the tests.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::shell::{self, cargo, need};

/// Licences under which a dependency may be used. Every alternative of an expression with OR is enough.
const LICENCES: [&str; 12] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CDDL-1.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
    "0BSD",
    "NCSA",
];

/// Columns at which Markdown wraps.
const COLUMNS: usize = 100;

pub fn run() -> Result<()> {
    markdown()?;
    shell::run(&mut cargo(&["fmt", "--all", "--check"]))?;
    // Frida's crate makes its bindings with libclang. It has a header of its own for docs.rs, so that checking needs no devkit.
    need(&["clang", "libclang-dev"])?;
    let all_features = ["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"];
    shell::run(cargo(&all_features).env("DOCS_RS", "1"))?;
    // With all features the hook has Frida's engine; without, the one that is shipped.
    shell::run(&mut cargo(&["clippy", "-p", "xpu_timer_hook", "--all-targets", "--", "-D", "warnings"]))?;
    shell::run(
        cargo(&["doc", "--workspace", "--no-deps", "--document-private-items", "--quiet"])
            .env("RUSTDOCFLAGS", "-D warnings"),
    )?;
    licences()
}

/// Markdown wraps at [`COLUMNS`].
fn markdown() -> Result<()> {
    let mut long = Vec::new();
    for path in markdown_files(&xpu_timer_tests::tree())? {
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        long.extend(long_lines(&text).into_iter().map(|number| format!("{}:{number}", path.display())));
    }
    ensure!(long.is_empty(), "lines beyond {COLUMNS} columns: {}", long.join(" "));
    Ok(())
}

/// All Markdown files below a folder, without hidden folders and build output.
fn markdown_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        let is_skipped = name == "target" || name.as_encoded_bytes().starts_with(b".");
        if entry.file_type()?.is_dir() && !is_skipped {
            found.extend(markdown_files(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    Ok(found)
}

/// Numbers of the lines of a Markdown text that do not wrap. Tables, code blocks and links are exempt.
fn long_lines(text: &str) -> Vec<usize> {
    let mut is_code = false;
    let mut long = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let start = line.trim_start();
        if start.starts_with("```") {
            is_code = !is_code;
        }
        let exempt = is_code || start.starts_with(['|', '[']) || line.contains("](") || line.contains("://");
        if !exempt && line.chars().count() > COLUMNS {
            long.push(number);
        }
    }
    long
}

/// Every dependency that is built for Linux has a licence of the list.
fn licences() -> Result<()> {
    let arguments = ["metadata", "--format-version", "1", "--filter-platform", "x86_64-unknown-linux-gnu"];
    let output = cargo(&arguments).output().context("cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    let resolved: BTreeSet<&str> =
        metadata["resolve"]["nodes"].as_array().into_iter().flatten().filter_map(|node| node["id"].as_str()).collect();
    let mut bad = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        if !package["id"].as_str().is_some_and(|id| resolved.contains(id)) {
            continue;
        }
        let licence = package["license"].as_str().unwrap_or("none");
        if !allowed(licence) {
            bad.push(format!("{} {}: {licence}", package["name"], package["version"]));
        }
    }
    ensure!(!resolved.is_empty(), "cargo metadata resolved nothing");
    ensure!(bad.is_empty(), "licences that are not in the list of xtask/src/lint.rs:\n{}", bad.join("\n"));
    eprintln!("licences of {} packages are fine", resolved.len());
    Ok(())
}

/// An SPDX expression, with `/` as the old form of OR: one alternative must consist of allowed licences only.
fn allowed(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ");
    let (mut depth, mut parts, mut start) = (0, Vec::new(), 0);
    for (index, _) in expression.match_indices(['(', ')', 'O']) {
        match &expression[index..] {
            rest if rest.starts_with('(') => depth += 1,
            rest if rest.starts_with(')') => depth -= 1,
            rest if rest.starts_with("OR ") && depth == 0 => {
                parts.push(&expression[start..index]);
                start = index + 3;
            }
            _ => {}
        }
    }
    parts.push(&expression[start..]);
    parts.iter().any(|part| {
        part.split(" AND ").all(|term| {
            let term = term.trim();
            match term.strip_prefix('(').and_then(|inner| inner.strip_suffix(')')) {
                Some(inner) => allowed(inner),
                None => LICENCES.contains(&term),
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::{allowed, long_lines};

    #[test]
    fn tables_code_and_links_may_be_long() {
        let long = "x".repeat(101);
        let text = format!("{long}\n| {long} |\n```\n{long}\n```\n[a](b) {long}\n{}\n{long}\n", "ö".repeat(100));
        assert_eq!(long_lines(&text), [1, 8]);
    }

    #[test]
    fn expressions() {
        for good in ["MIT", "MIT/Apache-2.0", "GPL-3.0 OR MIT", "(MIT OR Apache-2.0) AND Unicode-3.0"] {
            assert!(allowed(good), "{good}");
        }
        for bad in ["none", "GPL-3.0", "MIT AND GPL-3.0", "(GPL-3.0 OR AGPL-3.0) AND MIT"] {
            assert!(!allowed(bad), "{bad}");
        }
    }
}
