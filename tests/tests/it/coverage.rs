//! The coverage matrix: every way in which a program obtains a function, in every layer, is counted
//! exactly once. The programs are the C files in `coverage/`; their results are in
//! `docs/coverage.md`, which `BLESS=1` writes.

mod probes;
mod rows;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use tempfile::TempDir;
use xpu_timer_proto::v1::{FlightRecord, HookedFunction, Op};
use xpu_timer_tests::{FakeCollector, PATIENCE, Process, ReadMode, artifacts, tree, wait_until};

/// Calls that each program makes.
const CALLS: u64 = 3;

/// A layer: its name, the macro that selects it, its library.
const LAYERS: [(&str, &str, &str); 8] = [
    ("driver", "LAYER_DRIVER", "libcuda.so.1"),
    ("runtime 13", "LAYER_RUNTIME", "libcudart.so.13"),
    ("runtime 12", "LAYER_RUNTIME", "libcudart.so.12"),
    ("NCCL", "LAYER_NCCL", "libnccl.so.2"),
    ("cuBLAS 13", "LAYER_CUBLAS", "libcublas.so.13"),
    ("cuBLAS 12", "LAYER_CUBLAS", "libcublas.so.12"),
    ("cuBLASLt 13", "LAYER_CUBLASLT", "libcublasLt.so.13"),
    ("cuBLASLt 12", "LAYER_CUBLASLT", "libcublasLt.so.12"),
];

