//! The summary that a person reads first: the verdict, the place of each rank, which ranks are
//! missing, and which files were written.

use crate::absent_ranks::AbsentRanks;
use crate::merge::{Group, Merged, Mode, StackEnd, StackId, WaitingRanks};
use serde_json::{Map, Value, json};
use std::cmp::Reverse;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use xpu_timer_analysis::Verdict;
use xpu_timer_analysis::prefix_tree::{NodeId, PrefixTree};
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::printable::{self, line};

/// Number of groups that are shown, besides those with a culprit; the rest is counted.
const GROUPS_SHOWN: usize = 12;
/// Number of lines about absent ranks; the rest is counted.
const ABSENT_SHOWN: usize = 12;
/// Maximum width of prose, even on wider terminals.
const PROSE: usize = 110;
/// Number of runs shown of a set of ranks; the rest is counted.
const RUNS_SHOWN: usize = 12;

/// Number of stacks that are shown; the rest is counted.
const STACKS_SHOWN: usize = 40;

/// Number of lines about tasks and greenlets that wait, and of their stacks below the stack of a
/// thread; the rest is counted.
const WAITING_SHOWN: usize = 8;

/// The capabilities of stdout: its width, and whether it understands colours. The default is plain
/// text of any width.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Terminal {
    /// Columns; `None` for lines of any length.
    pub width: Option<usize>,
    /// Whether the terminal understands escape sequences for colours.
    pub colour: bool,
}

/// The verdict of an incident in one sentence, if the folder has one.
pub fn verdict_sentence(folder: &Path) -> Option<String> {
    let from_json = crate::folder::read(&folder.join("verdict.json")).ok().and_then(|json| {
        let verdict: Value = serde_json::from_slice(&json).ok()?;
        Some(verdict.get("sentence")?.as_str()?.to_owned())
    });
    let sentence = from_json.or_else(|| {
        // The text is wrapped; its first paragraph is the sentence.
        let text = String::from_utf8(crate::folder::read(&folder.join("verdict.txt")).ok()?).ok()?;
        let lines = text.trim_start().lines().take_while(|line| !line.trim().is_empty());
        Some(lines.map(str::trim).collect::<Vec<_>>().join(" "))
    })?;
    Some(line(&sentence).into_owned()).filter(|sentence| !sentence.trim().is_empty())
}

/// The context of a summary, besides the merged dumps.
#[derive(Debug, Default)]
pub struct SummaryContext<'a> {
    /// The folder, if it was chosen among several.
    pub chosen: Option<&'a str>,
    /// Number of ranks in the job.
    pub world: u32,
    /// The verdict in one sentence.
    pub sentence: Option<&'a str>,
    /// The complete verdict.
    pub verdict: Option<&'a Verdict>,
    /// Ranks that have no dump or whose process has ended.
    pub absent: &'a [AbsentRanks],
    /// The requested ranks; `None` for all.
    pub requested: Option<&'a RankSet>,
    /// Whether to show the stacks.
    pub stacks: bool,
    /// Whether only some threads are selected. Main threads are then not summarized.
    pub selects_threads: bool,
    /// The last operations of a culprit and of a peer, if the folder has timelines.
    pub operations: Option<&'a str>,
    /// The files that were written.
    pub written: &'a [PathBuf],
}

impl SummaryContext<'_> {
    /// The part of `ranks` that was requested.
    fn requested_part(&self, ranks: &RankSet) -> RankSet {
        self.requested.map_or_else(|| ranks.clone(), |requested| ranks.intersection(requested))
    }

    /// The requested ranks that are absent.
    fn absent(&self) -> Vec<AbsentRanks> {
        let requested = self
            .absent
            .iter()
            .map(|absent| AbsentRanks { ranks: self.requested_part(&absent.ranks), ..absent.clone() });
        requested.filter(|absent| !absent.ranks.is_empty()).collect()
    }

    /// The place in the program without Python from which a group made its system call, by the
    /// verdict: `serve (server.cpp:44)`.
    fn place_in_program(&self, group: &Group) -> Option<&str> {
        group.place.as_ref().filter(|place| place.mode == Mode::Native)?;
        let first = group.ranks.first()?;
        let of_verdict = self.verdict?.ranks.iter().find(|of_verdict| of_verdict.ranks.contains(&first))?;
        Some(of_verdict.location.native.as_deref()?.split_once(", called from ")?.1)
    }

    fn culprits(&self) -> RankSet {
        self.verdict.map(|verdict| verdict.culprits.iter().copied().collect()).unwrap_or_default()
    }
}

