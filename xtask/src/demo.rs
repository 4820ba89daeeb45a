//! `cargo xtask demo`: the main use case with real processes. Four ranks of a Python training loop
//! run on the simulated device, one of them hangs, and the collector's verdict is printed and
//! checked.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use xpu_timer_tests::{Artifacts, Incident, Job, tree};

use crate::shell::need;

/// Options of `demo`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// What goes wrong on rank 2
    #[arg(long, value_enum, default_value = "loader")]
    fault: Fault,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Fault {
    /// A data loader that waits for a shard
    Loader,
    /// A collective that the rank skips: the job hangs at its end
    Skip,
    /// A kernel that never ends
    Kernel,
    /// A network on which no more bytes move (all ranks)
    Stall,
    /// A rank killed by SIGKILL
    Killed,
    /// A rank stopped by SIGSTOP
    Stopped,
}

const RANKS: u32 = 4;
const CULPRIT: u32 = 2;
const HANG_TIMEOUT: &str = "5";
const SAMPLE_INTERVAL: &str = "5";
const POLL: Duration = Duration::from_millis(50);
/// A run without a verdict by then has failed.
const DEADLINE: Duration = Duration::from_secs(28);

impl Fault {
    /// Arguments of the training program, the fault of the simulated device, the correct causes,
    /// and the culprits.
    fn plan(self) -> (&'static [&'static str], &'static str, &'static [&'static str], &'static [u32]) {
        match self {
            Fault::Loader => (&["--fault=loader"], "", &["data_loader", "missing_rank"], &[CULPRIT]),
            Fault::Skip => (&["--fault=skip", "--steps=60"], "", &["missing_rank"], &[CULPRIT]),
            Fault::Kernel => (&[], "stuck_kernel:rank=2,n=200", &["kernel_hang"], &[CULPRIT]),
            Fault::Stall => (&[], "stall:bytes=200000", &["network_stall"], &[]),
            Fault::Killed => (&["--fault=killed"], "", &["process_dead"], &[CULPRIT]),
            Fault::Stopped => (&["--fault=stopped"], "", &["process_stopped"], &[CULPRIT]),
        }
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    need(&["python3"])?;
    let artifacts = Artifacts::beside_this_executable()?;
    artifacts.build(false)?;
    let (arguments, sim_fault, causes, culprits) = options.fault.plan();

    let dir = tree().join("target/demo");
    if let Err(error) = fs::remove_dir_all(&dir)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error).with_context(|| format!("cannot remove {} of the previous run", dir.display()));
    }
    let job = Job::at(&dir)
        .with("XPU_TIMER_HANG_TIMEOUT", HANG_TIMEOUT)
        .with("XPU_TIMER_SAMPLE_INTERVAL", SAMPLE_INTERVAL)
        .with("XPU_SIM_FAULT", sim_fault)
        .with("XPU_TIMER_JOB", "demo");

    let fault = if sim_fault.is_empty() { String::new() } else { format!("XPU_SIM_FAULT='{sim_fault}' ") };
    println!("running: {fault}XPU_TIMER_HANG_TIMEOUT={HANG_TIMEOUT} xpu_timer_launch \\");
    println!("           python3 run_ranks.py --nproc={RANKS} train.py {}", arguments.join(" "));
    let mut ranks = job.train(RANKS, arguments);
    let incident = wait(&job, &mut ranks)?;
    print(&incident)?;
    let trace = write_trace(&artifacts, &incident.path, &dir)?;
    println!("{:<16} {}  (open it in https://ui.perfetto.dev)", "trace:", shown(&trace));
    drop(ranks);
    job.end();
    check(&incident.verdict, causes, culprits)?;
    println!("\nthe verdict is right: {}", in_short(&incident.verdict));
    Ok(())
}

/// The progress of a run, according to the collector.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Starting,
    Training,
    Hanging,
    Judged,
}

impl Stage {
    fn of(job: &Job) -> Self {
        if !job.incidents().is_empty() {
            return Stage::Judged;
        }
        let Ok(status) = job.status() else { return Stage::Starting };
        let count = |name: &str| status[name].as_array().map_or(0, Vec::len);
        match (count("incidents"), count("ranks")) {
            (0, ranks) if ranks < RANKS as usize => Stage::Starting,
            (0, _) => Stage::Training,
            _ => Stage::Hanging,
        }
    }

