//! The source files of this repository: how to read them, and the functions in them. `cargo xtask
//! sample` draws some functions at random, for reviews.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use proc_macro2::Ident;
use syn::{
    Attribute, Block, ImplItemFn, ItemFn, ItemImpl, ItemMod, Meta, TraitItemFn,
    visit::{self, Visit},
};
use xpu_timer_tests::tree;

/// A file with Rust code that `cargo xtask bless` generates.
const GENERATED: &str = "proto/src/generated";

/// All files below a folder whose name has one of these extensions, sorted, without hidden folders
/// and build output.
pub(crate) fn files(folder: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    collect_files(folder, extensions, &mut found)?;
    found.sort();
    Ok(found)
}

fn collect_files(folder: &Path, extensions: &[&str], found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        let is_skipped = name == "target" || name.as_encoded_bytes().starts_with(b".");
        if entry.file_type()?.is_dir() {
            if !is_skipped {
                collect_files(&path, extensions, found)?;
            }
        } else if path.extension().is_some_and(|extension| extensions.iter().any(|wanted| extension == *wanted)) {
            found.push(path);
        }
    }
    Ok(())
}

/// Whether `cargo xtask bless` writes this file. `path` is relative to the root of the repository.
pub(crate) fn is_generated(path: &Path) -> bool {
    path.starts_with(GENERATED)
}

/// Whether a file contains only tests, by its name or its folder.
pub(crate) fn is_test_file(path: &Path) -> bool {
    let is_named_so = path.file_stem().and_then(|stem| stem.to_str()).is_some_and(is_test_name);
    is_named_so || path.components().any(|part| part.as_os_str() == "it")
}

/// Whether a module contains only tests, by its name.
pub(crate) fn is_test_name(stem: &str) -> bool {
    stem == "tests" || stem.ends_with("_tests")
}

pub(crate) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| path.display().to_string())
}

pub(crate) fn parse(path: &Path) -> Result<syn::File> {
    syn::parse_file(&read(path)?).with_context(|| path.display().to_string())
}

/// Whether an item is compiled for tests only: `#[test]`, or a `#[cfg(…)]` that requires `test`.
pub(crate) fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.segments.last().is_some_and(|segment| segment.ident == "test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string().replace(' ', "");
            condition == "test"
                || condition.strip_prefix("all(").is_some_and(|rest| rest.split([',', ')']).any(|part| part == "test"))
        }
        _ => false,
    })
}

/// A function with a body.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// Line of its name, from 1.
    pub(crate) line: usize,
    /// Lines between the braces of its body.
    pub(crate) body_lines: usize,
    /// Compiled for tests only.
    pub(crate) is_test: bool,
}

/// All functions in a file, in the order of their names' lines. A closure is part of its function.
pub(crate) fn functions(file: &syn::File) -> Vec<Function> {
    let mut collector = Collector { found: Vec::new(), in_test: is_test(&file.attrs) };
    collector.visit_file(file);
    collector.found
}

struct Collector {
    found: Vec<Function>,
    in_test: bool,
}

impl Collector {
    fn add(&mut self, name: &Ident, body: &Block, is_test: bool) {
        let braces = body.brace_token.span;
        let (open, close) = (braces.open().start().line, braces.close().start().line);
        self.found.push(Function {
            name: name.to_string(),
            line: name.span().start().line,
            body_lines: close.saturating_sub(open + 1),
            is_test: self.in_test || is_test,
        });
    }

    /// Visits what an item contains. Everything in a test item is test code.
    fn enter(&mut self, is_test: bool, visit: impl FnOnce(&mut Self)) {
        let outer = self.in_test;
        self.in_test |= is_test;
        visit(self);
        self.in_test = outer;
    }
}

impl<'ast> Visit<'ast> for Collector {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        self.enter(is_test(&module.attrs), |collector| visit::visit_item_mod(collector, module));
    }

    fn visit_item_impl(&mut self, block: &'ast ItemImpl) {
        self.enter(is_test(&block.attrs), |collector| visit::visit_item_impl(collector, block));
    }

    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        self.add(&function.sig.ident, &function.block, is_test(&function.attrs));
        self.enter(is_test(&function.attrs), |collector| visit::visit_item_fn(collector, function));
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        self.add(&function.sig.ident, &function.block, is_test(&function.attrs));
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast TraitItemFn) {
        if let Some(body) = &function.default {
            self.add(&function.sig.ident, body, is_test(&function.attrs));
        }
        visit::visit_trait_item_fn(self, function);
    }
}

