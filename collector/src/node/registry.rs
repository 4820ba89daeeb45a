//! The registered ranks, by job, attempt and rank, and by process (pid and start time). No sockets
//! and no clock.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use xpu_timer_analysis::Exit;
use xpu_timer_proto::{
    printable::shortened,
    procfs,
    v1::{Hello, RankInfo},
};

use crate::{
    config::Settings,
    job::{
        ConnectionId, JobKey, RankId,
        partition::{self, Assignment, CommunicatorRank, Member, ProcessId},
    },
    metrics::sampler::RankView,
    node::{
        failures::SharedFault,
        launched::{FORGET_AFTER_NS, Unregistered},
    },
    os::{
        clock::nanoseconds,
        process::{self, Handle},
        ring_file::RingFile,
    },
};

/// Whether the process of an entry is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    /// Connected.
    Present,
    /// Alive, but its connection ended: it executed another program, or will connect again.
    Detached,
    /// Ended without a goodbye.
    Dead,
    /// Sent its goodbye, or belongs to an earlier attempt.
    Left,
}

impl Presence {
    /// The name in `/status`.
    #[must_use]
    pub(super) fn name(self) -> &'static str {
        match self {
            Presence::Present => "present",
            Presence::Detached => "detached",
            Presence::Dead => "dead",
            Presence::Left => "left",
        }
    }

    /// Whether the process runs.
    #[must_use]
    pub(super) fn is_alive(self) -> bool {
        matches!(self, Presence::Present | Presence::Detached)
    }
}

/// The settings that a rank reported for its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct JobSettings {
    /// How long an operation may stay incomplete.
    pub hang_timeout: Duration,
    /// How long the job may launch nothing; zero is off.
    pub idle_timeout: Duration,
    /// Time between the two samples.
    pub sample_interval: Duration,
    /// The folder that contains the incident folders.
    pub timeline_path: PathBuf,
    /// Whether to end the ranks after the dump.
    pub hang_kill: bool,
    /// Whether an idle job is an incident, even if nothing shows that it hangs.
    pub reports_idle: bool,
}

impl JobSettings {
    fn new(hello: &Hello, settings: &Settings) -> Self {
        let or = |ms: u64, default| if ms == 0 { default } else { Duration::from_millis(ms) };
        JobSettings {
            hang_timeout: or(hello.hang_timeout_ms, settings.hang_timeout),
            idle_timeout: Duration::from_millis(hello.idle_timeout_ms),
            sample_interval: or(hello.sample_interval_ms, settings.sample_interval),
            timeline_path: match hello.timeline_path.as_str() {
                "" => settings.timeline_path.clone(),
                path => path.into(),
            },
            hang_kill: hello.hang_kill,
            reports_idle: hello.reports_idle,
        }
    }
}

/// One registered process.
#[derive(Debug)]
pub(super) struct Rank {
    /// Id of this entry.
    pub id: RankId,
    /// Its job.
    pub job: JobKey,
    /// Its identity: as reported, unless a communicator has better information.
    pub info: RankInfo,
    /// The identity that it reported.
    claimed: RankInfo,
    /// Its communicators, largest first; those with an id that no other job has come first.
    pub communicators: Vec<CommunicatorRank>,
    /// The process; `None` when it is not visible in this PID namespace.
    pub process: Option<Arc<Handle>>,
    /// Its flight record; `None` when it sent none.
    pub ring: Option<Arc<RingFile>>,
    /// The settings that it reported for its job.
    pub settings: JobSettings,
    /// Whether its process is there.
    pub presence: Presence,
    /// A helper process of a rank that inherited the rank's variables: watched, but not a rank
    /// itself.
    pub auxiliary: bool,
    /// How it ended, when known.
    pub exit: Option<String>,
    /// The fatal signal that it has received.
    pub fault: SharedFault,
    /// CLOCK_MONOTONIC at which it registered.
    pub registered_ns: u64,
    // CLOCK_MONOTONIC at which its process certainly lived. A hello may be read after the end.
    alive_ns: u64,
    /// CLOCK_MONOTONIC at which it ended or left.
    pub ended_ns: u64,
    /// Whether its process still exists a while after its goodbye: something in its exit does not
    /// end.
    pub lingers: bool,
    /// Whether its process has ended.
    pub gone: bool,
    // Whether `newly_failed` has returned it.
    failure_noted: bool,
    // Belongs to a world that another one has replaced.
    past: bool,
    said_goodbye: bool,
    connection: Option<ConnectionId>,
}

