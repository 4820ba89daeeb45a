//! Chrome's JSON trace of one rank, as Kineto writes it, so that tools for PyTorch's profiles read
//! it, such as HolisticTraceAnalysis.

use std::io::{self, Write};

use hashbrown::HashMap;
use serde_json::{Value, json};
use xpu_timer_analysis::throughput::{algorithm, operation_name};
use xpu_timer_proto::{
    printable,
    timeline::Times,
    v1::{CopyDirection, DataType, GarbageCollection, Op, Operation, StackSamples, TimelineBlock},
};

use crate::{
    collectives::is_completed,
    job::{Job, Rank},
    operations::{BUSY, Class, MEMORY, Meaning, busy_percent, memory},
    perfetto::tracks::{Call, each_call, name_of, track_name},
};

/// Streams are numbered from here, as CUDA's context numbers those that a program creates.
const FIRST_STREAM: u64 = 7;

/// The track of the sampled stacks of a thread has the number of the thread plus this, which is
/// larger than that of any thread.
const SAMPLED_TIDS: i64 = 1 << 24;

/// The parts that are equal for all operations of one shape of a block.
struct Template {
    /// `"ph": "X", "cat": …, "name": …, "pid": …, "tid": …` of the kernel.
    kernel: String,
    /// The arguments of the kernel without the correlation, or those of the host function with a
    /// comma at the end.
    arguments: String,
    /// The start of the event, as in `kernel`, of the call that launched it or of the host
    /// function.
    host: String,
    is_host: bool,
}

/// Writes the trace of one rank.
pub struct RankJson<'a, W> {
    out: W,
    job: &'a Job,
    rank: &'a Rank,
    pid: i32,
    device: i32,
    streams: HashMap<u64, u64>,
    templates: Vec<Template>,
    base_ns: u64,
    is_first: bool,
    correlation: u64,
}

