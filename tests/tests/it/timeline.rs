//! The timeline of real jobs on the simulated device: what the collector keeps of their operations,
//! and the files that are made of it.

use std::{
    fs::{self, File},
    io::BufReader,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde_json::Value;
use xpu_timer_proto::{
    Message as _,
    hook::{KernelTraces, kernel_trace::DebugData},
    samples,
    server::{PySpyFrame, PythonStackInTimeline},
    timeline::{self, BlockBuilder, PENDING, Reader},
    v1::{ClockReading, Op, OpStatus, Operation, StackSamples, TimelineHead, timeline_chunk::Part},
};
use xpu_timer_tests::{Job, PATIENCE, Process, artifacts, compile_c, http, python_version, skip, tree, wait_until};

use crate::{
    cluster::Cluster,
    collector::{
        Tmpfs,
        fake::{FakeHook, collector},
    },
};

/// Reads a `.ops` file.
pub fn read(path: &Path) -> (TimelineHead, Vec<Operation>) {
    let file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut reader = Reader::new(BufReader::new(file)).unwrap();
    let mut operations = Vec::new();
    while let Some(block) = reader.next_block().unwrap() {
        operations.extend(timeline::operations(&block).unwrap());
    }
    (reader.head, operations)
}

/// The sequence numbers of the all-reduces.
pub fn all_reduces(operations: &[Operation]) -> Vec<u64> {
    operations.iter().filter(|one| one.op() == Op::AllReduce).map(|one| one.seq).collect()
}

fn dump(job: &Job, query: &str) -> Value {
    let (code, body) = http("POST", job.port, &format!("/timeline?{query}")).expect("an answer");
    assert_eq!(code, 200, "{body}\n{}", job.logs());
    serde_json::from_str(&body).expect("JSON")
}

fn folder(dump: &Value) -> PathBuf {
    dump["path"].as_str().expect("a path").into()
}

/// A collector that stays when its job has ended.
fn stays(job: &Job) -> Process {
    let collector = Process::spawn(job.command(artifacts().bin("xpu_timer_collector")).arg("node"));
    wait_until(PATIENCE, "the collector listens", || collector.stderr().contains("listening on"));
    collector
}

#[test]
fn a_dump_has_every_operation_of_every_rank() {
    let job = Job::new();
    let _collector = stays(&job);
    let begun_ns = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let mut ranks = job.train(2, &["--steps=300", "--step-ms=1"]);
    ranks.wait_for("rank 0 done", PATIENCE);
    ranks.wait_for("rank 1 done", PATIENCE);
    wait_until(PATIENCE, "the job has ended", || ranks.try_wait().is_some());
    let dump = dump(&job, "seconds=600");
    assert_eq!((&dump["ranks"], &dump["lost"]), (&2.into(), &0.into()), "{dump}");
    let mut all = 0;
    for rank in 0..2 {
        let (head, operations) = read(&folder(&dump).join(format!("{rank:05}-00002.ops")));
        all += operations.len() as u64;
        assert_eq!(all_reduces(&operations), (1..=300).collect::<Vec<_>>());
        let info = head.rank.as_ref().expect("the rank");
        assert_eq!((info.rank, info.world_size, head.lost, head.pending.len()), (rank, 2, 0, 0));
        let communicator = operations.iter().find(|one| one.op() == Op::AllReduce).unwrap().communicator;
        assert!(head.communicators.iter().any(|one| one.id == communicator && one.size == 2), "{head:?}");
        // The times are those of the job on the wall clock, too.
        let [first, .., last] = &head.clock[..] else { panic!("two readings: {:?}", head.clock) };
        for operation in operations.iter().filter(|one| one.op() == Op::AllReduce) {
            assert_eq!(operation.status(), OpStatus::Completed);
            assert!(operation.entered_ns <= operation.returned_ns && operation.entered_ns <= operation.completed_ns);
            assert!(operation.completed_ns <= head.until_ns && operation.function.contains("AllReduce"));
            let unix_ns = last.realtime_ns - (last.monotonic_ns - operation.entered_ns);
            assert!((begun_ns..=last.realtime_ns).contains(&unix_ns));
        }
        assert!(first.monotonic_ns < last.monotonic_ns && last.monotonic_ns == head.until_ns);
    }
    assert_eq!(dump["operations"], all);
    let one = self::dump(&job, "seconds=600&rank=1");
    let names: Vec<_> = fs::read_dir(folder(&one)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.contains(&"00001-00002.ops".into()), "{names:?}");
    assert!(names.iter().all(|name| name.to_string_lossy().starts_with("00001-00002.")), "{names:?}");
    let (code, body) = http("POST", job.port, "/timeline?rank=7").unwrap();
    assert!(code == 404 && body.contains("has no rank 7"), "{code} {body}");
    let (code, body) = http("POST", job.port, "/timeline?kernels=some").unwrap();
    assert!(code == 400 && body.contains("neither"), "{code} {body}");
}

/// Rewrites the file of a rank as if it came from another node, with these clocks.
fn move_to_another_node(path: &Path, monotonic: impl Fn(u64) -> u64, realtime: impl Fn(u64) -> u64) {
    let (mut head, operations) = read(path);
    let shown = |ns: u64| if ns == 0 { 0 } else { monotonic(ns) };
    head.rank.as_mut().expect("the rank").node = "another".into();
    for reading in &mut head.clock {
        *reading =
            ClockReading { monotonic_ns: shown(reading.monotonic_ns), realtime_ns: realtime(reading.realtime_ns) };
    }
    (head.from_ns, head.until_ns) = (shown(head.from_ns), shown(head.until_ns));
    head.memory.clear();
    let mut out = Vec::new();
    timeline::write(&mut out, Part::Head(head)).unwrap();
    let mut builder = BlockBuilder::default();
    for mut operation in operations {
        for ns in [
            &mut operation.entered_ns,
            &mut operation.returned_ns,
            &mut operation.started_ns,
            &mut operation.completed_ns,
        ] {
            *ns = shown(*ns);
        }
        builder.push(&operation);
        if builder.is_full() {
            out.extend(builder.finish_chunk());
        }
    }
    out.extend(builder.finish_chunk());
    fs::write(path, out).unwrap();
}

/// Clocks that are a minute and 50 ppm apart, and 7 s on the wall, are aligned on the ends of the
/// collectives that a job on the simulated device had.
#[test]
fn clocks_of_nodes_that_are_off_are_aligned() {
    const AWAY_NS: u64 = 60_000_000_000;
    let job = Job::new();
    let _collector = stays(&job);
    let mut ranks = job.train(2, &["--steps=1000", "--step-ms=10"]);
    ranks.wait_for("rank 0 done", PATIENCE);
    ranks.wait_for("rank 1 done", PATIENCE);
    let folder = folder(&dump(&job, "seconds=600"));
    let other = folder.join("00001-00002.ops");
    let (_, operations) = read(&other);
    let ends = || operations.iter().map(|operation| operation.completed_ns);
    let (from_ns, until_ns) = (ends().filter(|ns| *ns > 0).min().unwrap(), ends().max().unwrap());
    let drifted = |ns: u64| ns + AWAY_NS + ns / 20_000;
    move_to_another_node(&other, drifted, |ns| ns - 7_000_000_000);

    let out = tempfile::tempdir().unwrap();
    let mut command = job.command(artifacts().bin("xpu_timer_gen_trace_timeline"));
    let ran = command.arg("--path").arg(&folder).arg("--output").arg(out.path().join("job")).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let clocks: Vec<Value> = serde_json::from_slice(&fs::read(out.path().join("clocks.json")).unwrap()).unwrap();
    let [own, another] = &clocks[..] else { panic!("{clocks:?}") };
    assert_eq!((&another["node"], &another["aligned_with"]), (&"another".into(), &own["node"]), "{clocks:?}");
    // The two devices are simulated by threads. On a busy machine one may end a collective later.
    let median_us = another["residual"]["median_us"].as_f64().expect("they have common collectives");
    eprintln!("the ends differ by {median_us} us in the median");
    assert!(median_us < 500.0, "{clocks:?}");
    // A time of the other node is on the trace where it really was.
    let on_trace = |clock: &Value, ns: u64| {
        let map = &clock["map"];
        let (offset_ns, pivot_ns) = (map["offset_ns"].as_i64().unwrap(), map["pivot_ns"].as_u64().unwrap());
        let drift = (ns as f64 - pivot_ns as f64) * map["drift"].as_f64().unwrap();
        ns.strict_add_signed(offset_ns + drift.round() as i64)
    };
    for part in 0..=10 {
        let ns = from_ns + (until_ns - from_ns) / 10 * part;
        let error_ns = on_trace(own, ns).abs_diff(on_trace(another, drifted(ns)));
        assert!(error_ns as f64 <= 1e3 * median_us.max(50.0), "{error_ns} ns at part {part}: {clocks:?}");
    }
}

#[test]
fn an_incident_has_the_timelines_of_its_ranks() {
    let job = Job::new().with("XPU_TIMER_TIMELINE_SECONDS", "3");
    let mut ranks = job.train(2, &["--step-ms=50", "--fault=loader", "--fault-rank=1", "--fault-step", "100"]);
    ranks.wait_for("step 80 ", PATIENCE);
    // The window is shorter than the hang timeout, and counts back from the last operation.
    let incident = job.wait_incident(1, Duration::from_secs(90));
    let of = |rank: u32| read(&incident.path.join(format!("{rank:05}-00002.ops")));
    let (head, operations) = of(0);
    assert!(all_reduces(&operations).ends_with(&[99, 100]), "{:?}", all_reduces(&operations));
    let pending: Vec<(Op, u64)> = head.pending.iter().map(|one| (one.op(), one.seq)).collect();
    assert_eq!(pending, [(Op::AllReduce, 101)], "what hangs");
    let (head, operations) = of(1);
    assert!(all_reduces(&operations).ends_with(&[99, 100]) && head.pending.is_empty());
    assert_eq!(head.lost, 0);
    let samples = read_samples(&incident.path.join("00001-00002.samples"));
    assert!(
        samples.threads[0].first[0] + 1_000_000_000 < head.from_ns,
        "the window of the operations is none of the samples: {} {:?}",
        head.from_ns,
        samples.threads
    );
}

fn read_samples(path: &Path) -> StackSamples {
    let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    samples::decode(&bytes).expect("a file of samples")
}

#[test]
fn a_recording_has_the_stacks_of_every_rank() {
    let job = Job::new().with("XPU_TIMER_SAMPLE_RATE", "0");
    let mut ranks = job.train(2, &["--steps=100000", "--step-ms=5"]);
    ranks.wait_for("step 30 ", PATIENCE);
    let (code, body) = http("POST", job.port, "/record?seconds=2&rate=50&threads=main").expect("an answer");
    assert_eq!(code, 200, "{body}\n{}", job.logs());
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!((&answer["ranks"], &answer["problems"]), (&2.into(), &Value::Null), "{answer}");
    for rank in 0..2 {
        let samples = read_samples(&folder(&answer).join(format!("{rank:05}-00002.samples")));
        let [main] = &samples.threads[..] else { panic!("one thread: {:?}", samples.threads) };
        let count: u32 = main.samples.iter().sum();
        assert!(u64::from(count) + samples.missed >= 90 && main.main, "{count}");
        assert!(samples.frames.iter().any(|frame| frame.file_name.contains("train.py:")), "{:?}", samples.frames);
        assert_eq!(samples.rank.map(|info| info.rank), Some(rank));
    }
    assert!(fs::read_to_string(folder(&answer).join("all.svg")).unwrap().contains("train.py"));
    for (query, what) in
        [("seconds=9999", "600 seconds at most"), ("rate=0", "samples a second"), ("threads=x", "neither")]
    {
        let (code, body) = http("POST", job.port, &format!("/record?{query}")).unwrap();
        assert!(code == 400 && body.contains(what), "{query}: {code} {body}");
    }
    let timeline = dump(&job, "seconds=60");
    assert!(!folder(&timeline).join("00000-00002.samples").exists(), "no light samples are taken");
}

#[test]
fn a_killed_rank_keeps_its_timeline() {
    let job = Job::new();
    let _ranks = job.train(2, &["--step-ms=5", "--fault=killed", "--fault-rank=1", "--fault-step", "40"]);
    let incident = job.wait_incident(1, Duration::from_secs(90));
    let (head, mut operations) = read(&incident.path.join("00001-00002.ops"));
    // Its hook has not seen the last ones complete.
    assert!(head.pending.len() < 20, "{:?}", head.pending);
    operations.extend(head.pending);
    assert_eq!(all_reduces(&operations), (1..=40).collect::<Vec<_>>(), "{}", job.logs());
}

/// The functions on the Python stack of the first all-reduce, innermost first.
fn all_reduce_stack(head: &TimelineHead) -> Option<Vec<&PySpyFrame>> {
    let is_all_reduce = |operation: &Operation| operation.op() == Op::AllReduce;
    let stack = head.stacks.iter().find(|stack| stack.operation.as_ref().is_some_and(is_all_reduce))?;
    Some(stack.frames.iter().map(|index| &head.frames[*index as usize]).collect())
}

#[test]
fn launches_have_their_stacks_in_every_python() {
    let versions = ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13"];
    let pythons: Vec<PathBuf> = versions.iter().filter_map(|version| python_version(version)).collect();
    if pythons.len() < versions.len() {
        skip(&format!(
            "{} of {} versions of CPython are not installed",
            versions.len() - pythons.len(),
            versions.len()
        ));
    }
    let job = Job::new().with("XPU_TIMER_DUMP_STACK_COUNT", "100000");
    let script = tree().join("tests/examples/train.py");
    let _ranks: Vec<Process> = (0..pythons.len())
        .map(|rank| {
            let mut command = job.launch(&pythons[rank]);
            command.arg(&script).arg("--step-ms=20").env("WORLD_SIZE", pythons.len().to_string());
            for name in ["RANK", "LOCAL_RANK"] {
                command.env(name, rank.to_string());
            }
            Process::spawn(&mut command)
        })
        .collect();
    let mut heads = Vec::new();
    let name = |rank: usize, end: &str| format!("{rank:05}-{:05}.{end}", pythons.len());
    wait_until(PATIENCE, "all ranks have stacks", || {
        let Some((200, body)) = http("POST", job.port, "/timeline?seconds=600").ok() else { return false };
        let folder = folder(&serde_json::from_str(&body).expect("JSON"));
        let files = (0..pythons.len()).map(|rank| folder.join(name(rank, "ops")));
        heads = files.filter(|path| path.exists()).map(|path| read(&path).0).collect::<Vec<_>>();
        heads.len() == pythons.len() && heads.iter().all(|head| all_reduce_stack(head).is_some())
    });
    let source = fs::read_to_string(&script).unwrap();
    for (head, python) in heads.iter().zip(&pythons) {
        let stack = all_reduce_stack(head).unwrap();
        let names: Vec<&str> = stack.iter().filter_map(|frame| frame.func_name.rsplit('.').next()).collect();
        assert!(names.ends_with(&["all_reduce", "train_step", "main", "<module>"]), "{}: {stack:?}", python.display());
        let (_, line) = stack[stack.len() - 3].file_name.split_once("train.py:").expect("the file");
        let text = source.lines().nth(line.parse::<usize>().unwrap() - 1).unwrap();
        assert!(text.contains("self.world.all_reduce("), "{}: line {line}: {text}", python.display());
        let memory = head.memory.last().expect("an allocation was seen");
        assert_eq!(memory.allocated_bytes, 4096, "the gradients");
    }
    // The file of the original tool.
    let path = job.dir.join("timeline/asked");
    let mut command = job.command(artifacts().bin("xpu_timer_dump_timeline"));
    command.args(["--host", "127.0.0.1", "--rank", "", "--delay", "0", "--port", &job.port.to_string()]);
    assert!(command.arg("--dump-path").arg(&path).arg("--dump-count=5").output().unwrap().status.success());
    for rank in 0..pythons.len() {
        let file = path.join(name(rank, "tracing_kernel_callstack"));
        wait_until(PATIENCE, "the stacks", || file.exists());
        let stacks = PythonStackInTimeline::decode(&fs::read(file).unwrap()[..]).unwrap();
        let [stack] = &stacks.named_frames[..] else { panic!("one kind of operation: {stacks:?}") };
        let frames = &stack.frames.as_ref().unwrap().frames;
        assert_eq!((stacks.rank, frames[0].func_name.as_str()), (rank as i32, "<module>"));
        assert_eq!(stack.name, "xpu_timer_AllReduce_RING_LL_Sum_f32_size_4096");
    }
}

#[test]
fn nothing_is_recorded_with_a_window_of_zero() {
    let job = Job::new().with("XPU_TIMER_TIMELINE_SECONDS", "0").with("XPU_TIMER_HANG_TIMEOUT", "8");
    let mut ranks = job.train(2, &["--step-ms=5", "--fault=loader", "--fault-rank=1", "--fault-step", "40"]);
    ranks.wait_for("step 20 ", PATIENCE);
    let (code, body) = http("POST", job.port, "/timeline").unwrap();
    assert!(code == 400 && body.contains("XPU_TIMER_TIMELINE_SECONDS is 0"), "{code} {body}");
    let incident = job.wait_incident(1, Duration::from_secs(90));
    let has = |name: &str| incident.path.join(name).exists();
    assert!(!has("00000-00002.ops") && has("00000-00002.samples"));

    // The sampler does not need the recorder.
    let samples = read_samples(&incident.path.join("00001-00002.samples"));
    let functions: Vec<&str> = samples.frames.iter().map(|frame| frame.func_name.as_str()).collect();
    assert!(functions.iter().any(|name| name.ends_with("__next__")), "where the loader hangs: {functions:?}");
    let text = fs::read_to_string(incident.path.join("verdict.txt")).unwrap();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, stay) = text.split_once("rank 1 has been in ").unwrap_or_else(|| panic!("its stay: {text}"));
    let (function, rest) = stay.split_once(" (train.py:").unwrap_or_else(|| panic!("its place: {stay}"));
    let (_, seconds) = rest.split_once(") for ").expect("its length");
    // The first sample may already show the hang.
    let seconds = seconds.strip_prefix("at least ").unwrap_or(seconds);
    let seconds: u32 = seconds.split_once(" s").and_then(|(number, _)| number.parse().ok()).expect("seconds");
    assert!(function.ends_with("__next__") && (6..60).contains(&seconds), "{stay}");
}

