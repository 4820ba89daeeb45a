//! Captures that need privileges to set up: other mount and process namespaces, other users, files
//! that are not what they were, a file system that does not answer, and the CPythons of Debian
//! forky.
//!
//! Everything that is mounted is mounted in a namespace of the target's own, so it ends with the
//! target, also when a test fails.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::TempDir;
use xpu_timer_capture::{Capturer, Options, ProcessCapture};
use xpu_timer_proto::{
    procfs,
    server::{CaptureMethod, PstackFrame, PstackStacktrace},
};
use xpu_timer_tests::{
    PATIENCE, Process, artifacts, compile_c, copy_program, forky, only_child, python, run_in_forky, skip, wait_until,
};

const NOBODY: &str = "65534";

/// A program with a known stack on its main thread and on a second one.
const PROGRAM: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
static __attribute__((noinline)) int inner_most(void) { puts("ready"); fflush(stdout); return pause() + 1; }
static __attribute__((noinline)) int outer_call(void) { return inner_most() + 1; }
static void *second_thread(void *unused) { pause(); return unused; }
int main(void) {
    pthread_t thread;
    pthread_create(&thread, 0, second_thread, 0);
    return outer_call() + 1;
}
"#;

fn compile(folder: &Path, name: &str, source: &str) -> PathBuf {
    let program = compile_c(folder, name, source, &["-O1", "-g", "-pthread", "-fno-optimize-sibling-calls"]);
    // The source must not be what makes a name or a line visible.
    fs::remove_file(folder.join(format!("{name}.c"))).expect("the source was there");
    program
}

/// A folder that every user may enter.
fn open_folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("own folder");
    folder
}

fn capture(pid: i32) -> ProcessCapture {
    let options = Options { deadline: PATIENCE, ..Options::default() };
    Capturer::new().capture(&[pid], &options).pop().expect("one entry for each pid")
}

fn names(thread: &PstackStacktrace) -> Vec<&str> {
    thread.frames.iter().map(|frame| frame.func_name.as_str()).collect()
}

fn thread(captured: &ProcessCapture, tid: i32) -> &PstackStacktrace {
    let found = captured.sample.stacktrace.iter().find(|thread| thread.pid == tid as u32);
    found.unwrap_or_else(|| panic!("thread {tid} is missing in {captured:#?}"))
}

/// Captures until the main thread has come to rest in its innermost function, and checks all known
/// facts about the program.
#[track_caller]
fn check_program(pid: i32) -> ProcessCapture {
    let captured = capture_at_rest(pid, "inner_most");
    let main = thread(&captured, pid);
    let calls = ["inner_most", "outer_call", "main"];
    let ours: Vec<&str> = names(main).into_iter().filter(|name| calls.contains(name)).collect();
    assert_eq!(ours, calls, "{main:#?}");
    assert_eq!(main.incomplete, "", "{main:#?}");
    let inner = main.frames.iter().find(|frame| frame.func_name == "inner_most").expect("just seen");
    assert!(inner.file_name.ends_with("program.c:5"), "the line comes from the file that runs: {inner:?}");
    wait_until(PATIENCE, "the second thread is seen in its function", || {
        capture(pid).sample.stacktrace.iter().any(|thread| names(thread).contains(&"second_thread"))
    });
    captured
}

/// The program reports that it is ready before its last call, so the thread may not have reached
/// it.
#[track_caller]
fn capture_at_rest(pid: i32, function: &str) -> ProcessCapture {
    let mut captured = capture(pid);
    let at_rest = |captured: &ProcessCapture| {
        let main = captured.sample.stacktrace.iter().find(|thread| thread.pid == pid as u32);
        main.is_some_and(|main| main.state.starts_with('S') && names(main).contains(&function))
    };
    let start = Instant::now();
    while !at_rest(&captured) && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
        captured = capture(pid);
    }
    assert!(at_rest(&captured), "{function} is not where it sleeps: {captured:#?}");
    captured
}

/// Whether this machine lets us make namespaces; says so when not.
fn namespaces() -> bool {
    let allowed = Command::new("unshare").args(["--mount", "--pid", "--fork", "true"]).output();
    let allowed = allowed.is_ok_and(|output| output.status.success());
    if !allowed {
        skip("namespaces cannot be made here: it takes root, or CAP_SYS_ADMIN, and unshare");
    }
    allowed
}

