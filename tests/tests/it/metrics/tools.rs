//! Debian's Prometheus and PyPI's DLRover: found, or unpacked under `target`. Nothing is installed
//! into the machine, because the package would start a service of its own.

use std::{
    fs,
    io::Write,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use nix::fcntl::{Flock, FlockArg};
use serde_json::Value;
use xpu_timer_tests::{Job, PATIENCE, Process, http, tree, wait_until};

/// Debian's promtool.
pub fn promtool() -> Result<PathBuf, String> {
    Ok(debian()?.join("promtool"))
}

/// A program of Debian's package `prometheus`.
fn debian() -> Result<PathBuf, String> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let find = || {
        let installed = PathBuf::from("/usr/bin");
        if installed.join("prometheus").exists() && installed.join("promtool").exists() {
            return Ok(installed);
        }
        once("prometheus", "bin-ready", |folder| {
            run(Command::new("apt-get").args(["update", "-qq"]))?;
            run(Command::new("apt-get").args(["download", "-qq", "prometheus"]).current_dir(folder))?;
            let packages = fs::read_dir(folder).map_err(|error| error.to_string())?.flatten().map(|entry| entry.path());
            let package = packages.filter(|path| path.extension().is_some_and(|name| name == "deb")).last();
            let package = package.ok_or("apt-get download left no package")?;
            run(Command::new("dpkg-deb").arg("-x").arg(package).arg(folder))
        })
        .map(|folder| folder.join("usr/bin"))
    };
    FOLDER.get_or_init(find).clone().map_err(|error| format!("no prometheus: {error}"))
}

/// The Python of a virtual environment that has dlrover.
pub fn dlrover_python() -> Result<PathBuf, String> {
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let find = || {
        let folder = once("dlrover-venv", "k8s-ready", |folder| {
            run(Command::new(xpu_timer_tests::python()).args(["-m", "venv"]).arg(folder))?;
            run(Command::new(folder.join("bin/pip")).args(["install", "--quiet", "dlrover[k8s]"]))
        })?;
        Ok(folder.join("bin/python"))
    };
    PYTHON.get_or_init(find).clone().map_err(|error: String| format!("no dlrover: {error}"))
}

/// A folder under `target` that the first test sets up.
fn once(name: &str, mark: &str, set_up: impl FnOnce(&Path) -> Result<(), String>) -> Result<PathBuf, String> {
    let folder = tree().join("target").join(name);
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let lock = fs::File::create(folder.join(".lock")).map_err(|error| error.to_string())?;
    let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, error)| error.to_string())?;
    if !folder.join(mark).exists() {
        set_up(&folder)?;
        fs::write(folder.join(mark), "").map_err(|error| error.to_string())?;
    }
    Ok(folder)
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let words = String::from_utf8_lossy(&output.stderr);
    let last = words.trim_end().lines().next_back().unwrap_or_default().to_string();
    if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {last}")) }
}

/// The problems that promtool finds in a page; empty when it is valid and follows the conventions.
pub fn check(promtool: &Path, page: &str) -> String {
    let mut command = Command::new(promtool);
    let mut child = command
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool starts");
    child.stdin.take().expect("stdin is piped").write_all(page.as_bytes()).expect("promtool reads");
    let output = child.wait_with_output().expect("promtool ends");
    let words = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    if output.status.success() { words } else { format!("{}: {words}", output.status) }
}

/// A Prometheus for one job, on its own port; it ends with the job.
pub struct Prometheus {
    port: u16,
    _process: Process,
}

impl Prometheus {
    /// Starts it and waits until it is ready.
    pub fn start(job: &Job) -> Result<Self, String> {
        let program = debian()?.join("prometheus");
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
        let port = port.map_err(|error| error.to_string())?.port();
        let config = job.dir.join("prometheus.yml");
        let target = job.port + 1;
        let text = format!(
            "global:\n  scrape_interval: 1s\nscrape_configs:\n  - job_name: xpu_timer\n    static_configs:\n      - targets: \
             ['127.0.0.1:{target}']\n"
        );
        fs::write(&config, text).map_err(|error| error.to_string())?;
        let mut command = job.command(program);
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", job.dir.join("tsdb").display()));
        command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
        let process = Process::spawn(&mut command);
        wait_until(PATIENCE, "Prometheus is ready", || {
            http("GET", port, "/-/ready").is_ok_and(|(status, _)| status == 200)
        });
        Ok(Prometheus { port, _process: process })
    }

    /// The answer to an instant query.
    pub fn query(&self, query: &str) -> Value {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let (_, body) = http("GET", self.port, &format!("/api/v1/query?query={encoded}")).expect("Prometheus answers");
        serde_json::from_str(&body).expect("JSON")
    }
}