/// One way to a function.
struct Way {
    name: &'static str,
    /// Its part of `ways.c`.
    program: &'static str,
    flags: &'static [&'static str],
    /// The program is linked with the layer's library.
    linked: Linked,
    /// The library that the program calls through: its part of `ways.c`, and its flags.
    library: Option<(&'static str, &'static [&'static str])>,
    /// Layers without this way, by the prefix of their names, and the reason.
    except: &'static [(&'static str, &'static str)],
    /// Layers whose calls the hook does not see, and the reason.
    unseen: &'static [(&'static str, &'static str)],
}

#[derive(PartialEq)]
enum Linked {
    Not,
    Plainly,
    /// By a version of the symbol that the loaded library does not define.
    ByVersion,
}

const WAY: Way =
    Way { name: "", program: "OPENED", flags: &[], linked: Linked::Not, library: None, except: &[], unseen: &[] };
const DRIVER_ONLY: &[(&str, &str)] =
    &[("runtime", "only the driver has it"), ("NCCL", "only the driver has it"), ("cuBLAS", "only the driver has it")];
const BY_VERSION: &str = "-DVERSION=\"SOME_VERSION\"";
/// A linker script that gives all symbols of a library a version.
const VERSIONS_MAP: &str = "SOME_VERSION { global: *; };\n";
/// A library that defines the function by a version.
const VERSIONED: Option<(&str, &[&str])> = Some(("CALLER_LIBRARY", &["-DCOPY", "-Wl,--version-script=versions.map"]));
const PAST_THE_LINKER: &str =
    "the call bypasses the linker, and the hook changes no code of a library that symbols reach";

fn ways() -> Vec<Way> {
    vec![
        Way { name: "call through the PLT", program: "PLT", linked: Linked::Plainly, ..WAY },
        Way { name: "versioned symbol", program: "PLT", linked: Linked::ByVersion, ..WAY },
        Way { name: "dlsym on a handle", program: "LOOK_UP", flags: &["-DPLACE=library"], ..WAY },
        Way { name: "dlsym(RTLD_DEFAULT)", program: "LOOK_UP", flags: &["-DPLACE=RTLD_DEFAULT"], ..WAY },
        Way {
            name: "dlsym(RTLD_NEXT)",
            program: "LOOK_UP",
            flags: &["-DPLACE=RTLD_NEXT"],
            linked: Linked::Plainly,
            ..WAY
        },
        Way {
            name: "dlvsym on a handle",
            program: "LOOK_UP",
            flags: &["-DPLACE=library", BY_VERSION],
            library: VERSIONED,
            except: &[("driver", "its functions have no versions")],
            ..WAY
        },
        Way {
            name: "dlvsym(RTLD_DEFAULT)",
            program: "LOOK_UP",
            flags: &["-DPLACE=RTLD_DEFAULT", BY_VERSION],
            library: VERSIONED,
            except: &[("driver", "its functions have no versions")],
            ..WAY
        },
        Way {
            name: "dlvsym(RTLD_NEXT)",
            program: "LOOK_UP",
            flags: &["-DPLACE=RTLD_NEXT", BY_VERSION],
            library: VERSIONED,
            except: &[("driver", "its functions have no versions")],
            ..WAY
        },
        Way {
            name: "cuGetProcAddress, flags 0",
            program: "PROC_ADDRESS",
            flags: &["-DFLAGS=0"],
            except: DRIVER_ONLY,
            ..WAY
        },
        Way {
            name: "cuGetProcAddress, flags 2",
            program: "PROC_ADDRESS",
            flags: &["-DFLAGS=2"],
            except: DRIVER_ONLY,
            ..WAY
        },
        Way {
            name: "pointer obtained before the hook was ready",
            program: "EARLY",
            library: Some(("EARLY_LIBRARY", &[])),
            ..WAY
        },
        Way {
            name: "call inside a -Bsymbolic library",
            flags: &["-DMODE=RTLD_LOCAL"],
            library: Some(("CALLER_LIBRARY", &["-DCOPY", "-Wl,-Bsymbolic"])),
            except: &[("driver", "calls inside the driver belong to a launch that the hook sees")],
            ..WAY
        },
        Way {
            name: "library opened with RTLD_LOCAL",
            flags: &["-DMODE=RTLD_LOCAL"],
            library: Some(("CALLER_LIBRARY", &[])),
            ..WAY
        },
        Way {
            name: "library opened with RTLD_DEEPBIND",
            flags: &["-DMODE=RTLD_DEEPBIND"],
            library: Some(("CALLER_LIBRARY", &[])),
            ..WAY
        },
        Way {
            name: "statically linked",
            program: "PLT",
            flags: &["-DCOPY"],
            except: &[("driver", "it is part of the system and is never statically linked")],
            ..WAY
        },
        Way {
            name: "statically linked, stripped",
            program: "PLT",
            flags: &["-DCOPY", "-s"],
            except: &[("driver", "it is part of the system and is never statically linked")],
            unseen: &[
                ("NCCL", "no symbol has its name; the report says so when its kernels run"),
                ("cuBLAS", "no symbol has its name; its kernels count as kernels"),
            ],
            ..WAY
        },
        Way {
            name: "library found by a RUNPATH",
            flags: &["-DMODE=RTLD_LOCAL", "-DRUNPATH"],
            library: Some(("CALLER_LIBRARY", &[])),
            ..WAY
        },
        Way {
            name: "library closed and opened again",
            flags: &["-DMODE=RTLD_LOCAL", "-DRELOAD"],
            library: Some(("CALLER_LIBRARY", &[])),
            ..WAY
        },
        Way {
            name: "-Bsymbolic library closed and opened again",
            flags: &["-DMODE=RTLD_LOCAL", "-DRELOAD"],
            library: Some(("CALLER_LIBRARY", &["-DCOPY", "-Wl,-Bsymbolic"])),
            except: &[("driver", "calls inside the driver belong to a launch that the hook sees")],
            ..WAY
        },
        Way {
            name: "pointer read from the library's symbol table",
            program: "OWN_LOOK_UP",
            unseen: &[("driver", PAST_THE_LINKER), ("NCCL", PAST_THE_LINKER), ("cuBLAS", PAST_THE_LINKER)],
            ..WAY
        },
    ]
}

/// Compiles a part of `ways.c`.
fn gcc_part(output: &Path, part: &str, arguments: &[String]) {
    gcc(output, "ways.c", &[&[format!("-D{part}")], arguments].concat());
}

/// Compiles a file of `coverage/` in the folder of its output, which also gets `versions.map`.
fn gcc(output: &Path, source: &str, arguments: &[String]) {
    let folder = output.parent().expect("a file in a folder");
    fs::write(folder.join("versions.map"), VERSIONS_MAP).expect("the folder can be written");
    let gcc = Command::new("gcc")
        .args(["-O1", "-w", "-Wl,--no-as-needed", "-o"])
        .arg(output)
        .arg(tree().join("tests/tests/it/coverage").join(source))
        .args(arguments)
        .current_dir(folder)
        .output()
        .expect("gcc runs");
    assert!(gcc.status.success(), "{source} {arguments:?}: {}", String::from_utf8_lossy(&gcc.stderr));
}

/// A program of one cell, built in a folder, and its second argument.
fn build(dir: &Path, way: &Way, layer: (&str, &str, &str)) -> (PathBuf, PathBuf) {
    let (_, define, soname) = layer;
    let defines = [format!("-D{define}"), format!("-DSONAME=\"{soname}\"")];
    let sim = format!("-L{}", artifacts().sim().display());
    let with_layer = [sim, format!("-l:{soname}")];
    let opened = dir.join("libcaller.so");
    let mut arguments = defines.to_vec();
    arguments.extend(way.flags.iter().map(ToString::to_string));
    match way.linked {
        Linked::Not => {}
        Linked::Plainly => arguments.extend(with_layer.clone()),
        Linked::ByVersion => {
            let stub = dir.join(soname);
            let flags = ["-shared", "-fPIC", "-DCOPY", "-Wl,--version-script=versions.map"].map(String::from);
            let text = [&defines[..], &flags, &[format!("-Wl,-soname,{soname}")]].concat();
            gcc_part(&stub, "CALLER_LIBRARY", &text);
            arguments.push(stub.display().to_string());
        }
    }
    if let Some((part, flags)) = way.library {
        let mut text = [&["-shared".to_string(), "-fPIC".into()], &defines[..]].concat();
        text.extend(flags.iter().map(ToString::to_string));
        text.extend(with_layer);
        let runpath = way.flags.contains(&"-DRUNPATH");
        let inner = dir.join("inner");
        fs::create_dir_all(&inner).unwrap();
        gcc_part(&if runpath { inner.join("libinner.so") } else { opened.clone() }, part, &text);
        if runpath {
            let flags =
                ["-shared".into(), "-fPIC".into(), format!("-Wl,--enable-new-dtags,-rpath,{}", inner.display())];
            gcc_part(&opened, "OUTER_LIBRARY", &[&defines[..], &flags].concat());
        }
        if way.program == "EARLY" {
            arguments.extend([opened.display().to_string(), format!("-Wl,-rpath,{}", dir.display())]);
        }
    }
    let program = dir.join("program");
    gcc_part(&program, way.program, &arguments);
    (program, opened)
}

/// Runs the program under the hook; what its ring holds at the end.
fn run(dir: &Path, program: &Path, opened: &Path, inline: &str) -> FlightRecord {
    run_with(dir, program, opened, inline, |_| {})
}

/// Like `run`, but calls `meanwhile` on the process before its calls, if it waits for that.
fn run_with(
    dir: &Path,
    program: &Path,
    opened: &Path,
    inline: &str,
    meanwhile: impl FnOnce(&mut Process),
) -> FlightRecord {
    run_under(&artifacts().hook(), dir, program, opened, inline, meanwhile, |_| true)
}

/// Runs a program under any hook. `settled` must hold for the record before the program ends.
fn run_under(
    hook: &Path,
    dir: &Path,
    program: &Path,
    opened: &Path,
    inline: &str,
    meanwhile: impl FnOnce(&mut Process),
    settled: impl Fn(&FlightRecord) -> bool,
) -> FlightRecord {
    run_under_and(hook, (dir, program, opened), inline, meanwhile, settled, |_, _| ())
}

/// Runs a program like [`run_under`], with a look at the collector's state for the process at its
/// end.
fn run_under_and(
    hook: &Path,
    (dir, program, opened): (&Path, &Path, &Path),
    inline: &str,
    meanwhile: impl FnOnce(&mut Process),
    settled: impl Fn(&FlightRecord) -> bool,
    look: impl FnOnce(&FakeCollector, i32),
) -> FlightRecord {
    let (socket, stop) = (dir.join(format!("socket-{inline}")), dir.join(format!("stop-{inline}")));
    let collector = FakeCollector::listen(&socket, ReadMode::Reads);
    let mut command = Command::new(program);
    command
        .arg(&stop)
        .arg(opened)
        .env("LD_LIBRARY_PATH", artifacts().sim())
        .env("LD_PRELOAD", hook)
        .env("XPU_TIMER_SOCKET", &socket)
        .env("XPU_TIMER_LOGGING_DIR", dir)
        .env("XPU_TIMER_BRACKET", "matmuls")
        .env("XPU_TIMER_INLINE", inline);
    let mut process = Process::spawn(&mut command);
    meanwhile(&mut process);
    process.wait_for("called\n", PATIENCE);
    let pid = process.pid();
    // The first call that the hook sees creates the ring.
    let is_watched = has_ring(pid);
    if is_watched {
        collector.wait_hello();
        wait_until(PATIENCE, "what the record must say", || settled(&collector.ring(pid)));
    }
    fs::write(&stop, "").unwrap();
    let output = process.wait(PATIENCE);
    assert_eq!((output.code(), output.stdout.replace("loaded\n", "").as_str()), (0, "called\n"), "{output:?}");
    if !is_watched {
        return FlightRecord::default();
    }
    let record = collector.ring(pid);
    let health = record.health.as_ref().unwrap();
    assert_eq!((health.panics, health.dropped, health.overflows), (0, 0, 0));
    look(&collector, pid);
    record
}

fn has_ring(pid: i32) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).expect("the process waits for the test").flatten();
    files
        .filter_map(|file| fs::read_link(file.path()).ok())
        .any(|link| link.to_string_lossy().contains("xpu_timer_ring"))
}

