//! The hook as a guest of programs that do what programs are free to do: they continue as without
//! the hook, print nothing more, and the hook records what it can.

use std::process::Command;

use xpu_timer_proto::v1::FlightRecord;
use xpu_timer_tests::{FakeCollector, Job, Output, PATIENCE, Process, ReadMode, artifacts, compile_c, lacks, skip};

use crate::cost::{hooked_program, idle_device, idle_libraries};

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
    let record = guest(&["closing"], &[]).expect("a record");
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
    // What a process that shares the memory launches is counted there.
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
