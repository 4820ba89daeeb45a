//! Python code of every kind on every CPython: what is on a stack, what it is called, and where it
//! fits into the native stack, also while threads come and go.

use std::{collections::BTreeMap, path::Path, process::Command, time::Duration};

use xpu_timer_capture::{Capturer, Frame, Options, ProcessCapture, merge};
use xpu_timer_proto::server::{ProcessSample, PySpyFrame, PySpyStacktrace};
use xpu_timer_tests::{GEVENT, PATIENCE, Process, TRIO, compile_c, python_version, skip};

use super::{
    capture_until, describe,
    python::{self, Python, Script},
};

const KINDS: &str = "\
import sys
sys.modules.update({f'padding.{number}': sys for number in range(300)})
import asyncio, ctypes, threading, time
def rest():
    time.sleep(100000)
def generators():
    def inner():
        yield rest()
    def outer():
        yield from inner()
    for _ in outer(): pass
def coroutines():
    async def leaf(): rest()
    async def middle(): await leaf()
    async def top(): await middle()
    asyncio.run(top())
def callback_of_sort():
    sorted([1, 2], key=lambda item: rest())
def callback_of_ctypes():
    ctypes.CFUNCTYPE(None)(lambda: rest())()
def made_at_run_time():
    exec(compile('def höhe():\\n\\n    rest()\\nhöhe()', '<größe 漢字 𝄞>', 'exec'), {'rest': rest})
def evaluated():
    eval('rest()')
def many_lines():
    value = 1


























    rest()
def comprehension():
    [rest() for _ in range(1)]
def decorated():
    with open(__file__) as file:
        try:
            rest()
        finally:
            file.close()
class Base:
    def __init__(self):
        rest()
class Derived(Base):
    def __init__(self):
        super().__init__()
def constructor():
    Derived()
kinds = [generators, coroutines, callback_of_sort, callback_of_ctypes, made_at_run_time, evaluated, many_lines,
         comprehension, decorated, constructor]
for kind in kinds:
    threading.Thread(target=kind, name='ü ' + kind.__name__, daemon=True).start()
print('ready', flush=True)
rest()
";

fn line_of(text: &str, wanted: &str) -> usize {
    1 + text.lines().position(|line| line.contains(wanted)).expect("the script has it")
}

/// Last part of the names, and lines, of all frames from the thread's own function on.
fn frames_of(trace: &PySpyStacktrace) -> Vec<(String, String)> {
    let end =
        trace.frames.iter().position(|frame| frame.file_name.contains("threading.py")).unwrap_or(trace.frames.len());
    let shown = trace.frames[..end].iter().map(|frame| {
        let name = frame.func_name.rsplit('.').next().unwrap_or_default().to_string();
        let (file, line) = frame.file_name.rsplit_once(':').expect("a line");
        (name, format!("{}:{line}", file.rsplit('/').next().unwrap_or_default()))
    });
    shown.collect()
}

/// All Python threads fit into their native stacks.
fn assert_merged(version: &str, captured: &ProcessCapture) {
    for (trace, entries) in captured.sample.py_stacktrace.iter().zip(&captured.python_entries) {
        let native = captured.sample.stacktrace.iter().find(|thread| thread.pid == trace.os_thread_id);
        let native = native.unwrap_or_else(|| panic!("{version}: no thread {}", trace.os_thread_id));
        // Up to 3.10 a Python call is several native ones, and a sample of a running thread has
        // room for some hundred. One that is busy inside the kernel yields no sample at all, and
        // says so.
        let has_no_sample = native.frames.is_empty() && !native.incomplete.is_empty();
        if has_no_sample || native.incomplete.contains("bytes of a sample") {
            continue;
        }
        let merged = merge(&native.frames, &trace.frames, entries);
        let merged = merged
            .unwrap_or_else(|why| panic!("{version}: {}: {why}\n{}", trace.thread_name, describe(&captured.sample)));
        let python = merged.iter().filter(|frame| matches!(frame, Frame::Python(_))).count();
        assert_eq!(python, trace.frames.len(), "{version}");
    }
}

