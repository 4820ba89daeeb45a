//! Aligns the clocks of nodes on the ends of common collectives. A collective in which each rank
//! needs the data of all others ends on all ranks at about the same moment, so the ends of many
//! show offset and drift between two clocks. Nodes without a common collective are aligned through
//! others. Pure.

use serde::Serialize;

/// Fewer common ends do not show an offset.
const FEWEST_ENDS: usize = 3;
/// Fewer common ends, or a shorter time between them, do not show a drift.
const FEWEST_ENDS_FOR_DRIFT: usize = 16;
const SHORTEST_FOR_DRIFT_NS: f64 = 1e9;
/// No crystal drifts by more.
const LARGEST_DRIFT: f64 = 1e-3;
/// Rounds of least squares, each without the outliers of the one before.
const ROUNDS: usize = 4;
/// Median absolute deviations, as multiples of the standard deviation, beyond which an end is an
/// outlier; and the smallest such limit.
const OUTLIER: f64 = 3.0 * 1.4826;
const LEAST_LIMIT_NS: f64 = 1000.0;

/// The end of one operation on two nodes, in nanoseconds of their own monotonic clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommonEnd {
    /// On the node that is aligned.
    pub here_ns: u64,
    /// On the node that it is aligned with.
    pub there_ns: u64,
}

/// Converts the times of one clock to those of another.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct ClockMap {
    /// Added at the pivot.
    pub offset_ns: i64,
    /// The drift of the other clock against this one, as a fraction.
    pub drift: f64,
    /// A moment of this clock.
    pub pivot_ns: u64,
}

impl ClockMap {
    /// A time of this clock on the other one.
    #[must_use]
    pub fn apply(&self, ns: u64) -> u64 {
        let since = ns.wrapping_sub(self.pivot_ns) as i64;
        ns.saturating_add_signed(self.offset_ns.saturating_add((since as f64 * self.drift).round() as i64))
    }

    /// This map, then another one.
    #[must_use]
    pub fn then(&self, next: &ClockMap) -> ClockMap {
        let there = self.apply(self.pivot_ns);
        ClockMap {
            offset_ns: next.apply(there).wrapping_sub(self.pivot_ns) as i64,
            drift: (1.0 + self.drift) * (1.0 + next.drift) - 1.0,
            pivot_ns: self.pivot_ns,
        }
    }
}

/// How far the common ends are apart after the alignment.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Residual {
    /// Median of the absolute differences.
    pub median_us: f64,
    /// 99th percentile of the absolute differences.
    pub p99_us: f64,
    /// Number of common ends.
    pub ends: usize,
    /// Those that the fit left out.
    pub outliers: usize,
}

/// Fits a map to common ends. `None` if there are too few.
#[must_use]
pub fn fit(ends: &[CommonEnd]) -> Option<(ClockMap, Residual)> {
    if ends.len() < FEWEST_ENDS {
        return None;
    }
    let mut ends = ends.to_vec();
    ends.sort_unstable_by_key(|end| end.here_ns);
    let pivot_ns = ends[ends.len() / 2].here_ns;
    let base = ends[ends.len() / 2].there_ns.wrapping_sub(pivot_ns) as i64;
    // Relative to the pivot, the numbers are small enough for f64.
    let points: Vec<(f64, f64)> = ends
        .iter()
        .map(|end| {
            let difference = end.there_ns.wrapping_sub(end.here_ns) as i64;
            (end.here_ns.wrapping_sub(pivot_ns) as i64 as f64, difference.wrapping_sub(base) as f64)
        })
        .collect();
    let span = points.last()?.0 - points.first()?.0;
    let drifts = points.len() >= FEWEST_ENDS_FOR_DRIFT && span >= SHORTEST_FOR_DRIFT_NS;
    let mut slope = if drifts { theil_sen(&points) } else { 0.0 };
    let mut offset = median(points.iter().map(|(x, y)| y - slope * x).collect());
    let mut kept = points.clone();
    for _ in 0..ROUNDS {
        let distance = |(x, y): &(f64, f64)| (y - offset - slope * x).abs();
        let limit = (OUTLIER * median(points.iter().map(distance).collect())).max(LEAST_LIMIT_NS);
        kept = points.iter().filter(|point| distance(point) <= limit).copied().collect();
        (offset, slope) = least_squares(&kept, drifts);
    }
    if slope.abs() > LARGEST_DRIFT {
        slope = 0.0;
        offset = median(points.iter().map(|(_, y)| *y).collect());
    }
    let mut distances: Vec<f64> = points.iter().map(|(x, y)| (y - offset - slope * x).abs() / 1e3).collect();
    distances.sort_unstable_by(f64::total_cmp);
    let residual = Residual {
        median_us: distances[distances.len() / 2],
        p99_us: distances[distances.len() * 99 / 100],
        ends: points.len(),
        outliers: points.len() - kept.len(),
    };
    Some((ClockMap { offset_ns: base.wrapping_add(offset.round() as i64), drift: slope, pivot_ns }, residual))
}

