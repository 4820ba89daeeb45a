//! Handles the messages of the hooks: processes register, signal hangs, and end.

use std::{path::Path, sync::Arc, thread, time::Duration};

use tracing::{info, warn};
use xpu_timer_proto::{
    PROTOCOL_VERSION,
    ring::{self, header},
    v1::{HangSignal, Hello, HookMessage, hook_message::Message},
};

use crate::{
    incident::{
        engine::{Cause, Jobs, RaisedCause},
        records,
    },
    job::{ConnectionId, RankId, partition::CommunicatorRank},
    node::{
        exit_plugins::FailedRank,
        failures,
        inbox::Command,
        registry::{Rank, Registered},
        reports::IncidentReport,
        state::{NodeState, cause_pid, raised_by, read_header},
    },
    os::{
        clock::{self, Now, nanoseconds},
        process::Handle,
        resources,
        ring_file::{RingFile, kernel_name},
    },
};

/// After a restart hooks connect again within a second or two, and signal a lasting hang again at
/// once.
const RECONNECT: Duration = Duration::from_secs(10);

/// Why the connection of a hook must be closed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProtocolError {
    #[error("sent Hello twice")]
    SecondHello,
    #[error("sent a message of an unknown kind")]
    UnknownKind,
    #[error("sent a message before Hello")]
    NoHello,
    #[error("signalled a hang without an operation")]
    NoOperation,
    #[error(
        "has protocol {protocol} with ring layout {ring}, this collector {PROTOCOL_VERSION} with {}; use the hook and \
         the collector of one release",
        ring::VERSION
    )]
    OtherRelease { protocol: u32, ring: u32 },
}

impl NodeState {
    /// Handles a message of a hook.
    ///
    /// # Errors
    /// The connection must be closed.
    pub(super) fn message(
        &mut self,
        connection: ConnectionId,
        pid: i32,
        process: Option<&Arc<Handle>>,
        message: HookMessage,
        descriptor: Option<std::os::fd::OwnedFd>,
        now: Now,
    ) -> Result<(), ProtocolError> {
        let known = self.registry.by_connection(connection).map(|rank| rank.id);
        match (message.message, known) {
            (Some(Message::Hello(hello)), None) => self.hello(connection, pid, process, &hello, descriptor, now),
            (Some(Message::Hello(_)), Some(_)) => Err(ProtocolError::SecondHello),
            (None, _) => Err(ProtocolError::UnknownKind),
            (Some(_), None) => Err(ProtocolError::NoHello),
            (Some(Message::Hang(hang)), Some(id)) => self.hang(id, hang, now),
            (Some(Message::Resolved(resolved)), Some(id)) => {
                if let Some(rank) = self.registry.get(id) {
                    let cause = Cause::Operation { pid: cause_pid(rank), ticket: resolved.ticket };
                    info!("{}: the operation with ticket {} completed after all", rank.title(), resolved.ticket);
                    self.engine.clear_cause(&rank.job, &cause, now);
                }
                Ok(())
            }
            (Some(Message::Rank(info)), Some(_)) => {
                let unregistered = self.launched.unregistered();
                if let Some(registered) = self.registry.changed(connection, info, unregistered, now.mono_ns) {
                    self.registered(&registered, "changed", now);
                }
                Ok(())
            }
            (Some(Message::Fault(_)), Some(id)) => {
                self.fault(id);
                Ok(())
            }
            (Some(Message::Goodbye(_)), Some(_)) => {
                let ended_ns = self.happened_ns(now);
                if let Some(id) = self.registry.goodbye(connection, ended_ns) {
                    self.goodbye(id, now);
                }
                Ok(())
            }
        }
    }