impl<'a, W: Write> RankJson<'a, W> {
    /// Begins the file. Times are relative to `base_ns`, because a JSON number cannot hold
    /// nanoseconds since the epoch.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn new(mut out: W, job: &'a Job, rank: &'a Rank, base_ns: u64) -> io::Result<Self> {
        let info = rank.head.rank.clone().unwrap_or_default();
        let device = rank.head.communicators.first().map_or(info.local_rank, |communicator| communicator.device);
        let groups = rank.head.communicators.iter().filter_map(|communicator| {
            let shape = Operation { communicator: communicator.id, ..Operation::default() };
            let (index, _) = job.group_of(rank, &shape)?;
            let group = &job.groups[index];
            let ranks: Vec<u32> = group.members.iter().collect();
            Some(json!({
                "pg_name": format!("{:#x}", group.id), "pg_desc": group.name, "backend_config": "cuda:nccl",
                "pg_size": group.size, "ranks": ranks,
            }))
        });
        let groups: Vec<Value> = groups.collect();
        let name = text(&rank.head.device);
        // HolisticTraceAnalysis searches for the rank with a blank before it.
        write!(
            out,
            "{{\"schemaVersion\": 1, \"distributedInfo\": {{\"backend\": \"nccl\", \"rank\": {}, \"world_size\": {}, \
             \"pg_count\": {}, \"pg_config\": {}}}, \"deviceProperties\": [{{\"id\": {device}, \"name\": {name}}}], \
             \"displayTimeUnit\": \"ms\", \"baseTimeNanoseconds\": {base_ns}, \"traceEvents\": [",
            rank.rank,
            job.world_size(),
            groups.len(),
            Value::from(groups),
        )?;
        Ok(RankJson {
            out,
            job,
            rank,
            pid: info.pid,
            device,
            streams: HashMap::new(),
            templates: Vec::new(),
            base_ns,
            is_first: true,
            correlation: 0,
        })
    }

    /// Prepares the shapes of a block. [`RankJson::operation`] writes its operations.
    pub fn begin_block(&mut self, block: &TimelineBlock) {
        self.templates.clear();
        for shape in &block.shapes {
            let template = self.template(shape);
            self.templates.push(template);
        }
    }

    fn template(&mut self, shape: &Operation) -> Template {
        let group = self.job.group_of(self.rank, shape).map(|(index, _)| &self.job.groups[index]);
        let meaning = Meaning::of(shape, group);
        let next = FIRST_STREAM + self.streams.len() as u64;
        let stream = *self.streams.entry(shape.stream).or_insert(next);
        let (category, name, launch) = match meaning.class {
            Class::Communication => ("kernel", collective_name(shape), "cudaLaunchKernelExC"),
            Class::Memory if shape.direction() == CopyDirection::Fill => {
                ("gpu_memset", "Memset (Device)".into(), "cudaMemsetAsync")
            }
            Class::Memory => ("gpu_memcpy", meaning.name.replacen("memcpy", "Memcpy", 1), "cudaMemcpyAsync"),
            Class::Compute => ("kernel", kernel_name(shape, &meaning), "cudaLaunchKernel"),
            Class::Host => ("", String::new(), ""),
        };
        let is_host = meaning.class == Class::Host;
        let (pid, tid, device) = (self.pid, shape.tid, self.device);
        let host = match is_host {
            true => format!("\"ph\": \"X\", \"cat\": \"python_function\", \"name\": {}", text(&meaning.name)),
            false => format!("\"ph\": \"X\", \"cat\": \"cuda_runtime\", \"name\": \"{launch}\""),
        };
        let mut arguments = format!("\"device\": {device}, \"context\": 1, \"stream\": {stream}");
        let mut add = |name: &str, value: Value| arguments.push_str(&format!(", \"{name}\": {value}"));
        if meaning.bytes != 0 {
            add("bytes", meaning.bytes.into());
        }
        if let Some(of) = &shape.launch {
            add("grid", json!([of.grid_x, of.grid_y, of.grid_z]));
            add("block", json!([of.block_x, of.block_y, of.block_z]));
        }
        if meaning.class == Class::Communication {
            add("Collective name", pytorch_name(shape.op()).into());
            add("In msg nelems", shape.count.into());
            add("dtype", pytorch_dtype(shape.dtype()).into());
            add("Process Group Name", format!("{:#x}", shape.communicator).into());
        }
        if let Some(group) = group {
            let ranks: Vec<u32> = group.members.iter().collect();
            add("Process Group Description", group.name.as_str().into());
            add("Group size", group.size.into());
            add("Process Group Ranks", Value::from(ranks).to_string().into());
        }
        if let Some(of) = &shape.collection {
            arguments.clear();
            let GarbageCollection { generation, collected, uncollectable } = **of;
            let generation = generation.map(|number| format!("\"generation\": {number}, ")).unwrap_or_default();
            arguments
                .push_str(&format!("{generation}\"collected\": {collected}, \"uncollectable\": {uncollectable}, "));
        } else if is_host {
            arguments.clear();
        }
        Template {
            kernel: format!(
                "\"ph\": \"X\", \"cat\": \"{category}\", \"name\": {}, \"pid\": {device}, \"tid\": {stream}",
                text(&name)
            ),
            arguments,
            host: format!("{host}, \"pid\": {pid}, \"tid\": {tid}"),
            is_host,
        }
    }

    /// Writes an operation of the current block: its launch, its kernel, and the arrow between.
    /// `on_device` is its slice in the trace: those of one stream are nested or apart.
    ///
    /// # Errors
    /// The errors of the output.
    pub fn operation(&mut self, time: &Times, on_device: Option<(u64, u64)>) -> io::Result<()> {
        let map = &self.job.clocks[self.rank.node].map;
        let base_ns = self.base_ns;
        let us = |ns: u64| since_us(base_ns, map.apply(ns));
        let Some(template) = self.templates.get(time.shape as usize) else { return Ok(()) };
        let mut begin = |out: &mut W| {
            let comma = if std::mem::take(&mut self.is_first) { "\n" } else { ",\n" };
            out.write_all(comma.as_bytes())
        };
        self.correlation += 1;
        let (correlation, out) = (self.correlation, &mut self.out);
        let is_launched = time.entered_ns != 0 && time.returned_ns >= time.entered_ns;
        if is_launched {
            let (from, until) = (us(time.entered_ns), us(time.returned_ns));
            begin(out)?;
            write!(out, "{{{}, \"ts\": {from:.3}, \"dur\": {:.3}, ", template.host, until - from)?;
            let arguments = if template.is_host { &*template.arguments } else { "" };
            write!(out, "\"args\": {{{arguments}\"correlation\": {correlation}}}}}")?;
        }
        let is_kernel = !template.is_host && is_completed(time.status, time.completed_ns);
        let Some((from_ns, until_ns)) = on_device.filter(|_| is_kernel) else { return Ok(()) };
        let (from, dur) = (since_us(base_ns, from_ns), since_us(from_ns, until_ns));
        begin(out)?;
        write!(out, "{{{}, \"ts\": {from:.3}, \"dur\": {dur:.3}, ", template.kernel)?;
        write!(out, "\"args\": {{{}, \"correlation\": {correlation}, \"seq\": {}}}}}", template.arguments, time.seq)
    }

    /// Ends the file with the counters, the sampled stacks and what is missing, and returns the
    /// output. `busy` is when anything ran on the device, in times of the trace.
    ///
    /// # Errors
    /// The errors of the output.
    pub fn finish(mut self, busy: &[(u64, u64)], samples: Option<&StackSamples>) -> io::Result<W> {
        let (head, map, pid) = (&self.rank.head, self.job.clocks[self.rank.node].map, self.pid);
        if let Some(lost) = self.rank.lost() {
            let labels = json!({"ph": "M", "name": "process_labels", "pid": pid, "args": {"labels": lost}});
            self.event(&labels)?;
        }
        let mut counter = |name: &str, unit: &str, (ns, value): (u64, u64)| {
            let ts = self.us(ns);
            self.event(&json!({"ph": "C", "name": name, "pid": pid, "ts": ts, "args": {unit: value}}))
        };
        busy_percent(head, map, busy).into_iter().try_for_each(|of| counter(BUSY, "percent", of))?;
        memory(head, map).try_for_each(|of| counter(MEMORY, "bytes", of))?;
        for (samples, thread) in samples.into_iter().flat_map(|of| of.threads.iter().map(move |thread| (of, thread))) {
            let (tid, name) = (SAMPLED_TIDS + i64::from(thread.tid), printable::line(&track_name(thread)).into_owned());
            self.event(&json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}))?;
            let mut written = Ok(());
            each_call(samples, thread, |call| {
                let event = match call {
                    Call::Begins(frame, ns) => {
                        let name = printable::line(&name_of(frame)).into_owned();
                        json!({"ph": "B", "name": name, "pid": pid, "tid": tid, "ts": self.us(map.apply(ns))})
                    }
                    Call::Ends(ns) => json!({"ph": "E", "pid": pid, "tid": tid, "ts": self.us(map.apply(ns))}),
                };
                if written.is_ok() {
                    written = self.event(&event);
                }
            });
            written?;
        }
        self.out.write_all(b"\n]}\n")?;
        Ok(self.out)
    }

    /// A time of the trace in microseconds, as the file has it.
    fn us(&self, ns: u64) -> f64 {
        since_us(self.base_ns, ns)
    }

    fn event(&mut self, event: &Value) -> io::Result<()> {
        let comma = if std::mem::take(&mut self.is_first) { "\n" } else { ",\n" };
        write!(self.out, "{comma}{event}")
    }
}

