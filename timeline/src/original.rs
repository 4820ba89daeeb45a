//! Reads the original tool's `.timeline` files as blocks of operations, so that everything else
//! knows only one format. A file is one protobuf message; this reader holds one entry of it at a
//! time.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Read},
};

use prost::encoding::{WireType, decode_key, decode_varint};
use xpu_timer_analysis::throughput::width;
use xpu_timer_proto::{
    hook::{HostTrace, KernelTrace, MatmulDebugData, host_trace, kernel_trace::DebugData},
    lenient,
    timeline::{BlockBuilder, FORMAT},
    v1::{
        ClockReading, Communicator, CopyDirection, DataType, GarbageCollection, LaunchConfig, Matmul, MatmulSize, Op,
        OpKind, OpStatus, Operation, TimelineBlock, TimelineHead,
    },
};

/// Extension of the files.
pub const EXTENSION: &str = "timeline";
/// Extension of the files with the names.
pub const META: &str = "timeline.meta";
/// Extension of the files with the Python stacks of launches.
pub const STACKS: &str = "tracing_kernel_callstack";

/// Fields of `KernelTraces`.
const TRACES: u32 = 1;
const HOST_TRACES: u32 = 2;
const PID: u32 = 3;
/// A larger entry is not read.
const MOST_ENTRY_BYTES: u64 = 1 << 20;
/// More communicators than a process has; a broken file must not take all memory.
const MOST_COMMUNICATORS: usize = 1 << 16;

/// Kernel names by their code, from the text of a `.timeline.meta` file: lines `code,name`. Lines
/// without a code name host functions, which the entries name themselves.
#[must_use]
pub fn names(text: &str) -> HashMap<u32, String> {
    let pairs = text.lines().filter_map(|line| line.split_once(','));
    pairs.filter_map(|(code, name)| Some((code.trim().parse().ok()?, name.trim().to_string()))).collect()
}

/// Reads a file block by block.
#[derive(Debug)]
pub struct Reader<'a, R> {
    input: R,
    names: &'a HashMap<u32, String>,
    builder: BlockBuilder,
    /// Numbers of ranks and nodes by identity.
    communicators: BTreeMap<u64, (u32, u32)>,
    tickets: u64,
    pid: i32,
    from_us: u64,
    until_us: u64,
    /// An error behind the operations of the block that is returned first.
    failure: Option<io::Error>,
}

impl<'a, R: Read> Reader<'a, R> {
    /// A reader of the file with these names.
    pub fn new(input: R, names: &'a HashMap<u32, String>) -> Self {
        Reader {
            input,
            names,
            builder: BlockBuilder::default(),
            communicators: BTreeMap::new(),
            tickets: 0,
            pid: 0,
            from_us: u64::MAX,
            until_us: 0,
            failure: None,
        }
    }

    /// The next block; `None` at the end.
    ///
    /// # Errors
    /// If the input fails, or is not a `KernelTraces` message.
    pub fn next_block(&mut self) -> io::Result<Option<TimelineBlock>> {
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        while !self.builder.is_full() {
            match self.next_operation() {
                Ok(Some(operation)) => self.builder.push(&operation),
                Ok(None) => break,
                Err(error) if self.builder.is_empty() => return Err(error),
                Err(error) => {
                    self.failure = Some(error);
                    break;
                }
            }
        }
        Ok((!self.builder.is_empty()).then(|| self.builder.finish()))
    }

    fn next_operation(&mut self) -> io::Result<Option<Operation>> {
        while let Some((field, wire)) = key(&mut self.input)? {
            match (field, wire) {
                (TRACES, WireType::LengthDelimited) => return self.kernel().map(Some),
                (HOST_TRACES, WireType::LengthDelimited) => return self.host().map(Some),
                (PID, WireType::Varint) => self.pid = varint(&mut self.input)? as i32,
                (_, WireType::Varint) => _ = varint(&mut self.input)?,
                (_, WireType::LengthDelimited) => _ = entry(&mut self.input)?,
                _ => return Err(invalid("this is not a timeline of DLRover's xpu_timer")),
            }
        }
        Ok(None)
    }

    /// The head of our format, as far as the part that was read shows it. The clock of all times is
    /// the realtime clock.
    #[must_use]
    pub fn head(&self) -> TimelineHead {
        let communicator = |(id, (size, nodes)): (&u64, &(u32, u32))| Communicator {
            id: *id,
            size: *size,
            nodes: *nodes,
            rank: -1,
            ..<_>::default()
        };
        let from_ns = if self.from_us == u64::MAX { 0 } else { self.from_us.saturating_mul(1000) };
        let until_ns = self.until_us.saturating_mul(1000);
        let mut head = TimelineHead {
            format: FORMAT,
            writer: "DLRover xpu_timer".into(),
            clock: vec![ClockReading { monotonic_ns: from_ns, realtime_ns: from_ns }],
            from_ns,
            until_ns,
            communicators: self.communicators.iter().map(communicator).collect(),
            ..<_>::default()
        };
        head.rank.get_or_insert_default().pid = self.pid;
        head
    }