impl Rank {
    /// Pid in the collector's namespace; 0 when not visible.
    #[must_use]
    pub(super) fn pid(&self) -> i32 {
        self.process.as_ref().map_or(0, |process| process.pid)
    }

    /// The view of this rank for the sampler.
    #[must_use]
    pub(super) fn view(&self) -> RankView<'_> {
        RankView {
            id: self.id,
            job: &self.job,
            // One that has said goodbye may still complete operations.
            has_ended: !self.presence.is_alive() && (self.gone || self.process.is_none()),
            pid: self.pid(),
            info: &self.info,
            ring: self.ring.as_deref(),
        }
    }

    /// The identity from which its job is determined.
    #[must_use]
    pub(super) fn member(&self, now_ns: u64) -> Member {
        let process = self.process.as_ref();
        // The registry may not have noticed its end yet.
        let ended_ns = match self.presence.is_alive() {
            true if process.is_some_and(|process| process.is_dead()) => now_ns,
            true => u64::MAX,
            false => self.ended_ns,
        };
        Member {
            process: process.map(|process| (process.pid, process.start)),
            ancestors: process.map(|process| process.ancestors.clone()).unwrap_or_default(),
            rank: self.claimed.rank,
            world_size: self.claimed.world_size,
            attempt: self.claimed.attempt,
            instance: process.map(|process| process.instance.clone()).unwrap_or_default(),
            own_instance: self.claimed.instance.clone(),
            started_ns: self.started_ns(now_ns),
            alive_ns: self.alive_ns,
            registered_ns: self.registered_ns,
            ended_ns,
            communicators: self.communicators.clone(),
        }
    }

    /// Whether it belongs to a world that another one has replaced.
    #[must_use]
    pub(super) fn is_past(&self) -> bool {
        self.past
    }

    /// Whether its process runs, or does not finish its exit.
    #[must_use]
    pub(super) fn has_process(&self) -> bool {
        self.presence.is_alive() || self.lingers
    }

    /// Whether the launched command above this process runs: an agent, a front end.
    #[must_use]
    pub(super) fn has_launcher(&self) -> bool {
        self.process.as_ref().and_then(|process| process.launched).is_some_and(process::is_alive)
    }

    /// Whether its end may go unnoticed: it failed after it had run for longer than the hang
    /// timeout, and the launched command runs.
    fn was_service(&self) -> bool {
        let ran_ns = self.ended_ns.saturating_sub(self.registered_ns);
        ran_ns > self.hang_timeout_ns() && !self.ended_in_order() && self.has_launcher()
    }

    fn hang_timeout_ns(&self) -> u64 {
        nanoseconds(self.settings.hang_timeout)
    }

    fn parent(&self) -> Option<ProcessId> {
        self.process.as_ref()?.ancestors.first().copied()
    }

    /// Whether it ended with success, or on request: by a signal that requests the end, or with the
    /// exit code for SIGTERM.
    #[must_use]
    pub(super) fn ended_in_order(&self) -> bool {
        let exit = Exit::of(self.exit.as_deref().unwrap_or_default());
        match self.presence {
            Presence::Left => exit == Exit::Unknown || exit.succeeded() || exit.was_requested(),
            Presence::Dead => exit.was_requested(),
            Presence::Present | Presence::Detached => false,
        }
    }

    /// CLOCK_MONOTONIC at which its process was started, or at which it registered when the process
    /// is not visible.
    #[must_use]
    pub(super) fn started_ns(&self, now_ns: u64) -> u64 {
        self.process.as_ref().map_or(self.registered_ns, |process| process::started_ns(process.start, now_ns))
    }

    /// Description for messages. A process that does not know its rank is named by its pid and
    /// command.
    #[must_use]
    pub(super) fn title(&self) -> String {
        if self.info.rank >= 0 {
            return format!("rank {} (pid {}) of job {}", self.info.rank, self.pid(), self.job);
        }
        match shortened(&self.info.command, TITLE_BYTES) {
            command if command.is_empty() => format!("process {} of job {}", self.pid(), self.job),
            command => format!("process {} ({command}) of job {}", self.pid(), self.job),
        }
    }

    /// The name of its process from `/proc/PID/comm`, which a program may set to its role; `None`
    /// if the process has ended.
    #[must_use]
    pub(super) fn process_title(&self) -> Option<String> {
        let process = self.process.as_ref().filter(|process| !process.is_dead())?;
        Some(procfs::name(process.pid)).filter(|name| !name.is_empty())
    }
}

