//! The rules of graphs, streams, communicators and errors, each on the simulated device.

use xpu_timer_proto::{
    ring::key_of_child,
    v1::{Communicator, DataType},
};

use super::*;

pub fn operations(record: &FlightRecord, op: Op) -> Vec<&Operation> {
    record.operations.iter().filter(|operation| operation.op() == op).collect()
}

#[test]
fn a_graph_launch_counts_each_of_its_collectives_once() {
    let records = check("captured_collectives", 2, &[]);
    for record in &records {
        let comm = &record.communicators[0];
        // One before, two in each of three launches, one after.
        assert_eq!((comm.launched, comm.started, comm.completed, comm.point_to_point), (8, 8, 8, 6));
        assert_eq!((record.collectives_launched, record.graphs_launched), (8, 3));
        let reduces = operations(record, Op::AllReduce);
        assert_eq!(reduces.iter().map(|operation| operation.seq).collect::<Vec<_>>(), (1..=8).collect::<Vec<_>>());
        // The maximum is the second of each launch.
        assert_eq!(reduces.iter().map(|operation| operation.reduce_op).collect::<Vec<_>>(), [0, 0, 2, 0, 2, 0, 2, 0]);
        for (launch, graph) in operations(record, Op::Graph).into_iter().enumerate() {
            let inside = &reduces[1 + 2 * launch..3 + 2 * launch];
            for operation in inside {
                assert_eq!(operation.status(), OpStatus::Completed);
                assert_eq!(operation.completed_ns, graph.completed_ns, "inside a graph only its end is known");
                assert_eq!((operation.count, operation.communicator, operation.stream), (4, comm.id, graph.stream));
            }
        }
    }
    assert_eq!(records[0].communicators[0].id, records[1].communicators[0].id);
}

#[test]
fn a_rank_that_launches_its_graph_once_less_is_behind() {
    let records = check("captured_collectives", 2, &[("SKIPS_A_LAUNCH", "1")]);
    let launched = |rank: usize| records[rank].communicators[0].launched;
    assert_eq!((launched(0), launched(1)), (7, 5));
    let pending = records[0].operations.iter().filter(|operation| operation.status() == OpStatus::Pending);
    let pending: Vec<_> = pending.map(|operation| (operation.op(), operation.seq)).collect();
    assert!(pending.contains(&(Op::AllReduce, 6)) && pending.contains(&(Op::AllReduce, 7)), "{pending:?}");
}

#[test]
fn a_grown_communicator_is_known_by_its_old_ranks_alike() {
    let records = check("grown", 4, &[]);
    let grown = |rank: usize| records[rank].communicators.iter().find(|comm| comm.size == 4).expect("the grown one");
    for (rank, record) in records.iter().enumerate() {
        let comm = grown(rank);
        assert_eq!((comm.rank, comm.launched, comm.completed), (rank as i32, 1, 1));
        let call = record.operations.iter().find(|operation| operation.function == "ncclCommGrow").unwrap();
        assert_eq!((call.kind(), call.status(), call.communicator), (OpKind::HostCall, OpStatus::Completed, comm.id));
    }
    assert!((1..3).all(|rank| grown(rank).id == grown(0).id));
    let small = records[0].communicators.iter().find(|comm| comm.size == 3).unwrap();
    assert_eq!((grown(0).parent, grown(3).parent), (small.id, 0), "a joining rank knows no parent");
    // The last one cannot know the identity that the others use; the rank that created the id
    // reports that both identities are equal.
    assert_ne!(grown(3).id, grown(0).id);
    assert_eq!([0, 1, 2, 3].map(|rank| grown(rank).alias), [grown(3).id, 0, 0, 0]);
}