fn check_kinds(python: &Python) {
    let version = python.version();
    let script = python.start(KINDS, &[]);
    let rests = |trace: &PySpyStacktrace| trace.frames.first().is_some_and(|frame| frame.func_name == "rest");
    let captured = capture_until(script.pid, &version, |sample| {
        sample.py_stacktrace.len() == 11 && sample.py_stacktrace.iter().all(rests)
    });
    assert!(captured.sample.errors.is_empty(), "{version}: {:?}", captured.sample.errors);
    let place = |wanted: &str| format!("script.py:{}", line_of(KINDS, wanted));
    let expect = |kind: &str, wanted: &[(&str, String)]| {
        let name = format!("ü {kind}");
        let trace = captured.sample.py_stacktrace.iter().find(|trace| trace.thread_name == name);
        let trace = trace.unwrap_or_else(|| panic!("{version}: no thread {name}\n{}", describe(&captured.sample)));
        let mut found = frames_of(trace);
        // The event loop is another one in each version.
        found.retain(|(_, place)| place.starts_with("script.py") || place.starts_with('<'));
        let mut all = vec![("rest".to_string(), place("time.sleep(100000)"))];
        all.extend(wanted.iter().map(|(name, place)| ((*name).to_string(), place.clone())));
        assert_eq!(found, all, "{version}: {kind}");
    };
    expect(
        "generators",
        &[
            ("inner", place("yield rest()")),
            ("outer", place("yield from inner()")),
            ("generators", place("for _ in outer()")),
        ],
    );
    expect(
        "coroutines",
        &[
            ("leaf", place("async def leaf()")),
            ("middle", place("async def middle()")),
            ("top", place("async def top()")),
            ("coroutines", place("asyncio.run")),
        ],
    );
    expect("callback_of_sort", &[("<lambda>", place("sorted(")), ("callback_of_sort", place("sorted("))]);
    expect("callback_of_ctypes", &[("<lambda>", place("CFUNCTYPE")), ("callback_of_ctypes", place("CFUNCTYPE"))]);
    expect(
        "made_at_run_time",
        &[
            ("höhe", "<größe 漢字 𝄞>:3".into()),
            ("<module>", "<größe 漢字 𝄞>:4".into()),
            ("made_at_run_time", place("exec(compile")),
        ],
    );
    expect("evaluated", &[("<module>", "<string>:1".into()), ("evaluated", place("eval('rest()')"))]);
    let far = 1 + KINDS.lines().enumerate().filter(|(_, line)| *line == "    rest()").map(|(at, _)| at).next().unwrap();
    expect("many_lines", &[("many_lines", format!("script.py:{far}"))]);
    let comprehension = place("[rest() for");
    let inlined = [("comprehension", comprehension.clone())];
    let nested = [("<listcomp>", comprehension.clone()), ("comprehension", comprehension)];
    expect("comprehension", if python.minor >= 12 { &inlined } else { &nested });
    let guarded = 1 + KINDS.lines().position(|line| line == "            rest()").unwrap();
    expect("decorated", &[("decorated", format!("script.py:{guarded}"))]);
    let base = 1 + KINDS.lines().position(|line| line == "        rest()").unwrap();
    expect(
        "constructor",
        &[
            ("__init__", format!("script.py:{base}")),
            ("__init__", place("super().__init__()")),
            ("constructor", place("    Derived()")),
        ],
    );
    assert_merged(&version, &captured);
}

#[test]
fn code_of_every_kind() {
    for python in python::all() {
        check_kinds(&python);
    }
}

/// The threads whose names begin with `alone` wait for an object to which nobody else refers.
const ALONE: &str = "\
import queue, threading, time
class Owner:
    def __init__(self):
        self.event = threading.Event()
    def wait_for_attribute(self):
        self.event.wait()
EVENT, OWNER = threading.Event(), Owner()
def alone_in_event():
    threading.Event().wait()
def alone_in_queue():
    queue.Queue().get()
def in_event_of_all():
    EVENT.wait()
def in_event_of_closure():
    event = threading.Event()
    threading.Thread(target=lambda: (time.sleep(100000), event.set()), name='sets', daemon=True).start()
    event.wait()
