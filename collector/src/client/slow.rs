//! `xpu_timer_collector incidents slow`: lists the slow ranks, and finds which part of the step of
//! each is longer than that of its peers. It compares the recorded operations of both.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};
use serde_json::{Value, json};
use xpu_timer_analysis::step_parts::{Longer, RankOperations, longer};
use xpu_timer_proto::{
    printable,
    timeline::{self, Reader},
};

use crate::{
    client::{incidents::Remote, timeline::fetch_rank},
    http::questions::WantedTimeline,
};

/// Slow ranks that are explained; the slowest of each job come first.
const MOST_EXPLAINED: usize = 8;
/// A larger timeline of a rank is not read.
const MOST_BYTES: usize = 256 << 20;

/// The operations to compare.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// The window.
    pub window: Duration,
    /// First record every kernel for the length of the window.
    pub detail: bool,
}

/// The slow ranks with the parts of their steps that are longer, one per paragraph; empty if there
/// are none. As JSON, with the same fields as `/slow_ranks` and `longer`.
///
/// # Errors
/// If the collector does not answer.
pub(crate) fn explained(remote: &Remote, wanted: Wanted, as_json: bool) -> Result<String> {
    let mut list = remote.slow_list()?;
    let mut timelines = Timelines { remote, wanted, recording: HashMap::new(), ranks: HashMap::new() };
    let mut text = String::new();
    for (place, slow) in list.iter_mut().enumerate() {
        text.push_str(&Remote::slow_line(slow));
        if place >= MOST_EXPLAINED {
            continue;
        }
        match timelines.explain(slow) {
            Ok(parts) if parts.is_empty() => {
                text.push_str("    no part of its step is longer than that of its peers\n")
            }
            Ok(parts) => {
                parts
                    .iter()
                    .for_each(|part| text.push_str(&format!("    longer: {}\n", printable::line(&part.to_string()))));
                slow["longer"] = json!(parts);
            }
            Err(error) => {
                let why = format!("{error:#}");
                text.push_str(&format!(
                    "    which part of its step is longer is not known: {}\n",
                    printable::line(&why)
                ));
                slow["longer_unknown"] = json!(why);
            }
        }
    }
    Ok(if as_json { format!("{:#}\n", Value::Array(list)) } else { text })
}

/// The timelines that were fetched.
struct Timelines<'a> {
    remote: &'a Remote,
    wanted: Wanted,
    // Since when every kernel of a job is recorded.
    recording: HashMap<String, Instant>,
    ranks: HashMap<(String, u32), RankOperations>,
}

impl Timelines<'_> {
    fn explain(&mut self, slow: &Value) -> Result<Vec<Longer>> {
        let job = slow["job"].as_str().unwrap_or_default();
        let number = |value: &Value| value.as_u64().and_then(|rank| u32::try_from(rank).ok());
        let rank = number(&slow["rank"]).ok_or_else(|| anyhow!("the collector names no rank"))?;
        let communicator =
            slow["communicator"].as_str().and_then(|id| u64::from_str_radix(id.strip_prefix("0x")?, 16).ok());
        let communicator = communicator.ok_or_else(|| anyhow!("the collector names no communicator"))?;
        let peers: Vec<u32> = slow["peers"].as_array().into_iter().flatten().filter_map(number).collect();
        self.fetch(job, rank)?;
        let mut problem = None;
        for peer in &peers {
            if let Err(error) = self.fetch(job, *peer) {
                problem = Some(error.context(format!("rank {peer}")));
            }
        }
        let of = |rank: &u32| self.ranks.get(&(job.to_string(), *rank));
        let own = of(&rank).ok_or_else(|| anyhow!("it has no timeline"))?;
        let others: Vec<&RankOperations> = peers.iter().filter_map(of).collect();
        let compared = longer(own, &others, communicator);
        compared
            .ok_or_else(|| problem.unwrap_or_else(|| anyhow!("it has no recent collective in common with its peers")))
    }

    fn fetch(&mut self, job: &str, rank: u32) -> Result<()> {
        let key = (job.to_string(), rank);
        if self.ranks.contains_key(&key) {
            return Ok(());
        }
        // The first request makes all ranks of the job record. Then the others have recorded, too.
        let detail = self.wanted.detail && !self.recording.contains_key(job);
        let since = *self.recording.entry(job.to_string()).or_insert_with(Instant::now);
        let window = if self.wanted.detail && !detail { since.elapsed() } else { self.wanted.window };
        let wanted = WantedTimeline {
            job: Some(job.to_string()),
            ranks: Some([rank].into_iter().collect()),
            window,
            detail,
            recording: None,
        };
        let file = fetch_rank(self.remote, &wanted, MOST_BYTES)?;
        let mut reader = Reader::new(&file[..])?;
        let mut operations = RankOperations::new(rank, &reader.head.communicators);
        while let Some(block) = reader.next_block()? {
            timeline::times(&block)?.for_each(|times| operations.add(&block.shapes[times.shape as usize], &times));
        }
        self.ranks.insert(key, operations);
        Ok(())
    }
}
