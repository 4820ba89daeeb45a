//! The original tool's dump of a timeline: from a given time on, the next operations of each rank,
//! in its files `.timeline` and `.timeline.meta`. Pure: the caller reads the rings and writes the
//! files.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt::Write as _,
    path::{Path, PathBuf},
};

use xpu_timer_analysis::throughput;
use xpu_timer_proto::{
    Message as _,
    hook::{
        FaDebugData, GcDebugData, HostTrace, KernelTrace, KernelTraces, MemoryDebugData, NcclDebugData, host_trace,
        kernel_trace::DebugData,
    },
    ring::detail,
    server::PythonStackInTimeline,
    v1::{Communicator, CopyDirection, DataType, Op, OpKind, OpStatus, Operation, RankInfo},
};

use crate::{
    job::RankId,
    os::clock::Now,
    timeline::{TimelineSettings, stacks::Stacks},
};

/// The kinds of operations, which are also the bits of a request.
const MATMUL: u32 = 0;
const COLLECTIVE: u32 = 1;
const MEMORY: u32 = 2;
/// A larger number of operations of each rank is not recorded, to bound the memory.
const MAX_COUNT: usize = 100_000;

/// A hook takes a third of a second to record in detail.
const LEAD_NS: u64 = 1_000_000_000;

/// A request to record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The folder for the files.
    pub path: PathBuf,
    /// Number of operations of each rank; 0 is the number of the settings.
    pub count: usize,
    /// Bits of the kinds of operations; 0 is all.
    pub kinds: u32,
    /// Only operations that begin at or after this time, since the epoch.
    pub since_unix_ns: u64,
    /// Give up what is being recorded, and record nothing.
    pub reset: bool,
}

/// The files of one rank.
#[derive(Debug, PartialEq)]
pub(crate) struct Files {
    /// Their folder.
    pub folder: PathBuf,
    /// Their common part: `RRRRR-WWWWW`.
    pub name: String,
    /// The operations.
    pub traces: KernelTraces,
    /// The names by code; `None` if another rank writes them.
    pub names: Option<String>,
    /// The Python stacks of launches; `None` if none are known.
    pub stacks: Option<PythonStackInTimeline>,
}

/// The state of the recording.
#[derive(Debug)]
pub(crate) struct Recording {
    settings: TimelineSettings,
    state: State,
    finished: Vec<Files>,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Idle,
    Recording(Request, BTreeMap<RankId, RankTraces>),
    /// Until the rings are read next.
    Resetting,
}

/// The operations of one rank so far.
#[derive(Debug, Default)]
struct RankTraces {
    traces: Vec<KernelTrace>,
    codes: HashMap<String, u32>,
    // The number of operations of each code.
    counts: Vec<u64>,
    host_traces: Vec<HostTrace>,
    host_counts: BTreeMap<String, u32>,
    is_finished: bool,
}

impl Recording {
    /// Nothing is recorded yet.
    #[must_use]
    pub(crate) fn new(settings: TimelineSettings) -> Self {
        Recording { settings, state: State::Idle, finished: Vec::new() }
    }

    /// Whether operations are awaited.
    #[must_use]
    pub(crate) fn is_active(&self) -> bool {
        !matches!(self.state, State::Idle)
    }

    /// The kinds of detail ([`detail`]) without which some of the awaited operations are not
    /// recorded; 0 if none is needed now. The original tool records all kinds at any time.
    #[must_use]
    pub(crate) fn detail(&self, now: Now) -> u8 {
        let State::Recording(request, _) = &self.state else { return 0 };
        if request.since_unix_ns > now.unix_ns.saturating_add(LEAD_NS) {
            return 0;
        }
        let of = |kind: u32, detail: u8| if request.kinds & (1 << kind) == 0 { 0 } else { detail };
        of(MATMUL, detail::MATMULS) | of(MEMORY, detail::COPIES)
    }

