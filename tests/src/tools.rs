//! Small helpers for tests.

use std::{
    env, fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use xpu_timer_proto::procfs;

/// Timeout for something that takes well under a second on a quiet machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Root of the source tree.
#[must_use]
pub fn tree() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the tree").to_path_buf()
}

/// Polls until `condition` holds.
///
/// # Panics
/// It does not hold within `deadline`.
#[track_caller]
pub fn wait_until(deadline: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < deadline, "not within {deadline:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Reports that a test cannot run here. `cargo xtask test` lists the reasons at its end, and fails
/// with CI=true.
pub fn skip(reason: &str) {
    let test = std::thread::current().name().unwrap_or("a test").to_string();
    eprintln!("SKIPPED {test}: {reason}");
    if let Some(path) = env::var_os("XPU_TIMER_SKIP_LOG") {
        let line = format!("{test}: {reason}\n");
        let log = fs::OpenOptions::new().create(true).append(true).open(path);
        log.and_then(|mut log| log.write_all(line.as_bytes())).expect("the log of skipped tests can be written");
    }
}

/// The `python3` of the PATH.
///
/// # Panics
/// There is none.
#[must_use]
pub fn python() -> PathBuf {
    // The real executable, not a shim that starts a shell.
    let output = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
    let output = output.expect("python3 is on the PATH");
    PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
}

/// An installed CPython of a version such as `3.9`, from pyenv or the PATH. `3.14t` is a free-threaded
/// build.
#[must_use]
pub fn python_version(version: &str) -> Option<PathBuf> {
    let pyenv = env::var_os("HOME").map(|home| PathBuf::from(home).join(".pyenv/versions"));
    let installed = pyenv.and_then(|versions| fs::read_dir(versions).ok()).into_iter().flatten().flatten();
    let name = format!("python{version}");
    // pyenv's name of a free-threaded build is `3.14.2t`; the program of `3.14t` is `python3.14t`.
    let is_of_version = |entry: &str| {
        let is_build = entry.ends_with('t') == version.ends_with('t');
        let rest = entry.strip_prefix(version.trim_end_matches('t'));
        is_build && rest.is_some_and(|rest| rest.starts_with('.') || rest == "t")
    };
    let found = installed
        .filter(|entry| is_of_version(&entry.file_name().to_string_lossy()))
        .map(|entry| entry.path().join("bin").join(&name))
        .find(|python| python.exists());
    found.or_else(|| {
        let real = Command::new(&name).args(["-c", "import sys; print(sys.executable)"]).output().ok()?;
        real.status.success().then(|| PathBuf::from(String::from_utf8_lossy(&real.stdout).trim()))
    })
}

/// Running processes with this variable and value in their environment.
#[must_use]
pub fn processes_with(name: &str, value: &str) -> Vec<i32> {
    procfs::pids().filter(|pid| has_variable(*pid, name, value)).collect()
}

/// Whether the process has this variable and value in its environment.
#[must_use]
pub fn has_variable(pid: i32, name: &str, value: &str) -> bool {
    let environ = procfs::environ(pid).unwrap_or_default();
    environ.split(|byte| *byte == 0).any(|entry| entry == format!("{name}={value}").as_bytes())
}

/// Compiles a C source text with gcc into `dir/name`.
///
/// # Panics
/// It does not compile; the message is gcc's output.
pub fn compile_c(dir: &Path, name: &str, source: &str, arguments: &[&str]) -> PathBuf {
    let file = dir.join(format!("{name}.c"));
    let output = dir.join(name);
    fs::write(&file, source).expect("the source can be written");
    let gcc = Command::new("gcc").arg("-o").arg(&output).arg(&file).args(arguments).output().expect("gcc runs");
    assert!(gcc.status.success(), "{name}: {}", String::from_utf8_lossy(&gcc.stderr));
    output
}

/// Compiles a library whose calls do nothing into `dir`: a driver (`-DDRIVER`), a collective
/// library (`-DCOLLECTIVES`), MPI (`-DMPI`) or a BLAS (`-DBLAS`).
///
/// # Panics
/// It does not compile.
pub fn idle_library(dir: &Path, soname: &str, part: &str) {
    let stubs = fs::read_to_string(tree().join("tests/bench/targets/hook_stubs.c")).expect("the source of the stubs");
    compile_c(dir, soname, &stubs, &["-O2", "-fPIC", "-shared", part, &format!("-Wl,-soname,{soname}")]);
}

/// Sends an HTTP request to a port of this machine. Returns the status and the body. The method is
/// GET or POST.
///
/// # Errors
/// The port is closed, or there is no response within a minute.
pub fn http(method: &str, port: u16, path: &str) -> Result<(u16, String), String> {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(PATIENCE))
        .http_status_as_error(false)
        .proxy(None)
        .build()
        .into();
    let url = format!("http://127.0.0.1:{port}{path}");
    let response = if method == "POST" { agent.post(&url).send_empty() } else { agent.get(&url).call() };
    let mut response = response.map_err(|error| format!("{url}: {error}"))?;
    let body = response.body_mut().read_to_string().map_err(|error| format!("{url}: {error}"))?;
    Ok((response.status().as_u16(), body))
}

/// Runs `work` for all items, with at most `jobs` at a time. The results are in the order of the
/// items.
pub fn in_parallel<T: Sync, R: Send>(items: &[T], jobs: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(usize, R)>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else { return };
                    let result = work(item);
                    results.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}
