//! What is installed on a node, as the node sees it: the C library that it needs, and what happens when it cannot be loaded.

use std::{
    fs,
    path::{Path, PathBuf},
};

use xpu_timer_proto::env::VARIABLES;
use xpu_timer_tests::{INSTALLED, Job, PATIENCE, Process, artifacts, compile_c, old_enough, tree};

#[test]
fn what_is_installed_asks_for_no_newer_glibc_than_old_containers_have() {
    for name in INSTALLED {
        if let Err(error) = old_enough(&artifacts().bin(name)) {
            panic!("{error:#}");
        }
    }
}

#[test]
fn a_hook_that_cannot_be_loaded_costs_one_line_and_not_the_job() {
    let job = Job::new();
    let half = job.dir.join("half.so");
    fs::write(&half, &fs::read(artifacts().hook()).unwrap()[..2000]).unwrap();
    let text = job.dir.join("text.so");
    fs::write(&text, "not a library").unwrap();
    let newer = for_a_newer_libc(&job.dir);
    for (hook, reason) in [(half, "SIGBUS"), (text, "cannot be preloaded"), (newer, "GLIBC_9.99' not found")] {
        let mut command = job.launch("/bin/sh");
        command.args(["-c", "/bin/echo ran, preloaded: $LD_PRELOAD; exit 3"]).env("XPU_TIMER_HOOK_PATH", &hook);
        let output = Process::spawn(&mut command).wait(PATIENCE);
        assert_eq!((output.code(), output.stdout.as_str()), (3, "ran, preloaded:\n"), "{}", output.stderr);
        let line = output.stderr.trim_end();
        assert_eq!(line.lines().count(), 1, "{line}");
        assert!(line.starts_with("xpu_timer_launch: running without the hook: ") && line.contains(reason), "{line}");
        assert!(line.contains(&*hook.to_string_lossy()), "{line}");
    }
}

#[test]
fn every_variable_that_the_texts_name_is_one() {
    let mut texts: Vec<PathBuf> =
        ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"].map(|name| tree().join(name)).into();
    for folder in ["docs", "deploy"] {
        texts.extend(fs::read_dir(tree().join(folder)).unwrap().map(|entry| entry.unwrap().path()));
    }
    let known = |word: &str| {
        // The original tool's metrics are written like variables.
        VARIABLES.iter().any(|variable| variable.name == word) || word.starts_with("XPU_TIMER_COMMON_")
    };
    let mut named = 0;
    for path in texts {
        let text = fs::read(&path).unwrap();
        let text = String::from_utf8_lossy(&text);
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let words: Vec<_> = words.filter(|word| word.starts_with("XPU_TIMER_")).collect();
        let unknown: Vec<_> = words.iter().filter(|word| !known(word)).collect();
        assert!(unknown.is_empty(), "{}: {unknown:?}", path.display());
        named += words.len();
    }
    assert!(named > 20, "only {named} variables are named");
}

/// A library that asks for a version of glibc that there is not, as one does that was built on a newer system.
fn for_a_newer_libc(folder: &Path) -> PathBuf {
    let script = folder.join("versions");
    fs::write(&script, "GLIBC_9.99 { global: newest; };").unwrap();
    let script = format!("-Wl,--version-script={}", script.display());
    let shared = ["-shared", "-fPIC", "-nostdlib"];
    let arguments = [&shared[..], &["-Wl,-soname,libc.so.6", &script]].concat();
    let newer = compile_c(folder, "newer.so", "int newest(void) { return 0; }", &arguments);
    let arguments = [&shared[..], &[newer.to_str().unwrap()]].concat();
    compile_c(folder, "hook.so", "int newest(void); int call(void) { return newest(); }", &arguments)
}
