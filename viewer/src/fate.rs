//! What became of the ranks that have no dump, or whose process is gone: from `evidence.bin` of an incident, else from its
//! verdict. Of a folder that holds neither, only who is absent is known.

use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use xpu_timer_analysis::Verdict;
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::lenient;
use xpu_timer_proto::printable::line;
use xpu_timer_proto::v1::{Evidence, Presence};

/// How a rank is absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    /// Its process is gone.
    Dead,
    /// It ended in order, or was scaled down.
    Left,
    /// There is no dump of it.
    NoDump,
}

impl How {
    /// For people, at the beginning of a line.
    pub fn words(self) -> &'static str {
        match self {
            How::Dead => "Dead",
            How::Left => "Left in order",
            How::NoDump => "Without a dump",
        }
    }

    fn of(presence: &str) -> How {
        match presence {
            "dead" => How::Dead,
            "left" => How::Left,
            _ => How::NoDump,
        }
    }
}

/// Ranks of which the same is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fate {
    /// How they are absent.
    pub how: How,
    /// They.
    pub ranks: RankSet,
    /// Host or pod; empty when unknown.
    pub node: String,
    /// How the processes ended, and why there is no dump; empty when unknown.
    pub why: String,
}

/// The fates of a job, the dead first; and what is odd about `evidence.bin`, if anything.
pub fn fates(folder: &Path, verdict: Option<&Verdict>, with_dump: &RankSet, world: u32) -> (Vec<Fate>, Option<String>) {
    let (evidence, note) = match crate::folder::read(&folder.join("evidence.bin")) {
        Ok(bytes) => match lenient::decode::<Evidence>(&bytes) {
            Ok(evidence) => (evidence, None),
            Err(error) => (Evidence::default(), Some(format!("evidence.bin is left out: {error}"))),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => (Evidence::default(), None),
        Err(error) => (Evidence::default(), Some(format!("evidence.bin is left out: {error}"))),
    };
    let mut known = RankSet::new();
    let mut fates: BTreeMap<(How, String, String), RankSet> = BTreeMap::new();
    let mut put = |rank: u32, how: How, node: &str, why: Vec<&str>| {
        if known.insert(rank) && (how != How::NoDump || !with_dump.contains(rank)) {
            let why = why.into_iter().filter(|why| !why.is_empty()).collect::<Vec<_>>().join("; ");
            fates.entry((how, line(node).into_owned(), line(&why).into_owned())).or_default().insert(rank);
        }
    };
    for rank in &evidence.ranks {
        let how = match rank.presence() {
            Presence::Dead => How::Dead,
            Presence::Left => How::Left,
            _ => How::NoDump,
        };
        let why = [rank.exit.as_str()].into_iter().chain(rank.errors.iter().map(String::as_str));
        put(rank.rank, how, &rank.node, why.collect());
    }
    for group in verdict.into_iter().flat_map(|verdict| &verdict.ranks) {
        for &rank in &group.ranks {
            put(rank, How::of(&group.presence), "", group.errors.iter().map(String::as_str).collect());
        }
    }
    known.union_with(with_dump);
    let unknown = known.complement(world);
    if !unknown.is_empty() {
        fates.entry((How::NoDump, String::new(), String::new())).or_default().union_with(&unknown);
    }
    let mut fates: Vec<Fate> =
        fates.into_iter().map(|((how, node, why), ranks)| Fate { how, ranks, node, why }).collect();
    fates.sort_by(|a, b| a.how.cmp(&b.how).then_with(|| a.ranks.first().cmp(&b.ranks.first())));
    (fates, note)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use xpu_timer_analysis::judge;
    use xpu_timer_proto::Message;
    use xpu_timer_proto::v1::RankEvidence;

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

    fn told(folder: &Path, verdict: Option<&Verdict>) -> Vec<String> {
        // Rank 1 died after its dump was taken.
        let (fates, _) = fates(folder, verdict, &RankSet::from_iter([0, 1]), 8);
        let line = |fate: Fate| format!("{:?} {} [{}] {}", fate.how, fate.ranks, fate.node, fate.why);
        fates.into_iter().map(line).collect()
    }

    #[test]
    fn everything_that_is_known_is_told_once() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(told(dir.path(), None), ["NoDump 2-7 [] "]);
        let verdict = judge(&evidence());
        assert_eq!(
            told(dir.path(), Some(&verdict)),
            ["Dead 1 [] the process is gone", "Left 4 [] ", "NoDump 2-3 [] permission denied", "NoDump 5-7 [] "]
        );
        fs::write(dir.path().join("evidence.bin"), evidence().encode_to_vec()).unwrap();
        assert_eq!(
            told(dir.path(), Some(&verdict)),
            [
                "Dead 1 [node-0] killed by SIGKILL; the process is gone",
                "Left 4 [node-1] exit code 0",
                "NoDump 2-3 [node-0] permission denied",
                "NoDump 5-7 [] "
            ]
        );
        fs::write(dir.path().join("evidence.bin"), "junk").unwrap();
        let note = fates(dir.path(), None, &RankSet::new(), 1).1;
        assert!(note.is_some_and(|note| note.starts_with("evidence.bin is left out: ")));
    }
}
