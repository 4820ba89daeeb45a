//! The two commands: their options, and the files that they read and write.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Read, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Mutex, PoisonError},
};

use anyhow::{Context, bail};
use clap::Parser;
use flate2::{Compression, write::GzEncoder};
use nix::sys::stat::{Mode, umask};
use prost::Message;
use serde::Serialize;
use serde_json::{Value, json};
use xpu_timer_analysis::{
    Verdict,
    folded::stack_names,
    prefix_tree::PrefixTree,
    throughput::{dtype_name, matmul_debug},
};
use xpu_timer_proto::{
    env::Source,
    hook::{MatmulDebugData, MatmulInfo, MatmulInfos, MatmulInfosOfRank, RankMatmulInfo},
    lenient, printable, samples,
    server::{PySpyFrame, PythonStackInTimeline},
    timeline,
    v1::{Op, Operation, StackSamples},
};

use crate::{
    chrome::RankJson,
    collectives::is_completed,
    comparison::{self, Run},
    input::{Format, RankFile},
    job::{Job, NotAGroup, Rank, Settings, dimensions, parallel},
    operations::{Breakdown, Busy, Meaning},
    original,
    perfetto::{self, Counts, RankTrace, tracks},
    picture::Picture,
};

/// Number of bytes at which packets are written.
const FLUSH_BYTES: usize = 1 << 20;
/// Operations may begin this long before the window in which they end.
const LONGEST_NS: u64 = 3_600_000_000_000;
/// A larger verdict or file of names is not read.
const MOST_TEXT_BYTES: u64 = 64 << 20;

/// Turns the timelines of all ranks into one trace for ui.perfetto.dev.
///
/// Reads the RANK-WORLD.ops files of a folder, the RANK-WORLD.timeline files of DLRover's
/// xpu_timer, and the RANK-WORLD.samples files of recorded stacks. Writes trace_NAME.bin,
/// matmul_NAME.bin, breakdown_NAME.json and clocks.json.
#[derive(Debug, Clone, Parser)]
#[command(name = "xpu_timer_gen_trace_timeline", version, after_help = EXIT_CODES)]
pub struct GenArgs {
    /// Folder of timelines
    #[arg(short, long, value_name = "DIR", default_value = ".", allow_hyphen_values = true)]
    pub path: PathBuf,
    /// Number of threads
    #[arg(short, long, value_name = "N", default_value_t = 16)]
    pub concurrency: usize,
    /// Groups of the job such as tp4-cp2-dp4-pp2, that which varies fastest first [default: the
    /// communicators]
    #[arg(short, long, value_name = "GROUPS", value_parser = parse_dimensions)]
    pub groups: Option<Dimensions>,
    /// Leave out the calls on the host that launch kernels
    #[arg(long)]
    pub no_launchtime: bool,
    /// Name of the trace, with the folder to write to [default: the name of the folder]
    #[arg(short, long, value_name = "NAME", allow_hyphen_values = true)]
    pub output: Option<PathBuf>,
    /// Also write chrome_NAME/rankRRRRR.json.gz, as PyTorch's profiler writes them
    #[arg(long)]
    pub chrome: bool,
}