fn since_us(base_ns: u64, ns: u64) -> f64 {
    ns.saturating_sub(base_ns) as f64 / 1e3
}

/// A JSON string.
fn text(value: &str) -> String {
    Value::from(printable::line(value)).to_string()
}

/// NCCL's name of a collective kernel, with its known parts.
fn collective_name(shape: &Operation) -> String {
    if shape.function.starts_with("nccl") && shape.function.contains("Kernel") {
        return shape.function.clone();
    }
    let name = operation_name(shape.op());
    if matches!(shape.op(), Op::Send | Op::Recv) {
        return format!("ncclDevKernel_{name}(ncclDevKernelArgsStorage<4096ul>)");
    }
    let reduces = matches!(shape.op(), Op::AllReduce | Op::Reduce | Op::ReduceScatter);
    let reduction = ["Sum", "Prod", "MinMax", "MinMax", "PreMulSum"].get(shape.reduce_op as usize).unwrap_or(&"Sum");
    let parts = if reduces { format!("_{reduction}_{}", nccl_dtype(shape.dtype())) } else { String::new() };
    let algorithm =
        algorithm(&shape.function, shape.op()).map(|algorithm| format!("_{}", algorithm.name())).unwrap_or_default();
    format!("ncclDevKernel_{name}{parts}{algorithm}(ncclDevKernelArgsStorage<4096ul>)")
}

