//! The simulated device on its own, without the hook: the behaviour of a real device, and the
//! faults.
//!
//! The checks themselves are Python, in `sim/checks.py`: ctypes is also what the example programs
//! use.

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Command, ExitStatus},
};

use tempfile::TempDir;
use xpu_timer_tests::{Output, PATIENCE, Process, artifacts, compile_c, python, tree};

/// A check to run: its name, and the environment of its ranks.
struct Check<'a> {
    name: &'a str,
    ranks: usize,
    environment: &'a [(&'a str, &'a str)],
}

impl Check<'_> {
    /// Runs all ranks to their end and returns their output.
    fn run(&self) -> Vec<Output> {
        let rendezvous = TempDir::new().unwrap();
        let spawn = |rank: usize| {
            let mut command = simulated(&python());
            command
                .arg("-B")
                .arg(tree().join("tests/tests/it/sim/checks.py"))
                .arg(self.name)
                .env("PYTHONPATH", tree().join("tests/examples"))
                .env("XPU_EXAMPLE_RENDEZVOUS", rendezvous.path())
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", self.ranks.to_string())
                .envs(self.environment.iter().copied());
            Process::spawn(&mut command)
        };
        // All of them run before the first is waited for.
        let ranks: Vec<_> = (0..self.ranks).map(spawn).collect();
        ranks.into_iter().map(|rank| rank.wait(PATIENCE)).collect()
    }

    /// Runs it, and reports which ranks failed.
    fn succeeds(&self) -> Vec<Output> {
        let outputs = self.run();
        for (rank, output) in outputs.iter().enumerate() {
            assert!(output.code() == 0 && output.stdout.ends_with("ok\n"), "{} rank {rank}: {output:#?}", self.name);
        }
        outputs
    }
}

/// Runs a check of `checks.py` in one process.
fn check(name: &str) -> Vec<Output> {
    Check { name, ranks: 1, environment: &[] }.succeeds()
}

/// Runs a check of `checks.py` as a job of some ranks.
fn check_ranks(name: &str, ranks: usize) -> Vec<Output> {
    Check { name, ranks, environment: &[] }.succeeds()
}

fn faulty(name: &str, ranks: usize, fault: &str) -> Vec<Output> {
    Check { name, ranks, environment: &[("XPU_SIM_FAULT", fault)] }.succeeds()
}

/// A command that finds the simulated libraries and inherits no setting of the user who runs the
/// tests.
fn simulated(program: &Path) -> Command {
    let mut command = Command::new(program);
    for name in ["XPU_SIM_FAULT", "XPU_SIM_DEBUG", "XPU_SIM_DEVICES", "XPU_SIM_QUEUE_DEPTH", "LD_PRELOAD"] {
        command.env_remove(name);
    }
    command.env("LD_LIBRARY_PATH", artifacts().sim());
    command
}

#[test]
fn streams_run_in_order_and_events_mark_their_progress() {
    let outputs = check("streams_and_events");
    assert_eq!(outputs[0].stderr, "", "the libraries print nothing");
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    check("legacy_stream_waits_for_blocking_streams");
}

#[test]
fn a_full_queue_blocks_the_host() {
    let environment = [("XPU_SIM_QUEUE_DEPTH", "8"), ("XPU_SIM_FAULT", "stuck_kernel:n=1")];
    Check { name: "full_queue_blocks", ranks: 1, environment: &environment }.succeeds();
}

#[test]
fn capture_follows_the_rules_of_cuda() {
    check("capture_rules");
}

#[test]
fn a_graph_keeps_alive_what_it_refers_to() {
    check("user_objects");
}

#[test]
fn a_destructor_may_still_call_the_device() {
    // The C library has dropped the values of the main thread by then.
    let source = r#"
        #include <stdio.h>
        int cudaSetDevice(int), cudaGetDevice(int *), cudaDeviceSynchronize(void);
        int __cudaPushCallConfiguration(unsigned long, unsigned, unsigned long, unsigned, unsigned long, void *);
        int ncclGroupStart(void), ncclGroupEnd(void);
        static __attribute__((destructor)) void last(void) {
            int device = -1, asked = cudaGetDevice(&device), waited = cudaDeviceSynchronize();
            int started = ncclGroupStart(), ended = ncclGroupEnd();
            printf("%d %d %d %d %d\n", asked, device, waited, started, ended);
        }
        int main(void) {
            return cudaSetDevice(1) + __cudaPushCallConfiguration(1, 1, 1, 1, 0, NULL);
        }
    "#;
    let dir = TempDir::new().unwrap();
    let sim = format!("-L{}", artifacts().sim().display());
    let program = compile_c(dir.path(), "last", source, &[&sim, "-l:libcudart.so.13", "-l:libnccl.so.2"]);
    let output = Process::spawn(&mut simulated(&program)).wait(PATIENCE);
    assert_eq!((output.code(), output.stdout.as_str()), (0, "0 1 0 0 0\n"), "{output:#?}");
}

