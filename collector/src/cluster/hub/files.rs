//! The `.stacktrace` files of an incident, which are fetched after its verdict, and the end of its
//! work.

use serde_json::json;
use tracing::warn;
use xpu_timer_analysis::{Verdict, rank_set::RankSet};
use xpu_timer_proto::v1::{DumpFile, FetchFiles, cluster_message::Message};

use crate::{
    cluster::{
        gather::Work,
        hub::{Expected, Hub, SECOND, delivery::RETRIES, opening::runs},
        ids::NodeId,
        incident::{Progress, State},
        nodes::Node,
        service::Credit,
    },
    incident::{folder::rank_of, retention},
    os::clock::Now,
};

const SOME_FILES: usize = 16;
/// Number of nodes that send files at a time.
const FILE_NODES: usize = 8;
/// Time limit for one piece.
const PIECE_NS: u64 = 20 * SECOND;
/// Time limit for all files.
const FILES_NS: u64 = 120 * SECOND;

impl Hub {
    /// Chooses the ranks whose `.stacktrace` files are fetched.
    pub(super) fn want_files(&mut self, id: &str, verdict: &Verdict, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let all = incident.parts.values().map(|part| part.ranks.len()).sum::<u64>()
            <= crate::incident::part::ALL_FILES as u64;
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
        incident.files = Some((now.mono_ns, now.mono_ns + PIECE_NS));
        self.fetch(id, now);
    }

    /// Requests files from some nodes at a time, and starts the viewer when all have arrived. A
    /// disconnected node is waited for.
    pub(super) fn fetch(&mut self, id: &str, now: Now) {
        loop {
            let Some(incident) = self.incidents.get_mut(id).filter(|one| one.files.is_some()) else { return };
            if incident.files_coming.len() >= FILE_NODES {
                return;
            }
            let is_here = |node: &NodeId| self.nodes.get(*node).is_some_and(Node::is_joined);
            let Some(node) = incident.files_wanted.keys().copied().find(is_here) else { break };
            let Some(ranks) = incident.files_wanted.remove(&node) else { break };
            let key = self.expect(Expected { incident: id.into(), node, files: true });
            let request = FetchFiles { incident: id.into(), ranks: runs(&ranks), key };
            let sent = self.nodes.send(node, Message::Fetch(request), now.mono_ns);
            let Some(incident) = self.incidents.get_mut(id) else { return };
            if sent { &mut incident.files_coming } else { &mut incident.files_wanted }.insert(node, ranks);
        }
        if let Some(incident) = self.incidents.get_mut(id)
            && incident.files_coming.is_empty()
            && incident.files_wanted.is_empty()
        {
            incident.files = None;
            self.work(id, Work::Draw);
        }
    }

    /// A transfer ended before its last message. It is started over, a few times.
    pub(super) fn files_ceased(&mut self, id: &str, node: NodeId, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let Some(ranks) = incident.files_coming.remove(&node) else { return };
        warn!("incident {id}: the files of node {} broke off", self.nodes.name(node));
        self.work(id, Work::BrokeOff(ranks.clone()));
        let Some(incident) = self.incidents.get_mut(id) else { return };
        if let Some(part) = incident.parts.get_mut(&node).filter(|part| part.broken < RETRIES) {
            part.broken += 1;
            incident.files_wanted.insert(node, ranks);
        }
        self.fetch(id, now);
    }

    /// A piece of a file. It carries its credit: the node sends the next piece when this one is
    /// written.
    pub(super) fn file(&mut self, id: &str, node: NodeId, file: DumpFile, credit: Credit, now: Now) {
        let coming = self.incidents.get_mut(id).filter(|one| one.files_coming.contains_key(&node));
        let Some(incident) = coming else { return };
        if let Some((begun, until)) = &mut incident.files {
            *until = (now.mono_ns + PIECE_NS).min(*begun + FILES_NS);
        }
        if file.name.is_empty() {
            incident.files_coming.remove(&node);
            self.expected.retain(|_, expected| !expected.files || expected.node != node || expected.incident != id);
            self.fetch(id, now);
            return;
        }
        let own =
            incident.parts.get(&node).zip(rank_of(&file.name)).is_some_and(|(part, rank)| part.ranks.contains(rank));
        if own {
            self.work(id, Work::File(Box::new(file), credit));
        }
    }

    pub(super) fn drawn(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let path = incident.folder.clone();
        for reply in std::mem::take(&mut incident.replies) {
            // The receiver may be gone.
            drop(reply.send(Ok(json!({ "incident": id, "path": path }))));
        }
        // The merged evidence is on disk, and a late part loads it again. A part that arrived in
        // the meantime exists only in the thread.
        if std::mem::take(&mut incident.drawing) {
            incident.work = None;
        }
        if incident.by_hand {
            self.close(id, State::Ended, now);
        }
        let open = self.incidents.values().filter(|one| one.is_open()).map(|one| one.id.clone()).collect();
        retention::start(self.folders(), self.settings.keep, open);
    }
}
