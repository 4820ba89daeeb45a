//! `xpu_timer_print_env`: settings, parts, and what would be hooked in a process or a program.

use std::fs;

use serde_json::{Value, json};
use xpu_timer_proto::procfs;
use xpu_timer_tests::{Job, Output, PATIENCE, Process, artifacts, compile_c, skip, wait_until};

fn run(job: &Job, arguments: &[&str]) -> Output {
    Process::spawn(job.command(artifacts().bin("xpu_timer_print_env")).args(arguments)).wait(PATIENCE)
}

fn show_json(job: &Job, arguments: &[&str], code: i32) -> Value {
    let output = run(job, &[&["--json"], arguments].concat());
    assert_eq!(output.code(), code, "{}\n{}", output.stdout, output.stderr);
    serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", output.stdout))
}

fn setting<'a>(report: &'a Value, name: &str) -> &'a Value {
    let settings = report["settings"].as_array().expect("settings");
    settings.iter().find(|setting| setting["name"] == name).unwrap_or_else(|| panic!("{name}: {report}"))
}

#[test]
fn settings_show_their_origin_and_bad_values_are_reported() {
    let job = Job::new();
    let ini = job.dir.join("xpu.ini");
    fs::write(&ini, "XPU_TIMER_SAMPLE_INTERVAL=9\nXPU_TIMER_HANG_TIMEOUT=77\nXPU_TIMER_LINGER=30\n").unwrap();
    let job = job.with("XPU_TIMER_CONFIG", &ini.display().to_string());
    let report = show_json(&job, &[], 0);
    assert_eq!(report["problems"], json!([]));
    let of = |name| (setting(&report, name)["value"].clone(), setting(&report, name)["origin"].clone());
    // A job of these tests sets the timeout and the interval in the environment, which beats the
    // file.
    assert_eq!(of("XPU_TIMER_HANG_TIMEOUT"), (json!("5"), json!("environment")));
    assert_eq!(of("XPU_TIMER_BRACKET"), (json!("collectives"), json!("default")));
    assert_eq!(report["control_port"], job.port);
    assert_eq!(report["metrics_port"], job.port + 1);
    assert_eq!(report["collector_pid"], Value::Null, "none runs");
    for (part, file) in [(0, "libxpu_timer_hook.so"), (1, "xpu_timer_collector"), (2, "xpu_timer_stacktrace_viewer")] {
        assert_eq!(report["parts"][part]["path"], artifacts().bin(file).display().to_string());
    }

    let bad = job
        .with("XPU_TIMER_BRACKET", "everything")
        .with("XPU_TIMER_DISABLE", "maybe")
        .with("XPU_TIMER_HOOK_PATH", "/nowhere/hook.so");
    let output = run(&bad, &[]);
    assert_eq!(output.code(), 1, "{}", output.stdout);
    let wrong = output.stdout.split("\nProblems\n").nth(1).expect("what is wrong is at the end");
    assert!(
        wrong.contains("XPU_TIMER_BRACKET=\"everything\" cannot be used, using \"collectives\" instead"),
        "{wrong}"
    );
    assert_eq!(wrong.matches("XPU_TIMER_DISABLE").count(), 1, "each is named once: {wrong}");
    assert!(wrong.contains("the hook is missing: XPU_TIMER_HOOK_PATH=/nowhere/hook.so is not a file"), "{wrong}");
    assert!(output.stdout.contains("INI file"), "{}", output.stdout);
}