#[test]
fn a_folder_that_cannot_be_written_is_an_answer() {
    let job = Job::new();
    let path = job.dir.join("timeline/file");
    fs::write(&path, "").unwrap();
    let job = job.with("XPU_TIMER_TIMELINE_PATH", &path.display().to_string());
    let mut ranks = job.train(2, &["--step-ms=5", "--seconds=600"]);
    ranks.wait_for("step 20 ", PATIENCE);
    let (code, body) = http("POST", job.port, "/timeline").unwrap();
    assert!(code == 507 && body.contains("timeline/file"), "{code} {body}");
    // The requester's own disk is another one.
    let output = job.dir.join("fetched");
    let command = fetch(&job, &["--seconds=60"], &output);
    assert!(command.contains("/fetched/timeline-"), "{command}");
}

#[test]
fn every_kernel_is_recorded_for_a_while_on_demand() {
    let job = Job::new();
    let mut ranks = job.train(2, &["--step-ms=5", "--seconds=600"]);
    ranks.wait_for("step 20 ", PATIENCE);
    let kernels = |operations: &[Operation]| operations.iter().filter(|one| one.op() == Op::Kernel).count();
    let before = dump(&job, "seconds=60");
    let (_, operations) = read(&folder(&before).join("00000-00002.ops"));
    assert_eq!(kernels(&operations), 0);
    let begun = Instant::now();
    let output = job.dir.join("detailed");
    let path = PathBuf::from(fetch(&job, &["--seconds=2", "--kernels=all"], &output).trim());
    assert!(begun.elapsed() > Duration::from_secs(2));
    for rank in 0..2 {
        let (head, operations) = read(&path.join(format!("{rank:05}-00002.ops")));
        let forward = operations.iter().filter(|one| one.function.contains("forward_layer_3")).count();
        let steps = all_reduces(&operations).len();
        assert!(forward > 10 && forward <= steps && forward * 2 > steps, "{forward} of {steps} steps");
        assert!(kernels(&operations) >= forward * 8 && head.lost == 0);
    }
    ranks.wait_for("step 900 ", PATIENCE);
    let after = dump(&job, "seconds=1");
    let (_, operations) = read(&folder(&after).join("00000-00002.ops"));
    assert_eq!(kernels(&operations), 0, "it has ended");
}

