//! The meaning of the operations in the rings of the ranks, and the series and comparisons made
//! from them.

pub(crate) mod cursor;
pub(crate) mod exposition;
pub(crate) mod interpreters;
pub(crate) mod meaning;
pub(crate) mod pace;
pub(crate) mod sampler;
pub(crate) mod series;
pub(crate) mod settings;
pub(crate) mod slow_ranks;
