//! Phrases about the ranks and the events of an incident, and lines of evidence about one rank.

use xpu_timer_proto::{
    server::{AwaitedKind, Holder},
    v1::Presence,
};

use super::{Number, about, detail, line};
use crate::{
    case::{Case, STANDARD_INPUT},
    graph::{Event, Suspect},
    stacks::{self, StuckHelper},
    text::{self, communicator, rank_count, ranks},
    verdict::EvidenceLine,
    world::RankView,
};

/// `train.py:88 in step`.
fn frame((file, function): (&str, Option<&str>)) -> String {
    function.map_or(file.to_owned(), |function| format!("{file} in {function}"))
}

/// Where a rank is, and what it waits for itself.
impl<'a> Case<'a> {
    /// Where the main thread of a rank is, to follow a verb: ` at train.py:41 in load (C function
    /// read)`.
    pub fn place(&self, rank_index: usize) -> String {
        let position = self.position(rank_index);
        let mut place = String::new();
        if let Some(python) = position.python {
            let caller = position.caller.map_or(String::new(), |caller| format!("{}, via ", frame(caller)));
            place.push_str(&format!(" at {caller}{}", frame(python)));
        }
        match position.native {
            Some(native) if place.is_empty() => place.push_str(&format!(" in C function {native}")),
            Some(native) => place.push_str(&format!(" (C function {native})")),
            None => {}
        }
        place
    }

    /// Where a rank is, as a clause: `; it is at train.py:41 in load`. Empty if it is not
    /// known.
    pub(super) fn location_clause(&self, rank_index: usize, number: Number) -> String {
        let place = self.place(rank_index);
        let is_at = number.word("; it is", "; they are");
        if place.is_empty() { place } else { format!("{is_at}{place}") }
    }

    /// What a rank waits for itself, or which of its helpers is stuck, as a clause: `, and waits
    /// for its terminal /dev/pts/0`, `, and its child process 4242 (sh) has not ended`. Empty if
    /// nothing is known.
    pub(super) fn own_wait_clause(&self, rank_index: usize, number: Number) -> String {
        let awaits = self.awaited_text(rank_index);
        let mut clause =
            awaits.as_ref().map_or(String::new(), |awaits| format!(", and {} for {awaits}", number.waits()));
        // If a pipe has no other end, the dead helper that had it explains the wait.
        let explains = |helper: &StuckHelper| awaits.is_none() || helper.is_dead();
        let helper = self.stuck_helper(rank_index).filter(explains);
        if let Some(StuckHelper { name, state }) = helper {
            clause.push_str(&format!(", and {} {name} {state}", number.its()));
        }
        clause
    }

    /// The object that the system call of a rank's main thread waits for: `the lock on x.lock, held
    /// by rank 3 (process 77)`.
    pub(super) fn awaited_text(&self, rank_index: usize) -> Option<String> {
        let awaited = self.view(rank_index).host.awaited.as_ref()?;
        let own = |holder: &Holder| self.view(rank_index).pid() == Some(holder.pid);
        let others: Vec<String> = awaited
            .holders
            .iter()
            .filter(|holder| !own(holder))
            .take(2)
            .map(|holder| self.holder_text(rank_index, holder))
            .collect();
        let have = if others.len() == 1 { "has" } else { "have" };
        let holders = others.join(" and ");
        let alone = others.is_empty() && awaited.holders.iter().any(own);
        match awaited.kind() {
            AwaitedKind::File if awaited.name == STANDARD_INPUT && holders.is_empty() => {
                Some("its standard input".to_owned())
            }
            AwaitedKind::File if awaited.name == STANDARD_INPUT => {
                Some(format!("its standard input, whose other end {holders} {have} open"))
            }
            AwaitedKind::File if self.at_terminal(rank_index) => Some(format!("its terminal {}", awaited.name)),
            AwaitedKind::File => Some(stacks::base_name(&awaited.name).to_owned()),
            AwaitedKind::Socket if awaited.name.is_empty() => None,
            AwaitedKind::Socket => Some(awaited.name.clone()),
            AwaitedKind::Pipe if alone => Some("a pipe whose other end only it has open".to_owned()),
            AwaitedKind::Pipe if holders.is_empty() => None,
            AwaitedKind::Pipe => Some(format!("a pipe whose other end {holders} {have} open")),
            AwaitedKind::Lock if alone => {
                Some(format!("the lock on {}, which it holds itself", stacks::base_name(&awaited.name)))
            }
            AwaitedKind::Lock if holders.is_empty() => Some(format!(
                "the lock on {}, which another process or file handle holds",
                stacks::base_name(&awaited.name)
            )),
            AwaitedKind::Lock => Some(format!("the lock on {}, held by {holders}", stacks::base_name(&awaited.name))),
            AwaitedKind::Unspecified => None,
        }
    }