/// The function of a kernel, else the name of its operation. A product is named after its shape as
/// well, because the name of the called C function says little.
fn kernel_name(shape: &Operation, meaning: &Meaning) -> String {
    match (shape.op(), shape.function.as_str()) {
        (Op::Matmul | Op::Attention, function) if !function.is_empty() => format!("{function} {}", meaning.name),
        _ => meaning.name.clone(),
    }
}

fn nccl_dtype(dtype: DataType) -> &'static str {
    match dtype {
        DataType::Int8 => "i8",
        DataType::Uint8 => "u8",
        DataType::Int32 => "i32",
        DataType::Uint32 => "u32",
        DataType::Int64 => "i64",
        DataType::Uint64 => "u64",
        DataType::Float16 => "f16",
        DataType::Float64 => "f64",
        DataType::Bfloat16 => "bf16",
        DataType::Float8E4m3 => "f8e4m3",
        DataType::Float8E5m2 => "f8e5m2",
        DataType::Float32 | DataType::Complex64 | DataType::Complex128 | DataType::Unspecified => "f32",
    }
}

/// The names of collectives in PyTorch's profiles.
fn pytorch_name(op: Op) -> &'static str {
    match op {
        Op::AllReduce => "allreduce",
        Op::Reduce => "reduce",
        Op::Broadcast => "broadcast",
        Op::AllGather => "all_gather",
        Op::ReduceScatter => "reduce_scatter",
        Op::AllToAll => "all_to_all",
        Op::Gather => "gather",
        Op::Scatter => "scatter",
        Op::Send => "send",
        Op::Recv => "recv",
        Op::Barrier => "barrier",
        _ => "unknown",
    }
}

/// The names of types in PyTorch's profiles.
fn pytorch_dtype(dtype: DataType) -> &'static str {
    match dtype {
        DataType::Int8 => "Char",
        DataType::Uint8 => "Byte",
        DataType::Int32 => "Int",
        DataType::Uint32 => "UInt32",
        DataType::Int64 => "Long",
        DataType::Uint64 => "UInt64",
        DataType::Float16 => "Half",
        DataType::Float32 => "Float",
        DataType::Float64 => "Double",
        DataType::Bfloat16 => "BFloat16",
        DataType::Float8E4m3 => "Float8_e4m3fn",
        DataType::Float8E5m2 => "Float8_e5m2",
        DataType::Complex64 => "ComplexFloat",
        DataType::Complex128 => "ComplexDouble",
        DataType::Unspecified => "unknown",
    }
}
