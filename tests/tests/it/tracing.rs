//! Traced Python functions: on every CPython that has `sys.monitoring`, through a real collector,
//! and beside the tools that also look at Python functions.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;
use xpu_timer_proto::{
    timeline::{self, Reader},
    v1::{OpKind, Operation},
};
use xpu_timer_tests::{Job, PATIENCE, Process, http, python_version, skip, tree, wait_until};

use crate::metrics::{page, samples};

const VARIABLE: &str = "XPU_TIMER_HOST_TRACING_FUNC";

/// CPythons with `sys.monitoring`.
const VERSIONS: [&str; 2] = ["3.12", "3.13"];

/// Functions of `traced.py` and `late.py`, and how often they are called.
const CALLS: [(&str, u64); 9] = [
    ("plain", 3),
    // Three items and the end.
    ("__main__@items", 4),
    ("__main__@Loader@__next__", 6),
    ("fails", 2),
    ("decorated", 1),
    ("recursive", 40),
    ("in_thread", 5),
    ("late@function", 2),
    ("late@Class@static", 1),
];

/// Calls within `recursive` that are beyond the number of open calls of a thread.
const TOO_DEEP: u64 = 40 - 8;

const LATE: &str = "
def function():
    pass

class Class:
    @staticmethod
    def static():
        pass
";

const TRACED: &str = r#"
import functools, gc, os, sys, threading, time
sys.path[:0] = [os.environ["EXAMPLES"], os.environ["HERE"]]
import cuda

def plain(seconds):
    time.sleep(seconds)

def items(count):
    for item in range(count):
        yield item

class Loader:
    left = 5
    def __iter__(self):
        return self
    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left

def fails():
    raise ValueError("on purpose")

def decorate(function):
    @functools.wraps(function)
    def wrapper():
        return function()
    return wrapper

@decorate
def decorated():
    pass

def recursive(depth):
    if depth:
        recursive(depth - 1)

def in_thread():
    pass

def untraced():
    fails()

def forked():
    # The child has the functions of its parent, and no ring of its own.
    if not (child := os.fork()):
        plain(0.001)
        gc.collect()
        os._exit(0)
    return os.waitpid(child, 0)[1]

gc.disable()
cuda.set_device(0)
cuda.Buffer(8)
# The main thread runs Python code, so a pending call is executed soon.
deadline = time.monotonic() + 30
while "WAITS" in os.environ and not gc.callbacks and time.monotonic() < deadline:
    time.sleep(0.001)
for _ in range(3):
    plain(0.02)
assert list(items(3)) == [0, 1, 2]
assert list(Loader()) == [4, 3, 2, 1, 0]
for function in fails, untraced:
    try:
        function()
    except ValueError:
        pass