def in_argument(event):
    event.wait()
def in_timeout():
    threading.Event().wait(100000)
def in_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
waits = [alone_in_event, alone_in_queue, in_event_of_all, in_event_of_closure, in_timeout, in_lock]
waits = [(wait, ()) for wait in waits] + [(OWNER.wait_for_attribute, ()), (in_argument, (OWNER.event,))]
for wait, arguments in waits:
    threading.Thread(target=wait, args=arguments, name=wait.__name__, daemon=True).start()
print('ready', flush=True)
time.sleep(100000)
";

#[test]
fn threads_that_wait_for_an_object_to_which_only_they_refer() {
    for python in python::all() {
        let version = python.version();
        let script = python.start(ALONE, &[]);
        let waits = |trace: &PySpyStacktrace| {
            let leaf = trace.frames.first().map_or("", |frame| frame.func_name.rsplit('.').next().unwrap_or_default());
            matches!(leaf, "wait" | "<lambda>" | "<module>" | "in_lock")
        };
        let captured = capture_until(script.pid, &version, |sample| {
            sample.py_stacktrace.len() == 10 && sample.py_stacktrace.iter().all(waits)
        });
        for trace in &captured.sample.py_stacktrace {
            // In a build without the GIL, nothing is known.
            let expected = trace.thread_name.starts_with("alone") && !version.contains('t');
            assert_eq!(
                trace.awaits_alone,
                expected,
                "{version}: {}\n{}",
                trace.thread_name,
                describe(&captured.sample)
            );
        }
    }
}

const DEEP: &str = "\
import sys, threading, time
sys.setrecursionlimit(100000)
threading.stack_size(512 << 20)
def rest(spinning):
    while spinning: pass
    time.sleep(100000)
def down(levels, spinning):
    if levels == 0: rest(spinning)
    else: down(levels - 1, spinning)
threading.Thread(target=down, args=(5000, False), name='asleep', daemon=True).start()
threading.Thread(target=down, args=(5000, True), name='running', daemon=True).start()
print('ready', flush=True)
time.sleep(100000)
";

#[test]
fn five_thousand_frames() {
    for python in python::all() {
        let version = python.version();
        let script = python.start(DEEP, &[]);
        let whole = |trace: &PySpyStacktrace| script.own(trace).len() == 5002;
        let captured = capture_until(script.pid, &version, |sample| {
            sample.py_stacktrace.len() == 3 && sample.py_stacktrace.iter().filter(|trace| whole(trace)).count() == 2
        });
        assert!(captured.sample.errors.is_empty(), "{version}: {:?}", captured.sample.errors);
        for trace in captured.sample.py_stacktrace.iter().filter(|trace| trace.thread_name != "MainThread") {
            let own = script.own(trace);
            assert!(own[0].starts_with("rest:"), "{version}: {}", own[0]);
            assert_eq!(own[1], "down:8", "{version}");
            assert!(own[2..].iter().all(|frame| frame == "down:9"), "{version}");
        }
        assert_merged(&version, &captured);
    }
}

const INTERPRETERS: &str = "\
import threading, time
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
def run():
    code = '''
def inside():
    import time
    time.sleep(100000)
inside()
'''
    interpreter = interpreters.create()
    if hasattr(interpreters, 'run_string'):
        interpreters.run_string(interpreter, code)
    else:
        interpreters.exec(interpreter, code)
threading.Thread(target=run, name='host', daemon=True).start()
print('ready', flush=True)
time.sleep(100000)
";

#[test]
fn interpreters_within_interpreters() {
    for python in python::all() {
        let version = python.version();
        let script = python.start(INTERPRETERS, &[]);
        let names =
            |trace: &PySpyStacktrace| -> Vec<String> { frames_of(trace).into_iter().map(|(name, _)| name).collect() };
        let captured = capture_until(script.pid, &version, |sample| {
            sample.py_stacktrace.len() == 2
                && sample.py_stacktrace.iter().any(|trace| names(trace) == ["inside", "<module>", "run"])
        });
        assert!(captured.sample.errors.is_empty(), "{version}: {:?}", captured.sample.errors);
        let host = captured.sample.py_stacktrace.iter().find(|trace| names(trace).len() == 3).expect("just seen");
        assert_eq!(host.thread_name, "host", "{version}");
        assert_merged(&version, &captured);
    }
}

