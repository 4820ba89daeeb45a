//! Inline hooks and the other tools that change code: uprobes and breakpoints, before and after;
//! and the level that replaces more.

use std::sync::Once;

use super::*;

/// A library that is bound to itself, so that only an inline hook sees its calls. The program waits
/// before it makes them.
fn bound_to_itself(
    dir: &Path,
    layer: (&str, &str, &str),
    mark: &'static [&'static str],
) -> (PathBuf, PathBuf, PathBuf) {
    let go = dir.join("go");
    let pause: &'static str = Box::leak(format!("-DPAUSE=\"{}\"", go.display()).into_boxed_str());
    let way = Way {
        flags: Box::leak(Box::new(["-DMODE=RTLD_LOCAL", pause])),
        library: Some(("CALLER_LIBRARY", mark)),
        ..WAY
    };
    let (program, opened) = build(dir, &way, layer);
    (program, opened, go)
}

const NCCL: (&str, &str, &str) = LAYERS[3];
const MARKED: &[&str] = &["-DCOPY", "-Wl,-Bsymbolic", "-fcf-protection=branch"];
const PLAIN: &[&str] = &["-DCOPY", "-Wl,-Bsymbolic", "-fcf-protection=none"];

/// Where a library has a function that it exports.
fn offset_of(file: &Path, function: &str) -> u64 {
    let symbols = Command::new("nm").arg("-D").arg(file).output().expect("nm of binutils runs");
    let symbols = String::from_utf8_lossy(&symbols.stdout).into_owned();
    let line = symbols.lines().find(|line| line.ends_with(&format!(" {function}"))).expect("the library exports it");
    u64::from_str_radix(line.split(' ').next().unwrap(), 16).unwrap()
}

/// Where a file is mapped in a process.
fn base_of(pid: i32, file: &Path) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("the process lives");
    let first = maps.lines().find(|line| line.ends_with(&file.display().to_string())).expect("it is loaded");
    u64::from_str_radix(first.split('-').next().unwrap(), 16).unwrap()
}

/// A uprobe of the kernel on a function of a file; gone when dropped.
struct Uprobe(String);

const TRACING: &str = "/sys/kernel/tracing";

/// Has tracefs mounted where every distribution mounts it; containers and small machines often lack
/// it.
fn mount_tracing() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if !Path::new(TRACING).join("uprobe_events").exists() {
            // Without permission it fails, and the tests say that they cannot run.
            let _ = Command::new("mount").args(["-t", "tracefs", "tracefs", TRACING]).status();
        }
    });
}

impl Uprobe {
    /// `None` where the kernel has none for us.
    fn put(file: &Path, function: &str) -> Option<Self> {
        mount_tracing();
        let name =
            format!("xpu_timer_{}_{}", std::process::id(), file.parent()?.file_name()?.to_str()?.replace('.', "_"));
        // The text of these libraries lies in the file where it lies in memory.
        let line = format!("p:{name}/hit {}:{:#x}\n", file.display(), offset_of(file, function));
        append("uprobe_events", &line).ok()?;
        let probe = Uprobe(name);
        fs::write(format!("{TRACING}/events/{}/enable", probe.0), "1").ok()?;
        Some(probe)
    }

    /// How often it was hit.
    fn hits(&self) -> u64 {
        let profile = fs::read_to_string(format!("{TRACING}/uprobe_profile")).expect("the profile of the uprobes");
        // A line is the file, the name and the number.
        let words: Vec<&str> = profile.split_whitespace().collect();
        let ours = words.chunks(3).filter(|line| line[0].contains(&self.folder()) && line[1] == "hit");
        ours.map(|line| line[2].parse::<u64>().unwrap()).sum()
    }

    fn folder(&self) -> String {
        self.0.rsplit('_').next().unwrap_or_default().to_string()
    }
}

impl Drop for Uprobe {
    fn drop(&mut self) {
        let _ = fs::write(format!("{TRACING}/events/{}/enable", self.0), "0");
        let _ = append("uprobe_events", &format!("-:{}/hit\n", self.0));
    }
}

fn append(file: &str, text: &str) -> std::io::Result<()> {
    use std::io::Write as _;
    fs::OpenOptions::new().append(true).open(format!("{TRACING}/{file}"))?.write_all(text.as_bytes())
}

fn no_uprobes() {
    xpu_timer_tests::skip("uprobes need root and tracefs at /sys/kernel/tracing");
}

