//! The series of one rank: the operations completed within the window, the published values, and
//! the expiry of a series; and the calls of its traced Python functions. The caller passes in the
//! time.

use std::collections::VecDeque;

use xpu_timer_proto::{ring::span::TracedFunction, v1::Operation};

use crate::{
    metrics::{
        MetricsSettings,
        meaning::{Family, Key, Measurement},
    },
    os::clock::nanoseconds,
};

/// The published values of a series.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Values {
    /// Mean latency in microseconds.
    pub average: f64,
    /// Maximum latency in microseconds.
    pub max: f64,
    /// 99th percentile of the latency in microseconds.
    pub p99: f64,
    /// Minimum latency in microseconds.
    pub min: f64,
    /// Gbps or TFLOPS over all operations together.
    pub performance: f64,
}

/// Maximum number of series of one rank. A program whose shapes never repeat would have one per
/// shape.
const MAX_SERIES: usize = 512;
/// Maximum number of operations kept per series within its window; the newest ones are kept. Enough
/// for a window of ten seconds at 800 operations per second.
const MAX_OPERATIONS: usize = 8192;

#[derive(Debug, Default)]
struct Series {
    done: VecDeque<Measurement>,
    heard_ns: u64,
    published_ns: u64,
    values: Option<Values>,
}

/// All series of one rank.
#[derive(Debug, Default)]
pub(crate) struct AllSeries {
    // Ascending by key.
    series: Vec<(Key, Series)>,
    // The place of the series that the last operation belongs to. Mostly, the next one does too.
    last: usize,
}

impl AllSeries {
    /// Adds a completed operation to its series.
    pub(crate) fn add(&mut self, key: Key, done: Measurement, now_ns: u64) {
        if self.series.get(self.last).is_none_or(|(known, _)| *known != key) {
            self.last = match self.series.binary_search_by(|(known, _)| known.cmp(&key)) {
                Ok(place) => place,
                Err(_) if self.series.len() >= MAX_SERIES => return,
                Err(place) => {
                    self.series.insert(place, (key, Series::default()));
                    place
                }
            };
        }
        let (_, series) = &mut self.series[self.last];
        series.heard_ns = now_ns;
        if series.done.len() == MAX_OPERATIONS {
            series.done.pop_front();
        }
        series.done.push_back(done);
    }

    /// Publishes series that are due and removes expired ones.
    pub(crate) fn turn(&mut self, settings: &MetricsSettings, now_ns: u64) {
        let silence = nanoseconds(settings.silence);
        self.series.retain(|(_, series)| now_ns.saturating_sub(series.heard_ns) <= silence);
        for (key, series) in &mut self.series {
            let due = series.published_ns.saturating_add(nanoseconds(settings.publish));
            if series.values.is_some() && now_ns < due {
                continue;
            }
            let window = nanoseconds(match key.family {
                Family::Collective => settings.collective_window,
                Family::Matmul => settings.matmul_window,
            });
            series.done.retain(|done| now_ns.saturating_sub(done.at_ns) <= window);
            series.published_ns = now_ns;
            // While nothing completes, the last values remain until the series expires.
            series.values = values(key.family, &series.done).or(series.values);
        }
    }

    /// The currently published values by key.
    pub(crate) fn published(&self) -> impl Iterator<Item = (&Key, Values)> {
        self.series.iter().filter_map(|(key, series)| Some((key, series.values?)))
    }
}

fn values(family: Family, done: &VecDeque<Measurement>) -> Option<Values> {
    let mut latencies: Vec<f64> = done.iter().map(|done| done.us).collect();
    let count = latencies.len();
    // The smallest latency that at least 99 of 100 operations do not exceed.
    let rank = (count * 99).div_ceil(100).checked_sub(1)?;
    let (_, p99, _) = latencies.select_nth_unstable_by(rank, f64::total_cmp);
    let p99 = *p99;
    let us: f64 = latencies.iter().sum();
    Some(Values {
        average: us / count as f64,
        max: latencies.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        p99,
        min: latencies.iter().copied().fold(f64::INFINITY, f64::min),
        performance: family.performance(done.iter().map(|done| done.amount).sum(), us),
    })
}

