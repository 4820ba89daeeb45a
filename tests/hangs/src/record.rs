//! The evidence of every scenario as a small file, so that the judge can be tested without
//! processes.
//!
//! A file contains the condensed evidence: host facts in place of stacks, and the newest operations
//! of each flight record. All files are in one archive.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use xpu_timer_analysis::{condense, condense_process};
use xpu_timer_proto::{Message, v1::Evidence};
use xpu_timer_tests::{read_archive, tree, write_archive};

use crate::{
    corpus,
    scenario::{self, Expected, Scenario, Truth},
    score::Reported,
    variants::{Blame, KnownHang},
    written::{self, Written},
};

/// Number of completed operations of each rank that are kept.
const OPERATIONS: usize = 96;

/// The archive with the recorded evidence of all scenarios, one file each. The truth of a program
/// that wrote it when it ran is a second file.
fn archive() -> PathBuf {
    tree().join("tests/hangs/recorded.zip")
}

/// The endings of the names of these files.
const EVIDENCE: &str = ".pb";
const TRUTH: &str = ".json";

/// Evidence with facts in place of stacks, and with the newest operations of each flight record.
pub fn condensed(evidence: Evidence) -> Evidence {
    let ranks = evidence.ranks.iter().map(|rank| condense(rank, OPERATIONS)).collect();
    let processes = evidence.processes.iter().map(condense_process).collect();
    Evidence { ranks, processes, ..evidence }
}

/// Records the evidence of an earlier run's folders for the hangs among these scenarios. Other
/// scenarios keep theirs, and so does a program whose verdict was not right.
///
/// # Errors
/// When a file cannot be read or written.
pub fn write(scenarios: &[Scenario], output: &Path) -> Result<()> {
    let mut files = if archive().exists() { read_archive(&archive())? } else { BTreeMap::new() };
    for scenario in scenarios {
        let name = &scenario.name;
        let folder = match scenario.truth {
            Truth::Hang { .. } => scenario.incident(output),
            Truth::Written(Expected::Hang) => {
                let run = output.join(name);
                let text = std::fs::read(run.join("truth.json")).with_context(|| name.clone())?;
                let truth = written::parse(&text)?;
                let found = written::decisive_incident(&run, &truth.culprits)?;
                let Some(found) = found.filter(|found| is_right(&truth, found)) else {
                    println!("{name} is not recorded, because its verdict was not right");
                    continue;
                };
                files.insert(format!("{name}{TRUTH}"), text);
                found.folder
            }
            _ => continue,
        };
        files.insert(format!("{name}{EVIDENCE}"), condensed(scenario::evidence(&folder)?).encode_to_vec());
    }
    write_archive(&archive(), &files)
}

fn is_right(truth: &Written, found: &written::Decisive) -> bool {
    let cause = Reported::of(&found.verdict).map(|reported| reported.cause).unwrap_or_default();
    found.culprits == truth.culprits && truth.causes.iter().any(|accepted| accepted.name() == cause)
}

/// All hangs of the corpus with their recorded evidence.
fn recorded() -> Result<Vec<(Scenario, Evidence)>> {
    let mut files = read_archive(&archive())?;
    let hangs = corpus::matching(None)?.into_iter().filter(Scenario::hangs);
    let with_evidence = |scenario: Scenario| {
        let file = files.remove(&format!("{}{EVIDENCE}", scenario.name));
        let bytes = file.with_context(|| format!("{} is not recorded", scenario.name))?;
        Ok((scenario, Evidence::decode(&bytes[..])?))
    };
    hangs.map(with_evidence).collect()
}

/// All recorded programs that wrote their truths, with their names.
fn recorded_programs() -> Result<Vec<(String, Written, Evidence)>> {
    let files = read_archive(&archive())?;
    let truths = files.iter().filter_map(|(name, text)| Some((name.strip_suffix(TRUTH)?, text)));
    let with_evidence = |(name, text): (&str, &Vec<u8>)| {
        let bytes = files.get(&format!("{name}{EVIDENCE}")).with_context(|| name.to_owned())?;
        Ok((name.to_owned(), written::parse(text)?, Evidence::decode(&bytes[..])?))
    };
    truths.map(with_evidence).collect()
}

