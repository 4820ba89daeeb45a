//! Requests. The operation of a nonblocking call is recorded when a thread waits for its request;
//! see [`crate::backends::request_table`].
//!
//! A wait for an unknown request is recorded as a host call.

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

/// Maximum number of requests of a call that are recorded.
pub const MAX_RECORDED_REQUESTS: usize = 64;

/// A nonblocking call. Its request is known when it returns.
pub struct Posted {
    what: Option<NewOperation>,
    second: Option<NewOperation>,
    request: Word,
    persistent: bool,
}

/// Called before a nonblocking call that executes `what` and writes its request to `request`.
/// Without `what`, only the previous meaning of the handle is forgotten.
pub fn posted(what: Option<NewOperation>, request: Word, persistent: bool) -> Posted {
    Posted { what, second: None, request, persistent }
}

/// Like [`posted`], for a call that executes two operations. The first one is the leader.
pub fn posted_both([first, second]: [Option<NewOperation>; 2], request: Word) -> Posted {
    let (what, second) = if first.is_some() { (first, second) } else { (second, None) };
    Posted { what, second, request, persistent: false }
}

impl After for Posted {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        polling::interrupt(recorder);
        let Some(library) = library().filter(|_| result == SUCCESS) else { return };
        // SAFETY: the caller's place for the request, which the library has written.
        let handle = unsafe { library.abi.handle_at(self.request, 0) };
        pending_duplicates::is_used_again(recorder, handle);
        if let Some(NewOperation { comm: Some(comm), op, seq, .. }) = &self.what
            && !self.persistent
            && !matches!(op, Op::Send | Op::Recv)
        {
            // The library executes it from now on, whichever thread waits for it later.
            recorder.comm_word(*comm, comm::STARTED).fetch_max(*seq, Ordering::Relaxed);
        }
        if handle == library.abi.request_null || handle == 0 {
            return;
        }
        let operation = |what: &Option<NewOperation>| RequestOperation::of(what.as_ref()?, self.persistent);
        match (operation(&self.what), operation(&self.second)) {
            (Some(first), Some(second)) => remember_both(handle, &first, &second),
            (Some(one), None) => remember(handle, &one),
            // The previous request with this handle may have completed unseen.
            (None, _) => forget(handle),
        }
    }
}

/// Which of its requests a call waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitFor {
    /// All requests.
    All,
    /// One request, whose index the call returns.
    Any {
        /// Where the call writes the index.
        index: Word,
    },
    /// At least one request.
    Some,
}

/// The requests of a call before it. The library overwrites those that complete.
pub struct Handles {
    handles: [u64; MAX_RECORDED_REQUESTS],
    /// At least one request is unknown.
    unknown: bool,
}

impl Handles {
    /// Reads an array of `count` requests.
    pub fn of(requests: Word, count: i32) -> Self {
        let mut own = Handles { handles: [0; MAX_RECORDED_REQUESTS], unknown: false };
        let Some(library) = library() else { return Handles { unknown: true, ..own } };
        for index in 0..count.clamp(0, MAX_RECORDED_REQUESTS as i32) as usize {
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

    /// The operations that the call waits for.
    pub fn running(&self, recorder: &'static Recorder, name: &'static str) -> Running {
        let started = self.known().filter(|(.., operation)| !operation.is_inactive);
        let known = started.flat_map(|(_, handle, operation)| operations(handle, &operation));
        let known = known.fold(Running::new(recorder), |running, what| running.with(&what));
        if self.unknown { known.with(&named_host_call(recorder, name)) } else { known }
    }

    /// Called after the call has returned.
    fn forget(&self, which: WaitFor) {
        forget_done(self.handles.into_iter().enumerate(), which);
    }
}

/// Forgets the completed requests of a call that has returned, given with their indices in its
/// array. Persistent requests become inactive.
pub fn forget_done(handles: impl Iterator<Item = (usize, u64)>, which: WaitFor) {
    let done = |index: usize| match which {
        WaitFor::All => true,
        // SAFETY: the caller's place for the index, which the library has written.
        WaitFor::Any { index: place } if place != 0 => unsafe { *(place as *const c_int) == index as c_int },
        // Some are complete. It is not worth the cost to find out which: their entries are replaced
        // when the handles are used again.
        WaitFor::Any { .. } | WaitFor::Some => false,
    };
    for (index, handle) in handles.filter(|(_, handle)| *handle != 0) {
        match recall(handle).filter(|_| done(index)) {
            Some(operation) if operation.persistent => remember(handle, &operation.inactive()),
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

/// Called before a call that waits for `count` requests.
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
            // The wait is over, but the collectives may not be complete.
            (SUCCESS, _) => self.running.leave(),
            (error, _) => self.running.end(OpStatus::Failed, error as u32),
        }
    }
}

/// Called before `MPI_Start` and `MPI_Startall`, which start persistent requests again.
pub fn restart(recorder: &'static Recorder, requests: Word, count: i32) {
    polling::interrupt(recorder);
    let Some(library) = library() else { return };
    for index in 0..count.max(0) as usize {
        // SAFETY: the caller's array of `count` requests.
        let handle = unsafe { library.abi.handle_at(requests, index) };
        let known = recall(handle).filter(|operation| handle != 0 && operation.persistent);
        let Some(operation) = known else { continue };
        let number = |index: usize, communicator: u64| {
            // The entry may belong to another communicator by now.
            let seq = (recorder.comm_id(index) == communicator).then(|| next(recorder, index))?;
            recorder.comm_word(index, comm::STARTED).fetch_max(seq, Ordering::Relaxed);
            Some(seq)
        };
        if let Some(restarted) = operation.restarted(number) {
            remember(handle, &restarted);
        }
    }
}