#[test]
fn files_visible_to_the_target_only() {
    if !namespaces() {
        return;
    }
    let folder = open_folder();
    let program = compile(folder.path(), "program", PROGRAM);
    let hidden = folder.path().join("hidden");
    fs::create_dir(&hidden).expect("own folder");
    let script = "mount -t tmpfs none \"$1\" && cp \"$2\" \"$1/program\" && rm \"$2\" && exec \"$1/program\"";
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "sh", "-c", script, "sh"]).arg(&hidden).arg(&program);
    let mut target = Process::spawn(&mut unshare);
    target.wait_for("ready", PATIENCE);
    assert_eq!(fs::read_dir(&hidden).expect("own folder").count(), 0, "the program is not visible from here");
    assert!(!program.exists());
    check_program(target.pid());
}

#[test]
fn another_file_at_the_same_place() {
    if !namespaces() {
        return;
    }
    // Here the path leads to another build, with other functions at the same addresses.
    let folder = open_folder();
    let program = compile(folder.path(), "program", PROGRAM);
    let other = PROGRAM.replace("inner_most", "wrong_inner").replace("outer_call", "wrong_outer");
    let real = folder.path().join("real");
    fs::rename(&program, &real).expect("own folder");
    compile(folder.path(), "program", &other);
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "sh", "-c", "mount --bind \"$1\" \"$2\" && exec \"$2\"", "sh"]).arg(&real).arg(&program);
    let mut target = Process::spawn(&mut unshare);
    target.wait_for("ready", PATIENCE);
    // The real file is not hidden, only its place in the target is another one.
    fs::remove_file(&real).expect("own folder");
    check_program(target.pid());
}

#[test]
fn a_program_deleted_from_disk() {
    let folder = open_folder();
    let program = compile(folder.path(), "program", PROGRAM);
    let mut target = Process::spawn(&mut Command::new(&program));
    target.wait_for("ready", PATIENCE);
    fs::remove_file(&program).expect("own folder");
    check_program(target.pid());
}

#[test]
fn a_program_replaced_on_disk() {
    let folder = open_folder();
    let program = compile(folder.path(), "program", PROGRAM);
    let mut target = Process::spawn(&mut Command::new(&program));
    target.wait_for("ready", PATIENCE);
    fs::remove_file(&program).expect("own folder");
    let other = PROGRAM.replace("inner_most", "wrong_inner").replace("outer_call", "wrong_outer");
    compile(folder.path(), "program", &other);
    check_program(target.pid());
}

#[test]
fn a_library_replaced_on_disk() {
    let folder = open_folder();
    let library = |name: &str| {
        let source = format!("#include <stdio.h>\n#include <unistd.h>\nint {name}(void) {{ return pause() + 1; }}\n");
        let source = format!("{source}int enter(void) {{ puts(\"ready\"); fflush(stdout); return {name}() + 1; }}\n");
        let flags = ["-O1", "-g", "-shared", "-fPIC", "-fno-optimize-sibling-calls"];
        compile_c(folder.path(), "libreplaced.so", &source, &flags)
    };
    let path = library("real_inner");
    let link = ["-O1", "-fno-optimize-sibling-calls", path.to_str().expect("a plain path")];
    let program = compile_c(folder.path(), "program", "int enter(void); int main(void) { return enter() + 1; }", &link);
    let mut target = Process::spawn(&mut Command::new(&program));
    target.wait_for("ready", PATIENCE);
    fs::remove_file(&path).expect("own folder");
    library("wrong_inner");
    let captured = capture_at_rest(target.pid(), "real_inner");
    let main = thread(&captured, target.pid());
    let ours: Vec<&str> =
        names(main).into_iter().filter(|name| ["real_inner", "enter", "main"].contains(name)).collect();
    assert_eq!(ours, ["real_inner", "enter", "main"], "{main:#?}");
}

