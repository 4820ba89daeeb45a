//! The swim lanes of the report: what each rank did in the last minute before the hang, one lane a
//! rank, on aligned clocks. The bars of a lane are few enough for a page with a thousand ranks:
//! short operations that follow each other closely are one bar.

use std::collections::HashMap;

use serde::Serialize;
use xpu_timer_analysis::{Verdict, communicator_name, operation_shape, own_frame};
use xpu_timer_proto::server::PySpyFrame;
use xpu_timer_proto::timeline::Times;
use xpu_timer_proto::v1::{Op, OpKind, Operation, StackSamples};
use xpu_timer_proto::{printable, samples};
use xpu_timer_timeline::clocks::Residual;
use xpu_timer_timeline::job::{Job, Rank, parallel};
use xpu_timer_timeline::perfetto::tracks;

/// Length of the window before the hang.
const BEFORE_NS: u64 = 60_000_000_000;
/// Length of the window after it, at least and at most.
const AFTER_NS: [u64; 2] = [100_000_000, 10_000_000_000];
/// Number of bars in a page, at most.
const MOST_BARS: u64 = 150_000;
/// Number of bars in a lane, at least and at most.
const BARS_IN_LANE: [u64; 2] = [100, 20_000];
/// The last operations of each lane are bars of their own.
const UNMERGED: usize = 64;
/// Letters of a kernel's name that are shown.
const MOST_LETTERS: usize = 100;

/// The swim lanes.
#[derive(Debug, Serialize)]
pub struct Lanes {
    /// Wall clock at the left edge, in milliseconds since the Unix epoch.
    pub from_ms: u64,
    /// Length of the window, in microseconds.
    pub span_us: u64,
    /// When the first rank fell behind, in microseconds after the left edge: its peers began to
    /// wait in a collective that it had not entered. Absent if nothing is pending.
    pub behind_us: Option<u64>,
    /// How the clocks of the nodes were aligned; absent if there is one node only.
    pub clocks: Option<Clocks>,
    /// The distinct descriptions of operations.
    pub names: Vec<Name>,
    /// The lanes, by rank.
    pub lanes: Vec<Lane>,
}

/// How the clocks of the nodes were aligned.
#[derive(Debug, Serialize)]
pub struct Clocks {
    /// Number of nodes.
    pub nodes: usize,
    /// The nodes whose clocks could not be aligned: they have no collective in common with the
    /// others. Their realtime clocks are used.
    pub refused: Vec<String>,
    /// Medians and 99th percentiles of the differences between common ends, the largest of all
    /// nodes, in microseconds. Absent if no node was aligned.
    pub median_us: Option<f64>,
    /// See `median_us`.
    pub p99_us: Option<f64>,
    /// The largest error of a realtime clock that was corrected, in microseconds.
    pub corrected_us: f64,
}

/// A description of operations, or a function of Python.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct Name {
    /// The text for people.
    pub text: String,
    /// How it is drawn.
    pub kind: Kind,
    /// Whether members of its communicator have no timeline: ranks may have waited for longer than
    /// the bars show.
    pub partial: bool,
}

/// How a bar is drawn: the first two in the upper row of a lane, the next two below, Python at the
/// bottom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A collective, send or receive.
    Communication,
    /// A host call that blocks.
    Host,
    /// A kernel, matrix product or graph.
    Compute,
    /// A memory copy.
    Copy,
    /// Python code of the main thread, from its sampled stacks.
    Python,
}

impl Kind {
    fn row(self) -> usize {
        match self {
            Kind::Communication | Kind::Host => 0,
            Kind::Compute | Kind::Copy => 1,
            Kind::Python => 2,
        }
    }
}

/// One rank.
#[derive(Debug, Default, Serialize)]
pub struct Lane {
    /// Rank in the job.
    pub rank: u32,
    /// Operations that are missing.
    pub lost: u64,
    /// Whether the clock of its node could not be aligned: its bars may be shifted.
    pub unaligned: bool,
    /// The bars, by their begin, six numbers each: microseconds from the begin of the bar before,
    /// length in microseconds, the part of it that waited for peers, index of the name, number of
    /// operations (0: pending), sequence number of the last one.
    pub bars: Vec<u64>,
}

/// One bar. Times are nanoseconds of the aligned clock.
#[derive(Debug, Clone, Copy)]
struct Bar {
    begin: u64,
    end: u64,
    waited: u64,
    /// Name of its longest operation, and the length of that.
    name: u32,
    longest: u64,
    count: u64,
    seq: u64,
}

