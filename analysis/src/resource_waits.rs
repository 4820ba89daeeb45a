//! Ranks that wait for another rank by something of the machine: a lock on a file that it holds, a pipe or a socket whose other end it has.

use xpu_timer_proto::server::AwaitedKind;

use crate::world::World;

/// A rank whose main thread waits for what the process of another rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResourceWait {
    /// The rank that waits, as a view.
    pub waiter: usize,
    /// The rank that holds it.
    pub holder: usize,
}

/// All of them, ascending. Holders are named by their processes, so they are ranks of the same node; a thing that somebody else
/// holds as well is nobody's alone.
pub(crate) fn resource_waits(world: &World<'_>) -> Vec<ResourceWait> {
    let by_process: std::collections::HashMap<(Option<&str>, i32), usize> = world
        .views
        .iter()
        .enumerate()
        .filter_map(|(index, rank_index)| Some(((rank_index.node(), rank_index.pid().filter(|pid| *pid > 0)?), index)))
        .collect();
    let of = |index: usize| {
        let view = &world.views[index];
        let awaited = view.host.awaited.as_ref().filter(|_| !view.halted() && view.host.same_in_both)?;
        let mut holders = awaited.holders.iter().map(|holder| by_process.get(&(view.node(), holder.pid)).copied());
        let holder = holders.next()??;
        let alone = holders.all(|other| other == Some(holder)) && awaited.kind() != AwaitedKind::Unspecified;
        (alone && holder != index).then_some(ResourceWait { waiter: index, holder })
    };
    (0..world.views.len()).filter_map(of).collect()
}
