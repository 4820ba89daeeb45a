//! Chains of waiting through processes that are no ranks: a rank waits for an engine, which waits
//! for a server, which is stopped.

use xpu_timer_proto::server::AwaitedKind;

use super::{
    builder::ResourceWait,
    chains::{Chain, Chains, End, Member},
};
use crate::{stacks::ProcessState, world::World};

/// A rank that waits for a process that is no rank, directly or through other processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessWait {
    /// Index of the rank.
    pub waiter: usize,
    /// The processes of the chain, as indices. The last one is its end.
    pub chain: Vec<usize>,
    /// At each step only one process has the other end.
    pub is_certain: bool,
    /// All processes of the chain descend from the rank: its loader workers, its child processes.
    pub is_own: bool,
    /// The state of the process at the end.
    pub state: ProcessState,
    /// Nothing outside of the chain wakes the process at its end: it waits without a timeout for a
    /// lock, or for processes of the chain, and none of its threads waits for anybody else.
    pub is_closed: bool,
    /// Members of the chain wait for each other.
    pub mutual: Option<Mutual>,
}

/// The members of a cycle that are to blame for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mutual {
    /// The rank at the beginning of the chain.
    pub rank: bool,
    /// Processes of the chain, as indices.
    pub processes: Vec<usize>,
}

impl ProcessWait {
    /// The process at the end of the chain.
    pub fn end(&self) -> usize {
        self.chain.last().copied().unwrap_or_default()
    }

    /// Whether the process at the end can never answer, even if no rank waits in an operation.
    pub fn proves_hang(&self) -> bool {
        self.state.cannot_continue() || self.is_closed
    }
}

/// What ranks wait for outside of all operations. The lists are in ascending order of their ranks.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// Ranks that wait for a resource of another rank.
    pub of_ranks: Vec<ResourceWait>,
    /// Ranks that wait for a process that is no rank.
    pub of_processes: Vec<ProcessWait>,
    /// Ranks that wait for a process that waits for clients itself.
    pub at_rest: Vec<usize>,
}

/// Finds what ranks wait for.
pub(super) fn waits(world: &World<'_>) -> Waits {
    let chains = Chains::new(world);
    let mut waits = Waits::default();
    for waiter in 0..world.views.len() {
        match chains.of_rank(waiter) {
            End::Rank(holder) => waits.of_ranks.push(ResourceWait { waiter, holder }),
            End::Process(chain) => waits.of_processes.push(ProcessWait::new(&chains, waiter, chain, None)),
            End::Cycle(chain, from) => {
                let mutual = Mutual::of(&chains, waiter, &chain, from);
                waits.of_processes.push(ProcessWait::new(&chains, waiter, chain, Some(mutual)));
            }
            End::AtRest => waits.at_rest.push(waiter),
            End::Start | End::Back | End::Unknown => {}
        }
    }
    waits
}

impl ProcessWait {
    fn new(chains: &Chains<'_, '_>, waiter: usize, chain: Chain, mutual: Option<Mutual>) -> Self {
        let Chain { processes, is_certain, is_closed } = chain;
        let end = processes.last().copied().unwrap_or_default();
        let is_own = chains.descend_from(waiter, &processes);
        let state = chains.state(Member::Process(end));
        ProcessWait { waiter, chain: processes, is_certain, is_own, state, is_closed, mutual }
    }
}

impl Mutual {
    /// Who is to blame in a cycle from this position of a chain on, or from the rank on. A process
    /// that waits for the end of another one must not expect that it ends while it needs something.
    fn of(chains: &Chains<'_, '_>, waiter: usize, chain: &Chain, from: Option<usize>) -> Self {
        let waits_for_child = |member: Member| {
            let awaited = chains.host(member).awaited.as_ref();
            awaited.is_some_and(|awaited| awaited.kind() == AwaitedKind::Child)
        };
        let inside = &chain.processes[from.unwrap_or(0)..];
        let parents: Vec<usize> =
            inside.iter().copied().filter(|index| waits_for_child(Member::Process(*index))).collect();
        let is_parent = from.is_none() && waits_for_child(Member::Rank(waiter));
        if is_parent || !parents.is_empty() {
            return Mutual { rank: is_parent, processes: parents };
        }
        Mutual { rank: from.is_none(), processes: inside.to_vec() }
    }
}