#[test]
fn a_uprobe_that_comes_later_and_the_hook_both_count() {
    let dir = TempDir::new().unwrap();
    let (program, opened, go) = bound_to_itself(dir.path(), NCCL, MARKED);
    let mut probe = None;
    let record = run_with(dir.path(), &program, &opened, "auto", |process| {
        process.wait_for("loaded\n", PATIENCE);
        probe = Uprobe::put(&opened, "ncclAllReduce");
        fs::write(&go, "").unwrap();
    });
    let Some(probe) = probe else { return no_uprobes() };
    assert_eq!((probe.hits(), counted(&record, "NCCL")), (CALLS, CALLS));
}

#[test]
fn a_function_with_an_earlier_uprobe_is_not_hooked() {
    for mark in [MARKED, PLAIN] {
        let dir = TempDir::new().unwrap();
        let (program, opened, go) = bound_to_itself(dir.path(), NCCL, mark);
        let Some(probe) = Uprobe::put(&opened, "ncclAllReduce") else { return no_uprobes() };
        fs::write(&go, "").unwrap();
        let record = run(dir.path(), &program, &opened, "auto");
        assert_eq!((probe.hits(), counted(&record, "NCCL")), (CALLS, 0));
        let function = record.coverage.iter().find(|function| function.name == "ncclAllReduce").unwrap();
        assert!(!function.hooked && function.reason.contains("cannot be replaced"), "{function:?}");
    }
}

#[test]
fn a_debuggers_breakpoint_that_comes_later_and_the_hook_both_count() {
    for mark in [MARKED, PLAIN] {
        let dir = TempDir::new().unwrap();
        let (program, opened, go) = bound_to_itself(dir.path(), NCCL, mark);
        let mut debugger = None;
        let record = run_with(dir.path(), &program, &opened, "auto", |process| {
            process.wait_for("loaded\n", PATIENCE);
            // At the very first byte; by its name it would be the hook's own function of that name.
            let script = format!(
                "break *{:#x}\ncommands\nsilent\necho stopped\\n\ncontinue\nend\nshell touch {}\ncontinue\n",
                base_of(process.pid(), &opened) + offset_of(&opened, "ncclAllReduce"),
                go.display()
            );
            let file = dir.path().join("commands.gdb");
            fs::write(&file, script).unwrap();
            let mut gdb = Command::new("gdb");
            gdb.args(["-q", "-nx", "-batch", "-x"]).arg(&file).arg("-p").arg(process.pid().to_string());
            debugger = Some(Process::spawn(&mut gdb));
        });
        let output = debugger.unwrap().wait(PATIENCE);
        assert_eq!(output.stdout.matches("stopped").count() as u64, CALLS, "{output:?}");
        assert_eq!(counted(&record, "NCCL"), CALLS);
    }
}

#[test]
fn every_call_counts_once_with_more_code_replaced() {
    for layer in LAYERS {
        for library in [&["-DCOPY", "-Wl,-Bsymbolic"][..], &[]] {
            let dir = TempDir::new().unwrap();
            let way = Way { flags: &["-DMODE=RTLD_LOCAL"], library: Some(("CALLER_LIBRARY", library)), ..WAY };
            let (program, opened) = build(dir.path(), &way, layer);
            // What the driver calls inside itself is not this layer's.
            if layer.0 == "driver" && !library.is_empty() {
                continue;
            }
            assert_eq!(counted(&run(dir.path(), &program, &opened, "all"), layer.0), CALLS, "{} {library:?}", layer.0);
        }
    }
}

#[test]
fn a_runtime_that_is_bound_to_itself_is_replaced_when_asked_for() {
    // The library that the program opens is a family's runtime by its name, as libcudart 12 is one
    // that is bound to itself.
    const RUNTIME: &[&str] = &["-DCOPY", "-Wl,-Bsymbolic", "-Wl,-soname,libcudart.so.12"];
    let calls = |inline: &str| {
        let dir = TempDir::new().unwrap();
        let way = Way { flags: &["-DMODE=RTLD_LOCAL"], library: Some(("CALLER_LIBRARY", RUNTIME)), ..WAY };
        let (program, opened) = build(dir.path(), &way, LAYERS[1]);
        let record = run(dir.path(), &program, &opened, inline);
        let function = record.coverage.iter().find(|function| function.name == "cudaLaunchKernel").unwrap();
        (record.kernels_launched, function.calls)
    };
    assert_eq!(calls("auto"), (CALLS, 0), "seen by the driver only");
    assert_eq!(calls("all"), (CALLS, CALLS), "seen by both, and counted once");
}
