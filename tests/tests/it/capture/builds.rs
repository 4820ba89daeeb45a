//! Checks names, complete stacks and inlined functions of equal calls in C, C++ and Rust, with
//! every usual set of build options.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use xpu_timer_proto::server::PstackStacktrace;
use xpu_timer_tests::{lacks, skip};

use super::{capture_until, describe, has_run, names, start, thread};

/// Builds a program with a compiler that takes `-o OUTPUT INPUT`.
pub fn compile(folder: &Path, compiler: &str, source_name: &str, source: &str, arguments: &[&str]) -> PathBuf {
    let input = folder.join(source_name);
    fs::write(&input, source).expect("own folder");
    let output = folder.join("program");
    let mut command = Command::new(compiler);
    // `cargo xtask test --timings` sets this variable, which changes rustc.
    command.env_remove("RUSTC_BOOTSTRAP").args(arguments).arg("-o").arg(&output).arg(&input);
    let built = command.output();
    let built = built.unwrap_or_else(|error| panic!("{compiler}: {error}"));
    assert!(built.status.success(), "{compiler} {arguments:?}: {}", String::from_utf8_lossy(&built.stderr));
    output
}

/// Captures until the main thread sleeps in `wanted`, and checks that its stack is complete down to
/// the first frame of the program.
#[track_caller]
pub fn check(program: &PathBuf, what: &str, wanted: &[&str]) -> PstackStacktrace {
    let process = start(program, &[]);
    let captured = capture_until(process.pid(), what, |sample| has_run(&sample.stacktrace[0], wanted));
    let main = thread(&captured.sample, process.pid());
    assert_eq!(main.incomplete, "", "{what}: {}", describe(&captured.sample));
    assert_eq!(names(main).last(), Some(&"_start"), "{what}: {}", describe(&captured.sample));
    main.clone()
}

pub const C: &str = r#"
#include <stdio.h>
#include <unistd.h>
#define NOINLINE __attribute__((noinline, noclone))
NOINLINE static int inner(int n) { puts("ready"); fflush(stdout); return pause() + n; }
static inline __attribute__((always_inline)) int between(int n) { return inner(n) + 1; }
NOINLINE static int outer(int n) { return between(n) + 1; }
int main(void) { return outer(1) + 1; }
"#;

/// Without line tables there are no inlined functions either.
const C_PLAIN: [&str; 4] = ["pause", "inner", "outer", "main"];

#[test]
fn c_in_every_build() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for arguments in [
        "-O0",
        "-O0 -fomit-frame-pointer",
        "-O2",
        "-O2 -fomit-frame-pointer",
        "-O3 -fno-omit-frame-pointer",
        "-Os",
        "-O2 -flto",
        "-O2 -no-pie",
        "-O2 -static",
        "-O2 -static-pie",
        "-O2 -static -no-pie",
        "-O2 -fcf-protection=full",
        "-O2 -mavx2 -mstackrealign",
        "-O2 -fsplit-stack",
        "-O1 -fstack-protector-all -fstack-clash-protection",
        "-O2 -Wl,-z,separate-code",
        "-O2 -Wl,-z,noseparate-code",
        "-O2 -Wl,--hash-style=sysv -Wl,--build-id=none",
        "-O2 -fno-asynchronous-unwind-tables -fno-unwind-tables -fno-omit-frame-pointer -fno-optimize-sibling-calls",
    ] {
        let words: Vec<&str> = arguments.split(' ').collect();
        let program = compile(folder.path(), "gcc", "program.c", C, &words);
        let wanted: &[&str] = if arguments.contains("-static") { &C_PLAIN[1..] } else { &C_PLAIN };
        check(&program, arguments, wanted);
    }
}

#[test]
fn inlined_functions_are_marked() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for arguments in [
        "-O2 -g",
        "-O2 -g -gdwarf-4",
        "-O2 -g -gz",
        "-O2 -g -flto",
        "-O3 -g1",
        "-O2 -g -gsplit-dwarf",
        "-O2 -gdwarf-4 -gsplit-dwarf",
        "-O2 -g -gsplit-dwarf -gz",
    ] {
        let words: Vec<&str> = arguments.split(' ').collect();
        let program = compile(folder.path(), "gcc", "program.c", C, &words);
        let main = check(&program, arguments, &["inner", "between", "outer", "main"]);
        let own = own(&main, "program.c:");
        let expected = [
            ("inner", false, "program.c:5"),
            ("between", true, "program.c:6"),
            ("outer", false, "program.c:7"),
            ("main", false, "program.c:8"),
        ];
        assert_eq!(own, expected, "{arguments}");
    }
}

