//! `report.html`: everything that is known of one incident, as one file that opens in any browser, without a network.
//!
//! [`Builder`] takes in one dump after the other, [`Report`] is the data, [`render`] puts it into the page. Trees and
//! groups come from the same code as the folded files; the page only draws them.

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

/// The verdict of an incident folder; none when the folder has none.
///
/// # Errors
/// When there is one and it cannot be read, in words.
pub fn read_verdict(folder: &Path) -> Result<Option<Verdict>, String> {
    match crate::folder::read(&folder.join("verdict.json")) {
        Ok(json) => serde_json::from_slice(&json).map(Some).map_err(|error| error.to_string()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}
