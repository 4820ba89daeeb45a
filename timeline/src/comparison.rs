//! Compares runs of a job: how long each kernel and collective takes, what was lost, and which
//! ranks are slower than the others. Distributions are kept as histograms, so memory does not
//! depend on the length of the files.

use std::{collections::BTreeMap, fmt::Write as _, ops::Range};

use anyhow::Context;
use clap::ValueEnum;
use hashbrown::HashMap;
use plotters::prelude::*;
use xpu_timer_proto::printable;

use crate::{
    collectives::is_completed,
    job::{Job, Rank, parallel},
    operations::{Class, Meaning},
};

/// A bucket of a histogram is a number of this many bits less than a double: 256 buckets of equal
/// width between two powers of two, so they are 0.2 to 0.4 % wide.
const BUCKET_BITS: u32 = 44;
/// Rows of a table and boxes of a picture.
const MOST_ROWS: usize = 16;
/// A rank is slow in an operation if its median is this many times that of the others, and the
/// operation is not rare.
const SLOW: f64 = 1.05;
const FEWEST: u64 = 10;
/// Median absolute deviations between ranks that are normal.
const NORMAL_SPREAD: f64 = 5.0;
/// A rank holds up a communicator if it starts last in this share of the collectives.
const OFTEN_LAST: f64 = 0.8;

/// The values to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// TFLOPS of matrix products and attention
    TflopsBox,
    /// Bus bandwidth of collectives, without the time that they wait for a rank
    XcclBox,
    /// Durations of everything, the largest difference first
    PerformanceDiff,
}

impl Kind {
    /// The name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kind::TflopsBox => "tflops-box",
            Kind::XcclBox => "xccl-box",
            Kind::PerformanceDiff => "performance-diff",
        }
    }
}

/// A distribution of durations.
#[derive(Debug, Clone, Default)]
struct Durations {
    buckets: BTreeMap<u32, u64>,
    count: u64,
    total_ns: u64,
}

impl Durations {
    fn add(&mut self, ns: u64) {
        let bucket = (ns as f64).to_bits() >> BUCKET_BITS;
        *self.buckets.entry(bucket as u32).or_default() += 1;
        self.count += 1;
        self.total_ns = self.total_ns.saturating_add(ns);
    }

    fn merge(&mut self, other: &Durations) {
        other.buckets.iter().for_each(|(bucket, count)| *self.buckets.entry(*bucket).or_default() += count);
        self.count += other.count;
        self.total_ns = self.total_ns.saturating_add(other.total_ns);
    }

    /// In nanoseconds; 0 of none.
    fn quantile(&self, fraction: f64) -> f64 {
        let wanted = (fraction * self.count.saturating_sub(1) as f64).round() as u64;
        let mut before = 0;
        for (bucket, count) in &self.buckets {
            before += count;
            if before > wanted {
                let middle = 1 << (BUCKET_BITS - 1);
                return f64::from_bits(u64::from(*bucket) << BUCKET_BITS | middle);
            }
        }
        0.0
    }

    fn mean(&self) -> f64 {
        self.total_ns as f64 / self.count.max(1) as f64
    }
}

/// An operation, as people know it.
type Key = (Class, String);

/// An operation of one run.
#[derive(Debug, Default)]
struct Item {
    /// Bits on the bus, or floating-point operations; 0 if unknown.
    amount: f64,
    /// Durations on each rank that has it. The time in which a collective waits for ranks is left
    /// out.
    of_ranks: BTreeMap<u32, Durations>,
}

impl Item {
    fn all(&self) -> Durations {
        self.of_ranks.values().fold(Durations::default(), |mut all, of_rank| {
            all.merge(of_rank);
            all
        })
    }
}

/// How the collectives of a communicator wait for one rank.
#[derive(Debug, Clone, Copy, Default)]
struct Waits {
    collectives: u64,
    last: u64,
    waited_ns: u64,
}