#[test]
fn children_of_a_grown_communicator_have_one_identity_on_all_ranks() {
    let records = check("children_of_a_grown_one", 4, &[]);
    let of = |rank: usize, parent: u64, size: u32| {
        let is_it = |comm: &&Communicator| comm.parent == parent && comm.size == size;
        records[rank].communicators.iter().find(is_it).expect("the child").id
    };
    let key = |rank: usize, (parent, size): (u64, u32)| key_of_child(parent, of(rank, parent, size));
    // Of each rank the grown one, the copy of it, and the half of the copy.
    let grown = |rank: usize| {
        let made = |operation: &&Operation| operation.function == "ncclCommGrow";
        records[rank].operations.iter().find(made).expect("the call").communicator
    };
    let copy = |rank: usize| of(rank, grown(rank), 4);
    assert!(copy(0) == copy(1) && copy(0) == copy(2) && copy(0) != copy(3));
    assert!((0..4).all(|rank| key(rank, (grown(rank), 4)) == key(0, (grown(0), 4))));
    let half = |rank: usize| key(rank, (copy(rank), 2));
    assert!(half(0) == half(2) && half(1) == half(3) && half(0) != half(1));
}

#[test]
fn newer_functions_of_nccl_count_like_older_ones() {
    let records = check("recent_functions", 2, &[]);
    for (rank, record) in records.iter().enumerate() {
        let comm = &record.communicators[0];
        // Eight with a configuration and one without; the group that was only tried out never was.
        assert_eq!((comm.launched, comm.completed, record.collectives_launched), (9, 9, 9));
        let collectives: Vec<_> =
            record.operations.iter().filter(|operation| operation.kind() == OpKind::Collective).collect();
        let of_all: Vec<_> = collectives.iter().filter(|operation| operation.tag.is_none()).collect();
        assert_eq!(
            of_all.iter().map(|operation| (operation.op(), operation.seq, operation.peer)).collect::<Vec<_>>(),
            [
                (Op::AllReduce, 1, -1),
                (Op::Reduce, 2, 1),
                (Op::Broadcast, 3, 1),
                (Op::AllGather, 4, -1),
                (Op::ReduceScatter, 5, -1),
                (Op::AllToAll, 6, -1),
                (Op::Gather, 7, 0),
                (Op::Scatter, 8, 0),
                (Op::AllReduce, 9, -1),
            ]
        );
        assert!(of_all.iter().all(|operation| (operation.count, operation.dtype()) == (4, DataType::Float32)));
        let other = 1 - rank as i32;
        let signals: Vec<_> = collectives.iter().filter(|operation| operation.tag.is_some()).collect();
        assert_eq!(
            signals
                .iter()
                .map(|operation| (operation.op(), operation.peer, operation.tag.unwrap()))
                .collect::<Vec<_>>(),
            [(Op::Send, other, 5), (Op::Recv, other, 5)]
        );
        assert_eq!(comm.point_to_point, 2);
        for name in ["ncclCommWindowRegister", "ncclCommWindowDeregister"] {
            let call = record.operations.iter().find(|operation| operation.function == name).expect(name);
            assert_eq!(
                (call.kind(), call.status(), call.communicator),
                (OpKind::HostCall, OpStatus::Completed, comm.id)
            );
        }
    }
}

#[test]
fn a_missing_signal_is_a_pending_receive() {
    let waits = |record: &FlightRecord| {
        let pending = record.operations.iter().filter(|operation| operation.status() == OpStatus::Pending);
        pending.map(|operation| (operation.op(), operation.peer, operation.tag)).collect::<Vec<_>>()
    };
    let records = check("recent_functions", 2, &[("NO_SIGNAL", "1")]);
    assert!(waits(&records[1]).contains(&(Op::Recv, 0, Some(9))), "{:?}", records[1].operations);
}

/// Operations that have ended in any way.
pub fn all_ended(record: &FlightRecord) -> bool {
    record.operations.iter().all(|operation| operation.status() != OpStatus::Pending)
}

