//! The viewer on folders that a disk can hold: its files, its summary, its warnings and its exit
//! codes.

mod cases;

use cases::check_with_reference;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use xpu_timer_proto::Message;
use xpu_timer_proto::server::{
    PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace, PySuspended, PySuspendedKind, Stacktrace,
};
use xpu_timer_tests::{Output, PATIENCE, Process, artifacts, rank6_dumps, read_archive, skip, tree, write_files};

const FILES: [&str; 4] = ["cpp_stack", "cpp_stack.svg", "py_stack", "py_stack.svg"];

fn binary() -> PathBuf {
    artifacts().bin("xpu_timer_stacktrace_viewer")
}

fn run(arguments: &[&OsStr]) -> Output {
    Process::spawn(Command::new(binary()).args(arguments)).wait(PATIENCE)
}

fn view(folder: &Path) -> Output {
    run(&["--path".as_ref(), folder.as_ref()])
}

fn view_ok(folder: &Path) -> Output {
    let output = view(folder);
    assert_eq!(output.code(), 0, "stdout: {}\nstderr: {}", output.stdout, output.stderr);
    output
}

/// Stacks root first, names joined by `;`, each name `func@file`.
fn dump(state: &str, native: &[&str], python: &[&str]) -> Stacktrace {
    fn names(stack: &str) -> impl Iterator<Item = (String, String)> + '_ {
        stack.split(';').rev().map(|name| {
            let (func, file) = name.rsplit_once('@').expect("func@file");
            (func.to_owned(), file.to_owned())
        })
    }
    let native = native.iter().map(|stack| PstackStacktrace {
        frames: names(stack)
            .map(|(func_name, file_name)| PstackFrame { func_name, file_name, ..PstackFrame::default() })
            .collect(),
        ..PstackStacktrace::default()
    });
    let python = python.iter().map(|stack| PySpyStacktrace {
        frames: names(stack)
            .map(|(func_name, file_name)| PySpyFrame { func_name, file_name, ..PySpyFrame::default() })
            .collect(),
        ..PySpyStacktrace::default()
    });
    Stacktrace {
        stacktrace: native.collect(),
        py_stacktrace: python.collect(),
        process_state: state.into(),
        ..Stacktrace::default()
    }
}

fn put(folder: &Path, name: &str, dump: &Stacktrace) {
    fs::write(folder.join(name), dump.encode_to_vec()).unwrap();
}

fn lines(path: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let set: BTreeSet<String> = lines.iter().map(|&line| line.to_owned()).collect();
    assert_eq!(set.len(), lines.len(), "duplicate lines in {}", path.display());
    set
}

fn set(lines: &[&str]) -> BTreeSet<String> {
    lines.iter().map(|&line| line.to_owned()).collect()
}

/// The labels of all frames of a picture, as an XML parser reads them.
fn drawn(path: &Path) -> Vec<String> {
    let svg = fs::read_to_string(path).unwrap();
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    let document = roxmltree::Document::parse_with_options(&svg, options).expect("well-formed XML");
    assert_eq!(document.root_element().attribute("width"), Some("1600"));
    let titles = document.descendants().filter(|node| node.has_tag_name(("http://www.w3.org/2000/svg", "title")));
    let labels = titles.filter_map(|title| title.text()?.rsplit_once(" (").map(|(label, _)| label.to_owned()));
    labels.filter(|label| label != "all").collect()
}

/// Every label of a folded text, once per place in the tree.
fn labels(lines: &BTreeSet<String>) -> Vec<String> {
    let mut places = BTreeSet::new();
    for line in lines {
        let path = line.strip_suffix(" 1").expect("every line counts once");
        places.extend(path.match_indices(';').map(|(at, _)| path[..at].to_owned()).chain([path.to_owned()]));
    }
    let mut labels: Vec<String> = places.iter().map(|path| path.rsplit(';').next().unwrap().to_owned()).collect();
    labels.sort();
    labels
}

