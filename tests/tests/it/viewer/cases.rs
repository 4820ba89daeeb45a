//! Folders of every kind that a disk can contain, against `reference.py`: an independent way to the
//! same files, without our code.

use super::{FILES, Output, binary, copy_rank6, dump, put, run, view_ok};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;
use xpu_timer_proto::Message;
use xpu_timer_tests::{PATIENCE, Process, python, rank6_dumps, tree};

/// Checks with `reference.py` that the files in `written` are the result of the dumps in `folder`.
/// Returns the names of the files that contain no dump.
pub fn check_with_reference(folder: &Path, written: &Path) -> Vec<String> {
    let output = run_reference(folder, written);
    assert_eq!(output.code(), 0, "{}\n{}", output.stdout, output.stderr);
    output.stdout.lines().filter_map(|line| line.strip_prefix("left out: ")).map(str::to_owned).collect()
}

fn run_reference(folder: &Path, written: &Path) -> Output {
    let script = tree().join("tests/tests/it/viewer/reference.py");
    Process::spawn(Command::new(python()).arg(script).arg(folder).arg(written)).wait(PATIENCE)
}

#[test]
fn the_reference_sees_every_kind_of_difference() {
    let dir = tempfile::tempdir().unwrap();
    copy_rank6(dir.path(), false);
    view_ok(dir.path());
    assert_eq!(check_with_reference(dir.path(), dir.path()), Vec::<String>::new());
    let svg = fs::read_to_string(dir.path().join("py_stack.svg")).unwrap();
    let fill = svg.split("barrier@").nth(1).and_then(|rest| rest.split("fill=\"").nth(1)).unwrap();
    let fill = fill.split('"').next().unwrap().to_owned();
    for (file, from, to) in [
        ("cpp_stack", "@6|0-5/7", "@6|0-5"),
        ("py_stack", "0-7|", "0-6/7|"),
        ("py_stack", " 1\n", " 2\n"),
        ("py_stack", "State@S (sleeping)@3|0-2/4-7 1\n", ""),
        ("py_stack.svg", "merge stack in py", "merge stack in cpp"),
        ("py_stack.svg", "barrier@", "carrier@"),
        ("py_stack.svg", fill.as_str(), "rgb(215,215,215)"),
        ("py_stack.svg", "width=\"7.6923%\"", "width=\"7.5%\""),
    ] {
        let path = dir.path().join(file);
        let right = fs::read_to_string(&path).unwrap();
        let wrong = right.replacen(from, to, 1);
        assert_ne!(right, wrong, "{file} holds no {from:?}");
        fs::write(&path, wrong).unwrap();
        assert_eq!(run_reference(dir.path(), dir.path()).code(), 1, "{file}: {from:?} as {to:?}");
        fs::write(&path, right).unwrap();
    }
}