/// The summary of a run.
#[derive(Debug)]
pub struct Run {
    name: String,
    ranks: usize,
    items: BTreeMap<Key, Item>,
    /// By the name of the communicator.
    waits: BTreeMap<String, BTreeMap<u32, Waits>>,
}

/// The result of one pass over a rank.
#[derive(Default)]
struct OfRank {
    items: HashMap<Key, (f64, Durations)>,
    waits: HashMap<usize, Waits>,
}

impl Run {
    /// Reads the operations of a job.
    #[must_use]
    pub fn of(job: &Job, name: String, threads: usize) -> Run {
        let mut run = Run { name, ranks: job.ranks.len(), items: BTreeMap::new(), waits: BTreeMap::new() };
        let of_ranks = parallel(threads, job.ranks.len(), |index| of_rank(job, &job.ranks[index]));
        for (rank, of_rank) in job.ranks.iter().zip(of_ranks) {
            for (key, (amount, durations)) in of_rank.items {
                let item = run.items.entry(key).or_default();
                item.amount = amount;
                item.of_ranks.insert(rank.rank, durations);
            }
            for (group, waits) in of_rank.waits {
                let group = &job.groups[group];
                let name = format!("{} ({:#x})", group.name, group.id);
                run.waits.entry(name).or_default().insert(rank.rank, waits);
            }
        }
        run
    }
}

fn of_rank(job: &Job, rank: &Rank) -> OfRank {
    let map = job.clocks[rank.node].map;
    let mut of_rank = OfRank::default();
    Job::each_block(rank, |block, times| {
        // The durations of a block by shape; shapes of one name are merged behind it.
        let mut durations: Vec<Durations> = vec![Durations::default(); block.shapes.len()];
        let groups: Vec<Option<usize>> = block.shapes.iter().map(|shape| job.complete_group(rank, shape)).collect();
        for time in times.filter(|time| is_completed(time.status, time.completed_ns)) {
            let from = if time.started_ns == 0 { time.entered_ns } else { time.started_ns };
            let mut ns = if time.device_ns == 0 { time.completed_ns.saturating_sub(from) } else { time.device_ns };
            let group = groups[time.shape as usize].filter(|_| time.started_ns != 0);
            if let Some((group, last)) = group.and_then(|group| Some((group, job.last_start(group, time.seq)?))) {
                let waited = last.saturating_sub(map.apply(from)).min(ns);
                let waits = of_rank.waits.entry(group).or_default();
                waits.collectives += 1;
                waits.last += u64::from(waited == 0);
                waits.waited_ns = waits.waited_ns.saturating_add(waited);
                ns -= waited;
            }
            durations[time.shape as usize].add(ns);
        }
        for (shape, durations) in block.shapes.iter().zip(durations).filter(|(_, durations)| durations.count > 0) {
            let group = job.group_of(rank, shape).map(|(index, _)| &job.groups[index]);
            let meaning = Meaning::of(shape, group);
            let amount = meaning.bus_bytes.map(|bytes| bytes * 8.0).or(meaning.flops).unwrap_or(0.0);
            let item = of_rank.items.entry((meaning.class, meaning.name)).or_default();
            item.0 = amount;
            item.1.merge(&durations);
        }
    });
    of_rank
}

/// A line of the comparison of an operation in the first run and another one.
struct Row<'a> {
    key: &'a Key,
    lost_us: f64,
    first: Durations,
    other: Durations,
}

/// Compares runs with the first one: a picture as SVG, and a text.
///
/// # Errors
/// The picture cannot be drawn.
pub fn compare(runs: &[Run], kind: Kind) -> anyhow::Result<(String, String)> {
    let mut text = String::new();
    let first = runs.first().context("there is no run")?;
    for other in if runs.len() > 1 { &runs[1..] } else { runs } {
        let rows = rows(first, other, kind);
        table(&mut text, first, other, &rows);
    }
    for run in runs {
        let slow = slow_ranks(run);
        let _ = writeln!(text, "\n{}:", run.name);
        if slow.is_empty() {
            text.push_str("  no rank is slower than the others\n");
        }
        slow.iter().for_each(|line| text.push_str(&format!("  {line}\n")));
    }
    let last = runs.last().unwrap_or(first);
    let keys: Vec<&Key> = rows(first, last, kind).into_iter().take(MOST_ROWS).map(|row| row.key).collect();
    Ok((picture(runs, &keys, kind)?, printable::text(&text).into_owned()))
}