/// Name, whether it is inlined, and `file:line` of the frames in files whose names end like that.
pub fn own<'a>(thread: &'a PstackStacktrace, file: &str) -> Vec<(&'a str, bool, &'a str)> {
    let own = thread.frames.iter().filter(|frame| frame.file_name.contains(file));
    own.map(|frame| (frame.func_name.as_str(), frame.inlined, frame.file_name.rsplit('/').next().unwrap_or_default()))
        .collect()
}

const CPP: &str = r#"
#include <coroutine>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>
#include <unistd.h>
#define NOINLINE __attribute__((noinline))
static volatile int mode = MODE;
NOINLINE static int wait_for_ever() { std::puts("ready"); std::fflush(stdout); return pause() + 1; }

namespace deep { namespace inner {
template <typename T> struct Machine {
    NOINLINE int run(T n, const std::string &name) const { return wait_for_ever() + static_cast<int>(n + name.size()); }
    NOINLINE int operator()(T n) { return run(n, "x") + 1; }
    virtual ~Machine() = default;
};
} }

struct Guard {
    NOINLINE ~Guard() { if (mode == 1) wait_for_ever(); __asm__ volatile("" ::: "memory"); }
};
NOINLINE static int thrower() { Guard guard; if (mode) throw std::runtime_error("x"); return 0; }
NOINLINE static int catcher() {
    try { return thrower(); } catch (const std::exception &) { if (mode == 2) return wait_for_ever() + 1; }
    return 0;
}
NOINLINE static void on_terminate() { wait_for_ever(); __asm__ volatile("" ::: "memory"); }
NOINLINE static int uncaught() noexcept { return thrower() + 1; }

struct Task {
    struct promise_type {
        std::coroutine_handle<> awaiting;
        Task get_return_object() { return {std::coroutine_handle<promise_type>::from_promise(*this)}; }
        std::suspend_always initial_suspend() { return {}; }
        std::suspend_always final_suspend() noexcept { return {}; }
        void return_void() {}
        void unhandled_exception() {}
    };
    std::coroutine_handle<promise_type> handle;
    bool await_ready() { return false; }
    NOINLINE void await_suspend(std::coroutine_handle<> awaiting) { handle.promise().awaiting = awaiting; handle.resume(); }
    void await_resume() {}
};
NOINLINE static Task innermost() { wait_for_ever(); co_return; }
NOINLINE static Task outermost() { co_await innermost(); }
NOINLINE static void drive() { Task task = outermost(); task.handle.resume(); }

int main() {
    if (mode == 1 || mode == 2) return catcher() + 1;
    if (mode == 3) { std::set_terminate(on_terminate); return uncaught() + 1; }
    if (mode == 4) { drive(); return 0; }
    deep::inner::Machine<long> machine;
    auto call = [&](int n) NOINLINE { return machine(n) + 1; };
    return call(3) + 1;
}
"#;

#[test]
fn cpp_names_in_every_build() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let machine = "deep::inner::Machine<long>";
    for arguments in ["-O0", "-O2 -fomit-frame-pointer", "-O2 -flto", "-O2 -static", "-O2 -no-pie -g"] {
        let words: Vec<&str> = arguments.split(' ').chain(["-std=c++20", "-DMODE=0"]).collect();
        let program = compile(folder.path(), "g++", "program.cpp", CPP, &words);
        let run = format!("{machine}::run");
        let operator = format!("{machine}::operator()");
        let wanted = ["wait_for_ever", &run, &operator, "main::{lambda(int)#1}::operator() const", "main"];
        check(&program, arguments, &wanted);
    }
}

#[test]
fn cpp_exceptions_on_their_way() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for optimize in ["-O0", "-O2", "-O2 -flto"] {
        for (mode, wanted) in [
            ("-DMODE=1", &["wait_for_ever", "Guard::~Guard", "thrower", "catcher", "main"][..]),
            ("-DMODE=2", &["wait_for_ever", "catcher", "main"]),
            ("-DMODE=3", &["wait_for_ever", "on_terminate"]),
        ] {
            let words: Vec<&str> = optimize.split(' ').chain(["-std=c++20", mode]).collect();
            let program = compile(folder.path(), "g++", "program.cpp", CPP, &words);
            let main = check(&program, &format!("{optimize} {mode}"), wanted);
            if mode == "-DMODE=3" {
                // The stack leads through the C++ library and the unwinder, which found no handler.
                let places = ["on_terminate", "_Unwind_", "thrower", "uncaught", "main"].map(|wanted| {
                    let place = names(&main).iter().position(|name| name.starts_with(wanted));
                    place.unwrap_or_else(|| panic!("{wanted} is missing in {main:#?}"))
                });
                assert!(places.is_sorted(), "{main:#?}");
            }
        }
    }
}