/// The number of the layer's calls in a record.
fn counted(record: &FlightRecord, layer: &str) -> u64 {
    let operations = |op: Op| record.operations.iter().filter(|operation| operation.op() == op).count() as u64;
    match layer {
        "NCCL" => {
            assert_eq!(record.collectives_launched, operations(Op::AllReduce), "counted and noted");
            record.collectives_launched
        }
        _ if layer.starts_with("cuBLAS") => {
            let shapes: Vec<_> = record.operations.iter().filter_map(|operation| operation.matmul.as_deref()).collect();
            assert!(
                shapes.iter().all(|shape| (shape.m, shape.n, shape.k, shape.trans_b) == (2, 2, 2, 1)),
                "{shapes:?}"
            );
            operations(Op::Matmul)
        }
        _ => record.kernels_launched,
    }
}

/// The text of one cell, checked.
fn cell(way: &Way, layer: (&str, &str, &str)) -> String {
    let name = layer.0;
    let about = |list: &[(&str, &'static str)]| list.iter().find(|(of, _)| name.starts_with(of)).map(|(_, why)| *why);
    if let Some(why) = about(way.except) {
        return format!("— ({why})");
    }
    let dir = TempDir::new().unwrap();
    let (program, opened) = build(dir.path(), way, layer);
    let is_unseen = about(way.unseen).is_some();
    // The next survey of the hook reports the collectives whose kernels alone were seen.
    let is_reported = |record: &FlightRecord| {
        let mut all = record.coverage.iter();
        let is_named = |function: &HookedFunction| !function.hooked && function.reason.contains("its kernels run");
        !is_unseen || name != "NCCL" || all.any(|function| function.name == "ncclAllReduce" && is_named(function))
    };
    let record = run_under(&artifacts().hook(), dir.path(), &program, &opened, "auto", |_| {}, is_reported);
    let seen = counted(&record, name);
    if let Some(why) = about(way.unseen) {
        assert_eq!(seen, 0, "{} × {name} is seen after all", way.name);
        return format!("no ({why})");
    }
    assert_eq!(seen, CALLS, "{} × {name}", way.name);
    let without = counted(&run(dir.path(), &program, &opened, "off"), name);
    assert!([0, CALLS].contains(&without), "{} × {name} with XPU_TIMER_INLINE=off: {without}", way.name);
    if without == CALLS { "yes".into() } else { "yes, at load".into() }
}

#[test]
fn every_way_to_every_layer_counts_exactly_once() {
    let ways = ways();
    let cells: Vec<(usize, usize)> = (0..ways.len()).flat_map(|way| (0..LAYERS.len()).map(move |l| (way, l))).collect();
    let texts = Mutex::new(vec![vec![String::new(); LAYERS.len()]; ways.len()]);
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((way, layer)) = cells.get(next.fetch_add(1, Ordering::Relaxed)).copied() {
                    let text = cell(&ways[way], LAYERS[layer]);
                    texts.lock().unwrap()[way][layer] = text;
                }
            });
        }
    });
    let mut texts = texts.into_inner().unwrap();
    let reasons = move_reasons(&mut texts);
    let columns = LAYERS.map(|(name, ..)| name).join(" | ");
    let mut table = format!("| way to the function | {columns} |\n|---|{}\n", "---|".repeat(LAYERS.len()));
    for (way, texts) in ways.iter().zip(texts) {
        table.push_str(&format!("| {} | {} |\n", way.name, texts.join(" | ")));
    }
    let page = include_str!("coverage/page.md").replace("{table}", &format!("{table}\n{reasons}"));
    let path = tree().join("docs/coverage.md");
    if env::var_os("BLESS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    assert_eq!(fs::read_to_string(&path).unwrap_or_default(), page, "docs/coverage.md; BLESS=1 writes it anew");
}

/// Replaces the reasons in the cells by numbers, and returns the numbered list of the reasons.
fn move_reasons(texts: &mut [Vec<String>]) -> String {
    let mut reasons: Vec<String> = Vec::new();
    for text in texts.iter_mut().flatten() {
        let Some((answer, reason)) = text.strip_suffix(')').and_then(|text| text.split_once(" (")) else { continue };
        let known = reasons.iter().position(|known| known == reason);
        let index = known.unwrap_or_else(|| {
            reasons.push(reason.into());
            reasons.len() - 1
        });
        *text = format!("{answer} [{}]", index + 1);
    }
    reasons.iter().zip(1..).map(|(reason, number)| format!("{number}. {reason}\n")).collect()
}