    /// An operation with the times of an entry.
    fn timed(&mut self, start_us: u64, dur_us: u32) -> Operation {
        let until_us = start_us.saturating_add(dur_us.into());
        self.from_us = self.from_us.min(start_us);
        self.until_us = self.until_us.max(until_us);
        self.tickets += 1;
        Operation {
            ticket: self.tickets - 1,
            started_ns: start_us.saturating_mul(1000),
            completed_ns: until_us.saturating_mul(1000),
            device_ns: u64::from(dur_us) * 1000,
            status: OpStatus::Completed.into(),
            peer: -1,
            ..<_>::default()
        }
    }

    fn kernel(&mut self) -> io::Result<Operation> {
        let trace: KernelTrace =
            lenient::decode(&entry(&mut self.input)?).map_err(|error| invalid(&error.to_string()))?;
        let mut operation = self.timed(trace.start_us, trace.dur_us);
        operation.entered_ns = trace.start_us.saturating_sub(trace.delay_us.into()).saturating_mul(1000);
        operation.function = self.names.get(&trace.trace_code).cloned().unwrap_or_default();
        operation.seq = trace.trace_id;
        // There are no streams; these are the original's tracks.
        operation.stream = u64::from(trace.kernel_type);
        operation.kind = OpKind::Kernel.into();
        operation.op = match trace.kernel_type {
            0 => Op::Matmul,
            2 => Op::Copy,
            _ => Op::Kernel,
        }
        .into();
        match trace.debug_data {
            Some(DebugData::NcclDebug(data)) => {
                operation.kind = OpKind::Collective.into();
                operation.op = match data.send_recv_type {
                    1 => Op::Send,
                    2 => Op::Recv,
                    _ => collective_of(&operation.function),
                }
                .into();
                operation.communicator = data.comm_hash;
                operation.seq = data.seq;
                let dtype = dtype_of(&data.dtype);
                operation.dtype = dtype.into();
                operation.count = data.input_size_in_bytes / u64::from(width(dtype).unwrap_or(1));
                operation.launch = launch(&data.grids, &data.blocks);
                if data.comm_hash != 0 && self.communicators.len() < MOST_COMMUNICATORS {
                    self.communicators.insert(data.comm_hash, (data.ranks, data.nodes));
                }
            }
            Some(DebugData::MmDebug(data)) => {
                operation.matmul = matmul(&data);
                operation.dtype = dtype_of(&data.dtype).into();
                set_api(&mut operation, data.api);
            }
            Some(DebugData::FaDebug(data)) => {
                operation.op = Op::Attention.into();
                let shape = |[batch, m, n, k]: [u32; 4]| Matmul { batch, m, n, k, ..<_>::default() };
                operation.matmul = sizes(&data.shapes).map(|sizes| shape(sizes).into());
            }
            Some(DebugData::MemoryDebug(data)) => {
                operation.count = data.size;
                operation.direction = direction(&data.direction).into();
            }
            Some(DebugData::GroupedMmDebug(data)) => {
                let size = |[batch, m, n, k]: [u32; 4]| MatmulSize { batch, m, n, k };
                let members: Vec<_> = data.bmnks.iter().filter_map(|one| sizes(&one.shapes).map(size)).collect();
                operation.matmul = (!members.is_empty()).then(|| Matmul { members, ..<_>::default() }.into());
                operation.dtype = dtype_of(&data.dtype).into();
                set_api(&mut operation, data.api);
            }
            None => {}
        }
        Ok(operation)
    }

    fn host(&mut self) -> io::Result<Operation> {
        let trace: HostTrace =
            lenient::decode(&entry(&mut self.input)?).map_err(|error| invalid(&error.to_string()))?;
        let timed = self.timed(trace.start_us, trace.dur_us);
        let collection = trace.debug_data.map(|host_trace::DebugData::GcDebug(of)| {
            let (collected, uncollectable) = (of.collected, of.uncollectable);
            Box::new(GarbageCollection { generation: None, collected, uncollectable })
        });
        Ok(Operation {
            collection,
            kind: OpKind::HostCall.into(),
            op: Op::PythonCall.into(),
            entered_ns: timed.started_ns,
            returned_ns: timed.completed_ns,
            started_ns: 0,
            seq: trace.count.into(),
            function: trace.name,
            ..timed
        })
    }
}