/// The effects of a registration besides the new entry.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Registered {
    /// The new or updated entry.
    pub id: RankId,
    /// It superseded an earlier attempt.
    pub new_attempt: bool,
    /// It is the first rank of a new world; the world of the superseded ranks is over.
    pub new_world: bool,
    /// Entries that it superseded.
    pub superseded: Vec<RankId>,
    /// A sentence for the log when something is odd.
    pub remark: Option<String>,
}

/// All entries.
#[derive(Debug, Default)]
pub(super) struct Registry {
    ranks: BTreeMap<RankId, Rank>,
    next: RankId,
    /// See [`Launched::starting`](super::launched::Launched::starting).
    starting: BTreeMap<ProcessId, u64>,
}

/// Maximum length of a command in a message.
const TITLE_BYTES: usize = 120;
/// Exit handlers and destructors finish within this time.
const LINGER_NS: u64 = 5 * 1_000_000_000;
/// A process that ended without ever having known its rank gives no evidence about others, and
/// there may be hundreds a second.
const FORGET_RANKLESS_NS: u64 = 3 * 1_000_000_000;
/// One user trains with at most this many processes on a node. Beyond this number the oldest ended
/// entries are removed at once.
const MAX_ENDED: usize = 1024;
/// An incident may still need the flight record of an ended job for this long.
const KEEP_RING_NS: u64 = 30 * 1_000_000_000;
/// A process that is not visible in this PID namespace connects again within this time, or has
/// ended.
const INVISIBLE_NS: u64 = 60 * 1_000_000_000;
/// Number of communicators of a rank that identify its job.
const MAX_COMMUNICATORS: usize = 64;

impl Registry {
    /// All entries, oldest first.
    pub(super) fn ranks(&self) -> impl Iterator<Item = &Rank> {
        self.ranks.values()
    }

    /// The entry with this id.
    #[must_use]
    pub(super) fn get(&self, id: RankId) -> Option<&Rank> {
        self.ranks.get(&id)
    }

    /// The entry of a connection.
    #[must_use]
    pub(super) fn by_connection(&self, connection: ConnectionId) -> Option<&Rank> {
        self.ranks.values().find(|rank| rank.connection == Some(connection))
    }

    /// Whether a process has sent a hello.
    #[must_use]
    pub(super) fn is_registered(&self, pid: i32, start: u64) -> bool {
        let is_process = |process: &Arc<Handle>| (process.pid, process.start) == (pid, start);
        self.ranks.values().any(|rank| rank.process.as_ref().is_some_and(is_process))
    }

    /// All jobs that have an entry.
    #[must_use]
    pub(super) fn jobs(&self) -> BTreeSet<JobKey> {
        self.ranks.values().map(|rank| rank.job.clone()).collect()
    }

    /// All jobs with a running process.
    #[must_use]
    pub(super) fn living_jobs(&self) -> BTreeSet<JobKey> {
        self.ranks.values().filter(|rank| rank.has_process()).map(|rank| rank.job.clone()).collect()
    }

    /// The ranks of a job in its newest attempt and its living ranks of earlier attempts, in
    /// ascending order, at most one entry for each rank, without helpers.
    #[must_use]
    pub(super) fn of_job(&self, job: &JobKey) -> Vec<&Rank> {
        let entries = || self.ranks.values().filter(|rank| rank.job == *job && !rank.auxiliary && !rank.past);
        let attempt = entries().map(|rank| rank.info.attempt).max().unwrap_or(0);
        let mut ranks: BTreeMap<i32, &Rank> = BTreeMap::new();
        // Agents count their attempts separately.
        for rank in entries().filter(|rank| rank.info.attempt == attempt || rank.presence.is_alive()) {
            // Prefers the living entry, else the newest, which comes last. A younger process does
            // not replace a living one of its attempt.
            let keep = ranks.get(&rank.info.rank).is_some_and(|old| {
                old.presence.is_alive() && (!rank.presence.is_alive() || old.info.attempt >= rank.info.attempt)
            });
            if !keep {
                ranks.insert(rank.info.rank, rank);
            }
        }
        ranks.into_values().collect()
    }

