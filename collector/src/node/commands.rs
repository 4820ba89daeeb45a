//! Messages from other threads to the event loop of the node.

use crate::{
    http::questions::Question,
    node::{inbox::Command, metrics_page, state::NodeState, status},
    os::clock::Now,
};

impl NodeState {
    /// Handles a message from another thread.
    pub fn command(&mut self, command: Command, now: Now) {
        match command {
            // The requester may be gone by now; that does no harm.
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