#[test]
fn cpp_coroutines() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for optimize in ["-O0", "-O2"] {
        let words = [optimize, "-std=c++20", "-DMODE=4", "-fno-optimize-sibling-calls"];
        let program = compile(folder.path(), "g++", "program.cpp", CPP, &words);
        let main = check(&program, optimize, &["wait_for_ever"]);
        let names = names(&main);
        let place = |name: &str| {
            let found = names.iter().position(|other| other.starts_with(name));
            found.unwrap_or_else(|| panic!("{optimize}: {name} is missing in {names:?}"))
        };
        let places = ["wait_for_ever", "innermost", "Task::await_suspend", "outermost", "drive", "main"].map(place);
        assert!(places.is_sorted(), "{optimize}: {names:?}");
    }
}

const RUST: &str = r#"
trait Step { fn step(&self, n: u64) -> u64; }
struct Loader<T>(T);
extern "C" { fn pause() -> i32; }
impl<T: Copy + Into<u64>> Step for Loader<T> {
    #[inline(never)]
    fn step(&self, n: u64) -> u64 {
        println!("ready");
        // SAFETY: pause takes nothing.
        unsafe { pause() as u64 + n + self.0.into() }
    }
}
mod pipeline {
    #[inline(always)]
    pub fn short(step: &dyn super::Step, n: u64) -> u64 { step.step(n) + 1 }
    #[inline(never)]
    pub fn run(step: &dyn super::Step, n: u64) -> u64 { short(step, n) + 1 }
}
fn main() {
    let loader = Loader(3u32);
    std::process::exit(pipeline::run(&loader, std::env::args().count() as u64) as i32);
}
"#;

#[test]
fn rust_names_in_every_build() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (arguments, step) in [
        ("-Copt-level=0", "<program::Loader<T> as program::Step>::step"),
        ("-Copt-level=3 -Cforce-frame-pointers=no", "<program::Loader<T> as program::Step>::step"),
        ("-Copt-level=3 -Clto=fat -Ccodegen-units=1", "<program::Loader<T> as program::Step>::step"),
        // Without unwinding, rustc leaves the C function `main` that it makes without any rules,
        // and without a frame pointer.
        ("-Copt-level=3 -Cpanic=abort", "<program::Loader<T> as program::Step>::step"),
        ("-Copt-level=2 -Ctarget-feature=+crt-static", "<program::Loader<T> as program::Step>::step"),
        ("-Copt-level=2 -Crelocation-model=static", "<program::Loader<T> as program::Step>::step"),
        // Only the newer mangling contains the type parameter.
        ("-Copt-level=2 -Csymbol-mangling-version=v0", "<program::Loader<u32> as program::Step>::step"),
    ] {
        let words: Vec<&str> = arguments.split(' ').chain(["--edition=2021"]).collect();
        let program = compile(folder.path(), "rustc", "program.rs", RUST, &words);
        let main = check(&program, arguments, &["program::pipeline::run", "program::main"]);
        // The call in between may be inlined, and then has no symbol.
        let own: Vec<&str> = names(&main).into_iter().filter(|name| name.contains("program::")).take(2).collect();
        assert_eq!(own[0], step, "{arguments}: {main:#?}");
    }
}

/// Without unwind tables and without a fixed distance to the caller's frame.
#[test]
fn a_stack_ends_where_it_cannot_be_unwound() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let arguments = ["-O2", "-fomit-frame-pointer", "-fno-asynchronous-unwind-tables", "-fno-unwind-tables"];
    // The unchanged program returns soon after each call, and the unwinder follows its code there.
    check(&compile(folder.path(), "gcc", "program.c", C, &arguments), "no tables", &C_PLAIN);
    let source = C.replace(
        "return pause() + n;",
        "volatile int size = n + 100; char *room = __builtin_alloca(size); pause(); puts(room); return n;",
    );
    assert_ne!(source, C);
    let process = start(&compile(folder.path(), "gcc", "program.c", &source, &arguments), &[]);
    let captured =
        capture_until(process.pid(), "it sleeps", |sample| has_run(&sample.stacktrace[0], &["pause", "inner"]));
    let main = thread(&captured.sample, process.pid());
    assert_eq!(names(main), ["pause", "inner"], "no frame is guessed: {}", describe(&captured.sample));
    assert_eq!(main.incomplete, "register rbp is not known");
}

