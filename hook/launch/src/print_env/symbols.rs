//! Names of functions that a library exports.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context, Result};
use object::{Object, ObjectSymbol, SymbolKind};

/// Names of the functions in a library's dynamic symbol table.
///
/// # Errors
/// When it cannot be read or is no ELF file.
pub fn exported(library: &Path) -> Result<BTreeSet<String>> {
    let bytes = fs::read(library).with_context(|| format!("{}", library.display()))?;
    let file = object::File::parse(&*bytes).with_context(|| format!("{}", library.display()))?;
    let function = |symbol: &object::Symbol<'_, '_>| symbol.is_definition() && symbol.kind() == SymbolKind::Text;
    let names = file.dynamic_symbols().filter(function).filter_map(|symbol| Some(symbol.name().ok()?.to_string()));
    Ok(names.collect())
}
