//! The hook in processes of the simulated device, with a collector that only listens.

mod families;
mod rules;
mod safety;
mod timeline;

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use nix::sys::signal::Signal;
use tempfile::TempDir;
use xpu_timer_proto::v1::{Communicator, CommunicatorState, DataType, FlightRecord, Op, OpKind, OpStatus, Operation};
use xpu_timer_tests::{
    FakeCollector, Output, PATIENCE, Process, RECONNECT, ReadMode, artifacts, compile_c, python, tree, wait_until,
};

/// A folder of its own for a job, and its environment.
struct Job {
    dir: TempDir,
}

impl Job {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        for name in ["rendezvous", "log"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        Job { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.path("socket")
    }

    fn collector(&self) -> FakeCollector {
        FakeCollector::listen(&self.socket(), ReadMode::Reads)
    }

    /// A command without the hook, and with nothing of the caller's settings.
    fn bare(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("XPU_") || ["LD_PRELOAD", "RANK", "WORLD_SIZE", "LOCAL_RANK"].contains(&&*text) {
                command.env_remove(&name);
            }
        }
        command
            .env("LD_LIBRARY_PATH", artifacts().sim())
            .env("XPU_EXAMPLE_RENDEZVOUS", self.path("rendezvous"))
            .env("PYTHONPATH", tree().join("tests/examples"))
            .env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    /// A command like [`Self::bare`], under the hook.
    fn hooked(&self, program: impl AsRef<Path>) -> Command {
        let mut command = self.bare(program);
        command
            .env("LD_PRELOAD", artifacts().hook())
            .env("XPU_TIMER_SOCKET", self.socket())
            .env("XPU_TIMER_LOGGING_DIR", self.path("log"));
        command
    }

    /// One rank of the example training program.
    fn rank(&self, rank: u32, ranks: u32, arguments: &[&str]) -> Command {
        let mut command = self.hooked(python());
        for (name, value) in [("RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_RANK", rank)] {
            command.env(name, value.to_string());
        }
        command.arg(tree().join("tests/examples/train.py")).args(arguments);
        command
    }

    fn log(&self) -> String {
        let files = fs::read_dir(self.path("log")).into_iter().flatten().flatten();
        files.map(|file| fs::read_to_string(file.path()).unwrap_or_default()).collect()
    }
}

fn run(command: &mut Command) -> Output {
    Process::spawn(command).wait(PATIENCE)
}

/// Asserts that a command has the same result with and without the hook, and returns it.
fn same(bare: &mut Command, hooked: &mut Command) -> Output {
    let (bare, hooked) = (run(bare), run(hooked));
    assert_eq!(hooked.code(), bare.code(), "{hooked:?}");
    assert_eq!(hooked.stdout, bare.stdout);
    assert_eq!(hooked.stderr, bare.stderr);
    hooked
}

fn calls(record: &FlightRecord, name: &str) -> u64 {
    record.coverage.iter().find(|function| function.name == name).map_or(0, |function| function.calls)
}

const HEALTHY: [&str; 2] = ["--steps=25", "--step-ms=2"];

/// Runs a short training of one rank and asserts that the host noticed nothing.
fn trains_undisturbed(job: &Job, change: impl Fn(&mut Command)) -> Output {
    let mut command = job.rank(0, 1, &HEALTHY);
    change(&mut command);
    let output = run(&mut command);
    assert_eq!(output.code(), 0, "{output:?}");
    assert_eq!(output.stdout, "step 0 sum 0.0\nstep 10 sum 10.0\nstep 20 sum 20.0\nrank 0 done\n");
    assert_eq!(output.stderr, "");
    output
}

#[test]
fn tools_run_unchanged_without_thread_descriptor_or_mapping() {
    let job = Job::new();
    let collector = job.collector();
    // A process's view of itself: its threads, its descriptors, its shared memory.
    let look = "import os; print(len(os.listdir('/proc/self/task')), sorted(os.listdir('/proc/self/fd')), \
                [line for line in open('/proc/self/maps') if 'memfd' in line])";
    let source = job.path("a.c");
    fs::write(&source, "int main(void) { return 3 }\n").unwrap();
    let source = source.to_str().unwrap();
    let program = python();
    let programs: [(&Path, &[&str]); 5] = [
        (Path::new("bash"), &["-c", "echo out; echo err >&2; (exit 4); echo $?; exit 5"]),
        (Path::new("git"), &["rev-parse", "--no-such-option"]),
        (Path::new("gcc"), &["-c", source, "-o", "/dev/null"]),
        (&program, &["-c", look]),
        (&program, &["-c", "import ctypes; print(hasattr(ctypes.CDLL(None), 'ncclAllReduce')); raise SystemExit(7)"]),
    ];
    for (program, arguments) in programs {
        same(job.bare(program).args(arguments), job.hooked(program).args(arguments));
    }
    assert_eq!(job.log(), "");
    assert_eq!(collector.hellos().len() + collector.ended().len(), 0, "no connection");
}

/// Launches through every way to the functions; prints how many launches of each kind there were.
const LAUNCHES: &str = r#"
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <stdio.h>
    #include <string.h>
    #include <unistd.h>
    typedef void *P;
    typedef struct { unsigned x, y, z; } dim3;
    typedef int Launch(P, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, P, P *, P *);
    typedef struct { unsigned grid[3], block[3], shared; P stream; P attributes; unsigned count; } Config;
    typedef struct { dim3 grid, block; unsigned long shared; P stream; P attributes; unsigned count; } RuntimeConfig;
    extern Launch cuLaunchKernel;
    int cudaSetDevice(int), cudaDeviceSynchronize(void), cuModuleLoadData(P *, const char *), cuModuleGetFunction(P *, P, const char *);
    int cudaLaunchKernel(const void *, dim3, dim3, P *, unsigned long, P);
    int __cudaLaunchKernel(const void *, dim3, dim3, P *, unsigned long, P);
    int cudaLaunchKernelExC(const RuntimeConfig *, const void *, P *);
    int cudaStreamCreate(P *), cudaStreamBeginCapture(P, int), cudaStreamEndCapture(P, P *);
    int cudaGraphInstantiate(P *, P, unsigned long), cudaGraphLaunch(P, P);
    P *__cudaRegisterFatBinary(const void *);
    void __cudaRegisterFatBinaryEnd(P *);
    void __cudaRegisterFunction(P *, const char *, char *, const char *, int, P, P, P, P, P);
    static void stub(void) {}
    #define CHECK(call) do { int code = (call); if (code) { printf("%s: %d\n", #call, code); return 1; } kernels++; } while (0)
    #define PLAIN(call) do { CHECK(call); kernels--; } while (0)
    int main(int argc, char **argv) {
        int kernels = 0, status;
        P module, kernel, stream, graph, exec;
        static const struct { int magic, version; const void *data; void *unused; } wrapper = {0x466243b1, 1, "other", 0};
        P *binary = __cudaRegisterFatBinary(&wrapper);
        __cudaRegisterFunction(binary, (const char *)stub, "stub", "stub", -1, 0, 0, 0, 0, 0);
        __cudaRegisterFatBinaryEnd(binary);
        PLAIN(cudaSetDevice(0));
        PLAIN(cuModuleLoadData(&module, "other"));
        PLAIN(cuModuleGetFunction(&kernel, module, "a_kernel"));
        // Driver: by symbol, by handle, in the default scope, by cuGetProcAddress with either flag,
        // and found through itself.
        CHECK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
        P driver = dlopen("libcuda.so.1", RTLD_NOW);
        Launch *by_handle = dlsym(driver, "cuLaunchKernel"), *by_default = dlsym(RTLD_DEFAULT, "cuLaunchKernel");
        CHECK(by_handle(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
        CHECK(by_default(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
        int (*get)(const char *, P *, int, unsigned long, int *) = dlsym(driver, "cuGetProcAddress_v2"), (*again)() = NULL;
        PLAIN(get("cuGetProcAddress", (P *)&again, 12000, 0, &status));
        get = (void *)again;
        Launch *flag_0 = NULL, *flag_2 = NULL;
        PLAIN(get("cuLaunchKernel", (P *)&flag_0, 4000, 0, &status));
        PLAIN(get("cuLaunchKernel", (P *)&flag_2, 7000, 2, &status));
        CHECK(flag_0(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
        CHECK(flag_2(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
        int (*ex)(const Config *, P, P *, P *) = NULL;
        PLAIN(get("cuLaunchKernelEx", (P *)&ex, 11060, 0, &status));
        Config config = {{1, 1, 1}, {1, 1, 1}, 0, NULL, NULL, 0};
        CHECK(ex(&config, kernel, NULL, NULL));
        // Runtime: each of these is a driver launch too, and counts once.
        dim3 one = {1, 1, 1};
        CHECK(cudaLaunchKernel((P)stub, one, one, NULL, 0, NULL));
        CHECK(__cudaLaunchKernel((P)stub, one, one, NULL, 0, NULL));
        RuntimeConfig runtime = {one, one, 0, NULL, NULL, 0};
        CHECK(cudaLaunchKernelExC(&runtime, (P)stub, NULL));
        // A graph, captured empty of collectives and launched twice.
        PLAIN(cudaStreamCreate(&stream));
        PLAIN(cudaStreamBeginCapture(stream, 0));
        CHECK(cudaLaunchKernel((P)stub, one, one, NULL, 0, stream));
        PLAIN(cudaStreamEndCapture(stream, &graph));
        PLAIN(cudaGraphInstantiate(&exec, graph, 0));
        PLAIN(cudaGraphLaunch(exec, stream));
        PLAIN(cudaGraphLaunch(exec, stream));
        PLAIN(cudaDeviceSynchronize());
        printf("kernels %d graphs 2 found %d\n", kernels, dlsym(RTLD_DEFAULT, "ncclAllReduce") != NULL);
        fflush(stdout);
        // A collector gets to know a process only if it lives for a moment.
        while (argc > 1 && access(argv[1], F_OK)) usleep(1000);
        return 0;
    }
"#;

fn launches(job: &Job) -> PathBuf {
    let sim = format!("-L{}", artifacts().sim().display());
    let libraries = ["-l:libcuda.so.1", "-l:libcudart.so.13", "-ldl", "-Wl,--no-as-needed"];
    compile_c(job.dir.path(), "launches", LAUNCHES, &[&[sim.as_str(), "-w"][..], &libraries].concat())
}

/// The record of the launching program.
fn record_of(job: &Job, command: &mut Command) -> FlightRecord {
    let collector = job.collector();
    let mut process = Process::spawn(command.arg(job.path("stop")));
    process.wait_for("kernels", PATIENCE);
    collector.wait_hello();
    fs::write(job.path("stop"), "").unwrap();
    let pid = process.pid();
    assert_eq!(process.wait(PATIENCE).code(), 0);
    collector.ring(pid)
}

#[test]
fn every_launch_counts_once_on_every_path() {
    let job = Job::new();
    let program = launches(&job);
    let output = same(&mut job.bare(&program), &mut job.hooked(&program));
    assert_eq!(output.stdout, "kernels 10 graphs 2 found 0\n");
    let record = record_of(&job, &mut job.hooked(&program));
    assert_eq!((record.kernels_launched, record.graphs_launched), (10, 2), "{:?}", record.coverage);
    assert_eq!(calls(&record, "cuLaunchKernel_ptsz"), 1);
    assert_eq!(calls(&record, "cudaLaunchKernel"), 2);
    assert_eq!(calls(&record, "cudaGraphLaunch"), 2);
    let graphs = record.operations.iter().filter(|operation| operation.kind() == OpKind::GraphLaunch).count();
    assert_eq!(graphs, 2, "graph launches are bracketed");
    let per_thread = record.streams.iter().find(|stream| stream.handle == 2).expect("the per-thread stream");
    assert_eq!((per_thread.launches, per_thread.last_kernel.as_str()), (1, "a_kernel"));
    let health = record.health.unwrap();
    assert_eq!((health.panics, health.dropped, health.overflows), (0, 0, 0));
}

#[test]
fn all_launches_are_bracketed_when_asked_for() {
    let job = Job::new();
    let program = launches(&job);
    let record = record_of(&job, job.hooked(&program).env("XPU_TIMER_BRACKET", "all"));
    let kernels = record.operations.iter().filter(|operation| operation.kind() == OpKind::Kernel);
    // All but the captured one, on which an event would be an error.
    assert_eq!(kernels.count(), 9);
}

#[test]
fn launches_are_counted_by_kernel_and_stream_and_kernels_that_communicate_are_bracketed() {
    let job = Job::new();
    let collector = job.collector();
    let mut command = job.hooked(python());
    for (name, value) in [("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")] {
        command.env(name, value);
    }
    let script = tree().join("tests/examples/device_reduce.py");
    let process = Process::spawn(command.arg(script).args(["--steps=7", "--step-ms=30"]));
    let pid = process.pid();
    collector.wait_hello();
    assert_eq!(process.wait(PATIENCE).code(), 0);
    let record = collector.ring(pid);
    let kernels: Vec<(&str, u64, bool)> =
        record.kernels.iter().map(|kernel| (kernel.name.as_str(), kernel.launches, kernel.communicates)).collect();
    let communicate = ["cross_device_reduce_1stage", "put_signal_kernel", "wait_signal_kernel"];
    for name in communicate {
        let found = kernels.iter().filter(|(known, ..)| known.contains(name)).map(|(_, count, comm)| (*count, *comm));
        assert_eq!(found.collect::<Vec<_>>(), [(7, true)], "{name}: {kernels:?}");
    }
    assert!(kernels.contains(&("forward_layer", 7, false)), "{kernels:?}");
    let stream =
        |name: &str| record.kernels.iter().find(|kernel| kernel.name.contains(name)).map(|kernel| kernel.stream);
    assert_eq!(stream("cross_device_reduce_1stage"), stream("forward_layer"));
    assert_ne!(stream("put_signal_kernel"), stream("forward_layer"));
    let bracketed = record.operations.iter().filter(|operation| operation.kind() == OpKind::Kernel);
    let names: Vec<&str> = bracketed.map(|operation| operation.function.as_str()).collect();
    assert_eq!(names.len(), 7 * communicate.len(), "{names:?}");
    assert!(names.iter().all(|name| communicate.iter().any(|part| name.contains(part))), "{names:?}");
    assert_eq!(record.health.unwrap_or_default().uncounted_launches, 0);
}

#[test]
fn another_preloaded_dlsym_is_still_called() {
    let source = r#"
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <string.h>
        void *dlsym(void *handle, const char *name) {
            static void *(*real)(void *, const char *);
            if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
            return strcmp(name, "chained") ? real(handle, name) : (void *)42;
        }
    "#;
    let job = Job::new();
    let other = compile_c(job.dir.path(), "other.so", source, &["-shared", "-fPIC", "-ldl"]);
    let program = compile_c(
        job.dir.path(),
        "asks",
        "#include <dlfcn.h>\n#include <stdio.h>\nint main(void) { printf(\"%ld %d\\n\", (long)dlsym(0, \"chained\"), \
         dlsym(0, \"malloc\") != 0); }",
        &["-ldl"],
    );
    for order in [
        format!("{}:{}", artifacts().hook().display(), other.display()),
        format!("{}:{}", other.display(), artifacts().hook().display()),
    ] {
        let output = run(job.hooked(&program).env("LD_PRELOAD", order));
        assert_eq!((output.code(), output.stdout.as_str()), (0, "42 1\n"), "{output:?}");
    }
}

#[test]
fn a_healthy_rank_is_recorded_and_says_goodbye() {
    let job = Job::new();
    let collector = job.collector();
    let outputs = [0, 1].map(|rank| Process::spawn(&mut job.rank(rank, 2, &HEALTHY)));
    let pids = outputs.each_ref().map(Process::pid);
    for output in outputs.map(|process| process.wait(PATIENCE)) {
        assert_eq!((output.code(), output.stderr.as_str()), (0, ""), "{output:?}");
    }
    wait_until(PATIENCE, "both goodbyes", || collector.goodbyes().len() == 2);
    assert_eq!((collector.hangs().len(), collector.hellos().len()), (0, 2));
    let records = pids.map(|pid| collector.ring(pid));
    let [first, second] = &records;
    for (rank, record) in records.iter().enumerate() {
        assert_eq!(record.collectives_launched, 25);
        let [comm] = &record.communicators[..] else { panic!("one communicator: {record:?}") };
        assert_eq!((comm.size, comm.rank, comm.launched), (2, rank as i32, 25));
        assert_eq!((comm.started, comm.state()), (25, CommunicatorState::Finalized));
        let reduce = record.operations.iter().find(|operation| operation.op() == Op::AllReduce).unwrap();
        assert_eq!((reduce.seq, reduce.count, reduce.status()), (1, 1024, OpStatus::Completed));
        assert!(reduce.entered_ns <= reduce.started_ns && reduce.started_ns <= reduce.completed_ns, "{reduce:?}");
        assert!(record.operations.iter().any(|operation| operation.op() == Op::CommInit
            && operation.kind() == OpKind::HostCall
            && operation.function == "ncclCommInitRank"));
        assert_eq!(record.kernels_launched, 25 * 9, "the kernels of NCCL are its collectives");
    }
    assert_eq!(first.communicators[0].id, second.communicators[0].id, "both ranks agree on the communicator");
    assert_eq!(job.log(), "");
}

#[test]
fn a_hang_is_signalled_repeated_and_resolved() {
    let job = Job::new();
    let collector = job.collector();
    let arguments = ["--fault=pause", "--fault-rank=1", "--fault-step=5", "--pause=8", "--steps=10"];
    let ranks = [0, 1].map(|rank| Process::spawn(job.rank(rank, 2, &arguments).env("XPU_TIMER_HANG_TIMEOUT", "1.5")));
    let victim = ranks[0].pid();
    // On a busy machine one rank starts so late that the other one's CommInit is a hang as well.
    let in_step = || {
        let is_step = |operation: &Operation| operation.op() != Op::CommInit;
        collector.hangs().into_iter().find(|(_, hang)| hang.operation.as_ref().is_some_and(is_step))
    };
    wait_until(PATIENCE, "the hang", || in_step().is_some());
    let (pid, hang) = in_step().unwrap();
    let operation = hang.operation.clone().unwrap();
    assert_eq!(pid, victim, "the rank that waits, not the one that is late");
    assert_eq!((operation.op(), operation.seq, operation.status()), (Op::AllReduce, 6, OpStatus::Pending));
    assert!(hang.pending_ns >= 1_500_000_000 && operation.started_ns > 0, "{hang:?}");

    // The collector is killed and another one takes its place while the hang is pending.
    drop(collector);
    let collector = job.collector();
    wait_until(RECONNECT, "the hang is sent again", || {
        collector.hangs().iter().any(|(_, hang)| hang.operation.as_ref().is_some_and(|again| again.seq == 6))
    });
    wait_until(PATIENCE, "the end of the hang", || collector.resolved().contains(&(victim, operation.ticket)));
    for rank in ranks {
        let output = rank.wait(PATIENCE);
        assert_eq!((output.code(), output.stderr.as_str()), (0, ""));
    }
}

#[test]
fn an_init_that_no_peer_joins_is_a_hang() {
    let job = Job::new();
    let collector = job.collector();
    let fault = "init_skip:rank=1";
    let ranks = [0, 1].map(|rank| {
        let mut command = job.rank(rank, 2, &HEALTHY);
        Process::spawn(command.env("XPU_SIM_FAULT", fault).env("XPU_TIMER_HANG_TIMEOUT", "1"))
    });
    wait_until(PATIENCE, "the hang", || !collector.hangs().is_empty());
    let hang = collector.hangs()[0].1.operation.clone().unwrap();
    assert_eq!((hang.kind(), hang.op(), hang.returned_ns), (OpKind::HostCall, Op::CommInit, 0));
    assert_ne!(hang.communicator, 0);
    let comm = &collector.ring(ranks[0].pid()).communicators[0];
    assert_eq!((comm.id, comm.state()), (hang.communicator, CommunicatorState::Initializing));
}

#[test]
fn a_killed_rank_leaves_its_ring_and_no_goodbye() {
    let job = Job::new();
    let collector = job.collector();
    let mut rank = Process::spawn(&mut job.rank(0, 1, &["--step-ms=1"]));
    rank.wait_for("step 20", PATIENCE);
    let pid = collector.wait_hello();
    rank.signal(Signal::SIGKILL);
    wait_until(PATIENCE, "the end of the connection", || collector.ended().contains(&pid));
    assert!(collector.goodbyes().is_empty());
    assert!(collector.ring(pid).collectives_launched > 20);
}

#[test]
fn rank_and_world_come_from_the_first_communicator() {
    let job = Job::new();
    let collector = job.collector();
    let program = "import cuda; cuda.set_device(0); c = cuda.Communicator.create('world', 0, 1); print('made', flush=True); \
                   import time, os\nwhile not os.path.exists('stop'): time.sleep(0.01)\nc.destroy()";
    let mut process = Process::spawn(job.hooked(python()).args(["-c", program]).current_dir(job.dir.path()));
    process.wait_for("made", PATIENCE);
    wait_until(PATIENCE, "the rank", || {
        !collector.ranks().is_empty()
            || collector.hellos().iter().any(|(_, hello)| hello.rank.as_ref().is_some_and(|rank| rank.rank == 0))
    });
    fs::write(job.path("stop"), "").unwrap();
    assert_eq!(process.wait(PATIENCE).code(), 0);
}

#[test]
fn a_panic_in_the_hook_does_not_reach_the_host() {
    let job = Job::new();
    let collector = job.collector();
    for fault in ["ncclAllReduce:3", "ncclCommInitRank:1", "cuLaunchKernel:5", "ncclCommDestroy:1"] {
        trains_undisturbed(&job, |command| {
            command.env("XPU_TIMER_TEST_PANIC", fault);
        });
        let pid = collector.hellos().last().expect("every run says Hello").0;
        assert_eq!(collector.ring(pid).health.unwrap().panics, 1, "{fault}");
    }
}

#[test]
fn training_continues_without_a_collector() {
    let job = Job::new();
    trains_undisturbed(&job, |_| {});
    let log = job.log();
    assert_eq!(log.lines().count(), 1, "logged once: {log}");
    assert!(log.contains("no node collector"), "{log}");
}

#[test]
fn a_collector_that_reads_nothing_blocks_no_rank() {
    let job = Job::new();
    let _collector = FakeCollector::listen(&job.socket(), ReadMode::Ignores);
    trains_undisturbed(&job, |command| {
        command.env("XPU_TIMER_HANG_TIMEOUT", "0");
    });
}

#[test]
fn a_restarted_collector_is_found_again() {
    let job = Job::new();
    let collector = job.collector();
    let mut rank = Process::spawn(&mut job.rank(0, 1, &["--step-ms=1", "--seconds=3600"]));
    rank.wait_for("step 20", PATIENCE);
    assert_eq!(collector.wait_hello(), rank.pid());
    drop(collector);
    let collector = job.collector();
    wait_until(RECONNECT, "the second Hello", || !collector.hellos().is_empty());
    assert!(collector.ring(rank.pid()).collectives_launched > 0, "the ring came again");
    assert_eq!(rank.stderr(), "");
}

#[test]
fn training_continues_without_descriptors_or_a_writable_folder() {
    let job = Job::new();
    let _collector = job.collector();
    // Everything that the libraries need is open by then; what the hook needs is not available.
    let program = "import resource, os, cuda, sys\n\
                   highest = max(map(int, os.listdir('/proc/self/fd')))\n\
                   resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))\n\
                   cuda.set_device(0)\nkernel = cuda.Kernel('k', 10)\nstream = cuda.Stream()\n\
                   for _ in range(100): kernel.launch(stream)\n\
                   stream.synchronize()\nprint('done')";
    let output = same(job.bare(python()).args(["-c", program]), job.hooked(python()).args(["-c", program]));
    assert_eq!((output.code(), output.stdout.as_str()), (0, "done\n"), "{output:?}");

    let job = Job::new();
    trains_undisturbed(&job, |command| {
        command.env("XPU_TIMER_LOGGING_DIR", "/proc/nowhere").env("TMPDIR", "/proc/nowhere");
        command.env_remove("XPU_TIMER_SOCKET");
    });
}

#[test]
fn a_disabled_hook_does_nothing() {
    let job = Job::new();
    let collector = job.collector();
    trains_undisturbed(&job, |command| {
        command.env("XPU_TIMER_DISABLE", "1");
    });
    assert_eq!(collector.hellos().len() + collector.ended().len(), 0);
}

#[test]
fn a_forked_child_does_not_share_the_state_of_its_parent() {
    let job = Job::new();
    let collector = job.collector();
    let program = "import os, cuda, time\n\
        cuda.set_device(0)\nkernel = cuda.Kernel('k', 10)\nstream = cuda.Stream()\nkernel.launch(stream)\n\
        stream.synchronize()\n\
        look = lambda: (len(os.listdir('/proc/self/task')), [name for name in (os.readlink(f'/proc/self/fd/{fd}') \
                        for fd in os.listdir('/proc/self/fd') if os.path.lexists(f'/proc/self/fd/{fd}')) \
                        if 'memfd' in name or 'socket' in name])\n\
        child = os.fork()\n\
        if child == 0:\n    print(look(), flush=True); os._exit(0)\n\
        os.waitpid(child, 0)\n\
        kernel.launch(stream); stream.synchronize(); print('parent', flush=True)\n\
        while not os.path.exists('known'): time.sleep(0.01)";
    let process = Process::spawn(job.hooked(python()).args(["-c", program]).current_dir(job.dir.path()));
    // On a busy machine, the process could end before it is known.
    collector.wait_hello();
    fs::write(job.path("known"), "").unwrap();
    let output = process.wait(PATIENCE);
    assert_eq!(output.stdout, "(1, [])\nparent\n", "{output:?}");
    wait_until(PATIENCE, "the goodbye", || !collector.goodbyes().is_empty());
    let hellos = collector.hellos();
    assert_eq!(hellos.len(), 1, "only the parent: {hellos:?}");
    let record = collector.ring(hellos[0].0);
    assert_eq!(record.kernels_launched, 2, "the parent continues to record");
}

#[test]
fn a_forked_child_that_uses_the_device_starts_anew() {
    let job = Job::new();
    let collector = job.collector();
    // The simulated device does not survive a fork, as the real one does not; NCCL calls fail, but
    // they are calls.
    let program = "import os, ctypes, time\n\
        nccl = ctypes.CDLL('libnccl.so.2')\nnccl.ncclGroupStart(); nccl.ncclGroupEnd()\n\
        child = os.fork()\n\
        if child == 0:\n    nccl.ncclGroupStart(); nccl.ncclGroupEnd(); print('child', flush=True)\n\
        while not os.path.exists('stop'): time.sleep(0.01)";
    let mut command = job.hooked(python());
    let process = Process::spawn(command.args(["-c", program]).current_dir(job.dir.path()).process_group(0));
    wait_until(PATIENCE, "two processes", || collector.hellos().len() == 2);
    let hellos = collector.hellos();
    assert_ne!(hellos[0].0, hellos[1].0);
    assert!(hellos.iter().any(|(pid, _)| *pid == process.pid()));
    for (pid, hello) in &hellos {
        assert_eq!(hello.rank.as_ref().unwrap().pid, *pid);
    }
    fs::write(job.path("stop"), "").unwrap();
    assert_eq!(process.wait(PATIENCE).code(), 0);
}

#[test]
fn the_watcher_receives_no_signals_and_survives_closed_descriptors() {
    let job = Job::new();
    let collector = job.collector();
    let program = "import os, signal, cuda\n\
        hits = []\nsignal.signal(signal.SIGUSR1, lambda *_: hits.append(1))\n\
        cuda.set_device(0)\nkernel = cuda.Kernel('k', 10)\nstream = cuda.Stream()\nkernel.launch(stream)\n\
        stream.synchronize()\n\
        tasks = {}\n\
        while 'xpu_timer_watch' not in tasks:\n    \
            tasks = {open(f'/proc/self/task/{tid}/comm').read().strip(): tid for tid in os.listdir('/proc/self/task')}\n\
        status = open('/proc/self/task/' + tasks['xpu_timer_watch'] + '/status').read()\n\
        print(int(status.split('SigBlk:')[1].split()[0], 16) & (1 << 9) != 0)\n\
        os.kill(os.getpid(), signal.SIGUSR1)\n\
        os.closerange(3, 4096)\n\
        mine = [os.open('/dev/null', os.O_RDONLY) for _ in range(300)]\n\
        for _ in range(200): kernel.launch(stream)\n\
        stream.synchronize()\n\
        print(len(hits), all(os.path.lexists(f'/proc/self/fd/{fd}') for fd in mine))";
    let output = run(job.hooked(python()).args(["-c", program]));
    assert_eq!((output.code(), output.stdout.as_str(), output.stderr.as_str()), (0, "True\n1 True\n", ""));
    drop(collector);
}

/// Runs a check of the simulated device in several ranks under the hook; their flight records, when
/// everything has completed unless the environment says otherwise.
fn check(name: &str, ranks: u32, environment: &[(&str, &str)]) -> Vec<FlightRecord> {
    // The device has done its work; the watcher sees it in its next turn. The last send of
    // `point_to_point` is never received.
    let may_hang = |operation: &Operation| operation.group == 0 && matches!(operation.op(), Op::Send | Op::Recv);
    check_until(name, ranks, environment, |record| {
        let over = |operation: &Operation| operation.status() != OpStatus::Pending || may_hang(operation);
        !environment.is_empty() || record.operations.iter().all(over)
    })
}

/// As [`check`], with what must be true of every flight record in the end.
fn check_until(
    name: &str,
    ranks: u32,
    environment: &[(&str, &str)],
    settled: impl Fn(&FlightRecord) -> bool,
) -> Vec<FlightRecord> {
    let job = Job::new();
    let collector = job.collector();
    // Imported, because as a program it ends at once, and a collector gets to know a process only
    // if it lives for a moment.
    let program = format!(
        "import os, sys, time; sys.path.insert(0, {:?}); import checks; checks.{name}(); print('ok', flush=True)\n\
         while not os.path.exists('stop'): time.sleep(0.01)\nos._exit(0)",
        tree().join("tests/tests/it/sim")
    );
    let mut processes: Vec<Process> = (0..ranks)
        .map(|rank| {
            let mut command = job.hooked(python());
            command.args(["-B", "-c", &program]).current_dir(job.dir.path()).envs(environment.iter().copied());
            Process::spawn(command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string()))
        })
        .collect();
    for process in &mut processes {
        process.wait_for("ok\n", PATIENCE);
    }
    let pids: Vec<i32> = processes.iter().map(Process::pid).collect();
    wait_until(PATIENCE, "all Hellos", || {
        let hellos = collector.hellos();
        pids.iter().all(|pid| hellos.iter().any(|(greeted, _)| greeted == pid))
    });
    wait_until(PATIENCE, "what the check waits for", || pids.iter().all(|pid| settled(&collector.ring(*pid))));
    let records: Vec<FlightRecord> = pids.iter().map(|pid| collector.ring(*pid)).collect();
    fs::write(job.path("stop"), "").unwrap();
    for process in processes {
        let output = process.wait(PATIENCE);
        assert_eq!((output.code(), output.stderr.as_str()), (0, ""), "{name}: {output:?}");
    }
    for health in records.iter().filter_map(|record| record.health.as_ref()) {
        assert_eq!((health.panics, health.dropped, health.overflows), (0, 0, 0), "{name}");
    }
    records
}

#[test]
fn the_device_behaves_the_same_under_the_hook() {
    for name in ["legacy_stream_waits_for_blocking_streams", "capture_rules", "modules", "registered_kernels"] {
        check(name, 1, &[]);
    }
    check("one_process_all_devices", 1, &[]);
    check("proc_addresses", 1, &[("XPU_SIM_FAULT", "stuck_kernel:n=1")]);
    check("full_queue_blocks", 1, &[("XPU_SIM_QUEUE_DEPTH", "8"), ("XPU_SIM_FAULT", "stuck_kernel:n=1")]);
}

#[test]
fn every_collective_is_recorded_identically_on_four_ranks() {
    let records = check("collectives", 4, &[]);
    let signature = |record: &FlightRecord| -> Vec<_> {
        let collectives = record.operations.iter().filter(|operation| operation.kind() == OpKind::Collective);
        collectives
            .map(|one| (one.communicator, one.seq, one.op, one.count, one.dtype, one.reduce_op, one.peer))
            .collect()
    };
    let first = signature(&records[0]);
    assert!(first.len() > 10, "{first:?}");
    assert!(records.iter().all(|record| signature(record) == first));
    for record in &records {
        let comm = &record.communicators[0];
        assert_eq!((comm.started, comm.completed), (comm.launched, comm.launched));
    }
}

#[test]
fn a_group_is_bracketed_by_stream_and_completes_as_one() {
    for record in check("point_to_point", 4, &[]) {
        let grouped: Vec<_> = record.operations.iter().filter(|operation| operation.group != 0).collect();
        assert!(grouped.iter().any(|operation| operation.op() == Op::Send));
        assert!(grouped.iter().any(|operation| operation.op() == Op::Recv));
        for operation in &grouped {
            let leader =
                grouped.iter().find(|other| (other.group, other.stream) == (operation.group, operation.stream));
            let leader = leader.expect("at least the operation itself");
            assert_eq!(operation.status(), OpStatus::Completed, "{operation:?}");
            assert_eq!(operation.completed_ns, leader.completed_ns);
            assert!(operation.peer >= 0 && operation.completed_ns != 0 && operation.returned_ns != 0, "{operation:?}");
        }
    }
}

#[test]
fn split_and_shrunk_communicators_have_one_identity_on_all_ranks() {
    let records = check("split_and_shrink", 4, &[]);
    let mut ranks_of = std::collections::BTreeMap::<u64, Vec<usize>>::new();
    for (rank, record) in records.iter().enumerate() {
        for comm in &record.communicators {
            ranks_of.entry(comm.id).or_default().push(rank);
        }
    }
    let mut groups: Vec<Vec<usize>> = ranks_of.into_values().collect();
    groups.sort();
    // The world; even and odd ranks; all but the rank without color; all but the rank that was left
    // out.
    assert_eq!(groups, [vec![0, 1, 2], vec![0, 1, 2, 3], vec![0, 2], vec![0, 2, 3], vec![1, 3]]);
    for record in &records {
        let world = record.communicators.iter().find(|comm| comm.parent == 0).expect("the world");
        for child in record.communicators.iter().filter(|comm| comm.parent != 0) {
            assert_eq!((child.parent, child.state()), (world.id, CommunicatorState::Ready));
            assert!(child.size > 0 && child.rank >= 0 && child.rank < child.size as i32, "{child:?}");
        }
    }
}

#[test]
fn nonblocking_communicators_become_ready_when_the_host_queries_them() {
    for record in check("nonblocking", 2, &[]) {
        let init = record.operations.iter().find(|operation| operation.op() == Op::CommInit).unwrap();
        assert_eq!(init.status(), OpStatus::Completed);
        let reduce = record.operations.iter().rfind(|operation| operation.op() == Op::AllReduce).unwrap();
        assert_eq!(reduce.status(), OpStatus::Completed, "{reduce:?}");
        assert!(reduce.completed_ns > 0, "its end event was recorded: {reduce:?}");
    }
}

#[test]
fn a_child_communicator_without_a_handle_is_known_once_its_parent_is_ready() {
    let records = check("nonblocking_children", 2, &[]);
    let children = |rank: usize| {
        let [world, children @ ..] = &records[rank].communicators[..] else { panic!("no world") };
        assert!(children.iter().all(|child| child.parent == world.id && child.state() == CommunicatorState::Ready));
        let of =
            |child: &Communicator| (child.id, child.size, child.rank as usize == rank, child.launched, child.completed);
        children.iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(children(0), children(1));
    assert_eq!(
        children(0).iter().map(|child| (child.1, child.2, child.3, child.4)).collect::<Vec<_>>(),
        [(2, true, 1, 1); 2]
    );
    for record in &records {
        let calls: Vec<_> = record.operations.iter().filter(|call| call.op() == Op::CommSplit).collect();
        assert_eq!(calls.iter().map(|call| call.status()).collect::<Vec<_>>(), [OpStatus::Completed; 2], "{calls:?}");
    }
}

#[test]
fn kernels_of_flash_attention_are_timed_with_their_sizes() {
    let records = check_until("attention", 1, &[("XPU_TIMER_BRACKET", "matmuls")], rules::all_ended);
    let [record] = &records[..] else { panic!("one record") };
    let timed: Vec<_> = record.operations.iter().filter(|one| one.op() == Op::Attention).collect();
    let shapes: Vec<_> = timed
        .iter()
        .map(|one| {
            let shape = one.matmul.as_ref().expect("its sizes");
            (shape.batch, shape.m, shape.n, shape.k, shape.trans_a, one.dtype())
        })
        .collect();
    let forward = (32, 1024, 2048, 64, 0, DataType::Float16);
    let backward = (32, 1024, 2048, 64, 1, DataType::Bfloat16);
    assert_eq!(shapes, [forward, forward, backward, backward]);
    assert!(timed.iter().all(|one| one.status() == OpStatus::Completed && one.device_ns > 0), "{timed:?}");
    assert_eq!(record.kernels_launched, 9);
}

#[test]
fn asynchronous_errors_and_registrations_are_recorded() {
    for record in check("asynchronous_error", 2, &[("XPU_SIM_FAULT", "async_error:code=6")]) {
        let errors: Vec<u32> = record.communicators.iter().map(|comm| comm.async_error).collect();
        assert_eq!(errors, [6]);
        let named = record.operations.iter().filter(|call| call.op() == Op::Unspecified);
        let named: Vec<_> = named.map(|call| (call.function.as_str(), call.status())).collect();
        let completed = |name| (name, OpStatus::Completed);
        assert_eq!(named, [completed("ncclMemAlloc"), completed("ncclCommRegister")]);
    }
}

#[test]
fn an_aborted_operation_is_not_completed() {
    let records = check("abort", 2, &[]);
    let aborted = records[0].operations.iter().filter(|operation| operation.status() == OpStatus::Aborted);
    let ops: Vec<Op> = aborted.map(Operation::op).collect();
    assert_eq!(ops, [Op::AllReduce, Op::AllReduce, Op::CommInit], "{:#?}", records[0].operations);
    assert!(records[0].communicators.iter().any(|comm| comm.state() == CommunicatorState::Aborted));
}