#[test]
fn a_rank_that_is_pid_1() {
    if !namespaces() {
        return;
    }
    let folder = open_folder();
    let script = folder.path().join("rank.py");
    let source = "import os, threading\n\
                  def wait_in_thread(): threading.Event().wait()\n\
                  threading.Thread(target=wait_in_thread, name='helper', daemon=True).start()\n\
                  def wait_in_main(): threading.Event().wait()\n\
                  print('pid', os.getpid(), threading.get_native_id(), 'ready', flush=True)\n\
                  wait_in_main()\n";
    fs::write(&script, source).expect("own folder");
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--"]).arg(python()).arg(&script);
    let mut target = Process::spawn(&mut unshare);
    target.wait_for("pid 1 1 ready", PATIENCE);
    let pid = only_child(target.pid()).expect("unshare runs python");
    let mut captured = capture(pid);
    wait_until(PATIENCE, "both threads wait", || {
        captured = capture(pid);
        let waits = |name: &str| {
            let traces = &captured.sample.py_stacktrace;
            traces
                .iter()
                .any(|trace| trace.frames.len() > 1 && trace.frames.iter().any(|frame| frame.func_name == name))
        };
        waits("wait_in_main") && waits("wait_in_thread")
    });
    assert_eq!(captured.pid, pid, "pids are those of this namespace");
    for trace in &captured.sample.py_stacktrace {
        let leads_to = |name: &str| trace.frames.iter().any(|frame| frame.func_name == name);
        // The interpreter knows the ids of its own namespace only (1 and 2), which belong to other
        // threads here.
        let native = thread(&captured, trace.os_thread_id as i32);
        assert!(names(native).iter().any(|name| name.starts_with("_PyEval_EvalFrameDefault")), "{native:#?}");
        assert_eq!(leads_to("wait_in_main"), trace.os_thread_id == pid as u32, "{trace:#?}");
    }
    assert_eq!(captured.sample.py_stacktrace.len(), 2);
}

/// Makes `xpu_timer_dump` usable for every user.
fn dump_for_all(folder: &Path) -> PathBuf {
    let copy = folder.join("xpu_timer_dump");
    copy_program(&artifacts().bin("xpu_timer_dump"), &copy);
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).expect("own file");
    copy
}

/// A command under the user nobody, without any capability.
fn as_nobody(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]);
    command.arg("--").arg(program);
    command
}

fn root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        skip("only root can become another user");
    }
    root
}

#[test]
fn the_same_user_without_any_capability() {
    if !root() {
        return;
    }
    let folder = open_folder();
    let program = compile(folder.path(), "program", PROGRAM);
    let dump = dump_for_all(folder.path());
    let mut target = Process::spawn(&mut as_nobody(&program));
    target.wait_for("ready", PATIENCE);
    // Comes to rest; seen with all privileges.
    check_program(target.pid());
    let output =
        Process::spawn(as_nobody(&dump).args(["--json", "--timeout", "60", "--pid", &target.pid().to_string()]));
    let output = output.wait(PATIENCE);
    assert_eq!(output.code(), 0, "{}", output.stderr);
    let json: Value = serde_json::from_str(&output.stdout).expect("JSON");
    let threads = json[0]["stacktrace"].as_array().expect("threads");
    assert_eq!(threads.len(), 2, "{json:#}");
    let main = threads.iter().find(|thread| thread["tid"] == target.pid()).expect("the main thread");
    let names: Vec<&str> =
        main["frames"].as_array().expect("frames").iter().filter_map(|f| f["func_name"].as_str()).collect();
    let ours: Vec<&str> =
        names.into_iter().filter(|name| ["inner_most", "outer_call", "main"].contains(name)).collect();
    assert_eq!(ours, ["inner_most", "outer_call", "main"], "{json:#}");
    assert_eq!(main["capture"], "zero_stop", "a capture without a stop needs no privilege: {json:#}");
}

/// The names of the main thread's frames, as a user without any capability gets them.
fn names_as_nobody(target: &Process, dump: &Path) -> Vec<String> {
    // Comes to rest; seen with all privileges.
    capture_at_rest(target.pid(), "pause");
    let arguments = ["--json", "--timeout", "60", "--pid", &target.pid().to_string()];
    let output = Process::spawn(as_nobody(dump).args(arguments)).wait(PATIENCE);
    assert_eq!(output.code(), 0, "{}{}", output.stdout, output.stderr);
    let json: Value = serde_json::from_str(&output.stdout).expect("JSON");
    let threads = json[0]["stacktrace"].as_array().expect("threads");
    let main = threads.iter().find(|thread| thread["tid"] == target.pid()).expect("the main thread");
    assert_eq!(main["incomplete"], "", "{json:#}");
    let frames = main["frames"].as_array().expect("frames").iter();
    frames.filter_map(|frame| frame["func_name"].as_str()).map(str::to_string).collect()
}

