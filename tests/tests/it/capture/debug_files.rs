//! Where names, lines and unwind rules come from when the object itself has none: separate debug
//! files, packed symbols, memory, perf maps. And objects whose files change while they are read.

use std::{
    fs::{self, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
};

use xpu_timer_capture::{Capturer, Options, merge};
use xpu_timer_proto::server::{CaptureMethod, PstackStacktrace};
use xpu_timer_tests::{PATIENCE, Process, compile_c, python_version, skip};

use super::{capture_until, describe, has_run, names, start, thread};

const PROGRAM: &str = r#"
#include <stdio.h>
#include <unistd.h>
#define NOINLINE __attribute__((noinline, noclone))
NOINLINE static int inner(int n) { puts("ready"); fflush(stdout); return pause() + n; }
NOINLINE static int outer(int n) { return inner(n) + 1; }
int main(void) { return outer(1) + 1; }
"#;

/// A build of the program with `-g`.
fn build(folder: &Path, arguments: &[&str]) -> PathBuf {
    let program = compile_c(folder, "program", PROGRAM, &[&["-O2", "-g"], arguments].concat());
    // The source must not be what makes a name or a line visible.
    fs::remove_file(folder.join("program.c")).expect("the source was there");
    program
}

#[track_caller]
fn run(command: &str, folder: &Path) {
    let output = Command::new("sh").args(["-ec", command]).current_dir(folder).output().expect("sh runs");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The complete stack of the main thread, as soon as it sleeps in `pause`.
#[track_caller]
fn at_rest(pid: i32) -> PstackStacktrace {
    let captured = capture_until(pid, "it sleeps in pause", |sample| {
        let main = &sample.stacktrace[0];
        main.capture() == CaptureMethod::ZeroStop && names(main).contains(&"pause")
    });
    let main = thread(&captured.sample, pid);
    assert_eq!(main.incomplete, "", "{}", describe(&captured.sample));
    main.clone()
}

/// `name file:line` of the program's own three functions.
fn own(main: &PstackStacktrace) -> Vec<String> {
    let own = main.frames.iter().filter(|frame| frame.module.ends_with("/program"));
    own.take(3)
        .map(|frame| {
            let place = frame.file_name.rsplit('/').next().unwrap_or_default();
            format!("{} {place}", frame.func_name)
        })
        .collect()
}

const WITH_LINES: [&str; 3] = ["inner program.c:5", "outer program.c:6", "main program.c:7"];

#[test]
fn a_debug_file_that_a_link_names() {
    for (place, build_id) in [(".", true), (".debug", true), (".debug", false)] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let id = if build_id { "-Wl,--build-id=sha1" } else { "-Wl,--build-id=none" };
        let program = build(folder.path(), &[id]);
        let script = format!(
            "mkdir -p {place} && objcopy --only-keep-debug program {place}/program.debug && strip program && \
             objcopy --add-gnu-debuglink={place}/program.debug program"
        );
        run(&script, folder.path());
        let process = start(&program, &[]);
        assert_eq!(own(&at_rest(process.pid())), WITH_LINES, "{place}, build id: {build_id}");
    }
}

#[test]
fn a_debug_file_of_another_build_is_not_taken() {
    for id in ["-Wl,--build-id=sha1", "-Wl,--build-id=none"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let program = build(folder.path(), &[id]);
        run("objcopy --only-keep-debug program program.debug && strip program", folder.path());
        run("objcopy --add-gnu-debuglink=program.debug program", folder.path());
        // The same addresses under other names.
        let other = tempfile::tempdir().expect("a temporary folder");
        let source = PROGRAM.replace("inner", "wrong").replace("outer", "worse");
        compile_c(other.path(), "program", &source, &["-O2", "-g", id]);
        run("objcopy --only-keep-debug program program.debug", other.path());
        fs::copy(other.path().join("program.debug"), folder.path().join("program.debug")).expect("own folders");
        let process = start(&program, &[]);
        let frames = own(&at_rest(process.pid()));
        assert_eq!(frames, ["?? program", "?? program", "?? program"], "{id}");
    }
}

/// Files in the target's own file system that this test does not see.
#[test]
fn a_debug_file_by_build_id_within_the_targets_root() {
    let allowed = Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|status| status.success());
    if !allowed {
        return skip("namespaces cannot be made here: it takes root, or CAP_SYS_ADMIN, and unshare");
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    build(folder.path(), &["-Wl,--build-id=0xabcdef0123456789"]);
    run("objcopy --only-keep-debug program 01.debug && strip program", folder.path());
    let script = "mkdir -p /usr/lib/debug && mount -t tmpfs none /usr/lib/debug && mkdir -p /usr/lib/debug/.build-id/ab && \
                  mv 01.debug /usr/lib/debug/real && ln -s /usr/lib/debug/real /usr/lib/debug/.build-id/ab/cdef0123456789.debug && \
                  exec ./program";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-ec", script]).current_dir(folder.path());
    let mut process = Process::spawn(&mut command);
    process.wait_for("ready", PATIENCE);
    assert!(!Path::new("/usr/lib/debug/real").exists(), "only the target sees it");
    // The link is absolute, and means the target's root.
    assert_eq!(own(&at_rest(process.pid())), WITH_LINES);
}

#[test]
fn symbols_packed_into_the_object() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = build(folder.path(), &[]);
    // As Fedora's build makes it: functions that are not exported, and nothing else, compressed.
    let script = "nm program --defined-only --format=posix | awk '$2 ~ /[Tt]/ { print $1 }' | sort > keep && \
                  objcopy -S --remove-section .gdb_index --remove-section .comment --keep-symbols=keep program mini && \
                  strip program && xz mini && objcopy --add-section .gnu_debugdata=mini.xz program";
    run(script, folder.path());
    let process = start(&program, &[]);
    assert_eq!(own(&at_rest(process.pid())), ["inner program", "outer program", "main program"]);
}

