//! `cargo xtask lint`: what CI checks besides the tests.

mod imports;
mod layout;
mod links;
mod modules;

use std::{collections::BTreeSet, path::Path};

use anyhow::{Result, ensure};
use xpu_timer_tests::tree;

use crate::{
    shell::{self, cargo, need},
    source,
};

/// Options of `lint`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only the checks of layout (comments, module style, functions, import circles), in these
    /// folders
    #[arg(long, value_name = "FOLDER", num_args = 1..)]
    layout: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let root = tree();
    if !options.layout.is_empty() {
        return layout::check(&root, &options.layout);
    }
    markdown(&root)?;
    links::check(&root)?;
    layout::check(&root, &["."])?;
    shell::run(&mut cargo(&["fmt", "--all", "--check"]))?;
    // Frida's crate makes its bindings with libclang. It has a header for docs.rs, so checking
    // needs no devkit.
    need(&["clang", "libclang-dev"])?;
    let all_features = ["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"];
    shell::run(cargo(&all_features).env("DOCS_RS", "1"))?;
    // With all features the hook has Frida's engine; without, the one that is shipped.
    shell::run(&mut cargo(&["clippy", "-p", "xpu_timer_hook", "--all-targets", "--", "-D", "warnings"]))?;
    // With the features of the first command, which has checked the dependencies with them.
    let documentation = ["doc", "--workspace", "--all-features", "--no-deps", "--document-private-items", "--quiet"];
    shell::run(cargo(&documentation).env("DOCS_RS", "1").env("RUSTDOCFLAGS", "-D warnings"))?;
    licences()
}

/// Checks that all Markdown files wrap.
fn markdown(root: &Path) -> Result<()> {
    let mut long = Vec::new();
    for path in source::files(root, &["md"])? {
        let lines = layout::long_markdown(&source::read(&path)?);
        long.extend(lines.into_iter().map(|number| format!("{}:{number}", path.display())));
    }
    ensure!(long.is_empty(), "lines beyond {} columns: {}", layout::COLUMNS, long.join(" "));
    Ok(())
}

/// Licences. A dependency must offer at least one of them.
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

/// Checks that every dependency that is built for Linux has a licence of the list.
fn licences() -> Result<()> {
    let metadata = shell::metadata(&["--filter-platform", "x86_64-unknown-linux-gnu"])?;
    let resolved: BTreeSet<&str> =
        metadata["resolve"]["nodes"].as_array().into_iter().flatten().filter_map(|node| node["id"].as_str()).collect();
    let mut bad = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        if !package["id"].as_str().is_some_and(|id| resolved.contains(id)) {
            continue;
        }
        let licence = package["license"].as_str().unwrap_or("none");
        if !is_allowed(licence) {
            bad.push(format!("{} {}: {licence}", package["name"], package["version"]));
        }
    }
    ensure!(!resolved.is_empty(), "cargo metadata resolved nothing");
    ensure!(bad.is_empty(), "licences that are not in the list of xtask/src/lint.rs:\n{}", bad.join("\n"));
    eprintln!("licences of {} packages are fine", resolved.len());
    Ok(())
}

/// Whether one alternative of an SPDX expression consists of allowed licences only. `/` is the old
/// form of OR.
fn is_allowed(expression: &str) -> bool {
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
                Some(inner) => is_allowed(inner),
                None => LICENCES.contains(&term),
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::is_allowed;

    #[test]
    fn spdx_expressions_need_one_allowed_alternative() {
        for good in ["MIT", "MIT/Apache-2.0", "GPL-3.0 OR MIT", "(MIT OR Apache-2.0) AND Unicode-3.0"] {
            assert!(is_allowed(good), "{good}");
        }
        for bad in ["none", "GPL-3.0", "MIT AND GPL-3.0", "(GPL-3.0 OR AGPL-3.0) AND MIT"] {
            assert!(!is_allowed(bad), "{bad}");
        }
    }
}