fn assert_pictures_show_all(folder: &Path) {
    for name in ["cpp_stack", "py_stack"] {
        let mut drawn = drawn(&folder.join(format!("{name}.svg")));
        drawn.sort();
        assert_eq!(drawn, labels(&lines(&folder.join(name))), "{name}");
    }
}

fn copy_rank6(to: &Path, reversed: bool) {
    let files = rank6_dumps().unwrap();
    let written = if reversed { write_files(to, files.iter().rev()) } else { write_files(to, &files) };
    written.unwrap();
}

#[test]
fn tasks_that_wait_have_files_of_their_own() {
    let task = |name: &str, stack: &str| {
        let frames = dump("S", &[], &[stack]).py_stacktrace.remove(0).frames;
        PySuspended { kind: PySuspendedKind::Task.into(), name: name.into(), frames, awaits: "a future".into() }
    };
    let plain = dump("S", &[], &["<module>@t.py:1;select@s.py:2"]);
    let mut with_tasks = plain.clone();
    with_tasks.py_stacktrace[0].thread_name = "MainThread".into();
    with_tasks.py_stacktrace[0].suspended =
        vec![task("Task-1", "f@t.py:5;get@q.py:7"), task("Task-2", "f@t.py:5;get@q.py:7"), task("Task-3", "g@t.py:9")];
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "0-2.stacktrace", &plain);
    put(dir.path(), "1-2.stacktrace", &plain);
    view_ok(dir.path());
    let python = fs::read(dir.path().join("py_stack")).unwrap();
    let files = ["task_stack", "task_stack.svg"].map(|name| dir.path().join(name));
    assert!(files.iter().all(|file| !file.exists()));

    put(dir.path(), "1-2.stacktrace", &with_tasks);
    let summary = view_ok(dir.path()).stdout;
    assert!(summary.contains("\n  2 tasks 'Task-…' of rank 1 await a future at q.py:7 in get\n"), "{summary}");
    assert!(summary.contains("task_stack.svg\n"), "{summary}");
    assert_eq!(fs::read(dir.path().join("py_stack")).unwrap(), python);
    let root = "task@MainThread@1|0";
    let expected = [format!("{root};f@t.py:5@1|0;get@q.py:7@1|0 1"), format!("{root};g@t.py:9@1|0 1")];
    assert_eq!(lines(&files[0]), expected.into());
    let mut labels = drawn(&files[1]);
    labels.sort();
    assert_eq!(labels, ["f@t.py:5@1|0", "g@t.py:9@1|0", "get@q.py:7@1|0", root]);

    // Below the stack of their thread.
    let text = run(&["--path".as_ref(), dir.path().as_ref(), "--rank=1".as_ref()]).stdout;
    let stack = "Python stack of rank 1, leaf first\n  select (s.py:2)\n  <module> (t.py:1)\n\n\
                 2 tasks 'Task-…' of rank 1 await a future, leaf first\n  get (q.py:7)\n  f (t.py:5)\n\n\
                 task 'Task-3' of rank 1 awaits a future, leaf first\n  g (t.py:9)\n";
    assert!(text.contains(stack), "{text}");
    let json = run(&["--path".as_ref(), dir.path().as_ref(), "--json".as_ref()]).stdout;
    assert!(json.contains("\"count\": 2") && json.contains("\"kind\": \"task\""), "{json}");

    put(dir.path(), "1-2.stacktrace", &plain);
    view_ok(dir.path());
    assert!(files.iter().all(|file| !file.exists()), "no dump has tasks any more");
}