/// The summary as text.
pub fn summary(merged: &Merged, about: &SummaryContext<'_>, terminal: Terminal) -> String {
    let mut text = String::new();
    let (style, culprits) = (TerminalStyle(terminal.colour), about.culprits());
    let prose = terminal.width.map(|width| width.min(PROSE));
    // Writing to a string cannot fail, here and below.
    if let Some(sentence) = about.sentence {
        let _ = writeln!(text, "{}\n", style.bold(&wrapped(sentence, prose)));
    }
    if let Some(verdict) = about.verdict {
        let _ = write!(text, "{}, {} confidence", verdict.cause.name(), verdict.confidence.name());
        if let Some(right) = verdict.right_of_hundred() {
            let _ = write!(text, " (right in about {right} of 100 cases)");
        }
        if !culprits.is_empty() {
            let word = if culprits.len() == 1 { "culprit" } else { "culprits" };
            let _ = write!(text, "; {word}: {}", style.red(&ranks_of(&culprits)));
            text.push_str(&on_nodes(merged, &culprits));
        }
        push_processes(&mut text, verdict);
        text.push_str("\n\n");
    }
    if let Some(chosen) = about.chosen {
        let _ = writeln!(text, "Latest incident: {chosen}\n");
    }
    let ranks = merged.ranks.len();
    let have = if ranks == 1 { "has" } else { "have" };
    let noun = |count: u64| if count == 1 { "rank" } else { "ranks" };
    let head = match about.requested.map(RankSet::len) {
        Some(requested) => format!("{ranks} of the {requested} requested {} {have} a dump.", noun(requested)),
        None => format!("{ranks} of {} {} {have} a dump.", about.world, noun(about.world.into())),
    };
    if about.selects_threads {
        let _ = writeln!(text, "{head}");
    } else {
        let _ = writeln!(text, "{head} {}", grouped(merged));
        push_groups(&mut text, merged, about, terminal);
        if !about.stacks {
            push_waiting(&mut text, merged, &culprits, terminal);
        }
    }
    push_absent(&mut text, merged, &about.absent(), prose);
    if let Some(operations) = about.operations {
        let _ = write!(text, "\n{operations}");
    }
    if about.stacks {
        push_stacks(&mut text, merged, terminal.width);
    }
    if !about.written.is_empty() {
        text.push('\n');
    }
    for path in about.written {
        let _ = writeln!(text, "{}", line(&path.to_string_lossy()));
    }
    text
}

/// Terminal styles, if the terminal supports them.
#[derive(Clone, Copy)]
struct TerminalStyle(bool);

