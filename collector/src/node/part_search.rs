//! The search for parts that an earlier node collector left on disk. The cluster collector may
//! request them again. Until the search ends, its messages wait, so that they keep their order.

use std::{
    collections::{BTreeMap, VecDeque},
    path::{Path, PathBuf},
    sync::Arc,
};

use tracing::warn;
use xpu_timer_proto::v1::cluster_message::Message;

use crate::{
    incident::{
        engine::SEARCH_NS,
        folder::{folder_name, is_own_folder, is_owned_by, own_names},
        part::{PART, PartLocation},
    },
    node::{cluster_member::PartSearch, inbox::Command, state::NodeState},
    os::{clock::Now, process},
};

impl NodeState {
    /// Handles a message of the cluster collector, after a search for the parts that it is about.
    pub(super) fn cluster_message(&mut self, message: Message, now: Now) {
        if let Some(search) = &mut self.member.search {
            return search.messages.push_back(message);
        }
        let incidents: Vec<String> = match &message {
            Message::Welcome(welcome) => welcome.open.iter().map(|request| request.incident.clone()).collect(),
            Message::Dump(request) => vec![request.incident.clone()],
            Message::Fetch(fetch) => vec![fetch.incident.clone()],
            _ => Vec::new(),
        };
        let unknown: Vec<String> = incidents.into_iter().filter(|id| !self.member.parts.contains_key(id)).collect();
        if unknown.is_empty() {
            return self.handle_cluster_message(message, now);
        }
        self.member.searches += 1;
        let roots = self.folders();
        self.member.search = Some(PartSearch {
            number: self.member.searches,
            pending: roots.iter().cloned().collect(),
            until_ns: now.mono_ns + SEARCH_NS,
            messages: VecDeque::from([message]),
        });
        let (unknown, home): (Arc<[String]>, Arc<str>) = (unknown.into(), process::home(&self.settings.socket).into());
        for root in roots {
            let (unknown, home, node) = (Arc::clone(&unknown), Arc::clone(&home), self.node.clone());
            let (number, inbox, below) = (self.member.searches, self.inbox.clone(), root.clone());
            self.disk.submit(&root, move || {
                let found = |id: &String| Some((id.clone(), find_part(&below, id, &node, &home)?));
                let found = unknown.iter().filter_map(found).collect();
                inbox.post(Command::PartsFound { search: number, root: below, found });
            });
        }
    }

    /// The result of a search in one root.
    pub(super) fn parts_found(&mut self, search: u64, root: &Path, found: BTreeMap<String, PathBuf>, now: Now) {
        for (id, folder) in found {
            self.member.parts.entry(id).or_insert_with(|| Arc::new(PartLocation::InFolder(folder)));
        }
        if let Some(current) = self.member.search.as_mut().filter(|current| current.number == search) {
            current.pending.remove(root);
            self.continue_after_search(now);
        }
    }

    /// Handles the messages that waited if the search has ended or takes too long.
    pub(super) fn continue_after_search(&mut self, now: Now) {
        let is_over = |search: &mut PartSearch| search.pending.is_empty() || search.until_ns <= now.mono_ns;
        let Some(search) = self.member.search.take_if(is_over) else { return };
        for root in search.pending {
            warn!("{} does not answer; parts of earlier incidents are not looked for there", root.display());
        }
        let mut messages = search.messages.into_iter();
        if let Some(first) = messages.next() {
            self.handle_cluster_message(first, now);
        }
        // One of these may begin another search, for which the later ones wait.
        messages.for_each(|message| self.cluster_message(message, now));
    }

    /// Handles the messages that waited, because the stream that they came on has ended.
    pub(super) fn stop_searching(&mut self, now: Now) {
        let messages = self.member.search.take().map(|search| search.messages).into_iter().flatten();
        messages.for_each(|message| self.handle_cluster_message(message, now));
    }
}

/// The folder of an incident that contains the part of this node.
fn find_part(root: &Path, id: &str, node: &str, home: &str) -> Option<PathBuf> {
    let alone = folder_name(id, None);
    let named = folder_name(id, Some(node));
    let names = own_names(&named).chain([alone.clone()]);
    // A node that dumped alone before the request of its cluster did not add its own name.
    let alone = format!("incident-{alone}");
    let is_own = |folder: &Path| is_owned_by(folder, home) || folder.ends_with(&alone) && is_own_folder(folder);
    let mut folders = names.map(|name| root.join(format!("incident-{name}")));
    folders.find(|folder| folder.join(PART).is_file() && is_own(folder))
}