#[test]
fn rust_inlined_functions_are_marked() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let arguments = ["-Copt-level=3", "-Cdebuginfo=2", "--edition=2021"];
    let program = compile(folder.path(), "rustc", "program.rs", RUST, &arguments);
    let main = check(&program, "rustc -O -g", &["program::pipeline::short", "program::pipeline::run", "program::main"]);
    let inlined: Vec<(&str, bool)> = main
        .frames
        .iter()
        .filter(|frame| frame.func_name.starts_with("program::pipeline"))
        .map(|frame| (frame.func_name.as_str(), frame.inlined))
        .collect();
    assert_eq!(inlined, [("program::pipeline::short", true), ("program::pipeline::run", false)]);
    assert!(main.frames.iter().any(|frame| frame.file_name.ends_with("program.rs:15")), "{main:#?}");
}

/// Without names, all frames still have their addresses.
#[test]
fn stripped_builds_keep_every_frame() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (compiler, file, source, arguments) in [
        ("gcc", "program.c", C, &["-O2", "-s"][..]),
        ("gcc", "program.c", C, &["-O2", "-s", "-static"]),
        ("g++", "program.cpp", CPP, &["-O2", "-s", "-std=c++20", "-DMODE=2"]),
        ("rustc", "program.rs", RUST, &["-Copt-level=3", "-Cstrip=symbols", "--edition=2021"]),
    ] {
        let program = compile(folder.path(), compiler, file, source, arguments);
        let bare = start(&program, &[]);
        let captured = capture_until(bare.pid(), "it sleeps", |sample| sample.process_state.starts_with('S'));
        let main = thread(&captured.sample, bare.pid()).clone();
        assert_eq!(main.incomplete, "", "{compiler}: {}", describe(&captured.sample));
        // The unstripped build shows how many frames there are.
        let kept: Vec<&str> =
            arguments.iter().copied().filter(|argument| *argument != "-s" && *argument != "-Cstrip=symbols").collect();
        let named = start(&compile(folder.path(), compiler, file, source, &kept), &[]);
        let named = capture_until(named.pid(), "it sleeps", |sample| {
            sample.process_state.starts_with('S') && names(&sample.stacktrace[0]).contains(&"_start")
        });
        let count = |thread: &PstackStacktrace| thread.frames.iter().filter(|frame| !frame.inlined).count();
        assert_eq!(count(&main), count(&named.sample.stacktrace[0]), "{compiler}: {}", describe(&captured.sample));
        assert!(main.frames.iter().all(|frame| frame.pc != 0 && frame.module_address != 0), "{main:#?}");
    }
}

/// Lines and inlined functions whose description is spread over units and files: link-time
/// optimization, dwz, split DWARF.
const UNITS: [(&str, &str); 3] = [
    (
        "one.c",
        "int between(int n);\n\
         __attribute__((noinline, noclone)) static int outer(int n) { return between(n) + 1; }\n\
         int main(void) { return outer(1) + 1; }\n",
    ),
    ("two.c", "int deeper(int n);\nint between(int n) { return deeper(n) + 1; }\n"),
    (
        "three.c",
        "#include <stdio.h>\n\
         #include <unistd.h>\n\
         __attribute__((noinline, noclone)) static int inner(int n) { puts(\"ready\"); fflush(stdout); return pause() + n; }\n\
         int deeper(int n) { return inner(n) * 2; }\n",
    ),
];

/// Functions that were inlined across files.
const EXPECTED: [(&str, bool, &str); 5] = [
    ("inner", false, "three.c:3"),
    ("deeper", true, "three.c:4"),
    ("between", true, "two.c:2"),
    ("outer", false, "one.c:2"),
    ("main", false, "one.c:3"),
];

/// The three files in one program, built within `folder` by paths that begin there.
fn build_units(folder: &Path, arguments: &str) -> PathBuf {
    for (name, text) in UNITS {
        fs::write(folder.join(name), text).expect("own folder");
    }
    shell(folder, &format!("gcc {arguments} -o program {}", UNITS.map(|(name, _)| name).join(" ")));
    folder.join("program")
}

#[track_caller]
fn shell(folder: &Path, script: &str) {
    let output = Command::new("sh").args(["-ec", script]).current_dir(folder).output().expect("sh runs");
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
}

#[track_caller]
fn check_expected(program: &PathBuf, what: &str) {
    let main = check(program, what, &["inner", "deeper", "between", "outer", "main"]);
    let found: Vec<_> = own(&main, ".c:").into_iter().filter(|(_, _, line)| !line.starts_with("pause")).collect();
    assert_eq!(found[..EXPECTED.len()], EXPECTED, "{what}: {main:#?}");
}

