//! `report.html`: everything known about one incident, in one file that opens in any browser
//! without a network.
//!
//! [`Builder`] adds dumps one by one, [`Report`] is the data, and [`render`] embeds it in the page.
//! Trees and groups come from the code that writes the folded files; the page only draws them.

mod builder;
mod communicators;
mod data;
mod mixed;
mod numbers;
mod page;

pub use builder::{About, Builder};
pub use data::Report;
pub use page::render;

use std::{io, path::Path};
use xpu_timer_analysis::Verdict;

/// The verdict of an incident folder, or `None` if the folder has none.
///
/// # Errors
/// The verdict exists but cannot be read; the error is its description.
pub fn read_verdict(folder: &Path) -> Result<Option<Verdict>, String> {
    match crate::folder::read(&folder.join("verdict.json")) {
        Ok(json) => serde_json::from_slice(&json).map(Some).map_err(|error| error.to_string()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}
