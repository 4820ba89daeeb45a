//! Merges the stacks of all ranks of a job into folded stacks and flame graphs, and prints a short
//! summary of the place of each rank.
//!
//! It reads only a folder of `.stacktrace` files, ours or the original tool's, and runs on any
//! machine. The binary is a thin wrapper around [`run`].
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod absent_ranks;
pub mod dump;
pub mod filter;
pub mod folder;
pub mod incidents;
pub mod merge;
pub mod record;
pub mod report;
pub mod summary;
pub mod timeline;

use anyhow::{Context, bail};
use clap::Parser;
use dump::Dump;
use filter::Filter;
use folder::{DumpFile, Folder, name_of};
use merge::{Merged, Merger};
use report::Report;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
pub use summary::Terminal;
use xpu_timer_analysis::prefix_tree::PrefixTree;
use xpu_timer_proto::{printable, timeline::PENDING};
use xpu_timer_timeline::picture::Picture;
use xpu_timer_timeline::profile::RankSamples;

/// Merges the stacks of all ranks into cpp_stack, py_stack, cpp_stack.svg, py_stack.svg and
/// report.html. Tasks of asyncio and greenlets that wait are in task_stack and task_stack.svg.
///
/// Reads every RANK-WORLD.stacktrace file of a folder. Given a folder of incidents
/// ($XPU_TIMER_TIMELINE_PATH), it takes the latest one. Each frame is labelled
/// func@file:line@HAS|LEAK: HAS lists the ranks that have the frame, LEAK all other ranks.
#[derive(Debug, Clone, Parser)]
#[command(version, after_help = EXIT_CODES)]
pub struct Args {
    /// Folder of .stacktrace files, or folder of incidents
    #[arg(short, long, value_name = "DIR", default_value = "./", allow_hyphen_values = true)]
    pub path: PathBuf,
    /// Folder to write to, created if it does not exist [default: the folder of the .stacktrace
    /// files]
    #[arg(long, value_name = "DIR", allow_hyphen_values = true)]
    pub output: Option<PathBuf>,
    /// Which files to write
    #[command(flatten)]
    pub choice: FileChoice,
    /// Which ranks, threads and stacks to show
    #[command(flatten)]
    pub filter: Filter,
    /// Print the summary, or the list, as JSON
    #[arg(long)]
    pub json: bool,
    /// Only list all incidents of the folder, with their time, cause and verdict
    #[arg(long)]
    pub list: bool,
    /// All timelines of the folder have arrived: the collector draws the report again
    #[arg(long, hide = true)]
    pub timelines_came: bool,
    /// The capabilities of stdout
    #[arg(skip)]
    pub terminal: Terminal,
}

/// Which files are written: all, unless some are chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "Files (all, unless some are chosen)")]
pub struct FileChoice {
    /// Print the summary; write only the files that are chosen
    #[arg(long)]
    pub text: bool,
    /// Write cpp_stack and py_stack, and task_stack if there are tasks or greenlets that wait
    #[arg(long)]
    pub folded: bool,
    /// Write cpp_stack.svg and py_stack.svg, and task_stack.svg if there are any
    #[arg(long)]
    pub svg: bool,
    /// Write report.html
    #[arg(long)]
    pub html: bool,
}

impl FileChoice {
    /// All files if none is chosen. If ranks or threads are filtered, nothing is written unless
    /// chosen: it would replace the files that show the complete folder.
    fn or_all(self, is_unfiltered: bool) -> FileChoice {
        if self == FileChoice::default() && is_unfiltered {
            FileChoice { text: true, folded: true, svg: true, html: true }
        } else {
            self
        }
    }
}

const EXIT_CODES: &str = "Exit codes: 0 if all files are written (stderr names dumps that cannot be read); 1 if there is nothing to draw \
or a file cannot be written; 2 for wrong usage.";

/// Runs the command. The summary goes to `out`, warnings about single files go to `err`.
pub fn run(args: &Args, out: &mut dyn Write, err: &mut dyn Write) -> anyhow::Result<()> {
    if args.list {
        return print_incidents(args, out);
    }
    let mut notes = Vec::new();
    match find_samples(args, &mut notes) {
        Some(recorded) => {
            print_notes(&notes, err);
            record::draw(&recorded, args.output.as_deref().unwrap_or(&args.path), out)
        }
        None => draw_dumps(args, out, err),
    }
}

