//! The benchmark of the capture: sets everything up, runs all parts, prints the table.

use std::{process::Command, time::Duration};

use anyhow::{Context, Result};
use xpu_timer_capture::{Capturer, Options as CaptureOptions};
use xpu_timer_tests::{forky, forky_with_torch, python, python_version, tree};

use crate::{
    agreement::{self, Score},
    churn::{self, Language},
    other_tools::{self, Order, Tools, wall},
    report::{Contender, Report, alternate, median, ms, ratio, time},
    stops::{self, PtraceLog},
    targets::{Python, Target},
};

/// Options of the benchmark.
#[derive(clap::Args)]
pub struct Options {
    /// Only these parts
    #[arg(long, value_enum, value_delimiter = ',')]
    parts: Vec<Part>,
    /// Repetitions of each measurement; the slow tools on eight ranks run a third as often
    #[arg(long, default_value = "9")]
    repetitions: usize,
    /// Captures under thread churn
    #[arg(long, default_value = "1000")]
    captures: usize,
    /// Write the table into docs/benchmarks.md
    #[arg(long)]
    write: bool,
}

/// The parts of the benchmark.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Artificial ranks with 100 threads
    Artificial,
    /// A hung job on the torch of this machine's Debian
    Torch,
    /// A hung job on the current torch of Debian forky
    TorchForky,
    /// Python frames of every CPython version, against py-spy
    Pythons,
    /// Captures while threads start and end
    Churn,
    /// Stacks over time, against py-spy record
    Record,
}

const PARTS: [Part; 6] = [Part::Artificial, Part::Torch, Part::TorchForky, Part::Pythons, Part::Churn, Part::Record];
const NODE: usize = 8;
const MB: f64 = 1e6;

/// Runs the benchmark. Returns whether all limits hold.
pub fn run(options: &Options) -> Result<bool> {
    let parts = if options.parts.is_empty() { &PARTS[..] } else { &options.parts[..] };
    let tools = Tools::set_up()?;
    let mut report = Report::of_this_machine()?;
    report.note("compared with", tools.versions());
    for part in parts {
        let title = match part {
            Part::Artificial => "Artificial rank: 100 threads, 64 of them Python with deep stacks",
            Part::Torch => "Hung 2-rank torch gloo job (Debian bookworm)",
            Part::TorchForky => "Hung 2-rank torch gloo job (Debian forky)",
            Part::Pythons => "Python frames against py-spy",
            Part::Churn => "Thread churn",
            Part::Record => "Recording of 8 ranks of 25 threads, 50 samples a second",
        };
        report.section(title);
        let done = match part {
            Part::Artificial => {
                let python = python();
                let start = |ranks| Target::artificial(Python::Host(&python), ranks);
                start(1)
                    .and_then(|target| one_rank(&mut report, &tools, options, target))
                    .and_then(|()| node(&mut report, &tools, options, &start(NODE)?))
            }
            Part::Torch => {
                let start = |world| Target::torch(Python::Host(&tools.torch_python), world);
                torch(&mut report, &tools, options, start)
            }
            Part::TorchForky => forky_with_torch().and_then(|root| {
                let python = Python::Forky { root: &root, program: "python3" };
                torch(&mut report, &tools, options, |world| Target::torch(python, world))
            }),
            Part::Pythons => pythons(&mut report, &tools),
            Part::Churn => churn(&mut report, options),
            Part::Record => agreement::record(&mut report, &tools, &python()),
        };
        if let Err(error) = done {
            report.failed(title, &error);
        }
    }
    if options.write {
        report.write(&tree().join("docs/benchmarks.md"), "## Stack capture")?;
    }
    Ok(report.all_hold())
}

fn torch(report: &mut Report, tools: &Tools, options: &Options, start: impl Fn(usize) -> Result<Target>) -> Result<()> {
    one_rank(report, tools, options, start(2)?)?;
    node(report, tools, options, &start(NODE)?)
}

