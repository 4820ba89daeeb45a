//! A state machine of incidents: what opens one, joins it and closes it. Pure: the caller passes in
//! the time and all observations, and executes the returned actions.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use xpu_timer_proto::{
    Message, lenient,
    v1::{Operation, Trigger, TriggerKind},
};

use crate::{
    incident::{Head, State, Throttle},
    job::JobKey,
    os::clock::Now,
};

/// A problem that keeps an incident open while it lasts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Cause {
    /// An operation has been pending for too long.
    Operation {
        /// The process that signalled.
        pid: i32,
        /// Ticket of the operation.
        ticket: u64,
    },
    /// No rank launches anything.
    Idle,
    /// A watcher has stopped.
    Heartbeat {
        /// The process of the watcher.
        pid: i32,
    },
    /// A process ended without `Goodbye`.
    Death {
        /// The process.
        pid: i32,
    },
    /// A user requested a dump. This alone is not a problem.
    Manual,
    /// The cluster collector reports that the job hangs on another node.
    Cluster,
}

impl Cause {
    fn kind(&self) -> TriggerKind {
        match self {
            Cause::Operation { .. } => TriggerKind::Operation,
            Cause::Idle => TriggerKind::Idle,
            Cause::Heartbeat { .. } => TriggerKind::Heartbeat,
            Cause::Death { .. } => TriggerKind::Death,
            Cause::Manual => TriggerKind::Manual,
            Cause::Cluster => TriggerKind::Unspecified,
        }
    }

    /// Whether it is a problem on this node.
    fn is_local(&self) -> bool {
        !matches!(self, Cause::Manual | Cause::Cluster)
    }

    /// The process that caused it.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        match self {
            Cause::Operation { pid, .. } | Cause::Heartbeat { pid } | Cause::Death { pid } => Some(*pid),
            Cause::Idle | Cause::Manual | Cause::Cluster => None,
        }
    }
}

/// A new cause and its origin.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RaisedCause {
    /// The job.
    pub job: JobKey,
    /// Its attempt.
    pub attempt: u32,
    /// The rank that it comes from; -1 for none.
    pub rank: i32,
    /// The cause.
    pub cause: Cause,
    /// The operation of [`Cause::Operation`].
    pub operation: Option<Operation>,
    /// Since when there is no progress, CLOCK_MONOTONIC: the begin of the operation, the last
    /// launch, the last heartbeat, or the death.
    pub since_ns: u64,
    /// How long ago the timeout expired.
    pub late_ns: u64,
}

/// One incident.
#[derive(Debug, Clone)]
pub(crate) struct Incident {
    /// The facts that were known when it was opened.
    pub head: Head,
    /// The current state.
    pub state: State,
    /// The current causes.
    pub causes: BTreeSet<Cause>,
    /// All causes that it ever had.
    pub seen: BTreeSet<Cause>,
    /// When its folder was finished.
    pub dumped: Option<Now>,
    /// When it was closed.
    pub closed: Option<Now>,
    /// Whether the causes on this node ended because ranks went away.
    pub ranks_left: bool,
    /// Whether its world is over on this node: another world has begun here.
    pub superseded: bool,
    // Since when it has no cause.
    quiet_since_ns: Option<u64>,
    // How long an adopted incident waits for a signal.
    adopted_until_ns: u64,
}

impl Incident {
    /// An open incident without causes.
    fn new(head: Head) -> Self {
        Incident {
            head,
            state: State::Open,
            causes: BTreeSet::new(),
            seen: BTreeSet::new(),
            dumped: None,
            closed: None,
            quiet_since_ns: None,
            ranks_left: false,
            superseded: false,
            adopted_until_ns: 0,
        }
    }

    /// Whether it is or was more than a dump by hand.
    #[must_use]
    pub(crate) fn is_hang(&self) -> bool {
        self.seen.iter().any(|cause| *cause != Cause::Manual)
    }

    /// Whether it is only about a job that launches nothing, on this node or, if the cluster
    /// collector examines it, on all of its nodes.
    #[must_use]
    pub(crate) fn is_idle(&self) -> bool {
        self.head.trigger.kind() == TriggerKind::Idle
            && self.seen.iter().all(|cause| matches!(cause, Cause::Idle | Cause::Cluster))
    }

