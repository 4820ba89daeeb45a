//! Python stacks of every CPython that can be read (those of pyenv or the PATH, and the two of the
//! second Debian), and the command line over them. Free-threaded builds that are there are tested
//! like the others. The tests read the counters of the interpreters of living processes:
//! collections of garbage, and the batches of PyTorch's data loaders, wherever a program keeps
//! their iterators.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use tempfile::TempDir;
use xpu_timer_capture::{Counter, Counts, Frame, merge};
use xpu_timer_proto::{
    procfs, samples,
    server::{PySpyFrame, PySpyStacktrace},
    v1::{SampledThread, StackSamples},
};
use xpu_timer_tests::{
    PATIENCE, Process, artifacts, forky, forky_packages, free_threaded_python, only_child, python, python_version,
    python_with, run_in_forky, skip, wait_until,
};

use super::{capture_until, describe};

/// Versions that are installed on this machine.
pub const HOST: [&str; 6] = ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13"];
/// Versions that the second Debian has.
pub const FORKY: [&str; 2] = ["3.14", "3.15"];
/// Versions with a free-threaded build that can be read.
pub const FREE_THREADED: [&str; 3] = ["3.13t", "3.14t", "3.15t"];

/// One CPython.
pub struct Python {
    pub minor: u8,
    /// Whether it has no GIL.
    pub free_threaded: bool,
    program: PathBuf,
    /// Its options before the script.
    options: &'static [&'static str],
    /// The root folder that it lives in, if that is not this one.
    root: Option<PathBuf>,
}

/// A script that runs and has said that it is ready.
pub struct Script {
    pub process: Process,
    /// The interpreter's, as this machine sees it.
    pub pid: i32,
    /// Path of the script, as the interpreter sees it.
    pub path: String,
    _folder: TempDir,
}

/// All versions that are there; the others are skipped out loud. No Debian has a free-threaded
/// build, so they are not checked.
pub fn all() -> Vec<Python> {
    let minor =
        |version: &str| version.trim_start_matches("3.").trim_end_matches('t').parse().expect("a minor version");
    let mut found = Vec::new();
    for version in HOST {
        match python_version(version) {
            Some(program) => found.push(Python::here(minor(version), program)),
            None => skip(&format!("CPython {version} is not installed")),
        }
    }
    match forky() {
        Ok(root) => found.extend(FORKY.map(|version| Python {
            minor: minor(version),
            free_threaded: false,
            program: format!("python{version}").into(),
            options: &[],
            root: Some(root.clone()),
        })),
        Err(error) => skip(&format!("CPython {}: {error:#}", FORKY.join(" and "))),
    }
    let free_threaded = FREE_THREADED.iter().filter_map(|version| Some((*version, free_threaded_python(version)?)));
    found.extend(free_threaded.map(|(version, program)| Python {
        minor: minor(version),
        free_threaded: true,
        program,
        options: &[],
        root: None,
    }));
    found
}

impl Python {
    /// A program of this machine.
    pub fn here(minor: u8, program: PathBuf) -> Python {
        Python { minor, free_threaded: false, program, options: &[], root: None }
    }

    /// The same one with a GIL, which a free-threaded build enables when it is asked to.
    pub fn with_gil(self) -> Python {
        Python { options: if self.free_threaded { &["-X", "gil=1"] } else { &[] }, ..self }
    }

    /// The same one with packages from PyPI, and how a script that uses them begins.
    pub fn with_packages(self, packages: &[&str]) -> (Python, String) {
        let version = self.version();
        if self.root.is_some() {
            let folder = forky_packages(packages, &version).expect("the packages");
            return (self, format!("import sys; sys.path.insert(0, {folder:?}); "));
        }
        let program = python_with(packages, &self.program, &version).expect("the packages");
        (Python { program, ..self }, String::new())
    }

    /// Its version, with the `t` of a free-threaded build.
    pub fn version(&self) -> String {
        format!("3.{}{}", self.minor, if self.free_threaded { "t" } else { "" })
    }

