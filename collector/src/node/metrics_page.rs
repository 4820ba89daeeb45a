//! `/metrics`: the Prometheus text format. Only measured values appear.
//!
//! The names in capitals, their labels and their levels come from the original tool; its dashboards
//! and DLRover's master read them. The `xpu_timer_*` names are ours. The kernel metrics come from
//! the ranks' rings, the counts of garbage collections and batches from the memory of their
//! interpreters ([`metrics::sampler`](crate::metrics::sampler)). Both cost the ranks nothing.

use std::collections::BTreeMap;

use xpu_timer_proto::ring::{header, lane};

use crate::{
    incident::{State, engine::Incident},
    metrics::{
        Labels, Page,
        meaning::{Family, Key},
        sampler::Sampled,
        series::{HostFunction, Values},
    },
    node::{registry::Rank, state::NodeState},
    os::clock::Now,
};

/// The complete page.
#[must_use]
pub(super) fn text(state: &NodeState, now: Now) -> String {
    let mut page = Page::default();
    let ranks: Vec<&Rank> = state.registry.living_jobs().iter().flat_map(|job| state.registry.of_job(job)).collect();
    let alive = labelled(state, ranks.into_iter().filter(|rank| rank.presence.is_alive()));
    common(&mut page, state, &alive);
    let sampled = |(labels, rank): &(Labels, &Rank)| Some((labels.clone(), state.sampler.of(rank.id)?));
    let seen: Vec<(Labels, &Sampled)> = alive.iter().filter_map(sampled).collect();
    kernels(&mut page, &seen);
    host_functions(&mut page, &seen);
    memory(&mut page, &seen);
    slow(&mut page, state, &alive);
    hook(&mut page, &seen);
    collector(&mut page, state, alive.len(), now);
    page.text()
}

/// How long the dump of an incident took, rounded up; `None` while it is in progress.
fn dump_seconds(incident: &Incident) -> Option<u64> {
    let dumped_ns = incident.dumped?.mono_ns.saturating_sub(incident.head.opened.mono_ns);
    Some(dumped_ns.div_ceil(1_000_000_000).max(1))
}

/// The metrics of every rank.
fn common(page: &mut Page, state: &NodeState, alive: &[(Labels, &Rank)]) {
    let newest = |rank: &Rank| {
        let of_job = |incident: &&Incident| {
            incident.head.job == rank.job && incident.closed.is_none() && state.is_in_view(incident)
        };
        state.engine.incidents().rev().find(of_job)
    };
    let begun = |rank: &Rank| Some(u64::from(newest(rank).is_some()));
    let ended = |rank: &Rank| Some(newest(rank).and_then(dump_seconds).unwrap_or(0));
    let spare = |rank: &Rank| Some(state.sampler.of(rank.id)?.head?[header::SPARE_EVENTS]);
    let pending = |rank: &Rank| Some(state.sampler.of(rank.id)?.cursor.pending() as u64);
    let hangs = |rank: &Rank| Some(u64::from(state.is_hanging(rank)));
    let collections = |rank: &Rank| Some(state.sampler.interpreters.of(rank.id)?.collections);
    let batches = |rank: &Rank| state.sampler.interpreters.of(rank.id)?.batches;
    let per_rank: [PerRank<'_>; 7] = [
        (
            "XPU_TIMER_COMMON_HANG",
            "1 while the newest verdict says that this rank hangs, as a culprit or a victim.",
            &hangs,
        ),
        ("XPU_TIMER_COMMON_START_DUMP", "1 once the dump of an open incident has begun.", &begun),
        (
            "XPU_TIMER_COMMON_END_DUMP",
            "Seconds that the dump of an open incident took; 0 until it is finished.",
            &ended,
        ),
        ("XPU_TIMER_COMMON_POOL_QUEUE_SIZE", "Events that the hook keeps for reuse.", &spare),
        ("XPU_TIMER_COMMON_WORK_QUEUE_SIZE", "Operations launched and not completed.", &pending),
        ("XPU_TIMER_COMMON_GC_COUNT", "Garbage collections of Python, of all generations.", &collections),
        (
            "XPU_TIMER_COMMON_DATA_LOADER_COUNT",
            "Batches that PyTorch's data loaders have yielded; batches after the last sample of an iterator that has ended are missing.",
            &batches,
        ),
    ];
    for (name, help, value) in per_rank {
        page.family(name, "gauge", help);
        for (labels, rank) in alive {
            if let Some(value) = value(rank) {
                page.sample(name, labels, value);
            }
        }
        // DLRover's master treats a page without a line of this name as one on which every rank
        // hangs.
        if name.ends_with("_HANG") && alive.is_empty() {
            page.sample(name, &node_labels(state), 0);
        }
    }
}

