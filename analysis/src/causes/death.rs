//! How the process of a rank ended, in words and in kind.

use xpu_timer_proto::v1::Presence;

use super::{case::Case, wording::Number};
use crate::exit::Exit;

/// What became of the process: `is dead (killed by SIGKILL)`.
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

/// Whether a dead rank was ended from outside in an orderly way.
pub(crate) fn ended_by_agent(case: &Case<'_>, rank_index: usize) -> bool {
    case.view(rank_index).exit() == Exit::Signal("SIGTERM")
}

/// Whether a dead rank was ended by a signal, other than that of an agent.
pub(crate) fn ended_by_signal(case: &Case<'_>, rank_index: usize) -> bool {
    matches!(case.view(rank_index).exit(), Exit::Signal(_)) && !ended_by_agent(case, rank_index)
}