/// A disk on which timelines are slow: a write into one waits until a file exists.
const SLOW_DISK: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

ssize_t write(int file, const void *bytes, size_t size) {
    char link[64], path[4096];
    const char *awaited = getenv("TIMELINES_WAIT_FOR"), end[] = ".ops.new";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    const ssize_t length = readlink(link, path, sizeof path), tail = sizeof end - 1;
    if (awaited && length > tail && memcmp(path + length - tail, end, tail) == 0)
        while (access(awaited, F_OK) != 0)
            usleep(1000);
    return syscall(SYS_write, file, bytes, size);
}
"#;

/// A job whose collector writes no timeline into an incident folder until the returned file exists.
pub fn with_slow_timelines(job: Job) -> (Job, PathBuf) {
    let library = compile_c(&job.dir, "slow_disk.so", SLOW_DISK, &["-O2", "-shared", "-fPIC"]);
    let awaited = job.dir.join("timelines_go_on");
    let job = job.with("LD_PRELOAD", &library.display().to_string());
    (job.with("TIMELINES_WAIT_FOR", &awaited.display().to_string()), awaited)
}

/// The text of the report as long as timelines are missing.
pub const NOT_HERE: &str = "had not come when this report was drawn";

/// Waits until an incident is in a state.
fn wait_state(job: &Job, index: usize, state: &str) -> Value {
    wait_until(PATIENCE, state, || job.status().is_ok_and(|status| status["incidents"][index]["state"] == state));
    job.status().unwrap()["incidents"][index].clone()
}

