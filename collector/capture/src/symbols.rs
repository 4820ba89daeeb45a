//! Names and source lines of native frames.

mod bounds;
mod lines;
mod names;
mod split_dwarf;
pub(crate) mod symbolizer;
mod units;
