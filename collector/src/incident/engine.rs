//! Incidents as a state machine: what opens one, what joins it, what closes it. Pure: time and everything seen are passed in, what
//! is to be done is passed out.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use xpu_timer_proto::v1::{Operation, Trigger, TriggerKind};

use crate::{incident::throttle::Throttle, job::key::JobKey, os::clock::Now};

/// Something that is wrong as long as it stands in an incident.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Cause {
    /// An operation is pending for too long.
    Operation {
        /// Process that signalled.
        pid: i32,
        /// Ticket of the operation.
        ticket: u64,
    },
    /// No rank launches anything.
    Idle,
    /// A watcher stands still.
    Heartbeat {
        /// Its process.
        pid: i32,
    },
    /// A process ended without a goodbye.
    Death {
        /// The process.
        pid: i32,
    },
    /// Somebody asked for a dump. Nothing is wrong by that alone.
    Manual,
    /// The job hangs on another node, the cluster collector says.
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

    /// Something that is wrong on this node.
    fn is_own(&self) -> bool {
        !matches!(self, Cause::Manual | Cause::Cluster)
    }

    /// The process that it comes from.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        match self {
            Cause::Operation { pid, .. } | Cause::Heartbeat { pid } | Cause::Death { pid } => Some(*pid),
            Cause::Idle | Cause::Manual | Cause::Cluster => None,
        }
    }
}

/// A cause that came up, and where.
#[derive(Debug, Clone, PartialEq)]
pub struct Raise {
    /// The job.
    pub job: JobKey,
    /// Its attempt.
    pub attempt: u32,
    /// The rank that it came from; -1 for none.
    pub rank: i32,
    /// What is wrong.
    pub cause: Cause,
    /// The operation of [`Cause::Operation`].
    pub operation: Option<Operation>,
    /// Since when nothing moved, CLOCK_MONOTONIC: the operation was entered, the last launch, the last heartbeat, the death.
    pub since_ns: u64,
    /// How long ago the timeout ran out.
    pub late_ns: u64,
}

/// Where an incident is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Its dump is in work.
    Open,
    /// Its folder is there; the hang lasts.
    Dumped,
    /// What was wrong is over.
    Resolved,
    /// The job ended, or it was asked for by hand and is finished.
    Ended,
    /// Found on disk after a restart; whether the hang lasts is not known yet.
    Adopted,
}

impl State {
    fn is_open(self) -> bool {
        matches!(self, State::Open | State::Dumped)
    }
}

/// One incident.
#[derive(Debug, Clone)]
pub struct Incident {
    /// Name: UTC time and a number.
    pub id: String,
    /// The job.
    pub job: JobKey,
    /// Its attempt.
    pub attempt: u32,
    /// What opened it.
    pub trigger: Trigger,
    /// When it was opened.
    pub opened: Now,
    /// How long before that the timeout had run out.
    pub late_ns: u64,
    /// Where it is in its life.
    pub state: State,
    /// What is wrong now.
    pub causes: BTreeSet<Cause>,
    /// Everything that was ever wrong in it.
    pub seen: BTreeSet<Cause>,
    /// When its folder was finished.
    pub dumped: Option<Now>,
    /// When it was closed.
    pub closed: Option<Now>,
    /// What was wrong here is so no more because ranks went away.
    pub went_away: bool,
    /// Of a world that is over on this node: another one has begun here.
    pub past: bool,
    // Since when nothing is wrong any more.
    quiet_since_ns: Option<u64>,
    // How long an adopted incident waits for a signal.
    adopted_until_ns: u64,
}

impl Incident {
    /// One that is open and about nothing yet.
    fn new(id: &str, job: &JobKey, attempt: u32, trigger: Trigger, now: Now) -> Self {
        Incident {
            id: id.into(),
            job: job.clone(),
            attempt,
            trigger,
            opened: now,
            late_ns: 0,
            state: State::Open,
            causes: BTreeSet::new(),
            seen: BTreeSet::new(),
            dumped: None,
            closed: None,
            quiet_since_ns: None,
            went_away: false,
            past: false,
            adopted_until_ns: 0,
        }
    }