#[test]
fn packed_symbols_that_are_damaged_are_left_alone() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = build(folder.path(), &[]);
    run("head -c 4000 program | xz > mini.xz && strip program && head -c 300 mini.xz > cut.xz", folder.path());
    run("objcopy --add-section .gnu_debugdata=cut.xz program", folder.path());
    let process = start(&program, &[]);
    assert_eq!(own(&at_rest(process.pid())), ["?? program", "?? program", "?? program"]);
}

#[test]
fn unwind_rules_that_only_debuggers_know() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let without = ["-fno-asynchronous-unwind-tables", "-fno-unwind-tables", "-fomit-frame-pointer"];
    for compressed in ["-gz=none", "-gz=zlib"] {
        let program = build(folder.path(), &[&without[..], &[compressed]].concat());
        let sections = Command::new("readelf").args(["-SW"]).arg(&program).output().expect("readelf runs");
        assert!(String::from_utf8_lossy(&sections.stdout).contains(".debug_frame"), "the build is what it should be");
        let process = start(&program, &[]);
        // No register but the stack pointer is needed.
        let main = at_rest(process.pid());
        assert_eq!(own(&main), WITH_LINES, "{compressed}");
    }
    // Distributions move them into the debug file with all the rest.
    let program = build(folder.path(), &[&without[..], &["-Wl,--build-id=sha1"]].concat());
    run("objcopy --only-keep-debug program program.debug && strip program", folder.path());
    run("objcopy --add-gnu-debuglink=program.debug program", folder.path());
    let process = start(&program, &[]);
    assert_eq!(own(&at_rest(process.pid())), WITH_LINES);
}

/// A thread that is nearly always in the kernel's own object.
const CLOCK: &str = r#"
#include <stdio.h>
#include <time.h>
#define NOINLINE __attribute__((noinline, noclone))
NOINLINE static void read_clock(void) { struct timespec now; for (;;) clock_gettime(CLOCK_MONOTONIC, &now); }
NOINLINE static int outer(void) { puts("ready"); fflush(stdout); read_clock(); __asm__ volatile("" ::: "memory"); return 1; }
int main(void) { return outer() + 1; }
"#;

#[test]
fn the_kernels_own_object() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = compile_c(folder.path(), "program", CLOCK, &["-O2", "-fomit-frame-pointer"]);
    let process = start(&program, &[]);
    let captured = capture_until(process.pid(), "it is in the vdso", |sample| {
        let main = &sample.stacktrace[0];
        main.frames.first().is_some_and(|frame| frame.module == "[vdso]")
            && has_run(main, &["read_clock", "outer", "main"])
    });
    let main = thread(&captured.sample, process.pid());
    assert_eq!(main.incomplete, "", "{}", describe(&captured.sample));
    assert!(names(main)[0].contains("clock_gettime"), "{}", describe(&captured.sample));
    assert_eq!(names(main).last(), Some(&"_start"), "{}", describe(&captured.sample));
}