#[test]
fn get_proc_address_has_two_forms_of_a_function() {
    faulty("proc_addresses", 1, "stuck_kernel:n=1");
}

#[test]
fn modules_define_kernels() {
    check("modules");
}

#[test]
fn the_runtime_launches_registered_kernels() {
    check("registered_kernels");
}

#[test]
fn memory_and_devices() {
    check("memory");
}

#[test]
fn forked_children_are_refused_or_work_completely() {
    check("forks");
}

#[test]
fn four_ranks_get_right_results_from_every_collective() {
    check_ranks("collectives", 4);
}

#[test]
fn sends_and_receives_of_a_group_do_not_wait_for_each_other() {
    check_ranks("point_to_point", 4);
}

#[test]
fn a_missing_rank_leaves_events_pending() {
    check_ranks("missing_rank", 4);
}

#[test]
fn ranks_that_call_different_collectives_hang() {
    check_ranks("shape_mismatch_of_the_program", 2);
}

#[test]
fn fault_skip_pairs_with_the_next_collective() {
    faulty("skipped_pairs_with_the_next", 3, "skip:rank=1,n=2");
}

#[test]
fn faults_op_and_size_hang() {
    faulty("mismatch_hangs", 2, "op:rank=1,n=2");
    faulty("mismatch_hangs", 2, "size:rank=1,n=2");
}

#[test]
fn fault_stall_stops_every_transfer() {
    faulty("stalled", 3, "stall:bytes=1000");
}

#[test]
fn fault_init_skip_blocks_the_others_in_the_initialization() {
    faulty("init_skipped", 3, "init_skip:rank=1");
}

#[test]
fn fault_kill_ends_one_rank() {
    let check = Check { name: "killed", ranks: 3, environment: &[("XPU_SIM_FAULT", "kill:rank=1,n=3")] };
    let outputs = check.run();
    assert_eq!(outputs[1].status, ExitStatus::from_raw(libc::SIGKILL), "{:#?}", outputs[1]);
    assert!(outputs[1].stdout.ends_with("step 2\n"), "{:#?}", outputs[1]);
    for output in [&outputs[0], &outputs[2]] {
        assert!(output.code() == 0 && output.stdout.ends_with("ok\n"), "{output:#?}");
    }
}

#[test]
fn fault_slow_is_the_kernels_of_one_rank_and_a_bad_fault_is_named_once() {
    for output in faulty("slow_rank", 2, "slow:rank=1,ms=40;what:n=1") {
        assert_eq!(output.stderr, "XPU_SIM_FAULT: \"what:n=1\": unknown fault \"what\"; ignored\n");
    }
}

#[test]
fn nonblocking_communicators_are_in_progress_until_all_are_in() {
    check_ranks("nonblocking", 2);
    check_ranks("nonblocking_children", 2);
}

#[test]
fn kernels_of_several_processes_wait_for_the_flags_of_each_other() {
    check_ranks("kernels_meet", 2);
}

#[test]
fn an_abort_releases_what_is_pending() {
    check_ranks("abort", 2);
}

#[test]
fn communicators_split_and_shrink() {
    check_ranks("split_and_shrink", 4);
}

#[test]
fn a_communicator_grows() {
    check_ranks("grown", 4);
    check_ranks("children_of_a_grown_one", 4);
}

#[test]
fn a_graph_holds_collectives() {
    check_ranks("captured_collectives", 2);
}

#[test]
fn a_lost_device_and_a_destroyed_context_answer_errors() {
    let environment = [("XPU_SIM_FAULT", "lost:n=3")];
    Check { name: "a_lost_device_answers_its_error", ranks: 1, environment: &environment }.succeeds();
    check("a_destroyed_context_has_no_events");
}

#[test]
fn green_contexts_have_streams_and_belong_to_one_thread() {
    check_ranks("green_contexts", 2);
}

#[test]
fn one_process_drives_all_devices() {
    check("one_process_all_devices");
}