#[test]
fn a_recorded_hang_matches_the_output_of_the_original_tool() {
    let dir = tempfile::tempdir().unwrap();
    copy_rank6(dir.path(), false);
    let output = view_ok(dir.path());
    assert_eq!(output.stderr, "");
    let golden = read_archive(&tree().join("tests/fixtures/rank6.zip")).unwrap();
    for (name, bytes) in [("cpp_stack", 89_136), ("py_stack", 6_009)] {
        let golden_file = dir.path().join(format!("golden_{name}"));
        fs::write(&golden_file, &golden[name]).unwrap();
        assert_eq!(lines(&dir.path().join(name)), lines(&golden_file), "{name}");
        assert_eq!(fs::metadata(dir.path().join(name)).unwrap().len(), bytes, "{name}");
        let svg = fs::read_to_string(dir.path().join(format!("{name}.svg"))).unwrap();
        let title = format!("merge stack in {}", name.strip_suffix("_stack").unwrap());
        assert!(svg.contains(&title), "{title}");
    }
    assert_pictures_show_all(dir.path());
    assert!(output.stdout.starts_with("8 of 8 ranks have a dump."), "{}", output.stdout);
    assert!(output.stdout.contains("  rank 6\n      at barrier ("), "{}", output.stdout);
    for name in FILES {
        assert!(output.stdout.contains(&format!("{}\n", dir.path().join(name).display())), "{}", output.stdout);
    }
}

#[test]
fn the_recorded_folder_of_the_demo_gives_the_same_folded_text() {
    let dir = tempfile::tempdir().unwrap();
    let mut files = read_archive(&tree().join("tests/fixtures/demo.zip")).unwrap();
    let recorded = ["cpp_stack", "py_stack"].map(|name| (name, files.remove(name).unwrap()));
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    let output = view_ok(dir.path());
    assert_eq!(output.stderr, "");
    for (name, bytes) in recorded {
        assert_eq!(fs::read_to_string(dir.path().join(name)).unwrap(), String::from_utf8(bytes).unwrap(), "{name}");
    }
    assert_pictures_show_all(dir.path());
    assert!(output.stdout.contains("ShardReader.read_shard"), "{}", output.stdout);
}

#[test]
fn the_same_files_give_the_same_bytes_in_any_order() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    copy_rank6(first.path(), false);
    copy_rank6(second.path(), true);
    view_ok(first.path());
    view_ok(second.path());
    // The second time, the files are there already.
    view_ok(second.path());
    for name in FILES {
        let (a, b) = (fs::read(first.path().join(name)).unwrap(), fs::read(second.path().join(name)).unwrap());
        assert!(a == b, "{name} differs");
    }
    // One more for the report.
    assert_eq!(fs::read_dir(second.path()).unwrap().count(), 8 + FILES.len() + 1, "no temporary file is left");
}