#[test]
fn a_lost_device_is_an_error_and_no_hang() {
    let environment = [("XPU_SIM_FAULT", "lost:n=3"), ("XPU_TIMER_BRACKET", "all")];
    let records = check_until("a_lost_device_answers_its_error", 1, &environment, all_ended);
    let kernels = operations(&records[0], Op::Kernel);
    // The third was launched with success, and its event reports its end. The fourth met an error
    // before anything of it was in a stream.
    assert_eq!(kernels.len(), 3);
    assert_eq!((kernels[2].status(), kernels[2].error), (OpStatus::Failed, 700), "{kernels:#?}");
}

#[test]
fn a_destroyed_context_is_an_error_and_no_hang() {
    let records = check_until("a_destroyed_context_has_no_events", 1, &[("XPU_TIMER_BRACKET", "all")], all_ended);
    let kernels = operations(&records[0], Op::Kernel);
    let [kernel] = &kernels[..] else { panic!("one kernel: {kernels:#?}") };
    // The event's own word, or the context's when the watcher had to make it current first.
    assert_eq!(kernel.status(), OpStatus::Failed);
    assert!([709, 201].contains(&kernel.error), "{kernel:?}");
}

#[test]
fn no_event_of_a_destroyed_context_is_used() {
    let environment = [("XPU_TIMER_BRACKET", "all"), ("XPU_SIM_DEAD_EVENTS_ABORT", "1")];
    let records = check_until("contexts_are_destroyed_with_work_and_made_again", 1, &environment, all_ended);
    let kernels = operations(&records[0], Op::Kernel);
    let last = kernels.iter().find(|kernel| kernel.function == "last").expect("it is recent");
    assert_eq!(last.status(), OpStatus::Completed, "{last:?}");
    assert!(
        kernels.iter().filter(|kernel| kernel.function == "any").all(|kernel| kernel.error == 0 || kernel.error == 709)
    );
}

#[test]
fn one_threads_default_stream_does_not_wait_for_anothers() {
    let environment = [("XPU_SIM_FAULT", "stuck_kernel:n=1"), ("XPU_TIMER_BRACKET", "all")];
    let is_there = |record: &FlightRecord| {
        operations(record, Op::Kernel).iter().filter(|operation| operation.status() == OpStatus::Completed).count() == 3
    };
    let records = check_until("per_thread_streams", 1, &environment, is_there);
    let kernels = operations(&records[0], Op::Kernel);
    assert_eq!(kernels.len(), 4);
    assert!(kernels.iter().all(|kernel| kernel.stream == 2));
    assert_eq!(kernels[0].status(), OpStatus::Pending);
    assert_ne!(kernels[0].tid, kernels[1].tid);
}

#[test]
fn several_devices_of_one_process_complete_each_in_its_context() {
    let records = check("one_process_all_devices", 1, &[]);
    let [record] = &records[..] else { panic!("one process") };
    let made: Vec<_> = record.communicators.iter().map(|comm| comm.id).collect();
    let reduces = operations(record, Op::AllReduce);
    assert!(!made.is_empty() && reduces.len() > 1);
    let streams: std::collections::BTreeSet<u64> = reduces.iter().map(|operation| operation.stream).collect();
    assert!(streams.len() > 1, "a stream on every device");
    // One of the calls fails on purpose.
    let (wrong, right): (Vec<_>, Vec<_>) = reduces.into_iter().partition(|operation| operation.error == 4);
    assert!(wrong.len() <= 2 && right.len() > 1);
    for operation in right {
        assert_eq!((operation.status(), operation.error), (OpStatus::Completed, 0), "{operation:?}");
        assert!(operation.completed_ns >= operation.started_ns && operation.started_ns > 0);
    }
}

