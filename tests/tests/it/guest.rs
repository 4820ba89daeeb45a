//! The hook as a guest of programs that do what programs are free to do: whatever it is, they go on as without it, print nothing
//! more, and what can be recorded is.

use xpu_timer_proto::v1::FlightRecord;
use xpu_timer_tests::{Ears, FakeCollector, Job, PATIENCE};

use crate::cost::idle_device;

/// Runs one case of `guest.c`; the flight record, if the process could say Hello.
fn guest(arguments: &[&str], environment: &[(&str, &str)]) -> Option<FlightRecord> {
    let job = Job::new();
    let collector = FakeCollector::listen(&job.dir.join("fake.sock"), Ears::Open);
    let program = idle_device(&job, "guest", include_str!("guest/guest.c"), |command| {
        command.args(arguments).envs(environment.iter().copied());
    });
    let pid = program.pid();
    let output = program.wait(PATIENCE);
    assert_eq!((output.code(), output.stdout.as_str(), output.stderr.as_str()), (0, "ok\n", ""), "{arguments:?}");
    let spoke = collector.hellos().iter().any(|(speaker, _)| *speaker == pid);
    let record = spoke.then(|| collector.ring(pid));
    if let Some(health) = record.as_ref().and_then(|record| record.health.as_ref()) {
        assert_eq!(health.panics, 0, "{arguments:?}");
    }
    record
}

#[test]
fn limits_of_the_system_cost_the_record_and_not_the_program() {
    // Shared memory counts as a file: to ask for more than is allowed raises a signal that ends the process.
    assert!(guest(&["file size"], &[]).is_none());
    guest(&["address space"], &[]);
    guest(&["locked memory"], &[]);
    assert!(guest(&["sandbox"], &[]).is_none());
}

#[test]
fn a_program_in_another_root_goes_on() {
    let job = Job::new();
    if !nix::unistd::geteuid().is_root() {
        return xpu_timer_tests::skip("chroot needs root");
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
fn a_program_that_closes_every_descriptor_has_its_own_numbers() {
    let record = guest(&["closing"], &[]).expect("a record");
    assert!(record.kernels_launched >= 40, "{}", record.kernels_launched);
}

#[test]
fn other_preloaded_allocators_and_sanitizers_get_along() {
    let library = |name: &str| {
        let gcc = std::process::Command::new("gcc").arg(format!("-print-file-name={name}")).output().expect("gcc runs");
        String::from_utf8_lossy(&gcc.stdout).trim().to_string()
    };
    let asan = library("libasan.so");
    assert!(asan.starts_with('/'), "gcc brings its own: {asan}");
    let hook = xpu_timer_tests::artifacts().hook();
    let preload = format!("{asan}:{}", hook.display());
    for case in ["vfork", "fork"] {
        guest(&[case], &[("LD_PRELOAD", &preload), ("ASAN_OPTIONS", "detect_leaks=0")]);
    }
}
