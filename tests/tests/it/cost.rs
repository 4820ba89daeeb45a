//! What the hook must not cost: memory on the hot path. Times are the business of `cargo xtask
//! bench hook`. And what it tells of its own cost in every dump.

use std::process::Command;

use xpu_timer_proto::server::Stacktrace;
use xpu_timer_tests::{FakeCollector, Job, PATIENCE, Process, ReadMode, artifacts, compile_c, http, idle_library};

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
        let bytes = std::fs::read(incident.path.join(format!("{rank:05}-00002.stacktrace"))).unwrap();
        let dump: Stacktrace = xpu_timer_proto::Message::decode(&bytes[..]).unwrap();
        let health = dump.flight_record.unwrap().health.unwrap();
        assert!(health.launch_samples + health.long_samples > 0 && health.collective_samples > 0, "{health:?}");
        assert_eq!((health.dropped, health.panics, health.overflows), (0, 0, 0), "{health:?}");
    }
    let hook = &incident.verdict["hook"];
    assert!(hook["launch_ns"].as_f64().is_some_and(|ns| ns > 0.0), "{hook}");
    assert!(hook["collective_ns"].as_f64().is_some_and(|ns| ns > 0.0), "{hook}");
    assert_eq!(hook["dropped"], 0, "{hook}");
    let text = std::fs::read_to_string(incident.path.join("verdict.txt")).unwrap();
    assert!(text.contains("\nhook: "), "{text}");
}