#[test]
fn work_of_green_contexts_is_timed_and_stays_in_its_thread() {
    let records = check_until("green_contexts", 2, &[("XPU_TIMER_BRACKET", "all")], all_ended);
    for record in &records {
        let (kernels, reduces) = (operations(record, Op::Kernel), operations(record, Op::AllReduce));
        // Three, and two in each of twenty rounds, in two green contexts, and one in the primary
        // one.
        assert_eq!((kernels.len(), reduces.len()), (2 * (3 + 2 * 20) + 1, 2));
        for operation in kernels.iter().chain(&reduces) {
            assert_eq!((operation.status(), operation.error), (OpStatus::Completed, 0), "{operation:?}");
            assert!(operation.started_ns >= operation.entered_ns, "{operation:?}");
        }
        // Each of them takes 2 ms on its stream, whichever it is.
        assert!(kernels.iter().all(|kernel| kernel.device_ns >= 2_000_000), "{kernels:?}");
    }
}

#[test]
fn a_full_queue_is_a_hang_of_the_operation_that_is_stuck() {
    let job = Job::new();
    let collector = job.collector();
    let program = "import cuda; cuda.set_device(0); kernel, stream = cuda.Kernel('k', 0), cuda.Stream()\n\
                   while True: kernel.launch(stream)";
    let mut command = job.hooked(python());
    command.args(["-c", program]).env("XPU_SIM_QUEUE_DEPTH", "64").env("XPU_SIM_FAULT", "stuck_kernel:n=1");
    let process = Process::spawn(command.env("XPU_TIMER_BRACKET", "all").env("XPU_TIMER_HANG_TIMEOUT", "1"));
    collector.wait_hello();
    // The host is inside a driver call, which waits for a place in the stream's queue.
    wait_until(PATIENCE, "the hang signal", || !collector.hangs().is_empty());
    let hang = collector.hangs()[0].1.operation.clone().unwrap();
    assert_eq!((hang.op(), hang.ticket), (Op::Kernel, 0), "the oldest, which is the one that is stuck");
    let record = collector.ring(process.pid());
    let pending = record.operations.iter().filter(|operation| operation.status() == OpStatus::Pending).count();
    assert!(pending > 10 && pending == record.operations.len(), "{pending} of {}", record.operations.len());
    assert_eq!(record.health.unwrap().dropped, 0);
}

#[test]
fn an_exit_without_handlers_says_goodbye_on_success() {
    for (status, goodbyes) in [(0, 1), (3, 0)] {
        let job = Job::new();
        let collector = job.collector();
        let program = format!(
            "import cuda, os; cuda.set_device(0); cuda.Kernel('k', 0).launch(cuda.Stream()); print('up', flush=True)\n\
             import time\nwhile not os.path.exists('stop'): time.sleep(0.01)\n\
             child = os.fork()\nif child == 0: os._exit(0)\nos.waitpid(child, 0)\n\
             import subprocess; subprocess.run(['true'], check=True)\nos._exit({status})"
        );
        let mut process = Process::spawn(job.hooked(python()).args(["-c", &program]).current_dir(job.dir.path()));
        process.wait_for("up\n", PATIENCE);
        let pid = collector.wait_hello();
        fs::write(job.path("stop"), "").unwrap();
        assert_eq!(process.wait(PATIENCE).code(), status);
        wait_until(PATIENCE, "the end of the connection", || collector.ended().contains(&pid));
        assert_eq!(collector.goodbyes().len(), goodbyes, "neither a forked child nor a spawned program says it");
    }
}

