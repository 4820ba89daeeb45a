//! A child process whose output is collected, and that does not outlive the test.

use std::{
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::tools::wait_until;

/// How long after the end of a process its last output is waited for.
const LAST_OUTPUT: Duration = Duration::from_secs(2);

/// A running child. It is killed on drop, alone and by its pid.
pub struct Process {
    child: Child,
    stdout: Lines,
    stderr: Lines,
}

/// The result of a finished child.
#[derive(Debug, Clone)]
pub struct Output {
    /// Its exit status.
    pub status: ExitStatus,
    /// All of its standard output.
    pub stdout: String,
    /// All of its standard error.
    pub stderr: String,
}

/// Copies a program, in a process of its own: this process has no descriptor of the copy that a
/// child of another test could inherit, because no file can be executed that somebody may write.
///
/// # Panics
/// It cannot be copied.
pub fn copy_program(from: &Path, to: &Path) {
    let status = Command::new("cp").arg("--preserve=mode").args([from, to]).status().expect("cp runs");
    assert!(status.success(), "{} cannot be copied to {}", from.display(), to.display());
}

struct Lines {
    text: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Lines {
    fn follow(stream: impl std::io::Read + Send + 'static) -> Self {
        let text = Arc::new(Mutex::new(String::new()));
        let sink = Arc::clone(&text);
        let reader = std::thread::spawn(move || {
            let mut stream = BufReader::new(stream);
            let mut line = Vec::new();
            while stream.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                sink.lock().expect("no reader panics").push_str(&String::from_utf8_lossy(&line));
                line.clear();
            }
        });
        Lines { text, reader: Some(reader) }
    }

    fn get(&self) -> String {
        self.text.lock().expect("no reader panics").clone()
    }
}

impl Process {
    /// Starts a command with piped output and empty standard input.
    ///
    /// # Panics
    /// It cannot be started.
    pub fn spawn(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let stdout = Lines::follow(child.stdout.take().expect("stdout is piped"));
        let stderr = Lines::follow(child.stderr.take().expect("stderr is piped"));
        Process { child, stdout, stderr }
    }

    /// Process id.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Standard output so far.
    #[must_use]
    pub fn stdout(&self) -> String {
        self.stdout.get()
    }

    /// Standard error so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        self.stderr.get()
    }

    /// Waits until the standard output contains `text`.
    ///
    /// # Panics
    /// That does not happen within `deadline`, or the process ends without it.
    pub fn wait_for(&mut self, text: &str, deadline: Duration) {
        let start = Instant::now();
        let mut ended_at = None;
        while !self.stdout().contains(text) {
            let ended = self.child.try_wait().expect("the child can be waited for");
            if ended.is_some() {
                ended_at.get_or_insert_with(Instant::now);
            }
            // Its last output may still be on the way.
            let has_ended = ended_at.is_some_and(|at| at.elapsed() > LAST_OUTPUT);
            if has_ended || start.elapsed() > deadline {
                let why = ended.map_or("no answer in time".into(), |status| status.to_string());
                panic!("no {text:?} on stdout ({why})\nstdout: {}\nstderr: {}", self.stdout(), self.stderr());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends a signal to this process alone.
    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        // The caller detects with `wait` that the process has ended.
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid()), signal);
    }

    /// The exit status of the process, if it has ended.
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("the child can be waited for")
    }

    /// Waits for the end and collects the output.
    ///
    /// # Panics
    /// The process has not ended by the deadline.
    pub fn wait(mut self, deadline: Duration) -> Output {
        let mut status = None;
        wait_until(deadline, "the process ends", || {
            status = self.try_wait();
            status.is_some()
        });
        // A grandchild may hold the pipes open; the output until now is used.
        let patience = Instant::now();
        for lines in [&mut self.stdout, &mut self.stderr] {
            let reader = lines.reader.take().expect("taken once");
            while !reader.is_finished() && patience.elapsed() < LAST_OUTPUT {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        Output { status: status.expect("waited for"), stdout: self.stdout(), stderr: self.stderr() }
    }
}

impl Output {
    /// The exit code as a shell shows it: 128 plus the signal for a killed process.
    #[must_use]
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| 128 + self.status.signal().unwrap_or(0))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only if the process has been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("standard error of process {}:\n{}", self.child.id(), self.stderr());
        }
    }
}