    /// Whether any process of a job runs.
    #[must_use]
    pub(super) fn is_alive(&self, job: &JobKey) -> bool {
        self.ranks.values().any(|rank| rank.job == *job && rank.has_process())
    }

    /// Whether a job is about to end, or to continue with fewer ranks: some ranks ended in order or
    /// on request, and others are still there.
    #[must_use]
    pub(super) fn is_ending(&self, job: &JobKey, attempt: u32) -> bool {
        self.of_job(job).into_iter().any(|rank| rank.info.attempt == attempt && rank.ended_in_order())
    }

    /// Registers a process that sent a hello with its ring.
    pub(super) fn hello(
        &mut self,
        connection: ConnectionId,
        process: Option<Arc<Handle>>,
        (hello, ring): (&Hello, Option<Arc<RingFile>>),
        settings: &Settings,
        unregistered: &mut [Unregistered],
        now_ns: u64,
    ) -> Registered {
        let info = hello.rank.clone().unwrap_or_else(|| RankInfo { rank: -1, ..Default::default() });
        let same = |rank: &Rank| match (&rank.process, &process) {
            (Some(old), Some(new)) => (old.pid, old.start) == (new.pid, new.start),
            _ => false,
        };
        let known = self.ranks.values().find(|rank| same(rank)).map(|rank| rank.id);
        let communicators =
            known.and_then(|id| self.get(id)).map(|rank| rank.communicators.clone()).unwrap_or_default();
        let id = known.unwrap_or_else(|| {
            self.next += 1;
            self.next
        });
        let start = process.as_ref().filter(|process| process.is_dead()).map(|process| process.start);
        let alive_ns = start.map_or(now_ns, |start| process::started_ns(start, now_ns));
        let rank = Rank {
            id,
            job: initial_key(&info, process.as_ref()),
            claimed: info.clone(),
            info,
            communicators,
            process,
            ring,
            settings: JobSettings::new(hello, settings),
            presence: Presence::Present,
            auxiliary: false,
            exit: None,
            fault: SharedFault::default(),
            registered_ns: now_ns,
            alive_ns,
            ended_ns: 0,
            lingers: false,
            gone: false,
            failure_noted: false,
            past: false,
            said_goodbye: false,
            connection: Some(connection),
        };
        self.ranks.insert(id, rank);
        self.rejoin(unregistered, now_ns);
        self.settle(id, now_ns)
    }

    /// Updates the identity or world of a rank. `None` when the connection has not sent a hello.
    pub(super) fn changed(
        &mut self,
        connection: ConnectionId,
        info: RankInfo,
        unregistered: &mut [Unregistered],
        now_ns: u64,
    ) -> Option<Registered> {
        let rank = self.ranks.values_mut().find(|rank| rank.connection == Some(connection))?;
        rank.job = initial_key(&info, rank.process.as_ref());
        (rank.claimed, rank.info) = (info.clone(), info);
        let id = rank.id;
        self.rejoin(unregistered, now_ns);
        Some(self.settle(id, now_ns))
    }

    /// Stores the communicators of a rank that may identify its job.
    pub(super) fn set_communicators(&mut self, id: RankId, mut communicators: Vec<CommunicatorRank>) {
        communicators.sort_unstable_by_key(|place| (!place.unique, Reverse(place.size), place.id));
        communicators.truncate(MAX_COMMUNICATORS);
        if let Some(rank) = self.ranks.get_mut(&id) {
            rank.communicators = communicators;
        }
    }