/// Name, help and value of a gauge that every rank has.
type PerRank<'a> = (&'static str, &'static str, &'a dyn Fn(&Rank) -> Option<u64>);

/// Latency and performance of collectives and matrix products.
fn kernels(page: &mut Page, seen: &[(Labels, &Sampled)]) {
    type Part = (&'static str, &'static str, fn(&Values) -> f64);
    const LATENCIES: [Part; 4] = [
        ("AVG_LATENCY", "Average device time in microseconds.", |values| values.average),
        ("MAX_LATENCY", "Longest device time in microseconds.", |values| values.max),
        ("P99_LATENCY", "99th percentile of the device time in microseconds.", |values| values.p99),
        ("MIN_LATENCY", "Shortest device time in microseconds.", |values| values.min),
    ];
    const BANDWIDTH: Part = ("BANDWIDTH", "Bus bandwidth in Gbps.", |values| values.performance);
    const FLOPS: Part = ("FLOPS", "TFLOPS.", |values| values.performance);
    for (prefix, family, last) in
        [("XPU_TIMER_COLL_KERNEL_", Family::Collective, BANDWIDTH), ("XPU_TIMER_MM_KERNEL_", Family::Matmul, FLOPS)]
    {
        for (suffix, help, value) in LATENCIES.into_iter().chain([last]) {
            let name = format!("{prefix}{suffix}");
            page.family(&name, "gauge", help);
            for (labels, sampled) in seen {
                for (key, values) in sampled.series.published().filter(|(key, _)| key.family == family) {
                    page.sample(&name, &with(labels, key), rounded(value(&values)));
                }
            }
        }
    }
}

/// Traced Python functions. Without any, the page has no such family.
fn host_functions(page: &mut Page, seen: &[(Labels, &Sampled)]) {
    type Value = fn(&HostFunction) -> Option<f64>;
    const FAMILIES: [(&str, &str, &str, Value); 4] = [
        (
            "xpu_timer_host_function_calls_total",
            "counter",
            "Calls of a traced Python function that have ended.",
            |of| Some(of.calls as f64),
        ),
        ("xpu_timer_host_function_seconds_total", "counter", "Time of these calls.", |of| {
            Some(of.total_ns as f64 / 1e9)
        }),
        ("xpu_timer_host_function_avg_seconds", "gauge", "Average time of these calls.", |of| {
            Some(of.latency_ns?.0 / 1e9)
        }),
        ("xpu_timer_host_function_max_seconds", "gauge", "Longest of these calls.", |of| {
            Some(of.latency_ns?.1 as f64 / 1e9)
        }),
    ];
    if seen.iter().all(|(_, sampled)| sampled.traced.called().next().is_none()) {
        return;
    }
    for (name, kind, help, value) in FAMILIES {
        page.family(name, kind, help);
        for (labels, sampled) in seen {
            for function in sampled.traced.called() {
                let Some(value) = value(function) else { continue };
                let labels: Labels = labels.iter().cloned().chain([("function", function.name.clone())]).collect();
                page.sample(name, &labels, value);
            }
        }
    }
}

fn with(labels: &Labels, key: &Key) -> Labels {
    labels.iter().cloned().chain(key.labels()).collect()
}

/// More digits than the clock has are noise.
fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