const HOLDER: &str = "\
import ctypes, threading, time
libc = ctypes.PyDLL(None)
def hold():
    libc.sleep(100000)
def others():
    time.sleep(0.01)
threading.Thread(target=others, name='other', daemon=True).start()
print('ready', flush=True)
threading.Thread(target=hold, name='holder', daemon=True).start()
while True:
    time.sleep(0.01)
";

fn check_holder(version: &str, script: &Script) {
    let holders = |traces: &[PySpyStacktrace]| -> Vec<String> {
        traces.iter().filter(|trace| trace.owns_gil).map(|trace| trace.thread_name.clone()).collect()
    };
    let captured = capture_until(script.pid, version, |sample| {
        let asleep =
            |trace: &PySpyStacktrace| script.own(trace).first().is_some_and(|frame| frame.starts_with("hold:"));
        holders(&sample.py_stacktrace) == ["holder"] && sample.py_stacktrace.iter().any(asleep)
    });
    assert!(captured.sample.errors.is_empty(), "{version}: {:?}", captured.sample.errors);
}

#[test]
fn a_thread_that_sleeps_with_the_lock() {
    for python in python::all().into_iter().map(Python::with_gil) {
        let version = python.version();
        let script = python.start(HOLDER, &[]);
        check_holder(&version, &script);
    }
}

const COLLECTOR: &str = "\
import gc, sys
heap = [[number] for number in range(300000)]
print('ready', flush=True)
while True:
    if sys.argv[1] == 'collect':
        gc.collect()
    else:
        sum(map(len, heap))
";

#[test]
fn a_thread_that_collects_garbage() {
    for python in python::all().into_iter().map(Python::with_gil) {
        let version = python.version();
        for (word, collects) in [("collect", true), ("sum", false)] {
            let script = python.start(COLLECTOR, &[word]);
            let captured = capture_until(script.pid, &version, |sample| {
                sample.py_stacktrace.iter().any(|trace| trace.owns_gil && !trace.frames.is_empty())
            });
            let collecting = |sample: &ProcessSample| sample.py_stacktrace.iter().any(|trace| trace.collects_garbage);
            assert!(!collecting(&captured.sample) || collects, "{version}: it adds numbers");
            if collects {
                capture_until(script.pid, &version, collecting);
            }
        }
    }
}

const ENDING: &str = "\
import time
class Late:
    def __del__(self, sleep=time.sleep):
        sleep(100000)
late = Late()
print('ready', flush=True)
";

#[test]
fn an_interpreter_that_shuts_down_says_so() {
    for python in python::all() {
        let version = python.version();
        let script = python.start(ENDING, &[]);
        let last = |trace: &PySpyStacktrace| script.own(trace) == ["__del__:4"];
        // A capture at the very moment at which it begins to may see the one and not the other.
        capture_until(script.pid, &version, |sample| {
            sample.py_stacktrace.iter().any(last)
                && sample.errors.join("; ").ends_with("its interpreter is shutting down")
        });
    }
}

/// A program that has an interpreter within itself.
const EMBEDDER: &str = r#"
#include <Python.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **words) {
    int state = count > 1 ? words[1][0] : 'b';
    if (state != 'b') Py_Initialize();
    if (state == 'e') Py_FinalizeEx();
    puts("ready");
    fflush(stdout);
    if (state == 'r') PyRun_SimpleString("import time\ndef inside():\n    time.sleep(100000)\ninside()");
    for (;;) pause();
}
"#;