#[test]
fn broken_files_are_skipped_according_to_the_wire_format() {
    let (dir, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let whole = rank6_dumps().unwrap().remove("00006-00008.stacktrace").unwrap();
    let mut files: Vec<Vec<u8>> = Vec::new();
    // Cuts and changed bytes all over a real dump; some of them leave a shorter or another dump,
    // which is one still.
    files.extend((0..60).map(|i| whole[..whole.len() * i / 60].to_vec()));
    files.extend((0..120).map(|i| {
        let mut bytes = whole.clone();
        let at = bytes.len() * i / 120;
        bytes[at] = (i * 37 + 11) as u8;
        bytes
    }));
    let state = |bytes: &[u8]| [&[0x5a, bytes.len() as u8], bytes].concat();
    files.extend([
        state(b"S (sleeping)"),
        state(b"caf\xe9"),
        state(&[0xed, 0xa0, 0x80]),
        state("\u{10ffff};\n".as_bytes()),
        // A field of another type, a group, one that does not end, a number that is too long, a
        // length beyond the end.
        vec![0x58, 1],
        [&[0xa3, 1, 8, 1, 0xa4, 1][..], &state(b"R")].concat(),
        vec![0xa3, 1, 8, 1],
        [&[0x18][..], &[0xff; 10]].concat(),
        vec![0x5a, 0xff, 0xff, 0xff, 0xff, 0x0f],
        vec![0xd0, 0x05, 1],
        vec![0; 4096],
        fs::read(binary()).unwrap()[..100_000].to_vec(),
        b"<html>not found</html>".to_vec(),
        whole.iter().copied().cycle().take(8 << 20).collect(),
    ]);
    let world = files.len();
    for (rank, bytes) in files.iter().enumerate() {
        fs::write(dir.path().join(format!("{rank:05}-{world:05}.stacktrace")), bytes).unwrap();
    }
    fs::create_dir(dir.path().join(format!("{world:05}-{world:05}.stacktrace"))).unwrap();
    for name in ["-1.stacktrace", "1-.stacktrace", " 1-2.stacktrace", "1-2-3.stacktrace", "0x1-2.stacktrace"] {
        fs::write(dir.path().join(name), &whole).unwrap();
    }
    let viewer = run(&["-p".as_ref(), dir.path().as_ref(), "--output".as_ref(), output.path().as_ref()]);
    assert_eq!(viewer.code(), 0, "{}", viewer.stderr);
    let mut left_out: Vec<String> = viewer
        .stderr
        .lines()
        .filter_map(|line| Some(format!("'{}'", line.strip_prefix("warning: ")?.split_once(" is left out: ")?.0)))
        .collect();
    left_out.sort();
    let expected = check_with_reference(dir.path(), output.path());
    assert!(expected.len() > 50, "{expected:?}");
    assert_eq!(left_out, expected);
}

#[test]
fn odd_names_of_ranks_worlds_and_folders() {
    let native = ["main@a.c:1;ncclKernel@libnccl.so", "main@a.c:1;x::y@b"];
    let python = ["<module>@t.py:1;f@/opt/torch/x.py:2", "<module>@t.py:1"];
    for names in [
        // Several files of one rank, a rank beyond its world, a world of none, mixed worlds, more
        // ranks than five digits.
        &["00001-00002.stacktrace", "1-2.stacktrace", "0001-2.stacktrace"][..],
        &["00009-00004.stacktrace", "00000-00004.stacktrace"],
        &["0-0.stacktrace"],
        &["0-2.stacktrace", "1-4.stacktrace", "2-3.stacktrace"],
        &["99999-100001.stacktrace", "100000-100001.stacktrace", "00000-100001.stacktrace"],
    ] {
        let dir = tempfile::tempdir().unwrap();
        for (i, name) in names.iter().enumerate() {
            let state = ["S (sleeping)", "D (disk sleep)", "T (stopped)"][i % 3];
            put(dir.path(), name, &dump(state, &native[i % 2..], &python[..=i % 2]));
        }
        view_ok(dir.path());
        assert_eq!(check_with_reference(dir.path(), dir.path()), Vec::<String>::new(), "{names:?}");
    }

    // From within the folder above, by names that look like options or lead elsewhere.
    let above = tempfile::tempdir().unwrap();
    fs::create_dir(above.path().join("-dash")).unwrap();
    put(&above.path().join("-dash"), "0-2.stacktrace", &dump("R", &native, &python));
    std::os::unix::fs::symlink("-dash", above.path().join("a link")).unwrap();
    for (path, output) in [("-dash", "-out"), ("./-dash/", "out/"), ("a link", "模型"), ("a link/", "a b/c")] {
        let mut command = Command::new(binary());
        command.current_dir(above.path()).args(["--path", path, "--output", output]);
        let viewer = Process::spawn(&mut command).wait(PATIENCE);
        assert_eq!(viewer.code(), 0, "{path}: {}", viewer.stderr);
        assert_eq!(check_with_reference(&above.path().join(path), &above.path().join(output)), Vec::<String>::new());
    }
    assert_eq!(fs::read_dir(above.path().join("-dash")).unwrap().count(), 1);
}

#[test]
fn a_folder_that_cannot_be_written_is_reported_after_the_groups() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "0-1.stacktrace", &dump("R", &["f@x"], &["g@t.py:1"]));
    let viewer = run(&["-p".as_ref(), dir.path().as_ref(), "--output".as_ref(), OsStr::new("/proc/self/fd")]);
    assert_eq!(viewer.code(), 1);
    assert!(viewer.stdout.contains("at g (t.py:1)"), "{}", viewer.stdout);
    assert!(viewer.stderr.contains("cannot write /proc/self/fd/cpp_stack"), "{}", viewer.stderr);
    assert!(FILES.iter().all(|name| !dir.path().join(name).exists()));
}

#[test]
fn a_rank_without_a_dump_is_listed_with_node_exit_and_reason() {
    use xpu_timer_proto::v1::{Evidence, Presence, RankEvidence};
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "0-4.stacktrace", &dump("D (disk sleep)", &["f@x"], &["g@t.py:1"]));
    let rank = |rank, presence: Presence, exit: &str, errors: &[&str]| RankEvidence {
        rank,
        presence: presence.into(),
        node: format!("gpu-{rank}"),
        exit: exit.into(),
        errors: errors.iter().map(|&error| error.to_owned()).collect(),
        ..Default::default()
    };
    let ranks = vec![
        rank(1, Presence::Dead, "killed by SIGKILL", &[]),
        rank(2, Presence::Present, "", &["ptrace: permission denied"]),
    ];
    let evidence = Evidence { world_size: 4, ranks, ..Default::default() };
    fs::write(dir.path().join("evidence.bin"), evidence.encode_to_vec()).unwrap();
    let stdout = view_ok(dir.path()).stdout;
    for line in [
        "Dead: rank 1 on gpu-1 (killed by SIGKILL)",
        "Without a dump: rank 2 on gpu-2 (ptrace: permission denied)",
        "Without a dump: rank 3",
        "State D (disk sleep): rank 0",
    ] {
        assert!(stdout.lines().any(|shown| shown == line), "{line:?} in {stdout}");
    }
}