#[test]
fn files_that_are_no_dumps_are_named_and_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let good = dump("R (running)", &["main@a.c:1"], &["<module>@t.py:1"]);
    let bytes = good.encode_to_vec();
    put(dir.path(), "00000-00012.stacktrace", &good);
    let write = |name: &str, bytes: &[u8]| fs::write(dir.path().join(name), bytes).unwrap();
    write("00001-00012.stacktrace", &bytes[..bytes.len() - 3]);
    write("00002-00012.stacktrace", b"");
    write("00003-00012.stacktrace", b"This is not a protobuf message, but a note that somebody left here.\n");
    write("00004-00012.stacktrace", b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    write("00005-00012.stacktrace", &[0u8; 4096]);
    let mut latin = bytes.clone();
    let at = latin.windows(4).position(|w| w == b"main").unwrap();
    latin[at] = 0xe4;
    write("00006-00012.stacktrace", &latin);
    fs::create_dir(dir.path().join("00007-00012.stacktrace")).unwrap();
    std::os::unix::fs::symlink("/nowhere/at/all", dir.path().join("00008-00012.stacktrace")).unwrap();
    nix::unistd::mkfifo(&dir.path().join("00009-00012.stacktrace"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for name in ["rank3.stacktrace", "00010_00012.stacktrace", "99999999999-00012.stacktrace"] {
        put(dir.path(), name, &good);
    }
    put(dir.path(), "00011-00012.stacktrace.tmp", &good);
    write("notes.txt", b"not mine");
    let output = view_ok(dir.path());
    // Invalid UTF-8 in a name is replaced, and the rank is kept.
    for rank in (1..10).filter(|rank| *rank != 6) {
        assert!(
            output.stderr.contains(&format!("{rank:05}-00012.stacktrace is left out: ")),
            "{rank}: {}",
            output.stderr
        );
    }
    for name in ["rank3.stacktrace", "00010_00012.stacktrace", "99999999999-00012.stacktrace"] {
        assert!(output.stderr.contains(&format!("{name} is left out: its name")), "{name}: {}", output.stderr);
    }
    assert_eq!(output.stderr.lines().count(), 11, "{}", output.stderr);
    let stacks = ["State@R (running)@0/6|1-5/7-11 1", "main@a.c:1@0|1-11 1", "\u{fffd}ain@a.c:1@6|0-5/7-11 1"];
    assert_eq!(lines(&dir.path().join("cpp_stack")), set(&stacks));
    let stacks = ["State@R (running)@0/6|1-5/7-11 1", "<module>@t.py:1@0/6|1-5/7-11 1"];
    assert_eq!(lines(&dir.path().join("py_stack")), set(&stacks));
    assert!(output.stdout.contains("Without a dump: ranks 1-5, 7-11 (10)"), "{}", output.stdout);
}

#[test]
fn exit_codes() {
    let dir = tempfile::tempdir().unwrap();
    let empty = view(dir.path());
    assert_eq!(empty.code(), 1);
    assert!(empty.stderr.contains("no .stacktrace file") && empty.stdout.is_empty(), "{}", empty.stderr);
    let absent = view(&dir.path().join("absent"));
    assert_eq!(absent.code(), 1);
    assert!(absent.stderr.contains("absent"), "{}", absent.stderr);
    fs::write(dir.path().join("00000-00001.stacktrace"), "junk").unwrap();
    let broken = view(dir.path());
    assert_eq!(broken.code(), 1);
    assert!(broken.stderr.contains("00000-00001.stacktrace is left out"), "{}", broken.stderr);
    assert!(!dir.path().join("cpp_stack").exists());
    assert_eq!(view(&dir.path().join("00000-00001.stacktrace")).code(), 1, "a file is not a folder");
    assert_eq!(run(&["--no-such-option".as_ref()]).code(), 2);
    let help = run(&["--help".as_ref()]);
    assert_eq!(help.code(), 0);
    assert!(help.stdout.contains("Exit codes:") && help.stdout.contains("--output"), "{}", help.stdout);
    put(dir.path(), "00000-00001.stacktrace", &dump("R", &[], &[]));
    let unwritable = run(&["-p".as_ref(), dir.path().as_ref(), "--output".as_ref(), "/proc/self/fd".as_ref()]);
    assert_eq!(unwritable.code(), 1);
    assert!(unwritable.stderr.contains("cannot write /proc/self/fd/cpp_stack"), "{}", unwritable.stderr);
}

#[test]
fn the_default_folder_is_the_current_one() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "00000-00001.stacktrace", &dump("R", &["f@x"], &[]));
    let output = Process::spawn(Command::new(binary()).current_dir(dir.path())).wait(PATIENCE);
    assert_eq!(output.code(), 0, "{}", output.stderr);
    assert_eq!(lines(&dir.path().join("cpp_stack")), set(&["State@R@0| 1", "f@x@0| 1"]));
    assert_eq!(lines(&dir.path().join("py_stack")), set(&["State@R@0| 1"]));
}

