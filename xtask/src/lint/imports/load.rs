//! Reads the files of a crate and finds its modules.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use syn::{Attribute, Expr, ExprLit, Item, ItemMod, Lit, Meta};

use super::modules::{Crate, Module, ModuleId, collect_paths};
use crate::source::{self, is_test};

/// Where the file of a child module is searched.
struct Place<'a> {
    /// Of the file that contains the declaration.
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
