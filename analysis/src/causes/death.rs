//! How the process of a rank ended.

use xpu_timer_proto::v1::Presence;

use super::{case::Case, wording::Number};
use crate::exit::Exit;

/// The end of a process in words: `is dead (killed by SIGKILL)`.
pub(super) fn describe_end(case: &Case<'_>, rank_index: usize, number: Number) -> String {
    let view = case.view(rank_index);
    let exit = view.evidence.map(|evidence| evidence.exit.as_str()).filter(|exit| !exit.is_empty());
    let exit = exit.map_or(String::new(), |exit| format!(" ({exit})"));
    match view.presence {
        Presence::Left => format!("{} left the job{exit}", number.has()),
        _ if view.host.state.starts_with('Z') => {
            format!(
                "{} dead: {}{exit}",
                number.is(),
                number.word("its process is a zombie", "their processes are zombies")
            )
        }
        _ => format!("{} dead: {} gone{exit}", number.is(), number.word("its process is", "their processes are")),
    }
}

/// Whether an agent ended a dead rank in an orderly way, by SIGTERM.
pub(crate) fn ended_by_agent(case: &Case<'_>, rank_index: usize) -> bool {
    case.view(rank_index).exit() == Exit::Signal("SIGTERM")
}

/// Whether a signal other than SIGTERM ended a dead rank.
pub(crate) fn ended_by_signal(case: &Case<'_>, rank_index: usize) -> bool {
    matches!(case.view(rank_index).exit(), Exit::Signal(_)) && !ended_by_agent(case, rank_index)
}
