//! The few lines that a person reads first: the verdict, who stands where, who is missing, and what was written.

use crate::Screen;
use crate::folder::clean;
use crate::merge::{Group, Merged, Mode};
use crate::stacks::End;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use xpu_timer_analysis::Verdict;
use xpu_timer_analysis::rank_set::RankSet;

/// So many groups are shown; the rest is counted.
const GROUPS_SHOWN: usize = 20;
/// So many runs of a set of ranks are shown; the rest is counted.
const RUNS_SHOWN: usize = 12;

/// So many stacks are shown; the rest is counted.
const STACKS_SHOWN: usize = 40;

/// The verdict of an incident in one sentence, if the folder has one.
pub fn verdict_sentence(folder: &Path) -> Option<String> {
    let from_json = fs::read(folder.join("verdict.json")).ok().and_then(|json| {
        let verdict: Value = serde_json::from_slice(&json).ok()?;
        Some(verdict.get("sentence")?.as_str()?.to_owned())
    });
    let sentence = from_json.or_else(|| {
        // The text is wrapped; its first paragraph is the sentence.
        let text = fs::read_to_string(folder.join("verdict.txt")).ok()?;
        let lines = text.trim_start().lines().take_while(|line| !line.trim().is_empty());
        Some(lines.map(str::trim).collect::<Vec<_>>().join(" "))
    })?;
    Some(clean(&sentence)).filter(|sentence| !sentence.trim().is_empty())
}

/// What the summary is about.
#[derive(Debug, Default)]
pub struct About<'a> {
    /// The folder, when it was chosen among several.
    pub chosen: Option<&'a str>,
    /// Ranks of the job.
    pub world: u32,
    /// The verdict in one sentence.
    pub sentence: Option<&'a str>,
    /// The whole verdict.
    pub verdict: Option<&'a Verdict>,
    /// The ranks that were asked for; all when nobody asked.
    pub asked: Option<&'a RankSet>,
    /// Show the stacks themselves.
    pub stacks: bool,
    /// The files that were written.
    pub written: &'a [PathBuf],
}

impl About<'_> {
    /// Ranks that were asked for and have no dump.
    fn missing(&self, merged: &Merged) -> RankSet {
        let missing = merged.ranks.complement(self.world);
        match self.asked {
            Some(asked) => missing.iter().filter(|&rank| asked.contains(rank)).collect(),
            None => missing,
        }
    }

    /// What the verdict says of processes that are gone: how, and which; with what is known of their end.
    fn gone(&self) -> Vec<(&'static str, RankSet, String)> {
        let mut gone: Vec<(&'static str, RankSet, String)> = Vec::new();
        for group in self.verdict.into_iter().flat_map(|verdict| &verdict.ranks) {
            let how = match group.presence.as_str() {
                "dead" => "Dead",
                "left" => "Left in order",
                _ => continue,
            };
            let ranks: RankSet =
                group.ranks.iter().copied().filter(|&rank| self.asked.is_none_or(|of| of.contains(rank))).collect();
            if !ranks.is_empty() {
                gone.push((how, ranks, clean(&group.errors.join("; "))));
            }
        }
        gone.sort();
        gone
    }
}