fn is_compared(key: &Key, item: &Item, kind: Kind) -> bool {
    match kind {
        Kind::TflopsBox => key.0 == Class::Compute && item.amount > 0.0,
        Kind::XcclBox => key.0 == Class::Communication && item.amount > 0.0,
        Kind::PerformanceDiff => true,
    }
}

/// The operations by the time that a rank of the other run lost, on average. For a single run, by
/// the time of a rank.
fn rows<'a>(first: &'a Run, other: &'a Run, kind: Kind) -> Vec<Row<'a>> {
    let alone = std::ptr::eq(first, other);
    let empty = Item::default();
    let compared = other.items.iter().filter(|(key, item)| is_compared(key, item, kind));
    let mut rows: Vec<Row<'_>> = compared
        .map(|(key, item)| {
            let (before, after) = (first.items.get(key).unwrap_or(&empty).all(), item.all());
            let base = if alone { 0.0 } else { before.mean() };
            let lost_us = (after.mean() - base) * after.count as f64 / other.ranks.max(1) as f64 / 1e3;
            Row { key, lost_us, first: before, other: after }
        })
        .collect();
    rows.sort_by(|a, b| b.lost_us.total_cmp(&a.lost_us));
    rows
}

fn table(text: &mut String, first: &Run, other: &Run, rows: &[Row<'_>]) {
    let us = |durations: &Durations| match durations.count {
        0 => "-".to_string(),
        _ => format!("{:.1}", durations.quantile(0.5) / 1e3),
    };
    if std::ptr::eq(first, other) {
        let _ = writeln!(text, "\ntime of a rank of {}, per operation", other.name);
    } else {
        let _ = writeln!(text, "\ntime that a rank of {} lost against {}, per operation", other.name, first.name);
    }
    let _ = writeln!(text, "{:>12} {:>10} {:>12} {:>12}  operation", "ms", "count", "median us", "before us");
    for row in rows.iter().take(MOST_ROWS) {
        let (class, name) = row.key;
        let _ = writeln!(
            text,
            "{:>12.3} {:>10} {:>12} {:>12}  {} ({})",
            row.lost_us / 1e3,
            row.other.count,
            us(&row.other),
            us(&row.first),
            name,
            class.name()
        );
    }
    if rows.len() > MOST_ROWS {
        let _ = writeln!(text, "and {} more", rows.len() - MOST_ROWS);
    }
}

/// Sentences about the ranks that are slower than others: in operations of their own devices, and
/// in reaching collectives. The most lost time comes first.
fn slow_ranks(run: &Run) -> Vec<String> {
    let mut lines: Vec<(f64, String)> = Vec::new();
    for ((class, name), item) in &run.items {
        // A collective takes equally long on all ranks.
        if *class == Class::Communication {
            continue;
        }
        let enough = item.of_ranks.iter().filter(|(_, of_rank)| of_rank.count >= FEWEST);
        let medians: Vec<(u32, f64, &Durations)> =
            enough.map(|(rank, of_rank)| (*rank, of_rank.quantile(0.5), of_rank)).collect();
        if medians.len() < 3 {
            continue;
        }
        let usual = middle(medians.iter().map(|(_, median, _)| *median));
        let spread = middle(medians.iter().map(|(_, median, _)| (median - usual).abs()));
        for (rank, median, of_rank) in medians.iter().filter(|(_, median, _)| *median > usual * SLOW) {
            if *median > usual + NORMAL_SPREAD * spread {
                let lost = (of_rank.mean() - usual).max(0.0) * of_rank.count as f64;
                let line = format!(
                    "rank {rank} is {:.0} % slower than the other {} ranks in {name}: \
                     {:.1} us, not {:.1} us ({:.1} ms lost)",
                    100.0 * (median / usual - 1.0),
                    item.of_ranks.len() - 1,
                    median / 1e3,
                    usual / 1e3,
                    lost / 1e6
                );
                lines.push((lost, line));
            }
        }
    }
    for (group, ranks) in &run.waits {
        for (rank, waits) in ranks {
            let share = waits.last as f64 / waits.collectives.max(1) as f64;
            if ranks.len() < 2 || waits.collectives < FEWEST || share < OFTEN_LAST {
                continue;
            }
            let others = ranks.iter().filter(|(other, _)| *other != rank);
            let waited: u64 = others.clone().map(|(_, waits)| waits.waited_ns).sum();
            let collectives: u64 = others.map(|(_, waits)| waits.collectives).sum();
            let line = format!(
                "rank {rank} starts last in {:.0} % of the collectives of {group}; \
                 each other rank waits {:.1} us on average ({:.1} ms in all)",
                100.0 * share,
                waited as f64 / collectives.max(1) as f64 / 1e3,
                waited as f64 / (ranks.len() - 1) as f64 / 1e6
            );
            lines.push((waited as f64 / (ranks.len() - 1) as f64, line));
        }
    }
    lines.sort_by(|a, b| b.0.total_cmp(&a.0));
    lines.into_iter().take(MOST_ROWS).map(|(_, line)| line).collect()
}

/// The median; 0 of none.
fn middle(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Box plots of the operations, beside each other for all runs.
fn picture(runs: &[Run], keys: &[&Key], kind: Kind) -> anyhow::Result<String> {
    let unit = match kind {
        Kind::TflopsBox => "TFLOPS",
        Kind::XcclBox => "bus bandwidth in Gbps",
        Kind::PerformanceDiff => "duration in us",
    };
    let mut labels: Vec<String> = keys.iter().map(|(_, name)| short(name)).collect();
    // Plotters gives the only segment of an axis no room.
    if labels.len() == 1 {
        labels.push(String::new());
    }
    let mut boxes: Vec<Vec<(usize, [f32; 5])>> = Vec::new();
    for run in runs {
        let of_key = |(index, key): (usize, &&Key)| Some((index, five_numbers(run.items.get(*key)?, kind)));
        boxes.push(keys.iter().enumerate().filter_map(of_key).collect());
    }
    let most = boxes.iter().flatten().map(|(_, five)| five[4]).fold(1e-3, f32::max);
    let mut svg = String::new();
    let height = 120 + 24 * (labels.len().max(1) * (runs.len() + 1)) as u32;
    draw(&mut svg, height, 0.0..most * 1.1, unit, &labels, runs, &boxes).map_err(|error| anyhow::anyhow!("{error}"))?;
    Ok(svg)
}

/// A name that fits beside a plot.
fn short(name: &str) -> String {
    let name = printable::line(name);
    if name.chars().count() <= 48 { name.into_owned() } else { name.chars().take(47).chain(['…']).collect() }
}

/// 5th percentile, quartiles and 95th percentile of the durations, or of the performance.
fn five_numbers(item: &Item, kind: Kind) -> [f32; 5] {
    let all = item.all();
    let mut numbers = [0.05, 0.25, 0.5, 0.75, 0.95].map(|fraction| match kind {
        Kind::PerformanceDiff => (all.quantile(fraction) / 1e3) as f32,
        // Bits in a nanosecond are Gbps; 1000 operations in a nanosecond are a TFLOPS.
        Kind::XcclBox => (item.amount / all.quantile(fraction).max(1.0)) as f32,
        Kind::TflopsBox => (item.amount / all.quantile(fraction).max(1.0) / 1e3) as f32,
    });
    numbers.sort_unstable_by(f32::total_cmp);
    numbers
}

fn draw(
    svg: &mut String,
    height: u32,
    range: Range<f32>,
    unit: &str,
    labels: &[String],
    runs: &[Run],
    boxes: &[Vec<(usize, [f32; 5])>],
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(svg, (1200, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(10)
        .x_label_area_size(50)
        .y_label_area_size(360)
        .build_cartesian_2d(range, labels.into_segmented())?;
    chart.configure_mesh().x_desc(unit).y_labels(labels.len().max(1)).light_line_style(WHITE).draw()?;
    for (index, (run, boxes)) in runs.iter().zip(boxes).enumerate() {
        let colour = Palette99::pick(index).to_rgba();
        let offset = (index as f64 - (runs.len() - 1) as f64 / 2.0) * 20.0;
        let plots = boxes.iter().map(|(key, five)| {
            Boxplot::new_horizontal(SegmentValue::CenterOf(&labels[*key]), &Quartiles::new(five))
                .width(14)
                .whisker_width(0.5)
                .style(colour)
                .offset(offset)
        });
        let name = printable::line(&run.name).into_owned();
        let mark = move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled());
        chart.draw_series(plots)?.label(name).legend(mark);
    }
    chart.configure_series_labels().background_style(WHITE).border_style(BLACK).draw()?;
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn durations(us: u64) -> Durations {
        let mut durations = Durations::default();
        (0..100).for_each(|index| durations.add(us * 1000 + index * 10));
        durations
    }

    fn run(name: &str, us: impl Fn(u32) -> u64) -> Run {
        let of_ranks = (0..8).map(|rank| (rank, durations(us(rank)))).collect();
        let product = Item { amount: 1e9, of_ranks };
        let reduction = Item { amount: 1e8, of_ranks: (0..8).map(|rank| (rank, durations(200))).collect() };
        let items = [
            ((Class::Compute, "matmul 1024x1024x512 bf16".to_string()), product),
            ((Class::Communication, "AllReduce bf16 6 MiB".to_string()), reduction),
        ];
        let waits = |rank| Waits {
            collectives: 100,
            last: if rank == 5 { 97 } else { 1 },
            waited_ns: if rank == 5 { 0 } else { 9_000_000 },
        };
        let waits = (0..8).map(|rank| (rank, waits(rank))).collect();
        Run {
            name: name.into(),
            ranks: 8,
            items: items.into_iter().collect(),
            waits: BTreeMap::from([("tp 0-7 (0x1)".to_string(), waits)]),
        }
    }

    #[test]
    fn the_text_names_lost_time_and_slow_ranks() {
        let runs = [run("before", |_| 100), run("after", |rank| if rank == 5 { 150 } else { 110 })];
        let (svg, text) = compare(&runs, Kind::PerformanceDiff).unwrap();
        assert!(text.contains("time that a rank of after lost against before"), "{text}");
        let first = text.lines().find(|line| line.contains("matmul")).unwrap();
        assert!(first.trim_start().starts_with("1.5"), "{first}");
        assert!(text.contains("rank 5 is 36 % slower than the other 7 ranks in matmul 1024x1024x512 bf16"), "{text}");
        assert!(text.contains("rank 5 starts last in 97 % of the collectives of tp 0-7"), "{text}");
        assert!(text.contains("each other rank waits 90.0 us on average"), "{text}");
        assert!(svg.starts_with("<svg") && svg.contains("matmul 1024x1024x512 bf16"), "{svg}");
    }

    #[test]
    fn boxes_show_performance_without_waiting() {
        let (svg, _) = compare(&[run("only", |_| 100)], Kind::TflopsBox).unwrap();
        assert!(svg.contains("TFLOPS") && !svg.contains("AllReduce"), "{svg}");
        let (svg, text) = compare(&[run("only", |_| 100)], Kind::XcclBox).unwrap();
        assert!(svg.contains("Gbps") && svg.contains("AllReduce") && !svg.contains("matmul"), "{svg}");
        assert!(text.contains("time of a rank of only"), "{text}");
        let five = five_numbers(
            &run("only", |_| 100).items[&(Class::Compute, "matmul 1024x1024x512 bf16".into())],
            Kind::TflopsBox,
        );
        assert!((five[2] - 10.0).abs() < 0.2, "{five:?}");
    }
}
