//! Gives the library its real soname.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcublasLt.so.12");
    println!("cargo:rerun-if-changed=build.rs");
}