    /// Begins a recording of these ranks. Returns the original tool's message.
    pub(crate) fn start(&mut self, request: Request, ranks: impl Iterator<Item = RankId>) -> &'static str {
        match &self.state {
            State::Resetting => return "Resetting status, ignore",
            _ if request.reset => {
                self.state = State::Resetting;
                return "Force reset dumping status";
            }
            State::Recording(..) => return "The process is dumping, skip",
            State::Idle => {}
        }
        let count = if request.count == 0 { self.settings.trace_count } else { request.count };
        let kinds = if request.kinds == 0 { u32::MAX } else { request.kinds };
        let request = Request { count: count.clamp(1, MAX_COUNT), kinds, ..request };
        self.state = State::Recording(request, ranks.map(|id| (id, RankTraces::default())).collect());
        "Starting dumping"
    }

    /// Adds completed operations of a rank. `known` are its communicators and stacks.
    pub(crate) fn add(
        &mut self,
        id: RankId,
        info: &RankInfo,
        operations: &[Operation],
        known: (&BTreeMap<u64, Communicator>, &Stacks),
        now: Now,
    ) {
        let State::Recording(request, ranks) = &mut self.state else { return };
        let Some(recorded) = ranks.get_mut(&id).filter(|recorded| !recorded.is_finished) else { return };
        let unix_ns = |mono_ns: u64| now.unix_ns.wrapping_add(mono_ns.wrapping_sub(now.mono_ns));
        for operation in operations.iter().filter(|one| unix_ns(one.entered_ns) >= request.since_unix_ns) {
            if operation.status() != OpStatus::Completed || operation.completed_ns == 0 {
                continue;
            }
            let Some((name, kernel_type, debug)) = description(operation, known.0, info) else { continue };
            let trace = trace_of(operation, (kernel_type, debug), unix_ns);
            if request.kinds & (1 << trace.kernel_type) == 0 {
                continue;
            }
            recorded.push(name, trace);
            if recorded.traces.len() >= request.count {
                break;
            }
        }
        if recorded.traces.len() >= request.count {
            self.end(id, info, known);
        }
    }

    /// Adds calls of traced functions of a rank, as many as operations at most.
    pub(crate) fn add_calls(&mut self, id: RankId, calls: &[Operation], now: Now) {
        let State::Recording(request, ranks) = &mut self.state else { return };
        let Some(recorded) = ranks.get_mut(&id).filter(|recorded| !recorded.is_finished) else { return };
        let unix_ns = |mono_ns: u64| now.unix_ns.wrapping_add(mono_ns.wrapping_sub(now.mono_ns));
        let room = request.count.saturating_sub(recorded.host_traces.len());
        for call in calls.iter().filter(|call| unix_ns(call.entered_ns) >= request.since_unix_ns).take(room) {
            let count = recorded.host_counts.entry(call.function.clone()).or_default();
            let collection = call
                .collection
                .as_ref()
                .map(|of| GcDebugData { collected: of.collected, uncollectable: of.uncollectable });
            recorded.host_traces.push(HostTrace {
                start_us: unix_ns(call.entered_ns) / 1000,
                dur_us: (call.returned_ns.saturating_sub(call.entered_ns) / 1000).min(u32::MAX.into()) as u32,
                name: call.function.clone(),
                count: *count,
                debug_data: collection.map(host_trace::DebugData::GcDebug),
            });
            *count += 1;
        }
    }

    /// There are no more operations of a rank. `known` are its communicators and stacks.
    pub(crate) fn end(
        &mut self,
        id: RankId,
        info: &RankInfo,
        (communicators, stacks): (&BTreeMap<u64, Communicator>, &Stacks),
    ) {
        let State::Recording(request, ranks) = &mut self.state else { return };
        let Some(recorded) = ranks.get_mut(&id).filter(|recorded| !recorded.is_finished) else { return };
        recorded.is_finished = true;
        let files = recorded.files(request, info, self.settings.all_write_names);
        let name = |operation: &Operation| Some(description(operation, communicators, info)?.0);
        self.finished.extend(files.map(|files| Files { stacks: stacks.of_original(info.rank.max(0), name), ..files }));
    }

    /// The files that can be written. `is_here` tells which ranks may still complete operations.
    pub(crate) fn turn(&mut self, is_here: impl Fn(RankId) -> bool) -> Vec<Files> {
        match &self.state {
            State::Recording(_, ranks) if ranks.iter().all(|(id, one)| one.is_finished || !is_here(*id)) => {
                self.state = State::Idle;
            }
            State::Resetting => self.state = State::Idle,
            _ => {}
        }
        std::mem::take(&mut self.finished)
    }
}

impl RankTraces {
    fn push(&mut self, name: String, trace: KernelTrace) {
        let next = self.codes.len() as u32;
        let code = *self.codes.entry(name).or_insert(next);
        self.counts.resize(self.codes.len(), 0);
        let count = &mut self.counts[code as usize];
        self.traces.push(KernelTrace { trace_code: code, trace_id: *count, ..trace });
        *count += 1;
    }

