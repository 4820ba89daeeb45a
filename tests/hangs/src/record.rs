//! The evidence of every scenario as a small file, so that the judge can be tested without
//! processes.
//!
//! A file contains the condensed evidence: host facts in place of stacks, and the newest operations
//! of each flight record. All files are in one archive.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::Result;
use xpu_timer_analysis::condense;
use xpu_timer_proto::Message;
use xpu_timer_tests::{read_archive, tree, write_archive};

use crate::{folder, scenario::Scenario};

/// Number of completed operations of each rank that are kept.
const OPERATIONS: usize = 96;

/// The archive with the recorded evidence of all scenarios, one file each.
fn archive() -> PathBuf {
    tree().join("tests/hangs/recorded.zip")
}

/// The name of a scenario's file in the archive.
fn name(scenario: &Scenario) -> String {
    format!("{}.pb", scenario.name)
}

/// Records the evidence of incident folders for their scenarios. Other scenarios keep theirs.
pub fn write(incidents: &[(Scenario, PathBuf)]) -> Result<()> {
    let mut files = if archive().exists() { read_archive(&archive())? } else { BTreeMap::new() };
    for (scenario, incident) in incidents {
        let mut evidence = folder::evidence(incident)?;
        evidence.ranks = evidence.ranks.iter().map(|rank| condense(rank, OPERATIONS)).collect();
        files.insert(name(scenario), evidence.encode_to_vec());
    }
    write_archive(&archive(), &files)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use xpu_timer_analysis::{Cause, HangEvidence, judge};
    use xpu_timer_proto::{server::Library, v1::Evidence};

    use super::*;
    use crate::{corpus, scenario::Truth, score::Reported};

    /// Maximum length of a sentence. Longer ones repeat something.
    const MOST_LETTERS: usize = 300;

    /// Number of variants of each recorded job.
    const VARIANTS: u64 = 24;

    fn recorded() -> Vec<(Scenario, Evidence)> {
        let hangs = corpus::matching(None).expect("scenarios").into_iter();
        let hangs: Vec<Scenario> = hangs.filter(|scenario| matches!(scenario.truth, Truth::Hang { .. })).collect();
        assert!(hangs.len() >= 60, "the corpus has at least 60 hangs");
        let files = read_archive(&archive()).expect("the recorded evidence");
        let evidence = |scenario: &Scenario| {
            let bytes = files.get(&name(scenario)).expect("every hang of the corpus has recorded evidence");
            Evidence::decode(&bytes[..]).expect("recorded evidence")
        };
        hangs
            .into_iter()
            .map(|scenario| {
                let evidence = evidence(&scenario);
                (scenario, evidence)
            })
            .collect()
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

    /// Pseudorandom numbers, equal in every run.
    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, limit: usize) -> usize {
            // SplitMix64.
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = self.0;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((mixed ^ (mixed >> 31)) % limit as u64) as usize
        }

        fn permutation(&mut self, length: usize) -> Vec<u32> {
            let mut order: Vec<u32> = (0..length as u32).collect();
            for index in (1..length).rev() {
                order.swap(index, self.below(index + 1));
            }
            order
        }
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
    fn ranks_of_other_numbers_that_arrive_in_another_order_are_judged_alike() {
        let mut numbers = Numbers(7);
        for (scenario, evidence) in recorded() {
            let right = reported(&evidence);
            for _ in 0..VARIANTS {
                let new = numbers.permutation(evidence.world_size as usize);
                let mut other = evidence.clone();
                for rank in &mut other.ranks {
                    rank.rank = new[rank.rank as usize];
                    if let Some(info) = rank.flight.as_mut().and_then(|flight| flight.rank.as_mut()) {
                        info.rank = rank.rank as i32;
                    }
                }
                if let Some(trigger) = other.trigger.as_mut().filter(|trigger| trigger.rank >= 0) {
                    trigger.rank = new[trigger.rank as usize] as i32;
                }
                let order = numbers.permutation(other.ranks.len());
                other.ranks = order.iter().map(|index| other.ranks[*index as usize].clone()).collect();
                let moved: BTreeSet<u32> = right.culprits.iter().map(|rank| new[*rank as usize]).collect();
                let reported = reported(&other);
                assert_eq!(
                    (reported.cause.as_str(), reported.culprits, reported.confidence.as_str()),
                    (right.cause.as_str(), moved.into_iter().collect(), right.confidence.as_str()),
                    "{}: {}",
                    scenario.name,
                    reported.sentence
                );
            }
        }
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

    /// Damages evidence in one of the ways in which real evidence is incomplete.
    fn damage(evidence: &mut Evidence, how: usize, numbers: &mut Numbers) {
        for rank in &mut evidence.ranks {
            let unlucky = numbers.below(4) == 0;
            match (how, &mut rank.host) {
                // Python could not be read on any rank.
                (0, Some(host)) => (host.python, host.python_function) = (None, None),
                // No rank has a second sample.
                (1, Some(host)) => {
                    (host.moved, host.d_sleep, host.gil_holder, host.same_in_both) = (None, None, None, true)
                }
                // Some ranks have no flight record, others no stack.
                (2, _) if unlucky => rank.flight = None,
                (3, _) if unlucky => rank.host = None,
                // Rings were overrun: only the newest operations are left, and the counters show
                // that there were more.
                (4, _) => {
                    if let Some(flight) = &mut rank.flight {
                        let old = flight.operations.len().saturating_sub(6);
                        flight.operations.drain(..old);
                        flight.health.get_or_insert_default().dropped = old as u64;
                    }
                }
                // Every rank is on a different machine, whose clock differs by hours.
                (5, _) => {
                    rank.node = format!("node-{}", rank.rank);
                    let skew = numbers.below(10_000) as u64 * 1_000_000_000;
                    if let Some(flight) = &mut rank.flight {
                        if let Some(info) = &mut flight.rank {
                            info.node.clone_from(&rank.node);
                        }
                        flight.read_ns += skew;
                        if let Some(health) = flight.health.as_mut().filter(|health| health.heartbeat_ns > 0) {
                            health.heartbeat_ns += skew;
                        }
                        for operation in &mut flight.operations {
                            let times = [
                                &mut operation.entered_ns,
                                &mut operation.returned_ns,
                                &mut operation.started_ns,
                                &mut operation.completed_ns,
                            ];
                            times.into_iter().filter(|time| **time > 0).for_each(|time| *time += skew);
                        }
                    }
                }
                // No stack and no flight record.
                (6, _) => rank.host = None,
                (7, _) => rank.flight = None,
                _ => {}
            }
        }
    }

    #[test]
    fn whatever_is_missing_nobody_is_accused_wrongly_with_high_confidence() {
        const WAYS: usize = 8;
        let mut numbers = Numbers(23);
        let mut right = [(0, 0); WAYS];
        let mut wrong = Vec::new();
        for (scenario, evidence) in recorded() {
            let Truth::Hang { culprits, .. } = &scenario.truth else { continue };
            for (how, right) in right.iter_mut().enumerate() {
                // Only these are random.
                let times = if matches!(how, 2 | 3) { 6 } else { 1 };
                for _ in 0..times {
                    let mut other = evidence.clone();
                    damage(&mut other, how, &mut numbers);
                    let reported = reported(&other);
                    right.0 += usize::from(reported.culprits == *culprits);
                    right.1 += 1;
                    if reported.accuses_wrongly(&scenario.truth) {
                        wrong.push(format!("{} damaged in way {how}: {}", scenario.name, reported.sentence));
                    }
                }
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        println!("culprits right, of all, by damage: {right:?}");
        // A different clock and a missing second sample do not change the evidence for a culprit.
        for how in [0, 5] {
            assert!(right[how].0 * 100 >= right[how].1 * 95, "{right:?}");
        }
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