    pub(super) fn hello(
        &mut self,
        connection: ConnectionId,
        pid: i32,
        process: Option<&Arc<Handle>>,
        hello: &Hello,
        descriptor: Option<std::os::fd::OwnedFd>,
        now: Now,
    ) -> Result<(), ProtocolError> {
        if hello.protocol != PROTOCOL_VERSION || hello.ring_version != ring::VERSION {
            return Err(ProtocolError::OtherRelease { protocol: hello.protocol, ring: hello.ring_version });
        }
        let ring = match descriptor.map(|descriptor| RingFile::new(descriptor, pid)) {
            Some(Ok(ring)) => Some(Arc::new(ring)),
            Some(Err(error)) => {
                warn!("{error}; its flight record will be missing");
                None
            }
            None => {
                warn!("pid {pid} registers without a ring; its flight record will be missing");
                None
            }
        };
        if let Some(process) = process {
            self.launched.registered(process);
        }
        let (process, unregistered) = (process.cloned(), self.launched.unregistered());
        let registered =
            self.registry.hello(connection, process, (hello, ring), &self.settings, unregistered, now.mono_ns);
        self.registered(&registered, "registered", now);
        self.check_filters([registered.id], now);
        self.search(registered.id, now);
        Ok(())
    }

    pub(super) fn registered(&mut self, registered: &Registered, what: &str, now: Now) {
        self.reassign_incidents(now);
        if let Some(rank) = self.registry.get(registered.id) {
            let helper = if rank.auxiliary { ", a helper of it" } else { "" };
            info!("{}{helper} {what}: attempt {}, world {}", rank.title(), rank.info.attempt, rank.info.world_size);
        }
        if registered.new_attempt {
            info!("it begins a new attempt; the ranks of the previous one have left");
        }
        if let Some(remark) = &registered.remark {
            warn!("{remark}");
        }
        for old in registered.superseded.iter().filter_map(|id| self.registry.get(*id)) {
            self.engine.process_replaced(&old.job, cause_pid(old), now);
            if registered.new_world {
                self.engine.world_began(&old.job);
            }
        }
    }

    /// Reads the communicators of all ranks with a name, or of all living ranks, and splits the
    /// ranks into jobs again.
    pub(super) fn rejoin(&mut self, name: Option<&str>, now: Now) {
        let is_wanted = |rank: &&Rank| match name {
            Some(name) => rank.info.job == name,
            None => rank.presence.is_alive(),
        };
        let read = |rank: &Rank| Some((rank.id, rank.ring.as_ref()?.communicator_ranks().ok()?));
        let memberships: Vec<(RankId, Vec<CommunicatorRank>)> =
            self.registry.ranks().filter(is_wanted).filter_map(read).collect();
        memberships.into_iter().for_each(|(id, ranks)| self.registry.set_communicators(id, ranks));
        if self.registry.rejoin(self.launched.unregistered(), now.mono_ns) {
            self.reassign_incidents(now);
        }
    }

    /// Moves each incident to the job of the processes that caused it.
    pub(super) fn reassign_incidents(&mut self, now: Now) {
        let registry = &self.registry;
        let of_pid = |pid: i32| registry.ranks().filter(move |rank| cause_pid(rank) == pid).last();
        let orphaned = self.engine.reassign_causes(|pid| of_pid(pid).map(|rank| rank.job.clone()), now);
        let raise =
            |cause: Cause| Some(RaisedCause { since_ns: now.mono_ns, ..raised_by(of_pid(cause.pid()?)?, cause) });
        let raises: Vec<RaisedCause> = orphaned.into_iter().filter_map(raise).collect();
        raises.into_iter().for_each(|raise| self.raise(raise, now));
    }

    /// Looks for open incidents of an earlier collector in the folders that this rank's incidents
    /// go to.
    pub(super) fn search(&mut self, id: RankId, now: Now) {
        let Some(rank) = self.registry.get(id) else { return };
        let wait = rank.settings.hang_timeout + RECONNECT;
        for path in [rank.settings.timeline_path.clone(), self.settings.fallback_path.clone()] {
            if self.searched.contains_key(&path) {
                continue;
            }
            self.searched.insert(path.clone(), false);
            let wait_ns = nanoseconds(wait);
            let (root, boot, inbox) = (path.clone(), self.boot.clone(), self.inbox.clone());
            self.engine.begin_search(now);
            self.disk.submit(&path, move || {
                let found = records::open_in(&root, &boot);
                inbox.post(Command::IncidentsFound { root, found, wait_ns });
            });
        }
    }