    fn holder_text(&self, rank_index: usize, holder: &Holder) -> String {
        let of_rank =
            |other: &RankView<'_>| other.pid() == Some(holder.pid) && other.node() == self.view(rank_index).node();
        match self.world.views.iter().position(of_rank) {
            Some(other) => format!("rank {} (process {})", self.view(other).rank, holder.pid),
            None if holder.child => format!("its child process {} ({})", holder.pid, holder.name),
            None => format!("process {} ({})", holder.pid, holder.name),
        }
    }
}

/// Events, and the ranks that wait in them.
impl<'a> Case<'a> {
    /// `all_reduce 31 of communicator 0x1f (4 ranks)`.
    pub(super) fn describe(&self, event: Event) -> String {
        let of_comm = |comm: usize| {
            let comm = &self.comms[comm];
            format!("communicator {} ({})", communicator(comm.id), rank_count(comm.size))
        };
        match event {
            Event::Collective { comm, seq } => {
                let name = self.operation(event).map_or("collective", text::name);
                format!("{name} {seq} of {}", of_comm(comm))
            }
            Event::PointToPoint { comm, peer, recv, .. } => {
                let peer = match self.comms[comm].rank_index_of(peer) {
                    Some(rank_index) => format!("rank {}", self.view(rank_index).rank),
                    None if peer < 0 => "any rank".to_owned(),
                    None => format!("member {peer}"),
                };
                let name = if recv { format!("a recv from {peer}") } else { format!("a send to {peer}") };
                format!("{name} on {}", of_comm(comm))
            }
            Event::Init { comm } => format!("the creation of {}", of_comm(comm)),
            Event::Split { comm } => match self.operation(event).map(|operation| operation.function.as_str()) {
                // MPI has several calls that make a communicator from another one.
                Some(function) if function.starts_with("MPI_") => format!("{function} of {}", of_comm(comm)),
                _ => format!("a split of {}", of_comm(comm)),
            },
        }
    }

    /// `ranks 0-1 are in all_reduce 31 of …`: the ranks inside an event.
    pub(super) fn waiters_in(&self, event: Event) -> String {
        format!("{} {} in {}", self.waiters_text(event), self.waiters_number(event).is(), self.describe(event))
    }

    /// The number of the word for the ranks inside an event. `no rank` is singular.
    fn waiters_number(&self, event: Event) -> Number {
        Number::of(self.graph.waiters_of(event).len().max(1))
    }

    /// The ranks inside an event, as a line of evidence.
    pub fn waiters_line(&self, event: Event) -> EvidenceLine {
        line(self.waiters_in(event), self.world.ranks(self.graph.waiters_of(event).iter().copied()))
    }

    /// The clause with the ranks that wait for a suspect: `; ranks 0-1, 3 wait for it in all_reduce
    /// 31 of …`, or `there` if the sentence so far already names the event.
    pub(super) fn waiters_clause(&self, suspect: &Suspect, culprits: &[usize], sentence: &str) -> String {
        let held =
            self.suspect_rank(suspect).map_or(String::new(), |rank_index| self.resource_waiter_clause(rank_index));
        held + &self.event_waiters_clause(suspect, culprits, sentence)
    }

    /// The clause with the rank that waits for a resource of this rank.
    fn resource_waiter_clause(&self, holder: usize) -> String {
        let wait = self.graph.resource_waits.iter().find(|wait| wait.holder == holder);
        let text = wait.and_then(|wait| {
            let what = self.awaited_text(wait.waiter)?;
            Some(format!("; rank {} waits for {what}{}", self.view(wait.waiter).rank, self.place(wait.waiter)))
        });
        text.unwrap_or_default()
    }

    fn event_waiters_clause(&self, suspect: &Suspect, culprits: &[usize], sentence: &str) -> String {
        let it = if culprits.len() > 1 { "them" } else { "it" };
        let place = |event: Event| {
            let what = self.describe(event);
            if sentence.contains(&what) { "there".to_owned() } else { format!("in {what}") }
        };
        if let Some(event) = self.main_event(suspect) {
            let waiters = self.world.ranks(
                self.graph.waiters_of(event).iter().copied().filter(|rank_index| !culprits.contains(rank_index)),
            );
            return match waiters.len() {
                0 => String::new(),
                1 => format!("; {} waits for {it} {}", ranks(&waiters), place(event)),
                _ => format!("; {} wait for {it} {}", ranks(&waiters), place(event)),
            };
        }
        let waiters =
            self.world.ranks(self.stack_waiters.iter().copied().filter(|rank_index| !culprits.contains(rank_index)));
        let place =
            self.stack_waiters.first().map_or("", |rank_index| self.view(*rank_index).host.observed.witness.as_str());
        match waiters.len() {
            0 => String::new(),
            1 => format!("; {} waits in {place}", ranks(&waiters)),
            _ => format!("; {} wait in {place}", ranks(&waiters)),
        }
    }
}

