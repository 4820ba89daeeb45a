//! Names that others choose go through every program: none of them acts on a terminal, a log or a
//! page, and only invalid UTF-8 is replaced.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use xpu_timer_proto::{
    Message as _, lenient, printable,
    server::{PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace, PySuspended, Stacktrace},
    v1::{Evidence, StackTree, StackTrees, TreeNode},
};
use xpu_timer_tests::{Job, PATIENCE, Process, artifacts, http, wait_until};

use crate::collector::fake::{FakeHook, collector, metrics};

/// Clears the screen, changes colours, forges a log line, reverses the following text, and hides a
/// tag.
const HOSTILE: &str = "evil\u{1b}[2J\u{9b}31m\u{1b}]0;title\u{7}\r\n2026-01-01T00:00:00Z ERROR forged\u{202e}\u{2066}\u{200b}\u{feff}\u{e0041}\u{7f}end";

/// Nothing in it acts, and no line of it was begun by a name.
fn assert_harmless(what: &str, text: impl AsRef<[u8]>) {
    let text = std::str::from_utf8(text.as_ref()).unwrap_or_else(|error| panic!("{what}: {error}"));
    let bad = text.char_indices().find(|(_, letter)| *letter != '\n' && printable::is_unsafe(*letter));
    if let Some((at, letter)) = bad {
        let around: String = text[..at].chars().rev().take(80).collect::<Vec<_>>().into_iter().rev().collect();
        panic!("{what}: {letter:?} behind {around:?}");
    }
    let forged = text.lines().find(|line| line.starts_with("2026-01-01T00:00:00Z ERROR"));
    assert_eq!(forged, None, "{what}");
}

fn tool(job: &Job, name: &str, arguments: &[&str]) -> String {
    let output = Process::spawn(job.command(artifacts().bin(name)).args(arguments)).wait(PATIENCE);
    assert_harmless(&format!("{name} {arguments:?} on stderr"), &output.stderr);
    assert_harmless(&format!("{name} {arguments:?}"), &output.stdout);
    output.stdout
}

/// All files of a folder that people read.
fn assert_files_are_harmless(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).expect("the folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let ends = [".stacktrace", ".ops", ".samples", ".bin"];
        let for_programs = ends.iter().any(|end| name.ends_with(end)) || name.starts_with('.');
        if path.is_file() && !for_programs {
            assert_harmless(&path.display().to_string(), fs::read(&path).expect("the file"));
            names.push(name);
        }
    }
    names.sort();
    names
}

fn hostile_dump(name: &str) -> Stacktrace {
    let text = || name.to_owned();
    let native = PstackStacktrace {
        pid: 7,
        thread_name: text(),
        frames: vec![PstackFrame { func_name: text(), file_name: text(), module: text(), ..Default::default() }],
        state: text(),
        wchan: text(),
        kernel_stack: vec![text()],
        incomplete: text(),
        ..Default::default()
    };
    let python = PySpyStacktrace {
        thread_name: text(),
        os_thread_id: 7,
        frames: vec![PySpyFrame { func_name: text(), file_name: text(), module: text() }],
        suspended: vec![PySuspended {
            name: text(),
            awaits: text(),
            frames: vec![PySpyFrame { func_name: text(), file_name: text(), module: text() }],
            ..Default::default()
        }],
        ..Default::default()
    };
    Stacktrace {
        stacktrace: vec![native],
        py_stacktrace: vec![python],
        pid: 7,
        process_state: text(),
        pstack_stderr: text(),
        pyspy_stderr: text(),
        node: text(),
        command: text(),
        ..Default::default()
    }
}

