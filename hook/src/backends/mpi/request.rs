//! Requests. The operation of a nonblocking call is recorded when a thread waits for its request;
//! see [`crate::backends::request_table`].
//!
//! A wait for an unknown request is recorded as a host call. The request of a duplicated
//! communicator completes the duplicate.

use std::{
    ffi::c_int,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use xpu_timer_proto::{
    ring::comm,
    v1::{Op, OpStatus},
};

use crate::{
    backends::{
        host_call::BlockingCall,
        mpi::{communicator::ready, library::library, operations::next, polling},
        request_table::{RequestOperation, forget, operations, recall, remember, remember_both},
    },
    interpose::hooked::AfterCall,
    runtime::{
        abi::{SUCCESS, Word},
        recorder::{NewOperation, Recorder, host_operations::named_host_call},
    },
};

/// Maximum number of requests of a call that are recorded.
pub(crate) const MAX_RECORDED_REQUESTS: usize = 64;

/// A nonblocking call. Its request is known when it returns.
pub(crate) struct NonblockingCall {
    what: Option<NewOperation>,
    second: Option<NewOperation>,
    request: Word,
    persistent: bool,
}

/// Called before a nonblocking call that executes `what` and writes its request to `request`.
/// Without `what`, only the previous meaning of the handle is forgotten.
pub(crate) fn nonblocking(what: Option<NewOperation>, request: Word, persistent: bool) -> NonblockingCall {
    NonblockingCall { what, second: None, request, persistent }
}

/// Like [`nonblocking`], for a call that executes two operations. The first one is the leader.
pub(crate) fn nonblocking_pair([first, second]: [Option<NewOperation>; 2], request: Word) -> NonblockingCall {
    let (what, second) = if first.is_some() { (first, second) } else { (second, None) };
    NonblockingCall { what, second, request, persistent: false }
}

impl AfterCall for NonblockingCall {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        polling::interrupt(recorder);
        let Some(library) = library().filter(|_| result == SUCCESS) else { return };
        // SAFETY: the caller's place for the request, which the library has written.
        let handle = unsafe { library.abi.handle_at(self.request, 0) };
        is_used_again(recorder, handle);
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

/// The requests that a call waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitFor {
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
pub(crate) struct Handles {
    handles: [u64; MAX_RECORDED_REQUESTS],
    /// At least one request is unknown.
    unknown: bool,
}

impl Handles {
    /// Reads an array of `count` requests.
    pub(crate) fn of(requests: Word, count: i32) -> Self {
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
    pub(crate) fn running(&self, recorder: &'static Recorder, name: &'static str) -> BlockingCall {
        let started = self.known().filter(|(.., operation)| !operation.is_inactive);
        let known = started.flat_map(|(_, handle, operation)| operations(handle, &operation));
        let known = known.fold(BlockingCall::new(recorder), |running, what| running.with(&what));
        if self.unknown { known.with(&named_host_call(recorder, name)) } else { known }
    }

    /// Called after the call has returned.
    fn forget(&self, which: WaitFor) {
        forget_done(self.handles.into_iter().enumerate(), which);
    }
}

/// Forgets the completed requests of a call that has returned, given with their indices in its
/// array. Persistent requests become inactive.
pub(crate) fn forget_done(handles: impl Iterator<Item = (usize, u64)>, which: WaitFor) {
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
pub(crate) struct WaitCall {
    running: BlockingCall,
    handles: Handles,
    which: WaitFor,
    duplicates: AwaitedDuplicates,
}

/// Called before a call that waits for `count` requests.
pub(crate) fn waiting(
    recorder: &'static Recorder,
    name: &'static str,
    requests: Word,
    count: i32,
    which: WaitFor,
) -> WaitCall {
    polling::interrupt(recorder);
    let handles = Handles::of(requests, count);
    WaitCall {
        running: handles.running(recorder, name),
        handles,
        which,
        duplicates: AwaitedDuplicates::of(requests, count),
    }
}

impl AfterCall for WaitCall {
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
pub(crate) fn restart(recorder: &'static Recorder, requests: Word, count: i32) {
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

/// A communicator whose request is not complete.
#[derive(Clone, Copy)]
pub(crate) struct Pending {
    pub request: u64,
    /// Where the library writes its handle.
    pub place: Word,
    pub index: usize,
    pub id: u64,
}

/// Maximum number of pending duplicates. Further ones get another identity when they are used.
pub(crate) const MAX: usize = 64;

pub(crate) static PENDING: Mutex<Vec<Pending>> = Mutex::new(Vec::new());

/// Number of pending duplicates, so that other waits need no lock.
pub(crate) static COUNT: AtomicUsize = AtomicUsize::new(0);

impl Pending {
    /// Whether the entry still belongs to this communicator. In a forked child, the table is a new
    /// one.
    fn belongs_to(&self, recorder: &'static Recorder) -> bool {
        recorder.comm_id(self.index) == self.id
    }

    /// The call that is returning has created the communicator.
    pub(crate) fn mark_created(&self, recorder: &'static Recorder) {
        let Some(library) = library().filter(|_| self.belongs_to(recorder)) else { return };
        // SAFETY: the host's place for the communicator, which must stay valid until the request
        // completes, which is now.
        match unsafe { library.abi.handle_at(self.place, 0) } {
            handle if handle == 0 || handle == library.abi.comm_null => recorder.retire_comm(self.index),
            handle => ready(recorder, self.index, handle as usize),
        }
    }
}

/// Removes a pending duplicate.
fn take(which: impl FnMut(&Pending) -> bool) -> Option<Pending> {
    let mut pending = PENDING.try_lock().ok()?;
    let at = pending.iter().position(which)?;
    let one = pending.swap_remove(at);
    COUNT.store(pending.len(), Ordering::Relaxed);
    Some(one)
}

/// The library has returned this handle for a new request, so the earlier request with this handle
/// completed unseen. The place for its communicator may no longer exist.
#[inline]
pub(crate) fn is_used_again(recorder: &'static Recorder, request: u64) {
    if COUNT.load(Ordering::Relaxed) != 0
        && let Some(one) = take(|one| one.request == request)
        && one.belongs_to(recorder)
    {
        recorder.retire_comm(one.index);
    }
}

/// The pending duplicates among a call's requests, with their indices in its array.
pub(crate) struct AwaitedDuplicates {
    requests: Word,
    pending: Vec<(usize, Pending)>,
}

impl AwaitedDuplicates {
    /// An empty list.
    pub(crate) fn nothing() -> Self {
        AwaitedDuplicates { requests: 0, pending: Vec::new() }
    }

    /// Reads an array of `count` requests, before the call.
    #[inline]
    pub(crate) fn of(requests: Word, count: i32) -> Self {
        if COUNT.load(Ordering::Relaxed) == 0 { Self::nothing() } else { Self::find(requests, count) }
    }

    #[cold]
    fn find(requests: Word, count: i32) -> Self {
        let mut asked = AwaitedDuplicates { requests, pending: Vec::new() };
        if let (Some(library), Ok(pending)) = (library(), PENDING.try_lock()) {
            // SAFETY: the caller's array of `count` requests.
            let handle = |index| unsafe { library.abi.handle_at(requests, index) };
            let known = |index| {
                let request = handle(index);
                Some((index, *pending.iter().find(|one| one.request == request)?))
            };
            asked.pending.extend((0..usize::try_from(count).unwrap_or(0)).filter_map(known));
        }
        asked
    }

    /// Called after the call has returned and has overwritten the requests that are complete.
    #[inline]
    pub(crate) fn completed(&self, recorder: &'static Recorder) {
        for (index, one) in &self.pending {
            self.look_at(recorder, *index, one);
        }
    }

    #[cold]
    fn look_at(&self, recorder: &'static Recorder, index: usize, one: &Pending) {
        let Some(library) = library() else { return };
        // SAFETY: the caller's array, which the library may write to until the call returns.
        let now = unsafe { library.abi.handle_at(self.requests, index) };
        // Another thread may have created a request with the same handle meanwhile.
        if now == library.abi.request_null && take(|other| (other.request, other.id) == (one.request, one.id)).is_some()
        {
            one.mark_created(recorder);
        }
    }
}
