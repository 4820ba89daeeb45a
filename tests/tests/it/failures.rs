//! Ranks that end: in every way, at every moment, and however they were started. The verdict says
//! how the rank ended that the others wait for, and a job that ends as it should is not an
//! incident.
//!
//! And ways to fail: the verdict on each, without a variable and with the handler of fatal signals.
//! xpu_timer never changes the exit status or the standard error. `docs/failures.md` has the table:
//!
//! ```text
//! BLESS=1 cargo test -p xpu_timer_tests --test it failures::every_way -- --ignored
//! ```

use std::{
    env,
    ffi::OsStr,
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::Mutex,
    sync::atomic::{AtomicUsize, Ordering},
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use xpu_timer_capture::{Capturer, Options};
use xpu_timer_proto::{Message as _, procfs, server::Stacktrace, v1::hook_message::Message};
use xpu_timer_tests::{
    Incident, Job, PATIENCE, Process, PypiTorch, artifacts, python, python_version, skip, tree, wait_until,
};

use crate::{
    capture::python::all as all_pythons,
    collector::fake::{FakeHook, collector},
};

/// A way to fail.
struct Way {
    /// Argument of `failing.py`.
    name: &'static str,
    /// For the table.
    text: &'static str,
    /// Words of the verdict with the default settings; empty if it does not name the reason.
    words: &'static [&'static str],
    /// Words that only the handler of signals adds.
    handler: &'static [&'static str],
}

const BAD_SAMPLE: &[&str] = &["ValueError: a bad sample at failing.py:", " in bad_sample"];

const fn way(name: &'static str, text: &'static str, words: &'static [&'static str]) -> Way {
    Way { name, text, words, handler: &[] }
}

const fn signal(name: &'static str, text: &'static str, handler: &'static [&'static str]) -> Way {
    Way { name, text, words: &[], handler }
}

const WAYS: [Way; 31] = [
    way("main", "exception in the main thread", BAD_SAMPLE),
    way("chained", "exception while another one is handled", &["RuntimeError: the shard is lost at failing.py:"]),
    way("thread", "exception in a thread, for which the main thread waits", BAD_SAMPLE),
    way("worker", "exception in a worker process, raised again in the rank", &["ValueError: a bad sample"]),
    way("callback", "exception in a callback of C code", BAD_SAMPLE),
    way("del", "exception in `__del__`", BAD_SAMPLE),
    way("exit-text", "`sys.exit` with a text", &["no checkpoint was found"]),
    way("recursion", "recursion without an end", &["RecursionError: maximum recursion depth exceeded"]),
    way("memory", "allocation beyond a limit", &["MemoryError at failing.py:"]),
    way("timeout", "timeout of a connection", &["imed out at failing.py:"]),
    way("cuda-error", "CUDA error (simulated device)", &["CudaError: cudaSetDevice: invalid device ordinal"]),
    way("interrupt", "KeyboardInterrupt", &["KeyboardInterrupt at failing.py:"]),
    way("exec", "execution of a missing file", &["FileNotFoundError: [Errno 2]"]),
    way("forked", "exception in a forked child, for which its parent waits", BAD_SAMPLE),
    way("retries", "exception that is handled again and again", BAD_SAMPLE),
    way("error-file", "exception only in the error file of torchelastic", &["ValueError: a bad sample"]),
    signal("segv", "invalid memory access", &["SIGSEGV in ", "memset", ", called at failing.py:"]),
    signal(
        "segv-faulthandler-first",
        "invalid memory access, with faulthandler enabled before",
        &["SIGSEGV in ", "memset"],
    ),
    signal(
        "segv-faulthandler-later",
        "invalid memory access, with faulthandler enabled later",
        &["SIGSEGV in ", "memset"],
    ),
    signal("segv-thread", "invalid memory access in a thread", &["SIGSEGV in ", "memset", ", thread "]),
    signal("abort", "`os.abort`", &["SIGABRT in os_abort"]),
    signal("terminate", "uncaught exception of C++", &["SIGABRT in ", ": std::runtime_error: the shard has no rows"]),
    signal(
        "terminate-faulthandler",
        "uncaught exception of C++, with faulthandler enabled",
        &["SIGABRT in ", ": std::runtime_error: the shard"],
    ),
    signal(
        "assertion",
        "failed assertion in C++",
        &["SIGABRT in ", "kernel.cpp:7: forward: Assertion `rows > 0' failed"],
    ),
    signal("heap", "corrupted heap", &["SIGABRT in ", ": free(): invalid pointer"]),
    signal("bus", "access beyond the end of a mapped file", &["SIGBUS in "]),
    signal("overflow", "stack overflow", &["SIGSEGV in ", "ffi"]),
    signal("fpe", "SIGFPE", &["SIGFPE in "]),
    signal("exit-3", "`sys.exit(3)`", &[]),
    signal("_exit-4", "`os._exit(4)`", &[]),
    signal("oom-kill", "SIGKILL, as by the kernel without memory", &[]),
];

