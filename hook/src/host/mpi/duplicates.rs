//! `MPI_Comm_idup`: a communicator that is there when its request is done. Its identity is known when the call is made.

use std::{ffi::c_int, sync::Mutex};

use xpu_timer_proto::ring::comm;

use super::{
    VARIES, Word,
    communicator::{create, known, ready},
    library::library,
    named_collective,
    request::{Posted, posted},
};
use crate::{
    abi::SUCCESS,
    comms::{NewComm, hash},
    hooked::After,
    recorder::Recorder,
    sys,
};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A communicator whose request is not done.
#[derive(Clone, Copy)]
struct Pending {
    request: u64,
    /// Where the library writes its handle.
    place: Word,
    index: usize,
    id: u64,
}

/// So many are remembered; further ones get an identity of their own when they are used.
const MOST: usize = 64;
static PENDING: Mutex<Vec<Pending>> = Mutex::new(Vec::new());
/// How many there are, so that who waits for something else takes no lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A call of `MPI_Comm_idup`.
pub struct Duplicating {
    posted: Posted,
    request: Word,
    place: Word,
    made: Option<(usize, u64)>,
}

/// Before it. `place` is where the library writes the new communicator.
pub fn duplicating(
    recorder: &'static Recorder,
    name: &'static str,
    parent: Word,
    place: Word,
    request: Word,
) -> Duplicating {
    let made = known(recorder, parent).and_then(|parent| {
        let number = recorder.next_split(parent.index);
        let size_rank = recorder.comm_word(parent.index, comm::SIZE_RANK).load(Ordering::Relaxed);
        let (size, rank) = (size_rank as u32, (size_rank >> 32) as i32);
        let id = hash(&[&parent.id.to_le_bytes(), b"duplicate", &number.to_le_bytes()]);
        let new = NewComm { id, size, rank, device: -1, parent: parent.id, created_ns: sys::now_ns() };
        let index = create(recorder, &new)?;
        parent.pass_on(index);
        Some((index, id))
    });
    let what = named_collective(recorder, name, parent, VARIES);
    Duplicating { posted: posted(what, request, false), request, place, made }
}

impl After for Duplicating {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        self.posted.after(recorder, result);
        let (Some((index, id)), Some(library)) = (self.made, library()) else { return };
        // SAFETY: the caller's place for the request, which the library has just written.
        let request = unsafe { library.abi.handle_at(self.request, 0) };
        let Ok(mut pending) = PENDING.try_lock() else { return recorder.retire_comm(index) };
        if result != SUCCESS || pending.len() == MOST {
            return recorder.retire_comm(index);
        }
        pending.push(Pending { request, place: self.place, index, id });
        COUNT.store(pending.len(), Ordering::Relaxed);
    }
}

/// A request is done: if it was one of these, its communicator is there.
#[inline]
pub fn completed(recorder: &'static Recorder, request: u64) {
    if COUNT.load(Ordering::Relaxed) != 0 {
        find(recorder, request);
    }
}

#[cold]
fn find(recorder: &'static Recorder, request: u64) {
    let Ok(mut pending) = PENDING.try_lock() else { return };
    let Some(at) = pending.iter().position(|one| one.request == request) else { return };
    let one = pending.swap_remove(at);
    COUNT.store(pending.len(), Ordering::Relaxed);
    let Some(library) = library() else { return };
    // Somebody else's by now, when the table was made anew in a forked child.
    if recorder.comm_id(one.index) == one.id {
        // SAFETY: the host's place for the communicator, which has to stay until the request is done.
        ready(recorder, one.index, unsafe { library.abi.handle_at(one.place, 0) as usize });
    }
}
