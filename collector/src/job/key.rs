//! Identifiers of jobs, ranks and connections, and the representation of a job toward the cluster.

use std::fmt;

use xpu_timer_proto::v1::JobId;

use crate::job::rendezvous;

/// Identifies a job.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobKey {
    /// The job's name; may be empty.
    pub name: String,
    /// Distinguishes jobs of this name: [`Handle::instance`](crate::os::process::Handle::instance),
    /// or the pid of a process without a rank. If nothing else distinguishes two jobs, the second
    /// one has the pid of its process that was known first.
    pub instance: String,
}

impl JobKey {
    /// The key of a job that is identified by a process.
    #[must_use]
    pub fn of_process(name: &str, instance: &str, pid: i32) -> JobKey {
        let separator = if instance.is_empty() { "" } else { ", " };
        JobKey { name: name.into(), instance: format!("{instance}{separator}{PID}{pid}") }
    }

    /// Whether this job is identified by a process of this machine.
    #[must_use]
    pub fn is_of_process(&self) -> bool {
        let known_by = self.instance.rsplit(", ").next().unwrap_or_default();
        known_by.strip_prefix(PID).is_some_and(|pid| pid.parse::<i32>().is_ok())
    }

    /// Whether the rendezvous of this job is `instance`.
    pub(crate) fn is_at(&self, instance: &str) -> bool {
        match self.instance.strip_prefix(instance) {
            Some("") => true,
            Some(rest) => self.is_of_process() && rest.trim_start_matches(", ").starts_with(PID),
            None => false,
        }
    }
}

/// Prefix of the pid of the process that identifies a job.
const PID: &str = "pid ";

impl fmt::Display for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.name.as_str(), self.instance.as_str()) {
            ("", "") => f.write_str("(no name)"),
            (name, "") => f.write_str(name),
            ("", instance) => f.write_str(instance),
            (name, instance) => write!(f, "{name} ({instance})"),
        }
    }
}

/// Identity of a registry entry; never reused.
pub type RankId = u64;
/// Identity of a connection; never reused.
pub type ConnectionId = u64;

/// The job as it is reported to the cluster.
#[must_use]
pub fn job_id(job: &JobKey) -> JobId {
    let instance = match job.is_of_process() {
        true => rendezvous::of_this_machine(&job.instance),
        false => rendezvous::beyond_this_machine(&job.instance),
    };
    JobId { name: job.name.clone(), instance }
}

/// The key of a job at the cluster.
#[must_use]
pub fn key(job: &JobId) -> JobKey {
    JobKey { name: job.name.clone(), instance: job.instance.clone() }
}

/// The registry's key of a job.
#[must_use]
pub fn own_key(job: &JobId) -> JobKey {
    JobKey { name: job.name.clone(), instance: rendezvous::on_this_machine(&job.instance).into() }
}
