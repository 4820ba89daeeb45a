//! The node's state and what happens to it. One thread owns it: no locks, and nothing here waits for anything.

mod comparing;
mod ending;
mod filters;
mod unwritten;
mod work;

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

use crate::{
    captures::Captures,
    clock::{self, Now},
    config::Settings,
    disk::Disk,
    dump::Hurry,
    inbox::{Command, DumpReply, Inbox, Question},
    incident::{Cause, DEATH_GRACE_NS, Engine, Incident, Jobs, Raise, State},
    jobs::Place,
    launched::{Launched, Silent},
    member::Member,
    metrics::Sampler,
    monitor::{Monitor, Observation, SHORTEST_SILENCE},
    node::TICK,
    process::{self, Handle},
    records,
    registry::{ConnectionId, JobKey, Rank, RankId, Registered, Registry},
    ring_file::RingFile,
    slow::SlowRanks,
    throttle::{BY_HAND, Throttle},
    webhook::Webhook,
};
use ending::Ending;
pub use ending::Judged;
use unwritten::Unwritten;

/// What came of an incident, for `/status`.
#[derive(Debug, Clone, Default)]
pub struct Told {
    /// Its folder.
    pub path: Option<PathBuf>,
    /// The verdict in one sentence; empty until there is one.
    pub sentence: String,
    /// Cause of the verdict.
    pub cause: String,
    /// Ranks to blame.
    pub culprits: Vec<u32>,
    /// Ranks that hang by the newest verdict.
    pub hanging: RankSet,
    /// When the first sample of the newest dump began, CLOCK_MONOTONIC.
    pub sampled_ns: u64,
    /// What this node's own verdict says, for when that of the cluster does not come.
    pub own: Option<Judged>,
    /// What went wrong.
    pub errors: Vec<String>,
    /// The verdict, as long as no folder has it.
    pub verdict: Option<Box<Verdict>>,
}

impl Told {
    /// Of a verdict that was made here, from a dump that began at that CLOCK_MONOTONIC.
    fn of(verdict: Verdict, sampled_ns: u64) -> Self {
        let judged = Judged::of(&verdict);
        Told {
            path: None,
            sentence: verdict.sentence,
            cause: verdict.cause.to_string(),
            culprits: verdict.culprits,
            hanging: judged.hanging.clone(),
            sampled_ns,
            own: Some(judged),
            errors: verdict.timing.errors,
            verdict: None,
        }
    }
}

/// The state of a node collector.
pub struct Core {
    /// Settings.
    pub settings: Settings,
    /// Ranks.
    pub registry: Registry,
    /// Incidents.
    pub engine: Engine,
    /// What came of them.
    pub told: BTreeMap<String, Told>,
    /// What the collector itself cannot do, for `/status`.
    pub problems: Vec<String>,
    /// Incidents opened so far.
    pub opened: u64,
    /// Pid of the supervisor, when there is one.
    pub supervisor: Option<u32>,
    /// When it was started.
    pub started: Now,
    /// Name of this node.
    pub node: String,
    /// Commands under a launcher, and their ranks before these register.
    pub launched: Launched,
    /// This node as a member of a cluster.
    pub member: Member,
    pub(crate) disk: Disk,
    pub(crate) inbox: Inbox,
    monitor: Monitor,
    dumps: Throttle<JobKey>,
    /// What the ranks' rings say, for `/metrics`.
    pub sampler: Sampler,
    /// The capture worker.
    pub captures: Arc<Captures>,
    hurry: Arc<Hurry>,
    boot: String,
    pub(crate) waiting: BTreeMap<String, Vec<DumpReply>>,
    searched: BTreeSet<PathBuf>,
    unwritten: Unwritten,
    webhook: Option<Webhook>,
    /// Ranks that slow their job down.
    pub slow: SlowRanks,
    compared_ns: u64,
    ending: Ending,
    filtered: filters::Filtered,
    // When the loop turned last.
    turned_ns: u64,
}

