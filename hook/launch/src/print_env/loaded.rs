//! The libraries of a target: those that a process has mapped, or those that the dynamic loader
//! lists for a program.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::{
    symbols,
    target::{Process, Program},
};
use crate::image::Obstacle;

/// A library of the target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// Its soname, or the name of its file.
    pub name: String,
    /// The path by which this process can open its file.
    pub file: PathBuf,
}

/// The shared objects that a process has mapped. Their files are opened through its own root, which
/// may be a container's.
pub fn of_process(process: &Process) -> Vec<Library> {
    let library = |path: &PathBuf| {
        let path = path.to_string_lossy();
        let path = path.strip_suffix(" (deleted)").unwrap_or(&path);
        let name = path.rsplit('/').next()?.to_string();
        let file = PathBuf::from(format!("/proc/{}/root{path}", process.pid));
        // A library that was opened through a link is mapped under another file name.
        name.contains(".so").then(|| Library { name: symbols::soname(&file).unwrap_or(name), file })
    };
    process.mapped.iter().filter_map(library).collect()
}

/// The libraries that the loader would load for a program, according to the loader, and those that
/// it does not find.
///
/// # Errors
/// The loader does not list them.
pub fn of_program(program: &Program) -> Result<(Vec<Library>, Vec<String>)> {
    let image = &program.image;
    // A loader for another C library or processor has another list, if it can run at all.
    let foreign = image.obstacle.as_ref().is_some_and(Obstacle::forbids_preload);
    let Some(loader) = image.loader.as_ref().filter(|_| !foreign) else { return Ok((Vec::new(), Vec::new())) };
    let output = Command::new(loader)
        .arg("--list")
        .arg(&image.file)
        .env_remove("LD_PRELOAD")
        .output()
        .with_context(|| format!("{}", loader.display()))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        bail!("{} --list {}: {}", loader.display(), image.file.display(), words.trim());
    }
    Ok(parse(&String::from_utf8_lossy(&output.stdout)))
}

/// Parses lines such as `libc.so.6 => /lib/libc.so.6 (0x…)`, `/lib/ld.so (0x…)` and `libx.so => not
/// found`.
fn parse(list: &str) -> (Vec<Library>, Vec<String>) {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for line in list.lines().map(str::trim) {
        let (name, place) = line.split_once(" => ").unwrap_or((line, line));
        if place == "not found" {
            missing.push(name.to_string());
            continue;
        }
        let file = place.rsplit_once(" (").map_or(place, |(file, _)| file);
        if file.starts_with('/') {
            let last = |path: &str| Path::new(path).file_name().map(|name| name.to_string_lossy().into_owned());
            found.push(Library {
                name: last(name.rsplit_once(" (").map_or(name, |(name, _)| name)).unwrap_or_default(),
                file: file.into(),
            });
        }
    }
    (found, missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loaders_list_is_understood() {
        let list = "\tlinux-vdso.so.1 (0x00007ffe)\n\tlibcudart.so.13 => /opt/cuda lib/libcudart.so.13 (0x00007f)\n\t\
                    libnccl.so.2 => not found\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f11)\n";
        let (found, missing) = parse(list);
        let pair = |library: &Library| (library.name.clone(), library.file.display().to_string());
        assert_eq!(
            found.iter().map(pair).collect::<Vec<_>>(),
            [
                ("libcudart.so.13".into(), "/opt/cuda lib/libcudart.so.13".into()),
                ("ld-linux-x86-64.so.2".into(), "/lib64/ld-linux-x86-64.so.2".to_string()),
            ]
        );
        assert_eq!(missing, ["libnccl.so.2"]);
    }
}
