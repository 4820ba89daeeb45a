//! The node collector against processes that play hooks: what it registers, what becomes an
//! incident, and which faults it survives.

pub mod fake;
mod mild;

use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    path::Path,
    process::Command,
    time::Duration,
};

use fake::{FakeHook, collector, encode, metrics, socket_of};
use nix::{sys::signal::Signal, time::ClockId};
use serde_json::{Value, json};
use xpu_timer_proto::{
    Message as _, PROTOCOL_VERSION, ring,
    server::Stacktrace,
    v1::{Evidence, Hello, Presence, RankInfo, hook_message::Message},
};
use xpu_timer_tests::{Incident, Job, PATIENCE, Process, artifacts, http, skip, wait_until};

/// Entries of `/status` under `list` for which `test` holds.
fn count(job: &Job, list: &str, test: impl Fn(&Value) -> bool) -> usize {
    let status = job.status().unwrap_or_default();
    status[list].as_array().map_or(0, |entries| entries.iter().filter(|entry| test(entry)).count())
}

fn wait_ranks(job: &Job, presence: &str, number: usize) {
    wait_until(PATIENCE, &format!("{number} ranks are {presence}"), || {
        count(job, "ranks", |rank| rank["presence"] == presence) == number
    });
}

fn wait_state(job: &Job, state: &str, number: usize) {
    wait_until(PATIENCE, &format!("{number} incidents are {state}"), || {
        count(job, "incidents", |incident| incident["state"] == state) == number
    });
}

fn evidence(incident: &Incident) -> Evidence {
    let bytes = fs::read(incident.path.join("evidence.bin")).expect("evidence.bin");
    Evidence::decode(&bytes[..]).expect("evidence.bin is an Evidence")
}

fn dump(incident: &Incident, rank: u32, world: u32) -> Stacktrace {
    let path = incident.path.join(format!("{rank:05}-{world:05}.stacktrace"));
    let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Stacktrace::decode(&bytes[..]).expect("a .stacktrace is a Stacktrace")
}

/// A time of CLOCK_MONOTONIC as nanoseconds since the Unix epoch.
fn unix_ns(monotonic_ns: u64) -> u64 {
    let now = |clock: ClockId| Duration::from(clock.now().expect("the clock")).as_nanos() as u64;
    now(ClockId::CLOCK_REALTIME) - now(ClockId::CLOCK_MONOTONIC) + monotonic_ns
}

fn hooks(job: &Job, name: &str, ranks: i32) -> Vec<FakeHook> {
    let hooks = (0..ranks).map(|rank| FakeHook::connected(job, name, rank, ranks as u32)).collect();
    wait_ranks(job, "present", ranks as usize);
    hooks
}

