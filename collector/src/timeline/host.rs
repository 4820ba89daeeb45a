//! The stacks of the ranks over time: a light sample of their main threads that is always kept, and
//! recordings that users request. The threads of the capture take the samples.

use std::{collections::BTreeMap, time::Duration};

use tracing::warn;
use xpu_timer_capture::sampling::{ProcessRecording, RecordOptions, StackRecorder, Threads};
use xpu_timer_proto::v1::{ClockReading, RankInfo, StackSamples};

use crate::{
    http::questions::WantedRecording,
    job::{JobKey, RankId},
    metrics::sampler::RankView,
    os::clock::{Now, nanoseconds},
};

/// How long the light samples are kept.
const WINDOW: Duration = Duration::from_secs(120);
/// How long a finished recording waits for those who fetch it.
const KEPT: Duration = Duration::from_secs(60);

/// Samples the stacks of the ranks of this node.
#[derive(Default)]
pub(crate) struct HostSampler {
    recorder: StackRecorder,
    /// How the light samples are taken; `None` for not at all.
    light: Option<RecordOptions>,
    ranks: BTreeMap<RankId, Sampled>,
    requested: Vec<Requested>,
}

/// The light samples of a rank.
struct Sampled {
    pid: i32,
    recording: ProcessRecording,
}

/// A recording that somebody requested.
struct Requested {
    job: JobKey,
    wanted: WantedRecording,
    begun: Now,
    until_ns: u64,
    ranks: Vec<(RankInfo, ProcessRecording)>,
}

impl HostSampler {
    /// Takes this number of light samples a second of each rank.
    #[must_use]
    pub(crate) fn new(samples_per_second: u32) -> Self {
        let light = (samples_per_second > 0).then(|| RecordOptions {
            period: Duration::from_secs(1) / samples_per_second,
            threads: Threads::Main,
            native: false,
            children: false,
            window: WINDOW,
        });
        HostSampler { light, ..HostSampler::default() }
    }

    /// Follows the ranks that have started and ended. The samples of an ended rank stay as long as
    /// the registry knows it: an incident may be about its end.
    pub(crate) fn turn<'a>(&mut self, ranks: impl Iterator<Item = RankView<'a>>, now: Now) {
        for requested in &mut self.requested {
            if now.mono_ns >= requested.until_ns {
                requested.ranks.iter_mut().for_each(|(_, recording)| recording.request_stop());
            }
        }
        self.requested.retain(|requested| now.mono_ns < requested.until_ns.saturating_add(nanoseconds(KEPT)));
        let Some(options) = self.light else { return };
        let mut known = std::mem::take(&mut self.ranks);
        for rank in ranks {
            match known.remove(&rank.id) {
                Some(sampled) if sampled.pid == rank.pid || rank.has_ended => drop(self.ranks.insert(rank.id, sampled)),
                _ if rank.has_ended || rank.pid == 0 => {}
                _ => match self.recorder.start(rank.pid, options) {
                    Ok(recording) => drop(self.ranks.insert(rank.id, Sampled { pid: rank.pid, recording })),
                    Err(error) => warn!("rank {} (pid {}): it is not sampled: {error}", rank.info.rank, rank.pid),
                },
            }
        }
    }

    /// The light samples of a rank since a time; `None` if there are none.
    #[must_use]
    pub(crate) fn samples(&self, id: RankId, info: &RankInfo, from_ns: u64, clock: &[Now]) -> Option<StackSamples> {
        let samples = self.ranks.get(&id)?.recording.samples(from_ns);
        (!samples.threads.is_empty()).then(|| complete(samples, info, clock))
    }

    /// Begins a recording of ranks of a job.
    pub(crate) fn record<'a>(
        &mut self,
        job: &JobKey,
        ranks: impl Iterator<Item = RankView<'a>>,
        wanted: WantedRecording,
        until_ns: u64,
        now: Now,
    ) {
        let WantedRecording { period, threads, native } = wanted;
        let options = RecordOptions { period, threads, native, children: true, window: Duration::MAX };
        let mut started = Vec::new();
        for rank in ranks.filter(|rank| !rank.has_ended && rank.pid != 0) {
            match self.recorder.start(rank.pid, options) {
                Ok(recording) => started.push((rank.info.clone(), recording)),
                Err(error) => warn!("rank {} (pid {}): it is not recorded: {error}", rank.info.rank, rank.pid),
            }
        }
        self.requested.push(Requested { job: job.clone(), wanted, begun: now, until_ns, ranks: started });
    }

    /// The samples of the last such recording of a job.
    pub(crate) fn recorded(&mut self, job: &JobKey, wanted: WantedRecording, now: Now) -> Vec<StackSamples> {
        let is_it = |one: &&Requested| one.job == *job && one.wanted == wanted;
        let Some(requested) = self.requested.iter().rev().find(is_it) else { return Vec::new() };
        let clock = [requested.begun, now];
        let samples = |(info, recording): &(RankInfo, ProcessRecording)| StackSamples {
            native: wanted.native,
            ..complete(recording.samples(0), info, &clock)
        };
        requested.ranks.iter().map(samples).collect()
    }
}

/// Adds the rank and the readings of the clocks.
fn complete(samples: StackSamples, info: &RankInfo, clock: &[Now]) -> StackSamples {
    let reading = |now: &Now| ClockReading { monotonic_ns: now.mono_ns, realtime_ns: now.unix_ns };
    StackSamples { rank: Some(info.clone()), clock: clock.iter().map(reading).collect(), ..samples }
}