fn draw_dumps(args: &Args, out: &mut dyn Write, err: &mut dyn Write) -> anyhow::Result<()> {
    let (path, mut listed, chosen) = find_dumps(&args.path)?;
    let mut notes = listed.warnings();
    let misnamed = listed.misnamed.iter().map(|file| name_of(file));
    notes.extend(misnamed.map(|name| format!("{name} is left out: its name is not RANK-WORLD.stacktrace")));
    let choice = args.choice.or_all(args.filter.is_all());
    listed.files.retain(|file| args.filter.includes(file));
    let mut report = choice.html.then(report::Builder::default);
    let mut merged = merge_files_with(
        &listed.files,
        |dump| args.filter.apply(dump),
        |file, dump, merger| {
            if let Some(report) = &mut report {
                report.add(file.rank, dump, merger);
            }
        },
        |file, why| notes.push(format!("{} is left out: {why}", name_of(&file.path))),
    );
    let verdict = report::read_verdict(&path).unwrap_or_else(|why| {
        notes.push(format!("verdict.json is left out: {why}"));
        None
    });
    let (absent, note) = absent_ranks::absent_ranks(&path, verdict.as_ref(), &merged.ranks, listed.world);
    notes.extend(note.into_iter().chain(missing_timelines(args, &path)));
    let shows_operations = !args.json && args.filter.is_all();
    let timelines = timeline::read(&path, verdict.as_ref(), (choice.html, shows_operations), &mut notes);
    let lanes = timelines.as_ref().filter(|_| choice.html);
    let lanes = lanes.and_then(|(job, _)| {
        report::lanes::lanes(job, verdict.as_ref(), timeline::threads(), |rank| {
            xpu_timer_timeline::cli::samples_of(&path, rank)
        })
    });
    print_warnings(&notes, &merged, err);
    ensure_dumps(args, &path, &merged)?;
    let output = args.output.as_deref().unwrap_or(&path);
    let mut written = Vec::new();
    // The folder of a large job contains only some dumps, and the stacks of all ranks as trees.
    let trees = folder::merged_trees(&path).filter(|trees| args.filter.is_all() && trees.ranks() > merged.ranks.len());
    let (native, python, world) = match &trees {
        Some(trees) => (&trees.native, &trees.python, trees.world),
        None => (&merged.native, &merged.python, listed.world),
    };
    let mut result = write_all([native, python, &merged.suspended], world, output, choice, &mut written);
    if let (Ok(()), Some(report)) = (&result, report) {
        let name = path.canonicalize().map_or_else(|_| name_of(&path), |path| name_of(&path));
        let about = report::ReportContext {
            folder: &name,
            world: listed.world,
            verdict: verdict.as_ref(),
            absent: &absent,
            notes,
        };
        let report = Report { lanes, ..report.finish(&about, &mut merged) };
        result = write_report(&report, output).map(|path| written.push(path));
    }
    let (sentence, folder) = (summary::verdict_sentence(&path), shown(&path));
    let operations = timelines.as_ref().and_then(|(job, pair)| Some((job, (*pair)?)));
    let operations = operations.and_then(|(job, pair)| timeline::last_operations(job, pair, args.terminal.width));
    let about = summary::SummaryContext {
        chosen: chosen.then_some(folder.as_str()),
        world: listed.world,
        sentence: sentence.as_deref(),
        verdict: verdict.as_ref(),
        absent: &absent,
        requested: args.filter.rank.as_ref(),
        stacks: !args.filter.is_all(),
        selects_threads: args.filter.selects_threads(),
        operations: operations.as_deref(),
        written: &written,
    };
    let text = if args.json {
        summary::json(&merged, &about, &folder)?
    } else {
        summary::summary(&merged, &about, args.terminal)
    };
    // The summary is useful even if the folder is not writable.
    write_stdout(&text, out).and(result)
}

/// Fails if no dump could be read.
fn ensure_dumps(args: &Args, path: &Path, merged: &Merged) -> anyhow::Result<()> {
    match &args.filter.rank {
        _ if !merged.ranks.is_empty() => Ok(()),
        Some(ranks) => bail!("{} contains no dump of {} that can be read", shown(path), summary::ranks_of(ranks)),
        None => bail!("{} contains no .stacktrace file that can be read", shown(path)),
    }
}

/// Says that timelines are still coming into the folder.
fn missing_timelines(args: &Args, path: &Path) -> Option<String> {
    let are_coming = !args.timelines_came && path.join(PENDING).exists();
    are_coming.then(|| "The timelines of the ranks had not come when this report was drawn.".into())
}

/// Prints the incidents of the folder.
fn print_incidents(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let list = incidents::list(&args.path, args.json, args.terminal);
    let list = list.with_context(|| format!("cannot search {}", shown(&args.path)))?;
    if list.is_empty() {
        bail!("{} contains no incident", shown(&args.path));
    }
    write_stdout(&list, out)
}

/// Prints the notes, and the errors of the captures with their ranks. A closed terminal must not
/// cost the pictures, so errors of writing are ignored.
fn print_warnings(notes: &[String], merged: &Merged, err: &mut dyn Write) {
    print_notes(notes, err);
    for ((field, text), ranks) in &merged.capture_errors {
        let _ = writeln!(err, "{field} of {}:", summary::ranks_of(ranks));
        for line in text.lines() {
            let _ = writeln!(err, "  {}", printable::line(line));
        }
    }
}

fn print_notes(notes: &[String], err: &mut dyn Write) {
    for note in notes {
        let _ = writeln!(err, "warning: {}", printable::line(note));
    }
}

