//! Evidence for tests: a job with its communicators, the operations that each rank has entered, and
//! the stack of each rank.

use std::collections::BTreeMap;

use xpu_timer_proto::{
    Message as _,
    server::{ChildProcess, ProcessSample, PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace, Stacktrace},
    v1::{
        Communicator, CommunicatorState, DataType, Evidence, FlightRecord, HookHealth, KernelLaunches, Op, OpKind,
        OpStatus, Operation, Presence, ProcessEvidence, RankEvidence, RankInfo, Stream, Trigger, TriggerKind,
    },
};

use crate::{Splitter, Verdict, judge, judge_encoded};

/// Nanoseconds of a second.
pub(crate) const SECOND: u64 = 1_000_000_000;
/// When the flight records were read.
pub(crate) const NOW: u64 = 1_000 * SECOND;
/// When the hang began. All pending operations were launched then.
const HANG: u64 = NOW - 60 * SECOND;

/// A stack of the main thread, and what moves between the samples.
#[derive(Debug, Clone)]
pub(crate) struct Stack {
    python: Vec<(&'static str, String)>,
    first_python: Option<Vec<(&'static str, String)>>,
    native: Vec<&'static str>,
    state: &'static str,
    pub syscall: Option<i64>,
    wchan: &'static str,
    cpu_ns: u64,
    io_bytes: u64,
    tcp_bytes: u64,
    /// How often the main thread ran between the samples.
    pub switches: u64,
}

impl Stack {
    pub(crate) fn new(python: &[(&'static str, &str)], native: &[&'static str]) -> Self {
        Stack {
            python: python.iter().map(|(function, file)| (*function, (*file).to_owned())).collect(),
            first_python: None,
            native: native.to_vec(),
            state: "S (sleeping)",
            syscall: None,
            wchan: "",
            cpu_ns: 0,
            io_bytes: 0,
            tcp_bytes: 0,
            switches: 0,
        }
    }
    /// Waits for the device, as the victims of a hang do.
    pub(crate) fn device_wait() -> Self {
        Self::new(
            &[
                ("synchronize", "/job/cuda.py:188"),
                ("train_step", "/job/train.py:90"),
                ("main", "/job/train.py:140"),
                ("<module>", "/job/train.py:160"),
            ],
            &[
                "__futex_abstimed_wait_common64",
                "pthread_cond_wait",
                "cudaStreamSynchronize",
                "ffi_call",
                "_PyEval_EvalFrameDefault",
            ],
        )
        .with(|stack| (stack.cpu_ns, stack.switches) = (4 * SECOND, 100))
    }
    /// Waits for its loader's queue.
    pub(crate) fn loader() -> Self {
        Self::new(
            &[
                ("wait", "/usr/lib/python3.11/threading.py:320"),
                ("Queue.get", "/usr/lib/python3.11/queue.py:171"),
                ("DataLoader.__next__", "/job/train.py:66"),
                ("main", "/job/train.py:130"),
                ("<module>", "/job/train.py:160"),
            ],
            &[
                "__futex_abstimed_wait_common64",
                "sem_clockwait",
                "PyThread_acquire_lock_timed",
                "_PyEval_EvalFrameDefault",
            ],
        )
    }
    /// Inside a write of a checkpoint.
    pub(crate) fn checkpoint() -> Self {
        Self::new(
            &[("save_checkpoint", "/job/train.py:77"), ("main", "/job/train.py:131")],
            &["__GI___libc_write", "_Py_write", "_PyEval_EvalFrameDefault"],
        )
        .with(|stack| stack.syscall = Some(1))
    }
    /// Sleeps in the user's own code.
    pub(crate) fn sleep() -> Self {
        Self::new(
            &[("evaluate", "/job/train.py:99"), ("main", "/job/train.py:133")],
            &["clock_nanosleep", "time_sleep"],
        )
    }
    /// Waits for a signal in the user's own code, and for nothing else.
    pub(crate) fn pause() -> Self {
        Self::new(&[("wait_for_operator", "/job/train.py:101"), ("main", "/job/train.py:133")], &["pause"])
    }
    /// Waits for a lock of the process.
    pub(crate) fn lock() -> Self {
        Self::new(
            &[("update", "/job/train.py:55"), ("main", "/job/train.py:133")],
            &["__futex_abstimed_wait_common64", "pthread_mutex_lock", "PyThread_acquire_lock_timed"],
        )
    }
    /// Inside the creation of a communicator.
    pub(crate) fn init() -> Self {
        Self::new(
            &[("create", "/job/cuda.py:300"), ("main", "/job/train.py:120")],
            &["poll", "bootstrapInit", "ncclCommInitRank"],
        )
    }
    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
    /// Bytes that the main thread reads and writes between the samples.
    pub(crate) fn moving_bytes(self, bytes: u64) -> Self {
        self.bytes_beside(bytes).with(|stack| stack.switches += 10)
    }
    /// Bytes that other threads read and write between the samples.
    pub(crate) fn bytes_beside(self, bytes: u64) -> Self {
        self.with(|stack| stack.io_bytes = bytes)
    }
    /// Bytes that it receives over TCP between the samples.
    pub(crate) fn receives(self, bytes: u64) -> Self {
        self.with(|stack| stack.tcp_bytes = bytes)
    }
    /// Processor time between the samples, which are five seconds apart.
    pub(crate) fn busy(self, cpu_ns: u64) -> Self {
        self.with(|stack| (stack.cpu_ns, stack.state) = (cpu_ns, "R (running)"))
    }
    /// Another frame of the user's own code in the first sample.
    pub(crate) fn was_at(self, function: &'static str, file: &str) -> Self {
        self.with(|stack| stack.first_python = Some(vec![(function, file.to_owned())]))
    }
    pub(crate) fn state(self, state: &'static str, wchan: &'static str) -> Self {
        self.with(|stack| (stack.state, stack.wchan) = (state, wchan))
    }

    fn sample(&self, rank: u32, first: bool) -> ProcessSample {
        let pid = 1000 + rank;
        let python = if first { self.first_python.as_ref().unwrap_or(&self.python) } else { &self.python };
        let add = |amount: u64| if first { 10 * SECOND } else { 10 * SECOND + amount };
        ProcessSample {
            stacktrace: vec![native_thread(
                pid,
                &self.native,
                self.state,
                self.wchan,
                self.syscall,
                if first { 50 } else { 50 + self.switches },
            )],
            py_stacktrace: if python.is_empty() { Vec::new() } else { vec![python_thread(pid, "MainThread", python)] },
            process_state: self.state.to_owned(),
            captured_unix_ns: if first { 100 * SECOND } else { 105 * SECOND },
            cpu_time_ns: add(self.cpu_ns),
            io_bytes: add(self.io_bytes),
            tcp_bytes: add(self.tcp_bytes),
            ..Default::default()
        }
    }
}

pub(crate) fn native_thread(
    tid: u32,
    frames: &[&str],
    state: &str,
    wchan: &str,
    syscall: Option<i64>,
    switches: u64,
) -> PstackStacktrace {
    PstackStacktrace {
        pid: tid,
        thread_name: format!("thread-{tid}"),
        frames: frames
            .iter()
            .map(|function| PstackFrame {
                func_name: (*function).to_owned(),
                file_name: "??".to_owned(),
                ..Default::default()
            })
            .collect(),
        state: state.to_owned(),
        wchan: wchan.to_owned(),
        syscall,
        context_switches: switches,
        ..Default::default()
    }
}

pub(crate) fn python_thread(tid: u32, name: &str, frames: &[(&'static str, String)]) -> PySpyStacktrace {
    PySpyStacktrace {
        pid: tid,
        thread_name: name.to_owned(),
        os_thread_id: tid,
        frames: frames
            .iter()
            .map(|(function, file)| PySpyFrame {
                func_name: (*function).to_owned(),
                file_name: file.clone(),
                module: String::new(),
            })
            .collect(),
        ..Default::default()
    }
}

/// A job and all its evidence.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub evidence: Evidence,
}

impl Job {
    /// A job whose ranks are all present and wait for their devices.
    pub(crate) fn new(world: u32) -> Self {
        let ranks = (0..world).map(|rank| {
            let info = RankInfo { rank: rank as i32, world_size: world, node: "node-0".into(), ..Default::default() };
            RankEvidence {
                rank,
                presence: Presence::Present.into(),
                node: "node-0".into(),
                flight: Some(FlightRecord {
                    rank: Some(Box::new(info)),
                    read_ns: NOW,
                    health: Some(HookHealth { heartbeat_ns: NOW - 1_000_000, ..Default::default() }),
                    ..Default::default()
                }),
                ..Default::default()
            }
        });
        let mut job = Job {
            evidence: Evidence {
                incident: "20261121T030000Z-1".into(),
                job: "test".into(),
                world_size: world,
                trigger: Some(Trigger { kind: TriggerKind::Operation.into(), rank: -1, ..Default::default() }),
                ranks: ranks.collect(),
                hang_timeout_ns: 30 * SECOND,
                sample_interval_ns: 5 * SECOND,
                ..Default::default()
            },
        };
        for rank in 0..world {
            job.set_stack(rank, Stack::device_wait());
        }
        job
    }

    /// A job whose ranks share one communicator, 0x77, and have completed `done` all_reduces on it.
    pub(crate) fn with_world(world: u32, done: u64) -> Self {
        let mut job = Self::new(world);
        job.comm(0x77, &(0..world).collect::<Vec<_>>());
        for rank in 0..world {
            job.done(0x77, rank, done);
        }
        job
    }

    pub(crate) fn rank(&mut self, rank: u32) -> &mut RankEvidence {
        self.evidence.ranks.iter_mut().find(|entry| entry.rank == rank).expect("the rank is in the job")
    }

    pub(crate) fn flight(&mut self, rank: u32) -> &mut FlightRecord {
        self.rank(rank).flight.as_mut().expect("the rank has a flight record")
    }

    /// A communicator of these ranks, in their order.
    pub(crate) fn comm(&mut self, id: u64, ranks: &[u32]) {
        for (index, rank) in ranks.iter().enumerate() {
            self.flight(*rank).communicators.push(Communicator {
                id,
                size: ranks.len() as u32,
                rank: index as i32,
                state: CommunicatorState::Ready.into(),
                ..Default::default()
            });
        }
    }

    fn counters(&mut self, id: u64, rank: u32) -> &mut Communicator {
        let communicators = &mut self.flight(rank).communicators;
        communicators.iter_mut().find(|communicator| communicator.id == id).expect("the rank is in the communicator")
    }

    /// An operation with a common value in every field.
    pub(crate) fn operation(id: u64, seq: u64, op: Op) -> Operation {
        Operation {
            kind: OpKind::Collective.into(),
            op: op.into(),
            communicator: id,
            seq,
            count: 1024,
            dtype: DataType::Float32.into(),
            peer: -1,
            stream: 0x10,
            entered_ns: HANG,
            returned_ns: HANG + 1000,
            ..Default::default()
        }
    }

    pub(crate) fn push(&mut self, rank: u32, mut operation: Operation) {
        let operations = &mut self.flight(rank).operations;
        operation.ticket = operations.last().map_or(0, |last| last.ticket + 1);
        operations.push(operation);
    }

    /// The rank completes `count` all_reduces.
    pub(crate) fn done(&mut self, id: u64, rank: u32, count: u64) {
        for _ in 0..count {
            self.complete(id, rank, |operation| operation.device_ns = 50_000);
        }
    }

    /// The rank completes one collective, modified by `change`.
    pub(crate) fn complete(&mut self, id: u64, rank: u32, change: impl FnOnce(&mut Operation)) {
        let counters = self.counters(id, rank);
        counters.launched += 1;
        counters.started += 1;
        counters.completed += 1;
        let seq = counters.launched;
        let entered_ns = HANG - 100 * SECOND + seq * 1_000_000;
        let mut operation = Operation {
            entered_ns,
            started_ns: entered_ns + 1000,
            completed_ns: entered_ns + 90_000,
            status: OpStatus::Completed.into(),
            ..Self::operation(id, seq, Op::AllReduce)
        };
        change(&mut operation);
        self.push(rank, operation);
    }

    /// The rank enters its next collective, its device begins it, and it does not complete.
    pub(crate) fn enter(&mut self, id: u64, rank: u32, op: Op) {
        self.enter_with(id, rank, op, |_| ());
    }

    pub(crate) fn enter_with(&mut self, id: u64, rank: u32, op: Op, change: impl FnOnce(&mut Operation)) {
        let counters = self.counters(id, rank);
        counters.launched += 1;
        counters.started += 1;
        let seq = counters.launched;
        let mut operation = Operation { started_ns: HANG + 2000, ..Self::operation(id, seq, op) };
        change(&mut operation);
        self.push(rank, operation);
    }

    /// The rank launches its next collective, and its device does not start it.
    pub(crate) fn queue(&mut self, id: u64, rank: u32, op: Op) {
        let counters = self.counters(id, rank);
        counters.launched += 1;
        let seq = counters.launched;
        self.push(rank, Self::operation(id, seq, op));
    }

    /// A send or receive that has started.
    pub(crate) fn transfer(&mut self, id: u64, rank: u32, op: Op, peer: i32) {
        self.push(rank, Operation { peer, started_ns: HANG + 2000, ..Self::operation(id, 1, op) });
    }

    /// A kernel that has started.
    pub(crate) fn kernel(&mut self, rank: u32, name: &str) {
        self.push(
            rank,
            Operation {
                kind: OpKind::Kernel.into(),
                function: name.into(),
                dtype: 0,
                started_ns: HANG,
                ..Self::operation(0, 0, Op::Kernel)
            },
        );
    }

    /// A copy that waits in its stream.
    pub(crate) fn queued_copy(&mut self, rank: u32) {
        self.push(
            rank,
            Operation {
                kind: OpKind::Kernel.into(),
                function: "cudaMemcpyAsync".into(),
                dtype: 0,
                count: 1 << 20,
                ..Self::operation(0, 0, Op::Copy)
            },
        );
    }

    /// The rank has launched a kernel this often on its only stream.
    pub(crate) fn launches(&mut self, rank: u32, name: &str, launches: u64) {
        let communicates = xpu_timer_proto::kernels::communicates(name);
        let stream = 0x7f10 + u64::from(rank);
        self.flight(rank).kernels.push(KernelLaunches { stream, name: name.into(), launches, communicates });
    }

    pub(crate) fn last_kernel(&mut self, rank: u32, name: &str) {
        self.flight(rank).streams.push(Stream {
            handle: 0x10,
            launches: 9,
            last_kernel: name.into(),
            last_launch_ns: HANG,
        });
    }

    /// The rank is inside the creation of a communicator.
    pub(crate) fn creates(&mut self, id: u64, size: u32, rank: u32, comm_rank: i32) {
        self.flight(rank).communicators.push(Communicator {
            id,
            size,
            rank: comm_rank,
            state: CommunicatorState::Initializing.into(),
            ..Default::default()
        });
        let operation = Self::operation(id, 1, Op::CommInit);
        self.push(rank, Operation { kind: OpKind::HostCall.into(), returned_ns: 0, dtype: 0, ..operation });
        self.set_stack(rank, Stack::init());
    }

    /// The rank waits for keys in the store, outside the creation of a communicator.
    pub(crate) fn awaits_keys(&mut self, rank: u32, keys: &[&str]) {
        let operation = Operation {
            kind: OpKind::HostCall.into(),
            returned_ns: 0,
            dtype: 0,
            function: "c10d::TCPStore::wait".into(),
            store_keys: keys.iter().map(|key| (*key).to_owned()).collect(),
            store_key_count: keys.len() as u32,
            ..Self::operation(0, 0, Op::Unspecified)
        };
        self.push(rank, operation);
        self.set_stack(rank, Stack::new(&[("finish", "/job/train.py:150")], &["recv", "c10d::TCPStore::wait"]));
    }

    /// Both samples of the rank show this stack.
    pub(crate) fn set_stack(&mut self, rank: u32, stack: Stack) {
        let entry = self.rank(rank);
        entry.dump = Some(dump(rank, stack).into());
    }

    /// A process that is not a rank, with this stack in both samples. The pid is 1000 and this
    /// number.
    pub(crate) fn process(&mut self, number: u32, command: &str, stack: Stack) -> &mut Stacktrace {
        let dump = Stacktrace { command: command.into(), rank: -1, ..dump(number, stack) };
        let node = self.rank(0).node.clone();
        self.evidence.processes.push(ProcessEvidence { node, dump: Some(dump), ..Default::default() });
        self.evidence.processes.last_mut().and_then(|process| process.dump.as_mut()).expect("it was just added")
    }

    /// Another thread in both samples.
    pub(crate) fn thread(&mut self, rank: u32, native: PstackStacktrace, python: Option<PySpyStacktrace>) {
        let dump = self.rank(rank).dump.as_mut().expect("the rank has a dump");
        let first = dump.first_sample.as_mut().expect("two samples");
        first.stacktrace.push(native.clone());
        first.py_stacktrace.extend(python.clone());
        dump.stacktrace.push(native);
        dump.py_stacktrace.extend(python);
    }

    pub(crate) fn child(&mut self, rank: u32, command: &str, state: &str) {
        let sample = ProcessSample { process_state: state.into(), ..Default::default() };
        let children = &mut self.rank(rank).dump.as_mut().expect("the rank has a dump").children;
        children.push(ChildProcess {
            pid: 4242,
            parent_pid: 1,
            command: command.into(),
            samples: vec![sample.clone(), sample],
        });
    }

    pub(crate) fn dies(&mut self, rank: u32, exit: &str) {
        let entry = self.rank(rank);
        entry.presence = Presence::Dead.into();
        entry.exit = exit.into();
        entry.dump = None;
        entry.errors.push("the process is gone".into());
    }

    /// The rank's dump could not be taken.
    pub(crate) fn no_dump(&mut self, rank: u32) {
        let entry = self.rank(rank);
        entry.dump = None;
        entry.errors.push("permission denied".into());
    }

    /// Nothing is known about the rank.
    pub(crate) fn lost(&mut self, rank: u32) {
        self.evidence.ranks.retain(|entry| entry.rank != rank);
    }

    pub(crate) fn trigger(&mut self, kind: TriggerKind) {
        self.evidence.trigger.as_mut().expect("a trigger").kind = kind.into();
    }

    /// The verdict. Asserts that it is the same for condensed evidence, also if its operations are
    /// encoded, and that the hang is none of the known defects, whatever the versions.
    pub(crate) fn judge(&self) -> Verdict {
        let verdict = self.judge_with_defects();
        assert_eq!(verdict.known_defects, []);
        verdict
    }

    /// Like [`Job::judge`], for a hang that may be a known defect.
    pub(crate) fn judge_with_defects(&self) -> Verdict {
        let verdict = judge(&self.evidence);
        let ranks = self.evidence.ranks.iter().map(|rank| crate::condense(rank, usize::MAX)).collect();
        let processes = self.evidence.processes.iter().map(crate::condense_process).collect();
        let mut condensed = Evidence { ranks, processes, ..self.evidence.clone() };
        assert_eq!(judge(&condensed), verdict, "of condensed evidence");
        let mut splitter = Splitter::default();
        let split = |rank: &RankEvidence| splitter.split(&rank.encode_to_vec()).unwrap();
        let (ranks, operations): (Vec<_>, Vec<_>) = condensed.ranks.iter().map(split).unzip();
        condensed.ranks = ranks;
        assert_eq!(judge_encoded(&condensed, &operations), verdict, "of encoded operations");
        verdict
    }

    /// The same job with new rank numbers: rank `r` becomes `order[r]`. Ranks within communicators
    /// stay.
    pub(crate) fn renumbered(&self, order: &[u32]) -> Job {
        let mut job = self.clone();
        let new: BTreeMap<u32, u32> = order.iter().enumerate().map(|(old, new)| (old as u32, *new)).collect();
        for entry in &mut job.evidence.ranks {
            entry.rank = new[&entry.rank];
        }
        job.evidence.ranks.sort_by_key(|entry| entry.rank);
        job
    }
}

/// The dump of a process whose pid is 1000 and this number.
fn dump(number: u32, stack: Stack) -> Stacktrace {
    let (first, last) = (stack.sample(number, true), stack.sample(number, false));
    Stacktrace {
        stacktrace: last.stacktrace.clone(),
        py_stacktrace: last.py_stacktrace.clone(),
        process_state: last.process_state.clone(),
        pid: 1000 + number as i32,
        rank: number as i32,
        first_sample: Some(first),
        last_sample: Some(ProcessSample { stacktrace: Vec::new(), py_stacktrace: Vec::new(), ..last }),
        ..Default::default()
    }
}
