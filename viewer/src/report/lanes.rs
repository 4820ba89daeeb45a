//! The swim lanes of the report: what each rank did in the last minute before the hang, one lane a
//! rank. The bars of a lane are few enough for a page with a thousand ranks: short operations that
//! follow each other closely are one bar.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use serde::Serialize;
use xpu_timer_analysis::{Verdict, communicator_name, operation_shape};
use xpu_timer_proto::printable;
use xpu_timer_proto::timeline::Times;
use xpu_timer_proto::v1::{Op, OpKind, Operation, TimelineBlock};

use crate::timeline::RankTimeline;

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
/// Number of collectives whose members are compared, at most.
const MOST_COLLECTIVES: usize = 2_000_000;
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
    /// How far the members of a collective are compared: waiting is known from this time on, in
    /// microseconds after the left edge.
    pub waiting_from_us: u64,
    /// The distinct descriptions of operations.
    pub names: Vec<Name>,
    /// The lanes, by rank.
    pub lanes: Vec<Lane>,
}

/// A description of operations.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct Name {
    /// What people read.
    pub text: String,
    /// How it is drawn.
    pub kind: Kind,
}

/// How an operation is drawn: the first two in the upper half of a lane, the others below.
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
}

impl Kind {
    fn row(self) -> usize {
        usize::from(matches!(self, Kind::Compute | Kind::Copy))
    }
}

/// One rank.
#[derive(Debug, Default, Serialize)]
pub struct Lane {
    /// Rank in the job.
    pub rank: u32,
    /// Operations that are missing.
    pub lost: u64,
    /// The bars, by their begin, six numbers each: microseconds from the begin of the bar before,
    /// length in microseconds, the part of it that waited for peers, index of the name, number of
    /// operations (0: pending), sequence number of the last one.
    pub bars: Vec<u64>,
}

/// One bar. Times are nanoseconds of the wall clock.
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

/// Reads the timelines of a folder. `None` if it has none, or if nothing is in the window. Each
/// file that cannot be read adds a note.
pub fn read(folder: &Path, verdict: Option<&Verdict>, notes: &mut Vec<String>) -> Option<Lanes> {
    let left_out = |path: &Path, error: &io::Error| format!("{} is left out: {error}", crate::folder::name_of(path));
    let timelines = RankTimeline::all(folder, |path, error| notes.push(left_out(path, &error))).unwrap_or_default();
    let window = Window::of(&timelines, verdict)?;
    let collectives = Collectives::of(&timelines, &window);
    let budget = (MOST_BARS / timelines.len() as u64).clamp(BARS_IN_LANE[0], BARS_IN_LANE[1]);
    let mut names = Names::default();
    let mut lanes = Vec::new();
    for timeline in &timelines {
        let mut builder = LaneBuilder::new(window.span() / budget);
        let result = timeline.for_each(|block, times| {
            if let Some(bar) = bar(timeline, block, times, &window, &collectives, &mut names) {
                builder.add(bar, &names);
            }
        });
        if let Err(error) = result {
            notes.push(left_out(timeline.path(), &error));
        }
        for operation in &timeline.head.pending {
            let begin = timeline.wall_ns(begin_ns(operation.started_ns, operation.entered_ns)).max(window.from);
            if begin < window.until {
                let waited = if operation.communicator == 0 { 0 } else { window.until - begin };
                let (name, longest) = (names.of(operation), window.until - begin);
                builder
                    .add(Bar { begin, end: window.until, waited, name, longest, count: 0, seq: operation.seq }, &names);
            }
        }
        lanes.push(Lane { rank: timeline.rank, lost: timeline.head.lost, bars: builder.finish(&window) });
    }
    let after = |wall_ns: u64| wall_ns.saturating_sub(window.from) / 1000;
    lanes.iter().any(|lane| !lane.bars.is_empty()).then(|| Lanes {
        from_ms: window.from / 1_000_000,
        span_us: window.span() / 1000,
        behind_us: window.behind.map(after),
        waiting_from_us: after(collectives.from),
        names: names.list,
        lanes,
    })
}

/// The time that the page shows, in nanoseconds of the wall clock.
struct Window {
    from: u64,
    until: u64,
    behind: Option<u64>,
}