/// Code made at run time, as compilers within a process make it: it keeps a frame pointer and has
/// no tables. The second copy is named in a perf map.
const JIT: &str = r#"
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#define NOINLINE __attribute__((noinline, noclone))
NOINLINE static int inner(void) { puts("ready"); fflush(stdout); return pause() + 1; }
typedef int (*call)(void *);
static char *page;
NOINLINE static int between(void) { return ((call)(page + 64))((void *)inner) + 1; }
int main(void) {
    /* push rbp; mov rbp, rsp; call rdi; pop rbp; ret */
    static const unsigned char code[] = {0x55, 0x48, 0x89, 0xe5, 0xff, 0xd7, 0x5d, 0xc3};
    page = mmap(0, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(page, code, sizeof code);
    memcpy(page + 64, code, sizeof code);
    char path[64];
    snprintf(path, sizeof path, "/tmp/perf-%d.map", getpid());
    FILE *map = fopen(path, "w");
    fprintf(map, "%lx 40 a kernel of two words\n", (unsigned long)page + 64);
    fclose(map);
    return ((call)page)((void *)between) + 1;
}
"#;

#[test]
fn code_made_at_run_time() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // The second kind keeps no frame pointer: sub $8, %rsp; call *%rdi; add $8, %rsp; ret.
    let slim = JIT.replace(
        "{0x55, 0x48, 0x89, 0xe5, 0xff, 0xd7, 0x5d, 0xc3}",
        "{0x48, 0x83, 0xec, 0x08, 0xff, 0xd7, 0x48, 0x83, 0xc4, 0x08, 0xc3}",
    );
    assert_ne!(slim, JIT);
    for source in [JIT, &slim] {
        let arguments = ["-O2", "-fomit-frame-pointer", "-fno-optimize-sibling-calls"];
        let program = compile_c(folder.path(), "program", source, &arguments);
        let process = start(&program, &[]);
        let map = PathBuf::from(format!("/tmp/perf-{}.map", process.pid()));
        // The code shows how it returns.
        let main = at_rest(process.pid());
        fs::remove_file(&map).expect("the program has written it");
        let wanted = ["inner", "a kernel of two words", "between", "??", "main"];
        assert!(has_run(&main, &wanted), "{main:#?}");
        let made: Vec<&str> =
            main.frames.iter().filter(|frame| frame.module == "[jit]").map(|frame| frame.func_name.as_str()).collect();
        assert_eq!(made, ["a kernel of two words", "??"], "{main:#?}");
        assert_eq!(names(&main).last(), Some(&"_start"));
    }
}

/// Code that does more than return: only a frame pointer leads on, and only the code before it
/// shows where it points.
#[test]
fn code_made_at_run_time_with_a_frame_pointer() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // push %rbp; mov %rsp, %rbp; call *%rdi; push %rax; pop %rax; nop; pop %rbp; ret: what follows
    // is not followed
    let source = JIT.replace("0xff, 0xd7, 0x5d, 0xc3}", "0xff, 0xd7, 0x50, 0x58, 0x90, 0x5d, 0xc3}");
    assert_ne!(source, JIT);
    let program = compile_c(folder.path(), "program", &source, &["-O2", "-fno-optimize-sibling-calls"]);
    let process = start(&program, &[]);
    let main = at_rest(process.pid());
    fs::remove_file(format!("/tmp/perf-{}.map", process.pid())).expect("the program has written it");
    assert!(has_run(&main, &["inner", "a kernel of two words", "between", "??", "main"]), "{main:#?}");
}

/// CPython under `-X perf` calls every Python function through code that it generates, and names it
/// in a perf map.
#[test]
fn trampolines_of_cpython() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = folder.path().join("script.py");
    let text = "import time\ndef inner():\n    print('ready', flush=True)\n    time.sleep(100000)\n\
                def outer():\n    sorted([1], key=lambda _: inner())\nouter()\n";
    fs::write(&script, text).expect("own folder");
    for version in ["3.12", "3.13"] {
        let Some(python) = python_version(version) else {
            skip(&format!("CPython {version} is not installed"));
            continue;
        };
        let mut process = Process::spawn(Command::new(python).args(["-X", "perf"]).arg(&script));
        process.wait_for("ready", PATIENCE);
        let captured = capture_until(process.pid(), "it sleeps", |sample| {
            names(&sample.stacktrace[0]).iter().any(|name| name.contains("nanosleep"))
        });
        fs::remove_file(format!("/tmp/perf-{}.map", process.pid())).expect("python has written it");
        let main = thread(&captured.sample, process.pid());
        assert_eq!(main.incomplete, "", "{version}: {}", describe(&captured.sample));
        assert_eq!(names(main).last(), Some(&"_start"), "{version}: {}", describe(&captured.sample));
        let made = main.frames.iter().filter(|frame| frame.module == "[jit]");
        let made: Vec<&str> = made.filter_map(|frame| frame.func_name.split(':').nth(2)).collect();
        assert_eq!(made, ["inner", "outer.<locals>.<lambda>", "outer", "<module>"], "{version}");
        let merged = merge(&main.frames, &captured.sample.py_stacktrace[0].frames, &captured.python_entries[0]);
        assert!(merged.is_ok(), "{version}: {}", describe(&captured.sample));
    }
}