#[test]
fn files_that_are_gone_without_any_capability() {
    if !root() {
        return;
    }
    let folder = open_folder();
    let dump = dump_for_all(folder.path());
    // Exported functions have their names in memory too.
    let exported = PROGRAM.replace("static __attribute__((noinline)) int", "__attribute__((noinline)) int");
    let arguments = ["-O1", "-pthread", "-fno-optimize-sibling-calls", "-rdynamic", "-fomit-frame-pointer"];
    for (source, replacement, wanted) in [
        (exported.as_str(), None, ["inner_most", "outer_call", "main"]),
        // The names are those of the build that runs, not of the file that took its place.
        (&exported, Some(exported.replace("inner_most", "wrong_inner")), ["inner_most", "outer_call", "main"]),
        // Here only the file has the names; it is another one, but of the same build.
        (PROGRAM, Some(PROGRAM.to_string()), ["inner_most", "outer_call", "main"]),
    ] {
        let program = compile_c(folder.path(), "program", source, &arguments);
        let mut target = Process::spawn(&mut as_nobody(&program));
        target.wait_for("ready", PATIENCE);
        fs::remove_file(&program).expect("own folder");
        if let Some(replacement) = &replacement {
            compile_c(folder.path(), "program", replacement, &arguments);
        }
        let names = names_as_nobody(&target, &dump);
        let place = names.iter().position(|name| name == wanted[0]);
        let place = place.unwrap_or_else(|| panic!("{} is missing in {names:?}", wanted[0]));
        assert_eq!(names[place..place + 3], wanted, "{names:?}");
        assert_eq!(names.last().map(String::as_str), Some("_start"), "{names:?}");
    }
}

#[test]
fn another_user_gets_the_missing_permission_named() {
    if !root() {
        return;
    }
    let folder = open_folder();
    let program = compile(folder.path(), "program", PROGRAM);
    let dump = dump_for_all(folder.path());
    let mut target = Process::spawn(&mut Command::new(&program));
    target.wait_for("ready", PATIENCE);
    for arguments in [&["--json"][..], &[]] {
        let command = &mut as_nobody(&dump);
        let output = Process::spawn(command.args(arguments).args(["--pid", &target.pid().to_string()])).wait(PATIENCE);
        assert_eq!(output.code(), 1, "{}{}", output.stdout, output.stderr);
        let remedy = format!("this is uid {NOBODY}; run as uid 0, or with CAP_SYS_PTRACE");
        for words in ["no permission to inspect process", &remedy, "docker run --cap-add SYS_PTRACE"] {
            assert!(output.stdout.contains(words), "{words:?} is not said: {}{}", output.stdout, output.stderr);
        }
        assert!(!output.stdout.contains("inner_most"));
    }
}

#[test]
fn a_process_that_hides_from_its_own_user() {
    if !root() {
        return;
    }
    let folder = open_folder();
    let source =
        PROGRAM.replace("int main(void) {", "#include <sys/prctl.h>\nint main(void) { prctl(PR_SET_DUMPABLE, 0);");
    let program = compile(folder.path(), "program", &source);
    let dump = dump_for_all(folder.path());
    let mut target = Process::spawn(&mut as_nobody(&program));
    target.wait_for("ready", PATIENCE);
    let output = Process::spawn(as_nobody(&dump).args(["--pid", &target.pid().to_string()])).wait(PATIENCE);
    assert_eq!(output.code(), 1, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("it is not dumpable"), "{}{}", output.stdout, output.stderr);
    assert!(!output.stdout.contains("inner_most"), "{}", output.stdout);
}

/// A file system whose server answers everything but reads, in a mount namespace of its own, and
/// three threads: one that reads a file of it, one that touches a mapping of it, one that sleeps as
/// usual.
const FUSE: &str = include_str!("namespaces/fuse.c");