    /// Splits the ranks of each name, including the unregistered ones, into jobs by all that is
    /// known now. Returns whether any rank changed its job.
    pub(super) fn rejoin(&mut self, unregistered: &mut [Unregistered], now_ns: u64) -> bool {
        let is_known = |rank: &&Rank| rank.claimed.rank >= 0 && !rank.past;
        let mut names: BTreeSet<String> = unregistered.iter().map(|rank| rank.info.job.clone()).collect();
        names.extend(self.ranks.values().filter(is_known).map(|rank| rank.claimed.job.clone()));
        let mut moved = false;
        for name in names {
            let ids: Vec<RankId> = self
                .ranks
                .values()
                .filter(is_known)
                .filter(|rank| rank.claimed.job == name)
                .map(|rank| rank.id)
                .collect();
            let of_name = |rank: &&mut Unregistered| rank.info.job == name;
            let mut unregistered: Vec<&mut Unregistered> = unregistered.iter_mut().filter(of_name).collect();
            let ranks = ids.iter().map(|id| &self.ranks[id]);
            let members: Vec<Member> = ranks
                .map(|rank| rank.member(now_ns))
                .chain(unregistered.iter().map(|rank| rank.member(now_ns)))
                .collect();
            let old: Vec<JobKey> = ids
                .iter()
                .map(|id| self.ranks[id].job.clone())
                .chain(unregistered.iter().map(|rank| rank.job.clone()))
                .collect();
            let assignments = partition::partition(&members);
            let job_keys = job_keys(&name, &members, &assignments, &old);
            moved |= job_keys != old;
            let (of_ranks, of_unregistered) = job_keys.split_at(ids.len());
            for ((id, assignment), job) in ids.iter().zip(&assignments).zip(of_ranks) {
                let Some(rank) = self.ranks.get_mut(id) else { continue };
                rank.job.clone_from(job);
                rank.auxiliary = assignment.helper;
                let (number, world_size) =
                    assignment.corrected_rank.unwrap_or((rank.claimed.rank, rank.claimed.world_size));
                (rank.info.rank, rank.info.world_size) = (number, world_size);
            }
            unregistered.iter_mut().zip(of_unregistered).for_each(|(rank, job)| rank.job.clone_from(job));
        }
        moved
    }

    /// All known processes of a job name, and their jobs: the input of the split into jobs.
    #[must_use]
    pub(super) fn members(&self, name: &str, unregistered: &[&Unregistered], now_ns: u64) -> Vec<(Member, JobKey)> {
        let ranks = self.ranks.values().filter(|rank| rank.claimed.rank >= 0 && !rank.past && rank.claimed.job == name);
        let ranks = ranks.map(|rank| (rank.member(now_ns), rank.job.clone()));
        let unregistered = unregistered.iter().filter(|rank| rank.info.job == name);
        ranks.chain(unregistered.map(|rank| (rank.member(now_ns), rank.job.clone()))).collect()
    }

    /// The process of this connection ends by itself.
    pub(super) fn goodbye(&mut self, connection: ConnectionId, now_ns: u64) -> Option<RankId> {
        let id = self.by_connection(connection)?.id;
        self.left(id, now_ns);
        Some(id)
    }

    /// This rank ends by itself. It may have said so in its ring only.
    pub(super) fn left(&mut self, id: RankId, now_ns: u64) {
        let Some(rank) = self.ranks.get_mut(&id) else { return };
        rank.presence = Presence::Left;
        rank.ended_ns = now_ns;
        rank.said_goodbye = true;
    }

    /// Updates which processes still exist after their goodbye.
    pub(super) fn note_lingering(&mut self, now_ns: u64) {
        for rank in self.ranks.values_mut() {
            let stays = rank.said_goodbye && !rank.gone && rank.process.is_some();
            rank.lingers = stays && now_ns >= rank.ended_ns + LINGER_NS;
        }
    }

    /// Notes the launched commands that are starting ranks; see
    /// [`Launched::starting`](super::launched::Launched::starting).
    pub(super) fn note_starting(&mut self, starting: BTreeMap<ProcessId, u64>) {
        self.starting = starting;
    }

    /// Whether the launched command above the ended ranks of an attempt has started others since.
    #[must_use]
    pub(super) fn is_restarted(&self, job: &JobKey, attempt: u32) -> bool {
        let ended = self.ranks().filter(|rank| rank.job == *job && rank.info.attempt == attempt && rank.ended_ns > 0);
        let launcher = |rank: &Rank| rank.process.as_ref()?.launched;
        let started_ns = |rank: &Rank| launcher(rank).and_then(|launcher| self.starting.get(&launcher));
        let mut ended = ended.peekable();
        ended.peek().is_some()
            && ended.all(|rank| started_ns(rank).is_some_and(|started_ns| *started_ns > rank.ended_ns))
    }