impl TerminalStyle {
    fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    fn red(self, text: &str) -> String {
        self.with("1;31", text)
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.0 { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}

/// Adds the culprits that are not ranks.
fn push_processes(text: &mut String, verdict: &Verdict) {
    for process in verdict.culprit_processes.iter().filter(|process| process.rank.is_none()).take(GROUPS_SHOWN) {
        let node = if process.node.is_empty() { String::new() } else { format!(" on {}", line(&process.node)) };
        let command = if process.command.is_empty() { String::new() } else { format!(": {}", line(&process.command)) };
        let _ = write!(text, "\nculprit: pid {}{node}{command}", process.pid);
    }
}

fn push_groups(text: &mut String, merged: &Merged, about: &SummaryContext<'_>, terminal: Terminal) {
    let (mut left_out, mut of_ranks) = (0, 0);
    let culprits = &about.culprits();
    for (place, group) in merged.groups.iter().enumerate() {
        let culprits_here = group.ranks.intersection(culprits);
        if place >= GROUPS_SHOWN && culprits_here.is_empty() {
            left_out += 1;
            of_ranks += group.ranks.len();
        } else {
            push_group(text, merged, group, &culprits_here, terminal);
            if let Some(place) = about.place_in_program(group) {
                let _ = writeln!(text, "      called from {}", line(place));
            }
        }
    }
    if left_out > 0 {
        let groups = if left_out == 1 { "group" } else { "groups" };
        let ranks = if of_ranks == 1 { "rank" } else { "ranks" };
        let _ = writeln!(text, "  and {left_out} more {groups} with {of_ranks} {ranks}");
    }
}

/// A description of tasks or greenlets that wait, with their ranks.
fn waiting_text(of: &WaitingRanks) -> String {
    line(&of.waiting.describe(&ranks_of(&of.ranks))).into_owned()
}

/// Adds the tasks and greenlets that wait: first those of culprits, then those that wait for no
/// other task.
fn push_waiting(text: &mut String, merged: &Merged, culprits: &RankSet, terminal: Terminal) {
    let mut all: Vec<&WaitingRanks> = merged.waiting.iter().collect();
    let is_culprit = |of: &WaitingRanks| !of.ranks.intersection(culprits).is_empty();
    all.sort_by_key(|of| (!is_culprit(of), of.waiting.awaits_another(), Reverse(of.waiting.count)));
    if !all.is_empty() {
        text.push_str("\nTasks and greenlets that wait:\n");
    }
    for of in all.iter().take(WAITING_SHOWN) {
        let style = TerminalStyle(terminal.colour);
        let description = waiting_text(of);
        let description = if is_culprit(of) { style.red(&description) } else { description };
        let _ = writeln!(text, "  {description} at {}", line(&of.place));
    }
    if all.len() > WAITING_SHOWN {
        let _ = writeln!(text, "  and {} more groups; --json shows all", all.len() - WAITING_SHOWN);
    }
}

/// Adds absent ranks and ranks in an unusual process state.
fn push_absent(text: &mut String, merged: &Merged, absent: &[AbsentRanks], width: Option<usize>) {
    let mut lines: Vec<String> = Vec::new();
    for absent in absent.iter().take(ABSENT_SHOWN) {
        let node = if absent.node.is_empty() { String::new() } else { format!(" on {}", absent.node) };
        let why = if absent.why.is_empty() { String::new() } else { format!(" ({})", absent.why) };
        lines.push(format!("{}: {}{node}{why}", absent.absence.label(), ranks_of(&absent.ranks)));
    }
    if absent.len() > ABSENT_SHOWN {
        let rest: u64 = absent[ABSENT_SHOWN..].iter().map(|absent| absent.ranks.len()).sum();
        lines.push(format!("and {rest} more ranks that ended or have no dump; --json shows all"));
    }
    for (state, ranks) in &merged.states {
        // Running and sleeping are normal; other states are a hint at the cause.
        if !matches!(state.bytes().next(), Some(b'R' | b'S') | None) {
            lines.push(format!("State {}: {}{}", line(state), ranks_of(ranks), on_nodes(merged, ranks)));
        }
    }
    if !lines.is_empty() {
        text.push('\n');
    }
    for line in lines {
        let _ = writeln!(text, "{}", wrapped(&line, width));
    }
}

/// The hosts of some ranks if the job has several: ` on gpu-1, gpu-2`.
fn on_nodes(merged: &Merged, ranks: &RankSet) -> String {
    let theirs = merged.nodes.iter().filter(|(_, of)| !of.intersection(ranks).is_empty());
    let names: Vec<String> = theirs.map(|(name, _)| line(name).into_owned()).collect();
    match names.len() {
        0 => String::new(),
        _ if merged.nodes.len() == 1 => String::new(),
        1..=3 => format!(" on {}", names.join(", ")),
        many => format!(" on {many} nodes"),
    }
}

/// The summary as JSON. Rank sets have the form of labels.
pub fn json(merged: &Merged, about: &SummaryContext<'_>, folder: &str) -> serde_json::Result<String> {
    let place_of = |group: &Group| {
        group.place.as_ref().map(|place| {
            let mode = if place.mode == Mode::Python { "python" } else { "native" };
            json!({"mode": mode, "deepest": place.deepest, "own": place.own})
        })
    };
    let groups = merged.groups.iter();
    let groups: Vec<_> = groups
        .map(|group| json!({"ranks": group.ranks.to_string(), "count": group.ranks.len(), "place": place_of(group)}))
        .collect();
    let states: Map<String, Value> =
        merged.states.iter().map(|(state, ranks)| (state.clone(), ranks.to_string().into())).collect();
    let absent = |absent: &AbsentRanks| json!({"how": absent.absence, "ranks": absent.ranks.to_string(), "node": absent.node, "why": absent.why});
    let absent: Vec<_> = about.absent().iter().map(absent).collect();
    let mut value = json!({
        "folder": folder,
        "world": about.world,
        "sentence": about.sentence,
        "ranks": merged.ranks.to_string(),
        "missing": about.requested_part(&merged.ranks.complement(about.world)).to_string(),
        "absent": absent,
        "groups": groups,
        "states": states,
        "written": about.written.iter().map(|path| path.to_string_lossy()).collect::<Vec<_>>(),
    });
    if about.stacks {
        let stacks = stacks_of(merged).into_iter();
        value["stacks"] = stacks
            .map(|Stack { mode, ranks, names, .. }| {
                let mode = if mode == Mode::Python { "python" } else { "native" };
                json!({"mode": mode, "ranks": ranks.to_string(), "leaf_first": names})
            })
            .collect();
    }
    if !merged.waiting.is_empty() {
        let waiting = merged.waiting.iter();
        value["waiting"] = waiting
            .map(|of| {
                let WaitingRanks { waiting, place, ranks, .. } = of;
                json!({
                    "kind": waiting.kind.noun(), "name": waiting.name(), "count": waiting.count,
                    "awaits": waiting.awaits(), "place": place, "ranks": ranks.to_string(),
                    "leaf_first": suspended_names(merged, of),
                })
            })
            .collect();
    }
    Ok(printable::json(&serde_json::to_string_pretty(&value)?).into_owned() + "\n")
}

/// One stack of a summary.
struct Stack<'a> {
    mode: Mode,
    /// Its number among the stacks of this mode.
    number: usize,
    ranks: &'a RankSet,
    /// Leaf first.
    names: Vec<&'a str>,
}

/// All stacks: Python, then native, those of most ranks first.
fn stacks_of(merged: &Merged) -> Vec<Stack<'_>> {
    let mut stacks = Vec::new();
    for (mode, tree, ends) in
        [(Mode::Python, &merged.python, &merged.python_ends), (Mode::Native, &merged.native, &merged.native_ends)]
    {
        for (number, end) in ends.iter().enumerate() {
            let StackEnd::Drawn(end) = *end else { continue };
            let names = names_of(tree, end);
            // The process state is drawn as a stack of one frame, but it is not a stack.
            if !matches!(names[..], [name] if name.starts_with("State@")) {
                stacks.push(Stack { mode, number, ranks: &tree.node(end).ranks, names });
            }
        }
    }
    stacks.sort_by(|a, b| {
        a.mode.cmp(&b.mode).then_with(|| b.ranks.len().cmp(&a.ranks.len())).then_with(|| a.names.cmp(&b.names))
    });
    stacks
}

