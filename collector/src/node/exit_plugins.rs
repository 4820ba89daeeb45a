//! What happens when a rank has failed: its reason goes to the log, and the exit plugins of
//! DLRover's xpu_timer (`XPU_TIMER_EXIT_HOOK_PLUGIN`) are called: in a Python process of their own
//! that has a time limit, never in the rank.

use std::{
    fs::File,
    io::{Read, Seek, Write},
    net::UdpSocket,
    path::PathBuf,
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use nix::{
    sys::signal::{Signal, killpg},
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
    node::failures::{self, SharedFault},
    os::{process::Handle, ring_file::RingFile},
};

/// Time limit of all plugins of one rank together.
const DEADLINE: Duration = Duration::from_secs(30);
/// Time between two looks whether they have ended.
const LOOK: Duration = Duration::from_millis(50);
/// How long the stack at a fatal signal may still be in work when the process has ended.
const FAULT_DEADLINE: Duration = Duration::from_secs(3);
/// Maximum number of lines of their output that go to the log, and of bytes that are read.
const MOST_LINES: usize = 200;
const MOST_OUTPUT: u64 = 64 << 10;

/// Calls the functions of the plugins. It reads what has happened from standard input as JSON.
const RUNNER: &str = include_str!("exit_plugins.py");

/// A rank that has failed.
pub struct FailedRank {
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
}

impl FailedRank {
    /// Logs the reason and calls the plugins. Blocks until they have ended.
    pub fn examine(self) {
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
        let Some(told) = self.told(exit, &found).filter(|_| !self.plugins.is_empty()) else { return };
        if let Err(error) = self.call(&told) {
            warn!("exit plugins for {}: {error}", self.title);
        }
    }

    /// What the plugins are told. `None` for an end of which the original tool tells nobody.
    fn told(&self, exit: Exit<'_>, found: &[Failure]) -> Option<Value> {
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
        let mut told = json!({ "plugins": self.plugins });
        if let Exit::Signal(name) = exit {
            let signal = SIGNALS.into_iter().find(|signal| signal.as_str() == name)?;
            let fault = found.iter().find(|failure| failure.kind() == FailureKind::Signal && failure.r#type == name);
            about["signal"] = json!(signal as i32);
            about["timestamp"] = json!(time);
            about["frame_infos"] = fault.map_or(json!([]), frame_infos);
            told["signal"] = about;
            return Some(told);
        }
        let raised = |failure: &&Failure| {
            failure.kind() == FailureKind::Exception && failure.thread.is_empty() && !failure.ignored
        };
        let failure = found.iter().find(raised).filter(|failure| failure.r#type != "KeyboardInterrupt")?;
        let frames: Vec<(&str, u32, &str)> = failure.frames.iter().filter_map(|frame| place(frame)).collect();
        told["exception"] = json!({ "type": failure.r#type, "message": failure.message, "frames": frames });
        told["about"] = about;
        Some(told)
    }

    fn call(&self, told: &Value) -> Result<(), String> {
        let text = |error: std::io::Error| error.to_string();
        let python = self.process.as_ref().and_then(|process| process.python.clone());
        let python = python.unwrap_or_else(|| "python3".into());
        let mut output = tempfile().map_err(text)?;
        let (stdout, stderr) = (output.try_clone().map_err(text)?, output.try_clone().map_err(text)?);
        let mut command = Command::new(&python);
        command.args(["-c", RUNNER]).stdin(Stdio::piped()).stdout(stdout).stderr(stderr);
        command.env_remove("LD_PRELOAD").env("XPU_TIMER_DISABLE", "1");
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn().map_err(|error| format!("{}: {error}", python.display()))?;
        let begun = Instant::now();
        // The runner reads all of it before it does anything else.
        let given = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(told.to_string().as_bytes()));
        let ended = loop {
            match child.try_wait().map_err(text)? {
                Some(status) => break Some(status),
                None if begun.elapsed() >= DEADLINE => break None,
                None => thread::sleep(LOOK),
            }
        };
        if ended.is_none() {
            // The group has the number of its first process, which has not been waited for.
            let _ = killpg(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL);
            let _ = child.wait();
        }
        let mut bytes = Vec::new();
        output.rewind().and_then(|()| output.take(MOST_OUTPUT).read_to_end(&mut bytes)).map_err(text)?;
        for line in String::from_utf8_lossy(&bytes).lines().take(MOST_LINES) {
            info!("exit plugin for {}: {}", self.title, printable::line(line));
        }
        match ended {
            None => Err(format!("they did not end within {DEADLINE:?} and were killed")),
            Some(status) if !status.success() => Err(format!("{}: {status}", python.display())),
            Some(_) => given.map_err(text),
        }
    }
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

/// A file without a name.
fn tempfile() -> std::io::Result<File> {
    let memory = nix::sys::memfd::memfd_create("exit_plugins", nix::sys::memfd::MFdFlags::MFD_CLOEXEC)?;
    Ok(File::from(memory))
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
        }
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
        let told = |exit: &str, found: &[Failure]| failed(exit).told(Exit::of(exit), found);
        let said = told("exit code 1", std::slice::from_ref(&exception)).unwrap();
        assert_eq!(said["exception"]["frames"], json!([["/job/train.py", 33, "step"]]));
        assert_eq!((&said["about"]["rank"], &said["about"]["ip"]), (&json!(3), &json!("10.0.0.7")));
        let interrupt = Failure { r#type: "KeyboardInterrupt".into(), ..exception };
        assert_eq!(told("exit code 130", &[interrupt]), None);
        let signal = Failure {
            kind: FailureKind::Signal.into(),
            r#type: "SIGSEGV".into(),
            frames: vec!["step(int) (libtrain.so)".into()],
            addresses: vec![77],
            offsets: vec![7],
            ..Default::default()
        };
        let said = told("killed by SIGSEGV (core dumped)", &[signal]).unwrap();
        let frames = json!([{ "address": 77, "offset": 7, "function_name": "step(int)" }]);
        assert_eq!((&said["signal"]["signal"], &said["signal"]["frame_infos"]), (&json!(11), &frames));
        assert_eq!(told("killed by SIGKILL", &[]), None);
    }
}
