//! Synthetic timelines: the files of a job that never ran, with clocks that differ, for tests and
//! benchmarks of the traces.

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::Path,
};

use anyhow::Result;
use xpu_timer_proto::{
    Message, samples,
    server::PySpyFrame,
    timeline::{BlockBuilder, FORMAT, file_name, shape_of, write},
    v1::{
        ClockReading, Communicator, DataType, LaunchStack, Matmul, MemoryReading, Op, OpKind, OpStatus, Operation,
        RankInfo, SampledStack, SampledThread, StackSamples, TimelineHead, timeline_chunk::Part,
    },
};

/// When each job begins: the realtime clock of its first node.
const EPOCH_NS: u64 = 1_800_000_000_000_000_000;
const TP: u64 = 0x7000_0000_0000;
const DP: u64 = 0xd000_0000_0000;

/// A job whose ranks repeat four operations: two matrix products, an all-reduce among the ranks of
/// a node, and an all-gather across nodes or a message to the next rank of the node.
#[derive(Debug, Clone, Copy)]
pub struct Timelines {
    /// Number of ranks.
    pub ranks: u32,
    /// Ranks of a node.
    pub ranks_per_node: u32,
    /// Operations of each rank.
    pub operations: u32,
    /// Time between two operations, at least 100 us.
    pub period_ns: u64,
    /// A rank that needs 1.5 times as long for its matrix products, and so starts its collectives
    /// later than all others.
    pub slow_rank: Option<u32>,
    /// The offset and the drift of each node's clock against that of the node before it, in
    /// nanoseconds and ppm.
    pub clock_step: (i64, f64),
    /// How wrong the realtime clock of each node is against that of the node before it. The first
    /// one is right, and so is every 30th.
    pub realtime_step_ns: i64,
    /// A rank whose timeline lacks seven operations.
    pub lossy_rank: Option<u32>,
    /// How the job ends: it hangs, or it goes on.
    pub hang: Option<Hang>,
}

/// A rank that does not enter the next all-reduce of its node, where the others wait for it. The
/// ranks of other nodes have completed theirs, and wait in an all-gather across nodes.
#[derive(Debug, Clone, Copy)]
pub struct Hang {
    /// The rank.
    pub behind: u32,
    /// From the hang to the dump.
    pub lasts_ns: u64,
}

impl Default for Timelines {
    fn default() -> Self {
        Timelines {
            ranks: 4,
            ranks_per_node: 4,
            operations: 4000,
            period_ns: 1_000_000,
            slow_rank: None,
            clock_step: (0, 0.0),
            realtime_step_ns: 1_000_000,
            lossy_rank: None,
            hang: None,
        }
    }
}

