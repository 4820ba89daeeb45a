//! `/status` and `/metrics` of the cluster collector.

use std::net::SocketAddr;

use serde_json::{Value, json};

use crate::{
    cluster::{
        engine::Engine,
        incident::{Incident, Progress},
    },
    incident::records::WithoutFolder,
    job::JobKey,
    metrics::Page,
    os::clock::{self, Now},
};

/// Nodes, jobs and incidents as JSON.
#[must_use]
pub fn status(engine: &Engine, listen: SocketAddr, now: Now) -> Value {
    let nodes: Vec<Value> = engine
        .nodes
        .iter()
        .map(|(_, node)| {
            let away = (!node.is_joined()).then(|| clock::seconds(now.mono_ns.saturating_sub(node.lost_ns)));
            json!({ "node": node.name, "joined": node.is_joined(), "away_s": away })
        })
        .collect();
    let in_view = engine.incidents.values().filter(|incident| incident.is_in_view());
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "role": "cluster",
        "listen": listen.to_string(),
        "uptime_s": clock::seconds(now.mono_ns.saturating_sub(engine.started.mono_ns)),
        "nodes": nodes,
        "jobs": engine.nodes.jobs().map(|key| job(engine, key)).collect::<Vec<_>>(),
        "idle": engine.idle.iter().map(|(job, idle)| idle.json(job, now)).collect::<Vec<_>>(),
        "slow_ranks": engine.slow.json(),
        "incidents": in_view.map(|one| incident(engine, one)).collect::<Vec<_>>(),
    })
}

/// The incidents that users see: not those whose verdict shows no hang, or is not made yet.
fn shown(engine: &Engine) -> impl Iterator<Item = &Incident> {
    engine.incidents.values().filter(|incident| !incident.may_be_mild)
}

fn job(engine: &Engine, key: &JobKey) -> Value {
    let summary = engine.nodes.job(key);
    json!({
        "job": key.to_string(),
        "attempt": summary.attempt,
        "world_size": summary.world_size,
        "ranks": summary.ranks,
        "nodes": summary.nodes.len(),
        "alive": summary.alive,
        "hang": hangs(engine, key),
    })
}

/// Whether a job hangs according to the newest verdict of an open incident, as in
/// `XPU_TIMER_COMMON_HANG` of its nodes.
fn hangs(engine: &Engine, job: &JobKey) -> bool {
    engine.incidents.values().any(|one| one.is_open() && one.is_proven && !one.by_hand && one.head.job == *job)
}

/// Incidents without a folder, because none could be made.
#[must_use]
pub fn without_folder(engine: &Engine) -> Vec<WithoutFolder> {
    let without_folder = shown(engine).filter(|incident| incident.folder.is_none());
    without_folder
        .map(|one| {
            let status = one.state.status();
            let closed_unix_ns = one.closed.map(|(_, unix_ns)| unix_ns);
            WithoutFolder::new(
                &one.head.id,
                &one.head.job,
                status,
                one.head.opened,
                closed_unix_ns,
                one.verdict.as_deref(),
            )
        })
        .collect()
}

fn incident(engine: &Engine, incident: &Incident) -> Value {
    let failed: Vec<String> = incident
        .parts
        .iter()
        .filter_map(|(node, part)| match &part.progress {
            Progress::Failed(why) => Some(format!("{} (ranks {}): {why}", engine.nodes.name(*node), part.ranks)),
            _ => None,
        })
        .collect();
    let delivered = incident.parts.values().filter(|part| part.progress == Progress::Delivered).count();
    json!({
        "incident": incident.head.id,
        "job": incident.head.job.to_string(),
        "attempt": incident.head.attempt,
        "state": incident.state,
        "opened_at": clock::rfc3339(incident.head.opened.unix_ns),
        "nodes": incident.parts.len(),
        "delivered": delivered,
        "failed": failed,
        "hanging_nodes": incident.hanging.len(),
        "path": incident.folder,
        "cause": incident.cause,
        "culprits": incident.culprits,
        "sentence": incident.sentence,
    })
}

/// The Prometheus text.
#[must_use]
pub fn metrics(engine: &Engine, now: Now) -> String {
    let mut page = Page::default();
    page.family("xpu_timer_build_info", "gauge", "Version of the collector; always 1.");
    page.sample("xpu_timer_build_info", &[("version", env!("CARGO_PKG_VERSION").into())], 1);
    page.family("xpu_timer_job_hang", "gauge", "1 while the newest verdict says that the job hangs.");
    for key in engine.nodes.jobs() {
        page.sample("xpu_timer_job_hang", &[("job_name", key.to_string())], u64::from(hangs(engine, key)));
    }
    page.family("xpu_timer_job_ranks", "gauge", "Ranks of the job that a node reports.");
    for key in engine.nodes.jobs() {
        page.sample("xpu_timer_job_ranks", &[("job_name", key.to_string())], engine.nodes.job(key).ranks);
    }
    let name = "xpu_timer_rank_slow";
    page.family(name, "gauge", "1 for a rank that the others wait for in most of its collectives.");
    for (job, rank, node) in engine.slow.iter() {
        page.sample(name, &[("job_name", job.to_string()), ("pod_name", node.into()), ("rank", rank.to_string())], 1);
    }
    let joined = engine.nodes.iter().filter(|(_, node)| node.is_joined()).count() as u64;
    let open = shown(engine).filter(|one| one.is_open()).count() as u64;
    let uptime_s = now.mono_ns.saturating_sub(engine.started.mono_ns) / 1_000_000_000;
    for (name, kind, help, value) in [
        ("xpu_timer_nodes", "gauge", "Nodes that are connected.", joined),
        ("xpu_timer_incidents_total", "counter", "Incidents opened by this collector.", engine.opened),
        ("xpu_timer_incidents_open", "gauge", "Incidents that last.", open),
        ("xpu_timer_uptime_seconds", "gauge", "Seconds since the start of the collector.", uptime_s),
    ] {
        page.family(name, kind, help);
        page.sample(name, &[], value);
    }
    page.text()
}