/// The lanes of a job. `None` if it has no timeline, or if nothing is in the window. `samples`
/// reads the sampled stacks of a rank.
#[must_use]
pub(crate) fn lanes(
    job: &Job,
    verdict: Option<&Verdict>,
    threads: usize,
    samples: impl Fn(&Rank) -> Option<StackSamples> + Sync,
) -> Option<Lanes> {
    let window = Window::of(job, verdict)?;
    let budget = (MOST_BARS / job.ranks.len() as u64).clamp(BARS_IN_LANE[0], BARS_IN_LANE[1]);
    let of_ranks = parallel(threads, job.ranks.len(), |index| {
        let rank = &job.ranks[index];
        lane(job, rank, &window, budget, samples(rank))
    });
    let mut names = Names::default();
    let mut lanes: Vec<Lane> = Vec::with_capacity(of_ranks.len());
    for (mut lane, of_rank) in of_ranks {
        let numbers: Vec<u64> = of_rank.into_iter().map(|name| names.number(name).into()).collect();
        lane.bars.chunks_exact_mut(6).for_each(|bar| bar[3] = numbers[bar[3] as usize]);
        lanes.push(lane);
    }
    lanes.sort_by_key(|lane| lane.rank);
    lanes.iter().any(|lane| !lane.bars.is_empty()).then(|| Lanes {
        from_ms: window.from / 1_000_000,
        span_us: window.span() / 1000,
        behind_us: window.behind.map(|ns| ns.saturating_sub(window.from) / 1000),
        clocks: clocks(job),
        names: names.list,
        lanes,
    })
}

/// The lane of a rank, with the names of its bars.
fn lane(job: &Job, rank: &Rank, window: &Window, budget: u64, samples: Option<StackSamples>) -> (Lane, Vec<Name>) {
    let on_trace = |ns: u64| job.clocks[rank.node].map.apply(ns);
    let (mut builder, mut names) = (LaneBuilder::new(window.span() / budget), Names::default());
    // `Job::read` has noted what cannot be read.
    let _ = Job::each_block(rank, |block, times| {
        // Name and communicator, when the shape is first needed.
        let mut shapes: Vec<Option<(u32, Option<usize>)>> = vec![None; block.shapes.len()];
        for times in times {
            let Some((begin, end)) = window.visible(&times, on_trace) else { continue };
            let shape = &block.shapes[times.shape as usize];
            let (name, group) = *shapes[times.shape as usize]
                .get_or_insert_with(|| (names.of(job, rank, shape), job.compared_group(rank, shape)));
            let last = group.filter(|_| times.started_ns != 0).and_then(|group| job.last_start(group, times.seq));
            let waited = last.map_or(0, |last| last.saturating_sub(begin).min(end - begin));
            builder.add(Bar { begin, end, waited, name, longest: end - begin, count: 1, seq: times.seq }, &names);
        }
    });
    for operation in &rank.head.pending {
        let begin = on_trace(begin_ns(operation.started_ns, operation.entered_ns)).max(window.from);
        if begin < window.until {
            let (end, longest) = (window.until, window.until - begin);
            let waited = if operation.communicator == 0 { 0 } else { longest };
            let name = names.of(job, rank, operation);
            builder.add(Bar { begin, end, waited, name, longest, count: 0, seq: operation.seq }, &names);
        }
    }
    let python = samples.map(|samples| python_bars(&samples, window, on_trace, &mut names));
    python.into_iter().flatten().for_each(|bar| builder.add(bar, &names));
    let (bars, unaligned) = (builder.finish(window), !job.clocks[rank.node].refused.is_empty());
    (Lane { rank: rank.rank, lost: rank.head.lost, unaligned, bars }, names.list)
}

