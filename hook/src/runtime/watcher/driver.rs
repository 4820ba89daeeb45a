//! The watcher's calls of the driver. Each is stamped, because it may block forever.

use std::sync::atomic::Ordering;

use xpu_timer_proto::ring::header;

use crate::runtime::{
    abi::CONTEXT_IS_DESTROYED,
    contexts,
    device::{Code, Device, device},
    lifecycle::exit,
    os::clock,
    recorder::Recorder,
};

/// Indices into [`xpu_timer_proto::ring::WATCHER_CALLS`].
pub(crate) mod call {
    pub(crate) const SET_CURRENT: u64 = 1;
    pub(crate) const EVENT_QUERY: u64 = 2;
    pub(crate) const EVENT_ELAPSED: u64 = 3;
    pub(crate) const EXCHANGE_CAPTURE_MODE: u64 = 6;
    pub(crate) const EVENT_CREATE: u64 = 7;
    pub(crate) const EVENT_DESTROY: u64 = 8;
    pub(crate) const EVENT_RECORD: u64 = 9;
    pub(crate) const STREAM_CREATE: u64 = 10;
}

/// The driver, as the watcher's thread calls it.
pub(crate) struct Driver {
    recorder: &'static Recorder,
    /// The thread's current context.
    context: usize,
    /// The thread's capture mode is relaxed.
    relaxed: bool,
}

impl Driver {
    /// Without a context.
    pub(crate) fn new(recorder: &'static Recorder) -> Self {
        Driver { recorder, context: 0, relaxed: false }
    }

    /// Another thread continues: the driver's state of the thread is unknown.
    pub(crate) fn new_thread(&mut self) {
        self.context = 0;
        self.relaxed = false;
    }

    /// Makes a call in a context, stamped before it begins. `None` when no call may be made
    /// now; an error when the context cannot be made current.
    pub(crate) fn call<R>(
        &mut self,
        context: usize,
        what: u64,
        function: impl FnOnce(&Device) -> R,
    ) -> Option<Result<R, Code>> {
        let device = device()?;
        if !self.relaxed {
            // Otherwise a query would break another thread's capture.
            if let Err(code) = self.stamped(call::EXCHANGE_CAPTURE_MODE, 0, || device.relax_capture())?.flatten() {
                return Some(Err(code));
            }
            self.relaxed = true;
        }
        if context != 0 && context != self.context {
            if let Err(code) = self.stamped(call::SET_CURRENT, context, || device.make_current(context))?.flatten() {
                return Some(Err(code));
            }
            self.context = context;
        }
        self.stamped(what, context, || function(device))
    }

    /// Makes a driver call, unless no call may be made now. An error when `context` has been
    /// destroyed; 0 for a call that needs none.
    fn stamped<R>(&self, what: u64, context: usize, function: impl FnOnce() -> R) -> Option<Result<R, Code>> {
        let [call, since] =
            [header::WATCHER_CALL, header::WATCHER_SINCE_NS].map(|word| self.recorder.ring.header(word));
        since.store(clock::now_ns(), Ordering::Relaxed);
        // The exit handler, and a thread that destroys a context, set a flag and then read the
        // stamp; this stamps and then reads the flags. At least one of them sees the other.
        call.store(what, Ordering::SeqCst);
        let may_call = !exit::is_ending() && self.recorder.destroying.load(Ordering::SeqCst) == 0;
        let result =
            may_call.then(|| if contexts::exists(context) { Ok(function()) } else { Err(CONTEXT_IS_DESTROYED) });
        call.store(0, Ordering::SeqCst);
        since.store(0, Ordering::Relaxed);
        result
    }
}