    /// Whether it is (or was) more than a dump by hand.
    #[must_use]
    pub fn is_hang(&self) -> bool {
        self.seen.iter().any(|cause| *cause != Cause::Manual)
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

/// What is to be done.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Dump the job of this incident.
    Dump(String),
    /// Write down that it is over.
    Close(String, State),
}

/// What the engine must know of jobs.
pub trait Jobs {
    /// Whether any rank of this attempt (and no later attempt) runs.
    fn is_alive(&self, job: &JobKey, attempt: u32) -> bool;

    /// How long its other ranks may need to follow one that ended: [`DEATH_GRACE_NS`], or longer when the job is ending.
    fn grace_ns(&self, job: &JobKey, attempt: u32) -> u64;
}

/// All incidents of a node.
#[derive(Debug, Default)]
pub struct Engine {
    incidents: BTreeMap<String, Incident>,
    // Deaths whose grace has not run out, with the end of it.
    deaths: Vec<(u64, Raise)>,
    throttle: Throttle<JobKey>,
    // What is wrong in jobs that have had too many incidents of late; it opens one when it lasts.
    deferred: Vec<Raise>,
}

/// After the death of one rank the others may be about to end as well: a job that ends altogether is no incident.
pub const DEATH_GRACE_NS: u64 = 2_000_000_000;
/// A hang is over when nothing has been wrong for this long: what resolves on one rank is noticed later on another one.
pub const QUIET_NS: u64 = 1_000_000_000;
/// Closed hangs, and closed dumps by hand, that are kept for `/status`; the folders stay.
const MAX_CLOSED: usize = 500;

impl Engine {
    /// All incidents, oldest first.
    pub fn incidents(&self) -> impl DoubleEndedIterator<Item = &Incident> {
        self.incidents.values()
    }

    /// One incident.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<&Incident> {
        self.incidents.get(id)
    }

    /// Whether a job hangs as far as is known.
    #[cfg(test)]
    fn hangs(&self, job: &JobKey) -> bool {
        let of_job = |incident: &Incident| incident.job == *job && incident.state.is_open() && incident.is_hang();
        self.incidents.values().any(of_job) || self.deferred.iter().any(|raise| raise.job == *job)
    }

    /// Whether something is wrong with a job's ranks on this node.
    #[must_use]
    pub fn hangs_here(&self, job: &JobKey) -> bool {
        let is_its = |incident: &&Incident| incident.job == *job && incident.state.is_open() && !incident.past;
        self.incidents.values().filter(is_its).flat_map(|incident| &incident.causes).any(Cause::is_own)
    }