/// The stack samples of the folder, if it has no dumps: those of an incident are beside its dumps.
fn find_samples(args: &Args, notes: &mut Vec<String>) -> Option<Vec<RankSamples>> {
    let listed = Folder::scan(&args.path).ok().filter(|listed| listed.files.is_empty())?;
    let recorded = record::read(&args.path, notes).ok()?;
    (listed.misnamed.is_empty() && !recorded.is_empty()).then_some(recorded)
}

/// Writes to stdout. A reader that closed the pipe early, such as `head`, has seen enough: that is
/// not an error.
fn write_stdout(text: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write the summary"),
    }
}

/// The folder with the dumps, what it contains, and whether it was chosen among several incidents.
fn find_dumps(path: &Path) -> anyhow::Result<(PathBuf, Folder, bool)> {
    let scan = |path: &Path| Folder::scan(path).with_context(|| format!("cannot read the folder {}", shown(path)));
    let listed = scan(path)?;
    if listed.files.is_empty() && listed.misnamed.is_empty() {
        let latest = folder::latest_incident(path).with_context(|| format!("cannot search {}", shown(path)))?;
        match latest {
            Some(incident) => {
                let listed = scan(&incident)?;
                return Ok((incident, listed, true));
            }
            None => bail!("{} contains no .stacktrace file and no incident", shown(path)),
        }
    }
    Ok((path.to_owned(), listed, false))
}

/// Reads and merges files one at a time. A file that cannot be read is passed to `left_out`.
pub fn merge_files(files: &[DumpFile], left_out: impl FnMut(&DumpFile, &dyn std::fmt::Display)) -> Merged {
    merge_files_with(files, |_| {}, |_, _, _| {}, left_out)
}

/// Like [`merge_files`]. `filter` removes unwanted threads from each dump. `on_merged` gets each
/// file right after it was merged, and its decoded part.
pub fn merge_files_with(
    files: &[DumpFile],
    mut filter: impl FnMut(&mut Dump<'_>),
    mut on_merged: impl FnMut(&DumpFile, &Dump<'_>, &mut Merger),
    mut left_out: impl FnMut(&DumpFile, &dyn std::fmt::Display),
) -> Merged {
    let mut merger = Merger::default();
    let mut bytes = Vec::new();
    for file in files {
        if let Err(error) = folder::read_into(&file.path, &mut bytes) {
            left_out(file, &error);
            continue;
        }
        let dump = Dump::decode(&bytes).map(|mut dump| {
            filter(&mut dump);
            merger.add(file.rank, &dump);
            dump
        });
        match dump {
            Ok(dump) => on_merged(file, &dump, &mut merger),
            Err(error) => left_out(file, &error),
        }
    }
    merger.finish()
}

/// The names of the files of each tree, and the titles of their pictures.
const TREES: [(&str, &str); 3] = [
    ("cpp_stack", "merge stack in cpp"),
    ("py_stack", "merge stack in py"),
    ("task_stack", "tasks and greenlets that wait"),
];

/// Writes the chosen folded stacks and pictures, and appends their paths to `written`. The trees
/// are of native stacks, of Python stacks, and of tasks and greenlets. The last one has files only
/// if it has stacks.
pub fn write_all(
    trees: [&PrefixTree; 3],
    world: u32,
    output: &Path,
    choice: FileChoice,
    written: &mut Vec<PathBuf>,
) -> anyhow::Result<()> {
    if choice.folded || choice.svg || choice.html {
        std::fs::create_dir_all(output).with_context(|| format!("cannot create the folder {}", shown(output)))?;
    }
    let failed = |name: &str| format!("cannot write {}; --output chooses another folder", shown(&output.join(name)));
    if !choice.folded && !choice.svg {
        return Ok(());
    }
    for ((name, title), tree) in TREES.into_iter().zip(trees) {
        let svg = format!("{name}.svg");
        if name == TREES[2].0 && tree.nodes().is_empty() {
            // Files of an earlier run would show tasks that no dump has.
            let _ = [name, &svg].map(|file| std::fs::remove_file(output.join(file)));
            continue;
        }
        let picture = Picture::new(tree, world);
        if choice.folded {
            let path = folder::write_file(output, name, |out| out.write_all(picture.folded().as_bytes()));
            written.push(path.with_context(|| failed(name))?);
        }
        if choice.svg {
            let path = folder::write_file(output, &svg, |out| picture.write_svg(title, out));
            written.push(path.with_context(|| failed(&svg))?);
        }
    }
    Ok(())
}

/// Writes `report.html` and returns its path.
pub fn write_report(report: &Report, output: &Path) -> anyhow::Result<PathBuf> {
    let page = report::render(report).context("cannot build report.html")?;
    folder::write_file(output, "report.html", |out| out.write_all(page.as_bytes()))
        .with_context(|| format!("cannot write {}", shown(&output.join("report.html"))))
}

/// A path that is safe to print on a terminal.
fn shown(path: &Path) -> String {
    printable::line(&path.to_string_lossy()).into_owned()
}