/// The names of the stack that ends at a node, leaf first.
fn names_of(tree: &PrefixTree, end: NodeId) -> Vec<&str> {
    let nodes = std::iter::successors(Some(end), |id| tree.node(*id).parent);
    nodes.map(|id| tree.text(id)).collect()
}

/// The names of the stack of tasks or greenlets, leaf first.
fn suspended_names<'a>(merged: &'a Merged, of: &WaitingRanks) -> Vec<&'a str> {
    let StackEnd::Drawn(end) = merged.suspended_ends[of.stack.index()] else { return Vec::new() };
    let mut names = names_of(&merged.suspended, end);
    // The root names what waits.
    names.pop();
    names
}

fn push_stacks(text: &mut String, merged: &Merged, width: Option<usize>) {
    let stacks = stacks_of(merged);
    if stacks.is_empty() && merged.waiting.is_empty() {
        text.push_str("\nNo stack matches --rank, --thread and --grep.\n");
    }
    for Stack { mode, number, ranks, names } in stacks.iter().take(STACKS_SHOWN) {
        let kind = if *mode == Mode::Python { "Python" } else { "Native" };
        push_stack(text, &format!("{kind} stack of {}", ranks_of(ranks)), names, width);
        if *mode == Mode::Python {
            push_waiting_stacks(text, merged, Some(*number), width);
        }
    }
    push_waiting_stacks(text, merged, None, width);
    if stacks.len() > STACKS_SHOWN {
        let _ = writeln!(text, "\nand {} more stacks; --json shows all", stacks.len() - STACKS_SHOWN);
    }
}