#[test]
fn a_program_with_an_interpreter_in_it() {
    for version in ["3.8", "3.11", "3.13"] {
        let Some(python) = python_version(version) else {
            skip(&format!("CPython {version} is not installed"));
            continue;
        };
        let prefix = python.parent().and_then(Path::parent).expect("bin/python in a folder");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let library = prefix.join("lib").display().to_string();
        let flags = [
            format!("-I{}", prefix.join("include").join(format!("python{version}")).display()),
            format!("-L{library}"),
            format!("-Wl,-rpath,{library}"),
            format!("-lpython{version}"),
        ];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let program = compile_c(folder.path(), "embedder", EMBEDDER, &flags);
        let start = |state: &str| {
            let mut command = Command::new(&program);
            let mut process = Process::spawn(command.arg(state).env("PYTHONHOME", prefix));
            process.wait_for("ready", PATIENCE);
            process
        };
        let running = start("running");
        capture_until(running.pid(), version, |sample| {
            let names =
                |trace: &PySpyStacktrace| frames_of(trace).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
            sample.errors.is_empty() && sample.py_stacktrace.iter().any(|trace| names(trace) == ["inside", "<module>"])
        });
        for state in ["before", "ended"] {
            let process = start(state);
            let captured = capture_until(process.pid(), version, |sample| sample.stacktrace[0].incomplete.is_empty());
            let errors = captured.sample.errors.join("; ");
            assert!(errors.contains("has not been started yet, or has ended"), "{version} {state}: {errors}");
            assert!(captured.sample.py_stacktrace.is_empty() && !captured.sample.stacktrace[0].frames.is_empty());
        }
    }
}

#[test]
fn an_interpreter_that_is_too_old_is_named() {
    let Some(python) = python_version("3.7") else {
        skip("CPython 3.7 is not installed");
        return;
    };
    let text = "import time\nprint('ready', flush=True)\ntime.sleep(100000)\n";
    let mut process = Process::spawn(Command::new(python).args(["-c", text]));
    process.wait_for("ready", PATIENCE);
    let captured = capture_until(process.pid(), "it sleeps", |sample| sample.stacktrace[0].incomplete.is_empty());
    let errors = captured.sample.errors.join("; ");
    assert!(errors.contains("CPython 3.7 is not supported, only 3.8 to 3.15"), "{errors}");
    assert!(captured.sample.stacktrace[0].frames.len() > 3, "its native stack is there anyway");
}

/// A program in which tasks wait, one event loop a thread. The name of a thread is the way in which
/// the main coroutine of its loop waits for the task `inner`.
const WAITS: &str = "\
import asyncio, threading, time
async def leaf(queue):
    await queue.get()
async def middle(queue):
    await leaf(queue)
def inner(create=asyncio.create_task):
    return create(middle(asyncio.Queue()), name='inner')
async def task():
    await inner()
async def gather():
    await asyncio.gather(inner())
async def wait():
    await asyncio.wait({inner()})
async def wait_for():
    await asyncio.wait_for(inner(), 10000)
async def group():
    async with asyncio.TaskGroup() as tasks: inner(tasks.create_task)
ways = [task, gather, wait, wait_for] + [group] * hasattr(asyncio, 'TaskGroup')
for way in ways:
    threading.Thread(target=asyncio.run, args=(way(),), name=way.__name__, daemon=True).start()
print('ready', flush=True)
time.sleep(100000)
";

