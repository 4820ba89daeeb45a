//! The packages whose programs and libraries the tests and the demo run. `xtask/start` includes
//! this file, because it depends on no other crate.

/// Their names, for `cargo build -p`.
pub const PACKAGES: [&str; 11] = [
    "xpu_timer_hook",
    "xpu_timer_launch",
    "xpu_timer_capture",
    "xpu_timer_collector",
    "xpu_timer_timeline",
    "xpu_timer_viewer",
    "sim_cuda",
    "sim_cudart",
    "sim_cublas",
    "sim_cublaslt",
    "sim_nccl",
];