#[test]
fn a_verdict_does_not_wait_for_timelines_on_a_slow_disk() {
    let (job, awaited) = with_slow_timelines(Job::new());
    let _collector = collector(&job, &[]);
    let mut hooks = [0, 1].map(|rank| FakeHook::connected(&job, "slow", rank, 2));
    hooks[0].hang(1);
    let id = wait_state(&job, 0, "dumped")["incident"].as_str().unwrap().to_string();
    let incident = job.incidents().pop().expect("its verdict is on disk");
    let has = |name: &str| incident.path.join(name).exists();
    let report = || fs::read_to_string(incident.path.join("report.html")).unwrap();
    for name in ["verdict.txt", "evidence.bin", "00001-00002.stacktrace", "py_stack.svg", PENDING] {
        assert!(has(name), "{name}");
    }
    assert!(!has("00000-00002.ops") && report().contains(NOT_HERE) && job.finished_incidents().is_empty());
    assert_eq!(fs::canonicalize(job.dir.join("timeline/latest")).unwrap(), incident.path.canonicalize().unwrap());
    let (code, body) = http("GET", job.port, &format!("/incidents/{id}")).unwrap();
    assert!(code == 200 && body.contains("\"sentence\""), "{code} {body}");
    fs::write(&awaited, "").unwrap();
    let finished = job.wait_incident(1, PATIENCE);
    assert_eq!(
        (finished.path.as_path(), &finished.verdict["errors"]),
        (incident.path.as_path(), &serde_json::json!([]))
    );
    assert!(has("00000-00002.ops") && has("00001-00002.ops") && !report().contains(NOT_HERE));

    // The disk does not answer any more, and answers again later.
    fs::remove_file(&awaited).unwrap();
    hooks[0].resolve(1);
    wait_state(&job, 0, "resolved");
    hooks[1].hang(2);
    wait_state(&job, 1, "dumped");
    let second = || job.incidents().pop().unwrap();
    wait_until(PATIENCE, "the verdict says so", || {
        second().verdict["errors"].to_string().contains("the timelines cannot be written")
    });
    assert!(second().path.join(PENDING).exists());
    fs::write(&awaited, "").unwrap();
    wait_until(PATIENCE, "they are given up", || !second().path.join(PENDING).exists());
}

