//! `cargo xtask fuzz`: coverage-guided fuzzing of all parsers of external bytes, with stable Rust.
//!
//! The coverage counters are LLVM's own, which `rustc` passes on. libFuzzer comes from crates.io as
//! source.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, ensure};
use xpu_timer_tests::{fuzz_corpus, keep_fuzz_corpus, rank6_dumps, write_files};

use crate::shell::{self, cargo, need};

/// Options of `fuzz`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Seconds for each target; 0: the short run that `test` includes
    #[arg(default_value_t = 60)]
    seconds: u32,
    /// Only targets whose name contains one of these words
    names: Vec<String>,
    /// Adds the new inputs to tests/fuzz/corpora.zip, and drops those that add no coverage
    #[arg(long)]
    keep: bool,
}

/// The only target of this project. With an explicit target, cargo builds build scripts without
/// counters.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Flags with which the compiler counts taken branches and reports comparisons to libFuzzer.
const COUNTERS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions=on -Coverflow-checks=on -Ccodegen-units=1";

/// The fuzz targets: each is a row of `TARGETS` in `tests/fuzz`. The seconds apply to each of them.
const TARGETS: [&str; 12] = [
    "decode",
    "folder",
    "object",
    "perf_map",
    "hook_message",
    "cluster_message",
    "ring",
    "http",
    "settings",
    "command_line",
    "timeline",
    "failure",
];

/// Number of inputs of one target as a part of all tests, including its kept corpus: about a second
/// of work.
const SHORT_RUNS: u32 = 4000;

/// A guided fuzzer finds the planted word in about a million attempts; guessing it takes 2^64.
const PLANTED_ATTEMPTS: u32 = 50_000_000;

pub(crate) fn run(options: &Options) -> Result<()> {
    let built = if options.seconds == 0 { build_short()? } else { build()? };
    run_built(&built, options)
}

/// Builds the fuzzer with counters in all crates, and returns its path.
fn build() -> Result<PathBuf> {
    need(&["g++"])?;
    let mut command = cargo(&["build", "--release", "-p", "xpu_timer_fuzz", "--bins", "--features=fuzzer"]);
    shell::run(command.args(["--target", TARGET]).env("RUSTFLAGS", COUNTERS))?;
    Ok(target().join(TARGET).join("release/xpu_timer_fuzz"))
}

/// Builds the fuzzer for [`run_short`], and returns its path. Only the crates of this workspace
/// have counters; the dependencies are those of the tests. For the few inputs of the short form, it
/// would take longer to compile the dependencies with counters, or to optimize. The tests run
/// meanwhile, and get the processors first.
pub(crate) fn build_short() -> Result<PathBuf> {
    need(&["g++"])?;
    // Cargo chooses the features of a dependency by the packages, and what it builds by the
    // program.
    let arguments = ["build", "--quiet", "--workspace", "--bin=xpu_timer_fuzz", "--features=xpu_timer_fuzz/fuzzer"];
    shell::run(shell::cargo_at_low_priority(&arguments).env("RUSTC_WORKSPACE_WRAPPER", compiler_with_counters()?))?;
    Ok(target().join("debug/xpu_timer_fuzz"))
}

/// Writes a compiler that adds [`COUNTERS`], except to build scripts, which do not contain
/// libFuzzer.
fn compiler_with_counters() -> Result<PathBuf> {
    let text = format!(
        "#!/bin/sh\ncase \" $* \" in *\" build_script_build \"*) exec \"$@\" ;; esac\nexec \"$@\" {COUNTERS}\n"
    );
    // Cargo builds again what another compiler has built. It looks only at the path of the
    // compiler.
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    let path = target().join(format!("fuzz/rustc-{:016x}", hasher.finish()));
    fs::create_dir_all(target().join("fuzz")).context("target/fuzz")?;
    fs::write(&path, text).with_context(|| path.display().to_string())?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).with_context(|| path.display().to_string())?;
    Ok(path)
}

fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| xpu_timer_tests::tree().join("target"), PathBuf::from)
}

/// The form that is a part of all tests: the kept corpus and a fixed number of inputs derived from
/// it. The inputs are equal in each run of the same code.
pub(crate) fn run_short(built: &Path) -> Result<()> {
    run_built(built, &Options { seconds: 0, keep: false, names: Vec::new() })
}

