//! Ranks that say little to the device. Some never make a device call while the other ranks of
//! their job wait for them: under a launcher for all of them, as with torchrun, and under one for
//! each, as with mpirun; some of these hang in a known defect, in a small library or Python package
//! with the functions and the version of the real one. Others launch no kernel for a long time and
//! are healthy: their other device calls count as activity, and `XPU_TIMER_HANG_KILL` spares them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use xpu_timer_tests::{Incident, Job, PATIENCE, Process, artifacts, compile_c, python, tree};

const RANKS: u32 = 4;

/// Trains, except for rank 2.
fn script(job: &Job, rank_2: &str) -> PathBuf {
    let examples = tree().join("tests/examples").display().to_string();
    let script = job.dir.join("silent.py");
    let text = format!(
        "import os, runpy, sys, time\n\
         def import_slowly():\n    {rank_2}\n\
         if os.environ['RANK'] == '2':\n    import_slowly()\n\
         sys.path.insert(0, {examples:?})\n\
         runpy.run_path({examples:?} + '/train.py', run_name='__main__')\n"
    );
    fs::write(&script, text).expect("the job's folder");
    script
}

fn of_one_launcher(job: &Job, rank_2: &str) -> Vec<Process> {
    let mut command = job.launch(python());
    command.arg(tree().join("tests/examples/run_ranks.py")).arg(format!("--nproc={RANKS}")).arg(script(job, rank_2));
    vec![Process::spawn(&mut command)]
}

fn of_a_launcher_each(job: &Job, rank_2: &str) -> Vec<Process> {
    let script = script(job, rank_2);
    let rank = |rank: u32| {
        let mut command = job.launch(python());
        let variables = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", RANKS), ("LOCAL_WORLD_SIZE", RANKS)];
        Process::spawn(command.arg(&script).envs(variables.map(|(name, value)| (name, value.to_string()))))
    };
    (0..RANKS).map(rank).collect()
}

fn verdict(incident: &Incident) -> String {
    assert_eq!(incident.verdict["culprits"], json!([2]), "{}", incident.verdict);
    incident.verdict["sentence"].as_str().expect("a sentence").to_string()
}

#[test]
fn a_rank_that_stands_before_its_first_device_call_is_named_with_its_place() {
    for start in [of_one_launcher, of_a_launcher_each] {
        let job = Job::new();
        let _ranks = start(&job, "time.sleep(600)");
        let incident = job.wait_incident(1, PATIENCE);
        let sentence = verdict(&incident);
        assert!(sentence.contains("silent.py:3 in import_slowly"), "{sentence}");
    }
}

#[test]
fn a_rank_that_ended_before_its_first_device_call_is_dead() {
    for start in [of_one_launcher, of_a_launcher_each] {
        let job = Job::new();
        // As long as a large import takes.
        let _ranks = start(&job, "time.sleep(3); sys.exit(3)");
        let incident = job.wait_incident(1, PATIENCE);
        let sentence = verdict(&incident);
        assert_eq!(incident.verdict["cause"], "process_dead", "{sentence}");
        assert!(sentence.contains("before its first device call"), "{sentence}");
    }
}

/// Functions with the names of the published stacks. They are local, so nothing interposes them.
const STAND_IN: &str = r#"
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <netinet/in.h>
#include <unistd.h>

/* What a library prints at its start. */
const char banner[] = BANNER;

#define FRAME static void
#define END __asm__ volatile("")

static int joins, accepts;
static pthread_t proxy;

FRAME block(void) { for (;;) poll(0, 0, -1); }
FRAME commFree(void) { pthread_join(proxy, 0); END; }
FRAME commReclaim(void) { commFree(); END; }
FRAME ncclCommAbort(void) { if (joins) commReclaim(); else block(); END; }
FRAME waits(void) __asm__("_ZN4c10d16ProcessGroupNCCL22waitForFutureOrTimeoutEv");
FRAME waits(void) { block(); END; }
FRAME aborts(void) __asm__("_ZN4c10d16ProcessGroupNCCL5abortEv");
FRAME aborts(void) { waits(); END; }

