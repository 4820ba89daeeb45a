//! Traced Python functions: on CPythons with and without `sys.monitoring`, through a real
//! collector, and beside the tools that also look at Python functions.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;
use xpu_timer_proto::{
    timeline::{self, Reader},
    v1::{Op, Operation},
};
use xpu_timer_tests::{
    Job, PATIENCE, Process, PypiTorch, artifacts, forky_python, forky_with_torch, free_threaded_python, http,
    python_version, run_in_forky, skip, tree, wait_until,
};

use crate::{
    capture::python::FREE_THREADED,
    metrics::{page, samples},
};

const VARIABLE: &str = "XPU_TIMER_HOST_TRACING_FUNC";

/// CPythons without `sys.monitoring`, and with it. 3.11 executes calls in its own way.
const VERSIONS: [&str; 4] = ["3.8", "3.11", "3.12", "3.13"];
/// CPythons of the second Debian. From 3.15 on, exceptions have events of single functions.
const FORKY: [&str; 2] = ["3.14", "3.15"];
/// CPythons without `sys.monitoring`.
const OLD: [&str; 2] = ["3.8", "3.11"];

/// Functions of `traced.py`, `late.py` and `later.py`, and how often they are called.
const CALLS: [(&str, u64); 15] = [
    ("plain", 3),
    // Three items and the end.
    ("__main__@items", 4),
    // The begin, the exception that is thrown into it, and the end.
    ("resumed", 3),
    ("hot", 7),
    ("from_c", 4),
    ("__main__@Loader@made", 2),
    ("endless", 0),
    ("__main__@Loader@__next__", 6),
    ("fails", 2),
    ("decorated", 1),
    ("recursive", 40),
    ("in_thread", 5),
    ("late@function", 2),
    ("late@Class@static", 1),
    ("later@function", 1),
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
import functools, gc, importlib, os, sys, threading, time
sys.path[:0] = [os.environ["EXAMPLES"], os.environ["HERE"]]
import cuda

def plain(seconds):
    time.sleep(seconds)

def items(count):
    for item in range(count):
        yield item

def resumed():
    try:
        yield 1
    except ValueError:
        yield 2

def hot():
    pass

def loop(count):
    for _ in range(count):
        hot()

def from_c(number):
    return number

def endless():
    while True:
        time.sleep(0.0005)

class Loader:
    left = 5
    @classmethod
    def made(cls):
        return cls()
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
# The interpreter specializes the call for this function before it is traced.
loop(100)
cuda.set_device(0)
cuda.Buffer(8)
# The main thread runs Python code, so a pending call is executed soon.
deadline = time.monotonic() + 30
while "WAITS" in os.environ and not gc.callbacks and time.monotonic() < deadline:
    time.sleep(0.001)
for _ in range(3):
    plain(0.02)
assert list(items(3)) == [0, 1, 2]
generator = resumed()
assert [next(generator), generator.throw(ValueError), next(generator, 3)] == [1, 2, 3]
assert list(Loader.made()) == [4, 3, 2, 1, 0]
loop(7)
assert sorted(map(from_c, range(3))) + sorted([3], key=from_c) == [0, 1, 2, 3]
Loader().made()
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
importlib.import_module("later").function()
garbage = []
garbage.append(garbage)
del garbage
gc.collect()
print("done", flush=True)
while "WAITS" in os.environ and not os.path.exists(os.path.join(os.environ["HERE"], "end")):
    time.sleep(0.005)
# The interpreter ends while a thread is inside of a traced call.
threading.Thread(target=endless, daemon=True).start()
"#;

/// A folder with the programs, and a command that runs the first one.
fn program(job: &Job, python: &Path, launched: bool) -> Command {
    fs::write(job.dir.join("traced.py"), TRACED).unwrap();
    for module in ["late.py", "later.py"] {
        fs::write(job.dir.join(module), LATE).unwrap();
    }
    let mut command = if launched { job.launch(python) } else { job.command(python) };
    command.arg(job.dir.join("traced.py")).env("EXAMPLES", tree().join("tests/examples")).env("HERE", &job.dir);
    command.env("PYTHONWARNINGS", "ignore").env("RANK", "0").env("WORLD_SIZE", "1").env("LOCAL_RANK", "0");
    command
}

/// The CPythons that are there, and whether each is without `sys.monitoring`.
fn pythons() -> Vec<(PathBuf, bool)> {
    let known = VERSIONS.iter().filter_map(|version| Some((python_version(version)?, OLD.contains(version))));
    let mut found: Vec<(PathBuf, bool)> = known.collect();
    if found.len() < VERSIONS.len() {
        skip(&format!("one of CPython {} is missing (pyenv)", VERSIONS.join(", ")));
    }
    found.extend(FREE_THREADED.iter().filter_map(|version| Some((free_threaded_python(version)?, false))));
    for version in FORKY {
        match forky_python(version) {
            Ok(python) => found.push((python, false)),
            Err(error) => skip(&format!("CPython {version}: {error:#}")),
        }
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
        for call in all.filter(|one| one.op() == Op::PythonCall) {
            calls.entry(call.function.clone()).or_default().push(call);
        }
    }
    calls
}

/// The folder of a dump on demand.
fn dumped(job: &Job) -> PathBuf {
    let (status, answer) = http("POST", job.port, "/dump").expect("the collector answers");
    assert_eq!(status, 200, "{answer}");
    job.wait_incident(1, PATIENCE).path
}

/// The trace of rank 0 for the tools of PyTorch's profiles.
fn chrome_trace(folder: &Path) -> Value {
    let out = tempfile::tempdir().unwrap();
    let mut command = Command::new(artifacts().bin("xpu_timer_gen_trace_timeline"));
    command.arg("--path").arg(folder).arg("--output").arg(out.path().join("job")).arg("--chrome");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let perfetto = fs::read(out.path().join("trace_job.bin")).unwrap();
    assert!(perfetto.windows(24).any(|part| part == b"__main__@Loader@__next__"), "a slice in Perfetto");
    let packed = out.path().join("chrome_job/rank00000.json.gz");
    let text = Command::new("gzip").arg("-dc").arg(packed).output().unwrap().stdout;
    serde_json::from_slice(&text).unwrap()
}

fn listed() -> String {
    let names: Vec<&str> = CALLS.iter().map(|(name, _)| *name).collect();
    format!("{},os@nothing,not_imported@function,bad-name", names.join(","))
}

#[test]
fn every_call_is_in_the_timeline_and_the_metrics() {
    for (python, is_old) in pythons() {
        let job = Job::new().with("XPU_TIMER_PROMETHEUS_UPDATE_INTERVAL", "1").with(VARIABLE, &listed());
        let mut process = Process::spawn(program(&job, &python, true).env("WAITS", "1"));
        process.wait_for("done", PATIENCE);
        let count = |text: &str, name: &str| {
            let counted = samples(text, "xpu_timer_host_function_calls_total");
            counted.iter().find(|sample| sample.label("function") == name).map_or(0, |sample| sample.value as u64)
        };
        let expected = |name: &str, calls: u64| match name {
            "recursive" => calls - TOO_DEEP,
            "__main__@items" | "resumed" if is_old => 0,
            _ => calls,
        };
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
        let collection = calls["GC"].last().and_then(|call| call.collection.as_deref()).expect("a collection");
        assert!(collection.generation == Some(2) && collection.collected >= 1, "{collection:?}");
        let incident = dumped(&job);
        assert_eq!(calls_in(&incident.join("00000-00001.ops")).get("plain").map(Vec::len), Some(3));
        let trace = chrome_trace(&incident);
        let events = trace["traceEvents"].as_array().expect("events");
        let drawn: Vec<&Value> = events.iter().filter(|event| event["name"] == "__main__@Loader@__next__").collect();
        assert!(drawn.len() == 6 && drawn.iter().all(|event| event["cat"] == "python_function"), "{drawn:?}");
        let collected = events.iter().find(|event| event["name"] == "GC").expect("a collection");
        assert_eq!(collected["args"]["generation"], 2, "{collected}");
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
        let mut missing =
            "not traced: os@nothing (does not exist); not_imported@function (its module is not imported)".to_string();
        if is_old {
            missing += "; __main__@items, resumed (a generator or coroutine, which needs CPython 3.12)";
        }
        assert!(lines[1].ends_with(&missing), "{logs}");
    }
}

/// Runs a program under each tool of the standard library that looks at functions, and prints what
/// the tool saw.
const BESIDE: &str = r#"
import copy, cProfile, gc, inspect, io, json, os, pdb, pickle, pstats, sys, threading, time, types
sys.path[:0] = [os.environ["EXAMPLES"]]
import cuda

def plain(number):
    "adds one"
    return number + 1

def items(count):
    for item in range(count):
        yield plain(item)

def fails():
    raise ValueError("on purpose")

def recursive(depth):
    return recursive(depth - 1) if depth else 0

def work():
    total = sum(items(3)) + recursive(3) + sum(map(plain, range(2)))
    try:
        fails()
    except ValueError as error:
        total += len(str(error))
    thread = threading.Thread(target=plain, args=(1,))
    thread.start()
    thread.join()
    return total

NAMES = {function.__name__ for function in (plain, items, fails, recursive, work)}

def events_of(install):
    seen = []
    def see(frame, event, argument):
        if frame.f_code.co_name in NAMES:
            seen.append((frame.f_code.co_name, event, frame.f_lineno))
        return see
    install(see)
    threading.settrace(see)
    try:
        total = work()
    finally:
        install(None)
        threading.settrace(None)
    return total, seen

def profiled():
    profile = cProfile.Profile()
    profile.runcall(work)
    stats = pstats.Stats(profile).stats
    return sorted((name, calls[:2]) for (_, _, name), calls in stats.items() if name in NAMES)

def monitored():
    if not hasattr(sys, "monitoring"):
        return []
    events, seen = sys.monitoring.events, []
    sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "test")
    kinds = events.PY_START, events.PY_RETURN, events.PY_UNWIND, events.RAISE, events.LINE
    for kind in kinds:
        see = lambda code, *rest, kind=kind: seen.append((kind, code.co_name)) if code.co_name in NAMES else None
        sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, kind, see)
    sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sum(kinds))
    work()
    sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)
    sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)
    return seen