/// The median of the slopes between each point and the one half of all points later.
fn theil_sen(points: &[(f64, f64)]) -> f64 {
    let half = points.len() / 2;
    let pairs = points.iter().zip(&points[half..]).filter(|(a, b)| b.0 > a.0);
    median(pairs.map(|(a, b)| (b.1 - a.1) / (b.0 - a.0)).collect())
}

fn least_squares(points: &[(f64, f64)], drifts: bool) -> (f64, f64) {
    let count = points.len().max(1) as f64;
    let (x, y) = (points.iter().map(|p| p.0).sum::<f64>() / count, points.iter().map(|p| p.1).sum::<f64>() / count);
    let xx: f64 = points.iter().map(|p| (p.0 - x) * (p.0 - x)).sum();
    let xy: f64 = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
    let slope = if drifts && xx > 0.0 { xy / xx } else { 0.0 };
    (y - slope * x, slope)
}

/// The median, 0 of none.
fn median(mut values: Vec<f64>) -> f64 {
    let middle = values.len() / 2;
    if values.is_empty() {
        return 0.0;
    }
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

/// The clock of one node after the alignment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodeClock {
    /// The node.
    pub node: String,
    /// From its monotonic clock to the time of the trace.
    pub map: ClockMap,
    /// The node that it was aligned with. `None` if the time of the trace is its own realtime
    /// clock: it is the reference, or could not be aligned.
    pub aligned_with: Option<String>,
    /// How well it was aligned with that node.
    pub residual: Option<Residual>,
    /// The realtime clock of the node minus the time of the trace.
    pub realtime_error_ns: i64,
    /// Why it is not aligned; empty if it is.
    pub refused: String,
}