/// After a restart hooks connect again within a second or two, and a hang that lasts is signalled again at once.
const RECONNECT: Duration = Duration::from_secs(10);

/// A job whose ranks are ending one after the other has this many timeouts: one may save a checkpoint while the others are gone.
const ENDING_TIMEOUTS: u32 = 4;

impl Jobs for Registry {
    fn is_alive(&self, job: &JobKey, attempt: u32) -> bool {
        self.ranks().any(|rank| rank.job == *job && rank.info.attempt == attempt && rank.is_there())
    }

    fn grace_ns(&self, job: &JobKey, attempt: u32) -> u64 {
        let timeouts = self.of_job(job).into_iter().map(|rank| rank.settings.hang_timeout);
        match self.is_ending(job, attempt) {
            true => nanoseconds(timeouts.max().unwrap_or_default() * ENDING_TIMEOUTS).max(DEATH_GRACE_NS),
            false => DEATH_GRACE_NS,
        }
    }
}

impl Core {
    /// An empty node.
    #[must_use]
    pub fn new(settings: Settings, captures: Captures, inbox: Inbox) -> Self {
        let node = match settings.node.as_str() {
            "" | "NOT_SET" => process::host_name(),
            name => name.to_string(),
        };
        let webhook = settings.webhook.as_deref().map(Webhook::new);
        let sampler = Sampler::new(settings.metrics.clone());
        Core {
            settings,
            registry: Registry::default(),
            engine: Engine::default(),
            told: BTreeMap::new(),
            problems: Vec::new(),
            opened: 0,
            supervisor: None,
            started: Now::get(),
            node,
            launched: Launched::default(),
            member: Member::default(),
            disk: Disk::new({
                // The loop may only wait for something to be written.
                let inbox = inbox.clone();
                move || inbox.wake()
            }),
            inbox,
            monitor: Monitor::default(),
            dumps: Throttle::new(BY_HAND),
            sampler,
            captures: Arc::new(captures),
            hurry: Arc::default(),
            boot: process::boot_id(),
            waiting: BTreeMap::new(),
            searched: BTreeSet::new(),
            unwritten: Unwritten::default(),
            webhook,
            slow: SlowRanks::default(),
            compared_ns: 0,
            ending: Ending::default(),
            filtered: filters::Filtered::new(),
            turned_ns: 0,
        }
    }

    /// The loop has turned.
    pub fn turned(&mut self, now: Now) {
        self.turned_ns = now.mono_ns;
    }

    /// When that happened which is seen now. The loop turns once a second: if it has not for longer, this process or the whole machine
    /// stood still, and what happened meanwhile did so at any time of it.
    fn happened_ns(&self, now: Now) -> u64 {
        match self.turned_ns {
            0 => now.mono_ns,
            turned => now.mono_ns.min(turned + nanoseconds(TICK)),
        }
    }