/// A run of `failing.py`.
struct Run {
    job: Job,
    child: Child,
    /// Exit status and standard error of rank 1.
    end: Value,
}

impl Drop for Run {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

fn run(way: &Way, job: Job, mut command: Command) -> Run {
    command.arg(tree().join("tests/examples/failing.py")).arg(way.name);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let end = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{}: {error}: {line:?}", way.name));
    Run { job, child, end }
}

/// Exit status and standard error, without addresses.
fn comparable(end: &Value) -> (String, String) {
    let text = end["stderr"].as_str().expect("text");
    let mut words = text.split("0x");
    let mut plain: String = words.next().unwrap_or_default().into();
    for word in words {
        plain += word.trim_start_matches(|letter: char| letter.is_ascii_hexdigit());
    }
    (end["status"].to_string(), plain)
}

/// A variable that changes nothing.
const NONE: (&str, &str) = ("XPU_TIMER_SIGNAL_HANDLER", "0");
const HANDLER: (&str, &str) = ("XPU_TIMER_SIGNAL_HANDLER", "1");

/// The incident of a way to fail with this Python and this variable, after a comparison with a run
/// without xpu_timer. The job ends with the first part.
fn failed(way: &Way, (variable, value): (&str, &str), program: &Path, library_path: Option<&OsStr>) -> (Run, Incident) {
    let prepared = |mut command: Command| {
        command.envs(library_path.map(|path| ("LD_LIBRARY_PATH", path)));
        command
    };
    let job = Job::new();
    let bare = prepared(job.command(program));
    let bare = comparable(&run(way, job, bare).end);
    let job = Job::new()
        .with("XPU_TIMER_HANG_TIMEOUT", "2")
        .with("XPU_TIMER_IDLE_TIMEOUT", "4")
        .with("XPU_TIMER_SAMPLE_INTERVAL", "0.5")
        .with(variable, value);
    let launched = prepared(job.launch(program));
    let launched = run(way, job, launched);
    assert_eq!(comparable(&launched.end), bare, "{}: xpu_timer changes the end", way.name);
    let incident = launched.job.wait_incident(1, PATIENCE);
    (launched, incident)
}

fn verdict(way: &Way, handles_signals: bool) -> String {
    let variable = if handles_signals { HANDLER } else { NONE };
    text(&failed(way, variable, python().as_ref(), None).1)
}

/// Whether the verdict has all words that are expected, if any are. Its lines are wrapped.
fn is_named(text: &str, words: &[&str]) -> bool {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    !words.is_empty() && words.iter().all(|word| text.contains(word))
}

fn check(name: &str, handles_signals: bool) {
    let way = WAYS.iter().find(|way| way.name == name).expect("a known way");
    let text = verdict(way, handles_signals);
    let words = if handles_signals && way.words.is_empty() { way.handler } else { way.words };
    assert!(is_named(&text, words), "{name}: {words:?} are not in: {text}");
}

#[test]
fn an_exception_is_named_without_any_variable() {
    check("main", false);
    check("thread", false);
}

#[test]
fn exceptions_that_are_logged_elsewhere_are_named_where_the_hook_listens() {
    const TRACED: (&str, &str) = ("XPU_TIMER_HOST_TRACING_FUNC", "bad_sample");
    const PLUGIN: (&str, &str) = ("XPU_TIMER_EXIT_HOOK_PLUGIN", "/nowhere/plugin.py");
    for (version, name, variable) in [
        ("3.8", "elsewhere", TRACED),
        ("3.11", "elsewhere-thread", PLUGIN),
        ("3.12", "elsewhere", PLUGIN),
        ("3.13", "elsewhere", TRACED),
        ("3.13", "elsewhere-thread", TRACED),
        ("3.13", "main", TRACED),
    ] {
        let Some(program) = python_version(version) else {
            skip(&format!("CPython {version} is not installed"));
            continue;
        };
        let way = way(name, "", BAD_SAMPLE);
        let text = text(&failed(&way, variable, &program, None).1);
        assert!(is_named(&text, way.words), "{version}, {name}: {text}");
        assert!(!name.ends_with("thread") || is_named(&text, &["thread reader"]), "{text}");
    }
    let way = way("elsewhere", "", BAD_SAMPLE);
    let text = verdict(&way, false);
    assert!(!text.contains("ValueError"), "nothing is injected without a variable: {text}");
}

#[test]
fn the_handler_of_signals_names_the_function() {
    check("segv-faulthandler-first", true);
    check("overflow", true);
    check("terminate-faulthandler", true);
    check("segv-thread", true);
}

#[test]
fn the_stack_of_a_fatal_signal_is_in_the_file_of_the_rank_and_in_the_report() {
    let way = WAYS.iter().find(|way| way.name == "terminate").expect("a known way");
    let (_run, incident) = failed(way, HANDLER, python().as_ref(), None);
    assert!(is_named(&text(&incident), way.handler), "{}", text(&incident));
    let file = fs::read(incident.path.join("00001-00002.stacktrace")).expect("the file of the rank");
    let file = Stacktrace::decode(&file[..]).expect("a dump");
    let [thread] = &file.stacktrace[..] else { panic!("one thread: {file:?}") };
    let [python] = &file.py_stacktrace[..] else { panic!("one thread of Python: {file:?}") };
    assert!(python.frames.iter().any(|frame| frame.file_name.contains("failing.py")), "{:?}", python.frames);
    assert!(is_named(&text(&incident), &[", called at failing.py:"]), "{}", text(&incident));
    assert_eq!((thread.state.as_str(), file.process_state.as_str()), ("received SIGABRT", "X (dead)"));
    let has = |name: &str| thread.frames.iter().any(|frame| frame.func_name.contains(name));
    assert!(has("__throw_runtime_error") && has("main"), "{:?}", thread.frames);
    let folded = fs::read_to_string(incident.path.join("cpp_stack")).expect("the folded stacks");
    let of_rank = folded.lines().find(|line| line.contains("__throw_runtime_error")).expect("the stack");
    assert!(of_rank.contains("@1|0"), "{of_rank}");
    let report = fs::read_to_string(incident.path.join("report.html")).expect("the report");
    assert!(report.contains("received SIGABRT") && report.contains("__throw_runtime_error"));
}

/// Ways to fail in PyTorch itself, on the simulated device.
const TORCH_WAYS: [Way; 4] = [
    way("torch-autograd", "", BAD_SAMPLE),
    way("torch-loader", "", BAD_SAMPLE),
    way("torch-gloo", "", &["RuntimeError: ", "imed out", " at failing.py:"]),
    way("torch-cuda", "", &["CUDA error: invalid device ordinal"]),
];

/// With `XPU_TIMER_TEST_LONG=1`, because it installs PyTorch from PyPI, 2.4 GB.
#[test]
fn exceptions_of_pytorch_are_named() {
    if env::var_os("XPU_TIMER_TEST_LONG").is_none() {
        return;
    }
    let torch = match PypiTorch::set_up() {
        Ok(torch) => torch,
        Err(error) => return skip(&format!("{error:#}")),
    };
    let library_path = torch.library_path().expect("the simulated device");
    for way in TORCH_WAYS {
        let text = text(&failed(&way, NONE, &torch.python(), Some(&library_path)).1);
        eprintln!("{}: {}", way.name, text.lines().next().unwrap_or_default());
        assert!(is_named(&text, way.words), "{}: {:?} are not in: {text}", way.name, way.words);
    }
}

#[test]
#[ignore = "runs every way to fail twice: three minutes"]
fn every_way() {
    let texts: Mutex<Vec<[String; 2]>> = Mutex::new(vec![Default::default(); WAYS.len()]);
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(way) = WAYS.get(index / 2) else { break };
                    let text = verdict(way, index % 2 == 1);
                    texts.lock().unwrap()[index / 2][index % 2] = text;
                }
            });
        }
    });
    let texts = texts.into_inner().unwrap();
    let mut rows = String::new();
    let mut named = [0, 0];
    for (way, [plain, handled]) in WAYS.iter().zip(&texts) {
        let by_default = is_named(plain, way.words);
        let by_handler = is_named(handled, if way.words.is_empty() { way.handler } else { way.words });
        named[0] += usize::from(by_default);
        named[1] += usize::from(by_handler);
        let cell = |is_named: bool, text: &str| if is_named { "named".to_string() } else { reason(text) };
        rows += &format!("| {} | {} | {} |\n", way.text, cell(by_default, plain), cell(by_handler, handled));
        if by_default == way.words.is_empty() || by_handler == (way.words.is_empty() && way.handler.is_empty()) {
            eprintln!("{}: default {by_default}, handler {by_handler}\n{plain}\n{handled}", way.name);
        }
    }
    eprintln!("named by default: {}, with the handler: {}, of {}\n{rows}", named[0], named[1], WAYS.len());
    assert!(named[0] >= 12 && named[1] >= 18, "{named:?}");
    let path = tree().join("docs/failures.md");
    let page = fs::read_to_string(&path).expect("the page");
    let (head, rest) = page.split_once("<!-- table -->\n").expect("the mark of the table");
    let (_, tail) = rest.split_once("<!-- end -->\n").expect("the end of the table");
    let table = format!(
        "| way to fail | without a variable | with `XPU_TIMER_SIGNAL_HANDLER=1` |\n|---|---|---|\n{rows}\n\
         Named: {} of {} without a variable, {} with the handler.\n",
        named[0],
        WAYS.len(),
        named[1]
    );
    let fresh = format!("{head}<!-- table -->\n{table}<!-- end -->\n{tail}");
    if env::var_os("BLESS").is_some() {
        fs::write(&path, &fresh).unwrap();
    }
    assert!(page == fresh || env::var_os("BLESS").is_some(), "docs/failures.md is stale; BLESS=1 writes it anew");
}

