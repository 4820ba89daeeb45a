//! Finds which files of a crate import each other: file A imports file B when A uses a name that B
//! defines or re-exports. Test code is left out, and a `mod` declaration is not an import. Files
//! that import each other, directly or through others, are an import circle.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use anyhow::Result;
use petgraph::{algo::tarjan_scc, graphmap::DiGraphMap};

use super::modules::{Crate, ModuleId};

/// The names that one file takes from another, by both paths.
pub(crate) type Imports = BTreeMap<(PathBuf, PathBuf), BTreeSet<String>>;

/// A `use` of a name that another `use` brought in, and so on: no sane module has a longer chain.
const MAX_DEPTH: usize = 8;

/// The imports between the files of the crate whose root file is `root`.
///
/// # Errors
/// A file that cannot be read or parsed, and a module without a file.
pub(crate) fn imports(root: &Path) -> Result<Imports> {
    let krate = Crate::load(root)?;
    let mut imports = Imports::new();
    for (id, module) in krate.modules.iter().enumerate() {
        let mut add = |file: &PathBuf, name: String| {
            if *file != module.file {
                imports.entry((module.file.clone(), file.clone())).or_default().insert(name);
            }
        };
        for path in &module.used {
            match krate.resolve(id, path, 0) {
                Some(Target::Module(target)) => add(&krate.modules[target].file, path.join("::")),
                Some(Target::Name { file, name }) => add(&file, name),
                None => {}
            }
        }
        for name in &module.called_macros {
            // A macro that `use` brings in is among the used paths already.
            if !module.bindings.contains_key(name)
                && let Some(file) = krate.macros.get(name)
            {
                add(file, format!("{name}!"));
            }
        }
    }
    Ok(imports)
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

enum Target {
    Module(ModuleId),
    /// A name in a file: defined or re-exported there.
    Name {
        file: PathBuf,
        name: String,
    },
}

impl Crate {
    /// The target of a path in a module. `None`: another crate, or a name that is imported already.
    fn resolve(&self, module: ModuleId, path: &[String], depth: usize) -> Option<Target> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => Some(self.walk(0, rest)),
            "self" => Some(self.walk(module, rest)),
            "super" => self.resolve_from_parent(module, rest),
            _ => Some(self.walk(self.module_named(module, first, depth)?, rest)),
        }
    }

    fn resolve_from_parent(&self, module: ModuleId, rest: &[String]) -> Option<Target> {
        let parent = self.modules[module].parent?;
        match rest.split_first() {
            Some((next, rest)) if next == "super" => self.resolve_from_parent(parent, rest),
            _ => Some(self.walk(parent, rest)),
        }
    }

    /// The module that a bare name refers to in a module: a child, or one that `use` brought in.
    fn module_named(&self, module: ModuleId, name: &str, depth: usize) -> Option<ModuleId> {
        if depth > MAX_DEPTH {
            return None;
        }
        let scope = &self.modules[module];
        if let Some(child) = scope.children.get(name) {
            return Some(*child);
        }
        let as_module = |path: &[String]| match self.resolve(module, path, depth + 1) {
            Some(Target::Module(id)) => Some(id),
            _ => None,
        };
        if let Some(path) = scope.bindings.get(name) {
            return as_module(path);
        }
        let from_globs = scope.globs.iter().filter_map(|path| as_module(path));
        from_globs.filter_map(|id| self.modules[id].children.get(name).copied()).next()
    }

    /// Follows a path down from a module, to the deepest module on it.
    fn walk(&self, mut module: ModuleId, path: &[String]) -> Target {
        for name in path {
            let scope = &self.modules[module];
            let Some(child) = scope.children.get(name) else {
                // A macro with `#[macro_export]` has its path in the root, wherever it is defined.
                let is_exported_macro =
                    module == 0 && !scope.items.contains(name) && !scope.bindings.contains_key(name);
                let macro_file = self.macros.get(name).filter(|_| is_exported_macro);
                let file = macro_file.unwrap_or(&scope.file).clone();
                return Target::Name { file, name: name.clone() };
            };
            module = *child;
        }
        Target::Module(module)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::{Imports, circles, imports};

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

    /// The imports of a crate with these files, as `a.rs > b.rs: Name, Other`. Each file gets the
    /// text; the first is the root.
    fn imports_of(files: &[(&str, &str)]) -> Vec<String> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let folder = folder.path().canonicalize().expect("it exists");
        for (name, text) in files {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().expect("below the folder")).expect("writable");
            fs::write(path, text).expect("writable");
        }
        let shown = |path: &Path| path.strip_prefix(&folder).expect("below the folder").display().to_string();
        let found = imports(&folder.join(files[0].0)).expect("a valid crate");
        let arrows = found.into_iter().map(|((from, to), names)| {
            format!("{} > {}: {}", shown(&from), shown(&to), names.into_iter().collect::<Vec<_>>().join(", "))
        });
        arrows.collect()
    }

    const B: (&str, &str) = ("b.rs", "pub struct T; pub fn f() {} pub const C: u8 = 1;");

    fn imports_of_a(text: &str) -> Vec<String> {
        imports_of(&[("lib.rs", "mod a; mod b;"), ("a.rs", text), B])
    }

    #[test]
    fn a_declaration_alone_is_not_an_import() {
        assert_eq!(imports_of_a("fn f() { other::b::f(); ::b::f(); }"), [] as [&str; 0]);
    }

    #[test]
    fn use_trees_are_imports() {
        for text in [
            "use crate::b::T;",
            "use super::b::T as U;",
            "use crate::{b::{T}};",
            "pub(crate) use crate::b::T;",
            "fn g() { use crate::b::T; }",
        ] {
            assert_eq!(imports_of_a(text), ["a.rs > b.rs: T"], "{text}");
        }
        assert_eq!(imports_of_a("use crate::b::{self, T};"), ["a.rs > b.rs: T, crate::b"]);
        assert_eq!(imports_of_a("use crate::b::*;"), ["a.rs > b.rs: *"]);
    }

    #[test]
    fn inline_paths_are_imports() {
        for text in [
            "fn g() { crate::b::f(); }",
            "fn g() { format!(\"{}\", super::b::f()); }",
            "macro_rules! m { () => { $crate::b::f() } }",
        ] {
            assert_eq!(imports_of_a(text), ["a.rs > b.rs: f"], "{text}");
        }
        assert_eq!(imports_of_a("struct S(crate::b::T); const D: u8 = crate::b::C;"), ["a.rs > b.rs: C, T"]);
        assert_eq!(imports_of_a("impl From<super::b::T> for u8 {}"), ["a.rs > b.rs: T"]);
    }

    #[test]
    fn paths_through_an_imported_module_are_imports() {
        let text = "use crate::b as other; fn g() { other::f(); }";
        assert_eq!(imports_of_a(text), ["a.rs > b.rs: crate::b, f"]);
        let text = "use super::*; fn g() { b::f(); }";
        assert_eq!(imports_of_a(text), ["a.rs > b.rs: f", "a.rs > lib.rs: *"]);
        let text = "mod inner { use super::super::b; fn g() -> b::T {} }";
        assert_eq!(imports_of_a(text), ["a.rs > b.rs: T, super::super::b"]);
    }

    #[test]
    fn a_re_export_is_an_import_of_the_re_exporting_file() {
        let files =
            [("lib.rs", "mod a; mod b; pub use b::T; pub use b::f;"), ("a.rs", "fn g(_: crate::T) { super::f() }"), B];
        assert_eq!(imports_of(&files), ["a.rs > lib.rs: T, f", "lib.rs > b.rs: T, f"]);
    }

    #[test]
    fn visibilities_and_tests_import_nothing() {
        for text in [
            "pub(in crate::b) struct S;",
            "#[cfg(test)] mod tests { use crate::b::T; }",
            "#[test] fn g() { crate::b::f(); }",
            "#[cfg(test)] use crate::b::T;",
            "struct S; impl S { #[cfg(test)] fn g() { crate::b::f(); } }",
        ] {
            assert_eq!(imports_of_a(text), [] as [&str; 0], "{text}");
        }
        let files = [("lib.rs", "mod a_tests; mod b; mod tests;"), ("a_tests.rs", "use crate::b::T;"), B];
        assert_eq!(imports_of(&files), [] as [&str; 0]);
    }

    #[test]
    fn modules_are_found_in_every_layout() {
        let files = [
            ("lib.rs", "mod a; mod c; mod d { pub mod e; } #[path = \"odd/name.rs\"] mod g;"),
            ("a.rs", "mod inner; use inner::T;"),
            ("a/inner.rs", "pub struct T;"),
            ("c/mod.rs", "mod inner; use crate::d::e::E;"),
            ("c/inner.rs", "use crate::g::h::H; use super::super::a;"),
            ("d/e.rs", "pub struct E;"),
            ("odd/name.rs", "pub mod h;"),
            ("odd/h.rs", "pub struct H;"),
        ];
        assert_eq!(
            imports_of(&files),
            [
                "a.rs > a/inner.rs: T",
                "c/inner.rs > a.rs: super::super::a",
                "c/inner.rs > odd/h.rs: H",
                "c/mod.rs > d/e.rs: E"
            ]
        );
    }

    #[test]
    fn macros_are_imports() {
        let files = [
            ("lib.rs", "#[macro_use] mod m; mod a; mod c;"),
            ("m.rs", "macro_rules! one { () => {} } #[macro_export] macro_rules! two { () => {} }"),
            ("a.rs", "one!{}"),
            ("c.rs", "fn g() { crate::two!() }"),
        ];
        assert_eq!(imports_of(&files), ["a.rs > m.rs: one!", "c.rs > m.rs: two"]);
    }
}
