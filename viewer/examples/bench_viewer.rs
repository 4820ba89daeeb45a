//! Measures the viewer: `cargo run --release -p xpu_timer_viewer --example bench_viewer -- files`,
//! and the merge of the trees of many nodes: `… -- trees`. Both fail above their limits.
//!
//! `files` writes the dumps of a large job (the same bytes for the same seed), reads them, and
//! merges them with both folded files and both pictures. It prints both times, their ratio and the
//! peak memory.
//!
//! `trees` merges the trees of nodes, as the cluster collector does, and writes all labels. Every
//! node has 8 ranks and sends its stacks as one tree. It prints the time.

use anyhow::{Context, ensure};
use clap::Parser;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use xpu_timer_analysis::folded::folded;
use xpu_timer_analysis::prefix_tree::PrefixTree;
use xpu_timer_proto::Message;
use xpu_timer_proto::server::{PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace, Stacktrace};
use xpu_timer_viewer::filter::Filter;
use xpu_timer_viewer::{Args, FileChoice, Terminal};

/// Benchmarks of xpu_timer_stacktrace_viewer.
#[derive(Parser)]
enum Command {
    /// The viewer against reading the same files
    Files(FileOptions),
    /// The merge of per-node trees
    Trees(TreeOptions),
}

#[derive(clap::Args)]
struct FileOptions {
    /// Number of files; the world is the next larger multiple of 512, so that some ranks are absent
    #[arg(long, default_value_t = 1016)]
    files: u32,
    /// Where to keep the files [default: a temporary folder, removed at the end]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Seed of the generator
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How often each measurement is repeated; the fastest counts
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Number of threads in each file whose stack no other file has
    #[arg(long, default_value_t = 0)]
    unique: usize,
    /// Also write report.html, which reads every file completely
    #[arg(long)]
    html: bool,
    /// Fail when the viewer takes more than this many times as long as reading the files
    #[arg(long, default_value_t = 6.0)]
    max_ratio: f64,
    /// Fail when the viewer takes more memory than this, in MiB
    #[arg(long, default_value_t = 64.0)]
    max_memory: f64,
}

#[derive(clap::Args)]
struct TreeOptions {
    /// Number of nodes
    #[arg(long, default_value_t = 12_500)]
    nodes: u32,
    /// Number of different stacks of each node, 10 frames each
    #[arg(long, default_value_t = 40)]
    stacks: u32,
    /// Fail when the merge takes longer than this, in milliseconds
    #[arg(long, default_value_t = 1_000.0)]
    max_ms: f64,
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Files(options) => view_files(&options),
        Command::Trees(options) => merge_trees(&options),
    }
}

fn view_files(options: &FileOptions) -> anyhow::Result<()> {
    let temporary = tempfile::tempdir()?;
    let dir = options.dir.as_deref().unwrap_or(temporary.path());
    let input = dir.join(format!("dumps-{}-{}-{}", options.files, options.seed, options.unique));
    let bytes = Generator::new(options.seed, options.unique).write(&input, options.files)?;
    println!(
        "{} files, {:.1} KB each, {:.1} MB in all",
        options.files,
        bytes as f64 / f64::from(options.files) / 1e3,
        bytes as f64 / 1e6
    );

    let read = fastest(options.rounds, || read_all(&input, bytes))?;
    println!("reading:        {:8.1} ms  ({:.1} GB/s)", ms(read), bytes as f64 / read.as_secs_f64() / 1e9);
    let choice = FileChoice { folded: true, svg: true, html: options.html, ..FileChoice::default() };
    let args = Args {
        path: input.clone(),
        output: Some(dir.join("output")),
        choice,
        filter: Filter::default(),
        json: false,
        list: false,
        timelines_came: true,
        terminal: Terminal::default(),
    };
    reset_peak()?;
    let before = memory("VmRSS")?;
    let view = fastest(options.rounds, || {
        let mut complaints = Vec::new();
        xpu_timer_viewer::run(&args, &mut std::io::sink(), &mut complaints)?;
        ensure!(complaints.is_empty(), "{}", String::from_utf8_lossy(&complaints));
        Ok(())
    })?;
    let (peak, ratio) = (memory("VmHWM")?, view.as_secs_f64() / read.as_secs_f64());
    let (fast, small) = (ratio <= options.max_ratio, peak <= options.max_memory);
    let mark = |holds| if holds { "ok" } else { "NOT ok" };
    println!(
        "viewing:        {:8.1} ms  ({ratio:.2} x reading, limit {}): {}",
        ms(view),
        options.max_ratio,
        mark(fast)
    );
    println!("peak of memory: {peak:8.1} MiB (limit {}; {before:.1} MiB before): {}", options.max_memory, mark(small));
    for name in ["cpp_stack", "cpp_stack.svg", "py_stack", "py_stack.svg"] {
        let path = dir.join("output").join(name);
        let written = fs::read(&path).with_context(|| path.display().to_string())?;
        let lines = written.iter().filter(|&&b| b == b'\n').count();
        println!("{name:15} {:8.1} KB, {lines} lines", written.len() as f64 / 1e3);
    }
    ensure!(fast, "the viewer takes {ratio:.2} times the reading");
    ensure!(small, "the viewer takes {peak:.1} MiB of memory");
    Ok(())
}

