//! What is installed on a node, as the node sees it: the C library that it needs, and what happens when it cannot be loaded.

use std::process::Command;

use xpu_timer_tests::artifacts;

/// glibc of Red Hat 8; Ubuntu 20.04 has 2.31.
const OLDEST: (u32, u32) = (2, 28);

#[test]
fn what_is_installed_asks_for_no_newer_glibc_than_old_containers_have() {
    let programs = ["launch", "print_env", "collector", "dump", "stacktrace_viewer"];
    let files = programs.map(|name| artifacts().bin(&format!("xpu_timer_{name}")));
    for file in files.iter().chain([&artifacts().hook()]) {
        let objdump = Command::new("objdump").arg("-T").arg(file).output().expect("objdump runs");
        assert!(objdump.status.success(), "{}", String::from_utf8_lossy(&objdump.stderr));
        let text = String::from_utf8_lossy(&objdump.stdout);
        let asked: Vec<(&str, (u32, u32))> = text.lines().filter_map(asked).collect();
        assert!(asked.iter().any(|(name, _)| *name == "memcpy"), "{}: no look at its symbols", file.display());
        let newer: Vec<_> = asked.into_iter().filter(|(_, version)| *version > OLDEST).collect();
        assert!(newer.is_empty(), "{} asks for {newer:?}; floor/build.rs is for such functions", file.display());
    }
}

/// The function of glibc that a line of `objdump -T` asks for, and the version of glibc that brought it.
fn asked(line: &str) -> Option<(&str, (u32, u32))> {
    let (before, after) = line.split_once("(GLIBC_")?;
    let (version, name) = after.split_once(')')?;
    let mut numbers = version.split('.').map(str::parse);
    let version = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    before.contains("*UND*").then_some((name.trim(), version))
}
