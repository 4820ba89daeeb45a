//! What a node delivers to the cluster collector: its part of an incident as trees and condensed
//! evidence, and the files on request.

use std::{fs::File, io::Read, path::Path};

use tracing::{info, warn};
use xpu_timer_proto::v1::{Delivery, DumpFile, NodeDump, RankRun, delivery::Message};

use crate::{
    incident::{
        folder::rank_of,
        part::{CHUNK_BYTES, Kept, pieces},
    },
    node::link::Delivering,
};

/// Sends a part. Blocks while the cluster is slow, and returns when the stream ends.
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

/// Sends the `.stacktrace` files of some ranks in pieces.
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
    // This fails when the stream has ended; then nobody waits for it either.
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
