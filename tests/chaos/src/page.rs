//! Generates `docs/faults.md`: every fault and its promise.

use crate::{run::cell, table::Fault};

const HEAD: &str = "# Faults that are tried, and what is promised

`cargo xtask bless` writes this page from the table of `cargo xtask chaos` and from
`tests/chaos/proved.md`; a test fails when it is out of date.

## Tried by `cargo xtask chaos`

Each fault is made with real processes, in a folder, on ports and with settings of its own.
`cargo xtask chaos NAME` runs one.

| fault | what is promised | name |
|---|---|---|
";

const PROVED: &str = "
## Proved by tests

`cargo xtask test` runs these.

";

/// The page.
#[must_use]
pub fn page(faults: &[Fault]) -> String {
    let row = |fault: &Fault| format!("| {} | {} | `{}` |\n", cell(&fault.fault), cell(&fault.promise), fault.name);
    [HEAD, &faults.iter().map(row).collect::<String>(), PROVED, include_str!("../proved.md")].concat()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs};

    use super::*;
    use crate::faults;

    #[test]
    fn the_page_is_made_from_the_table() {
        let path = xpu_timer_tests::tree().join("docs/faults.md");
        let page = page(&faults().unwrap());
        if std::env::var_os("BLESS").is_some() {
            fs::write(&path, &page).unwrap();
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(found == page, "docs/faults.md is out of date: cargo xtask bless writes it");
    }

    #[test]
    fn every_fault_has_a_name_of_its_own_and_a_promise() {
        let faults = faults().unwrap();
        let names: BTreeSet<&str> = faults.iter().map(|fault| fault.name.as_str()).collect();
        assert!(names.len() == faults.len() && faults.len() > 106, "{}", faults.len());
        assert!(faults.iter().all(|fault| !fault.fault.is_empty() && !fault.promise.is_empty()));
    }
}