fn push_stack(text: &mut String, title: &str, names: &[&str], width: Option<usize>) {
    let _ = writeln!(text, "\n{title}, leaf first");
    for name in names {
        let _ = writeln!(text, "  {}", shown(name, width.map(|width| width.saturating_sub(2))));
    }
}

/// Adds the tasks and greenlets of the threads with a Python stack of this number, or with none.
fn push_waiting_stacks(text: &mut String, merged: &Merged, number: Option<usize>, width: Option<usize>) {
    let of_thread = |of: &&WaitingRanks| of.thread.map(StackId::index) == number;
    let all: Vec<&WaitingRanks> = merged.waiting.iter().filter(of_thread).collect();
    for of in all.iter().take(WAITING_SHOWN) {
        push_stack(text, &waiting_text(of), &suspended_names(merged, of), width);
    }
    if all.len() > WAITING_SHOWN {
        let _ =
            writeln!(text, "\nand {} more groups of tasks or greenlets; --json shows all", all.len() - WAITING_SHOWN);
    }
}

/// Wraps a text at spaces, if there is a width.
pub fn wrapped(text: &str, width: Option<usize>) -> String {
    width.map_or_else(|| text.to_owned(), |width| printable::wrapped(text, width))
}

fn grouped(merged: &Merged) -> String {
    match merged.groups.len() {
        0 => String::new(),
        1 if merged.ranks.len() == 1 => "Its main thread is at:".to_owned(),
        1 => "All their main threads are at one place:".to_owned(),
        n => format!("Their main threads are at {n} places, the largest group first:"),
    }
}

fn push_group(text: &mut String, merged: &Merged, group: &Group, culprits_here: &RankSet, terminal: Terminal) {
    let (style, who) = (TerminalStyle(terminal.colour), ranks_of(&group.ranks));
    let nodes = on_nodes(merged, &group.ranks);
    _ = if culprits_here.is_empty() {
        writeln!(text, "  {}{nodes}", style.bold(&who))
    } else if *culprits_here == group.ranks {
        writeln!(
            text,
            "  {}{nodes}",
            style.red(&format!("{who}: culprit{}", if culprits_here.len() > 1 { "s" } else { "" }))
        )
    } else {
        writeln!(
            text,
            "  {}{nodes}, including {}",
            style.bold(&who),
            style.red(&format!("culprit {}", ranks_of(culprits_here)))
        )
    };
    let Some(place) = &group.place else {
        text.push_str("      no stack\n");
        return;
    };
    let mut push = |before: &str, name: &str, after: &str| {
        let taken = before.chars().count() + after.chars().count();
        let _ =
            writeln!(text, "{before}{}{after}", shown(name, terminal.width.map(|width| width.saturating_sub(taken))));
    };
    push("      at ", &place.deepest, if place.mode == Mode::Python { "" } else { " (native)" });
    if let Some(own) = place.own.as_ref().filter(|own| **own != place.deepest) {
        push("      first frame of this group only: ", own, "");
    }
}

/// The name of a frame as people write it: `func (file)`. If it is too long, the beginning of the
/// path is cut first, then the end of the function.
fn shown(name: &str, width: Option<usize>) -> String {
    // Function names sometimes contain `@` (`pthread_cond_wait@@GLIBC_2.3.2`), paths hardly ever.
    let (func, file) = match name.rsplit_once('@') {
        Some((func, file)) if !func.is_empty() && !file.is_empty() => (func, file),
        _ => (name, ""),
    };
    let count = |text: &str| text.chars().count();
    let last = |text: &str, most: usize| text.chars().skip(count(text).saturating_sub(most)).collect::<String>();
    let around = if file.is_empty() { 0 } else { 3 };
    let width = width.map_or(usize::MAX, |width| width.max(20));
    let name = file.rsplit('/').next().unwrap_or(file);
    let (func, file) = if count(func) + count(file) + around <= width {
        (func.to_owned(), file.to_owned())
    } else {
        // The file name and line are the most useful part.
        let of_file = (count(name) + 2).min(count(file)).min(width / 2);
        let of_func = width.saturating_sub(around + of_file);
        let func = if count(func) > of_func {
            func.chars().take(of_func.saturating_sub(1)).chain(['…']).collect()
        } else {
            func.to_owned()
        };
        let of_file = width.saturating_sub(around + count(&func));
        let file = if count(file) > of_file {
            format!("…{}", last(file, of_file.saturating_sub(1)))
        } else {
            file.to_owned()
        };
        (func, file)
    };
    if around > 0 { format!("{func} ({file})") } else { func }
}