#[test]
fn a_job_that_ends_leaves_nothing_in_shared_memory() {
    // An arena that nobody holds any more, as a killed job leaves it, is swept away by the next
    // job. Other tests have arenas of their own at the same time, so only this one's name is looked
    // at.
    let stale = Path::new("/dev/shm/xpu-sim-nccl-00000000000000000000000000stale");
    fs::write(stale, [0; 64]).unwrap();
    check_ranks("split_and_shrink", 4);
    assert!(!stale.exists());
}

#[test]
fn nccl_calls_itself_where_an_interposer_sees_it() {
    let source = r#"
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stddef.h>
        static void *real(const char *name) {
            return dlsym(dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_LAZY), name);
        }
        int count_ncclGroupStart, count_ncclBroadcast, count_ncclGetUniqueId;
        int ncclGroupStart(void) {
            count_ncclGroupStart++;
            return ((int (*)(void))real("pncclGroupStart"))();
        }
        int ncclGetUniqueId(void *id) {
            count_ncclGetUniqueId++;
            return ((int (*)(void *))real("pncclGetUniqueId"))(id);
        }
        int ncclBroadcast(const void *s, void *r, size_t n, int t, int root, void *c, void *stream) {
            count_ncclBroadcast++;
            return ((int (*)(const void *, void *, size_t, int, int, void *, void *))real("pncclBroadcast"))(
                s, r, n, t, root, c, stream);
        }
    "#;
    let dir = TempDir::new().unwrap();
    let library = compile_c(dir.path(), "interposer.so", source, &["-shared", "-fPIC", "-ldl"]);
    let environment = [("LD_PRELOAD", library.to_str().unwrap())];
    Check { name: "calls_through_symbols", ranks: 1, environment: &environment }.succeeds();
}

#[test]
fn a_blocked_thread_is_seen_in_the_function_it_called() {
    // The thread's own signal handler unwinds its stack with the C compiler's unwinder.
    let source = r#"
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <execinfo.h>
        #include <pthread.h>
        #include <signal.h>
        #include <stdio.h>
        #include <unistd.h>
        static void show(int signal) {
            void *frames[64];
            backtrace_symbols_fd(frames, backtrace(frames, 64), 1);
            _exit(0);
        }
        static void *interrupt(void *main_thread) {
            char path[64], state[512] = "";
            snprintf(path, sizeof path, "/proc/self/task/%d/stat", getpid());
            do {
                FILE *file = fopen(path, "r");
                fgets(state, sizeof state, file);
                fclose(file);
                usleep(1000);
            } while (*(__builtin_strrchr(state, ')') + 2) != 'S');
            pthread_kill(*(pthread_t *)main_thread, SIGUSR1);
            return NULL;
        }
        int main(void) {
            void *warm[1];
            backtrace(warm, 1);
            signal(SIGUSR1, show);
            void *runtime = dlopen("libcudart.so.13", RTLD_NOW), *driver = dlopen("libcuda.so.1", RTLD_NOW);
            int (*set_device)(int) = dlsym(runtime, "cudaSetDevice");
            int (*synchronize)(void *) = dlsym(runtime, "cudaStreamSynchronize");
            int (*load)(void **, const void *) = dlsym(driver, "cuModuleLoadData");
            int (*function)(void **, void *, const char *) = dlsym(driver, "cuModuleGetFunction");
            int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                          void **) = dlsym(driver, "cuLaunchKernel");
            void *module, *kernel;
            if (set_device(0) || load(&module, "other") || function(&kernel, module, "any")
                || launch(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL))
                return 3;
            pthread_t self = pthread_self(), thread;
            pthread_create(&thread, NULL, interrupt, &self);
            return synchronize(NULL);
        }
    "#;
    let dir = TempDir::new().unwrap();
    let program = compile_c(dir.path(), "blocked", source, &["-g", "-rdynamic", "-ldl", "-lpthread"]);
    let output = Process::spawn(simulated(&program).env("XPU_SIM_FAULT", "stuck_kernel:n=1")).wait(PATIENCE);
    assert_eq!(output.code(), 0, "{output:#?}");
    let seen = |text: &str| output.stdout.lines().position(|line| line.contains(text));
    let (driver, runtime) = (seen("(cuStreamSynchronize+"), seen("(cudaStreamSynchronize+"));
    assert!(driver.is_some() && driver < runtime && runtime < seen("(main+"), "{}", output.stdout);
}