/// The functions of the user's own code in which the main thread was, each with the functions that
/// it called.
fn python_bars(samples: &StackSamples, window: &Window, on_trace: impl Fn(u64) -> u64, names: &mut Names) -> Vec<Bar> {
    let mut of_stacks: Vec<Option<u32>> = vec![None; samples.stacks.len()];
    let mut bars: Vec<Bar> = Vec::new();
    for slice in samples.threads.iter().filter(|thread| thread.main).flat_map(samples::slices) {
        let (begin, end) = (on_trace(slice.first_ns), on_trace(tracks::end_of(&slice, samples.period_ns)));
        if end < window.from || begin >= window.until {
            continue;
        }
        let name = *of_stacks[slice.stack as usize].get_or_insert_with(|| {
            let frames = samples.stacks[slice.stack as usize].frames.iter();
            let frames: Vec<PySpyFrame> = frames.map(|frame| samples.frames[*frame as usize].clone()).collect();
            let text = own_frame(&frames).map_or_else(|| "no Python code".into(), tracks::name_of);
            let text = printable::line(&text).chars().take(MOST_LETTERS).collect();
            names.number(Name { text, kind: Kind::Python, partial: false })
        });
        let begin = begin.max(window.from);
        if let Some(before) = bars.last_mut().filter(|before| before.end >= begin) {
            // The sample before lasts until this one.
            before.end = begin;
            before.longest = begin - before.begin;
        }
        let end = end.min(window.until).max(begin);
        match bars.last_mut().filter(|before| before.name == name && before.end == begin) {
            Some(before) => (before.end, before.longest) = (end, end - before.begin),
            None => bars.push(Bar { begin, end, waited: 0, name, longest: end - begin, count: 1, seq: 0 }),
        }
    }
    bars
}

/// How the clocks were aligned; `None` of one node.
fn clocks(job: &Job) -> Option<Clocks> {
    let residuals = || job.clocks.iter().filter_map(|clock| clock.residual);
    let worst = |of: fn(Residual) -> f64| residuals().map(of).reduce(f64::max);
    let refused = job.clocks.iter().filter(|clock| !clock.refused.is_empty());
    (job.clocks.len() > 1).then(|| Clocks {
        nodes: job.clocks.len(),
        refused: refused.map(|clock| printable::line(&clock.node).into_owned()).collect(),
        median_us: worst(|residual| residual.median_us),
        p99_us: worst(|residual| residual.p99_us),
        corrected_us: job.clocks.iter().map(|clock| clock.realtime_error_ns.unsigned_abs()).max().unwrap_or(0) as f64
            / 1e3,
    })
}

/// The time that the page shows, in nanoseconds of the aligned clock.
struct Window {
    from: u64,
    until: u64,
    behind: Option<u64>,
}

impl Window {
    /// It ends a little after the time at which the first rank fell behind, or with the dump. It
    /// begins with the job if that has run for a shorter time.
    fn of(job: &Job, verdict: Option<&Verdict>) -> Option<Window> {
        let on_trace = |rank: &Rank, ns: u64| job.clocks[rank.node].map.apply(ns);
        let is_culprit = |rank: &&Rank| verdict.is_some_and(|verdict| verdict.culprits.contains(&rank.rank));
        let dumped = job.ranks.iter().map(|rank| on_trace(rank, rank.head.until_ns)).max()?;
        // When each peer began to wait. A clock that is not aligned decides only if no other can.
        let waits = |rank: &Rank| {
            let pending = rank.head.pending.iter().filter(|operation| operation.communicator != 0);
            let first = pending.map(|operation| on_trace(rank, operation.entered_ns)).min()?;
            Some((!job.clocks[rank.node].refused.is_empty(), first))
        };
        let peers = job.ranks.iter().filter(|rank| !is_culprit(rank));
        let behind = peers.filter_map(waits).min().map(|(_, first)| first);
        let begins = job.ranks.iter().filter_map(|rank| Some(on_trace(rank, rank.first_ns?)));
        let end = behind.unwrap_or(dumped);
        let first = begins.chain(behind).min()?.max(end.saturating_sub(BEFORE_NS));
        let before = end.saturating_sub(first);
        let after = (before / 4).clamp(AFTER_NS[0], AFTER_NS[1]);
        let until = behind.map_or(dumped, |behind| dumped.min(behind.saturating_add(after)));
        Some(Window { from: first.saturating_sub(before / 50), until, behind })
    }

    fn span(&self) -> u64 {
        self.until.saturating_sub(self.from).max(1)
    }

    /// When an operation begins and ends in the window; `None` if it is outside.
    fn visible(&self, times: &Times, on_trace: impl Fn(u64) -> u64) -> Option<(u64, u64)> {
        let begin = on_trace(begin_ns(times.started_ns, times.entered_ns));
        let end = on_trace(times.completed_ns).max(begin);
        (end >= self.from && begin < self.until).then_some((begin.max(self.from), end))
    }
}