    /// Handles the end of a connection; the process may live on.
    pub(super) fn disconnected(&mut self, connection: ConnectionId) -> Option<RankId> {
        let rank = self.ranks.values_mut().find(|rank| rank.connection == Some(connection))?;
        rank.connection = None;
        if rank.presence == Presence::Present {
            rank.presence = Presence::Detached;
        }
        Some(rank.id)
    }

    /// Handles the end of a process. Returns true when it had sent no goodbye.
    pub(super) fn ended(&mut self, id: RankId, exit: Option<String>, now_ns: u64) -> bool {
        let Some(rank) = self.ranks.get_mut(&id) else { return false };
        rank.exit = exit.or(rank.exit.take());
        (rank.gone, rank.lingers) = (true, false);
        let died = rank.presence.is_alive();
        if died {
            rank.presence = Presence::Dead;
            rank.ended_ns = now_ns;
        }
        died
    }

    /// A rank whose process has failed. `None` from the second call on: the end of its process and
    /// the end of its connection both lead here.
    pub(super) fn newly_failed(&mut self, id: RankId) -> Option<&Rank> {
        let rank = self.ranks.get_mut(&id).filter(|rank| !rank.auxiliary && !rank.failure_noted)?;
        let exit = rank.exit.as_deref().unwrap_or_default();
        rank.failure_noted = !exit.is_empty() && !Exit::of(exit).succeeded();
        rank.failure_noted.then_some(rank)
    }

    /// Removes jobs that ended long ago, and drops rings that nobody will read again: a ring
    /// occupies memory for as long as its descriptor is open.
    pub(super) fn forget(&mut self, now_ns: u64) {
        for rank in self.ranks.values_mut() {
            let is_invisible = rank.presence == Presence::Detached && rank.process.is_none();
            if is_invisible && rank.ended_ns == 0 {
                rank.ended_ns = now_ns;
            } else if is_invisible && now_ns >= rank.ended_ns + INVISIBLE_NS {
                rank.presence = Presence::Left;
            }
        }
        let alive = self.living_jobs();
        self.ranks.retain(|_, rank| {
            let keep_ns = match rank.info.rank {
                0.. => FORGET_AFTER_NS,
                _ if rank.was_service() => rank.hang_timeout_ns() + FORGET_RANKLESS_NS,
                _ => FORGET_RANKLESS_NS,
            };
            alive.contains(&rank.job) || now_ns < rank.ended_ns + keep_ns
        });
        for rank in self.ranks.values_mut().filter(|rank| !rank.has_process()) {
            // In a world that continues, the record of an ended rank shows how far it came.
            let counts = alive.contains(&rank.job) && !rank.past && !rank.auxiliary;
            // The death of all ranks becomes an incident if their launcher outlives it.
            let is_outlived = !rank.ended_in_order() && rank.has_launcher();
            let keep_ns = if is_outlived { rank.hang_timeout_ns() + KEEP_RING_NS } else { KEEP_RING_NS };
            if !counts && (rank.past || now_ns >= rank.ended_ns + keep_ns) {
                rank.ring = None;
            }
        }
        let ended: Vec<RankId> = self.ranks.values().filter(|rank| !rank.has_process()).map(|rank| rank.id).collect();
        for id in ended.iter().take(ended.len().saturating_sub(MAX_ENDED)) {
            self.ranks.remove(id);
        }
    }

    /// The process without a rank and without communicators that failed first of those with the
    /// parent and the command of a new one: its parent has started this one in its place.
    fn replaced_alone(&self, new: &Rank) -> Option<RankId> {
        let is_equal = |old: &Rank| (old.parent(), &old.info.command) == (new.parent(), &new.info.command);
        let is_alone = |rank: &Rank| rank.info.rank < 0 && rank.communicators.is_empty();
        let is_replaced = |old: &&Rank| {
            old.id != new.id
                && old.presence == Presence::Dead
                && old.ended_ns <= new.registered_ns
                && is_alone(old)
                && is_equal(old)
        };
        let knows_both = is_alone(new) && new.parent().is_some() && !new.info.command.is_empty();
        let failed = self.ranks.values().filter(|_| knows_both).filter(is_replaced);
        failed.min_by_key(|old| old.ended_ns).map(|old| old.id)
    }