fn run_built(built: &Path, options: &Options) -> Result<()> {
    check_guidance(built)?;
    let chosen =
        |name: &&str| options.names.is_empty() || options.names.iter().any(|word| name.contains(word.as_str()));
    for name in TARGETS.into_iter().filter(chosen) {
        fuzz(built, name, options.seconds)?;
        if options.keep {
            keep(built, name)?;
        }
    }
    Ok(())
}

/// Proves that coverage guides the fuzzer: it must find a planted word. Without guidance it would
/// find nothing and seem to succeed.
fn check_guidance(built: &Path) -> Result<()> {
    let work = work("planted")?;
    // Results of an earlier run must not help this one.
    let corpus = work.join("corpus");
    empty(&corpus)?;
    let output = program(built, "planted", &work)
        .args([format!("-runs={PLANTED_ATTEMPTS}"), "-max_total_time=120".into(), "-max_len=16".into()])
        .arg(corpus)
        .output()
        .context("xpu_timer_fuzz")?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(
        text.contains("the planted word was found"),
        "the fuzzer is not guided: it did not find the planted word\n{text}"
    );
    eprintln!("the fuzzer is guided: it found the planted word");
    Ok(())
}

fn fuzz(built: &Path, name: &str, seconds: u32) -> Result<()> {
    let work = work(name)?;
    let corpus = work.join(if seconds == 0 { "short" } else { "corpus" });
    let mut command = program(built, name, &work);
    command.args(["-verbosity=0", "-print_final_stats=1"]);
    if seconds == 0 {
        // Neither a random input nor one of an earlier run must decide whether a change passes.
        empty(&corpus)?;
        command.args(["-seed=1".into(), format!("-runs={SHORT_RUNS}")]);
    } else {
        command.arg(format!("-max_total_time={seconds}"));
    }
    let count = |folder: &Path| fs::read_dir(folder).map_or(0, Iterator::count);
    let before = count(&corpus);
    // New inputs go to the first folder; the others are read.
    command.arg(&corpus).arg(unpacked(name)?);
    if ["decode", "folder"].contains(&name) {
        let real = work.join("rank6");
        empty(&real)?;
        write_files(&real, &rank6_dumps()?)?;
        command.arg(real);
    }
    shell::run(&mut command).with_context(|| format!("the input is in {}", work.display()))?;
    eprintln!("{name}: {} inputs, {before} before", count(&corpus));
    Ok(())
}

/// Rebuilds the kept corpus: the fewest small inputs that cover the same code as the corpus and the
/// last runs. The fixtures contain inputs of the size of a real dump.
fn keep(built: &Path, name: &str) -> Result<()> {
    let work = work(name)?;
    let chosen = work.join("chosen");
    empty(&chosen)?;
    let mut command = program(built, name, &work);
    // An object file needs space for its tables.
    let longest = if name == "object" { 8192 } else { 192 };
    command
        .args(["-merge=1", "-set_cover_merge=1", "-use_counters=0", "-verbosity=0"])
        .arg(format!("-max_len={longest}"));
    shell::run(command.arg(&chosen).arg(unpacked(name)?).arg(work.join("corpus")))?;
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(&chosen).context("target/fuzz")? {
        let entry = entry.context("target/fuzz")?;
        let bytes = fs::read(entry.path()).with_context(|| entry.path().display().to_string())?;
        files.insert(entry.file_name().to_string_lossy().into_owned(), bytes);
    }
    keep_fuzz_corpus(name, files)
}

/// Unpacks the kept corpus of a target.
fn unpacked(name: &str) -> Result<PathBuf> {
    let folder = work(name)?.join("kept");
    empty(&folder)?;
    write_files(&folder, &fuzz_corpus(name)?)?;
    Ok(folder)
}

fn program(built: &Path, name: &str, work: &Path) -> Command {
    let mut command = Command::new(built);
    command.env("XPU_FUZZ_TARGET", name);
    // Where it writes an input that makes a target panic.
    command.arg(format!("-artifact_prefix={}/", work.display())).args(["-timeout=20", "-rss_limit_mb=2048"]);
    command
}

/// Creates an empty folder.
fn empty(folder: &Path) -> Result<()> {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())
}

fn work(name: &str) -> Result<PathBuf> {
    let work = target().join("fuzz").join(name);
    fs::create_dir_all(work.join("corpus")).with_context(|| work.display().to_string())?;
    Ok(work)
}
