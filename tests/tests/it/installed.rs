//! The installed files on a node: the C library that they need, and what happens when they cannot
//! be loaded.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use xpu_timer_proto::env::VARIABLES;
use xpu_timer_tests::{
    INSTALLED, Job, PATIENCE, Process, artifacts, compile_c, copy_stripped, old_enough, python_version, skip, tree,
    write_wheel,
};

#[test]
fn installed_files_need_no_newer_glibc_than_2_28() {
    for name in INSTALLED {
        if let Err(error) = old_enough(&artifacts().bin(name)) {
            panic!("{error:#}");
        }
    }
}

#[test]
fn a_hook_that_cannot_be_loaded_prints_one_line_and_the_job_runs() {
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
fn a_wheel_installs_into_virtual_environments_and_its_removal_leaves_nothing() {
    let job = Job::new();
    let files = job.dir.join("files");
    fs::create_dir(&files).unwrap();
    copy_stripped(artifacts().bin("xpu_timer_launch").parent().unwrap(), &files).unwrap();
    let wheel = write_wheel(&files, &job.dir).unwrap();
    for version in ["3.9", "3.13"] {
        let Some(python) = python_version(version) else {
            skip(&format!("there is no CPython {version}"));
            continue;
        };
        let venv = job.dir.join(version);
        succeed(Command::new(python).args(["-m", "venv"]).arg(&venv));
        let before = files_below(&venv);
        let pip = || {
            let mut pip = Command::new(venv.join("bin/python"));
            pip.args(["-m", "pip", "--disable-pip-version-check"]);
            pip
        };
        // Bytecode of pip itself is none of the wheel's.
        succeed(pip().env("PYTHONDONTWRITEBYTECODE", "1").args(["install", "--no-index"]).arg(&wheel));
        let installed = files_below(&venv);
        assert!(INSTALLED.iter().all(|name| installed.iter().any(|path| path.ends_with(name))), "{installed:?}");

        // Only the variables that separate this job from others stay in the environment.
        let apart = job.command("true");
        let apart = apart.get_envs().filter_map(|(name, value)| Some((name, value?)));
        let apart = apart.filter(|(name, _)| *name == "TMPDIR" || name.to_string_lossy().starts_with("XPU_TIMER_"));
        let mut command = Command::new(venv.join("bin/xpu_timer_launch"));
        command.env_clear().envs(apart).arg(venv.join("bin/python"));
        let script = "print('libxpu_timer_hook.so' in open('/proc/self/maps').read())";
        let output = Process::spawn(command.args(["-c", script])).wait(PATIENCE);
        assert_eq!((output.code(), output.stdout.as_str(), output.stderr.as_str()), (0, "True\n", ""));

        succeed(pip().env("PYTHONDONTWRITEBYTECODE", "1").args(["uninstall", "--yes", "xpu_timer"]));
        assert_eq!(files_below(&venv), before);
    }
}

fn succeed(command: &mut Command) {
    let output = Process::spawn(command).wait(PATIENCE);
    assert_eq!(output.code(), 0, "{command:?}: {}{}", output.stdout, output.stderr);
}

/// Paths of all files below a folder, in order.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut folders = vec![folder.to_path_buf()];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().flatten() {
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
            } else {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    files
}

#[test]
fn every_variable_in_the_documentation_exists() {
    let mut texts: Vec<PathBuf> =
        ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"].map(|name| tree().join(name)).into();
    for folder in ["docs", "deploy"] {
        texts.extend(fs::read_dir(tree().join(folder)).unwrap().map(|entry| entry.unwrap().path()));
    }
    let known = |word: &str| {
        // The original tool's metrics are written like variables. The others are read by tests.
        let others = ["XPU_TIMER_COMMON_", "XPU_TIMER_COLL_KERNEL_", "XPU_TIMER_MM_KERNEL_", "XPU_TIMER_TEST_"];
        VARIABLES.iter().any(|variable| variable.name == word) || others.iter().any(|name| word.starts_with(name))
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

/// A library that asks for a version of glibc that there is not, as one does that was built on a
/// newer system.
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