def described():
    same = [pickle.loads(dumps(plain)) for dumps in (pickle.dumps, pickle._dumps)] + [copy.copy(plain), copy.deepcopy(plain)]
    values = {name: getattr(plain, name) for name in dir(plain) if name not in ("__globals__", "__code__")}
    values = {name: repr(value) for name, value in values.items() if not callable(value)}
    kinds = isinstance(plain, types.FunctionType), plain.__class__ is types.FunctionType, repr(type(plain))
    made = type(plain)(plain.__code__, globals())(1)
    texts = str(inspect.signature(plain)), inspect.getdoc(plain), inspect.isfunction(plain)
    return [other is plain for other in same], values, kinds, made, texts

def hooks():
    originals = sys.__excepthook__, getattr(threading, "__excepthook__", threading.excepthook)
    current = sys.excepthook, threading.excepthook
    same = [one is other for one, other in zip(current, originals)]
    return same, [(one.__name__, one.__module__, repr(type(one))) for one in current]

def debugged():
    commands = io.StringIO("break plain\ncontinue\nwhere\nnext\ncontinue\ncontinue\nclear 1\ncontinue\n")
    output = io.StringIO()
    debugger = pdb.Pdb(stdin=commands, stdout=output, nosigint=True, readrc=False)
    debugger.runcall(work)
    return output.getvalue()

