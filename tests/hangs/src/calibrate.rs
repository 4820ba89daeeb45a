//! Calibrates the probability of a verdict: the verdicts of first runs, how often each kind of them
//! was right, and how well some programs predict others.
//!
//! A first run is a run of a program that nobody had looked at when the judge of that run was
//! written. Only such verdicts count: a judge is always right about what it was corrected for.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use xpu_timer_analysis::{
    Cause, Confidence, Verdict, VerdictKind,
    calibration::{FIRST_RUNS, HIGH, Tally, confidence, kind_of, probability},
};
use xpu_timer_tests::tree;

use crate::{
    record, scenario,
    variants::{Blame, KnownHang, judge_many},
    written,
};

/// The verdict of the first run of one scenario.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Row {
    scenario: String,
    /// The file of its program, without the ending.
    program: String,
    cause: Cause,
    kind: VerdictKind,
    /// The dump of the first run does not show what a culprit waits for, because the capture could
    /// not see it then. The kind is by the dump of a later run.
    #[serde(default, skip_serializing_if = "is_false")]
    kind_by_later_dump: bool,
    /// The confidence by the rules of the judge alone.
    strength: Confidence,
    trigger: String,
    /// Number of culprits that it named.
    culprits: usize,
    /// It named exactly the right ones, by pid; nobody, if nothing hung.
    right: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// The rows of all first runs.
fn path() -> PathBuf {
    tree().join("tests/hangs/first_runs.jsonl")
}

fn rows() -> Result<Vec<Row>> {
    let text = fs::read_to_string(path()).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).with_context(|| line.to_owned())).collect()
}

/// Adds the verdicts of a first run. A scenario that has a row keeps it, because a later run of it
/// is not a first run.
///
/// # Errors
/// When a folder cannot be read.
pub fn add(output: &Path) -> Result<()> {
    let mut rows: BTreeMap<String, Row> = rows()?.into_iter().map(|row| (row.scenario.clone(), row)).collect();
    let before = rows.len();
    for entry in fs::read_dir(output).with_context(|| output.display().to_string())? {
        let folder = entry?.path();
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if rows.contains_key(&name) || !folder.join("truth.json").exists() {
            continue;
        }
        if let Some(row) = row(&name, &folder).with_context(|| folder.display().to_string())? {
            rows.insert(name, row);
        }
    }
    println!("{} first verdicts, {} of them new", rows.len(), rows.len() - before);
    let lines: Result<Vec<String>, _> = rows.values().map(serde_json::to_string).collect();
    fs::write(path(), lines?.join("\n") + "\n").with_context(|| path().display().to_string())
}

/// The decisive verdict of a program that wrote its truth; `None` without any.
fn row(name: &str, folder: &Path) -> Result<Option<Row>> {
    let truth = written::pids(&folder.join("truth.json"))?;
    let Some(found) = written::decisive_incident(folder, &truth)? else { return Ok(None) };
    let culprits = found.culprits;
    let verdict: Verdict = serde_json::from_value(found.verdict)?;
    let kind = match verdict.kind {
        Some(kind) => kind,
        None => kind_of(&scenario::evidence(&found.folder)?, &verdict),
    };
    Ok(Some(Row {
        scenario: name.to_owned(),
        program: written::program_of(name).to_owned(),
        cause: verdict.cause,
        kind,
        kind_by_later_dump: false,
        strength: verdict.strength.unwrap_or(verdict.confidence),
        trigger: verdict.trigger.kind.clone(),
        culprits: culprits.len(),
        right: culprits == truth,
    }))
}

/// How often each kind was right, in the order of the kinds.
fn tallies<'r>(rows: impl Iterator<Item = &'r Row>) -> Vec<Tally> {
    let mut counts: BTreeMap<(VerdictKind, Confidence), (u32, u32)> = BTreeMap::new();
    for row in rows {
        let count = counts.entry((row.kind, row.strength)).or_default();
        *count = (count.0 + u32::from(row.right), count.1 + 1);
    }
    counts.into_iter().map(|((kind, strength), (right, all))| Tally { kind, strength, right, all }).collect()
}