/// All recorded hangs, to judge variants of them.
///
/// # Errors
/// When the archive cannot be read.
pub fn hangs() -> Result<Vec<KnownHang>> {
    let known = |(scenario, evidence): (Scenario, Evidence)| match scenario.truth {
        Truth::Hang { culprits, .. } => {
            Some(KnownHang { name: scenario.name, evidence, blame: Blame::Ranks(culprits) })
        }
        _ => None,
    };
    Ok(recorded()?.into_iter().filter_map(known).collect())
}

/// All recorded programs that wrote their truths, to judge variants of them.
///
/// # Errors
/// When the archive cannot be read.
pub fn programs() -> Result<Vec<KnownHang>> {
    let known = |(name, truth, evidence): (String, Written, Evidence)| KnownHang {
        name,
        evidence,
        blame: Blame::Pids(truth.culprits),
    };
    Ok(recorded_programs()?.into_iter().map(known).collect())
}

#[cfg(test)]
mod tests {
    use xpu_timer_analysis::{Cause, HangEvidence, judge};
    use xpu_timer_proto::server::Library;

    use super::*;
    use crate::variants::{DAMAGES, Numbers, judge_many};

    /// Maximum length of a sentence. Longer ones repeat something.
    const MOST_LETTERS: usize = 360;

    /// Number of variants of each recorded job.
    const VARIANTS: usize = 24;

    fn recorded() -> Vec<(Scenario, Evidence)> {
        let recorded = super::recorded().expect("recorded evidence");
        assert!(recorded.len() >= 60, "the corpus has at least 60 hangs");
        recorded
    }

    fn reported(evidence: &Evidence) -> Reported {
        Reported::of(&serde_json::to_value(judge(evidence)).expect("a verdict is JSON"))
            .expect("a verdict has all fields")
    }

    #[test]
    fn a_sentence_can_be_read_at_once() {
        let mut long: Vec<String> = recorded()
            .into_iter()
            .map(|(scenario, evidence)| (scenario.name, reported(&evidence).sentence))
            // A verdict with two causes has two sentences.
            .filter(|(_, sentence)| sentence.split("; also ").any(|part| part.chars().count() > MOST_LETTERS))
            .map(|(name, sentence)| format!("{} {name}: {sentence}", sentence.chars().count()))
            .collect();
        long.sort();
        assert!(long.is_empty(), "{} sentences are too long:\n{}", long.len(), long.join("\n"));
    }

    /// Whether the hang is not proven: the ranks move, or may be idle. `XPU_TIMER_HANG_KILL` does
    /// not end them.
    fn may_be_healthy(scenario: &Scenario, cause: Cause) -> bool {
        // Nothing is pending, and no rank waits for another: a server that reads its requests looks
        // the same.
        const WAITS_FOR_INPUT: [&str; 2] = ["end-fifo", "plain-all-read"];
        matches!(cause, Cause::LongStep | Cause::Compile | Cause::PythonGc | Cause::NotAHang | Cause::Unknown)
            || WAITS_FOR_INPUT.contains(&scenario.name.as_str())
    }

    #[test]
    fn every_recorded_hang_has_evidence_of_a_hang_unless_it_moves_or_is_idle() {
        let without: Vec<String> = recorded()
            .into_iter()
            .map(|(scenario, evidence)| (scenario, judge(&evidence)))
            .filter(|(scenario, verdict)| {
                verdict.hang == HangEvidence::None && !may_be_healthy(scenario, verdict.cause)
            })
            .map(|(scenario, verdict)| format!("{}: {}: {}", scenario.name, verdict.cause, verdict.sentence))
            .collect();
        assert!(without.is_empty(), "{} of them:\n{}", without.len(), without.join("\n"));
    }

