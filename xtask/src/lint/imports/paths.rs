//! The paths in a piece of Rust code.
//!
//! Arguments of macros are tokens without a grammar, so every `a::b` in them counts as a path.

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Attribute, ImplItemFn, Item, ItemUse, Macro, Path, Visibility,
    visit::{self, Visit},
};

use crate::source::is_test;

use super::modules::{Module, Segments};

pub(super) fn collect(item: &Item, module: &mut Module) {
    Collector { module }.visit_item(item);
}

struct Collector<'a> {
    module: &'a mut Module,
}

impl<'ast> Visit<'ast> for Collector<'_> {
    fn visit_path(&mut self, path: &'ast Path) {
        if path.leading_colon.is_none() && path.segments.len() > 1 {
            self.module.used.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        if let Some(name) = call.path.get_ident() {
            self.module.called_macros.push(name.to_string());
        }
        let mut paths = Vec::new();
        token_paths(call.tokens.clone(), &mut paths);
        self.module.used.append(&mut paths);
        visit::visit_macro(self, call);
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.module.add_use(&item.tree);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        if !is_test(&function.attrs) {
            visit::visit_impl_item_fn(self, function);
        }
    }

    /// `pub(super)` and `pub(in path)` use no name.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_attribute(&mut self, _: &'ast Attribute) {}
}

/// Finds `a::b::c` in tokens. `$crate` counts as `crate`.
fn token_paths(tokens: TokenStream, found: &mut Vec<Segments>) {
    let mut path = Segments::new();
    // Colons since the last name.
    let mut colons = 0;
    for token in tokens {
        match token {
            TokenTree::Ident(ident) => {
                if colons != 2 {
                    finish(&mut path, found);
                }
                // A path with a leading `::` names another crate: its first name stays empty.
                if colons == 2 && path.is_empty() {
                    path.push(String::new());
                }
                path.push(ident.to_string());
                colons = 0;
            }
            TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
            other => {
                finish(&mut path, found);
                colons = 0;
                if let TokenTree::Group(group) = other {
                    token_paths(group.stream(), found);
                }
            }
        }
    }
    finish(&mut path, found);
}

fn finish(path: &mut Segments, found: &mut Vec<Segments>) {
    if path.len() > 1 {
        found.push(path.clone());
    }
    path.clear();
}

#[cfg(test)]
mod tests {
    use super::token_paths;

    #[test]
    fn finds_paths_in_tokens() {
        let tokens = "a, $crate::b::c(d::e) f: g = x::Y { h: i::j } ::std::mem k::l::<m::n>";
        let mut found = Vec::new();
        token_paths(tokens.parse().expect("valid tokens"), &mut found);
        let found: Vec<String> = found.iter().map(|path| path.join("::")).collect();
        assert_eq!(found, ["crate::b::c", "d::e", "x::Y", "i::j", "::std::mem", "k::l", "m::n"]);
    }
}
