//! `cargo xtask` starts here: builds xtask, and becomes it. `cargo xtask demo` builds the programs
//! that the demo runs at the same time, so that no core waits for the last crates of xtask.
//!
//! Cargo chooses the features of a dependency by the packages of a command. `cargo run` accepts one
//! package only, so it would compile dependencies with the features that xtask needs, and the
//! build of the programs would compile them again.
//!
//! All of it is compiled without incremental state, unless `CARGO_INCREMENTAL` is set: a first
//! build is faster, and needs gigabytes less.
#![forbid(unsafe_code)]

#[path = "../../../tests/src/packages.rs"]
mod packages;

use std::{
    env,
    ffi::OsStr,
    io::Error,
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, ExitCode},
};

fn main() -> ExitCode {
    let error = start();
    eprintln!("cargo xtask: {error}");
    ExitCode::FAILURE
}

/// Returns only if xtask cannot be built or run.
fn start() -> Error {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut build = command(&cargo);
    build.arg("build").current_dir(root);
    let asks_for_help = env::args_os().any(|argument| argument == "--help" || argument == "-h");
    if env::args_os().nth(1).is_some_and(|name| name == "demo") && !asks_for_help {
        build.args(["xtask"].iter().chain(&packages::PACKAGES).flat_map(|package| ["-p", package]));
    } else {
        build.args(["--quiet", "--workspace", "--bin=xtask"]);
    }
    match build.status() {
        Ok(status) if status.success() => {}
        Ok(status) => return Error::other(format!("the build of xtask: {status}")),
        Err(error) => return error,
    }
    match env::current_exe() {
        Ok(this) => command(this.with_file_name("xtask").as_os_str()).args(env::args_os().skip(1)).exec(),
        Err(error) => error,
    }
}

fn command(program: &OsStr) -> Command {
    let mut command = Command::new(program);
    if env::var_os("CARGO_INCREMENTAL").is_none() {
        command.env("CARGO_INCREMENTAL", "0");
    }
    command
}