#[test]
fn a_running_rank_shows_its_family_and_its_hooked_functions() {
    let job = Job::new().with("XPU_TIMER_SAMPLE_INTERVAL", "4");
    let mut ranks = job.train(1, &["--step-ms=5", "--seconds=600"]);
    ranks.wait_for("step 10 ", PATIENCE);
    let status = job.status().expect("/status");
    let pid = status["ranks"][0]["pid"].as_i64().expect("a rank").to_string();
    let elsewhere = Job::new();
    let report = show_json(&elsewhere, &["--pid", &pid], 0);
    assert_eq!(setting(&report, "XPU_TIMER_SAMPLE_INTERVAL")["value"], "4", "the settings are the process's");
    // The first listener reports its pid: the supervisor, or the worker if there is none.
    assert!([&status["pid"], &status["supervisor"]].contains(&&report["collector_pid"]), "{status}");
    let target = &report["target"];
    assert_eq!((&target["hook"], &target["family"]), (&json!(true), &json!("NVIDIA CUDA")));
    let functions = |layer: &str| -> Vec<String> {
        let libraries = target["libraries"].as_array().expect("libraries");
        let of_layer = libraries.iter().filter(|library| library["layer"] == layer);
        let names = of_layer.flat_map(|library| library["functions"].as_array().expect("functions").clone());
        names.map(|name| name.as_str().unwrap_or_default().to_string()).collect()
    };
    for (layer, function) in [("nccl", "ncclAllReduce"), ("driver", "cuLaunchKernel"), ("runtime", "cudaMemcpyAsync")] {
        assert!(functions(layer).iter().any(|name| name == function), "{layer}: {target}");
    }
    assert!(!functions("nccl").iter().any(|name| name == "ncclGetUniqueId"), "it is not hooked: {target}");

    let text = run(&elsewhere, &["--pid", &pid]);
    assert_eq!(text.code(), 0, "{}", text.stdout);
    for words in
        [&format!("Hooks in process {pid}"), "the hook is loaded: ", "family NVIDIA CUDA", "nccl       libnccl.so.2: "]
    {
        assert!(text.stdout.contains(words), "{words}: {}", text.stdout);
    }
}

/// A process in a mount namespace of its own has its INI file and its collector's socket where only
/// it sees them.
#[test]
fn a_process_that_sees_other_files_is_shown_as_it_sees_them() {
    let probe = std::process::Command::new("unshare").args(["-m", "true"]).status();
    if !probe.is_ok_and(|status| status.success()) {
        return skip("no mount namespaces");
    }
    // A folder below which only the process finds anything.
    let job = Job::new();
    let inside = job.dir.join("inside");
    fs::create_dir(&inside).unwrap();
    let script = r#"mount -t tmpfs none "$1" && cd "$1" && echo XPU_TIMER_KEEP_DAYS=33 >xpu.ini && mkdir sockets && shift && exec "$@""#;
    let (folder, launch) = (inside.display().to_string(), artifacts().bin("xpu_timer_launch").display().to_string());
    let mut command = job.command("unshare");
    command.args(["-m", "sh", "-c", script, "sh", &folder, &launch, "sleep", "600"]);
    command.env("XPU_TIMER_CONFIG", "xpu.ini").env("TMPDIR", inside.join("sockets"));
    let process = Process::spawn(&mut command);
    let pid = process.pid().to_string();
    wait_until(PATIENCE, "it sleeps", || {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm == "sleep\n")
    });
    let report = show_json(&Job::new(), &["--pid", &pid], 0);
    let days = setting(&report, "XPU_TIMER_KEEP_DAYS");
    assert_eq!((&days["value"], &days["origin"]), (&json!("33"), &json!("ini")), "{report}");
    let collector = setting(&report, "XPU_TIMER_COLLECTOR_PID")["value"].as_str().and_then(|pid| pid.parse().ok());
    assert_eq!(report["collector_pid"].as_i64(), collector, "{report}");
}

#[test]
fn a_program_is_inspected_and_not_run() {
    let job = Job::new();
    let mark = job.dir.join("was-run");
    let source =
        format!("#include <stdio.h>\nint main(void) {{ fclose(fopen(\"{}\", \"w\")); return 0; }}\n", mark.display());
    let plain = compile_c(&job.dir, "plain", &source, &[]);
    let report = show_json(&job, &[&plain.display().to_string(), "--odd"], 0);
    assert_eq!((&report["target"]["hook"], &report["target"]["family"]), (&json!(true), &Value::Null));
    let sim = artifacts().sim();
    let linked = ["-Wl,--no-as-needed", &format!("-L{}", sim.display()), "-l:libcudart.so.13"];
    let device = compile_c(&job.dir, "device", &source, &linked);
    let report = show_json(&job, &[&device.display().to_string()], 0);
    assert_eq!(report["target"]["family"], "NVIDIA CUDA", "{report}");
    let script = job.dir.join("script");
    fs::write(&script, "#!/usr/bin/env -S bash\n").unwrap();
    fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let report = show_json(&job, &[&script.display().to_string()], 0);
    assert!(report["target"]["title"].as_str().unwrap().contains("(a script for "), "{report}");
    assert!(report["target"]["title"].as_str().unwrap().contains("/bash)"), "{report}");

    // The launcher's execvp passes a file that the kernel does not recognize to a shell.
    fs::write(&script, "true\n").unwrap();
    let report = show_json(&job, &[&script.display().to_string()], 0);
    assert!(report["target"]["title"].as_str().unwrap().contains("(a script for /bin/sh)"), "{report}");

    let mpi = compile_c(&job.dir, "libmpi.so.40", "int MPI_Barrier(void *comm) { return 0; }", &["-shared", "-fPIC"]);
    let own = compile_c(&job.dir, "own", &source, &["-Wl,--no-as-needed", &mpi.display().to_string()]);
    let report = show_json(&job, &[&own.display().to_string()], 0);
    let library = &report["target"]["libraries"][0];
    assert_eq!((&library["layer"], &library["functions"]), (&json!("host"), &json!(["MPI_Barrier"])), "{report}");

    let alone = compile_c(&job.dir, "alone", &source, &["-static"]);
    let output = run(&job, &[&alone.display().to_string()]);
    assert_eq!(output.code(), 1);
    assert!(output.stdout.contains("statically linked"), "{}", output.stdout);
    assert!(!mark.exists(), "no program was run");
}