/// The collective in a name such as `xpu_timer_AllReduce_RING_LL_Sum_f16_size_BYTES`.
fn collective_of(name: &str) -> Op {
    const NAMES: [(&str, Op); 7] = [
        ("AllReduce", Op::AllReduce),
        ("ReduceScatter", Op::ReduceScatter),
        ("AllGather", Op::AllGather),
        ("Broadcast", Op::Broadcast),
        ("Reduce", Op::Reduce),
        ("AllToAll", Op::AllToAll),
        ("Send", Op::Send),
    ];
    let is_named = |word: &str| NAMES.iter().find(|(name, _)| *name == word).map(|(_, op)| *op);
    name.split('_').find_map(is_named).unwrap_or(Op::Unspecified)
}

/// The original tool's names of types, and those of its kernels.
fn dtype_of(name: &str) -> DataType {
    match name {
        "fp16" | "f16" | "half" => DataType::Float16,
        "bf16" => DataType::Bfloat16,
        "fp32" | "f32" | "float" | "tf32" => DataType::Float32,
        "fp64" | "f64" | "double" => DataType::Float64,
        "int8" | "i8" => DataType::Int8,
        "uint8" | "u8" => DataType::Uint8,
        "int32" | "i32" => DataType::Int32,
        "uint32" | "u32" => DataType::Uint32,
        "int64" | "i64" => DataType::Int64,
        "uint64" | "u64" => DataType::Uint64,
        _ => DataType::Unspecified,
    }
}

fn direction(name: &str) -> CopyDirection {
    match name {
        "H2D" => CopyDirection::HostToDevice,
        "D2H" => CopyDirection::DeviceToHost,
        "D2D" => CopyDirection::DeviceToDevice,
        "H2H" => CopyDirection::HostToHost,
        _ => CopyDirection::Unspecified,
    }
}

/// Batch, m, n and k.
fn sizes(shapes: &[u32]) -> Option<[u32; 4]> {
    shapes.try_into().ok()
}

fn matmul(data: &MatmulDebugData) -> Option<Box<Matmul>> {
    let [batch, m, n, k] = sizes(&data.shapes)?;
    let transposed = |index| match data.trans.as_bytes().get(index) {
        Some(b'T') => 1,
        Some(b'C') => 2,
        _ => 0,
    };
    let numbers = |list: &[i64]| [0, 1, 2].map(|index| list.get(index).map_or(0, |number| (*number).max(0) as u64));
    let ([lda, ldb, ldc], [stride_a, stride_b, stride_c]) = (numbers(&data.lds), numbers(&data.strides));
    Some(Box::new(Matmul {
        batch,
        m,
        n,
        k,
        trans_a: transposed(0),
        trans_b: transposed(1),
        lda,
        ldb,
        ldc,
        stride_a,
        stride_b,
        stride_c,
        // The format cannot tell the algorithm 0 from an unknown one.
        algorithm: Some(data.algo).filter(|number| *number != 0),
        members: Vec::new(),
    }))
}

/// The name of a product in the `.timeline.meta` file only repeats its shape.
fn set_api(operation: &mut Operation, api: String) {
    if !api.is_empty() {
        operation.function = api;
    }
}

fn launch(grid: &[u32], block: &[u32]) -> Option<Box<LaunchConfig>> {
    let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (grid, block) else { return None };
    let (grid_x, grid_y, grid_z) = (*grid_x, *grid_y, *grid_z);
    let (block_x, block_y, block_z) = (*block_x, *block_y, *block_z);
    Some(Box::new(LaunchConfig { grid_x, grid_y, grid_z, block_x, block_y, block_z }))
}

/// Field number and wire type; `None` at the end of the input.
fn key(input: &mut impl Read) -> io::Result<Option<(u32, WireType)>> {
    let mut first = [0];
    if input.read(&mut first)? == 0 {
        return Ok(None);
    }
    let bytes = varint_bytes(first[0], input)?;
    decode_key(&mut &bytes[..]).map(Some).map_err(|error| invalid(&error.to_string()))
}

fn varint(input: &mut impl Read) -> io::Result<u64> {
    let mut first = [0];
    input.read_exact(&mut first)?;
    let bytes = varint_bytes(first[0], input)?;
    decode_varint(&mut &bytes[..]).map_err(|error| invalid(&error.to_string()))
}

fn varint_bytes(first: u8, input: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = vec![first];
    while bytes.last().is_some_and(|byte| byte & 0x80 != 0) && bytes.len() < 10 {
        let mut byte = [0];
        input.read_exact(&mut byte)?;
        bytes.push(byte[0]);
    }
    Ok(bytes)
}

