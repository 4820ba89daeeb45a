//! `MPI_Comm_idup`: a communicator that is ready when its request completes. Its identity is
//! determined when the call is made.

use std::{ffi::c_int, sync::atomic::Ordering};

use xpu_timer_proto::ring::comm;

use crate::{
    backends::mpi::{
        communicator::{create, known},
        library::library,
        operations::{VARIES, named_collective},
        pending_duplicates::{COUNT, MAX, PENDING, Pending},
        request::{Posted, posted},
    },
    interpose::hooked::After,
    runtime::{
        abi::{SUCCESS, Word},
        os::clock,
        recorder::{Recorder, communicator_id::hash, communicators::NewCommunicator},
    },
};

/// A call of `MPI_Comm_idup`.
pub struct Duplicating {
    posted: Posted,
    request: Word,
    place: Word,
    made: Option<(usize, u64)>,
}

/// Called before `MPI_Comm_idup`, which writes the new communicator to `place`.
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
        let new = NewCommunicator { id, size, rank, device: -1, parent: parent.id, created_ns: clock::now_ns() };
        let index = create(recorder, &new)?;
        parent.copy_remote_group_to(index);
        Some((index, id))
    });
    let what = named_collective(recorder, name, parent, VARIES);
    Duplicating { posted: posted(what, request, false), request, place, made }
}

impl After for Duplicating {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        self.posted.after(recorder, result);
        let (Some((index, id)), Some(library)) = (self.made, library()) else { return };
        if result != SUCCESS {
            return recorder.retire_comm(index);
        }
        // SAFETY: the caller's place for the request, which the library has written.
        let request = unsafe { library.abi.handle_at(self.request, 0) };
        let one = Pending { request, place: self.place, index, id };
        if request == 0 || request == library.abi.request_null {
            return one.is_there(recorder);
        }
        match PENDING.try_lock() {
            Ok(mut pending) if pending.len() < MAX => {
                pending.push(one);
                COUNT.store(pending.len(), Ordering::Relaxed);
            }
            _ => recorder.retire_comm(index),
        }
    }
}