/// The end of rank 1 in a verdict that does not name the reason.
fn reason(text: &str) -> String {
    let end = text.lines().find_map(|line| line.split_once("Rank 1 ")).map_or("", |(_, end)| end);
    let exit = end.split_once('(').and_then(|(_, inside)| inside.split_once(')')).map_or("", |(exit, _)| exit);
    if exit.is_empty() { "not named".into() } else { format!("only `{exit}`") }
}

const PLUGIN: &str = r#"
def xpu_timer_parse_python_exception(type, value, traceback, infos):
    places = []
    while traceback:
        code = traceback.tb_frame.f_code
        places.append(f"{code.co_name}:{traceback.tb_lineno}")
        traceback = traceback.tb_next
    print("received", type is ValueError, value, places, infos["rank"], infos["job_name"], infos["ip"])


def xpu_timer_parse_cpp_exception(infos):
    names = [frame["function_name"] for frame in infos["frame_infos"]]
    print("received", infos["signal"], infos["rank"], any("memset" in name for name in names))
    raise RuntimeError("no connection")
"#;

#[test]
fn exit_plugins_are_called_outside_of_the_rank() {
    for (name, expected) in [
        ("main", vec!["received True a bad sample ['<module>:", "'bad_sample:", "] 1 "]),
        ("segv", vec!["received 11 1 True", "xpu_timer_parse_cpp_exception raised RuntimeError: no connection"]),
    ] {
        let way = WAYS.iter().find(|way| way.name == name).expect("a known way");
        let job = Job::new().with("XPU_TIMER_SIGNAL_HANDLER", "1");
        let plugin = job.dir.join("plugin.py");
        fs::write(&plugin, PLUGIN).unwrap();
        let job = job.with("XPU_TIMER_EXIT_HOOK_PLUGIN", &format!("/nowhere/a.py,{}", plugin.display()));
        let shown = Command::new(artifacts().bin("xpu_timer_print_env"))
            .env("XPU_TIMER_EXIT_HOOK_PLUGIN", plugin.display().to_string())
            .output()
            .expect("it runs");
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(
            shown.contains("plugin.py: xpu_timer_parse_python_exception, xpu_timer_parse_cpp_exception"),
            "{shown}"
        );
        let launched = job.launch(python());
        let run = run(way, job, launched);
        let expected = [expected, vec!["/nowhere/a.py cannot be loaded: FileNotFoundError"]].concat();
        wait_until(PATIENCE, "the log has the output of the plugins", || {
            let log = run.job.logs();
            expected.iter().all(|words| log.contains(words))
        });
        assert!(!run.end["stderr"].as_str().expect("text").contains("received"), "{}", run.end);
    }
}