#[test]
fn a_disk_without_room_for_the_timelines_keeps_the_verdict() {
    let (job, awaited) = with_slow_timelines(Job::new());
    let Some(disk) = Tmpfs::new(job.dir.join("disk"), 4096) else { return };
    let collector = collector(&job, &[]);
    let mut hook = FakeHook::start(&job, "full", 0, 1);
    hook.hello.timeline_path = disk.0.display().to_string();
    hook.join(&job);
    hook.hang(1);
    let path = PathBuf::from(wait_state(&job, 0, "dumped")["path"].as_str().unwrap());
    assert!(path.starts_with(&disk.0) && path.join(PENDING).exists());
    assert!(fs::write(disk.0.join("filler"), vec![0; 8 << 20]).is_err(), "the disk is full now");
    fs::write(&awaited, "").unwrap();
    wait_until(PATIENCE, "the timelines are given up", || !path.join(PENDING).exists());
    wait_until(PATIENCE, "the status says why", || {
        job.status()
            .is_ok_and(|status| status["incidents"][0]["errors"].to_string().contains("No space left on device"))
    });
    let names = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let partial: Vec<String> = names.filter(|name| name.contains(".ops") || name.ends_with(".new")).collect();
    assert!(partial.is_empty(), "{partial:?}");
    let verdict: Value = serde_json::from_slice(&fs::read(path.join("verdict.json")).unwrap()).unwrap();
    assert!(verdict["sentence"].is_string() && collector.stderr().contains("No space left on device"));
}