#[test]
fn a_hang_is_dumped_judged_and_resolved_and_the_next_is_a_new_incident() {
    let job = Job::new();
    let _collector = collector(&job, &[]);
    let mut hooks: Vec<FakeHook> = (0..3).map(|rank| FakeHook::connected(&job, "one", rank, 4)).collect();
    wait_ranks(&job, "present", 3);
    // Rank 3 runs under the hook (whose file need not exist for that) and never registers.
    let mut silent = job.command(xpu_timer_tests::python());
    silent.args(["-c", "import sys; print('up', flush=True); sys.stdin.read(); import time; time.sleep(600)"]);
    silent.envs([("RANK", "3"), ("WORLD_SIZE", "4"), ("XPU_TIMER_JOB", "one")]);
    let mut silent = Process::spawn(silent.env("LD_PRELOAD", "/nowhere/libxpu_timer_hook.so"));
    silent.wait_for("up", PATIENCE);
    assert!(metrics(&job).contains(
        "XPU_TIMER_COMMON_HANG{ip=\"NOT_SET\",job_name=\"one\",pod_name=\"NOT_SET\",rank=\"0\",local_rank=\"0\"} 0\n"
    ));

    hooks[0].hang(7);
    hooks[1].hang(7);
    let first = job.wait_incident(1, PATIENCE);
    let page = metrics(&job);
    for rank in 0..3 {
        assert!(page.contains(&format!("rank=\"{rank}\",local_rank=\"{rank}\"}} 1\n")), "{page}");
    }
    first.assert_in_time(Duration::from_millis(700));
    assert_eq!(first.verdict["status"], "open");
    for rank in 0..4 {
        let dump = dump(&first, rank, 4);
        assert_eq!(dump.rank, rank as i32);
        assert!(dump.py_stacktrace.iter().any(|thread| !thread.frames.is_empty()), "rank {rank} is a Python process");
        assert!(!dump.stacktrace.is_empty() && dump.process_state.starts_with(['S', 'R']), "rank {rank}");
        let (sample, last) = (dump.first_sample.expect("first sample"), dump.last_sample.expect("last sample"));
        assert!(sample.captured_unix_ns < last.captured_unix_ns);
        // An operation is recorded as completed up to 0.1 s late.
        let record = dump.flight_record.as_ref();
        let delay = record.map(|flight| unix_ns(flight.read_ns).saturating_sub(last.captured_unix_ns));
        assert!(delay.is_none_or(|delay| delay > 100_000_000), "rank {rank}: {delay:?}");
        let flight = record.map(|flight| flight.operations.len());
        assert_eq!(flight, [Some(1), Some(1), Some(0), None][rank as usize], "rank {rank}");
    }
    let all = evidence(&first);
    let presence: Vec<Presence> = all.ranks.iter().map(|rank| rank.presence()).collect();
    assert_eq!(presence, [Presence::Present, Presence::Present, Presence::Present, Presence::Unregistered]);
    assert_eq!((all.world_size, all.job.as_str(), all.trigger.expect("trigger").rank), (4, "one", 0));
    assert!(all.ranks.iter().all(|rank| rank.dump.is_none()), "the dumps are files of their own");
    assert!(!first.path.join(".reserve").exists());
    assert!(fs::metadata(first.path.join("cpp_stack.svg")).is_ok_and(|file| file.len() > 0), "{}", first.verdict);
    assert_eq!(first.verdict["errors"], json!([]));

    // A late signal joins; all of them have to resolve.
    hooks[2].hang(5);
    hooks[0].resolve(7);
    hooks[1].resolve(7);
    wait_until(PATIENCE, "the signals are in", || metrics(&job).contains("xpu_timer_incidents_open 1\n"));
    hooks[2].resolve(5);
    wait_state(&job, "resolved", 1);
    wait_until(PATIENCE, "the folder says so", || job.incidents()[0].verdict["status"] == "resolved");
    assert!(job.incidents()[0].verdict["resolved_at"].is_string());
    assert!(!metrics(&job).contains("} 1\nXPU"), "{}", metrics(&job));

    hooks[1].hang(9);
    let second = job.wait_incident(2, PATIENCE);
    assert_ne!(first.path, second.path);
    assert_eq!(fs::read_link(job.dir.join("timeline/latest")).expect("latest"), second.path.file_name().expect("name"));
    let (code, list) = http("GET", job.port, "/incidents").expect("/incidents");
    let list: Value = serde_json::from_str(&list).expect("JSON");
    assert_eq!((code, list.as_array().map(Vec::len), &list[0]["status"]), (200, Some(2), &json!("resolved")));
    let id = list[1]["incident"].as_str().expect("an id");
    let (code, verdict) = http("GET", job.port, &format!("/incidents/{id}")).expect("/incidents/ID");
    assert_eq!((code, serde_json::from_str::<Value>(&verdict).expect("JSON")), (200, second.verdict));
    assert_eq!(http("GET", job.port, "/incidents/..%2F..%2Fetc").expect("an answer").0, 404);
}

#[test]
fn a_restarted_collector_knows_the_hang_that_it_dumped() {
    let job = Job::new();
    let first = collector(&job, &[]);
    let mut hooks = hooks(&job, "again", 2);
    hooks[0].hang(7);
    let entered_ns = hooks[0].now_ns();
    let _ = job.wait_incident(1, PATIENCE);
    wait_state(&job, "dumped", 1);
    first.signal(Signal::SIGKILL);
    drop(first.wait(PATIENCE));

    let second = collector(&job, &[]);
    for hook in &mut hooks {
        hook.tell("closed");
        hook.join(&job);
    }
    wait_state(&job, "adopted", 1);
    hooks[0].signal(7, entered_ns);
    // This rank had not signalled before, but its operation is as old.
    hooks[1].signal(3, entered_ns);
    wait_state(&job, "dumped", 1);
    assert!(metrics(&job).contains("xpu_timer_incidents_total 0\n"), "{}", second.stderr());
    hooks[0].resolve(7);
    hooks[1].resolve(3);
    wait_until(PATIENCE, "the folder says resolved", || job.incidents()[0].verdict["status"] == "resolved");
    hooks[0].hang(8);
    let _ = job.wait_incident(2, PATIENCE);
    assert_eq!(job.incidents().len(), 2);
}

