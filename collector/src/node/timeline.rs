//! The timeline of a node: reads the rings in time, and answers requests for the operations that
//! are kept. The files are written and sent by other threads.

use std::{path::PathBuf, sync::Arc, thread, time::Duration};

use tokio::sync::{mpsc, oneshot};
use tracing::{info, warn};
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::{
    ring::detail,
    v1::{Delivery, TimelineFile, TimelineRequest, delivery},
};

use crate::{
    error::{Error, chain},
    http::questions::{Refusal, TimelineFiles, TimelineReply, WantedRecording, WantedTimeline, wanted_job},
    incident::folder::Folder,
    job::{JobKey, RankId, local_key},
    metrics::sampler::RankView,
    node::{
        registry::{Rank, Registry},
        state::{DetailedTimeline, NodeState, TICK},
    },
    os::{
        clock::{Now, nanoseconds},
        safe_path::create_directories,
    },
    timeline::{
        DETAIL_MARGIN,
        files::{RankOperations, RankTimeline, send_all, send_samples},
        kernel_trace::{self, Files, Request},
    },
};

/// Chunks of a timeline that may wait for their receiver; each may have half a megabyte.
const CHUNKS: usize = 2;
/// The longest time for which every kernel is recorded.
const LONGEST_DETAIL: Duration = Duration::from_secs(600);
/// The time for which one request to the hooks asks for detail, for a request of the original tool.
const TRACE_DETAIL_NS: u64 = 4_000_000_000;

fn views(registry: &Registry) -> impl Iterator<Item = RankView<'_>> {
    registry.ranks().filter(|rank| !rank.auxiliary).map(Rank::view)
}

impl NodeState {
    /// The longest time until the rings must be checked.
    pub(super) fn next_peek(&self) -> Duration {
        let is_running = self.registry.ranks().any(|rank| rank.ring.is_some() && rank.has_process());
        let is_needed = is_running || !self.detailed.is_empty();
        self.sampler.peek_interval().filter(|_| is_needed).unwrap_or(TICK)
    }

    /// Reads the rings that it is time for, and does what waits for operations.
    pub(super) fn follow_rings(&mut self, now: Now) {
        self.sampler.expects_many = !self.detailed.is_empty();
        self.sampler.turn(views(&self.registry), now);
        self.host.turn(views(&self.registry), now);
        if self.sampler.recording.is_active() {
            self.renew_trace_detail(now);
            let registry = &self.registry;
            let is_here = |id: RankId| registry.get(id).is_some_and(|rank| !rank.view().has_ended);
            for files in self.sampler.recording.turn(is_here) {
                let folder = files.folder.clone();
                self.disk.submit(&folder, move || write_kernel_trace(&files));
            }
        }
        let (due, waiting) = std::mem::take(&mut self.detailed).into_iter().partition(|one| one.due_ns <= now.mono_ns);
        self.detailed = waiting;
        for DetailedTimeline { job, wanted, reply, asked_ns, .. } in due {
            if let Some(recording) = wanted.recording {
                self.send_recording(&job, recording, reply, now);
                continue;
            }
            let window = Duration::from_nanos(now.mono_ns.saturating_sub(asked_ns));
            self.send_timeline(&job, &WantedTimeline { window, ..wanted }, reply, now);
        }
    }

    /// The timelines of all ranks of a job, for an incident: the operations of the window of the
    /// recorder, and all samples that are kept.
    pub(super) fn timelines_of(&mut self, job: &JobKey, now: Now) -> Vec<(u32, RankTimeline)> {
        self.rank_timelines(job, None, (self.settings.timeline.window, Duration::MAX), now)
    }

