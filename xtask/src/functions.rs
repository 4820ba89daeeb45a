//! The functions in a Rust file: where they are and how long their bodies are.

use proc_macro2::Ident;
use syn::{
    Block, ImplItemFn, ItemFn, ItemImpl, ItemMod, TraitItemFn,
    visit::{self, Visit},
};

use crate::source::is_test;

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

#[cfg(test)]
mod tests {
    use super::functions;

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
}