/// Options of `sample`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// How many functions to draw
    count: usize,

    /// Seed of the random choice, to repeat it; default: a random seed, which is printed
    #[arg(long)]
    seed: Option<u64>,
}

pub(crate) fn sample(options: &Options) -> Result<()> {
    let root = tree();
    let mut found = Vec::new();
    for path in files(&root, &["rs"])? {
        let shown = path.strip_prefix(&root).unwrap_or(&path);
        if is_generated(shown) {
            continue;
        }
        for function in functions(&parse(&path)?) {
            found.push(format!("{}:{} {} {}", shown.display(), function.line, function.name, function.body_lines));
        }
    }
    ensure!(!found.is_empty(), "no functions below {}", root.display());
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..));
    eprintln!("{} of {} functions, seed {seed}: file:line, name, lines of the body", options.count, found.len());
    draw(found, options.count, seed).iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// `count` different entries of `all`, or all of them.
fn draw<T>(mut all: Vec<T>, count: usize, seed: u64) -> Vec<T> {
    fastrand::Rng::with_seed(seed).shuffle(&mut all);
    all.truncate(count);
    all
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{draw, functions, is_generated, is_test, is_test_file};

    fn is_test_item(item: &str) -> bool {
        let file = syn::parse_file(item).expect("valid Rust");
        match &file.items[0] {
            syn::Item::Fn(function) => is_test(&function.attrs),
            _ => unreachable!("the test only has functions"),
        }
    }

    #[test]
    fn test_items_have_a_test_attribute() {
        for item in ["#[test] fn a() {}", "#[tokio::test] fn a() {}", "#[cfg(test)] fn a() {}"] {
            assert!(is_test_item(item), "{item}");
        }
        assert!(is_test_item("#[cfg(all(test, unix))] fn a() {}"));
        for item in ["fn a() {}", "#[cfg(not(test))] fn a() {}", "#[cfg(unix)] fn test() {}"] {
            assert!(!is_test_item(item), "{item}");
        }
    }

    #[test]
    fn files_are_classified_by_path() {
        for path in ["a/tests.rs", "a/lane_tests.rs", "tests/tests/it/hook.rs"] {
            assert!(is_test_file(Path::new(path)), "{path}");
        }
        assert!(!is_test_file(Path::new("tests/src/job.rs")));
        assert!(is_generated(Path::new("proto/src/generated/shapes.rs")));
        assert!(!is_generated(Path::new("proto/src/ring.rs")));
    }

    #[test]
    fn finds_functions_methods_and_trait_defaults() {
        let text = "fn one() {}\nstruct S;\nimpl S {\n    fn two(&self) {\n        1;\n        2;\n    }\n}\n\
            trait T {\n    fn three();\n    fn four() {\n        3;\n    }\n}\n\
            #[cfg(test)]\nmod tests {\n    fn five() {\n        fn six() {}\n    }\n}\n";
        let file = syn::parse_file(text).expect("valid Rust");
        let found: Vec<_> = functions(&file).into_iter().map(|f| (f.name, f.line, f.body_lines, f.is_test)).collect();
        let expected = [
            ("one", 1, 0, false),
            ("two", 4, 2, false),
            ("four", 11, 1, false),
            ("five", 17, 1, true),
            ("six", 18, 0, true),
        ];
        assert_eq!(found, expected.map(|(name, line, lines, is_test)| (name.to_string(), line, lines, is_test)));
    }

    #[test]
    fn a_seed_repeats_its_draw() {
        let all = || (0..1000).collect::<Vec<_>>();
        let mut drawn = draw(all(), 10, 7);
        assert_eq!(drawn, draw(all(), 10, 7));
        assert_ne!(drawn, draw(all(), 10, 8));
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn.len(), 10);
        assert_eq!(draw(vec![1], 10, 7), [1]);
    }
}
