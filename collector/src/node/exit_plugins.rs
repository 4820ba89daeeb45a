//! Runs when a rank has failed. It logs the reason and calls the exit plugins of DLRover's
//! xpu_timer (`XPU_TIMER_EXIT_HOOK_PLUGIN`), each in a Python process of its own with a time limit,
//! never in the rank. Each failed rank has a thread for this. The ranks of a node often fail
//! together, so a limited number of plugins runs at the same time.

use std::{
    fs::File,
    io::{self, PipeReader, Read, Seek, Write},
    net::UdpSocket,
    os::{fd::AsFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        memfd::{MFdFlags, memfd_create},
        signal::{Signal, killpg},
    },
    unistd::Pid,
};
use serde_json::{Value, json};
use tracing::{info, warn};
use xpu_timer_analysis::Exit;
use xpu_timer_proto::{
    printable,
    v1::{Failure, FailureKind, RankInfo},
};

use crate::{
    error::chain,
    node::failures::{self, SharedFault},
    os::{process::Handle, ring_file::RingFile},
};

/// Time limit of one plugin, for all processes that it starts in its group.
const DEADLINE: Duration = Duration::from_secs(30);
/// Maximum number of plugins that run at the same time. The time limit of a plugin starts with it,
/// not while it waits.
const MOST_AT_ONCE: usize = 4;
/// Time between two checks whether it has ended.
const LOOK: Duration = Duration::from_millis(50);
/// How long the stack at a fatal signal may still be in work when the process has ended.
const FAULT_DEADLINE: Duration = Duration::from_secs(3);
/// Maximum number of lines and bytes of its output that go to the log. The rest is read and lost.
const MOST_LINES: usize = 200;
const MOST_OUTPUT: usize = 64 << 10;

/// Calls the function of a plugin. It reads what has happened from standard input as JSON.
const RUNNER: &str = include_str!("exit_plugins.py");

/// Counts the plugins that run. Each rank that is being examined has a reference to it.
#[derive(Default)]
pub(super) struct RunningPlugins {
    count: Mutex<usize>,
    ended: Condvar,
}

impl RunningPlugins {
    /// Whether a rank is being examined: a thread other than the owner has a reference.
    pub(super) fn are_needed(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > 1
    }

    /// Waits until fewer than [`MOST_AT_ONCE`] plugins run, and counts one more until the result is
    /// dropped.
    fn enter(&self) -> RunningPlugin<'_> {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let count = self.ended.wait_while(count, |count| *count >= MOST_AT_ONCE);
        *count.unwrap_or_else(PoisonError::into_inner) += 1;
        RunningPlugin(self)
    }
}

/// A plugin that is counted as running.
struct RunningPlugin<'a>(&'a RunningPlugins);

impl Drop for RunningPlugin<'_> {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.ended.notify_one();
    }
}

/// A rank that has failed.
pub(super) struct FailedRank {
    /// Its description for messages.
    pub title: String,
    /// Its identity.
    pub info: RankInfo,
    /// Its process, which has ended.
    pub process: Option<Arc<Handle>>,
    /// Its ring.
    pub ring: Option<Arc<RingFile>>,
    /// How it ended.
    pub exit: String,
    /// Its fatal signal.
    pub fault: SharedFault,
    /// The plugins.
    pub plugins: Vec<PathBuf>,
    /// Name of its job.
    pub job: String,
    /// The plugins that run for any rank.
    pub running: Arc<RunningPlugins>,
}

impl FailedRank {
    /// Logs the reason and calls the plugins. Blocks until they have ended.
    pub(super) fn examine(self) {
        let exit = Exit::of(&self.exit);
        let begun = Instant::now();
        if let (Exit::Signal(_), Some(ring)) = (exit, &self.ring) {
            while failures::awaits_fault(ring, &self.fault) && begun.elapsed() < FAULT_DEADLINE {
                thread::sleep(LOOK);
            }
        }
        let found = failures::of_process(self.ring.as_deref(), self.process.as_deref(), &self.exit, &self.fault);
        for failure in &found {
            info!("{} ({}): {}", self.title, self.exit, failures::summary(failure));
        }
        let Some(mut event) = self.event(exit, &found) else { return };
        for plugin in &self.plugins {
            event["plugin"] = json!(plugin);
            if let Err(error) = self.call(&event, DEADLINE) {
                warn!("exit plugin {} for {}: {}", plugin.display(), self.title, chain(&error));
            }
        }
    }