    /// Runs a script until it prints `ready`.
    pub fn start(&self, text: &str, arguments: &[&str]) -> Script {
        let folder = match &self.root {
            Some(root) => tempfile::tempdir_in(root.join("tmp")),
            None => tempfile::tempdir(),
        };
        let folder = folder.expect("a temporary folder");
        let file = folder.path().join("script.py");
        fs::write(&file, text).expect("the script can be written");
        let (path, mut command) = match &self.root {
            Some(root) => {
                let inside = Path::new("/").join(file.strip_prefix(root).expect("the folder lies in the root"));
                (inside, run_in_forky(root, &self.program))
            }
            None => (file, Command::new(&self.program)),
        };
        let mut process = Process::spawn(command.args(self.options).arg(&path).args(arguments));
        process.wait_for("ready", PATIENCE);
        let pid = match self.root {
            Some(_) => only_child(process.pid()).expect("the interpreter runs"),
            None => process.pid(),
        };
        Script { process, pid, path: path.display().to_string(), _folder: folder }
    }
}

impl Script {
    /// `name:line` of the frames that are in the script.
    pub fn own(&self, trace: &PySpyStacktrace) -> Vec<String> {
        trace.frames.iter().filter_map(|frame| self.own_frame(frame)).collect()
    }

    fn own_frame(&self, frame: &PySpyFrame) -> Option<String> {
        let line = frame.file_name.strip_prefix(&self.path)?;
        Some(format!("{}{line}", frame.func_name.rsplit('.').next().unwrap_or_default()))
    }
}

/// The id that a thread has in its own namespace of process ids.
pub fn own_tid(tid: u32) -> u32 {
    let status = procfs::status_text(tid).unwrap_or_default();
    let ids = procfs::field(&status, "NSpid:");
    ids.and_then(|ids| ids.split_whitespace().next_back()?.parse().ok()).unwrap_or(tid)
}

/// Line numbers are part of what is tested.
const SCRIPT: &str = "\
import threading, time
gate = threading.Event()
def inner():
    gate.wait()
def outer():
    inner()
class Model:
    def __init__(self):
        self.forward()
    def forward(self):
        step()
def step():
    time.sleep(100000)
def spin():
    total = 0
    while True:
        total += 1
import sys
for index in range(3):
    threading.Thread(target=outer, name=f'worker-{index}', daemon=True).start()
if 'spin' in sys.argv:
    threading.Thread(target=spin, name='spinner', daemon=True).start()
print('ids', threading.get_native_id(), *[t.native_id for t in threading.enumerate()], flush=True)
print('ready', flush=True)
Model()
";

fn start(python: &Path, folder: &Path, arguments: &[&str]) -> (Process, String) {
    let script = folder.join("script.py");
    fs::write(&script, SCRIPT).expect("the script can be written");
    let mut process = Process::spawn(Command::new(python).arg(&script).args(arguments));
    process.wait_for("ready", PATIENCE);
    (process, script.display().to_string())
}

/// `name:line` of the frames that are in the script.
fn own(trace: &PySpyStacktrace, script: &str) -> Vec<String> {
    let own = |frame: &PySpyFrame| {
        let line = frame.file_name.strip_prefix(script)?;
        Some(format!("{}{line}", frame.func_name.rsplit('.').next().unwrap_or_default()))
    };
    trace.frames.iter().filter_map(own).collect()
}

