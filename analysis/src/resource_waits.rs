//! Ranks that wait for a resource of another rank: a file lock that it holds, or a pipe or socket
//! whose other end it has.

use xpu_timer_proto::server::AwaitedKind;

use crate::world::World;

/// A rank whose main thread waits for a resource that the process of another rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResourceWait {
    /// Index of the rank that waits.
    pub waiter: usize,
    /// Index of the rank that has the resource.
    pub holder: usize,
}

/// All resource waits, ascending by waiter. A holder is identified by its process, so it is a rank
/// of the same node. A resource with several holders is left out.
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