#[test]
fn the_collector_and_what_it_writes() {
    let job = Job::new();
    let served = collector(&job, &[]);
    let mut hooks: Vec<FakeHook> = (0..2).map(|rank| FakeHook::start(&job, HOSTILE, rank, 2)).collect();
    for hook in &mut hooks {
        let info = hook.hello.rank.as_mut().expect("a rank");
        info.command = HOSTILE.into();
        hook.join(&job);
    }
    wait_until(PATIENCE, "both are ranks", || {
        job.status().is_ok_and(|status| status["ranks"].as_array().is_some_and(|ranks| ranks.len() == 2))
    });
    let (code, answer) = http("POST", job.port, "/dump").expect("an answer");
    assert_eq!(code, 200, "{answer}");
    assert_harmless("/dump", &answer);
    let incident = job.wait_incident(1, PATIENCE);
    let names = assert_files_are_harmless(&incident.path);
    for name in ["cpp_stack", "cpp_stack.svg", "report.html", "verdict.json", "verdict.txt"] {
        assert!(names.iter().any(|other| other == name), "{name}: {names:?}");
    }
    for path in ["/status", "/incidents", "/slow_ranks"] {
        let (_, text) = http("GET", job.port, path).expect("an answer");
        assert_harmless(path, &text);
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert!(path == "/slow_ranks" || json.to_string().contains("forged"), "{path} has the name: {json}");
    }
    let page = metrics(&job);
    assert_harmless("/metrics", &page);
    assert!(page.contains("forged"), "{page}");
    let id = incident.verdict["incident"].as_str().expect("a name");
    let copies = job.dir.join("copies").display().to_string();
    for arguments in [
        &["incidents"][..],
        &["incidents", "--json"],
        &["incidents", "slow"],
        &["incidents", "show", id],
        &["incidents", "show", id, "--json"],
        &["incidents", "fetch", id, &copies],
        &["incidents", "show", "no\u{1b}[2Jname"],
    ] {
        tool(&job, "xpu_timer_collector", arguments);
    }
    assert!(tool(&job, "xpu_timer_collector", &["incidents"]).contains("forged"));
    let log = served.stderr();
    assert_harmless("the collector's log", &log);
    assert!(log.contains("forged"), "{log}");
    for file in fs::read_dir(job.dir.join("log")).expect("the folder of the logs") {
        let path = file.expect("an entry").path();
        assert_harmless(&path.display().to_string(), fs::read(&path).expect("a log"));
    }
}

#[test]
fn the_viewer_on_a_folder_of_others() {
    let job = Job::new();
    let timeline = job.dir.join("timeline");
    let folder = timeline.join(format!("incident-20260101T000000Z-1-{}", HOSTILE.replace('/', "_")));
    fs::create_dir(&folder).expect("own folder");
    for rank in 0..2 {
        fs::write(folder.join(format!("{rank:05}-00003.stacktrace")), hostile_dump(HOSTILE).encode_to_vec()).unwrap();
    }
    fs::write(folder.join(format!("{HOSTILE}.stacktrace")), b"no dump").unwrap();
    let mut verdict = xpu_timer_analysis::judge(&Evidence::default());
    verdict.sentence = HOSTILE.into();
    verdict.job = HOSTILE.into();
    verdict.culprits = vec![1];
    verdict.timing.errors = vec![HOSTILE.into()];
    fs::write(folder.join("verdict.json"), serde_json::to_vec(&verdict).unwrap()).unwrap();
    let node =
        TreeNode { name: 0, ranks: vec![xpu_timer_proto::v1::RankRun { first: 0, last: 2 }], ..Default::default() };
    let tree = StackTree { names: vec![HOSTILE.into()], nodes: vec![node] };
    let trees = StackTrees { world_size: 3, native: Some(tree.clone()), python: Some(tree) };
    let (plain, output) = (folder.display().to_string(), job.dir.join("out"));
    let output = output.display().to_string();
    for whole in [false, true] {
        if whole {
            fs::write(folder.join("stacks.bin"), trees.encode_to_vec()).unwrap();
        }
        let arguments: [&[&str]; 6] = [
            &["--path", &plain, "--output", &output],
            &["--path", &plain, "--text"],
            &["--path", &plain, "--json", "--text"],
            &["--path", &plain, "--text", "--rank", "0"],
            &["--list", "--path", timeline.to_str().unwrap()],
            &["--list", "--json", "--path", timeline.to_str().unwrap()],
        ];
        for arguments in arguments {
            let shown = tool(&job, "xpu_timer_stacktrace_viewer", arguments);
            assert!(shown.contains("forged"), "{arguments:?}: {shown}");
        }
        let names = assert_files_are_harmless(Path::new(&output));
        let expected = ["cpp_stack", "cpp_stack.svg", "py_stack", "py_stack.svg", "report.html"];
        assert_eq!(names, [&expected[..], &["task_stack", "task_stack.svg"]].concat());
    }
}

