//! The `.stacktrace` files of an incident, which are fetched after its verdict, and the end of its work.

use serde_json::json;
use xpu_timer_analysis::{Verdict, rank_set::RankSet};
use xpu_timer_proto::v1::{DumpFile, FetchFiles, cluster_message::Message};

use super::{Expected, Hub, SECOND, opening::runs};
use crate::{
    clock::Now,
    cluster::{
        gather::Work,
        incident::{Progress, State},
        nodes::NodeId,
    },
    delivery::rank_of,
    retention,
};

/// In jobs of up to so many ranks all `.stacktrace` files are fetched; in larger ones those of the culprits and of some others.
pub const ALL_FILES: usize = 1024;
const SOME_FILES: usize = 16;
/// Nodes that send files at a time, and how long files are waited for.
const FILE_NODES: usize = 8;
const FILES_NS: u64 = 20 * SECOND;

impl Hub {
    /// Chooses whose `.stacktrace` files are fetched.
    pub(super) fn want_files(&mut self, id: &str, verdict: &Verdict, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let all = incident.parts.values().map(|part| part.ranks.len()).sum::<u64>() <= ALL_FILES as u64;
        let some: Vec<u32> = verdict
            .culprits
            .iter()
            .take(SOME_FILES)
            .chain(verdict.ranks.iter().filter_map(|group| group.ranks.first()).take(SOME_FILES))
            .copied()
            .collect();
        for (node, part) in &incident.parts {
            if part.progress != Progress::Delivered {
                continue;
            }
            let wanted: RankSet = part.ranks.iter().filter(|rank| all || some.contains(rank)).collect();
            if !wanted.is_empty() {
                incident.files_wanted.insert(*node, wanted);
            }
        }
        incident.files_until_ns = Some(now.mono_ns + FILES_NS);
        self.fetch(id, now);
    }

    pub(super) fn fetch(&mut self, id: &str, now: Now) {
        loop {
            let Some(incident) = self.incidents.get_mut(id).filter(|one| one.files_until_ns.is_some()) else { return };
            if incident.files_coming.len() >= FILE_NODES {
                return;
            }
            let Some((node, ranks)) = incident.files_wanted.pop_first() else { break };
            let key = self.expect(Expected { incident: id.into(), node, files: true });
            let request = FetchFiles { incident: id.into(), ranks: runs(&ranks), key };
            if self.nodes.send(node, Message::Fetch(request), now.mono_ns)
                && let Some(incident) = self.incidents.get_mut(id)
            {
                incident.files_coming.insert(node);
            }
        }
        if let Some(incident) = self.incidents.get_mut(id)
            && incident.files_coming.is_empty()
        {
            incident.files_until_ns = None;
            self.work(id, Work::Draw);
        }
    }

    pub(super) fn file(&mut self, id: &str, node: NodeId, file: DumpFile, now: Now) {
        let Some(incident) = self.incidents.get_mut(id).filter(|one| one.files_coming.contains(&node)) else { return };
        if file.name.is_empty() {
            incident.files_coming.remove(&node);
            self.expected.retain(|_, expected| !expected.files || expected.node != node || expected.incident != id);
            self.fetch(id, now);
            return;
        }
        let own =
            incident.parts.get(&node).zip(rank_of(&file.name)).is_some_and(|(part, rank)| part.ranks.contains(rank));
        if own {
            self.work(id, Work::File(Box::new(file)));
        }
    }

    pub(super) fn drawn(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let path = incident.folder.clone();
        for reply in std::mem::take(&mut incident.replies) {
            // Whoever asked may be gone.
            drop(reply.send(Ok(json!({ "incident": id, "path": path }))));
        }
        // The merged whole is on disk; a part that comes late reads it again. One that came meanwhile is still in the thread alone.
        if std::mem::take(&mut incident.drawing) {
            incident.work = None;
        }
        if incident.is_manual() {
            self.close(id, State::Ended, now);
        }
        let open = self.incidents.values().filter(|one| one.is_open()).map(|one| one.id.clone()).collect();
        retention::start(self.folders(), self.settings.keep, open);
    }
}