/// The share of right verdicts that the true one exceeds with a probability of 95 %, if `right` of
/// `all` were right (Clopper and Pearson).
fn at_least(right: u32, all: u32) -> f64 {
    // The probability of at least `right` of `all` rises with the true share.
    let tail = |share: f64| -> f64 {
        (right..=all)
            .map(|count| {
                let ways: f64 = (0..count).map(|index| (f64::from(all - index) / f64::from(count - index)).ln()).sum();
                let rest = all - count;
                let log =
                    f64::from(count) * share.ln() + if rest == 0 { 0.0 } else { f64::from(rest) * (-share).ln_1p() };
                (ways + log).exp()
            })
            .sum()
    };
    let (mut low, mut high) = (0.0, 1.0);
    if right == 0 {
        return 0.0;
    }
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if tail(middle) < 0.05 { low = middle } else { high = middle }
    }
    low
}

/// Prints the table of the kinds.
fn print_kinds(rows: &[Row], tallies: &[Tally]) {
    println!("First verdicts: {}, by kind and by the strength of the evidence", rows.len());
    println!(
        "{:15} {:8} {:>5} {:>4}  {:>11}  {:>19}  may be high",
        "kind", "strength", "right", "all", "probability", "at least (95 % sure)"
    );
    for tally in tallies {
        let Tally { kind, strength, right, all } = *tally;
        let chance = probability(tallies, kind, strength);
        let high = if confidence(tallies, kind, strength) == Confidence::High { "yes" } else { "no" };
        let bound = at_least(right, all);
        println!("{:15} {:8} {right:5} {all:4}  {chance:11.3}  {bound:20.3}  {high}", kind.name(), strength.name());
        let mut causes: BTreeMap<Cause, (u32, u32)> = BTreeMap::new();
        for row in rows.iter().filter(|row| (row.kind, row.strength) == (kind, strength)) {
            let count = causes.entry(row.cause).or_default();
            *count = (count.0 + u32::from(row.right), count.1 + 1);
        }
        let causes: Vec<String> = causes.iter().map(|(cause, (right, all))| format!("{cause} {right}/{all}")).collect();
        println!("    {}", causes.join(", "));
    }
}

/// A verdict that was predicted from the other programs.
struct Prediction {
    chance: f64,
    right: bool,
}

/// Which verdicts are predicted together from all others. Related scenarios are in one fold.
type Fold = fn(&Row) -> &str;

/// The programs of one topology or one way to wait: `servers-pipe`.
fn family(row: &Row) -> &str {
    let mut ends = row.scenario.match_indices('-').map(|(end, _)| end);
    ends.nth(1).map_or(row.scenario.as_str(), |end| &row.scenario[..end])
}

/// All programs in one file, by one author.
fn program(row: &Row) -> &str {
    &row.program
}

/// Predicts the verdicts of each fold from those of all others.
fn held_out(rows: &[Row], fold: Fold) -> Vec<Prediction> {
    let of = |row: &Row| {
        let others = tallies(rows.iter().filter(|other| fold(other) != fold(row)));
        Prediction { chance: probability(&others, row.kind, row.strength), right: row.right }
    };
    rows.iter().map(of).collect()
}

/// The mean squared error of predictions, and the mean of the negative logarithms of what they gave
/// to what happened.
fn scores(predictions: &[Prediction]) -> (f64, f64) {
    let mean =
        |term: &dyn Fn(&Prediction) -> f64| predictions.iter().map(term).sum::<f64>() / predictions.len().max(1) as f64;
    let given = |one: &Prediction| if one.right { one.chance } else { 1.0 - one.chance };
    (mean(&|one| (1.0 - given(one)).powi(2)), mean(&|one| -given(one).max(1e-6).ln()))
}

/// The lower bounds of the rows of the reliability table.
const BINS: [f64; 7] = [0.0, 0.2, 0.4, 0.6, 0.8, 0.95, HIGH];

fn print_reliability(rows: &[Row], what: &str, fold: Fold) {
    let predictions = held_out(rows, fold);
    println!("\nReliability: each {what} predicted from the others");
    println!("{:>12}  {:>8}  {:>9}  {:>8}", "predicted", "verdicts", "mean", "right");
    for (index, low) in BINS.iter().enumerate() {
        let high = BINS.get(index + 1).copied().unwrap_or(1.0);
        let is_last = index + 1 == BINS.len();
        let inside: Vec<&Prediction> =
            predictions.iter().filter(|one| one.chance >= *low && (one.chance < high || is_last)).collect();
        if inside.is_empty() {
            continue;
        }
        let all = inside.len() as f64;
        let mean = inside.iter().map(|one| one.chance).sum::<f64>() / all;
        let right = inside.iter().filter(|one| one.right).count() as f64 / all;
        println!("{low:5.2} - {high:4.2}  {:8}  {mean:9.3}  {right:8.3}", inside.len());
    }
    let share = rows.iter().filter(|row| row.right).count() as f64 / rows.len().max(1) as f64;
    let constant: Vec<Prediction> = rows.iter().map(|row| Prediction { chance: share, right: row.right }).collect();
    let ((brier, log), (brier_constant, log_constant)) = (scores(&predictions), scores(&constant));
    println!(
        "Brier score {brier:.3}, log loss {log:.3}; a constant {share:.2} has {brier_constant:.3} and {log_constant:.3}"
    );
}