/// Runs `xpu_timer_collector timeline`, and returns its output.
pub fn fetch(job: &Job, arguments: &[&str], output: &Path) -> String {
    let mut command = job.command(artifacts().bin("xpu_timer_collector"));
    let ran = command.arg("timeline").args(arguments).arg("--output").arg(output).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).unwrap()
}

/// As many matrix products a second as given, for some seconds; prints their number.
const PRODUCTS: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaDeviceSynchronize(void);
int cublasCreate_v2(void **);
int cublasSgemm_v2(void *, int, int, int, int, int, const float *, const float *, int, const float *, int, const float *, float *, int);

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

int main(int argc, char **argv) {
    double rate = atof(argv[1]), seconds = atof(argv[2]), begin = now();
    void *handle, *a, *b, *c;
    float one = 1, zero = 0;
    long count = 0;
    int code = cublasCreate_v2(&handle) | cudaMalloc(&a, 64) | cudaMalloc(&b, 64) | cudaMalloc(&c, 64);
    while (code == 0 && now() - begin < seconds) {
        for (; count < (now() - begin) * rate; count++)
            code |= cublasSgemm_v2(handle, 0, 1, 2, 2, 2, &one, a, 2, b, 2, &zero, c, 2);
        usleep(1000);
    }
    code |= cudaDeviceSynchronize();
    printf("%ld products, code %d\n", count, code);
    fflush(stdout);
    usleep(200000);
    return code;
}
"#;

#[test]
fn ten_thousand_operations_a_second_are_recorded_without_loss() {
    let job = Job::new().with("XPU_TIMER_BRACKET", "matmuls");
    let _collector = stays(&job);
    let sim = format!("-L{}", artifacts().sim().display());
    let program = compile_c(&job.dir, "products", PRODUCTS, &[&sim, "-l:libcublas.so.13", "-l:libcudart.so.13"]);
    let mut command = job.launch(program);
    let begun = Instant::now();
    let mut ranks = Process::spawn(command.args(["10000", "4"]).env("RANK", "0").env("WORLD_SIZE", "1"));
    ranks.wait_for("products", PATIENCE);
    let stdout = ranks.stdout();
    let line = stdout.lines().find(|line| line.contains("products")).expect("a count").to_string();
    let count: u64 = line.split(' ').next().unwrap().parse().unwrap();
    assert!(line.ends_with("code 0"), "{line}");
    eprintln!("{:.0} operations a second", count as f64 / begun.elapsed().as_secs_f64());
    let dump = dump(&job, "seconds=600");
    let (head, operations) = read(&folder(&dump).join("00000-00001.ops"));
    let products = operations.iter().filter(|one| one.op() == Op::Matmul).count() as u64;
    assert_eq!((products + head.pending.len() as u64, head.lost), (count, 0), "{}", job.logs());
}

#[test]
fn the_oldest_operations_leave_when_the_memory_is_used_up() {
    let job = Job::new().with("XPU_TIMER_BRACKET", "matmuls").with("XPU_TIMER_TIMELINE_MB", "1");
    let _collector = stays(&job);
    let sim = format!("-L{}", artifacts().sim().display());
    let program = compile_c(&job.dir, "products", PRODUCTS, &[&sim, "-l:libcublas.so.13", "-l:libcudart.so.13"]);
    let mut ranks = [0, 1, 2].map(|rank| {
        let mut command = job.launch(&program);
        Process::spawn(command.args(["10000", "5"]).env("RANK", rank.to_string()).env("WORLD_SIZE", "3"))
    });
    ranks.iter_mut().for_each(|rank| rank.wait_for("products", PATIENCE));
    let dump = dump(&job, "seconds=600");
    let (mut bytes, mut from_ns) = (0, Vec::new());
    for (rank, process) in ranks.iter().enumerate() {
        let path = folder(&dump).join(format!("{rank:05}-00003.ops"));
        bytes += fs::metadata(&path).unwrap().len();
        let (head, mut operations) = read(&path);
        let stdout = process.stdout();
        let line = stdout.lines().find(|line| line.contains("products")).expect("a count");
        let count: usize = line.split(' ').next().unwrap().parse().unwrap();
        // Those that are left are the newest, and none between them is missing.
        operations.extend(head.pending);
        operations.retain(|one| one.op() == Op::Matmul);
        let (first, last) = (operations.first().unwrap(), operations.last().unwrap());
        assert_eq!(last.ticket - first.ticket + 1, operations.len() as u64, "{}", job.logs());
        assert!(operations.len() < count * 9 / 10 && operations.len() > count / 20, "{} of {count}", operations.len());
        assert!(head.lost == 0 && head.from_ns <= first.completed_ns, "{} {first:?}", head.from_ns);
        from_ns.push(first.completed_ns);
    }
    assert!(bytes < 1_200_000, "{bytes} bytes");
    // The oldest of all ranks leave first.
    let (first, last) = (from_ns.iter().min().unwrap(), from_ns.iter().max().unwrap());
    assert!(last - first < 2_000_000_000, "{from_ns:?}");
}