    /// The timelines of ranks of a job, with the windows of operations and of samples. Ranks of
    /// which nothing is kept are left out.
    ///
    /// A window counts back from now, or from the newest operation of the job if nothing has
    /// completed since: a job that hangs or has ended has no newer ones.
    fn rank_timelines(
        &mut self,
        job: &JobKey,
        ranks: Option<&RankSet>,
        (of_operations, of_samples): (Duration, Duration),
        now: Now,
    ) -> Vec<(u32, RankTimeline)> {
        if self.sampler.timeline.is_on() {
            self.sampler.read_all(views(&self.registry), now);
        }
        let (store, host) = (&mut self.sampler.timeline, &self.host);
        let of_job = self.registry.of_job(job);
        let newest_ns = store.newest_ns(of_job.iter().map(|rank| rank.id));
        let begin_ns = |window: Duration| {
            let is_quiet = newest_ns > 0 && newest_ns.saturating_add(nanoseconds(window)) < now.mono_ns;
            if is_quiet { newest_ns } else { now.mono_ns }.saturating_sub(nanoseconds(window))
        };
        let (from_ns, samples_from_ns) = (begin_ns(of_operations), begin_ns(of_samples));
        let clock: Arc<[Now]> = store.clock(from_ns).into();
        let is_wanted = |rank: &&&Rank| ranks.is_none_or(|ranks| is_among(ranks, rank));
        let timeline = |rank: &&Rank| {
            let operations = store.is_on().then(|| RankOperations {
                info: rank.info.clone(),
                window: store.window(rank.id, from_ns),
                until: now,
                clock: Arc::clone(&clock),
                ring: rank.ring.clone(),
                device: self.settings.metrics.device.clone(),
            });
            let samples = host.samples(rank.id, &rank.info, samples_from_ns, &[now]);
            let is_kept = operations.is_some() || samples.is_some();
            is_kept.then(|| (rank.info.rank.max(0).unsigned_abs(), RankTimeline { operations, samples }))
        };
        of_job.iter().filter(is_wanted).filter_map(timeline).collect()
    }

    /// The answer to a request for timelines.
    fn wanted_timelines(
        &mut self,
        job: &JobKey,
        ranks: Option<&RankSet>,
        window: Duration,
        now: Now,
    ) -> Vec<RankTimeline> {
        let timelines = self.rank_timelines(job, ranks, (window, window), now);
        timelines.into_iter().map(|(_, timeline)| timeline).collect()
    }

    /// A page asks for a timeline.
    pub(super) fn timeline_asked(&mut self, wanted: WantedTimeline, reply: TimelineReply, now: Now) {
        match self.wanted_timeline(&wanted) {
            Ok(job) if wanted.records() => {
                let due_ns = match wanted.recording {
                    Some(recording) => self.record_stacks(&job, wanted.ranks.as_ref(), recording, wanted.window, now),
                    None => self.record_detail(&job, wanted.window, now),
                };
                self.detailed.push(DetailedTimeline { due_ns, asked_ns: now.mono_ns, job, wanted, reply });
            }
            Ok(job) => self.send_timeline(&job, &wanted, reply, now),
            // The requester may be gone.
            Err(refusal) => drop(reply.send(Err(refusal))),
        }
    }

    fn wanted_timeline(&self, wanted: &WantedTimeline) -> Result<JobKey, Refusal> {
        if !self.sampler.timeline.is_on() && wanted.recording.is_none() {
            let why = "nothing is recorded: XPU_TIMER_TIMELINE_SECONDS is 0";
            return Err(Refusal::Unusable(why.into()));
        }
        if wanted.records() && wanted.window > LONGEST_DETAIL {
            let longest = LONGEST_DETAIL.as_secs();
            let what = if wanted.detail { "every kernel" } else { "stacks" };
            return Err(Refusal::Unusable(format!("{what} can be recorded for {longest} seconds at most")));
        }
        let jobs: Vec<JobKey> = self.registry.jobs().into_iter().collect();
        let alive: Vec<JobKey> = jobs.iter().filter(|job| self.registry.is_alive(job)).cloned().collect();
        // Without a name, the request is for a running job.
        let choice = if wanted.job.is_none() && !alive.is_empty() { &alive } else { &jobs };
        let job = wanted_job(choice, wanted.job.as_deref())?;
        match &wanted.ranks {
            Some(ranks) if !self.registry.of_job(&job).iter().any(|rank| is_among(ranks, rank)) => {
                Err(Refusal::NoJob(format!("this node has no rank {ranks} of job {job}")))
            }
            _ => Ok(job),
        }
    }

