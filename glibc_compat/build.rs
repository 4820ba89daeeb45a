//! Build script of all installed files: a file that is linked on a current Linux also starts with
//! glibc 2.28 (2018), which older job containers have.
//!
//! The linker binds to the newest version of a function. A library that needs a version which is
//! missing is not skipped: the program that preloads it does not start. This script therefore links
//! each function that has a new version, name or place under its old one, with `--wrap`. The tests
//! in `installed::` check which versions the files need, and name functions that are missing here.

use std::{env, fs, path::PathBuf, process::Command};

/// Functions of glibc that have a newer version, and their old version, which every glibc has.
const MOVED: [(&str, &str); 21] = [
    ("dladdr", "GLIBC_2.2.5"),
    ("dlclose", "GLIBC_2.2.5"),
    ("dlerror", "GLIBC_2.2.5"),
    ("dlsym", "GLIBC_2.2.5"),
    ("dlvsym", "GLIBC_2.2.5"),
    ("log", "GLIBC_2.2.5"),
    ("pow", "GLIBC_2.2.5"),
    ("pthread_attr_getguardsize", "GLIBC_2.2.5"),
    ("pthread_attr_getstack", "GLIBC_2.2.5"),
    ("pthread_attr_setstacksize", "GLIBC_2.2.5"),
    ("pthread_create", "GLIBC_2.2.5"),
    ("pthread_detach", "GLIBC_2.2.5"),
    ("pthread_getattr_np", "GLIBC_2.2.5"),
    ("pthread_getspecific", "GLIBC_2.2.5"),
    ("pthread_join", "GLIBC_2.2.5"),
    ("pthread_key_create", "GLIBC_2.2.5"),
    ("pthread_key_delete", "GLIBC_2.2.5"),
    ("pthread_kill", "GLIBC_2.2.5"),
    ("pthread_setname_np", "GLIBC_2.12"),
    ("pthread_setspecific", "GLIBC_2.2.5"),
    ("pthread_sigmask", "GLIBC_2.2.5"),
];

/// New functions that `glibc_compat.c` replaces.
const MADE: [&str; 10] = [
    "fstat",
    "fstat64",
    "fstatat",
    "fstatat64",
    "gettid",
    "lstat",
    "lstat64",
    "posix_spawn_file_actions_addchdir_np",
    "stat",
    "stat64",
];

/// Wrapped in programs only; a library is not started.
const START: &str = "__libc_start_main";

/// The hook exports these itself.
const EXPORTED: [&str; 2] = ["dlsym", "dlvsym"];

fn main() {
    println!("cargo::rerun-if-env-changed=CC");
    let target = |key: &str| env::var(format!("CARGO_CFG_TARGET_{key}")).unwrap_or_default();
    if (target("ARCH").as_str(), target("ENV").as_str()) != ("x86_64", "gnu") {
        return;
    }
    let object = compile(&format!("{}\n{}", include_str!("glibc_compat.c"), jumps()));
    let names = MOVED.iter().map(|(name, _)| *name).chain(MADE);
    // The hook is the only library. Cargo rejects link arguments for targets that a package does
    // not have.
    let (kind, names): (_, Vec<_>) = if env::var("CARGO_PKG_NAME").is_ok_and(|name| name == "xpu_timer_hook") {
        ("cdylib", names.filter(|name| !EXPORTED.contains(name)).collect())
    } else {
        ("bins", names.chain([START]).collect())
    };
    for name in names {
        println!("cargo::rustc-link-arg-{kind}=-Wl,--wrap={name}");
    }
    // The two libraries contained these functions until 2.34. A later glibc still exports them for
    // old programs.
    println!(
        "cargo::rustc-link-arg-{kind}=-Wl,--push-state,--no-as-needed,-l:libpthread.so.0,-l:libdl.so.2,--pop-state"
    );
    println!("cargo::rustc-link-arg-{kind}={object}");
}

/// A jump for each moved function, so that the function sees its real caller.
fn jumps() -> String {
    let jump = |(name, version): &(&str, &str)| {
        let lines = [
            format!(".symver first_{name}, {name}@{version}"),
            format!(".section .text.__wrap_{name}, \\\"ax\\\", @progbits"),
            format!(".globl __wrap_{name}"),
            format!(".type __wrap_{name}, @function"),
            format!("__wrap_{name}: endbr64"),
            format!("jmp *first_{name}@GOTPCREL(%rip)"),
            format!(".size __wrap_{name}, . - __wrap_{name}"),
        ];
        format!("__asm__(\"{}\\n.text\\n\");\n", lines.join("\\n"))
    };
    MOVED.iter().map(jump).collect()
}

fn compile(source: &str) -> String {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo names it"));
    let (file, object) = (out.join("glibc_compat.c"), out.join("glibc_compat.o"));
    fs::write(&file, source).expect("OUT_DIR can be written");
    // `CC` may be a command with arguments, such as `ccache gcc`.
    let cc = env::var("CC").unwrap_or_default();
    let mut words = cc.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or("cc"));
    let arguments = ["-c", "-O2", "-fPIC", "-ffunction-sections", "-fvisibility=hidden", "-o"];
    command.args(words).args(arguments).arg(&object).arg(&file);
    let status = command.status().unwrap_or_else(|error| panic!("{command:?} cannot be run: {error}"));
    assert!(status.success(), "{command:?}: {status}");
    object.display().to_string()
}
