//! Duplicates of communicators whose request is not complete.

use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};

use crate::{
    backends::mpi::{communicator::ready, library::library},
    runtime::{abi::Word, recorder::Recorder},
};

/// A communicator whose request is not complete.
#[derive(Clone, Copy)]
pub struct Pending {
    pub request: u64,
    /// Where the library writes its handle.
    pub place: Word,
    pub index: usize,
    pub id: u64,
}

/// Maximum number of pending duplicates. Further ones get another identity when they are used.
pub const MAX: usize = 64;

pub static PENDING: Mutex<Vec<Pending>> = Mutex::new(Vec::new());

/// Number of pending duplicates, so that other waits need no lock.
pub static COUNT: AtomicUsize = AtomicUsize::new(0);

impl Pending {
    /// Whether the entry still belongs to this communicator. In a forked child, the table is a new
    /// one.
    fn is_its_own(&self, recorder: &'static Recorder) -> bool {
        recorder.comm_id(self.index) == self.id
    }

    /// The call that is returning has created the communicator.
    pub fn is_there(&self, recorder: &'static Recorder) {
        let Some(library) = library().filter(|_| self.is_its_own(recorder)) else { return };
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
pub fn is_used_again(recorder: &'static Recorder, request: u64) {
    if COUNT.load(Ordering::Relaxed) != 0
        && let Some(one) = take(|one| one.request == request)
        && one.is_its_own(recorder)
    {
        recorder.retire_comm(one.index);
    }
}

/// The pending duplicates among a call's requests, with their indices in its array.
pub struct AwaitedDuplicates {
    requests: Word,
    pending: Vec<(usize, Pending)>,
}

impl AwaitedDuplicates {
    /// An empty list.
    pub fn nothing() -> Self {
        AwaitedDuplicates { requests: 0, pending: Vec::new() }
    }

    /// Reads an array of `count` requests, before the call.
    #[inline]
    pub fn of(requests: Word, count: i32) -> Self {
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
    pub fn completed(&self, recorder: &'static Recorder) {
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
            one.is_there(recorder);
        }
    }
}
