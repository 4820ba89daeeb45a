//! `cargo xtask lint`: what CI checks besides the tests.

mod imports;
mod layout;
mod licences;
mod wrap;

use std::path::Path;

use anyhow::{Result, ensure};
use xpu_timer_tests::tree;

use crate::shell::{self, cargo, need};
use crate::source;

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
    layout::check(&root, &["."])?;
    shell::run(&mut cargo(&["fmt", "--all", "--check"]))?;
    // Frida's crate makes its bindings with libclang. It has a header for docs.rs, so checking
    // needs no devkit.
    need(&["clang", "libclang-dev"])?;
    let all_features = ["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"];
    shell::run(cargo(&all_features).env("DOCS_RS", "1"))?;
    // With all features the hook has Frida's engine; without, the one that is shipped.
    shell::run(&mut cargo(&["clippy", "-p", "xpu_timer_hook", "--all-targets", "--", "-D", "warnings"]))?;
    shell::run(
        cargo(&["doc", "--workspace", "--no-deps", "--document-private-items", "--quiet"])
            .env("RUSTDOCFLAGS", "-D warnings"),
    )?;
    licences::check()
}

/// Checks that all Markdown files wrap.
fn markdown(root: &Path) -> Result<()> {
    let mut long = Vec::new();
    for path in source::files(root, &["md"])? {
        let lines = wrap::long_markdown(&source::read(&path)?);
        long.extend(lines.into_iter().map(|number| format!("{}:{number}", path.display())));
    }
    ensure!(long.is_empty(), "lines beyond {} columns: {}", wrap::COLUMNS, long.join(" "));
    Ok(())
}