    /// Adopts the open incidents of an earlier collector in one root.
    pub(super) fn incidents_found(&mut self, root: &Path, found: Vec<records::OpenIncident>, wait_ns: u64, now: Now) {
        for records::OpenIncident { folder, record, verdict } in found {
            info!("incident {} was left open by an earlier collector", record.id);
            let known = match verdict {
                Some(verdict) => IncidentReport::of(verdict, record.dumped_mono_ns),
                None => IncidentReport { is_unfinished: true, is_shown: true, ..IncidentReport::default() },
            };
            let report = || IncidentReport { path: Some(folder), ..known };
            self.reports.entry(record.id.clone()).or_insert_with(report);
            self.engine.adopt(record, wait_ns, now);
        }
        if let Some(is_finished) = self.searched.get_mut(root) {
            *is_finished = true;
        }
        if self.searched.values().all(|is_finished| *is_finished) {
            self.engine.end_search();
            self.tick_engine(now);
        }
    }

    pub(super) fn hang(&mut self, id: RankId, hang: HangSignal, now: Now) -> Result<(), ProtocolError> {
        let mut operation = hang.operation.ok_or(ProtocolError::NoOperation)?;
        operation.function = kernel_name(&operation.function);
        // The job of a rank must be known before the hang is raised.
        let Some(name) = self.registry.get(id).map(|rank| rank.info.job.clone()) else { return Ok(()) };
        self.rejoin(Some(&name), now);
        let Some(rank) = self.registry.get(id) else { return Ok(()) };
        let timeout = nanoseconds(rank.settings.hang_timeout);
        info!(
            "{}: {:?} with ticket {} is pending for {:.1} s",
            rank.title(),
            operation.op(),
            operation.ticket,
            clock::seconds(hang.pending_ns)
        );
        let cause = Cause::Operation { pid: cause_pid(rank), ticket: operation.ticket };
        let raise = RaisedCause {
            since_ns: operation.entered_ns,
            late_ns: hang.pending_ns.saturating_sub(timeout),
            operation: Some(operation),
            ..raised_by(rank, cause)
        };
        self.raise(raise, now);
        Ok(())
    }

    pub(super) fn goodbye(&mut self, id: RankId, now: Now) {
        let Some(rank) = self.registry.get(id) else { return };
        info!("{} sent Goodbye", rank.title());
        self.engine.process_gone(&rank.job, cause_pid(rank), now);
    }

    /// A thread has received a fatal signal and waits until its stack is copied. The event loop
    /// cannot read the stack: that takes milliseconds, or longer for a large library.
    fn fault(&mut self, id: RankId) {
        let Some(rank) = self.registry.get(id) else { return };
        let (Some(ring), Some(process)) = (rank.ring.clone(), rank.process.clone()) else { return };
        let shared = Arc::clone(&rank.fault);
        let work = move || {
            if let Some(fault) = failures::read_fault(&ring, &process) {
                failures::store(&shared, fault);
            }
            resources::trim_heap();
        };
        if let Err(error) = thread::Builder::new().name("fault".into()).spawn(work) {
            warn!("{}: cannot start a thread to read its stack: {error}", rank.title());
        }
    }

    /// A rank under a system call filter can only write its goodbye into its ring.
    pub(super) fn read_goodbye(&mut self, id: RankId, now: Now) {
        let alive = self.registry.get(id).filter(|rank| rank.presence.is_alive());
        if alive.and_then(read_header).is_some_and(|(_, words)| words[header::GOODBYE] != 0) {
            self.registry.left(id, self.happened_ns(now));
            self.goodbye(id, now);
        }
    }

