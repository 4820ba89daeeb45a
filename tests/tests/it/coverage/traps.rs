//! What the page says of a way that nothing reaches, another namespace of the linker; and libraries of the makes that today's
//! distributions have.

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
        gcc(&inner, "namespace.c", &[&shared[..], &["-DINNER".into(), "-Wl,-soname,libnccl.so.2".into()]].concat());
        // Before what the environment says of where libraries are.
        let found = format!("-Wl,--disable-new-dtags,-rpath,{}", dir.path().display());
        gcc(&outer, "namespace.c", &[&shared[..], &["-DOUTER".into(), inner.display().to_string(), found]].concat());
        let program = dir.path().join("program");
        gcc(&program, "namespace.c", &[format!("-DOPEN(path)={open}")]);
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
            let way = Way { flags: &["-DMODE=RTLD_DEEPBIND"], library: Some(("caller_library.c", make)), ..WAY };
            let (program, opened) = build(dir.path(), &way, layer);
            let record = run_hooked(dir.path(), &program, &opened);
            assert_eq!(counted(&record, layer.0), CALLS, "{} {make:?}", layer.0);
        }
    }
}