cuda.set_device(0)
cuda.Buffer(8)
deadline = time.monotonic() + 30
while "WAITS" in os.environ and not gc.callbacks and time.monotonic() < deadline:
    time.sleep(0.001)
results = [events_of(sys.setprofile), events_of(sys.settrace), profiled(), monitored(), debugged(), described(), hooks(), work()]
print(json.dumps(results))
if "WAITS" in os.environ and hasattr(sys, "monitoring"):
    assert sys.monitoring.get_tool(4) == "xpu_timer"
"#;

#[test]
fn profilers_and_debuggers_see_what_they_see_without_it() {
    for (python, _) in pythons() {
        let job = Job::new().with("XPU_TIMER_SOCKET", "/nowhere");
        let script = job.dir.join("beside.py");
        fs::write(&script, BESIDE).unwrap();
        let run = |names: &str| {
            let mut command = job.command(&python);
            command.arg(&script).env("EXAMPLES", tree().join("tests/examples"));
            if !names.is_empty() {
                command.env("LD_PRELOAD", artifacts().hook()).env("WAITS", "1").env(VARIABLE, names);
            }
            Process::spawn(&mut command).wait(PATIENCE)
        };
        let (without, with) = (run(""), run("plain,items,fails,recursive,work"));
        assert_eq!((without.code(), without.stderr.as_str()), (0, ""));
        assert_eq!((with.code(), with.stderr.as_str()), (0, ""), "{}", with.stdout);
        assert_eq!(with.stdout, without.stdout);
        let results: Value = serde_json::from_str(&with.stdout).unwrap();
        assert!(results.as_array().unwrap().iter().all(|result| !result.is_null()) && with.stdout.len() > 2000);
    }
}