#[test]
fn the_plugins_of_eight_ranks_that_fail_together_write_whole_lines() {
    const TALKER: &str = "\
def xpu_timer_parse_python_exception(type, value, traceback, infos):
    for line in range(50):
        print('line', line, 'of rank', infos['rank'], '-' * 150, 'end', flush=True)
";
    let job = Job::new();
    let plugin = job.dir.join("talker.py");
    fs::write(&plugin, TALKER).unwrap();
    let job = job.with("XPU_TIMER_EXIT_HOOK_PLUGIN", &plugin.display().to_string());
    let examples = tree().join("tests/examples");
    let mut command = job.launch(python());
    command.arg(examples.join("run_ranks.py")).args(["--nproc", "8"]).arg(examples.join("ends.py"));
    let _ranks = Process::spawn(command.args(["--how", "raise"]));
    let dashes = "-".repeat(150);
    let lines = (0..8).flat_map(|rank| (0..50).map(move |line| (rank, line)));
    let mut expected: Vec<String> =
        lines.map(|(rank, line)| format!("line {line} of rank {rank} {dashes} end")).collect();
    expected.sort_unstable();
    let printed = || -> Vec<String> {
        let log = job.logs();
        let texts = log.lines().filter_map(|line| line.split_once("exit plugin for ")?.1.split_once(": "));
        texts.map(|(_, text)| text.to_string()).collect()
    };
    wait_until(PATIENCE, "the log has the output of all plugins", || printed().len() >= expected.len());
    let mut printed = printed();
    printed.sort_unstable();
    assert!(printed == expected, "{} of {} lines: {printed:#?}", printed.len(), expected.len());
}

