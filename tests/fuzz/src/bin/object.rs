//! libFuzzer around `xpu_timer_fuzz::object`; `cargo xtask fuzz` builds and runs it.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| xpu_timer_fuzz::object(bytes));
