//! The hook as a guest of programs that do what programs are free to do: they continue as without
//! the hook, print nothing more, and the hook records what it can. It allocates nothing on the hot
//! path, and tells in every dump what it costs.

use std::{fs, process::Command};

use xpu_timer_proto::{server::Stacktrace, v1::FlightRecord};
use xpu_timer_tests::{
    FakeCollector, Job, Output, PATIENCE, Process, ReadMode, artifacts, compile_c, http, idle_library, lacks, skip,
    wait_until,
};

/// A driver and a collective library that do nothing, in the job's folder.
pub fn idle_libraries(job: &Job) {
    idle_library(&job.dir, "libcuda.so.1", "-DDRIVER");
    idle_library(&job.dir, "libnccl.so.2", "-DCOLLECTIVES");
}

/// A program linked to them, under the hook.
pub fn idle_device(job: &Job, name: &str, source: &str, change: impl FnOnce(&mut Command)) -> Process {
    idle_libraries(job);
    let folder = format!("-L{}", job.dir.display());
    let link = ["-O2", &folder, "-l:libcuda.so.1", "-l:libnccl.so.2", "-Wl,-rpath,$ORIGIN", "-pthread"];
    hooked_program(job, name, source, &link, change)
}

/// A program under the hook, which looks for the collector at `fake.sock`.
pub fn hooked_program(
    job: &Job,
    name: &str,
    source: &str,
    link: &[&str],
    change: impl FnOnce(&mut Command),
) -> Process {
    let program = compile_c(&job.dir, name, source, link);
    let mut command: Command = job.command(program);
    command.env("LD_PRELOAD", artifacts().hook()).env("XPU_TIMER_SOCKET", job.dir.join("fake.sock"));
    change(command.env_remove("LD_LIBRARY_PATH"));
    Process::spawn(&mut command)
}

#[test]
fn no_hooked_call_allocates_but_the_first_ones() {
    let job = Job::new();
    let collector = FakeCollector::listen(&job.dir.join("fake.sock"), ReadMode::Reads);
    let libraries = [
        ("libmpi.so.40", "-DMPI"),
        ("libcublas.so.13", "-DBLAS"),
        ("libcuda.so.1", "-DDRIVER"),
        ("libnccl.so.2", "-DCOLLECTIVES"),
    ];
    for (soname, part) in libraries {
        idle_library(&job.dir, soname, part);
    }
    let folder = format!("-L{}", job.dir.display());
    let named = libraries.map(|(soname, _)| format!("-l:{soname}"));
    let mut link = vec!["-O2", &folder, "-Wl,-rpath,$ORIGIN", "-pthread"];
    link.extend(named.iter().map(String::as_str));
    // A busy machine may leave the watcher no processor while operations come as fast as they can:
    // then they are dropped, which is cheaper than the usual way.
    let (output, flight) = (0..5)
        .map(|_| {
            let program = hooked_program(&job, "allocations", include_str!("cost/allocations.c"), &link, |_| {});
            let pid = program.pid();
            let output = program.wait(PATIENCE);
            assert_eq!(output.code(), 0, "{}", output.stderr);
            (output, collector.ring(pid))
        })
        .find(|(_, flight)| flight.health.as_ref().is_some_and(|health| health.dropped == 0))
        .expect("nothing is dropped in one of five runs");
    let lines: Vec<(&str, Vec<u64>)> = output
        .stdout
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(thread, numbers)| (thread, numbers.split(' ').map(|number| number.parse().unwrap()).collect()))
        .collect();
    // The first call starts the hook, which allocates: so the counter sees what the hook does. Then
    // launches, collectives, groups, graphs, matrix products and messages.
    let (thread, numbers) = &lines[0];
    assert!(*thread == "first" && numbers[0] > 0, "{lines:?}");
    assert_eq!(numbers[1..], [0; 6], "{lines:?}");
    assert_eq!(lines[1], ("second", vec![0; 7]), "another thread allocates nothing at all");
    let health = flight.health.unwrap();
    assert_eq!((flight.kernels_launched, health.dropped, health.panics), (200_002, 0, 0), "the way was the usual one");
    assert_eq!(flight.graphs_launched, 2 * (8 + 20 * 100));
    let calls =
        |name: &str| flight.coverage.iter().find(|function| function.name == name).map(|function| function.calls);
    assert_eq!(calls("ncclAllReduce"), Some(2 * (8 + 20 * 500)));
    assert_eq!(calls("ncclSend"), Some(2 * 4 * (8 + 20 * 50)));
    assert_eq!((calls("cublasSgemm_v2"), calls("MPI_Wait")), (Some(2 * (8 + 20 * 500)), Some(2 * (8 + 20 * 500))));
    // One of 256 launches and one of 32 collectives is measured.
    assert!(health.launch_samples + health.long_samples >= 2 * 390, "{health:?}");
    assert!(health.collective_samples + health.long_samples >= 2 * 300, "{health:?}");
    let mean = health.launch_cost_ns as f64 / health.launch_samples as f64;
    assert!(mean > 0.0 && mean < 20_000.0, "{mean} ns a launch");
}