    fn add(&mut self, cause: Cause) {
        self.quiet_since_ns = None;
        self.seen.insert(cause.clone());
        self.causes.insert(cause);
    }

    fn remove(&mut self, keep: impl Fn(&Cause) -> bool, now_ns: u64) -> bool {
        let before = self.causes.len();
        self.causes.retain(keep);
        let hang_left = self.causes.iter().any(|cause| *cause != Cause::Manual);
        if self.causes.len() < before && !hang_left {
            self.quiet_since_ns = Some(now_ns);
        }
        self.causes.len() < before
    }
}

/// An action for the caller.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// Dump the job of this incident.
    Dump(String),
    /// Continue this incident of an earlier collector: its hang lasts.
    Resume(String),
    /// Record that the incident is closed.
    Close(String, State),
}

/// The information about jobs that the engine needs.
pub(crate) trait Jobs {
    /// Whether any rank of this attempt is running and no later attempt has begun.
    fn is_alive(&self, job: &JobKey, attempt: u32) -> bool;

    /// Whether all ranks of this attempt have ended, at least one of them not in order, and the
    /// launched command that had started them runs.
    fn is_outlived(&self, job: &JobKey, attempt: u32) -> bool;

    /// How long the other ranks may take to follow a rank that ended: [`DEATH_GRACE_NS`], or longer
    /// if the job is ending or all its ranks have ended.
    fn grace_ns(&self, job: &JobKey, attempt: u32) -> u64;
}

/// All incidents of a node.
#[derive(Debug, Default)]
pub(crate) struct Engine {
    incidents: BTreeMap<String, Incident>,
    // Deaths within their grace period, with its end.
    deaths: Vec<(u64, RaisedCause)>,
    throttle: Throttle<JobKey>,
    // Causes in jobs that have had too many incidents recently, and causes during a search. If they
    // last, they open an incident later.
    deferred: Vec<RaisedCause>,
    searching_until_ns: u64,
}

/// After the death of one rank, the others may be about to end: the end of a whole job is not an
/// incident.
pub(crate) const DEATH_GRACE_NS: u64 = 2_000_000_000;
/// A hang is over after this time without a cause: ranks notice the end of a hang at different
/// times.
pub(crate) const QUIET_NS: u64 = 1_000_000_000;
/// A search on a disk that takes longer is not waited for.
pub(crate) const SEARCH_NS: u64 = 1_000_000_000;
/// Closed hangs, and closed dumps by hand, that are kept for `/status`. Their folders stay.
const MAX_CLOSED: usize = 500;

impl Engine {
    /// All incidents, oldest first.
    pub(crate) fn incidents(&self) -> impl DoubleEndedIterator<Item = &Incident> {
        self.incidents.values()
    }

    /// One incident.
    #[must_use]
    pub(crate) fn get(&self, id: &str) -> Option<&Incident> {
        self.incidents.get(id)
    }

    /// Whether a job hangs, as far as is known.
    #[cfg(test)]
    fn hangs(&self, job: &JobKey) -> bool {
        let of_job = |incident: &Incident| incident.head.job == *job && incident.state.is_open() && incident.is_hang();
        self.incidents.values().any(of_job) || self.deferred.iter().any(|raise| raise.job == *job)
    }

    /// Whether ranks of a job on this node have a problem.
    #[must_use]
    pub(crate) fn has_local_problem(&self, job: &JobKey) -> bool {
        let is_affected =
            |incident: &&Incident| incident.head.job == *job && incident.state.is_open() && !incident.superseded;
        self.incidents.values().filter(is_affected).flat_map(|incident| &incident.causes).any(Cause::is_local)
    }

    /// Whether a dump is in progress.
    #[must_use]
    pub(crate) fn is_busy(&self) -> bool {
        !self.deaths.is_empty() || self.incidents.values().any(|incident| incident.state == State::Open)
    }

