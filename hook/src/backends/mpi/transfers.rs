//! Point-to-point messages, and the functions that wait for requests or test them.

use std::{cell::Cell, ffi::c_int};

use xpu_timer_proto::v1::Op;

use crate::{
    backends::{
        host_call::BlockingCall,
        mpi::{
            library::library,
            nonblocking::nonblocking_exchange,
            operations::{ERROR, Size, VARIES, blocking, exchange, int, transfer},
            polling::{poll_successful, poll_unsuccessful},
            request::{AwaitedDuplicates, Handles, MAX_RECORDED_REQUESTS, WaitFor, forget_done, nonblocking, waiting},
        },
    },
    interpose::hooked::{AfterCall, hooked},
    runtime::{
        abi::{SUCCESS, Word},
        os::thread_state::{IN_COLLECTIVES, IN_HOOK},
        recorder::{NewOperation, Recorder, host_operations::named_host_call},
    },
};

hooked! {
    library Mpi, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing ERROR;

    MPI_Send | PMPI_Send(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype))]);
    MPI_Ssend | PMPI_Ssend(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype))]);
    MPI_Rsend | PMPI_Rsend(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype))]);
    MPI_Recv | PMPI_Recv(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, status: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Recv, comm, (peer, tag), VARIES)]);
    MPI_Probe | PMPI_Probe(peer: Word, tag: Word, comm: Word, status: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Recv, comm, (peer, tag), VARIES)]);
    MPI_Mprobe | PMPI_Mprobe(peer: Word, tag: Word, comm: Word, message: Word, status: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Recv, comm, (peer, tag), VARIES)]);
    // The sender of a message that was matched before is unknown.
    MPI_Mrecv | PMPI_Mrecv | MPI_Mrecv_c | PMPI_Mrecv_c(buffer: Word, count: Word, dtype: Word, message: Word, status: Word)
        => |recorder, _| blocking(recorder, [Some(named_host_call(recorder, "MPI_Mrecv"))]);
    MPI_Sendrecv | PMPI_Sendrecv(send: Word, sends: Word, stype: Word, to: Word, stag: Word, recv: Word,
        receives: Word, rtype: Word, from: Word, rtag: Word, comm: Word, status: Word)
        => |recorder, _| exchange(recorder, comm, [(to, stag), (from, rtag)], Size(int(sends), stype));
    MPI_Sendrecv_replace | PMPI_Sendrecv_replace(buffer: Word, count: Word, dtype: Word, to: Word, stag: Word,
        from: Word, rtag: Word, comm: Word, status: Word)
        => |recorder, _| exchange(recorder, comm, [(to, stag), (from, rtag)], Size(int(count), dtype));

    MPI_Isend | PMPI_Isend(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, false);
    MPI_Issend | PMPI_Issend(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, false);
    MPI_Irsend | PMPI_Irsend(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, false);
    MPI_Ibsend | PMPI_Ibsend(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, false);
    MPI_Irecv | PMPI_Irecv(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Recv, comm, (peer, tag), VARIES), request, false);
    MPI_Isendrecv | PMPI_Isendrecv(send: Word, sends: Word, stype: Word, to: Word, stag: Word, recv: Word, receives: Word,
        rtype: Word, from: Word, rtag: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking_exchange(recorder, comm, [(to, stag), (from, rtag)], Size(int(sends), stype), request);
    MPI_Isendrecv_replace | PMPI_Isendrecv_replace(buffer: Word, count: Word, dtype: Word, to: Word, stag: Word, from: Word,
        rtag: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking_exchange(recorder, comm, [(to, stag), (from, rtag)], Size(int(count), dtype), request);
    MPI_Send_init | PMPI_Send_init(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word,
        request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, true);
    MPI_Ssend_init | PMPI_Ssend_init(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word,
        request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, true);
    MPI_Rsend_init | PMPI_Rsend_init(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word,
        request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, true);
    MPI_Bsend_init | PMPI_Bsend_init(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word,
        request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, true);
    MPI_Recv_init | PMPI_Recv_init(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word,
        request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Recv, comm, (peer, tag), VARIES), request, true);

    // Partitioned messages. Each start is one message, whatever its partitions. Both forms have
    // 64-bit counts.
    MPI_Psend_init | PMPI_Psend_init | MPI_Psend_init_c | PMPI_Psend_init_c(buffer: Word, parts: Word, count: Word,
        dtype: Word, peer: Word, tag: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| {
            let size = Size(int(parts).saturating_mul(count as i64), dtype);
            nonblocking(transfer(recorder, Op::Send, comm, (peer, tag), size), request, true)
        };
    MPI_Precv_init | PMPI_Precv_init | MPI_Precv_init_c | PMPI_Precv_init_c(buffer: Word, parts: Word, count: Word,
        dtype: Word, peer: Word, tag: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Recv, comm, (peer, tag), VARIES), request, true);
    MPI_Parrived | PMPI_Parrived(request: Word, part: Word, flag: Word) => |_, _| testing_one(request, flag);

    MPI_Wait | PMPI_Wait(request: Word, status: Word)
        => |recorder, _| waiting(recorder, "MPI_Wait", request, 1, WaitFor::All);
    MPI_Waitall | PMPI_Waitall(count: Word, requests: Word, statuses: Word)
        => |recorder, _| waiting(recorder, "MPI_Waitall", requests, count as i32, WaitFor::All);
    MPI_Waitany | PMPI_Waitany(count: Word, requests: Word, index: Word, status: Word)
        => |recorder, _| waiting(recorder, "MPI_Waitany", requests, count as i32, WaitFor::Any { index });
    MPI_Waitsome | PMPI_Waitsome(count: Word, requests: Word, finished: Word, indices: Word, statuses: Word)
        => |recorder, _| waiting(recorder, "MPI_Waitsome", requests, count as i32, WaitFor::Some);

    MPI_Iprobe | PMPI_Iprobe(peer: Word, tag: Word, comm: Word, flag: Word, status: Word)
        => |_, _| probing(flag, move |recorder| transfer(recorder, Op::Recv, comm, (peer, tag), VARIES));
    MPI_Improbe | PMPI_Improbe(peer: Word, tag: Word, comm: Word, flag: Word, message: Word, status: Word)
        => |_, _| probing(flag, move |recorder| transfer(recorder, Op::Recv, comm, (peer, tag), VARIES));
    MPI_Test | PMPI_Test(request: Word, flag: Word, status: Word) => |_, _| testing(request, 1, WaitFor::All, CompletionFlag::Flag(flag));
    MPI_Testall | PMPI_Testall(count: Word, requests: Word, flag: Word, statuses: Word)
        => |_, _| testing(requests, count as i32, WaitFor::All, CompletionFlag::Flag(flag));
    MPI_Testany | PMPI_Testany(count: Word, requests: Word, index: Word, flag: Word, status: Word)
        => |_, _| testing(requests, count as i32, WaitFor::Any { index }, CompletionFlag::Flag(flag));
    MPI_Testsome | PMPI_Testsome(count: Word, requests: Word, finished: Word, indices: Word, statuses: Word)
        => |_, _| testing(requests, count as i32, WaitFor::Some, CompletionFlag::Count(finished));
    // These do not change their requests.
    MPI_Request_get_status | PMPI_Request_get_status(request: Word, flag: Word, status: Word)
        => |_, _| testing_one(request, flag);
    MPI_Request_get_status_all | PMPI_Request_get_status_all(count: Word, requests: Word, flag: Word, statuses: Word)
        => |_, _| testing(requests, count as i32, WaitFor::Some, CompletionFlag::Flag(flag));
    MPI_Request_get_status_any | PMPI_Request_get_status_any(count: Word, requests: Word, index: Word, flag: Word,
        status: Word)
        => |_, _| testing(requests, count as i32, WaitFor::Some, CompletionFlag::Flag(flag));
    MPI_Request_get_status_some | PMPI_Request_get_status_some(count: Word, requests: Word, finished: Word,
        indices: Word, statuses: Word)
        => |_, _| testing(requests, count as i32, WaitFor::Some, CompletionFlag::Count(finished));
}