/// Functions refer to entries of units that hold none of the wanted addresses.
#[test]
fn functions_inlined_from_other_units() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for arguments in ["-O2 -g -flto", "-O2 -gdwarf-4 -flto", "-O2 -g -flto -flto-partition=none -gz"] {
        check_expected(&build_units(folder.path(), arguments), arguments);
    }
}

#[test]
fn debug_information_moved_by_dwz() {
    if let Some(reason) = lacks("dwz") {
        return skip(&reason);
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    // dwz moves entries into other units of the file.
    let program = build_units(folder.path(), "-O2 -g -flto");
    shell(folder.path(), "dwz program");
    check_expected(&program, "dwz");
    // dwz moves entries into a separate file that several programs share.
    let program = build_units(folder.path(), "-O2 -g -flto");
    let common = folder.path().join("common.debug");
    let script = format!("cp program other && cp program third && dwz -m {} program other third", common.display());
    shell(folder.path(), &script);
    assert!(common.exists());
    check_expected(&program, "dwz -m");
}

#[test]
fn split_units_that_have_been_moved() {
    for arguments in ["-O2 -g -gsplit-dwarf", "-O2 -gdwarf-4 -gsplit-dwarf"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::write(folder.path().join("program.c"), C).expect("own folder");
        let script =
            format!("mkdir made && cp program.c made && cd made && gcc {arguments} -o program program.c && cp * ..");
        shell(folder.path(), &format!("{script} && cd .. && rm -r made"));
        let program = folder.path().join("program");
        let main = check(&program, arguments, &["inner", "between", "outer", "main"]);
        assert_eq!(own(&main, "program.c:")[1], ("between", true, "program.c:6"), "{arguments}");
    }
}

#[test]
fn a_package_of_split_units() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::write(folder.path().join("program.c"), C).expect("own folder");
    // Binutils 2.40 packs units of version 4 only.
    shell(folder.path(), "gcc -O2 -gdwarf-4 -gsplit-dwarf -o program program.c && dwp -e program && rm *.dwo");
    let program = folder.path().join("program");
    let main = check(&program, "dwp", &["inner", "between", "outer", "main"]);
    assert_eq!(own(&main, "program.c:")[1], ("between", true, "program.c:6"));
    // rustc makes a package of version 4 or 5 itself.
    for version in ["4", "5"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let source = "extern \"C\" { fn pause() -> i32; }\n\
                      #[inline(always)] fn short(n: i32) -> i32 {\n\
                      unsafe { pause() + n } }\n\
                      #[inline(never)] fn run(n: i32) -> i32 { short(n) + 1 }\n\
                      fn main() { println!(\"ready\"); std::process::exit(run(std::env::args().len() as i32)) }\n";
        let version = format!("-Cdwarf-version={version}");
        let arguments = ["-Copt-level=2", "-g", "-Csplit-debuginfo=packed", &version, "--edition=2021"];
        let program = compile(folder.path(), "rustc", "program.rs", source, &arguments);
        assert!(folder.path().join("program.dwp").exists(), "{version}");
        let main = check(&program, &version, &["program::short", "program::run", "program::main"]);
        let expected = [("program::short", true, "program.rs:3"), ("program::run", false, "program.rs:4")];
        assert_eq!(own(&main, "program.rs:")[..2], expected, "{version}");
    }
}

/// The lines of an object are in the object itself; only the inlined functions are missing then.
#[test]
fn split_units_that_are_lost_or_of_another_build() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::write(folder.path().join("program.c"), C).expect("own folder");
    shell(folder.path(), "gcc -O2 -g -gsplit-dwarf -o program program.c && rm *.dwo");
    let expected = [("inner", false, "program.c:5"), ("outer", false, "program.c:6"), ("main", false, "program.c:8")];
    let check_lost = |what: &str| {
        let main = check(&folder.path().join("program"), what, &["inner", "outer", "main"]);
        assert_eq!(own(&main, "program.c:"), expected, "{what}");
    };
    check_lost("lost");
    let other = tempfile::tempdir().expect("a temporary folder");
    fs::write(other.path().join("program.c"), C.replace("between", "another")).expect("own folder");
    let script = format!("gcc -O2 -g -gsplit-dwarf -o program program.c && cp *.dwo {}", folder.path().display());
    shell(other.path(), &script);
    check_lost("of another build");
    shell(folder.path(), "for unit in *.dwo; do test -s $unit; echo damaged > $unit; done");
    check_lost("damaged");
}
