//! Requests: what a nonblocking call began becomes an operation when somebody waits for it; see [`crate::host::posted`].
//!
//! Waiting for a request that is not known is a host call without a meaning.

use std::{ffi::c_int, sync::atomic::Ordering};

use xpu_timer_proto::{
    ring::comm,
    v1::{Op, OpStatus},
};

use super::{Word, library::library};
use crate::{
    abi::SUCCESS,
    hooked::After,
    host::{
        open::{Running, named},
        posted::{Meaning, forget, recall, remember},
    },
    recorder::{Begin, Recorder},
};

/// So many requests of one call are shown.
const SHOWN: usize = 64;

/// A nonblocking call: when it returns, its request is known.
pub struct Posted {
    what: Option<Begin>,
    request: Word,
    persistent: bool,
}

/// Before a nonblocking call that runs `what` and writes its request to `request`.
pub fn posted(what: Option<Begin>, request: Word, persistent: bool) -> Posted {
    Posted { what, request, persistent }
}

impl After for Posted {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        let (Some(what), Some(library)) = (self.what, library()) else { return };
        let Some(comm) = what.comm.filter(|_| result == SUCCESS) else { return };
        if !matches!(what.op, Op::Send | Op::Recv) {
            // The library runs it from now on, whoever waits for it later.
            recorder.comm_word(comm, comm::STARTED).fetch_max(what.seq, Ordering::Relaxed);
        }
        // SAFETY: the caller's place for the request, which the library has just written.
        let handle = unsafe { library.abi.handle_at(self.request, 0) };
        if handle == library.abi.request_null || handle == 0 {
            return;
        }
        if let Some(meaning) = Meaning::of(&what, self.persistent) {
            remember(handle, &meaning);
        }
    }
}

/// Which of its requests a call waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum For {
    /// All of them.
    All,
    /// One of them; it returns which.
    Any {
        /// Where it writes its number.
        index: Word,
    },
    /// At least one.
    Some,
}

/// A call that waits for requests.
pub struct Waiting {
    running: Running,
    handles: [u64; SHOWN],
    which: For,
}

/// Before a call that waits for `count` requests.
pub fn waiting(recorder: &'static Recorder, name: &'static str, requests: Word, count: i32, which: For) -> Waiting {
    let mut waiting = Waiting { running: Running::new(recorder), handles: [0; SHOWN], which };
    let Some(library) = library() else {
        waiting.running = waiting.running.with(&named(recorder, name));
        return waiting;
    };
    let mut unknown = false;
    for index in 0..count.clamp(0, SHOWN as i32) as usize {
        // SAFETY: the caller's array of `count` requests.
        let handle = unsafe { library.abi.handle_at(requests, index) };
        if handle == library.abi.request_null || handle == 0 {
            continue;
        }
        let Some(meaning) = recall(handle) else {
            unknown = true;
            continue;
        };
        waiting.handles[index] = handle;
        waiting.running = waiting.running.with(&meaning.begin());
    }
    if unknown {
        waiting.running = waiting.running.with(&named(recorder, name));
    }
    waiting
}

impl After for Waiting {
    fn after(self, _: &'static Recorder, result: c_int) {
        let done = |index: usize| match self.which {
            For::All => true,
            // SAFETY: the caller's place for a number, which the library has just written.
            For::Any { index: place } if place != 0 => unsafe { *(place as *const c_int) == index as c_int },
            // Some of them are done, and which costs more to find out than it is worth: their handles are used again, and
            // an entry is replaced then.
            For::Any { .. } | For::Some => false,
        };
        for (index, handle) in self.handles.iter().enumerate().filter(|(_, handle)| **handle != 0) {
            let over = result == SUCCESS && done(index);
            if over && recall(*handle).is_some_and(|meaning| !meaning.persistent) {
                forget(*handle);
            }
        }
        match (result, self.which) {
            (SUCCESS, For::All) => self.running.end(OpStatus::Completed, 0),
            // The wait is over, which says nothing of the collectives that it was for.
            (SUCCESS, _) => self.running.leave(),
            (error, _) => self.running.end(OpStatus::Failed, error as u32),
        }
    }
}