    #[test]
    fn every_recorded_hang_is_judged_right() {
        let mut wrong = Vec::new();
        for (scenario, evidence) in recorded() {
            let Truth::Hang { causes, culprits } = &scenario.truth else { continue };
            let reported = reported(&evidence);
            if reported.culprits != *culprits || !causes.contains(&reported.cause.as_str()) {
                wrong.push(format!(
                    "{}: {} {:?}: {}",
                    scenario.name, reported.cause, reported.culprits, reported.sentence
                ));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn every_recorded_program_is_judged_right() {
        let programs = recorded_programs().expect("recorded evidence");
        assert!(programs.len() >= 30, "{} programs are recorded", programs.len());
        let mut wrong = Vec::new();
        for (name, truth, evidence) in programs {
            let verdict = judge(&evidence);
            let value = serde_json::to_value(&verdict).expect("a verdict is JSON");
            let reported = Reported::of_processes(&value).expect("a verdict has all fields");
            let is_hang = verdict.hang != HangEvidence::None;
            if reported.culprits != truth.culprits || !truth.causes.contains(&verdict.cause) || !is_hang {
                wrong.push(format!("{name}: {} {:?}: {}", verdict.cause, reported.culprits, reported.sentence));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn no_recorded_hang_is_a_known_defect_whatever_versions_are_loaded() {
        // A version that is affected by each defect that the records alone can show.
        const LOADED: [(&str, &str); 4] =
            [("NCCL", "2.7.8"), ("NCCL", "2.12.12"), ("NCCL", "2.18.1"), ("NVIDIA driver", "560.35.03")];
        let mut found = Vec::new();
        for (scenario, evidence) in recorded() {
            for (name, version) in LOADED {
                let mut other = evidence.clone();
                for host in other.ranks.iter_mut().filter_map(|rank| rank.host.as_mut()) {
                    host.libraries = vec![Library { name: name.into(), version: version.into() }];
                }
                for defect in judge(&other).known_defects {
                    found.push(format!("{} with {name} {version}: {}", scenario.name, defect.text));
                }
            }
        }
        assert!(found.is_empty(), "{}", found.join("\n"));
    }

    /// Damages that do not change the evidence for a culprit.
    const HARMLESS: usize = 2;

    #[test]
    fn whatever_is_missing_nobody_is_accused_wrongly_with_high_confidence() {
        let mut numbers = Numbers(23);
        let mut right = vec![(0, 0); DAMAGES.len()];
        let mut wrong = Vec::new();
        for (scenario, evidence) in recorded() {
            let Truth::Hang { culprits, .. } = &scenario.truth else { continue };
            for (damage, right) in DAMAGES.iter().zip(&mut right) {
                let mut other = evidence.clone();
                (damage.apply)(&mut other, &mut numbers);
                let reported = reported(&other);
                right.0 += usize::from(reported.culprits == *culprits);
                right.1 += 1;
                if reported.accuses_wrongly(&scenario.truth) {
                    wrong.push(format!("{} with {}: {}", scenario.name, damage.name, reported.sentence));
                }
            }
        }
        assert!(wrong.is_empty(), "{} of them:\n{}", wrong.len(), wrong.join("\n"));
        println!("culprits right, of all, by damage: {right:?}");
        for (right, all) in &right[..HARMLESS] {
            assert!(right * 100 >= all * 95, "{right} of {all}");
        }
    }

    #[test]
    fn ranks_of_other_numbers_and_damaged_evidence_are_judged_without_a_confident_mistake() {
        let hangs = hangs().expect("recorded evidence");
        let judged = judge_many(&hangs, hangs.len() * VARIANTS / 2, 2);
        assert!(judged.wrong.is_empty(), "{judged}");
        assert!(judged.high * 4 > judged.all, "{judged}");
        let programs = programs().expect("recorded evidence");
        let judged = judge_many(&programs, programs.len() * VARIANTS / 2, 2);
        assert!(judged.wrong.is_empty(), "{judged}");
    }

    #[test]
    fn without_some_stacks_and_records_nobody_is_accused_wrongly_with_high_confidence() {
        let mut numbers = Numbers(11);
        let (mut right, mut all) = (0, 0);
        for (scenario, evidence) in recorded() {
            let Truth::Hang { culprits, .. } = &scenario.truth else { continue };
            for _ in 0..VARIANTS {
                let mut other = evidence.clone();
                // One in eight, rounded randomly so that the average is right if the world size is
                // not a multiple of eight.
                let missing = other.ranks.len() / 8 + usize::from(numbers.below(8) < other.ranks.len() % 8);
                for _ in 0..missing {
                    let index = numbers.below(other.ranks.len());
                    let rank = &mut other.ranks[index];
                    rank.host = None;
                    // Half of the time the rank could not be reached at all.
                    if numbers.below(2) == 0 {
                        rank.flight = None;
                    }
                }
                let reported = reported(&other);
                all += 1;
                right += usize::from(reported.culprits == *culprits);
                assert!(!reported.accuses_wrongly(&scenario.truth), "{}: {}", scenario.name, reported.sentence);
            }
        }
        println!("culprits right in {right} of {all}");
        assert!(right * 100 >= all * 85, "culprits right in {right} of {all}");
    }
}
