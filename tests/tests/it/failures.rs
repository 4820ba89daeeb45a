//! Ways to fail: what the verdict says about each, without a variable and with the handler of
//! fatal signals. In none is the exit status or the standard error another one than without
//! xpu_timer. `docs/failures.md` has the table:
//!
//! ```text
//! BLESS=1 cargo test -p xpu_timer_tests --test it failures::every_way -- --ignored
//! ```

use std::{
    env, fs,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::Mutex,
    sync::atomic::{AtomicUsize, Ordering},
};

use serde_json::Value;
use xpu_timer_capture::{Capturer, Options};
use xpu_timer_tests::{Job, PATIENCE, artifacts, python, python_version, tree, wait_until};

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

const WAYS: [Way; 28] = [
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
    signal("segv", "invalid memory access", &["SIGSEGV in ", "memset"]),
    signal("segv-faulthandler-first", "the same, with faulthandler enabled before", &["SIGSEGV in ", "memset"]),
    signal("segv-faulthandler-later", "the same, with faulthandler enabled later", &["SIGSEGV in ", "memset"]),
    signal("abort", "`os.abort`", &["SIGABRT in os_abort"]),
    signal("terminate", "`std::terminate`", &["SIGABRT in ", "std::terminate"]),
    signal("assertion", "failed assertion in C++", &["SIGABRT in ", "__assert_fail"]),
    signal("bus", "access beyond the end of a mapped file", &["SIGBUS in "]),
    signal("overflow", "stack overflow", &["SIGSEGV in ", "ffi"]),
    signal("fpe", "SIGFPE", &["SIGFPE in "]),
    signal("exit-3", "`sys.exit(3)`", &[]),
    signal("_exit-4", "`os._exit(4)`", &[]),
    signal("oom-kill", "SIGKILL, as by the kernel without memory", &[]),
];

/// What a run of `failing.py` shows.
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

/// The verdict on a way to fail, after a comparison with a run without xpu_timer.
fn verdict(way: &Way, handles_signals: bool) -> String {
    let job = Job::new();
    let bare = job.command(python());
    let bare = comparable(&run(way, job, bare).end);
    let job = Job::new()
        .with("XPU_TIMER_HANG_TIMEOUT", "2")
        .with("XPU_TIMER_IDLE_TIMEOUT", "4")
        .with("XPU_TIMER_SAMPLE_INTERVAL", "0.5")
        .with("XPU_TIMER_SIGNAL_HANDLER", if handles_signals { "1" } else { "0" });
    let launched = job.launch(python());
    let launched = run(way, job, launched);
    assert_eq!(comparable(&launched.end), bare, "{}: xpu_timer changes the end", way.name);
    let incident = launched.job.wait_incident(1, PATIENCE);
    fs::read_to_string(incident.path.join("verdict.txt")).expect("every incident has a verdict.txt")
}

/// Whether the verdict has all words that are expected, if any are.
fn is_named(text: &str, words: &[&str]) -> bool {
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
fn the_handler_of_signals_names_the_function() {
    check("segv-faulthandler-first", true);
    check("overflow", true);
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

/// What a verdict says about the end of rank 1 when it does not name the reason.
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
    print("told of", type is ValueError, value, places, infos["rank"], infos["job_name"], infos["ip"])


def xpu_timer_parse_cpp_exception(infos):
    names = [frame["function_name"] for frame in infos["frame_infos"]]
    print("told of", infos["signal"], infos["rank"], any("memset" in name for name in names))
    raise RuntimeError("no connection")
"#;

#[test]
fn exit_plugins_are_called_outside_of_the_rank() {
    for (name, expected) in [
        ("main", vec!["told of True a bad sample ['<module>:", "'bad_sample:", "] 1 "]),
        ("segv", vec!["told of 11 1 True", "xpu_timer_parse_cpp_exception raised RuntimeError: no connection"]),
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
        assert!(!run.end["stderr"].as_str().expect("text").contains("told of"), "{}", run.end);
    }
}

#[test]
fn exceptions_that_are_being_handled_are_read_from_every_python() {
    const PROGRAM: &str = "import sys, time\n\
        def fetch():\n    raise ConnectionError('refused', 7)\n\
        def retry():\n    try:\n        fetch()\n    except ConnectionError:\n        print('ready', flush=True)\n        time.sleep(600)\n\
        def steps():\n    yield 1\n    retry()\n\
        try:\n    open('/nowhere/data')\nexcept OSError:\n    for step in steps(): pass\n";
    let mut read = 0;
    for version in ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13"] {
        let Some(python) = python_version(version) else { continue };
        let mut child = Command::new(python).args(["-c", PROGRAM]).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        let pid = child.id().cast_signed();
        let mut captured = Vec::new();
        wait_until(PATIENCE, "it sleeps in its except block", || {
            captured = Capturer::new().capture(&[pid], &Options::default());
            captured[0].sample.py_stacktrace.first().is_some_and(|thread| !thread.exceptions.is_empty())
        });
        child.kill().and_then(|()| child.wait()).expect("it ends");
        let exceptions = &captured[0].sample.py_stacktrace[0].exceptions;
        let shown: Vec<(&str, &str, Vec<&str>)> = exceptions
            .iter()
            .map(|one| {
                let frames = one.frames.iter().map(|frame| frame.file_name.as_str()).collect();
                (one.r#type.as_str(), one.message.as_str(), frames)
            })
            .collect();
        let expected = [
            ("ConnectionError", "(refused, 7)", vec!["<string>:3", "<string>:6"]),
            ("FileNotFoundError", "[Errno 2] No such file or directory", vec!["<string>:14"]),
        ];
        assert_eq!(shown, expected, "{version}");
        read += 1;
    }
    assert!(read > 0, "no Python of these versions");
}