/// The evidence of a folder of programs that wrote their truths, with the culprits as pids.
fn of_folder(output: &Path) -> Result<Vec<KnownHang>> {
    let mut hangs = Vec::new();
    for entry in fs::read_dir(output).with_context(|| output.display().to_string())? {
        let folder = entry?.path();
        let (truth, latest) = (folder.join("truth.json"), folder.join("timeline/latest"));
        if !truth.exists() || !latest.exists() {
            continue;
        }
        let evidence = record::condensed(scenario::evidence(&latest)?);
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        hangs.push(KnownHang { name, evidence, blame: Blame::Pids(written::pids(&truth)?) });
    }
    hangs.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(hangs)
}

/// Prints what the probabilities are worth, and judges variants of all recorded evidence and of a
/// folder with runs. Returns whether no verdict with high confidence was wrong.
///
/// # Errors
/// When a file cannot be read.
pub fn run(count: usize, output: Option<&Path>) -> Result<bool> {
    let rows = rows()?;
    let tallies = tallies(rows.iter());
    print_kinds(&rows, &tallies);
    print_reliability(&rows, "family of programs", family);
    print_reliability(&rows, "file of programs", program);
    ensure!(tallies == FIRST_RUNS, "the table of the judge is old: run cargo xtask bless");
    let mut hangs = record::hangs()?;
    hangs.extend(record::programs()?);
    let recorded = hangs.len();
    hangs.extend(output.map(of_folder).transpose()?.unwrap_or_default());
    println!("\nVariants of {recorded} recordings and {} runs", hangs.len() - recorded);
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let judged = judge_many(&hangs, count, jobs);
    println!("{judged}");
    Ok(judged.wrong.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: &str = "    // generated: begin\n";
    const END: &str = "    // generated: end\n";

    #[test]
    fn the_table_of_the_judge_is_that_of_the_first_runs() {
        let path = tree().join("analysis/src/calibration.rs");
        let source = fs::read_to_string(&path).unwrap();
        let (head, rest) = source.split_once(BEGIN).expect("the marker");
        let (_, tail) = rest.split_once(END).expect("the marker");
        let lines: String = tallies(rows().unwrap().iter()).iter().map(|tally| format!("    {tally}\n")).collect();
        let fresh = [head, BEGIN, &lines, END, tail].concat();
        if std::env::var_os("BLESS").is_some() {
            fs::write(&path, &fresh).unwrap();
        }
        assert!(fs::read_to_string(&path).unwrap() == fresh, "{} is old: run cargo xtask bless", path.display());
    }

    #[test]
    fn a_family_is_predicted_from_the_others_better_than_by_a_constant() {
        let rows = rows().unwrap();
        assert!(rows.len() >= 100 && rows.iter().any(|row| row.right) && rows.iter().any(|row| !row.right));
        let predictions = held_out(&rows, family);
        let share = rows.iter().filter(|row| row.right).count() as f64 / rows.len() as f64;
        let constant: Vec<Prediction> = rows.iter().map(|row| Prediction { chance: share, right: row.right }).collect();
        assert!(scores(&predictions).0 < 0.8 * scores(&constant).0, "{:?}", scores(&predictions));
        // What is trusted in 99 of 100 cases was right each time.
        let sure: Vec<&Prediction> = predictions.iter().filter(|one| one.chance >= HIGH).collect();
        assert!(sure.len() >= 20 && sure.iter().all(|one| one.right), "{}", sure.len());
    }

    #[test]
    fn the_lower_bound_is_that_of_the_textbook() {
        for (right, all, bound) in [(30, 30, 0.905), (9, 10, 0.606), (0, 4, 0.0), (1, 1, 0.05)] {
            let found = at_least(right, all);
            assert!((found - bound).abs() < 0.001, "{right} of {all}: {found}");
        }
    }
}
