//! Identifiers of jobs, ranks, nodes and connections, and the representation of a job toward the
//! cluster.

pub(crate) mod partition;

use std::{
    fmt, fs,
    hash::{DefaultHasher, Hash, Hasher},
    sync::LazyLock,
};

use xpu_timer_proto::{procfs, v1::JobId};

use crate::{http::access::is_loopback, os::process};

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
    pub(crate) fn has_rendezvous(&self, instance: &str) -> bool {
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
pub(crate) type RankId = u64;
/// Identity of a connection; never reused.
pub(crate) type ConnectionId = u64;
/// Number of a node collector process at the cluster collector. A process keeps its number when it
/// reconnects with another stream.
pub(crate) type NodeId = u64;
/// Number of a node's stream to the cluster collector.
pub(crate) type StreamId = u64;

/// The job as it is reported to the cluster.
#[must_use]
pub(crate) fn job_id(job: &JobKey) -> JobId {
    let instance = match job.is_of_process() {
        true => of_this_machine(&job.instance),
        false => beyond_this_machine(&job.instance),
    };
    JobId { name: job.name.clone(), instance }
}

/// The key of a job at the cluster.
#[must_use]
pub(crate) fn cluster_key(job: &JobId) -> JobKey {
    JobKey { name: job.name.clone(), instance: job.instance.clone() }
}

/// The registry's key of a job.
#[must_use]
pub(crate) fn local_key(job: &JobId) -> JobKey {
    JobKey { name: job.name.clone(), instance: on_this_machine(&job.instance).into() }
}

// Rendezvous of different nodes become comparable here. A rendezvous on loopback is local to the
// machine that reports it: two jobs that both report `127.0.0.1:29500` on two machines are two
// jobs, while a job that several collectors of one machine report is one job.

/// Suffix of the instance of a job whose rendezvous is on the loopback of this machine.
static HERE: LazyLock<String> = LazyLock::new(|| {
    // A container may have its own loopback.
    let namespace = fs::read_link("/proc/self/ns/net").map(|link| link.display().to_string()).unwrap_or_default();
    let mut hasher = DefaultHasher::new();
    (procfs::boot_id(), namespace).hash(&mut hasher);
    format!(" on {} {:08x}", process::host_name(), hasher.finish() as u32)
});

/// The instance of a job as it is reported to other machines.
fn beyond_this_machine(instance: &str) -> String {
    match instance.rsplit_once(':') {
        Some((host, port)) if is_loopback(host) && port.bytes().all(|byte| byte.is_ascii_digit()) => {
            of_this_machine(instance)
        }
        _ => instance.into(),
    }
}

/// A machine-local identifier as it is reported to other machines.
fn of_this_machine(instance: &str) -> String {
    format!("{instance}{}", *HERE)
}

/// The instance of a job as it is named on this machine.
fn on_this_machine(instance: &str) -> &str {
    instance.strip_suffix(HERE.as_str()).unwrap_or(instance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loopback_rendezvous_belongs_to_this_machine() {
        for instance in ["127.0.0.1:29500", "localhost:29500", "[::1]:1", "::1:1", "127.0.1.1:29500"] {
            let reported = beyond_this_machine(instance);
            assert!(reported.starts_with(instance) && reported.len() > instance.len() + 8, "{reported}");
            assert_eq!((on_this_machine(&reported), beyond_this_machine(&reported)), (instance, reported.clone()));
        }
        for instance in ["", "10.0.0.9:29500", "prterun-1", "4711.0", "node:35363", "localhost.evil.example:1"] {
            assert_eq!((beyond_this_machine(instance).as_str(), on_this_machine(instance)), (instance, instance));
        }
        assert_eq!(on_this_machine("127.0.0.1:1 on other 00000001"), "127.0.0.1:1 on other 00000001");
    }
}
