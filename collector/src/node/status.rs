//! `/status`: ranks, incidents and problems of a node as JSON.

use serde_json::{Value, json};
use xpu_timer_analysis::Status;
use xpu_timer_proto::{ring::header, secrets};

use crate::{
    incident::{
        engine::{Incident, State},
        records::WithoutFolder,
    },
    node::{registry::Rank, state::Core},
    os::clock::{self, Now},
};

/// The whole page.
#[must_use]
pub fn status(core: &Core, now: Now) -> Value {
    let mut ranks: Vec<&Rank> = core.registry.ranks().collect();
    ranks.sort_by_key(|rank| (&rank.job, rank.info.attempt, rank.info.rank, rank.id));
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "supervisor": core.supervisor,
        "node": core.node,
        "socket": core.settings.socket,
        "control_port": core.settings.control_port,
        "metrics_port": core.settings.metrics_port,
        "uptime_s": clock::seconds(now.mono_ns.saturating_sub(core.started.mono_ns)),
        "ranks": ranks.into_iter().map(|entry| rank(core, entry, now)).collect::<Vec<_>>(),
        "incidents": core.engine.incidents().map(|entry| incident(core, entry)).collect::<Vec<_>>(),
        "slow_ranks": core.slow.json(),
        "cluster": core.settings.cluster.as_ref().map(|url| json!({
            "url": secrets::text(url),
            "joined": core.member.welcomed,
            "problem": core.member.problem,
        })),
        "captures_not_ended": core.captures.given_up(),
        "problems": core.problems,
    })
}

fn rank(core: &Core, rank: &Rank, now: Now) -> Value {
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
        "presence": rank.presence.name(),
        "lingers": rank.lingers,
        "auxiliary": rank.auxiliary,
        "exit": rank.exit,
        "hang": core.is_hanging(rank),
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

/// Incidents of which no folder could be made, or whose verdict is not in it.
#[must_use]
pub fn without_folder(core: &Core) -> Vec<WithoutFolder> {
    let done = core.engine.incidents().filter(|incident| incident.state != State::Open);
    let told = done.filter_map(|incident| Some((incident, core.told.get(&incident.id)?)));
    let homeless = told.filter(|(_, told)| told.path.is_none() || told.verdict.is_some());
    homeless
        .map(|(incident, told)| {
            let status = status_of(incident.state);
            let closed_unix_ns = incident.closed.map(|closed| closed.unix_ns);
            let verdict = told.verdict.as_deref();
            WithoutFolder::new(&incident.id, &incident.job, status, incident.opened, closed_unix_ns, verdict)
        })
        .collect()
}

/// As a verdict has it.
#[must_use]
pub fn status_of(state: State) -> Status {
    match state {
        State::Resolved => Status::Resolved,
        State::Ended => Status::Ended,
        State::Open | State::Dumped | State::Adopted => Status::Open,
    }
}

fn incident(core: &Core, incident: &Incident) -> Value {
    let told = core.told.get(&incident.id).cloned().unwrap_or_default();
    json!({
        "incident": incident.id,
        "job": incident.job.to_string(),
        "attempt": incident.attempt,
        "state": incident.state,
        "opened_at": clock::rfc3339(incident.opened.unix_ns),
        "closed_at": incident.closed.map(|closed| clock::rfc3339(closed.unix_ns)),
        "path": told.path,
        "written": told.verdict.is_none() && told.path.is_some(),
        "cause": told.cause,
        "sentence": told.sentence,
        "errors": told.errors,
    })
}
