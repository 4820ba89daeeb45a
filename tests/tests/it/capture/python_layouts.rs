//! The offsets of CPython's structures are those of the headers. `cargo xtask bless` (BLESS=1) writes the table anew.

use std::{fs, path::PathBuf, process::Command};

use xpu_timer_tests::{PATIENCE, Process, compile_c, forky_headers, python_version, skip, tree};

use super::pythons::{FORKY, HOST};

const HEAD: &str = "\
//! Printed by `layouts.c` for each CPython; `cargo xtask bless` writes it anew.

use super::{DebugOffsets, Layout};

";

/// Folders with the headers of a version.
fn headers(version: &str) -> Result<Vec<PathBuf>, String> {
    let name = format!("python{version}");
    if FORKY.contains(&version) {
        let root = forky_headers().map_err(|error| format!("headers of CPython {version}: {error:#}"))?;
        let include = root.join("usr/include");
        return Ok(vec![include.join(&name), include.clone(), include.join("x86_64-linux-gnu")]);
    }
    let python = python_version(version).ok_or_else(|| format!("CPython {version} is not installed"))?;
    let mut ask = Command::new(python);
    ask.args(["-c", "import sysconfig; print(sysconfig.get_path('include'))"]);
    let folder = PathBuf::from(Process::spawn(&mut ask).wait(PATIENCE).stdout.trim());
    if folder.join("internal/pycore_pystate.h").exists() {
        Ok(vec![folder])
    } else {
        Err(format!("CPython {version} has no headers in {}", folder.display()))
    }
}

/// One element of the table.
fn printed(source: &str, version: &str) -> Result<String, String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut flags = vec!["-w".to_string()];
    for path in headers(version)? {
        flags.push(format!("-I{}", path.display()));
        flags.push(format!("-I{}", path.join("internal").display()));
    }
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let program = compile_c(folder.path(), "layouts", source, &flags);
    let output = Process::spawn(&mut Command::new(program)).wait(PATIENCE);
    let lines: String = output.stdout.lines().map(|line| format!("    {line}\n")).collect();
    Ok(format!("    Layout {{\n{lines}    }},\n"))
}

#[test]
fn layouts_are_those_of_the_headers() {
    let folder = tree().join("collector/capture/src/cpython");
    let source = fs::read_to_string(folder.join("layouts.c")).expect("the program that prints them");
    let table = folder.join("layouts.rs");
    let old = fs::read_to_string(&table).expect("the table");
    let versions: Vec<&str> = HOST.into_iter().chain(FORKY).collect();
    let mut new = format!("{HEAD}pub(super) static LAYOUTS: [Layout; {}] = [\n", versions.len());
    let mut blocks = old.split_inclusive("\n    },\n").map(|block| &block[block.find("    Layout {").unwrap_or(0)..]);
    for version in versions {
        let known = blocks.next().unwrap_or_default();
        match printed(&source, version) {
            Ok(block) => new += &block,
            Err(reason) => {
                skip(&reason);
                new += known;
            }
        }
    }
    new += "];\n";
    if std::env::var_os("BLESS").is_some() {
        fs::write(&table, new).expect("the table can be written");
    } else {
        assert!(old == new, "{} is stale: run `cargo xtask bless`", table.display());
    }
}