#[test]
fn exceptions_that_are_being_handled_are_read_from_every_python() {
    const PROGRAM: &str = "import sys, time\n\
        def fetch():\n    raise ConnectionError('refused', 7)\n\
        def retry():\n    try:\n        fetch()\n    except ConnectionError:\n        print('ready', flush=True)\n        time.sleep(600)\n\
        def steps():\n    yield 1\n    retry()\n\
        try:\n    open('/nowhere/data')\nexcept OSError:\n    for step in steps(): pass\n";
    let pythons = all_pythons();
    assert!(!pythons.is_empty(), "no Python of these versions");
    for python in pythons {
        let version = python.version();
        let script = python.start(PROGRAM, &[]);
        let mut captured = Vec::new();
        wait_until(PATIENCE, "it sleeps in its except block", || {
            captured = Capturer::new().capture(&[script.pid], &Options::default());
            captured[0].sample.py_stacktrace.first().is_some_and(|thread| !thread.exceptions.is_empty())
        });
        let exceptions = &captured[0].sample.py_stacktrace[0].exceptions;
        let at = |line: u32| format!("{}:{line}", script.path);
        let shown: Vec<(&str, &str, Vec<String>)> = exceptions
            .iter()
            .map(|one| {
                let frames = one.frames.iter().map(|frame| frame.file_name.clone()).collect();
                (one.r#type.as_str(), one.message.as_str(), frames)
            })
            .collect();
        let expected = [
            ("ConnectionError", "(refused, 7)", vec![at(3), at(6)]),
            ("FileNotFoundError", "[Errno 2] No such file or directory", vec![at(14)]),
        ];
        assert_eq!(shown, expected, "{version}");
    }
}

const RANKS: &str = "4";

fn job() -> Job {
    Job::new().with("XPU_TIMER_HANG_TIMEOUT", "3").with("XPU_TIMER_SAMPLE_INTERVAL", "1")
}

/// Ranks that a launcher such as torchrun starts.
fn started(job: &Job, arguments: &[&str]) -> Process {
    let examples = tree().join("tests/examples");
    let mut command = job.launch(python());
    command.arg(examples.join("run_ranks.py")).args(["--nproc", RANKS]).arg(examples.join("ends.py"));
    Process::spawn(command.args(arguments))
}

/// Ranks that the program starts itself.
fn multiprocessing(job: &Job, method: &str, arguments: &[&str]) -> Process {
    let mut command: Command = job.launch(python());
    command.arg(tree().join("tests/examples/ends.py")).args(["--nproc", RANKS, "--method", method]);
    Process::spawn(command.args(arguments))
}

fn text(incident: &Incident) -> String {
    fs::read_to_string(incident.path.join("verdict.txt")).expect("every incident has a verdict.txt")
}

/// Waits for the verdict on rank 2, whose sentence must hold these words.
#[track_caller]
fn expect(job: &Job, cause: &str, words: &[&str]) {
    let incident = job.wait_incident(1, PATIENCE);
    let text = text(&incident);
    assert_eq!(incident.verdict["cause"], cause, "{text}");
    assert_eq!(incident.verdict["culprits"], json!([2]), "{text}");
    assert_eq!(incident.verdict["confidence"], "high", "{text}");
    let sentence = incident.verdict["sentence"].as_str().expect("a sentence");
    for word in words {
        assert!(sentence.contains(word), "{word} in: {sentence}");
    }
}

#[track_caller]
fn ended(how: &[&str], words: &[&str]) {
    let job = job();
    let _ranks = started(&job, &[&["--rank", "2", "--how"], how].concat());
    expect(&job, "process_dead", &[words, &["ranks 0-1, 3 wait for it"]].concat());
}

#[test]
fn a_rank_that_leaves_while_others_wait_is_named_with_its_exit_code() {
    ended(&["exit", "--code", "3"], &["Rank 2 has exited (exit code 3)", "all_reduce 2"]);
    ended(&["exit"], &["Rank 2 has exited (exit code 0)", "all_reduce 2"]);
    ended(&["raise"], &["Rank 2 has exited (exit code 1: ValueError: a bad sample at ends.py:", "all_reduce 2"]);
}

#[test]
fn a_rank_that_ends_without_goodbye_is_named_with_its_exit_code_or_signal() {
    ended(&["_exit", "--code", "5"], &["Rank 2 is dead (exit code 5)", "all_reduce 2"]);
    ended(&["killed"], &["Rank 2 is dead (killed by SIGKILL)", "all_reduce 2"]);
    ended(&["abort"], &["Rank 2 is dead (killed by SIGABRT", "all_reduce 2"]);
}

#[test]
fn a_rank_that_ends_before_its_first_collective_belongs_to_its_job() {
    ended(&["_exit", "--code", "9", "--moment", "made"], &["Rank 2 is dead (exit code 9)"]);
    let raised = ["Rank 2 has exited (exit code 1: ValueError: a bad sample", "creation of communicator"];
    ended(&["raise", "--moment", "start"], &raised);
}

#[test]
fn ranks_of_multiprocessing_are_ranks() {
    let stays = ["--rank", "2", "--how", "stay"];
    let place = ["Rank 2 has not entered all_reduce 2", "in wait_for_shard", "ranks 0-1, 3 wait for it"];
    for method in ["spawn", "forkserver"] {
        let job = job();
        let _ranks = multiprocessing(&job, method, &stays);
        expect(&job, "missing_rank", &place);
    }
    let job = job();
    let _ranks = multiprocessing(&job, "fork", &["--rank", "2", "--how", "exit", "--code", "3"]);
    // Children of a fork leave by _exit, whatever their code does.
    expect(&job, "process_dead", &["Rank 2 is dead (exit code 3)", "ranks 0-1, 3 wait for it"]);
}

#[test]
fn ranks_that_end_together_after_their_work_are_not_an_incident() {
    let job = job();
    for how in [&["--how", "_exit"][..], &["--how", "_exit", "--moment", "start"], &[]] {
        let output = started(&job, how).wait(PATIENCE);
        assert_eq!(output.code(), 0, "{}", output.stderr);
    }
    wait_until(PATIENCE, "no rank is left", || {
        let ranks = job.status().ok().and_then(|status| status["ranks"].as_array().cloned()).unwrap_or_default();
        ranks.iter().all(|rank| rank["presence"] != "present")
    });
    assert_eq!(job.incidents().len(), 0, "{}", job.logs());
}

#[test]
fn a_rank_that_is_gone_before_its_hello_is_read_belongs_to_its_job() {
    let job = job().with("MASTER_ADDR", "10.0.0.9").with("MASTER_PORT", "29500");
    let collector = collector(&job, &[]);
    let mut rank = FakeHook::start(&job, "short", 1, 2);
    rank.connect(&job);
    collector.signal(Signal::SIGSTOP);
    wait_until(PATIENCE, "the collector stands still", || {
        procfs::stat(collector.pid()).is_ok_and(|stat| stat.state == 'T')
    });
    rank.send(Message::Hello(rank.hello.clone()));
    // It is killed and waited for: nothing of it is in /proc any more.
    drop(rank);
    collector.signal(Signal::SIGCONT);
    let mut found = None;
    wait_until(PATIENCE, "the collector knows of its end", || {
        found = job.status().ok().and_then(|status| status["ranks"].as_array()?.first().cloned());
        found.as_ref().is_some_and(|rank| rank["presence"] == "dead")
    });
    let rank = found.expect("the loop ends with it");
    assert_eq!((&rank["job"], &rank["rank"]), (&json!("short (10.0.0.9:29500)"), &json!(1)), "{rank}");
    // Linux before 6.15 forgets how a process ended when it is waited for.
    assert!(rank["exit"].is_null() || rank["exit"] == "killed by SIGKILL", "{rank}");
}

/// A front end that starts two ranks, which communicate for a while and then end or stand, and
/// ends or stays itself.
const FRONT_END: &str = r#"
import os, subprocess, sys, time

def stay_away():
    time.sleep(600)

def rank(number, how):
    import cuda
    cuda.set_device(number)
    communicator = cuda.Communicator.create("world", number, 2)
    stream, buffer = cuda.Stream(), cuda.Buffer(64)
    for _ in range(20):
        communicator.all_reduce(buffer, stream)
        stream.synchronize()
    if how == "signal":
        os.abort()
    if how == "fail":
        sys.exit(3)
    if how == "stand" and number == 1:
        time.sleep(1)
        stay_away()
    if how == "stand":
        communicator.all_reduce(buffer, stream)
        stream.synchronize()

role, how = sys.argv[1:]
if role != "front_end":
    rank(int(role), how)
    sys.exit(0)
variables = lambda number: dict(os.environ, RANK=str(number), WORLD_SIZE="2", LOCAL_RANK=str(number))
ranks = [subprocess.Popen([sys.executable, __file__, str(number), how], env=variables(number)) for number in range(2)]
if how == "stand":
    time.sleep(1)
    sys.exit(7)
for one in ranks:
    one.wait()
print("ended", flush=True)
time.sleep(600)
"#;

fn front_end(job: &Job, how: &str) -> Process {
    let script = job.dir.join("serve.py");
    fs::write(&script, FRONT_END).expect("the job's folder");
    let mut command = job.launch(python());
    command.env("PYTHONPATH", tree().join("tests/examples")).arg(script).args(["front_end", how]);
    Process::spawn(&mut command)
}

#[test]
fn ranks_that_all_die_while_their_front_end_lives_are_an_incident() {
    for (how, exit) in [("signal", "SIGABRT"), ("fail", "exit code 3")] {
        let job = job();
        let _front_end = front_end(&job, how);
        let incident = job.wait_incident(1, PATIENCE);
        let text = text(&incident);
        assert_eq!(incident.verdict["trigger"]["kind"], "death", "{text}");
        assert_eq!(incident.verdict["cause"], "process_dead", "{text}");
        assert_eq!(incident.verdict["culprits"], json!([0, 1]), "{text}");
        assert!(text.contains(exit), "{text}");
        assert_eq!(job.incidents().len(), 1, "{}", job.logs());
    }
}

#[test]
fn ranks_that_all_end_in_order_while_their_front_end_lives_are_no_incident() {
    let job = job();
    let mut front_end = front_end(&job, "succeed");
    front_end.wait_for("ended", PATIENCE);
    let uptime = || job.status().ok().and_then(|status| status["uptime_s"].as_f64()).unwrap_or_default();
    let ended = uptime();
    wait_until(PATIENCE, "an incident would be there", || uptime() > ended + 8.0);
    assert!(job.incidents().is_empty(), "{}", job.logs());
}

#[test]
fn the_end_of_the_launched_command_is_in_the_verdict() {
    let job = job();
    let front_end = front_end(&job, "stand");
    let incident = job.wait_incident(1, PATIENCE);
    let text = text(&incident);
    assert_eq!(incident.verdict["culprits"], json!([1]), "{text}");
    let wanted = format!("its launched command, pid {} (", front_end.pid());
    let errors: Vec<&str> = incident.verdict["ranks"]
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|group| group["errors"].as_array().into_iter().flatten().filter_map(|error| error.as_str()))
        .collect();
    let named = errors.iter().filter(|error| error.starts_with(&wanted) && error.contains("serve.py front_end stand"));
    assert!(named.count() > 0 && text.contains("has ended"), "{text}");
}
