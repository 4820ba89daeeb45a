//! The generated code is checked in, so that a build needs neither protoc nor a code generator. This test generates it
//! again and fails when the two differ; `cargo xtask bless` (BLESS=1) writes the new code.

use std::{fs, path::Path};

const FILES: [&str; 5] = [
    "xpu_timer/server.proto",
    "xpu_timer/v1/flight.proto",
    "xpu_timer/v1/hook.proto",
    "xpu_timer/v1/evidence.proto",
    "xpu_timer/v1/cluster.proto",
];

#[test]
fn generated_code_is_up_to_date() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let generated = root.join("src/generated");
    let fresh = tempfile::tempdir().expect("temporary directory");
    let descriptors = protox::compile(FILES, [root.join("proto")]).expect("the schema compiles");
    tonic_prost_build::configure()
        .build_transport(false)
        .codec_path("crate::codec::Codec")
        .client_mod_attribute(".", "#[cfg(feature = \"grpc\")]")
        .server_mod_attribute(".", "#[cfg(feature = \"grpc\")]")
        .out_dir(fresh.path())
        .compile_fds(descriptors)
        .expect("code generation");

    let bless = std::env::var_os("BLESS").is_some();
    let mut names: Vec<_> = fs::read_dir(fresh.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["xpu_timer.server.rs", "xpu_timer.v1.rs"], "packages of the schema");
    for name in names {
        let new = fs::read_to_string(fresh.path().join(&name)).unwrap();
        let old = fs::read_to_string(generated.join(&name)).unwrap_or_default();
        if bless {
            fs::write(generated.join(&name), new).unwrap();
        } else {
            assert!(old == new, "{} is stale: run `cargo xtask bless`", name.display());
        }
    }
}
