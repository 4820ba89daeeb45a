//! The glibc version that a program or a library needs.

use std::{path::Path, process::Command};

use anyhow::{Context, Result, ensure};

/// Installed files need this glibc, that of Red Hat 8; Ubuntu 20.04 has 2.31.
const OLDEST: (u32, u32) = (2, 28);

/// Checks that an installed file needs no newer glibc than old containers have.
///
/// # Errors
/// The functions that are too new, or why this is unknown.
pub fn old_enough(file: &Path) -> Result<()> {
    let objdump = Command::new("objdump").arg("-T").arg(file).output().context("objdump cannot be run")?;
    ensure!(objdump.status.success(), "{}", String::from_utf8_lossy(&objdump.stderr));
    let text = String::from_utf8_lossy(&objdump.stdout);
    let asked: Vec<(&str, (u32, u32))> = text.lines().filter_map(asked).collect();
    ensure!(!asked.is_empty(), "{} asks for nothing of glibc", file.display());
    let newer: Vec<_> = asked.into_iter().filter(|(_, version)| *version > OLDEST).collect();
    ensure!(newer.is_empty(), "{} asks for {newer:?}; glibc_compat/build.rs is for such functions", file.display());
    Ok(())
}

/// The glibc function in a line of `objdump -T`, and the version that introduced it.
fn asked(line: &str) -> Option<(&str, (u32, u32))> {
    let (before, after) = line.split_once("(GLIBC_")?;
    let (version, name) = after.split_once(')')?;
    let mut numbers = version.split('.').map(str::parse);
    let version = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    before.contains("*UND*").then_some((name.trim(), version))
}

#[cfg(test)]
mod tests {
    use super::asked;

    #[test]
    fn what_is_asked_for_and_what_is_offered() {
        let line = "0000000000000000  w   DF *UND*\t0000000000000000 (GLIBC_2.30) gettid";
        assert_eq!(asked(line), Some(("gettid", (2, 30))));
        assert_eq!(
            asked("0000000000000000      DF *UND*\t0000000000000000 (GLIBC_2.2.5) memcpy"),
            Some(("memcpy", (2, 2)))
        );
        assert_eq!(asked("0000000000001000 g    DF .text\t0000000000000010 (GLIBC_2.34) mine"), None);
        assert_eq!(asked("0000000000001000 g    DF .text\t0000000000000010  Base        ncclAllReduce"), None);
    }
}
