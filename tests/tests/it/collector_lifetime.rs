//! How long the node collector lives, and how little it keeps: it restarts when it is killed, ends
//! with its job, and many processes that come and go leave nothing behind.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use xpu_timer_proto::{
    procfs,
    ring::{self, header},
    v1::{Goodbye, hook_message::Message},
};
use xpu_timer_tests::{Job, PATIENCE, Process, artifacts, http, python, tree, wait_until};

use crate::collector::{
    Tmpfs,
    fake::{FakeHook, collector, encode, metrics, socket_of},
};

/// Ends a process at once.
fn end(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("it runs");
}

/// Pids of a job's worker and supervisor, when the worker answers.
fn pids(job: &Job) -> Option<(i32, i32)> {
    let status = job.status().ok()?;
    Some((status["pid"].as_i64()? as i32, status["supervisor"].as_i64()? as i32))
}

/// Waits until other processes than these answer, and until both are there.
fn other_pids(job: &Job, before: (i32, i32), what: &str) -> (i32, i32) {
    let begun = Instant::now();
    loop {
        if let Some(now) = pids(job).filter(|now| *now != before) {
            return now;
        }
        let late = begun.elapsed() >= PATIENCE;
        assert!(!late, "not within {PATIENCE:?}: {what}; {:?} run\n{}", collectors(job), job.logs());
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn ranks_present(job: &Job) -> usize {
    let status = job.status().unwrap_or_default();
    status["ranks"].as_array().map_or(0, |ranks| ranks.iter().filter(|rank| rank["presence"] == "present").count())
}

/// The running processes of the collector with the job's marker.
fn collectors(job: &Job) -> Vec<i32> {
    let is_one = |pid: &i32| {
        let command = procfs::cmdline(pid).unwrap_or_default();
        command.windows(20).any(|word| word == b"xpu_timer_collector\0")
    };
    job.processes().into_iter().filter(is_one).collect()
}

#[test]
fn killing_any_xpu_timer_process_loses_no_hang_and_all_end_with_the_job() {
    let job = Job::new().with("XPU_TIMER_HANG_TIMEOUT", "3").with("XPU_TIMER_SAMPLE_INTERVAL", "1");
    let job = job.with("XPU_TIMER_LINGER", "1");
    let mut ranks = job.train(2, &["--fault=loader", "--fault-rank=1", "--fault-step=150"]);
    ranks.wait_for("step 20 ", PATIENCE);
    let first = pids(&job).expect("the collector answers");
    assert_ne!(first.0, first.1);
    let threads = fs::read_dir(format!("/proc/{}/task", first.1)).expect("it runs").count();
    assert_eq!(threads, 1, "the supervisor has no threads");

    end(first.0);
    let second = other_pids(&job, first, "another worker");
    assert_eq!(second.1, first.1, "of the same supervisor");
    end(second.1);
    let third = other_pids(&job, second, "another supervisor");
    assert_eq!(third.0, second.0, "of the same worker");
    end(third.0);
    let fourth = other_pids(&job, third, "a worker of the second supervisor");
    assert_eq!(fourth.1, third.1);

    // The collector is killed again while the job hangs, before its timeout.
    ranks.wait_for("step 140 ", PATIENCE);
    end(fourth.0);
    let incident = job.wait_incident(1, PATIENCE);
    assert_eq!(incident.verdict["cause"], "data_loader", "{}\n{}", incident.verdict, job.logs());
    assert_eq!(incident.verdict["culprits"], serde_json::json!([1]), "{}", incident.verdict);
    assert_eq!(ranks_present(&job), 2);

    // Once more now that there is a verdict: it is known, and not made again.
    let fifth = pids(&job).expect("the collector answers");
    end(fifth.0);
    let _ = other_pids(&job, fifth, "one that knows the incident");
    wait_until(PATIENCE, "the incident goes on", || {
        job.status().is_ok_and(|status| status["incidents"][0]["state"] == "dumped")
    });
    assert_eq!(job.incidents().len(), 1);
    let status = job.status().expect("it answers");
    assert_eq!(status["incidents"][0]["cause"], "data_loader", "{status}");
    let hanging = || {
        let page = metrics(&job);
        page.lines().filter(|line| line.starts_with("XPU_TIMER_COMMON_HANG{") && line.ends_with(" 1")).count()
    };
    wait_until(PATIENCE, "both ranks hang by that verdict as soon as they have registered again", || hanging() == 2);

    ranks.signal(Signal::SIGKILL);
    drop(ranks.wait(PATIENCE));
    for pid in job.processes().into_iter().filter(|pid| !collectors(&job).contains(pid)) {
        // Ranks that their launcher has left. One may have ended meanwhile.
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
    wait_until(PATIENCE, "nothing of ours is left", || job.processes().is_empty());
}

#[test]
fn a_restarted_collector_waits_for_unregistered_ranks_and_ends_on_request() {
    let job = Job::new().with("XPU_TIMER_LINGER", "1");
    let script = "echo ready; read _; :";
    let mut command = job.launch("sh");
    command.args(["-c", script]).envs([("RANK", "1"), ("WORLD_SIZE", "2"), ("XPU_TIMER_JOB", "silent")]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the launcher runs");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it says a line");
    let before = pids(&job).expect("the collector answers");
    end(before.0);
    let after = other_pids(&job, before, "another worker");
    // Longer than an unused one stays.
    let begun = Instant::now();
    wait_until(PATIENCE, "the worker has lived for three seconds", || {
        assert_eq!(pids(&job), Some(after), "it stays while the command lives\n{}", job.logs());
        begun.elapsed() > Duration::from_secs(3)
    });
    kill(Pid::from_raw(after.1), Signal::SIGTERM).expect("the supervisor runs");
    wait_until(PATIENCE, "both end", || collectors(&job).is_empty());
    assert!(!socket_of(&job).exists(), "and with them the socket");
    drop(child.stdin.take());
    child.wait().expect("the command ends");
}

#[test]
fn a_second_supervisor_leaves_the_first_collector_alone() {
    let job = Job::new();
    let mut command = job.command(artifacts().bin("xpu_timer_collector"));
    let locked = collector(&job, &[]);
    let second = Process::spawn(command.args(["node", "--supervise"])).wait(PATIENCE);
    assert_eq!((second.code(), second.stderr.contains("a collector is already running")), (0, true), "{second:?}");
    locked.signal(Signal::SIGTERM);
    assert_eq!(locked.wait(PATIENCE).code(), 0);
    wait_until(PATIENCE, "nothing is left", || collectors(&job).is_empty());
}

/// Descriptors, threads and resident kilobytes of a process.
fn footprint(pid: i32) -> (usize, usize, u64) {
    let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).expect("it runs").count();
    let status = procfs::status_text(pid).expect("it runs");
    let resident = procfs::field(&status, "VmRSS:").expect("VmRSS");
    (count("fd"), count("task"), resident.trim_end_matches(" kB").parse().expect("a number"))
}

#[test]
fn thousands_of_short_processes_leave_nothing_behind() {
    const A_ROUND: usize = 700;
    let job = Job::new();
    let collector = collector(&job, &[]);
    let mut hello = FakeHook::start(&job, "short", -1, 0).hello.clone();
    hello.timeline_path = job.dir.join("timeline-00000000").display().to_string();
    let mut command = job.command(python());
    command.arg("-I").arg(tree().join("tests/tests/it/collector/fake_hook.py"));
    command.arg("short").arg(socket_of(&job));
    command.args([encode(Message::Hello(hello)), encode(Message::Goodbye(Goodbye {}))]);
    command.arg(ring::offset::END.to_string());
    command.arg(format!("{}:{}", header::VERSION, ring::VERSION)).arg(format!("{}:{}", header::MAGIC, ring::MAGIC));
    let mut processes = command.arg(A_ROUND.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(processes.stdout.take().expect("piped"));
    let before = footprint(collector.pid());
    let mut round = || {
        processes.stdin.as_mut().expect("piped").write_all(b"go\n").expect("it reads");
        let mut line = String::new();
        lines.read_line(&mut line).expect("a line");
        assert_eq!(line, "done\n");
        let mut now = footprint(collector.pid());
        wait_until(PATIENCE, "what they left is dropped", || {
            now = footprint(collector.pid());
            // A thread for each of a few folders stays.
            now.0 <= before.0 + 10 && now.1 <= before.1 + 20
        });
        now
    };
    let (first, second) = (round(), round());
    let status = job.status().expect("it answers");
    assert!(status["ranks"].as_array().is_some_and(|ranks| ranks.len() < 50), "their entries are forgotten");
    assert!(
        second.2 < first.2 + 3 * 1024,
        "{before:?} {first:?} {second:?}: the second half grows by kilobytes at most"
    );
    drop(processes.stdin.take());
    processes.wait().expect("it ends");
    assert!(Path::new(&format!("/proc/{}", collector.pid())).exists());
}

/// A job whose folder for incidents and its fallback are on a disk of their own. `spoil` makes the
/// disk useless before a hang, and `mend` repairs it after the hang.
fn verdict_outlasts(options: &str, spoil: impl Fn(&Path), mend: impl Fn(&Path), named: &str) {
    let job = Job::new();
    let Some(disk) = Tmpfs::with(job.dir.join("disk"), options) else { return };
    let place = disk.0.join("timeline");
    let job = job.with("TMPDIR", &disk.0.display().to_string());
    let job = job.with("XPU_TIMER_TIMELINE_PATH", &place.display().to_string());
    let collector = collector(&job, &[]);
    let mut hook = FakeHook::start(&job, "full", 0, 1);
    hook.hello.timeline_path = place.display().to_string();
    hook.join(&job);
    spoil(&disk.0);
    hook.hang(1);
    let incident = || job.status().unwrap_or_default()["incidents"][0].clone();
    wait_until(PATIENCE, "the verdict is served", || incident()["state"] == "dumped");
    assert_eq!(incident()["written"], false, "{}", collector.stderr());
    let id = incident()["incident"].as_str().expect("a name").to_string();
    let page = |name: &str| http("GET", job.port, &format!("/incidents/{id}{name}")).expect("it answers");
    let (code, verdict) = page("");
    let verdict: serde_json::Value = serde_json::from_str(&verdict).expect("JSON");
    assert_eq!((code, verdict["incident"].as_str()), (200, Some(id.as_str())));
    // The text is broken into lines.
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&page("/verdict.txt").1).contains(&words(verdict["sentence"].as_str().expect("a sentence"))));
    let (_, list) = http("GET", job.port, "/incidents").expect("it answers");
    assert_eq!(list.matches(&id).count(), 1, "{list}");
    let stderr = collector.stderr();
    assert!(stderr.contains(named) && stderr.contains(&disk.0.display().to_string()), "{stderr}");
    let is_partial = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().ends_with(".new");
    let left = fs::read_dir(place.join(format!("incident-{id}"))).into_iter().flatten().flatten();
    assert!(!left.into_iter().any(|entry| is_partial(&entry)), "no part of a file stays");

    mend(&disk.0);
    wait_until(PATIENCE, "the verdict is written", || incident()["written"] == true);
    let path = incident()["path"].as_str().expect("a folder").to_string();
    let on_disk = fs::read(Path::new(&path).join("verdict.json")).expect("verdict.json");
    let on_disk: serde_json::Value = serde_json::from_slice(&on_disk).expect("JSON");
    assert_eq!((&on_disk["sentence"], &on_disk["incident"]), (&verdict["sentence"], &verdict["incident"]));
    hook.resolve(1);
    wait_until(PATIENCE, "its end is written too", || {
        let text = fs::read_to_string(Path::new(&path).join("verdict.json")).unwrap_or_default();
        serde_json::from_str::<serde_json::Value>(&text).is_ok_and(|verdict| verdict["status"] == "resolved")
    });

    // Somebody removes the folder of all incidents.
    fs::remove_dir_all(Path::new(&path).parent().expect("a folder")).expect("it is there");
    hook.hang(2);
    wait_until(PATIENCE, "the next incident has a folder", || {
        let status = job.status().unwrap_or_default();
        let incidents = status["incidents"].as_array().map(Vec::as_slice).unwrap_or_default();
        let next = incidents.iter().find(|incident| incident["incident"] != id.as_str());
        let path = next.and_then(|next| Some(Path::new(next["path"].as_str()?).join("verdict.json")));
        path.is_some_and(|path| path.exists())
    });
}

#[test]
fn a_verdict_survives_a_full_disk() {
    let fill = |disk: &Path| drop(fs::write(disk.join("fills"), vec![1; 16 << 20]));
    let free = |disk: &Path| fs::remove_file(disk.join("fills")).expect("it is there");
    verdict_outlasts("size=4m", fill, free, "No space left on device");
}

#[test]
fn a_verdict_survives_a_disk_without_inodes() {
    let fill = |disk: &Path| {
        let full = (0..1000).find(|number| fs::write(disk.join(format!("fills-{number}")), "").is_err());
        assert!(full.is_some());
    };
    let free = |disk: &Path| {
        for number in 0..1000 {
            let _ = fs::remove_file(disk.join(format!("fills-{number}")));
        }
    };
    verdict_outlasts("size=16m,nr_inodes=200", fill, free, "No space left on device");
}

#[test]
fn a_log_that_cannot_be_written_does_not_matter() {
    let job = Job::new();
    let mut command = job.command("sh");
    command.args(["-c", "exec \"$0\" node 2> /dev/full"]).arg(artifacts().bin("xpu_timer_collector"));
    let collector = Process::spawn(&mut command);
    wait_until(PATIENCE, "the collector answers", || job.status().is_ok());
    let mut hook = FakeHook::connected(&job, "mute", 0, 1);
    hook.hang(1);
    let _ = job.wait_incident(1, PATIENCE);
    collector.signal(Signal::SIGTERM);
    assert_eq!(collector.wait(PATIENCE).code(), 0);
}