/// Starts that program; `None`, with a message, where this machine has no such file systems.
pub fn start_on_fuse(folder: &Path, arguments: &[&str]) -> Option<Process> {
    if !namespaces() {
        return None;
    }
    if !Path::new("/dev/fuse").exists() {
        skip("there is no /dev/fuse");
        return None;
    }
    let program = compile(folder, "program", FUSE);
    let mountpoint = folder.join("mount");
    fs::create_dir(&mountpoint).expect("own folder");
    let mut target = Process::spawn(Command::new(&program).arg(&mountpoint).args(arguments));
    target.wait_for("ready", PATIENCE);
    Some(target)
}

#[test]
fn a_file_system_that_does_not_answer() {
    let folder = open_folder();
    let Some(target) = start_on_fuse(folder.path(), &[]) else { return };
    let pid = target.pid();
    let state = |tid: &str| Some(procfs::thread_stat(pid, tid.parse().ok()?)?.state);
    let stdout = target.stdout();
    let mut tids = stdout.split_whitespace().skip_while(|word| *word != "threads").skip(1).map(str::to_string);
    let (reader, toucher) = (tids.next().expect("a reader"), tids.next().expect("a toucher"));
    wait_until(PATIENCE, "two threads hang in D state", || state(&reader) == Some('D') && state(&toucher) == Some('D'));

    let start = Instant::now();
    let captured = Capturer::new().capture(&[pid], &Options::default()).pop().expect("one entry for each pid");
    let wall = start.elapsed();
    assert!(wall < Duration::from_secs(6), "the deadline is 5 s: {wall:?}");
    assert_eq!(captured.sample.stacktrace.len(), 3, "{captured:#?}");
    for tid in [&reader, &toucher] {
        let thread = thread(&captured, tid.parse().expect("a tid"));
        assert!(thread.state.starts_with('D'), "{thread:#?}");
        assert_ne!(thread.capture(), CaptureMethod::Ptrace, "a D thread is never traced");
        assert!(!thread.wchan.is_empty() || !thread.kernel_stack.is_empty(), "where in the kernel: {thread:#?}");
        // Blocked for good, so its user stack can be read without stopping it.
        let function = if tid == &reader { "read_for_ever" } else { "touch_for_ever" };
        assert!(names(thread).contains(&function), "{thread:#?}");
    }
    assert!(names(thread(&captured, pid)).contains(&"sleep_as_usual"), "{captured:#?}");
    // Still in the middle of their calls: nothing has interrupted them.
    assert!(state(&reader) == Some('D') && state(&toucher) == Some('D'));
}

/// A process may have written names for the code that it made, to a `/tmp` that hangs. They cost
/// the names and no stack.
#[test]
fn a_perf_map_on_a_file_system_that_does_not_answer() {
    let folder = open_folder();
    let Some(target) = start_on_fuse(folder.path(), &["/tmp"]) else { return };
    let pid = target.pid();
    let mut capturer = Capturer::new();
    let mut last = None;
    wait_until(PATIENCE, "it sleeps below the code that it made", || {
        let start = Instant::now();
        let captured = capturer.capture(&[pid], &Options::default()).pop().expect("one entry for each pid");
        assert!(start.elapsed() < Duration::from_secs(6), "the deadline is 5 s: {:?}", start.elapsed());
        assert_eq!(captured.sample.errors, Vec::<String>::new(), "{captured:#?}");
        let sleeps = names(thread(&captured, pid)).contains(&"sleep_as_usual");
        last = Some(captured);
        sleeps
    });
    let captured = last.expect("captured at least once");
    let main = thread(&captured, pid);
    let made = main.frames.iter().position(|frame| frame.module == "[jit]").expect("the code that it made");
    assert_eq!((main.frames[made].func_name.as_str(), main.frames[made + 1].func_name.as_str()), ("??", "main"));
    assert_eq!(main.incomplete, "", "{main:#?}");
}

/// A rank whose threads stand at places with a comment at the end of the line.
const RANK: &str = "\
import ctypes
import threading
import time

arrived = threading.Semaphore(0)
never = threading.Event()


def wait_for_batch():
    arrived.release()
    never.wait()  # waits


def batches():
    call = lambda: wait_for_batch()  # in a lambda
    yield call()  # in a generator


def load():
    for batch in batches():  # in a loop
        return batch


def ask_for_the_lock():
    arrived.release()
    while True:
        time.sleep(0.001)