#[test]
fn a_library_is_compared_with_the_hook() {
    let job = Job::new();
    let source = "int ncclAllReduce(void) { return 0; } int pncclAllReduce(void) { return 0; }\n\
                  int ncclAllReduceOfTomorrow(void) { return 0; } int pncclAllReduceOfTomorrow(void) { return 0; }\n\
                  int ncclGetVersion(void) { return 0; } int sendAll(void) { return 0; }";
    let library = compile_c(&job.dir, "libnccl.so.2", source, &["-shared", "-fPIC"]).display().to_string();
    let report = show_json(&job, &["--library", &library], 0);
    assert_eq!(
        report,
        json!({ "library": library, "hooked": ["ncclAllReduce"], "not_hooked": ["ncclAllReduceOfTomorrow"] })
    );
    let text = run(&job, &["--library", &library]);
    assert_eq!(text.code(), 0);
    assert!(text.stdout.contains(": 1 functions are hooked\n"), "{}", text.stdout);
    assert!(text.stdout.ends_with("a matrix product\n  ncclAllReduceOfTomorrow\n"), "{}", text.stdout);
    let pipe = job.dir.join("pipe.so");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (file, why) in [
        ("/nowhere/libnccl.so.2", "there is no file /nowhere/libnccl.so.2: --library takes the path"),
        ("/etc/passwd", "/etc/passwd is not an ELF library"),
        ("/etc", "/etc: not a regular file"),
        (&pipe.display().to_string(), "not a regular file"),
    ] {
        let wrong = run(&job, &["--library", file]);
        assert_eq!((wrong.code(), wrong.stderr.lines().count(), wrong.stdout.as_str()), (1, 1, ""), "{wrong:?}");
        assert!(wrong.stderr.contains(why), "{wrong:?}");
    }
}

#[test]
fn failures_are_reported_in_one_line() {
    let job = Job::new();
    let plain = Process::spawn(job.command("sleep").arg("600"));
    let output = run(&job, &["--pid", &plain.pid().to_string()]);
    assert_eq!(output.code(), 1);
    assert!(output.stdout.contains("the process was not started under xpu_timer_launch"), "{}", output.stdout);
    // It ends at once, and nobody waits for it.
    let mut ended = std::process::Command::new("true").spawn().expect("a process");
    let state = || procfs::stat(ended.id()).is_ok_and(|stat| stat.state == 'Z');
    wait_until(PATIENCE, "the process has ended", state);
    let output = run(&job, &["--pid", &ended.id().to_string()]);
    assert_eq!((output.code(), output.stdout.as_str()), (1, ""));
    assert!(output.stderr.contains("has ended; its parent has not waited for it yet"), "{}", output.stderr);
    ended.wait().expect("its end");
    for (arguments, code, words) in [
        (&["--pid", "4194304"][..], 1, "there is no process 4194304"),
        (&["no_such_program"], 1, "no_such_program is not on the PATH"),
        (&["/etc/passwd"], 1, "/etc/passwd is not an executable file"),
        (&["--pid", "x"], 2, "x is not a pid"),
        (&["--frobnicate"], 2, "invalid option '--frobnicate'"),
    ] {
        let output = run(&job, arguments);
        assert_eq!(output.code(), code, "{arguments:?}: {}", output.stderr);
        assert!(output.stderr.contains(words), "{arguments:?}: {}", output.stderr);
        assert_eq!(output.stdout, "", "{arguments:?}");
    }
    assert!(run(&job, &["--help"]).stdout.starts_with("Shows the settings"));
}