impl Timelines {
    /// Writes a file for each rank.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, folder: &Path) -> Result<()> {
        (0..self.ranks).try_for_each(|rank| self.write_rank(folder, rank))
    }

    /// The monotonic clock of a node at a moment of the job.
    fn clock_ns(&self, rank: u32, job_ns: u64) -> u64 {
        let node = i64::from(rank / self.ranks_per_node);
        let drift = node as f64 * self.clock_step.1 * 1e-6;
        let start = 1_000_000_000_000_u64.saturating_add_signed(node * self.clock_step.0);
        start + job_ns.saturating_add_signed((job_ns as f64 * drift) as i64)
    }

    /// Writes the file of one rank.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write_rank(&self, folder: &Path, rank: u32) -> Result<()> {
        let mut out = BufWriter::new(File::create(folder.join(file_name(rank, self.ranks)))?);
        write(&mut out, Part::Head(self.head(rank)))?;
        let mut builder = BlockBuilder::default();
        for index in 0..u64::from(self.operations) {
            builder.push(&self.operation(rank, index));
            if builder.is_full() {
                out.write_all(&builder.finish_chunk())?;
            }
        }
        out.write_all(&builder.finish_chunk())?;
        Ok(out.flush()?)
    }

    /// Writes the sampled stacks of the main thread of a rank, two a second: it trains, and from
    /// `evaluates_from_ns` of the job on it evaluates.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn write_samples(&self, folder: &Path, rank: u32, evaluates_from_ns: u64) -> Result<()> {
        const PERIOD_NS: u64 = 500_000_000;
        let TimelineHead { rank: info, clock, until_ns, .. } = self.head(rank);
        let shown = |job_ns: u64| self.clock_ns(rank, job_ns);
        let frame = |func_name: &str, file_name: &str| PySpyFrame {
            func_name: func_name.into(),
            file_name: file_name.into(),
            ..PySpyFrame::default()
        };
        let (first, second) = (shown(PERIOD_NS), shown(evaluates_from_ns));
        let last = until_ns.saturating_sub(PERIOD_NS);
        let thread = SampledThread {
            tid: 1,
            name: "MainThread".into(),
            main: true,
            first: vec![first, second - first],
            last: vec![second.saturating_sub(PERIOD_NS) - first, last.saturating_sub(second)],
            samples: vec![1, 1],
            stack: vec![0, 1],
        };
        let samples = StackSamples {
            format: samples::FORMAT,
            rank: info,
            clock,
            from_ns: first,
            until_ns,
            period_ns: PERIOD_NS,
            threads: vec![thread],
            stacks: vec![SampledStack { frames: vec![0, 2] }, SampledStack { frames: vec![1, 2] }],
            frames: vec![
                frame("step", "/work/train.py:40"),
                frame("evaluate", "/work/metrics.py:9"),
                frame("main", "/work/train.py:71"),
            ],
            ..StackSamples::default()
        };
        Ok(fs::write(folder.join(samples::file_name(rank, self.ranks)), samples.encode_to_vec())?)
    }

    fn head(&self, rank: u32) -> TimelineHead {
        let (node, local) = (rank / self.ranks_per_node, rank % self.ranks_per_node);
        let nodes = self.ranks.div_ceil(self.ranks_per_node);
        let lasts_ns = self.hang.map_or(0, |hang| hang.lasts_ns);
        let until_ns = self.period_ns * (u64::from(self.operations) + 1) + lasts_ns;
        let reading = |job_ns: u64| ClockReading {
            monotonic_ns: self.clock_ns(rank, job_ns),
            realtime_ns: (EPOCH_NS + job_ns).saturating_add_signed(i64::from(node % 30) * self.realtime_step_ns),
        };
        let communicator = |id: u64, size: u32, own: u32| Communicator {
            id,
            size,
            rank: own as i32,
            device: local as i32,
            ..Communicator::default()
        };
        let stack = |index: u64, frames: &[u32]| LaunchStack {
            operation: Some(shape_of(&self.operation(rank, index))),
            frames: frames.to_vec(),
        };
        let frame = |text: &str| {
            let (func_name, file_name) = text.split_once('@').unwrap_or((text, ""));
            PySpyFrame { func_name: func_name.into(), file_name: file_name.into(), ..PySpyFrame::default() }
        };
        let memory = |quarter: u64| MemoryReading {
            monotonic_ns: self.clock_ns(rank, until_ns * quarter / 4),
            allocated_bytes: (quarter + 1) << 30,
        };
        TimelineHead {
            format: FORMAT,
            rank: Some(RankInfo {
                rank: rank as i32,
                world_size: self.ranks,
                local_rank: local as i32,
                local_world_size: self.ranks_per_node,
                job: "synthetic".into(),
                node: format!("node-{node}"),
                pid: 1000 + local as i32,
                command: "python train.py".into(),
                ..RankInfo::default()
            }),
            writer: env!("CARGO_PKG_VERSION").into(),
            clock: vec![reading(0), reading(until_ns)],
            from_ns: self.clock_ns(rank, 0),
            until_ns: self.clock_ns(rank, until_ns),
            communicators: vec![
                communicator(TP + u64::from(node), self.ranks_per_node.min(self.ranks), local),
                communicator(DP + u64::from(local), nodes, node),
            ],
            lost: if self.lossy_rank == Some(rank) { 7 } else { 0 },
            pending: self.pending(rank).into_iter().collect(),
            device: "NVIDIA H100 80GB HBM3".into(),
            stacks: vec![stack(0, &[0, 1]), stack(2, &[2, 1])],
            frames: ["forward@train.py:41", "<module>@train.py:77", "backward@train.py:52"].map(frame).to_vec(),
            memory: (0..4).map(memory).collect(),
        }
    }

    /// The operation that a rank waits in when the job hangs. Each rank begins to wait a little
    /// later than the one before.
    fn pending(&self, rank: u32) -> Option<Operation> {
        let hang = self.hang.filter(|hang| hang.behind != rank)?;
        let is_beside = hang.behind / self.ranks_per_node == rank / self.ranks_per_node;
        let next = u64::from(self.operations).next_multiple_of(8);
        let index = next + if is_beside { 2 } else { 3 };
        let later_ns = if is_beside { 0 } else { self.period_ns } + u64::from(rank) * self.period_ns / 100;
        let entered_ns = self.clock_ns(rank, (next * self.period_ns + later_ns) / 1000 * 1000);
        Some(Operation {
            entered_ns,
            returned_ns: entered_ns + 4_000,
            started_ns: entered_ns + 40_000,
            completed_ns: 0,
            device_ns: 0,
            status: OpStatus::Pending.into(),
            ..self.operation(rank, index)
        })
    }

    /// An operation. All times are whole microseconds of the job.
    fn operation(&self, rank: u32, index: u64) -> Operation {
        let (node, local) = (rank / self.ranks_per_node, rank % self.ranks_per_node);
        let part = self.period_ns / 100;
        // An all-reduce begins while the product before it may still run.
        let ahead = if index % 4 == 2 { 45 * part } else { 0 };
        let begin = index * self.period_ns + part - ahead;
        // When the ranks reach an operation differs, and they wait for the last one.
        let late = |rank: u32| (u64::from(rank) * 7 + index * 13) % 10 * part;
        let slow = |rank: u32| if Some(rank) == self.slow_rank { 30 * part } else { 0 };
        let is_across = index % 8 == 3 && self.ranks > self.ranks_per_node;
        let (started, ended) = match index % 4 {
            0 | 1 => (begin, begin + 60 * part + slow(rank)),
            _ => (begin + late(rank) + slow(rank), begin + ahead + 70 * part),
        };
        let shown = |ns: u64| self.clock_ns(rank, ns / 1000 * 1000);
        let mut operation = Operation {
            ticket: index,
            peer: -1,
            tid: 1000 + local,
            stream: 0x7f00_0000_1000,
            entered_ns: shown(begin.saturating_sub(part / 2)),
            returned_ns: shown(begin.saturating_sub(part / 4)),
            started_ns: shown(started),
            completed_ns: shown(ended),
            status: OpStatus::Completed.into(),
            ..Operation::default()
        };
        operation.device_ns = operation.completed_ns - operation.started_ns;
        if index % 4 < 2 {
            operation.kind = OpKind::Kernel.into();
            operation.op = Op::Matmul.into();
            operation.dtype = DataType::Bfloat16.into();
            operation.function = "cublasGemmEx".into();
            let k = if index.is_multiple_of(4) { 4096 } else { 1024 };
            let sizes = Matmul { batch: 1, m: 4096, n: 4096, k, trans_a: 1, ..Matmul::default() };
            let lds = Matmul { lda: k.into(), ldb: k.into(), ldc: 4096, algorithm: Some(99), ..sizes };
            operation.matmul = Some(lds.into());
            return operation;
        }
        operation.kind = OpKind::Collective.into();
        operation.dtype = DataType::Bfloat16.into();
        operation.stream += 1;
        operation.count = 8 << 20;
        operation.communicator = TP + u64::from(node);
        if index % 4 == 2 {
            operation.op = Op::AllReduce.into();
            operation.seq = index / 4 + 1;
            operation.function = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)".into();
        } else if is_across {
            operation.op = Op::AllGather.into();
            operation.communicator = DP + u64::from(local);
            operation.seq = index / 8 + 1;
        } else {
            // Even ranks of a node send, and odd ones receive.
            operation.op = if local.is_multiple_of(2) { Op::Send } else { Op::Recv }.into();
            operation.peer = (local ^ 1) as i32;
            operation.seq = index / 4 + 1;
            operation.started_ns = shown(begin + late(rank & !1));
            operation.device_ns = operation.completed_ns - operation.started_ns;
        }
        operation
    }
}
