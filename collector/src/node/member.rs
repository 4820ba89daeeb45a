//! What a node remembers of its cluster.

use crate::{
    incident::part::Kept,
    job::key::JobKey,
    node::link::{Delivering, Link},
    os::{clock::Now, process},
};
use std::{collections::BTreeMap, sync::Arc, thread};
use tracing::warn;
use xpu_timer_proto::v1::DumpRequest;
use xpu_timer_proto::v1::RankEntry;
use xpu_timer_proto::v1::node_message::Message;
/// What the node remembers of its cluster.
#[derive(Debug)]
pub struct Member {
    /// Why there is no stream; empty before the first one and while there is one.
    pub problem: String,
    /// Whether the cluster has welcomed this node.
    pub welcomed: bool,
    pub(super) identity: String,
    pub(super) link: Option<Link>,
    // Incidents that the cluster was notified of and has not requested, with the time at which the
    // node dumps alone.
    pub(super) announced: BTreeMap<String, u64>,
    // Requests that wait for ranks to reconnect.
    pub(super) deferred: Vec<DumpRequest>,
    // Parts of job-wide incidents.
    pub(super) parts: BTreeMap<String, Arc<Kept>>,
    pub(super) rounds: BTreeMap<String, u32>,
    // Whether this node's ranks hang in an incident, as last reported to the cluster.
    pub(super) told_hangs: BTreeMap<String, bool>,
    // The last reported entries without their ages, which always change.
    pub(super) told_ranks: Vec<RankEntry>,
    // Jobs that the cluster does not consider idle, and until when that holds.
    pub(super) declined: BTreeMap<JobKey, u64>,
    pub(super) last_launch: BTreeMap<JobKey, u64>,
    pub(super) heartbeat_ns: u64,
    // Incidents that the cluster requested, and until when the node waits for its verdict. After
    // that the node's own verdict counts.
    pub(super) asked: BTreeMap<String, u64>,
    // When the stream was lost, until the cluster's earlier messages are dropped.
    pub(super) lost_ns: Option<u64>,
}

impl Default for Member {
    fn default() -> Self {
        Member {
            problem: String::new(),
            welcomed: false,
            identity: process::random_id(),
            link: None,
            announced: BTreeMap::new(),
            deferred: Vec::new(),
            parts: BTreeMap::new(),
            rounds: BTreeMap::new(),
            told_hangs: BTreeMap::new(),
            told_ranks: Vec::new(),
            declined: BTreeMap::new(),
            last_launch: BTreeMap::new(),
            heartbeat_ns: 0,
            asked: BTreeMap::new(),
            lost_ns: None,
        }
    }
}

impl Member {
    /// Notes the last launch of a job.
    pub fn launched(&mut self, job: &JobKey, last_ns: u64) {
        self.last_launch.insert(job.clone(), last_ns);
    }

    /// Whether the job is idle on this node only, according to the cluster.
    #[must_use]
    pub fn is_declined(&self, job: &JobKey, now: Now) -> bool {
        self.declined.get(job).is_some_and(|until| *until > now.mono_ns)
    }

    /// Whether the cluster decides the verdict of an incident.
    #[must_use]
    pub fn is_asked(&self, id: &str) -> bool {
        self.asked.contains_key(id)
    }

    /// Sends if there is a stream. A stream that accepts no more is closed.
    pub(super) fn send(&mut self, message: Message) -> bool {
        let sent = self.link.as_ref().is_some_and(|link| link.send(message));
        if !sent && self.link.take().is_some() {
            self.welcomed = false;
        }
        sent
    }

    /// Starts the delivery that the cluster requested with this key, on a thread that may block.
    pub(super) fn bring(&self, key: String, work: impl FnOnce(Delivering) + Send + 'static) {
        let Some(link) = self.link.clone() else { return };
        if let Err(error) = thread::Builder::new().name("delivery".into()).spawn(move || work(link.bring(key))) {
            warn!("no thread for a delivery: {error}");
        }
    }
}
