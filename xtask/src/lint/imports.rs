//! Which file of a crate imports which: file A imports file B when A uses a name that B defines or
//! re-exports. Test code is left out, and a `mod` declaration is not an import. Files that import
//! each other, directly or through others, are an import circle.

mod load;
mod modules;
mod resolve;

use std::path::{Path, PathBuf};

use anyhow::Result;
use petgraph::{algo::tarjan_scc, graphmap::DiGraphMap};

use modules::Crate;
use resolve::Imports;

/// The imports between the files of the crate whose root file is `root`.
///
/// # Errors
/// A file that cannot be read or parsed, and a module without a file.
pub(crate) fn imports(root: &Path) -> Result<Imports> {
    Ok(resolve::imports(&Crate::load(root)?))
}

/// Describes each circle with all its arrows and their names. `root` is cut from the paths.
pub(crate) fn circles(imports: &Imports, root: &Path) -> Vec<String> {
    let graph: DiGraphMap<&PathBuf, ()> = imports.keys().map(|(from, to)| (from, to)).collect();
    let mut found: Vec<String> = tarjan_scc(&graph)
        .into_iter()
        .filter(|files| files.len() > 1)
        .map(|files| describe(&files, imports, root))
        .collect();
    found.sort();
    found
}

fn describe(files: &[&PathBuf], imports: &Imports, root: &Path) -> String {
    let shown = |path: &Path| path.strip_prefix(root).unwrap_or(path).display().to_string();
    let arrows = imports.iter().filter(|((from, to), _)| files.contains(&from) && files.contains(&to));
    let arrows = arrows.map(|((from, to), names)| {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        format!("\n  {} -> {}: {}", shown(from), shown(to), names.join(", "))
    });
    format!("import circle of {} files:{}", files.len(), arrows.collect::<String>())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Imports, circles};

    fn graph(arrows: &[(&str, &str)]) -> Imports {
        let entry = |(from, to): &(&str, &str)| ((from.into(), to.into()), [format!("from_{to}")].into());
        arrows.iter().map(entry).collect()
    }

    #[test]
    fn a_tree_has_no_circle() {
        let imports = graph(&[("/r/a", "/r/b"), ("/r/a", "/r/c"), ("/r/b", "/r/c")]);
        assert_eq!(circles(&imports, Path::new("/r")), [] as [&str; 0]);
    }

    #[test]
    fn circles_are_described_with_their_arrows() {
        let imports =
            graph(&[("/r/a", "/r/b"), ("/r/b", "/r/c"), ("/r/c", "/r/a"), ("/r/c", "/r/d"), ("e", "f"), ("f", "e")]);
        assert_eq!(
            circles(&imports, Path::new("/r")),
            [
                "import circle of 2 files:\n  e -> f: from_f\n  f -> e: from_e",
                "import circle of 3 files:\n  a -> b: from_/r/b\n  b -> c: from_/r/c\n  c -> a: from_/r/a",
            ]
        );
    }
}