#[test]
fn every_version_shows_its_threads() {
    for python in all() {
        let version = python.version();
        let script = python.start(SCRIPT, &[]);
        let main = ["step:13", "forward:11", "__init__:9", "<module>:25"];
        let worker = ["inner:4", "outer:6"];
        let captured = capture_until(script.pid, &version, |sample| {
            let count =
                |wanted: &[&str]| sample.py_stacktrace.iter().filter(|trace| script.own(trace) == wanted).count();
            sample.longest_stop_ns == 0 && sample.py_stacktrace.len() == 4 && count(&main) == 1 && count(&worker) == 3
        });
        let sample = &captured.sample;
        assert!(sample.errors.is_empty(), "{version}: {:?}", sample.errors);
        let mut names: Vec<&str> = sample.py_stacktrace.iter().map(|trace| trace.thread_name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["MainThread", "worker-0", "worker-1", "worker-2"], "{version}");
        // The script says which kernel threads these are.
        let stdout = script.process.stdout();
        let ids = stdout.lines().find_map(|line| line.strip_prefix("ids ")).expect("the script tells").to_string();
        let mut ids: Vec<u32> = ids.split(' ').skip(1).map(|id| id.parse().expect("a number")).collect();
        let mut ours: Vec<u32> = sample.py_stacktrace.iter().map(|trace| own_tid(trace.os_thread_id)).collect();
        ids.sort_unstable();
        ours.sort_unstable();
        assert_eq!(ours, ids, "{version}");
        for (trace, entries) in sample.py_stacktrace.iter().zip(&captured.python_entries) {
            assert!(!trace.owns_gil && !trace.active, "{version}: nobody runs");
            assert!(trace.frames.iter().all(|frame| !frame.file_name.ends_with(":0")), "{version}: {trace:?}");
            // Each Python thread fits into the native stack of its kernel thread.
            let native = sample.stacktrace.iter().find(|thread| thread.pid == trace.os_thread_id);
            let native = native.unwrap_or_else(|| panic!("{version}: no thread {}", trace.os_thread_id));
            let merged = merge(&native.frames, &trace.frames, entries);
            let merged = merged.unwrap_or_else(|why| panic!("{version}: {why}\n{}", describe(sample)));
            let python = merged.iter().filter(|frame| matches!(frame, Frame::Python(_))).count();
            assert_eq!(python, trace.frames.len());
            assert!(matches!(merged[0], Frame::Native(_)), "the leaf is in C");
        }
    }
}

#[test]
fn the_holder_of_the_lock_is_named() {
    for python in all() {
        let version = python.version();
        let script = python.start(SCRIPT, &["spin"]);
        let captured = capture_until(script.pid, &version, |sample| {
            let spins = |trace: &&PySpyStacktrace| trace.thread_name == "spinner" && script.own(trace).len() == 1;
            let spinner = sample.py_stacktrace.iter().find(spins);
            spinner.is_some_and(|trace| trace.owns_gil || python.free_threaded)
        });
        let traces = &captured.sample.py_stacktrace;
        let holders: Vec<&str> =
            traces.iter().filter(|trace| trace.owns_gil).map(|trace| trace.thread_name.as_str()).collect();
        let expected: &[&str] = if python.free_threaded { &[] } else { &["spinner"] };
        assert_eq!(holders, expected, "{version}");
        let spinner = traces.iter().find(|trace| trace.thread_name == "spinner").expect("it was waited for");
        let line = script.own(spinner)[0].clone();
        assert!(line == "spin:16" || line == "spin:17", "{version}: {line}");
        assert_eq!(captured.sample.longest_stop_ns, 0, "no thread is stopped");
    }
}

#[test]
fn forked_children_have_stacks_of_their_own() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = folder.path().join("loader.py");
    let text = "\
import multiprocessing, time
def fetch():
    time.sleep(300)
def worker(index):
    fetch()
if __name__ == '__main__':
    fork = multiprocessing.get_context('fork')
    workers = [fork.Process(target=worker, args=(n,), daemon=True) for n in range(2)]
    for each in workers: each.start()
    print('ready', flush=True)
    workers[0].join()
