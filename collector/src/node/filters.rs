//! System call filters that ranks install on themselves. The hook must not make a call that such a
//! filter may forbid, and it cannot see a filter that a bare instruction installs. The collector
//! sees it in `/proc` and notes it in the rank's ring.

use std::fs;

use tracing::warn;
use xpu_timer_proto::ring::{self, filtered, header};

use crate::{
    job::key::RankId,
    node::{registry::Rank, state::NodeState},
    os::clock::Now,
};

impl NodeState {
    /// Checks ranks for filters. Writes to their rings that the collector checks, and what it
    /// found.
    pub(super) fn check_filters(&mut self, ids: impl IntoIterator<Item = RankId>, now: Now) {
        for id in ids {
            let Some(rank) = self.registry.get(id) else { continue };
            let Some(bits) = look(rank, now) else { continue };
            if bits & !self.filtered.insert(id, bits).unwrap_or(0) != 0 {
                let what = match bits & filtered::WATCHER {
                    0 => "its threads make no system call for the hook",
                    _ => "the hook falls silent, so a hang of this rank is seen by its peers alone",
                };
                warn!("{} has put itself under a filter of system calls; {what}", rank.title());
            }
        }
    }

    /// Whether a system call filter is a reason for the watcher of this rank to stand still.
    pub(super) fn watcher_is_filtered(&self, id: RankId) -> bool {
        self.filtered.get(&id).is_some_and(|bits| bits & filtered::WATCHER != 0)
    }
}

/// The filter bits of a rank; `None` when this collector cannot see the process or its ring.
fn look(rank: &Rank, now: Now) -> Option<u32> {
    let process = rank.process.as_ref().filter(|process| !process.is_dead())?;
    let ring = rank.ring.as_ref()?;
    let read = |offset: u64, buffer: &mut [u8]| ring.read_at(offset, buffer);
    let words = ring.header().ok()?;
    let at_load = words[header::FILTERS_AT_LOAD];
    let grew = |tid: u64| {
        // A ring holds thread ids of the process's own namespace. A thread that is not visible
        // under its id here adds nothing.
        let status = fs::read(format!("/proc/{}/task/{tid}/status", process.pid)).unwrap_or_default();
        u64::from(ring::filters(&status)) > at_load
    };
    let owners = ring::lane::owners(&read).ok()?;
    let program = grew(process.pid as u64) || owners.into_iter().any(grew);
    let watcher = words[header::WATCHER_TID] != 0 && grew(words[header::WATCHER_TID]);
    // A filter stays in force even after its thread has ended.
    let before = words[header::FILTERS_SEEN] as u32 | words[header::FILTERED] as u32;
    let found = [(program, filtered::PROGRAM), (watcher, filtered::WATCHER)];
    let bits = found.into_iter().filter(|(holds, _)| *holds).fold(before, |bits, (_, bit)| bits | bit);
    // The result is written before the note that the collector has checked. A ring that cannot be
    // written is the fault of its process.
    let _ = ring.write(header::FILTERED, u64::from(bits)).and_then(|()| ring.write(header::COLLECTOR_NS, now.mono_ns));
    Some(bits)
}
