//! Verdicts that show no hang on dumps that nobody requested: log lines, kept captures, and what
//! becomes of these when the job hangs, dies or ends.

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use xpu_timer_tests::{Incident, Job, PATIENCE, Process, artifacts, http, wait_until};

use super::{
    busy_job, count,
    fake::{FakeHook, collector, metrics},
    wait_ranks,
};

/// Number of captures that are kept of a job.
const KEPT: usize = 3;

/// `/incidents`, with the mild captures if `all`.
fn listed(job: &Job, all: bool) -> Vec<String> {
    let path = if all { "/incidents?all=true" } else { "/incidents" };
    let (code, body) = http("GET", job.port, path).expect("an answer");
    assert_eq!(code, 200, "{body}");
    let list: Vec<Value> = serde_json::from_str(&body).expect("JSON");
    list.iter().map(|one| one["incident"].as_str().expect("a name").to_string()).collect()
}

fn names(incidents: &[Incident]) -> Vec<String> {
    incidents.iter().map(|one| one.verdict["incident"].as_str().expect("a name").to_string()).collect()
}

fn command(job: &Job, arguments: &[&str]) -> String {
    let mut command = job.command(artifacts().bin("xpu_timer_collector"));
    let output = Process::spawn(command.arg("incidents").args(arguments)).wait(PATIENCE);
    assert_eq!(output.code(), 0, "{}", output.stderr);
    output.stdout
}

fn wait_captures(job: &Job, collector: &Process, number: usize) {
    wait_until(PATIENCE, &format!("{number} mild captures"), || {
        assert!(job.incidents().is_empty(), "{}", collector.stderr());
        collector.stderr().matches("shows no hang").count() >= number
    });
}

#[test]
fn mild_captures_are_kept_and_become_incidents_when_the_job_hangs() {
    let job = Job::new();
    let collector = collector(&job, &[]);
    let mut hooks = busy_job(&job, 1000);
    wait_captures(&job, &collector, KEPT + 1);
    let kept = names(&job.mild_captures());
    assert_eq!(kept.len(), KEPT, "{}", collector.stderr());
    assert!(listed(&job, false).is_empty() && listed(&job, true) == kept);
    assert!(command(&job, &[]).starts_with("no incidents") && command(&job, &["list", "--all"]).contains(&kept[0]));
    assert!(command(&job, &["show", &kept[0]]).contains("cause:       not_a_hang"));
    let page = metrics(&job);
    for line in ["xpu_timer_incidents_total 0\n", "xpu_timer_incidents_open 0\n"] {
        assert!(page.contains(line), "{page}");
    }
    assert!(!job.dir.join("timeline/latest").exists());

    hooks[0].grow_old(60);
    let incident = job.wait_incident(1, PATIENCE);
    assert_ne!(incident.verdict["hang"], "none", "{}", incident.verdict);
    let promoted = job.promoted_captures();
    assert_eq!(promoted.len(), KEPT, "{}", collector.stderr());
    assert_eq!(incident.verdict["earlier"], json!(names(&promoted)));
    let reason = format!("the job hung later (incident {})", incident.verdict["incident"].as_str().expect("a name"));
    assert!(promoted.iter().all(|one| one.verdict["promoted"] == reason.as_str() && one.verdict["hang"] == "none"));
    let shown = command(&job, &["show", "--", incident.verdict["incident"].as_str().expect("a name")]);
    assert!(shown.contains("(captures without a hang)"), "{shown}");
    assert!(job.mild_captures().is_empty(), "{}", collector.stderr());
    let all = [names(&promoted), names(&[incident])].concat();
    assert_eq!((listed(&job, false), listed(&job, true)), (all.clone(), all));
    wait_until(PATIENCE, "the captures have reports", || {
        job.promoted_captures().iter().all(|one| one.path.join("report.html").exists())
    });
    // The report of the hang links them by the names of their folders.
    let (code, _) = http("GET", job.port, &format!("/incidents/incident-{}/report.html", names(&promoted)[0])).unwrap();
    assert_eq!(code, 200);
    assert!(metrics(&job).contains("xpu_timer_incidents_total 1\n"));
}

#[test]
fn mild_captures_become_incidents_when_the_job_dies_and_not_when_it_ends() {
    for dies in [true, false] {
        let job = Job::new();
        let collector = collector(&job, &[]);
        let mut hooks = busy_job(&job, 1000);
        wait_captures(&job, &collector, 1);
        for hook in &mut hooks {
            if dies {
                hook.kill(Signal::SIGABRT);
            } else {
                hook.tell("polite");
                hook.goodbye();
                hook.kill(Signal::SIGTERM);
            }
            hook.wait();
        }
        if dies {
            wait_until(PATIENCE, "the captures are incidents", || !job.promoted_captures().is_empty());
            let promoted = job.promoted_captures();
            let reason = promoted[0].verdict["promoted"].as_str().expect("a reason");
            assert!(reason.contains("the job died later: rank") && reason.contains("SIGABRT"), "{reason}");
            assert!(job.incidents().is_empty(), "the end of a whole job is not an incident");
        } else {
            wait_ranks(&job, "left", 2);
            // Two turns of the collector later.
            let uptime = || job.status().ok().and_then(|status| status["uptime_s"].as_f64()).unwrap_or_default();
            let ended = uptime();
            wait_until(PATIENCE, "the collector has looked", || uptime() > ended + 3.0);
            assert!(job.promoted_captures().is_empty() && !job.mild_captures().is_empty(), "{}", collector.stderr());
        }
    }
}

#[test]
fn an_idle_job_has_captures_no_incident_and_a_line_in_the_status() {
    let job = Job::new();
    let collector = collector(&job, &[]);
    let mut hook = FakeHook::start(&job, "", -1, 0);
    hook.hello.idle_timeout_ms = 1000;
    hook.join(&job);
    wait_until(PATIENCE, "more captures than are kept, and no more than the limit of incidents", || {
        collector.stderr().matches(" is idle. ").count() > KEPT + 2
    });
    assert!(job.incidents().is_empty() && job.mild_captures().len() == KEPT, "{}", collector.stderr());
    assert_eq!(count(&job, "incidents", |_| true), 0);
    let status = job.status().expect("/status");
    let process = &status["idle"][0]["processes"][0];
    assert_eq!((&process["rank"], &process["pid"]), (&json!(-1), &json!(hook.pid())), "{status:#}");
    assert!(process["title"].as_str().is_some_and(|title| title.starts_with("python")), "{status:#}");
    assert_eq!(process["command"], "fake rank -1");
    let label = format!("pid=\"{}\",process=\"python", hook.pid());
    assert!(metrics(&job).contains(&label), "{}", metrics(&job));
    assert!(collector.stderr().contains(&format!("process {} (fake rank -1)", hook.pid())), "{}", collector.stderr());
    assert!(metrics(&job).contains("xpu_timer_incidents_total 0\n"));
}