    /// Compares a new or changed entry with the others of its job, and marks those that it
    /// supersedes.
    fn settle(&mut self, id: RankId, now_ns: u64) -> Registered {
        let mut result = Registered { id, ..Default::default() };
        let Some(new) = self.ranks.get(&id) else { return result };
        let (job, rank, attempt) = (new.job.clone(), new.info.rank, new.info.attempt);
        let size = new.info.world_size;
        let has_other_world_size = |old: &Rank| size > 0 && old.info.world_size > 0 && old.info.world_size != size;

        // A launcher starts the ranks of a world after all its own ranks of the previous world have
        // ended. It may count that as the same attempt.
        let new_member = new.member(now_ns);
        // An agent that starts its ranks again may give them another port, and so another job.
        let is_of_agent = |old: &Rank| {
            let is_earlier = old.job.name == job.name && old.info.attempt < attempt;
            is_earlier && old.parent().is_some() && old.parent() == new.parent()
        };
        let is_other = |old: &&Rank| old.id != id && !old.past && (old.job == job || is_of_agent(old));
        let others = || self.ranks.values().filter(is_other);
        let begins_world =
            !others().any(|old| old.presence.is_alive() && !old.auxiliary && old.info.attempt == attempt);
        for old in others() {
            let ended_before =
                !old.presence.is_alive() && (old.member(now_ns).ended_before(&new_member) || has_other_world_size(old));
            // An agent has given up the previous attempt. That shows nothing about the living ranks
            // of another agent.
            let given_up = old.info.attempt < attempt && (!old.presence.is_alive() || old.parent() == new.parent());
            if given_up || (begins_world && ended_before) {
                result.superseded.push(old.id);
                result.new_world |= !old.auxiliary;
                result.new_attempt |= !old.auxiliary && (old.info.attempt < attempt || old.info.rank != rank);
            } else if old.info.attempt == attempt
                && old.info.rank == rank
                && !old.auxiliary
                && !old.presence.is_alive()
                && !new.auxiliary
            {
                result.superseded.push(old.id);
            }
        }
        result.superseded.extend(self.replaced_alone(new));
        if new.job.is_of_process() && new.info.rank >= 0 {
            result.remark = Some(format!(
                "{} belongs to another job than the earlier processes with this job name; set XPU_TIMER_JOB to name each job",
                new.title()
            ));
        }
        for id in &result.superseded {
            if let Some(rank) = self.ranks.get_mut(id) {
                (rank.presence, rank.past) = (Presence::Left, true);
                rank.ended_ns = now_ns;
                (rank.said_goodbye, rank.lingers) = (false, false);
            }
        }
        result
    }
}

/// A process that does not know its rank yet is a job of its own.
fn initial_key(info: &RankInfo, process: Option<&Arc<Handle>>) -> JobKey {
    if info.rank < 0 {
        return JobKey::of_process(&info.job, "", process.map_or(0, |process| process.pid));
    }
    let instance = process.map(|process| process.instance.clone()).unwrap_or_default();
    JobKey { name: info.job.clone(), instance }
}

/// The keys of the jobs of one name, one for each member. A job keeps the key of its oldest member.
/// When jobs would share a key, the others are named after the process of each that is known
/// longest.
fn job_keys(name: &str, members: &[Member], assignments: &[Assignment], old: &[JobKey]) -> Vec<JobKey> {
    let mut of_group: BTreeMap<usize, JobKey> = BTreeMap::new();
    let groups: BTreeSet<usize> = assignments.iter().map(|assignment| assignment.group).collect();
    for group in groups {
        let inside: Vec<usize> = (0..members.len()).filter(|index| assignments[*index].group == group).collect();
        let named = inside.iter().map(|index| members[*index].instance.as_str()).find(|instance| !instance.is_empty());
        let instance = named.unwrap_or_default();
        let is_free = |key: &JobKey| of_group.values().all(|taken| taken != key);
        let kept = inside.iter().map(|index| &old[*index]).find(|key| key.has_rendezvous(instance) && is_free(key));
        let plain = JobKey { name: name.into(), instance: instance.into() };
        let key = kept.cloned().unwrap_or(plain);
        let known_by = || {
            let pids = inside.iter().filter_map(|index| members[*index].process);
            pids.map(|(pid, _)| JobKey::of_process(name, instance, pid)).find(is_free)
        };
        let key = if is_free(&key) { key } else { known_by().unwrap_or(key) };
        of_group.insert(group, key);
    }
    assignments.iter().map(|assignment| of_group[&assignment.group].clone()).collect()
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