/// Measurements on single ranks.
fn one_rank(report: &mut Report, tools: &Tools, options: &Options, mut target: Target) -> Result<()> {
    report.note("threads of all ranks", target.threads().to_string());
    let pids = target.pids.clone();
    let one = pids[..1].to_vec();
    let pid = one[0];
    let [gdb, py_spy, eu_stack, pystack] =
        [other_tools::gdb, other_tools::py_spy, other_tools::eu_stack, other_tools::pystack]
            .map(|tool| move |pid| tool(tools, pid));
    let dump = |pid: i32| stops::dump(tools, &[pid]);
    let wall_one = |commands: &[&(dyn Fn(i32) -> Command + Sync)]| wall(&one, Order::Sequential, commands);
    let mut warm = Capturer::new();
    warm.capture(&one, &CaptureOptions::default());
    let mut contenders: Vec<Contender<'_>> = vec![
        ("xpu_timer_dump", Box::new(|| wall_one(&[&dump]))),
        ("in process, cold", Box::new(|| Ok(time(|| Capturer::new().capture(&one, &CaptureOptions::default())).0))),
        ("in process, warm", Box::new(|| Ok(time(|| warm.capture(&one, &CaptureOptions::default())).0))),
        ("gdb + 2 x py-spy", Box::new(|| wall_one(&[&gdb, &py_spy, &py_spy]))),
        ("eu-stack + py-spy", Box::new(|| wall_one(&[&eu_stack, &py_spy]))),
    ];
    // It is shown only for comparison, and cannot inspect every target.
    match other_tools::run_quiet(&mut pystack(pid)) {
        Ok(()) => contenders.push(("pystack --native-all", Box::new(|| wall_one(&[&pystack])))),
        Err(_) => report.note("wall of one rank: pystack --native-all", "fails"),
    }
    let times = alternate(options.repetitions, &mut contenders)?;
    let names: Vec<&str> = contenders.iter().map(|(name, _)| *name).collect();
    drop(contenders);
    for (name, time) in names.iter().zip(&times) {
        if *name == "in process, warm" {
            report.check(
                &format!("wall of one rank: {name}"),
                ms(*time),
                "at most 50 ms",
                *time <= Duration::from_millis(50),
            );
        } else {
            report.note(&format!("wall of one rank: {name}"), ms(*time));
        }
    }
    ratios(report, "one rank", times[0], times[3], times[4], (50.0, 4.0));
    agree(report, tools, &pids)?;
    stop_times(report, tools, options, pid, &mut target)
}

fn ratios(report: &mut Report, what: &str, ours: Duration, gdb: Duration, eu: Duration, limits: (f64, f64)) {
    for (name, theirs, limit) in [("gdb + 2 x py-spy", gdb, limits.0), ("eu-stack + py-spy", eu, limits.1)] {
        let ratio = ratio(theirs, ours);
        let what = format!("{what}: times as fast as {name}");
        report.check(&what, format!("{ratio:.1} x"), &format!("at least {limit} x"), ratio >= limit);
    }
}

fn agree(report: &mut Report, tools: &Tools, pids: &[i32]) -> Result<()> {
    let captured = Capturer::new().capture(pids, &CaptureOptions::default());
    let (mut native, mut python) = (Score::default(), Score::default());
    for process in &captured {
        native.add(agreement::native(tools, process)?);
        python.add(agreement::python(tools, process)?);
    }
    let whole = native.percent();
    let what = format!("threads with the pcs of eu-stack (which gave up on {})", native.gave_up);
    report.check(&what, format!("{} of {}", native.same, native.of), "at least 99 %", whole >= 99.0);
    let what = "Python threads with the frames of py-spy";
    report.check(what, format!("{} of {}", python.same, python.of), "all", python.same == python.of && python.of > 0);
    for (what, score) in [("eu-stack", native), ("py-spy", python)] {
        if let Some(example) = score.example {
            report.note(&format!("first difference from {what}: {example}"), "");
        }
    }
    Ok(())
}