decorated()
recursive(39)
threads = [threading.Thread(target=in_thread) for _ in range(5)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert forked() == 0
import late
late.function()
late.function()
late.Class.static()
garbage = []
garbage.append(garbage)
del garbage
gc.collect()
print("done", flush=True)
while "WAITS" in os.environ and not os.path.exists(os.path.join(os.environ["HERE"], "end")):
    time.sleep(0.005)
"#;

/// A folder with the programs, and a command that runs the first one.
fn program(job: &Job, python: &Path, launched: bool) -> Command {
    fs::write(job.dir.join("traced.py"), TRACED).unwrap();
    fs::write(job.dir.join("late.py"), LATE).unwrap();
    let mut command = if launched { job.launch(python) } else { job.command(python) };
    command.arg(job.dir.join("traced.py")).env("EXAMPLES", tree().join("tests/examples")).env("HERE", &job.dir);
    command.env("PYTHONWARNINGS", "ignore").env("RANK", "0").env("WORLD_SIZE", "1").env("LOCAL_RANK", "0");
    command
}

/// The CPythons that are there.
fn pythons() -> Vec<PathBuf> {
    let found: Vec<PathBuf> = VERSIONS.iter().filter_map(|version| python_version(version)).collect();
    if found.len() < VERSIONS.len() {
        skip("CPython 3.12 or 3.13 is missing (pyenv)");
    }
    found
}

/// All operations of a timeline that are calls of traced functions, by name.
fn calls(job: &Job) -> BTreeMap<String, Vec<Operation>> {
    let answer = http("POST", job.port, "/timeline?seconds=60").expect("the collector answers").1;
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let file = Path::new(answer["path"].as_str().expect("a folder")).join("00000-00001.ops");
    calls_in(&file)
}

fn calls_in(file: &Path) -> BTreeMap<String, Vec<Operation>> {
    let mut reader = Reader::new(fs::File::open(file).unwrap()).unwrap();
    let mut calls: BTreeMap<String, Vec<Operation>> = BTreeMap::new();
    while let Some(block) = reader.next_block().unwrap() {
        let all = timeline::operations(&block).unwrap();
        for call in all.filter(|one| one.kind() == OpKind::HostCall && one.op == 0 && !one.function.is_empty()) {
            calls.entry(call.function.clone()).or_default().push(call);
        }
    }
    calls
}

fn listed() -> String {
    let names: Vec<&str> = CALLS.iter().map(|(name, _)| *name).collect();
    format!("{},os@nothing,not_imported@function,bad-name", names.join(","))
}

#[test]
fn every_call_is_in_the_timeline_and_the_metrics() {
    for python in pythons() {
        let job = Job::new().with("XPU_TIMER_PROMETHEUS_UPDATE_INTERVAL", "1").with(VARIABLE, &listed());
        let mut process = Process::spawn(program(&job, &python, true).env("WAITS", "1"));
        process.wait_for("done", PATIENCE);
        let count = |text: &str, name: &str| {
            let counted = samples(text, "xpu_timer_host_function_calls_total");
            counted.iter().find(|sample| sample.label("function") == name).map_or(0, |sample| sample.value as u64)
        };
        let expected = |name: &str, calls: u64| if name == "recursive" { calls - TOO_DEEP } else { calls };
        let mut text = String::new();
        wait_until(PATIENCE, "every function is on the page", || {
            text = page(&job);
            count(&text, "GC") >= 1 && count(&text, "late@Class@static") == 1
        });
        let calls = calls(&job);
        for (name, wanted) in CALLS {
            assert_eq!(count(&text, name), expected(name, wanted), "{name} on {}: {text}", python.display());
            assert_eq!(calls.get(name).map_or(0, Vec::len) as u64, expected(name, wanted), "{name}");
        }
        let plain = &calls["plain"];
        assert!(plain.iter().all(|call| (20_000_000..2_000_000_000).contains(&(call.returned_ns - call.entered_ns))));
        let threads: std::collections::BTreeSet<u32> = calls["in_thread"].iter().map(|call| call.tid).collect();
        assert_eq!(threads.len(), 5, "each thread has its own track");
        let collection = calls["GC"].last().and_then(|call| call.collection).expect("a collection");
        assert!(collection.generation == 2 && collection.collected >= 1, "{collection:?}");
        for (part, least, most) in [("avg", 0.02, 1.0), ("max", 0.02, 2.0)] {
            let values = samples(&text, &format!("xpu_timer_host_function_{part}_seconds"));
            let plain = values.iter().find(|sample| sample.label("function") == "plain").expect("plain was called");
            assert!((least..most).contains(&plain.value), "{part}: {plain:?}");
        }
        assert_eq!(samples(&text, "xpu_timer_hook_panics_total")[0].value, 0.0);
        fs::write(job.dir.join("end"), "").unwrap();
        let output = process.wait(PATIENCE);
        assert_eq!((output.code(), output.stderr.as_str()), (0, ""));
        let logs = job.logs();
        let lines: Vec<&str> = logs.lines().filter(|line| line.contains(VARIABLE)).collect();
        assert_eq!(lines.len(), 2, "{logs}");
        assert!(lines[0].contains("\"bad-name\" cannot be used"), "{logs}");
        let missing = "not traced: os@nothing (does not exist); not_imported@function (its module is not imported)";
        assert!(lines[1].ends_with(missing), "{logs}");
    }
}