    /// The cluster collector requests a timeline.
    pub(super) fn timeline_requested(&mut self, request: TimelineRequest, now: Now) {
        let Some(job) = request.job.as_ref().map(local_key) else { return };
        let window = Duration::from_millis(request.window_ms);
        let mut ranks = RankSet::new();
        request.ranks.iter().for_each(|run| ranks.insert_run(run.first, run.last));
        let wanted = Some(&ranks).filter(|ranks| !ranks.is_empty());
        let recording = request.recording.as_ref().map(WantedRecording::from_message);
        if request.detail {
            match recording {
                Some(recording) => self.record_stacks(&job, wanted, recording, window, now),
                None => self.record_detail(&job, window, now),
            };
            return;
        }
        if let Some(recording) = recording {
            let samples = self.host.recorded(&job, recording, now);
            self.member.start_delivery(request.key, move |sender| {
                let piece = |file| Delivery { message: Some(delivery::Message::Timeline(file)) };
                send_samples(&samples, &mut |file| sender.blocking_send(piece(file)).is_ok());
            });
            return;
        }
        let timelines = self.wanted_timelines(&job, wanted, window, now);
        self.member.start_delivery(request.key, move |sender| {
            let piece = |file| Delivery { message: Some(delivery::Message::Timeline(file)) };
            send_all(&timelines, &mut |file| sender.blocking_send(piece(file)).is_ok());
        });
    }

    /// While operations are awaited for a request of the original tool, asks the ranks for the
    /// detail that these need, for a few seconds at a time. It ends by itself, also if the request
    /// never gets enough operations.
    fn renew_trace_detail(&mut self, now: Now) {
        let kinds = self.sampler.recording.detail(now);
        let is_due = self.trace_detail.renew_ns <= now.mono_ns && now.mono_ns < self.trace_detail.until_ns;
        // Every kernel is recorded until then, which is more.
        if kinds == 0 || !is_due || now.mono_ns < self.every_kernel_until_ns {
            return;
        }
        self.trace_detail.renew_ns = now.mono_ns + TRACE_DETAIL_NS / 2;
        let word = detail::word(now.mono_ns + TRACE_DETAIL_NS, kinds);
        self.registry.ranks().filter(|rank| !rank.auxiliary).for_each(|rank| ask_for_detail(rank, word));
    }

    /// Asks all ranks of a job to record every kernel. Returns when all these have completed.
    fn record_detail(&mut self, job: &JobKey, window: Duration, now: Now) -> u64 {
        let margin_ns = nanoseconds(DETAIL_MARGIN);
        let until_ns = now.mono_ns.saturating_add(nanoseconds(window.min(LONGEST_DETAIL)) + margin_ns / 2);
        let word = detail::word(until_ns, detail::ALL);
        self.registry.of_job(job).into_iter().for_each(|rank| ask_for_detail(rank, word));
        self.every_kernel_until_ns = self.every_kernel_until_ns.max(until_ns);
        info!("job {job}: recording every kernel for {window:?}");
        until_ns.saturating_add(margin_ns / 2)
    }

    /// Records the stacks of ranks of a job. Returns when that is done.
    fn record_stacks(
        &mut self,
        job: &JobKey,
        ranks: Option<&RankSet>,
        wanted: WantedRecording,
        window: Duration,
        now: Now,
    ) -> u64 {
        let until_ns = now.mono_ns.saturating_add(nanoseconds(window.min(LONGEST_DETAIL)));
        let of_job = self.registry.of_job(job);
        let chosen = of_job.iter().filter(|rank| !rank.auxiliary && ranks.is_none_or(|ranks| is_among(ranks, rank)));
        self.host.record(job, chosen.map(|rank| rank.view()), wanted, until_ns, now);
        info!("job {job}: recording stacks for {window:?}");
        until_ns
    }

    fn send_recording(&mut self, job: &JobKey, wanted: WantedRecording, reply: TimelineReply, now: Now) {
        let samples = self.host.recorded(job, wanted, now);
        let (sender, chunks) = mpsc::channel(CHUNKS);
        let files = TimelineFiles { root: self.root_of(job), chunks };
        start_sending(move |send| send_samples(&samples, send), sender, reply, files);
        self.retire();
    }