    /// A cause has come up: it joins the open incident of the job or opens one.
    pub(crate) fn raise(&mut self, raise: RaisedCause, now: Now) -> Option<Action> {
        let of_job = |incident: &&mut Incident| {
            incident.head.job == raise.job && incident.head.attempt == raise.attempt && !incident.superseded
        };
        // A dumped hang takes its later signals even while a dump by hand is in progress.
        let mut open: Vec<&mut Incident> =
            self.incidents.values_mut().filter(of_job).filter(|incident| incident.state.is_open()).collect();
        open.sort_by_key(|incident| !incident.is_hang());
        if let Some(incident) = open.into_iter().next()
            && (raise.cause != Cause::Manual || incident.state == State::Open)
        {
            incident.add(raise.cause);
            return None;
        }
        let adopted = self.incidents.values_mut().filter(of_job).find(|incident| {
            let dumped_ns = incident.dumped.map_or(incident.head.opened.mono_ns, |dumped| dumped.mono_ns);
            incident.state == State::Adopted && (incident.seen.contains(&raise.cause) || raise.since_ns < dumped_ns)
        });
        if let Some(incident) = adopted
            && raise.cause != Cause::Manual
        {
            incident.state = State::Dumped;
            incident.add(raise.cause);
            return Some(Action::Resume(incident.head.id.clone()));
        }
        if matches!(raise.cause, Cause::Death { .. }) && raise.since_ns + DEATH_GRACE_NS > now.mono_ns {
            self.deaths.push((raise.since_ns + DEATH_GRACE_NS, raise));
            return None;
        }
        if raise.cause != Cause::Manual && (self.is_searching(now) || !self.throttle.allows(&raise.job, now.mono_ns)) {
            let known = |deferred: &RaisedCause| deferred.job == raise.job && deferred.cause == raise.cause;
            if !self.deferred.iter().any(known) {
                self.deferred.push(raise);
            }
            return None;
        }
        Some(self.open(raise, now))
    }

    /// The cluster collector requests a dump. The causes of the job on this node also become causes
    /// of this incident.
    pub(crate) fn open_for_cluster(&mut self, id: &str, job: &JobKey, attempt: u32, trigger: Trigger, now: Now) {
        let by_hand = trigger.kind() == TriggerKind::Manual;
        let mut causes = BTreeSet::from([if by_hand { Cause::Manual } else { Cause::Cluster }]);
        // The request may repeat an incident whose world is over here.
        let superseded = self.incidents.get(id).is_some_and(|before| before.superseded);
        if !superseded {
            let open = self.incidents.values().filter(|incident| incident.head.job == *job && incident.state.is_open());
            causes.extend(open.flat_map(|incident| &incident.causes).filter(|cause| cause.is_local()).cloned());
            self.deferred.retain(|deferred| deferred.job != *job);
        }
        let head = Head { id: id.into(), job: job.clone(), attempt, trigger, opened: now, late_ns: 0 };
        let incident = Incident { causes: causes.clone(), seen: causes, superseded, ..Incident::new(head) };
        self.incidents.insert(id.into(), incident);
    }

    /// Renames an incident without a dump to the one that the cluster collector has opened for its
    /// job.
    pub(crate) fn rename(&mut self, old: &str, new: &str) {
        if let Some(mut incident) = self.incidents.remove(old) {
            incident.head.id = new.into();
            incident.add(Cause::Cluster);
            self.incidents.insert(new.into(), incident);
        }
    }

    /// The cluster collector adopts an incident that is already dumped.
    pub(crate) fn join_cluster_incident(&mut self, id: &str) {
        if let Some(incident) = self.incidents.get_mut(id).filter(|one| one.state.is_open() && one.is_hang()) {
            incident.add(Cause::Cluster);
        }
    }

    /// The dump of an incident is finished and showed no problem. If the job is only idle, the
    /// incident is over, and the result is true. Otherwise its causes are examined again while they
    /// last. In both cases it does not count against the limit of the job's incidents.
    pub(crate) fn found_mild(&mut self, id: &str, now: Now) -> bool {
        let Some(incident) = self.incidents.get_mut(id) else { return false };
        incident.dumped = Some(now);
        incident.state = State::Dumped;
        let is_idle = incident.is_idle();
        let job = incident.head.job.clone();
        self.throttle.refund(&job);
        if is_idle {
            self.incidents.remove(id);
        }
        is_idle
    }

    /// Gives an incident another name for its next dump: the old one is that of a mild capture.
    pub(crate) fn rename_examined(&mut self, old: &str, now: Now) -> Option<String> {
        let mut incident = self.incidents.remove(old)?;
        let id = self.new_name(now);
        incident.head.id.clone_from(&id);
        incident.dumped = None;
        // It counts as an incident unless it is found mild again.
        self.throttle.allows(&incident.head.job, now.mono_ns);
        self.incidents.insert(id.clone(), incident);
        Some(id)
    }