/// The calls of one traced function.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct HostFunction {
    /// Its name, as the user lists it.
    pub name: String,
    /// Number of calls that have ended.
    pub calls: u64,
    /// Their time in nanoseconds.
    pub total_ns: u64,
    /// Average and maximum of the calls of the last interval that had some, in nanoseconds.
    pub latency_ns: Option<(f64, u64)>,
    /// `calls` and `total_ns` at the last publication.
    published: (u64, u64),
    /// The longest call since then, of those that were not overwritten.
    max_ns: u64,
    heard_ns: u64,
}

/// The traced Python functions of one rank.
#[derive(Debug, Default)]
pub(crate) struct HostFunctions {
    functions: Vec<HostFunction>,
    published_ns: u64,
}

impl HostFunctions {
    /// Takes over the counters of the functions, and the calls that were read since the last time.
    pub(crate) fn add(&mut self, read: Vec<TracedFunction>, calls: &[Operation], now_ns: u64) {
        self.functions.resize_with(read.len(), HostFunction::default);
        for (function, read) in self.functions.iter_mut().zip(read) {
            if read.calls > function.calls {
                function.heard_ns = now_ns;
            }
            (function.name, function.calls, function.total_ns) = (read.name, read.calls, read.total_ns);
        }
        for call in calls {
            if let Some(function) = self.functions.iter_mut().find(|function| function.name == call.function) {
                function.max_ns = function.max_ns.max(call.returned_ns.saturating_sub(call.entered_ns));
            }
        }
    }

    /// Publishes the functions if it is time, and removes the latencies of silent ones.
    pub(crate) fn turn(&mut self, settings: &MetricsSettings, now_ns: u64) {
        if self.published_ns != 0 && now_ns < self.published_ns.saturating_add(nanoseconds(settings.publish)) {
            return;
        }
        self.published_ns = now_ns;
        for function in &mut self.functions {
            let (calls, total_ns) = (function.calls, function.total_ns);
            let new = calls.saturating_sub(function.published.0);
            if new > 0 {
                let average = total_ns.saturating_sub(function.published.1) as f64 / new as f64;
                // The counters run ahead of the calls that were read.
                function.latency_ns = Some((average, function.max_ns.max(average as u64)));
            } else if now_ns.saturating_sub(function.heard_ns) > nanoseconds(settings.silence) {
                function.latency_ns = None;
            }
            (function.published, function.max_ns) = ((calls, total_ns), 0);
        }
    }