#[test]
fn names_never_break_a_line_and_lto_priv_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let native = PstackStacktrace {
        // Leaf first.
        frames: [("leaf", "l"), ("a.lto_priv.0", "m"), ("x;\ny\t\u{1b}[1m", "p\0q"), ("", "")]
            .map(|(func, file)| PstackFrame { func_name: func.into(), file_name: file.into(), ..Default::default() })
            .into(),
        ..Default::default()
    };
    let only_lto = PstackStacktrace {
        frames: vec![PstackFrame { func_name: "f".into(), file_name: "lto_priv".into(), ..Default::default() }],
        ..Default::default()
    };
    let empty = PstackStacktrace::default();
    let stacktrace = vec![native, only_lto, empty];
    put(dir.path(), "0-1.stacktrace", &Stacktrace { stacktrace, process_state: "T;\r\n".into(), ..Default::default() });
    view_ok(dir.path());
    assert_eq!(
        lines(&dir.path().join("cpp_stack")),
        set(&["State@T,  @0| 1", "@@0|;x, y \u{fffd}[1m@p\u{fffd}q@0| 1"])
    );
    assert_pictures_show_all(dir.path());
}

#[test]
fn characters_that_xml_or_the_drawing_library_cannot_take() {
    let dir = tempfile::tempdir().unwrap();
    let stacks = ["# x@f", " x@f", "x@f ", "<&>\"'@]]>", "größe@模型.py:1", "a 1@f 2", "\u{3000}@\u{a0}", "--@", "@--"];
    put(dir.path(), "0-1.stacktrace", &dump("R", &stacks, &["\u{fffe}@\u{ffff}", "\u{7f}\u{80}@\u{9f}"]));
    view_ok(dir.path());
    let cpp: BTreeSet<String> = drawn(&dir.path().join("cpp_stack.svg")).into_iter().collect();
    for stack in stacks {
        // A character without width keeps the beginning of a line from being trimmed or skipped.
        let label = format!("{stack}@0|");
        assert!(cpp.iter().any(|drawn| drawn.trim_start_matches('\u{200b}') == label), "{label:?} in {cpp:?}");
    }
    assert_eq!(cpp.len(), stacks.len() + 1);
    assert_eq!(drawn(&dir.path().join("py_stack.svg")).len(), 3);
    assert!(lines(&dir.path().join("py_stack")).contains("\u{fffd}@\u{fffd}@0| 1"));
}

#[test]
fn deep_stacks_and_many_stacks_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let deep = (0..3_000).map(|i| format!("f{i}@deep.py:{i}")).collect::<Vec<_>>().join(";");
    for rank in 0..4 {
        let many: Vec<String> = (0..5_000).map(|i| format!("main@a.c:1;f{rank}_{i}@b.c:{i}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        put(dir.path(), &format!("{rank}-4.stacktrace"), &dump("R", &many, &[&deep]));
    }
    view_ok(dir.path());
    assert_eq!(lines(&dir.path().join("cpp_stack")).len(), 20_001);
    assert_eq!(lines(&dir.path().join("py_stack")).len(), 2);
    assert_eq!(drawn(&dir.path().join("cpp_stack.svg")).len(), 20_002);
    assert_eq!(drawn(&dir.path().join("py_stack.svg")).len(), 3_001);
}

#[test]
fn worlds_of_any_size_and_mixed_ones() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "000007-200000.stacktrace", &dump("R", &["f@x"], &[]));
    put(dir.path(), "123456-200000.stacktrace", &dump("R", &["f@x"], &[]));
    assert_eq!(view_ok(dir.path()).stderr, "");
    let label = "7/123456|0-6/8-123455/123457-199999";
    let expected = [format!("State@R@{label} 1"), format!("f@x@{label} 1")];
    assert_eq!(lines(&dir.path().join("cpp_stack")), expected.into());

    let dir = tempfile::tempdir().unwrap();
    for name in ["00000-00002.stacktrace", "00001-00004.stacktrace", "00009-00004.stacktrace"] {
        put(dir.path(), name, &dump("R", &["f@x"], &[]));
    }
    let output = view_ok(dir.path());
    for name in ["00000-00002.stacktrace", "00009-00004.stacktrace"] {
        assert!(output.stderr.contains(name), "{name}: {}", output.stderr);
    }
    assert_eq!(lines(&dir.path().join("cpp_stack")), set(&["State@R@0-1/9|2-3 1", "f@x@0-1/9|2-3 1"]));
}

