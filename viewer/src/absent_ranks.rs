//! Ranks without a dump, and ranks whose process has ended. The reasons come from `evidence.bin` of
//! an incident, else from its verdict. For a folder without both files, only the missing ranks are
//! known.

use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use xpu_timer_analysis::Verdict;
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::lenient;
use xpu_timer_proto::printable::line;
use xpu_timer_proto::v1::{Presence, Presences};

/// Why a rank is absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Absence {
    /// Its process has ended.
    Dead,
    /// It ended normally, or was scaled down.
    Left,
    /// It has no dump.
    NoDump,
}

impl Absence {
    /// The text at the beginning of a line of the summary.
    pub fn label(self) -> &'static str {
        match self {
            Absence::Dead => "Dead",
            Absence::Left => "Exited normally",
            Absence::NoDump => "Without a dump",
        }
    }

    fn of(presence: &str) -> Absence {
        match presence {
            "dead" => Absence::Dead,
            "left" => Absence::Left,
            _ => Absence::NoDump,
        }
    }
}

/// Ranks that are absent for the same reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbsentRanks {
    /// Why they are absent.
    pub absence: Absence,
    /// The ranks.
    pub ranks: RankSet,
    /// Host or pod; empty when unknown.
    pub node: String,
    /// How the processes ended and why there is no dump; empty when unknown.
    pub why: String,
}

/// The absent ranks of a job, dead ones first, and a warning if `evidence.bin` cannot be used.
pub fn absent_ranks(
    folder: &Path,
    verdict: Option<&Verdict>,
    with_dump: &RankSet,
    world: u32,
) -> (Vec<AbsentRanks>, Option<String>) {
    let (evidence, note) = match crate::folder::read(&folder.join("evidence.bin")) {
        Ok(bytes) => match lenient::decode::<Presences>(&bytes) {
            Ok(evidence) => (evidence, None),
            Err(error) => (Presences::default(), Some(format!("evidence.bin is left out: {error}"))),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => (Presences::default(), None),
        Err(error) => (Presences::default(), Some(format!("evidence.bin is left out: {error}"))),
    };
    let mut known = RankSet::new();
    let mut absent: BTreeMap<(Absence, String, String), RankSet> = BTreeMap::new();
    let mut put = |rank: u32, absence: Absence, node: &str, why: Vec<&str>| {
        if known.insert(rank) && (absence != Absence::NoDump || !with_dump.contains(rank)) {
            let why = why.into_iter().filter(|why| !why.is_empty()).collect::<Vec<_>>().join("; ");
            absent.entry((absence, line(node).into_owned(), line(&why).into_owned())).or_default().insert(rank);
        }
    };
    for rank in &evidence.ranks {
        let absence = match rank.presence() {
            Presence::Dead => Absence::Dead,
            Presence::Left => Absence::Left,
            _ => Absence::NoDump,
        };
        let why = [rank.exit.as_str()].into_iter().chain(rank.errors.iter().map(String::as_str));
        put(rank.rank, absence, &rank.node, why.collect());
    }
    for group in verdict.into_iter().flat_map(|verdict| &verdict.ranks) {
        for &rank in &group.ranks {
            put(rank, Absence::of(&group.presence), "", group.errors.iter().map(String::as_str).collect());
        }
    }
    known.union_with(with_dump);
    let unknown = known.complement(world);
    if !unknown.is_empty() {
        absent.entry((Absence::NoDump, String::new(), String::new())).or_default().union_with(&unknown);
    }
    let mut absent: Vec<AbsentRanks> =
        absent.into_iter().map(|((absence, node, why), ranks)| AbsentRanks { absence, ranks, node, why }).collect();
    absent.sort_by(|a, b| a.absence.cmp(&b.absence).then_with(|| a.ranks.first().cmp(&b.ranks.first())));
    (absent, note)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use xpu_timer_analysis::judge;
    use xpu_timer_proto::Message;
    use xpu_timer_proto::v1::{Evidence, RankEvidence};

    fn evidence() -> Evidence {
        let rank = |rank, presence: Presence, exit: &str, error: &str| RankEvidence {
            rank,
            presence: presence.into(),
            node: format!("node-{}", rank / 4),
            exit: exit.into(),
            errors: if error.is_empty() { vec![] } else { vec![error.into()] },
            ..Default::default()
        };
        let ranks = vec![
            rank(0, Presence::Present, "", ""),
            rank(1, Presence::Dead, "killed by SIGKILL", "the process is gone"),
            rank(2, Presence::Present, "", "permission\ndenied"),
            rank(3, Presence::Present, "", "permission\ndenied"),
            rank(4, Presence::Left, "exit code 0", ""),
        ];
        Evidence { world_size: 8, ranks, ..Default::default() }
    }

    fn reasons(folder: &Path, verdict: Option<&Verdict>) -> Vec<String> {
        // Rank 1 died after its dump was taken.
        let (absent, _) = absent_ranks(folder, verdict, &RankSet::from_iter([0, 1]), 8);
        let line =
            |absent: AbsentRanks| format!("{:?} {} [{}] {}", absent.absence, absent.ranks, absent.node, absent.why);
        absent.into_iter().map(line).collect()
    }

    #[test]
    fn each_absent_rank_has_one_reason() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(reasons(dir.path(), None), ["NoDump 2-7 [] "]);
        let verdict = judge(&evidence());
        assert_eq!(
            reasons(dir.path(), Some(&verdict)),
            ["Dead 1 [] the process is gone", "Left 4 [] ", "NoDump 2-3 [] permission denied", "NoDump 5-7 [] "]
        );
        fs::write(dir.path().join("evidence.bin"), evidence().encode_to_vec()).unwrap();
        assert_eq!(
            reasons(dir.path(), Some(&verdict)),
            [
                "Dead 1 [node-0] killed by SIGKILL; the process is gone",
                "Left 4 [node-1] exit code 0",
                "NoDump 2-3 [node-0] permission denied",
                "NoDump 5-7 [] "
            ]
        );
        fs::write(dir.path().join("evidence.bin"), "junk").unwrap();
        let note = absent_ranks(dir.path(), None, &RankSet::new(), 1).1;
        assert!(note.is_some_and(|note| note.starts_with("evidence.bin is left out: ")));
    }
}
