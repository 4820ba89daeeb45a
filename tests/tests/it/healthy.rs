//! Healthy jobs that launch no kernel for a long time: their other device calls count as activity,
//! and `XPU_TIMER_HANG_KILL` spares them.

use xpu_timer_tests::{Job, PATIENCE, Process, artifacts, compile_c};

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
