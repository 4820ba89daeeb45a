//! A node's part of an incident of a job: merged trees and condensed evidence, and the messages
//! that carry it to the cluster collector.

use std::{io, path::PathBuf};

use xpu_timer_analysis::{Verdict, condense, condense_process, folded, prefix_tree::PrefixTree};
use xpu_timer_proto::{
    DecodeError, Message as _, lenient,
    server::Stacktrace,
    v1::{NodeDump, ProcessEvidence, RankEvidence},
};

/// The node's part in its incident folder, where it survives a restart of either collector.
pub const PART: &str = "node_dump.bin";
/// Up to this number of ranks, all `.stacktrace` files of a job are fetched. In larger jobs, only
/// those of the culprits and of some others.
pub const ALL_FILES: usize = 1024;
/// Target size of a message. The cluster collector refuses messages larger than
/// [`MAX_MESSAGE_BYTES`].
pub(crate) const CHUNK_BYTES: usize = 512 * 1024;
/// Maximum message size that the cluster collector accepts: a tree is not split.
pub const MAX_MESSAGE_BYTES: usize = 16 * 1024 * 1024;

/// In a job beyond [`ALL_FILES`] ranks: number of culprits, and of groups, whose files are kept.
const SOME_FILES: usize = 16;

/// The ranks whose files are kept in a job beyond [`ALL_FILES`] ranks: culprits, and one rank of
/// each group.
#[must_use]
pub fn some_ranks(verdict: &Verdict) -> Vec<u32> {
    let culprits = verdict.culprits.iter().take(SOME_FILES);
    culprits.chain(verdict.ranks.iter().filter_map(|group| group.ranks.first()).take(SOME_FILES)).copied().collect()
}

/// Merges the dumps of a node, one by one.
#[derive(Debug, Default)]
pub struct Part {
    native: PrefixTree,
    python: PrefixTree,
    ranks: Vec<Vec<u8>>,
    processes: Vec<ProcessEvidence>,
}

impl Part {
    /// Adds one rank: its file, and its evidence with the newest `operations`.
    pub fn add(&mut self, file: &Stacktrace, evidence: &RankEvidence, operations: usize) {
        folded::insert_native(&mut self.native, file, evidence.rank);
        folded::insert_python(&mut self.python, file, evidence.rank);
        self.ranks.push(condense(evidence, operations).encode_to_vec());
    }

    /// Adds the processes that are not ranks.
    pub fn add_processes(&mut self, processes: &[ProcessEvidence]) {
        self.processes.extend(processes.iter().map(condense_process));
    }

    /// Returns the merged part as one message.
    #[must_use]
    pub fn finish(self, incident: &str, errors: Vec<String>) -> NodeDump {
        NodeDump {
            incident: incident.into(),
            native: self.native.to_message().encode_to_vec(),
            python: self.python.to_message().encode_to_vec(),
            ranks: self.ranks,
            processes: self.processes,
            last: true,
            errors,
        }
    }
}

/// Why a node's part cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PartError {
    #[error("{}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{}", path.display())]
    Decode {
        path: PathBuf,
        #[source]
        source: DecodeError,
    },
}

/// Location of a node's part.
#[derive(Debug, Clone)]
pub enum PartLocation {
    /// In its folder.
    InFolder(PathBuf),
    /// In memory, because no folder could be made.
    InMemory(Box<NodeDump>),
}

impl PartLocation {
    pub(crate) fn read(&self) -> Result<NodeDump, PartError> {
        match self {
            PartLocation::InMemory(part) => Ok((**part).clone()),
            PartLocation::InFolder(folder) => {
                let path = folder.join(PART);
                let bytes = match std::fs::read(&path) {
                    Ok(bytes) => bytes,
                    Err(source) => return Err(PartError::Read { path, source }),
                };
                lenient::decode(&bytes).map_err(|source| PartError::Decode { path, source })
            }
        }
    }
}

/// Splits a part into messages that the cluster collector accepts.
#[must_use]
pub fn pieces(part: NodeDump) -> Vec<NodeDump> {
    let NodeDump { incident, native, python, ranks, processes, mut errors, .. } = part;
    let empty = || NodeDump { incident: incident.clone(), ..Default::default() };
    let mut pieces = Vec::new();
    let mut fits = |tree: Vec<u8>, name: &str| {
        if tree.len() < MAX_MESSAGE_BYTES {
            return tree;
        }
        errors.push(format!("its {name} stacks are too large to be sent: {} MB", tree.len() / 1_000_000));
        Vec::new()
    };
    // The ranks come first: the cluster collector accepts only trees of ranks that it knows to be
    // on this node.
    let trees = [
        NodeDump { native: fits(native, "native"), ..empty() },
        NodeDump { python: fits(python, "Python"), ..empty() },
    ];
    let mut bytes = 0;
    let mut chunk = empty();
    for rank in ranks {
        bytes += rank.len();
        chunk.ranks.push(rank);
        if bytes >= CHUNK_BYTES {
            pieces.push(std::mem::replace(&mut chunk, empty()));
            bytes = 0;
        }
    }
    pieces.push(chunk);
    pieces.extend(trees);
    pieces.push(NodeDump { last: true, errors, processes, ..empty() });
    pieces
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::server::{PstackFrame, PstackStacktrace};

    use super::*;

    #[test]
    fn a_split_part_can_be_reassembled() {
        let frames = vec![PstackFrame { func_name: "f".into(), ..Default::default() }];
        let file = Stacktrace {
            stacktrace: vec![PstackStacktrace { frames, ..Default::default() }],
            process_state: "S (sleeping)".into(),
            ..Default::default()
        };
        let mut part = Part::default();
        for rank in 0..40 {
            let errors = vec!["x".repeat(100_000)];
            part.add(&file, &RankEvidence { rank, errors, ..Default::default() }, 16);
        }
        let complete = part.finish("1", vec!["e".into()]);
        let pieces = pieces(complete.clone());
        assert!(pieces.len() > 8 && pieces.iter().all(|piece| piece.encoded_len() < CHUNK_BYTES + 200_000));
        assert!(pieces.iter().rev().skip(1).all(|piece| !piece.last) && pieces[pieces.len() - 1].last);
        let decoded = |rank: &Vec<u8>| RankEvidence::decode(&rank[..]).unwrap();
        let ranks: Vec<u32> = pieces.iter().flat_map(|piece| &piece.ranks).map(|rank| decoded(rank).rank).collect();
        assert_eq!(ranks, (0..40).collect::<Vec<_>>());
        let last = pieces.len() - 1;
        assert_eq!((&pieces[last - 2].native, &pieces[last - 1].python), (&complete.native, &complete.python));
        assert_eq!(pieces[pieces.len() - 1].errors, ["e"]);
    }
}
