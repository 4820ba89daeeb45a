//! `/metrics`: the Prometheus text format. Only what is measured is there.

use std::fmt::Write;

use crate::{
    clock::Now,
    core::Core,
    incident::{Incident, State},
    registry::Rank,
};

/// The whole page.
#[must_use]
pub fn text(core: &Core, now: Now) -> String {
    let mut page = Page::default();
    let ranks: Vec<&Rank> = core.registry.jobs().iter().flat_map(|job| core.registry.of_job(job)).collect();
    let alive: Vec<&Rank> = ranks.iter().copied().filter(|rank| rank.presence.is_alive()).collect();
    let newest = |rank: &Rank| {
        let of_job = |incident: &&Incident| incident.job == rank.job && incident.closed.is_none();
        core.engine.incidents().rev().find(of_job)
    };
    let begun = |rank: &Rank| newest(rank).is_some();
    let ended = |rank: &Rank| newest(rank).is_some_and(|incident| incident.dumped.is_some());
    let per_rank: [PerRank<'_>; 3] = [
        ("XPU_TIMER_COMMON_HANG", "1 while the job of this rank hangs.", &|rank| core.engine.hangs(&rank.job)),
        ("XPU_TIMER_COMMON_START_DUMP", "1 once the dump of an open incident has begun.", &begun),
        ("XPU_TIMER_COMMON_END_DUMP", "1 once the dump of an open incident is finished.", &ended),
    ];
    for (name, help, value) in per_rank {
        page.family(name, "gauge", help);
        for rank in &alive {
            page.sample(name, &labels(core, rank), u64::from(value(rank)));
        }
    }

    page.family("xpu_timer_build_info", "gauge", "Version of the collector; always 1.");
    page.sample("xpu_timer_build_info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
    page.family("xpu_timer_ranks", "gauge", "Ranks that run.");
    page.sample::<&str>("xpu_timer_ranks", &[], alive.len() as u64);
    page.family("xpu_timer_incidents_total", "counter", "Incidents opened by this collector.");
    page.sample::<&str>("xpu_timer_incidents_total", &[], core.opened);
    page.family("xpu_timer_incidents_open", "gauge", "Incidents that last.");
    let open = core.engine.incidents().filter(|one| matches!(one.state, State::Open | State::Dumped)).count();
    page.sample::<&str>("xpu_timer_incidents_open", &[], open as u64);
    page.family("xpu_timer_uptime_seconds", "gauge", "Since the start of the collector.");
    page.sample::<&str>(
        "xpu_timer_uptime_seconds",
        &[],
        now.mono_ns.saturating_sub(core.started.mono_ns) / 1_000_000_000,
    );
    page.0
}

/// Name, help and value of a gauge that every rank has.
type PerRank<'a> = (&'static str, &'static str, &'a dyn Fn(&Rank) -> bool);

fn labels(core: &Core, rank: &Rank) -> [(&'static str, String); 5] {
    let or = |value: &str, default: &str| if value.is_empty() { default.to_string() } else { value.to_string() };
    [
        ("ip", or(&rank.info.ip, &core.settings.ip)),
        ("job_name", or(&rank.info.job, "NOT_SET")),
        ("pod_name", or(&rank.info.node, &core.settings.node)),
        ("rank", rank.info.rank.to_string()),
        ("local_rank", rank.info.local_rank.to_string()),
    ]
}

#[derive(Default)]
struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing into a String cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample<T: AsRef<str>>(&mut self, name: &str, labels: &[(&str, T)], value: u64) {
        let list: Vec<String> =
            labels.iter().map(|(label, text)| format!("{label}=\"{}\"", escape(text.as_ref()))).collect();
        let braces = if list.is_empty() { String::new() } else { format!("{{{}}}", list.join(",")) };
        let _ = writeln!(self.0, "{name}{braces} {value}");
    }
}

/// Backslash, quote and newline are what the format escapes in a label value.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_are_escaped() {
        let mut page = Page::default();
        page.sample("m", &[("job_name", "a\"b\\c\nd")], 1);
        assert_eq!(page.0, "m{job_name=\"a\\\"b\\\\c\\nd\"} 1\n");
    }
}
