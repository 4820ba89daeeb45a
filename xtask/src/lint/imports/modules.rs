//! The modules of a crate: their files, and the names that each declares or brings into scope.

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
};

use syn::UseTree;

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
    /// What `use` brings into scope: the name here and the path that it stands for.
    pub(super) bindings: HashMap<String, Segments>,
    /// Modules of which `use` brings all names into scope.
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