#[test]
fn tasks_and_coroutines_that_wait_in_an_event_loop() {
    let place = |name: &str, wanted: &str| (name.to_string(), format!("script.py:{}", line_of(WAITS, wanted)));
    let own = |frames: &[PySpyFrame]| {
        let mut found = frames_of(&PySpyStacktrace { frames: frames.to_vec(), ..PySpyStacktrace::default() });
        found.retain(|(_, place)| place.starts_with("script.py"));
        found
    };
    for python in python::all() {
        let version = python.version();
        let mut ways = vec![
            ("task", "    await inner()", "task 'inner'"),
            ("gather", "await asyncio.gather", "the tasks of a gather"),
            ("wait", "await asyncio.wait(", "other tasks"),
            ("wait_for", "await asyncio.wait_for(", if python.minor < 12 { "other tasks" } else { "task 'inner'" }),
        ];
        if python.minor >= 11 {
            ways.push(("group", "async with", "other tasks"));
        }
        let script = python.start(WAITS, &[]);
        let awaits =
            |way: &str, line: &str| [place("leaf", "await queue"), place("middle", "await leaf"), place(way, line)];
        let captured = capture_until(script.pid, &version, |sample| {
            ways.iter().all(|(way, line, _)| {
                let thread = sample.py_stacktrace.iter().find(|thread| thread.thread_name == *way);
                thread.is_some_and(|thread| {
                    let is_idle = frames_of(thread).iter().any(|(_, place)| place.starts_with("selectors.py"));
                    is_idle && own(&thread.frames) == awaits(way, line)
                })
            })
        });
        assert_merged(&version, &captured);
        for (way, line, awaited) in ways {
            let thread = captured.sample.py_stacktrace.iter().find(|thread| thread.thread_name == way);
            let mut found: Vec<_> = thread
                .expect("it was there")
                .suspended
                .iter()
                .map(|task| (task.name == "inner", task.awaits.as_str(), own(&task.frames)))
                .collect();
            found.sort();
            let places = awaits(way, line);
            let expected = [(false, awaited, places[2..].to_vec()), (true, "a future", places[..2].to_vec())];
            assert_eq!(found, expected, "{version}: {way}");
        }
    }
}

const TRIO_TASKS: &str = "\
import trio
async def leaf(event):
    await event.wait()
async def middle(event):
    await leaf(event)
async def main():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(middle, trio.Event(), name='inner')
        nursery.start_soon(trio.sleep, 100000, name='sleeper')
        await trio.sleep(0.01)
        print('ready', flush=True)
trio.run(main)
";

/// Needs trio from PyPI, which takes half a minute for each version: `XPU_TIMER_TEST_LONG=1`.
#[test]
fn tasks_of_trio_that_wait() {
    if std::env::var_os("XPU_TIMER_TEST_LONG").is_none() {
        return;
    }
    let place = |name: &str, wanted: &str| (name.to_string(), format!("script.py:{}", line_of(TRIO_TASKS, wanted)));
    let inner = [place("leaf", "await event"), place("middle", "await leaf")];
    let own = |frames: &[PySpyFrame]| {
        let mut found = frames_of(&PySpyStacktrace { frames: frames.to_vec(), ..PySpyStacktrace::default() });
        found.retain(|(_, place)| place.starts_with("script.py"));
        found
    };
    for python in python::all().into_iter().filter(|python| python.minor >= 9 && !python.free_threaded) {
        let (minor, version) = (python.minor, &python.version());
        let (python, start) = python.with_packages(TRIO);
        let script = python.start(&(start + TRIO_TASKS), &[]);
        let captured = capture_until(script.pid, version, |sample| {
            sample.py_stacktrace.first().is_some_and(|thread| own(&thread.frames).first() == Some(&inner[0]))
        });
        let thread = &captured.sample.py_stacktrace[0];
        // Before 3.10, a `with` statement ends at the last line of its body.
        let exit = if minor < 10 { "        print('ready'" } else { "async with" };
        let expected = [&inner[..], &[place("main", exit), place("<module>", "trio.run")]].concat();
        assert_eq!(own(&thread.frames), expected, "{version}");
        let of = |name: &str| thread.suspended.iter().find(|task| task.name == name).expect("a task");
        assert_eq!((of("inner").awaits.as_str(), own(&of("inner").frames)), ("a wakeup", inner.to_vec()), "{version}");
        assert_eq!((of("__main__.main").awaits.as_str(), of("sleeper").awaits.as_str()), ("other tasks", "a wakeup"));
    }
}

const GREENLETS: &str = "\
import gevent, greenlet
from gevent.event import Event
from gevent.queue import Queue
pages = Queue()
def fetch_page():
    return pages.get()
def worker():
    while True:
        fetch_page()
def collect():
    Event().wait()
raw = greenlet.greenlet(lambda: greenlet.getcurrent().parent.switch())
raw.switch()
for _ in range(3): gevent.spawn(worker)
gevent.spawn(lambda: gevent.sleep(100000))
gevent.sleep(0.01)
print('ready', flush=True)
collect()
";

