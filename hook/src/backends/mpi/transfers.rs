//! Point-to-point messages, and the functions that wait for requests or test them.

use xpu_timer_proto::v1::Op;

use crate::{
    backends::mpi::{
        nonblocking::exchange_posted,
        operations::{ERROR, Size, VARIES, blocking, exchange, int, transfer},
        request::{WaitFor, posted, waiting},
        testing::{CompletionFlag, probing, testing, testing_one},
    },
    interpose::hooked::hooked,
    runtime::{
        abi::Word,
        os::thread_state::{IN_COLLECTIVES, IN_HOOK},
        recorder::host_operations::named_host_call,
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
        => |recorder, _| posted(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, false);
    MPI_Issend | PMPI_Issend(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, false);
    MPI_Irsend | PMPI_Irsend(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, false);
    MPI_Ibsend | PMPI_Ibsend(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, false);
    MPI_Irecv | PMPI_Irecv(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Recv, comm, (peer, tag), VARIES), request, false);
    MPI_Isendrecv | PMPI_Isendrecv(send: Word, sends: Word, stype: Word, to: Word, stag: Word, recv: Word, receives: Word,
        rtype: Word, from: Word, rtag: Word, comm: Word, request: Word)
        => |recorder, _| exchange_posted(recorder, comm, [(to, stag), (from, rtag)], Size(int(sends), stype), request);
    MPI_Isendrecv_replace | PMPI_Isendrecv_replace(buffer: Word, count: Word, dtype: Word, to: Word, stag: Word, from: Word,
        rtag: Word, comm: Word, request: Word)
        => |recorder, _| exchange_posted(recorder, comm, [(to, stag), (from, rtag)], Size(int(count), dtype), request);
    MPI_Send_init | PMPI_Send_init(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word,
        request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, true);
    MPI_Ssend_init | PMPI_Ssend_init(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word,
        request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, true);
    MPI_Rsend_init | PMPI_Rsend_init(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word,
        request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, true);
    MPI_Bsend_init | PMPI_Bsend_init(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word,
        request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Send, comm, (peer, tag), Size(int(count), dtype)), request, true);
    MPI_Recv_init | PMPI_Recv_init(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word,
        request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Recv, comm, (peer, tag), VARIES), request, true);

    // Partitioned messages. Each start is one message, whatever its partitions. Both forms have
    // 64-bit counts.
    MPI_Psend_init | PMPI_Psend_init | MPI_Psend_init_c | PMPI_Psend_init_c(buffer: Word, parts: Word, count: Word,
        dtype: Word, peer: Word, tag: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| {
            let size = Size(int(parts).saturating_mul(count as i64), dtype);
            posted(transfer(recorder, Op::Send, comm, (peer, tag), size), request, true)
        };
    MPI_Precv_init | PMPI_Precv_init | MPI_Precv_init_c | PMPI_Precv_init_c(buffer: Word, parts: Word, count: Word,
        dtype: Word, peer: Word, tag: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Recv, comm, (peer, tag), VARIES), request, true);
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