/// Waits within a function that its library calls.
const THROUGH_A_LIBRARY: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>
static void wait_here(void) { puts("ready"); fflush(stdout); for (;;) pause(); }
int main(int count, char **arguments) {
  void *library = dlopen(arguments[1], RTLD_NOW);
  void (*through)(void (*)(void)) = (void (*)(void (*)(void)))dlsym(library, "through_the_library");
  through(wait_here);
  return 0;
}
"#;

/// A symbol table that takes a while to read.
fn library() -> String {
    let functions: String =
        (0..4_000).map(|n| format!("__attribute__((naked)) void filler_of_the_library_{n}(void) {{}}\n")).collect();
    format!(
        "{functions}__attribute__((noinline)) void through_the_library(void (*wait)(void)) {{ wait(); __asm__ volatile(\"\"); }}\n"
    )
}

/// A process that waits within a function of a library, and the path of the library.
fn wait_in_library(folder: &Path) -> (Process, String) {
    let library = compile_c(folder, "library.so", &library(), &["-O0", "-g0", "-shared", "-fPIC"]);
    let program = compile_c(folder, "program", THROUGH_A_LIBRARY, &["-O1", "-ldl"]);
    let path = library.to_str().expect("UTF-8").to_owned();
    let process = start(&program, &[&path]);
    capture_until(process.pid(), "it waits within the library", |sample| {
        names(thread(sample, process.pid())).contains(&"through_the_library")
    });
    (process, path)
}

/// Sets the flag at the end of its scope.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The file is truncated and rewritten in place, as `cp` over a used library does.
#[test]
fn a_library_that_is_cut_short_and_written_anew_costs_names_and_not_the_reader() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (process, path) = wait_in_library(folder.path());
    let (pid, whole) = (process.pid(), fs::read(&path).expect("the library"));
    // The capture that has read the whole file reads pages of it again.
    let mut old = Capturer::new();
    old.capture(&[pid], &Options::default());
    let stop = AtomicBool::new(false);
    let mut reported = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut file = OpenOptions::new().write(true).open(&path).expect("own file");
            while !stop.load(Ordering::Relaxed) {
                for part in [0, 100, whole.len() / 2] {
                    file.set_len(part as u64).expect("own file");
                    std::thread::yield_now();
                }
                file.set_len(0).expect("own file");
                std::io::Seek::rewind(&mut file).expect("own file");
                whole.chunks(whole.len() / 8 + 1).for_each(|chunk| file.write_all(chunk).expect("own file"));
            }
        });
        // The scope waits for the writer, also when an assertion fails.
        let _stop = StopOnDrop(&stop);
        for _ in 0..60 {
            for capturer in [&mut old, &mut Capturer::new()] {
                let captured = capturer.capture(&[pid], &Options::default()).remove(0);
                let main = thread(&captured.sample, pid);
                assert!(names(main).contains(&"pause"), "{}", describe(&captured.sample));
                let remark = |error: &String| error.contains(&path) && error.contains("have no names");
                let is_reported = captured.sample.errors.iter().any(remark);
                let is_lost = !names(main).contains(&"through_the_library") && main.incomplete.is_empty();
                assert!(
                    is_reported || !is_lost,
                    "a name is lost and no error names it: {}",
                    describe(&captured.sample)
                );
                reported += usize::from(is_reported);
            }
        }
    });
    assert!(reported > 0, "a file that changes during the read is reported");
    // All names are there again, also for those that have seen it change.
    for capturer in [&mut old, &mut Capturer::new()] {
        let captured = capturer.capture(&[pid], &Options::default()).remove(0);
        let main = thread(&captured.sample, pid);
        assert!(names(main).contains(&"through_the_library"), "{}", describe(&captured.sample));
        assert!(captured.sample.errors.is_empty(), "{}", describe(&captured.sample));
    }
}

#[test]
fn a_library_of_which_only_a_part_is_written_is_reported() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (process, path) = wait_in_library(folder.path());
    let (pid, whole) = (process.pid(), fs::read(&path).expect("the library"));
    // The file that `cp` over the library leaves while it waits for a processor.
    let file = OpenOptions::new().write(true).open(&path).expect("own file");
    for part in (1..16).map(|part| whole.len() * part / 16) {
        file.set_len(0).expect("own file");
        std::os::unix::fs::FileExt::write_all_at(&file, &whole[..part], 0).expect("own file");
        let captured = Capturer::new().capture(&[pid], &Options::default()).remove(0);
        let main = thread(&captured.sample, pid);
        let remark = |error: &String| error.contains(&path) && error.contains("have no names");
        let is_lost = !names(main).contains(&"through_the_library");
        let is_reported = captured.sample.errors.iter().any(remark);
        assert!(is_reported || !is_lost, "{part} bytes of {}: {}", whole.len(), describe(&captured.sample));
    }
}