#[test]
fn capture_errors_are_shown_once_with_their_ranks() {
    let dir = tempfile::tempdir().unwrap();
    for rank in 0..4 {
        let mut dump = dump("R", &[], &[]);
        dump.pstack_stderr = if rank == 2 { "ptrace: \u{1b}[31mno\nsecond line\n".into() } else { String::new() };
        dump.pyspy_stderr = if rank < 3 { "no interpreter".into() } else { " \n".into() };
        put(dir.path(), &format!("{rank}-4.stacktrace"), &dump);
    }
    let output = view_ok(dir.path());
    assert_eq!(
        output.stderr,
        "pstack_stderr of rank 2:\n  ptrace: \u{fffd}[31mno\n  second line\npyspy_stderr of ranks 0-2 (3):\n  no interpreter\n"
    );
    assert!(!output.stdout.contains("no interpreter"));
}

#[test]
fn odd_folder_names() {
    let dir = tempfile::tempdir().unwrap();
    let names: [&[u8]; 5] = [b"with space", "模型".as_bytes(), b"-p", b"a;b\nc", b"latin\xe4"];
    for name in names {
        let folder = dir.path().join(OsStr::from_bytes(name));
        fs::create_dir(&folder).unwrap();
        put(&folder, "00000-00001.stacktrace", &dump("R", &["f@x"], &[]));
        let output = view_ok(&folder);
        assert_eq!(lines(&folder.join("cpp_stack")).len(), 2);
        assert!(!output.stdout.contains("\nc"), "a path stays on its line: {:?}", output.stdout);
    }
}

#[test]
fn a_read_only_folder_is_viewed_with_output() {
    let (dir, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    put(dir.path(), "00000-00001.stacktrace", &dump("R", &["f@x"], &[]));
    let script = "mount --bind \"$1\" \"$1\" && mount -o remount,ro,bind \"$1\" || exit 77; shift; exec \"$@\"";
    let viewer = |more: &[&OsStr]| {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", script, "sh"]).arg(dir.path()).arg(binary()).arg("-p").arg(dir.path());
        Process::spawn(command.args(more)).wait(PATIENCE)
    };
    let into = out.path().join("made/on/demand");
    let output = viewer(&["--output".as_ref(), into.as_ref()]);
    if output.code() == 77 || output.stderr.contains("unshare") {
        return skip("no permission for a mount namespace");
    }
    assert_eq!(output.code(), 0, "{}", output.stderr);
    assert_eq!(lines(&into.join("cpp_stack")), set(&["State@R@0| 1", "f@x@0| 1"]));
    let refused = viewer(&[]);
    assert_eq!(refused.code(), 1);
    assert!(refused.stderr.contains("--output") && refused.stderr.contains("Read-only"), "{}", refused.stderr);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn the_folder_of_incidents_means_the_latest_one() {
    let dir = tempfile::tempdir().unwrap();
    for (name, func) in [("incident-20261121T100000Z-1", "old"), ("incident-20261121T110000Z-2", "new")] {
        let incident = dir.path().join(name);
        fs::create_dir(&incident).unwrap();
        put(&incident, "00000-00001.stacktrace", &dump("D (disk sleep)", &[], &[&format!("{func}@t.py:1")]));
        fs::write(incident.join("verdict.json"), format!("{{\"sentence\": \"Rank 0 stands in {func}.\"}}")).unwrap();
    }
    let output = view_ok(dir.path());
    let latest = dir.path().join("incident-20261121T110000Z-2");
    let expected = format!(
        "Rank 0 stands in new.\n\nLatest incident: {0}\n\n1 of 1 rank has a dump. Its main thread is at:\n  rank 0\n      at new (t.py:1)\n\
         \nState D (disk sleep): rank 0\n\n{0}/cpp_stack\n{0}/cpp_stack.svg\n{0}/py_stack\n{0}/py_stack.svg\n{0}/report.html\n",
        latest.display()
    );
    assert_eq!(output.stdout, expected);
    assert!(!dir.path().join("cpp_stack").exists());
}

#[test]
fn options_choose_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "00000-00001.stacktrace", &dump("R", &["f@x"], &["g@t.py:1"]));
    for (options, expected) in [
        (&["--text"][..], &[][..]),
        (&["--folded"], &["cpp_stack", "py_stack"]),
        (&["--svg"], &["cpp_stack.svg", "py_stack.svg"]),
        (&["--folded", "--svg"], &FILES),
        (&["--html"], &["report.html"]),
        (&["--text", "--html"], &["report.html"]),
    ] {
        let out = tempfile::tempdir().unwrap();
        let mut arguments: Vec<&OsStr> =
            vec!["-p".as_ref(), dir.path().as_ref(), "--output".as_ref(), out.path().as_ref()];
        arguments.extend(options.iter().map(OsStr::new));
        let output = run(&arguments);
        assert_eq!(output.code(), 0, "{options:?}: {}", output.stderr);
        let written = fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        assert_eq!(written.collect::<BTreeSet<_>>(), set(expected), "{options:?}");
        assert!(output.stdout.contains("at g (t.py:1)"), "the summary is always there: {}", output.stdout);
    }
}

