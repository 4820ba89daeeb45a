//! The tools with which the capture is compared: found, installed, or reported as missing in one
//! line; their run times and their output.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use xpu_timer_tests::{apt_get, tree};

/// Timeout of a tool.
const DEADLINE: Duration = Duration::from_secs(120);

/// `gdb -batch -ex "thread apply all bt"`, as the original tool runs it.
pub fn gdb(tools: &Tools, pid: i32) -> Command {
    let mut command = Command::new(&tools.gdb);
    command.args(["-nx", "-batch", "-p", &pid.to_string(), "-ex", "thread apply all bt"]);
    command
}

/// `py-spy dump -j`.
pub fn py_spy(tools: &Tools, pid: i32) -> Command {
    let mut command = Command::new(&tools.py_spy);
    command.args(["dump", "-j", "-p", &pid.to_string()]);
    command
}

/// `eu-stack -n 0`: without the limit of 256 frames.
pub fn eu_stack(tools: &Tools, pid: i32) -> Command {
    let mut command = Command::new(&tools.eu_stack);
    command.args(["-n", "0", "-p", &pid.to_string()]);
    command
}

/// `pystack remote --native-all`.
pub fn pystack(tools: &Tools, pid: i32) -> Command {
    let mut command = Command::new(&tools.pystack);
    command.args(["remote", "--native-all", &pid.to_string()]);
    command
}

/// Whether a tool handles several ranks one after the other or at the same time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Sequential,
    Parallel,
}

/// Wall time of running the given commands for every pid, one after the other. Their output is
/// discarded.
pub fn wall(pids: &[i32], order: Order, commands: &[&(dyn Fn(i32) -> Command + Sync)]) -> Result<Duration> {
    let start = Instant::now();
    let run_rank = |pid: i32| commands.iter().try_for_each(|command| run_quiet(&mut command(pid)));
    match order {
        Order::Sequential => pids.iter().try_for_each(|pid| run_rank(*pid))?,
        Order::Parallel => std::thread::scope(|scope| {
            let ranks: Vec<_> = pids.iter().map(|pid| scope.spawn(move || run_rank(*pid))).collect();
            ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank's thread panics"))
        })?,
    }
    Ok(start.elapsed())
}

/// Runs one command and ignores its output.
pub fn run_quiet(command: &mut Command) -> Result<()> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).env_remove("DEBUGINFOD_URLS");
    let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
    let status = wait(&mut child).with_context(|| format!("{command:?}"))?;
    // eu-stack fails if a single thread could not be unwound completely; its time still counts.
    if status != Some(0) && !Path::new(command.get_program()).ends_with("eu-stack") {
        bail!("{command:?} failed: {status:?}");
    }
    Ok(())
}

fn wait(child: &mut Child) -> Result<Option<i32>> {
    // Polling would round the caller's clock, so another thread watches the deadline.
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    let (done, watch) = std::sync::mpsc::channel::<()>();
    let watcher = std::thread::spawn(move || {
        if watch.recv_timeout(DEADLINE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            // The child is not reaped yet, so the pid is still valid.
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
    });
    let status = child.wait()?;
    drop(done);
    watcher.join().expect("the watcher does not panic");
    Ok(status.code())
}

/// The output of a tool.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).env_remove("DEBUGINFOD_URLS").output();
    let output = output.with_context(|| format!("{command:?}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if text.is_empty() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(text)
}

/// The program counters of a thread, according to eu-stack.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct NativeStack {
    pub pcs: Vec<u64>,
    /// eu-stack reported that it could not continue.
    pub gave_up: bool,
}

/// The output of eu-stack for a process: its stacks, then its errors.
pub fn eu_stack_output(tools: &Tools, pid: i32) -> Result<String> {
    let mut command = eu_stack(tools, pid);
    let output = command.stdin(Stdio::null()).env_remove("DEBUGINFOD_URLS").output();
    let output = output.with_context(|| format!("{command:?}"))?;
    Ok(format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)))
}

/// Parses the stacks, by thread id.
pub fn parse_eu_stack(text: &str) -> HashMap<i32, NativeStack> {
    let mut threads: HashMap<i32, NativeStack> = HashMap::new();
    let mut current = 0;
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["TID", tid] => {
                current = tid.trim_end_matches(':').parse().unwrap_or(0);
                threads.insert(current, NativeStack::default());
            }
            [number, pc, ..] if number.starts_with('#') => {
                let pc = u64::from_str_radix(pc.trim_start_matches("0x"), 16).ok();
                let stack = threads.entry(current).or_default();
                stack.pcs.extend(pc);
                stack.gave_up |= pc.is_none();
            }
            [_, "dwfl_thread_getframes", "tid", tid, ..] => {
                threads.entry(tid.parse().unwrap_or(0)).or_default().gave_up = true;
            }
            _ => {}
        }
    }
    threads
}

/// A Python thread: pthread id and thread id, and its frames, leaf first, as `(function,
/// path:line)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PythonStack {
    pub thread_id: u64,
    pub os_thread_id: Option<u32>,
    pub owns_gil: bool,
    pub frames: Vec<(String, String)>,
}

