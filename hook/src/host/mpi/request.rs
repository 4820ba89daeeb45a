//! Requests: what a nonblocking call began, until somebody waits for it.
//!
//! A nonblocking call cannot hang, and its request may rightly stay incomplete for as long as the job runs, such as a receive
//! that is only there to be told to stop. So it becomes an operation when a thread waits for it. The table is a cache: an entry
//! that meets another one in its place replaces it, and waiting for a request that is not in it is a host call without a meaning.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicU64, Ordering},
};

use xpu_timer_proto::{
    ring::comm,
    v1::{DataType, Op, OpKind, OpStatus},
};

use super::{Word, library::library};
use crate::{
    abi::SUCCESS,
    hooked::After,
    host::open::{Running, named},
    recorder::{Begin, Recorder},
};

/// Places of the table; a power of two.
const PLACES: usize = 4096;
/// So many requests of one call are shown.
const SHOWN: usize = 64;
/// Key of an entry that is being written.
const BUSY: u64 = u64::MAX;

/// An entry: the request's handle, then what [`Entry::pack`] makes.
struct Entry {
    key: AtomicU64,
    words: [AtomicU64; 5],
}

static TABLE: [Entry; PLACES] =
    [const { Entry { key: AtomicU64::new(0), words: [const { AtomicU64::new(0) }; 5] } }; PLACES];

fn place(handle: u64) -> &'static Entry {
    &TABLE[(handle.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 52) as usize % PLACES]
}

/// What a request stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Meaning {
    op: Op,
    dtype: DataType,
    comm: usize,
    communicator: u64,
    seq: u64,
    count: u64,
    peer: i32,
    /// It can be started again and again.
    persistent: bool,
}

impl Entry {
    fn write(&self, handle: u64, meaning: &Meaning) {
        let old = self.key.load(Ordering::Relaxed);
        if old == BUSY || self.key.compare_exchange(old, BUSY, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return;
        }
        let small = meaning.op as u64
            | (meaning.dtype as u64) << 8
            | u64::from(meaning.persistent) << 16
            | u64::from(meaning.peer as u32) << 32;
        let words = [small, meaning.comm as u64, meaning.communicator, meaning.seq, meaning.count];
        for (place, word) in self.words.iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
        self.key.store(handle, Ordering::Release);
    }

    fn read(&self, handle: u64) -> Option<Meaning> {
        if self.key.load(Ordering::Acquire) != handle {
            return None;
        }
        let [small, comm, communicator, seq, count] = self.words.each_ref().map(|word| word.load(Ordering::Relaxed));
        std::sync::atomic::fence(Ordering::Acquire);
        (self.key.load(Ordering::Relaxed) == handle).then(|| Meaning {
            op: Op::try_from(i32::from(small as u8)).unwrap_or_default(),
            dtype: DataType::try_from(i32::from((small >> 8) as u8)).unwrap_or_default(),
            comm: comm as usize,
            communicator,
            seq,
            count,
            peer: (small >> 32) as i32,
            persistent: small & 1 << 16 != 0,
        })
    }

    fn forget(&self, handle: u64) {
        let _ = self.key.compare_exchange(handle, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

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
        place(handle).write(
            handle,
            &Meaning {
                op: what.op,
                dtype: what.dtype,
                comm,
                communicator: what.communicator,
                seq: what.seq,
                count: what.count,
                peer: what.peer,
                persistent: self.persistent,
            },
        );
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
        let Some(meaning) = place(handle).read(handle) else {
            unknown = true;
            continue;
        };
        waiting.handles[index] = handle;
        waiting.running = waiting.running.with(&Begin {
            dtype: meaning.dtype,
            comm: Some(meaning.comm),
            communicator: meaning.communicator,
            seq: meaning.seq,
            count: meaning.count,
            peer: meaning.peer,
            ..Begin::new(OpKind::Collective, meaning.op)
        });
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
            if over && place(*handle).read(*handle).is_some_and(|meaning| !meaning.persistent) {
                place(*handle).forget(*handle);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_known_until_it_is_forgotten_or_replaced() {
        let meaning = Meaning {
            op: Op::Recv,
            dtype: DataType::Float64,
            comm: 3,
            communicator: 0xfeed,
            seq: 1 << 40,
            count: 12,
            peer: -1,
            persistent: true,
        };
        let entry = place(0x7000);
        entry.write(0x7000, &meaning);
        assert_eq!(entry.read(0x7000), Some(meaning));
        assert_eq!(entry.read(0x7001), None);
        entry.write(0x8000, &Meaning { persistent: false, ..meaning });
        assert_eq!(entry.read(0x7000), None);
        entry.forget(0x7000);
        assert!(entry.read(0x8000).is_some());
        entry.forget(0x8000);
        assert_eq!(entry.read(0x8000), None);
    }
}