/// Calls that copy, allocate and free memory.
fn memory(page: &mut Page, seen: &[(Labels, &Sampled)]) {
    let name = "XPU_TIMER_MEMORY_COUNTER";
    page.family(name, "gauge", "Calls of functions that copy, allocate or free memory, since the start of the rank.");
    for (labels, sampled) in seen {
        let called = |part: &'static str| {
            sampled.functions.iter().filter(move |function| function.calls > 0 && function.name.contains(part))
        };
        for function in ["Malloc", "HostAlloc", "Free"].into_iter().flat_map(called) {
            let mut labels = labels.clone();
            labels.push(("operation", function.name.clone()));
            page.sample(name, &labels, function.calls);
        }
        // The directions are counted over all forms of the copy function.
        let Some(copy) = called("MemcpyAsync").next().or_else(|| called("Memcpy").next()) else { continue };
        for (kind, count) in lane::COPY_KINDS.iter().zip(sampled.totals.copies).filter(|(_, count)| *count > 0) {
            let mut labels = labels.clone();
            labels.extend([("operation", copy.name.replace("_ptsz", "")), ("kind", kind.to_string())]);
            page.sample(name, &labels, count);
        }
    }
}

/// The ranks of this node that wait, and the ranks that they wait for.
fn slow(page: &mut Page, state: &NodeState, alive: &[(Labels, &Rank)]) {
    type Value<'a> = &'a dyn Fn(&Rank, u32) -> Option<f64>;
    let families: [(&str, &str, Value<'_>); 2] = [
        (
            "xpu_timer_rank_wait_ratio",
            "Share of the time that the rank waits for others in collectives.",
            &|rank, number| state.slow.waits(&rank.job, number).map(rounded),
        ),
        (
            "xpu_timer_rank_slow",
            "1 for a rank that the others wait for in most of its collectives.",
            &|rank, number| state.slow.is_slow(&rank.job, number).map(|slow| f64::from(u8::from(slow))),
        ),
    ];
    for (name, help, value) in families {
        page.family(name, "gauge", help);
        for (labels, rank) in alive {
            if let Some(value) = u32::try_from(rank.info.rank).ok().and_then(|number| value(rank, number)) {
                page.sample(name, labels, value);
            }
        }
    }
}

/// The counters of the hooks, and their cost.
fn hook(page: &mut Page, seen: &[(Labels, &Sampled)]) {
    let word = |index: usize| move |sampled: &Sampled| sampled.head.map(|head| head[index] as f64);
    let mean = |samples: (u64, u64)| (samples.0 > 0).then(|| samples.1 as f64 / samples.0 as f64 / 1e9);
    type Value<'a> = &'a dyn Fn(&Sampled) -> Option<f64>;
    let families: [(&str, &str, &str, Value<'_>); 9] = [
        ("xpu_timer_kernels_launched_total", "counter", "Kernels launched.", &word(header::KERNELS)),
        ("xpu_timer_graphs_launched_total", "counter", "Graphs launched.", &word(header::GRAPHS)),
        ("xpu_timer_collectives_launched_total", "counter", "Collectives launched.", &word(header::COLLECTIVES)),
        (
            "xpu_timer_operations_dropped_total",
            "counter",
            "Operations without a slot in the ring.",
            &word(header::DROPPED),
        ),
        (
            "xpu_timer_operations_missed_total",
            "counter",
            "Upper bound of the operations that began and completed between two samples; unused tickets count too.",
            &|sampled| Some(sampled.cursor.missed as f64),
        ),
        ("xpu_timer_hook_panics_total", "counter", "Panics caught in the hook; should be 0.", &word(header::PANICS)),
        ("xpu_timer_allocated_bytes_total", "counter", "Bytes of memory requested.", &|sampled| {
            Some(sampled.totals.allocated_bytes as f64)
        }),
        ("xpu_timer_hook_launch_seconds", "gauge", "Average own time of the hook in one launch.", &|sampled| {
            mean(sampled.totals.launch_cost)
        }),
        ("xpu_timer_hook_collective_seconds", "gauge", "Average own time of the hook in one collective.", &|sampled| {
            mean(sampled.totals.collective_cost)
        }),
    ];
    for (name, kind, help, value) in families {
        page.family(name, kind, help);
        for (labels, sampled) in seen {
            if let Some(value) = value(sampled) {
                page.sample(name, labels, value);
            }
        }
    }
    let name = "xpu_timer_copied_bytes_total";
    page.family(name, "counter", "Bytes copied, by direction.");
    for (labels, sampled) in seen {
        for (kind, bytes) in lane::COPY_KINDS.iter().zip(sampled.totals.copy_bytes).filter(|(_, bytes)| *bytes > 0) {
            let mut labels = labels.clone();
            labels.push(("kind", kind.to_string()));
            page.sample(name, &labels, bytes);
        }
    }
}

/// The metrics of the collector itself.
fn collector(page: &mut Page, state: &NodeState, ranks: usize, now: Now) {
    let is_open = |one: &&Incident| matches!(one.state, State::Open | State::Dumped) && state.is_shown(one);
    let open = state.engine.incidents().filter(is_open).count();
    let uptime = now.mono_ns.saturating_sub(state.started.mono_ns) / 1_000_000_000;
    page.family("xpu_timer_build_info", "gauge", "Version of the collector; always 1.");
    page.sample("xpu_timer_build_info", &[("version", env!("CARGO_PKG_VERSION").to_string())], 1);
    page.family("xpu_timer_ranks", "gauge", "Ranks that run.");
    page.sample("xpu_timer_ranks", &[], ranks);
    page.family("xpu_timer_incidents_total", "counter", "Incidents opened by this collector.");
    page.sample("xpu_timer_incidents_total", &[], state.opened);
    page.family("xpu_timer_incidents_open", "gauge", "Incidents that last.");
    page.sample("xpu_timer_incidents_open", &[], open);
    page.family("xpu_timer_timeline_bytes", "gauge", "Memory of the recorded operations of all ranks.");
    page.sample("xpu_timer_timeline_bytes", &[], state.sampler.timeline.bytes());
    page.family("xpu_timer_uptime_seconds", "gauge", "Seconds since the start of the collector.");
    page.sample("xpu_timer_uptime_seconds", &[], uptime);
}

const UNKNOWN: &str = "NOT_SET";

fn labels(state: &NodeState, rank: &Rank) -> Labels {
    let or = |value: &str, default: &str| if value.is_empty() { default.to_string() } else { value.to_string() };
    vec![
        ("ip", or(&rank.info.ip, &state.settings.ip)),
        ("job_name", or(&rank.info.job, UNKNOWN)),
        ("pod_name", or(&rank.info.pod_name, &state.settings.node)),
        ("rank", rank.info.rank.to_string()),
        ("local_rank", rank.info.local_rank.to_string()),
    ]
}

/// The labels of each rank. A process that does not know its rank is named by its pid and title.
/// Its command may contain private paths, and every local user can read the page. Jobs of one name
/// would share labels, and a page must not have two samples with equal labels: their ranks get the
/// pid as well.
fn labelled<'a>(state: &NodeState, ranks: impl Iterator<Item = &'a Rank>) -> Vec<(Labels, &'a Rank)> {
    let mut all: Vec<(Labels, &Rank)> = ranks.map(|rank| (labels(state, rank), rank)).collect();
    let mut count: BTreeMap<Labels, usize> = BTreeMap::new();
    for (labels, _) in &all {
        *count.entry(labels.clone()).or_default() += 1;
    }
    for (labels, rank) in &mut all {
        let is_unnamed = rank.info.rank < 0;
        if is_unnamed || count.get(labels).is_some_and(|count| *count > 1) {
            labels.push(("pid", rank.pid().to_string()));
        }
        if let Some(title) = rank.process_title().filter(|_| is_unnamed) {
            labels.push(("process", title));
        }
    }
    all
}

/// Labels of a node without a running rank.
fn node_labels(state: &NodeState) -> Labels {
    vec![
        ("ip", state.settings.ip.clone()),
        ("job_name", UNKNOWN.into()),
        ("pod_name", state.settings.node.clone()),
        ("rank", "-1".into()),
        ("local_rank", "-1".into()),
    ]
}