/// The summary as text.
pub fn summary(merged: &Merged, about: &About<'_>, screen: Screen) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail, here and below.
    if let Some(sentence) = about.sentence {
        let (bold, plain) = if screen.colour { ("\u{1b}[1m", "\u{1b}[0m") } else { ("", "") };
        let _ = writeln!(text, "{bold}{}{plain}\n", wrapped(sentence, screen.width));
    }
    if let Some(chosen) = about.chosen {
        let _ = writeln!(text, "Latest incident: {chosen}\n");
    }
    let (ranks, groups) = (merged.ranks.len(), merged.groups.len());
    match about.asked {
        Some(asked) => {
            _ = writeln!(text, "{ranks} of the {} ranks asked for have a dump. {}", asked.len(), grouped(merged))
        }
        None => _ = writeln!(text, "{ranks} of {} ranks have a dump. {}", about.world, grouped(merged)),
    }
    for group in merged.groups.iter().take(GROUPS_SHOWN) {
        push_group(&mut text, group);
    }
    if groups > GROUPS_SHOWN {
        let rest: u64 = merged.groups[GROUPS_SHOWN..].iter().map(|group| group.ranks.len()).sum();
        let _ = writeln!(text, "  and {} more groups of {rest} ranks in all", groups - GROUPS_SHOWN);
    }
    let mut first = true;
    let mut line = |text: &mut String, line: String| {
        text.push_str(if std::mem::take(&mut first) { "\n" } else { "" });
        text.push_str(&line);
        text.push('\n');
    };
    for (how, ranks, why) in about.gone() {
        let why = if why.is_empty() { why } else { format!(" ({why})") };
        line(&mut text, format!("{how}: {}{why}", ranks_of(&ranks)));
    }
    let missing = about.missing(merged);
    if !missing.is_empty() {
        line(&mut text, format!("Without a dump: {}", ranks_of(&missing)));
    }
    for (state, ranks) in &merged.states {
        // Running and sleeping are what a process does; the others say something of the hang.
        if !matches!(state.bytes().next(), Some(b'R' | b'S') | None) {
            line(&mut text, format!("State {}: {}", clean(state), ranks_of(ranks)));
        }
    }
    if about.stacks {
        push_stacks(&mut text, merged);
    }
    if !about.written.is_empty() {
        text.push('\n');
    }
    for path in about.written {
        let _ = writeln!(text, "{}", clean(&path.to_string_lossy()));
    }
    text
}

/// The summary as JSON: rank sets as labels write them.
pub fn json(merged: &Merged, about: &About<'_>, folder: &str) -> serde_json::Result<String> {
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
    let gone = about.gone().into_iter();
    let gone: Vec<_> =
        gone.map(|(how, ranks, why)| json!({"how": how, "ranks": ranks.to_string(), "why": why})).collect();
    let mut value = json!({
        "folder": folder,
        "world": about.world,
        "sentence": about.sentence,
        "ranks": merged.ranks.to_string(),
        "missing": about.missing(merged).to_string(),
        "gone": gone,
        "groups": groups,
        "states": states,
        "written": about.written.iter().map(|path| path.to_string_lossy()).collect::<Vec<_>>(),
    });
    if about.stacks {
        let stacks = stacks_of(merged).into_iter();
        value["stacks"] = stacks
            .map(|(mode, ranks, words)| {
                let mode = if mode == Mode::Python { "python" } else { "native" };
                json!({"mode": mode, "ranks": ranks.to_string(), "leaf_first": words})
            })
            .collect();
    }
    Ok(serde_json::to_string_pretty(&value)? + "\n")
}

/// All stacks, those of most ranks first: Python, then native. The words of each are leaf first.
fn stacks_of(merged: &Merged) -> Vec<(Mode, &RankSet, Vec<&str>)> {
    let mut stacks = Vec::new();
    for (mode, tree, ends) in
        [(Mode::Python, &merged.python, &merged.python_ends), (Mode::Native, &merged.native, &merged.native_ends)]
    {
        for end in ends {
            let End::Drawn(end) = *end else { continue };
            let mut words = Vec::new();
            let mut at = Some(end);
            while let Some(id) = at {
                words.push(tree.text(id));
                at = tree.node(id).parent;
            }
            // The state of a process is drawn as a stack of one frame and is no stack.
            if !matches!(words[..], [word] if word.starts_with("State@")) {
                stacks.push((mode, &tree.node(end).ranks, words));
            }
        }
    }
    stacks.sort_by(|a, b| a.0.cmp(&b.0).then_with(|| b.1.len().cmp(&a.1.len())).then_with(|| a.2.cmp(&b.2)));
    stacks
}

fn push_stacks(text: &mut String, merged: &Merged) {
    let stacks = stacks_of(merged);
    for (mode, ranks, words) in stacks.iter().take(STACKS_SHOWN) {
        let kind = if *mode == Mode::Python { "Python" } else { "Native" };
        let _ = writeln!(text, "\n{kind} stack of {}, leaf first", ranks_of(ranks));
        for word in words {
            let _ = writeln!(text, "  {}", shown(word));
        }
    }
    if stacks.len() > STACKS_SHOWN {
        let _ = writeln!(text, "\nand {} more stacks; --json shows all", stacks.len() - STACKS_SHOWN);
    }
}

