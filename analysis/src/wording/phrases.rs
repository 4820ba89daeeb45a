//! Phrases about the ranks and the events of an incident.

use std::borrow::Cow;

use xpu_timer_proto::server::{Awaited, AwaitedKind, Holder};

use super::{Number, awaited_keys, missing_keys};
use crate::{
    case::{Case, Position},
    graph::{Event, Suspect},
    stacks::{self, STANDARD_INPUT, StuckHelper, is_terminal, plain},
    store::key_wait,
    text::{self, communicator, rank_count, ranks},
    world::{ProcessView, RankView},
};

/// `train.py:88 in step`.
fn frame((file, function): (&str, Option<&str>)) -> String {
    function.map_or(file.to_owned(), |function| format!("{file} in {function}"))
}

/// A position, to follow a verb: ` at train.py:41 in load (C function read)`.
pub(super) fn place(position: Position<'_>) -> String {
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

/// Where a rank is, and what it waits for itself.
impl<'a> Case<'a> {
    /// Where the main thread of a rank is, to follow a verb: ` at train.py:41 in load (C function
    /// read)`.
    pub(super) fn place(&self, rank_index: usize) -> String {
        place(self.position(rank_index))
    }

    /// The function that shows what the main thread of a rank does.
    pub(super) fn witness(&self, rank_index: usize) -> Cow<'_, str> {
        plain(&self.view(rank_index).host.observed.witness)
    }

    /// Like [`Case::place`], without the C function if there is a frame of Python.
    pub(super) fn short_place(&self, rank_index: usize) -> String {
        let position = self.position(rank_index);
        let native = position.native.filter(|_| position.python.is_none());
        place(Position { native, ..position })
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
        let is_known = self.graph.process_wait(rank_index).is_some_and(|wait| wait.is_certain);
        let explains = |helper: &StuckHelper| awaits.is_none() || helper.is_dead() && !is_known;
        let helper = self.stuck_helper(rank_index).filter(explains);
        if let Some(StuckHelper { name, state, .. }) = helper {
            clause.push_str(&format!(", and {} {name} {state}", number.its()));
        }
        clause
    }

    /// The object that the system call of a rank's main thread waits for: `the lock on x.lock, held
    /// by rank 3 (process 77)`.
    pub(super) fn awaited_text(&self, rank_index: usize) -> Option<String> {
        if let Some(call) = key_wait(self.view(rank_index)) {
            return Some(format!("{} in the store", awaited_keys(call)));
        }
        let view = self.view(rank_index);
        self.object_text(view.node().unwrap_or_default(), view.pid()?, self.awaited(rank_index)?)
    }

    /// The lock for which the main thread of a process that is not a rank waits: `a lock that its
    /// thread uploader holds`.
    pub(super) fn lock_text(&self, process: usize) -> Option<String> {
        let ProcessView { node, host, .. } = &self.world.processes[process];
        let is_named = |awaited: &&Awaited| match awaited.kind() {
            AwaitedKind::Mutex => host.location.native.as_deref().is_some_and(stacks::is_mutex),
            kind => kind == AwaitedKind::SharedMemory,
        };
        self.object_text(node, host.pid, host.awaited.as_ref().filter(is_named)?)
    }

    /// The lock for which a process that is not a rank waits, or else this rank: `the lock on
    /// x.lock`.
    pub(super) fn kept_lock_text(&self, process: Option<usize>, rank_index: usize) -> String {
        let of_process = |index: usize| self.world.processes[index].host.awaited.as_ref();
        let awaited = process.map_or_else(|| self.awaited(rank_index), of_process);
        match awaited.filter(|awaited| awaited.kind() == AwaitedKind::Lock) {
            Some(awaited) => format!("the lock on {}", stacks::base_name(&awaited.name)),
            None => "a lock in shared memory".to_owned(),
        }
    }

    /// What a call of the process `pid` on `node` waits for.
    fn object_text(&self, node: &str, pid: i32, awaited: &Awaited) -> Option<String> {
        let own = |holder: &Holder| holder.pid == pid;
        let others: Vec<String> = awaited
            .holders
            .iter()
            .filter(|holder| !own(holder))
            .take(2)
            .map(|holder| self.holder_text(node, holder))
            .collect();
        let have = if others.len() == 1 { "has" } else { "have" };
        let holders = others.join(" and ");
        let alone = others.is_empty() && awaited.holders.iter().any(own);
        let file = stacks::base_name(&awaited.name);
        Some(match awaited.kind() {
            AwaitedKind::File if awaited.name == STANDARD_INPUT && holders.is_empty() => {
                "its standard input".to_owned()
            }
            AwaitedKind::File if awaited.name == STANDARD_INPUT => {
                format!("its standard input, whose other end {holders} {have} open")
            }
            AwaitedKind::File if is_terminal(awaited) => format!("its terminal {}", awaited.name),
            AwaitedKind::File => file.to_owned(),
            AwaitedKind::Socket if holders.is_empty() => awaited.name.clone(),
            AwaitedKind::Socket if awaited.name.is_empty() => format!("{holders} at the other end of a socket"),
            AwaitedKind::Socket => format!("{} ({holders})", awaited.name),
            AwaitedKind::Pipe if alone => "a pipe whose other end only it has open".to_owned(),
            AwaitedKind::Pipe => format!("a pipe whose other end {holders} {have} open"),
            AwaitedKind::Lock if alone => format!("the lock on {file}, which it holds itself"),
            AwaitedKind::Lock if holders.is_empty() => {
                format!("the lock on {file}, which another process or file handle holds")
            }
            AwaitedKind::Lock => format!("the lock on {file}, held by {holders}"),
            AwaitedKind::Child if holders.is_empty() => "a child process".to_owned(),
            AwaitedKind::Child => format!("the end of {holders}"),
            AwaitedKind::Mutex if awaited.holders.is_empty() => {
                "a lock that is locked by a thread that does not exist in this process".to_owned()
            }
            AwaitedKind::Mutex => format!("a lock that its thread {} holds", awaited.name),
            _ if holders.is_empty() => return None,
            AwaitedKind::Event => format!("an eventfd that {holders} {have} open"),
            AwaitedKind::Several => holders,
            AwaitedKind::SharedMemory => format!("a lock in memory that it shares with {holders}"),
            AwaitedKind::Semaphore => format!("a System V semaphore that {holders} changed last"),
            AwaitedKind::MessageQueue => format!("a message queue that {holders} used last"),
            AwaitedKind::Unspecified => return None,
        })
    }

    /// The stuck helper of a rank: `thread saver is inside write at …`.
    pub(super) fn helper_text(&self, rank_index: usize) -> Option<String> {
        let StuckHelper { name, state, .. } = self.stuck_helper(rank_index)?;
        Some(format!("{name} {state}"))
    }

    fn holder_text(&self, node: &str, holder: &Holder) -> String {
        let of_rank =
            |other: &RankView<'_>| other.pid() == Some(holder.pid) && other.node().unwrap_or_default() == node;
        match self.world.views.iter().position(of_rank) {
            Some(other) => format!("rank {} (process {})", self.view(other).rank, holder.pid),
            None => {
                let is_it = |process: &&ProcessView| process.host.pid == holder.pid && process.node == node;
                let known = self.world.processes.iter().find(is_it).map(|process| process.host.command.as_str());
                let command = known.filter(|command| !command.is_empty()).unwrap_or(&holder.name);
                let whose = if holder.child { "its child " } else { "" };
                format!("{whose}{}", text::process_name(holder.pid, command))
            }
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
        if let (Some((kernel, launch)), Event::Collective { comm, .. }) = (self.kernel_of(event), event) {
            return format!("launch {launch} of {} ({})", kernel.name, rank_count(self.comms[comm].size));
        }
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
                // MPI has several calls that make a communicator from another one, and NCCL has
                // calls that all ranks make together and that create none, such as the registration
                // of a window.
                Some(function) if !function.is_empty() && !function.ends_with("CommSplit") => {
                    format!("{function} of {}", of_comm(comm))
                }
                _ => format!("a split of {}", of_comm(comm)),
            },
        }
    }

    /// `ranks 0-1 are in all_reduce 31 of …`: the ranks inside an event.
    pub(super) fn waiters_in(&self, event: Event) -> String {
        format!("{} {} in {}", self.waiters_text(event), self.waiters_number(event).is(), self.describe(event))
    }

    /// The ranks inside an event.
    pub(super) fn waiters_text(&self, event: Event) -> String {
        ranks(&self.world.ranks(self.graph.waiters_of(event).iter().copied()))
    }

    /// The number of the word for the ranks inside an event. `no rank` is singular.
    fn waiters_number(&self, event: Event) -> Number {
        Number::of(self.graph.waiters_of(event).len().max(1))
    }

    /// The clause with the ranks that wait for a suspect: `; ranks 0-1, 3 wait for it in all_reduce
    /// 31 of …`, or `there` if the sentence so far already names the event.
    pub(super) fn waiters_clause(&self, suspect: &Suspect, culprits: &[usize], sentence: &str) -> String {
        let held = self.suspect_rank(suspect).map_or(String::new(), |rank| self.resource_waiter_clause(rank, culprits));
        held + &self.event_waiters_clause(suspect, culprits, sentence)
    }

    /// The clause with the rank that waits for a resource of this rank. The sentence has the waits
    /// of culprits already.
    fn resource_waiter_clause(&self, holder: usize, culprits: &[usize]) -> String {
        let is_new = |waiter: &usize| !culprits.contains(waiter);
        let wait = self.graph.resource_waits.iter().find(|wait| wait.holder == holder && is_new(&wait.waiter));
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
        let place = self.stack_waiters.first().map(|rank_index| self.witness(*rank_index)).unwrap_or_default();
        // The key, unless the sentence already names it.
        let in_store = self.stack_waiters.iter().all(|rank_index| self.uses_store(*rank_index));
        let keys = missing_keys(self, &self.stack_waiters).filter(|keys| in_store && !sentence.contains(keys));
        let keys = keys.map_or(String::new(), |keys| format!(" for {keys}"));
        match waiters.len() {
            0 => String::new(),
            1 => format!("; {} waits in {place}{keys}", ranks(&waiters)),
            _ => format!("; {} wait in {place}{keys}", ranks(&waiters)),
        }
    }
}