/// Parses the output of `py-spy dump -j`, without the pseudo frames of CPython 3.13.
pub fn parse_py_spy(text: &str) -> Result<Vec<PythonStack>> {
    let json: Value = serde_json::from_str(text).context("py-spy's JSON")?;
    let threads = json.as_array().context("py-spy's JSON is not a list")?;
    Ok(threads.iter().map(python_stack).collect())
}

fn python_stack(thread: &Value) -> PythonStack {
    let frame = |frame: &Value| {
        let text = |key: &str| frame[key].as_str().unwrap_or_default().to_string();
        (text("name"), format!("{}:{}", text("filename"), frame["line"]))
    };
    let frames = thread["frames"].as_array().into_iter().flatten().map(frame);
    PythonStack {
        thread_id: thread["thread_id"].as_u64().unwrap_or_default(),
        os_thread_id: thread["os_thread_id"].as_u64().and_then(|tid| tid.try_into().ok()),
        owns_gil: thread["owns_gil"].as_bool().unwrap_or_default(),
        frames: frames.filter(|(_, place)| !place.ends_with("__init__:0")).collect(),
    }
}

/// The paths of the tools.
pub struct Tools {
    pub gdb: PathBuf,
    pub eu_stack: PathBuf,
    pub py_spy: PathBuf,
    pub pystack: PathBuf,
    /// The python3 of the machine's Debian, with its torch.
    pub torch_python: PathBuf,
    /// `xpu_timer_dump` of this build.
    pub dump: PathBuf,
}

impl Tools {
    /// Finds all tools, and installs missing ones if permitted.
    pub fn set_up() -> Result<Self> {
        let torch_python = PathBuf::from("/usr/bin/python3");
        let gdb = debian("gdb", "gdb")?;
        let eu_stack = debian("eu-stack", "elfutils")?;
        if !has_torch(&torch_python) {
            apt_get(&["update", "-qq"])?;
            apt_get(&["install", "-y", "-qq", "--no-install-recommends", "python3-torch"])?;
            ensure!(
                has_torch(&torch_python),
                "python3-torch is missing; install it with: apt-get install python3-torch"
            );
        }
        let venv = venv(&tree().join("target/bench-venv"))?;
        let exe = std::env::current_exe()?;
        let dump = exe.with_file_name("xpu_timer_dump");
        ensure!(
            dump.exists(),
            "{} is missing: build it with cargo build --release -p xpu_timer_capture",
            dump.display()
        );
        Ok(Tools { gdb, eu_stack, py_spy: venv.join("py-spy"), pystack: venv.join("pystack"), torch_python, dump })
    }

    /// One line with the versions, without which a comparison is worthless.
    pub fn versions(&self) -> String {
        let tools = [&self.gdb, &self.eu_stack, &self.py_spy, &self.pystack];
        let first_line = |tool: &&PathBuf| -> Option<String> {
            let output = Command::new(tool).arg("--version").output().ok()?;
            Some(String::from_utf8_lossy(&output.stdout).lines().next()?.to_string())
        };
        tools.iter().filter_map(first_line).collect::<Vec<_>>().join("; ")
    }
}

fn debian(program: &str, package: &str) -> Result<PathBuf> {
    let path = Path::new("/usr/bin").join(program);
    if !path.exists() {
        apt_get(&["update", "-qq"])?;
        apt_get(&["install", "-y", "-qq", "--no-install-recommends", package])?;
    }
    if !path.exists() {
        bail!("{program} is missing; install it with: apt-get install {package}");
    }
    Ok(path)
}

fn has_torch(python: &Path) -> bool {
    // Finding the module is much faster than importing it.
    let find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)";
    Command::new(python).args(["-c", find]).status().is_ok_and(|status| status.success())
}

fn venv(folder: &Path) -> Result<PathBuf> {
    let bin = folder.join("bin");
    if !bin.join("py-spy").exists() || !bin.join("pystack").exists() {
        run(Command::new(xpu_timer_tests::python()).args(["-m", "venv"]).arg(folder))?;
        run(Command::new(bin.join("pip")).args(["install", "--quiet", "py-spy", "pystack"]))?;
    }
    Ok(bin)
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}", words.trim_end().lines().next_back().unwrap_or_default());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eu_stack_text() {
        let text = "PID 7 - process\nTID 7:\n#0  0x00007f0000001000 poll\n#1  0x00005500000010ab main\nTID 9:\n\
                #0  0x00007f0000001000\n\neu-stack: dwfl_thread_getframes tid 9 at 0x7f0000001000 in <unknown>: No DWARF\n";
        let threads = parse_eu_stack(text);
        assert_eq!(threads[&7], NativeStack { pcs: vec![0x7f0000001000, 0x5500000010ab], gave_up: false });
        assert_eq!(threads[&9], NativeStack { pcs: vec![0x7f0000001000], gave_up: true });
    }

    #[test]
    fn py_spy_json() {
        let text = r#"[{"thread_id": 140, "os_thread_id": 7, "owns_gil": true, "frames": [
        {"name": "wait", "filename": "/lib/threading.py", "line": 12},
        {"name": "__init__", "filename": "__init__", "line": 0}]}]"#;
        let threads = parse_py_spy(text).unwrap();
        assert_eq!(threads[0].frames, [("wait".to_string(), "/lib/threading.py:12".to_string())]);
        assert_eq!((threads[0].thread_id, threads[0].os_thread_id, threads[0].owns_gil), (140, Some(7), true));
    }
}