/// Ranks as text: `rank 6`, `ranks 0-2, 5 (4)`. Long sets are cut.
pub fn ranks_of(ranks: &RankSet) -> String {
    if let ([run], 1) = (ranks.runs(), ranks.len()) {
        return format!("rank {}", run.first);
    }
    let mut text = String::from("ranks ");
    for (i, run) in ranks.runs().iter().take(RUNS_SHOWN).enumerate() {
        text.push_str(if i == 0 { "" } else { ", " });
        let _ = write!(text, "{}", run.first);
        if run.last > run.first {
            let _ = write!(text, "-{}", run.last);
        }
    }
    text.push_str(if ranks.runs().len() > RUNS_SHOWN { ", ..." } else { "" });
    let _ = write!(text, " ({})", ranks.len());
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::absent_ranks::Absence;
    use crate::merge::{Merger, StackLocation};
    use std::fs;

    #[test]
    fn a_terminal_gets_a_sentence_that_stands_out_and_fits() {
        let merged = Merger::default().finish();
        let about = SummaryContext { sentence: Some("Rank 5 reads a file."), ..SummaryContext::default() };
        let text = summary(&merged, &about, Terminal { width: Some(12), colour: true });
        assert!(text.starts_with("\u{1b}[1mRank 5 reads\na file.\u{1b}[0m\n\n"), "{text:?}");
        assert!(!summary(&merged, &about, Terminal::default()).contains('\u{1b}'));
        assert_eq!(wrapped("aaaa b cc", Some(3)), "aaaa\nb\ncc", "a word that is too long stands alone");
    }

    #[test]
    fn a_shortened_frame_keeps_the_searched_text() {
        let name = "forward_backward@/data/mcore/Megatron-LM/megatron/core/schedules.py:1467";
        assert_eq!(shown(name, None), "forward_backward (/data/mcore/Megatron-LM/megatron/core/schedules.py:1467)");
        assert_eq!(shown(name, Some(50)), "forward_backward (…egatron/core/schedules.py:1467)");
        assert_eq!(shown(name, Some(40)), "forward_backward (…re/schedules.py:1467)");
        assert_eq!(shown(name, Some(34)), "forward_backw… (…chedules.py:1467)");
        assert_eq!(shown("a_name_without_any_file", Some(20)), "a_name_without_any_…");
        for width in 20..90 {
            for name in
                [name, "f@x", "f", "@", "std::vector<std::pair<int, int>>::push_back@libtorch_cuda_linalg.so", "@/a/b"]
            {
                let text = shown(name, Some(width));
                assert!(text.chars().count() <= width, "{width}: {text}");
            }
        }
    }

    #[test]
    fn ranks_are_listed_as_ranges() {
        assert_eq!(ranks_of(&RankSet::from_iter([6])), "rank 6");
        assert_eq!(ranks_of(&RankSet::from_iter([0, 1, 2, 5])), "ranks 0-2, 5 (4)");
        assert_eq!(
            ranks_of(&(0..100).step_by(2).collect()),
            "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, ... (50)"
        );
    }

    #[test]
    fn the_summary_has_all_sections() {
        let mut merged = Merger::default().finish();
        merged.ranks = (0..7).collect();
        let place = |deepest: &str, own: Option<&str>| {
            Some(StackLocation { mode: Mode::Python, deepest: deepest.into(), own: own.map(Into::into) })
        };
        merged.groups = vec![
            Group { ranks: (0..5).collect(), place: place("wait@w.py:3", Some("step@t.py:9")) },
            Group { ranks: (5..6).collect(), place: place("read@d.py:1", Some("read@d.py:1")) },
            Group { ranks: (6..7).collect(), place: None },
        ];
        merged.states.insert("S (sleeping)".into(), (0..6).collect());
        merged.states.insert("D (disk\u{1b}[1m sleep)".into(), (6..7).collect());
        merged.nodes = [("gpu-0".to_owned(), (0..4).collect()), ("gpu-1".to_owned(), (4..7).collect())].into();
        let verdict = xpu_timer_analysis::judge(&xpu_timer_proto::v1::Evidence::default());
        let verdict = Verdict { culprits: vec![5], probability: Some(0.427), ..verdict };
        let absent = [
            AbsentRanks {
                absence: Absence::Dead,
                ranks: (7..8).collect(),
                node: "gpu-1".into(),
                why: "killed by SIGKILL".into(),
            },
            AbsentRanks { absence: Absence::NoDump, ranks: (8..10).collect(), node: String::new(), why: String::new() },
        ];
        let about = SummaryContext {
            world: 10,
            sentence: Some("Rank 5 reads."),
            verdict: Some(&verdict),
            absent: &absent,
            written: &["/x/cpp_stack".into()],
            ..SummaryContext::default()
        };
        let text = summary(&merged, &about, Terminal::default());
        assert_eq!(
            text,
            "Rank 5 reads.\n\nunknown, low confidence (right in about 42 of 100 cases); culprit: rank 5 on gpu-1\n\n\
             7 of 10 ranks have a dump. Their main threads are at 3 places, the largest group first:\n  \
               ranks 0-4 (5) on gpu-0, gpu-1\n      at wait (w.py:3)\n      first frame of this group only: step (t.py:9)\n  \
               rank 5: culprit on gpu-1\n      at read (d.py:1)\n  \
               rank 6 on gpu-1\n      no stack\n\n\
             Dead: rank 7 on gpu-1 (killed by SIGKILL)\nWithout a dump: ranks 8-9 (2)\n\
             State D (disk\u{fffd}[1m sleep): rank 6 on gpu-1\n\n/x/cpp_stack\n"
        );
        let requested: RankSet = (5..9).collect();
        let text = summary(&merged, &SummaryContext { requested: Some(&requested), ..about }, Terminal::default());
        assert!(text.contains("\nWithout a dump: rank 8\n"), "{text}");
    }

    #[test]
    fn a_group_of_a_program_without_python_shows_its_function() {
        let mut merged = Merger::default().finish();
        merged.ranks = (0..2).collect();
        let deepest = "__libc_recv@recv.c:28".to_owned();
        let place = Some(StackLocation { mode: Mode::Native, deepest, own: None });
        merged.groups = vec![Group { ranks: (0..2).collect(), place }];
        let mut verdict = xpu_timer_analysis::judge(&xpu_timer_proto::v1::Evidence::default());
        let mut ranks = xpu_timer_analysis::RankGroup { ranks: vec![0, 1], ..Default::default() };
        ranks.location.native = Some("recv, called from serve (server.cpp:44)".to_owned());
        verdict.ranks = vec![ranks];
        let about = SummaryContext { verdict: Some(&verdict), ..SummaryContext::default() };
        let text = summary(&merged, &about, Terminal::default());
        let expected = "      at __libc_recv (recv.c:28) (native)\n      called from serve (server.cpp:44)\n";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn the_sentence_is_taken_from_the_json_else_from_the_text() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(verdict_sentence(dir.path()), None);
        fs::write(dir.path().join("verdict.txt"), "Rank 2 stands\nin its loader.\n\nEvidence\n").unwrap();
        assert_eq!(verdict_sentence(dir.path()).as_deref(), Some("Rank 2 stands in its loader."));
        fs::write(dir.path().join("verdict.json"), "{\"sentence\": \"Rank 2.\"}").unwrap();
        assert_eq!(verdict_sentence(dir.path()).as_deref(), Some("Rank 2."));
        fs::write(dir.path().join("verdict.json"), "broken").unwrap();
        assert_eq!(verdict_sentence(dir.path()).as_deref(), Some("Rank 2 stands in its loader."));
    }
}