/// Lines of evidence about one rank.
impl<'a> Case<'a> {
    /// The stuck helper of a rank, as a phrase: `thread saver is inside write at …`.
    pub(super) fn helper_text(&self, rank_index: usize) -> Option<String> {
        let StuckHelper { name, state } = self.stuck_helper(rank_index)?;
        Some(format!("{name} {state}"))
    }

    /// The stuck helper of a rank, as a line of evidence.
    pub fn helper_line(&self, rank_index: usize) -> Option<EvidenceLine> {
        Some(detail(self, rank_index, &self.helper_text(rank_index)?))
    }

    /// What the system call of a rank waits for, as a line of evidence.
    pub fn awaited_line(&self, rank_index: usize) -> Option<EvidenceLine> {
        let awaits = self.awaited_text(rank_index)?;
        let rank = self.view(rank_index).rank;
        Some(line(format!("a system call of rank {rank} waits for {awaits}"), vec![rank]))
    }

    /// The frame or function that classifies a rank's main thread, as a line of evidence. `None` if
    /// [`Case::position_lines`] shows that frame in more detail.
    pub fn witness_line(&self, rank_index: usize) -> Option<EvidenceLine> {
        let view = self.view(rank_index);
        let witness = &view.host.observed.witness;
        let location = &view.host.location;
        let is_location =
            location.python_function.as_deref().zip(location.python.as_deref()).is_some_and(|(function, place)| {
                let file = place.rsplit_once('/').map_or(place, |(_, file)| file);
                *witness == format!("{function} ({file})")
            });
        (!is_location).then(|| self.inside_line(rank_index))
    }

    /// The frame or function that classifies a rank's main thread, as a line of evidence.
    pub fn inside_line(&self, rank_index: usize) -> EvidenceLine {
        about(self, rank_index, &format!("is inside {}", self.view(rank_index).host.observed.witness))
    }

    /// The places of the first two of these ranks and their progress, as lines of evidence.
    pub fn position_lines_of(&self, rank_indices: &[usize]) -> Vec<EvidenceLine> {
        rank_indices.iter().take(2).flat_map(|rank_index| self.position_lines(*rank_index)).collect()
    }

    /// The place of a rank and its progress between the samples, as lines of evidence.
    pub fn position_lines(&self, rank_index: usize) -> Vec<EvidenceLine> {
        let view = self.view(rank_index);
        let mut lines = Vec::new();
        let host = &view.host;
        if let Some(python) = &host.location.python {
            let function = host.location.python_function.as_deref().unwrap_or("?");
            let samples = match (host.moved, host.same_in_both) {
                (None, _) => " (one sample)",
                (Some(moved), _) if moved.own_frame => " in the last sample, and in another frame in the first",
                (Some(_), true) => " in both samples",
                (Some(_), false) => "",
            };
            lines.push(about(self, rank_index, &format!("is in {function} at {python}{samples}")));
        }
        lines.extend(self.awaited_line(rank_index));
        if let Some(native) = &host.location.native {
            lines.push(about(self, rank_index, &format!("is in C function {native}")));
        }
        if let Some(moved) = host.moved {
            let share = moved.cpu_share * 100.0;
            let bytes = moved.io_bytes;
            lines.push(about(
                self,
                rank_index,
                &format!("used {share:.0} % of a core and read or wrote {bytes} bytes between the samples"),
            ));
        }
        if !host.stack {
            let why = view.evidence.map(|evidence| evidence.errors.join("; ")).filter(|why| !why.is_empty());
            let why = why.map_or(String::new(), |why| format!(": {why}"));
            let what = match view.presence {
                Presence::Missing => "data from",
                _ => "stack of",
            };
            lines.push(line(format!("there is no {what} rank {}{why}", view.rank), vec![view.rank]));
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
            _ => {
                format!("; {} {} in collective {seq}", self.waiters_text(event), self.waiters_number(event).is())
            }
        };
        let text = match self.comms[comm].member(rank_index) {
            Some(member) => format!(
                "rank {rank} launched {}, started {} and completed {} collectives on communicator {id}{others}",
                member.launched, member.started, member.completed
            ),
            None => format!("rank {rank} recorded no collective on communicator {id}{others}"),
        };
        Some(line(text, vec![rank]))
    }
}
