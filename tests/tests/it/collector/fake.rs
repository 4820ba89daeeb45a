//! A node collector for one test, and processes that act as hooks.

use std::{
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc,
};

use nix::{sys::signal::Signal, unistd::Pid};
use xpu_timer_proto::{
    Message as _, PROTOCOL_VERSION,
    ring::{self, header, op},
    socket,
    v1::{
        Goodbye, HangResolved, HangSignal, Hello, HookMessage, NodeReply, Op, OpKind, Operation, RankInfo,
        hook_message::Message, node_reply,
    },
};
use xpu_timer_tests::{Job, PATIENCE, Process, artifacts, http, tree, wait_until};

/// Starts `xpu_timer_collector node` in a job's environment and waits until it listens.
pub fn collector(job: &Job, arguments: &[&str]) -> Process {
    let process = Process::spawn(job.command(artifacts().bin("xpu_timer_collector")).arg("node").args(arguments));
    wait_until(PATIENCE, "the collector listens", || process.stderr().contains("listening on"));
    process
}

/// Where a job's collector listens.
pub fn socket_of(job: &Job) -> PathBuf {
    let variable = |name: &str| {
        let command = job.command("true");
        let found = command.get_envs().find(|(key, _)| *key == name).and_then(|(_, value)| value).map(PathBuf::from);
        found.expect("the job sets it")
    };
    socket::path(&variable("TMPDIR"), nix::unistd::getuid().as_raw(), job.port)
}

/// The metrics page.
pub fn metrics(job: &Job) -> String {
    http("GET", job.port + 1, "/metrics").expect("the metrics endpoint answers").1
}

/// A process that acts as the hook of one rank.
pub struct FakeHook {
    child: Child,
    stdin: ChildStdin,
    answers: mpsc::Receiver<String>,
    /// Its Hello message.
    pub hello: Hello,
}

impl FakeHook {
    /// Starts the process; it does not connect yet.
    pub fn start(job: &Job, name: &str, rank: i32, world_size: u32) -> Self {
        let mut command = job.command(xpu_timer_tests::python());
        let info = RankInfo { rank, world_size, local_rank: rank, local_world_size: world_size, ..Default::default() };
        let info = RankInfo { job: name.into(), command: format!("fake rank {rank}"), ..info };
        let hello = Hello {
            protocol: PROTOCOL_VERSION,
            ring_version: ring::VERSION,
            rank: Some(info),
            hang_timeout_ms: 1000,
            idle_timeout_ms: 0,
            sample_interval_ms: 700,
            timeline_path: job.dir.join("timeline").display().to_string(),
            hang_kill: false,
            reports_idle: false,
        };
        command.arg("-I").arg(tree().join("tests/tests/it/collector/fake_hook.py")).arg("play");
        command.args([header::HEARTBEAT_NS, header::LAST_LAUNCH_NS, ring::offset::END].map(|word| word.to_string()));
        let (child, stdin, answers) = talk(&mut command);
        let mut hook = FakeHook { child, stdin, answers, hello };
        hook.word(header::VERSION, u64::from(ring::VERSION));
        hook.word(header::MAGIC, ring::MAGIC);
        hook
    }

    /// Starts the process and registers it.
    pub fn connected(job: &Job, name: &str, rank: i32, world_size: u32) -> Self {
        let mut hook = Self::start(job, name, rank, world_size);
        hook.join(job);
        hook
    }

    /// Connects, says hello, and waits until the collector has registered the rank. An incident
    /// that another rank causes before that would not include this one.
    pub fn join(&mut self, job: &Job) {
        self.connect(job);
        self.word(header::COLLECTOR_NS, 0);
        let hello = encode(Message::Hello(self.hello.clone()));
        self.tell(&format!("hello {hello}"));
        self.tell(&format!("wait_word {}", header::COLLECTOR_NS));
    }

    /// Connects and reads the greeting; returns the collector's pid.
    pub fn connect(&mut self, job: &Job) -> i32 {
        let answer = self.tell(&format!("connect {}", socket_of(job).display()));
        let bytes: Vec<u8> = (0..answer.len() / 2)
            .map(|byte| u8::from_str_radix(&answer[2 * byte..2 * byte + 2], 16).expect("hexadecimal"))
            .collect();
        let reply = NodeReply::decode(&bytes[..]).expect("a NodeReply");
        let Some(node_reply::Message::Welcome(welcome)) = reply.message else { panic!("no welcome: {reply:?}") };
        welcome.collector_pid
    }

