//! libFuzzer around the target of `xpu_timer_fuzz` that XPU_FUZZ_TARGET names; `cargo xtask fuzz`
//! builds and runs it.
#![no_main]

use std::sync::LazyLock;

use xpu_timer_fuzz::TARGETS;

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = std::env::var("XPU_FUZZ_TARGET").unwrap_or_default();
    TARGETS.iter().find(|(target, _)| *target == name).expect("XPU_FUZZ_TARGET is one of TARGETS").1
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| TARGET(bytes));