#[test]
fn settings_programs_and_processes() {
    let job = Job::new();
    let hostile = HOSTILE.replace('/', "_");
    let file = job.dir.join(&hostile);
    symlink("/bin/sleep", &file).expect("own folder");
    let path = file.display().to_string();
    let (path, option) = (path.as_str(), format!("--{HOSTILE}"));
    let option = option.as_str();
    let timeline = job.dir.join("timeline").join(&hostile).display().to_string();
    let job = job.with("XPU_TIMER_BRACKET", HOSTILE).with("XPU_TIMER_TIMELINE_PATH", &timeline);
    let job = job.with("XPU_TIMER_HOOK_PATH", path);
    for arguments in [&[][..], &["--json"], &[path, "9"], &["--library", path], &[option]] {
        tool(&job, "xpu_timer_print_env", arguments);
    }
    for command in [HOSTILE, option] {
        let output = Process::spawn(job.command(artifacts().bin("xpu_timer_launch")).arg(command)).wait(PATIENCE);
        assert_harmless("xpu_timer_launch", &output.stderr);
        assert!(output.stderr.contains("forged"), "{}", output.stderr);
    }
    let sleeper = Process::spawn(Command::new(&file).arg("600"));
    wait_until(PATIENCE, "it is that program", || {
        fs::read(format!("/proc/{}/cmdline", sleeper.pid()))
            .is_ok_and(|command| command.windows(6).any(|word| word == b"forged"))
    });
    let pid = sleeper.pid().to_string();
    let pid = pid.as_str();
    tool(&job, "xpu_timer_print_env", &["--pid", pid]);
    let output = format!("dumps of {HOSTILE}");
    for arguments in [&["--pid", pid][..], &["--pid", pid, "--json"], &["--pid", pid, "--output", &output]] {
        let mut command = job.command(artifacts().bin("xpu_timer_dump"));
        let output = Process::spawn(command.current_dir(&job.dir).args(arguments)).wait(PATIENCE);
        assert_harmless("xpu_timer_dump", &output.stdout);
        assert_harmless("xpu_timer_dump on stderr", &output.stderr);
        assert!(output.stdout.contains("forged"), "{arguments:?}: {}", output.stdout);
    }
}

/// Where a text begins that is found again in the bytes of a message.
fn places(bytes: &[u8], mark: &str) -> Vec<usize> {
    (0..bytes.len()).filter(|at| bytes[*at..].starts_with(mark.as_bytes())).collect()
}

#[test]
fn an_invalid_utf8_name_does_not_cost_the_rank() {
    let job = Job::new();
    let mark = "name-XX-name";
    let bytes = hostile_dump(mark).encode_to_vec();
    let folder: PathBuf = job.dir.join("dumps");
    fs::create_dir(&folder).expect("own folder");
    let places = places(&bytes, mark);
    assert!(places.len() >= 17, "{}", places.len());
    for (rank, at) in places.iter().enumerate() {
        let mut bytes = bytes.clone();
        bytes[at + 5..at + 7].copy_from_slice(b"\xff\xe6");
        assert!(lenient::decode::<Stacktrace>(&bytes).is_ok());
        fs::write(folder.join(format!("{rank:05}-{:05}.stacktrace", places.len())), bytes).unwrap();
    }
    // One of the original tool, with a function whose name is Latin-1.
    let mut originals = xpu_timer_tests::rank6_dumps().expect("dumps of the original tool");
    let mut original = originals.remove("00000-00008.stacktrace").expect("rank 0");
    let at = original.windows(8).position(|window| window == b"<module>").expect("a Python stack");
    original[at + 1] = 0xe4;
    fs::write(folder.join("00099-00100.stacktrace"), original).unwrap();
    let path = folder.display().to_string();
    let shown = tool(&job, "xpu_timer_stacktrace_viewer", &["--path", &path]);
    assert!(shown.contains(&format!("{} of 100 ranks have a dump", places.len() + 1)), "{shown}");
    let folded = fs::read_to_string(folder.join("py_stack")).expect("py_stack");
    assert!(folded.contains("name-\u{fffd}\u{fffd}-name@name-XX-name"), "{folded}");
    assert!(folded.contains("<\u{fffd}odule>"), "{folded}");
}