    /// Removes an incident without a dump.
    pub(crate) fn discard(&mut self, id: &str) {
        self.incidents.remove(id);
    }

    fn new_name(&self, now: Now) -> String {
        // The part after the seconds makes names sort by time.
        let nanos = now.unix_ns % 1_000_000_000;
        let mut id = format!("{}-{nanos:08x}", crate::os::clock::compact(now.unix_ns));
        while self.incidents.contains_key(&id) {
            id.push('0');
        }
        id
    }

    fn open(&mut self, raise: RaisedCause, now: Now) -> Action {
        let id = self.new_name(now);
        let trigger = Trigger {
            kind: raise.cause.kind().into(),
            rank: raise.rank,
            operation: raise.operation,
            unix_ns: now.unix_ns,
        };
        let RaisedCause { job, attempt, cause, late_ns, .. } = raise;
        let head = Head { id: id.clone(), job, attempt, trigger, opened: now, late_ns };
        let causes = BTreeSet::from([cause]);
        let incident = Incident { causes: causes.clone(), seen: causes, ..Incident::new(head) };
        self.incidents.insert(id.clone(), incident);
        Action::Dump(id)
    }

    /// The incident whose dump a request by hand has joined or opened.
    #[must_use]
    pub(crate) fn dump_in_progress(&self, job: &JobKey) -> Option<&Incident> {
        self.incidents.values().rev().find(|incident| incident.head.job == *job && incident.state == State::Open)
    }

    /// A cause is over.
    pub(crate) fn clear_cause(&mut self, job: &JobKey, cause: &Cause, now: Now) {
        // A signal belongs to its process, whichever job the process is assigned to.
        let is_affected = |of: &JobKey| of == job || cause.pid().is_some();
        self.deferred.retain(|deferred| !is_affected(&deferred.job) || deferred.cause != *cause);
        self.deaths.retain(|(_, death)| !is_affected(&death.job) || death.cause != *cause);
        for incident in self.incidents.values_mut().filter(|incident| is_affected(&incident.head.job)) {
            incident.remove(|other| other != cause, now.mono_ns);
        }
    }

    /// The assignment of processes to jobs changed: causes follow their processes. Returns the
    /// causes that were in an incident of another job and must be raised again.
    pub(crate) fn reassign_causes(&mut self, job_of: impl Fn(i32) -> Option<JobKey>, now: Now) -> Vec<Cause> {
        let deaths = self.deaths.iter_mut().map(|(_, death)| death);
        for raise in self.deferred.iter_mut().chain(deaths) {
            if let Some(job) = raise.cause.pid().and_then(&job_of) {
                raise.job = job;
            }
        }
        let mut orphaned = Vec::new();
        for incident in self.incidents.values_mut().filter(|incident| incident.closed.is_none() && !incident.superseded)
        {
            let adopted = incident.state == State::Adopted;
            let causes = if adopted { &incident.seen } else { &incident.causes };
            let of_processes = causes.iter().filter_map(|cause| Some((cause.clone(), job_of(cause.pid()?)?)));
            let of_processes: Vec<(Cause, JobKey)> = of_processes.collect();
            let stays = of_processes.iter().any(|(_, job)| *job == incident.head.job);
            if let Some((_, job)) = of_processes.first().filter(|_| !stays) {
                incident.head.job = job.clone();
            }
            for (cause, job) in of_processes {
                if adopted || job == incident.head.job {
                    continue;
                }
                incident.remove(|other| *other != cause, now.mono_ns);
                orphaned.push(cause);
            }
        }
        orphaned
    }

    /// A process left or died: its causes can no longer resolve.
    pub(crate) fn process_gone(&mut self, job: &JobKey, pid: i32, now: Now) {
        self.deferred.retain(|deferred| deferred.job != *job || deferred.cause.pid() != Some(pid));
        for incident in self.incidents.values_mut().filter(|incident| incident.head.job == *job) {
            let keep = |cause: &Cause| cause.pid() != Some(pid) || matches!(cause, Cause::Death { .. });
            if incident.remove(keep, now.mono_ns) && !incident.causes.iter().any(Cause::is_local) {
                incident.ranks_left = true;
            }
        }
    }

