//! What the page says of a way that nothing reaches, another namespace of the linker, and of
//! systems where code cannot be replaced; and libraries of the makes that today's distributions
//! have.

use super::*;

const NCCL: (&str, &str, &str) = LAYERS[3];

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
        gcc_part(
            &inner,
            "traps.c",
            "NAMESPACE",
            &[&shared[..], &["-DINNER".into(), "-Wl,-soname,libnccl.so.2".into()]].concat(),
        );
        // Before what the environment says of where libraries are.
        let found = format!("-Wl,--disable-new-dtags,-rpath,{}", dir.path().display());
        gcc_part(
            &outer,
            "traps.c",
            "NAMESPACE",
            &[&shared[..], &["-DOUTER".into(), inner.display().to_string(), found]].concat(),
        );
        let program = dir.path().join("program");
        gcc_part(&program, "traps.c", "NAMESPACE", &[format!("-DOPEN(path)={open}")]);
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
            gcc_part(&path, "traps.c", "WEAK", &common.collect::<Vec<_>>());
            path.display().to_string()
        };
        let (linked, opened) = (shared("linked", &["-DLIBRARY=linked"]), shared("opened", &["-DLIBRARY=opened"]));
        let program = dir.path().join("program");
        gcc_part(&program, "traps.c", "WEAK", &[linked, shared("mpi", &["-DHAS"])]);
        let asked = |hook: Option<PathBuf>| {
            let mut command = Command::new(&program);
            command.arg(&opened).env_remove("LD_PRELOAD").envs(hook.map(|hook| ("LD_PRELOAD", hook)));
            String::from_utf8(command.output().expect("the program runs").stdout).unwrap()
        };
        assert_eq!(asked(None), "4 4\n");
        assert_eq!(asked(Some(artifacts().hook())), "4 4\n", "{make:?}");
    }
}

/// The layer's calls that were seen through a library that is bound to itself and opened by the
/// program, once the report says of a function whose library is not there why it would not be seen.
fn seen_later(
    dir: &Path,
    (layer, absent): ((&str, &str, &str), &str),
    hook: &Path,
    wrap: impl FnOnce(PathBuf) -> PathBuf,
) -> u64 {
    let library = ("CALLER_LIBRARY", &["-DCOPY", "-Wl,-Bsymbolic"][..]);
    let way = Way { flags: &["-DMODE=RTLD_LOCAL"], library: Some(library), ..WAY };
    let (program, opened) = build(dir, &way, layer);
    let is_told = |record: &FlightRecord| reason(record, absent).contains("the linker does not report it");
    counted(&run_under(hook, dir, &wrap(program), &opened, "auto", |_| {}, is_told), layer.0)
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
            gcc_part(&wrapper, "traps.c", "FORBIDS", &[format!("-DPROGRAM=\"{}\"", program.display())]);
            wrapper
        };
        assert_eq!(seen_later(dir.path(), (layer, other), &artifacts().hook(), forbids), 0, "{name}");

        // A copy in the program itself.
        let (program, opened) = build(own.path(), &Way { program: "PLT", flags: &["-DCOPY"], ..WAY }, layer);
        let is_told = |record: &FlightRecord| reason(record, name).contains("cannot be replaced");
        let record = run_under(&artifacts().hook(), own.path(), &forbids(program), &opened, "auto", |_| {}, is_told);
        assert_eq!(counted(&record, layer.0), 0, "{name}");
    }
}

#[test]
fn missed_libraries_under_a_debugger_are_reported() {
    let dir = TempDir::new().unwrap();
    let watches = dir.path().join("libwatches.so");
    gcc_part(&watches, "traps.c", "WATCHES", &["-shared", "-fPIC"].map(String::from));
    // Of two that are preloaded the second is initialized first.
    let both = PathBuf::from(format!("{}:{}", artifacts().hook().display(), watches.display()));
    assert_eq!(seen_later(dir.path(), (NCCL, "cublasSgemm_v2"), &both, |program| program), 0);
}
