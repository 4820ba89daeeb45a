//! The build script of the simulated libraries: gives each its real soname.

/// The packages and their sonames.
const SONAMES: [(&str, &str); 5] = [
    ("sim_cuda", "libcuda.so.1"),
    ("sim_cudart", "libcudart.so.13"),
    ("sim_cublas", "libcublas.so.13"),
    ("sim_cublaslt", "libcublasLt.so.13"),
    ("sim_nccl", "libnccl.so.2"),
];

fn main() {
    let package = env!("CARGO_PKG_NAME");
    let (_, soname) = SONAMES.iter().find(|(name, _)| *name == package).expect("each simulated library has a soname");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{soname}");
    println!("cargo:rerun-if-changed=../soname.rs");
}
