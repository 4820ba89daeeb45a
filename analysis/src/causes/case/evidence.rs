//! Lines of evidence about one rank.

use xpu_timer_proto::v1::Presence;

use super::{super::wording::line, Case};
use crate::{graph::Event, stacks::StuckHelper, text::communicator, verdict::EvidenceLine};

impl<'a> Case<'a> {
    /// The stuck helper of a rank, as a phrase (`thread saver is inside write at …`) and as a line
    /// of evidence.
    pub fn helper_fact(&self, rank_index: usize) -> Option<(String, EvidenceLine)> {
        let view = self.view(rank_index);
        let StuckHelper { who, place } = self.stuck_helper(rank_index)?;
        let fact = line(format!("rank {}: {who} {place}", view.rank), vec![view.rank]);
        Some((format!("{who} {place}"), fact))
    }

    /// The frame or function that classifies a rank's main thread, as a line of evidence. `None` if
    /// [`Case::position_lines`] shows that frame in more detail.
    pub fn witness_line(&self, rank_index: usize) -> Option<EvidenceLine> {
        let view = self.view(rank_index);
        let (rank, witness) = (view.rank, &view.host.observed.witness);
        let location = &view.host.location;
        let stands =
            location.python_function.as_deref().zip(location.python.as_deref()).is_some_and(|(function, place)| {
                let file = place.rsplit_once('/').map_or(place, |(_, file)| file);
                *witness == format!("{function} ({file})")
            });
        (!stands).then(|| line(format!("rank {rank}: inside {witness}"), vec![rank]))
    }

    /// Where a rank is and what moved, as lines of evidence.
    pub fn position_lines(&self, rank_index: usize) -> Vec<EvidenceLine> {
        let view = self.view(rank_index);
        let rank = view.rank;
        let mut lines = Vec::new();
        let host = &view.host;
        if let Some(python) = &host.location.python {
            let function = host.location.python_function.as_deref().unwrap_or("?");
            let samples = match (host.moved, host.same_in_both) {
                (None, _) => " (one sample)",
                (Some(moved), _) if moved.own_frame => ", and stood elsewhere in the first sample",
                (Some(_), true) => ", in both samples",
                (Some(_), false) => "",
            };
            lines.push(line(format!("rank {rank}: stands in {function} at {python}{samples}"), vec![rank]));
        }
        if let Some(awaits) = self.awaited_text(rank_index) {
            lines.push(line(format!("rank {rank}: its system call waits for {awaits}"), vec![rank]));
        }
        if let Some(native) = &host.location.native {
            lines.push(line(format!("rank {rank}: in C function {native}"), vec![rank]));
        }
        if let Some(moved) = host.moved {
            lines.push(line(
                format!(
                    "rank {rank}: between the samples {:.0} % of a processor used, {} bytes read or written",
                    moved.cpu_share * 100.0,
                    moved.io_bytes
                ),
                vec![rank],
            ));
        }
        if !host.stack {
            let why = view.evidence.map(|evidence| evidence.errors.join("; ")).filter(|why| !why.is_empty());
            let why = why.map_or(String::new(), |why| format!(": {why}"));
            let what = match view.presence {
                Presence::Missing => "nothing is known of it",
                _ => "no stack",
            };
            lines.push(line(format!("rank {rank}: {what}{why}"), vec![rank]));
        }
        lines
    }

    /// The counters of a suspect beside those of the others, as a line of evidence.
    pub fn counters_line(&self, rank_index: usize, event: Event) -> Option<EvidenceLine> {
        let Event::Collective { comm, seq } = event else { return None };
        let rank = self.view(rank_index).rank;
        let id = communicator(self.comms[comm].id);
        let others = match self.graph.waiters_of(event).len() {
            0 => String::new(),
            _ => format!("; {} in number {seq}", self.waiters_text(event)),
        };
        let text = match self.comms[comm].member(rank_index) {
            Some(member) => format!(
                "rank {rank}: {} collectives launched, {} begun and {} completed on communicator {id}{others}",
                member.launched, member.started, member.completed
            ),
            None => format!("rank {rank}: no collective recorded on communicator {id}{others}"),
        };
        Some(line(text, vec![rank]))
    }
}