    /// Handles the end of a connection.
    pub(super) fn disconnected(&mut self, connection: ConnectionId, now: Now) {
        if let Some(id) = self.registry.disconnected(connection) {
            self.ended(id, now);
        }
    }

    /// Checks whether a process has ended, and handles that.
    pub(super) fn ended(&mut self, id: RankId, now: Now) {
        let Some(rank) = self.registry.get(id) else { return };
        let Some(process) = rank.process.clone().filter(|process| process.is_dead()) else { return };
        self.read_goodbye(id, now);
        let died = self.registry.ended(id, process.exit(), self.happened_ns(now));
        self.raise_outlived(id, now);
        self.note_failure(id);
        if !died {
            return;
        }
        let Some(rank) = self.registry.get(id) else { return };
        let how = rank.exit.as_deref().unwrap_or("the reason is unknown");
        warn!("{} ended without Goodbye: {how}", rank.title());
        let raise = RaisedCause { since_ns: now.mono_ns, ..raised_by(rank, Cause::Death { pid: cause_pid(rank) }) };
        self.engine.process_gone(&raise.job, process.pid, now);
        if !rank.auxiliary {
            self.raise(raise, now);
        }
    }

    /// Logs why a rank failed, and calls the exit plugins.
    fn note_failure(&mut self, id: RankId) {
        let Some(rank) = self.registry.newly_failed(id) else { return };
        let failed = FailedRank {
            title: rank.title(),
            info: rank.info.clone(),
            process: rank.process.clone(),
            ring: rank.ring.clone(),
            exit: rank.exit.clone().unwrap_or_default(),
            fault: Arc::clone(&rank.fault),
            plugins: self.settings.exit_plugins.clone(),
            job: rank.job.name.clone(),
            running: Arc::clone(&self.plugins),
        };
        if let Err(error) = thread::Builder::new().name("failure".into()).spawn(move || failed.examine()) {
            warn!("{}: cannot start a thread to examine its failure: {error}", rank.title());
        }
    }

    /// The last rank of a job has ended. If one of its ranks failed and the launched command runs,
    /// nobody may notice the failure. A rank that exits with a failure says goodbye, so its end
    /// alone raises nothing.
    fn raise_outlived(&mut self, last: RankId, now: Now) {
        let Some((job, attempt)) = self.registry.get(last).map(|rank| (rank.job.clone(), rank.info.attempt)) else {
            return;
        };
        if Jobs::is_alive(&self.registry, &job, attempt) || !self.registry.is_outlived(&job, attempt) {
            return;
        }
        let ranks = self.registry.of_job(&job);
        let Some(failed) = ranks.into_iter().find(|rank| !rank.ended_in_order()) else { return };
        let cause = Cause::Death { pid: cause_pid(failed) };
        self.raise(RaisedCause { since_ns: now.mono_ns, ..raised_by(failed, cause) }, now);
    }

    /// Handles the end of unregistered ranks.
    pub(super) fn note_ended_unregistered(&mut self, now: Now) {
        self.launched.note_ended(self.happened_ns(now));
    }

    pub(super) fn raise(&mut self, raise: RaisedCause, now: Now) {
        if let Some(action) = self.engine.raise(raise, now) {
            self.execute(action, now);
        }
    }

    /// An incident of an earlier collector lasts. The end of that collector may have cut off what
    /// its verdict started.
    pub(super) fn resume(&mut self, id: &str, now: Now) {
        if self.reports.get(id).is_some_and(|report| report.is_unfinished) && self.engine.restart_dump(id) {
            info!("incident {id}: its folder is unfinished; its ranks are captured again");
            return self.capture_alone(id);
        }
        let judged = self.reports.get(id).and_then(|report| report.own.clone());
        if let Some(judged) = judged.filter(|_| self.settings.cluster.is_none()) {
            self.apply_verdict(id, &judged, now);
        }
    }
}
