//! The hook with Frida's engine: that it links where a devkit is given, and replaces code through
//! gum's calls. The devkit here is `tests/devkit/gum.c` with the header that the crate ships;
//! Frida's own devkit is linked in the same way.

use super::*;

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
    assert_eq!(seen("off"), 0, "nothing but the engine sees these calls");
}