/// Ends while the hook may be adding a pending call, or has no tool id.
const SHORT: &str = "
import atexit, ctypes, gc, os, sys, time
cuda = ctypes.CDLL('libcudart.so.13')
def plain():
    pass
def begin():
    cuda.cudaSetDevice(0)
    cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(8))
    end = time.monotonic() + float(os.environ['SECONDS'])
    while time.monotonic() < end:
        plain()
        # CPython 3.12 looks for pending calls when a thread takes the GIL.
        time.sleep(0)
for tool in os.environ.get('TAKEN', '').split():
    sys.monitoring.use_tool_id(int(tool), 'somebody')
if os.environ.get('AT') == 'exit':
    # The end of the interpreter has begun. CPython 3.8 accepts no pending calls any more.
    atexit.register(begin)
else:
    begin()
print(sum('xpu_timer' in repr(callback) for callback in gc.callbacks))
";

/// Runs it with a traced function. Returns its output and the lines of the hook about the variable.
fn run_short(python: &Path, seconds: &str, variable: (&str, &str)) -> (String, Vec<String>) {
    let job = Job::new().with("XPU_TIMER_SOCKET", "/nowhere").with(VARIABLE, "plain");
    let mut command = job.command(python);
    command.args(["-c", SHORT]);
    command.env("LD_PRELOAD", artifacts().hook()).env("SECONDS", seconds).env(variable.0, variable.1);
    let output = Process::spawn(&mut command).wait(PATIENCE);
    assert_eq!((output.code(), output.stderr.as_str()), (0, ""));
    let lines = job.logs().lines().filter(|line| line.contains(VARIABLE)).map(str::to_string).collect();
    (output.stdout.trim().to_string(), lines)
}

#[test]
fn what_cannot_be_traced_is_said_once() {
    for (python, is_old) in pythons() {
        if !is_old {
            let (callbacks, lines) = run_short(&python, "1", ("TAKEN", "3 4 5"));
            assert_eq!(callbacks, "1", "collections need no tool id");
            assert!(lines.len() == 1 && lines[0].ends_with("no tool id of sys.monitoring is free"), "{lines:?}");
            assert_eq!(run_short(&python, "1", ("TAKEN", "0 1 2 4")), ("1".into(), Vec::new()));
        }
        // The process ends at any moment of the installation.
        for milliseconds in (0..20).step_by(4) {
            let (_, lines) = run_short(&python, &format!("0.{milliseconds:03}"), ("TAKEN", ""));
            assert_eq!(lines, [""; 0]);
        }
        // The process begins to use the device when it ends.
        assert_eq!(run_short(&python, "0.3", ("AT", "exit")), ("0".into(), Vec::new()));
    }
    let Some(old) = python_version("3.7") else { return skip("there is no CPython 3.7") };
    let (callbacks, lines) = run_short(&old, "1", ("TAKEN", ""));
    assert_eq!(callbacks, "0");
    assert!(lines.len() == 1 && lines[0].ends_with("needs CPython 3.8 or newer, and this is 3.7"), "{lines:?}");
}