def hold_the_lock():
    print(\"ready\", flush=True)
    ctypes.PyDLL(None).sleep(1000000)  # holds


threading.Thread(target=load, name=\"loader-1\", daemon=True).start()
threading.Thread(target=ask_for_the_lock, daemon=True).start()
arrived.acquire()
arrived.acquire()
hold_the_lock()  # in the module
";

/// Frames, thread names, lines and the GIL holder of one CPython of forky.
fn forky_python(version: &str) {
    let root = match forky() {
        Ok(root) => root,
        Err(error) => return skip(&format!("{error:#}")),
    };
    let folder = tempfile::Builder::new().prefix("xpu_timer_test.").tempdir_in(root.join("tmp")).expect("own root");
    fs::write(folder.path().join("rank.py"), RANK).expect("own folder");
    let seen = Path::new("/tmp").join(folder.path().file_name().expect("a folder has a name")).join("rank.py");
    let mut target = Process::spawn(run_in_forky(&root, format!("python{version}")).arg(&seen));
    target.wait_for("ready", PATIENCE);
    let pid = only_child(target.pid()).expect("unshare runs python");
    let mut captured = capture(pid);
    wait_until(PATIENCE, "every thread has arrived", || {
        captured = capture(pid);
        let traces = &captured.sample.py_stacktrace;
        traces.iter().any(|trace| trace.owns_gil) && traces.iter().filter(|trace| trace.frames.len() > 1).count() == 3
    });
    let line = |text: &str| {
        let number = RANK.lines().position(|line| line.ends_with(text)).expect("the line is there") + 1;
        format!("{}:{number}", seen.display())
    };
    let traces = &captured.sample.py_stacktrace;
    let trace = |function: &str| {
        let found = traces.iter().find(|trace| trace.frames.iter().any(|frame| frame.func_name == function));
        found.unwrap_or_else(|| panic!("{function} is missing in {traces:#?}"))
    };
    let frames = |function: &str| -> Vec<(String, String)> {
        let own = trace(function).frames.iter().filter(|frame| frame.file_name.contains("rank.py"));
        own.map(|frame| (frame.func_name.clone(), frame.file_name.clone())).collect()
    };
    let expected = |frames: &[(&str, &str)]| -> Vec<(String, String)> {
        frames.iter().map(|(name, text)| (name.to_string(), line(text))).collect()
    };
    let deepest = [
        ("wait_for_batch", "# waits"),
        ("batches.<locals>.<lambda>", "# in a lambda"),
        ("batches", "# in a generator"),
        ("load", "# in a loop"),
    ];
    assert_eq!(frames("wait_for_batch"), expected(&deepest));
    assert_eq!(frames("hold_the_lock"), expected(&[("hold_the_lock", "# holds"), ("<module>", "# in the module")]));
    assert_eq!(trace("wait_for_batch").thread_name, "loader-1");
    let holders: Vec<&str> = traces
        .iter()
        .filter(|trace| trace.owns_gil)
        .flat_map(|trace| trace.frames.first())
        .map(|f| f.func_name.as_str())
        .collect();
    assert_eq!(holders, ["hold_the_lock"], "one thread holds the interpreter's lock");
    assert_eq!(trace("hold_the_lock").os_thread_id, pid as u32, "thread ids are those of this namespace");
    // No pseudo frames.
    assert!(traces.iter().flat_map(|trace| &trace.frames).all(|frame| !frame.file_name.ends_with(":0")), "{traces:#?}");
    for trace in traces {
        let native = thread(&captured, trace.os_thread_id as i32);
        // These interpreters are stripped: most functions have no name, but their stacks are
        // complete.
        let program = format!("python{version}");
        // `ctypes` calls through libffi, which moves the stack pointer to where only the frame
        // pointer leads back from.
        let is_libffi = |frame: &PstackFrame| frame.module.contains("libffi");
        if native.frames.last().is_some_and(is_libffi) && native.incomplete == "register rbp is not known" {
            continue;
        }
        assert_eq!(native.incomplete, "", "{native:#?}");
        assert!(native.frames.iter().any(|frame| frame.module.ends_with(&program)), "{native:#?}");
    }
}

#[test]
fn cpython_3_14() {
    forky_python("3.14");
}

#[test]
fn cpython_3_15() {
    forky_python("3.15");
}
