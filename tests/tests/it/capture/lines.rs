//! Lines and inlined functions whose description is spread over units and files: link-time optimization, dwz, split DWARF.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use xpu_timer_tests::{lacks, skip};

use super::builds::{C, check, compile, own};

const FILES: [(&str, &str); 3] = [
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

/// What was inlined over the borders of the files.
const EXPECTED: [(&str, bool, &str); 5] = [
    ("inner", false, "three.c:3"),
    ("deeper", true, "three.c:4"),
    ("between", true, "two.c:2"),
    ("outer", false, "one.c:2"),
    ("main", false, "one.c:3"),
];

/// The three files in one program, built within `folder` by paths that begin there.
fn build(folder: &Path, arguments: &str) -> PathBuf {
    for (name, text) in FILES {
        fs::write(folder.join(name), text).expect("own folder");
    }
    shell(folder, &format!("gcc {arguments} -o program {}", FILES.map(|(name, _)| name).join(" ")));
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
        check_expected(&build(folder.path(), arguments), arguments);
    }
}

#[test]
fn what_dwz_has_moved_elsewhere() {
    if let Some(reason) = lacks("dwz") {
        return skip(&reason);
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    // Into other units of the same file.
    let program = build(folder.path(), "-O2 -g -flto");
    shell(folder.path(), "dwz program");
    check_expected(&program, "dwz");
    // Into a file of their own, of which several programs make use.
    let program = build(folder.path(), "-O2 -g -flto");
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

/// The lines of an object are in the object itself; only what was inlined is not to be had then.
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
