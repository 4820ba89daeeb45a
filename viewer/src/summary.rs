//! The few lines that a person reads first: the verdict, who stands where, who is missing, and what was written.

use crate::folder::clean;
use crate::merge::{Group, Merged, Mode};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use xpu_timer_analysis::rank_set::RankSet;

/// So many groups are shown; the rest is counted.
const GROUPS_SHOWN: usize = 20;
/// So many runs of a set of ranks are shown; the rest is counted.
const RUNS_SHOWN: usize = 12;

/// The verdict of an incident in one sentence, if the folder has one.
pub fn verdict_sentence(folder: &Path) -> Option<String> {
    let from_json = fs::read(folder.join("verdict.json")).ok().and_then(|json| {
        let verdict: serde_json::Value = serde_json::from_slice(&json).ok()?;
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

/// The summary.
pub fn summary(merged: &Merged, world: u32, sentence: Option<&str>, written: &[PathBuf]) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail, here and below.
    if let Some(sentence) = sentence {
        let _ = writeln!(text, "{sentence}\n");
    }
    let (ranks, groups) = (merged.ranks.len(), merged.groups.len());
    let _ = writeln!(text, "{} of {world} ranks have a dump. {}", ranks, grouped(merged));
    for group in merged.groups.iter().take(GROUPS_SHOWN) {
        push_group(&mut text, group);
    }
    if groups > GROUPS_SHOWN {
        let rest: u64 = merged.groups[GROUPS_SHOWN..].iter().map(|group| group.ranks.len()).sum();
        let _ = writeln!(text, "  and {} more groups of {rest} ranks in all", groups - GROUPS_SHOWN);
    }
    let missing = merged.ranks.complement(world);
    if !missing.is_empty() {
        let _ = writeln!(text, "\nWithout a dump: {}", ranks_of(&missing));
    }
    let mut first = missing.is_empty();
    for (state, ranks) in &merged.states {
        // Running and sleeping are what a process does; the others say something of the hang.
        if !matches!(state.bytes().next(), Some(b'R' | b'S') | None) {
            text.push_str(if first { "\n" } else { "" });
            first = false;
            let _ = writeln!(text, "State {}: {}", clean(state), ranks_of(ranks));
        }
    }
    if !written.is_empty() {
        text.push('\n');
    }
    for path in written {
        let _ = writeln!(text, "{}", clean(&path.to_string_lossy()));
    }
    text
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
        let text = summary(&merged, 8, Some("Rank 5 reads."), &["/x/cpp_stack".into()]);
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