FRAME ncclSocketAccept(void) {
  struct sockaddr_in any = {AF_INET};
  int listening = socket(AF_INET, SOCK_STREAM, 0);
  bind(listening, (struct sockaddr *)&any, sizeof any);
  listen(listening, 1);
  accept(listening, 0, 0);
  END;
}
FRAME ncclProxyService(void) { if (accepts) ncclSocketAccept(); else block(); END; }

FRAME gomp_team_barrier_wait_end(void) { block(); END; }
FRAME GOMP_parallel(void) { gomp_team_barrier_wait_end(); END; }

static void *run_abort(void *nothing) { ncclCommAbort(); return nothing; }
static void *run_service(void *nothing) { ncclProxyService(); return nothing; }

void abort_group(void) { pthread_create(&proxy, 0, run_abort, 0); aborts(); END; }
void abort_alone(void) { ncclCommAbort(); END; }
void abort_and_join(void) { joins = 1; pthread_create(&proxy, 0, run_service, 0); ncclCommAbort(); END; }
void serve_others(void) { accepts = 1; pthread_create(&proxy, 0, run_service, 0); block(); END; }
void in_parallel(void) { GOMP_parallel(); END; }
"#;

/// The expression that calls a function of a stand-in.
fn call(library: &Path, function: &str) -> String {
    format!("__import__('ctypes').CDLL({:?}).{function}()", library.display().to_string())
}

/// A stand-in in a file with this name and with this text in its data.
fn stand_in(job: &Job, file: &str, banner: &str) -> PathBuf {
    let banner = format!("-DBANNER={banner:?}");
    compile_c(&job.dir, file, STAND_IN, &["-O0", "-shared", "-fPIC", "-pthread", &banner])
}

/// Checks that the verdict names rank 2, which runs these lines, and these known defects with their
/// versions.
fn expect(job: &Job, rank_2: &[&str], defects: &[(&str, &str)]) {
    let _ranks = of_one_launcher(job, &rank_2.join("\n    "));
    let incident = job.wait_incident(1, PATIENCE);
    verdict(&incident);
    let verdict = &incident.verdict;
    let known = verdict["known_defects"].as_array().expect("a list");
    let text = |defect: &Value, field: &str| defect[field].as_str().unwrap_or("unknown").to_owned();
    let found: Vec<_> = known.iter().map(|defect| (text(defect, "name"), text(defect, "version"))).collect();
    let found: Vec<(&str, &str)> = found.iter().map(|(name, version)| (name.as_str(), version.as_str())).collect();
    assert_eq!(found, defects, "{verdict}");
    assert!(known.iter().all(|defect| defect["ranks"] == json!([2])), "{verdict}");
}

#[test]
fn an_abort_of_nccl_that_hangs_is_known_in_the_affected_version() {
    for (version, defects) in [("2.25.1", &[("nccl_abort_2_25", "2.25.1")][..]), ("2.26.2", &[])] {
        let job = Job::new();
        let library = stand_in(&job, "libnccl.so.2", &format!("NCCL version {version}+cuda12.8"));
        expect(&job, &[&call(&library, "abort_group")], defects);
    }
}

#[test]
fn another_hang_in_an_affected_version_is_no_known_defect() {
    let job = Job::new();
    let library = stand_in(&job, "libnccl.so.2", "NCCL version 2.25.1+cuda12.8");
    expect(&job, &[&call(&library, "abort_alone")], &[]);
}

#[test]
fn the_version_in_the_name_of_a_library_counts() {
    for (file, function, defect) in [
        ("libnccl.so.2.18.1", "abort_and_join", ("nccl_abort_proxy", "2.18.1")),
        ("libnccl.so.2.27.5", "serve_others", ("nccl_stray_connection", "2.27.5")),
    ] {
        let job = Job::new();
        let library = stand_in(&job, file, "");
        expect(&job, &[&call(&library, function)], &[defect]);
    }
}