/// PyTorch's profiler with stacks, data loaders with and without workers, and torch.compile; the
/// result of each, and the calls of traced functions on standard error.
const TORCH: &str = r#"
import gc, json, os, re, struct, sys, time
import torch
import torch.distributed
from torch._dynamo.testing import CompileCounter
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.full((4,), float(index))

def step(model, batch):
    loss = model(batch).sum()
    torch.autograd.backward(loss)
    return round(float(loss.detach()), 4)

def helper(values):
    return values * 2

def compiled_function(values):
    return torch.sin(values) + helper(values)

def traced_calls():
    counts = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink("/proc/self/fd/" + descriptor).startswith("/memfd:"):
                continue
            with open("/proc/self/fd/" + descriptor, "rb") as ring:
                table = ring.read()[-128 * 32 * 8:]
        except OSError:
            continue
        for entry in range(0, len(table), 256):
            length, calls = struct.unpack_from("<2Q", table, entry)
            if length and calls:
                counts[table[entry + 24:entry + 24 + length].decode()] = calls
    return counts

def main():
    rendezvous = "file://" + os.environ["HERE"] + "/rendezvous-" + str(os.getpid())
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    torch.distributed.all_reduce(torch.ones(4))
    deadline = time.monotonic() + 30
    while "WAITS" in os.environ and not gc.callbacks and time.monotonic() < deadline:
        time.sleep(0.001)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    train = lambda workers: [step(model, batch) for batch in DataLoader(Numbers(), batch_size=8, num_workers=workers)]
    results = {"alone": train(0), "workers": train(2)}
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiled:
        results["profiled"] = train(0)
    def names(nodes):
        for node in nodes:
            yield re.sub("0x[0-9a-f]+", "", node.name)
            yield from names(node.children)
    tree = list(names(profiled.profiler.kineto_results.experimental_event_tree()))
    wanted = "aten::", "step", "backward", "__next__"
    results["tree"] = [name for name in tree if any(part in name for part in wanted)]
    counter = CompileCounter()
    compiled = torch.compile(compiled_function, backend=counter)
    results["compiled"] = [float(compiled(torch.ones(size)).sum()) for size in (3, 3, 5, 7)]
    results["frames"] = counter.frame_count, counter.op_count
    print(json.dumps(results))
    print("calls:", json.dumps(traced_calls()), file=sys.stderr)

if __name__ == "__main__":
    main()
"#;

/// With `XPU_TIMER_TEST_LONG=1`, because it installs PyTorch from PyPI, 2.4 GB.
#[test]
fn pytorch_of_pypi_behaves_as_without_it() {
    if std::env::var_os("XPU_TIMER_TEST_LONG").is_none() {
        return;
    }
    let torch = match PypiTorch::set_up() {
        Ok(torch) => torch,
        Err(error) => return skip(&format!("{error:#}")),
    };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("program.py"), TORCH).unwrap();
    pytorch_is_unchanged(|names| {
        let mut command = Command::new(torch.python());
        command.arg(folder.path().join("program.py")).env("HERE", folder.path());
        command.env("LD_LIBRARY_PATH", torch.library_path().unwrap());
        if !names.is_empty() {
            command.env("LD_PRELOAD", artifacts().hook()).env(VARIABLE, names).env("WAITS", "1");
            command.env("XPU_TIMER_LOGGING_DIR", folder.path()).env("XPU_TIMER_SOCKET", "/nowhere");
        }
        command
    });
}

