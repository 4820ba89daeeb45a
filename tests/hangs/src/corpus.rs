//! All scenarios and their true causes.
//!
//! A cause is accepted if a person who knows how the hang was made would call it correct. If two
//! causes fit, the first one is the preferred one.

mod collectives;
mod healthy;
mod hosts;
mod strangers;

use anyhow::{Result, ensure};

use crate::{scenario::Scenario, written};

/// The scenarios whose name contains `filter`, including those of the programs that write the truth
/// themselves.
///
/// # Errors
/// When there is none, or a program cannot list its scenarios.
pub fn runnable(filter: Option<&str>) -> Result<Vec<Scenario>> {
    chosen([all(), written::scenarios()?].concat(), filter)
}

/// The scenarios with a known truth whose name contains `filter`.
///
/// # Errors
/// When there is none.
pub fn matching(filter: Option<&str>) -> Result<Vec<Scenario>> {
    chosen(all(), filter)
}

fn chosen(all: Vec<Scenario>, filter: Option<&str>) -> Result<Vec<Scenario>> {
    let chosen: Vec<Scenario> =
        all.into_iter().filter(|scenario| filter.is_none_or(|filter| scenario.name.contains(filter))).collect();
    ensure!(!chosen.is_empty(), "no scenario is called {:?}", filter.unwrap_or_default());
    Ok(chosen)
}

fn all() -> Vec<Scenario> {
    [
        collectives::scenarios(),
        hosts::scenarios(),
        strangers::scenarios(),
        hosts::without_device(),
        hosts::machine(),
        collectives::mistakes(),
        hosts::endings(),
        strangers::threads(),
        hosts::elastic(),
        healthy::stragglers(),
        healthy::scenarios(),
        strangers::blind(),
    ]
    .concat()
}