fn entry(input: &mut impl Read) -> io::Result<Vec<u8>> {
    let length = varint(input)?;
    if length > MOST_ENTRY_BYTES {
        return Err(invalid("an entry of the timeline is larger than 1 MiB"));
    }
    let mut bytes = Vec::new();
    input.take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != length {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the timeline ends within an entry"));
    }
    Ok(bytes)
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use xpu_timer_proto::{
        hook::{GcDebugData, GroupedMatmulDebugData, GroupedMatmulShape, KernelTraces, NcclDebugData},
        timeline,
    };

    use xpu_timer_analysis::throughput::{leading_dimensions, strides};

    use super::*;
    use crate::operations::Meaning;

    fn file() -> Vec<u8> {
        let product = MatmulDebugData {
            shapes: vec![1, 4096, 1024, 512],
            dtype: "bf16".into(),
            trans: "TN".into(),
            lds: vec![512, 513, 4096],
            strides: vec![0, 1 << 40, 7],
            algo: -1,
            api: "cublasGemmEx".into(),
        };
        let member = |m| GroupedMatmulShape { shapes: vec![1, m, 5, 6] };
        let grouped =
            GroupedMatmulDebugData { bmnks: vec![member(10), member(30)], dtype: "bf16".into(), ..<_>::default() };
        let reduction = NcclDebugData {
            comm_hash: 77,
            ranks: 8,
            nodes: 2,
            seq: 5,
            dtype: "fp16".into(),
            input_size_in_bytes: 4096,
            ..<_>::default()
        };
        let traces = vec![
            KernelTrace {
                trace_code: 3,
                start_us: 1_000_000,
                dur_us: 50,
                delay_us: 20,
                debug_data: Some(DebugData::MmDebug(product)),
                ..<_>::default()
            },
            KernelTrace {
                kernel_type: 1,
                trace_code: 4,
                start_us: 1_000_100,
                dur_us: 70,
                debug_data: Some(DebugData::NcclDebug(reduction)),
                ..<_>::default()
            },
            KernelTrace {
                start_us: 1_000_160,
                dur_us: 10,
                debug_data: Some(DebugData::GroupedMmDebug(grouped)),
                ..<_>::default()
            },
        ];
        let collection = host_trace::DebugData::GcDebug(GcDebugData { collected: 40, uncollectable: 1 });
        let host =
            HostTrace { start_us: 900_000, dur_us: 9, name: "GC".into(), count: 2, debug_data: Some(collection) };
        KernelTraces { traces, host_traces: vec![host], pid: 11, rank: 3 }.encode_to_vec()
    }

    #[test]
    fn a_file_of_the_original_tool_becomes_operations() {
        let names = names(
            "3,xpu_timer_mm_bmnk_1_4096_1024_512_\n4,xpu_timer_AllReduce_RING_LL_Sum_f16_size_4096\n\
             xpu_timer_host_trace,GC\n",
        );
        let bytes = file();
        let mut reader = Reader::new(&bytes[..], &names);
        let block = reader.next_block().unwrap().unwrap();
        let operations: Vec<Operation> = timeline::operations(&block).unwrap().collect();
        assert_eq!(operations.len(), 4);
        assert_eq!((operations[0].op(), operations[0].entered_ns), (Op::Matmul, 999_980_000));
        assert_eq!((operations[0].started_ns, operations[0].completed_ns), (1_000_000_000, 1_000_050_000));
        let product = operations[0].matmul.as_ref().unwrap();
        assert_eq!((product.m, product.trans_a, product.trans_b, product.algorithm), (4096, 1, 0, Some(-1)));
        assert_eq!(leading_dimensions(product), Some([512, 513, 4096]));
        assert_eq!((strides(product), operations[0].function.as_str()), (Some([0, 1 << 40, 7]), "cublasGemmEx"));
        let grouped = &operations[2];
        let members: Vec<u32> = grouped.matmul.as_ref().unwrap().members.iter().map(|member| member.m).collect();
        assert_eq!((members, Meaning::of(grouped, None).flops), (vec![10, 30], Some(2400.0)));
        assert_eq!((operations[1].op(), operations[1].count, operations[1].seq), (Op::AllReduce, 2048, 5));
        assert_eq!((operations[3].kind(), operations[3].returned_ns), (OpKind::HostCall, 900_009_000));
        let collection = GarbageCollection { generation: None, collected: 40, uncollectable: 1 };
        assert_eq!(operations[3].collection, Some(collection.into()));
        assert!(reader.next_block().unwrap().is_none());
        let head = reader.head();
        let communicator = &head.communicators[0];
        assert_eq!((head.rank.unwrap().pid, communicator.size, communicator.nodes), (11, 8, 2));
        assert_eq!((head.from_ns, head.until_ns), (900_000_000, 1_000_170_000));
    }

    #[test]
    fn a_cut_file_is_an_error() {
        let (names, bytes) = (HashMap::new(), file());
        let mut reader = Reader::new(&bytes[..bytes.len() - 12], &names);
        assert_eq!(reader.next_block().unwrap().unwrap().operations, 3);
        assert_eq!(reader.next_block().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(Reader::new(&b"hello"[..], &names).next_block().is_err());
    }
}