#[test]
fn a_parallel_region_after_a_fork_is_a_known_defect_of_the_worker() {
    let job = Job::new();
    let library = stand_in(&job, "libgomp.so.1.0.0", "");
    let call = format!("    {}", call(&library, "in_parallel"));
    expect(&job, &["if os.fork() == 0:", &call, "os.wait()"], &[("gomp_after_fork", "1.0.0")]);
}

#[test]
fn the_version_of_a_package_counts() {
    let job = Job::new();
    let packages = job.dir.join("lib/python3/site-packages");
    let utilities = packages.join("torch/utils");
    fs::create_dir_all(&utilities).expect("the job's folder");
    for (file, text) in [
        ("torch/__init__.py", ""),
        ("torch/version.py", "__version__ = '2.9.0+cu128'\ndebug = False\n"),
        ("torch/utils/__init__.py", ""),
        (
            "torch/utils/file_baton.py",
            "import time\nclass FileBaton:\n    def wait(self):\n        while True:\n            time.sleep(0.1)\n",
        ),
    ] {
        fs::write(packages.join(file), text).expect("the job's folder");
    }
    let path = format!("sys.path.insert(0, {:?})", packages.display().to_string());
    let lines = [path.as_str(), "from torch.utils.file_baton import FileBaton", "FileBaton().wait()"];
    expect(&job, &lines, &[("torch_stale_build_lock", "2.9.0")]);
}

/// A loop of some seconds over calls that launch no kernel and no collective.
const PROGRAM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
typedef void *P;
int cudaMalloc(P *out, size_t bytes), cudaMemset(P to, int value, size_t bytes), cudaDeviceSynchronize(void);
int cudaMemcpy(P to, const void *from, size_t bytes, int kind);
int main(int argc, char **argv) {
    static char shard[1 << 20];
    P device;
    if (cudaMalloc(&device, sizeof shard)) return 1;
    struct timespec pause = {0, 20000000};
    time_t end = time(NULL) + atoi(argv[2]);
    while (time(NULL) < end) {
        if (!strcmp(argv[1], "memset") && (cudaMemset(device, 0, sizeof shard) || cudaDeviceSynchronize())) return 2;
        if (!strcmp(argv[1], "shards")) {
            FILE *file = fopen("/proc/self/exe", "r");
            size_t bytes = fread(shard, 1, sizeof shard, file);
            fclose(file);
            if (cudaMemcpy(device, shard, bytes, 1)) return 3;
        }
        nanosleep(&pause, NULL);
    }
    return 0;
}
"#;

#[test]
fn a_job_that_copies_sets_and_synchronizes_without_a_launch_is_active() {
    let seconds = "7";
    let jobs = ["memset", "shards"].map(|kind| {
        let job = Job::new().with("XPU_TIMER_HANG_TIMEOUT", "1").with("XPU_TIMER_IDLE_TIMEOUT", "2");
        let job = job.with("XPU_TIMER_HANG_KILL", "1").with("XPU_TIMER_SAMPLE_INTERVAL", "1");
        let sim = format!("-L{}", artifacts().sim().display());
        let program = compile_c(&job.dir, "healthy", PROGRAM, &[&sim, "-l:libcudart.so.13"]);
        let mut command = job.launch(program);
        let process = Process::spawn(command.args([kind, seconds]).env("RANK", "0").env("WORLD_SIZE", "1"));
        (job, process)
    });
    for (job, process) in jobs {
        let output = process.wait(PATIENCE);
        assert_eq!(output.code(), 0, "{}", output.stderr);
        let incidents = job.incidents();
        assert!(incidents.is_empty(), "{}", incidents[0].verdict);
    }
}
