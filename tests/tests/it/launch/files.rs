//! Variables that name something else than a file: the launcher prints one line, and no process
//! waits for it.

use std::{
    fs::{self, File},
    os::unix::{fs::symlink, net::UnixListener},
    path::PathBuf,
    process::Command,
    time::Instant,
};

use xpu_timer_tests::{PATIENCE, Process, artifacts};

use super::Place;
use crate::namespaces::start_on_fuse;

/// What a variable may name by mistake, and, where this machine has them, a file on a file system
/// that never answers.
struct Traps {
    paths: Vec<PathBuf>,
    _socket: UnixListener,
    _fuse: Option<Process>,
}

impl Traps {
    fn set(place: &Place) -> Self {
        let path = |name: &str| place.path(name);
        assert!(Command::new("mkfifo").arg(path("fifo")).status().unwrap().success());
        fs::create_dir(path("folder")).unwrap();
        File::create(path("large")).unwrap().set_len(1 << 40).unwrap();
        symlink("loop", path("loop")).unwrap();
        let socket = UnixListener::bind(path("listener")).unwrap();
        let mut paths: Vec<PathBuf> = ["fifo", "folder", "large", "loop", "listener", "none"].map(path).into();
        paths.extend(["/dev/zero".into(), "/dev/tty".into()]);
        let fuse = start_on_fuse(place.dir.path(), &[]);
        if let Some(fuse) = &fuse {
            let inside = place.path("mount/file");
            paths.push(PathBuf::from(format!("/proc/{}/root{}", fuse.pid(), inside.display())));
        }
        Traps { paths, _socket: socket, _fuse: fuse }
    }
}

#[test]
fn a_configuration_that_is_not_a_file_prints_one_line() {
    let place = Place::new();
    let _collector = place.collector();
    let traps = Traps::set(&place);
    for path in &traps.paths {
        let begun = Instant::now();
        let mut command = place.launch(&["sh", "-c", "echo \"[$XPU_TIMER_CONFIG$XPU_TIMER_CONFIG_READ]\"; exit 3"]);
        let output = Process::spawn(command.env("XPU_TIMER_CONFIG", path)).wait(PATIENCE);
        assert_eq!((output.code(), output.stdout.as_str()), (3, "[]\n"), "{output:?}");
        assert_eq!(output.stderr.lines().count(), 1, "{output:?}");
        assert!(output.stderr.contains(&format!("XPU_TIMER_CONFIG=\"{}", path.display())), "{output:?}");
        assert!(begun.elapsed() < PATIENCE / 2, "{path:?}: {:?}", begun.elapsed());
    }
    // More than the environment of a program may hold.
    let large = place.path("settings");
    fs::write(&large, format!("XPU_TIMER_JOB={}\n", "x".repeat(500_000))).unwrap();
    let mut command = place.launch(&["sh", "-c", "exit 3"]);
    let output = Process::spawn(command.env("XPU_TIMER_CONFIG", &large)).wait(PATIENCE);
    assert_eq!((output.code(), output.stderr.lines().count()), (3, 1), "{output:?}");
}

#[test]
fn a_configuration_is_read_once_and_handed_over() {
    let place = Place::new();
    let _collector = place.collector();
    let path = place.path("settings");
    fs::write(&path, "[any]\nxpu_timer_bracket = all\nXPU_TIMER_HANG_TIMEOUT=7\nOTHER=x\n").unwrap();
    let mut command = place.launch(&["sh", "-c", "echo \"$XPU_TIMER_CONFIG_READ\""]);
    let output = Process::spawn(command.env("XPU_TIMER_CONFIG", &path)).wait(PATIENCE);
    let wanted = format!("{}\nXPU_TIMER_HANG_TIMEOUT=7\nXPU_TIMER_BRACKET=all\n\n", path.display());
    assert_eq!((output.stdout, output.stderr), (wanted, String::new()));
}

#[test]
fn other_variables_that_do_not_name_a_file_print_one_line_each() {
    let place = Place::new();
    let traps = Traps::set(&place);
    let run = |name: &str, path: &PathBuf| {
        let begun = Instant::now();
        let mut command = place.launch(&["sh", "-c", "exit 3"]);
        let output = Process::spawn(command.env(name, path)).wait(PATIENCE);
        assert_eq!(output.code(), 3, "{output:?}");
        assert!(begun.elapsed() < PATIENCE / 2, "{name}={path:?}: {:?}", begun.elapsed());
        output.stderr
    };
    // Nobody answers at the socket, and the program is looked for.
    for path in &traps.paths {
        let said = run("XPU_TIMER_DAEMON_PATH", path);
        assert!(
            said.starts_with("xpu_timer_launch: running without the node collector") && said.lines().count() == 1,
            "{said}"
        );
    }
    let _collector = place.collector();
    for path in &traps.paths {
        for (name, words) in [
            ("XPU_TIMER_HOOK_PATH", "running without the hook: XPU_TIMER_HOOK_PATH="),
            ("XPU_TIMER_NCCL_LIB_PATH", "XPU_TIMER_NCCL_LIB_PATH="),
        ] {
            let said = run(name, path);
            // The loader says what a large file is not.
            let named = said.contains(words) || path.ends_with("large");
            let taken = path.ends_with("large") && name == "XPU_TIMER_NCCL_LIB_PATH";
            assert!(named && said.lines().count() == usize::from(!taken), "{name}={path:?}: {said}");
        }
        if !["folder", "none"].iter().any(|name| path.ends_with(name)) {
            let said = run("XPU_TIMER_TIMELINE_PATH", path);
            assert!(said.contains("cannot be written") && said.lines().count() == 1, "{path:?}: {said}");
        }
    }
}

/// Whoever reads a secret or a certificate says which file is none, and ends. On a file system that
/// never answers it says so in time; how long its end takes is then up to the kernel, which waits
/// for the thread that is left behind.
#[test]
fn the_collector_and_its_clients_do_not_wait_for_special_files() {
    let place = Place::new();
    let traps = Traps::set(&place);
    let run = |arguments: &[&str], variables: &[(&str, &PathBuf)]| {
        let begun = Instant::now();
        let mut command = Command::new(artifacts().bin("xpu_timer_collector"));
        command.args(arguments).env("XPU_TIMER_COLLECTOR", "https://localhost:1").env("XPU_TIMER_LOG", "error");
        command.env("TMPDIR", place.dir.path()).envs(variables.iter().copied());
        let output = Process::spawn(&mut command).wait(PATIENCE);
        assert!(begun.elapsed() < PATIENCE / 2, "{variables:?}: {:?}", begun.elapsed());
        assert_eq!(output.code(), 1, "{output:?}");
        output.stderr
    };
    for path in traps.paths.iter().filter(|path| !path.starts_with("/proc")) {
        for (arguments, name) in [
            (&["incidents"][..], "XPU_TIMER_COLLECTOR_TOKEN_FILE"),
            (&["incidents"], "XPU_TIMER_COLLECTOR_CA_FILE"),
            (&["cluster", "--listen", "127.0.0.1:0"], "XPU_TIMER_COLLECTOR_TOKEN_FILE"),
        ] {
            let said = run(arguments, &[(name, path)]);
            assert!(said.contains(&*path.to_string_lossy()) && said.lines().count() == 1, "{name}: {said}");
        }
        let identity = [("XPU_TIMER_CLUSTER_CERT_FILE", path), ("XPU_TIMER_CLUSTER_KEY_FILE", path)];
        let said = run(&["cluster", "--listen", "127.0.0.1:0"], &identity);
        assert!(said.contains(&*path.to_string_lossy()), "{said}");
    }
}