#[test]
fn every_dump_reports_the_cost_and_the_losses_of_the_hook() {
    let job = Job::new();
    let mut ranks = job.train(2, &["--step-ms=5", "--seconds=600"]);
    ranks.wait_for("step 60 ", PATIENCE);
    let (code, body) = http("POST", job.port, "/dump").expect("/dump");
    assert_eq!(code, 200, "{body}");
    let incident = job.wait_incident(1, PATIENCE);
    for rank in 0..2 {
        let bytes = fs::read(incident.path.join(format!("{rank:05}-00002.stacktrace"))).unwrap();
        let dump: Stacktrace = xpu_timer_proto::Message::decode(&bytes[..]).unwrap();
        let health = dump.flight_record.unwrap().health.unwrap();
        assert!(health.launch_samples + health.long_samples > 0 && health.collective_samples > 0, "{health:?}");
        assert_eq!((health.dropped, health.panics, health.overflows), (0, 0, 0), "{health:?}");
    }
    let hook = &incident.verdict["hook"];
    assert!(hook["launch_ns"].as_f64().is_some_and(|ns| ns > 0.0), "{hook}");
    assert!(hook["collective_ns"].as_f64().is_some_and(|ns| ns > 0.0), "{hook}");
    assert_eq!(hook["dropped"], 0, "{hook}");
    let text = fs::read_to_string(incident.path.join("verdict.txt")).unwrap();
    assert!(text.contains("\nhook: "), "{text}");
}

const GUEST: &str = include_str!("guest/guest.c");
const LOADS: &str = include_str!("guest/loads.c");
/// Another tool that is preloaded and wraps what dlsym gives out. It asks the C library past every
/// library between.
const SHIM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