    /// Gives a line to the process and waits for its answer.
    pub fn tell(&mut self, line: &str) -> String {
        writeln!(self.stdin, "{line}").expect("the fake hook reads");
        let answer = self.answers.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no answer to {line:.40}"));
        answer.strip_prefix("ok").unwrap_or_else(|| panic!("{line:.40}: {answer}")).trim().to_string()
    }

    /// Sends a message.
    pub fn send(&mut self, message: Message) {
        self.tell(&format!("send {}", encode(message)));
    }

    /// Writes a word of the ring.
    pub fn word(&mut self, index: usize, value: u64) {
        self.tell(&format!("word {index} {value}"));
    }

    /// The clock of the ring.
    pub fn now_ns(&mut self) -> u64 {
        self.tell("now").parse().expect("nanoseconds")
    }

    /// Puts an all-reduce into the ring that is pending for as long as the timeout, and signals it.
    pub fn hang(&mut self, ticket: u64) {
        let slot = slot(ticket);
        let entered_ns = self.now_ns().saturating_sub(self.hello.hang_timeout_ms * 1_000_000).max(1);
        let what = ring::pack_what(OpKind::Collective, Op::AllReduce, xpu_timer_proto::v1::DataType::Float32, 0, 1);
        for (word, value) in
            [(op::WHAT, what), (op::COMMUNICATOR, 0xc0), (op::SEQ, ticket), (op::ENTERED_NS, entered_ns)]
        {
            self.word(slot + word, value);
        }
        self.word(slot + op::TICKET, ticket + 1);
        self.signal(ticket, entered_ns);
    }

    /// Keeps the entry time of an operation in the ring recent while the process lives: the job
    /// makes progress.
    pub fn keep_young(&mut self, ticket: u64) {
        self.tell(&format!("keep_young {}", slot(ticket) + op::ENTERED_NS));
    }

    /// Lets the operation of [`FakeHook::keep_young`] appear to have been entered this many seconds
    /// ago: the job makes no progress.
    pub fn grow_old(&mut self, seconds: u32) {
        self.tell(&format!("grow_old {seconds}"));
    }

    /// Signals an operation that is in the ring.
    pub fn signal(&mut self, ticket: u64, entered_ns: u64) {
        let operation = Operation {
            ticket,
            kind: OpKind::Collective.into(),
            op: Op::AllReduce.into(),
            communicator: 0xc0,
            seq: ticket,
            entered_ns,
            ..Default::default()
        };
        let pending_ns = self.hello.hang_timeout_ms * 1_000_000;
        self.send(Message::Hang(HangSignal { operation: Some(operation), pending_ns }));
    }

    /// Says that a signalled operation completed.
    pub fn resolve(&mut self, ticket: u64) {
        self.send(Message::Resolved(HangResolved { ticket }));
    }

    /// Says goodbye.
    pub fn goodbye(&mut self) {
        self.send(Message::Goodbye(Goodbye {}));
    }

    /// Process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends a signal to the process.
    pub fn kill(&self, signal: Signal) {
        nix::sys::signal::kill(Pid::from_raw(self.pid()), signal).expect("it runs");
    }

    /// Ends the process if it has not ended.
    pub fn kill_if_alive(&mut self) {
        // Both fail only when it has been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for the end of the process.
    pub fn wait(&mut self) -> std::process::ExitStatus {
        let mut status = None;
        wait_until(PATIENCE, "the fake hook ends", || {
            status = self.child.try_wait().expect("it is our child");
            status.is_some()
        });
        status.expect("waited for")
    }
}

/// Where an operation begins in the ring, in words.
fn slot(ticket: u64) -> usize {
    (ring::offset::OPS / 8) + ticket as usize * op::WORDS
}

impl Drop for FakeHook {
    fn drop(&mut self) {
        self.kill_if_alive();
    }
}

/// One message in hexadecimal.
pub fn encode(message: Message) -> String {
    let bytes = HookMessage { message: Some(message) }.encode_to_vec();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn talk(command: &mut Command) -> (Child, ChildStdin, mpsc::Receiver<String>) {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python3 runs");
    let stdin = child.stdin.take().expect("stdin is piped");
    let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
    let (sender, answers) = mpsc::channel();
    std::thread::spawn(move || {
        for line in stdout.lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    (child, stdin, answers)
}