    /// Whether a dump is in work.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        !self.deaths.is_empty() || self.incidents.values().any(|incident| incident.state == State::Open)
    }

    /// Something is wrong: joins the job's open incident, or opens one.
    pub fn raise(&mut self, raise: Raise, now: Now) -> Option<Action> {
        let of_job =
            |incident: &&mut Incident| incident.job == raise.job && incident.attempt == raise.attempt && !incident.past;
        // A hang that was dumped takes its later signals even while a dump by hand is in work.
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
            let dumped_ns = incident.dumped.map_or(incident.opened.mono_ns, |dumped| dumped.mono_ns);
            incident.state == State::Adopted && (incident.seen.contains(&raise.cause) || raise.since_ns < dumped_ns)
        });
        if let Some(incident) = adopted
            && raise.cause != Cause::Manual
        {
            incident.state = State::Dumped;
            incident.add(raise.cause);
            return None;
        }
        if matches!(raise.cause, Cause::Death { .. }) && raise.since_ns + DEATH_GRACE_NS > now.mono_ns {
            self.deaths.push((raise.since_ns + DEATH_GRACE_NS, raise));
            return None;
        }
        if raise.cause != Cause::Manual && !self.throttle.allows(&raise.job, now.mono_ns) {
            let known = |held: &Raise| held.job == raise.job && held.cause == raise.cause;
            if !self.deferred.iter().any(known) {
                self.deferred.push(raise);
            }
            return None;
        }
        Some(self.open(raise, now))
    }

    /// The cluster collector asks for a dump. What is wrong with the job on this node is wrong in this incident as well.
    pub fn request(&mut self, id: &str, job: &JobKey, attempt: u32, trigger: Trigger, now: Now) {
        let by_hand = trigger.kind() == TriggerKind::Manual;
        let mut causes = BTreeSet::from([if by_hand { Cause::Manual } else { Cause::Cluster }]);
        // Once more about a world that is over here.
        let past = self.incidents.get(id).is_some_and(|before| before.past);
        if !past {
            let open = self.incidents.values().filter(|incident| incident.job == *job && incident.state.is_open());
            causes.extend(open.flat_map(|incident| &incident.causes).filter(|cause| cause.is_own()).cloned());
            self.deferred.retain(|held| held.job != *job);
        }
        let incident =
            Incident { causes: causes.clone(), seen: causes, past, ..Incident::new(id, job, attempt, trigger, now) };
        self.incidents.insert(id.into(), incident);
    }

    /// An incident that nobody has dumped yet becomes the one that the cluster collector has opened for its job.
    pub fn rename(&mut self, old: &str, new: &str) {
        if let Some(mut incident) = self.incidents.remove(old) {
            incident.id = new.into();
            incident.add(Cause::Cluster);
            self.incidents.insert(new.into(), incident);
        }
    }

    /// The cluster collector takes an incident for one of its own, which was dumped already.
    pub fn take_part(&mut self, id: &str) {
        if let Some(incident) = self.incidents.get_mut(id).filter(|one| one.state.is_open() && one.is_hang()) {
            incident.add(Cause::Cluster);
        }
    }

    /// Takes back an incident that nobody has dumped.
    pub fn withdraw(&mut self, id: &str) {
        self.incidents.remove(id);
    }

    fn open(&mut self, raise: Raise, now: Now) -> Action {
        // The part after the second keeps the names in the order of time.
        let nanos = now.unix_ns % 1_000_000_000;
        let mut id = format!("{}-{nanos:08x}", crate::os::clock::compact(now.unix_ns));
        while self.incidents.contains_key(&id) {
            id.push('0');
        }
        let trigger = Trigger {
            kind: raise.cause.kind().into(),
            rank: raise.rank,
            operation: raise.operation,
            unix_ns: now.unix_ns,
        };
        let incident = Incident {
            late_ns: raise.late_ns,
            causes: BTreeSet::from([raise.cause.clone()]),
            seen: BTreeSet::from([raise.cause]),
            ..Incident::new(&id, &raise.job, raise.attempt, trigger, now)
        };
        self.incidents.insert(id.clone(), incident);
        Action::Dump(id)
    }

    /// The incident whose dump a request by hand has joined or opened.
    #[must_use]
    pub fn in_work(&self, job: &JobKey) -> Option<&Incident> {
        self.incidents.values().rev().find(|incident| incident.job == *job && incident.state == State::Open)
    }

    /// Something is no longer wrong.
    pub fn lift(&mut self, job: &JobKey, cause: &Cause, now: Now) {
        // What a process has signalled is its own, whatever job it is counted to.
        let is_its = |of: &JobKey| of == job || cause.pid().is_some();
        self.deferred.retain(|held| !is_its(&held.job) || held.cause != *cause);
        self.deaths.retain(|(_, death)| !is_its(&death.job) || death.cause != *cause);
        for incident in self.incidents.values_mut().filter(|incident| is_its(&incident.job)) {
            incident.remove(|other| other != cause, now.mono_ns);
        }
    }

    /// The jobs of processes became known or changed: what is wrong with a process is wrong with its job. Returns what was wrong in an
    /// incident of another job and is to be raised anew.
    pub fn follow(&mut self, job_of: impl Fn(i32) -> Option<JobKey>, now: Now) -> Vec<Cause> {
        let deaths = self.deaths.iter_mut().map(|(_, death)| death);
        for raise in self.deferred.iter_mut().chain(deaths) {
            if let Some(job) = raise.cause.pid().and_then(&job_of) {
                raise.job = job;
            }
        }
        let mut strays = Vec::new();
        for incident in self.incidents.values_mut().filter(|incident| incident.closed.is_none() && !incident.past) {
            let adopted = incident.state == State::Adopted;
            let causes = if adopted { &incident.seen } else { &incident.causes };
            let of_processes = causes.iter().filter_map(|cause| Some((cause.clone(), job_of(cause.pid()?)?)));
            let of_processes: Vec<(Cause, JobKey)> = of_processes.collect();
            let stays = of_processes.iter().any(|(_, job)| *job == incident.job);
            if let Some((_, job)) = of_processes.first().filter(|_| !stays) {
                incident.job = job.clone();
            }
            for (cause, job) in of_processes {
                if adopted || job == incident.job {
                    continue;
                }
                incident.remove(|other| *other != cause, now.mono_ns);
                strays.push(cause);
            }
        }
        strays
    }

    /// A process left or died: what it had signalled can no longer resolve.
    pub fn gone(&mut self, job: &JobKey, pid: i32, now: Now) {
        self.deferred.retain(|held| held.job != *job || held.cause.pid() != Some(pid));
        for incident in self.incidents.values_mut().filter(|incident| incident.job == *job) {
            let keep = |cause: &Cause| cause.pid() != Some(pid) || matches!(cause, Cause::Death { .. });
            if incident.remove(keep, now.mono_ns) && !incident.causes.iter().any(Cause::is_own) {
                incident.went_away = true;
            }
        }
    }

    /// A world begins on this node: what was wrong with the one before is over, and what will be wrong with this one is another incident.
    pub fn begins(&mut self, job: &JobKey) {
        for incident in self.incidents.values_mut().filter(|one| one.job == *job && one.state.is_open()) {
            incident.past = true;
            incident.causes.retain(|cause| *cause == Cause::Manual);
            // A job that recovered and was then started again has recovered all the same.
            incident.went_away |= incident.quiet_since_ns.replace(0).is_none();
        }
    }

    /// A process took the place of one that ended: a launcher starts the job again. Its other ranks get their grace anew, because they
    /// come one after the other.
    pub fn replaced(&mut self, job: &JobKey, pid: i32, now: Now) {
        let is_its = |raise: &Raise| raise.job == *job && raise.cause == Cause::Death { pid };
        self.deferred.retain(|held| !is_its(held));
        let before = self.deaths.len();
        self.deaths.retain(|(_, death)| !is_its(death));
        if self.deaths.len() < before {
            for (due, _) in self.deaths.iter_mut().filter(|(_, death)| death.job == *job) {
                *due = now.mono_ns + DEATH_GRACE_NS;
            }
        }
    }

    /// An incident whose folder is finished is looked at once more. False when it is not in that state.
    pub fn again(&mut self, id: &str) -> bool {
        let dumped = self.incidents.get_mut(id).filter(|incident| incident.state == State::Dumped);
        dumped.is_some_and(|incident| {
            incident.state = State::Open;
            true
        })
    }

    /// The folder of an incident is finished, or could not be made.
    pub fn dumped(&mut self, id: &str, now: Now) -> Option<Action> {
        let incident = self.incidents.get_mut(id)?;
        incident.dumped = Some(now);
        incident.state = State::Dumped;
        incident.causes.remove(&Cause::Manual);
        if incident.is_hang() {
            return None;
        }
        Some(close(incident, State::Ended, now))
    }

    /// Closes what is over, and opens what waited for its grace.
    pub fn tick(&mut self, jobs: &impl Jobs, now: Now) -> Vec<Action> {
        let mut actions = Vec::new();
        let (due, waiting) = std::mem::take(&mut self.deaths).into_iter().partition(|(due, _)| *due <= now.mono_ns);
        self.deaths = waiting;
        let due: Vec<(u64, Raise)> = due;
        for (due_ns, death) in due {
            if !jobs.is_alive(&death.job, death.attempt) {
                continue;
            }
            let ends_ns = death.since_ns + jobs.grace_ns(&death.job, death.attempt);
            if ends_ns > now.mono_ns {
                self.deaths.push((due_ns, death));
            } else {
                actions.extend(self.raise(death, now));
            }
        }
        let (free, held) = std::mem::take(&mut self.deferred).into_iter().partition(|held| {
            jobs.is_alive(&held.job, held.attempt) && self.throttle.would_allow(&held.job, now.mono_ns)
        });
        self.deferred = held;
        self.deferred.retain(|held| jobs.is_alive(&held.job, held.attempt));
        let free: Vec<Raise> = free;
        for raise in free {
            actions.extend(self.raise(raise, now));
        }
        for incident in self.incidents.values_mut() {
            let over = match incident.state {
                State::Dumped => {
                    // A job that recovered and then ended has recovered all the same.
                    let alive = jobs.is_alive(&incident.job, incident.attempt);
                    let quiet = incident.quiet_since_ns.filter(|since| !alive || since + QUIET_NS <= now.mono_ns);
                    match quiet {
                        Some(_) if !incident.went_away => Some(State::Resolved),
                        Some(_) => Some(State::Ended),
                        None => (!alive).then_some(State::Ended),
                    }
                }
                State::Adopted if incident.adopted_until_ns <= now.mono_ns => {
                    let alive = jobs.is_alive(&incident.job, incident.attempt);
                    Some(if alive { State::Resolved } else { State::Ended })
                }
                _ => None,
            };
            if let Some(state) = over {
                actions.push(close(incident, state, now));
            }
        }
        // Apart, so that dumps by hand never push out a hang.
        for hangs in [true, false] {
            let closed = self.incidents.values().filter(|one| one.closed.is_some() && one.is_hang() == hangs);
            let closed: Vec<String> = closed.map(|incident| incident.id.clone()).collect();
            for id in closed.iter().take(closed.len().saturating_sub(MAX_CLOSED)) {
                self.incidents.remove(id);
            }
        }
        actions
    }

    /// An incident that an earlier collector left open on disk. Its signals come again if its hang lasts.
    pub fn adopt(&mut self, record: Record, wait_ns: u64, now: Now) {
        let job = JobKey { name: record.job, instance: record.instance };
        let opened = Now { mono_ns: record.opened_mono_ns, unix_ns: record.opened_unix_ns };
        let incident = Incident {
            state: State::Adopted,
            seen: record.seen,
            dumped: Some(Now { mono_ns: record.dumped_mono_ns, unix_ns: record.opened_unix_ns }),
            adopted_until_ns: now.mono_ns + wait_ns,
            ..Incident::new(&record.id, &job, record.attempt, Trigger::default(), opened)
        };
        self.incidents.entry(record.id).or_insert(incident);
    }
}

fn close(incident: &mut Incident, state: State, now: Now) -> Action {
    incident.state = state;
    incident.closed = Some(now);
    Action::Close(incident.id.clone(), state)
}

/// What a collector writes beside the verdict for the one that is started after it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Name of the incident.
    pub id: String,
    /// Boot in which the monotonic times and pids mean something.
    pub boot: String,
    /// [`JobKey::name`].
    pub job: String,
    /// [`JobKey::instance`].
    pub instance: String,
    /// Attempt.
    pub attempt: u32,
    /// When it was opened.
    pub opened_unix_ns: u64,
    /// The same, CLOCK_MONOTONIC.
    pub opened_mono_ns: u64,
    /// When the first sample of its newest dump began.
    pub dumped_mono_ns: u64,
    /// What was wrong.
    pub seen: BTreeSet<Cause>,
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
