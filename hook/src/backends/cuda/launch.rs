//! Kernel and graph launches. Each counts exactly once, whichever layers see it.
//!
//! The driver layer counts, because every launch passes it and it knows the kernel. The runtime
//! layer counts launches that the driver layer did not see. A launch inside a collective is part of
//! that collective, and only its stream is recorded.

use std::{ffi::c_int, sync::atomic::Ordering};

use xpu_timer_proto::{
    ring::header,
    v1::{Op, OpKind},
};

use crate::{
    backends::{
        bracket::{self, OpenOperation},
        cuda::graphs,
    },
    interpose::hooked::After,
    runtime::{
        lifecycle::config::Bracket,
        os::{
            clock,
            thread_state::{self, IN_BLAS, IN_COLLECTIVES, ThreadState},
        },
        recorder::{NewOperation, Recorder},
    },
};

/// What is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// A kernel, by its handle.
    Kernel(usize),
    /// An instantiated graph.
    Graph(usize),
}

/// A launch on the driver layer. One function for all wrappers with everything inlined into it,
/// because there are dozens of wrappers.
#[inline(never)]
pub fn by_driver(recorder: &'static Recorder, inside: u8, what: What, stream: usize) -> Option<OpenOperation> {
    let thread = thread_state::current();
    thread.seen_by_driver.set(true);
    if inside & IN_COLLECTIVES != 0 {
        recorder.on_stream(thread, stream, kernel(what), clock::coarse_now_ns());
        bracket::note_kernel(recorder, stream, kernel(what));
        return None;
    }
    count(recorder, thread, inside, what, stream)
}

/// A launch on the runtime layer.
#[inline]
pub fn by_runtime(what: What, stream: usize) -> ByRuntime {
    thread_state::with(|thread| thread.seen_by_driver.set(false));
    ByRuntime { what, stream }
}

/// A runtime launch. The driver layer may have seen it or not.
pub struct ByRuntime {
    what: What,
    stream: usize,
}

impl After for ByRuntime {
    #[inline]
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if result == 0 && !thread_state::with(|thread| thread.seen_by_driver.get()) {
            // The host stub is not a driver function and has no name to request, so its handle is
            // not recorded.
            let now = clock::coarse_now_ns();
            let thread = thread_state::current();
            let counter = if matches!(self.what, What::Kernel(_)) { header::KERNELS } else { header::GRAPHS };
            recorder.launched(thread, counter, now);
            recorder.on_stream(thread, self.stream, 0, now);
        }
    }
}

fn kernel(what: What) -> u64 {
    match what {
        What::Kernel(function) => function as u64,
        What::Graph(_) => 0,
    }
}

#[inline(always)]
fn count(
    recorder: &'static Recorder,
    thread: &ThreadState,
    inside: u8,
    what: What,
    stream: usize,
) -> Option<OpenOperation> {
    let now = clock::coarse_now_ns();
    recorder.on_stream(thread, stream, kernel(what), now);
    let mode = recorder.bracket.load(Ordering::Relaxed);
    match what {
        What::Kernel(function) => {
            recorder.launched(thread, header::KERNELS, now);
            // The kernels of a matrix product are timed together, as the product.
            if mode != Bracket::All as u32 || inside & IN_BLAS != 0 {
                return None;
            }
            bracketed(
                recorder,
                stream,
                NewOperation { function: function as u64, ..NewOperation::new(OpKind::Kernel, Op::Kernel) },
            )
        }
        What::Graph(exec) => {
            recorder.launched(thread, header::GRAPHS, now);
            graphs::launch(recorder, exec, stream)
        }
    }
}

/// A captured launch is not executed, so it gets no slot. The launch of its graph does.
#[inline(never)]
fn bracketed(recorder: &'static Recorder, stream: usize, what: NewOperation) -> Option<OpenOperation> {
    if bracket::is_captured(stream) {
        return None;
    }
    bracket::open(recorder, &NewOperation { stream, ..what })
}