/// A text in lines that fit, broken at spaces.
fn wrapped(text: &str, width: Option<usize>) -> String {
    let Some(width) = width else { return text.to_owned() };
    let (mut lines, mut used) = (String::new(), 0);
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if used > 0 {
            let fits = used + 1 + length <= width;
            lines.push(if fits { ' ' } else { '\n' });
            used = if fits { used + 1 } else { 0 };
        }
        lines.push_str(word);
        used += length;
    }
    lines
}

fn grouped(merged: &Merged) -> String {
    match merged.groups.len() {
        0 => String::new(),
        1 if merged.ranks.len() == 1 => "It stands here:".to_owned(),
        1 => "Their main threads all stand at one place:".to_owned(),
        n => format!("Their main threads stand at {n} places, the largest group first:"),
    }
}

fn push_group(text: &mut String, group: &Group) {
    let _ = write!(text, "  {}", ranks_of(&group.ranks));
    let Some(place) = &group.place else {
        text.push_str("\n      no stack\n");
        return;
    };
    let kind = if place.mode == Mode::Python { "" } else { " (native)" };
    let _ = write!(text, "\n      at {}{kind}\n", shown(&place.deepest));
    if let Some(own) = place.own.as_ref().filter(|own| **own != place.deepest) {
        let _ = writeln!(text, "      apart from the others since {}", shown(own));
    }
}

/// A word as people write it: `func (file)`.
fn shown(word: &str) -> String {
    // Function names hold `@` now and then (`pthread_cond_wait@@GLIBC_2.3.2`), paths hardly ever.
    match word.rsplit_once('@') {
        Some((func, file)) if !func.is_empty() && !file.is_empty() => format!("{func} ({file})"),
        _ => word.to_owned(),
    }
}

/// Ranks for people: `rank 6`, `ranks 0-2, 5 (4)`; long sets are cut.
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
    use crate::merge::{Merger, Place};

    #[test]
    fn a_terminal_gets_a_sentence_that_stands_out_and_fits() {
        let merged = Merger::default().finish();
        let about = About { sentence: Some("Rank 5 reads a file."), ..About::default() };
        let text = summary(&merged, &about, Screen { width: Some(12), colour: true });
        assert!(text.starts_with("\u{1b}[1mRank 5 reads\na file.\u{1b}[0m\n\n"), "{text:?}");
        assert!(!summary(&merged, &about, Screen::default()).contains('\u{1b}'));
        assert_eq!(wrapped("aaaa b cc", Some(3)), "aaaa\nb\ncc", "a word that is too long stands alone");
    }

    #[test]
    fn ranks_for_people() {
        assert_eq!(ranks_of(&RankSet::from_iter([6])), "rank 6");
        assert_eq!(ranks_of(&RankSet::from_iter([0, 1, 2, 5])), "ranks 0-2, 5 (4)");
        assert_eq!(
            ranks_of(&(0..100).step_by(2).collect()),
            "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, ... (50)"
        );
    }

    #[test]
    fn the_whole_text() {
        let mut merged = Merger::default().finish();
        merged.ranks = (0..7).collect();
        let place = |deepest: &str, own: Option<&str>| {
            Some(Place { mode: Mode::Python, deepest: deepest.into(), own: own.map(Into::into) })
        };
        merged.groups = vec![
            Group { ranks: (0..5).collect(), place: place("wait@w.py:3", Some("step@t.py:9")) },
            Group { ranks: (5..6).collect(), place: place("read@d.py:1", Some("read@d.py:1")) },
            Group { ranks: (6..7).collect(), place: None },
        ];
        merged.states.insert("S (sleeping)".into(), (0..6).collect());
        merged.states.insert("D (disk\u{1b}[1m sleep)".into(), (6..7).collect());
        let text = summary(
            &merged,
            &About { world: 8, sentence: Some("Rank 5 reads."), written: &["/x/cpp_stack".into()], ..About::default() },
            Screen::default(),
        );
        assert_eq!(
            text,
            "Rank 5 reads.\n\n\
             7 of 8 ranks have a dump. Their main threads stand at 3 places, the largest group first:\n  \
               ranks 0-4 (5)\n      at wait (w.py:3)\n      apart from the others since step (t.py:9)\n  \
               rank 5\n      at read (d.py:1)\n  \
               rank 6\n      no stack\n\n\
             Without a dump: rank 7\nState D (disk\u{fffd}[1m sleep): rank 6\n\n/x/cpp_stack\n"
        );
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