    /// `None` if nothing was recorded.
    fn files(&mut self, request: &Request, info: &RankInfo, all_write_names: bool) -> Option<Files> {
        if self.traces.is_empty() {
            return None;
        }
        let rank = info.rank.max(0);
        let mut names: Vec<(&u32, &String)> = self.codes.iter().map(|(name, code)| (code, name)).collect();
        names.sort();
        let lines = names.into_iter().fold(String::new(), |mut lines, (code, name)| {
            // Writing into a String cannot fail.
            let _ = writeln!(lines, "{code},{name}");
            lines
        });
        let lines = self.host_counts.keys().fold(lines, |mut lines, name| {
            let _ = writeln!(lines, "xpu_timer_host_trace,{name}");
            lines
        });
        Some(Files {
            folder: request.path.clone(),
            name: format!("{rank:05}-{:05}", info.world_size),
            traces: KernelTraces {
                traces: std::mem::take(&mut self.traces),
                host_traces: std::mem::take(&mut self.host_traces),
                pid: info.pid.max(0) as u32,
                rank: rank as u32,
            },
            names: (all_write_names || rank == 0).then_some(lines),
            stacks: None,
        })
    }
}

impl Files {
    /// Names and contents of the files.
    #[must_use]
    pub(crate) fn contents(&self) -> Vec<(String, Vec<u8>)> {
        let name = |extension: &str| format!("{}.{extension}", self.name);
        let names = self.names.as_ref().map(|names| (name("timeline.meta"), names.clone().into_bytes()));
        let stacks = self.stacks.as_ref().map(|stacks| (name("tracing_kernel_callstack"), stacks.encode_to_vec()));
        let traces = (name("timeline"), self.traces.encode_to_vec());
        names.into_iter().chain(stacks).chain([traces]).collect()
    }
}

/// Whether a folder is one of `roots` or below one, by its name.
#[must_use]
pub(crate) fn is_inside<'a>(path: &Path, mut roots: impl Iterator<Item = &'a PathBuf>) -> bool {
    use std::path::Component::{Normal, RootDir};
    path.is_absolute()
        && path.components().all(|part| matches!(part, Normal(_) | RootDir))
        && roots.any(|root| path.starts_with(root))
}

/// The kinds of a request, for its log line.
#[must_use]
pub(crate) fn kinds_text(kinds: u32) -> String {
    let names = [(MATMUL, "matrix products"), (COLLECTIVE, "collectives"), (MEMORY, "memory")];
    let wanted: BTreeSet<&str> =
        names.into_iter().filter(|(bit, _)| kinds == 0 || kinds & (1 << bit) != 0).map(|(_, name)| name).collect();
    wanted.into_iter().collect::<Vec<_>>().join(", ")
}

/// The name, the kind and the details of an operation; `None` for operations that the format does
/// not know.
fn description(
    operation: &Operation,
    communicators: &BTreeMap<u64, Communicator>,
    info: &RankInfo,
) -> Option<(String, u32, DebugData)> {
    Some(match (operation.kind(), operation.op(), &operation.matmul) {
        (OpKind::Collective, ..) => {
            let communicator = communicators.get(&operation.communicator);
            let debug = nccl_debug(operation, communicator, info);
            (collective_name(operation, debug.input_size_in_bytes), COLLECTIVE, DebugData::NcclDebug(debug))
        }
        (_, Op::Attention, Some(shape)) => {
            let shapes = vec![shape.batch, shape.m, shape.n, shape.k];
            (shape_name("fa_bssh", &shapes), MATMUL, DebugData::FaDebug(FaDebugData { shapes }))
        }
        (_, Op::Matmul, Some(shape)) => {
            let debug = throughput::matmul_debug(operation, shape, dtype(operation.dtype()));
            (shape_name("mm_bmnk", &debug.shapes), MATMUL, DebugData::MmDebug(debug))
        }
        (_, Op::Copy, _) => {
            let direction = direction(operation.direction()).into();
            let debug = MemoryDebugData { size: operation.count, direction };
            (operation.function.clone(), MEMORY, DebugData::MemoryDebug(debug))
        }
        _ => return None,
    })
}