";
    fs::write(&script, text).expect("the script can be written");
    let mut process = Process::spawn(Command::new(python()).arg(&script));
    process.wait_for("ready", PATIENCE);
    let script = script.display().to_string();
    let mut capturer = xpu_timer_capture::Capturer::new();
    let options = xpu_timer_capture::Options { deadline: PATIENCE, children: true, ..Default::default() };
    let mut children = Vec::new();
    wait_until(PATIENCE, "two workers that fetch", || {
        let captured = capturer.capture(&[process.pid()], &options).remove(0);
        children = captured.children;
        let fetching = |sample: &xpu_timer_proto::server::ProcessSample| {
            sample
                .py_stacktrace
                .iter()
                .any(|trace| own(trace, &script).starts_with(&["fetch:3".into(), "worker:5".into()]))
        };
        children.len() == 2 && children.iter().all(|child| fetching(&child.sample))
    });
    for child in &children {
        assert_eq!(child.parent_pid, process.pid());
        assert!(child.command.contains("loader.py"), "{:?}", child.command);
        assert!(child.sample.stacktrace.iter().any(|thread| !thread.frames.is_empty()));
    }
}

#[test]
fn the_command_prints_readable_stacks() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (process, script) = start(&python(), folder.path(), &[]);
    let main = ["step:13", "forward:11", "__init__:9", "<module>:25"];
    capture_until(process.pid(), "it sleeps", |sample| {
        sample.py_stacktrace.iter().any(|trace| own(trace, &script) == main)
            && sample.py_stacktrace.iter().filter(|trace| own(trace, &script) == ["inner:4", "outer:6"]).count() == 3
    });
    let dump = |arguments: &[&str]| {
        let mut command = Command::new(artifacts().bin("xpu_timer_dump"));
        command.args(["--timeout", "60", "--pid"]).arg(process.pid().to_string()).args(arguments);
        let output = Process::spawn(&mut command).wait(PATIENCE);
        assert_eq!(output.code(), 0, "{arguments:?}: {}{}", output.stdout, output.stderr);
        output.stdout
    };
    let text = dump(&[]);
    assert!(text.contains(&format!("Process {}: ", process.pid())), "{text}");
    assert!(text.contains("3 threads with the same stack"), "{text}");
    assert!(text.contains("\"worker-2\" (python"), "{text}");
    assert!(text.contains(&format!("  > step {script}:13\n")), "{text}");
    assert!(text.contains("\"MainThread\""), "{text}");
    assert!(!text.contains('\x1b'), "no colours into a pipe");
    // C below Python, and the interpreter's loop replaced.
    let step = text.find(&format!("  > step {script}")).expect("in the text");
    assert!(text.find("sleep").is_some_and(|sleep| sleep < step), "{text}");
    assert!(!text.contains("_PyEval_EvalFrameDefault"), "{text}");
    let text = dump(&["--python"]);
    assert!(text.contains("step") && !text.contains("PyEval"), "{text}");
    let text = dump(&["--native"]);
    assert!(text.contains("_PyEval_EvalFrameDefault") && !text.contains("script.py:13"), "{text}");

    let json: Value = serde_json::from_str(&dump(&["--json"])).expect("JSON");
    assert_eq!(json[0]["pid"], process.pid());
    let traces = json[0]["py_stacktrace"].as_array().expect("a list");
    assert_eq!(traces.len(), 4);
    assert!(traces.iter().any(|trace| trace["frames"][0]["file_name"] == format!("{script}:13")));
    assert_eq!(json[0]["stacktrace"].as_array().map(Vec::len), Some(4));

    let files = folder.path().join("files");
    dump(&["--output", &files.display().to_string()]);
    let bytes = fs::read(files.join("00000-00001.stacktrace")).expect("a file for rank 0 of 1");
    let message: xpu_timer_proto::server::Stacktrace = xpu_timer_proto::Message::decode(&bytes[..]).expect("a message");
    assert_eq!(message.pid, process.pid());
    assert_eq!(message.py_stacktrace.len(), 4);
    assert_eq!(message.process_state, "S (sleeping)");
}

