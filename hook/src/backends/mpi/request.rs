//! Requests: what a nonblocking call began becomes an operation when somebody waits for it; see [`crate::host::posted`].
//!
//! Waiting for a request that is not known is a host call without a meaning.

use std::{ffi::c_int, sync::atomic::Ordering};

use xpu_timer_proto::{
    ring::comm,
    v1::{Op, OpStatus},
};

use crate::{
    backends::{
        host_call::Running,
        mpi::{
            library::library,
            operations::next,
            pending_duplicates::{self, AwaitedDuplicates},
            polling,
        },
        request_table::{RequestOperation, forget, operations, recall, remember, remember_both},
    },
    interpose::hooked::After,
    runtime::{
        abi::{SUCCESS, Word},
        recorder::{NewOperation, Recorder, host_operations::named_host_call},
    },
};

/// So many requests of one call are shown.
pub const SHOWN: usize = 64;

/// A nonblocking call: when it returns, its request is known.
pub struct Posted {
    what: Option<NewOperation>,
    second: Option<NewOperation>,
    request: Word,
    persistent: bool,
}

/// Before a nonblocking call that runs `what` and writes its request to `request`; of a call whose meaning is not known, only that the
/// request is another one now.
pub fn posted(what: Option<NewOperation>, request: Word, persistent: bool) -> Posted {
    Posted { what, second: None, request, persistent }
}

/// The same for a call that runs two operations, of which the first leads.
pub fn posted_both([first, second]: [Option<NewOperation>; 2], request: Word) -> Posted {
    let (what, second) = if first.is_some() { (first, second) } else { (second, None) };
    Posted { what, second, request, persistent: false }
}

impl After for Posted {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        polling::interrupt(recorder);
        let Some(library) = library().filter(|_| result == SUCCESS) else { return };
        // SAFETY: the caller's place for the request, which the library has just written.
        let handle = unsafe { library.abi.handle_at(self.request, 0) };
        pending_duplicates::is_used_again(recorder, handle);
        if let Some(NewOperation { comm: Some(comm), op, seq, .. }) = &self.what
            && !self.persistent
            && !matches!(op, Op::Send | Op::Recv)
        {
            // The library runs it from now on, whoever waits for it later.
            recorder.comm_word(*comm, comm::STARTED).fetch_max(*seq, Ordering::Relaxed);
        }
        if handle == library.abi.request_null || handle == 0 {
            return;
        }
        let meaning = |what: &Option<NewOperation>| RequestOperation::of(what.as_ref()?, self.persistent);
        match (meaning(&self.what), meaning(&self.second)) {
            (Some(first), Some(second)) => remember_both(handle, &first, &second),
            (Some(one), None) => remember(handle, &one),
            // The request that had this handle before may have been done without a word of it here.
            (None, _) => forget(handle),
        }
    }
}

/// Which of its requests a call waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitFor {
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

/// The requests of a call, as they were before it: a library writes over those that are done.
pub struct Handles {
    handles: [u64; SHOWN],
    /// There was one that nobody knows.
    unknown: bool,
}

impl Handles {
    /// Those of an array of `count` requests.
    pub fn of(requests: Word, count: i32) -> Self {
        let mut own = Handles { handles: [0; SHOWN], unknown: false };
        let Some(library) = library() else { return Handles { unknown: true, ..own } };
        for index in 0..count.clamp(0, SHOWN as i32) as usize {
            // SAFETY: the caller's array of `count` requests.
            let handle = unsafe { library.abi.handle_at(requests, index) };
            if handle != library.abi.request_null && handle != 0 {
                match recall(handle) {
                    Some(_) => own.handles[index] = handle,
                    None => own.unknown = true,
                }
            }
        }
        own
    }

    fn known(&self) -> impl Iterator<Item = (usize, u64, RequestOperation)> {
        let handles = self.handles.iter().enumerate().filter(|(_, handle)| **handle != 0);
        handles.filter_map(|(index, handle)| Some((index, *handle, recall(*handle)?)))
    }

    /// The operations that are waited for.
    pub fn running(&self, recorder: &'static Recorder, name: &'static str) -> Running {
        let started = self.known().filter(|(.., meaning)| !meaning.is_inactive);
        let known = started.flat_map(|(_, handle, meaning)| operations(handle, &meaning));
        let known = known.fold(Running::new(recorder), |running, what| running.with(&what));
        if self.unknown { known.with(&named_host_call(recorder, name)) } else { known }
    }

    /// The call has returned with those done that it asked for.
    fn forget(&self, which: WaitFor) {
        forget_done(self.handles.into_iter().enumerate(), which);
    }
}

/// Of these requests, with their places in the array of a call that has returned, those are forgotten that are done; persistent ones are inactive.
pub fn forget_done(handles: impl Iterator<Item = (usize, u64)>, which: WaitFor) {
    let done = |index: usize| match which {
        WaitFor::All => true,
        // SAFETY: the caller's place for a number, which the library has just written.
        WaitFor::Any { index: place } if place != 0 => unsafe { *(place as *const c_int) == index as c_int },
        // Some of them are done, and which costs more to find out than it is worth: their handles are used again, and
        // an entry is replaced then.
        WaitFor::Any { .. } | WaitFor::Some => false,
    };
    for (index, handle) in handles.filter(|(_, handle)| *handle != 0) {
        match recall(handle).filter(|_| done(index)) {
            Some(meaning) if meaning.persistent => remember(handle, &meaning.inactive()),
            Some(_) => forget(handle),
            None => {}
        }
    }
}

/// A call that waits for requests.
pub struct Waiting {
    running: Running,
    handles: Handles,
    which: WaitFor,
    duplicates: AwaitedDuplicates,
}

/// Before a call that waits for `count` requests.
pub fn waiting(recorder: &'static Recorder, name: &'static str, requests: Word, count: i32, which: WaitFor) -> Waiting {
    polling::interrupt(recorder);
    let handles = Handles::of(requests, count);
    Waiting {
        running: handles.running(recorder, name),
        handles,
        which,
        duplicates: AwaitedDuplicates::of(requests, count),
    }
}

impl After for Waiting {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if result == SUCCESS {
            self.handles.forget(self.which);
            self.duplicates.completed(recorder);
        }
        match (result, self.which) {
            (SUCCESS, WaitFor::All) => self.running.end(OpStatus::Completed, 0),
            // The wait is over, which says nothing of the collectives that it was for.
            (SUCCESS, _) => self.running.leave(),
            (error, _) => self.running.end(OpStatus::Failed, error as u32),
        }
    }
}

/// Before `MPI_Start` and `MPI_Startall`: what was prepared begins once more.
pub fn restart(recorder: &'static Recorder, requests: Word, count: i32) {
    polling::interrupt(recorder);
    let Some(library) = library() else { return };
    for index in 0..count.max(0) as usize {
        // SAFETY: the caller's array of `count` requests.
        let handle = unsafe { library.abi.handle_at(requests, index) };
        let known = recall(handle).filter(|meaning| handle != 0 && meaning.persistent);
        let Some(meaning) = known else { continue };
        let number = |index: usize, communicator: u64| {
            // Another communicator may have its entry by now.
            let seq = (recorder.comm_id(index) == communicator).then(|| next(recorder, index))?;
            recorder.comm_word(index, comm::STARTED).fetch_max(seq, Ordering::Relaxed);
            Some(seq)
        };
        if let Some(restarted) = meaning.restarted(number) {
            remember(handle, &restarted);
        }
    }
}