/// Needs gevent from PyPI, which takes a minute for each version: `XPU_TIMER_TEST_LONG=1`.
#[test]
fn greenlets_that_are_switched_away_from() {
    if std::env::var_os("XPU_TIMER_TEST_LONG").is_none() {
        return;
    }
    let place = |name: &str, wanted: &str| (name.to_string(), format!("script.py:{}", line_of(GREENLETS, wanted)));
    let fetches = vec![place("fetch_page", "pages.get"), place("worker", "    fetch_page")];
    for python in python::all().into_iter().filter(|python| python.minor >= 9 && !python.free_threaded) {
        let version = &python.version();
        let (python, start) = python.with_packages(GEVENT);
        let script = python.start(&(start + GREENLETS), &[]);
        let captured = capture_until(script.pid, version, |sample| {
            sample.py_stacktrace.first().is_some_and(|thread| thread.suspended.len() == 6)
        });
        let thread = &captured.sample.py_stacktrace[0];
        // The thread is in its hub, which runs on behalf of the main greenlet.
        let names: Vec<String> = frames_of(thread).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["run", "collect", "<module>"], "{version}");
        let count = |name: &str, wanted: &[(String, String)]| {
            let suspended = thread.suspended.iter().filter(|greenlet| greenlet.name == name);
            let frames =
                suspended.map(|greenlet| PySpyStacktrace { frames: greenlet.frames.clone(), ..Default::default() });
            frames.filter(|trace| wanted.is_empty() || frames_of(trace) == wanted).count()
        };
        assert_eq!(
            (count("Greenlet", &fetches), count("Greenlet", &[]), count("greenlet", &[]), count("main", &[])),
            (3, 4, 1, 1),
            "{version}: {:?}",
            thread.suspended
        );
    }
}

const CHAINS: usize = 29;
const LEVELS: usize = 14;
const CAPTURES: usize = 120;

/// Hundreds of captures while Python threads start, run through known chains of functions, and end.
///
/// The functions of a chain say which chain it is: the one at level 3 of chain 5 is `f_3_8`, the
/// level and the sum of both, modulo 29. So a stack shows whether all of it is from one moment of
/// one chain. C code calls some levels. The code of the last level is created each time, in memory
/// that held the code of another one.
const CHURN: &str = "\
import random, sys, threading, time
CHAINS, LEVELS, THREADS = 29, 14, 12
functions = {}
def spin(count):
    for _ in range(count): pass
for level in range(LEVELS):
    for chain in range(CHAINS):
        name = 'f_%d_%d' % (level, (level + chain) % CHAINS)
        call = 'functions[%d, %d](choice)' % (level + 1, chain)
        if level % 4 == 2:
            call = 'list(map(lambda_%s, [choice]))' % name
            exec('def lambda_%s(choice): functions[%d, %d](choice)' % (name, level + 1, chain), globals())
        text = 'def %s(choice):\\n    spin(choice)\\n    %s\\n    spin(choice)' % (name, call)
        exec(compile(text, 'chain', 'exec'), globals())
        functions[level, chain] = globals()[name]
def last(chain):
    name = 'f_%d_%d' % (LEVELS, (LEVELS + chain) % CHAINS)
    def run(choice):
        space = {'spin': spin, 'sleep': time.sleep}
        exec(compile('def %s(choice):\\n    spin(choice * 20)\\n    sleep(choice %% 3 / 3000)' % name, 'chain', 'exec'), space)
        space[name](choice)
    return run
for chain in range(CHAINS):
    functions[LEVELS, chain] = last(chain)
def thread():
    chance = random.Random(threading.get_native_id())
    for _ in range(chance.randrange(3, 30)):
        functions[0, chance.randrange(CHAINS)](chance.randrange(60))
    start()
def start():
    threading.Thread(target=thread, daemon=True).start()
for _ in range(THREADS): start()
print('ready', flush=True)
time.sleep(100000)
";