/// The record of a completed operation.
fn trace_of(
    operation: &Operation,
    (kernel_type, debug): (u32, DebugData),
    unix_ns: impl Fn(u64) -> u64,
) -> KernelTrace {
    let device_ns = match operation.device_ns {
        0 => operation.completed_ns.saturating_sub(operation.started_ns.max(operation.entered_ns)),
        device_ns => device_ns,
    };
    let started_ns = match operation.started_ns {
        0 => operation.completed_ns.saturating_sub(device_ns),
        started_ns => started_ns,
    };
    let us = |ns: u64| u32::try_from(ns / 1000).unwrap_or(u32::MAX);
    KernelTrace {
        kernel_type,
        start_us: unix_ns(started_ns) / 1000,
        dur_us: us(device_ns),
        delay_us: us(started_ns.saturating_sub(operation.entered_ns)),
        is_host: operation.device_ns == 0,
        debug_data: Some(debug),
        ..Default::default()
    }
}

fn nccl_debug(operation: &Operation, communicator: Option<&Communicator>, info: &RankInfo) -> NcclDebugData {
    let ranks = communicator.map_or(0, |communicator| communicator.size);
    let width = u64::from(throughput::width(operation.dtype()).unwrap_or(0));
    let bus_bytes = throughput::bus_bytes(operation.op(), operation.count, operation.dtype(), ranks).unwrap_or(0.0);
    let launch = operation.launch.as_deref();
    NcclDebugData {
        grids: launch.map(|of| vec![of.grid_x, of.grid_y, of.grid_z]).unwrap_or_default(),
        blocks: launch.map(|of| vec![of.block_x, of.block_y, of.block_z]).unwrap_or_default(),
        comm_hash: operation.communicator,
        input_size_in_bytes: operation.count * width,
        dtype: dtype(operation.dtype()).into(),
        ranks,
        nodes: if info.local_world_size > 0 { ranks.div_ceil(info.local_world_size) } else { 0 },
        seq: operation.seq,
        problem_size: (bus_bytes * 8.0) as u64,
        send_recv_type: match operation.op() {
            Op::Send => 1,
            Op::Recv => 2,
            _ => 0,
        },
    }
}

/// Names of the reductions, by ncclRedOp_t.
const REDUCTIONS: [&str; 5] = ["Sum", "Prod", "Max", "Min", "Avg"];

/// `xpu_timer_AllReduce_RING_LL_Sum_f16_size_2048`, without what is not known.
fn collective_name(operation: &Operation, bytes: u64) -> String {
    let op = operation.op();
    let algorithm = throughput::algorithm(&operation.function, op).map(throughput::Algorithm::name);
    let is_reduction = matches!(op, Op::AllReduce | Op::Reduce | Op::ReduceScatter);
    let reduction = *REDUCTIONS.get(operation.reduce_op as usize).unwrap_or(&"Other");
    let reduction = is_reduction.then_some(reduction);
    let parts = [Some("xpu_timer"), Some(throughput::operation_name(op)), algorithm.as_deref(), reduction];
    let parts = parts.into_iter().flatten().chain([dtype(operation.dtype())]).collect::<Vec<_>>().join("_");
    format!("{parts}_size_{bytes}")
}

fn shape_name(kind: &str, shapes: &[u32]) -> String {
    let shapes: String = shapes.iter().map(|size| format!("{size}_")).collect();
    format!("xpu_timer_{kind}_{shapes}")
}

/// The original tool's name of a direction; it has none for a memset.
fn direction(direction: CopyDirection) -> &'static str {
    match direction {
        CopyDirection::HostToHost => "H2H",
        CopyDirection::HostToDevice => "H2D",
        CopyDirection::DeviceToHost => "D2H",
        CopyDirection::DeviceToDevice => "D2D",
        CopyDirection::Fill | CopyDirection::Unspecified => "",
    }
}

