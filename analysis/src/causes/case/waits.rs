//! What a rank waits for outside of all communicators, by the system call of its main thread.

use xpu_timer_proto::server::{AwaitedKind, Holder};

use super::{super::wording::Number, Case};
use crate::{
    stacks::{self, StuckHelper},
    world::RankView,
};

/// The file name of a standard input that is a pipe.
const STANDARD_INPUT: &str = "/dev/stdin";

impl<'a> Case<'a> {
    /// What a rank waits for itself, or which of its helpers is stuck, as a clause: `, and waits
    /// for its terminal /dev/pts/0`, `, and its child process 4242 (sh) has not ended`. Empty if
    /// nothing is known.
    pub fn own_wait_clause(&self, rank_index: usize, number: Number) -> String {
        let awaits = self.awaited_text(rank_index);
        let mut clause =
            awaits.as_ref().map_or(String::new(), |awaits| format!(", and {} for {awaits}", number.waits()));
        // If a pipe has no other end, the dead helper that had it explains the wait.
        let explains = |helper: &StuckHelper| awaits.is_none() || helper.is_dead();
        let helper = self.stuck_helper(rank_index).filter(explains);
        if let Some(StuckHelper { who, place }) = helper {
            clause.push_str(&format!(", and {} {who} {place}", number.its()));
        }
        clause
    }

    /// The object that the system call of a rank's main thread waits for: `the lock on x.lock, held
    /// by rank 3 (process 77)`.
    pub fn awaited_text(&self, rank_index: usize) -> Option<String> {
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

    /// Whether the main thread of a rank waits for keyboard input, or for a standard input that
    /// replaces it.
    pub fn at_terminal(&self, rank_index: usize) -> bool {
        let awaited = self.view(rank_index).host.awaited.as_ref();
        awaited.is_some_and(|awaited| {
            let name = awaited.name.as_str();
            let typed = [STANDARD_INPUT, "/dev/console"].contains(&name);
            awaited.kind() == AwaitedKind::File
                && (typed || name.starts_with("/dev/pts/") || name.starts_with("/dev/tty"))
        })
    }

    /// Whether the main thread of a rank waits for a child process by a pipe: the child has the
    /// other end open, or the child is dead and only the rank itself has it open.
    pub fn waits_for_child_by_pipe(&self, rank_index: usize) -> bool {
        let view = self.view(rank_index);
        let dead = || self.stuck_helper(rank_index).is_some_and(|helper| helper.is_dead());
        view.host.awaited.as_ref().filter(|awaited| awaited.kind() == AwaitedKind::Pipe).is_some_and(|awaited| {
            match awaited.holders.first() {
                Some(holder) if Some(holder.pid) != view.pid() => holder.child,
                _ => dead(),
            }
        })
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