#[test]
fn the_original_tools_command_records_the_next_operations() {
    let job = Job::new().with("POD_NAME", "pod-7").with("XPU_TIMER_ALL_DUMP_TIMELINE", "0");
    // Without a limit in seconds, each step has one all-reduce and nothing else.
    let mut ranks = job.train(2, &["--step-ms=5"]);
    ranks.wait_for("step 20 ", PATIENCE);
    let ask = |path: &Path, more: &[&str]| {
        let mut command = job.command(artifacts().bin("xpu_timer_dump_timeline"));
        command.args(["--host", "127.0.0.1", "--rank", "", "--delay", "0", "--port", &job.port.to_string()]);
        let ran = command.arg("--dump-path").arg(path).args(more).output().unwrap();
        (ran.status.code(), String::from_utf8(ran.stdout).unwrap(), String::from_utf8(ran.stderr).unwrap())
    };
    let path = job.dir.join("timeline/asked");
    let (code, stdout, _) = ask(&path, &["--dump-count=25", "--no-memory"]);
    assert_eq!(code, Some(0));
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!(lines[0], "Disable memory traces");
    assert_eq!(lines[1], format!("dumping to {}, with count 25", path.display()));
    assert!(lines[2].starts_with("{'dump_path': '") && lines[2].ends_with("'reset': False, 'dump_kernel_type': 3}"));
    assert_eq!(lines[3], "{'node': 'pod-7', 'msg': 'Starting dumping'}");
    let file = |rank: u32, end: &str| path.join(format!("{rank:05}-00002.timeline{end}"));
    wait_until(PATIENCE, "both ranks have their file", || file(0, "").exists() && file(1, "").exists());
    let traces = KernelTraces::decode(&fs::read(file(1, "")).unwrap()[..]).unwrap();
    assert_eq!((traces.rank, traces.traces.len()), (1, 25));
    let ids: Vec<u64> = traces.traces.iter().map(|trace| trace.trace_id).collect();
    assert_eq!(ids, (0..25).collect::<Vec<_>>());
    for trace in &traces.traces {
        let Some(DebugData::NcclDebug(nccl)) = &trace.debug_data else { panic!("{trace:?}") };
        assert_eq!((trace.kernel_type, nccl.ranks, nccl.nodes, nccl.input_size_in_bytes), (1, 2, 1, 4096));
        // The grids and blocks of the simulated device.
        assert_eq!((&nccl.grids[..], &nccl.blocks[..]), (&[2, 1, 1][..], &[544, 1, 1][..]));
    }
    let names = fs::read_to_string(file(0, ".meta")).unwrap();
    assert_eq!(names, "0,xpu_timer_AllReduce_RING_LL_Sum_f32_size_4096\n");
    assert!(!file(1, ".meta").exists(), "rank 0 alone writes the names");

    for outside in [job.dir.join("elsewhere"), job.dir.join("timeline/../elsewhere")] {
        let (_, stdout, _) = ask(&outside, &[]);
        assert!(stdout.contains("is outside the folders of timelines"), "{stdout}");
        assert!(!job.dir.join("elsewhere").exists());
    }
    let (code, _, stderr) = ask(&path, &["--oss-path=oss://x"]);
    assert!(code == Some(1) && stderr.contains("not supported"), "{stderr}");
    let (_, stdout, _) = ask(&path, &["--dump-count=90000"]);
    assert!(stdout.contains("'msg': 'Starting dumping'"), "{stdout}");
    let (_, stdout, _) = ask(&path, &[]);
    assert!(stdout.contains("'msg': 'The process is dumping, skip'"), "{stdout}");
    let (_, stdout, _) = ask(&path, &["--reset"]);
    assert!(stdout.contains("'msg': 'Force reset dumping status'"), "{stdout}");
    // The collector listens on another address.
    let (code, stdout, _) = ask(&path, &["--host", "127.0.0.2", "--rank", "", "--no-matmul", "--no-memory"]);
    let command = format!("\nxpu_timer_collector timeline --seconds 20 --output '{}'\n", path.display());
    assert!(code == Some(0) && stdout.ends_with(&command), "{stdout}");
    let (code, _, stderr) = ask(&path, &["--no-nccl", "--no-matmul", "--no-memory"]);
    assert!(code == Some(1) && stderr.contains("No Kernel to trace"), "{stderr}");
}

#[test]
fn the_original_tools_command_records_matrix_products_and_copies() {
    let job = Job::new();
    let sim = format!("-L{}", artifacts().sim().display());
    let program = compile_c(&job.dir, "products", PRODUCTS, &[&sim, "-l:libcublas.so.13", "-l:libcudart.so.13"]);
    let mut command = job.launch(program);
    let _rank = Process::spawn(command.args(["100", "600"]).env("RANK", "0").env("WORLD_SIZE", "1"));
    wait_until(PATIENCE, "the rank registers", || {
        job.status().is_ok_and(|status| status["ranks"].as_array().is_some_and(|ranks| ranks.len() == 1))
    });
    let path = job.dir.join("timeline/asked");
    let mut command = job.command(artifacts().bin("xpu_timer_dump_timeline"));
    command.args(["--host", "127.0.0.1", "--rank", "", "--delay", "0", "--port", &job.port.to_string()]);
    assert!(command.arg("--dump-path").arg(&path).arg("--dump-count=300").output().unwrap().status.success());
    let file = path.join("00000-00001.timeline");
    wait_until(PATIENCE, "the file", || file.exists());
    let traces = KernelTraces::decode(&fs::read(file).unwrap()[..]).unwrap().traces;
    let is_product = |debug: &Option<DebugData>| matches!(debug, Some(DebugData::MmDebug(of)) if of.lds.len() == 3);
    assert!(traces.len() == 300 && traces.iter().all(|trace| is_product(&trace.debug_data)), "{traces:?}");
    // The program has 100 a second. By default only some of them are recorded.
    let seconds = (traces[299].start_us - traces[0].start_us) as f64 / 1e6;
    assert!(299.0 / seconds > 70.0, "300 in {seconds} s");
    // The detail ends by itself.
    wait_until(PATIENCE, "only some are recorded again", || {
        std::thread::sleep(Duration::from_millis(500));
        let (head, operations) = read(&folder(&dump(&job, "seconds=600")).join("00000-00001.ops"));
        let is_new = |one: &&Operation| head.until_ns.saturating_sub(one.completed_ns) < 3_000_000_000;
        operations.iter().filter(is_new).count() < 210
    });
}