fn begin_ns(started_ns: u64, entered_ns: u64) -> u64 {
    if started_ns == 0 { entered_ns } else { started_ns }
}

/// Collects the bars of a lane.
struct LaneBuilder {
    /// A bar includes operations that begin within this time after it, in nanoseconds.
    resolution: u64,
    /// Bars of the rows of the lane.
    rows: [Vec<Bar>; 3],
}

impl LaneBuilder {
    fn new(resolution: u64) -> Self {
        LaneBuilder { resolution, rows: Default::default() }
    }

    fn add(&mut self, bar: Bar, names: &Names) {
        let row = &mut self.rows[names.list[bar.name as usize].kind.row()];
        row.push(bar);
        // The last bars stay as they are; the one before them joins its predecessor if it is close.
        let Some(at) = row.len().checked_sub(UNMERGED + 1).filter(|at| *at > 0) else { return };
        let (next, before) = (row[at], &mut row[at - 1]);
        let is_close = next.begin >= before.begin && next.begin - before.begin < self.resolution;
        if is_close && next.count > 0 && before.count > 0 {
            before.end = before.end.max(next.end);
            before.waited = before.waited.saturating_add(next.waited).min(before.end - before.begin);
            if next.longest > before.longest {
                (before.name, before.longest) = (next.name, next.longest);
            }
            before.count += next.count;
            before.seq = next.seq;
            row.remove(at);
        }
    }

    fn finish(self, window: &Window) -> Vec<u64> {
        let mut bars: Vec<Bar> = self.rows.into_iter().flatten().collect();
        bars.sort_by_key(|bar| bar.begin);
        let mut before = window.from;
        let mut numbers = Vec::with_capacity(6 * bars.len());
        for bar in bars {
            // Rounded times, so that the differences do not add up to an error.
            let begin = (bar.begin - window.from) / 1000;
            let since = begin - (before - window.from) / 1000;
            numbers.extend([
                since,
                (bar.end - bar.begin) / 1000,
                bar.waited / 1000,
                bar.name.into(),
                bar.count,
                bar.seq,
            ]);
            before = bar.begin;
        }
        numbers
    }
}

/// The distinct names.
#[derive(Default)]
struct Names {
    list: Vec<Name>,
    numbers: HashMap<Name, u32>,
    /// Numbers of the shapes that were seen, so that few texts are made.
    shapes: HashMap<ShapeKey, u32>,
}

/// The fields of an operation that its name depends on.
#[derive(PartialEq, Eq, Hash)]
struct ShapeKey {
    op: i32,
    communicator: u64,
    count: u64,
    dtype: i32,
    peer: i32,
    function: String,
}

impl Names {
    /// The number of the name of an operation of a rank.
    fn of(&mut self, job: &Job, rank: &Rank, operation: &Operation) -> u32 {
        let key = ShapeKey {
            op: operation.op,
            communicator: operation.communicator,
            count: operation.count,
            dtype: operation.dtype,
            peer: operation.peer,
            function: operation.function.clone(),
        };
        if let Some(number) = self.shapes.get(&key) {
            return *number;
        }
        let group = job.compared_group(rank, operation);
        let partial = group.is_some_and(|group| !job.groups[group].is_complete());
        let number = self.number(Name { text: text(operation), kind: kind(operation), partial });
        self.shapes.insert(key, number);
        number
    }

    /// The number of a name, which is added if it is new.
    fn number(&mut self, name: Name) -> u32 {
        let next = self.list.len() as u32;
        let number = *self.numbers.entry(name.clone()).or_insert(next);
        if number == next {
            self.list.push(name);
        }
        number
    }
}

fn kind(operation: &Operation) -> Kind {
    match (operation.kind(), operation.op()) {
        (OpKind::HostCall, _) => Kind::Host,
        (OpKind::Collective, _) => Kind::Communication,
        (_, Op::Copy) => Kind::Copy,
        _ => Kind::Compute,
    }
}

/// The text for people, such as `all_reduce of 1024 x float32 on 0x7ec6`.
fn text(operation: &Operation) -> String {
    let shape = operation_shape(operation);
    let mut text: String = printable::line(&shape).chars().take(MOST_LETTERS).collect();
    if operation.communicator != 0 {
        text.push_str(&format!(" on {}", communicator_name(operation.communicator)));
    }
    text
}