#[test]
fn a_closed_pipe_is_success_and_a_full_disk_is_not() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "00000-00001.stacktrace", &dump("R", &["f@x"], &[]));
    let status = |stdout: Stdio| {
        let mut command = Command::new(binary());
        let mut child = command.arg("-p").arg(dir.path()).stdout(stdout).stderr(Stdio::null()).spawn().unwrap();
        let mut status = None;
        xpu_timer_tests::wait_until(PATIENCE, "the viewer ends", || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap().code()
    };
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    assert_eq!(status(writer.into()), Some(0));
    assert!(dir.path().join("cpp_stack").exists());
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    assert_eq!(status(full.into()), Some(1));
}

/// The name of a function, a file or a state: mostly one of few, and some that a line of a folded
/// file cannot contain.
fn name() -> impl Strategy<Value = String> {
    prop_oneof![6 => "[ab]", 1 => Just("x.lto_priv.1".to_owned()), 1 => "[a;@ |/#\\n\u{e4}\u{85}]{0,3}", 1 => any::<String>()]
}

fn any_dump() -> impl Strategy<Value = Stacktrace> {
    let frames = || prop::collection::vec((name(), name()), 0..5);
    let threads = || prop::collection::vec(frames(), 0..4);
    (threads(), threads(), prop_oneof!["[RSD]", name()]).prop_map(|(native, python, process_state)| {
        let native = native.into_iter().map(|frames| PstackStacktrace {
            frames: frames
                .into_iter()
                .map(|(func_name, file_name)| PstackFrame { func_name, file_name, ..Default::default() })
                .collect(),
            ..Default::default()
        });
        let python = python.into_iter().map(|frames| PySpyStacktrace {
            frames: frames
                .into_iter()
                .map(|(func_name, file_name)| PySpyFrame { func_name, file_name, ..Default::default() })
                .collect(),
            ..Default::default()
        });
        Stacktrace {
            stacktrace: native.collect(),
            py_stacktrace: python.collect(),
            pid: 1,
            process_state,
            ..Default::default()
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_job_matches_the_reference_implementation(
        dumps in prop::collection::btree_map(0u32..12, any_dump(), 1..8),
        absent in 0u32..3,
    ) {
        let world = dumps.keys().last().unwrap() + 1 + absent;
        let dir = tempfile::tempdir().unwrap();
        for (rank, dump) in &dumps {
            put(dir.path(), &format!("{rank:05}-{world:05}.stacktrace"), dump);
        }
        view_ok(dir.path());
        prop_assert_eq!(check_with_reference(dir.path(), dir.path()), Vec::<String>::new());
    }
}

fn rank6() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    copy_rank6(folder.path(), false);
    folder
}

/// Runs the viewer on a folder with more arguments; it must succeed.
fn view_with(folder: &Path, arguments: &[&str]) -> Output {
    let mut all: Vec<&OsStr> = vec!["--path".as_ref(), folder.as_ref()];
    all.extend(arguments.iter().map(OsStr::new));
    let output = run(&all);
    assert_eq!(output.code(), 0, "stdout: {}\nstderr: {}", output.stdout, output.stderr);
    output
}

#[test]
fn filters_show_stacks_and_replace_no_file() {
    let folder = rank6();
    let files = || fs::read_dir(folder.path()).unwrap().count();
    let before = files();
    let output = view_with(folder.path(), &["--rank", "6", "--grep", "barrier"]);
    assert!(output.stdout.starts_with("1 of the 1 requested rank has a dump."), "{}", output.stdout);
    let frame = output.stdout.lines().find(|line| line.starts_with("  barrier ("));
    assert!(frame.is_some_and(|line| line.contains(".py:")), "{}", output.stdout);
    assert!(!output.stdout.contains('\u{1b}'), "a pipe gets plain text");
    assert_eq!(files(), before, "a part of the folder does not replace the whole");

    let output = view_with(folder.path(), &["--grep", "barrier", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&output.stdout).expect("JSON");
    assert_eq!((&json["world"], &json["ranks"]), (&8.into(), &"0-7".into()));
    let stacks = json["stacks"].as_array().unwrap();
    assert!(!stacks.is_empty() && stacks.iter().all(|stack| stack["leaf_first"].to_string().contains("barrier")));

    let none = run(&["--path".as_ref(), folder.path().as_ref(), "--rank".as_ref(), "8-9".as_ref()]);
    assert_eq!(none.code(), 1);
    assert!(none.stderr.contains("no dump of ranks 8-9 (2)"), "{}", none.stderr);
    let usage = run(&["--rank".as_ref(), "3-1".as_ref()]);
    assert_eq!(usage.code(), 2, "{}", usage.stderr);
}

#[test]
fn filtered_files_are_written_to_the_output_folder() {
    let (folder, output) = (rank6(), tempfile::tempdir().unwrap());
    view_with(folder.path(), &["--rank", "6", "--folded", "--output", output.path().to_str().unwrap()]);
    let python = fs::read_to_string(output.path().join("py_stack")).unwrap();
    assert!(python.lines().all(|line| line.ends_with("@6|0-5/7 1")), "{python}");
    assert_eq!(fs::read_dir(output.path()).unwrap().count(), 2);
}

#[test]
fn all_incidents_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["incident-20261121T101800Z-4", "incident-20261121T101500Z-3"] {
        fs::create_dir(folder.path().join(name)).unwrap();
    }
    fs::write(folder.path().join("incident-20261121T101500Z-3/verdict.txt"), "Rank 2 stands.\n").unwrap();
    let output = view_with(folder.path(), &["--list"]);
    let lines: Vec<_> = output.stdout.lines().collect();
    assert_eq!(lines[..2], ["2026-11-21T10:15:00Z  incident-20261121T101500Z-3", "    Rank 2 stands."]);
    assert!(lines[2].ends_with("incident-20261121T101800Z-4"), "{lines:?}");
    let empty = tempfile::tempdir().unwrap();
    assert_eq!(run(&["--list".as_ref(), "--path".as_ref(), empty.path().as_ref()]).code(), 1);
}