    /// A world begins on this node. The causes of the previous world are over, and causes of this
    /// world belong to another incident.
    pub(crate) fn world_began(&mut self, job: &JobKey) {
        for incident in self.incidents.values_mut().filter(|one| one.head.job == *job && one.state.is_open()) {
            incident.superseded = true;
            incident.causes.retain(|cause| *cause == Cause::Manual);
            // A job that recovered and was then restarted still counts as recovered.
            incident.ranks_left |= incident.quiet_since_ns.replace(0).is_none();
        }
    }

    /// A new process replaced one that ended: a launcher restarts the job. Its other ranks get a
    /// new grace period, because they are replaced one by one.
    pub(crate) fn process_replaced(&mut self, job: &JobKey, pid: i32, now: Now) {
        let is_affected = |raise: &RaisedCause| raise.job == *job && raise.cause == Cause::Death { pid };
        self.deferred.retain(|deferred| !is_affected(deferred));
        let before = self.deaths.len();
        self.deaths.retain(|(_, death)| !is_affected(death));
        if self.deaths.len() < before {
            for (due, _) in self.deaths.iter_mut().filter(|(_, death)| death.job == *job) {
                *due = now.mono_ns + DEATH_GRACE_NS;
            }
        }
    }

    /// Starts another dump of an incident whose folder is finished. Returns false if it is in
    /// another state.
    pub(crate) fn restart_dump(&mut self, id: &str) -> bool {
        let dumped = self.incidents.get_mut(id).filter(|incident| incident.state == State::Dumped);
        dumped.is_some_and(|incident| {
            incident.state = State::Open;
            true
        })
    }

    /// The folder of an incident is finished, or could not be made.
    pub(crate) fn dump_finished(&mut self, id: &str, now: Now) -> Option<Action> {
        let incident = self.incidents.get_mut(id)?;
        incident.dumped = Some(now);
        incident.state = State::Dumped;
        incident.causes.remove(&Cause::Manual);
        if incident.is_hang() {
            return None;
        }
        Some(close(incident, State::Ended, now))
    }

    /// Closes incidents that are over, and opens those whose grace period has ended.
    pub(crate) fn tick(&mut self, jobs: &impl Jobs, now: Now) -> Vec<Action> {
        let mut actions = Vec::new();
        let (due, waiting) = std::mem::take(&mut self.deaths).into_iter().partition(|(due, _)| *due <= now.mono_ns);
        self.deaths = waiting;
        let due: Vec<(u64, RaisedCause)> = due;
        for (due_ns, death) in due {
            if !jobs.is_alive(&death.job, death.attempt) && !jobs.is_outlived(&death.job, death.attempt) {
                continue;
            }
            let ends_ns = death.since_ns + jobs.grace_ns(&death.job, death.attempt);
            if ends_ns > now.mono_ns {
                self.deaths.push((due_ns, death));
            } else {
                actions.extend(self.raise(death, now));
            }
        }
        let (free, deferred) = std::mem::take(&mut self.deferred).into_iter().partition(|deferred| {
            jobs.is_alive(&deferred.job, deferred.attempt)
                && !self.is_searching(now)
                && self.throttle.would_allow(&deferred.job, now.mono_ns)
        });
        self.deferred = deferred;
        self.deferred.retain(|deferred| jobs.is_alive(&deferred.job, deferred.attempt));
        let free: Vec<RaisedCause> = free;
        for raise in free {
            actions.extend(self.raise(raise, now));
        }
        for incident in self.incidents.values_mut() {
            let over = match incident.state {
                State::Dumped => {
                    // A job that recovered and then ended still counts as recovered.
                    let alive = jobs.is_alive(&incident.head.job, incident.head.attempt);
                    let quiet = incident.quiet_since_ns.filter(|since| !alive || since + QUIET_NS <= now.mono_ns);
                    match quiet {
                        Some(_) if !incident.ranks_left => Some(State::Resolved),
                        Some(_) => Some(State::Ended),
                        None => (!alive).then_some(State::Ended),
                    }
                }
                State::Adopted if incident.adopted_until_ns <= now.mono_ns => {
                    let alive = jobs.is_alive(&incident.head.job, incident.head.attempt);
                    Some(if alive { State::Resolved } else { State::Ended })
                }
                _ => None,
            };
            if let Some(state) = over {
                actions.push(close(incident, state, now));
            }
        }
        // Counted separately, so that dumps by hand never push out a hang.
        for hangs in [true, false] {
            let closed = self.incidents.values().filter(|one| one.closed.is_some() && one.is_hang() == hangs);
            let closed: Vec<String> = closed.map(|incident| incident.head.id.clone()).collect();
            for id in closed.iter().take(closed.len().saturating_sub(MAX_CLOSED)) {
                self.incidents.remove(id);
            }
        }
        actions
    }