#[test]
fn malformed_messages_are_reported_and_survived() {
    let job = Job::new();
    let collector = collector(&job, &[]);
    let mut bad = FakeHook::start(&job, "bad", 0, 1);
    let good = bad.hello.clone();
    let old = Hello { protocol: PROTOCOL_VERSION + 1, ..good.clone() };
    let packets = [
        ("deadbeef".to_string(), "a packet that is not a message"),
        ("00".repeat(20_000), "a packet of more than 16384 bytes"),
        ("fa0600".into(), "a message of an unknown kind"),
        (encode(Message::Hello(old)), "has protocol 2"),
        (encode(Message::Rank(RankInfo::default())), "sent a message before Hello"),
    ];
    for (packet, named) in packets {
        bad.connect(&job);
        bad.tell(&format!("send {packet}"));
        bad.tell("closed");
        wait_until(PATIENCE, named, || collector.stderr().contains(named));
    }
    bad.connect(&job);
    // A descriptor that would block or never end when it is read.
    bad.tell(&format!("hello_with {} /dev/zero", encode(Message::Hello(good.clone()))));
    wait_until(PATIENCE, "the descriptor is named", || collector.stderr().contains("is not a ring: not a memfd"));
    wait_ranks(&job, "present", 1);
    bad.send(Message::Hello(good));
    bad.tell("closed");
    wait_until(PATIENCE, "it is named", || collector.stderr().contains("sent Hello twice"));

    bad.tell(&format!("flood {} 900", socket_of(&job).display()));
    let mut hook = FakeHook::connected(&job, "good", 0, 1);
    wait_until(PATIENCE, "a good hook registers", || count(&job, "ranks", |rank| rank["job"] == "good") == 1);
    hook.word(ring::header::KERNELS, 12);
    wait_until(PATIENCE, "its ring is read", || count(&job, "ranks", |rank| rank["kernels"] == 12) == 1);
    hook.goodbye();
    wait_until(PATIENCE, "it has left", || {
        count(&job, "ranks", |rank| rank["job"] == "good" && rank["presence"] == "left") == 1
    });
    assert_eq!(http("GET", job.port, "/health").expect("/health").0, 200);
    let lines = collector.stderr().lines().filter(|line| line.contains("WARN")).count();
    assert!(lines < 100, "a flood of connections is not a flood of lines: {lines}");
}

/// An incident whose folder could not be created in its place; `what` prevents it.
fn in_fallback(job: &Job, timeline: &Path, what: &str) {
    let collector = collector(job, &[]);
    let mut hook = FakeHook::start(job, "homeless", 0, 1);
    hook.hello.timeline_path = timeline.display().to_string();
    hook.join(job);
    hook.hang(1);
    wait_state(job, "dumped", 1);
    let status = job.status().expect("/status");
    let path = Path::new(status["incidents"][0]["path"].as_str().expect("a path"));
    assert!(path.starts_with(socket_of(job).parent().expect("a folder").join("timeline")), "{}", path.display());
    let error = status["incidents"][0]["errors"][0].as_str().expect("an error").to_string();
    assert!(error.contains(what) && error.contains(&timeline.display().to_string()), "{error}");
    assert!(collector.stderr().contains(what));
    let verdict: Value =
        serde_json::from_slice(&fs::read(path.join("verdict.json")).expect("verdict.json")).expect("JSON");
    assert_eq!(verdict["errors"][0], json!(error));
    assert!(path.join("00000-00001.stacktrace").exists());
}

#[test]
fn an_unwritable_timeline_path_is_replaced_and_reported() {
    let job = Job::new();
    let file = job.dir.join("file");
    fs::write(&file, "").expect("a file");
    in_fallback(&job, &file.join("timeline"), "Not a directory");
}

/// A small file system, unmounted on drop.
pub struct Tmpfs(pub std::path::PathBuf);

impl Tmpfs {
    /// `None` if this machine forbids it; the test reports that it is skipped.
    pub fn new(path: std::path::PathBuf, kib: u32) -> Option<Self> {
        Self::with(path, &format!("size={kib}k"))
    }