    fn text(self) -> String {
        match self {
            Stage::Starting => format!("{RANKS} ranks start"),
            Stage::Training => {
                format!("{RANKS} ranks train until one stops; {HANG_TIMEOUT} s without progress count as a hang")
            }
            Stage::Hanging => {
                format!("a hang is reported; the stacks of all ranks are taken twice, {SAMPLE_INTERVAL} s apart")
            }
            Stage::Judged => "judged; the report and the flame graphs are written".into(),
        }
    }
}

/// Waits for the finished incident folder, and prints the progress.
fn wait(job: &Job, ranks: &mut xpu_timer_tests::Process) -> Result<Incident> {
    let start = std::time::Instant::now();
    let mut printed = None;
    loop {
        if let Some(incident) = job.finished_incidents().into_iter().next() {
            println!();
            return Ok(incident);
        }
        let stage = Stage::of(job);
        if printed.is_none_or(|printed| printed < stage) {
            printed = Some(stage);
            println!("{:>6.1} s  {}", start.elapsed().as_secs_f64(), stage.text());
            io::stdout().flush()?;
        }
        let ended = ranks.try_wait();
        if ended.is_some() || start.elapsed() > DEADLINE {
            let why =
                ended.map_or(format!("no verdict within {DEADLINE:?}"), |status| format!("the ranks ended: {status}"));
            bail!("{why}\nstdout: {}\nstderr: {}\nlogs:\n{}", ranks.stdout(), ranks.stderr(), job.logs());
        }
        std::thread::sleep(POLL);
    }
}

fn print(incident: &Incident) -> Result<()> {
    let text = fs::read_to_string(incident.path.join("verdict.txt")).context("verdict.txt")?;
    println!("{}\n", text.trim_end());
    if let Some(seconds) = incident.verdict["seconds_from_timeout"].as_f64() {
        println!(
            "from the timeout to the finished folder: {seconds:.1} s, of which {SAMPLE_INTERVAL} s lie between the two samples"
        );
    }
    println!("incident folder: {}", shown(&incident.path));
    for (what, file) in [("flame graph", "py_stack.svg"), ("flame graph", "cpp_stack.svg"), ("report", "report.html")] {
        let path = incident.path.join(file);
        fs::metadata(&path).with_context(|| format!("{}", path.display()))?;
        println!("{:<16} {}", format!("{what}:"), shown(&path));
    }
    Ok(())
}

/// A relative path is short enough for a line, and correct in the folder where it is printed.
fn shown(path: &Path) -> String {
    let here = std::env::current_dir().unwrap_or_default();
    path.strip_prefix(&here).unwrap_or(path).display().to_string()
}

/// Turns the timelines of the incident into a trace, and returns its path.
fn write_trace(artifacts: &Artifacts, incident: &Path, dir: &Path) -> Result<PathBuf> {
    let mut generate = Command::new(artifacts.bin("xpu_timer_gen_trace_timeline"));
    let output = generate.arg("--path").arg(incident).arg("--output").arg(dir.join("trace/demo")).output()?;
    if !output.status.success() {
        bail!("{generate:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    let trace = dir.join("trace/trace_demo.bin");
    fs::metadata(&trace).with_context(|| format!("{}", trace.display()))?;
    Ok(trace)
}

/// Cause and culprits in a few words.
fn in_short(verdict: &Value) -> String {
    let cause = verdict["cause"].as_str().unwrap_or_default();
    let culprits: Vec<String> = verdict["culprits"].as_array().into_iter().flatten().map(Value::to_string).collect();
    match culprits.as_slice() {
        [] => format!("{cause}, no single culprit"),
        culprits => format!("{cause} on rank {}", culprits.join(", ")),
    }
}

/// The demo fails when its verdict is wrong.
fn check(verdict: &Value, causes: &[&str], culprits: &[u32]) -> Result<()> {
    let cause = verdict["cause"].as_str().unwrap_or_default();
    if !causes.contains(&cause) || verdict["culprits"] != serde_json::json!(culprits) {
        bail!(
            "the verdict is wrong: cause {cause}, culprits {}; expected {causes:?}, {culprits:?}",
            verdict["culprits"]
        );
    }
    Ok(())
}
