//! Families other than NVIDIA, with libraries of their names made from `family.c`, and the names
//! that two families share.

use xpu_timer_proto::v1::DataType;

use super::{rules::operations, *};

/// A family's libraries, in a folder.
struct Family {
    prefix: &'static str,
    collectives: &'static str,
    /// Another form of all_reduce, which NVIDIA's library does not have.
    other_reduce: &'static str,
    sonames: [&'static str; 3],
    /// The launch with a configuration; none that is hooked where it is empty.
    launch_by: &'static str,
}

const AMD: Family = Family {
    prefix: "hip",
    collectives: "nccl",
    other_reduce: "AllReduceWithBias",
    sonames: ["libamdhip64.so.6", "librccl.so.1", "libhipblas.so.2"],
    launch_by: "hipDrvLaunchKernelEx",
};
const METAX: Family = Family {
    prefix: "mc",
    collectives: "mccl",
    other_reduce: "AllReduceExt",
    sonames: ["libmcruntime.so", "libmccl.so", "libmcblas.so"],
    launch_by: "mcModuleLaunchKernelEx",
};
const MOORE_THREADS: Family = Family {
    prefix: "musa",
    collectives: "mccl",
    other_reduce: "AllReduceExt",
    sonames: ["libmusart.so", "libmccl.so", "libmublas.so"],
    launch_by: "",
};

impl Family {
    fn build(&self, dir: &Path) {
        let source = fs::read_to_string(tree().join("tests/tests/it/hook/family.c")).unwrap();
        let kinds = ["-DRUNTIME".to_string(), format!("-DCOLLECTIVES={}", self.collectives), "-DBLAS".to_string()];
        for (soname, kind) in self.sonames.iter().zip(kinds) {
            let flags = [format!("-DFAMILY={}", self.prefix), kind, format!("-Wl,-soname,{soname}")];
            let flags: Vec<&str> = flags.iter().map(String::as_str).chain(["-shared", "-fPIC", "-w"]).collect();
            compile_c(dir, soname, &source, &flags);
        }
    }