    /// The event that the plugins get. `None` for an end that the original tool does not report.
    fn event(&self, exit: Exit<'_>, found: &[Failure]) -> Option<Value> {
        const SIGNALS: [Signal; 7] = [
            Signal::SIGABRT,
            Signal::SIGBUS,
            Signal::SIGFPE,
            Signal::SIGILL,
            Signal::SIGPIPE,
            Signal::SIGSEGV,
            Signal::SIGTERM,
        ];
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let (rank, pod_name) = (self.info.rank, known(&self.info.pod_name).unwrap_or("UNKNOWN"));
        let ip = known(&self.info.ip).map_or_else(own_address, str::to_string);
        let mut about = json!({ "time": time, "rank": rank, "ip": ip, "pod_name": pod_name, "job_name": self.job });
        let mut event = json!({});
        if let Exit::Signal(name) = exit {
            let signal = SIGNALS.into_iter().find(|signal| signal.as_str() == name)?;
            let fault = found.iter().find(|failure| failure.kind() == FailureKind::Signal && failure.r#type == name);
            about["signal"] = json!(signal as i32);
            about["timestamp"] = json!(time);
            about["frame_infos"] = fault.map_or(json!([]), frame_infos);
            event["signal"] = about;
            return Some(event);
        }
        let raised = |failure: &&Failure| {
            failure.kind() == FailureKind::Exception && failure.thread.is_empty() && !failure.ignored
        };
        let failure = found.iter().find(raised).filter(|failure| failure.r#type != "KeyboardInterrupt")?;
        let frames: Vec<(&str, u32, &str)> = failure.frames.iter().filter_map(|frame| place(frame)).collect();
        event["exception"] = json!({ "type": failure.r#type, "message": failure.message, "frames": frames });
        event["about"] = about;
        Some(event)
    }

    /// Calls one plugin, and logs what it prints, one event for each line.
    fn call(&self, event: &Value, limit: Duration) -> Result<(), PluginError> {
        let python = self.process.as_ref().and_then(|process| process.python.clone());
        let python = python.unwrap_or_else(|| "python3".into());
        let running = self.running.enter();
        let called = match call(&python, event, limit) {
            Ok(called) => called,
            Err(source) => return Err(PluginError::Call { python, source }),
        };
        drop(running);
        for line in String::from_utf8_lossy(&called.output).lines().take(MOST_LINES) {
            info!("exit plugin for {}: {}", self.title, printable::line(line));
        }
        match called.status {
            None => Err(PluginError::Late),
            Some(status) if !status.success() => Err(PluginError::Failed { python, status }),
            Some(_) => Ok(()),
        }
    }
}

/// Why a plugin did not end well.
#[derive(Debug, thiserror::Error)]
enum PluginError {
    /// Its process could not be started or observed.
    #[error("{}", python.display())]
    Call {
        python: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("it did not end within {DEADLINE:?} and was killed")]
    Late,
    #[error("{}: {status}", python.display())]
    Failed { python: PathBuf, status: ExitStatus },
}

/// What the process of a plugin did.
struct Called {
    /// The first [`MOST_OUTPUT`] bytes of what it printed.
    output: Vec<u8>,
    /// `None` if it was killed.
    status: Option<ExitStatus>,
}

/// Calls one plugin. Blocks until its process, and those that it started in its group, have ended
/// or are killed.
fn call(python: &Path, event: &Value, limit: Duration) -> io::Result<Called> {
    let (mut printed, ends) = io::pipe()?;
    let mut command = Command::new(python);
    command.args(["-c", RUNNER]).stdin(event_file(event)?).stdout(ends.try_clone()?).stderr(ends);
    command.env_remove("LD_PRELOAD").env("XPU_TIMER_DISABLE", "1").process_group(0);
    let mut child = command.spawn()?;
    // It has the writing ends of the pipe.
    drop(command);
    let begun = Instant::now();
    let group = Pid::from_raw(child.id().cast_signed());
    let (mut output, mut is_open, mut status) = (Vec::new(), true, None);
    loop {
        if is_open {
            is_open = keep(&mut printed, &mut output)? != Some(0);
        } else {
            thread::sleep(LOOK);
        }
        if status.is_none() {
            status = child.try_wait()?;
        }
        // A plugin may leave a process that goes on alone, for example one that sends a file.
        let has_ended = status.is_some() && killpg(group, None).is_err();
        if has_ended {
            while is_open && begun.elapsed() < limit {
                is_open = keep(&mut printed, &mut output)?.is_some_and(|read| read > 0);
            }
            return Ok(Called { output, status });
        }
        if begun.elapsed() >= limit {
            let _ = killpg(group, Signal::SIGKILL);
            let _ = child.wait();
            return Ok(Called { output, status: None });
        }
    }
}

/// Reads from a pipe and keeps its first [`MOST_OUTPUT`] bytes. Returns the number of bytes that it
/// has read, 0 at the end, or `None` if there are none within [`LOOK`].
fn keep(output: &mut PipeReader, kept: &mut Vec<u8>) -> io::Result<Option<usize>> {
    let mut ready = [PollFd::new(output.as_fd(), PollFlags::POLLIN)];
    if poll(&mut ready, PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::ZERO))? == 0 {
        return Ok(None);
    }
    let mut bytes = vec![0; MOST_OUTPUT];
    let read = output.read(&mut bytes)?;
    kept.extend_from_slice(&bytes[..read.min(MOST_OUTPUT - kept.len())]);
    Ok(Some(read))
}

/// A file with the event for a plugin. It is complete before the plugin starts, so nobody waits for
/// the plugin to read it.
fn event_file(event: &Value) -> io::Result<File> {
    let mut file = File::from(memfd_create("exit_plugin", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(event.to_string().as_bytes())?;
    file.rewind()?;
    Ok(file)
}

/// A value that a scheduler has set.
fn known(text: &str) -> Option<&str> {
    Some(text).filter(|text| !matches!(*text, "" | "NOT_SET"))
}

/// The address of this machine on its default route. Connecting a datagram socket sends nothing.
fn own_address() -> String {
    let address = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    });
    address.map_or_else(|_| "127.0.0.1".into(), |address| address.ip().to_string())
}

/// The frames of a signal as the original tool passes them.
fn frame_infos(failure: &Failure) -> Value {
    let numbers = failure.addresses.iter().zip(&failure.offsets);
    let frames = failure.frames.iter().zip(numbers).map(|(frame, (address, offset))| {
        let name = frame.rsplit_once(" (").map_or(frame.as_str(), |(name, _)| name);
        json!({ "address": address, "offset": offset, "function_name": name })
    });
    Value::Array(frames.collect())
}

/// File, line and function of a frame `train.py:33 in step`.
fn place(frame: &str) -> Option<(&str, u32, &str)> {
    let (place, function) = frame.rsplit_once(" in ")?;
    let (file, line) = place.rsplit_once(':')?;
    Some((file, line.parse().ok()?, function))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(exit: &str) -> FailedRank {
        FailedRank {
            title: "rank 3".into(),
            info: RankInfo { rank: 3, ip: "10.0.0.7".into(), ..Default::default() },
            process: None,
            ring: None,
            exit: exit.into(),
            fault: SharedFault::default(),
            plugins: vec!["/job/plugin.py".into()],
            job: "train".into(),
            running: Arc::default(),
        }
    }

    /// What a plugin prints for SIGSEGV, and whether it has ended well; `None` if it was killed.
    fn run(source: Option<&str>, limit: Duration) -> (String, Option<bool>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plugin.py");
        source.map_or(Ok(()), |source| std::fs::write(&path, source)).unwrap();
        let event = json!({ "plugin": path, "signal": { "signal": 11 } });
        let called = call(Path::new("python3"), &event, limit).unwrap();
        (String::from_utf8_lossy(&called.output).into_owned(), called.status.map(|status| status.success()))
    }

    #[test]
    fn a_plugin_has_limits_and_its_errors_are_named() {
        let long = Duration::from_secs(60);
        let function = |body: &str| format!("import os, sys, time\ndef xpu_timer_parse_cpp_exception(infos): {body}\n");
        let of = |body: &str, limit| run(Some(&function(body)), limit);
        assert_eq!(of("print(infos)", long), ("{'signal': 11}\n".into(), Some(true)));
        assert_eq!(
            run(Some("import nothing"), long).0.split(" cannot be loaded: ").nth(1),
            Some("ModuleNotFoundError: No module named 'nothing'\n")
        );
        assert!(run(None, long).0.contains("cannot be loaded: FileNotFoundError"));
        assert!(of("sys.exit('gone')", long).0.ends_with("raised SystemExit: gone\n"));
        assert_eq!(of("os._exit(3)", long), (String::new(), Some(false)));
        let (text, ended) = of("[print('x' * (1 << 20)) for _ in range(256)]", long);
        assert_eq!((text.len(), ended), (MOST_OUTPUT, Some(true)), "256 MB");
        // It is killed with its child, which has the pipe as well.
        let begun = Instant::now();
        let stays = "print('here', flush=True); os.fork(); time.sleep(600)";
        assert_eq!(of(stays, Duration::from_secs(1)), ("here\n".into(), None));
        // A child that is left may end its work.
        let leaves = "os.fork() or (time.sleep(0.5), print('sent', flush=True))";
        assert_eq!(of(leaves, long), ("sent\n".into(), Some(true)));
        let leaves = "os.fork() or time.sleep(600)";
        assert_eq!(of(leaves, Duration::from_secs(1)), (String::new(), None));
        assert!(begun.elapsed() < long);
    }

    #[test]
    fn the_plugins_of_many_ranks_run_four_at_a_time_each_with_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plugin.py");
        std::fs::write(&path, "import time\ndef xpu_timer_parse_cpp_exception(infos): time.sleep(600)\n").unwrap();
        let event = json!({ "plugin": path, "signal": { "signal": 11 } });
        let (running, limit) = (Arc::new(RunningPlugins::default()), Duration::from_secs(2));
        let begun = Instant::now();
        thread::scope(|scope| {
            for _ in 0..2 * MOST_AT_ONCE {
                let failed = FailedRank { running: Arc::clone(&running), ..failed("killed by SIGSEGV") };
                let event = &event;
                scope.spawn(move || assert!(matches!(failed.call(event, limit), Err(PluginError::Late))));
            }
            assert!(running.are_needed());
        });
        // Each takes its limit: eight need two limits if four run at a time, and eight limits if
        // they run one after another.
        assert!((limit * 2..limit * 7).contains(&begun.elapsed()), "{:?}", begun.elapsed());
        assert!(!running.are_needed() && *running.count.lock().unwrap() == 0);
    }

    #[test]
    fn plugins_get_the_arguments_of_the_original_tool() {
        let exception = Failure {
            kind: FailureKind::Exception.into(),
            r#type: "ValueError".into(),
            message: "bad".into(),
            frames: vec!["/job/train.py:33 in step".into()],
            ..Default::default()
        };
        let event = |exit: &str, found: &[Failure]| failed(exit).event(Exit::of(exit), found);
        let sent = event("exit code 1", std::slice::from_ref(&exception)).unwrap();
        assert_eq!(sent["exception"]["frames"], json!([["/job/train.py", 33, "step"]]));
        assert_eq!((&sent["about"]["rank"], &sent["about"]["ip"]), (&json!(3), &json!("10.0.0.7")));
        let interrupt = Failure { r#type: "KeyboardInterrupt".into(), ..exception };
        assert_eq!(event("exit code 130", &[interrupt]), None);
        let signal = Failure {
            kind: FailureKind::Signal.into(),
            r#type: "SIGSEGV".into(),
            frames: vec!["step(int) (libtrain.so)".into()],
            addresses: vec![77],
            offsets: vec![7],
            ..Default::default()
        };
        let sent = event("killed by SIGSEGV (core dumped)", &[signal]).unwrap();
        let frames = json!([{ "address": 77, "offset": 7, "function_name": "step(int)" }]);
        assert_eq!((&sent["signal"]["signal"], &sent["signal"]["frame_infos"]), (&json!(11), &frames));
        assert_eq!(event("killed by SIGKILL", &[]), None);
    }
}