fn stop_times(report: &mut Report, tools: &Tools, options: &Options, pid: i32, target: &mut Target) -> Result<()> {
    let log = PtraceLog::build()?;
    let repetitions = options.repetitions.max(5);
    let measure = |force: bool| -> Result<(Duration, Duration, usize)> {
        let runs: Vec<stops::Stops> = (0..repetitions).map(|_| log.dump(tools, pid, force)).collect::<Result<_>>()?;
        let union = median(runs.iter().map(|run| run.union_ns).collect());
        let longest = median(runs.iter().map(|run| run.longest_ns).collect());
        let count = median(runs.iter().map(|run| run.count).collect());
        Ok((Duration::from_nanos(union), Duration::from_nanos(longest), count))
    };
    let (union, longest, count) = measure(false)?;
    let limit = Duration::from_millis(1);
    report.check(&format!("any thread stopped (ptrace log; {count} threads)"), ms(union), "below 1 ms", union < limit);
    let limit = Duration::from_micros(200);
    report.check("longest stop of one thread (ptrace log)", ms(longest), "below 0.2 ms", longest < limit);
    let (union, longest, count) = measure(true)?;
    let limit = Duration::from_millis(2);
    report.check(
        &format!("all {count} threads through ptrace: any thread stopped"),
        ms(union),
        "below 2 ms",
        union < limit,
    );
    report.note("all threads through ptrace: longest stop of one thread", ms(longest));
    if let Some(spinner) = target.spinner() {
        let gaps = stops::gaps(spinner, pid, repetitions)?;
        report.note("a spinning thread's longest gap without a capture", ms(gaps.quiet));
        // A witness that detects nothing proves nothing.
        report.check(
            "a spinning thread's longest gap when it is held for 1 ms",
            ms(gaps.held),
            "at least 1 ms",
            gaps.held >= stops::HELD,
        );
        let added = gaps.captured.saturating_sub(gaps.quiet);
        let limit = Duration::from_micros(200);
        report.check("a spinning thread's longest gap with a capture", ms(gaps.captured), "0.2 ms more", added < limit);
        report.check(
            "a spinning thread's stop as the engine tells it",
            ms(gaps.engine),
            "below 0.2 ms",
            gaps.engine < limit,
        );
    }
    Ok(())
}

/// Measurements on the eight ranks of a node.
fn node(report: &mut Report, tools: &Tools, options: &Options, target: &Target) -> Result<()> {
    let pids = &target.pids;
    let [gdb, py_spy, eu_stack] =
        [other_tools::gdb, other_tools::py_spy, other_tools::eu_stack].map(|tool| move |pid| tool(tools, pid));
    let mut warm = Capturer::new();
    warm.capture(pids, &CaptureOptions::default());
    let dump = || other_tools::run_quiet(&mut stops::dump(tools, pids));
    let repetitions = options.repetitions.div_ceil(3);
    // The order matters: ours runs between any two of theirs, as often as all of theirs together.
    let mut contenders: Vec<Contender<'_>> = vec![
        (
            "xpu_timer_dump",
            Box::new(|| {
                let (wall, done) = time(dump);
                done.map(|()| wall)
            }),
        ),
        ("gdb + 2 x py-spy, rank by rank", Box::new(|| wall(pids, Order::Sequential, &[&gdb, &py_spy, &py_spy]))),
        ("in process, warm", Box::new(|| Ok(time(|| warm.capture(pids, &CaptureOptions::default())).0))),
        ("gdb + 2 x py-spy, all ranks at once", Box::new(|| wall(pids, Order::Parallel, &[&gdb, &py_spy, &py_spy]))),
        ("eu-stack + py-spy, rank by rank", Box::new(|| wall(pids, Order::Sequential, &[&eu_stack, &py_spy]))),
        ("eu-stack + py-spy, all ranks at once", Box::new(|| wall(pids, Order::Parallel, &[&eu_stack, &py_spy]))),
    ];
    let times = alternate(repetitions, &mut contenders)?;
    let names: Vec<&str> = contenders.iter().map(|(name, _)| *name).collect();
    drop(contenders);
    report.note("threads of eight ranks", target.threads().to_string());
    for (name, time) in names.iter().zip(&times) {
        report.note(&format!("wall of eight ranks: {name}"), ms(*time));
    }
    ratios(report, "eight ranks", times[0], times[1], times[4], (150.0, 20.0));
    let at_once = (ratio(times[3], times[0]), ratio(times[5], times[0]));
    report.note(
        "eight ranks: against the others at once (gdb, eu-stack)",
        format!("{:.1} x, {:.1} x", at_once.0, at_once.1),
    );
    let peaks = (0..repetitions).map(|_| stops::peak_memory(&stops::dump(tools, pids))).collect::<Result<Vec<_>>>()?;
    let peak = peaks.into_iter().max().context("no repetition")? as f64 / MB;
    report.check("peak memory of xpu_timer_dump on eight ranks", format!("{peak:.0} MB"), "below 100 MB", peak < 100.0);
    Ok(())
}