    /// The functions that were called.
    pub(crate) fn called(&self) -> impl Iterator<Item = &HostFunction> {
        self.functions.iter().filter(|function| function.calls > 0)
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::env::Source;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn settings() -> MetricsSettings {
        MetricsSettings::new(&Source::new(|_| None, ""))
    }

    fn key(operation: &'static str) -> Key {
        Key::for_test(operation)
    }

    fn done(at_s: u64, us: f64, bits: f64) -> Measurement {
        Measurement { at_ns: at_s * SECOND, us, amount: bits }
    }

    fn only(series: &AllSeries) -> Values {
        let all: Vec<Values> = series.published().map(|(_, values)| values).collect();
        assert_eq!(all.len(), 1);
        all[0]
    }

    #[test]
    fn latencies_and_bandwidth_of_a_window() {
        let mut series = AllSeries::default();
        for us in 1..=200u32 {
            series.add(key("AllReduce"), done(100, f64::from(us), 1000.0), 100 * SECOND);
        }
        series.turn(&settings(), 100 * SECOND);
        let values = only(&series);
        assert_eq!((values.min, values.max, values.average, values.p99), (1.0, 200.0, 100.5, 198.0));
        // 200 kbit in 20,100 us.
        assert!((values.performance - 200.0 / 20_100.0).abs() < 1e-12);
    }

    #[test]
    fn published_values_change_each_interval_and_cover_one_window() {
        let mut series = AllSeries::default();
        series.add(key("AllReduce"), done(100, 10.0, 0.0), 100 * SECOND);
        series.turn(&settings(), 100 * SECOND);
        series.add(key("AllReduce"), done(105, 30.0, 0.0), 105 * SECOND);
        series.turn(&settings(), 105 * SECOND);
        assert_eq!(only(&series).max, 10.0, "it is published every ten seconds");
        series.turn(&settings(), 110 * SECOND);
        assert_eq!((only(&series).max, only(&series).average), (30.0, 20.0));
        series.turn(&settings(), 120 * SECOND);
        assert_eq!(only(&series).average, 20.0, "nothing new, so the last values stay");
        series.add(key("AllReduce"), done(131, 5.0, 0.0), 131 * SECOND);
        series.turn(&settings(), 131 * SECOND);
        assert_eq!(only(&series).average, 5.0, "only what completed within the window counts");
    }

    #[test]
    fn a_silent_series_expires_and_an_active_one_stays() {
        let mut series = AllSeries::default();
        series.add(key("AllReduce"), done(100, 1.0, 1.0), 100 * SECOND);
        series.add(key("AllGather"), done(100, 1.0, 1.0), 100 * SECOND);
        series.turn(&settings(), 100 * SECOND);
        series.add(key("AllGather"), done(300, 1.0, 1.0), 300 * SECOND);
        series.turn(&settings(), 400 * SECOND);
        assert_eq!(series.published().count(), 2);
        series.turn(&settings(), 401 * SECOND);
        let left: Vec<Key> = series.published().map(|(key, _)| *key).collect();
        assert_eq!(left, [key("AllGather")]);
        series.add(key("AllReduce"), done(401, 1.0, 1.0), 401 * SECOND);
        series.add(key("AllGather"), done(401, 1.0, 1.0), 401 * SECOND);
        series.add(key("AllReduce"), done(401, 2.0, 1.0), 401 * SECOND);
        series.turn(&settings(), 411 * SECOND);
        let maxima: Vec<(Key, f64)> = series.published().map(|(key, values)| (*key, values.max)).collect();
        assert_eq!(maxima, [(key("AllGather"), 1.0), (key("AllReduce"), 2.0)]);
    }

    #[test]
    fn a_busy_series_keeps_the_newest_values_in_bounded_memory() {
        let mut series = AllSeries::default();
        for number in 0..MAX_OPERATIONS + 100 {
            series.add(key("AllReduce"), done(1, number as f64, 1.0), SECOND);
        }
        series.turn(&settings(), SECOND);
        assert_eq!((only(&series).min, series.series[0].1.done.len()), (100.0, MAX_OPERATIONS));
    }

    #[test]
    fn a_traced_function_has_the_latency_of_its_last_interval() {
        let mut functions = HostFunctions::default();
        let read = |calls: u64, total_ns: u64| vec![TracedFunction { name: "GC".into(), calls, total_ns }];
        let call =
            |ns: u64| Operation { function: "GC".into(), entered_ns: 5, returned_ns: 5 + ns, ..Default::default() };
        let latency = |functions: &HostFunctions| functions.called().next().and_then(|function| function.latency_ns);
        functions.add(read(0, 0), &[], 0);
        assert_eq!(functions.called().count(), 0);
        functions.add(read(3, 60), &[call(10), call(30), call(20)], SECOND);
        functions.turn(&settings(), SECOND);
        assert_eq!(latency(&functions), Some((20.0, 30)));
        functions.add(read(5, 160), &[call(60)], 5 * SECOND);
        functions.turn(&settings(), 5 * SECOND);
        assert_eq!(latency(&functions), Some((20.0, 30)), "it is published every ten seconds");
        functions.turn(&settings(), 11 * SECOND);
        assert_eq!(latency(&functions), Some((50.0, 60)));
        functions.turn(&settings(), 305 * SECOND);
        assert_eq!(latency(&functions), Some((50.0, 60)), "nothing new, so the last values stay");
        functions.turn(&settings(), 316 * SECOND);
        assert_eq!((latency(&functions), functions.called().count()), (None, 1));
    }
}
