//! The versions of the libraries that known defects depend on: from the name of a library's file,
//! from a text in its read-only data, and from the files of Python packages. Nothing is read from
//! the memory of a process.

use std::{io::Read, path::Path, sync::Arc};

use memchr::memmem;
use object::{Object, ObjectSection};
use xpu_timer_proto::server::Library;

use super::{image::Image, target_files};

/// How the versions of a library are found.
struct Known {
    /// Beginning of the name of its file.
    file: &'static str,
    name: &'static str,
    /// The text before the version in its read-only data; empty for none.
    banner: &'static str,
}

const KNOWN: &[Known] = &[
    Known { file: "libnccl.so", name: "NCCL", banner: "NCCL version " },
    Known { file: "libc.so", name: "glibc", banner: " release version " },
    Known { file: "libc-2.", name: "glibc", banner: " release version " },
    Known { file: "libgomp", name: "GNU OpenMP", banner: "" },
    Known { file: DRIVER_FILE, name: DRIVER, banner: "" },
    Known { file: "libtorch", name: TORCH, banner: "" },
    Known { file: "libc10", name: TORCH, banner: "" },
];
const CPYTHON: &str = "CPython";
const TORCH: &str = "PyTorch";
const DRIVER: &str = "NVIDIA driver";
const DRIVER_FILE: &str = "libcuda.so";
/// The kernel module of the driver. The library may be newer, for compatibility.
const DRIVER_MODULE: &str = "/proc/driver/nvidia/version";
/// Bytes of a section to search for a text.
const MAX_SEARCHED_BYTES: usize = 16 << 20;
/// Bytes of a file of a Python package.
const MAX_FILE_BYTES: u64 = 4096;

fn known(path: &str) -> Option<&'static Known> {
    let file = file_name(path);
    KNOWN.iter().find(|known| file.starts_with(known.file))
}

fn file_name(path: &str) -> &str {
    let path = path.strip_suffix(" (deleted)").unwrap_or(path);
    path.rsplit('/').next().unwrap_or(path)
}

/// Whether the object is a library of the table, or an interpreter.
pub(super) fn is_wanted(image: &Image) -> bool {
    known(&image.path).is_some() || image.known_python().is_some()
}

/// The file with the version of PyTorch, for a file of its package.
pub(super) fn torch_file(path: &str) -> Option<String> {
    let packages = ["site-packages/", "dist-packages/"].iter();
    let root = packages.filter_map(|folder| path.find(folder).map(|at| at + folder.len())).min()?;
    path[root..].starts_with("torch/").then(|| format!("{}torch/version.py", &path[..root]))
}

/// The libraries that these objects contain, and PyTorch by its file, each once.
pub(super) fn find(pid: i32, objects: &[Arc<Image>], torch: Option<&str>) -> Vec<Library> {
    let mut found: Vec<Library> = Vec::new();
    let mut add = |name: &str, version: Option<String>| match found.iter_mut().find(|library| library.name == name) {
        Some(library) if library.version.is_empty() => library.version = version.unwrap_or_default(),
        Some(_) => {}
        None => found.push(Library { name: name.into(), version: version.unwrap_or_default() }),
    };
    if let Some(path) = torch {
        add(TORCH, package_version(pid, path));
    }
    for image in objects {
        if image.known_python().is_some() {
            add(CPYTHON, image.version.get_or_init(|| python_version(image)).clone());
        } else if let Some(known) = known(&image.path) {
            let module = || Some(known).filter(|known| known.file == DRIVER_FILE).and_then(|_| driver_module());
            let version = || named_version(file_name(&image.path)).or_else(|| banner_version(image, known.banner));
            add(known.name, module().or_else(|| image.version.get_or_init(version).clone()));
        }
    }
    found
}

/// The numbers at the beginning of a text: `2.18.3` of `2.18.3+cuda12.1`.
fn numbers(text: &[u8]) -> Option<String> {
    let end = text.iter().position(|byte| !byte.is_ascii_digit() && *byte != b'.').unwrap_or(text.len());
    let version = std::str::from_utf8(&text[..end]).ok()?.trim_matches('.');
    version.contains('.').then(|| version.to_owned())
}

/// The version in the name of a library's file: `libnccl.so.2.18.3`, `libc-2.31.so`.
fn named_version(file: &str) -> Option<String> {
    let after = file.split_once(".so.").map(|(_, version)| version);
    numbers(after.or_else(|| file.strip_prefix("libc-"))?.as_bytes())
}