/// Whether all of a stack is from one moment; the frames come leaf first.
fn is_right(trace: &PySpyStacktrace) -> bool {
    let mut chain = None;
    let mut levels = 0;
    let mut ended = false;
    for frame in trace.frames.iter().rev() {
        let name = frame.func_name.rsplit('.').next().unwrap_or_default();
        let Some((level, sum)) = name.strip_prefix("f_").and_then(|rest| rest.split_once('_')) else {
            // Only a function that a link may call is above a link.
            ended |= levels > 0 && !name.starts_with("lambda_") && name != "run" && name != "<module>";
            continue;
        };
        let (Ok(level), Ok(sum)) = (level.parse::<usize>(), sum.parse::<usize>()) else { return false };
        let this = (sum + CHAINS - level % CHAINS) % CHAINS;
        if ended || level != levels || *chain.get_or_insert(this) != this {
            return false;
        }
        levels += 1;
    }
    levels <= LEVELS + 1
}

fn churn(python: &Python) {
    let version = python.version();
    let script = python.start(CHURN, &[]);
    let mut capturer = Capturer::new();
    let options = Options { deadline: PATIENCE, lines_budget: Duration::ZERO, ..Options::default() };
    let wanted = CAPTURES * 8;
    let (mut captures, mut right, mut deep, mut unmerged) = (0, 0, 0, 0);
    let mut errors: BTreeMap<String, usize> = BTreeMap::new();
    // On a busy machine many threads wait for a processor with an incomplete stack, so that it
    // takes more captures.
    while captures < CAPTURES || right <= wanted || deep <= wanted / 4 {
        captures += 1;
        assert!(captures < 10 * CAPTURES, "{version}: {right} stacks, {deep} of them deep, errors {errors:?}");
        let captured = capturer.capture(&[script.pid], &options).remove(0);
        for error in &captured.sample.errors {
            *errors.entry(error.chars().filter(|c| !c.is_ascii_hexdigit()).collect()).or_default() += 1;
        }
        for (trace, entries) in captured.sample.py_stacktrace.iter().zip(&captured.python_entries) {
            // A thread that could be neither stopped nor found asleep has this reason.
            if !trace.incomplete.is_empty() {
                continue;
            }
            assert!(is_right(trace), "{version}: {trace:#?}\n{:?}", captured.sample.errors);
            right += 1;
            deep += usize::from(trace.frames.len() > LEVELS);
            let native = captured.sample.stacktrace.iter().find(|thread| thread.pid == trace.os_thread_id);
            let native = native.filter(|native| native.incomplete.is_empty());
            let merged = native.is_none_or(|native| merge(&native.frames, &trace.frames, entries).is_ok());
            unmerged += usize::from(!merged);
        }
    }
    assert!(errors.values().sum::<usize>() <= right / 100, "{version}: {errors:?}");
    assert!(unmerged <= right / 100, "{version}: {unmerged} of {right} do not fit into their native stacks");
}

#[test]
fn no_wrong_stack_while_threads_come_and_go() {
    for python in python::all() {
        churn(&python);
    }
}

#[test]
fn the_check_finds_wrong_stacks() {
    let trace = |names: &[&str]| {
        let frame =
            |name: &&str| PySpyFrame { func_name: (*name).into(), file_name: "chain:1".into(), module: String::new() };
        PySpyStacktrace { frames: names.iter().map(frame).collect(), ..PySpyStacktrace::default() }
    };
    assert!(is_right(&trace(&["spin", "f_2_7", "f_1_6", "f_0_5", "thread"])));
    assert!(is_right(&trace(&["f_3_8", "lambda_f_2_7", "f_2_7", "f_1_6", "f_0_5", "thread"])));
    assert!(is_right(&trace(&["wait", "start", "thread"])));
    assert!(!is_right(&trace(&["spin", "f_2_8", "f_1_6", "f_0_5", "thread"])), "two chains");
    assert!(!is_right(&trace(&["spin", "f_2_7", "f_0_5", "thread"])), "a level is missing");
    assert!(!is_right(&trace(&["f_2_7", "f_1_6"])), "the root is missing");
    assert!(!is_right(&trace(&["f_1_6", "spin", "f_0_5"])), "something that calls no link is in between");
}