#[test]
fn a_library_of_another_name_keeps_its_calls() {
    // A collective library with an unknown soname, opened so that only its user sees it.
    let job = Job::new();
    let collector = job.collector();
    let library = "int ncclGroupStart(void) { return 0; } int ncclGroupEnd(void) { return 42; }";
    compile_c(job.dir.path(), "libspecial.so", library, &["-shared", "-fPIC", "-Wl,-soname,libspecial.so"]);
    let caller =
        "int ncclGroupStart(void), ncclGroupEnd(void); int through(void) { ncclGroupStart(); return ncclGroupEnd(); }";
    let special = job.path("libspecial.so");
    let runpath = format!("-Wl,-rpath,{}", job.dir.path().display());
    compile_c(job.dir.path(), "caller.so", caller, &["-shared", "-fPIC", special.to_str().unwrap(), &runpath]);
    let program = format!(
        "import ctypes, os, time; print(ctypes.CDLL('{}').through(), flush=True)\n\
         while not os.path.exists('stop'): time.sleep(0.01)",
        job.path("caller.so").display()
    );
    for path in [None, Some(&special)] {
        let _ = fs::remove_file(job.path("stop"));
        let mut command = job.hooked(python());
        command.args(["-c", &program]).current_dir(job.dir.path());
        if let Some(path) = path {
            command.env("XPU_TIMER_NCCL_LIB_PATH", path);
        }
        let mut process = Process::spawn(&mut command);
        process.wait_for("42\n", PATIENCE);
        let pid = process.pid();
        wait_until(PATIENCE, "Hello", || collector.hellos().iter().any(|(greeted, _)| *greeted == pid));
        assert_eq!(calls(&collector.ring(pid), "ncclGroupEnd"), 1);
        fs::write(job.path("stop"), "").unwrap();
        assert_eq!(process.wait(PATIENCE).code(), 0);
    }
}

/// Multiplies in the forms that frameworks use, and checks the results.
const PRODUCTS: &str = r"
import array, ctypes, os, sys, time, cuda
from ctypes import c_void_p as P, c_int, c_float, c_int64, c_uint64, byref, sizeof
version = sys.argv[1]
blas, lt = ctypes.CDLL('libcublas.so.' + version), ctypes.CDLL('libcublasLt.so.' + version)
cuda.set_device(0)
stream, handle, one, zero = cuda.Stream(), P(), c_float(1), c_float(0)
ok = lambda code: code == 0 or sys.exit(code)
ok(blas.cublasCreate_v2(byref(handle)))
ok(blas.cublasSetStream_v2(handle, stream.handle))
address = lambda data: P(data.buffer_info()[0])
a, b, c = (array.array('f', values) for values in ([1, 2, 3, 4, 5, 6], [1, 0, 2, 0, 1, 3], [0] * 8))
A, B, C = map(address, (a, b, c))
# 2 x 3 times 3 x 2; both transposed; and two products with one batch.
ok(blas.cublasSgemm_v2(handle, 0, 0, 2, 2, 3, byref(one), A, 2, B, 3, byref(zero), C, 2))
stream.synchronize()
assert c[:4].tolist() == [11, 14, 18, 22], c
ok(blas.cublasGemmEx(handle, 1, 1, 2, 2, 3, byref(one), A, 0, 3, B, 0, 2, byref(zero), C, 0, 2, 68, -1))
stride = c_int64
ok(blas.cublasGemmStridedBatchedEx(handle, 0, 0, 1, 2, 3, byref(one), A, 0, 1, stride(3), B, 0, 3, stride(0), byref(zero),
                                   C, 0, 1, stride(2), 2, 68, -1))
ok(blas.cublasSgemm_v2_64(handle, 0, 0, c_int64(2), c_int64(1), c_int64(3), byref(one), A, c_int64(2), B, c_int64(3),
                          byref(zero), C, c_int64(2)))
# cuBLASLt: the transposed 3 x 2 times 3 x 2, with a bias.
product, layouts = P(), [P(), P(), P()]
ok(lt.cublasLtMatmulDescCreate(byref(product), 68, 0))
bias = array.array('f', [100, 200])
for attribute, value in ((3, c_int(1)), (7, c_int(4)), (8, P(bias.buffer_info()[0]))):
    ok(lt.cublasLtMatmulDescSetAttribute(product, attribute, byref(value), ctypes.c_size_t(sizeof(value))))
for layout, (rows, columns) in zip(layouts, ((3, 2), (3, 2), (2, 2))):
    ok(lt.cublasLtMatrixLayoutCreate(byref(layout), 0, c_uint64(rows), c_uint64(columns), c_int64(rows)))