    /// The folder that the timelines of a job belong into.
    fn root_of(&self, job: &JobKey) -> PathBuf {
        let of_job = self.registry.of_job(job);
        of_job.first().map_or(&self.settings.timeline_path, |rank| &rank.settings.timeline_path).clone()
    }

    fn send_timeline(&mut self, job: &JobKey, wanted: &WantedTimeline, reply: TimelineReply, now: Now) {
        let timelines = self.wanted_timelines(job, wanted.ranks.as_ref(), wanted.window, now);
        let (sender, chunks) = mpsc::channel(CHUNKS);
        let files = TimelineFiles { root: self.root_of(job), chunks };
        start_sending(move |send| send_all(&timelines, send), sender, reply, files);
        self.retire();
    }

    /// A request of the original tool.
    pub(super) fn kernel_trace_asked(&mut self, mut request: Request, now: Now) -> Result<&'static str, Refusal> {
        if request.path.as_os_str().is_empty() {
            request.path.clone_from(&self.settings.timeline_path);
        }
        let folders = self.folders();
        if !kernel_trace::is_inside(&request.path, folders.iter()) {
            let folders = folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(", ");
            return Err(Refusal::Unusable(format!(
                "dump_path {:?} is outside the folders of timelines (XPU_TIMER_TIMELINE_PATH): {folders}",
                request.path
            )));
        }
        let (path, kinds) = (request.path.clone(), kernel_trace::kinds_text(request.kinds));
        let ranks: Vec<RankId> = views(&self.registry).filter(|view| !view.has_ended).map(|view| view.id).collect();
        // Operations that have completed so far are before the request.
        self.sampler.read_all(views(&self.registry), now);
        if !self.sampler.recording.is_active() {
            let start_ns = now.mono_ns.saturating_add(request.since_unix_ns.saturating_sub(now.unix_ns));
            self.trace_detail.until_ns = start_ns.saturating_add(nanoseconds(LONGEST_DETAIL));
        }
        let message = self.sampler.recording.start(request, ranks.into_iter());
        info!("timeline of {kinds} into {}: {message}", path.display());
        Ok(message)
    }
}

fn ask_for_detail(rank: &Rank, word: u64) {
    let Some(ring) = rank.ring.as_ref().filter(|_| rank.has_process()) else { return };
    if let Err(error) = ring.write(detail::HEADER, word) {
        warn!("{}: its kernels are not recorded: {error}", rank.title());
    }
}

/// Whether an entry of the registry is one of these ranks.
fn is_among(ranks: &RankSet, rank: &Rank) -> bool {
    u32::try_from(rank.info.rank).is_ok_and(|rank| ranks.contains(rank))
}

/// Sends files on a thread of its own, which waits for the receiver.
fn start_sending(
    send: impl FnOnce(&mut dyn FnMut(TimelineFile) -> bool) + Send + 'static,
    sender: mpsc::Sender<TimelineFile>,
    reply: oneshot::Sender<Result<TimelineFiles, Refusal>>,
    files: TimelineFiles,
) {
    let work = move || send(&mut |file| sender.blocking_send(file).is_ok());
    let started = thread::Builder::new().name("timeline".into()).spawn(work);
    let answer = started.map(|_| files);
    let answer = answer.map_err(|error| Refusal::Unusable(format!("no thread can be started: {error}")));
    // The requester may be gone.
    drop(reply.send(answer));
}

fn write_kernel_trace(files: &Files) {
    let write = || -> Result<(), Error> {
        create_directories(&files.folder)?;
        let folder = Folder { path: files.folder.clone() };
        files.contents().into_iter().try_for_each(|(name, bytes)| folder.write(&name, &bytes))
    };
    match write() {
        Ok(()) => info!("{}.timeline is written into {}", files.name, files.folder.display()),
        Err(error) => warn!("{}.timeline cannot be written: {}", files.name, chain(&error)),
    }
}