    /// A search on disk for incidents of an earlier collector begins. Until it ends, or takes too
    /// long, no incident is opened, because the cause may belong to one of them.
    pub(crate) fn begin_search(&mut self, now: Now) {
        self.searching_until_ns = now.mono_ns + SEARCH_NS;
    }

    /// All searches have ended.
    pub(crate) fn end_search(&mut self) {
        self.searching_until_ns = 0;
    }

    fn is_searching(&self, now: Now) -> bool {
        now.mono_ns < self.searching_until_ns
    }

    /// Adopts an incident that an earlier collector left open on disk. If the hang lasts, its
    /// signals come again.
    pub(crate) fn adopt(&mut self, record: Record, wait_ns: u64, now: Now) {
        let head = record.head(record.opened_mono_ns);
        let incident = Incident {
            state: State::Adopted,
            seen: record.seen,
            dumped: Some(Now { mono_ns: record.dumped_mono_ns, unix_ns: record.opened_unix_ns }),
            adopted_until_ns: now.mono_ns + wait_ns,
            ..Incident::new(head)
        };
        self.incidents.entry(record.id).or_insert(incident);
    }
}

fn close(incident: &mut Incident, state: State, now: Now) -> Action {
    incident.state = state;
    incident.closed = Some(now);
    Action::Close(incident.head.id.clone(), state)
}

/// The state of an incident that the next collector process needs, on a node and at the cluster
/// collector; written beside the verdict. Only a node uses the fields from `boot` to `writer`. The
/// defaults are those of files that earlier releases wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Name of the incident.
    pub id: String,
    /// [`JobKey::name`].
    pub job: String,
    /// [`JobKey::instance`].
    pub instance: String,
    /// Attempt.
    pub attempt: u32,
    /// When it was opened.
    pub opened_unix_ns: u64,
    /// How long before that the timeout had expired.
    #[serde(default)]
    pub late_ns: u64,
    /// The trigger as an encoded message.
    #[serde(default)]
    pub trigger: Vec<u8>,
    /// The boot in which the monotonic times and pids are valid.
    #[serde(default)]
    pub boot: String,
    /// As `opened_unix_ns`, on CLOCK_MONOTONIC.
    #[serde(default)]
    pub opened_mono_ns: u64,
    /// When the first sample of its newest dump began.
    #[serde(default)]
    pub dumped_mono_ns: u64,
    /// All causes so far.
    #[serde(default)]
    pub seen: BTreeSet<Cause>,
    /// The collector that is writing the folder, as
    /// [`own_stamp`](crate::incident::folder::own_stamp) names it. Empty once the folder is
    /// finished.
    #[serde(default)]
    pub writer: String,
}

impl Record {
    /// A record without the fields that only a node uses.
    #[must_use]
    pub fn new(head: &Head) -> Self {
        Record {
            id: head.id.clone(),
            job: head.job.name.clone(),
            instance: head.job.instance.clone(),
            attempt: head.attempt,
            opened_unix_ns: head.opened.unix_ns,
            late_ns: head.late_ns,
            trigger: head.trigger.encode_to_vec(),
            ..Record::default()
        }
    }

    /// The recorded incident. `opened_mono_ns` is when it was opened, on CLOCK_MONOTONIC.
    #[must_use]
    pub fn head(&self, opened_mono_ns: u64) -> Head {
        Head {
            id: self.id.clone(),
            job: JobKey { name: self.job.clone(), instance: self.instance.clone() },
            attempt: self.attempt,
            trigger: lenient::decode(&self.trigger).unwrap_or_default(),
            opened: Now { mono_ns: opened_mono_ns, unix_ns: self.opened_unix_ns },
            late_ns: self.late_ns,
        }
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
