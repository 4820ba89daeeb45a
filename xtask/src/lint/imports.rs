//! Which file of a crate imports which: file A imports file B when A uses a name that B defines or
//! re-exports. Test code is left out, and a `mod` declaration is not an import.

mod load;
mod modules;
mod paths;
mod resolve;

use std::path::Path;

use anyhow::Result;

use modules::Crate;
pub(crate) use resolve::Imports;

/// The imports between the files of the crate whose root file is `root`.
///
/// # Errors
/// A file that cannot be read or parsed, and a module without a file.
pub(crate) fn imports(root: &Path) -> Result<Imports> {
    Ok(resolve::imports(&Crate::load(root)?))
}
