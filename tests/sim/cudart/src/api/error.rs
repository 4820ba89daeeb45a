//! Errors and versions, which work without a driver.

use sim_abi::{
    cuda::{error_text, runtime_name},
    ffi::{Out, Text},
};

use super::VERSION;
use crate::state;

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> i32 {
    state::last_error(true)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> i32 {
    state::last_error(false)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(error: i32) -> Text {
    runtime_name(error).unwrap_or(Text::of(c"unrecognized error code"))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(error: i32) -> Text {
    error_text(error).unwrap_or(Text::of(c"unrecognized error code"))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaRuntimeGetVersion(version: Out<i32>) -> i32 {
    state::call("cudaRuntimeGetVersion", || Ok(version.set(VERSION)?))
}
