//! The state of a node. One thread owns it, so it needs no locks, and nothing here waits.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use xpu_timer_proto::{procfs, ring::header};

use crate::{
    client::webhook::Webhook,
    config::Settings,
    http::questions::{DumpReply, TimelineReply, WantedTimeline},
    incident::{
        BY_HAND, IdleJob, State, Throttle,
        engine::{Cause, DEATH_GRACE_NS, Engine, Jobs, RaisedCause},
    },
    job::{JobKey, RankId},
    metrics::{sampler::Sampler, slow_ranks::SlowRanks},
    node::{
        captures::Captures,
        cluster_member::Member,
        dump::ShutdownFlag,
        exit_plugins::RunningPlugins,
        inbox::Inbox,
        launched::{Launched, Unregistered},
        monitor::Monitor,
        registry::{Rank, Registry},
        reports::{IncidentReport, UnwrittenVerdicts, VerdictActions},
        sharers::Sharers,
    },
    os::{
        clock::{Now, nanoseconds},
        disk::Disk,
        process,
    },
    timeline::host::HostSampler,
};

/// The event loop turns at least once in this time.
pub(crate) const TICK: Duration = Duration::from_secs(1);

/// The state of a node collector.
pub(super) struct NodeState {
    /// Settings.
    pub settings: Settings,
    /// Ranks.
    pub registry: Registry,
    /// Incidents.
    pub engine: Engine,
    /// Their results.
    pub(super) reports: BTreeMap<String, IncidentReport>,
    /// Problems of the collector itself, for `/status`.
    pub problems: Vec<String>,
    /// Jobs that were found idle.
    pub idle: BTreeMap<JobKey, IdleJob>,
    /// Mild captures whose timelines are still being written, with their folders.
    pub(super) incomplete_captures: BTreeMap<String, PathBuf>,
    /// Jobs with mild captures, and the folder of their incidents.
    pub(super) mild: BTreeMap<JobKey, PathBuf>,
    /// Incidents opened so far.
    pub opened: u64,
    /// Pid of the supervisor, when there is one.
    pub supervisor: Option<u32>,
    /// When the collector was started.
    pub started: Now,
    /// Name of this node.
    pub node: String,
    /// Commands of launchers, and their ranks before these register.
    pub launched: Launched,
    /// Processes below the launched commands that have memory in common with others.
    pub(super) sharers: Sharers,
    /// This node as a member of a cluster.
    pub member: Member,
    pub(crate) disk: Disk,
    pub(crate) inbox: Inbox,
    pub(super) monitor: Monitor,
    pub(super) dumps: Throttle<JobKey>,
    /// The contents of the ranks' rings, for `/metrics`.
    pub sampler: Sampler,
    /// The stacks of the ranks over time.
    pub(super) host: HostSampler,
    // Timelines that are sent when their detail has been recorded.
    pub(super) detailed: Vec<DetailedTimeline>,
    // Until when every kernel is recorded, CLOCK_MONOTONIC.
    pub(super) every_kernel_until_ns: u64,
    pub(super) trace_detail: TraceDetail,
    /// The capture worker.
    pub captures: Arc<Captures>,
    pub(super) shutdown: Arc<ShutdownFlag>,
    pub(super) boot: String,
    pub(crate) waiting: BTreeMap<String, Vec<DumpReply>>,
    pub(super) searched: BTreeMap<PathBuf, bool>,
    pub(super) unwritten: UnwrittenVerdicts,
    // Incidents whose timelines are being written, and of how many dumps.
    pub(super) pending_timelines: BTreeMap<String, usize>,
    pub(super) webhook: Option<Webhook>,
    /// Ranks that slow their job down.
    pub slow: SlowRanks,
    pub(super) compared_ns: u64,
    pub(super) verdict_actions: VerdictActions,
    /// The exit plugins that run.
    pub(super) plugins: Arc<RunningPlugins>,
    pub(super) filtered: BTreeMap<RankId, u32>,
    // Time of the loop's last turn.
    pub(super) turned_ns: u64,
}

/// A timeline that is sent when its detail has been recorded.
#[derive(Debug)]
pub(super) struct DetailedTimeline {
    /// When that is, CLOCK_MONOTONIC.
    pub due_ns: u64,
    /// When it was requested.
    pub asked_ns: u64,
    /// Its job.
    pub job: JobKey,
    /// The wanted part of it.
    pub wanted: WantedTimeline,
    /// Receives the answer.
    pub reply: TimelineReply,
}

/// The detail that the ranks record for a request of the original tool, CLOCK_MONOTONIC.
#[derive(Debug, Default)]
pub(super) struct TraceDetail {
    /// When it is requested next.
    pub renew_ns: u64,
    /// When the request has had its time.
    pub until_ns: u64,
}

/// A job whose ranks end one after the other gets this many timeouts: one rank may save a
/// checkpoint after the others have ended. So does one whose ranks are started again: they may load
/// a checkpoint first.
pub(super) const ENDING_TIMEOUTS: u32 = 4;

impl Jobs for Registry {
    fn is_alive(&self, job: &JobKey, attempt: u32) -> bool {
        self.ranks().any(|rank| rank.job == *job && rank.info.attempt == attempt && rank.has_process())
    }

    fn is_outlived(&self, job: &JobKey, attempt: u32) -> bool {
        let ranks = || self.ranks().filter(|rank| rank.job == *job && !rank.auxiliary && !rank.is_past());
        // A launcher that starts the ranks again makes a newer attempt.
        ranks().all(|rank| rank.info.attempt <= attempt)
            && ranks().any(|rank| rank.info.attempt == attempt && !rank.ended_in_order() && rank.has_launcher())
    }