    /// Launches in this family's ways, and prints how many of them arrived.
    fn program(&self, more: &str) -> String {
        let launch_by = self.launch_by;
        let [runtime, collectives, blas] = self.sonames;
        let (prefix, nccl, other) = (self.prefix, self.collectives, self.other_reduce);
        format!(
            "import ctypes, os, time\n\
             from ctypes import c_void_p as P, byref, c_int, c_uint, c_size_t\n\
             runtime, nccl, blas = map(ctypes.CDLL, ['{runtime}', '{collectives}', '{blas}'])\n\
             class Dim3(ctypes.Structure): _fields_ = [('x', c_uint), ('y', c_uint), ('z', c_uint)]\n\
             class Id(ctypes.Structure): _fields_ = [('internal', ctypes.c_char * 128)]\n\
             runtime.{prefix}LaunchKernel.argtypes = (P, Dim3, Dim3, P, c_size_t, P)\n\
             one = Dim3(1, 1, 1)\n\
             for _ in range(2): assert runtime.{prefix}LaunchKernel(0x1000, one, one, None, 0, 0x30) == 0\n\
             assert runtime.{prefix}ModuleLaunchKernel(P(0x2000), *[1] * 7, P(0x30), None, None) == 0\n\
             assert runtime.{prefix}GraphLaunch(P(0x40), P(0x30)) == 0\n\
             config = (ctypes.c_uint64 * 6)(0, 0, 0, 0, 0x30, 0)\n\
             assert not '{launch_by}' or runtime['{launch_by}'](byref(config), P(0x2000), None, None) == 0\n\
             comm, child = P(), P()\n\
             nccl.{nccl}CommInitRank.argtypes = (P, c_int, Id, c_int)\n\
             assert nccl.{nccl}CommInitRank(byref(comm), 2, Id(b'x'), 1) == 0\n\
             assert nccl.{nccl}CommSplit(comm, 0, 0, byref(child), None) == 0\n\
             nccl.{nccl}AllReduce.argtypes = (P, P, c_size_t, c_int, c_int, P, P)\n\
             for _ in range(3): assert nccl.{nccl}AllReduce(None, None, 64, 9, 0, comm, 0x50) == 0\n\
             bias = nccl.{nccl}{other}; bias.argtypes = (P, P, c_size_t, c_int, c_int, P, P, P)\n\
             assert bias(None, None, 64, 9, 0, comm, 0x50, None) == 0\n\
             nccl.{nccl}AllToAll.argtypes = (P, P, c_size_t, c_int, P, P)\n\
             assert nccl.{nccl}AllToAll(None, None, 32, 7, comm, 0x50) == 0\n\
             nccl.{nccl}AllToAllv.argtypes = (*[P] * 6, c_int, P, P)\n\
             assert nccl.{nccl}AllToAllv(*[None] * 6, 7, comm, 0x50) == 0\n\
             assert blas.{prefix}blasSgemm(P(0x60), 0, 1, 4, 5, 6, *[P()] * 2, 4, None, 5, None, None, 4) == 0\n\
             {more}\n\
             print('called', runtime.launched(), nccl.reductions(), flush=True)\n\
             while not os.path.exists('stop'): time.sleep(0.01)\n"
        )
    }
}

/// Runs a family's program under the hook. NVIDIA's libraries are not available.
fn record(family: &Family, environment: &[(&str, &str)], settled: impl Fn(&FlightRecord) -> bool) -> FlightRecord {
    record_of(family, "", environment, settled)
}

/// Runs a family's program, extended by `more`, under the hook.
fn record_of(
    family: &Family,
    more: &str,
    environment: &[(&str, &str)],
    settled: impl Fn(&FlightRecord) -> bool,
) -> FlightRecord {
    let job = Job::new();
    family.build(job.dir.path());
    let collector = job.collector();
    let mut command = job.hooked(python());
    command.args(["-c", &family.program(more)]).current_dir(job.dir.path());
    command.env("LD_LIBRARY_PATH", job.dir.path()).env("XPU_TIMER_BRACKET", "matmuls");
    let mut process = Process::spawn(command.envs(environment.iter().copied()));
    let launches = if family.launch_by.is_empty() { 4 } else { 5 };
    process.wait_for(&format!("called {launches} 3\n"), PATIENCE);
    collector.wait_hello();
    let pid = process.pid();
    wait_until(PATIENCE, "what is waited for", || settled(&collector.ring(pid)));
    let record = collector.ring(pid);
    fs::write(job.path("stop"), "").unwrap();
    let output = process.wait(PATIENCE);
    assert_eq!((output.code(), output.stderr.as_str()), (0, ""), "{output:?}");
    let health = record.health.as_ref().unwrap();
    assert_eq!((health.panics, health.dropped, health.overflows), (0, 0, 0));
    record
}

fn no_collective_pends(record: &FlightRecord) -> bool {
    record.operations.iter().all(|operation| operation.status() != OpStatus::Pending)
}

/// The checks that apply to every timed family.
fn is_complete(family: &Family) {
    let record = record(family, &[], no_collective_pends);
    assert_eq!((record.kernels_launched, record.graphs_launched, record.collectives_launched), (4, 1, 6));
    let [world, child] = &record.communicators[..] else { panic!("{:#?}", record.communicators) };
    assert_eq!((world.size, world.rank, world.launched, world.completed), (2, 1, 6, 6));
    assert_eq!((child.parent, child.size, child.rank), (world.id, 1, 0), "its size was asked for");
    let of = |op: Op| record.operations.iter().filter(move |operation| operation.op() == op).collect::<Vec<_>>();
    let reduces = of(Op::AllReduce);
    assert_eq!(reduces.iter().map(|operation| operation.seq).collect::<Vec<_>>(), [1, 2, 3, 4]);
    let exchanges: Vec<_> =
        of(Op::AllToAll).iter().map(|operation| (operation.seq, operation.count, operation.dtype())).collect();
    assert_eq!(
        exchanges,
        [(5, 32, DataType::Float32), (6, 0, DataType::Float32)],
        "what goes to whom is not said in the second"
    );
    assert_eq!(calls(&record, &format!("{}{}", family.collectives, family.other_reduce)), 1);
    assert!(reduces.iter().all(|operation| operation.device_ns == 1_500_000 && operation.completed_ns > 0));
    let init = of(Op::CommInit);
    assert_eq!(init[0].function, format!("{}CommInitRank", family.collectives));
    let [product] = of(Op::Matmul)[..] else { panic!("one product") };
    let shape = product.matmul.as_ref().unwrap();
    assert_eq!((shape.m, shape.n, shape.k, shape.batch, shape.trans_a, shape.trans_b), (4, 5, 6, 1, 0, 1));
    assert_eq!((product.function.as_str(), product.stream), (&*format!("{}blasSgemm", family.prefix), 0x60));
    assert_eq!(calls(&record, &format!("{}LaunchKernel", family.prefix)), 2);
    assert_eq!(calls(&record, &format!("{}ModuleLaunchKernel", family.prefix)), 1);
}

#[test]
fn matrix_products_of_amd_use_its_type_numbers() {
    let more = "layout = lambda rows, columns: (ctypes.c_long * 6)(3, 0, 14, 0, rows, columns)\n\
                product = (ctypes.c_long * 2)(112, 111)\n\
                d = layout(7, 9)\n\
                assert blas.hipblasLtMatmul(None, product, None, None, layout(8, 7), None, layout(8, 9), None, None, d, None,\
                                            d, None, None, c_size_t(0), P(0x60)) == 0\n\
                assert blas.hipblasGemmEx_v2(P(0x60), 112, 111, 2, 3, 4, None, None, 168, 4, None, 168, 4, None, None, 168, 2,\
                                             151, 160) == 0";
    let record = record_of(&AMD, more, &[], no_collective_pends);
    let products: Vec<_> = operations(&record, Op::Matmul)[1..]
        .iter()
        .map(|one| {
            let shape = one.matmul.as_ref().unwrap();
            assert_eq!((one.dtype(), one.stream, shape.trans_a, shape.trans_b), (DataType::Bfloat16, 0x60, 1, 0));
            (&*one.function, [shape.batch, shape.m, shape.n, shape.k])
        })
        .collect();
    assert_eq!(products, [("hipblasLtMatmul", [3, 7, 9, 8]), ("hipblasGemmEx_v2", [1, 2, 3, 4])]);
}

#[test]
fn metax_is_recorded_like_nvidia() {
    is_complete(&METAX);
}

#[test]
fn amd_is_recorded_like_nvidia() {
    is_complete(&AMD);
}

#[test]
fn a_collective_of_another_family_that_does_not_complete_is_pending() {
    for family in [&AMD, &METAX] {
        let never = (0x50).to_string();
        let pending = |record: &FlightRecord| {
            record.operations.iter().filter(|operation| operation.status() == OpStatus::Pending).count() == 6
        };
        let record = record(family, &[("FAMILY_NEVER", &never)], pending);
        let comm = &record.communicators[0];
        assert_eq!((comm.launched, comm.started, comm.completed), (6, 0, 0));
    }
}

#[test]
fn the_runtime_decides_the_family_of_a_shared_name() {
    // libmccl.so is MetaX's and Moore Threads'. Nothing is known for certain of the latter's
    // events, so none is used: its collectives count, and none is ever pending.
    let never = (0x50).to_string();
    let record = record(&MOORE_THREADS, &[("FAMILY_NEVER", &never)], no_collective_pends);
    assert_eq!((record.collectives_launched, record.kernels_launched), (6, 0));
    let reduces: Vec<_> = record.operations.iter().filter(|operation| operation.op() == Op::AllReduce).collect();
    assert_eq!(reduces.len(), 4);
    assert!(reduces.iter().all(|operation| operation.completed_ns == 0 && operation.started_ns == 0), "{reduces:?}");
}

#[test]
fn a_loaded_collective_library_of_another_family_changes_nothing() {
    // RCCL beside NVIDIA's libraries: ncclAllReduce stays NCCL's, because the runtime decides.
    let job = Job::new();
    AMD.build(job.dir.path());
    let collector = job.collector();
    let program = format!(
        "import ctypes; other = ctypes.CDLL('{}/librccl.so.1', mode=ctypes.RTLD_GLOBAL)\n\
         import cuda; cuda.set_device(0); comm = cuda.Communicator.create('world', 0, 1)\n\
         stream, buffer = cuda.Stream(), cuda.Buffer(4).fill(3)\n\
         for _ in range(5): comm.all_reduce(buffer, stream)\n\
         stream.synchronize(); print(buffer.to_list(), other.reductions(), flush=True)\n\
         import os, time\nwhile not os.path.exists('stop'): time.sleep(0.01)\nos._exit(0)",
        job.dir.path().display()
    );
    let mut command = job.hooked(python());
    let mut process = Process::spawn(command.args(["-c", &program]).current_dir(job.dir.path()));
    process.wait_for("[3.0, 3.0, 3.0, 3.0] 0\n", PATIENCE);
    let pid = collector.wait_hello();
    assert_eq!(collector.ring(pid).collectives_launched, 5);
    fs::write(job.path("stop"), "").unwrap();
    assert_eq!(process.wait(PATIENCE).code(), 0);
}

/// Huawei's collective library by its public names, and Cambricon's: every call succeeds at once.
const HCCL: &str = r"
#include <stdint.h>
typedef void *P;
static int calls;
int HcclCommInitRootInfo(uint32_t size, const void *root, uint32_t rank, P *out) { return *out = (P)0x10, 0; }
int HcclCreateSubCommConfig(P *comm, uint32_t size, uint32_t *ranks, uint64_t id, uint32_t rank, P config, P *out) {
    return *out = (P)0x20, 0;
}
int HcclAllReduce(P send, P recv, uint64_t count, int type, int op, P comm, P stream) { return calls++, 0; }
int HcclBroadcast(P buffer, uint64_t count, int type, uint32_t root, P comm, P stream) { return calls++, 0; }
int HcclGetRankSize(P comm, uint32_t *out) { return *out = 2, 0; }
int HcclGetRankId(P comm, uint32_t *out) { return *out = 1, 0; }
int HcclCommDestroy(P comm) { return 0; }
int cnclInitComms(P *comms, int count, const int *devices, const int *ranks, int size, const void *clique) {
    return *comms = (P)0x30, 0;
}
int cnclAllReduce(P send, P recv, uint64_t count, int type, int op, P comm, P queue) { return calls++, 0; }
int cnclFreeComm(P comm) { return 0; }
int called(void) { return calls; }
";

/// Runs a program on a library made of [`HCCL`], beside a runtime of the family, and gives its
/// record.
fn record_with_libraries(runtime: &str, collectives: &str, lines: &str) -> FlightRecord {
    let job = Job::new();
    for (soname, source) in [(runtime, "int runtime;"), (collectives, HCCL)] {
        compile_c(job.dir.path(), soname, source, &["-shared", "-fPIC", "-w", &format!("-Wl,-soname,{soname}")]);
    }
    let program = format!(
        "import ctypes, os, time\n\
         from ctypes import c_void_p as P, byref, c_int, c_uint, c_uint64, create_string_buffer\n\
         runtime, ccl = map(ctypes.CDLL, ['{runtime}', '{collectives}'])\n\
         comm, part = P(), P()\n\
         {lines}\n\
         print('called', ccl.called(), flush=True)\n\
         while not os.path.exists('stop'): time.sleep(0.01)\n"
    );
    let collector = job.collector();
    let mut command = job.hooked(python());
    command.args(["-c", &program]).current_dir(job.dir.path()).env("LD_LIBRARY_PATH", job.dir.path());
    let mut process = Process::spawn(&mut command);
    process.wait_for("called 3\n", PATIENCE);
    collector.wait_hello();
    let pid = process.pid();
    wait_until(PATIENCE, "nothing pends", || no_collective_pends(&collector.ring(pid)));
    let record = collector.ring(pid);
    fs::write(job.path("stop"), "").unwrap();
    assert_eq!(process.wait(PATIENCE).code(), 0);
    record
}

#[test]
fn collectives_of_ascend_and_cambricon_count_in_their_communicators() {
    let hccl = record_with_libraries(
        "libascendcl.so",
        "libhccl.so",
        "assert ccl.HcclCommInitRootInfo(2, create_string_buffer(4108), 1, byref(comm)) == 0\n\
         ccl.HcclAllReduce.argtypes = (P, P, c_uint64, c_int, c_int, P, P)\n\
         for _ in range(2): assert ccl.HcclAllReduce(None, None, 64, 4, 2, comm, None) == 0\n\
         ranks = (c_uint * 2)(0, 1)\n\
         assert ccl.HcclCreateSubCommConfig(byref(comm), 2, ranks, c_uint64(7), 1, None, byref(part)) == 0\n\
         ccl.HcclBroadcast.argtypes = (P, c_uint64, c_int, c_uint, P, P)\n\
         assert ccl.HcclBroadcast(None, 8, 11, 1, part, None) == 0",
    );
    let seen: Vec<_> = hccl.operations.iter().filter(|operation| operation.kind() == OpKind::Collective).collect();
    let what =
        |operation: &Operation| (operation.op(), operation.seq, operation.count, operation.dtype(), operation.peer);
    assert_eq!(
        seen.iter().map(|operation| what(operation)).collect::<Vec<_>>(),
        [
            (Op::AllReduce, 1, 64, DataType::Float32, -1),
            (Op::AllReduce, 2, 64, DataType::Float32, -1),
            (Op::Broadcast, 1, 8, DataType::Bfloat16, 1),
        ]
    );
    let [world, part] = &hccl.communicators[..] else { panic!("{:?}", hccl.communicators) };
    assert_eq!((world.size, world.rank, world.launched, part.size, part.rank, part.launched), (2, 1, 2, 2, 1, 1));
    assert_ne!(world.id, part.id);

    let cncl = record_with_libraries(
        "libcnrt.so",
        "libcncl.so",
        "devices, ranks = (c_int * 1)(0), (c_int * 1)(3)\n\
         assert ccl.cnclInitComms(byref(comm), 1, devices, ranks, 4, create_string_buffer(136)) == 0\n\
         ccl.cnclAllReduce.argtypes = (P, P, c_uint64, c_int, c_int, P, P)\n\
         for _ in range(3): assert ccl.cnclAllReduce(None, None, 5, 0x10, 0, comm, None) == 0",
    );
    assert_eq!((cncl.communicators[0].size, cncl.communicators[0].rank, cncl.communicators[0].launched), (4, 3, 3));
    assert!(cncl.operations.iter().any(|operation| operation.dtype() == DataType::Float16 && operation.count == 5));
}
