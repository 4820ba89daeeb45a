//! `/status`: ranks, incidents and problems of a node as JSON.

use serde_json::{Value, json};
use xpu_timer_proto::{ring::header, secrets};

use crate::{
    incident::{IdleJob, State, engine::Incident, records::WithoutFolder},
    job::JobKey,
    node::{registry::Rank, state::NodeState},
    os::clock::{self, Now},
};

/// The complete page.
#[must_use]
pub(super) fn status(state: &NodeState, now: Now) -> Value {
    let mut ranks: Vec<&Rank> = state.registry.ranks().collect();
    ranks.sort_by_key(|rank| (&rank.job, rank.info.attempt, rank.info.rank, rank.id));
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "supervisor": state.supervisor,
        "node": state.node,
        "socket": state.settings.socket,
        "control_port": state.settings.control_port,
        "metrics_port": state.settings.metrics_port,
        "uptime_s": clock::seconds(now.mono_ns.saturating_sub(state.started.mono_ns)),
        "ranks": ranks.into_iter().map(|entry| rank(state, entry, now)).collect::<Vec<_>>(),
        "idle": state.idle.iter().map(|(job, found)| idle(state, job, found, now)).collect::<Vec<_>>(),
        "incidents": state
            .engine
            .incidents()
            .filter(|entry| state.is_in_view(entry))
            .map(|entry| incident(state, entry))
            .collect::<Vec<_>>(),
        "slow_ranks": state.slow.json(),
        "cluster": state.settings.cluster.as_ref().map(|url| json!({
            "url": secrets::text(url),
            "joined": state.member.welcomed,
            "problem": state.member.problem,
        })),
        "captures_not_ended": state.captures.given_up(),
        "problems": state.problems,
    })
}

fn idle(state: &NodeState, job: &JobKey, idle: &IdleJob, now: Now) -> Value {
    let processes = state.registry.of_job(job).into_iter().filter(|rank| rank.has_process()).map(|rank| {
        json!({
            "rank": rank.info.rank,
            "pid": rank.pid(),
            "title": rank.process_title(),
            "command": rank.info.command,
        })
    });
    let mut entry = idle.json(job, now);
    entry["processes"] = processes.collect();
    entry
}

fn rank(state: &NodeState, rank: &Rank, now: Now) -> Value {
    let words = rank.ring.as_ref().and_then(|ring| ring.header().ok());
    let word = |index: usize| words.map(|words| words[index]);
    let age = |index: usize| {
        word(index).filter(|time| *time > 0).map(|time| clock::seconds(now.mono_ns.saturating_sub(time)))
    };
    json!({
        "job": rank.job.to_string(),
        "attempt": rank.info.attempt,
        "rank": rank.info.rank,
        "local_rank": rank.info.local_rank,
        "world_size": rank.info.world_size,
        "pid": rank.pid(),
        "title": rank.process_title(),
        "presence": rank.presence.name(),
        "lingers": rank.lingers,
        "auxiliary": rank.auxiliary,
        "exit": rank.exit,
        "hang": state.is_hanging(rank),
        "heartbeat_age_s": age(header::HEARTBEAT_NS),
        "last_launch_age_s": age(header::LAST_LAUNCH_NS),
        "kernels": word(header::KERNELS),
        "graphs": word(header::GRAPHS),
        "collectives": word(header::COLLECTIVES),
        "dropped": word(header::DROPPED),
        "panics": word(header::PANICS),
        "timeline_path": rank.settings.timeline_path,
        "command": rank.info.command,
    })
}

/// Incidents without a folder, or with a folder that lacks the verdict.
#[must_use]
pub(super) fn without_folder(state: &NodeState) -> Vec<WithoutFolder> {
    let done = state.engine.incidents().filter(|incident| incident.state != State::Open && state.is_shown(incident));
    let report = done.filter_map(|incident| Some((incident, state.reports.get(&incident.head.id)?)));
    let without_folder = report.filter(|(_, report)| report.path.is_none() || report.verdict.is_some());
    without_folder
        .map(|(incident, report)| {
            let status = incident.state.status();
            let closed_unix_ns = incident.closed.map(|closed| closed.unix_ns);
            let verdict = report.verdict.as_deref();
            WithoutFolder::new(
                &incident.head.id,
                &incident.head.job,
                status,
                incident.head.opened,
                closed_unix_ns,
                verdict,
            )
        })
        .collect()
}

fn incident(state: &NodeState, incident: &Incident) -> Value {
    let report = state.reports.get(&incident.head.id).cloned().unwrap_or_default();
    json!({
        "incident": incident.head.id,
        "job": incident.head.job.to_string(),
        "attempt": incident.head.attempt,
        "state": incident.state,
        "opened_at": clock::rfc3339(incident.head.opened.unix_ns),
        "closed_at": incident.closed.map(|closed| clock::rfc3339(closed.unix_ns)),
        "path": report.path,
        "written": report.verdict.is_none() && report.path.is_some(),
        "cause": report.cause,
        "sentence": report.sentence,
        "errors": report.errors,
    })
}
