//! Calls that test whether something has completed.

use std::{cell::Cell, ffi::c_int};

use crate::{
    backends::{
        host_call::Running,
        mpi::{
            library::library,
            pending_duplicates::AwaitedDuplicates,
            polling::{poll_successful, poll_unsuccessful},
            request::{Handles, MAX_RECORDED_REQUESTS, WaitFor, forget_done},
        },
    },
    interpose::hooked::After,
    runtime::{
        abi::{SUCCESS, Word},
        recorder::{NewOperation, Recorder},
    },
};

/// Where a call writes whether something has completed.
#[derive(Clone, Copy)]
pub enum CompletionFlag {
    /// A flag.
    Flag(Word),
    /// The number of completed requests.
    Count(Word),
}

impl CompletionFlag {
    fn is_done(self) -> bool {
        let (CompletionFlag::Flag(place) | CompletionFlag::Count(place)) = self;
        // SAFETY: null, or the caller's place for an int, which the library has written.
        unsafe { (place as *const c_int).as_ref() }.is_none_or(|answer| *answer != 0)
    }
}

/// Requests that are stored with the call, enough for most calls. Further ones are in the thread's
/// [`MORE_REQUESTS`].
const INLINE_REQUESTS: usize = 8;

thread_local! {
    /// The further requests of the thread's call. A nested call is not recorded.
    static MORE_REQUESTS: [Cell<u64>; MAX_RECORDED_REQUESTS - INLINE_REQUESTS] = const { [const { Cell::new(0) }; MAX_RECORDED_REQUESTS - INLINE_REQUESTS] };
}

/// A call that tests requests.
pub struct Testing {
    requests: Word,
    count: i32,
    /// The first requests before the call, which overwrites those that complete.
    before: [u64; INLINE_REQUESTS],
    which: WaitFor,
    done: CompletionFlag,
    duplicates: AwaitedDuplicates,
}

/// Called before a call that tests `count` requests.
#[inline]
pub fn testing(requests: Word, count: i32, which: WaitFor, done: CompletionFlag) -> Testing {
    let mut before = [0; INLINE_REQUESTS];
    if let Some(library) = library() {
        for (index, handle) in before.iter_mut().enumerate().take(count.max(0) as usize) {
            // SAFETY: the caller's array of `count` requests.
            *handle = unsafe { library.abi.handle_at(requests, index) };
        }
        if count as usize > INLINE_REQUESTS && count > 0 {
            MORE_REQUESTS.with(|further| {
                for (index, handle) in (INLINE_REQUESTS..count as usize).zip(further) {
                    // SAFETY: as above.
                    handle.set(unsafe { library.abi.handle_at(requests, index) });
                }
            });
        }
    }
    Testing { requests, count, before, which, done, duplicates: AwaitedDuplicates::of(requests, count) }
}

/// Called before a call that tests a request without changing it, or tests a part of a partitioned
/// receive.
pub fn testing_one(request: Word, flag: Word) -> Testing {
    let mut before = [0; INLINE_REQUESTS];
    before[0] = library().map_or(0, |library| library.abi.handle(request));
    Testing {
        requests: 0,
        count: 1,
        before,
        which: WaitFor::Some,
        done: CompletionFlag::Flag(flag),
        duplicates: AwaitedDuplicates::nothing(),
    }
}

impl Testing {
    #[cold]
    fn running(&self, recorder: &'static Recorder) -> Running {
        // No request has completed, so the requests are unchanged. The low half of a word comes
        // first in memory, where a handle has 32 bits.
        let requests = if self.requests == 0 { self.before.as_ptr() as Word } else { self.requests };
        Handles::of(requests, self.count).running(recorder, "MPI_Test")
    }

    fn forget(&self, recorder: &'static Recorder) {
        forget_done(self.before.into_iter().enumerate(), self.which);
        let further = usize::try_from(self.count).unwrap_or(0).saturating_sub(INLINE_REQUESTS);
        if further > 0 {
            MORE_REQUESTS.with(|kept| {
                forget_done((INLINE_REQUESTS..).zip(kept.iter().take(further).map(Cell::get)), self.which)
            });
        }
        self.duplicates.completed(recorder);
    }
}

impl After for Testing {
    #[inline]
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if result != SUCCESS || self.done.is_done() {
            if result == SUCCESS {
                self.forget(recorder);
            }
            poll_successful(recorder, result == SUCCESS && self.which == WaitFor::All);
        } else {
            poll_unsuccessful(recorder, || self.running(recorder));
        }
    }
}

/// A call that tests something other than a request.
pub struct Probing<What> {
    flag: Word,
    what: What,
}

/// Called before a call that tests for `what` and writes the result to `flag`.
pub fn probing<What: Fn(&'static Recorder) -> Option<NewOperation>>(flag: Word, what: What) -> Probing<What> {
    Probing { flag, what }
}

impl<What: Fn(&'static Recorder) -> Option<NewOperation>> After for Probing<What> {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if result != SUCCESS || CompletionFlag::Flag(self.flag).is_done() {
            poll_successful(recorder, result == SUCCESS);
        } else {
            poll_unsuccessful(recorder, || {
                let what = (self.what)(recorder);
                what.iter().fold(Running::new(recorder), |running, what| running.with(what))
            });
        }
    }
}
