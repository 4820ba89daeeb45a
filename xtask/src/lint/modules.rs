//! Reads the files of a crate and finds its modules: their files, the names that each declares or
//! brings into scope, and the paths that it uses.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Attribute, Expr, ExprLit, ImplItemFn, Item, ItemMod, ItemUse, Lit, Macro, Meta, UseTree, Visibility,
    visit::{self, Visit},
};

use crate::source::{self, is_test};

/// A path as it is written: `["crate", "a", "b"]`.
pub(super) type Segments = Vec<String>;

#[derive(Default)]
pub(super) struct Crate {
    /// The root is the first.
    pub(super) modules: Vec<Module>,
    /// The file that defines each `macro_rules!` macro.
    pub(super) macros: HashMap<String, PathBuf>,
}

/// Index in [`Crate::modules`].
pub(super) type ModuleId = usize;

#[derive(Default)]
pub(super) struct Module {
    pub(super) file: PathBuf,
    pub(super) parent: Option<ModuleId>,
    pub(super) children: HashMap<String, ModuleId>,
    /// Names of the items that the module declares itself.
    pub(super) items: HashSet<String>,
    /// The names that `use` brings into scope, each with its path.
    pub(super) bindings: HashMap<String, Segments>,
    /// Modules that `use` imports with `*`.
    pub(super) globs: Vec<Segments>,
    /// The paths that the module uses, those of `use` declarations included.
    pub(super) used: Vec<Segments>,
    /// The macros that the module calls by their bare name.
    pub(super) called_macros: Vec<String>,
}

impl Module {
    /// Adds a `use` declaration, also one in a function: its names then count for the whole module.
    pub(super) fn add_use(&mut self, tree: &UseTree) {
        self.add_use_below(&mut Vec::new(), tree);
    }

    fn add_use_below(&mut self, prefix: &mut Segments, tree: &UseTree) {
        match tree {
            UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.add_use_below(prefix, &path.tree);
                prefix.pop();
            }
            UseTree::Name(name) => self.bind(prefix, &name.ident.to_string(), None),
            UseTree::Rename(rename) => {
                self.bind(prefix, &rename.ident.to_string(), Some(rename.rename.to_string()));
            }
            UseTree::Glob(_) => {
                self.globs.push(prefix.clone());
                self.used.push([prefix.as_slice(), &["*".to_string()]].concat());
            }
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.add_use_below(prefix, tree)),
        }
    }

    fn bind(&mut self, prefix: &[String], name: &str, alias: Option<String>) {
        let mut path = prefix.to_vec();
        if name != "self" || prefix.is_empty() {
            path.push(name.to_string());
        }
        let alias = alias.unwrap_or_else(|| path.last().expect("a name was pushed").clone());
        self.used.push(path.clone());
        self.bindings.insert(alias, path);
    }
}

/// Adds the paths in a piece of Rust code. Arguments of macros are tokens without a grammar, so
/// every `a::b` in them counts as a path.
pub(super) fn collect_paths(item: &Item, module: &mut Module) {
    Collector { module }.visit_item(item);
}

struct Collector<'a> {
    module: &'a mut Module,
}

impl<'ast> Visit<'ast> for Collector<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
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

/// Where the file of a child module is searched.
struct Place<'a> {
    /// The file that contains the declaration.
    file: &'a Path,
    /// Folder of the files of child modules.
    children: PathBuf,
}

impl Crate {
    pub(super) fn load(root: &Path) -> Result<Self> {
        let mut this = Self::default();
        this.load_file(root, None, true)?;
        Ok(this)
    }

    /// `owns_folder`: child modules are beside the file, not in a folder of its name.
    fn load_file(&mut self, file: &Path, parent: Option<ModuleId>, owns_folder: bool) -> Result<ModuleId> {
        let parsed = source::parse(file)?;
        let folder = file.parent().unwrap_or(Path::new("."));
        let children = if owns_folder { folder.into() } else { folder.join(file.file_stem().unwrap_or_default()) };
        let id = self.add(file, parent);
        self.load_items(&parsed.items, id, &Place { file, children })?;
        Ok(id)
    }

    fn add(&mut self, file: &Path, parent: Option<ModuleId>) -> ModuleId {
        self.modules.push(Module { file: file.into(), parent, ..Module::default() });
        self.modules.len() - 1
    }

    fn load_items(&mut self, items: &[Item], id: ModuleId, place: &Place) -> Result<()> {
        for item in items.iter().filter(|item| !is_test(attributes(item))) {
            match item {
                Item::Mod(module) => self.load_module(module, id, place)?,
                Item::Use(item) => self.modules[id].add_use(&item.tree),
                item => {
                    if let Item::Macro(definition) = item
                        && let Some(name) = &definition.ident
                    {
                        self.macros.insert(name.to_string(), place.file.into());
                    }
                    self.modules[id].items.extend(name(item));
                    collect_paths(item, &mut self.modules[id]);
                }
            }
        }
        Ok(())
    }

    fn load_module(&mut self, module: &ItemMod, parent: ModuleId, place: &Place) -> Result<()> {
        let name = module.ident.to_string();
        let id = match &module.content {
            Some((_, items)) => {
                let id = self.add(place.file, Some(parent));
                let inner = Place { file: place.file, children: place.children.join(&name) };
                self.load_items(items, id, &inner)?;
                id
            }
            None => {
                let Some((file, owns_folder)) = file_of(module, &name, place)? else { return Ok(()) };
                self.load_file(&file, Some(parent), owns_folder)?
            }
        };
        self.modules[parent].children.insert(name, id);
        Ok(())
    }
}

/// The file of a module, and whether it owns its folder. `None` for a file of tests.
fn file_of(module: &ItemMod, name: &str, place: &Place) -> Result<Option<(PathBuf, bool)>> {
    let (flat, nested) = (place.children.join(format!("{name}.rs")), place.children.join(name).join("mod.rs"));
    let (file, owns_folder) = if let Some(path) = path_attribute(module) {
        (place.file.with_file_name(path), true)
    } else if flat.exists() {
        (flat, false)
    } else {
        (nested, true)
    };
    if source::is_test_name(name) {
        return Ok(None);
    }
    let file = file.canonicalize().with_context(|| format!("module {name} in {}", place.file.display()))?;
    Ok(Some((file, owns_folder)))
}

/// The value of `#[path = "…"]`.
fn path_attribute(module: &ItemMod) -> Option<String> {
    module.attrs.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    })
}

fn name(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
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