#[test]
fn the_command_finds_processes_by_rank() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = folder.path().join("script.py");
    fs::write(&script, "import time\nprint('ready', flush=True)\ntime.sleep(100000)\n").expect("a script");
    // A rank that no other test or job on this machine has.
    let rank = 1_000_000 + std::process::id();
    let mut process = Process::spawn(
        Command::new(python()).arg(&script).env("RANK", rank.to_string()).env("WORLD_SIZE", (rank + 1).to_string()),
    );
    process.wait_for("ready", PATIENCE);
    let dump = |rank: u32| {
        let mut command = Command::new(artifacts().bin("xpu_timer_dump"));
        command.args(["--timeout", "60", "--rank", &rank.to_string()]);
        Process::spawn(&mut command).wait(PATIENCE)
    };
    let found = dump(rank);
    assert_eq!(found.code(), 0, "{}", found.stderr);
    assert!(found.stdout.contains(&format!("Process {}: ", process.pid())), "{}", found.stdout);
    let missing = dump(rank + 1);
    assert_eq!(missing.code(), 1);
    assert!(missing.stderr.contains(&format!("RANK={}", rank + 1)), "{}", missing.stderr);
}

/// Repeats three phases, and prints the share of the time of each. The calls are short and many.
const SCHEDULE: &str = "\
import sys, threading, time
def busy(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
def sleeps(seconds):
    time.sleep(seconds)
def tiny(number):
    return number + 1
def calls(seconds):
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        for _ in range(200):
            number = tiny(number)
def run(seconds):
    spent = {'busy': 0, 'sleeps': 0, 'calls': 0}
    end = time.monotonic() + seconds
    turn = 0
    while time.monotonic() < end:
        for phase, least in ((busy, .013), (sleeps, .031), (calls, .017)):
            begin = time.monotonic()
            phase(least * (1 + turn % 3 * .5))
            spent[phase.__name__] += time.monotonic() - begin
        turn += 1
    return spent
def left():
    time.sleep(.05)
def right():
    time.sleep(.15)
halves = {'left': 0, 'right': 0}
def worker():
    while True:
        for half in (left, right):
            begin = time.monotonic()
            half()
            halves[half.__name__] += time.monotonic() - begin
for index in range(7):
    threading.Thread(target=threading.Event().wait, name='idle', daemon=True).start()
threading.Thread(target=worker, name='worker', daemon=True).start()
print('ready', flush=True)
spent = run(float(sys.argv[1]))
print('shares', *(spent[name] / sum(spent.values()) for name in ('busy', 'sleeps', 'calls')), flush=True)
print('left', halves['left'] / sum(halves.values()), flush=True)
print('done', flush=True)
";

/// How many samples of the selected threads have each of these functions on the stack, and how many
/// have any stack.
fn counted<const N: usize>(
    samples: &StackSamples,
    functions: [&str; N],
    selected: impl Fn(&SampledThread) -> bool,
) -> ([f64; N], f64) {
    let (mut counts, mut total) = ([0_u32; N], 0);
    for slice in samples.threads.iter().filter(|thread| selected(thread)).flat_map(samples::slices) {
        let frames = samples.stacks[slice.stack as usize].frames.iter();
        let names: Vec<&str> = frames.map(|frame| samples.frames[*frame as usize].func_name.as_str()).collect();
        total += slice.samples;
        for (count, function) in counts.iter_mut().zip(functions) {
            *count += if names.contains(&function) { slice.samples } else { 0 };
        }
    }
    (counts.map(f64::from), f64::from(total))
}

/// `XPU_TIMER_TEST_LONG=1` takes 10,000 samples of each version, and expects the shares to agree
/// within one percent.
#[test]
fn recorded_samples_agree_with_a_planted_schedule() {
    let (seconds, tolerance) = if std::env::var_os("XPU_TIMER_TEST_LONG").is_some() { (100, 0.01) } else { (5, 0.06) };
    let versions = all();
    let time = (seconds + 3).to_string();
    let mut scripts: Vec<Script> = versions.iter().map(|python| python.start(SCHEDULE, &[&time])).collect();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let output = folder.path().join("record");
    let mut command = Command::new(artifacts().bin("xpu_timer_dump"));
    command.args(["record", "--rate", "100", "--seconds", &seconds.to_string(), "--output"]).arg(&output);
    for script in &scripts {
        command.arg("--pid").arg(script.pid.to_string());
    }
    let recorded = Process::spawn(&mut command).wait(PATIENCE + Duration::from_secs(seconds));
    assert_eq!(recorded.code(), 0, "{}", recorded.stderr);
    for (index, (python, script)) in versions.iter().zip(&mut scripts).enumerate() {
        script.process.wait_for("done", PATIENCE);
        let stdout = script.process.stdout();
        let shares = stdout.lines().find_map(|line| line.strip_prefix("shares ")).expect("the shares");
        let planted: Vec<f64> = shares.split(' ').map(|share| share.parse().expect("a share")).collect();
        let file = output.join(samples::file_name(index as u32, versions.len() as u32));
        let samples = samples::decode(&fs::read(&file).expect("the samples")).expect("a file of samples");
        let (counts, total) = counted(&samples, ["busy", "sleeps", "calls"], |thread| thread.main);
        let sampled = counts.map(|count| count / total);
        let about = format!("{}: {sampled:?} of {total} samples, planted {planted:?}", python.version());
        // A machine under load takes fewer samples, but does not lose their threads.
        assert!(total + samples.missed as f64 > 85.0 * seconds as f64 && samples.threads.len() == 9, "{about}");
        let unknown = samples.cut + samples.discarded;
        assert!((unknown as f64) < 0.02 * total, "{unknown} unknown, {about}");
        let differs = sampled.iter().zip(&planted).any(|(one, other)| (one - other).abs() > tolerance);
        assert!(!differs, "{about}");
        // A thread that mostly waits takes the GIL only when it wakes up.
        let ([left, right], _) = counted(&samples, ["left", "right"], |thread| thread.name == "worker");
        let planted: f64 = stdout.lines().find_map(|line| line.strip_prefix("left ")?.parse().ok()).expect("a share");
        let sampled = left / (left + right);
        let about = format!("{sampled} of the samples in left, planted {planted}; {about}");
        assert!((sampled - planted).abs() < tolerance && left + right > 0.9 * total, "{about}");
    }
    for name in ["all.folded", "all.svg", "speedscope.json"] {
        assert!(output.join(name).exists(), "{name}: {}", recorded.stdout);
    }
}

/// No thread of the process takes the GIL after one has ended.
const ENDS: &str = "\
import threading, time
def brief():
    time.sleep(4)
for index in range(7):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
threading.Thread(target=brief, daemon=True).start()
print('ready', flush=True)
time.sleep(30)
";

#[test]
fn a_thread_that_ends_while_no_other_runs_is_no_longer_sampled() {
    let scripts: Vec<Script> = all().iter().map(|python| python.start(ENDS, &[])).collect();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = Command::new(artifacts().bin("xpu_timer_dump"));
    command.args(["record", "--rate", "50", "--seconds", "6", "--output"]).arg(folder.path());
    for script in &scripts {
        command.arg("--pid").arg(script.pid.to_string());
    }
    let recorded = Process::spawn(&mut command).wait(PATIENCE);
    assert_eq!(recorded.code(), 0, "{}", recorded.stderr);
    for (index, python) in all().iter().enumerate() {
        let file = folder.path().join(samples::file_name(index as u32, scripts.len() as u32));
        let samples = samples::decode(&fs::read(&file).expect("the samples")).expect("a file of samples");
        let ([brief], _) = counted(&samples, ["brief"], |_| true);
        let (_, total) = counted(&samples, [], |thread| thread.main);
        assert!(brief > 0.0 && brief < 0.8 * total, "{}: {brief} of {total}", python.version());
    }
}

/// The classes have the names of PyTorch's, and count like them.
const LOADERS: &str = "\
import gc, random, signal, sys, threading
gc.disable()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
class _BaseDataLoaderIter:
    def __init__(self, loader):
        self._dataset = loader
        self._base_seed = random.getrandbits(62)
        self._num_yielded = 0
    def __iter__(self):
        return self
    def __next__(self):
        if self._num_yielded == self._dataset.batches:
            raise StopIteration
        self._num_yielded += 1
        return self._num_yielded
class _SingleProcessDataLoaderIter(_BaseDataLoaderIter):
    pass
class Loader:
    def __init__(self, batches):
        self.batches = batches
    def __iter__(self):
        return _SingleProcessDataLoaderIter(self)
class Prefetcher:
    def __init__(self, loader):
        self.flattened = [iter(loader)]
class Holder:
    def __init__(self, loader):
        self.model = dict.fromkeys(range(10000))
        self.loops = {'fit': Prefetcher(loader)}
def prepared(loader):
    iterator = iter(loader)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
def report(word):
    gc.collect()
    gc.collect(0)
    print(word, sum(generation['collections'] for generation in gc.get_stats()), flush=True)
    signal.sigwait({signal.SIGUSR1})
def count(kind, batches, word):
    loader = Loader(batches)
    if kind == 'plain':
        for batch in loader: report(word) if batch == 7 else None
    elif kind == 'enumerate':
        for _, batch in enumerate(loader): report(word) if batch == 7 else None
    elif kind == 'prepared':
        for _, batch in zip(range(100), prepared(loader)): report(word) if batch == 7 else None
    elif kind == 'held':
        holder = Holder(loader)
        iterator = holder.loops['fit'].flattened[0]
        for batch in map(abs, iterator): report(word) if batch == 7 else None
    elif kind == 'thread':
        thread = threading.Thread(target=count, args=('plain', batches, word))
        thread.start()
        thread.join()
if sys.argv[1] == 'none':
    report('ready')
    report('again')
else:
    count(sys.argv[1], 12, 'ready')
    count(sys.argv[1], 9, 'again')
";

#[test]
fn collections_and_batches_are_counted_in_every_python() {
    for python in all() {
        let mut counter = Counter::default();
        let mut look = |pid: i32| {
            let counts = counter.read(&[pid], true, PATIENCE);
            let [Some(counts)] = counts[..] else { panic!("CPython {}: {counts:?}", python.version()) };
            counts
        };
        for (kind, first, second) in [
            ("none", None, None),
            ("plain", Some(7), Some(14)),
            ("enumerate", Some(7), Some(14)),
            ("prepared", Some(7), Some(14)),
            ("held", Some(7), Some(14)),
            ("thread", Some(7), Some(14)),
        ] {
            let script = python.start(LOADERS, &[kind]);
            let mut check = |word: &str, batches: Option<u64>| {
                let mut collections = 0;
                wait_until(PATIENCE, word, || {
                    let line = script.process.stdout();
                    let line = line.lines().find_map(|line| line.strip_prefix(word));
                    collections = line.and_then(|number| number.trim().parse().ok()).unwrap_or(0);
                    collections >= 2
                });
                let Counts { collections: found, batches: yielded, .. } = look(script.pid);
                assert_eq!((found, yielded), (collections, batches), "CPython {} {kind} {word}", python.version());
            };
            check("ready", first);
            kill(Pid::from_raw(script.pid), Signal::SIGUSR1).expect("the script waits");
            // The first iterator was read once; the five batches that it yielded afterwards are not
            // counted.
            check("again", second);
        }
    }
}

#[test]
fn processes_that_do_not_exist_or_have_no_interpreter_have_no_counts() {
    let mut counter = Counter::default();
    let own = std::process::id() as i32;
    assert_eq!(counter.read(&[own, i32::MAX], true, Duration::from_secs(10)), [None, None]);
    assert_eq!(counter.read(&[], true, Duration::ZERO), []);
}