    /// A hook said something.
    ///
    /// # Errors
    /// When it must not be listened to any longer; the text says why.
    pub fn message(
        &mut self,
        connection: ConnectionId,
        pid: i32,
        process: Option<&Arc<Handle>>,
        message: HookMessage,
        descriptor: Option<std::os::fd::OwnedFd>,
        now: Now,
    ) -> Result<(), String> {
        let known = self.registry.by_connection(connection).map(|rank| rank.id);
        match (message.message, known) {
            (Some(Message::Hello(hello)), None) => self.hello(connection, pid, process, &hello, descriptor, now),
            (Some(Message::Hello(_)), Some(_)) => Err("said hello twice".into()),
            (None, _) => Err("sent a message of an unknown kind".into()),
            (Some(_), None) => Err("spoke before its hello".into()),
            (Some(Message::Hang(hang)), Some(id)) => self.hang(id, hang, now),
            (Some(Message::Resolved(resolved)), Some(id)) => {
                if let Some(rank) = self.registry.get(id) {
                    let cause = Cause::Operation { pid: cause_pid(rank), ticket: resolved.ticket };
                    info!("{}: the operation with ticket {} completed after all", rank.title(), resolved.ticket);
                    self.engine.lift(&rank.job, &cause, now);
                }
                Ok(())
            }
            (Some(Message::Rank(info)), Some(_)) => {
                let silent = self.launched.silent();
                if let Some(registered) = self.registry.changed(connection, info, silent, now.mono_ns) {
                    self.registered(&registered, "changed", now);
                }
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

    fn hello(
        &mut self,
        connection: ConnectionId,
        pid: i32,
        process: Option<&Arc<Handle>>,
        hello: &Hello,
        descriptor: Option<std::os::fd::OwnedFd>,
        now: Now,
    ) -> Result<(), String> {
        if hello.protocol != PROTOCOL_VERSION || hello.ring_version != ring::VERSION {
            return Err(format!(
                "speaks protocol {} with ring layout {}, this collector {PROTOCOL_VERSION} with {}; use the hook and the \
                 collector of one release",
                hello.protocol,
                hello.ring_version,
                ring::VERSION
            ));
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
        let (process, silent) = (process.cloned(), self.launched.silent());
        let registered = self.registry.hello(connection, process, (hello, ring), &self.settings, silent, now.mono_ns);
        self.registered(&registered, "registered", now);
        self.look_at_filters([registered.id], now);
        self.search(registered.id, now);
        Ok(())
    }

    fn registered(&mut self, registered: &Registered, what: &str, now: Now) {
        self.follow(now);
        if let Some(rank) = self.registry.get(registered.id) {
            let helper = if rank.auxiliary { ", a helper of it" } else { "" };
            info!("{}{helper} {what}: attempt {}, world {}", rank.title(), rank.info.attempt, rank.info.world_size);
        }
        if registered.new_attempt {
            info!("it begins a new attempt; the ranks of the one before have left");
        }
        if let Some(remark) = &registered.remark {
            warn!("{remark}");
        }
        for old in registered.superseded.iter().filter_map(|id| self.registry.get(*id)) {
            self.engine.replaced(&old.job, cause_pid(old), now);
            if registered.new_world {
                self.engine.begins(&old.job);
            }
        }
    }

    /// Reads which communicators the ranks of a name have, or all that live, and parts them into jobs anew.
    fn rejoin(&mut self, name: Option<&str>, now: Now) {
        let is_meant = |rank: &&Rank| match name {
            Some(name) => rank.info.job == name,
            None => rank.presence.is_alive(),
        };
        let read = |rank: &Rank| Some((rank.id, rank.ring.as_ref()?.places().ok()?));
        let places: Vec<(RankId, Vec<Place>)> = self.registry.ranks().filter(is_meant).filter_map(read).collect();
        places.into_iter().for_each(|(id, places)| self.registry.set_communicators(id, places));
        if self.registry.rejoin(self.launched.silent(), now.mono_ns) {
            self.follow(now);
        }
    }

    /// Incidents belong to the jobs of the processes that they are about.
    fn follow(&mut self, now: Now) {
        let registry = &self.registry;
        let of_pid = |pid: i32| registry.ranks().filter(move |rank| cause_pid(rank) == pid).last();
        let strays = self.engine.follow(|pid| of_pid(pid).map(|rank| rank.job.clone()), now);
        let raise = |cause: Cause| Some(Raise { since_ns: now.mono_ns, ..raise(of_pid(cause.pid()?)?, cause) });
        let raises: Vec<Raise> = strays.into_iter().filter_map(raise).collect();
        raises.into_iter().for_each(|raise| self.raise(raise, now));
    }

    /// Looks for what an earlier collector left open where this rank's incidents go.
    fn search(&mut self, id: RankId, now: Now) {
        let Some(rank) = self.registry.get(id) else { return };
        let wait = rank.settings.hang_timeout + RECONNECT;
        for path in [rank.settings.timeline_path.clone(), self.settings.fallback_path.clone()] {
            if !self.searched.insert(path.clone()) {
                continue;
            }
            let wait_ns = nanoseconds(wait);
            let (root, boot, inbox) = (path.clone(), self.boot.clone(), self.inbox.clone());
            let late = move |found| inbox.post(Command::Found(found, wait_ns));
            let found = self.disk.ask(&path, move || records::open_in(&root, &boot), late);
            self.adopt(found.unwrap_or_default(), wait_ns, now);
        }
    }

    fn adopt(&mut self, found: Vec<records::Left>, wait_ns: u64, now: Now) {
        for records::Left { folder, record, verdict } in found {
            info!("incident {} was left open by an earlier collector", record.id);
            let told = || Told { path: Some(folder), ..Told::of(verdict, record.dumped_mono_ns) };
            self.told.entry(record.id.clone()).or_insert_with(told);
            self.engine.adopt(record, wait_ns, now);
        }
    }

    fn hang(&mut self, id: RankId, hang: HangSignal, now: Now) -> Result<(), String> {
        let operation = hang.operation.ok_or("signalled a hang without an operation")?;
        // Whose job it is must be known before it is said to hang.
        let Some(name) = self.registry.get(id).map(|rank| rank.info.job.clone()) else { return Ok(()) };
        self.rejoin(Some(&name), now);
        let Some(rank) = self.registry.get(id) else { return Ok(()) };
        let timeout = u64::try_from(rank.settings.hang_timeout.as_nanos()).unwrap_or(u64::MAX);
        info!(
            "{}: {:?} with ticket {} is pending for {:.1} s",
            rank.title(),
            operation.op(),
            operation.ticket,
            clock::seconds(hang.pending_ns)
        );
        let cause = Cause::Operation { pid: cause_pid(rank), ticket: operation.ticket };
        let raise = Raise {
            since_ns: operation.entered_ns,
            late_ns: hang.pending_ns.saturating_sub(timeout),
            operation: Some(operation),
            ..raise(rank, cause)
        };
        self.raise(raise, now);
        Ok(())
    }

    fn goodbye(&mut self, id: RankId, now: Now) {
        let Some(rank) = self.registry.get(id) else { return };
        info!("{} says goodbye", rank.title());
        self.engine.gone(&rank.job, cause_pid(rank), now);
    }

    /// A rank under a filter of system calls can say goodbye in its ring alone.
    fn read_goodbye(&mut self, id: RankId, now: Now) {
        let alive = self.registry.get(id).filter(|rank| rank.presence.is_alive());
        if alive.and_then(read_header).is_some_and(|(_, words)| words[header::GOODBYE] != 0) {
            self.registry.left(id, self.happened_ns(now));
            self.goodbye(id, now);
        }
    }

    /// A connection ended.
    pub fn disconnected(&mut self, connection: ConnectionId, now: Now) {
        if let Some(id) = self.registry.disconnected(connection) {
            self.ended(id, now);
        }
    }

    /// Looks whether a process has ended, and what follows.
    pub fn ended(&mut self, id: RankId, now: Now) {
        let Some(rank) = self.registry.get(id) else { return };
        let Some(process) = rank.process.clone().filter(|process| process.is_dead()) else { return };
        self.read_goodbye(id, now);
        if !self.registry.ended(id, process.exit(), self.happened_ns(now)) {
            return;
        }
        let Some(rank) = self.registry.get(id) else { return };
        let how = rank.exit.as_deref().unwrap_or("it is not known how");
        warn!("{} ended without a goodbye: {how}", rank.title());
        let raise = Raise { since_ns: now.mono_ns, ..raise(rank, Cause::Death { pid: cause_pid(rank) }) };
        self.engine.gone(&raise.job, process.pid, now);
        if !rank.auxiliary {
            self.raise(raise, now);
        }
    }

    /// Some rank that has not registered has ended.
    pub fn note_silent(&mut self, now: Now) {
        self.launched.note_ended(self.happened_ns(now));
    }

    /// The ranks of this node that have not registered; see [`Launched::ranks`].
    pub(crate) fn silent_ranks(&self, now: Now) -> Vec<&Silent> {
        let born_ns = |job: &JobKey| {
            let living = self.registry.of_job(job).into_iter().filter(|rank| rank.is_there());
            living.map(|rank| rank.started_ns(now.mono_ns)).min()
        };
        self.launched.ranks(born_ns, now.mono_ns)
    }

    fn raise(&mut self, raise: Raise, now: Now) {
        let is_adopted = |one: &&Incident| one.state == State::Adopted && one.job == raise.job;
        let adopted: Vec<String> = self.engine.incidents().filter(is_adopted).map(|one| one.id.clone()).collect();
        if let Some(action) = self.engine.raise(raise, now) {
            self.act(action, now);
        }
        for id in adopted {
            // Its hang lasts: what its verdict is a reason for may have been cut off by the end of the earlier collector.
            let lasts = self.engine.get(&id).is_some_and(|incident| incident.state == State::Dumped);
            let judged = self.told.get(&id).and_then(|told| told.own.clone());
            if let Some(judged) = judged.filter(|_| lasts && self.settings.cluster.is_none()) {
                self.judged(&id, &judged, now);
            }
        }
    }

    /// Once a second.
    pub fn tick(&mut self, now: Now) {
        self.look_at_filters(self.living().map(|rank| rank.id).collect::<Vec<_>>(), now);
        self.filtered.retain(|id, _| self.registry.get(*id).is_some());
        self.registry.note_lingering(now.mono_ns);
        self.note_silent(now);
        let registry = &self.registry;
        self.launched.look(&self.settings.socket, |pid, start| registry.is_registered(pid, start));
        self.rejoin(None, now);
        let headers: BTreeMap<RankId, [u64; header::WORDS]> = self.living().filter_map(read_header).collect();
        let mut observations: Vec<Observation> =
            self.living().filter_map(|rank| Some(observation(rank, headers.get(&rank.id)?, now))).collect();
        observations.iter_mut().filter(|rank| self.is_silent(rank.id)).for_each(|rank| rank.heartbeat_ns = now.mono_ns);
        let living = self.registry.living_jobs();
        for job in living.iter().filter(|job| self.registry.is_ending(job, self.attempt(job))) {
            observations
                .iter_mut()
                .filter(|rank| rank.job == *job)
                .for_each(|rank| rank.idle_timeout *= ENDING_TIMEOUTS);
        }
        let conditions = self.monitor.look(&observations, now.mono_ns);
        for observed in &observations {
            let Some(rank) = self.registry.get(observed.id) else { continue };
            let cause = Cause::Heartbeat { pid: cause_pid(rank) };
            if let Some(since_ns) = conditions.stuck.get(&rank.id).copied() {
                let late_ns = now.mono_ns.saturating_sub(since_ns + nanoseconds(rank.settings.hang_timeout));
                self.raise(Raise { since_ns, late_ns, ..raise(rank, cause) }, now);
            } else {
                self.engine.lift(&rank.job, &cause, now);
            }
        }
        for job in living {
            let ranks: Vec<&Observation> = observations.iter().filter(|rank| rank.job == job).collect();
            let last = ranks.iter().map(|rank| rank.last_launch_ns.max(rank.registered_ns)).max().unwrap_or(0);
            self.member.launched(&job, last);
            let idle = conditions.idle.get(&job).filter(|_| !self.member.is_declined(&job, now));
            if let Some(since_ns) = idle.copied() {
                let timeout = ranks.iter().map(|rank| rank.idle_timeout).max().unwrap_or_default();
                let late_ns = now.mono_ns.saturating_sub(since_ns + nanoseconds(timeout));
                let attempt = self.attempt(&job);
                let cause = Cause::Idle;
                self.raise(Raise { job, attempt, rank: -1, cause, operation: None, since_ns, late_ns }, now);
            } else {
                self.engine.lift(&job, &Cause::Idle, now);
                self.forgive_deaths(&job, last, now);
            }
        }
        for action in self.engine.tick(&self.registry, now) {
            self.act(action, now);
        }
        self.tick_member(now);
        let engine = &self.engine;
        self.told.retain(|id, _| engine.get(id).is_some());
        let folders = self.folders();
        self.searched.retain(|path| folders.contains(path));
        self.tick_ending(now);
        self.tick_unwritten(now);
        self.sampler.turn(living_ranks(&self.registry), now);
        self.compare(now);
        self.registry.forget(now.mono_ns);
    }

    /// A job that still launches long after one of its ranks died lives well without it.
    fn forgive_deaths(&mut self, job: &JobKey, last_launch_ns: u64, now: Now) {
        let dead = self.registry.ranks().filter(|rank| rank.job == *job && rank.ended_ns > 0);
        let over: Vec<i32> = dead
            .filter(|rank| last_launch_ns > rank.ended_ns + nanoseconds(rank.settings.hang_timeout))
            .map(cause_pid)
            .collect();
        for pid in over {
            self.engine.lift(job, &Cause::Death { pid }, now);
        }
    }

    fn living(&self) -> impl Iterator<Item = &Rank> {
        living_ranks(&self.registry)
    }

    /// The newest attempt of a job here.
    pub(crate) fn attempt(&self, job: &JobKey) -> u32 {
        self.registry.of_job(job).first().map_or(0, |rank| rank.info.attempt)
    }

    /// A message from another thread.
    pub fn command(&mut self, command: Command, now: Now) {
        match command {
            // Whoever asked may be gone by now; that is no loss.
            Command::Question(Question::Status(reply)) => drop(reply.send(crate::status::status(self, now))),
            Command::Question(Question::Metrics(reply)) => drop(reply.send(crate::metrics::text(self, now))),
            Command::Question(Question::Folders(reply)) => drop(reply.send(self.folders())),
            Command::Question(Question::WithoutFolder(reply)) => {
                drop(reply.send(crate::status::without_folder(self)));
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

    /// Whether something is in work that must not be cut off.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.engine.is_busy() || self.ending.is_busy()
    }

    /// Whether something is being written.
    #[must_use]
    pub fn is_writing(&self) -> bool {
        self.disk.is_busy() || self.engine.incidents().any(|incident| incident.state == State::Open)
    }
}

fn living_ranks(registry: &Registry) -> impl Iterator<Item = &Rank> {
    registry.ranks().filter(|rank| rank.is_there() && !rank.auxiliary)
}

/// A process outside this PID namespace has no pid here; its entry's number stands for it.
fn cause_pid(rank: &Rank) -> i32 {
    match rank.pid() {
        0 => -i32::try_from(rank.id).unwrap_or(i32::MAX),
        pid => pid,
    }
}

fn raise(rank: &Rank, cause: Cause) -> Raise {
    Raise {
        job: rank.job.clone(),
        attempt: rank.info.attempt,
        rank: rank.info.rank,
        cause,
        operation: None,
        since_ns: 0,
        late_ns: 0,
    }
}

fn read_header(rank: &Rank) -> Option<(RankId, [u64; header::WORDS])> {
    Some((rank.id, rank.ring.as_ref()?.header().ok()?))
}

fn observation(rank: &Rank, words: &[u64; header::WORDS], now: Now) -> Observation {
    let is_silent = now.mono_ns.saturating_sub(words[header::HEARTBEAT_NS]) > nanoseconds(SHORTEST_SILENCE);
    let stopped = |process: &Arc<Handle>| {
        process.stat().is_some_and(|stat| stat.is_stopped()) || is_silent && process.is_frozen()
    };
    Observation {
        job: rank.job.clone(),
        id: rank.id,
        stopped: rank.process.as_ref().is_some_and(stopped),
        heartbeat_ns: words[header::HEARTBEAT_NS],
        last_launch_ns: words[header::LAST_LAUNCH_NS],
        registered_ns: rank.registered_ns,
        hang_timeout: rank.settings.hang_timeout,
        idle_timeout: rank.settings.idle_timeout,
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
