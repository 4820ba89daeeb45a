//! What a node delivers to the cluster collector: its part of an incident as trees and condensed evidence, and on request the files.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use tracing::{info, warn};
use xpu_timer_analysis::{condense, folded, prefix_tree::PrefixTree};
use xpu_timer_proto::{
    Message as _, lenient,
    server::Stacktrace,
    v1::{Delivery, DumpFile, NodeDump, RankEvidence, RankRun, StackTree, delivery::Message},
};

use crate::incident::part::CHUNK_BYTES;
use crate::incident::folder::rank_of;
use crate::incident::part::Kept;
use crate::incident::part::pieces;
use crate::node::link::Delivering;

/// Sends a part; blocks while the cluster is slow. Returns when the stream ends.
pub fn deliver(incident: &str, kept: &Kept, sender: &Delivering) {
    let part = kept.read().unwrap_or_else(|problem| {
        warn!("incident {incident}: {problem}");
        NodeDump { incident: incident.into(), errors: vec![problem], ..Default::default() }
    });
    info!("incident {incident}: its part is on its way");
    for piece in pieces(part) {
        if sender.blocking_send(Delivery { message: Some(Message::Dump(piece)) }).is_err() {
            return;
        }
    }
}

/// Sends the `.stacktrace` files of some ranks, piece by piece.
pub fn send_files(incident: &str, folder: &Path, ranks: &[RankRun], sender: &Delivering) {
    let send = |file: DumpFile| sender.blocking_send(Delivery { message: Some(Message::File(file)) }).is_ok();
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    info!("incident {incident}: files are on their way");
    for name in names {
        let asked = rank_of(&name).is_some_and(|rank| ranks.iter().any(|run| (run.first..=run.last).contains(&rank)));
        if asked && !send_file(incident, &folder.join(&name), &name, &send) {
            return;
        }
    }
    // It fails when the stream has ended: then nobody waits for it either.
    send(DumpFile { incident: incident.into(), ..Default::default() });
}

fn send_file(incident: &str, path: &Path, name: &str, send: &impl Fn(DumpFile) -> bool) -> bool {
    let Ok(mut file) = File::open(path) else { return true };
    loop {
        let mut data = Vec::with_capacity(CHUNK_BYTES);
        match file.by_ref().take(CHUNK_BYTES as u64).read_to_end(&mut data) {
            Err(error) => {
                warn!("{}: {error}", path.display());
                return true;
            }
            Ok(_) => {
                let last = data.len() < CHUNK_BYTES;
                if !send(DumpFile { incident: incident.into(), name: name.into(), data, last }) {
                    return false;
                }
                if last {
                    return true;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::server::{PstackFrame, PstackStacktrace};

    use super::*;

    #[test]
    fn a_part_is_divided_and_whole_again() {
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
        let whole = part.finish("1", vec!["e".into()]);
        let pieces = pieces(whole.clone());
        assert!(pieces.len() > 8 && pieces.iter().all(|piece| piece.encoded_len() < CHUNK_BYTES + 200_000));
        assert!(pieces.iter().rev().skip(1).all(|piece| !piece.last) && pieces[pieces.len() - 1].last);
        let ranks: Vec<u32> = pieces.iter().flat_map(|piece| &piece.ranks).map(|rank| rank.rank).collect();
        assert_eq!(ranks, (0..40).collect::<Vec<_>>());
        let last = pieces.len() - 1;
        assert_eq!((&pieces[last - 2].native, &pieces[last - 1].python), (&whole.native, &whole.python));
        assert_eq!(pieces[pieces.len() - 1].errors, ["e"]);
    }

    #[test]
    fn names_of_dumps() {
        assert_eq!(rank_of("00012-00064.stacktrace"), Some(12));
        assert_eq!(rank_of("100012-200000.stacktrace"), Some(100_012));
        for name in [
            "verdict.json",
            "1-2.stacktrace",
            "00001.stacktrace",
            "../00001-00002.stacktrace",
            "0000a-00002.stacktrace",
        ] {
            assert_eq!(rank_of(name), None, "{name}");
        }
    }
}
