//! State of the process: whether `cuInit` was called, and whether this is the child of a fork after
//! it.

#![allow(unsafe_code)]

use std::{
    hint::black_box,
    sync::{
        Once,
        atomic::{AtomicBool, Ordering},
    },
};

use sim_abi::{
    cuda::{CuError, code},
    fault, trace,
};

static INITIALIZED: AtomicBool = AtomicBool::new(false);
static FORKED: AtomicBool = AtomicBool::new(false);
static LOST: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    // The child has no worker threads, and any lock may be held forever, so it must not do anything
    // else.
    FORKED.store(true, Ordering::Relaxed);
}

/// `cuInit`.
pub fn initialize() -> Result<(), CuError> {
    static ONCE: Once = Once::new();
    if FORKED.load(Ordering::Relaxed) {
        return Err(CuError::NOT_INITIALIZED);
    }
    ONCE.call_once(|| {
        fault::faults(true);
        // SAFETY: in_child stays loaded with this library, which is never unloaded: the C library
        // keeps it for atfork.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        INITIALIZED.store(true, Ordering::Release);
    });
    Ok(())
}

/// The frame of an exported function: rejects calls before `cuInit` and after fork, and traces.
#[inline]
pub fn call(name: &str, body: impl FnOnce() -> Result<(), CuError>) -> i32 {
    let ready = INITIALIZED.load(Ordering::Acquire) && !FORKED.load(Ordering::Relaxed);
    let lost = || if LOST.load(Ordering::Acquire) { Err(CuError::ILLEGAL_ADDRESS) } else { Ok(()) };
    call_any_time(name, || {
        if !ready {
            return Err(CuError::NOT_INITIALIZED);
        }
        lost()?;
        // A call that was waiting detects the loss when it wakes up.
        body().and(lost())
    })
}

/// From now on, every call returns the error of an illegal access.
pub fn set_lost() {
    LOST.store(true, Ordering::Release);
}

/// Like [`call`], for functions that work before `cuInit`.
#[inline]
pub fn call_any_time(name: &str, body: impl FnOnce() -> Result<(), CuError>) -> i32 {
    let code = code(body());
    trace::returned(name, code);
    // Keeps the caller's frame on the stack: a tail call would hide the function in which a thread
    // blocks.
    black_box(code)
}

/// The positive number in an environment variable.
pub fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.trim().parse().ok()).filter(|value| *value > 0).unwrap_or(default)
}