/// With `XPU_TIMER_TEST_LONG=1`, because it sets up a second Debian of 1.9 GB with CPython 3.14.
#[test]
fn pytorch_behaves_as_without_it() {
    if std::env::var_os("XPU_TIMER_TEST_LONG").is_none() {
        return;
    }
    let root = match forky_with_torch() {
        Ok(root) => root,
        Err(error) => return skip(&format!("{error:#}")),
    };
    let folder = tempfile::tempdir_in(root.join("tmp")).unwrap();
    let inside = Path::new("/").join(folder.path().strip_prefix(&root).unwrap());
    fs::write(folder.path().join("program.py"), TORCH).unwrap();
    fs::copy(artifacts().hook(), folder.path().join("hook.so")).unwrap();
    pytorch_is_unchanged(|names| {
        // The linker of this machine must not see the variables.
        let mut command = run_in_forky(&root, "env");
        let inside = inside.display();
        command.arg(format!("HERE={inside}"));
        if !names.is_empty() {
            command.arg(format!("LD_PRELOAD={inside}/hook.so")).arg(format!("{VARIABLE}={names}"));
            command.arg(format!("XPU_TIMER_LOGGING_DIR={inside}")).args(["WAITS=1", "XPU_TIMER_SOCKET=/nowhere"]);
        }
        command.arg("python3.14").arg(format!("{inside}/program.py"));
        command
    });
}

/// Runs [`TORCH`] without and with traced functions.
fn pytorch_is_unchanged(program: impl Fn(&str) -> Command) {
    let run = |names: &str| {
        let output = Process::spawn(&mut program(names)).wait(PATIENCE);
        assert_eq!(output.code(), 0, "{}", output.stderr);
        let calls = output.stderr.lines().find_map(|line| line.strip_prefix("calls: ")).unwrap().to_string();
        (output.stdout, serde_json::from_str::<Value>(&calls).unwrap())
    };
    let (without, none) = run("");
    let (with, calls) = run("step,compiled_function,helper");
    assert_eq!(with, without);
    assert_eq!(none, serde_json::json!({}));
    assert_eq!((&calls["step"], &calls["torch@autograd@backward"]), (&12.into(), &12.into()), "{calls}");
    assert_eq!(calls["torch.utils.data.dataloader@_BaseDataLoaderIter@__next__"], 15, "{calls}");
}

/// coverage.py with both of its ways to measure, with `XPU_TIMER_TEST_LONG=1`: it comes from PyPI.
#[test]
fn coverage_measures_what_it_measures_without_it() {
    if std::env::var_os("XPU_TIMER_TEST_LONG").is_none() {
        return;
    }
    for (python, is_old) in pythons() {
        // coverage.py of today needs CPython 3.10.
        if python.ends_with("python3.8") {
            continue;
        }
        let packages = tempfile::tempdir().unwrap();
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "-q", "coverage==7.13.0", "--target"]).arg(packages.path());
        if !pip.output().is_ok_and(|output| output.status.success()) {
            return skip("coverage.py cannot be installed from PyPI");
        }
        let job = Job::new().with("XPU_TIMER_SOCKET", "/nowhere").with(VARIABLE, &listed());
        for core in if is_old { &["ctrace"][..] } else { &["ctrace", "sysmon"] } {
            let run = |traced: bool, arguments: &[&str]| {
                let mut command = program(&job, &python, false);
                command.env("PYTHONPATH", packages.path()).env("COVERAGE_CORE", core);
                command.env("COVERAGE_FILE", job.dir.join("coverage"));
                if traced {
                    command.env("LD_PRELOAD", artifacts().hook()).env("WAITS", "1");
                    fs::write(job.dir.join("end"), "").unwrap();
                }
                let mut coverage = Command::new(command.get_program());
                coverage.args(["-m", "coverage"]).args(arguments).current_dir(&job.dir);
                coverage.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
                let output = Process::spawn(&mut coverage).wait(PATIENCE);
                assert_eq!((output.code(), output.stderr.as_str()), (0, ""), "{}", output.stdout);
                output.stdout
            };
            let report = |traced: bool| {
                run(traced, &["run", "--include=late.py", "traced.py"]);
                run(false, &["report", "-m"])
            };
            let (without, with) = (report(false), report(true));
            assert_eq!(with, without, "{core}");
            assert!(with.contains("late.py") && with.contains("100%"), "{with}");
        }
    }
}