    /// With any options of tmpfs(5).
    pub fn with(path: std::path::PathBuf, options: &str) -> Option<Self> {
        fs::create_dir(&path).expect("a folder");
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", options, "none"]).arg(&path).output();
        match mount {
            Ok(output) if output.status.success() => Some(Tmpfs(path)),
            other => {
                skip(&format!("a full disk needs a small tmpfs, and mount says {other:?}"));
                None
            }
        }
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // A mount that stays cannot be helped.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_is_replaced_and_reported() {
    let job = Job::new();
    let Some(disk) = Tmpfs::new(job.dir.join("disk"), 128) else { return };
    in_fallback(&job, &disk.0, "No space left on device");
}

#[test]
fn a_disk_that_fills_during_an_incident_still_has_the_verdict() {
    let job = Job::new();
    // There is room for the space reserved for the verdict, and for nothing else.
    let Some(disk) = Tmpfs::new(job.dir.join("disk"), 264) else { return };
    let collector = collector(&job, &[]);
    let mut hooks: Vec<FakeHook> = (0..2).map(|rank| FakeHook::start(&job, "full", rank, 2)).collect();
    for hook in &mut hooks {
        hook.hello.timeline_path = disk.0.display().to_string();
        hook.hello.rank.as_mut().expect("a rank").command = "x".repeat(4000);
        hook.join(&job);
    }
    hooks[0].hang(1);
    wait_state(&job, "dumped", 1);
    let status = job.status().expect("/status");
    let incident = &status["incidents"][0];
    let path = Path::new(incident["path"].as_str().expect("a path"));
    assert!(path.starts_with(&disk.0), "{incident}");
    assert!(
        incident["errors"][0].as_str().is_some_and(|error| error.contains("No space left on device")),
        "{incident}"
    );
    let verdict: Value =
        serde_json::from_slice(&fs::read(path.join("verdict.json")).expect("verdict.json")).expect("JSON");
    assert!(verdict["sentence"].is_string() && verdict["errors"][0] == incident["errors"][0], "{verdict}");
    assert!(path.join("verdict.txt").exists());
    assert!(collector.stderr().contains("No space left on device"));
}

#[test]
fn a_rank_that_is_killed_is_an_incident_and_its_ring_is_read() {
    let job = Job::new();
    let _collector = collector(&job, &[]);
    let mut hooks = hooks(&job, "killed", 3);
    hooks[1].word(ring::header::COLLECTIVES, 41);
    hooks[1].kill(Signal::SIGKILL);
    hooks[1].wait();
    let incident = job.wait_incident(1, PATIENCE);
    assert_eq!(incident.verdict["trigger"]["kind"], "death");
    let all = evidence(&incident);
    assert_eq!((all.ranks[1].presence(), all.ranks[0].presence()), (Presence::Dead, Presence::Present));
    assert_eq!(all.ranks[1].flight.as_ref().expect("the ring survives its process").collectives_launched, 41);
    // Linux before 6.15 does not tell how a process ended that its parent has reaped.
    assert!(["killed by SIGKILL", ""].contains(&all.ranks[1].exit.as_str()), "{}", all.ranks[1].exit);
    assert_eq!(dump(&incident, 1, 3).process_state, "X (dead)");
    assert_eq!(incident.verdict["cause"], "process_dead", "{}", incident.verdict);
    assert_eq!(incident.verdict["culprits"], json!([1]));
    for hook in &mut hooks {
        hook.kill_if_alive();
    }
    wait_until(PATIENCE, "the job's end ends the incident", || job.incidents()[0].verdict["status"] == "ended");
}

#[test]
fn a_rank_that_dies_during_its_dump_has_a_partial_entry() {
    let job = Job::new();
    let collector = collector(&job, &[]);
    let mut hooks: Vec<FakeHook> = (0..2).map(|rank| FakeHook::start(&job, "middle", rank, 2)).collect();
    for hook in &mut hooks {
        hook.hello.sample_interval_ms = 5000;
        hook.join(&job);
    }
    wait_ranks(&job, "present", 2);
    hooks[0].hang(3);
    wait_state(&job, "open", 1);
    wait_until(PATIENCE, "the first sample", || collector.stderr().contains("the first sample took"));
    hooks[1].kill(Signal::SIGKILL);
    hooks[1].wait();
    let incident = job.wait_incident(1, PATIENCE);
    let all = evidence(&incident);
    assert_eq!((all.ranks[0].presence(), all.ranks[1].presence()), (Presence::Present, Presence::Dead));
    assert!(all.ranks[1].errors.iter().any(|error| error.contains("the process is gone")), "{:?}", all.ranks[1].errors);
    assert!(all.ranks[1].errors.iter().any(|error| error == "there is no second sample"), "{:?}", all.ranks[1].errors);
    assert!(!dump(&incident, 0, 2).stacktrace.is_empty());
    let died = dump(&incident, 1, 2);
    assert!(!died.stacktrace.is_empty() && !died.py_stacktrace.is_empty(), "the first sample is shown");
    assert_eq!(job.incidents().len(), 1, "the death joined the incident");
}

#[test]
fn two_jobs_have_incidents_of_their_own() {
    let job = Job::new();
    let _collector = collector(&job, &[]);
    let mut red = FakeHook::connected(&job, "red", 0, 1);
    let mut blue = FakeHook::connected(&job, "blue", 0, 1);
    let mut green = FakeHook::connected(&job, "green", 0, 1);
    wait_ranks(&job, "present", 3);
    red.hang(1);
    blue.hang(1);
    wait_state(&job, "dumped", 2);
    let mut jobs: Vec<String> = job.incidents().iter().map(|one| one.verdict["job"].as_str().unwrap().into()).collect();
    jobs.sort();
    assert_eq!(jobs, ["blue", "red"]);
    let page = metrics(&job);
    for (name, value) in [("red", 1), ("blue", 1), ("green", 0)] {
        let line = format!(
            "XPU_TIMER_COMMON_HANG{{ip=\"NOT_SET\",job_name=\"{name}\",pod_name=\"NOT_SET\",rank=\"0\",local_rank=\"0\"}} {value}\n"
        );
        assert!(page.contains(&line), "{page}");
    }
    let (code, answer) = http("POST", job.port, "/dump").expect("/dump");
    assert!(code == 400 && answer.contains("blue, green, red"), "{code} {answer}");
    let (code, answer) = http("POST", job.port, "/dump?job=green").expect("/dump");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(code, 200, "{answer}");
    let path = Path::new(answer["path"].as_str().expect("a path"));
    let verdict: Value =
        serde_json::from_slice(&fs::read(path.join("verdict.json")).expect("verdict.json")).expect("JSON");
    assert_eq!((&verdict["status"], &verdict["trigger"]["kind"]), (&json!("ended"), &json!("manual")));
    green.goodbye();
    assert_eq!(http("POST", job.port, "/dump?job=violet").expect("/dump").0, 404);
}

#[test]
fn a_stuck_watcher_is_noticed() {
    let job = Job::new();
    let collector = collector(&job, &[]);
    let mut hooks = hooks(&job, "silent", 2);
    hooks[1].tell("beat off");
    wait_until(PATIENCE, "it is examined", || !job.mild_captures().is_empty());
    let capture = &job.mild_captures()[0];
    assert_eq!(capture.verdict["trigger"]["kind"], "heartbeat");
    assert_eq!(capture.verdict["trigger"]["rank"], 1);
    hooks[1].tell("beat on");
    wait_until(PATIENCE, "the watcher turns again", || collector.stderr().contains("resolved: the job continues"));
    assert!(job.incidents().is_empty(), "no rank waits");
}

#[test]
fn a_job_that_launches_nothing_is_noticed() {
    let job = Job::new();
    let _collector = collector(&job, &[]);
    let mut hooks: Vec<FakeHook> = (0..2).map(|rank| FakeHook::start(&job, "idle", rank, 2)).collect();
    for hook in &mut hooks {
        (hook.hello.idle_timeout_ms, hook.hello.reports_idle) = (1500, true);
        hook.tell("launch on");
        hook.join(&job);
    }
    wait_ranks(&job, "present", 2);
    // One rank that launches is enough.
    hooks[1].tell("launch off");
    wait_until(PATIENCE, "rank 1 is idle for long", || {
        count(&job, "ranks", |rank| rank["last_launch_age_s"].as_f64().is_some_and(|age| age > 3.0)) == 1
    });
    assert_eq!(count(&job, "incidents", |_| true), 0);
    hooks[0].tell("launch off");
    let incident = job.wait_incident(1, PATIENCE);
    assert_eq!(incident.verdict["trigger"]["kind"], "idle");
    hooks[0].tell("launch on");
    wait_state(&job, "resolved", 1);
}

#[test]
fn hang_kill_ends_the_ranks_with_a_failure() {
    let job = Job::new();
    let _collector = collector(&job, &[]);
    let mut hooks: Vec<FakeHook> = (0..2).map(|rank| FakeHook::start(&job, "kill", rank, 2)).collect();
    for hook in &mut hooks {
        hook.hello.hang_kill = true;
        hook.join(&job);
    }
    wait_ranks(&job, "present", 2);
    // It does not end by SIGTERM, because it is stopped.
    hooks[1].kill(Signal::SIGSTOP);
    hooks[0].hang(1);
    let _ = job.wait_incident(1, PATIENCE);
    for hook in &mut hooks {
        assert!(!hook.wait().success());
    }
    wait_state(&job, "ended", 1);
}

#[test]
fn hang_kill_reports_a_failure_even_if_a_rank_exits_with_0_on_sigterm() {
    let job = Job::new();
    let _collector = collector(&job, &[]);
    let mut hooks: Vec<FakeHook> = (0..3).map(|rank| FakeHook::start(&job, "polite", rank, 3)).collect();
    for hook in &mut hooks {
        hook.hello.hang_kill = true;
        hook.tell("polite");
        hook.join(&job);
    }
    wait_ranks(&job, "present", 3);
    hooks[0].hang(1);
    let _ = job.wait_incident(1, PATIENCE);
    let failed = hooks.iter_mut().map(|hook| !hook.wait().success()).filter(|failed| *failed).count();
    assert_eq!(failed, 1, "all have the same parent, for which one failure is enough");
}

#[test]
fn a_disk_that_does_not_answer_does_not_hold_up_the_collector() {
    let job = Job::new();
    let _collector = collector(&job, &[]);
    let mut hooks = hooks(&job, "stuck_disk", 2);
    hooks[0].hang(1);
    let incident = job.wait_incident(1, PATIENCE);
    wait_state(&job, "dumped", 1);
    // A process that opens it now waits forever, as on a network file system whose server is gone.
    let verdict = incident.path.join("verdict.json");
    fs::remove_file(&verdict).expect("it is there");
    nix::unistd::mkfifo(&verdict, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    hooks[0].resolve(1);
    wait_state(&job, "resolved", 1);
    hooks[1].goodbye();
    wait_ranks(&job, "left", 1);
}

#[test]
fn an_incident_without_a_folder_is_listed() {
    let job = Job::new();
    let _collector = collector(&job, &[]);
    // Where it goes when the first place cannot be used.
    fs::write(socket_of(&job).with_file_name("timeline"), "no folder").expect("beside the socket");
    let mut hook = FakeHook::start(&job, "no_disk", 0, 1);
    hook.hello.timeline_path = "/dev/null/timeline".into();
    hook.join(&job);
    hook.hang(1);
    wait_state(&job, "dumped", 1);
    let (code, list) = http("GET", job.port, "/incidents").expect("an answer");
    let list: Value = serde_json::from_str(&list).expect("JSON");
    assert_eq!((code, &list[0]["path"], &list[0]["status"]), (200, &Value::Null, &json!("open")), "{list}");
    let status = job.status().expect("an answer");
    assert_eq!(list[0]["sentence"], status["incidents"][0]["sentence"]);
    let printed = job.command(artifacts().bin("xpu_timer_collector")).arg("incidents").output().expect("it runs");
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    let id = list[0]["incident"].as_str().expect("a name");
    assert!(printed.contains(id), "{printed}");
    let (code, verdict) = http("GET", job.port, &format!("/incidents/{id}")).expect("an answer");
    let verdict: Value = serde_json::from_str(&verdict).expect("JSON");
    assert_eq!((code, &verdict["sentence"], &verdict["status"]), (200, &list[0]["sentence"], &json!("open")));
    assert!(verdict["errors"].to_string().contains("no folder could be created"), "{verdict}");
    let command = |arguments: &[&str]| {
        let mut command = job.command(artifacts().bin("xpu_timer_collector"));
        command.arg("incidents").args(arguments).output().expect("it runs")
    };
    let shown = command(&["show", id]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains(&format!("incident {id}")) && shown.contains("culprits:    0"), "{shown}");
    let copy = job.dir.join("copy");
    let fetched = command(&["fetch", id, copy.to_str().expect("UTF-8")]);
    assert!(fetched.status.success(), "{fetched:?}");
    let text = fs::read_to_string(copy.join(format!("incident-{id}/verdict.txt"))).expect("a copy");
    assert_eq!(text, shown);
    hook.resolve(1);
    wait_state(&job, "resolved", 1);
    wait_until(PATIENCE, "the folder says so", || {
        let (_, verdict) = http("GET", job.port, &format!("/incidents/{id}")).expect("an answer");
        serde_json::from_str::<Value>(&verdict).expect("JSON")["status"] == "resolved"
    });
    assert_eq!(http("GET", job.port, "/incidents/20200101T000000Z-00000000").expect("an answer").0, 404);
}

/// A job that signals a hang and continues; hang_kill is on.
fn busy_job(job: &Job, hang_timeout_ms: u64) -> Vec<FakeHook> {
    let mut hooks: Vec<FakeHook> = (0..2).map(|rank| FakeHook::start(job, "busy", rank, 2)).collect();
    for hook in &mut hooks {
        (hook.hello.hang_kill, hook.hello.hang_timeout_ms) = (true, hang_timeout_ms);
        hook.join(job);
    }
    wait_ranks(job, "present", 2);
    hooks[0].hang(1);
    hooks[0].keep_young(1);
    hooks
}

#[test]
fn hang_kill_spares_ranks_that_are_probably_healthy() {
    let job = Job::new();
    let collector = collector(&job, &[]);
    let mut hooks = busy_job(&job, 600_000);
    wait_until(PATIENCE, "it says so", || collector.stderr().contains("the job may be healthy"));
    let capture = &job.mild_captures()[0];
    assert_eq!(capture.verdict["cause"], "not_a_hang", "{}", capture.verdict);
    hooks[0].resolve(1);
    wait_until(PATIENCE, "the wait is over", || collector.stderr().contains("resolved: the job continues"));
    for hook in &mut hooks {
        hook.now_ns();
    }
    assert!(!collector.stderr().contains("XPU_TIMER_HANG_KILL ends"), "{}", collector.stderr());
}

#[test]
fn hang_kill_never_acts_on_repeated_verdicts_without_evidence() {
    let job = Job::new();
    let collector = collector(&job, &[]);
    let mut hooks = busy_job(&job, 1000);
    let looks = |stderr: &str| stderr.matches("its ranks are captured again").count();
    wait_until(PATIENCE, "it is judged three times", || looks(&collector.stderr()) >= 2);
    let verdict = &job.mild_captures()[0].verdict;
    assert_eq!((&verdict["cause"], &verdict["hang"]), (&json!("not_a_hang"), &json!("none")), "{verdict}");
    for hook in &mut hooks {
        hook.now_ns();
    }
    assert!(!collector.stderr().contains("XPU_TIMER_HANG_KILL ends"), "{}", collector.stderr());
    assert_eq!(hang_of(&job), ["0", "0"], "no verdict says that the ranks hang");
    assert_eq!(job.incidents().len(), 0, "it is not an incident");
}

/// `XPU_TIMER_COMMON_HANG` of all ranks, in the order of the page.
fn hang_of(job: &Job) -> Vec<String> {
    let page = metrics(job);
    let lines = page.lines().filter(|line| line.starts_with("XPU_TIMER_COMMON_HANG{"));
    lines.filter_map(|line| Some(line.rsplit_once(' ')?.1.to_string())).collect()
}

#[test]
fn hang_kill_spares_a_job_that_makes_progress_after_a_confident_verdict() {
    let job = Job::new();
    let collector = collector(&job, &[]);
    let mut hooks: Vec<FakeHook> = (0..2).map(|rank| FakeHook::start(&job, "progress", rank, 2)).collect();
    for hook in &mut hooks {
        (hook.hello.hang_kill, hook.hello.hang_timeout_ms) = (true, 1000);
        hook.join(&job);
    }
    wait_ranks(&job, "present", 2);
    hooks[1].tell("launch on");
    hooks[0].hang(1);
    wait_until(PATIENCE, "the ranks are spared", || collector.stderr().contains("the ranks are not ended"));
    assert!(!collector.stderr().contains("XPU_TIMER_HANG_KILL ends"), "{}", collector.stderr());
    let verdict = job.wait_incident(1, PATIENCE).verdict;
    assert_ne!(verdict["hang"], "none", "{verdict}");
    // As soon as nothing moves, the ranks are ended.
    hooks[1].tell("launch off");
    for hook in &mut hooks {
        assert!(!hook.wait().success());
    }
    wait_state(&job, "ended", 1);
}

/// Two ranks: the scheduler ends one, and the other one stays.
fn preempted(job: &Job, hang_timeout_ms: u64) -> Vec<FakeHook> {
    let mut hooks: Vec<FakeHook> = (0..2).map(|rank| FakeHook::start(job, "preempted", rank, 2)).collect();
    for hook in &mut hooks {
        hook.hello.hang_timeout_ms = hang_timeout_ms;
        hook.join(job);
    }
    wait_ranks(job, "present", 2);
    hooks[1].kill(Signal::SIGTERM);
    // Not waited for yet: kernels before 6.15 forget then how it ended.
    wait_ranks(job, "dead", 1);
    hooks
}

fn uptime(job: &Job) -> f64 {
    job.status().ok().and_then(|status| status["uptime_s"].as_f64()).unwrap_or_default()
}

#[test]
fn ranks_that_are_terminated_one_after_another_are_not_an_incident() {
    let job = Job::new();
    let _collector = collector(&job, &[]);
    let mut hooks = preempted(&job, 600_000);
    let ended = uptime(&job);
    wait_until(PATIENCE, "the other rank is busy with its end for a while", || uptime(&job) > ended + 5.0);
    assert_eq!(count(&job, "incidents", |_| true), 0);
    hooks[0].kill(Signal::SIGTERM);
    wait_ranks(&job, "dead", 2);
    let ended = uptime(&job);
    wait_until(PATIENCE, "an incident would be there", || uptime(&job) > ended + 3.0);
    assert_eq!(count(&job, "incidents", |_| true), 0);
    assert!(hooks.iter_mut().all(|hook| !hook.wait().success()));
}

#[test]
fn a_rank_that_outlives_a_terminated_job_becomes_an_incident() {
    let job = Job::new();
    let _collector = collector(&job, &[]);
    let _hooks = preempted(&job, 1000);
    let incident = job.wait_incident(1, PATIENCE);
    assert_eq!(incident.verdict["trigger"]["kind"], "death", "{}", incident.verdict);
    let all = evidence(&incident);
    assert_eq!((all.ranks[1].presence(), all.ranks[1].exit.as_str()), (Presence::Dead, "killed by SIGTERM"));
}

#[test]
fn a_rank_that_stays_after_its_goodbye_is_captured() {
    let job = Job::new();
    let _collector = collector(&job, &[]);
    let mut hooks = hooks(&job, "lingers", 2);
    hooks[1].goodbye();
    wait_until(PATIENCE, "it lingers", || count(&job, "ranks", |rank| rank["lingers"] == true) == 1);
    hooks[0].hang(3);
    let incident = job.wait_incident(1, PATIENCE);
    let all = evidence(&incident);
    assert_eq!(all.ranks[1].presence(), Presence::Present);
    assert!(all.ranks[1].errors.iter().any(|error| error.contains("it sent Goodbye")), "{:?}", all.ranks[1].errors);
    assert!(!dump(&incident, 1, 2).py_stacktrace.is_empty());
    hooks[1].kill_if_alive();
    wait_until(PATIENCE, "it is gone", || count(&job, "ranks", |rank| rank["lingers"] == true) == 0);
}

#[test]
fn a_job_whose_ranks_say_goodbye_and_stay_is_an_incident() {
    let job = Job::new();
    let _collector = collector(&job, &[]);
    let mut hooks: Vec<FakeHook> = (0..2).map(|rank| FakeHook::start(&job, "stays", rank, 2)).collect();
    for hook in &mut hooks {
        (hook.hello.idle_timeout_ms, hook.hello.reports_idle) = (500, true);
        hook.tell("launch on");
        hook.join(&job);
    }
    wait_ranks(&job, "present", 2);
    for hook in &mut hooks {
        hook.tell("launch off");
        hook.goodbye();
    }
    let incident = job.wait_incident(1, PATIENCE);
    assert_eq!(incident.verdict["trigger"]["kind"], "idle", "{}", incident.verdict);
    assert!(evidence(&incident).ranks.iter().all(|rank| rank.presence() == Presence::Present));
    drop(hooks);
    wait_state(&job, "ended", 1);
}

#[test]
fn a_collector_ends_without_peers_on_request_and_beside_another_one() {
    let job = Job::new();
    // Started first: a Python interpreter may take longer to start than the collector waits for
    // somebody.
    let mut hook = FakeHook::start(&job, "linger", 0, 1);
    let first = collector(&job, &["--linger", "1"]);
    hook.join(&job);
    wait_ranks(&job, "present", 1);

    let other = Process::spawn(job.command(artifacts().bin("xpu_timer_collector")).arg("node")).wait(PATIENCE);
    assert_eq!(other.code(), 0, "{}", other.stderr);
    assert!(other.stderr.contains("is already running") && other.stderr.contains(&first.pid().to_string()));

    hook.tell("disconnect");
    let ended = first.wait(PATIENCE);
    assert_eq!(ended.code(), 0, "{}", ended.stderr);
    assert!(!socket_of(&job).exists());

    let second = collector(&job, &[]);
    let mut hook = FakeHook::start(&job, "term", 0, 1);
    hook.hello.sample_interval_ms = 60_000;
    hook.join(&job);
    hook.hang(1);
    wait_state(&job, "open", 1);
    second.signal(Signal::SIGTERM);
    let ended = second.wait(PATIENCE);
    assert_eq!(ended.code(), 0, "{}", ended.stderr);
    assert!(!socket_of(&job).exists());
    assert_eq!(
        job.finished_incidents().len(),
        1,
        "the dump in work is finished, without its long wait\n{}",
        ended.stderr
    );
}

#[test]
fn a_used_port_is_reported_and_only_local_requests_are_answered() {
    let job = Job::new();
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, job.port)).expect("the port is free");
    let one = collector(&job, &[]);
    let stderr = one.stderr();
    assert!(stderr.contains(&format!("port {}", job.port)) && stderr.contains("XPU_TIMER_BASEPORT"), "{stderr}");
    let mut hook = FakeHook::connected(&job, "port", 0, 1);
    let port = stderr.split("the metrics port ").nth(1).and_then(|rest| rest.split_whitespace().next());
    let port = port.and_then(|port| port.parse().ok()).expect("it says where the metrics are");
    wait_until(PATIENCE, "the other pair of endpoints works", || {
        http("GET", port, "/metrics").is_ok_and(|(_, page)| page.contains("xpu_timer_ranks 1\n"))
    });
    hook.hang(1);
    let _ = job.wait_incident(1, PATIENCE);
    drop((one, taken));

    let _two = collector(&job, &[]);
    let ask = |request: &str| {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, job.port)).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        stream.write_all(request.as_bytes()).expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        answer.lines().next().unwrap_or_default().to_string()
    };
    assert_eq!(ask("GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"), "HTTP/1.1 200 OK");
    assert_eq!(
        ask("GET /health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"),
        "HTTP/1.1 403 Forbidden"
    );
    let posted = "POST /dump HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(ask(posted), "HTTP/1.1 403 Forbidden");
    assert_eq!(
        ask("GET /dump HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
        "HTTP/1.1 405 Method Not Allowed"
    );
}