/// Starts rank `rank` of a training job of two ranks on a node of its own.
fn train(job: &Job, rank: u32, rendezvous: &Path, arguments: &[&str]) -> Process {
    let mut command = job.launch(xpu_timer_tests::python());
    command.arg(tree().join("tests/examples/train.py")).args(arguments);
    let number = rank.to_string();
    for (name, value) in [("RANK", &*number), ("WORLD_SIZE", "2"), ("LOCAL_RANK", &*number), ("LOCAL_WORLD_SIZE", "1")]
    {
        command.env(name, value);
    }
    Process::spawn(command.env("XPU_TIMER_JOB", "wide").env("XPU_EXAMPLE_RENDEZVOUS", rendezvous))
}

#[test]
fn the_timelines_of_all_nodes_are_fetched_in_one_call() {
    let cluster = Cluster::new();
    let nodes = ["node-a", "node-b"].map(|name| cluster.node_job(name));
    let rendezvous = cluster.job.dir.join("rendezvous");
    let arguments = ["--step-ms=5", "--fault=loader", "--fault-rank=1", "--fault-step", "200"];
    let mut ranks: Vec<Process> =
        nodes.iter().zip(0..).map(|(job, rank)| train(job, rank, &rendezvous, &arguments)).collect();
    cluster.wait_ranks("wide", 2);
    // The collectors record an operation a moment after the step that it belongs to.
    ranks[0].wait_for("step 60 ", PATIENCE);
    let output = cluster.job.dir.join("fetched");
    let fetch = |more: &[&str]| {
        let mut command = cluster.job.command(artifacts().bin("xpu_timer_collector"));
        command.args(["timeline", "--url", &cluster.url(), "--job", "wide", "--seconds", "60", "--output"]);
        command.arg(&output).args(more).output().unwrap()
    };
    let ran = fetch(&[]);
    let (stdout, stderr) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{stderr}\n{}", cluster.log());
    let folder = PathBuf::from(stdout.trim());
    for rank in 0..2 {
        let (head, operations) = read(&folder.join(format!("{rank:05}-00002.ops")));
        assert_eq!((head.rank.expect("the rank").rank, head.lost), (rank, 0));
        let seqs = all_reduces(&operations);
        assert!(seqs.len() >= 20 && seqs == (1..=seqs.len() as u64).collect::<Vec<_>>(), "{seqs:?}");
    }
    let ran = fetch(&["--rank=1"]);
    let folder = PathBuf::from(String::from_utf8_lossy(&ran.stdout).trim());
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names: Vec<String> = names.filter(|name| !name.ends_with(".samples")).collect();
    assert_eq!(names, ["00001-00002.ops"]);
    // Stacks are recorded by the same way.
    let mut command = cluster.job.command(artifacts().bin("xpu_timer_collector"));
    command.args(["record", "--url", &cluster.url(), "--job", "wide", "--seconds", "1", "--rate", "20", "--output"]);
    let ran = command.arg(&output).output().unwrap();
    assert!(ran.status.success(), "{}\n{}", String::from_utf8_lossy(&ran.stderr), cluster.log());
    let folder = PathBuf::from(String::from_utf8_lossy(&ran.stdout).trim());
    for rank in 0..2 {
        let samples = read_samples(&folder.join(format!("{rank:05}-00002.samples")));
        assert_eq!(samples.rank.map(|info| info.rank), Some(rank));
    }
    assert!(folder.join("speedscope.json").exists());
    let ran = fetch(&["--rank=5"]);
    assert!(
        !ran.status.success() && String::from_utf8_lossy(&ran.stderr).contains("no node has rank 5 of job wide"),
        "{ran:?}"
    );

    // The cluster collector also writes a folder of its own, and the incident has the timelines.
    let (code, body) = http("POST", cluster.port, "/timeline?job=wide&seconds=60").unwrap();
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert!(code == 200 && answer["ranks"] == 2 && answer["lost"] == 0, "{code} {body}");
    let incident = cluster.wait_incident(1);
    for rank in 0..2 {
        let (_, operations) = read(&incident.path.join(format!("{rank:05}-00002.ops")));
        assert!(all_reduces(&operations).ends_with(&[199, 200]), "{:?}", all_reduces(&operations));
        let samples = read_samples(&incident.path.join(format!("{rank:05}-00002.samples")));
        assert!(samples.threads.iter().any(|thread| thread.main && !thread.stack.is_empty()), "{samples:?}");
    }
    drop(ranks);
}