impl Window {
    /// It ends a little after the time at which the first rank fell behind, or with the dump. It
    /// begins with the job if that has run for a shorter time.
    fn of(timelines: &[RankTimeline], verdict: Option<&Verdict>) -> Option<Window> {
        let is_culprit = |rank: u32| verdict.is_some_and(|verdict| verdict.culprits.contains(&rank));
        let dumped = timelines.iter().map(|timeline| timeline.wall_ns(timeline.head.until_ns)).max()?;
        let waits = |timeline: &RankTimeline| {
            let pending = timeline.head.pending.iter().filter(|operation| operation.communicator != 0);
            pending.map(|operation| timeline.wall_ns(operation.entered_ns)).min()
        };
        let behind = timelines.iter().filter(|timeline| !is_culprit(timeline.rank)).filter_map(waits).min();
        let begins = timelines.iter().filter_map(|timeline| Some(timeline.wall_ns(timeline.first_ns?)));
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
}

/// When the last member of each collective started it on its device.
struct Collectives {
    /// Collectives that began earlier are not compared.
    from: u64,
    started: HashMap<(u64, u64), u64>,
}

impl Collectives {
    fn of(timelines: &[RankTimeline], window: &Window) -> Collectives {
        // Most recent collectives first: the window of the comparison shrinks until they fit.
        const SLICES: u64 = 512;
        let slice = window.span() / SLICES + 1;
        let mut counts = vec![0_usize; SLICES as usize];
        each_collective(timelines, window.from, |_, begin, _| {
            counts[((begin - window.from) / slice).min(SLICES - 1) as usize] += 1;
        });
        let mut total = 0;
        let fits = counts.iter().rev().take_while(|count| {
            total += **count;
            total <= MOST_COLLECTIVES
        });
        let from = window.from + (SLICES - fits.count() as u64) * slice;
        let mut started = HashMap::new();
        each_collective(timelines, from, |key, _, wall_ns| {
            let last = started.entry(key).or_insert(wall_ns);
            *last = wall_ns.max(*last);
        });
        Collectives { from, started }
    }
}

/// Passes the key, the begin and the start of each completed collective that began after `from`.
fn each_collective(timelines: &[RankTimeline], from: u64, mut each: impl FnMut((u64, u64), u64, u64)) {
    for timeline in timelines {
        // The caller reports files that cannot be read.
        let _ = timeline.for_each(|block, times| {
            let shape = &block.shapes[times.shape as usize];
            let begin = timeline.wall_ns(times.entered_ns);
            if is_compared(shape) && times.started_ns != 0 && begin >= from {
                each((shape.communicator, times.seq), begin, timeline.wall_ns(times.started_ns));
            }
        });
    }
}

/// All members of its communicator start it.
fn is_compared(shape: &Operation) -> bool {
    shape.communicator != 0 && shape.kind() == OpKind::Collective && !matches!(shape.op(), Op::Send | Op::Recv)
}

fn begin_ns(started_ns: u64, entered_ns: u64) -> u64 {
    if started_ns == 0 { entered_ns } else { started_ns }
}

/// The bar of an operation; `None` if it is outside the window.
fn bar(
    timeline: &RankTimeline,
    block: &TimelineBlock,
    times: &Times,
    window: &Window,
    collectives: &Collectives,
    names: &mut Names,
) -> Option<Bar> {
    let shape = &block.shapes[times.shape as usize];
    let begin = timeline.wall_ns(begin_ns(times.started_ns, times.entered_ns));
    let end = timeline.wall_ns(times.completed_ns).max(begin);
    if end < window.from || begin >= window.until {
        return None;
    }
    let last = is_compared(shape).then(|| collectives.started.get(&(shape.communicator, times.seq))).flatten();
    let waited = last.map_or(0, |last| last.saturating_sub(begin).min(end - begin));
    let (name, longest) = (names.of(shape), end - begin);
    Some(Bar { begin: begin.max(window.from), end, waited, name, longest, count: 1, seq: times.seq })
}

/// Collects the bars of a lane.
struct LaneBuilder {
    /// A bar takes up operations that begin so soon after it, in nanoseconds.
    resolution: u64,
    /// Bars of the two halves of the lane.
    rows: [Vec<Bar>; 2],
}

impl LaneBuilder {
    fn new(resolution: u64) -> Self {
        LaneBuilder { resolution, rows: [Vec::new(), Vec::new()] }
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
    fn of(&mut self, operation: &Operation) -> u32 {
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
        let name = Name { text: text(operation), kind: kind(operation) };
        let next = self.list.len() as u32;
        let number = *self.numbers.entry(name.clone()).or_insert(next);
        if number == next {
            self.list.push(name);
        }
        self.shapes.insert(key, number);
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

/// What people read, such as `all_reduce of 1024 x float32 on 0x7ec6`.
fn text(operation: &Operation) -> String {
    let shape = operation_shape(operation);
    let mut text: String = printable::line(&shape).chars().take(MOST_LETTERS).collect();
    if operation.communicator != 0 {
        text.push_str(&format!(" on {}", communicator_name(operation.communicator)));
    }
    text
}
