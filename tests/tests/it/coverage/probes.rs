//! Inline hooks and the other tools that change code: uprobes and breakpoints, before and after;
//! the level that replaces more; and the hook with Frida's engine. The documented behaviour for a
//! way that nothing reaches, for another namespace of the linker, and for systems where code cannot
//! be replaced. Libraries of the makes that today's distributions have.
//!
//! Frida's engine links where a devkit is given, and replaces code through gum's calls. The devkit
//! here is `tests/devkit/gum.c` with the header that the crate ships; Frida's own devkit is linked
//! in the same way.

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
        // The text of these libraries has the same offset in the file and in memory.
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
            // The driver's internal calls do not belong to this layer.
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

const TARGET: &str = "x86_64-unknown-linux-gnu";

fn cargo() -> Command {
    Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Compiles the devkit's stand-in into a folder.
fn devkit() -> PathBuf {
    let metadata = cargo()
        .args(["metadata", "--format-version", "1", "--all-features", "--filter-platform", TARGET])
        .current_dir(tree())
        .output()
        .expect("cargo runs");
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).expect("cargo metadata is JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let crate_of_gum = packages.iter().find(|package| package["name"] == "frida-gum-sys").expect("a dependency");
    let manifest = Path::new(crate_of_gum["manifest_path"].as_str().unwrap());
    let folder = tree().join("target/devkit");
    fs::create_dir_all(&folder).unwrap();
    fs::copy(manifest.with_file_name("include").join("frida-gumjs.h"), folder.join("frida-gum.h")).unwrap();
    let source = tree().join("tests/devkit/gum.c");
    let object = folder.join("gum.o");
    let mut gcc = Command::new("gcc");
    gcc.args(["-D_GNU_SOURCE", "-O2", "-Wall", "-Werror", "-fPIC", "-c"]).arg(source).arg("-o").arg(&object);
    assert!(gcc.status().expect("gcc runs").success());
    let archive = Command::new("ar").arg("rcs").arg(folder.join("libfrida-gum.a")).arg(&object).status();
    assert!(archive.expect("ar runs").success());
    folder
}

/// Builds the hook with it, apart from the one that the other tests use.
fn hook_with_frida() -> PathBuf {
    let devkit = devkit();
    let target = tree().join("target");
    let output = cargo()
        .args(["build", "--quiet", "-p", "xpu_timer_hook", "--features", "frida", "--target", TARGET, "--target-dir"])
        .arg(&target)
        .env("CPATH", &devkit)
        .env("LIBRARY_PATH", &devkit)
        .current_dir(tree())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target.join(TARGET).join("debug/libxpu_timer_hook.so")
}

#[test]
fn the_hook_links_with_a_devkit_and_replaces_code_through_it() {
    if let Some(reason) = ["clang", "libclang-dev"].into_iter().find_map(xpu_timer_tests::lacks) {
        return xpu_timer_tests::skip(&reason);
    }
    let hook = hook_with_frida();
    let dir = TempDir::new().unwrap();
    // Without optimisation a function begins in the plainest way.
    let plain: &[&str] = &["-DCOPY", "-Wl,-Bsymbolic", "-O0", "-fcf-protection=none"];
    let way = Way { flags: &["-DMODE=RTLD_LOCAL"], library: Some(("CALLER_LIBRARY", plain)), ..WAY };
    let layer = LAYERS[3];
    let (program, opened) = build(dir.path(), &way, layer);
    let seen = |inline| counted(&run_under(&hook, dir.path(), &program, &opened, inline, |_| {}, |_| true), layer.0);
    assert_eq!(seen("auto"), CALLS);
    assert_eq!(seen("off"), 0, "only the engine sees these calls");
}

/// A run under the hook.
fn run_hooked(dir: &Path, program: &Path, opened: &Path) -> FlightRecord {
    run(dir, program, opened, "auto")
}

#[test]
fn a_library_in_another_namespace_of_the_linker_is_not_seen() {
    for (open, seen) in [("dlopen(path, RTLD_NOW)", CALLS), ("dlmopen(LM_ID_NEWLM, path, RTLD_NOW)", 0)] {
        let dir = TempDir::new().unwrap();
        let shared = ["-shared", "-fPIC"].map(String::from);
        let (inner, outer) = (dir.path().join("libnccl.so.2"), dir.path().join("libouter.so"));
        gcc_part(&inner, "NAMESPACE", &[&shared[..], &["-DINNER".into(), "-Wl,-soname,libnccl.so.2".into()]].concat());
        // Before what the environment says of where libraries are.
        let found = format!("-Wl,--disable-new-dtags,-rpath,{}", dir.path().display());
        gcc_part(&outer, "NAMESPACE", &[&shared[..], &["-DOUTER".into(), inner.display().to_string(), found]].concat());
        let program = dir.path().join("program");
        gcc_part(&program, "NAMESPACE", &[format!("-DOPEN(path)={open}")]);
        let record = run_hooked(dir.path(), &program, &outer);
        assert_eq!(counted(&record, "NCCL"), seen, "{open}");
    }
}

#[test]
fn libraries_of_every_make_opened_with_deepbind_count() {
    const MAKES: [&[&str]; 4] = [
        &["-Wl,-z,pack-relative-relocs", "-Wl,-z,relro,-z,now"],
        &["-fno-plt", "-Wl,-z,now"],
        &["-mtls-dialect=gnu2", "-Wl,-z,lazy", "-Wl,--hash-style=sysv"],
        &["-Wl,-z,pack-relative-relocs", "-fno-plt", "-Wl,-z,separate-code"],
    ];
    for make in MAKES {
        for layer in [LAYERS[0], NCCL, LAYERS[4]] {
            let dir = TempDir::new().unwrap();
            let way = Way { flags: &["-DMODE=RTLD_DEEPBIND"], library: Some(("CALLER_LIBRARY", make)), ..WAY };
            let (program, opened) = build(dir.path(), &way, layer);
            let record = run_hooked(dir.path(), &program, &opened);
            assert_eq!(counted(&record, layer.0), CALLS, "{} {make:?}", layer.0);
        }
    }
}

#[test]
fn weak_references_stay_as_they_are_without_the_hook() {
    for make in [&["-Wl,-z,relro,-z,now"][..], &["-Wl,-z,lazy"], &["-Wl,-z,norelro"]] {
        let dir = TempDir::new().unwrap();
        let shared = |name: &str, flags: &[&str]| {
            let path = dir.path().join(format!("lib{name}.so"));
            let common = ["-shared", "-fPIC"].iter().chain(make).chain(flags).map(|flag| (*flag).to_string());
            gcc_part(&path, "WEAK", &common.collect::<Vec<_>>());
            path.display().to_string()
        };
        let (linked, opened) = (shared("linked", &["-DLIBRARY=linked"]), shared("opened", &["-DLIBRARY=opened"]));
        let program = dir.path().join("program");
        gcc_part(&program, "WEAK", &[linked, shared("mpi", &["-DHAS"])]);
        let asked = |hook: Option<PathBuf>| {
            let mut command = Command::new(&program);
            command.arg(&opened).env_remove("LD_PRELOAD").envs(hook.map(|hook| ("LD_PRELOAD", hook)));
            String::from_utf8(command.output().expect("the program runs").stdout).unwrap()
        };
        assert_eq!(asked(None), "4 4\n");
        assert_eq!(asked(Some(artifacts().hook())), "4 4\n", "{make:?}");
    }
}

/// The number of the layer's calls that were seen through a library that is bound to itself and
/// opened by the program. They are counted once the report gives the reason why the function
/// `absent`, whose library is not there, would not be seen.
fn calls_through_bound_library(
    dir: &Path,
    (layer, absent): ((&str, &str, &str), &str),
    hook: &Path,
    wrap: impl FnOnce(PathBuf) -> PathBuf,
) -> u64 {
    let library = ("CALLER_LIBRARY", &["-DCOPY", "-Wl,-Bsymbolic"][..]);
    let way = Way { flags: &["-DMODE=RTLD_LOCAL"], library: Some(library), ..WAY };
    let (program, opened) = build(dir, &way, layer);
    let is_reported = |record: &FlightRecord| reason(record, absent).contains("the linker does not report it");
    counted(&run_under(hook, dir, &wrap(program), &opened, "auto", |_| {}, is_reported), layer.0)
}

fn reason(record: &FlightRecord, name: &str) -> String {
    record.coverage.iter().find(|function| function.name == name).expect("all functions are listed").reason.clone()
}

#[test]
fn a_forbidden_change_of_code_is_reported() {
    const FUNCTIONS: [&str; 2] = ["ncclAllReduce", "cublasSgemm_v2"];
    for (layer, [name, other]) in [(NCCL, FUNCTIONS), (LAYERS[4], [FUNCTIONS[1], FUNCTIONS[0]])] {
        let [dir, own] = [(); 2].map(|()| TempDir::new().unwrap());
        let forbids = |program: PathBuf| {
            let wrapper = program.with_file_name("forbids");
            gcc_part(&wrapper, "FORBIDS", &[format!("-DPROGRAM=\"{}\"", program.display())]);
            wrapper
        };
        assert_eq!(calls_through_bound_library(dir.path(), (layer, other), &artifacts().hook(), forbids), 0, "{name}");

        // A copy in the program itself.
        let (program, opened) = build(own.path(), &Way { program: "PLT", flags: &["-DCOPY"], ..WAY }, layer);
        let is_reported = |record: &FlightRecord| reason(record, name).contains("cannot be replaced");
        let record =
            run_under(&artifacts().hook(), own.path(), &forbids(program), &opened, "auto", |_| {}, is_reported);
        assert_eq!(counted(&record, layer.0), 0, "{name}");
    }
}

#[test]
fn missed_libraries_under_a_debugger_are_reported() {
    let dir = TempDir::new().unwrap();
    let watches = dir.path().join("libwatches.so");
    gcc_part(&watches, "WATCHES", &["-shared", "-fPIC"].map(String::from));
    // If two libraries are preloaded, the second is initialized first.
    let both = PathBuf::from(format!("{}:{}", artifacts().hook().display(), watches.display()));
    assert_eq!(calls_through_bound_library(dir.path(), (NCCL, "cublasSgemm_v2"), &both, |program| program), 0);
}
