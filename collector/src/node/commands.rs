//! Messages from other threads to the event loop of the node.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use tracing::{info, warn};
use xpu_timer_analysis::{Verdict, rank_set::RankSet};
use xpu_timer_proto::{
    PROTOCOL_VERSION,
    ring::{self, header},
    v1::{HangSignal, Hello, HookMessage, hook_message::Message},
};

use crate::node::status;
use crate::node::metrics_page;
use crate::node::{judged::{Ending, Judged, Signalled, Told, Watch}, state::{Core, cause_pid, living_ranks, nanoseconds, raise, read_header, TICK, ENDING_TIMEOUTS}, unwritten_verdicts::{Unwritten, Waiting}};
use crate::{client::webhook::Webhook, config::Settings, http::questions::{DumpReply, Question}, incident::{engine::{Cause, DEATH_GRACE_NS, Engine, Incident, Jobs, Raise, State}, records, throttle::{BY_HAND, Throttle}}, job::{key::{ConnectionId, JobKey, RankId}, partition::Place}, metrics::{sampler::Sampler, slow_ranks::SlowRanks}, node::{captures::Captures, dump::Hurry, inbox::{Command, Inbox}, launched::{Launched, Silent}, member::Member, monitor::{Monitor, Observation, SHORTEST_SILENCE}, registry::{Rank, Registered, Registry}, }, os::{clock::{self, Now}, disk::Disk, process::{self, Handle}, ring_file::RingFile}};

impl Core {
    /// A message from another thread.
    pub fn command(&mut self, command: Command, now: Now) {
        match command {
            // Whoever asked may be gone by now; that is no loss.
            Command::Question(Question::Status(reply)) => drop(reply.send(status::status(self, now))),
            Command::Question(Question::Metrics(reply)) => drop(reply.send(metrics_page::text(self, now))),
            Command::Question(Question::Folders(reply)) => drop(reply.send(self.folders())),
            Command::Question(Question::WithoutFolder(reply)) => {
                drop(reply.send(status::without_folder(self)));
            }
            Command::Question(Question::SlowRanks(reply)) => drop(reply.send(self.slow.json())),
            Command::Question(Question::Dump { job, reply }) => self.manual(job.as_deref(), reply, now),
            Command::Finished(outcome) => self.finished(*outcome, now),
            Command::Written(id, result) => self.written(&id, result, now),
            Command::Found(found, wait_ns) => self.adopt(found, wait_ns, now),
            Command::Uplink(event) => self.uplink(event, now),
            Command::Stop => self.hurry.set(),
        }
    }
}
