//! PyPI's PyTorch, the CUDA build, in a virtual environment under `target/torch-venv`: 5.4 GB, so only `cargo xtask test --torch`
//! sets it up. It runs on the simulated device, whose libraries are preloaded in place of the real ones.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

/// Newer ones work as well until a test shows that they do not; the version is fixed so that a failure is ours.
const VERSION: &str = "torch==2.15.0";
/// The simulated libraries that this version asks for.
const SIMULATED: [&str; 5] =
    ["libcuda.so.1", "libcudart.so.13", "libnccl.so.2", "libcublas.so.13", "libcublasLt.so.13"];
/// Beginnings of their functions' names.
const PREFIXES: [&str; 6] = ["cuda", "__cuda", "cublas", "nccl", "pnccl", "cu"];

/// The Python of the environment, which is set up when it is not there.
///
/// # Errors
/// When there is no python3 with venv, or PyPI cannot be reached.
pub fn torch_venv() -> Result<PathBuf> {
    let folder = crate::tree().join("target/torch-venv");
    let python = folder.join("bin/python3");
    let run = |command: &mut Command| -> Result<()> {
        let status = command.status().with_context(|| format!("{command:?}"))?;
        ensure!(status.success(), "{command:?}: {status}");
        Ok(())
    };
    if !python.exists() {
        run(Command::new(crate::python()).args(["-m", "venv"]).arg(&folder))?;
    }
    // Looking the module up is much faster than importing it.
    let find = ["-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"];
    if !Command::new(&python).args(find).status().is_ok_and(|status| status.success()) {
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--no-input", VERSION, "numpy"]))?;
    }
    Ok(python)
}

/// What to preload so that PyPI's torch finds the simulated device: its libraries by their full paths, because torch looks in
/// its own folders first, and a library of stubs in `folder`, because Python wants every function that torch could call to be
/// there. A stub answers "not supported" (801).
///
/// # Errors
/// When the environment is not set up, or nm or gcc is missing.
pub fn torch_preloads(folder: &Path) -> Result<Vec<PathBuf>> {
    let python = torch_venv()?;
    let packages =
        fs::read_dir(python.with_file_name("../lib"))?.flatten().map(|entry| entry.path().join("site-packages"));
    let mut libraries = Vec::new();
    for packages in packages {
        for part in ["torch", "nvidia"] {
            shared_objects(&packages.join(part), &mut libraries);
        }
    }
    ensure!(!libraries.is_empty(), "there is no library of torch beside {}", python.display());
    let replaced = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        SIMULATED.iter().any(|simulated| simulated.split(".so").next() == name.split(".so").next())
    };
    libraries.retain(|path| !replaced(path));
    let simulated: Vec<PathBuf> = SIMULATED.iter().map(|name| crate::artifacts().sim().join(name)).collect();

    let is_theirs = |name: &String| PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    let wanted: BTreeSet<String> = symbols("--undefined-only", &libraries)?.into_iter().filter(is_theirs).collect();
    let given: BTreeSet<String> =
        symbols("--defined-only", &libraries)?.into_iter().chain(symbols("--defined-only", &simulated)?).collect();
    let stubs: String = wanted.difference(&given).map(|name| stub(name)).collect();
    let arguments = ["-shared", "-fPIC", "-w", "-fno-builtin"];
    let stubs = crate::compile_c(folder, "libtorch_stubs.so", &stubs, &arguments);
    Ok(simulated.into_iter().chain([stubs]).collect())
}

/// A function in C. Nearly all of them are never called.
fn stub(name: &str) -> String {
    match name {
        // CUDA 13 gave the third form of it the plain name.
        "cudaStreamGetCaptureInfo" => {
            let parameters = "(long a, void *b, void *c, void *d, void *e, void *f, void *g)";
            let call = "cudaStreamGetCaptureInfo_v3(a, b, c, d, e, f, g)";
            format!("int cudaStreamGetCaptureInfo_v3(); int {name}{parameters} {{ return {call}; }}\n")
        }
        // What a graph keeps alive is of no interest without a device.
        "cudaUserObjectCreate" | "cudaUserObjectRelease" | "cudaGraphRetainUserObject" => {
            format!("int {name}(void) {{ return 0; }}\n")
        }
        _ => format!("int {name}(void) {{ return 801; }}\n"),
    }
}

fn shared_objects(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            shared_objects(&path, found);
        } else if entry.file_name().to_string_lossy().contains(".so") {
            found.push(path);
        }
    }
}

/// Names of dynamic symbols without their versions.
fn symbols(which: &str, libraries: &[PathBuf]) -> Result<BTreeSet<String>> {
    let output = Command::new("nm").args(["-D", which]).args(libraries).output().context("nm cannot be run")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let names = text.lines().filter_map(|line| line.split_whitespace().next_back()?.split('@').next());
    Ok(names.map(str::to_string).collect())
}