fn merge_trees(options: &TreeOptions) -> anyhow::Result<()> {
    // A few trees repeat with other ranks: building 12,500 trees is not part of the measurement.
    let mut merged = PrefixTree::new();
    let mut spent = Duration::ZERO;
    for node in 0..options.nodes {
        let mut tree = PrefixTree::new();
        for stack in 0..options.stacks {
            // A tenth of the stacks is at one of 7 places, which differs between nodes.
            let place = if stack % 10 == 0 { (node * 31 + stack * 17) % 7 } else { 0 };
            let names: Vec<String> = (0..10)
                .map(|depth| match depth {
                    0..8 => format!("function_{stack}_{depth}@/usr/lib/x86_64-linux-gnu/libwork.so:{depth}"),
                    _ => format!("function_{stack}_{depth}_{place}@/usr/lib/x86_64-linux-gnu/libwork.so:{depth}"),
                })
                .collect();
            for rank in node * 8..node * 8 + 8 {
                tree.insert(names.iter().map(String::as_str), rank);
            }
        }
        let message = tree.to_message();
        let begin = Instant::now();
        merged.merge_message(&message)?;
        spent += begin.elapsed();
    }
    let begin = Instant::now();
    let text = folded(&merged, options.nodes * 8);
    let labels = begin.elapsed();
    let (nodes, frames) = (options.nodes, options.stacks * 10);
    println!("{nodes} trees of {frames} frames, {} ranks: merged in {:.0} ms", nodes * 8, ms(spent));
    println!(
        "{:.1} MB of labels in {} lines written in {:.0} ms",
        text.len() as f64 / 1e6,
        text.lines().count(),
        ms(labels)
    );
    let total = ms(spent + labels);
    let holds = total <= options.max_ms;
    println!("together {total:.0} ms (limit {}): {}", options.max_ms, if holds { "ok" } else { "NOT ok" });
    ensure!(holds, "merging takes {total:.0} ms");
    Ok(())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn fastest(rounds: u32, mut run: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Duration> {
    let mut best = Duration::MAX;
    for _ in 0..rounds.max(1) {
        let begin = Instant::now();
        run()?;
        best = best.min(begin.elapsed());
    }
    Ok(best)
}

fn read_all(dir: &Path, expected: u64) -> anyhow::Result<()> {
    let (mut buffer, mut bytes) = (Vec::new(), 0);
    for entry in fs::read_dir(dir)? {
        buffer.clear();
        bytes += fs::File::open(entry?.path())?.read_to_end(&mut buffer)? as u64;
    }
    ensure!(bytes == expected, "{bytes} bytes read of {expected}");
    Ok(())
}

/// Resets the kernel's record of the peak memory use.
fn reset_peak() -> anyhow::Result<()> {
    fs::write("/proc/self/clear_refs", "5").context("/proc/self/clear_refs")
}

fn memory(field: &str) -> anyhow::Result<f64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line =
        status.lines().find_map(|line| line.strip_prefix(field)).context("no such field in /proc/self/status")?;
    let kilobytes: f64 = line.trim_matches([':', ' ', '\t']).trim_end_matches(" kB").trim().parse()?;
    Ok(kilobytes / 1024.0)
}

/// Frames of a thread, leaf first: function and file.
type Stack = Vec<(String, String)>;

/// Generates a job in which most threads have the same stack on all ranks, and some are at one of a
/// few places.
struct Generator {
    state: u64,
    /// Threads with equal stacks on all ranks.
    same: Vec<Stack>,
    /// Threads that are at one of several places.
    varied: Vec<Vec<Stack>>,
    python: Vec<Vec<Stack>>,
    unique: usize,
}

impl Generator {
    fn new(seed: u64, unique: usize) -> Generator {
        let mut generator = Generator { state: seed, same: vec![], varied: vec![], python: vec![], unique };
        let stack =
            |g: &mut Generator, depth: u64, python: bool| -> Stack { (0..depth).map(|_| g.frame(python)).collect() };
        // The main thread's stack is deep; those of the runtime's many helpers are not.
        for i in 0..100 {
            let depth = if i == 0 { 95 } else { 4 + generator.below(8) };
            let same = stack(&mut generator, depth, false);
            generator.same.push(same);
        }
        for _ in 0..17 {
            let trunk = stack(&mut generator, 8, false);
            let places = 2 + generator.below(5);
            let varied = (0..places)
                .map(|_| {
                    let depth = 1 + generator.below(5);
                    let mut leaf_first = stack(&mut generator, depth, false);
                    leaf_first.extend(trunk.iter().cloned());
                    leaf_first
                })
                .collect();
            generator.varied.push(varied);
        }
        for i in 0..8 {
            let places = if i == 0 { 6 } else { 1 + generator.below(2) };
            let python = (0..places).map(|_| stack(&mut generator, 9, true)).collect();
            generator.python.push(python);
        }
        generator
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn frame(&mut self, python: bool) -> (String, String) {
        let (name, line) = (self.below(4_000), 1 + self.below(3_000));
        if python {
            let file = format!(
                "/opt/conda/lib/python3.11/site-packages/torch/module_{}/layer_{}.py:{line}",
                name % 37,
                name % 211
            );
            return (format!("forward_backward_{name}"), file);
        }
        match self.below(3) {
            0 => (
                format!("c10d::ProcessGroupNCCL::WorkNCCL::step_{name}(std::chrono::duration<long>)"),
                "/opt/conda/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so".into(),
            ),
            1 => (
                format!("_PyEval_EvalFrame_{name}"),
                format!("/usr/local/src/conda/python-3.11.9/Python/ceval_{}.c:{line}", name % 97),
            ),
            _ => (format!("poll_{name}"), "/usr/lib/x86_64-linux-gnu/libc.so.6".into()),
        }
    }

    /// Writes the files, unless the folder already has them. Returns their total size.
    fn write(&mut self, dir: &Path, files: u32) -> anyhow::Result<u64> {
        let world = files.div_ceil(512) * 512;
        // Absent ranks are spread over the job.
        let absent = world - files;
        let every = world.checked_div(absent).unwrap_or(u32::MAX);
        let ranks: Vec<u32> = (0..world).filter(|rank| (rank + 1) % every != 0 || rank / every >= absent).collect();
        fs::create_dir_all(dir)?;
        let mut bytes = 0;
        if fs::read_dir(dir)?.count() == files as usize {
            for entry in fs::read_dir(dir)? {
                bytes += entry?.metadata()?.len();
            }
            return Ok(bytes);
        }
        for &rank in &ranks {
            let path = dir.join(format!("{rank:05}-{world:05}.stacktrace"));
            let dump = self.dump(rank).encode_to_vec();
            bytes += dump.len() as u64;
            fs::write(path, dump)?;
        }
        let present = fs::read_dir(dir)?.count();
        ensure!(present == files as usize, "{} holds {present} files instead of {files}", dir.display());
        Ok(bytes)
    }

    fn dump(&mut self, rank: u32) -> Stacktrace {
        let pid = 10_000 + rank * 13;
        let mut stacktrace: Vec<PstackStacktrace> = Vec::new();
        let mut choices: Vec<Stack> = self.same.clone();
        for i in 0..self.varied.len() {
            let choice = self.below(self.varied[i].len() as u64) as usize;
            choices.push(self.varied[i][choice].clone());
        }
        for i in 0..self.unique {
            choices.push(
                (0..9).map(|frame| (format!("only_here_{rank}_{i}_{frame}"), "/lib/libunique.so".into())).collect(),
            );
        }
        for (i, stack) in choices.into_iter().enumerate() {
            // Addresses differ on each rank, as they do if the loader randomizes them.
            let base = 0x7f00_0000_0000 + (self.next() & 0xff_ffff_f000);
            let frames = stack.into_iter().enumerate().map(|(depth, (func_name, file_name))| PstackFrame {
                origin: format!("#{depth}  0x{:016x} in {func_name} () from {file_name}", base + depth as u64 * 4096),
                func_name,
                file_name,
                ..PstackFrame::default()
            });
            let frames = frames.collect();
            stacktrace.push(PstackStacktrace {
                pid: pid + i as u32,
                thread_name: format!("thread{i}"),
                frames,
                ..PstackStacktrace::default()
            });
        }
        let python = self.python.clone().into_iter().enumerate().map(|(i, places)| {
            let choice = self.below(places.len() as u64) as usize;
            let frames = places[choice].iter().map(|(func_name, file_name)| PySpyFrame {
                func_name: func_name.clone(),
                file_name: file_name.clone(),
                module: String::new(),
            });
            PySpyStacktrace {
                pid,
                thread_id: self.next(),
                thread_name: if i == 0 { "MainThread".into() } else { format!("Thread-{i}") },
                os_thread_id: pid + i as u32,
                frames: frames.collect(),
                ..PySpyStacktrace::default()
            }
        });
        let py_stacktrace = python.collect();
        let process_state = if self.below(50) == 0 { "D (disk sleep)" } else { "S (sleeping)" }.into();
        Stacktrace {
            stacktrace,
            py_stacktrace,
            pid: pid as i32,
            rank: rank as i32,
            process_state,
            ..Stacktrace::default()
        }
    }
}