typedef int Launch(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

int passed;
static Launch *next;

static int launch(void *function, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f, unsigned shared,
                  void *stream, void **parameters, void **extra) {
    passed++;
    return next(function, a, b, c, d, e, f, shared, stream, parameters, extra);
}

void *dlsym(void *handle, const char *name) {
    static void *(*real)(void *, const char *);
    if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    void *found = real(handle, name);
    if (!found || strcmp(name, "cuLaunchKernel") != 0) return found;
    next = (Launch *)found;
    return (void *)launch;
}
"#;

/// Waits for a program that prints "ok"; the flight record, if the process could say Hello.
fn ends_well(collector: &FakeCollector, program: Process, case: &str) -> Option<FlightRecord> {
    let pid = program.pid();
    let output = program.wait(PATIENCE);
    assert_eq!((output.code(), output.stdout.as_str(), output.stderr.as_str()), (0, "ok\n", ""), "{case}");
    let spoke = collector.hellos().iter().any(|(speaker, _)| *speaker == pid);
    let record = spoke.then(|| collector.ring(pid));
    if let Some(health) = record.as_ref().and_then(|record| record.health.as_ref()) {
        assert_eq!(health.panics, 0, "{case}");
    }
    record
}

/// Runs one case of `guest.c`.
fn guest(arguments: &[&str], environment: &[(&str, &str)]) -> Option<FlightRecord> {
    let job = Job::new();
    let collector = FakeCollector::listen(&job.dir.join("fake.sock"), ReadMode::Reads);
    let program = idle_device(&job, "guest", GUEST, |command| {
        command.args(arguments).envs(environment.iter().copied());
    });
    ends_well(&collector, program, &format!("{arguments:?} {environment:?}"))
}

/// Runs one case of `loads.c`, compiled with `flags`.
fn loads(case: &str, flags: &[&str], change: impl FnOnce(&Job, &mut Command)) -> Option<FlightRecord> {
    let job = Job::new();
    idle_libraries(&job);
    let collector = FakeCollector::listen(&job.dir.join("fake.sock"), ReadMode::Reads);
    let program = hooked_program(&job, "loads", LOADS, flags, |command| {
        command.arg(case).arg(&job.dir);
        change(&job, command);
    });
    ends_well(&collector, program, case)
}

#[test]
fn system_limits_affect_the_record_and_not_the_program() {
    // Shared memory counts as a file: to ask for more than is allowed raises a signal that ends the
    // process.
    assert!(guest(&["file size"], &[]).is_none());
    // Wherever it runs out: megabytes that the program may still map at its first launch.
    for left in (0..48).step_by(3) {
        let record = guest(&["address space", &left.to_string()], &[]);
        assert!(record.is_some() || left < 30, "{left} MB left");
    }
    guest(&["locked memory"], &[]);
}

#[test]
fn a_filter_of_system_calls_refuses_or_kills_and_the_program_goes_on() {
    assert!(guest(&["container"], &[]).is_none(), "the ring was refused");
    assert!(guest(&["shut in"], &[]).is_none(), "nothing was tried");
}

#[test]
fn a_program_in_another_root_goes_on() {
    let job = Job::new();
    if !nix::unistd::geteuid().is_root() {
        return skip("chroot needs root");
    }
    guest(&["chroot", job.dir.to_str().unwrap()], &[]);
}

#[test]
fn forks_vforks_and_signals_in_the_middle_of_launches() {
    guest(&["fork"], &[]);
    let record = guest(&["vfork"], &[]).expect("a record");
    assert_eq!((record.kernels_launched, record.collectives_launched), (200, 50));
    // A handler that launches while its thread is in a call of the hook is only passed through.
    let record = guest(&["signals"], &[]).expect("a record");
    assert!(record.kernels_launched >= 80_000 && record.collectives_launched >= 20_000, "{}", record.kernels_launched);
}

#[test]
fn ten_thousand_threads_count_each_launch_and_use_the_lanes_again() {
    let record = guest(&["threads"], &[]).expect("a record");
    assert_eq!((record.kernels_launched, record.collectives_launched), (40_000, 10_000));
    assert_eq!(record.health.unwrap().overflows, 0);
    guest(&["cancelled"], &[]).expect("a record");
    let record = guest(&["small stack"], &[]).expect("the smallest stack that a thread can have is enough to start");
    assert_eq!((record.kernels_launched, record.collectives_launched), (12, 3));
}

#[test]
fn more_communicators_than_the_table_holds_are_counted_and_cost_nobody_else() {
    let record = guest(&["communicators"], &[]).expect("a record");
    assert_eq!((record.kernels_launched, record.collectives_launched), (6000, 1500));
    assert_eq!(record.communicators.len(), xpu_timer_proto::ring::comm::SLOTS);
    assert!(record.health.unwrap().overflows > 0);
}

#[test]
fn a_program_that_closes_every_descriptor_gets_its_own_numbers() {
    let job = Job::new();
    let collector = FakeCollector::listen(&job.dir.join("fake.sock"), ReadMode::Reads);
    let delivered = job.dir.join("delivered");
    let program = idle_device(&job, "guest", GUEST, |command| {
        command.arg("closing").arg(&delivered);
    });
    wait_until(PATIENCE, "the ring is delivered", || !collector.hellos().is_empty());
    fs::write(&delivered, "").unwrap();
    let record = ends_well(&collector, program, "closing").expect("a record");
    assert!(record.kernels_launched >= 40, "{}", record.kernels_launched);
}

/// The hook in front of another preloaded library, and behind it.
fn beside(library: &str) -> [String; 2] {
    let hook = artifacts().hook().display().to_string();
    [format!("{library}:{hook}"), format!("{hook}:{library}")]
}

#[test]
fn other_preloaded_allocators_get_along() {
    for (package, soname) in
        [("libjemalloc2", "libjemalloc.so.2"), ("libtcmalloc-minimal4", "libtcmalloc_minimal.so.4")]
    {
        let library = format!("/usr/lib/x86_64-linux-gnu/{soname}");
        if let Some(reason) = lacks(package) {
            return skip(&reason);
        }
        for preload in beside(&library) {
            for case in ["fork", "vfork", "cancelled"] {
                guest(&[case], &[("LD_PRELOAD", &preload)]).expect("a record");
            }
        }
    }
}

/// A library that the compiler brings along.
fn of_gcc(name: &str) -> String {
    let gcc = Command::new("gcc").arg(format!("-print-file-name={name}")).output().expect("gcc runs");
    let path = String::from_utf8_lossy(&gcc.stdout).trim().to_string();
    assert!(path.starts_with('/'), "gcc brings its own: {path}");
    path
}

#[test]
fn sanitizers_get_along() {
    let [asan, lsan, tsan, ubsan] = ["libasan.so", "liblsan.so", "libtsan.so", "libubsan.so"].map(of_gcc);
    for preload in beside(&ubsan) {
        guest(&["fork"], &[("LD_PRELOAD", &preload)]).expect("a record");
    }
    // These take the watcher for a thread of the program, so there is none. AddressSanitizer
    // insists on being the first.
    let quick = ("TSAN_OPTIONS", "atexit_sleep_ms=0");
    let [first, _] = beside(&asan);
    for preload in beside(&tsan).iter().chain(&beside(&lsan)).chain([&first]) {
        for case in ["children end", "table"] {
            assert!(guest(&[case], &[("LD_PRELOAD", preload), quick]).is_none());
        }
    }
    for preload in [&beside(&tsan)[0], &first] {
        let whole = ("ASAN_OPTIONS", "detect_leaks=0");
        assert!(guest(&["fork"], &[("LD_PRELOAD", preload), quick, whole]).is_none());
    }
}

#[test]
fn signal_and_coroutine_stacks_are_large_enough() {
    let record = guest(&["coroutines"], &[]).expect("a record");
    assert_eq!((record.kernels_launched, record.collectives_launched), (800, 200));
    let record = guest(&["signal stack"], &[]).expect("a record");
    assert_eq!((record.kernels_launched, record.collectives_launched), (4 * 1001, 1001));
}

#[test]
fn processes_created_in_every_way_continue() {
    guest(&["spawn"], &[]).expect("a record");
    let record = guest(&["shared memory"], &[]).expect("a record");
    // Launches of a process that shares the memory are counted there.
    assert_eq!((record.kernels_launched, record.collectives_launched), (4 * 420, 420));
    let record = guest(&["daemon"], &[]).expect("a record");
    assert_eq!((record.kernels_launched, record.collectives_launched), (80, 20));
    guest(&["exec"], &[]).expect("a record");
    guest(&["children end"], &[]).expect("a record");
}

#[test]
fn later_address_patches_take_precedence() {
    let record = guest(&["table"], &[]).expect("a record");
    assert_eq!((record.kernels_launched, record.collectives_launched), (4 * 51, 51));
}

#[test]
fn libraries_may_be_closed_while_the_watcher_uses_them() {
    let record = loads("closes", &[], |_, _| {}).expect("a record");
    assert_eq!((record.kernels_launched, record.collectives_launched), (1500, 1500));
    let record = loads("global", &[], |_, _| {}).expect("a record");
    assert_eq!((record.kernels_launched, record.collectives_launched), (50, 50));
    let record = loads("asks", &[], |_, _| {}).expect("a record");
    assert_eq!(record.kernels_launched, 10);
}

#[test]
fn other_wrappers_of_dlsym_are_still_called() {
    let beside_shim = |order: usize| {
        loads("shim", &[], |job, command| {
            let shim = compile_c(&job.dir, "shim.so", SHIM, &["-shared", "-fPIC"]);
            command.env("LD_PRELOAD", &beside(&shim.display().to_string())[order]);
        })
    };
    assert!(beside_shim(0).is_none(), "this way bypasses the hook");
    assert_eq!(beside_shim(1).expect("a record").kernels_launched, 200);
    // A library that defines dlsym calls the C library past everything preloaded.
    loads("asks", &["-DOWN_DLSYM", "-rdynamic"], |_, _| {});
}

#[test]
fn a_setgid_program_runs_without_the_hook() {
    if !nix::unistd::geteuid().is_root() {
        return skip("another group's program needs root");
    }
    let source = "#include <stdio.h>\n#include <sys/auxv.h>\nint main(void) { printf(\"%lu\\n\", getauxval(AT_SECURE)); return 7; }";
    let job = Job::new();
    let program = compile_c(&job.dir, "privileged", source, &[]);
    let changed = Command::new("chgrp").arg("nogroup").arg(&program).status().expect("chgrp runs");
    let marked = Command::new("chmod").arg("2755").arg(&program).status().expect("chmod runs");
    assert!(changed.success() && marked.success());
    let output: Output = Process::spawn(&mut job.launch(&program)).wait(PATIENCE);
    if output.stdout == "0\n" {
        return skip("the temporary folder gives programs no rights");
    }
    assert_eq!((output.code(), output.stdout.as_str()), (7, "1\n"), "{output:?}");
}