/// Where a call writes whether something has completed.
#[derive(Clone, Copy)]
pub(crate) enum CompletionFlag {
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
pub(crate) struct Testing {
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
pub(crate) fn testing(requests: Word, count: i32, which: WaitFor, done: CompletionFlag) -> Testing {
    let mut before = [0; INLINE_REQUESTS];
    if let Some(library) = library() {
        for (index, handle) in before.iter_mut().enumerate().take(count.max(0) as usize) {
            // SAFETY: the caller's array of `count` requests.
            *handle = unsafe { library.abi.handle_at(requests, index) };
        }
        if count as usize > INLINE_REQUESTS && count > 0 {
            MORE_REQUESTS.with(|further| {
                for (index, handle) in (INLINE_REQUESTS..count as usize).zip(further) {
                    // SAFETY: the caller's array of `count` requests; `index` is below `count`.
                    handle.set(unsafe { library.abi.handle_at(requests, index) });
                }
            });
        }
    }
    Testing { requests, count, before, which, done, duplicates: AwaitedDuplicates::of(requests, count) }
}

/// Called before a call that tests a request without changing it, or tests a part of a partitioned
/// receive.
pub(crate) fn testing_one(request: Word, flag: Word) -> Testing {
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
    fn running(&self, recorder: &'static Recorder) -> BlockingCall {
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

impl AfterCall for Testing {
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
pub(crate) struct Probing<Describe> {
    flag: Word,
    describe: Describe,
}

/// Called before a call that tests for the described operation and writes the result to `flag`.
pub(crate) fn probing<Describe: Fn(&'static Recorder) -> Option<NewOperation>>(
    flag: Word,
    describe: Describe,
) -> Probing<Describe> {
    Probing { flag, describe }
}

impl<Describe: Fn(&'static Recorder) -> Option<NewOperation>> AfterCall for Probing<Describe> {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if result != SUCCESS || CompletionFlag::Flag(self.flag).is_done() {
            poll_successful(recorder, result == SUCCESS);
        } else {
            poll_unsuccessful(recorder, || {
                let operation = (self.describe)(recorder);
                operation.iter().fold(BlockingCall::new(recorder), |running, operation| running.with(operation))
            });
        }
    }
}