/// The name of a type in the names of NCCL's kernels.
fn dtype(dtype: DataType) -> &'static str {
    match dtype {
        DataType::Unspecified => "unknown",
        DataType::Int8 => "i8",
        DataType::Uint8 => "u8",
        DataType::Int32 => "i32",
        DataType::Uint32 => "u32",
        DataType::Int64 => "i64",
        DataType::Uint64 => "u64",
        DataType::Float16 => "f16",
        DataType::Float32 => "f32",
        DataType::Float64 => "f64",
        DataType::Bfloat16 => "bf16",
        DataType::Float8E4m3 => "f8e4m3",
        DataType::Float8E5m2 => "f8e5m2",
        DataType::Complex64 => "c64",
        DataType::Complex128 => "c128",
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::{
        env::Source,
        v1::{GarbageCollection, LaunchConfig, Matmul},
    };

    use super::*;

    const NOW: Now = Now { mono_ns: 100_000_000_000, unix_ns: 1_795_258_500_000_000_000 };

    fn request(path: &str, count: usize, kinds: u32) -> Request {
        Request { path: path.into(), count, kinds, since_unix_ns: NOW.unix_ns, reset: false }
    }

    fn all_reduce(at_us: u64) -> Operation {
        let entered_ns = NOW.mono_ns + at_us * 1000;
        Operation {
            kind: OpKind::Collective.into(),
            op: Op::AllReduce.into(),
            dtype: DataType::Float16.into(),
            communicator: 7,
            seq: 9,
            count: 1024,
            function: "ncclDevKernel_AllReduce_Sum_f16_RING_LL".into(),
            launch: Some(
                LaunchConfig { grid_x: 24, grid_y: 1, grid_z: 1, block_x: 544, block_y: 1, block_z: 1 }.into(),
            ),
            entered_ns,
            started_ns: entered_ns + 30_000,
            completed_ns: entered_ns + 80_000,
            device_ns: 50_000,
            status: OpStatus::Completed.into(),
            ..Default::default()
        }
    }

    fn product(at_us: u64) -> Operation {
        let lds = Matmul { lda: 4, ldb: 5, ldc: 6, algorithm: Some(-1), ..Default::default() };
        let shape = Matmul { batch: 1, m: 2, n: 3, k: 4, trans_a: 1, stride_b: 9, ..lds };
        Operation {
            kind: OpKind::Kernel.into(),
            op: Op::Matmul.into(),
            matmul: Some(shape.into()),
            function: "cublasGemmEx".into(),
            ..all_reduce(at_us)
        }
    }

    struct Rig {
        recording: Recording,
        infos: [RankInfo; 2],
    }

    impl Rig {
        fn new(all_write_names: &'static str) -> Self {
            let find = move |name: &str| (name == "XPU_TIMER_ALL_DUMP_TIMELINE").then(|| all_write_names.to_string());
            let info = |rank| RankInfo { rank, world_size: 2, local_world_size: 2, pid: 42, ..Default::default() };
            Rig { recording: Recording::new(TimelineSettings::new(&Source::new(find, ""))), infos: [info(0), info(1)] }
        }

        fn add(&mut self, rank: usize, operations: &[Operation], has_ended: bool) -> Vec<Files> {
            let known =
                (&BTreeMap::from([(7, Communicator { id: 7, size: 2, ..Default::default() })]), &Stacks::default());
            self.recording.add(rank as RankId, &self.infos[rank], operations, known, NOW);
            if has_ended {
                self.recording.end(rank as RankId, &self.infos[rank], known);
            }
            self.recording.turn(|_| true)
        }
    }

    #[test]
    fn each_rank_records_its_next_operations() {
        let mut rig = Rig::new("1");
        assert_eq!(rig.recording.start(request("/t", 3, 0), 0..2), "Starting dumping");
        assert_eq!(rig.recording.start(request("/t", 3, 0), 0..2), "The process is dumping, skip");
        let early = Operation { entered_ns: NOW.mono_ns - 1000, ..all_reduce(0) };
        assert_eq!(rig.add(0, &[early, all_reduce(10), product(20)], false), []);
        let files = rig.add(0, &[all_reduce(30), all_reduce(40)], false).pop().unwrap();
        assert_eq!((files.name.as_str(), files.folder.as_path()), ("00000-00002", Path::new("/t")));
        assert_eq!(
            files.names.as_deref(),
            Some("0,xpu_timer_AllReduce_RING_LL_Sum_f16_size_2048\n1,xpu_timer_mm_bmnk_1_2_3_4_\n")
        );
        assert_eq!((files.traces.pid, files.traces.rank, files.traces.traces.len()), (42, 0, 3));
        let [first, second, third] = &files.traces.traces[..] else { panic!("three") };
        assert_eq!((first.trace_code, first.trace_id, third.trace_code, third.trace_id), (0, 0, 0, 1));
        assert_eq!((first.kernel_type, first.dur_us, first.delay_us, first.is_host), (1, 50, 30, false));
        assert_eq!(first.start_us, NOW.unix_ns / 1000 + 40);
        let Some(DebugData::NcclDebug(nccl)) = &first.debug_data else { panic!("{first:?}") };
        assert_eq!((nccl.comm_hash, nccl.input_size_in_bytes, nccl.ranks, nccl.nodes, nccl.seq), (7, 2048, 2, 1, 9));
        assert_eq!((&nccl.grids[..], &nccl.blocks[..]), (&[24, 1, 1][..], &[544, 1, 1][..]));
        let Some(DebugData::MmDebug(product)) = &second.debug_data else { panic!("{second:?}") };
        assert_eq!((product.trans.as_str(), product.api.as_str()), ("TN", "cublasGemmEx"));
        assert_eq!((&product.lds[..], &product.strides[..], product.algo), (&[4, 5, 6][..], &[0, 9, 0][..], -1));
        assert!(rig.recording.is_active(), "the other rank is awaited");
        assert_eq!(rig.add(0, &[all_reduce(50)], false), [], "it has enough");
        let files = rig.add(1, &[all_reduce(10)], true);
        assert_eq!((files.len(), files[0].traces.traces.len()), (1, 1), "an ended rank writes what it has");
        assert!(!rig.recording.is_active());
    }

    #[test]
    fn a_request_may_want_some_kinds_and_rank_0_alone_writes_the_names() {
        let mut rig = Rig::new("0");
        rig.recording.start(request("/t", 1, 1 << MATMUL), 0..2);
        let files = rig.add(1, &[all_reduce(10), product(20)], false).pop().unwrap();
        assert_eq!((files.traces.traces[0].kernel_type, files.names.clone()), (0, None));
        let names: Vec<String> = files.contents().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["00001-00002.timeline"]);
        let files = rig.add(0, &[product(20)], false).pop().unwrap();
        let names: Vec<String> = files.contents().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["00000-00002.timeline.meta", "00000-00002.timeline"]);
    }

    #[test]
    fn a_reset_ends_a_recording() {
        let mut rig = Rig::new("1");
        rig.recording.start(request("/t", 3, 0), 0..2);
        let reset = || Request { reset: true, ..request("/t", 3, 0) };
        assert_eq!(rig.recording.start(reset(), 0..2), "Force reset dumping status");
        assert_eq!(rig.recording.start(reset(), 0..2), "Resetting status, ignore");
        assert_eq!(rig.add(0, &[all_reduce(10)], false), []);
        assert_eq!(rig.recording.start(request("/t", 1, 0), 0..2), "Starting dumping");
        assert_eq!(rig.recording.turn(|_| false), []);
        assert!(!rig.recording.is_active(), "all ranks are gone");
    }

    #[test]
    fn paths_must_be_inside_a_folder_of_timelines() {
        let roots = [PathBuf::from("/root/timeline")];
        for (path, good) in [
            ("/root/timeline", true),
            ("/root/timeline/a/b", true),
            ("/root/timeline2", false),
            ("/root/timeline/../x", false),
            ("root/timeline", false),
            ("", false),
        ] {
            assert_eq!(is_inside(Path::new(path), roots.iter()), good, "{path}");
        }
    }

    #[test]
    fn calls_of_traced_functions_are_host_traces() {
        let mut rig = Rig::new("1");
        rig.recording.start(request("/t", 1, 0), 0..1);
        let call = |at_us: u64| Operation {
            function: "GC".into(),
            returned_ns: NOW.mono_ns + at_us * 1000 + 9000,
            collection: Some(GarbageCollection { generation: Some(2), collected: 5, uncollectable: 1 }.into()),
            ..all_reduce(at_us)
        };
        rig.recording.add_calls(0, &[Operation { entered_ns: 0, ..call(0) }, call(5), call(6)], NOW);
        let files = rig.add(0, &[all_reduce(10)], false).pop().unwrap();
        assert!(files.names.is_some_and(|names| names.ends_with("\nxpu_timer_host_trace,GC\n")));
        let [trace] = &files.traces.host_traces[..] else { panic!("one, because one operation is wanted") };
        assert_eq!((trace.start_us, trace.dur_us, trace.count), (NOW.unix_ns / 1000 + 5, 9, 0));
        let collected = GcDebugData { collected: 5, uncollectable: 1 };
        assert_eq!(trace.debug_data, Some(host_trace::DebugData::GcDebug(collected)));
    }
}