chosen, found = ctypes.create_string_buffer(88), c_int()
ok(lt.cublasLtMatmulAlgoGetHeuristic(None, product, *layouts, layouts[2], None, 1, chosen, byref(found)))
ok(lt.cublasLtMatmul(None, product, byref(one), A, layouts[0], B, layouts[1], byref(zero), C, layouts[2], C, layouts[2], chosen,
                     None, ctypes.c_size_t(0), stream.handle))
stream.synchronize()
assert c[:4].tolist() == [107, 216, 111, 223], c
print('multiplied', flush=True)
while not os.path.exists('stop'): time.sleep(0.01)
";

#[test]
fn matrix_products_of_every_form_have_their_shape() {
    for version in ["13", "12"] {
        let job = Job::new();
        let collector = job.collector();
        let mut command = job.hooked(python());
        command.args(["-c", PRODUCTS, version]).current_dir(job.dir.path());
        let mut process = Process::spawn(command.env("XPU_TIMER_BRACKET", "matmuls"));
        process.wait_for("multiplied\n", PATIENCE);
        let pid = collector.wait_hello();
        wait_until(PATIENCE, "their end", || all_ended(&collector.ring(pid)));
        let record = collector.ring(pid);
        let shapes: Vec<_> = operations(&record, Op::Matmul)
            .iter()
            .map(|one| {
                let shape = one.matmul.as_ref().unwrap();
                assert_eq!((one.kind(), one.dtype().as_str_name()), (OpKind::Kernel, "DATA_TYPE_FLOAT32"));
                assert!(one.completed_ns > 0 && one.stream > 2, "timed on the stream of its handle: {one:?}");
                assert_eq!((one.peer, one.group, one.tag), (-1, 0, None), "their words have the strides");
                let sizes = [shape.batch, shape.m, shape.n, shape.k];
                let lds = [shape.lda, shape.ldb, shape.ldc];
                let strides = [shape.stride_a, shape.stride_b, shape.stride_c];
                (&*one.function, sizes, [shape.trans_a, shape.trans_b], lds, strides, shape.algorithm)
            })
            .collect();
        let expected = [
            ("cublasSgemm_v2", [1, 2, 2, 3], [0, 0], [2, 3, 2], [0; 3], None),
            ("cublasGemmEx", [1, 2, 2, 3], [1, 1], [3, 2, 2], [0; 3], Some(-1)),
            ("cublasGemmStridedBatchedEx", [2, 1, 2, 3], [0, 0], [1, 3, 1], [3, 0, 2], Some(-1)),
            ("cublasSgemm_v2_64", [1, 2, 1, 3], [0, 0], [2, 3, 2], [0; 3], None),
            ("cublasLtMatmul", [1, 2, 2, 3], [1, 0], [3, 3, 2], [0; 3], Some(21)),
        ];
        assert_eq!(shapes, expected);
        assert_eq!(record.kernels_launched, 5, "each is one kernel, too");
        fs::write(job.path("stop"), "").unwrap();
        assert_eq!(process.wait(PATIENCE).code(), 0);
    }
}

/// Multiplies 300 times, two milliseconds apart or more, and prints how many milliseconds passed
/// from the first to the last.
const MANY_PRODUCTS: &str = r"
import array, ctypes, os, time, cuda
from ctypes import c_void_p as P, c_float, byref
blas = ctypes.CDLL('libcublas.so.13')
cuda.set_device(0)
stream, handle, one, zero = cuda.Stream(), P(), c_float(1), c_float(0)
data = array.array('f', [1] * 16)
D = P(data.buffer_info()[0])
assert blas.cublasCreate_v2(byref(handle)) == 0 and blas.cublasSetStream_v2(handle, stream.handle) == 0
begun = time.monotonic()
for _ in range(300):
    assert blas.cublasSgemm_v2(handle, 0, 0, 2, 2, 2, byref(one), D, 2, D, 2, byref(zero), D, 2) == 0
    stream.synchronize()
    time.sleep(0.002)