/// The versions of CPython that the capture knows, each with the deep stacks of the artificial
/// rank.
fn pythons(report: &mut Report, tools: &Tools) -> Result<()> {
    for version in ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15"] {
        let name = format!("CPython {version}");
        let host = python_version(version);
        let program = format!("python{version}");
        let start = || match &host {
            Some(python) => Target::artificial(Python::Host(python), 1),
            None => Target::artificial(Python::Forky { root: &forky()?, program: &program }, 1),
        };
        if let Err(error) = start().and_then(|target| agree_python(report, tools, &name, &target)) {
            report.failed(&name, &error);
        }
    }
    Ok(())
}

fn agree_python(report: &mut Report, tools: &Tools, name: &str, target: &Target) -> Result<()> {
    let captured = Capturer::new().capture(&target.pids, &CaptureOptions::default());
    let process = captured.first().context("no answer")?;
    let (python, native) = (agreement::python(tools, process)?, agreement::native(tools, process)?);
    let holds = python.same == python.of && python.of > 0;
    report.check(&format!("{name}: Python threads"), format!("{} of {}", python.same, python.of), "all", holds);
    let figure = format!("{} of {}", native.same, native.of);
    report.check(&format!("{name}: native threads"), figure, "at least 99 %", native.percent() >= 99.0);
    for example in [python.example, native.example].into_iter().flatten() {
        report.note(&format!("first difference: {example}"), "");
    }
    Ok(())
}

fn churn(report: &mut Report, options: &Options) -> Result<()> {
    for (language, name) in [(Language::C, "C"), (Language::Python, "Python")] {
        let outcome = churn::run(language, options.captures)?;
        let what = format!("{name}: wrong stacks in {} captures ({} right)", outcome.captures, outcome.right);
        report.check(&what, outcome.wrong.to_string(), "none", outcome.wrong == 0);
        if let Some(example) = outcome.first_wrong {
            report.note(&format!("first wrong stack: {example}"), "");
        }
        let incomplete: usize = outcome.incomplete.values().sum();
        let share = 100.0 - 100.0 * incomplete as f64 / outcome.expected.max(1) as f64;
        let what = format!("{name}: whole stacks of threads that lived all the time");
        // A capture that takes nothing must not pass for one without errors.
        report.check(&what, format!("{share:.2} %"), "at least 95 %", outcome.expected > 0 && share >= 95.0);
        for (reason, count) in outcome.incomplete {
            report.note(&format!("incomplete: {reason}"), count.to_string());
        }
    }
    Ok(())
}