/// Aligns all nodes with the first. `realtime` has each node's name and the map to its own realtime
/// clock. `ends_of` returns the common ends of two nodes: the first is to be aligned with the
/// second.
pub fn align(
    realtime: &[(String, ClockMap)],
    mut ends_of: impl FnMut(usize, usize) -> Vec<CommonEnd>,
) -> Vec<NodeClock> {
    let mut clocks: Vec<Option<NodeClock>> = vec![None; realtime.len()];
    for root in 0..realtime.len() {
        if clocks[root].is_some() {
            continue;
        }
        let refused = if root == 0 {
            String::new()
        } else {
            format!("no collective is common to it and {}: its realtime clock is used", realtime[0].0)
        };
        let (node, map) = realtime[root].clone();
        clocks[root] = Some(NodeClock { node, map, aligned_with: None, residual: None, realtime_error_ns: 0, refused });
        let mut level = vec![root];
        while !level.is_empty() {
            let mut next = Vec::new();
            for node in 0..realtime.len() {
                if clocks[node].is_some() {
                    continue;
                }
                // Among the aligned nodes that are closest to the reference, the one with most
                // ends.
                let ends = level.iter().map(|parent| (*parent, ends_of(node, *parent)));
                let Some((parent, ends)) = ends.max_by_key(|(_, ends)| ends.len()) else { continue };
                let (Some((map, residual)), Some(there)) = (fit(&ends), &clocks[parent]) else { continue };
                let map = map.then(&there.map);
                let (name, own) = &realtime[node];
                let aligned = NodeClock {
                    node: name.clone(),
                    map,
                    aligned_with: Some(there.node.clone()),
                    residual: Some(residual),
                    realtime_error_ns: own.apply(map.pivot_ns).wrapping_sub(map.apply(map.pivot_ns)) as i64,
                    refused: there.refused.clone(),
                };
                next.push((node, aligned));
            }
            level = next.iter().map(|(node, _)| *node).collect();
            next.into_iter().for_each(|(node, clock)| clocks[node] = Some(clock));
        }
    }
    clocks.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: f64 = 1e9;

    /// The reading of a clock with this offset and drift at a true moment.
    fn shows(true_ns: f64, offset_ns: f64, drift: f64) -> f64 {
        true_ns * (1.0 + drift) + offset_ns
    }

    /// Ends of one collective each millisecond for a minute, as two clocks show them: with noise of
    /// both detections, ends that one rank notices late, and operations that are lost.
    fn ends(random: &mut fastrand::Rng, here: (f64, f64), there: (f64, f64)) -> Vec<CommonEnd> {
        let mut ends = Vec::new();
        for index in 0..2000_u32 {
            if random.u32(..10) == 0 {
                continue;
            }
            let at = 1000.0 * SECOND + f64::from(index) * 30e6;
            let mut late = || {
                let usual = random.f64() * 40e3;
                if random.u32(..20) == 0 { usual + random.f64() * 50e6 } else { usual }
            };
            let (here_late, there_late) = (late(), late());
            ends.push(CommonEnd {
                here_ns: shows(at + here_late, here.0, here.1) as u64,
                there_ns: shows(at + there_late, there.0, there.1) as u64,
            });
        }
        ends
    }

    /// Median of the errors of a map over the minute.
    fn error_us(map: &ClockMap, here: (f64, f64), there: (f64, f64)) -> f64 {
        let errors = (0..600).map(|index| {
            let at = 1000.0 * SECOND + f64::from(index) * 1e8;
            let mapped = map.apply(shows(at, here.0, here.1) as u64) as f64;
            (mapped - shows(at, there.0, there.1)).abs() / 1e3
        });
        median(errors.collect())
    }

    #[test]
    fn a_minute_of_offset_and_50_ppm_are_found_to_50_us() {
        let mut random = fastrand::Rng::with_seed(7);
        for (offset, drift) in [(0.0, 0.0), (60.0, 50e-6), (-60.0, -50e-6), (11.56, 3e-6), (0.000_2, 50e-6)] {
            let (here, there) = ((offset * SECOND, drift), (0.0, 0.0));
            let (map, residual) = fit(&ends(&mut random, here, there)).unwrap();
            assert!(error_us(&map, here, there) < 20.0, "{offset} s, {drift}: {map:?} {residual:?}");
            assert!(residual.median_us < 30.0 && residual.p99_us > residual.median_us, "{residual:?}");
            assert!(residual.outliers > 50, "{residual:?}");
        }
    }

    #[test]
    fn few_ends_give_an_offset_only_and_fewer_none() {
        let end = |at: u64| CommonEnd { here_ns: at, there_ns: at + 5_000_000_000 };
        assert!(fit(&[end(1), end(2)]).is_none());
        let (map, _) = fit(&[end(10_000), end(20_000), CommonEnd { here_ns: 30_000, there_ns: 99 }]).unwrap();
        assert_eq!((map.drift, map.apply(70_000)), (0.0, 5_000_070_000));
    }

    #[test]
    fn nodes_are_aligned_through_chains_and_a_stranger_is_refused() {
        let mut random = fastrand::Rng::with_seed(3);
        let clocks = [(5.0 * SECOND, 0.0), (-40.0 * SECOND, 40e-6), (60.0 * SECOND, -50e-6), (9.0 * SECOND, 1e-6)];
        let shift = |ns: i64| ClockMap { offset_ns: ns, ..ClockMap::default() };
        let realtime: Vec<(String, ClockMap)> =
            (0..4).map(|node| (format!("node-{node}"), shift(1_000_000_000_000 * node))).collect();
        // 0 - 1 - 2, and 3 alone.
        let aligned = align(&realtime, |here, there| match (here, there) {
            (1, 0) | (2, 1) => ends(&mut random, clocks[here], clocks[there]),
            _ => Vec::new(),
        });
        assert_eq!(aligned[2].aligned_with.as_deref(), Some("node-1"));
        for node in 0..3 {
            let error = error_us(&aligned[node].map, clocks[node], clocks[0]);
            assert!(error < 50.0, "node {node}: {error} us");
            assert!(aligned[node].refused.is_empty());
        }
        assert!(aligned[3].refused.contains("no collective is common to it and node-0"));
        assert_eq!(aligned[3].map, realtime[3].1);
    }
}