print('multiplied', int((time.monotonic() - begun) * 1000), 'ms', flush=True)
while not os.path.exists('stop'): time.sleep(0.01)
";

#[test]
fn every_product_counts_and_only_a_sample_is_timed_unless_all_are_asked_for() {
    for mode in ["collectives", "matmuls", "none"] {
        let job = Job::new();
        let collector = job.collector();
        let mut command = job.hooked(python());
        command.args(["-c", MANY_PRODUCTS]).current_dir(job.dir.path());
        let mut process = Process::spawn(command.env("XPU_TIMER_BRACKET", mode));
        process.wait_for(" ms\n", PATIENCE);
        let pid = collector.wait_hello();
        wait_until(PATIENCE, "their end", || all_ended(&collector.ring(pid)));
        let record = collector.ring(pid);
        assert_eq!((calls(&record, "cublasSgemm_v2"), record.kernels_launched), (300, 300), "{mode}");
        let timed = collector.operations(pid);
        let timed: Vec<_> = timed.iter().filter(|one| one.op() == Op::Matmul).collect();
        assert!(timed.iter().all(|one| one.device_ns > 0 && one.matmul.is_some()), "{timed:?}");
        fs::write(job.path("stop"), "").unwrap();
        let output = process.wait(PATIENCE);
        assert_eq!(output.code(), 0);
        let passed_ms: usize = output.stdout.split(' ').nth(1).unwrap().parse().unwrap();
        let expected = match mode {
            // One in 20 ms, by a clock that has steps of up to ten.
            "collectives" => 2..=passed_ms / 20 + 2,
            "matmuls" => 300..=300,
            _ => 0..=0,
        };
        assert!(expected.contains(&timed.len()), "{mode}: {} in {passed_ms} ms", timed.len());
    }
}

#[test]
fn the_watcher_does_not_invalidate_a_capture_of_another_thread() {
    // It queries the end of the slow kernel all the time, which would be an error in a thread whose
    // capture mode is not relaxed.
    let job = Job::new();
    let collector = job.collector();
    let program = "import cuda, os, time; cuda.set_device(0)\n\
                   kernel, side, stream = cuda.Kernel('k', 0), cuda.Stream(), cuda.Stream()\n\
                   kernel.launch(side)\n\
                   with cuda.capture(stream) as graph:\n\
                   \x20   kernel.launch(stream); print('captures', flush=True)\n\
                   \x20   while not os.path.exists('stop'): time.sleep(0.01)\n\
                   print('captured', flush=True); os._exit(0)";
    let mut command = job.hooked(python());
    command.args(["-c", program]).current_dir(job.dir.path()).env("XPU_SIM_FAULT", "stuck_kernel:n=1");
    let mut process = Process::spawn(command.env("XPU_TIMER_BRACKET", "all"));
    process.wait_for("captures\n", PATIENCE);
    collector.wait_hello();
    let pid = process.pid();
    let heartbeat_ns = |record: FlightRecord| record.health.unwrap().heartbeat_ns;
    let first_ns = heartbeat_ns(collector.ring(pid));
    wait_until(PATIENCE, "half a second of queries", || heartbeat_ns(collector.ring(pid)) > first_ns + 500_000_000);
    let record = collector.ring(pid);
    let [kernel] = &operations(&record, Op::Kernel)[..] else { panic!("one kernel: {:?}", record.operations) };
    assert_eq!(kernel.status(), OpStatus::Pending, "the watcher has an event to query");
    fs::write(job.path("stop"), "").unwrap();
    let output = process.wait(PATIENCE);
    assert_eq!((output.code(), output.stdout.as_str()), (0, "captures\ncaptured\n"), "{output:?}");
}