    fn grace_ns(&self, job: &JobKey, attempt: u32) -> u64 {
        let timeouts = self.of_job(job).into_iter().map(|rank| rank.settings.hang_timeout);
        let timeout = timeouts.max().unwrap_or_default();
        if self.is_ending(job, attempt) {
            nanoseconds(timeout * ENDING_TIMEOUTS).max(DEATH_GRACE_NS)
        } else if Jobs::is_alive(self, job, attempt) {
            DEATH_GRACE_NS
        } else {
            // The launcher needs time to notice the end of its ranks, and to start others. Those
            // that it has started connect at their first device call.
            let timeouts = if self.is_restarted(job, attempt) { ENDING_TIMEOUTS } else { 1 };
            nanoseconds(timeout * timeouts).max(DEATH_GRACE_NS)
        }
    }
}

impl NodeState {
    /// The state of a node without ranks.
    #[must_use]
    pub(super) fn new(settings: Settings, captures: Captures, inbox: Inbox) -> Self {
        let node = match settings.node.as_str() {
            "" | "NOT_SET" => process::host_name(),
            name => name.to_string(),
        };
        let webhook = settings.webhook.as_deref().map(Webhook::new);
        let sampler = Sampler::new(settings.metrics.clone(), settings.timeline);
        let host = HostSampler::new(settings.timeline.samples_per_second);
        NodeState {
            settings,
            registry: Registry::default(),
            engine: Engine::default(),
            reports: BTreeMap::new(),
            problems: Vec::new(),
            idle: BTreeMap::new(),
            incomplete_captures: BTreeMap::new(),
            mild: BTreeMap::new(),
            opened: 0,
            supervisor: None,
            started: Now::get(),
            node,
            launched: Launched::default(),
            plugins: Arc::default(),
            sharers: Sharers::default(),
            member: Member::default(),
            disk: Disk::new({
                // The event loop may be waiting for this write only.
                let inbox = inbox.clone();
                move || inbox.wake()
            }),
            inbox,
            monitor: Monitor::default(),
            dumps: Throttle::new(BY_HAND),
            sampler,
            host,
            detailed: Vec::new(),
            every_kernel_until_ns: 0,
            trace_detail: TraceDetail::default(),
            captures: Arc::new(captures),
            shutdown: Arc::default(),
            boot: procfs::boot_id(),
            waiting: BTreeMap::new(),
            searched: BTreeMap::new(),
            unwritten: UnwrittenVerdicts::default(),
            pending_timelines: BTreeMap::new(),
            webhook,
            slow: SlowRanks::default(),
            compared_ns: 0,
            verdict_actions: VerdictActions::default(),
            filtered: BTreeMap::new(),
            turned_ns: 0,
        }
    }

    /// Records a turn of the loop.
    pub(super) fn note_turn(&mut self, now: Now) {
        self.turned_ns = now.mono_ns;
    }

    /// The latest time at which an event that is seen now can be said to have happened. The loop
    /// turns once a second. After a longer gap this process or the entire machine stood still, and
    /// the event may have happened at any time in the gap.
    pub(super) fn happened_ns(&self, now: Now) -> u64 {
        match self.turned_ns {
            0 => now.mono_ns,
            turned => now.mono_ns.min(turned + nanoseconds(TICK)),
        }
    }

    /// The ranks of this node that have not registered; see [`Launched::ranks`].
    pub(crate) fn unregistered_ranks(&self, now: Now) -> Vec<&Unregistered> {
        let world_start_ns = |job: &JobKey| {
            let living = self.registry.of_job(job).into_iter().filter(|rank| rank.has_process());
            living.map(|rank| rank.started_ns(now.mono_ns)).min()
        };
        self.launched.ranks(world_start_ns, now.mono_ns)
    }

    pub(super) fn living(&self) -> impl Iterator<Item = &Rank> {
        living_ranks(&self.registry)
    }

    /// The newest attempt of a job here.
    pub(crate) fn attempt(&self, job: &JobKey) -> u32 {
        self.registry.of_job(job).into_iter().map(|rank| rank.info.attempt).max().unwrap_or(0)
    }

    /// Whether any work must not be cut off.
    #[must_use]
    pub(super) fn is_busy(&self) -> bool {
        self.engine.is_busy()
            || self.verdict_actions.is_busy()
            || self.plugins.are_needed()
            || !self.pending_timelines.is_empty()
    }

    /// Whether something is being written.
    #[must_use]
    pub(super) fn is_writing(&self) -> bool {
        self.disk.is_busy()
            || !self.pending_timelines.is_empty()
            || self.engine.incidents().any(|incident| incident.state == State::Open)
    }
}

pub(super) fn living_ranks(registry: &Registry) -> impl Iterator<Item = &Rank> {
    registry.ranks().filter(|rank| rank.has_process() && !rank.auxiliary)
}

/// The pid that names a rank in a cause. A process outside this PID namespace has no pid here; its
/// negative entry id names it instead.
pub(super) fn cause_pid(rank: &Rank) -> i32 {
    match rank.pid() {
        0 => -i32::try_from(rank.id).unwrap_or(i32::MAX),
        pid => pid,
    }
}

pub(super) fn raised_by(rank: &Rank, cause: Cause) -> RaisedCause {
    RaisedCause {
        job: rank.job.clone(),
        attempt: rank.info.attempt,
        rank: rank.info.rank,
        cause,
        operation: None,
        since_ns: 0,
        late_ns: 0,
    }
}

pub(super) fn read_header(rank: &Rank) -> Option<(RankId, [u64; header::WORDS])> {
    Some((rank.id, rank.ring.as_ref()?.header().ok()?))
}