/// Compares the timelines of runs: box plots of kernels or collectives, or what each lost.
///
/// Also says which ranks are slower than the rest of their group, and in what.
#[derive(Debug, Clone, Parser)]
#[command(name = "xpu_timer_diff", version, after_help = EXIT_CODES)]
pub struct DiffArgs {
    /// Folder of timelines; repeat it for each run
    #[arg(short, long, value_name = "DIR", required = true)]
    pub path: Vec<PathBuf>,
    /// Name of a run, in the order of the folders [default: the names of the folders]
    #[arg(short, long, value_name = "NAME")]
    pub name: Vec<String>,
    /// What to compare
    #[arg(short, long, value_enum, default_value_t = comparison::Kind::PerformanceDiff)]
    pub r#type: comparison::Kind,
    /// Number of threads
    #[arg(short, long, value_name = "N", default_value_t = 16)]
    pub concurrency: usize,
    /// File to write, an SVG picture [default: TYPE.svg]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// The dimensions of the groups, and their sizes.
pub type Dimensions = std::sync::Arc<[(String, u32)]>;

const EXIT_CODES: &str = "Exit codes: 0 if all files are written (stderr names timelines that cannot be read); 1 if \
there is no timeline or a file cannot be written; 2 for wrong usage.";

fn parse_dimensions(text: &str) -> Result<Dimensions, NotAGroup> {
    dimensions(text).map(Dimensions::from)
}

/// Runs a command with the file mode of the settings, and reports its error.
pub fn finish(name: &str, run: impl FnOnce(&mut dyn Write, &mut dyn Write) -> anyhow::Result<()>) -> ExitCode {
    // Names of kernels may be confidential, so the mode of the files does not depend on the user's
    // umask.
    umask(Mode::from_bits_truncate(Source::process().umask()));
    match run(&mut io::stdout().lock(), &mut io::stderr().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // `eprintln` panics when stderr is closed.
            let _ = writeln!(io::stderr(), "{name}: {}", printable::line(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

/// The timelines of a folder, ordered by rank. If a rank has several kinds of files, ours is taken,
/// and its samples only if it has no other.
///
/// # Errors
/// The folder cannot be read.
pub fn files(folder: &Path) -> io::Result<Vec<RankFile>> {
    let paths = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
    let mut paths: Vec<PathBuf> = paths.collect::<Result<_, _>>()?;
    let kinds = [timeline::EXTENSION, original::EXTENSION, samples::EXTENSION];
    let kind = |path: &Path| kinds.iter().position(|kind| path.extension().is_some_and(|extension| extension == *kind));
    paths.sort_by_cached_key(|path| (path.with_extension(""), kind(path)));
    let mut files: Vec<RankFile> = Vec::new();
    for path in paths {
        let Some(name) = path.file_name().and_then(|name| name.to_str()).map(str::to_string) else { continue };
        let Some(kind) = kind(&path) else { continue };
        // All formats have the same names.
        let Some((rank, world_size)) = timeline::rank_of_file(&path.with_extension(timeline::EXTENSION)) else {
            continue;
        };
        if files.last().is_some_and(|last| last.rank == rank) {
            continue;
        }
        let format = match kinds[kind] {
            timeline::EXTENSION => Format::Ops,
            samples::EXTENSION => Format::Samples,
            _ => {
                let meta = read_bounded(&path.with_extension(original::META)).unwrap_or_default();
                Format::Original(original::names(&String::from_utf8_lossy(&meta)))
            }
        };
        let open = Box::new(move || {
            // Opening a pipe blocks until it has a writer.
            if !fs::metadata(&path)?.is_file() {
                return Err(io::Error::other("it is not a regular file"));
            }
            Ok(Box::new(File::open(&path)?) as Box<dyn Read + Send>)
        });
        files.push(RankFile { name, rank, world_size, format, open });
    }
    Ok(files)
}

/// The contents of a file, at most its first [`MOST_TEXT_BYTES`].
fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MOST_TEXT_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads the job of a folder, and prints what is missing.
fn read_job(folder: &Path, settings: Settings, err: &mut dyn Write) -> anyhow::Result<Job> {
    let verdict = match read_bounded(&folder.join("verdict.json")) {
        Ok(bytes) => serde_json::from_slice::<Verdict>(&bytes).map(Some).map_err(|error| error.to_string()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    };
    let (verdict, note) = match verdict {
        Ok(verdict) => (verdict, None),
        Err(error) => (None, Some(format!("verdict.json is left out: {error}"))),
    };
    let files = files(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    if files.is_empty() {
        bail!("{} has no timeline: no file RANK-WORLD.ops, .timeline or .samples", folder.display());
    }
    let job = Job::read(files, verdict, settings);
    let lost = job.ranks.iter().filter_map(|rank| Some(format!("{}: {}", rank.file.name, rank.lost()?)));
    for note in note.iter().chain(&lost.collect::<Vec<_>>()).chain(&job.notes) {
        let _ = writeln!(err, "warning: {}", printable::line(note));
    }
    if job.ranks.is_empty() {
        bail!("{} has no timeline that can be read", folder.display());
    }
    Ok(job)
}

/// Writes a file under a temporary name, and renames it when it is complete.
fn write_file<T>(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<T>) -> anyhow::Result<T> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    let temporary = PathBuf::from(temporary);
    let written = File::create(&temporary).and_then(|file| {
        let mut file = BufWriter::with_capacity(FLUSH_BYTES, file);
        let value = write(&mut file)?;
        file.flush()?;
        fs::rename(&temporary, path)?;
        Ok(value)
    });
    written.with_context(|| format!("cannot write {}", path.display())).inspect_err(|_| {
        let _ = fs::remove_file(&temporary);
    })
}

/// The files that all ranks share, and the folder of those that each has.
struct Outputs<'a> {
    trace: Mutex<&'a mut BufWriter<File>>,
    matmuls: Mutex<&'a mut BufWriter<File>>,
    chrome: Option<&'a Path>,
    /// The folder of the timelines, which may have samples of stacks, too.
    input: &'a Path,
}

/// Appends bytes to a file that all ranks share.
fn append(file: &Mutex<&mut BufWriter<File>>, bytes: &[u8]) -> io::Result<()> {
    file.lock().unwrap_or_else(PoisonError::into_inner).write_all(bytes)
}

/// `xpu_timer_gen_trace_timeline`.
///
/// # Errors
/// There is no timeline, or a file cannot be written.
pub fn gen_trace(args: &GenArgs, out: &mut dyn Write, err: &mut dyn Write) -> anyhow::Result<()> {
    let settings =
        Settings { threads: args.concurrency, dimensions: args.groups.as_deref().unwrap_or_default().to_vec() };
    let job = read_job(&args.path, settings, err)?;
    let (folder, name) = output_name(args);
    if !folder.as_os_str().is_empty() {
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    let chrome = args.chrome.then(|| folder.join(format!("chrome_{name}")));
    if let Some(chrome) = &chrome {
        fs::create_dir_all(chrome).with_context(|| format!("cannot create {}", chrome.display()))?;
    }
    let trace = folder.join(format!("trace_{name}.bin"));
    let options = perfetto::Options { no_launch_time: args.no_launchtime };
    let matmuls = folder.join(format!("matmul_{name}.bin"));
    let (breakdowns, counts) = write_file(&trace, |trace| {
        let (bytes, mut counts) = perfetto::preamble(&job);
        trace.write_all(&bytes)?;
        let written = write_file(&matmuls, |matmuls| {
            let outputs = Outputs {
                trace: Mutex::new(trace),
                matmuls: Mutex::new(matmuls),
                chrome: chrome.as_deref(),
                input: &args.path,
            };
            let of_ranks =
                parallel(args.concurrency, job.ranks.len(), |index| write_rank(&job, index, options, &outputs));
            of_ranks.into_iter().collect::<io::Result<Vec<_>>>()
        });
        let of_ranks = written.map_err(io::Error::other)?;
        of_ranks.iter().for_each(|(of_rank, _)| counts.add(*of_rank));
        let breakdowns = job.ranks.iter().zip(&of_ranks).map(|(rank, (_, breakdown))| (rank.rank, *breakdown));
        Ok((breakdowns.collect::<Vec<_>>(), counts))
    })?;
    let rows: Vec<Value> = breakdowns.iter().map(|(rank, breakdown)| breakdown_row(*rank, breakdown)).collect();
    write_json(&folder.join(format!("breakdown_{name}.json")), &rows)?;
    write_json(&folder.join("clocks.json"), &job.clocks)?;
    let mut text = summary(&job, &trace, counts, &breakdowns);
    if let Some(svg) = write_launch_stacks(&job, &args.path, &folder)? {
        text.push_str(&format!("{}: the Python stacks of launches\n", svg.display()));
    }
    write_stdout(&text, out)
}

fn write_json(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    write_file(path, |file| serde_json::to_writer_pretty(file, value).map_err(io::Error::from))
}

/// The breakdown of a rank as a flat object.
fn breakdown_row(rank: u32, breakdown: &impl Serialize) -> Value {
    let mut row = json!({ "rank": rank });
    let columns = serde_json::to_value(breakdown).unwrap_or_default();
    if let (Some(row), Value::Object(columns)) = (row.as_object_mut(), columns) {
        row.extend(columns);
    }
    row
}

/// Writes the Python stacks of launches as folded text and as a picture, if there are any. Returns
/// the path of the picture.
fn write_launch_stacks(job: &Job, dumps: &Path, folder: &Path) -> anyhow::Result<Option<PathBuf>> {
    let stacks = launch_stacks(job, dumps);
    if stacks.nodes().is_empty() {
        return Ok(None);
    }
    let picture = Picture::new(&stacks, job.world_size());
    write_file(&folder.join("merged_tracing_kernel_stack"), |file| file.write_all(picture.folded().as_bytes()))?;
    let svg = folder.join("tracing_kernel_stack.svg");
    write_file(&svg, |file| picture.write_svg("launches by Python stack", file))?;
    Ok(Some(svg))
}

/// The Python stacks of launches of all ranks. Their innermost frames are the launched operations.
fn launch_stacks(job: &Job, folder: &Path) -> PrefixTree {
    let mut tree = PrefixTree::new();
    // Innermost frame first.
    let mut insert = |rank: u32, operation: (&str, &str), frames: &[&PySpyFrame]| {
        let frames = frames.iter().map(|frame| (frame.func_name.as_str(), frame.file_name.as_str()));
        let names: Vec<String> = stack_names([operation].into_iter().chain(frames)).collect();
        tree.insert(names.iter().map(String::as_str), rank);
    };
    for rank in &job.ranks {
        for stack in &rank.head.stacks {
            let Some(operation) = &stack.operation else { continue };
            let frames = stack.frames.iter().filter_map(|index| rank.head.frames.get(*index as usize));
            let group = job.group_of(rank, operation).map(|(index, _)| &job.groups[index]);
            let meaning = Meaning::of(operation, group);
            insert(rank.rank, (&meaning.name, meaning.class.name()), &frames.collect::<Vec<_>>());
        }
        if let Format::Original(_) = rank.file.format {
            let Ok(bytes) = read_bounded(&folder.join(&rank.file.name).with_extension(original::STACKS)) else {
                continue;
            };
            let Ok(stacks) = lenient::decode::<PythonStackInTimeline>(&bytes) else { continue };
            for stack in &stacks.named_frames {
                let frames = stack.frames.iter().flat_map(|list| list.frames.iter().rev());
                insert(rank.rank, (&stack.name, "launch"), &frames.collect::<Vec<_>>());
            }
        }
    }
    tree
}

/// The folder and the name of the output.
fn output_name(args: &GenArgs) -> (PathBuf, String) {
    let of = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    match &args.output {
        Some(output) => (
            output.parent().map(Path::to_path_buf).unwrap_or_default(),
            of(output).unwrap_or_else(|| "timeline".into()),
        ),
        None => {
            let folder = args.path.canonicalize().unwrap_or_else(|_| args.path.clone());
            (PathBuf::new(), of(&folder).unwrap_or_else(|| "timeline".into()))
        }
    }
}

/// Writes all formats of one rank in one pass over its file.
fn write_rank(
    job: &Job,
    index: usize,
    options: perfetto::Options,
    outputs: &Outputs<'_>,
) -> io::Result<(Counts, Breakdown)> {
    let rank = &job.ranks[index];
    let mut trace = RankTrace::new(job, index, options);
    let mut json = match outputs.chrome {
        Some(folder) => {
            let file = BufWriter::new(File::create(folder.join(format!("rank{:05}.json.gz", rank.rank)))?);
            let from = job.clocks[rank.node].map.apply(rank.head.from_ns);
            let file = GzEncoder::new(file, Compression::fast());
            Some(RankJson::new(file, job, rank, from.saturating_sub(LONGEST_NS))?)
        }
        None => None,
    };
    let (mut busy, mut matmuls) = (Busy::default(), Matmuls::default());
    let mut written = Ok(());
    Job::each_block(rank, |block, times| {
        trace.begin_block(block);
        matmuls.begin_block(&block.shapes);
        json.iter_mut().for_each(|json| json.begin_block(block));
        for time in times {
            let on_device = trace.operation(&time);
            if let Some((class, from, until)) = on_device {
                busy.add(class, from, until);
            }
            if is_completed(time.status, time.completed_ns) && time.device_ns > 0 {
                matmuls.add(time.shape, time.device_ns);
            }
            if let (Some(json), Ok(())) = (&mut json, &written) {
                written = json.operation(&time, on_device.map(|(_, from, until)| (from, until)));
            }
            if trace.out.len() >= FLUSH_BYTES && written.is_ok() {
                written = append(&outputs.trace, &trace.out);
                trace.out.clear();
            }
        }
    });
    written?;
    let (breakdown, busy) = busy.finish();
    tracks::write_counters(&mut trace, &busy);
    trace.finish();
    let samples = samples_of(outputs.input, rank);
    if let Some(samples) = &samples {
        tracks::write_samples(&mut trace, samples);
    }
    append(&outputs.trace, &trace.out)?;
    if let Some(json) = json {
        json.finish(&busy, samples.as_ref())?.finish()?.flush()?;
    }
    // Entries of a map that follow each other are one map.
    let matmuls = MatmulInfosOfRank { rank: rank.rank.into(), infos: Some(matmuls.finish()) };
    append(&outputs.matmuls, &RankMatmulInfo { mm_infos: vec![matmuls] }.encode_to_vec())?;
    Ok((trace.counts, breakdown))
}

/// The sampled stacks of a rank, if the folder has them.
#[must_use]
pub fn samples_of(folder: &Path, rank: &Rank) -> Option<StackSamples> {
    let name = samples::file_name(rank.rank, rank.file.world_size);
    samples::decode(&read_bounded(&folder.join(name)).ok()?).ok()
}

/// The matrix products of a rank by their shapes.
#[derive(Default)]
struct Matmuls {
    infos: Vec<MatmulInfo>,
    /// Index of each shape, by its encoding.
    by_shape: std::collections::HashMap<Vec<u8>, usize>,
    /// The index and the floating-point operations of each shape of the block.
    block: Vec<Option<(usize, f64)>>,
}

impl Matmuls {
    fn begin_block(&mut self, shapes: &[Operation]) {
        self.block.clear();
        for shape in shapes {
            let of_shape = matmul_data(shape).map(|(data, flops)| {
                let index = *self.by_shape.entry(data.encode_to_vec()).or_insert_with(|| {
                    self.infos.push(MatmulInfo { mm_debug: Some(data), tflops: Vec::new() });
                    self.infos.len() - 1
                });
                (index, flops)
            });
            self.block.push(of_shape);
        }
    }

    fn add(&mut self, shape: u32, device_ns: u64) {
        if let Some((index, flops)) = self.block[shape as usize] {
            self.infos[index].tflops.push(flops / device_ns as f64 / 1e3);
        }
    }

    fn finish(self) -> MatmulInfos {
        MatmulInfos { infos: self.infos }
    }
}

fn matmul_data(shape: &Operation) -> Option<(MatmulDebugData, f64)> {
    // The format has no place for the members of a grouped product.
    let of = shape.matmul.as_ref().filter(|of| shape.op() == Op::Matmul && of.members.is_empty())?;
    Some((matmul_debug(shape, of, dtype_name(shape.dtype())), Meaning::of(shape, None).flops?))
}

fn summary(job: &Job, trace: &Path, counts: Counts, breakdowns: &[(u32, Breakdown)]) -> String {
    let operations: u64 = job.ranks.iter().map(|rank| rank.operations).sum();
    let count = |number: usize, what: &str| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
    let mut text = format!(
        "{}: {} on {}, {operations} operations, {} slices\n",
        trace.display(),
        count(job.ranks.len(), "rank"),
        count(job.clocks.len(), "node"),
        counts.slices
    );
    for clock in &job.clocks {
        match (&clock.aligned_with, &clock.residual) {
            (Some(with), Some(residual)) => text.push_str(&format!(
                "clock of {}: aligned with {with}, realtime {:+.3} ms off, drift {:+.3} ppm, residual median {:.1} us, \
                 p99 {:.1} us, {} collectives\n",
                clock.node,
                clock.realtime_error_ns as f64 / 1e6,
                clock.map.drift * 1e6,
                residual.median_us,
                residual.p99_us,
                residual.ends
            )),
            _ if !clock.refused.is_empty() => {
                text.push_str(&format!("clock of {}: not aligned, {}\n", clock.node, clock.refused));
            }
            _ => {}
        }
    }
    type Percent = fn(&Breakdown) -> f64;
    let columns: [(&str, Percent); 4] = [
        ("compute", |of| 100.0 * of.compute_time_us / of.kernel_time_us),
        ("communication or memory alone", |of| 100.0 * of.non_compute_time_us / of.kernel_time_us),
        ("idle", |of| 100.0 * of.idle_time_us / of.kernel_time_us),
        ("communication beside compute", |of| of.overlap_percent),
    ];
    for (name, percent) in columns {
        let busy = breakdowns.iter().filter(|(_, of)| of.kernel_time_us > 0.0);
        let mut values: Vec<(f64, u32)> = busy.map(|(rank, of)| (percent(of), *rank)).collect();
        values.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        if let (Some(least), Some(most)) = (values.first(), values.last()) {
            let mean = values.iter().map(|(value, _)| value).sum::<f64>() / values.len() as f64;
            text.push_str(&format!(
                "{name}: {mean:.1} %, from {:.1} % (rank {}) to {:.1} % (rank {})\n",
                least.0, least.1, most.0, most.1
            ));
        }
    }
    printable::text(&text).into_owned()
}

/// `xpu_timer_diff`.
///
/// # Errors
/// There is no timeline, or the file cannot be written.
pub fn diff(args: &DiffArgs, out: &mut dyn Write, err: &mut dyn Write) -> anyhow::Result<()> {
    let mut runs = Vec::new();
    for (index, path) in args.path.iter().enumerate() {
        let job = read_job(path, Settings { threads: args.concurrency, ..Settings::default() }, err)?;
        let folder =
            || path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into());
        let name = args.name.get(index).cloned().unwrap_or_else(folder);
        runs.push(Run::of(&job, name, args.concurrency));
    }
    let (svg, text) = comparison::compare(&runs, args.r#type)?;
    let output = args.output.clone().unwrap_or_else(|| PathBuf::from(format!("{}.svg", args.r#type.name())));
    write_file(&output, |file| file.write_all(svg.as_bytes()))?;
    write_stdout(&format!("{}\n{text}", output.display()), out)
}

/// Writes to stdout. A reader that closed the pipe early, such as `head`, has seen enough.
fn write_stdout(text: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to stdout"),
    }
}