/// Searches the read-only data of an object.
fn in_data<T>(image: &Image, search: impl FnOnce(&[u8]) -> Option<T>) -> Option<T> {
    let elf = image.elf()?;
    let data = elf.section_by_name(".rodata")?.data().ok()?;
    search(&data[..data.len().min(MAX_SEARCHED_BYTES)])
}

fn banner_version(image: &Image, banner: &str) -> Option<String> {
    if banner.is_empty() {
        return None;
    }
    in_data(image, |data| memmem::find_iter(data, banner).find_map(|at| numbers(&data[at + banner.len()..])))
}

fn python_version(image: &Image) -> Option<String> {
    if let Some([major, minor, micro]) = image.known_python()?.version {
        return Some(format!("{major}.{minor}.{micro}"));
    }
    // An older interpreter has its version as a text of its own.
    let file = file_name(&image.path);
    let series = numbers(file.trim_start_matches("lib").strip_prefix("python")?.as_bytes())?;
    let text = format!("\0{series}.");
    in_data(image, |data| {
        memmem::find_iter(data, &text).find_map(|at| {
            let version = data[at + 1..].split(|byte| *byte == 0).next()?;
            numbers(version).filter(|found| found.split('.').count() == 3 && version.len() <= found.len() + 4)
        })
    })
}

/// The version in a file of a Python package: `__version__ = '2.5.1+cu121'`.
fn package_version(pid: i32, path: &str) -> Option<String> {
    let root = format!("/proc/{pid}/root");
    let file = target_files::open_within(Path::new(&root), Path::new(path))?;
    let mut text = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut text).ok()?;
    assigned_version(&text)
}

fn assigned_version(text: &[u8]) -> Option<String> {
    let line = text.split(|byte| *byte == b'\n').find(|line| line.starts_with(b"__version__ ="))?;
    let quoted = line.split(|byte| matches!(byte, b'\'' | b'"')).nth(1)?;
    numbers(quoted)
}

fn driver_module() -> Option<String> {
    module_version(&std::fs::read_to_string(DRIVER_MODULE).ok()?)
}

/// The version in the first line of the driver's file in `/proc`.
fn module_version(text: &str) -> Option<String> {
    let (_, after) = text.lines().next()?.split_once("Kernel Module")?;
    after.split_whitespace().find_map(|word| numbers(word.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_in_file_names() {
        for (file, version) in [
            ("libnccl.so.2.18.3", Some("2.18.3")),
            ("libnccl.so.2", None),
            ("libc-2.31.so", Some("2.31")),
            ("libc.so.6", None),
            ("libcuda.so.535.104.05", Some("535.104.05")),
            ("libcuda.so.1", None),
            ("libtorch_cpu.so", None),
            ("libtorch_cpu.so.1.13", Some("1.13")),
        ] {
            assert_eq!(named_version(file).as_deref(), version, "{file}");
        }
        assert_eq!(known("/opt/lib/libnccl.so.2 (deleted)").map(|known| known.name), Some("NCCL"));
        assert!(known("/opt/lib/libncclx.so.2").is_none() && known("/lib/libc++.so.1").is_none());
    }

    #[test]
    fn versions_in_texts() {
        assert_eq!(numbers(b"2.18.3+cuda12.1").as_deref(), Some("2.18.3"));
        assert_eq!(numbers(b"2.36.\nCopyright").as_deref(), Some("2.36"));
        assert_eq!(numbers(b"2"), None);
        assert_eq!(numbers(b"x"), None);
        let file = b"from typing import Optional\n\n__all__ = ['x']\n__version__ = '2.5.1+cu121'\ndebug = False\n";
        assert_eq!(assigned_version(file).as_deref(), Some("2.5.1"));
        assert_eq!(assigned_version(b"version = '1.2'"), None);
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC";
        assert_eq!(module_version(closed).as_deref(), Some("535.104.05"));
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build";
        assert_eq!(module_version(open).as_deref(), Some("560.35.03"));
    }

    #[test]
    fn the_file_of_torch_is_beside_its_package() {
        let file = Some("/opt/venv/lib/python3.11/site-packages/torch/version.py");
        for path in ["torch/lib/libtorch_cuda.so", "torch/utils/file_baton.py:42"] {
            assert_eq!(torch_file(&format!("/opt/venv/lib/python3.11/site-packages/{path}")).as_deref(), file);
        }
        assert_eq!(torch_file("/opt/venv/lib/python3.11/site-packages/torchvision/ops.py:3"), None);
        assert_eq!(torch_file("/home/you/torch/train.py:3"), None);
    }
}
